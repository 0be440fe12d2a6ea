"""What a fine-tune of a real model is worth: two tasks that it fails before, learned by each method. Run by hand:

    python tests/bench_quality.py --model FOLDER                            # 40 runs, about an hour on two cores
    python tests/bench_quality.py --model FOLDER --seeds 1 --methods lora qlora
    python tests/bench_quality.py --model FOLDER --seeds 1 --methods lora --rates 5e-4 1e-3 2e-3    # looks for a rate
    python tests/bench_quality.py --model FOLDER --svg tests/quality.svg    # also draws the first task's held-out loss

Each run is train.py as a user types it. A row is written to OUT/rows.jsonl when its run is complete, and the next call
does not repeat it: a call that was cut goes on where it was. Tables are made of all rows that are there.

The tasks are made by rule out of what is on every machine, and nothing that is held out is trained on:

    arguments    "Which arguments have no default?"  copy(src, dst, deep=1)  -> src, dst
    dates        "Say the date in words."            2004-11-24              -> the twenty-fourth of November

Functions are those of the Python that runs the script, so `arguments` has a few other rows in another version.

The score is the share of held-out questions that greedy decoding answers exactly. It takes no decoding: an answer is
given token by token if and only if each of its tokens, the end of the turn included, is the likeliest one after the
question and the tokens before it, and one forward knows that of all of them. It is measured on what the run has
written, opened as --chat opens it: final/ of all weights, or an adapter on 16 bits or on NF4. "base" and "base, NF4"
are the same command with a rate of 0.

On a CPU the seconds are those of its cores (user and system, of the whole process, from imports to final/): other
processes on the machine change them less than the time on a clock. Rates were found with --rates, on one seed.
"""

import argparse
import importlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import NamedTuple

from bench_harness import ROOT, metrics

import data
import model as lm
import torch
import train

N_HELD_OUT = 100
# The other flags of every run. Rows are short, because two cores should need a minute for a run.
FLAGS = "--seq_len 256 --steps 40 --schedule linear --no-activation_checkpointing --log_every 1 --save_every 0"


class Method(NamedTuple):
    """A row of the table. opens: flags about how weights are kept, which opening its result needs, too."""

    opens: str
    trains: str
    rate: float


METHODS = {
    "base": Method("", "--lora --steps 1", 0),
    "base, NF4": Method("--qlora", "--steps 1", 0),
    "full": Method("", "", 2e-4),
    "lora": Method("", "--lora", 2e-3),
    "qlora": Method("--qlora", "", 2e-3),
    "qlora exact kv": Method("--qlora --nf4_skip k_proj v_proj", "", 2e-3),
    "qlora, bf16": Method("--qlora --precision bf16", "", 2e-3),
    "adamw8bit": Method("", "--optim adamw8bit", 2e-4),
    "bf16, rounded": Method("--precision bf16", "--stochastic_rounding", 2e-4),
}
CURVES = {"full": "#2f81f7", "lora": "#2da44e", "qlora": "#e5534b"}  # read on white and on black

# ---------------------------------------------------------------- tasks

MONTHS = "January February March April May June July August September October November December".split()
FIRST_ORDINALS = ("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
                  "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth").split()
ORDINALS = FIRST_ORDINALS + [f"twenty-{one}" for one in FIRST_ORDINALS[:9]] + ["thirtieth", "thirty-first"]
# modules written in Python, whose signatures inspect can read
MODULES = (
    "argparse ast base64 bdb bisect calendar cmd code codecs collections compileall configparser contextlib copy csv "
    "datetime difflib dis doctest email.message email.utils filecmp fileinput fnmatch fractions ftplib functools "
    "getopt gettext glob graphlib gzip heapq html http.client http.cookiejar http.cookies imaplib inspect io "
    "ipaddress json locale logging logging.handlers mailbox mimetypes netrc ntpath optparse os pdb pickle pickletools "
    "pkgutil platform plistlib poplib posixpath pprint profile pstats py_compile pyclbr pydoc queue quopri random "
    "reprlib runpy sched secrets selectors shelve shlex shutil smtplib socket socketserver statistics string "
    "subprocess symtable sysconfig tabnanny tarfile tempfile textwrap threading timeit tokenize trace traceback "
    "tracemalloc types unittest unittest.mock urllib.parse urllib.request uuid warnings wave weakref webbrowser "
    "xml.dom.minidom xml.etree.ElementTree xmlrpc.client xmlrpc.server zipapp zipfile zoneinfo").split()


class Task(NamedTuple):
    """make() -> [(question, answer)]. The instruction is the system's message, so the base knows what is asked."""

    instruction: str
    make: Callable


def dates():
    """Each day of a year once, in years of this century: no answer is both trained on and held out."""
    pairs = []
    for days in range(366):
        day = date(2000, 1, 1) + timedelta(days)  # a leap year
        year = 2000 + 4 * (days * 7 % 25)  # leap years as well
        pairs.append((f"{year}-{day:%m-%d}", f"the {ORDINALS[day.day - 1]} of {MONTHS[day.month - 1]}"))
    return pairs


def functions_of(module):
    """[(name, function or method)] of what a module defines itself."""
    found = []
    for name, value in sorted(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = sorted(vars(value).items()) if inspect.isclass(value) else [(name, value)]
        found += [(name, value) for name, value in members if inspect.isfunction(value) and name[0] != "_"]
    return found


def parameters_of(function):
    """The parameters of a function without annotations and self, or None where a question would be a hard one to read:
    no or many parameters, * and **, defaults that are no literals."""
    signature = inspect.signature(function)
    found = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    found = [parameter for parameter in found if parameter.name not in ("self", "cls")]
    text = ", ".join(map(str, found))
    if not 2 <= len(found) <= 6 or len(text) > 80 or "<" in text or "*" in text:
        return None
    return found


def arguments():
    """Functions of this Python's library. Of those with the same parameters only one, so that none of them is both
    trained on and held out."""
    pairs = {}
    for module in MODULES:
        for name, function in functions_of(importlib.import_module(module)):
            parameters = parameters_of(function)
            if not parameters:
                continue
            required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
            text = ", ".join(map(str, parameters))
            if len(required) < len(parameters):
                pairs.setdefault(text, (f"{name}({text})", ", ".join(required) or "none"))
    return list(pairs.values())


TASKS = {
    "arguments": Task("Which arguments have no default?", arguments),
    "dates": Task("Say the date in words.", dates),
}


def split(pairs):
    """-> (pairs to train on, pairs to hold out): a hash of the question decides, so the order says nothing."""
    by_hash = sorted(pairs, key=lambda pair: zlib.crc32(pair[0].encode()))
    return by_hash[N_HELD_OUT:], by_hash[:N_HELD_OUT]


def ask(task, question):
    """-> messages of the conversation before the answer."""
    return [{"role": "system", "content": TASKS[task].instruction}, {"role": "user", "content": question}]


def write_task(folder, task):
    """-> (file to train on, file of held-out rows)."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, pairs in zip(("train", "held_out"), split(TASKS[task].make()), strict=True):
        path = folder / f"{task}-{name}.jsonl"
        lines = []
        for question, answer in pairs:
            messages = [*ask(task, question), {"role": "assistant", "content": answer}]
            lines.append(json.dumps({"messages": messages}))
        train.replace_file(path, "\n".join(lines) + "\n")  # another call may read it now
        paths.append(path)
    return paths


# ---------------------------------------------------------------- a run and its score


def run_training(argv):
    """train.py in a process of its own -> (seconds on a clock, seconds of CPU cores)."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, ROOT / "train.py", *argv], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(output)
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime


def open_result(argv):
    """The weights that a run has written, opened as --chat opens them -> (model, tokenizer, held-out rows, device)."""
    args = train.parse_args(argv)
    ranks = train.Ranks(False, args.timeout)
    opened = train.open_model(args, ranks)
    _, held_out = data.open_data(args, opened.tokenizer, opened.config.vocab_size, ranks)
    model = opened.model
    model.to_empty(device=ranks.device).tie_()
    data.load_weights_(model, opened.source, opened.adapter, args.seed, ranks.device)
    return model.eval(), opened.tokenizer, held_out, ranks.device


@torch.no_grad()
def exact_answers(model, held_out, device):
    """For each held-out document whether greedy decoding gives its answer, [bool]."""
    exact = []
    for batch in held_out.once():
        b = batch.to(device)
        logits_BTV = model(b.tokens, positions_BT=b.positions, spans=b.spans)
        likeliest_S = logits_BTV.flatten(0, 1)[b.supervised_S].argmax(-1)
        is_right_S = likeliest_S == b.targets.flatten()[b.supervised_S]
        exact += [of_document.all().item() for of_document in is_right_S.split(b.n_targets)]
    return exact


def answer(model, tokenizer, messages, device, n=24):
    """The answer by decoding, token by token."""
    tokens = lm.generate(model, tokenizer.prompt(messages), n, tokenizer.stop_ids, device)
    return tokenizer.core.decode(list(tokens))


def flags_of(args, task, name):
    """Flags that training and opening the result share: data, lengths, how the weights are kept."""
    trained, held_out = write_task(args.out / "data", task)
    return f"--data {trained} --eval_data {held_out} {FLAGS} {METHODS[name].opens}".split()


def train_with(args, task, name, flags, out):
    """Trains with the flags of a method and others -> (rows of metrics.jsonl, seconds on a clock, of CPU cores)."""
    words = [*flags_of(args, task, name), *METHODS[name].trains.split(), *flags]
    wall_s, cpu_s = run_training(["--model", str(args.model), *words, "--out", str(out)])
    return metrics(out), wall_s, cpu_s


def measure(args, task, name, rate, seed):
    """Trains and scores -> a row of rows.jsonl."""
    method = METHODS[name]
    chosen = ["--lr", f"{rate:g}", "--seed", str(seed)]
    # a folder of its own, because another call may run the same case
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        out = Path(folder, "run")
        rows, wall_s, cpu_s = train_with(args, task, name, chosen, out)
        model, tokenizer, held_out, device = open_result(["--model", str(out), *flags_of(args, task, name)])
    exact = exact_answers(model, held_out, device)
    assert len(exact) == N_HELD_OUT, f"{len(exact)} held-out rows, not {N_HELD_OUT}: --seq_len is too small"
    # Is an answer of the base wrong, or only worded otherwise? Its own words say that, to a fifth of the questions:
    # decoding takes as long as a training.
    n_asked = N_HELD_OUT // 5 if name == "base" else args.answers
    _, asked = split(TASKS[task].make())
    answers = []
    for question, right in asked[:n_asked]:
        answers.append([question, answer(model, tokenizer, ask(task, question), device), right])
    steps = [row for row in rows if "loss" in row]
    return {
        "task": task, "method": name, "rate": rate, "seed": seed, "model": args.model.name, "device": device.type,
        "flags": " ".join([FLAGS, method.opens, method.trains, *chosen]),
        "loss": rows[-1]["eval_loss"], "score": sum(exact) / len(exact),
        "seconds": cpu_s if device.type == "cpu" else wall_s, "wall_s": wall_s, "cpu_s": cpu_s,
        "step_s": statistics.median(row["step_s"] for row in steps), "gib": max(row["mem_gib"] for row in steps),
        "contains": statistics.mean(right.lower() in said.lower() for _, said, right in answers), "answers": answers}


def measure_curve(args, task, name):
    """Trains with more evaluations -> a row of curves.jsonl."""
    rate = METHODS[name].rate
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        rows, _, _ = train_with(args, task, name, ["--lr", f"{rate:g}", "--eval_every", "8"], Path(folder, "run"))
    points = [[row["step"], row["eval_loss"]] for row in rows if "eval_loss" in row]
    return {"task": task, "method": name, "rate": rate, "seed": 0, "curve": points}


# ---------------------------------------------------------------- tables and picture


def add_row(path, row):
    """Writes a row on a line of its own: a call that was killed may have left half a row without an end."""
    with open(path, "a") as file:
        file.write(f"\n{json.dumps(row, ensure_ascii=False)}\n")


def read_rows(path):
    """The complete rows of all calls so far."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def is_of(row, task, name, rate, seed):
    return (row["task"], row["method"], row["rate"], row["seed"]) == (task, name, rate, seed)


def mean_and_range(values, digits):
    """'2.774 (2.751 to 2.790)', of one value '2.774'."""
    text = f"{statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):.{digits}f}-{max(values):.{digits}f})"
    return text


def print_table(rows, task):
    """A markdown table of at most 80 columns, a row for each method and rate."""
    seconds = "CPU s" if rows[0]["device"] == "cpu" else "s"
    print(f"\n{task}: held-out loss and answers that are exactly right, of {N_HELD_OUT}\n")
    print(f"| {'method':<14}| {'rate':<7}| {'held-out loss':<20}| {'right':<15}| {seconds:<6}| GiB  |")
    print("|---|---|---|---|---|---|")
    for name in METHODS:
        for rate in sorted({row["rate"] for row in rows if row["method"] == name}):
            found = [row for row in rows if (row["method"], row["rate"]) == (name, rate)]
            losses = mean_and_range([row["loss"] for row in found], 3)
            right = mean_and_range([100 * row["score"] for row in found], 0)
            cost = statistics.mean(row["seconds"] for row in found)
            gib = max(row["gib"] for row in found)
            print(f"| {name:<14}| {rate:<7g}| {losses:<20}| {right:<15}| {cost:<6.0f}| {gib:<5.2f}|")


def draw(args, task):
    """Held-out loss over steps, a curve for each of CURVES. They begin after the first steps: beside the loss of the
    base, which is in the table, their ends would be one line."""
    path = args.out / "curves.jsonl"
    curves = {}
    for name, colour in CURVES.items():
        rate = METHODS[name].rate
        if not any(is_of(row, task, name, rate, 0) for row in read_rows(path)):
            add_row(path, measure_curve(args, task, name))
        (row,) = [row for row in read_rows(path) if is_of(row, task, name, rate, 0)]
        curves[f"{name}, {row['curve'][-1][1]:.3f}", colour] = row["curve"]
    train.draw(args.svg, curves)


def wanted(args):
    """Yields (task, method, rate, seed) of every run: one seed of all, then the next one."""
    for seed in range(args.seeds):
        for task in args.tasks:
            for name in args.methods:
                of_base = METHODS[name].rate == 0
                if of_base and seed:
                    continue  # it learns nothing, so a seed changes nothing
                for rate in [0] if of_base else args.rates or [METHODS[name].rate]:
                    yield task, name, rate, seed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--out", type=Path, default=Path("out/quality"), help="folder of rows.jsonl (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each run (%(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates, in place of each method's own")
    parser.add_argument("--answers", type=int, default=3, help="answers to print of each run (%(default)s)")
    parser.add_argument("--svg", type=Path, help="draw the first task's held-out loss over steps")
    args = parser.parse_args()
    args.model = args.model.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "rows.jsonl"
    for task, name, rate, seed in wanted(args):
        # read each time: another call, on another GPU, may share the folder
        if any(is_of(row, task, name, rate, seed) for row in read_rows(path)):
            continue
        row = measure(args, task, name, rate, seed)
        add_row(path, row)
        print(f"{task}  {name}  rate {rate:g}  seed {seed}: loss {row['loss']:.4f}, right {row['score']:.2f}, "
              f"{row['seconds']:.0f} s, {row['step_s']:.2f} s a step, {row['gib']:.2f} GiB", flush=True)
        for question, said, right in row["answers"][: args.answers]:
            print(f"    {question}  {' '.join(said.split())!r}, right: {right!r}")
    rows = read_rows(path)
    for task in args.tasks:
        found = [row for row in rows if row["task"] == task]
        if found:
            print_table(found, task)
    if args.svg:
        draw(args, args.tasks[0])


if __name__ == "__main__":
    main()
