"""Ranks, FSDP2 and its flags change nothing but where things are: same losses, same bytes, same exports."""

import copy
import filecmp
import functools
import itertools
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_harness import peak_growth
from bench_scale import counted
from conftest import (
    MOE, MUSE, QWEN35, SHAPE, build, check_same_gradients, check_same_weights, curve, documents_of, in_ci, losses,
    model_with_weights, norm_of_update, on_ranks, random_model, run_ranks, start_ranks)
from safetensors.torch import load_file, save_file

import data
import model as lm
import nf4
import train

MODELS = {
    # a first and a last block; all others have one between them
    "untied": {"num_hidden_layers": 2},
    "tied": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "moe": MOE,
    "qwen3.5": QWEN35 | {"linear_num_key_heads": 4, "linear_num_value_heads": 8},  # of each, some for four ranks
    "muse": MUSE,
}
METHODS = {  # no number of ranks divides the 5 rows of an adapter
    "full": "--lr 3e-3",
    "qlora": "--qlora --lora_rank 5 --lr 1e-2",
    "lora": "--lora --lora_rank 5 --lr 1e-2 --lora_targets o_proj gate_proj up_proj down_proj",
}
SPLITS = {  # twelve rows a step, for 1 to 4 ranks, or groups of ranks that share a row
    1: "--batch_size 4 --grad_accum 3".split(),
    2: "--batch_size 3 --grad_accum 2".split(),
    3: "--batch_size 2 --grad_accum 2".split(),
    4: "--batch_size 3 --grad_accum 1".split(),
}


@pytest.fixture(scope="module")
def settings(chats):
    """The flags of every run here, beside its model, method and split."""
    return ["--data", chats, "--seq_len", 96, "--steps", 2, "--precision", "fp32"]


SAVES = ["--save_every", 1]  # for check_same_gradients()


class Run(NamedTuple):
    """A finished run, and the flags that repeat it when a split of SPLITS is added."""

    argv: list
    losses: list
    norms: list
    final: Path


@pytest.fixture(scope="module")
def plain(settings, tmp_path_factory):
    """plain(method, model) -> its Run on one rank without sharding. Tests that ask for the same one share it."""
    path = tmp_path_factory.mktemp("plain")

    @functools.cache
    def run(method, model):
        folder = random_model(path / model, **MODELS[model])
        argv = ["--model", folder, "--random_init", *settings, *METHODS[method].split()]
        if method != "full" and model in ("moe", "qwen3.5"):
            argv += ["--lora_rank", 8]  # the products of experts need a multiple of 8
        out = path / f"{model}-{method}"
        got, norms = curve(1, [*argv, *SPLITS[1], *SAVES], out)
        return Run(argv, got, norms, out / "final")

    return run


def read_weights(final):
    """{name: tensor} of the one weight file in final/: those of a model, or of an adapter."""
    (file,) = final.glob("*.safetensors")
    return load_file(file)


# ---------------------------------------------------------------- every flag, in pairs and with every method


# Each switches one column of the array below. The seventh column decides whether the embeddings are tied, the eighth
# whether all weights are trained.
FLAGS = [
    "--no-activation_checkpointing",
    "--no-chunked_ce",
    "--tiled_mlp 100",
    "--no-reshard_after_forward",
    "--no-shard_embeddings",
    "--offload params",
]


def covering_array():
    """Six rows of ten switches. In the first row all are off. Of the other five each switch is on in another three, so
    that any two switches meet in all four combinations: six runs in place of 1,024 show what two flags do to each
    other."""
    rows_that_are_on = list(itertools.combinations(range(1, 6), 3))
    return [[row in on for on in rows_that_are_on] for row in range(6)]


def test_any_two_flags_meet_in_all_four_combinations():
    for two_columns in itertools.combinations(zip(*covering_array()), 2):
        assert len(set(zip(*two_columns))) == 4


def runs_in_pairs(with_the_other_method=False):
    """[(method, model, ranks, flags)], a run on two ranks for each row of the array."""
    cases = []
    for *switches, is_tied, is_full, _, _ in covering_array():
        method = "full" if is_full != with_the_other_method else "qlora"
        model = "tied" if is_tied else "untied"
        flags = itertools.compress(FLAGS, switches)
        cases.append((method, model, 2, " ".join(["--fsdp2", *flags])))
    return cases


@pytest.mark.rounding
@pytest.mark.parametrize("method, model, world, flags", [
    *runs_in_pairs(),
    # one rank, and ranks that each hold the whole model
    ("full", "untied", 1, "--fsdp2"),
    ("full", "untied", 2, ""),
    # replicas, of two ranks each
    ("qlora", "untied", 4, "--fsdp2 --replicas 2 --offload --no-reshard_after_forward"),
    # rows that are spread over ranks
    ("lora", "untied", 4, "--fsdp2 --sequence_parallel 2 --no-activation_checkpointing --no-chunked_ce"),
    # other families
    ("full", "moe", 3, "--fsdp2 --activation_checkpointing 1"),
    ("qlora", "moe", 4, "--fsdp2 --sequence_parallel 2 --replicas 2 --offload --tiled_mlp 100"),
    ("full", "qwen3.5", 4, "--fsdp2 --replicas 2 --offload params --no-reshard_after_forward"),
    ("qlora", "qwen3.5", 2, "--fsdp2 --sequence_parallel 2 --offload --tiled_mlp 100"),
    ("full", "muse", 3, "--fsdp2 --no-chunked_ce --activation_checkpointing 1"),
    *in_ci(
        *runs_in_pairs(with_the_other_method=True),
        ("full", "untied", 3, "--fsdp2"),
        ("full", "untied", 4, "--fsdp2"),
        ("qlora", "untied", 3, ""),
        ("full", "untied", 4, "--fsdp2 --replicas 2 --batch_size 1 --grad_accum 3"),
        ("lora", "untied", 2, "--sequence_parallel 2 --tiled_mlp 100"),  # tiles without a gradient of their input
        ("qlora", "untied", 4, "--fsdp2 --sequence_parallel 2 --replicas 2 --offload --tiled_mlp 100"),
        ("lora", "moe", 2, "--tiled_mlp 100"),
        ("full", "qwen3.5", 3, "--fsdp2 --activation_checkpointing 1"),
        ("qlora", "qwen3.5", 2, "--tiled_mlp 100"),
        ("qlora", "qwen3.5", 4, "--fsdp2 --offload --tiled_mlp 100"),
        ("full", "qwen3.5", 4, "--fsdp2 --sequence_parallel 2 --no-activation_checkpointing"),
        ("qlora", "qwen3.5", 4, "--fsdp2 --sequence_parallel 4 --offload --tiled_mlp 100"),
        ("qlora", "muse", 4, "--fsdp2 --sequence_parallel 2 --replicas 2 --offload --tiled_mlp 100"),
    ),
])
def test_ranks_and_flags_change_no_losses_norms_and_weights(plain, tmp_path, method, model, world, flags):
    expected = plain(method, model)
    flags = flags.split()
    n_groups = world // train.parse_args(flags).sequence_parallel  # ranks of a group share their rows
    out = tmp_path / "run"
    got, norms = curve(world, [*expected.argv, *SPLITS[n_groups], *flags, *SAVES], out)
    # float32: only the order of sums differs, about 1e-6 at a loss of 8
    assert got == pytest.approx(expected.losses, abs=1e-5)
    assert norms == pytest.approx(expected.norms, rel=1e-4)
    plain_out = expected.final.parent
    for step in (1, 2):  # adapters' A has a gradient in the second alone, as their B starts as zeros
        check_same_gradients(out / f"checkpoint-{step}", plain_out / f"checkpoint-{step}")
    check_same_weights(read_weights(out / "final"), read_weights(expected.final), norm_of_update(plain_out, 2))
    # torch would print its own on every rank: of a view that FSDP2 gets, or of a function that is deprecated
    said = "".join((tmp_path / f"run-rank{rank}.log").read_text() for rank in range(world))
    assert "Warning" not in said, said


@pytest.mark.parametrize("method, flags", [
    ("full", ["--no-activation_checkpointing"]),
    ("qlora", ["--gpu_gib", 99]),  # in so much memory NF4 is dequantized once a step and kept
])
def test_checkpointing_changes_no_bit(plain, tmp_path, method, flags):
    expected = plain(method, "untied")
    got = losses(1, [*expected.argv, *SPLITS[1], *flags], tmp_path / "run")
    assert got == expected.losses  # recomputing repeats the same operations


@pytest.mark.rounding
@pytest.mark.bf16
@pytest.mark.parametrize("method, precision", [("full", "mixed"), ("qlora", "bf16")])
def test_bf16_follows_float32(plain, tmp_path, method, precision):
    expected = plain(method, "untied")
    argv = [*expected.argv, *SPLITS[2], "--fsdp2", "--precision", precision]
    got = losses(2, argv, tmp_path / "run")
    # losses near 8 of logits rounded to 8 bits of mantissa; the gradient carries about 1 % of noise
    assert got == pytest.approx(expected.losses, rel=0.03)


# ---------------------------------------------------------------- dropout


DROPOUT = "--lora --lora_dropout 0.3 --lr 1e-2".split()


@pytest.fixture(scope="module")
def dropped(folder, settings, tmp_path_factory):
    """(flags of a run with dropout, its losses on two ranks)"""
    path = tmp_path_factory.mktemp("dropped")
    argv = ["--model", folder, "--random_init", *settings, *DROPOUT, *SPLITS[2]]
    expected = losses(2, argv, path / "with")
    # Dropout must count, or the tests below could not fail. Adapters start as zeros, which hide it in the first step;
    # in the second it moves the loss far more than the 1e-5 of rounding.
    without = losses(2, [*argv, "--lora_dropout", 0], path / "without")
    assert without[0] == pytest.approx(expected[0], abs=1e-5)
    assert abs(expected[1] - without[1]) > 2e-4
    return argv, expected


@pytest.mark.rounding
@pytest.mark.parametrize("flags", [
    "--fsdp2 --no-activation_checkpointing",
    "--fsdp2 --offload params --activation_checkpointing 1 --no-chunked_ce",
])
def test_sharding_and_recomputing_change_no_mask_of_dropout(dropped, tmp_path, flags):
    argv, expected = dropped
    got = losses(2, [*argv, *flags.split()], tmp_path / "run")
    assert got == pytest.approx(expected, abs=1e-5)  # as without dropout


def test_ranks_and_seeds_draw_masks_of_their_own(dropped, tmp_path):
    argv, expected = dropped
    of_one_rank = losses(1, [*argv, *SPLITS[1]], tmp_path / "one")
    assert of_one_rank[0] == pytest.approx(expected[0], abs=1e-5)  # the same data
    assert abs(of_one_rank[1] - expected[1]) > 1e-4


# ---------------------------------------------------------------- exports


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint with the weights that --random_init gives, in bf16: a dtype that the run does not compute in has to
    be passed through."""
    return model_with_weights(tmp_path_factory.mktemp("base") / "model", torch.bfloat16, **MODELS["untied"])


@pytest.fixture
def one_step_without_change(base, settings, few_chats):
    """one_step_without_change(world) -> flags of a run that ends with the weights it began with."""
    def argv(world):
        flags = ["--model", base, *settings, "--lr", 0, "--steps", 1, "--eval_data", few_chats, *SPLITS[world]]
        if world > 1:  # an evaluation before the export leaves FSDP2's last block gathered in bf16
            flags += ["--fsdp2", "--eval_every", 1]
        return flags

    return argv


@pytest.mark.parametrize("world", [1, 3])
def test_a_model_is_written_as_it_was_read(one_step_without_change, base, tmp_path, world):
    losses(world, one_step_without_change(world), tmp_path / "run")
    final = tmp_path / "run/final"
    before = load_file(base / "model.safetensors")
    after = read_weights(final)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    assert filecmp.cmp(base / "tokenizer.json", final / "tokenizer.json", shallow=False)
    config = data.read_json(base / "config.json")
    assert data.read_json(final / "config.json") == data.with_both_spellings(config)


@pytest.mark.parametrize("world", [1, 4])  # of the 5 rows of an adapter four ranks hold 2, 2, 1 and 0
def test_an_adapter_is_written_byte_for_byte_as_it_was_read(one_step_without_change, plain, tmp_path, world):
    adapter = plain("qlora", "untied").final
    argv = [*one_step_without_change(world), "--precision", "mixed", "--qlora", "--adapter", adapter]
    losses(world, argv, tmp_path / "run")
    name = "adapter_model.safetensors"
    assert filecmp.cmp(tmp_path / "run/final" / name, adapter / name, shallow=False)


def test_experts_are_written_as_they_are_read(settings, plain, tmp_path):
    base = plain("full", "moe").final
    adapter = plain("qlora", "moe").final
    argv = ["--model", base, "--adapter", adapter, "--qlora", "--merge", *settings, "--lr", 0, "--steps", 1]
    losses(3, [*argv, *SPLITS[3], "--fsdp2"], tmp_path / "run")
    weights = load_file(base / "model.safetensors")
    written_adapter = read_weights(tmp_path / "run/final")
    for name, tensor in read_weights(adapter).items():
        assert torch.equal(written_adapter[name], tensor), name

    merged = load_file(tmp_path / "run/merged/model.safetensors")
    assert merged.keys() == weights.keys()
    # an expert of each block, in each of the three places; ranks hold all experts of a block as one stack of rows
    for module in ("0.mlp.experts.4.up_proj", "2.mlp.experts.5.down_proj", "1.mlp.experts.0.gate_proj"):
        stem = f"model.layers.{module}"
        a_RD = written_adapter[f"{data.PEFT_PREFIX}{stem}.lora_A.weight"]
        b_NR = written_adapter[f"{data.PEFT_PREFIX}{stem}.lora_B.weight"]
        scale = 32 / 8  # --lora_alpha, by default 32, over the rank
        expected = weights[f"{stem}.weight"] + scale * b_NR @ a_RD
        torch.testing.assert_close(merged[f"{stem}.weight"], expected)
    router = "model.layers.0.mlp.gate.weight"  # it has no adapter
    torch.testing.assert_close(merged[router], weights[router])


# ---------------------------------------------------------------- traffic


def count_traffic(flags, world, path):
    """Writes [{kind: bytes that a rank receives in a step}, the same by a formula] to a file."""
    del os.environ["RANK"]  # it becomes rank 0 of ranks that do not exist
    path.write_text(json.dumps(counted((flags, world))))


@pytest.mark.parametrize("flags, world", [
    ("--fsdp2 --precision fp32 --grad_accum 3", 8),
    ("--fsdp2 --qlora --no-shard_embeddings --grad_accum 3", 8),
    ("--fsdp2 --replicas 2 --grad_accum 2 --sequence_parallel 4", 8),
    ("--lora --sequence_parallel 2", 2),
])
def test_collectives_move_the_bytes_that_they_have_to(tmp_path, flags, world):
    log = tmp_path / "log"
    codes = start_ranks(1, count_traffic, (flags, world, tmp_path / "bytes"), [log])
    assert codes == [0], log.read_text()
    found, expected = json.loads((tmp_path / "bytes").read_text())
    assert found.pop("everything else", 0) < 1000  # losses, flags
    assert set(found) == {kind for kind, n_bytes in expected.items() if n_bytes}
    for kind, n_bytes in found.items():
        assert n_bytes == pytest.approx(expected[kind], rel=1e-3)  # a norm's gradient is padded


# ---------------------------------------------------------------- rows that are spread over ranks
# What follows runs inside a process group: on_ranks() calls a check_...() on every rank.


def results_of(loader, ranks, group, shape, dtype):
    """[loss, gradients, evaluation, logits] of a loader's first two rows. With a group each of its ranks has a part of
    the rows, and losses and gradients are summed over it."""
    model, args = build(**shape)
    model.compute_dtype = dtype
    model.sequence_group = group
    b = loader.batch([0, 1])
    loss = model(b.tokens, b.targets, b.positions, b.spans, b.supervised_S)
    loss.backward()
    loss = loss.detach()
    if group is not None:
        dist.all_reduce(loss)
        train.average_gradients_(list(model.parameters()), 1)  # a "mean" over 1: their sum
    grads = [p.grad for p in model.parameters()]
    evaluation = train.evaluate(model, loader, ranks, args)
    logits = model(torch.arange(20)[None])  # a sample: every rank runs all of it
    return [loss, *grads, torch.tensor([evaluation["eval_loss"], evaluation["eval_tokens"]]), logits]


def check_shards_of_rows(ranks, folder, cases):
    """Loss and gradients of rows of which each rank holds a part, against those of the whole rows."""
    alone = copy.copy(ranks)
    alone.rank = 0
    alone.world = 1
    alone.control = None
    starts = np.cumsum([0, 30, 7, 2, 19, 12, 25])  # documents of these lengths, some of which end inside a part
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4096, starts[-1])
    supervised = rng.random(starts[-1]) < 0.5
    documents = documents_of(tokens, supervised, starts)
    for shape, packing, dtype in cases:
        options = {"seq_len": 33, "packing": packing, "batch_size": 3, "seed": 0}
        whole = data.Loader(documents, rank=0, world=1, **options)
        mine = {"rank": ranks.rank, "world": ranks.world, "sequence_parallel": ranks.world}
        parts = data.Loader(documents, **mine, **options)
        n_tokens = whole.batch([0, 1]).tokens.numel()
        assert parts.batch([0, 1]).tokens.numel() == nf4.ceil_div(n_tokens, ranks.world)

        expected = results_of(whole, alone, None, shape, dtype)
        got = results_of(parts, ranks, dist.group.WORLD, shape, dtype)
        for one, other in zip(got, expected, strict=True):
            if dtype is torch.bfloat16:
                similarity = F.cosine_similarity(one.flatten(), other.flatten(), 0)
                assert similarity > 0.999  # each rank rounds its part of a sum to 8 bits
            else:
                # Sums in another order: 1.3e-6 seen. By the norm, because a single gradient is a sum of what nearly
                # cancels, and by how much depends on the machine.
                assert (one - other).norm() < 1e-5 * other.norm()


# {ranks: [(query heads, key heads)]}: a key head for each rank, for several, or one that several ranks need
HEADS = {
    2: [(4, 1), (4, 4), (2, 2)],
    3: [(6, 2), (3, 1)],
    4: [(4, 2), (12, 3), (8, 8)],
}


def shape_of(n_heads, n_key_heads):
    return {"num_hidden_layers": 2, "num_attention_heads": n_heads, "num_key_value_heads": n_key_heads}


def shape_with_deltanet(world):
    """A dense Qwen3.5 of whose Gated DeltaNet a rank gets two heads of keys, each with two of values."""
    return shape_of(2 * world, world) | {
        "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2 * world, "linear_num_value_heads": 4 * world, "linear_key_head_dim": 8,
    }


@pytest.mark.rounding
@pytest.mark.bf16
@pytest.mark.parametrize("world", HEADS)
def test_shards_of_rows_have_the_loss_and_the_gradients_of_whole_rows(tmp_path, world):
    cases = [(shape_of(*HEADS[world][0]), True, torch.bfloat16)]
    for heads, packing in zip(HEADS[world], itertools.cycle([True, False])):
        cases.append((shape_of(*heads), packing, torch.float32))
    on_ranks(world, check_shards_of_rows, tmp_path, cases)


@pytest.mark.rounding
@pytest.mark.bf16
@pytest.mark.parametrize("world", HEADS)
def test_shards_of_rows_through_gated_deltanet_equal_whole_rows(tmp_path, world):
    shape = shape_with_deltanet(world)
    cases = [(shape, True, torch.float32), (shape, False, torch.float32), (shape, True, torch.bfloat16)]
    on_ranks(world, check_shards_of_rows, tmp_path, cases)


# ---------------------------------------------------------------- NF4


def count_rows_read():
    """-> {tensor: how many of its rows this process reads from here on}. The experts of a block count as one tensor."""
    n_read = Counter()
    plain_rows = data.RandomWeights.rows

    def rows(self, name, start, stop):
        n_read[re.sub(r"experts\.\d+", "experts", name)] += stop - start
        return plain_rows(self, name, start, stop)

    data.RandomWeights.rows = rows
    return n_read


def rows_held(model):
    """{tensor: how many of its rows this rank holds}, of base weights, where there are any."""
    n_held = {}
    for name, p in model.named_parameters():
        if "lora" in name or name.endswith("_scales"):  # made here, or made from the rows of the codes
            continue
        mine, _ = nf4.local(p)
        name_in_files = name.removesuffix("_codes").replace(".decay.", ".")
        if len(mine):
            n_held[name_in_files] = len(mine)
    return n_held


IN_NF5 = "o_proj", "down_proj"  # the other layers of the blocks are in NF4


def check_nf4(ranks, folder, n_replicas, changes):
    """Bytes, and weights dequantized after the all-gather, against those of the whole weights."""
    vanilla, _ = build(**changes)
    whole = dict(vanilla.named_parameters())
    rank = 8 if changes else 5  # the products of experts need a multiple of 8
    flags = ["--fsdp2", "--precision", "mixed", "--qlora", "--lora_rank", rank, "--replicas", n_replicas]
    flags += ["--nf5", *IN_NF5]
    n_read = count_rows_read()
    model, _ = build(*flags, ranks=ranks, **changes)
    assert n_read == rows_held(model), "a rank reads its own rows and no others"

    dequantized = {}  # {layer: its whole weight}
    checked = []

    def check_gathered(layer, _):
        """Before the forward of a layer, where FSDP2 has gathered its bytes."""
        weight = nf4.dequantize(layer.weight_codes, layer.weight_scales, torch.bfloat16)
        assert torch.equal(weight, dequantized[layer])
        checked.append(layer)

    for name, layer in model.named_modules():
        if isinstance(layer, nf4.NF4Linear):
            codes, scales = nf4.quantize(whole[f"{name}.weight"].detach(), 5 if name.endswith(IN_NF5) else 4)
            assert torch.equal(layer.weight_codes.full_tensor(), codes), name
            assert torch.equal(layer.weight_scales.full_tensor(), scales), name
            dequantized[layer] = nf4.dequantize(codes, scales, torch.bfloat16)
            layer.register_forward_pre_hook(check_gathered)
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert len(checked) == sum("weight_codes" in name for name, _ in model.named_parameters())
    assert len(checked) > 0


@pytest.mark.unperturbed
@pytest.mark.parametrize("world, n_replicas, changes", [
    (3, 1, {}),
    (4, 2, {}),
    (3, 1, MOE),
    (2, 1, QWEN35),
    *in_ci((1, 1, {}), (4, 1, {}), (4, 1, QWEN35)),
])
def test_nf4_bytes_are_the_same_on_every_number_of_ranks(tmp_path, world, n_replicas, changes):
    on_ranks(world, check_nf4, tmp_path, n_replicas, changes)


# ---------------------------------------------------------------- host memory, errors

BIG = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 5}


def check_host_memory_stays_flat(ranks, folder):
    model, _ = build("--fsdp2", "--precision", "bf16", ranks=ranks, **BIG)  # which touches the pages of the parameters
    shards = [nf4.local(p)[0] for p in model.parameters()]
    held_mib = sum(shard.nbytes for shard in shards) / 2**20
    for _ in range(2):  # the first time touches all code on the way, and is not measured
        source = data.WeightFiles(folder)
        with peak_growth() as peak:
            data.load_weights_(model, source, None, 0, ranks.device)
    (growth_mib,) = peak  # of the second time
    # the rows of one tensor, 8 MiB, as a copy and as mapped pages, and some noise; a file that stays mapped adds 129
    assert growth_mib < 64, f"{growth_mib:.0f} MiB above the {held_mib:.0f} MiB of parameters"
    assert held_mib > 100  # or the bound above would say little


@pytest.mark.unperturbed
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's high-water mark of memory")
def test_host_memory_stays_flat_while_loading(tmp_path):
    with torch.device("meta"):
        model = lm.Transformer(lm.parse_config(SHAPE | BIG))
    tensors = {name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in model.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors")
    on_ranks(2, check_host_memory_stays_flat, tmp_path)


def test_an_error_in_the_data_ends_all_ranks_with_one_message(folder, settings, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": \n')
    argv = ["--model", folder, "--random_init", *settings, "--fsdp2", "--data", bad]
    _, text, codes = run_ranks(2, argv, tmp_path / "run")
    assert codes == [1, 1], text
    assert text.count("train.py: error:") == 1, text
    assert text.count("line 2: not valid JSON") == 1, text


# ---------------------------------------------------------------- ranks that differ


def compared(folder, *flags):
    """What a rank with this copy of a model compares with the others."""
    args = train.parse_args(["--model", str(folder), *map(str, flags)])
    ranks = train.Ranks(want_group=False, timeout=1800)
    return train.what_is_trained(args, train.open_model(args, ranks), None, ranks)


def change_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # of the last weight: size, names and shapes stay
    path.write_bytes(content)


def add_a_line(path):
    path.write_text(path.read_text() + "\n")


def change_epsilon(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-4}))


@pytest.fixture(scope="module")
def with_weights(tmp_path_factory):
    return model_with_weights(tmp_path_factory.mktemp("weights"), num_hidden_layers=1)


@pytest.mark.parametrize("file, change, name", [
    ("model.safetensors", change_a_bit, "weights of --model"),
    ("config.json", change_epsilon, "config.json's rms_norm_eps"),
    ("chat_template.jinja", add_a_line, "checksum of the chat template"),
    ("rows.jsonl", add_a_line, "--data"),
])
def test_copies_of_model_and_data_may_lie_anywhere_and_may_not_differ(
        with_weights, few_chats, tmp_path, file, change, name):
    copy = tmp_path / "copy"
    shutil.copytree(with_weights, copy)
    shutil.copy(few_chats, copy / "rows.jsonl")
    first = compared(with_weights, "--data", few_chats)
    assert compared(copy, "--data", copy / "rows.jsonl") == first
    change(copy / file)
    other = compared(copy, "--data", copy / "rows.jsonl")
    assert [what for what in first if first[what] != other[what]] == [name]


def test_ranks_compare_the_share_of_the_data_that_they_hold_out(with_weights, few_chats):
    flags = "--data", few_chats, "--eval_data"
    first, other = (compared(with_weights, *flags, share) for share in ("0.1", "0.2"))
    assert [what for what in first if first[what] != other[what]] == ["--eval_data"]


def test_ranks_compare_where_an_answer_ends(with_weights, tmp_path):
    """One that goes on alone would wait for the others for ever."""
    copy = tmp_path / "copy"
    shutil.copytree(with_weights, copy)
    (copy / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    first, other = compared(with_weights), compared(copy)
    assert [what for what in first if first[what] != other[what]] == ["checksum of the tokenizer"]


def test_ranks_compare_flags_versions_and_their_own_code(with_weights, tmp_path, monkeypatch):
    first = compared(with_weights)
    code = tmp_path / "model.py"
    code.write_text(Path(lm.__file__).read_text() + "\n")
    monkeypatch.setattr(train, "CODE", [code if Path(path).name == "model.py" else path for path in train.CODE])
    monkeypatch.setattr(torch, "__version__", "2.99")
    other = compared(with_weights, "--steps", 7, "--resume")
    changed = [what for what in first if first[what] != other[what]]
    assert sorted(changed) == ["--resume", "--steps", "model.py", "torch"]


def as_two_machines(argv, flags_of_rank_1, folders):
    """Machines of one rank each, which have other flags or another disk."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = "0"
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    train.appears = lambda path, n_bytes=None: path.exists()  # without patience
    os.chdir(folders[rank])
    return train.launch([*argv, *flags_of_rank_1] if rank == 1 else argv)


@pytest.mark.parametrize("flags_of_rank_1, folder, words", [
    ("--lr 0.5", ".", r"rank 1 \(.+\): ranks differ.*: --lr: 0.01 on rank 0 \(.+\), 0.5 here"),
    ("--lrr 0.5", ".", r"rank 1 \(.+\): --lrr: no such flag"),
    ("", "disk", r"rank 1 \(.+\): --out run: rank 0 .* all ranks have to share the disk"),
], ids=["flag", "unknown flag", "disk"])
def test_ranks_that_differ_end_at_once_with_one_message(
        shallow, few_chats, tmp_path, flags_of_rank_1, folder, words):
    (tmp_path / "disk").mkdir()
    argv = ["--model", str(shallow), "--random_init", "--data", str(few_chats), "--fsdp2", "--lr", "1e-2"]
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    folders = tmp_path, tmp_path / folder
    codes = start_ranks(2, as_two_machines, ([*argv, "--out", "run"], flags_of_rank_1.split(), folders), logs)
    text = "".join(log.read_text() for log in logs)
    assert all(codes), text
    assert text.count("train.py: error:") == 1, text
    assert re.search(f"train.py: error: {words}", text), text
    assert not list(tmp_path.rglob("run")), text


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_that_do_not_meet_say_on_each_what_to_look_at(monkeypatch, capsys, rank):
    def refused(*_, **__):
        raise RuntimeError("Connection refused\nand a stack of C++")

    of_rank = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "10.9.0.1", "MASTER_PORT": "29500"}
    for name, value in of_rank.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train, "rendezvous", refused)
    assert train.launch(["--fsdp2"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"train.py: error: rank {rank} (")
    for words in ("Connection refused", "MASTER_ADDR=10.9.0.1 MASTER_PORT=29500", "GLOO_SOCKET_IFNAME"):
        assert words in error


def test_a_task_that_sees_one_gpu_uses_it_whatever_its_number_is(monkeypatch):
    n_gpus = 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert train.prepare_device(3, 4) == torch.device("cuda", 0)
    n_gpus = 2
    assert train.prepare_device(1, 2) == torch.device("cuda", 1)
    for local_rank, n_local in [(3, 4), (2, 1)]:
        with pytest.raises(ValueError, match="this machine has 2 GPUs"):
            train.prepare_device(local_rank, n_local)


# ---------------------------------------------------------------- what FSDP2 is given


def test_blocks_in_tiles_and_the_loss_of_each_token_return_no_view():
    # torch 2.15 warns on every rank of a view
    model, _ = build("--lora", "--dpo", num_hidden_layers=1)
    lm.tile_mlp_(model, 10)
    returned = []
    for module in (*model.model.layers, model.lm_head):
        module.register_forward_hook(lambda _, args, out: returned.append(out))
    tokens = torch.arange(2 * 16).view(2, 16)
    model(tokens, tokens)
    assert [out._base for out in returned] == [None, None]
