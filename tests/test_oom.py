"""Out of memory: foretold by --dry_run, and reported where it happens."""

import json
import os
import re

import pytest
import torch
from conftest import start_ranks, train_main

import data
import model as lm
import train

SAYS_CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB."


def flags(folder, text, out):
    return (f"--model {folder} --random_init --precision fp32 --data {text} --seq_len 96 --steps 2 --out {out} "
            "--save_every 0").split()


# ---------------------------------------------------------------- running out

PHASES = {  # function that fails: its owner, the step it fails in, the phase of main then
    "tokenized": (data, 0, "data"), "load_weights_": (data, 0, "weights"), "forward": (lm.Transformer, 2, "forward"),
    "backward": (torch.Tensor, 2, "backward"), "step": (torch.optim.AdamW, 2, "step"),
}


def run_out(argv, name, error):
    """train.py whose last rank gets an error from a function when it is called for the first time, or in step 2."""
    owner, step, _ = PHASES[name]
    original, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) >= step and int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
            raise error
        return original(*args, **kwargs)

    setattr(owner, name, call)
    return train_main(argv)


@pytest.mark.parametrize("name", PHASES)
def test_the_report_says_where_and_the_exit_code_is_4(folder, chats, tmp_path, name):
    _, step, phase = PHASES[name]
    error = MemoryError("std::bad_alloc") if name == "tokenized" else torch.OutOfMemoryError(SAYS_CUDA)
    world = 2 if step else 1
    logs = [tmp_path / f"rank{rank}.log" for rank in range(world)]
    codes = start_ranks(world, run_out, (flags(folder, chats, tmp_path / "out"), name, error), logs)
    said = logs[-1].read_text()
    assert codes[-1] == train.OUT_OF_MEMORY == 4 and all(codes) and "Traceback" not in said, said
    assert "out of memory: " in said and "--dry_run --gpu_gib" in said and f'"phase": "{phase}"' in said
    if name != "tokenized":  # then the folder of the run is known
        report = json.loads((tmp_path / "out/oom.json").read_text())
        assert report["phase"] == phase and report["error"] == str(error)
        expected = world - 1, step, 96 if step else 0
        assert (report["rank"], report["step"], report["tokens_of_micro_batch"]) == expected


def test_other_errors_keep_their_traceback(folder, chats, tmp_path):
    argv, error = flags(folder, chats, tmp_path / "out"), RuntimeError("shapes differ")
    assert start_ranks(1, run_out, (argv, "load_weights_", error), [tmp_path / "log"]) == [1]
    assert re.search(r"^Traceback(.|\n)*^RuntimeError: shapes differ$", (tmp_path / "log").read_text(), re.M)
    assert not (tmp_path / "out/oom.json").exists()


@pytest.mark.parametrize("error, is_one", [
    (MemoryError(), True), (RuntimeError("CUDA error: out of memory"), True), (RuntimeError("std::bad_alloc"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    (RuntimeError("[gloo] Connection closed by peer"), False),
], ids=str)
def test_out_of_memory_is_told_from_other_errors(error, is_one):
    assert train.is_out_of_memory(error) is is_one


# ---------------------------------------------------------------- --dry_run


def dry_run(capsys, line):
    """-> what --dry_run prints."""
    assert train.launch([*line.split(), "--dry_run"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("preset", data.PRESETS)
def test_dry_run_prints_the_plan_of_every_preset_and_writes_nothing(capsys, tmp_path, monkeypatch, preset):
    monkeypatch.chdir(tmp_path)
    for world in (1, 4):
        said = dry_run(capsys, f"--model {preset} --qlora --offload --fsdp2 --world {world}")
        _, head, moments, *rows = said.splitlines()
        assert f"rank 0 of {world}, micro-batches of 1 x 1024 tokens" in head and "fit" not in said
        (totals,) = [[float(number) for number in row.split()[1:]] for row in rows if row.split()[0] == "all"]
        assert "*" in moments and len(totals) >= 3 and max(totals) > 0 and "host memory" in rows[-1]
    assert not list(tmp_path.iterdir())


def test_dry_run_takes_a_model_folder_without_weights_and_reads_no_data(capsys, folder):
    assert not list(folder.glob("*.safetensors"))
    said = dry_run(capsys, f"--model {folder} --data /nowhere.jsonl --batch_size 2 --gpu_gib 4")
    assert "micro-batches of 2 x 1024 tokens" in said
    assert said.endswith(" GiB of 4.00 (including 1 GiB for CUDA and NCCL): fits\n")
