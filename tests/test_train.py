"""train.py as people start it: whole runs, what they print and what they write."""

import argparse
import contextlib
import errno
import fcntl
import io
import json
import math
import os
import random
import re
import shlex
import shutil
import stat
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from conftest import (
    HANG_S, HERE, TRAIN, build, check_merges_later, losses, random_model, ranks_that_print, read_data,
    run_ranks, state_of)
from safetensors.torch import load_file, save_file
from test_formats import byte_level_tokenizer

import data
import model as lm
import train

CPU = torch.device("cpu")
ROOT = HERE.parent  # where train.py is
ALONE = train.Ranks(False, 1800)
ALONE.device = CPU  # also on a machine with a GPU


def shell(*argv, cwd=ROOT, **environment):
    """Runs a Python command that sees no GPU -> what subprocess.run() returns. It may take any time, but whoever has
    printed nothing for ten minutes hangs."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
    command = [sys.executable, *map(str, argv)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=env)
    printed = None
    while process.returncode is None:
        try:
            stdout, stderr = process.communicate(timeout=HANG_S)
        except subprocess.TimeoutExpired as waiting:
            if waiting.output == printed:  # all that it has printed so far
                process.kill()
                raise
            printed = waiting.output
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def metrics_of(out):
    """The rows of metrics.jsonl, each of which must be JSON."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def loader_of(chats, packing=True):
    """All rows of the chats, 96 tokens long, one after the other."""
    documents, _ = read_data(chats, data.Tokenizer(HERE / "tiny"), seq_len=96)
    return data.Loader(documents, 96, packing, batch_size=4, seed=0, rank=0, world=1)


# ---------------------------------------------------------------- the README's main command


class MainJob(NamedTuple):
    out: Path
    said: str  # what all ranks printed
    rows: list  # of metrics.jsonl


@pytest.fixture(scope="module")
def main_job(few_chats, tmp_path_factory):
    """The README's main command, cut to a few steps. All tests of it share this one run."""
    out = tmp_path_factory.mktemp("main") / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    method = ["--fsdp2", "--qlora", "--offload", "--merge"]
    # answers of a few tokens: each token gathers the shards of all blocks
    size = ["--seq_len", 256, "--steps", 12, "--eval_data", few_chats, "--max_new_tokens", 8]
    size += ["--data", *train.DEMO_DATA]  # as without it, and --eval_data asks for one
    done = shell(*torchrun, TRAIN, *method, *size, "--out", out)
    assert done.returncode == 0, done.stderr
    return MainJob(out, done.stdout, metrics_of(out))


@pytest.mark.bf16
def test_main_job_writes_what_it_promises(main_job):
    out = main_job.out
    checkpoints = {"checkpoint-6", "checkpoint-12"}  # of the first evaluation, which is the best one by then
    assert names_in(out) == {"args.json", "metrics.jsonl", "loss.svg", "lock", "final", "merged", *checkpoints}
    assert names_in(out / "final") >= {"adapter_config.json", "adapter_model.safetensors"}
    of_a_model = names_in(HERE / "tiny") - {"docs.jsonl"}  # which is the demo's data
    assert names_in(out / "merged") == of_a_model | {"generation_config.json"}
    args = json.loads((out / "args.json").read_text())
    assert args["world"] == 2
    assert args["torch"] == torch.__version__
    assert args["qlora"] is True


KEYS_OF_A_STEP = {
    "step", "epoch", "loss", "losses", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "mem_gib",
    "mem_reserved_gib", "step_s", "data_s",
}


@pytest.mark.bf16
def test_metrics_of_the_main_job_show_that_it_learns(main_job):
    of_steps = [row for row in main_job.rows if "loss" in row]
    of_evaluations = [row for row in main_job.rows if "eval_loss" in row]
    assert [row["step"] for row in of_evaluations] == [6, 12]  # a third of that would take a tenth of the run
    assert "\nevaluation: every 6 steps, and after the last (--eval_every)\n" in main_job.said
    for row in of_evaluations:
        assert row.keys() == {"step", "eval_loss", "eval_tokens"}
    for row in of_steps:
        assert row.keys() == KEYS_OF_A_STEP
        assert math.isfinite(row["loss"])
        assert row["tokens_per_s"] > 0
    # the first ten and the last; every row that follows ten seconds of silence comes on top, on a slow machine
    assert {*range(1, 11), 12} <= {row["step"] for row in main_job.rows}
    first = of_steps[0]["loss"]
    last = of_steps[-1]["loss"]
    assert last < first < 5  # nats a token; ln(4096) = 8.3 is knowing nothing of Python


WORDS_OF_THE_START = [
    "adapters on all-linear: rank 16, alpha 32; frozen blocks in NF4\n",
    "--activation_checkpointing auto: the backward recomputes 6 of 6 blocks\n",
    "--offload activations: nothing to do, a CPU has them in host memory\n",
]


@pytest.mark.bf16
def test_main_job_says_what_was_decided_and_what_is_not_at_its_default(main_job):
    said = main_job.said
    precision = "mixed" if torch.cpu._is_avx512_bf16_supported() else "fp32"
    assert f"\n  --precision {precision}: trained weights in float32, all else in " in said
    for words in WORDS_OF_THE_START:
        assert f"\n  {words}" in said
    assert "stay on the GPU" not in said  # there is none

    begin = said.index("\ntiny (")  # the model's line, and below it what was decided and the flags
    end = said.index("\n12 steps of ")
    start = said[begin:end]
    flags = " ".join(start[start.index("  flags: ") :].split())
    assert flags.startswith("flags: --fsdp2 --qlora --offload --merge --seq_len 256 --steps 12 --eval_data ")
    assert f" --max_new_tokens 8 --data {train.DEMO_DATA[0]} --out " in flags
    assert flags.endswith("/run")
    lines = start.splitlines()[1:]
    assert len(lines) <= 20, said
    assert all(len(line) <= 80 for line in lines), said


@pytest.mark.bf16
def test_main_job_says_what_it_has_done(main_job):
    for words in (
        "\nbefore: ",
        "\nafter: ",
        "\nstep  1/12  loss ",
        "checkpoint-12: ",
        "12 steps in ",
        "step 12  eval loss ",
        f"done: {main_job.out}/final and {main_job.out}/merged",
    ):
        assert words in main_job.said


@pytest.mark.rounding
@pytest.mark.bf16
def test_merged_model_is_base_plus_adapter(main_job):
    base = load_file(HERE / "tiny/model.safetensors")
    merged = load_file(main_job.out / "merged/model.safetensors")
    adapter = load_file(main_job.out / "final/adapter_model.safetensors")
    assert {t.dtype for t in adapter.values()} == {torch.float32}  # the parameters that train, not their bf16 copies
    assert base.keys() == merged.keys()
    for name, w in base.items():
        expected = w.float()
        stem = data.PEFT_PREFIX + name.removesuffix("weight")
        if stem + "lora_A.weight" in adapter:
            a_RD = adapter[stem + "lora_A.weight"]
            b_NR = adapter[stem + "lora_B.weight"]
            expected = expected + 2.0 * (b_NR @ a_RD)  # --lora_alpha 32 / --lora_rank 16
            assert not torch.equal(merged[name], w)
        # bf16 keeps 8 bits: half a unit of the last, and a rounding of the float32 sum that may tip it over
        torch.testing.assert_close(merged[name].float(), expected, rtol=0.0041, atol=1e-7)


@pytest.mark.bf16
def test_a_qlora_run_is_merged_later_into_the_16_bit_weights_to_the_same_bytes(main_job, tmp_path, capsys):
    check_merges_later(main_job.out, tmp_path)
    said = capsys.readouterr().out
    assert f"done: {tmp_path}/later/merged (no training, because no --data was given)" in said
    assert "docs.jsonl" not in said
    assert train.launch(["--merge", "--model", str(tmp_path / "later/merged")]) == 2
    assert f"--merge: {tmp_path}/later/merged has no adapter to merge" in capsys.readouterr().err


@pytest.mark.bf16
def test_a_merge_goes_to_out_if_it_is_given_and_a_run_is_not_written_to_by_two(main_job, tmp_path, capsys):
    final = shutil.copytree(main_job.out / "final", tmp_path / "run/final")
    shutil.copy(main_job.out / "args.json", tmp_path / "run")
    argv = ["--merge", "--adapter", str(tmp_path / "run")]  # of the built-in model
    assert train.launch([*argv, "--out", str(tmp_path / "m")]) == 0
    assert names_in(tmp_path / "m") == {"args.json", "lock", "merged"}
    lock = train.lock_folder(tmp_path / "run")
    assert train.launch(argv) == 1
    assert "another process writes to it" in capsys.readouterr().err
    lock.close()
    assert names_in(tmp_path / "run") == {"args.json", "lock", "final"}
    assert names_in(final) == names_in(main_job.out / "final")


@pytest.mark.bf16
@pytest.mark.parametrize("flags", ["--dpo", "--add_tokens <call> --train_embeddings"])
def test_what_needs_a_whole_model_says_how_to_make_one_of_a_run(main_job, tmp_path, capsys, flags):
    run = tmp_path / "run"
    shutil.copytree(main_job.out / "final", run / "final")
    assert train.launch([*flags.split(), "--model", str(run)]) == 2
    assert f"merge the adapter first (--merge --model {run})" in capsys.readouterr().err


@pytest.mark.rounding
def test_rslora_is_merged_written_and_brought_by_an_adapter(tmp_path, chats):
    settings = ["--data", chats, "--seq_len", 128, "--precision", "fp32", "--steps", 1, "--warmup", 0, "--merge",
                "--sample", ""]
    first = ["--lora", "--rslora", "--lora_rank", 4, "--lora_alpha", 6, "--lr", 1e-2]
    further = ["--adapter", tmp_path / "first/final", "--lr", 0]
    for name, flags in (("first", first), ("further", further)):
        out = tmp_path / name
        _, said, codes = run_ranks(1, [*settings, *flags], out)
        assert codes == [0], said
        assert ": rank 4, alpha 6, rsLoRA" in said
        assert json.loads((out / "final/adapter_config.json").read_text())["use_rslora"] is True
        base = load_file(HERE / "tiny/model.safetensors")
        merged = load_file(out / "merged/model.safetensors")
        adapter = load_file(out / "final/adapter_model.safetensors")
        stem = "model.layers.0.mlp.up_proj."
        product = adapter[f"{data.PEFT_PREFIX}{stem}lora_B.weight"] @ adapter[f"{data.PEFT_PREFIX}{stem}lora_A.weight"]
        expected = base[f"{stem}weight"].float() + 3.0 * product  # 6 over the root of 4
        assert not torch.equal(merged[f"{stem}weight"], base[f"{stem}weight"])
        # bf16 keeps 8 bits
        torch.testing.assert_close(merged[f"{stem}weight"].float(), expected, rtol=0.0041, atol=1e-7)


@pytest.mark.bf16
def test_chat_answers_each_line_of_a_pipe_with_what_a_run_has_made(main_job):
    asked = "What does `os.getcwd()` do?\n/reset\n\nWhat does `os.getcwd()` do?\n"
    command = [sys.executable, TRAIN, "--chat", "--model", main_job.out, "--max_new_tokens", "8"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True)
    assert done.returncode == 0
    first, second = done.stdout.splitlines()
    assert first == second != ""  # after /reset the same question gets the same greedy answer


# ---------------------------------------------------------------- what a run prints before it begins


@pytest.mark.parametrize("variables, n_threads", [
    ({}, [8]),
    ({"OMP_NUM_THREADS": ""}, [8]),
    ({"OMP_NUM_THREADS": "1"}, []),  # torch has read it, and it stands
    ({"OMP_NUM_THREADS": "3"}, []),
    # torchrun sets 1 where the user has set nothing
    ({"OMP_NUM_THREADS": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}, [4]),
    ({"OMP_NUM_THREADS": "3", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}, []),
], ids=str)
def test_ranks_share_the_cores_unless_the_user_has_set_threads(monkeypatch, variables, n_threads):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train, "allowed_cores", lambda: 8)
    given = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    train.prepare_device(0, int(variables.get("LOCAL_WORLD_SIZE", 1)))
    assert given == n_threads


@pytest.mark.parametrize("files, n_cores, gib", [
    # none, and none that limits
    ({}, 8, 64),
    ({"cpu.max": "max 100000", "memory.max": "max"}, 8, 64),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
      "memory/memory.limit_in_bytes": "9223372036854771712"}, 8, 64),
    # a container's own, rounded up, and at least one core
    ({"cpu.max": "150000 100000", "memory.max": str(2**33)}, 2, 8),
    ({"cpu.max": "20000 100000"}, 1, 64),
    ({"cpu.max": "9900000 100000", "memory.max": str(2**40)}, 8, 64),
    # a group's own, and those of the groups above it
    ({"/proc/self/cgroup": "0::/jobs/7/step", "jobs/7/step/cpu.max": "max 100000", "jobs/7/cpu.max": "300000 100000",
      "jobs/cpu.max": "500000 100000", "jobs/memory.max": str(2**32), "other/memory.max": "1"}, 3, 4),
    # version 1, where each controller has a tree of its own, and two may share one
    ({"/proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/job/step\n1:name=systemd:/\n0::/",
      "cpu,cpuacct/job/step/cpu.cfs_quota_us": "200000", "cpu,cpuacct/job/step/cpu.cfs_period_us": "50000",
      "memory/job/memory.limit_in_bytes": str(2**34)}, 4, 16),
    # a container under version 1: its path is the machine's, and its own group is the root that it sees
    ({"/proc/self/cgroup": "4:memory:/docker/ab\n2:cpu:/docker/ab", "cpu/cpu.cfs_quota_us": "100000",
      "cpu/cpu.cfs_period_us": "100000", "memory/memory.limit_in_bytes": str(2**31)}, 1, 2),
], ids=str)
def test_cores_and_memory_are_those_that_the_container_allows(monkeypatch, files, n_cores, gib):
    def read_text(path):
        name = str(path).removeprefix("/sys/fs/cgroup/")
        if name not in files:
            raise FileNotFoundError(path)
        return files[name] + "\n"

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**24}.__getitem__)
    found = train.allowed_cores(), train.allowed_memory()
    monkeypatch.undo()  # pytest itself reads files
    assert found == (n_cores, gib * 2**30)


def test_windows_is_told_of_wsl_before_anything_fails_there():
    as_there = "import runpy, sys; sys.platform = 'win32'; sys.modules['fcntl'] = None"
    done = shell("-c", f"{as_there}; runpy.run_path('train.py', run_name='__main__')")
    assert done.returncode == 1
    assert done.stderr.startswith("train.py: error: ")
    assert "WSL" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("flag, has_bf16, precision", [
    ("--qlora", True, "mixed"),
    ("--qlora", False, "fp32"),
    ("--chat", True, "bf16"),
    ("--chat", False, "fp32"),
])
def test_the_default_precision_is_what_the_cpu_computes_fast(monkeypatch, flag, has_bf16, precision):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    args = train.parse_args([flag])
    assert train.default_precision(args.chat, CPU) == precision


def start_of(argv, capsys):
    """What print_start() prints for a run of qwen3-0.6b on eight ranks."""
    model = SimpleNamespace(
        config=lm.parse_config(data.PRESETS["qwen3-0.6b"]),
        compute_dtype=torch.bfloat16,
        parameters=list,  # none
    )
    ranks = SimpleNamespace(world=8, device=CPU, device_name="CPU", say=print)
    args = train.parse_args(argv)
    train.resolve_for_model(args, model.config, {}, CPU)
    run = train.RunSpec(args, model.config, ranks.world, args.seq_len)
    train.print_start(argv, run, model, range(0), train.blocks_as_asked(run), ranks)
    return capsys.readouterr().out


EVERY_FEATURE = """
    --precision bf16 --qlora --nf5 --seq_len 99999 --fsdp2 --replicas 2 --sequence_parallel 2 --offload --tiled_mlp 4096
    --optim adamw8bit --stochastic_rounding --optim_in_backward --compile --clip 0 --lora_dropout 0.1 --min_lr 0.1
    --train_embeddings --warmup 0 --schedule linear --weight_decay 0 --seed 1
"""


def test_the_start_fits_a_screen_with_every_feature_on(capsys):
    lines = start_of(EVERY_FEATURE.split(), capsys).splitlines()
    assert len(lines) <= 18, lines  # two more are say_machine()'s
    assert max(map(len, lines)) <= 80, lines


def flags_said(argv, capsys):
    """The words behind "flags:" in the start of a run, or none without that line."""
    said = start_of(argv, capsys)
    _, _, behind = said.partition("  flags: ")
    flags, _, _ = behind.partition("  note: ")
    return shlex.split(flags)


def test_the_start_has_the_flags_as_they_are_typed(capsys):
    typed = ["--qlora", "--nf5", "--lora_rank", "8", "--lora_dropout", "0.1", "--columns", "question=instruction",
             "--seq_len", "2048", "--no-packing", "--sample", "What is it?"]
    assert flags_said(typed, capsys) == typed
    # and not what follows from --qlora and the model: alpha, targets, the learning rate
    assert flags_said(["--qlora", "--warmup", "0.03"], capsys) == ["--qlora", "--warmup", "0.03"]
    assert flags_said([], capsys) == []


def test_a_long_command_is_shown_by_its_beginning(capsys):
    tokens = [f"<token {i}>" for i in range(1000)]
    said = start_of(["--add_tokens", *tokens], capsys)
    assert "  flags: --add_tokens '<token 0>' '<token 1>'" in said
    assert "characters)" in said
    assert len(said) < 2000


GIB = 2**30


def cards(*names):
    """What torch.cuda says of a machine with these GPUs of 80 GB."""
    return {"is_available": lambda: bool(names), "device_count": lambda: len(names),
            "get_device_properties": lambda i: SimpleNamespace(name=names[i], total_memory=int(79.1 * GIB))}


def words_of(text):
    """Text that may have been wrapped, on one line."""
    return " ".join(text.split())


@pytest.mark.parametrize("names, n_local, words", [
    ([], 1, "machine: no GPU, 26 CPU cores, 200.0 GiB of host memory\n"),
    (["NVIDIA H100 80GB HBM3"], 1, "machine: 1 of 1 GPU (NVIDIA H100 80GB HBM3, 79.1 GiB), 26 CPU cores, 200.0 GiB\n"
                                   "  of host memory\n"),
    (["H100"] * 4, 4, "machine: 4 of 4 GPUs (H100, 79.1 GiB), 26 CPU cores, 200.0 GiB of host memory\n"),
    (["H100", "A100"], 1, "machine: 1 of 2 GPUs (H100, 79.1 GiB; A100, 79.1 GiB), 26 CPU cores, 200.0 GiB\n"
                          "  of host memory\n"
                          "note: 1 of 2 GPUs is idle: torchrun --nproc_per_node 2 train.py ... trains on\n  all\n"),
])
def test_the_start_says_what_it_has_found_and_which_gpus_are_idle(monkeypatch, capsys, names, n_local, words):
    for name, call in cards(*names).items():
        monkeypatch.setattr(torch.cuda, name, call)
    monkeypatch.setattr(train, "allowed_cores", lambda: 26)
    monkeypatch.setattr(train, "allowed_memory", lambda: 200 * GIB)
    device = torch.device("cuda" if names else "cpu")
    train.say_machine(ranks_that_print(device=device, n_local=n_local))
    assert capsys.readouterr().out == words


OLD_DRIVER = "CUDA initialization: The NVIDIA driver on your system is too old (found version 12000)."


@pytest.mark.parametrize("warning, visible, cuda, words", [
    (OLD_DRIVER, None, "13.2", r"built for CUDA 13\.2 and finds no NVIDIA GPU\. CUDA init.*too old \(found version 12"),
    (None, "0,1", "13.2", r"CUDA 13\.2 and finds no NVIDIA GPU \(CUDA_VISIBLE_DEVICES=0,1\)$"),
    (None, "0", None, "built for CPUs alone"),
    # where nothing says that there is one, or it is hidden on purpose
    (None, None, "13.2", None),
    (OLD_DRIVER, "", "13.2", None),
    (None, "-1", "13.2", None),
])
def test_a_gpu_that_torch_does_not_find_is_said_once_with_the_reason(
        monkeypatch, capsys, warning, visible, cuda, words):
    def is_available():
        if warning:
            warnings.warn(warning, stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of torch's own is shown
        for local_rank in range(2):
            assert train.prepare_device(local_rank, 2).type == "cpu"
    said = capsys.readouterr().out
    assert said.count("note:") == bool(words)
    assert re.search(words or "^$", said.replace("\n  ", " "), re.M)
    assert max(map(len, said.splitlines()), default=0) <= 80


def test_a_gpu_without_kernels_is_named_before_any_download(monkeypatch):
    def ones(*_, device):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with ...")

    train.try_kernel(CPU)
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P100-PCIE-16GB")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    with pytest.raises(ValueError, match=r"Tesla P100-PCIE-16GB: .*no kernel image.*\. torch .* for sm_75 sm_80: "):
        train.try_kernel(torch.device("cuda", 0))


def test_a_gpu_whose_memory_is_full_is_not_said_to_be_too_old(monkeypatch):
    def ones(*_, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nCUDA kernel errors might ...")

    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(torch.OutOfMemoryError):
        train.try_kernel(torch.device("cuda", 0))


@pytest.mark.parametrize("release, expected", [
    ("6.8.0-45-generic", "expandable_segments:True"),
    ("5.15.153.1-microsoft-standard-WSL2", None),
    ("4.4.0-19041-Microsoft", None),
])
def test_segments_that_grow_are_off_under_wsl(monkeypatch, release, expected):
    monkeypatch.setattr(train.platform, "uname", lambda: SimpleNamespace(release=release))
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    train.prepare_device(0, 1)
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)


@pytest.mark.parametrize("flags, words", [
    ("--model qwen3-0.6b", None),
    # in float32: weights, gradients, two moments, on two ranks
    ("--model qwen3-8b --precision fp32", r"8\.2 billion parameters train very slowly, and need about 2[45]\d GiB "),
    ("--model qwen3-8b --qlora", r"need about \d\d GiB of this machine's 16 of host memory"),
    ("--model nowhere", None),  # what is wrong is said later
])
def test_what_a_large_model_needs_without_a_gpu_is_said(monkeypatch, capsys, flags, words):
    monkeypatch.setattr(train, "allowed_memory", lambda: 16 * GIB)
    args = train.parse_args(flags.split() + ["--random_init"] * ("qwen" in flags))
    before = dict(vars(args))
    train.say_need_without_gpu(args, ranks_that_print(world=1, n_local=2, device=CPU), {})
    assert vars(args) == before
    said = capsys.readouterr().out.replace("\n  ", " ")
    assert bool(said) == bool(words)
    assert re.search(words or "", said)


@pytest.mark.parametrize("flag, has_bf16, machine, is_said", [
    ("mixed", False, "x86_64", True), ("bf16", False, "x86_64", True), ("mixed", True, "x86_64", False),
    ("fp32", False, "x86_64", False), ("mixed", False, "aarch64", False)])
def test_a_precision_that_is_only_emulated_is_said(monkeypatch, capsys, flag, has_bf16, machine, is_said):
    monkeypatch.setattr(train, "has_bf16", lambda device: has_bf16)
    monkeypatch.setattr(train.platform, "machine", lambda: machine)
    args = train.parse_args(["--precision", flag])
    config = lm.parse_config(data.PRESETS["qwen3-0.6b"])
    args.lr = train.default_rate(config, False, False)
    train.say_notes(args, config, 100, ranks_that_print(device=CPU, device_name="CPU"))
    assert ("only emulates bf16: --precision fp32 is faster" in words_of(capsys.readouterr().out)) == is_said


def test_host_memory_is_that_of_this_process_and_not_of_its_parent(monkeypatch):
    """getrusage() counts what the process that called exec() had, too."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "read_text", lambda path: "VmPeak:\t 9 kB\nVmHWM:\t  1572864 kB\nVmRSS:\t 9 kB\n")
    found = train.memory_gib(CPU)
    monkeypatch.undo()
    assert found == (1.5, None)


def test_a_torch_newer_than_those_that_were_tested_is_named(monkeypatch, capsys):
    words = "is newer than those that were tested"
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.15.1+cu132"))
    assert words not in start_of([], capsys)
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.16.0"))
    assert f"  note: torch 2.16.0 {words}\n" in start_of([], capsys)


def test_a_new_flag_that_changes_the_mathematics_needs_no_list(monkeypatch, capsys):
    make_parser = train.make_parser

    def make_parser_of_a_fork():
        parser = make_parser()
        train.add(parser, "--z_loss", float, 0.0, "weight of the z-loss", fixed=True)
        return parser

    monkeypatch.setattr(train, "make_parser", make_parser_of_a_fork)
    assert "--z_loss 0.5" in start_of(["--z_loss", "0.5"], capsys)
    assert "z_loss" not in start_of([], capsys)

    # A checkpoint notes it, so that a run of another --z_loss is refused.
    config = lm.parse_config(data.PRESETS["qwen3-0.6b"])
    loader = SimpleNamespace(documents=SimpleNamespace(checksum=0))
    args = train.parse_args(["--z_loss", "0.5"])
    settings = train.fixed_settings(args, config, loader, None)
    assert settings["--z_loss"] == 0.5


def test_a_flag_that_a_fork_adds_by_argparse_alone_needs_no_marks(monkeypatch, capsys):
    add_run_flags = train.add_run_flags

    def with_plain_flag(parser):
        add_run_flags(parser)
        parser.add_argument("--plain", help="a fork's")

    monkeypatch.setattr(train, "add_run_flags", with_plain_flag)
    assert train.parse_args(["--plain", "1"]).plain == "1"
    assert flags_said(["--plain", "1"], capsys) == ["--plain", "1"]
    with pytest.raises(SystemExit):
        train.parse_args(["-h"])
    assert "--plain" not in capsys.readouterr().out  # --help_all has it


def test_help_is_short_and_help_all_has_every_flag(capsys):
    shown = {}
    for flag in ("--help", "--help_all"):
        assert train.launch([flag]) == 0
        shown[flag] = set(re.findall(r"^  (--\w+)", capsys.readouterr().out, re.M))
    assert {"--model", "--data", "--qlora"} <= shown["--help"]
    assert shown["--help"] < shown["--help_all"]
    assert len(shown["--help"]) <= 33
    names = {f"--{name}" for name in vars(train.parse_args([]))}
    assert names == shown["--help_all"] - {"--no"}  # the pattern cuts --no-activation_checkpointing there


def test_an_adapter_names_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "ann/base"}))
    args = train.parse_args(["--adapter", str(tmp_path)])
    assert (args.model, args.adapter) == ("ann/base", str(tmp_path))
    args = train.parse_args(["--adapter", str(tmp_path), "--model", "tiny"])  # or another one is given
    assert (args.model, args.adapter) == ("tiny", str(tmp_path))
    shutil.copytree(data.TINY, tmp_path / "merged")  # of a run, beside its adapter
    (tmp_path / "final").mkdir()
    (tmp_path / "adapter_config.json").rename(tmp_path / "final/adapter_config.json")
    args = train.parse_args(["--adapter", str(tmp_path)])
    assert (args.model, args.adapter) == ("ann/base", str(tmp_path / "final"))
    args = train.parse_args(["--adapter", str(tmp_path / "merged")])  # no adapter, as the start will say
    assert (args.model, args.adapter) == ("tiny", str(tmp_path / "merged"))
    with pytest.raises(argparse.ArgumentError, match="one on the Hub needs its base as --model"):
        train.parse_args(["--adapter", "ann/adapter"])


def test_a_base_that_has_moved_is_said_with_the_file_that_names_it(tmp_path, capsys):
    layer = "model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_A.weight": torch.ones(4, 8), f"{layer}.lora_B.weight": torch.ones(8, 4)}
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    data.save_adapter(tensors, adapter, "/gone/base", 4, 8, 0.0, ["q_proj"])
    assert train.launch(["--model", str(adapter), "--out", str(tmp_path / "run")]) == 1
    message = capsys.readouterr().err
    assert "/gone/base: no such folder" in message
    assert f'base_model_name_or_path in {adapter}/adapter_config.json is "/gone/base"' in message
    assert message.endswith(f": --adapter {adapter} --model BASE\n")

    for spoiled in ("", None, 5):
        config = data.read_json(adapter / "adapter_config.json") | {"base_model_name_or_path": spoiled}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        assert train.launch(["--model", str(adapter)]) == 2
        message = capsys.readouterr().err
        named = json.dumps(spoiled)
        assert f"{adapter}/adapter_config.json: base_model_name_or_path is {named}, not the base" in message
        assert message.endswith(f": --adapter {adapter} --model BASE\n")


def test_any_error_about_a_base_says_which_adapter_names_it(tmp_path, capsys):
    random_model(tmp_path / "base")  # without weights
    layer = "model.layers.0.self_attn.q_proj"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    tensors = {f"{layer}.lora_A.weight": torch.ones(4, 64), f"{layer}.lora_B.weight": torch.ones(64, 4)}
    data.save_adapter(tensors, adapter, str(tmp_path / "base"), 4, 8, 0.0, ["q_proj"])
    argv = ["--data", *train.DEMO_DATA, "--out", str(tmp_path / "run")]
    assert train.launch(["--model", str(adapter), *argv]) == 1
    assert capsys.readouterr().err.endswith(f": --adapter {adapter} --model BASE\n")
    # who gives both has named the base
    assert train.launch(["--adapter", str(adapter), "--model", str(tmp_path / "base"), *argv]) == 1
    assert "--model BASE" in capsys.readouterr().err  # the same folder: the file names it, too

def test_a_tilde_is_the_home_folder_in_every_path(monkeypatch):
    """A shell leaves that of --out=~/run, and the second one of a list in quotes."""
    monkeypatch.setenv("HOME", "/home/ann")
    paths = {"model", "adapter", "data", "eval_data", "chat_template", "out", "resume", "export"}
    assert {action.dest for action in train.make_parser()._actions if action.type is train.path} == paths
    assert train.parse_args(["--add_tokens", "~/a"]).add_tokens == ["/home/ann/a"]
    args = train.parse_args(["--data", "~/a.jsonl", "org/b", "--eval_data=~/c.jsonl", "--out=~/run", "--model=~/m"])
    assert args.data == ["/home/ann/a.jsonl", "org/b"]
    assert args.eval_data == ["/home/ann/c.jsonl"]
    assert (args.out, args.model) == ("/home/ann/run", "/home/ann/m")


def test_a_pattern_in_quotes_stands_for_its_files_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "a[1].jsonl", "a1.jsonl", "sub/c.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    given = ["**/[bc].jsonl", "a[1].jsonl", "org/name", "none*.jsonl"]
    args = train.parse_args(["--data", *given, "--eval_data", "a?.*"])
    # the file of this very name, and not the one that it would match; what matches nothing is named by its own error
    assert args.data == ["b.jsonl", "sub/c.jsonl", "a[1].jsonl", "org/name", "none*.jsonl"]
    assert args.eval_data == ["a1.jsonl"]


def test_plain_python_finds_a_hub_id_in_the_cache_and_names_a_fresh_folder(tmp_path, chats):
    cached = tmp_path / "hub/models--someone--tiny"
    commit = "0123456789" * 4
    shutil.copytree(HERE / "tiny", cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(commit)  # the commit that `main` stands for
    flags = ["--model", "someone/tiny", "--data", chats, "--seq_len", 128, "--lora", "--steps", 1, "--sample", ""]
    done = shell(TRAIN, *flags, cwd=tmp_path, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "out").iterdir()
    config = json.loads((run / "final/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/tiny"
    assert "before:" not in done.stdout  # --sample "" asks for none


def test_inspect_prints_examples_and_trains_nothing(folder, chats, tmp_path):
    argv = ["--model", folder, "--random_init", "--data", chats, "--inspect", 2]
    _, said, codes = run_ranks(2, argv, tmp_path / "run")
    assert codes == [0, 0]
    assert said.count("--- example") == 2  # of rank 0 alone
    assert "⟦" in said
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- the numbers of a step


def test_epochs_and_overflow_say_how_many_steps_a_run_has(folder, chats, tmp_path):
    documents, _ = read_data(chats, data.Tokenizer(HERE / "tiny"), seq_len=32, overflow="truncate")
    n_rows = len(data.Loader(documents, 32, True, 4, 0, 0, 1).rows)
    fewer, _ = read_data(chats, data.Tokenizer(HERE / "tiny"), seq_len=32)  # long conversations are dropped by default
    assert len(fewer.parts) < 0.9 * len(documents.parts["start"])  # or the flag would not show
    argv = ["--model", folder, "--random_init", "--data", chats, "--seq_len", 32, "--precision", "fp32", "--batch_size",
            4, "--overflow", "truncate", "--epochs", 0.25]
    rows, said, codes = run_ranks(1, argv, tmp_path / "run")
    assert codes == [0], said
    assert rows[-1]["step"] == math.ceil(0.25 * n_rows / 4)


@pytest.mark.parametrize("steps, n_rows, flags, every, words", [
    (500, 10, "", 50, "every 50 steps, and after the last"),
    (505, 10, "", 51, "every 51 steps"),  # ten times at most
    (100, 20, "", 34, "every 34 steps"),  # three times: 60 rows, which cost as much as 20 of the training's 200
    (100, 31, "", 100, "every 100 steps"),  # two would take more than a tenth: only that after the last step is made
    (100, 10_000, "", 100, "every 100 steps"),
    (3, 1, "", 3, "every 3 steps"),
    (1, 1, "", 1, "every 1 step,"),
    (100, 10_000, "--eval_every 7", 7, "every 7 steps"),
    (100, 1, "--patience 2", 10, "the run ends after 2 evaluations without a better one; final/ gets the best"),
])
def test_evaluations_take_a_tenth_of_a_run_at_most_unless_they_are_asked_for(
        capsys, steps, n_rows, flags, every, words):
    args = train.parse_args(["--data", "stdlib:docs", "--eval_data", "2", *flags.split()])
    state = {"steps": steps, "rows_a_step": 2}
    loader = SimpleNamespace(rows=[0] * n_rows)
    assert train.evaluation_interval(args, state, loader, train.Ranks(False, 1800)) == every
    said = capsys.readouterr().out
    assert words in said
    assert max(len(line) for line in said.splitlines()) <= 80


@pytest.mark.rounding
def test_evaluation_is_the_training_loss(folder, few_chats, tmp_path):
    argv = ["--model", folder, "--random_init", "--data", few_chats, "--eval_data", few_chats, "--seq_len", 96,
            "--precision", "fp32", "--lr", 0, "--steps", 1]  # the evaluation comes after the step, so weights must stay
    # All rows are one step of training, and are then evaluated.
    all_rows = len(loader_of(few_chats).rows)
    assert all_rows % 3  # three ranks have unequal numbers of them
    (step, on_one), _, _ = run_ranks(1, [*argv, "--batch_size", all_rows], tmp_path / "one")
    (_, on_three), _, _ = run_ranks(3, [*argv, "--fsdp2"], tmp_path / "three")
    for evaluation in (on_one, on_three):
        assert evaluation["eval_loss"] == pytest.approx(step["loss"], rel=1e-6)  # float32 sums in another order
        assert evaluation["eval_tokens"] == step["tokens"]


@pytest.mark.rounding
def test_unpacked_rows_have_the_loss_and_the_gradients_of_packed_ones(chats):
    def numbers(packing):
        model, args = build()
        for b in loader_of(chats, packing).once():
            model(b.tokens, b.targets, b.positions, b.spans, b.supervised_S).backward()
        evaluation = train.evaluate(model, loader_of(chats, packing), ALONE, args)
        gradients = [p.grad for p in model.parameters()]
        return [torch.tensor([evaluation["eval_loss"], evaluation["eval_tokens"]]), *gradients]

    for packed, unpacked in zip(numbers(packing=True), numbers(packing=False), strict=True):
        # sums in another order, of some 2,000 tokens
        largest = packed.abs().max().item()
        torch.testing.assert_close(packed, unpacked, rtol=1e-4, atol=1e-3 * largest)


def test_adapters_start_as_in_peft():
    model, _ = build("--lora")
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    for name, p in trained:
        if "lora_B" in name:
            assert not p.any()
        else:
            limit = p.shape[1] ** -0.5  # A is uniform in -limit to limit, and of its thousand numbers one is near it
            assert 0.9 * limit < p.abs().max() <= limit


def test_dropout_is_off_in_evaluation():
    model, _ = build("--lora", "--lora_dropout", 0.5)
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p)  # with B at zero no adapter would show its dropout
    tokens = torch.arange(30)[None]
    assert model(tokens, tokens) != model(tokens, tokens)
    assert model.eval()(tokens, tokens) == model(tokens, tokens)


@pytest.mark.parametrize("preset, flags, rate", [
    # what tinker-cookbook's get_lr() gives for LoRA, by family and width
    ("llama-3.2-1b", "--lora", 4.91e-4),
    ("llama-3.1-8b", "--lora", 2.86e-4),
    ("llama-3.1-70b", "--qlora", 1.66e-4),
    ("qwen3-8b", "--lora", 4.73e-4),
    ("qwen3-32b", "--qlora", 4.65e-4),
    ("qwen3.5-27b", "--qlora", 4.65e-4),
    # others as Llama
    ("muse-glimmer-30b", "--lora", 1.95e-4),
    # a tenth of it for all weights, and for pairs
    ("llama-3.1-8b", "", 2.86e-5),
    ("llama-3.1-8b", "--dpo --lora", 2.86e-5),
    ("llama-3.1-8b", "--lora --lr 1e-3", 1e-3),
])
def test_the_default_rate_is_that_of_the_family_at_its_width(preset, flags, rate):
    args = train.parse_args(flags.split())
    train.resolve_for_model(args, lm.parse_config(data.PRESETS[preset]), {}, CPU)
    assert args.lr == pytest.approx(rate, rel=2e-3)  # three digits


@pytest.mark.parametrize("schedule, in_the_middle, at_the_end", [
    ("constant", 1, 1),
    ("linear", 0.55, 0.1),
    ("cosine", 0.55, 0.1),
])
def test_learning_rate_schedules(schedule, in_the_middle, at_the_end):
    lowest = [] if schedule == "constant" else ["--min_lr", "0.1"]  # which a constant rate does not read
    args = train.parse_args(["--lr", "1", *lowest, "--warmup", "10", "--schedule", schedule])
    lrs = [train.lr_at(step, 110, args, peak=1.0) for step in range(111)]
    assert lrs[0] == pytest.approx(1 / 11)
    assert lrs[9] == pytest.approx(10 / 11)
    assert lrs[10] == 1.0
    assert lrs[60] == pytest.approx(in_the_middle)
    assert lrs[110] == pytest.approx(at_the_end)
    # that of --embedding_lr has the same course
    assert [train.lr_at(step, 110, args, peak=0.25) for step in range(111)] == pytest.approx([0.25 * lr for lr in lrs])


@pytest.mark.parametrize("flags, words", [
    ("--lr 1e-3 --min_lr 2e-3", "note: --min_lr 0.002 is above --lr 0.001: the learning rate rises"),
    ("--warmup 50", "note: --warmup 50 is not shorter than the run, 50 steps: the learning rate does not reach --lr"),
    ("--lr 0.01", "note: --lr 0.01 is 1.9e+02 times this method's default, 5.27e-05"),
    ("--lr 1e-7 --lora", "note: --lr 1e-07 is 0.00019 times this method's default, 0.000527"),
    ("--precision bf16", "note: --precision bf16 also trains in bf16, which rounds small updates away"),
])
def test_what_is_probably_not_meant_gets_a_note(flags, words, monkeypatch, capsys):
    monkeypatch.setattr(train, "has_bf16", lambda device: True)  # else a CPU without it gets one more
    config = lm.parse_config(data.PRESETS["qwen3-0.6b"])

    def notes_of(*argv):
        args = train.parse_args([*argv, "--compile"])
        train.resolve_for_model(args, config, {}, torch.device("cpu"))
        train.say_notes(args, config, 50, ALONE)
        return words_of(capsys.readouterr().out)

    assert words in notes_of(*flags.split())
    assert not notes_of("--warmup", "49")
    assert not notes_of("--precision", "bf16", "--stochastic_rounding")
    assert not notes_of("--precision", "bf16", "--lora")


def test_a_profile_without_a_third_step_gets_a_note(capsys):
    args = train.parse_args(["--profile", "--precision", "fp32", "--lr", "1e-3"])
    config = lm.parse_config(data.PRESETS["qwen3-0.6b"])
    for n_done, is_said in ((47, False), (48, True)):
        train.say_notes(args, config, 50, ALONE, n_done)
        words = "--profile and --memory_snapshot record the third step from here, and there are only 2"
        assert (words in words_of(capsys.readouterr().out)) == is_said


def test_decay_spares_norms_and_biases():
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    norm = torch.nn.Parameter(torch.ones(2))
    args = train.parse_args(["--lr", "1e-3"])
    optimizer = train.make_optimizer({"matrix": matrix, "norm": norm}, args, torch.zeros(()))
    decays = [(group["weight_decay"], group["params"]) for group in optimizer.param_groups]
    assert decays == [(0.01, [matrix]), (0.0, [norm])]


@pytest.mark.parametrize("preset, lora, flops, tolerance", [
    # 6 * 7.5e9 and attention, by hand; frozen weights have no gradients, which are a third
    ("llama-3.1-8b", False, 48.8e9, 0.01),
    ("llama-3.1-8b", True, 33.8e9, 0.01),
    # 8 * 58.7e6 in attention, 24 * 67.1e6 in Gated DeltaNet, 32 * 151e6 in MLPs, 1.02e9 in the head: 6 times that, plus
    # 0.94e9 of attention and 0.23e9 of the delta rule
    ("qwen3.5-9b", False, 48.7e9, 0.002),
])
def test_flops_of_a_token_are_six_per_weight_and_those_of_attention(preset, lora, flops, tolerance):
    T = 4096
    config = lm.parse_config(data.PRESETS[preset])
    counts = lm.Counts(targets=T, tokens=T, squares=T**2)  # one row, one document
    assert lm.step_flops(config, counts, lora) / T == pytest.approx(flops, rel=tolerance)


# ---------------------------------------------------------------- the log


class Board:
    """TensorBoard's SummaryWriter, which keeps what it gets in place of writing it."""

    def __init__(self, folder, purge_step):
        self.purge_step = purge_step
        self.scalars = set()

    def add_scalar(self, name, value, step):
        self.scalars.add((name, value, step))

    def flush(self):
        pass


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A Log at step 4 of 9, with a Board."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Board))
    state = {"step": 4, "steps": 9, "tokens": 0, "best_eval": None, "rows_a_step": 1, "metrics_bytes": 0,
             "evals_since_best": 0}
    loader = SimpleNamespace(rows=[0] * 9, waited_s=0.0, term="tokens")  # all that a Log asks of its loader
    args = SimpleNamespace(tensorboard=True, wandb=False)
    sinks = train.open_sinks(args, tmp_path, tmp_path / "checkpoint-4", ALONE, contextlib.ExitStack())
    return train.Log(tmp_path, state, loader, ALONE, sinks)


def test_an_evaluation_between_log_lines_does_not_count_as_training(log, tmp_path, monkeypatch):
    clock = SimpleNamespace(now=log.mark)
    monkeypatch.setattr(train.time, "perf_counter", lambda: clock.now)

    def train_for_5_seconds(loss_sum):
        clock.now += 5.0
        counts = lm.Counts(targets=10, tokens=100, squares=0, terms=10)
        log.count({"loss": torch.tensor(loss_sum)}, counts, flops=0)

    train_for_5_seconds(loss_sum=20.0)
    with log.paused():
        clock.now += 20.0
        log.write_eval({"eval_loss": 1.0, "eval_tokens": 5})
    train_for_5_seconds(loss_sum=10.0)
    log.state["step"] = 6
    losses = log.means()["losses"].tolist()
    log.write({"losses": losses, "lr": 1.0, "grad_norm": 1e-3, "skipped_steps": 0.0})

    row = metrics_of(tmp_path)[-1]
    assert row["losses"] == [2.0, 1.0]
    assert row["loss"] == 1.0
    assert row["step_s"] == pytest.approx(5.0)
    assert row["tokens_per_s"] == pytest.approx(20.0)


def test_a_line_of_a_long_run_on_a_large_gpu_has_80_columns(log, monkeypatch, capsys):
    log.state |= {"step": 2000, "steps": 10_000}
    log.start -= 10_000  # seconds for a fifth of the run: more than ten hours are left
    log.n_tokens = 123_000
    in_a_second = log.mark + 1.0  # a clock that stands still: a busy machine is as fast as any other
    monkeypatch.setattr(train.time, "perf_counter", lambda: in_a_second)
    monkeypatch.setattr(train, "memory_gib", lambda device: (139.51, 140.0))
    log.write({"losses": [12.3456], "lr": 2e-4, "grad_norm": 0.0123, "skipped_steps": 0.0})
    line = capsys.readouterr().out.strip()
    assert "step  2000/10000  loss 12.3456  norm 0.0123  123,000 tok/s" in line
    assert "139.51 GiB  11:" in line
    assert len(line) <= 80


def test_an_evaluation_of_pairs_says_how_often_the_chosen_answer_wins(log, capsys):
    log.loader.term = "pairs"
    log.write_eval({"eval_loss": 0.5, "eval_reward_margin": 1.25, "eval_reward_accuracy": 0.75, "eval_pairs": 40})
    said = capsys.readouterr().out
    assert said == ("step 4  eval loss 0.5000 over 40 pairs, best 0.5000 at step 4\n"
                    "  eval_reward_margin 1.25  eval_reward_accuracy 0.75\n")
    metrics = dict.fromkeys(["reward_margin", "reward_accuracy", "logp_chosen", "logp_rejected"], -1.2345e-05)
    log.append({"step": 4} | metrics, "a row", metrics)
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.split()) // 2 for line in lines] == [1, 2, 2]
    assert max(map(len, lines)) <= 80


def strict_json(text):
    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_evaluation_that_is_not_finite_is_said_once_and_never_the_best(log, tmp_path, capsys, bad):
    data.note_once.cache_clear()
    bests = []
    for step, loss in enumerate([bad, 2.0, bad, 1.0, bad], 4):
        log.state["step"] = step
        # a metric may be nan where the loss is not
        log.write_eval({"eval_loss": loss, "eval_reward_margin": bad, "eval_tokens": 5})
        bests.append(log.state["best_eval"] and log.state["best_eval"]["step"])
        assert log.state["evaluated"] == step
    assert bests == [None, 5, 5, 7, 7]
    said = capsys.readouterr().out
    assert said.count("note: the loss of an evaluation is not finite") == 1
    assert f"step 4  eval loss {bad:.4f} over 5 tokens\n" in said
    assert "over 5 tokens, best 2.0000 at step 5\n" in said
    rows = [strict_json(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["eval_loss"] for row in rows] == [None, 2.0, None, 1.0, None]
    (sink,) = log.sinks
    assert ("eval_loss", 2.0, 5) in sink.writer.scalars
    assert not any(value != value or abs(value) == math.inf for _, value, _ in sink.writer.scalars)

    # what a checkpoint has of it is JSON, and its checksum is that of what is read again
    ranks = SimpleNamespace(rank=0, world=1, say=print)
    folder = tmp_path / "checkpoint-8"
    folder.mkdir()
    state = dict.fromkeys(train.STATE_KEYS) | log.state | {"settings": {}, "files": {}}
    data.write_json(folder / train.STATE, data.with_checksum(state))
    assert strict_json((folder / train.STATE).read_text())["best_eval"]["eval_reward_margin"] is None
    assert train.read_state(folder, {}, ranks)["best_eval"]["step"] == 7
    # older versions wrote nan, which is the best no longer
    state["best_eval"] = {"step": 4, "eval_loss": math.nan}
    (folder / train.STATE).write_text(json.dumps(data.with_checksum(state)))
    assert train.read_state(folder, {}, ranks)["best_eval"] is None


def test_tensorboard_gets_the_numbers_of_metrics(log, tmp_path):
    log.write_eval({"eval_loss": 2.5, "eval_tokens": 100})
    (sink,) = log.sinks
    assert sink.writer.purge_step == 5  # what a killed run has shown of later steps disappears
    assert sink.writer.scalars == {("eval_loss", 2.5, 4), ("eval_tokens", 100, 4)}
    assert metrics_of(tmp_path) == [{"step": 4, "eval_loss": 2.5, "eval_tokens": 100}]


# ---------------------------------------------------------------- --chat


def ask(monkeypatch, lines, *argv):
    """Runs --chat with these bytes as its input, on the built-in model unless argv has another -> the exit code."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), "utf-8"))
    return train.launch(["--chat", "--model", "tiny", "--max_new_tokens", "3", *map(str, argv)])


def answer_with(monkeypatch, ids):
    """Makes --chat answer each question with these ids -> a list that gets each question, as messages."""
    questions = []
    prompt = data.Tokenizer.prompt

    def noting_prompt(self, messages):
        questions.append(messages)
        return prompt(self, messages)

    # The prompt is still made: a template may refuse the question.
    monkeypatch.setattr(data.Tokenizer, "prompt", noting_prompt)
    monkeypatch.setattr(lm, "generate", lambda *_: iter(ids))
    return questions


def remembered_answer(questions):
    """The first answer, as the second question carries it along."""
    _, answer, _ = questions[1]
    assert answer["role"] == "assistant"
    return answer["content"]


def test_chat_goes_on_after_a_question_that_cannot_be_asked(monkeypatch, capsys):
    # The first is refused for a character that is reserved for marking masks. The second is not UTF-8: it is answered.
    assert ask(monkeypatch, "a \U00104000 b\n".encode() + b"caf\xe9\n") == 0
    said = capsys.readouterr()
    (error,) = said.err.splitlines()
    assert "U+104000" in error
    refused, answered, *_ = said.out.splitlines()
    assert not refused
    assert answered


def test_chat_prints_and_remembers_a_run_of_odd_bytes(tiny, monkeypatch, capsys):
    ids = [109, 179, 1466]  # a byte that is a character, one that is none, a word: tokenizers' DecodeStream raises here
    questions = answer_with(monkeypatch, ids)
    assert ask(monkeypatch, b"hi\nagain\n") == 0
    text = tiny.core.decode(ids)
    assert text.startswith("��")
    assert remembered_answer(questions) == text
    # the first byte was shown as a character before the second one made it part of a run that is none
    shown = tiny.core.decode(ids[:1]) + text[1:]
    assert capsys.readouterr().out.splitlines() == [shown, shown]


def test_a_character_that_the_last_token_cuts_is_shown_as_one(tiny, monkeypatch, capsys):
    cut = tiny.core.encode("a €", add_special_tokens=False).ids[:-1]  # two of the three bytes of a euro
    questions = answer_with(monkeypatch, cut)
    assert ask(monkeypatch, b"hi\nagain\n") == 0
    shown = capsys.readouterr().out.splitlines()[0]
    assert shown == remembered_answer(questions) == tiny.core.decode(cut)
    assert shown.startswith("a ")
    assert shown.endswith("�")


@pytest.mark.parametrize("kind", ["built-in", "bytes"])
def test_random_streams_of_ids_are_shown_and_returned_as_their_text(tiny, tmp_path, capsys, kind):
    tokenizer = tiny
    if kind == "bytes":
        tokenizer = byte_level_tokenizer(tmp_path, trim_offsets=False)
    core = tokenizer.core
    rng = random.Random(0)

    def random_id():
        only_bytes = rng.random() < 0.5  # most bytes are no characters
        return rng.randrange(256 if only_bytes else core.get_vocab_size())

    n_equal = 0
    for _ in range(300):
        ids = [random_id() for _ in range(12)]
        text = train.print_answer(tokenizer, iter(ids))
        assert text == core.decode(ids)
        is_equal = capsys.readouterr().out == data.printable(text)
        # In the built-in one, bytes that are no character spoil the characters before them, which stay on the screen.
        assert is_equal or (kind == "built-in" and "�" in text)
        n_equal += is_equal
    assert n_equal > 150  # otherwise it shows nothing


def test_ctrl_c_ends_an_answer_and_keeps_what_was_said(tiny, monkeypatch, capsys):
    ids = tiny.core.encode("one two", add_special_tokens=False).ids

    def interrupted(*_):
        yield from ids
        raise KeyboardInterrupt

    questions = answer_with(monkeypatch, [])
    monkeypatch.setattr(lm, "generate", interrupted)
    assert ask(monkeypatch, b"hi\nagain\n") == 0
    assert capsys.readouterr().out.splitlines() == ["one two", "one two"]
    assert remembered_answer(questions) == "one two"


def test_ctrl_c_while_a_long_prompt_is_made_ends_that_question_alone(monkeypatch, capsys):
    def prompt(self, messages, original=data.Tokenizer.prompt):
        if messages[-1]["content"] == "long":
            raise KeyboardInterrupt
        return original(self, messages)

    monkeypatch.setattr(data.Tokenizer, "prompt", prompt)
    assert ask(monkeypatch, b"long\nhi\n") == 0
    interrupted, answer = capsys.readouterr().out.splitlines()
    assert not interrupted
    assert answer


def test_a_chat_answers_at_the_temperature_that_was_asked_for(monkeypatch):
    temperatures = []
    monkeypatch.setattr(lm, "generate", lambda *args: temperatures.append(args[-1]) or iter([]))
    assert ask(monkeypatch, b"hi\n", "--temperature", 0.5) == 0
    assert temperatures == [0.5]


def test_a_chat_begins_with_its_system_message_until_another_one_is_given(monkeypatch, capsys):
    questions = answer_with(monkeypatch, [])
    lines = b"a\n/reset\nb\n/system  Be brief.\nc\n/system\nd\n/systems\n"
    assert ask(monkeypatch, lines, "--system", "Be kind.") == 0
    said = [[message["content"] for message in messages] for messages in questions]
    assert said == [["Be kind.", "a"], ["Be kind.", "b"], ["Be brief.", "c"], ["d"]]
    assert [messages[0]["role"] for messages in questions] == ["system"] * 3 + ["user"]
    assert "/system TEXT" in capsys.readouterr().out  # /systems is no command: these are shown


# Templates without a system role: one raises, one drops the message, one takes that of a role for another.
NO_SYSTEM = [
    "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[-1].content }}",
    "{% for m in messages if m.role != 'system' %}<|im_start|>system user a{{ m.content }}{% endfor %}",
    "{{ messages[-1].content }}",
]


@pytest.mark.parametrize("template", NO_SYSTEM)
def test_a_system_message_that_a_template_drops_or_refuses_is_an_error(tmp_path, monkeypatch, capsys, template):
    path = tmp_path / "mine.jinja"
    path.write_text(template)
    said = f"train.py: error: --system: chat template ({path}) takes no system message: leave it out"
    assert ask(monkeypatch, b"hi\n", "--chat_template", path, "--system", "a") == 1
    assert capsys.readouterr().err.splitlines()[-1] == said
    # a chat goes on as it was
    questions = answer_with(monkeypatch, [])
    assert ask(monkeypatch, b"hi\n/system a\nagain\n", "--chat_template", path) == 0
    assert capsys.readouterr().err.splitlines() == [said]
    assert [len(messages) for messages in questions] == [1, 3]


def test_chat_tells_of_a_prompt_beyond_the_trained_positions(monkeypatch, capsys):
    prompt_lengths = []  # of the questions that reach the model

    def answer_nothing(model, prompt, *_):
        prompt_lengths.append(len(prompt))
        return iter([])

    monkeypatch.setattr(lm, "generate", answer_nothing)
    lines = ["a", "é" * 2100, "b"]  # the built-in model has seen 2,048 positions
    assert ask(monkeypatch, "\n/reset\n".join(lines).encode()) == 0
    n_short, n_long, n_next = prompt_lengths
    assert n_short == n_next < 2048 < n_long
    (told,) = capsys.readouterr().err.splitlines()
    assert f"{n_long:,} tokens" in told
    assert "2,048 positions" in told
    assert "/reset" in told


def test_chat_names_a_template_that_makes_nothing_of_a_question(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.jinja").write_text("{% set nothing = messages %}")
    assert ask(monkeypatch, b"What?\n", "--chat_template", tmp_path / "mine.jinja") == 0
    assert "mine.jinja): makes no token of the question" in capsys.readouterr().err


def test_chat_ends_where_weights_are_damaged(tmp_path, monkeypatch, capsys):
    model = tmp_path / "model"
    shutil.copytree(HERE / "tiny", model)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert ask(monkeypatch, b"What?\n", "--model", model) == train.NOT_FINITE
    message = capsys.readouterr().err.splitlines()[-1]
    assert message == ("train.py: error: the model computes nan: the files of --model are damaged, "
                       "or --lr was too high")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_lock_that_is_no_file_is_refused_by_name(tmp_path, make):
    make(tmp_path / "lock")  # to open a pipe for writing would wait for its reader
    with pytest.raises(OSError, match=f"--out {tmp_path}: folder, or the file lock in it, not written"):
        train.lock_folder(tmp_path)


# ---------------------------------------------------------------- the folder of a run


def test_a_lock_that_is_a_link_to_nowhere_is_refused(tmp_path):
    (tmp_path / "lock").symlink_to("nowhere/lock")
    with pytest.raises(OSError, match="lock in it, not written: No such file"):
        train.lock_folder(tmp_path)


def test_a_lock_that_is_a_link_empties_nothing(tmp_path):
    (tmp_path / "mine").write_text("work")
    (tmp_path / "lock").symlink_to("mine")
    train.lock_folder(tmp_path)
    assert (tmp_path / "mine").read_text() == "work"


def test_what_is_left_of_a_save_is_removed_and_not_waited_for_or_followed(tmp_path):
    (tmp_path / "mine").write_text("work")
    (tmp_path / "loss.svg.part").symlink_to("mine")
    (tmp_path / "checkpoint-9.part/rank").mkdir(parents=True)
    os.mkfifo(tmp_path / "final.part")  # whoever opens a pipe waits for its writer
    (tmp_path / "args.json").write_text(json.dumps(train.OURS))
    with train.run_folder(str(tmp_path), None):
        assert names_in(tmp_path) == {"args.json", "lock", "mine"}
    assert (tmp_path / "mine").read_text() == "work"


def test_two_processes_never_write_to_one_run(tmp_path, chats, capsys):
    argv = ["--data", str(chats), "--seq_len", "64", "--steps", "1", "--sample", "", "--out", str(tmp_path)]
    with open(tmp_path / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a lock belongs to an open file, so this process locks itself out
        assert train.launch(argv) == 1
    assert "another process writes to it" in capsys.readouterr().err
    assert names_in(tmp_path) == {"lock"}


def refusing(function, applies, number):
    """A function of the system that fails with this error where applies(its first argument)."""
    def call(first, *others, **options):
        if applies(first):
            raise OSError(number, os.strerror(number))
        return function(first, *others, **options)

    return call


def is_folder(handle):
    return stat.S_ISDIR(os.fstat(handle).st_mode)


def anything(_):
    return True


def is_file(handle):
    return not is_folder(handle)


def is_part(path):
    return path.name == "rehearsal.part"


REFUSALS = {
    # what a disk does not do: (an object, its function, for which first arguments, words for it)
    "rename a folder": (Path, "rename", Path.is_dir, r"rehearsal\.part: folder not renamed"),
    "rename a file": (Path, "rename", Path.is_file, r"args\.json\.part: file not renamed to args\.json"),
    "rename over a file": (Path, "rename", lambda path: path.with_suffix("").exists(), "file not renamed"),
    "make a folder": (Path, "mkdir", is_part, r"rehearsal\.part: folder not written"),
    "sync a file": (os, "fsync", is_file, r"args\.json\.part: file not synced \(fsync\)"),
    "sync a folder": (os, "fsync", is_folder, r"folder not synced \(fsync\)"),
    "lock": (fcntl, "flock", anything, "the file lock in it was not taken"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_disk_cannot_do_ends_a_run_before_its_first_step_by_name(tmp_path, monkeypatch, name):
    owner, function, applies, words = REFUSALS[name]
    out = tmp_path / "run"
    out.mkdir()
    for number in (errno.EPERM, errno.EXDEV, errno.EIO, errno.EROFS, errno.EINTR, errno.EMFILE):
        monkeypatch.setattr(owner, function, refusing(getattr(owner, function), applies, number))
        with pytest.raises(OSError, match=f"^--out {out}.*: .*{words}") as raised, train.run_folder(str(out), None):
            pass
        monkeypatch.undo()
        assert os.strerror(number) in str(raised.value)
        assert "free some" not in str(raised.value)
        assert not list(out.glob("rehears*"))


def test_a_disk_that_removes_nothing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "remove", lambda path: None)
    with (pytest.raises(OSError, match=r"--out .*rehearsed.*: folder not removed"),
          train.run_folder(str(tmp_path), None)):
        pass


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_full_disk_and_no_other_is_to_be_freed(tmp_path, monkeypatch, number):
    monkeypatch.setattr(Path, "write_text", refusing(Path.write_text, anything, number))
    with (pytest.raises(OSError, match=f"args.json: file not written: {os.strerror(number)}: free some disk space"),
          train.run_folder(str(tmp_path / "run"), None)):
        pass
    assert not (tmp_path / "run").exists()


def test_a_result_replaces_one_that_cannot_be_removed(tmp_path, monkeypatch):
    """Its folder is read-only, for example."""
    for name in ("final", "final.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model").write_text(name)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)
    data.put_in_place(tmp_path / "final.part", tmp_path / "final")
    assert (tmp_path / "final/model").read_text() == "final.part"
    assert (tmp_path / "final.old.part/model").read_text() == "final"  # the next start tries again


def test_checkpoints_that_a_kill_has_left_beyond_keep_go_at_the_next_start(tmp_path):
    saver = train.Saver(tmp_path, 99, ALONE, state_of(0))
    state = state_of(0) | {"best_eval": {"step": 2, "eval_loss": 1.0}}
    for step in range(1, 6):
        saver.save({"w": torch.ones(2)}, state | {"step": step})
    train.Saver(tmp_path, 2, ALONE, state)
    assert train.checkpoints(tmp_path).keys() == {2, 4, 5}


@pytest.mark.parametrize("flags, needed", [
    ("--lora", 120),  # the weight of ten numbers, and two moments, in float32
    ("", 140),  # and the whole model in bf16
    ("--lora --merge", 140),
])
def test_a_disk_with_less_room_than_a_run_needs_is_a_note(tmp_path, monkeypatch, capsys, flags, needed):
    args = train.parse_args(flags.split())
    weight = torch.nn.Parameter(torch.zeros(10))
    model = SimpleNamespace(named_parameters=lambda: [("w", weight)], modules=list)
    optimizer = SimpleNamespace(state={weight: {"exp_avg": torch.zeros(10), "exp_avg_sq": torch.zeros(10)}})
    trainer = SimpleNamespace(model=model, optimizer=optimizer, nonfinite=SimpleNamespace(tensors={}),
                              run=SimpleNamespace(config=None))
    layout = {"w": data.Stored(None, (10,), torch.bfloat16, "w")}
    monkeypatch.setattr(data, "layout_of_result", lambda reader, config: layout)
    saver = train.Saver(tmp_path, args.keep, ALONE, state_of(0))
    for free in (needed, needed - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        train.say_space(args, trainer, None, saver)
        said = capsys.readouterr().out
        assert said.startswith("note: ") if free < needed else not said


@pytest.mark.parametrize("number_of_lock", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP], ids=errno.errorcode.get)
def test_a_disk_without_locks_and_synced_folders_costs_a_note_each(
        shallow, few_chats, tmp_path, monkeypatch, capsys, number_of_lock):
    monkeypatch.setattr(train.fcntl, "flock", refusing(fcntl.flock, lambda file: True, number_of_lock))
    monkeypatch.setattr(data.os, "fsync", refusing(os.fsync, is_folder, errno.EINVAL))
    data.note_once.cache_clear()
    argv = ["--model", shallow, "--random_init", "--data", few_chats, "--seq_len", 64, "--steps", 2, "--save_every", 1]
    assert train.launch([*map(str, argv), "--out", str(tmp_path / "run")]) == 0
    said = words_of(capsys.readouterr().out)
    assert said.count(f"note: --out {tmp_path}/run: its disk has no file locks") == 1
    assert said.count("note: this disk does not sync folders") == 1
    assert train.checkpoints(tmp_path / "run").keys() == {1, 2}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_disk_that_fails_to_sync_is_no_disk_that_cannot(tmp_path, monkeypatch, number):
    monkeypatch.setattr(data.os, "fsync", refusing(os.fsync, is_folder, number))
    with pytest.raises(OSError, match=os.strerror(number)):
        data.sync(tmp_path)


@pytest.mark.parametrize("step, cause", [(0, "files of --model are damaged"), (3, "lower --lr")])
def test_weights_that_are_not_finite_are_named_and_not_saved(tmp_path, step, cause):
    saver = train.Saver(tmp_path, 1, ALONE, state_of(0))
    tensors = {"v": torch.ones(2), "w": torch.tensor([1, torch.nan])}
    message = f"w contains inf or nan after {step} steps, nothing is saved: .*{cause}"
    with pytest.raises(FloatingPointError, match=message):
        saver.save(tensors, {"step": step})
    assert not names_in(tmp_path)


# ---------------------------------------------------------------- the last message


@pytest.mark.parametrize("rank, argv, printed, message", [
    ("0", ["--learning_rate", "1"], True, "did you mean --lr?"),
    ("1", ["--learning_rate", "1"], False, "did you mean --lr?"),  # rank 0 may be ended before it has judged the flags
    (None, ["--data", "nowhere.jsonl"], True, "nowhere.jsonl: no such file"),
])
def test_one_rank_says_what_is_wrong_for_torchrun_to_end_with(
        tmp_path, monkeypatch, capsys, rank, argv, printed, message):
    monkeypatch.chdir(tmp_path)  # a run without --out begins in out/
    monkeypatch.setattr(train, "timedelta", lambda seconds: timedelta(seconds=1))  # for the rank that never comes
    error_file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
    assert train.launch(argv) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("train.py: error: ") == printed
    if printed:
        assert message in said.splitlines()[-1]
    assert message in json.loads(error_file.read_text())["message"]["message"]


# ---------------------------------------------------------------- metrics.jsonl and loss.svg


def test_the_curve_has_every_step_however_often_a_run_logs_and_stops(shallow, chats, tmp_path):
    model = ["--model", shallow, "--random_init", "--precision", "fp32", "--lora"]
    argv = [*model, "--data", chats, "--seq_len", 64, "--schedule", "constant", "--warmup", 2]
    # three ranks: a float32 sum of more than two numbers depends on their order
    expected = losses(3, [*argv, "--steps", 16], tmp_path / "each")
    seldom = [*argv, "--log_every", 99]
    run_ranks(3, [*seldom, "--steps", 13, "--save_every", 13], tmp_path / "few")
    rows, said, codes = run_ranks(3, [*seldom, "--steps", 16, "--resume"], tmp_path / "few")
    assert codes == [0, 0, 0], said
    assert "continuing after step 13" in said

    logged = [row for row in rows if "loss" in row]
    assert len(logged) < 16
    assert [loss for row in logged for loss in row["losses"]] == expected
    for row in logged:
        assert row["loss"] == expected[row["step"] - 1]
    (points,) = re.findall('<polyline points="(.*?)"', (tmp_path / "few/loss.svg").read_text())
    assert len(points.split()) == 16


def test_a_curve_of_one_value_is_a_dot(tmp_path):
    curves = {("training loss", "blue"): [(1, 3.0), (2, 2.0)], ("evaluation loss", "red"): [(2, 2.5)]}
    train.draw(tmp_path / "loss.svg", curves)
    picture = (tmp_path / "loss.svg").read_text()
    (x, y) = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="3" fill="red"/>', picture)[0]
    assert (float(x), float(y)) == (708, 185)  # the last step, half of the height


STRANGE_ROWS = [
    '{"step": 1, "losses": [2.5]}',
    '{"step": 2, "eval_loss": Infinity}',
    '{"step": 3, "lo',  # a process was killed, or a disk was full
    '{"step": 3, "losses": [2.0]}',
    '{"step": 4, "losses": [1.0]}',  # after the checkpoint
    '{"step": 3, "eval_loss": 2.25}',
    # these are JSON, and no rows
    "7",
    "{}",
    '{"step": 1}',
    '{"step": 1.5, "loss": 2.0}',
    '{"step": -1, "loss": 2.0}',
    '{"step": [1], "loss": 2.0}',
    '{"step": 1, "loss": "2"}',
    '{"step": 1, "loss": NaN}',
    '{"step": 1, "loss": 2.0, "losses": 2.0}',
    '{"step": 1, "loss": 1' + "0" * 400 + "}",  # no float is that large
    '{"step": 1, "loss": 2.0, "eval_loss": "x"}',
    "[" * 100_000,  # deeper than json reads
]


def test_the_curve_survives_strange_rows(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join(STRANGE_ROWS))
    state = {"step": 3, "steps": 3}
    log = train.Log(tmp_path, state, SimpleNamespace(waited_s=0.0), ALONE, sinks=[])
    log.draw()
    picture = (tmp_path / "loss.svg").read_text()
    assert picture.count("<polyline") == 2
    assert "inf" not in picture
    assert "nan" not in picture
    for label in ("2.50<", "2.00<", "step 3<"):  # the largest and the smallest loss, the last step
        assert label in picture


def test_a_row_that_a_full_disk_has_cut_ends_no_run_and_does_not_swallow_the_next(log, tmp_path, capsys):
    metrics = tmp_path / "metrics.jsonl"
    metrics.symlink_to("/dev/full")
    log.write_eval({"eval_loss": 3.0, "eval_tokens": 10})
    assert f"{metrics}: not written: [Errno 28]" in capsys.readouterr().out

    metrics.unlink()
    metrics.write_text('{"step": 4, "eval_lo')  # what a disk may take before it is full
    log.write_eval({"eval_loss": 2.0, "eval_tokens": 10})
    log.write_eval({"eval_loss": 1.0, "eval_tokens": 10})
    assert [row["eval_loss"] for row in train.read_metrics(tmp_path, 4)] == [2.0, 1.0]
    assert len(metrics.read_text().splitlines()) == 2  # the cut row is gone


def test_a_disk_that_is_full_costs_the_profile_and_not_the_run(tmp_path, capsys):
    (tmp_path / "trace.json.gz").symlink_to("/dev/full")
    profiler = train.tracer(True, False, tmp_path, ALONE)
    for _ in range(4):  # the third step is the one that is recorded
        profiler.step()
    said = capsys.readouterr().out
    assert f"{tmp_path}: profile not written: [Errno 28] No space left on device" in said


# ---------------------------------------------------------------- copies of some files


TRAIN_ON_TENSORS = """
import json, torch, model, nf4
config = model.parse_config(json.load(open("config.json")))
torch.manual_seed(0)
transformer = model.Transformer(config)
for p in transformer.parameters():
    torch.nn.init.normal_(p, std=0.05) if p.dim() > 1 else torch.nn.init.ones_(p)
optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-2)
tokens = torch.randint(0, config.vocab_size, (2, 16))
for _ in range(5):
    loss = transformer(tokens, tokens.roll(-1, 1)) / tokens.numel()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""


def test_model_and_nf4_train_on_tensors_as_a_copy_elsewhere(folder, tmp_path):
    for path in (ROOT / "model.py", ROOT / "nf4.py", folder / "config.json"):
        shutil.copy(path, tmp_path)
    done = shell("-c", TRAIN_ON_TENSORS, cwd=tmp_path)
    losses = [float(line) for line in done.stdout.split()]
    assert len(losses) == 5, done.stderr
    assert losses[-1] < losses[0] - 1  # the same rows again are soon learnt


LAUNCH_ALL = """
import json, sys, train
for argv in json.loads(sys.argv[1]):
    print("exit code", train.launch(argv))
"""


def test_a_fork_without_tests_has_all_but_the_built_in_model(shallow, few_chats, tmp_path):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    trains = ["--model", str(shallow), "--random_init", "--data", str(few_chats), "--steps", "1"]
    # in one process: to import torch takes longer than each of the three
    done = shell("-c", LAUNCH_ALL, json.dumps([["--help"], trains, []]), cwd=tmp_path)
    of_help, of_training, of_built_in, _ = done.stdout.split("exit code ")
    words = " ".join(of_help.split())  # without argparse's line breaks
    assert "--random_init one of llama-2-7b" in words
    assert of_training.startswith("0\n")
    assert "done: " in of_training, done.stderr
    assert of_built_in.startswith("0\n")
    assert "--model tiny: no such folder" in done.stderr
    assert "Traceback" not in done.stderr
