"""What a host launches for a block of a model: the operators that a forward, its recomputation and a backward dispatch,
counted on the meta device. Views and empty memory launch nothing and are left out. A GPU that is done before the host
has launched the next operator waits for it, and each takes the host 5 to 10 us.

    python tests/count_launches.py [MODEL FLAG ...]

prints a line for each model. The numbers depend on the code alone. They are those of a run with --no-compile, all
blocks recomputed and a Gated DeltaNet that mixes whole rows; compiled parts launch fewer."""

import sys
from collections import Counter
from pathlib import Path

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
}
LAUNCHES_NOTHING = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "empty", "empty_like",
    "empty_strided", "expand", "flatten", "lift_fresh", "narrow", "new_empty", "permute", "reshape", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unsafe_split", "unsqueeze",
    "view", "view_as",
}


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


def launches_of(preset, flags, n_tokens, n_blocks):
    """Those of a step of a model with some of a preset's blocks."""
    args = train.parse_args(["--model", preset, "--random_init", "--no-compile", "--seq_len", str(n_tokens), *flags])
    args.precision = "mixed"
    config = lm.parse_config(data.PRESETS[preset] | {"num_hidden_layers": n_blocks}, preset)
    with lm.on_paper():
        model = train.model_on_paper(config, args, train.Blocks(n_blocks, segment=n_tokens))
        model.model.embed_tokens.weight.requires_grad_()  # as if another block were below the first
        with Launches() as launches:
            loss, _ = train.loss_of(model, train.batch_on_paper(args, n_tokens), args)
            loss.backward()
    return launches.counts


def launches_a_block(preset, flags, n_tokens):
    """{operator: how often} of four blocks, which are all kinds that a model has: those of eight without those of
    four."""
    counts = launches_of(preset, flags, n_tokens, 8)
    counts.subtract(launches_of(preset, flags, n_tokens, 4))
    return counts


def main(words):
    rows = {" ".join(words): 8192} if words else ROWS
    for row, n_tokens in rows.items():
        preset, *flags = row.split()
        counts = launches_a_block(preset, flags, n_tokens)
        most = ", ".join(f"{name} {n / 4:.0f}" for name, n in counts.most_common(6))
        print(f"{row}: {counts.total() / 4:.0f} operations a block, in rows of {n_tokens:,}; most: {most}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
