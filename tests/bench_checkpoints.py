"""Breaks and times checkpoints on gloo ranks of the CPU, and prints markdown tables. Run by hand:

    python tests/bench_checkpoints.py kill         # 200 times SIGKILL at a random moment of a save; 6 minutes
    python tests/bench_checkpoints.py kill 20 7    # 20 times, with the random moments of seed 7
    python tests/bench_checkpoints.py time         # a training state of 1.1 GB on 4 ranks, against torch.save

kill: two ranks train and save after each step. During a save both, or in every other round one, get SIGKILL. The newest
complete checkpoint must be no older than the last one that was reported, and every complete one byte for byte what an
uninterrupted run has saved at that step. The run continues from it and is killed again, until its end. Half of the
moments are spread over a save, the others sought right after its file operations: a rename lasts microseconds. One kind
of run evaluates after each save, so that kills reach evaluations, too: none may be missing, done twice or forgotten.

time: what train.Saver writes, and what a resume checks and reads, against torch.save and torch.load(weights_only=True)
of the same tensors, gathered in one process before the clock runs, with the fsync and the rename that make it as safe.
Exit code 1: something was not as promised.
"""

import collections
import contextlib
import filecmp
import json
import os
import random
import re
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench_harness import metrics, spread, table, write_model
from conftest import SHAPE, processes, run_ranks, start_rank, start_ranks, state_of

import torch
import torch.distributed as dist

import model as lm
import data
import train

os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # it misses the ranks that were killed


def write_inputs(folder, shape):
    """A model folder -> the flags of a run that saves after each step."""
    write_model(folder, shape)
    return ["--model", folder, "--precision", "fp32", "--seq_len", 64, "--batch_size", 2, "--fsdp2",
            "--sample", "", "--log_every", 1, "--save_every", 1]


def curve(out):
    """{step: what must not differ by a bit between two runs}."""
    return {row["step"]: (row["loss"], row["grad_norm"], row["tokens"]) for row in metrics(out) if "loss" in row}


def evaluations(out):
    return [(row["step"], row["eval_loss"]) for row in metrics(out) if "eval_loss" in row]


def different_files(folder, reference):
    """Names of files that differ by a byte between two folders. The size of metrics.jsonl in a state may differ: rows
    have times in them."""
    names = {path.name for path in (*folder.glob("*"), *reference.glob("*")) if path.suffix != ".part"}
    names -= set(filecmp.cmpfiles(folder, reference, names, shallow=False)[0])
    if train.STATE in names:
        states = [train.data.read_json(path / train.STATE) for path in (folder, reference)]
        if states[0] == train.data.with_checksum(states[1] | {"metrics_bytes": states[0]["metrics_bytes"]}):
            names.remove(train.STATE)
    return sorted(names)


WORLD, STEPS, KEEP = 2, 20, 2
ALONE_S = 60  # a rank whose peer was killed must end by itself within that
PHASES = {  # of a save: the file that begins it
    "nothing is written yet": "", "the folder is made": "checkpoint-{}.part", "rows are begun":
    "checkpoint-{}.part/*.safetensors", "the manifest is begun": f"checkpoint-{{}}.part/{train.STATE}*",
    "the folder is renamed": f"checkpoint-{{}}/{train.STATE}"}


def phase_of(out, step, born):
    """-> index in PHASES. What is older than `born` is of an earlier life of the run."""
    with contextlib.suppress(FileNotFoundError):  # renamed between two calls
        for index, pattern in reversed(list(enumerate(PHASES.values()))):
            if index and any(path.stat().st_mtime >= born for path in out.glob(pattern.format(step))):
                return index
    return 0


def train_to_log(argv):
    try:
        with contextlib.ExitStack() as exits:
            train.main(argv, {}, exits)
    except Exception as error:  # of a rank whose peer is gone
        raise SystemExit(f"{type(error).__name__}: {error}") from error


def start(argv, out):
    """Two ranks of train.main -> (processes, their logs)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logs = [out.with_name(f"{out.name}-rank{rank}.log") for rank in range(WORLD)]
    argv = [str(arg) for arg in (*argv, "--out", out, "--resume", "auto")]
    ranks = [processes.Process(target=start_rank, args=(rank, WORLD, port, train_to_log, (argv,), logs[rank]))
             for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    return ranks, logs


def kill_once(argv, out, reference, rng, everyone):
    """Starts or continues the run and kills it in a save -> (phase, seconds the other rank went on, what was wrong)."""
    before, born = newest(out), time.time()
    step = min(before + rng.randint(1, 2), STEPS - 1)  # after the last one a run may end before it is killed
    ranks, logs = start(argv, out)

    def wait(reached):
        while not reached() and all(rank.is_alive() for rank in ranks):
            time.sleep(0.0003)

    # the save is next. A resumed run rewrites metrics.jsonl, without the rows of steps after its checkpoint
    # (asked in this order: the other way round could find the old rows and then the new time)
    metrics_file = out / "metrics.jsonl"
    wait(lambda: metrics_file.exists() and metrics_file.stat().st_mtime >= born and step in curve(out))
    sought = rng.choice((0, 0, 0, 0, 1, 2, 3, 4))
    wait(lambda: phase_of(out, step, born) >= sought)
    # an evaluation comes behind the save
    time.sleep(rng.uniform(0, 0.3) if "--eval_every" in argv else rng.uniform(0, 0.002 if sought else 0.05))
    for rank in ranks if everyone else [rng.choice(ranks)]:
        rank.kill()
    phase, started = phase_of(out, step, born), time.perf_counter()
    for rank in ranks:
        rank.join(ALONE_S)
    alone_s, said = time.perf_counter() - started, logs[0].read_text()
    reported = [int(n) for n in re.findall(r"checkpoint-(\d+): .* written in [\d.]+ s", said)]
    wrong = check(out, reference, max([before, *reported]))
    if any(rank.exitcode in (None, 0) for rank in ranks):
        wrong.append(f"exit codes {[rank.exitcode for rank in ranks]}")
    if before and not re.search(rf"continuing .*{out.name}/checkpoint-{before}\b", said):
        wrong.append(f"did not continue from checkpoint-{before}")
    return phase, alone_s, [*wrong, *(log.read_text()[-2000:] for log in logs if wrong)]


def newest(out):
    return max(train.checkpoints(out), default=0)


def check(out, reference, at_least):
    """What is wrong with what a run has left, whose newest checkpoint must be of step `at_least` or later."""
    wrong, found = [], train.checkpoints(out)
    if newest(out) < at_least or len(found) < min(KEEP, newest(out)):
        wrong.append(f"complete are steps {sorted(found)}, there was checkpoint-{at_least}")
    of_reference = evaluations(reference)
    for step, folder in found.items():
        names = different_files(folder, reference / folder.name)
        if step == max(found) and of_reference:  # its evaluation may not have been done yet
            names = [name for name in names if name != train.STATE]
        wrong += [f"{folder.name}/{name} differs" for name in names]
    done = evaluations(out)
    if done != of_reference[: len(done)]:
        wrong.append(f"evaluations are {done}")
    losses, expected = curve(out), curve(reference)
    if losses != {step: expected[step] for step in range(1, len(losses) + 1)}:
        wrong.append(f"metrics.jsonl has {losses}")
    return wrong


def check_end(argv, out, reference):
    """Lets the run end in peace -> what is wrong with its result."""
    ranks, logs = start(argv, out)
    for rank in ranks:
        rank.join()
    wrong = check(out, reference, STEPS) + different_files(out / "final", reference / "final")
    wrong += different_files(out / f"checkpoint-{STEPS}", reference / f"checkpoint-{STEPS}")
    if evaluations(out) != evaluations(reference):
        wrong.append(f"evaluations are {evaluations(out)}")
    best = train.data.read_json(out / f"checkpoint-{STEPS}" / train.STATE)["best_eval"]
    unexpected = {path.name for path in out.iterdir()} ^ {path.name for path in reference.iterdir()}
    removed = set(range(1, STEPS - KEEP + 1)) - {best and best["step"]}
    if unexpected != {f"checkpoint-{step}" for step in removed}:
        wrong.append(f"left over or missing: {unexpected}")
    return [*wrong, *(log.read_text()[-2000:] for log in logs if wrong)]


def kill(n=200, seed=0):
    """-> rounds with anything wrong."""
    rng, started, phases, alone_s, chains = random.Random(seed), time.perf_counter(), collections.Counter(), [0.0], []
    n_bad = n_finished = 0
    with tempfile.TemporaryDirectory() as folder:
        shared = [*write_inputs(Path(folder, "inputs"), SHAPE), "--steps", STEPS]
        evaluated = ["--data", *train.DEMO_DATA, "--eval_data", "0.05", "--eval_every", 1]
        for method, flags in (("full", []), ("lora", ["--lora", "--lora_dropout", 0.1]), ("evaluated", evaluated)):
            reference = Path(folder, method)
            _, said, codes = run_ranks(WORLD, [*shared, *flags, "--keep", 100], reference)
            assert codes == [0] * WORLD, said
            chains.append(([*shared, *flags, "--keep", KEEP], reference, method))
        runs = [0] * len(chains)  # finished ones of each kind
        for number in range(n):
            which = number % len(chains)
            everyone = number // len(chains) % 2 == 0
            argv, reference, name = chains[which]
            out = Path(folder, f"{name}-{runs[which]}")
            phase, seconds, wrong = kill_once(argv, out, reference, rng, everyone)
            phases[phase, everyone] += 1
            if not everyone:
                alone_s.append(seconds)
            if not wrong and (newest(out) >= STEPS - 1 or number >= n - len(chains)):
                wrong = check_end(argv, out, reference)
                runs[which], n_finished = runs[which] + 1, n_finished + 1
            if wrong:
                runs[which], n_bad = runs[which] + 1, n_bad + 1
                print(f"kill {number + 1}, {name}, {list(PHASES)[phase]}: " + "\n  ".join(wrong), flush=True)
    rows = []
    for phase, what in enumerate(PHASES):
        of_all = phases[phase, True]
        of_one = phases[phase, False]
        rows.append((what, of_all, of_one, of_all + of_one))
    table(f"{n} kills, seed {seed}, {WORLD} ranks, {STEPS} steps, a save after each; how far the save was",
          ("the kill came when", "all ranks", "one rank", "sum"), rows)
    print(f"\nrounds with anything wrong: {n_bad} of {n}; {n_finished} runs continued to their end. A rank whose peer "
          f"was killed ended by itself in {max(alone_s):.1f} s at most. {time.perf_counter() - started:.0f} s")
    return n_bad


BIG = SHAPE | {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 9, "num_attention_heads": 12,
               "num_key_value_heads": 12, "head_dim": 64}  # 91 million parameters
ROUNDS = 5


def state_after_a_step(folder, args, ranks):
    """All that training changes, sharded over the ranks."""
    model = lm.on_meta(lm.parse_config(data.read_json(folder / "config.json")), args)
    source = data.RandomWeights(model, 0, ranks.device)
    train.shard_(model, args, ranks.device)
    model.to_empty(device=ranks.device)
    model.tie_()
    data.load_weights_(model, source, None, 0, ranks.device)
    optimizer = train.make_optimizer(dict(model.named_parameters()), args, torch.zeros(()))
    for p in model.parameters():
        p.grad = p.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    return train.training_tensors(model, optimizer, train.NonFinite(torch.device("cpu")))


def state_rank(folder):
    """One of 4 ranks: saves and loads the same state in both ways, in turns; rank 0 writes how long it took."""
    ranks, seconds = train.Ranks(True, 1800), collections.defaultdict(list)
    single, part = folder / "single.pt", folder / "single.part"
    args = train.parse_args(["--fsdp2", "--precision", "fp32", "--lr", "1e-3"])
    tensors, gathered = state_after_a_step(folder, args, ranks), {}
    saver = train.Saver(folder, 1, ranks, state_of(0))

    def took(what, work, on_all=True):
        dist.barrier()
        started = time.perf_counter()
        if on_all or ranks.rank == 0:
            work()
        dist.barrier()
        seconds[what].append(time.perf_counter() - started)

    def gather():
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if train.nf4.is_sharded(tensor) else tensor
            if ranks.rank == 0:
                gathered[name] = whole.contiguous().clone()

    def save_single():
        torch.save(gathered, part)
        train.data.sync(part)
        part.rename(single)
        train.data.sync(folder)

    def resume():
        state = train.read_state(saved, {}, ranks)
        train.load_checkpoint(saved, state["files"], tensors)

    for step in range(1, ROUNDS + 2):  # the first round warms up
        state = state_of(step)
        took("save", lambda: saver.save(tensors, state))  # noqa: B023
        took("gather", gather)
        took("torch: save", save_single, on_all=False)
        saved = train.newest_checkpoint(folder)
        for file in (single, *saved.iterdir()):
            with open(file) as handle:
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # out of the page cache
        for place in ("the disk", "the page cache"):
            took(f"resume, from {place}", resume)
            took(f"torch: resume, from {place}", lambda: torch.load(single, weights_only=True), on_all=False)
    if ranks.rank == 0:
        n_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        (folder / "took.json").write_text(json.dumps([n_bytes, {what: all_[1:] for what, all_ in seconds.items()}]))
    ranks.leave()


def times():
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), BIG)
        logs = [Path(folder, f"rank{rank}.log") for rank in range(4)]
        codes = start_ranks(4, state_rank, (Path(folder),), logs)
        assert codes == [0] * 4, "".join(log.read_text() for log in logs)
        n_bytes, seconds = json.loads(Path(folder, "took.json").read_text())
    rows = []
    for what in ("save", "resume, from the disk", "resume, from the page cache"):
        ours, theirs = seconds[what], seconds[f"torch: {what}"]
        rows.append((what, spread(ours), spread(theirs), f"{statistics.median(ours) / statistics.median(theirs):.2f}"))
    table(f"{n_bytes / 1e9:.2f} GB of training state, seconds, median of {ROUNDS} (least to most)",
          ("", "4 ranks, sharded", "1 process, torch.save / load", "ratio"), rows)
    print(f"\nNot counted: gathering the state for torch.save, {spread(seconds['gather'])} s.")


if __name__ == "__main__":
    commands = {"kill": kill, "time": times}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        raise SystemExit(__doc__)
    raise SystemExit(1 if commands[sys.argv[1]](*map(int, sys.argv[2:])) else 0)
