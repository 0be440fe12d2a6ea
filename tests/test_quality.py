"""bench_quality.py: no question is both trained on and held out, a score is what decoding gives, a cut call goes on."""

import argparse
import json

import bench_quality as bench
import pytest
from conftest import HERE

TIMES = {(0, 0): "twelve o'clock", (12, 1): "one past twelve", (3, 15): "a quarter past three",
         (15, 29): "twenty-nine past three", (23, 30): "half past eleven", (23, 31): "twenty-nine to twelve",
         (14, 35): "twenty-five to three", (8, 45): "a quarter to nine", (12, 59): "one to one"}


@pytest.mark.parametrize("time", TIMES)
def test_a_time_is_said_in_words(time):
    assert bench.time_in_words(*time) == TIMES[time]


@pytest.mark.parametrize("task", bench.TASKS)
def test_no_held_out_question_is_trained_on(tmp_path, task):
    questions = []
    for path in bench.write_task(tmp_path, task):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        questions.append([row["messages"][0]["content"] for row in rows])
    trained, held_out = questions
    assert len(held_out) == bench.N_HELD_OUT
    assert len(trained) > 5 * bench.N_HELD_OUT  # enough for the steps of a run without a second epoch
    assert not set(trained) & set(held_out)
    assert len(set(trained)) == len(trained)


@pytest.mark.parametrize("method", ["full", "qlora, bf16"])
def test_the_score_is_what_decoding_gives(tmp_path, monkeypatch, method):
    """The built-in model learns four answers by heart. It is asked for two of them and for others."""
    questions = [f"Say {hour}:00 in words." for hour in range(1, 5)]
    learned = ["one o'clock", "two o'clock", "three o'clock", "four"]
    # The third answer begins with all that is expected, and goes on. What is expected fourth begins with all of
    # the answer.
    expected = ["one o'clock", "two o'clock", "three", "four o'clock"]
    pairs = list(zip(questions, learned, strict=True)), list(zip(questions, expected, strict=True))
    monkeypatch.setattr(bench, "split", lambda _: pairs)
    monkeypatch.setattr(bench, "N_HELD_OUT", 4)
    monkeypatch.setattr(bench, "FLAGS", "--seq_len 256 --steps 40 --schedule constant --save_every 0")
    args = argparse.Namespace(model=HERE / "tiny", out=tmp_path, answers=4)
    row = bench.measure(args, "clock", method, 3e-3, seed=0)
    assert [said for _, said, _ in row["answers"]] == learned
    assert row["score"] == 0.5
    # a looser measure, for answers that say more than was asked for
    assert row["contains"] == 0.75


def fake_measure(args, task, name, rate, seed):
    return {"task": task, "method": name, "rate": rate, "seed": seed, "device": "cpu", "loss": 1.2345 + seed / 100,
            "score": 0.1 * seed, "seconds": 1234.5, "step_s": 1.5, "gib": 10.5, "answers": [],
            "curve": [[10, 1.3], [20, 1.2345]]}


def call(monkeypatch, *argv):
    """Runs the script with a stand-in for its runs -> how many it made."""
    made = []

    def measure(*case):
        made.append(case)
        return fake_measure(*case)

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr("sys.argv", ["bench_quality.py", "--model", str(HERE / "tiny"), *argv])
    bench.main()
    return len(made)


def test_a_call_that_was_cut_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    out = "--out", str(tmp_path)
    n_methods = len(bench.METHODS)
    # a rate of 0 learns nothing, so both bases have one seed
    n_runs = len(bench.TASKS) * (2 + 3 * (n_methods - 2))
    assert call(monkeypatch, *out, "--methods", "full", "lora", "--seeds", "1") == 2 * len(bench.TASKS)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text()[:-20])  # it was killed while it wrote the last row
    assert call(monkeypatch, *out) == n_runs - 3
    assert call(monkeypatch, *out) == 0
    capsys.readouterr()
    assert call(monkeypatch, *out, "--svg", str(tmp_path / "curves.svg")) == 0
    tables = capsys.readouterr().out.splitlines()
    assert len([line for line in tables if line.startswith("| full")]) == len(bench.TASKS)
    assert max(map(len, tables)) <= 80
    assert (tmp_path / "curves.svg").read_text().count("<polyline") == len(bench.CURVES)
