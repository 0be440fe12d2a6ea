"""What it takes to read a large file of chats: seconds of tokenizing and packing, memory, a start from a warm cache.

    python tests/bench_data.py [--mb 1000] [--rounds 3] [--cores 1 2]

Reads a file of --mb (1e6 bytes) of conversations that it writes. Memory: own pages (RssAnon) above the imports.
"""

import argparse
import itertools
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT, SEQ_LEN = Path(__file__).resolve().parent.parent, 4096
sys.path.insert(0, str(ROOT))
import data  # noqa: E402
import make_tiny  # noqa: E402


def write_chats(path, n_bytes):
    """Conversations of 0.2 to 8 KB, no two the same."""
    text, rng = "".join(source for _, source in make_tiny.stdlib_modules()), random.Random(0)
    n_written = 0
    with open(path, "w") as file:
        while n_written < n_bytes:
            messages = []
            for role in ("user", "assistant", "user", "assistant"):
                n, start = int(rng.lognormvariate(6, 1)) % 4000 + 20, rng.randrange(len(text) - 4000)
                messages.append({"role": role, "content": text[start : start + n]})
            n_written += file.write(json.dumps({"messages": messages}) + "\n")


def own_mib():
    """Memory of this process that is not a file's."""
    return int(re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 2**10


def measure(path, n_cores):
    """Prints, as JSON, the seconds of what a rank does, the first being tokenizing or finding the file in the cache."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:n_cores])
    tokenizer, base, samples = data.Tokenizer(ROOT / "tests" / "tiny"), own_mib(), []

    def watch():
        while True:
            samples.append(own_mib() - base)
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()
    marks = [time.perf_counter()]
    folder = data.tokenized(path, tokenizer)
    marks.append(time.perf_counter())
    documents = data.open_documents([folder], [path], SEQ_LEN)
    marks.append(time.perf_counter())
    loader = data.Loader(documents, SEQ_LEN, True, 1, 0, 0, 1)
    loader.step(0, 8)
    marks.append(time.perf_counter())
    seconds = dict(zip(("found_s", "open_s", "pack_s"), (end - start for start, end in itertools.pairwise(marks))))
    cpu_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    print(json.dumps({**seconds, "cpu_s": cpu_s, "peak_mib": max(samples), "tokens": documents.files[0].n_tokens}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--measure", nargs=2, metavar=("FILE", "CORES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(args.measure[0], int(args.measure[1]))
    with tempfile.TemporaryDirectory() as folder:
        path, results = Path(folder, "chats.jsonl"), {}
        write_chats(path, args.mb * 1e6)
        for n, cores in itertools.product(range(args.rounds), args.cores):
            command = [sys.executable, __file__, "--measure", path, str(cores)]
            os.environ["XDG_CACHE_HOME"] = f"{folder}/{n}-{cores}"
            for kind in ("cold", "warm"):
                out = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
                results.setdefault((cores, kind), []).append(json.loads(out))
        for (cores, kind), rounds in results.items():
            medians = (f"{key} {statistics.median(one[key] for one in rounds):,.2f}" for key in rounds[0])
            print(f"{cores} core(s), {kind} cache: {', '.join(medians)}")


if __name__ == "__main__":
    main()
