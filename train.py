"""oomph: fine-tunes Llama and Qwen models on the GPUs you have, in pure PyTorch, without running out of memory.

    python train.py                                                          # the built-in model and data, any machine
    torchrun --nproc_per_node 4 train.py --fsdp2 --qlora --offload           # the same, sharded, in 4 bits, offloaded
    torchrun --nproc_per_node 2 train.py --fsdp2 --qlora --offload --model Qwen/Qwen2.5-32B --data chat.jsonl
    torchrun --nproc_per_node 8 train.py --fsdp2 --model /models/Llama-3.1-8B --data a.jsonl b.txt --lr 1e-5

In the order of this file: flags, ranks, FSDP2, activation offload, optimizers, the memory plan, checkpoints, what a run
prints, and `main`, a whole training run from top to bottom. A memory feature is one function or one small class on a
finished vanilla module, and one call in `main`.
"""

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import importlib.util
import io
import itertools
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import sys
import textwrap
import time
import traceback
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import safetensors
import tokenizers
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

import data
import model as lm
import nf4

SAMPLES = {"stdlib:docs": "What does `shutil.copytree(src, dst)` do?", "stdlib:code": "def read_json(path):\n"}
NOT_FINITE, OUT_OF_MEMORY = 3, 4  # exit codes

# ---------------------------------------------------------------- flags


def number(kind, zero_too=False):
    """An argparse type: a positive finite number of `kind`, or zero as well."""

    def parse(text):
        value = kind(text)
        if not (0 < value < math.inf or (zero_too and value == 0)):
            raise argparse.ArgumentTypeError(f"{text}: expected {'zero or ' if zero_too else ''}a positive number")
        return value

    parse.__name__ = kind.__name__  # argparse prints it: "invalid int value"
    return parse


def parse_args(argv=None):
    parser = argparse.ArgumentParser(prog="train.py", allow_abbrev=False, description=__doc__.split("\n\n")[0])

    def refuse(message):  # without argparse's list of all flags, which each rank would print
        print(f"train.py: error: {message}", file=sys.stderr)
        raise SystemExit(2)

    parser.error = refuse
    yes_no, whole, whole_or_0 = argparse.BooleanOptionalAction, number(int), number(int, zero_too=True)
    amount, amount_or_0 = number(float), number(float, zero_too=True)

    add = parser.add_argument_group("model").add_argument
    add("--model", default="tiny", help="tiny (built in), a Hugging Face folder, a Hub id, or with --random_init one "
        "of " + ", ".join(lm.PRESETS) + " (default: tiny)")
    add("--random_init", action="store_true", help="shapes of --model, random weights (default: off)")
    add("--precision", choices=("mixed", "bf16", "fp32"), help="mixed: trained weights, gradients and optimizer in "
        "float32, products in bf16 (default: mixed; fp32 where bf16 is not native)")
    add("--adapter", metavar="DIR", help="start from this PEFT adapter, its rank, alpha and targets (default: none)")

    add = parser.add_argument_group("method (default: full fine-tuning)").add_argument
    add("--lora", action="store_true", help="train low-rank adapters, weights frozen in 16 bits (default: off)")
    add("--qlora", action="store_true", help="the same on weights frozen in NF4, 4.14 bits (default: off)")
    add("--lora_rank", type=whole, metavar="R", help="rank of the adapters (default: 16)")
    add("--lora_alpha", type=amount, help="adapters are scaled by alpha / rank (default: 32)")
    add("--lora_dropout", type=amount_or_0, help="fraction of an adapter's inputs zeroed in training (default: 0)")
    add("--lora_targets", nargs="+", choices=lm.LORA_TARGETS, metavar="LAYER",
        help=f"linear layers that get an adapter, of {', '.join(lm.LORA_TARGETS)} (default: all)")

    add = parser.add_argument_group("data").add_argument
    add("--data", nargs="+", default=["stdlib:docs"], metavar="FILE[:W]", help=".jsonl, .json, .txt (or .gz), or the "
        "built-in stdlib:docs, stdlib:code; :W reads a file W times an epoch (default: stdlib:docs)")
    add("--eval_data", nargs="+", metavar="FILE[:W]", help="the same; stdlib:* is the 5 %% held out (default: none)")
    add("--seq_len", type=whole, default=1024, help="tokens in a row (default: 1024)")
    add("--overflow", choices=("split", "drop", "truncate"),
        help="documents of more than --seq_len tokens (default: split texts, drop conversations and completions)")
    add("--packing", action=yes_no, default=True, help="several documents in a row, kept apart (default: on)")
    add("--train_on", choices=("targets", "all"), default="targets",
        help="targets: assistant turns, completions, texts; all: every token (default: targets)")
    add("--chat_template", metavar="FILE", help="jinja file in place of the model's own (default: the model's)")
    add("--inspect", type=whole, metavar="N", help="print N examples, trained tokens in green, and exit (default: off)")

    add = parser.add_argument_group("memory and speed").add_argument
    add("--fsdp2", action="store_true", help="shard parameters, gradients and optimizer over the ranks (default: off)")
    add("--reshard_after_forward", action=yes_no, default=True,
        help="free a block's gathered weights after its forward, gather them again in the backward (default: on)")
    add("--shard_embeddings", action=yes_no, default=True,
        help="gather embedding and head only while in use; a tied pair stays gathered (default: on)")
    add("--replicas", type=whole, default=1, metavar="N",
        help="copies of the sharded model, each on world / N consecutive ranks, usually one node (default: 1)")
    add("--sequence_parallel", type=whole, default=1, metavar="N",
        help="split each row over N consecutive ranks; --batch_size then counts rows of such a group (default: 1)")
    add("--offload", nargs="*", choices=("activations", "params"), help="to host memory: block inputs until the "
        "backward; weights, gradients and optimizer (default: none; bare: all that applies)")
    add("--activation_checkpointing", action=yes_no, default=True,
        help="keep each block's input only and recompute the rest in the backward (default: on)")
    add("--chunked_ce", action=yes_no, default=True,
        help="head and loss in chunks of tokens, no [tokens, vocabulary] tensor (default: on)")
    add("--ce_chunk", type=whole, metavar="TOKENS", help="tokens in a chunk of the loss (default: 1024)")
    add("--tiled_mlp", type=whole, metavar="TOKENS", help="the MLP in tiles of tokens, e.g. of 4096 (default: off)")
    add("--optim", choices=("adamw", "adamw8bit"), default="adamw",
        help="adamw8bit: 2 bytes of state a parameter instead of 8 (--precision bf16: 4) (default: adamw)")
    add("--stochastic_rounding", action="store_true", help="round bf16 weights and moments at random, right on "
        "average, so that small updates count; needs --precision bf16 (default: off)")
    add("--optim_in_backward", action="store_true",
        help="update each weight as soon as its gradient is complete and free the gradient; no clipping (default: off)")
    add("--fused_adamw", action=yes_no, default=True, help="AdamW as one kernel, on GPU and CPU (default: on)")
    add("--compile", action="store_true",
        help="torch.compile on the blocks, the loss and NF4, half a minute in the first step (default: off)")

    add = parser.add_argument_group("schedule").add_argument
    add("--batch_size", type=whole, default=1, help="rows per rank and micro-batch (default: 1)")
    add("--grad_accum", type=whole, default=1, help="micro-batches per step (default: 1)")
    add("--steps", type=whole, help="optimizer steps (default: from --epochs)")
    add("--epochs", type=amount, default=1.0, help="passes over the data, unless --steps is given (default: 1)")
    add("--lr", type=amount_or_0, help="peak learning rate (default: 2e-4 with adapters, 2e-5 without, at a hidden "
        "size of 4096, in inverse proportion at others)")
    add("--min_lr", type=amount_or_0, default=0.0, help="learning rate at the end of cosine and linear (default: 0)")
    add("--warmup", type=amount_or_0, default=0.03,
        help="steps of linear warmup, from lr / (warmup + 1); below 1 a fraction of all steps (default: 0.03)")
    add("--schedule", choices=("cosine", "linear", "constant"), default="cosine", help="after warmup (default: cosine)")
    add("--weight_decay", type=amount_or_0, default=0.01, help="on matrices, not on norms and biases (default: 0.01)")
    add("--clip", type=amount_or_0, help="largest gradient norm, 0: off (default: 1; 0 with --optim_in_backward)")
    add("--seed", type=whole_or_0, default=0, help="of data order, adapters, random weights and dropout (default: 0)")

    add = parser.add_argument_group("run").add_argument
    add("--out", metavar="DIR", help="folder of the run; to continue one, --resume (default: out/<date-time>)")
    add("--save_every", type=whole_or_0, default=500, metavar="STEPS",
        help="steps between checkpoints, and one at the end; 0: only when a signal stops the run (default: 500)")
    add("--keep", type=whole, default=2, metavar="N", help="newest checkpoints that are kept (default: 2)")
    add("--resume", nargs="?", const="auto", metavar="DIR", help="continue the newest complete checkpoint of --out, or "
        "of the newest run under out/, or start if there is none; or a checkpoint or run DIR (default: a new run)")
    add("--async_save", action="store_true", help="write checkpoints in the background (default: off)")
    add("--timeout", type=amount, default=1800.0, metavar="SECONDS",
        help="end a run of several ranks when a step takes longer; each says where it stands (default: 1800)")
    add("--log_every", type=whole, default=10, metavar="STEPS", help="steps between log lines (default: 10)")
    add("--eval_every", type=whole, metavar="STEPS", help="steps between evaluations (default: at the end only)")
    add("--dry_run", action="store_true", help="print the memory plan of --world GPUs and exit (default: off)")
    add("--world", type=whole, metavar="N", help="ranks of --dry_run (default: 1)")
    add("--gpu_gib", type=amount, metavar="GIB", help="memory of a GPU that plan and run may use (default: all)")
    add("--tensorboard", action="store_true", help="metrics for TensorBoard (pip install tensorboard) (default: off)")
    add("--profile", action="store_true", help="trace.json.gz of the third step, for Perfetto (default: off)")
    add("--memory_snapshot", action="store_true",
        help="memory.pickle of the GPU's first three steps, for pytorch.org/memory_viz (default: off)")
    add("--merge", action="store_true", help="also write the 16-bit model with the adapter merged in (default: off)")
    add("--sample", metavar="TEXT", help="continue or answer this before and after training, '' for nothing "
        "(default: a question for the built-in data, nothing for files)")

    args = parser.parse_args(argv)
    for wrong, message in conflicts(args):
        if wrong:
            parser.error(message)
    if args.offload == []:
        args.offload = ["activations", "params"] if args.fsdp2 else ["activations"]
    args.offload = args.offload or []
    if args.clip is None:
        args.clip = 0.0 if args.optim_in_backward else 1.0
    args.ce_chunk = (args.ce_chunk or 1024) if args.chunked_ce else 0
    if args.lora or args.qlora:
        args.lora_rank, args.lora_alpha = args.lora_rank or 16, args.lora_alpha or 32
        args.lora_dropout, args.lora_targets = args.lora_dropout or 0.0, args.lora_targets or list(lm.LORA_TARGETS)
    if args.sample is None and not args.random_init:
        args.sample = SAMPLES.get(args.data[0], "")
    return args


def conflicts(args):
    """[(whether it is so, what to change)] of flags that cannot work together."""
    adapters, offload = args.lora or args.qlora, args.offload or []
    sharded_only = [("--no-reshard_after_forward", not args.reshard_after_forward), ("--replicas", args.replicas > 1),
                    ("--no-shard_embeddings", not args.shard_embeddings), ("--offload params", "params" in offload)]
    return [
        (args.lora and args.qlora, "--lora and --qlora: choose one, --qlora is --lora on weights in NF4"),
        *((getattr(args, flag) and not adapters, f"--{flag} needs --lora or --qlora")
          for flag in ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "adapter", "merge")),
        *((args.adapter and getattr(args, flag), f"--{flag} and --adapter: leave one out, the adapter has its own")
          for flag in ("lora_rank", "lora_alpha", "lora_targets", "random_init")),
        ((args.lora_dropout or 0) >= 1, "--lora_dropout is a fraction: give a number below 1"),
        (args.world and not args.dry_run, "--world is for --dry_run: torchrun --nproc_per_node is for a run"),
        (args.model in lm.PRESETS and not args.random_init and not args.dry_run, f"--model {args.model} is a preset of "
         f"shapes: add --random_init, or for the trained weights --model {lm.PRESETS.get(args.model, [''])[0]}"),
        *((given and not args.fsdp2, f"{flag} changes how FSDP2 works: add --fsdp2") for flag, given in sharded_only),
        (args.offload not in (None, ["params"]) and not args.activation_checkpointing, "--offload activations needs "
         "--activation_checkpointing: a block's input crosses the bus in time, all that a block computes does not"),
        (args.ce_chunk and not args.chunked_ce, "--ce_chunk and --no-chunked_ce: leave one out"),
        (args.stochastic_rounding and args.precision != "bf16", "--stochastic_rounding: add --precision bf16"),
        (not args.fused_adamw and (args.optim == "adamw8bit" or args.stochastic_rounding), "--no-fused_adamw: leave it "
         "out, --optim adamw8bit and --stochastic_rounding have a step of their own"),
        (args.optim_in_backward and args.grad_accum > 1, "--optim_in_backward frees gradients: --grad_accum must be 1"),
        (args.optim_in_backward and args.clip, "--optim_in_backward frees gradients before their norm is known: leave "
         "out --clip"),
        (args.async_save and not args.save_every, "--async_save and --save_every 0: leave one out, nothing is written"),
        (args.eval_every and not args.eval_data, "--eval_every needs --eval_data"),
    ]


# ---------------------------------------------------------------- ranks


class Ranks:
    """This process among the others: rank, world, device, and how ranks talk outside of training. `gather` and `agree`
    use a gloo group of their own that never times out: in set-up and in saves one rank may work for an hour while the
    others wait. In the training loop `alive` ends a job in which a rank hangs or is stopped."""

    def __init__(self, want_group, timeout):
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        self.timeout, self.wait = timeout, timedelta(seconds=timeout + 60)  # of collectives: alive() speaks first
        self.rank, self.world, self.control, self.device, self.device_name = 0, 1, None, torch.device("cpu"), "CPU"
        self.local, n_local = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if torch.cuda.is_available():
            if n_local > torch.cuda.device_count():
                raise SystemExit(f"train.py: error: --nproc_per_node {n_local}: {torch.cuda.device_count()} GPUs")
            self.device = torch.device("cuda", self.local)
            torch.cuda.set_device(self.device)
            self.device_name = torch.cuda.get_device_name(self.device)
        if int(os.environ.get("OMP_NUM_THREADS", 1)) == 1:  # torchrun's default leaves CPU work on one core a rank
            torch.set_num_threads(max(1, data.n_cores() // n_local))
        # gloo beside NCCL: tensors on the CPU (offloaded parameters, signals) need collectives too
        backend, store = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo", dist.HashStore()
        if "RANK" in os.environ:
            store, self.rank, self.world = next(rendezvous("env://", timeout=self.wait))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                # torchrun keeps its store over restarts, and in it the addresses of dead processes (pytorch #135712)
                store = dist.PrefixStore("restart " + os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        if "RANK" in os.environ or want_group:
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=self.wait)
        if self.world > 1:
            self.control = dist.new_group(backend="gloo", timeout=timedelta(days=30))

    def say(self, text):
        """Prints on rank 0."""
        try:
            if self.rank == 0:
                print(text, flush=True)
        except BrokenPipeError:  # a reader that went away is no reason to stop: metrics.jsonl has the numbers
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def gather(self, value):
        """[value of each rank] on every rank: anything that pickles. Never times out."""
        values = [value] * self.world
        if self.control is not None:
            dist.all_gather_object(values, value, self.control)
        return values

    @contextlib.contextmanager
    def agree(self):
        """An input error (ValueError, OSError) inside the block on any rank ends all ranks, with one message. Without
        this, ranks that saw no error would wait in their next collective until its timeout."""
        error = None
        try:
            yield
        except (ValueError, OSError) as caught:
            error = str(caught)
        errors = [text for text in self.gather(error) if text]
        if errors:
            self.leave()
            raise SystemExit(f"train.py: error: {errors[0]}" if self.rank == 0 else 1)

    def alive(self):
        """Called at each step and evaluation batch. When the next call does not come within `timeout` seconds, this
        rank prints where each of its threads stands and ends: a collective that hangs says nothing (torchtitan #3065).
        The rank that is not in a collective is the late one."""
        if self.world > 1:
            faulthandler.dump_traceback_later(self.timeout, exit=True)

    def leave(self):
        """Ends the process group on all ranks at once: gloo aborts a process that leaves while others talk to it."""
        faulthandler.cancel_dump_traceback_later()
        if dist.is_initialized():
            dist.barrier(self.control)
            dist.destroy_process_group()


class StopSignal:
    """SIGTERM (a job's end, torchrun's shutdown), SIGUSR1 (a script) or Ctrl-C on any rank, seen by all at one step.
    A second Ctrl-C ends a single process at once; torchrun itself sends each rank a second one."""

    def __init__(self):
        self.number = 0
        self.handlers = {n: signal.signal(n, self.note) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}

    def note(self, number, _):
        if number == self.number == signal.SIGINT and "RANK" not in os.environ:
            raise KeyboardInterrupt
        self.number = number

    def asked(self, ranks):
        """The signal's number, or 0. Collective: an all-reduce of one number on the CPU, which alive() watches."""
        number = torch.tensor(self.number)
        if ranks.world > 1:
            dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def release(self):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- memory of the CPU, FSDP2, activation offload


def keep_freed_memory(on):
    """Tells glibc to keep what is freed. It maps every tensor of 32 MiB and more anew, in pages of 4 KiB that come
    zeroed and after a fault each: a fifth of a step on a CPU. Memory grows by a few percent where sizes vary."""
    if on and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for a large block
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: give nothing back


def shard_(model, args, device, pin):
    """FSDP2 (arXiv:2304.11277, each parameter sharded on dim 0): a block is gathered before it runs and freed after.
    One all-gather unit per block, one for the embedding and one for the head; the last norm belongs to the root, which
    stays gathered from forward to backward. With replicas (hybrid sharding) weights are gathered inside a replica only,
    and replicas exchange 2 * (N - 1) / N times the bytes of a gradient's shard."""
    nf4.shard_bytes_on_old_torch_()
    n_shards = dist.get_world_size() // args.replicas
    if args.replicas == 1:
        mesh = init_device_mesh(device.type, (n_shards,))
    else:
        mesh = init_device_mesh(device.type, (args.replicas, n_shards), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(
        param_dtype=model.compute_dtype,
        reduce_dtype=torch.bfloat16 if args.precision == "bf16" else torch.float32,
        cast_forward_inputs=False,  # or RoPE's float32 angles would arrive in bf16
    )
    offload = CPUOffloadPolicy(pin_memory=pin) if "params" in args.offload else OffloadPolicy()
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    *blocks, last = model.model.layers
    for block in blocks:
        shard(block, reshard_after_forward=args.reshard_after_forward)
    shard(last, reshard_after_forward=False)  # the backward starts here: freeing it would gather it twice
    if args.shard_embeddings and not model.config.tie_word_embeddings:
        # FSDP2 keeps a shared parameter shared only inside one unit, so a tied pair stays in the root
        shard(model.model.embed_tokens, reshard_after_forward=True).set_unshard_in_backward(False)
        head = shard(model.lm_head, reshard_after_forward=args.chunked_ce)
        head.set_unshard_in_backward(not args.chunked_ce)  # the chunked loss has its gradients before the backward
    shard(model, reshard_after_forward=False)


PAGE = 1 << 22  # bytes: a power of two, because torch's pinned allocator rounds up to one; 0.16 ms on PCIe 4


class Parked:
    """A saved tensor in pages of host memory; on its way back `arriving` is (tensor, event of its copy)."""

    def __init__(self, tensor, pages):
        self.shape, self.dtype, self.pages, self.arriving = tensor.shape, tensor.dtype, pages, None

    def copies(self, tensor):
        """[(part of a page, the same part of a contiguous tensor)]."""
        parts = tensor.view(-1).view(torch.uint8).split(PAGE)
        return [(page[: len(part)], part) for page, part in zip(self.pages, parts, strict=True)]


class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    """Keeps the tensors that autograd saves inside the context in host memory: copied out behind the forward, brought
    back ahead of the backward, both on a side stream. With checkpointing these are the blocks' inputs, 2*D bytes a
    token and layer, hidden behind a block's compute on any PCIe 4 card (ALST, arXiv:2506.13996).

    Two ways to corrupt this silently, both met by torchtune, and what prevents them here:
    - memory reused while the side stream still reads it: a tensor on its way out is held until the compute stream has
      waited for its copy.
    - memory reused while a view of it lives on in the backward (torchtune #1860, #1936): a tensor on its way in is
      allocated on the compute stream and nobody counts its uses; it is free when its last view is.
    Pinned pages are allocated once and reused. On a CPU nothing is gained; tests run the same with plain copies there.
    """

    def __init__(self, device, pin=True, min_bytes=1 << 16):
        super().__init__(self.pack, self.unpack)
        self.device, self.pin, self.min_bytes = device, pin and device.type == "cuda", min_bytes
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.leaving = collections.deque()  # (tensor, event of its copy)
        self.free_pages, self.parked = [], []  # parked in the order of packing: the backward asks for the newest first

    def __enter__(self):
        while self.parked:  # of a forward that had no backward
            self.free_pages += self.parked.pop().pages
        return super().__enter__()

    def take_pages(self, n_bytes):
        n_pages = -(-n_bytes // PAGE)
        while len(self.free_pages) < n_pages:
            self.free_pages.append(torch.empty(PAGE, dtype=torch.uint8, pin_memory=self.pin))
        taken, self.free_pages = self.free_pages[:n_pages], self.free_pages[n_pages:]
        return taken

    def copy_aside(self, pairs):
        """target <- source on the side stream after all compute issued so far -> the event of its end (CPU: None)."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):  # a no-op for None
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self.stream and self.stream.record_event()

    def wait_for(self, event):
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def release(self, n_held):
        """Drops tensors that were copied out, all but the newest `n_held`; the compute stream waits for the copies."""
        while len(self.leaving) > n_held:
            self.wait_for(self.leaving.popleft()[1])

    def pack(self, tensor):
        if isinstance(tensor, nn.Parameter) or tensor.device.type != self.device.type or tensor.nbytes < self.min_bytes:
            return tensor
        tensor = tensor.contiguous()
        parked = Parked(tensor, self.take_pages(tensor.nbytes))
        self.leaving.append((tensor, self.copy_aside(parked.copies(tensor))))
        self.release(n_held=1)  # one copy behind the compute; more would only keep more on the device
        self.parked.append(parked)
        return parked

    def bring_back(self, parked):
        if parked.arriving is None:
            tensor = torch.empty(parked.shape, dtype=parked.dtype, device=self.device)
            parked.arriving = tensor, self.copy_aside([(part, page) for page, part in parked.copies(tensor)])

    def unpack(self, parked):
        if isinstance(parked, torch.Tensor):
            return parked
        if parked not in self.parked:
            raise RuntimeError("--offload activations: a backward asks for a tensor whose pages were already reused")
        self.release(n_held=0)
        self.bring_back(parked)
        (tensor, event), parked.arriving = parked.arriving, None
        self.wait_for(event)
        self.parked.remove(parked)
        self.free_pages = parked.pages + self.free_pages  # written next on the same side stream, after this copy
        if self.parked:  # the next one starts its way back while this block computes
            self.bring_back(self.parked[-1])
        return tensor


# ---------------------------------------------------------------- optimizers, learning rate, evaluation


def make_optimizer(params, args, bad):
    """AdamW, decay on matrices only: pulling norms and biases towards zero regularises nothing. Fused, it reads `bad`
    on the device and changes nothing where that is 1. All state is allocated here: no later step takes more memory."""
    matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}]
    groups += [{"params": vectors, "weight_decay": 0.0}] if vectors else []
    if args.optim == "adamw8bit" or args.stochastic_rounding:
        return CompactAdamW(groups, args, bad)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=args.fused_adamw)
    for p in params:  # as torch would at the first step
        optimizer.state[p] = {"step": torch.zeros((), device=p.device if args.fused_adamw else "cpu"),
                              "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    if args.fused_adamw:
        optimizer.found_inf = bad
    return optimizer


BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # torch's defaults
MOMENTS = "exp_avg", "exp_avg_sq"  # torch's names
BLOCK = 256  # neighbours in a row that share a scale
# The codes of a moment are small floats with 3 bits of mantissa, relative to the largest magnitude of the block: bits
# 20 to 27 of a float32 from 2 up. A shift encodes them; between two codes the value is linear, which dithering needs.
FLOATS = (1024 + torch.arange(256, dtype=torch.int32) << 20).view(torch.float32)  # 2, 2.25, ... 1.875 * 2**32
# a hair below the largest code, so that rounding cannot carry the largest magnitude of a block beyond it
M_TOP, V_TOP = (FLOATS[127].item() - 2) * (1 - 2**-21), FLOATS[255].item() * (1 - 2**-21)


@functools.cache
def code_levels(device):
    """The 256 levels of m and of v, relative to the largest magnitude of their block. Steps of v: 6 to 12 %. m: a sign
    and 127 magnitudes down to 2e-6, closing in on zero evenly. v: down to 2.5e-10, 1.6e-5 in its root, without a zero:
    smaller values are rounded up, because a v of 0 under an m that is not 0 would divide by eps."""
    return (torch.cat([FLOATS[:128] - 2, 2 - FLOATS[:128]]) / M_TOP).to(device), (FLOATS / V_TOP).to(device)


def dither_words(step, number, start, stop, D, device):
    """Odd int32 factors for rows start..stop of the number-th parameter: rows_3N (for m, v, the weight) and cols_D.

    The low bits of rows[i] * cols[j] are the random bits of element (i, j): uniform, independent between elements and
    steps, and the same for any world size, with no generator to save. torch.rand takes six times as long on a CPU.
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
    if dtype is torch.float32:
        return x
    return drop_bits(x, dither, 16).bitwise_left_shift_(16).view(torch.float32).to(dtype)


def read_moment(stored, scales, levels):
    """-> float32, which may be `stored` itself."""
    if stored.dtype is not torch.uint8:
        return stored.float()
    return levels.index_select(0, stored.reshape(-1).int()).view(stored.shape).mul_(scales)


def write_moment_(moment, x, signed, dither, skip):
    stored, scales, _ = moment
    if stored.dtype is not torch.uint8:
        stored.copy_(torch.where(skip, stored, round_to(stored.dtype, x, dither)))
        return
    y = x.abs() if signed else x
    largest = y.amax(-1, keepdim=True)
    up = (M_TOP if signed else V_TOP) / largest.clamp_min(1e-28)  # a smaller block is nothing beside eps
    y = (y * up).add_(2) if signed else (y * up).clamp_min_(2)
    codes = drop_bits(y, dither, 20)
    if signed:
        codes = codes.bitwise_and_(127).bitwise_or_((x.view(torch.int32) >> 24).bitwise_and_(128))
    stored += (codes.to(torch.uint8) - stored) * ~skip  # modulo 256; torch.where is ten times slower on a CPU's bytes
    scales.copy_(torch.where(skip, scales, largest))


def adamw_(w, grad, m, v, dither, numbers, skip, stochastic_rounding):
    """A step of AdamW on w, m and v in place, computed in float32. Where the bool `skip` is true nothing changes.

    w, grad: [n, b, 256], b blocks of n rows. m, v: (stored [n, b, 256], scales [n, b, 1], levels). dither: (rows
    [3, n, 1, 1], cols [b, 256]) of dither_words. numbers: 1 - lr * decay, lr over the bias of m, root of the bias of v.
    v decays by 0.1 % a step, far below a step of its code (or of bf16): rounded to the nearest it would never change.
    So rounding is random and right on average, of v and not of its root, because it is v that is averaged over steps.
    """
    (rows, cols), (keep, lr, v_unbias), grad = dither, numbers, grad.float()
    new_m = torch.lerp(read_moment(*m), grad, 1 - BETA1)
    new_v = (read_moment(*v) * BETA2).addcmul_(grad, grad, value=1 - BETA2)
    write_moment_(m, new_m, True, rows[0] * cols, skip)
    write_moment_(v, new_v, False, rows[1] * cols, skip)
    size = new_v.sqrt_().div_(v_unbias).add_(EPS)
    new_w = (w.float() * keep).sub_(new_m.mul_(lr).div_(size))
    new_w = round_to(w.dtype, new_w, rows[2] * cols) if stochastic_rounding else new_w.to(w.dtype)
    w.copy_(torch.where(skip, w, new_w))


class CompactAdamW(torch.optim.Optimizer):
    """AdamW of --optim adamw8bit (blocks as in arXiv:2110.02861): 2 + 8/256 bytes of state a parameter, not 8; and of
    --stochastic_rounding: the moments too are rounded at random, 0.999 of a bf16 number is that number again. Blocks
    lie within a row: a rank works on its own rows, and their bytes do not depend on the world size. State has the
    parameter's shape and sharding, the scales of [N, D] are [N, D/256]. Norms and biases keep float32 moments."""

    def __init__(self, groups, args, bad):
        super().__init__(groups, {"lr": args.lr})
        # a graph each for whole blocks, for the shorter ones, for vectors
        self.adamw_ = torch.compile(adamw_, dynamic=True) if args.compile else adamw_
        self.stochastic_rounding, self.found_inf, self.numbers = args.stochastic_rounding, bad, {}
        for p in itertools.chain(*(group["params"] for group in self.param_groups)):
            self.numbers[p] = len(self.numbers)
            dtype = torch.float32 if p.dim() < 2 else torch.uint8 if args.optim == "adamw8bit" else p.dtype
            self.state[p] = {"step": torch.zeros(())}  # on the CPU: reading it does not wait for the device
            for moment in MOMENTS:
                self.state[p][moment] = torch.zeros_like(p, dtype=dtype)
                if dtype is torch.uint8:
                    self.state[p][f"{moment}_scales"] = zero_scales(p)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update_(p, group["lr"], group["weight_decay"])

    def update_(self, p, lr, weight_decay):
        state, (_, start) = self.state[p], lm.local(p)
        state["step"] += 1
        w, grad, m, v = (matrix_of(x) for x in (p, p.grad, state["exp_avg"], state["exp_avg_sq"]))
        scales = [matrix_of(state[f"{moment}_scales"]) if m.dtype is torch.uint8 else None for moment in MOMENTS]
        step, (N, D) = int(state["step"]), w.shape
        rows_3N, cols_D = dither_words(step, self.numbers[p], start, start + N, D, w.device)
        numbers = 1 - lr * weight_decay, lr / (1 - BETA1**step), (1 - BETA2**step) ** 0.5
        numbers = torch.tensor(numbers, dtype=torch.float64)  # torch.compile would take a float for a constant
        skip = self.found_inf > 0
        # float32 temporaries of 16 MiB each on a GPU; of 4 MiB on a CPU, where larger ones are new pages
        n_rows, whole = max(1, (1 << (20 if w.device.type == "cpu" else 22)) // D), D // BLOCK * BLOCK
        for i, (first, last) in itertools.product(range(0, N, n_rows), ((0, whole), (whole, D))):
            if first == last:
                continue  # whole blocks, then the shorter one at the end of a row
            rows, blocks = slice(i, i + n_rows), slice(first // BLOCK, -(-last // BLOCK))
            split = functools.partial(torch.unflatten, dim=-1, sizes=(-1, min(BLOCK, last - first)))
            moments = [(split(stored[rows, first:last]), s if s is None else s[rows, blocks, None], levels)
                       for stored, s, levels in zip((m, v), scales, code_levels(w.device))]
            self.adamw_(split(w[rows, first:last]), split(grad[rows, first:last]), *moments,
                        (rows_3N[:, rows, None, None], split(cols_D[first:last])), numbers.unbind(), skip,
                        self.stochastic_rounding)


def matrix_of(x):
    """This rank's rows of a parameter or its state as a plain matrix."""
    return lm.local(x)[0].reshape(-1, *(x.shape[1:] or [1]))


def zero_scales(p):
    """Float32 zeros [N, D/256] with the sharding of p [N, D]."""
    shape = p.shape[0], -(-p.shape[1] // BLOCK)
    zeros = torch.zeros(len(lm.local(p)[0]), shape[1], device=p.device)
    if not isinstance(p, DTensor):
        return zeros
    return DTensor.from_local(zeros, p.device_mesh, p.placements, run_check=False, shape=shape, stride=(shape[1], 1))


def lr_at(step, steps, args):
    """Learning rate of step 0, 1, ...: linear warmup, then constant, or linear or cosine down to --min_lr."""
    warmup = args.warmup * steps if args.warmup < 1 else args.warmup
    if step < warmup:
        return args.lr * (step + 1) / (warmup + 1)
    if args.schedule == "constant":
        return args.lr
    progress = (step - warmup) / max(1, steps - warmup)
    height = 1 - progress if args.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return args.min_lr + (args.lr - args.min_lr) * height


LATE = 2**30  # bytes of unreduced gradients that may be held until the last micro-batch; a 70B would have 280 GB


def average_gradients_(params, world):
    """The mean over ranks where every rank holds the whole model. All-reduces are queued, then waited for."""
    work = [dist.all_reduce(p.grad, async_op=True) for p in params]
    for handle, p in zip(work, params, strict=True):
        handle.wait()
        p.grad.div_(world)


def clip_gradients_(params, clip):
    """Scales the gradients to an L2 norm of at most `clip` (0: not at all) -> the norm before, on the device. Under
    FSDP2 it is a DTensor of partial sums: only full_tensor() is the norm of all ranks (pytorch #121020)."""
    norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if clip:
        nn.utils.clip_grads_with_norm_(params, clip, norm)
    return norm


class StepInBackward:
    """--optim_in_backward: each parameter is updated as soon as its gradient is complete, and the gradient freed
    (LOMO, arXiv:2306.09782). No more gradients are alive than those of one FSDP unit, or one without FSDP2. autograd
    calls the hooks, or FSDP2 after its reduce-scatter; every rank in the same order. A gradient that is not finite sets
    `bad` and stops this rank's updates from there on."""

    def __init__(self, optimizer, params, bad, ranks, args):
        self.optimizer, self.bad, self.ranks, self.args = optimizer, bad, ranks, args
        self.norm_squared = torch.zeros_like(bad)
        for p in params:
            p.register_post_accumulate_grad_hook(self.update)

    @torch.no_grad()
    def update(self, p):
        if self.ranks.device.type != self.bad.device.type:  # torch 2.11 calls before an offloaded gradient has arrived
            torch.cuda.current_stream().synchronize()
        if self.ranks.world > 1 and not self.args.fsdp2:
            average_gradients_([p], self.ranks.world)
        norm = torch.linalg.vector_norm(lm.local(p.grad)[0]).float()  # dtype=float32 would copy a bf16 gradient
        self.norm_squared += norm.square()
        torch.maximum(self.bad, (~norm.isfinite()).float(), out=self.bad)
        if self.args.fused_adamw or not self.bad:  # only the fused kernel (and ours) reads found_inf on the device
            self.optimizer.step()  # for p alone: no other gradient is alive
        p.grad = None

    def norm(self):
        """The gradient norm of the step. Where gradients are shards, the norm and `bad` become those of all ranks."""
        norm_squared = self.norm_squared.clone()
        self.norm_squared.zero_()
        if self.args.fsdp2:
            for x, op in ((norm_squared, dist.ReduceOp.SUM), (self.bad, dist.ReduceOp.MAX)):
                dist.all_reduce(x, op)
            norm_squared /= self.args.replicas  # each holds the same gradients
        return norm_squared.sqrt()


def evaluate(model, loader, ranks, stop):
    """-> (mean loss per supervised token, number of those), over all rows once, through the loss path of training; None
    once a signal has arrived."""
    model.eval()
    loss_sum, n_targets, stopped = torch.zeros((), dtype=torch.float64, device=ranks.device), 0, 0
    with torch.no_grad():
        for batch in loader.once():
            ranks.alive()
            if stopped := stop.asked(ranks):
                break
            b = batch.to(ranks.device)
            loss_sum += model(b.tokens, b.targets, b.positions, b.spans, b.keep_S)
            n_targets += len(b.keep_S)
    model.train()
    lm.reshard_(model)
    if stopped:
        return None
    sums = [sum(values) for values in zip(*ranks.gather((loss_sum.item(), n_targets)))]
    return sums[0] / sums[1], sums[1]


# bf16 matrix products, dense, FLOP/s, by a part of the device's name; the first that fits
PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12,
         "RTX 5090": 209e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "L40S": 362e12, "A6000": 155e12, "A10G": 70e12}


# ---------------------------------------------------------------- the memory plan

GIB = 2**30
OVERHEAD = GIB  # assumed for CUDA's context, NCCL and fragmentation; not measured
ALWAYS = "weights", "NF4 weights", "adapters", "optimizer"
KINDS = *ALWAYS, "gradients", "saved activations", "block workspace", "logits chunk", "unsharded units"


class Unit(NamedTuple):
    """Bytes of a module's parameters on rank 0: FSDP2 cuts rows like torch.chunk, so no rank has more of them."""

    always: dict  # {kind: bytes}
    tensors: list  # trained weights and their optimizer state, one by one
    gathered: int  # in the dtype of products: the all-gathered unit, or without FSDP2 copies of float32 weights
    new_gradient: int  # as the backward makes it: under FSDP2 of all rows, in the dtype of products
    reduce_input: int  # of the reduce-scatter
    gradient: int  # of this rank's rows, from the reduce-scatter to the step


def unit_of(module, args, shards, dtype):
    """Unit of a module on meta, its rows dealt out to `shards` ranks, its products in `dtype`."""
    always, tensors, gathered, new_gradient, gradient = dict.fromkeys(ALWAYS, 0), [], 0, 0, 0
    for p in module.parameters():
        n_rows, width, is_nf4 = -(-len(p) // shards), p.numel() // len(p), p.dtype is torch.uint8
        n, size = n_rows * width, 1 if is_nf4 else dtype.itemsize
        kind = "NF4 weights" if is_nf4 else "adapters" if p.requires_grad and args.lora_rank else "weights"
        always[kind] += n * p.itemsize
        if args.fsdp2 or p.itemsize > size:
            gathered += shards * n * size
        if p.requires_grad:
            moments = [n * p.itemsize] * 2
            if args.optim == "adamw8bit" and p.dim() > 1:
                moments = [n, n] + [4 * n_rows * -(-width // BLOCK)] * 2  # codes, and scales in float32
            always["optimizer"] += sum(moments)
            tensors += [n * p.itemsize, *moments]
            gradient += n * p.itemsize  # --precision bf16 reduces in bf16, the others in float32
            new_gradient += shards * n * size if args.fsdp2 else n * p.itemsize
    return Unit(always, tensors, gathered, new_gradient, shards * gradient if args.fsdp2 else 0, gradient)


def activation_bytes(args, c, size, n_tokens):
    """{what: bytes}: a block's input, all it saves for the backward, and the most that its backward holds in attention
    and in the MLP, for products of `size` bytes a number.

    As CUDA kernels save them. RMSNorm: its input. FlashAttention: q, k, v, its output, a float32 a head; its backward
    adds up dq in float32 and makes dk, dv of each query head. The memory-efficient kernel, for float32, has no such
    sums and needs keys of each query head. Q, G, D, F are widths; attention, mlp, down are numbers a token.
    """
    D, F, N = c.hidden_size, c.intermediate_size, n_tokens
    Q, own_G = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    adapters, split = args.lora_targets if args.lora or args.qlora else [], args.sequence_parallel > 1

    def input_of(width, *names):  # what the gradients of these weights need of their common input
        n = sum(name in (adapters or lm.LORA_TARGETS) for name in names)
        return n * width * (1 + 1 / size) if args.lora_dropout else min(n, 1) * width  # a copy and a byte mask for each

    # under --sequence_parallel key heads are repeated until each rank has as many
    G = c.head_dim * math.lcm(c.num_key_value_heads, args.sequence_parallel)
    attention = 2 * Q + 2 * G + (args.lora_rank or 0) * len(adapters) + 4 / size * c.num_attention_heads
    attention += input_of(D, "q_proj", "k_proj", "v_proj")
    attention += Q if split else 0  # the kernel's output, and what the second all-to-all makes of it
    if size == 4 and G < Q:
        attention += 2 * Q - (0 if split else 2 * G)  # what the first all-to-all brought stays beside the copies
    if c.model_type == "qwen3":
        attention += Q + own_G  # inputs of the norms of q and k
    kernel = (2 * Q if size == 2 else 0) + (2 * Q if G < Q else 0)
    in_attention = N * (attention + D + Q + (Q + 2 * G) * (2 if split else 1) + kernel)

    mlp, down, tile = 3 * F + input_of(D, "gate_proj", "up_proj"), input_of(F, "down_proj"), min(args.tiled_mlp or N, N)
    mlp += input_of(Q, "o_proj") if args.lora_dropout else 0  # else it is attention's output
    # of down_proj, and the temporaries of its dequantization
    weight, pieces = (D * F, 6 / size * min(nf4.CHUNK, D * F)) if args.qlora else (0, 0)
    in_mlp = N * attention + tile * (mlp + 2 * D) + max(tile * max(3 * F, down + 2 * F),
                                                        tile * down + weight + max(tile * F, pieces))
    saved = N * (attention + mlp + down + 2 * D)
    if args.tiled_mlp:  # gradients of the output, and of what earlier tiles read
        saved = N * (attention + D)
        in_mlp += N * D + (N - tile) * (D + Q)
    if args.activation_checkpointing:
        saved = N * D
        if args.qlora:  # weights that the recomputation has dequantized, all but down_proj's
            in_attention += 2 * D * (Q + own_G)
            in_mlp += 2 * D * (Q + own_G + F)
    numbers = {"input": N * D, "saved": saved, "in attention": in_attention, "in mlp": in_mlp}
    return {what: int(size * n) for what, n in numbers.items()}


def loss_bytes(args, c, size, n_tokens):
    """Of the logits, their gradient and the head's, while the loss computes them chunk by chunk."""
    n_head, chunk = 0 if args.lora or args.qlora else c.vocab_size * c.hidden_size, min(args.ce_chunk, n_tokens)
    if not args.chunked_ce:
        return 12 * n_tokens * c.vocab_size
    sums = 4 * n_head if chunk < n_tokens else 0  # gradients of several chunks are added up in float32
    return sums + max(chunk * c.vocab_size * (6 if size == 2 else 4), (chunk * c.vocab_size + n_head) * size)


def plan(args, config, world, tokens):
    """Where a step's memory goes on rank 0 of `world` GPUs -> ({moment: {kind: bytes}}, {kind: bytes of host memory}).

    Moments are those at which a step can reach its peak. Parameters are counted in a model of one block on meta;
    activations are formulas, for micro-batches of `tokens` tokens, all supervised, a document a row. Not counted:
    CUDA's context, NCCL's buffers, fragmentation (OVERHEAD). tests/test_plan.py compares the sums with real steps.
    """
    model, n_layers = lm.on_meta(dataclasses.replace(config, num_hidden_layers=1), args), config.num_hidden_layers
    shards, offloaded = world // args.replicas if args.fsdp2 else 1, "params" in args.offload
    one, size = model.model.layers[0], model.compute_dtype.itemsize
    modules = one, nn.ModuleList([one.self_attn.o_proj, one.mlp]), model.model.embed_tokens, model.lm_head
    block, _, embedding, head = units = [unit_of(module, args, shards, model.compute_dtype) for module in modules]
    whole = [block] * n_layers + ([embedding] if config.tie_word_embeddings else [embedding, head])
    tensors, gradients = [n for unit in whole for n in unit.tensors], sum(unit.gradient for unit in whole)
    always = {kind: sum(unit.always[kind] for unit in whole) for kind in ALWAYS}

    acts = activation_bytes(args, config, size, tokens)
    host, in_step = {}, 0 if args.fused_adamw else 2 * max(tensors)
    if args.optim == "adamw8bit" or args.stochastic_rounding:  # float32 temporaries of a piece of the largest weight
        numbers, kept = (2, 28) if args.precision == "bf16" else (4, 24)
        in_step = kept * min(1 << 22, max(tensors) // numbers)
    if offloaded:
        host, always, in_step = {**always, "gradients": gradients}, {}, 0
    if "activations" in args.offload:
        host["activations"] = (n_layers - 1) * -(-acts["input"] // PAGE) * PAGE
    if args.async_save:  # torch's pinned allocator rounds up to powers of two
        host["copy of a checkpoint"] = sum(n if offloaded else 1 << (n - 1).bit_length() for n in tensors)

    moments = moments_of(args, config, shards, units, acts, loss_bytes(args, config, size, tokens))
    if not args.optim_in_backward:
        moments["step"] = {"gradients": 0 if offloaded else gradients, "block workspace": in_step}
    tables = tokens * (4 * config.head_dim + 32)  # RoPE's, and the integers of the batch
    for kinds in moments.values():
        kinds |= always | {"saved activations": kinds.get("saved activations", 0) + tables}
    return moments, host


def moments_of(args, c, shards, units, acts, logits_bytes):
    """{moment: {kind: bytes}} from the loss to the embedding's gradient, without what is there all the time. units: a
    block, its o_proj and MLP, embedding, head. acts: of activation_bytes()."""
    (block, tail, embedding, head), n_layers, tied = units, c.num_hidden_layers, c.tie_word_embeddings

    # ---- weights in the dtype of products
    own_units = args.fsdp2 and args.shard_embeddings and not tied  # of embedding and head; else they stay gathered
    ends = head.gathered + (0 if tied else embedding.gathered) if args.fsdp2 and not own_units else 0
    resharded = args.reshard_after_forward and (args.fsdp2 or args.activation_checkpointing)
    one_block = block.gathered
    if args.tiled_mlp and not (args.fsdp2 or resharded):
        one_block -= tail.gathered  # tiles make their copies again
    after_blocks = ends + (one_block * (1 if resharded else n_layers) if args.fsdp2 or not resharded else 0)
    in_loss = after_blocks + (0 if ends else head.gathered)
    if args.chunked_ce and shards > 1:  # the forward keeps the buffer of its latest all-gather
        in_loss += (head if own_units else block).gathered

    # ---- gradients. The head's is held until the embedding's is there if they are one weight, or in one FSDP unit
    held = head.new_gradient if tied or ends else 0
    done_head = 0 if held else head.gradient
    # shards stay on the device until the step; what replicas exchange stays until the end of the backward
    stay = args.replicas > 1 or not (args.optim_in_backward or "params" in args.offload)
    everything = n_layers * block.gradient + embedding.gradient + (0 if tied else head.gradient)
    # little enough to reduce all micro-batches at once
    late = args.fsdp2 and shards * everything * (2 if args.precision == "bf16" else 1) <= LATE

    def gradients(done):  # of units that are done, and of earlier micro-batches
        if args.grad_accum > 1:
            return shards * everything if late else everything if stay else 0
        return done if stay else 0

    def reduction(unit):  # input and output of the reduce-scatter
        return unit.reduce_input + unit.gradient if args.fsdp2 else 0

    def activations(n_blocks):  # offloaded: one in use, one on its way
        return acts["saved"] * (min(n_blocks, 2) if "activations" in args.offload else n_blocks)

    of_tiles = tail.new_gradient if args.tiled_mlp else 0
    new, workspace = max((of_tiles, acts["in mlp"]), (tail.new_gradient, acts["in attention"]), key=sum)

    def in_block(i):
        new_before = block.reduce_input if i < n_layers - 1 else 0 if held else head.reduce_input
        next_block = block.gathered if i and resharded and shards > 1 else 0  # on its way
        return {"gradients": gradients(done_head + (n_layers - 1 - i) * block.gradient) + held + new_before + new,
                "saved activations": activations(i + 1) - acts["saved"] + acts["input"], "block workspace": workspace,
                "unsharded units": ends + one_block * (1 if resharded else i + 1) + next_block}

    n_inputs = 4 if args.chunked_ce else 2 if head.gradient else 1  # x, its norm, rows with a target, their gradient
    loss = {"gradients": gradients(0), "saved activations": activations(n_layers) + n_inputs * acts["input"],
            "logits chunk": logits_bytes, "unsharded units": in_loss}
    turn = {"gradients": gradients(0) + head.new_gradient + (0 if held else reduction(head)),
            "saved activations": activations(n_layers) + 4 * acts["input"], "unsharded units": after_blocks}
    blocks = {f"block {i}": in_block(i) for i in range(n_layers)}
    name, _ = peak_of(blocks)
    moments = {"head and loss": max(loss, turn, key=lambda kinds: sum(kinds.values())), name: blocks[name]}
    if head.gradient:
        last = held + embedding.new_gradient + reduction(embedding) + (reduction(head) if ends and not tied else 0)
        moments["embedding"] = {"gradients": gradients(n_layers * block.gradient + done_head) + last,
                                "saved activations": 2 * acts["input"], "unsharded units": ends}
    return moments


def tokens_of(args, length):
    """Tokens of a rank's micro-batch of rows of `length` tokens."""
    return -(-args.batch_size * length // args.sequence_parallel)


def peak_of(moments):
    """(name of the largest moment, its bytes)."""
    name = max(moments, key=lambda moment: sum(moments[moment].values()))
    return name, sum(moments[name].values())


def rungs(args, world):
    """Flags that may lower the peak, cheapest in time first. Behind a command line they replace what it says."""
    fused, sharded = "" if args.fused_adamw else "--fused_adamw ", "" if args.fsdp2 else "--fsdp2 "
    both = "--offload activations params"  # the last --offload is the one that counts
    flags = ["--fused_adamw", "--chunked_ce", "--reshard_after_forward", "--shard_embeddings", "--replicas 1",
             fused + "--optim adamw8bit", "--activation_checkpointing",
             both if "params" in args.offload else "--offload activations", "--tiled_mlp 4096", "--ce_chunk 256"]
    steps = [("--batch_size 1", args.batch_size)]  # and how many times the micro-batches of the same rows
    steps += [(f"--sequence_parallel {n * args.sequence_parallel}", n) for n in (2, 4, 8) if n <= world]
    flags += [flag if args.optim_in_backward else f"{flag} --grad_accum {args.grad_accum * n}" for flag, n in steps]
    flags += ["--optim_in_backward --clip 0", fused + "--precision bf16 --stochastic_rounding",
              sharded + (both if "activations" in args.offload else "--offload params"), "--qlora"]
    return ["--fsdp2", *flags] if world > 1 else flags


def ladder(args, argv, config, world, length, room):
    """Rungs that bring the peak of rows of `length` tokens below `room` bytes, or where that cannot be, all that help
    -> ([rung], args with them). parse_args is the judge of what goes with what."""

    def rows(changed):  # a step; --optim_in_backward has one micro-batch, whatever that makes of them
        return 0 if changed.optim_in_backward else changed.batch_size * changed.grad_accum / changed.sequence_parallel

    def try_(added):  # --qlora in place of --lora
        given = [flag for flag in argv if flag != "--lora" or "--qlora" not in added]
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                changed = parse_args([*given, *" ".join(added).split()])
            check_sizes(changed, config, world)
        except (SystemExit, ValueError):
            return None, math.inf
        if rows(changed) not in (0, rows(args)):
            return None, math.inf
        changed.precision = changed.precision or args.precision
        if args.adapter:
            changed.lora_rank, changed.lora_targets = args.lora_rank, args.lora_targets
        return changed, peak_of(plan(changed, config, world, tokens_of(changed, length))[0])[1]

    added, tried, (now, best) = [], set(), try_([])
    while best > room and (untried := [rung for rung in rungs(now, world) if rung not in tried]):
        tried.add(untried[0])
        changed, peak = try_([*added, untried[0]])
        if peak < 0.99 * best:
            added, now, best = [*added, untried[0]], changed, peak
            tried = set()  # what did not help before may help now
    for rung in added[::-1]:  # what a later one has made needless
        changed, peak = try_([other for other in added if other != rung])
        if peak <= max(room, best):
            added, now = [other for other in added if other != rung], changed
    return added, now


def print_plan(args, argv, config, world, length, room, brief=False):
    """The plan as a table, whether it fits into `room` bytes (None: not known), and what would make it fit. With
    `brief` one line where it takes less than 60 % of them."""
    moments, host = plan(args, config, world, tokens_of(args, length))
    (name, peak), over = peak_of(moments), args.sequence_parallel
    host_text = "".join(f", {kind} {n / GIB:.2f}" for kind, n in host.items())
    if brief and peak + OVERHEAD < 0.6 * room:
        print(f"memory planned: {(peak + OVERHEAD) / GIB:.2f} of {room / GIB:.2f} GiB, host{host_text or ' nothing'}")
        return
    print(f"memory plan, GiB of rank 0 of {world}, micro-batches of {args.batch_size} x {length} tokens"
          + (f" over {over} ranks" if over > 1 else ""))
    print(" " * 20 + "".join(f"{moment + '*' if moment == name else moment:>15}" for moment in moments))
    for kind in (*KINDS, "all"):
        values = [sum(kinds.values()) if kind == "all" else kinds.get(kind, 0) for kinds in moments.values()]
        if any(values):
            print(f"  {kind:<18}" + "".join(f"{value / GIB:>15.2f}" for value in values))
    print(f"  host memory{host_text or ': none'}")
    if room is None:
        return
    says = f"  {(peak + OVERHEAD) / GIB:.2f} of {room / GIB:.2f} GiB, 1 for CUDA and NCCL: "
    if peak + OVERHEAD <= room:
        print(says + "fits")
        return
    added, changed = ladder(args, argv, config, world, length, room - OVERHEAD)
    moments, host = plan(changed, config, world, tokens_of(changed, length))
    need, host_gib = (peak_of(moments)[1] + OVERHEAD) / GIB, sum(host.values()) / GIB
    flags = " ".join(added).replace("--qlora", "--qlora in place of --lora" if args.lora else "--qlora")
    print(f"{says}does not fit; {'add' if need <= room / GIB else 'with'}\n    {flags or 'every flag'}")
    print(f"  it takes {need:.2f} GiB and {host_gib:.2f} of host memory"
          + ("" if need <= room / GIB else ": more ranks, a shorter --seq_len or a smaller model"))


def dry_run(args, argv):
    """Prints the plan of --world ranks with GPUs: no weights, no data, no GPU."""
    argv, world, args.precision = argv or sys.argv[1:], args.world or 1, args.precision or "mixed"
    try:
        raw_config, *_ = lm.find_model(args.model, random_init=True)
        config = lm.parse_config(raw_config, f"{args.model}: config.json")
        if args.adapter:
            _, args.lora_rank, _, args.lora_targets = lm.open_adapter(args.adapter)
        check_sizes(args, config, world)
    except (ValueError, OSError) as error:
        raise SystemExit(f"train.py: error: {error}") from error
    print_plan(args, argv, config, world, args.seq_len, args.gpu_gib and args.gpu_gib * GIB)


def check_sizes(args, config, world):
    """ValueError where the ranks, or the query heads of the model, cannot be dealt out evenly."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    heads = [n for n in divisors if config.num_attention_heads % n == 0]
    for flag, n, fit in (("replicas", args.replicas, divisors), ("sequence_parallel", args.sequence_parallel, heads)):
        if n not in fit:
            raise ValueError(f"--{flag} {n} does not divide the {world} rank(s) or the {config.num_attention_heads} "
                             f"heads of attention; these do: {', '.join(map(str, fit))}")
    if config.sliding_window and args.seq_len > config.sliding_window:
        raise ValueError(f"--seq_len {args.seq_len}: config.json has sliding_window = {config.sliding_window}, which "
                         "is not implemented; up to that many tokens it changes nothing")


def limit_gpu(args, argv, config, length, ranks):
    """Limits the process to --gpu_gib of its GPU. Rank 0 prints the plan."""
    total = torch.cuda.get_device_properties(ranks.device).total_memory
    room = min(total, (args.gpu_gib or math.inf) * GIB)
    torch.cuda.set_per_process_memory_fraction(room / total, ranks.device)
    if ranks.rank == 0:
        print_plan(args, argv, config, ranks.world, length, room, brief=True)


def fits_pinned(args, config, world, length):
    """Whether a rank's host memory may be pinned: the system can neither swap nor reclaim it, so 20 % stay free."""
    available = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    free = 1024 * int(available[1]) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return sum(plan(args, config, world, tokens_of(args, length))[1].values()) < 0.8 * free


def is_out_of_memory(error):
    texts = "DefaultCPUAllocator", "bad_alloc", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts))


def report_out_of_memory(error):
    """Says where memory ran out; in --out as oom.json, too. The frame of main has the run's own variables."""
    lines = [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.name == "main"]
    run = {frame.f_code: frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)}.get(main.__code__, {})
    report = {"phase": lines[-1] if lines else "start", "error": str(error)[:500], "step": run.get("n", 0),
              "rank": run["ranks"].rank if "ranks" in run else 0,
              "tokens_of_micro_batch": run["b"].tokens.numel() if "b" in run else 0}
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated") if torch.cuda.is_available() else ():
        report[f"{name}_gib"] = getattr(torch.cuda, name)() / GIB
    print(f"train.py: error: rank {report['rank']} ran out of memory: {json.dumps(report, indent=2)}\n"
          "--dry_run --gpu_gib G with the same flags says which others would make it fit", file=sys.stderr)
    if "out" in run:
        run["out"].mkdir(parents=True, exist_ok=True)
        (run["out"] / "oom.json").write_text(json.dumps(report, indent=2) + "\n")
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(run["out"] / "memory.pickle"))


# ---------------------------------------------------------------- checkpoints

STATE = "trainer_state.json"  # the last file of a checkpoint; a folder that lacks it is none


def crc_of(path):
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def sealed(state):
    """trainer_state.json with its checksum."""
    return {**state, "checksum": zlib.crc32(json.dumps({**state, "checksum": 0}, sort_keys=True).encode())}


def read_state(folder, settings, ranks):
    """trainer_state.json of a checkpoint whose files are what it says, to the byte; each rank reads its part of them.
    ValueError names what is damaged, or the settings that change the mathematics and differ from the checkpoint's."""
    state, files = lm.read_json(folder / STATE), {path.name: path for path in folder.iterdir()}
    if state != sealed(state) or folder.name != f"checkpoint-{state['step']}":
        raise ValueError(f"{folder / STATE}: damaged, or the folder of another step; {lm.REMOVE}")
    if wrong := files.keys() ^ {*state["files"], STATE}:
        raise ValueError(f"{folder}: missing, or not written by the save: {lm.listing(wrong)}; {lm.REMOVE}")
    for name, entry in list(state["files"].items())[ranks.rank :: ranks.world]:
        if not files[name].is_file() or [files[name].stat().st_size, crc_of(files[name])] != entry:
            raise ValueError(f"{files[name]}: damaged since it was written; {lm.REMOVE}")
    saved = state["settings"]
    changed = [f"{name} differ" if name.startswith("the ") else f"{name} was {saved.get(name)}, is {value}"
               for name, value in settings.items() if saved.get(name) != value]
    if changed:
        raise ValueError(f"--resume {folder}: {'; '.join(changed)}: give what the checkpoint was made with, or start a "
                         "new run with another --out")
    return state


class Saver:
    """Writes checkpoint-<step>/: each rank its rows, then rank 0 the manifest, and one rename commits them. A disk that
    fails or is full costs this save and nothing else: the folder is removed, the reason said, and training continues.
    With --async_save a thread writes a copy in host memory; `ranks.gather` is then its alone until finish()."""

    def __init__(self, out, args, ranks, pin):
        self.out, self.keep, self.background, self.ranks, self.pin = out, args.keep, args.async_save, ranks, pin
        self.last_step = max((step for step, _ in checkpoints(out)), default=None)
        self.writer, self.report, self.copies = ThreadPoolExecutor(1), None, {}

    def save(self, tensors, state):
        """Collective. tensors: of training_tensors(). state: for trainer_state.json."""
        self.finish()
        if state["step"] == self.last_step:
            return
        rows = lm.rows_of_rank(tensors, self.ranks.rank)
        if self.background:
            for key, part in rows.items():
                if key not in self.copies:
                    self.copies[key] = torch.empty_like(part, device="cpu", pin_memory=self.pin and part.is_cuda)
                self.copies[key].copy_(part, non_blocking=True)
            if self.ranks.device.type == "cuda":
                torch.cuda.synchronize()
            rows = self.copies
        self.report = self.writer.submit(self.write, rows, {**state})
        if not self.background:
            self.finish()

    def write(self, rows, state):
        """-> what to say. All ranks learn of an error on any of them."""
        step, started, files, error = state["step"], time.perf_counter(), {}, None
        part = self.out / f"checkpoint-{step}.part"
        try:
            part.mkdir(parents=True, exist_ok=True)
            if rows:
                name = f"rank-{self.ranks.rank:05}-of-{self.ranks.world:05}.safetensors"
                files[name] = lm.write_rows(part / name, rows)
        except OSError as caught:
            error = f"rank {self.ranks.rank}: {caught}"
        answers = self.ranks.gather((files, error))
        files = {name: entry for theirs, _ in answers for name, entry in theirs.items()}
        error = next((error for _, error in answers if error), None)
        if self.ranks.rank == 0 and not error:
            try:
                self.commit(part, {**state, "files": files})
            except OSError as caught:
                error = str(caught)
        error = self.ranks.gather(error)[0]
        if error:
            shutil.rmtree(part, ignore_errors=True)
            return f"checkpoint-{step} was NOT written: {error}. Older ones are untouched, training continues"
        self.last_step, gib = step, sum(size for size, _ in files.values()) / 2**30
        return f"checkpoint-{step}: {gib:.3f} GiB written in {time.perf_counter() - started:.2f} s"

    def commit(self, part, state):
        """Writes the manifest, waits until all is on the disk, gives the folder its name; then older ones go."""
        with lm.writing(part / STATE, "manifest"):
            (part / STATE).write_text(json.dumps(sealed(state), indent=2) + "\n")
        lm.sync(part / STATE)
        lm.sync(part)
        part.rename(part.with_suffix(""))
        lm.sync(self.out)
        for _, old in checkpoints(self.out)[: -self.keep]:
            with contextlib.suppress(OSError):  # the new one is safe; the next save tries again
                shutil.rmtree(old.rename(old.with_suffix(".part")))  # renamed first: half of one must not look whole

    def finish(self):
        """Waits for the save in the background and says what became of it. Its errors but OSError are raised here."""
        faulthandler.cancel_dump_traceback_later()  # until the next alive(): a slow disk is no hang
        if self.report:
            self.ranks.say(self.report.result())
            self.report = None


def checkpoints(out):
    """[(step, folder)] of the complete checkpoints of a run, oldest first."""
    paths = [path for path in Path(out).glob("checkpoint-*") if (path / STATE).is_file()]
    return sorted((int(path.name[11:]), path) for path in paths if re.fullmatch("[0-9]{1,12}", path.name[11:]))


def launcher():
    """The torchrun that started this process, or None: the same before and after it restarts its ranks."""
    return f"{platform.node()} {os.getppid()}" if "TORCHELASTIC_RUN_ID" in os.environ else None


def find_run(out, resume, restarted):
    """--out, --resume, whether torchrun has restarted the ranks -> (folder of the run, checkpoint to continue from or
    None). ValueError where a run would be overwritten or there is nothing to continue."""
    fresh, runs = Path("out", datetime.now().strftime("%Y%m%d-%H%M%S")), list(Path("out").glob("*/args.json"))
    if restarted and resume is None:  # a run that another torchrun has left is not ours to continue
        runs = [path for path in runs if lm.read_json(path).get("launcher") == launcher()]
    newest = max(runs, key=lambda path: path.stat().st_mtime).parent if runs else fresh
    given = None if resume in (None, "auto") else Path(resume).resolve()
    if given:
        found = [(0, given)] if (given / STATE).is_file() else checkpoints(given)
        if not found:
            raise ValueError(f"--resume {resume}: no {STATE} and no complete checkpoint-<step>/ in it")
        run = Path(out) if out else found[-1][1].parent
    else:
        run = Path(out) if out else newest if resume or restarted else fresh
    own = checkpoints(run)
    if resume == "auto" or (restarted and own):
        return run, own[-1][1] if own else None
    chosen = found[-1][1] if given else None
    if chosen and chosen.parent.resolve() == run.resolve():
        if own[-1][1].name != chosen.name:
            raise ValueError(f"--resume {resume}: {run} holds {own[-1][1].name}, which is newer: give another --out to "
                             "branch off here, or remove the newer ones")
    elif not restarted and ((run / "args.json").exists() or (run / "final").exists() or own):
        raise ValueError(f"--out {run}: holds a run, which is never overwritten: --resume continues it, or give "
                         "another folder")
    return run, chosen


def begin_writing(out, args, state):
    """Makes the folder of a run, writes args.json, and takes the rows after the step in `state` out of metrics.jsonl:
    they will be made again. Evaluations that stay are entered in `state`."""
    with lm.writing(f"--out {out}", "folder"):
        out.mkdir(parents=True, exist_ok=True)
    for part in out.glob("*.part"):  # of a process that was killed while it wrote
        shutil.rmtree(part, ignore_errors=True)
    about = {**vars(args), **state["versions"], "world": state["world"], "launcher": launcher()}
    metrics, rows = out / "metrics.jsonl", []
    for line in metrics.read_text("utf-8", "replace").splitlines() if metrics.exists() else []:
        with contextlib.suppress(ValueError, RecursionError):  # the last line of a process that was killed
            row = json.loads(line)
            if isinstance(row, dict) and row.get("step") in range(1, state["step"] + 1):
                rows.append(row)
    evaluations = [row for row in [state["best_eval"], *rows] if row and "eval_loss" in row]
    state["best_eval"] = min(evaluations, key=lambda row: row["eval_loss"], default=None)
    state["evaluated"] = max([state["evaluated"], *(row["step"] for row in evaluations)])
    for path, text in ((out / "args.json", json.dumps(about, indent=2) + "\n"),
                       (metrics, "".join(json.dumps(row) + "\n" for row in rows))):
        part = path.with_name(path.name + ".part")  # never half a file, wherever the process ends
        part.write_text(text)
        part.replace(path)


def fixed_settings(args, config, rows_a_step, loader, source):
    """{name: value} of all that changes the mathematics of a run and must be the same when it is resumed."""
    settings = {f"config.json's {key}": value for key, value in dataclasses.asdict(config).items()}
    settings |= {f"--{name}": getattr(args, name) for name in (
        "random_init", "lora", "qlora", "lora_rank", "lora_alpha", "lora_dropout", "seq_len", "packing", "train_on",
        "seed", "precision", "optim", "stochastic_rounding", "lr", "min_lr", "warmup", "schedule", "weight_decay",
        "clip")}
    settings["--lora_targets"] = sorted(args.lora_targets or ())
    settings["rows a step (--batch_size x --grad_accum x ranks / --sequence_parallel)"] = rows_a_step
    settings["the tokens and masks of --data"] = loader.documents.crc()
    if args.lora or args.qlora:
        settings["the frozen weights of --model"] = source.crc()
    return json.loads(json.dumps(settings, default=str))


# ---------------------------------------------------------------- what a run prints and writes


def memory_gib(device):
    """(peak allocated, peak reserved) on the GPU since the last call; on a CPU (peak resident memory, None)."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, None
    peaks = torch.cuda.max_memory_allocated(device) / 2**30, torch.cuda.max_memory_reserved(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return peaks


class Log:
    """metrics.jsonl and the same on the console. Times, tokens and FLOP are means over the steps since the last line.
    state, which trainer_state.json holds, is kept up to date here."""

    def __init__(self, out, state, loader, ranks, tensorboard):
        self.path, self.state, self.loader, self.ranks, self.board = out / "metrics.jsonl", state, loader, ranks, None
        if tensorboard and ranks.rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(out, purge_step=state["step"] + 1)
        self.peak_flops = next((peak for name, peak in PEAKS.items() if name in ranks.device_name), None)
        memory_gib(ranks.device)  # loading does not count
        self.start, self.start_step, self.loss = time.perf_counter(), state["step"], None
        self.reset()

    def reset(self):
        self.mark, self.waited_s = time.perf_counter(), self.loader.waited_s
        self.n_steps, self.n_tokens, self.flops = 0, 0, 0.0

    @contextlib.contextmanager
    def paused(self):
        """Evaluations and saves are no part of a step's time."""
        started = time.perf_counter()
        yield
        self.mark += time.perf_counter() - started

    def count(self, counted, flops):
        """counted: supervised tokens, tokens, squares of a step over all ranks. flops: of one rank."""
        self.state["step"] += 1
        self.state["tokens"] += int(counted[0])
        self.n_steps, self.n_tokens, self.flops = self.n_steps + 1, self.n_tokens + int(counted[1]), self.flops + flops

    def write(self, loss, norm, lr):
        seconds, state, steps = time.perf_counter() - self.mark, self.state, self.state["steps"]
        mem_gib, reserved_gib = memory_gib(self.ranks.device)
        mfu = self.flops / seconds / self.peak_flops if self.peak_flops else None
        row = {
            "step": state["step"], "epoch": state["step"] * state["rows_a_step"] / len(self.loader.rows), "loss": loss,
            "lr": lr, "grad_norm": norm, "tokens": state["tokens"], "tokens_per_s": self.n_tokens / seconds, "mfu": mfu,
            "mem_gib": mem_gib, "mem_reserved_gib": reserved_gib, "step_s": seconds / self.n_steps,
            "data_s": (self.loader.waited_s - self.waited_s) / self.n_steps,
        }
        self.append(row)
        left_s = (steps - row["step"]) * (time.perf_counter() - self.start) / (row["step"] - self.start_step)
        self.ranks.say(f"step {row['step']:>{len(str(steps))}}/{steps}  loss {loss:.4f}  lr {lr:.1e}  norm {norm:<5.3g}"
                       f"  {row['tokens_per_s']:,.0f} tok/s  {mem_gib:.2f} GiB  " + (f"mfu {mfu:.1%}  " if mfu else "")
                       + f"{timedelta(seconds=int(left_s))}")
        if state["first_loss"] is None:
            state["first_loss"] = loss
        self.loss = loss
        self.reset()

    def write_eval(self, loss, n_targets):
        row = {"step": self.state["step"], "eval_loss": loss, "eval_tokens": n_targets}
        self.append(row)
        best = min(row, self.state["best_eval"] or row, key=lambda row: row["eval_loss"])
        self.state |= {"best_eval": best, "evaluated": row["step"]}
        self.ranks.say(f"step {row['step']}  eval loss {loss:.4f} over {n_targets:,} tokens, best "
                       f"{best['eval_loss']:.4f} at step {best['step']}")

    def append(self, row):
        if self.ranks.rank:
            return
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:  # a full disk ends no training
            self.ranks.say(f"{self.path}: not written: {error}")
        if self.board:
            for name in row.keys() - {"step"}:
                if row[name] is not None:
                    self.board.add_scalar(name, row[name], row["step"])
            self.board.flush()

    def close(self):
        if self.loss is not None:  # a resumed run may have had no step left
            n, seconds = self.state["step"] - self.start_step, time.perf_counter() - self.start
            self.ranks.say(f"{n} steps in {seconds:.0f} s: loss {self.state['first_loss']:.4f} -> {self.loss:.4f}")


def print_start(args, model, source, n_trained, ranks, late_sync, pin):
    """What is trained, on what, a line for each feature that is on, with its reason, and one line of what is off."""
    c, cuda, adapters = model.config, ranks.device.type == "cuda", args.lora or args.qlora
    trained, frozen = "bf16" if args.precision == "bf16" else "float32", str(model.compute_dtype).removeprefix("torch.")
    host = "pinned host memory" if pin else "host memory, not pinned: it would take 80 %" if cuda else "nothing to move"
    n_total = sum(math.prod(shape) for _, shape, _ in source.tensors.values())
    features = [  # name, whether it is on, what it does
        ("lora", adapters, f"rank {args.lora_rank}, alpha {args.lora_alpha}, on {', '.join(args.lora_targets or ())}"),
        ("qlora", args.qlora, "linear layers of the blocks in NF4, 4.14 bits a weight"),
        ("fsdp2", args.fsdp2, f"{c.num_hidden_layers} blocks sharded over {ranks.world // args.replicas} rank(s), "
         f"{args.replicas} replica(s)"),
        ("sequence_parallel", args.sequence_parallel > 1, f"rows are split over {args.sequence_parallel} ranks"),
        ("offload activations", "activations" in args.offload, f"inputs of all blocks but the last: {host}"),
        ("offload params", "params" in args.offload, f"weights, gradients and AdamW: {host}"),
        ("checkpointing", args.activation_checkpointing, "blocks are recomputed in the backward"),
        ("chunked_ce", args.chunked_ce, f"loss of {args.ce_chunk} tokens at a time, its gradient in the forward"),
        ("tiled_mlp", args.tiled_mlp, f"{args.tiled_mlp} tokens at a time"),
        ("adamw8bit", args.optim == "adamw8bit", "moments of matrices in 8 bits"),
        ("stochastic_rounding", args.stochastic_rounding, "updates of bf16 weights are right on average"),
        ("optim_in_backward", args.optim_in_backward, "weights are updated as gradients arrive, without clipping"),
        ("fused_adamw", args.fused_adamw, "one kernel, which checks on the device that gradients are finite"),
        ("compile", args.compile, "blocks, loss and NF4 are compiled in the first step"),
        ("packing", args.packing, f"several documents in a row of {args.seq_len} tokens"),
        ("late gradient sync", late_sync and args.grad_accum > 1, "once a step, not after each micro-batch"),
    ]
    print(f"{args.model} ({c.model_type}): {n_total:,} parameters, {n_trained:,} trained, "
          f"{ranks.world} x {ranks.device_name}")
    lines = [("precision", f"{args.precision}: trained {trained}, frozen and products {frozen}")]
    lines += [(name, what) for name, on, what in features if on]
    lines += [("off", ", ".join(name for name, on, _ in features if not on))]
    if args.seq_len > c.max_position_embeddings:
        lines += [("note", f"--seq_len is beyond the {c.max_position_embeddings} positions that the model has seen")]
    for name, what in lines:
        print(textwrap.fill(f"  {name:<21}{what}", 80, subsequent_indent=" " * 23))


def sample(args, model, tokenizer, counts, device):
    """What the model makes of --sample. All ranks call it: under FSDP2 each forward is a collective."""
    if not args.sample:
        return ""
    model.eval()
    prompt = tokenizer.prompt(args.sample, any(count["chats"] for count in counts))
    tokens = lm.generate(model, prompt, 32, tokenizer.stop_ids, device)
    model.train()
    lm.reshard_(model)
    return "\n".join(data.printable(tokenizer.core.decode(tokens).strip()).splitlines()[:4])


def tracer(args, out, ranks, step):
    """--profile and --memory_snapshot -> (a profiler to start before a step and to stop after it, that step or
    None)."""
    snapshot = args.memory_snapshot and ranks.device.type == "cuda"

    def write(profiler):
        if args.profile:
            profiler.export_chrome_trace(str(out / "trace.json.gz"))
            print(profiler.key_averages().table(sort_by=f"self_{ranks.device.type}_time_total", row_limit=12))
        if snapshot:
            torch.cuda.memory._dump_snapshot(str(out / "memory.pickle"))

    if snapshot:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    if ranks.rank or not (args.profile or snapshot):
        return None, None
    return torch.profiler.profile(on_trace_ready=write), step


def end_not_finite(model, loader, step, args, ranks):
    """Ends a run whose loss or gradient is inf or nan. Each rank runs the forward of that step again, to find whose
    rows it were: no weight has changed since."""
    batches, _ = loader.step(step, args.grad_accum)
    with torch.no_grad():
        on_device = [batch.to(ranks.device) for batch in batches]
        loss_sum = sum(model(b.tokens, b.targets, b.positions, b.spans, b.keep_S) for b in on_device)
    answers = ranks.gather((bool(loss_sum.isfinite()), loader.places(step, args.grad_accum)))
    wrong = [rank for rank, (finite, _) in enumerate(answers) if not finite]
    found = f"the loss of rank {', '.join(map(str, wrong))} is" if wrong else "a gradient is"
    changed = "earlier gradients of it were applied" if args.optim_in_backward else "no weight was changed by it"
    ranks.say(f"train.py: error: step {step + 1}: {found} not finite; {changed}, checkpoints are as they were. Lower "
              "--lr, raise --warmup, or look at the documents of that step:")
    for rank in wrong or range(ranks.world):
        ranks.say(f"  rank {rank}: {', '.join(answers[rank][1][:8])}")
    ranks.leave()
    raise SystemExit(NOT_FINITE)


# ---------------------------------------------------------------- main


def open_model(args, ranks):
    """-> (files of the model as find_model() gives them, Config, the run's model on meta, Checkpoint or RandomWeights,
    Checkpoint of --adapter or None, Tokenizer). All of it is checked here, before anything is allocated."""
    with ranks.agree():
        if args.tensorboard and not importlib.util.find_spec("tensorboard"):
            raise ValueError("--tensorboard needs a package: pip install tensorboard")
        files = raw_config, tokenizer_folder, weights_folder, _ = lm.find_model(args.model, args.random_init)
        config = lm.parse_config(raw_config, f"{args.model}: config.json")
        check_sizes(args, config, ranks.world)
        if args.precision is None:
            native = (torch.cuda.is_bf16_supported(False) if ranks.device.type == "cuda" else
                      torch.cpu._is_avx512_bf16_supported())
            args.precision = "mixed" if native else "fp32"
        if args.lr is None:  # QLoRA's 2e-4 for 7B and 1e-4 for 65B, and Adam's width rule (arXiv:2203.03466), agree
            args.lr = (2e-4 if args.lora or args.qlora else 2e-5) * 4096 / config.hidden_size
        with torch.device("meta"):
            vanilla = lm.Transformer(config)
        source = lm.Checkpoint(weights_folder) if weights_folder else lm.RandomWeights(vanilla, args.seed, ranks.device)
        lm.check_weights(vanilla, source, args.model)
        adapter = None
        if args.adapter:
            adapter, args.lora_rank, args.lora_alpha, args.lora_targets = lm.open_adapter(args.adapter)
        model = lm.on_meta(config, args)
        if adapter:
            lm.check_adapter(model, adapter, args.adapter)
        return files, config, model, source, adapter, data.Tokenizer(tokenizer_folder, args.chat_template)


def open_run(args, config, loader, source, ranks):
    """-> (folder of the run, checkpoint to continue from or None, state). state is what trainer_state.json holds and
    all that a run carries from step to step beside its tensors."""
    restarted, run = any(ranks.gather(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))), None
    rows_a_step = args.batch_size * args.grad_accum * ranks.world // args.sequence_parallel
    with ranks.agree():
        if len(loader.rows) < rows_a_step:
            raise ValueError(f"a step takes {rows_a_step} rows (--batch_size x --grad_accum x ranks) and the data has "
                             f"{len(loader.rows)}: lower one of them or --seq_len, or give more data")
        if ranks.rank == 0:
            run = find_run(args.out, args.resume, restarted)
    out, resumed = ranks.gather(run)[0]
    with ranks.agree():
        settings = fixed_settings(args, config, rows_a_step, loader, source)
        state = {"step": 0, "tokens": 0, "first_loss": None, "best_eval": None, "evaluated": 0}
        if resumed:
            state = read_state(resumed, settings, ranks)
        state["steps"] = args.steps or math.ceil(args.epochs * len(loader.rows) / rows_a_step)
        if state["step"] > state["steps"]:
            raise ValueError(f"--resume {resumed}: this run ends at step {state['steps']}: raise --steps or --epochs")
    versions = {"python": platform.python_version(),
                **{module.__name__: module.__version__ for module in (torch, safetensors, tokenizers)}}
    return out, resumed, {**state, "rows_a_step": rows_a_step, "settings": settings, "versions": versions,
                          "world": ranks.world}


def main(argv=None):
    """A training run from top to bottom."""
    args = parse_args(argv)
    if args.dry_run:
        return dry_run(args, argv)

    # ---- what the user gave
    ranks = Ranks(args.fsdp2, args.timeout)
    device, rank, world, say, cuda = ranks.device, ranks.rank, ranks.world, ranks.say, ranks.device.type == "cuda"
    files, config, model, source, adapter, tokenizer = open_model(args, ranks)
    loader, eval_loader, counts = data.open_data(args, tokenizer, config.vocab_size, ranks)
    if rank == 0:
        data.print_data(args, loader, eval_loader, counts, tokenizer)
    if args.inspect:
        return ranks.leave()
    out, resumed, state = open_run(args, config, loader, source, ranks)
    start, steps = state["step"], state["steps"]
    # ---- the model: each feature applied to it, and last the weights
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    n_adapter = n_trained if args.lora or args.qlora else None
    late_sync = not args.fsdp2 or n_trained * 4 <= LATE
    pin = cuda and fits_pinned(args, config, world, loader.longest)
    if rank == 0:
        print_start(args, model, source, n_trained, ranks, late_sync, pin)
    if cuda:
        limit_gpu(args, argv or sys.argv[1:], config, loader.longest, ranks)
    if args.compile:
        lm.compile_(model, args.packing)
    if args.tiled_mlp:
        lm.tile_mlp_(model, args.tiled_mlp)
    if args.activation_checkpointing:
        lm.checkpoint_activations_(model, preserve_rng=bool(args.lora_dropout))
    if args.sequence_parallel > 1:
        model.sequence_group, _ = dist.new_subgroups(args.sequence_parallel, timeout=ranks.wait)
    if args.fsdp2:
        shard_(model, args, device, pin)
    model.to_empty(device="cpu" if "params" in args.offload else device)
    model.tie_()
    with ranks.agree():
        lm.load_weights_(model, source, adapter, args.seed, device, rank == 0 and sys.stderr.isatty(), bool(resumed))
    if "activations" in args.offload and cuda:
        model.activation_hooks = OffloadActivations(device, pin)
    trained = [p for p in model.parameters() if p.requires_grad]
    bad = torch.zeros((), device=trained[0].device)  # 1 once a gradient was inf or nan: nothing is updated any more
    optimizer = make_optimizer(trained, args, bad)
    in_backward = StepInBackward(optimizer, trained, bad, ranks, args) if args.optim_in_backward else None
    with ranks.agree():
        if resumed:
            lm.load_checkpoint(resumed, lm.training_tensors(model, optimizer))
        if rank == 0:
            begin_writing(out, args, state)
    state = ranks.gather(state)[0]
    saver = Saver(out, args, ranks, pin)
    begin = f"continuing after step {start:,} of {resumed}" if resumed else "from the start"
    say(f"{steps:,} steps of {state['rows_a_step']} rows, learning rate {args.lr:.2g}, {begin}; writing to {out}")
    sampled = "" if resumed else sample(args, model, tokenizer, counts[0], device)
    log, stop = Log(out, state, loader, ranks, args.tensorboard), StopSignal()

    def save():
        with log.paused():
            saver.save(lm.training_tensors(model, optimizer), state)

    def end_early():
        save()
        saver.finish()
        number, saved = signal.Signals(stop.asked(ranks)), saver.last_step == state["step"]
        say(f"stopped by {number.name} after step {state['step']} of {steps}, "
            + (f"saved: --resume {out} continues" if saved else "NOT saved, see above"))
        ranks.leave()
        # torchrun relays its own signal; an exit code would make it start the run again
        raise SystemExit(1 if not saved else 0 if launcher() else 128 + number)

    def evaluate_now():
        with log.paused():
            result = evaluate(model, eval_loader, ranks, stop)
        if result is None:  # a signal
            end_early()
        log.write_eval(*result)

    # ---- training
    keep_freed_memory(on=not cuda and not args.fsdp2)  # FSDP2's gathered units would leave holes between the shards
    if args.eval_every and start % args.eval_every == 0 and state["evaluated"] < start < steps:
        evaluate_now()  # the run was stopped between the save and the evaluation of this step
    n_finite = torch.zeros_like(bad)  # steps before a gradient was inf or nan
    profiler, traced = tracer(args, out, ranks, min(start + 3, steps))  # everything is warm by the third step
    for batches, counted in loader.ahead(start, steps, args.grad_accum, pin=cuda):
        step, n, n_targets = state["step"], state["step"] + 1, int(counted[0])
        ranks.alive()
        if n == traced:
            profiler.start()
        torch.manual_seed(lm.mix(lm.mix(lm.mix(args.seed) + rank) + step))  # dropout: the same in a resumed run
        lr = lr_at(step, steps, args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_sum = torch.zeros((), device=device)
        for i, batch in enumerate(batches):
            if args.fsdp2:
                last = i == len(batches) - 1
                model.set_requires_gradient_sync(last or not late_sync)
                model.set_requires_all_reduce(last)  # between replicas once a step, however often inside them
            b = batch.to(device)
            loss = model(b.tokens, b.targets, b.positions, b.spans, b.keep_S)
            # the sum over ranks and micro-batches, divided by all their targets; * world undoes the mean over ranks
            (loss * (world / n_targets)).backward()
            loss_sum += loss.detach()
        if in_backward:
            norm = in_backward.norm()
        else:
            if world > 1 and not args.fsdp2:
                average_gradients_(trained, world)
            norm = clip_gradients_(trained, args.clip)
            torch.maximum(bad, (~norm.isfinite()).float(), out=bad)
            if args.fused_adamw or not bad:
                optimizer.step()
            optimizer.zero_grad()
        n_finite += 1 - bad
        log.count(counted, lm.step_flops(config, counted, n_adapter) / world)
        stopped = stop.asked(ranks)
        saving = stopped or (args.save_every and (n % args.save_every == 0 or n == steps))
        if saving or step == start or n % args.log_every == 0 or n == steps:
            if world > 1:
                dist.all_reduce(loss_sum)
            figures = [x.to(device) for x in (loss_sum / n_targets, norm, bad, n_finite)]
            loss, norm, is_bad, n_good = torch.stack(figures).tolist()  # the only host sync of the step
            if is_bad or not math.isfinite(loss):
                saver.finish()
                end_not_finite(model, loader, min(start + int(n_good), step), args, ranks)
            log.write(loss, norm, lr)
        if n == traced:
            profiler.stop()
        if saving:
            save()
        if stopped:
            end_early()
        if args.eval_every and n % args.eval_every == 0 and n < steps:
            evaluate_now()

    # ---- the result, before an evaluation or a sample could fail
    saver.finish()
    adapter = lm.export(args, model, source, files, out, ranks)
    if eval_loader and state["evaluated"] < steps:
        evaluate_now()
    if after := sample(args, model, tokenizer, counts[0], device):
        say(f"--- {args.sample.strip()}\nbefore: {sampled}\nafter:  {after}\n---")
    log.close()
    ranks.leave()  # no rank waits while rank 0 merges
    stop.release()
    if args.merge and rank == 0:
        lm.merge(args, source, adapter, files, out)
    say(f"done: {out}/final" + (f" and {out}/merged" if args.merge else ""))


def launch(argv=None):
    """main() -> the exit code. Each ending prints one message, as the last thing."""
    try:
        main(argv)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BrokenPipeError:  # of `| head`
        return 1
    except KeyboardInterrupt:
        print("train.py: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if is_out_of_memory(error):
            report_out_of_memory(error)
            return OUT_OF_MEMORY
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # texts of the data, on whatever terminal
    code = launch()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    # FSDP2's mesh keeps gloo's threads beyond destroy_process_group(); one of them freeing a tensor while the
    # interpreter shuts down aborts a finished run, seen once in 130 (pytorch #179291)
    os._exit(code)
