"""Past one card: what a step sends, what that costs on paper, the longest rows. Run by hand:

    python tests/bench_scale.py traffic    # bytes that the collectives of a step move, beside the formula; a minute
    python tests/bench_scale.py paper      # 8 to 256 GPUs: that formula's bytes over assumed links, beside the products
    python tests/bench_scale.py contexts   # the longest row that the plan fits into cards of 24, 48 and 80 GB

None needs a GPU. `traffic` runs train.py as rank 0 of N on a small model in torch's fake process group, which moves
nothing; the sizes are those that the collectives are called with. The others only calculate.
"""

import argparse
import dataclasses
import math
import tempfile
from pathlib import Path

from bench_harness import be_rank_0, in_processes, run_steps, table, write_model
from bench_memory import planned

import torch
import torch.distributed as dist

import model as lm
import data
import train

KINDS = ("weights gathered", "gradients scattered", "gradients between replicas", "rows exchanged", "everything else")

CALLS = {"all_gather_single": KINDS[0], "all_gather_into_tensor": KINDS[0],  # the second ones are torch 2.11's
         "reduce_scatter_single": KINDS[1], "reduce_scatter_tensor": KINDS[1], "all_reduce": KINDS[2],
         "all_to_all_single": KINDS[3]}


def received(kind, n_bytes, n):
    """Bytes that a rank of n receives in a collective whose larger side has `n_bytes`; a ring moves just those."""
    return (2 if kind == "all_reduce" else 1) * n_bytes * (n - 1) / n


def formula(args, c, world, tokens):
    """{kind: bytes that a rank receives in a step}. tokens: of a micro-batch of this rank."""
    shards, replicas, M = 1, world, args.grad_accum
    if args.fsdp2:
        shards, replicas = world // args.replicas, args.replicas
    size, reduced = 4 if args.precision == "fp32" else 2, 2 if args.precision == "bf16" else 4
    q, L = c.num_attention_heads * c.head_dim, c.num_hidden_layers
    model = lm.on_meta(dataclasses.replace(c, num_hidden_layers=1), args)
    block = list(model.model.layers[0].parameters())
    ends = [p for name, p in model.named_parameters() if ".layers." not in name]

    def numbers(params):  # every rank holds as many rows as the first
        return sum(-(-len(p) // shards) * shards * p[0].numel() for p in params)

    def sent(params):  # NF4 travels as it is
        codes = [p for p in params if p.dtype is torch.uint8]
        return size * (numbers(params) - numbers(codes)) + numbers(codes)

    trained = L * numbers(p for p in block if p.requires_grad) + numbers(p for p in ends if p.requires_grad)
    n_gathers = 2 * L - 1 if args.reshard_after_forward else L  # again in the backward; the last block stays gathered
    n_reduces = 1 if args.lora else M  # adapters are reduced once a step
    heads_bytes = 2 * q + 2 * math.lcm(c.num_key_value_heads, args.sequence_parallel) * c.head_dim  # copied
    n_passes = 3 if args.activation_checkpointing else 2  # forward, backward, and the forward again
    exchanged = M * L * n_passes * tokens * size * heads_bytes
    return dict(zip(KINDS, (
        received("all_gather", M * (n_gathers * sent(block) + sent(ends)), shards),
        received("reduce_scatter", reduced * trained * n_reduces, shards),
        received("all_reduce", reduced * trained / shards, replicas),
        received("all_to_all", exchanged, args.sequence_parallel))))


def counted(case):
    """train.py as rank 0 of `world`, the third step -> ({kind: bytes received}, the formula's)."""
    flags, world = case
    import conftest

    seen, steps = {}, []

    def count(name, kind):
        call = getattr(dist, name, None)

        def counting(*args, **kwargs):
            n_bytes = max(x.nbytes for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
            what = kind if name != "all_reduce" or n_bytes > 64 else KINDS[4]  # losses, norms, signals
            seen[what] = seen.get(what, 0) + received(name, n_bytes, (kwargs.get("group") or dist.group.WORLD).size())
            return call(*args, **kwargs)

        setattr(dist, name, counting)

    start_fake_group = conftest.start_fake_group

    def start_and_count(world):
        start_fake_group(world)
        for name, kind in CALLS.items():
            count(name, kind)

    def tick():
        steps.append({**seen})
        seen.clear()

    conftest.start_fake_group = start_and_count
    be_rank_0(world)
    config = conftest.SHAPE | {"num_attention_heads": 8, "num_key_value_heads": 2}
    argv = ["--precision", "mixed", "--seq_len", "64", *flags.split()]
    args = train.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), config)
        Path(folder, "data.txt").write_text(" the" * (4 * args.batch_size * args.grad_accum * world * args.seq_len))
        run_steps([*argv, "--model", folder, "--data", f"{folder}/data.txt", "--out", f"{folder}/out"], 3, tick)
    n_tokens = -(-args.batch_size * args.seq_len // args.sequence_parallel)
    return steps[-1], formula(args, lm.parse_config(config), world, n_tokens)


TRAFFIC = [  # flags, ranks
    ("--fsdp2", 8), ("--fsdp2 --precision fp32 --grad_accum 3", 8), ("--fsdp2 --precision bf16", 8),
    ("--fsdp2 --no-reshard_after_forward", 8), ("--fsdp2 --no-shard_embeddings --grad_accum 2", 8),
    ("--fsdp2 --lora", 8), ("--fsdp2 --qlora", 8), ("--fsdp2 --replicas 2", 8), ("--fsdp2 --sequence_parallel 4", 8),
    ("--fsdp2 --replicas 4 --grad_accum 2", 8),
    ("--fsdp2 --sequence_parallel 8 --qlora --no-activation_checkpointing", 8),
    ("--fsdp2 --sequence_parallel 2 --replicas 2 --grad_accum 2", 8), ("--lora --sequence_parallel 2", 2),
]


def traffic():
    rows = []
    for flags, world in TRAFFIC:
        ((found, ideal),) = in_processes(counted, [(flags, world)])
        cells = [f"{found.get(kind, 0) / 1e6:,.2f}" for kind in KINDS]
        for i, kind in enumerate(KINDS):
            if ideal.get(kind):
                cells[i] += f" ({found.get(kind, 0) / ideal[kind] - 1:+.2%})"
        rows.append((flags, world, *cells))
    table("MB that a rank receives in a step, and how far that is from the formula; a small model, rows of 64 tokens",
          ["flags", "ranks", *KINDS], rows)


FLOPS, FRACTION = 989e12, 0.45  # of an H100, and the part of it that products reach where nothing waits; assumed
NVLINK, NODE = 360e9, 8  # bytes a second that a ring inside a node moves past each GPU; GPUs of a node
NETWORKS = {"8 x 400 Gb/s": 320e9, "1 x 100 Gb/s": 10e9}  # bytes a second of a node, all its GPUs together
PAPER = [("llama-3.1-8b", "", 8192), ("llama-3.1-8b", "--grad_accum 32", 8192),
         ("llama-3.1-70b", "--precision bf16", 8192), ("llama-3.1-70b", "--qlora", 8192),
         ("llama-3.1-8b", "--sequence_parallel 8", 131072)]


def paper():
    """A collective over several nodes runs at the pace of the network, which all GPUs of a node share: a ring enters
    each node once for each of its links. Gathering and reducing run beside the products of a micro-batch, averaging
    between replicas beside those of the last; the slower one sets the pace. Exchanging rows adds to it."""
    for network, speed in NETWORKS.items():
        rows = []
        for name, flags, seq_len in PAPER:
            for world in (8, 16, 64, 256):
                cell, products = on_paper(name, flags, seq_len, world, 1, speed)
                cells = [cell, "same"]
                if world > NODE:
                    cells[1], _ = on_paper(name, flags, seq_len, world, world // NODE, speed)
                rows.append((f"{name}, {seq_len:,} tokens {flags}", world, *cells, f"{products:.2f} s"))
        table(f"network of a node: {network}; bytes that a GPU receives in a step, their time, the pace left of the "
              "products'", ["", "GPUs", "--fsdp2", "--fsdp2, a replica a node", "products"], rows)


def on_paper(name, flags, seq_len, world, replicas, speed):
    """-> (a cell of the table, seconds of the products)."""
    argv = ["--model", name, "--seq_len", str(seq_len), "--fsdp2", *flags.split(), "--replicas", str(replicas)]
    args, config = train.parse_args(["--dry_run", *argv]), lm.parse_config(data.PRESETS[name])
    args.precision = args.precision or "mixed"
    n = seq_len // args.sequence_parallel
    again = 6 / 4 if args.lora else 8 / 6  # the blocks' forward runs again
    flops = lm.step_flops(config, lm.Counts(n, n, n * seq_len), args.lora) * again
    products = args.grad_accum * flops / (FLOPS * FRACTION)
    moved = formula(args, config, world, n)
    link = NVLINK if world // replicas <= NODE else min(NVLINK, speed)
    between = moved["gradients between replicas"] / (speed / NODE)  # as many rings at once
    exchanging = moved["rows exchanged"] / NVLINK
    inside = (moved["weights gathered"] + moved["gradients scattered"]) / link
    last = 1 / args.grad_accum  # the micro-batch in which replicas average
    step = max(products, inside) * (1 - last) + max(products * last, inside * last + between) + exchanging
    cell = f"{sum(moved.values()) / 1e9:,.0f} GB, {inside + between + exchanging:.2f} s, {products / step:.0%}"
    if planned(argv, world)[0] / 2**30 + 1 > 79:
        cell += ", does not fit"
    return cell, products


CONTEXTS = [  # name, flags, further ones with several ranks, others' figures: (GB, ranks): tokens
    ("8B QLoRA, rank 32", "--qlora --lora_rank 32 --offload activations --tiled_mlp 4096", "--fsdp2",
     {(24, 1): "Unsloth 78k", (48, 1): "Unsloth 192k", (80, 1): "Unsloth 343k"}),
    ("8B, all weights, on the GPU", "--offload activations --tiled_mlp 4096 --precision bf16 --optim adamw8bit "
     "--optim_in_backward", "--fsdp2", {}),
    ("8B, all weights, on the host", "--offload activations params --tiled_mlp 4096 --precision bf16 --optim adamw8bit "
     "--fsdp2", "", {(80, 1): "ALST 500k", (80, 8): "ALST 3.7M"}),
]
HOST = 1.9e12 / 8  # bytes: a rank's part of the host of 8 GPUs, as ALST's


def longest(flags, world, gib):
    """(tokens of the longest row, whether the host's memory ends first): a multiple of 1,024 that the plan fits into a
    card of `gib`."""
    def fits(n):
        peak, host = planned([*flags, "--seq_len", str(n * 1024)], world)
        return peak + 2**30 <= gib * 2**30 * 0.99, host <= HOST

    low, high = 0, 1
    while all(fits(high)):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if all(fits(middle)) else (low, middle)
    return low * 1024, fits(high)[0]


def contexts():
    rows, worlds = [], (1, 2, 4, 8)
    for name, flags, sharded, others in CONTEXTS:
        print(f"{name}: {flags}" + (f"; with several also {sharded}" if sharded else ""))
        for gib in (24, 48, 80):
            cells = []
            for world in worlds:
                more = [*sharded.split(), "--sequence_parallel", str(world)] if world > 1 else []
                n, host_ends = longest(["--model", "llama-3.1-8b", *flags.split(), *more], world, gib)
                cell = f"{n / 1000:,.0f}k" if n else "-"
                if n and host_ends:
                    cell += " (host)"
                if (gib, world) in others:
                    cell += f"; {others[gib, world]}"
                cells.append(cell)
            rows.append([name, gib, *cells])
    table("tokens of the longest row, Llama-3.1-8B, --sequence_parallel over all ranks, planned; host memory of a rank "
          f"{HOST / 2**30:.0f} GiB", ["", "GB", *(f"GPUs: {world}" for world in worlds)], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = {"traffic": traffic, "paper": paper, "contexts": contexts}
    parser.add_argument("command", choices=commands)
    commands[parser.parse_args().command]()
