"""The memory plan against the bytes of a real training step: rank 0 of N, every flag, within 2 %, and of forks that
change the model; and the search for flags that make a run fit.

train.main() runs a step on the CPU with stand-ins that save and allocate what the CUDA kernels do (standins.py), under
a fake process group that makes one process rank 0 of any number. torch.profiler counts each allocation. At the sizes of
the presets, test_trace_plan.py compares the plan with whole steps on the meta device.
"""

import argparse
import functools
import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import standins
import torch
from conftest import in_ci, random_model, start_fake_group, start_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import profile

import data
import model as lm
import train

GQA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 192,
}
DELTANET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MODELS = {  # what differs from the first
    "gqa": GQA,
    "mha": {"num_key_value_heads": 8},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "tied": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "deep": {"num_hidden_layers": 10},
    "wide": {"intermediate_size": 8192},
    "words": {"vocab_size": 65536},
    "moe": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **EXPERTS},
    "qwen3.5": {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], **DELTANET},
    "muse": {"model_type": "muse_glimmer_text", "architectures": None, "sliding_window": 256},
    "granite": {
        "model_type": "granite", "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.1,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    },
    "ministral3": {
        "model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"], "rope_theta": None,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    "qwen3.5-moe": {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "shared_expert_intermediate_size": 192,
        **EXPERTS,
        **DELTANET,
    },
}


class Case(NamedTuple):
    model: str
    n_tokens: int  # in a row
    world: int
    flags: str


# Loss chunks of 64 tokens make a block the peak, larger ones the loss.
CASES = [
    Case("gqa", 1024, 1, ""),
    Case("gqa", 1024, 1, "--lora --ce_chunk 64"),
    Case("gqa", 1024, 1, "--qlora --ce_chunk 64"),
    # the recomputation's last dequantization is the peak
    Case("wide", 256, 1, "--qlora --lora_targets q_proj --ce_chunk 64"),
    Case("gqa", 1024, 1, "--precision fp32 --ce_chunk 64"),
    Case("mha", 1024, 1, "--lora --tiled_mlp 256 --ce_chunk 64"),
    # the kernels of a card without FlashAttention, in rows with a gap
    Case("gqa", 1024, 1, "--precision fp16 --lora --no-activation_checkpointing --ce_chunk 64"),
    Case("mha", 1024, 2, "--precision fp16 --fsdp2 --qlora --ce_chunk 64"),
    Case("muse", 1024, 1, "--precision fp16 --ce_chunk 64"),
    # DTensor asks for the shapes that AdamW makes with a rate on the device, which must not run a kernel
    Case("tied", 256, 8, "--fsdp2 --precision fp16 --no-activation_checkpointing --tiled_mlp 256 "
         "--no-reshard_after_forward --replicas 2 --offload params --ce_chunk 64"),
    Case("gqa", 256, 2, "--fsdp2 --precision fp16 --no-fused_adamw --ce_chunk 64"),
    Case("gqa", 1024, 1, "--tiled_mlp 256 --no-activation_checkpointing"),
    Case("gqa", 1024, 1, "--tiled_mlp 256 --ce_chunk 64"),
    Case("qwen3", 1024, 1, "--no-activation_checkpointing --precision bf16"),
    Case("gqa", 1024, 1, "--no-chunked_ce --lora"),
    Case("gqa", 512, 1, "--lora --batch_size 2 --ce_chunk 128"),
    Case("gqa", 1024, 1, "--lora --lora_dropout 0.1 --lora_targets q_proj v_proj down_proj --ce_chunk 64"),
    Case("deep", 1024, 1, "--lora --offload activations --ce_chunk 64"),
    Case("gqa", 512, 1, "--optim adamw8bit --ce_chunk 128"),
    Case("gqa", 4096, 1, "--optim_in_backward --optim adamw8bit --precision bf16 --stochastic_rounding --ce_chunk 64"),
    # an update is the peak
    Case("gqa", 256, 1, "--optim_in_backward --optim adamw8bit --ce_chunk 64"),
    Case("gqa", 512, 1, "--no-fused_adamw"),
    Case("gqa", 1024, 1, "--grad_accum 2 --precision bf16 --ce_chunk 64"),
    Case("tied", 256, 1, "--ce_chunk 64"),
    Case("tied", 1024, 1, "--optim_in_backward --ce_chunk 64"),
    Case("tied", 512, 3, "--fsdp2"),
    Case("gqa", 64, 2, "--fsdp2 --no-fused_adamw --ce_chunk 64"),
    Case("gqa", 1024, 2, "--fsdp2 --ce_chunk 64"),
    Case("gqa", 1024, 2, "--fsdp2 --no-reshard_after_forward --no-shard_embeddings --ce_chunk 64"),
    Case("gqa", 1024, 2, "--fsdp2 --grad_accum 2 --no-activation_checkpointing"),
    Case("gqa", 512, 4, "--fsdp2 --replicas 2 --optim_in_backward --ce_chunk 64"),
    # the update of the head, and of the embedding, whose gradient FSDP2 still holds
    Case("gqa", 256, 2, "--fsdp2 --optim_in_backward --optim adamw8bit --ce_chunk 64"),
    Case("gqa", 256, 4, "--fsdp2 --replicas 2 --optim_in_backward --optim adamw8bit --ce_chunk 64"),
    Case("gqa", 512, 4, "--fsdp2 --replicas 4 --lora --grad_accum 2"),
    Case("deep", 512, 8, "--fsdp2 --offload params --optim adamw8bit --ce_chunk 64"),
    Case("gqa", 4096, 4, "--fsdp2 --qlora --sequence_parallel 4 --lora_dropout 0.1"),
    Case("mha", 4096, 2, "--lora --sequence_parallel 2 --no-activation_checkpointing"),
    Case("qwen3.5", 4096, 2, "--lora --sequence_parallel 2 --ce_chunk 64"),
    Case("qwen3.5", 2048, 2, "--lora --sequence_parallel 2 --no-activation_checkpointing --ce_chunk 64"),
    # gradients are in host memory before the others come, and the update's temporaries, too
    Case("tied", 512, 4, "--fsdp2 --offload params --ce_chunk 64"),
    Case("tied", 512, 4, "--fsdp2 --offload params --optim adamw8bit --ce_chunk 64"),
    Case("deep", 512, 4, "--fsdp2 --offload params --grad_accum 2 --ce_chunk 64"),
    # replicas exchange them on the device first
    Case("gqa", 512, 2, "--fsdp2 --offload params --replicas 2 --ce_chunk 64"),
    Case("gqa", 512, 4, "--fsdp2 --offload params --replicas 2 --grad_accum 2 --ce_chunk 64"),
    Case("qwen3.5-moe", 512, 2,
         "--fsdp2 --offload params --replicas 2 --tiled_mlp 256 --no-shard_embeddings --activation_checkpointing 1"),
    # large matrices at both ends: gathered together, freed together, and then reduced
    Case("words", 256, 4, "--fsdp2 --no-shard_embeddings --ce_chunk 64"),
    Case("words", 256, 1, "--fsdp2 --offload params --ce_chunk 64"),
    # of auto's choices: some blocks recomputed, all weights kept, attention kept
    Case("gqa", 1024, 1, "--activation_checkpointing 3"),
    Case("deep", 1024, 1, "--qlora --activation_checkpointing 4 --ce_chunk 64"),
    Case("gqa", 1024, 2, "--fsdp2 --lora --activation_checkpointing 2 --ce_chunk 64"),
    Case("gqa", 1024, 1, "--qlora --gpu_gib 99 --ce_chunk 64"),
    # 5 bits, which are unpacked beside the largest weight, or elsewhere
    Case("mha", 1024, 1, "--qlora --nf5 --ce_chunk 64"),
    Case("wide", 256, 1, "--qlora --nf5 down_proj --lora_targets q_proj --ce_chunk 64"),
    Case("mha", 1024, 2, "--fsdp2 --qlora --nf5 q_proj up_proj --activation_checkpointing 2 --ce_chunk 64"),
    Case("deep", 1024, 1, "--qlora --gpu_gib 1.17 --ce_chunk 64"),
    Case("deep", 1024, 1, "--lora --precision fp32 --gpu_gib 1.22 --ce_chunk 64"),
    # below the first adapter nothing is saved, and nothing runs in the backward
    Case("gqa", 1024, 1, "--lora --lora_targets down_proj --no-activation_checkpointing --ce_chunk 64"),
    Case("gqa", 1024, 2, "--fsdp2 --lora --lora_targets o_proj --no-activation_checkpointing --ce_chunk 64"),
    Case("qwen3.5", 1024, 1, "--lora --lora_targets q_proj v_proj --no-activation_checkpointing --ce_chunk 64"),
    # the forward of a Gated DeltaNet is the peak
    Case("qwen3.5", 1280, 1, "--lora --lora_targets k_proj --ce_chunk 64"),
    Case("moe", 1024, 1, "--qlora --gpu_gib 99 --ce_chunk 64"),
    Case("moe", 2048, 1, "--qlora --lora_targets q_proj k_proj v_proj o_proj --ce_chunk 64"),
    Case("moe", 2048, 1, "--qlora --lora_dropout 0.1 --ce_chunk 64"),
    Case("moe", 1024, 1, "--no-activation_checkpointing --precision bf16"),
    Case("moe", 1024, 4, "--fsdp2 --qlora --offload --tiled_mlp 256 --ce_chunk 64"),
    Case("muse", 1024, 1, ""),
    Case("muse", 1024, 1, "--lora --ce_chunk 64"),
    Case("muse", 1024, 1, "--qlora --no-activation_checkpointing --precision bf16 --ce_chunk 64"),
    Case("muse", 1024, 2, "--fsdp2 --qlora --lora_dropout 0.1 --activation_checkpointing 2 --ce_chunk 64"),
    Case("muse", 1024, 1, "--no-activation_checkpointing --tiled_mlp 256 --ce_chunk 64"),
    Case("muse", 1024, 1, "--qlora --gpu_gib 99 --ce_chunk 64"),
    Case("muse", 1024, 1, "--no-chunked_ce --lora"),
    Case("muse", 512, 1, "--precision fp32 --qlora"),
    Case("qwen3.5", 1024, 1, "--ce_chunk 64"),
    Case("qwen3.5", 1280, 1, "--qlora --ce_chunk 64"),  # more than one segment
    # all tokens at once, in blocks that are recomputed and in others
    Case("qwen3.5", 2560, 1, "--lora --activation_checkpointing all --gpu_gib 99 --ce_chunk 64"),
    Case("qwen3.5", 640, 2, "--lora --batch_size 4 --activation_checkpointing 2 --gpu_gib 99 --ce_chunk 64"),
    Case("qwen3.5", 1024, 1, "--lora --tiled_mlp 256 --ce_chunk 64"),
    Case("qwen3.5", 1024, 2, "--fsdp2 --lora --lora_dropout 0.1 --activation_checkpointing 2 --ce_chunk 64"),
    Case("qwen3.5-moe", 1024, 4, "--fsdp2 --qlora --offload --tiled_mlp 256 --ce_chunk 64"),
    # branches, embedding and logits times a number; queries that grow
    Case("granite", 1024, 1, "--ce_chunk 64"),
    Case("granite", 1024, 1, "--qlora --ce_chunk 64"),
    Case("granite", 1024, 1, "--lora --no-activation_checkpointing --ce_chunk 64"),
    Case("ministral3", 1024, 1, "--lora --ce_chunk 64"),
    Case("ministral3", 1024, 1, "--qlora --no-activation_checkpointing --ce_chunk 64"),
    # embedding and head are trained in full beside adapters, so every block has a gradient of its input
    Case("gqa", 512, 1, "--lora --train_embeddings --lora_targets down_proj --ce_chunk 64"),
    Case("tied", 512, 1, "--qlora --train_embeddings --optim adamw8bit --ce_chunk 64"),
    Case("gqa", 512, 2, "--fsdp2 --qlora --train_embeddings --grad_accum 2 --ce_chunk 64"),
    Case("tied", 512, 2, "--fsdp2 --lora --train_embeddings --grad_accum 2 --ce_chunk 64"),
    # the reference's forward comes first, with nothing saved
    Case("gqa", 1024, 1, "--dpo --lora --ce_chunk 64"),
    Case("qwen3.5", 1024, 2, "--fsdp2 --dpo --qlora --ce_chunk 64"),
    # the dearest, which .ci/run has: but for segments of 2,048, cases above have each of their parts
    *in_ci(
        Case("deep", 1024, 8, "--fsdp2 --qlora --offload --tiled_mlp 256 --ce_chunk 64"),
        Case("qwen3.5", 4096, 2, "--fsdp2 --qlora --offload --sequence_parallel 2 --tiled_mlp 256 --ce_chunk 64"),
        Case("deep", 256, 2, "--fsdp2 --qlora --gpu_gib 1.17"),
        Case("qwen3.5-moe", 1024, 1, "--qlora --gpu_gib 99 --ce_chunk 64"),
        # segments of 2,048
        Case("qwen3.5", 4096, 1, "--qlora --activation_checkpointing all --gpu_gib 1.37 --ce_chunk 64"),
        # a step of so many rows that one of them could have a gap
        Case("qwen3", 2048, 4, "--fsdp2 --offload params --qlora --precision bf16 --grad_accum 2 --tiled_mlp 256 "
             "--no-activation_checkpointing --no-reshard_after_forward --no-shard_embeddings --ce_chunk 64"),
    ),
]
SMALL_PAGE = 1 << 19  # bytes; those of a run are as large as all inputs of these blocks


# ---------------------------------------------------------------- a counted step: all that it touches of train.py


class RankOfMany(train.Ranks):
    """Rank 0 of `world`, whose others are not there."""

    def __init__(self, world, want_group, timeout):
        super().__init__(False, timeout)  # as without torchrun
        self.world = world
        if world > 1 or want_group:
            start_fake_group(world)


class Counted(NamedTuple):
    peak: int  # bytes, with what is meant to lie in host memory: both devices are the CPU
    offloaded: int  # bytes of these in pages of activations


def start_profiler():
    """A profiler of allocations alone. With an event for each operator it would see ten times as many, and the end of
    a profile takes as long as a step."""
    profiler = profile(profile_memory=True)
    with pytest.MonkeyPatch.context() as patch:
        enable = torch.autograd.profiler._enable_profiler
        no_operators = {torch._C._profiler.RecordScope.USER_SCOPE}
        patch.setattr(torch.autograd.profiler, "_enable_profiler", functools.partial(enable, scopes=no_operators))
        profiler.start()
    return profiler


def largest_total(profiler):
    """The peak of all allocations that a profile has seen."""
    events = profiler.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(n_bytes for _, n_bytes in sorted(changes)))


def count(argv, world, result):
    """Runs train.main as rank 0 of `world` up to the export, and writes a Counted to the file `result`."""
    load_weights_ = data.load_weights_
    offloaded = 0  # bytes

    class NotingParked(train.Parked):
        def __init__(self, tensor):
            nonlocal offloaded
            super().__init__(tensor)
            offloaded += sum(page.nbytes for page in self.pages)

    def load_and_add_hooks_(model, *rest, **flags):
        load_weights_(model, *rest, **flags)
        if "activations" in train.parse_args(argv).offload:  # which a run on a CPU leaves where they are
            model.activation_hooks = train.OffloadActivations(torch.device("cpu"), model.model.layers)

    def stop(*_):
        profiler.stop()
        Path(result).write_text(json.dumps(Counted(largest_total(profiler), offloaded)))
        os._exit(0)

    standins.install()
    del os.environ["RANK"]
    train.PAGE = SMALL_PAGE
    train.Parked = NotingParked
    train.Ranks = functools.partial(RankOfMany, world)
    data.load_weights_ = load_and_add_hooks_
    data.export = stop
    profiler = start_profiler()
    return train.launch(argv)


SENTENCE = "the file is read from disk and returned as a list of str self None def "
TOKENS_OF_SENTENCE = 17
N_ROWS = 16  # more than any step here has


def flags_of_data(folder, args):
    """Writes data that fill every row of a step. Behind a row with a gap attention's output is copied, if it does not
    come from FlashAttention, for which the stand-ins stand in bf16. In fp16 and float32 each row gets a gap."""
    path = folder / "rows.jsonl"
    if not args.dpo:
        n_sentences = args.seq_len // TOKENS_OF_SENTENCE + 1
        if args.precision in ("fp16", "fp32"):
            n_sentences -= 2  # shorter than a row by some tokens
        text = SENTENCE * n_sentences
        path.write_text(f"{json.dumps({'text': text})}\n" * N_ROWS)
        return ["--data", str(path), "--overflow", "truncate"]
    # a pair fills a row: both prompts together have less than 20 tokens
    n_sentences = (args.seq_len - 20) // 2 // TOKENS_OF_SENTENCE
    answers = {"chosen": SENTENCE * n_sentences, "rejected": SENTENCE.replace("disk", "list") * n_sentences}
    answers = {key: [{"role": "assistant", "content": answer}] for key, answer in answers.items()}
    pair = {"prompt": [{"role": "user", "content": "the file"}]} | answers
    path.write_text(f"{json.dumps(pair)}\n" * N_ROWS)
    return ["--data", str(path)]


# ---------------------------------------------------------------- the plan


class Planned(NamedTuple):
    moments: dict  # {moment: Counter of bytes}
    host: dict  # {kind: bytes}
    run: train.RunSpec

    def peak(self):
        return train.peak_of(self.moments)[1]


def config_of(preset):
    return lm.parse_config(data.PRESETS[preset])


def blocks_of(run):
    """train.BlockPolicy that a dry run chooses."""
    return train.choose_blocks(run, (run.args.gpu_gib or math.inf) * train.GIB)


def planned(argv, config, world):
    """Plans a command line."""
    args = train.parse_args([*map(str, argv), "--dry_run"])
    # as resolve_for_model() does
    args.precision = args.precision or "mixed"
    args.lr = args.lr or 1e-4
    if args.train_embeddings:
        args.embedding_lr = args.embedding_lr or 1e-5
    run = train.RunSpec(args, config, world, args.seq_len)
    moments, host = train.plan(run, blocks_of(run))
    return Planned(moments, host, run)


def folder_of(model, folder):
    """A folder for --random_init with the config of one of MODELS."""
    return random_model(folder, **GQA | MODELS[model] | {"max_position_embeddings": 4096})


def without_offloaded_params(run):
    """The same run, but parameters stay on the device."""
    others = [word for word in run.args.offload if word != "params"]
    return run._replace(args=argparse.Namespace(**vars(run.args) | {"offload": others}))


def planned_and_counted(model, world, flags, folder, run=count):
    """Bytes at the peak of a step with the config in the folder `model`, planned and counted. The run uses `folder`."""
    argv = ["--model", str(model), "--random_init", "--steps", "1", "--sample", "", "--precision", "mixed"]
    argv += ["--save_every", "0", "--out", str(folder / "out"), *flags.split()]
    argv += flags_of_data(folder, train.parse_args([*argv, "--dry_run"]))
    log = folder / "log"
    result = folder / "result"
    assert start_ranks(1, run, (argv, world, str(result)), [log]) == [0], log.read_text()
    counted = Counted(*json.loads(result.read_text()))

    config = lm.parse_config(data.read_json(model / "config.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "PAGE", SMALL_PAGE)
        _, host, of_flags = planned(argv, config, world)
        blocks = blocks_of(of_flags)
        # Both devices of this run are the CPU: what --offload params moves from one to the other counts on either.
        # The test below holds the plan with it against the plan without it.
        moments, _ = train.plan(without_offloaded_params(of_flags), blocks)
    assert host.get("activations", 0) == counted.offloaded
    totals = {moment: kinds.total() for moment, kinds in moments.items()}
    print({moment: round(total / 2**20, 1) for moment, total in totals.items()})
    print(f"counted {counted.peak / 2**20:.1f} MiB")
    return max(totals.values()), counted.peak - counted.offloaded


@pytest.mark.unperturbed
@pytest.mark.bf16  # oneDNN's kernels of some CPUs allocate copies
@pytest.mark.parametrize("model, n_tokens, world, flags", CASES)
def test_the_plan_is_what_a_step_holds(tmp_path, model, n_tokens, world, flags):
    folder = folder_of(model, tmp_path / "model")
    plan, counted = planned_and_counted(folder, world, f"--seq_len {n_tokens} {flags}", tmp_path)
    # what is not modelled: scratch of a kernel, a [T] tensor here and there, the order in which autograd frees
    assert plan == pytest.approx(counted, rel=0.02)


def count_with_flash(*args):
    train.LiveBytes.has_flash = True  # the stand-ins of the run
    count(*args)


@pytest.mark.unperturbed
@pytest.mark.bf16  # oneDNN's kernels of some CPUs allocate copies
def test_fp16_is_planned_with_flash_attention_on_cards_that_have_it(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "RunSpec", functools.partial(train.RunSpec, has_flash=True))
    flags = "--seq_len 1024 --precision fp16 --lora --no-activation_checkpointing --ce_chunk 64"
    plan, counted = planned_and_counted(folder_of("gqa", tmp_path / "model"), 1, flags, tmp_path, count_with_flash)
    assert plan == pytest.approx(counted, rel=0.02)


# ---- forks, each of which changes what a block saves and allocates: the plan runs their code


class TwoMLPs(lm.MLP):
    """A second gated MLP beside the first."""

    def __init__(self, D, width, n_experts=1):
        super().__init__(D, width, n_experts)
        self.second = torch.nn.ModuleDict({
            "gate_proj": lm.Linear(D, width, bias=False),
            "up_proj": lm.Linear(D, width, bias=False),
            "down_proj": lm.Linear(width, D, bias=False),
        })

    def start(self, h, row_stops=None):
        gate = torch.nn.functional.silu(self.second["gate_proj"](h))
        return super().start(h, row_stops), gate * self.second["up_proj"](h)

    def finish(self, started, row_stops=None):
        first, second = started
        return super().finish(first, row_stops) + self.second["down_proj"](second)


class SquaredGELU(lm.MLP):
    """gelu(gate)**2, which saves one more tensor than SiLU."""

    def start(self, h, row_stops=None):
        return torch.nn.functional.gelu(self.gate_proj(h, row_stops)).square() * self.up_proj(h, row_stops)


class NormedAttention(lm.Attention):
    """A norm on the output of attention."""

    def __init__(self, c, number):
        super().__init__(c, number)
        self.out_norm = lm.RMSNorm(c.q_size, c.rms_norm_eps)

    def forward(self, *args):
        return self.out_norm(super().forward(*args))


class ScaledBlock(lm.Block):
    """The MLP's branch is scaled in float32 before it is added."""

    def o_proj_and_mlp(self, x, mixed):
        x, started = self.start_mlp(x, mixed)
        branch = self.mlp.finish(started).float() * 0.5
        return x + branch.to(x.dtype)


FORKS = {
    "MLP": [TwoMLPs, SquaredGELU],
    "Attention": [NormedAttention],
    "Block": [ScaledBlock],
}


def count_fork(name, changed, *args):
    setattr(lm, name, changed)
    return count(*args)


@pytest.mark.unperturbed
@pytest.mark.bf16  # oneDNN's kernels of some CPUs allocate copies
@pytest.mark.parametrize("flags", [
    "--ce_chunk 64",
    "--lora --no-activation_checkpointing --ce_chunk 64",
    "--qlora --tiled_mlp 256 --ce_chunk 64",
])
@pytest.mark.parametrize("name, changed", [(name, changed) for name in FORKS for changed in FORKS[name]])
def test_a_forks_model_is_planned_without_an_edit(tmp_path, monkeypatch, name, changed, flags):
    monkeypatch.setattr(train, "TRACES", {})  # what is in it was made with another model
    monkeypatch.setattr(lm, name, changed)
    folder = folder_of("gqa", tmp_path / "model")
    run = functools.partial(count_fork, name, changed)
    plan, counted = planned_and_counted(folder, 1, f"--seq_len 1024 {flags}", tmp_path, run)
    assert plan == pytest.approx(counted, rel=0.01)


class ZLossHead(lm.LMHead):
    """Another loss, whose gradient autograd makes, and the cross-entropy in it as a metric."""

    def __init__(self, c):
        super().__init__(c)
        self.loss = self.z_loss

    def z_loss(self, logits_CV, targets_C):
        losses_C = torch.nn.functional.cross_entropy(logits_CV, targets_C, reduction="none")
        return losses_C + logits_CV.logsumexp(-1).square(), {"cross_entropy": losses_C}


@pytest.mark.unperturbed
@pytest.mark.bf16
@pytest.mark.parametrize("flags", ["--lora --ce_chunk 512", "--ce_chunk 512 --batch_size 2", "--lora --no-chunked_ce"])
def test_a_forks_loss_is_planned_without_an_edit(tmp_path, monkeypatch, flags):
    monkeypatch.setattr(train, "TRACES", {})  # what is in it was made with another loss
    monkeypatch.setattr(lm, "LMHead", ZLossHead)
    folder = folder_of("words", tmp_path / "model")  # the peak is in the head
    run = functools.partial(count_fork, "LMHead", ZLossHead)
    plan, counted = planned_and_counted(folder, 1, f"--seq_len 1024 {flags}", tmp_path, run)
    assert plan == pytest.approx(counted, rel=0.02)


def shard_in_pairs_(model, args, device, on_host=None):
    """A fork's shard_(): two blocks are one unit of FSDP2, and embedding and head belong to the root."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=model.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
    layers = list(model.model.layers)
    for i in range(0, len(layers), 2):
        shard(layers[i : i + 2], reshard_after_forward=i + 2 < len(layers))  # the last pair stays gathered
    shard(model, reshard_after_forward=False)


def count_pairs(*args):
    train.shard_ = shard_in_pairs_
    return count(*args)


@pytest.mark.unperturbed
@pytest.mark.bf16
@pytest.mark.parametrize("flags", ["--ce_chunk 64", "--lora --activation_checkpointing 5 --ce_chunk 64"])
def test_a_forks_sharding_is_planned_without_an_edit(tmp_path, monkeypatch, flags):
    monkeypatch.setattr(train, "TRACES", {})  # what is in it was made with another sharding
    monkeypatch.setattr(train, "shard_", shard_in_pairs_)
    folder = folder_of("deep", tmp_path / "model")
    plan, counted = planned_and_counted(folder, 4, f"--seq_len 512 --fsdp2 {flags}", tmp_path, count_pairs)
    assert plan == pytest.approx(counted, rel=0.02)


def test_auto_counts_all_blocks_of_a_fork_whose_few_blocks_do_not_tell(monkeypatch):
    monkeypatch.setattr(train, "TRACES", {})
    monkeypatch.setattr(train, "shard_", shard_in_pairs_)
    config = lm.parse_config(data.PRESETS["qwen3-0.6b"] | {"num_hidden_layers": 6})
    run = planned(["--model", "qwen3-0.6b", "--fsdp2", "--seq_len", 1024], config, 4).run
    choices = [train.policy_of(6, **choice) for choice in train.choices_for(run)]
    needs = [max(train.trace(run, choice).peaks.values()) + train.OVERHEAD for choice in choices]
    for i in (0, 6, len(choices) - 1):
        assert train.choose_blocks(run, needs[i] / 0.9 + 1) == choices[needs.index(needs[i])]


def test_a_run_on_a_cpu_plans_nothing(monkeypatch):
    monkeypatch.setattr(train, "TRACES", {})
    args = train.parse_args(["--model", "qwen3.5-9b", "--lora", "--fsdp2", "--dry_run"])
    run = train.RunSpec(args, config_of("qwen3.5-9b"), 1, 1024)
    ranks = argparse.Namespace(device=torch.device("cpu"), gather=lambda value: [value])
    train.choose_blocks(run, train.limit_gpu(None, ranks))
    assert not train.TRACES


def test_fsdp2_pins_a_power_of_two_of_bytes_for_each_weight():
    config = config_of("llama-3.1-70b")
    argv = ["--model", "llama-3.1-70b", "--qlora", "--seq_len", "1024", "--fsdp2", "--offload", "params"]
    plan = planned([*argv, "--resident_blocks", "0"], config, 4)
    model = lm.on_meta(config, plan.run.args)
    shards = [p.nbytes // 4 for p in model.parameters() if p.dtype is torch.uint8]  # all rows divide by 4 ranks
    pinned = [2 ** math.ceil(math.log2(n_bytes)) for n_bytes in shards]  # 28 MiB of gate_proj: 32
    assert sum(shards) < plan.host["quantized weights"] == sum(pinned)


SOME = range(1, 32)  # blocks of 32


@pytest.mark.parametrize("flag, gib, n_recomputed, n_kept", [
    ("--qlora", 10, [32], [0]),
    ("--qlora", 40, SOME, [0]),
    ("--qlora", 60, [0], SOME),
    ("--qlora", 400, [0], [32]),
    ("--lora", 400, [0], [0]),
])
def test_auto_recomputes_little_keeps_many_weights_and_leaves_a_tenth_of_the_memory(flag, gib, n_recomputed, n_kept):
    config = config_of("llama-3.1-8b")
    argv = ["--model", "llama-3.1-8b", flag, "--seq_len", 8192, "--gpu_gib", gib]
    plan = planned(argv, config, 1)
    blocks = blocks_of(plan.run)
    n = blocks.count("recomputed")
    assert n in n_recomputed
    assert blocks.count("weights") in n_kept
    room = 0.9 * gib * train.GIB
    if gib > 10:  # less does not help any more
        assert plan.peak() + train.OVERHEAD <= room
    if SOME in (n_recomputed, n_kept):  # one block more would not have fitted
        more = train.policy_of(32, max(0, n - 1), blocks.count("weights") + 1, blocks.count("attention"))
        assert train.planned_bytes(plan.run, more) > room


@pytest.mark.parametrize("precision", ["mixed", "fp32"])  # with FlashAttention and without
def test_pairs_in_rows_of_an_odd_length_are_planned(precision):
    """Without --packing the longest pair decides, and its length may be any number."""
    config = config_of("qwen3-0.6b")
    peaks = []
    for length in (510, 511, 512):
        flags = ["--dpo", "--lora", "--no-packing", "--seq_len", length, "--batch_size", 3, "--precision", precision]
        peaks.append(planned(flags, config, 1).peak())
    assert peaks[0] < peaks[1] < peaks[2]


def test_few_rows_for_many_experts_are_planned_without_gradients():
    """The reference of --dpo, in tiles with fewer tokens than experts: a run leaves those out that have none."""
    config = lm.parse_config(data.PRESETS["qwen3-30b-a3b"] | {"num_hidden_layers": 2})
    flags = ["--model", "qwen3-30b-a3b", "--qlora", "--dpo", "--seq_len", 256]
    in_tiles = planned([*flags, "--tiled_mlp", 40], config, 1).peak()
    assert in_tiles == pytest.approx(planned(flags, config, 1).peak(), rel=0.05)  # most of it are weights


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("model, flag", [("qwen3-32b", "--lora"), ("llama-3.1-70b", "--qlora")])
def test_auto_keeps_as_many_blocks_on_the_gpu_as_fit(model, flag, world):
    config = config_of(model)
    argv = ["--model", model, flag, "--fsdp2", "--offload", "--seq_len", 4096, "--gpu_gib", 24]
    run = planned(argv, config, world).run
    blocks = blocks_of(run)
    n_layers = config.num_hidden_layers
    n = blocks.count("resident")
    assert 0 < n < n_layers
    room = 0.9 * 24 * train.GIB
    one_more = train.policy_of(n_layers, n_layers, n_resident=n + 1)
    assert train.planned_bytes(run, blocks) <= room
    assert train.planned_bytes(run, one_more) > room


class Lion(torch.optim.Optimizer):
    """A fork's optimizer (arXiv:2302.06675): one moment, and a step that makes one tensor as large as a weight."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self):
        for p, state in self.state.items():
            update = state["exp_avg"].lerp(p.grad, 0.1).sign_()
            p.sub_(update, alpha=self.param_groups[0]["lr"])
            state["exp_avg"].lerp_(p.grad, 0.01)
            del update


def test_a_forks_optimizer_is_planned_without_an_edit(monkeypatch):
    monkeypatch.setattr(train, "TRACES", {})  # what is in it was made with another optimizer
    monkeypatch.setattr(train, "make_optimizer", lambda named, args, found_inf: Lion(
        train.groups_of(named, args.weight_decay, args.embedding_lr), args.lr))
    config = config_of("llama-3.2-1b")
    (step,) = (kinds for moment, kinds in planned(["--model", "llama-3.2-1b"], config, 1).moments.items()
               if moment == "update")
    assert step["optimizer"] == step["weights"]
    assert step["workspace"] == 4 * config.vocab_size * config.hidden_size  # float32, of the largest weight


@pytest.mark.parametrize("preset, flags", [
    ("llama-3.2-1b", "--qlora"),
    ("qwen3.5-0.8b", "--lora"),
    ("qwen3-0.6b", ""),
    *in_ci(("muse-glimmer-30b", "--qlora"), ("qwen3-30b-a3b", "--qlora --fsdp2")),
])
def test_each_choice_of_auto_needs_at_most_the_memory_of_the_one_before(preset, flags):
    config = lm.parse_config(data.PRESETS[preset] | {"num_hidden_layers": 3})  # each block is three choices more
    run = planned(["--model", preset, "--seq_len", 4096, *flags.split()], config, 2).run
    choices = [train.policy_of(3, **choice) for choice in train.choices_for(run)]
    peaks = [train.planned_bytes(run, choice) for choice in choices]
    # Or bisecting could miss the fastest that fits; what it finds fits in any case. Where all blocks are recomputed,
    # Muse's last choices need 0.8 % more than the one before: the peak is then in a block, and no longer in its head.
    assert all(after <= 1.009 * before for before, after in itertools.pairwise(peaks))


# ---------------------------------------------------------------- the search for what fits


class Job(NamedTuple):
    model: str
    gib: float  # a GPU's, without what CUDA takes
    world: int
    flags: str


NOTHING_ON = "--no-chunked_ce --no-activation_checkpointing"
JOBS = [
    Job("llama-3.1-8b", 23, 2, ""),
    Job("llama-3.1-70b", 79, 8, "--fsdp2 --seq_len 8192"),
    Job("qwen2.5-7b", 23, 1, f"--seq_len 8192 --lora --batch_size 4 --grad_accum 3 {NOTHING_ON}"),
    Job("llama-3.1-8b", 79, 8, "--fsdp2 --seq_len 1000000 --optim_in_backward"),
    Job("qwen3-32b", 23, 4, "--fsdp2 --offload params --seq_len 32768 --batch_size 2 --no-reshard_after_forward"),
    Job("llama-3.1-8b", 23, 6,
        "--fsdp2 --replicas 3 --tiled_mlp 512 --ce_chunk 64 --seq_len 65536 --lora_rank 8 --lora"),
    # --dpo refuses --sequence_parallel
    Job("llama-3.1-8b", 23, 2, "--fsdp2 --dpo --lora --seq_len 32768 --batch_size 2"),
]


def options_for(job, gib):
    """What the ladder adds to the flags of a job on a GPU with so many GiB."""
    run = run_of(job)
    options, need = train.climb(run, gib * train.GIB + train.OVERHEAD)
    assert need == train.need_with(run, options)
    return options


def run_of(job):
    return planned(["--model", job.model, *job.flags.split()], config_of(job.model), job.world).run


def rows_of_a_step(args):
    return args.batch_size * args.grad_accum / args.sequence_parallel


def named(jobs, **marks):
    return [pytest.param(job, id="-".join(map(str, job)), **marks) for job in jobs]


# each takes up to half a minute: those that most users may meet, and in .ci/run the others
OFTEN = [JOBS[0], JOBS[2]]
SELDOM = [JOBS[1], JOBS[3], JOBS[4], JOBS[5], JOBS[6]]


@pytest.mark.parametrize("job", [*named(OFTEN), *named(SELDOM, marks=pytest.mark.ci)])
def test_what_the_search_adds_fits_and_is_needed_and_turns_no_flag_the_wrong_way(job):
    room = job.gib * train.GIB + train.OVERHEAD
    options = options_for(job, job.gib)
    run = run_of(job)
    assert options
    need = train.need_with(run, options)
    assert need.gpu <= room < train.need_with(run, []).gpu
    for option in options:
        without = train.need_with(run, [other for other in options if other != option])
        assert without.gpu > room or without.host > 1.01 * need.host, option
    check_no_flag_is_turned_the_wrong_way(run, options)


@pytest.mark.parametrize("job", named(JOBS))
def test_all_that_can_be_used_together_turns_no_flag_the_wrong_way(job):
    run = run_of(job)
    for ladder in (train.ladder_of(run), [option for option in train.ladder_of(run) if "--grad_accum" not in option]):
        options = train.usable(run, ladder)
        assert options
        check_no_flag_is_turned_the_wrong_way(run, options)


def check_no_flag_is_turned_the_wrong_way(run, options):
    changed = train.with_options(run, options)
    before = run.args
    after = changed.args
    assert set(before.offload) <= set(after.offload)
    for flag in ("fused_adamw", "chunked_ce", "reshard_after_forward", "shard_embeddings", "fsdp2", "qlora",
                 "optim_in_backward", "stochastic_rounding"):
        assert getattr(after, flag) >= getattr(before, flag), flag
    n_before, n_after = (train.blocks_as_asked(each).count("recomputed") for each in (run, changed))
    assert n_after >= n_before
    assert after.replicas <= before.replicas
    assert after.batch_size <= before.batch_size
    if before.tiled_mlp:
        assert after.tiled_mlp == before.tiled_mlp
    if before.ce_chunk:
        assert after.ce_chunk <= before.ce_chunk
    if not after.optim_in_backward:
        assert rows_of_a_step(after) == rows_of_a_step(before)


def test_no_flag_is_taken_out_that_lets_host_memory_grow(monkeypatch):
    """Bytes of four options, of which the last two suffice on the GPU, and the second one halves host memory."""
    saves = {"a": 1, "b": 2, "c": 30, "d": 60}

    def need_with(_, options):
        on_host = (200 if "d" in options else 0) / (2 if "b" in options else 1)
        return train.Need(100 - sum(saves[option] for option in options), on_host)

    monkeypatch.setattr(train, "ladder_of", lambda run: list(saves))
    monkeypatch.setattr(train, "usable", lambda run, options: options)
    monkeypatch.setattr(train, "need_with", need_with)
    assert train.climb(None, 11) == (["b", "c", "d"], train.Need(8, 100))
    # nothing fits: what would lower the peak by less than 1 % is left out
    saves["a"] = 0
    assert train.climb(None, 5) == (["b", "c", "d"], train.Need(8, 100))


def test_flags_that_an_advice_replaces_are_said():
    options = ["--batch_size 1 --grad_accum 4", "--optim adamw8bit", "--chunked_ce --ce_chunk 256", "--offload params"]
    argv = "--model x --batch_size 4 --no-chunked_ce --optim=adamw --grad_accum 4 --offload activations --lora".split()
    assert train.flags_replaced(argv, options) == ["--batch_size 4", "--optim adamw", "--no-chunked_ce"]
    assert train.flags_replaced(["--lora"], options) == []


def test_adapters_on_one_card_are_told_of_four_bits_before_weights_in_host_memory():
    args = train.parse_args(["--model", "qwen3-0.6b", "--lora", "--batch_size", "4", "--dry_run"])
    args.precision = "mixed"
    run = train.RunSpec(args, config_of("qwen3-0.6b"), 1, 4096)
    ladder = train.ladder_of(run)
    assert ladder.index("--qlora") < ladder.index("--fsdp2 --offload params")
    # the same step, and nothing goes over the bus
    by_row = ladder.index("--batch_size 1 --grad_accum 4")
    assert by_row < min(i for i, option in enumerate(ladder) if "offload" in option or "tiled" in option)
    short = train.ladder_of(run._replace(length=1024))
    assert short.index("--batch_size 1 --grad_accum 4") > short.index("--optim adamw8bit")
    of_ranks = train.ladder_of(run._replace(world=2))
    assert of_ranks.index("--qlora") > of_ranks.index("--fsdp2 --offload params")


def test_a_plan_that_hardly_fits_says_so(monkeypatch):
    run = planned(["--model", "qwen3-0.6b", "--lora", "--seq_len", 256, "--activation_checkpointing", "all"],
                  lm.parse_config(data.PRESETS["qwen3-0.6b"] | {"num_hidden_layers": 2}), 1).run
    policy = train.blocks_as_asked(run)
    need = train.planned_bytes(run, policy)
    first = [next(train.describe_plan(run, policy, room)) for room in (need * 1.1, need * 1.01)]
    assert first[0].startswith("fits: needs ")
    assert first[1].startswith("fits, but only just: needs ")
    monkeypatch.setattr(train, "OVERHEAD", 100 * train.GIB)  # numbers of a large card
    lines = next(train.describe_plan(run, policy, 101 * train.GIB)).splitlines()
    assert lines[0].startswith("fits, but only just: needs 100.")
    assert max(map(len, lines)) <= 80


def test_short_documents_need_more_in_the_backward_of_flash_attention():
    config = lm.parse_config(data.PRESETS["qwen3-0.6b"] | {"num_hidden_layers": 1})
    run = planned(["--model", "qwen3-0.6b", "--lora", "--seq_len", 2048, "--ce_chunk", 64], config, 1).run
    policy = train.blocks_as_asked(run)
    # so many that attention is the peak of a block
    some, many = (train.trace(run._replace(documents=n), policy) for n in (100, 200))
    block = next(phase for phase in some.peaks if phase[1:] == ("backward", "block", 0))
    more = many.peaks[block] - some.peaks[block]
    # 128 tokens for each document, of float32 dq and of the sums
    assert more == pytest.approx(100 * 128 * 4 * (config.q_size + config.num_attention_heads), rel=0.02)


def test_offloaded_activations_of_one_micro_batch_are_in_host_memory():
    # few of its 28 blocks are traced, and the end of a backward frees what all of them had there
    config = config_of("qwen3-0.6b")
    argv = ["--model", "qwen3-0.6b", "--lora", "--seq_len", 4096, "--offload", "activations", "--grad_accum"]
    one, two = (planned([*argv, n], config, 1).host["activations"] for n in (1, 2))
    assert one == two


def test_host_memory_is_that_of_all_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr(train, "allowed_memory", lambda: 60 * train.GIB)
    run = train.RunSpec(None, None, 16, 1024)
    text = train.describe_host(run, 8 * train.GIB)
    assert text == "64.00 GiB of host memory for the 8 ranks of a machine (this machine has 60)"
    assert train.describe_host(run._replace(world=1), 2 * train.GIB) == "2.00 GiB of host memory"
    monkeypatch.setattr(train, "allowed_memory", lambda: 600 * train.GIB)
    assert train.describe_host(run, 9 * train.GIB).endswith("(most machines have less)")


def test_flags_are_added_to_settings_that_came_with_an_adapter():
    args = train.parse_args(["--model", "qwen3-4b", "--dry_run", "--adapter", "folder"])
    # as resolve_for_model() does
    vars(args).update(lora_rank=8, lora_alpha=4, lora_dropout=0.1, lora_targets=["q_proj"])
    config = config_of("qwen3-4b")
    changed = train.with_options(train.RunSpec(args, config, 1, 1024), ["--optim adamw8bit", "--qlora"])
    assert vars(changed.args) == vars(args) | {"adapter": None, "optim": "adamw8bit", "qlora": True}


def test_dry_run_is_at_most_80_columns_wide_and_its_advice_is_typed_as_it_stands(capsys):
    argv = ["--model", "llama-3.1-405b", "--world", "64", "--fsdp2", "--dry_run", "--gpu", "A100 80GB"]
    assert train.launch(argv) == train.OUT_OF_MEMORY
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("does not fit: needs ")
    assert re.fullmatch(r"  All weights .* need [\d.]+ GiB \(--lora\) or [\d.]+ \(--qlora\)", lines[2])
    assert "a step takes" not in lines[-1]
    advice = re.split(r",\s+with\n", said)[-1].replace("\\\n", "").split()
    assert train.launch([*argv, *advice]) == 0
    assert "\nfits: needs " in capsys.readouterr().out
