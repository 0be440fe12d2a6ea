"""Activation offload: same gradients, exactly what should leave does, no memory is given away too early.

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
    lm.checkpoint_activations_(model)
    return model


def offloaded(device="cpu"):
    return train.OffloadActivations(torch.device(device), min_bytes=1)


def gradients(model, tokens):
    model.zero_grad()
    model(tokens, tokens.roll(-1, 1)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def parked(hooks):
    """What the last forward has parked, the newest first."""
    found, last = [], hooks.last
    while last is not None:
        found.append(last)
        last = last.previous
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", [1 << 22, 1024])  # a tensor in one page, and in 24
def test_offload_changes_no_gradient_and_keeps_one_forward(device, page, monkeypatch):
    monkeypatch.setattr(train, "PAGE", page)
    model, tokens = checkpointed(device), torch.arange(96, device=device).view(2, 48)
    expected = gradients(model, tokens)
    hooks = model.activation_hooks = offloaded(device)
    n_bytes = tokens.numel() * SHAPE["hidden_size"] * 4
    for _ in range(3):
        got = gradients(model, tokens)
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        pages = [page for one in parked(hooks) for page in one.pages]
        assert len(pages) == 4 * -(-n_bytes // page) and sum(page.nbytes for page in pages) == 4 * n_bytes


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
    assert len(parked(hooks)) == 4
    for one, x in zip(parked(hooks)[::-1], inputs):
        assert one.shape == x.shape and torch.equal(one.pages[0].view(torch.float32), x.flatten())


def test_a_forward_without_a_backward_is_forgotten():
    model, tokens = checkpointed(), torch.arange(96).view(2, 48)
    expected = gradients(model, tokens)
    hooks = model.activation_hooks = offloaded()
    for length in range(20, 24):
        model(tokens[:, :length], tokens[:, :length])
    got = gradients(model, tokens)
    assert all(torch.equal(got[name], expected[name]) for name in expected) and len(parked(hooks)) == 4


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
