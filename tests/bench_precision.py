"""Trains the built-in model with the same data in the same order in each precision and draws the losses. Run by hand:

    python tests/bench_precision.py                                   # 4 runs of 1 to 2 minutes, writes precision.svg
    python tests/bench_precision.py --steps 50 --svg /tmp/short.svg
    python tests/bench_precision.py --nf4                             # a table, 1 minute

FSDP and DeepSpeed converge differently on the same bf16 job (accelerate #2624) because DeepSpeed keeps float32 masters.
A bf16 weight of 0.06 has its neighbours 0.00024 away, and an AdamW update, about the learning rate, is rounded off
where it is less than half of that. --precision mixed keeps masters, 16 bytes a parameter with gradient and state;
--stochastic_rounding rounds the update at random: lost most times, doubled rarely, right in the mean.

--nf4 quantizes one kind of layer at a time in a random Qwen3.5 of four blocks and says how far the logits move. One
column in 256 of each weight is 16 times as large, as trained weights have them. Random weights say which layers are
more sensitive than others, and nothing about the loss of a trained model.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_harness import ROOT, TESTS, metrics, table

import data
import model as lm
import nf4
import torch
import train

SR = "--precision bf16 --stochastic_rounding"
RUNS = {  # name: (flags, colour that reads on white and on black)
    "mixed: float32 masters": ("--precision mixed", "#2f81f7"), "bf16": ("--precision bf16", "#e5534b"),
    "bf16 --stochastic_rounding": (SR, "#2da44e"),
    "bf16 --stochastic_rounding --optim adamw8bit": (f"{SR} --optim adamw8bit", "#bf8700")}
SMOOTH = 30  # steps in the running mean, or all of a shorter run


@torch.no_grad()
def measure_nf4():
    shape = {"num_hidden_layers": 4, "vocab_size": 4096, "tie_word_embeddings": False}
    with torch.device("meta"):
        model = lm.Transformer(lm.parse_config(data.PRESETS["qwen3.5-0.8b"] | shape))
    model.to_empty(device="cpu")
    data.load_weights_(model, data.RandomWeights(model, 0, torch.device("cpu")), None, 0, torch.device("cpu"))
    layers = {}  # {kind: weights}
    for name, layer in model.model.layers.named_modules():
        if isinstance(layer, lm.Linear):
            layer.weight[:, ::256] *= 16
            layers.setdefault(name.split(".")[-1], []).append(layer.weight)
    tokens = torch.randint(4096, (1, 1024), generator=torch.Generator().manual_seed(0))
    exact = model(tokens)
    cells = []
    for kind, weights in [*layers.items(), ("all but in_proj_a and in_proj_b", None)]:
        if weights is None:
            weights = [w for kind in layers if kind not in nf4.SMALL for w in layers[kind]]
        whole = [w.clone() for w in weights]
        for w in weights:
            w.copy_(nf4.dequantize(*nf4.quantize(w, 4), w.dtype))
        error = sum((a - b).square().sum() for a, b in zip(weights, whole)) / sum(w.square().sum() for w in whole)
        moved = (model(tokens) - exact).norm() / exact.norm()
        cells.append((kind, len(weights), f"{error**0.5:.3f}", f"{moved:.3f}"))
        for w, old in zip(weights, whole):
            w.copy_(old)
    table("--nf4", ("in NF4", "matrices", "error of the weights", "logits move by"), cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--svg", type=Path, default=TESTS / "precision.svg")
    parser.add_argument("--nf4", action="store_true")
    args = parser.parse_args()
    if args.nf4:
        return measure_nf4()
    command = ("train.py --model tiny --seq_len 256 --batch_size 2 --lr 3e-5 --schedule constant "
               f"--no-activation_checkpointing --steps {args.steps}")
    n_mean = min(SMOOTH, args.steps)
    curves = {}
    cells = []
    for name, (flags, colour) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            words = [*command.split(), *flags.split(), "--log_every", "1", "--sample", "", "--out", f"{folder}/run"]
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
            if done.returncode:
                raise SystemExit(done.stderr)
            rows = [row for row in metrics(Path(folder, "run")) if "loss" in row]
        losses = [row["loss"] for row in rows]
        curve = [(i, sum(losses[i - n_mean : i]) / n_mean) for i in range(n_mean, len(losses) + 1)]
        curves[f"{name}, {curve[-1][1]:.2f}", colour] = curve[::2]
        ms = sorted(row["step_s"] for row in rows)[len(rows) // 2] * 1000
        cells.append((name, f"{losses[0]:.4f}", f"{curve[0][1]:.4f}", f"{curve[-1][1]:.4f}", f"{ms:.0f}"))
    table(command, ("run", "first loss", f"mean of first {n_mean}", f"mean of last {n_mean}", "ms a step"), cells)
    train.draw(args.svg, curves)


if __name__ == "__main__":
    main()
