"""NF4: 4-bit NormalFloat weights (QLoRA, arXiv:2305.14314) in plain uint8 parameters.

A weight is cut into blocks of 64 along its row. A block keeps its largest magnitude (absmax) and, for each element, the
index of the nearest of 16 levels, quantiles of a standard normal. The absmaxes are quantized as well ("double
quantization"): 8 bits each, on a logarithmic scale between the smallest and the largest of the row, two float32.

    bits per weight = 4 + 8/64 + 64/D = 4.14 at D = 4096      error: 0.092 of the weight's RMS on normal weights

Why logarithmic: scales spread over decades when a weight has outlier columns. A linear code spends its 256 levels on
the outliers; equal steps of ln(absmax) keep the relative error of every scale below half a step.
Why row by row: FSDP2 shards dim 0. A row needs nothing outside itself, so a rank reads and quantizes its own rows only,
and the bytes do not depend on the world size.
Why uint8 parameters: MixedPrecisionPolicy casts every floating parameter, so a float32 scale would arrive in bf16 after
the all-gather (accelerate #3983, bitsandbytes #1945). uint8 is gathered as it is.
Given up: a weight is dequantized again for the backward; under checkpointing the second forward's stays (8B: 0.3 GiB).

N out features, D in features. codes_ND2 is [N, D/2], scales_NS is [N, D/64 + 8].
"""

import functools
import itertools
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
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)


def quantize(w_ND, name="weight"):
    """[N, D] floating weight -> (codes_ND2, scales_NS), both uint8. ValueError for inf and nan."""
    N, D = w_ND.shape
    codes_ND2 = torch.empty(N, D // 2, dtype=torch.uint8, device=w_ND.device)
    scales_NS = torch.empty(N, D // BLOCK + ENDS, dtype=torch.uint8, device=w_ND.device)
    midpoints = torch.tensor([(a + b) / 2 for a, b in zip(CODEBOOK, CODEBOOK[1:])], device=w_ND.device)
    rows = max(1, CHUNK // D)
    for w, codes, scales in zip(w_ND.split(rows), codes_ND2.split(rows), scales_NS.split(rows)):
        blocks = w.float().view(len(w), -1, BLOCK)
        absmax = blocks.abs().amax(-1)
        if not absmax.isfinite().all():
            raise ValueError(f"{name} holds inf or nan: the checkpoint is damaged")
        unit = blocks / absmax.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        nearest = torch.bucketize(unit, midpoints, out_int32=True).to(torch.uint8).view(len(w), D // 2, 2)
        codes.copy_(nearest[..., 0] << 4 | nearest[..., 1])  # the first in the high nibble, as bitsandbytes packs
        scales.copy_(quantize_scales(absmax))
    return codes_ND2, scales_NS


def quantize_scales(absmax):
    """[N, D/64] float32 absmaxes -> [N, D/64 + 8] uint8: their codes and the two ends of the row."""
    # float64: far below one of 254 steps, so a vectorised log of the tensor's tail cannot change a code
    used = absmax > 0
    ln = absmax.double().log()
    ends = torch.stack([ln.masked_fill(~used, math.inf).amin(-1), ln.amax(-1)], -1)
    ends = ends.masked_fill(~used.any(-1, keepdim=True), 0.0).float()  # a row of zeros has no ends
    low, high = ends.double().split(1, -1)
    codes = 1 + ((ln - low) / ((high - low).clamp_min(1e-30) / LEVELS)).round().clamp(0, LEVELS)
    return torch.cat([codes.masked_fill(~used, 0).to(torch.uint8), ends.view(torch.uint8)], -1)


def block_scales(scales_NS):
    """[N, D/64 + 8] uint8 -> [N, D/64] float32 absmaxes."""
    codes, ends = scales_NS.split([scales_NS.shape[-1] - ENDS, ENDS], -1)
    low, high = ends.contiguous().view(torch.float32).split(1, -1)
    return torch.exp(low + (codes.float() - 1) * ((high - low) / LEVELS)).masked_fill_(codes == 0, 0.0)


@functools.cache
def levels_of_bytes(device):
    """[256] int64: the two float32 levels of each byte of codes. Made once: a copy from the host waits for the GPU."""
    levels = torch.tensor(CODEBOOK, device="cpu")
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], -1).view(torch.int64).view(-1).to(device)


def dequantize(codes_ND2, scales_NS, dtype):
    """(codes_ND2, scales_NS) -> [N, D] in `dtype`; products in float32. One gather fetches a byte's two levels."""
    N, D, device = len(codes_ND2), codes_ND2.shape[1] * 2, codes_ND2.device
    pairs, w_ND = levels_of_bytes(device), torch.empty(N, D, dtype=dtype, device=device)
    rows = max(1, CHUNK // D)
    for out, codes, scales in zip(w_ND.split(rows), codes_ND2.split(rows), block_scales(scales_NS).split(rows)):
        unit = pairs.index_select(0, codes.reshape(-1).int()).view(torch.float32).view(*scales.shape, BLOCK)
        out.copy_(unit.mul_(scales.unsqueeze(-1)).view(out.shape))
        del unit  # 16 MiB, beside the next one's
    return w_ND


def dequantize_pairs(codes_M32, scales_M1, table=None):
    """Blocks of 64 weights for torch.compile: [M, 32] int32, each the two bf16 of a byte, so that loads and stores are
    contiguous. A GPU looks levels up in `table`, up to 5 times as fast; on a CPU 15 selects are faster."""
    codes_M32 = codes_M32.int()

    def choose(bits, levels):
        half = len(levels) // 2
        low, high = levels if half == 1 else (choose(bits[1:], levels[:half]), choose(bits[1:], levels[half:]))
        return torch.where(bits[0], high, low)

    def bf16_bits(shift):  # in the upper half of an int32, rounded to the nearest even
        if table is None:
            levels = choose([codes_M32 & (bit << shift) != 0 for bit in (8, 4, 2, 1)], CODEBOOK)
        else:  # the first level is the low half
            levels = (table[codes_M32] >> (32 - 8 * shift)).int().view(torch.float32)
        bits = (levels * scales_M1).view(torch.int32)
        return bits + 0x7FFF + (bits >> 16 & 1)

    return bf16_bits(4) >> 16 & 0xFFFF | bf16_bits(0) & -0x10000


@functools.cache
def compiled(function):
    return torch.compile(function, fullgraph=True, dynamic=True)  # one graph for all shapes


def dequantize_compiled(codes_ND2, scales_NS):
    """dequantize() in bf16. A Parameter would be compiled for its shape alone, hence detach()."""
    scales = compiled(block_scales)(scales_NS.detach()).view(-1, 1)
    table = levels_of_bytes(codes_ND2.device) if codes_ND2.is_cuda else None
    pairs = compiled(dequantize_pairs)(codes_ND2.detach().view(-1, BLOCK // 2), scales, table)
    return pairs.view(torch.bfloat16).view(len(codes_ND2), -1)


@torch.library.custom_op("oomph::nf4_weight", mutates_args=())
def fast_weight(codes_ND2: torch.Tensor, scales_NS: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The weight in the dtype of `factor`, x or the gradient. If the backward's did not depend on the gradient,
    torch.compile would make it in the forward and keep all weights in 16 bits."""
    if factor.dtype is torch.bfloat16:
        return dequantize_compiled(codes_ND2, scales_NS)
    return dequantize(codes_ND2, scales_NS, factor.dtype)


fast_weight.register_fake(lambda codes, scales, factor: factor.new_empty(codes.shape[0], codes.shape[1] * 2))


def weight(codes_ND2, scales_NS, factor, fast, used=()):
    """The weight in the dtype of `factor`. used: (number of experts in the stack, those that are wanted)."""
    if used:
        E, experts = used
        codes_ND2, scales_NS = (s.unflatten(0, (E, -1))[experts].flatten(0, 1) for s in (codes_ND2, scales_NS))
    return fast_weight(codes_ND2, scales_NS, factor) if fast else dequantize(codes_ND2, scales_NS, factor.dtype)


def linear(x, w_ND, ends=None):
    """x @ w.T. With `ends`, [E] int32, w is a stack of E experts, and expert e has the rows of x up to ends[e]."""
    if ends is None:
        return F.linear(x, w_ND)
    return F.grouped_mm(x, w_ND.unflatten(0, (len(ends), -1)).transpose(1, 2), offs=ends)


class NF4Matmul(torch.autograd.Function):
    """linear() with w in NF4 and frozen: backward dequantizes again instead of keeping 16 bits a weight."""

    @staticmethod
    def forward(ctx, x, ends, *nf4):
        ctx.ends, ctx.nf4 = ends, nf4  # parameters that nothing updates; FSDP2 refills the same storage
        codes_ND2, scales_NS, *options = nf4
        return linear(x, weight(codes_ND2, scales_NS, x, *options), ends)

    @staticmethod
    def backward(ctx, grad):
        codes_ND2, scales_NS, *options = ctx.nf4
        w_ND = weight(codes_ND2, scales_NS, grad, *options)
        if ctx.ends is not None:
            grad_x = F.grouped_mm(grad, w_ND.unflatten(0, (len(ctx.ends), -1)), offs=ctx.ends)
        else:
            grad_x = grad @ w_ND
        return grad_x, *[None] * (1 + len(ctx.nf4))


class NF4Linear(nn.Module):
    def __init__(self, in_features, out_features, bias, device=None):
        super().__init__()
        D, N = self.in_features, self.out_features = in_features, out_features
        self.fast = False  # dequantize by torch.compile
        self.keeps_weight = False  # 16 bits from the forward to the backward
        frozen = functools.partial(nn.Parameter, requires_grad=False)
        self.weight_codes = frozen(torch.empty(N, D // 2, dtype=torch.uint8, device=device))
        self.weight_scales = frozen(torch.empty(N, D // BLOCK + ENDS, dtype=torch.uint8, device=device))
        self.bias = frozen(torch.empty(N, device=device)) if bias else None

    def forward(self, x, ends=None):
        nf4, used = (self.weight_codes, self.weight_scales), ()
        if ends is not None:  # experts without a row stay in 4 bits
            experts = ends.diff(prepend=ends.new_zeros(1)).nonzero().flatten()
            ends, used = ends[experts], (len(ends), experts)
        if self.keeps_weight:
            # Autograd saves the weight. Checkpointing drops it until the block's second forward has made it again: no
            # third dequantization. It is saved before the product runs, so that the second forward can end there.
            y = linear(x, weight(*nf4, x.detach(), self.fast, used), ends)
        else:
            y = NF4Matmul.apply(x, ends, *nf4, self.fast, used)
        return y if self.bias is None else y + self.bias.to(x.dtype)


def quantize_linears_(module):
    """Replaces each linear layer below `module` by an NF4Linear, to be filled. ValueError where rows do not divide into
    blocks; no Llama or Qwen has such."""
    for name, parent in list(module.named_modules()):
        for child_name, child in parent.named_children():
            if isinstance(child, nn.Linear) and child_name != "gate":  # the router's products stay in 16 bits
                D, bias = child.in_features, child.bias is not None
                if D % BLOCK:
                    raise ValueError(f"--qlora: NF4 has blocks of {BLOCK} weights, and {name}.{child_name} has rows of "
                                     f"{D}: use --lora for this model")
                setattr(parent, child_name, NF4Linear(D, child.out_features, bias, child.weight.device))


# ---------------- a rank's rows


def is_sharded(tensor):
    """Whether it is a DTensor of FSDP2. Only what shards imports that class: 0.4 s."""
    return hasattr(tensor, "placements")


def local(param):
    """(this rank's rows of a parameter as a plain tensor, its first row in the full one)."""
    if not is_sharded(param):
        return param.data, 0
    (dim,) = (i for i, placement in enumerate(param.placements) if placement.is_shard(0))
    rows = -(-param.shape[0] // param.device_mesh.size(dim))  # FSDP2 cuts like torch.chunk
    return param.to_local().data, min(rows * param.device_mesh.get_local_rank(dim), param.shape[0])


# ---------------- 8-bit floats, and the AdamW that keeps its moments in them

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


def mix(x):
    """Index -> 32 well mixed bits (MurmurHash3's finalizer). For an int or an int64 tensor."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = x & 0xFFFFFFFF
        x = (x ^ x >> shift) * factor
    return x


def drop_bits(x, dither, n):
    """Bits of the float32 x above the lowest n, rounded up with the probability that makes the mean right."""
    return (dither & (1 << n) - 1).add_(x.view(torch.int32)).bitwise_right_shift_(n)


def round_to(dtype, x, dither):
    """float32 -> bf16 with x as its mean over all dithers (arXiv:2010.06192); float32 stays as it is."""
    if dtype is torch.float32:
        return x
    return drop_bits(x, dither, 16).bitwise_left_shift_(16).view(torch.float32).to(dtype)


BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # torch's defaults
MOMENTS = "exp_avg", "exp_avg_sq"  # torch's names
MOMENT_BLOCK = 256  # neighbours in a row that share a scale


def dither_words(step, number, start, stop, D, device):
    """Odd int32 factors for rows start..stop of the number-th parameter: rows_3N (for m, v, the weight) and cols_D. The
    low bits of rows[i] * cols[j] are the random bits of element (i, j): uniform, independent between elements and
    steps, the same for any world size, with no generator to save. torch.rand takes six times as long on a CPU."""
    key = mix(mix(step) + number)  # plain ints: nothing is copied to the device
    rows_N, cols_D = torch.arange(start, stop, device=device), torch.arange(D, device=device)
    rows_3N = torch.stack([mix(mix(key + salt) + rows_N) for salt in (1, 2, 3)])
    return (rows_3N | 1).to(torch.int32), (mix(key + cols_D) | 1).to(torch.int32)


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
    So rounding is random and right on average, of v and not of its root, because v is what is averaged over steps."""
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
    --stochastic_rounding, for moments too: 0.999 of a bf16 number is that number again. Blocks lie within a row: their
    bytes do not depend on the world size. The scales of [N, D] are [N, D/256]. Vectors keep float32 moments."""

    def __init__(self, groups, args, bad):
        super().__init__(groups, {"lr": args.lr})
        self.adamw_ = torch.compile(adamw_, dynamic=True) if args.compile else adamw_
        self.stochastic_rounding, self.found_inf, self.numbers = args.stochastic_rounding, bad, {}
        for p in itertools.chain(*(group["params"] for group in self.param_groups)):
            self.numbers[p] = len(self.numbers)
            dtype = torch.float32 if p.dim() < 2 else torch.uint8 if args.optim == "adamw8bit" else p.dtype
            self.state[p] = {"step": torch.zeros(())}  # on the CPU: reading it does not wait for the device
            for moment in MOMENTS:
                self.state[p][moment] = torch.zeros_like(p, dtype=dtype)
                if dtype is torch.uint8:  # [N, D/256] with the sharding of p [N, D]
                    n_scales = -(-p.shape[1] // MOMENT_BLOCK)
                    self.state[p][f"{moment}_scales"] = torch.zeros_like(p.detach()[:, :n_scales], dtype=torch.float32)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update_(p, group["lr"], group["weight_decay"])

    def update_(self, p, lr, weight_decay):
        state, (_, start) = self.state[p], local(p)
        state["step"] += 1
        w, grad, m, v = (matrix_of(x) for x in (p, p.grad, state["exp_avg"], state["exp_avg_sq"]))
        scales = [matrix_of(state[f"{moment}_scales"]) if m.dtype is torch.uint8 else None for moment in MOMENTS]
        step, (N, D) = int(state["step"]), w.shape
        rows_3N, cols_D = dither_words(step, self.numbers[p], start, start + N, D, w.device)
        numbers = 1 - lr * weight_decay, lr / (1 - BETA1**step), (1 - BETA2**step) ** 0.5
        numbers = torch.tensor(numbers, dtype=torch.float64)  # torch.compile would take a float for a constant
        skip = self.found_inf > 0
        # float32 temporaries of 4 MiB on a CPU, where larger ones are new pages, else of 16; compiled code has few
        n_weights = 1 << 20 if w.device.type == "cpu" else 1 << 22 if self.adamw_ is adamw_ else 1 << 24
        n_rows, whole = max(1, n_weights // D), D // MOMENT_BLOCK * MOMENT_BLOCK
        for i, (first, last) in itertools.product(range(0, N, n_rows), ((0, whole), (whole, D))):
            if first == last:
                continue  # whole blocks, then the shorter one at the end of a row
            rows, blocks = slice(i, i + n_rows), slice(first // MOMENT_BLOCK, -(-last // MOMENT_BLOCK))
            split = functools.partial(torch.unflatten, dim=-1, sizes=(-1, min(MOMENT_BLOCK, last - first)))
            moments = [(split(stored[rows, first:last]), s if s is None else s[rows, blocks, None], levels)
                       for stored, s, levels in zip((m, v), scales, code_levels(w.device))]
            self.adamw_(split(w[rows, first:last]), split(grad[rows, first:last]), *moments,
                        (rows_3N[:, rows, None, None], split(cols_D[first:last])), numbers.unbind(), skip,
                        self.stochastic_rounding)


def matrix_of(x):
    """This rank's rows of a parameter or its state, a plain matrix."""
    return local(x)[0].reshape(-1, *(x.shape[1:] or [1]))
