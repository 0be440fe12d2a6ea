"""What a fine-tune of a real model is worth: two tasks that it fails before, learned by each method. Run by hand:

    python tests/bench_quality.py --model FOLDER                            # 40 runs, about an hour on two cores
    python tests/bench_quality.py --model FOLDER --seeds 1 --methods lora qlora
    python tests/bench_quality.py --model FOLDER --seeds 1 --methods lora --rates 5e-4 1e-3 2e-3    # looks for a rate
    python tests/bench_quality.py --model FOLDER --svg tests/quality.svg    # also draws the first task's held-out loss
    python tests/bench_quality.py --model FOLDER --tasks reasoning_gym:syllogism reasoning_gym:letter_counting

Each run is train.py as a user types it. A row is written to OUT/rows.jsonl when its run is complete, and the next call
does not repeat it: a call that was cut goes on where it was. Tables are made of all rows that are there.

The tasks are made by rule out of what is on every machine, and nothing that is held out is trained on:

    arguments    "Which arguments have no default?"  copy(src, dst, deep=1)  -> src, dst
    dates        "Say the date in words."            2004-11-24              -> the twenty-fourth of November

Functions are those of the Python that runs the script, so `arguments` has a few other rows in another version.

reasoning_gym:NAME is one of the 106 tasks of the package reasoning-gym (pip install reasoning-gym, which no other
script needs): its questions, its answers and its scorer are somebody else's. What is held out comes from other seeds.

The score is the share of held-out questions that greedy decoding answers exactly. It takes no decoding: an answer is
given token by token if and only if each of its tokens, the end of the turn included, is the likeliest one after the
question and the tokens before it, and one forward knows that of all of them. Of reasoning_gym the other
answers are decoded, and the package says how many points, from 0 to 1, each of them gets. The score is measured on
what the run has written, opened as --chat opens it: final/ of all weights, or an adapter on 16 bits or on NF4. "base"
and "base, NF4" are the same command with a rate of 0.

On a CPU the seconds are those of its cores (user and system, of the whole process, from imports to final/): other
processes on the machine change them less than the time on a clock. Rates were found with --rates, on one seed.
"""

import argparse
import importlib
import inspect
import itertools
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
    "qlora nf5": Method("--qlora --nf5", "", 2e-3),
    "qlora, bf16": Method("--qlora --precision bf16", "", 2e-3),
    "adamw8bit": Method("", "--optim adamw8bit", 2e-4),
    "bf16, rounded": Method("--precision bf16", "--stochastic_rounding", 2e-4),
}
# colours that are read on white and on black
CURVES = {"full": "#2f81f7", "lora": "#2da44e", "qlora": "#e5534b", "qlora nf5": "#a371f7"}

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


class Pair(NamedTuple):
    """A question of a task and its right answer."""

    question: str
    answer: str


class Task(NamedTuple):
    """make() -> Split. The instruction is the system's message, so the base knows what is asked."""

    instruction: str
    make: Callable
    points: Callable | None = None  # (question, what was said) -> 0 to 1; None: 1 for the exact answer alone


def in_words(day):
    return f"the {ORDINALS[day.day - 1]} of {MONTHS[day.month - 1]}"


def dates():
    """Each day of a year once, in years of this century: no answer is both trained on and held out."""
    pairs = []
    for days in range(366):
        # 2000 has a 29 February. So has each of the 25 years that a question may name instead.
        day = date(2000, 1, 1) + timedelta(days)
        # 7 and 25 have no common factor: neighbouring days have different years, and all years are used
        year = 2000 + 4 * (days * 7 % 25)
        pairs.append(Pair(f"{year}-{day:%m-%d}", in_words(day)))
    return pairs


def functions_of(module):
    """[(name, function or method)] of what a module defines itself."""
    found = []
    for name, value in sorted(vars(module).items()):
        # what a module has imported is asked for in the module that defines it
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = [(name, value)]
        if inspect.isclass(value):
            members = sorted(vars(value).items())
        for member_name, member in members:
            if inspect.isfunction(member) and not member_name.startswith("_"):
                found.append((member_name, member))
    return found


def is_readable(parameters):
    """Whether a question about these parameters is easy to read and has an answer that is more than a word."""
    text = signature_text(parameters)
    if not 2 <= len(parameters) <= 6:
        return False
    # "<" is in defaults that are no literals, such as <object object at 0x7f>, and "*" in parameters of any number
    return len(text) <= 80 and "<" not in text and "*" not in text


def signature_text(parameters):
    return ", ".join(map(str, parameters))


def parameters_of(function):
    """The parameters of a function as a caller of it sees them: without self, and without annotations, which make
    questions long and say nothing about what is required."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in ("self", "cls"):
            found.append(parameter.replace(annotation=parameter.empty))
    return found


def required_of(parameters):
    """The names of the parameters without a default."""
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]


def arguments():
    """Functions of this Python's library. Of those with the same parameters only one, so that none of them is both
    trained on and held out."""
    pairs = {}  # by the text of the parameters
    for module in MODULES:
        for name, function in functions_of(importlib.import_module(module)):
            parameters = parameters_of(function)
            if not is_readable(parameters):
                continue
            required = required_of(parameters)
            # Where nothing has a default, the answer is a copy of the question.
            if len(required) == len(parameters):
                continue
            text = signature_text(parameters)
            answer = ", ".join(required) or "none"  # an empty answer would be no answer
            pairs.setdefault(text, Pair(f"{name}({text})", answer))
    return list(pairs.values())


class Split(NamedTuple):
    """The pairs of a task."""

    trained: list
    held_out: list


def place_in_order(pair):
    # a hash of the question, so that neighbours in the order of making are not all on one side; crc32 and not hash(),
    # which is another one in each process
    return zlib.crc32(pair.question.encode())


def split(pairs):
    """-> Split, the same in every call."""
    in_order = sorted(pairs, key=place_in_order)
    return Split(in_order[N_HELD_OUT:], in_order[:N_HELD_OUT])


TASKS = {
    "arguments": Task("Which arguments have no default?", lambda: split(arguments())),
    "dates": Task("Say the date in words.", lambda: split(dates())),
}
GYM = "reasoning_gym:"
N_GENERATED = 400  # questions of reasoning_gym to train on
# Question number i of seed s is number 0 of seed s + i, so seeds have to be far apart.
HELD_OUT_SEED = 1_000_000


def pairs_of(entries):
    """[Pair] of a data set of reasoning_gym, each question once."""
    answers = {entry["question"]: str(entry["answer"]) for entry in entries}
    return [Pair(question, answer) for question, answer in answers.items()]


def task_of_reasoning_gym(name):
    """One of its tasks, as its authors have set it up. The package is imported here, as nothing else needs it."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise SystemExit(f"--tasks {GYM}{name} needs a package: pip install reasoning-gym") from error
    trained = reasoning_gym.create_dataset(name, size=N_GENERATED, seed=0)
    held_out = reasoning_gym.create_dataset(name, size=2 * N_HELD_OUT, seed=HELD_OUT_SEED)
    entries = {entry["question"]: entry for entry in held_out}

    def make():
        known = {pair.question for pair in pairs_of(trained)}
        new = [pair for pair in pairs_of(held_out) if pair.question not in known]
        return Split(pairs_of(trained), new[:N_HELD_OUT])

    def points(question, said):
        return held_out.score_answer(answer=said, entry=entries[question])

    return Task("Give the answer alone.", make, points)


def task_named(name):
    """The type of --tasks: a name, of which TASKS has the task."""
    if name.startswith(GYM) and name not in TASKS:
        TASKS[name] = task_of_reasoning_gym(name.removeprefix(GYM))
    if name not in TASKS:
        raise argparse.ArgumentTypeError(f"{name}: expected {', '.join(TASKS)} or {GYM}NAME")
    return name


def ask(task, question):
    """-> messages of the conversation before the answer."""
    system = {"role": "system", "content": TASKS[task].instruction}
    user = {"role": "user", "content": question}
    return [system, user]


def write_pairs(path, task, pairs):
    lines = []
    for question, answer in pairs:
        assistant = {"role": "assistant", "content": answer}
        messages = [*ask(task, question), assistant]
        lines.append(json.dumps({"messages": messages}))
    # in one rename: another call may read the file at this moment
    data.replace_file(path, "\n".join(lines) + "\n")


def write_task(folder, task):
    """-> (file to train on, file of held-out rows)."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = TASKS[task].make()
    name = task.replace(":", "-")  # a colon in --data stands before a split
    trained = folder / f"{name}-train.jsonl"
    held_out = folder / f"{name}-held_out.jsonl"
    write_pairs(trained, task, pairs.trained)
    write_pairs(held_out, task, pairs.held_out)
    return trained, held_out


# ---------------------------------------------------------------- a run and its score


class Case(NamedTuple):
    """What tells one row from all others."""

    task: str
    method: str
    rate: float
    seed: int

    def is_in(self, rows):
        return any(self.is_of(row) for row in rows)

    def is_of(self, row):
        return all(row[key] == value for key, value in self._asdict().items())


class Cost(NamedTuple):
    wall_s: float  # on a clock
    cpu_s: float  # of all cores


class Answer(NamedTuple):
    """A held-out question with what decoding gives and what is right."""

    question: str
    said: str
    right: str


class Result(NamedTuple):
    """What a run has written, opened."""

    model: lm.Transformer
    tokenizer: data.Tokenizer
    held_out: data.Loader
    device: torch.device


def run_training(argv):
    """train.py in a process of its own -> Cost."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, ROOT / "train.py", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # an error is shown behind what was printed before it
        text=True,
    )
    output = process.stdout.read()  # to its end, so to the end of the process
    # wait4 also tells what this one process has used, and Popen.wait() does not. Nobody can ask for the exit code a
    # second time, so Popen is told.
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(output)
    wall_s = time.perf_counter() - started
    return Cost(wall_s, usage.ru_utime + usage.ru_stime)


def open_result(argv):
    """The weights that a run has written, opened as --chat opens them -> Result."""
    args = train.parse_args(argv)
    ranks = train.Ranks(want_group=False, timeout=args.timeout)
    device = ranks.device
    opened = train.open_model(args, ranks)
    _, held_out = data.open_data(args, opened.tokenizer, opened.config.vocab_size, ranks)
    # the model is on the meta device, until here without memory
    model = opened.model
    model.to_empty(device=device).tie_()
    data.load_weights_(model, opened.reader, opened.adapter_reader, args.seed, device)
    return Result(model.eval(), opened.tokenizer, held_out, device)


@torch.no_grad()
def exact_answers(result):
    """For each held-out document whether greedy decoding gives its answer, [bool] in the order of the file."""
    # rows are packed, so documents come in another order
    numbers = itertools.chain.from_iterable(result.held_out.rows)
    exact = {}
    for batch in result.held_out.once():
        b = batch.to(result.device)
        logits_BTV = result.model(b.tokens, positions_BT=b.positions, spans=b.spans)
        # S: positions whose next token belongs to an answer. All documents of the batch follow one another.
        logits_SV = logits_BTV.flatten(0, 1)[b.supervised_S]
        targets_S = b.targets.flatten()[b.supervised_S]
        is_right_S = logits_SV.argmax(-1) == targets_S
        # one wrong token, and decoding goes another way from there
        for of_document, number in zip(is_right_S.split(b.n_targets), numbers):  # which takes no number too many
            exact[int(number)] = of_document.all().item()
    return [exact[number] for number in sorted(exact)]


def decoded_answer(result, messages, n=32):
    """The answer by decoding, token by token. n: at most so many, because a model that has not learned when to stop
    would go on."""
    prompt = result.tokenizer.prompt(messages)
    tokens = lm.generate(result.model, prompt, n, result.tokenizer.stop_ids, result.device)
    return result.tokenizer.core.decode(list(tokens))


def decoded_answers(result, task, n):
    """[Answer] of the first n held-out questions."""
    answers = []
    # always the same questions, so that methods and rates can be compared
    for question, right in TASKS[task].make().held_out[:n]:
        said = decoded_answer(result, ask(task, question))
        answers.append(Answer(question, said, right))
    return answers


def points_of(result, task, exact):
    """For each held-out question the points of its answer, from 0 to 1. exact: see exact_answers()."""
    points = [float(is_exact) for is_exact in exact]
    score = TASKS[task].points
    if score is None:
        return points
    for number, (question, _) in enumerate(TASKS[task].make().held_out):
        if not exact[number]:  # another answer may be right, too
            points[number] = score(question, decoded_answer(result, ask(task, question)).strip())
    return points


def flags_of(args, case):
    """Flags that training and opening the result share: data, lengths, how the weights are kept."""
    trained, held_out = write_task(args.out / "data", case.task)
    opens = METHODS[case.method].opens
    return f"--data {trained} --eval_data {held_out} {FLAGS} {opens}".split()


def chosen_flags(case):
    return ["--lr", f"{case.rate:g}", "--seed", str(case.seed)]


def train_with(args, case, flags, out):
    """Trains with the flags of a case and others -> (rows of metrics.jsonl, Cost)."""
    trains = METHODS[case.method].trains
    argv = ["--model", str(args.model), "--out", str(out)]
    argv += [*flags_of(args, case), *trains.split(), *chosen_flags(case), *flags]
    cost = run_training(argv)
    return metrics(out), cost


def measure(args, case):
    """Trains and scores -> a row of rows.jsonl."""
    # a folder of its own, because another call may run the same case
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        out = Path(folder, "run")
        rows, cost = train_with(args, case, [], out)
        result = open_result(["--model", str(out), *flags_of(args, case)])
    exact = exact_answers(result)
    assert len(exact) == N_HELD_OUT, f"{len(exact)} held-out rows, not {N_HELD_OUT}: --seq_len is too small"
    n_asked = args.answers
    if case.method == "base":
        # Is an answer of the base wrong, or only worded otherwise? Its own words say that, to a fifth of the
        # questions: decoding takes as long as a training.
        n_asked = N_HELD_OUT // 5
    answers = decoded_answers(result, case.task, n_asked)
    contains = [answer.right.lower() in answer.said.lower() for answer in answers]
    return {
        **case._asdict(),
        "model": args.model.name,
        "device": result.device.type,
        "flags": " ".join([FLAGS, METHODS[case.method].opens, METHODS[case.method].trains, *chosen_flags(case)]),
        "loss": rows[-1]["eval_loss"],  # a run ends with an evaluation
        "score": statistics.mean(points_of(result, case.task, exact)),
        "exact": sum(exact) / len(exact),
        # a looser score, for answers that say more than was asked for
        "contains": statistics.mean(contains),
        "answers": answers,
        **figures_of(rows, cost, result.device),
    }


def figures_of(rows, cost, device):
    """The part of a row about time and memory. rows: of metrics.jsonl."""
    steps = [row for row in rows if "loss" in row]  # the others are evaluations
    return {
        # on a GPU, time of the CPU's cores is not what a run costs
        "seconds": cost.cpu_s if device.type == "cpu" else cost.wall_s,
        "wall_s": cost.wall_s,
        "cpu_s": cost.cpu_s,
        # the median, so that one slow step, such as the first, does not count
        "step_s": statistics.median(row["step_s"] for row in steps),
        "gib": max(row["mem_gib"] for row in steps),
    }


def measure_curve(args, case):
    """Trains with more evaluations -> a row of curves.jsonl."""
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        rows, _ = train_with(args, case, ["--eval_every", "8"], Path(folder, "run"))
    points = [[row["step"], row["eval_loss"]] for row in rows if "eval_loss" in row]
    return case._asdict() | {"curve": points}


# ---------------------------------------------------------------- tables and picture


def add_row(path, row):
    """Writes a row on a line of its own: a call that was killed may have left half a row without an end."""
    with open(path, "a") as file:
        file.write(f"\n{json.dumps(row, ensure_ascii=False)}\n")


def read_rows(path):
    """The complete rows of all calls so far."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        # half a row has no end, and the line behind it is complete again
        if line.endswith("}"):
            rows.append(json.loads(line))
    return rows


def mean_and_range(values, digits):
    """'2.774 (2.751-2.790)', of one value '2.774'."""
    text = f"{statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):.{digits}f}-{max(values):.{digits}f})"
    return text


def print_table(rows, task):
    """A markdown table of at most 80 columns, a row for each method and rate."""
    seconds = "CPU s" if rows[0]["device"] == "cpu" else "s"
    exactly = "" if TASKS[task].points else "exactly "
    print(f"\n{task}: held-out loss and answers that are {exactly}right, of {N_HELD_OUT}\n")
    print(f"| {'method':<14}| {'rate':<7}| {'held-out loss':<20}| {'right':<15}| {seconds:<6}| GiB  |")
    print("|---|---|---|---|---|---|")
    for name in METHODS:  # in this order, whatever the order in which the runs were made
        of_method = [row for row in rows if row["method"] == name]
        for rate in sorted({row["rate"] for row in of_method}):
            print_method(name, rate, [row for row in of_method if row["rate"] == rate])


def print_method(name, rate, of_seeds):
    """A line of the table, for the rows of all seeds."""
    losses = mean_and_range([row["loss"] for row in of_seeds], digits=3)
    right = mean_and_range([100 * row["score"] for row in of_seeds], digits=0)
    cost = statistics.mean(row["seconds"] for row in of_seeds)
    # a card has to hold the largest of them
    gib = max(row["gib"] for row in of_seeds)
    print(f"| {name:<14}| {rate:<7g}| {losses:<20}| {right:<15}| {cost:<6.0f}| {gib:<5.2f}|")


def draw(args, task):
    """Held-out loss over steps, a curve for each of CURVES. They begin after the first steps: beside the loss of the
    base, which is in the table, their ends would be one line."""
    path = args.out / "curves.jsonl"
    curves = {}
    for name, colour in CURVES.items():
        case = Case(task, name, METHODS[name].rate, seed=0)
        if not case.is_in(read_rows(path)):
            add_row(path, measure_curve(args, case))
        (row,) = [row for row in read_rows(path) if case.is_of(row)]
        # a curve's name has the loss that it ends with, as curves may end too close to be told apart
        _, last_loss = row["curve"][-1]
        curves[f"{name}, {last_loss:.3f}", colour] = row["curve"]
    train.draw(args.svg, curves)


def wanted(args):
    """Yields the Case of every run: one seed of all, then the next one, so that a call that is cut has whole seeds."""
    for seed in range(args.seeds):
        for task in args.tasks:
            for name in args.methods:
                for rate in rates_of(args, name):
                    # a rate of 0 learns nothing, so another seed changes nothing
                    if rate or seed == 0:
                        yield Case(task, name, rate, seed)


def rates_of(args, name):
    """--rates is about methods that learn: a base has no rate to look for."""
    own = METHODS[name].rate
    if own and args.rates:
        return args.rates
    return [own]


def read_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--out", type=Path, default=Path("out/quality"), help="folder of rows.jsonl (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each run (%(default)s)")
    parser.add_argument("--tasks", nargs="+", type=task_named, default=list(TASKS),
                        help=f"of {', '.join(TASKS)} and {GYM}NAME (default: the first two)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates, in place of each method's own")
    parser.add_argument("--answers", type=int, default=3, help="answers to print of each run (%(default)s)")
    parser.add_argument("--svg", type=Path, help="draw the first task's held-out loss over steps")
    args = parser.parse_args()
    # A row has the folder's name, which `.` does not tell.
    args.model = args.model.resolve()
    return args


def print_run(case, row, n_answers):
    """What a run has given, as soon as it has: all runs together take an hour."""
    print(f"{case.task}  {case.method}  rate {case.rate:g}  seed {case.seed}: loss {row['loss']:.4f}, "
          f"right {row['score']:.2f}, {row['seconds']:.0f} s, {row['step_s']:.2f} s a step, "
          f"{row['gib']:.2f} GiB", flush=True)
    for answer in row["answers"][:n_answers]:
        said = " ".join(answer.said.split())  # on one line
        print(f"    {answer.question}  {said!r}, right: {answer.right!r}")


def main():
    args = read_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "rows.jsonl"
    for case in wanted(args):
        # read each time: another call, on another GPU, may share the folder
        if case.is_in(read_rows(path)):
            continue
        row = measure(args, case)
        add_row(path, row)
        print_run(case, row, args.answers)
    rows = read_rows(path)
    for task in args.tasks:
        of_task = [row for row in rows if row["task"] == task]
        if of_task:  # --seeds 0 makes no run, and prints what is there
            print_table(of_task, task)
    # last, because it makes runs of its own, and may be cut
    if args.svg:
        draw(args, args.tasks[0])


if __name__ == "__main__":
    main()
