"""The formats NF4 and NF5: their error, their bytes, their gradients, and how often a weight is dequantized."""


import pytest
import torch
import torch.nn.functional as F
from conftest import HERE, MOE, MUSE, build
from packed_goldens import relative_error
from safetensors.torch import load_file
from test_model import CPU, TOKENS, build_random

import model as lm
import nf4


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def normal_weights(rows=256, width=4096):
    return normal(rows, width) * 0.02  # the scale of trained weights


def with_outlier_columns():
    w_ND = normal_weights()
    w_ND[:, ::512] *= 30  # as the inputs that LLM.int8 keeps apart: one block in eight has a large scale
    return w_ND


def with_scattered_scales():
    """Each block of 64 with a scale of its own, log-normal: hard for scales that are stored in 8 bits."""
    blocks = normal_weights().view(256, 64, 64)
    scales = normal(256, 64, 1, seed=1).exp()
    return (blocks * scales).view(256, 4096)


def as_float32(codes, scales):
    return nf4.dequantize(codes, scales, torch.float32)


def nf4_layer(rows, width, bias=False, keeps_weight=False, bits=4):
    """A layer with normal weights."""
    layer = nf4.NF4Linear(width, rows, bias, bits=bits)
    codes, scales = nf4.quantize(normal_weights(rows, width), bits)
    assert codes.shape == layer.weight_codes.shape
    layer.weight_codes.data = codes
    layer.weight_scales.data = scales
    layer.keeps_weight = keeps_weight
    return layer


def weight_of(layer):
    return as_float32(layer.weight_codes, layer.weight_scales)


# ---------------------------------------------------------------- the format


def in_blocks(w_ND):
    return w_ND.float().view(len(w_ND), -1, nf4.BLOCK)


def absmax_of(w_ND):
    return in_blocks(w_ND).abs().amax(-1)


def nearest_of(codebook, relative):
    """The index of the nearest level, by a binary search: where two neighbours are equally far it changes."""
    levels = torch.tensor(codebook)
    return torch.bucketize(relative, (levels[1:] + levels[:-1]) / 2)


def with_exact_scales(w_ND, bits):
    """The weights as the nearest levels under scales of their blocks that are not rounded to 8 bits."""
    scales = absmax_of(w_ND).unsqueeze(-1)
    codebook = nf4.CODEBOOKS[bits]
    levels = torch.tensor(codebook)[nearest_of(codebook, in_blocks(w_ND) / scales)]
    return (levels * scales).view(w_ND.shape)


MAKERS = [normal_weights, with_outlier_columns, with_scattered_scales]
BITS = pytest.mark.parametrize("bits", [4, 5])
# of normal weights; bitsandbytes gives 0.0920, too
ERRORS = {4: 0.0920, 5: 0.0430}


@BITS
@pytest.mark.parametrize("make", MAKERS)
def test_the_error_is_that_of_the_levels_at_an_eighth_of_a_bit_more(make, bits):
    w_ND = make()
    codes, scales = nf4.quantize(w_ND, bits)
    error = relative_error(as_float32(codes, scales), w_ND)
    exact_error = relative_error(with_exact_scales(w_ND, bits), w_ND)
    # A scale is off by up to half a step of 254 over a row's decades, by 1 % where scales scatter: that adds 0.2 % to
    # the error of 16 levels, and 0.5 % to the smaller one of 32.
    assert error < {4: 1.003, 5: 1.006}[bits] * exact_error
    if make is normal_weights:
        assert error == pytest.approx(ERRORS[bits], abs=0.0002)

    n_bits = 8 * (codes.numel() + scales.numel())
    assert n_bits / w_ND.numel() == bits + 0.140625  # 64 + 8 bytes of scales for 4,096 weights


def test_the_32_levels_are_where_lloyds_algorithm_ends():
    """Each but -1, 0 and 1 is the mean of the weights that are rounded to it, weighted by the squares of their scales,
    which is where their squared error is least."""
    w_ND = normal(4096, 1024)
    scales = absmax_of(w_ND)
    relative = in_blocks(w_ND) / scales.unsqueeze(-1)
    nearest = nearest_of(nf4.CODEBOOK_OF_32, relative).flatten()
    counts = scales.square().unsqueeze(-1).expand_as(relative)
    total = torch.zeros(32).index_add_(0, nearest, (relative * counts).flatten())
    weight = torch.zeros(32).index_add_(0, nearest, counts.flatten())
    means = total / weight
    levels = torch.tensor(nf4.CODEBOOK_OF_32)
    is_mean = torch.ones(32, dtype=torch.bool)
    is_mean[[0, 15, 31]] = False
    # of 4 million weights each level has 20,000 at least; the least distance of two levels is 0.044
    torch.testing.assert_close(means[is_mean], levels[is_mean], atol=5e-4, rtol=0)
    # so that a zero and the largest weight of a block, of either sign, stay as they are
    assert levels[~is_mean].tolist() == [-1, 0, 1]


@BITS
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_code_is_the_level_nearest_under_the_largest_magnitude(make, dtype, bits):
    w_ND = make()[:32].to(dtype)
    codes, _ = nf4.quantize(w_ND, bits)
    relative = in_blocks(w_ND) / absmax_of(w_ND).unsqueeze(-1)
    expected = nearest_of(nf4.CODEBOOKS[bits], relative).view(w_ND.shape)
    assert torch.equal(codes, nf4.pack_codes(expected.to(torch.uint8), bits))


@BITS
def test_the_nearest_level_is_that_of_a_binary_search(bits):
    levels = torch.tensor(nf4.CODEBOOKS[bits], dtype=torch.float64)
    midpoints = ((levels[:-1] + levels[1:]) / 2).float()
    numbers = torch.cat([
        normal(1 << 16).clamp(-1, 1),
        midpoints,
        midpoints.nextafter(midpoints + 1),
        midpoints.nextafter(midpoints - 1),
        torch.arange(-32, 33) / 32,  # where nearest_levels() changes to its next midpoint
        torch.tensor([-1e-9, 1e-9, -1e-40]),
    ])
    expected = torch.bucketize(numbers, midpoints)
    assert torch.equal(nf4.nearest_levels(numbers, bits).long(), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_equal_bitsandbytes(monkeypatch, dtype):
    monkeypatch.setattr(nf4, "BAND_WEIGHTS", 3000)  # weights at a time, which are a few rows
    golden = load_file(HERE / "goldens-nf4.safetensors")
    codes, _ = nf4.quantize(golden[f"weight.{dtype}"], 4)
    expected = golden[f"codes.{dtype}"]
    assert torch.equal(codes.flatten(), expected.flatten())


@BITS
def test_bands_and_single_rows_change_no_byte(monkeypatch, bits):
    """A rank has some rows of a weight, at times one, and reads them in pieces."""
    w_ND = torch.cat([with_outlier_columns()[:9, :576], with_scattered_scales()[:9, :576]])
    codes, scales = nf4.quantize(w_ND, bits)
    monkeypatch.setattr(nf4, "BAND_WEIGHTS", 3000)
    for n_rows in (1, 4, 18):
        parts = [nf4.quantize(rows, bits) for rows in w_ND.split(n_rows)]
        assert torch.equal(torch.cat([part[0] for part in parts]), codes)
        assert torch.equal(torch.cat([part[1] for part in parts]), scales)
        of_first = as_float32(*parts[0])
        assert torch.equal(of_first, as_float32(codes, scales)[:n_rows])


@BITS
def test_zero_blocks_and_zero_rows_stay_zero(bits):
    """The logarithm of their scales is minus infinity, which must not spoil the range of a row."""
    w_ND = normal_weights()
    w_ND[3] = 0
    w_ND[4, :64] = 0
    w_ND[5, 64:] = 0
    back_ND = as_float32(*nf4.quantize(w_ND, bits))
    assert back_ND.isfinite().all()
    assert not back_ND[3].any()
    assert not back_ND[4, :64].any()
    assert not back_ND[5, 64:].any()
    # and the rest of their rows has NF4's error of normal weights, 0.092, as without them
    assert relative_error(back_ND[4, 64:], w_ND[4, 64:]) < 0.1
    assert relative_error(back_ND[5, :64], w_ND[5, :64]) < 0.12  # one block of 64 weights alone


# ---------------------------------------------------------------- the layer


def saved_by(function):
    """(the result of a function, the tensors that autograd has saved for its backward)."""
    saved = []

    def pack(t):
        saved.append(t)
        return t

    def unpack(t):
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        result = function()
    return result, saved


@pytest.mark.rounding
@BITS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("keeps_weight", [True, False])
def test_layer_equals_a_linear_of_the_dequantized_weight(bias, keeps_weight, bits):
    layer = nf4_layer(48, 128, bias, keeps_weight, bits)
    if bias:
        torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 5, 128, requires_grad=True)
    y, saved = saved_by(lambda: layer(x))
    # the packed bytes are enough for the backward: a weight in 16 bits takes four times as many
    saves_weight = any(t.is_floating_point() for t in saved)
    assert saves_weight == keeps_weight
    y.square().sum().backward()  # a gradient that differs from output to output

    plain_x = x.detach().clone().requires_grad_()
    plain_y = F.linear(plain_x, weight_of(layer), layer.bias)
    plain_y.square().sum().backward()
    # the bias is added apart from the product
    torch.testing.assert_close(x.grad, plain_x.grad, rtol=1e-5, atol=1e-6)


def bits_of_layers(*flags, **changes):
    """{layer: bits of its codes} of the first block of a model with --qlora."""
    model, _ = build("--qlora", *flags, **changes)
    return {name: layer.weight_codes.shape[1] * 8 // layer.in_features
            for name, layer in model.model.layers[0].named_modules() if isinstance(layer, nf4.NF4Linear)}


def test_layers_of_nf5_have_5_bits_and_the_others_4():
    found = bits_of_layers("--nf5", "v_proj,down_proj")
    assert {name.split(".")[-1] for name, bits in found.items() if bits == 5} == {"v_proj", "down_proj"}
    assert len(found) == 7
    assert set(bits_of_layers().values()) == {4}
    assert set(bits_of_layers("--nf5").values()) == {5}
    # attention's gate and the MLP's have the same last name, and the MLP's is meant by it
    of_muse = bits_of_layers("--nf5", "gate_proj", **MUSE)
    assert {name for name, bits in of_muse.items() if bits == 5} == {"mlp.gate_proj"}


# ---------------------------------------------------------------- experts
# A stack of experts is one matrix of their rows. ends[e] is where the tokens of expert e end in x.


@pytest.mark.rounding
@pytest.mark.parametrize("keeps_weight, bits", [(True, 4), (False, 4), (False, 5)])
def test_experts_are_products_of_their_own_rows(keeps_weight, bits):
    layer = nf4_layer(4 * 48, 64, keeps_weight=keeps_weight, bits=bits)
    # three tokens for expert 1, five for expert 3, none for the others
    ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    x = torch.randn(8, 64, requires_grad=True)
    y = layer(x, ends)

    _, first, _, second = weight_of(layer).view(4, 48, 64)
    plain_x = x.detach().clone().requires_grad_()
    first_y = plain_x[:3] @ first.T
    second_y = plain_x[3:] @ second.T
    plain_y = torch.cat([first_y, second_y])
    torch.testing.assert_close(y, plain_y)  # float32 sums in another order

    up = plain_y.detach()
    y.backward(up)
    plain_y.backward(up)
    torch.testing.assert_close(x.grad, plain_x.grad)


class Dequantizing:
    """nf4.dequantize(), which notes the rows of each weight that it is given."""

    def __init__(self):
        self.n_rows = []
        self.dequantize = nf4.dequantize

    def __call__(self, codes, *rest):
        self.n_rows.append(len(codes))
        return self.dequantize(codes, *rest)


@pytest.fixture
def dequantizing(monkeypatch):
    counter = Dequantizing()
    monkeypatch.setattr(nf4, "dequantize", counter)
    return counter


CHOSEN = [
    [0],
    [3, 15],
    [5, 5, 6],  # two tokens have chosen the same expert
]


@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keeps_weight", [True, False])
def test_an_answer_dequantizes_the_chosen_experts_alone_and_gets_the_same_bits(
        dequantizing, keeps_weight, dtype, chosen):
    layer = nf4_layer(16 * 48, 64, keeps_weight=keeps_weight)
    n_tokens_of = torch.bincount(torch.tensor(chosen), minlength=16)
    ends = n_tokens_of.cumsum(0).to(torch.int32)
    x = torch.randn(len(chosen), 64).to(dtype)
    with torch.no_grad():
        y = layer(x, ends)
    y_in_training = layer(x, ends)
    assert torch.equal(y, y_in_training)
    n_chosen = len(set(chosen))
    # with gradients all experts: to ask which are chosen would make the host wait for the GPU
    assert dequantizing.n_rows == [48 * n_chosen, 48 * 16]


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_a_mixture_in_nf4_answers_with_the_logits_of_all_its_experts_bit_for_bit(monkeypatch, n_tokens):
    model = build_random("qlora", **MOE).eval()
    tokens = list(range(7, 7 + n_tokens))

    def logits():
        return lm.next_logits(model, tokens, CPU, lm.Cache())

    of_chosen = logits()
    monkeypatch.setattr(nf4, "MANY_ROWS", 0)  # the rows per expert from which on all experts are dequantized
    assert torch.equal(of_chosen, logits())


# ---------------------------------------------------------------- how often a weight is dequantized


@pytest.mark.parametrize("fast, shape", [
    (False, {}),
    (True, {}),
    (True, MOE),
], ids=["plain", "fast", "fast experts"])
def test_a_recomputed_block_dequantizes_each_weight_once_for_its_backward(dequantizing, fast, shape):
    model = build_random("qlora", **shape)
    for module in model.modules():
        module.fast = fast  # in float32 fast_weight() calls the plain dequantize()

    def gradients():
        model.zero_grad()
        targets = TOKENS.roll(-1, 1)
        model(TOKENS, targets).backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    expected = gradients()
    for block in model.model.layers:
        lm.recompute_(block)
    dequantizing.n_rows.clear()
    for got, want in zip(gradients(), expected, strict=True):
        assert torch.equal(got, want)
    n_blocks = 3
    n_weights = 7  # q, k, v, o, gate, up and down; experts are one weight
    # once in the forward and once in the recomputation, whose weights the backward uses
    assert len(dequantizing.n_rows) == n_blocks * (n_weights + n_weights)


# ---------------------------------------------------------------- --compile


SCALES = [
    1.0, 1.5, 0.3, 123.456,
    1 + 2**-8, 1 + 3 * 2**-8,  # the level 1 is then halfway between two bf16: rounded down, and rounded up
    3e38, 7e-5, 2.0**-126,  # of bf16 the largest, and small ones, whose products have fewer bits
    0.0,
]


@BITS
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pair_of_levels_is_rounded_to_the_nearest_even_number(bits, scale, dtype, monkeypatch):
    monkeypatch.setattr(nf4, "dequantize_scales", lambda scales: scales)  # these scales need no rounding
    n = 2**bits
    pairs_of_indices = torch.cartesian_prod(torch.arange(n), torch.arange(n)).to(torch.uint8)
    codes = nf4.pack_codes(pairs_of_indices.view(-1, 64), bits)  # rows of one block
    scales = torch.full((len(codes), 1), scale)
    packed = nf4.weight_in_pairs(codes, scales, nf4.level_pairs(CPU, bits), dtype)

    levels = torch.tensor(nf4.CODEBOOKS[bits])
    expected = levels[pairs_of_indices.long()] * scale
    assert torch.equal(packed.view(dtype).view(-1, 2), expected.to(dtype))


@BITS
def test_what_is_packed_is_unpacked_in_order(bits):
    """Weights that are levels under a scale of 1 come back as they are, each in its place of a row of three blocks."""
    generator = torch.Generator().manual_seed(0)
    indices_ND = torch.randint(2**bits, (5, 192), generator=generator, dtype=torch.uint8)
    levels_ND = torch.tensor(nf4.CODEBOOKS[bits])[indices_ND.long()]
    scales = nf4.quantize_scales(torch.ones(5, 3))
    assert torch.equal(as_float32(nf4.pack_codes(indices_ND, bits), scales), levels_ND)
