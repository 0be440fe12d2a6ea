"""Writes tests/goldens/: tiny random checkpoints as transformers saves them, with its logits and gradients in float32.

Needs transformers (5.23 was used) and nothing of this project: python tests/make_goldens.py
Every folder holds config.json, config-v4.json (as transformers 4 spells it), model.safetensors and golden.safetensors
(tokens [2, 24], logits, and `grad.<name>` of the summed cross-entropy of tokens[:, 1:]).
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


def theta(value):
    return {"rope_type": "default", "rope_theta": value}


CASES = {
    "llama2": (LlamaForCausalLM, LlamaConfig(**SHAPE | {"num_key_value_heads": 4}, rope_parameters=theta(10000.0))),
    "llama3.1": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "llama3.2-tied": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama-linear": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LINEAR)),
    "mistral": (MistralForCausalLM, MistralConfig(
        **SHAPE, head_dim=16, sliding_window=None, rope_parameters=theta(1e6))),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, rope_parameters=theta(1e6))),
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config(
        **SHAPE, head_dim=16, tie_word_embeddings=True, rope_parameters=theta(1e6))),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(
        **SHAPE | {"num_hidden_layers": 3}, head_dim=16, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=8,
        norm_topk_prob=True, rope_parameters=theta(1e6))),
    "qwen3-moe-odds": (Qwen3MoeForCausalLM, Qwen3MoeConfig(  # odds that do not sum to 1
        **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=8, norm_topk_prob=False,
        rope_parameters=theta(1e6))),
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


def main():
    for name in sys.argv[1:] or CASES:  # those that are named, or all
        shutil.rmtree(HERE / name, ignore_errors=True)
        family, config = CASES[name]
        torch.manual_seed(len(name))
        model = family(config).float()
        for key, p in model.named_parameters():  # random norms and biases too: ones and zeros would hide a mistake
            std = 1.0 if key.endswith("mlp.gate.weight") else 0.2 if p.dim() < 2 else 0.08  # uneven loads of experts
            torch.nn.init.normal_(p, 1.0 if key.endswith("norm.weight") else 0.0, std)
        tokens = torch.randint(0, SHAPE["vocab_size"], (2, 24))
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        loss.backward()
        model.save_pretrained(HERE / name)
        golden = {"tokens": tokens, "logits": logits.detach(), "loss": loss.detach().reshape(1)}
        for key, p in model.named_parameters():
            golden |= {f"grad.{stack}": grad for stack, grad in by_stack(key, p.grad).items()}
        save_file(golden, HERE / name / "golden.safetensors")
        (HERE / name / "generation_config.json").unlink()
        spelled = spell_v4(json.loads((HERE / name / "config.json").read_text()))
        if name == "llama2":
            del spelled["rope_theta"], spelled["head_dim"]  # as in the first Llama-2 files
        (HERE / name / "config-v4.json").write_text(json.dumps(spelled, indent=2) + "\n")


if __name__ == "__main__":
    main()
