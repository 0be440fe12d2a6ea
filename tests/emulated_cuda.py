"""A device called cuda on a CPU build of torch, for the tests marked gpu where there is no GPU. test_cuda.py runs them:

    OOMPH_EMULATED_CUDA=1 python -m pytest -m gpu

Its tensors lie in host memory, and each operator runs the CPU's kernel. The device itself is emulated_cuda.cpp (memory,
streams, copies, operators), which is compiled at the first use in 10 s of a core and kept in ~/.cache/oomph. This file
loads it and replaces what Python code calls of torch.cuda, of attention and of process groups.

What it shows:
- Every line that only a GPU reaches runs.
- A tensor on the wrong device raises.
- Memory that nobody has written, or that was freed, reads as nan.
- Bytes and their peak are counted. Beyond a limit there is OutOfMemoryError.
- The host waits only where it may: set_sync_debug_mode("error") makes any other wait an error.
- Copies between the device and pinned memory on a side stream are made as late as a GPU may make them. To use memory
  while such a copy is under way is an error, and so is to use it on a side stream while the default stream may still
  work on it.
- Attention asserts what the CUDA kernels ask for: dtypes, strides, head sizes, bounds, shared key heads.
- Ranks talk, by gloo in place of NCCL.

What it cannot show:
- Races between kernels, which run at once, and races of copies on the default stream.
- The numbers of CUDA's kernels, and which of them torch chooses.
- Triton, NCCL, workspaces of cuBLAS, fragmentation.
- Time.
"""

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import pickle
import subprocess
import types
from importlib import metadata, util
from pathlib import Path

# torch is imported inside functions: the device has to be there before it.

LOADED = os.environ.get("OOMPH_EMULATED_CUDA") == "1"
SOURCE = Path(__file__).with_suffix(".cpp")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "oomph")  # before conftest.py changes it
NAME = "NVIDIA H100 80GB HBM3"
CAPABILITY = (9, 0)
TOTAL_BYTES = 80 << 30


def library():
    """-> path of the compiled device. OSError or CalledProcessError where it cannot be compiled."""
    torch = Path(util.find_spec("torch").origin).parent
    # another source or another torch needs another build
    key = hashlib.sha256(SOURCE.read_bytes() + metadata.version("torch").encode()).hexdigest()[:16]
    path = CACHE / f"emulated-cuda-{key}" / "device.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{os.getpid()}.so")
        options = ["-O1", "-std=c++20", "-w", "-shared", "-fPIC", f"-I{torch}/include"]
        libraries = [f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-ltorch_cpu", "-lc10"]
        subprocess.run(["g++", *options, SOURCE, "-o", part, *libraries], check=True)
        part.rename(path)  # in one step: another process may be doing the same
    return path


def load():
    """Loads the device and replaces the calls that would need CUDA's own."""
    device = ctypes.CDLL(str(library()))
    import torch.nn.attention.varlen  # noqa: F401 - before the changes: torch._dynamo notes the functions that it finds

    replace_questions(device)
    replace_streams(device)
    replace_memory(device)
    replace_random_state()
    replace_process_groups()
    replace_sdpa()
    replace_varlen_attention()


def shared_number(device, name):
    """A global of emulated_cuda.cpp: its `value` is read and written here as it is there."""
    return ctypes.c_int64.in_dll(device, f"emu_{name}")


def replace(owner, calls):
    """calls: {name: function}"""
    for name, call in calls.items():
        setattr(owner, name, call)


def ignore(*args, **kwargs):
    """A call that has nothing to do here."""


def replace_questions(device):
    """Which devices there are, and what they can do. There are as many as a job has ranks on this machine, all alike:
    here and below `_` is the device that a call asks about."""
    import torch

    number = shared_number(device, "device")

    def set_device(to):
        number.value = torch.device(to).index or 0

    replace(torch.cuda, {
        "is_available": lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != "",  # conftest hides it from ranks on gloo
        "is_initialized": lambda: True,
        "_lazy_init": ignore,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        "current_device": lambda: number.value,
        "set_device": set_device,
        "get_device_name": lambda _=None: NAME,
        "get_device_capability": lambda _=None: CAPABILITY,
        "get_device_properties": lambda _=None: types.SimpleNamespace(total_memory=TOTAL_BYTES, name=NAME),
        "is_bf16_supported": lambda **_: True,
    })


def replace_streams(device):
    """Streams and events of the device, by torch's interface for devices of any kind."""
    import torch

    strict = shared_number(device, "strict")

    class Stream(torch.Stream):
        """A test replaces one of its methods, which a class of C++ does not let it do."""

    def set_sync_debug_mode(mode):
        strict.value = mode == "error"

    replace(torch.cuda, {
        "Stream": Stream,
        "Event": torch.Event,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "current_stream": torch.accelerator.current_stream,
        "synchronize": torch.accelerator.synchronize,
        "set_sync_debug_mode": set_sync_debug_mode,
        "_sleep": ignore,  # which on a GPU makes kernels late
    })


def replace_memory(device):
    """Counts and limits. Nothing is reserved beyond what is allocated: there is no cache of freed memory."""
    import torch

    live = shared_number(device, "live")
    peak = shared_number(device, "peak")
    limit = shared_number(device, "limit")
    plain_resize = torch.UntypedStorage.resize_

    def reset_peak(_=None):
        peak.value = live.value

    def set_limit(fraction, _=None):
        limit.value = int(fraction * TOTAL_BYTES)

    def write_snapshot(path):
        # the smallest that has the keys of CUDA's own
        Path(path).write_bytes(pickle.dumps({"segments": [0], "device_traces": [[]]}))

    def resize(storage, n_bytes):
        if storage.device.type == "cuda":  # torch resizes it by code that a CPU build does not have
            return torch.ops.emulated.resize_storage(storage._cdata, n_bytes)
        return plain_resize(storage, n_bytes)

    torch.UntypedStorage.resize_ = resize
    replace(torch.cuda, {
        "mem_get_info": lambda _=None: (TOTAL_BYTES - live.value, TOTAL_BYTES),
        "memory_allocated": lambda _=None: live.value,
        "memory_reserved": lambda _=None: live.value,
        "max_memory_allocated": lambda _=None: peak.value,
        "max_memory_reserved": lambda _=None: peak.value,
        "reset_peak_memory_stats": reset_peak,
        "set_per_process_memory_fraction": set_limit,
    })
    replace(torch.cuda.memory, {
        "_record_memory_history": ignore,
        "_dump_snapshot": write_snapshot,
    })


def replace_random_state():
    """The device draws from the CPU's generator."""
    import torch

    replace(torch.cuda, {
        "get_rng_state": lambda _=None: torch.get_rng_state(),
        "set_rng_state": lambda state, _=None: torch.set_rng_state(state),
        "manual_seed_all": ignore,  # torch.manual_seed(), which calls it, has seeded the CPU's
    })


def replace_process_groups():
    """NCCL's groups become gloo's, which emulated_cuda.cpp lends the device's memory to."""
    import torch.distributed as dist

    start_group = dist.init_process_group

    def init_process_group(backend, **given):
        return start_group(backend.replace("nccl", "gloo"), **given)

    dist.init_process_group = init_process_group


# ---------------------------------------------------------------- attention
# Asserts what the CUDA kernels ask for, and computes the same by the CPU's kernel.


def replace_sdpa():
    import torch
    import torch.nn.functional as F

    on_cpu = F.scaled_dot_product_attention
    flash_on_device = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def sdpa(q, k, v, is_causal=False, enable_gqa=False, attn_mask=None, **more):
        """q [B, H, T, K], k and v [B, G, S, K]."""
        if not q.is_cuda:
            return on_cpu(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa, attn_mask=attn_mask, **more)
        assert k.is_cuda and v.is_cuda
        assert q.dtype == k.dtype == v.dtype
        assert q.numel()
        assert not more  # options that the emulation does not know
        assert not torch.backends.cuda.cudnn_sdp_enabled(), "cuDNN plans each new length for 170 ms"
        H = q.shape[1]
        G = k.shape[1]
        if G != H:
            # Only FlashAttention shares key heads in every torch. Where it cannot run, torch would choose the math
            # kernel, which stores all scores: too many, except for a single new token.
            has_flash = q.dtype is not torch.float32 and q.shape[-1] <= 256
            has_flash = has_flash and torch.cuda.get_device_capability() >= (8, 0)
            n_new_tokens = q.shape[2]
            assert enable_gqa
            assert has_flash or n_new_tokens == 1, "the math kernel holds all scores"
            k = k.repeat_interleave(H // G, 1)
            v = v.repeat_interleave(H // G, 1)
        if attn_mask is not None and attn_mask.dtype is torch.bool:  # the CPU's kernel adds a mask to the scores
            added = torch.zeros_like(attn_mask, dtype=q.dtype)
            attn_mask = added.masked_fill(~attn_mask, -torch.inf)
        no_dropout = 0.0
        out, _ = flash_on_device(q, k, v, no_dropout, is_causal, attn_mask=attn_mask)
        return out

    F.scaled_dot_product_attention = sdpa


def replace_varlen_attention():
    """FlashAttention over documents of different lengths. It asserts what flash_api.cpp of torch checks."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import varlen

    def check_tensors(*qkv):
        """[tokens of all documents, heads, head size]"""
        assert torch.cuda.get_device_capability() >= (8, 0)  # a test may have made the device an older one
        for t in qkv:
            assert t.is_cuda
            assert t.dtype == qkv[0].dtype
            assert t.dtype in (torch.bfloat16, torch.float16)
            assert t.dim() == 3
            assert t.stride(-1) == 1
            head_size = t.shape[-1]
            assert head_size % 8 == 0
            assert head_size <= 256

    def read_ends(bounds):
        """The numbers of a tensor on the device, read past the emulation: a kernel waits for nothing."""
        array = ctypes.c_int32 * len(bounds)
        return list(array.from_address(bounds.data_ptr()))

    @functools.wraps(varlen.varlen_attn)  # model.py looks at its signature, which differs between versions of torch
    def attend(q, k, v, bounds, bounds_k, longest, longest_k, *, window_size, **_):
        check_tensors(q, k, v)
        assert bounds is bounds_k
        assert bounds.is_cuda
        assert bounds.dtype is torch.int32
        assert bounds.is_contiguous()
        ends = read_ends(bounds)
        assert ends[0] == 0
        assert ends[-1] == len(q) == len(k) == len(v)
        lengths = [stop - start for start, stop in itertools.pairwise(ends)]
        assert min(lengths) > 0
        assert type(longest) is int  # a tensor would make the host wait
        assert longest == longest_k == max(lengths)
        n_earlier, n_later = window_size
        assert n_later == 0
        n_seen = n_earlier if n_earlier >= 0 else longest  # -1: all earlier tokens

        out = []
        for start, stop in itertools.pairwise(ends):
            n = stop - start
            document = [t[start:stop].transpose(0, 1)[None] for t in (q, k, v)]
            mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril().triu(-n_seen)
            out_1HNK = F.scaled_dot_product_attention(*document, enable_gqa=True, attn_mask=mask)
            out.append(out_1HNK[0].transpose(0, 1))
        return torch.cat(out)

    varlen.varlen_attn = attend


if LOADED:
    load()
