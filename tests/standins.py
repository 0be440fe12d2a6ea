"""Stand-ins for the CUDA kernels of a training step: each saves for the backward and allocates what the kernel does,
and computes nothing. Left out: partial sums of the gradient of a norm's weight. install() puts them into a process that
trains on a CPU or an emulated GPU, on_meta() into a trace of shapes alone (trace_plan.py)."""

import contextlib
import warnings

import torch
import torch.nn.functional as F

import data
import model
import nf4


class RMSNorm(torch.autograd.Function):
    """aten::_fused_rms_norm: keeps its input and one float32 a token."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_zeros(x.shape[:-1], dtype=torch.float32))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)
        return torch.zeros_like(x), grad_weight


class Attention(torch.autograd.Function):
    """FlashAttention in bf16, the memory-efficient kernel in fp16 and float32: keeps q, k, v, its output and the
    float32 logsumexp. The backward of both adds up dq in float32 (the latter's in the workspace of kernel_backward.h,
    from sm_70 on). With fewer key heads than query heads FlashAttention makes dk and dv of every query head first."""

    @staticmethod
    def forward(ctx, q_BHTK, k_BGTK, v_BGTK, mask=None):
        B, H, T, K = q_BHTK.shape
        out_BHTK = q_BHTK.new_zeros(B, T, H, K).transpose(1, 2)
        logsumexp = q_BHTK.new_zeros(B, H, T, dtype=torch.float32)
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, out_BHTK, logsumexp, mask)
        return out_BHTK

    @staticmethod
    def backward(ctx, grad_BHTK):
        q, k, v, _out, logsumexp, _mask = ctx.saved_tensors  # each is alive until this returns
        grads = [torch.zeros_like(t) for t in (q, k, v)]
        # alive until this returns
        scratch = [torch.zeros_like(logsumexp)]  # sums of out * grad
        scratch.append(torch.zeros_like(q, dtype=torch.float32))  # dq
        if q.shape[1] != k.shape[1]:
            scratch.append(torch.zeros_like(q))  # dk of every query head
            scratch.append(torch.zeros_like(q))  # and dv
        return (*grads, None)


def kernel(q_BHTK, k_BGTK, v_BGTK, attn_mask=None, **_):
    """F.scaled_dot_product_attention()."""
    return Attention.apply(q_BHTK, k_BGTK, v_BGTK, attn_mask)


SDPA = model.sdpa


def attention(q_BTHK, k_BTGK, v_BTGK, window=model.NO_WINDOW):
    """model.sdpa(), which cuts rows into windows for the memory-efficient kernel. FlashAttention knows windows."""
    if q_BTHK.dtype is torch.bfloat16:
        window = model.NO_WINDOW
    return SDPA(q_BTHK, k_BTGK, v_BTGK, window=window)


def attention_of_documents(q_NHK, k_NGK, v_NGK, *_, **__):
    """What model.flash_attention() returns: documents one after another are one row here."""
    out_1NHK = attention(q_NHK[None], k_NGK[None], v_NGK[None])
    return out_1NHK[0]


def add_in_place(self, other):
    """aten::add_ of 16 bits to float32: a CPU makes a float32 copy first, a GPU does not."""
    if isinstance(other, torch.Tensor) and other.dtype is not self.dtype:
        return self
    return self.add_(other)


def product(a, b, out=None):
    """aten::mm: on some CPUs oneDNN makes a float32 copy of a product in 16 bits, which no GPU does."""
    if out is not None:
        return out.zero_()
    return a.new_zeros(len(a), b.shape[1])


def product_into(a, b, *, out):
    """aten::mm.out."""
    return product(a, b, out)


def chunk_cat_into(tensors, dim, num_chunks, *, out):
    """aten::_chunk_cat.out, by which FSDP2 fills the input of a reduce-scatter: a CPU makes a copy of each tensor
    first, a GPU does not."""
    return out.zero_()


def rms_norm(x, shape, weight, eps):
    return RMSNorm.apply(x, weight)


# (module, name, stand-in) of what model.py calls by these names
CALLS = [
    (F, "rms_norm", rms_norm),
    (F, "scaled_dot_product_attention", kernel),
    (model, "sdpa", attention),
    (model, "flash_attention", lambda: attention_of_documents),
    (model, "length_multiple", lambda q: 1),  # a GPU fills up no rows
    (model, "shares_key_heads", lambda q: q.dtype is torch.bfloat16),  # as a GPU's kernels do
]
KERNELS = torch.library.Library("aten", "IMPL")  # replaces them as long as it is alive


def install():
    """Replaces the kernels in this process."""
    with warnings.catch_warnings(action="ignore"):  # that a kernel is replaced
        KERNELS.impl("mm", product, "CPU")
        KERNELS.impl("mm.out", product_into, "CPU")
        KERNELS.impl("_chunk_cat.out", chunk_cat_into, "CPU")
    torch.Tensor.__iadd__ = add_in_place
    for module, name, stand_in in CALLS:
        setattr(module, name, stand_in)


class Exchange(torch.autograd.Function):
    """An all-to-all: as many bytes come as go, and nothing is kept."""

    @staticmethod
    def forward(ctx, x):
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        return torch.empty_like(grad)


def first_band(*matrices):
    """nf4.bands() with the first one alone: bands follow one another, and none is larger."""
    n_rows = max(1, nf4.BAND_WEIGHTS // matrices[0].shape[1])
    return [tuple(matrix[:n_rows] for matrix in matrices)]


def grouped_product(a, b, offs):
    """aten::_grouped_mm, which has no kernel for float32 on the meta device. Either b is a stack, or the result is."""
    if b.dim() == 3:
        return a.new_empty(len(a), b.shape[-1])
    return a.new_empty(len(offs), len(a), b.shape[-1])


@contextlib.contextmanager
def on_meta():
    """Replaces the kernels for tensors that have shapes alone, and puts everything back."""
    calls = [*CALLS, (model, "exchange", lambda x, group: Exchange.apply(x)), (nf4, "bands", first_band)]
    real = [getattr(module, name) for module, name, _ in calls]
    try:
        for module, name, stand_in in calls:
            setattr(module, name, stand_in)
        yield
    finally:
        for (module, name, _), function in zip(calls, real):
            setattr(module, name, function)


def fill_with_zeros(module, *_, **__):
    for p in module.parameters():
        p.data.zero_()


def install_with_zeros():
    """Replaces the kernels, and random weights by zeros, which take no time."""
    install()
    data.load_weights_ = fill_with_zeros
