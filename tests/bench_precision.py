"""Trains the built-in model with the same data in the same order in each precision and draws the losses. Run by hand:

    python tests/bench_precision.py                                   # 4 runs of 1 to 2 minutes, writes tests/precision.svg
    python tests/bench_precision.py --steps 50 --svg /tmp/short.svg

FSDP and DeepSpeed converge differently on the same bf16 job (accelerate #2624) because DeepSpeed keeps float32 master
weights. An AdamW update is about the learning rate; a bf16 weight of 0.06 has its neighbours 0.00024 away, and an update of
less than half of that is rounded off, every time. --precision mixed keeps masters, 16 bytes a parameter with gradient and
state; --stochastic_rounding keeps bf16 and rounds the update at random: lost most times, doubled rarely, right in the mean.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RUNS = {  # name: (flags, colour that reads on white and on black)
    "mixed: float32 masters": (["--precision", "mixed"], "#2f81f7"),
    "bf16": (["--precision", "bf16"], "#e5534b"),
    "bf16 --stochastic_rounding": (["--precision", "bf16", "--stochastic_rounding"], "#2da44e"),
    "bf16 --stochastic_rounding --optim adamw8bit":
        (["--precision", "bf16", "--stochastic_rounding", "--optim", "adamw8bit"], "#bf8700"),
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 52, 12, 14, 44
SMOOTH = 30  # steps in the running mean


def train(flags, argv):
    """-> rows of metrics.jsonl of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, HERE.parent / "train.py", *argv, *flags, "--log_every", "1", "--sample", "", "--out",
                   Path(folder, "run")]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=HERE.parent,
                              env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
        if done.returncode:
            raise SystemExit(done.stderr)
        return [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]


def running_mean(losses, n):
    """Means of n losses in a row, at the last of them."""
    return [(i + 1, sum(losses[i + 1 - n : i + 1]) / n) for i in range(n - 1, len(losses))]


def draw(curves, steps, caption):
    """{name: [(step, loss)]} -> SVG. Background transparent, text in a grey for both white and black."""
    low = math.floor(min(y for curve in curves.values() for _, y in curve) * 10) / 10
    high = math.ceil(max(y for curve in curves.values() for _, y in curve) * 10) / 10

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def y(loss):
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
             f'font-size="12" fill="#848d97"><title>{caption}</title>']
    every = 0.1 if high - low < 1 else 0.2
    for i in range(round((high - low) / every) + 1):
        loss = low + i * every
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="#848d97" stroke-opacity=".3"/>'
                     f'<text x="{LEFT - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.1f}</text>')
    for step in range(0, steps + 1, max(1, steps // 4)):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>'
                 f'<text transform="translate(13 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">loss, mean of {SMOOTH} '
                 "steps</text>")
    for i, (name, curve) in enumerate(curves.items()):
        colour = RUNS[name][1]
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in curve[::2])
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - RIGHT - 6}" y="{HEIGHT * 0.4 + 18 * i:.0f}" text-anchor="end" font-size="13" '
                     f'fill="{colour}">{name}, {curve[-1][1]:.2f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=3e-5, help="updates below the resolution of most weights in bf16")
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--svg", type=Path, default=HERE / "precision.svg")
    args = parser.parse_args()
    argv = ["--model", "tiny", "--data", "stdlib:docs", "--seq_len", args.seq_len, "--batch_size", args.batch_size, "--steps",
            args.steps, "--lr", args.lr, "--schedule", "constant", "--no-activation_checkpointing"]
    curves = {}
    print(f"train.py {' '.join(map(str, argv))}\n\n| run | first loss | mean of first {SMOOTH} | mean of last {SMOOTH} | ms a "
          "step |\n|---|---|---|---|---|")
    for name, (flags, _) in RUNS.items():
        rows = train(flags, argv)
        losses = [row["loss"] for row in rows]
        curves[name] = running_mean(losses, SMOOTH)
        ms = sorted(row["step_s"] for row in rows)[len(rows) // 2] * 1000
        print(f"| {name} | {losses[0]:.4f} | {curves[name][0][1]:.4f} | {curves[name][-1][1]:.4f} | {ms:.0f} |", flush=True)
    args.svg.write_text(draw(curves, args.steps, f"Loss of the built-in model at a learning rate of {args.lr:g}"))
    print(f"\n{args.svg}: {args.svg.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
