"""What must not lose a run: damaged checkpoints, disks that fail, ranks that die or hang, signals, numbers that are not
finite. The disturbances are functions that ranks run in place of train.py; each wraps a function of it."""

import builtins
import contextlib
import importlib
import io
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from conftest import HERE, SHAPE, run_ranks, start_ranks, state_of, train_main
from safetensors.torch import load_file, save_file

import data
import model as lm
import train

STEPS = 6
WORLD = 2
ALONE = SimpleNamespace(rank=0, world=1)
# one block: what is saved, stopped or spoilt needs no more, and a step takes a few milliseconds
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def small_model(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "model"
    shutil.copytree(folder, path)
    (path / "config.json").write_text(json.dumps(SHAPE | SMALL))
    return path


@pytest.fixture(scope="module")
def job(small_model, chats):
    # --keep 99: every checkpoint stays, to be compared with that of the undisturbed run
    model = f"--model {small_model} --random_init --precision fp32 --fsdp2"
    return f"{model} --data {chats} --seq_len 64 --steps {STEPS} --lr 1e-2 --log_every 1 --keep 99".split()


@pytest.fixture(scope="module")
def evaluated_job(job, chats, tmp_path_factory):
    """The job with an evaluation after every second step. They change no weight."""
    few = tmp_path_factory.mktemp("few") / "few.jsonl"  # three rows for each rank, so three batches
    few.write_text("".join(chats.read_text().splitlines(keepends=True)[:9]))
    return [*job, "--eval_data", str(few), "--eval_every", "2"]


class Ended(NamedTuple):
    """Ranks that have ended."""

    codes: list
    said_by: list  # text of each rank

    @property
    def said(self):
        return "".join(self.said_by)


def start(function, argv, out, *args):
    """Runs function(argv, *args) on all ranks -> Ended."""
    logs = [out.parent / f"{out.name}-rank{rank}.log" for rank in range(WORLD)]
    argv = [*map(str, argv), "--out", str(out)]
    codes = start_ranks(WORLD, function, (argv, *args), logs)
    return Ended(codes, [log.read_text() for log in logs])


def errors_in(said):
    """The messages that ranks end with. There must be no traceback."""
    assert "Traceback" not in said, said
    return re.findall("^train.py: error: (.*)$", said, re.M)


def the_error(said):
    """The message that a run ends with. There must be one, from one rank."""
    (message,) = errors_in(said)
    return message


@pytest.fixture(scope="module")
def undisturbed(evaluated_job, tmp_path_factory):
    """Folder of a run with a checkpoint after every step, and evaluations."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    _, said, codes = run_ranks(WORLD, [*evaluated_job, "--save_every", 1], out)
    assert codes == [0] * WORLD, said
    return out


def weights_in(folder):
    """{name: bytes} of a folder's safetensors files."""
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def assert_same_weights(one, other):
    """Two folders have the same safetensors files, byte for byte."""
    weights = weights_in(one)
    assert weights, one
    # compared outside of `assert`, where pytest would show how megabytes differ
    are_same = weights == weights_in(other)
    assert are_same, (one, other)


def steps_of(out):
    return sorted(train.checkpoints(out))


def assert_resumes(job, out, undisturbed):
    """--resume completes a run to the bytes of the undisturbed one -> rows of its metrics.jsonl."""
    rows, said, codes = run_ranks(WORLD, [*job, "--resume"], out)
    assert codes == [0] * WORLD, said
    assert_same_weights(out / "final", undisturbed / "final")
    assert not list(out.glob("*.part"))
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    return rows


# ---------------------------------------------------------------- damaged checkpoints


@pytest.fixture
def saved(undisturbed, tmp_path):
    """checkpoint-4 of two ranks, which is good and is to be spoilt; beside it lies checkpoint-2."""
    for step in (2, 4):
        shutil.copytree(undisturbed / f"checkpoint-{step}", tmp_path / f"run/checkpoint-{step}")
    shutil.copy(undisturbed / "args.json", tmp_path / "run")
    return tmp_path / "run/checkpoint-4"


def rows_of(checkpoint, rank):
    return checkpoint / f"rank-{rank:05}-of-00002.safetensors"


def flip(path, fraction):
    """Flips a bit at a fraction of the length of a file."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * fraction)] ^= 1
    path.write_bytes(content)


class Bomb:
    """Makes a folder when it is unpickled, to be found by the test."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def truncate(checkpoint):
    os.truncate(rows_of(checkpoint, 0), 1000)


def remove_rows(checkpoint):
    rows_of(checkpoint, 1).unlink()


def copy_rows_of_another_step(checkpoint):
    # of the same names, shapes and size: only the checksum differs
    older = checkpoint.with_name("checkpoint-2")
    shutil.copy(rows_of(older, 0), rows_of(checkpoint, 0))


def copy_rows_of_another_rank(checkpoint):
    shutil.copy(rows_of(checkpoint, 0), rows_of(checkpoint, 1))


def put_a_folder(checkpoint):
    # to open it is an OSError, which must not end in a traceback
    rows_of(checkpoint, 0).unlink()
    rows_of(checkpoint, 0).mkdir()


def put_a_pickle(checkpoint):
    rows_of(checkpoint, 0).write_bytes(pickle.dumps(Bomb()))


def assert_refuses_rows(checkpoint):
    with pytest.raises(ValueError, match=r"checkpoint-4.*rank-0000\d-of-00002.*remove this checkpoint"):
        train.read_state(checkpoint, {}, ALONE)


@pytest.mark.parametrize("damage", [
    truncate, remove_rows, copy_rows_of_another_step, copy_rows_of_another_rank, put_a_folder, put_a_pickle])
def test_files_other_than_those_saved_are_refused_by_name(saved, damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.read_state(saved, {}, ALONE)["step"] == 4
    damage(saved)
    assert_refuses_rows(saved)
    assert not Path("unpickled").exists()


@pytest.mark.parametrize("fraction", [0, 0.01, 0.5, 0.999])  # the header's length, the header, numbers, the last ones
def test_a_flipped_bit_of_the_rows_is_refused_by_name(saved, fraction):
    flip(rows_of(saved, 1), fraction)
    assert_refuses_rows(saved)


def test_any_flipped_bit_of_the_state_is_noticed(saved):
    path = saved / train.STATE
    good = train.read_state(saved, {}, ALONE)
    content = path.read_bytes()
    # Every third byte is enough to meet all keys, numbers and quotes. The bits of a byte take turns.
    for place in range(0, len(content), 3):
        spoilt = bytearray(content)
        spoilt[place] ^= 1 << place % 8
        path.write_bytes(spoilt)
        try:
            assert train.read_state(saved, {}, ALONE) == good  # 1e-05 became 1E-05
        except ValueError as error:
            assert train.STATE in str(error)


def test_a_checkpoint_renamed_to_another_step_is_refused(saved):
    renamed = saved.rename(saved.with_name("checkpoint-6"))  # no file of it has changed
    with pytest.raises(ValueError, match=f"{renamed / train.STATE}: of step 4, .*: name the folder checkpoint-4"):
        train.read_state(renamed, {}, ALONE)


@pytest.mark.parametrize("key", sorted(train.STATE_KEYS))
def test_a_state_of_another_version_is_refused_by_key(saved, key):
    path = saved / train.STATE
    state = data.read_json(path)
    # the count is newer, and 0 in a state without it
    assert state.keys() - {"checksum", "evals_since_best"} == train.STATE_KEYS
    del state[key]
    path.write_text(json.dumps(data.with_checksum(state)))
    with pytest.raises(ValueError, match=f"{path}: has no {key}: another version of oomph"):
        train.read_state(saved, {}, ALONE)


def load_into(tensor, files, folder):
    """Loads a checkpoint of files {key: shape} into the tensor `a` of a run."""
    names = []
    for number, shapes in enumerate(files):
        name = f"{number}.safetensors"
        train.write_rows(folder / name, {key: torch.ones(shape) for key, shape in shapes.items()})
        names.append(name)
    train.load_checkpoint(folder, names, {"a": tensor})


@pytest.mark.parametrize("shape, files, words", [
    ([4, 2], [{"a:0": [2, 3]}, {"a:2": [2, 3]}], "a:0: F32 [2, 3], but this run has F32 [4, 2]"),
    # [2, 1] and [4] would be repeated to [2, 3] and [4, 3] without a word
    ([4, 3], [{"a:0": [2, 1]}, {"a:2": [2, 1]}], "a:0: F32 [2, 1], but this run has F32 [4, 3]"),
    ([4, 3], [{"a:0": [4]}], "a:0: F32 [4], but this run has F32 [4, 3]"),
    # more rows than there are
    ([4, 3], [{"a:0": [5, 3]}], "a:0: F32 [5, 3], but this run has F32 [4, 3]"),
    ([4, 3], [{"a:0": [2, 3]}, {"a:3": [2, 3]}], "a:3: F32 [2, 3], but this run has F32 [4, 3]"),
    ([], [{"a:0": [2]}], "a:0: F32 [2], but this run has F32 [1]"),
    # keys of other tensors
    ([4, 3], [{"a:-1": [4, 3]}], "a:-1: this run trains no such tensor"),
    ([4, 3], [{"a:0": [4, 3], "b:0": [1]}], "b:0: this run trains no such tensor"),
    # other numbers of rows; only rows stored twice that make up for missing ones are not found
    ([4, 3], [{"a:0": [2, 3]}], "missing or stored twice: a"),
    ([4, 3], [{"a:0": [4, 3]}, {"a:0": [4, 3]}], "missing or stored twice: a"),
])
def test_tensors_other_than_those_of_the_run_are_refused_by_name(tmp_path, shape, files, words):
    with pytest.raises(ValueError, match=re.escape(words) + ".*remove this checkpoint"):
        load_into(torch.zeros(shape), files, tmp_path)


def test_numbers_of_another_format_are_refused_by_name(tmp_path):
    tensor = torch.zeros(4, 3, dtype=torch.bfloat16)
    words = r"a:0: F32 \[4, 3\], but this run has BF16.*remove this checkpoint"
    with pytest.raises(ValueError, match=words):
        load_into(tensor, [{"a:0": [4, 3]}], tmp_path)


def test_a_damaged_checkpoint_ends_with_one_message_and_the_older_one_continues(job, saved, undisturbed):
    out = saved.parent
    flip(rows_of(saved, 1), 0.5)  # the ranks divide the files among them, and rank 1 checks this one
    _, said, codes = run_ranks(WORLD, [*job, "--resume"], out)
    assert codes == [1, 1]
    message = the_error(said)
    assert str(rows_of(saved, 1)) in message
    assert "remove this checkpoint" in message

    shutil.rmtree(saved)
    shutil.copy(undisturbed / "metrics.jsonl", out)
    # What the save did not write is not read: a copy of good rows, which would be stored twice, and no safetensors.
    older = out / "checkpoint-2"
    shutil.copy(rows_of(older, 0), rows_of(older, 7))
    (older / "notes.safetensors").write_text("mine")
    assert_resumes(job, out, undisturbed)
    assert (older / "notes.safetensors").read_text() == "mine"


# ---------------------------------------------------------------- disks that fail


def call_open(path, *args, **kwargs):
    return builtins.open(path, *args, **kwargs)


def on_full_disk(argv, *names):
    """train.py on a disk that is full for files whose path contains one of these names."""
    original = open

    def open_on_disk(path, mode="r", *args, **kwargs):
        if "r" not in mode and any(name in str(path) for name in names):
            path = "/dev/full"
        return original(path, mode, *args, **kwargs)

    builtins.open = open_on_disk
    io.open = open_on_disk
    Path.open = call_open  # Python 3.10's keeps the old one
    return train_main(argv)


def test_a_save_that_fails_costs_that_save_only_and_names_what_was_not_written(job, undisturbed, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "args.json").write_text(json.dumps(train.OURS))
    (out / "checkpoint-5").write_text("in the way")  # where the rename of step 5 wants to go: it is replaced
    # in step 2 another rank than the one that speaks fails, in step 4 rank 0 when all rows are written
    rows = "checkpoint-2.part/rank-00001"
    state = f"checkpoint-4.part/{train.STATE}"
    ended = start(on_full_disk, [*job, "--save_every", 1], out, rows, state)
    assert ended.codes == [0] * WORLD, ended.said
    assert "Traceback" not in ended.said

    pattern = (r"^checkpoint-(\d) was NOT written: (.*)\. "
               r"Older checkpoints are intact; steps that are not saved yet: (\d)$")
    reports = re.findall(pattern, ended.said, re.M)
    (step_2, of_rows, n_after_step_1), (step_4, of_state, n_after_step_3) = reports
    assert (step_2, step_4) == ("2", "4")
    assert (n_after_step_1, n_after_step_3) == ("1", "1")
    assert f"{out}/{rows}" in of_rows
    assert "No space left" in of_rows
    assert f"{out}/{state}" in of_state
    assert "No space left" in of_state

    assert steps_of(out) == [1, 3, 5, 6]
    assert not list(out.glob("*.part"))
    for step in steps_of(out):
        assert_same_weights(out / f"checkpoint-{step}", undisturbed / f"checkpoint-{step}")
    assert_same_weights(out / "final", undisturbed / "final")


def test_a_result_that_cannot_be_written_is_named_and_loses_no_checkpoint(job, undisturbed, tmp_path):
    out = tmp_path / "run"
    ended = start(on_full_disk, [*job, "--save_every", 6], out, "final.part/model")
    assert ended.codes == [1] * WORLD
    message = the_error(ended.said)
    assert f"{out}/final.part/model.safetensors" in message
    assert "No space left" in message
    assert_same_weights(out / "checkpoint-6", undisturbed / "checkpoint-6")
    assert not (out / "final").exists()


def on_disk_that_gets_room(argv, at_try, *names):
    """on_full_disk() until the export is tried for the at_try-th time."""
    train.RETRY_S = 1
    original_open = open
    export = data.export
    tries = itertools.count(1)

    def export_later(*args):
        n = next(tries)
        if n == at_try:
            builtins.open = io.open = original_open
        return export(*args)

    data.export = export_later
    return on_full_disk(argv, *names)


def test_the_last_copy_of_the_weights_waits_for_room_on_the_disk(job, undisturbed, tmp_path):
    out = tmp_path / "run"
    argv = [*job, "--save_every", 3, "--timeout", 30]
    ended = start(on_disk_that_gets_room, argv, out, 3, "checkpoint-", "final.part/model")
    assert ended.codes == [0] * WORLD, ended.said
    said = ended.said
    assert "checkpoint-3 was NOT written" in said
    assert re.search(r"checkpoint-6 was NOT written: .* steps that are not saved yet: 6\n", said)
    # 30 s are 30 tries, of which two have failed
    tries = re.findall(r"^final/ was NOT written: .*No space left.*weights of step 6\. .* (\d+) times", said, re.M)
    assert tries == ["30", "29"]
    assert_same_weights(out / "final", undisturbed / "final")
    assert not list(out.glob("*.part"))


def test_the_last_copy_of_the_weights_is_given_up_after_the_time_of_a_step(job, tmp_path):
    argv = [*job, "--save_every", 0, "--steps", 2, "--timeout", 2]
    ended = start(on_disk_that_gets_room, argv, tmp_path / "run", 9, "final.part/model")
    assert ended.codes == [1] * WORLD
    assert ended.said.count("final/ was NOT written") == 2
    assert "No space left" in the_error(ended.said)


def signalled_while_it_waits_for_room(argv):
    """The disk has no room for the result, and none for a checkpoint before rank 1 gets a signal."""
    original_open = open
    write_result = train.write_result

    def write_result_with_signal(export, end_if_signalled, *others):
        def end_after_signal():
            builtins.open = io.open = original_open
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
            end_if_signalled()

        return write_result(export, end_after_signal, *others)

    train.write_result = write_result_with_signal
    return on_full_disk(argv, "checkpoint-", "final.part/model")


def test_a_signal_to_a_run_that_waits_for_room_saves_and_ends_it(job, undisturbed, tmp_path):
    out = tmp_path / "run"
    ended = start(signalled_while_it_waits_for_room, [*job, "--save_every", 6], out)
    assert ended.codes == [128 + signal.SIGTERM] * WORLD, ended.said
    assert f"stopped by SIGTERM after step {STEPS} of {STEPS}, saved: " in ended.said
    assert_same_weights(out / f"checkpoint-{STEPS}", undisturbed / f"checkpoint-{STEPS}")
    assert not (out / "final").exists()


def test_a_disk_that_is_full_at_the_start_is_named(job, tmp_path):
    ended = start(on_full_disk, job, tmp_path / "run", "args.json")
    assert ended.codes == [1] * WORLD
    message = the_error(ended.said)
    words = f"{tmp_path}/run/args.json: file not written: No space left on device: free some disk space"
    assert message.endswith(words)
    assert "examples" not in ended.said  # before anything takes time


def test_a_merge_that_fails_prints_its_message_alone(job, tmp_path):
    out = tmp_path / "run"
    ended = start(on_full_disk, [*job, "--lora", "--merge"], out, "merged.part/model")
    assert ended.codes == [1, 0], ended.said  # rank 0 merges when the others have left
    message = the_error(ended.said)
    assert f"{out}/final is complete" in message
    assert "No space left" in message
    assert (out / "final").exists()


def test_a_slow_save_is_no_hang(tmp_path, monkeypatch):
    # faulthandler ends a rank whose step takes longer than --timeout, so it must be told before the disk is waited for
    calls = []

    def write_rows(path, rows):
        calls.append("rows are written")
        path.write_bytes(b"1")
        return [1, 1]  # size and checksum

    monkeypatch.setattr(train.faulthandler, "cancel_dump_traceback_later", lambda: calls.append("not watched"))
    monkeypatch.setattr(train, "write_rows", write_rows)
    ranks = SimpleNamespace(
        rank=0, world=1, gather=lambda value: [value], say=calls.append,
        agree=lambda end_run: contextlib.nullcontext())
    train.Saver(tmp_path, 1, ranks, state_of(0)).save({"a": torch.ones(1)}, state_of(1))
    assert calls[0] == "not watched"
    assert "rows are written" in calls
    assert steps_of(tmp_path) == [1]


def test_a_checkpoint_is_announced_when_rank_0_sees_the_files_of_all(tmp_path, monkeypatch):
    said = []
    files = {"rank-00001-of-00002.safetensors": [1, 1]}  # on the disk of another machine
    ranks = SimpleNamespace(
        rank=0, world=2, gather=lambda value: [value, [] if isinstance(value, list) else files], say=said.append,
        agree=lambda end_run: contextlib.nullcontext())
    monkeypatch.setattr(train.time, "sleep", lambda seconds: None)
    train.Saver(tmp_path, 1, ranks, state_of(0)).save({"a": torch.ones(1)}, state_of(1))
    assert said[0].startswith("checkpoint-1 was NOT written: ")
    assert "rank-00001-of-00002.safetensors" in said[0]
    assert steps_of(tmp_path) == []


# ---------------------------------------------------------------- hangs


@contextlib.contextmanager
def when(has_happened, act):
    """While the block runs, a thread waits until has_happened(), and then calls act(). The block bounds the wait: it is
    a run, and start_ranks() ends it when no rank writes to its log any more."""
    has_ended = threading.Event()

    def wait():
        while not has_happened():
            if has_ended.wait(0.1):
                return
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def stop_this_process(pid_file):
    """As a debugger does, or a machine that is suspended."""
    pid_file.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_stopped(pid_file):
    """What torchrun does when another rank has ended."""
    if pid_file.exists():
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


def with_stop_in_step_4(argv, pid_file):
    """train.py whose rank 1 is stopped when step 4 begins."""
    alive = train.Ranks.rearm_watchdog
    n_steps = itertools.count(1)

    def alive_or_stopped(ranks):
        if next(n_steps) == 4:
            ranks.timeout = 3  # seconds; --timeout 3 would end a first step on a busy machine, too
            if ranks.rank == 1:
                stop_this_process(pid_file)
        alive(ranks)

    train.Ranks.rearm_watchdog = alive_or_stopped
    return train_main(argv)


def test_a_stopped_rank_ends_the_job_and_the_others_say_where_they_wait(job, tmp_path):
    log = tmp_path / "run-rank0.log"
    pid_file = tmp_path / "pid"

    def rank_0_has_timed_out():
        return log.exists() and "Timeout (" in log.read_text()

    # a stopped process ends only by SIGKILL
    with when(rank_0_has_timed_out, lambda: kill_stopped(pid_file)):
        ended = start(with_stop_in_step_4, [*job, "--save_every", 2], tmp_path / "run", pid_file)
    assert ended.codes == [1, -signal.SIGKILL], ended.said
    # behind faulthandler's title stand the calls of each thread
    _, _, stacks = ended.said_by[0].partition("Timeout (0:00:03)!")
    assert "train.py" in stacks
    assert steps_of(tmp_path / "run") == [2]


def read_from_a_dead_disk(pid_file):
    pid_file.write_text(str(os.getpid()))
    reading, _writing = os.pipe()
    os.read(reading, 1)  # nobody writes


def lose_patience(pid_file):
    """From here on this rank waits for others for a second. The one that will be stuck is stuck by then."""
    while not pid_file.exists():
        time.sleep(0.01)
    barrier = dist.monitored_barrier
    dist.monitored_barrier = lambda group, _, wait_all_ranks: barrier(group, timedelta(seconds=1), wait_all_ranks)


class Stuck(NamedTuple):
    """A run of which rank 1 gets stuck in its first call of a function. The others call it, too."""

    act: object  # how
    module: str
    function: str  # of the module
    place: str  # where rank 0 waits


STUCK = {
    "stopped in loading": Stuck(
        stop_this_process, "data", "stacked_rows", "build > load_weights_ > agree > gather (train.py:"),
    "a stuck disk in a save": Stuck(
        # rank 0 calls write_rows() in a rehearsal, too
        read_from_a_dead_disk, "train", "rows_of_rank", "save > save > agree > gather (train.py:"),
}


def with_stuck_rank(argv, pid_file, stuck):
    """train.py whose rank 1 gets stuck, and whose rank 0 loses patience then."""
    module = importlib.import_module(stuck.module)
    original = getattr(module, stuck.function)

    def disturbed(*args, **kwargs):
        setattr(module, stuck.function, original)
        act = stuck.act if os.environ["RANK"] == "1" else lose_patience
        act(pid_file)
        return original(*args, **kwargs)

    setattr(module, stuck.function, disturbed)  # its callers look it up in the module
    return train_main(argv)


def run_with_stuck_rank(job, folder, stuck):
    """-> Ended. The stuck rank is killed when the other one has ended."""
    folder.mkdir()
    pid_file = folder / "pid"
    log = folder / "run-rank0.log"

    def rank_0_has_ended():
        return log.exists() and "hangs" in log.read_text()

    with when(rank_0_has_ended, lambda: kill_stopped(pid_file)):
        argv = [*job, "--steps", 2, "--save_every", 2]
        return start(with_stuck_rank, argv, folder / "run", pid_file, stuck)


def test_a_rank_that_is_stuck_outside_of_a_step_is_named_and_ends_the_job(job, tmp_path):
    with ThreadPoolExecutor() as pool:  # all at once: they mostly wait
        runs = {case: pool.submit(run_with_stuck_rank, job, tmp_path / case, stuck) for case, stuck in STUCK.items()}
    for case, stuck in STUCK.items():
        ended = runs[case].result()
        assert ended.codes == [1, -signal.SIGKILL], ended.said
        message = the_error(ended.said_by[0])
        assert message.startswith("lost contact with another rank at step ")
        assert stuck.place in message
        assert "([Rank 0]: Ranks 1 failed to pass monitoredBarrier. " in message
        assert "--timeout N waits for 4 N seconds" in message


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_a_rank_that_loses_rank_0_says_so_unless_torchrun_does(monkeypatch, capsys, by_torchrun):
    """Without torchrun each machine may have a screen of its own, and rank 0's has gone."""
    def main(*_):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.9.0.1]:23469")

    for name in train.OF_GROUP:
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(train, "main", main)
    assert train.launch([]) == 1
    assert ("lost contact with another rank" in capsys.readouterr().err) == (not by_torchrun)


def wait_for_rank_0(file):
    """Rank 0 does not come before rank 1 has lost patience."""
    train.LONG = 0.003
    ranks = train.Ranks(False, 1000)
    if ranks.rank == 0:
        while not file.exists():
            time.sleep(0.01)
        return
    with pytest.raises(RuntimeError) as caught:
        ranks.gather(None)
    file.write_text(str(caught.value))
    assert train.lost_another_rank(caught.value)


def test_other_ranks_do_not_wait_for_rank_0_for_ever(tmp_path):
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    assert start_ranks(2, wait_for_rank_0, (tmp_path / "lost",), logs) == [0, 0], logs[1].read_text()


# ---------------------------------------------------------------- signals


# The moments at which a rank may get a signal. Each makes its process call send() then.


def in_the_data_of_step_4(send):
    ahead = data.Loader.ahead

    def ahead_with_signal(*args):
        for step, made in enumerate(ahead(*args), 1):
            if step == 4:
                send()
            yield made

    data.Loader.ahead = ahead_with_signal


def in_the_save_of_step_3(send):
    write_rows = train.write_rows

    def write_rows_after_signal(path, rows):
        if "checkpoint-3" in str(path):
            send()
        return write_rows(path, rows)

    train.write_rows = write_rows_after_signal


def after_first_batch(send, of_evaluation):
    """After the model has seen the first batch of an evaluation; they are counted from 1."""
    batches = data.Loader.once
    evaluations = itertools.count(1)

    def batches_with_signal(loader):
        is_meant = next(evaluations) == of_evaluation
        for number, batch in enumerate(batches(loader)):
            yield batch
            if is_meant and number == 0:
                send()

    data.Loader.once = batches_with_signal


def in_evaluation_2(send):  # that of step 4
    after_first_batch(send, 2)


def in_evaluation_3(send):  # that of the last step
    after_first_batch(send, 3)


def at_each_token(send, of_sample):
    """At each token of an answer to --sample; they are counted from 1, which is the one before training."""
    generate = lm.generate
    samples = itertools.count(1)

    def generate_with_signal(*args):
        sample = next(samples)
        for token in generate(*args):
            print(f"a token of sample {sample}", flush=True)
            if sample == of_sample:
                send()
            yield token

    lm.generate = generate_with_signal


def in_the_sample_of_step_4(send):  # the evaluation of step 2 has one, too
    at_each_token(send, 3)


def in_the_sample_after_training(send):
    at_each_token(send, 4)


def say_batches():
    """Makes evaluations print which of their batches they fetch."""
    batches = data.Loader.once
    evaluations = itertools.count(1)

    def batches_said(loader):
        evaluation = next(evaluations)
        for number, batch in enumerate(batches(loader)):
            print(f"batch {number} of evaluation {evaluation}", flush=True)
            yield batch

    data.Loader.once = batches_said


def signalled(argv, number, moment, to_rank=1):
    """train.py of which one rank alone gets a signal."""
    say_batches()
    # Only one rank gets it, as on a cluster that signals one node: the others must hear of it.
    if int(os.environ["RANK"]) == to_rank:
        moment(lambda: os.kill(os.getpid(), number))
    return train_main(argv)


def assert_same_evaluations(rows, out, undisturbed):
    """The evaluations of a run that went on, one that was cut among them, are the undisturbed run's, to the bit."""
    lines = (undisturbed / "metrics.jsonl").read_text().splitlines()
    expected = [row for row in map(json.loads, lines) if "eval_loss" in row]
    assert [row["step"] for row in expected] == [2, 4, STEPS]
    assert [row for row in rows if "eval_loss" in row] == expected

    last = f"checkpoint-{STEPS}"
    expected_state = train.read_state(undisturbed / last, {}, ALONE)
    assert expected_state["evaluated"] == STEPS
    if (out / last).exists():  # with --save_every 0 the last step is not saved
        state = train.read_state(out / last, {}, ALONE)
        assert state["evaluated"] == STEPS
        assert state["best_eval"] == expected_state["best_eval"]


@pytest.mark.parametrize("number, moment, save_every, n_fetched", [
    # in a step, which is finished first, with checkpoints and without
    (signal.SIGINT, in_the_data_of_step_4, 3, [0, 0, 0]),
    (signal.SIGHUP, in_the_data_of_step_4, 0, [0, 0, 0]),
    # the ranks look for signals before a save, so they see this one after step 4
    (signal.SIGUSR1, in_the_save_of_step_3, 3, [0, 0, 0]),
    # all ranks see the first batch, fetch the second one and stop before it
    (signal.SIGTERM, in_evaluation_2, 0, [WORLD, WORLD, 0]),
])
def test_a_signal_to_one_rank_saves_on_all_and_resume_completes(
        evaluated_job, undisturbed, tmp_path, number, moment, save_every, n_fetched):
    out = tmp_path / "run"
    argv = [*evaluated_job, "--save_every", save_every]
    ended = start(signalled, argv, out, number, moment)
    said = ended.said
    assert ended.codes == [128 + number] * WORLD, said
    assert f"stopped by {number.name} after step 4 of {STEPS}, saved: the same command with --resume {out} " in said
    assert said.count("stopped by") == 1
    assert "Traceback" not in said
    assert [said.count(f"batch {i} of evaluation 2") for i in range(3)] == n_fetched  # all ranks together
    assert_same_weights(out / "checkpoint-4", undisturbed / "checkpoint-4")
    assert not (out / "final").exists()
    assert not list(out.glob("*.part"))

    rows = assert_resumes(argv, out, undisturbed)
    assert_same_evaluations(rows, out, undisturbed)


def test_a_signal_in_the_sample_of_an_evaluation_ends_it_and_saves_one_step_later(
        evaluated_job, undisturbed, tmp_path):
    out = tmp_path / "run"
    argv = [*evaluated_job, "--save_every", 0, "--sample", "def f(x):", "--max_new_tokens", 9]
    ended = start(signalled, argv, out, signal.SIGTERM, in_the_sample_of_step_4)
    assert ended.codes == [128 + signal.SIGTERM] * WORLD, ended.said
    assert f"stopped by SIGTERM after step 5 of {STEPS}, saved" in ended.said
    # The rank that gets the signal counts: it stops at that token, and with it the others, or they would wait for it.
    assert ended.said.count("a token of sample 2") == 9
    assert ended.said.count("a token of sample 3") == 1
    assert_same_weights(out / "checkpoint-5", undisturbed / "checkpoint-5")

    rows = assert_resumes(argv, out, undisturbed)
    assert_same_evaluations(rows, out, undisturbed)


def test_a_rank_that_dies_in_an_evaluation_costs_nothing_that_was_due_to_be_saved(evaluated_job, undisturbed, tmp_path):
    out = tmp_path / "run"
    argv = [*evaluated_job, "--save_every", 4]
    ended = start(signalled, argv, out, signal.SIGKILL, in_evaluation_2)  # that of step 4, whose save comes before it
    assert ended.codes == [1, -signal.SIGKILL], ended.said
    assert steps_of(out) == [2, 4]  # the first evaluation is the best so far
    assert_same_weights(out / "checkpoint-4", undisturbed / "checkpoint-4")

    rows = assert_resumes(argv, out, undisturbed)
    assert_same_evaluations(rows, out, undisturbed)


def test_a_signal_in_the_last_evaluation_ends_it_and_the_result_is_complete(evaluated_job, undisturbed, tmp_path):
    out = tmp_path / "run"
    argv = [*evaluated_job, "--save_every", 6]
    ended = start(signalled, argv, out, signal.SIGTERM, in_evaluation_3)
    assert ended.codes == [128 + signal.SIGTERM] * WORLD, ended.said
    assert "Traceback" not in ended.said
    assert f"stopped by SIGTERM after step {STEPS} of {STEPS}, saved" in ended.said
    assert "batch 2 of evaluation 3" not in ended.said
    assert_same_weights(out / "final", undisturbed / "final")

    rows = assert_resumes(argv, out, undisturbed)
    assert_same_evaluations(rows, out, undisturbed)


def test_a_signal_after_the_result_ends_the_run_at_once(evaluated_job, undisturbed, tmp_path):
    out = tmp_path / "run"
    # so many tokens that the signal comes before the last one
    argv = [*evaluated_job, "--save_every", 6, "--sample", "def f(x):", "--max_new_tokens", 99]
    ended = start(signalled, argv, out, signal.SIGTERM, in_the_sample_after_training, 0)
    assert ended.codes == [130, 1], ended.said  # rank 1 waits in a collective, which fails when rank 0 is gone
    # without torchrun each rank has a screen of its own
    interrupted, lost = sorted(errors_in(ended.said))
    assert interrupted == f"interrupted, {out}/final is complete"
    assert lost.startswith("lost contact with another rank")
    assert_same_weights(out / "final", undisturbed / "final")
    assert steps_of(out)[-1] == 6


def test_a_rank_that_dies_in_a_save_ends_the_run_and_costs_that_save_only(job, undisturbed, tmp_path):
    out = tmp_path / "run"
    ended = start(signalled, [*job, "--save_every", 1], out, signal.SIGKILL, in_the_save_of_step_3)
    assert ended.codes == [1, -signal.SIGKILL], ended.said
    assert steps_of(out) == [1, 2]
    assert_same_weights(out / "checkpoint-2", undisturbed / "checkpoint-2")
    message = the_error(ended.said)
    assert re.search(r"lost contact with another rank at step 3, in .*save", message)
    assert "Connection" in message or "Ranks 1 failed" in message  # in gloo's words
    assert_resumes(job, out, undisturbed)


# ---------------------------------------------------------------- signals before the first step


def signalled_early(argv, name, number):
    """train.py whose last rank gets a signal where it calls this function of data.py."""
    original = getattr(data, name)
    is_last_rank = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def call(*args, **kwargs):
        if is_last_rank:
            signal.raise_signal(number)
        return original(*args, **kwargs)

    setattr(data, name, call)
    return train_main(argv)


@pytest.mark.parametrize("name, number", [
    ("check_weights", signal.SIGUSR1),  # the model is on the meta device
    ("tokenized", signal.SIGTERM),  # texts are read, which may take an hour
    ("load_weights_", signal.SIGHUP),  # the last thing that takes time
])
def test_a_signal_before_the_first_step_says_that_nothing_is_saved(job, tmp_path, name, number):
    log = tmp_path / "log"
    argv = [*job, "--out", str(tmp_path / "run")]
    codes = start_ranks(1, signalled_early, (argv, name, number), [log])
    said = log.read_text()
    assert codes == [130], said
    assert said.endswith("train.py: error: interrupted, nothing saved\n"), said
    assert said.count("error") == 1
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_a_signal_to_one_rank_before_the_first_step_ends_all_with_a_message_each(job, tmp_path):
    logs = [tmp_path / f"log{rank}" for rank in range(3)]
    argv = [*job, "--out", str(tmp_path / "run")]
    codes = start_ranks(3, signalled_early, (argv, "load_weights_", signal.SIGTERM), logs)
    said = "".join(log.read_text() for log in logs)
    assert codes == [1, 1, 130], said
    errors = errors_in(said)  # of the two ranks that were not interrupted
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("lost contact with another rank at step 0, in build > ")
    assert not (tmp_path / "run").exists()


def in_the_sample_before_training(send):
    at_each_token(send, 1)


def test_after_an_interrupt_before_the_first_step_the_same_command_starts(job, tmp_path):
    log = tmp_path / "log"
    argv = [*job, "--sample", "def f(x):", "--out", str(tmp_path / "run")]
    # weights are loaded by then, and args.json is written
    ended = (argv, signal.SIGINT, in_the_sample_before_training, 0)
    assert start_ranks(1, signalled, ended, [log]) == [130]
    assert log.read_text().endswith("train.py: error: interrupted, nothing saved\n")
    assert not (tmp_path / "run").exists()
    assert start_ranks(1, train_main, ([*argv, "--steps", "1"],), [log]) == [0], log.read_text()


def test_an_interrupt_of_a_resumed_run_that_loads_names_the_checkpoint(job, saved):
    out = saved.parent
    before = sorted(out.rglob("*"))
    log = out.with_name("log")
    argv = [*job, "--batch_size", "2", "--resume", "--out", str(out)]  # the rows of two ranks
    assert start_ranks(1, signalled_early, (argv, "load_weights_", signal.SIGTERM), [log]) == [130]
    message = f"train.py: error: interrupted, {saved} is complete: the same command with --resume continues it\n"
    assert log.read_text().endswith(message)
    assert sorted(path for path in out.rglob("*") if path.name != "lock") == before


def test_an_interrupt_during_the_imports_leaves_no_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}  # train.py imports this torch
    done = subprocess.run([sys.executable, HERE.parent / "train.py"], capture_output=True, text=True, env=env)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == ""


@pytest.fixture
def handlers():
    """Signal handlers as they were, after the test."""
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGHUP, signal.SIGINT]
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("rank, number, answer", [
    (None, signal.SIGINT, "\nstopping after this step, which is saved; again: at once, unsaved\n"),
    # torchrun itself sends each rank a second one
    ("0", signal.SIGINT, "\nstopping after this step, which is saved\n"),
    (None, signal.SIGTERM, "\nstopping after this step, which is saved\n"),
    ("1", signal.SIGINT, ""),
])
def test_the_first_signal_is_answered_at_once_and_a_second_interrupt_ends_a_single_process(
        monkeypatch, handlers, capfd, rank, number, answer):
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's own, or none in a background job
    with contextlib.ExitStack() as exits:
        stop = train.StopSignal(exits)
        stop.can_save = True
        signal.raise_signal(number)
        assert stop.number == number
        assert capfd.readouterr().err == answer
        with pytest.raises(KeyboardInterrupt) if "again" in answer else contextlib.nullcontext():
            signal.raise_signal(number)


@pytest.mark.parametrize("number", [
    signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGHUP, signal.SIGINT])
def test_an_ignored_signal_stays_ignored_and_others_do_afterwards_what_they_did_before(handlers, number):
    """nohup ignores SIGHUP; a script's shell ignores SIGINT for what it starts with &."""
    for before in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(number, before)
        with contextlib.ExitStack() as exits:
            stop = train.StopSignal(exits)
            stop.can_save = True
            signal.raise_signal(number)
            assert stop.number == (0 if before == signal.SIG_IGN else number)
        assert signal.getsignal(number) == before


TO_THE_END = """
import os, runpy, signal, sys
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
sys.argv = ["train.py", *{argv}]
try:
    runpy.run_path("train.py", run_name="__main__")  # as a notebook's %run does
except SystemExit as end:
    print("goes on after", end.code)
assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
"""


def test_a_notebook_outlives_the_run_in_it(tmp_path):
    for argv, code in (["--dry_run", "--seq_len", "64"], 0), (["--no_such_flag"], 2):
        done = subprocess.run([sys.executable, "-c", TO_THE_END.format(argv=argv)], capture_output=True, text=True,
                              cwd=HERE.parent)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"goes on after {code}\n")


def test_a_program_starts_with_the_signals_that_its_parent_ignores(tmp_path):
    """train.py sets the handler of an interrupt before its imports, too."""
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nraise SystemExit(7)\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}  # train.py imports this torch
    done = subprocess.run([sys.executable, HERE.parent / "train.py"], env=env,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert done.returncode == 7


# ---------------------------------------------------------------- numbers that are not finite


MARK = 4095  # a token of no document; documents that consist of it make what is not finite


def is_marked(tokens):
    return bool((tokens == MARK).all())


def mark_documents_of_rank_1_in_step_3():
    step = data.Loader.step

    def marked_step(loader, number, grad_accum):
        batches, counts = step(loader, number, grad_accum)
        if loader.rank == 1 and number == 2:
            batches[0].tokens[:] = MARK
        return batches, counts

    data.Loader.step = marked_step


def make_inf(tensor):
    """Makes the gradient of a tensor infinite."""
    tensor.register_hook(lambda grad: grad * torch.inf)


def spoil_loss_of_marked(spoil):
    forward = lm.Transformer.forward

    def spoilt_forward(model, tokens_BT, *args):
        loss = forward(model, tokens_BT, *args)
        return spoil(loss) if is_marked(tokens_BT) else loss

    lm.Transformer.forward = spoilt_forward


def spoil_loss():
    spoil_loss_of_marked(lambda loss: loss * torch.nan)


def spoil_gradient():
    """The loss stays finite, and all gradients of the model come from what is infinite."""
    def spoil(loss):
        make_inf(loss)
        return loss

    spoil_loss_of_marked(spoil)


def spoil_row():
    """Only the gradient of the marked token's row of the embedding is infinite."""
    def after_forward(module, inputs, x):
        if isinstance(module, torch.nn.Embedding) and is_marked(inputs[0]):
            make_inf(x)

    torch.nn.modules.module.register_module_forward_hook(after_forward)


def show_the_end():
    """At the end each rank says where its documents of step 3 are, and writes its rows of the weights."""
    end_not_finite = train.end_not_finite

    def shown_end(trainer, loader, number):
        weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
        rank = trainer.ranks.rank
        save_file(train.rows_of_rank(weights, rank), f"{trainer.run.args.out}/end-{rank}.safetensors")
        print("documents: " + ", ".join(loader.places(2, 1)))
        end_not_finite(trainer, loader, number)

    train.end_not_finite = shown_end


def not_finite(argv, spoil):
    """train.py in which the documents of rank 1 in step 3 make a loss or a gradient that is not finite."""
    mark_documents_of_rank_1_in_step_3()
    spoil()
    show_the_end()
    return train_main(argv)


def rows_in(folder, pattern):
    """{key: rows} of all safetensors files of a pattern."""
    rows = {}
    for path in folder.glob(pattern):
        rows |= load_file(path)
    return rows


@pytest.mark.parametrize("spoil, flags", [
    # each optimizer skips such a step by itself: the fused kernel, torch's loop, ours, and those in the backward
    (spoil_loss, "--fsdp2 --clip 1e-5"),
    (spoil_loss, "--no-fused_adamw"),
    (spoil_loss, "--optim_in_backward"),
    (spoil_gradient, "--fsdp2 --optim adamw8bit"),
    (spoil_gradient, "--lora --precision bf16 --stochastic_rounding"),
    (spoil_gradient, "--fsdp2 --optim_in_backward"),
    (spoil_row, "--fsdp2"),
])
def test_a_number_that_is_not_finite_ends_the_run_before_a_weight_changes(job, tmp_path, spoil, flags):
    out = tmp_path / "run"
    without_fsdp2 = [arg for arg in job if arg != "--fsdp2"]
    seldom = "--save_every 2 --log_every 4".split()  # so it is found at step 4, which is logged
    ended = start(not_finite, [*without_fsdp2, *seldom, *flags.split()], out, spoil)
    assert ended.codes == [train.NOT_FINITE] * WORLD, ended.said
    assert steps_of(out) == [2]
    assert not (out / "final").exists()

    # The weights at the end are those of step 2: neither step 3 nor step 4 has changed one.
    trained = rows_in(out, "checkpoint-2/*.safetensors")  # and the optimizer's state
    at_the_end = rows_in(out, "end-*.safetensors")  # and frozen weights
    common = trained.keys() & at_the_end.keys()
    assert common
    for key in common:
        assert torch.equal(trained[key], at_the_end[key]), key

    message = ended.said_by[0]  # rank 0 speaks
    assert "error: step 3: the loss or a gradient is inf or nan. " in message
    assert ended.said.count("is inf or nan") == 1
    changed = "The weights and"
    if "--optim_in_backward" in flags:
        changed = "Gradients that came earlier in this step were applied. The"  # and freed
    assert f"{changed} checkpoints were not touched. Lower --lr, which is " in message
    for rank in range(WORLD):
        (places,) = re.findall(r"documents: (.*)", ended.said_by[rank])
        assert re.fullmatch(r"\S+/chats\.jsonl:\d+(, \S+/chats\.jsonl:\d+)*", places)
        assert f"\n  rank {rank}: {places}\n" in message
