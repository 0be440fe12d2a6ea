"""What must not lose a run: damaged checkpoints, disks that fail, ranks that die or hang, signals, numbers that are not
finite."""

import builtins
import contextlib
import io
import json
import math
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
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import HERE, SHAPE, build, on_ranks, run_ranks, start_ranks, state_of, train_main
from safetensors.torch import load_file, save_file

import data
import model as lm
import nf4
import train

STEPS, WORLD, EVAL_EVERY, ALONE = 6, 2, 2, SimpleNamespace(rank=0, world=1)
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def job(folder, chats, tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "model"
    shutil.copytree(folder, path)
    (path / "config.json").write_text(json.dumps(SHAPE | SMALL))
    few = path / "few.jsonl"  # to evaluate on: three rows for each rank
    few.write_text("".join(chats.read_text().splitlines(keepends=True)[:9]))
    return (f"--model {path} --random_init --precision fp32 --data {chats} --seq_len 64 --steps {STEPS} --lr 1e-2 "
            "--log_every 1 --keep 99 --fsdp2").split()


def start(function, argv, out, *args):
    """function(argv, *args) on ranks -> (what each said, their exit codes)."""
    logs = [out.parent / f"{out.name}-rank{rank}.log" for rank in range(WORLD)]
    codes = start_ranks(WORLD, function, ([*map(str, argv), "--out", str(out)], *args), logs)
    return [log.read_text() for log in logs], codes


def evaluated(job):
    """The job with an evaluation after every second step. They change no weight."""
    return [*job, "--eval_data", f"{job[1]}/few.jsonl", "--eval_every", EVAL_EVERY]


@pytest.fixture(scope="module")
def undisturbed(job, tmp_path_factory):
    """Folder of a run with a checkpoint after every step, and evaluations."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    _, text, codes = run_ranks(WORLD, [*evaluated(job), "--save_every", 1], out)
    assert codes == [0] * WORLD, text
    return out


def same(one, other):
    """Whether two folders hold the same weights, byte for byte."""
    files = [{path.name: path.read_bytes() for path in folder.glob("*.safetensors")} for folder in (one, other)]
    return files[0] == files[1] and files[0]


def steps_of(out):
    return sorted(train.checkpoints(out))


def assert_resumes(job, out, undisturbed):
    """--resume completes a run to the bytes of the undisturbed one."""
    rows, text, codes = run_ranks(WORLD, [*job, "--resume"], out)
    assert codes == [0] * WORLD, text
    assert same(out / "final", undisturbed / "final") and not list(out.glob("*.part"))
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    return rows


# ---------------------------------------------------------------- damaged checkpoints


@pytest.fixture
def saved(undisturbed, tmp_path):
    """A run's folder with good checkpoints of two ranks, 2 and 4; the second is to be spoilt."""
    for step in (2, 4):
        shutil.copytree(undisturbed / f"checkpoint-{step}", tmp_path / f"run/checkpoint-{step}")
    return tmp_path / "run/checkpoint-4"


def flip(path, share=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * share)] ^= 1
    path.write_bytes(content)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def rows_of(folder, rank=0):
    return folder / f"rank-{rank:05}-of-00002.safetensors"


DAMAGE = {
    "truncated": lambda f: os.truncate(rows_of(f), 1000),
    **{f"flipped at {share}": lambda f, share=share: flip(rows_of(f, 1), share) for share in (0, 0.01, 0.5, 0.999)},
    "missing": lambda f: rows_of(f, 1).unlink(),
    "of another step": lambda f: shutil.copy(rows_of(f.parent / "checkpoint-2"), rows_of(f)),
    "of another rank": lambda f: shutil.copy(rows_of(f), rows_of(f, 1)),
    "a folder": lambda f: (rows_of(f).unlink(), rows_of(f).mkdir()),
    "a pickle": lambda f: rows_of(f).write_bytes(pickle.dumps(Bomb())),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_files_other_than_those_saved_are_refused_by_name(saved, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.read_state(saved, {}, ALONE)["step"] == 4
    DAMAGE[case](saved)
    with pytest.raises(ValueError, match=r"checkpoint-4.*rank-0000\d-of-00002.*remove this checkpoint"):
        train.read_state(saved, {}, ALONE)
    assert not Path("unpickled").exists()


def test_any_flipped_bit_of_the_state_is_noticed(saved):
    path, good = saved / train.STATE, train.read_state(saved, {}, ALONE)
    content = path.read_bytes()
    for place in range(0, len(content), 3):
        spoilt = bytearray(content)
        spoilt[place] ^= 1 << place % 8
        path.write_bytes(spoilt)
        try:
            assert train.read_state(saved, {}, ALONE) == good  # 1e-05 became 1E-05
        except ValueError as error:
            assert train.STATE in str(error)


def test_a_checkpoint_renamed_to_another_step_is_refused(saved):
    renamed = saved.rename(saved.with_name("checkpoint-6"))
    with pytest.raises(ValueError, match=f"{renamed / train.STATE}: of step 4, in the folder of another one"):
        train.read_state(renamed, {}, ALONE)


FORGERIES = {
    **{name: [None, "4", -1, 4.0, True, [4], 10**30]
       for name in ("step", "tokens", "steps", "rows_a_step", "evaluated")},
    "best_eval": [7, [], {}, {"step": 2}, {"step": 2, "eval_loss": "1.5"}, {"step": "2", "eval_loss": 1.5}],
    "settings": [None, 7, [], "x"],
    "files": [None, 7, [], "x", {"../other/rank-00000-of-00002.safetensors": [1, 1]}, {"a.safetensors": [1, 1]}],
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_state_that_was_edited_and_has_the_right_checksum_is_one_message(saved, name):
    good = json.loads((saved / train.STATE).read_text())
    forged = [good | {name: value} for value in FORGERIES[name]]
    if name not in ("evaluated", "best_eval"):  # older versions did not write one, a run may have no other
        forged.append({key: value for key, value in good.items() if key != name})
    for state in forged:
        (saved / train.STATE).write_text(json.dumps(train.data.with_checksum(state)))
        words = f"{saved / train.STATE}: {name} is .*, expected .*remove this checkpoint"
        with pytest.raises(ValueError, match=words):
            train.read_state(saved, {}, ALONE)


@pytest.mark.parametrize("tensor, files, words", [
    (torch.zeros(4, 2), [{"a:0": (2, 3)}, {"a:2": (2, 3)}], r"a:0: F32 \[2, 3\], but this run has F32 \[4, 2\]"),
    # [2, 1] and [2] would be repeated to [2, 3] without a word
    (torch.zeros(4, 3), [{"a:0": (2, 1)}, {"a:2": (2, 1)}], r"a:0: F32 \[2, 1\], but this run has F32 \[4, 3\]"),
    (torch.zeros(4, 3), [{"a:0": (4,)}], r"a:0: F32 \[4\], but this run has F32 \[4, 3\]"),
    (torch.zeros(4, 3, dtype=torch.bfloat16), [{"a:0": (4, 3)}], r"a:0: F32 \[4, 3\], but this run has BF16"),
    (torch.zeros(4, 3), [{"a:0": (5, 3)}], r"a:0: F32 \[5, 3\], but this run has F32 \[4, 3\]"),
    (torch.zeros(4, 3), [{"a:0": (2, 3)}, {"a:3": (2, 3)}], r"a:3: F32 \[2, 3\], but this run has F32 \[4, 3\]"),
    (torch.zeros(()), [{"a:0": (2,)}], r"a:0: F32 \[2\], but this run has F32 \[1\]"),
    (torch.zeros(4, 3), [{"a:-1": (4, 3)}], "a:-1: this run trains no such tensor"),
    # as many rows as there should be, but the last two are missing
    (torch.zeros(4, 3), [{"a:0": (2, 3)}, {"a:0": (2, 3)}], "missing or stored twice: a"),
    (torch.zeros(4, 3), [{"a:0": (2, 3)}], "missing or stored twice: a"),
    (torch.zeros(4, 3), [{"a:0": (4, 3)}, {"a:0": (4, 3)}], "missing or stored twice: a"),
    (torch.zeros(4, 3), [{"a:0": (4, 3), "b:0": (1,)}], "b:0: this run trains no such tensor"),
])
def test_tensors_other_than_those_of_the_run_are_refused_by_name(tmp_path, tensor, files, words):
    names = [f"{number}.safetensors" for number in range(len(files))]
    for name, shapes in zip(names, files):
        train.write_rows(tmp_path / name, {key: torch.ones(shape) for key, shape in shapes.items()})
    with pytest.raises(ValueError, match=words + ".*remove this checkpoint"):
        train.load_checkpoint(tmp_path, names, {"a": tensor})


def test_a_damaged_checkpoint_ends_with_one_message_and_the_older_one_continues(job, saved, undisturbed):
    flip(rows_of(saved, 1))  # the part that rank 1 reads
    _, said, codes = run_ranks(WORLD, [*job, "--resume"], saved.parent)
    assert codes == [1, 1] and "Traceback" not in said, said
    (message,) = re.findall("^train.py: error: (.*)$", said, re.M)
    assert str(rows_of(saved, 1)) in message and "remove this checkpoint" in message
    shutil.rmtree(saved)
    (saved.parent / "metrics.jsonl").write_text((undisturbed / "metrics.jsonl").read_text())
    # What the save did not write is not read: a copy of good rows, which would be stored twice, and no safetensors.
    older = saved.with_name("checkpoint-2")
    shutil.copy(rows_of(older), rows_of(older, 7))
    (older / "notes.safetensors").write_text("mine")
    assert_resumes(job, saved.parent, undisturbed)
    assert (older / "notes.safetensors").read_text() == "mine"


# ---------------------------------------------------------------- disks that fail


def full(argv, *names):
    """train.py on a disk that is full for files whose path contains one of these names."""
    def on_disk(path, *args, original=open, **kwargs):
        return original("/dev/full" if any(name in str(path) for name in names) else path, *args, **kwargs)

    builtins.open = io.open = on_disk
    return train_main(argv)


def test_a_save_that_fails_costs_that_save_only_and_names_what_was_not_written(job, undisturbed, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "checkpoint-5").write_text("in the way")  # where the rename of step 5 wants to go: it is replaced
    said, codes = start(full, [*job, "--save_every", 1], out, "2.part/rank-00001", f"4.part/{train.STATE}")
    said = "".join(said)
    assert codes == [0] * WORLD and "Traceback" not in said, said
    reports = dict(re.findall(r"^checkpoint-(\d) was NOT written: (.*)\. Older checkpoints are intact", said, re.M))
    assert reports.keys() == {"2", "4"}, said
    assert f"rank 1: {out}/checkpoint-2.part/rank-00001" in reports["2"] and "No space left" in reports["2"]
    assert f"{out}/checkpoint-4.part/{train.STATE}" in reports["4"] and "No space left" in reports["4"]
    assert steps_of(out) == [1, 3, 5, 6] and not list(out.glob("*.part"))
    assert all(same(out / f"checkpoint-{step}", undisturbed / f"checkpoint-{step}") for step in steps_of(out))
    assert same(out / "final", undisturbed / "final")


def test_a_result_that_cannot_be_written_is_named_and_loses_no_checkpoint(job, undisturbed, tmp_path):
    out = tmp_path / "run"
    said, codes = start(full, [*job, "--save_every", 6], out, "final.part/model")
    assert codes == [1] * WORLD
    (message,) = re.findall("^train.py: error: (.*)$", "".join(said), re.M)
    assert f"{out}/final.part/model.safetensors" in message and "No space left" in message
    assert same(out / "checkpoint-6", undisturbed / "checkpoint-6") and not (out / "final").exists()


def test_a_disk_that_is_full_at_the_start_is_named(job, tmp_path):
    said, codes = start(full, job, tmp_path / "run", "args.json")
    assert codes == [1] * WORLD
    assert "Traceback" not in "".join(said)
    assert said[0].endswith(f"error: {tmp_path}/run/args.json: file not written: No space left on device\n")


def test_a_merge_that_fails_prints_its_message_alone(job, tmp_path):
    out = tmp_path / "run"
    said, codes = start(full, [*job, "--lora", "--merge"], out, "merged.part/model")
    assert codes == [1, 0] and "Traceback" not in "".join(said), said
    (message,) = re.findall("^train.py: error: (.*)$", "".join(said), re.M)
    assert f"{out}/final is complete" in message and "No space left" in message and (out / "final").exists()


def test_a_slow_save_is_no_hang(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(train.faulthandler, "cancel_dump_traceback_later", lambda: calls.append("not watched"))
    monkeypatch.setattr(train, "write_rows", lambda path, rows: calls.append("written") or [1, 1])
    ranks = SimpleNamespace(rank=0, world=1, gather=lambda value: [value], say=calls.append)
    train.Saver(tmp_path, 1, ranks).save({"a": torch.ones(1)}, state_of(1))
    assert calls[0] == "not watched" and "written" in calls and steps_of(tmp_path) == [1]


# ---------------------------------------------------------------- hangs


def stops(argv, pid_file):
    """train.py whose rank 1 is stopped, as by a debugger, when step 4 begins."""
    alive, steps = train.Ranks.alive, []

    def call(self):
        steps.append(None)
        if len(steps) == 4:
            self.timeout = 3
            if self.rank == 1:
                pid_file.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
        alive(self)

    train.Ranks.alive = call
    return train_main(argv)


def test_a_stopped_rank_ends_the_job_and_the_others_say_where_they_wait(job, tmp_path):
    def kill():  # as torchrun does when a rank has ended
        while not log.exists() or "Timeout (" not in log.read_text():
            time.sleep(0.1)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    log = tmp_path / "run-rank0.log"
    threading.Thread(target=kill, daemon=True).start()
    said, codes = start(stops, [*job, "--save_every", 2], tmp_path / "run", tmp_path / "pid")
    assert codes == [1, -signal.SIGKILL], said
    assert "train.py" in said[0].partition("Timeout (0:00:03)!")[2] and steps_of(tmp_path / "run") == [2]


PATIENCE_S = 3  # of the ranks with one that is stuck; --timeout's default makes it an hour


def stop_process(pid_file):
    (watch,) = (thread for thread in threading.enumerate() if isinstance(thread, train.Watch))
    watch.report()
    time.sleep(2 * watch.pause)  # the others read that report: once rank 0 is stopped, its store tells nothing
    pid_file.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def read_from_a_dead_disk(_):
    reading, _writing = os.pipe()
    os.read(reading, 1)  # nobody writes: the thread waits as for a disk, and other threads run on


def load_slowly(_):
    """Longer than the others' patience, but a bit is always done."""
    started = time.monotonic()
    while time.monotonic() < started + 1.3 * PATIENCE_S:
        sum(range(10_000))
        time.sleep(PATIENCE_S / 30)


def with_stuck_rank(argv, pid_file, *disturbances):
    """train.py with disturbances (rank, function's name, what that rank does before its first call of it)."""
    start_watch = train.Watch.__init__
    train.Watch.__init__ = lambda self, ranks, _: start_watch(self, ranks, PATIENCE_S)
    for rank, name, disturb in disturbances:
        if int(os.environ["RANK"]) == rank:
            disturb_once(*name.split("."), disturb, pid_file)
    return train_main(argv)


def disturb_once(module, name, disturb, pid_file):
    module = globals()[module]
    original = getattr(module, name)

    def call(*args, **kwargs):
        setattr(module, name, original)
        disturb(pid_file)
        return original(*args, **kwargs)

    setattr(module, name, call)


# what is done to which rank where; which one is stuck then, and where it was seen last
STUCK = {
    "stopped in loading": ([(1, "data.stacked_rows", stop_process)], 1, "main > load_weights_ (data.py:"),
    "slow in loading, stopped in a save": (
        [(1, "data.stacked_rows", load_slowly), (0, "train.write_rows", stop_process)],
        0, "main > save > save > write (train.py:"),
    "a stuck disk in the export": ([(0, "data.save_model", read_from_a_dead_disk)], 0, "main > export (data.py:"),
}


def run_with_stuck_rank(job, folder, disturbances):
    """What the ranks of a run said, and their exit codes. A stopped rank is killed when another one has ended."""
    def kill():
        while "no progress" not in "".join(log.read_text() for log in logs if log.exists()):
            time.sleep(0.1)
        if pid_file.exists():
            os.kill(int(pid_file.read_text()), signal.SIGKILL)

    folder.mkdir()
    pid_file = folder / "pid"
    logs = [folder / f"run-rank{rank}.log" for rank in range(WORLD)]
    threading.Thread(target=kill, daemon=True).start()
    argv = [*job, "--steps", 2, "--save_every", 2]
    return start(with_stuck_rank, argv, folder / "run", pid_file, *disturbances)


def test_a_rank_without_progress_is_named_with_its_place_and_ends_the_job(job, tmp_path):
    with ThreadPoolExecutor() as pool:  # all at once: they mostly wait
        runs = {case: pool.submit(run_with_stuck_rank, job, tmp_path / case, disturbances)
                for case, (disturbances, _, _) in STUCK.items()}
    for case, (_, stuck, place) in STUCK.items():
        said, codes = runs[case].result()
        assert codes[1 - stuck] == 1 and codes[stuck] in (1, -signal.SIGKILL), said
        (message,) = re.findall("^train.py: error: (.*)$", "".join(said), re.M)
        who = f"rank {stuck} ({os.uname().nodename})"
        assert message.startswith(f"{who} has made no progress for {PATIENCE_S} s; last seen in {place}"), said


# ---------------------------------------------------------------- signals


def signalled(argv, number, moment):
    """train.py whose rank 1 alone gets a signal: in the data of step 4, in the save of step 3, in the first batch of
    the second or third evaluation; or rank 0 alone, in the sample after training."""
    evaluations = []

    def send(rank=1):
        if int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), number)

    def ahead(self, *args, original=data.Loader.ahead, **kwargs):
        for step, made in enumerate(original(self, *args, **kwargs), 1):
            if moment == "data" and step == 4:
                send()
            yield made

    def once(self, original=data.Loader.once):
        evaluation = f"evaluation {len(evaluations) + 1}"
        evaluations.append(evaluation)
        for i, batch in enumerate(original(self)):
            print(f"batch {i} of {evaluation}", flush=True)
            yield batch
            if moment == evaluation and i == 0:  # the model has seen this batch
                send()

    def write_rows(path, rows, original=train.write_rows):
        if moment == "save" and "checkpoint-3" in str(path):
            send()
        return original(path, rows)

    def generate(*args, original=lm.generate):
        for token in original(*args):
            if moment == "sample" and len(evaluations) == 3:  # there is a sample before training, too
                send(rank=0)
            yield token

    data.Loader.ahead, data.Loader.once, train.write_rows, lm.generate = ahead, once, write_rows, generate
    return train_main(argv)


@pytest.mark.parametrize("number, moment, flags", [
    (signal.SIGTERM, "evaluation 2", "--save_every 0"), (signal.SIGINT, "data", "--save_every 3"),
    (signal.SIGUSR1, "save", "--save_every 3"),
    (signal.SIGHUP, "data", "--save_every 0"),
], ids=str)
def test_a_signal_to_one_rank_saves_on_all_and_resume_completes(job, undisturbed, tmp_path, number, moment, flags):
    out, argv = tmp_path / "run", [*evaluated(job), *flags.split()]
    said, codes = start(signalled, argv, out, number, moment)
    said = "".join(said)
    assert codes == [128 + number] * WORLD, said
    assert f"stopped by {number.name} after step 4 of {STEPS}, saved: the same command with --resume {out} " in said
    assert said.count("stopped by") == 1 and "Traceback" not in said
    # Of the evaluation of step 4, all ranks see the first batch, fetch the second one and stop before it.
    n_batches = {f"batch {i} of evaluation 2": said.count(f"batch {i} of evaluation 2") for i in range(3)}
    assert list(n_batches.values()) == ([WORLD, WORLD, 0] if moment == "evaluation 2" else [0, 0, 0])
    assert same(out / "checkpoint-4", undisturbed / "checkpoint-4") and not (out / "final").exists()
    assert not list(out.glob("*.part"))
    assert_same_evaluations(assert_resumes(argv, out, undisturbed), out, undisturbed)


def assert_same_evaluations(rows, out, undisturbed):
    """The evaluations of a run that went on, one that was cut among them, are the undisturbed run's, to the bit."""
    expected = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    expected = [row for row in expected if "eval_loss" in row]
    assert [row["step"] for row in expected] == [2, 4, STEPS]
    assert [row for row in rows if "eval_loss" in row] == expected
    ends = [train.read_state(run / f"checkpoint-{STEPS}", {}, ALONE) for run in (out, undisturbed)
            if (run / f"checkpoint-{STEPS}").exists()]
    assert all(end["best_eval"] == ends[-1]["best_eval"] and end["evaluated"] == STEPS for end in ends)


def test_a_rank_that_dies_in_an_evaluation_costs_nothing_that_was_due_to_be_saved(job, undisturbed, tmp_path):
    out, argv = tmp_path / "run", [*evaluated(job), "--save_every", 4]
    said, codes = start(signalled, argv, out, signal.SIGKILL, "evaluation 2")
    assert codes == [1, -signal.SIGKILL], said
    assert steps_of(out) == [4] and same(out / "checkpoint-4", undisturbed / "checkpoint-4")
    assert_same_evaluations(assert_resumes(argv, out, undisturbed), out, undisturbed)


def test_a_signal_in_the_last_evaluation_ends_it_and_the_result_is_complete(job, undisturbed, tmp_path):
    out, argv = tmp_path / "run", [*evaluated(job), "--save_every", 6]
    said, codes = start(signalled, argv, out, signal.SIGTERM, "evaluation 3")
    said = "".join(said)
    assert codes == [128 + signal.SIGTERM] * WORLD and "Traceback" not in said, said
    assert f"stopped by SIGTERM after step {STEPS} of {STEPS}, saved" in said and "batch 2 of evaluation 3" not in said
    assert same(out / "final", undisturbed / "final")
    assert_same_evaluations(assert_resumes(argv, out, undisturbed), out, undisturbed)


def test_a_signal_after_the_result_ends_the_run_at_once(job, undisturbed, tmp_path):
    out = tmp_path / "run"
    argv = [*evaluated(job), "--save_every", 6, "--sample", "def f(x):", "--max_new_tokens", 99]
    said, codes = start(signalled, argv, out, signal.SIGTERM, "sample")
    assert codes == [130, 1] and "Traceback" not in "".join(said), said
    assert re.findall("^train.py: error: (.*)", "".join(said), re.M) == [f"interrupted, {out}/final is complete"]
    assert same(out / "final", undisturbed / "final") and steps_of(out) == [6]


def test_a_rank_that_dies_in_a_save_ends_the_run_and_costs_that_save_only(job, undisturbed, tmp_path):
    out = tmp_path / "run"
    said, codes = start(signalled, [*job, "--save_every", 1], out, signal.SIGKILL, "save")
    assert codes == [1, -signal.SIGKILL], said
    assert steps_of(out) == [1, 2] and same(out / "checkpoint-2", undisturbed / "checkpoint-2")
    (message,) = re.findall("^train.py: error: (.*)", "".join(said), re.M)
    assert "another rank has ended, while this one was at step 3, checkpoint" in message
    assert "Connection" in message and "Traceback" not in "".join(said)
    assert_resumes(job, out, undisturbed)


def early(argv, name, number):
    """train.py whose last rank gets a signal where it calls this function of data.py."""
    original = getattr(data, name)

    def call(*args, **kwargs):
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            signal.raise_signal(number)
        return original(*args, **kwargs)

    setattr(data, name, call)
    return train_main(argv)


@pytest.mark.parametrize("name, number", [
    ("check_weights", signal.SIGUSR1), ("tokenized", signal.SIGTERM), ("load_weights_", signal.SIGHUP)])
def test_a_signal_before_the_first_step_says_that_nothing_is_saved(job, tmp_path, name, number):
    log = tmp_path / "log"
    codes = start_ranks(1, early, ([*job, "--out", str(tmp_path / "run")], name, number), [log])
    said = log.read_text()
    assert codes == [130] and said.endswith("train.py: error: interrupted, nothing saved\n"), said
    assert "Traceback" not in said and said.count("error") == 1 and not (tmp_path / "run").exists()


def test_an_interrupt_during_the_imports_leaves_no_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = subprocess.run([sys.executable, HERE.parent / "train.py"], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == -signal.SIGINT and done.stderr == ""


def test_a_signal_to_one_rank_before_the_first_step_ends_all_with_one_message(job, tmp_path):
    logs = [tmp_path / f"log{rank}" for rank in range(3)]
    codes = start_ranks(3, early, ([*job, "--out", str(tmp_path / "run")], "load_weights_", signal.SIGTERM), logs)
    said = "".join(log.read_text() for log in logs)
    assert codes == [1, 1, 130] and "Traceback" not in said, said
    (message,) = re.findall("^train.py: error: (.*)", said, re.M)
    assert message.startswith("another rank has ended, while this one was at step 0")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def handlers():
    """Signal handlers as they were, after the test."""
    before = {number: signal.getsignal(number)
              for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_interrupt_ends_a_single_process_at_once(monkeypatch, handlers):
    monkeypatch.delenv("RANK", raising=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stop = train.StopSignal()
    stop.begin()
    signal.raise_signal(signal.SIGINT)
    assert stop.number == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_run_under_nohup_outlives_its_terminal(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = train.StopSignal()
    stop.begin()
    signal.raise_signal(signal.SIGHUP)
    assert stop.number == 0


# ---------------------------------------------------------------- gradients that are too large or not finite


def check_dominant_gradient(ranks, folder, flags):
    """A row of the embedding, then a whole matrix, has nearly all of the gradient: all ranks together say so."""
    args = train.parse_args(["--clip", "2"])
    model, _ = build(*flags, ranks=ranks)
    tokenizer = data.Tokenizer(HERE / "tiny")
    tokens = torch.arange(100)[None]
    model(tokens, tokens).backward()
    parameters = dict(model.named_parameters())
    trained = list(parameters.values())

    def note():
        with contextlib.redirect_stdout(io.StringIO()) as said:
            train.note_dominant_gradient(model, train.clip_gradients_(trained, 0.0), args, tokenizer, ranks)
        return said.getvalue()

    def scale(name, row, factor):
        rows, first = nf4.local(parameters[name].grad)
        rows[max(0, row - first) : max(0, row - first + 1)] *= factor  # of the rank that has this row

    assert not note()  # as usual, not worth a word
    scale("model.embed_tokens.weight", 77, 1e6)
    token = repr(tokenizer.core.id_to_token(77))
    expected = f"100 % of it is of model.embed_tokens.weight, row 77 (token {token})\n"
    assert note().endswith(expected) == (ranks.rank == 0)
    nf4.local(parameters["model.layers.1.mlp.up_proj.weight"].grad)[0].mul_(1e9)
    expected = "100 % of it is of model.layers.1.mlp.up_proj.weight\n"  # and of none of its rows
    assert note().endswith(expected) == (ranks.rank == 0)
    scale("model.norm.weight", 63, math.inf)
    assert not note()  # main's next look at the numbers ends the run


@pytest.mark.parametrize("flags", [[], ["--fsdp2"]], ids=str)
def test_what_clips_the_first_gradient_to_nothing_is_named(tmp_path, flags):
    on_ranks(2, check_dominant_gradient, tmp_path, flags)


def not_finite(argv, what):
    """train.py in which the documents of rank 1 at step 3 make a loss or a gradient that is not finite; `row`: the
    gradient of a token's embedding alone. At the end each rank says where its documents of that step are, and writes
    its rows of the weights."""
    mark = 4095  # a token of no document
    step, forward, end = data.Loader.step, lm.Transformer.forward, train.end_not_finite

    def marked_step(self, number, grad_accum):
        batches, counted = step(self, number, grad_accum)
        if self.rank == 1 and number == 2:
            batches[0].tokens[:] = mark
        return batches, counted

    def hook_embedding(module, inputs, x):
        if x.requires_grad and (inputs[0] == mark).all():
            x.register_hook(lambda grad: grad * torch.inf)

    def bad_forward(self, tokens_BT, *args):
        if what == "row" and not hasattr(self, "is_hooked"):
            self.is_hooked = self.model.embed_tokens.register_forward_hook(hook_embedding)
        loss = forward(self, tokens_BT, *args)
        if (tokens_BT == mark).all() and what == "loss":
            loss = loss * torch.nan
        elif (tokens_BT == mark).all() and what == "gradient" and loss.requires_grad:
            loss.register_hook(lambda grad: grad * torch.inf)
        return loss

    def end_not_finite(model, loader, number, args, ranks, *others):
        rows = train.rows_of_rank({name: p.detach() for name, p in model.named_parameters()}, ranks.rank)
        save_file(rows, f"{args.out}/end-{ranks.rank}.safetensors")
        print("documents: " + ", ".join(loader.places(2, 1)))
        end(model, loader, number, args, ranks, *others)

    data.Loader.step, lm.Transformer.forward, train.end_not_finite = marked_step, bad_forward, end_not_finite
    return train_main(argv)


@pytest.mark.parametrize("what, flags", [
    ("loss", "--fsdp2 --clip 1e-5"), ("loss", "--no-fused_adamw"), ("loss", "--optim_in_backward"),
    ("gradient", "--fsdp2 --optim adamw8bit"), ("gradient", "--lora --precision bf16 --stochastic_rounding"),
    ("gradient", "--fsdp2 --optim_in_backward"), ("row", "--fsdp2"),
])
def test_a_number_that_is_not_finite_ends_the_run_before_a_weight_changes(job, tmp_path, what, flags):
    argv = [*job[:-1], "--save_every", 2, "--log_every", 4, *flags.split()]  # found at step 4, which is logged
    said, codes = start(not_finite, argv, tmp_path / "run", what)
    assert codes == [train.NOT_FINITE] * WORLD, said
    trained, left = ({key: rows for path in (tmp_path / "run").glob(pattern) for key, rows in load_file(path).items()}
                     for pattern in ("checkpoint-2/*.safetensors", "end-*.safetensors"))
    common = trained.keys() & left.keys()
    assert common and all(torch.equal(trained[key], left[key]) for key in common)
    assert "error: step 3: not finite: " in said[0] and "".join(said).count("not finite") == 1
    # The tensor is named by computing the step again. From an inf behind the loss on, no gradient is finite.
    culprit = {
        "loss": "the loss; ",
        "gradient": r"(\d+) of \1 gradients, first that of (lm_head|model\.\S+lora_B)\.weight",
        "row": r"1 of \d+ gradients, first that of model\.embed_tokens\.weight, row 4095 \(token '.+'\); ",
    }
    assert re.search(f"not finite: {culprit[what]}", said[0]), said[0]
    # --clip 1e-5 is the one that leaves next to nothing of the first gradient
    assert said[0].count("note: step 1: the gradient norm") == flags.count("--clip")
    for rank in range(WORLD):
        (places,) = re.findall(r"documents: (.*)", said[rank])
        assert re.fullmatch(r"\S+/chats\.jsonl:\d+(, \S+/chats\.jsonl:\d+)*", places)
        assert f"\n  rank {rank}: {places}\n" in said[0]
    assert steps_of(tmp_path / "run") == [2] and not (tmp_path / "run/final").exists()
