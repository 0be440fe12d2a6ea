"""train.py as people start it: whole runs, what they print and what they write."""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import types
import weakref

import pytest
import torch
from conftest import HERE, losses, read_data, run_ranks
from safetensors.torch import load_file, save_file

import data
import model as lm
import train


def shell(*argv, **environment):
    """A command on the CPU; CUDA_VISIBLE_DEVICES="0" puts it on the first GPU."""
    command = [sys.executable, *map(str, argv)]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, env=env, timeout=240)


@pytest.fixture(scope="module")
def main_job(chats, tmp_path_factory):
    """The README's main command, cut to four steps."""
    out = tmp_path_factory.mktemp("main") / "run"
    done = shell("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 4, "train.py", "--fsdp2", "--qlora",
                 "--offload", "--seq_len", 256, "--steps", 4, "--merge", "--eval_data", chats, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done


def test_main_job_writes_what_it_promises(main_job):
    out, _ = main_job
    assert {path.name for path in out.iterdir()} == {"args.json", "metrics.jsonl", "checkpoint-4", "final", "merged"}
    assert {path.name for path in (out / "final").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in (out / "merged").iterdir()} == {path.name for path in (HERE / "tiny").iterdir()}
    args = json.loads((out / "args.json").read_text())
    adapter = load_file(out / "final/adapter_model.safetensors")
    assert {t.dtype for t in adapter.values()} == {torch.float32}  # the parameters that train, not their bf16 copies
    assert args["world"] == 4 and args["torch"] == torch.__version__ and args["qlora"] is True and args["lora_rank"] == 16


def test_main_job_logs_every_figure(main_job):
    rows = [json.loads(line) for line in (main_job[0] / "metrics.jsonl").read_text().splitlines()]
    keys = {"step", "epoch", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "mem_gib", "mem_reserved_gib",
            "step_s", "data_s"}
    saved = {"step", "checkpoint_gib", "checkpoint_s", "checkpoint_stall_s"}
    assert [set(row) for row in rows] == [keys, keys, saved, {"step", "eval_loss", "eval_tokens"}]
    assert [row["step"] for row in rows] == [1, 4, 4, 4]
    assert all(math.isfinite(row["loss"]) and row["tokens_per_s"] > 0 for row in rows[:2])


def test_main_job_says_what_is_on_and_why(main_job):
    said = main_job[1].stdout
    for feature in ("precision", "lora", "qlora", "fsdp2", "reshard_after_forward", "shard_embeddings", "offload activations",
                    "offload params", "activation_checkpointing", "chunked_ce", "adamw8bit", "stochastic_rounding",
                    "optim_in_backward", "fused_adamw", "packing"):
        assert f"\n  {feature} " in said
    if not torch.cuda.is_available():
        assert "nothing to move" in said
    assert "sample before training" in said and "sample after training" in said and " left\n" in said


def test_merged_model_is_base_plus_adapter(main_job):
    out, _ = main_job
    base, merged = load_file(HERE / "tiny/model.safetensors"), load_file(out / "merged/model.safetensors")
    adapter = load_file(out / "final/adapter_model.safetensors")
    assert base.keys() == merged.keys()
    for name, w in base.items():
        stem = lm.PEFT_PREFIX + name.removesuffix("weight")
        if stem + "lora_A.weight" in adapter:
            w = w.float() + 2.0 * (adapter[stem + "lora_B.weight"] @ adapter[stem + "lora_A.weight"])
            assert not torch.equal(merged[name], base[name])
        # bf16 keeps 8 bits: half a unit of the last, and a rounding of the float32 sum that may tip it over
        torch.testing.assert_close(merged[name].float(), w.float(), rtol=0.0041, atol=1e-7)


def test_a_folder_that_holds_a_run_is_not_overwritten(main_job):
    before = (main_job[0] / "args.json").read_bytes()
    done = shell("train.py", "--steps", 1, "--out", main_job[0])
    assert done.returncode != 0 and "holds a run already" in done.stderr and "Traceback" not in done.stderr
    assert (main_job[0] / "args.json").read_bytes() == before


def test_plain_python_trains_and_names_a_fresh_folder(tmp_path):
    shutil.copytree(HERE.parent, tmp_path / "oomph", ignore=shutil.ignore_patterns(".*", "out", "goldens", "__pycache__"))
    command = [sys.executable, "train.py", "--seq_len", "256", "--steps", "3", "--sample", ""]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "oomph", env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "oomph/out").iterdir()
    final = {path.name for path in (run / "final").iterdir()}
    assert final == {path.name for path in (HERE / "tiny").iterdir()}
    assert "sample" not in done.stdout


def test_the_tiny_model_knows_python(tmp_path):
    with torch.device("meta"):
        model = lm.Transformer(lm.parse_config(lm.read_json(HERE / "tiny/config.json")))
    model.to_empty(device="cpu").tie_()
    lm.load_weights_(model, lm.Checkpoint(HERE / "tiny"), None, 0, torch.device("cpu"), progress=False)
    tokenizer = data.Tokenizer(HERE / "tiny")
    rows = [raw for _, raw in itertools.islice(data.stdlib_rows("stdlib:code", held_out=True), 4)]
    (tmp_path / "held_out.jsonl").write_bytes(b"\n".join(rows))
    documents, _ = read_data(tmp_path / "held_out.jsonl", tokenizer, seq_len=256)
    loader = data.Loader(documents, 256, True, 8, 0, 1, 0)
    loader.rows = loader.rows[:24]
    loss, _ = train.evaluate(model, loader, torch.device("cpu"), 1)
    assert loss < 4.2  # nats a token on modules kept from training, 3.5 over all of them; ln(4096) = 8.3 is knowing nothing


def test_it_learns(chats, tmp_path):
    got = losses(1, ["--data", chats, "--qlora", "--seq_len", 128, "--batch_size", 4, "--steps", 12, "--lr", "1e-2",
                     "--warmup", 1], tmp_path / "run")
    assert got[-1] < 0.8 * got[0]


def test_evaluation_is_the_training_loss(folder, chats, tmp_path):
    argv = ["--model", folder, "--random_init", "--data", chats, "--eval_data", chats, "--seq_len", 96, "--precision", "fp32",
            "--lr", 0, "--eval_every", 1, "--steps", 1]
    results = []
    for world in (1, 3):  # unequal numbers of rows on three ranks
        rows, text, codes = run_ranks(world, [*argv, "--fsdp2"], tmp_path / f"run{world}")
        assert codes == [0] * world, text
        results.append([row for row in rows if "eval_loss" in row])
    # all rows as one step of training
    n_rows = int(text.split(" rows of at most")[0].split()[-1])
    one_step = losses(1, [*argv[:-1], 1, "--batch_size", n_rows], tmp_path / "one")
    assert results[0][0]["eval_loss"] == pytest.approx(one_step[0], rel=1e-6)  # float32 sums in another order
    assert results[1][0]["eval_loss"] == pytest.approx(one_step[0], rel=1e-6)
    assert results[0][0]["eval_tokens"] == results[1][0]["eval_tokens"]


def test_unpacked_rows_train_to_the_same_loss_as_packed_ones(folder, chats, tmp_path):
    argv = ["--model", folder, "--random_init", "--data", chats, "--seq_len", 96, "--precision", "fp32", "--steps", 1]
    results = []
    for flags in (["--packing"], ["--no-packing"]):  # all documents as one step, in either layout
        out = tmp_path / flags[0]
        _, text, _ = run_ranks(1, [*argv, *flags, "--lr", 0], tmp_path / f"count{flags[0]}")
        n_rows = int(text.split(" rows of at most")[0].split()[-1])
        results.append(losses(1, [*argv, *flags, "--batch_size", n_rows], out)[0])
    assert results[0] == pytest.approx(results[1], rel=1e-6)  # float32 sums in another order


def test_dropout_trains_and_evaluation_is_without_it(folder, chats, tmp_path):
    argv = ["--model", folder, "--random_init", "--data", chats, "--eval_data", chats, "--seq_len", 96, "--precision", "fp32",
            "--lora", "--steps", 4, "--lr", "1e-2", "--eval_every", 2]
    dropped = losses(2, [*argv, "--fsdp2", "--lora_dropout", 0.5], tmp_path / "a")
    again = losses(2, [*argv, "--fsdp2", "--lora_dropout", 0.5, "--no-activation_checkpointing"], tmp_path / "b")
    plain = losses(2, [*argv, "--fsdp2"], tmp_path / "c")
    assert dropped == pytest.approx(again, abs=1e-6)  # the recomputation draws the same mask
    assert dropped[0] == plain[0] and dropped[2:] != plain[2:]  # B starts at zero, so the first loss has no adapter in it


def test_train_on_all_counts_every_token(folder, chats, tmp_path):
    argv = ["--model", folder, "--random_init", "--data", chats, "--seq_len", 96, "--steps", 1, "--log_every", 1]
    some, _, _ = run_ranks(1, argv, tmp_path / "a")
    every, text, _ = run_ranks(1, [*argv, "--train_on", "all"], tmp_path / "b")
    assert every[0]["tokens"] > some[0]["tokens"] and "100.0% trained on" in text


def test_inspect_prints_examples_and_trains_nothing(folder, chats, tmp_path):
    _, text, codes = run_ranks(2, ["--model", folder, "--random_init", "--data", chats, "--inspect", 2], tmp_path / "run")
    assert codes == [0, 0] and text.count("--- example") == 2 and "⟦" in text
    assert not (tmp_path / "run").exists()


def test_a_hub_id_is_found_in_the_cache(tmp_path, chats):
    snapshot = tmp_path / "hub/models--someone--tiny/snapshots/abc"
    shutil.copytree(HERE / "tiny", snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text("abc")
    done = shell("train.py", "--model", "someone/tiny", "--data", chats, "--seq_len", 128, "--lora", "--steps", 1, "--out",
                 tmp_path / "run", HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/final/adapter_config.json").read_text())["base_model_name_or_path"] == "someone/tiny"


def test_large_models_are_written_in_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(lm, "SHARD_BYTES", 1000)
    tensors = {f"t{i}": torch.full((60 + i,), float(i)) for i in range(9)}
    layout = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    lm.save_model(iter(tensors.items()), layout, tmp_path, {"a": 1}, HERE / "tiny", None, write=True)
    source = lm.Checkpoint(tmp_path)
    assert source.tensors.keys() == tensors.keys() and len({file for file, *_ in source.tensors.values()}) > 2
    assert all(torch.equal(source.rows(name, 0, len(t)), t) for name, t in tensors.items())


def test_a_model_is_written_tensor_by_tensor(tmp_path):
    alive = []

    def tensors():
        for i in range(9):
            assert sum(ref() is not None for ref in alive) <= 1  # the one that was just written
            tensor = torch.full((100, 10), float(i))
            alive.append(weakref.ref(tensor))
            yield f"t{i}", tensor

    layout = {f"t{i}": ((100, 10), torch.float32) for i in range(9)}
    lm.save_model(tensors(), layout, tmp_path, {}, HERE / "tiny", None, write=True)
    assert {name: t[0, 0].item() for name, t in load_file(tmp_path / "model.safetensors").items()} == {
        f"t{i}": i for i in range(9)}


def test_files_are_those_of_safetensors_byte_for_byte(tmp_path):
    tensors = {"b": torch.randn(3, 5).bfloat16(), "a": torch.randn(7), "é": torch.randn(2, 2).half(), "c": torch.randn(0, 4)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    file = lm.SafetensorsFile(tmp_path / "ours", {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()})
    for name in reversed(tensors):  # in any order
        file.write(name, tensors[name])
    file.close()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_full_disk_is_noticed_before_writing(tmp_path):
    with pytest.raises(ValueError, match="GiB free on this disk"):
        lm.need_space(tmp_path, 1 << 60)


@pytest.mark.parametrize("schedule, middle, end", [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)])
def test_learning_rate_schedules(schedule, middle, end):
    lrs = [train.lr_at(step, 110, 10, schedule, 1.0, 0.1) for step in range(111)]
    assert lrs[0] == pytest.approx(1 / 11) and lrs[9] == pytest.approx(10 / 11) and lrs[10] == 1.0
    assert lrs[60] == pytest.approx(middle) and lrs[110] == pytest.approx(end)


def test_decay_spares_norms_and_biases():
    matrix, norm = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    groups = train.make_optimizer([matrix, norm], 1e-3, 0.1, fused=True).param_groups
    assert [(group["weight_decay"], group["params"]) for group in groups] == [(0.1, [matrix]), (0.0, [norm])]


def test_an_evaluation_between_log_lines_does_not_count_as_training(tmp_path, monkeypatch):
    clock = iter([0.0, 1.0, 1.0, 2.0, 2.0, 30.0])  # begin; two steps' data; the log line
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(clock))
    log = train.Log(tmp_path, print, 2, 1, torch.device("cpu"))
    for step in range(2):
        log.start_step()
        log.data_ready([10, 100], 0)
        if step == 0:
            log.write_eval(step + 1, 1.0, 5, seconds=20.0)
    log.write(1, 1.0, 1e-3, 1.0)
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["step_s"] == 5.0 and row["tokens_per_s"] == 20.0  # 200 tokens in 30 - 20 seconds


def test_flops_of_a_step_are_six_per_weight_and_token():
    c = lm.parse_config(lm.preset_config("llama-3.1-8b"))
    full = train.step_flops(c, 4096, 4096, 4096**2, None) / 4096
    lora = train.step_flops(c, 4096, 4096, 4096**2, 41_943_040) / 4096
    assert full == pytest.approx(48.8e9, rel=0.01)  # 6 * 7.5e9 + attention, counted by hand
    assert lora == pytest.approx(34.0e9, rel=0.01)



# ---------------------------------------------------------------- on a GPU

GPU_FLAGS = [[], ["--fsdp2"], ["--fsdp2", "--offload"], ["--fsdp2", "--offload", "params"], ["--offload"],
             ["--no-activation_checkpointing"], ["--no-chunked_ce"], ["--no-packing"], ["--optim", "adamw8bit"],
             ["--grad_accum", "1", "--optim_in_backward"], ["--grad_accum", "1", "--optim_in_backward", "--fsdp2"],
             ["--grad_accum", "1", "--optim_in_backward", "--fsdp2", "--offload", "params"]]


@pytest.mark.gpu
@pytest.mark.parametrize("method", [[], ["--lora"], ["--qlora"]], ids=str)
@pytest.mark.parametrize("flags", GPU_FLAGS, ids=str)
def test_a_gpu_trains_to_the_losses_of_the_cpu(chats, tmp_path, method, flags):
    argv = ["--data", chats, "--seq_len", 128, "--batch_size", 2, "--grad_accum", 2, "--steps", 5, "--precision", "fp32",
            *method, *flags]
    expected = losses(1, argv, tmp_path / "cpu")
    done = shell("train.py", *argv, "--log_every", 1, "--out", tmp_path / "gpu", CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "gpu/metrics.jsonl").read_text().splitlines()]
    # float32 on both, sums in another order; five steps of Adam carry the rounding on
    assert [row["loss"] for row in rows] == pytest.approx(expected, abs=1e-3)
    assert rows[-1]["mem_reserved_gib"] > 0


@pytest.mark.gpu
def test_gpu_memory_falls_with_every_rung(chats, tmp_path):
    shape = ["--model", "qwen2.5-0.5b", "--random_init", "--data", chats, "--train_on", "all", "--seq_len", 4096, "--steps", 2,
             "--log_every", 1]
    ladder = [["--no-activation_checkpointing", "--no-chunked_ce"], ["--no-activation_checkpointing"], [], ["--lora"],
              ["--qlora"], ["--qlora", "--fsdp2", "--offload"]]
    peaks = []
    for number, flags in enumerate(ladder):
        out = tmp_path / str(number)
        done = shell("train.py", *shape, *flags, "--out", out, CUDA_VISIBLE_DEVICES="0")
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["mem_gib"])
    assert peaks == sorted(peaks, reverse=True), peaks


def test_tensorboard_gets_the_numbers_of_metrics(tmp_path, monkeypatch):
    class SummaryWriter:
        def __init__(self, folder, purge_step):
            self.made, self.scalars = (folder, purge_step), []

        def add_scalar(self, *scalar):
            self.scalars.append(scalar)

        def flush(self):
            pass

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    log = train.Log(tmp_path, lambda text: None, 9, 3, torch.device("cpu"), start=4, board=True)
    log.write_eval(5, 2.5, 100, 0.1)
    assert log.board.made == (tmp_path, 5)
    assert log.board.scalars == [("eval_loss", 2.5, 5), ("eval_tokens", 100, 5)]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 5, "eval_loss": 2.5, "eval_tokens": 100}


def test_a_reader_that_goes_away_ends_no_training(monkeypatch):
    def closed(*_, **__):
        raise BrokenPipeError

    given = []
    monkeypatch.setattr("builtins.print", closed)
    monkeypatch.setattr(os, "dup2", lambda source, target: given.append((os.readlink(f"/proc/self/fd/{source}"), target)))
    train.speak("step 1")
    assert given == [("/dev/null", 1)]


def test_a_range_over_kernels_is_not_counted_beside_them():
    def event(key, microseconds, annotation=False):
        return types.SimpleNamespace(key=key, device_type=torch.autograd.DeviceType.CUDA, is_user_annotation=annotation,
                                     self_device_time_total=microseconds)

    events = [event("nvjet_gemm", 600), event("ncclDevKernel_AllGather", 100), event("multi_tensor_adam", 50),
              event("FSDP::all_gather (block)", 100, True), event("Optimizer.step#AdamW.step", 70, True)]
    assert train.where_time_went(events, 1e-3, cuda=True) == (
        "matrix products 60%, the GPU idle 25%, communication 10%, optimizer 5%")
