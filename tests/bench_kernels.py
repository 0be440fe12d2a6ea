"""Holds the hot pieces of a step against the bounds that this machine's own hardware sets. Run by hand:

    python tests/bench_kernels.py                    # all pieces; seconds on a GPU, two minutes on two CPU cores
    python tests/bench_kernels.py nf4 loss           # some of nf4, loss, attention, optimizer, blocks
    python tests/bench_kernels.py --tokens 8192      # of a micro-batch; default 4,096 on a GPU, 1,024 on a CPU

The bounds are the speed of a large copy, for the bytes that a piece must read and write, and that of a large
matrix product. All variants of a piece, the copy and the product take turns in one loop; figures are medians, `over
bound` is the time over the bound's. Shapes are those of Llama-3.1-8B on a GPU and of a small model on a CPU.
"""

import argparse
import statistics
import sys
import time

from bench_harness import table

import torch

import data
import model as lm
import nf4
import train

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
D, F, V, H, G, K = (4096, 14336, 128256, 32, 8, 128) if CUDA else (1024, 2816, 32000, 16, 4, 64)


# bf16 that a CPU emulates takes a hundred times as long
DTYPE = torch.bfloat16 if CUDA or torch.cpu._is_avx512_bf16_supported() else torch.float32


def now():
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def random(*shape, dtype=DTYPE):
    return (torch.randn(*shape, device=DEVICE) * 0.02).to(dtype)


class Bounds:
    def __init__(self, rounds):
        self.rounds, self.rows, self.source = rounds, [], random(1 << (28 if CUDA else 26))
        self.target, self.square = torch.empty_like(self.source), random(*[8192 if CUDA else 2048] * 2)

    def hold(self, piece, variants, n_bytes=0, flop=0):
        """Times the variants beside the copy and the product: a row of the table for each."""
        bounds = {"copy": lambda: self.target.copy_(self.source), "product": lambda: torch.mm(self.square, self.square)}
        taken = {name: [] for name in bounds | variants}
        for _ in range(3 + self.rounds):  # three to warm up; a call of each in every round, on the same machine
            for name, function in (bounds | variants).items():
                started = now()
                function()
                taken[name].append(now() - started)
        seconds = {name: statistics.median(times[3:]) for name, times in taken.items()}
        copied, multiplied = 2 * self.source.nbytes / seconds["copy"], 2 * len(self.square) ** 3 / seconds["product"]
        bound = n_bytes / copied + flop / multiplied
        what = f"{n_bytes / 1e6:,.0f} MB" if n_bytes else f"{flop / 1e9:,.1f} GFLOP"
        for name in variants:
            times = f"{seconds[name] * 1e3:.3g}", what, f"{bound * 1e3:.3g}", f"{seconds[name] / bound:.2f}"
            self.rows.append((piece, name, *times))


def bench_nf4(bounds, tokens):
    """4.14 bits in, 16 out. bitsandbytes beside it where it is installed."""
    w = random(F if CUDA else 4096, 4096)
    codes, scales = nf4.quantize(w)
    variants = {"eager": lambda: nf4.dequantize(codes, scales, torch.bfloat16),
                "--compile": lambda: nf4.dequantize_compiled(codes, scales)}
    try:
        from bitsandbytes import functional as bnb
    except ImportError:
        print("bitsandbytes is not installed: without it", file=sys.stderr)
    else:
        packed, state = bnb.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
        variants["bitsandbytes, double quantization"] = lambda: bnb.dequantize_4bit(packed, state)
    bounds.hold("NF4 dequantize", variants, n_bytes=codes.nbytes + scales.nbytes + w.nbytes)


def bench_loss(bounds, tokens):
    """Logits are written by the product and read twice; their gradient is written and read."""
    h, w = random(tokens, D).requires_grad_(), random(V, D)
    targets = torch.randint(V, (tokens,), device=DEVICE)
    kinds = {"eager": lm.softmax_gradient, "--compile": torch.compile(lm.softmax_gradient, dynamic=True)}
    bounds.hold("head and loss, head frozen", {
        name: lambda f=f: lm.ChunkedCrossEntropy.apply(h, w, targets, 1024, True, f) for name, f in kinds.items()
    }, flop=4 * tokens * D * V)
    column = targets[: lm.PIECE, None]
    logits = random(len(column), V)
    bounds.hold(f"softmax gradient of {len(column):,} tokens", {
        name: lambda f=f: f(logits, column) for name, f in kinds.items()}, n_bytes=3 * logits.nbytes)


def bench_attention(bounds, tokens):
    """Forward and backward of one document, and of a row packed with eight, 1/64 to 15/64 of the row. The bound is
    that of all earlier tokens."""
    q, k, v = (random(1, tokens, heads, K).requires_grad_() for heads in (H, G, G))
    ends = [0, *(tokens * i**2 // 64 for i in range(1, 9))]
    for what, pairs in (("one document", [(0, tokens)]), ("8 documents", list(zip(ends, ends[1:])))):
        spans = data.pack_spans(pairs, tokens)
        if spans.bounds is not None:
            spans.bounds = spans.bounds.to(DEVICE)
        windows = {"all earlier tokens": lm.NO_WINDOW, "a window of an eighth of the row": tokens // 8}
        bounds.hold(f"attention, {what}", {
            name: lambda spans=spans, window=window: lm.attend(q, k, v, spans, window).sum().backward()
            for name, window in windows.items()},
                    flop=7 * sum((stop - start) ** 2 for start, stop in pairs) * H * K)


def bench_optimizer(bounds, tokens):
    """AdamW on one matrix: weight, gradient and moments in, weight and moments out."""
    for name, dtype, flags, state in (
        ("AdamW, float32", torch.float32, [], 8), ("AdamW, bf16", torch.bfloat16, [], 4),
        ("8-bit AdamW, float32 weights", torch.float32, ["--optim", "adamw8bit"], 2),
        ("bf16 AdamW, stochastic rounding", torch.bfloat16, ["--precision", "bf16", "--stochastic_rounding"], 4),
    ):
        variants = {"fused": []} if not flags else {"eager": flags, "--compile": [*flags, "--compile"]}
        for variant, more in variants.items():
            p = torch.nn.Parameter(random(F, D, dtype=dtype))
            p.grad = random(F, D, dtype=dtype)
            args = train.parse_args(["--lr", "1e-4", *more])
            variants[variant] = train.make_optimizer({"weight": p}, args, torch.zeros((), device=DEVICE)).step
        bounds.hold(name, variants, n_bytes=F * D * (3 * dtype.itemsize + 2 * state))


def bench_blocks(bounds, tokens):
    """A step of two blocks with LoRA on one document, by what their backward recomputes."""
    config = lm.parse_config(data.PRESETS["llama-3.1-8b"] | {
        "hidden_size": D, "intermediate_size": F, "num_attention_heads": H, "num_key_value_heads": G, "head_dim": K,
        "num_hidden_layers": 2, "vocab_size": 4096})
    args = train.parse_args(["--lora", "--lora_targets", *lm.targets_in(config)])
    args.precision = "fp32" if DTYPE is torch.float32 else "mixed"
    tokens_BT = torch.randint(4096, (1, tokens), device=DEVICE)
    variants = {}
    for compiled in "", ", --compile":
        for recomputes, n_kept, what in (None, 0, "all"), (None, 2, "all but attention"), (0, 0, "nothing"):
            model = lm.on_meta(config, args).to_empty(device=DEVICE)
            for p in model.parameters():
                torch.nn.init.normal_(p, 0, 0.02)
            if compiled:
                lm.compile_(model, packing=True)
            lm.checkpoint_activations_(model, recomputes, n_kept)
            variants[what + compiled] = lambda model=model: model(tokens_BT, tokens_BT).backward()
    products = lm.step_flops(config, lm.Counts(tokens, tokens, tokens**2), True)
    bounds.hold(f"two blocks, {tokens:,} tokens, recomputed:", variants, flop=products)


if __name__ == "__main__":
    pieces = {"nf4": bench_nf4, "loss": bench_loss, "attention": bench_attention, "optimizer": bench_optimizer,
              "blocks": bench_blocks}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(pieces)} (default: all)")
    parser.add_argument("--rounds", type=int, default=11, help="(default: 11)")
    parser.add_argument("--tokens", type=int, default=4096 if CUDA else 1024)
    args = parser.parse_args()
    if unknown := set(args.pieces) - set(pieces):
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(pieces)}")
    torch.manual_seed(0)
    bounds = Bounds(args.rounds)
    for piece in args.pieces or pieces:
        pieces[piece](bounds, args.tokens)
    name = torch.cuda.get_device_name() if CUDA else "CPU"
    table(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {args.rounds} rounds",
          ("piece", "variant", "ms", "bytes, FLOP", "bound ms", "over bound"), bounds.rows)
