"""A device called cuda on a CPU build of torch, for the tests marked gpu where there is no GPU: OOMPH_EMULATED_CUDA=1
pytest -m gpu, which test_cuda.py runs. Its tensors lie in host memory, each operator runs the CPU's kernel
(emulated_cuda.cpp, compiled at the first use in 10 s of a core and kept in ~/.cache/oomph). What it shows: every line
that only a GPU reaches runs; a tensor on the wrong device raises; memory that nobody has written, or that was freed,
reads as nan; bytes and their peak are counted, beyond a limit there is OutOfMemoryError; the host waits only where it
may. Copies between the device and pinned memory on a side stream are made as late as a GPU may make them; memory that
is used while such a copy is under way, or by a side stream while the default stream may still work on it, is an error.
Attention asserts what the CUDA kernels ask for. Ranks talk by gloo in place of NCCL.

What it cannot show: races between kernels, which run at once, and of copies on the default stream; the numbers and the
choice of CUDA's kernels, Triton, NCCL, workspaces of cuBLAS, fragmentation, time.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import pickle
import subprocess
import types
from importlib import metadata, util
from pathlib import Path
from unittest.mock import Mock

SOURCE, LOADED = Path(__file__).with_suffix(".cpp"), os.environ.get("OOMPH_EMULATED_CUDA") == "1"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "oomph")  # before conftest.py changes it


def library():
    """-> path of the compiled device. OSError or CalledProcessError where it cannot be compiled."""
    torch = Path(util.find_spec("torch").origin).parent  # not imported: the device has to be there first
    key = hashlib.sha256(SOURCE.read_bytes() + metadata.version("torch").encode()).hexdigest()[:16]
    path = CACHE / f"emulated-cuda-{key}" / "device.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{os.getpid()}.so")
        subprocess.run(["g++", "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch}/include", SOURCE, "-o", part, "-w",
                        f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-ltorch_cpu", "-lc10"], check=True)
        part.rename(path)  # another process may be doing the same
    return path


def load():
    """Loads the device and replaces torch.cuda's calls."""
    device, ignore = ctypes.CDLL(str(library())), Mock()
    live, peak, limit, number, strict = (ctypes.c_int64.in_dll(device, f"emu_{name}")
                                         for name in ("live", "peak", "limit", "device", "strict"))
    import torch
    import torch.distributed as dist
    import torch.nn.attention.varlen as varlen  # before the changes: torch._dynamo notes the functions that it finds

    total, name = 80 << 30, "NVIDIA H100 80GB HBM3"
    calls = {
        "Stream": type("Stream", (torch.Stream,), {}), "Event": torch.Event,  # a class whose methods a test can replace
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "current_stream": torch.accelerator.current_stream, "synchronize": torch.accelerator.synchronize,
        "is_available": lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != "", "is_initialized": lambda: True,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        "current_device": lambda: number.value,
        "set_device": lambda to: setattr(number, "value", torch.device(to).index or 0),
        "get_device_capability": lambda _=None: (9, 0), "get_device_name": lambda _=None: name,
        "get_device_properties": lambda _=None: types.SimpleNamespace(total_memory=total, name=name),
        "memory_allocated": lambda _=None: live.value, "memory_reserved": lambda _=None: live.value,
        "max_memory_allocated": lambda _=None: peak.value, "max_memory_reserved": lambda _=None: peak.value,
        "reset_peak_memory_stats": lambda _=None: setattr(peak, "value", live.value),
        "set_per_process_memory_fraction": lambda part, _=None: setattr(limit, "value", int(part * total)),
        "set_sync_debug_mode": lambda mode: setattr(strict, "value", mode == "error"),
        "get_rng_state": lambda _=None: torch.get_rng_state(), "is_bf16_supported": lambda **_: True,
        "set_rng_state": lambda state, _=None: torch.set_rng_state(state),
        "_sleep": ignore, "_lazy_init": ignore, "manual_seed_all": ignore,
    }
    for key, call in calls.items():
        setattr(torch.cuda, key, call)
    snapshot = pickle.dumps({"segments": [0], "device_traces": [[]]})
    torch.cuda.memory._record_memory_history = ignore
    torch.cuda.memory._dump_snapshot = lambda path: Path(path).write_bytes(snapshot)

    def resize(storage, n_bytes, plain=torch.UntypedStorage.resize_):
        on_device = storage.device.type == "cuda"
        return torch.ops.emulated.resize_storage(storage._cdata, n_bytes) if on_device else plain(storage, n_bytes)

    torch.UntypedStorage.resize_ = resize
    start_group = dist.init_process_group
    dist.init_process_group = lambda backend, **given: start_group(backend.replace("nccl", "gloo"), **given)
    replace_attention(torch, varlen)


def replace_attention(torch, varlen):
    """Asserts what the CUDA kernels of attention ask for, and computes the same by the CPU's."""
    F = torch.nn.functional

    def sdpa(q, k, v, is_causal=False, enable_gqa=False, attn_mask=None, plain=F.scaled_dot_product_attention, **more):
        if not q.is_cuda:
            return plain(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa, attn_mask=attn_mask, **more)
        assert q.dtype == k.dtype == v.dtype and k.is_cuda and v.is_cuda and q.numel() and not more
        if k.shape[1] != q.shape[1]:  # only FlashAttention shares key heads in every torch; a new token has few scores
            flash = q.dtype is not torch.float32 and q.shape[-1] <= 256
            assert enable_gqa and (flash or q.shape[2] == 1), "the math kernel holds all scores"
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, is_causal, attn_mask=attn_mask)[0]

    @functools.wraps(varlen.varlen_attn)
    def attend(q, k, v, bounds, bounds_k, longest, longest_k, *, window_size, **_):
        for t in (q, k, v):  # flash_api.cpp
            assert t.is_cuda and t.dtype == q.dtype and t.dtype in (torch.bfloat16, torch.float16) and t.dim() == 3
            assert t.stride(-1) == 1 and t.shape[-1] % 8 == 0 and t.shape[-1] <= 256
        assert bounds is bounds_k and bounds.is_cuda and bounds.dtype is torch.int32 and bounds.is_contiguous()
        ends = list((ctypes.c_int32 * len(bounds)).from_address(bounds.data_ptr()))  # a kernel waits for nothing
        pairs = list(zip(ends, ends[1:]))
        lengths = [stop - start for start, stop in pairs]
        assert type(longest) is int and longest == longest_k == max(lengths) and min(lengths) > 0
        assert ends[0] == 0 and ends[-1] == len(q) == len(k) == len(v) and window_size[1] == 0
        n_seen = window_size[0] if window_size[0] >= 0 else longest
        parts = [[t[start:stop].transpose(0, 1)[None] for t in (q, k, v)] for start, stop in pairs]
        masks = [torch.ones(n, n, dtype=torch.bool, device=q.device).tril().triu(-n_seen) for n in lengths]
        return torch.cat([sdpa(*part, enable_gqa=True, attn_mask=mask)[0].transpose(0, 1)
                          for part, mask in zip(parts, masks)])

    F.scaled_dot_product_attention, varlen.varlen_attn = sdpa, attend


if LOADED:
    load()
