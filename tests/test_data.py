"""From tokens to batches, in the order in which data.py does it: what becomes of long documents, the cache of tokenized
files, packing, how rows are ordered and dealt out to ranks, and what is in a batch.

The last section holds promise 5 (README.md), no contamination. Each of its claims is a test:

    documents cannot see each other through attention,     test_packed_documents_do_not_see_each_other
      convolution or a recurrent state                     test_no_gradient_crosses_into_another_document
    positions restart                                      test_positions_restart_in_every_document
    the mask is right to the token                         test_the_mask_of_a_batch_is_right_to_the_token
                                                           test_exactly_the_answers_of_packed_chats_are_targets
    no target crosses into the next document               test_no_target_crosses_into_the_next_document
    so a packed document learns what it would learn alone  test_packed_loss_is_the_sum_of_the_losses_alone

test_formats.py says which characters of a chat are trained on. test_qwen35.py and test_windows.py compare packed
documents with transformers, which computed each of them alone.
"""

import errno
import itertools
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import HERE, MUSE, build, documents_of, pieces, read_data
from test_bad_input import assert_says
from test_formats import ANSWER, END, QUESTION, chat, jsonl, message, model_folder

import data
import model as lm
from data import IGNORE

# ---------------------------------------------------------------- long documents

TEXTS = [
    {"text": "w x y " * 40},
    {"text": "z"},
    {"text": "v " * 31},  # needs exactly 32 positions
    {"text": ""},  # has no target
]
LONG_CHAT = chat(
    message("user", "a b c " * 30),  # longer than a row: the first parts of this chat have no target
    message("assistant", "d e " * 20),
    message("user", "f " * 40),
    ANSWER,
)
CHATS = [
    LONG_CHAT,
    chat(QUESTION, ANSWER),
    chat(QUESTION, ANSWER),
    chat(QUESTION),  # has no target
]
ROWS = {"text": TEXTS, "messages": CHATS}


class Part(NamedTuple):
    """A document, or a part of it that fits into a row."""

    line: int  # of the file
    ids: list
    supervised: list

    @property
    def n_positions(self):
        return len(self.ids) - 1  # the last token is a target only

    @property
    def n_targets(self):
        return sum(self.supervised[1:])  # and the first one is none


def parts_in(documents):
    parts = []
    for line, (ids, supervised) in zip(documents.parts["line"].tolist(), pieces(documents), strict=True):
        parts.append(Part(line, ids, supervised))
    return parts


def split(document, seq_len):
    """Parts of seq_len positions. Each begins with the last target of the one before, so no target is lost."""
    parts = []
    n_positions = max(document.n_positions, 1)  # a document of one token is one part
    for start in range(0, n_positions, seq_len):
        stop = start + seq_len + 1
        ids = document.ids[start:stop]
        supervised = document.supervised[start:stop]
        parts.append(Part(document.line, ids, supervised))
    return parts


def truncate(document, seq_len):
    return split(document, seq_len)[:1]


def drop(document, seq_len):
    if document.n_positions > seq_len:
        return []
    return [document]


POLICIES = {"split": split, "truncate": truncate, "drop": drop}
# a part of a chat would be an answer without its question
DEFAULTS = {"text": "split", "messages": "drop"}


@pytest.mark.parametrize("policy", [None, *POLICIES])
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("seq_len", [30, 31, 32, 33])  # around the 32 positions of a text
def test_what_becomes_of_long_documents(tiny, tmp_path, kind, policy, seq_len):
    path = jsonl(tmp_path / "a.jsonl", *ROWS[kind])
    row_for_all = 10**6
    whole = parts_in(read_data(path, tiny, row_for_all)[0])
    lines = [document.line for document in whole]
    assert lines == [1, 2, 3]  # the fourth one has no target

    fit = POLICIES[policy or DEFAULTS[kind]]
    expected = []
    for document in whole:
        for part in fit(document, seq_len):
            if part.n_targets:  # else it would cost time and train nothing
                expected.append(part)
    documents, file = read_data(path, tiny, seq_len, overflow=policy)
    assert parts_in(documents) == expected
    assert documents.parts["n_targets"].tolist() == [part.n_targets for part in expected]

    lengths = [document.n_positions for document in whole]
    assert file.longest == max(lengths)
    assert file.n_long == sum(length > seq_len for length in lengths)
    assert file.n_tokens == sum(part.n_positions for part in expected)


def test_tokens_beyond_the_embeddings_are_refused(tiny, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"text": "word"})
    message = r"a\.jsonl: token \d+ of 300 embeddings: the tokenizer belongs to another"
    with pytest.raises(ValueError, match=message):
        read_data(path, tiny, vocab_size=300)


def test_files_follow_each_other_in_the_documents_and_may_come_twice(tiny, tmp_path):
    names = {}
    for name in "ab":
        rows = [{"text": f"{name} {line}"} for line in (1, 2, 3)]
        names[name] = jsonl(tmp_path / f"{name}.jsonl", *rows)
    given = [names["a"], names["a"], names["b"]]
    folders = [tokenized(name, tiny) for name in given]
    documents = data.open_documents(folders, given, 64)

    texts = [tiny.core.decode(ids) for ids, _ in pieces(documents)]
    assert texts == ["a 1", "a 2", "a 3", "a 1", "a 2", "a 3", "b 1", "b 2", "b 3"]
    loader = loader_of(documents, seq_len=64)
    assert len(loader.rows) == 1
    # a row is no longer in the order of the files: it begins with its longest document
    places = sorted(loader.places(0, 1))
    assert places == sorted(f"{name}:{line}" for name in given for line in (1, 2, 3))


# ---------------------------------------------------------------- the cache
# Promise 4 (README.md): what is read from a cache is what was written there, or it is made again.


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the test's own. Other tests share one, which saves them the tokenizing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "oomph"


@pytest.fixture
def path(tmp_path):
    """A data file with a chat and a text."""
    return jsonl(tmp_path / "a.jsonl", chat(QUESTION, ANSWER), {"text": "a b"})


@pytest.fixture
def cached(path, cache, tiny):
    """The folder in the cache that belongs to the data file."""
    return tokenized(path, tiny)


def tokenized(path, tokenizer):
    """The folder in the cache for a file of --data, which is made if it is missing."""
    return data.tokenized(str(path), tokenizer)


def folders_in(cache):
    """What is in a cache beside its lock."""
    return {found for found in cache.iterdir() if found.name != "lock"}


def contents(folder):
    """{name: bytes} of the files in a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def write_json(path, value):
    path.write_text(json.dumps(value))


def test_a_whole_folder_in_the_cache_is_not_made_again(path, cached, tiny, monkeypatch, capsys):
    monkeypatch.delattr(data, "tokenize")  # which would make it
    assert tokenized(path, tiny) == cached
    assert capsys.readouterr().out == ""


def change_nothing(path, model):
    return path


def change_content(path, model):
    path.write_bytes(path.read_bytes().replace(b"4", b"5"))
    return path


def change_kind(path, model):
    return path.rename(path.with_suffix(".json"))


def change_template(path, model):
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{# other #}")  # a comment, which renders the same text
    return path


def change_tokenizer(path, model):
    # no text here has the new token: the name depends on the tokenizer, not on what it does to this file
    model_folder(model, extra_tokens=["<unk>"])
    return path


def change_variables(path, model):
    """What the template sees as eos_token."""
    write_json(model / "tokenizer_config.json", {"eos_token": "<|im_start|>"})
    return path


CHANGES = [
    change_nothing,
    change_content,
    change_kind,
    change_template,
    change_tokenizer,
    change_variables,
]


@pytest.mark.parametrize("change", CHANGES)
def test_folder_in_the_cache_depends_on_what_the_tokens_depend_on(path, cached, cache, tmp_path, change):
    # another name of the file and another place of the model, which alone change no token
    renamed = Path(path).rename(tmp_path / "b.jsonl")
    template = (HERE / "tiny" / "chat_template.jinja").read_text()
    model = model_folder(tmp_path, template)
    changed = change(renamed, model)
    found = tokenized(changed, data.Tokenizer(model))
    assert (found == cached) == (change is change_nothing)
    assert folders_in(cache) == {found, cached}


DISK_IS_FULL = OSError(errno.ENOSPC, "No space left")


@pytest.mark.parametrize("error", [DISK_IS_FULL, KeyboardInterrupt(), ValueError("bad")])
def test_error_while_tokenizing_leaves_nothing_and_says_where_it_was(path, tiny, cache, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(data, "documents_of", fail)  # when the part is already there
    with pytest.raises(type(error)) as raised:
        tokenized(path, tiny)
    if error is DISK_IS_FULL:  # names the file, the folder that is full, and what to do
        words = [f"a.jsonl: {cache} (XDG_CACHE_HOME can name another folder)", "not written: No space"]
        assert_says(str(raised.value), words)
    assert folders_in(cache) == set()


def test_what_a_killed_process_has_left_in_the_cache_goes_and_what_another_works_in_stays(path, cache, tiny):
    left = cache / "tmp_of_a_killed_one"  # it had not got to its lock
    also_left = cache / "tmp_that_was_locked"
    for place in (left, also_left):
        (place / "documents").mkdir(parents=True)
        (place / "documents/tokens").write_bytes(bytes(8))
    (also_left / "lock").touch()  # SIGKILL ends a lock
    with data.own_folder(cache) as unfinished:
        assert not left.exists() and not also_left.exists()
        folder = tokenized(path, tiny)
        assert unfinished.exists()
        assert folders_in(cache) == {folder, unfinished.parent}
    assert folders_in(cache) == {folder}


def test_a_folder_that_another_start_removes_before_it_is_locked_is_made_again(cache, monkeypatch):
    """As by the start of a second machine with the same home, which takes it for one that a killed process has left."""
    flock = data.fcntl.flock
    removed = []

    def late(file, how):
        if not removed:
            removed.append(Path(file.name).parent)
            data.remove(removed[0])
        flock(file, how)

    cache.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(data.fcntl, "flock", late)
    with data.own_folder(cache) as unfinished:
        assert unfinished.exists() and unfinished.parent != removed[0]
    assert folders_in(cache) == set()


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_file_that_changes_while_it_is_read_leaves_nothing_in_the_cache(path, cache, tiny, monkeypatch, is_complete):
    """Or the new tokens would stand under the hash of the old file, for all later runs."""
    old = Path(path).read_bytes()
    read_examples = data.read_examples

    def replaced_before(*args):
        new = jsonl(Path(path).with_name("new"), {"text": "c d e"})
        if is_complete:
            os.replace(new, path)
        else:
            Path(path).write_bytes(old + b'{"text"')  # somebody still writes to it
        return read_examples(*args)

    monkeypatch.setattr(data, "read_examples", replaced_before)
    with pytest.raises(ValueError, match=r"a\.jsonl: changed while it was read: start again"):
        tokenized(path, tiny)
    assert folders_in(cache) == set()
    monkeypatch.undo()


def test_an_entry_that_vanishes_from_the_cache_is_named(path, cached):
    shutil.rmtree(cached)
    with pytest.raises(OSError, match=f"^a.jsonl: its tokens in the cache, {cached}, cannot be read .No such file"):
        data.open_documents([cached], ["a.jsonl"], 64)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def empty(file):
    file.write_bytes(b"")


def cut(file):
    """Without its last 8 bytes, which are a whole number of items in each of the arrays."""
    os.truncate(file, file.stat().st_size - 8)


def lengthen(file):
    """By 8 bytes, for the same reason."""
    file.write_bytes(file.read_bytes() + bytes(8))


def replace_by_a_pipe(file):
    """Whoever opens it waits for ever."""
    file.unlink()
    os.mkfifo(file)


DAMAGES = [
    flip_a_bit,
    Path.unlink,
    empty,
    cut,
    lengthen,
    replace_by_a_pipe,
]
FILES = [*data.ARRAYS, "report.json"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_in_the_cache_is_made_again_and_said(path, cached, cache, tiny, capsys, name, damage):
    whole = contents(cached)
    damage(cached / name)
    assert tokenized(path, tiny) == cached
    assert contents(cached) == whole
    assert folders_in(cache) == {cached}
    said = capsys.readouterr().out
    assert said.count("\n") == 1  # one message, and none of the tokenizing
    assert_says(said, [f"{path} is tokenized again", str(cached)])


def test_an_edited_count_in_the_report_is_noticed(path, cached, tiny):
    report = cached / "report.json"
    whole = report.read_text()
    # of these a wrong n_bad or largest_id fits every array, and would let bad data through check_file()
    for count in ("n_bad", "n_tokens", "largest_id"):
        content = json.loads(whole)
        content[count] += 1
        write_json(report, content)  # the checksum of the report stays as it was
        tokenized(path, tiny)
        assert report.read_text() == whole


def fit_checksums(folder):
    """Makes the checksums in report.json those of the changed arrays, as if another file had been tokenized."""
    report = folder / "report.json"
    changed = data.read_json(report) | {"checksums": data.checksums_of(folder)}
    write_json(report, data.with_checksum(changed))


@pytest.mark.parametrize("name", data.ARRAYS)
def test_the_checksum_that_a_resume_compares_depends_on_every_array(path, cached, name):
    def checksum():
        return data.open_documents([cached], [path], 64).checksum

    before = checksum()
    array = cached / name
    content = bytearray(array.read_bytes())
    content[0] ^= 1  # the first token is no target, so no count of targets changes with its flag
    array.write_bytes(content)
    fit_checksums(cached)
    assert checksum() != before


def test_the_checksums_of_a_folder_are_those_of_whole_files(tmp_path):
    content = np.random.default_rng(0).bytes(2**22 + 1000)  # more than is read at once
    contents = {}
    for n_left_out, name in enumerate(data.ARRAYS):
        contents[name] = content[n_left_out:]
        (tmp_path / name).write_bytes(contents[name])
    checksums = data.checksums_of(tmp_path)
    assert checksums == {name: zlib.crc32(whole) for name, whole in contents.items()}


def test_whoever_finishes_a_folder_second_takes_the_first_one(path, tiny, cache, monkeypatch):
    sync = data.sync
    first = []  # the inode of the folder of whoever was first

    def sync_as_the_second(part):
        monkeypatch.setattr(data, "sync", sync)
        folder = tokenized(path, tiny)  # as another process would, at the last moment
        first.append(folder.stat().st_ino)
        sync(part)

    monkeypatch.setattr(data, "sync", sync_as_the_second)
    folder = tokenized(path, tiny)
    assert folders_in(cache) == {folder}
    assert [folder.stat().st_ino] == first


def test_lists_of_lines_make_no_difference_but_for_texts(tiny, tmp_path, cache, monkeypatch):
    lines = []
    for number in range(1500):
        completion = "self é☃ def f(x):\n" * (number % 40)  # a list might end inside a character of several bytes
        line = json.dumps({"prompt": f"{number} ", "completion": completion})
        if number % 200 == 7:  # eight bad lines, fewer than the 1 % that end a run
            line = "{bad"
        lines.append(line)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")

    in_one_list = tokenized(path, tiny).rename(cache / "in one list")
    monkeypatch.setattr(data, "READ_CHARS", 2**14)  # the file has 0.9 million, which are tokenized at once by default
    in_many_lists = tokenized(path, tiny)
    for name in data.ARRAYS:
        assert (in_many_lists / name).read_bytes() == (in_one_list / name).read_bytes()
    report = data.read_json(in_many_lists / "report.json")
    assert report == data.read_json(in_one_list / "report.json")
    assert report["n_bad"] == 8
    assert "\n  line 8: not valid JSON" in report["errors"]
    assert report["errors"].count("\n") == 1  # the same message is printed once


# ---------------------------------------------------------------- packing


def test_packing_holds_each_document_once_in_rows_of_which_no_two_fit_into_one():
    rng = np.random.default_rng(0)
    for _ in range(300):
        seq_len = int(rng.integers(1, 200))
        longest = int(rng.integers(1, seq_len + 1))  # so that some cases have short documents alone
        n_documents = int(rng.integers(1, 120))
        lengths = rng.integers(1, longest + 1, size=n_documents)
        rows = data.pack_rows(lengths, seq_len)
        packed = sorted(itertools.chain(*rows))
        assert packed == list(range(n_documents))

        used = sorted(lengths[row].sum() for row in rows)
        assert used[-1] <= seq_len
        if len(rows) > 1:
            two_emptiest = used[0] + used[1]
            assert two_emptiest > seq_len


# ---------------------------------------------------------------- the order of rows, and how they are dealt out


def make_documents(lengths, unsupervised=()):
    """Documents of these numbers of tokens. The tokens are 0, 1, 2, ... so that each is known by its value."""
    starts = np.cumsum([0, *lengths])
    tokens = np.arange(starts[-1], dtype=np.int32)
    supervised = ~np.isin(tokens, unsupervised)
    return documents_of(tokens, supervised, starts)


@pytest.fixture(scope="module")
def documents():
    """101 documents, in which half of the tokens are supervised."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 30, size=101)
    n_tokens = lengths.sum()
    unsupervised = rng.choice(n_tokens, n_tokens // 2, replace=False)
    return make_documents(lengths, unsupervised)


def loader_of(documents, seq_len=32, **options):
    """A data.Loader of one rank, unless the options say more."""
    defaults = {"packing": True, "batch_size": 1, "seed": 0, "rank": 0, "world": 1}
    return data.Loader(documents, seq_len, **defaults | options)


class Split(NamedTuple):
    """How the rows of a step are split. Their number is the product."""

    batch_size: int
    grad_accum: int
    world: int


def loaders_of(documents, split, **options):
    """The loaders of all ranks."""
    loaders = []
    for rank in range(split.world):
        place = {"batch_size": split.batch_size, "rank": rank, "world": split.world}
        loaders.append(loader_of(documents, **place, **options))
    return loaders


def test_ranks_that_share_a_row_count_each_document_once(documents):
    alone = loader_of(documents)
    shared = [loader_of(documents, rank=rank, world=2, sequence_parallel=2) for rank in (0, 1)]
    for row in range(3):
        assert shared[0].batch([row]).n_targets == alone.batch([row]).n_targets
        assert shared[1].batch([row]).n_targets == []


def tokens_by_row(batch):
    """The tokens of each row of a batch, without padding."""
    B, T = batch.tokens.shape
    tokens = batch.tokens.flatten().tolist()
    rows = [[] for _ in range(B)]
    for start, stop in batch.spans.pairs:
        rows[start // T] += tokens[start:stop]
    return rows


def count(batches):
    """The lm.Counts of some batches, counted from what is in them."""
    pairs = [pair for batch in batches for pair in batch.spans.pairs]
    lengths = [stop - start for start, stop in pairs]
    return lm.Counts(
        targets=sum(len(batch.supervised_S) for batch in batches),
        tokens=sum(lengths),
        squares=sum(length**2 for length in lengths),
        terms=sum(len(batch.supervised_S) for batch in batches),
    )


def global_batch(loaders, step, grad_accum):
    """The rows of a step in the order of the global batch: micro-batch by micro-batch, rank by rank."""
    batches_by_rank = []
    counts_by_rank = []
    for loader in loaders:
        batches, counts = loader.step(step, grad_accum)
        batches_by_rank.append(batches)
        counts_by_rank.append(counts)
    micro_batches = zip(*batches_by_rank, strict=True)
    in_order = list(itertools.chain(*micro_batches))
    # a rank needs the sums over all ranks before its first backward
    assert counts_by_rank == [count(in_order)] * len(loaders)
    return [row for batch in in_order for row in tokens_by_row(batch)]


SPLITS = [
    Split(2, 3, 2),
    Split(3, 2, 2),
    Split(1, 3, 4),
    Split(1, 12, 1),
    Split(1, 1, 12),
    Split(6, 1, 2),
    Split(4, 1, 3),
]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_global_batch_does_not_depend_on_how_it_is_split(documents, split, packing):
    one_batch = Split(batch_size=12, grad_accum=1, world=1)
    loader = loader_of(documents, batch_size=12, packing=packing)
    loaders = loaders_of(documents, split, packing=packing)
    n_steps = len(loader.rows) // 12 + 2  # beyond the end of the first epoch
    for step in range(n_steps):
        expected = global_batch([loader], step, one_batch.grad_accum)
        assert len(expected) == 12
        assert global_batch(loaders, step, split.grad_accum) == expected


def order_of(loader, epoch):
    """The numbers of the rows in the order in which an epoch trains on them."""
    n_rows = len(loader.rows)
    first_step = epoch * n_rows  # a step is one row here
    order = []
    for step in range(first_step, first_step + n_rows):
        (row,), _ = loader.rows_of(step, 1)
        order.append(row)
    return order


def shuffled(loader, epoch):
    """What a run's order is specified to be: resuming must give the same one in every version."""
    rng = np.random.default_rng([loader.seed, epoch])
    return rng.permutation(len(loader.rows)).tolist()


@pytest.mark.parametrize("packing", [True, False])
def test_rows_come_once_an_epoch_in_the_order_of_seed_and_epoch(documents, packing):
    for seed in range(3):
        loader = loader_of(documents, packing=packing, seed=seed)
        for epoch in (1, 2):
            assert order_of(loader, epoch) == shuffled(loader, epoch)


@pytest.mark.parametrize("packing", [True, False])
def test_the_largest_row_of_a_run_comes_first(documents, packing):
    """Memory runs out at step 0 or not at all."""
    for seed in range(3):
        loader = loader_of(documents, packing=packing, seed=seed)
        order = order_of(loader, epoch=0)
        first = order[0]
        targets = loader.per_row.targets.tolist()
        tokens = loader.per_row.tokens.tolist()
        if packing:  # rows are equally long, and the loss of the most targets needs the most memory
            assert targets[first] == max(targets)
        else:
            sizes = list(zip(tokens, targets))
            assert sizes[first] == max(sizes)

        # but for that it is an order like any other: two rows trade places
        expected = shuffled(loader, 0)
        place = expected.index(first)
        expected[place] = expected[0]
        expected[0] = first
        assert order == expected


# ---------------------------------------------------------------- no contamination: what is in a batch
# Three documents of the tokens 0-3, 4-6 and 7-8. Position p holds token p, and its target is token p + 1: a document of
# n tokens has n - 1 positions, and its last token is a target only.

X = IGNORE
P = 0  # padding, a token like any other, which has no target


@pytest.fixture(scope="module")
def three_documents():
    return make_documents([4, 3, 2], unsupervised=[2, 5, 6])


@pytest.fixture(scope="module")
def packed(three_documents):
    """One row of eight positions, two of them padding."""
    loader = loader_of(three_documents, seq_len=8)
    return loader.batch([0])


@pytest.fixture(scope="module")
def unpacked(three_documents):
    """A row for each document, as long as the longest of them."""
    loader = loader_of(three_documents, seq_len=8, packing=False, batch_size=3)
    return loader.batch([0, 1, 2])


def test_the_mask_of_a_batch_is_right_to_the_token(packed, unpacked):
    assert packed.tokens.tolist() == [[0, 1, 2, 4, 5, 7, P, P]]
    assert packed.targets.tolist() == [[1, X, 3, X, X, 8, X, X]]
    assert packed.supervised_S.tolist() == [0, 2, 5]
    assert packed.n_targets == [2, 0, 1]  # of each document

    assert unpacked.tokens.tolist() == [[0, 1, 2], [4, 5, P], [7, P, P]]
    assert unpacked.targets.tolist() == [[1, X, 3], [X, X, X], [8, X, X]]
    assert unpacked.supervised_S.tolist() == [0, 2, 6]  # places in the flattened rows
    assert unpacked.n_targets == [2, 0, 1]


def test_positions_restart_in_every_document(packed, unpacked):
    assert packed.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert unpacked.positions.tolist() == [[0, 1, 2], [0, 1, 0], [0, 0, 0]]


def test_spans_say_where_documents_lie(packed, unpacked):
    assert packed.spans.pairs == [(0, 3), (3, 5), (5, 6)]
    assert packed.spans.bounds.tolist() == [0, 3, 5, 6, 8]  # padding counts as a document
    assert packed.spans.longest == 3

    assert unpacked.spans.pairs == [(0, 3), (3, 5), (6, 7)]
    assert unpacked.spans.bounds.tolist() == [0, 3, 5, 6, 7, 9]
    assert unpacked.spans.longest == 3


@pytest.mark.parametrize("packing", [True, False])
def test_no_target_crosses_into_the_next_document(documents, packing):
    first_of_next = set(documents.parts["stop"].tolist())
    loader = loader_of(documents, packing=packing)
    n_targets = 0
    for row in range(len(loader.rows)):
        batch = loader.batch([row])
        tokens = batch.tokens.flatten()[batch.supervised_S]
        targets = batch.targets.flatten()[batch.supervised_S]
        assert torch.equal(targets, tokens + 1)  # make_documents() counts the tokens
        assert first_of_next.isdisjoint(targets.tolist())
        n_targets += len(targets)
    assert n_targets == documents.parts["n_targets"].sum()


def test_exactly_the_answers_of_packed_chats_are_targets(tiny, tmp_path):
    """From the text of a file to the targets of a row: through template, tokenizer, cache and packing."""
    first = chat(QUESTION, message("assistant", "the first"))
    second = chat(
        QUESTION,
        message("assistant", "a second"),
        QUESTION,
        message("assistant", "and one more"),
    )
    third = chat(QUESTION, message("assistant", "é☃ of several bytes"))
    path = jsonl(tmp_path / "a.jsonl", first, second, third)
    documents, _ = read_data(path, tiny)
    batch = loader_of(documents, seq_len=400).batch([0])
    assert len(batch.spans.pairs) == 3  # one row has them all

    trained = []
    for start, stop in batch.spans.pairs:
        targets = batch.targets[0, start:stop]
        ids = targets[targets != IGNORE].tolist()
        trained.append(tiny.core.decode(ids, skip_special_tokens=False))
    expected = [f"the first{END}", f"a second{END}and one more{END}", f"é☃ of several bytes{END}"]
    assert sorted(trained) == sorted(expected)  # the longest document comes first in a row


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_evaluation_covers_every_row_once_and_in_order_over_three_ranks(documents, batch_size, packing):
    one = loader_of(documents, packing=packing)
    n_rows = len(one.rows)
    assert n_rows % 3  # ranks have unequal numbers of rows, and the last batches are empty
    loaders = loaders_of(documents, Split(batch_size, 1, world=3), packing=packing)
    rows = []
    for batches in zip(*(loader.once() for loader in loaders), strict=True):
        for batch in batches:
            rows += [row for row in tokens_by_row(batch) if row]
    assert rows == tokens_by_row(one.batch(range(n_rows)))


def test_inspected_example_shows_what_is_trained_on(tiny, tmp_path, capsys):
    clear_screen = message("user", "\x1b[2J")  # for a terminal, if it were printed as it is
    documents, _ = read_data(jsonl(tmp_path / "a.jsonl", chat(clear_screen, ANSWER)), tiny)
    data.say(data.show(tiny, documents, 0))
    text = capsys.readouterr().out
    assert f"⟦{ANSWER['content']}{END}⟧" in text
    assert "\033" not in text
    assert r"\x1b[2J" in text


# ---------------------------------------------------------------- no contamination: what the model sees of it
# The blocks of each model can see other tokens in one way only, so that a leak cannot hide behind another way.

WAYS = ["attention", "window", "convolution", "recurrent state"]
WINDOW = MUSE | {
    "layer_types": ["sliding_attention"] * 3,
    "sliding_window": 4,  # tokens, fewer than any document has
}
DELTA_NET = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention"] * 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def forget_at_once_(mixer):
    """Makes the decay of the state e^-(e^20): each token reads what it has written itself, and the rest is zero."""
    mixer.decay.A_log.data.fill_(20.0)


def convolve_nothing_(mixer):
    """Keeps the last tap alone, which is that of the token itself."""
    mixer.conv1d.weight.data[:, :-1] = 0


def build_with(way):
    # 0.2: with such large weights a neighbour's token would move every logit far beyond rounding
    shape = {"initializer_range": 0.2, "vocab_size": 128}
    if way == "window":
        shape |= WINDOW
    elif way != "attention":
        shape |= DELTA_NET
    model, _ = build(**shape)
    for block in model.model.layers:
        if way == "convolution":
            forget_at_once_(block.linear_attn)
        elif way == "recurrent state":
            convolve_nothing_(block.linear_attn)
    return model


@pytest.fixture(scope="module")
def models():
    return {way: build_with(way) for way in WAYS}


LENGTHS = {
    "unequal": [9, 6, 12],
    "equal": [9, 9, 9],
    # attend() computes 3 x 32 positions as rows of a batch: a CPU does so for multiples of 32. The third document
    # begins at a multiple of 64, with a new chunk of the gated delta rule.
    "rows of a batch": [33, 33, 33],
}


def packed_row(documents):
    """All documents in one row, without padding."""
    n_positions = documents.parts["stop"] - documents.parts["start"] - 1
    loader = loader_of(documents, seq_len=int(n_positions.sum()))
    return loader.batch([0])


def random_row(lengths, change=None):
    """Documents of random tokens in one row; those of document `change` are others."""
    documents = make_documents(lengths)
    tokens = documents.files[0].tokens
    tokens[:] = np.random.default_rng(0).integers(0, 128, size=len(tokens))
    if change is not None:
        start = documents.parts["start"][change]
        stop = documents.parts["stop"][change]
        tokens[start:stop] ^= 1
    return packed_row(documents)


def logits_of(model, batch):
    """[T, V] of a batch of one row."""
    return model(batch.tokens, None, batch.positions, batch.spans)[0]


def loss_of(model, batch, supervised_S):
    """The summed loss of the targets at these places."""
    return model(batch.tokens, batch.targets, batch.positions, batch.spans, supervised_S)


@pytest.mark.parametrize("change", [0, 1, 2])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(models, way, lengths, change):
    before = random_row(LENGTHS[lengths])
    after = random_row(LENGTHS[lengths], change)
    assert (before.spans.bounds is None) == (lengths != "unequal")  # what attend() decides by
    logits_before = logits_of(models[way], before)
    logits_after = logits_of(models[way], after)

    n_changed = 0
    for start, stop in before.spans.pairs:
        place = slice(start, stop)
        same_tokens = torch.equal(before.tokens[0, place], after.tokens[0, place])
        # bit for bit: the same products of the same shapes, and no neighbour in them
        same_logits = torch.equal(logits_before[place], logits_after[place])
        assert same_logits == same_tokens
        n_changed += not same_tokens
    assert n_changed == 1


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("way", WAYS)
def test_no_gradient_crosses_into_another_document(models, way, lengths):
    """The loss of a document has a gradient in the embeddings of its own tokens, all of them, and in no other."""
    model = models[way]
    documents = make_documents(LENGTHS[lengths])  # in which no token comes twice
    batch = packed_row(documents)
    for start, stop in batch.spans.pairs:
        model.zero_grad()
        loss_of(model, batch, torch.arange(start, stop)).backward()
        norms_V = model.model.embed_tokens.weight.grad.norm(dim=1)
        # The norms of its own tokens are 1 to 600, the others 0 but for a few of 1e-14: decays are differences of sums
        # in float64, and the gradients of what came earlier cancel in such a sum only up to rounding.
        with_gradient = (norms_V > 1e-9).nonzero().flatten()
        own_tokens = batch.tokens[0, start:stop]
        assert torch.equal(with_gradient, own_tokens)


@pytest.mark.rounding
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_packed_loss_is_the_sum_of_the_losses_alone(models, way):
    model = models[way]
    batch = random_row(LENGTHS["unequal"])
    packed_loss = loss_of(model, batch, batch.supervised_S)
    losses_alone = []
    for start, stop in batch.spans.pairs:
        tokens = batch.tokens[:, start:stop]
        targets = batch.targets[:, start:stop]
        losses_alone.append(model(tokens, targets).item())
    # float32: matrix products of another height are summed in another order, about 1e-6 of it
    assert packed_loss.item() == pytest.approx(sum(losses_alone), rel=1e-5)
