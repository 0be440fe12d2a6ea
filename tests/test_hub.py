"""Tables, and data sets of the Hub by name, fetched from a server on this machine: what is said when there is no such
split, and what a start without the Hub does."""

import contextlib
import csv
import http.client
import functools
import importlib.util
import io
import json
import os
import re
import socket
import sys
import threading
import urllib.error
import urllib.request
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from urllib.parse import unquote

import pytest
from conftest import pieces, processes, read_data, train_main
from test_download import QuietHandler
from test_formats import chat, jsonl

import data

TOKEN = "hf_of_a_person_who_may"


def lines(rows):
    """The bytes of a .jsonl file."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


# ---------------------------------------------------------------- parquet with and without pyarrow


class FakeParquetFile:
    """pyarrow.parquet.ParquetFile, as far as data.py uses it, of a file of JSON lines."""

    def __init__(self, path, pre_buffer, buffer_size):
        # pyarrow's defaults would read a row group whole, and so most files
        assert not pre_buffer
        assert 0 < buffer_size <= 2**24
        first, *others = path.read_bytes().split(b"\n")
        if first != b"PAR1":
            raise OSError("Parquet magic bytes not found")  # pyarrow's class and words
        self.rows = [json.loads(line) for line in others if line]

    def iter_batches(self, batch_size, use_threads):
        assert not use_threads  # with threads the pages of a column are read ahead
        for start in range(0, len(self.rows), batch_size):
            yield FakeBatch(self.rows[start : start + batch_size])


class FakeBatch:
    def __init__(self, rows):
        self.rows = rows

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
    assert from_table.parts["line"].tolist() == list(range(1, 253))


@pytest.mark.parametrize("content", [b"", b'{"text": "a"}\n', b"PAR1 and no table"], ids=["empty", "lines", "cut"])
def test_damaged_parquet_is_refused_by_name(pyarrow_or_fake, tiny, tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet: (cannot be read as parquet: |nothing to train on)") as error:
        read_data(tmp_path / "a.parquet", tiny)
    assert "tokens not written" not in str(error.value)  # pyarrow's OSErrors are not those of a full disk


def test_parquet_without_pyarrow_is_one_message_with_the_command(monkeypatch, tiny, tmp_path):
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails, also where it is installed
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet: .*pip install pyarrow"):
        read_data(tmp_path / "a.parquet", tiny)


# ---------------------------------------------------------------- datasets, or what stands for it


def configs(**files):
    """The card of a data set with these subsets: {name: pattern of the files of its train split}."""
    rows = []
    for name, path in files.items():
        rows.append(f"- {{config_name: {name}, data_files: [{{split: train, path: {path!r}}}]}}")
    return "\n".join(["---", "configs:", *rows, "---", ""]).encode()


SHARDS = "en/train-00000-of-00002.jsonl", "en/train-00001-of-00002.jsonl"
SETS = {  # Hub id: {branch: {file: content}}
    "a/lines": {"main": {"train.jsonl": lines(ROWS), "test.jsonl": lines(ROWS[:5])}},
    "a/nested": {"main": {
        "README.md": configs(en="en/*.jsonl", de="de/train.jsonl"),
        SHARDS[0]: lines(ROWS[:120]),
        SHARDS[1]: lines(ROWS[120:]),
        "de/train.jsonl": lines(ROWS[:7])}},
    # other rows from some day on
    "a/growing": {"main": {"train.jsonl": lines(ROWS[:90])}, "newer": {"train.jsonl": lines(ROWS[:91])}},
    "a/columns": {"main": {"train.csv": b"question,answer,id\nq 0,a 0,x0\nq 1,a 1,x1\n"}},
    "a/damaged": {"main": {"train.jsonl": b"{no json"}},
    "a/private": {"main": {"train.jsonl": lines(ROWS)}},
    "a/gated": {"main": {"train.jsonl": lines(ROWS)}},
}
COMMITS = {"main": "0" * 40, "newer": "2" * 40}
BRANCHES = {commit: branch for branch, commit in COMMITS.items()}
HAS_DATASETS = importlib.util.find_spec("datasets") is not None


class FakeRows(list):
    """datasets.Dataset, as far as data.py uses it, of a file of JSON lines."""

    @classmethod
    def from_file(cls, path):
        with open(path) as file:
            rows = cls(map(json.loads, file))
        rows.cache_files = [{"filename": path}]
        return rows

    def with_format(self, name):
        assert name == "arrow"  # others decode images, for which the library needs Pillow
        return self

    def iter(self, n):
        for i in range(0, len(self), n):
            yield SimpleNamespace(to_pylist=functools.partial(list, self[i : i + n]))


def fake_load_from_disk(folder):
    paths = sorted(Path(folder).rglob("*.arrow"))
    if (Path(folder) / "dataset_dict.json").exists():
        return {path.parent.name: FakeRows.from_file(path) for path in paths}
    return FakeRows.from_file(paths[0])


def fake_load_dataset(hub_id, subset, split, revision, keep_in_memory):
    """What the library does with SETS: it fetches files, and keeps rows by their commit."""
    assert not keep_in_memory
    cache = Path(os.environ["HF_HOME"], "fake", hub_id, str(subset))
    try:
        commit = revision or fake_get(f"/api/datasets/{hub_id}", "commit")
        files = SETS[hub_id][BRANCHES[commit]]
        made = cache / commit / f"{split}.arrow"
        if not made.exists():
            names = [name for name in files if split in name and (subset or "") in name]
            if not names:
                raise ValueError(f'Unknown split "{split}". Should be one of [\'train\', \'test\'].')
            rows = b""
            for name in names:
                content = fake_get(f"/datasets/{hub_id}/resolve/{commit}/{name}", "content")
                if name.endswith(".csv"):
                    rows += lines(csv.DictReader(content.decode().splitlines()))
                else:
                    rows += lines(map(json.loads, content.splitlines()))
            made.parent.mkdir(parents=True, exist_ok=True)
            made.write_bytes(rows)
    except (OSError, http.client.HTTPException):  # the Hub does not answer
        if not (kept := [*cache.glob(f"*/{split}.arrow")]):
            raise
        made = kept[0]
    return FakeRows.from_file(made)


def fake_get(path, what):
    request = urllib.request.Request(os.environ["HF_ENDPOINT"] + path)
    if "HF_TOKEN" in os.environ:
        request.add_header("Authorization", f"Bearer {os.environ['HF_TOKEN']}")
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.read() if what == "content" else answer.headers["X-Repo-Commit"]
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise
        words = "is a gated dataset on the Hub"
        if error.code != 403:
            words = "doesn't exist on the Hub or cannot be accessed"
        raise FakeError(f"Dataset '{path.split('datasets/')[1]}' {words}") from None


class FakeError(Exception):
    """DatasetsError."""


def put_fake_datasets(modules):
    """Adds `datasets` to sys.modules where it is not installed. Where it is, the tests hold the library itself."""
    if not HAS_DATASETS:
        modules["datasets"] = SimpleNamespace(
            Dataset=FakeRows, DatasetDict=dict, load_dataset=fake_load_dataset, load_from_disk=fake_load_from_disk,
            exceptions=SimpleNamespace(DatasetsError=FakeError))


# ---------------------------------------------------------------- a server


class Hub(QuietHandler):
    """What the library asks for: the commit of a branch, its list of files, and the files."""

    def answer(self, with_content):
        if self.server.failures:
            if self.server.failures.pop() == "an error of the server":
                return self.refuse(500, "Down")
            return self.connection.shutdown(socket.SHUT_RDWR)
        path, _, _ = self.path.partition("?")
        match = re.fullmatch(r"(/api)?/datasets/(\w+/\w+)(?:/(revision|tree|resolve)/([^/]+)(?:/(.+))?)?", path)
        if match is None or match[2] not in SETS:
            return self.refuse(404, "RepoNotFound")
        _, hub_id, what, revision, file = match.groups()
        may_read = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        # the Hub does not tell strangers that a private set exists, and shows them the names of a gated one's files
        if hub_id == "a/private" and not may_read:
            return self.refuse(401, "RepoNotFound")
        if hub_id == "a/gated" and not may_read:
            return self.refuse(403, "GatedRepo")

        revision = unquote(revision or "main")
        branch = self.server.newer.get(revision, revision)
        branch = BRANCHES.get(branch, branch)  # the library asks for a branch, and then for its commit
        if branch not in SETS[hub_id]:
            return self.refuse(404, "RevisionNotFound")
        files = SETS[hub_id][branch]
        commit = COMMITS[branch]
        if what == "resolve":
            if unquote(file) not in files:
                return self.refuse(404, "EntryNotFound")
            if with_content:
                self.server.fetched.append(unquote(file))
            return self.send(files[unquote(file)], commit, f"id-of-{file}-{commit}", with_content)
        if what == "tree":
            return self.send(json.dumps(tree(files, unquote(file or ""))).encode(), commit, "list", with_content)
        siblings = [{"rfilename": name} for name in files]
        found = {"id": hub_id, "sha": commit, "siblings": siblings}
        return self.send(json.dumps(found).encode(), commit, "list", with_content)

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


def tree(files, folder):
    """What is in a folder of a data set, as the Hub lists it."""
    entries = {}
    for name, content in files.items():
        if name.startswith(f"{folder}/" if folder else ""):
            inside, _, deeper = name.removeprefix(f"{folder}/" if folder else "").partition("/")
            path = f"{folder}/{inside}".removeprefix("/")
            size = 0 if deeper else len(content)
            entries[path] = {"type": "directory" if deeper else "file", "path": path, "size": size, "oid": path}
    return list(entries.values())


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    server.fetched = []  # the names of files, once for each time
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
    put_fake_datasets(sys.modules)
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


def test_a_split_has_the_tokens_and_masks_of_its_jsonl(ask, hub, expected):
    names = ["a/lines", "a/lines:train", "a/nested/en", "a/nested/en:train"]
    found, _ = ask(read, [*names, "a/nested/de", "a/lines:test"])
    for name, documents in zip(names, found):
        assert documents == expected(250), name
    assert found[-2:] == [expected(7), expected(5)]


MESSAGES = {  # name: words of the message
    "a/nobody": ["a/nobody: Dataset 'a/nobody' doesn't exist on the Hub or cannot be accessed", ".jsonl"],
    "a/private": ["a/private: ", "cannot be accessed"],
    "a/gated": ["a/gated: ", "gated"],
    "a/lines:dev": ["a/lines:dev: ", 'Unknown split "dev". Should be one of [\'train\', \'test\']'],
    "a/damaged": ["a/damaged: "],
    "a/b/train.jsonl": ["a/b/train.jsonl: no such file; expected a .jsonl", "org/name:split"],
    "a/lines:train/x": ["a/lines:train/x: no such file; expected"],
}


def test_what_is_not_there_is_named_with_what_is(ask):
    found, _ = ask(read, list(MESSAGES))
    for name, message in zip(MESSAGES, found):
        missing = [word for word in MESSAGES[name] if word not in message]
        assert not missing, message
        assert "\n" not in message
        assert len(message) < 500


def test_who_is_logged_in_reads_private_and_gated_sets(ask, expected):
    found, _ = ask(read, ["a/private", "a/gated"], HF_TOKEN=TOKEN)
    assert found == [expected(250), expected(250)]


def test_without_the_hub_rows_of_an_earlier_start_are_used(ask, expected):
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}  # the port of "discard": nobody answers
    (message,), _ = ask(read, ["a/nested/en"], **nowhere)
    assert message.startswith("a/nested/en: ")
    for environment in ({}, nowhere, {"HF_HUB_OFFLINE": "1"} if HAS_DATASETS else nowhere):
        found, _ = ask(read, ["a/nested/en"], **environment)
        assert found == [expected(250)]


@pytest.mark.parametrize("failure", ["an error of the server", "a cut connection"])
def test_a_hub_that_fails_for_a_moment_ends_no_start(ask, hub, expected, failure):
    hub.failures += [failure, failure]
    assert ask(read, ["a/lines"])[0] == [expected(250)]
    assert not hub.failures


def test_a_set_without_the_library_is_one_message_with_the_command(monkeypatch, tiny):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails, also where it is installed
    with pytest.raises(ValueError, match=r"a/lines: .*pip install datasets"):
        read_data("a/lines", tiny)


def test_a_folder_that_datasets_has_saved_is_read(ask, expected, tmp_path):
    one = saved_set(tmp_path / "one", ROWS[:7])
    several = {split: saved_set(tmp_path / "several" / split, rows) for split, rows in
               (("train", ROWS[:7]), ("test", ROWS[:5]))}
    (tmp_path / "several/dataset_dict.json").write_text(json.dumps({"splits": [*several]}))
    folder = str(tmp_path / "several")
    found, _ = ask(read, [str(one), folder, f"{folder}:test", f"{folder}:dev"])
    assert found[:3] == [expected(7), expected(7), expected(5)]
    assert "no split dev, but " in found[3]


def test_rows_that_the_library_cannot_read_are_refused_with_its_words(monkeypatch, tmp_path):
    class Rows(FakeRows):
        def iter(self, n):
            yield from super().iter(n)
            raise ImportError("To support decoding images, please install 'Pillow'.")

    (tmp_path / "a.arrow").write_text('{"text": "a"}\n')
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=Rows))
    rows = data.examples_in("arrow", [tmp_path / "a.arrow"])
    assert next(rows) == (1, {"text": "a"})
    with pytest.raises(ValueError, match="cannot be read as arrow: To support decoding images"):
        next(rows)


def saved_set(folder, rows):
    if HAS_DATASETS:
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(folder)
    else:
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        (folder / "data-00000-of-00001.arrow").write_bytes(lines(rows))
    return folder


def test_a_file_with_the_name_of_a_data_set_is_that_file(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "arrow_files", lambda name, _: pytest.fail(f"{name} was looked for on the Hub"))
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "b.csv"
    path.write_text("text\na b\n")
    documents, _ = read_data("a/b.csv", tiny)
    assert len(pieces(documents)) == 1
    path.rename("a/b")
    with pytest.raises(ValueError, match="a/b: not a format that is read"):
        read_data("a/b", tiny)


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
    assert "the checksum of all --data's tokens and masks was" in log


def test_a_run_resumes_on_the_data_that_its_names_stood_for(ask, hub, tmp_path):
    name = "a/growing"
    commit = COMMITS["main"]
    out = tmp_path / "out"
    # the number of steps follows from the data: other rows would give another one
    argv = ["--data", name, "--eval_data", f"{name}:train", "--seq_len", "64", "--batch_size", "9", "--save_every", "1",
            "--sample", "", "--resume", "--out", str(out)]
    code, log = ask(train_main, argv)
    assert not code, log
    assert f"{name}: 90 examples" in log
    revisions = {f"datasets/{name}": commit, f"datasets/{name}:train": commit}
    assert json.loads((out / "args.json").read_text())["revisions"] == revisions

    hub.newer["main"] = "newer"
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
