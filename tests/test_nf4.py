"""The NF4 format: its error, its bytes, its gradients."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import HERE, SHAPE
from safetensors.torch import load_file

import model as lm
import nf4
import train


def weights(kind, rows=256, width=4096):
    w = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)) * 0.02
    if kind == "outlier columns":
        w[:, ::512] *= 30
    if kind == "scattered scales":
        scale = torch.randn(rows, width // 64, 1, generator=torch.Generator().manual_seed(1)).exp()
        w = (w.view(rows, -1, 64) * scale).view(rows, width)
    return w


def relative_error(w, got):
    return ((got - w).norm() / w.norm()).item()


@pytest.mark.parametrize("kind", ["normal", "outlier columns", "scattered scales"])
def test_double_quantization_costs_almost_nothing(kind):
    w = weights(kind)
    codes, scales = nf4.quantize(w)
    blocks = w.view(len(w), -1, 64)
    absmax = blocks.abs().amax(-1, keepdim=True)
    exact = nf4.dequantize(codes, nf4.quantize(torch.sign(w))[1], torch.float32).view_as(blocks) * absmax
    assert relative_error(w, nf4.dequantize(codes, scales, torch.float32)) < 1.003 * relative_error(blocks, exact)


def test_round_trip_error_is_the_formats_own():
    w = weights("normal")
    error = relative_error(w, nf4.dequantize(*nf4.quantize(w), torch.float32))
    assert error == pytest.approx(0.092, abs=0.001)  # NF4 on normal weights, bitsandbytes gives 0.0920 too


def test_codes_equal_bitsandbytes():
    golden = load_file(HERE / "goldens-nf4.safetensors")
    for dtype in ("float32", "bfloat16"):
        codes, _ = nf4.quantize(golden[f"weight.{dtype}"])
        assert torch.equal(codes.flatten(), golden[f"codes.{dtype}"].flatten())


def test_size_is_four_and_an_eighth_bits_and_the_ends():
    codes, scales = nf4.quantize(weights("normal"))
    assert (codes.numel() + scales.numel()) * 8 / (256 * 4096) == pytest.approx(4.140625, abs=0)


@pytest.mark.parametrize("cut", [1, 3, 86, 255])
def test_a_row_has_the_same_bytes_whoever_quantizes_it(cut):
    w = weights("scattered scales")
    whole = nf4.quantize(w)
    for part, rows in zip((nf4.quantize(w[:cut]), nf4.quantize(w[cut:])), (slice(0, cut), slice(cut, None))):
        assert all(torch.equal(a, b[rows]) for a, b in zip(part, whole))


def test_zero_blocks_and_zero_rows_stay_zero():
    w = weights("normal")
    w[3], w[4, :64], w[5, 64:] = 0, 0, 0
    back = nf4.dequantize(*nf4.quantize(w), torch.float32)
    assert not back[3].any() and not back[4, :64].any() and not back[5, 64:].any()
    assert back[4, 64:].any() and back[5, :64].any() and back.isfinite().all()


def test_extremes_of_float32_survive():
    w = torch.tensor([[1e-38, 3e38, 1e-30, 1.0]]).repeat_interleave(64, 1)
    back = nf4.dequantize(*nf4.quantize(w), torch.float32)
    torch.testing.assert_close(back, w, rtol=0.4, atol=0)  # 76 decades in 254 steps: half a step is a factor of 1.41


def test_constant_rows_are_exact():
    w = torch.full((2, 128), -0.37)
    torch.testing.assert_close(nf4.dequantize(*nf4.quantize(w), torch.float32), w, rtol=1e-6, atol=0)  # exp(ln(x))


def test_every_byte_decodes_as_the_formula_says():
    codes = torch.arange(256, dtype=torch.uint8).repeat(1, 1).view(2, 128)
    _, scales = nf4.quantize(weights("normal", 2, 256))
    book, absmax = torch.tensor(nf4.CODEBOOK), nf4.block_scales(scales)
    pairs = torch.stack([book[codes.int() >> 4], book[codes.int() & 15]], -1).view(2, -1, 64)
    assert torch.equal(nf4.dequantize(codes, scales, torch.float32), (pairs * absmax[..., None]).view(2, 256))


def test_damaged_weights_are_refused():
    w = weights("normal", 2, 64)
    w[1, 5] = float("nan")
    with pytest.raises(ValueError, match="inf or nan"):
        nf4.quantize(w)


def test_rows_in_pieces_dequantize_like_the_whole(monkeypatch):
    codes, scales = nf4.quantize(weights("normal"))
    whole = nf4.dequantize(codes, scales, torch.bfloat16)
    monkeypatch.setattr(nf4, "CHUNK", 4096 * 5)
    assert torch.equal(nf4.dequantize(codes, scales, torch.bfloat16), whole)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_equals_a_linear_of_the_dequantized_weight(bias):
    layer = nf4.NF4Linear(128, 48, bias)
    layer.weight_codes.data, layer.weight_scales.data = nf4.quantize(weights("normal", 48, 128))
    if bias:
        torch.nn.init.normal_(layer.bias)
    w = nf4.dequantize(layer.weight_codes, layer.weight_scales, torch.float32)
    x = torch.randn(2, 5, 128, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    layer(x).square().sum().backward()
    F.linear(x2, w, layer.bias).square().sum().backward()
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-5, atol=1e-6)  # the bias is added apart from the product


def test_nothing_in_16_bits_is_kept_for_the_backward():
    layer = nf4.NF4Linear(256, 256, bias=False)
    layer.weight_codes.data, layer.weight_scales.data = nf4.quantize(weights("normal", 256, 256))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(3, 256, requires_grad=True))
    assert sum(t.nbytes for t in kept if t.is_floating_point()) == 0


def test_config_of_the_tiny_model_fits_nf4():
    config = json.loads((HERE / "tiny" / "config.json").read_text())
    assert config["hidden_size"] % 64 == 0 and config["intermediate_size"] % 64 == 0


# ---------------------------------------------------------------- --compile, and weights used twice


def test_selects_and_the_gather_give_the_same_weights():
    codes, scales = nf4.quantize(torch.randn(64, 256) * torch.logspace(-3, 3, 64)[:, None])
    packed = nf4.dequantize_pairs(codes.view(-1, 32), nf4.block_scales(scales).view(-1, 1))
    assert torch.equal(packed.view(torch.bfloat16).view(64, 256), nf4.dequantize(codes, scales, torch.bfloat16))


def test_every_pair_of_levels_is_rounded_to_the_nearest_even_bf16():
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scales = torch.tensor([1.0, 0.3, 7e-5, 1.5, 2.0**-126, 0.0, 123.456, 3e38]).view(-1, 1)
    packed = nf4.dequantize_pairs(codes, scales).view(torch.bfloat16).view(8, 32, 2)
    levels = torch.tensor(nf4.CODEBOOK)
    expected = torch.stack([levels[codes.long() >> 4], levels[codes.long() & 15]], -1) * scales[..., None]
    assert torch.equal(packed, expected.bfloat16())


@pytest.mark.parametrize("fast", [False, True])
def test_a_recomputed_block_dequantizes_each_weight_once_for_its_backward(monkeypatch, fast):
    config = lm.parse_config(SHAPE)
    with torch.device("meta"):
        model = lm.Transformer(config)
    source = lm.RandomWeights(model, 0, torch.device("cpu"))
    nf4.quantize_linears_(model.model.layers)
    lm.add_lora_(model, 4, 8, 0.0, lm.LORA_TARGETS)
    model.to_empty(device="cpu").tie_()
    lm.load_weights_(model, source, None, 0, torch.device("cpu"), progress=False)
    for module in model.modules():
        if isinstance(module, nf4.NF4Linear):
            module.fast = fast  # float32: the operators, with the plain dequantization in them
    tokens = torch.arange(64)[None]

    def gradients():
        model.zero_grad()
        model(tokens, tokens.roll(-1)).backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    expected = gradients()
    train.checkpoint_activations_(model, preserve_rng=False)
    dequantize, shapes = nf4.dequantize, []
    monkeypatch.setattr(nf4, "dequantize", lambda codes, *rest: (shapes.append(codes.shape), dequantize(codes, *rest))[1])
    for got, expectation in zip(gradients(), expected, strict=True):
        assert torch.equal(got, expectation)
    # of 7 layers: all in the forward; all but down_proj, which ends the block, in the recomputation; down_proj in the backward
    assert len(shapes) == 3 * (7 + 6 + 1)
    # nothing waits but what the first block's backward had no use for, its input needing no gradient
    assert len(nf4.kept) == 0
