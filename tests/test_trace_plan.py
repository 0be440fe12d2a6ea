"""The formulas of the memory plan against a trace of the model's own code (trace_plan.py), at the real sizes of every
preset. Where a fork changes what a block saves, this says by how much the plan is off, and what to edit."""

import dataclasses
import itertools
import math

import pytest
import trace_plan

import data
import train

SETTINGS = [
    "",
    "--lora",
    "--qlora",
    "--activation_checkpointing 0",
    "--lora --activation_checkpointing 0 --lora_dropout 0.1",
    "--qlora --activation_checkpointing 1",
    "--tiled_mlp 1024",
    "--lora --tiled_mlp 1024 --activation_checkpointing 0",
    "--precision fp32 --activation_checkpointing 1",
    "--precision fp32 --qlora",
    "--precision bf16 --activation_checkpointing 0",
    "--precision bf16 --tiled_mlp 1024 --no-chunked_ce",
    "--qlora --lora_dropout 0.1",
    "--qlora --gpu_gib 400",  # keeps all NF4 weights in 16 bits
    "--lora --lora_targets q_proj v_proj",  # of Qwen3.5, blocks below the first adapter
    "--lora --lora_targets down_proj --activation_checkpointing 0",
    "--grad_accum 2",
    "--optim_in_backward",
    "--dpo --lora",
    "--fsdp2 --batch_size 2",
    "--qlora --sequence_parallel 2",
]
# with attention alone and beside Gated DeltaNet
WITH_NF5 = [
    ("llama-3.1-8b", "--qlora --nf5 --activation_checkpointing 1"),
    ("qwen3.5-27b", "--qlora --nf5 out_proj down_proj"),
]
# of a tied pair, a dense model, experts, Gated DeltaNet, and a norm of the embedding
WITH_EMBEDDINGS = [
    ("qwen3-0.6b", "--qlora --train_embeddings"),
    ("llama-3.1-8b", "--lora --train_embeddings --lora_targets q_proj v_proj --activation_checkpointing 0"),
    ("qwen3-30b-a3b", "--qlora --train_embeddings --grad_accum 2"),
    ("qwen3.5-9b", "--lora --train_embeddings"),
    ("muse-glimmer-30b", "--qlora --train_embeddings"),
]
# of cards without FlashAttention, on a model of each kind
ON_OLD_CARDS = [
    "--precision fp16 --lora --activation_checkpointing 0",
    "--precision fp16 --qlora --activation_checkpointing 1",
    "--precision fp16 --tiled_mlp 1024",
    "--precision fp16 --dpo --lora",  # two documents, each with a call of its own
]
KINDS = "llama-2-7b", "llama-3.1-8b", "qwen3-4b", "qwen3-30b-a3b", "qwen3.5-9b", "muse-glimmer-30b"
# what o_proj reads is no tensor that attention has saved
WITH_COPIES = [
    ("llama-3.1-8b", "--lora --lora_targets q_proj v_proj --sequence_parallel 2 --activation_checkpointing 0"),
    ("llama-2-7b", "--precision fp16 --lora --sequence_parallel 2 --activation_checkpointing 0"),
]
# of experts with adapters in attention alone: what nothing saves is the most of a recomputation
OF_EXPERTS = [
    ("qwen3-30b-a3b", "--precision fp16 --lora --lora_targets q_proj v_proj"),
    ("qwen3.5-35b-a3b", "--lora --lora_targets q_proj v_proj --batch_size 4"),
    ("qwen3-30b-a3b", "--lora --lora_targets gate_proj up_proj --batch_size 4"),
]
# of weights whose gradients are taken one by one, in the dtype of products first or not
TAKEN = [
    ("llama-3.1-8b", "--optim_in_backward"),
    ("llama-2-7b", "--optim_in_backward --precision fp32"),
    ("qwen3.5-9b", "--optim_in_backward --tiled_mlp 1024"),
    ("qwen3-30b-a3b", "--optim_in_backward --batch_size 8"),
    ("qwen3-30b-a3b", "--grad_accum 2 --tiled_mlp 1024"),
]
# of windows shorter than rows: four in a row, and in each of two rows four and a short one
IN_WINDOWS = [
    ("--precision fp16 --lora", 512),
    ("--precision fp16 --lora --activation_checkpointing 0", 512),
    ("--precision fp16 --lora --tiled_mlp 256", 512),
    ("--precision fp16 --qlora --batch_size 2", 500),
]
N_TOKENS = 2048  # two tiles, two chunks of the loss, two segments of Gated DeltaNet


def cases():
    """(preset, setting): three settings for each preset, all of them in turn, and those of old cards."""
    yield from itertools.product(KINDS, ON_OLD_CARDS)
    turns = itertools.cycle(SETTINGS)
    for preset in data.PRESETS:
        is_hybrid = "linear_num_value_heads" in data.PRESETS[preset]
        for _ in range(3):
            setting = next(turns)
            if is_hybrid and "sequence_parallel" in setting:  # which Gated DeltaNet does not have
                setting = next(turns)
            yield preset, setting
    yield from WITH_EMBEDDINGS
    yield from WITH_NF5
    yield from WITH_COPIES
    yield from OF_EXPERTS
    yield from TAKEN


def few_blocks(config):
    """A block that may be below the first adapter, one of another kind if there is one, and one above."""
    kinds = list(dict.fromkeys(config.layer_types))
    layer_types = [kinds[0], kinds[-1], kinds[0]]
    return dataclasses.replace(
        config, num_hidden_layers=3, layer_types=layer_types, rope_layers=config.rope_layers[:3])


def assert_formulas_count(flags, **changes):
    """Fails where the plan is off. changes: of the config."""
    args, config = trace_plan.opened(flags.split())
    config = dataclasses.replace(few_blocks(config), **changes)
    room = (args.gpu_gib or math.inf) * train.GIB
    blocks = train.choose_blocks(args, config, 1, N_TOKENS, room)
    parts = trace_plan.compared(args, config, N_TOKENS, blocks)
    wrong = [part for part, sizes in parts.items() if trace_plan.is_off(*sizes)]
    report = trace_plan.report_of(parts)
    assert not wrong, f"python tests/trace_plan.py {flags}\n{report}"


@pytest.mark.parametrize("preset, setting", list(cases()))
def test_formulas_count_what_the_models_code_saves_and_allocates(preset, setting):
    assert_formulas_count(f"--model {preset} --seq_len {N_TOKENS} --world 2 {setting}")


@pytest.mark.parametrize("setting, window", IN_WINDOWS)
def test_formulas_count_windows_on_a_card_without_flash_attention(setting, window):
    flags = f"--model muse-glimmer-30b --seq_len {N_TOKENS} --world 2 {setting}"
    assert_formulas_count(flags, sliding_window=window)
