"""--compile: the same numbers, no graph breaks, no compilation after the first step, whatever documents a row holds.
Most of it runs under the backend "eager", which traces and guards like the default one and then calls the same kernels:
equal to the last bit, in a second. What Inductor makes of it is compared once, in a whole run."""

import functools
import itertools
import json
import os
import shutil
import warnings
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import (
    FAILED_TO_COMPILE, MOE, MUSE, QWEN35, SHAPE, curve, in_ci, on_ranks, random_model, ranks_that_print, start_ranks)
from test_model import build_random
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves

import data
import model as lm
import nf4
import train

CPU = torch.device("cpu")
STATS = torch._dynamo.utils.counters  # what has been compiled, and why a graph has ended early


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    STATS.clear()
    nf4.compiled_weight_in_pairs.cache_clear()
    nf4.CompiledOrPlain.failed.clear()


def n_graphs():
    return STATS["stats"]["unique_graphs"]


def trace_only(set_attribute=setattr):
    """The backend "eager" for all that is compiled. Compiled NF4 rounds exp() of a scale elsewhere than the plain
    dequantize() does (test_nf4.py compares both), so that one stands in."""

    def plain_weight_in_pairs(codes, scales, table, dtype):
        return nf4.dequantize(codes, scales, dtype).view(torch.int32)

    compile_eagerly = functools.partial(torch.compile, backend="eager")
    set_attribute(torch, "compile", compile_eagerly)
    set_attribute(nf4, "compiled_weight_in_pairs", lambda: plain_weight_in_pairs)


@pytest.fixture
def tracing(monkeypatch):
    trace_only(monkeypatch.setattr)


# ---------------------------------------------------------------- models, batches and what a step computes


def build(method, compiled=False, packing=True, checkpointing=False, tile=0, seq_len=0, precision="fp32", **shape):
    """A model with random weights, edited in the order in which train.py does it."""
    model = build_random(method, **shape)
    lm.set_precision_(model, precision)
    if compiled:
        lm.compile_(model, packing)
    if tile:
        lm.tile_mlp_(model, tile, seq_len)
    if checkpointing:
        for block in model.model.layers:
            lm.recompute_(block, has_dropout=model.dropout > 0)
    return model


class Batch(NamedTuple):
    """The arguments of Transformer.forward()."""

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    spans: lm.Spans
    supervised_S: torch.Tensor


def random_pairs(rows, length, n_cuts, generator):
    """(start, stop) of documents that fill some rows, each of which is cut at random places."""
    pairs = []
    for row in range(rows):
        cuts = torch.randint(1, length, (n_cuts,), generator=generator)
        ends = sorted({0, length, *cuts.tolist()})  # the same cut twice makes one document less
        first = row * length
        for start, stop in itertools.pairwise(ends):
            pairs.append((first + start, first + stop))
    return pairs


def packed_batches(rows=2, length=64):
    """Three batches of one shape, with other documents and another number of targets each time."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for number in range(3):
        tokens = torch.randint(4096, (rows, length), generator=generator)
        pairs = random_pairs(rows, length, number + 1, generator)
        positions = torch.cat([torch.arange(stop - start) for start, stop in pairs])
        n_targets = 40 + 7 * number
        places = torch.randperm(rows * length, generator=generator)
        batches.append(Batch(
            tokens=tokens,
            targets=tokens.roll(-1),  # also across documents, which changes nothing for a comparison
            positions=positions.view(rows, length),
            spans=lm.Spans(pairs),
            supervised_S=places[:n_targets].sort().values,
        ))
    return batches


def row_of(batch, row):
    """A row as its rank's piece of a batch under --sequence_parallel. The spans stay those of the whole batch."""
    length = batch.tokens.shape[1]
    is_in_row = batch.supervised_S // length == row
    return Batch(
        tokens=batch.tokens[[row]],
        targets=batch.targets[[row]],
        positions=batch.positions[[row]],
        spans=batch.spans,
        supervised_S=batch.supervised_S[is_in_row] % length,
    )


def gradients(model):
    """{name: this rank's rows of a gradient}."""
    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[name] = nf4.local(p.grad)[0].clone()
    return found


class Results(NamedTuple):
    """What three steps have computed, and how many graphs were compiled after each of them."""

    steps: list  # {name: tensor} of the loss and of all gradients
    n_graphs: list


def three_steps(model):
    results = Results([], [])
    for step, batch in enumerate(packed_batches()):
        torch.manual_seed(step)  # for dropout, as the loop does
        if model.sequence_group:  # of two ranks
            batch = row_of(batch, dist.get_rank())
        loss = model(*batch)
        loss.backward()
        results.steps.append({"loss": loss.detach(), **gradients(model)})
        results.n_graphs.append(n_graphs())
        model.zero_grad()
    return results


def check_same_bits(compiled, eager):
    """Compares the results of two models."""
    for got, expected in zip(compiled.steps, eager.steps, strict=True):
        assert got.keys() == expected.keys()
        for name in got:
            assert torch.equal(got[name], expected[name]), name


# ---------------------------------------------------------------- on one rank


QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
CASES = {  # name: method and what build() gets
    "full": ("full", {}),
    "full, tiles": ("full", {"tile": 16, "checkpointing": True}),
    "lora, biases": ("lora", {"precision": "mixed", **QWEN2}),
    "lora, dropout": ("lora", {"checkpointing": True, "dropout": 0.3}),
    # 128 tokens are two tiles of 48, and a third one of 32
    "lora, dropout, tiles": ("lora", {"checkpointing": True, "dropout": 0.3, "tile": 48}),
    "qlora": ("qlora", {"precision": "mixed", "checkpointing": True}),
    "qlora, experts": ("qlora", {"precision": "mixed", "checkpointing": True, **MOE}),
    "qlora, two kinds of blocks": ("qlora", {"checkpointing": True, **QWEN35}),
    # eight groups of key heads
    "qlora, groups": ("qlora", {
        "precision": "mixed", "checkpointing": True, "tile": 48, "seq_len": 1 << 20, "num_attention_heads": 16,
        "num_key_value_heads": 8}),
    "full, windows": ("full", {"checkpointing": True, **MUSE}),
    # a tile of 127 tokens and one of a single token
    "lora, rows of any length": ("lora", {"checkpointing": True, "tile": 127, "packing": False, **MOE}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_block_is_compiled_once_without_graph_breaks_and_computes_the_same(tracing, name):
    method, how = CASES[name]
    eager = three_steps(build(method, **how))
    model = build(method, compiled=True, **how)
    compiled = three_steps(model)
    check_same_bits(compiled, eager)
    assert not STATS["graph_break"]
    for module in model.modules():
        assert getattr(module, "fast", True)  # every NF4 layer dequantizes by torch.compile

    first, _, last = compiled.n_graphs
    assert first == last  # nothing is compiled after the first step
    # Two parts of a block and the loss. Each part is compiled again for the first block where the embedding is frozen
    # (its input needs no gradient), and a part that runs in tiles for the last tile, which is shorter.
    fewest = 2 + 1
    most = 2 + 2 + 2 + 1
    if "seq_len" in how:  # both parts run in tiles
        most += 2
    if {"packing", "layer_types"} & how.keys():  # rows of other lengths, or a second kind of block: all parts again
        most += 2 + 2 + 2
    assert fewest <= first <= most


@pytest.mark.parametrize("shape", [MOE, QWEN35], ids=["qwen3", "qwen35, a shared expert"])
def test_a_gpus_experts_are_compiled_up_to_their_last_product_and_compute_the_same(tracing, monkeypatch, shape):
    monkeypatch.setattr(lm, "fills_rows", lambda h: False)  # those of each expert up to a multiple, as a CPU does
    how = {"method": "qlora", "precision": "mixed", "checkpointing": True, **shape}
    eager = three_steps(build(**how))
    compiled = three_steps(build(compiled=True, **how))
    check_same_bits(compiled, eager)
    assert not STATS["graph_break"]
    first, _, last = compiled.n_graphs
    assert first == last
    # without experts: two parts of each kind of block, each again where the input needs no gradient, and the loss
    assert first > len(set(shape.get("layer_types", "x"))) * 2 + 2 + 1


def test_rows_of_other_lengths_compile_nothing_more(tracing):
    model = build("full", compiled=True, packing=False, num_hidden_layers=1)
    graphs_after = []
    for length in (24, 40, 56):  # 16 would be the size of a head, for which torch makes a graph of its own
        tokens = torch.arange(2 * length).view(2, length)
        model(tokens, tokens).backward()
        graphs_after.append(n_graphs())
    assert len(set(graphs_after)) == 1, graphs_after


def scaled(logits, targets, factor):
    return factor * F.cross_entropy(logits, targets, reduction="none")


# a loss with a setting, such as the coefficient of a z-loss, is likely to be a partial
DOUBLED = functools.partial(scaled, factor=2)


def doubled_and_halved(logits, targets):
    losses = scaled(logits, targets, 2)
    return losses, {"halved": losses / 4}


@pytest.mark.parametrize("loss", [DOUBLED, doubled_and_halved], ids=["a loss", "a loss and a metric"])
def test_a_loss_that_a_fork_puts_on_the_head_is_the_one_that_is_compiled(tracing, loss):
    plain = three_steps(build_random())
    model = build_random()
    model.lm_head.custom_loss = loss
    eager = three_steps(model)
    metrics = model.lm_head.metrics  # of the third step

    model = build_random()
    model.lm_head.custom_loss = loss
    lm.compile_(model, packing=True)
    compiled = three_steps(model)
    assert not nf4.CompiledOrPlain.failed
    check_same_bits(compiled, eager)
    assert model.lm_head.metrics == metrics
    assert set(metrics) == ({"halved"} if loss is doubled_and_halved else set())
    # the same bits could be those of the plain loss, in both
    assert compiled.steps[0]["loss"] == 2 * plain.steps[0]["loss"]


# ---------------------------------------------------------------- what cannot be compiled runs as it is


def without_compiler(graph, inputs):
    """A backend on a machine that has no C compiler."""
    raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable")


def compile_by(backend, set_attribute=setattr):
    set_attribute(torch, "compile", functools.partial(torch.compile, backend=backend))


def warnings_of(record):
    """What the warnings say that are about compilation."""
    texts = [str(warning.message) for warning in record]
    return [text for text in texts if text.startswith(FAILED_TO_COMPILE)]


def test_without_a_compiler_a_model_computes_as_an_eager_one_and_one_warning_says_so(monkeypatch):
    how = {"precision": "mixed", "checkpointing": True, **QWEN35}  # two kinds of blocks
    eager = three_steps(build("qlora", **how))
    compile_by(without_compiler, monkeypatch.setattr)
    with pytest.warns(UserWarning, match="failed on Block.qkv: RuntimeError: Failed to find C") as record:
        uncompiled = three_steps(build("qlora", compiled=True, **how))
    check_same_bits(uncompiled, eager)
    assert len(warnings_of(record)) == 1
    # each part of a block, the loss and dequantization have been tried once, and not again for each block
    assert set(nf4.CompiledOrPlain.failed) == {
        lm.Block.qkv, lm.Block.start_mlp, lm.GatedDeltaNet.before_scan, lm.GatedDeltaNet.after_scan,
        lm.cross_entropy_and_grad, nf4.weight_in_pairs}


def test_a_backward_that_cannot_be_compiled_is_known_in_the_forward(monkeypatch):
    eager = three_steps(build(checkpointing=True, method="lora"))
    no_backward = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=without_compiler)
    compile_by(no_backward, monkeypatch.setattr)
    with pytest.warns(UserWarning, match="Failed to find C"):
        uncompiled = three_steps(build(compiled=True, checkpointing=True, method="lora"))
    check_same_bits(uncompiled, eager)
    assert set(nf4.CompiledOrPlain.failed) == {lm.Block.qkv, lm.Block.start_mlp}  # the loss is compiled, and has none


def unsupported(logits, targets):
    """A fork's loss, which torch.compile does not take whole."""
    torch._dynamo.graph_break()
    return scaled(logits, targets, 1)


def test_one_part_that_cannot_be_compiled_leaves_the_others_compiled(tracing):
    model = build_random()
    model.lm_head.custom_loss = unsupported
    eager = three_steps(model)
    model = build("full", compiled=False)
    model.lm_head.custom_loss = unsupported
    lm.compile_(model, packing=True)
    with pytest.warns(UserWarning, match="failed on LMHead.masked_loss: Unsupported: "):
        compiled = three_steps(model)
    check_same_bits(compiled, eager)
    assert set(nf4.CompiledOrPlain.failed) == {lm.LMHead.masked_loss}
    assert n_graphs() >= 2  # both parts of a block


@pytest.mark.parametrize("error", [ValueError("the fork's own"), torch.OutOfMemoryError("CUDA out of memory.")])
def test_errors_of_what_is_compiled_are_raised(tracing, error):
    def wrong_loss(logits, targets):
        if not torch.compiler.is_compiling():
            raise error
        return scaled(logits, targets.view(-1, 12345), 1)  # fails while it is traced, too

    model = build_random()
    model.lm_head.custom_loss = wrong_loss
    lm.compile_(model, packing=True)
    with pytest.warns(UserWarning, match=FAILED_TO_COMPILE), pytest.raises(type(error), match=str(error)):
        three_steps(model)


def test_an_error_while_compiled_code_runs_is_raised_at_once(monkeypatch):
    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    compile_by(lambda graph, inputs: run_out, monkeypatch.setattr)
    with pytest.raises(torch.OutOfMemoryError):
        three_steps(build("full", compiled=True))
    assert not nf4.CompiledOrPlain.failed


def test_a_part_whose_gradients_are_compiled_is_not_switched(monkeypatch):
    """A recomputed block would save other tensors than its forward has saved."""
    n_compiled = 0

    def once(graph, inputs):
        nonlocal n_compiled
        n_compiled += 1
        return graph.forward if n_compiled == 1 else without_compiler(graph, inputs)

    compile_by(once, monkeypatch.setattr)
    twice = nf4.CompiledOrPlain(lambda x: 2 * x, dynamic=False)
    twice(torch.ones(3, requires_grad=True))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        twice(torch.ones(4, requires_grad=True))


def run_without_compiler(argv):
    compile_by(without_compiler)
    warnings.resetwarnings()  # start_rank() makes an error of it
    return train.launch(argv)


def test_a_run_goes_on_uncompiled_and_says_so_once(chats, tmp_path):
    model = random_model(tmp_path / "model", num_hidden_layers=2)
    argv = ["--model", model, "--random_init", "--data", chats, "--seq_len", 96, "--steps", 2, "--qlora", "--optim",
            "adamw8bit", "--save_every", 0, "--precision", "mixed", "--activation_checkpointing", "all"]
    eager, _ = curve(1, argv, tmp_path / "eager")
    out = tmp_path / "uncompiled"
    log = tmp_path / "log"
    words = [str(word) for word in [*argv, "--compile", "--out", out, "--log_every", 1]]
    assert start_ranks(1, run_without_compiler, (words,), [log]) == [0], log.read_text()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == eager  # the same operators
    said = log.read_text()
    assert said.count(FAILED_TO_COMPILE) == 1, said
    assert "Block.qkv" in said


# ---------------------------------------------------------------- the default


GPU = torch.device("cuda")


@pytest.fixture
def find_all(monkeypatch):
    """A GPU with all that --compile needs."""
    monkeypatch.setattr(train, "is_installed", lambda package: True)
    monkeypatch.setattr(train.shutil, "which", lambda command: f"/usr/bin/{command}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delenv("CC", raising=False)


def compiles(flags, device, preset="qwen3-0.6b"):
    config = lm.parse_config(data.PRESETS[preset])
    args = train.parse_args(["--precision", "mixed", *flags])
    train.resolve_for_model(args, config, {}, device)
    return args.compile


def test_a_gpu_compiles_a_model_that_is_large_enough(find_all):
    assert compiles([], GPU)
    assert compiles([], None)  # a plan is one for GPUs
    assert not compiles([], CPU)
    for device in (GPU, None, CPU):
        assert compiles(["--compile"], device)
        assert not compiles(["--no-compile"], device)
    small = lm.parse_config(SHAPE)
    assert not train.compiles_by_default(small, GPU)
    assert not train.compiles_by_default(small, None)


@pytest.mark.parametrize("lacks, words", [
    ("triton", "the package triton"),
    ("compiler", "a C compiler, gcc or clang"),
    ("capability", "a GPU of compute capability 7.0"),
])
def test_what_a_gpu_lacks_leaves_compilation_off_and_is_named(find_all, monkeypatch, capsys, lacks, words):
    if lacks == "triton":
        monkeypatch.setattr(train, "is_installed", lambda package: package != "triton")
    elif lacks == "compiler":
        monkeypatch.setattr(train.shutil, "which", lambda command: None)
    else:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert not compiles([], GPU)
    with pytest.raises(ValueError, match=f"--compile needs {words}.*Without --compile nothing is compiled"):
        compiles(["--compile"], GPU)

    args = train.parse_args(["--no-compile", "--lr", "1e-3"])
    ranks = ranks_that_print(device=GPU)
    config = lm.parse_config(SHAPE)
    train.say_notes(args, config, 100, ranks)
    assert "--compile" not in capsys.readouterr().out  # a short run
    train.say_notes(args, config, 1000, ranks)
    assert f"note: --compile needs {words}" in capsys.readouterr().out


def test_the_c_compiler_is_the_one_that_the_environment_names(find_all, monkeypatch):
    monkeypatch.setattr(train.shutil, "which", lambda command: "/usr/bin/gcc" if command == "gcc" else None)
    assert train.missing_for_compile(GPU) is None
    monkeypatch.setenv("CC", "icx")  # Triton looks at no other
    assert train.missing_for_compile(GPU) == "a C compiler, icx"


# ---------------------------------------------------------------- on several ranks


def build_sharded(compiled, checkpointing, group, shape):
    options = {"checkpointing": checkpointing, "precision": "mixed", **shape}
    model = build("qlora", compiled, **options)
    model.sequence_group = group
    train.shard_bytes_on_old_torch_()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.model.layers, model):  # the model last: it gets what no block has
        fully_shard(module, mp_policy=policy)
    return model


def check_compiled_shards(ranks, folder, checkpointing, shape):
    trace_only()
    group = dist.group.WORLD if checkpointing else None  # one case has --sequence_parallel 2, too
    eager = three_steps(build_sharded(False, checkpointing, group, shape))
    compiled = three_steps(build_sharded(True, checkpointing, group, shape))
    check_same_bits(compiled, eager)
    assert not STATS["graph_break"]


@pytest.mark.parametrize("checkpointing, shape", [
    (True, QWEN35),  # both kinds of blocks
    *in_ci((False, {"num_hidden_layers": 2})),
])
def test_compiled_shards_compute_the_same(tmp_path, checkpointing, shape):
    on_ranks(2, check_compiled_shards, tmp_path, checkpointing, shape)


# ---------------------------------------------------------------- Inductor


CXX = os.environ.get("CXX", "g++")  # as Inductor looks for it


@pytest.mark.skipif(shutil.which(CXX) is None, reason=f"Inductor needs a C++ compiler, and there is no {CXX}")
@pytest.mark.rounding
@pytest.mark.bf16
def test_a_compiled_run_learns_what_an_eager_one_does(chats, tmp_path):
    # Each kernel costs g++ two seconds. With matrices of one size fewer kernels differ, and where the embedding is
    # trained every block has a gradient of its input, so that all blocks share theirs.
    model = random_model(tmp_path / "model", num_hidden_layers=2, num_key_value_heads=4, intermediate_size=64)
    job = [
        "--model", model, "--random_init", "--precision", "mixed", "--train_embeddings",
        "--data", chats, "--seq_len", 96, "--batch_size", 2,
        "--steps", 4, "--lr", "1e-2",
        "--qlora", "--lora_rank", 5,
        # one layer with an adapter in each compiled part
        "--lora_targets", "v_proj", "gate_proj",
    ]
    compiled, _ = curve(1, [*job, "--compile"], tmp_path / "compiled")
    eager, _ = curve(1, job, tmp_path / "eager")
    # bf16: 3 significant digits of a sum over hundreds of tokens; random weights lose 0.2 in these steps
    assert compiled == pytest.approx(eager, abs=0.02)
    assert eager[0] - eager[-1] > 0.1  # else there would be nothing to compare


# ---------------------------------------------------------------- the memory plan


def inputs_of(part, model, n_tokens):
    """What a block, or its experts, hand to a compiled part, on the device of the model."""
    device = model.lm_head.weight.device
    new = functools.partial(
        torch.zeros, 1, n_tokens, dtype=model.compute_dtype, device=device, requires_grad=True)
    x = new(model.config.hidden_size)
    if part == "start_experts":
        return (x,)
    if part == "start_mlp":
        return x, new(model.model.layers[0].mixer.o_proj.in_features)
    return x, lm.rope_table(torch.zeros(1, n_tokens, dtype=torch.int64, device=device), model.config)


def part_of(model, part):
    block = model.model.layers[0]
    return getattr(block.mlp if part == "start_experts" else block, part)


def bytes_kept(part, config, args, n_tokens):
    """Of a block's compiled part: what it returns, and what torch's partitioner saves for its backward. The backend
    cuts the graph as Inductor does, and compiles no kernel."""
    model = lm.on_meta(config, args).to_empty(device="cpu")
    inputs = inputs_of(part, model, n_tokens)
    compiled = torch.compile(part_of(model, part), backend="aot_eager_decomp_partition")
    kept = []

    def keep(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = compiled(*inputs)
    kept += [t for t in tree_leaves(out) if t is not None]  # no gate, no shared expert
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    there_before = [*tree_leaves(inputs), *model.parameters()]
    for t in there_before:
        sizes.pop(t.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def bytes_planned(part, config, args, n_tokens):
    with train.kernels_on_paper() as live:
        model = lm.on_meta(config, args)
        lm.compile_(model, packing=True)
        inputs = inputs_of(part, model, n_tokens)
        before = live.alive
        out = part_of(model, part)(*inputs)
        n_bytes = live.alive - before
        del out  # alive until here
    return n_bytes


@pytest.mark.parametrize("part", ["qkv", "start_mlp"])
@pytest.mark.parametrize("flags", ["--precision mixed", "--precision bf16 --lora"])
@pytest.mark.parametrize("shape", [{}, MUSE, QWEN35], ids=["qwen3", "muse", "qwen35"])
def test_the_plan_keeps_what_torchs_partitioner_saves(shape, flags, part):
    config = lm.parse_config(SHAPE | shape)
    args = train.parse_args(flags.split())
    # equal to the byte with torch 2.11 to 2.14; a later partitioner may choose a little differently
    assert bytes_planned(part, config, args, 128) == pytest.approx(bytes_kept(part, config, args, 128), rel=0.02)


@pytest.mark.parametrize("flags", ["--precision mixed", "--precision bf16 --lora --lora_rank 8"])
@pytest.mark.parametrize("shape", [MOE, QWEN35], ids=["qwen3", "qwen35"])
def test_the_plan_keeps_what_torchs_partitioner_saves_of_experts(monkeypatch, shape, flags):
    monkeypatch.setattr(lm, "fills_rows", lambda h: False)  # as on a GPU
    # wide enough that a few numbers of each row, its router probability and its place, are below the bound
    test_the_plan_keeps_what_torchs_partitioner_saves(shape | {"hidden_size": 256}, flags, "start_experts")
