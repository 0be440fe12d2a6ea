"""Activation offload: same gradients, exactly what should leave does, no page is given away too early.

The tests run on the CPU, where the bookkeeping is the same and copies are plain; those marked gpu add the side stream.
"""

import contextlib

import pytest
import torch
from conftest import SHAPE, build
from torch.utils.checkpoint import checkpoint

import model as lm
import train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def checkpointed(device="cpu", n_layers=5):
    model = build(num_hidden_layers=n_layers)[0].to(device)
    lm.checkpoint_activations_(model, preserve_rng=False)
    return model


def offloaded(device="cpu"):
    return train.OffloadActivations(torch.device(device), min_bytes=1)


def gradients(model, tokens):
    model.zero_grad()
    model(tokens, tokens.roll(-1, 1)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", [1 << 22, 1024])  # a tensor in one page, and in 24
def test_offload_changes_no_gradient_and_uses_its_pages_again(device, page, monkeypatch):
    monkeypatch.setattr(train, "PAGE", page)
    model, tokens = checkpointed(device), torch.arange(96, device=device).view(2, 48)
    expected = gradients(model, tokens)
    hooks = model.activation_hooks = offloaded(device)
    places = []
    for _ in range(3):
        got = gradients(model, tokens)
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        places.append({page.data_ptr() for page in hooks.free_pages})
    n_bytes = tokens.numel() * SHAPE["hidden_size"] * 4
    assert len(places[0]) == 4 * -(-n_bytes // page) and places[0] == places[1] == places[2]


@pytest.mark.parametrize("device", DEVICES)
def test_exactly_the_inputs_of_all_blocks_but_the_last_leave(device):
    model, tokens = checkpointed(device), torch.arange(96, device=device).view(2, 48)
    hooks, inputs = offloaded(device), []
    model.activation_hooks = hooks
    for block in model.model.layers:
        block.register_forward_pre_hook(lambda block, args: inputs.append(args[0].detach().cpu()))
    model(tokens, tokens)
    if device == "cuda":
        torch.cuda.synchronize()
    assert len(hooks.parked) == 4
    for parked, x in zip(hooks.parked, inputs):
        assert parked.shape == x.shape and torch.equal(parked.pages[0].view(torch.float32)[: x.numel()], x.flatten())


def test_a_forward_without_a_backward_is_forgotten():
    model, tokens = checkpointed(), torch.arange(96).view(2, 48)
    expected = gradients(model, tokens)
    hooks = model.activation_hooks = offloaded()
    for length in range(20, 40):  # rows of growing length do not pile up pages either
        model(tokens[:, :length], tokens[:, :length])
    got = gradients(model, tokens)
    assert all(torch.equal(got[name], expected[name]) for name in expected) and len(hooks.free_pages) == 4


def test_a_second_backward_is_refused_not_wrong():
    model, tokens = checkpointed(), torch.arange(96).view(2, 48)
    model.lm_head.chunk = 0
    model.activation_hooks = offloaded()
    loss = model(tokens, tokens)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already reused"):
        loss.backward()


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
        return grad.clone()


@pytest.mark.parametrize("device", DEVICES)
def test_a_view_of_a_returned_tensor_is_not_overwritten(device):
    hooks = offloaded(device)
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
    hooks = offloaded(device)

    def block(x):
        a, b = x.view(2, -1).unbind(0)  # views of the input are what gets saved inside
        return torch.cat([a * b, b * b]).view_as(x)

    def run(context):
        x = torch.linspace(0.5, 1.5, 1 << 18, device=device).requires_grad_()
        y = x
        with context:
            for _ in range(4):
                y = checkpoint(block, y, use_reentrant=False)
        y.sum().backward()
        return x.grad

    expected = run(contextlib.nullcontext())
    for _ in range(5):
        assert torch.equal(run(hooks), expected)
