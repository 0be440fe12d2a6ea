"""Writes tests/goldens/: tiny random checkpoints as transformers saves them, with its logits and gradients in float32.

Needs transformers (5.23 was used) and nothing of this project: python tests/make_goldens.py
Every folder holds config.json, config-v4.json (as transformers 4 spells it), model.safetensors and golden.safetensors
(tokens [2, 24], or with YaRN one row of 4 times the length of pretraining, logits, and `grad.<name>` of the summed
cross-entropy of tokens[:, 1:]).
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

HERE = Path(__file__).parent / "goldens"
SHAPE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, attn_implementation="eager")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # so short that 24 positions reach every branch of the formula
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
# of 64 positions 256 are made, so that pairs stay, are blended and are stretched
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
EVERY_YARN = YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False, "mscale": 1.2, "mscale_all_dim": 0.7}


def theta(value):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value}}


MILLION = SHAPE | theta(1e6)
QWEN3 = MILLION | {"head_dim": 16}
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "norm_topk_prob": True}
ODDS = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "norm_topk_prob": False}


CASES = {
    "llama2": (LlamaForCausalLM, LlamaConfig(**SHAPE | {"num_key_value_heads": 4} | theta(10000.0))),
    "llama3.1": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "llama3.2-tied": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama-linear": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LINEAR)),
    "mistral": (MistralForCausalLM, MistralConfig(**MILLION, head_dim=16, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**MILLION)),
    "qwen2-yarn": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, rope_parameters=YARN)),
    "qwen3-yarn": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16, rope_parameters=EVERY_YARN)),
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config(**QWEN3, tie_word_embeddings=True)),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**QWEN3 | {"num_hidden_layers": 3} | EXPERTS)),
    "qwen3-moe-odds": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**QWEN3, **ODDS)),  # odds that do not sum to 1
}


def spell_v4(config):
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    return config


def by_stack(name, grad):
    """Gradients of transformers' [E, N, D] stacks as oomph's [E * N, D], gate_proj and up_proj apart."""
    halves = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    stem, _, last = name.partition("mlp.experts.")
    if last not in halves:
        return {name: grad}
    parts = grad.chunk(len(halves[last]), 1)
    return {f"{stem}mlp.experts.{key}.weight": part.flatten(0, 1) for key, part in zip(halves[last], parts)}


def fill_with_random_numbers(model):
    """Norms and biases too: ones and zeros would hide a mistake."""
    for name, p in model.named_parameters():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        std = 0.2 if p.dim() < 2 else 0.08
        if name.endswith("mlp.gate.weight"):
            std = 1.0  # uneven loads of experts
        torch.nn.init.normal_(p, mean, std)


def golden_of(model, shape):
    """Random tokens, and what the model computes from them."""
    tokens = torch.randint(0, SHAPE["vocab_size"], shape)
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    loss.backward()
    golden = {"tokens": tokens, "logits": logits.detach(), "loss": loss.detach().reshape(1)}
    for name, p in model.named_parameters():
        for stack, grad in by_stack(name, p.grad).items():
            golden[f"grad.{stack}"] = grad
    return golden


def write_case(name):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    family, config = CASES[name]
    torch.manual_seed(len(name))
    model = family(config).float()
    fill_with_random_numbers(model)
    golden = golden_of(model, (1, 256) if name.endswith("yarn") else (2, 24))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    save_file(golden, folder / "golden.safetensors")
    spelled = spell_v4(json.loads((folder / "config.json").read_text()))
    if name == "llama2":  # as in the first Llama-2 files
        del spelled["rope_theta"]
        del spelled["head_dim"]
    if name == "qwen2-yarn":  # as Qwen2.5's cards say
        scaling = spelled["rope_scaling"]
        scaling["type"] = scaling.pop("rope_type")
    (folder / "config-v4.json").write_text(json.dumps(spelled, indent=2) + "\n")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:  # those that are named, or all
        write_case(case)
