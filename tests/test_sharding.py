"""Ranks, FSDP2 and its flags change nothing but where things are: same losses, same bytes, same exports."""

import pytest
import torch
from conftest import losses
from safetensors.torch import load_file

METHODS = {"full": ["--lr", "3e-3"], "lora": ["--lora", "--lora_rank", 5, "--lr", "1e-2"],
           "qlora": ["--qlora", "--lora_rank", 5, "--lr", "1e-2"]}
# twelve rows a step, split in every way
SPLITS = {1: ("--batch_size", 4, "--grad_accum", 3), 2: ("--batch_size", 2, "--grad_accum", 3),
          3: ("--batch_size", 4, "--grad_accum", 1), 4: ("--batch_size", 1, "--grad_accum", 3)}


@pytest.fixture(scope="module")
def job(folder, chats):
    return ["--model", folder, "--random_init", "--data", chats, "--seq_len", 96, "--steps", 3, "--precision", "fp32"]


@pytest.fixture(scope="module")
def plain(job, tmp_path_factory):
    """One rank, no sharding, for each method: (losses, exported tensors)."""
    results = {}
    for name, flags in METHODS.items():
        out = tmp_path_factory.mktemp("plain") / name
        results[name] = losses(1, [*job, *flags, *SPLITS[1]], out), load_file(next((out / "final").glob("*.safetensors")))
    return results


@pytest.mark.parametrize("offload", [[], ["--offload"]], ids=["", "offload"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_do_not_change_the_losses(job, plain, tmp_path, method, world, offload):
    expected, exported = plain[method]
    out = tmp_path / "run"
    got = losses(world, [*job, *METHODS[method], *SPLITS[world], "--fsdp2", *offload], out)
    assert got == pytest.approx(expected, abs=1e-5)  # float32: only the order of sums differs, about 1e-6 at a loss of 8
    final = load_file(next((out / "final").glob("*.safetensors")))
    assert final.keys() == exported.keys()
    for name, tensor in final.items():
        # Adam divides a gradient by its own size, so rounding in a tiny gradient moves a weight by a part of lr = 1e-2
        torch.testing.assert_close(tensor, exported[name], atol=1e-3, rtol=1e-3)
