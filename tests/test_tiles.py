"""The MLP in tiles of tokens: the same loss and gradients, two forwards in all, and memory that a tile bounds."""

import pytest
import torch
from conftest import SHAPE, count_flops
from torch.profiler import profile

import model as lm
import nf4
import train

TOKENS = torch.arange(96).view(2, 48)


def build(method="full", tile=0, checkpointing=False, dropout=0.0, **changes):
    with torch.device("meta"):
        model = lm.Transformer(lm.parse_config(SHAPE | changes))
    source = lm.RandomWeights(model, 0, torch.device("cpu"))
    if method == "qlora":
        nf4.quantize_linears_(model.model.layers)
    if method != "full":
        lm.add_lora_(model, 4, 8, dropout, lm.LORA_TARGETS)
    model.to_empty(device="cpu").tie_()
    lm.load_weights_(model, source, None, 0, torch.device("cpu"), progress=False)
    generator = torch.Generator().manual_seed(0)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.data.normal_(std=0.1, generator=generator)
    if tile:
        lm.tile_feed_forward_(model, tile)
    if checkpointing:
        train.checkpoint_activations_(model, preserve_rng=bool(dropout))
    return model


def gradients(model):
    torch.manual_seed(0)
    loss = model(TOKENS, TOKENS.roll(-1, 1))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("tile", [96, 32, 7])
def test_tiles_do_not_change_loss_and_gradients(method, tile, checkpointing):
    loss, expected = gradients(build(method))
    got_loss, got = gradients(build(method, tile, checkpointing))
    assert got_loss == pytest.approx(loss, rel=1e-6)
    for name, grad in got.items():
        # the gradient of a weight is summed tile by tile: float32 rounding of up to 14 terms
        scale = 0 if tile == 96 else 1e-5
        torch.testing.assert_close(grad, expected[name], rtol=scale, atol=scale * expected[name].abs().max().item())


@pytest.mark.parametrize("tile", [96, 20])
def test_the_backward_drops_the_same_inputs_as_the_forward(tile):
    loss, expected = gradients(build("lora", 96, dropout=0.3))
    if tile == 96:  # one tile: the masks are those of the plain model
        plain, grads = gradients(build("lora", dropout=0.3))
        assert loss == plain and all(torch.equal(grads[name], expected[name]) for name in grads)
    # with tiles of 20 the masks are others; checkpointing draws them once more and must meet the same
    loss, expected = gradients(build("lora", tile, dropout=0.3))
    got_loss, got = gradients(build("lora", tile, checkpointing=True, dropout=0.3))
    assert got_loss == loss
    assert all(torch.equal(got[name], expected[name]) for name in got)


def test_checkpointing_runs_a_tiled_mlp_forward_twice_and_not_three_times():
    c = lm.parse_config(SHAPE)
    mlp = 2 * 3 * c.hidden_size * c.intermediate_size * TOKENS.numel() * c.num_hidden_layers
    down = mlp / 3
    once = count_flops(lambda: gradients(build(checkpointing=True)))
    tiled = count_flops(lambda: gradients(build(tile=16, checkpointing=True)))
    # plain checkpointing stops before down_proj, a tile runs it as well; a third forward would be another `mlp`
    assert tiled - once == pytest.approx(down, rel=0.05)


def test_a_tile_bounds_the_memory_of_the_mlp():
    def peak(tile):
        model = build("lora", tile, checkpointing=True, intermediate_size=4096)
        tokens = torch.arange(2048)[None]
        with profile(profile_memory=True) as prof:
            model(tokens, tokens).backward()
        return max(total for total in allocated(prof))

    def allocated(prof):
        return [event.total_allocated for event in allocations(prof.profiler.kineto_results.experimental_event_tree())]

    def allocations(events):
        for event in events:
            if event.tag.name == "Allocation":
                yield event.typed[1]
            yield from allocations(event.children)

    six_F = 6 * 4096 * 4 * 2048  # bytes live in the backward of an untiled MLP
    assert peak(0) - peak(64) > 0.9 * six_F * (1 - 64 / 2048)
