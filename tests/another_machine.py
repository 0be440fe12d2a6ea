"""The tests as on another machine, whose numbers are rounded in another way. A test that passes here and fails there
has a tolerance that holds by the luck of one machine's rounding.

    OOMPH_MACHINE=avx2 python -m pytest -q -m rounding    # what compares floats, with other kernels; see MACHINES
    OOMPH_MACHINE=today ...                               # .ci/run: each of them in turn
    OOMPH_PERTURB=3 python -m pytest -q                   # with weights perturbed at rounding size; 3: any seed
    OOMPH_BF16=0 python -m pytest -q -m bf16              # as on a CPU without bf16 instructions; 1: as on one with

Imported before torch, which reads most of these variables when it is loaded.
"""

import os
import tempfile
from datetime import date

# Variables of torch, MKL, oneDNN and OpenMP. Their kernels then add up in another order, or in pieces of other sizes.
MACHINES = {
    "sse": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
    "default": {"ATEN_CPU_CAPABILITY": "default"},  # torch's own kernels without vectors, the libraries' with them
    "threads": {"OMP_NUM_THREADS": "2"},  # side_by_side.py gives a process one core, so that torch would use one
    "perturbed": {"OOMPH_PERTURB": str(date.today().toordinal())},  # this machine, but for the weights
}
name = os.environ.get("OOMPH_MACHINE")
if name == "today":
    name = list(MACHINES)[date.today().toordinal() % len(MACHINES)]
    os.environ["OOMPH_MACHINE"] = name  # for processes that start after midnight
changed = MACHINES[name] if name else {}
os.environ.update(changed)
FORCED_BF16 = os.environ.get("OOMPH_BF16")
if FORCED_BF16 == "0":
    # the most that oneDNN may use; a CPU with less is as it was
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
if changed or FORCED_BF16:
    # Inductor's cache does not tell vectors of one size from those of another: a graph that was cached with AVX512 and
    # is loaded with AVX2 writes beyond its tensors.
    cache = f"torchinductor-{name}-{FORCED_BF16}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), cache))
PERTURB = os.environ.get("OOMPH_PERTURB")
IS_IMPORTED = bool(FORCED_BF16 or PERTURB)  # whether change() does anything: variables alone would not be enough
WORDS = " ".join(f"{key}={os.environ[key]}" for key in ("OOMPH_BF16", "OOMPH_PERTURB", *changed) if key in os.environ)


def change():
    """Changes torch and data.py in this process."""
    import torch

    if FORCED_BF16:
        torch.cpu._is_avx512_bf16_supported = lambda: FORCED_BF16 == "1"
    if PERTURB:
        perturb_weights(int(PERTURB))


def perturb_weights(seed):
    """Lets data.load_weights_() multiply the weights of a model by 1 + e, with |e| up to 1e-7: float32 numbers move by
    one unit in the last place, or stay, as numbers do that are computed from sums in another order. e depends on tensor
    and row alone, so that all runs of a test, on any ranks, begin with the same weights. Adapters, NF4 codes and what a
    resumed run reads from its checkpoint stay as they are."""
    import torch

    import data
    import nf4

    plain_load_weights_ = data.load_weights_

    @torch.no_grad()
    def load_weights_(model, source, adapter, seed_of_run, device, progress=False, frozen_only=False):
        plain_load_weights_(model, source, adapter, seed_of_run, device, progress, frozen_only)
        for name, p in model.named_parameters():
            if "lora_" in name or p.dtype is torch.uint8 or (frozen_only and p.requires_grad):
                continue
            rows, first = nf4.local(p)
            if len(rows):
                matrix = rows.view(len(rows), -1)
                last = first + len(rows)
                e = data.random_rows(name, matrix.shape[1], first, last, seed, "cpu", uniform=True)
                matrix.mul_(1 + 1e-7 * e.to(matrix.device))

    data.load_weights_ = load_weights_
