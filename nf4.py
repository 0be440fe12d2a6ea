"""Numbers in few bits: weights in 4 (NF4) or 5 (NF5), and the moments of AdamW in 8.

NF4 is the 4-bit NormalFloat of QLoRA (arXiv:2305.14314), here in plain uint8 parameters. A weight is cut into
blocks of 64 along its row. A block stores its largest magnitude as a scale and, for each element, the index
of the nearest of 16 levels, which are quantiles of a standard normal. The scales are quantized too ("double
quantization"): 8 bits each, on a logarithmic scale between the smallest and the largest of the row, which are
stored as two float32.

    bits per weight = 4 + 8/64 + 64/D = 4.14 at D = 4096    error: 0.092 of the weight's RMS on normal weights

The codes are those of bitsandbytes, bit for bit, so an adapter is trained on the weights that its users get
when they load the base in 4 bits. NF5 has 32 levels, 5.14 bits, an error of 0.043.

Why logarithmic: outlier columns spread the scales over decades, and equal steps of ln(scale) bound the
relative error of each. Why row by row: FSDP2 shards dim 0, so a rank reads and quantizes its own rows only,
and the bytes do not depend on the world size. Why uint8: MixedPrecisionPolicy casts every floating parameter,
so a float32 scale would arrive in bf16 after the all-gather (accelerate #3983, bitsandbytes #1945).

The 8-bit AdamW stores its moments as 8-bit floats in blocks of 256 along a row (blocks as in
arXiv:2110.02861): 2 + 8/256 bytes of state per parameter instead of 8. v decays by 0.1 % per step, far less
than the gap between two codes, so rounding to the nearest would freeze it: rounding is random and right on
average. Its random bits are a hash of (step, parameter, row, column): there is no generator to save.

Shapes are in the names: N rows of a matrix (out features of a weight, tokens of an activation), D columns (in
features), M blocks of 64, E experts of a stack; in codes_NP a row has P = D/2 bytes, or D/2 + D/8 in 5 bits,
and in scales_NQ Q = D/64 + 8. In the optimizer, n rows of a region have b blocks of 256 each. A block is
neighbours in a row that share a scale, a band rows that are processed at a time, a region rows and columns
that one call of adamw_() updates."""

import functools
import itertools
import math
import warnings
import zlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 64
RANGE_BYTES = 8  # a row's smallest and largest ln(scale), two float32
SCALE_STEPS = 254  # between the codes 1 and 255 of a scale; code 0 means that the whole block is zero
# of a band: float32 temporaries of 16 MiB each, where the largest weight of an 8B model has 224 MiB
BAND_WEIGHTS = 1 << 22

# appendix E of the paper, and bitsandbytes
CODEBOOK = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)
# Lloyd's algorithm (1957) on blocks of normal weights, with -1, 0 and 1 fixed
CODEBOOK_OF_32 = (
    -1.0, -0.8713, -0.7673, -0.6787, -0.6006, -0.5301, -0.4653, -0.4049, -0.348, -0.2939, -0.2419, -0.1916,
    -0.1426, -0.0945, -0.0471, 0.0, 0.0442, 0.0885, 0.1333, 0.1789, 0.2255, 0.2736, 0.3234, 0.3753, 0.4299,
    0.4878, 0.5501, 0.618, 0.6933, 0.7786, 0.8782, 1.0,
)
CODEBOOKS = {4: CODEBOOK, 5: CODEBOOK_OF_32}  # by bits
# What the bytes of a weight depend on: a resumed run compares it, because adapters fit one format only.
# Change the first words with the rule in quantize().
FORMATS = {bits: f"codes by the largest magnitude, blocks of {BLOCK}, {SCALE_STEPS} steps of scales, "
                 f"codebook {zlib.crc32(repr(codebook).encode()):08x}"
           for bits, codebook in CODEBOOKS.items()}


def bands(*matrices, n_weights=None):
    """Cuts matrices with equally many rows into bands of about n_weights numbers -> iterator."""
    n_rows = max(1, (n_weights or BAND_WEIGHTS) // matrices[0].shape[1])
    return zip(*(matrix.split(n_rows) for matrix in matrices))


def quantize(w_ND, bits, name="weight"):
    """[N, D] floating weight -> (codes_NP, scales_NQ), both uint8. ValueError for inf and nan."""
    N, D = w_ND.shape
    codes_NP = w_ND.new_empty(N, D * bits // 8, dtype=torch.uint8)
    scales_NQ = w_ND.new_empty(N, D // BLOCK + RANGE_BYTES, dtype=torch.uint8)
    # 1 MiB on a CPU, where larger temporaries would be new pages each time
    n_weights = min(1 << 18, BAND_WEIGHTS) if w_ND.device.type == "cpu" else BAND_WEIGHTS
    for w, codes, scales in bands(w_ND, codes_NP, scales_NQ, n_weights=n_weights):
        blocks = w.float().view(len(w), -1, BLOCK)
        absmax = blocks.abs().amax(-1)
        if not absmax.isfinite().all():
            raise ValueError(f"{name} contains inf or nan: the file is damaged")
        relative = blocks / absmax.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        codes.copy_(pack_codes(nearest_levels(relative, bits).view(-1, D), bits))
        scales.copy_(quantize_scales(absmax))
    return codes_NP, scales_NQ


@functools.cache
def midpoints_of_cells(device, bits):
    """For cells of 1/16, or in 5 bits 1/32, in -1 ... 1: how many midpoints lie below, and the next one.
    A midpoint lies between two neighbouring levels: there the nearest level changes."""
    midpoints = [(low + high) / 2 for low, high in itertools.pairwise(CODEBOOKS[bits])]
    borders = torch.tensor([*midpoints, math.inf], device="cpu")
    n_cells = 2**bits
    starts = torch.arange(-n_cells, n_cells + 1, device="cpu") / n_cells
    n_below = torch.bucketize(starts, borders)
    return n_below.to(torch.uint8).to(device), borders[n_below].to(device)


def nearest_levels(relative, bits):
    """Numbers in -1 ... 1 -> the index of the nearest level, uint8."""
    # at most one midpoint lies in a cell; torch.bucketize() takes two to six times as long on a CPU
    n_below, next_midpoint = midpoints_of_cells(relative.device, bits)
    n_cells = 2**bits  # on either side of 0
    cells = (relative * n_cells + n_cells).int().flatten()
    is_above = relative.flatten() > next_midpoint.index_select(0, cells)
    return n_below.index_select(0, cells) + is_above


def pack_codes(indices_ND, bits):
    """Indices of levels, uint8 -> codes_NP. A byte has the lower four bits of two neighbours, the first in
    its high half, as in bitsandbytes. In 5 bits, bytes follow with the fifth bits of four pairs each."""
    D = indices_ND.shape[1]
    first_N, second_N = indices_ND.unflatten(1, (-1, 2)).unbind(-1)
    nibbles = (first_N & 15) << 4 | second_N & 15
    if bits == 4:
        return nibbles
    fifths = first_N >> 4 << 1 | second_N >> 4
    quarters = fifths.split(D // 8, 1)  # a byte has a pair of each: a CPU unpacks a quarter by one shift
    packed = quarters[0]
    for number in (1, 2, 3):
        packed = packed | quarters[number] << 2 * number
    return torch.cat([nibbles, packed], 1)


def pairs_of(codes_NP, D):
    """-> [N, D/2] int32: the index in level_pairs() of each two neighbours."""
    if codes_NP.shape[1] == D // 2:
        return codes_NP.int()
    nibbles, fifths = codes_NP.split([D // 2, D // 8], 1)
    fifths = fifths.to(torch.int16)  # they come above the two codes
    quarters = [fifths << shift for shift in (8, 6, 4, 2)]
    return (torch.cat(quarters, 1).bitwise_and_(0x300) | nibbles).int()


def quantize_scales(scales):
    """[N, D/64] float32 -> [N, D/64 + 8] uint8: their codes, then the range of the row."""
    is_zero = scales == 0
    # float64, so that a vectorised log, which differs in the tail of a tensor, cannot change a code
    ln = scales.double().log()
    smallest = ln.masked_fill(is_zero, math.inf).amin(-1)
    largest = ln.amax(-1)
    row_range = torch.stack([smallest, largest], -1).float()
    row_range.masked_fill_(row_range.isinf(), 0.0)  # a row of zeros has none
    # of the float32 range that is stored
    low, high = row_range.double().split(1, -1)
    step = (high - low).clamp_min(1e-30) / SCALE_STEPS
    codes = 1 + ((ln - low) / step).round().clamp(0, SCALE_STEPS)
    codes.masked_fill_(is_zero, 0)
    return torch.cat([codes.to(torch.uint8), row_range.view(torch.uint8)], -1)


def dequantize_scales(scales_NQ):
    """[N, D/64 + 8] uint8 -> [N, D/64] float32 scales."""
    codes = scales_NQ[:, :-RANGE_BYTES]
    # a copy even of a single row: floats begin at a multiple of four bytes
    range_bytes = scales_NQ[:, -RANGE_BYTES:].clone(memory_format=torch.contiguous_format)
    low, high = range_bytes.view(torch.float32).split(1, -1)
    step = (high - low) / SCALE_STEPS
    ln = low + (codes - 1.0) * step  # in float32, as 1.0 is no integer
    return ln.exp().masked_fill_(codes == 0, 0.0)


@functools.cache
def level_pairs(device, bits):
    """[256] int64, in 5 bits [1024]: two float32 levels. Cached: a copy from the host waits for the GPU."""
    levels = torch.tensor(CODEBOOKS[bits], device="cpu")
    sixteens = levels.split(16)  # levels with one fifth bit; in 4 bits there is one such part
    pairs = [torch.cartesian_prod(*two) for two in itertools.product(sixteens, repeat=2)]
    return torch.cat(pairs).view(torch.int64).flatten().to(device)


def width_of(scales_NQ):
    """-> D of a packed weight."""
    return (scales_NQ.shape[1] - RANGE_BYTES) * BLOCK


def dequantize(codes_NP, scales_NQ, dtype):
    """(codes_NP, scales_NQ) -> [N, D] in `dtype`."""
    return dequantize_blocks(codes_NP, dequantize_scales(scales_NQ), dtype)


def dequantize_blocks(codes_NP, absmax_NM, dtype):
    """dequantize() with scales in float32."""
    D = absmax_NM.shape[1] * BLOCK
    w_ND = codes_NP.new_empty(len(codes_NP), D, dtype=dtype)
    table = level_pairs(codes_NP.device, codes_NP.shape[1] * 8 // D)
    for w, codes, absmax in bands(w_ND, codes_NP, absmax_NM):
        pairs = table.index_select(0, pairs_of(codes, D).flatten())  # one gather for both levels of a byte
        levels = pairs.view(torch.float32).view(*absmax.shape, BLOCK)
        levels.mul_(absmax.unsqueeze(-1))
        w.copy_(levels.view(w.shape))
        del pairs, levels  # or they would stay beside those of the next band
    return w_ND


def bits_of_nearest(x, dtype):
    """float32 -> the bits of the nearest bf16 or fp16 (ties to even) in the lower half of an int32."""
    if dtype is torch.float16:  # has subnormals and overflow
        return x.to(dtype).view(torch.int16).int()
    bits = x.view(torch.int32)
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def weight_in_pairs(codes_NP, scales_NQ, table, dtype):
    """dequantize() for torch.compile -> [N * M, 32] int32 of two weights each: loads are contiguous."""
    scales_NM = dequantize_scales(scales_NQ)
    index = pairs_of(codes_NP, scales_NM.shape[1] * BLOCK).view(-1, BLOCK // 2)
    pairs = table[index]  # one load of 8 bytes
    first = pairs.int().view(torch.float32)
    second = (pairs >> 32).int().view(torch.float32)
    scales = scales_NM.view(-1, 1)
    low_half = bits_of_nearest(first * scales, dtype) & 0xFFFF
    high_half = bits_of_nearest(second * scales, dtype) << 16
    return low_half | high_half


class CompiledOrPlain:
    """torch.compile(function), or with a warning the plain function where torch cannot compile it: it is one
    graph, so nothing of it has run if that fails. can_compile(*args): whether a call is compiled at all."""

    failed = {}  # {function: why torch could not compile it}, of this process

    def __init__(self, function, dynamic, can_compile=lambda *args: True):
        self.function = function
        self.can_compile = can_compile
        self.code = getattr(function, "__func__", function)  # a method's, which all blocks share
        self.compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        self.has_graph = False  # whether there is a result with a gradient

    def __call__(self, *args):
        if self.can_compile(*args) and (self.code not in self.failed or self.has_graph):
            try:
                out = self.compiled(*args)
            except torch._dynamo.exc.TorchDynamoException as error:
                # a recomputed block must save what its forward saved: the plain function saves other tensors
                if self.has_graph:
                    raise
                self.note_failure(error)
            else:
                self.has_graph = self.has_graph or torch.is_grad_enabled()
                return out
        return self.function(*args)

    def note_failure(self, error):
        """One warning for each reason: without a C compiler all functions fail alike."""
        error = getattr(error, "inner_exception", error)
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if why not in self.failed.values():
            warnings.warn(f"torch.compile failed on {self.code.__qualname__}: {why}. It runs uncompiled, and "
                          "so does all that fails for the same reason", stacklevel=3)
        self.failed[self.code] = why


@functools.cache
def compiled_weight_in_pairs():
    return CompiledOrPlain(weight_in_pairs, dynamic=True)  # one graph for all shapes


# An operator, or torch.compile would see through it; custom_op() takes the host longer.
torch.library.define("oomph::nf4_weight", "(Tensor codes, Tensor scales, Tensor like) -> Tensor")
fast_weight = torch.ops.oomph.nf4_weight.default


@torch.library.impl("oomph::nf4_weight", "default")
def compute_weight(codes_NP, scales_NQ, like):
    """The weight in the dtype of `like`: x, or in the backward the gradient. So the backward's call needs the
    gradient: torch.compile cannot do it in the forward, and keep all 16-bit weights alive."""
    dtype = like.dtype
    if dtype is torch.float32 or weight_in_pairs in CompiledOrPlain.failed:
        # in bands: temporaries of the plain weight_in_pairs() are as large as the weight
        return dequantize(codes_NP, scales_NQ, dtype)
    table = level_pairs(codes_NP.device, codes_NP.shape[1] * 8 // width_of(scales_NQ))
    # detach(), or torch.compile would make a graph for each shape of a Parameter
    pairs = compiled_weight_in_pairs()(codes_NP.detach(), scales_NQ.detach(), table, dtype)
    return pairs.view(dtype).view(len(codes_NP), -1)


@torch.library.register_fake("oomph::nf4_weight")
def shape_of_weight(codes_NP, scales_NQ, like):
    return like.new_empty(len(codes_NP), width_of(scales_NQ))


def weight(codes, scales, fast, like):
    if fast:
        return fast_weight(codes, scales, like)
    return dequantize(codes, scales, like.dtype)


def linear(x, w_ND, row_stops=None):
    """x @ w.T, or with row_stops [E] int32 that of E stacked experts: expert e's rows end at row_stops[e]."""
    if row_stops is None:
        return F.linear(x, w_ND)
    w_END = w_ND.unflatten(0, (len(row_stops), -1))
    return F.grouped_mm(x, w_END.transpose(1, 2), offs=row_stops)


MANY_ROWS = 8  # per expert: with more, hardly any expert has none, and to ask makes the host wait


def experts_with_rows(codes, scales, row_stops):
    """-> these of the experts that have a row of x: 8 of 128 while an answer is generated."""
    n_rows_E = row_stops.diff(prepend=row_stops.new_zeros(1))
    used = n_rows_E.nonzero().flatten()
    by_expert = (packed.unflatten(0, (len(row_stops), -1)) for packed in (codes, scales))
    codes, scales = (packed[used].flatten(0, 1) for packed in by_expert)
    return codes, scales, row_stops[used]


class NF4Matmul(torch.autograd.Function):
    """linear() with a frozen weight in NF4. The backward dequantizes it again: no 16-bit weight is kept."""

    @staticmethod
    def forward(ctx, x, codes, scales, fast, row_stops):
        # no save_for_backward(): FSDP2 gathers codes and scales into the same storage again
        ctx.weight = functools.partial(weight, codes, scales, fast)
        ctx.row_stops = row_stops
        return linear(x, ctx.weight(x), row_stops)

    @staticmethod
    def backward(ctx, grad):
        w_ND = ctx.weight(grad)
        if ctx.row_stops is None:
            grad_x = grad @ w_ND
        else:
            w_END = w_ND.unflatten(0, (len(ctx.row_stops), -1))
            grad_x = F.grouped_mm(grad, w_END, offs=ctx.row_stops)
        return grad_x, None, None, None, None


class NF4Linear(nn.Module):
    """A frozen linear layer in NF4, or with bits=5 in NF5.

    Set from outside: fast (model.compile_: dequantize by torch.compile), keeps_weight (model.keep_weights_:
    the forward's 16-bit weight stays for the backward)."""

    def __init__(self, in_features, out_features, bias, device=None, bits=4):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.fast = False
        self.keeps_weight = False
        frozen = functools.partial(nn.Parameter, requires_grad=False)
        packed = functools.partial(torch.empty, dtype=torch.uint8, device=device)
        self.weight_codes = frozen(packed(out_features, in_features * bits // 8))
        self.weight_scales = frozen(packed(out_features, in_features // BLOCK + RANGE_BYTES))
        self.bias = frozen(torch.empty(out_features, device=device)) if bias else None

    def forward(self, x, row_stops=None):
        codes = self.weight_codes
        scales = self.weight_scales
        is_generating = row_stops is not None and not torch.is_grad_enabled()
        # a plan (x is on the meta device) cannot know which have rows
        if is_generating and 0 < len(x) < MANY_ROWS * len(row_stops) and not x.is_meta:
            codes, scales, row_stops = experts_with_rows(codes, scales, row_stops)
        if self.keeps_weight:
            # Autograd saves this weight, in a recomputed block the recomputation's (0.3 GiB for 8B): two
            # dequantizations, not three. It is saved before the product, so a recomputation may end there.
            y = linear(x, weight(codes, scales, self.fast, like=x.detach()), row_stops)
        else:
            y = NF4Matmul.apply(x, codes, scales, self.fast, row_stops)
        return y if self.bias is None else y + self.bias.to(x.dtype)


# stay in 16 bits: the router, the gate of a shared expert, the gates of a Gated DeltaNet
SMALL = ("gate", "shared_expert_gate", "in_proj_a", "in_proj_b")


def quantize_linears_(module, bits_of):
    """Replaces the linear layers below `module`, except SMALL ones, by empty NF4Linears."""
    for parent_name, parent in list(module.named_modules()):
        for child_name, child in parent.named_children():
            if not isinstance(child, nn.Linear) or child_name in SMALL:
                continue
            name = f"{parent_name}.{child_name}"
            D = child.in_features
            if D % BLOCK:
                raise ValueError(f"--qlora: NF4 needs rows that divide into blocks of {BLOCK} weights, but "
                                 f"{name} has rows of {D}: use --lora for this model")
            has_bias = child.bias is not None
            layer = NF4Linear(D, child.out_features, has_bias, child.weight.device, bits_of(name))
            setattr(parent, child_name, layer)


# ---------------- a rank's rows

def ceil_div(a, b):
    return -(-a // b)


def is_sharded(tensor):
    """Whether it is a DTensor of FSDP2. isinstance() would import that class, which takes 0.4 s."""
    return hasattr(tensor, "placements")


class Local(NamedTuple):
    """What a rank has of a parameter."""

    rows: torch.Tensor  # a plain tensor
    first_row: int  # the number of the first one in the full parameter


def local(param):
    """This rank's rows of a parameter: all of them if it is not sharded."""
    if not is_sharded(param):
        return Local(param.data, 0)
    mesh = param.device_mesh
    dim = mesh.ndim - 1  # FSDP2 shards along the last dimension; --replicas puts another one before it
    n_rows = ceil_div(param.shape[0], mesh.size(dim))  # like torch.chunk
    first_row = n_rows * mesh.get_local_rank(dim)
    # the last ranks may have no row
    return Local(param.to_local().data, min(first_row, param.shape[0]))


def rows_of(params):
    """This rank's rows of each, as plain tensors."""
    return [local(param).rows for param in params]


# ---------------- random bits

def scramble(x):
    """The project's hash: an int or an int64 tensor -> 32 well mixed bits (MurmurHash3's finalizer)."""
    for shift, factor in (16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1):
        x = x & 0xFFFFFFFF  # an int has no end, and only 32 bits of an int64 may take part
        x = (x ^ x >> shift) * factor
    return x


class Dither(NamedTuple):
    """Random bits for a matrix, as odd int32 factors of its rows and columns. The low bits of the product
    rows_3N[use, i] * cols_D[j] are those of element (i, j). torch.rand is six times as slow on a CPU."""

    rows_3N: torch.Tensor  # in the order FOR_M, FOR_V, FOR_W
    cols_D: torch.Tensor

    def cut(self, region):
        """The factors of a region in blocks: [3, n, 1, 1] and [b, 256]."""
        rows, cols = region
        return Dither(self.rows_3N[:, rows, None, None], in_blocks(self.cols_D[cols]))


FOR_M, FOR_V, FOR_W = range(3)  # what random bits are used for: to round m, v or the weight


def dither_words(step, number, start, stop, D, device):
    """-> Dither for rows start..stop of the number-th parameter, the same on whichever rank a row is."""
    key = scramble(scramble(step) + number)  # plain ints: nothing is copied to the device
    row_numbers_N = torch.arange(start, stop, device=device)
    column_numbers_D = torch.arange(D, device=device)
    keys = [scramble(key + 1 + use) for use in (FOR_M, FOR_V, FOR_W)]
    rows_3N = torch.stack([scramble(key_of_use + row_numbers_N) for key_of_use in keys])
    cols_D = scramble(key + column_numbers_D)
    return Dither((rows_3N | 1).to(torch.int32), (cols_D | 1).to(torch.int32))


def drop_bits(x, random_bits, n):
    """Bits of the float32 x above the lowest n, rounded up with the probability that makes the mean right."""
    below = (1 << n) - 1
    addend = random_bits & below
    # carries into bit n in as many of 2**n cases as the lowest n bits of x say
    return addend.add_(x.view(torch.int32)).bitwise_right_shift_(n)


def round_to(dtype, x, random_bits):
    """float32 -> bf16 with x as its mean over random bits (arXiv:2010.06192); float32 stays as it is."""
    if dtype is torch.float32:
        return x
    bits = drop_bits(x, random_bits, 16).bitwise_left_shift_(16)
    return bits.view(torch.float32).to(dtype)


# ---------------- 8-bit floats, and the AdamW that keeps its moments in them

MOMENT_BLOCK = 256  # neighbours in a row that share a scale, their largest magnitude
SIGN = 128  # the sign bit of a code of m; v has none
MANTISSA_SHIFT = 20  # a float32 has 23 bits of mantissa, a code the upper 3
# A code is bits 20 to 27 of one of the float32 2, 2.25, ... 1.875 * 2**32, so a shift encodes it. Between two
# codes the number is linear in its bits, which random rounding needs. The bits of 2.0 are 0x400 << 20.
CODES = torch.arange(256, dtype=torch.int32)
FLOATS = (0x400 + CODES << MANTISSA_SHIFT).view(torch.float32)
# a hair less than the largest code, so that rounding up cannot carry the largest magnitude beyond
M_TOP = (FLOATS[SIGN - 1].item() - 2) * (1 - 2**-21)
V_TOP = FLOATS[-1].item() * (1 - 2**-21)

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # torch's defaults


@functools.cache
def code_levels(device):
    """The numbers of the 256 codes of m and of v, relative to the largest magnitude of their block. m has a
    sign and 127 magnitudes down to 2e-6, in equal steps near zero. v has steps of 6 to 12 % down to 2.5e-10
    and no zero, because a v of 0 under an m that is not 0 would divide by eps."""
    m_levels = torch.cat([FLOATS[:SIGN] - 2, 2 - FLOATS[:SIGN]]) / M_TOP
    v_levels = FLOATS / V_TOP
    return m_levels.to(device), v_levels.to(device)


class Moment(NamedTuple):
    """m or v of a matrix, or of a region of it in blocks."""

    stored: torch.Tensor  # uint8 codes; without scales float32 or bf16
    scales: torch.Tensor | None  # float32, the largest magnitude of each block
    levels: torch.Tensor  # what code_levels() returns
    signed: bool

    def cut(self, region):
        """A view of a region: stored [N, D] -> [n, b, 256], scales [N, D/256] -> [n, b, 1]."""
        stored = in_blocks(self.stored[region])
        if self.scales is None:
            return self._replace(stored=stored)
        rows, cols = region
        first_block = cols.start // MOMENT_BLOCK
        stop_block = ceil_div(cols.stop, MOMENT_BLOCK)
        scales = self.scales[rows, first_block:stop_block, None]
        return self._replace(stored=stored, scales=scales)


def read_moment(moment):
    """-> float32, which may be moment.stored itself."""
    stored = moment.stored
    if moment.scales is None:
        return stored.float()
    levels = moment.levels.index_select(0, stored.flatten().int())
    return levels.view(stored.shape).mul_(moment.scales)


def write_moment_(moment, x, random_bits, skip):
    """Rounds the float32 x randomly into `moment`. Where the bool `skip` is true nothing changes."""
    stored = moment.stored
    if moment.scales is None:
        stored.copy_(torch.where(skip, stored, round_to(stored.dtype, x, random_bits)))
        return
    magnitude = x.abs() if moment.signed else x
    largest = magnitude.amax(-1, keepdim=True)
    divisor = largest.clamp_min(1e-28)  # less is nothing beside eps
    if moment.signed:
        magnitude = (magnitude * (M_TOP / divisor)).add_(2)  # the same name frees x.abs()
        codes = drop_bits(magnitude, random_bits, MANTISSA_SHIFT)
        codes |= (x.view(torch.int32) >> 24).bitwise_and_(SIGN)  # in place: a copy takes 4 bytes a weight
    else:
        codes = drop_bits((magnitude * (V_TOP / divisor)).clamp_min_(2), random_bits, MANTISSA_SHIFT)
    # torch.where(skip, stored, codes) modulo 256, three times as fast on a CPU's bytes
    stored += (codes.to(torch.uint8) - stored) * ~skip
    moment.scales.copy_(torch.where(skip, moment.scales, largest))


class Rates(NamedTuple):
    """What is the same for all elements of a parameter in a step of AdamW (arXiv:1711.05101)."""

    w_factor: torch.Tensor  # what weight decay leaves of w
    m_factor: torch.Tensor  # the learning rate, over the bias of m
    v_bias_root: torch.Tensor


def rates_of(step, lr, weight_decay):
    """-> Rates. 1 - BETA**step is how much of its true size m or v has by then. lr may be a tensor."""
    # tensors, because torch.compile would take floats for constants
    as_tensor = functools.partial(torch.as_tensor, dtype=torch.float64)
    return Rates(
        w_factor=as_tensor(1 - lr * weight_decay),
        m_factor=as_tensor(lr / (1 - BETA1**step)),
        v_bias_root=as_tensor((1 - BETA2**step) ** 0.5),
    )


def adamw_(w, grad, m, v, dither, rates, skip, stochastic_rounding):
    """A step of AdamW on w, m and v in place, computed in float32, on [n, b, 256]: b blocks of n rows of a
    region. Where the bool `skip` is true nothing changes."""
    cols = dither.cols_D
    grad = grad.float()
    new_m = torch.lerp(read_moment(m), grad, 1 - BETA1)
    new_v = (read_moment(v) * BETA2).addcmul_(grad, grad, value=1 - BETA2)
    # Rounded randomly, what is stored is right on average: so v, and not its root. w gets the exact ones.
    write_moment_(m, new_m, dither.rows_3N[FOR_M] * cols, skip)
    write_moment_(v, new_v, dither.rows_3N[FOR_V] * cols, skip)
    divisor = new_v.sqrt_().div_(rates.v_bias_root).add_(EPS)
    decayed_w = w.float() * rates.w_factor
    new_w = decayed_w.sub_(new_m.mul_(rates.m_factor).div_(divisor))
    if stochastic_rounding:
        new_w = round_to(w.dtype, new_w, dither.rows_3N[FOR_W] * cols)
    w.copy_(torch.where(skip, w, new_w.to(w.dtype)))


def matrix_of(x):
    """This rank's rows of a parameter or of its state as a plain matrix; a vector becomes a column."""
    return local(x).rows.reshape(-1, x.shape[1:].numel())


def in_blocks(x):
    """[..., columns] -> [..., b, 256], or one block if there are fewer columns."""
    return x.unflatten(-1, (-1, min(MOMENT_BLOCK, x.shape[-1])))


def regions(N, D, n_weights):
    """Cuts [N, D] into regions (rows, columns) of about n_weights. Shorter last blocks have their own."""
    n_rows = max(1, n_weights // D)
    n_whole = D // MOMENT_BLOCK * MOMENT_BLOCK  # columns in whole blocks
    for start in range(0, N, n_rows):
        rows = slice(start, start + n_rows)
        if n_whole > 0:
            yield rows, slice(0, n_whole)
        if n_whole < D:
            yield rows, slice(n_whole, D)


class CompactAdamW(torch.optim.Optimizer):
    """AdamW for --optim adamw8bit, and for --stochastic_rounding, which also applies to the moments: in bf16,
    0.999 * x rounds back to x. Where the device scalar `found_inf` is 1, step() changes nothing."""

    def __init__(self, groups, lr, eight_bits, stochastic_rounding, compiled, found_inf):
        super().__init__(groups, {"lr": lr})
        self.adamw_ = CompiledOrPlain(adamw_, dynamic=True) if compiled else adamw_
        # of a region on a GPU: float32 temporaries of 16 MiB, of which compiled code has few
        self.n_weights = 1 << 24 if compiled else 1 << 22
        self.stochastic_rounding = stochastic_rounding
        self.found_inf = found_inf  # GradScaler's name, which tells main not to wait for it
        params = [p for group in self.param_groups for p in group["params"]]
        self.number_of = {p: number for number, p in enumerate(params)}  # for its random bits
        # made here, so that memory does not grow in the first step
        for p in params:
            dtype = torch.uint8 if eight_bits else p.dtype
            if p.dim() < 2:  # a vector
                dtype = torch.float32
            state = {"step": torch.zeros(())}  # on the CPU: reading it does not wait for the device
            for name in "exp_avg", "exp_avg_sq":  # torch's names of m and v
                state[name] = torch.zeros_like(p, dtype=dtype)
                if dtype is torch.uint8:
                    # one scale per block; made like some columns of p, to be sharded as p is
                    n_blocks = ceil_div(p.shape[1], MOMENT_BLOCK)
                    first_columns = p.detach()[:, :n_blocks]
                    state[f"{name}_scales"] = torch.zeros_like(first_columns, dtype=torch.float32)
            self.state[p] = state

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update_(p, group["lr"], group["weight_decay"])

    def update_(self, p, lr, weight_decay):
        state = self.state[p]
        state["step"] += 1
        step = int(state["step"])
        w_ND = matrix_of(p)
        grad_ND = matrix_of(p.grad)
        m_levels, v_levels = code_levels(w_ND.device)
        m_ND = self.moment_of(p, "exp_avg", m_levels, signed=True)
        v_ND = self.moment_of(p, "exp_avg_sq", v_levels, signed=False)
        N, D = w_ND.shape
        first_row = local(p).first_row
        dither = dither_words(step, self.number_of[p], first_row, first_row + N, D, w_ND.device)
        rates = rates_of(step, lr, weight_decay)
        skip = self.found_inf > 0
        # 4 MiB on a CPU, where larger temporaries would be new pages each time
        n_weights = 1 << 20 if w_ND.device.type == "cpu" else self.n_weights
        for region in regions(N, D, n_weights):
            w = in_blocks(w_ND[region])
            grad = in_blocks(grad_ND[region])
            m = m_ND.cut(region)
            v = v_ND.cut(region)
            self.adamw_(w, grad, m, v, dither.cut(region), rates, skip, self.stochastic_rounding)

    def moment_of(self, p, name, levels, signed):
        """-> Moment of this rank's rows of a parameter, from the state under `name`."""
        state = self.state[p]
        scales = state.get(f"{name}_scales")
        return Moment(matrix_of(state[name]), None if scales is None else matrix_of(scales), levels, signed)
