"""What a run shows and sends while it trains: its output, also where that cannot be written, the sinks of the log,
--wandb, and the answers to --sample."""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import json
import os
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import TRAIN, run_ranks, start_ranks

import data
import model as lm
import train

ALONE = train.Ranks(False, 1800)


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def with_key(key, rows):
    return [row for row in rows if key in row]


def steps_with(key, rows):
    return [row["step"] for row in with_key(key, rows)]


@pytest.fixture
def log(tmp_path):
    """A Log at step 4 of 9, without sinks."""
    state = {"step": 4, "steps": 9, "tokens": 0, "best_eval": None, "rows_a_step": 1, "metrics_bytes": 0,
             "evals_since_best": 0}
    loader = SimpleNamespace(rows=[0] * 9, waited_s=0.0, term="tokens")
    return train.Log(tmp_path, state, loader, ALONE, sinks=[])


class Sink:
    """Keeps what it gets, and may fail."""

    def __init__(self, error=None):
        self.error = error
        self.rows = []
        self.n_closed = 0

    def write(self, row):
        if self.error:
            raise self.error
        self.rows.append(row)

    def close(self, has_failed):
        self.n_closed += 1
        self.has_failed = has_failed
        if self.error:
            raise self.error


@pytest.fixture
def job(shallow, chats):
    return ["--model", shallow, "--random_init", "--data", chats, "--seq_len", 64, "--precision", "fp32", "--lora",
            "--lr", 1e-3, "--log_every", 1]


# ---------------------------------------------------------------- output that cannot be written


def full_disk():
    return open("/dev/full", "w")


def closed_terminal():
    """Where a job writes that its shell has disowned. Each write is an error, and no signal comes."""
    window, terminal = os.openpty()
    os.close(window)
    return open(terminal, "w")


def pipe_without_reader():
    reading, writing = os.pipe()
    os.close(reading)
    return open(writing, "w")


def train_with_output(argv, open_stream):
    with open_stream() as sys.stdout, open_stream() as sys.stderr:
        code = train.launch(argv)
        os._exit(code)  # as train.py ends: Python would try to write the rest once more


@pytest.mark.parametrize("open_stream", [full_disk, closed_terminal, pipe_without_reader])
def test_output_that_cannot_be_written_ends_no_run(job, tmp_path, open_stream):
    out = tmp_path / "run"
    argv = [*map(str, job), "--steps", "3", "--save_every", "2", "--out", str(out)]
    assert start_ranks(1, train_with_output, (argv, open_stream), [tmp_path / "log"]) == [0]
    assert train.checkpoints(out).keys() == {2, 3}
    assert (out / "final").exists()


def test_streams_that_the_caller_has_closed_end_no_run_and_print_into_no_file(job, tmp_path):
    out = tmp_path / "run"
    argv = [sys.executable, TRAIN, *job, "--steps", 2, "--save_every", 1, "--out", out]
    command = ["bash", "-c", '"$@" <&- >&- 2>&-', "-", *map(str, argv)]
    assert subprocess.run(command).returncode == 0
    # read to the last byte: nothing has been written between the numbers
    assert train.read_state(out / "checkpoint-2", {}, ALONE)["step"] == 2


def test_text_from_files_and_flags_is_printed_without_control_characters(capsys):
    ALONE.say("a\x1b[2Jb\tc\nd")
    data.say("\u202e\udcff", to_stderr=True)  # the second is a byte of a file that is not UTF-8
    said = capsys.readouterr()
    assert said.out == "a\\x1b[2Jb\tc\nd\n"
    assert said.err == "\\u202e\\udcff\n"


# ---------------------------------------------------------------- sinks


def closing(sinks):
    """What launch() has on its stack once open_sinks() has opened these."""
    exits = contextlib.ExitStack()
    exits.push(functools.partial(train.close_sinks, sinks))
    return exits


def test_a_sink_that_fails_is_dropped_with_one_message_and_the_others_get_all_rows(log, tmp_path, capsys):
    failing = Sink(ConnectionError("no route to host"))
    working = Sink()
    log.sinks = [failing, working]
    with closing(log.sinks):
        for loss in (3.0, 2.0):
            log.write_eval({"eval_loss": loss, "eval_tokens": 10})
    said = capsys.readouterr().out
    assert said.count("Sink has failed") == 1
    assert "ConnectionError: no route to host" in said
    rows = json_lines(tmp_path / "metrics.jsonl")
    assert working.rows == rows
    assert [row["eval_loss"] for row in rows] == [3.0, 2.0]
    assert working.n_closed == 1
    assert failing.n_closed == 0  # whatever it is about, it would fail again, or wait


def test_a_row_for_sinks_has_numbers_alone(log):
    sink = Sink()
    log.sinks = [sink]
    log.n_tokens = 100
    log.state["step"] = 5
    log.write({"losses": [3.0, 2.0], "lr": 1e-3, "grad_norm": 0.5, "skipped_steps": 0.0})
    (row,) = sink.rows
    assert row["step"] == 5
    assert row["loss"] == 2.0
    # `losses` is a list, and a CPU has no peak, so that `mfu` is None
    assert "losses" not in row
    assert "mfu" not in row
    assert all(isinstance(value, int | float) for value in row.values())


@pytest.mark.parametrize("error, code", [
    (None, 0),
    (SystemExit(143), 143),  # a signal, after the save
    (SystemExit("no such file"), 1),
    (FloatingPointError("not finite"), train.NOT_FINITE),
    (MemoryError("DefaultCPUAllocator"), train.OUT_OF_MEMORY),
    (KeyboardInterrupt(), 130),
    (RuntimeError("a bug"), 1),
], ids=repr)
@pytest.mark.parametrize("sink_error", [None, OSError("disk"), KeyboardInterrupt()], ids=repr)
def test_sinks_are_closed_however_a_run_ends_and_do_not_change_its_exit_code(
        tmp_path, monkeypatch, capsys, error, code, sink_error):
    sink = Sink(sink_error)

    # what the real one does: it notes its sinks, and ends in one of these ways
    def main(argv, progress, exits):
        progress["out"] = tmp_path
        exits.push(closing([sink]))
        if error:
            raise error

    monkeypatch.setattr(train, "main", main)
    assert train.launch([]) == code
    # Once: closing a second time could wait for the network again.
    assert sink.n_closed == 1
    assert sink.has_failed == (error is not None)
    # the report of a run that is out of memory is JSON, which a sink is not
    assert (tmp_path / "oom.json").exists() == (code == train.OUT_OF_MEMORY)


def test_only_rank_0_opens_sinks(tmp_path):
    args = SimpleNamespace(tensorboard=True, wandb=True)
    ranks = SimpleNamespace(rank=1, agree=ALONE.agree)
    assert train.open_sinks(args, tmp_path, None, ranks, contextlib.ExitStack()) == []


def test_a_sink_that_never_finishes_costs_a_run_half_a_minute(monkeypatch, capsys):
    monkeypatch.setattr(train, "FINISH_S", 0.1)
    answer = threading.Event()
    sink = SimpleNamespace(close=lambda has_failed: answer.wait())
    with closing([sink]):
        pass
    answer.set()
    assert "SimpleNamespace has failed and gets no more rows" in capsys.readouterr().out


# ---------------------------------------------------------------- --wandb


class StubRun:
    """A run of the stub of wandb: each call is a line of a file, because the run is another process's."""

    def __init__(self, path, run_id, action):
        self.path = path
        self.id = run_id
        self.action = action  # called with each row

    def note(self, **event):
        with open(self.path, "a") as file:
            file.write(json.dumps(event) + "\n")

    def define_metric(self, name, step_metric):
        self.note(metric=name, step_metric=step_metric)

    def log(self, row):
        self.action(row)
        self.note(row=row)

    def finish(self, exit_code):
        self.note(exit_code=exit_code)


class StubError(Exception):
    """wandb.Error"""


def stub_of_wandb(path, moment="never"):
    """A module in place of wandb. moment: where it goes wrong, at the start or in a row."""

    def act(row):
        if moment == "signal" and row["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if moment == "failure" and row["step"] == 2:
            raise ConnectionError("no route to host")

    def init(id, resume, dir, config):
        if moment == "login":
            raise StubError("No API key configured. Use `wandb login` to log in.")
        if moment == "type":
            raise TypeError("an argument of another version")
        if moment == "none":
            return None
        run = StubRun(path, id or "new-id", act)
        run.note(id=id, resume=resume, dir=dir, lr=config["lr"], world=config["world"])
        return run

    # train.py asks for an origin: a folder called wandb would have none
    spec = importlib.machinery.ModuleSpec("wandb", None, origin="a stub")
    return SimpleNamespace(init=init, __spec__=spec)


class BrokenImport(importlib.abc.MetaPathFinder):
    """Finds a wandb that does not fit to another package of the environment."""

    def find_spec(self, name, path, target=None):
        if name == "wandb":
            return importlib.machinery.ModuleSpec(name, self, origin="a stub")

    def create_module(self, spec):
        raise ImportError("cannot import name 'x' from 'y'")

    def exec_module(self, module):
        pass


def train_with_stub(argv, path, moment):
    sys.modules.pop("wandb", None)
    if moment == "import":
        sys.meta_path.insert(0, BrokenImport())
    else:
        sys.modules["wandb"] = stub_of_wandb(path, moment)
    return train.launch(argv)


def start(world, argv, out, moment="never"):
    """train_with_stub() on ranks -> (what the stub got, what was said, exit codes)."""
    events = out.parent / "events.jsonl"
    events.write_text("")
    logs = [out.parent / f"rank{rank}.log" for rank in range(world)]
    argv = [*map(str, argv), "--out", str(out), "--wandb"]
    codes = start_ranks(world, train_with_stub, (argv, events, moment), logs)
    said = "".join(log.read_text() for log in logs)
    return json_lines(events), said, codes


def test_wandb_gets_the_metrics_of_a_run_and_of_the_one_that_continues_it(job, few_chats, tmp_path):
    out = tmp_path / "run"
    argv = [*job, "--steps", 6, "--eval_data", few_chats, "--eval_every", 2, "--save_every", 0]
    before, said, codes = start(2, argv, out, "signal")
    # The signal comes while step 3 is logged, when the ranks have agreed that none has come, so they end after step 4.
    assert codes == [128 + signal.SIGTERM] * 2, said
    assert "stopped by SIGTERM after step 4 of 6, saved" in said
    opened, metric, *_, closed = before
    # rank 0 alone: a second line of this kind would not be a row
    assert opened == {"id": None, "resume": "allow", "dir": str(out), "lr": 1e-3, "world": 2}
    assert metric == {"metric": "*", "step_metric": "step"}
    # so wandb shows a run that ended before its last step as failed, until it is continued
    assert closed == {"exit_code": 1}
    assert (out / "wandb-id.txt").read_text() == "new-id\n"

    after, said, codes = start(2, [*argv, "--resume"], out)
    assert codes == [0, 0], said
    assert after[0] == opened | {"id": "new-id"}
    assert after[-1] == {"exit_code": 0}

    # together the two got each row of metrics.jsonl once
    sent = [event["row"] for event in with_key("row", [*before, *after])]
    rows = json_lines(out / "metrics.jsonl")
    for row in with_key("loss", rows):
        # not for wandb: a list, and what is not known on a CPU
        del row["losses"]
        assert row.pop("mfu") is None
        assert row.pop("mem_reserved_gib") is None
    assert sent == rows
    assert steps_with("loss", rows) == [1, 2, 3, 4, 5, 6]
    assert steps_with("eval_loss", rows) == [2, 4, 6]


def test_wandb_writes_into_the_run_or_where_its_own_variable_says(tmp_path, monkeypatch):
    settings = {"lr": 1.0, "world": 1}
    events = tmp_path / "events.jsonl"
    monkeypatch.setitem(sys.modules, "wandb", stub_of_wandb(events))
    monkeypatch.delenv("WANDB_DIR", raising=False)
    train.WandB(tmp_path, 0, settings)
    monkeypatch.setenv("WANDB_DIR", "elsewhere")
    train.WandB(tmp_path, 0, settings)
    folders = [event["dir"] for event in with_key("dir", json_lines(events))]
    assert folders == [str(tmp_path), "elsewhere"]


def test_a_network_that_fails_in_the_middle_of_training_costs_one_message(job, tmp_path):
    out = tmp_path / "run"
    events, said, codes = start(1, [*job, "--steps", 4], out, "failure")
    assert codes == [0], said
    assert said.count("WandB has failed and gets no more rows, metrics.jsonl has them: ConnectionError") == 1
    assert steps_with("loss", json_lines(out / "metrics.jsonl")) == [1, 2, 3, 4]
    # the row of step 2 is the one that failed, and after it the sink is neither asked again nor closed
    assert steps_with("loss", [event["row"] for event in with_key("row", events)]) == [1]
    assert not with_key("exit_code", events)


WORDS_OF_ERRORS = {
    "login": "StubError: No API key configured. Use `wandb login` to log in.",
    "type": "TypeError: an argument of another version",
    "none": "RuntimeError: wandb.init() has started no run",
    "import": "ImportError: cannot import name 'x' from 'y'",
}


@pytest.mark.parametrize("moment, world", [("login", 2), ("type", 1), ("none", 1), ("import", 1)])
def test_a_wandb_that_does_not_open_ends_a_start_before_its_data(job, tmp_path, moment, world):
    out = tmp_path / "run"
    events, said, codes = start(world, [*job, "--steps", 4], out, moment)
    assert codes == [1] * world, said
    assert said.count(f"train.py: error: --wandb: {WORDS_OF_ERRORS[moment]}\n") == 1
    assert "WANDB_MODE=offline" in said
    assert "Traceback" not in said
    assert "examples" not in said  # print_data() would name them
    assert not events
    assert not out.exists()


def test_a_resumed_run_goes_on_without_a_wandb_that_does_not_open(job, tmp_path):
    out = tmp_path / "run"
    assert start(1, [*job, "--steps", 2, "--schedule", "constant", "--warmup", 0], out)[2] == [0]
    longer = [*job, "--steps", 4, "--schedule", "constant", "--warmup", 0, "--resume"]
    _, said, codes = start(1, longer, out, "login")
    assert codes == [0], said
    assert f"--wandb: {WORDS_OF_ERRORS['login']}. The run continues without it; metrics.jsonl has all rows" in said
    assert steps_with("loss", json_lines(out / "metrics.jsonl")) == [1, 2, 3, 4]


# ---------------------------------------------------------------- --sample


CASES = {
    # random rounding draws most random bits; one rank
    "rounded": (1, ["--precision", "bf16", "--stochastic_rounding", "--optim", "adamw8bit"]),
    # sharded weights are gathered for an answer, and inputs of blocks offloaded
    "sharded": (2, ["--precision", "fp32", "--fsdp2", "--qlora", "--lora_dropout", 0.1, "--offload", "activations"]),
}


QUESTION = "What does `os.getcwd()` do?"


def answered_steps(said):
    return re.findall(r"^step (\d+)  sample: ", said, re.M)


def without_times(row):
    """A row of metrics.jsonl without what depends on the machine."""
    return {key: value for key, value in row.items() if key not in ("tokens_per_s", "step_s", "data_s", "mem_gib")}


def files_of(checkpoint):
    """{name: content}. The size of metrics.jsonl is that of digits of times."""
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    state = json.loads(files["trainer_state.json"])
    assert state.pop("metrics_bytes") > 0
    del state["checksum"]
    return files | {"trainer_state.json": state}


@pytest.mark.parametrize("case", CASES)
def test_a_sample_is_shown_at_each_evaluation_and_changes_no_bit_of_training(
        folder, chats, few_chats, tmp_path, case):
    world, flags = CASES[case]
    argv = ["--model", folder, "--random_init", "--data", chats, "--eval_data", few_chats, "--seq_len", 64,
            "--steps", 6, "--eval_every", 2, "--save_every", 3, "--keep", 9, "--log_every", 1, "--lr", 1e-3, *flags]
    plain = run_ranks(world, [*argv, "--sample", ""], tmp_path / "plain")
    # a temperature, because then an answer draws random numbers
    flags_of_sample = ["--sample", QUESTION, "--temperature", 1.5, "--max_new_tokens", 6]
    asked = run_ranks(world, [*argv, *flags_of_sample], tmp_path / "asked")
    for _, said, codes in (plain, asked):
        assert codes == [0] * world, said
    # The evaluation of step 6 is the last: the answers before and after training stand beside it.
    assert answered_steps(plain[1]) == []
    assert answered_steps(asked[1]) == ["2", "4"]
    lines = asked[1].splitlines()
    assert lines.count(f"sample: {QUESTION}") == 1
    assert lines.count(f"--- {QUESTION}") == 1

    assert [without_times(row) for row in plain[0]] == [without_times(row) for row in asked[0]]
    for step in (3, 6):
        files = files_of(tmp_path / "plain" / f"checkpoint-{step}")
        assert files == files_of(tmp_path / "asked" / f"checkpoint-{step}")
        assert len(files) == world + 1  # and trainer_state.json


@pytest.fixture
def sample_of(tiny, monkeypatch):
    """Makes a Sample of a resumed run whose model answers with these words. act(i) is called before the i-th token."""

    def make(answer, act=lambda i: None, stop=None):
        def generate(*args):
            for i, token in enumerate(tiny.core.encode(answer).ids):
                act(i)
                yield token

        monkeypatch.setattr(lm, "generate", generate)
        # all that a Sample asks of model and data
        opened = SimpleNamespace(model=torch.nn.Linear(1, 1), tokenizer=tiny)
        documents = SimpleNamespace(files=[])
        no_signal = SimpleNamespace(number=0)
        args = SimpleNamespace(sample="What?", system=None, max_new_tokens=48, temperature=0.0)
        return train.Sample(args, opened, documents, "checkpoint-2", ALONE, stop or no_signal)

    return make


def test_answers_have_lines_of_80_columns_below_one_question_and_none_after_the_last_step(log, sample_of, capsys):
    sample = sample_of("some words " * 20)
    for step in (4, 6, log.state["steps"]):
        log.state["step"] = step
        sample.say_answer(log)
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80
    # the first lines of answers; those that follow are indented
    starts = [line for line in lines if not line.startswith(" ")]
    assert starts[0] == "sample: What?"
    assert [line.split("some")[0] for line in starts[1:]] == ["step 4  sample: ", "step 6  sample: "]
    assert "\n".join(lines).count("words") == 2 * 20


def test_a_run_on_a_gpu_ends_with_one_line_to_post(log, capsys):
    rows = [{"step": step, "losses": [1.0], "mem_gib": gib, "mem_reserved_gib": gib + 1.0, "step_s": step_s,
             "tokens_per_s": 1000 / step_s}
            for step, gib, step_s in [(4, 90.0, 9.0), (5, 7.5, 2.0), (6, 8.25, 0.5), (7, 8.0, 0.25)]]
    rows.insert(2, {"step": 5, "eval_loss": 1.0})
    (log.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log.state["step"] = 7
    log.ranks = SimpleNamespace(rank=0, world=2, device_name="NVIDIA H100", say=data.say)
    argv = ["--qlora", "--data", "my chats.jsonl"]
    train.say_to_post(argv, SimpleNamespace(model="qwen3-4b"), log, "8.50 GiB, a step takes about 0.40 s on the H100")
    (line,) = capsys.readouterr().out.splitlines()
    # step 4 was made before this run has resumed; the middle one of three steps counts
    expected = ["2 x NVIDIA H100, qwen3-4b, flags --qlora --data 'my chats.jsonl'",
                "predicted 8.50 GiB, a step takes about 0.40 s on the H100",
                "measured 8.25 GiB allocated, 9.25 reserved, 0.50 s a step, 2,000 tok/s"]
    *parts, versions = line.removeprefix("to post: ").split(" | ")
    assert parts == expected
    assert re.fullmatch(rf"torch {re.escape(torch.__version__)}, oomph [0-9a-f]{{8}}", versions)
    log.ranks.rank = 1
    train.say_to_post(argv, SimpleNamespace(model="qwen3-4b"), log, "nothing")
    assert not capsys.readouterr().out


def test_the_time_of_an_answer_is_none_of_a_step(log, sample_of, monkeypatch):
    now = log.mark + 5.0  # five seconds of training
    monkeypatch.setattr(train.time, "perf_counter", lambda: now)

    def spend(i):
        nonlocal now
        now += 10.0

    sample_of("some words", act=spend).say_answer(log)
    assert now > log.start + 20.0  # at least two tokens were made
    assert log.seconds() == pytest.approx(5.0)


def test_a_signal_ends_an_answer(sample_of):
    stop = SimpleNamespace(number=0)

    def send(i):
        if i == 2:
            stop.number = signal.SIGTERM

    answer = sample_of("1 2 3 4 5 6 7 8 9", act=send, stop=stop).answer()
    assert answer.startswith("1")
    assert "9" not in answer


def test_a_model_is_back_in_training_after_an_answer(sample_of):
    sample = sample_of("words")
    sample.answer()
    assert sample.model.training  # or adapters would have no dropout from here on


# ---------------------------------------------------------------- a fork's metrics


def with_a_metric_of_tokens(argv):
    """train.py of a fork, whose loss is half of the cross-entropy, which it returns as a metric."""
    plain = lm.on_meta

    def halved(logits_CV, targets_C):
        losses_C = F.cross_entropy(logits_CV, targets_C, reduction="none")
        return losses_C / 2, {"cross_entropy": losses_C}

    def on_meta(config, args):
        model = plain(config, args)
        model.lm_head.custom_loss = halved
        return model

    lm.on_meta = on_meta
    return train.launch(argv)


@pytest.mark.parametrize("world, flags", [
    (1, "--no-chunked_ce --grad_accum 2"),
    (1, "--ce_chunk 100"),
    (2, "--fsdp2"),
    # ten chats are about 700 tokens of the row, and all of them are on the first rank
    (2, "--fsdp2 --sequence_parallel 2 --seq_len 2048"),
])
def test_a_metric_that_a_loss_returns_is_a_mean_over_tokens_in_rows_and_evaluations(
        job, few_chats, tmp_path, world, flags):
    out = tmp_path / "run"
    argv = [*job, "--data", few_chats, "--eval_data", few_chats, "--steps", 2, "--out", out, *flags.split()]
    logs = [tmp_path / f"{rank}.log" for rank in range(world)]
    codes = start_ranks(world, with_a_metric_of_tokens, ([str(word) for word in argv],), logs)
    said = logs[0].read_text()
    assert codes == [0] * world, said
    *rows, evaluation = json_lines(out / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["cross_entropy"] == pytest.approx(2 * row["loss"], rel=1e-6)  # float32 sums in another order
        assert f"\n  cross_entropy {row['cross_entropy']:.4g}\n" in said
    assert evaluation["eval_cross_entropy"] == pytest.approx(2 * evaluation["eval_loss"], rel=1e-6)


def with_a_metric(argv):
    """train.py of a fork, whose loss_of() also has the number of documents of a batch."""
    plain = train.loss_of

    def loss_of(model, b, args):
        loss_sum, metrics = plain(model, b, args)
        return loss_sum, metrics | {"documents": b.tokens.new_full((), len(b.n_targets))}

    train.loss_of = loss_of
    return train.launch(argv)


@pytest.mark.parametrize("world", [1, 2])
def test_a_metric_that_loss_of_returns_is_in_rows_and_on_the_console(job, chats, tmp_path, world):
    out = tmp_path / "run"
    argv = [*job, "--eval_data", chats, "--no-packing", "--batch_size", 4 // world, "--steps", 2, "--out", out]
    logs = [tmp_path / f"{rank}.log" for rank in range(world)]
    codes = start_ranks(world, with_a_metric, ([str(word) for word in argv],), logs)
    said = logs[0].read_text()
    assert codes == [0] * world, said
    *rows, evaluation = json_lines(out / "metrics.jsonl")
    for row in rows:  # 4 documents a step, over their supervised tokens
        n_targets = 4 / row["documents"]
        assert n_targets == pytest.approx(round(n_targets), rel=1e-6)
        assert f"\n  documents {row['documents']:.4g}\n" in said
    n_documents = evaluation["eval_documents"] * evaluation["eval_tokens"]
    # without packing a row is a document
    n_rows = int(re.findall(r"(\d+) rows of at most", said)[-1])
    assert n_documents == pytest.approx(n_rows, rel=1e-6)
    assert f"\n  eval_documents {evaluation['eval_documents']:.4g}\n" in said
