"""What the tests share: a small model folder, a small chat file, and ranks that start in a fraction of a second.

Ranks are processes of a fork server that has imported train.py once: four of them cost less than one `import torch`.
They run train.main() on gloo, exactly as torchrun would start it.
"""

import atexit
import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if "oomph-tests-" not in os.environ.get("XDG_CACHE_HOME", ""):  # of tokenized files; ranks, which import this too, inherit it
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="oomph-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["train", "torch._dynamo", "numpy.ma", "pytest", "conftest"])  # not in each rank


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(items):
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def start_rank(rank, world, port, function, args, log):
    trace = open(f"{log}.trace", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, trace)  # where each thread stands, asked for when the rank hangs
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")  # gloo, on any machine
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)):
        os.environ[name] = str(value)
    with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            function(*args)
        except SystemExit as stop:
            print(stop, flush=True)
            os._exit(stop.code if isinstance(stop.code, int) else 1)


def start_ranks(world, function, args, logs, timeout=120):
    """Runs function(*args) on `world` ranks at once -> their exit codes. TimeoutError if one hangs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [processes.Process(target=start_rank, args=(r, world, port, function, args, logs[r])) for r in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout)
        if process.is_alive():
            for hung in ranks:
                if hung.is_alive():
                    os.kill(hung.pid, signal.SIGUSR2)
            time.sleep(1)
            for hung in ranks:
                hung.kill()
            said = [f"rank {r}, exit code {ranks[r].exitcode}:\n{log.read_text()}\n{Path(f'{log}.trace').read_text()}"
                    for r, log in enumerate(logs)]
            raise TimeoutError(f"{function} {args} on {world} ranks hung\n" + "\n".join(said))
    return [process.exitcode for process in ranks]


def train_main(argv):
    import train

    train.main(argv)


def run_ranks(world, argv, out):
    """Runs train.main(argv + --out) on `world` ranks -> (rows of metrics.jsonl, what all ranks said, exit codes). Without
    checkpoints unless argv asks for them."""
    argv = [str(arg) for arg in argv] + ["--out", str(out)]
    argv += ["--save_every", "0"] * ("--save_every" not in argv)
    logs = [out.parent / f"{out.name}-rank{rank}.log" for rank in range(world)]
    codes = start_ranks(world, train_main, (argv,), logs)
    metrics = out / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return rows, "".join(log.read_text() for log in logs), codes


def on_ranks(world, function, folder, *args):
    """Runs function(folder, *args) inside a process group of `world` ranks; what it asserts must hold on each."""
    logs = [folder / f"{function.__name__}-rank{rank}.log" for rank in range(world)]
    codes = start_ranks(world, in_group, (function, folder, *args), logs)
    assert codes == [0] * world, "".join(log.read_text() for log in logs)


def in_group(function, *args):
    import train

    train.init_processes(distributed=True)
    function(*args)
    train.leave()


def losses(world, argv, out):
    """Losses of every step of a run that must succeed."""
    return curve(world, argv, out)[0]


def curve(world, argv, out):
    """(losses, gradient norms) of every step of a run that must succeed.

    A rank that the allocator or a thread of gloo's aborts gets one more try, with a warning: met once in continuous
    integration, never in 480 runs since (LOG.md, 2026-11-21). What a run itself does wrong ends with another code.
    """
    rows, text, codes = run_ranks(world, [*argv, "--log_every", 1], out)
    if {-signal.SIGABRT, -signal.SIGSEGV} & set(codes):
        warnings.warn(f"ranks ended with {codes}, once more:\n{text}", stacklevel=2)
        rows, text, codes = run_ranks(world, [*argv, "--log_every", 1], out.with_name(f"{out.name}-again"))
    assert codes == [0] * world, text
    return [[row[key] for row in rows if "loss" in row] for key in ("loss", "grad_norm")]


# Sizes that do not divide: 3 and 4 ranks hold unequal shards of the 16 key rows, of 4,096 / 3 words, of 5 adapter rows.
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 64,
    "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 512, "dtype": "float32",
    "initializer_range": 0.05,
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model folder with config and tokenizer for --random_init."""
    path = tmp_path_factory.mktemp("model")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(HERE / "tiny" / file, path)
    (path / "config.json").write_text(json.dumps(SHAPE))
    return path


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """A file of 80 conversations of uneven length."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rng = random.Random(0)
    words = "the file is read from disk and returned as a list of str self None import def".split()
    with open(path, "w") as file:
        for _ in range(80):
            messages = [{"role": role, "content": " ".join(rng.choices(words, k=rng.randint(1, 20)))}
                        for role in ("user", "assistant") * rng.randint(1, 2)]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def documents_of(tokens, supervised, starts):
    """data.Documents of one file: tokens [n], supervised [n] bool, documents from one of starts [documents + 1] to the next."""
    import numpy as np

    import data

    starts = np.asarray(starts, np.int64)
    n_targets = data.count_targets(supervised, starts[:-1], starts[1:])
    zeros = np.zeros(len(n_targets), np.int64)
    return data.Documents([tokens], [supervised], zeros, starts[:-1], starts[1:], n_targets, zeros)


def read_data(path, tokenizer, seq_len=1000, **options):
    """A data file -> (Documents, counts), by way of a cache of its own."""
    import data

    with tempfile.TemporaryDirectory() as cache:
        folder = data.cached(str(path), False, tokenizer, cache, lambda: None, False)
        documents, (count,) = data.open_documents([folder], [str(path)], seq_len, **options)
        return documents, count


def pieces(documents):
    """[(token ids, supervised)] of each document."""
    return [tuple(array.tolist() for array in documents.piece(i)) for i in range(len(documents.start))]


def start_fake_group(world):
    """Makes this process rank 0 of `world`, alone: collectives at once write what they would if all ranks held the same.
    torch's own fake group leaves outputs uninitialised, which may be nan and end a run."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def alone(output=None, input=None, output_tensor=None, input_tensor=None, **_):
        output, given = (output_tensor, input_tensor) if output is None else (output, input)
        if output.numel() > given.numel():
            output.view(output.numel() // given.numel(), -1)[1:] = given.view(1, -1)  # the first row is where `given` lies
        else:
            output.copy_(given.view(-1, output.numel())[0])

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    for name in ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"):
        setattr(dist, name, alone)
    dist.all_to_all_single = lambda output, given, **_: output.copy_(given[:1].expand_as(given))


def count_flops(function):
    """FLOP of the matrix products and attention that function() runs, by torch's own formulas."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Count(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function.overloadpacket in flop_registry:
                Count.total += flop_registry[function.overloadpacket](*args, **(kwargs or {}), out_val=out)
            return out

    with Count():
        function()
    return Count.total
