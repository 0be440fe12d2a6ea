"""The NF4 format: its error, its bytes, its gradients, and how often a weight is dequantized."""

import pytest
import torch
import torch.nn.functional as F
from conftest import HERE, MOE
from safetensors.torch import load_file
from test_model import TOKENS, build_random

import model as lm
import nf4


def weights(kind, rows=256, width=4096):
    w = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)) * 0.02
    if kind == "outlier columns":
        w[:, ::512] *= 30
    if kind == "scattered scales":
        scale = torch.randn(rows, width // 64, 1, generator=torch.Generator().manual_seed(1)).exp()
        w = (w.view(rows, -1, 64) * scale).view(rows, width)
    return w


@pytest.mark.parametrize("kind", ["normal", "outlier columns", "scattered scales"])
def test_the_error_is_nf4s_own_at_four_and_an_eighth_bits(kind):
    w = weights(kind)
    codes, scales = nf4.quantize(w)
    blocks = w.view(len(w), -1, 64)
    absmax = blocks.abs().amax(-1, keepdim=True)
    exact = nf4.dequantize(codes, nf4.quantize(torch.sign(w))[1], torch.float32).view_as(blocks) * absmax
    error = (nf4.dequantize(codes, scales, torch.float32) - w).norm() / w.norm()
    # half a step of 254 over a row's decades: below 0.3 % of NF4's own error
    assert error < 1.003 * (exact - blocks).norm() / w.norm()
    if kind == "normal":  # bitsandbytes gives 0.0920 too
        assert error.item() == pytest.approx(0.092, abs=0.001)
    assert (codes.numel() + scales.numel()) * 8 / w.numel() == 4.140625


def test_codes_equal_bitsandbytes(monkeypatch):
    monkeypatch.setattr(nf4, "CHUNK", 3000)  # a few rows at a time
    golden = load_file(HERE / "goldens-nf4.safetensors")
    for dtype in ("float32", "bfloat16"):
        codes, _ = nf4.quantize(golden[f"weight.{dtype}"])
        assert torch.equal(codes.flatten(), golden[f"codes.{dtype}"].flatten())


def test_zero_blocks_and_zero_rows_stay_zero():
    w = weights("normal")
    w[3], w[4, :64], w[5, 64:] = 0, 0, 0
    back = nf4.dequantize(*nf4.quantize(w), torch.float32)
    assert not back[3].any() and not back[4, :64].any() and not back[5, 64:].any()
    assert back[4, 64:].any() and back[5, :64].any() and back.isfinite().all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("keeps_weight", [True, False])
def test_layer_equals_a_linear_of_the_dequantized_weight(bias, keeps_weight):
    layer, saved = nf4.NF4Linear(128, 48, bias), []
    layer.weight_codes.data, layer.weight_scales.data = nf4.quantize(weights("normal", 48, 128))
    layer.keeps_weight = keeps_weight
    if bias:
        torch.nn.init.normal_(layer.bias)
    w = nf4.dequantize(layer.weight_codes, layer.weight_scales, torch.float32)
    x = torch.randn(2, 5, 128, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    assert keeps_weight or not [t for t in saved if t.is_floating_point()]  # nothing in 16 bits is kept
    y.square().sum().backward()
    F.linear(x2, w, layer.bias).square().sum().backward()
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-5, atol=1e-6)  # the bias is added apart from the product


@pytest.mark.parametrize("keeps_weight", [True, False])
def test_experts_are_products_of_their_own_rows(keeps_weight):
    layer = nf4.NF4Linear(64, 4 * 48, False)
    layer.weight_codes.data, layer.weight_scales.data = nf4.quantize(weights("normal", 4 * 48, 64))
    layer.keeps_weight = keeps_weight
    w = nf4.dequantize(layer.weight_codes, layer.weight_scales, torch.float32).view(4, 48, 64)
    x = torch.randn(8, 64, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    y, y2 = layer(x, torch.tensor([0, 3, 3, 8], dtype=torch.int32)), torch.cat([x2[:3] @ w[1].T, x2[3:] @ w[3].T])
    y.backward(y2.detach())
    y2.backward(y2.detach())
    torch.testing.assert_close(y, y2)
    torch.testing.assert_close(x.grad, x2.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keeps_weight", [True, False])
def test_an_answer_dequantizes_the_chosen_experts_alone_and_gets_the_same_bits(monkeypatch, keeps_weight, dtype):
    layer = nf4.NF4Linear(64, 16 * 48, False)
    layer.weight_codes.data, layer.weight_scales.data = nf4.quantize(weights("normal", 16 * 48, 64))
    layer.keeps_weight = keeps_weight
    dequantize = nf4.dequantize
    n_rows = []

    def counted(codes, *rest):
        n_rows.append(len(codes))
        return dequantize(codes, *rest)

    monkeypatch.setattr(nf4, "dequantize", counted)
    for chosen in ([0], [3, 15], [5, 5, 6]):
        counts = torch.bincount(torch.tensor(chosen, dtype=torch.int64), minlength=16)
        ends = counts.cumsum(0).to(torch.int32)
        x = torch.randn(len(chosen), 64).to(dtype)
        with torch.no_grad():
            y = layer(x, ends)
        assert torch.equal(y, layer(x, ends))  # with gradients: all experts
        assert n_rows == [48 * len(set(chosen)), 48 * 16]
        n_rows.clear()


def test_a_mixture_in_nf4_answers_with_the_logits_of_all_its_experts_bit_for_bit(monkeypatch):
    model = build_random("qlora", **MOE).eval()
    for n_tokens in (1, 3):
        tokens = list(range(7, 7 + n_tokens))
        got = lm.next_logits(model, tokens, torch.device("cpu"), lm.Cache())
        with monkeypatch.context() as patch:
            patch.setattr(nf4, "MANY_ROWS", 0)
            assert torch.equal(got, lm.next_logits(model, tokens, torch.device("cpu"), lm.Cache()))


@pytest.mark.parametrize("fast, shape", [(False, {}), (True, {}), (True, MOE)], ids=str)
def test_a_recomputed_block_dequantizes_each_weight_once_for_its_backward(monkeypatch, fast, shape):
    model = build_random("qlora", **shape)
    for module in model.modules():
        module.fast = fast  # float32: the operator, with the plain dequantization in it

    def gradients():
        model.zero_grad()
        model(TOKENS, TOKENS.roll(-1, 1)).backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    expected = gradients()
    lm.checkpoint_activations_(model)
    dequantize, calls = nf4.dequantize, []
    monkeypatch.setattr(nf4, "dequantize", lambda *packed: (calls.append(1), dequantize(*packed))[1])
    assert all(torch.equal(got, want) for got, want in zip(gradients(), expected, strict=True))
    assert len(calls) == 3 * (7 + 7)  # the 7 weights of a block once in the forward and once in the recomputation


# ---------------------------------------------------------------- --compile


def test_every_pair_of_levels_is_rounded_to_the_nearest_even_bf16():
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scales = torch.tensor([1.0, 0.3, 7e-5, 1.5, 2.0**-126, 0.0, 123.456, 3e38]).view(-1, 1)
    levels = torch.tensor(nf4.CODEBOOK)
    expected = torch.stack([levels[codes.long() >> 4], levels[codes.long() & 15]], -1) * scales[..., None]
    for table in (None, nf4.levels_of_bytes(codes.device)):  # what a CPU does, and a GPU
        packed = nf4.dequantize_pairs(codes, scales, table)
        assert torch.equal(packed.view(torch.bfloat16).view(8, 32, 2), expected.bfloat16())
