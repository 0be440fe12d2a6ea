"""Holds each hot piece of a step against the bound that this machine's own hardware sets. Run by hand:

    python tests/bench_kernels.py                    # all pieces; seconds on a GPU, two minutes on two CPU cores
    python tests/bench_kernels.py nf4 loss           # some of them
    python tests/bench_kernels.py --tokens 8192      # of a micro-batch; default 4,096 on a GPU, 1,024 on a CPU

Two bounds are measured first: the speed of a large copy (bytes read and written a second) and of a large bf16 matrix product.
A piece that moves bytes is held to the first for the bytes it must read and write, one that multiplies to the second. All
variants of a piece, and the copy, take turns in one loop; figures are medians, `over bound` is time over the bound's time.
Shapes are those of Llama-3.1-8B on a GPU (D 4096, F 14336, V 128256) and of a small model on a CPU (1024, 2816, 32000).
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import model as lm
import nf4
import train


def clock(device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def take_turns(device, rounds, functions):
    """{name: function} -> {name: median seconds}, a call of each in every round, three rounds of warm-up."""
    seconds = {name: [] for name in functions}
    for _ in range(rounds + 3):
        for name, function in functions.items():
            started = clock(device)
            function()
            seconds[name].append(clock(device) - started)
    return {name: statistics.median(taken[3:]) for name, taken in seconds.items()}


class Bench:
    def __init__(self, device, rounds, tokens):
        self.device, self.rounds, self.tokens = device, rounds, tokens
        self.D, self.F, self.V, self.H, self.G, self.K = (
            (4096, 14336, 128256, 32, 8, 128) if device.type == "cuda" else (1024, 2816, 32000, 16, 4, 64))
        self.source = torch.randn(1 << (28 if device.type == "cuda" else 26), device=device).bfloat16()
        self.target = torch.empty_like(self.source)
        n = 8192 if device.type == "cuda" else 2048
        self.square = torch.randn(n, n, device=device).bfloat16()
        print(f"{train.device_name(device)}, torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {rounds} "
              "interleaved rounds\n\n| piece | variant | ms | bytes, FLOP | bound ms | over bound |\n|---|---|---|---|---|---|")

    def random(self, *shape, grad=False, dtype=torch.bfloat16):
        return (torch.randn(*shape, device=self.device) * 0.02).to(dtype).requires_grad_(grad)

    def hold(self, piece, variants, n_bytes=0, flop=0):
        """Times the variants beside the copy and the product, and prints them against the bound of bytes plus FLOP."""
        bounds = {"copy": lambda: self.target.copy_(self.source), "product": lambda: torch.mm(self.square, self.square)}
        taken = take_turns(self.device, self.rounds, bounds | variants)
        copied, multiplied = 2 * self.source.nbytes / taken["copy"], 2 * len(self.square) ** 3 / taken["product"]
        bound = n_bytes / copied + flop / multiplied
        what = " + ".join(([f"{n_bytes / 1e6:,.0f} MB"] if n_bytes else []) + ([f"{flop / 1e9:,.1f} GFLOP"] if flop else []))
        for name in variants:
            print(f"| {piece} | {name} | {taken[name] * 1e3:.3g} | {what} | {bound * 1e3:.3g} | {taken[name] / bound:.2f} |",
                  flush=True)

    def nf4(self):
        """4.14 bits in, 16 out. bitsandbytes beside it where it is installed."""
        w = self.random(self.F if self.device.type == "cuda" else 4096, 4096)
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
        self.hold("NF4 dequantize", variants, n_bytes=codes.nbytes + scales.nbytes + w.nbytes)

    def loss(self):
        """Logits are written by the product, read twice, and their gradient is written and read."""
        h, w = self.random(self.tokens, self.D, grad=True), self.random(self.V, self.D)
        targets = torch.randint(self.V, (self.tokens,), device=self.device)
        fused = torch.compile(lm.softmax_gradient_fused, fullgraph=True, dynamic=True)
        plain = {"eager": lm.softmax_gradient, "--compile": fused}
        self.hold("head and loss, head frozen", {
            name: lambda f=f: lm.ChunkedCrossEntropy.apply(h, w, targets, 1024, True, f) for name, f in plain.items()
        }, flop=4 * self.tokens * self.D * self.V)
        logits, column = self.random(1024, self.V), targets[:1024, None]
        self.hold("softmax gradient of 1,024 tokens", {
            name: lambda f=f: f(logits, column, True) for name, f in plain.items()}, n_bytes=3 * logits.nbytes)

    def block(self):
        """A block of the model, forward and backward: products and attention at the speed of the product."""
        config = lm.parse_config(lm.preset_config("llama-3.1-8b") | {
            "hidden_size": self.D, "intermediate_size": self.F, "num_attention_heads": self.H,
            "num_key_value_heads": self.G, "head_dim": self.K, "num_hidden_layers": 2, "vocab_size": 512})
        positions = torch.arange(self.tokens, device=self.device)[None]
        rope, spans = lm.rope_table(positions, config), [(0, self.tokens)]
        x = self.random(1, self.tokens, self.D, grad=True)
        for method, adapters in (("full", None), ("LoRA", 0), ("QLoRA", 0)):
            variants = {}
            for name in ("eager", "--compile"):
                with torch.device("meta"):
                    model = lm.Transformer(config)
                    source = lm.RandomWeights(model, 0, self.device)
                    if method == "QLoRA":
                        nf4.quantize_linears_(model.model.layers)
                    if method != "full":
                        lm.add_lora_(model, 16, 32, 0.0, lm.LORA_TARGETS)
                train.set_precision_(model, "bf16")
                if name == "--compile":
                    train.compile_(model, fixed_length=True, names=train.regions(False, 0))
                model.to_empty(device=self.device)
                lm.load_weights_(model, source, None, 0, self.device, False)
                variants[name] = lambda block=model.model.layers[1]: block(x, rope, spans).sum().backward()
            n_adapter = None if adapters is None else sum(
                p.numel() for n, p in model.model.layers[0].named_parameters() if "lora" in n)
            one = train.dataclasses.replace(config, num_hidden_layers=1)
            self.hold(f"block, {method}", variants, flop=train.step_flops(one, 0, self.tokens, self.tokens**2, n_adapter))

    def attention(self):
        """Forward and backward of one document, and of a row packed with documents of uneven length."""
        shape = (1, self.tokens, self.H, self.K), (1, self.tokens, self.G, self.K)
        q, k, v = self.random(*shape[0], grad=True), self.random(*shape[1], grad=True), self.random(*shape[1], grad=True)
        flop = 7 * self.tokens**2 * self.H * self.K

        def run(spans):
            lm.attend(q, k, v, spans).sum().backward()

        variants = {"one document": lambda: run([(0, self.tokens)])}
        if self.device.type == "cuda":
            from torch.nn.attention import SDPBackend, sdpa_kernel

            def by(backend):
                with sdpa_kernel(backend):
                    run([(0, self.tokens)])

            variants = {"FlashAttention": lambda: by(SDPBackend.FLASH_ATTENTION),
                        "cuDNN": lambda: by(SDPBackend.CUDNN_ATTENTION)}
        self.hold("attention, one document", variants, flop=flop)
        ends = [0, *(self.tokens * i**2 // 64 for i in range(1, 9))]  # eight documents, 1/64 to 15/64 of the row
        spans = list(zip(ends, ends[1:]))
        variants = {"a call for each": lambda: run(spans)}
        if self.device.type == "cuda":
            packed = lm.pack_spans(spans, self.tokens)
            packed = packed._replace(bounds=packed.bounds.to(self.device))
            variants["all at once"] = lambda: run(packed)
        self.hold("attention, 8 documents", variants,
                  flop=7 * sum((stop - start) ** 2 for start, stop in spans) * self.H * self.K)

    def optimizer(self):
        """AdamW on one matrix: weight, gradient and moments in, weight and moments out."""
        n, size = self.F * self.D, {torch.float32: 4, torch.bfloat16: 2}
        for name, dtype, kinds, state in (
            ("AdamW, float32", torch.float32, {}, 8), ("AdamW, bf16", torch.bfloat16, {}, 4),
            ("8-bit AdamW, float32 weights", torch.float32, {"eight_bit": True}, 2),
            ("bf16 AdamW, stochastic rounding", torch.bfloat16, {"stochastic_rounding": True}, 4),
        ):
            variants = {}
            for variant in ("eager", "--compile")[: 1 + bool(kinds)]:
                p = torch.nn.Parameter(self.random(self.F, self.D, dtype=dtype))
                p.grad = self.random(self.F, self.D, dtype=dtype)
                optimizer = train.make_optimizer([p], 1e-4, 0.01, True, **kinds, compiled=variant == "--compile")
                variants["fused" if not kinds else variant] = optimizer.step
            self.hold(name, variants, n_bytes=n * (3 * size[dtype] + 2 * state))

    def offload(self):
        """A block's input to pinned memory and back; the bound is the bus, of which only the copies themselves can tell."""
        if self.device.type != "cuda":
            print("offload: there is no bus to measure on a CPU", file=sys.stderr)
            return
        x = self.random(self.tokens, self.D)
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        taken = take_turns(self.device, self.rounds, {"out": lambda: host.copy_(x, non_blocking=True),
                                                      "back": lambda: x.copy_(host, non_blocking=True)})
        for way, seconds in taken.items():
            print(f"| offload, {way} | pinned, {x.nbytes / seconds / 1e9:.1f} GB/s | {seconds * 1e3:.3g} | "
                  f"{x.nbytes / 1e6:,.0f} MB | | |")


PIECES = ("nf4", "loss", "block", "attention", "optimizer", "offload")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int)
    chosen = parser.parse_args()
    if unknown := set(chosen.pieces) - set(PIECES):
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(PIECES)}")
    gpu = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    bench = Bench(gpu, chosen.rounds, chosen.tokens or (4096 if gpu.type == "cuda" else 1024))
    for piece in chosen.pieces or PIECES:
        getattr(bench, piece)()
