"""Activation offload: same gradients, exactly what should leave does, it comes back in time, no memory is given away
too early.

The tests run on the CPU, where the bookkeeping is the same and copies are plain; those marked gpu add the side stream.
"""

import contextlib
import functools

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
    for block in model.model.layers:
        lm.recompute_(block)
    return model


class Offload(train.OffloadActivations):
    """Offloads every tensor, however small."""

    def __init__(self, device="cpu", blocks=()):
        super().__init__(torch.device(device), blocks, min_bytes=1)

    def __enter__(self):
        self.parked = []  # by this forward
        return super().__enter__()

    def pack(self, tensor):
        saved = super().pack(tensor)
        if isinstance(saved, train.Parked):
            self.parked.append(saved)
        return saved


def two_rows(device="cpu"):
    return torch.arange(96, device=device).view(2, 48)


def gradients(model, tokens):
    model.zero_grad()
    model(tokens, tokens.roll(-1, 1)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


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
    model.activation_hooks = Offload(device, model.model.layers)
    n_bytes = tokens.numel() * SHAPE["hidden_size"] * 4  # of the float32 input of a block
    n_pages = -(-n_bytes // page)
    for _ in range(3):
        assert_equal(gradients(model, tokens), expected)
        pages = [page for one in model.activation_hooks.parked for page in one.pages]
        assert len(pages) == N_PARKED * n_pages
        assert sum(page.nbytes for page in pages) == N_PARKED * n_bytes


@DEVICES
def test_exactly_the_inputs_of_all_blocks_but_the_last_leave(device):
    model = checkpointed(device)
    tokens = two_rows(device)
    hooks = model.activation_hooks = Offload(device, model.model.layers)
    inputs = []
    for block in model.model.layers:
        block.register_forward_pre_hook(lambda block, args: inputs.append(args[0].detach().cpu()))
    model(tokens, tokens)
    if device == "cuda":
        torch.cuda.synchronize()  # copies run on a stream of their own
    assert len(inputs) == N_LAYERS
    assert len(hooks.parked) == N_PARKED
    for one, x in zip(hooks.parked, inputs):
        assert one.shape == x.shape
        assert torch.equal(one.pages[0].view(torch.float32), x.flatten())


class Note(torch.autograd.Function):
    """Adds a name to a list when the backward of what follows it has ended."""

    @staticmethod
    def forward(ctx, events, name, x):
        ctx.note = functools.partial(events.append, name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.note()
        return None, None, grad


@pytest.mark.parametrize("n_groups", [0, 1, 4])  # 0: not in tiles
def test_the_input_of_a_block_comes_back_behind_the_mlp_and_before_the_last_attention(monkeypatch, n_groups):
    """Sooner it would be one more vector of each token beside what these need, later the block before would wait."""
    model, _ = build(num_hidden_layers=N_LAYERS, num_attention_heads=8, num_key_value_heads=4)
    n_tiles = 1
    if n_groups:
        lm.tile_mlp_(model, 32, n_groups * lm.GROUP_TOKENS)
        n_tiles = 3  # of 96 tokens
    for block in model.model.layers:
        lm.recompute_(block)
    tokens = two_rows()
    expected = gradients(model, tokens)
    events = []
    attend = lm.attend_here
    start = lm.MLP.start
    hooks = model.activation_hooks = Offload(blocks=model.model.layers)
    copy = hooks.side.copy

    def noting_attend(spans, window, q, k, v):
        return attend(spans, window, Note.apply(events, "attention", q), k, v)

    def noting_start(mlp, h):
        return start(mlp, Note.apply(events, "MLP", h))

    def noting_copy(targets, sources):
        events.append("copy")
        return copy(targets, sources)

    monkeypatch.setattr(lm, "attend_here", noting_attend)
    monkeypatch.setattr(lm.MLP, "start", noting_start)
    monkeypatch.setattr(hooks.side, "copy", noting_copy)
    assert_equal(gradients(model, tokens), expected)
    in_groups = ["attention"] * (n_groups - 1)
    of_a_block = ["MLP"] * n_tiles + in_groups + ["copy", "attention"]
    first_block = ["MLP"] * n_tiles + in_groups + ["attention"]
    out = ["copy"] * N_PARKED
    assert events == out + of_a_block * N_PARKED + first_block


def test_a_forward_without_a_backward_is_forgotten():
    model = checkpointed()
    tokens = two_rows()
    expected = gradients(model, tokens)
    hooks = model.activation_hooks = Offload(blocks=model.model.layers)
    for length in range(20, 24):
        model(tokens[:, :length], tokens[:, :length])
    assert_equal(gradients(model, tokens), expected)
    assert len(hooks.parked) == N_PARKED


@DEVICES
def test_a_view_cached_by_checkpointing_is_not_overwritten(device):
    """torchtune #1936: the recomputation keeps views of the tensor that came back, longer than the node that asked."""
    hooks = Offload(device)

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
