"""What fits on the cards that people have: the largest model of each family in QLoRA, 16-bit LoRA and full fine-tuning,
as the memory plan says. Planned, not measured.

    python tests/by_card.py                # a table in Markdown, with the command of each cell behind it
    python tests/by_card.py --rows         # the longest rows of 8B, 32B and 70B on 24, 48 and 80 GB
    python tests/by_card.py --choice       # what the plan chooses for 8B, 27B, 32B and 70B with --offload params
    python tests/by_card.py --copies       # on paper: the time of a block's copy beside that of its products

A model fits if a step of one row needs at most 90 % of the card, which is what --activation_checkpointing auto fills.
Flags are tried in the order of FLAGS, the fastest first; host memory is what the plan has on all ranks together.
"""

import argparse
import contextlib
import io
from typing import NamedTuple

import conftest  # noqa: F401  (puts train.py on the path)

import data
import model as lm
import train


class Card(NamedTuple):
    name: str
    gib: float  # that CUDA reports
    world: int = 1


# A card's own firmware and ECC take 2 to 4 % of its name.
CARDS = [
    Card("4 GB", 3.8),
    Card("6 GB", 5.8),
    Card("8 GB", 7.7),
    Card("12 GB", 11.6),
    Card("16 GB", 15.6),
    Card("24 GB", 23.6),
    Card("2 x 24 GB", 23.6, 2),
    Card("48 GB", 47.4),
    Card("2 x 48 GB", 47.4, 2),
    Card("80 GB", 79.2),
]
# from the largest on
FAMILIES = {
    "Llama": ["llama-3.1-405b", "llama-3.1-70b", "llama-2-13b", "llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b"],
    "Qwen3.5": ["qwen3.5-27b", "qwen3.5-9b", "qwen3.5-4b", "qwen3.5-2b", "qwen3.5-0.8b"],
    "Qwen3": ["qwen3-32b", "qwen3-14b", "qwen3-8b", "qwen3-4b", "qwen3-1.7b", "qwen3-0.6b"],
    "Muse Glimmer": ["muse-glimmer-30b"],
}
FULL = "--optim adamw8bit --precision bf16 --stochastic_rounding"
# Flags of each method, the fastest first. --offload without a value has activations, too, and with --fsdp2 weights.
FLAGS = {
    "QLoRA": ["--qlora", "--qlora --offload activations", "--qlora --fsdp2 --offload"],
    "LoRA": ["--lora", "--lora --offload activations", "--lora --fsdp2 --offload"],
    "full": ["", "--optim adamw8bit", FULL, f"{FULL} --optim_in_backward", f"{FULL} --fsdp2 --offload"],
}
HOST_GIB = 256  # a large desktop; what needs more is no use to most


class Fit(NamedTuple):
    model: str
    flags: str
    gpu_gib: float
    host_gib: float
    n_resident: int | None  # of the blocks; None if no weights are streamed
    n_layers: int


def run_of(model, flags, world, seq_len):
    """-> train.RunSpec of rows of so many tokens, without weights."""
    argv = ["--dry_run", "--model", model, "--seq_len", str(seq_len), "--world", str(world), *flags.split()]
    args = train.parse_args(argv)
    with contextlib.redirect_stdout(io.StringIO()):
        config = train.open_config(args, world, device=None, random_init=True).config
    return train.RunSpec(args, config, world, seq_len)


def planned(model, flags, card, seq_len):
    """-> Fit of a model, with all blocks recomputed, or None if that is more than the card or a host has."""
    if card.world > 1 and "--fsdp2" not in flags:
        flags += " --fsdp2"
    run = run_of(model, flags, card.world, seq_len)
    room = 0.9 * card.gib * train.GIB
    if train.planned_bytes(run, train.blocks_as_asked(run)) > room:
        return None
    # what is left goes to --activation_checkpointing and --resident_blocks
    blocks = train.choose_blocks(run, card.gib * train.GIB)
    moments, host = train.plan(run, blocks)
    host_gib = card.world * sum(host.values()) / train.GIB
    if host_gib > HOST_GIB:
        return None
    gpu_gib = (train.peak_of(moments)[1] + train.OVERHEAD) / train.GIB
    n_resident = blocks.count("resident") if train.offloads_frozen(run.args) else None
    return Fit(model, flags.strip(), gpu_gib, host_gib, n_resident, run.config.num_hidden_layers)


def largest(models, method, card, seq_len):
    """-> Fit of the largest of these models, with the fastest flags that make it fit, or None."""
    for model in models:
        for flags in FLAGS[method]:
            fit = planned(model, flags, card, seq_len)
            if fit:
                return fit
    return None


def cell_of(fit):
    if fit is None:
        return "-"
    return fit.model.split("-")[-1].upper()


def by_card(seq_len, cards):
    print(f"Rows of {seq_len:,} tokens, planned: the largest in {', '.join(FLAGS)}; the most host memory of these.\n")
    print("| card | " + " | ".join(FAMILIES) + " | host GiB |")
    print("|---" * (len(FAMILIES) + 2) + "|")
    commands = []
    for card in cards:
        cells = []
        host_gib = 0
        for models in FAMILIES.values():
            fits = {method: largest(models, method, card, seq_len) for method in FLAGS}
            cells.append(", ".join(map(cell_of, fits.values())))
            for method, fit in fits.items():
                if fit:
                    host_gib = max(host_gib, fit.host_gib)
                    commands.append((card, method, fit))
        print(f"| {card.name} | " + " | ".join(cells) + f" | {host_gib:.0f} |", flush=True)
    print("\n| card | model | GPU GiB | host GiB | blocks resident | command |\n|---|---|---|---|---|---|")
    for card, method, fit in commands:
        start = "python" if card.world == 1 else f"torchrun --nproc_per_node {card.world}"
        name = data.PRESETS[fit.model]["_name_or_path"]
        resident = "" if fit.n_resident is None else f"{fit.n_resident} of {fit.n_layers}"
        print(f"| {card.name} | {fit.model}, {method} | {fit.gpu_gib:.1f} | {fit.host_gib:.0f} | {resident} | "
              f"`{start} train.py --model {name} --seq_len {seq_len} {fit.flags}` |")


def choice(seq_len, cards):
    """What --offload params keeps on each card."""
    print("Blocks with resident weights, GiB of each GPU + of the host.\n")
    print("| model | method | " + " | ".join(card.name for card in cards) + " |")
    print("|---" * (2 + len(cards)) + "|")
    for model in ("llama-3.1-8b", "qwen3.5-27b", "qwen3-32b", "llama-3.1-70b"):
        for method in ("--qlora", "--lora"):
            cells = []
            for card in cards:
                flags = f"{method} --fsdp2 --offload"
                fit = planned(model, flags, card, seq_len)
                cell = "-"
                if fit:
                    cell = f"{fit.n_resident} of {fit.n_layers}, {fit.gpu_gib:.1f} + {fit.host_gib:.0f}"
                cells.append(cell)
            print(f"| {model} | {method} | " + " | ".join(cells) + " |", flush=True)


# ---------------------------------------------------------------- the longest rows

LONG = [  # model, flags
    ("llama-3.1-8b", "--qlora --offload activations --tiled_mlp 4096"),
    ("llama-3.1-8b", "--qlora --fsdp2 --offload --tiled_mlp 4096 --ce_chunk 256"),
    ("qwen2.5-32b", "--qlora --fsdp2 --offload --tiled_mlp 4096 --ce_chunk 256"),
    ("llama-3.1-70b", "--qlora --fsdp2 --offload --tiled_mlp 4096 --ce_chunk 256"),
]


def planned_row(model, flags, seq_len):
    """-> (bytes on the GPU, bytes in host memory) of a step of one row."""
    run = run_of(model, flags, 1, seq_len)
    moments, host = train.plan(run, train.blocks_as_asked(run))
    return train.peak_of(moments)[1] + train.OVERHEAD, sum(host.values())


def longest_rows():
    """Bytes are a line in the tokens of a row: two plans draw it."""
    print("| model, flags | bytes a token | 24 GB: tokens, GiB of host memory | 48 GB | 80 GB |\n|---|---|---|---|---|")
    few, many = 1 << 16, 1 << 17  # tokens: in shorter rows attention runs in fewer groups
    for model, flags in LONG:
        needs = [planned_row(model, flags, n) for n in (few, many)]
        slope, host_slope = ((b - a) / (many - few) for a, b in zip(*needs))
        gpu_bytes, host_bytes = needs[1]
        cells = []
        for card in CARDS:
            if card.name in ("24 GB", "48 GB", "80 GB"):
                n_tokens = int(many + (card.gib * train.GIB - gpu_bytes) / slope) // 1024 * 1024
                host_gib = (host_bytes + (n_tokens - many) * host_slope) / train.GIB
                cells.append(f"{n_tokens:,}, {host_gib:.0f}")
        print(f"| {model} {flags} | {slope:,.0f} | " + " | ".join(cells) + " |", flush=True)


# ---------------------------------------------------------------- on paper


class Speed(NamedTuple):
    tflops: float  # dense bf16 products that add up in float32
    gb_per_s: float  # host to device, of PCIe 4 or 5 x16


SPEEDS = {
    "RTX 3090": Speed(71, 25),
    "RTX 4090": Speed(165, 25),
    "RTX 5090": Speed(209, 55),
    "H100": Speed(989, 55),
}
MFU = 0.45  # assumed: 40 to 50 %
NF4_BYTES = 4.14 / 8


def copies():
    """A copy hides if it takes no longer than the products of the passes between two copies."""
    config = lm.parse_config(data.PRESETS["llama-3.1-8b"])
    n_weights = lm.mixer_weights(config, "full_attention") + 3 * config.hidden_size * config.intermediate_size
    print(f"A block of Llama-3.1-8B, {n_weights / 1e6:.0f} million weights, at {MFU:.0%} MFU, on paper. Rows of so "
          "many tokens: ms of the forward's products without attention, and how often the copy fits into them.\n")
    print("| card | weights | copy ms | 4,096 | 8,192 | 32,768 | hidden from tokens |\n|---|---|---|---|---|---|---|")
    for card, speed in SPEEDS.items():
        flops = MFU * 1e12 * speed.tflops
        for name, size in (("NF4", NF4_BYTES), ("bf16", 2)):
            copy_s = size * n_weights / (1e9 * speed.gb_per_s)
            cells = []
            for n_tokens in (4096, 8192, 32768):
                forward_s = 2 * n_weights * n_tokens / flops
                cells.append(f"{1e3 * forward_s:.1f}, {forward_s / copy_s:.1f}x")
            n_hidden = copy_s * flops / (2 * n_weights)
            print(f"| {card} | {name} | {1e3 * copy_s:.1f} | " + " | ".join(cells) + f" | {n_hidden:,.0f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--choice", action="store_true", help="what the plan chooses with --offload params")
    parser.add_argument("--rows", action="store_true", help="the longest rows, whole cards, all blocks recomputed")
    parser.add_argument("--copies", action="store_true", help="copies beside products, on paper")
    parser.add_argument("--seq_len", type=int, default=4096)
    parser.add_argument("--card", help="one of the cards by its name (default: all)")
    args = parser.parse_args()
    cards = [card for card in CARDS if args.card in (None, card.name)]
    if args.copies:
        copies()
    elif args.rows:
        longest_rows()
    elif args.choice:
        choice(args.seq_len, cards)
    else:
        by_card(args.seq_len, cards)


if __name__ == "__main__":
    main()
