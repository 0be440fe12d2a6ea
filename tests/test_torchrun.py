"""A run under a real torchrun, of which a rank is killed and whose launcher is signalled. Other tests start ranks by
themselves."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import HANG_S, HERE, free_port, random_model, run_ranks

ENOUGH = 300  # steps after the signal: who has not stopped by then does not stop

DIES_ONCE = """
import os, signal, train

alive = train.Ranks.rearm_watchdog  # called once a step
steps = []

def alive_or_killed(ranks):
    steps.append(None)
    is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first_start and ranks.rank == 1 and len(steps) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    alive(ranks)

train.Ranks.rearm_watchdog = alive_or_killed
os._exit(train.launch())
"""


@pytest.fixture(scope="module")
def job(chats, tmp_path_factory):
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    model = random_model(tmp_path_factory.mktemp("small") / "model", **small)
    # the rate of a step does not depend on --steps, so a shorter run has the same losses
    return (f"--model {model} --random_init --precision fp32 --data {chats} --seq_len 64 --fsdp2 --lr 1e-2 "
            "--schedule constant --warmup 0 --log_every 1 --save_every 2 --keep 2").split()


def start_torchrun(script, job, out, *options):
    argv = [*job, "--out", str(out), "--steps", "1000000", "--resume"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *options]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HERE.parent)}
    return subprocess.Popen([*torchrun, script, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=environment)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_waits_for_ranks_says_so_and_a_signal_ends_it(job, tmp_path, number):
    """RANK and WORLD_SIZE are left in the environment of a pod: nobody else comes."""
    of_rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, HERE.parent / "train.py", "--out", tmp_path / "out"]
    process = subprocess.Popen(command, env=os.environ | of_rank, stderr=subprocess.PIPE, text=True)
    said = process.stderr.readline()
    assert said.startswith("MASTER_ADDR=127.0.0.1 MASTER_PORT=")
    assert said.endswith(" RANK=0 WORLD_SIZE=2: waits for the other ranks; to train alone, unset RANK\n")
    time.sleep(1)  # until it waits in C++, where no handler in Python would run
    process.send_signal(number)
    assert process.wait(HANG_S) == -number


def children_of(process):
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def signalled(process, number):
    """What a run said whose torchrun alone gets a signal after six steps. It returns when all of its processes have
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
        if step and step[1] == "6":
            ranks += children_of(process)
            os.kill(process.pid, number)
        elif step and int(step[1]) > ENOUGH:
            kill()
            raise AssertionError(f"the ranks train on: {said}")
    watchdog.cancel()
    process.wait()
    return said


@pytest.mark.unperturbed
def test_ranks_restart_when_one_is_killed_and_save_when_torchrun_alone_is_signalled_and_resume_exactly(job, tmp_path):
    script = tmp_path / "dies_once.py"
    script.write_text(DIES_ONCE)
    out = tmp_path / "run"
    signals = "--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGUSR1"
    said = signalled(start_torchrun(script, job, out, "--max-restarts", "1", *signals), signal.SIGUSR1)
    assert f"continuing after step 2 of {out}/checkpoint-2" in said, said  # it died in step 4, before its save
    stopped = re.search(r"^stopped by SIGUSR1 after step (\d+) of .*, saved: ", said, re.M)
    assert stopped and "train.py: error" not in said.split("continuing after")[1], said
    # the lock is free, and what was saved continues as if nothing had happened
    last = int(stopped[1]) + 2
    steps = ["--steps", last]
    _, resumed, codes = run_ranks(2, [*job, *steps, "--resume"], out)
    assert codes == [0, 0], resumed
    whole = tmp_path / "undisturbed"
    _, _, codes = run_ranks(2, [*job, *steps], whole)
    assert codes == [0, 0]
    files = [*whole.glob("final/*.safetensors"), *whole.glob(f"checkpoint-{last}/*.safetensors")]
    assert len(files) == 3  # the model, and the rows of two ranks
    for file in files:
        assert file.read_bytes() == (out / file.relative_to(whole)).read_bytes(), file
