"""Data sets of the Hub by name, fetched from a server on this machine: which of their files are a split, what is said
when there is none, and what a start without the Hub does."""

import contextlib
import importlib.util
import io
import json
import os
import re
import socket
import sys
import threading
from http.server import ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import NamedTuple
from urllib.parse import unquote

import pytest
from conftest import pieces, processes, read_data, train_main
from test_download import QuietHandler
from test_formats import chat, jsonl

import data

TOKEN = "hf_of_a_person_who_may"
EXPORT = data.EXPORT


def lines(rows):
    """The bytes of a .jsonl file."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


# ---------------------------------------------------------------- parquet with and without pyarrow


class FakeParquetFile:
    """pyarrow.parquet.ParquetFile, as far as data.py uses it, of a file of JSON lines."""

    def __init__(self, file, pre_buffer, buffer_size):
        # pyarrow's defaults would read a row group whole, and so most files
        assert not pre_buffer
        assert 0 < buffer_size <= 2**24
        if file.readline() != b"PAR1\n":
            raise OSError("Parquet magic bytes not found")  # pyarrow's class and words
        self.rows = [json.loads(line) for line in file]
        self.num_row_groups = 1
        group = SimpleNamespace(num_rows=len(self.rows), total_byte_size=FakeBatch(self.rows).nbytes)
        self.metadata = SimpleNamespace(row_group=lambda number: group)

    def iter_batches(self, batch_size, row_groups, use_threads):
        assert row_groups == [0]
        assert not use_threads  # with threads the pages of a column are read ahead
        for start in range(0, len(self.rows), batch_size):
            yield FakeBatch(self.rows[start : start + batch_size])


class FakeBatch:
    def __init__(self, rows):
        self.rows = rows
        self.num_rows = len(rows)
        self.nbytes = len(lines(rows))

    def slice(self, start, n_rows):
        return FakeBatch(self.rows[start : start + n_rows])

    def to_pylist(self):
        return self.rows


HAS_PYARROW = importlib.util.find_spec("pyarrow") is not None


def put_fake_pyarrow(modules):
    """Adds a pyarrow to sys.modules where none is installed. Where one is, the tests read and write real files."""
    if not HAS_PYARROW:
        package = ModuleType("pyarrow")
        package.parquet = ModuleType("pyarrow.parquet")
        package.parquet.ParquetFile = FakeParquetFile
        modules |= {"pyarrow": package, "pyarrow.parquet": package.parquet}


def parquet(rows):
    """The bytes of a parquet file. As in every table, each row has each column: None where the row has no such key."""
    columns = {key: None for row in rows for key in row}
    rows = [columns | row for row in rows]
    if not HAS_PYARROW:
        return b"PAR1\n" + lines(rows)
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.fixture
def pyarrow_or_fake(monkeypatch):
    modules = {}
    put_fake_pyarrow(modules)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


# 250 rows are three batches of a hundred
ROWS = [chat({"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": f"a {i}"}) for i in range(250)]


def test_rows_of_parquet_have_the_tokens_and_masks_of_their_lines(pyarrow_or_fake, tiny, tmp_path):
    # a cell without a value is a key that the row does not have: the second row is no conversation
    rows = [*ROWS, {"text": "a b", "messages": None}, {"instruction": "q", "input": None, "output": "a"}]
    (tmp_path / "a.parquet").write_bytes(parquet(rows))
    from_table, file = read_data(tmp_path / "a.parquet", tiny)
    from_lines, _ = read_data(jsonl(tmp_path / "a.jsonl", *rows), tiny)
    assert pieces(from_table) == pieces(from_lines)
    assert file.report.formats == {"messages": 250, "text": 1, "instruction + output": 1}
    assert from_table.line.tolist() == list(range(1, 253))


@pytest.mark.parametrize("content", [b"", b'{"text": "a"}\n', b"PAR1 and no table"], ids=["empty", "lines", "cut"])
def test_damaged_parquet_is_refused_by_name(pyarrow_or_fake, tiny, tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet: (not valid parquet: |nothing to train on)") as error:
        read_data(tmp_path / "a.parquet", tiny)
    assert "tokens not written" not in str(error.value)  # pyarrow's OSErrors are not those of a full disk


def test_parquet_without_pyarrow_is_one_message_with_the_command(monkeypatch, tiny, tmp_path):
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails, also where it is installed
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet: .*pip install pyarrow"):
        read_data(tmp_path / "a.parquet", tiny)


# ---------------------------------------------------------------- which files are a split

CARD = {"configs": [
    {"config_name": "plain", "data_files": [{"split": "train", "path": "a-*.jsonl"}], "default": True},
    {"config_name": "more", "data_files": [{"split": "train", "path": ["a-*.jsonl", "b/*.jsonl"]}]},
    {"config_name": "deep", "data_files": [{"split": "train", "path": "**/*.jsonl"}]},
    {"config_name": "folder", "data_dir": "b"},
    {"config_name": "gone", "data_files": [{"split": "train", "path": ["a-*.jsonl", "c.jsonl"]}]},
    {"config_name": "one", "data_files": "b/x.jsonl"},
]}
# push_to_hub() of older versions of datasets added a hash
PUSHED = [f"data/train_sft-0000{i}-of-00002-a09b74b3ef9c3b56.parquet" for i in range(2)]


class Layout(NamedTuple):
    """The files of a data set, and which of them are a split."""

    names: list
    splits: dict  # {name of a split: its files in their order, or None where only the export can tell}
    card: dict | None = None


LAYOUTS = {
    "lines": Layout(
        names=["README.md", "test.jsonl", "train.jsonl"],
        splits={
            "train": ["train.jsonl"],
            "default:train": ["train.jsonl"],
            "test": ["test.jsonl"],
            "validation": None}),
    # on the page of such a set, the file is train
    "one file": Layout(
        names=["alpaca_data.json", "dataset_infos.json"],
        splits={"train": ["alpaca_data.json"], "alpaca_data": None}),
    "datasets' own": Layout(
        names=["data/test-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet", *PUSHED],
        splits={
            "train": None,  # neither train_gen nor train_sft is taken for it
            "test": ["data/test-00000-of-00001.parquet"],
            "train_gen": ["data/train_gen-00000-of-00001.parquet"],
            "train_sft": PUSHED}),
    "subsets": Layout(
        names=["main/train-00000-of-00001.parquet", "other/train-00000-of-00001.parquet", "other/test.parquet"],
        splits={
            "train": None,  # of which subset?
            "main:train": ["main/train-00000-of-00001.parquet"],
            "other:test": ["other/test.parquet"]}),
    "one subset": Layout(
        names=["en/train.csv"],
        splits={"train": ["en/train.csv"], "en:train": ["en/train.csv"]}),
    "shards": Layout(
        names=["train-1.jsonl.gz", "train_2.jsonl.gz", "train3.jsonl.gz"],
        splits={"train": ["train-1.jsonl.gz", "train3.jsonl.gz", "train_2.jsonl.gz"]}),
    "folders of splits": Layout(
        names=["train/a.jsonl", "train/b.jsonl", "test/test-00000-of-00001.jsonl", "en/train/0.jsonl"],
        splits={
            "train": None,  # on the page of such a set en/ is a part of it
            "default:train": ["train/a.jsonl", "train/b.jsonl"],
            "default:test": ["test/test-00000-of-00001.jsonl"],
            "en:train": ["en/train/0.jsonl"]}),
    # the set's page may count train_more as train, or leave it out
    "an odd name": Layout(
        names=["train.jsonl", "train_more.jsonl", "en/train.jsonl"],
        splits={"default:train": None, "en:train": ["en/train.jsonl"]}),
    # probably the same rows twice
    "two types": Layout(
        names=["train.jsonl", "train.parquet", "test.jsonl"],
        splits={"train": None, "test": ["test.jsonl"]}),
    "other types": Layout(
        names=["train.arrow", "data/train.tar", "data.zip"],
        splits={"train": None}),
    # a library would write these outside of its folder
    "a way out": Layout(
        names=["../train.jsonl", "a/../train.jsonl"],
        splits={"train": None, "..:train": None}),
    "card": Layout(
        names=["a-1.jsonl", "a-2.jsonl", "b/x.jsonl", "b/c/a-3.jsonl"],
        card=CARD,
        splits={
            "train": ["a-1.jsonl", "a-2.jsonl"],  # of the subset that the card calls its default
            "plain:train": ["a-1.jsonl", "a-2.jsonl"],
            "more:train": ["a-1.jsonl", "a-2.jsonl", "b/x.jsonl"],
            "one:train": ["b/x.jsonl"],
            "deep:train": None,
            "folder:train": None,
            "gone:train": None}),
    "a card of something else": Layout(
        names=["train.jsonl"],
        card={"configs": [7, {"data_files": 7}]},
        splits={"train": ["train.jsonl"]}),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_files_of_a_split_are_those_that_the_card_or_their_names_say(layout):
    splits = data.splits_of_set(sorted(layout.names), layout.card)
    for name, files in layout.splits.items():
        subset, _, split = name.rpartition(":")
        assert splits.get((subset or None, split)) == files, name


def test_the_export_has_a_folder_for_each_split():
    names = [".gitattributes", "default/partial-train/0000.parquet", "default/partial-train/0001.parquet",
             "default/test/0000.parquet", "data/test/0000.parquet"]
    splits = data.splits_of_export(names)
    assert splits[None, "partial-train"] == names[1:3]
    assert splits["default", "test"] == splits[None, "test"] == ["default/test/0000.parquet"]
    assert splits["data", "test"] == ["data/test/0000.parquet"]
    assert (None, "train") not in splits  # a part of a large set is not taken for all of it


# ---------------------------------------------------------------- a server

SHARD_NAMES = "en/train-00000-of-00002.jsonl", "en/train-00001-of-00002.jsonl"
SETS = {  # Hub id: {branch: {file: content}}
    "a/lines": {"main": {
        "README.md": b"# lines",
        "train.jsonl": lines(ROWS),
        "test.jsonl": lines(ROWS[:5])}},
    "a/tables": {"main": {
        "data/train-00000-of-00002.parquet": parquet(ROWS[:120]),
        "data/train-00001-of-00002.parquet": parquet(ROWS[120:])}},
    "a/nested": {"main": {
        SHARD_NAMES[0]: lines(ROWS[:120]),
        SHARD_NAMES[1]: lines(ROWS[120:]),
        "de/train.jsonl": lines(ROWS[:7])}},
    # only the export can be read
    "a/odd": {
        "main": {"corpus.xml": b"<rows/>", "more.xml": b"<rows/>"},
        EXPORT: {
            "default/train/0000.parquet": parquet(ROWS[:9]),
            "default/train/0001.parquet": parquet(ROWS[9:])}},
    # the Hub converts the first gigabytes of a set, and then says so in the name
    "a/large": {
        "main": {"a.zip": b"x"},
        EXPORT: {"default/partial-train/0000.parquet": parquet(ROWS)}},
    "a/pictures": {"main": {"cat.png": b"x", "\x1b[31mdog.png": b"x"}},
    # other rows from some day on
    "a/growing": {
        "main": {"train.jsonl": lines(ROWS[:90])},
        "newer": {"train.jsonl": lines(ROWS[:91])}},
    "a/growing_export": {
        "main": {"a.zip": b"x"},
        EXPORT: {"default/train/0000.parquet": parquet(ROWS[:90])},
        "newer export": {"default/train/0000.parquet": parquet(ROWS[:91])}},
    "a/columns": {"main": {"train.csv": b"question,answer,id\nq 0,a 0,0\nq 1,a 1,1\n"}},
    "a/private": {"main": {"train.jsonl": lines(ROWS)}},
    "a/gated": {"main": {"train.jsonl": lines(ROWS)}},
}
COMMITS = {"main": "0" * 40, EXPORT: "1" * 40, "newer": "2" * 40, "newer export": "3" * 40}
BRANCHES = {commit: branch for branch, commit in COMMITS.items()}


class Hub(QuietHandler):
    """What huggingface_hub asks for: the commit of a branch, its list of files, and the files."""

    def answer(self, with_content):
        if self.server.failures:
            if self.server.failures.pop() == "an error of the server":
                return self.refuse(500, "Down")
            return self.connection.shutdown(socket.SHUT_RDWR)
        path, _, _ = self.path.partition("?")
        match = re.fullmatch(r"(/api)?/datasets/(\w+/\w+)(?:/(revision|tree|resolve)/([^/]+)(?:/(.+))?)?", path)
        if match is None or match[2] not in SETS:
            return self.refuse(404, "RepoNotFound")
        is_api, hub_id, what, revision, file = match.groups()
        may_read = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        # the Hub does not tell strangers that a private set exists, and shows them the names of a gated one's files
        if hub_id == "a/private" and not may_read:
            return self.refuse(401, "RepoNotFound")
        if hub_id == "a/gated" and not may_read and not is_api:
            return self.refuse(403, "GatedRepo")

        revision = unquote(revision or "main")
        branch = self.server.newer.get(revision, revision)
        branch = BRANCHES.get(branch, branch)  # the library asks for a branch, and then for its commit
        if branch not in SETS[hub_id]:
            return self.refuse(404, "RevisionNotFound")
        files = SETS[hub_id][branch]
        commit = COMMITS[branch]
        if what == "resolve":
            return self.send_file(files, unquote(file), commit, with_content)
        if what == "tree":
            found = [{"type": "file", "path": name, "size": len(files[name]), "oid": name} for name in files]
        else:
            siblings = [{"rfilename": name} for name in files]
            found = {"id": hub_id, "sha": commit, "siblings": siblings, "cardData": {"license": "mit"}}
        return self.send(json.dumps(found).encode(), commit, "list", with_content)

    def send_file(self, files, name, commit, with_content):
        if name == self.server.broken:
            return self.refuse(400, "Broken")
        if with_content:
            self.server.fetched.append(name)
        return self.send(files[name], commit, f"id-of-{name}-{commit}", with_content)

    def refuse(self, code, why):
        self.send_response(code)
        self.send_header("X-Error-Code", why)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send(self, content, commit, etag, with_content):
        self.send_response(200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_content:
            self.wfile.write(content)


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    server.fetched = []  # the names of files, once for each time
    server.broken = None  # a file that cannot be had
    server.failures = []  # what becomes of the next requests
    server.newer = {}  # {branch: the one that has become of it}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def ask(hub, tmp_path):
    """A function that runs another one in a process with the Hub's environment -> (its result, what was printed)."""

    def asked(function, *args, **environment):
        environment = {
            "HF_HOME": str(tmp_path / "hub"), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "XDG_CACHE_HOME": str(tmp_path / "oomph-tests-cache"), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1",
            **environment}
        result = tmp_path / "result"
        result.unlink(missing_ok=True)
        process = processes.Process(target=in_process, args=(environment, result, tmp_path / "log", function, args))
        process.start()
        process.join(300)  # seconds that a busy machine may need
        log = (tmp_path / "log").read_text()
        assert process.exitcode == 0, log
        return json.loads(result.read_text()), log

    return asked


def in_process(environment, result, log, function, args):
    os.environ.update(environment)
    put_fake_pyarrow(sys.modules)
    assert "huggingface_hub" not in sys.modules  # it reads the environment once
    data.HUB_PAUSES_S = 0, 0  # who does not answer here does not do so later either
    with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        result.write_text(json.dumps(function(*args)))


def read(names):
    """For each name the tokens and masks of its documents, or the message of the error."""
    tokenizer = data.Tokenizer(data.TINY)
    found = []
    for name in names:
        try:
            documents, _ = read_data(name, tokenizer)
            found.append(pieces(documents))
        except ValueError as error:
            found.append(str(error))
    return found


def as_json(documents):
    """pieces() of documents as they come back from a process."""
    return json.loads(json.dumps(pieces(documents)))


@pytest.fixture
def expected(tiny, tmp_path):
    """Tokens and masks of the first n ROWS, as a .jsonl file has them."""

    def of_rows(n):
        documents, _ = read_data(jsonl(tmp_path / f"{n}.jsonl", *ROWS[:n]), tiny)
        return as_json(documents)

    return of_rows


def test_a_split_has_the_tokens_and_masks_of_its_jsonl_in_every_layout(ask, hub, expected):
    names = ["a/lines", "a/lines:train", "a/lines/default:train", "a/tables", "a/nested/en", "a/nested/en:train",
             "a/odd"]
    found, _ = ask(read, [*names, "a/nested/de", "a/lines:test"])
    for name, documents in zip(names, found):
        assert documents == expected(250), name
    assert found[-2:] == [expected(7), expected(5)]
    # the files of the splits that were asked for, each once
    asked = [*SETS["a/lines"]["main"], *SETS["a/tables"]["main"], *SETS["a/nested"]["main"], *SETS["a/odd"][EXPORT]]
    assert sorted(hub.fetched) == sorted(set(asked) - {"README.md"})


MESSAGES = {  # name: words of the message
    "a/nobody": ["a/nobody: no such file, and no such data set", "private", "hf auth login", ".jsonl"],
    "a/private": ["a/private: ", "private", "hf auth login"],
    "a/gated": ["a/gated: ", "gated", "datasets/a/gated", "hf auth login"],
    "a/lines:dev": ["a/lines:dev: no such split", "a/lines/default:test, a/lines/default:train"],
    "a/lines/fr": ["a/lines/fr:train: no such split", "a/lines/default:train"],
    "a/nested": ["its subset has to be named", "a/nested/de:train, a/nested/en:train"],
    "a/odd:test": ["a/odd:test: no such split", "a/odd/default:train"],
    "a/large": ["a/large:train: no such split", "a/large/default:partial-train (partial: as much"],
    "a/pictures": ["a/pictures:train: no file", "train.jsonl", "cat.png", r"\x1b[31mdog.png"],
    "a/b/train.jsonl": ["a/b/train.jsonl: no such file; expected a .jsonl", "org/name:split"],
    "a/lines:train/x": ["a/lines:train/x: no such file; expected"],
}


def test_what_is_not_there_is_named_with_what_is(ask):
    found, _ = ask(read, list(MESSAGES))
    for name, message in zip(MESSAGES, found):
        missing = [word for word in MESSAGES[name] if word not in message]
        assert not missing, message
        assert "\n" not in message
        assert "\x1b" not in message
        assert len(message) < 500


def test_who_is_logged_in_reads_private_and_gated_sets(ask, expected):
    found, _ = ask(read, ["a/private", "a/gated"], HF_TOKEN=TOKEN)
    assert found == [expected(250), expected(250)]


def test_without_the_hub_files_of_an_earlier_start_are_used_and_said(ask, hub, expected):
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}  # the port of "discard": nobody answers
    (message,), _ = ask(read, ["a/nested/en"], **nowhere)
    assert re.match("a/nested/en: no such file, and not fetched from the Hub; the next start continues: ", message)

    # a start that has got one of two files is no start with all of them
    hub.broken = SHARD_NAMES[1]
    (message,), _ = ask(read, ["a/nested/en"])
    assert message.startswith("a/nested/en: no such file, and not fetched")
    (message,), _ = ask(read, ["a/nested/en"], **nowhere)
    assert message.startswith("a/nested/en: no such file, and not fetched")
    assert hub.fetched == [SHARD_NAMES[0]]

    hub.broken = None
    found, log = ask(read, ["a/nested/en"])
    assert found == [expected(250)]
    assert "earlier start" not in log
    assert hub.fetched == [*SHARD_NAMES]  # the first one was not fetched again
    for environment in (nowhere, {"HF_HUB_OFFLINE": "1"}):
        found, log = ask(read, ["a/nested/en", "a/nested/de"], **environment)
        assert found[0] == expected(250)
        assert "a/nested/en: not fetched from the Hub, the files of an earlier start are used" in log
        assert found[1].startswith("a/nested/de: no such file, and not fetched")


@pytest.mark.parametrize("failure", ["an error of the server", "a cut connection"])
def test_a_hub_that_fails_for_a_moment_ends_no_start(ask, hub, expected, failure):
    hub.failures += [failure, failure]
    assert ask(read, ["a/lines"])[0] == [expected(250)]
    assert not hub.failures


def test_a_file_with_the_name_of_a_data_set_is_that_file(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "hub_files", lambda name, _: pytest.fail(f"{name} was looked for on the Hub"))
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "b.csv"
    path.write_text("text\na b\n")
    documents, _ = read_data("a/b.csv", tiny)
    assert len(pieces(documents)) == 1
    path.rename("a/b")
    with pytest.raises(ValueError, match="a/b: not a format that is read"):
        read_data("a/b", tiny)


def test_another_file_or_another_order_of_files_is_another_set(tiny, tmp_path, monkeypatch):
    paths = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
    monkeypatch.setattr(data, "hub_files", lambda name, _: (paths, "a commit"))
    folders = []
    for first, second in (("a", "b"), ("a", "c"), ("d", "c"), ("c", "d")):
        jsonl(paths[0], {"text": f"{first} of the first file"})
        jsonl(paths[1], {"text": f"{second} of the second file"})
        folders.append(data.tokenized("a/b", False, tiny))
    paths.reverse()
    folders.append(data.tokenized("a/b", False, tiny))
    assert len(set(folders)) == 5


def test_a_run_trains_and_evaluates_on_data_sets_by_name(ask, tmp_path):
    argv = ["--data", "a/columns", "a/lines", "a/lines", "--eval_data", "a/lines:test", "--seq_len", "64",
            "--out", str(tmp_path / "out"), "--sample", "", "--steps", "2"]
    renames = ["--columns", "question=instruction", "answer=output"]
    code, log = ask(train_main, [*argv, *renames])
    assert not code, log
    assert "a/columns: 2 examples (instruction + output)" in log
    assert log.count("a/lines: 250 examples (messages)") == 2  # a set that is given twice counts twice
    assert "a/lines:test: 5 examples" in log
    assert "--columns question=instruction answer=output" in " ".join(log.split())
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval_loss" in row] == [2]

    # the same rows under other names are other data to a resumed run
    code, log = ask(train_main, [*argv, *renames, "id=system", "--resume"])
    assert code == 1
    assert "--columns was [['question', 'instruction'], ['answer', 'output']], is [[" in log
    assert "the checksum of --data's tokens and masks was" in log


@pytest.mark.parametrize("name, commit, newer", [
    ("a/growing", COMMITS["main"], {"main": "newer"}),
    ("a/growing_export", COMMITS[EXPORT], {EXPORT: "newer export"}),
])
def test_a_run_resumes_on_the_data_that_its_names_stood_for(ask, hub, tmp_path, name, commit, newer):
    out = tmp_path / "out"
    # the number of steps follows from the data: other rows would give another one
    argv = ["--data", name, "--eval_data", f"{name}:train", "--seq_len", "64", "--batch_size", "9", "--save_every", "1",
            "--sample", "", "--resume", "--out", str(out)]
    code, log = ask(train_main, argv)
    assert not code, log
    assert f"{name}: 90 examples" in log
    revisions = {f"datasets/{name}": commit, f"datasets/{name}:train": commit}
    assert json.loads((out / "args.json").read_text())["revisions"] == revisions

    hub.newer |= newer
    hub.fetched.clear()
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    elsewhere = {"XDG_CACHE_HOME": str(tmp_path / "oomph-tests-2"), "HF_HOME": str(tmp_path / "hub-2")}
    # from what was kept, with the Hub and without it; and on a machine that has never seen the set
    for environment in ({}, nowhere, elsewhere):
        code, log = ask(train_main, argv, **environment)
        assert not code, log
        assert "continuing after step" in log
        assert f"{name}: 90 examples" in log
        assert json.loads((out / "args.json").read_text())["revisions"] == revisions
    assert len(hub.fetched) == 1  # by the last one

    code, log = ask(train_main, [*argv[:-1], str(tmp_path / "another")])  # a new run takes the rows of today
    assert not code, log
    assert f"{name}: 91 examples" in log


def test_a_column_that_no_data_has_is_named(ask):
    renames = ["question=instruction", "answer=output", "contxt=input"]
    code, log = ask(train_main, ["--data", "a/columns", "--inspect", "1", "--columns", *renames])
    assert code == 1
    assert "--columns contxt: no row of the data has such a key" in log
