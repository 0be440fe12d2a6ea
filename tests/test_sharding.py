"""Ranks, FSDP2 and its flags change nothing but where things are: same losses, same bytes, same exports."""

import filecmp
import inspect
import itertools
import json
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bench_scale import counted
from conftest import SHAPE, curve, documents_of, losses, on_ranks, run_ranks, start_ranks
from safetensors.torch import load_file, save_file

import data
import model as lm
import nf4
import train

METHODS = {"full": ["--lr", "3e-3"], "lora": ["--lora", "--lora_rank", 5, "--lr", "1e-2"],
           "qlora": ["--qlora", "--lora_rank", 5, "--lr", "1e-2"]}
# twelve rows a step, split in every way
SPLITS = {1: ("--batch_size", 4, "--grad_accum", 3), 2: ("--batch_size", 2, "--grad_accum", 3),
          3: ("--batch_size", 4, "--grad_accum", 1), 4: ("--batch_size", 1, "--grad_accum", 3)}


@pytest.fixture(scope="module")
def job(folder, chats):
    return ["--model", folder, "--random_init", "--data", chats, "--seq_len", 96, "--steps", 3, "--precision", "fp32"]


def exported(out):
    return load_file(next((out / "final").glob("*.safetensors")))


@pytest.fixture(scope="module")
def plain(job, tmp_path_factory):
    """One rank, no sharding, for each method: (losses, gradient norms, exported tensors)."""
    results = {}
    for name, flags in METHODS.items():
        out = tmp_path_factory.mktemp("plain") / name
        results[name] = *curve(1, [*job, *flags, *SPLITS[1]], out), exported(out)
    return results


@pytest.mark.parametrize("method, world, flags", [
    *itertools.product(METHODS, [1, 2, 3, 4], [["--fsdp2"]]),
    *itertools.product(METHODS, [3], [["--fsdp2", "--offload"]]),
    *itertools.product(METHODS, [4], [["--fsdp2", "--replicas", 2]]), ("full", 4, ["--fsdp2", "--replicas", 4]),
    ("full", 4, ["--fsdp2", "--sequence_parallel", 4]), ("lora", 2, ["--sequence_parallel", 2]),
    ("lora", 4, ["--fsdp2", "--sequence_parallel", 2, "--no-activation_checkpointing", "--no-chunked_ce"]),
    ("qlora", 4, ["--fsdp2", "--sequence_parallel", 2, "--replicas", 2, "--offload", "--tiled_mlp", 20]),
    ("full", 8, ["--fsdp2", "--sequence_parallel", 2, "--replicas", 2]),
    ("qlora", 4, ["--fsdp2", "--replicas", 2, "--offload", "--no-reshard_after_forward"]),
    ("full", 2, []), ("qlora", 3, []),  # every rank holds the whole model
], ids=str)
def test_ranks_do_not_change_losses_norms_and_weights(job, plain, tmp_path, method, world, flags):
    expected, expected_norms, tensors = plain[method]
    groups = world // dict(itertools.pairwise(flags)).get("--sequence_parallel", 1)
    got, norms = curve(world, [*job, *METHODS[method], *SPLITS[groups], *flags], tmp_path / "run")
    # float32: only the order of sums differs, about 1e-6 at a loss of 8
    assert got == pytest.approx(expected, abs=1e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    final = exported(tmp_path / "run")
    assert final.keys() == tensors.keys()
    for name, tensor in final.items():
        # Adam divides a gradient by its own size, so rounding in a tiny gradient moves a weight by a part of lr = 1e-2
        torch.testing.assert_close(tensor, tensors[name], atol=1e-3, rtol=1e-3)


# An orthogonal array: any two of the seven flags meet in all four combinations within eight runs.
FLAGS = [["--no-activation_checkpointing"], ["--no-chunked_ce"], ["--tiled_mlp", 20], ["--no-reshard_after_forward"],
         ["--no-shard_embeddings"], ["--offload", "params"], ["--tied"]]
COMBINATIONS = [[bool((row & (column + 1)).bit_count() % 2) for column in range(7)] for row in range(8)]


@pytest.fixture(scope="module")
def tied_folder(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("tied")
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "config.json").write_text(json.dumps(SHAPE | {"tie_word_embeddings": True}))
    return path


@pytest.fixture(scope="module")
def plain_tied(job, tied_folder, tmp_path_factory):
    job = ["--model", tied_folder, *job[2:]]
    return {name: losses(1, [*job, *flags, *SPLITS[1]], tmp_path_factory.mktemp("plain") / name)
            for name, flags in METHODS.items() if name != "lora"}


@pytest.mark.parametrize("method", ["full", "qlora"])
@pytest.mark.parametrize("chosen", COMBINATIONS, ids=lambda chosen: "".join(str(int(on)) for on in chosen))
def test_flags_in_pairs_do_not_change_the_losses(job, plain, plain_tied, tied_folder, tmp_path, method, chosen):
    flags = [word for flag, on in zip(FLAGS, chosen) if on for word in flag if word != "--tied"]
    expected = plain_tied[method] if chosen[-1] else plain[method][0]
    job = ["--model", tied_folder, *job[2:]] if chosen[-1] else job
    got = losses(2, [*job, *METHODS[method], *SPLITS[2], "--fsdp2", *flags], tmp_path / "run")
    assert got == pytest.approx(expected, abs=1e-5)  # as above


@pytest.mark.parametrize("flag, value, exact", [
    ("--no-activation_checkpointing", None, True), ("--ce_chunk", 7, False), ("--no-chunked_ce", None, False),
    ("--no-fused_adamw", None, False), ("--tiled_mlp", 20, False),
])
def test_a_flag_alone_does_not_change_the_losses_of_one_rank(job, plain, tmp_path, flag, value, exact):
    flags = [flag] if value is None else [flag, value]
    got = losses(1, [*job, *METHODS["full"], *SPLITS[1], *flags], tmp_path / "run")
    # recomputing repeats the same operations; the others add up in another order
    assert got == plain["full"][0] if exact else got == pytest.approx(plain["full"][0], abs=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", ["mixed", "bf16"])
def test_bf16_follows_float32(job, plain, tmp_path, method, precision):
    argv = [*job, "--precision", precision, *METHODS[method]]
    sharded = losses(2, [*argv, *SPLITS[2], "--fsdp2"], tmp_path / "sharded")
    single = losses(1, [*argv, *SPLITS[1]], tmp_path / "single")
    # losses near 8 of logits rounded to 8 bits of mantissa; the gradient norm carries about 1 % of noise
    assert sharded == pytest.approx(plain[method][0], rel=0.03)
    assert sharded == pytest.approx(single, rel=0.03)


def test_exports_of_the_same_adapter_are_the_same_bytes(job, tmp_path):
    losses(1, [*job, *METHODS["qlora"], *SPLITS[1]], tmp_path / "first")
    save_random_base(job[1], tmp_path / "base")
    argv = ["--model", tmp_path / "base", *[arg for arg in job[2:] if arg != "--random_init"], "--precision", "mixed",
            "--qlora", "--adapter", tmp_path / "first/final", "--lr", 0, "--eval_data", job[4], "--steps", 1]
    for world in (1, 4):  # after an evaluation, which leaves FSDP2's last block gathered in bf16
        losses(world, [*argv, *SPLITS[world], *["--fsdp2"] * (world > 1)], tmp_path / f"again{world}")
        again = tmp_path / f"again{world}/final/adapter_model.safetensors"
        assert filecmp.cmp(again, tmp_path / "first/final/adapter_model.safetensors", shallow=False)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_a_model_that_did_not_train_comes_out_as_it_went_in(job, tmp_path, world):
    save_random_base(job[1], tmp_path / "base")
    argv = ["--model", tmp_path / "base", *[arg for arg in job[2:] if arg != "--random_init"], "--lr", 0]
    losses(world, [*argv, *SPLITS[world], *["--fsdp2"] * (world > 1)], tmp_path / "run")
    before, after = load_file(tmp_path / "base/model.safetensors"), exported(tmp_path / "run")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert filecmp.cmp(tmp_path / "base/config.json", tmp_path / "run/final/config.json", shallow=False)
    assert filecmp.cmp(tmp_path / "base/tokenizer.json", tmp_path / "run/final/tokenizer.json", shallow=False)


def save_random_base(folder, out):
    """A checkpoint with the weights that --random_init gives, in bf16, so that all dtypes are passed through."""
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    model = vanilla()
    source = lm.RandomWeights(model, 0, torch.device("cpu"))
    tensors = {name: source.rows(name, 0, shape[0]).bfloat16() for name, (_, shape, _) in source.tensors.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


# ---------------------------------------------------------------- inside a process group


def vanilla(**changes):
    with torch.device("meta"):
        return lm.Transformer(lm.parse_config(SHAPE | changes))


def sharded(qlora, precision="mixed", offload=False, replicas=1):
    model = vanilla()
    source = lm.RandomWeights(model, 0, torch.device("cpu"))
    if qlora:
        nf4.quantize_linears_(model.model.layers)
        lm.add_lora_(model, 5, 10, 0.0, lm.LORA_TARGETS)
    train.set_precision_(model, precision)
    train.shard_(model, torch.device("cpu"), precision, True, True, offload, True, replicas=replicas)
    model.to_empty(device="cpu").tie_()
    lm.load_weights_(model, source, None, 0, torch.device("cpu"), progress=False)
    return model, source


def check_pieces(folder, shapes):
    """Loss and gradients of rows of which each rank holds a piece, against those of the whole rows."""
    rng, rank, world = np.random.default_rng(0), dist.get_rank(), dist.get_world_size()
    starts = np.cumsum([0, 30, 7, 2, 19, 12, 25])
    tokens, supervised = rng.integers(0, 4096, starts[-1]), rng.random(starts[-1]) < 0.5
    for (H, G), packing, dtype in shapes:
        documents = documents_of(tokens, supervised, starts)
        whole = data.Loader(documents, 33, packing, 3, 0, 1, seed=0)
        pieces = data.Loader(documents, 33, packing, 3, rank, world, seed=0, n_pieces=world)
        assert pieces.batch([0, 1]).tokens.numel() == -(-whole.batch([0, 1]).tokens.numel() // world)
        results = {}
        for name, loader, group in (("whole", whole, None), ("pieces", pieces, dist.group.WORLD)):
            batch = loader.batch([0, 1])
            model = vanilla(num_attention_heads=H, num_key_value_heads=G).to_empty(device="cpu")
            lm.load_weights_(model, lm.RandomWeights(model, 0, "cpu"), None, 0, "cpu", False)
            model.compute_dtype, model.sequence_group = dtype, group
            loss = model(batch.tokens, batch.targets, batch.positions, batch.spans, batch.keep_S)
            loss.backward()
            evaluation = train.evaluate(model, loader, torch.device("cpu"), world if group else 1)
            sample = model(torch.arange(20)[None])  # every rank runs all of it
            results[name] = [loss.detach(), *(p.grad for p in model.parameters()), torch.tensor(evaluation), sample]
            if group:
                train.average_gradients_(list(model.parameters()), 1)  # their sum
                dist.all_reduce(results[name][0])
        for got, wanted in zip(results["pieces"], results["whole"], strict=True):
            if dtype is torch.bfloat16:
                assert torch.nn.functional.cosine_similarity(got.flatten(), wanted.flatten(), 0) > 0.999
            else:
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)  # another order of sums


def check_nf4_bytes(folder, replicas=1):
    model, source = sharded(qlora=True, replicas=replicas)
    for name, param in model.named_parameters():
        if name.endswith("weight_codes"):
            stem = name.removesuffix("_codes")
            codes, scales = nf4.quantize(source.rows(stem, 0, param.shape[0]))
            assert torch.equal(param.full_tensor(), codes)
            assert torch.equal(dict(model.named_parameters())[stem + "_scales"].full_tensor(), scales)
            rows = -(-param.shape[0] // (dist.get_world_size() // replicas))
            assert param.to_local().shape[0] <= rows, "a rank holds more than its share"


def check_dequantized_after_all_gather(folder, replicas=1):
    model, source = sharded(qlora=True, replicas=replicas)
    seen = []

    def compare(name, layer):
        whole = source.rows(f"{name}.weight", 0, layer.out_features)
        expected = nf4.dequantize(*nf4.quantize(whole), torch.bfloat16)
        seen.append(torch.equal(nf4.dequantize(layer.weight_codes, layer.weight_scales, torch.bfloat16), expected))

    for name, layer in model.named_modules():
        if isinstance(layer, nf4.NF4Linear):
            layer.register_forward_pre_hook(lambda layer, _, name=name: compare(name, layer))
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert len(seen) == 3 * 7 and all(seen)


def check_a_rank_reads_its_own_rows_only(folder):
    read, rows = [], lm.RandomWeights.rows
    lm.RandomWeights.rows = lambda *args: read.append((args[1], args[3] - args[2])) or rows(*args)  # self, name, start, stop
    model, _ = sharded(qlora=True)
    lm.RandomWeights.rows = rows
    mine = {name.removesuffix("_codes"): len(lm.local(p)[0]) for name, p in model.named_parameters() if "lora" not in name}
    assert sorted(read) == sorted((name, rows) for name, rows in mine.items() if rows and not name.endswith("_scales"))


def status(key):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))  # noqa: SIM115
    return int(lines[key].split()[0]) / 1024


def check_host_memory_stays_flat(folder):
    model = vanilla(**BIG)
    train.set_precision_(model, "bf16")
    train.shard_(model, torch.device("cpu"), "bf16", True, True, False, True)
    model.to_empty(device="cpu").tie_()
    for measured in (False, True):  # the first time touches the pages of the parameters and of all code on the way
        source = lm.Checkpoint(folder)
        before = status("VmRSS")
        if measured:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the kernel's high-water mark starts anew
        lm.load_weights_(model, source, None, 0, torch.device("cpu"), progress=False)
    above, kept = status("VmHWM") - before, sum(lm.local(p)[0].nbytes for p in model.parameters()) / 2**20
    # the rows of one tensor, 8 MiB, as a copy and as mapped pages, and some noise; a file that stays mapped adds 129
    assert kept > 100 and above < 64, f"{above:.0f} MiB above the {kept:.0f} MiB of parameters"


def check_every_ranks_slice_is_saved(folder):
    model, _ = sharded(qlora=False, precision="fp32")
    for number, param in enumerate(model.parameters()):
        mine, start = lm.local(param)  # every row carries its own number, so one rank's rows alone cannot pass
        rows = torch.arange(start, start + len(mine), dtype=torch.float32) + number / 64
        mine.copy_(rows.view(-1, *[1] * (mine.dim() - 1)).expand_as(mine))
    tensors, names = lm.full_tensors(model, trainable_only=False), dict(model.named_parameters())
    lm.save_model(tensors, {name: (tuple(p.shape), torch.float32) for name, p in names.items()}, folder, SHAPE, folder, None,
                  write=dist.get_rank() == 0)
    dist.barrier()
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == names.keys()
    for number, name in enumerate(names):
        expected = torch.arange(len(saved[name]), dtype=torch.float32) + number / 64
        assert torch.equal(saved[name].reshape(len(expected), -1).amin(1), expected), name
        assert torch.equal(saved[name].reshape(len(expected), -1).amax(1), expected), name


def check_update_is_skipped_when_a_gradient_is_infinite(folder):
    model, _ = sharded(qlora=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = train.make_optimizer(trained, 1e-2, 0.01, fused=True)
    before = [p.to_local().clone() for p in trained]
    for p in trained:
        p.grad = torch.zeros_like(p)
    if dist.get_rank() == 0:  # one rank, one element
        trained[0].grad.to_local()[0, 0] = float("inf")
    norm = train.clip_gradients_(trained, 1.0)
    assert not norm.isfinite()  # on every rank
    optimizer.found_inf = (~norm.isfinite()).float()
    optimizer.step()
    assert all(torch.equal(a, p.to_local()) for a, p in zip(before, trained))
    optimizer.found_inf = torch.zeros(())
    for p in trained:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(not torch.equal(a, p.to_local()) for a, p in zip(before, trained) if p.to_local().numel())


def check_norm_is_global(folder, replicas=1):
    model, _ = sharded(qlora=False, precision="fp32", replicas=replicas)
    trained = list(model.parameters())
    for p in trained:
        p.grad = torch.full_like(p, 0.5)
    expected = 0.5 * sum(p.numel() for p in trained) ** 0.5
    assert abs(train.clip_gradients_(trained, 0).item() / expected - 1) < 1e-6  # float32
    train.clip_gradients_(trained, 1.0)
    clipped = train.clip_gradients_(trained, 0).item()
    assert abs(clipped - 1) < 1e-4, clipped  # 700,000 squares summed in float32


@pytest.mark.parametrize("world", [1, 3, 4])
def test_nf4_bytes_do_not_depend_on_the_world_size(tmp_path, world):
    on_ranks(world, check_nf4_bytes, tmp_path)


@pytest.mark.parametrize("check", [check_nf4_bytes, check_dequantized_after_all_gather, check_norm_is_global])
def test_replicas_hold_and_do_the_same(tmp_path, check):
    on_ranks(4, check, tmp_path, 2)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_pieces_of_rows_have_the_loss_and_the_gradients_of_whole_rows(tmp_path, world):
    heads = {2: [(4, 1), (4, 4), (2, 2)], 3: [(6, 2), (3, 1), (12, 4)], 4: [(4, 1), (4, 2), (12, 3), (8, 8)]}[world]
    shapes = [(one, packing, torch.float32) for one, packing in zip(heads, itertools.cycle([True, False]))]
    on_ranks(world, check_pieces, tmp_path, [*shapes, (heads[0], True, torch.bfloat16)])


def test_nf4_weights_are_bit_equal_after_the_all_gather(tmp_path):
    on_ranks(3, check_dequantized_after_all_gather, tmp_path)


def test_a_rank_reads_its_own_rows_only(tmp_path):
    on_ranks(3, check_a_rank_reads_its_own_rows_only, tmp_path)


BIG = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 5}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's high-water mark of memory")
def test_host_memory_stays_flat_while_loading(tmp_path):
    tensors = {name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in vanilla(**BIG).named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors")
    on_ranks(2, check_host_memory_stays_flat, tmp_path)


def test_an_export_holds_the_rows_of_every_rank(tmp_path):
    on_ranks(3, check_every_ranks_slice_is_saved, tmp_path)


def test_an_infinite_gradient_on_one_rank_changes_no_weight_on_any(tmp_path):
    on_ranks(3, check_update_is_skipped_when_a_gradient_is_infinite, tmp_path)


def test_gradient_norm_is_that_of_all_ranks(tmp_path):
    on_ranks(3, check_norm_is_global, tmp_path)


def count_reductions(argv, counts, late):
    """Writes [elements of the gradients, whether replicas average them] of each reduce-scatter."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as units

    seen, reduce, signature = [], units.foreach_reduce, inspect.signature(units.foreach_reduce)

    def counted(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        averaged = given["all_reduce_group"] is not None and given["all_reduce_grads"]
        seen.append([sum(grad.numel() for grad in given["unsharded_grads"]), averaged])
        return reduce(*args, **kwargs)

    units.foreach_reduce, train.LATE = counted, late
    train.main(argv)
    counts.write_text(json.dumps(seen))


@pytest.mark.parametrize("replicas, late, times", [(1, 1 << 30, 1), (1, 0, 3), (2, 1 << 30, 1), (2, 0, 3)])
def test_gradients_are_reduced_once_a_step_or_between_replicas(job, tmp_path, replicas, late, times):
    world = 2 * replicas
    argv = [*job, *METHODS["full"], *SPLITS[world], "--fsdp2", "--replicas", replicas, "--out", tmp_path / "run"]
    logs = [tmp_path / f"rank{rank}.log" for rank in range(world)]
    codes = start_ranks(world, count_reductions, ([str(arg) for arg in argv], tmp_path / "n", late), logs)
    assert codes == [0] * world, logs[0].read_text()
    seen = json.loads((tmp_path / "n").read_text())
    units, n_params = SHAPE["num_hidden_layers"] + 3, sum(p.numel() for p in vanilla().parameters())
    # blocks, embedding, head and the last norm; three steps of three micro-batches each
    assert len(seen) == 3 * units * times and sum(n for n, _ in seen) == 3 * times * n_params
    assert sum(n for n, averaged in seen if averaged) == (replicas > 1) * 3 * n_params


def count_traffic(flags, world, path):
    path.write_text(json.dumps(counted((flags, world))))


@pytest.mark.parametrize("flags, world", [
    ("--fsdp2 --precision fp32 --grad_accum 3", 8), ("--fsdp2 --qlora --no-shard_embeddings", 8),
    ("--fsdp2 --replicas 2 --grad_accum 2 --sequence_parallel 4", 8), ("--lora --sequence_parallel 2", 2),
])
def test_collectives_move_the_bytes_that_they_have_to(tmp_path, flags, world):
    codes = start_ranks(1, count_traffic, (flags, world, tmp_path / "bytes"), [tmp_path / "log"])
    assert codes == [0], (tmp_path / "log").read_text()
    found, expected = json.loads((tmp_path / "bytes").read_text())
    assert found.pop("everything else", 0) < 1000  # losses, flags
    assert set(found) == {kind for kind, n_bytes in expected.items() if n_bytes}
    for kind, n_bytes in found.items():
        assert n_bytes == pytest.approx(expected[kind], rel=1e-3)  # a norm's gradient is padded


# ---------------------------------------------------------------- faults


def test_a_failed_write_reaches_every_rank(job, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/final.part").write_text("")  # in the way of the export
    _, text, codes = run_ranks(2, [*job, *METHODS["full"], *SPLITS[2], "--fsdp2"], tmp_path / "run")
    assert codes == [1, 1] and text.count("train.py: error:") == 1 and "final.part" in text


def test_an_error_on_rank_0_ends_every_rank(job, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": \n')
    argv = ["--model", job[1], "--random_init", "--data", bad, "--fsdp2"]
    _, text, codes = run_ranks(3, argv, tmp_path / "run")
    assert codes == [1, 1, 1]
    assert text.count("bad.jsonl:2: not valid JSON") == 1  # said once, not by every rank


def test_more_ranks_than_rows_is_refused(job, tmp_path):
    argv = [*job, "--seq_len", 4000, "--fsdp2"]
    _, text, codes = run_ranks(4, argv, tmp_path / "run")
    assert codes == [1] * 4 and "a step takes 4 rows" in text and "the data makes 2" in text


def test_a_diverging_run_stops_and_says_so(job, tmp_path):
    argv = [*job, "--lr", "1e30", "--warmup", 0, "--steps", 9, "--fsdp2", "--log_every", 5]
    rows, text, codes = run_ranks(2, argv, tmp_path / "run")
    assert codes == [3, 3]
    assert "not finite" in text and "Lower --lr" in text
    assert [row["step"] for row in rows] == [1]
    assert not (tmp_path / "run/final").exists()
