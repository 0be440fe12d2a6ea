"""Past one card: what a step sends, and what that costs on paper. Run by hand:

    python tests/bench_scale.py traffic    # bytes that the collectives of a step move, beside the formula; a minute
    python tests/bench_scale.py paper      # 8 to 256 GPUs: that formula's bytes over assumed links, beside the products

None needs a GPU. `traffic` runs train.py as rank 0 of N on a small model in torch's fake process group, which moves
nothing; the sizes are those that the collectives are called with. `paper` only calculates.
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

# what a rank receives
GATHERED = "weights gathered"
SCATTERED = "gradients scattered"
BETWEEN_REPLICAS = "gradients between replicas"
EXCHANGED = "rows exchanged"
OTHER = "everything else"
KINDS = GATHERED, SCATTERED, BETWEEN_REPLICAS, EXCHANGED, OTHER

CALLS = {
    "all_gather_single": GATHERED, "all_gather_into_tensor": GATHERED,  # the second ones are torch 2.11's
    "reduce_scatter_single": SCATTERED, "reduce_scatter_tensor": SCATTERED,
    "all_reduce": BETWEEN_REPLICAS,
    "all_to_all_single": EXCHANGED,
}


# ---------------------------------------------------------------- bytes of a step


def received(call, n_bytes, n):
    """Bytes that a rank of n receives in a collective whose larger side has `n_bytes`; a ring moves just those."""
    n_rounds = 2 if call == "all_reduce" else 1  # a scatter, and a gather
    return n_rounds * n_bytes * (n - 1) / n


def formula(args, c, world, tokens):
    """{kind: bytes that a rank receives in a step}. tokens: of a micro-batch of this rank."""
    if args.fsdp2:
        shards = world // args.replicas
        replicas = args.replicas
    else:
        shards = 1
        replicas = world
    size = 4 if args.precision == "fp32" else 2  # bytes of a number that is gathered
    reduced_size = 2 if args.precision == "bf16" else 4
    L = c.num_hidden_layers
    M = args.grad_accum
    model = lm.on_meta(dataclasses.replace(c, num_hidden_layers=1), args)
    block = list(model.model.layers[0].parameters())
    ends = [p for name, p in model.named_parameters() if ".layers." not in name]

    def numbers(params):  # every rank holds as many rows as the first
        return sum(-(-len(p) // shards) * shards * p[0].numel() for p in params)

    def sent(params):  # NF4 travels as it is
        codes = [p for p in params if p.dtype is torch.uint8]
        return size * (numbers(params) - numbers(codes)) + numbers(codes)

    def trained(params):
        return numbers(p for p in params if p.requires_grad)

    n_gathers = L
    if args.reshard_after_forward:
        n_gathers = 2 * L - 1  # again in the backward; the last block stays gathered
    gathered = M * (n_gathers * sent(block) + sent(ends))
    reduced = reduced_size * (L * trained(block) + trained(ends))
    n_reduces = 1 if args.lora else M  # adapters are reduced once a step
    # queries and outputs, and keys and values, whose heads are copied until the group divides them
    q_size = c.num_attention_heads * c.head_dim
    kv_size = math.lcm(c.num_key_value_heads, args.sequence_parallel) * c.head_dim
    n_passes = 3 if args.activation_checkpointing else 2  # forward, backward, and the forward again
    exchanged = M * L * n_passes * tokens * size * (2 * q_size + 2 * kv_size)
    return {
        GATHERED: received("all_gather", gathered, shards),
        SCATTERED: received("reduce_scatter", n_reduces * reduced, shards),
        BETWEEN_REPLICAS: received("all_reduce", reduced / shards, replicas),
        EXCHANGED: received("all_to_all", exchanged, args.sequence_parallel),
    }


def count_calls(seen):
    """Adds what each collective moves from here on to `seen`, {kind: bytes}."""
    def count(name, kind):
        call = getattr(dist, name, None)

        def counting(*args, **kwargs):
            n_bytes = max(x.nbytes for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
            group = kwargs.get("group") or dist.group.WORLD
            is_small = name == "all_reduce" and n_bytes <= 64  # losses, norms, signals
            what = OTHER if is_small else kind
            seen[what] = seen.get(what, 0) + received(name, n_bytes, group.size())
            return call(*args, **kwargs)

        setattr(dist, name, counting)

    for name, kind in CALLS.items():
        count(name, kind)


def counted(case):
    """train.py as rank 0 of `world`, the third step -> ({kind: bytes received}, the formula's)."""
    flags, world = case
    import conftest

    seen = {}
    steps = []
    start_fake_group = conftest.start_fake_group

    def start_and_count(world):
        start_fake_group(world)
        count_calls(seen)

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
        n_words = 4 * args.batch_size * args.grad_accum * world * args.seq_len  # of four steps
        Path(folder, "data.txt").write_text(" the" * n_words)
        run_steps([*argv, "--model", folder, "--data", f"{folder}/data.txt", "--out", f"{folder}/out"], 3, tick)
    n_tokens = -(-args.batch_size * args.seq_len // args.sequence_parallel)
    return steps[-1], formula(args, lm.parse_config(config), world, n_tokens)


TRAFFIC = [  # flags, ranks
    ("--fsdp2", 8),
    ("--fsdp2 --precision fp32 --grad_accum 3", 8),
    ("--fsdp2 --precision bf16", 8),
    ("--fsdp2 --no-reshard_after_forward", 8),
    ("--fsdp2 --no-shard_embeddings --grad_accum 2", 8),
    ("--fsdp2 --lora", 8),
    ("--fsdp2 --qlora", 8),
    ("--fsdp2 --replicas 2", 8),
    ("--fsdp2 --sequence_parallel 4", 8),
    ("--fsdp2 --replicas 4 --grad_accum 2", 8),
    ("--fsdp2 --sequence_parallel 8 --qlora --no-activation_checkpointing", 8),
    ("--fsdp2 --sequence_parallel 2 --replicas 2 --grad_accum 2", 8),
    ("--lora --sequence_parallel 2", 2),
]


def traffic():
    rows = []
    for flags, world in TRAFFIC:
        ((found, ideal),) = in_processes(counted, [(flags, world)])
        cells = []
        for kind in KINDS:
            n_bytes = found.get(kind, 0)
            cell = f"{n_bytes / 1e6:,.2f}"
            if ideal.get(kind):
                cell += f" ({n_bytes / ideal[kind] - 1:+.2%})"
            cells.append(cell)
        rows.append((flags, world, *cells))
    table("MB that a rank receives in a step, and how far that is from the formula; a small model, rows of 64 tokens",
          ["flags", "ranks", *KINDS], rows)


# ---------------------------------------------------------------- time on paper


FLOPS = 989e12  # of an H100
FRACTION = 0.45  # of them, which products reach where nothing waits; assumed
NVLINK = 360e9  # bytes a second that a ring inside a node moves past each GPU
NODE = 8  # GPUs
NETWORKS = {"8 x 400 Gb/s": 320e9, "1 x 100 Gb/s": 10e9}  # bytes a second of a node, all its GPUs together
PAPER = [  # model, flags, tokens of a row
    ("llama-3.1-8b", "", 8192),
    ("llama-3.1-8b", "--grad_accum 32", 8192),
    ("llama-3.1-70b", "--precision bf16", 8192),
    ("llama-3.1-70b", "--qlora", 8192),
    ("llama-3.1-8b", "--sequence_parallel 8", 131072),
]


def paper():
    """A collective over several nodes runs at the pace of the network, which all GPUs of a node share: a ring enters
    each node once for each of its links. Gathering and reducing run beside the products of a micro-batch, averaging
    between replicas beside those of the last; the slower one sets the pace. Exchanging rows adds to it."""
    for network, speed in NETWORKS.items():
        rows = []
        for name, flags, seq_len in PAPER:
            for world in (8, 16, 64, 256):
                what = f"{name}, {seq_len:,} tokens {flags}"
                one_replica, products_s = on_paper(name, flags, seq_len, world, 1, speed)
                a_replica_a_node = "same"
                if world > NODE:
                    a_replica_a_node, _ = on_paper(name, flags, seq_len, world, world // NODE, speed)
                rows.append((what, world, one_replica, a_replica_a_node, f"{products_s:.2f} s"))
        table(f"network of a node: {network}; bytes that a GPU receives in a step, their time, the pace left of the "
              "products'", ["", "GPUs", "--fsdp2", "--fsdp2, a replica a node", "products"], rows)


def on_paper(name, flags, seq_len, world, replicas, speed):
    """-> (a cell of the table, seconds of the products)."""
    argv = ["--model", name, "--seq_len", str(seq_len), "--fsdp2", *flags.split(), "--replicas", str(replicas)]
    args = train.parse_args(["--dry_run", *argv])
    config = lm.parse_config(data.PRESETS[name])
    args.precision = args.precision or "mixed"
    n = seq_len // args.sequence_parallel
    again = 6 / 4 if args.lora else 8 / 6  # the blocks' forward runs again
    flops = lm.step_flops(config, lm.Counts(n, n, n * seq_len), args.lora) * again
    products_s = args.grad_accum * flops / (FLOPS * FRACTION)
    moved = formula(args, config, world, n)
    link = NVLINK if world // replicas <= NODE else min(NVLINK, speed)
    inside_s = (moved[GATHERED] + moved[SCATTERED]) / link
    between_s = moved[BETWEEN_REPLICAS] / (speed / NODE)  # as many rings at once
    exchange_s = moved[EXCHANGED] / NVLINK
    last = 1 / args.grad_accum  # the micro-batch in which replicas average
    first_s = max(products_s, inside_s) * (1 - last)  # of the micro-batches before it
    last_s = max(products_s * last, inside_s * last + between_s)
    pace = products_s / (first_s + last_s + exchange_s)
    cell = f"{sum(moved.values()) / 1e9:,.0f} GB, {inside_s + between_s + exchange_s:.2f} s, {pace:.0%}"
    peak, _ = planned(argv, world)
    if peak / 2**30 + 1 > 79:
        cell += ", does not fit"
    return cell, products_s


def main():
    commands = {"traffic": traffic, "paper": paper}
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("command", choices=commands)
    commands[parser.parse_args().command]()


if __name__ == "__main__":
    main()
