"""Activation offload and checkpointing: same gradients, nothing kept, no buffer given away too early.

The tests run on the CPU, where the bookkeeping is the same and copies are plain; those marked gpu add the side stream.
"""

import contextlib

import pytest
import torch
from conftest import SHAPE

import model as lm
import train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def build(device, **changes):
    with torch.device("meta"):
        model = lm.Transformer(lm.parse_config(SHAPE | {"num_hidden_layers": 5} | changes))
    source = lm.RandomWeights(model, 0, torch.device("cpu"))
    model.to_empty(device=device).tie_()
    lm.load_weights_(model, source, None, 0, torch.device(device), progress=False)
    train.checkpoint_activations_(model, preserve_rng=False)
    return model


def gradients(model, tokens):
    model.zero_grad()
    model(tokens, tokens.roll(-1, 1)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("device", DEVICES)
def test_offload_does_not_change_a_gradient(device):
    model, tokens = build(device), torch.arange(96, device=device).view(2, 48)
    expected = gradients(model, tokens)
    model.activation_hooks = train.OffloadActivations(torch.device(device), min_bytes=1)
    for _ in range(3):
        got = gradients(model, tokens)
        assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("device", DEVICES)
def test_exactly_the_inputs_of_all_blocks_but_the_last_leave(device):
    model, tokens = build(device), torch.arange(96, device=device).view(2, 48)
    hooks = model.activation_hooks = train.OffloadActivations(torch.device(device), min_bytes=1)
    gradients(model, tokens)
    assert hooks.bytes_out == 4 * tokens.numel() * model.config.hidden_size * 4  # 4 of 5 blocks, float32


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_are_allocated_once_and_used_again(device):
    model, tokens = build(device), torch.arange(96, device=device).view(2, 48)
    hooks = model.activation_hooks = train.OffloadActivations(torch.device(device), min_bytes=1)
    gradients(model, tokens)
    first = {piece.data_ptr() for buffer in hooks.pool for piece in buffer}
    assert len(first) == 4
    for _ in range(3):
        gradients(model, tokens)
    assert {piece.data_ptr() for buffer in hooks.pool for piece in buffer} == first


@pytest.mark.parametrize("n_bytes", [1, 1000, 1 << 24, (1 << 24) + 1, 100 << 20, (5 << 30) + 7, 1 << 32])
def test_buffers_are_powers_of_two_that_waste_little(n_bytes):
    sizes = train.piece_sizes(n_bytes)
    assert n_bytes <= sum(sizes) < n_bytes + train.PIECE and len(sizes) <= 10
    assert len(sizes) == 1 or all(size & (size - 1) == 0 for size in sizes)


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_of_several_pieces_hold_the_same(device, monkeypatch):
    monkeypatch.setattr(train, "PIECE", 256)
    test_offload_does_not_change_a_gradient(device)
    hooks = train.OffloadActivations(torch.device(device), min_bytes=1)
    for n in (1100, 300, 700):  # the buffer of the first serves the others
        x = torch.randn(n, device=device, requires_grad=True)
        with hooks:
            y = (x * 1.0) ** 2
        y.sum().backward()
        assert torch.equal(x.grad, 2 * x.detach())
    assert [[len(piece) for piece in buffer] for buffer in hooks.pool] == [[4096, 512]]


def test_rows_of_growing_length_do_not_pile_up_buffers():
    model = build("cpu")
    hooks = model.activation_hooks = train.OffloadActivations(torch.device("cpu"), min_bytes=1)
    for length in range(20, 40):
        gradients(model, torch.arange(length)[None])
        assert len(hooks.pool) == 4


def test_a_forward_without_a_backward_is_forgotten():
    model, tokens = build("cpu"), torch.arange(96).view(2, 48)
    expected = gradients(model, tokens)
    model.activation_hooks = train.OffloadActivations(torch.device("cpu"), min_bytes=1)
    model(tokens, tokens)
    got = gradients(model, tokens)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_second_backward_is_refused_not_wrong():
    model, tokens = build("cpu"), torch.arange(96).view(2, 48)
    model.lm_head.chunk = 0
    model.activation_hooks = train.OffloadActivations(torch.device("cpu"), min_bytes=1)
    loss = model(tokens, tokens)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward"):
        loss.backward()


def test_two_micro_batches_before_their_backwards_do_not_mix():
    model = build("cpu")
    a, b = torch.arange(96).view(2, 48), torch.arange(96, 192).view(2, 48)
    expected = {name: g + h for (name, g), h in zip(gradients(model, a).items(), gradients(model, b).values())}
    model.activation_hooks = train.OffloadActivations(torch.device("cpu"), min_bytes=1)
    model.zero_grad()
    (model(a, a.roll(-1, 1)) + model(b, b.roll(-1, 1))).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-5, atol=1e-6)  # summed in another order


def test_parameters_and_small_tensors_stay():
    hooks = train.OffloadActivations(torch.device("cpu"), min_bytes=1024)
    weight = torch.nn.Parameter(torch.randn(64, 64))
    with hooks:
        (torch.ones(64, requires_grad=True) * torch.nn.Parameter(torch.ones(64))).sum().backward()
        (torch.ones(1, 64, requires_grad=True) @ weight).sum().backward()
    assert hooks.bytes_out == 0


def test_a_strided_view_comes_back_as_it_was():
    x = torch.randn(40, 60, requires_grad=True)
    with train.OffloadActivations(torch.device("cpu"), min_bytes=1):
        y = (x.t()[3:50:2, 5:] ** 3).sum()
    y.backward()
    expected = torch.zeros_like(x)
    expected.t()[3:50:2, 5:] = 3 * x.detach().t()[3:50:2, 5:] ** 2
    torch.testing.assert_close(x.grad, expected)


class ReturnsAViewOfWhatItSaved(torch.autograd.Function):
    """Its backward hands a view of the saved tensor on as the gradient (the shape of torchtune #1860)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return x.view_as(x)


class UsesItsGradientLate(ReturnsAViewOfWhatItSaved):
    """Its backward first makes the device busy, then reads the gradient it was given."""

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors  # brings another tensor back: it must not land in the memory of `grad`
        if grad.is_cuda:
            torch.cuda._sleep(20_000_000)
        return grad.clone()


@pytest.mark.parametrize("device", DEVICES)
def test_a_view_of_a_returned_tensor_is_not_overwritten(device):
    hooks = train.OffloadActivations(torch.device(device), min_bytes=1)
    for value in range(5):
        x = torch.full((1 << 18,), float(value), device=device, requires_grad=True)
        y = x
        with hooks:
            for _ in range(3):
                y = UsesItsGradientLate.apply(UsesItsGradientLate.apply(y))
            y = ReturnsAViewOfWhatItSaved.apply(y + 1) + 0.0
        y.sum().backward()
        assert (x.grad == value + 1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_view_cached_by_checkpointing_is_not_overwritten(device):
    """torchtune #1936: the recomputation keeps views of the tensor that came back, longer than the node that asked."""
    hooks = train.OffloadActivations(torch.device(device), min_bytes=1)

    def block(x):
        a, b = x.view(2, -1).unbind(0)  # views of the input are what gets saved inside
        return torch.cat([a * b, b * b]).view_as(x)

    def run(context):
        x = torch.linspace(0.5, 1.5, 1 << 18, device=device).requires_grad_()
        y = x
        with context:
            for _ in range(4):
                y = torch.utils.checkpoint.checkpoint(block, y, use_reentrant=False)
        y.sum().backward()
        return x.grad

    expected = run(contextlib.nullcontext())
    for _ in range(5):
        assert torch.equal(run(hooks), expected)


@pytest.mark.gpu
def test_a_tensor_is_not_freed_while_its_copy_is_under_way():
    hooks = train.OffloadActivations(torch.device("cuda"), min_bytes=1)
    for value in range(1, 6):
        leaf = torch.full((1 << 22,), float(value), device="cuda", requires_grad=True)
        with hooks:
            with torch.cuda.stream(hooks.stream):
                torch.cuda._sleep(50_000_000)  # the copy is late
            between = leaf * 1.0
            y = between**2  # saves `between`, which nothing else holds from here on
            del between
            junk = [torch.full((1 << 22,), -1.0, device="cuda") for _ in range(3)]  # would land in freed memory
        y.sum().backward()
        assert (leaf.grad == 2 * value).all()
        del junk


@pytest.mark.gpu
def test_device_memory_falls_by_what_left():
    tokens = torch.arange(8192, device="cuda")[None] % 4096
    peaks = []
    for hooks in (None, train.OffloadActivations(torch.device("cuda"))):
        model = build("cuda", num_hidden_layers=16)
        model.activation_hooks = hooks
        gradients(model, tokens)
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        loss = model(tokens, tokens)
        peaks.append(torch.cuda.memory_allocated() - start)
        del loss, model
    moved = 15 * tokens.numel() * SHAPE["hidden_size"] * 4
    assert peaks[0] - peaks[1] > 0.8 * moved  # two tensors stay behind the copy
