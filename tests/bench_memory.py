"""Measures what the trainer's memory promises cost on this machine, as small markdown tables. Run by hand:

    python tests/bench_memory.py ce        # head and loss, 8,192 tokens x 128,256 words; 12 GiB, less with --tokens
    python tests/bench_memory.py load      # host memory of 4 ranks that load and write a model of 0.5 and 0.9 GB; 3 GiB
    python tests/bench_memory.py flags     # every memory flag without and with, planned and counted, on a small model
    python tests/bench_memory.py ladder    # Llama-3.2-3B, one technique after the other, beside torchtune's figures
    python tests/bench_memory.py fsdp      # Llama-3.1-8B as rank 0 of 2, 4, 8, one FSDP2 technique after the other
    python tests/bench_memory.py targets   # what this project set out to fit: 8B at up to 342,000 tokens, 32B, 70B

The last three print train.py's memory plan, in seconds and on any machine. With a GPU they also run each case on it, with
random weights, for the peak of the steps after the first: that needs a card of 80 GB and, where much is offloaded, 59 GiB
of host memory, 81 at 342,000 tokens. A row that does not fit is planned only and says so; --rows picks some. A rank of
several runs alone, under torch's fake process group: its shards and buffers are those of a real rank, what it gathers are
copies of its own shard, and communication costs nothing, so tok/s is an upper bound.

Every case runs in processes of its own. On a CPU (Linux) a peak is the kernel's high-water mark of resident memory,
VmHWM, reset just before the part that is measured; on a GPU it is torch.cuda.max_memory_allocated. The anonymous share
of the peak, which leaves out pages of mapped files, has no such mark and is read every 2 ms.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

MIB, GIB = 2**20, 2**30


def table(title, columns, rows):
    print(f"\n{title}\n\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")


def run_cases(target, cases, *args):
    """target(case, *args) for all cases at once, each in a fresh process -> what they returned, in order."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=answer, args=(results, i, target, case, *args)) for i, case in enumerate(cases)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a case ended with exit code {process.exitcode}")
    return [result for _, result in sorted(results.get() for _ in cases)]


def answer(results, number, target, case, *args):
    results.put((number, target(case, *args)))


# ---------------------------------------------------------------- resident memory


def resident(*keys):
    """Bytes of the given lines of /proc/self/status: VmRSS, VmHWM (its peak), RssAnon (without pages of files)."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return [int(lines[key].split()[0]) * 1024 for key in keys]


@dataclasses.dataclass
class Peak:
    """Growth, in bytes, from the start of the block to the highest point inside it."""

    total: int = 0
    anonymous: int = 0


@contextlib.contextmanager
def watch_peak():
    peak, done = Peak(), threading.Event()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS
    total, anonymous = resident("VmRSS", "RssAnon")
    seen = [anonymous]

    def sample():
        while not done.wait(0.002):
            seen[0] = max(seen[0], *resident("RssAnon"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak.total, peak.anonymous = resident("VmHWM")[0] - total, seen[0] - anonymous


@contextlib.contextmanager
def watch_cuda(device):
    import torch

    peak = Peak()
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    yield peak
    peak.total = torch.cuda.max_memory_allocated(device) - start


# ---------------------------------------------------------------- ce: the head and the loss


def ce_case(case, tokens, vocab, width, dtype):
    """Forward and backward of head and loss -> (peak MiB, loss per token, norms of the gradients)."""
    import torch

    import model as lm

    trained, chunk = case
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    shape = dataclasses.make_dataclass("Shape", ["vocab_size", "hidden_size"])
    with torch.device(device):
        head = lm.LMHead(shape(vocab, width))
        torch.nn.init.normal_(head.weight, std=width**-0.5)
        head.to(dtype=getattr(torch, dtype)).requires_grad_(trained)
        x_BTD = torch.randn(1, tokens, width, dtype=getattr(torch, dtype))
        targets_BT, keep_S = torch.randint(0, vocab, (1, tokens)), torch.arange(tokens)
    x_BTD.requires_grad_()
    head.chunk = chunk
    # kernels are loaded and threads started before anything is counted
    head(x_BTD[:, :2], targets_BT[:, :2], keep_S[:2]).backward()
    head.weight.grad = x_BTD.grad = None
    with watch_cuda(device) if device.type == "cuda" else watch_peak() as peak:
        loss_sum = head(x_BTD, targets_BT, keep_S)
        (loss_sum / tokens).backward()
        loss = loss_sum.item() / tokens
    norms = [p.grad.float().norm().item() for p in (x_BTD, head.weight) if p.requires_grad]
    return peak.total / MIB, loss, norms


def ce(args):
    """The peak of the loss: logits of all tokens at once, against chunks of them."""
    rows = []
    for trained in (True, False):
        for chunk in args.chunks:
            case = trained, chunk
            ((peak, loss, norms),) = run_cases(ce_case, [case], args.tokens, args.vocab, args.width, args.dtype)
            norms = [f"{n:.6f}" for n in norms] + ["-"] * (not trained)
            what = "trained" if trained else "frozen", chunk or "all at once"
            rows.append((*what, f"{peak:,.0f}", f"{loss:.5f}", *norms))
    logits = args.tokens * args.vocab * 4 / MIB
    table(f"Cross-entropy, forward and backward, {args.tokens:,} tokens x {args.vocab:,} words x {args.width} wide, "
          f"{args.dtype}; float32 logits of all tokens: {logits:,.0f} MiB",
          ("head", "tokens in a chunk", "peak MiB above weight and input", "loss", "norm of the input's gradient",
           "norm of the head's"), rows)


# ---------------------------------------------------------------- load: ranks that read a checkpoint


def write_checkpoint(folder, layers):
    """A random bf16 Llama of about 1 GB (24 layers) in three files with an index -> bytes in them."""
    import torch
    from safetensors.torch import save_file

    import model as lm

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024,
        "intermediate_size": 4096, "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 16,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "max_position_embeddings": 2048,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in lm.Transformer(lm.parse_config(config)).named_parameters()}
    names, weight_map = list(shapes), {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        part = names[i * len(names) // 3 : (i + 1) * len(names) // 3]
        save_file({name: torch.randn(shapes[name]).mul_(0.02).bfloat16() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(math.prod(shape) for shape in shapes.values()) * 2


def load_rank(rank, folder, store, world, lora, qlora):
    """Builds and loads the model as train.py does under --fsdp2 -> this rank's figures in MiB."""
    import torch
    import torch.distributed as dist

    import model as lm
    import nf4
    import train

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        device = torch.device("cpu")
        with torch.device("meta"):
            model = lm.Transformer(lm.parse_config(lm.read_json(folder / "config.json")))
        source = lm.Checkpoint(folder)
        lm.check_weights(model, source, folder)
        if qlora:
            nf4.quantize_linears_(model.model.layers)
        if lora or qlora:
            lm.add_lora_(model, 16, 32, 0.0, lm.LORA_TARGETS)
        precision = "mixed" if lora or qlora else "bf16"
        train.set_precision_(model, precision)
        train.shard_(model, device, precision, reshard=True, shard_embeddings=True, offload_params=False,
                     chunked_ce=True)
        model.to_empty(device=device)
        model.tie_()
        mine = [lm.local(p)[0] for p in model.parameters()]
        with torch.no_grad():
            for p in mine:
                p.zero_()  # memory is resident once it is written to: the shard is in place before the peak counts
        dist.barrier()
        with watch_peak() as peak:
            lm.load_weights_(model, source, None, 0, device, False)
        dist.barrier()
        out = folder / f"out-{Path(store).name}"
        out.mkdir(exist_ok=True)
        with watch_peak() as writing:
            tensors = lm.full_tensors(model, trainable_only=lora or qlora)
            if lora or qlora:
                adapter, names = dict(tensors), list(source.tensors)
                tensors = lm.merged_tensors(source, names, adapter, 2.0) if rank == 0 else ()
            else:
                names = [name for name, _ in model.named_parameters()]
            if rank == 0 or not (lora or qlora):
                layout = {name: (source.tensors[name][1], source.dtype(name)) for name in names}
                lm.save_model(tensors, layout, out, {}, folder, None, write=rank == 0)
        dist.barrier()
        rows = [-(-shape[0] // world) * math.prod(shape[1:]) * 2 for _, shape, _ in source.tensors.values()]
        return [sum(p.nbytes for p in mine) / MIB, max(rows) / MIB, peak.anonymous / MIB, peak.total / MIB,
                max(math.prod(shape) for _, shape, _ in source.tensors.values()) * 2 / MIB, writing.anonymous / MIB]
    finally:
        dist.destroy_process_group()


def load(args):
    """Host memory of ranks that load a checkpoint together and write it again, above the parameters they keep."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for layers in args.layers:
            part = Path(folder, str(layers))
            part.mkdir()
            n_bytes = write_checkpoint(part, layers)
            for method, flags in {"full, bf16": (False, False), "LoRA": (True, False), "QLoRA": (False, True)}.items():
                store = f"{part}/store-{method}"
                ranks = run_cases(load_rank, range(args.ranks), part, store, args.ranks, *flags)
                for rank, figures in enumerate(ranks):
                    rows.append((f"{n_bytes / MIB:,.0f}", method, rank, *(f"{figure:,.1f}" for figure in figures)))
    table(f"Loading on {args.ranks} ranks with --fsdp2, MiB", (
        "checkpoint", "weights", "rank", "parameters kept", "largest tensor's rows of a rank", "peak above, anonymous",
        "peak above, with mapped files", "largest tensor", "peak above of writing final/ or merged/, anonymous"), rows)


# ---------------------------------------------------------------- ladder, fsdp, targets: the plan, and a run beside it


@dataclasses.dataclass
class Case:
    name: str
    flags: str  # of train.py, beside those that all cases of a table have
    theirs: str  # GiB
    world: int = 1
    steps: int = 4  # at least 2, the first is not counted


def planned(flags, world):
    """Of rank 0 on a GPU -> (bytes at the peak, bytes of host memory, the same where it is not pinned)."""
    import model as lm
    import train

    args = train.parse_args([*flags, "--dry_run"])
    args.precision = args.precision or "mixed"
    config = lm.parse_config(train.find_model(args.model, random_init=True)[0])
    given = args, config, world, train.tokens_of(args, args.seq_len)
    moments, host = train.plan(*given, cuda=True)
    _, unpinned = train.plan(*given, cuda=False)  # a run takes that where pinned memory would be too much
    return train.peak_of(moments)[1], sum(host.values()), sum(unpinned.values())


def card(_):
    """(name, bytes) of the first GPU. A case of its own: CUDA's context would stay in this process."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory


class Stop(Exception):
    """Ends a run before it writes the model; says why if it did not get that far."""


def train_case(case):
    """train.py as rank 0 of `world` -> (peak GiB, tok/s of this rank, None) or (None, None, what went wrong)."""
    flags, world, steps = case
    import torch.distributed as dist
    from conftest import start_fake_group

    import train

    def init_processes(distributed, timeout):
        device, *_ = real_init(distributed and world == 1)
        if world > 1:
            start_fake_group(world)
        return device, 0, world, None

    def export(*_):
        raise Stop

    def report_out_of_memory(args, at, error):
        raise Stop(f"out of memory: {at['phase']}, step {at['step']}")

    real_init, train.init_processes = train.init_processes, init_processes
    train.export, train.report_out_of_memory = export, report_out_of_memory
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(key, None)
    args = train.parse_args(flags)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        # a token a word, and one more at the end that is only a target: every row is one document and full
        Path(folder, "data.txt").write_text(" the" * (args.batch_size * world * args.seq_len))
        try:
            train.main([*flags, "--data", f"{folder}/data.txt", "--out", f"{folder}/out", "--steps", str(steps),
                        "--log_every", "1", "--sample", "", "--save_every", "0"])
        except Stop as stop:
            if str(stop):
                return None, None, str(stop)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        with open(Path(folder, "out", "metrics.jsonl")) as file:
            rows = [json.loads(line) for line in file][1:]  # the first peak is that of making random weights
    speed = statistics.median(row["tokens_per_s"] for row in rows) / world  # logged of all ranks
    return max(row["mem_gib"] for row in rows), speed, None


def show(title, theirs, shared, cases, args):
    """A row per case: what is planned, what others publish or was aimed at, and with a GPU what a run takes."""
    import torch

    import train

    name, room = None, None
    if torch.cuda.is_available():
        ((name, room),) = run_cases(card, [None])
    rows = []
    for number, case in enumerate(cases, 1):
        if args.rows and number not in args.rows:
            continue
        flags = [*shared.split(), *case.flags.split()]
        if args.model:
            flags += ["--model", args.model, "--seq_len", str(args.seq_len)]
        peak, host, least_host = planned(flags, case.world)
        gib, speed, why = None, None, None
        if room and peak + train.OVERHEAD > room:
            why = "plan exceeds the card"
        elif (room or args.model) and least_host > 0.9 * (train.host_share() or math.inf):
            why = "plan exceeds free host memory"
        elif room or args.model:
            print(f"{case.name}: {' '.join(flags)}, rank 0 of {case.world}", file=sys.stderr, flush=True)
            try:
                ((gib, speed, why),) = run_cases(train_case, [(flags, case.world, case.steps)])
            except SystemExit as failed:  # the other rows are worth having
                why = str(failed)
        rows.append((number, case.name, f"`{case.flags}`" if case.flags else "(defaults)", case.world, f"{peak / GIB:.2f}",
                     f"{host / GIB:.1f}", case.theirs, f"{gib:.2f}" if gib else why or "-",
                     f"{speed:,.0f}" if speed else "-"))
    where = f"planned, and measured on {name}" if name else "planned; no GPU here"
    if args.model:
        where += f"; only to see it run: {args.model}, {args.seq_len} tokens" + ", resident memory" * (not name)
    table(f"{title}; {where}\n\nAll with `{shared}`", (
        "row", "case", "flags", "ranks", "planned GiB", "planned host GiB", theirs, "measured GiB",
        "tok/s of a rank" + ", at most (communication is free)" * any(case.world > 1 for case in cases)), rows)


def ladder(args):
    """Llama-3.2-3B, 2 rows of 4,096 tokens, in the order of torchtune's README; each row adds to the one before, LoRA and
    QLoRA leave out the two optimizer options. Everything is bf16, as in torchtune's recipe; its figures are peak active
    GiB on an A100, all but the first with compile."""
    off = "--no-activation_checkpointing --no-chunked_ce"
    offload = "--offload activations"
    lora = "--lora_rank 64 --lora_alpha 128"  # as in torchtune's 3B configs
    cases = [
        Case("full fine-tuning, rows full", off, "60.0 (25.5 padded)"),
        Case("+ chunked cross-entropy", "--no-activation_checkpointing", "42.9 (51.0 before it, with compile)"),
        Case("+ activation checkpointing", "", "24.9"),
        Case("+ optimizer in the backward", "--optim_in_backward", "23.1"),
        Case("+ activation offload", f"--optim_in_backward {offload}", "21.8"),
        Case("+ 8-bit AdamW", f"--optim_in_backward {offload} --optim adamw8bit", "17.6"),
        Case("LoRA", f"{offload} --lora {lora}", "8.5"),
        Case("QLoRA", f"{offload} --qlora {lora}", "4.6"),
    ]
    show("torchtune's ladder, Llama-3.2-3B, 2 x 4,096 tokens, bf16; its rung \"+ compile\", before the chunked "
         "cross-entropy, is left out: the plan is of eager steps", "torchtune GiB",
         "--model llama-3.2-3b --random_init --precision bf16 --batch_size 2 --seq_len 4096", cases, args)


def fsdp(args):
    """Llama-3.1-8B, full fine-tuning on one row of 1,024 tokens a rank, beside the figures of an accelerate issue in the
    same order. It is not known here of how many ranks those are: they stand at each number."""
    rungs = [
        ("FSDP2", "--no-shard_embeddings --no-activation_checkpointing --no-chunked_ce", "23.07"),
        ("+ activation checkpointing", "--no-shard_embeddings --no-chunked_ce", "19.68"),
        ("+ CPU offload", "--no-shard_embeddings --no-chunked_ce --offload params", "13.67"),
        ("+ sharded embedding and head", "--no-chunked_ce --offload params", "10.88"),
        ("+ chunked cross-entropy", "--offload params", "9.93"),
    ]
    cases = [Case(name, flags, theirs, world) for world in args.ranks for name, flags, theirs in rungs]
    show(f"FSDP2's ladder, Llama-3.1-8B, full fine-tuning, {args.precision}, 1 x 1,024 tokens", "accelerate GiB",
         f"--model llama-3.1-8b --random_init --fsdp2 --precision {args.precision} --seq_len 1024", cases, args)


def targets(args):
    """What is to fit: Llama-3.1-8B with QLoRA up to 342,000 tokens, Qwen2.5-32B with every weight trained at 20,480
    tokens on 4 cards, Llama-2-70B with QLoRA on 2."""
    long = "--model llama-3.1-8b --qlora --lora_rank 16 --offload activations --tiled_mlp 4096 --seq_len"
    qwen = "--model qwen2.5-32b --fsdp2 --precision bf16 --optim adamw8bit --tiled_mlp 4096 --seq_len 20480"
    cases = [
        Case("8B, QLoRA, 4,096 tokens", f"{long} 4096", "7.2"),
        Case("8B, QLoRA, 32,768 tokens", f"{long} 32768", "10.1"),
        Case("8B, QLoRA, 131,072 tokens", f"{long} 131072", "20.1", steps=2),
        Case("8B, QLoRA, 342,000 tokens", f"{long} 342000", "80", steps=2),  # minutes a step: attention is quadratic
        Case("32B, full, 20,480 tokens", f"{qwen} --offload activations", "65", 4),
        Case("32B, full, 20,480 tokens, all on the host", f"{qwen} --offload", "14", 4),
        Case("70B, QLoRA, 2,048 tokens", "--model llama-2-70b --fsdp2 --qlora --offload --seq_len 2048", "15", 2),
        Case("8B, QLoRA, 1,000,000 tokens over 8", f"{long} 1000000 --fsdp2 --sequence_parallel 8", "-", 8, steps=2),
    ]
    show("Targets", "target GiB", "--random_init", cases, args)


# ---------------------------------------------------------------- flags: each one without and with

PAIRS = [  # flag, ranks and flags without it, ranks and flags with it
    ("--chunked_ce", (1, "--lora --tiled_mlp 256 --no-chunked_ce"), (1, "--lora --tiled_mlp 256")),
    ("--activation_checkpointing", (1, "--no-activation_checkpointing"), (1, "")),
    ("--offload activations", (1, "--lora"), (1, "--lora --offload activations")),
    ("--tiled_mlp 256", (1, "--lora --offload activations"), (1, "--lora --offload activations --tiled_mlp 256")),
    ("--lora", (1, ""), (1, "--lora")),
    ("--qlora", (1, "--lora"), (1, "--qlora")),
    ("--optim adamw8bit", (1, ""), (1, "--optim adamw8bit")),
    ("--optim_in_backward", (1, ""), (1, "--optim_in_backward")),
    ("--precision bf16", (1, "--precision mixed"), (1, "--precision bf16")),
    ("--fsdp2, 4 ranks", (4, ""), (4, "--fsdp2")),
    ("--reshard_after_forward", (4, "--fsdp2 --no-reshard_after_forward"), (4, "--fsdp2")),
    ("--shard_embeddings", (4, "--fsdp2 --no-shard_embeddings"), (4, "--fsdp2")),
]


def flags(args):
    """Every memory flag without and with: the plan, and what torch's allocator counts as rank 0 of a fake process group."""
    from test_plan import run_counted, write_models

    rows, known = [], {}
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(Path(folder))
        for flag, *pair in PAIRS:
            for world, given in pair:
                if (world, given) not in known:
                    out = Path(folder, f"run{len(known)}")
                    out.mkdir()
                    known[world, given] = run_counted(models, out, "wide", args.tokens, world, given)
            (before, before_planned), (after, after_planned) = (
                (known[case]["counted"], known[case]["planned"]) for case in pair)
            sides = f"{before / MIB:,.1f} ({before_planned / MIB:,.1f})", f"{after / MIB:,.1f} ({after_planned / MIB:,.1f})"
            rows.append((f"`{flag}`", f"`{pair[0][1] or '(defaults)'}`", *sides, f"{1 - after / before:.0%}"))
    table(f"Peak MiB of rank 0, counted (planned); 8 layers, D=512, F=1024, V=4096, 1 x {args.tokens:,} tokens, float32 unless "
          "said; host memory of --offload not counted",
          ("flag", "beside", "without", "with", "saves"), rows)


# ---------------------------------------------------------------- command line


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("ce", help=ce.__doc__)
    command.set_defaults(run=ce)
    command.add_argument("--tokens", type=int, default=8192, help="(default: 8192; the peak grows in proportion)")
    command.add_argument("--vocab", type=int, default=128256, help="(default: 128256)")
    command.add_argument("--width", type=int, default=512, help="(default: 512)")
    command.add_argument("--chunks", type=int, nargs="+", default=[0, 1024], metavar="TOKENS",
                         help="tokens in a chunk, 0 for all at once (default: 0 1024)")
    command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default: bfloat16)")
    command = commands.add_parser("load", help=load.__doc__)
    command.set_defaults(run=load)
    command.add_argument("--ranks", type=int, default=4, help="(default: 4)")
    command.add_argument("--layers", type=int, nargs="+", default=[12, 24],
                         help="of the checkpoints, 32 MiB each beside 125 MiB (default: 12 24)")
    command = commands.add_parser("flags", help=flags.__doc__)
    command.set_defaults(run=flags)
    command.add_argument("--tokens", type=int, default=2048, help="in a row (default: 2048)")
    for run in (ladder, fsdp, targets):
        command = commands.add_parser(run.__name__, help=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("--rows", type=int, nargs="+", metavar="N", help="these rows of the table (default: all)")
        # another model and length, which also run without a GPU: does the measuring work?
        command.add_argument("--model", help=argparse.SUPPRESS)
        command.add_argument("--seq_len", type=int, default=64, help=argparse.SUPPRESS)
        if run is fsdp:
            command.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="(default: 2 4 8)")
            command.add_argument("--precision", choices=("mixed", "bf16"), default="mixed", help="(default: mixed)")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
