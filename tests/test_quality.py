"""bench_quality.py: what is held out is not trained on, a score is what decoding gives, a call that was cut goes on."""

import argparse
import ast
import json
import sys
from types import SimpleNamespace

import bench_quality as bench
import pytest
from bench_quality import Case, Pair
from conftest import HERE

# ---------------------------------------------------------------- tasks


def conversations_in(path):
    """The (system, user, assistant) messages of each row of a file."""
    conversations = []
    for line in path.read_text().splitlines():
        conversations.append(json.loads(line)["messages"])
    return conversations


@pytest.mark.parametrize("task", bench.TASKS)
def test_nothing_that_is_held_out_is_trained_on(tmp_path, task):
    trained_file, held_out_file = bench.write_task(tmp_path, task)
    trained = conversations_in(trained_file)
    held_out = conversations_in(held_out_file)
    assert len(held_out) == bench.N_HELD_OUT
    # enough for the steps of a run without a second epoch
    assert len(trained) > 2 * bench.N_HELD_OUT
    questions = []
    for system, user, assistant in trained + held_out:
        assert system["content"] == bench.TASKS[task].instruction
        assert user["content"]
        assert assistant["content"]
        questions.append(user["content"])
    # no question is twice in a file, or in both files
    assert len(set(questions)) == len(questions)


def day_of(question):
    """The month and day of a question such as 2004-11-24."""
    _, _, day = question.partition("-")
    return day


def test_no_date_or_list_of_parameters_is_in_both_files():
    """Questions that differ in no more than the year, or the name of the function, would be answered from memory."""
    days = [day_of(pair.question) for pair in bench.dates()]
    assert len(set(days)) == len(days) == 366
    parameters = []
    for pair in bench.arguments():
        # f(a, b=1) and g(a, b=1) are the same question
        _, _, after_name = pair.question.partition("(")
        parameters.append(after_name)
    assert len(set(parameters)) == len(parameters)


def required_by_the_parser(signature):
    """The names of the parameters without a default. bench_quality.py asks inspect for them, this test asks the
    parser."""
    (function,) = ast.parse(f"def {signature}: pass").body
    arguments = function.args
    names = [arg.arg for arg in arguments.args]
    # defaults belong to the last parameters
    n_required = len(names) - len(arguments.defaults)
    return names[:n_required]


def test_answers_of_the_tasks_are_right():
    answers = {day_of(pair.question): pair.answer for pair in bench.dates()}
    assert answers["01-01"] == "the first of January"
    # a day that only leap years have: a date of another year would not be one
    assert answers["02-29"] == "the twenty-ninth of February"
    assert answers["07-20"] == "the twentieth of July"
    assert answers["12-31"] == "the thirty-first of December"
    for pair in bench.arguments():
        required = required_by_the_parser(pair.question)
        assert pair.answer == (", ".join(required) or "none"), pair.question


# ---------------------------------------------------------------- the score


@pytest.mark.ci  # a run of 30 steps, for the sake of a script
def test_the_score_is_what_decoding_gives(tmp_path, monkeypatch):
    """The built-in model learns four answers by heart. Two of them are what is expected of it later."""
    learned = [
        Pair("alpha", "one"),
        Pair("beta", "two"),
        Pair("gamma", "three and more"),
        Pair("delta", "four"),
    ]
    expected = [
        Pair("alpha", "one"),
        Pair("beta", "two"),
        # the answer begins with all that is expected, and goes on
        Pair("gamma", "three"),
        # what is expected begins with all of the answer
        Pair("delta", "four and more"),
    ]
    points = {"gamma": 0.25, "delta": 0.75}  # of answers that are not the expected ones: those of another scorer
    task = bench.Task("Say it.", lambda: bench.Split(learned, expected))
    scored = task._replace(points=lambda question, said: points[question])
    monkeypatch.setattr(bench, "TASKS", {"exact": task, "scored": scored})
    monkeypatch.setattr(bench, "N_HELD_OUT", len(expected))
    # 30 steps at this rate: enough for a small model to know four answers
    flags = "--seq_len 256 --steps 30 --schedule constant --save_every 0"
    monkeypatch.setattr(bench, "FLAGS", flags)
    args = argparse.Namespace(model=HERE / "tiny", out=tmp_path, answers=4)
    points_of = bench.points_of
    scores = {}

    def note_points(result, name, exact):  # both tasks have one run
        for either in bench.TASKS:
            scores[either] = points_of(result, either, exact)
        return scores[name]

    monkeypatch.setattr(bench, "points_of", note_points)
    row = bench.measure(args, Case("exact", "qlora", 5e-3, seed=0))
    said = [answer.said for answer in row["answers"]]
    assert said == [pair.answer for pair in learned]
    # the first two: an answer that goes on is wrong, and so is one that ends too early
    assert row["score"] == 0.5
    # a looser measure, for answers that say more than was asked for
    assert row["contains"] == 0.75
    assert scores == {"exact": [1, 1, 0, 0], "scored": [1, 1, 0.25, 0.75]}


def test_tasks_of_reasoning_gym_hold_out_other_questions_and_have_its_scorer(tmp_path, monkeypatch):
    """With a stand-in for the package, whose question i of seed s is made of s + i, as the real one's is."""
    class Sums:
        def __init__(self, name, size, seed):
            assert name == "sums"
            self.numbers = range(seed, seed + size)

        def __iter__(self):
            for number in self.numbers:
                yield {"question": f"{number % 700} + 1", "answer": number % 700 + 1}

        def score_answer(self, answer, entry):
            return 1.0 if float(answer) == entry["answer"] else 0.01

    monkeypatch.setattr(bench, "TASKS", dict(bench.TASKS))
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=Sums))
    assert bench.task_named("reasoning_gym:sums") == "reasoning_gym:sums"
    task = bench.TASKS["reasoning_gym:sums"]
    trained, held_out = task.make()
    assert len(trained) == bench.N_GENERATED
    assert len(held_out) == bench.N_HELD_OUT
    assert not {pair.question for pair in trained} & {pair.question for pair in held_out}
    question, right = held_out[0]
    assert task.points(question, right) == task.points(question, f"{right}.0") == 1
    assert task.points(question, "-1") == 0.01
    for file in bench.write_task(tmp_path, "reasoning_gym:sums"):
        assert ":" not in file.name  # which --data would take for a split


def test_without_reasoning_gym_its_tasks_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SystemExit, match="pip install reasoning-gym"):
        bench.task_named("reasoning_gym:sums")
    with pytest.raises(argparse.ArgumentTypeError, match="gsm8k: expected arguments, dates or reasoning_gym:NAME"):
        bench.task_named("gsm8k")


# ---------------------------------------------------------------- calls


def fake_row(args, case):
    """What bench.measure() returns, without a run."""
    return {
        **case._asdict(),
        "device": "cpu",
        # another value for each seed, so that the table has ranges, its widest cells
        "loss": 1.2345 + case.seed / 100,
        "score": 0.1 * case.seed,
        "contains": 0.5,
        "seconds": 1234.5,
        "step_s": 1.5,
        "gib": 10.5,
        "answers": [],
    }


def fake_curve(args, case):
    """What bench.measure_curve() returns, without a run."""
    first = [4, 1.3]
    last = [8, 1.2]
    return {**case._asdict(), "curve": [first, last]}


@pytest.fixture
def call(tmp_path, monkeypatch):
    """A function that runs the script with stand-ins for its runs, and returns how many it made."""
    made = []

    def counted(function):
        def run(args, case):
            made.append(case)
            return function(args, case)

        return run

    def run_script(*flags):
        made.clear()
        argv = ["bench_quality.py", "--model", str(HERE / "tiny"), "--out", str(tmp_path), *flags]
        monkeypatch.setattr("sys.argv", argv)
        bench.main()
        return len(made)

    monkeypatch.setattr(bench, "measure", counted(fake_row))
    monkeypatch.setattr(bench, "measure_curve", counted(fake_curve))
    return run_script


def test_a_call_that_was_cut_goes_on_where_it_was(call, tmp_path, capsys):
    n_tasks = len(bench.TASKS)
    n_learning = len(bench.METHODS) - 2
    # three seeds of each; a rate of 0 learns nothing, so both bases have one
    n_runs = n_tasks * (3 * n_learning + 2)
    n_first = 2 * n_tasks
    assert call("--methods", "full", "lora", "--seeds", "1") == n_first
    # the call was killed while it wrote the last row
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text()[:-20])
    assert call() == n_runs - (n_first - 1)
    assert call() == 0

    # the picture has runs of its own
    svg = tmp_path / "curves.svg"
    assert call("--svg", str(svg)) == len(bench.CURVES)
    assert svg.read_text().count("<polyline") == len(bench.CURVES)

    capsys.readouterr()
    assert call("--svg", str(svg)) == 0  # and they are not repeated either
    lines = capsys.readouterr().out.splitlines()
    of_full = [line for line in lines if line.startswith("| full")]
    assert len(of_full) == n_tasks
    # terminals are usually that wide
    assert max(map(len, lines)) <= 80
