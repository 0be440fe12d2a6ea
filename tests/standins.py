"""Stand-ins on a CPU or an emulated GPU for the CUDA kernels of a training step: each saves for the backward and
allocates what the kernel does, and computes nothing. Left out: partial sums of the gradient of a norm's weight."""

import warnings

import torch
import torch.nn.functional as F

import model
import data


class RMSNorm(torch.autograd.Function):
    """aten::_fused_rms_norm: keeps its input and one float32 a token."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_zeros(x.shape[:-1], dtype=torch.float32))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight) if ctx.needs_input_grad[1] else None


class Attention(torch.autograd.Function):
    """FlashAttention in 16 bits, the memory-efficient kernel in float32: keeps q, k, v, its output and the float32
    logsumexp. The backward of FlashAttention adds up dq in float32; with fewer key heads than query heads it makes dk
    and dv of every query head first."""

    @staticmethod
    def forward(ctx, q_BHTK, k_BGTK, v_BGTK):
        B, H, T, K = q_BHTK.shape
        out_BHTK = q_BHTK.new_zeros(B, T, H, K).transpose(1, 2)
        logsumexp = q_BHTK.new_zeros(B, H, T, dtype=torch.float32)
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, out_BHTK, logsumexp)
        return out_BHTK

    @staticmethod
    def backward(ctx, grad_BHTK):
        q, k, v, _, logsumexp = ctx.saved_tensors
        grads = [torch.zeros_like(t) for t in (q, k, v)]
        scratch = [torch.zeros_like(logsumexp)]  # sums of out * grad
        if q.dtype is not torch.float32:
            scratch.append(q.new_zeros(q.shape, dtype=torch.float32))
        if q.shape[1] != k.shape[1]:
            scratch += [torch.zeros_like(q), torch.zeros_like(q)]
        return tuple(grads)


def attention(*qkv, **_):
    q_BHTK, k_BGTK, v_BGTK = (t.transpose(1, 2) for t in qkv)
    if q_BHTK.dtype is torch.float32:  # model.py repeats key heads on a GPU: that kernel shares none
        k_BGTK, v_BGTK = (t.repeat_interleave(q_BHTK.shape[1] // t.shape[1], 1) for t in (k_BGTK, v_BGTK))
    return Attention.apply(q_BHTK, k_BGTK, v_BGTK).transpose(1, 2)


def attention_of_documents(q_NHK, k_NGK, v_NGK, *_, **__):
    return Attention.apply(*(t.transpose(0, 1)[None] for t in (q_NHK, k_NGK, v_NGK)))[0].transpose(0, 1)


def in_place(self, other):
    """aten::add_ of 16 bits to float32: a CPU makes a float32 copy first, a GPU does not."""
    return self if isinstance(other, torch.Tensor) and other.dtype is not self.dtype else self.add_(other)


KERNELS = torch.library.Library("aten", "IMPL")


def product(a, b, out=None):
    """aten::mm: on some CPUs oneDNN makes a float32 copy of a product in 16 bits, which no GPU does."""
    return a.new_zeros(len(a), b.shape[1]) if out is None else out.zero_()


def install():
    with warnings.catch_warnings(action="ignore"):  # that a kernel is replaced
        KERNELS.impl("mm", product, "CPU")
        KERNELS.impl("mm.out", lambda a, b, *, out: product(a, b, out), "CPU")
    torch.Tensor.__iadd__ = in_place
    F.rms_norm = lambda x, shape, weight, eps: RMSNorm.apply(x, weight)
    model.sdpa, model.flash_attention = attention, lambda: attention_of_documents


def install_with_zeros():
    """And no time for random weights."""
    install()
    data.load_weights_ = lambda module, *_: [p.data.zero_() for p in module.parameters()]
