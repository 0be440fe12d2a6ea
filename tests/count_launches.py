"""What a host launches for a block of a model: the operators that a forward, its recomputation and a backward
dispatch. Views and empty memory launch nothing and are left out. A GPU that is done before the host has launched the
next operator waits for it, and each takes the host 5 to 10 us.

    python tests/count_launches.py [MODEL FLAG ...]

prints a line for each model: all blocks are recomputed, and a Gated DeltaNet mixes whole rows. The numbers depend on
the code alone. Operators are counted on the meta device, as they are without --compile. With --compile, which is a
GPU's default, a profiler counts those of a narrow model on the CPU, where a kernel that torch's compiler has fused
is one: half a minute for each."""

import argparse
import functools
import sys
from collections import Counter
from pathlib import Path

import torch
from torch._inductor.async_compile import AsyncCompile
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import data  # noqa: E402
import model as lm  # noqa: E402
import train  # noqa: E402

ROWS = {  # what is counted without arguments
    "llama-3.1-8b --lora": 8192,  # tokens of a row
    "llama-3.1-8b --qlora": 8192,
    "qwen3.5-9b --lora": 8192,
    "qwen3.5-9b --qlora": 8192,
    "qwen3-30b-a3b --lora": 4096,
    "qwen3-30b-a3b --qlora": 4096,
    # experts are compiled on a GPU alone, so 30b-a3b is not here
    "llama-3.1-8b --lora --compile": 8192,
    "qwen3.5-9b --lora --compile": 8192,
    "qwen3.5-9b --qlora --compile": 8192,
}
LAUNCHES_NOTHING = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "empty", "empty_like",
    "empty_strided", "expand", "flatten", "lift_fresh", "narrow", "new_empty", "permute", "reshape", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unsafe_split", "unsqueeze",
    "view", "view_as",
}
# A narrow model launches what a wide one does. A row has as many chunks as one of 8,192 tokens has on a GPU.
NARROW = {
    "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
NARROW_TOKENS = 512
N_CHUNKS = 64
FUSED = Counter()  # calls of compiled kernels


class Launches(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in LAUNCHES_NOTHING:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def config_of(preset, n_blocks, **others):
    return lm.parse_config(data.PRESETS[preset] | others | {"num_hidden_layers": n_blocks}, preset)


def parse(preset, flags, n_tokens):
    compiles = [] if "--compile" in flags else ["--no-compile"]
    args = train.parse_args(["--model", preset, "--random_init", *compiles, "--seq_len", str(n_tokens), *flags])
    args.precision = "mixed"  # as resolve_for_model() does
    args.lr = 1e-4
    return args


def launches_of(preset, flags, n_tokens, n_blocks):
    """Those of a step of a model with some of a preset's blocks."""
    args = parse(preset, flags, n_tokens)
    # all loops count
    train.ON_PAPER = [call for call in train.ON_PAPER if "chunk" not in call[1] and call[1] != "Tiles"]
    with train.kernels_on_paper():
        run = train.RunSpec(args, config_of(preset, n_blocks), 1, n_tokens)
        ranks = argparse.Namespace(world=1, rank=0, device=torch.device("meta"))
        blocks = train.policy_of(n_blocks, n_blocks, segment=n_tokens)
        model = train.build(lm.on_meta(run.config, args), run, blocks, ranks, lambda model: None).model
        model.model.embed_tokens.weight.requires_grad_()  # as if another block were below the first
        with Launches() as launches:
            loss, _ = train.loss_of(model, train.batch_on_paper(run), args)
            loss.backward()
    return launches.counts


def compiled_launches_of(preset, flags, _, n_blocks):
    """The same of a compiled step on the CPU. Its kernels do nothing but be counted: no C++ is compiled."""
    lm.chunk_length = lambda device: NARROW_TOKENS // N_CHUNKS
    AsyncCompile.cpp_pybinding = lambda *_: lambda *_: FUSED.update(["fused"])
    torch._inductor.config.cpp.vec_isa_ok = False  # plain C++ is written sooner
    torch._inductor.config.force_disable_caches = True
    args = parse(preset, flags, NARROW_TOKENS)
    model = lm.on_meta(config_of(preset, n_blocks, **NARROW), args).to_empty(device="cpu")
    model.tie_()
    lm.compile_(model, args.packing)
    train.wrap_blocks_(model, args, train.policy_of(n_blocks, n_blocks, segment=NARROW_TOKENS))
    model.model.embed_tokens.weight.requires_grad_()
    tokens = torch.zeros(1, NARROW_TOKENS, dtype=torch.int64)
    places = torch.arange(NARROW_TOKENS)
    spans = lm.Spans([(0, NARROW_TOKENS)], None, NARROW_TOKENS)
    batch = data.Batch(tokens, tokens, places[None], places, spans=spans, n_targets=[NARROW_TOKENS])

    def step():
        loss, _ = train.loss_of(model, batch, args)
        loss.backward()
        model.zero_grad()

    step()  # compiles
    FUSED.clear()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    counts = Counter(FUSED)
    for event in profiler.events():
        if event.cpu_parent is None:
            count_event(event, counts)
    return counts


def count_event(event, counts):
    """Of an operator that is made of others, these are counted."""
    name = event.name.removeprefix("aten::")
    if name == event.name or name in composites():
        for child in event.cpu_children:
            count_event(child, counts)
    elif name not in LAUNCHES_NOTHING:
        counts[name] += 1


@functools.cache
def composites():
    """The operators that come apart in front of the dispatch that Launches sees."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    return {name.removeprefix("aten::").split(".")[0] for name in names}


def launches_a_block(preset, flags, n_tokens):
    """{operator: how often} of four blocks, which are all kinds that a model has: those of eight without those of
    four."""
    count = compiled_launches_of if "--compile" in flags else launches_of
    counts = count(preset, flags, n_tokens, 8)
    counts.subtract(count(preset, flags, n_tokens, 4))
    return counts


def main(words):
    rows = {" ".join(words): 8192} if words else ROWS
    for row, n_tokens in rows.items():
        preset, *flags = row.split()
        counts = launches_a_block(preset, flags, n_tokens)
        most = ", ".join(f"{name} {n / 4:.0f}" for name, n in counts.most_common(6))
        print(f"{row}: {counts.total() / 4:.0f} operations a block, rows of {n_tokens:,}; most: {most}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
