"""Trains the built-in model with the same data in the same order in each precision and draws the losses. Run by hand:

    python tests/bench_precision.py                                   # 4 runs of 1 to 2 minutes, writes precision.svg
    python tests/bench_precision.py --steps 50 --svg /tmp/short.svg

FSDP and DeepSpeed converge differently on the same bf16 job (accelerate #2624) because DeepSpeed keeps float32 masters.
A bf16 weight of 0.06 has its neighbours 0.00024 away, and an AdamW update, about the learning rate, is rounded off
where it is less than half of that. --precision mixed keeps masters, 16 bytes a parameter with gradient and state;
--stochastic_rounding rounds the update at random: lost most times, doubled rarely, right in the mean.
"""

import argparse
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_harness import ROOT, TESTS, metrics, table

SR = "--precision bf16 --stochastic_rounding"
RUNS = {  # name: (flags, colour that reads on white and on black)
    "mixed: float32 masters": ("--precision mixed", "#2f81f7"), "bf16": ("--precision bf16", "#e5534b"),
    "bf16 --stochastic_rounding": (SR, "#2da44e"),
    "bf16 --stochastic_rounding --optim adamw8bit": (f"{SR} --optim adamw8bit", "#bf8700")}
SMOOTH = 30  # steps in the running mean
LEFT, RIGHT, TOP, BOTTOM = 52, 708, 14, 356  # the plot in a picture of 720 x 400


def draw(curves, steps, caption):
    """{name: [(step, loss)]} -> SVG. Background transparent, text in a grey for both white and black."""
    losses = [loss for curve in curves.values() for _, loss in curve]
    low, high = math.floor(min(losses) * 10) / 10, math.ceil(max(losses) * 10) / 10

    def place(step, loss):
        return f"{LEFT + (RIGHT - LEFT) * step / steps:.1f},{TOP + (BOTTOM - TOP) * (high - loss) / (high - low):.1f}"

    def text(place, words, style='text-anchor="end"'):
        x, y = place.split(",")
        return f'<text x="{x}" y="{y}" {style}>{words}</text>'

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400" font-family="sans-serif" font-size="12" '
             f'fill="#848d97"><title>{caption}, mean of {SMOOTH} steps</title>']
    for i in range(round((high - low) / 0.2) + 1):
        loss = low + i * 0.2
        parts.append(f'<polyline points="{place(0, loss)} {place(steps, loss)}" stroke="#848d97" stroke-opacity=".3"/>')
        parts.append(text(place(0, loss), f"{loss:.1f}", 'text-anchor="end" dx="-6" dy="4"'))
    for step in range(0, steps + 1, max(1, steps // 4)):
        parts.append(text(place(step, low), f"step {step}", 'text-anchor="middle" dy="20"'))
    for i, (name, curve) in enumerate(curves.items()):
        points = " ".join(place(step, loss) for step, loss in curve[::2])
        parts.append(f'<polyline points="{points}" fill="none" stroke="{RUNS[name][1]}" stroke-width="2"/>')
        parts.append(text(f"{RIGHT - 6},{160 + 18 * i}", f"{name}, {curve[-1][1]:.2f}",
                          f'text-anchor="end" font-size="13" style="fill:{RUNS[name][1]}"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--svg", type=Path, default=TESTS / "precision.svg")
    args = parser.parse_args()
    command = ("train.py --model tiny --data stdlib:docs --seq_len 256 --batch_size 2 --lr 3e-5 --schedule constant "
               f"--no-activation_checkpointing --steps {args.steps}")
    curves, cells = {}, []
    for name, (flags, _) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            words = [*command.split(), *flags.split(), "--log_every", "1", "--sample", "", "--out", f"{folder}/run"]
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
            if done.returncode:
                raise SystemExit(done.stderr)
            rows = [row for row in metrics(Path(folder, "run")) if "loss" in row]
        losses = [row["loss"] for row in rows]
        curves[name] = [(i, sum(losses[i - SMOOTH : i]) / SMOOTH) for i in range(SMOOTH, len(losses) + 1)]
        ms = sorted(row["step_s"] for row in rows)[len(rows) // 2] * 1000
        cells.append((name, f"{losses[0]:.4f}", f"{curves[name][0][1]:.4f}", f"{curves[name][-1][1]:.4f}", f"{ms:.0f}"))
    table(command, ("run", "first loss", f"mean of first {SMOOTH}", f"mean of last {SMOOTH}", "ms a step"), cells)
    args.svg.write_text(draw(curves, args.steps, "Loss of the built-in model at a learning rate of 3e-5"))


if __name__ == "__main__":
    main()
