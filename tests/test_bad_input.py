"""What is wrong with flags, models, adapters and data is said before anything is written: one message names the thing
and the way out. A case is what to spoil or which flags to give, and a list of words that the message has to have."""

import argparse
import functools
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import huggingface_hub
import pytest
import torch
from conftest import HERE, later_counts
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch.distributed import HashStore

import model as lm
import data
import train

NAN = float("nan")
LONG = 300_000  # characters of which a message should quote a few


def assert_says(message, words):
    assert isinstance(words, list)  # a text would be compared by its letters
    missing = [word for word in words if word not in message]
    assert not missing, message


# ---------------------------------------------------------------- flags

FLAGS = {  # flags: words of the message
    "--nonsense 1": ["--nonsense"],
    "--qlor": ["mean --qlora?"],
    "--learning_rate 1": ["mean --lr?"],
    "--seq-len 8": ["_len?"],
    "--no_qlora": ["mean --qlora?"],  # it has no other form
    "--no_compile": ["mean --no-compile?"],
    "--no_packing": ["mean --no-packing?"],
    "tiny": ["tiny: no such flag"],
    "--local_rank=0": ["--local_rank=0: no such flag", "torchrun --nproc_per_node N train.py"],
    "--local-rank 0": ["--local-rank: no such flag", "torchrun"],
    "--nproc_per_node 2": ["torchrun --nproc_per_node N train.py"],

    # values
    "--activation_checkpointing some": ["--activation_checkpointing", "some", "all or auto"],
    "--batch_size -1": ["--batch_size", "-1", "above 0"],
    "--columns question": ["--columns", "question: expected COLUMN=KEY", "instruction", "output"],
    "--columns question=query": ["--columns", "question=query: expected COLUMN=KEY", "instruction"],
    "--columns a=text a=input": ["--columns", "a, a: a column can have one key"],
    "--data=--": ["--data=--: expected a value"],
    "--epochs inf": ["--epochs", "inf", "above 0"],
    "--gpu_gib 24GB": ["_gib", "24GB", "a number"],
    "--lr nan": ["--lr", "nan", "0 or a number above"],
    "--model --": ["--model", "expected one argument"],
    "--model -- tiny": ["--model"],
    "--model=": ["--model: expected a value, got an empty string"],
    "--model=--": ["--model=--: expected a value"],
    "--offload disk": ["--offload", "disk", "activations"],
    "--precision fp8": ["--precision", "fp8", "bf16", "fp16"],
    "--resume=--": ["--resume=--: expected a value"],
    "--seed -1": ["--seed", "above 0"],
    "--seq_len 99999999999999999999": ["--seq_len", "below"],
    "--steps 0": ["--steps", "0", "above 0"],
    "--steps 1.5": ["--steps", "1.5", "a whole number"],
    "--steps=--": ["--steps=--: expected a value"],
    "--timeout 1e10": ["--timeout", "1e10: expected a number above 0, below 1e+08"],

    # names that are only a little alike, values of switches, files of settings
    "--hub_token x": ["--hub_token: no such flag; --help_all"],
    "--revision main": ["--revision: no such flag; --help_all"],
    "--version": ["--version: no such flag; --help_all"],
    "--betas 0.9": ["AdamW has betas of 0.9 and 0.999"],
    "--bf16 true": ["bf16 compute is the default: leave it out"],
    "--fp16": ["the default on a GPU without bf16"],
    "--gpus 2": ["CUDA_VISIBLE_DEVICES", "--nproc_per_node"],
    "--qlora --no-lora": ["full fine-tuning is the default: leave out --lora, --qlora"],
    "--num_epochs 3": ["mean --epochs?"],
    "--r 8": ["mean --lora_rank?"],
    "--early_stopping_patience 3": ["mean --patience?", "the best checkpoint is kept", "--export makes a model of it"],
    "--beta1 0.9": ["--beta1: no such flag; --help_all"],
    "--cutoff_len 8": ["mean --seq_len?"],
    "--finetuning_type lora": ["mean --lora?"],
    "--qlora true": ["--qlora true: a switch takes no value: --qlora means on, no flag at all means off"],
    "--lora=False": ["--lora False: a switch takes no value"],
    "--fsdp2 full_shard": ["--fsdp2 full_shard: a switch takes no value"],
    "--compile off": ["--compile off: a switch takes no value", "--no-compile means off"],
    "--packing false": ["--packing means on, --no-packing means off"],
    "--compile false": ["--compile means on, --no-compile means off"],
    "config.yaml": ["config.yaml: no such flag; there are no config files"],

    "--lora config.yaml": ["config.yaml: no such flag; there are no config files"],
    "--model tiny lr=5e-5": ["lr=5e-5: no such flag; did you mean --lr?"],
    "--optimizer.lr 5e-5": ["--optimizer.lr: no such flag; did you mean --lr?"],
    "--cpu": ["CUDA_VISIBLE_DEVICES", "-1 none"],

    # a word that no flag takes belongs to the value before it
    "--gpu RTX 4060 Ti 16GB": ["a value with blanks needs quotes: --gpu 'RTX 4060 Ti 16GB'"],
    "--lora --out my run": ["a value with blanks needs quotes: --out 'my run'"],
    "--resume my run --lora": ["a value with blanks needs quotes: --resume 'my run'"],
    "--sample=what is it": ["a value with blanks needs quotes: --sample 'what is it'"],
    "--gpu_gib 16 GB": ["--gpu_gib 16 GB: expected one value, got 2"],
    "--lr = 5e-5": ["--lr = 5e-5: leave out the blanks around the ="],
    "--data=a.jsonl b.jsonl": ["--data=a.jsonl b.jsonl: after = stands one value: give --data a.jsonl b.jsonl"],
    "--lora \N{EN DASH}lr 1": ["\N{EN DASH}lr: this is another character than the - of a keyboard"],
    "--model tiny \N{EM DASH}steps 5": ["\N{EM DASH}steps: this is another character"],

    # twice
    "--lr 1 --lr=2": ["--lr: given twice, 1.0 and 2.0: leave one"],
    "--activation_checkpointing 2 --activation_checkpointing": ["--activation_checkpointing: given twice, 2 and all"],
    "--columns a=text --columns a=input": ["--columns", "a, a: a column can have one key"],

    # addresses are no paths
    "--out s3://bucket/run": ["--out", "s3://bucket/run: a URL"],
    "--data https://example.org/a/b.jsonl": ["--data", "a URL"],
    "--out bucket:runs/a": ["--out: bucket:runs/a: a URL, or on another machine: give a path on this one"],
    "--out C:\\runs\\a": ["--out", "a URL, or on another machine"],
    "--out None": ["--out: None: expected a path, ./None if that is meant"],
    "--resume null": ["--resume: null: expected a path"],
    "--model https://huggingface.co/a/b/tree/abc": ["--model", "a URL"],

    # a share of the data, which is held out
    "--eval_data 0": ["--eval_data 0: expected files, or one number alone: a share", "0.02", "2 or more"],
    "--eval_data 0.0": ["--eval_data 0.0: expected"],
    "--eval_data 1": ["--eval_data 1: expected"],
    "--eval_data 1.0": ["--eval_data 1.0: expected"],
    "--eval_data 2.5": ["--eval_data 2.5: expected"],
    "--eval_data -0.1": ["--eval_data -0.1: expected"],
    "--eval_data nan": ["--eval_data nan: expected"],
    "--eval_data inf": ["--eval_data inf: expected"],
    "--eval_data 0.1 a.jsonl": ["--eval_data 0.1 a.jsonl: expected files, or one number alone"],

    # template variables
    "--template_args enable_thinking": ['--template_args "enable_thinking"', "and a value", "enable_thinking=false"],
    "--template_args =1": ['--template_args "=1"', "expected a name"],
    "--template_args a-b=1": ['--template_args "a-b=1"', "expected a name"],
    "--template_args messages=[]": ['--template_args "messages=[]"', "a template gets messages from each conversation"],
    "--template_args tools=[]": ["a template gets tools from"],
    "--template_args add_generation_prompt=true": ["a template gets add_generation_prompt from"],
    "--template_args bos_token=x": ["a template gets bos_token from", "tokenizer"],
    "--template_args enable_thinking=False": ["enable_thinking=False", "JSON: true, false or null"],
    "--template_args enable_thinking=off": ["enable_thinking=off", "JSON: true, false or null"],
    "--template_args thinking=false,budget=2": ["thinking=false,budget=2", "blanks separate"],
    "--template_args a=1 a=2": ['"a=2"', "a is given twice"],
    "--chat_template_kwargs x": ["mean --template_args?"],
    "--train_on last": ["--train_on: invalid choice: 'last'", "targets", "whole", "all"],
    "--packing --no-packing": ["--packing and --no-packing: leave one out"],
    "--val_set_size 0.1": ["mean --eval_data?"],

    # flags that need others, or exclude them
    "--model qwen3-0.6b": ["qwen3-0.6b", "--random_init", "Qwen/Qwen3-0.6B"],
    "--eval_every 5": ["--eval_every needs --eval_data"],
    "--patience 5": ["--patience needs --eval_data"],
    "--patience 0 --eval_data 0.1": ["--patience: 0: expected a whole number above 0"],
    "--data a.jsonl --patience 5 --eval_data 0.1 --save_every 0": ["--patience needs --save_every above 0"],
    "--system hi --data a.jsonl": ["--system needs --chat or --sample"],
    "--steps 5 --epochs 1": ["--steps and --epochs: leave one out"],
    "--replicas 1": ["--replicas needs --fsdp2"],  # typed, although it is the default
    "--min_lr 0 --schedule constant": ["--min_lr needs --schedule cosine or linear"],
    "--ce_chunk 64 --no-chunked_ce": ["--ce_chunk needs --chunked_ce"],
    "--no-fused_adamw --optim adamw8bit": ["--no-fused_adamw needs --optim adamw"],
    "--temperature 1 --data a.jsonl": ["--temperature needs --chat or --sample"],
    "--max_new_tokens 9 --sample=": ["--max_new_tokens needs --chat or --sample"],
    "--embedding_lr 1": ["--embedding_lr needs --train_embeddings"],
    "--out chats.jsonl": ["--out chats.jsonl: a file", "--data reads files"],

    # a mode reads what it reads
    "--export run/checkpoint-2 --merge --steps 9": ["--export does not read --steps, --merge: leave"],
    "--export run/checkpoint-2 --lora_rank 8": ["--export does not read --lora_rank"],
    "--merge --model tiny --adapter a --epochs 3": ["--merge without --data only merges, and does not read --epochs"],
    "--chat --no-compile": ["--chat does not read --no-compile"],
    "--chat --dry_run": ["--chat and --dry_run: leave one out"],
    "--dry_run --inspect 2": ["--dry_run and --inspect: leave one out"],
    "--world 4": ["--world needs --dry_run"],
    "--chat --fsdp2": ["--chat does not read --fsdp2: leave this out"],
    "--stochastic_rounding": ["needs --precision bf16"],
    "--stochastic_rounding --precision fp16": ["needs --precision bf16"],
    "--optim_in_backward --precision fp16": ["--optim_in_backward", "skipped as a whole", "--precision fp32"],
    "--optim_in_backward --grad_accum 2": ["needs --grad_accum 1"],
    "--optim_in_backward --clip 1": ["no --clip"],
    "--offload --no-activation_checkpointing": ["--offload activations", "--activation_checkpointing"],
    "--offload --activation_checkpointing 2": ["--offload activations", "--activation_checkpointing all"],
    "--offload params": ["--offload params needs --fsdp2"],
    "--fsdp2 --offload params --resident_blocks 1": ["--resident_blocks", "needs --offload params and --lora"],
    "--lora --resident_blocks all": ["--resident_blocks", "needs --offload params and --lora"],
    "--replicas 2": ["--replicas needs --fsdp2"],
    "--no-reshard_after_forward": ["--no-reshard_after_forward needs --fsdp2"],
    "--no-shard_embeddings": ["--no-shard_embeddings needs --fsdp2"],

    # adapters
    "--lora_rank 8": ["--lora_rank needs --lora"],
    "--lora_alpha 8": ["--lora_alpha needs --lora"],
    "--rslora": ["--rslora needs --lora"],
    "--lora_dropout 0.1": ["--lora_dropout needs --lora"],
    "--lora_targets q_proj": ["--lora_targets needs --lora"],
    "--merge": ["--merge: tiny has no adapter to merge", "as --model", "--lora"],
    "--lora --lora_dropout 1": ["--lora_dropout", "below 1"],
    "--lora --lora_targets lm_head": ["--lora_targets", "lm_head", "q_proj"],
    "--lora --lora_targets q_proj,x_proj k_proj": ["--lora_targets x_proj: expected all-linear or some of q_proj, k_"],
    "--lora --model tiny --adapter a --lora_rank 8": ["--lora_rank", "--adapter", "leave"],
    "--lora --model tiny --adapter a --lora_alpha 8": ["--lora_alpha", "--adapter", "leave"],
    "--model tiny --adapter a --rslora": ["--rslora", "--adapter", "leave"],
    "--lora --model tiny --adapter a --lora_targets q_proj": ["--lora_targets", "--adapter", "leave"],
    "--lora --model tiny --adapter a --random_init": ["--random_init", "--adapter", "leave"],

    # DPO
    "--dpo": ["needs --lora"],
    "--lora --beta 1": ["--beta needs --dpo"],
    "--dpo --model tiny --adapter X": ["--merge --model tiny --adapter X", "as --model"],
    "--dpo --lora --overflow split": ["--overflow", "leave out"],
    "--dpo --lora --train_on all": ["--train_on", "leave out"],
    "--dpo --lora --sequence_parallel 2": ["--sequence_parallel", "leave out"],
}


@pytest.mark.parametrize("flags", FLAGS)
def test_bad_flags_end_with_the_flag_to_change(flags, capsys):
    assert train.launch(flags.split()) == 2
    message = capsys.readouterr().err
    assert message.startswith("train.py: error: ")
    assert message.count("\n") == 1
    assert_says(message, FLAGS[flags])


SWITCHES = {flag for flag, action in train.make_parser()._option_string_actions.items() if action.nargs == 0}
WITH_VALUES = [flag for flag in train.make_parser()._option_string_actions if flag not in SWITCHES]


@pytest.mark.parametrize("words", [["{}="], ["{}", ""], ["{}", "  "]], ids=str)
def test_an_empty_value_of_any_flag_is_refused_by_name(words):
    """A job script gives one whose variable is not set. Only --sample has a use for it."""
    for flag in WITH_VALUES:
        argv = [word.format(flag) for word in words]
        if flag == "--sample":
            assert train.parse_args(argv).sample.strip() == ""
        else:
            with pytest.raises(argparse.ArgumentError, match=f"{flag}: expected a value, got an empty string"):
                train.parse_args(argv)
    with pytest.raises(argparse.ArgumentError, match="--data: expected a value"):
        train.parse_args(["--lora", "--data", "a.jsonl", *words[1:], ""])


VALUES = {  # of flags that take neither a number nor any word
    "precision": "bf16", "overflow": "drop", "train_on": "all", "offload": "activations", "optim": "adamw8bit",
    "schedule": "linear", "columns": "a=text", "eval_data": "b.jsonl", "template_args": "a=1", "nf5": "q_proj",
    "lora_targets": "q_proj", "gpu": "3090", "lora_dropout": "0.1",
}
MODE = {"export": "--export run/checkpoint-2", "chat": "--chat", "dry_run": "--dry_run", "inspect": "--inspect 2",
        "merge": "--merge --model tiny --adapter a"}


def test_the_modes_and_needs_of_the_table_are_of_flags():
    flags = vars(train.parse_args([])).keys()
    assert train.MODES.keys() == MODE.keys() <= flags
    for read in train.MODES.values():
        assert (read or set()) <= flags
    needs = {action.needs for action in train.flags_with("needs")}
    assert needs <= flags | train.NEEDS.keys()
    assert train.NEEDS.keys() <= needs


@pytest.mark.parametrize("mode", MODE)
def test_a_mode_reads_a_flag_or_refuses_it_by_name(mode):
    given = MODE[mode].split()
    read = train.MODES[mode]
    for flag, action in train.make_parser()._option_string_actions.items():
        is_training = mode == "merge" and action.dest == "data"
        if flag in given or action.dest in ("help", "model", "adapter") or is_training:
            continue
        value = [] if flag in SWITCHES else [VALUES.get(action.dest, "2")]
        is_other_mode = action.dest in train.MODES and action.dest != "merge"
        try:
            train.parse_args([*given, flag, *value])
            refused = ""
        except argparse.ArgumentError as error:
            refused = str(error)
        if is_other_mode or (read and action.dest not in read):
            assert action.dest in refused, f"{mode} takes {flag}"
        elif refused:  # for another reason: another flag is missing, or is there
            assert action.dest in refused and "does not read" not in refused


OF_RANK_0 = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("changes", [
    {"RANK": "1", "WORLD_SIZE": None},  # no other rank will say it
    {"RANK": "1", "MASTER_ADDR": None},
    {"RANK": "1", "MASTER_PORT": None},
    {"WORLD_SIZE": "two"},
    {"LOCAL_RANK": "x"},
    {"RANK": "2"},  # of 2
    {"RANK": "-1"},
    {"LOCAL_RANK": "1"},  # of rank 0: the first rank of its machine would be -1
    {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
    {"LOCAL_WORLD_SIZE": "8"},  # of 2
], ids=str)
def test_half_of_the_environment_of_a_rank_is_one_message(monkeypatch, capsys, changes):
    for name, value in (OF_RANK_0 | changes).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert train.launch([]) == 1
    *waits, said = capsys.readouterr().err.strip().splitlines()  # before the rank has found out, it says whom it awaits
    assert len(waits) <= 1
    assert said.startswith("train.py: error: RANK is set")
    name, value = list(changes.items())[-1]
    assert_says(said, [value or name, "torchrun sets", "unset RANK"])


def test_a_script_that_sets_no_number_of_local_ranks_is_understood():
    assert train.local_numbers(OF_RANK_0) == (0, 1)
    assert train.local_numbers(OF_RANK_0 | {"RANK": "1", "LOCAL_RANK": "1"}) == (1, 2)


@pytest.mark.parametrize("name", [
    "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE"])
@pytest.mark.parametrize("tasks, rank, is_said", [("4", None, True), ("1", None, False), ("4", "0", False)])
def test_tasks_of_a_job_without_torchrun_hear_that_each_trains_alone(
        monkeypatch, capsys, name, tasks, rank, is_said):
    monkeypatch.setenv(name, tasks)
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        for variable, value in OF_RANK_0.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr(train, "rendezvous", lambda *_, **__: iter([(HashStore(), 0, 1)]))
    ranks = train.Ranks(want_group=False, timeout=1800)
    ranks.leave()
    assert (f"note: {name} is 4, and this task trains alone" in capsys.readouterr().err) == is_said


@pytest.mark.parametrize("value, want_group, is_said", [
    ("true", False, True), ("false", False, False), ("true", True, False)])
def test_settings_of_accelerate_are_named_where_no_flag_says_the_same(
        monkeypatch, capsys, value, want_group, is_said):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", value)
    monkeypatch.delenv("RANK", raising=False)
    ranks = train.Ranks(want_group=want_group, timeout=1800)
    ranks.leave()
    assert ("ACCELERATE_USE_FSDP" in capsys.readouterr().out) == is_said


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
@pytest.mark.parametrize("spec", [None, SimpleNamespace(origin=None)], ids=["absent", "folder"])
def test_a_flag_without_its_package_is_refused(monkeypatch, capsys, name, spec):
    """Also where a folder has the package's name: Python imports it as a namespace, which has no origin."""
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: spec)
    assert train.launch([f"--{name}"]) == 2
    assert_says(capsys.readouterr().err, [f"--{name}", f"pip install {name}"])


# ---------------------------------------------------------------- config.json

FULL = "full_attention"
SLIDING = "sliding_attention"


def refusal_of_config(family, key, value):
    """What a golden model's config.json with another value is refused with."""
    raw = data.read_json(HERE / "goldens" / family / "config.json")
    with pytest.raises(ValueError) as error:
        lm.parse_config(raw | {key: value}, "model/config.json")
    return str(error.value)


@pytest.mark.parametrize("family, key, value, words", [
    ("qwen2", "model_type", "gpt2", ["gpt2", "llama", "qwen3"]),
    ("qwen2", "model_type", None, ["llama"]),
    ("qwen2", "architectures", ["Qwen2ForSequenceClassification"], ["Qwen2ForCausalLM"]),
    ("qwen2", "hidden_act", "gelu", ["gelu", "silu"]),
    ("qwen2", "use_sliding_window", True, ["true"]),
    ("qwen2", "layer_types", [FULL, SLIDING], [SLIDING, FULL]),
    ("qwen2", "quantization_config", {"quant_method": "gptq"}, ["gptq", "--qlora", "16 bits", "remove the key"]),
    ("qwen2", "num_experts", 8, ["8"]),
    ("qwen2", "num_key_value_heads", 3, ["divide"]),
    ("qwen2", "rms_norm_eps", NAN, ["NaN"]),
    ("qwen2", "dtype", "float8_e4m3fn", ["float8", "bfloat16"]),
    ("qwen2", "tie_word_embeddings", "false", ["bool"]),
    ("qwen3-moe", "num_experts_per_tok", None, ["null"]),
    ("qwen3-moe", "num_experts_per_tok", 13, ["12"]),
    ("qwen3-moe", "moe_intermediate_size", None, ["null"]),
    ("qwen3-moe", "moe_intermediate_size", 44, ["44", "multiples of 8"]),
    ("qwen3-moe", "mlp_only_layers", [1], ["[1]"]),
    ("qwen3-moe", "decoder_sparse_step", 2, ["2", "only 1"]),
    ("qwen3-moe", "output_router_logits", True, ["true"]),
    ("qwen3-tied", "head_dim", 15, ["even"]),
    ("llama2", "mlp_bias", True, []),
    ("llama2", "attention_bias", True, []),
    ("llama2", "attention_dropout", 1.5, ["1.5"]),
    ("llama2", "partial_rotary_factor", 0.5, ["0.5"]),
    ("mistral", "sliding_window", "64", ["int"]),
    # of families that are known by name alone
    ("qwen2", "model_type", "gemma3_text", ["gemma3_text", "llama", "qwen3"]),
    ("qwen2", "model_type", "gpt_oss", ["gpt_oss", "llama", "qwen3", "TRL and Unsloth train other architectures"]),
    ("qwen2", "model_type", "qwen3_next", ["qwen3_next", "llama", "qwen3"]),
    # of those that are here, what none of their published models has
    ("llama2", "attention_out_bias", True, ["true"]),
    ("llama2", "qkv_bias", True, ["true"]),
    ("llama2", "bias", True, ["true"]),
    ("llama2", "clip_qkv", 8.0, ["8.0"]),
    # of Granite, which is not in every family's model
    ("llama2", "attention_multiplier", 0.3, ["0.3"]),
    ("llama2", "embedding_multiplier", 12.0, ["12.0"]),
    ("llama2", "residual_multiplier", 0.22, ["0.22"]),
    ("llama2", "logits_scaling", 8.0, ["8.0"]),
], ids=str)
def test_config_that_asks_for_something_else_is_refused_by_key(family, key, value, words):
    assert_says(refusal_of_config(family, key, value), ["model/config.json:", key, *words])


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5,
          "original_max_position_embeddings": 16}  # what the golden of llama3.1 has
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 64}
ROPE = [  # family, key, value, words of the message
    # transformers 5 would take rope_parameters; both are there when somebody adds YaRN to a file that it has written
    ("llama3.1", "rope_scaling", {"rope_type": "yarn", "factor": 4}, ["yarn"]),
    ("llama3.1", "rope_scaling", LLAMA3 | {"factor": 16.0}, ["rope_parameters"]),
    ("llama3.1", "rope_scaling", {"rope_theta": 5e5}, ["rope_parameters"]),  # without a type it means "default"
    ("qwen2", "rope_theta", 1e4, ["rope_parameters.rope_theta = 1000000.0 differs"]),

    ("qwen2", "rope_parameters", None, ["rope_theta", "missing", "copy"]),
    ("qwen2", "rope_parameters", {"rope_type": "default"}, ["rope_theta", "missing", "copy"]),
    ("qwen2", "rope_parameters", {"rope_type": "default", "rope_theta": NAN}, ["NaN"]),
    ("qwen2", "rope_parameters", {"rope_type": "default", "rope_theta": "1e6"}, ["1e6"]),
    ("llama3.1", "rope_parameters", [1], ["flat"]),
    ("llama3.1", "rope_parameters", {FULL: LLAMA3, SLIDING: LLAMA3}, ["flat"]),
    ("llama3.1", "rope_parameters", LLAMA3 | {"rope_type": "longrope"}, ["longrope", "llama3"]),
    ("llama3.1", "rope_parameters", LLAMA3 | {"rope_type": None, "type": "axial"}, ["axial", "llama3"]),
    ("llama3.1", "rope_parameters", LLAMA3 | {"rope_type": None, "type": "dynamic"}, ["low_freq_factor", "dynamic"]),
    # a key of another type, or of none, would change the positions in some reader
    ("llama3.1", "rope_parameters", LLAMA3 | {"rope_type": "yarn"}, ["low_freq_factor = 1.0", "yarn"]),
    ("llama3.1", "rope_parameters", LLAMA3 | {"rope_type": None, "type": "yarn"}, ["low_freq_factor = 1.0", "yarn"]),
    ("qwen2", "rope_parameters", YARN | {"rope_type": None}, ["factor = 4.0", "default"]),
    ("qwen2", "rope_parameters", YARN | {"extrapolation_factor": 1.0}, ["extrapolation_factor = 1.0", "yarn"]),
    ("llama3.1", "rope_parameters", LLAMA3 | {"rope_theta": None}, ["rope_theta", "missing", "copy"]),
    ("llama3.1", "rope_parameters", LLAMA3 | {"factor": float("inf")}, ["factor"]),
    ("llama3.1", "rope_parameters", LLAMA3 | {"low_freq_factor": None}, ["low_freq_factor"]),
    ("llama3.1", "rope_parameters", LLAMA3 | {"low_freq_factor": 4.0}, ["low_freq_factor must be below"]),
    ("llama3.1", "rope_parameters", LLAMA3 | {"low_freq_factor": 4.5}, ["low_freq_factor must be below"]),
    ("llama3.1", "rope_parameters", LLAMA3 | {"original_max_position_embeddings": "16"},
     ["original_max_position_embeddings"]),
    ("qwen2", "rope_parameters", YARN | {"factor": None}, ["factor = null", "float from 1"]),
    ("qwen2", "rope_parameters", YARN | {"factor": 0.5}, ["factor = 0.5", "float from 1"]),
    ("qwen2", "rope_parameters", YARN | {"attention_factor": 0.0}, ["attention_factor = 0.0"]),
    ("qwen2", "rope_parameters", YARN | {"mscale": -1.0}, ["mscale = -1.0"]),
    ("qwen2", "rope_parameters", YARN | {"llama_4_scaling_beta": 0.1}, ["llama_4_scaling_beta", "qwen2"]),
    ("qwen2", "rope_parameters", YARN | {"truncate": 1}, ["truncate = 1", "bool"]),
    ("qwen2", "rope_parameters", YARN | {"beta_fast": 0.5}, ["beta_fast must not be below beta_slow"]),
    ("qwen2", "rope_parameters", YARN | {"rope_theta": 1.0}, ["YaRN needs one above 1"]),
]


@pytest.mark.parametrize("family, key, value, words", ROPE, ids=str)
def test_rope_that_is_not_computed_is_refused_by_key(family, key, value, words):
    assert_says(refusal_of_config(family, key, value), ["model/config.json:", "rope_", *words])


@pytest.mark.parametrize("key", [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
])
def test_absurd_sizes_are_refused_before_anything_is_allocated(key):
    for value in (10**12, -1, 0, True, "64", 64.0, None, [64]):
        message = refusal_of_config("qwen3-tied", key, value)
        assert_says(message, [f"{key} = {json.dumps(value)}", "int from 1 to"])


# ---------------------------------------------------------------- what spoils a folder
# A case runs in an empty folder with `model`, a copy of tests/goldens/qwen2, which has no tokenizer, and `chat.jsonl`.

CONFIG = "model/config.json"
TOKENIZER = "model/tokenizer.json"
WEIGHTS = "model/model.safetensors"
FIRST_PART = "model/model-00001-of-00002.safetensors"
SECOND_PART = "model/model-00002-of-00002.safetensors"
INDEX = "model/model.safetensors.index.json"
ADAPTER_CONFIG = "adapter/adapter_config.json"
ADAPTER_WEIGHTS = "adapter/adapter_model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
UP = "model.layers.0.mlp.up_proj.weight"


def later(function):
    """Makes a function that is called with these arguments in the folder of a case, when it runs."""
    return lambda *args, **kwargs: functools.partial(function, *args, **kwargs)


@later
def write(name, content):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(content)


@later
def rename(old, new):
    Path(old).rename(new)


@later
def remove(name):
    Path(name).unlink()


@later
def cut(name, share):
    os.truncate(name, int(share * os.path.getsize(name)))


@later
def pipe(name):
    """A pipe that nobody writes to."""
    Path(name).unlink(missing_ok=True)
    os.mkfifo(name)


@later
def device(name):
    """A device without an end."""
    Path(name).unlink(missing_ok=True)
    os.symlink("/dev/zero", name)


@later
def directory(name):
    Path(name).unlink(missing_ok=True)
    Path(name).mkdir()


def edit_json(name, changes):
    Path(name).write_text(json.dumps(json.loads(Path(name).read_text()) | changes))


@later
def edit_config(**changes):
    edit_json(CONFIG, changes)


@later
def take_tiny():
    """Puts the built-in model, which has a tokenizer, in place of the folder's."""
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(HERE / "tiny" / file, "model")


@later
def edit_tensors(change):
    tensors = load_file(WEIGHTS)
    change(tensors)
    save_file(tensors, WEIGHTS, metadata={"format": "pt"})


def leave_out_a_norm(tensors):
    del tensors["model.norm.weight"]


def add_a_name_of_escapes(tensors):
    tensors["\x1b[2J"] = tensors[EMBEDDING].clone()


def make_the_head_int8(tensors):
    tensors[data.HEAD] = tensors[data.HEAD].to(torch.int8)


def add_a_head_that_differs(tensors):
    tensors[data.HEAD] = tensors[EMBEDDING] + 1


def make_a_weight_nan(tensors):
    tensors[UP][3, 5] = NAN


def quantize_as_bitsandbytes(tensors):
    tensors[UP] = torch.zeros(768, 1, dtype=torch.uint8)
    tensors[f"{UP}.absmax"] = torch.zeros(24, dtype=torch.uint8)


@later
def split_weights(again=(), begin="model"):
    """Puts the weights into two files, the head into the second, with tensors that are in the first one as well."""
    tensors = load_file(WEIGHTS)
    Path(WEIGHTS).unlink()
    second = {name: tensors[name] for name in (*again, data.HEAD)}
    del tensors[data.HEAD]
    names = [f"{begin}-0000{i}-of-00002.safetensors" for i in (1, 2)]
    save_file(tensors, f"model/{names[0]}")
    save_file(second, f"model/{names[1]}")
    places = dict.fromkeys(second, names[1]) | dict.fromkeys(tensors, names[0])
    Path(INDEX).write_text(json.dumps({"weight_map": places}))


@later
def put_a_tower_into_a_part():
    """Puts the weights into the first of two files, and a vision tower, which is not trained, into the second one."""
    places = dict.fromkeys(load_file(WEIGHTS), Path(FIRST_PART).name)
    Path(WEIGHTS).rename(FIRST_PART)
    save_file({"model.visual.proj.weight": torch.zeros(2, 2)}, SECOND_PART)
    places["model.visual.proj.weight"] = Path(SECOND_PART).name
    Path(INDEX).write_text(json.dumps({"weight_map": places}))


@later
def write_index(**places):
    """Writes an index that names the one file, or what is said here, for each tensor."""
    files = dict.fromkeys(load_file(WEIGHTS), "model.safetensors")
    Path(INDEX).write_text(json.dumps({"weight_map": files | places}))


@later
def write_adapter(blocks=2, **changes):
    """A rank 2 adapter of q_proj for the two blocks of the model."""
    tensors = {}
    for block in range(blocks):
        layer = f"model.layers.{block}.self_attn.q_proj"
        tensors[f"{layer}.lora_A.weight"] = torch.zeros(2, 32)
        tensors[f"{layer}.lora_B.weight"] = torch.zeros(32, 2)
    Path("adapter").mkdir()
    data.save_adapter(tensors, Path("adapter"), "base", 2, 4.0, 0.0, ["q_proj"])
    edit_json(ADAPTER_CONFIG, changes)


@later
def write_adapter_of_one_tensor(name, rank):
    tensors = {f"{name}.lora_A.weight": torch.ones(rank, 32)}
    Path("adapter").mkdir()
    data.save_adapter(tensors, Path("adapter"), "base", rank, 4.0, 0.0, [name.split(".")[-1]])


def test_a_preset_as_the_base_of_an_adapter_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_adapter(base_model_name_or_path="llama-3.1-8b")()
    assert train.launch(["--model", "adapter"]) == 2
    assert_says(capsys.readouterr().err, [
        "--model llama-3.1-8b is a preset of shapes: give --model meta-llama/Llama-3.1-8B"])


# ---------------------------------------------------------------- folders and files


class Case(NamedTuple):
    says: list  # words of the message
    spoil: list = []  # what is done to the folder
    flags: str = ""
    code: int = 1


MODELS = {
    "no model folder": Case(
        flags="--model nowhere",
        says=["--model nowhere", "no such folder", "Hub id", "qwen3-0.6b"]),
    "no such id": Case(
        flags="--model nobody/nothing-at-all",
        says=["--model nobody/nothing-at-all", "the download from the Hub failed"]),
    "the upper folder of the Hub's cache": Case(
        spoil=[write("models--a--b/snapshots/abc/config.json", "{}")],
        flags="--model models--a--b",
        says=["models--a--b: no config.json: give --model models--a--b/snapshots/abc"]),
    "the upper folder of an adapter in the Hub's cache": Case(
        spoil=[write("models--a--b/snapshots/abc/adapter_config.json", "{}")],
        flags="--adapter models--a--b",
        says=["no adapter_config.json: give --adapter models--a--b/snapshots/abc"]),
    "no config": Case(
        spoil=[rename(CONFIG, "gone")],
        says=["model", "no config.json"]),
    "config cut": Case(
        spoil=[write(CONFIG, "{")],
        says=[CONFIG, "JSON"]),
    "no tokenizer": Case(
        says=["model/tokenizer.json: no such file: copy tokenizer*.json and chat_template.jinja of the model"]),
    "an older tokenizer": Case(
        spoil=[write("model/vocab.json", "{}"), write("model/merges.txt", "")],
        says=["model/tokenizer.json: no such file", "or make it of tokenizer.model or vocab.json", "AutoTokenizer"]),
    "tokenizer.model alone": Case(
        spoil=[write("model/tokenizer.model", "")],
        says=["model/tokenizer.json: no such file", "AutoTokenizer", ".save_pretrained('model')"]),
    "a file of another format": Case(
        spoil=[write("models/x.gguf", "GGUF")],
        flags="--model models/x.gguf",
        says=["--model models/x.gguf: a file: GGUF is llama.cpp's format"]),
    "a file of weights": Case(
        flags=f"--model {WEIGHTS}",
        says=[f"--model {WEIGHTS}: a file: give the folder that it is in, with its config.json"]),
    "a file of an adapter": Case(
        spoil=[write("adapter/adapter_model.safetensors", "")],
        flags="--adapter adapter/adapter_model.safetensors",
        says=["--adapter adapter/adapter_model.safetensors: a file: give the folder", "adapter_config.json"]),
    "a folder of Meta's": Case(
        spoil=[write("llama/params.json", "{}"), write("llama/consolidated.00.pth", "")],
        flags="--model llama",
        says=["llama: no config.json: Meta's or Mistral's own format", "model*.safetensors"]),
    "tokenizer cut": Case(
        spoil=[write(TOKENIZER, '{"version": "1.0"')],
        says=[TOKENIZER]),
}
for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
             "chat_template.jinja", "model.safetensors.index.json"):
    says = [f"model/{name}", "not a file"]
    MODELS |= {
        f"a pipe as {name}": Case(says, [take_tiny(), pipe(f"model/{name}")]),
        f"a device as {name}": Case(says, [take_tiny(), device(f"model/{name}")]),
        f"a directory as {name}": Case(says, [take_tiny(), directory(f"model/{name}")]),
    }

for name in ("config.json", "model.safetensors", "tokenizer.json"):
    MODELS[f"a pointer of git-lfs as {name}"] = Case(
        says=[f"model/{name}: a pointer of git-lfs", "git lfs pull"],
        spoil=[take_tiny(), write(f"model/{name}", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n")])

TENSORS = {
    "no weights": Case(
        spoil=[rename(WEIGHTS, "gone")],
        says=[WEIGHTS, "no such file"]),
    "two old files": Case(
        spoil=[rename(WEIGHTS, "model/model-old.safetensors"), write("model/model-older.safetensors", "")],
        says=[WEIGHTS, "no such file", "several files lack their model.safetensors.index.json"]),
    "a pickle": Case(
        spoil=[rename(WEIGHTS, "model/pytorch_model.bin")],
        says=[WEIGHTS, ".bin", "save_pretrained", "safetensors"]),
    "Mistral's own file alone": Case(
        spoil=[rename(WEIGHTS, "model/consolidated.safetensors")],
        says=[WEIGHTS, "Meta's or Mistral's own format"]),
    "another shape": Case(
        spoil=[edit_config(intermediate_size=56)],
        says=["wrong shape", "model.layers.0.mlp.down_proj.weight is [32, 48]", "[32, 56]"]),
    "a tensor less": Case(
        spoil=[edit_tensors(leave_out_a_norm)],
        says=["missing: model.norm.weight"]),
    "escapes": Case(
        spoil=[edit_tensors(add_a_name_of_escapes)],
        says=["unexpected: \\x1b[2J"]),
    "int8": Case(
        spoil=[edit_tensors(make_the_head_int8)],
        says=["lm_head.weight", "bfloat16"]),
    "bitsandbytes": Case(
        spoil=[edit_tensors(quantize_as_bitsandbytes)],
        says=["unquantized model", "--qlora"]),
    "a head that is not there": Case(
        spoil=[take_tiny(), edit_config(tie_word_embeddings=False)],
        says=["missing: lm_head.weight: config.json does not tie the head: tie_word_embeddings true"]),
    "a head that differs": Case(
        spoil=[take_tiny(), edit_tensors(add_a_head_that_differs)],
        says=["lm_head.weight", "set tie_word_embeddings to false"]),
    "nan under NF4": Case(
        spoil=[take_tiny(), edit_tensors(make_a_weight_nan)],
        flags="--qlora",
        says=["inf or nan", "model.layers.0.mlp.up_proj"]),
    "rows that NF4 cannot cut": Case(
        flags="--qlora",
        says=["64", "32", "q_proj", "use --lora"]),
}
for share in (0, 0.001, 0.5, 0.99):
    TENSORS[f"weights cut at {share}"] = Case([WEIGHTS, "cut short", "download it again"], [cut(WEIGHTS, share)])

PARTS = {
    "a part less of model": Case(
        spoil=[split_weights(), remove(SECOND_PART)],
        says=[SECOND_PART, "no such file", "incomplete"]),
    "a part less of model.safetensors": Case(
        spoil=[split_weights(begin="model.safetensors"), remove("model/model.safetensors-00002-of-00002.safetensors")],
        says=["model/model.safetensors-00002-of-00002.safetensors", "no such file", "incomplete"]),
    "a part that is a pipe": Case(
        spoil=[split_weights(), pipe(FIRST_PART)],
        says=[FIRST_PART, "not a file"]),
    "a tower less": Case(
        spoil=[put_a_tower_into_a_part(), remove(SECOND_PART)],
        says=[SECOND_PART, "no such file", "incomplete"]),
    "a part less without an index": Case(
        spoil=[split_weights(), remove(INDEX), remove(SECOND_PART)],
        says=[f"{WEIGHTS}: no such file", "incomplete", "model.safetensors.index.json"]),
    "a tensor twice": Case(
        spoil=[split_weights(again=[UP])],
        says=[UP, "model-00001-of-00002.safetensors", "as well"]),
    "index of a missing file": Case(
        spoil=[write_index(**{data.HEAD: "b.safetensors"})],
        says=["model/b.safetensors", "no such file", "incomplete"]),
    "index of other files": Case(
        spoil=[write(INDEX, '{"weight_map": {"a": "a.safetensors"}}')],
        says=[INDEX, "does not name model.safetensors", "remove one"]),
    "a long name of a file": Case(
        spoil=[write_index(**{data.HEAD: f"{'x' * LONG}.safetensors"})],
        says=[INDEX, "plain names"]),
}
for file in ("../x.safetensors", "/x.safetensors", "sub/x.safetensors", "x.bin", "x\n.safetensors", 5):
    PARTS[f"index of {file!r}"] = Case([INDEX, "plain names"], [write_index(**{data.HEAD: file})])
for text in ("{}", '{"weight_map": {}}', '{"weight_map": []}'):
    PARTS[f"index {text}"] = Case([INDEX, "weight_map"], [write(INDEX, text)])

WITH_ADAPTER = "--lora --adapter adapter"
ADAPTERS = {
    "no adapter": Case(
        flags=WITH_ADAPTER,
        says=["--adapter adapter: no such folder", "Hub id"]),
    "no such adapter on the Hub": Case(
        flags="--adapter nobody/nothing-at-all",
        says=["--adapter nobody/nothing-at-all", "the download from the Hub failed"]),
    "a model as an adapter": Case(
        flags="--adapter model",
        says=["model: no adapter_config.json: give --model model"]),
    "a pipe as an adapter": Case(
        spoil=[write_adapter(), pipe(ADAPTER_CONFIG)],
        flags=WITH_ADAPTER,
        says=[ADAPTER_CONFIG, "not a file"]),
    "adapter in a pickle": Case(
        spoil=[write_adapter(), rename(ADAPTER_WEIGHTS, "adapter/adapter_model.bin")],
        flags=WITH_ADAPTER,
        says=[ADAPTER_WEIGHTS, ".bin", "safetensors"]),
    "adapter that PEFT trains on transformers 5": Case(
        spoil=[write_adapter(
            rank_pattern={r".*\.gate_up_proj": 4}, alpha_pattern={r".*\.gate_up_proj": 8},
            target_parameters=["gate_up_proj", "down_proj"])],
        flags=WITH_ADAPTER,
        says=["adapter_config.json:", "gate_up_proj", "merge it", "merge_and_unload, save_pretrained", "--model"]),
    "adapter of the head": Case(
        spoil=[write_adapter_of_one_tensor("lm_head", rank=2)],
        flags="--adapter adapter",
        says=["adapter: adapter_model.safetensors has lm_head", "q_proj", "merge it"]),
    "adapter of one block": Case(
        spoil=[write_adapter(blocks=1)],
        flags=WITH_ADAPTER,
        says=["adapter: missing: base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight", "merge it"]),
    "adapter's key of escapes": Case(
        spoil=[write_adapter(**{"key_\x1b": 1})],
        flags=WITH_ADAPTER,
        says=["adapter_config.json", "key_\\x1b"]),
    "a long name of a base": Case(
        spoil=[write_adapter(base_model_name_or_path="x" * LONG)],
        flags="--model adapter",
        says=["xxx"]),
    "long keys": Case(
        spoil=[write_adapter(**{"k" * LONG: "v" * LONG})],
        flags=WITH_ADAPTER,
        says=["adapter_config.json: kkk", '= "vvv']),
}
for key, value in (
    ("peft_type", "IA3"),
    ("bias", "all"),
    ("use_dora", True),
    ("use_rslora", "yes"),
    ("use_rslora", 1),
    ("fan_in_fan_out", True),
    ("modules_to_save", ["lm_head"]),
    ("rank_pattern", {"q_proj": 4}),
    ("layers_to_transform", [0]),
    ("r", 0),
    ("r", "2"),
    ("lora_alpha", None),
    ("lora_alpha", NAN),
    ("lora_dropout", 1.5),
    ("alora_invocation_tokens", [1]),
    ("loftq_config", {"loftq_bits": 4}),
    ("kasa_config", {}),
    ("key_of_tomorrow", 1),
    ("init_lora_weights", "pissa"),
    ("init_lora_weights", "olora"),
    ("init_lora_weights", "mica"),
    ("init_lora_weights", "corda"),
    ("init_lora_weights", "loftq"),
):
    ADAPTERS[f"adapter: {key} = {value!r}"] = Case([ADAPTER_CONFIG, key], [write_adapter(**{key: value})], WITH_ADAPTER)

WITH_TEMPLATE = "--model tiny --chat_template mine.jinja"
TEXTS = {
    "a pipe as a template": Case(
        spoil=[pipe("mine.jinja")],
        flags=WITH_TEMPLATE,
        says=["mine.jinja", "not a file"]),
    "another trainer's name for a template": Case(
        flags="--model tiny --chat_template chatml",
        says=["--chat_template chatml: no such file", "the model's own template is used"]),
    "template's syntax": Case(
        spoil=[write("mine.jinja", "{% for m in messages %}\n{{ m }")],
        flags=WITH_TEMPLATE,
        says=["mine.jinja", "line 2"]),
    "template that objects": Case(
        spoil=[write("mine.jinja", "{{ raise_exception('no \x1b[31m system') }}")],
        flags=WITH_TEMPLATE,
        says=["chat.jsonl", "line 1", "mine.jinja", "system"]),
    "a variable that no template reads": Case(
        flags="--model tiny --template_args enable_thinking=false",
        says=["chat_template.jinja", "does not read enable_thinking of --template_args"]),
    "a share that leaves nothing to evaluate": Case(
        flags="--model tiny --eval_data 0.0001",
        says=["--eval_data 0.0001 leaves no example of --data to evaluate on"]),
    "a share that leaves nothing to train on": Case(
        flags="--model tiny --eval_data 0.9999",
        says=["--eval_data 0.9999 leaves no example of --data to train on"]),
    "as many examples as there are": Case(
        flags="--model tiny --eval_data 2",
        says=["--eval_data 2: --data has only 1 different examples", "left to train on"]),
    "a long template": Case(
        spoil=[write("mine.jinja", f"{{% {'x' * LONG} %}}")],
        flags=WITH_TEMPLATE,
        says=["mine.jinja", "xxx"]),
    "a table": Case(
        spoil=[write("bad.parquet", "")],
        flags="--model tiny --data bad.parquet",
        says=["bad.parquet: ", "parquet"]),
    "a name of the Hub": Case(
        flags="--model tiny --data a/b",
        says=["a/b: no such file", "pip install datasets"]),
    "a name that is too long for the Hub": Case(
        flags="--model tiny --data a/b/c/d",
        says=["a/b/c/d: no such file", "org/name:split", "org/name/subset:split"]),
    "a column that no row has": Case(
        flags="--model tiny --columns questoin=instruction",
        says=["--columns questoin: no row of the data has such a key"]),
    "escapes in a name": Case(
        flags="--model tiny --data \x1b[31m.jsonl",
        says=[r"\x1b[31m.jsonl: no such file"]),
    "rows too short": Case(
        flags="--model tiny --seq_len 8",
        says=["nothing to train on", "2 are longer than --seq_len 8"]),
    "step beyond the data": Case(
        flags="--model tiny --batch_size 3 --grad_accum 5",
        says=["15 rows", "--batch_size", "has 1"]),
}

TEXTS["a pointer of git-lfs"] = Case(
    spoil=[take_tiny(), write("a.jsonl", "version https://git-lfs.github.com/spec/v1\n")],
    flags="--data a.jsonl",
    says=["a.jsonl: a pointer of git-lfs"])
RUNS = {
    "out a file": Case(
        spoil=[write("file", "")],
        flags="--model tiny --out file",
        says=["--out file", "folder"],
        code=2),  # the flag alone says it
    "out of a run": Case(
        spoil=[write("taken/args.json", json.dumps(train.OURS)), write("taken/final", "")],
        flags="--model tiny --out taken",
        says=["taken", "contains a run", "give another folder"]),
    "out of something else": Case(
        spoil=[write("taken/checkpoint-2", "")],
        flags="--model tiny --out taken --resume",
        says=["taken: contains files, and no args.json of a run", "give a new or an empty folder"]),
    "out a link to nothing": Case(
        spoil=[functools.partial(os.symlink, "gone", "link")],
        flags="--model tiny --out link/run",
        says=["--out link/run: link is a link to gone, which does not exist"]),
    "out a name that is too long": Case(
        flags=f"--model tiny --out {'a' * 300}",
        says=["error: aaa", "aaa: File name too long"],
        code=2),
    "out of all": Case(
        flags="--model tiny --out /",
        says=["--out /: contains files, and no args.json of a run"]),
    "nothing to resume": Case(
        flags="--model tiny --resume model",
        says=["--resume model", "no complete checkpoint"]),
    "replicas of a plan": Case(
        flags="--fsdp2 --replicas 3 --dry_run --world 8",
        says=["--replicas 3 needs 3 processes or a multiple of that, not 8"]),
    "groups of a plan": Case(
        flags="--sequence_parallel 4 --dry_run --world 6",
        says=["--sequence_parallel 4 needs 4 processes or a multiple of that, not 6"]),
    "groups of heads": Case(
        flags="--model qwen2.5-0.5b --sequence_parallel 4 --dry_run --world 28",
        says=["--sequence_parallel 4", "must divide the model's 14 heads of attention"]),
    "groups of heads of two kinds": Case(  # both 24 ranks and 24 heads of attention could be split by 3
        flags="--model qwen3.5-27b --sequence_parallel 3 --dry_run --world 24",
        says=["--sequence_parallel 3", "24 heads of attention, 16 key heads of Gated DeltaNet"]),
    "half of the experts": Case(
        flags="--lora --lora_targets up_proj --dry_run --model qwen3-30b-a3b",
        says=["up_proj", "give both"]),
    "ranks of experts": Case(
        flags="--lora --lora_rank 4 --dry_run --model qwen3-30b-a3b",
        says=["--lora_rank 4", "multiple of 8"]),
    "--rslora of experts": Case(
        flags="--lora --rslora --lora_rank 64 --lora_alpha 16 --dry_run --model qwen3-30b-a3b",
        says=["--rslora", "experts", "--lora_alpha 128 gives these"]),  # 128 / 64 is 16 / 8
    "rank in an adapter": Case(
        spoil=[write_adapter_of_one_tensor("mlp.experts.0.down_proj", rank=12)],
        flags="--dry_run --model qwen3-30b-a3b --adapter adapter",
        says=["12", "of 8"]),
    "plan without an adapter": Case(
        flags=f"--dry_run {WITH_ADAPTER}",
        says=["--adapter adapter: no such folder"]),
}
FILES = MODELS | TENSORS | PARTS | ADAPTERS | TEXTS | RUNS
CHAT = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]}


@pytest.mark.parametrize("name", FILES)
def test_what_is_wrong_is_named_before_anything_is_written(name, tmp_path, monkeypatch, capsys):
    case = FILES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    shutil.copytree(HERE / "goldens/qwen2", "model")
    Path("chat.jsonl").write_text(2 * (json.dumps(CHAT) + "\n"))
    for change in case.spoil:
        change()
    before = sorted(tmp_path.rglob("*"))
    argv = later_counts(f"--model model --data chat.jsonl --seq_len 64 --steps 1 --out out {case.flags}".split())
    assert train.launch(argv) == case.code
    message = capsys.readouterr().err
    assert message.startswith("train.py: error: ")
    assert_says(message, case.says)
    assert "\x1b" not in message
    assert "Traceback" not in message
    assert len(message) < 3000
    assert sorted(tmp_path.rglob("*")) == before


# ---------------------------------------------------------------- the Hub


class RemoteProtocolError(Exception):
    """By the name of one of httpx: huggingface_hub raises its HTTP library's errors, neither OSError nor ValueError."""


@pytest.mark.parametrize("error", [RuntimeError, ConnectionError, RemoteProtocolError])
def test_broken_download_is_one_line_with_the_model_and_what_to_do(tmp_path, monkeypatch, capsys, error):
    monkeypatch.chdir(tmp_path)  # a run without --out begins in out/
    def fail(*_, **__):
        raise error("peer closed\n\nconnection " + "x" * LONG)

    monkeypatch.setattr(data, "HUB_PAUSES_S", ())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert train.launch(["--model", "a/b"]) == 1
    message = capsys.readouterr().err
    expected = f"{error.__name__}: peer closed connection xxx"
    assert_says(message, ["--model a/b:", "Hub", "resumes at the next start", expected])
    assert message.count("\n") == 1
    assert len(message) < 1500


class HttpError(Exception):
    def __init__(self, status_code):
        self.response = SimpleNamespace(status_code=status_code)


class GatedRepoError(HttpError):
    """By the name of huggingface_hub's."""


@pytest.mark.parametrize("error, words", [
    (GatedRepoError(401), "accept its licence at https://huggingface.co/meta/llama-3-8b, then `hf auth login`"),
    (HttpError(403), "accept its licence at https://huggingface.co/meta/llama-3-8b, then `hf auth login`"),
    (HttpError(401), "misspelled, or private: then `hf auth login`"),
    (HttpError(404), "Did you mean meta-llama/Meta-Llama-3-8B?"),
    (HttpError(500), "a partial download resumes at the next start"),
], ids=repr)
def test_what_the_hub_refuses_is_said_with_what_to_do(monkeypatch, error, words):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(data, "HUB_PAUSES_S", ())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError) as refused:
        data.find_model("meta/llama-3-8b", random_init=False)
    assert_says(str(refused.value), ["--model meta/llama-3-8b: ", words])


def hub_with(folder, monkeypatch):
    """Makes the Hub a folder, and returns the list of what is asked for: patterns of files."""
    asked = []

    def snapshot_download(_, allow_patterns, **__):
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_weights_of_a_model_that_is_refused_are_not_downloaded(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    asked = hub_with(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="gemma3"):
        data.find_model("google/gemma", random_init=False)
    assert len(asked) == 1
    assert "*.safetensors" not in asked[0]


@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_of_the_hub_as_a_model_is_named_with_its_base(tmp_path, monkeypatch, with_config):
    if with_config:  # as axolotl's adapters have it
        shutil.copy(HERE / "tiny/config.json", tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    hub_with(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="--model a/b: an adapter: give --adapter a/b and its base, --model org/base"):
        data.find_model("a/b", random_init=False)


@pytest.mark.parametrize("error, n_tries", [
    (ConnectionError("cut"), 3),
    (HttpError(500), 3),
    (HttpError(404), 1),  # an answer
    (KeyError("no such split"), 1),
])
def test_the_hub_is_asked_three_times_unless_it_says_no(monkeypatch, error, n_tries):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(data, "HUB_PAUSES_S", (0, 0))
    n_asked = 0

    def ask():
        nonlocal n_asked
        n_asked += 1
        if n_asked < 3:
            raise error
        return "files"

    if n_tries == 3:
        assert data.from_hub(ask, LookupError) == "files"
    else:
        with pytest.raises(type(error)):
            data.from_hub(ask, LookupError)
    assert n_asked == n_tries
