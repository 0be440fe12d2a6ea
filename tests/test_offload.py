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

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
N_LAYERS = 5
N_PARKED = 4  # inputs of blocks: the backward needs that of the last block at once, so it stays


def checkpointed(device="cpu", n_layers=N_LAYERS):
    """A model of random weights that saves the inputs of its blocks alone."""
    model = build(num_hidden_layers=n_layers)[0].to(device)
    lm.recompute_blocks_(model)
    return model


def offload(device="cpu"):
    """Hooks that offload every tensor, however small."""
    return train.OffloadActivations(torch.device(device), min_bytes=1)


def two_rows(device="cpu"):
    return torch.arange(96, device=device).view(2, 48)


def gradients(model, tokens):
    model.zero_grad()
    model(tokens, tokens.roll(-1, 1)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def parked(hooks):
    """What the last forward has parked on the CPU, the newest first."""
    found = []
    last = hooks.last
    while last is not None:
        found.append(last)
        last = last.previous
    return found


def assert_equal(got, expected):
    """Both {name: tensor}. Offload moves bytes, so no bit may differ."""
    for name, t in expected.items():
        assert torch.equal(got[name], t), name


@DEVICES
@pytest.mark.parametrize("page", [1 << 22, 1024])  # a tensor in one page, and in 24
def test_offload_changes_no_gradient_and_keeps_one_forward(device, page, monkeypatch):
    monkeypatch.setattr(train, "PAGE", page)
    model = checkpointed(device)
    tokens = two_rows(device)
    expected = gradients(model, tokens)
    model.activation_hooks = offload(device)
    n_bytes = tokens.numel() * SHAPE["hidden_size"] * 4  # of the float32 input of a block
    n_pages = -(-n_bytes // page)
    for _ in range(3):
        assert_equal(gradients(model, tokens), expected)
        pages = [page for one in parked(model.activation_hooks) for page in one.pages]
        assert len(pages) == N_PARKED * n_pages
        assert sum(page.nbytes for page in pages) == N_PARKED * n_bytes


@DEVICES
def test_exactly_the_inputs_of_all_blocks_but_the_last_leave(device):
    model = checkpointed(device)
    tokens = two_rows(device)
    hooks = model.activation_hooks = offload(device)
    inputs = []
    for block in model.model.layers:
        block.register_forward_pre_hook(lambda block, args: inputs.append(args[0].detach().cpu()))
    model(tokens, tokens)
    if device == "cuda":
        torch.cuda.synchronize()  # copies run on a stream of their own
    oldest_first = parked(hooks)[::-1]
    assert len(inputs) == N_LAYERS
    assert len(oldest_first) == N_PARKED
    for one, x in zip(oldest_first, inputs):
        assert one.shape == x.shape
        assert torch.equal(one.pages[0].view(torch.float32), x.flatten())


def test_a_forward_without_a_backward_is_forgotten():
    model = checkpointed()
    tokens = two_rows()
    expected = gradients(model, tokens)
    hooks = model.activation_hooks = offload()
    for length in range(20, 24):
        model(tokens[:, :length], tokens[:, :length])
    assert_equal(gradients(model, tokens), expected)
    assert len(parked(hooks)) == N_PARKED


@DEVICES
def test_a_view_cached_by_checkpointing_is_not_overwritten(device):
    """torchtune #1936: the recomputation keeps views of the tensor that came back, longer than the node that asked."""
    hooks = offload(device)

    def block(x):
        a, b = x.view(2, -1).unbind(0)  # views of the input are what gets saved inside
        return torch.cat([a * b, b * b]).view_as(x)

    def gradient(context):
        x = torch.linspace(0.5, 1.5, 1 << 18, device=device).requires_grad_()
        y = x
        with context:
            for _ in range(4):
                y = checkpoint(block, y, use_reentrant=False)
        y.sum().backward()
        return x.grad

    expected = gradient(contextlib.nullcontext())
    for _ in range(5):  # on a GPU memory is reused only now and then
        assert torch.equal(gradient(hooks), expected)
