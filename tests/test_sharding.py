"""Ranks, FSDP2 and its flags change nothing but where things are: same losses, same bytes, same exports."""

import copy
import filecmp
import itertools
import json
import os
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bench_scale import counted
from conftest import (
    MOE, MUSE, QWEN35, SHAPE, build, curve, documents_of, losses, on_ranks, random_model, run_ranks, start_ranks)
from safetensors.torch import load_file, save_file

import data
import model as lm
import nf4
import train

METHODS = {"full": ["--lr", "3e-3"], "qlora": ["--qlora", "--lora_rank", 5, "--lr", "1e-2"],
           "lora": "--lora --lora_rank 5 --lr 1e-2 --lora_targets o_proj gate_proj up_proj down_proj".split()}
# twelve rows a step, split in every way
SPLITS = {1: ("--batch_size", 4, "--grad_accum", 3), 2: ("--batch_size", 3, "--grad_accum", 2),
          3: ("--batch_size", 2, "--grad_accum", 2), 4: ("--batch_size", 3, "--grad_accum", 1)}


@pytest.fixture(scope="module")
def job(folder, chats):
    return ["--model", folder, "--random_init", "--data", chats, "--seq_len", 96, "--steps", 2, "--precision", "fp32"]


def exported(out):
    return load_file(next((out / "final").glob("*.safetensors")))


@pytest.fixture(scope="module")
def plain(job, tmp_path_factory):
    """{(method, whether the embeddings are tied, or "moe"): its run on one rank without sharding}."""
    path, results = tmp_path_factory.mktemp("plain"), {}
    folders = {False: job[1], True: random_model(path / "tied", tie_word_embeddings=True),
               "moe": random_model(path / "moe", **MOE), "qwen3.5": random_model(path / "qwen3.5", **QWEN35),
               "muse": random_model(path / "muse", **MUSE)}
    kinds = [*itertools.product(METHODS, [False, "moe"]),
             *itertools.product(["full", "qlora"], [True, "qwen3.5", "muse"])]
    for method, kind in kinds:
        argv, out = ["--model", folders[kind], *job[2:], *METHODS[method]], path / f"{method}{kind}"
        argv += ["--lora_rank", 8] if kind in ("moe", "qwen3.5") and method != "full" else []
        got, norms = curve(1, [*argv, *SPLITS[1]], out)
        results[method, kind] = SimpleNamespace(argv=argv, losses=got, norms=norms, out=out)
    return results


# An orthogonal array: any two of the seven flags meet in all four combinations within the eight runs of QLoRA.
FLAGS = [["--no-activation_checkpointing"], ["--no-chunked_ce"], ["--tiled_mlp", 100], ["--no-reshard_after_forward"],
         ["--no-shard_embeddings"], ["--offload", "params"]]  # the seventh: tied embeddings
COMBINATIONS = [[bool((row & (column + 1)).bit_count() % 2) for column in range(7)] for row in range(8)]
PAIRS = [(method, tied, 2, ["--fsdp2", *(word for flag, on in zip(FLAGS, chosen) if on for word in flag)])
         for method, part in (("qlora", COMBINATIONS), ("full", COMBINATIONS[1::2])) for *chosen, tied in part]


@pytest.mark.parametrize("method, tied, world, flags", [
    *PAIRS,
    ("full", False, 1, ["--fsdp2"]), ("full", False, 3, ["--fsdp2"]), ("full", False, 4, ["--fsdp2"]),
    ("full", False, 2, []), ("qlora", False, 3, []),  # every rank holds the whole model
    ("qlora", False, 4, ["--fsdp2", "--replicas", 2, "--offload", "--no-reshard_after_forward"]),
    ("full", False, 4, ["--fsdp2", "--replicas", 2, "--batch_size", 1, "--grad_accum", 3]),
    ("lora", False, 2, ["--sequence_parallel", 2, "--tiled_mlp", 100]),  # tiles without a gradient of their input
    ("lora", False, 4, ["--fsdp2", "--sequence_parallel", 2, "--no-activation_checkpointing", "--no-chunked_ce"]),
    ("qlora", False, 4, ["--fsdp2", "--sequence_parallel", 2, "--replicas", 2, "--offload", "--tiled_mlp", 100]),
    ("full", "moe", 3, ["--fsdp2", "--activation_checkpointing", 1]), ("lora", "moe", 2, ["--tiled_mlp", 100]),
    ("qlora", "moe", 4, ["--fsdp2", "--sequence_parallel", 2, "--replicas", 2, "--offload", "--tiled_mlp", 100]),
    ("full", "qwen3.5", 3, ["--fsdp2", "--activation_checkpointing", 1]), ("qlora", "qwen3.5", 2, ["--tiled_mlp", 100]),
    ("full", "qwen3.5", 4, ["--fsdp2", "--replicas", 2, "--offload", "params", "--no-reshard_after_forward"]),
    ("qlora", "qwen3.5", 4, ["--fsdp2", "--offload", "--tiled_mlp", 100]),
    ("full", "muse", 3, ["--fsdp2", "--no-chunked_ce", "--activation_checkpointing", 1]),
    ("qlora", "muse", 4, ["--fsdp2", "--sequence_parallel", 2, "--replicas", 2, "--offload", "--tiled_mlp", 100]),
], ids=str)
def test_ranks_and_flags_change_no_losses_norms_and_weights(plain, tmp_path, method, tied, world, flags):
    expected = plain[method, tied]
    n_groups = world // dict(itertools.pairwise(flags)).get("--sequence_parallel", 1)
    got, norms = curve(world, [*expected.argv, *SPLITS[n_groups], *flags], tmp_path / "run")
    # float32: only the order of sums differs, about 1e-6 at a loss of 8
    assert got == pytest.approx(expected.losses, abs=1e-5)
    assert norms == pytest.approx(expected.norms, rel=1e-4)
    tensors, final = exported(expected.out), exported(tmp_path / "run")
    assert final.keys() == tensors.keys()
    for name, tensor in final.items():
        # Adam divides a gradient by its own size, so rounding in a tiny gradient moves a weight by a part of lr = 1e-2
        torch.testing.assert_close(tensor, tensors[name], atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def dropped(job, tmp_path_factory):
    """The losses of two steps with dropout, on one rank."""
    argv = [*job, "--lora", "--lr", "1e-2", "--lora_dropout", 0.3]
    folder = tmp_path_factory.mktemp("dropped")
    expected = losses(1, [*argv, *SPLITS[1]], folder / "run")
    # in the second step, adapters are no longer zero and masks count, far more than the 1e-5 of rounding
    without = losses(1, [*job, "--lora", "--lr", "1e-2", *SPLITS[1]], folder / "without")
    assert expected[0] == without[0] and abs(expected[1] - without[1]) > 2e-4
    return argv, expected


@pytest.mark.parametrize("world, flags", [
    (1, ["--batch_size", 12, "--grad_accum", 1, "--tiled_mlp", 100]),
    (2, [*SPLITS[2], "--fsdp2"]),
    (3, [*SPLITS[3], "--no-activation_checkpointing"]),
    (2, [*SPLITS[1], "--sequence_parallel", 2, "--tiled_mlp", 100]),
], ids=str)
def test_dropout_draws_the_same_however_a_step_is_split(dropped, tmp_path, world, flags):
    argv, expected = dropped
    got = losses(world, [*argv, *flags], tmp_path / "run")
    assert got == pytest.approx(expected, abs=1e-5)  # as without dropout


@pytest.mark.parametrize("method, flags", [("full", ["--no-activation_checkpointing"]), ("qlora", ["--gpu_gib", 99])])
def test_checkpointing_changes_no_bit(plain, tmp_path, method, flags):  # in 99 GiB NF4 is dequantized once
    argv = [*plain[method, False].argv, *SPLITS[1], *flags]
    assert losses(1, argv, tmp_path / "run") == plain[method, False].losses  # recomputing repeats the same operations


@pytest.mark.bf16
@pytest.mark.parametrize("method, precision", [("full", "mixed"), ("qlora", "bf16")])
def test_bf16_follows_float32(plain, tmp_path, method, precision):
    expected = plain[method, False]
    got = losses(2, [*expected.argv, "--precision", precision, *SPLITS[2], "--fsdp2"], tmp_path / "run")
    # losses near 8 of logits rounded to 8 bits of mantissa; the gradient carries about 1 % of noise
    assert got == pytest.approx(expected.losses, rel=0.03)


@pytest.fixture(scope="module")
def base(job, tmp_path_factory):
    """A checkpoint with the weights that --random_init gives, in bf16, so that all dtypes are passed through."""
    path = random_model(tmp_path_factory.mktemp("base") / "model")
    tensors = {name: p.detach().bfloat16() for name, p in build()[0].named_parameters()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("world", [1, 3, 4])
def test_exports_of_the_same_state_are_the_same_bytes(job, plain, base, tmp_path, world):
    argv = ["--model", base, *job[3:], "--lr", 0, "--steps", 1, *SPLITS[world], "--eval_data", job[4]]
    if world > 1:  # the export comes after an evaluation, which leaves FSDP2's last block gathered in bf16
        argv += ["--fsdp2", "--eval_every", 1]
    if world != 4:
        losses(world, argv, tmp_path / "full")
        before, after = load_file(base / "model.safetensors"), exported(tmp_path / "full")
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        assert filecmp.cmp(base / "tokenizer.json", tmp_path / "full/final/tokenizer.json", shallow=False)
        assert data.read_json(tmp_path / "full/final/config.json") == data.with_both_ropes(
            data.read_json(base / "config.json"))
    if world != 3:  # of the 5 rows of an adapter four ranks hold 2, 2, 1 and 0
        adapter, name = plain["qlora", False].out / "final", "adapter_model.safetensors"
        losses(world, [*argv, "--precision", "mixed", "--qlora", "--adapter", adapter], tmp_path / "adapter")
        assert filecmp.cmp(tmp_path / "adapter/final" / name, adapter / name, shallow=False)


def test_experts_are_written_as_they_are_read(job, plain, tmp_path):
    base, adapter = (plain[method, "moe"].out / "final" for method in ("full", "qlora"))
    argv = ["--model", base, "--adapter", adapter, *job[3:], "--lr", 0, "--steps", 1, *SPLITS[3], "--merge", "--qlora"]
    losses(3, [*argv, "--fsdp2"], tmp_path / "run")
    old, merged = load_file(base / "model.safetensors"), load_file(tmp_path / "run/merged/model.safetensors")
    tensors = exported(tmp_path / "run")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in exported(adapter.parent).items())
    assert merged.keys() == old.keys()
    for name in ("0.mlp.experts.4.up_proj", "2.mlp.experts.5.down_proj", "1.mlp.experts.0.gate_proj", "0.mlp.gate"):
        stem, w = f"model.layers.{name}.", old[f"model.layers.{name}.weight"]
        if name != "0.mlp.gate":
            a, b = (tensors[f"{data.PEFT_PREFIX}{stem}lora_{half}.weight"] for half in "AB")
            w = w + 32 / 8 * b @ a
        torch.testing.assert_close(merged[f"{stem}weight"], w)


def count_traffic(flags, world, path):
    del os.environ["RANK"]  # it becomes rank 0 of ranks that do not exist
    path.write_text(json.dumps(counted((flags, world))))


@pytest.mark.parametrize("flags, world", [
    ("--fsdp2 --precision fp32 --grad_accum 3", 8), ("--fsdp2 --qlora --no-shard_embeddings --grad_accum 3", 8),
    ("--fsdp2 --replicas 2 --grad_accum 2 --sequence_parallel 4", 8), ("--lora --sequence_parallel 2", 2)])
def test_collectives_move_the_bytes_that_they_have_to(tmp_path, flags, world):
    codes = start_ranks(1, count_traffic, (flags, world, tmp_path / "bytes"), [tmp_path / "log"])
    assert codes == [0], (tmp_path / "log").read_text()
    found, expected = json.loads((tmp_path / "bytes").read_text())
    assert found.pop("everything else", 0) < 1000  # losses, flags
    assert set(found) == {kind for kind, n_bytes in expected.items() if n_bytes}
    for kind, n_bytes in found.items():
        assert n_bytes == pytest.approx(expected[kind], rel=1e-3)  # a norm's gradient is padded


# ---------------------------------------------------------------- inside a process group


def check_shards_of_rows(ranks, folder, shapes):
    """Loss and gradients of rows of which each rank holds a part, against those of the whole rows."""
    rng, alone = np.random.default_rng(0), copy.copy(ranks)
    alone.rank, alone.world, alone.control = 0, 1, None
    starts = np.cumsum([0, 30, 7, 2, 19, 12, 25])
    documents = documents_of(rng.integers(0, 4096, starts[-1]), rng.random(starts[-1]) < 0.5, starts)
    for (H, G), packing, dtype in shapes:
        whole = data.Loader(documents, 33, packing, 3, 0, 0, 1)
        parts = data.Loader(documents, 33, packing, 3, 0, ranks.rank, ranks.world, ranks.world)
        assert parts.batch([0, 1]).tokens.numel() == -(-whole.batch([0, 1]).tokens.numel() // ranks.world)
        results = []
        for loader, who, group in ((whole, alone, None), (parts, ranks, dist.group.WORLD)):
            b, (model, _) = loader.batch([0, 1]), build(num_attention_heads=H, num_key_value_heads=G)
            model.compute_dtype, model.sequence_group = dtype, group
            loss = model(b.tokens, b.targets, b.positions, b.spans, b.keep_S)
            loss.backward()
            evaluation = train.evaluate(model, loader, who)
            sample = model(torch.arange(20)[None])  # every rank runs all of it
            results.append([loss.detach(), *(p.grad for p in model.parameters()),
                            torch.tensor([evaluation.loss, evaluation.n_terms]), sample])
            if group:
                train.average_gradients_(list(model.parameters()), 1)  # their sum
                dist.all_reduce(results[-1][0])
        for expected, got in zip(*results, strict=True):
            if dtype is torch.bfloat16:
                assert torch.nn.functional.cosine_similarity(got.flatten(), expected.flatten(), 0) > 0.999
            else:
                torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)  # another order of sums


@pytest.mark.bf16
@pytest.mark.parametrize("world", [2, 3, 4])
def test_shards_of_rows_have_the_loss_and_the_gradients_of_whole_rows(tmp_path, world):
    heads = {2: [(4, 1), (4, 4), (2, 2)], 3: [(6, 2), (3, 1)], 4: [(4, 2), (12, 3), (8, 8)]}[world]
    shapes = [(one, packing, torch.float32) for one, packing in zip(heads, itertools.cycle([True, False]))]
    on_ranks(world, check_shards_of_rows, tmp_path, [*shapes, (heads[0], True, torch.bfloat16)])


def check_nf4(ranks, folder, n_replicas, changes):
    """Bytes, and weights dequantized after the all-gather, against those of the whole weights."""
    whole, read, rows_of, seen = dict(build(**changes)[0].named_parameters()), Counter(), data.RandomWeights.rows, []

    def rows(self, name, start, stop):
        read[re.sub(r"experts\.\d+", "experts", name)] += stop - start
        return rows_of(self, name, start, stop)

    data.RandomWeights.rows = rows
    flags = "--fsdp2", "--precision", "mixed", "--qlora", "--lora_rank", 8 if changes else 5, "--replicas", n_replicas
    model, _ = build(*flags, ranks=ranks, **changes)
    params = dict(model.named_parameters())
    mine = {name.removesuffix("_codes").replace(".decay.", "."): len(nf4.local(p)[0])
            for name, p in params.items() if "lora" not in name}
    assert read == {name: n for name, n in mine.items() if n and not name.endswith("_scales")}, (
        "a rank reads its own rows and no others")

    def compare(layer, codes, scales):
        gathered = nf4.dequantize(layer.weight_codes, layer.weight_scales, torch.bfloat16)
        seen.append(torch.equal(gathered, nf4.dequantize(codes, scales, torch.bfloat16)))

    for name, layer in model.named_modules():
        if isinstance(layer, nf4.NF4Linear):
            expected = nf4.quantize(whole[f"{name}.weight"].detach())
            for part, values in zip(("codes", "scales"), expected):
                assert torch.equal(params[f"{name}.weight_{part}"].full_tensor(), values)
            layer.register_forward_pre_hook(lambda layer, _, expected=expected: compare(layer, *expected))
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert len(seen) == sum("weight_codes" in name for name in params) and all(seen)


@pytest.mark.parametrize("world, n_replicas, changes", [
    (1, 1, {}), (3, 1, {}), (4, 1, {}), (4, 2, {}), (3, 1, MOE), (4, 1, QWEN35)])
def test_nf4_bytes_are_the_same_on_every_number_of_ranks(tmp_path, world, n_replicas, changes):
    on_ranks(world, check_nf4, tmp_path, n_replicas, changes)


BIG = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 5}


def mib(key):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(f"{key}:"))


def check_host_memory_stays_flat(ranks, folder):
    model, _ = build("--fsdp2", "--precision", "bf16", ranks=ranks, **BIG)  # which touches the pages of the parameters
    for measured in (False, True):  # the first time touches all code on the way
        source, before = data.Checkpoint(folder), mib("VmRSS")
        if measured:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the kernel's high-water mark starts anew
        data.load_weights_(model, source, None, 0, ranks.device)
    above, held = mib("VmHWM") - before, sum(nf4.local(p)[0].nbytes for p in model.parameters()) / 2**20
    # the rows of one tensor, 8 MiB, as a copy and as mapped pages, and some noise; a file that stays mapped adds 129
    assert held > 100 and above < 64, f"{above:.0f} MiB above the {held:.0f} MiB of parameters"


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's high-water mark of memory")
def test_host_memory_stays_flat_while_loading(tmp_path):
    with torch.device("meta"):
        model = lm.Transformer(lm.parse_config(SHAPE | BIG))
    tensors = {name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in model.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors")
    on_ranks(2, check_host_memory_stays_flat, tmp_path)


def test_an_error_in_the_data_ends_all_ranks_with_one_message(job, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    _, text, codes = run_ranks(2, [*job, "--fsdp2", "--data", tmp_path / "bad.jsonl"], tmp_path / "run")
    assert codes == [1, 1] and text.count("train.py: error:") == text.count("line 2: not valid JSON") == 1, text
