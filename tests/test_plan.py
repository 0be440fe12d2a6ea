"""The memory plan against the bytes of a real training step: rank 0 of N, every flag, within 5 %; and the search for
flags that make a run fit.

train.main() runs a step on the CPU with stand-ins that save and allocate what the CUDA kernels do (standins.py), under
a fake process group that makes one process rank 0 of any number. torch.profiler counts each allocation.
"""

import argparse
import itertools
import json
import math
import os
from pathlib import Path

import pytest
from conftest import random_model, start_fake_group, start_ranks

import model as lm
import data
import train

MODELS = {
    "gqa": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 768,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 4},
    "mha": {"num_key_value_heads": 8},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "tied": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "deep": {"num_hidden_layers": 10},
    "wide": {"intermediate_size": 8192},
    "moe": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16,
            "num_experts_per_tok": 4, "moe_intermediate_size": 192},
    "qwen3.5": {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "linear_num_key_heads": 1,
                "linear_num_value_heads": 2},
    "muse": {"model_type": "muse_glimmer_text", "architectures": None, "sliding_window": 256},
}
MODELS["qwen3.5-moe"] = MODELS["moe"] | MODELS["qwen3.5"] | {
    "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"],
    "shared_expert_intermediate_size": 192}
CASES = [  # model, tokens in a row, ranks, flags. Loss chunks of 64 tokens make a block the peak, larger ones the loss
    ("gqa", 1024, 1, ""),
    ("gqa", 1024, 1, "--lora --ce_chunk 64"),
    ("gqa", 1024, 1, "--qlora --ce_chunk 64"),
    ("wide", 256, 1, "--qlora --lora_targets q_proj --ce_chunk 64"),  # the recomputation's last dequantization
    ("gqa", 1024, 1, "--precision fp32 --ce_chunk 64"),
    ("mha", 1024, 1, "--lora --tiled_mlp 256 --ce_chunk 64"),
    ("gqa", 1024, 1, "--tiled_mlp 256 --no-activation_checkpointing"),
    ("qwen3", 1024, 1, "--no-activation_checkpointing --precision bf16"),
    ("gqa", 1024, 1, "--no-chunked_ce --lora"),
    ("gqa", 512, 1, "--lora --batch_size 2 --ce_chunk 128"),
    ("gqa", 1024, 1, "--lora --lora_dropout 0.1 --lora_targets q_proj v_proj down_proj --ce_chunk 64"),
    ("deep", 1024, 1, "--lora --offload activations --ce_chunk 64"),
    ("gqa", 512, 1, "--optim adamw8bit --ce_chunk 128"),
    ("gqa", 4096, 1, "--optim_in_backward --optim adamw8bit --precision bf16 --stochastic_rounding --ce_chunk 64"),
    ("gqa", 256, 1, "--optim_in_backward --optim adamw8bit --ce_chunk 64"),  # an update is the peak
    ("gqa", 512, 1, "--no-fused_adamw"),
    ("gqa", 1024, 1, "--grad_accum 2 --precision bf16 --ce_chunk 64"),
    ("tied", 256, 1, "--ce_chunk 64"),
    ("tied", 1024, 1, "--optim_in_backward --ce_chunk 64"),
    ("tied", 512, 3, "--fsdp2"),
    ("gqa", 1024, 2, "--fsdp2 --ce_chunk 64"),
    ("gqa", 1024, 2, "--fsdp2 --no-reshard_after_forward --no-shard_embeddings --ce_chunk 64"),
    ("gqa", 1024, 2, "--fsdp2 --grad_accum 2 --no-activation_checkpointing"),
    ("gqa", 512, 4, "--fsdp2 --replicas 2 --optim_in_backward --ce_chunk 64"),
    ("gqa", 512, 4, "--fsdp2 --replicas 4 --lora --grad_accum 2"),
    ("deep", 512, 8, "--fsdp2 --offload params --optim adamw8bit --ce_chunk 64"),
    ("deep", 1024, 8, "--fsdp2 --qlora --offload --tiled_mlp 256 --ce_chunk 64"),
    ("gqa", 4096, 4, "--fsdp2 --qlora --sequence_parallel 4 --lora_dropout 0.1"),
    ("mha", 4096, 2, "--lora --sequence_parallel 2 --no-activation_checkpointing"),
    ("gqa", 1024, 1, "--activation_checkpointing 3"),
    ("deep", 1024, 1, "--qlora --activation_checkpointing 4 --ce_chunk 64"),
    ("gqa", 1024, 2, "--fsdp2 --lora --activation_checkpointing 2 --ce_chunk 64"),
    ("gqa", 1024, 1, "--qlora --gpu_gib 99 --ce_chunk 64"),
    ("deep", 256, 2, "--fsdp2 --qlora --gpu_gib 1.17"),
    ("deep", 1024, 1, "--qlora --gpu_gib 1.17 --ce_chunk 64"),  # attention is kept
    ("deep", 1024, 1, "--lora --precision fp32 --gpu_gib 1.22 --ce_chunk 64"),
    ("moe", 1024, 1, "--qlora --gpu_gib 99 --ce_chunk 64"),
    ("moe", 2048, 1, "--qlora --lora_targets q_proj k_proj v_proj o_proj --ce_chunk 64"),
    ("moe", 2048, 1, "--qlora --lora_dropout 0.1 --ce_chunk 64"),
    ("moe", 1024, 1, "--no-activation_checkpointing --precision bf16"),
    ("moe", 1024, 4, "--fsdp2 --qlora --offload --tiled_mlp 256 --ce_chunk 64"),
    ("muse", 1024, 1, ""),
    ("muse", 1024, 1, "--lora --ce_chunk 64"),
    ("muse", 1024, 1, "--qlora --no-activation_checkpointing --precision bf16 --ce_chunk 64"),
    ("muse", 1024, 2, "--fsdp2 --qlora --lora_dropout 0.1 --activation_checkpointing 2 --ce_chunk 64"),
    ("muse", 1024, 1, "--no-activation_checkpointing --tiled_mlp 256 --ce_chunk 64"),
    ("muse", 1024, 1, "--qlora --gpu_gib 99 --ce_chunk 64"),
    ("muse", 1024, 1, "--no-chunked_ce --lora"), ("muse", 512, 1, "--precision fp32 --qlora"),
    ("qwen3.5", 1024, 1, "--ce_chunk 64"),
    ("qwen3.5", 1280, 1, "--qlora --ce_chunk 64"),  # more than one segment
    ("qwen3.5", 1024, 1, "--lora --tiled_mlp 256 --ce_chunk 64"),
    ("qwen3.5", 1024, 2, "--fsdp2 --lora --lora_dropout 0.1 --activation_checkpointing 2 --ce_chunk 64"),
    ("qwen3.5-moe", 1024, 1, "--qlora --gpu_gib 99 --ce_chunk 64"),
    ("qwen3.5-moe", 1024, 4, "--fsdp2 --qlora --offload --tiled_mlp 256 --ce_chunk 64"),
]


# ---------------------------------------------------------------- a counted step: all that it touches of train.py


def count(argv, world, result):
    """Runs train.main as rank 0 of `world` up to the export; writes its peak and the bytes of offloaded activations."""
    import standins
    import torch
    from torch.profiler import profile

    class Alone(train.Ranks):
        def __init__(self, want_group, timeout):
            super().__init__(False, timeout)  # as without torchrun
            self.world = world
            if world > 1 or want_group:
                start_fake_group(world)

    hooks, load = [], data.load_weights_

    def load_weights_(model, *rest, **flags):
        load(model, *rest)
        if "activations" in train.parse_args(argv).offload:  # which a run on a CPU leaves where they are
            hooks.append(train.OffloadActivations(torch.device("cpu")))
            model.activation_hooks = hooks[0]

    def stop(*_):
        profiler.stop()
        events = profiler.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        totals = itertools.accumulate(n_bytes for _, n_bytes in changes)
        pages, parked = 0, hooks[0].last if hooks else None
        while parked is not None:
            pages, parked = pages + sum(page.nbytes for page in parked.pages), parked.previous
        Path(result).write_text(json.dumps([max(totals), pages]))
        os._exit(0)

    standins.install()
    del os.environ["RANK"]
    train.PAGE = 1 << 19
    train.Ranks, data.export, data.load_weights_ = Alone, stop, load_weights_
    profiler = profile(profile_memory=True)
    profiler.start()
    return train.launch(argv)


TEXT = "the file is read from disk and returned as a list of str self None def " * 3000  # fills every row


def config_of(preset):
    return lm.parse_config(data.PRESETS[preset])


def planned(argv, config, world):
    """(moments, host bytes, args) of a command line."""
    args = train.parse_args([*map(str, argv), "--dry_run"])
    args.precision = args.precision or "mixed"
    return *train.plan(args, config, world, args.seq_len, blocks_of(args, config, world)), args


def blocks_of(args, config, world):
    """train.Blocks that a dry run of a command line chooses."""
    room = (args.gpu_gib or math.inf) * 2**30
    return train.choose_blocks(args, config, world, args.seq_len, room)


# ---------------------------------------------------------------- the plan


def planned_and_counted(model, world, flags, folder):
    """Bytes at the peak of a step with the config in the folder `model`, planned and counted. The run uses `folder`."""
    (folder / "text.txt").write_text(TEXT)
    argv = ["--model", model, "--random_init", "--data", folder / "text.txt", "--steps", 1, "--sample", "",
            "--precision", "mixed", "--save_every", 0, "--out", folder / "out", *flags.split()]
    argv, log, result = [*map(str, argv)], folder / "log", folder / "result"
    assert start_ranks(1, count, (argv, world, str(result)), [log]) == [0], log.read_text()
    counted, pages = json.loads(result.read_text())

    config = lm.parse_config(data.read_json(model / "config.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "PAGE", 1 << 19)
        moments, host, _ = planned(argv, config, world)
    assert host.pop("activations", 0) == pages
    # offloaded parameters are counted, too: here both devices are the CPU. Their gradients arrive block by block
    totals = {}
    for name, kinds in moments.items():
        n_missing = int(name.split()[1]) + 1 if "block" in name else config.num_hidden_layers if "loss" in name else 0
        missing = host.get("gradients", 0) * n_missing / config.num_hidden_layers
        totals[name] = sum(kinds.values()) + sum(host.values()) - missing
    print({name: round(total / 2**20, 1) for name, total in totals.items()}, "counted", round(counted / 2**20, 1))
    return max(totals.values()), counted - pages


@pytest.mark.bf16  # oneDNN's kernels of some CPUs allocate copies
@pytest.mark.parametrize("model, tokens, world, flags", CASES)
def test_the_plan_is_what_a_step_holds(tmp_path, model, tokens, world, flags):
    folder = random_model(tmp_path / "model", **MODELS["gqa"] | MODELS[model] | {"max_position_embeddings": 4096})
    plan, counted = planned_and_counted(folder, world, f"--seq_len {tokens} {flags}", tmp_path)
    # what is not modelled: scratch of a kernel, a [T] tensor here and there, the order in which autograd frees
    assert plan == pytest.approx(counted, rel=0.05)


def test_what_goes_between_replicas_waits_on_the_device():
    def gradients(*flags):  # GiB at the end of the backward
        argv = ["--model", "llama-3-8b", "--seq_len", 2048, "--fsdp2", "--offload", "params", *flags]
        return planned(argv, config_of("llama-3-8b"), 8)[0]["embedding"]["gradients"] / 2**30

    # float32 shards of 8 billion parameters over 4 ranks are 7.5 GiB; without replicas all are on the host by then
    for more in ([], ["--grad_accum", "2"]):
        assert gradients("--replicas", "2", *more) - gradients(*more) == pytest.approx(7.5, abs=0.3)


@pytest.mark.parametrize("flag, gib, n_recomputed, n_kept", [
    ("--qlora", 10, 32, 0), ("--qlora", 40, range(1, 32), 0), ("--qlora", 60, 0, range(1, 32)),
    ("--qlora", 400, 0, 32), ("--lora", 400, 0, 0)])
def test_auto_recomputes_little_keeps_many_weights_and_leaves_a_tenth_of_the_memory(flag, gib, n_recomputed, n_kept):
    argv, config = ["--model", "llama-3.1-8b", flag, "--seq_len", 8192], config_of("llama-3.1-8b")
    moments, _, args = planned([*argv, "--gpu_gib", gib], config, 1)
    blocks = blocks_of(args, config, 1)
    for n, expected in (blocks.n_recomputed, n_recomputed), (blocks.n_weights_kept, n_kept):
        assert n in expected if isinstance(expected, range) else n == expected
    assert gib == 10 or train.peak_of(moments)[1] + train.OVERHEAD <= 0.9 * gib * 2**30
    if isinstance(n_recomputed, range) or isinstance(n_kept, range):  # one block more would not have fitted
        more = train.Blocks(max(0, blocks.n_recomputed - 1), blocks.n_weights_kept + 1, blocks.n_attention_kept)
        moments, _ = train.plan(args, config, 1, 8192, more)
        assert train.peak_of(moments)[1] + train.OVERHEAD > 0.9 * gib * 2**30


def test_an_optimizer_that_the_plan_does_not_know_is_refused():
    _, _, args = planned(["--model", "qwen3-0.6b"], config_of("qwen3-0.6b"), 1)
    args.optim = "muon"  # as a fork's choice of --optim
    with pytest.raises(ValueError, match=r"--optim muon: not in the memory plan: add its state to optimizer_bytes"):
        train.plan(args, config_of("qwen3-0.6b"), 1, 1024, train.Blocks(0))


@pytest.mark.parametrize("preset, flags", [
    ("llama-3.2-1b", "--qlora"), ("qwen3.5-0.8b", "--lora"), ("qwen3-0.6b", ""), ("muse-glimmer-30b", "--qlora"),
    ("qwen3-30b-a3b", "--qlora --fsdp2")])
def test_each_choice_of_auto_needs_at_most_the_memory_of_the_one_before(preset, flags):
    config = lm.parse_config(data.PRESETS[preset] | {"num_hidden_layers": 8})  # each block is one choice more
    _, _, args = planned(["--model", preset, *flags.split()], config, 2)
    peaks = []
    for choice in train.block_choices(config.num_hidden_layers, args.qlora):
        peaks.append(train.planned_bytes(args, config, 2, 4096, choice))
    assert peaks == sorted(peaks, reverse=True)  # or bisecting could miss the fastest that fits


# ---------------------------------------------------------------- the search for what fits

NOTHING_ON = "--no-fused_adamw --no-chunked_ce --no-activation_checkpointing"
RUNS = [  # model, GiB, ranks, flags
    ("llama-3.1-8b", 23, 2, ""),
    ("llama-3.1-70b", 79, 8, "--fsdp2 --seq_len 8192"),
    ("qwen2.5-7b", 23, 1, f"--seq_len 8192 --lora --batch_size 4 --grad_accum 3 {NOTHING_ON}"),
    ("llama-3.1-8b", 79, 8, "--fsdp2 --seq_len 1000000 --optim_in_backward"),
    ("qwen3-32b", 23, 4, "--fsdp2 --offload params --seq_len 32768 --batch_size 2 --no-reshard_after_forward"),
    ("llama-3.1-8b", 23, 6, "--fsdp2 --replicas 3 --tiled_mlp 512 --ce_chunk 64 --seq_len 65536 --lora_rank 8 --lora"),
    ("llama-3.1-8b", 23, 2, "--fsdp2 --dpo --lora --seq_len 32768 --batch_size 2"),  # which refuses --sequence_parallel
]


def climb(model, gib, world, flags):
    """-> (args, rungs, args with them, a function: rungs typed on the command line -> (peak in GiB, args))."""
    argv, config = ["--model", model, "--dry_run", *flags.split()], config_of(model)
    _, _, args = planned(argv, config, world)

    def peak(added):
        moments, _, changed = planned([*argv, *" ".join(added).split()], config, world)
        train.check_sizes(changed, config, world)
        return train.peak_of(moments)[1] / 2**30, changed

    added = train.ladder(args, config, world, args.seq_len, (gib + 1) * 2**30)
    return args, added, train.with_rungs(args, added), peak


@pytest.mark.parametrize("model, gib, world, flags", RUNS)
def test_what_the_ladder_adds_is_accepted_fits_and_is_needed(model, gib, world, flags):
    before, added, changed, peak = climb(model, gib, world, flags)
    fits, typed = peak(added)
    assert added and fits <= gib < peak([])[0]
    assert vars(typed) == vars(changed)
    for rung in added:
        try:
            less, other = peak([kept for kept in added if kept != rung])
        except (argparse.ArgumentError, ValueError):  # what is left needs it
            continue
        assert less > gib or other.grad_accum * other.batch_size != typed.grad_accum * typed.batch_size, rung

    everything = climb(model, 1, world, flags)[2]  # with 1 GiB all that helps is added
    for after in (changed, everything):  # and no flag is turned the wrong way
        assert set(before.offload) <= set(after.offload)
        for flag in ("fused_adamw", "chunked_ce", "reshard_after_forward", "shard_embeddings", "fsdp2", "qlora",
                     "optim_in_backward", "stochastic_rounding"):
            assert getattr(after, flag) >= getattr(before, flag), flag
        recomputed = [train.blocks_as_asked(args, config_of(model)).n_recomputed for args in (before, after)]
        assert recomputed[1] >= recomputed[0]
        assert after.replicas <= before.replicas and after.batch_size <= before.batch_size
        assert after.tiled_mlp == before.tiled_mlp or not before.tiled_mlp
        assert after.ce_chunk <= (before.ce_chunk or after.ce_chunk)
        rows = [args.batch_size * args.grad_accum / args.sequence_parallel for args in (before, after)]
        assert after.optim_in_backward or rows[0] == rows[1]


def test_flags_are_added_to_settings_that_came_with_an_adapter():
    args = train.parse_args(["--model", "qwen3-4b", "--dry_run", "--adapter", "folder"])
    # as complete_for_model() does
    vars(args).update(lora_rank=8, lora_alpha=4, lora_dropout=0.1, lora_targets=["q_proj"])
    changed = train.with_rungs(args, ["--optim adamw8bit", "--qlora"])
    assert vars(changed) == vars(args) | {"adapter": None, "optim": "adamw8bit", "qlora": True}


def test_dry_run_is_at_most_80_columns_wide_and_its_advice_is_typed_as_it_stands(capsys):
    argv = ["--model", "llama-3.1-405b", "--world", "64", "--fsdp2", "--dry_run", "--gpu_gib", "80"]
    assert train.launch(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and lines[-3].endswith("does not fit")
    assert train.launch([*argv, *lines[-1].split()]) == 0
    assert capsys.readouterr().out.endswith(": fits\n")
