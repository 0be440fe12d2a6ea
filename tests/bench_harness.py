"""What the benchmarks share: fresh processes, peaks of memory, rank 0 of a large world, markdown tables.

It imports no file of the trainer before a function needs one: bench_speed.py uses it for several checkouts.
"""

import contextlib
import json
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
MIB, GIB = 2**20, 2**30
sys.path[:0] = [str(ROOT), str(TESTS)]


def table(title, columns, rows):
    """Prints a markdown table."""
    print(f"\n{title}\n\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |")
    sys.stdout.flush()


def spread(values, digits=2):
    """'median (least to most)'."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def in_processes(function, cases, *args):
    """function(case, *args) for all cases at once, each in a fresh process -> what they returned, in order."""
    with ProcessPoolExecutor(len(cases), multiprocessing.get_context("spawn")) as pool:
        return [answer.result() for answer in [pool.submit(function, case, *args) for case in cases]]


def resident(key):
    """MiB of a line of /proc/self/status: VmRSS, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) / 1024


def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS


@contextlib.contextmanager
def peak_growth():
    """-> a list that gets the MiB of resident memory, pages of mapped files included, from the start of the block to
    the highest point inside it."""
    peak = []
    reset_peak()
    start = resident("VmRSS")
    yield peak
    peak.append(resident("VmHWM") - start)


def be_rank_0(world):
    """Makes train.main() rank 0 of `world` ranks that do not exist: collectives return at once, as if all ranks held
    the same."""
    import conftest
    import train

    class Alone(train.Ranks):
        def __init__(self, want_group, timeout):
            super().__init__(want_group and world == 1, timeout)
            if world > 1:
                conftest.start_fake_group(world)
            self.world = world

    train.Ranks = Alone


def run_steps(argv, n, tick=lambda: None):
    """train.main() up to the end of step n, without output. tick() is called before each step and after the last."""
    import data
    import train

    class Done(BaseException):
        """No Exception, so that nothing takes it for an error of the step."""

    def ahead(*args, **kwargs):
        batches = real_ahead(*args, **kwargs)
        for _ in range(n):
            tick()
            yield next(batches)
        tick()
        raise Done

    real_ahead, data.Loader.ahead = data.Loader.ahead, ahead
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet), contextlib.suppress(Done):
        flags = ["--steps", str(n + 1), "--sample", "", "--save_every", "0", "--log_every", "1"]
        with contextlib.ExitStack() as exits:
            train.main([*argv, *flags], {}, exits)


def metrics(out):
    """Rows of metrics.jsonl. The last line of a run that was killed may be half a row."""
    rows = []
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        for line in (out / "metrics.jsonl").read_text().splitlines():
            rows.append(json.loads(line))
    return rows


def write_model(folder, config):
    """A Hugging Face folder with random bf16 weights and the built-in model's tokenizer -> bytes of the weights."""
    import torch

    import data
    import model as lm

    with torch.device("meta"):
        model = lm.Transformer(lm.parse_config(config))
    source, bf16 = data.RandomWeights(model, 0, torch.device("cpu")), torch.bfloat16
    layout = {name: stored._replace(dtype=bf16) for name, stored in source.tensors.items()}
    weights = ((name, source.rows(name, 0, stored.shape[0]).to(bf16)) for name, stored in layout.items())
    folder.mkdir(exist_ok=True)
    data.Tokenizer(TESTS / "tiny").save(folder)
    data.save_model(weights, layout, folder, config, write=True)
    return 2 * sum(p.numel() for p in model.parameters())
