"""Chats of ten short answers under Qwen3's template, trained in one document or each in a document of its own. By hand:

    python tests/bench_turns.py --model FOLDER            # FOLDER is made by make_smollm2.py; about an hour on a core

Both see equally many tokens: 16 packed rows of 512. "own" makes the documents as --train_on targets did once: a text
up to each answer, with the empty thought that the template writes into the last answer. The loss is that of answers
that are held out, each in the form in which it is asked: behind the empty thought that its prompt ends with.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from bench_harness import ROOT, metrics
from bench_quality import TASKS, ask, open_result, run_training

import data
import torch
import torch.nn.functional as F

FLAGS = "--seq_len 512 --steps 16 --schedule linear --no-activation_checkpointing --save_every 0 --precision fp32"
TEMPLATE = ["--chat_template", str(ROOT / "tests/goldens-chat/qwen3.jinja"), "--template_args", "enable_thinking=false"]
TURNS = 10


def write_chats(path, task, pairs, n_chats, each_alone, seed):
    """each_alone: an example for each answer, in which all answers before it are context."""
    choose = random.Random(seed)
    rows = []
    for _ in range(n_chats):
        messages = ask(task, "")[:1]  # what the system says
        for pair in choose.sample(pairs, TURNS):
            messages = [{**message, "weight": 0} for message in messages] if each_alone else messages
            messages = [*messages, {"role": "user", "content": pair.question},
                        {"role": "assistant", "content": pair.answer}]
            if each_alone:
                rows.append({"messages": messages})
        if not each_alone:
            rows.append({"messages": messages})
    data.replace_file(path, "\n".join(map(json.dumps, rows)) + "\n")
    return path


@torch.no_grad()
def held_out_loss(result):
    total = 0.0
    n_targets = 0
    for batch in result.held_out.once():
        logits_BTV = result.model(batch.tokens, positions_BT=batch.positions, spans=batch.spans)
        logits_SV = logits_BTV.flatten(0, 1)[batch.supervised_S]
        targets_S = batch.targets.flatten()[batch.supervised_S]
        total += F.cross_entropy(logits_SV, targets_S, reduction="sum").item()
        n_targets += len(targets_S)
    return total / n_targets


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--task", default="dates", choices=TASKS)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    pairs = TASKS[args.task].make()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        held_out = write_chats(folder / "held_out.jsonl", args.task, pairs.held_out, 5, True, seed=2)
        for seed in range(args.seeds):
            for name in ("whole", "own"):
                trained = write_chats(folder / f"{name}.jsonl", args.task, pairs.trained, 300, name == "own", seed=1)
                flags = [*FLAGS.split(), *TEMPLATE, "--data", str(trained), "--eval_data", str(held_out)]
                out = folder / f"{name}-{seed}"
                run_training(["--model", str(args.model), "--out", str(out), *flags, "--lora", "--lr", "2e-3",
                              "--seed", str(seed), "--sample="])
                loss = held_out_loss(open_result(["--model", str(out), *flags]))
                n_answers = metrics(out)[-2]["tokens"]
                figures = f"held-out loss {loss:.4f}, {n_answers} tokens of answers"
                print(f"{args.task}  {name}  seed {seed}: {figures}", flush=True)


if __name__ == "__main__":
    main()
