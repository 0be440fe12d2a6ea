"""A run goes on without its plan, whatever a torch to come has changed of what the plan leans on."""

import argparse
import re

import pytest
import torch
from conftest import start_ranks
from private_names import NAMES, gone, is_there

import train

# it shards, quantizes and offloads, and chooses by the plan which blocks are recomputed and resident
START = "--fsdp2 --qlora --offload --gpu_gib 8 --steps 2 --seq_len 64 --log_every 1"
SAID = "does not let oomph plan a step"
OFTEN = "FakeStore", "reset_sharded_param"  # README's command takes these two away; .ci/run the others as well


@pytest.mark.parametrize("entry", NAMES, ids=[entry.name for entry in NAMES])
def test_a_private_name_of_the_plan_is_there(entry):
    assert is_there(entry), entry.if_missing


def run_without(entry, original):
    """train.run_on_paper() in a torch that does not have a name."""

    def run_on_paper(run, policy):
        with gone(entry):
            return original(run, policy)

    return run_on_paper


def launch_without(entry, argv):
    """A run in such a torch. The group of the run itself needs names that the plan's does, too."""
    train.TRACES.clear()
    train.run_on_paper = run_without(entry, train.run_on_paper)
    return train.launch(argv)


@pytest.mark.parametrize("entry", [
    pytest.param(entry, id=entry.name, marks=() if entry.name in OFTEN else pytest.mark.ci) for entry in NAMES])
def test_a_start_without_a_private_name_trains_and_says_so(entry, chats, tmp_path):
    n_ranks = 2 if entry.name in OFTEN else 1
    argv = [*START.split(), "--data", str(chats), "--out", str(tmp_path / "run")]
    logs = [tmp_path / f"rank{rank}.log" for rank in range(n_ranks)]
    codes = start_ranks(n_ranks, launch_without, (entry, argv), logs)
    text = logs[0].read_text()
    assert codes == [0] * n_ranks, text
    assert (tmp_path / "run/final/adapter_model.safetensors").exists()
    assert text.count(SAID) == entry.is_needed, text


PLAN = "--dry_run --model qwen3-0.6b --fsdp2 --world 2 --seq_len 128 --gpu_gib 7.7"
STORE = next(entry for entry in NAMES if entry.name == "FakeStore")


def test_a_dry_run_without_a_private_name_ends_with_one_line(capfd, monkeypatch):
    monkeypatch.setattr(train, "TRACES", {})
    monkeypatch.setattr(train, "run_on_paper", run_without(STORE, train.run_on_paper))
    assert train.launch(PLAN.split()) == 1
    captured = capfd.readouterr()
    assert captured.out == "planning qwen3-0.6b\n"
    assert captured.err.count("\n") == 1
    for words in (SAID, torch.__version__, "up to torch 2.15", "FakeStore"):
        assert words in captured.err


def test_ranks_agree_where_one_cannot_plan(monkeypatch):
    """The policy of all ranks is the one that needs the least, whichever rank cannot plan, and at whichever trace."""
    args = train.parse_args(PLAN.split())
    config = train.open_config(args, 2, device=None, random_init=True).config
    run = train.RunSpec(args, config, 2, args.seq_len)
    room = 100 * train.GIB

    def ranks(other, device_name="NVIDIA H100 80GB HBM3"):
        return argparse.Namespace(rank=0, device=torch.device("cuda"), device_name=device_name,
                                  gather=lambda value: [value, other])

    chosen, lines, predicted = train.plan_run(run, room, 5, None, ranks(None))
    assert chosen.count("recomputed") == 0
    assert lines[0].startswith("fits: needs ") and "a step takes" in lines[-1]
    assert re.fullmatch(r"[\d.]+ GiB, a step takes at least [\d.]+ ms on the H100, at most .* tok/s", predicted)

    least = train.blocks_as_asked(run)
    other_fails = train.plan_run(run, room, 5, None, ranks("rank 1 cannot"))
    assert other_fails[0] == least
    assert len(other_fails[1]) == 1 and "rank 1 cannot" in other_fails[1][0]


@pytest.mark.parametrize("name", ["describe_time", "describe_plan", "choose_blocks", "planned_bytes", "extrapolate",
                                  "policy_of", "cards_named"])
@pytest.mark.parametrize("error", [train.Unplanned("no time"), KeyError("no time")], ids=repr)
def test_an_error_around_a_trace_ends_no_run(monkeypatch, name, error):
    """In whatever is called for a plan: rank 0 may have chosen, and fail where it describes what it has chosen."""
    def fail(*_, **__):
        raise error

    args = train.parse_args(PLAN.split())
    config = train.open_config(args, 2, device=None, random_init=True).config
    run = train.RunSpec(args, config, 2, args.seq_len)
    least = train.blocks_as_asked(run)
    monkeypatch.setattr(train, "blocks_as_asked", lambda run: least)
    monkeypatch.setattr(train, name, fail)
    ranks = argparse.Namespace(rank=0, device=torch.device("cuda"), device_name="NVIDIA H100 80GB HBM3",
                               gather=lambda value: [None, value])
    policy, lines, _ = train.plan_run(run, 100 * train.GIB, 5, None, ranks)
    assert policy == least
    assert len(lines) == 1 and "no time" in lines[0]
