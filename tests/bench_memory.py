"""Measures what the trainer's memory promises cost on this machine, as small markdown tables. Run by hand:

    python tests/bench_memory.py ce        # head and loss, 8,192 tokens x 128,256 words; 12 GiB, less with --tokens
    python tests/bench_memory.py load      # host memory of 4 ranks that load a checkpoint of 0.5 and 0.9 GB; 3 GiB

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
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

MIB = 2**20


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
        rows = [-(-shape[0] // world) * math.prod(shape[1:]) * 2 for _, shape, _ in source.tensors.values()]
        return [sum(p.nbytes for p in mine) / MIB, max(rows) / MIB, peak.anonymous / MIB, peak.total / MIB]
    finally:
        dist.destroy_process_group()


def load(args):
    """Host memory of ranks that load a checkpoint together, above the parameters they keep."""
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
        "peak above, with mapped files"), rows)


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
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
