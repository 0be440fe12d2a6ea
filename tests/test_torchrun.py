"""A run under a real torchrun whose launcher is signalled. Other tests start ranks by themselves."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import HANG_S, HERE, random_model, run_ranks

TRAIN = HERE.parent / "train.py"
ENOUGH = 300  # steps after the signal: who has not stopped by then does not stop


@pytest.fixture(scope="module")
def job(chats, tmp_path_factory):
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    model = random_model(tmp_path_factory.mktemp("small") / "model", **small)
    # the rate of a step does not depend on --steps, so a shorter run has the same losses
    return (f"--model {model} --random_init --precision fp32 --data {chats} --seq_len 64 --fsdp2 --lr 1e-2 "
            "--schedule constant --warmup 0 --log_every 1").split()


def start_torchrun(job, out, *options):
    argv = [*job, "--out", str(out), "--steps", "1000000", "--save_every", "0"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *options]
    return subprocess.Popen([*torchrun, TRAIN, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})


def children_of(process):
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def signalled(process, number):
    """What a run said whose torchrun alone gets a signal after three steps. It returns when all of its processes have
    closed their output, so no orphan is left."""
    said = ""
    ranks = []

    def kill():
        for pid in [process.pid, *ranks]:
            os.kill(pid, signal.SIGKILL)

    watchdog = threading.Timer(HANG_S, kill)
    watchdog.start()
    for line in process.stdout:
        said += line
        step = re.match(r"step +(\d+)/", line)
        if step and step[1] == "3":
            ranks += children_of(process)
            os.kill(process.pid, number)
        elif step and int(step[1]) > ENOUGH:
            kill()
            raise AssertionError(f"the ranks train on: {said}")
    watchdog.cancel()
    process.wait()
    return said


@pytest.mark.unperturbed
def test_ranks_save_when_torchrun_alone_is_signalled_and_resume_exactly(job, tmp_path):
    out = tmp_path / "run"
    said = signalled(start_torchrun(job, out, "--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGUSR1"), signal.SIGUSR1)
    stopped = re.search(r"^stopped by SIGUSR1 after step (\d+) of .*, saved: ", said, re.M)
    assert stopped and "train.py: error" not in said, said
    # the lock is free, and what was saved continues as if nothing had happened
    steps = ["--steps", int(stopped[1]) + 2]
    _, resumed, codes = run_ranks(2, [*job, *steps, "--resume"], out)
    assert codes == [0, 0], resumed
    _, _, codes = run_ranks(2, [*job, *steps], tmp_path / "undisturbed")
    assert codes == [0, 0]
    weights = [folder / "final/model.safetensors" for folder in (out, tmp_path / "undisturbed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
