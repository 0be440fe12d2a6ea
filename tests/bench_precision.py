"""Trains the built-in model with the same data in the same order in each precision and draws the losses. Run by hand:

    python tests/bench_precision.py                                   # 4 runs of 1 to 2 minutes, writes precision.svg
    python tests/bench_precision.py --steps 50 --svg /tmp/short.svg

FSDP and DeepSpeed converge differently on the same bf16 job (accelerate #2624) because DeepSpeed keeps float32 masters.
A bf16 weight of 0.06 has its neighbours 0.00024 away, and an AdamW update, about the learning rate, is rounded off
where it is less than half of that. --precision mixed keeps masters, 16 bytes a parameter with gradient and state;
--stochastic_rounding rounds the update at random: lost most times, doubled rarely, right in the mean.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_harness import ROOT, TESTS, metrics, table

import train

SR = "--precision bf16 --stochastic_rounding"
RUNS = {  # name: (flags, colour that reads on white and on black)
    "mixed: float32 masters": ("--precision mixed", "#2f81f7"), "bf16": ("--precision bf16", "#e5534b"),
    "bf16 --stochastic_rounding": (SR, "#2da44e"),
    "bf16 --stochastic_rounding --optim adamw8bit": (f"{SR} --optim adamw8bit", "#bf8700")}
SMOOTH = 30  # steps in the running mean


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--svg", type=Path, default=TESTS / "precision.svg")
    args = parser.parse_args()
    command = ("train.py --model tiny --data stdlib:docs --seq_len 256 --batch_size 2 --lr 3e-5 --schedule constant "
               f"--no-activation_checkpointing --steps {args.steps}")
    curves, cells = {}, []
    for name, (flags, colour) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            words = [*command.split(), *flags.split(), "--log_every", "1", "--sample", "", "--out", f"{folder}/run"]
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
            if done.returncode:
                raise SystemExit(done.stderr)
            rows = [row for row in metrics(Path(folder, "run")) if "loss" in row]
        losses = [row["loss"] for row in rows]
        curve = [(i, sum(losses[i - SMOOTH : i]) / SMOOTH) for i in range(SMOOTH, len(losses) + 1)]
        curves[f"{name}, {curve[-1][1]:.2f}", colour] = curve[::2]
        ms = sorted(row["step_s"] for row in rows)[len(rows) // 2] * 1000
        cells.append((name, f"{losses[0]:.4f}", f"{curve[0][1]:.4f}", f"{curve[-1][1]:.4f}", f"{ms:.0f}"))
    table(command, ("run", "first loss", f"mean of first {SMOOTH}", f"mean of last {SMOOTH}", "ms a step"), cells)
    train.draw(args.svg, curves)


if __name__ == "__main__":
    main()
