"""Holds the hot pieces of a step against the bounds that this machine's own hardware sets. Run by hand:

    python tests/bench_kernels.py                    # all pieces; seconds on a GPU, two minutes on two CPU cores
    python tests/bench_kernels.py nf4 loss           # some of nf4, loss, attention, optimizer, blocks
    python tests/bench_kernels.py --tokens 8192      # of a micro-batch; default 4,096 on a GPU, 1,024 on a CPU

The bounds are the speed of a large copy, for the bytes that a piece must read and write, and that of a large
matrix product. All variants of a piece, the copy and the product take turns in one loop; figures are medians, `over
bound` is the time over the bound's. Shapes are those of Llama-3.1-8B on a GPU and of a small model on a CPU.
"""

import argparse
import functools
import itertools
import statistics
import sys
import time
from typing import NamedTuple

from bench_harness import table

import torch

import data
import model as lm
import nf4
import train

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
if CUDA:  # Llama-3.1-8B
    D, F, V = 4096, 14336, 128256
    H, G, K = 32, 8, 128
else:
    D, F, V = 1024, 2816, 32000
    H, G, K = 16, 4, 64
N_COPIED = 1 << (28 if CUDA else 26)  # numbers: far more than any cache holds
SQUARE = 8192 if CUDA else 2048  # rows and columns of the product
N_WARM_UP = 3  # rounds that are not counted

# bf16 that a CPU emulates takes a hundred times as long
DTYPE = torch.bfloat16 if CUDA or torch.cpu._is_avx512_bf16_supported() else torch.float32


def now():
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def random(*shape, dtype=DTYPE):
    return (torch.randn(*shape, device=DEVICE) * 0.02).to(dtype)


class Bounds:
    """The copy and the product that all pieces are held against, and the rows of the table."""

    def __init__(self, n_rounds):
        self.n_rounds = n_rounds
        self.rows = []
        self.source = random(N_COPIED)
        self.target = torch.empty_like(self.source)
        self.square = random(SQUARE, SQUARE)

    def copy(self):
        self.target.copy_(self.source)

    def multiply(self):
        torch.mm(self.square, self.square)

    def medians(self, functions):
        """{name: seconds of a call}. Each round calls all of them, so that all meet the same machine."""
        taken = {name: [] for name in functions}
        for _ in range(N_WARM_UP + self.n_rounds):
            for name, function in functions.items():
                started = now()
                function()
                taken[name].append(now() - started)
        return {name: statistics.median(times[N_WARM_UP:]) for name, times in taken.items()}

    def hold(self, piece, variants, n_bytes=0, flop=0):
        """Times the variants beside the copy and the product: a row of the table for each."""
        seconds = self.medians({"copy": self.copy, "product": self.multiply} | variants)
        bytes_per_s = 2 * self.source.nbytes / seconds["copy"]  # read and written
        flop_per_s = 2 * SQUARE**3 / seconds["product"]
        bound_s = n_bytes / bytes_per_s + flop / flop_per_s
        what = f"{n_bytes / 1e6:,.0f} MB" if n_bytes else f"{flop / 1e9:,.1f} GFLOP"
        for name in variants:
            milliseconds = f"{seconds[name] * 1e3:.3g}"
            over_bound = f"{seconds[name] / bound_s:.2f}"
            self.rows.append((piece, name, milliseconds, what, f"{bound_s * 1e3:.3g}", over_bound))


def bench_nf4(bounds, tokens):
    """4.14 bits in, 16 out, and 5.14 bits. bitsandbytes beside it where it is installed."""
    w = random(F if CUDA else 4096, 4096)
    codes, scales = nf4.quantize(w, 4)
    in_nf5 = nf4.quantize(w, 5)
    variants = {
        "eager": lambda: nf4.dequantize(codes, scales, torch.bfloat16),
        "--compile": lambda: nf4.fast_weight(codes, scales, w),
        "NF5, eager": lambda: nf4.dequantize(*in_nf5, torch.bfloat16),
        "NF5, --compile": lambda: nf4.fast_weight(*in_nf5, w),
    }
    try:
        from bitsandbytes import functional as bnb
    except ImportError:
        print("bitsandbytes is not installed: without it", file=sys.stderr)
    else:
        packed, state = bnb.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
        variants["bitsandbytes, double quantization"] = lambda: bnb.dequantize_4bit(packed, state)
    bounds.hold("NF4 dequantize", variants, n_bytes=codes.nbytes + scales.nbytes + w.nbytes)


def bench_loss(bounds, tokens):
    """Head and loss, which multiply twice, and the gradient of the softmax alone, whose logits are read twice and
    written once."""
    h = random(tokens, D).requires_grad_()
    w = random(V, D)
    targets = torch.randint(V, (tokens,), device=DEVICE)
    some_targets = targets[: lm.FLOAT32_TOKENS]
    n_tokens_here = len(some_targets)
    logits = random(n_tokens_here, V)
    plain = lm.cross_entropy_and_grad
    gradients = {"eager": plain, "--compile": torch.compile(plain, dynamic=True)}

    with torch.device("meta"):  # its weight is not used
        head = lm.LMHead(lm.parse_config(data.PRESETS["llama-3.1-8b"]))

    def head_and_loss(gradient):
        head.cross_entropy_and_grad = gradient
        lm.ChunkedCrossEntropy.apply(h, w, targets, 1024, True, head.loss_and_grad_)

    def of_a_piece(gradient):
        gradient(logits, some_targets)

    heads = {name: functools.partial(head_and_loss, gradient) for name, gradient in gradients.items()}
    pieces = {name: functools.partial(of_a_piece, gradient) for name, gradient in gradients.items()}
    bounds.hold("head and loss, head frozen", heads, flop=4 * tokens * D * V)
    bounds.hold(f"softmax gradient of {n_tokens_here:,} tokens", pieces, n_bytes=3 * logits.nbytes)


def bench_attention(bounds, tokens):
    """Forward and backward of one document, and of a row packed with eight, 1/64 to 15/64 of the row. The bound is
    that of all earlier tokens."""
    q, k, v = (random(1, tokens, heads, K).requires_grad_() for heads in (H, G, G))
    ends = [tokens * i**2 // 64 for i in range(9)]
    rows = {"one document": [(0, tokens)], "8 documents": list(itertools.pairwise(ends))}
    windows = {"all earlier tokens": lm.NO_WINDOW, "a window of an eighth of the row": tokens // 8}

    def attend(spans, window):
        lm.attend(q, k, v, spans, window).sum().backward()

    for what, pairs in rows.items():
        spans = data.pack_spans(pairs, tokens)
        if spans.bounds is not None:
            spans.bounds = spans.bounds.to(DEVICE)
        variants = {name: functools.partial(attend, spans, window) for name, window in windows.items()}
        n_pairs = sum((stop - start) ** 2 for start, stop in pairs)  # of a query and a key; half of them count
        # seven products of 2 * K FLOP each: two of the forward, five of the backward, which makes the scores again
        bounds.hold(f"attention, {what}", variants, flop=7 * n_pairs * H * K)


class OptimizerCase(NamedTuple):
    name: str
    dtype: torch.dtype  # of weight and gradient
    state_bytes: int  # of a weight
    flags: list = []


OPTIMIZERS = [
    OptimizerCase("AdamW, float32", torch.float32, 8),
    OptimizerCase("AdamW, bf16", torch.bfloat16, 4),
    OptimizerCase("8-bit AdamW, float32 weights", torch.float32, 2, ["--optim", "adamw8bit"]),
    OptimizerCase(
        "bf16 AdamW, stochastic rounding", torch.bfloat16, 4, ["--precision", "bf16", "--stochastic_rounding"]),
]


def optimizer_step(dtype, flags):
    """optimizer.step() of a run with these flags, for one matrix that has a gradient."""
    p = torch.nn.Parameter(random(F, D, dtype=dtype))
    p.grad = random(F, D, dtype=dtype)
    args = train.parse_args(["--lr", "1e-4", *flags])
    return train.make_optimizer({"weight": p}, args, torch.zeros((), device=DEVICE)).step


def bench_optimizer(bounds, tokens):
    """AdamW on one matrix: weight, gradient and moments in, weight and moments out."""
    for case in OPTIMIZERS:
        if case.flags:
            variants = {
                "eager": optimizer_step(case.dtype, case.flags),
                "--compile": optimizer_step(case.dtype, [*case.flags, "--compile"]),
            }
        else:
            variants = {"fused": optimizer_step(case.dtype, [])}
        bytes_of_weight = 3 * case.dtype.itemsize + 2 * case.state_bytes
        bounds.hold(case.name, variants, n_bytes=F * D * bytes_of_weight)


def two_blocks(config, args):
    """A model of random weights. B of its adapters, which a run starts with zeros, is random, too."""
    model = lm.on_meta(config, args).to_empty(device=DEVICE)
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.02)
    return model


def bench_blocks(bounds, tokens):
    """A step of two blocks with LoRA on one document, by what their backward recomputes."""
    config = lm.parse_config(data.PRESETS["llama-3.1-8b"] | {
        "hidden_size": D, "intermediate_size": F, "num_attention_heads": H, "num_key_value_heads": G, "head_dim": K,
        "num_hidden_layers": 2, "vocab_size": 4096})
    args = train.parse_args(["--lora", "--lora_targets", *lm.targets_in(config)])
    args.precision = "fp32" if DTYPE is torch.float32 else "mixed"
    tokens_BT = torch.randint(4096, (1, tokens), device=DEVICE)

    def step(model):
        model(tokens_BT, tokens_BT).backward()

    # for each recomputed block of two, whether it keeps attention
    recomputed = {"all": [False, False], "all but attention": [True, True], "nothing": []}
    variants = {}
    for compiled in (False, True):
        for what, keeps_attention in recomputed.items():
            model = two_blocks(config, args)
            if compiled:
                lm.compile_(model, packing=True)
            for block, keeps in zip(model.model.layers, keeps_attention):
                lm.recompute_(block, keeps)
            name = f"{what}, --compile" if compiled else what
            variants[name] = functools.partial(step, model)
    products = lm.step_flops(config, lm.Counts(tokens, tokens, tokens**2), True)
    bounds.hold(f"two blocks, {tokens:,} tokens, recomputed:", variants, flop=products)


PIECES = {
    "nf4": bench_nf4,
    "loss": bench_loss,
    "attention": bench_attention,
    "optimizer": bench_optimizer,
    "blocks": bench_blocks,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=11, help="(default: 11)")
    parser.add_argument("--tokens", type=int, default=4096 if CUDA else 1024)
    args = parser.parse_args()
    unknown = [piece for piece in args.pieces if piece not in PIECES]
    if unknown:
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(PIECES)}")
    torch.manual_seed(0)
    bounds = Bounds(args.rounds)
    for piece in args.pieces or PIECES:
        PIECES[piece](bounds, args.tokens)
    name = torch.cuda.get_device_name() if CUDA else "CPU"
    table(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {args.rounds} rounds",
          ("piece", "variant", "ms", "bytes, FLOP", "bound ms", "over bound"), bounds.rows)


if __name__ == "__main__":
    main()
