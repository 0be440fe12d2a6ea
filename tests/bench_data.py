"""What it takes to read a large file of chats: MB/s of tokenizing and of packing, memory, and a start from a warm cache.

    python tests/bench_data.py [--mb 1000] [--rounds 3] [--cores 1 2]

Writes conversations made of the standard library's source, four turns each, into a file of --mb (1e6 bytes), and reads it
with the built-in model's tokenizer. Each measurement is a process of its own. Memory is the peak of the process's own pages
(RssAnon) above its imports, for workers of each process, sampled every 20 ms: what is mapped from files costs nothing that
the system could not take back. Rates are medians over the rounds, in which one core and two take turns.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import data

TINY = Path(__file__).parent / "tiny"
SEQ_LEN = 4096


def write_chats(path, n_bytes):
    """Conversations of 0.2 to 8 KB, no two the same -> their number."""
    text, rng = "".join(source for _, source in data.stdlib_modules()), random.Random(0)
    written = rows = 0
    with open(path, "w") as file:
        while written < n_bytes:
            messages = []
            for role in ("user", "assistant", "user", "assistant"):
                n, at = int(rng.lognormvariate(6, 1)) % 4000 + 20, rng.randrange(len(text) - 4000)
                messages.append({"role": role, "content": text[at : at + n]})
            written += file.write(json.dumps({"messages": messages}) + "\n")
            rows += 1
    return rows


def own_mib(pid):
    """Memory of a process that is not a file's, or 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 2**10 for line in lines if line.startswith("RssAnon")), 0.0)


def children_of(pid):
    pids = [int(p) for task in Path(f"/proc/{pid}/task").glob("*") for p in (task / "children").read_text().split()]
    return pids + [grandchild for child in pids for grandchild in children_of(child)]


class Memory:
    """Peak MiB of this process above what it has now, and of the largest process below it."""

    def __init__(self):
        self.base, self.own, self.below, self.over = own_mib(os.getpid()), 0.0, 0.0, threading.Event()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        while not self.over.wait(0.02):
            self.own = max(self.own, own_mib(os.getpid()) - self.base)
            try:
                self.below = max([self.below, *map(own_mib, children_of(os.getpid()))])
            except OSError:  # one has ended in between
                continue

    def stop(self):
        self.over.set()
        return self.own, self.below


def cold(path, cache, cores, report):
    """Tokenizes the file on so many cores into an empty cache."""
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:cores])
    tokenizer = data.Tokenizer(TINY)
    shutil.rmtree(cache, ignore_errors=True)
    memory, start = Memory(), time.perf_counter()
    data.cached(str(path), False, tokenizer, cache, lambda: None, False)
    report.put((time.perf_counter() - start, *memory.stop()))


def warm(path, cache, report):
    """What a rank does when the file is in the cache: find it, check it, open it, pack it, make a step."""
    tokenizer = data.Tokenizer(TINY)
    memory, marks = Memory(), [time.perf_counter()]
    folder = data.cached(str(path), False, tokenizer, cache, lambda: None, False)
    marks.append(time.perf_counter())
    documents, (count,) = data.open_documents([folder], [str(path)], SEQ_LEN)
    marks.append(time.perf_counter())
    loader = data.Loader(documents, SEQ_LEN, True, 1, 0, 1, seed=0)
    marks.append(time.perf_counter())
    loader.step(0, 8)
    peak, _ = memory.stop()
    fill = loader.per_row[:, 1].sum() / SEQ_LEN / len(loader.rows)
    sizes = count["n_tokens"], len(documents.start), len(loader.rows)
    report.put((*(b - a for a, b in zip(marks, marks[1:])), peak, *sizes, fill))


def measure(function, *args):
    report = multiprocessing.Queue()
    process = multiprocessing.Process(target=function, args=(*args, report))
    process.start()
    result = report.get(timeout=3600)
    process.join()
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path, cache = Path(folder, "chats.jsonl"), Path(folder, "cache")
        rows = write_chats(path, args.mb * 1e6)
        mb = path.stat().st_size / 1e6
        print(f"{mb:,.0f} MB, {rows:,} conversations")
        rounds = [[measure(cold, path, cache, cores) for cores in args.cores] for _ in range(args.rounds)]
        for cores, measured in zip(args.cores, zip(*rounds)):
            seconds, own, below = zip(*measured)
            rates = ", ".join(f"{mb / s:.2f}" for s in seconds)
            print(f"tokenizing on {cores} core(s): {mb / statistics.median(seconds):.2f} MB/s (each: {rates}); "
                  f"{max(own):.0f} MiB above the imports" + f", its workers up to {max(below):.0f} MiB each" * (max(below) > 0))
        rounds = [measure(warm, path, cache) for _ in range(args.rounds)]
        find, open_, packing, peak, n_tokens, n_documents, n_rows, fill = map(statistics.median, zip(*rounds))
        print(f"from a warm cache: found and checked in {find:.2f} s, opened in {open_:.2f} s, {n_documents:,.0f} documents of "
              f"{n_tokens:,.0f} tokens packed into {n_rows:,.0f} rows of {SEQ_LEN}, {fill:.2%} full, in {packing:.2f} s "
              f"({mb / packing:,.0f} MB/s); {peak:.0f} MiB above the imports")


if __name__ == "__main__":
    main()
