"""Past one card: what a step sends, what that costs on paper, memory against ranks, the longest rows. Run by hand:

    python tests/bench_scale.py traffic    # bytes that the collectives of a real step move, beside the formula; a minute
    python tests/bench_scale.py paper      # 8 to 256 GPUs: bytes of that formula over assumed links, beside the products
    python tests/bench_scale.py memory     # train.py's memory plan of 70B and 32B against ranks
    python tests/bench_scale.py contexts   # the longest row that the plan fits into cards of 24, 48 and 80 GB

None needs a GPU; only `traffic` runs anything. It is train.py as one rank of N on a small model under torch's fake process
group, which moves nothing; the sizes are those that the collectives are called with.
"""

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
from bench_memory import planned, run_cases, table

import model as lm
import nf4
import train

# ---------------------------------------------------------------- bytes of a step

KINDS = ("weights gathered", "gradients scattered", "gradients between replicas", "rows exchanged", "everything else")


def received(kind, n_bytes, n):
    """Bytes that a rank of n has to receive for a collective whose larger side has `n_bytes`; a ring moves just those."""
    return (2 if kind == "all_reduce" else 1) * n_bytes * (n - 1) / n


def formula(args, c, world, tokens):
    """{kind: bytes that a rank must receive in a step}. tokens: of a micro-batch of this rank."""
    shards, M = world // args.replicas if args.fsdp2 else 1, args.grad_accum
    size, reduced = 4 if args.precision == "fp32" else 2, 2 if args.precision == "bf16" else 4
    D, L = c.hidden_size, c.num_hidden_layers
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    linears = {"q_proj": (q, D), "k_proj": (kv, D), "v_proj": (kv, D), "o_proj": (D, q), "gate_proj": (c.intermediate_size, D),
               "up_proj": (c.intermediate_size, D), "down_proj": (D, c.intermediate_size)}
    vectors = 2 * D + (q + 2 * kv) * (c.model_type == "qwen2") + 2 * c.head_dim * (c.model_type == "qwen3")
    full = not (args.lora or args.qlora)
    adapters = sum(args.lora_rank * sum(linears[name]) for name in args.lora_targets) if not full else 0

    def padded(rows, width):  # every rank holds as many rows as the first
        return -(-rows // shards) * shards * width

    weights = sum(padded(*shape) for shape in linears.values()) * size
    if args.qlora:
        weights = sum(padded(rows, width // 2 + nf4.scale_bytes(width)) for rows, width in linears.values())
    block = weights + size * (vectors + adapters)
    end = size * padded(c.vocab_size, D)
    again = L - 1 if args.reshard_after_forward else 0  # in the backward; the last block stays
    ends = 1 if c.tie_word_embeddings else 2
    gathered = M * ((L + again) * block + ends * end + size * D)
    trained = L * (sum(padded(*shape) for shape in linears.values()) + vectors) if full else L * adapters
    trained += (ends * padded(c.vocab_size, D) + D) * full
    late = trained * 4 <= train.LATE
    exchanged = 2 * q + 2 * lm.shared_kv_heads(c.num_key_value_heads, args.sequence_parallel) * c.head_dim
    times = 3 if args.activation_checkpointing else 2  # forward, backward, and the forward again
    S, replicas = args.sequence_parallel, args.replicas if args.fsdp2 else world
    return {
        "weights gathered": received("all_gather", gathered, shards),
        "gradients scattered": received("reduce_scatter", reduced * trained * (1 if late else M), shards),
        "gradients between replicas": received("all_reduce", reduced * trained / shards, replicas),
        "rows exchanged": received("all_to_all", M * L * times * tokens * size * exchanged, S),
    }


def counted(case):
    """train.py as rank 0 of `world`, the third step -> ({kind: bytes received}, the formula's)."""
    flags, world = case
    from conftest import SHAPE, start_fake_group

    seen = {}

    def count(name, kind):
        call = getattr(dist, name, None)

        def counting(*args, **kwargs):
            n_bytes = max(x.nbytes for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
            what = kind if name != "all_reduce" or n_bytes > 64 else "everything else"  # losses, norms, flags
            seen[what] = seen.get(what, 0) + received(name, n_bytes, (kwargs.get("group") or dist.group.WORLD).size())
            return call(*args, **kwargs)

        setattr(dist, name, counting)

    def init_processes(distributed, timeout):
        start_fake_group(world)
        for names, kind in (("all_gather_single all_gather_into_tensor", "weights gathered"),
                            ("reduce_scatter_single reduce_scatter_tensor", "gradients scattered"),
                            ("all_reduce", "gradients between replicas"), ("all_to_all_single", "rows exchanged")):
            for name in names.split():  # torch 2.13 calls other ones than 2.11
                count(name, kind)
        return torch.device("cpu"), 0, world, None

    def start_step(self):
        start(self)
        seen.clear()  # the last step's stays

    def export(*_):
        raise KeyboardInterrupt

    start = train.Log.start_step
    train.init_processes, train.Log.start_step, train.export = init_processes, start_step, export
    args = train.parse_args([*FIXED.split(), *flags.split()])
    with tempfile.TemporaryDirectory() as folder:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(train.TINY / file, folder)
        Path(folder, "config.json").write_text(json.dumps(SHAPE | SIZES))
        Path(folder, "data.txt").write_text(" the" * (3 * args.batch_size * args.grad_accum * world * args.seq_len))
        with open(Path(folder, "log"), "w") as log, contextlib.redirect_stdout(log), contextlib.suppress(KeyboardInterrupt):
            train.main([*FIXED.split(), *flags.split(), "--model", folder, "--data", f"{folder}/data.txt", "--out",
                        f"{folder}/out"])
    config = lm.parse_config(SHAPE | SIZES)
    return seen, formula(args, config, world, train.tokens_of(args, args.seq_len))


SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2}
FIXED = "--random_init --precision mixed --seq_len 64 --steps 3 --sample= --save_every 0 --log_every 3"
TRAFFIC = [  # flags, ranks
    ("--fsdp2", 8), ("--fsdp2 --precision fp32 --grad_accum 3", 8), ("--fsdp2 --precision bf16", 8),
    ("--fsdp2 --no-reshard_after_forward", 8), ("--fsdp2 --no-shard_embeddings --grad_accum 2", 8), ("--fsdp2 --lora", 8),
    ("--fsdp2 --qlora", 8), ("--fsdp2 --replicas 2", 8), ("--fsdp2 --replicas 4 --grad_accum 2", 8),
    ("--fsdp2 --sequence_parallel 4", 8), ("--fsdp2 --sequence_parallel 8 --qlora --no-activation_checkpointing", 8),
    ("--fsdp2 --sequence_parallel 2 --replicas 2 --grad_accum 2", 8), ("--lora --sequence_parallel 2", 2),
]


def traffic(args):
    rows = []
    for flags, world in TRAFFIC:
        ((found, ideal),) = run_cases(counted, [(flags, world)])
        cells = [f"{found.get(kind, 0) / 1e6:,.2f} ({found.get(kind, 0) / ideal[kind] - 1:+.2%})" if ideal.get(kind) else
                 f"{found.get(kind, 0) / 1e6:,.2f}" for kind in KINDS]
        rows.append([flags, world, *cells])
    table("MB that a rank receives in a step, and how far that is from the formula; a small model, rows of 64 tokens",
          ["flags", "ranks", *KINDS], rows)


# ---------------------------------------------------------------- on paper

PEAK, SHARE = 989e12, 0.45  # of an H100, and the part of it that products reach where nothing waits; assumed
NVLINK, NODE = 360e9, 8  # bytes a second that a ring inside a node moves past each GPU; GPUs of a node
NETWORKS = {"8 x 400 Gb/s": 320e9, "1 x 100 Gb/s": 10e9}  # of a node, all its GPUs together


def paper(args):
    """A collective over several nodes runs at the pace of the network, which all GPUs of a node share: a ring enters each
    node once for each of its links. Gathering and reducing run beside the products of a micro-batch, averaging between
    replicas beside those of the last, and what takes longer sets the pace; exchanging rows adds to it."""
    for network, speed in NETWORKS.items():
        rows = []
        for name, flags, seq_len in PAPER:
            for world in (8, 16, 64, 256):
                cells = [f"{name} {flags}".strip() + f", {seq_len:,} tokens", world]
                for replicas in dict.fromkeys((1, world // NODE)):
                    argv = ["--model", name, "--seq_len", str(seq_len), "--fsdp2", *flags.split(), "--replicas", str(replicas)]
                    given, config = train.parse_args(["--dry_run", *argv]), lm.parse_config(lm.preset_config(name))
                    given.precision = given.precision or "mixed"
                    n_adapter = n_adapters(given, config) if given.lora or given.qlora else None
                    n = seq_len // given.sequence_parallel
                    flops = given.grad_accum * train.step_flops(config, n, n, n * seq_len, n_adapter)
                    products = flops * (8 / 6 if n_adapter is None else 6 / 4) / (PEAK * SHARE)  # the blocks' forward again
                    moved = formula(given, config, world, n)
                    link = NVLINK if world // replicas <= NODE else min(NVLINK, speed)
                    between = moved["gradients between replicas"] / (speed / NODE)  # as many rings at once
                    waiting = moved["rows exchanged"] / NVLINK
                    inside = (moved["weights gathered"] + moved["gradients scattered"]) / link
                    last = 1 / given.grad_accum  # the micro-batch in which replicas average
                    step = max(products, inside) * (1 - last) + max(products * last, inside * last + between) + waiting
                    gib = planned(argv, world)[0] / 2**30 + 1
                    gb, seconds = sum(moved.values()) / 1e9, inside + between + waiting
                    cells.append(f"{gb:,.0f} GB, {seconds:.2f} s, {products / step:.0%}" + ", does not fit" * (gib > 79))
                rows.append(cells + ["same"] * (len(cells) < 4) + [f"{products:.2f} s"])
        table(f"network of a node: {network}; bytes that a GPU receives in a step, their time, the pace left of the products'",
              ["", "GPUs", "--fsdp2", "--fsdp2, a replica a node", "products"], rows)


PAPER = [("llama-3.1-8b", "", 8192), ("llama-3.1-8b", "--grad_accum 32", 8192), ("llama-3.1-70b", "--precision bf16", 8192),
         ("llama-3.1-70b", "--qlora", 8192), ("llama-3.1-8b", "--sequence_parallel 8", 131072)]


def n_adapters(given, c):
    with torch.device("meta"):
        model = lm.Transformer(c)
        lm.add_lora_(model, given.lora_rank, given.lora_alpha, 0.0, given.lora_targets)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


# ---------------------------------------------------------------- plans

MEMORY = [("llama-3.1-70b", "--fsdp2 --precision bf16", 4096), ("llama-3.1-70b", "--fsdp2", 4096),
          ("llama-3.1-70b", "--fsdp2 --qlora", 4096), ("qwen2.5-32b", "--fsdp2", 4096),
          ("qwen2.5-32b", "--fsdp2 --qlora", 4096)]
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def memory(args):
    rows = []
    for name, flags, seq_len in MEMORY:
        peaks = [planned(["--model", name, "--seq_len", str(seq_len), *flags.split()], world)[0] for world in RANKS]
        rows.append([name, flags, *(f"{peak / 2**30 + 1:.1f}" for peak in peaks)])
    table("planned GiB of a rank, rows of 4,096 tokens, 1 GiB for CUDA and NCCL included",
          ["model", "flags", *map(str, RANKS)], rows)


QLORA = "--qlora --lora_rank 32 --offload activations --tiled_mlp 4096"
FULL = "--offload activations --tiled_mlp 4096 --precision bf16 --optim adamw8bit --optim_in_backward"
CONTEXTS = [  # name, flags, further ones with several ranks, others' figures: (GiB, ranks): tokens
    ("8B QLoRA, rank 32", QLORA, "--fsdp2", {(24, 1): "Unsloth 78k", (48, 1): "Unsloth 192k", (80, 1): "Unsloth 343k"}),
    ("8B, all weights, on the GPU", FULL, "--fsdp2", {}),
    ("8B, all weights, on the host", FULL.replace("activations", "activations params").replace(" --optim_in_backward", "")
     + " --fsdp2", "", {(80, 1): "ALST 500k", (80, 8): "ALST 3.7M"}),
]
HOST = 1.9e12  # bytes of the host of 8 GPUs, as ALST's; a rank gets an eighth of them


def longest(flags, world, gib):
    """(tokens of the longest row, what stops it): a multiple of 1,024 that the plan fits into a card of `gib`."""
    def fits(n):
        peak, host, _ = planned([*flags, "--seq_len", str(n * 1024)], world)
        return peak + 2**30 <= gib * 2**30 * 0.99, host <= HOST / 8

    low, high = 0, 1
    while all(fits(high)):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if all(fits(middle)) else (low, middle)
    return low * 1024, "card" if not fits(high)[0] else "host"


def contexts(args):
    rows = []
    for name, flags, sharded, others in CONTEXTS:
        for gib in (24, 48, 80):
            cells = []
            for world in (1, 2, 4, 8):
                more = [*sharded.split(), "--sequence_parallel", str(world)] if world > 1 else []
                n, stop = longest(["--model", "llama-3.1-8b", *flags.split(), *more], world, gib)
                cells.append(f"{n / 1000:,.0f}k{' (host)' * (stop == 'host')}" + (f"; {others[gib, world]}" if
                             (gib, world) in others else "") if n else "-")
            rows.append([name, gib, *cells])
        print(f"{name}: {flags}" + f"; with several also {sharded}" * bool(sharded))
    table(f"tokens of the longest row, Llama-3.1-8B, --sequence_parallel over all ranks, planned; host memory of a rank: "
          f"{HOST / 8 / 2**30:.0f} GiB",
          ["", "GB", *(f"{world} GPU" + "s" * (world > 1) for world in (1, 2, 4, 8))], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in (("traffic", traffic), ("paper", paper), ("memory", memory), ("contexts", contexts)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
