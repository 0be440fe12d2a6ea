"""oomph: fine-tunes Llama and Qwen models on the GPUs you have, in pure PyTorch, without running out of memory.

    python train.py                                                          # the built-in model and data, any machine
    torchrun --nproc_per_node 4 train.py --fsdp2 --qlora --offload           # the same, sharded, in 4 bits, offloaded
    torchrun --nproc_per_node 2 train.py --fsdp2 --qlora --offload --model Qwen/Qwen2.5-32B --data chat.jsonl
    torchrun --nproc_per_node 8 train.py --fsdp2 --model /models/Llama-3.1-8B --data a.jsonl b.txt --lr 1e-5

Below: the flags, the process group, what is done to the model, activation offload, the optimizers, the memory plan, what
a run writes, and `run`, which is a whole training run from top to bottom. Every flag is one call in `run`.
"""

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
import uuid
import warnings
import weakref
import zlib
from datetime import datetime, timedelta
from pathlib import Path

import safetensors
import tokenizers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import data
import model as lm
import nf4

TINY = Path(__file__).parent / "tests" / "tiny"
SAMPLES = {"stdlib:docs": "What does `shutil.copytree(src, dst)` do?", "stdlib:code": "def read_json(path):\n"}

# ---------------------------------------------------------------- flags


def bounded(kind, holds, expected):
    def parse(text):
        value = kind(text)
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text}: expected {expected}")
        return value

    parse.__name__ = kind.__name__  # argparse prints it: "invalid int value"
    return parse


def positive(kind):
    return bounded(kind, lambda value: 0 < value < math.inf, "a positive number")


def not_negative(kind):
    return bounded(kind, lambda value: 0 <= value < math.inf, "zero or a positive number")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        prog="train.py", allow_abbrev=False, description=__doc__.split("\n\n")[0],
        epilog="The four launch commands are in the first lines of train.py; README.md explains the flags by task.",
    )
    def refuse(message):  # without argparse's list of all flags, which each rank would print
        print(f"train.py: error: {message}", file=sys.stderr)
        raise SystemExit(2)

    parser.error = refuse
    yes_no, whole = argparse.BooleanOptionalAction, positive(int)
    positive_float, amount = positive(float), not_negative(float)

    add = parser.add_argument_group("model").add_argument
    add("--model", default="tiny", help="tiny (built in), a Hugging Face folder, a Hub id, or with --random_init one of "
        + ", ".join(lm.PRESETS) + " (default: tiny)")
    add("--random_init", action="store_true", help="shapes of --model, random weights (default: off)")
    add("--precision", choices=("mixed", "bf16", "fp32"), help="mixed: trained weights, gradients, optimizer in float32, "
        "products in bf16; bf16: all in bf16; fp32: all in float32 (default: mixed; fp32 where bf16 is not native)")
    add("--adapter", metavar="DIR", help="start from this PEFT adapter, with its rank, alpha, targets (default: none)")

    add = parser.add_argument_group("method (default: full fine-tuning)").add_argument
    add("--lora", action="store_true", help="train low-rank adapters, weights frozen in 16 bits (default: off)")
    add("--qlora", action="store_true", help="train low-rank adapters, weights frozen in NF4, 4.14 bits (default: off)")
    add("--lora_rank", type=whole, metavar="R", help="rank of the adapters (default: 16)")
    add("--lora_alpha", type=positive_float, help="adapters are scaled by alpha / rank (default: 32)")
    add("--lora_dropout", type=amount, help="share of an adapter's inputs zeroed in training (default: 0)")
    add("--lora_targets", nargs="+", choices=lm.LORA_TARGETS, metavar="LAYER",
        help=f"linear layers that get an adapter, of {', '.join(lm.LORA_TARGETS)} (default: all)")

    add = parser.add_argument_group("data").add_argument
    add("--data", nargs="+", default=["stdlib:docs"], metavar="FILE[:W]", help=".jsonl, .json or .txt, also .gz, of messages, "
        "ShareGPT, prompt + completion, Alpaca or text; or the built-in stdlib:docs, stdlib:code. :W takes a file W times "
        "an epoch (default: stdlib:docs)")
    add("--eval_data", nargs="+", metavar="FILE[:W]", help="the same; stdlib:* is the 5 %% left out by --data (default: none)")
    add("--seq_len", type=whole, default=1024, help="tokens in a row (default: 1024)")
    add("--overflow", choices=("split", "drop", "truncate"), help="what becomes of documents of more than --seq_len tokens "
        "(default: texts are split, conversations and completions dropped)")
    add("--packing", action=yes_no, default=True, help="several documents in a row, kept apart (default: on)")
    add("--train_on", choices=("targets", "all"), default="targets",
        help="targets: assistant turns, completions, texts; all: every token (default: targets)")
    add("--chat_template", metavar="FILE", help="jinja file in place of the model's own (default: the model's)")
    add("--min_supervised", type=amount, default=0.01, metavar="SHARE", help="refuse a file with a smaller share of tokens "
        "that are trained on (default: 0.01)")
    add("--data_cache", metavar="DIR", help="where tokenized files are kept (default: $XDG_CACHE_HOME/oomph or ~/.cache/oomph)")
    add("--inspect", type=whole, metavar="N", help="print N examples, trained tokens in green, and exit (default: off)")

    add = parser.add_argument_group("memory and speed").add_argument
    add("--fsdp2", action="store_true", help="shard parameters, gradients and optimizer over the ranks (default: off: "
        "each rank holds all of it and gradients are averaged)")
    add("--reshard_after_forward", action=yes_no, default=True,
        help="free a block's gathered weights after its forward, gather them again in the backward (default: on)")
    add("--shard_embeddings", action=yes_no, default=True, help="embedding and head are FSDP units of their own, gathered "
        "only while in use; a tied pair stays gathered (default: on)")
    add("--replicas", type=whole, default=1, metavar="N", help="copies of the sharded model, each over world / N "
        "ranks that follow one another, as those of a node do; gradients are averaged between them (default: 1)")
    add("--sequence_parallel", type=whole, default=1, metavar="N", help="each row is split over N ranks that follow one "
        "another; --batch_size is then rows of these N together (default: 1)")
    add("--offload", nargs="*", choices=("activations", "params"), help="activations: what a checkpointed block keeps "
        "waits in host memory; params: weights, gradients and optimizer live there (default: none; bare: all that applies)")
    add("--activation_checkpointing", action=yes_no, default=True,
        help="keep each block's input only and recompute the rest in the backward (default: on)")
    add("--chunked_ce", action=yes_no, default=True, help="head and loss in chunks of tokens, gradient in the forward, "
        "no [tokens, vocabulary] tensor (default: on)")
    add("--ce_chunk", type=whole, metavar="TOKENS", help="tokens in a chunk of the loss (default: 1024)")
    add("--tiled_mlp", type=whole, metavar="TOKENS", help="the MLP in tiles of so many tokens, forward and backward; 4096 "
        "keeps products large (default: off: the whole row at once)")
    add("--optim", choices=("adamw", "adamw8bit"), default="adamw", help="adamw8bit: moments of matrices in 8 bits, 2 bytes "
        "of state a parameter in place of 8, or 4 under --precision bf16 (default: adamw)")
    add("--stochastic_rounding", action="store_true", help="round bf16 weights and moments up or down at random, right in "
        "the mean, so that updates below their resolution count; needs --precision bf16 (default: off)")
    add("--optim_in_backward", action="store_true", help="update each weight in the backward as soon as its gradient is "
        "complete and free the gradient; without clipping (default: off)")
    add("--fused_adamw", action=yes_no, default=True, help="AdamW as one kernel, on GPU and CPU (default: on)")
    add("--compile", action="store_true", help="torch.compile on the blocks, the loss and NF4, for half a minute at the first "
        "step (default: off)")

    add = parser.add_argument_group("schedule").add_argument
    add("--batch_size", type=whole, default=1, help="rows per rank and micro-batch, or per group of --sequence_parallel "
        "(default: 1)")
    add("--grad_accum", type=whole, default=1, help="micro-batches per step (default: 1)")
    add("--steps", type=whole, help="optimizer steps (default: from --epochs)")
    add("--epochs", type=positive_float, default=1.0, help="passes over the data, unless --steps is given (default: 1)")
    add("--lr", type=amount, help="peak learning rate (default: 2e-4 with adapters, 2e-5 without, at a hidden size "
        "of 4096, in inverse proportion at others)")
    add("--min_lr", type=amount, default=0.0, help="learning rate at the end of cosine and linear (default: 0)")
    add("--warmup", type=amount, default=0.03,
        help="steps of linear warmup; below 1 it is a share of all steps (default: 0.03)")
    add("--schedule", choices=("cosine", "linear", "constant"), default="cosine", help="after warmup (default: cosine)")
    add("--weight_decay", type=amount, default=0.01, help="on matrices, not on norms and biases (default: 0.01)")
    add("--clip", type=amount, help="largest global gradient norm, 0 for none (default: 1; 0 with --optim_in_backward)")
    add("--seed", type=int, default=0, help="of data order, adapters, random weights and dropout (default: 0)")

    add = parser.add_argument_group("run").add_argument
    add("--out", metavar="DIR", help="folder of the run; one that holds a run needs --resume (default: out/<date-time>)")
    add("--save_every", type=not_negative(int), default=500, metavar="STEPS", help="steps between checkpoints, and one at the "
        "end; 0: only when told to stop by SIGTERM or SIGUSR1 (default: 500)")
    add("--keep", type=whole, default=2, metavar="N", help="newest checkpoints that stay (default: 2)")
    add("--resume", nargs="?", const="auto", metavar="DIR", help="continue from the newest complete checkpoint of --out, or "
        "without --out of the newest run under out/, or start there if there is none; or from a checkpoint or a run DIR "
        "(default: a new run)")
    add("--async_save", action="store_true", help="copy a checkpoint to host memory and write it in the background "
        "(default: off)")
    add("--timeout", type=positive_float, default=1800.0, metavar="SECONDS", help="when no rank has moved for so long, name "
        "the late one and end the run; several ranks only (default: 1800)")
    add("--log_every", type=whole, default=10, metavar="STEPS", help="steps between log lines (default: 10)")
    add("--eval_every", type=whole, metavar="STEPS", help="steps between evaluations (default: at the end only)")
    add("--dry_run", action="store_true", help="print the memory plan of --world GPUs and exit; needs no GPU, no weights, no "
        "data (default: off)")
    add("--world", type=whole, metavar="N", help="ranks of --dry_run (default: 1)")
    add("--gpu_gib", type=positive_float, metavar="GIB", help="memory of a GPU for the plan; on a GPU a run is held to it "
        "(default: the card's)")
    add("--tensorboard", action="store_true", help="the numbers of metrics.jsonl for TensorBoard, too, in --out; needs pip "
        "install tensorboard (default: off)")
    add("--profile", action="store_true", help="trace.json.gz of the third step, for Perfetto (default: off)")
    add("--memory_snapshot", action="store_true", help="memory.pickle of the GPU's allocations up to the third step, for "
        "pytorch.org/memory_viz (default: off)")
    add("--merge", action="store_true", help="also write the 16-bit model with the adapter merged in (default: off)")
    add("--sample", metavar="TEXT", help="continue or answer this before and after training, '' for nothing "
        "(default: a question for the built-in data, nothing for files)")

    args = parser.parse_args(argv)
    adapters = args.lora or args.qlora
    if args.lora and args.qlora:
        parser.error("--lora and --qlora: choose one, --qlora is --lora on weights in NF4")
    for flag in ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "adapter", "merge"):
        if getattr(args, flag) and not adapters:
            parser.error(f"--{flag} needs --lora or --qlora")
    for flag in ("lora_rank", "lora_alpha", "lora_targets"):
        if args.adapter and getattr(args, flag):
            parser.error(f"--{flag} and --adapter: the adapter brings its own, leave out --{flag}")
    if args.adapter and args.random_init:
        parser.error("--adapter and --random_init: an adapter fits the weights it was trained on, leave one out")
    if args.lora_dropout is not None and args.lora_dropout >= 1:
        parser.error("--lora_dropout is a share, below 1")
    if args.world and not args.dry_run:
        parser.error("--world is for --dry_run: a run has the ranks that torchrun --nproc_per_node starts")
    if args.model in lm.PRESETS and not args.random_init and not args.dry_run:
        parser.error(f"--model {args.model} is a preset of shapes: add --random_init, or for the trained weights "
                     f"--model {lm.PRESETS[args.model][0]}")
    if not args.fsdp2 and not (args.reshard_after_forward and args.shard_embeddings):
        parser.error("--no-reshard_after_forward and --no-shard_embeddings change FSDP2: add --fsdp2")
    if "params" in (args.offload or ()) and not args.fsdp2:
        parser.error("--offload params is FSDP2's CPU offload: add --fsdp2")
    if args.replicas > 1 and not args.fsdp2:
        parser.error("--replicas are copies of a sharded model: add --fsdp2 (without it every rank holds a copy already)")
    if args.offload is not None and not args.activation_checkpointing and args.offload != ["params"]:
        parser.error("--offload activations needs --activation_checkpointing: a block's input crosses the bus in time, "
                     "all that a block computes does not (about 170 GB/s for an 8B model on an H100)")
    if args.compile and args.tiled_mlp and args.lora_dropout:
        parser.error("--compile, --tiled_mlp and --lora_dropout: a tile is compiled once with gradients and once without, and "
                     "nothing says that both draw the same dropout mask: leave one of the three out")
    if args.ce_chunk and not args.chunked_ce:
        parser.error("--ce_chunk and --no-chunked_ce: leave one out")
    if args.stochastic_rounding and args.precision != "bf16":
        parser.error("--stochastic_rounding is for weights kept in bf16: add --precision bf16")
    for flag, chosen in (("--optim adamw8bit", args.optim == "adamw8bit"), ("--stochastic_rounding", args.stochastic_rounding)):
        if chosen and not args.fused_adamw:
            parser.error(f"--no-fused_adamw and {flag}: that has a kernel of its own, leave out --no-fused_adamw")
    if args.optim_in_backward and args.grad_accum > 1:
        parser.error("--optim_in_backward needs --grad_accum 1: gradients are freed as they arrive")
    if args.optim_in_backward and args.clip:
        parser.error("--optim_in_backward and --clip: the norm of all gradients is known when they are gone, leave out --clip")
    if args.async_save and not args.save_every:
        parser.error("--async_save and --save_every 0: there is nothing to write, leave one out")
    if not 0 <= args.seed < 1 << 63:
        parser.error("--seed must be zero or a positive number")
    if args.eval_every and not args.eval_data:
        parser.error("--eval_every needs --eval_data")

    if args.offload is not None:
        args.offload = args.offload or ["activations", "params"][: 1 + args.fsdp2]
    args.offload = args.offload or []
    args.clip = (0.0 if args.optim_in_backward else 1.0) if args.clip is None else args.clip
    args.ce_chunk = (args.ce_chunk or 1024) if args.chunked_ce else 0
    if adapters:
        args.lora_rank, args.lora_alpha = args.lora_rank or 16, args.lora_alpha or 32
        args.lora_dropout, args.lora_targets = args.lora_dropout or 0.0, args.lora_targets or list(lm.LORA_TARGETS)
    if args.sample is None and not args.random_init:
        args.sample = SAMPLES.get(args.data[0], "")
    return args


# ---------------------------------------------------------------- processes


def init_processes(distributed, timeout=1800.0):
    """-> (device, rank, world, store). Under torchrun from its environment; `distributed` alone makes a world of one.

    store: the key-value store that the ranks met at, None in a world of one. timeout: seconds, of a collective.
    """
    os.environ.setdefault("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"))
    local_rank, local_world = (int(os.environ.get(key, default)) for key, default in
                               (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            n = torch.cuda.device_count()
            raise SystemExit(f"train.py: error: --nproc_per_node {local_world} needs as many GPUs, this machine has {n}")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    # gloo beside NCCL: what lives on the CPU (offloaded parameters, tokens, error flags) has collectives too
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = None
    if "RANK" in os.environ:
        wait = timedelta(seconds=timeout + 60)  # the watch is there to speak first
        store, rank, world = next(rendezvous("env://", timeout=wait))
        store = dist.PrefixStore(name_of_start(store, rank, world, timeout), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
    elif distributed:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    # torchrun sets OMP_NUM_THREADS=1, which would leave the CPU's products and the offloaded AdamW on one core a rank
    torch.set_num_threads(max(1, data.n_cores() // local_world))
    if local_rank:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # the first process of a node shows them for all
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return device, rank, world, store if world > 1 else None


def name_of_start(store, rank, world, timeout):
    """A name that the processes of this start have in common and those of no earlier one.

    torchrun keeps its store when it starts the ranks again, and gloo and NCCL then find the addresses of dead processes
    in it: on torch 2.11 and 2.13 most restarts hang or fail (pytorch #135712). Each agent counts restarts for itself, so
    the count is no name. Here rank 0 answers the processes that live, each by a word of its own.
    """
    word, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    if rank:
        store.set(f"hello {rank}", word)
        name = store.get(f"welcome {word}").decode()
        store.set(f"joined {name} {rank}", "")
        return name
    missing = set(range(1, world))
    while missing:
        for other in list(missing):
            if store.check([f"hello {other}"]):
                store.set("welcome " + store.get(f"hello {other}").decode(), word)
            if store.check([f"joined {word} {other}"]):
                missing.remove(other)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"ranks that have not come within {timeout:g} s (--timeout): {sorted(missing)}")
        time.sleep(0.002)
    return word


@contextlib.contextmanager
def together(rank, world, store):
    """An input error (ValueError, OSError) inside the block on any rank ends all of them, with one message. Without
    this, the ranks that saw no error would wait in their next collective until its timeout.

    Who is done first waits at the store, not in a collective: one rank's slow work (tokenizing a large file, a slow
    disk) runs into no timeout of the others.
    """
    error = None
    try:
        yield
    except (ValueError, OSError) as caught:
        error = caught
    if store is not None:
        meeting = (store.add("arrivals", 1) - 1) // world + 1
        while store.add("arrivals", 0) < meeting * world:
            time.sleep(min(0.001 * world, 0.1))  # the store is asked a thousand times a second, by however many
    first = torch.tensor(rank if error else world)
    if world > 1:
        dist.all_reduce(first, dist.ReduceOp.MIN)
    if first < world:
        leave()
        raise SystemExit(f"train.py: error: {error}" if first == rank else 1)


def leave():
    """Ends the process group on all ranks at once: gloo aborts a process that leaves while others still talk to it."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def share(value, rank, world):
    """Rank 0's value on every rank: anything that JSON holds."""
    if world == 1:
        return value
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8) if rank == 0 else None
    size = torch.tensor(0 if text is None else len(text))
    dist.broadcast(size, 0)
    text = torch.empty(int(size), dtype=torch.uint8) if text is None else text
    dist.broadcast(text, 0)
    return json.loads(bytes(text.numpy()))


# ---------------------------------------------------------------- the model: found, sharded, checkpointed


def find_model(name, random_init):
    """--model -> (raw config, folder of the tokenizer, folder of the weights or None for random ones, base name).

    A Hub id is downloaded once per node: huggingface_hub locks each file, and who waited finds it in the cache.
    """
    if name in lm.PRESETS:
        return lm.preset_config(name), TINY, None, name
    folder, base = (TINY, str(TINY)) if name == "tiny" else (Path(name), name)
    if not folder.is_dir():
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise ValueError(f"--model {name}: no such folder; expected tiny, a folder, a Hub id such as Qwen/Qwen3-4B, "
                             f"or with --random_init one of {', '.join(lm.PRESETS)}")
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.jinja"] + ["*.safetensors"] * (not random_init)
        try:
            folder = Path(snapshot_download(name, allow_patterns=patterns))
        except (OSError, ValueError) as error:
            raise ValueError(f"--model {name}: no such folder, and not fetched from the Hub: {error}") from error
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: no config.json: expected a model folder as transformers saves it")
    return lm.read_json(folder / "config.json"), folder, None if random_init else folder, base


def set_precision_(model, precision):
    """Stores trained parameters in float32 or bf16, frozen ones in bf16, and sets what products compute in.

    float32 masters under bf16 products are what DeepSpeed does and plain FSDP does not: at small learning rates an
    update below 1/256 of a bf16 weight is lost (accelerate #2624). NF4's bytes stay as they are.
    """
    trained = torch.bfloat16 if precision == "bf16" else torch.float32
    frozen = torch.float32 if precision == "fp32" else torch.bfloat16
    for param in model.parameters():
        if param.is_floating_point():
            param.data = param.data.to(trained if param.requires_grad else frozen)
    model.compute_dtype = frozen


def regions(checkpointing, tiles):
    """Names of the methods of a block that --compile compiles. Where blocks, or tiles of their MLP, run again in the
    backward, the last product stays out: the second run can end before it."""
    return ("heads", "add_attention", "hidden") if checkpointing or tiles else ("heads", "after_attention")


def compile_(model, fixed_length, names):
    """torch.compile on regions of every block, on the softmax-gradient of the loss and on NF4's dequantization.

    Regions and not the model: blocks are alike, so one is compiled for all, in seconds (of the first step), and between the
    regions stays what a graph would break at or depend on: attention over a list of documents, checkpointing, FSDP2's
    hooks, offload. In evaluation and samples, where shapes change, the same functions run uncompiled.
    """
    compiled = functools.partial(torch.compile, fullgraph=True)  # fullgraph: a graph break is an error

    def in_training(fast, plain):
        return lambda *args: (fast if model.training else plain)(*args)

    for block in model.model.layers:
        for name in names:
            region = getattr(block, name)
            setattr(block, name, in_training(compiled(region, dynamic=not fixed_length), region))
    for module in model.modules():
        if isinstance(module, nf4.NF4Linear):
            module.fast = True
    fused = compiled(lm.softmax_gradient_fused, dynamic=True)  # the last chunk is shorter
    model.lm_head.softmax_gradient = in_training(fused, lm.softmax_gradient)


def keep_freed_memory():
    """Tells glibc to keep what is freed. It maps every tensor of 32 MiB and more anew, in pages of 4 KiB that come zeroed and
    after a fault each: a fifth of a step on a CPU. Memory grows where sizes vary, by a few percent on packed chats (LOG.md)."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for a large block
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: give nothing back


def choose_attention_(c, n_tokens, packing, dtype, device, rank, world, n_ranks=1):
    """Times FlashAttention and cuDNN's on a row of one document, forward and backward, and turns the slower one off ->
    what to say of it. On Hopper cuDNN is ahead at long rows; packed rows have a kernel for documents, FlashAttention's.
    Without packing each row has a length of its own, for which cuDNN would make a plan of its own."""
    if device.type != "cuda":
        return "a call for each document, by FlashAttention for CPUs"
    if dtype is torch.float32:
        return "a call for each document, in float32 by the memory-efficient kernel"
    if not lm.takes_documents(dtype, c.head_dim, device):
        return (f"a call for each document: FlashAttention over documents needs an Ampere card or newer (before, --precision "
                f"fp32 takes less memory) and heads of whole 8 numbers up to 256 (here {c.head_dim})")
    if not packing:
        torch.backends.cuda.enable_cudnn_sdp(False)
        return "by FlashAttention"
    milliseconds, n_tokens = {}, min(n_tokens, 16384)
    shapes = (c.num_attention_heads // n_ranks, *[lm.shared_kv_heads(c.num_key_value_heads, n_ranks) // n_ranks] * 2)
    q, k, v = (torch.randn(1, n, n_tokens, c.head_dim, device=device, dtype=dtype, requires_grad=True) for n in shapes)
    for name, backend in (("FlashAttention", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
        try:
            with sdpa_kernel(backend):
                for event in events:  # the first round is warm-up
                    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=len(set(shapes)) > 1)
                    out.backward(out)
                    event.record()
        except RuntimeError:  # this card, dtype or head size has no such kernel
            milliseconds[name] = math.inf
            continue
        events[-1].synchronize()
        milliseconds[name] = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    milliseconds = share(milliseconds, rank, world)  # all ranks compute with the same kernel
    fastest = min(milliseconds, key=milliseconds.get)
    torch.backends.cuda.enable_flash_sdp(fastest == "FlashAttention")
    torch.backends.cuda.enable_cudnn_sdp(fastest == "cuDNN")
    times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in milliseconds.items())
    return f"packed rows by FlashAttention over documents, others by {fastest} ({times} for {n_tokens:,} tokens)"


def check_compiler(device):
    """ValueError where torch.compile would fail in the first step, minutes later."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
        if device.type == "cuda":
            import triton  # noqa: F401
    except exc.InvalidCxxCompiler as error:
        raise ValueError("--compile needs a C++ compiler: install g++, or name one in the environment variable CXX") from error
    except ImportError as error:
        raise ValueError("--compile needs triton on a GPU, which comes with torch from PyPI: pip install triton") from error


def compiled_so_far():
    """(graphs, seconds) that torch.compile has made and taken in this process."""
    from torch._dynamo.utils import compilation_time_metrics, counters

    kinds = "_compile.compile_inner", "backward._backward_impl"  # the second is compiled when it is first called
    return counters["stats"]["unique_graphs"], sum(sum(compilation_time_metrics.get(kind, ())) for kind in kinds)


class Recomputing:
    """Context in which a block knows that its forward runs for the second time."""

    def __init__(self, block):
        self.block = block

    def __enter__(self):
        self.block.recomputing = True
        nf4.keep_weights(True)

    def __exit__(self, *_):
        self.block.recomputing = False
        nf4.keep_weights(False)


def checkpoint_activations_(model, preserve_rng):
    """Keeps each block's input and recomputes the rest in the backward: 2*D bytes a token and layer in bf16, not about
    34*D, for at most a third more FLOP (arXiv:1604.06174). Dropout needs the random state back for the same mask."""
    for block in model.model.layers:
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=preserve_rng,
            context_fn=lambda block=block: (contextlib.nullcontext(), Recomputing(block)),
        )


def shard_bytes_on_old_torch_():
    """Lets fully_shard of torch 2.11 take frozen integer parameters, as 2.12 does by itself: it asks every new
    parameter for a gradient, which integers refuse, and MixedPrecisionPolicy would cast them to bf16."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12) or hasattr(_fsdp_param, "bytes_fixed"):
        return
    cls, Parameter = _fsdp_param.FSDPParam, nn.Parameter
    old_init, old_dtypes = cls._init_sharded_param, cls.init_dtype_attrs

    def init_sharded_param(self, *args):
        nn.Parameter = lambda data, requires_grad=True: Parameter(data, requires_grad and data.is_floating_point())
        try:
            old_init(self, *args)
        finally:
            nn.Parameter = Parameter

    def init_dtype_attrs(self, policy):
        old_dtypes(self, policy)
        if not self.orig_dtype.is_floating_point:
            self.param_dtype = None

    cls._init_sharded_param, cls.init_dtype_attrs = init_sharded_param, init_dtype_attrs
    _fsdp_param.bytes_fixed = True


def shard_(model, device, precision, reshard, shard_embeddings, offload_params, chunked_ce, pin=False, replicas=1):
    """FSDP2 (arXiv:2304.11277, each parameter sharded on dim 0): a block is gathered before it runs and freed after.

    One all-gather unit per block, one for the embedding and one for the head; what is left (the last norm) belongs to
    the root, which stays gathered from forward to backward. With replicas (hybrid sharding) weights are gathered inside a
    replica only, and between replicas travel 2 * (N - 1) / N times the bytes of a gradient's shard.
    """
    shard_bytes_on_old_torch_()
    world = dist.get_world_size()
    if replicas == 1:
        mesh = init_device_mesh(device.type, (world,))
    else:
        mesh = init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(
        param_dtype=model.compute_dtype,
        reduce_dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        cast_forward_inputs=False,  # or RoPE's float32 angles would arrive in bf16
    )
    offload = CPUOffloadPolicy(pin_memory=pin) if offload_params else OffloadPolicy()
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    *blocks, last = model.model.layers
    for block in blocks:
        shard(block, reshard_after_forward=reshard)
    shard(last, reshard_after_forward=False)  # the backward starts here: freeing it would gather it twice
    if shard_embeddings and not model.config.tie_word_embeddings:
        # FSDP2 keeps a shared parameter shared only inside one unit, so a tied pair stays in the root
        shard(model.model.embed_tokens, reshard_after_forward=True).set_unshard_in_backward(False)
        head = shard(model.lm_head, reshard_after_forward=chunked_ce)
        head.set_unshard_in_backward(not chunked_ce)  # the chunked loss has its gradients before the backward starts
    shard(model, reshard_after_forward=False)


PIECE = 1 << 24  # bytes


def piece_sizes(n_bytes):
    """Sizes of the pieces of a host buffer: powers of two, as torch's pinned memory comes in, and less than PIECE too much."""
    if n_bytes <= PIECE:
        return [n_bytes]
    n_bytes += -n_bytes % PIECE
    return [1 << bit for bit in reversed(range(n_bytes.bit_length())) if n_bytes >> bit & 1]


class Parked:
    """A saved tensor while it waits in host memory, in one or several pieces."""

    def __init__(self, tensor, host, pool):
        self.shape, self.dtype, self.host, self.pool, self.back = tensor.shape, tensor.dtype, host, pool, None

    def parts(self, tensor):
        """[(what waits in a piece, its place in a contiguous tensor)]."""
        numbers, ends = tensor.view(-1).view(torch.uint8), itertools.accumulate(map(len, self.host))
        places = [numbers[end - len(piece) : end] for piece, end in zip(self.host, ends)]
        return [(piece[: len(place)], place) for piece, place in zip(self.host, places)]

    def give_back(self):
        if self.host is not None:
            self.pool.append(self.host)
            self.host = None

    __del__ = give_back  # of a forward that has no backward


class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    """Keeps the tensors that autograd saves inside the context in host memory: copied out behind the forward, brought
    back ahead of the backward, both on a side stream.

    With checkpointing these are the blocks' inputs, 2*D bytes a token and layer, hidden behind a block's compute on any
    PCIe 4 card (ALST, arXiv:2506.13996). Buffers are pinned, allocated once and used again.

    Two ways to corrupt this silently, both met by torchtune, and what prevents them here:
    - memory given away while the side stream still reads it: a tensor on its way out is held until the compute stream
      has waited for its copy.
    - memory given away while a view of it lives on in the backward (torchtune #1860, #1936): a tensor on its way in is
      allocated on the compute stream and nobody counts its uses; it is free when its last view is.
    Parameters stay where they are. On a CPU nothing would be won; there the same bookkeeping runs with plain copies.
    """

    def __init__(self, device, pin=True, min_bytes=1 << 16):
        super().__init__(self.pack, self.unpack)
        self.device, self.pin, self.min_bytes = device, pin and device.type == "cuda", min_bytes
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pool = []  # pinned buffers not in use
        self.leaving = collections.deque()  # (tensor, event of its copy)
        self.parked = []  # weak references in the order of packing: the backward asks for the newest first
        self.bytes_out = 0

    def buffer(self, n_bytes):
        for i, host in enumerate(self.pool):
            if sum(map(len, host)) >= n_bytes:
                return self.pool.pop(i)
        if self.pool:  # all too small: replace one, so that rows of growing length do not add up
            self.pool.pop()
        return [torch.empty(n, dtype=torch.uint8, pin_memory=self.pin) for n in piece_sizes(n_bytes)]

    def copy_aside(self, pairs):
        """target <- source on the side stream after all compute issued so far; the event of its end (None on a CPU)."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):  # of None: nothing
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self.stream and self.stream.record_event()

    def let_go(self, keep):
        """Drops tensors that have left; beyond the newest `keep`, compute waits for their copies first."""
        while len(self.leaving) > keep:
            _, event = self.leaving.popleft()
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)

    def pack(self, tensor):
        if isinstance(tensor, nn.Parameter) or tensor.device.type != self.device.type or tensor.nbytes < self.min_bytes:
            return tensor
        tensor = tensor.contiguous()
        parked = Parked(tensor, self.buffer(tensor.nbytes), self.pool)
        self.leaving.append((tensor, self.copy_aside(parked.parts(tensor))))
        self.let_go(keep=1)  # one copy behind the compute; more would only keep more on the device
        self.parked.append(weakref.ref(parked))
        self.bytes_out += tensor.nbytes
        return parked

    def bring_back(self, parked):
        if parked.back is None:
            tensor = torch.empty(parked.shape, dtype=parked.dtype, device=self.device)
            parked.back = tensor, self.copy_aside([(place, piece) for piece, place in parked.parts(tensor)])

    def unpack(self, parked):
        if isinstance(parked, torch.Tensor):
            return parked
        if parked.host is None:
            raise RuntimeError("--offload activations: a second backward asks for what the first one has used up")
        self.let_go(keep=0)
        self.bring_back(parked)
        (tensor, event), parked.back = parked.back, None
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
        parked.give_back()  # its next user writes on the same side stream, behind the copy that read it
        self.parked = [other for other in self.parked if other() is not None and other().host is not None]
        if self.parked:  # the next one starts its way back while this block computes
            self.bring_back(self.parked[-1]())
        return tensor


# ---------------------------------------------------------------- optimizer, learning rate, evaluation


def make_optimizer(params, lr, weight_decay, fused, eight_bit=False, stochastic_rounding=False, compiled=False):
    """AdamW, decay on matrices only: pulling norms and biases towards zero regularises nothing.

    All state is allocated here: the first step is then at the peak of memory, and none after it can run out.
    """
    groups = [{"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
              {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if eight_bit or stochastic_rounding:
        return CompactAdamW(groups, lr, eight_bit, stochastic_rounding, compiled)
    optimizer = torch.optim.AdamW(groups, lr=lr, fused=fused)
    for p in params:  # as torch would at the first step
        optimizer.state[p] = {"step": torch.zeros((), device=p.device if fused else "cpu"),
                              "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # torch's defaults
MOMENTS = "exp_avg", "exp_avg_sq"  # torch's names
BLOCK = 256  # neighbours in a row that share a scale
# The codes of a moment are small floats with 3 bits of mantissa, relative to the largest magnitude of the block: the bits
# 20 to 27 of a float32 from 2 up. A shift encodes them, and between two codes the value is linear, which dithering needs.
FLOATS = (1024 + torch.arange(256, dtype=torch.int32) << 20).view(torch.float32)  # 2, 2.25, ... 1.875 * 2**32
# a hair below the largest code, so that rounding cannot carry the largest magnitude of a block beyond it
M_TOP, V_TOP = (FLOATS[127].item() - 2) * (1 - 2**-21), FLOATS[255].item() * (1 - 2**-21)


@functools.cache
def code_levels(device):
    """What the 256 codes of m and of v stand for, relative to the largest magnitude of their block. Steps of v: 6 to 12 %.

    m: a sign and 127 magnitudes down to 2e-6, closing in on zero evenly. v: down to 2.5e-10, 1.6e-5 in its root, without
    a zero: what is smaller is rounded up, because a v of 0 under an m that is not 0 would divide by eps.
    """
    return (torch.cat([FLOATS[:128] - 2, 2 - FLOATS[:128]]) / M_TOP).to(device), (FLOATS / V_TOP).to(device)


def dither_words(step, number, start, stop, D, device):
    """Odd int32 factors for rows start..stop of the number-th parameter: rows_3N (for m, v, the weight) and cols_D.

    The low bits of rows[i] * cols[j] are the random bits of element (i, j): uniform, and independent between any two
    elements or steps, for one multiplication. They depend on place and step alone: no world size changes them, and
    there is no generator to save. torch.rand takes six times as long or more on one CPU core, and uses no other.
    """
    key = lm.mix(lm.mix(step) + number)  # plain ints: nothing is copied to the device
    rows_N, cols_D = torch.arange(start, stop, device=device), torch.arange(D, device=device)
    rows_3N = torch.stack([lm.mix(lm.mix(key + salt) + rows_N) for salt in (1, 2, 3)])
    return (rows_3N | 1).to(torch.int32), (lm.mix(key + cols_D) | 1).to(torch.int32)


def drop_bits(x, dither, n):
    """Bits of the float32 x above the lowest n, rounded up with the probability that makes the mean right."""
    return (dither & (1 << n) - 1).add_(x.view(torch.int32)).bitwise_right_shift_(n)


def round_to(dtype, x, dither):
    """float32 -> bf16 with x as its mean over all dithers (arXiv:2010.06192); float32 stays as it is."""
    return x if dtype is torch.float32 else drop_bits(x, dither, 16).bitwise_left_shift_(16).view(torch.float32).to(dtype)


def read_moment(stored, scales, levels):
    """-> float32, which may be `stored` itself."""
    if stored.dtype is not torch.uint8:
        return stored.float()
    return levels.index_select(0, stored.reshape(-1).int()).view(stored.shape).mul_(scales)


def write_moment_(stored, scales, x, signed, dither, skip):
    if stored.dtype is not torch.uint8:
        stored.copy_(torch.where(skip, stored, round_to(stored.dtype, x, dither)))
        return
    y = x.abs() if signed else x
    largest = y.amax(-1, keepdim=True)
    up = (M_TOP if signed else V_TOP) / largest.clamp_min(1e-28)  # below it all is nothing beside eps
    y = (y * up).add_(2) if signed else (y * up).clamp_min_(2)
    codes = drop_bits(y, dither, 20)
    if signed:
        codes = codes.bitwise_and_(127).bitwise_or_((x.view(torch.int32) >> 24).bitwise_and_(128))
    stored += (codes.to(torch.uint8) - stored) * ~skip  # modulo 256; torch.where is ten times slower on a CPU's bytes
    scales.copy_(torch.where(skip, scales, largest))


def adamw_(w, grad, m, v, m_scales, v_scales, levels, rows, cols, skip, keep, lr, v_unbias, stochastic_rounding):
    """A step of AdamW on w, m and v in place, computed in float32. Where the bool `skip` is true nothing changes. keep is
    1 - lr * decay, lr the rate over the bias of m, v_unbias the root of that of v.

    Blocks are [n, b, 256] of n rows, scales [n, b, 1], rows [3, n, 1, 1] and cols [b, 256] of dither_words. v decays by
    0.1 % a step, far below a step of its code (or of bf16): rounded to the nearest it would stand still. So rounding
    is random and right in the mean, of v and not of its root, because it is v that is averaged over the steps.
    """
    grad = grad.float()
    new_m = torch.lerp(read_moment(m, m_scales, levels[0]), grad, 1 - BETA1)
    new_v = (read_moment(v, v_scales, levels[1]) * BETA2).addcmul_(grad, grad, value=1 - BETA2)
    write_moment_(m, m_scales, new_m, True, rows[0] * cols, skip)
    write_moment_(v, v_scales, new_v, False, rows[1] * cols, skip)
    size = new_v.sqrt_().div_(v_unbias).add_(EPS)
    new_w = (w.float() * keep).sub_(new_m.mul_(lr).div_(size))
    new_w = round_to(w.dtype, new_w, rows[2] * cols) if stochastic_rounding else new_w.to(w.dtype)
    w.copy_(torch.where(skip, w, new_w))


class CompactAdamW(torch.optim.Optimizer):
    """AdamW of --optim adamw8bit (blocks as in arXiv:2110.02861): 2 + 8/256 bytes of state a parameter, not 8; and of
    --stochastic_rounding: the moments too are rounded at random, 0.999 of a bf16 number is that number again.

    Blocks lie within a row: a rank works on its own rows, and their bytes do not depend on the world size. State has
    the parameter's shape and sharding, the scales of [N, D] are [N, D/256]. Norms and biases keep float32 moments.
    """

    def __init__(self, groups, lr, eight_bit, stochastic_rounding, compiled):
        super().__init__(groups, {"lr": lr})
        # a graph each for whole blocks, for the shorter ones, for vectors
        self.adamw_ = torch.compile(adamw_, dynamic=True) if compiled else adamw_
        self.stochastic_rounding, self.found_inf, self.numbers = stochastic_rounding, None, {}
        for p in itertools.chain(*(group["params"] for group in self.param_groups)):
            self.numbers[p] = len(self.numbers)
            dtype = torch.float32 if p.dim() < 2 else torch.uint8 if eight_bit else p.dtype
            self.state[p] = {"step": torch.zeros(())}  # on the CPU: reading it waits for nothing
            for moment in MOMENTS:
                self.state[p][moment] = torch.zeros_like(p, dtype=dtype)
                if dtype is torch.uint8:
                    self.state[p][f"{moment}_scales"] = scales_like(p, -(-p.shape[1] // BLOCK))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.step_one_(p, group["lr"], group["weight_decay"])

    def step_one_(self, p, lr, weight_decay):
        state, (_, start) = self.state[p], lm.local(p)
        state["step"] += 1
        w, grad, m, v = (rows_of(x) for x in (p, p.grad, state["exp_avg"], state["exp_avg_sq"]))
        scales = [rows_of(state[f"{moment}_scales"]) if m.dtype is torch.uint8 else None for moment in MOMENTS]
        step, (N, D) = int(state["step"]), w.shape
        rows_3N, cols_D = dither_words(step, self.numbers[p], start, start + N, D, w.device)
        levels = code_levels(w.device)
        # tensors, because torch.compile would take a number for a constant
        numbers = torch.tensor([1 - lr * weight_decay, lr / (1 - BETA1**step), (1 - BETA2**step) ** 0.5], dtype=torch.float64)
        skip = (torch.zeros((), device=w.device) if self.found_inf is None else self.found_inf) > 0
        # float32 temporaries of 16 MiB each on a GPU; of 4 MiB on a CPU, where larger ones are new pages
        n, full = max(1, (1 << (20 if w.device.type == "cpu" else 22)) // D), D // BLOCK * BLOCK
        for i, (first, last) in itertools.product(range(0, N, n), ((0, full), (full, D))):
            if first < last:  # whole blocks, then the shorter one at the end of a row
                split = functools.partial(torch.unflatten, dim=-1, sizes=(-1, min(BLOCK, last - first)))
                self.adamw_(*(split(x[i : i + n, first:last]) for x in (w, grad, m, v)),
                            *(x if x is None else x[i : i + n, first // BLOCK : -(-last // BLOCK), None] for x in scales),
                            levels, rows_3N[:, i : i + n, None, None], split(cols_D[first:last]), skip, *numbers.unbind(),
                            self.stochastic_rounding)

    def load_state_dict(self, state_dict):
        """In place: torch's own would cast codes and scales to the dtype of the parameter."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            for p, number in zip(group["params"], saved["params"], strict=True):
                for name, tensor in self.state[p].items():
                    tensor.copy_(state_dict["state"][number][name])


def rows_of(x):
    """This rank's rows of a parameter or its state as a plain matrix."""
    x, _ = lm.local(x)
    return x if x.dim() > 1 else x[:, None]


def scales_like(p, n_blocks):
    """Float32 zeros [N, n_blocks] with the sharding of p [N, D]."""
    zeros = torch.zeros(len(lm.local(p)[0]), n_blocks, device=p.device)
    if not isinstance(p, DTensor):
        return zeros
    return DTensor.from_local(zeros, p.device_mesh, p.placements, run_check=False, shape=(p.shape[0], n_blocks),
                              stride=(n_blocks, 1))


def lr_at(step, steps, warmup, schedule, lr, min_lr):
    """Learning rate of step 0, 1, ...: linear warmup, then constant, or linear or cosine down to min_lr."""
    warmup = warmup * steps if warmup < 1 else warmup
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    if schedule == "constant":
        return lr
    left = 1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return min_lr + (lr - min_lr) * left


LATE = 2**30  # bytes of whole gradients that may wait for the last micro-batch before they are reduced


def average_gradients_(params, world):
    """The mean over ranks where every rank holds the whole model. All-reduces are queued, then waited for."""
    work = [dist.all_reduce(p.grad, async_op=True) for p in params]
    for handle, p in zip(work, params, strict=True):
        handle.wait()
        p.grad.div_(world)


def clip_gradients_(params, clip):
    """Scales the gradients down to a global L2 norm of `clip` (0: not at all) -> the norm before, on the device.

    Under FSDP2 the norm is a DTensor of partial sums: only full_tensor() is the norm of all ranks (pytorch #121020).
    """
    norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if clip:
        nn.utils.clip_grads_with_norm_(params, clip, norm)
    return norm


class StepInBackward:
    """--optim_in_backward: each parameter is updated as soon as its gradient is complete, and the gradient freed
    (LOMO, arXiv:2306.09782). No more gradients are alive than those of one FSDP unit, or one without FSDP2.

    autograd calls the hooks, or FSDP2 after its reduce-scatter, on the stream of that; every rank in the same order. A
    gradient that is not finite stops this rank's updates from there on; `bad` is that flag.
    """

    def __init__(self, optimizer, params, fused, bad, world, sharded, device, replicas=1):
        self.optimizer, self.fused, self.bad, self.world, self.sharded = optimizer, fused, bad, world, sharded
        self.replicas = replicas
        self.offloaded = device.type != bad.device.type
        self.norm_squared = torch.zeros_like(bad)
        for p in params:
            p.register_post_accumulate_grad_hook(self.update)

    @torch.no_grad()
    def update(self, p):
        if self.offloaded:  # torch 2.11 calls while the gradient is still on its way to the CPU, later ones do not
            torch.cuda.current_stream().synchronize()
        if self.world > 1 and not self.sharded:
            average_gradients_([p], self.world)
        norm = torch.linalg.vector_norm(lm.local(p.grad)[0]).float()  # dtype=float32 would copy a bf16 gradient on a CPU
        self.norm_squared += norm.square()
        torch.maximum(self.bad, (~norm.isfinite()).float(), out=self.bad)
        if self.fused:
            self.optimizer.found_inf = self.bad
        if self.fused or not self.bad:  # only the fused kernel (and ours) reads the flag on the device
            self.optimizer.step()  # for p alone: no other gradient is alive
        p.grad = None

    def norm(self):
        """The gradient norm of the step; where gradients are shards it and `bad` are made those of all ranks."""
        if self.sharded:
            for x, op in ((self.norm_squared, dist.ReduceOp.SUM), (self.bad, dist.ReduceOp.MAX)):
                dist.all_reduce(x, op)
            self.norm_squared /= self.replicas  # each holds the same gradients
        return self.norm_squared.sqrt()


def evaluate(model, loader, device, world, interrupted=lambda: False):
    """-> (mean loss per supervised token, number of those), over all rows once, through the loss path of training; None
    once interrupted(), asked by all ranks before each batch, is true."""
    model.eval()
    loss_sum, n = torch.zeros((), dtype=torch.float64, device=device), 0
    with torch.no_grad():
        for batch in loader.once():
            if stopped := interrupted():
                break
            b = batch.to(device)
            loss_sum += model(b.tokens, b.targets, b.positions, b.spans, b.keep_S)
            n += len(b.keep_S)
    model.train()
    lm.reshard_(model)
    if stopped:
        return None
    sums = torch.tensor([loss_sum, n], dtype=torch.float64)
    if world > 1:
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).item(), int(sums[1])


# bf16 matrix products, dense, FLOP/s, by a part of the device's name; the first that fits
PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12,
         "RTX 5090": 209e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "L40S": 362e12, "A6000": 155e12, "A10G": 70e12}


def step_flops(c, n_targets, n_tokens, n_squares, n_adapter):
    """FLOP that a step needs, recomputation not counted. Per weight and token: 2 forward, 2 for the input's gradient, 2
    for the weight's own where it trains (n_adapter: adapter parameters, None without). The head works on supervised
    tokens only. Attention: 4*H*K per pair of tokens forward, half of the pairs masked, and 2.5 times that backward;
    n_squares is the sum of the squared document lengths."""
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    block = c.hidden_size * (2 * q + 2 * kv + 3 * c.intermediate_size)
    products = block * c.num_hidden_layers * n_tokens + c.hidden_size * c.vocab_size * n_targets
    attention = 2 * q * c.num_hidden_layers * n_squares * 3.5
    return attention + (6 * products if n_adapter is None else 4 * products + 6 * n_adapter * n_tokens)


# ---------------------------------------------------------------- the memory plan

KINDS = ("weights", "NF4 codes and scales", "adapters", "optimizer", "gradients", "saved activations", "block workspace",
         "logits chunk", "unsharded units")


def plan(args, c, world, tokens, cuda):
    """Where a step's memory goes, counted before anything is allocated -> ({moment: {kind: bytes}}, {kind: host bytes}).

    Bytes are those of rank 0, which holds the largest shards; moments are those at which a step can reach its peak.
    Counted is every tensor that autograd, FSDP2 and the code of this project hold, for micro-batches of `tokens`
    tokens, all supervised, a document a row. Not counted: CUDA's context, NCCL's buffers, the allocator's fragmentation.
    tests/test_plan.py holds the sums to what torch's allocator counts.
    """
    D, F, V, L, N = c.hidden_size, c.intermediate_size, c.vocab_size, c.num_hidden_layers, tokens
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    full = not (args.lora or args.qlora)
    mixed = args.precision == "mixed"
    size = 4 if args.precision == "fp32" else 2  # bytes of a number in products; next: in what trains, and on the wire
    kept = reduced = 2 if args.precision == "bf16" else 4
    shards = world // args.replicas if args.fsdp2 else 1
    split, kv_heads = args.sequence_parallel > 1, lm.shared_kv_heads(c.num_key_value_heads, args.sequence_parallel)

    # ---- parameters, as lists of (rows, width)
    mlp = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    linears = {"q_proj": (q, D), "k_proj": (kv, D), "v_proj": (kv, D), "o_proj": (D, q), **mlp}
    vectors = [(D, 1), (D, 1)]
    vectors += [(q, 1), (kv, 1), (kv, 1)] * (c.model_type == "qwen2") + [(c.head_dim, 1)] * 2 * (c.model_type == "qwen3")
    targets = [] if full else args.lora_targets
    lora = {name: [(args.lora_rank, linears[name][1]), (linears[name][0], args.lora_rank)] for name in targets}
    trained = [*linears.values(), *vectors] if full else list(itertools.chain(*lora.values()))
    trained_mlp = list(mlp.values()) if full else [shape for name in mlp if name in lora for shape in lora[name]]
    frozen = [] if full else vectors + list(linears.values()) * (not args.qlora)
    codes = [(rows, width // 2 + nf4.scale_bytes(width)) for rows, width in linears.values()] * args.qlora
    ends = [(V, D)] * (1 if c.tie_word_embeddings else 2)

    def share(shapes):  # numbers on rank 0: FSDP2 cuts the rows of each tensor like torch.chunk
        return sum(-(-rows // shards) * width for rows, width in shapes)

    def whole(shapes):  # numbers in the gathered tensors, padding included
        return shards * share(shapes)

    def pinned(n_bytes):  # torch's allocator of pinned memory rounds up to a power of two
        return 1 << (n_bytes - 1).bit_length() if cuda else n_bytes

    def state_parts(shape):  # bytes of AdamW's tensors: two moments, and the scales of two
        n_rows, width = -(-shape[0] // shards), shape[1]
        if args.optim == "adamw":
            return [kept * n_rows * width] * 2
        return [n_rows * width] * 2 + [4 * n_rows * -(-width // BLOCK)] * 2 if width > 1 else [4 * n_rows] * 2

    def state(shapes):
        return sum(sum(state_parts(shape)) for shape in shapes)

    outside = [*ends, (D, 1)]
    n_trained = L * share(trained) + full * share(outside)
    n_frozen = 0 if full else L * share(frozen) + share(outside)
    always = {"weights": n_frozen * size + full * n_trained * kept, "NF4 codes and scales": L * share(codes),
              "adapters": (not full) * n_trained * kept, "optimizer": L * state(trained) + full * state(outside)}
    host = {}
    if "params" in args.offload:
        host = {**always, "gradients": n_trained * kept}
        always = {}
    if args.async_save:
        held = pinned if "params" not in args.offload else int
        host["copy of a checkpoint"] = sum(n * held(part) for shapes, n in ((trained, L), (outside, full)) for shape in shapes
                                           for part in (kept * share([shape]), *state_parts(shape)))
    largest = max(share([shape]) for shape in [*trained, *ends * full])
    in_step = 0 if args.fused_adamw else 3 * kept * largest
    if args.optim == "adamw8bit" or args.stochastic_rounding:
        in_step = 28 * min(1 << (22 if cuda else 20), largest)  # float32 temporaries of a chunk
    in_step = 0 if "params" in args.offload else in_step

    # ---- gathered units. Without FSDP2 there are none, but float32 weights are cast in each product, and autograd keeps
    # the copies for the backward
    unit = whole(frozen) * size + whole(codes) + whole(trained) * size if args.fsdp2 else mixed * share(trained) * size
    end = size * whole(ends[:1]) if args.fsdp2 else mixed * full * size * share(ends[:1])
    apart = args.fsdp2 and args.shard_embeddings and not c.tie_word_embeddings
    root = size * whole(ends) if args.fsdp2 and not apart else 0
    fetched = unit if shards > 1 else 0  # the all-gather's own buffer, of this unit or the next
    held = L if not (args.reshard_after_forward and (args.fsdp2 or args.activation_checkpointing)) else 1

    # ---- activations, bytes a token: what a block saves, and what its backward adds
    normed = 0 if cuda else 4 * full + 4 * (size == 2)  # torch's RMSNorm on a CPU is made of parts that save float32 copies
    mask = 1 if cuda else size  # of dropout, which keeps a copy of the input for each adapter

    def inputs(*names):  # of products whose weights train, kept for the gradients of those
        used = [linears[name][1] for name in names if full or name in targets]
        return sum(used) * (size + mask) if args.lora_dropout else size * max(used, default=0)

    repeated = q if cuda and size == 4 else kv  # keys and values as attention saves them, in float32 for each query head
    attention = size * (2 * q + 2 * repeated + len(targets) * (args.lora_rank or 0)) + normed * D + 4 * c.num_attention_heads
    attention += inputs("q_proj", "k_proj", "v_proj") + (inputs("o_proj") if args.lora_dropout else 0)
    # between the all-to-alls: key heads with their copies, and what goes and comes beside what is kept, which is a view of
    # what came unless it is repeated
    exchanged = split * size * (q + 2 * kv_heads * c.head_dim)
    attention += exchanged and exchanged - size * (q + 2 * kv * (repeated == kv)) + inputs("o_proj") * (not args.lora_dropout)
    if c.model_type == "qwen3":
        attention += (size + normed) * (q + kv)
    feed = size * 3 * F + normed * D + inputs("gate_proj", "up_proj")
    down = inputs("down_proj")
    in_feed = max(3 * size * F, down + 2 * size * F)  # gradients beside them, once the input of down_proj is gone and before
    middle = 0 if normed and size == 2 else size * D  # the residual between the two; a float32 copy stands for it there
    # the kernel: float32 sums of dq, and dk, dv for each query head
    kernel = 4 * q + 2 * size * q * (c.num_attention_heads > kv_heads) if cuda else 0
    # one dequantized weight, and the int32 and float32 numbers of a chunk of it
    weight = (F * D * size + 6 * min(nf4.CHUNK, F * D)) if args.qlora else 0
    # what the block's recomputation has dequantized waits for the backward; tiles of the MLP do their own
    recomputed = size * args.qlora * args.activation_checkpointing
    reused_attention = recomputed * (2 * q + 2 * kv) * D
    reused_mlp = recomputed * 2 * F * D * (not args.tiled_mlp)
    in_attention = N * (attention + size * (D + q) + max(size * (q + 2 * kv), 2 * exchanged) + kernel) + reused_attention
    in_mlp = N * (attention + middle + feed + size * D) + max(N * in_feed, N * (down + size * F) + weight)
    in_mlp += reused_attention + reused_mlp
    saved, tile = N * (attention + 2 * middle + feed + down), min(args.tiled_mlp or N, N)
    tile_sums = 0
    if args.tiled_mlp:
        in_tile = tile * (feed + size * 2 * D) + max(tile * in_feed, tile * (down + size * F) + weight)
        in_mlp = N * (attention + size * 3 * D) + reused_attention + in_tile
        saved = N * (attention + middle + size * D)
        tile_sums = whole(trained_mlp) * (size + 4 * (tile < N))
    checkpoint = N * size * D
    offloaded = "activations" in args.offload  # then two inputs are on the device: the one in use, and one on its way
    if args.activation_checkpointing:
        saved = checkpoint
    if offloaded:
        host["activations"] = (L - 1) * sum(map(pinned, piece_sizes(checkpoint)))

    def activations(n):  # of the first n blocks, while the n-th is the one in work
        return min(n, 2) * saved if offloaded else n * saved

    # ---- gradients
    deferred = args.fsdp2 and args.grad_accum > 1 and n_trained * shards * 4 <= LATE
    on_device = 0 if "params" in args.offload else kept

    def gradients(n):  # of n parameters of this rank, kept until the step
        # between replicas FSDP2 sends a buffer on the device, which it holds until the backward ends, or the last micro-batch's
        here = reduced * (args.replicas > 1) if args.optim_in_backward or not on_device else on_device
        if args.grad_accum > 1:  # those of earlier micro-batches
            return (reduced * shards if deferred else here) * n_trained
        return here * n

    n_head = share([*ends[:1], (D, 1)]) * full
    in_flight = reduced * (shards + 1) if args.fsdp2 else 0  # reduce-scatter: its input, and its output
    before = 0 if apart or not args.fsdp2 else size * whole(ends[:1]) * full  # a tied pair waits for the whole backward

    def backward(i):
        """Block i: the largest of its MLP, its attention, and the reduce-scatter of its gradients."""
        reducing = reduced * whole(trained if i < L - 1 else ends[:1] * full * apart) * args.fsdp2
        done = gradients(n_head + (L - 1 - i) * share(trained)) + before
        waiting = activations(i + 1) - (0 if args.activation_checkpointing else saved - checkpoint)
        units = held * unit + root + (fetched if i else 0)
        # the input of the first block needs no gradient under NF4: its q, k and v are not used again
        less = 0 if i else recomputed * (q + 2 * kv) * D
        of_mlp = size * whole(trained_mlp) if args.fsdp2 else kept * share(trained_mlp)
        of_block = size * whole(trained) if args.fsdp2 else kept * share(trained)
        choices = [
            {"gradients": done + reducing + tile_sums, "saved activations": waiting, "block workspace": in_mlp - less,
             "unsharded units": units},
            {"gradients": done + reducing + of_mlp, "saved activations": waiting, "block workspace": in_attention - less,
             "unsharded units": units},
            {"gradients": done + of_block + in_flight * share(trained), "saved activations": waiting,
             "block workspace": 2 * checkpoint + in_step * args.optim_in_backward, "unsharded units": units - unit},
        ]
        return max(choices, key=lambda choice: sum(choice.values()))

    # ---- head and loss: the forward, which computes the gradients chunk by chunk, and the backward
    chunk = min(args.ce_chunk or N, N)
    logits = chunk * V * (4 + size % 4)
    head_grads = whole(ends[:1]) * full
    if args.chunked_ce:
        sums = 4 * head_grads if chunk < N else 0  # the gradients of several chunks are added up in float32
        logits, loss = sums + max(logits, chunk * V * size + head_grads * size), 2 * checkpoint
    else:
        logits, loss = 12 * N * V, (full - 1) * checkpoint
    head = {"gradients": gradients(0), "saved activations": activations(L) + (2 + normed / size) * checkpoint + loss,
            "logits chunk": logits,
            "unsharded units": held * unit + root + end * (2 if fetched and apart and args.chunked_ce else 1)}
    turning = {"gradients": gradients(0) + head_grads * size + in_flight * share(ends[:1]) * full,
               "saved activations": activations(L) + (4 + normed / size) * checkpoint,
               "unsharded units": held * unit + root}
    rest = n_trained - full * share(ends[:1])
    last = {"gradients": gradients(rest) + before + (size * shards if args.fsdp2 else kept) * share(ends[:1]) * full
            + in_flight * share(ends[:1]) * full, "saved activations": 2 * checkpoint, "unsharded units": root}
    moments = {"head and loss": max(head, turning, key=lambda kinds: sum(kinds.values()))}
    block = max(range(L), key=lambda i: sum(backward(i).values()))
    moments[f"backward, block {block}"] = backward(block)
    if full:
        moments["embedding's gradient"] = last
    if not args.optim_in_backward:
        moments["step"] = {"gradients": on_device * n_trained, "block workspace": in_step}
    tables = N * (4 * c.head_dim + 32)  # RoPE's cos and sin; the micro-batch's integers
    for kinds in moments.values():
        kinds |= always
        kinds["saved activations"] = kinds.get("saved activations", 0) + tables
    return moments, host


def tokens_of(args, length, of=None):
    """Tokens of a rank's micro-batch of rows of `length`; or `length` is that of the flags `of`, which args change."""
    length = length if of is None else length * of.sequence_parallel // of.batch_size
    return -(-args.batch_size * length // args.sequence_parallel)


def peak_of(moments):
    """(name of the largest moment, its bytes)."""
    name = max(moments, key=lambda moment: sum(moments[moment].values()))
    return name, sum(moments[name].values())


def cheaper(args, c, world, tokens, cuda):
    """[(flags, {name: value of them})]: what may lower the peak and is not in use, cheapest in time first. Added to the
    command line, each is accepted; offloading is no choice on a CPU, whose memory is the host's."""
    full, fused = not (args.lora or args.qlora), "" if args.fused_adamw else "--fused_adamw "
    both = "--offload activations params"  # the last --offload on a command line is the one that counts

    def rows(times):  # --grad_accum that keeps the rows a step, where there can be one
        return args.grad_accum * (1 if args.optim_in_backward else times)

    def accumulate(times):
        return "" if args.optim_in_backward else f" --grad_accum {rows(times)}"

    choices = [
        ("--fused_adamw", not args.fused_adamw, {"fused_adamw": True}),
        ("--chunked_ce", not args.chunked_ce, {"chunked_ce": True, "ce_chunk": 1024}),
        ("--reshard_after_forward", args.fsdp2 and not args.reshard_after_forward, {"reshard_after_forward": True}),
        ("--shard_embeddings", args.fsdp2 and not args.shard_embeddings, {"shard_embeddings": True}),
        ("--fsdp2", world > 1 and not args.fsdp2, {"fsdp2": True}),
        ("--replicas 1", args.replicas > 1, {"replicas": 1}),
        ("--optim_in_backward", args.grad_accum == 1 and not args.clip and not args.optim_in_backward,
         {"optim_in_backward": True}),
        (fused + "--optim adamw8bit", full and args.optim == "adamw", {"optim": "adamw8bit", "fused_adamw": True}),
        ("--activation_checkpointing", not args.activation_checkpointing, {"activation_checkpointing": True}),
        (both if args.offload else "--offload activations", cuda and args.activation_checkpointing and "activations" not in
         args.offload, {"offload": ["activations", *args.offload]}),
        ("--tiled_mlp 4096", tokens > 4096 and not args.tiled_mlp, {"tiled_mlp": 4096}),
        ("--ce_chunk 256", args.chunked_ce and args.ce_chunk > 256, {"ce_chunk": 256}),
        (f"--batch_size 1{accumulate(args.batch_size)}", args.batch_size > 1,
         {"batch_size": 1, "grad_accum": rows(args.batch_size)}),
        *((f"--sequence_parallel {n}{accumulate(n // args.sequence_parallel)}",
           n % args.sequence_parallel == 0 and world % n == 0 == c.num_attention_heads % n,
           {"sequence_parallel": n, "grad_accum": rows(n // args.sequence_parallel)})
          for n in range(args.sequence_parallel + 1, min(world, 8) + 1)),  # inside a node
        ("--optim_in_backward --clip 0", args.grad_accum == 1 and args.clip and full, {"optim_in_backward": True, "clip": 0}),
        (fused + "--precision bf16 --stochastic_rounding", args.precision != "bf16" and full,
         {"precision": "bf16", "stochastic_rounding": True, "fused_adamw": True}),
        ("--fsdp2 " * (not args.fsdp2) + (both if args.offload else "--offload params"), cuda and "params" not in args.offload,
         {"fsdp2": True, "offload": [*args.offload, "params"]}),
        ("--qlora" + " in place of --lora" * args.lora, not args.qlora, {
            "lora": False, "qlora": True, "lora_rank": args.lora_rank or 16,
            "lora_targets": args.lora_targets or list(lm.LORA_TARGETS)}),
    ]
    return [(flags, changes) for flags, possible, changes in choices if possible]


def peak_with(args, c, world, tokens, cuda, *changes):
    """Bytes of the peak with other values of some flags."""
    changed = argparse.Namespace(**functools.reduce(dict.__or__, changes, vars(args)))
    return peak_of(plan(changed, c, world, tokens_of(changed, tokens, args), cuda)[0])[1]


def savings(args, c, world, tokens, cuda):
    """{flags: GiB that they save by themselves}, cheapest in time first."""
    now = peak_with(args, c, world, tokens, cuda)
    offers = cheaper(args, c, world, tokens, cuda)
    saved = {flags: now - peak_with(args, c, world, tokens, cuda, changes) for flags, changes in offers}
    return {flags: n / 2**30 for flags, n in saved.items() if n > 0.005 * now}


def way_to_fit(args, c, world, tokens, cuda, room):
    """Flags that bring the peak below `room` bytes, cheapest first, or where that cannot be, all that help
    -> (flags, peak, bytes of host memory)."""

    def offers(changed):
        return dict(cheaper(changed, c, world, tokens_of(changed, tokens, args), cuda))

    def adopt(added):  # one by one: what is possible depends on those before; None where one is not
        changed = args
        for flags in added:
            if flags not in offers(changed):
                return None
            changed = argparse.Namespace(**vars(changed) | offers(changed)[flags])
        return changed

    def peak(changed):
        return peak_with(args, c, world, tokens, cuda, vars(changed))

    added, now, tried = [], peak(args), set()
    while now > room and (rest := [flags for flags in offers(adopt(added)) if flags not in tried]):
        tried.add(rest[0])
        if (least := peak(adopt([*added, rest[0]]))) < 0.99 * now:
            added, now, tried = [*added, rest[0]], least, set()  # what did not help before may help now
    for flags in reversed(added[:]):  # what a later flag has made needless
        fewer = [other for other in added if other != flags]
        changed = adopt(fewer)
        if changed and peak(changed) <= room:
            added, now = fewer, peak(changed)
    changed = adopt(added)
    host = sum(plan(changed, c, world, tokens_of(changed, tokens, args), cuda)[1].values())
    return [flags for flags in added if not any(flags + " " in other for other in added)], now, host


OVERHEAD = 2**30  # assumed for CUDA's context, NCCL and fragmentation; not measured


def print_plan(args, c, world, tokens, cuda, room, place, host_room=None):
    """The plan as a table, whether it fits into `room` bytes of `place` (None: not known), and what would make it fit.

    host_room: bytes of host memory that a rank may take, None where it is not known.
    """
    moments, host = plan(args, c, world, tokens, cuda)
    name, peak = peak_of(moments)
    unit, unit_name = (2**30, "GiB") if peak >= 2**30 else (2**20, "MiB")
    rows = f"{args.batch_size} x {tokens * args.sequence_parallel // args.batch_size} tokens"
    rows += f" over {args.sequence_parallel} ranks" * (args.sequence_parallel > 1)
    print(f"memory plan, {unit_name} of rank 0 of {world}, micro-batches of {rows}; * is the peak")
    print(f"  {'':<22}" + "".join(f"{moment + '*' * (moment == name):>22}" for moment in moments))
    table = {kind: [kinds.get(kind, 0) for kinds in moments.values()] for kind in KINDS}
    table["all"] = [sum(kinds.values()) for kinds in moments.values()]
    for kind, values in table.items():
        if any(values):
            print(f"  {kind:<22}" + "".join(f"{value / unit:>22.2f}" for value in values))
    if host:
        parts = ", ".join(f"{kind} {n / unit:.2f}" for kind, n in host.items() if n)
        wanted = sum(host.values())
        print(f"  host memory of a rank: {wanted / unit:.2f} {unit_name} ({parts}) beside the process itself" + (
            "" if host_room is None or wanted <= host_room else f": does not fit, {host_room / unit:.2f} of it are free"))
    if room is None:
        return
    need = peak + (OVERHEAD if cuda else sum(host.values()))  # a CPU's memory is the host's
    says = f"  {need / 2**30:.2f} GiB" + " with 1 GiB for CUDA and NCCL" * cuda + f", {place} has {room / 2**30:.2f}: "
    if need <= room:
        print(says + "fits")
        return
    added, least, held = way_to_fit(args, c, world, tokens, cuda, room - OVERHEAD * cuda)
    fits = least + OVERHEAD * cuda <= room
    print(says + "does not fit; " + (f"add {' '.join(added)}: {(least + OVERHEAD * cuda) / 2**30:.2f} GiB"
          + f", and {held / 2**30:.2f} of a rank's host memory" * bool(held) if fits else
          f"with {' '.join(added) or 'every flag'} still {(least + OVERHEAD * cuda) / 2**30:.2f} GiB: more ranks, a shorter "
          "--seq_len or a smaller model"))


def check_groups(args, world, heads=0):
    """ValueError where the ranks, or the query heads of the model, cannot be dealt out evenly."""
    fit = [n for n in range(1, world + 1) if world % n == 0]
    start = "; " + ("--world" if args.dry_run else "torchrun --nproc_per_node") + " says how many there are"
    for flag, n in (("--replicas", args.replicas), ("--sequence_parallel", args.sequence_parallel)):
        if world % n:
            raise ValueError(f"{flag} {n}: does not divide the {world} rank(s), as {', '.join(map(str, fit))} would" + start)
    if heads % args.sequence_parallel:
        raise ValueError(f"--sequence_parallel {args.sequence_parallel}: each rank of a group takes an equal share of the "
                         f"{heads} attention heads; what divides them and the {world} ranks: "
                         + ", ".join(str(n) for n in fit if heads % n == 0))


def dry_run(args):
    """Prints the plan of --world ranks with GPUs: no weights, no data, no GPU."""
    args.precision = args.precision or "mixed"
    try:
        raw_config, *_ = find_model(args.model, random_init=True)
        config = lm.parse_config(raw_config, f"{args.model}: config.json")
        if args.adapter:
            _, args.lora_rank, _, args.lora_targets = lm.open_adapter(args.adapter)
        check_groups(args, args.world or 1, config.num_attention_heads)
    except (ValueError, OSError) as error:
        raise SystemExit(f"train.py: error: {error}") from error
    room, world = args.gpu_gib and args.gpu_gib * 2**30, args.world or 1
    shards = world // args.replicas if args.fsdp2 else 1
    whole, read, most = (n / 2**30 for n in weights_read(config, shards))
    print(f"start-up: rank 0 reads {read:.2f} of the checkpoint's {whole:.2f} GiB, at most {most:.2f} of it in host memory "
          "at a time" + f"; {world // shards} ranks read the same" * (world > shards))
    print_plan(args, config, world, tokens_of(args, args.seq_len), True, room, "--gpu_gib")


def weights_read(c, shards):
    """Bytes of (the checkpoint, what rank 0 reads of it, its rows of the largest tensor)."""
    with torch.device("meta"):
        params = list(lm.Transformer(dataclasses.replace(c, num_hidden_layers=1)).named_parameters())
    times = [c.num_hidden_layers if ".layers." in name else 1 for name, _ in params]
    rows = [-(-len(p) // shards) * p[0].numel() for _, p in params]
    whole, read = (sum(n * t for n, t in zip(sizes, times)) for sizes in ((p.numel() for _, p in params), rows))
    return tuple(n * c.dtype.itemsize for n in (whole, read, max(rows)))


def room_for(device, gpu_gib):
    """Bytes that the plan has to fit into; with --gpu_gib the process is held to them. On a CPU free memory, or None."""
    if device.type != "cuda":
        return host_share() if gpu_gib is None else gpu_gib * 2**30
    total = torch.cuda.get_device_properties(device).total_memory
    if gpu_gib is None:
        return total
    torch.cuda.set_per_process_memory_fraction(min(1.0, gpu_gib * 2**30 / total), device)
    return min(total, gpu_gib * 2**30)


def host_share():
    """Bytes of free host memory for each rank of this machine, or None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        return free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    except (OSError, StopIteration):
        return None


# ---------------------------------------------------------------- out of memory

OUT_OF_MEMORY = 4  # exit code


def is_out_of_memory(error):
    texts = "DefaultCPUAllocator", "bad_alloc", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in texts)


def report_out_of_memory(args, at, error):
    """Says what was going on, what was planned, and which flags would save how much; the same in oom.json."""
    gib, device = 2**30, at["device"]
    report = {"phase": at["phase"], "step": at["step"], "rank": at["rank"], "tokens_of_micro_batch": at["tokens"],
              "error": str(error).splitlines()[0][:500]}
    if device.type == "cuda":
        report["allocated_gib"] = torch.cuda.memory_allocated(device) / gib
        report["reserved_gib"] = torch.cuda.memory_reserved(device) / gib
        report["peak_allocated_gib"] = torch.cuda.max_memory_allocated(device) / gib
    else:
        report["peak_resident_gib"], _ = memory_gib(device)
    if at["config"]:
        given = at["args"], at["config"], at["world"], at["tokens"], device.type == "cuda"
        moments, host = plan(*given)
        report["planned_gib"] = {m: {kind: n / gib for kind, n in kinds.items()} for m, kinds in moments.items()}
        report["planned_host_gib"] = {kind: n / gib for kind, n in host.items()}
        report["would_save_gib"] = savings(*given)
    lines = [f"rank {at['rank']} ran out of memory: {at['phase']}, step {at['step']}, micro-batch of {at['tokens']} tokens",
             f"  {report['error']}"]
    lines += [f"  {key}: {report[key]:.2f}" for key in report if key.endswith("_gib") and isinstance(report[key], float)]
    if at["config"]:
        name, peak = peak_of(moments)
        kinds = ", ".join(f"{kind} {n / gib:.2f}" for kind, n in moments[name].items() if n > 0.005 * peak)
        lines.append(f"  planned peak {peak / gib:.2f} GiB at {name}: {kinds}")
        lines += ["  not in use yet, GiB that each would save by itself, cheapest in time first:"] * bool(
            report["would_save_gib"])
        lines += [f"    {flags}: {saved:.2f}" for flags, saved in report["would_save_gib"].items()]
    print("\n".join(lines), file=sys.stderr, flush=True)
    if args.out:
        out, part = Path(args.out), Path(args.out, f"oom.part{at['rank']}")  # ranks may run out at once: the last one wins
        out.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(report, indent=2) + "\n")
        part.replace(out / "oom.json")
        if device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(part))
            part.replace(out / "memory.pickle")


# ---------------------------------------------------------------- checkpoints

STATE = "trainer_state.json"  # the last file of a checkpoint; a folder that lacks it is none
FORMAT = 1
REMOVE = "remove this checkpoint to continue from an older one"


def training_tensors(model, optimizer):
    """{name: tensor or DTensor} of all that training changes, as it lies in memory: trained weights and their optimizer
    state. Frozen weights are not in it: their fingerprint is in trainer_state.json."""
    lm.reshard_(model)
    tensors = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            tensors[f"model.{name}"] = p.detach()
            tensors |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[p].items()}
    return tensors


def generator_states(rank, device):
    """{name: bytes} of this rank's generators."""
    state = {f"random.{rank}.cpu": torch.get_rng_state()}
    return state | ({f"random.{rank}.cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def checkpoints(out):
    """[(step, folder)] of the complete checkpoints below a run's folder, oldest first."""
    found = [path for path in Path(out).glob("checkpoint-*") if checkpoint_step(path) >= 0 and (path / STATE).is_file()]
    return sorted((checkpoint_step(path), path) for path in found)


def sync(path):
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class StagedPlanner(DefaultSavePlanner):
    """Plans from the live tensors, of which it needs shapes and places only, and writes copies of them."""

    def __init__(self, copies):
        super().__init__()
        self.copies = copies

    def lookup_object(self, index):
        return self.copies[index.fqn]


class ShardWriter(HuggingFaceStorageWriter):
    """The same file, a rank's shards in safetensors with their offsets, tensor by tensor: torch's own makes the whole
    file in host memory first, twice, and holds Python's lock meanwhile. `files` is {name: [size, checksum]}."""

    def __init__(self, path, at):
        super().__init__(path, save_distributed=True)
        self.at, self.files = at, {}

    def write_data(self, plan, planner):
        items = {item.index.fqn: item for item in plan.items}
        if items:
            path = Path(self.path, f"shard-{plan.storage_data['shard_index']:05}-model-00001-of-00001.safetensors")
            layout = {name: (tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype)
                      for name, item in items.items()}
            places = {name: {"saved_offsets": list(item.tensor_data.chunk.offsets)} for name, item in items.items()}
            file = lm.SafetensorsFile(path, layout, DCP_SHARDING_INFO=json.dumps(places), DCP_VERSION="1.0")
            crc = zlib.crc32(file.head)
            with contextlib.closing(file.file):  # also where the disk is full: its space is free again
                for name in ticking(self.at, list(file.at)):  # in the order of the file
                    crc = zlib.crc32(file.write(name, planner.resolve_data(items[name]).detach().cpu()), crc)
                file.close()
            self.files = {path.name: [path.stat().st_size, crc]}
        done = torch.futures.Future()
        done.set_result([])
        return done


class Saver:
    """Writes checkpoint-<step>/ with torch.distributed.checkpoint: each rank its shards, as safetensors.

    Written beside its place, synced, and committed by one rename; only then older ones go. A disk that fails or is full
    costs this save and nothing else: the folder is removed, the reason said, and training goes on. In the background
    (--async_save) the same runs in a thread on a copy in host memory, with collectives of its own, one at a time.
    """

    def __init__(self, out, keep, background, rank, world, log, newest, pin, at):
        self.pin, self.at = pin, at
        self.out, self.keep, self.background, self.rank, self.world, self.log = Path(out), keep, background, rank, world, log
        self.group = None
        self.step = newest  # of the last save, complete or under way
        self.copies, self.thread, self.error, self.seconds, self.gib = {}, None, None, 0.0, 0.0

    def meet(self):
        """The process group of the ranks' writers, None in a world of one: gloo, apart from training's collectives, and a
        slow disk runs into no timeout of it."""
        if self.world > 1 and self.group is None:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
        return self.group

    def save(self, step, tensors, state):
        """All ranks, after step `step`. tensors: as training_tensors() and generator_states() give them; state: JSON."""
        self.finish()
        if step == self.step:
            return
        self.step, self.stall, started = step, 0.0, time.perf_counter()
        self.meet()
        if not self.background:
            self.attempt(step, tensors, state)
        else:
            for name, tensor in tensors.items():
                tensor = lm.local(tensor)[0]
                if name not in self.copies:
                    self.copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=self.pin and tensor.is_cuda)
                self.copies[name].copy_(tensor, non_blocking=True)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.thread = threading.Thread(target=self.attempt, args=(step, tensors, state), daemon=True)
            self.thread.start()
        self.stand_still(started)
        if not self.background:
            self.report()

    def stand_still(self, started):
        self.stall += time.perf_counter() - started
        self.log.mark += time.perf_counter() - started  # no part of a step's time

    def finish(self, wait=True):
        """Ends a save in the background, or with wait=False only if it is done."""
        if self.thread is not None and (wait or not self.thread.is_alive()):
            started = time.perf_counter()
            self.thread.join()
            self.stand_still(started)
            self.thread = None
            self.report()

    def report(self):
        """What became of the last save; all but a failing disk is raised."""
        error, self.error = self.error, None
        if error is not None and not isinstance(error, OSError):
            raise error
        self.log.write_save(self.step, self.gib, self.seconds, self.stall, error)
        self.step = None if error else self.step

    def attempt(self, step, tensors, state):
        started = time.perf_counter()
        part = self.out / f"checkpoint-{step}.part"
        try:
            self.write(part, tensors, state)
        except BaseException as error:  # of DCP too; raised by report(), in the thread of the training loop
            if isinstance(error, OSError) and self.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            self.error = error
        self.seconds = time.perf_counter() - started

    def write(self, part, tensors, state):
        def counts(tensor):  # of several that hold the same, the first
            mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
            return self.rank == 0 if mesh is None else mesh.ndim == 1 or mesh.get_local_rank(0) == 0

        n_bytes = sum(lm.local(tensor)[0].nbytes for tensor in tensors.values() if counts(tensor))
        sizes = self.gather(n_bytes)
        self.gib = sum(sizes) / 2**30
        self.agree(lambda: self.prepare(part, sum(sizes)) if self.rank == 0 else None)
        files = self.gather(self.agree(lambda: self.store(part, tensors)))
        files = {name: entry for theirs in files for name, entry in theirs.items()}
        self.agree(lambda: self.commit(part, state | {"files": files}) if self.rank == 0 else None)

    def gather(self, value):
        values = [value] * self.world
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, work):
        """work() on each rank -> its result; OSError on all of them where one has failed."""
        result = error = None
        try:
            result = work()
        except (OSError, ValueError) as caught:
            error = str(caught)
        for rank, reason in enumerate(self.gather(error)):
            if reason:
                raise OSError(f"rank {rank}: {reason}" if self.world > 1 else reason)
        return result

    def prepare(self, part, n_bytes):
        for left in self.out.glob("checkpoint-*.part"):  # of a save that was cut off
            shutil.rmtree(left, ignore_errors=left != part)  # another one that stays is no reason not to save
        lm.need_space(self.out, n_bytes)
        part.mkdir()

    def store(self, part, tensors):
        writer = ShardWriter(str(part), self.at)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of "assuming the intent is to save in a single process"
                dcp.save(tensors, storage_writer=writer, planner=StagedPlanner(self.copies) if self.background else None,
                         process_group=self.group, no_dist=self.group is None)
        except CheckpointException as failed:
            # the same on every rank: each raises its own, so that agree() names it
            if not all(isinstance(cause, OSError) for cause, _ in failed.failures.values()):
                raise RuntimeError(str(failed)) from failed
            if self.rank in failed.failures:
                raise failed.failures[self.rank][0] from failed
        return writer.files

    def commit(self, part, state):
        target = part.with_suffix("")
        (part / STATE).write_text(json.dumps(state, indent=2) + "\n")
        sync(part / STATE)
        sync(part)
        part.rename(target)
        try:
            sync(self.out)
        except OSError:
            target.rename(part)  # not for sure on the disk, so said not to be written, and removed
            raise
        for _, old in checkpoints(self.out)[: -self.keep]:
            gone = old.with_name(old.name + ".part")  # in one step: half a checkpoint must not look like a whole one
            with contextlib.suppress(OSError):  # the new one is safe; the next save tries again
                old.rename(gone)
                shutil.rmtree(gone)


def find_run(out, resume, launchers):
    """--out, --resume and the torchrun that has started this run again, if any -> (folder of the run, checkpoint to
    continue from or None). ValueError where a run would be overwritten, or there is nothing to continue."""
    fresh = Path("out") / datetime.now().strftime("%Y%m%d-%H%M%S")
    if resume not in (None, "auto"):
        folder = Path(resume).resolve()
        again = [run for run in ([folder, folder.parent] if out is None else [Path(out)]) if started_by(launchers, run)]
        if again and (found := checkpoints(again[0])):  # what it has written before the failure counts
            return str(again[0]), str(found[-1][1])
        if not (folder / STATE).is_file():
            if not (found := checkpoints(folder)):
                raise ValueError(f"--resume {resume}: no {STATE} and no complete checkpoint-<step>/ in it")
            folder = found[-1][1]
        run = folder.parent
        if out is not None and Path(out).resolve() != run:
            return str(out) if again else free_out(out), str(folder)
        newer = [path.name for step, path in checkpoints(run) if step > checkpoint_step(folder)]
        if newer:
            raise ValueError(f"--resume {resume}: {run} holds {newer[-1]}, which is newer: give another --out to branch off "
                             "here, or remove the newer ones")
        return str(run), str(folder)
    runs = [path.parent for path in (Path("out").glob("*/args.json") if out is None else Path(out).glob("args.json"))]
    if resume is None:  # torchrun has started this again after a failure: its own run goes on
        runs = [run for run in runs if started_by(launchers, run)]
        if not runs:
            return free_out(out or fresh), None
    if out is None:
        out = max(runs, key=lambda run: (run / "args.json").stat().st_mtime, default=fresh)
    found = checkpoints(out)
    origin = lm.read_json(Path(out, "args.json")).get("resume") if Path(out, "args.json").exists() and not found else None
    if origin not in (None, "auto"):
        raise ValueError(f"--out {out}: was to continue {origin} and has no checkpoint of its own yet: remove it and give "
                         f"--resume {origin} again")
    if not found and (Path(out) / "final").exists():
        raise ValueError(f"--out {out}: holds a finished run and no checkpoint to continue from: give another folder")
    return str(out), str(found[-1][1]) if found else None


def started_by(launchers, run):
    """Whether one of these torchruns has started that run. Another run's damaged args.json is no reason not to start."""
    try:
        return bool(set(launchers) & set(lm.read_json(run / "args.json").get("torchrun") or ()))
    except (OSError, ValueError):
        return False


def checkpoint_step(folder):
    """The number in the name checkpoint-<step>, -1 for any other name."""
    match = re.fullmatch(r"checkpoint-(\d{1,12})", folder.name, re.ASCII)
    return int(match[1]) if match else -1


def free_out(out):
    """The folder of a new run, not made yet. ValueError where one already lies there."""
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: is a file, give a folder")
    if (out / "args.json").exists() or (out / "final").exists() or checkpoints(out):
        raise ValueError(f"--out {out}: holds a run already, which is never overwritten: --resume continues it, or give "
                         "another folder")
    return str(out)


def read_state(folder, rank, world):
    """trainer_state.json of a checkpoint, once its files are what it says: regular, of the size and with the checksum of
    the save, and no other beside them. Each rank reads its part of them. ValueError names what is wrong."""
    folder = Path(folder)
    try:
        state = lm.read_json(folder / STATE)
    except ValueError as error:
        raise ValueError(f"{error}; {REMOVE}") from error
    kinds = {"format": int, "step": int, "world": int, "tokens": int, "first_loss": float, "settings": dict, "files": dict}
    wrong = [key for key, kind in kinds.items() if type(state.get(key)) is not kind]
    best = state.get("best_eval", {})
    if best is not None and (type(best) is not dict or [type(best.get(key)) for key in ("step", "eval_loss")] != [int, float]):
        wrong.append("best_eval")
    if wrong or state["format"] != FORMAT or not 0 < state["step"] < 1 << 40 or not 0 < state["world"] <= 1 << 20:
        raise ValueError(f"{folder / STATE}: not written by this version: {', '.join(wrong) or 'format, step or world'}; "
                         + REMOVE)
    files = state["files"]
    for name, entry in files.items():
        if not re.fullmatch(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors", name, re.ASCII) or type(entry) is not list \
                or [type(number) for number in entry] != [int, int]:
            raise ValueError(f"{folder / STATE}: files: {name!r}: {entry!r}: expected a file name, its size and checksum; "
                             + REMOVE)
    found = {path.name: path for path in folder.iterdir()}
    if unlike := found.keys() ^ {*files, STATE}:
        raise ValueError(f"{folder}: missing or not written by the save: {lm.listing(unlike)}; {REMOVE}")
    for path in found.values():
        if path.is_symlink() or not path.is_file():
            raise ValueError(f"{path}: expected a plain file; {REMOVE}")
    for name, (size, crc) in list(files.items())[rank::world]:
        if found[name].stat().st_size != size or data.crc_of(found[name]) != crc:
            raise ValueError(f"{found[name]}: damaged since it was written; {REMOVE}")
    return state


def check_settings(folder, saved, settings):
    """ValueError by name where a setting that changes the mathematics is not the one of the checkpoint."""
    unlike = [f"{name} differ" if name.startswith("the ") else f"{name} was {saved.get(name)}, is {value}"
              for name, value in settings.items() if saved.get(name) != value]  # of checksums the values say nothing
    if unlike:
        raise ValueError(f"--resume {folder}: " + "; ".join(unlike) + ": give what the checkpoint was made with, or start a "
                         "new run with another --out")


def check_tensors(folder, state, tensors, generators):
    """Compares the headers of a checkpoint's files with `tensors`. ValueError names what is missing, not expected, of
    another shape or dtype, or not covered exactly once by the shards. -> those of this rank's `generators` in it."""
    wanted = {name: (lm.DTYPE_NAMES[tensor.dtype], list(tensor.shape)) for name, tensor in (tensors | generators).items()}
    rows = {name: [] for name in wanted}
    for file in state["files"]:
        try:
            with safetensors.safe_open(Path(folder, file), framework="pt") as reader:
                places = json.loads(reader.metadata()["DCP_SHARDING_INFO"])
                parts = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
                kept = {name: (part.get_dtype(), list(part.get_shape()), places[name]["saved_offsets"])
                        for name, part in parts.items()}
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{folder}: {file}: not as it was saved: {error!r}; {REMOVE}") from error
        for name, (dtype, shape, offsets) in kept.items():
            if name.startswith("random.") and name not in wanted:  # of another rank
                continue
            expected = wanted.get(name, ("", []))
            if (dtype, shape[1:], len(shape)) != (expected[0], expected[1][1:], len(expected[1])) or type(offsets) is not list \
                    or [type(number) for number in offsets] != [int] * len(shape) or any(offsets[1:]):
                raise ValueError(f"{folder}: {file}: {name}: {dtype} {shape} at {offsets}, this run has "
                                 f"{' '.join(map(str, wanted.get(name, ['no such tensor'])))}; {REMOVE}")
            rows[name].append((offsets[0], offsets[0] + shape[0]) if shape else (0, 1))
    found = {name: generators[name] for name in generators if rows[name]}
    for name in tensors | found:
        pieces = sorted(rows[name])
        if [0, *(stop for _, stop in pieces)] != [*(start for start, _ in pieces), *(wanted[name][1] or [1])[:1]]:
            raise ValueError(f"{folder}: {name}: rows {pieces} do not make {wanted[name][1]}; {REMOVE}")
    return found


def restore(folder, tensors, group):
    """Reads a checkpoint into `tensors` in place."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), process_group=group, no_dist=group is None)
    except CheckpointException as failed:
        cause = next(iter(failed.failures.values()))[0]
        raise ValueError(f"{folder}: not read: {cause!r}; {REMOVE}") from failed


def rewind(path, step):
    """Takes the rows after `step` out of metrics.jsonl: they are about to be made again. -> the rows that stay."""
    rows = []
    if path.exists():
        for line in path.read_text("utf-8", "replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a process that was killed
                rows.append(json.loads(line))
        rows = [row for row in rows if isinstance(row, dict) and row.get("step", math.inf) <= step]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def write_whole(path, text):
    """Never half a file, wherever the process ends."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


KERNELS = (  # what a kernel or operator is, by a part of its name; the first that fits
    ("attention", ("flash", "fmha", "scaled_dot_product", "cudnn_generated", "varlen")),
    ("communication", ("nccl", "c10d", "gloo", "all_gather", "reduce_scatter", "all_reduce", "record_param_comms")),
    ("optimizer", ("adam", "multi_tensor", "foreach")),
    ("matrix products", ("gemm", "cutlass", "nvjet", "xmma", "aten::mm", "aten::addmm", "aten::bmm", "mkldnn")),
    ("compiled kernels", ("triton_", "CompiledFxGraph")),
    ("copies and casts", ("memcpy", "memset", "copy")),
    ("other kernels", ("aten::", "kernel")),
)


def where_time_went(events, wall_s, cuda):
    """Shares of a traced step as a line. events: the profiler's key_averages(); of a GPU its kernels count, of a CPU the
    operators, whose own time excludes what they call."""
    spent = collections.Counter()
    for event in events:
        on_device = event.device_type != torch.autograd.DeviceType.CPU
        if on_device == cuda and not (cuda and event.is_user_annotation):  # a range over kernels that are counted already
            kind = next((kind for kind, parts in KERNELS if any(part.lower() in event.key.lower() for part in parts)), "Python")
            spent[kind] += event.self_device_time_total if cuda else event.self_cpu_time_total
    whole = max(sum(spent.values()), wall_s * 1e6 * cuda)
    if cuda:
        spent.pop("Python", 0)  # ranges of the compiler, not kernels
        spent["the GPU idle"] = whole - sum(spent.values())
    return ", ".join(f"{kind} {n / whole:.0%}" for kind, n in spent.most_common() if n > 0.004 * whole)


# ---------------------------------------------------------------- signals and hangs


class StopSignal:
    """SIGTERM (a job's end, torchrun's own shutdown) or SIGUSR1 (from a script) on any rank, seen by all at one step."""

    def __init__(self, world):
        self.world, self.number = world, 0
        for number in STOP_SIGNALS:
            signal.signal(number, self.note)

    def note(self, number, _):
        self.number = number

    def asked(self):
        """The signal's number, or 0. Collective: an all-reduce of one number on the CPU."""
        number = torch.tensor(self.number)
        if self.world > 1:
            dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)


STOP_SIGNALS = signal.SIGTERM, signal.SIGUSR1
HUNG = 5  # exit code


def move(at, phase, **fields):
    """Notes what this rank does now. All ranks make the same moves in the same order: who has made fewer is late."""
    at.update({"phase": phase, "moves": at["moves"] + 1, "when": time.time(), **fields})
    if at.get("traced"):  # in a trace the phases are ranges
        at["traced"].__exit__(None, None, None)
        at["traced"] = torch.profiler.record_function(phase)
        at["traced"].__enter__()


def ticking(at, items):
    """The same items; each one shows that this rank is alive."""
    for item in items:
        at["when"] = time.time()
        yield item


def watch(at, store, timeout):
    """Thread of each rank. When no rank has moved for `timeout` seconds it says where each one is and which are late,
    and ends the run: a collective that hangs says nothing (torchtitan #3065). A slow rank that moves is left alone."""
    rank, world, beat = at["rank"], at["world"], min(5.0, timeout / 10)
    try:
        while not at.get("over"):
            time.sleep(beat)
            where, waits = place_of_main_thread()
            store.set(f"rank {rank}", json.dumps({**{key: at[key] for key in ("moves", "phase", "step", "when")},
                                                  "where": where, "waits": waits, "heard": time.time()}))
            if time.time() - at["when"] < timeout:
                continue
            known = [store.check([f"rank {other}"]) and json.loads(store.get(f"rank {other}")) for other in range(world)]
            now = time.time()
            if any(one and now - one["when"] < timeout for one in known):
                continue
            lost = [r for r, one in enumerate(known) if not one or now - one["heard"] > 4 * beat]
            heard = [r for r in range(world) if r not in lost]
            if rank == heard[0]:
                fewest = min(known[r]["moves"] for r in heard)
                late = lost or [r for r in heard if known[r]["moves"] == fewest]
                late = lost or [r for r in late if not known[r]["waits"]] or late
                print(f"train.py: error: no rank has moved for {timeout:g} s (--timeout). Late: rank "
                      + ", ".join(map(str, late)), file=sys.stderr)
                for r, one in enumerate(known):
                    print(f"  rank {r}: " + (f"step {one['step']}, {one['phase']}, for {now - one['when']:.0f} s, at "
                          f"{one['where']}" if one else "never heard of") + " (the process itself stands still)"
                          * (r in lost), file=sys.stderr, flush=True)
            else:
                time.sleep(2 * beat)  # the first one speaks
            os._exit(HUNG)
    except RuntimeError:  # the store is gone with its rank: the collectives report that, unless this rank is in none
        while not at.get("over"):
            if time.time() - at["when"] > timeout:
                os._exit(HUNG)
            time.sleep(beat)


def tick_and_call(at, function, *args):
    at["when"] = time.time()
    return function(*args)


def place_of_main_thread():
    """("file:line function" of this project's innermost frame and of the innermost of all, whether that waits for ranks)."""
    frame, here, ours, waits = sys._current_frames()[threading.main_thread().ident], None, None, False
    while frame is not None:
        code = frame.f_code
        place = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
        here = here or place
        if Path(code.co_filename).parent == Path(__file__).parent:
            ours = ours or place
        waits = waits or "torch/distributed" in code.co_filename or code.co_name == "together"
        frame = frame.f_back
    return (here if ours in (None, here) else f"{ours}, in {here}"), waits


def first_not_finite(model, batches, scale, device):
    """Runs the micro-batches of a step again -> where this rank first meets a number that is not finite, or None."""
    found = []

    def check(what, tensor):
        # detached: autograd would save what isfinite() computes, and checkpointing count it
        if not found and isinstance(tensor, torch.Tensor) and not tensor.detach().isfinite().all():
            found.append(what)

    def after(name, module, args, out):
        check(f"the output of {name}", out)
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.register_hook(functools.partial(check, f"the gradient of the output of {name}"))

    handles = [module.register_forward_hook(functools.partial(after, name or "the model"))
               for name, module in model.named_modules()]
    model.zero_grad()  # clipping to a norm of nan has made all of them nan
    with torch.compiler.set_stance("force_eager"):  # a compiled block calls no hooks
        for batch in batches:
            b = batch.to(device)
            (model(b.tokens, b.targets, b.positions, b.spans, b.keep_S) * scale).backward()
    for handle in handles:
        handle.remove()
    for name, p in model.named_parameters():
        if p.grad is not None:
            check(f"the gradient of {name}", lm.local(p.grad)[0])
    return found[0] if found else None


def refuse_not_finite(args, model, loader, fine, start, step, device, rank, world, say):
    """Ends a run whose loss or gradient is inf or nan: which step, rank and module, found by running that step again. No
    weight has changed since."""
    if args.optim_in_backward and args.fsdp2 and world > 1:
        dist.all_reduce(fine, dist.ReduceOp.MIN)
    broken = min(start + int(fine), step)
    batches, counted = loader.step(broken, args.grad_accum)
    if args.fsdp2:
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
    found = first_not_finite(model, batches, world / int(counted[0]), device)
    places = [found]
    if world > 1:
        places = [None] * world
        dist.all_gather_object(places, found)
    met = {f"rank {r}: {place}" for r, place in enumerate(places) if place}
    met = sorted(place for place in met if " output of " in place) or sorted(met)  # a reduced gradient reaches every rank
    kept = ("Weights whose gradients came before it in that step" + ", and other ranks' shards," * args.fsdp2
            + " were updated, none by it") if args.optim_in_backward else "No weight was changed by it"
    say(f"train.py: error: the loss or a gradient is not finite at step {broken + 1}, first in "
        f"{'; '.join(met) or 'a place that a second run of the step did not show'}. {kept}; checkpoints are as they were. "
        "Lower --lr, raise --warmup, look at the data of this step")
    leave()
    raise SystemExit(NOT_FINITE)


NOT_FINITE = 3  # exit code


# ---------------------------------------------------------------- what a run writes


def versions(world):
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except OSError:  # no git on this machine
        commit = None
    modules = {m.__name__: m.__version__ for m in (torch, safetensors, tokenizers)}
    return {"python": platform.python_version(), **modules, "world": world, "git_commit": commit}


def torchruns(world):
    """The torchrun processes that have started these ranks, one a node, of which one at least is the same when ranks are
    started again after a failure; none without torchrun."""
    launchers = [launcher()] * world
    if world > 1:
        dist.all_gather_object(launchers, launcher())
    return sorted({one for one in launchers if one})


def launcher():
    run, parent = os.environ.get("TORCHELASTIC_RUN_ID"), Path(f"/proc/{os.getppid()}/stat")
    born = parent.read_text().rpartition(")")[2].split()[19] if parent.exists() else ""  # in a container it is often process 1
    return run and f"{platform.node()} {os.getppid()} {born} {run}"


def speak(text):
    try:
        print(text, flush=True)
    except BrokenPipeError:  # nobody reads any more, which is no reason to stop: metrics.jsonl has the numbers
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Log:
    """metrics.jsonl and the same on the console; times and tokens are means over the steps since the last line."""

    def __init__(self, out, say, steps, steps_per_epoch, device, start=0, n_trained_on=0, first=None, best=None, board=False):
        self.path, self.say, self.steps, self.board = out and Path(out) / "metrics.jsonl", say, steps, None
        if board and out:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(out, purge_step=start + 1)
        self.steps_per_epoch, self.device = steps_per_epoch, device
        self.peak = next((peak for name, peak in PEAKS.items() if name in device_name(device)), None)
        self.n_tokens = self.n_steps = self.data_s = self.flops = 0
        self.begin = self.mark = time.perf_counter()
        # of a run that goes on: steps and trained tokens behind it, its first loss, its best evaluation
        self.start, self.n_trained_on, self.first, self.best = start, n_trained_on, first, best
        self.last = None
        self.peak_gib = 0.0

    def start_step(self):
        self.now = time.perf_counter()

    def data_ready(self, counted, flops):
        """counted: targets, tokens, ... of the step over all ranks. flops: of one rank."""
        self.data_s += time.perf_counter() - self.now
        self.flops += flops
        self.n_trained_on += int(counted[0])
        self.n_tokens += int(counted[1])
        self.n_steps += 1

    def write(self, step, loss, lr, norm):
        now = time.perf_counter()
        step_s = (now - self.mark) / self.n_steps
        mem_gib, reserved_gib = memory_gib(self.device)
        self.peak_gib = max(self.peak_gib, mem_gib)
        row = {
            "step": step + 1, "epoch": (step + 1) / self.steps_per_epoch, "loss": loss, "lr": lr, "grad_norm": norm,
            "tokens": self.n_trained_on, "tokens_per_s": self.n_tokens / (now - self.mark),
            "mfu": self.flops / (now - self.mark) / self.peak if self.peak else None, "mem_gib": mem_gib,
            "mem_reserved_gib": reserved_gib, "step_s": step_s, "data_s": self.data_s / self.n_steps,
        }
        self.append(row)
        left = int((self.steps - step - 1) * (now - self.begin) / (step + 1 - self.start))
        self.say(
            f"step {step + 1:>{len(str(self.steps))}}/{self.steps}  loss {loss:.4f}  lr {lr:.2e}  norm {norm:<6.3g}  "
            f"{row['tokens_per_s']:,.0f} tok/s  {mem_gib:.2f} GiB  "
            + f"mfu {row['mfu'] or 0:.1%}  " * bool(self.peak)
            + f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        )
        self.first, self.last = loss if self.first is None else self.first, loss
        self.mark, self.n_tokens, self.n_steps, self.data_s, self.flops = now, 0, 0, 0.0, 0

    def write_eval(self, step, loss, n, seconds):
        """step: 1, 2, ..., as in write_save()."""
        row = {"step": step, "eval_loss": loss, "eval_tokens": n}
        self.append(row)
        if self.best is None or loss < self.best["eval_loss"]:
            self.best = row
        self.say(f"step {step}  eval loss {loss:.4f} over {n:,} tokens, best {self.best['eval_loss']:.4f} at step "
                 f"{self.best['step']}")
        self.mark += seconds  # the steps since the last line took the rest

    def write_save(self, step, gib, seconds, stall, error):
        """step: 1, 2, ...; stall: seconds that the loop stood still; error: None, or why nothing was saved."""
        if error:
            self.say(f"checkpoint-{step} was not written: {error}. Older ones are untouched, training goes on")
            return
        self.append({"step": step, "checkpoint_gib": gib, "checkpoint_s": seconds, "checkpoint_stall_s": stall})
        self.say(f"checkpoint-{step}: {gib:.3f} GiB written in {seconds:.2f} s, the loop stood still for {stall:.2f} s")

    def append(self, row):
        try:
            if self.path:
                with open(self.path, "a") as file:
                    file.write(json.dumps(row) + "\n")
            if self.board:
                for name, value in row.items():
                    if name != "step" and value is not None:
                        self.board.add_scalar(name, value, row["step"])
                self.board.flush()
        except OSError as error:  # a full disk ends no training
            self.say(f"{self.path}: not written: {error}")

    def close(self, planned_gib):
        gpu = self.device.type == "cuda"
        self.peak_gib = self.peak_gib or memory_gib(self.device)[0]
        self.say(f"peak memory {self.peak_gib:.2f} GiB " + ("allocated" if gpu else "resident") + f", planned {planned_gib:.2f}"
                 + (f" ({planned_gib / self.peak_gib - 1:+.1%})" if gpu else
                    ": the plan counts tensors, the rest is the interpreter, torch, data and kernels' scratch"))
        if self.last is not None:  # not one step was left to a run that goes on
            seconds = time.perf_counter() - self.begin
            change = self.last / self.first - 1 if self.first else math.nan
            self.say(f"{self.steps - self.start} steps in {seconds:.0f} s: loss {self.first:.4f} -> {self.last:.4f} "
                     f"({change:+.1%})")


def device_name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def memory_gib(device):
    """(peak allocated, peak reserved) on the GPU since the last call; on a CPU (peak resident memory, None)."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, None
    peaks = torch.cuda.max_memory_allocated(device) / 2**30, torch.cuda.max_memory_reserved(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return peaks


def print_start(args, model, source, device, world, n_trained, defer_sync, pin, attention):
    """What is trained on what, then a line per feature: on or off, and why."""
    cuda, tied, adapters = device.type == "cuda", model.config.tie_word_embeddings, args.lora or args.qlora
    trained = "bf16" if args.precision == "bf16" else "float32"
    frozen = "float32" if args.precision == "fp32" else "bf16"
    idle = "" if cuda else ": nothing to move, the only device is the CPU"
    host = "pinned host memory" if pin else "host memory" + ", not pinned: it would take more than 80 %" * cuda
    asked = {what: what in args.offload for what in ("activations", "params")}
    fused = args.fused_adamw and args.optim == "adamw" and not args.stochastic_rounding
    where = "GPU" if cuda and not asked["params"] else f"CPU, {torch.get_num_threads()} threads a rank"
    n_regions = len(regions(args.activation_checkpointing, args.tiled_mlp))
    rows = [  # feature, on, why if on, why if off
        ("lora", adapters, f"rank {args.lora_rank}, alpha {args.lora_alpha}, dropout {args.lora_dropout or 0}, on "
         + ", ".join(args.lora_targets or ()), "every weight trains"),
        ("qlora", args.qlora, "linear layers of the blocks frozen in NF4, 4.14 bits a weight", "nothing in NF4"),
        ("fsdp2", args.fsdp2, f"{model.config.num_hidden_layers} blocks sharded over {world // args.replicas} rank(s)"
         + f", {args.replicas} replicas of them" * (args.replicas > 1),
         "each rank holds the whole model" + ", gradients are averaged" * (world > 1)),
        ("sequence_parallel", args.sequence_parallel > 1, f"rows are split over {args.sequence_parallel} ranks, each of which "
         f"attends with {model.config.num_attention_heads // args.sequence_parallel} of "
         f"{model.config.num_attention_heads} heads", "each rank has rows of its own"),
        ("reshard_after_forward", args.fsdp2 and args.reshard_after_forward,
         "gathered blocks but the last are freed until the backward", "nothing is freed between forward and backward"),
        ("shard_embeddings", args.fsdp2 and args.shard_embeddings and not tied, "gathered only while in use",
         "they are one tied tensor, gathered for the whole step" if tied else "in memory for the whole step"),
        ("late gradient sync", defer_sync, "gradients of all micro-batches of a step are reduced at once",
         "after each micro-batch: unreduced gradients would take more than 1 GiB a rank"),
        ("offload activations", asked["activations"] and cuda, f"inputs of all blocks but the last wait in {host}",
         "kept on the device" + idle * asked["activations"]),
        ("offload params", asked["params"], f"weights, gradients and AdamW live in {host}" + idle, "kept on the device"),
        ("activation_checkpointing", args.activation_checkpointing, "blocks are recomputed in the backward",
         "blocks keep all that their backward needs"),
        ("chunked_ce", args.chunked_ce, f"loss of {args.ce_chunk} tokens at a time, its gradient in the forward",
         "all logits of a micro-batch at once"),
        ("tiled_mlp", args.tiled_mlp, f"{args.tiled_mlp} tokens at a time, forward and backward", "the whole row at once"),
        ("adamw8bit", args.optim == "adamw8bit", "moments of matrices in 8 bits, one scale for 256",
         "moments in " + trained),
        ("stochastic_rounding", args.stochastic_rounding, "updates of bf16 weights are right in the mean",
         f"trained {trained} is rounded to the nearest"),
        ("optim_in_backward", args.optim_in_backward, "weights are updated as gradients arrive, which are not clipped",
         f"after the backward, gradients clipped to a norm of {args.clip:g}" if args.clip else "after the backward"),
        ("fused_adamw", fused, f"on the {where}", f"many small operations on the {where}"),
        ("compile", args.compile, f"{n_regions} regions of a block, the loss, NF4's dequantization"
         + (" and AdamW" if args.optim == "adamw8bit" or args.stochastic_rounding else "") + ", in the first step",
         "one kernel after the other"),
        ("attention", True, attention, ""),
        ("checkpoints", args.save_every, f"every {args.save_every} steps and at the end, the newest {args.keep} stay, "
         + ("written in the background from a copy in host memory" if args.async_save else "training waits for the disk"),
         "only when SIGTERM or SIGUSR1 ends the run"),
        ("tensorboard", args.tensorboard, "the numbers of metrics.jsonl in --out, as event files", "metrics.jsonl only"),
        ("profile", args.profile, "trace.json.gz of the third step", "no trace"),
        ("memory_snapshot", args.memory_snapshot and cuda, "memory.pickle after the third step",
         "no snapshot" + ": there is one of a GPU only" * args.memory_snapshot),
        ("packing", args.packing, f"documents best-fit into rows of {args.seq_len} tokens", "a document a row, padded"),
    ]
    n_total = sum(math.prod(shape) for _, shape, _ in source.tensors.values())
    print(f"{args.model} ({model.config.model_type}): {n_total:,} parameters, {n_trained:,} trained, "
          f"{world} x {device_name(device)}")
    kept = f"{'NF4 and ' * args.qlora}{frozen}" if adapters else "nothing"
    print(f"  {'precision':<26}{args.precision:<7}trained {trained}, frozen {kept}, products {frozen}, gradients reduced in "
          f"{trained}, saved " + (trained if adapters else "as the checkpoint was"))
    if args.seq_len > model.config.max_position_embeddings:
        print(f"  note: --seq_len {args.seq_len} is beyond the {model.config.max_position_embeddings} positions that "
              "config.json names; the model has not seen such positions")
    for feature, on, why, why_not in rows:
        print(f"  {feature:<26}{'on' if on else 'off':<7}{why if on else why_not}")


def print_data(args, what, loader, counts, tokenizer):
    """What was read, what was left out and why, and what looks wrong."""
    for tokens, count in zip(loader.documents.tokens, counts):
        n = collections.Counter(count)  # a count that never came up is 0
        by = f" rendered by {tokenizer.template_from}" if n["conversations"] else ""
        often = f", taken {count['weight']:g} times an epoch" * (count["weight"] != 1)
        print(f"{count['name']}: {n['rows']:,} rows ({count['format']}{by}), {n['n_tokens']:,} tokens, "
              f"{n['n_trained'] / max(n['n_tokens'], 1):.1%} trained on{often}")
        done = {"drop": "left out", "split": "split", "truncate": "cut off there"}[count["policy"]]
        notes = {
            f"longer than --seq_len {args.seq_len} (up to {n['longest']:,} tokens): {done}": (n["long"], n["rows"], "rows"),
            "without a token to train on: left out": (n["untrained"], n["rows"], "rows"),
            "not trained on: the template changes the text before them": (n["untold"], n["turns"], "assistant turns"),
            "without a special token at their end: where to stop is not learned": (n["unended"], n["turns"], "assistant turns"),
            "with tools or thoughts that the template leaves out": (n["unsaid"], n["conversations"], "conversations"),
            "spell a special token, which stays text": (n["spelled"], n["conversations"], "conversations"),
            "with tool calls as the template wants them, strings for objects, objects for strings or none for no content":
                (n["converted"], n["conversations"], "conversations"),
            "that cannot be trained on: left out": (sum(m for m, _ in count["bad"].values()), n["rows"], "rows"),
        }
        for note, (some, of, things) in notes.items():
            if some:
                print(f"  {some:,} of {of:,} {things} {note}")
        for line in data.bad_rows(count, count["name"]):
            print(f"  {line}")
        before = tokenizer.before
        if n["conversations"] and tokens[: len(before)].tolist() != before:
            print(f"  the tokenizer begins texts with {tokenizer.core.id_to_token(before[0])}, this template does not")
    n_targets, n_tokens, _ = loader.per_row.sum(0).tolist()
    rows, positions = len(loader.rows), loader.seq_len * len(loader.rows)
    several = f"{' '.join(what)}: {n_tokens:,} tokens an epoch, {n_targets / n_tokens:.1%} trained on, " * (len(counts) > 1)
    print(several + f"{'packed into' if loader.packing else 'one document each in'} {rows:,} rows of at most {loader.seq_len}"
          + f", {n_tokens / positions:.1%} full" * loader.packing)


def has_colours():
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def print_examples(args, documents, tokenizer):
    """The first document, shortened, or the first --inspect N of them. What is trained on is green, or between ⟦ and ⟧."""
    colour = has_colours()
    for number in range(min(args.inspect or 1, len(documents.start))):
        text = data.show(tokenizer, documents, number, colour)
        if not args.inspect and len(text) > 2000:
            text = f"{text[:1000]}{data.NO_COLOUR * colour}\n[...]\n{text[-1000:]}"
        name, _ = data.split_weight(args.data[documents.file[number]])
        print(f"--- example {number + 1}, {name}:{documents.line[number]}; what is trained on is "
              + ("green" if colour else "between ⟦ and ⟧") + f"\n{text}\n---")


def print_sample(args, say, when, model, tokenizer, chat, device):
    """Prints what the model makes of --sample. All ranks call it: under FSDP2 each forward is a collective."""
    if args.sample:
        model.eval()
        prompt = tokenizer.prompt(args.sample, chat)
        tokens = lm.generate(model, prompt, 32, tokenizer.stop, device)
        model.train()
        lm.reshard_(model)
        said = "\n".join(tokenizer.core.decode(tokens).strip().splitlines()[:8]) or "(nothing)"
        said = f"{data.GREEN}{said}{data.NO_COLOUR}" if has_colours() else said
        say(f"--- sample {when} training\n{args.sample}\n{said}\n---")


def export(args, at, model, source, raw_config, tokenizer_folder, weights_folder, base, rank, agreed):
    """Writes final/: the PEFT adapter, or the whole model, tensor by tensor. Collective. -> on rank 0 the adapter's
    tensors, or None."""
    part = Path(args.out) / "final.part"  # renamed when complete
    adapters = args.lora or args.qlora
    with agreed():
        if rank == 0:
            clear(part)
    tensors = ticking(at, lm.full_tensors(model, trainable_only=adapters))
    adapter = {name: tensor for name, tensor in tensors if rank == 0} if adapters else None
    with agreed():
        if adapters and rank == 0:
            lm.save_adapter(adapter, part, base, args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_targets)
        if not adapters:
            layout = {name: (tuple(p.shape), source.dtype(name)) for name, p in model.named_parameters()}
            tensors = ((name, tensor.to(source.dtype(name))) for name, tensor in tensors)
            lm.save_model(tensors, layout, part, raw_config, tokenizer_folder, weights_folder, write=rank == 0)
        if rank == 0:
            put_in_place(part)
    return adapter


def merge(args, source, adapter, raw_config, tokenizer_folder, weights_folder):
    """Writes merged/: the original weights with the adapter added in. One process, one tensor at a time."""
    part = Path(args.out) / "merged.part"
    clear(part)
    names = [name for name in source.tensors if not (name == lm.HEAD and raw_config.get("tie_word_embeddings"))]
    layout = {name: (tuple(source.tensors[name][1]), source.dtype(name)) for name in names}
    tensors = lm.merged_tensors(source, names, adapter, args.lora_alpha / args.lora_rank)
    lm.save_model(tensors, layout, part, raw_config, tokenizer_folder, weights_folder, write=True)
    put_in_place(part)


def clear(part):
    shutil.rmtree(part, ignore_errors=True)  # what a killed process has left
    part.mkdir()


def put_in_place(part):
    """final.part/ -> final/. The result of an earlier part of the run, if there is one, stays until this one is whole."""
    target, old = part.with_suffix(""), part.with_suffix(".old.part")
    sync(part)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    part.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


# ---------------------------------------------------------------- the run


def main(argv=None):
    args = parse_args(argv)
    sys.stdout.reconfigure(errors="backslashreplace")  # texts of the data, on whatever terminal
    if args.dry_run:
        return dry_run(args)
    device, rank, world, store = init_processes(args.fsdp2, args.timeout)
    at = {"phase": "start", "step": 0, "device": device, "rank": rank, "world": world, "tokens": 0, "config": None,
          "args": args, "moves": 0, "when": math.inf}  # a download may take as long as it takes
    if store is not None:
        threading.Thread(target=watch, args=(at, store.clone(), args.timeout), daemon=True).start()
    try:
        run(args, at, device, rank, world, store)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        report_out_of_memory(args, at, error)
        sys.stdout.flush()
        os._exit(OUT_OF_MEMORY)  # at once: the other ranks wait in a collective until torchrun ends them
    finally:
        at["over"] = True
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)


def run(args, at, device, rank, world, store):
    """A training run from top to bottom. `at` says to the reports of a hang or of memory running out how far it is."""
    agreed = functools.partial(together, rank, world, store)
    say = speak if rank == 0 else lambda text: None
    progress = rank == 0 and sys.stderr.isatty()
    launchers = torchruns(world)
    torch.manual_seed(args.seed + rank)  # for dropout alone: weights and data order have generators of their own
    if args.precision is None:
        native = torch.cuda.is_bf16_supported(False) if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()
        args.precision = "mixed" if native else "fp32"

    # ---- what the user gave: config, checkpoint, adapter, data. All of it is checked before anything is allocated
    with agreed():
        check_groups(args, world)
        if args.tensorboard and not importlib.util.find_spec("tensorboard"):
            raise ValueError("--tensorboard needs a package: pip install tensorboard")
        raw_config, tokenizer_folder, weights_folder, base = find_model(args.model, args.random_init)
        config = lm.parse_config(raw_config, f"{args.model}: config.json")
        check_groups(args, world, config.num_attention_heads)
        if config.sliding_window and args.seq_len > config.sliding_window:
            raise ValueError(f"--seq_len {args.seq_len}: config.json has sliding_window = {config.sliding_window}, which "
                             "is not implemented; up to that many tokens it changes nothing")
        if args.lr is None:  # QLoRA's 2e-4 for 7B and 1e-4 for 65B, and Adam's width rule (arXiv:2203.03466), agree
            args.lr = (2e-4 if args.lora or args.qlora else 2e-5) * 4096 / config.hidden_size
        with torch.device("meta"):
            model = lm.Transformer(config)
        source = lm.Checkpoint(weights_folder) if weights_folder else lm.RandomWeights(model, args.seed, device)
        lm.check_weights(model, source, args.model)
        adapter = None
        if args.adapter:
            adapter, args.lora_rank, args.lora_alpha, args.lora_targets = lm.open_adapter(args.adapter)
        tokenizer = data.Tokenizer(tokenizer_folder, args.chat_template)
        if args.compile:
            check_compiler(device)
        found = find_run(args.out, args.resume, launchers) if rank == 0 and not args.inspect else None
    args.out, folder = share(found, rank, world) or (None, None)
    move(at, "reading data")
    names, loaders, counts = [], [], []
    alive = functools.partial(tick_and_call, at, int)
    cache = Path(args.data_cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "oomph")).expanduser()
    first = os.environ.get("LOCAL_RANK", "0") == "0"  # each file is tokenized once per machine, or once per shared cache
    with agreed():
        started = time.perf_counter()
        specs = [(data.split_weight(spec)[0], held_out) for what, held_out in ((args.data, False), (args.eval_data, True))
                 for spec in what or ()]
        names = [data.cached(*spec, tokenizer, cache, alive, progress).name for spec in specs if first]
        seconds = time.perf_counter() - started
    shared = share(names, rank, world)
    with agreed():
        if first and names != shared:
            raise ValueError(f"--data, --eval_data: {platform.node()} has other files than the machine of rank 0, or another "
                             "version of Python, of a package or of data.py")
        folders = iter([cache / name for name in shared])
        for what in (args.data, args.eval_data):
            documents, count = data.open_documents(
                list(itertools.islice(folders, len(what))), what, args.seq_len, args.train_on, args.overflow, args.seed,
                config.vocab_size, args.min_supervised) if what else (None, None)
            counts.append(count)
            shape = args.seq_len, args.packing, args.batch_size
            loaders.append(data.Loader(documents, *shape, rank, world, args.seed, n_pieces=args.sequence_parallel)
                           if what else None)
    loader, eval_loader = loaders
    with agreed():
        groups = world // args.sequence_parallel
        per_step = args.batch_size * args.grad_accum * groups
        if len(loader.rows) < per_step:
            raise ValueError(f"a step takes {per_step} rows (--batch_size {args.batch_size} x --grad_accum "
                             f"{args.grad_accum} x {groups} {'ranks' if groups == world else 'groups of ranks'}) and the "
                             f"data makes {len(loader.rows)} of --seq_len "
                             f"{args.seq_len}: lower one of the four or give more data")
    if rank == 0:
        for what, one, count in zip((args.data, args.eval_data), loaders, counts):
            if what:
                print_data(args, what, one, count, tokenizer)
        print(f"data read in {seconds:.1f} s; tokenized files are kept in {cache}")
        print_examples(args, loader.documents, tokenizer)
    if args.inspect:
        return leave()

    # ---- a new run, or one that goes on: only with what does not change its mathematics
    settings = {
        **{f"config.json's {key}": value for key, value in dataclasses.asdict(config).items()},
        "--random_init": args.random_init, "method": "--qlora" if args.qlora else "--lora" if args.lora else "full fine-tuning",
        "rows a step (--batch_size x --grad_accum x ranks / --sequence_parallel)": per_step,
        "the tokens and masks of --data": loader.documents.crc(),
        **{f"--{name}": getattr(args, name) for name in (
            "lora_rank", "lora_alpha", "lora_dropout", "seq_len", "packing", "train_on", "seed", "precision",
            "optim", "stochastic_rounding", "lr", "min_lr", "warmup", "schedule", "weight_decay", "clip")},
    }
    settings["--lora_targets"] = sorted(args.lora_targets or ())
    settings, state = json.loads(json.dumps(settings, default=str)), None
    move(at, "reading the checkpoint", when=math.inf)  # however long a slow disk takes
    with agreed():
        if folder:
            state = read_state(folder, rank, world)
            check_settings(folder, state["settings"], settings)
    start = state["step"] if state else 0

    # ---- the model: vanilla on meta, each feature applied to it, and last the weights
    with agreed():
        if args.qlora:
            nf4.quantize_linears_(model.model.layers)
        if args.lora or args.qlora:
            lm.add_lora_(model, args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_targets)
        if adapter:
            lm.check_adapter(model, adapter, args.adapter)
    set_precision_(model, args.precision)
    model.lm_head.chunk = args.ce_chunk
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # a gradient that is not reduced yet is a whole one, 4 bytes a parameter: little for adapters, 280 GB for a 70B
    defer_sync = not args.fsdp2 or n_trained * 4 <= LATE
    move(at, "loading weights", config=config, tokens=tokens_of(args, loader.longest))
    cuda, card = device.type == "cuda", room_for(device, args.gpu_gib)
    planned = args if cuda else argparse.Namespace(  # on a CPU there is nothing to move activations from
        **{**vars(args), "offload": [what for what in args.offload if what != "activations"]})
    at["args"] = planned
    moments, host = plan(planned, config, world, at["tokens"], cuda)
    # pinned memory cannot be swapped or reclaimed: where it would take nearly all, slower copies are the better choice
    pin = cuda and sum(host.values()) < 0.8 * (host_share() or math.inf)
    attention = choose_attention_(config, args.seq_len, args.packing, model.compute_dtype, device, rank, world,
                                  args.sequence_parallel)
    if rank == 0:
        print_start(args, model, source, device, world, n_trained, defer_sync, pin, attention)
        print_plan(planned, config, world, at["tokens"], cuda, card,
                   "--gpu_gib" if args.gpu_gib else "the card" if cuda else "a rank's share of free memory",
                   host_share() if cuda else None)
    if args.memory_snapshot and cuda:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    if args.compile:
        compile_(model, fixed_length=args.packing, names=regions(args.activation_checkpointing, args.tiled_mlp))
    if args.tiled_mlp:
        lm.tile_feed_forward_(model, args.tiled_mlp)
    if args.activation_checkpointing:
        checkpoint_activations_(model, preserve_rng=bool(args.lora_dropout))
    if args.sequence_parallel > 1:
        model.sequence_group, _ = dist.new_subgroups(args.sequence_parallel, timeout=timedelta(seconds=args.timeout + 60))
    if args.fsdp2:
        shard_(model, device, args.precision, args.reshard_after_forward, args.shard_embeddings,
               "params" in args.offload, args.chunked_ce, pin, args.replicas)
    model.to_empty(device="cpu" if "params" in args.offload else device)
    model.tie_()
    started = time.perf_counter()
    source.rows = functools.partial(tick_and_call, at, source.rows)
    with agreed():
        frozen = torch.tensor(lm.load_weights_(model, source, adapter, args.seed, device, progress, frozen_only=bool(state)))
        if args.fsdp2 and world > 1:
            frozen *= rank < world // args.replicas  # the others hold the same rows again
            dist.all_reduce(frozen)
        settings["the frozen weights (checksum)"] = int(frozen)
        if state:
            check_settings(folder, state["settings"], settings)
    if "activations" in args.offload and device.type == "cuda":
        model.activation_hooks = OffloadActivations(device, pin)
    trained = [p for p in model.parameters() if p.requires_grad]
    move(at, "optimizer allocation")
    optimizer = make_optimizer(trained, args.lr, args.weight_decay, args.fused_adamw, args.optim == "adamw8bit",
                               args.stochastic_rounding, args.compile)
    bad = torch.zeros((), device=trained[0].device)  # 1 once a gradient was inf or nan
    in_backward = None
    if args.optim_in_backward:
        in_backward = StepInBackward(optimizer, trained, args.fused_adamw, bad, world, args.fsdp2, device, args.replicas)

    # ---- last words before training
    steps = args.steps or math.ceil(args.epochs * len(loader.rows) / per_step)
    evaluations = generators = None
    with agreed():
        if start > steps:
            raise ValueError(f"--resume {folder}: step {start}, and this run ends at step {steps}: raise --steps or --epochs")
        if state:
            generators = check_tensors(folder, state, training_tensors(model, optimizer), generator_states(rank, device))
    with agreed():
        if rank == 0:
            try:
                Path(args.out).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"--out {args.out}: {error.strerror}: give a folder that can be written to") from error
            written = {**vars(args), **versions(world), "torchrun": launchers}
            write_whole(Path(args.out, "args.json"), json.dumps(written, indent=2) + "\n")
            evaluations = [row for row in rewind(Path(args.out, "metrics.jsonl"), start) if "eval_loss" in row]
    evaluations = share(evaluations, rank, world)
    known = [state["best_eval"]] if state and state["best_eval"] else []  # of the run that this one branches off, too
    best = min([*known, *evaluations], key=lambda row: row["eval_loss"], default=None)
    if rank == 0:
        print(f"weights loaded in {time.perf_counter() - started:.1f} s")
        print(f"{steps:,} steps of {per_step} rows, learning rate {args.lr:.2g}; writing to {args.out}")
        if args.resume and not state:
            print("no checkpoint to continue from: starting at step 1")
        if state:
            print(f"continuing from {folder}: {start:,} steps, {state['tokens']:,} tokens done by {state['world']} rank(s)")
    sample = functools.partial(
        print_sample, args, say, model=model, tokenizer=tokenizer, chat=any(count.get("conversations") for count in counts[0]),
        device=device
    )
    move(at, "sample")
    if not state:
        sample("before")

    # ---- training
    traced = min(start + 2, steps - 1)  # the third step: everything is allocated and warm
    profiler = torch.profiler.profile() if args.profile and rank == 0 else None
    log = Log(args.out if rank == 0 else None, say, steps, len(loader.rows) / per_step, device, start,
              state["tokens"] if state else 0, state and state["first_loss"], best, args.tensorboard)
    own = folder and Path(folder).resolve().parent == Path(args.out).resolve()  # else --out branches off another run
    saver = Saver(args.out, args.keep, args.async_save, rank, world, log, start if own else None, pin, at)
    if state:
        move(at, "loading the checkpoint", when=math.inf)
        started = time.perf_counter()
        torch.manual_seed(args.seed + rank + 1_000_003 * start)  # for ranks that the checkpoint has no generators of
        generators = generators if state["world"] == world else {}
        with agreed():
            restore(folder, training_tensors(model, optimizer) | generators, saver.meet())
        with agreed():
            for name, generator in generators.items():
                try:
                    if name.endswith("cuda"):
                        torch.cuda.set_rng_state(generator, device)
                    else:
                        torch.set_rng_state(generator)
                except RuntimeError as error:
                    raise ValueError(f"{folder}: {name}: no state of a generator: {error}; {REMOVE}") from error
        say(f"checkpoint loaded in {time.perf_counter() - started:.1f} s")
        log.begin = log.mark = time.perf_counter()  # no part of a step's time
    compiled = 0, 0.0  # graphs, seconds
    fine = torch.zeros_like(bad)  # steps of this process before a gradient was inf or nan
    stop = StopSignal(world)

    def save(step):
        move(at, "checkpoint")
        saver.save(step, training_tensors(model, optimizer) | generator_states(rank, device), {
            "format": FORMAT, "step": step, "epoch": step * per_step / len(loader.rows), "rows": step * per_step,
            "steps": steps, "tokens": log.n_trained_on, "first_loss": log.first, "best_eval": log.best, "world": world,
            "settings": settings, **versions(world),
        })

    def evaluate_now(step):
        """-> whether a signal has cut it short."""
        move(at, "evaluation")
        started = time.perf_counter()
        if (result := evaluate(model, eval_loader, device, world, lambda: move(at, "evaluation") or stop.asked())) is None:
            return True
        log.write_eval(step, *result, time.perf_counter() - started)
        return False

    def end_early(step, number):
        save(step)
        saver.finish()
        saved = saver.step == step
        say(f"stopped by {signal.Signals(number).name} after step {step} of {steps}: "
            + (f"{args.out}/checkpoint-{step} is saved, --resume goes on from it" if saved else "NOT saved, see above"))
        leave()
        # torchrun relays its own signal; an exit code would make it start the run again
        raise SystemExit(1 if not saved else 0 if launcher() else 128 + number)

    def evaluation_due(step):
        return eval_loader and args.eval_every and step % args.eval_every == 0 and 0 < step < steps

    if evaluation_due(start) and all(row["step"] != start for row in evaluations) and evaluate_now(start):  # was cut short
        end_early(start, stop.asked())
    if not cuda and not args.fsdp2:  # whose gathered units would leave holes between the shards
        keep_freed_memory()
    rows = loader.ahead(start, steps, args.grad_accum, pin=cuda)
    for step in range(start, steps):
        log.start_step()
        move(at, "data", step=step + 1)
        if profiler and step == traced:
            traced_s = time.perf_counter()
            profiler.start()
            at["traced"] = torch.profiler.record_function("data")
            at["traced"].__enter__()
        batches, counted = next(rows)
        n_targets = int(counted[0])
        log.data_ready(counted, step_flops(config, *counted, n_trained if args.lora or args.qlora else None) / world)
        loss_sum = torch.zeros((), device=device)
        logged = step == start or (step + 1) % args.log_every == 0 or step == steps - 1
        lr = lr_at(step, steps, args.warmup, args.schedule, args.lr, args.min_lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if in_backward:
            in_backward.norm_squared.zero_()
        for i, batch in enumerate(batches):
            if args.fsdp2:
                last = i == len(batches) - 1
                model.set_requires_gradient_sync(last or not defer_sync)
                model.set_requires_all_reduce(last)  # between replicas once a step, however often inside them
            b = batch.to(device)
            move(at, "forward", tokens=b.tokens.numel())
            loss = model(b.tokens, b.targets, b.positions, b.spans, b.keep_S)
            move(at, "backward")
            # the sum over every rank and micro-batch, divided by all their targets; * world undoes the mean over ranks
            (loss * (world / n_targets)).backward()
            loss_sum += loss.detach()
        if not in_backward:
            if world > 1 and not args.fsdp2:
                average_gradients_(trained, world)
            norm = clip_gradients_(trained, args.clip)
            torch.maximum(bad, (~norm.isfinite()).float(), out=bad)

        fine += 1 - bad
        stopped = stop.asked()
        saving = stopped or (args.save_every and ((step + 1) % args.save_every == 0 or step == steps - 1))
        logged = logged or bool(stopped)
        if logged or saving or not args.fused_adamw:
            if world > 1:
                dist.all_reduce(loss_sum)
            if in_backward:
                norm = in_backward.norm()
            # the only host sync of the step
            loss, norm, broken = torch.stack([loss_sum / n_targets, norm.to(device), bad.to(device)]).tolist()
            if broken or not math.isfinite(loss):
                saver.finish()
                say(f"step {step + 1}: loss {loss}, gradient norm {norm}")
                refuse_not_finite(args, model, loader, fine, start, step, device, rank, world, say)
        move(at, "optimizer step")
        if not in_backward:
            # between log lines nobody looks: the kernel reads `found_inf` on the device and leaves the weights alone
            optimizer.found_inf = bad if args.fused_adamw else None
            optimizer.step()
            optimizer.zero_grad()
        if step == traced:
            if profiler:
                at.pop("traced").__exit__(None, None, None)
                if cuda:
                    torch.cuda.synchronize()
                profiler.stop()
                traced_s = time.perf_counter() - traced_s
                profiler.export_chrome_trace(str(Path(args.out, "trace.json.gz")))
                say(f"where step {step + 1} went, {traced_s * 1e3:,.0f} ms under the profiler: "
                    + where_time_went(profiler.key_averages(), traced_s, cuda))
            if args.memory_snapshot and cuda and rank == 0:
                torch.cuda.memory._dump_snapshot(str(Path(args.out, "memory.pickle")))
        if logged:
            log.write(step, loss, lr, norm)
        if args.compile and (now := compiled_so_far())[0] > compiled[0]:
            say(f"compiled in step {step + 1}: {now[0] - compiled[0]} graphs, {now[1] - compiled[1]:.1f} s")
            compiled = now
        saver.finish(wait=False)
        if stopped:
            end_early(step + 1, stopped)
        if saving:
            save(step + 1)
        if evaluation_due(step + 1) and evaluate_now(step + 1):
            end_early(step + 1, stop.asked())

    # ---- the result, before an evaluation or a sample could fail
    saver.finish()
    move(at, "export")
    adapter = export(args, at, model, source, raw_config, tokenizer_folder, weights_folder, base, rank, agreed)
    if eval_loader and all(row["step"] != steps for row in evaluations) and evaluate_now(steps):
        end_early(steps, stop.asked())
    move(at, "sample")
    sample("after")
    log.close(peak_of(moments)[1] / 2**30)
    at["over"] = True
    leave()  # what rank 0 still has to do keeps nobody waiting in a collective
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # nobody asks any more
    if args.merge and rank == 0:
        merge(args, source, adapter, raw_config, tokenizer_folder, weights_folder)
    say(f"done: {args.out}/final" + f" and {args.out}/merged" * args.merge)


if __name__ == "__main__":
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BrokenPipeError:  # of `| head`
        os._exit(1)
    except KeyboardInterrupt:
        print("train.py: interrupted; SIGTERM would have saved a checkpoint first", file=sys.stderr)
        code = 130
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # FSDP2's mesh keeps gloo's threads beyond destroy_process_group(); one of them freeing a tensor while the interpreter
    # shuts down aborts a finished run, seen once in 130 (pytorch #179291)
    os._exit(code)
