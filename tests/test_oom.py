"""Out of memory: foretold by --dry_run, and reported where it happens."""

import json
import math
import os
import re
from typing import Any, NamedTuple

import pytest
import torch
from conftest import in_ci, start_ranks, train_main

import data
import model as lm
import train

# ---------------------------------------------------------------- running out


class Failure(NamedTuple):
    """A function that runs out of memory in a step, and from then on."""

    owner: Any
    name: str
    step: int  # 0: before the first step
    place: str  # the calls that lead to it


FAILURES = {failure.name: failure for failure in (
    Failure(data, "tokenized", 0, "main > open_data (data.py:"),
    Failure(data, "load_weights_", 0, "main > build > load_weights_ (train.py:"),
    Failure(lm.Transformer, "forward", 2, "main > train_step > loss_of (train.py:"),
    Failure(torch.Tensor, "backward", 2, "main > train_step (train.py:"),
    Failure(torch.optim.AdamW, "step", 2, "main > train_step > step_if_finite (train.py:"),
)}


def job(folder, chats, out):
    return ["--model", str(folder), "--random_init", "--precision", "fp32", "--data", str(chats), "--seq_len", "96",
            "--steps", "2", "--save_every", "0", "--out", str(out)]


def run_out(argv, name, error):
    """Runs train.py. On the last rank the function of that name in FAILURES raises the error."""
    failure = FAILURES[name]
    original = getattr(failure.owner, name)
    is_last_rank = int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"])
    n_calls = 0

    def call(*args, **kwargs):
        nonlocal n_calls
        n_calls += 1
        if is_last_rank and n_calls >= failure.step:
            raise error
        return original(*args, **kwargs)

    setattr(failure.owner, name, call)
    return train_main(argv)


@pytest.mark.parametrize("name", FAILURES)
def test_the_report_says_where_and_the_exit_code_is_4(folder, chats, tmp_path, name):
    failure = FAILURES[name]
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if name == "tokenized":  # which runs on the CPU
        error = MemoryError("std::bad_alloc")
    world = 2 if failure.step else 1
    logs = [tmp_path / f"rank{rank}.log" for rank in range(world)]
    codes = start_ranks(world, run_out, (job(folder, chats, tmp_path / "out"), name, error), logs)
    said = logs[-1].read_text()
    assert train.OUT_OF_MEMORY == 4
    assert codes[-1] == 4, said
    assert all(codes), "the other rank has to end, too"
    assert "Traceback" not in said
    assert "out of memory: " in said
    assert "--dry_run --gpu_gib" in said
    assert f'"place": "{failure.place}' in said
    if name == "tokenized":  # before the folder of the run is known
        return
    report = json.loads((tmp_path / "out/oom.json").read_text())
    assert report["place"].startswith(failure.place)
    assert report["error"] == str(error)
    assert report["rank"] == world - 1
    assert report["step"] == failure.step
    assert report["tokens_of_micro_batch"] == (96 if failure.step else 0)


def test_other_errors_keep_their_traceback(folder, chats, tmp_path):
    log = tmp_path / "log"
    argv = job(folder, chats, tmp_path / "out")
    codes = start_ranks(1, run_out, (argv, "load_weights_", RuntimeError("shapes differ")), [log])
    assert codes == [1]
    assert re.search(r"^Traceback(.|\n)*^RuntimeError: shapes differ$", log.read_text(), re.MULTILINE)
    assert not (tmp_path / "out/oom.json").exists()


@pytest.mark.parametrize("error", [
    MemoryError(),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
], ids=str)
def test_out_of_memory_is_recognised(error):
    assert train.is_out_of_memory(error) is True


@pytest.mark.parametrize("error", [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("[gloo] Connection closed by peer"),
], ids=str)
def test_other_errors_are_not_out_of_memory(error):
    assert train.is_out_of_memory(error) is False


# ---------------------------------------------------------------- --dry_run


def dry_run(capsys, line):
    """-> what --dry_run prints."""
    assert train.launch([*line.split(), "--dry_run"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("preset", [
    "llama-2-7b", "qwen3-0.6b", "qwen3-30b-a3b", "qwen3.5-9b",
    *in_ci(("llama-3.1-405b",), ("qwen2.5-7b",), ("qwen3.5-35b-a3b",), ("muse-glimmer-30b",))])
def test_dry_run_prints_the_plan_of_each_kind_of_model_and_writes_nothing(capsys, tmp_path, monkeypatch, preset):
    monkeypatch.chdir(tmp_path)
    for world in (1, 4):
        said = dry_run(capsys, f"--model {preset} --qlora --offload --fsdp2 --world {world}")
        title = f"memory plan, GiB of rank 0 of {world}, micro-batches of 1 x 1024 tokens\n"
        verdict, title, table = said.partition(title)
        assert title
        # without --gpu_gib nobody knows whether it fits
        assert re.fullmatch(r"planning .*\nneeds .* GiB \(including 1 GiB for CUDA and NCCL\)\n(  auto .*\n)?", verdict)
        table, auto, choices = table.partition("--activation_checkpointing auto")
        assert auto
        assert "--resident_blocks auto" in choices
        moments, *rows = table.splitlines()
        assert "*" in moments  # marks the peak
        (total,) = [row.split() for row in rows if row.split()[0] == "all"]
        gib = [float(cell) for cell in total[1:]]
        assert len(gib) >= 3  # moments of a step
        assert max(gib) > 0
        assert "host memory: weights" in table
        assert "fit" not in said
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_at_once_what_it_does(capsys, monkeypatch):
    def take_long(*_):
        assert capsys.readouterr().out == "planning qwen3-4b\n"  # before the plan, which may take seconds
        return train.policy_of(36, 0)

    monkeypatch.setattr(train, "choose_blocks", take_long)
    assert "memory plan" in dry_run(capsys, "--model qwen3-4b")


def test_dry_run_takes_a_model_folder_without_weights_and_counts_the_steps(capsys, folder, chats):
    assert not list(folder.glob("*.safetensors"))
    line = f"--model {folder} --batch_size 2 --gpu_gib 3"
    said = dry_run(capsys, line)
    assert "micro-batches of 2 x 1024 tokens" in said
    assert re.search(r"\nfits: needs .* GiB of 3.00 \(including 1 GiB for CUDA and NCCL\)\n", said)

    said = dry_run(capsys, f"{line} --data {chats} --world 2 --seq_len 96 --epochs 3")
    (n_rows,) = re.findall(r"([\d,]+) rows", said)[:1]
    n_steps = math.ceil(3 * int(n_rows.replace(",", "")) / 4)
    assert said.endswith(f"\n{n_steps:,} steps of 4 rows\n")
    assert train.launch([*line.split(), "--dry_run", "--data", "/nowhere.jsonl"]) == 1
    assert "/nowhere.jsonl" in capsys.readouterr().err


def test_a_plan_says_what_this_run_takes_and_what_would_do(capsys):
    said = dry_run(capsys, "--model qwen3-4b --qlora --gpu_gib 7.7")
    ((least, uses),) = re.findall(r"needs (.*) GiB of 7.70 .*\n  auto uses (.*) GiB, for speed\n", said)
    assert 0.8 * 7.7 < float(uses) < 0.9 * 7.7  # auto keeps more where it fits
    said = dry_run(capsys, "--model qwen3-4b --qlora --gpu_gib 7.7 --activation_checkpointing all")
    assert f"needs {least} GiB" in said


def test_a_plan_of_several_gpus_needs_one_process(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")  # as under torchrun
    assert train.launch(["--model", "qwen3-4b", "--dry_run"]) == 2
    assert "no torchrun; --world N plans for N GPUs" in capsys.readouterr().err


def test_gigabytes_off_the_box_are_answered_with_what_the_card_has(capsys):
    assert "a card of 24 GB has less: --gpu_gib 23.6\n" in dry_run(capsys, "--model qwen3-4b --qlora --gpu_gib 24")
    assert "note" not in dry_run(capsys, "--model qwen3-4b --qlora --gpu_gib 23.6")
