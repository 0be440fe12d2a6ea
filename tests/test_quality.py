"""bench_quality.py: what is held out is not trained on, a score is what decoding gives, a call that was cut goes on."""

import argparse
import ast
import json

import bench_quality as bench
import pytest
from conftest import HERE


@pytest.mark.parametrize("task", bench.TASKS)
def test_nothing_that_is_held_out_is_trained_on(tmp_path, task):
    files = []
    for path in bench.write_task(tmp_path, task):
        files.append([json.loads(line)["messages"] for line in path.read_text().splitlines()])
    trained, held_out = files
    assert len(held_out) == bench.N_HELD_OUT
    assert len(trained) > 2 * bench.N_HELD_OUT  # enough for the steps of a run without a second epoch
    for system, user, assistant in trained + held_out:
        assert system["content"] == bench.TASKS[task].instruction
        assert user["content"]
        assert assistant["content"]
    questions = [user["content"] for _, user, _ in trained + held_out]
    assert len(set(questions)) == len(questions)


def test_no_date_or_list_of_parameters_is_in_both_files():
    """Questions that differ in no more than the year, or the name of the function, would be answered from memory."""
    days = [question[5:] for question, _ in bench.dates()]
    assert len(set(days)) == len(days) == 366
    parameters = [question.partition("(")[2] for question, _ in bench.arguments()]
    assert len(set(parameters)) == len(parameters)


def test_answers_of_the_tasks_are_right():
    said = {question[5:]: answer for question, answer in bench.dates()}
    assert said["01-01"] == "the first of January"
    assert said["02-29"] == "the twenty-ninth of February"
    assert said["07-20"] == "the twentieth of July"
    assert said["12-31"] == "the thirty-first of December"
    for question, answer in bench.arguments():
        # bench_quality.py asks inspect for the parameters, this test asks the parser
        (function,) = ast.parse(f"def {question}: pass").body
        names = [arg.arg for arg in function.args.args]
        n_required = len(names) - len(function.args.defaults)
        assert answer == (", ".join(names[:n_required]) or "none"), question


def test_the_score_is_what_decoding_gives(tmp_path, monkeypatch):
    """The built-in model learns four answers by heart. It is asked for two of them and for others."""
    questions = ["alpha", "beta", "gamma", "delta"]
    learned = ["one", "two", "three and more", "four"]
    # The third answer begins with all that is expected, and goes on. What is expected fourth begins with all of
    # the answer.
    expected = ["one", "two", "three", "four and more"]
    pairs = list(zip(questions, learned, strict=True)), list(zip(questions, expected, strict=True))
    monkeypatch.setattr(bench, "split", lambda _: pairs)
    monkeypatch.setattr(bench, "N_HELD_OUT", 4)
    monkeypatch.setattr(bench, "FLAGS", "--seq_len 256 --steps 30 --schedule constant --save_every 0")
    args = argparse.Namespace(model=HERE / "tiny", out=tmp_path, answers=4)
    row = bench.measure(args, "dates", "qlora", 5e-3, seed=0)
    assert [said for _, said, _ in row["answers"]] == learned
    assert row["score"] == 0.5
    # a looser measure, for answers that say more than was asked for
    assert row["contains"] == 0.75


def fake_row(args, task, name, rate, seed):
    return {"task": task, "method": name, "rate": rate, "seed": seed, "device": "cpu", "loss": 1.2345 + seed / 100,
            "score": 0.1 * seed, "contains": 0.5, "seconds": 1234.5, "step_s": 1.5, "gib": 10.5, "answers": []}


def fake_curve(args, task, name):
    return {"task": task, "method": name, "rate": bench.METHODS[name].rate, "seed": 0, "curve": [[4, 1.3], [8, 1.2]]}


def call(monkeypatch, *argv):
    """Runs the script with stand-ins for its runs -> how many it made."""
    made = []

    def count(function):
        def counted(*case):
            made.append(case)
            return function(*case)
        return counted

    monkeypatch.setattr(bench, "measure", count(fake_row))
    monkeypatch.setattr(bench, "measure_curve", count(fake_curve))
    monkeypatch.setattr("sys.argv", ["bench_quality.py", "--model", str(HERE / "tiny"), *argv])
    bench.main()
    return len(made)


def test_a_call_that_was_cut_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    out = "--out", str(tmp_path)
    n_tasks = len(bench.TASKS)
    # a rate of 0 learns nothing, so both bases have one seed
    n_runs = n_tasks * (2 + 3 * (len(bench.METHODS) - 2))
    assert call(monkeypatch, *out, "--methods", "full", "lora", "--seeds", "1") == 2 * n_tasks
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text()[:-20])  # the call was killed while it wrote the last row
    assert call(monkeypatch, *out) == n_runs - (2 * n_tasks - 1)
    assert call(monkeypatch, *out) == 0
    svg = tmp_path / "curves.svg"
    assert call(monkeypatch, *out, "--svg", str(svg)) == len(bench.CURVES)
    assert svg.read_text().count("<polyline") == len(bench.CURVES)
    capsys.readouterr()
    assert call(monkeypatch, *out, "--svg", str(svg)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("| full")]) == n_tasks
    assert max(map(len, lines)) <= 80
