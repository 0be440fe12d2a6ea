"""Tests on all cores: the files of tests run side by side, and beside them what is marked gpu, on an emulated device.

pytest collects the tests. Then forks of its process run one file each and take the next one when they are done; what
they report is sent to the first process, which shows it as if it had run the tests itself. No plugin does this, because
none is needed otherwise, and forks have torch imported already.
"""

import atexit
import multiprocessing.connection
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import emulated_cuda  # before torch

import pytest
import torch

# The files to begin with: a long one that came last would keep one core busy alone. faults and torchrun mostly wait,
# which costs nothing while the tests of the emulated device still have work for that core.
LONGEST = (
    "sharding", "faults", "torchrun", "scripts", "compile", "plan", "train", "resume", "forks", "resident", "dpo",
    "trace_plan", "optim", "fp16", "embeddings", "formats", "log")
WAITS = "test_what_is_marked_gpu_passes_on_an_emulated_device"  # the last test
EMULATED = pytest.StashKey()
forks = multiprocessing.get_context("fork")


def start_emulated(config):
    """The tests marked gpu on an emulated device: (process, its output), or why there is none."""
    try:
        if torch.version.cuda or torch.version.hip:
            raise OSError("this torch has a GPU's device of its own; the CPU build has none")
        emulated_cuda.library()
    except (OSError, subprocess.CalledProcessError) as error:
        return error
    log = Path(tempfile.mkdtemp(dir=os.environ["XDG_CACHE_HOME"]), "log")
    files = [path for path in Path(__file__).parent.glob("test_*.py") if "mark.gpu" in path.read_text()]
    marks = f"gpu and ({config.option.markexpr})" if config.option.markexpr else "gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", marks, "-p", "no:cacheprovider", *files]
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"OOMPH_EMULATED_CUDA": "1"})
    atexit.register(process.kill)
    return process, log


class Sender:
    """A plugin that sends the first process what this one would show."""

    def __init__(self, config, connection):
        self.config = config
        self.connection = connection

    def pytest_runtest_logstart(self, nodeid, location):
        self.connection.send(("start", (nodeid, location)))

    def pytest_runtest_logreport(self, report):
        message = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("report", message))


def run_files(session, files, connection, cores):
    """The life of a fork: it asks for the name of a file and runs its tests, until there are no more. It has cores of
    its own: where more threads than cores share the work of a kernel, those that run wait for those that do not."""
    os.environ["XDG_CACHE_HOME"] += f"/{os.getpid()}"
    os.sched_setaffinity(0, cores)
    config = session.config
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # or all processes would write to one file
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(Sender(config, connection))
    connection.send(("next", None))
    while (name := connection.recv()) is not None:
        items = files[name]
        for item, following in zip(items, [*items[1:], None]):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        connection.send(("next", None))


def report_files(session, workers, names):
    """Gives each worker the next file when it is done with one, and reports what it sends. workers: {connection:
    process}; those that are done are taken out."""
    hook = session.config.hook
    running = {}
    waiting = iter(names)
    while workers:
        for connection in multiprocessing.connection.wait(list(workers)):
            try:
                kind, message = connection.recv()
            except EOFError:
                process = workers[connection]
                process.join()
                kind = "report"
                reason = f"the process that ran this test ended with exit code {process.exitcode}"
                message = hook.pytest_report_to_serializable(config=session.config, report=pytest.TestReport(
                    *running[connection], keywords={}, outcome="failed", longrepr=reason, when="call"))
                session.shouldfail = "the other tests of its file did not run"
            if kind == "start":
                running[connection] = message
                hook.pytest_runtest_logstart(nodeid=message[0], location=message[1])
            elif kind == "report":
                report = hook.pytest_report_from_serializable(config=session.config, data=message)
                hook.pytest_runtest_logreport(report=report)
            else:
                name = next(waiting, None)
                connection.send(name)
                if name is None:
                    workers.pop(connection).join()
            if session.shouldfail:
                raise session.Failed(session.shouldfail)


def pytest_runtestloop(session):
    """Where pytest is to stop inside a test or to show what tests print, and for a single file, its own loop runs the
    tests, and nothing but the emulated device runs beside them."""
    option = session.config.option
    if option.collectonly or session.testsfailed:
        return None
    last = [item for item in session.items if item.name == WAITS]
    files = {}
    for item in session.items:
        if item not in last:
            files.setdefault(item.path.stem.removeprefix("test_"), []).append(item)
    n_workers = min(4, len(files))
    if sys.platform == "linux":
        n_workers = min(n_workers, len(os.sched_getaffinity(0)))
    if sys.platform != "linux" or emulated_cuda.LOADED or option.usepdb or option.capture == "no":
        n_workers = 1
    if torch.cuda.is_available():  # a fork may not use a GPU, and there is one for all tests
        n_workers = 1
    workers = {}
    try:
        if n_workers > 1:
            session.config._tmp_path_factory.getbasetemp()  # one for all
            cores = sorted(os.sched_getaffinity(0))
            for number in range(n_workers):
                mine, theirs = forks.Pipe()
                args = session, files, theirs, cores[number::n_workers]
                workers[mine] = forks.Process(target=run_files, args=args)
                with warnings.catch_warnings():
                    # Python 3.12 and newer warn of threads in a process that forks: torch's, which wait for work
                    warnings.simplefilter("ignore", DeprecationWarning)
                    workers[mine].start()
                theirs.close()
        if last and not torch.cuda.is_available():
            session.config.stash[EMULATED] = start_emulated(session.config)
        if n_workers <= 1:
            return None
        by_length = sorted(files, key=lambda name: LONGEST.index(name) if name in LONGEST else len(LONGEST))
        report_files(session, workers, by_length)
        for item in last:
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
        return True
    finally:
        for process in workers.values():
            process.kill()
