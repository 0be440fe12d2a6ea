"""oomph fine-tunes Llama and Qwen models on the GPUs you have, in pure PyTorch, without running out of
memory.

    python train.py                                      # the built-in model and data, on any machine
    python train.py --qlora --model Qwen/Qwen3-4B --data chats.jsonl                                 # one GPU
    torchrun --nproc_per_node 2 train.py --fsdp2 --qlora --offload --model Qwen/Qwen2.5-32B --data chats.jsonl

`main` is a run from top to bottom; the sections after it have what main uses. To add a memory feature,
write one function or small class that modifies the finished model, and call it in build(). The memory plan
runs build() and train_step() on the meta device, so it accounts for the feature automatically. "Where to
edit" in tests/README.md says which lines a new loss, optimizer, flag or model changes.

A reading tour, in the order of a run:

    trace                       runs a step on the meta device before anything is allocated
    Tokenizer.conversation      (data.py) finds the characters to train on, and tokens_in() their tokens
    shard_                      lets FSDP2 gather a block before it runs, and free it after
    load_weights_               (data.py) reads and quantizes a rank's own rows only
    attend                      (model.py) lets each packed document see only itself, without a [T, T] mask
    OffloadActivations          copies block inputs to host memory, and back before the backward needs them
    StreamedWeights             copies frozen weights to the GPU while the block before theirs runs
    ChunkedCrossEntropy         (model.py) computes the gradient of the loss in the forward, by chunks
    Saver.save                  makes a checkpoint by one rename

Words:

    block     a layer of the model: attention or Gated DeltaNet, and an MLP
    row       the tokens that go through the model together, of one or several packed documents
    part      the piece of a document that goes into one row
    chunk     the tokens that the loss, or Gated DeltaNet's recurrence, works on at a time
    tile      the tokens that the MLP works on at a time (--tiled_mlp)
    segment   the tokens that Gated DeltaNet recomputes at a time
    page      a piece of pinned host memory, for tensors that are offloaded
    policy    what each block recomputes, keeps and leaves on the GPU (BlockPolicy)
    room      bytes of a GPU that a run may use
    on paper  on the meta device, where tensors have shapes and no memory
    term      what a loss is a mean of: a supervised token, or a pair of --dpo
"""

import os
import signal
import sys

if __name__ == "__main__":
    # Ctrl-C during the imports, which take seconds, ends the process without a traceback.
    if sys._getframe().f_back is None and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # see handle()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "win32":  # or an import below would end in a traceback about fcntl
        sys.exit("train.py: error: oomph does not run on Windows, but in its WSL: `wsl --install` adds that")
    # A stream that the caller has closed (`>&-`) is None. The next file that is opened would get its number,
    # a checkpoint perhaps, and libraries in C would write their messages into that file.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # gets the lowest free number, which is that of the stream
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115

import argparse
import bisect
import contextlib
import ctypes
import dataclasses
import difflib
import faulthandler
import fcntl
import functools
import gc
import importlib.util
import itertools
import json
import math
import platform
import re
import resource
import shlex
import shutil
import textwrap
import time
import warnings
import traceback
import weakref
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import safetensors
import tokenizers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

import data
import model as lm
import nf4

# what the demo is asked before and after training
SAMPLE = "What does `pathlib.Path.is_symlink()` do?"
# Exit codes: a job script can tell a rate that is too high from a GPU that is too small.
NOT_FINITE = 3
OUT_OF_MEMORY = 4
# what to do where a number of --precision fp16 is inf or nan
FP16_ENDS = "fp16 numbers end at 65,504: use --precision fp32, or mixed on a GPU with bf16"
TESTED_TORCH = 2, 15  # the newest one, see tests/private_names.py

CODE = __file__, data.__file__, lm.__file__, nf4.__file__

# Whether Python runs this file itself. A notebook's %run, a profiler or a debugger goes on after it.
IS_PROGRAM = __name__ == "__main__" and sys._getframe().f_back is None

# ---------------- main

def main(argv, progress, exits):
    """A training run from top to bottom. launch() reads `progress` after an error, and closes `exits`."""
    args = parse_args(argv)
    # these train nothing, and --dry_run needs neither weights nor a device
    if args.dry_run:
        return dry_run(args, argv)
    if args.chat:
        return chat(args)
    if args.export:
        return export_checkpoint(args, exits)
    if not args.data:
        return merge_result(args, exits)

    # ---- what the user gave: everything is checked before anything large is allocated
    if IS_PROGRAM:  # while it waits for other ranks in C++, no handler in Python would run
        handle(signal.SIGINT, signal.SIG_DFL)
    ranks = Ranks(args.fsdp2, args.timeout)
    stop = StopSignal(exits)
    device = ranks.device
    say_machine(ranks)  # before a download, which is in vain if a GPU that should be there is not found
    # first, so that two starts never share a folder; it goes again if no step is made
    out, resumed, revisions = take_folder(args.out, args.resume, args.inspect, ranks, exits)
    progress["out"] = out  # where launch() looks for a checkpoint to name, and writes oom.json
    opened = open_model(args, ranks, revisions)
    compare_ranks(args, opened, resumed, ranks)  # before any rank reads data or allocates its shard
    config = opened.config
    model = opened.model
    tokenizer = opened.tokenizer
    # TF32 rounds float32 products to 11 bits; bf16 has 8. In 16-bit runs only Gated DeltaNet multiplies in
    # float32 (tests/test_trace_plan.py). A scope around its forward would not reach its backward.
    torch.backends.cuda.matmul.allow_tf32 = args.precision != "fp32"
    # before data and weights, which may take an hour: an error of a network or a login comes at once
    sinks = open_sinks(args, out, resumed, ranks, exits)
    loader, eval_loader = data.open_data(args, tokenizer, config.vocab_size, ranks, revisions)
    if ranks.rank == 0:
        data.print_data(args, loader, eval_loader, tokenizer)
    if args.inspect:  # print_data() has printed the documents
        return ranks.leave()
    state = open_run(args, config, loader, eval_loader, opened.reader, resumed, ranks)
    steps = state["steps"]
    # cards that have bf16 have FlashAttention, too
    has_flash = all(ranks.gather(has_bf16(device))) if device.type == "cuda" else None
    # after the data, because the longest row decides how much is recomputed
    run = RunSpec(args, config, ranks.world, loader.longest, has_flash, documents_in_a_row(loader))
    room = limit_gpu(args.gpu_gib, ranks)  # before the plan, which counts on what other processes leave
    policy, planned, predicted = plan_run(run, room, steps, mean_length(loader), ranks, argv)
    print_start(argv, run, model, tokenizer.new_ids, policy, ranks)
    for line in planned:
        ranks.say(line)

    # ---- the model and its optimizer, and the state of a run that is resumed
    load = functools.partial(load_weights_, opened=opened, seed=args.seed, resumed=resumed, ranks=ranks)
    trainer = build(model, run, policy, ranks, load)
    optimizer = trainer.optimizer
    nonfinite = trainer.nonfinite
    with ranks.agree():
        if resumed:
            # in place: the optimizer has allocated all of its state already
            load_checkpoint(resumed, state["files"], training_tensors(model, optimizer, nonfinite))
        if ranks.rank == 0:
            settings = settings_of(args, ranks.world) | {"revisions": revisions}
            data.write_json(out / "args.json", settings | OURS)
    state = ranks.gather(state)[0]  # rank 0's: until here each rank had what it has read for itself
    saver = Saver(out, args.keep, ranks, state)
    say_space(args, trainer, opened.reader, saver)
    begin = f"\ncontinuing after step {state['step']:,} of {resumed}" if resumed else ", from the start"
    ranks.say(f"{data.count_of(steps, 'steps')} of {data.count_of(state['rows_a_step'], 'rows')}, "
              f"learning rate {args.lr:.3g}{begin}\nwriting to {out}")
    eval_every = evaluation_interval(args, state, eval_loader, ranks)
    sample = Sample(args, opened, loader.documents, resumed, ranks, stop)
    log = Log(out, state, loader, ranks, sinks)  # here its clock begins: loading counts for no step
    stop.can_save = True  # from here on a signal waits for the end of a step, which is saved

    def save():
        with log.paused():
            saver.save(training_tensors(model, optimizer, nonfinite), state)
            log.draw()  # loss.svg is as new as the newest checkpoint, also where a run is killed

    end_if_signalled = functools.partial(end_if_stopped, save, saver, state, stop, ranks)

    def evaluate_if_due():
        is_due = state["step"] % eval_every == 0 or state["step"] == steps
        if not eval_loader or not is_due or state["evaluated"] == state["step"]:
            return
        with log.paused():
            evaluation = evaluate(model, eval_loader, ranks, args, stop)
        if evaluation is None:  # a signal came: the run that continues this one evaluates this step
            end_if_signalled()
        log.write_eval(evaluation)
        saver.note_evaluation(state)
        best = state["best_eval"]
        if args.save_every and best and best["step"] == state["step"]:
            save()  # if --save_every has not saved this step
        sample.say_answer(log)

    # ---- training
    # not with FSDP2, whose gathered units would leave holes between the shards
    keep_freed_memory(on=device.type == "cpu" and not args.fsdp2)
    profiler = tracer(args.profile, args.memory_snapshot, out, ranks)
    for batches, counts in loader.ahead(state["step"], steps, args.grad_accum):
        # of the step before, so that a resumed run makes up for an evaluation that it has missed
        evaluate_if_due()
        if args.patience and state["evals_since_best"] >= args.patience:
            ranks.say(f"--patience {args.patience} ends the run after step {state['step']} of {steps}")
            save()  # as after the last step of any run
            break  # the batches that were drawn for this step train nothing
        step = state["step"] + 1  # from 1, as it is logged; the schedule, dropout and data count from 0
        ranks.rearm_watchdog()  # a rank has --timeout seconds from here to the next call
        lr = set_rates_(optimizer, step - 1, steps, args)
        # other dropout masks in each step and on each rank, and the same ones when a step is computed again
        torch.manual_seed(nf4.scramble(nf4.scramble(nf4.scramble(args.seed) + step - 1) + ranks.rank))

        progress |= {"step": step, "tokens_of_micro_batch": max(batch.tokens.numel() for batch in batches)}
        sums, norm = train_step(trainer, batches, counts.terms)
        state["step"] = step
        state["tokens"] += counts.targets
        # `counts` is of all ranks, and mfu compares with the peak of one device
        flops = lm.step_flops(config, counts, args.lora, args.dpo, run.trains_vocabulary) / ranks.world
        log.count(sums, counts, flops)

        # Once in a while: log, and check that the numbers are finite. This comes before each save, so no
        # checkpoint counts a step that ends the run. All ranks must decide alike, or one would save while the
        # others train: each number is the largest of any rank. This does not wait for the GPU.
        stopped, silent_s = ranks.largest(stop.number, log.seconds())
        save_due = args.save_every and (step % args.save_every == 0 or step == steps)
        # the first steps show whether a run learns, the first after a resume whether it continues well
        log_due = step <= 10 or step == log.start_step + 1 or step == steps or step % args.log_every == 0
        eval_due = step % eval_every == 0  # which may save a checkpoint, or end the run
        if log_due or eval_due or silent_s > 10 or save_due or stopped:
            # here the host waits for the GPU
            numbers = to_host({**log.means(), "lr": lr, "grad_norm": norm, **nonfinite.take_counts_()})
            bad_step = bad_step_of(step, numbers)
            if bad_step is not None:
                end_not_finite(trainer, loader, bad_step)
            log.write(numbers)
        if profiler:
            profiler.step()

        # a save comes before the evaluation of its step, which may take minutes
        if save_due:
            save()
        if stopped:
            end_if_signalled()  # on all ranks, because `stopped` is the largest of all

    # ---- the result: written before an evaluation or a sample could fail
    if args.patience:
        evaluate_if_due()  # but here it decides what the result is
    faulthandler.cancel_dump_traceback_later()  # of rearm_watchdog(): an export may take longer than a step
    result_step = state["step"]
    if args.patience:
        tensors = training_tensors(model, optimizer, nonfinite)
        result_step = load_best_(tensors, state, saver, resumed, ranks)
    # the last update may have made a weight inf, and no forward has seen it since
    check_finite({name: p for name, p in model.named_parameters() if p.requires_grad}, result_step, ranks)
    export = functools.partial(data.export, args, model, opened.reader, opened.files, tokenizer, out, ranks)
    write_result(export, end_if_signalled, saver, state["step"], ranks, args.timeout)
    evaluate_if_due()
    end_if_signalled()  # for a signal that came during the export
    stop.can_save = False  # all is written: from here on a signal ends the process at once
    progress["is_written"] = True
    sample.say_before_and_after()
    log.close()
    if device.type == "cuda":
        say_to_post(argv, args, log, predicted)
    ranks.leave()  # no rank waits while rank 0 merges
    if args.merge and ranks.rank == 0:
        with ranks.agree():  # no other rank is left by now: it makes one message of an error
            adapter_reader = data.WeightFiles(out / "final", data.ADAPTER_WEIGHTS)
            data.merge(args, opened.reader, adapter_reader, opened.files, tokenizer, out)
    say_done(args.lora, args.merge, args.random_init, out, state, result_step, ranks)


# ---------------- ranks

LONG = 4  # how many --timeout a rank may be late outside of the training loop


class Ranks:
    """This process among the others: its number, its device, and the small values that ranks exchange.

    How long ranks wait for one that hangs. Who gives up first reports: stacks, or which rank is missing.

        who waits         for what                                         seconds
        the watchdog      a step, or a batch of an evaluation              T, which is --timeout
        collectives       the others in a step, and at the start           T + 60
        rank 0            the others, which may load or save for hours     4 T, in gather() and agree()
        the other ranks   rank 0 in gather() and agree()                   8 T
    """

    def __init__(self, want_group, timeout, error=None):
        """error: what this rank has found before. It ends all ranks as soon as they have met."""
        self.timeout = timeout
        self.step_limit = timedelta(seconds=timeout + 60)
        self.long_limit = timedelta(seconds=LONG * timeout)
        # One rank under plain python: without `control`, the methods talk to no other process.
        self.rank = 0
        self.world = 1
        self.control = None
        under_torchrun = "RANK" in os.environ
        self.local = 0  # its number on this machine
        self.n_local = 1  # ranks of this machine
        if under_torchrun:
            with meeting():
                self.local, self.n_local = local_numbers(os.environ)  # before they choose a GPU
        try:
            self.device = prepare_device(self.local, self.n_local)
            try_kernel(self.device)
        except ValueError as caught:  # perhaps on one machine alone
            self.device = torch.device("cpu")
            error = error or str(caught)
        self.device_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

        # Joins the process group of torchrun's variables, or makes one of this process alone, for FSDP2.
        store = dist.HashStore()  # belongs to this process alone: no port has to be free
        if under_torchrun:
            # torchrun itself waits for all ranks
            if "TORCHELASTIC_RUN_ID" not in os.environ and os.environ.get("WORLD_SIZE") != "1":
                set_to = " ".join(f"{name}={os.environ.get(name)}" for name in sorted(OF_GROUP))
                data.say(f"{set_to}: waits for the other ranks; to train alone, unset RANK", to_stderr=True)
            # init_process_group() would do the same by itself, but with names that nobody can change
            with meeting():
                store, self.rank, self.world = next(rendezvous("env://", timeout=self.step_limit))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                # A restarted rank gets the store of the dead ones, with their addresses. So each start uses
                # names of its own (pytorch #135712).
                store = dist.PrefixStore("restart " + os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        # tasks of the job: of srun, of Open MPI, of MPICH and Intel MPI, of MVAPICH, of Flux
        names = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE")
        name = next((name for name in names if os.environ.get(name, "1") != "1"), None)
        if name and not under_torchrun:
            data.note(f"{name} is {os.environ[name]}, and this task trains alone: `srun torchrun ... "
                      "train.py`, on each machine once, makes ranks of one run", to_stderr=True)
        if under_torchrun or want_group:
            # NCCL cannot move tensors on the CPU (offloaded parameters, signals), so gloo stands beside it
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            with meeting():
                dist.init_process_group(
                    backend, store=store, rank=self.rank, world_size=self.world, timeout=self.step_limit)
                if self.world > 1:
                    self.control = dist.new_group(backend="gloo", timeout=2 * self.long_limit)
        # `accelerate launch` and its config file set these for scripts that use its library
        for name in sorted(os.environ):
            if name.startswith("ACCELERATE_USE_") and os.environ[name].lower() == "true" and not want_group:
                self.note(f"{name} is set, and train.py does not read settings of accelerate: --fsdp2 shards "
                          "a model, --offload params has it in host memory, CUDA_VISIBLE_DEVICES=-1 uses "
                          "the CPU")
        self.names = self.gather(name_of_rank())  # so that an error can say on which machine it is
        with self.agree():
            if error:  # only now that all ranks have met can it be said to all
                raise ValueError(error)

    def say(self, text):
        if self.rank == 0:
            data.say(text)

    def note(self, text):
        if self.rank == 0:
            data.note(text)

    def gather(self, value):
        """[value of each rank] on every rank, for anything that can be pickled."""
        values = [value] * self.world
        if self.control is not None:
            # It says which ranks do not come, and all_gather_object() would not.
            dist.monitored_barrier(self.control, self.long_limit, wait_all_ranks=True)
            # The one use of pickle: it reads what ranks of this job have sent, and no file.
            dist.all_gather_object(values, value, self.control)
        return values

    def largest(self, *numbers):
        highest = torch.tensor(numbers)
        if self.world > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX)  # on the CPU, where it waits for no GPU
        return highest.tolist()

    @contextlib.contextmanager
    def agree(self, end_run=True):
        """All ranks end with the message of a rank that raises ValueError or OSError inside the block. It
        begins with that rank's name, unless all have this message, or rank 0 and there is one machine."""
        error = None
        try:
            yield
        # Any other error is a bug: this rank ends with its traceback, and torchrun ends the others.
        except (ValueError, OSError) as caught:
            error = message_of(caught)
        errors = self.gather(error)  # also without an error, because the others wait for this rank's
        message = next(filter(None, errors), None)
        if message is None:
            return
        rank = errors.index(message)
        if len({*errors}) > 1 and (rank or self.world > self.n_local):
            message = f"{self.names[rank]}: {message}"
        if not end_run:
            raise OSError(message)  # on all ranks
        self.leave()
        raise SystemExit(message)

    def rearm_watchdog(self):
        """This rank prints its stacks and ends unless the next call comes within `timeout` seconds."""
        # A collective that hangs prints nothing by itself (torchtitan #3065).
        if self.world > 1:
            # a thread in C, which no lock of Python holds up; each call replaces the timer before
            faulthandler.dump_traceback_later(self.timeout, exit=True)

    def leave(self):
        """Ends the process group. Afterwards gather() and agree() are about this rank alone."""
        faulthandler.cancel_dump_traceback_later()
        if dist.is_initialized():
            dist.barrier(self.control)  # with gloo, others abort when one leaves early
            dist.destroy_process_group()
            self.control = None


def message_of(error):
    """An error as a user reads it: the path first, where Python begins with the number of the error."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def name_of_rank():
    # from the environment: it is needed where ranks have not met
    return f"rank {os.environ.get('RANK', 0)} ({platform.node()})"


def local_numbers(environment):
    """-> LOCAL_RANK and LOCAL_WORLD_SIZE. ValueError where a script has set numbers that cannot be."""
    # without RANK or WORLD_SIZE, rendezvous() says which is missing
    rank, world = (int(environment.get(name, 0)) for name in ("RANK", "WORLD_SIZE"))
    local = int(environment.get("LOCAL_RANK", 0))
    n_local = int(environment.get("LOCAL_WORLD_SIZE", local + 1))  # scripts for srun often leave it out
    # rank - local is the first rank of this machine: open_data() reads what that one has tokenized
    is_possible = rank in range(world) and local in range(n_local) and local <= rank and n_local <= world
    if world and not is_possible:
        raise ValueError(f"RANK={rank} WORLD_SIZE={world} LOCAL_RANK={local} LOCAL_WORLD_SIZE={n_local} "
                         "cannot be")
    return local, n_local


@contextlib.contextmanager
def meeting():
    """Makes one line of torch's errors where ranks do not find each other. Each rank has to print its own."""
    try:
        yield
    except ValueError as error:  # a variable is missing, or no number
        raise ConnectionError(
            f"RANK is set, so this process is one of several ranks. {error}. torchrun sets "
            f"{data.listing(OF_GROUP)}: start with it, or unset RANK") from error
    except RuntimeError as error:
        given = " ".join(f"{name}={os.environ.get(name)}" for name in sorted(OF_GROUP))
        why = str(error).splitlines()[0][:300].rstrip(".")  # what follows are frames of C++
        raise ConnectionError(
            f"{name_of_rank()}: no contact with the other ranks at {given}: {why}. All ranks need these "
            "values, and each a RANK of its own. Each rank listens at the address of its machine's name. If "
            "that is 127.0.1.1, no other machine reaches it: GLOO_SOCKET_IFNAME=eth0 gives the network "
            "interface to listen at") from error


def prepare_device(local_rank, n_local):
    """-> the device of a rank, after settings of CUDA and of the number of threads."""
    threads = os.environ.get("OMP_NUM_THREADS")
    # torchrun sets 1, which would leave the CPU's part of the work on one core per rank
    if not threads or (threads == "1" and "RANK" in os.environ):
        torch.set_num_threads(max(1, allowed_cores() // n_local))
    is_wsl = "microsoft" in platform.uname().release.lower()  # they fail there (pytorch #192330)
    # the older name, which the user may have set
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and not is_wsl:
        # Segments that can grow leave no unusable holes. CUDA's allocator reads this at its first use.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with warnings.catch_warnings(record=True) as warned:  # of a driver that is too old, for example
        warnings.simplefilter("always")
        has_gpu = torch.cuda.is_available()
    if not has_gpu:
        if local_rank == 0:
            say_missing_gpu([str(warning.message) for warning in warned])
        return torch.device("cpu")
    n_gpus = torch.cuda.device_count()  # those that CUDA_VISIBLE_DEVICES leaves
    # `srun --gpus-per-task=1` shows each rank its own GPU alone, and torchrun shows all to all
    if n_gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        local_rank = 0
    elif max(n_local, local_rank + 1) > n_gpus:
        raise ValueError(f"--nproc_per_node {n_local}: this machine has {data.count_of(n_gpus, 'GPUs')}")
    device = torch.device("cuda", local_rank)
    # before anything is allocated: what asks for "cuda" alone would be on GPU 0, from every rank
    torch.cuda.set_device(device)
    # On Hopper torch 2.14 prefers cuDNN's attention, which plans each new length for 170 ms, and our lengths
    # (attend_here() in model.py) differ in each batch.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def try_kernel(device):
    """ValueError, before a download, if torch has no kernels for a GPU. It drops old ones: Kaggle's P100."""
    try:
        torch.ones(1, device=device)
    except RuntimeError as error:
        why = str(error).splitlines()[0].rstrip(".")
        if "kernel" not in why:  # its memory is full, perhaps: launch() has words for that
            raise
        kernels = " ".join(torch.cuda.get_arch_list())
        raise ValueError(
            f"{torch.cuda.get_device_name(device)}: {why}. torch {torch.__version__} has kernels for "
            f"{kernels}: give another GPU, or install a torch for this one (pytorch.org); "
            "CUDA_VISIBLE_DEVICES=-1 trains on the CPU") from error


def handle(number, handler):
    """Sets what a signal does. An ignored one stays ignored: nohup and the shell, for `&`, count on that."""
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, handler)


class StopSignal:
    """Notes a signal in `number`, so that a run can finish its step, save and end."""

    def __init__(self, exits):
        self.number = 0
        # Until main sets it, a signal ends the process at once.
        self.can_save = False
        # Before they kill a job, clouds send SIGTERM, Slurm what --signal names, Grid Engine and LSF SIGUSR2,
        # and the kernel SIGXCPU where the time of `ulimit -t` ends.
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGHUP,
                       signal.SIGINT):
            # afterwards as before: a notebook goes on
            exits.callback(handle, number, signal.getsignal(number) or signal.SIG_DFL)
            handle(number, self.note)

    def note(self, number, _):
        # a second Ctrl-C ends it, too, but not under torchrun, which itself sends each rank a second
        can_end = number == signal.SIGINT and "RANK" not in os.environ
        if (can_end and self.number == number) or not self.can_save:
            raise KeyboardInterrupt
        self.number = number
        # Said at once, or whoever waits for a long step presses again. print() must not be called here: the
        # signal may have come in the middle of another one.
        if os.environ.get("RANK", "0") == "0":
            again = "; again: at once, unsaved" if can_end else ""
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(2, f"\nstopping after this step, which is saved{again}\n".encode())


# ---------------- opening a model and a run

class OpenedModel(NamedTuple):
    """What --model and --adapter stand for. A plan needs no more than open_config() knows."""

    files: data.ModelFiles
    config: lm.Config
    stored_config: lm.Config  # what the files have: the vocabulary may be smaller
    adapter_reader: data.WeightFiles | None
    # open_model() adds these
    model: lm.Transformer | None = None  # with its features, on the meta device
    reader: data.WeightFiles | data.RandomWeights | None = None  # where the weights come from
    tokenizer: data.Tokenizer | None = None


class RunSpec(NamedTuple):
    """What the memory of a run depends on, known before anything is allocated."""

    args: argparse.Namespace  # the final value of every flag
    config: lm.Config
    world: int  # ranks
    length: int  # tokens of the longest row
    # Whether the card has FlashAttention, in fp16 and bf16. None is not known: then bf16 counts on it.
    has_flash: bool | None = None
    documents: int = 1  # in a packed row, on average, or pairs with --dpo

    @property
    def trains_vocabulary(self):
        return not self.args.lora or self.args.train_embeddings

    @property
    def streams(self):
        """Whether StreamedWeights, and not FSDP2, brings what is frozen."""
        return carrier_of(self.args, self.world) == "StreamedWeights"


def open_config(args, world, device, random_init, revisions=None):
    """-> OpenedModel, and gives `args` its final values. device: None if the run is only planned."""
    revisions = {} if revisions is None else revisions
    adapter_reader = None
    adapter_settings = {}
    folder = None
    if args.adapter:
        folder = data.folder_of("adapter", args.adapter, revisions)
        adapter_reader, adapter_settings = data.open_adapter(folder)
        settings = data.read_json(folder / data.ADAPTER_CONFIG)
        # the commit of its base on the Hub, under which it was trained
        is_on_hub = settings.get(data.BASE) == args.model and not os.path.isdir(args.model)
        if is_on_hub and settings.get("revision"):
            revisions.setdefault(args.model, str(settings["revision"]))
    with data.errors_of_base(args.model, folder):
        files = data.find_model(args.model, random_init, revisions)
        config = lm.parse_config(files.config, f"{args.model}: config.json")
    own_base = settings.get(data.BASE) if adapter_reader else None
    if own_base and own_base not in (args.model, files.base):
        data.note_once(f"{folder}/{data.ADAPTER_CONFIG} names another base, {own_base}")
    if adapter_reader and data.has_two_matrices(adapter_reader, config):
        files = files._replace(config=data.with_value(files.config, "tie_word_embeddings", False))
    resolve_for_model(args, config, adapter_settings, device)
    stored_config = config  # --add_tokens is about to make the vocabulary larger than that of the files
    files = with_vocabulary(files, config.vocab_size, args.add_tokens, adapter_reader)
    config = lm.parse_config(files.config, f"{args.model}: config.json")
    check_sizes(args, config, world)
    return OpenedModel(files, config, stored_config, adapter_reader)


def with_vocabulary(files, n_stored, new_tokens, adapter_reader):
    """ModelFiles with a run's tokenizer and vocabulary. n_stored: rows of the model's embedding."""
    n_rows = n_stored
    if new_tokens:
        core, *_ = data.read_tokenizer(files.tokenizer)
        new_ids = data.add_new_tokens_(core, new_tokens)
        if new_ids.stop > n_stored:
            n_rows = 128 * math.ceil(new_ids.stop / 128)  # kernels are fast with such sizes
    # an adapter with an embedding brings both: it may come from a run with --add_tokens
    for name, stored in adapter_reader.tensors.items() if adapter_reader else ():
        # only the end: PEFT puts a prefix before it, and models with a vision tower have a longer name
        if name.endswith("embed_tokens.weight"):
            n_rows = max(n_rows, stored.shape[0])
            folder = stored.path.parent
            if (folder / "tokenizer.json").exists():
                files = files._replace(tokenizer=folder)
            elif stored.shape[0] > n_stored:
                raise ValueError(
                    f"{folder}: an embedding of {n_rows:,} rows for a model of {n_stored:,}, and no "
                    "tokenizer.json: save the tokenizer of its training there")
    if n_rows > n_stored:
        files = files._replace(config=data.with_value(files.config, "vocab_size", n_rows))
    return files


def resolve_for_model(args, config, adapter_settings, device):
    """Writes the final value of flags that depend on the model or the device."""
    # an adapter's rank, alpha, rsLoRA and targets become the run's, and its dropout without --lora_dropout
    for name, value in adapter_settings.items():
        # a switch that was not given is False; and `is`, because a dropout of 0 that was given equals it
        if getattr(args, name) is None or getattr(args, name) is False:
            setattr(args, name, value)
    for flag in ("lora_targets", "nf5"):
        names = getattr(args, flag)
        if not names:
            continue
        found = lm.targets_in(config)
        if flag == "lora_targets" and "linear_attention" in config.layer_types:
            found += lm.DELTANET_GATES
        absent = set(names) - set(found)
        if set(names) >= set(lm.ALL_LINEAR):
            setattr(args, flag, [name for name in found if name in names])  # `all` is what this model has
        elif absent:
            raise ValueError(f"--{flag} {', '.join(sorted(absent))}: the model has no such layer, only "
                             + ", ".join(found))
    if config.rope_scaling["rope_type"] == "dynamic" and args.seq_len > config.max_position_embeddings:
        raise ValueError(f"--seq_len {args.seq_len}: beyond {config.max_position_embeddings} tokens RoPE of "
                         "the type dynamic depends on the length of a row, which is not implemented")
    if args.precision is None:
        args.precision = default_precision(args.chat, device)
        if args.precision == "fp16" and args.optim_in_backward:  # or check_flags() has said so
            raise ValueError(f"--optim_in_backward: this GPU has no bf16, and {WHOLE_STEPS}")
    if args.compile is None:
        args.compile = compiles_by_default(config, device)
    missing = args.compile and missing_for_compile(device)
    if missing:
        raise ValueError(f"--compile needs {missing}. Without --compile nothing is compiled")
    if args.lr is None:
        args.lr = default_rate(config, args.lora, args.dpo)
    if args.embedding_lr and not args.train_embeddings:
        raise ValueError("--embedding_lr needs --train_embeddings, or an --adapter with an embedding")
    if args.train_embeddings and args.embedding_lr is None:
        args.embedding_lr = args.lr / 10  # as the default rate of full fine-tuning to that of adapters


def check_sizes(args, config, world):
    """ValueError where a flag does not fit the ranks or the model."""
    n_heads = {"heads of attention": config.num_attention_heads}
    if "linear_attention" in config.layer_types:  # Gated DeltaNet
        n_heads["key heads of Gated DeltaNet"] = config.linear_num_key_heads
    for flag in ("replicas", "sequence_parallel"):
        given = getattr(args, flag)
        if world % given:
            raise ValueError(f"--{flag} {given} needs {given} processes or a multiple of that, not {world}: "
                             f"torchrun --nproc_per_node {given} starts {given}")
    # each rank of a --sequence_parallel group mixes its share of the heads
    if math.gcd(*n_heads.values()) % args.sequence_parallel:
        heads = ", ".join(f"{count} {kind}" for kind, count in n_heads.items())
        raise ValueError(f"--sequence_parallel {args.sequence_parallel}: it must divide the model's {heads}")
    if config.num_experts:
        expert_targets = set(args.lora_targets or []) & {"gate_proj", "up_proj", "down_proj"}
        if len(expert_targets & {"gate_proj", "up_proj"}) == 1:
            raise ValueError("--lora_targets: PEFT adapts gate_proj and up_proj of experts together: "
                             "give both or none")
        if expert_targets and (args.lora_rank or 8) % 8:
            raise ValueError(f"--lora_rank {args.lora_rank}: the products of experts need a multiple of 8")
        if expert_targets and args.rslora and not args.chat:
            # PEFT 0.21 doubles rank and alpha of gate_proj and up_proj, which it has in one stack
            alpha = lm.lora_scale(args.lora_rank, args.lora_alpha, True) * args.lora_rank
            raise ValueError("--rslora: PEFT scales such adapters of experts by another factor; without it, "
                             f"--lora_alpha {alpha:g} gives these; an --adapter has to be merged first")


def default_rate(config, lora, dpo):
    # Fitted to the best rates of LoRA on Llama and Qwen of many sizes (get_lr() in
    # github.com/thinking-machines-lab/tinker-cookbook): wider models need a smaller rate, Qwen hardly. There
    # is no published rule for other families.
    exponent = 0.0775 if config.model_type.startswith("qwen") else 0.781
    rate = 5e-4 * (2000 / config.hidden_size) ** exponent
    if not lora:  # full fine-tuning
        rate /= 10
    if dpo:
        rate /= 10
    return float(f"{rate:.3g}")  # what the start prints, and can be typed


def open_model(args, ranks, revisions=None):
    """-> OpenedModel. Checks names and shapes of all that will be read, before anything is allocated."""
    with ranks.agree():
        # --inspect looks at data alone: it downloads no weights for them
        without_weights = args.random_init or bool(args.inspect)
        trains = args.data and not (args.inspect or args.chat or args.export)
        if trains and ranks.device.type == "cpu" and ranks.rank == 0:
            say_need_without_gpu(args, ranks, revisions)
        opened = open_config(args, ranks.world, ranks.device, without_weights, revisions)
        files = opened.files
        config = opened.config
        adapter_reader = opened.adapter_reader
        # Names and shapes in files are those of the vanilla model, without NF4's codes and without adapters.
        with torch.device("meta"):
            vanilla = lm.Transformer(opened.stored_config)
        with data.errors_of_base(args.model, adapter_reader and adapter_reader.folder):
            if files.weights:
                reader = data.WeightFiles(files.weights)
            else:
                reader = data.RandomWeights(vanilla, args.seed, ranks.device)
            data.check_weights(vanilla, reader, args.model)
        if files.weights and reader.quantized:
            ranks.say(f"{args.model}: {len(reader.quantized):,} matrices in {reader.format}, "
                      "dequantized as they are read")
        if not config.tie_word_embeddings and vanilla.config.tie_word_embeddings:  # see has_two_matrices()
            stored = reader.tensors[data.embedding_in_files(config)]
            reader.tensors[data.HEAD] = stored._replace(name=data.HEAD)  # what a merged model writes
        model = lm.on_meta(config, args)
        if adapter_reader:
            data.check_weights(model, adapter_reader, args.adapter)
        tokenizer = open_tokenizer(args, opened)
        if files.weights and args.lora and not (adapter_reader or args.train_embeddings):
            zeros = data.untrained_tokens(reader, config, tokenizer.stop_ids)
            for token in sorted({*zeros, *tokenizer.unnamed_ends}):
                # of Qwen's base models chats do not end, whatever adapters learn (QwenLM/Qwen3 #1064)
                why = "may never have trained this end of a turn (no file of it names it as an end)"
                if token in zeros:
                    why = "never trained this end of a turn (its embedding is a row of zeros)"
                text = tokenizer.core.id_to_token(token)
                ranks.note(f"{text}: the base {why}: --train_embeddings trains it")
        return opened._replace(model=model, reader=reader, tokenizer=tokenizer)


# These flags are compared by what they stand for: copies of a model or of data may lie anywhere.
BY_CONTENT = {"model", "adapter", "data", "eval_data", "chat_template"}


def what_is_trained(args, opened, resumed, ranks):
    """-> {what: its value} of all that must be the same on every rank. Files are compared by a checksum of
    their bytes, because two revisions of a model have equal names, shapes and sizes. Of more than 1 GiB it
    reads 1 GiB, in blocks of 256 KiB at even distances: of 8 billion parameters one every 4 MiB. So it may
    miss a change of one small tensor, and nothing that training does."""
    about = {f"--{name}" if name in args else name: value
             for name, value in settings_of(args, ranks.world).items() if name not in BY_CONTENT}
    about |= {f"config.json's {key}": value for key, value in dataclasses.asdict(opened.config).items()}
    tokenizer = opened.tokenizer
    texts = [tokenizer.core.to_str(), tokenizer.bos_ids, tokenizer.eos_ids, tokenizer.variables,
             sorted(tokenizer.stop_ids)]  # where an answer of --sample ends
    about["checksum of the tokenizer"] = zlib.crc32(repr(texts).encode())
    about["checksum of the chat template"] = zlib.crc32(repr(tokenizer.template_texts).encode())
    about["device"] = ranks.device.type  # a rank that finds no GPU would wait in gloo for ranks in NCCL
    files = {os.path.basename(path): [path] for path in CODE}
    files["state of --resume"] = [resumed / STATE] if resumed else []
    files["weights of --model"] = getattr(opened.reader, "open_files", ())  # random ones have no files
    files["weights of --adapter"] = getattr(opened.adapter_reader, "open_files", ())
    files["--data"] = args.data or ()
    files["--eval_data"] = args.eval_data or ()
    for what, paths in files.items():
        for number, path in enumerate(paths, 1):
            # a share of --eval_data, or the name of a data set; open_data() compares the rows of both
            content = "a folder" if data.is_saved_set(str(path)) else path
            if os.path.isfile(path):
                checksum = data.crc_of(path, 2**30 // len(paths))
                content = f"{os.path.getsize(path):,} bytes, checksum {checksum:08x}"
            about[what if len(paths) == 1 else f"{what}, file {number}"] = content
    return about


def compare_ranks(args, opened, resumed, ranks):
    """Ends the run, before anything is allocated, if a rank would train something else than rank 0."""
    if ranks.world == 1:
        return
    with ranks.agree():
        mine = what_is_trained(args, opened, resumed, ranks)
    first = ranks.gather(mine)[0]  # not inside agree(), which ends with a gather() of its own
    with ranks.agree():  # which names this rank, if it is not rank 0 that differs
        differing = [f"{what}: {brief(str(first.get(what)), 80)} on {ranks.names[0]}, "
                     f"{brief(str(mine.get(what)), 80)} here"
                     for what in sorted(first.keys() | mine.keys()) if first.get(what) != mine.get(what)]
        if differing:
            raise ValueError("ranks differ, and all need the same command, files and packages: "
                             + "; ".join(differing[:8]))


def load_weights_(model, opened, seed, resumed, ranks):
    """Loads a rank's rows into a model that build() has allocated. Collective."""
    with ranks.agree():
        # a resumed run needs only what is frozen: the rest comes from the checkpoint
        data.load_weights_(model, opened.reader, opened.adapter_reader, seed, ranks.device,
                           progress=ranks.rank == 0, frozen_only=bool(resumed))
    if opened.tokenizer.new_ids and not resumed:
        data.fill_new_rows_(model, opened.reader, opened.tokenizer.new_ids, seed)


def open_tokenizer(args, opened):
    # no value of --train_on: with it the tokenizer refuses rows that are not pairs
    train_on = "pairs" if args.dpo else args.train_on
    variables = data.read_template_args(args.template_args)
    # an adapter goes on with the template that it was trained on, even if the base has another
    return data.Tokenizer(opened.files.tokenizer, args.chat_template, train_on, variables, args.add_tokens,
                          opened.adapter_reader and opened.adapter_reader.folder)


def default_precision(is_chat, device):
    """--precision where it is not given. device: None if the run is only planned, for GPUs with bf16."""
    if device is None:
        return "mixed"
    if not has_bf16(device):
        # Emulated bf16 is several times slower than float32. Turing and Volta have fp16, 8 times as fast.
        return "fp16" if device.type == "cuda" else "fp32"
    return "bf16" if is_chat else "mixed"  # a chat trains nothing, so it needs no float32 masters


def has_bf16(device):
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported()


COMPILES_FROM = 300_000_000  # parameters; on less a GPU saves little time in a step


def compiles_by_default(config, device):
    """--compile where it is not given. device: None if the run is only planned, for GPUs that can compile."""
    if device is not None and (device.type != "cuda" or missing_for_compile(device)):
        return False
    with torch.device("meta"):
        return sum(p.numel() for p in lm.Transformer(config).parameters()) >= COMPILES_FROM


def missing_for_compile(device):
    """What torch.compile needs on a GPU and does not find, or None."""
    if device is None or device.type != "cuda":
        return None
    if not is_installed("triton"):
        return "the package triton"
    # Triton compiles its launchers in C
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"a C compiler, {' or '.join(compilers)}"
    if torch.cuda.get_device_capability(device) < (7, 0):
        return "a GPU of compute capability 7.0 or higher"
    return None


def open_run(args, config, loader, eval_loader, reader, resumed, ranks):
    """-> the state of the run at its start: what it carries from step to step beside its tensors."""
    with ranks.agree():
        rows_a_step, steps = count_steps(args, len(loader.rows), ranks.world)
        settings = fixed_settings(args, config, loader, reader)
        eval_data = eval_loader.documents.checksum if eval_loader else None
        state = {  # trainer_state.json has these names
            "step": 0,
            "steps": steps,
            "tokens": 0,  # trained on
            "rows_a_step": rows_a_step,
            "evaluated": 0,  # the step of the newest evaluation
            "best_eval": None,  # the row of metrics.jsonl of the best one
            "evals_since_best": 0,  # for --patience
            "eval_data": eval_data,  # checksum
            "metrics_bytes": 0,  # size of metrics.jsonl
            "settings": settings,
        }
        # the saved state counts, except for `steps`: a run may be made longer or shorter
        if resumed:
            state |= read_state(resumed, settings, ranks)  # older versions have no evals_since_best
        if state["rows_a_step"] != rows_a_step:
            n_rows = state["rows_a_step"] * args.sequence_parallel
            batch_size = math.gcd(args.batch_size, n_rows // ranks.world)  # as it is, if that divides them
            how = f"give --batch_size {batch_size} --grad_accum {n_rows // ranks.world // batch_size}"
            if n_rows % ranks.world:
                how = f"{ranks.world} ranks cannot divide them: start a number that divides {n_rows}"
            saved_rows = data.count_of(state["rows_a_step"], "rows")
            raise ValueError(f"--resume {resumed}: its steps have {saved_rows}, and here they would have "
                             f"{rows_a_step}: {how}")
        if state["step"] > steps:
            raise ValueError(
                f"--resume {resumed}: this run ends at step {steps}: raise --steps or --epochs")
    say_notes(args, config, steps, ranks, state["step"])
    if state["step"] == steps:
        ranks.note(f"this run is finished: {resumed} has its last step; --steps or --epochs with a higher "
                   "number trains on; final/ is written again")
    if state["steps"] != steps:
        ranks.note(f"{resumed} was planned for {data.count_of(state['steps'], 'steps')}, not {steps}: the "
                   "learning-rate schedule differs from here on")
        state["steps"] = steps
    if eval_data not in (None, state["eval_data"]):
        if state["evaluated"]:
            ranks.note(f"{resumed} was evaluated on different --eval_data: its best loss no longer counts")
        state |= {"eval_data": eval_data, "evaluated": 0, "best_eval": None, "evals_since_best": 0}
    return state


def count_steps(args, n_rows, world):
    """-> (rows of a step, steps). Raises a ValueError if the data have too few rows."""
    rows_a_step = args.batch_size * args.grad_accum * world // args.sequence_parallel  # of all ranks
    if n_rows < rows_a_step:
        raise ValueError(
            f"a step needs {rows_a_step:,} rows (--batch_size x --grad_accum x ranks) and the data has "
            f"{n_rows:,}: lower one of them or --seq_len, or give more data")
    return rows_a_step, args.steps or math.ceil(args.epochs * n_rows / rows_a_step)


def say_notes(args, config, steps, ranks, n_done=0):
    """Says what works and is probably not what the user wants."""
    dropouts = [f"{key} {getattr(config, key):g}" for key in ("attention_dropout", "residual_dropout")
                if getattr(config, key)]
    if dropouts:
        ranks.note(f"{', '.join(dropouts)} in config.json is ignored")
    if config.shared_expert_intermediate_size and args.lora and not args.merge:
        ranks.note("PEFT does not load adapters of this model's experts: --merge writes a whole model")
    missing = missing_for_compile(ranks.device)
    if missing and steps > 200 and not args.compile:
        ranks.note(f"--compile needs {missing}; with it a step is about 1.2 times as fast")
    # CPUs of other kinds may have such instructions, and torch does not say
    is_sure = ranks.device.type == "cuda" or platform.machine() == "x86_64"
    if args.precision in ("mixed", "bf16") and is_sure and not has_bf16(ranks.device):
        ranks.note(f"this {ranks.device_name} only emulates bf16: --precision "
                   f"{default_precision(False, ranks.device)} is faster than {args.precision}")
    rate = default_rate(config, args.lora, args.dpo)
    if not rate / 30 <= args.lr <= 30 * rate:
        ranks.note(f"--lr {args.lr:g} is {args.lr / rate:.2g} times this method's default, {rate:g}")
    if args.precision == "bf16" and not (args.lora or args.stochastic_rounding):
        ranks.note("--precision bf16 also trains in bf16, which rounds small updates away; "
                   "--stochastic_rounding keeps them on average; the default, mixed, loses none")
    if args.min_lr > args.lr:
        ranks.note(f"--min_lr {args.min_lr:g} is above --lr {args.lr:g}: the learning rate rises")
    if 1 <= args.warmup >= steps:
        ranks.note(f"--warmup {args.warmup:g} is not shorter than the run, {steps} steps: the learning rate "
                   "does not reach --lr")
    n_left = steps - n_done
    if (args.profile or args.memory_snapshot) and n_left < 3:
        ranks.note("--profile and --memory_snapshot record the third step from here, and there are only "
                   f"{n_left}: nothing is recorded")
    # A first try with a hundred rows learns next to nothing, and looks as if the model could not.
    if steps < 20 and not args.steps:
        ranks.note(f"only {steps} steps; a larger --epochs or a smaller --seq_len makes more")


def limit_gpu(gpu_gib, ranks):
    """Limits the process to --gpu_gib of its GPU -> bytes that each rank may use. Collective."""
    # one number for all ranks, because all must recompute the same blocks
    limit = (gpu_gib or math.inf) * GIB  # bytes
    if ranks.device.type != "cuda":
        return min(ranks.gather(limit))
    free, total = torch.cuda.mem_get_info(ranks.device)
    limit = min(limit, total)
    torch.cuda.set_per_process_memory_fraction(limit / total, ranks.device)
    # without what other processes hold; OVERHEAD counts this process's own context, which is not free now
    room = min(ranks.gather(min(limit, free + torch.cuda.memory_reserved(ranks.device) + CONTEXT)))
    if room < limit - 0.1 * GIB:
        ranks.note(f"another process uses {(limit - room) / GIB:.2f} GiB of a GPU, or one GPU is smaller: "
                   "the plan does not count on it")
    return room


def keep_freed_memory(on):
    """Tells glibc to keep freed memory: mapping large tensors anew would take a fifth of a step on a CPU."""
    if on and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: a large block gets no mapping of its own
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: give nothing back


# ---------------- building a model, a step

class Trainer(NamedTuple):
    """A model that is ready to train, and all that updates it."""

    model: lm.Transformer
    run: RunSpec
    ranks: "Ranks"
    trained: list  # the parameters that the optimizer has
    optimizer: torch.optim.Optimizer
    nonfinite: "NonFinite"
    in_backward: "StepInBackward | None"
    host_pages: dict  # {parameter: its bytes in host memory}, of those that StreamedWeights copies


def build(model, run, policy, ranks, load_weights):
    """Wraps a model on the meta device, allocates it, loads its weights, makes the optimizer -> Trainer."""
    # The memory plan calls this as main does, on the meta device: what is called here is planned as it runs.
    # Each feature wraps what is there, from the inside out.
    args = run.args
    device = ranks.device
    if args.compile:
        lm.compile_(model, args.packing)
    wrap_blocks_(model, args, policy)
    # A fork's feature of blocks goes here: inside of FSDP2, around recomputation.
    # groups of consecutive ranks, as Loader deals out rows: rank // N is the group, rank % N the shard of it
    if args.sequence_parallel > 1:
        model.sequence_group, _ = dist.new_subgroups(args.sequence_parallel, timeout=ranks.step_limit)
    if args.fsdp2:
        shard_(model, args, device, policy.on_host)
    # until here the model is on the meta device, so a rank allocates no more than its own shard
    streamed = allocate_(model, run, policy, device)
    load_weights(model)  # before StreamedWeights, which copies what is there to host memory
    # these two live on in the hooks that they register on modules
    host_pages = StreamedWeights(streamed, device).host_pages if streamed else {}
    if run.streams and not run.trains_vocabulary:
        StreamedVocabulary(model, device)
    # on a CPU, activations are in host memory already
    if "activations" in args.offload and device.type != "cpu":
        model.activation_hooks = OffloadActivations(device, model.model.layers)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    trained = list(named.values())
    # on the device of the gradients: with --offload params on the CPU
    nonfinite = NonFinite(trained[0].device, args.precision == "fp16", ranks.world)
    optimizer = make_optimizer(named, args, nonfinite.found_inf)
    in_backward = None
    if args.optim_in_backward:
        in_backward = StepInBackward(optimizer, trained, nonfinite, ranks, args.fsdp2, args.replicas)
    return Trainer(model, run, ranks, trained, optimizer, nonfinite, in_backward, host_pages)


def train_step(trainer, batches, n_terms):
    """Forward and backward of each micro-batch, and one update -> ({name: sum of the loss or of a metric},
    gradient norm), on the device. n_terms: supervised tokens, or pairs, of all micro-batches and ranks."""
    model, run, ranks, trained, optimizer, nonfinite, in_backward, _ = trainer
    args = run.args
    sums = Counter()
    for i, batch in enumerate(batches):
        if args.fsdp2:
            # FSDP2 reduces gradients of whole weights in each micro-batch: unsharded they are too large to
            # keep. Those of adapters are reduced in the last one, and replicas exchange once a step.
            is_last = i == len(batches) - 1
            model.set_requires_gradient_sync(is_last or run.trains_vocabulary)
            model.set_requires_all_reduce(is_last)
        loss, metrics = loss_of(model, batch.to(ranks.device), args)
        # The loss is a sum over tokens (or pairs). Divided by those of all micro-batches and ranks, each
        # counts the same however a step is split. `ranks.world` undoes the mean over ranks of the gradients.
        (nonfinite.scaled(loss) * (ranks.world / n_terms)).backward()
        # detached, or the log would keep the graph until it writes a row
        sums.update({name: value.detach() for name, value in [("loss", loss), *metrics.items()]})
        del loss, metrics  # or the graph, with offloaded inputs, would live through the next forward
    if in_backward:
        norm = in_backward.norm()  # the weights were updated during the backward
    else:
        # FSDP2 averages where it reduces; without it nobody has averaged them yet
        if ranks.world > 1 and not args.fsdp2:
            average_gradients_(trained, ranks.world)
        # before the norm, because --clip is about gradients of the loss itself
        nonfinite.unscale_(trained)
        norm = clip_gradients_(trained, args.clip)
        # the host does not look at the norm: where it is inf or nan, the kernels change nothing
        nonfinite.step_if_finite(optimizer, norm)
        optimizer.zero_grad()  # to None: the next forward can use their memory
    nonfinite.end_step_()
    return sums, norm


# ---------------- the loss of a batch, evaluation

def loss_of(model, b, args):
    """-> (summed loss of a batch, {name: sum of a metric}), on the device, with the same names each time."""
    # The log divides these by the supervised tokens, or by the pairs of --dpo. With --sequence_parallel the
    # losses are of this rank's tokens; b.n_targets are of whole rows, and only the first rank has them.
    inputs = b.tokens, b.targets, b.positions, b.spans, b.supervised_S
    if not args.dpo:
        loss = model(*inputs)
        return loss, model.lm_head.metrics  # which this forward has filled
    # the reference is the same model with its adapters switched off, so no second one is in memory
    with torch.no_grad():
        lm.switch_adapters_(model, on=False)
        reference_S = model(*inputs)
        lm.switch_adapters_(model, on=True)
    return preferences(model(*inputs), reference_S, b.n_targets, args.beta)


def preferences(losses_S, reference_S, n_targets, beta):
    """DPO (arXiv:2305.18290): losses of tokens, by model and reference -> (summed loss, metrics)."""
    # n_targets has the documents of P pairs, each chosen one before its rejected one
    logp_P2 = log_probabilities(losses_S, n_targets)
    reference_P2 = log_probabilities(reference_S, n_targets)
    rewards_P2 = beta * (logp_P2 - reference_P2)
    margins_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    # log(sigmoid()) would be log(0) for a pair that the model gets very wrong
    loss_sum = -nn.functional.logsigmoid(margins_P).sum()
    logp_chosen, logp_rejected = logp_P2.sum(0)  # over the pairs
    return loss_sum, {
        "reward_margin": margins_P.sum(),
        "reward_accuracy": (margins_P > 0).float().sum(),
        "logp_chosen": logp_chosen,
        "logp_rejected": logp_rejected,
    }


def log_probabilities(losses_S, n_targets):
    """Losses of tokens -> the log of the probability of each answer, [P, 2]: chosen, rejected."""
    if not n_targets:  # an evaluation's rank without rows
        return losses_S.new_zeros(0, 2)
    # not index_add: on a GPU it adds in another order, with other bits, in each run
    answers = losses_S.split(n_targets)  # the losses of each document
    return -torch.stack([answer.sum() for answer in answers]).view(-1, 2)


def evaluation_interval(args, state, loader, ranks):
    """-> steps between evaluations, which it says: --eval_every, or a tenth of the run, more on much data."""
    steps = state["steps"]
    if not loader:
        return steps
    # A forward alone takes about a third of the time of a row. All evaluations may take a tenth of the run.
    n_evaluations = min(10, 3 * steps * state["rows_a_step"] // (10 * len(loader.rows)))
    interval = args.eval_every or math.ceil(steps / max(n_evaluations, 1))
    ranks.say(f"evaluation: every {data.count_of(interval, 'steps')}, and after the last (--eval_every)")
    if args.patience:
        evaluations = data.count_of(args.patience, "evaluations")
        ranks.say(f"the run ends after {evaluations} without a better one; final/ gets the best")
    return interval


@contextlib.contextmanager
def evaluating(model):
    model.eval()  # no dropout, and nothing compiled: see compile_() in model.py
    yield
    model.train()
    lm.reshard_(model)  # FSDP2 keeps what it has gathered for a backward, which does not come


def evaluate(model, loader, ranks, args, stop=None):
    """-> {"eval_loss": mean of all rows, and what else metrics.jsonl has}, or None after a signal."""
    sums = Counter()
    of_files = loader.of_files or {"": loader}
    with evaluating(model), torch.no_grad():
        # one file after the other, so that each has a loss of its own
        for file, batch in ((file, batch) for file, one in of_files.items() for batch in one.once()):
            ranks.rearm_watchdog()
            # Clusters kill soon after a signal. All ranks have equally many batches and stop before the same.
            (stopped,) = ranks.largest(stop.number if stop else 0)
            if stopped:
                return None
            loss, metrics = loss_of(model, batch.to(ranks.device), args)
            # float64, so that the digits that are printed do not depend on the number of ranks
            sums.update({name: value.double() for name, value in [("loss", loss), *metrics.items()]})
            if file:
                sums[f"loss_{file}"] += loss.double()
    sums_of_ranks = ranks.gather(to_host(sums))
    # each row is in one batch of one rank
    n_terms = int(loader.per_row.terms.sum())
    terms = {f"loss_{file}": int(one.per_row.terms.sum()) for file, one in of_files.items()}
    means = {f"eval_{name}": sum(one[name] for one in sums_of_ranks) / terms.get(name, n_terms)
             for name in sums}
    if model.compute_dtype is torch.float16 and not math.isfinite(means["eval_loss"]):
        ranks.leave()
        raise FloatingPointError(f"evaluation: the loss is not finite: {FP16_ENDS}")
    return means | {f"eval_{loader.term}": n_terms}


def to_host(tensors):
    """{name: tensor or number} -> {name: number, or list of them}."""
    # The first one waits for the GPU. After it nothing runs, so each of the few others takes microseconds.
    return {name: torch.as_tensor(tensor, dtype=torch.float64).tolist() for name, tensor in tensors.items()}


# ---------------- FSDP2, activation offload

# Where a frozen weight of a block is, under adapters, and what brings it to the block:
#
#     flags              ranks that   it lies                   it is brought by            its place is
#                        share rows                                                         free again
#     none               -            on the GPU, whole         -                           never
#     --fsdp2            1            on the GPU, whole         FSDP2: copy on the GPU      after the block
#     --fsdp2            2 and more   on their GPUs, by rows    FSDP2: all-gather           after the block
#     --offload params   1            in host memory, whole     StreamedWeights: copy       for another block
#     --offload params   2 and more   in host memory, by rows   FSDP2: copy, all-gather     after the block
#
# build() brings it there first: allocate_() makes its place, and data.load_weights_() fills that. --offload
# params requires --fsdp2. A resident block (--resident_blocks) lies as without --offload params. Embedding
# and head are FSDP2's; frozen ones are StreamedVocabulary's where StreamedWeights has the blocks. What is
# trained is FSDP2's, with --offload params in host memory.


@functools.cache  # a second call would wrap the method again
def shard_bytes_on_old_torch_():
    """Lets torch 2.11 shard frozen integers such as NF4 weights, as 2.12 does. Delete it if you have 2.12."""
    if torch.__version__ >= (2, 12):
        return
    from types import SimpleNamespace

    from torch.distributed.fsdp._fully_shard import _fsdp_param

    old_init_dtypes = _fsdp_param.FSDPParam.init_dtype_attrs

    # nn.Parameter() asks for a gradient, which integers refuse
    def parameter(tensor, requires_grad=True):
        return nn.Parameter(tensor, requires_grad and tensor.is_floating_point())

    def init_dtypes(self, policy):
        old_init_dtypes(self, policy)
        if not self.orig_dtype.is_floating_point:  # a cast would turn packed bytes into bf16 numbers
            self.param_dtype = None

    _fsdp_param.nn = SimpleNamespace(Module=nn.Module, Parameter=parameter)
    _fsdp_param.FSDPParam.init_dtype_attrs = init_dtypes


def shard_(model, args, device, on_host=None):
    """FSDP2 (arXiv:2304.11277) shards each parameter on dim 0. A block is gathered before it runs and freed
    after it, in the forward and in the backward. on_host: see BlockPolicy; by default all blocks."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    shard_bytes_on_old_torch_()
    # Weights are gathered inside a replica, whose ranks are neighbours, so all-gathers stay inside a node.
    # Replicas exchange 2 * (N - 1) / N times the bytes of a gradient's shard.
    sizes = args.replicas, dist.get_world_size() // args.replicas
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))
    if args.replicas == 1:
        mesh = mesh["shard"]  # FSDP2 without replicas
    policy = MixedPrecisionPolicy(
        param_dtype=model.compute_dtype,  # of what is gathered: with mixed, half the bytes of the masters
        reduce_dtype=torch.bfloat16 if args.precision == "bf16" else torch.float32,
        cast_forward_inputs=False,  # a cast would round RoPE's float32 angles to bf16
    )
    stay = OffloadPolicy()  # on the GPU
    pin_memory = device.type != "cpu"
    offload = CPUOffloadPolicy(pin_memory) if "params" in args.offload else stay
    ignored = set()
    resident = set() if on_host is None else {*range(len(model.model.layers))} - {*on_host}
    if carrier_of(args, dist.get_world_size()) == "StreamedWeights":
        ignored.update(frozen_of(model))
        resident = set()  # FSDP2 has only what is trained, and all of that is in host memory
    shard = functools.partial(
        fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload, ignored_params=ignored)
    in_float32 = MixedPrecisionPolicy(cast_forward_inputs=False)  # no param_dtype: no cast
    layers = model.model.layers
    for i, block in enumerate(layers):
        block_offload = stay if i in resident else offload
        # FSDP2 casts the floats of a unit to one dtype (bytes of NF4 stay as they are), so the vectors of a
        # DecayGate, which are float32, are a unit of their own.
        for module in block.modules():
            if isinstance(module, lm.DecayGate):
                shard(module, mp_policy=in_float32, offload_policy=block_offload, reshard_after_forward=False)
        # the last block stays gathered: the backward needs it first, and freeing it would gather it twice
        reshard = args.reshard_after_forward and i < len(layers) - 1
        shard(block, offload_policy=block_offload, reshard_after_forward=reshard)
        if i not in resident:
            continue
        # The adapters of a resident block are offloaded as all others are: the optimizer updates parameters
        # on one device. FSDP2 has one policy for a unit, and a second unit would gather twice as often. So
        # this sets by private names what the policy would have set.
        for fsdp_param in block._get_fsdp_state()._fsdp_param_group.fsdp_params:
            if fsdp_param.sharded_param.requires_grad:
                fsdp_param.offload_to_cpu = True
                fsdp_param.pin_memory = pin_memory
    # Said here, because FSDP2's own order counts a DecayGate as a unit between two blocks.
    for before, block in itertools.pairwise(layers):
        block.set_modules_to_backward_prefetch([before])
    # FSDP2 keeps a shared parameter shared only inside one unit, so a tied pair stays in the root
    if args.shard_embeddings and not model.config.tie_word_embeddings:
        embedding = shard(model.model.embed_tokens, reshard_after_forward=True)
        embedding.set_unshard_in_backward(False)  # its gradient does not need its weights
        # the chunked loss computes the head's gradients in the forward: the backward needs no weights
        head = shard(model.lm_head, reshard_after_forward=args.chunked_ce)
        head.set_unshard_in_backward(not args.chunked_ce)
    # what is left, such as the last norm, stays gathered from forward to backward
    shard(model, reshard_after_forward=False)


def carrier_of(args, world):
    """-> what brings a frozen weight of a block, by the table above: "FSDP2", "StreamedWeights" or None."""
    if not args.fsdp2:
        return None
    # Where a rank has all rows, FSDP2 would copy a unit on the compute stream, where nothing hides the copy,
    # and then once more, from GPU memory to GPU memory. Shared rows it gathers ahead.
    return "StreamedWeights" if offloads_frozen(args) and world == args.replicas else "FSDP2"


def offloads_frozen(args):
    """Whether the frozen weights of blocks lie in host memory, but for those of --resident_blocks."""
    return args.lora and "params" in args.offload


def frozen_of(module):
    return [p for p in module.parameters() if not p.requires_grad]


def wrap_blocks_(model, args, policy):
    """Makes the blocks recompute and keep what `policy` says, with tiles and segments inside of that."""
    if args.tiled_mlp:
        # --seq_len, because the rows of a plan may be shorter
        lm.tile_mlp_(model, args.tiled_mlp, args.seq_len, args.sequence_parallel)
    for module in model.modules():
        if isinstance(module, lm.GatedDeltaNet):
            module.segment = policy.segment
    for block, kept in zip(model.model.layers, policy.blocks):
        if kept.recomputed:
            lm.recompute_(block, kept.attention, model.dropout > 0)
        if kept.weights:
            lm.keep_weights_(block)


def allocate_(model, run, policy, device):
    """Allocates all parameters of a model on the meta device -> the blocks that StreamedWeights gets."""
    # to_empty() makes two parameters of an embedding that is also the head
    model.to_empty(device="cpu" if "params" in run.args.offload else device).tie_()
    if not offloads_frozen(run.args):
        return []
    layers = model.model.layers
    on_host = [layers[i] for i in policy.on_host]
    on_device = [p for block in layers if block not in on_host for p in frozen_of(block)]
    if run.streams:
        # vectors are not worth a copy in each pass, and FSDP2 ignores all that is frozen, the last norm too
        on_device += [p for module in (*on_host, model.model.norm) for p in frozen_of(module) if p.dim() < 2]
    for p in on_device:
        move_(p, device)
    return on_host if run.streams else []


def move_(p, device):  # a function, because the plan counts what it moves
    on_device = nn.Parameter(torch.empty_like(p, device=device), requires_grad=False)
    # as to_empty() does: p.data of a shard would leave its rows where they are
    torch.utils.swap_tensors(p, on_device)


PAGE = 1 << 22  # bytes, a power of two as torch's pinned allocator gives out; 0.16 ms on PCIe 4


class Copy(NamedTuple):
    """A tensor on the device that the side stream copies. end: the event after the copy, None on a CPU."""

    tensor: torch.Tensor
    end: torch.Event | None


class Parked:
    """A saved tensor in pages of host memory."""

    def __init__(self, tensor):
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.in_flight = None  # the Copy that brings it back, from its start to its use
        # pinned: from memory that the kernel may move, the GPU cannot copy while the host goes on
        self.pages = [
            torch.empty_like(page, device="cpu", pin_memory=not page.is_cpu) for page in pages_of(tensor)]


def pages_of(tensor):
    """Parts of a contiguous tensor, as bytes."""
    # In one piece the pinned allocator would round its size up, to as much as twice of it. Pages that are
    # free again fit tensors of any size.
    return tensor.view(-1).view(torch.uint8).split(PAGE)


class SideStream:
    """Copies between the device and the host, beside the compute. On a CPU a copy is done at once."""

    def __init__(self, device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, targets, sources):
        """Starts the copies -> the event behind them, or None on a CPU."""
        if self.stream is not None:
            # compute that was issued has yet to write the sources, or still reads what was in the targets
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(self.stream):  # the second does nothing if it is None
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        if self.stream is not None:
            return self.stream.record_event()

    def wait_for(self, event):
        """Makes the compute stream wait, not the host."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    """Keeps what autograd saves inside the context in host memory. With checkpointing these are the blocks'
    inputs, 2*D bytes per token and layer, which any PCIe 4 card moves while a block computes (ALST,
    arXiv:2506.13996).

        forward:   pack 1, pack 2, pack 3      each starts the copy out
        backward:  unpack 3, unpack 2, ...     between two of them, after the MLP's backward of the block
                                               that runs, the copy back of the next one starts"""

    def __init__(self, device, blocks, min_bytes=1 << 16):
        super().__init__(self.pack, self.unpack)  # of nested hooks torch calls only the innermost
        self.device = device
        self.min_bytes = min_bytes  # smaller tensors stay
        self.newest = None  # Parked
        self.below = None  # the Parked input of the block below, until after_mixer() takes it
        # The Copy of each tensor on its way out, held until the compute stream has waited for it. Without
        # that its memory is reused while the side stream still reads it: silent errors in torchtune.
        self.leaving = []
        self.side = SideStream(device)
        for block in blocks:
            block.mixer.register_forward_hook(self.after_mixer)

    def __enter__(self):
        self.newest = None  # or the first tensor would link to the last one of the previous forward
        return super().__enter__()

    def __exit__(self, *error):
        self.release(n_held=0)  # and not in the backward: the last block and the head need memory, too
        self.below = self.newest  # for the last block, whose own input stays
        return super().__exit__(*error)

    def after_mixer(self, mixer, inputs, out):
        """Brings back the input of the block below in the mixer's backward: the MLP's memory is free then."""
        parked = self.below
        self.below = None  # so a recomputation's call does nothing, nor do those for other groups of heads
        if parked is not None and out.requires_grad:
            out.register_hook(lambda _: self.bring_back(parked))

    def release(self, n_held):
        """Drops tensors on their way out, all but the newest `n_held`, after a wait for their copies."""
        while len(self.leaving) > n_held:
            self.side.wait_for(self.leaving.pop(0).end)

    def pack(self, tensor):
        # these stay: what is on the host, what costs more to copy than it frees, and parameters
        elsewhere = tensor.device.type != self.device.type
        if elsewhere or tensor.nbytes < self.min_bytes or isinstance(tensor, nn.Parameter):
            return tensor
        tensor = tensor.contiguous()  # pages are cut out of its bytes as they lie in memory
        self.below = self.newest
        self.newest = Parked(tensor)
        self.leaving.append(Copy(tensor, self.side.copy(self.newest.pages, pages_of(tensor))))
        self.release(n_held=1)  # one copy runs beside the compute: more would only keep more on the device
        return self.newest

    def bring_back(self, parked):
        if parked.in_flight is None:
            # Allocated on the compute stream, and free when its last view is: in torchtune memory was reused
            # while a view of it lived on in the backward (#1860, #1936).
            tensor = torch.empty(parked.shape, dtype=parked.dtype, device=self.device)
            parked.in_flight = Copy(tensor, self.side.copy(pages_of(tensor), parked.pages))

    def unpack(self, saved):
        if isinstance(saved, torch.Tensor):  # pack() has left it where it was
            return saved
        self.bring_back(saved)  # on its way already, unless it is no block's input
        tensor, end = saved.in_flight
        saved.in_flight = None  # a second backward brings it back again
        self.side.wait_for(end)
        return tensor


class StreamedWeights:
    """Keeps the frozen matrices of some blocks in pinned host memory, and copies them to the GPU before their
    block runs. Two of these blocks are on the GPU at a time; k counts streamed blocks alone.

        forward:   block 0, block 1, block 2 ...   block k leaves its slot to block k + 2
        backward:  ... block 2, block 1, block 0   begins with the last two there, and ends with the first two

    The host waits for nothing: a copy waits for the compute issued before it, a block for its copy."""

    def __init__(self, blocks, device):
        self.side = SideStream(device)
        self.in_slot = [None, None]  # number of the block that is there, or on its way
        self.arrival = [None, None]  # the event behind its copy
        matrices = [[p for p in frozen_of(block) if p.dim() > 1] for block in blocks]
        n_bytes = max(sum(aligned(p.nbytes) for p in of_block) for of_block in matrices)  # of a slot
        # Block k is always in slot k % 2, so what autograd saved of a weight in the forward is that weight in
        # the backward. Slots are never freed, so no stream reuses memory that another one reads.
        slots = [torch.empty(n_bytes, dtype=torch.uint8, device=device) for _ in blocks[:2]]
        self.host_pages = {}  # {p: its bytes}
        self.copies = []  # for each block: its pages in a slot, and those in host memory
        for k, block in enumerate(blocks):
            slot = slots[k % 2]
            slot_pages = []
            host_pages = []
            start = 0
            for p in matrices[k]:
                # one parameter at a time: no more than that is in host memory twice
                self.host_pages[p] = [torch.empty_like(page, pin_memory=not slot.is_cpu).copy_(page)
                                      for page in pages_of(p.data)]
                # the parameter becomes a view of the slot
                p.data = slot[start : start + p.nbytes].view(p.dtype).view(p.shape)
                slot_pages += pages_of(p.data)
                host_pages += self.host_pages[p]
                start += aligned(p.nbytes)
            self.copies.append((slot_pages, host_pages))
            block.register_forward_pre_hook(functools.partial(self.before_forward, k))
            block.register_forward_hook(functools.partial(self.after_forward, k))

    def bring(self, k):
        """Starts the copy of a block into its slot, unless it is there."""
        # The caller has issued all compute on what the slot has now.
        if not 0 <= k < len(self.copies) or self.in_slot[k % 2] == k:
            return
        self.in_slot[k % 2] = k  # noted at the start: a second call must not copy again
        self.arrival[k % 2] = self.side.copy(*self.copies[k])

    def wait_for(self, k):
        self.bring(k)
        self.side.wait_for(self.arrival[k % 2])

    def before_forward(self, k, block, inputs):
        self.wait_for(k)
        self.bring(k + 1)  # does nothing but in the first block of a forward: see after_forward()
        x = inputs[0]
        if x.requires_grad:
            # this gradient ends the block's backward: its slot is free for block k - 2
            x.register_hook(lambda _: self.bring(k - 2))

    def after_forward(self, k, block, inputs, x):
        self.bring(k + 2)
        if x.requires_grad:
            # the gradient of its output is there before the block's backward begins
            x.register_hook(functools.partial(self.before_backward, k))

    def before_backward(self, k, _):
        self.wait_for(k)
        self.bring(k - 1)


class StreamedVocabulary:
    """Keeps a frozen embedding and a frozen head, which may be one weight, in host memory. Embeddings are
    looked up there. The head is on the GPU from the last block to the loss (or its backward)."""

    def __init__(self, model, device):
        self.side = SideStream(device)
        self.device = device
        self.head = model.lm_head
        self.on_host = self.head.weight  # after_head() puts it back, for whoever asks for parameters
        self.arriving = None  # the Copy of the head
        if device.type != "cpu":
            # in place: a tied embedding is the same parameter
            self.on_host.data = self.on_host.data.pin_memory()
        self.host_tokens_BT = None  # of this forward
        model.register_forward_pre_hook(self.before_model)
        embedding = model.model.embed_tokens
        embedding.register_forward_pre_hook(self.before_embedding)
        embedding.register_forward_hook(self.after_embedding)
        model.model.layers[-1].register_forward_pre_hook(self.bring)
        self.head.register_forward_pre_hook(self.before_head)
        self.head.register_forward_hook(self.after_head)

    def before_model(self, model, inputs):
        found = [value.host_tokens_BT for value in inputs if isinstance(value, lm.Spans)]
        self.host_tokens_BT = found[0] if found else None

    def before_embedding(self, embedding, inputs):
        if self.host_tokens_BT is not None:
            return self.host_tokens_BT
        (tokens_BT,) = inputs
        return tokens_BT.cpu()  # of generation, which waits for each token in any case, or there already

    def after_embedding(self, embedding, inputs, x):
        if self.device.type != "cpu":
            return x.pin_memory().to(self.device, non_blocking=True)

    def bring(self, block, inputs):
        # allocated on the compute stream, which uses it last: who gets its memory next comes after that
        weight = torch.empty_like(self.on_host, device=self.device)
        self.arriving = Copy(weight, self.side.copy([weight], [self.on_host]))

    def before_head(self, head, inputs):
        weight, end = self.arriving
        self.arriving = None
        self.side.wait_for(end)
        head.weight = nn.Parameter(weight, requires_grad=False)

    def after_head(self, head, inputs, loss):
        head.weight = self.on_host  # without --chunked_ce autograd keeps the other until the backward


def aligned(n_bytes):
    # kernels read 16 bytes at a time, from addresses that CUDA's allocator aligns to 512
    return nf4.ceil_div(n_bytes, 512) * 512


# ---------------- optimizers, learning rate

def groups_of(named, weight_decay, embedding_lr):
    """Parameter groups: matrices, vectors, and the vocabulary under adapters, at a rate of its own."""
    in_full = () if embedding_lr is None else (data.EMBEDDING, data.HEAD)  # beside adapters
    vocabulary = [p for name, p in named.items() if name in in_full]
    matrices = [p for name, p in named.items() if name not in in_full and p.dim() > 1]
    vectors = [p for p in named.values() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay},
              {"params": vectors, "weight_decay": 0.0}]
    if vocabulary:
        groups.append({"params": vocabulary, "weight_decay": weight_decay, "peak": embedding_lr})
    return groups


def make_optimizer(named, args, found_inf):
    """AdamW with weight decay on matrices only. named: {name: parameter}. To add an optimizer:

    - Put every parameter into a group: one that is in none never learns, silently.
    - Allocate all state here, in optimizer.state[p], and update it in place: then it is saved, resumed,
      sharded (zeros_like(p) is) and planned by itself.
    - Either keep `found_inf` as an attribute of this name and change nothing where it is 1 (a gradient was
      inf or nan), read on the device. Or have none: then each step waits for the device, and a step with inf
      or nan does not call step().
    - Skip a parameter whose grad is None: --optim_in_backward calls step() once for each parameter.
    """
    groups = groups_of(named, args.weight_decay, args.embedding_lr)
    eight_bits = args.optim == "adamw8bit"
    if eight_bits or args.stochastic_rounding:
        # It counts steps on the host, and those that fp16 skips, too: its first updates are smaller then.
        return nf4.CompactAdamW(
            groups, args.lr, eight_bits, args.stochastic_rounding, args.compile, found_inf)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=args.fused_adamw)
    for p in named.values():
        optimizer.state[p] = {"step": torch.zeros((), device=p.device if args.fused_adamw else "cpu"),
                              "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    if args.fused_adamw:
        optimizer.found_inf = found_inf
    return optimizer


def set_rates_(optimizer, step, steps, args):
    """Sets the learning rate of each group for this step -> that of --lr."""
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step, steps, args, group.get("peak", args.lr))
    return optimizer.param_groups[0]["lr"]


def lr_at(step, steps, args, peak):
    """Learning rate of a step, counted from 0: linear warmup to `peak`, then --schedule down to --min_lr."""
    lowest = args.min_lr
    if peak != args.lr:  # --embedding_lr falls to the same fraction of its peak
        lowest *= peak / args.lr if args.lr else 0.0
    # below 1: a fraction of the run
    warmup = args.warmup * steps if args.warmup < 1 else args.warmup
    if step < warmup:
        # the first step learns something, and the first after the warmup has the peak
        return peak * (step + 1) / (warmup + 1)
    if args.schedule == "constant":
        return peak
    progress = (step - warmup) / max(1, steps - warmup)  # from 0 to nearly 1
    height = 1 - progress if args.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return lowest + (peak - lowest) * height


def average_gradients_(params, world):
    """Replaces gradients by their means over ranks that each have the whole model."""
    work = [dist.all_reduce(p.grad, async_op=True) for p in params]  # all at once
    for handle, p in zip(work, params, strict=True):
        handle.wait()
        p.grad.div_(world)


def clip_gradients_(params, clip):
    """Scales gradients to an L2 norm of at most `clip` (0: leaves them) -> the norm before, on the device."""
    norm = nn.utils.get_total_norm(p.grad for p in params if p.grad is not None)
    if nf4.is_sharded(norm):
        norm = norm.full_tensor()  # over all ranks: until here it is a DTensor of each rank's own part
    if clip:
        nn.utils.clip_grads_with_norm_(params, clip, norm)
    return norm


class StepInBackward:
    """--optim_in_backward: updates each parameter as soon as its gradient is complete, and frees the gradient
    (LOMO, arXiv:2306.09782). So one gradient is alive, or with FSDP2 those of one unit."""

    def __init__(self, optimizer, params, nonfinite, ranks, fsdp2, replicas):
        self.optimizer = optimizer
        self.nonfinite = nonfinite
        self.ranks = ranks
        self.fsdp2 = fsdp2
        self.replicas = replicas
        self.norm_squared = torch.zeros_like(nonfinite.found_inf)  # over this rank's rows
        for p in params:
            p.register_post_accumulate_grad_hook(self.update)

    @torch.no_grad()
    def update(self, p):
        # torch 2.11 calls this hook before an offloaded gradient has arrived on the CPU
        if self.ranks.device.type != self.norm_squared.device.type:
            torch.cuda.current_stream().synchronize()
        if self.ranks.world > 1 and not self.fsdp2:
            average_gradients_([p], self.ranks.world)
        # dtype=float32 would copy a bf16 gradient
        norm = torch.linalg.vector_norm(nf4.local(p.grad).rows).float()
        self.norm_squared += norm.square()
        # Updates p alone, which alone has a gradient. After inf or nan this rank updates nothing any more.
        self.nonfinite.step_if_finite(self.optimizer, norm)
        p.grad = None

    def norm(self):
        """The gradient norm over all ranks, which here also hear of what was not finite on one of them."""
        norm_squared = self.norm_squared
        self.norm_squared = torch.zeros_like(norm_squared)
        if self.fsdp2:
            dist.all_reduce(norm_squared)
            dist.all_reduce(self.nonfinite.found_inf, dist.ReduceOp.MAX)
        return (norm_squared / self.replicas).sqrt()  # replicas hold the same gradients


# ---------------- the log, trackers, traces

def memory_gib(device):
    """Peaks of a GPU since the last call: (allocated, reserved). On a CPU: (resident memory, None)."""
    if device.type != "cuda":
        if sys.platform == "darwin":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30, None
        # in KiB; Linux's ru_maxrss would count the process that has started this one
        peak = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
        return int(peak[1]) / 2**20, None
    allocated = torch.cuda.max_memory_allocated(device)
    reserved = torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return allocated / 2**30, reserved / 2**30


def draw(path, curves):
    """Writes curves as SVG, without a package. curves: {(name, colour): [(step, loss)]}."""
    # one scale for all curves
    steps, losses = zip(*(point for curve in curves.values() for point in curve))
    first, last = min(steps), max(steps)
    low, high = min(losses), max(losses)
    # The axes go from (52, 14) down to (52, 356) and right to (708, 356), in a grey for black and for white.
    shapes = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400" '
        'font-family="sans-serif" font-size="12" fill="#848d97">',
        '<path d="M52 14V356H708" fill="none" stroke="#848d97"/>',
        f'<text x="46" y="356" text-anchor="end">{low:.2f}</text>',
        f'<text x="52" y="374" text-anchor="middle">step {first}</text>',
        f'<text x="46" y="22" text-anchor="end">{high:.2f}</text>',
        f'<text x="688" y="374" text-anchor="middle">step {last}</text>',
    ]
    for i, ((name, colour), curve) in enumerate(curves.items()):
        points = []
        for step, loss in curve:
            x = 52 + 656 * (step - first) / max(last - first, 1)  # a run may have one step
            y = 356 - 342 * (loss - low) / max(high - low, 1e-9)  # or equal losses; y grows downwards
            points.append(f"{x:.1f},{y:.1f}")
        line = " ".join(points)
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        # a line of one point would not be seen
        shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        place = f'x="702" y="{30 + 18 * i}" text-anchor="end"'
        shapes.append(f'<text {place} style="fill:{colour}">{name}</text>')
    data.replace_file(path, "\n".join([*shapes, "</svg>\n"]))


class Log:
    """metrics.jsonl, loss.svg and the lines on the console. In a row, loss and gradient norm are the step's
    own; times and speeds are means since the row before."""

    def __init__(self, out, state, loader, ranks, sinks):
        self.out = out
        self.state = state
        self.loader = loader
        self.ranks = ranks
        self.sinks = sinks  # see open_sinks()
        # if the GPU is not in the table, mfu is null in every row
        card = CARDS.get(card_of(ranks))
        self.peak_flops = 1e12 * card.tflops if card and card.tflops else None
        memory_gib(ranks.device)  # resets the peak: loading does not count
        self.start = time.perf_counter()
        self.start_step = state["step"]  # a resumed run begins later than at 0
        self.reset()

    def reset(self):
        self.mark = time.perf_counter()  # where the row begins
        self.waited_s = self.loader.waited_s  # for data, until then
        self.loss_sums = []  # of each step, of this rank
        self.n_terms = []  # of each step, of all ranks
        self.metrics = {}  # {name: sum} of the last step
        self.n_tokens = 0  # of all ranks
        self.flops = 0.0  # of this rank

    @contextlib.contextmanager
    def paused(self):
        started = time.perf_counter()
        yield
        self.mark += time.perf_counter() - started  # evaluations and saves are no time of a step

    def seconds(self):
        return time.perf_counter() - self.mark

    def count(self, sums, counts, flops):
        """Adds a step to the row. Sums and flops are this rank's, counts are those of all ranks."""
        # Tensors on the device: their numbers are fetched once a row, so that no step waits for the GPU.
        self.loss_sums.append(sums.pop("loss"))
        self.metrics = sums
        self.n_terms.append(counts.terms)
        self.n_tokens += counts.tokens
        self.flops += flops

    def means(self):
        """-> {"losses": of each step since the last row, a metric: its mean in the last step}. Collective."""
        # In float64 the sum over ranks is exact. In float32 it depends on a backend's order, and so on the
        # number of steps: a resumed run would log different losses.
        sums = torch.stack([*self.loss_sums, *self.metrics.values()]).double()
        if self.ranks.world > 1:
            dist.all_reduce(sums)
        n_terms = self.n_terms + self.n_terms[-1:] * len(self.metrics)  # metrics are of the last step
        means = [total / n for total, n in zip(sums.float(), n_terms, strict=True)]
        n_steps = len(self.loss_sums)
        return {"losses": torch.stack(means[:n_steps]), **dict(zip(self.metrics, means[n_steps:]))}

    def write(self, numbers):
        """Writes the row of this step: the numbers that main has fetched and what is known here."""
        seconds = self.seconds()
        losses = numbers["losses"]  # of each step since the last row, for loss.svg
        n_steps = len(losses)
        n_skipped = int(numbers.pop("skipped_steps"))
        step = self.state["step"]
        steps = self.state["steps"]
        mem_gib, mem_reserved_gib = memory_gib(self.ranks.device)  # peaks since the last row
        row = {
            "step": step,
            "epoch": step * self.state["rows_a_step"] / len(self.loader.rows),  # of the data, with a fraction
            "loss": losses[-1],
            **numbers,
            "tokens": self.state["tokens"],
            "tokens_per_s": self.n_tokens / seconds,
            "mfu": self.flops / seconds / self.peak_flops if self.peak_flops else None,
            "mem_gib": mem_gib,
            "mem_reserved_gib": mem_reserved_gib,
            "step_s": seconds / n_steps,
            "data_s": (self.loader.waited_s - self.waited_s) / n_steps,
        }
        if "loss_scale" in numbers:
            row["skipped_steps"] = n_skipped
        # with pauses: what is left has evaluations and saves as well
        left_s = (steps - step) * (time.perf_counter() - self.start) / (step - self.start_step)
        # 80 columns: what follows from the flags (lr) and from tok/s (mfu) stands in the row alone
        self.append(row, f"step {step:>{len(str(steps))}}/{steps}  loss {losses[-1]:.4f}  "
                         f"norm {numbers['grad_norm']:<5.3g}  {row['tokens_per_s']:,.0f} tok/s  "
                         f"{mem_gib:.2f} GiB  {timedelta(seconds=int(left_s))}", self.metrics)
        if n_skipped:
            self.ranks.say(f"step {step}: skipped {n_skipped} of the last {n_steps} steps: gradients "
                           f"overflowed; loss scale {numbers['loss_scale']:,.0f}")
        self.reset()

    def write_eval(self, evaluation):
        """Writes the row that evaluate() has made and enters it in `state`."""
        row = {"step": self.state["step"], **evaluation}
        n_terms = f"eval_{self.loader.term}"
        line = (f"step {row['step']}  eval loss {row['eval_loss']:.4f} over {row[n_terms]:,} "
                f"{self.loader.term}")
        best = self.state["best_eval"]
        if math.isfinite(row["eval_loss"]):
            # Saver keeps the checkpoint of this step; of two equal losses the earlier one counts
            best = min(best or row, row, key=lambda row: row["eval_loss"])
            self.state["best_eval"] = json.loads(data.json_of(best))  # its metrics may be nan
        else:
            data.note_once("the loss of an evaluation is not finite, so it is never the best: look at "
                           "--eval_data, or lower --lr")
        # an equal loss is no better one: --patience counts it
        self.state["evals_since_best"] = 0 if best is row else self.state["evals_since_best"] + 1
        if best:
            line += f", best {best['eval_loss']:.4f} at step {best['step']}"
        self.state["evaluated"] = row["step"]
        self.append(row, line, evaluation.keys() - {"eval_loss", n_terms})

    def append(self, row, line, metrics):
        """Writes a row. Prints `line`, and below it those numbers of the row that `metrics` names."""
        values = [f"{name} {row[name]:.4g}" for name in row if name in metrics]
        for i in range(0, len(values), 2):  # the four of --dpo would have more than 80 columns
            line += "\n  " + "  ".join(values[i : i + 2])
        self.ranks.say(line)  # on the console also where the file cannot be written
        if self.ranks.rank:
            return
        try:
            with open(self.out / "metrics.jsonl", "a") as file:
                # rows behind a resumed run's checkpoint, or half a row that a full disk has left
                if file.tell() > self.state["metrics_bytes"]:
                    file.truncate(self.state["metrics_bytes"])
                file.write(data.json_of(row) + "\n")  # a row a write: a kill leaves half of one at most
                self.state["metrics_bytes"] = file.tell()
        except OSError as error:  # a full disk does not end a training
            self.ranks.say(f"{self.out}/metrics.jsonl: not written: {error}")
        numbers = {name: value for name, value in row.items()
                   if name != "losses" and value is not None and math.isfinite(value)}
        call_sinks(self.sinks, lambda sink: sink.write(numbers))

    def draw(self):
        """Draws loss.svg on rank 0, with the loss of every step and of every evaluation."""
        if self.ranks.rank:
            return
        curves = {}
        for row in read_metrics(self.out, self.state["step"]):
            label = ("evaluation loss", "#e5534b") if "eval_loss" in row else ("training loss", "#2f81f7")
            losses = losses_of(row)  # up to that of the row's step
            curves.setdefault(label, []).extend(enumerate(losses, row["step"] - len(losses) + 1))
        if curves:
            with contextlib.suppress(OSError):  # a full disk: the numbers count, not the picture
                draw(self.out / "loss.svg", curves)

    def close(self):
        self.draw()
        n_steps = self.state["step"] - self.start_step
        losses = [row["losses"][-1] for row in read_metrics(self.out, self.state["step"]) if "losses" in row]
        if losses and losses[-1] > 10 * losses[0]:
            self.ranks.note(f"the loss rose from {losses[0]:.4g} to {losses[-1]:.4g}: lower --lr")
        self.ranks.say(f"{data.count_of(n_steps, 'steps')} in {time.perf_counter() - self.start:.0f} s")


def say_to_post(argv, args, log, predicted):
    """Prints one line about a run on a GPU, for a post. A wrapped one would be pasted in pieces."""
    rows = read_metrics(log.out, log.state["step"])
    rows = [row for row in rows if "losses" in row and row["step"] > log.start_step]
    if log.ranks.rank or not rows:  # a run that was resumed at its last step has none
        return
    allocated = max(row["mem_gib"] for row in rows)
    reserved = max(row["mem_reserved_gib"] for row in rows)
    # not the first one, which may have a compilation, nor one of a busy machine
    middle = sorted(rows, key=lambda row: row["step_s"])[len(rows) // 2]
    code = zlib.crc32(b"".join(Path(path).read_bytes() for path in CODE))
    log.ranks.say(f"to post: {log.ranks.world} x {log.ranks.device_name}, {args.model}, flags "
                  f"{brief(shlex.join(argv))} | predicted {predicted} | measured {allocated:.2f} GiB "
                  f"allocated, {reserved:.2f} reserved, {middle['step_s']:.2f} s a step, "
                  f"{middle['tokens_per_s']:,.0f} tok/s | torch {torch.__version__}, oomph {code:08x}")


FINISH_S = 30  # for a sink to send its last rows, at the end of a run


def open_sinks(args, out, resumed, ranks, exits):
    """-> [sinks: what gets the metrics beside metrics.jsonl], on rank 0. Collective."""
    # To add one, write a flag, a class like TensorBoard below, and a name here.
    sinks = []
    exits.push(functools.partial(close_sinks, sinks))
    step = step_of(resumed) if resumed else 0
    with ranks.agree():
        for flag, kind in (("tensorboard", TensorBoard), ("wandb", WandB)):
            if ranks.rank or not out or not getattr(args, flag):
                continue
            try:
                sinks.append(kind(out, step, settings_of(args, ranks.world)))  # which may ask for a login
            except Exception as error:  # each library raises classes of its own, also when it is imported
                message = f"--{flag}: {type(error).__name__}: {error}"
                if not resumed:  # the user is there, and can fix it; torchrun restarts runs at night
                    raise ValueError(f"{message}\nLeave --{flag} out: metrics.jsonl has all rows. With "
                                     "--wandb, WANDB_MODE=offline keeps them for `wandb sync`") from error
                data.say(f"{message}. The run continues without it; metrics.jsonl has all rows")
    return sinks


def call_sinks(sinks, call):
    """Drops a sink that fails, with one message: no network and no full disk ends a run."""
    for sink in list(sinks):  # a copy, because the list changes
        try:
            call(sink)
        except Exception as error:
            sinks.remove(sink)
            data.say(f"{type(sink).__name__} has failed and gets no more rows, metrics.jsonl has them: "
                     f"{type(error).__name__}: {error}")


def close_sinks(sinks, error, *_):
    """ExitStack calls this however the run ends, with the class of its error."""

    def close(sink):
        # another Ctrl-C gives up on a network that is slow, and does not change how the run has ended
        with contextlib.suppress(KeyboardInterrupt):
            ThreadPoolExecutor(1).submit(sink.close, error is not None).result(FINISH_S)

    call_sinks(sinks, close)


class TensorBoard:
    """Gets each row as {name: number}, with the step among the names."""

    def __init__(self, out, step, _):
        from torch.utils.tensorboard import SummaryWriter  # here, because tensorboard is an optional package

        # purge_step: TensorBoard hides what the run wrote after the checkpoint that it resumes from
        self.writer = SummaryWriter(out, purge_step=step + 1)

    def write(self, row):
        for name in row.keys() - {"step"}:
            self.writer.add_scalar(name, row[name], row["step"])
        self.writer.flush()  # or TensorBoard would show the row up to two minutes later

    def close(self, _):
        self.writer.close()


class WandB:
    """A run of Weights & Biases, which a resumed run in the same folder continues."""

    def __init__(self, out, _, settings):
        import wandb

        path = out / "wandb-id.txt"  # a resumed run finds one
        run_id = path.read_text().strip() if path.is_file() else None
        self.run = wandb.init(
            id=run_id, resume="allow", dir=os.getenv("WANDB_DIR", str(out)), config=settings)
        if self.run is None:
            raise RuntimeError("wandb.init() has started no run")
        data.replace_file(path, f"{self.run.id}\n")
        # Curves use the step in the row. wandb's own step must grow from row to row: the server would drop
        # steps that a resumed run repeats.
        self.run.define_metric("*", step_metric="step")

    def write(self, row):
        self.run.log(row)

    def close(self, has_failed):
        self.run.finish(exit_code=int(has_failed))


def tracer(profile, snapshot, out, ranks):
    """-> a profiler that writes what the third step did, or None without the flags and on ranks above 0."""
    if ranks.rank or not (profile or snapshot):
        return None
    if snapshot:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)

    def write(profiler):
        try:
            if profile:
                by_time = f"self_{ranks.device.type}_time_total"
                data.say(profiler.key_averages().table(sort_by=by_time, row_limit=12))
                profiler.export_chrome_trace(str(out / "trace.json.gz"))
            if snapshot:
                torch.cuda.memory._dump_snapshot(str(out / "memory.pickle"))
        except OSError as error:  # a full disk does not end a training
            data.say(f"{out}: profile not written: {error}")

    # The third step, in which everything is warm. repeat=1, or each third step of the run would be written.
    third = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    profiler = torch.profiler.profile(schedule=third, on_trace_ready=write)
    profiler.start()
    return profiler


# ---------------- what a start prints

def cgroup_limits(controller, file, *older_files):
    """Yields the numbers of a limit, for each control group that this process is in. file: as version 2 of
    cgroups calls it; older_files: what version 1 has in its place."""
    groups = {"/"}  # where a container sees its own, whatever path it has on the machine
    trees = {"": [file], controller: older_files}  # {folder of a hierarchy: files of each group in it}
    with contextlib.suppress(OSError, ValueError):  # no Linux
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                trees.setdefault(controllers, older_files)  # cpu,cpuacct for example
                groups |= {group, *map(str, Path(group).parents)}  # the limits of those above count, too
    for group, (tree, names) in itertools.product(groups, trees.items()):
        folder = Path(f"/sys/fs/cgroup/{tree}/{group}")
        with contextlib.suppress(OSError, ValueError):  # the file is not there, or it says "max"
            yield [int(word) for name in names for word in (folder / name).read_text().split()]


def allowed_cores():
    """How many CPU cores this process may use: by its affinity, and by the quota of a container or a job."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for quota_us, period_us in cgroup_limits("cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        if quota_us > 0:  # version 1 has -1 where there is none
            n_cores = min(n_cores, math.ceil(quota_us / period_us))  # half a core needs a thread, too
    return n_cores


def allowed_memory():
    """Bytes of host memory that this process may use: the machine's, or the limit of a container or a job."""
    n_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for (limit,) in cgroup_limits("memory", "memory.max", "memory.limit_in_bytes"):
        n_bytes = min(n_bytes, limit)  # version 1 has a huge number where there is no limit
    return n_bytes


def say_missing_gpu(warned):
    """Says that torch finds no GPU where one seems to be there. warned: what torch has said of it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1") or torch.version.hip:  # hidden on purpose, or AMD's
        return
    if visible or warned or shutil.which("nvidia-smi") or os.path.exists("/dev/nvidia0"):
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs alone"
        set_to = f" (CUDA_VISIBLE_DEVICES={visible})" if visible else ""
        why = "".join(f". {text}" for text in dict.fromkeys(warned))  # torch may say one thing twice
        data.note(f"training on the CPU: torch {torch.__version__} is built for {built_for} and finds no "
                  f"NVIDIA GPU{set_to}{why}")


def say_machine(ranks):
    """Prints what a run has found on rank 0's machine: cards, and the cores and memory that are allowed."""
    found = "no GPU"
    n_cards = torch.cuda.device_count() if ranks.device.type == "cuda" else 0
    if n_cards:
        cards = [torch.cuda.get_device_properties(i) for i in range(n_cards)]
        kinds = Counter(f"{card.name}, {card.total_memory / GIB:.1f} GiB" for card in cards)
        n_used = min(ranks.n_local, n_cards)
        found = f"{n_used} of {data.count_of(n_cards, 'GPUs')} ({'; '.join(kinds)})"
    ranks.say(data.wrapped(f"machine: {found}, {data.count_of(allowed_cores(), 'CPU cores')}, "
                           f"{allowed_memory() / GIB:.1f} GiB of host memory"))
    n_idle = n_cards - ranks.n_local
    if n_idle > 0:
        ranks.note(f"{n_idle} of {n_cards} GPUs {data.is_or_are(n_idle)} idle: torchrun "
                   f"--nproc_per_node {n_cards} train.py ... trains on all")


def say_need_without_gpu(args, ranks, revisions):
    """Says, before a large model is downloaded for a machine without a GPU, what it needs there."""
    args = argparse.Namespace(**vars(args))  # open_config() writes to it
    # What is wrong is said where the run itself comes to it, and a run goes on without its plan.
    with contextlib.suppress(Exception):
        config = open_config(args, ranks.world, ranks.device, True, revisions).config
        with torch.device("meta"):
            n_parameters = sum(p.numel() for p in lm.Transformer(config).parameters())
        if n_parameters > 1e9:
            run = RunSpec(args, config, ranks.world, args.seq_len)
            need = ranks.n_local * (planned_bytes(run, blocks_as_asked(run)) - OVERHEAD)
            ranks.note(f"without a GPU {n_parameters / 1e9:.1f} billion parameters train very slowly, and "
                       f"need about {need / GIB:.0f} GiB of this machine's {allowed_memory() / GIB:.0f} of "
                       "host memory")


def print_start(argv, run, model, new_ids, policy, ranks):
    """Prints what the flags, the plan and the device make of this run, and the flags as they were typed."""
    args = run.args
    c = run.config
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # counted in the plain model, because a byte of NF4 has two weights
    with torch.device("meta"):
        n_total = sum(p.numel() for p in lm.Transformer(c).parameters())
    trained_dtype = "bfloat16" if args.precision == "bf16" else "float32"
    other_dtype = str(model.compute_dtype).removeprefix("torch.")
    lines = [f"{args.model} ({c.model_type}): {n_total:,} parameters, {n_trained:,} trained, "
             f"{ranks.world} x {ranks.device_name}",
             f"  --precision {args.precision}: trained weights in {trained_dtype}, all else in {other_dtype}"]
    if args.precision == "fp16":
        why = "" if has_bf16(ranks.device) else "this device has no bf16; "
        lines.append(f"  fp16: {why}the loss is scaled, and a step whose gradients overflow is skipped")
    if args.lora:
        layers = "all-linear" if args.lora_targets == lm.targets_in(c) else ", ".join(args.lora_targets)
        alpha = f"alpha {args.lora_alpha:g}{', rsLoRA' if args.rslora else ''}"
        frozen = "; frozen blocks in NF4" if args.qlora else ""
        # what --model RUN/final stands for: its base is the model of the first line
        trained_on = f"{args.adapter} is trained on: " if args.adapter else ""
        lines.append(f"  {trained_on}adapters on {layers}: rank {args.lora_rank}, {alpha}{frozen}")
    if args.train_embeddings:
        lines.append(f"  embedding and head: trained in full, learning rate {args.embedding_lr:.3g}")
    if args.add_tokens:
        lines.append(f"  new tokens: ids {new_ids.start:,} to {new_ids.stop - 1:,}, in a vocabulary of "
                     f"{c.vocab_size:,}")
    has_gpu = ranks.device.type == "cuda"
    lines += [f"  {text}" for text in describe_blocks(run, policy, has_gpu)]
    if "activations" in args.offload and not has_gpu:
        lines.append("  --offload activations: nothing to do, a CPU has them in host memory")
    if args.compile:
        lines.append("  --compile: half a minute in the first step, cached for the next run")
    if argv:
        lines.append(f"  flags: {brief(shlex.join(argv), 600)}")
    if c.rope_ignored:
        lines.append(f"  note: config.json: {', '.join(c.rope_ignored)} of RoPE: ignored, as by transformers")
    if args.seq_len > c.n_positions:
        lines.append(f"  note: --seq_len is beyond the {c.n_positions} positions that the model is made for")
    if torch.__version__ >= (TESTED_TORCH[0], TESTED_TORCH[1] + 1):
        lines.append(f"  note: torch {torch.__version__} is newer than those that were tested")
    for line in lines:
        ranks.say(data.wrapped(line, indent=6))


def describe_blocks(run, policy, has_gpu=True):
    """-> [what the plan has decided about the blocks], also for --dry_run."""
    args = run.args
    n_layers = run.config.num_hidden_layers
    texts = []
    if args.activation_checkpointing:
        text = (f"--activation_checkpointing {args.activation_checkpointing}: the backward recomputes "
                f"{policy.count('recomputed')} of {n_layers} blocks")
        if policy.count("attention"):
            text += f"; {policy.count('attention')} of them keep the outputs of their attention"
        if policy.count("weights"):
            text += f"; {policy.count('weights')} keep their NF4 weights in 16 bits"
        texts.append(text)
    if offloads_frozen(args) and has_gpu:
        texts.append(f"--resident_blocks {args.resident_blocks}: frozen weights of "
                     f"{policy.count('resident')} of {n_layers} blocks stay on the GPU")
    if "linear_attention" in run.config.layer_types:
        texts.append(f"Gated DeltaNet mixes {policy.segment:,} tokens at a time")
    return texts


def brief(text, n=300):
    """The beginning of a long text: a list of tokens may have thousands of words."""
    return text if len(text) <= n else f"{text[:n]}... ({len(text):,} characters)"


# ---------------- samples and chats

class Sample:
    """The model's answers to --sample, with random numbers of their own: they change no bit of a run. Rank 0
    prints them, but all ranks must call the methods, because under FSDP2 each forward is a collective."""

    def __init__(self, args, opened, documents, resumed, ranks, stop):
        self.question = (args.sample or "").strip()  # `--sample ''` is how to have none
        self.max_new_tokens = args.max_new_tokens or 48
        self.temperature = args.temperature
        self.model = opened.model
        self.tokenizer = opened.tokenizer
        self.ranks = ranks
        self.stop = stop
        self.before = None  # its answer before the training, which a resumed run does not ask for
        if not self.question:
            return
        is_chat = any(file.report.n_chats for file in documents.files)  # if not, a text to go on with
        # now, because a template that refuses the question must not end a run after hours
        with ranks.agree():
            ask = args.sample
            if is_chat:
                question = {"role": "user", "content": args.sample}
                ask = [*system_message(self.tokenizer, args.system), question]
            elif args.system:
                raise ValueError("--system: --data has no chats, so --sample is a text: leave --system out")
            self.prompt = self.tokenizer.prompt(ask)
        ranks.say(data.wrapped(f"sample: {self.question}"))
        if not resumed:
            self.before = self.answer()

    def answer(self):
        faulthandler.cancel_dump_traceback_later()  # until rearm_watchdog(): a long answer is no hang
        tokens = []
        with evaluating(self.model):
            generated = lm.generate(self.model, self.prompt, self.max_new_tokens, self.tokenizer.stop_ids,
                                    self.ranks.device, self.temperature)
            for token in generated:
                tokens.append(token)
                # a signal does not wait for the end of an answer; all ranks must stop at the same token
                (stopped,) = self.ranks.largest(self.stop.number)
                if stopped:
                    break
        return textwrap.shorten(self.tokenizer.text_of(tokens), 400)  # one paragraph, of five lines

    def say_answer(self, log):
        """Prints the answer of this step. After the last step say_before_and_after() does that."""
        step = log.state["step"]
        if self.question and step < log.state["steps"]:
            with log.paused():
                answer = self.answer()
            self.ranks.say(data.wrapped(f"step {step}  sample: {answer}"))

    def say_before_and_after(self):
        if self.question:
            after = self.answer()
            before = "" if self.before is None else f"before: {self.before}\n"
            self.ranks.say(f"--- {self.question}\n{before}after:  {after}\n---")


def system_message(tokenizer, text):
    """-> [the message of --system], or []. ValueError if the template drops or refuses it, by trial."""
    if not text:
        return []
    trial = [{"role": "system", "content": text + data.MARK}, data.SHORT_QUESTION]
    rendered = ""
    with contextlib.suppress(ValueError):
        rendered, _ = tokenizer.render(trial, generation_prompt=True)
    if data.MARK not in rendered:
        raise ValueError(f"--system: {tokenizer.source} takes no system message: leave it out")
    return [{"role": "system", "content": text}]


def chat(args):
    """A conversation in the terminal, or an answer for each line of a pipe."""
    ranks = Ranks(want_group=False, timeout=args.timeout)
    opened = open_model(args, ranks)
    model = opened.model
    tokenizer = opened.tokenizer
    with ranks.agree():
        system = system_message(tokenizer, args.system)
    model.to_empty(device=ranks.device).tie_()  # to_empty() makes two tensors of a tied pair
    load_weights_(model, opened, args.seed, None, ranks)
    model.eval()  # without dropout; nothing here trains
    sys.stdin.reconfigure(errors="replace")  # what is not UTF-8 becomes a mark
    commands = ("/reset starts a new chat, /system TEXT one with a system message, /system one\n"
                "without; Ctrl-C stops an answer, /quit or Ctrl-D ends")
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # not every Python has it
            import readline  # noqa: F401  (gives input() the arrow keys and a history)
        data.say(f"talking with {subject_of(args)}\n{commands}")
    messages = system  # it grows by new lists alone, so that /reset finds `system` as it was
    while True:
        try:
            question = input("> " if is_terminal else "").strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            if not is_terminal:
                break
            question = "/help"  # perhaps Ctrl-C was meant for an answer that has just ended
        if question == "/quit":
            break
        given = re.fullmatch(r"/system(\s.*)?", question)
        try:
            if given:
                system = system_message(tokenizer, (given[1] or "").strip())
            if given or question == "/reset":
                messages = system
                if is_terminal:
                    data.say("a new chat")
            elif re.fullmatch(r"/\w*|/\?", question):
                data.say(f"\n{commands}")
            elif question:
                # The history grows by a question and its answer together, or, if either fails, by neither.
                asked = [*messages, {"role": "user", "content": question}]
                with contextlib.suppress(KeyboardInterrupt):
                    prompt = tokenizer.prompt(asked)
                    n_trained = opened.config.n_positions
                    if len(prompt) > n_trained:
                        data.say(f"the conversation has {len(prompt):,} tokens, and the model was trained on "
                                 f"{n_trained:,} positions: answers may make no sense; /reset starts a new "
                                 "chat", to_stderr=True)
                    tokens = lm.generate(model, prompt, args.max_new_tokens or 512, tokenizer.stop_ids,
                                         ranks.device, args.temperature)
                    said = print_answer(tokenizer, tokens)
                    messages = [*asked, {"role": "assistant", "content": said}]
                data.say()
        except ValueError as error:  # the conversation goes on without this question
            data.say(f"train.py: error: {error}", to_stderr=True)
            data.say()
    if is_terminal:
        data.say()  # the shell's prompt begins on a line of its own


def subject_of(args):
    # whoever gives an adapter alone has not typed the name of its base
    return f"{args.adapter} on {args.model}" if args.adapter else args.model


def print_answer(tokenizer, tokens):
    """Prints the text of the ids as they arrive -> the text, also if Ctrl-C ends it."""
    ids = []
    text = ""
    n_shown = 0
    with contextlib.suppress(KeyboardInterrupt):
        for token in tokens:
            ids.append(token)
            # all ids each time: the next byte may complete a character, where tokenizers' DecodeStream raises
            text = tokenizer.text_of(ids)
            complete = text.rstrip("\N{REPLACEMENT CHARACTER}")  # that may be the beginning of a character
            data.say(complete[n_shown:], end="")
            n_shown = max(n_shown, len(complete))
    data.say(text[n_shown:], end="")
    return text


# ---------------- numbers that are not finite

class NonFinite:
    """Keeps inf and nan out of the weights, and scales the loss of --precision fp16 (arXiv:1710.03740). It
    follows torch.amp.GradScaler, but stays on the device, so no step waits for the host.

        a step                      loss * scale -> backward -> gradients / scale -> norm, clip, optimizer
        a gradient has overflowed   no weight changes, and the scale is halved
        2,000 steps without that    the scale is doubled
    """

    # fp16 numbers end at 65,504, and below 6e-8 there is only 0. Many gradients of a mean loss are smaller.
    FIRST_SCALE = 2.0**16
    GROWTH_INTERVAL = 2000

    def __init__(self, device, is_fp16=False, world=1):
        # train_step() multiplies the loss by the ranks, which must not make it overflow
        self.world = world
        # 1 from the first gradient with inf or nan on: optimizers change no weight then. In fp16 that step is
        # skipped. In other precisions main fetches n_steps with the next row of the log, and ends the run.
        self.found_inf = torch.zeros((), device=device)
        self.n_steps = torch.zeros_like(self.found_inf)  # with found_inf at 1, since take_counts_()
        self.scale = None
        self.tensors = {}  # of a checkpoint: without them a resumed run would skip steps until the scale fits
        if is_fp16:
            self.scale = torch.full_like(self.found_inf, self.FIRST_SCALE)
            # steps since the scale has changed; int32 is what torch's kernel expects
            self.n_good = torch.zeros_like(self.found_inf, dtype=torch.int32)
            self.tensors = {"loss_scale": self.scale, "loss_scale.n_good": self.n_good}

    def scaled(self, loss):
        return loss if self.scale is None else loss * (self.scale / self.world)

    def unscale_(self, params):
        """Divides gradients by the scale, which changes no bit of them: it is a power of two."""
        if self.scale is not None:
            grads = nf4.rows_of(p.grad for p in params if p.grad is not None)
            torch._foreach_mul_(grads, self.world / self.scale)

    def step_if_finite(self, optimizer, norm):
        """optimizer.step(), unless this norm of gradients or an earlier one was inf or nan."""
        torch.maximum(self.found_inf, (~norm.isfinite()).float(), out=self.found_inf)
        # one that does not read found_inf would apply inf, so for it the host waits here
        if hasattr(optimizer, "found_inf") or not self.found_inf:
            optimizer.step()

    def end_step_(self):
        self.n_steps += self.found_inf
        if self.scale is not None:
            # GradScaler's own kernel. It counts the good steps, then doubles or halves, without the host.
            torch._amp_update_scale_(
                self.scale, self.n_good, self.found_inf, 2.0, 0.5, self.GROWTH_INTERVAL)
            self.found_inf.zero_()  # the next step has a new scale, and may update

    def take_counts_(self):
        """-> what a row of the log has of it, on the device: steps with inf or nan since the last call."""
        counts = {"skipped_steps": self.n_steps.clone()}
        if self.scale is not None:
            counts["loss_scale"] = self.scale
        self.n_steps.zero_()  # after the clone, in the order of the device's stream
        return counts


def bad_step_of(step, numbers):
    """-> the step that ends the run because it was not finite, or None. step: the newest of the row."""
    losses = numbers["losses"]
    n_skipped = int(numbers["skipped_steps"])
    if n_skipped and "loss_scale" not in numbers:
        return step - n_skipped + 1  # found_inf stays 1 from the bad step on: all later ones are counted, too
    # In fp16 a gradient that overflows ends no run, but a loss does: no scale makes the loss itself finite.
    for step_of_loss, loss in enumerate(losses, step - len(losses) + 1):
        if not math.isfinite(loss):
            return step_of_loss
    # GradScaler would halve the scale for ever. At 1 even gradients of the plain mean loss overflow.
    return step if numbers.get("loss_scale", 1) < 1 else None


def check_finite(tensors, step, ranks, host_pages=None):
    """Ends the run if any rank has inf or nan in a tensor of {name: tensor}. Collective."""
    wrong = []
    for name, tensor in tensors.items():
        # a streamed weight is found in host memory: other weights are in its slot
        local = [nf4.local(tensor).rows]
        if host_pages and tensor in host_pages:
            local = [page.view(tensor.dtype) for page in host_pages[tensor]]
        if not all(part.isfinite().all() for part in local):
            wrong.append(name)
    names = list(itertools.chain(*ranks.gather(wrong)))  # of all ranks
    if names:
        ranks.leave()  # all of them together, because all ranks have the same names and raise
        # LoRA's A and B have it in their names
        files = "--adapter" if ".lora_" in names[0] else "--model"
        cause = "lower --lr" if step else f"the files of {files} are damaged, or --precision fp16 too narrow"
        raise FloatingPointError(
            f"{names[0]} contains inf or nan after {step} steps, nothing is saved: {cause}")


def end_not_finite(trainer, loader, step):
    """Ends a run whose loss or gradient was inf or nan in `step`, and names its documents."""
    args = trainer.run.args
    ranks = trainer.ranks
    # If a weight itself is not finite, that is the cause, and no document is to blame.
    n_done = step - 1
    check_finite(dict(trainer.model.named_parameters()), n_done, ranks, trainer.host_pages)
    places = ranks.gather(", ".join(loader.places(n_done, args.grad_accum)[:8]))  # the loader counts from 0
    changed = "The weights and"
    if args.optim_in_backward:
        changed = "Gradients that came earlier in this step were applied. The"
    advice = f"Lower --lr, which is {args.lr:g}, raise --warmup"
    if args.precision == "fp16":
        advice = f"{FP16_ENDS}. If the loss still becomes inf or nan, lower --lr, which is {args.lr:g}"
    ranks.leave()
    raise FloatingPointError(
        f"step {step}: the loss or a gradient is inf or nan. {changed} checkpoints were not touched. "
        f"{advice}, or look at the documents of that step:"
        + "".join(f"\n  rank {rank}: {names}" for rank, names in enumerate(places)))


# ---------------- the end of a run, the result

def end_if_stopped(save, saver, state, stop, ranks):
    """Saves and ends the run, by SystemExit, if a signal has reached any rank. Collective."""
    (number,) = ranks.largest(stop.number)
    if not number:
        return
    save()  # does nothing if this step is saved
    number = signal.Signals(number)
    is_saved = saver.last_step == state["step"]
    continues = f"saved: the same command with --resume {shlex.quote(str(saver.out))} continues"
    outcome = continues if is_saved else "NOT saved, see above"
    ranks.say(f"stopped by {number.name} after step {state['step']} of {state['steps']}, {outcome}")
    ranks.leave()
    if not is_saved:
        raise SystemExit(1)
    # torchrun relays its own signal, and would take another exit code as a reason to start the run again
    raise SystemExit(0 if "TORCHELASTIC_RUN_ID" in os.environ else 128 + number)


RETRY_S = 60  # between two tries to write a result that is nowhere else


def write_result(export, end_if_signalled, saver, steps, ranks, timeout):
    """Calls export(), which raises the same OSError on all ranks if final/ cannot be written."""
    # If the last step is in no checkpoint, only this process has its weights: it waits for free space.
    for n_left in range(math.ceil(timeout / RETRY_S), -1, -1):
        try:
            return export()
        except OSError as error:
            data.remove(saver.out / "final.part")  # what could be written of it would keep the disk full
            if saver.safe_step == steps or n_left == 0:
                ranks.leave()
                raise SystemExit(str(error)) from error
            ranks.say(f"final/ was NOT written: {error}. Only this process has the weights of step {steps}. "
                      f"The run tries again every {RETRY_S} s, {n_left} times, or until a signal")
        for _ in range(RETRY_S):
            time.sleep(1)
            end_if_signalled()


def load_best_(tensors, state, saver, resumed, ranks):
    """--patience: loads the tensors of the best evaluation's checkpoint -> the step that final/ gets."""
    step = state["step"]
    best = state["best_eval"] or state
    saved = checkpoints(resumed.parent) if resumed else {}  # a run may go on in another folder
    folder = (saved | checkpoints(saver.out)).get(best["step"])
    # if the last step could not be saved, only this process has its weights
    if not folder or saver.last_step != step:
        ranks.note(f"final/ gets step {step}: step {best['step']} or {step} has no checkpoint")
        return step
    with ranks.agree():
        load_checkpoint(folder, read_state(folder, {}, ranks)["files"], tensors)
    ranks.say(f"final/ gets the weights of step {best['step']}")
    return best["step"]


def say_done(lora, merge, random_init, out, state, result_step, ranks):
    best = state["best_eval"]
    if best and best["step"] != result_step and best["step"] in checkpoints(out):
        checkpoint = checkpoints(out)[best["step"]]
        ranks.say(f"best evaluation loss {best['eval_loss']:.4f} at step {best['step']}; final/ has step "
                  f"{result_step}. To export the best:\n  {command_for('export', checkpoint)}")
    written = f"{out}/final and {out}/merged" if merge else f"{out}/final"
    next_step = f"Try it:\n  {command_for('chat --model', out / ('merged' if merge else 'final'))}"
    if lora and random_init and not merge:
        next_step = "--chat cannot load it: only --merge saves the random weights under it"
    ranks.say(f"done: {written}. {next_step}")


def command_for(flags, folder):
    return f"python train.py --{flags} {shlex.quote(str(folder))}"  # to be copied, whatever the name has


def export_checkpoint(args, exits):
    """--export: writes final/ of a checkpoint to --out or beside its run."""
    ranks = Ranks(want_group=False, timeout=args.timeout)
    with ranks.agree():
        checkpoint = find_checkpoint("export", args.export)
        run = checkpoint.parent
        state = read_state(checkpoint, {}, ranks)  # its settings are compared below, when the model is open
        # The state has a checksum, and args.json none: it only names what may have moved since.
        saved = state["settings"]
        # what the checkpoint was made with counts, and of other flags what was given here
        flags = {name: saved.get(f"--{name}", value) for name, value in vars(args).items()}
        for name in ("model", "adapter", "chat_template"):
            flags[name] = getattr(args, name) or from_args_json(run, name, str) or None
        if not flags["model"]:
            raise ValueError(f"--export {args.export}: no args.json beside it names its model: give --model")
        revisions = from_args_json(run, "revisions", dict)
    args = argparse.Namespace(**flags)
    opened = open_model(args, ranks, revisions)
    model = opened.model
    model.to_empty(device="cpu").tie_()  # frozen weights are never touched, so they take no memory
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    with ranks.agree():
        settings = fixed_settings(args, opened.config, None, opened.reader)
        compare_settings(f"--export {checkpoint}", saved, settings, ranks)
        load_checkpoint(checkpoint, state["files"], trained, weights_only=True)
        out = exits.enter_context(run_folder(args.out or f"{run}-step-{state['step']}", None))
        data.export(args, model, opened.reader, opened.files, opened.tokenizer, out, ranks)
    ranks.say(f"done: {out}/final has step {state['step']}. Try it:\n  "
              f"{command_for('chat --model', out / 'final')}")


def merge_result(args, exits):
    """--merge without --data: writes merged/ to the folder of the adapter's run, or to --out."""
    ranks = Ranks(want_group=False, timeout=args.timeout)
    opened = open_model(args, ranks)
    with ranks.agree():
        final = opened.adapter_reader.folder  # RUN/final, or any adapter
        # anybody else's folder gets no merged/ unless --out names it
        is_of_run = final.name == "final" and is_run(final.parent)
        out = exits.enter_context(run_folder(args.out, final if is_of_run else None))
        data.merge(args, opened.reader, opened.adapter_reader, opened.files, opened.tokenizer, out)
    ranks.say(f"done: {out}/merged (no training, because no --data was given). Try it:\n  "
              f"{command_for('chat --model', out / 'merged')}")


# ---------------- checkpoints

# Each rank writes its own rows of what training changes (trained weights, optimizer state) to one safetensors
# file: nothing is gathered, and no pickle could execute code. A key is "name:number of the first row", so any
# number of ranks finds its rows. Rank 0 adds trainer_state.json: main's state, the size and checksum of every
# file, and a checksum of itself.
#
# The files are written to checkpoint-<step>.part/ and synced, and one rename commits them. A process that is
# killed at any byte leaves a complete checkpoint or a .part, which the next process removes.

STATE = "trainer_state.json"  # a folder without it is not a checkpoint
OURS = {"written_by": "oomph"}  # in args.json: a folder without it is not a run's
REMOVE = "remove this checkpoint to continue from an older one"
STATE_KEYS = {"step", "steps", "tokens", "rows_a_step", "evaluated", "best_eval", "eval_data",
              "metrics_bytes", "settings", "files"}


def step_of(checkpoint):
    """-> the step in the name of a checkpoint's folder, or None if it has another name."""
    step = re.fullmatch("checkpoint-([0-9]{1,12})", checkpoint.name)
    return int(step[1]) if step else None


def checkpoints(run):
    """-> {step: folder} of the complete checkpoints in a run's folder."""
    folders = [folder for folder in Path(run).glob("checkpoint-*") if (folder / STATE).is_file()]
    return {step_of(folder): folder for folder in folders if step_of(folder) is not None}


def newest_checkpoint(run):
    found = checkpoints(run)
    return found[max(found)] if found else None


def checkpoint_to_resume(out, resume):
    """-> the checkpoint to continue from, or None to start at step 0."""
    if resume is None:
        return None
    if resume == "auto":  # --resume without a value
        runs = [Path(out)] if out else sorted(Path("out").glob("20*-*"), reverse=True)  # names are dates
        # an export, a merge, or a start that was killed before its first save: the hours are in an older run
        passed_over = list(itertools.takewhile(lambda run: not newest_checkpoint(run), runs))
        if len(passed_over) == len(runs):
            data.note(f"no checkpoint in {out or 'out/'}: starting anew")
            return None
        if passed_over:
            names = data.listing(map(str, passed_over))
            data.note(f"no checkpoint in {names}: --resume takes an older run")
        resume = runs[len(passed_over)]
    return find_checkpoint("resume", resume)


def find_checkpoint(flag, name):
    """The folder that --resume or --export names -> the checkpoint: this folder, or the newest in it."""
    given = Path(name)
    found = given if (given / STATE).is_file() else newest_checkpoint(given)
    if not found:
        what = f"no {STATE} and no complete checkpoint-<step>/ in it"
        if not given.is_dir():
            what = "a file, and a checkpoint is a folder" if given.exists() else "no such folder"
        # a run's final/, a step that was removed, a file in a checkpoint
        others = [str(folder) for above in given.parents[:2] for folder in checkpoints(above).values()]
        there = f"; there is {data.listing(others)}" if others else ""
        raise ValueError(f"--{flag} {name}: {what}{there}")
    # "." and a link have another name, by which step and run would not be known
    if step_of(found) is None or found.parent.name in ("", ".."):
        found = found.resolve()
    if not is_ours(found):
        what = data.foreign_format(os.listdir(found)) or f"--model {found} begins with its weights"
        raise ValueError(f"--{flag} {found}: a checkpoint of another trainer: {what}")
    return found


def is_ours(checkpoint):
    """Whether a run of this program has written a checkpoint's state. True if the state is damaged."""
    with contextlib.suppress(ValueError):
        state = data.read_json(checkpoint / STATE)
        return not state or "checksum" in state
    return True


@contextlib.contextmanager
def run_folder(out, start):
    """Yields a run's folder, locked for this process: --out, that of `start`, or a new one. start: the
    checkpoint or the final/ that this process goes on from, or None."""
    named = out or (start and start.parent)
    folder = Path(named) if named else new_folder()
    is_new = not named or not folder.exists()  # a folder that the user has made stays
    check_folder(folder, start)  # before anything is written to somebody's files
    with lock_folder(folder):
        try:
            for part in folder.glob("*.part"):  # left by a process that was killed during a save
                data.remove(part)
            rehearse_save(folder)
            yield folder
        finally:
            # a folder that this start has made goes, too, if the run has not got to a step
            with contextlib.suppress(OSError):
                names = {*os.listdir(folder)}
                if is_new and names <= {"lock", "args.json", "args.json.part"}:
                    for name in names:
                        (folder / name).unlink()
                    folder.rmdir()


def rehearse_save(out):
    """Does in a run's folder, with a few bytes, all that a save does there. What the disk refuses (a mounted
    bucket renames no folder) ends the run now, and not when there is something to lose."""
    part = out / "rehearsal.part"
    complete = out / "rehearsed.part"
    try:
        if not is_run(out):
            data.write_json(out / "args.json", OURS)  # until all flags have their final value
        data.make_folder(part)
        write_rows(part / "rows.safetensors", {"zeros:0": torch.zeros(2)})
        for _ in range(2):  # the second time in place of a file, as note_evaluation() does
            data.write_json(part / STATE, OURS)
        data.put_in_place(part, complete)
        data.remove_complete(complete)
        left = [path.name for path in out.glob("rehears*")]
        if left:
            raise OSError(f"{out}/{left[0]}: folder not removed")
    except OSError as error:
        raise OSError(f"--out {out}: a save there fails: give a folder on another disk: {error}") from error
    finally:
        data.remove(part)
        data.remove(complete)


def take_folder(out, resume, inspect, ranks, exits):
    """-> (the run's locked folder, the checkpoint to resume or None, its commits on the Hub). Collective."""
    found = None
    with ranks.agree():
        if ranks.rank == 0:
            checkpoint = checkpoint_to_resume(out, resume)
            folder = None
            token = None
            if not inspect:
                folder = exits.enter_context(run_folder(out, checkpoint))
                token = folder / f"{os.urandom(8).hex()}.part"  # a new name, which no NFS has cached
                exits.callback(data.remove, token)
                data.make_folder(token)
            # a resumed run reads the commits that it has begun with, not the newest ones
            revisions = from_args_json(checkpoint.parent, "revisions", dict) if checkpoint else {}
            found = folder, token, checkpoint, revisions
    folder, token, checkpoint, revisions = ranks.gather(found)[0]
    with ranks.agree():
        if token and not appears(token):  # compare_ranks() looks for the checkpoint
            raise ValueError(f"--out {folder}: {ranks.names[0]} has {token.name} there, and it is not to be "
                             "seen here: all ranks have to share the disk of this folder")
        if token:
            with data.writing(f"--out {folder}", "file"):
                (token / f"rank-{ranks.rank}").touch()
    if token and ranks.rank == 0:
        data.remove(token)
    return folder, checkpoint, revisions


def appears(path, n_bytes=None):
    """Whether a file of this size is there, after ten seconds at most: NFS shows late what others wrote."""
    for _ in range(100):
        if path.exists() and n_bytes in (None, path.stat().st_size):
            return True
        time.sleep(0.1)
    return False


def from_args_json(run, name, kind):
    """-> a value in args.json of a run, an empty one if it is not there. kind: str, or dict for texts."""
    value = data.read_json(run / "args.json", optional=True).get(name)
    value = kind() if value is None else value
    parts = value.values() if isinstance(value, dict) else ()
    # args.json has no checksum, so an editor may have changed it
    if not isinstance(value, kind) or not all(isinstance(part, str) for part in parts):
        expected = "a text" if kind is str else "texts by their names"
        raise ValueError(f"{run / 'args.json'}: {name} is {str(value)[:100]}: expected {expected}")
    return value


def new_folder():
    """Makes out/<date-time>. Two starts in one second get two folders."""
    name = datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        path = Path("out") / (name if number == 1 else f"{name}-{number}")
        with data.writing(f"--out {path}", "folder"), contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path


def is_run(folder):
    """Whether a run of this program has made the folder. Other programs write an args.json, too."""
    with contextlib.suppress(OSError, ValueError):
        return data.read_json(folder / "args.json").items() >= OURS.items()
    return False


def check_folder(folder, start):
    """ValueError if the folder contains what a process that goes on from `start` must not overwrite."""
    names = set()
    with (data.writing(f"--out {folder}", "folder", "read"),
          contextlib.suppress(FileNotFoundError, NotADirectoryError)):  # perhaps it has just been removed
        names = {*os.listdir(folder)}
    if names <= {"lock", "args.json.part"}:  # nothing, or what a start that was killed at once has left
        return
    if not is_run(folder):
        raise ValueError(f"--out {folder}: contains files, and no args.json of a run that has made them "
                         "(older versions' has no mark): give a new or an empty folder, also beside --resume")
    for name in names:
        # whoever opens a pipe waits for its other end, for ever
        if not (name.endswith(".part") or (folder / name).is_dir()):
            data.check_is_file(folder / name)
    newest = newest_checkpoint(folder)
    may_go_on_from = [path for path in (newest, folder / "final") if path and path.exists()]
    if start and any(path.samefile(start) for path in may_go_on_from):
        return
    if newest or names & {"final", "merged"}:
        how = "no checkpoint of it is there to be continued:"
        if newest:
            how = f"--resume continues its newest checkpoint, {newest.name}, or"
        raise ValueError(f"--out {folder}: already contains a run, which is never overwritten: {how} give "
                         "another folder")


def lock_folder(out):
    """Makes the run's folder and locks it for this process for as long as the returned file is open."""
    # of such a link mkdir() would say that the file exists
    for path in (out, *out.parents):
        if path.is_symlink() and not path.exists():
            raise ValueError(f"--out {out}: {path} is a link to {os.readlink(path)}, which does not exist")
    with data.writing(f"--out {out}", "folder, or the file lock in it,"):
        out.mkdir(parents=True, exist_ok=True)
        # "a" empties nothing if this is a link, "+" refuses a pipe, where others wait for its reader
        lock = open(out / "lock", "a+")  # noqa: SIM115
    try:
        # The kernel unlocks the file when the process ends, even by SIGKILL: no lock is left behind.
        with data.where_supported(f"--out {out}: its disk has no file locks: let no second job write there"):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # the end of another start may have removed the file since: then it keeps nobody out
        is_locked = os.path.samefile(out / "lock", lock.fileno())
    except (BlockingIOError, FileNotFoundError):
        is_locked = False
    except OSError as error:
        raise OSError(f"--out {out}: the file lock in it was not taken: {error.strerror}") from error
    if not is_locked:
        raise ValueError(f"--out {out}: another process writes to it: wait for it, or stop it")
    return lock


def settings_of(args, world):
    modules = torch, safetensors, tokenizers, data.np, data.jinja2
    versions = {module.__name__: module.__version__ for module in modules}
    return vars(args) | {"world": world, "python": sys.version, **versions}


def losses_of(row):
    """-> the losses in a row of metrics.jsonl: of its evaluation, or of the steps that it covers."""
    return [row["eval_loss"]] if "eval_loss" in row else row["losses"]


def read_metrics(out, last_step):
    """-> the rows of metrics.jsonl up to a step. Lines that a kill or an editor has damaged are left out."""
    path = out / "metrics.jsonl"
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError, LookupError, TypeError, OverflowError, RecursionError):
            row = json.loads(line)
            # the steps behind the checkpoint are computed, and logged, once more
            if row["step"] in range(last_step + 1) and math.isfinite(sum(losses_of(row))):
                rows.append(row)
    return rows


def read_state(folder, settings, ranks):
    """-> the state in trainer_state.json. ValueError names a damaged file, or settings that differ."""
    state = data.read_json(folder / STATE)
    if state != data.with_checksum(state):
        raise ValueError(f"{folder / STATE}: damaged; {REMOVE}")
    missing = STATE_KEYS - state.keys()
    if missing:
        raise ValueError(f"{folder / STATE}: has no {data.listing(missing)}: another version of oomph "
                         "wrote it: continue with that one, or start a new run with another --out")
    if folder.name != f"checkpoint-{state['step']}":
        raise ValueError(f"{folder / STATE}: of step {state['step']}, in the folder of another one: name the "
                         f"folder checkpoint-{state['step']}")
    # Every byte is read, so the ranks divide the files among them. The caller is inside Ranks.agree().
    for name in list(state["files"])[ranks.rank :: ranks.world]:
        path = folder / name
        if not path.is_file() or [path.stat().st_size, data.crc_of(path)] != state["files"][name]:
            raise ValueError(f"{path}: missing, or damaged since it was written; {REMOVE}")
    compare_settings(f"--resume {folder}", state["settings"], settings, ranks)
    best = state["best_eval"]
    if best and not math.isfinite(best["eval_loss"]):  # older versions took nan for the best
        state["best_eval"] = None
    return state


def compare_settings(checkpoint, saved, settings, ranks):
    """ValueError names the settings that differ from those that a checkpoint was made with."""
    # What a version without a flag computed is what the flag's default does.
    defaults = {f"--{flag.dest}": flag.default for flag in flags_with("fixed")}
    saved = defaults | saved
    changed = [f"{name} was {brief(str(saved[name]))}, is {brief(str(value))}"
               for name, value in settings.items() if saved.get(name, value) != value]
    # A version with a flag that this one does not have may have computed something else.
    changed += [f"{name} was {brief(str(value))}, which this version does not have"
                for name, value in saved.items() if name.startswith("--") and name not in defaults and value]
    if changed:
        raise ValueError(f"{checkpoint}: {'; '.join(changed)}: give what the checkpoint was made with "
                         "(flags, data, version of oomph), or start a new run with another --out")
    unknown = settings.keys() - saved.keys()
    if unknown:
        ranks.note(f"{checkpoint} is of an older version and lacks {data.listing(unknown)}: whether these "
                   "were the same is not compared")


def training_tensors(model, optimizer, nonfinite):
    lm.reshard_(model)  # after an evaluation FSDP2 may still have whole weights where the shards belong
    tensors = dict(nonfinite.tensors)
    for name, p in model.named_parameters():
        if p.requires_grad:
            tensors[name] = p.detach()
            for key, value in optimizer.state[p].items():
                tensors[f"{name}.{key}"] = value
    return tensors


def local_rows(tensor):
    """-> this rank's rows of a tensor, and the number of the first. A scalar is one row."""
    rows, first = nf4.local(tensor)
    return torch.atleast_1d(rows), first


def rows_of_rank(tensors, rank):
    """-> {"name:first row": rows} that this rank writes."""
    rows_of = {}
    for name, tensor in tensors.items():
        # Of ranks that have the same rows the first one writes: of all ranks, or of the replicas of a shard.
        is_writer = rank == 0
        if nf4.is_sharded(tensor):
            mesh = tensor.device_mesh  # [shards], or [replicas, shards]
            is_writer = mesh.ndim == 1 or mesh.get_local_rank(0) == 0
        rows, first = local_rows(tensor)
        if is_writer and rows.numel():  # a small tensor leaves some ranks without a row
            rows_of[f"{name}:{first}"] = rows
    return rows_of


def write_rows(path, rows_of):
    """Writes and syncs the file of a rank -> [its size, its checksum]."""
    # Wide numbers come first, so that each tensor begins at a multiple of its element size.
    ordered = dict(sorted(rows_of.items(), key=lambda item: -item[1].dtype.itemsize))
    # a generator, so one tensor at a time is on the host
    tensors = ((name, rows.cpu()) for name, rows in ordered.items())
    return data.write_safetensors(path, data.layout_of(ordered), tensors, zlib.crc32)


def load_checkpoint(folder, files, tensors, weights_only=False):
    """Fills this rank's rows of `tensors` from files of any number of ranks. weights_only: and no others."""
    # Every rank looks at all keys, so all find the same rows missing and none trains on alone.
    n_missing = {name: math.prod(tensor.shape[:1]) for name, tensor in tensors.items()}  # rows
    for file in sorted(files):
        try:
            with safe_open(folder / file, framework="pt") as reader:
                for key in reader.keys():  # noqa: SIM118
                    name, _, first = key.rpartition(":")
                    if weights_only and name not in tensors:
                        continue
                    if name not in tensors or not first.isdecimal():
                        raise ValueError(f"{key}: this run trains no such tensor")
                    saved = reader.get_slice(key)
                    copy_rows_(key, tensors[name], saved, int(first))
                    n_missing[name] -= saved.get_shape()[0]
        except (ValueError, safetensors.SafetensorError) as error:
            raise ValueError(f"{folder / file}: {error}; {REMOVE}") from error
    wrong = [name for name, n_rows in n_missing.items() if n_rows != 0]
    if wrong:
        raise ValueError(f"{folder}: rows are missing or stored twice: {data.listing(wrong)}; {REMOVE}")


def copy_rows_(key, tensor, saved, first_saved):
    """Copies this rank's part of saved rows, a slice of an open file."""
    # copy_() would cast and repeat silently
    shape = list(tensor.shape) or [1]  # a scalar is saved as one row
    dtype = data.DTYPE_NAMES[tensor.dtype]
    saved_shape = saved.get_shape()
    stop_saved = first_saved + saved_shape[0]  # behind the last row
    same_kind = saved.get_dtype() == dtype and len(saved_shape) == len(shape)
    # all but the number of rows must be the same
    if not same_kind or saved_shape[1:] != shape[1:] or stop_saved > shape[0]:
        raise ValueError(f"{key}: {saved.get_dtype()} {saved_shape}, but this run has {dtype} {shape}")
    rows, first = local_rows(tensor)
    # another number of ranks cuts the rows elsewhere, so only a part of the saved rows may be this rank's
    begin = max(first, first_saved)
    end = min(first + len(rows), stop_saved)
    if begin < end:
        rows[begin - first : end - first].copy_(saved[begin - first_saved : end - first_saved])


class Saver:
    """Writes the checkpoints of a run and removes old ones. A full disk does not end the run."""

    def __init__(self, out, keep, ranks, state):
        self.out = out
        self.keep = keep
        self.ranks = ranks
        self.last_step = max(checkpoints(out), default=None)  # of the newest checkpoint in this folder
        # Of the newest checkpoint. At first the step that this process begins with, of another run perhaps.
        self.safe_step = state["step"]
        if ranks.rank == 0:
            self.remove_old(state)  # a kill may have come between the last save and this

    def save(self, tensors, state):
        """Saves what training_tensors() returns, and `state`. All ranks must call it."""
        faulthandler.cancel_dump_traceback_later()  # until rearm_watchdog(): a slow disk is no hang
        step = state["step"]
        if step == self.last_step:
            return  # a signal may come right after a save, or stop a run that has just resumed
        # A run could not continue from nan, and in time such checkpoints would replace all good ones.
        check_finite(tensors, step, self.ranks)
        started = time.perf_counter()
        name = f"checkpoint-{step}"
        part = self.out / f"{name}.part"  # gets its name when it is complete
        file = f"rank-{self.ranks.rank:05}-of-{self.ranks.world:05}.safetensors"
        rows_of = rows_of_rank(tensors, self.ranks.rank)
        files = {}  # {name: [size, checksum]}
        try:
            with self.ranks.agree(end_run=False):
                data.make_folder(part)  # another rank may be first
                if rows_of:  # a second replica has none
                    files[file] = write_rows(part / file, rows_of)
            for others in self.ranks.gather(files):
                files |= others
            with self.ranks.agree(end_run=False):
                if self.ranks.rank == 0:
                    for file, (size, _) in files.items():
                        if not appears(part / file, size):
                            raise OSError(f"{part / file}: a rank has written it, and rank 0 sees none")
                    # The state is last: without it the folder is no checkpoint, whatever its name is.
                    data.write_json(part / STATE, data.with_checksum(state | {"files": files}))
                    data.put_in_place(part, self.out / name)
                    self.remove_old(state)
        except OSError as error:
            data.remove(part)  # half of a checkpoint would keep a full disk full
            older = "Older checkpoints are intact" if checkpoints(self.out) else "There is no older one"
            self.ranks.say(f"{name} was NOT written: {error}. {older}; steps that are not saved yet: "
                           f"{step - self.safe_step:,}")
            return
        self.last_step = step  # a signal in this step must not save it again
        self.safe_step = step
        gib = sum(size for size, _ in files.values()) / GIB
        self.ranks.say(f"{name}: {gib:.3f} GiB written in {time.perf_counter() - started:.2f} s")

    def note_evaluation(self, state):
        """Adds the evaluation of a step to its checkpoint, so that a resumed run does not repeat it."""
        if self.ranks.rank or state["step"] != self.last_step:
            return
        path = self.out / f"checkpoint-{state['step']}" / STATE
        try:
            state = state | {"files": data.read_json(path)["files"]}
            data.write_json(path, data.with_checksum(state))
            self.remove_old(state)
        except (OSError, ValueError, KeyError) as error:  # the folder may have been removed, the disk be full
            self.ranks.say(f"{path}: the evaluation was not noted: {error}. A resumed run repeats it")

    def remove_old(self, state):
        """Removes all checkpoints except the newest `keep` and the one with the best evaluation."""
        best = (state["best_eval"] or {}).get("step")
        saved = checkpoints(self.out)
        for step in sorted(saved)[: -self.keep]:  # --keep is at least 1, and [:-0] would be empty
            if step != best:
                with contextlib.suppress(OSError):  # the next save tries again
                    data.remove_complete(saved[step])


def say_space(args, trainer, reader, saver):
    """Says if a checkpoint and the result need more than the disk has free. Some disks report nonsense."""
    tensors = training_tensors(trainer.model, trainer.optimizer, trainer.nonfinite).values()  # of all ranks
    needed = sum(t.numel() * t.element_size() for t in tensors)
    if args.merge or not args.lora:
        layout = data.layout_of_result(reader, trainer.run.config).values()
        needed += sum(math.prod(stored.shape) * stored.dtype.itemsize for stored in layout)
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(saver.out).free
        if needed > free:
            saver.ranks.note(f"{saver.out}: its disk has {free / GIB:.2f} GiB free, and a checkpoint and the "
                             f"result need {needed / GIB:.2f}")


def fixed_settings(args, config, loader, reader):
    """-> {name: value} of all that changes the mathematics of a run. read_state() refuses other values."""
    # without the family, which follows from model_type: one more trait would refuse all older checkpoints
    settings = {f"config.json's {key}": value for key, value in dataclasses.asdict(config).items()
                if key != "family"}
    settings |= {f"--{flag.dest}": getattr(args, flag.dest) for flag in flags_with("fixed")}
    if loader:  # --export has no data
        settings["the share of --data that --eval_data holds out"] = data.share_of(args.eval_data)
        # "of all": older versions had another checksum, by a name without "all"
        settings["the checksum of all --data's tokens and masks"] = loader.documents.checksum
    if args.lora:
        settings["the checksum of --model's frozen weights"] = reader.crc()
    if args.qlora:
        settings["the format of NF4"] = nf4.FORMATS[4]  # adapters make up for the errors of their weights
    if args.nf5:
        settings["the format of NF5"] = nf4.FORMATS[5]
    # As a checkpoint returns them: JSON makes lists of tuples, and text of what it cannot write.
    return json.loads(data.json_of(settings, default=str))


# ---------------- flags

def number(value_type, zero_too=False, below=1e12, words=()):
    """-> an argparse type: a number above 0 (zero_too: or 0) and below `below`, or one of these words."""
    kind = "a whole number" if value_type is int else "a number"
    expected = f"{'0 or ' if zero_too else ''}{kind} above 0, below {below:g}"
    if words:
        expected += f", {' or '.join(words)}"

    def parse(text):
        if text in words:
            return text
        with contextlib.suppress(ValueError):
            value = value_type(text)
            # nan fails every comparison, inf the second one
            if 0 < value < below or (zero_too and value == 0):
                return value
        raise argparse.ArgumentTypeError(f"{text}: expected {expected}")

    return parse


def column(text):
    """The type of --columns: COLUMN=KEY -> (column, key), or an error that lists the keys."""
    name, _, key = text.rpartition("=")  # the last one: a column may have any name
    if name and key in data.KEYS:
        return name, key
    keys = ", ".join(data.KEYS)
    raise argparse.ArgumentTypeError(f"{text}: expected COLUMN=KEY with one of the keys {keys}")


HUB_PAGE = re.compile(r"(?:https?://(?:www\.)?(?:huggingface|hf)\.co/|hf://)(?:datasets/|models/)?"
                      r"([\w.-]+/[\w.-]+)(?:/tree/main|/viewer)?/?(?:[?#].*)?")


def path(text):
    """The type of a flag that names a file, a folder or what the Hub has, also by the address of its page."""
    page = HUB_PAGE.fullmatch(text)
    if page:
        return page[1]
    # s3://b/run, rclone's and scp's host:run/a, C:\\run: mkdir would make a folder of this name
    if re.match(r"[^/\\]+:.*[/\\]", text) and not os.path.exists(text.split("/")[0]):
        raise argparse.ArgumentTypeError(f"{text}: a URL, or on another machine: give a path on this one")
    if text.lower() in ("none", "null"):  # what a script gives whose variable is not set
        raise argparse.ArgumentTypeError(f"{text}: expected a path, ./{text} if that is meant")
    return os.path.expanduser(text)  # a shell leaves the ~ of --out=~/run as it is


WHOLE = number(int)
WHOLE_OR_0 = number(int, zero_too=True)
AMOUNT = number(float)
AMOUNT_OR_0 = number(float, zero_too=True)
BLOCKS = number(int, zero_too=True, words=("all", "auto"))
SECONDS = number(float, below=1e8)  # three years: timers and clocks end at nine digits more

DEMO_DATA = [str(data.TINY / "docs.jsonl")]
OF_GROUP = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
# why --optim_in_backward does not go with --precision fp16
WHOLE_STEPS = ("in fp16 a step whose gradients overflow is skipped as a whole, and here a part of its "
               "updates is done by then: leave it out, or use --precision fp32")

# Which flags a command reads. One that is typed and not read is refused: a run of hours that does something
# else than the words of its command is worse than an error.
#
# A mode, named by the flag that asks for it: the other flags that it reads. All other commands train.
MODES = {
    "export": {"model", "adapter", "chat_template", "out"},
    "chat": {"model", "adapter", "precision", "qlora", "nf5", "chat_template", "template_args", "temperature",
             "max_new_tokens", "system"},
    # with an adapter and without --data; else it is a part of a training run
    "merge": {"model", "adapter", "chat_template", "template_args", "out"},
    # They are added to the command of a training run as it is, so they read all flags but the other modes.
    "dry_run": None,
    "inspect": None,
}
# What a flag needs to be read, where that is not one other flag: as its error says it, and whether it is met.
NEEDS = {
    "--lora or --qlora: full fine-tuning already trains the embeddings": lambda args: args.lora,
    "--offload params and --lora or --qlora: it is about frozen weights in host memory":
        lambda args: offloads_frozen(args),
    "--optim adamw and no --stochastic_rounding":
        lambda args: args.optim == "adamw" and not args.stochastic_rounding,
    "--precision bf16": lambda args: args.precision == "bf16",
    "--chat or --sample": lambda args: args.chat or sample_of(args),
    "--schedule cosine or linear": lambda args: args.schedule != "constant",
    "--train_embeddings, or an --adapter with an embedding":
        lambda args: args.train_embeddings or args.adapter,
    "a GPU": lambda args: args.dry_run or torch.cuda.is_available(),
}
# What may stand beside a flag, besides what argparse takes:
#     fixed       it changes the mathematics: a resumed run must have the same, see fixed_settings()
#     everyday    -h shows it; --help_all shows every flag
#     needs       the flag, or the key of NEEDS, without which it is not read; --qlora and --adapter stand for
#                 --lora, too
#     also        its names in TRL, axolotl, LLaMA-Factory, torchtune, litgpt and Unsloth
MARKS = "fixed", "everyday", "needs", "also"
# What is said to others' names for which there is no flag, or another one than it seems
ANSWERS = {
    "bf16 bfloat16 dtype torch_dtype mixed_precision":
        "bf16 compute is the default: leave it out; --precision bf16 would also train in bf16",
    "fp16 float16": "fp16 compute is the default on a GPU without bf16: leave it out, or --precision fp16",
    "fp32 float32": "did you mean --precision fp32?",
    "tf32": "TF32 is used except with --precision fp32: leave it out",
    "load_in_8bit load_8bit": "frozen weights have 16 bits, or 4 with --qlora",
    "no_lora": "full fine-tuning is the default: leave out --lora, --qlora and --adapter",
    "betas adam_beta1 adam_beta2": "AdamW has betas of 0.9 and 0.999, and no flag changes them",
    "early_stopping_patience early_stopping load_best_model_at_end metric_for_best_model":
        "did you mean --patience? Without it, the best checkpoint is kept: --export makes a model of it",
    "eval_strategy evaluation_strategy save_strategy": "--eval_every N and --save_every N count steps",
    "attn_implementation flash_attn flash_attention flash_attention_2":
        "attention takes the fastest kernel by itself",
    "overwrite_output_dir": "a run is never overwritten: give another --out, or remove the old folder",
    "push_to_hub hub_model_id": "after the run, `hf upload NAME OUT/final` does that",
    "gpus n_gpu n_gpus ngpus num_gpus gpu_ids device devices device_map cpu cuda":
        "CUDA_VISIBLE_DEVICES=0,1 chooses GPUs, -1 none; torchrun --nproc_per_node N train.py ... uses N",
    "trust_remote_code": "code of a model's folder is never run: leave it out",
    "config config_file yaml": "there are no config files: give their settings as flags, see --help",
    # torch.distributed.launch gave the first one to each process
    "local_rank nproc_per_node nnodes node_rank master_addr master_port num_processes":
        "it belongs to the launcher: torchrun --nproc_per_node N train.py ...",
}


class StoreOnce(argparse._StoreAction):
    """Refuses a second value of a flag, where argparse takes the last one without a word."""

    def __call__(self, parser, namespace, value, option=None):
        if vars(self).setdefault("given", value) != value:
            refuse(f"{option}: given twice, {self.given} and {value}: leave one of the two out")
        super().__call__(parser, namespace, value, option)


class ExtendOrAll(argparse._ExtendAction):
    """A list without a value has the value all, also where another one of the same flag has values."""

    def __call__(self, parser, namespace, values, option=None):
        super().__call__(parser, namespace, values or ["all"], option)


def declare(group, *names, **options):
    """Adds a flag to a group, with MARKS as attributes: argparse keeps those that it does not know."""
    marks = {mark: options.pop(mark, None) for mark in MARKS}
    vars(group.add_argument(*names, **options)).update(marks)


def add(group, flag, value_type, default, text, **options):
    """Adds a flag that has a value. The text says what a default of None means, if not none."""
    if "(default: " not in text:
        text += f" (default: {'none' if default is None else default})"
    if value_type not in (str, path):
        options.setdefault("metavar", "N")
    if options.get("nargs") in ("+", "*"):  # a list that is given twice adds up
        options["action"] = ExtendOrAll
    declare(group, flag, type=value_type, default=default, help=text, **options)


def switch(group, flag, text, on=False, **marks):
    """Adds a flag that is on or off. One that is on by default also gets a --no-flag."""
    action = argparse.BooleanOptionalAction if on else "store_true"
    shown = "on" if on else "off"
    declare(group, flag, action=action, default=on, help=f"{text} (default: {shown})", **marks)


class HelpText(argparse.HelpFormatter):
    """argparse's lines of help, except that names like muse-glimmer-30b are not broken at a hyphen."""

    def _split_lines(self, text, width):
        return textwrap.wrap(text, width, break_on_hyphens=False)


def make_parser():
    # allow_abbrev=False: with a new flag, an abbreviation in somebody's script would mean two flags.
    # exit_on_error=False: argparse raises instead of printing its usage, and launch() prints one line
    parser = argparse.ArgumentParser(
        usage="[torchrun --nproc_per_node N | python] train.py [flags]",
        description=(__doc__ or "").split("\n\n")[0],  # PYTHONOPTIMIZE=2 takes it away
        add_help=False, allow_abbrev=False, exit_on_error=False, formatter_class=HelpText)
    parser.register("action", None, StoreOnce)
    declare(parser, "-h", "--help", "--help_all", action="help", everyday=True,
            help="print the everyday flags, or all flags with --help_all, and exit")

    model = parser.add_argument_group("model")
    add(model, "--model", path, None, "tiny (built in), a Hugging Face folder, a Hub id, the folder of a "
        "run, or with --random_init one of " + ", ".join(data.PRESETS) + " (default: tiny, or the base of "
        "--adapter)", everyday=True, also="model_name model_name_or_path tokenizer checkpoint_dir base_model")
    switch(model, "--random_init", "start from random weights of --model's shapes", fixed=True)
    add(model, "--precision", str, None, "mixed: float32 trained weights, bf16 compute; fp16: the same with "
        "fp16 compute; bf16, fp32: everything in that format (default: mixed; without bf16 instructions fp16 "
        "on a GPU, fp32 on a CPU)", choices=("mixed", "bf16", "fp16", "fp32"), fixed=True)
    add(model, "--adapter", path, None, "PEFT adapter to train on: a folder, a Hub id, a run. It sets rank, "
        "alpha, rsLoRA and targets", also="adapter_name_or_path adapter_path lora_model_dir")

    method = parser.add_argument_group("method (default: full fine-tuning)")
    switch(method, "--lora", "train low-rank adapters and freeze all other weights", fixed=True,
        everyday=True, also="use_peft peft_type finetuning_type")
    switch(method, "--qlora", "--lora with the blocks' weights quantized to NF4 (4.14 bits per weight)",
        fixed=True, everyday=True, also="load_in_4bit load_4bit use_4bit quantization_bit")
    add(method, "--nf5", str, None, "layers to store in NF5 (5.14 bits per weight) instead of NF4 (default: "
        "none; without a value: all)", nargs="*", metavar="LAYER", fixed=True, needs="qlora", everyday=True)
    add(method, "--lora_rank", WHOLE, None, "rank of the adapters (default: 16)", fixed=True, needs="lora",
        everyday=True, also="lora_r r rank lora_dim")
    add(method, "--lora_alpha", AMOUNT, None, "scale = alpha / rank (default: 32)", fixed=True, needs="lora",
        also="alpha")
    switch(method, "--rslora", "scale = alpha / sqrt(rank) (arXiv:2312.03732)", fixed=True, needs="lora",
        also="rank_stabilized_lora")
    add(method, "--lora_dropout", number(float, zero_too=True, below=1), None, "dropout rate of the "
        "adapters' inputs (default: 0)", fixed=True, needs="lora", also="dropout")
    switch(method, "--dpo", "train on pairs of a chosen and a rejected answer (arXiv:2305.18290); the "
        "reference is the model without adapters", fixed=True, needs="lora", everyday=True)
    add(method, "--beta", AMOUNT, None, "DPO's beta: a smaller value lets the model move further from the "
        "reference (default: 0.1)", fixed=True, needs="dpo", also="dpo_beta pref_beta")
    switch(method, "--train_embeddings", "also train embedding and head (PEFT's modules_to_save)", fixed=True,
        needs="--lora or --qlora: full fine-tuning already trains the embeddings",
        also="modules_to_save additional_target")
    add(method, "--lora_targets", str, None, f"layers to adapt, of {', '.join(lm.LORA_TARGETS)} (default: "
        "all-linear, all but in_proj_a and in_proj_b)", nargs="+", metavar="LAYER", fixed=True,
        needs="lora", also="target_modules lora_target_modules")
    add(method, "--add_tokens", os.path.expanduser, None, "new tokens for the vocabulary, or a file with one "
        "per line", nargs="+", metavar="TOKEN", fixed=True, also="new_special_tokens resize_vocab")

    dataset = parser.add_argument_group("data")
    add(dataset, "--data", path, None, "files to train on: .jsonl, .ndjson, .json, .csv, .parquet, .txt, "
        "also with .gz; data sets of the Hub (org/name or org/name/subset, with :split unless it is train); "
        "folders of datasets' save_to_disk(); 'chats/*.jsonl' in quotes (default: the demo's)", nargs="+",
        everyday=True, also="dataset datasets dataset_name dataset_dir train_file train_data data_path")
    add(dataset, "--eval_data", path, None, "files to evaluate on, or how many examples of --data to hold "
        "out, below 1 their fraction", nargs="+", everyday=True, needs="data",
        also="eval_dataset eval_file validation_file val_set_size val_size test_size val_split eval_split")
    add(dataset, "--columns", column, None, "rename columns: question=instruction reads the column "
        "'question' as 'instruction'", nargs="+", metavar="COLUMN=KEY", fixed=True,
        also="dataset_text_field text_column text_field")
    add(dataset, "--seq_len", WHOLE, 1024, "tokens per row", fixed=True, everyday=True,
        also="max_length max_seq_length model_max_length sequence_len seq_length cutoff_len block_size")
    add(dataset, "--overflow", str, None, "what to do with documents longer than a row (default: split "
        "texts, drop others)", choices=("split", "drop", "truncate"))
    switch(dataset, "--packing", "pack several documents into each row; they do not see each other", on=True,
        fixed=True, also="sample_packing neat_packing")
    add(dataset, "--train_on", str, "targets", "targets: answers and plain texts. Answers whose thoughts the "
        "template drops later get documents of their own; 'whole' skips them. all: every token", fixed=True,
        choices=("targets", "whole", "all"), also="assistant_only_loss completion_only_loss train_on_inputs "
        "train_on_prompt train_on_responses_only mask_prompt")
    add(dataset, "--chat_template", path, None, "a jinja file of your own", everyday=True, also="template")
    add(dataset, "--template_args", str, None, "variables for the chat template, such as "
        "enable_thinking=false. Values are JSON or plain text, and are saved in final/", nargs="+",
        metavar="KEY=VALUE", fixed=True, everyday=True, also="chat_template_kwargs enable_thinking")
    add(dataset, "--inspect", WHOLE, None, "print N examples with the trained tokens in brackets, and exit "
        "(default: off)", everyday=True)

    add_memory_flags(parser)
    add_run_flags(parser)
    return parser


def add_memory_flags(parser):
    memory = parser.add_argument_group("memory and speed")
    switch(memory, "--fsdp2", "shard parameters, gradients and optimizer state over the ranks", everyday=True,
        also="fsdp deepspeed zero2 zero3 zero_stage")
    switch(memory, "--reshard_after_forward", "free the gathered weights of a block between its forward and "
        "its backward", on=True, needs="fsdp2")
    switch(memory, "--shard_embeddings", "gather the embedding and the head only while they are used; tied "
        "ones stay gathered", on=True, needs="fsdp2")
    add(memory, "--replicas", WHOLE, 1, "HSDP: N replicas of the model, each sharded over world/N ranks, "
        "usually one node; gradients are all-reduced between replicas", needs="fsdp2")
    add(memory, "--sequence_parallel", WHOLE, 1, "split a row over N ranks; --batch_size is rows per group",
        also="context_parallel context_parallel_size ulysses")
    add(memory, "--offload", str, None, "to host memory. activations: inputs of recomputed blocks. params: "
        "weights, gradients and optimizer state, with --fsdp2 (default: nothing; without a value: all that "
        "applies)", nargs="*", choices=("activations", "params"), everyday=True,
        also="cpu_offload enable_activation_offloading")
    add(memory, "--resident_blocks", BLOCKS, "auto", "blocks (or all) whose frozen weights stay on the GPU; "
        "auto: as many as fit, none on a CPU without --gpu_gib",
        needs="--offload params and --lora or --qlora: it is about frozen weights in host memory")
    add(memory, "--activation_checkpointing", BLOCKS, "auto", "recompute the first N blocks (or all) in the "
        "backward. auto: as few as 90 %% of the GPU's memory allows; all on a CPU without --gpu_gib, or with "
        "--offload activations", nargs="?", const="all", everyday=True,
        also="gradient_checkpointing grad_checkpoint")
    declare(memory, "--no-activation_checkpointing", action="store_const", const=0,
            dest="activation_checkpointing", help="recompute nothing: fastest, needs the most memory")
    switch(memory, "--chunked_ce", "head and loss in chunks of tokens, never all logits at once", on=True)
    add(memory, "--ce_chunk", WHOLE, 1024, "tokens per chunk of the loss", needs="chunked_ce")
    add(memory, "--tiled_mlp", WHOLE, None, "run the MLP on N tokens at a time; from 16,384 tokens a row on "
        "also attention, on groups of heads; try 4096 (default: off)", everyday=True)
    add(memory, "--optim", str, "adamw", "adamw8bit stores 2 bytes of state per parameter instead of 8",
        choices=("adamw", "adamw8bit"), fixed=True, everyday=True, also="optimizer")
    switch(memory, "--stochastic_rounding", "round bf16 weights and moments at random, so that small updates "
           "count on average", fixed=True, needs="--precision bf16")
    switch(memory, "--optim_in_backward", "update each weight in the backward, and free its gradient "
           "at once; rules out --clip")
    switch(memory, "--fused_adamw", "run AdamW as one fused kernel, on GPU and CPU", on=True,
           needs="--optim adamw and no --stochastic_rounding")
    declare(memory, "--compile", action=argparse.BooleanOptionalAction, everyday=True, also="torch_compile",
            help="torch.compile the blocks, the loss and NF4 (default: on with a GPU, Triton, a C compiler "
            f"and a model of at least {COMPILES_FROM / 1e9:g} billion parameters)")


def add_run_flags(parser):
    schedule = parser.add_argument_group("schedule")
    add(schedule, "--batch_size", WHOLE, 1, "rows per rank and micro-batch", everyday=True,
        also="batch per_device_train_batch_size train_batch_size micro_batch_size")
    add(schedule, "--grad_accum", WHOLE, 1, "micro-batches per step", everyday=True,
        also="gradient_accumulation_steps")
    add(schedule, "--steps", WHOLE, None, "steps, in place of --epochs", everyday=True,
        also="max_steps num_steps total_steps max_iters iters")
    add(schedule, "--epochs", AMOUNT, 1.0, "passes over the data", everyday=True,
        also="num_train_epochs num_epochs n_epochs")
    add(schedule, "--lr", AMOUNT_OR_0, None, "peak learning rate (default: for adapters, 5e-4 * (2000 / "
        "hidden size)^p, where p is 0.0775 for Qwen and 0.781 for others; a tenth of that in full "
        "fine-tuning and for --dpo)", fixed=True, everyday=True, also="learning_rate")
    add(schedule, "--embedding_lr", AMOUNT, None, "peak learning rate of what --train_embeddings trains "
        "(default: a tenth of --lr)", fixed=True, also="embedding_learning_rate",
        needs="--train_embeddings, or an --adapter with an embedding")
    add(schedule, "--min_lr", AMOUNT_OR_0, 0.0, "learning rate at the end", fixed=True,
        needs="--schedule cosine or linear")
    add(schedule, "--warmup", AMOUNT_OR_0, 0.03, "steps of linear warmup, starting at lr / (warmup + 1), or "
        "a fraction of all steps if below 1", fixed=True, also="warmup_ratio warmup_steps")
    add(schedule, "--schedule", str, "cosine", "shape of the learning rate after the warmup",
        choices=("cosine", "linear", "constant"), fixed=True, also="lr_scheduler_type lr_scheduler scheduler")
    add(schedule, "--weight_decay", AMOUNT_OR_0, 0.01, "weight decay, applied to matrices only", fixed=True)
    add(schedule, "--clip", AMOUNT_OR_0, None, "maximum gradient norm; 0: no limit (default: 1; 0 with "
        "--optim_in_backward)", fixed=True, also="max_grad_norm gradient_clipping grad_clip clip_grad")
    add(schedule, "--seed", WHOLE_OR_0, 0, "seed of data order, weights, adapters, dropout", fixed=True,
        also="random_state random_seed")

    run = parser.add_argument_group("run")
    add(run, "--out", path, None, "folder that a new run writes to (default: out/<date-time>)", everyday=True,
        also="output output_dir")
    add(run, "--save_every", WHOLE_OR_0, 500, "save a checkpoint every N steps, at the last step and at each "
        "new best evaluation; 0: save only when interrupted", everyday=True, also="save_steps")
    add(run, "--keep", WHOLE, 2, "newest checkpoints to keep, beside the best one", also="save_total_limit")
    add(run, "--resume", path, None, "continue CHECKPOINT_OR_RUN; without a value, the newest checkpoint "
        "of --out or of the newest run in out/, or start a new run if there is none", nargs="?", const="auto",
        metavar="CHECKPOINT_OR_RUN", everyday=True, also="resume_from_checkpoint")
    add(run, "--timeout", SECONDS, 1800.0, "seconds after which ranks that hang in a step end and print "
        "their stacks; 4 N while a rank loads, saves or exports. A full disk at the end is tried for N")
    add(run, "--log_every", WHOLE, 10, "log every N steps, and at least every ten seconds",
        also="logging_steps log_interval")
    add(run, "--eval_every", WHOLE, None, "steps between evaluations (default: a tenth of the run, more on "
        "much data)", needs="eval_data", also="eval_steps eval_interval steps_per_eval")
    add(run, "--patience", WHOLE, None, "end after N evaluations without a better one; final/ gets the best "
        "(default: off)", needs="eval_data")
    switch(run, "--dry_run", "print the memory plan for --world GPUs and exit", everyday=True)
    add(run, "--world", WHOLE, None, "GPUs of a --dry_run (default: 1)", needs="dry_run", everyday=True)
    add(run, "--gpu", str, None, "card that --dry_run plans for, such as 3090 or H100: its memory and, for "
        "common cards, the time of a step", needs="dry_run", metavar="NAME", everyday=True)
    add(run, "--gpu_gib", AMOUNT, None, "GiB of each GPU that the run or the plan may use; a 24 GB card has "
        "23.6 (default: all)", everyday=True)
    switch(run, "--tensorboard", "also write metrics for TensorBoard (pip install tensorboard)")
    switch(run, "--wandb", "also send metrics to Weights & Biases, configured by WANDB_PROJECT and so on "
        "(pip install wandb)", everyday=True, also="report_to run_name wandb_project wandb_entity")
    switch(run, "--profile", "trace the third step and write trace.json.gz, for Perfetto")
    switch(run, "--memory_snapshot", "write memory.pickle of three steps, for pytorch.org/memory_viz",
           needs="a GPU")
    add(run, "--export", path, None, "write final/ of a checkpoint, or of the newest in RUN, and exit",
        metavar="RUN/checkpoint-N")
    switch(run, "--merge", "also write merged/, the 16-bit model with the adapter merged in; with an adapter "
        "and without --data, only merge", everyday=True, also="merge_and_unload merge_lora")
    add(run, "--system", str, None, "system message of --chat and --sample", needs="--chat or --sample",
        also="system_prompt default_system")
    add(run, "--sample", str, None, "a text to continue or a question to answer before training, at each "
        "evaluation and after training (default: none, except for the built-in data; '' is none)",
        also="prompt question")
    switch(run, "--chat", "talk with --model instead of training", everyday=True)
    add(run, "--temperature", AMOUNT_OR_0, 0.0, "of --chat and --sample; 0: always the likeliest token",
        needs="--chat or --sample", also="temp do_sample")
    add(run, "--max_new_tokens", WHOLE, None, "tokens of an answer (default: --chat 512, --sample 48)",
        needs="--chat or --sample", also="max_tokens")


def flags_with(mark):
    """-> the flags that have one of MARKS, as argparse's actions."""
    # a fork may have added one without declare()
    return [action for action in make_parser()._actions if getattr(action, mark, None)]


def parse_args(argv, args=None):
    """-> the flags of a run, checked and filled in. args: flags of an earlier call to write over."""
    parser = make_parser()
    if "-h" in argv or "--help" in argv:  # one action prints all help: hide what only --help_all should show
        for action in parser._actions:
            if not getattr(action, "everyday", None):
                action.help = argparse.SUPPRESS
    refuse_words(argv, parser._option_string_actions)
    # parse_args() would end the process before refuse_unknown() could look for the flag that was meant.
    # No type returns None, so what is not None here was typed, also where it has the value of the default.
    none = argparse.Namespace(**{action.dest: None for action in parser._actions})
    typed, unknown = parser.parse_known_args(argv, none)
    if unknown:
        refuse_unknown(unknown[0], parser._option_string_actions)
    given = {name for name, value in vars(typed).items() if value is not None}
    args, _ = parser.parse_known_args(argv, args)
    try:
        normalize_flags(args)
        check_flags(args, given)
        # from here on, defaults look like values that were given
        fill_in_flags(args)
    except (ValueError, OSError) as error:
        refuse(message_of(error))
    return args


DASHES = "-", "–", "—", "−"  # noqa: RUF001  (pages and editors make one long dash of two short ones)


def refuse_words(argv, flags):
    """Refuses words that argparse would drop, or take for something else than the user means."""
    name = "train.py"  # or the flag that the next value belongs to
    for place, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            name = flag
            off = f"--no-{name[2:]}"
            if off in argv:
                refuse(f"{name} and {off}: leave one out")
            # argparse drops such a value, and then raises a bare ValueError, or uses the default
            if value == "--":
                refuse(f"{word}: expected a value, got two dashes")
            values = [value] if equals else []
            values += itertools.takewhile(lambda other: not other.startswith(DASHES), argv[place + 1 :])
            if name in flags:
                refuse_stray(name, values, flags, bool(equals))
        elif word.startswith(DASHES[1:]) and f"--{flag.lstrip(''.join(DASHES))}" in flags:
            refuse(f"{word}: this is another character than the - of a keyboard: type --")
        if not word.startswith("--") or not equals:
            value = word
        # what a script gives whose variable is not set; --sample '' is how to have none
        if not value.strip() and name != "--sample":
            refuse(f"{name}: expected a value, got an empty string")


def refuse_stray(name, values, flags, has_equals):
    """Refuses words behind a flag that are none of its values. values: all words up to the next flag."""
    nargs = flags[name].nargs
    n_taken = 0 if nargs == 0 else 1  # argparse takes one word for nargs None and "?"
    is_list = nargs in ("+", "*")
    if len(values) <= n_taken or (is_list and not has_equals):
        return
    words = " ".join(values)
    stray = values[n_taken]
    if is_list:
        refuse(f"{name}={words}: after = stands one value: give {name} {shlex.join(values)}")
    # a setting of another trainer, see refuse_unknown()
    if re.match(r"[\w.]+=", stray) or stray.endswith((".yaml", ".yml")):
        return
    if nargs == 0:
        off = f"--no-{name[2:]}"
        how = off if off in flags else "no flag at all"
        refuse(f"{name} {stray}: a switch takes no value: {name} means on, {how} means off")
    if values[0] == "=":
        refuse(f"{name} {words}: leave out the blanks around the =")
    if flags[name].type not in (str, path):  # no number has blanks: quotes would not help
        refuse(f"{name} {words}: expected one value, got {len(values)}")
    refuse(f"{name} {words}: a value with blanks needs quotes: {name} {shlex.quote(words)}")


def refuse(message):
    raise argparse.ArgumentError(None, message)  # launch() prints it and ends with exit code 2


def refuse_unknown(word, flags):
    """Refuses a word and names the flag that was meant: another trainer's name, - for _, or a misspelling."""
    name = word.split("=")[0].lstrip("-").replace("-", "_").lower()
    name = name.rpartition(".")[2]  # torchtune's and litgpt's optimizer.lr
    if word.endswith((".yaml", ".yml")):
        name = "config"
    known = {other: flag.option_strings[0] for flag in flags_with("also") for other in flag.also.split()}
    known |= {flag.lstrip("-").replace("-", "_"): flag for flag in flags}
    # a lower cutoff misleads: --version is no --precision, and --beta1 no --beta
    names = name, re.sub("^(no|use|enable)_", "", name)
    similar = [match for one in names
               for match in difflib.get_close_matches(one, known, n=1, cutoff=0.85)]
    hint = "--help_all lists all"  # a wrong guess would cost more than none
    if similar and re.findall(r"\d", name) == re.findall(r"\d", similar[0]):
        hint = f"did you mean {known[similar[0]]}?"
    for others, answer in ANSWERS.items():
        if {*names} & {*others.split()}:
            hint = answer
    refuse(f"{word}: no such flag; {hint}")


def normalize_flags(args):
    """Gives each meaning one spelling: a run becomes the folder of its result, `all` what it stands for."""
    # An adapter decides which other flags make sense, so it is looked for before any check.
    named = " ".join(f"--{flag} {getattr(args, flag)}" for flag in ("model", "adapter")
                     if getattr(args, flag))
    if named or not args.export:  # --export takes what is not given from the run
        args.model, args.adapter = data.find_result(args.model, args.adapter)
    for flag in ("model", "adapter"):
        if not os.path.isdir(getattr(args, flag) or ""):
            continue
        folder = Path(getattr(args, flag))
        # A checkpoint has shards, and no model. transformers writes a state of its name beside a model.
        checkpoint = folder if (folder / STATE).is_file() else newest_checkpoint(folder)
        if checkpoint and is_ours(checkpoint) and not (data.result_in(folder) or data.result_in(checkpoint)):
            refuse(f"--{flag} {folder}: a checkpoint is not a model yet: --export {checkpoint} makes one of "
                   "it")
    # the reference of --dpo is the model without adapters, and new tokens need rows in its embedding
    for flag in ("dpo", "add_tokens"):
        if args.adapter and getattr(args, flag):
            refuse(f"--{flag} needs a whole model: merge the adapter first (--merge {named}) and give the "
                   "merged/ that it writes as --model")
    data.share_of(args.eval_data)  # raises if it is no share
    args.add_tokens = data.read_new_tokens(args.add_tokens)
    variables = data.read_template_args(args.template_args)
    if variables:  # a resume compares them, however they were spelled
        args.template_args = [f"{name}={json.dumps(value)}" for name, value in sorted(variables.items())]
    if args.qlora or args.adapter:
        args.lora = True
    if args.lora_targets:
        args.lora_targets = layer_names("lora_targets", args.lora_targets)
    if args.nf5:
        args.nf5 = layer_names("nf5", args.nf5)
    args.offload = args.offload or []
    if "all" in args.offload:  # --offload without a value
        args.offload += ["activations", "params"] if args.fsdp2 else ["activations"]
    args.offload = [part for part in ("activations", "params") if part in args.offload]  # each one once
    if args.gpu:
        args.gpu = card_named(args.gpu)
        if not CARDS[args.gpu].has_bf16:  # as default_precision() decides on such a card
            args.precision = args.precision or "fp16"
    names = [name for name, _ in args.columns or []]
    if len(set(names)) < len(names):
        refuse(f"--columns: {', '.join(names)}: a column can have one key")


def layer_names(flag, words):
    """-> the layers that --lora_targets or --nf5 names, in the order of lm.LORA_TARGETS."""
    given = ",".join(words).split(",")  # commas are as good as spaces
    unknown = {*given} - {*lm.LORA_TARGETS, "all", "all-linear"}
    if unknown:
        refuse(f"--{flag} {', '.join(sorted(unknown))}: expected all-linear or some of "
               + ", ".join(lm.LORA_TARGETS))
    if "all" in given or "all-linear" in given:
        given += lm.ALL_LINEAR
    return [name for name in lm.LORA_TARGETS if name in given]


def check_flags(args, given):
    """Refuses flags that would not be read, or cannot work together, before any process group or download.
    given: the names of those that were typed."""
    refuse_unread(args, given)
    out = Path(args.out or ".")
    if not out.is_dir() and (out.exists() or out.suffix.removeprefix(".") in data.FILE_TYPES):
        refuse(f"--out {out}: a file, and --out is the folder that a run writes to; --data reads files")
    for flag in ("lora_rank", "lora_alpha", "rslora", "lora_targets", "train_embeddings", "random_init"):
        if flag in given and args.adapter:
            refuse(f"--{flag} and --adapter: leave one out, the adapter has its own")
    if {"steps", "epochs"} <= given:
        refuse("--steps and --epochs: leave one out, either says how long the run is")
    if args.add_tokens and args.lora and not args.train_embeddings:
        refuse("--add_tokens with --lora or --qlora needs --train_embeddings: without it the rows of these "
               "tokens are never learned")
    if args.merge and not args.lora:
        refuse(f"--merge: {args.model} has no adapter to merge: give the folder of a run that has trained "
               "one as --model, or train one with --lora")
    if args.dpo and (args.overflow or args.train_on != "targets" or args.sequence_parallel > 1):
        refuse("--dpo: leave out --overflow, --train_on and --sequence_parallel")
    # the reference would need the old embeddings, and --dpo's loss of each token has no gradient of the head
    if args.dpo and args.train_embeddings:
        refuse("--dpo: leave out --train_embeddings, which change the reference, too: train them in a run "
               "before, and give its merged model")
    if args.patience and not args.save_every:
        refuse("--patience needs --save_every above 0: final/ gets the weights of the best checkpoint")
    if args.optim_in_backward and (args.grad_accum > 1 or args.clip):
        refuse("--optim_in_backward needs --grad_accum 1 and no --clip: it frees each gradient early")
    if args.optim_in_backward and args.precision == "fp16":
        refuse(f"--optim_in_backward: {WHOLE_STEPS}")
    for flag in ("tensorboard", "wandb"):
        if getattr(args, flag) and not is_installed(flag):
            refuse(f"--{flag} needs a package: pip install {flag}")
    if (args.profile or args.memory_snapshot) and args.steps in (1, 2):
        refuse("--profile and --memory_snapshot need --steps above 2: they record the third step")
    # A preset has no weights. Without this error a user could take noise for a model.
    is_preset = args.model in data.PRESETS and not os.path.isdir(args.model)
    if is_preset and not (args.random_init or args.dry_run or args.export):
        trained = f"--model {data.PRESETS[args.model]['_name_or_path']}"
        way = "give" if args.chat or args.adapter else "add --random_init, or give"
        refuse(f"--model {args.model} is a preset of shapes: {way} {trained}")
    if "params" in args.offload and not args.fsdp2:
        refuse("--offload params needs --fsdp2")
    if "activations" in args.offload and args.activation_checkpointing not in ("all", "auto"):
        refuse("--offload activations needs --activation_checkpointing all: the bus is fast enough for the "
               "input of a block, not for all that the block computes")


def refuse_unread(args, given):
    """Refuses typed flags that this command would not read, by MODES and NEEDS."""
    modes = [mode for mode in MODES if mode in given and (mode != "merge" or only_merges(args))]
    if len(modes) > 1:
        refuse(f"--{modes[0]} and --{modes[1]}: leave one out")
    if modes and modes != ["inspect"] and "RANK" in os.environ:
        refuse("--chat, --export, --merge without --data, and --dry_run need one process: no torchrun; "
               "--world N plans for N GPUs")
    flags = {flag.dest: flag for flag in make_parser()._actions if flag.dest in given}
    typed = {name: f"--no-{name}" if getattr(args, name) is False else f"--{name}" for name in flags}
    for mode in modes:
        read = {mode, *(MODES[mode] or flags)}  # None reads all that is typed
        unread = [typed[name] for name in flags if name not in read]
        how = " without --data only merges, and" if mode == "merge" else ""
        if unread:
            refuse(f"--{mode}{how} does not read {', '.join(unread)}: leave this out")
    for name, flag in flags.items():
        needs = getattr(flag, "needs", None)  # a fork may have added one without declare()
        if needs in NEEDS and not NEEDS[needs](args):
            refuse(f"{typed[name]} needs {needs}")
        if needs and needs not in NEEDS and not getattr(args, needs):
            refuse(f"{typed[name]} needs --{needs}")


def only_merges(args):
    return args.merge and args.adapter and not args.data


def sample_of(args):
    """-> the text that a run samples: --sample, or the demo's question."""
    is_demo = not args.random_init and (args.data or DEMO_DATA) == DEMO_DATA
    return SAMPLE if args.sample is None and is_demo else args.sample


def fill_in_flags(args):
    """Fills in defaults that depend on other flags. resolve_for_model() fills in those of the model and the
    device. After that nothing writes to `args`."""
    args.sample = sample_of(args) or ""
    if only_merges(args):  # main trains nothing
        args.data = []
        args.sample = ""
    else:
        args.data = data.files_matching(args.data or DEMO_DATA)
    args.eval_data = args.eval_data and data.files_matching(args.eval_data)
    if not args.chunked_ce:
        args.ce_chunk = 0  # the head sees all tokens at once
    if args.clip is None:  # the norm of all gradients is not known while weights are updated in the backward
        args.clip = 0.0 if args.optim_in_backward else 1.0
    if args.lora and not args.adapter:  # an adapter brings its own, see resolve_for_model()
        args.lora_rank = args.lora_rank or 16
        args.lora_alpha = args.lora_alpha or 32
        args.lora_dropout = args.lora_dropout or 0.0
        args.lora_targets = args.lora_targets or list(lm.ALL_LINEAR)
    if args.dpo:
        args.beta = args.beta or 0.1


def is_installed(package):
    spec = importlib.util.find_spec(package)  # without its import, which takes seconds
    # a folder of this name, which wandb leaves wherever it has run, is a package without origin
    return spec is not None and spec.origin is not None


# ---------------- the memory plan

# The plan is the run, on paper: build() and train_step() run on the meta device, with ranks that are not
# there, and LiveBytes counts what a GPU and the host would hold. So a new feature is planned by itself.
#
# A trace of all blocks takes up to 15 s, and a search asks for many. So extrapolate() traces few blocks, and
# repeats what those in the middle have added.

GIB = 2**30
OVERHEAD = GIB  # on an H100: CUDA's context 0.75, cuBLAS 0.07, fragmentation 0.1 to 0.4; NCCL not measured
CONTEXT = 0.75 * GIB
TIGHT = 0.97  # of a card
KINDS = "weights", "quantized weights", "adapters", "optimizer", "gradients", "kept for backward", "workspace"
# {what runs in a phase of a step: its title in the table}
TITLES = {"head": "head and loss", "block": "a block", "embedding": "embedding", "update": "update"}


def plan(run, policy):
    """Where the memory of a training step goes on rank 0 -> ({title: {kind: bytes}}, {kind: bytes of host
    memory}), at the highest peak of each of TITLES, without OVERHEAD. It assumes rows of run.length tokens,
    one document per row, every token supervised. tests/test_plan.py compares the sums with real steps."""
    step = extrapolate(run, policy)
    owned = bytes_by_kind(step, "gpu")
    table = {}
    for module, title in TITLES.items():
        # from the last one on: of two equal peaks it is the backward's
        phases = [phase for phase in reversed(step.peaks) if phase.module == module]
        if phases:
            phase = max(phases, key=step.peaks.get)
            start = step.starts[phase]
            kinds = owned + Counter(gradients=start["gradients"])
            kinds = with_rest(kinds, "kept for backward", start["gpu"])
            table[title] = with_rest(kinds, "workspace", step.peaks[phase])
    n_forwards = max(phase.n_forward for phase in step.starts)
    head = step.starts[Phase(n_forwards, "forward", "head")]
    host = bytes_by_kind(step, "host") + Counter(gradients=head["host gradients"])
    host = with_rest(host, "activations", head["host"])
    host["gradients"] = max(start["host gradients"] for start in step.starts.values())
    return table, dict(+host)


def with_rest(kinds, name, n_bytes):
    """-> Counter of some kinds of bytes, and as one more kind what they lack of n_bytes."""
    return kinds + Counter({name: n_bytes - kinds.total()})


def planned_bytes(run, policy):
    """What a GPU needs for a step, CUDA's own memory included."""
    return max(extrapolate(run, policy).peaks.values()) + OVERHEAD


# ---- a step on paper
#
# On paper means on the meta device, where tensors have shapes and no memory. In kernels_on_paper() LiveBytes
# counts what a GPU would hold. Most operators make the same tensors as on a GPU. The others have stand-ins,
# which compute nothing, but allocate and save for the backward what a GPU's kernel does, except partial sums
# of the gradient of a norm's weight. A new kernel needs a stand-in in ON_PAPER.

ATEN = torch.ops.aten
PRODUCTS = "mm", "bmm", "addmm", "baddbmm", "_grouped_mm"  # names of operators
CPU = torch.device("cpu")
META = torch.device("meta")
MOVES = "_to_copy", "_pin_memory"  # operators that may move a tensor to host memory
# {operator and its arguments, tensors by their form: (shape, strides, dtype) of the new tensor, and its Work}
FORMS = {}
FREE = re.compile("empty|zeros|view|detach")  # here zeros are what a stand-in allocates
READ_AS_MUCH = "copy_", "embedding", "index_select", "index", "gather"  # as they write, of larger tables
COMPILED_CALL = 10  # launches that take the host as long as a call of compiled code, 70 to 120 us


class LiveBytes:
    """Counts the bytes of all tensors on the meta device that are alive. run() is called for each operator;
    Python tells when nothing refers to a tensor's memory any more.

        live.begin("loss")      the phase "loss" of the step begins
        live.peaks["loss"]      the most bytes that were alive at once in this phase
        live.work["loss"]       {Work: how often a GPU does it}

    Tensors that code moves to the CPU stay on the meta device, and count in `host`, as do results of
    operators that read them. torch's MemTracker raises an error on frozen parameters under autograd.

    Set from outside: in_backward, after_backward (a function), is_compiled, has_compiled."""

    now = None  # the one that counts, inside of kernels_on_paper()
    times = 1  # how often a GPU runs what runs once here, see first_of()
    has_flash = None  # see RunSpec

    def __init__(self):
        self.work = {}
        self.has_compiled = False  # whether anything was compiled
        self.alive = 0  # bytes on the GPU
        self.host = 0  # bytes in host memory
        self.sizes = {}  # {id of a storage: its bytes}
        self.host_ids = set()  # of the storages that stand for host memory
        self.peaks = {}
        self.updates = {}  # {form of a weight: (bytes that its update adds, its work)}
        self.in_backward = False
        self.is_compiled = False
        self.after_backward = lambda: None
        self.begin("before")

    def begin(self, phase):
        """A phase may begin more than once: its peak is the highest of all."""
        LiveBytes.times = 1
        self.phase = phase
        self.work_in_phase = self.work.setdefault(phase, Counter())
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.alive)

    def run(self, func, types, args, kwargs):
        """Calls an operator, and counts what it makes. types: of arguments that are no plain tensors. Each
        kind of operator returns by itself, and those of DTensors before any that reads a plain tensor."""
        name = func._opname
        if func.is_view and not types:  # a view
            return func(*args, **kwargs)
        reads_host = bool(self.host_ids) and kwargs.get("device") != META and self.lies_on_host(args)
        if not func._schema.returns:  # what writes only
            # DTensor would look at all weights for each: 16 s of a 405B model
            if not reads_host:
                self.add_work(work_of(func, shards_of(args) if types else args, None))
            return None
        if types:  # FSDP2's DTensors
            out = func(*args, **kwargs)
            made = shards_of([out])
            self.see(made, on_host=reads_host)
            if not (reads_host or func.is_view):
                self.add_work(work_of(func, shards_of(args), made))
            return out
        if name in MOVES or "pin_memory" in kwargs or kwargs.get("device") == CPU:  # a copy to host memory
            moved = self.to_host(func, args, kwargs)
            if moved is not None:
                return moved
        if name == "_local_scalar_dense" and args[0].is_meta:  # a number for the host
            return 0
        if self.in_backward and is_sum_of_gradients(func, args):  # which is in the memory of the first one
            self.add_work(work_of(func, args, args[0]))
            return args[0]
        # all others
        out, work = self.result_of(func, args, kwargs)
        if name == "copy_" and reads_host != self.lies_on_host(args[1:]):  # to the host, or back
            note_kernel("copy", bus=out.nbytes)
        elif not reads_host:
            self.add_work(work)
        if self.is_compiled and name in PRODUCTS:
            self.see(args)  # what a product reads is in memory
        self.see(out, self.is_compiled and work.is_fused, reads_host)
        return out

    def add_work(self, work):
        """What compiled code fuses is neither read nor written."""
        # most of what autograd runs is compiled, if anything is
        is_backward = self.in_backward and not torch.is_grad_enabled()
        is_in_graph = self.is_compiled or (self.has_compiled and is_backward)
        if not (work.is_fused and is_in_graph):
            self.work_in_phase[work] += LiveBytes.times

    def to_host(self, func, args, kwargs):
        """-> a tensor that stands for host memory, or None if an operator makes none."""
        is_move = func._opname in MOVES
        # popped, because the meta device has no pinned memory, and run() may call the operator
        asks_for_pinned = kwargs.pop("pin_memory", False) or func._opname == "_pin_memory"
        goes_to_cpu = kwargs.get("device") == CPU
        source = args[0] if args and isinstance(args[0], torch.Tensor) and args[0].is_meta else None
        if source is None or not (asks_for_pinned or goes_to_cpu):
            return None  # a small tensor of the host's own, such as a count of steps
        # torch pins what it copies to the host without waiting
        is_pinned = asks_for_pinned or (is_move and kwargs.get("non_blocking", False))
        out = torch.empty_like(source, dtype=kwargs.get("dtype"))
        self.count(out.untyped_storage(), out.nbytes, "pinned" if is_pinned else "host")
        if is_move and not self.lies_on_host(args):
            note_kernel("copy", bus=out.nbytes)
        return out

    def lies_on_host(self, args):
        """Whether the first tensor among the arguments of an operator stands for host memory."""
        first = next(flat(args), None)
        return first is not None and id(storage_of(first)) in self.host_ids

    def result_of(self, func, args, kwargs):
        """-> (func(*args, **kwargs), its Work). Most operators on the meta device are Python functions that
        take 0.1 ms. FORMS has the form of their results: plans are three times as fast."""
        if func._opname == "_grouped_mm":  # which the meta device has only for bf16
            a, b, stops = args[:3]
            out = a.new_empty(len(a), b.shape[-1])  # where b is a stack
            if b.dim() == 2:
                out = a.new_empty(len(stops), *out.shape)
            return out, work_of(func, args, out)
        if func._schema.is_mutable and len(func._schema.returns) == 1:
            written = kwargs.get("out", args[0])  # and returned
            if written.is_meta:
                return written, work_of(func, args, written)
        key = func, form_of(args), form_of(tuple(kwargs.items()))
        if key in FORMS:
            shape, strides, dtype, work = FORMS[key]
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta"), work
        out = func(*args, **kwargs)
        work = work_of(func, args, out)
        # new memory: some operators return a view, and nothing says so
        if isinstance(out, torch.Tensor) and out.is_meta and id(out.untyped_storage()) not in self.sizes:
            FORMS[key] = out.shape, out.stride(), out.dtype, work
        return out, work

    def see(self, out, fused=False, on_host=False):
        """Counts what an operator has returned. If that is fused, it has only the memory that was there."""
        for t in flat([out]):
            storage = t.untyped_storage()
            if not t.is_meta or id(storage) in self.host_ids:
                continue
            n_bytes = self.sizes.get(id(storage), 0) if fused else storage.nbytes()
            self.count(storage, n_bytes, "host" if on_host and id(storage) not in self.sizes else "gpu")
            self.peaks[self.phase] = max(self.peaks[self.phase], self.alive)

    def count(self, storage, n_bytes, where="gpu"):
        """From here on a storage, which may be new, has so many bytes: on the "gpu", "host" or "pinned"."""
        name = id(storage)
        if name in self.sizes:
            self.forget(name)
        else:
            weakref.finalize(storage, self.forget, name)
        if where == "pinned" and n_bytes:
            # torch's allocator rounds up. pinned_max_round_threshold_mb, which ends that, may overflow
            # buffers (torch 2.13, pytorch #192722).
            n_bytes = 1 << (n_bytes - 1).bit_length()
        self.sizes[name] = n_bytes
        if where == "gpu":
            self.alive += n_bytes
        else:
            self.host_ids.add(name)
            self.host += n_bytes

    def forget(self, name):
        """A storage is gone."""
        n_bytes = self.sizes.pop(name)
        if name in self.host_ids:
            self.host_ids.remove(name)
            self.host -= n_bytes
        else:
            self.alive -= n_bytes

    def move(self, param, where):
        """All of this rank's rows of a parameter are there from here on: "gpu", "host" or "pinned"."""
        storage = storage_of(param)
        self.count(storage, storage.nbytes(), where)


def storage_of(tensor):
    """The memory of a tensor, of a DTensor this rank's."""
    return (tensor.to_local() if nf4.is_sharded(tensor) else tensor).untyped_storage()


def form_of(value):
    """What the form of an operator's result depends on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(form_of, value))
    return type(value), value  # 1 and 1.0 are equal, and make integers and floats


@dataclasses.dataclass(eq=False)  # compared by identity: sums of many calls are quick
class Work:
    """What a GPU does in a call of an operator."""

    kernel: tuple  # (operator, last dimension of its result)
    # {unit: number}: launches, flops, bytes, bus and link, bytes to the host and to other ranks, and length,
    # FLOP of attention for each token that documents are long
    amounts: dict
    is_fused: bool = False  # in compiled code, see is_fused()


NOTHING = Work((), {})


def work_of(func, args, out):
    """-> Work. A kernel reads its arguments and writes its result. A product a [..., rows, inner] @
    b [..., inner, columns] has a and b after its other arguments; float32 is half as fast, in TF32."""
    name = func._opname
    if FREE.search(name):
        return NOTHING
    read = [t for t in flat(args) if t.is_meta]
    made = [t for t in flat([out]) if t.is_meta]
    if not (read or made):
        return NOTHING
    if func.namespace == "c10d":
        return Work((name,), {"link": max(t.nbytes for t in read + made)})
    amounts = {"launches": 1}
    if name in READ_AS_MUCH:
        read = [*made, *read[1:]]
    elif func is nf4.fast_weight:
        read = read[:2]  # the third one tells the dtype
        amounts["launches"] += COMPILED_CALL
    elif name.endswith(("mm", "mm_")):
        a, b = [t for t in read if t.dim() > 1][-2:]
        amounts["flops"] = 2 * a.numel() * b.shape[-1] * max(1, a.itemsize // 2)
    amounts["bytes"] = sum(t.numel() * t.itemsize for t in read + made)
    return Work((name, *(made or read)[0].shape[-1:]), amounts, is_fused(func, args, out))


def note_kernel(name, launches=1, **amounts):
    """Adds work that no operator tells of. Tests run stand-ins outside of kernels_on_paper(), too."""
    if LiveBytes.now:
        LiveBytes.now.add_work(Work((name,), {"launches": launches, **amounts}))


def flat(values):
    """The tensors among some arguments."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from flat(value)


def shards_of(values):
    """This rank's rows of the DTensors among some arguments."""
    return [t.to_local().data for t in flat(values) if nf4.is_sharded(t)]


def is_sum_of_gradients(func, args):
    """Whether autograd adds up two gradients of one tensor. On a GPU it adds the second one to the first if
    nothing else holds that; while a mode sees its operators it always makes a third tensor."""
    if func is not ATEN.add.Tensor or torch.is_grad_enabled():  # it is enabled while a block is recomputed
        return False
    a, b = args
    are_alike = isinstance(b, torch.Tensor) and a.shape == b.shape
    return are_alike and n_holders(a.untyped_storage()) == 2  # the tensor, and Python's object of the storage


def n_holders(storage):
    """How many objects hold a storage."""
    return torch._C._storage_Use_Count(storage._cdata)


def is_fused(func, args, out):
    """Whether a result in compiled code takes no memory: Inductor fuses what makes it with what reads it, and
    the backward computes it again. So it is for what is made of one tensor as large, like SiLU of gate, and
    for a product of two, which the backward needs anyway; a sum of two would need both.
    tests/test_compile.py compares this rule with torch's partitioner."""
    if func.namespace != "aten" or func._opname in PRODUCTS or not isinstance(out, torch.Tensor):
        return False
    if func is ATEN.mul.Tensor:
        return True
    return sum(isinstance(t, torch.Tensor) and t.shape == out.shape for t in args) == 1


def compile_on_paper(live, function, **_):
    """torch.compile(). What the function returns is in memory, fused or not."""

    def run(*args):
        live.is_compiled = live.has_compiled = True
        try:
            out = function(*args)
        finally:  # a recomputation leaves by an exception
            live.is_compiled = False
        live.see(out)
        # what it returns is written, and made of about two tensors as large
        note_kernel("compiled", COMPILED_CALL, bytes=sum(3 * t.nbytes for t in flat([out])))
        return out

    return run


class NormOnPaper(torch.autograd.Function):
    """aten::_fused_rms_norm (ATen/native/cuda/layer_norm_kernel.cu): keeps its input and a float32 a row."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        note_kernel("norm", bytes=3 * x.nbytes)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        return torch.zeros_like(x), grad_weight


class AttentionOnPaper(torch.autograd.Function):
    """FlashAttention, and the memory-efficient kernel in float32 and on old cards (flash_attn/flash_api.cpp
    and mem_eff_attention/kernel_backward.h in aten/src/ATen/native/transformers/cuda). Both keep q, k, v, the
    output and the float32 logsumexp, and add up dq in float32, the latter from sm_70 on."""

    @staticmethod
    def forward(ctx, q_BHTK, k_BGTK, v_BGTK, mask=None, n_documents=0):
        B, H, T, K = q_BHTK.shape
        ctx.n_padded = T + 128 * n_documents
        out_BHTK = q_BHTK.new_zeros(B, T, H, K).transpose(1, 2)
        logsumexp = q_BHTK.new_empty(B, H, T, dtype=torch.float32)
        # two products, and a token sees half of its document
        note_kernel("attention", length=2 * q_BHTK.numel())
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, out_BHTK, logsumexp, mask)
        return out_BHTK

    @staticmethod
    def backward(ctx, grad_BHTK):
        q, k, v, _out, logsumexp, _mask = ctx.saved_tensors  # each is alive until this returns
        note_kernel("attention", launches=3, length=5 * q.numel())
        grads = [torch.zeros_like(t) for t in (q, k, v)]
        # sums of out * grad, and dq: they are alive until this returns, too
        B, H, _, K = q.shape
        scratch = [logsumexp.new_zeros(B, H, ctx.n_padded), logsumexp.new_zeros(B, H, ctx.n_padded, K)]
        if q.shape[1] != k.shape[1]:  # FlashAttention makes dk and dv of every query head first
            scratch += [torch.zeros_like(q), torch.zeros_like(q)]
        return (*grads, None, None)


def varlen_on_paper(q_NHK, k_NGK, v_NGK, bounds, *_, **__):
    """What flash_attention() returns. Documents one after another are one row here, but the backward has
    room for 128 tokens more of each (mha_varlen_bwd() in flash_api.cpp)."""
    qkv = [t[None].transpose(1, 2) for t in (q_NHK, k_NGK, v_NGK)]
    return AttentionOnPaper.apply(*qkv, None, len(bounds) - 1).transpose(1, 2)[0]


def has_flash_on_paper(q):
    """runs_flash_attention() and shares_key_heads(). Cards without FlashAttention (Volta, Turing) need more
    memory."""
    if LiveBytes.has_flash is None:
        return q.dtype is torch.bfloat16
    return LiveBytes.has_flash and q.dtype is not torch.float32


def first_of(cut, n=1):
    """A function that cuts something into pieces, of which only the first n run: no other piece is larger.
    The last of these counts, as work, for all that are left out, too."""

    def first(*args, **kwargs):
        pieces = list(cut(*args, **kwargs))
        once, stand_in = pieces[: n - 1], pieces[n - 1 : n]
        yield from once
        with repeated(len(pieces) - len(once)):
            yield from stand_in

    return first


@contextlib.contextmanager
def repeated(n):
    """A context whose work a GPU does n times."""
    before = LiveBytes.times
    LiveBytes.times = before * n
    try:
        yield
    finally:
        LiveBytes.times = before


class Between(torch.autograd.Function):
    """Stands for the pieces of a loop between the first and the last one. It runs none, but allocates their
    results, what checkpoints save for each (`carried`), and their gradients. So peaks are right: the last
    piece runs beside all results, and the backward of the first one, which is last, beside all gradients.

    In the backward comes the last piece, once; then Between, which raises the factor of what follows to
    n + 1; then the first piece; and when that has its last gradient, end_repeats()."""

    @staticmethod
    def forward(ctx, n, results, carried, n_bytes, _, *tensors):
        ctx.n = n
        ctx.left = torch.empty(n_bytes, dtype=torch.uint8, device=META)
        ctx.save_for_backward(*tensors, *[t.new_empty(n - 1, *t.shape) for t in carried])
        return tuple(torch.empty(shape, dtype=dtype, device=META) for shape, dtype in results)

    @staticmethod
    def backward(ctx, *_):
        LiveBytes.times *= ctx.n + 1  # the first piece is next
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[5:])
        return None, None, None, None, None, *(torch.empty_like(t) if needs else None for t, needs in wanted)


def between(n, results, carried, pieces, first, n_bytes=0):
    """-> what n pieces return. results: those of the first piece, whose inputs are `first`. n_bytes: what the
    pieces leave in their graph, but not as saved tensors, such as the routes of experts."""
    shapes = [((len(pieces[0]), *t.shape[1:]), t.dtype) for t in results]
    shapes += [(t.shape, t.dtype) for t in carried]
    # parameters may be all that is trained
    marker = torch.empty(0, device=META, requires_grad=torch.is_grad_enabled() and results[0].requires_grad)
    out = Between.apply(n, shapes, carried, n_bytes, marker, *carried, *pieces)
    inputs = [t for t in first if t.requires_grad]
    if out[0].requires_grad and inputs:  # else the next phase ends what the backward begins
        # the backward of the first piece has ended when the gradient of its last input is there
        inputs[-1].register_hook(functools.partial(end_repeats, n + 1))
    return out


def end_repeats(n, _):
    LiveBytes.times = max(1, LiveBytes.times // n)


def ends_of(n_tokens, size):
    """-> [tokens of the first piece of a loop, of all between, of the last one], number of pieces between."""
    n = nf4.ceil_div(n_tokens, size) - 2
    return [size, n * size, n_tokens - (n + 1) * size], n


FEW = 10  # pieces, which all run: what is left out would be up to 3 % of a small model


def segments_on_paper(run_all, mix, size, tokens, tail_JX, state_HKP, w_XJ):
    """run_all, which is mix_segments(), but only the first and the last of many segments run."""
    sizes, n = ends_of(len(tokens[0]), size)
    if n + 2 < FEW:
        return run_all(mix, size, tokens, tail_JX, state_HKP, w_XJ)
    first, middle, last = zip(*(t.split(sizes) for t in tokens))
    with repeated(n + 1):
        out, *carried = mix(*first, tail_JX, state_HKP, w_XJ)
    out_between, *carried = between(n, [out], carried, middle, first)
    out_last, *carried = mix(*last, *carried, w_XJ)
    return torch.cat([out, out_between, out_last]), *carried


class TilesOnPaper(lm.Tiles):
    """Only the first and the last of many tiles run."""

    def cut(self, *inputs):
        sizes, self.n = ends_of(inputs[0].shape[:2].numel(), self.size)
        return list(zip(*(t.flatten(0, 1).split(sizes) for t in inputs)))

    def __iter__(self):
        before = LiveBytes.now.alive
        with repeated(self.n + 1):
            yield 0
        self.left = LiveBytes.now.alive - before - self.n_bytes
        yield from (1, 2)

    def run(self, i):
        if i == 1:
            first, middle, _ = self.read_inputs()
            return between(self.n, self.results, [], middle, first, self.n * max(self.left, 0))
        out = super().run(i)
        # of whole storages: a result may be a view
        storages = {id(t.untyped_storage()) for t in out}
        self.n_bytes = sum(LiveBytes.now.sizes.get(storage, 0) for storage in storages)
        # without memory
        self.results = [torch.empty_like(t[:0], requires_grad=t.requires_grad) for t in out]
        return out


def tiles_on_paper(all_tiles, function, size, *inputs):
    """all_tiles, which is Tiles, or TilesOnPaper if there are many."""
    is_long = inputs[0].shape[:2].numel() > (FEW - 1) * size
    return (TilesOnPaper if is_long else all_tiles)(function, size, *inputs)


def once_for_each_form(update_):
    """CompactAdamW.update_(), which is run for the first weight of each form. The update of another one needs
    as much memory beside what is there, and is as much work."""

    def update_on_paper_(optimizer, p, lr, weight_decay):
        live = LiveBytes.now
        tensors = [nf4.local(t).rows for t in (p, p.grad, *optimizer.state[p].values()) if t.dim()]
        form = tuple(map(form_of, tensors)), live.lies_on_host(tensors)
        if form not in live.updates:
            phase = live.phase
            with repeated(1):
                live.begin(form)
                update_(optimizer, p, lr, weight_decay)
                live.updates[form] = live.peaks[form] - live.alive, live.work[form]
                live.begin(phase)
        n_bytes, work = live.updates[form]
        live.peaks[live.phase] = max(live.peaks[live.phase], live.alive + n_bytes)
        live.work_in_phase.update(work)

    return update_on_paper_


# (module, name of a function in it, stand-in)
ON_PAPER = [
    (F, "rms_norm", lambda x, shape, weight=None, eps=None: NormOnPaper.apply(x, weight)),
    (F, "scaled_dot_product_attention",
     lambda q, k, v, attn_mask=None, **_: AttentionOnPaper.apply(q, k, v, attn_mask)),
    (lm, "flash_attention", lambda: varlen_on_paper),
    (lm, "runs_flash_attention", has_flash_on_paper),
    (lm, "shares_key_heads", has_flash_on_paper),
    (lm, "mix_segments", functools.partial(segments_on_paper, lm.mix_segments)),
    (lm, "Tiles", functools.partial(tiles_on_paper, lm.Tiles)),
    (lm, "chunk_starts", first_of(lm.chunk_starts, 2)),  # the second one adds to the gradient of the head
    (lm, "chunk_by_chunk", first_of(lm.chunk_by_chunk)),
    (nf4, "bands", first_of(nf4.bands)),
    (nf4, "regions", first_of(nf4.regions)),
    (nf4.CompactAdamW, "update_", once_for_each_form(nf4.CompactAdamW.update_)),
]


@contextlib.contextmanager
def kernels_on_paper(has_flash=None):
    """A context in which stand-ins are in the place of kernels -> the LiveBytes that counts meanwhile."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        """torch calls it for each operator."""

        # else operators pass through torch.compile's wrapper: plans are a tenth slower
        _should_skip_dynamo = classmethod(lambda cls: False)

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return live.run(func, types, args, dict(kwargs or {}))

    live = LiveBytes()
    resize_ = torch.UntypedStorage.resize_
    to = torch.Tensor.to
    backward = torch.Tensor.backward

    def resize_on_paper_(storage, n_bytes):
        """What RunOnce and FSDP2 call, and no operator says so."""
        resize_(storage, n_bytes)
        live.count(storage, n_bytes)

    def to_on_paper(t, *args, **kwargs):
        """torch copies nothing to a device where a tensor is already, and all are on one device here."""
        target = args[0] if args else kwargs.get("device")
        out = to(t, *args, **kwargs)
        if isinstance(target, torch.device) and target == META and live.lies_on_host([out]):
            out = torch.empty(t.shape, dtype=t.dtype, device=META)
            note_kernel("copy", bus=out.nbytes)
        return out

    def to_empty_on_paper(model, device):
        """The memory of what is on the meta device is counted elsewhere, and not allocated."""
        for p in model.parameters():
            live.move(p, "host" if torch.device(device) == CPU else "gpu")
        return model

    def backward_on_paper(loss):
        live.in_backward = True
        backward(loss)
        live.in_backward = False
        live.after_backward()

    calls = [
        *ON_PAPER,
        (LiveBytes, "now", live),
        (LiveBytes, "times", 1),
        (LiveBytes, "has_flash", has_flash),
        (torch, "compile", functools.partial(compile_on_paper, live)),
        (torch.UntypedStorage, "resize_", resize_on_paper_),
        (torch.Tensor, "to", to_on_paper),
        (torch.Tensor, "backward", backward_on_paper),
        (nn.Module, "to_empty", to_empty_on_paper),
    ]
    # Python's collector frees what refers to itself whenever it runs: without it, traces are alike.
    collects = gc.isenabled()
    gc.disable()
    try:
        with replaced(calls), Mode():
            yield live
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def replaced(calls):
    """A context with stand-ins in the place of `calls`: (module, name in it, stand-in)."""
    with contextlib.ExitStack() as originals:
        for place, name, stand_in in calls:
            originals.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, stand_in)
        yield


# ---- a step on the meta device

class Phase(NamedTuple):
    """What a step does between two calls of Watch.begin()."""

    n_forward: int  # the number of the model's forward in this step
    direction: str  # forward, backward or update
    module: str  # one of TITLES
    block: int = -1  # the number of a block


# bytes that are counted when a phase begins: all on the GPU, all in host memory, and gradients among them
COUNTED = "gpu", "host", "gradients", "host gradients"


class Trace(NamedTuple):
    """Bytes and work of a step. Its phases are in the order of time."""

    starts: dict  # {Phase: Counter of COUNTED}
    growth: dict  # {Phase: Counter of COUNTED: how much more there is when the next one begins}
    peaks: dict  # {Phase: the most bytes on the GPU at once}
    work: dict  # {Phase: Counter {(kernel, unit): amount}}, see LiveBytes.work
    # {number of a block, or -1: Counter {("gpu" or "host", kind): bytes}} of weights and optimizer
    owned: dict


def bytes_by_kind(step, place):
    """-> Counter {kind: bytes} of weights and optimizer on the "gpu" or in "host" memory."""
    kinds = Counter()
    for of_block in step.owned.values():
        kinds.update({kind: n_bytes for (where, kind), n_bytes in of_block.items() if where == place})
    return kinds


TRACES = {}  # {what a trace depends on: Trace}


class Unplanned(Exception):
    """A step cannot run on paper."""


def trace(run, policy):
    """Runs a step on the meta device -> Trace, once for the same arguments. It needs private names of torch
    (tests/private_names.py), and a run does not. So any error here is Unplanned, which ends no run."""
    # `policy` has these two
    flags = {**vars(run.args), "activation_checkpointing": None, "resident_blocks": None}
    key = repr((flags, *run[1:], policy))
    if key not in TRACES:
        try:
            TRACES[key] = run_on_paper(run, policy)
        except Exception as error:
            newest = ".".join(map(str, TESTED_TORCH))
            raise Unplanned(f"torch {torch.__version__} does not let oomph plan a step, which works up to "
                            f"torch {newest} ({type(error).__name__}: {error})") from error
    return TRACES[key]


def run_on_paper(run, policy):
    """Makes a model on the meta device, and runs a step of it there -> Trace."""
    args = run.args
    # all that build() and train_step() ask of Ranks
    limit = timedelta(seconds=args.timeout)
    ranks = argparse.Namespace(world=run.world, rank=0, device=torch.device("meta"), step_limit=limit)
    n_batches = min(args.grad_accum, 2)  # a third one changes nothing
    with on_paper(run) as live:
        trainer = build(lm.on_meta(run.config, args), run, policy, ranks, load_weights=lambda model: None)
        # fully_shard() on a mesh of two dimensions leaves a cycle of references that holds a block's weights
        gc.collect(0)  # what is younger than on_paper()
        watch = Watch(live, trainer)
        train_step(trainer, [batch_on_paper(run)] * n_batches, 1)
        owned = owned_bytes(trainer, live)
    work = {phase: Counter() for phase in watch.starts}
    for phase, amounts in work.items():
        for done, times in live.work[phase].items():
            for unit, amount in done.amounts.items():
                amounts[done.kernel, unit] += times * amount
    growth = {}
    for phase, following in itertools.pairwise(watch.starts):
        growth[phase] = Counter(watch.starts[following])
        growth[phase].subtract(watch.starts[phase])
    return Trace(watch.starts, growth, {phase: live.peaks[phase] for phase in watch.starts}, work, owned)


def owned_bytes(trainer, live):
    """-> Trace.owned. What blocks share, a slot of StreamedWeights for example, belongs to none of them."""
    kinds = {}  # {id of a storage: kind}
    blocks = {}  # {id of a storage: {numbers of blocks, or -1}}
    for name, p in trainer.model.named_parameters():
        block = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
        kind = "adapters" if "lora_" in name else "weights"
        if p.dtype is torch.uint8:
            kind = "quantized weights"
        # the number of steps may be a tensor on the CPU
        state = [t for t in trainer.optimizer.state.get(p, {}).values() if t.is_meta]
        for kind_of, tensors in (kind, [p, *trainer.host_pages.get(p, ())]), ("optimizer", state):
            for rows in nf4.rows_of(tensors):
                storage = id(rows.untyped_storage())
                kinds[storage] = kind_of
                blocks.setdefault(storage, set()).add(block)
    owned = {block: Counter() for block in range(-1, len(trainer.model.model.layers))}
    for storage, kind in kinds.items():
        block = min(blocks[storage]) if len(blocks[storage]) == 1 else -1
        owned[block]["host" if storage in live.host_ids else "gpu", kind] += live.sizes[storage]
    return owned


class Watch:
    """Begins a phase of LiveBytes at the embedding, each block, the head with the norm below it, the gradient
    of the output of each of these, the end of the backward, and the update."""

    def __init__(self, live, trainer):
        self.live = live
        self.trained = trainer.trained
        self.n_forwards = 0
        self.starts = {}  # see Trace
        model = trainer.model
        self.add_hooks(model, model.model.embed_tokens, "embedding")
        for i, block in enumerate(model.model.layers):
            self.add_hooks(block, block, "block", i)
        self.add_hooks(model.model.norm, model, "head")  # from the last norm to the result of the model
        if not trainer.in_backward:
            live.after_backward = functools.partial(self.begin, "backward", "update")  # norms, exchanges
            # not by a hook: a fork's optimizer may have none
            trainer.optimizer.step = functools.partial(self.update, trainer.optimizer.step)

    def add_hooks(self, begins_at, ends_at, *phase):
        """A phase lasts from the call of one module to the result of another one, or of the same."""

        def before(*_):
            if phase[0] == "embedding":
                self.n_forwards += 1
            self.begin("forward", *phase)

        def after(_, __, x):
            if x.requires_grad:
                x.register_hook(lambda _: self.begin("backward", *phase))

        # before FSDP2's hooks: what FSDP2 gathers for a module counts as the module's
        begins_at.register_forward_pre_hook(before, prepend=True)
        ends_at.register_forward_hook(after, prepend=True)

    def update(self, step):
        self.begin("update", "update")
        step()

    def begin(self, *phase):
        live = self.live
        start = Counter(gpu=live.alive, host=live.host)
        for rows in nf4.rows_of(p.grad for p in self.trained if p.grad is not None):
            storage = id(rows.untyped_storage())
            if storage in live.host_ids:
                start["host gradients"] += live.sizes[storage]
            else:
                start["gradients"] += rows.nbytes
        phase = Phase(self.n_forwards, *phase)
        self.starts[phase] = start
        live.begin(phase)


# ---- the step of all blocks, from a trace of few

def extrapolate(run, policy):
    """-> Trace of a step of all blocks, from one of few blocks for each kind of block in the policy: some at
    the bottom, a period that repeats, and some at the top. If it does not repeat, all blocks are traced."""
    n_layers = run.config.num_hidden_layers
    period = period_of(run.config)
    #   the model   0 .. below - 1 | a period, 1 + n_more times | above
    #   traced      0 .. below - 1 | a period, once             | above
    #
    # Neighbors of a block are in memory with it, and copies to and from the host are two blocks ahead: below
    # the first block that is as all others there are two, or three where weights are streamed. If that does
    # not explain the numbers, the first blocks may be without adapters.
    for below, above in [(2, 1), (2, 2), (3, 2), (2 + period, 2)]:
        if (run.args.offload and above == 1) or (run.streams and below == 2):
            continue
        n_more = (n_layers - below - above) // period - 1
        if n_more < 1:
            break
        n_low = below + period
        top = range(n_low + n_more * period, n_layers)
        numbers = [*range(n_low), *top]
        few = {kept: trace(of_blocks(run, numbers), BlockPolicy((kept,) * len(numbers), policy.segment))
               for kept in set(policy.blocks)}
        if all(repeats(step, n_low - 1, period, n_more) for step in few.values()):
            repeated = [*range(below, n_low)] * n_more
            step = joined(few, policy.blocks, [*range(n_low), *repeated, *range(n_low, len(numbers))])
            if not run.args.fused_adamw:
                # torch's other AdamW has temporaries of all weights at once: each further period adds to the
                # update what one more does in a trace
                kept = policy.blocks[-1]
                more = [*range(n_low + period), *top]
                larger = trace(of_blocks(run, more), BlockPolicy((kept,) * len(more), policy.segment))
                for phase in step.peaks:
                    if phase.direction == "update":
                        step.peaks[phase] += n_more * (rise_of(larger, phase) - rise_of(few[kept], phase))
            return step
    return trace(run, policy)


def rise_of(step, phase):
    """How many bytes more a phase needs than there are when it begins."""
    return step.peaks[phase] - step.starts[phase]["gpu"]


def period_of(config):
    """After how many blocks the types of blocks repeat: one, or four in a hybrid."""
    n_layers = config.num_hidden_layers
    lists = lists_of(config).values()
    return next(n for n in range(1, n_layers + 1) if all(values[n:] == values[:-n] for values in lists))


def lists_of(config):
    """{name: list} of those fields of a config that have an entry for each block."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in fields.items() if isinstance(value, list)}


def of_blocks(run, numbers):
    """-> RunSpec of a model that has only these blocks."""
    entries = {name: [values[i] for i in numbers] for name, values in lists_of(run.config).items()}
    return run._replace(config=dataclasses.replace(run.config, num_hidden_layers=len(numbers), **entries))


def repeats(step, block, period, n_more):
    """Whether `block` adds as much as the one a period below it, so that n_more periods will, too. Not if a
    fork shards blocks together, changes every other one, or has other bytes before the step."""
    tolerance = 0.001 * max(step.peaks.values())
    unowned = next(iter(step.starts.values()))["gpu"] - bytes_by_kind(step, "gpu").total()
    if unowned > 2 * tolerance:  # a batch's tokens are up to 0.12 % of a small model's peak in long rows
        return False

    def amounts_of(i):
        """{what: bytes of block i}: n_more times what adds up from period to period."""
        n_owned = sum(n for (place, _), n in step.owned[i].items() if place == "gpu")
        amounts = Counter({"owned": n_more * n_owned})
        for phase in (phase for phase in step.starts if phase.block == i):
            for what in COUNTED:
                amounts[phase[:2], what] = n_more * step.growth[phase][what]
            amounts[phase[:2], "rise"] = rise_of(step, phase)
            amounts[phase[:2], "bus"] = sum(n for (_, unit), n in step.work[phase].items() if unit == "bus")
        return amounts

    differences = amounts_of(block)
    differences.subtract(amounts_of(block - period))
    return max(map(abs, differences.values())) <= tolerance


def joined(few, blocks, traced_as):
    """-> Trace of all blocks: block i, which keeps blocks[i], is as block traced_as[i] in few[blocks[i]]. A
    phase starts with the bytes at the start of the phase before it, and the growth of that one."""
    bottom = few[blocks[0]]
    owned = {i: few[kept].owned[twin] for i, (kept, twin) in enumerate(zip(blocks, traced_as))}
    step = Trace({}, {}, {}, {}, {-1: few[blocks[-1]].owned[-1], **owned})
    more = {where: bytes_by_kind(step, where).total() - bytes_by_kind(bottom, where).total()
            for where in ("gpu", "host")}
    start = Counter(next(iter(bottom.starts.values())))
    start.update(more)
    n_forwards = max(phase.n_forward for phase in bottom.starts)
    follows_backward = False
    for (n_forward, direction, module), phases in itertools.groupby(bottom.starts, lambda phase: phase[:3]):
        if module == "block":
            numbers = range(len(blocks)) if direction == "forward" else reversed(range(len(blocks)))
            phases = [Phase(n_forward, direction, module, i) for i in numbers]
        for phase in phases:
            twin = phase
            kept = blocks[-1 if module == "head" else 0]
            if module == "block":
                twin = phase._replace(block=traced_as[phase.block])
                kept = blocks[phase.block]
            if twin not in few[kept].starts:  # no backward, because no adapter is in a block below
                continue
            if module == "update" and n_forward == n_forwards:  # all else is free, whenever it was freed
                gradients = start["gradients"] - bottom.starts[phase]["gradients"]
                start["gpu"] = bottom.starts[phase]["gpu"] + more["gpu"] + gradients
            if follows_backward:  # which has freed what --offload activations had on the host
                gradients = start["host gradients"] - bottom.starts[phase]["host gradients"]
                start["host"] = bottom.starts[phase]["host"] + more["host"] + gradients
            follows_backward = (direction, module) == ("backward", "update")
            step.starts[phase] = Counter(start)
            step.peaks[phase] = start["gpu"] + rise_of(few[kept], twin)
            step.work[phase] = few[kept].work[twin]
            if module == "update":
                step.work[phase] = work_of_update(few[kept], step, twin)
            start.update(few[kept].growth.get(twin, {}))
    return step


def work_of_update(few, step, phase):
    """The work of an update of all blocks, from that of few: it grows with the states of the optimizer."""

    def state_bytes(each):
        return sum(bytes_by_kind(each, where)["optimizer"] for where in ("gpu", "host"))

    n_few = len(few.owned) - 1
    growth = (state_bytes(step) or 1) / (state_bytes(few) or 1)
    amounts = Counter()
    for (kernel, unit), n in few.work[phase].items():
        times = growth
        if unit == "launches":  # for each weight, or few that read all weights
            times = (len(step.owned) - 1) / n_few if n >= n_few else 1
        amounts[kernel, unit] = round(times * n)
    return amounts


# ---- the time of a step

class Card(NamedTuple):
    """A GPU, by its datasheet."""

    gb: int  # as its name has it
    gib: float  # what CUDA reports
    # without what follows no time is predicted
    tflops: float = 0  # dense products in bf16, or fp16 without it, which add up in float32
    gb_per_s: float = 0  # memory bandwidth
    bus: float = 0  # GB/s to the host, each way
    link: float = 0  # GB/s to other cards, each way
    attention: float = 0  # TFLOP/s of FlashAttention 2: measured on Hopper, guesses for the others
    has_bf16: bool = True  # and FlashAttention with it


# GiB are measured on an H100 and an H200; the others are reports of users, or estimates: 0.96 to 0.98 of the
# name, 6 % less with ECC. TFLOP/s and GB/s are the vendor's, dense, written down from memory: those of twelve
# cards were compared with published tables (tests/LOG.md).
CARDS = {  # see cards_named()
    "Quadro RTX 5000": Card(16, 15.5, has_bf16=False),
    "Quadro RTX 6000": Card(24, 23.5, has_bf16=False),
    "Quadro RTX 8000": Card(48, 47.4, has_bf16=False),
    "Titan RTX": Card(24, 23.5, has_bf16=False),
    "RTX 2060": Card(6, 5.8, 26, 336, 12, 12, 0, has_bf16=False),
    "RTX 2060 Super": Card(8, 7.7, 29, 448, 12, 12, 0, has_bf16=False),
    "RTX 2070": Card(8, 7.7, 30, 448, 12, 12, 0, has_bf16=False),
    "RTX 2070 Super": Card(8, 7.7, 36, 448, 12, 12, 0, has_bf16=False),
    "RTX 2080": Card(8, 7.7, 40, 448, 12, 12, 0, has_bf16=False),
    "RTX 2080 Super": Card(8, 7.7, 45, 496, 12, 12, 0, has_bf16=False),
    "RTX 2080 Ti": Card(11, 10.7, 54, 616, 12, 12, 0, has_bf16=False),
    "RTX 3050 6GB": Card(6, 5.8, 14, 168, 12, 12, 9),
    "RTX 3050 8GB": Card(8, 7.7, 18, 224, 12, 12, 12),
    "RTX 3060": Card(12, 11.6, 26, 360, 25, 25, 18),
    "RTX 3060 Ti": Card(8, 7.7, 32, 448, 25, 25, 22),
    "RTX 3070": Card(8, 7.7, 41, 448, 25, 25, 28),
    "RTX 3070 Ti": Card(8, 7.7, 43, 608, 25, 25, 30),
    "RTX 3080 10GB": Card(10, 9.7, 60, 760, 25, 25, 41),
    "RTX 3080 12GB": Card(12, 11.6, 61, 912, 25, 25, 42),
    "RTX 3080 Ti": Card(12, 11.6, 68, 912, 25, 25, 47),
    "RTX 3090": Card(24, 23.6, 71, 936, 25, 25, 50),
    "RTX 3090 Ti": Card(24, 23.6, 80, 1008, 25, 25, 55),
    "RTX 4060": Card(8, 7.7, 30, 272, 12, 12, 21),
    "RTX 4060 Ti 8GB": Card(8, 7.7, 44, 288, 12, 12, 31),
    "RTX 4060 Ti 16GB": Card(16, 15.6, 44, 288, 12, 12, 31),
    "RTX 4070": Card(12, 11.6, 58, 504, 25, 25, 42),
    "RTX 4070 Super": Card(12, 11.6, 71, 504, 25, 25, 51),
    "RTX 4070 Ti": Card(12, 11.6, 80, 504, 25, 25, 58),
    "RTX 4070 Ti Super": Card(16, 15.6, 88, 672, 25, 25, 64),
    "RTX 4080": Card(16, 15.6, 97, 717, 25, 25, 70),
    "RTX 4080 Super": Card(16, 15.6, 104, 736, 25, 25, 75),
    "RTX 4090": Card(24, 23.6, 165, 1008, 25, 25, 120),
    "RTX 5060": Card(8, 7.5, 38, 448, 27, 27, 27),
    "RTX 5060 Ti 8GB": Card(8, 7.5, 47, 448, 27, 27, 34),
    "RTX 5060 Ti 16GB": Card(16, 15.4, 47, 448, 27, 27, 34),
    "RTX 5070": Card(12, 11.5, 62, 672, 55, 55, 44),
    "RTX 5070 Ti": Card(16, 15.4, 88, 896, 55, 55, 63),
    "RTX 5080": Card(16, 15.4, 113, 960, 55, 55, 81),
    "RTX 5090": Card(32, 31.3, 209, 1792, 55, 55, 150),
    "A2000 6GB": Card(6, 5.7, 32, 288, 25, 25, 20),
    "A2000 12GB": Card(12, 11.5, 32, 288, 25, 25, 20),
    "A4000": Card(16, 15.5, 77, 448, 25, 25, 47),
    "A4500": Card(20, 19.5, 95, 640, 25, 25, 58),
    "A5000": Card(24, 23.5, 111, 768, 25, 25, 68),
    "A5500": Card(24, 23.5, 136, 768, 25, 25, 84),
    "A6000": Card(48, 47.4, 155, 768, 25, 25, 95),
    "RTX 2000 Ada": Card(16, 15.5, 48, 224, 12, 12, 29),
    "RTX 4000 Ada": Card(20, 19.5, 107, 360, 25, 25, 66),
    "RTX 4500 Ada": Card(24, 23.5, 159, 432, 25, 25, 97),
    "RTX 5000 Ada": Card(32, 31.3, 261, 576, 25, 25, 150),
    "RTX 6000 Ada": Card(48, 47.4, 364, 960, 25, 25, 200),
    "T4": Card(16, 14.6, 65, 320, 12, 12, 0, has_bf16=False),
    "V100 16GB": Card(16, 15.7, 125, 900, 12, 150, 0, has_bf16=False),
    "V100 32GB": Card(32, 31.7, 125, 900, 12, 150, 0, has_bf16=False),
    "A10": Card(24, 22.0, 125, 600, 25, 25, 77),
    "A10G": Card(24, 22.1, 70, 600, 25, 25, 45),
    "A40": Card(48, 44.4, 150, 696, 25, 25, 92),
    "L4": Card(24, 22.0, 121, 300, 25, 25, 67),
    "L40": Card(48, 44.4, 181, 864, 25, 25, 110),
    "L40S": Card(48, 44.4, 362, 864, 25, 25, 200),
    "A100 40GB": Card(40, 39.4, 312, 1555, 25, 300, 190),
    "A100 80GB": Card(80, 79.2, 312, 2039, 25, 300, 190),
    "H20": Card(96, 95.0, 148, 4000, 55, 450, 120),
    "H100": Card(80, 79.2, 989, 3350, 55, 450, 285),
    "H100 PCIe": Card(80, 79.2, 756, 2000, 55, 55, 215),
    "H100 NVL": Card(94, 93.1, 835, 3900, 55, 300, 240),
    "H200": Card(141, 139.8, 989, 4800, 55, 450, 285),
    "GH200": Card(96, 94.5, 989, 4000, 200, 450, 285),
    "B200": Card(180, 178.4, 2250, 8000, 55, 900, 0),
}
# {name: (GB, GiB)} of cards whose other figures were not found in two published tables. A GB10, that of a DGX
# Spark, shares its memory with the host. A notebook's card has less than the desktop's of the same number.
CARDS |= {name: Card(gb, gib) for name, (gb, gib) in {
    "RTX PRO 4000": (24, 23.5), "RTX PRO 4500": (32, 31.3), "RTX PRO 5000 48GB": (48, 47.3),
    "RTX PRO 5000 72GB": (72, 71.0), "RTX PRO 6000": (96, 94.97), "RTX PRO 6000 Max-Q": (96, 94.97),
    "GB10": (128, 119.2),
    "A30": (24, 23.5), "A800 40GB": (40, 39.4), "A800 80GB": (80, 79.2), "H800": (80, 79.2),
    "H200 NVL": (141, 139.8), "GB200": (186, 184.3), "B300": (288, 267.7), "GB300": (288, 276.8),
    "RTX 3050 Laptop 4GB": (4, 3.8), "RTX 3050 Laptop 6GB": (6, 5.8), "RTX 3050 Ti Laptop": (4, 3.8),
    "RTX 3060 Laptop": (6, 5.8), "RTX 3070 Laptop": (8, 7.7), "RTX 3070 Ti Laptop": (8, 7.7),
    "RTX 3080 Laptop 8GB": (8, 7.7), "RTX 3080 Laptop 16GB": (16, 15.4), "RTX 3080 Ti Laptop": (16, 15.4),
    "RTX 4050 Laptop": (6, 5.8), "RTX 4060 Laptop": (8, 7.7), "RTX 4070 Laptop": (8, 7.7),
    "RTX 4080 Laptop": (12, 11.5), "RTX 4090 Laptop": (16, 15.4), "RTX 5050 Laptop": (8, 7.7),
    "RTX 5060 Laptop": (8, 7.7), "RTX 5070 Laptop": (8, 7.7), "RTX 5070 Ti Laptop": (12, 11.5),
    "RTX 5080 Laptop": (16, 15.4), "RTX 5090 Laptop": (24, 23.0),
}.items()}
# what names of devices have beside a card's own words
FILLERS = set("NVIDIA GEFORCE TESLA GENERATION GRAPHICS GPU BLACKWELL WORKSTATION SERVER EDITION ACTIVE DGX "
              "HGX NVL72 SXM SXM2 SXM3 SXM4 SXM5 SXM6 AC HBM2 HBM2E HBM3 HBM3E 480GB".split())
SAME_WORD = {"MOBILE": "LAPTOP", "NOTEBOOK": "LAPTOP", "SPARK": "GB10"}
# A size, a word that may be written together with the next one, a name such as A100 or L40S, or what is left
WORD = re.compile(r"\d+[\W_]?G(?:I?B)?(?![A-Z0-9])|NVIDIA|GEFORCE|TESLA|QUADRO|TITAN|PRO|TI|SUPER|ADA"
                  r"|[A-Z]+\d+(?:[A-Z](?![A-Z]))?|[A-Z]+|\d+")
# Fitted to three rows of tests/LOG.md: what kernels reach of a datasheet, and the host's time for a launch.
# tests/test_time_plan.py has others, which were held out.
PRODUCT_SHARE = 0.76
MEMORY_SHARE = 0.79
LAUNCH_S = 30e-6


def words_of(name):
    """-> {words of a card's name}, and its size as "16GB", however they are spelled: rtx4070TiSuper_16g."""
    # it tells cards apart only in Titan RTX
    text = re.sub(r"RTX[\W_]*(?=PRO|A?\d)", " ", name.upper())
    words = [re.sub(r"^(\d+)[\W_]?G(I?B)?$", r"\1GB", word) for word in WORD.findall(text)]
    return {SAME_WORD.get(word, word) for word in words} - FILLERS


def cards_named(text):
    """-> the names in CARDS that have the words of a device's name ("NVIDIA GeForce RTX 3090") or of what a
    person types ("3090"), and no others. Several if the text leaves out a size that tells them apart."""
    words = words_of(text)
    for own in (words, words - {"PCIE"}):  # H100 PCIe is another card than H100
        found = [name for name, card in CARDS.items()
                 if own - {f"{card.gb}GB"} == words_of(name) - {f"{card.gb}GB"}]
        if found:
            return found
    return []


def card_named(text):
    """-> the name in CARDS of the card that --gpu means. ValueError if it may be none of them, or several."""
    found = cards_named(text)
    if len(found) == 1:
        return found[0]
    models = {word for word in words_of(text) if re.search(r"\d\d", word) and not word.endswith("GB")}
    alike = found or [name for name in CARDS if models & words_of(name)]
    alike = alike or difflib.get_close_matches(text, CARDS, 5)
    expected = f"expected one of {', '.join(alike)}" if alike else "a card that is not in the table"
    raise ValueError(f"--gpu {text}: {expected}; --gpu_gib G plans for G GiB, which is any card")


def card_of(ranks):
    """-> the name in CARDS of this rank's GPU, or None. Of cards with one name it is the one as large."""
    found = cards_named(ranks.device_name)
    if len(found) < 2:
        return found[0] if found else None
    n_bytes = torch.cuda.mem_get_info(ranks.device)[1]
    return min(found, key=lambda name: abs(CARDS[name].gib * GIB - n_bytes))


def time_of_step(run, policy, card, length=None):
    """-> (seconds, those without waits for the host). A pass takes as long as what is busy longest: the GPU,
    the host that launches kernels, the bus or the links; a kernel as its products or its memory. length: of
    the document of an average token, by default a row's."""
    kernels = {}  # {(pass, kernel): {unit: amount}}
    for phase, amounts in extrapolate(run, policy).work.items():
        for (kernel, unit), n in amounts.items():
            kernels.setdefault((phase[:2], kernel), Counter())[unit] += n
    busy = {}  # {pass: {what: seconds}}
    for (one_pass, _), n in kernels.items():
        products_s = n["flops"] / (1e12 * card.tflops * PRODUCT_SHARE)
        attention_s = n["length"] * (length or run.length) / (1e12 * card.attention)
        memory_s = n["bytes"] / (1e9 * card.gb_per_s * MEMORY_SHARE)
        # an update has no autograd, which takes half of the host's time
        launch_s = LAUNCH_S / 2 if "update" in one_pass else LAUNCH_S
        busy.setdefault(one_pass, Counter()).update(
            gpu=max(products_s + attention_s, memory_s), host=n["launches"] * launch_s,
            bus=n["bus"] / (1e9 * card.bus), links=n["link"] / (1e9 * card.link))
    with_host = without_host = 0
    for (_, direction), seconds in busy.items():
        # of several micro-batches two are traced
        times = 1 if direction == "update" else max(1, run.args.grad_accum / 2)
        with_host += times * max(seconds.values())
        without_host += times * max(seconds[what] for what in seconds if what != "host")
    return with_host, without_host


def describe_time(run, policy, name, steps, length):
    """Text: how long a step and all steps take on a card, at least or about, or why that is not known."""
    args = run.args
    unknown = {
        "for such a card": not CARDS[name].attention,
        # torch multiplies them one by one there
        "for experts on cards older than Hopper": run.config.num_experts and "H" not in name,
        "for an optimizer on the CPU": "params" in args.offload and not run.streams,
        "without bf16, --packing and torch's attention":
            args.precision in ("fp16", "fp32") or not args.packing,
        "for windows in longer documents": run.config.sliding_window < (length or run.length),
    }
    if any(unknown.values()):
        return f"no time is predicted {next(why for why in unknown if unknown[why])}"
    with_host, seconds = time_of_step(run, policy, CARDS[name], length)
    bounds = {
        "launch-bound: the CPU cannot launch kernels fast enough": with_host > 1.1 * seconds,
        # a model of 3B takes 22 to 36 % more time
        "small models use the GPU less efficiently": run.config.hidden_size < 4096,
        "the time that GPUs wait for each other is not counted": run.world > 1,
    }
    reasons = "; ".join(why for why in bounds if bounds[why])
    about, up_to = ("at least", "at most ") if reasons else ("about", "")
    n_tokens = args.batch_size * args.grad_accum * run.world // args.sequence_parallel * run.length
    shown = f"{seconds:,.2f} s" if seconds > 0.1 else f"{1000 * seconds:.2g} ms"  # that of a tiny model
    text = f"a step takes {about} {shown} on the {name}, {up_to}{n_tokens / seconds:,.0f} tok/s"
    if steps and steps * seconds > 1:
        text += f", {data.count_of(steps, 'steps')} {about} {timedelta(seconds=round(steps * seconds))}"
    unmeasured = {
        "this card": name not in ("H100", "H200"),
        "Gated DeltaNet": "linear_attention" in run.config.layer_types,
        "full fine-tuning": not args.lora,
        "--dpo": args.dpo,
        "streamed weights": run.streams,
        "a micro-batch below 4,096 tokens": args.batch_size * run.length < 4096,
    }
    what = ", ".join(each for each in unmeasured if unmeasured[each])
    accuracy = f"predicted, not measured: {what}; expect an error of up to about 25 %"
    return f"{text}: {reasons or (accuracy if what else 'predicted, within a tenth')}"


# ---- ranks that are not there

@contextlib.contextmanager
def on_paper(run):
    """kernels_on_paper(), with a group of ranks that are not there if the run has several ranks or FSDP2."""
    calls = [(sys.modules[__name__], "move_", lambda p, device: LiveBytes.now.move(p, "gpu"))]
    has_group = run.args.fsdp2 or run.world > 1
    group = ranks_on_paper(run.world) if has_group else contextlib.nullcontext()
    with kernels_on_paper(run.has_flash) as live, replaced(calls), group:
        yield live


class StreamOnPaper:
    """A stream or an event of the meta device: nothing runs there, so nothing waits."""

    stream_id = device_index = device_type = 0  # by which FSDP2 of torch 2.15 tells streams apart

    def __init__(self, **_):
        pass

    def is_capturing(self):  # torch's optimizers ask
        return False

    def __getattr__(self, name):  # record, wait, ...
        return lambda *_: self


# torch.meta, which torch does not have: FSDP2 and DeviceMesh ask it for what torch.cuda has
TORCH_META = argparse.Namespace(
    Stream=StreamOnPaper, Event=StreamOnPaper, current_stream=StreamOnPaper, stream=contextlib.nullcontext,
    current_device=lambda: 0, device_count=lambda: 1, is_initialized=lambda: True)
GROUP_NAMES = itertools.count(10**9, 10**4)  # those of real groups are small numbers
# torch's tables of process groups
GROUP_TABLES = "_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_pg_to_tag", "_tags_to_pg"
WORLDS = {}  # {number of ranks: {name in torch: the groups that traces share, see ranks_on_paper()}}


@contextlib.contextmanager
def ranks_on_paper(world):
    """A context in which this process is rank 0 of a group whose other ranks are not there, beside the group
    of the run if there is one. tests/private_names.py says what to do where torch lacks one of these names.

    DTensor caches meshes, and their groups, from trace to trace. So all traces of a world have the same
    groups, in tables of their own, because a run that ends empties torch's, and those of names in C++."""
    from torch.distributed import distributed_c10d
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def pin_on_paper(param):
        """FSDPParam.reset_sharded_param(), which does nothing on the meta device."""
        if param.pin_memory:
            LiveBytes.now.move(param.sharded_param, "pinned")

    if world not in WORLDS:
        WORLDS[world] = {name: {} for name in GROUP_TABLES} | {"_world": distributed_c10d._World()}
    calls = [
        *((distributed_c10d, name, groups) for name, groups in WORLDS[world].items()),
        # Ranks name groups by counting them, and only rank 0 may print a plan.
        (distributed_c10d, "_group_count", next(GROUP_NAMES)),
        (torch._C._distributed_c10d, "_set_global_rank", lambda rank: None),  # for log lines of C++
        (sys, "excepthook", sys.excepthook),  # each new group puts a "[rank0]" before all errors
        # FSDP2 asks for it where it has gathered a block that no backward has used
        (torch.accelerator, "current_stream", StreamOnPaper),
        (FSDPParam, "reset_sharded_param", pin_on_paper),
        # these two refuse weights on the meta device
        (FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
        (FSDPParamGroup, "_validate_cpu_offload_params", lambda group: None),
    ]
    with replaced(calls), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP2's, about what a block returns: real runs print it
        torch.meta = TORCH_META
        try:
            if not dist.is_initialized():
                dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
            for group, name in distributed_c10d._pg_names.items():
                torch._C._distributed_c10d._unregister_process_group(name)  # a name that is there is refused
                torch._C._distributed_c10d._register_process_group(name, group)
            yield
        finally:
            del torch.meta


def batch_on_paper(run):
    """-> data.Batch of this rank: run.documents in each row, or as many pairs, and each token supervised."""
    args = run.args
    length = run.length
    n_tokens = args.batch_size * length
    n_padded = nf4.ceil_div(n_tokens, args.sequence_parallel) * args.sequence_parallel  # see Loader.batch()
    has_flash = args.precision != "fp16" if run.has_flash is None else run.has_flash
    runs_flash = has_flash and args.precision != "fp32"
    n_documents = 2 * args.batch_size if args.dpo else args.batch_size
    if runs_flash:  # else they run one after another, which needs the most where a row is one document
        n_documents *= run.documents
    edges = [n_tokens * i // n_documents for i in range(n_documents + 1)]
    if runs_flash and run.documents > 1:  # documents are not of one length
        edges[1] += 1
    pairs = list(itertools.pairwise(edges))
    n_targets = [stop - start for start, stop in pairs]
    if not runs_flash:  # a gap matters, and packed rows have one
        pairs = [(start, stop - 1) for start, stop in pairs]
    spans = data.pack_spans(pairs, n_padded)
    if spans.bounds is not None:
        spans.bounds = torch.empty_like(spans.bounds, device="meta")
    shape = args.batch_size, length
    if args.sequence_parallel > 1:
        shape = 1, n_padded // args.sequence_parallel
    tokens, targets, positions, supervised = torch.empty(4, *shape, dtype=torch.int64, device="meta").unbind()
    return data.Batch(tokens, targets, positions, supervised.flatten(), spans, n_targets)


# ---- what blocks keep: as asked, or as fits

class Kept(NamedTuple):
    """What a block keeps from its forward to its backward, and where its weights are."""

    # Only its input: the backward runs it again. The first blocks, as the last ones' memory is free soonest.
    recomputed: bool = False
    attention: bool = False  # also the output of attention, which does not run again: the last of these
    weights: bool = False  # dequantized NF4 weights, in 16 bits: the last blocks
    # On the GPU, where --offload params moves the frozen weights of other blocks. Those are the last block,
    # and others spread evenly, so that a copy hides behind the resident blocks between two of them, too.
    resident: bool = False


class BlockPolicy(NamedTuple):
    """What each block keeps. Losses do not depend on it: a feature that changes what a recomputed block
    computes has to set --activation_checkpointing in fill_in_flags()."""

    blocks: tuple  # of Kept
    segment: int = lm.SEGMENT  # tokens that Gated DeltaNet mixes at a time

    def count(self, what):
        """Of how many blocks a field of Kept is true."""
        return sum(getattr(kept, what) for kept in self.blocks)

    @property
    def on_host(self):
        """Numbers of the blocks whose frozen weights --offload params has in host memory."""
        return [i for i, kept in enumerate(self.blocks) if not kept.resident]


def policy_of(n_layers, n_recomputed, n_weights_kept=0, n_attention_kept=0, n_resident=0, segment=lm.SEGMENT):
    """-> BlockPolicy of so many blocks each. Kept says which blocks these are."""

    def n_on_host_below(i):
        return i * (n_layers - n_resident) // n_layers

    blocks = [
        Kept(recomputed=i < n_recomputed,
             attention=n_recomputed - n_attention_kept <= i < n_recomputed,
             weights=i >= n_layers - n_weights_kept,
             resident=n_on_host_below(i + 1) == n_on_host_below(i))
        for i in range(n_layers)]
    return BlockPolicy(tuple(blocks), segment)


def blocks_as_asked(run):
    """-> BlockPolicy by the flags, where auto is the least memory: all recomputed, and none resident."""
    n_layers = run.config.num_hidden_layers
    asked, resident = run.args.activation_checkpointing, run.args.resident_blocks
    n_recomputed = {"all": n_layers, "auto": n_layers}.get(asked, asked)
    n_resident = {"all": n_layers, "auto": 0}.get(resident, resident)
    return policy_of(n_layers, min(n_recomputed, n_layers), n_resident=min(n_resident, n_layers))


def plan_run(run, room, steps, length, ranks, argv=()):
    """-> (BlockPolicy, [lines on the memory and the time of a step on a GPU, for rank 0], the same in a few
    words). Collective. A run does not end because of its plan: if a rank cannot trace a step, all take the
    policy that needs the least memory, and the lines say why. steps and length: see describe_time()."""
    policy = blocks_as_asked(run)
    lines = []
    predicted = "nothing"
    problem = None
    try:
        policy = choose_blocks(run, room)
        if ranks.device.type == "cuda" and ranks.rank == 0:
            lines = list(describe_plan(run, policy, room, argv))
            n_bytes = planned_bytes(run, policy)
            predicted = f"{n_bytes / GIB:.2f} GiB"
            card = card_of(ranks)
            if card and n_bytes <= room:
                time_text = describe_time(run, policy, card, steps, length)
                predicted += f", {time_text.partition(':')[0]}"
                lines.append(data.wrapped(time_text))
    except Exception as error:  # also of what stands around a trace
        problem = str(error) if isinstance(error, Unplanned) else f"no plan: {type(error).__name__}: {error}"
    problems = list(filter(None, ranks.gather(problem)))
    if problems:
        note = f"note: {problems[0]}. The run goes on with the blocks that need the least memory"
        return blocks_as_asked(run), [data.wrapped(note)], "nothing"
    return policy, lines, predicted


def choose_blocks(run, room):
    """-> BlockPolicy. If --activation_checkpointing or --resident_blocks is auto: the fastest choice that
    needs at most 90 % of `room` bytes. If none does, or the room is not known: the one that needs least."""
    if room == math.inf:  # on a CPU, and where a dry run names no card
        return blocks_as_asked(run)
    policies = [policy_of(run.config.num_hidden_layers, **choice) for choice in choices_for(run)]

    def fits(policy):
        return planned_bytes(run, policy) <= 0.9 * room

    # Each choice needs at most the memory of the one before it. Often not even the last one fits.
    if not fits(policies[-1]):
        return policies[-1]
    return policies[bisect.bisect_left(policies, True, key=fits)]


def choices_for(run):
    """-> [arguments of policy_of()] that the flags leave open, the fastest and largest first:

        all tokens of Gated DeltaNet at once    with all that follows; shorter segments with the last choice
        all frozen weights on the GPU           with all that follows; then of fewer blocks, then of none
        no block recomputed                     dequantized NF4 weights kept of all, of fewer, of no blocks
        more and more blocks recomputed         all keep the outputs of their attention
        all blocks recomputed                   fewer and fewer keep it"""
    args = run.args
    n_layers = run.config.num_hidden_layers
    asked = blocks_as_asked(run)
    with_weights = []
    choices = [{"n_recomputed": asked.count("recomputed")}]
    # with the inputs of blocks offloaded, auto recomputes all blocks
    if args.activation_checkpointing == "auto" and "activations" not in args.offload:
        if args.qlora and not args.tiled_mlp:  # a tile dequantizes its weights again
            with_weights = [{"n_recomputed": 0, "n_weights_kept": n} for n in range(n_layers, 0, -1)]
        # Recompute more and more blocks, but not attention: its output is the cheapest thing to keep per
        # second that it saves, where documents are longer than about D tokens. Then recompute attention, too.
        choices = [{"n_recomputed": n, "n_attention_kept": n} for n in range(n_layers + 1)]
        choices += [{"n_recomputed": n_layers, "n_attention_kept": n} for n in range(n_layers - 1, -1, -1)]
    if args.resident_blocks == "auto" and offloads_frozen(args):
        # Memory goes to activations first: a block that is not recomputed saves a third of its products. Then
        # to resident weights, which save time only where copies do not hide behind compute: on a 3090 in
        # micro-batches below 330 tokens in NF4, or 1,300 in bf16 (tests/by_card.py --copies). Last to
        # dequantized weights: four times the bytes of NF4, to save a dequantization.
        resident = [choices[0] | {"n_resident": n} for n in range(n_layers, 0, -1)]
        choices = [*(choice | {"n_resident": n_layers} for choice in with_weights), *resident, *choices]
    else:
        choices = [choice | {"n_resident": asked.count("resident")} for choice in [*with_weights, *choices]]
    if "linear_attention" in run.config.layer_types:
        # Memory goes to segments before all that, because they need it for one block after another: on an
        # H100 a layer takes 17 ms for 8,192 tokens at once, and 37 in segments of 2,048 (tests/LOG.md).
        n_tokens = args.batch_size * run.length
        n_tokens += -n_tokens % args.sequence_parallel  # shards are equal, see Loader.batch()
        at_once = [choice | {"segment": max(n_tokens, lm.SEGMENT)} for choice in choices]
        shorter = [choices[-1] | {"segment": n} for n in (4096, 2048, lm.SEGMENT) if n < n_tokens]
        choices = at_once + shorter
    return choices


# ---- advice: flags that make a run fit

def ladder_of(run):
    """-> flags that may lower the peak, as they are typed after the command line, those that cost the least
    time first (tests/LOG.md). What is switched off stays off, but --chunked_ce, and a step keeps its rows."""
    args = run.args
    n_rows = args.batch_size * args.grad_accum / args.sequence_parallel  # of a step, per rank
    # refused if it is not a whole number
    row_by_row = f"--batch_size 1 --grad_accum {args.sequence_parallel * n_rows:g}"
    ladder = ["--fsdp2"] if run.world > 1 else []
    ladder.append("--activation_checkpointing all")
    if run.length >= 4096:  # a row keeps a GPU busy: nothing is lost
        ladder.append(row_by_row)
    ladder.append("--activation_checkpointing all --offload activations")
    if not args.tiled_mlp and args.batch_size * run.length > 4096:
        ladder.append("--tiled_mlp 4096")
    if not 0 < args.ce_chunk <= 256:
        ladder.append("--chunked_ce --ce_chunk 256")
    ladder += ["--optim adamw8bit", row_by_row]
    ladder += [f"--batch_size 1 --grad_accum {n * n_rows:g} --sequence_parallel {n}"
               for n in (2, 4, 8) if n > args.sequence_parallel]
    ladder.append("--optim_in_backward --clip 0")
    if args.precision != "fp16" and run.has_flash is not False:  # a card without FlashAttention has no bf16
        ladder.append("--precision bf16 --stochastic_rounding")
    # these two need 4-bit weights, or much host memory and a copy of all weights in each pass
    last = ["--qlora", "--fsdp2 --offload params"]
    # adapters on one card have lost nothing but 4 bits; of trained weights 4 bits would be another method
    return [*ladder, *(last if args.lora and run.world == 1 else reversed(last))]


def with_options(run, options):
    """A copy of `run` with options typed after the command line, or None if they cannot be used together."""
    # normalize_flags() would take these two for flags that were given
    decided = {"adapter": None, "offload": run.args.offload or None}
    args = argparse.Namespace(**vars(run.args) | decided)
    try:
        args = parse_args(" ".join(options).split(), args)
        check_sizes(args, run.config, run.world)
    except (argparse.ArgumentError, ValueError):
        return None
    return run._replace(args=args)


class Need(NamedTuple):
    """Bytes that a step needs."""

    gpu: float  # CUDA's own memory included
    host: float


def need_with(run, options):
    """-> Need with some options, infinite where they cannot be used together."""
    changed = with_options(run, options)
    if changed is None:
        return Need(math.inf, math.inf)
    phases, host = plan(changed, blocks_as_asked(changed))
    return Need(peak_of(phases)[1] + OVERHEAD, sum(host.values()))


def usable(run, ladder):
    """-> the options of a ladder that change something, and can be used with all before them."""
    options = []
    before = run
    for option in ladder:
        changed = with_options(run, [*options, option])
        if changed and changed.args != before.args:
            options.append(option)
            before = changed
    return options


def climb(run, room):
    """-> (the cheapest options that make a run fit into `room` bytes, or all that help, and their Need)."""
    ladder = ladder_of(run)
    # --optim_in_backward is refused beside --grad_accum, and may be worth more
    ladders = ladder, [option for option in ladder if "--grad_accum" not in option]
    both = [usable(run, options) for options in ladders]

    def fitting(n_options):
        """-> those of the first options of the ladder that make the run fit, or None."""
        for options in both:
            first = [option for option in options if ladder.index(option) < n_options]
            if need_with(run, first).gpu <= room:
                return first
        return None

    limit = room
    options = fitting(len(ladder))
    if options is None:
        options = min(both, key=lambda each: need_with(run, each).gpu)
        limit = 1.01 * need_with(run, options).gpu
    else:  # with more and more of them a run needs less memory
        n_options = bisect.bisect_left(range(len(ladder)), True, key=lambda n: fitting(n) is not None)
        options = fitting(n_options)
    options = needed(run, limit, [], options, [])
    return options, need_with(run, options)


def needed(run, limit, before, some, after):
    """-> those of some options that are needed between others to stay below a limit of the GPU's memory. Host
    memory does not grow. The dearest options, which are the last ones, go first."""
    if not some:
        return []
    without = need_with(run, [*before, *after])
    if without.gpu <= limit and without.host <= 1.01 * need_with(run, [*before, *some, *after]).host:
        return []
    if len(some) == 1:
        return some
    half = len(some) // 2
    dear = needed(run, limit, [*before, *some[:half]], some[half:], after)
    return [*needed(run, limit, before, some[:half], [*dear, *after]), *dear]


def describe_other_methods(run):
    """Yields a line: what adapters and 4 bits would need, for a run that does not fit."""
    lora, qlora = (need_with(run, [flag]).gpu for flag in ("--lora", "--qlora"))
    if not run.args.lora:
        yield (f"  All weights are trained. Adapters need {lora / GIB:.2f} GiB (--lora) or {qlora / GIB:.2f} "
               "(--qlora)")
    elif not run.args.qlora and qlora < math.inf:
        yield f"  In 4 bits it needs {qlora / GIB:.2f} GiB: --qlora"


def advise(run, room, argv):
    """Yields lines: what would make a run fit that does not. argv: its command line."""
    options, need = climb(run, room)
    for n, option in enumerate(options, 1):
        yield f"  {need_with(run, options[:n]).gpu / GIB:8.2f} GiB with {option}"
    if need.gpu > room:
        yield "  No flags make it fit: use more ranks, a shorter --seq_len or a smaller model"
    on_host = f", and {describe_host(run, need.host)}" if need.host else ""
    yield data.wrapped(f"  It needs {need.gpu / GIB:.2f} GiB{on_host}, with")
    replaced_flags = flags_replaced(argv, options)
    if replaced_flags:
        yield f"    (in place of {' '.join(replaced_flags)})"
    flags = textwrap.wrap(" ".join(options) or "the flags that it has", 74, break_on_hyphens=False)
    yield "    " + " \\\n    ".join(flags)  # as a shell reads it


def flags_replaced(argv, options):
    """-> the flags of a command line that some options replace, because a flag can have one value."""
    found = {}
    for flag, value in itertools.pairwise([*" ".join(options).split(), "--"]):
        for word, following in itertools.pairwise([*argv, "--"]):
            name, equals, given = word.partition("=")
            if not equals:
                given = following
            if name == flag and flag != "--offload" and not value.startswith("--") and given != value:
                found[f"{flag} {given}"] = None
            if name == f"--no-{flag[2:]}":
                found[name] = None
    return list(found)


# ---- the plan, printed

def peak_of(phases):
    """(title of the phase with the highest peak, its bytes)."""
    title = max(phases, key=lambda title: phases[title].total())
    return title, phases[title].total()


def describe_plan(run, policy, room, argv=()):
    """Yields lines: whether a run fits into `room` bytes, the plan as a table, how blocks are recomputed, and
    what would make it fit. Of a run that needs less than 60 % of the room, one line."""
    phases, host = plan(run, policy)
    name, peak = peak_of(phases)
    need = peak + OVERHEAD
    host_text = ", ".join(f"{kind} {n / GIB:.2f}" for kind, n in host.items()) or "none"
    if host:
        host_text += f"; in all {describe_host(run, sum(host.values()))}"
    if not run.args.dry_run and need < 0.6 * room:
        yield data.wrapped(f"memory plan: needs {need / GIB:.2f} GiB of {room / GIB:.2f}; host memory: "
                           f"{host_text}")
        return
    least = planned_bytes(run, blocks_as_asked(run))
    verdict = ""
    of = ""
    if room < math.inf:
        of = f" of {room / GIB:.2f}"
        verdict = "fits: "
        if need > room:
            verdict = "does not fit: "
        elif need > TIGHT * room:
            verdict = "fits, but only just: "
    yield data.wrapped(f"{verdict}needs {least / GIB:.2f} GiB{of} (including 1 GiB for CUDA and NCCL)")
    if verdict.startswith("fits, but"):
        yield "  measured runs took up to 0.25 GiB more than predicted; NCCL was never measured"
    if least < need:
        yield f"  auto uses {need / GIB:.2f} GiB, for speed"
    if need > room:
        yield from describe_other_methods(run)
    yield (f"memory plan, GiB of rank 0 of {run.world}, "
           f"micro-batches of {run.args.batch_size} x {run.length} tokens")
    titles = [f"{title}*" if title == name else title for title in phases]
    yield " " * 20 + "".join(f"{title:>15}" for title in titles)
    rows = {kind: [kinds[kind] for kinds in phases.values()] for kind in KINDS}
    rows["all"] = [kinds.total() for kinds in phases.values()]
    for kind, values in rows.items():
        if any(values):
            yield f"  {kind:<18}" + "".join(f"{value / GIB:>15.2f}" for value in values)
    if run.args.compile:
        yield "  kept for backward: an estimate for torch.compile, within 1 % on an H100"
    yield data.wrapped(f"  host memory: {host_text}", indent=4)
    if run.args.dry_run:  # print_start() has printed these
        for text in describe_blocks(run, policy):
            yield data.wrapped(text)
    if need > room:
        yield from advise(run, room, argv)


def describe_host(run, n_bytes):
    """Text: the host memory that all ranks of a machine need, where a rank needs n_bytes."""
    # a dry run counts on machines of 8 GPUs
    n_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", min(run.world, 8)))
    of_machine = n_ranks * n_bytes
    text = f"{of_machine / GIB:.2f} GiB of host memory"
    if n_ranks > 1:
        text += f" for the {n_ranks} ranks of a machine"
    if of_machine > allowed_memory():
        return f"{text} (this machine has {allowed_memory() / GIB:.0f})"
    return f"{text} (most machines have less)" if of_machine > 64 * GIB else text


def dry_run(args, argv=()):
    """Prints the plan of --world ranks, and rows, tokens and steps of --data, without weights or a GPU. If
    the run does not fit, the exit code is that of a run that is out of memory."""
    world = args.world or 1
    room = GIB * (args.gpu_gib or (CARDS[args.gpu].gib if args.gpu else math.inf))
    data.say(f"planning {subject_of(args)}")
    alike = [card.gib for card in CARDS.values() if card.gb == args.gpu_gib]
    if alike:
        data.note(f"a card of {args.gpu_gib:g} GB has less: --gpu_gib {max(alike)}")
    if args.gpu and not (args.gpu_gib or CARDS[args.gpu].tflops):
        data.note(f"{CARDS[args.gpu].gib} GiB of the {args.gpu} are an estimate: see --gpu_gib")
    if args.gpu and not CARDS[args.gpu].has_bf16:
        data.note(f"the {args.gpu} has neither bf16 nor FlashAttention: this is the plan of --precision "
                  f"{args.precision}")
    try:
        opened = open_config(args, world, device=None, random_init=True)
        has_flash = CARDS[args.gpu].has_bf16 if args.gpu else None
        run = RunSpec(args, opened.config, world, args.seq_len, has_flash)
        loader = steps = length = None
        if args.data not in ([], DEMO_DATA):
            tokenizer = open_tokenizer(args, opened)
            ranks = Ranks(want_group=False, timeout=args.timeout)
            ranks.world = world
            loader, eval_loader = data.open_data(args, tokenizer, opened.config.vocab_size, ranks)
            run = run._replace(length=loader.longest, documents=documents_in_a_row(loader))
        policy = choose_blocks(run, room)
        for line in describe_plan(run, policy, room, argv):
            data.say(line)
        if loader:
            if tokenizer.folder == data.TINY and args.model != "tiny":
                data.note("tokens are counted with the built-in tokenizer; a model folder or Hub id is exact")
            data.print_data(args, loader, eval_loader, tokenizer)
            rows_a_step, steps = count_steps(args, len(loader.rows), world)
            data.say(f"{data.count_of(steps, 'steps')} of {data.count_of(rows_a_step, 'rows')}")
            length = mean_length(loader)
        if planned_bytes(run, policy) > room:
            raise SystemExit(OUT_OF_MEMORY)
        if args.gpu:
            data.say(data.wrapped(describe_time(run, policy, args.gpu, steps, length)))
    except (ValueError, OSError, Unplanned) as error:
        raise SystemExit(message_of(error)) from error


def documents_in_a_row(loader):
    """How many documents, or pairs, a row has on average, rounded up."""
    per_pair = 2 if loader.documents.has_pairs else 1
    return nf4.ceil_div(sum(map(len, loader.rows)), per_pair * len(loader.rows))


def mean_length(loader):
    """How many tokens a token's document has on average."""
    return float(loader.per_row.squares.sum() / loader.per_row.tokens.sum())


# ---------------- the exit code

def lost_another_rank(error):
    """Whether gloo or NCCL report that another rank is gone, or does not come."""
    texts = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited",
             "failed to pass monitoredBarrier", "Timed out waiting")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def is_out_of_memory(error):
    texts = "DefaultCPUAllocator", "bad_alloc", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def stack_of(error):
    """-> the last four calls in this project's files before an error: main > save (train.py:9)."""
    calls = [call for call in traceback.extract_tb(error.__traceback__)
             if os.path.dirname(call.filename) == os.path.dirname(__file__)]
    last = calls[-1]  # where it was raised, or where a library was called that has
    # without lambdas, and without launch(), which is the first one
    names = [call.name for call in calls[1:] or calls if not call.name.startswith("<")]
    return f"{' > '.join(names[-4:])} ({os.path.basename(last.filename)}:{last.lineno})"


def launch(argv=None):
    """Runs main() -> the exit code. An error becomes one message, printed last."""
    # A CPU multiplies subnormal numbers at a twentieth of its speed. States of Gated DeltaNet fade to them.
    torch.set_flush_denormal(True)
    progress = dict(out=None, step=0, tokens_of_micro_batch=0, is_written=False)
    code = 1  # of errors that have no code of their own
    speaks = os.environ.get("RANK", "0") == "0" or not os.environ.keys() >= OF_GROUP
    try:
        with contextlib.ExitStack() as exits:
            main(sys.argv[1:] if argv is None else argv, progress, exits)
        return 0
    except SystemExit as end:
        if not isinstance(end.code, str):
            return end.code or 0  # a number, of a signal or a plan that does not fit, or nothing
        message = end.code
    except (argparse.ArgumentError, FloatingPointError) as error:
        code = NOT_FINITE if isinstance(error, FloatingPointError) else 2
        message = str(error)
        if code == 2 and os.environ.keys() >= OF_GROUP:  # or ranks with other flags would wait for this one
            try:
                Ranks(want_group=False, timeout=10, error=message)
            except (SystemExit, ConnectionError) as end:
                message = end.code if isinstance(end, SystemExit) else message
    except ConnectionError as error:
        speaks = True  # ranks that have not met each say what they see
        message = str(error)
    except KeyboardInterrupt:  # Ctrl-C, or another signal that StopSignal knows
        code = 130
        message = "interrupted, nothing saved"
        saved = progress["out"] and newest_checkpoint(progress["out"])
        if progress["is_written"]:
            message = f"interrupted, {progress['out']}/final is complete"
        elif saved:
            message = f"interrupted, {saved} is complete: the same command with --resume continues it"
    except Exception as error:
        if lost_another_rank(error):
            # torchrun prints one of all ranks' messages; without it each machine may have its own screen
            speaks = speaks or "TORCHELASTIC_RUN_ID" not in os.environ
            # the rank that ended first, or torchrun, says why; gloo names it, with a time that is cut off
            which = re.sub(r" in \d+ ms$|\. This is.*", "", str(error).splitlines()[0])
            message = (f"lost contact with another rank at step {progress['step']}, in {stack_of(error)}: it "
                       f"crashed or hangs. Saved checkpoints are intact. ({which}. Outside of a step, "
                       f"--timeout N waits for {LONG} N seconds.)")
        else:
            speaks = True
            message = f"{type(error).__name__}: {error}"  # nobody has foreseen it: its traceback, too
            if is_out_of_memory(error):
                code = OUT_OF_MEMORY
                message = report_out_of_memory(error, progress)
            else:
                data.say(traceback.format_exc(), to_stderr=True)
    if speaks:
        data.say(f"train.py: error: {message}", to_stderr=True)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun prints what is in it
        report = {"message": data.printable(message), "extraInfo": {"timestamp": int(time.time())}}
        with contextlib.suppress(OSError):  # a full disk does not change the exit code
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(data.json_of({"message": report}))
    return code


def report_out_of_memory(error, progress):
    """Writes oom.json into the folder of the run -> the message. progress: what main has noted."""
    report = {"place": stack_of(error), "step": progress["step"],
              "tokens_of_micro_batch": progress["tokens_of_micro_batch"],
              "error": str(error)[:500], "rank": int(os.getenv("RANK", 0)),
              "max_memory_allocated_gib": torch.cuda.max_memory_allocated() / GIB}
    text = data.json_of(report, indent=2)
    if progress["out"]:
        with contextlib.suppress(OSError):  # a full disk: the message has all of it
            progress["out"].mkdir(parents=True, exist_ok=True)  # run_folder() may have removed it
            (progress["out"] / "oom.json").write_text(text + "\n")
    advice = ("the same command with --dry_run --gpu_gib G prints flags that would make it fit; "
              "--activation_checkpointing all needs the least memory")
    return f"out of memory: {text}\n{advice}"


if __name__ == "__main__":
    handle(signal.SIGINT, signal.default_int_handler)
    if hasattr(sys.stdout, "reconfigure"):  # that of a notebook has none
        sys.stdout.reconfigure(errors="backslashreplace")  # texts of the data, on whatever terminal
    code = launch()
    if not IS_PROGRAM:
        sys.exit(code)
    # Under FSDP2 gloo's threads outlive the group, and one that frees a tensor during the interpreter's
    # shutdown aborts a finished run, once in 130 (pytorch #179291). So nothing shuts down.
    os._exit(code)
