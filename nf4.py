"""NF4: 4-bit NormalFloat weights (QLoRA, arXiv:2305.14314) in plain uint8 parameters.

A weight is cut into blocks of 64 along its row. A block keeps its largest magnitude (absmax) and, for each
element, the index of the nearest of 16 levels that split a standard normal into equal shares: 4 bits instead of 16.
The absmaxes cost 32 bits per 64 weights (0.5 bit a weight), so they are quantized as well ("double quantization"):
8 bits each, on a logarithmic scale between the smallest and the largest of the row, whose two ends are float32.

    bits per weight = 4 + 8/64 + 64/D = 4.14 at D = 4096      error: 0.092 of the weight's RMS on normal weights

Why logarithmic: scales are positive and spread over decades when a weight has outlier columns. A linear code spends
its 256 levels on the outliers; equal steps of ln(absmax) keep the relative error of every scale below half a step.

Why row by row: FSDP2 shards dim 0. Here a row needs nothing outside itself, so a rank reads and quantizes only its
own rows, any world size works, and the bytes do not depend on the world size. torchao's tensor subclass has
one mean for the whole tensor and refuses shapes that do not divide (torchtune #1987).

Why uint8 parameters and no tensor subclass: MixedPrecisionPolicy casts every floating parameter, so a float32 scale
would arrive in bf16 after the all-gather (accelerate #3983, bitsandbytes #1945). uint8 is gathered as it is: 4.14 bits
a weight on the wire. The two float32 of a row travel as eight bytes.

What is given up: the weight is dequantized once in the forward and once for the backward, which takes over what a
checkpointed block's recomputation has dequantized; nothing else in 16 bits outlives the product it was made for.

Shapes: N out features, D in features. codes_ND2 is [N, D/2], scales_NS is [N, D/64 + 8].
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 64
ENDS = 8  # bytes: a row's smallest and largest ln(absmax), two float32
LEVELS = 254  # steps between scale codes 1 and 255; code 0 means the whole block is zero
CHUNK = 1 << 22  # weights worked on at a time: bounds the float32 temporaries to 16 MiB each

# Appendix E of the paper; the same 16 numbers as bitsandbytes, so the codes are equal too.
CODEBOOK = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)


# ---------------------------------------------------------------- the format


def scale_bytes(d):
    """Bytes of scales in a row of `d` weights."""
    return d // BLOCK + ENDS


def quantize(w_ND):
    """[N, D] floating weight -> (codes_ND2, scales_NS), both uint8. Rows are independent of each other.

    Works on 4 million weights at a time: about 17 bytes each of temporaries, whatever the size of the weight.
    """
    N, D = w_ND.shape
    codes_ND2 = torch.empty(N, D // 2, dtype=torch.uint8, device=w_ND.device)
    scales_NS = torch.empty(N, scale_bytes(D), dtype=torch.uint8, device=w_ND.device)
    rows = max(1, CHUNK // D)
    for w, codes, scales in zip(w_ND.split(rows), codes_ND2.split(rows), scales_NS.split(rows)):
        blocks = w.float().view(len(w), -1, BLOCK)
        absmax = blocks.abs().amax(-1)
        if not absmax.isfinite().all():
            raise ValueError("a weight to quantize holds inf or nan: the checkpoint is damaged")
        nearest = nearest_levels(blocks / absmax.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1))
        nearest = nearest.view(len(w), D // 2, 2)
        codes.copy_(nearest[..., 0] << 4 | nearest[..., 1])  # the first in the high nibble, as bitsandbytes packs
        scales.copy_(quantize_scales(absmax))
    return codes_ND2, scales_NS


def nearest_levels(unit):
    """Values in [-1, 1] -> uint8 indices into the codebook."""
    midpoints = torch.tensor([(a + b) / 2 for a, b in zip(CODEBOOK, CODEBOOK[1:])], device=unit.device)
    return torch.bucketize(unit, midpoints, out_int32=True).to(torch.uint8)


def quantize_scales(absmax):
    """[N, D/64] float32 absmaxes -> [N, D/64 + 8] uint8: their codes and the two ends of the row."""
    # float64: its rounding is far below one of 254 steps, so the codes cannot depend on how a vectorised log
    # treats the tail of a tensor, that is on how many rows this rank holds
    used = absmax > 0
    ln = absmax.double().log()
    ends = torch.stack([ln.masked_fill(~used, math.inf).amin(-1), ln.amax(-1)], -1)
    ends = ends.masked_fill(~used.any(-1, keepdim=True), 0.0).float()  # a row of zeros has no ends
    low, high = ends.double().split(1, -1)
    step = (high - low).clamp_min(1e-30) / LEVELS
    codes = 1 + ((ln - low) / step).round().clamp(0, LEVELS)
    codes = codes.masked_fill(~used, 0).to(torch.uint8)
    return torch.cat([codes, ends.view(torch.uint8)], -1)


def block_scales(scales_NS):
    """[N, D/64 + 8] uint8 -> [N, D/64] float32 absmaxes."""
    codes, ends = scales_NS.split([scales_NS.shape[-1] - ENDS, ENDS], -1)
    low, high = ends.contiguous().view(torch.float32).split(1, -1)
    scales = torch.exp(low + (codes.float() - 1) * ((high - low) / LEVELS))
    return scales.masked_fill_(codes == 0, 0.0)


@functools.cache
def levels_of_bytes(device):
    """[256] int64: the two float32 levels of each byte of codes. Made once: a copy from the host waits for the GPU."""
    levels = torch.tensor(CODEBOOK, device="cpu")
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], -1).view(torch.int64).view(-1).to(device)


def dequantize(codes_ND2, scales_NS, dtype):
    """(codes_ND2, scales_NS) -> [N, D] in `dtype`; products in float32. One gather fetches a byte's two levels."""
    N, D = codes_ND2.shape[0], codes_ND2.shape[1] * 2
    pairs = levels_of_bytes(codes_ND2.device)
    w_ND = torch.empty(N, D, dtype=dtype, device=codes_ND2.device)
    rows = max(1, CHUNK // D)
    for out, codes, scales in zip(w_ND.split(rows), codes_ND2.split(rows), block_scales(scales_NS).split(rows)):
        unit = pairs.index_select(0, codes.reshape(-1).int()).view(torch.float32).view(*scales.shape, BLOCK)
        torch.mul(unit, scales.unsqueeze(-1), out=unit)
        out.copy_(unit.view(out.shape))
    return w_ND


def dequantize_pairs(codes_M32, scales_M1):
    """Blocks of 64 weights for torch.compile: [M, 32] int32, each the two bf16 of a byte. A gather has no vector
    instruction worth its name; 15 selects have, and a byte in and four out keep loads and stores contiguous."""
    codes_M32 = codes_M32.int()

    def choose(bits, levels):
        half = len(levels) // 2
        low, high = levels if half == 1 else (choose(bits[1:], levels[:half]), choose(bits[1:], levels[half:]))
        return torch.where(bits[0], high, low)

    def bf16_bits(shift):  # in the upper half of an int32, rounded to the nearest even
        levels = choose([codes_M32 & (bit << shift) != 0 for bit in (8, 4, 2, 1)], CODEBOOK)
        bits = (levels * scales_M1).view(torch.int32)
        return bits + 0x7FFF + (bits >> 16 & 1)

    return bf16_bits(4) >> 16 & 0xFFFF | bf16_bits(0) & -0x10000


@functools.cache
def compiled(function):
    return torch.compile(function, fullgraph=True, dynamic=True)  # one graph for all shapes


def dequantize_compiled(codes_ND2, scales_NS):
    """dequantize() in bf16 by torch.compile."""
    scales = compiled(block_scales)(scales_NS.detach()).view(-1, 1)  # a Parameter would be compiled for its shape alone
    pairs = compiled(dequantize_pairs)(codes_ND2.detach().view(-1, BLOCK // 2), scales)
    return pairs.view(torch.bfloat16).view(len(codes_ND2), -1)


# ---------------------------------------------------------------- the layer

kept = {}  # address of codes -> weight, from a block's recomputation to its backward; filled while `keeping` is true
keeping = False


def keep_weights(on):
    """Activation checkpointing calls this around the recomputation of a block: the weights it dequantizes are used again
    by the backward that follows, and only then freed. Costs 2 bytes a weight of one block (8B: 0.3 GiB)."""
    global keeping
    keeping = on
    if on:
        kept.clear()  # what the backward of the block before had no use for


def matmul(x, codes_ND2, scales_NS, fast, keep):
    w_ND = weight(codes_ND2, scales_NS, x.dtype, fast)
    if keep and keeping:
        kept[codes_ND2.data_ptr()] = w_ND
    return F.linear(x, w_ND)


def matmul_grad(grad, codes_ND2, scales_NS, fast):
    w_ND = kept.pop(codes_ND2.data_ptr(), None)
    return grad @ (weight(codes_ND2, scales_NS, grad.dtype, fast) if w_ND is None else w_ND)


def weight(codes_ND2, scales_NS, dtype, fast):
    if fast and dtype is torch.bfloat16:
        return dequantize_compiled(codes_ND2, scales_NS)
    return dequantize(codes_ND2, scales_NS, dtype)


# The same two as operators that torch.compile does not look into. It would move the dequantization of the backward into
# the forward, where it depends on nothing else, and keep all weights in 16 bits in between.
matmul_op = torch.library.custom_op("oomph::nf4_matmul", matmul, mutates_args=(),
                                    schema="(Tensor x, Tensor codes, Tensor scales, bool fast, bool keep) -> Tensor")
grad_op = torch.library.custom_op("oomph::nf4_matmul_grad", matmul_grad, mutates_args=(),
                                  schema="(Tensor grad, Tensor codes, Tensor scales, bool fast) -> Tensor")
matmul_op.register_fake(lambda x, codes, *_: x.new_empty(*x.shape[:-1], codes.shape[0]))
grad_op.register_fake(lambda grad, codes, *_: grad.new_empty(*grad.shape[:-1], codes.shape[1] * 2))


class NF4Matmul(torch.autograd.Function):
    """x [..., D] @ w.T with w in NF4 and frozen: backward dequantizes again instead of keeping 16 bits a weight.

    codes and scales hang on ctx as they are and not through save_for_backward. They are parameters that nothing
    updates (FSDP2 refills the same storage before the backward), and an autograd.Function that saves a tensor would
    force activation checkpointing to recompute this product, the last of a block, only to reach that save.
    """

    @staticmethod
    def forward(ctx, x, codes_ND2, scales_NS, fast):
        ctx.nf4 = codes_ND2, scales_NS, fast
        function = matmul_op if fast else matmul
        return function(x, codes_ND2, scales_NS, fast, ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx, grad):
        codes_ND2, scales_NS, fast = ctx.nf4
        function = grad_op if fast else matmul_grad
        return function(grad, codes_ND2, scales_NS, fast), None, None, None


class NF4Linear(nn.Module):
    """A frozen linear layer in NF4. Same place and bias as the nn.Linear it stands for."""

    def __init__(self, in_features, out_features, bias, device=None):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        codes = torch.empty(out_features, in_features // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(out_features, scale_bytes(in_features), dtype=torch.uint8, device=device)
        self.weight_codes = nn.Parameter(codes, requires_grad=False)
        self.weight_scales = nn.Parameter(scales, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, device=device), requires_grad=False) if bias else None
        self.fast = False  # dequantize by torch.compile

    def forward(self, x):
        y = NF4Matmul.apply(x, self.weight_codes, self.weight_scales, self.fast)
        return y if self.bias is None else y + self.bias.to(x.dtype)


def quantize_linears_(module):
    """Replaces every linear layer below `module` (on meta: the weights come later) by an NF4Linear.

    Raises ValueError for a layer whose rows do not divide into blocks; no Llama or Qwen has one.
    """
    for name, parent in list(module.named_modules()):
        for child_name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                if child.in_features % BLOCK:
                    raise ValueError(f"--qlora: NF4 has blocks of {BLOCK} weights, and {name}.{child_name} has rows of "
                                     f"{child.in_features}: use --lora for this model")
                device = child.weight.device
                setattr(parent, child_name, NF4Linear(child.in_features, child.out_features, child.bias is not None, device))
