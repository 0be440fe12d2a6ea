"""What the trainer's memory promises cost, as markdown tables. Run by hand; the last three print the memory plan, and
on a GPU what three steps take:

    python tests/bench_memory.py ce        # head and loss, 8,192 tokens x 128,256 words; 12 GiB, less with --words
    python tests/bench_memory.py load      # host memory of 4 ranks that load a model of 0.5 and 0.9 GB; 3 GiB
    python tests/bench_memory.py flags     # what the allocator counts without and with each memory flag, a small model
    python tests/bench_memory.py ladder    # Llama-3.2-3B beside torchtune's figures; Llama-3.1-8B as memory_ladder.svg
    python tests/bench_memory.py fsdp      # Llama-3.1-8B as rank 0 of 2, 4, 8, one FSDP2 technique after the other
    python tests/bench_memory.py targets   # what this project set out to fit: 8B at up to 342,000 tokens, 32B, 70B
"""

import argparse
import math
import tempfile
from pathlib import Path

import bench_harness as harness
import make_tiny
from bench_harness import GIB, MIB, table


def ce_case(case, tokens, V, D):
    """Forward and backward of head and loss -> (peak MiB, loss per token, norms of the gradients)."""
    import torch

    import data
    import model as lm

    trained, chunk = case
    torch.manual_seed(0)
    head = lm.LMHead(lm.parse_config(data.PRESETS["llama-2-7b"] | {"vocab_size": V, "hidden_size": D}))
    torch.nn.init.normal_(head.weight, std=D**-0.5)
    head.bfloat16().requires_grad_(trained)
    x_BTD = torch.randn(1, tokens, D, dtype=torch.bfloat16).requires_grad_()
    targets_BT, supervised_S = torch.randint(0, V, (1, tokens)), torch.arange(tokens)
    head.chunk = chunk
    # before anything is counted, kernels are loaded and threads started
    head(x_BTD[:, :2], targets_BT[:, :2], supervised_S[:2]).backward()
    head.weight.grad = x_BTD.grad = None
    with harness.peak_growth() as peak:
        loss_sum = head(x_BTD, targets_BT, supervised_S)
        (loss_sum / tokens).backward()
    norms = [p.grad.float().norm().item() for p in (x_BTD, head.weight) if p.requires_grad]
    return peak[0], loss_sum.item() / tokens, norms


def ce(tokens=8192, words=128256, D=512):
    """The peak of the loss: logits of all tokens at once, against chunks of them."""
    rows = []
    for trained, chunk in ((True, 0), (True, 1024), (False, 0), (False, 1024)):
        ((peak, loss, norms),) = harness.in_processes(ce_case, [(trained, chunk)], tokens, words, D)
        norms = [f"{n:.6f}" for n in norms] if trained else [f"{norms[0]:.6f}", "-"]
        head = "trained" if trained else "frozen"
        rows.append((head, chunk or "all at once", f"{peak:,.0f}", f"{loss:.5f}", *norms))
    table(f"Cross-entropy, forward and backward, {tokens:,} tokens x {words:,} words x {D} wide, bf16; float32 logits: "
          f"{tokens * words * 4 / MIB:,.0f} MiB",
          ("head", "tokens in a chunk", "peak MiB above weight and input", "loss", "norm of the input's gradient",
           "norm of the head's"), rows)


def load_rank(rank, folder, world, flags):
    """Loads the model as train.py does under --fsdp2 -> MiB of this rank: its shard, and the peak above it."""
    import torch
    import torch.distributed as dist

    import model as lm
    import data
    import train
    import nf4

    torch.set_num_threads(1)
    args, device = train.parse_args(["--fsdp2", *flags.split()]), torch.device("cpu")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{flags}", world), rank=rank, world_size=world)
    try:
        config, source = lm.parse_config(data.read_json(folder / "config.json")), data.WeightFiles(folder)
        model = lm.on_meta(config, args)
        train.shard_(model, args, device)
        model.to_empty(device=device)
        model.tie_()
        shard = [nf4.local(p)[0] for p in model.parameters()]
        for p in shard:
            p.detach().zero_()  # memory is resident once it is written to: the shard is in place before the peak counts
        dist.barrier()
        with harness.peak_growth() as peak:
            data.load_weights_(model, source, None, 0, device)
        dist.barrier()
        return sum(p.nbytes for p in shard) / MIB, peak[0]
    finally:
        dist.destroy_process_group()


def load(world=4):
    """Host memory of ranks that load a checkpoint together, above the parameters they keep."""
    import data

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for layers in (12, 24):
            model = Path(folder, str(layers))
            n_bytes = harness.write_model(model, data.PRESETS["llama-2-7b"] | {
                "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers, "num_attention_heads": 16,
                "num_key_value_heads": 16, "head_dim": 64})
            for given in ("--precision bf16", "--precision mixed --lora", "--precision mixed --qlora"):
                ranks = harness.in_processes(load_rank, range(world), model, world, given)
                cells = [f"{min(of):,.1f} to {max(of):,.1f}" for of in zip(*ranks)]
                rows.append((f"{n_bytes / MIB:,.0f}", given, *cells))
    table(f"Loading on {world} ranks with --fsdp2, MiB, least to most of a rank; mapped pages of the files included",
          ("checkpoint", "flags", "parameters kept", "peak above them"), rows)


SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 4096}
PAIRS = [  # flag, ranks, flags without it, flags with it
    ("--chunked_ce", 1, "--lora --tiled_mlp 256 --no-chunked_ce", "--lora --tiled_mlp 256"),
    *((f"--activation_checkpointing {n}", 1, "--no-activation_checkpointing", f"--activation_checkpointing {n}")
      for n in (2, 4, "all")),
    ("--offload activations", 1, "--lora", "--lora --offload activations"),
    ("--tiled_mlp 256", 1, "--lora --offload activations", "--lora --offload activations --tiled_mlp 256"),
    ("--lora", 1, "", "--lora"),
    ("--qlora", 1, "--lora", "--qlora"),
    ("--optim adamw8bit", 1, "", "--optim adamw8bit"),
    ("--optim_in_backward", 1, "", "--optim_in_backward"),
    ("--precision bf16", 1, "--precision mixed", "--precision bf16"),
    ("--fsdp2, 4 ranks", 4, "", "--fsdp2"),
]


def counted(case, folder, tokens):
    """One step of train.py as rank 0 of `world` -> MiB at the peak of what torch's CPU allocator has handed out since
    the start, kernels' temporaries included."""
    world, given = case
    import numpy as np
    import torch
    from torch.profiler import profile

    import data
    import train

    events, load_weights_ = [], data.load_weights_

    class InNumpy(train.Parked):  # whose memory stands for the host's
        def __init__(self, tensor):
            super().__init__(tensor[:0])
            self.shape, pages = tensor.shape, train.pages_of(tensor)
            self.pages = [torch.from_numpy(np.empty(page.nbytes, np.uint8)) for page in pages]

    def load_and_offload(model, *args, **kwargs):
        if "--offload activations" in given:  # a CPU run would leave them
            train.Parked = InNumpy
            model.activation_hooks = train.OffloadActivations(torch.device("cpu"), model.model.layers)
        return load_weights_(model, *args, **kwargs)

    def walk(tree):
        for event in tree:
            if event.tag.name == "Allocation":
                events.append(event.typed[1].total_allocated)  # since the profiler was started
            walk(event.children)

    harness.be_rank_0(world)
    data.load_weights_ = load_and_offload
    with profile(profile_memory=True) as profiler, tempfile.TemporaryDirectory() as out:
        harness.run_steps(["--model", folder, "--data", f"{folder}/data.txt", "--seq_len", str(tokens),
                           "--precision", "fp32", "--out", f"{out}/run", *given.split()], 1)
    walk(profiler.profiler.kineto_results.experimental_event_tree())
    return max(events) / MIB


def flags(tokens=2048):
    """Every memory flag without and with: what torch's allocator counts of rank 0."""
    import data

    rows, known = [], {}
    with tempfile.TemporaryDirectory() as folder:
        harness.write_model(Path(folder), data.PRESETS["llama-2-7b"] | SHAPE)
        Path(folder, "data.txt").write_text("the file is read from disk and returned as a list of str " * 9000)
        for flag, world, *pair in PAIRS:
            for given in pair:
                if (world, given) not in known:
                    (known[world, given],) = harness.in_processes(counted, [(world, given)], folder, tokens)
            before, after = (known[world, given] for given in pair)
            rows.append((f"`{flag}`", f"`{pair[0] or '(defaults)'}`", f"{before:,.1f}", f"{after:,.1f}",
                         f"{1 - after / before:.0%}"))
    table(f"Peak MiB of rank 0, counted; 8 layers, D=512, F=1024, V=4096, 1 x {tokens:,} tokens, float32 unless said",
          ("flag", "beside", "without", "with", "saves"), rows)


def kinds_at_peak(flags, world):
    """Of rank 0 on a GPU -> ({kind: bytes} at the peak, bytes of host memory)."""
    import train

    args = train.parse_args([*flags, "--dry_run"])
    config = train.open_config(args, world, device=None, random_init=True).config
    run = train.RunSpec(args, config, world, args.seq_len)
    moments, host = train.plan(run, train.choose_blocks(run, math.inf))
    return moments[train.peak_of(moments)[0]], sum(host.values())


def planned(flags, world):
    """Of rank 0 on a GPU -> (bytes at the peak, bytes of host memory)."""
    kinds, host = kinds_at_peak(flags, world)
    return sum(kinds.values()), host


def three_steps(flags, out):
    """Of a run on this machine's GPU -> (peak GiB as torch's allocator counts it, tokens a second)."""
    code = f"{out}/code.jsonl"
    make_tiny.write_examples(code, make_tiny.stdlib_examples("code"))
    harness.run_steps([*flags, "--data", code, "--out", f"{out}/run"], 3)
    rows = harness.metrics(Path(out, "run"))
    return max(row["mem_gib"] for row in rows), rows[-1]["tokens_per_s"]


def measured(flags, world, peak):
    """three_steps() where there is a GPU that holds `peak` bytes -> (GiB or why not, tokens a second or '-'), texts."""
    import torch

    if not torch.cuda.is_available() or world > 1:
        return "-", "-"
    if peak + GIB > torch.cuda.get_device_properties(0).total_memory:
        return "too large", "-"
    try:
        with tempfile.TemporaryDirectory() as out:
            ((gib, speed),) = harness.in_processes(three_steps, [flags], out)
    except Exception as error:  # out of memory, of the GPU or of the host
        return f"{type(error).__name__}: {error}".splitlines()[0][:80], "-"
    return f"{gib:.2f}", f"{speed:,.0f}"


def show(title, theirs, shared, cases):
    """A row for each case: (name, flags, others' figure, ranks)."""
    rows = []
    for name, more, figure, world in cases:
        flags = [*shared.split(), *more.split()]
        peak, host = planned(flags, world)
        rows.append((name, f"`{more or '(defaults)'}`", world, f"{peak / GIB:.2f}", *measured(flags, world, peak),
                     f"{host / GIB:.1f}", figure))
    columns = "case", "flags", "ranks", "planned GiB", "measured GiB", "tok/s", "planned host GiB", theirs
    table(f"{title}\n\nAll with `{shared}`", columns, rows)


HALVES = "--optim adamw8bit --precision bf16 --stochastic_rounding"
STEPS = [  # name, flags, GiB that one H100 took on 2026-11-22 (tests/LOG.md), where it was measured
    ("all weights, both defaults off", "--no-activation_checkpointing --no-chunked_ce", None),
    ("+ chunked cross-entropy (default)", "--no-activation_checkpointing", None),
    ("+ activation checkpointing (default)", "", None),
    ("+ --optim adamw8bit", "--optim adamw8bit", 75.35),
    ("+ --precision bf16 --stochastic_rounding", HALVES, 45.68),
    ("+ --optim_in_backward", f"{HALVES} --optim_in_backward", 35.65),
    ("+ --offload", f"{HALVES} --optim_in_backward --offload", 33.77),
    ("--lora", "--lora", 19.22),
    ("--qlora", "--qlora", 9.88),
    ("--qlora --offload", "--qlora --offload", 8.15),
    ("--qlora --offload --tiled_mlp 4096", "--qlora --offload --tiled_mlp 4096", None),
]
DRAWN = {  # kind of memory: (colour that reads on white and on black, its names in the plan)
    "weights": ("#2f81f7", ("weights", "quantized weights", "adapters")), "optimizer": ("#e5534b", ("optimizer",)),
    "gradients": ("#bf8700", ("gradients",)), "activations": ("#2da44e", ("kept for backward", "workspace")),
    "1 for CUDA": ("#848d97", ("overhead",))}


BAR_X, BAR_Y, ROW, PIXELS_A_GIB = 300, 68, 24, 2.6  # of the picture
CARDS = 8, 12, 16, 24, 48, 80  # GiB
SPEED_ON = "H100"  # the card whose predicted tokens a second stand beside each bar


def draw_ladder(path):
    """Writes an SVG: a bar for each of STEPS, cut by kind of memory. Right of it stand what a GPU took, and a predicted
    speed. No background."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 366" font-family="sans-serif" font-size="12" '
             'fill="#848d97">\n<text x="4" y="16">Llama-3.1-8B, sequences of 8,192, one GPU. Bars: GiB that the '
             'planner predicts.</text>\n<text x="4" y="32">Right of a bar: GiB that an H100 took, without CUDA\'s own '
             f'1; tok/s predicted for an {SPEED_ON}.</text>']
    for i, (kind, (colour, _)) in enumerate(DRAWN.items()):
        parts.append(f'<path d="M{4 + 102 * i} 42h10v10h-10" fill="{colour}"/>'
                     f'<text x="{18 + 102 * i}" y="51">{kind}</text>')
    for i, gib in enumerate(CARDS):  # in two lines, because the smallest stand close together
        x = BAR_X + PIXELS_A_GIB * gib
        parts.append(f'<text x="{x}" y="{344 + 14 * (i % 2)}" text-anchor="middle">{gib}</text>')
    parts.append(f'<text x="{BAR_X + PIXELS_A_GIB * CARDS[-1] + 20}" y="358">GiB of common cards</text>')
    for i, (name, flags, recorded) in enumerate(STEPS):
        flags = f"--model llama-3.1-8b --random_init --seq_len 8192 --no-compile {flags}".split()
        kinds, _ = kinds_at_peak(flags, 1)
        peak = sum(kinds.values())
        gib, speed = measured(flags, 1, peak)
        print(f"{name}: {peak / GIB:.2f} GiB planned without CUDA's, {gib} measured, {speed} tok/s")
        if speed != "-":
            recorded = float(gib)
        beside = [f"{recorded:.2f} GiB"] if recorded else []
        beside.append(f"{predicted_speed(flags):,.0f} tok/s")
        parts += bar(name, kinds | {"overhead": GIB}, ", ".join(beside), BAR_Y + ROW * i)
    path.write_text("\n".join([*parts, "</svg>\n"]))


def predicted_speed(flags):
    """Tokens a second that the plan predicts for one SPEED_ON, compiled."""
    import train

    args = train.parse_args([*(flag for flag in flags if flag != "--no-compile"), "--dry_run", "--gpu", SPEED_ON])
    config = train.open_config(args, 1, device=None, random_init=True).config
    run = train.RunSpec(args, config, 1, args.seq_len)
    with_host, _ = train.time_of_step(run, train.blocks_as_asked(run), train.CARDS[SPEED_ON])
    return args.seq_len / with_host


def bar(name, kinds, beside, y):
    """Parts of the SVG: a step's name, its bar, the text beside it, and the lines of the cards between texts."""
    total = sum(kinds.values()) / GIB
    parts = [f'<text x="4" y="{y + 12}">{name}</text>',
             f'<text x="292" y="{y + 12}" text-anchor="end">{total:.1f}</text>']
    text_start = text_end = BAR_X + PIXELS_A_GIB * total + 4
    parts.append(f'<text x="{text_start:.1f}" y="{y + 12}">{beside}</text>')
    text_end += 6.5 * len(beside)
    for gib in CARDS:  # a card's line stops where the text is
        x = BAR_X + PIXELS_A_GIB * gib
        if not text_start - 4 < x < text_end:
            parts.append(f'<path d="M{x} {y - 4}v{ROW}" stroke="#848d97" stroke-dasharray="2 3"/>')
    x = BAR_X
    for colour, names in DRAWN.values():
        width = PIXELS_A_GIB * sum(kinds.get(name, 0) for name in names) / GIB
        parts.append(f'<path d="M{x:.1f} {y}h{width:.1f}v16h-{width:.1f}" fill="{colour}"/>')
        x += width
    return parts


def ladder():
    """Llama-3.2-3B in the order of torchtune's README: peak active GiB on an A100, all but the first with compile. LoRA
    and QLoRA leave out the two optimizer options. Everything is bf16, as in its recipe. Uncompiled, as the picture's
    measured runs."""
    draw_ladder(harness.TESTS / "memory_ladder.svg")
    lora = "--lora_rank 64 --lora_alpha 128"  # as in torchtune's 3B configs
    show("torchtune's ladder, Llama-3.2-3B, 2 x 4,096 tokens, bf16, without its rung \"+ compile\"", "torchtune GiB",
         "--model llama-3.2-3b --random_init --no-compile --precision bf16 --batch_size 2 --seq_len 4096", [
             ("full fine-tuning, rows full", "--no-activation_checkpointing --no-chunked_ce", "60.0 (25.5 padded)", 1),
             ("+ chunked cross-entropy", "--no-activation_checkpointing", "42.9 (51.0 before it, with compile)", 1),
             ("+ activation checkpointing", "", "24.9", 1),
             ("+ optimizer in the backward", "--optim_in_backward", "23.1", 1),
             ("+ activation offload", "--optim_in_backward --offload", "21.8", 1),
             ("+ 8-bit AdamW", "--optim_in_backward --offload --optim adamw8bit", "17.6", 1),
             ("LoRA", f"--offload --lora {lora}", "8.5", 1),
             ("QLoRA", f"--offload --qlora {lora}", "4.6", 1),
         ])


def fsdp():
    """Llama-3.1-8B beside the figures of an accelerate issue, which does not say how many ranks it used."""
    rungs = [
        ("FSDP2", "--no-shard_embeddings --no-activation_checkpointing --no-chunked_ce", "23.07"),
        ("+ activation checkpointing", "--no-shard_embeddings --no-chunked_ce", "19.68"),
        ("+ CPU offload", "--no-shard_embeddings --no-chunked_ce --offload params", "13.67"),
        ("+ sharded embedding and head", "--no-chunked_ce --offload params", "10.88"),
        ("+ chunked cross-entropy", "--offload params", "9.93"),
    ]
    show("FSDP2's ladder, Llama-3.1-8B, full fine-tuning, 1 x 1,024 tokens", "accelerate GiB",
         "--model llama-3.1-8b --random_init --no-compile --fsdp2 --precision mixed --seq_len 1024",
         [(*rung, world) for world in (2, 4, 8) for rung in rungs])


def targets():
    """What is to fit on cards of 24 and 80 GB."""
    long = "--model llama-3.1-8b --qlora --lora_rank 16 --offload activations --tiled_mlp 4096 --seq_len"
    qwen = "--model qwen2.5-32b --fsdp2 --precision bf16 --optim adamw8bit --tiled_mlp 4096 --seq_len 20480"
    show("Targets", "target GiB", "--random_init", [
        ("8B, QLoRA, 4,096 tokens", f"{long} 4096", "7.2", 1),
        ("8B, QLoRA, 32,768 tokens", f"{long} 32768", "10.1", 1),
        ("8B, QLoRA, 131,072 tokens", f"{long} 131072", "20.1", 1),
        ("8B, QLoRA, 342,000 tokens", f"{long} 342000", "80", 1),
        ("32B, full, 20,480 tokens", f"{qwen} --offload activations", "65", 4),
        ("32B, full, 20,480 tokens, all on the host", f"{qwen} --offload", "14", 4),
        ("70B, QLoRA, 2,048 tokens", "--model llama-2-70b --fsdp2 --qlora --offload --seq_len 2048", "15", 2),
        ("8B, QLoRA, 1,000,000 tokens over 8", f"{long} 1000000 --fsdp2 --sequence_parallel 8", "-", 8),
    ])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = {"ce": ce, "load": load, "flags": flags, "ladder": ladder, "fsdp": fsdp, "targets": targets}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--tokens", type=int, help="of ce (default: 8192) and flags (default: 2048)")
    parser.add_argument("--words", type=int, help="of ce (default: 128256)")
    args = parser.parse_args()
    given = {name: value for name, value in [("tokens", args.tokens), ("words", args.words)] if value}
    commands[args.command](**given)
