"""A model of the Hub, fetched from a server on this machine: a signal ends a download at once, and the next start
continues it."""

import contextlib
import json
import os
import re
import runpy
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import HERE, processes
from test_formats import ANSWER, QUESTION, chat, jsonl

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {path.name: path.read_bytes() for path in (HERE / "tiny").iterdir() if path.is_file()}
WEIGHTS = "model.safetensors"


class QuietHandler(BaseHTTPRequestHandler):
    """Has its subclass answer(), the same for HEAD as for GET but without content. Prints no line a request: they would
    be among what pytest shows of a test that fails."""

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(with_content=False)

    def do_GET(self):
        self.answer(with_content=True)


class Hub(QuietHandler):
    """What huggingface_hub asks for: the model's commit, its list of files, and the files or parts of them."""

    def answer(self, with_content):
        path, _, _ = self.path.partition("?")
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/a/b/tree/"):
            content = json.dumps([{"type": "file", "path": name, "size": len(content), "oid": f"id-of-{name}"}
                                  for name, content in FILES.items()]).encode()
        elif path.startswith("/api/models/a/b"):
            siblings = [{"rfilename": name} for name in FILES]
            content = json.dumps({"id": "a/b", "sha": COMMIT, "siblings": siblings}).encode()
        elif name in FILES:
            content = FILES[name]
        else:
            self.send_error(404)
            return
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"id-of-{name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content) - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if with_content:
            self.server.fetched.append(name)
            with contextlib.suppress(OSError):  # the reader has gone
                self.send(name, content[first:])

    def send(self, name, content):
        half = len(content) // 2
        self.wfile.write(content[:half])
        if name == WEIGHTS and self.server.is_slow.is_set():
            self.server.in_the_middle.set()
            while self.server.is_slow.is_set():  # a byte now and then, so that no timeout ends it
                self.wfile.write(b"x")
                time.sleep(0.2)
        self.wfile.write(content[half:])


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    server.fetched = []  # the names of files, once for each request
    server.is_slow = threading.Event()
    server.in_the_middle = threading.Event()  # of the weights
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.is_slow.clear()
    server.shutdown()


def script(environment, log, argv):
    """`python train.py`, in a process that has imported torch already."""
    os.environ.update(environment)
    assert "huggingface_hub" not in sys.modules  # it reads the environment once
    sys.argv[1:] = argv
    with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        file.reconfigure(errors="backslashreplace")
        try:
            runpy.run_path(str(HERE.parent / "train.py"), run_name="__main__")
        except SystemExit as end:
            os._exit(end.code)  # as a program ends: threads that still download are not waited for


def start(hub, log, *flags):
    """The process of a run on a model of the hub; `log` gets what it prints."""
    environment = {
        "HF_HOME": str(log.parent / "hub"), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    rows = jsonl(log.parent / "chat.jsonl", chat(QUESTION, ANSWER))
    argv = ["--model", "a/b", "--data", rows, "--seq_len", "64", *map(str, flags)]
    process = processes.Process(target=script, args=(environment, log, argv), daemon=True)
    process.start()
    return process


def ends(process, log):
    process.join(60)  # seconds that a busy machine may need; the server would go on for days
    if process.is_alive():
        process.kill()
        pytest.fail(f"still downloading: {log.read_text()}")
    return process.exitcode


def test_a_look_at_the_data_fetches_no_weights(hub, tmp_path):
    log = tmp_path / "log"
    assert ends(start(hub, log, "--inspect", 1), log) == 0, log.read_text()
    assert f"⟦{ANSWER['content']}" in log.read_text()
    assert "tokenizer.json" in hub.fetched and WEIGHTS not in hub.fetched


def test_a_signal_ends_a_download_at_once_and_the_next_start_continues_it(hub, tmp_path):
    log = tmp_path / "log"
    flags = ["--lora", "--steps", 1, "--sample", "", "--out", tmp_path / "run"]
    others = {name for name in FILES if name.endswith((".json", ".jinja"))}
    for number in (signal.SIGTERM, signal.SIGINT):
        hub.is_slow.set()
        hub.in_the_middle.clear()
        process = start(hub, log, *flags)
        while not hub.in_the_middle.wait(1):
            assert process.is_alive(), log.read_text()
        while others - {path.name for path in tmp_path.glob("hub/hub/*/snapshots/*/*")}:
            assert process.is_alive(), log.read_text()
            time.sleep(0.1)
        os.kill(process.pid, number)
        assert ends(process, log) == 130
        said = log.read_text()
        assert said.endswith("\ntrain.py: error: interrupted, nothing saved\n") and "Traceback" not in said, said
    hub.is_slow.clear()
    assert ends(start(hub, log, *flags), log) == 0, log.read_text()
    assert (tmp_path / "run/final").exists()
    assert [hub.fetched.count(name) for name in sorted(others)] == [1] * len(others)
    assert hub.fetched.count(WEIGHTS) == 3
