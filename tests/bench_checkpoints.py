"""Breaks and times checkpoints on this machine, on gloo ranks of the CPU, and prints small markdown tables. Run by hand:

    python tests/bench_checkpoints.py kill         # 200 times SIGKILL at a random moment of a save; 6 minutes
    python tests/bench_checkpoints.py kill 20 7    # 20 times, with the random moments of seed 7
    python tests/bench_checkpoints.py time         # a training state of 1.1 GB on 4 ranks, against torch.save; 5 minutes
    python tests/bench_checkpoints.py full         # a disk that is really full, a small tmpfs: needs root; 15 seconds

kill: two ranks train, and while they save all of them, or in every other round one, get SIGKILL. Then the newest complete
checkpoint must be no older than the last one that was reported; every complete one must hold bit for bit what a run that
was never interrupted has saved at that step; the run goes on from it and is killed again. Losses and gradient norms must be
equal to the last digit in every round, and final/ whenever a run gets to its end, at the latest at its tenth kill. Moments
are spread over a save in half of the rounds and sought right behind its file operations in the others, since a rename
lasts microseconds; the table counts how far the save was when the kill came. SIGKILL ends processes, not the machine: that
what was renamed is also on the disk after a power failure rests on fsync and is not shown here.

time: what train.Saver writes, and what a resume checks and reads, against torch.save and torch.load(weights_only=True) of
the same tensors, gathered in one process before the clock runs, with the fsync and the rename that make it as safe.

full: a second checkpoint that does not fit, refused beforehand or, with that check disabled, stopped by the kernel in the
middle of a file; and a disk on which not even final/ fits. The older checkpoint must survive it all and be good to
continue from. Exit code 1 says that something was not as promised.
"""

import collections
import contextlib
import dataclasses
import filecmp
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench_memory import table
from conftest import HERE, SHAPE, in_group, processes, run_ranks, start_ranks  # and train.py can be imported

import safetensors.torch
import torch
import torch.distributed as dist

import model as lm
import train

os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # of ranks that were killed, at the end
processes.set_forkserver_preload(["train", "torch._dynamo", "conftest", "bench_memory", "safetensors.torch"])


def write_inputs(folder, shape):
    """A model folder for --random_init and a file of chats -> the flags that take them."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(HERE / "tiny" / file, folder)
    (folder / "config.json").write_text(json.dumps(shape))
    rng, words = random.Random(0), "the file is read from disk and returned as a list of str self None".split()
    with open(folder / "chats.jsonl", "w") as file:
        for _ in range(200):
            messages = [{"role": role, "content": " ".join(rng.choices(words, k=rng.randint(1, 15)))}
                        for role in ("user", "assistant")]
            file.write(json.dumps({"messages": messages}) + "\n")
    return ["--model", folder, "--random_init", "--data", folder / "chats.jsonl", "--precision", "fp32", "--seq_len", 64,
            "--fsdp2", "--sample", "", "--log_every", 1]


def metrics(out):
    """Rows of metrics.jsonl; the last line of a killed run may be half a row."""
    rows = []
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        for line in (out / "metrics.jsonl").read_text().splitlines():
            rows.append(json.loads(line))
    return rows


def curve(rows):
    """{step: what must not differ by a bit between two runs}."""
    return {row["step"]: [row[key] for key in ("loss", "grad_norm", "lr", "tokens")] for row in rows if "loss" in row}


def same_files(folder, reference):
    """Names that differ between two folders."""
    names = {path.name for path in (*folder.glob("*"), *reference.glob("*"))}
    return sorted(names - set(filecmp.cmpfiles(folder, reference, names, shallow=False)[0]))


def unlike_tensors(folder, reference):
    """Names of tensors that differ by a bit, or lie elsewhere, between two checkpoints of the same number of ranks."""
    unlike = []
    for file in {path.name for path in (*folder.glob("*.safetensors"), *reference.glob("*.safetensors"))}:
        if not (folder / file).exists() or not (reference / file).exists():
            unlike.append(file)
            continue
        ours, theirs = (safetensors.torch.load_file(path / file) for path in (folder, reference))
        unlike += [name for name in ours.keys() | theirs.keys() if name not in ours or name not in theirs
                   or ours[name].dtype != theirs[name].dtype or ours[name].shape != theirs[name].shape
                   or ours[name].numpy().tobytes() != theirs[name].numpy().tobytes()]
    return unlike


# ---------------------------------------------------------------- kill: SIGKILL at random moments of a save

WORLD, STEPS, KEEP = 2, 20, 2
ALONE_S = 60  # a rank whose peer was killed must end by itself within that
PHASES = ("before: nothing written yet", "checkpoint-<n>.part is empty", "shards begun", "shards of full length",
          f"{train.STATE} begun, not renamed", "renamed, the oldest still there", "renamed, the oldest removed")


@dataclasses.dataclass
class Chain:
    """A run that is killed and continued until it is finished, then the next one."""

    name: str
    argv: list
    reference: Path  # of an uninterrupted run
    save_s: float
    out: Path
    kills: int = 0
    runs: int = 0

    def newest(self):
        found = train.checkpoints(self.out)
        return found[-1][0] if found else 0


def rank_to_kill(argv, pids):
    pid = Path(pids, os.environ["RANK"])
    pid.with_suffix(".part").write_text(str(os.getpid()))
    pid.with_suffix(".part").rename(pid)
    try:
        train.main(argv)
    except Exception as error:  # of a rank whose peer is gone: into its log
        traceback.print_exc()
        raise SystemExit(1) from error


def save_phase(chain, step, born):
    """-> index in PHASES. What is older than `born` is of an earlier life."""
    part, names, full = chain.out / f"checkpoint-{step}.part", {}, chain.reference / f"checkpoint-{step}"
    if (chain.out / f"checkpoint-{step}" / train.STATE).exists():
        older = [path for path in chain.out.glob("checkpoint-*") if path.name != f"checkpoint-{step}"]
        return 5 + (len(older) < KEEP)
    with contextlib.suppress(FileNotFoundError):
        if part.stat().st_mtime >= born:
            names = {file.name: file.stat().st_size for file in part.iterdir()}
            whole = all(names.get(file.name) == file.stat().st_size for file in full.glob("shard-*"))
            return 4 if train.STATE in names else 3 if whole else 2 if names else 1
    return 0


def inode(path):
    return path.stat().st_ino if path.exists() else None


def kill_once(chain, rng, everyone, pool):
    """Starts or continues the run and kills it in a save -> (phase, seconds the other rank went on, what was wrong)."""
    before = chain.newest()
    step = min(before + rng.randint(1, 2), STEPS - 1)  # after the last one a run may end before it is killed
    pids = Path(tempfile.mkdtemp(dir=chain.out.parent))
    logs = [pids / f"rank{rank}.log" for rank in range(WORLD)]
    argv = [str(arg) for arg in (*chain.argv, "--out", chain.out, "--resume", "auto")]
    born, old = time.time(), inode(chain.out / "metrics.jsonl")
    ranks = pool.submit(start_ranks, WORLD, rank_to_kill, (argv, str(pids)), logs, ALONE_S)

    def wait(reached):
        while not reached() and not ranks.done():
            time.sleep(0.0003)

    def loss_is_logged():  # the save comes right behind; a metrics.jsonl of an earlier life is replaced at the start
        return inode(chain.out / "metrics.jsonl") not in (None, old) and step in curve(metrics(chain.out))

    wait(loss_is_logged)
    sought = rng.choice((0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 4, 5))
    wait(lambda: save_phase(chain, step, born) >= sought)
    time.sleep(rng.uniform(0, 1.2 * chain.save_s if not sought else 0.002 if sought < 4 else 0.0005))
    killed = range(WORLD) if everyone else [rng.randrange(WORLD)]
    for rank in killed:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(int((pids / str(rank)).read_text()), signal.SIGKILL)
    at, started = save_phase(chain, step, born), time.perf_counter()
    try:
        codes = ranks.result()
    except TimeoutError as hung:
        return at, ALONE_S, [f"the other rank hung: {hung}"]
    alone_s, said = time.perf_counter() - started, last_lines(log.read_text() for log in logs)

    wrong = []
    if any(codes[rank] != -signal.SIGKILL for rank in killed) or 0 in codes:
        wrong.append(f"exit codes {codes}:\n{said}")
    if before and f"continuing from {chain.out}/checkpoint-{before}: " not in logs[0].read_text():
        wrong.append(f"did not continue from checkpoint-{before}:\n{said}")
    wrong += check(chain, before)
    if not wrong:
        shutil.rmtree(pids)
    return at, alone_s, wrong


def last_lines(logs):
    return "\n".join("\n".join(log.splitlines()[-15:]) for log in logs)


def check(chain, before):
    """What is wrong with what a killed run has left."""
    wrong, rows, found = [], metrics(chain.out), train.checkpoints(chain.out)
    reported = max((row["step"] for row in rows if "checkpoint_s" in row), default=0)
    if chain.newest() < max(before, reported):
        wrong.append(f"the newest is checkpoint-{chain.newest()}, there was checkpoint-{max(before, reported)}")
    if len(found) < min(KEEP, chain.newest()):
        wrong.append(f"complete are only {[folder.name for _, folder in found]}")
    for step, folder in found:
        try:
            state = train.read_state(folder, 0, 1)
        except ValueError as error:
            wrong.append(str(error))
            continue
        reference = chain.reference / f"checkpoint-{step}"
        wrong += [f"{folder.name}: {name} differs" for name in unlike_tensors(folder, reference)]
        state, expected = dict(state), dict(lm.read_json(reference / train.STATE))
        for one in (state, expected):  # tensors lie in a file in any order, so checksums differ
            one["files"] = {name: size for name, (size, _) in one["files"].items()}
            one["git_commit"] = None  # which moves on while this runs for minutes
        wrong += [f"{folder.name}: {key} is {state.get(key)}" for key in expected if state.get(key) != expected[key]]
    losses, expected = curve(rows), curve(metrics(chain.reference))
    if list(losses) != list(expected)[: len(losses)]:
        wrong.append(f"metrics.jsonl has steps {list(losses)}")
    wrong += [f"step {step}: {losses[step]}, not {expected[step]}" for step in losses if losses[step] != expected[step]]
    return wrong


def finish(chain):
    """Lets the run end in peace -> what is wrong with its result. The next one starts from nothing."""
    newest = chain.newest()
    rows, said, codes = run_ranks(WORLD, [*chain.argv, "--resume", "auto"], chain.out)
    wrong = [] if codes == [0] * WORLD else [last_lines([said])]
    wrong += check(chain, newest)
    if len(curve(rows)) != STEPS:
        wrong.append(f"metrics.jsonl has steps {list(curve(rows))}")
    wrong += [f"final/{name} differs" for name in same_files(chain.out / "final", chain.reference / "final")]
    left = sorted(path.name for path in chain.out.iterdir())
    expected = [*(f"checkpoint-{step}" for step in range(STEPS - KEEP + 1, STEPS + 1)), "args.json", "final", "metrics.jsonl"]
    if left != sorted(expected):
        wrong.append(f"left over: {left}")
    chain.kills, chain.runs, chain.out = 0, chain.runs + 1, chain.out.with_name(f"{chain.name}-{chain.runs + 1}")
    return [f"at the end: {what}" for what in wrong]


def kill(n=200, seed=0):
    rng, started, phases, alone_s, finished = random.Random(seed), time.perf_counter(), collections.Counter(), [], 0
    bad = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        folder = Path(folder)
        (folder / "inputs").mkdir()
        shared = [*write_inputs(folder / "inputs", SHAPE), "--batch_size", 2, "--steps", STEPS, "--save_every", 1]
        chains = []
        for method, flags in (("full", []), ("lora", ["--lora", "--lora_dropout", 0.1])):
            reference = folder / f"reference-{method}"
            rows, said, codes = run_ranks(WORLD, [*shared, *flags, "--keep", 100], reference)
            assert codes == [0] * WORLD, said
            save_s = statistics.median(row["checkpoint_s"] for row in rows if "checkpoint_s" in row)
            for mode, more in (("waits", []), ("async", ["--async_save"])):
                name = f"{method}-{mode}"
                argv = [*shared, *flags, *more, "--keep", KEEP]
                chains.append(Chain(name, argv, reference, save_s, folder / f"{name}-0"))
        for number in range(n):
            chain, everyone = chains[number % 4], number // 4 % 2 == 0
            at, seconds, wrong = kill_once(chain, rng, everyone, pool)
            phases[at, chain.name.split("-")[1], everyone] += 1
            alone_s += [seconds] * (not everyone)
            chain.kills += 1
            if not wrong and (chain.kills == 10 or chain.newest() >= STEPS - 1):
                wrong, finished = finish(chain), finished + 1
            if wrong:
                bad += 1
                print(f"kill {number + 1}, {chain.name}, {PHASES[at]}: " + "\n  ".join(wrong), flush=True)
                chain.runs, chain.out = chain.runs + 1, chain.out.with_name(f"{chain.name}-{chain.runs + 1}")
            if sys.stderr.isatty():
                print(f"\r{number + 1} of {n}", end="", file=sys.stderr)
        for chain in chains:
            if chain.kills and (wrong := finish(chain)):
                bad += 1
                print(f"{chain.name}: " + "\n  ".join(wrong), flush=True)
            finished += 1
    columns = [(mode, everyone) for mode in ("waits", "async") for everyone in (True, False)]
    rows = []
    for at, phase in enumerate(PHASES):
        counts = [phases[at, mode, everyone] for mode, everyone in columns]
        rows.append((phase, *counts, sum(counts)))
    table(f"{n} kills, seed {seed}, {WORLD} ranks, {STEPS} steps, a save after each; how far the save was", (
        "when the kill came", "all ranks", "one rank", "--async_save, all ranks", "--async_save, one rank", "sum"), rows)
    print(f"\nrounds with anything wrong: {bad} of {n}; {finished} runs continued to their end. A rank whose peer was killed "
          f"ended by itself in {max(alone_s, default=0):.1f} s at most. {time.perf_counter() - started:.0f} s")
    return bad


# ---------------------------------------------------------------- time: against torch.save, and the loop's stall

BIG = SHAPE | {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 9, "num_attention_heads": 12,
               "num_key_value_heads": 12, "head_dim": 64}
ROUNDS = 5


def big_state(folder):
    """All that training changes in a model of 91 million float32 parameters, sharded over the ranks, after one step."""
    device = torch.device("cpu")
    with torch.device("meta"):
        model = lm.Transformer(lm.parse_config(lm.read_json(folder / "config.json")))
    source = lm.RandomWeights(model, 0, device)
    train.set_precision_(model, "fp32")
    train.shard_(model, device, "fp32", reshard=True, shard_embeddings=True, offload_params=False, chunked_ce=True)
    model.to_empty(device=device)
    model.tie_()
    lm.load_weights_(model, source, None, 0, device, False)
    trained = list(model.parameters())
    optimizer = train.make_optimizer(trained, 1e-3, 0.01, fused=True)
    for p in trained:
        p.grad = p.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    return train.training_tensors(model, optimizer)


def clocked_(spent, place, name):
    """Makes place.name add the seconds of its calls to spent[name]."""
    function = getattr(place, name)

    def call(*args, **kwargs):
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += time.perf_counter() - started

    setattr(place, name, call)


def evict(path):
    """Takes a synced file, or those of a folder, out of the page cache."""
    for file in path.iterdir() if path.is_dir() else [path]:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def state_rank(folder):
    """One of 4 ranks: saves and loads the same state in both ways, in turns; rank 0 writes what it took."""
    rank, world, device, spent = dist.get_rank(), dist.get_world_size(), torch.device("cpu"), collections.Counter()
    tensors, single, seconds = big_state(folder), folder / "single.pt", collections.defaultdict(list)
    for name in ("prepare", "store", "commit"):
        clocked_(spent, train.Saver, name)
    clocked_(spent, zlib, "crc32")
    clocked_(spent, os, "fsync")
    saver = train.Saver(folder, 1, False, rank, world, train.Log(None, lambda *_: None, 1, 1.0, device), None, False, {})

    def took(what, work):
        dist.barrier()
        spent.clear()
        started = time.perf_counter()
        work()
        dist.barrier()
        seconds[what].append(time.perf_counter() - started)

    def gather():
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, train.DTensor) else tensor
            if rank == 0:
                gathered[name] = whole.contiguous().clone()

    def save_single():
        if rank == 0:
            part = single.with_suffix(".part")
            with open(part, "wb") as file:
                torch.save(gathered, file)
                file.flush()
                os.fsync(file.fileno())
            part.rename(single)
            train.sync(folder)

    def load_single():
        if rank == 0:
            loaded = torch.load(single, weights_only=True)
            assert all(torch.equal(loaded[name], gathered[name]) for name in list(gathered)[:5])

    def resume():
        started = time.perf_counter()
        state = train.read_state(saved, rank, world)
        spent["read_state"] = time.perf_counter() - started
        generators = train.check_tensors(saved, state, tensors, train.generator_states(rank, device))
        spent["check_tensors"] = time.perf_counter() - started - spent["read_state"]
        train.restore(saved, tensors | generators, saver.meet())
        spent["restore"] = time.perf_counter() - started - spent["read_state"] - spent["check_tensors"]

    for step in range(1, ROUNDS + 2):  # the first round warms up
        about = {"format": train.FORMAT, "step": step, "epoch": 1.0, "rows": step, "steps": step, "tokens": 1,
                 "first_loss": 1.0, "best_eval": None, "world": world, "settings": {}}
        took("save", lambda: saver.save(step, tensors | train.generator_states(rank, device), about))  # noqa: B023
        for name in ("prepare", "store", "fsync", "crc32", "commit"):
            seconds[f"save: {name}"].append(spent[name])
        saved, gathered = folder / f"checkpoint-{step}", {}
        took("gather", gather)
        took("save_single", save_single)
        if rank == 0:
            evict(saved)
            evict(single)
        for kind in ("cold", "cached"):
            took(f"resume_{kind}", resume)
            for name in ("read_state", "check_tensors", "restore"):
                seconds[f"{kind}: {name}"].append(spent[name])
            took(f"load_single_{kind}", load_single)
    if rank == 0:
        n_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        files = sum(file.stat().st_size for file in saved.iterdir())
        (folder / "took.json").write_text(json.dumps({"bytes": n_bytes, "on disk": files, "single": single.stat().st_size,
                                                      "seconds": {what: all_[1:] for what, all_ in seconds.items()}}))


def times():
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        flags = write_inputs(folder, BIG)
        logs = [folder / f"rank{rank}.log" for rank in range(4)]
        codes = start_ranks(4, in_group, (state_rank, folder), logs, timeout=1800)
        assert codes == [0] * 4, "".join(log.read_text() for log in logs)
        took = json.loads((folder / "took.json").read_text())
        show_state(took)
        for path in (*folder.glob("checkpoint-*"), folder / "single.pt"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        show_stalls([*flags, "--steps", 8, "--save_every", 2, "--keep", 1, "--lr", 1e-4], folder)


def show_state(took):
    seconds = {what: statistics.median(all_) for what, all_ in took["seconds"].items()}
    spread = {what: f"{seconds[what]:.2f} ({min(all_):.2f} to {max(all_):.2f})" for what, all_ in took["seconds"].items()}
    rows = []
    for what, ours, theirs in (("save", "save", "save_single"), ("resume, from the disk", "resume_cold", "load_single_cold"),
                               ("resume, from the page cache", "resume_cached", "load_single_cached")):
        speed = (f"{took['bytes'] / 1e9 / seconds[which]:.2f}" for which in (ours, theirs))
        rows.append((what, spread[ours], spread[theirs], f"{seconds[ours] / seconds[theirs]:.2f}", *speed))
    table(f"{took['bytes'] / 1e9:.2f} GB of training state, {took['on disk'] / 1e9:.3f} GB on the disk "
          f"({took['single'] / 1e9:.3f} by torch.save), median of {ROUNDS} (least to most), seconds", (
              "", "4 ranks, sharded", "1 process, torch.save / load", "ratio", "GB/s", "GB/s of torch.save / load"), rows)
    print(f"\nGathering the state in one process, which comes before a torch.save: {spread['gather']} s, not counted above.")
    dcp_s = seconds["save: store"] - seconds["save: fsync"] - seconds["save: crc32"]
    rest = seconds["save"] - sum(seconds[f"save: {name}"] for name in ("prepare", "store", "commit"))
    table("Where rank 0's time goes, seconds, medians", ("part", "seconds"), [
        ("save: old .part folders removed, space checked", f"{seconds['save: prepare']:.2f}"),
        ("save: DCP plans, copies and writes", f"{dcp_s:.2f}"),
        ("save: fsync, all", f"{seconds['save: fsync']:.2f}"),
        ("save: checksum of what is written", f"{seconds['save: crc32']:.2f}"),
        (f"save: {train.STATE}, rename, the oldest removed, its fsync counted twice", f"{seconds['save: commit']:.2f}"),
        ("save: waiting for other ranks, outside DCP", f"{max(rest, 0):.2f}"),
        *((f"resume from {place}: {what}", f"{seconds[f'{kind}: {name}']:.2f}")
          for kind, place in (("cold", "the disk"), ("cached", "the page cache"))
          for name, what in (("read_state", "checksums"), ("check_tensors", "headers"), ("restore", "DCP reads")))])


def show_stalls(argv, folder):
    """Two runs of the trainer in turns, twice: what the loop waits for the disk, and what the steps take beside it."""
    stalls, writes, steps, loops = (collections.defaultdict(list) for _ in range(4))
    for turn in range(2):
        for mode, more in (("waits", []), ("async", ["--async_save"])):
            out = folder / f"{mode}-{turn}"
            logs = [folder / f"{out.name}-rank{rank}.log" for rank in range(4)]
            arguments = [str(arg) for arg in (*argv, *more, "--out", out)]
            codes = start_ranks(4, train.main, (arguments,), logs, timeout=600)
            assert codes == [0] * 4, "".join(log.read_text() for log in logs)
            rows = metrics(out)
            shutil.rmtree(out)
            saves = [row for row in rows if "checkpoint_s" in row][:-1]  # a run waits for its last one in any case
            stalls[mode] += [row["checkpoint_stall_s"] for row in saves]
            writes[mode] += [row["checkpoint_s"] for row in saves]
            of_steps = [row["step_s"] for row in rows if "loss" in row][1:]  # without the first, which is slower
            steps[mode].append(statistics.mean(of_steps))
            loops[mode].append(sum(of_steps) + sum(row["checkpoint_stall_s"] for row in saves))
    rows = []
    for mode, what in (("waits", "training waits"), ("async", "`--async_save`")):
        rows.append((what, f"{statistics.median(writes[mode]):.2f}", f"{statistics.median(stalls[mode]):.3f}",
                     f"{min(stalls[mode]):.3f} to {max(stalls[mode]):.3f}", f"{statistics.mean(steps[mode]):.2f}",
                     f"{statistics.mean(loops[mode]):.1f}"))
    table("The loop's stall, the same state, a save every 2 steps, 2 runs of each in turns; checkpoint_s, checkpoint_stall_s "
          "and step_s of metrics.jsonl", (
              "", "s a save takes, median", "s the loop stands still, median", "least to most", "mean s of a step",
              "s of 7 steps and 3 stalls"), rows)
    ratio = statistics.median(stalls["async"]) / statistics.median(stalls["waits"])
    print(f"\nstall with --async_save / without: {ratio:.3f}; on {os.cpu_count()} cores, which 4 ranks and their writers share")


# ---------------------------------------------------------------- full: a disk that has no room


def main_unchecked(argv):
    lm.need_space = lambda *_: None  # the kernel says it
    train.main(argv)


def free(path):
    return shutil.disk_usage(path).free


def full():
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "inputs").mkdir()
        (folder / "disk").mkdir()
        argv = [*write_inputs(folder / "inputs", SHAPE), "--batch_size", 2, "--steps", 3, "--save_every", 1]
        _, said, codes = run_ranks(2, [*argv, "--keep", 100], folder / "reference")
        assert codes == [0, 0], said
        sizes = {what: sum(-(-file.stat().st_size // 4096) * 4096 for file in (folder / "reference" / what).iterdir())
                 for what in ("checkpoint-1", "final")}
        one, final = sizes["checkpoint-1"], sizes["final"]
        assert final < one / 2
        results = []
        for what, size, function, fits in (
            ("second checkpoint refused beforehand", 2 * one - 2**16, train.main, True),
            ("second checkpoint stopped by the kernel", 2 * one - 2**16, main_unchecked, True),
            ("final/ refused beforehand as well", one + final - 2**18, train.main, False),
            ("final/ stopped by the kernel as well", one + final - 2**18, main_unchecked, False),
        ):
            wrong, message = on_full_disk(folder, argv, size, function, fits)
            bad += bool(wrong)
            results.append((what, f"{size / 2**20:.1f}", message, "; ".join(wrong) or "as promised"))
    table(f"A checkpoint of {one / 2**20:.1f} MiB and a final/ of {final / 2**20:.1f} MiB on a tmpfs, 2 ranks, 3 steps", (
        "case", "MiB in all", "what was said", "outcome"), results)
    return bad


def on_full_disk(folder, argv, size, function, fits):
    """Trains on a tmpfs of `size` bytes, then again with room -> (what was wrong, what the run has said)."""
    disk, reference, wrong = folder / "disk", folder / "reference", []
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size // 4096 * 4096}", "tmpfs", disk],
                             capture_output=True, text=True)
    if mounted.returncode:
        raise SystemExit(f"full needs to mount a tmpfs, which was refused: {mounted.stderr.strip()}")
    try:
        out, logs = disk / "run", [folder / f"rank{rank}.log" for rank in range(2)]
        codes = start_ranks(2, function, ([str(arg) for arg in (*argv, "--out", out)],), logs)
        said = "".join(log.read_text() for log in logs)
        lines = [line for line in said.splitlines() if "was not written" in line or "error" in line.lower()]
        reason = "No space left on device" if function is main_unchecked else "GiB free on this disk"
        for step in (2, 3):
            if not re.search(rf"checkpoint-{step} was not written: rank [01]: .*{reason}.*training goes on", said):
                wrong.append(f"nothing said of checkpoint-{step}")
        expected = [0, 0] if fits else [1, 1]
        if codes != expected or "Traceback" in said:
            wrong.append(f"exit codes {codes}, expected {expected}: {said}")
        if not fits and not re.search(rf"train.py: error: .*final.*not written.*{reason}", said):
            wrong.append("nothing said of final/")
        if curve(metrics(out)) != curve(metrics(reference)):
            wrong.append("training was changed by it")
        if fits and same_files(out / "final", reference / "final"):
            wrong.append("final/ differs")
        names = sorted(path.name for path in out.glob("checkpoint-*"))
        if names != ["checkpoint-1"] or unlike_tensors(out / "checkpoint-1", reference / "checkpoint-1"):
            wrong.append(f"checkpoint-1 is not as it was: {names}")
        left = free(disk)
        subprocess.run(["mount", "-o", f"remount,size={size * 8}", disk], check=True)
        rows, said_then, codes = run_ranks(2, [*argv, "--resume", "auto"], out)
        same = curve(rows) == curve(metrics(reference)) and not same_files(out / "final", reference / "final")
        if codes != [0, 0] or f"continuing from {out}/checkpoint-1: " not in said_then or not same:
            wrong.append(f"with room again it does not continue: {said_then}")
        message = "<br>".join(line.replace(str(out) + "/", "") for line in lines) + f"<br>({left / 2**20:.1f} MiB left)"
        return wrong, message
    finally:
        subprocess.run(["umount", disk], check=True)


def main():
    commands = {"kill": kill, "time": times, "full": full}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        raise SystemExit(__doc__)
    raise SystemExit(1 if commands[sys.argv[1]](*map(int, sys.argv[2:])) else 0)


if __name__ == "__main__":
    main()
