"""--eval_data SHARE: examples of --data that are held out from training, chosen by a hash of each."""

import gzip
import json
import random
import re
from collections import Counter

import pytest
from conftest import HERE, build, on_ranks, pieces, run_ranks
from test_bad_input import assert_says
from test_formats import QUESTION, QWEN35, chat, jsonl, message, model_folder

import data
import train

N = 2000


def rows_of(n, name="row"):
    return [{"text": f"{name} {i}"} for i in range(n)]


def open_data(paths, share, *flags, tokenizer=None):
    """(loader of what is trained on, loader of what is held out) of data files. tokenizer: not the built-in one."""
    argv = ["--data", *paths, "--eval_data", share, "--seq_len", 64, *flags]
    args = train.parse_args([*map(str, argv)])
    tokenizer = tokenizer or data.Tokenizer(HERE / "tiny")
    return data.open_data(args, tokenizer, 4096, train.Ranks(False, 1800))


def texts_in(tokenizer, loader):
    """Counter of the texts of a loader's examples."""
    texts = Counter()
    for ids, _ in pieces(loader.documents):
        texts[tokenizer.core.decode(ids)] += 1
    return texts


def sides(tokenizer, paths, share, *flags):
    """(Counter of the texts that are trained on, Counter of those held out)."""
    trained, held_out = open_data(paths, share, *flags)
    return texts_in(tokenizer, trained), texts_in(tokenizer, held_out)


def lines_in(loader):
    """Counter of the lines that a loader's parts are from."""
    return Counter(loader.documents.parts["line"].tolist())


# ---------------------------------------------------------------- which examples


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_a_share_is_disjoint_complete_and_of_about_its_size(tiny, tmp_path, share):
    rows = rows_of(N)
    trained, held_out = sides(tiny, [jsonl(tmp_path / "a.jsonl", *rows)], share)
    assert not trained & held_out
    assert trained + held_out == Counter(row["text"] for row in rows)
    # A hash throws a coin for each row; this is the standard deviation of the sum.
    deviation = (N * share * (1 - share)) ** 0.5
    assert held_out.total() == pytest.approx(N * share, abs=4 * deviation)


@pytest.mark.parametrize("n_held_out", [2, 41, N - 1])
def test_a_number_is_held_out_exactly(tiny, tmp_path, n_held_out):
    rows = rows_of(N)
    trained, held_out = sides(tiny, [jsonl(tmp_path / "a.jsonl", *rows)], n_held_out)
    assert held_out.total() == n_held_out
    assert not trained & held_out
    assert trained + held_out == Counter(row["text"] for row in rows)


def test_a_number_counts_different_examples_and_holds_out_their_copies(tiny, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *rows_of(50), *rows_of(50))
    trained, held_out = sides(tiny, [path], 10)
    assert len(held_out) == 10  # keys of a Counter
    assert set(held_out.values()) == set(trained.values()) == {2}


@pytest.mark.parametrize("share", [0.25, 50])
def test_the_side_of_an_example_depends_on_no_order_seed_or_file(tiny, tmp_path, share):
    rows = rows_of(200)
    expected = sides(tiny, [jsonl(tmp_path / "a.jsonl", *rows)], share)

    shuffled = random.Random(0).sample(rows, len(rows))
    other_order = jsonl(tmp_path / "b.jsonl", *shuffled)
    assert sides(tiny, [other_order], share, "--seed", 7) == expected

    first = jsonl(tmp_path / "c.jsonl", *shuffled[:70])
    second = jsonl(tmp_path / "d.jsonl", *shuffled[70:])
    assert sides(tiny, [first, second], share) == expected

    array = tmp_path / "e.json"
    array.write_text(json.dumps(rows))
    assert sides(tiny, [array], share) == expected

    compressed = tmp_path / "f.jsonl.gz"
    compressed.write_bytes(gzip.compress((tmp_path / "b.jsonl").read_bytes()))
    assert sides(tiny, [compressed], share) == expected


def test_rows_that_are_appended_leave_the_others_on_their_sides(tiny, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *rows_of(200))
    trained, held_out = sides(tiny, [path], 0.25)
    jsonl(tmp_path / "a.jsonl", *rows_of(200), *rows_of(100, "new"))
    trained_then, held_out_then = sides(tiny, [path], 0.25)
    assert trained < trained_then
    assert held_out < held_out_then  # new rows are on both sides


def test_larger_shares_hold_out_all_that_smaller_ones_do(tiny, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *rows_of(200))
    held_out = [sides(tiny, [path], share)[1] for share in (0.1, 0.2, 0.4)]
    assert held_out[0] < held_out[1] < held_out[2]


def test_copies_are_on_one_side_however_their_json_is_written_and_whatever_else_is_in_the_row(tiny, tmp_path):
    lines = []
    for i in range(200):
        row = {"prompt": f"naïve {i} ", "completion": "b", "id": i}
        backwards = dict(reversed(row.items()))
        with_tabs = json.dumps(row, ensure_ascii=False, indent=1).replace("\n", "\t")
        without_blanks = json.dumps(row | {"id": -i}, separators=(",", ":"))  # what is not read makes no difference
        lines += [json.dumps(row), json.dumps(backwards), with_tabs, without_blanks]
    random.Random(0).shuffle(lines)
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    trained, held_out = sides(tiny, [tmp_path / "a.jsonl"], 0.3)
    assert not trained & held_out
    assert set(trained.values()) == set(held_out.values()) == {4}
    assert len(trained) + len(held_out) == 200


# (lines of a data file that train the same text, the hash of it). With other hashes, a share that is given again would
# hold out examples that an earlier run was trained on.
QUESTION_AND_ANSWER = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
HASHES = {
    "text": ([{"text": "a b"}, {"id": 1, "text": "a b"}, {"text": "a b", "id": None}], 30594124571915485),
    "a conversation": ([
        {"messages": QUESTION_AND_ANSWER},
        {"messages": [QUESTION_AND_ANSWER[0], QUESTION_AND_ANSWER[1] | {"weight": 1, "id": "x7"}], "tools": None},
        {"messages": [*QUESTION_AND_ANSWER, {"role": "user", "content": "thanks"}]},  # which trains nothing
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"instruction": "q", "input": "", "output": "a"},
        {"prompt": QUESTION_AND_ANSWER[:1], "completion": QUESTION_AND_ANSWER[1:]},
        {"question": "q", "answer": "a", "source": "mine"},  # its columns are renamed
    ], 40636668281621385),
}


@pytest.mark.parametrize(("rows", "expected"), HASHES.values(), ids=HASHES)
def test_the_hash_of_an_example_never_changes_and_is_that_of_the_text_it_trains(tiny, rows, expected):
    columns = [("question", "instruction"), ("answer", "output")]
    for row in rows:
        (example,) = data.parse_example(json.dumps(row), tiny, columns)
        assert example.hash == expected, row


def test_all_parts_of_a_long_text_are_on_one_side(tiny, tmp_path):
    rows = []
    for i in range(40):
        rows.append({"text": f"x{i} " * 100})  # more than three rows of 64 tokens
    trained, held_out = open_data([jsonl(tmp_path / "a.jsonl", *rows)], 0.3)
    assert not lines_in(trained) & lines_in(held_out)
    lines = lines_in(trained) | lines_in(held_out)
    assert len(lines) == 40
    assert min(lines.values()) > 3


@pytest.mark.parametrize("share", [0.3, 20])
def test_pairs_of_dpo_stay_together(tmp_path, share):
    rows = []
    for i in range(60):
        rows.append({"prompt": f"{i}", "chosen": " yes" * 3, "rejected": " no"})
    tokenizer = data.Tokenizer(HERE / "tiny", train_on="pairs")
    flags = ["--dpo", "--lora"]
    trained, held_out = open_data([jsonl(tmp_path / "a.jsonl", *rows)], share, *flags, tokenizer=tokenizer)
    # the chosen and the rejected answer of a line follow each other
    for loader in trained, held_out:
        assert (loader.documents.parts["line"][::2] == loader.documents.parts["line"][1::2]).all()
        assert set(lines_in(loader).values()) == {2}
    assert lines_in(trained).keys() | lines_in(held_out).keys() == set(range(1, 61))
    assert not lines_in(trained) & lines_in(held_out)
    if share == 20:
        assert len(lines_in(held_out)) == 20  # a pair counts as one


def test_all_documents_of_a_conversation_are_on_one_side(tmp_path):
    """Or a thought would be trained on in one document and evaluated in another."""
    rows = []
    for i in range(40):
        thoughtful = message("assistant", f"{i}", reasoning_content="hm")
        rows.append(chat(QUESTION, thoughtful, QUESTION, thoughtful))
    tokenizer = data.Tokenizer(model_folder(tmp_path, QWEN35))  # it rewrites the first answer
    path = jsonl(tmp_path / "a.jsonl", *rows)
    trained, held_out = open_data([path], 0.3, "--seq_len", 256, tokenizer=tokenizer)
    assert not lines_in(trained) & lines_in(held_out)
    lines = lines_in(trained) | lines_in(held_out)
    assert len(lines) == 40
    assert set(lines.values()) == {2}  # or the template did not rewrite the first answer


# ---------------------------------------------------------------- files


def test_a_file_is_tokenized_once(tmp_path, monkeypatch):
    def count(*args, original=data.tokenize):
        calls.append(args)
        return original(*args)

    calls = []
    monkeypatch.setattr(data, "tokenize", count)
    path = jsonl(tmp_path / "once.jsonl", *rows_of(30, "once"))
    for share in 0.2, 0.4, 9:
        open_data([path], share)
    assert len(calls) == 1


def test_a_small_file_may_be_on_one_side_as_a_whole(tiny, tmp_path, capsys):
    large = rows_of(100)
    path = jsonl(tmp_path / "large.jsonl", *large)
    _, held_out = sides(tiny, [path], 0.3)
    of_large = held_out.total()
    text = sorted(held_out)[0]
    small = jsonl(tmp_path / "small.jsonl", {"text": text})  # a copy of a row that is held out
    trained_loader, held_out_loader = open_data([path, small], 0.3)
    assert texts_in(tiny, held_out_loader)[text] == 2
    assert text not in texts_in(tiny, trained_loader)
    args = train.parse_args(["--data", path, small, "--eval_data", "0.3"])
    data.print_data(args, trained_loader, held_out_loader, tiny)
    said = capsys.readouterr().out
    assert f"--eval_data 0.3: {of_large + 1} of 101 examples are held out, chosen by a hash of each" in said
    assert "small.jsonl: 1 example (text)\n  0 tokens, 0.0% trained on" in said
    assert said.count("rows of at most") == 2


def test_a_file_given_twice_is_held_out_twice(tiny, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *rows_of(50))
    trained, held_out = sides(tiny, [path, path], 10)
    assert (len(trained), len(held_out)) == (40, 10)
    assert set(trained.values()) == set(held_out.values()) == {2}


@pytest.mark.parametrize(("share", "words"), [
    ("0.0001", ["--eval_data 0.0001 leaves no example of --data to evaluate on", "another share, or more data"]),
    ("0.9999", ["--eval_data 0.9999 leaves no example of --data to train on"]),
    ("3", ["--eval_data 3: --data has only 3 different examples"]),
    ("1000", ["--eval_data 1000: --data has only 3 different examples"]),
])
def test_a_share_that_leaves_a_side_empty_is_refused(tmp_path, share, words):
    path = jsonl(tmp_path / "a.jsonl", *rows_of(3))
    with pytest.raises(SystemExit) as raised:
        open_data([path], share)
    assert_says(str(raised.value), words)


def test_the_checksum_that_a_resume_compares_depends_on_the_share(tiny, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *rows_of(50))
    folder = data.tokenized(path, tiny)
    whole = data.open_documents([folder], [path], 64).checksum
    checksums = {whole}
    for share in 0.2, 0.5:
        trained, held_out = open_data([path], share)
        checksums |= {trained.documents.checksum, held_out.documents.checksum}
    assert len(checksums) == 5


def test_each_of_several_evaluation_files_has_a_loss(tmp_path):
    model, args = build()
    ranks = train.Ranks(False, 1800)
    paths = [jsonl(tmp_path / f"{name}.jsonl", *rows_of(n, name)) for name, n in (("short", 5), ("longer one", 9))]

    def evaluation(*eval_data):
        args_of_data = train.parse_args(
            ["--data", paths[0], "--eval_data", *eval_data, "--seq_len", "64", "--precision", "fp32"])
        _, loader = data.open_data(args_of_data, data.Tokenizer(HERE / "tiny"), 4096, ranks)
        return train.evaluate(model, loader, ranks, args)

    both = evaluation(*paths)
    alone = [evaluation(path) for path in paths]
    losses = [one["eval_loss"] for one in alone]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    # float32 sums, of other rows in a batch
    assert [both[f"eval_loss_{path}"] for path in paths] == pytest.approx(losses, rel=1e-5)
    n_tokens = [one["eval_tokens"] for one in alone]
    assert both["eval_tokens"] == sum(n_tokens)
    mean = sum(loss * n for loss, n in zip(losses, n_tokens)) / sum(n_tokens)
    assert both["eval_loss"] == pytest.approx(mean, rel=1e-5)
    assert not any(name.startswith("eval_loss_") for name in alone[0])


# ---------------------------------------------------------------- a run


def check_sides_on_ranks(ranks, folder, expected):
    """Every rank counts the same examples on the same sides."""
    args = train.parse_args(["--data", f"{folder}/a.jsonl", "--eval_data", "0.25", "--seq_len", "64"])
    loaders = data.open_data(args, data.Tokenizer(HERE / "tiny"), 4096, ranks)
    assert [loader.documents.parts["line"].tolist() for loader in loaders] == expected
    assert loaders[0].world == ranks.world  # each still has rows of its own


def test_sides_are_the_same_on_every_number_of_ranks(tmp_path):
    loaders = open_data([jsonl(tmp_path / "a.jsonl", *rows_of(200))], 0.25)
    expected = [loader.documents.parts["line"].tolist() for loader in loaders]
    on_ranks(3, check_sides_on_ranks, tmp_path, expected)


@pytest.fixture(scope="module")
def job(folder, chats):
    return ["--model", folder, "--random_init", "--data", chats, "--eval_data", "0.2", "--eval_every", 1,
            "--seq_len", 128, "--precision", "fp32", "--log_every", 1, "--save_every", 1, "--lr", 1e-2]


def evaluations(rows):
    return [(row["step"], row["eval_loss"], row["eval_tokens"]) for row in rows if "eval_loss" in row]


def test_a_resumed_run_holds_the_same_out_and_another_share_is_refused_by_name(job, tmp_path):
    job = [*job, "--schedule", "constant", "--warmup", 0]  # no rate depends on the number of steps
    rows, said, codes = run_ranks(1, [*job, "--steps", 3], tmp_path / "whole")
    assert codes == [0], said
    assert re.search(r"--eval_data 0\.2: \d+ of 80 examples are held out", said)

    _, said, codes = run_ranks(1, [*job, "--steps", 2], tmp_path / "out")
    assert codes == [0], said
    job = [*job, "--steps", 3, "--resume"]
    for share in "0.3", "16":
        other = list(job)
        other[job.index("--eval_data") + 1] = share
        _, refused, codes = run_ranks(1, other, tmp_path / "out")
        assert codes == [1]
        assert_says(refused, [f"the share of --data that --eval_data holds out was 0.2, is {share}"])

    resumed, said, codes = run_ranks(1, job, tmp_path / "out")
    assert codes == [0], said
    assert len(evaluations(resumed)) == 3
    assert evaluations(resumed) == evaluations(rows)  # to the last bit


def test_percent_is_a_share():
    assert data.share_of(["10%"]) == 0.1
    with pytest.raises(ValueError, match="expected files, or one number alone"):
        data.share_of(["100%"])
