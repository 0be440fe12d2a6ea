"""From tokens to batches: long documents, the cache, packing, the order of rows and how they are dealt
out, and that documents in one row do not see each other."""

import errno
import itertools
import json
import os
import re
import signal
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import HERE, build, documents_of, pieces, processes, read_data
from test_bad_input import assert_says
from test_formats import ANSWER, END, QUESTION, chat, jsonl, message, model_folder

import data
from data import IGNORE


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "oomph"


def folders_in(cache):
    """What is in a cache beside its lock."""
    return {path for path in cache.iterdir() if path.name != "lock"}


def windows(ids, mask, seq_len):
    """Parts of seq_len positions: each begins with the last target of the one before."""
    return [(ids[i : i + seq_len + 1], mask[i : i + seq_len + 1]) for i in range(0, max(len(ids) - 1, 1), seq_len)]


LONG_CHAT = chat(message("user", "a b c " * 30), message("assistant", "d e " * 20), message("user", "f " * 40), ANSWER)
LONG_ROWS = {"text": [{"text": "w x y " * 40}, {"text": "z"}, {"text": "v " * 31}, {"text": ""}],
             "messages": [LONG_CHAT, chat(QUESTION, ANSWER), chat(QUESTION, ANSWER), chat(QUESTION)]}
POLICIES = {"split": lambda parts: parts, "truncate": lambda parts: parts[:1],
            "drop": lambda parts: parts if len(parts) == 1 else []}


@pytest.mark.parametrize("policy", [None, *POLICIES])
@pytest.mark.parametrize("kind", LONG_ROWS)
@pytest.mark.parametrize("seq_len", [30, 31, 32, 33])
def test_what_becomes_of_long_documents(tiny, tmp_path, kind, policy, seq_len):
    path = jsonl(tmp_path / "a.jsonl", *LONG_ROWS[kind])
    whole = pieces(read_data(path, tiny, 10**6)[0])
    assert len(whole) == 3  # the last has no target
    parts_of = POLICIES[policy or ("split" if kind == "text" else "drop")]
    expected = [(line, part) for line, document in enumerate(whole, 1) for part in parts_of(windows(*document, seq_len))
                if any(part[1][1:])]
    documents, file = read_data(path, tiny, seq_len, overflow=policy)
    assert list(zip(documents.line.tolist(), pieces(documents), strict=True)) == expected
    assert documents.n_targets.tolist() == [sum(mask[1:]) for _, (_, mask) in expected]
    lengths = [len(ids) - 1 for ids, _ in whole]
    assert (file.longest, file.n_long) == (max(lengths), sum(n > seq_len for n in lengths))
    assert file.n_tokens == sum(len(ids) - 1 for _, (ids, _) in expected)


def test_tokens_beyond_the_embeddings_are_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"a\.jsonl: token \d+ of 300 embeddings: the tokenizer belongs to another"):
        read_data(jsonl(tmp_path / "a.jsonl", {"text": "word"}), tiny, vocab_size=300)


def test_files_follow_each_other_in_the_documents_and_may_come_twice(tiny, tmp_path):
    paths = [jsonl(tmp_path / f"{name}.jsonl", *({"text": f"{name} {i}"} for i in (1, 2, 3))) for name in "ab"]
    paths.insert(0, paths[0])
    folders = [data.tokenized(path, False, tiny) for path in paths]
    documents = data.open_documents(folders, paths, 64)
    expected = [f"{name} {i}" for name in "aab" for i in (1, 2, 3)]
    assert [tiny.core.decode(ids) for ids, _ in pieces(documents)] == expected
    places = data.Loader(documents, 64, True, 1, 0, 0, 1).places(0, 1)  # the one row has all of them
    assert sorted(places) == sorted(f"{tmp_path}/{name}.jsonl:{i}" for name in "aab" for i in (1, 2, 3))


# ---------------------------------------------------------------- the cache


@pytest.mark.parametrize("change", [None, "content", "kind", "template", "tokenizer", "variables"])
def test_folder_in_the_cache_depends_on_what_the_tokens_depend_on(tiny, tmp_path, cache, change):
    path = Path(jsonl(tmp_path / "a.jsonl", chat(QUESTION, ANSWER)))
    folder = data.tokenized(str(path), False, tiny)
    template = (HERE / "tiny" / "chat_template.jinja").read_text() + ("{# other #}" if change == "template" else "")
    model = model_folder(tmp_path, template, extra_tokens=["<unk>"] if change == "tokenizer" else [])
    if change == "variables":
        (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_start|>"}))
    if change == "content":
        path.write_bytes(path.read_bytes().replace(b"4", b"5"))
    path = path.rename(tmp_path / ("a.txt" if change == "kind" else "b.jsonl"))
    found = data.tokenized(str(path), False, data.Tokenizer(model))
    assert (found == folder) == (change is None) and folders_in(cache) == {found, folder}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt(), ValueError("bad")])
def test_error_while_tokenizing_leaves_nothing_and_says_where_it_was(tiny, tmp_path, cache, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(data, "encode_lines", fail)
    with pytest.raises(type(error)) as raised:
        data.tokenized(jsonl(tmp_path / "a.jsonl", chat(QUESTION, ANSWER)), False, tiny)
    if isinstance(error, OSError):
        words = [f"a.jsonl: {cache} (delete this folder", "XDG_CACHE_HOME", "not written: No space"]
        assert_says(str(raised.value), words)
    assert folders_in(cache) == set()


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "one bit": flip_a_bit,
    "removed": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 8),  # a whole number of items of each array
    "longer": lambda path: path.write_bytes(path.read_bytes() + bytes(8)),
    "a pipe": replace_by_a_pipe,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*data.ARRAYS, "report.json"])
def test_a_damaged_file_in_the_cache_is_made_again_and_said(tiny, tmp_path, cache, capsys, name, damage):
    path = jsonl(tmp_path / "a.jsonl", chat(QUESTION, ANSWER), {"text": "a b"})
    folder = data.tokenized(path, False, tiny)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    DAMAGES[damage](folder / name)
    assert data.tokenized(path, False, tiny) == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
    assert folders_in(cache) == {folder}
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert_says(said, [f"{path} is tokenized again", str(folder), name])


def edit_report(folder, **changes):
    """Changes report.json, with the checksum that belongs to the change: only the counts can tell."""
    report = data.read_json(folder / "report.json") | changes
    (folder / "report.json").write_text(json.dumps(data.with_checksum(report)))


def one_token_more(folder):
    edit_report(folder, n_tokens=data.read_report(folder).n_tokens + 1)


def one_document_more(folder):
    edit_report(folder, n_documents=data.read_report(folder).n_documents + 1)


def one_line_less(folder):
    os.truncate(folder / "lines", (folder / "lines").stat().st_size - 8)
    edit_report(folder, checksums=data.checksums_of(folder))


def a_longer_document(folder):
    lengths = np.fromfile(folder / "lengths", np.int64)
    lengths[0] += 1
    lengths.tofile(folder / "lengths")
    edit_report(folder, checksums=data.checksums_of(folder))


@pytest.mark.parametrize("change", [one_token_more, one_document_more, one_line_less, a_longer_document])
def test_counts_that_do_not_agree_are_made_again_although_checksums_fit(tiny, tmp_path, cache, capsys, change):
    path = jsonl(tmp_path / "a.jsonl", chat(QUESTION, ANSWER), {"text": "a b"})
    folder = data.tokenized(path, False, tiny)
    report = (folder / "report.json").read_text()
    change(folder)
    data.tokenized(path, False, tiny)
    assert (folder / "report.json").read_text() == report
    assert "is tokenized again" in capsys.readouterr().out


def test_an_edited_count_in_the_report_is_noticed(tiny, tmp_path, cache):
    path = jsonl(tmp_path / "a.jsonl", chat(QUESTION, ANSWER))
    report = data.tokenized(path, False, tiny) / "report.json"
    whole = report.read_text()
    for count in ("n_bad", "n_tokens", "largest_id", "n_documents"):
        content = json.loads(whole)
        content[count] += 1
        report.write_text(json.dumps(content))
        data.tokenized(path, False, tiny)
        assert report.read_text() == whole


@pytest.mark.parametrize("name", data.ARRAYS)
def test_the_checksum_that_a_resume_compares_depends_on_every_array(tiny, tmp_path, cache, name):
    path = jsonl(tmp_path / "a.jsonl", chat(QUESTION, ANSWER), {"text": "a b"})
    folder = data.tokenized(path, False, tiny)
    before = data.open_documents([folder], [path], 64).checksum
    content = bytearray((folder / name).read_bytes())
    content[0] ^= 1  # the first token is no target, so no count of targets changes with its flag
    (folder / name).write_bytes(content)
    edit_report(folder, checksums=data.checksums_of(folder))
    assert data.open_documents([folder], [path], 64).checksum != before


def test_the_checksum_of_a_file_is_that_of_its_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CRC_BLOCK", 1000)
    content = np.random.default_rng(0).bytes(2500)
    for key in data.ARRAYS:
        (tmp_path / key).write_bytes(content)
    expected = [zlib.crc32(content[start : start + 1000]) for start in (0, 1000, 2000)]
    assert data.checksums_of(tmp_path) == dict.fromkeys(data.ARRAYS, expected)


def test_a_data_file_that_changes_while_it_is_read_is_refused(tiny, tmp_path, cache, monkeypatch):
    def replace(*args, original=data.encode_lines):
        jsonl(tmp_path / "a.jsonl", {"text": "c d"})  # of the same length, and maybe within the same second
        return original(*args)

    path = jsonl(tmp_path / "a.jsonl", {"text": "a b"})
    monkeypatch.setattr(data, "encode_lines", replace)
    with pytest.raises(ValueError, match=r"a\.jsonl: changed while it was read"):
        data.tokenized(path, False, tiny)
    assert folders_in(cache) == set()


def test_whoever_finishes_a_folder_second_takes_the_first_one(tiny, tmp_path, cache, monkeypatch):
    def rename(part, target, original=Path.rename):
        monkeypatch.setattr(Path, "rename", original)
        data.tokenized(path, False, tiny)  # another process, at the last moment
        first.append(target.stat().st_ino)
        return original(part, target)

    first = []
    path = jsonl(tmp_path / "a.jsonl", {"text": "a b"})
    monkeypatch.setattr(Path, "rename", rename)
    folder = data.tokenized(path, False, tiny)
    assert folders_in(cache) == {folder} and [folder.stat().st_ino] == first


def tokenize_for_ever(path, cache_home, pipe):
    """A process that says when its part is there, and then waits to be killed."""
    def wait(*_):
        pipe.send("writing")
        signal.pause()

    os.environ["XDG_CACHE_HOME"] = cache_home
    data.encode_lines = wait
    data.tokenized(path, False, data.Tokenizer(HERE / "tiny"))


def test_only_parts_of_killed_processes_of_this_machine_are_removed(tiny, tmp_path, cache):
    other = cache / "0123.another-machine.4567.part"  # it shares this home, and may be alive
    other.mkdir(parents=True)
    paths = [jsonl(tmp_path / f"{name}.jsonl", {"text": name}) for name in "abc"]
    mine, its = processes.Pipe()
    process = processes.Process(target=tokenize_for_ever, args=(paths[0], str(cache.parent), its), daemon=True)
    process.start()
    its.close()
    assert mine.recv() == "writing"
    folder_b = data.tokenized(paths[1], False, tiny)
    (part,) = folders_in(cache) - {other, folder_b}
    assert part.suffix == ".part"  # its process lives
    process.kill()
    process.join()
    folder_c = data.tokenized(paths[2], False, tiny)
    assert folders_in(cache) == {other, folder_b, folder_c}


def test_a_disk_without_locks_keeps_all_parts(tiny, tmp_path, cache, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    part = cache / f"0123.{data.MACHINE}.4567.part"
    part.mkdir(parents=True)
    monkeypatch.setattr(data.fcntl, "flock", flock)
    folder = data.tokenized(jsonl(tmp_path / "a.jsonl", {"text": "a b"}), False, tiny)
    assert folders_in(cache) == {folder, part}


def test_whole_folder_in_the_cache_is_not_made_again(tiny, tmp_path, cache, monkeypatch, capsys):
    path = jsonl(tmp_path / "a.jsonl", chat(QUESTION, ANSWER))
    folder = data.tokenized(path, False, tiny)
    monkeypatch.delattr(data, "tokenize")
    assert data.tokenized(path, False, tiny) == folder and capsys.readouterr().out == ""


def test_chunks_make_no_difference_but_for_texts(tiny, tmp_path, cache, monkeypatch):
    rows = ({"prompt": f"{i} ", "completion": "self é☃ def f(x):\n" * (i % 40)} for i in range(1500))
    lines = ("{bad\n" if i % 200 == 7 else json.dumps(row) + "\n" for i, row in enumerate(rows))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    whole = data.tokenized(str(tmp_path / "a.jsonl"), False, tiny).rename(cache / "whole")
    monkeypatch.setattr(data, "READ_BYTES", 2**14)
    folder = data.tokenized(str(tmp_path / "a.jsonl"), False, tiny)
    for key in data.ARRAYS:
        assert (folder / key).read_bytes() == (whole / key).read_bytes()
    reports = [data.read_json(path / "report.json") for path in (folder, whole)]
    assert reports[0] == reports[1] and reports[0]["n_bad"] == 8
    assert re.findall(r"\n  line (\d+): not valid JSON", reports[0]["errors"]) == ["8", "208", "408", "608", "808"]


# ---------------------------------------------------------------- packing and loading


def test_packing_holds_each_document_once_in_rows_of_which_no_two_fit_into_one():
    rng = np.random.default_rng(0)
    for _ in range(300):  # many short documents, few long ones, and all sizes between
        seq_len, n = int(rng.integers(1, 200)), int(rng.integers(1, 120))
        lengths = rng.integers(1, rng.integers(1, seq_len + 1) + 1, size=n)
        rows = data.pack(lengths, seq_len)
        assert sorted(itertools.chain(*rows)) == list(range(n))
        fill = sorted(lengths[row].sum() for row in rows)
        assert fill[-1] <= seq_len and (len(fill) == 1 or fill[0] + fill[1] > seq_len)


def make_documents(lengths, supervised=None):
    """Documents of the given numbers of tokens; the tokens are 0, 1, 2, ... so that each is known by its value."""
    starts = np.cumsum([0, *lengths])
    tokens = np.arange(starts[-1], dtype=np.int32)
    return documents_of(tokens, np.ones(len(tokens), bool) if supervised is None else supervised, starts)


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 30, size=101)
    return make_documents(lengths, rng.random(lengths.sum()) < 0.5)


def loader_of(documents, packing=True, batch_size=1, seed=0, rank=0, world=1, seq_len=32):
    return data.Loader(documents, seq_len, packing, batch_size, seed, rank, world)


def rows_of(batch):
    """The documents of a batch, row by row, without padding."""
    tokens, width = batch.tokens.flatten().tolist(), batch.tokens.shape[1]
    rows = [[] for _ in batch.tokens]
    for start, stop in batch.spans.pairs:
        rows[start // width] += tokens[start:stop]
    return rows


def global_batches(documents, batch_size, grad_accum, world, packing):
    """Rows of five steps in the order of the global batch: micro-batch by micro-batch, rank by rank."""
    loaders = [loader_of(documents, packing, batch_size, 0, rank, world) for rank in range(world)]
    for step in range(5):
        ranks, counts = zip(*(loader.step(step, grad_accum) for loader in loaders))
        batches = [batch for micro in zip(*ranks, strict=True) for batch in micro]
        lengths = [stop - start for batch in batches for start, stop in batch.spans.pairs]
        n_targets = sum(len(batch.keep_S) for batch in batches)
        squares = sum(length**2 for length in lengths)
        assert counts == (data.lm.Counts(n_targets, sum(lengths), squares, len(lengths)),) * world
        yield [row for batch in batches for row in rows_of(batch)]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("split", [(2, 3, 2), (3, 2, 2), (1, 3, 4), (1, 12, 1), (1, 1, 12), (6, 1, 2), (4, 1, 3)])
def test_global_batch_does_not_depend_on_how_it_is_split(documents, split, packing):
    expected = list(global_batches(documents, 12, 1, 1, packing))
    assert len(expected[0]) == 12
    assert list(global_batches(documents, *split, packing)) == expected  # five steps cross the end of an epoch


@pytest.mark.parametrize("packing", [True, False])
def test_rows_come_once_an_epoch_in_the_order_of_seed_and_epoch_the_largest_first(documents, packing):
    for seed, epoch in itertools.product(range(3), range(3)):
        loader = loader_of(documents, packing, seed=seed)
        n = len(loader.rows)
        targets = loader.per_row.targets.tolist()
        tokens = loader.per_row.tokens.tolist()
        order = [loader.rows_of(epoch * n + i, 1)[0][0] for i in range(n)]
        shuffled = np.random.default_rng([seed, epoch]).permutation(n).tolist()
        if epoch == 0:  # the first row trades places with the largest: memory runs out at step 0 or not at all
            largest = (targets[order[0]], 0) if packing else (tokens[order[0]], targets[order[0]])
            assert largest == ((max(targets), 0) if packing else max(zip(tokens, targets)))
            i = shuffled.index(order[0])
            shuffled[0], shuffled[i] = shuffled[i], shuffled[0]
        assert order == shuffled


X = IGNORE
BATCHES = {True: ([[0, 1, 2, 4, 5, 7, 0, 0]], [[1, X, 3, X, X, 8, X, X]], [[0, 1, 2, 0, 1, 0, 0, 0]], [0, 2, 5]),
           False: ([[0, 1, 2], [4, 5, 0], [7, 0, 0]], [[1, X, 3], [X, X, X], [8, X, X]],
                   [[0, 1, 2], [0, 1, 0], [0, 0, 0]], [0, 2, 6])}


@pytest.mark.parametrize("packing", [True, False])
def test_batch_is_right_to_the_token(packing):
    """Documents 0-3, 4-6 and 7-8; tokens 2, 5 and 6 are not supervised."""
    documents = make_documents([4, 3, 2], np.array([1, 1, 0, 1, 1, 0, 0, 1, 1], bool))
    batch = loader_of(documents, packing, 3, seq_len=8).batch([0] if packing else [0, 1, 2])
    assert tuple(tensor.tolist() for tensor in batch[:4]) == BATCHES[packing]
    assert batch.spans.pairs == [(0, 3), (3, 5), (5, 6) if packing else (6, 7)] and batch.spans.longest == 3
    assert batch.spans.bounds.tolist() == ([0, 3, 5, 6, 8] if packing else [0, 3, 5, 6, 7, 9])  # of padding too


@pytest.mark.parametrize("packing", [True, False])
def test_a_token_draws_the_same_dropout_however_a_step_is_split(packing):
    documents = make_documents([4, 3, 6, 5, 2, 4, 3, 7, 5, 4])

    def drawn(step, batch_size, world, grad_accum, shards=1):
        """{(row of the step, column): (token, bits)} of all ranks."""
        found = {}
        for rank in range(world):
            loader = data.Loader(documents, 8, packing, batch_size, 3, rank, world, shards)
            for i, batch in enumerate(loader.step(step, grad_accum)[0]):
                first_row = (i * loader.world + loader.rank) * batch_size
                T = 8 if packing else batch.tokens.numel() * shards // batch_size
                first = loader.shard * batch.tokens.numel()
                for at, pair in enumerate(zip(batch.tokens.flatten().tolist(), batch.dropout_bits.flatten().tolist())):
                    row, column = divmod(first + at, T)
                    if row < batch_size:  # not what fills up the shards
                        found[first_row + row, column] = pair
        return found

    one = drawn(0, 6, 1, 1)
    assert len({bits for _, bits in one.values()}) == len(one)  # no two tokens of a step share theirs
    splits = [(1, 1, 6), (2, 1, 3), (1, 2, 3), (2, 3, 1)]
    if packing:
        splits += [(3, 4, 1, 2), (1, 3, 6, 3)]
    for split in splits:
        other = drawn(0, *split)
        assert other.keys() <= one.keys()  # a row that is not packed has the columns of the longest beside it
        assert all(one[place] == pair for place, pair in other.items())
        assert {row for row, _ in other} == {*range(6)}
    assert not {bits for _, bits in one.values()} & {bits for _, bits in drawn(1, 6, 1, 1).values()}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_evaluation_covers_every_row_once_and_in_order_over_three_ranks(documents, batch_size, packing):
    one = loader_of(documents, packing)
    n_rows = len(one.rows)
    assert n_rows % 3  # ranks have unequal numbers of rows, and the last batches are empty
    ranks = [list(loader_of(documents, packing, batch_size, 3, rank, 3).once()) for rank in range(3)]
    rows = []
    for batches in zip(*ranks, strict=True):
        for batch in batches:
            rows += [row for row in rows_of(batch) if row]
    assert rows == rows_of(one.batch(range(n_rows)))


def test_inspected_example_shows_what_is_trained_on(tiny, tmp_path):
    documents, _ = read_data(jsonl(tmp_path / "a.jsonl", chat(message("user", "\x1b[2J"), ANSWER)), tiny)
    text = data.show(tiny, documents, 0)
    assert f"⟦{ANSWER['content']}{END}⟧" in text and "\033" not in text and r"\x1b[2J" in text


@pytest.fixture(scope="module")
def transformer():
    return build(initializer_range=0.2)[0]  # a neighbour's token would move every logit far beyond rounding


def packed_row(lengths, change=None):
    """One row of documents with random tokens; those of document `change` are others."""
    documents = make_documents(lengths)
    tokens = documents.files[0].tokens
    tokens[:] = np.random.default_rng(0).integers(0, 64, size=len(tokens))
    if change is not None:
        tokens[documents.start[change] : documents.stop[change]] ^= 1
    return loader_of(documents, seq_len=sum(lengths) - len(lengths)).batch([0])


@pytest.mark.parametrize("change", [0, 1, 2])
@pytest.mark.parametrize("lengths", [[9, 6, 12], [9, 9, 9]], ids=["unequal", "equal"])  # the branches of attend()
@torch.no_grad()
def test_packed_documents_do_not_attend_to_each_other(transformer, lengths, change):
    batches = packed_row(lengths), packed_row(lengths, change)
    assert (batches[0].spans.bounds is None) == (len(set(lengths)) == 1)
    logits = [transformer(batch.tokens, None, batch.positions, batch.spans).flatten(0, 1) for batch in batches]
    for start, stop in batches[0].spans.pairs:
        same_tokens = torch.equal(*(batch.tokens[0, start:stop] for batch in batches))
        # bit for bit: the same products of the same shapes, and no neighbour in them
        assert torch.equal(*(logits_NV[start:stop] for logits_NV in logits)) == same_tokens


@torch.no_grad()
def test_packed_loss_is_the_sum_of_the_losses_alone(transformer):
    batch = packed_row([9, 6, 12])
    packed = transformer(batch.tokens, batch.targets, batch.positions, batch.spans, batch.keep_S)
    alone = sum(transformer(batch.tokens[:, a:b], batch.targets[:, a:b]) for a, b in batch.spans.pairs)
    # float32: matrix products of another height are summed in another order, about 1e-6 of it
    assert float(packed) == pytest.approx(float(alone), rel=1e-5)
