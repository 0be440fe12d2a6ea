"""What must not lose a run: checkpoints that were tampered with, disks that fail, ranks that die or hang, and signals."""

import errno
import json
import os
import pickle
import re
import shutil
import signal
import time
import traceback
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import SHAPE, run_ranks, start_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import data
import model as lm
import train

FAULTS = {  # phase of a save: the error it meets there
    "room": None, "folder": errno.EIO, "open": errno.ENOSPC, "write": errno.ENOSPC, "shard fsync": errno.EIO,
    "close": errno.EIO, "state": errno.ENOSPC, "state fsync": errno.EIO, "rename": errno.EIO,
}
OF_EVERY_RANK = {"open", "write", "shard fsync", "close", "bug"}  # the last one fails; the rest is rank 0's work
FAILING = {2 * place + 2: phase for place, phase in enumerate(FAULTS)}  # step of the save; those between succeed
STEPS = 2 * len(FAULTS) + 1
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
STATE = "trainer_state.json"


@pytest.fixture(scope="module")
def job(folder, chats, tmp_path_factory):
    path = tmp_path_factory.mktemp("small")
    for file in folder.iterdir():
        shutil.copy(file, path)
    (path / "config.json").write_text(json.dumps(SHAPE | SMALL))
    return [str(arg) for arg in ("--model", path, "--random_init", "--precision", "fp32", "--data", chats, "--seq_len", 64,
                                 "--steps", STEPS, "--lr", "1e-2", "--log_every", 1, "--keep", 99, "--sample", "")]


def split(world):
    return ["--batch_size", str(2 // world), *["--fsdp2"] * (world > 1)]


def start(world, function, argv, out, *args):
    """function(argv, *args) on `world` ranks -> (what each said, their exit codes)."""
    logs = [out.parent / f"{out.name}-rank{rank}.log" for rank in range(world)]
    codes = start_ranks(world, function, ([*map(str, argv), "--out", str(out)], *args), logs, timeout=60)
    return [log.read_text() for log in logs], codes


@pytest.fixture(scope="module")
def undisturbed(job, tmp_path_factory):
    """{ranks: folder of a run with a checkpoint after every step}"""
    outs = {}
    for world in (1, 2):
        outs[world] = tmp_path_factory.mktemp("undisturbed") / "run"
        _, text, codes = run_ranks(world, [*job, *split(world), "--save_every", 1], outs[world])
        assert codes == [0] * world, text
    return outs


def same_tensors(one, other):
    """Whether two safetensors files hold the same, bit for bit."""
    one, other = load_file(one), load_file(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same_checkpoint(one, other):
    """Whether two checkpoints are complete and hold the same."""
    files, others = (train.read_state(folder, 0, 1)["files"] for folder in (one, other))
    return files.keys() == others.keys() and all(same_tensors(one / file, other / file) for file in files)


def same_result(out, other):
    return same_tensors(out / "final/model.safetensors", other / "final/model.safetensors")


# ---------------------------------------------------------------- hostile checkpoints


@pytest.fixture(scope="module")
def wanted(job):
    """What training_tensors() gives for the model of `job`, on one rank."""
    model = lm.Transformer(lm.parse_config(SHAPE | SMALL))
    return train.training_tensors(model, train.make_optimizer(list(model.parameters()), 0.0, 0.0, True))


@pytest.fixture
def saved(undisturbed, tmp_path):
    """A run's folder with good checkpoints of two ranks, 2 and 4, to be spoilt."""
    for step in (2, 4):
        shutil.copytree(undisturbed[2] / f"checkpoint-{step}", tmp_path / f"run/checkpoint-{step}")
    return tmp_path / "run/checkpoint-4"


def check(folder, wanted):
    train.check_tensors(folder, train.read_state(folder, 0, 1), wanted, train.generator_states(0, torch.device("cpu")))


def shard(folder, rank=0):
    return folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"


def edit(change):
    """A change of the object in trainer_state.json."""
    def spoil(folder):
        state = json.loads((folder / STATE).read_text())
        change(state)
        (folder / STATE).write_text(json.dumps(state))
    return spoil


def rewrite(change, holding="random.1.cpu"):
    """A change of {name: tensor} and {name: {"saved_offsets": ...}} of the shard that holds a tensor, rank 1's if it is not
    said, with its size and checksum put right. change returns None, or other text for the sharding, "" for none."""
    def spoil(folder):
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as reader:
                metadata = reader.metadata()
            if holding in (tensors := load_file(path)):
                break
        places = json.loads(metadata.pop("DCP_SHARDING_INFO"))
        if sharding := json.dumps(places) if (text := change(tensors, places)) is None else text:
            metadata["DCP_SHARDING_INFO"] = sharding
        save_file(tensors, path, metadata)
        put_right(path)
    return spoil


def put_right(path):
    """Writes a spoilt shard's size and checksum to trainer_state.json."""
    edit(lambda state: state["files"].update({path.name: [path.stat().st_size, data.crc_of(path)]}))(path.parent)


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def bomb(folder):
    return pickle.dumps(Bomb(folder.parent / "unpickled"))


def zip_over(path, content):
    path.unlink()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)


def move_and_link(path):
    target = path.parent.parent / f"true-{path.name}"
    path.rename(target)
    path.symlink_to(target)


def swap(folder):
    one, other = shard(folder, 0), shard(folder, 1)
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def files_entry(name, entry):
    return edit(lambda state: state["files"].update({name: entry}))


FIRST, SECOND = "shard-00001-model", "shard-00002-model"
FOREIGN = {
    "an extra .metadata": (lambda f: (f / ".metadata").write_bytes(bomb(f)), r"\.metadata"),
    "an extra rng.pth": (lambda f: (f / "rng.pth").write_bytes(bomb(f)), r"rng\.pth"),
    "an extra optimizer.pt": (lambda f: (f / "optimizer.pt").write_bytes(bomb(f)), r"optimizer\.pt"),
    "an extra folder": (lambda f: (f / "more").mkdir(), "more"),
    "an extra shard": (lambda f: shutil.copy(shard(f), shard(f, 2)), "shard-00003"),
    "a pickle for a shard": (lambda f: shard(f).write_bytes(bomb(f)), FIRST),
    "a pickle for a shard, with its checksum": (lambda f: (shard(f).write_bytes(bomb(f)), put_right(shard(f))), FIRST),
    "a zip for a shard": (lambda f: zip_over(shard(f), bomb(f)), FIRST),
    "a linked shard": (lambda f: move_and_link(shard(f, 1)), SECOND),
    "a linked state": (lambda f: move_and_link(f / STATE), STATE),
    "a pipe for a shard": (lambda f: pipe(shard(f, 1)), SECOND),
    "a folder for a shard": (lambda f: (shard(f).unlink(), shard(f).mkdir()), FIRST),
    "a file of the parent": (files_entry("../x", [1, 1]), r"\.\./x"),
    "a file in a parent, by a shard's name": (files_entry("../checkpoint-2/" + shard(Path()).name, [1, 1]), "checkpoint-2"),
    "an absolute path": (files_entry("/etc/passwd", [1, 1]), "/etc/passwd"),
    "a name with a line end": (files_entry(shard(Path()).name + "\n", [1, 1]), FIRST),
    "an entry of one number": (files_entry(shard(Path()).name, [1]), FIRST),
    "an entry of text": (files_entry(shard(Path()).name, ["1", "1"]), FIRST),
    "an entry of booleans": (files_entry(shard(Path()).name, [True, True]), FIRST),
    "an entry of fractions": (files_entry(shard(Path()).name, [1.0, 1.0]), FIRST),
    "no entry of a shard": (edit(lambda s: s["files"].popitem()), SECOND),
    "no files": (edit(lambda s: s["files"].clear()), FIRST),
    "files in a list": (edit(lambda s: s.update(files=list(s["files"]))), "files"),
    "shards of two ranks swapped": (swap, FIRST),
    "a shard of another step": (lambda f: shutil.copy(shard(f.parent / "checkpoint-2"), shard(f)), FIRST),
    "a truncated shard": (lambda f: os.truncate(shard(f), 100_000), FIRST),
    "a flipped bit": (lambda f: flip(shard(f, 1)), SECOND),
    "an empty shard": (lambda f: os.truncate(shard(f), 0), FIRST),
    "a missing shard": (lambda f: shard(f, 1).unlink(), SECOND),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_files_other_than_those_saved_are_refused_by_name(saved, wanted, case):
    spoil, named = FOREIGN[case]
    spoil(saved)
    with pytest.raises(ValueError, match=named):
        check(saved, wanted)
    assert not (saved.parent / "unpickled").exists()


def test_the_checkpoint_that_the_cases_spoil_is_a_good_one(saved, wanted):
    rewrite(lambda *_: None)(saved)  # the helper itself spoils nothing
    check(saved, wanted)


EMBEDDING, MOMENT = "model.model.embed_tokens.weight", "optimizer.model.norm.weight.exp_avg"
STEP = "optimizer.lm_head.weight.step"  # a number, in one shard only


def add(name, tensor, offsets):
    def change(tensors, places):
        tensors[name], places[name] = tensor, {"saved_offsets": offsets}
    return change


def drop(name):
    def change(tensors, _):
        del tensors[name]
    return change


def become(name, other):
    def change(tensors, _):
        tensors[name] = other(tensors[name])
    return change


def add_other_step(folder):
    """Another value of a number, in the shard that does not hold it."""
    (path,) = [path for path in folder.glob("*.safetensors") if STEP not in load_file(path)]
    holding = next(name for name in load_file(path) if name.startswith("random."))
    rewrite(add(STEP, torch.tensor(99.0), []), holding)(folder)


HEADERS = {
    "another shape": (rewrite(become(EMBEDDING, lambda x: x[:, :-1].contiguous())), EMBEDDING),
    "another rank": (rewrite(become(EMBEDDING, torch.flatten)), EMBEDDING),
    "another number of rows": (rewrite(become(EMBEDDING, lambda x: x[:-1])), EMBEDDING),
    "another dtype": (rewrite(become(MOMENT, torch.Tensor.bfloat16)), MOMENT),
    "another dtype of the same width": (rewrite(become(MOMENT, lambda x: x.view(torch.int32))), MOMENT),
    "another dtype of a number": (rewrite(become(STEP, torch.Tensor.double), STEP), STEP),
    "a number that is a row": (rewrite(become(STEP, lambda x: x.repeat(2)), STEP), STEP),
    "a number twice": (add_other_step, STEP),
    "a number less": (rewrite(drop(STEP), STEP), STEP),
    "one tensor more": (rewrite(add("more", torch.zeros(1), [0])), "more"),
    "one tensor less": (rewrite(drop(MOMENT)), MOMENT),
    "no sharding": (rewrite(lambda *_: ""), SECOND),
    "sharding that is no JSON": (rewrite(lambda *_: "{"), SECOND),
    "sharding in a list": (rewrite(lambda *_: "[]"), SECOND),
    "sharding of null": (rewrite(lambda *_: "null"), SECOND),
    "sharding nested 100,000 levels": (rewrite(lambda *_: "[" * 100_000), SECOND),
    "no place of a tensor": (rewrite(lambda _, places: places.pop(EMBEDDING) and None), EMBEDDING),
    "no offsets of a tensor": (rewrite(lambda _, places: places[EMBEDDING].clear()), SECOND),
    "an offset of 5,000 digits": (rewrite(lambda _, places: json.dumps(places).replace("[0", "[" + "9" * 5000)), SECOND),
}
OFFSETS = {
    "overlap": [2047, 0], "gap": [2049, 0], "negative": [-1, 0], "in columns": [2048, 1], "of one number": [2048],
    "of three numbers": [2048, 0, 0], "none": [], "fraction": [2048.0, 0], "fractions": [2048, 0.0], "boolean": [2048, False],
    "nan": [float("nan"), 0], "text": ["2048", 0], "string": "ab", "null": None, "object": {}, "nested": [[2048], 0],
}


@pytest.mark.parametrize("case", HEADERS)
def test_tensors_other_than_those_of_the_run_are_refused_by_name(saved, wanted, case):
    spoil, named = HEADERS[case]
    spoil(saved)
    with pytest.raises(ValueError, match=named):
        check(saved, wanted)


@pytest.mark.parametrize("offsets", OFFSETS)
def test_rows_that_do_not_cover_a_tensor_once_are_refused_by_name(saved, wanted, offsets):
    rewrite(lambda _, places: places[EMBEDDING].update(saved_offsets=OFFSETS[offsets]))(saved)
    with pytest.raises(ValueError, match=f"{EMBEDDING}|{SECOND}"):
        check(saved, wanted)


def put(**values):
    return edit(lambda state: state.update(values))


STATES = {
    "truncated": lambda f: os.truncate(f / STATE, 200),
    "empty": lambda f: os.truncate(f / STATE, 0),
    "not UTF-8": lambda f: (f / STATE).write_bytes(b"\xff\xfe{}"),
    "a list": lambda f: (f / STATE).write_text("[1]"),
    "nested 100,000 levels": lambda f: (f / STATE).write_text("[" * 100_000),
    "nested 100,000 levels inside": lambda f: (f / STATE).write_text('{"settings": ' + '{"a":' * 100_000),
    "a number of 5,000 digits": lambda f: (f / STATE).write_text('{"step": ' + "9" * 5000 + "}"),
    "step: huge": put(step=1 << 70), "step: 0": put(step=0), "step: negative": put(step=-4), "step: boolean": put(step=True),
    "step: fraction": put(step=4.0), "step: NaN": put(step=float("nan")), "step: text": put(step="4"),
    "step: null": put(step=None), "format: unknown": put(format=99), "format: boolean": put(format=True),
    "world: 0": put(world=0), "world: list": put(world=[2]), "tokens: text": put(tokens="1"),
    "first_loss: text": put(first_loss="8"), "settings: null": put(settings=None),
    "settings: list": put(settings=[]), "settings: missing": edit(lambda state: state.pop("settings")),
    "files: missing": edit(lambda state: state.pop("files")), "best_eval: text": put(best_eval="x"),
    "best_eval: missing": edit(lambda state: state.pop("best_eval")), "best_eval: empty": put(best_eval={}),
    "best_eval: of text": put(best_eval={"step": "1", "eval_loss": "2", "eval_tokens": 3}),
}


@pytest.mark.parametrize("case", STATES)
def test_a_malformed_state_is_refused_by_name(saved, case):
    STATES[case](saved)
    with pytest.raises(ValueError, match=STATE):
        train.read_state(saved, 0, 1)


END_TO_END = {
    "pickle": (lambda f: (f / "optimizer.pt").write_bytes(bomb(f)), r"optimizer\.pt"),
    "pipe": (lambda f: pipe(shard(f, 1)), SECOND),
    "bit": (lambda f: flip(shard(f, 1)), SECOND),  # of the part that rank 1 reads
    "nested state": (STATES["nested 100,000 levels"], STATE),
    "generators of zeros": (rewrite(become("random.1.cpu", torch.zeros_like)), r"random\.1"),
}


@pytest.mark.parametrize("case", END_TO_END)
def test_resuming_from_a_spoilt_checkpoint_ends_with_one_message(job, saved, case):
    spoil, named = END_TO_END[case]
    spoil(saved)
    _, said, codes = run_ranks(2, [*job, *split(2), "--save_every", 1, "--resume"], saved.parent)
    assert codes == [1, 1], said
    assert "Traceback" not in said and said.count("train.py: error: ") == 1
    (message,) = [line for line in said.splitlines() if line.startswith("train.py: error: ")]
    assert re.search(named, message) and "remove this checkpoint" in message, message
    assert not (saved.parent / "unpickled").exists() and not (saved.parent / "final").exists()


# ---------------------------------------------------------------- faults while writing


def faulty(argv, failing, act, seen=None):
    """train.main(argv), in which act(phase) is called when the save of a step of `failing` comes to its phase. What lies in
    --out after each save goes to `seen`."""
    rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    due = []  # the phase, until the save has come to it

    def reached(phase):
        if due == [phase]:
            due.clear()
            act(phase)

    def before(owner, name, **phases):  # phase: of which arguments
        original = getattr(owner, name)

        def call(*args, **kwargs):
            for phase, matches in phases.items():
                if matches(args[0]):
                    reached(phase.replace("_", " "))
            return original(*args, **kwargs)

        setattr(owner, name, call)

    def attempt(self, step, *args, original=train.Saver.attempt):
        phase = failing.get(step)
        due[:] = [phase] * (phase is not None and rank == (last if phase in OF_EVERY_RANK else 0))
        original(self, step, *args)
        due.clear()

    def report(self, original=train.Saver.report):
        step = self.step
        original(self)
        if seen and rank == 0:
            with open(seen, "a") as file:
                file.write(json.dumps([step, sorted(os.listdir(self.out))]) + "\n")

    def is_open(ending):
        return lambda handle: os.readlink(f"/proc/self/fd/{handle}").endswith(ending)

    train.Saver.attempt, train.Saver.report = attempt, report
    before(lm, "need_space", room=bool)
    before(Path, "mkdir", folder=lambda path: path.suffix == ".part")
    before(os, "fsync", shard_fsync=is_open(".safetensors"), state_fsync=is_open(STATE), commit_fsync=is_open("run"))
    before(lm.SafetensorsFile, "__init__", open=bool)
    before(lm.SafetensorsFile, "write", write=bool, bug=bool)
    before(lm.SafetensorsFile, "close", close=bool)
    before(Path, "write_text", state=lambda path: path.name == STATE)
    before(Path, "rename", rename=lambda path: path.suffix == ".part")
    before(shutil, "rmtree", rotation=bool)
    try:
        train.main(argv)
    except Exception:
        traceback.print_exc()  # into this rank's log
        raise SystemExit(1) from None


def fail(phase):
    if phase == "room":
        lm.need_space("/", 1 << 60)
    if phase == "bug":
        raise KeyError("a bug")
    error = FAULTS.get(phase, errno.EIO)
    raise OSError(error, os.strerror(error))


@pytest.fixture(scope="module", params=[(1, []), (2, []), (2, ["--async_save"])], ids=["1", "2", "2, async"])
def tried(request, job, undisturbed, tmp_path_factory):
    """-> (ranks, folder of a run in which every second save fails, what it said, {step: what lay in it after that save})"""
    world, flags = request.param
    out = tmp_path_factory.mktemp("tried") / "run"
    argv = [*job, *split(world), "--save_every", 1, *flags]
    said, codes = start(world, faulty, argv, out, FAILING, fail, out.with_suffix(".seen"))
    assert codes == [0] * world, said
    return world, out, "".join(said), dict(map(json.loads, out.with_suffix(".seen").read_text().splitlines()))


@pytest.mark.parametrize("step", FAILING, ids=FAILING.get)
def test_a_save_that_fails_is_reported_once_and_leaves_nothing(tried, undisturbed, step):
    world, out, said, seen = tried
    phase = FAILING[step]
    reason = r"1.07e\+09 GiB to write, [\d.]+ GiB free" if phase == "room" else re.escape(os.strerror(FAULTS[phase]))
    rank = f"rank {world - 1 if phase in OF_EVERY_RANK else 0}: " * (world > 1)
    (line,) = re.findall(f"^checkpoint-{step} was not written: .*$", said, re.M)
    assert re.search(rf"written: {rank}.*{reason}.*\. Older ones are untouched, training goes on$", line), line
    assert f"checkpoint-{step}" not in seen[step] and not [name for name in seen[step] if name.endswith(".part")]
    # the one before it and the next one are those of a run without faults
    for near in (step - 1, step + 1):
        assert f"checkpoint-{near}" in seen[near]
        assert same_checkpoint(out / f"checkpoint-{near}", undisturbed[world] / f"checkpoint-{near}")


def test_saves_that_fail_do_not_change_the_result(tried, undisturbed):
    world, out, said, _ = tried
    assert said.count("was not written") == len(FAILING) and "Traceback" not in said
    assert same_result(out, undisturbed[world])
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines() if "checkpoint_s" in line]
    assert steps == [step for step in range(1, STEPS + 1) if step not in FAILING]


def test_an_old_checkpoint_that_cannot_be_removed_costs_no_save(job, undisturbed, tmp_path):
    out = tmp_path / "run"
    argv = [*job, *split(1), "--save_every", 6, "--keep", 1]
    (said,), codes = start(1, faulty, argv, out, {12: "rotation"}, fail)
    assert codes == [0] and "was not written" not in said and "Traceback" not in said
    assert [step for step, _ in train.checkpoints(out)] == [STEPS]
    assert not list(out.glob("*.part"))  # the next save tries again
    assert same_checkpoint(out / f"checkpoint-{STEPS}", undisturbed[1] / f"checkpoint-{STEPS}")


def test_an_old_checkpoint_that_can_never_be_removed_costs_no_save(job, tmp_path):
    out = tmp_path / "run"
    argv = [*job, *split(1), "--save_every", 6, "--keep", 1]
    (said,), codes = start(1, never_removing, argv, out)
    assert codes == [0] and "was not written" not in said and "Traceback" not in said
    assert [step for step, _ in train.checkpoints(out)] == [STEPS]


def never_removing(argv):
    def rmtree(path, ignore_errors=False, original=shutil.rmtree):
        if "checkpoint-6" not in str(path):
            original(path, ignore_errors)
        elif not ignore_errors:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    shutil.rmtree = rmtree
    train.main(argv)


def test_a_checkpoint_is_said_to_be_written_exactly_if_it_is_there(job, tmp_path):
    out = tmp_path / "run"
    said, codes = start(1, faulty, [*job, *split(1), "--save_every", 6], out, {6: "commit fsync"}, fail)  # after the rename
    assert codes == [0], said
    assert ("checkpoint-6 was not written" in said[0]) != (6 in dict(train.checkpoints(out)))
    assert [step for step, _ in train.checkpoints(out)][-3:] == [12, 18, STEPS]


@pytest.mark.parametrize("flags", [[], ["--async_save"]], ids=["", "async"])
def test_a_bug_in_the_writer_ends_the_run_with_its_traceback(job, tmp_path, flags):
    out = tmp_path / "run"
    said, codes = start(2, faulty, [*job, *split(2), "--save_every", 6, *flags], out, {12: "bug"}, fail)
    assert 0 not in codes and "KeyError: 'a bug'" in "".join(said) and "Traceback" in "".join(said)
    assert [step for step, _ in train.checkpoints(out)] == [6] and not (out / "final").exists()
    assert "checkpoint-12: " not in said[0]  # which is what a save that went well says


# ---------------------------------------------------------------- a rank dies


def die(_):
    os._exit(9)


@pytest.mark.parametrize("phase, flags", [
    ("room", []), ("write", []), ("close", ["--async_save"]), ("state", []), ("rename", ["--async_save"]), ("rotation", []),
], ids=lambda value: " ".join(value) if isinstance(value, list) else value)
def test_a_rank_that_dies_in_a_save_ends_the_run_and_costs_that_save_only(job, undisturbed, tmp_path, phase, flags):
    out, world = tmp_path / "run", 2
    argv = [*job, *split(world), "--save_every", 6, "--timeout", 60]
    began = time.monotonic()
    said, codes = start(world, faulty, [*argv, "--keep", 1, *flags], out, {12: phase}, die)
    assert time.monotonic() - began < 20  # far below --timeout, with room for a busy machine
    dead = world - 1 if phase in OF_EVERY_RANK else 0
    assert codes[dead] == 9 and codes[1 - dead] not in (0, 9, train.HUNG), said
    (step, left), = train.checkpoints(out)  # rotation comes after the new one is in its place
    assert step == (12 if phase == "rotation" else 6)
    assert same_checkpoint(left, undisturbed[world] / left.name)
    if phase in ("write", "rotation"):
        _, text, codes = run_ranks(world, [*argv, "--resume"], out)
        assert codes == [0] * world and f"continuing from {left}" in text, text
        assert not list(out.glob("*.part")) and same_result(out, undisturbed[world])


# ---------------------------------------------------------------- hangs


def late(argv, others_die):
    def ahead(self, *args, original=data.Loader.ahead, **kwargs):
        for number, rows in enumerate(original(self, *args, **kwargs)):
            if number == 3 and self.rank == 1:
                time.sleep(30)
            if number == 3 and others_die:
                die("data")
            yield rows

    data.Loader.ahead = ahead
    train.main(argv)


def test_a_hang_ends_every_rank_and_names_the_late_one_once(job, tmp_path):
    out = tmp_path / "run"
    said, codes = start(2, late, [*job, *split(2), "--save_every", 2, "--timeout", 2], out, False)
    assert codes == [train.HUNG] * 2 and train.HUNG == 5, said
    said = "".join(said)
    assert said.count("no rank has moved for 2 s (--timeout). Late: rank 1\n") == 1 == said.count("Late: ")
    place = r"train\.py:\d+ run, in test_faults\.py:\d+ ahead"
    assert len(re.findall(rf"^  rank 1: step 4, data, for \d+ s, at {place}$", said, re.M)) == 1, said
    assert len(re.findall(r"^  rank 0: step 4, \w+", said, re.M)) == 1, said
    assert [step for step, _ in train.checkpoints(out)] == [2]


def test_a_rank_that_hangs_alone_ends_too(job, tmp_path):
    began = time.monotonic()
    said, codes = start(2, late, [*job, *split(2), "--save_every", 2, "--timeout", 2], tmp_path / "run", True)
    assert codes == [9, train.HUNG] and time.monotonic() - began < 20, said  # rank 0 takes the store with it


def slow(argv):
    def cached(spec, held_out, tokenizer, cache, tick, progress, original=data.cached):
        for _ in range(80):
            time.sleep(0.03)
            tick()
        return original(spec, held_out, tokenizer, cache, tick, progress)

    data.cached = cached
    train.main(argv)


def test_a_slow_rank_that_moves_is_left_alone(job, undisturbed, tmp_path):
    began = time.monotonic()
    said, codes = start(2, slow, [*job, *split(2), "--save_every", 0, "--timeout", 2], tmp_path / "run")
    assert codes == [0, 0], said
    assert time.monotonic() - began > 2
    assert same_result(tmp_path / "run", undisturbed[2])


# ---------------------------------------------------------------- signals


def signalled(argv, number, moment):
    """train.main(argv), in which rank 1 alone gets a signal: in the data of a step, a batch of an evaluation, a save."""
    def send():
        if int(os.environ["RANK"]) == 1:
            os.kill(os.getpid(), number)

    def ahead(self, *args, original=data.Loader.ahead, **kwargs):
        for step, rows in enumerate(original(self, *args, **kwargs)):
            if moment == "data" and step == 6:
                send()
            yield rows

    def once(self, original=data.Loader.once):
        for batch in original(self):
            if moment == "evaluation":
                send()
            yield batch

    def close(self, original=lm.SafetensorsFile.close):
        if moment == "save":
            send()
        original(self)

    data.Loader.ahead, data.Loader.once, lm.SafetensorsFile.close = ahead, once, close
    train.main(argv)


@pytest.mark.parametrize("number, moment, flags, stop", [
    (signal.SIGTERM, "data", ["--save_every", "0"], 7), (signal.SIGUSR1, "data", ["--save_every", "5", "--async_save"], 7),
    (signal.SIGUSR1, "save", ["--save_every", "6"], 7), (signal.SIGTERM, "evaluation", ["--save_every", "0"], 8),
], ids=lambda value: getattr(value, "name", str(value)))
def test_a_signal_to_one_rank_saves_on_all_and_resume_completes(job, chats, undisturbed, tmp_path, number, moment, flags, stop):
    out = tmp_path / "run"
    argv = [*job, *split(2), *flags, *["--eval_data", chats, "--eval_every", 8] * (moment == "evaluation")]
    said, codes = start(2, signalled, argv, out, number, moment)
    assert codes == [128 + number] * 2, said
    message = f"stopped by {number.name} after step {stop} of {STEPS}: {out}/checkpoint-{stop} is saved"
    assert "".join(said).count(message) == 1 == "".join(said).count("stopped by")
    assert same_checkpoint(out / f"checkpoint-{stop}", undisturbed[2] / f"checkpoint-{stop}")
    assert not list(out.glob("*.part")) and not (out / "final").exists()
    assert "eval_loss" not in (out / "metrics.jsonl").read_text()
    rows, text, codes = run_ranks(2, [*argv, "--resume"], out)
    assert codes == [0, 0], text
    assert same_result(out, undisturbed[2])
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "eval_loss" in row] == [8, 16, STEPS] * (moment == "evaluation")
