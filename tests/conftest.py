"""What the tests share: a small model folder, a small chat file, and ranks that start in a fraction of a second.

Ranks are processes of a fork server that has imported train.py once: four of them cost less than one `import torch`.
They run train.main() on gloo, exactly as torchrun would start it.
"""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import socket
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["train"])


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(items):
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def start_rank(rank, world, port, argv, log):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)):
        os.environ[name] = str(value)
    import train

    with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            train.main(argv)
        except SystemExit as stop:
            print(stop, flush=True)
            os._exit(stop.code if isinstance(stop.code, int) else 1)


def run_ranks(world, argv, out, timeout=120):
    """Runs train.main(argv + --out) on `world` ranks -> (rows of metrics.jsonl, output of rank 0, exit codes)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [str(arg) for arg in argv] + ["--out", str(out)]
    logs = [out.parent / f"{out.name}-rank{rank}.log" for rank in range(world)]
    ranks = [processes.Process(target=start_rank, args=(r, world, port, argv, logs[r])) for r in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout)
        if process.is_alive():
            for hung in ranks:
                hung.kill()
            raise TimeoutError(f"{argv} on {world} ranks: hung. Rank 0 said:\n{logs[0].read_text()}")
    text = logs[0].read_text()
    metrics = out / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return rows, text, [process.exitcode for process in ranks]


def losses(world, argv, out):
    """Losses of every step of a run that must succeed."""
    rows, text, codes = run_ranks(world, [*argv, "--log_every", 1], out)
    assert codes == [0] * world, text
    return [row["loss"] for row in rows if "loss" in row]


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
