"""Writes tests/goldens-windows/: tiny random checkpoints of families with sliding windows, layers without RoPE or other
traits beyond Qwen3, with transformers' results.

Needs transformers (5.23 was used) and nothing of this project: python tests/make_goldens_windows.py
The files are those of make_goldens_qwen35.py. All is computed in float64, and each document alone: some are shorter
than the window, one as long, and one many times as long.
"""

import shutil
import sys
from pathlib import Path

import make_goldens_qwen35 as packed
import torch
from transformers import (MistralConfig, MistralForCausalLM, MuseGlimmerConfig, MuseGlimmerForConditionalGeneration,
                          SmolLM3Config, SmolLM3ForCausalLM)

HERE = Path(__file__).parent / "goldens-windows"
WINDOW = 24
LENGTHS = [5, 24, 1, 25, 60, 150]
SHAPE = dict(vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=1024, rms_norm_eps=1e-4, attn_implementation="eager")
ROPE = {"rope_type": "default", "rope_theta": 1e4}
VISION = dict(num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2, patch_size=2,
              pos_emb_height=2, pos_emb_width=2)
CASES = {
    "mistral": (MistralForCausalLM, lambda: MistralConfig(
        **SHAPE, head_dim=8, sliding_window=WINDOW, rope_parameters=ROPE)),
    "smollm3": (SmolLM3ForCausalLM, lambda: SmolLM3Config(
        **SHAPE, rope_parameters=ROPE, tie_word_embeddings=True, pad_token_id=None, bos_token_id=None)),
    # logits that the cap of 2 bends, and a head dimension that is not D / H
    "muse-glimmer": (MuseGlimmerForConditionalGeneration, lambda: MuseGlimmerConfig(
        text_config=dict(**SHAPE, head_dim=8, sliding_window=WINDOW, rope_parameters=ROPE, post_norm_eps=1e-3,
                         qk_scale_factor=2.5, output_multiplier=0.7, final_logit_softcapping=2.0),
        vision_config=VISION, out_hidden_size=8, projector_hidden_size=8)),
}
STD = {"embed_tokens": 0.5, "lm_head": 0.5}


@torch.no_grad()
def randomize_(model):
    """As packed.randomize_, with norms around what their families multiply by -> {name: tensor of the file}."""
    tensors = {}
    for name, p in model.named_parameters():
        adds_one = ".language_model.layers." in name
        middle = 1.0 if name.endswith("norm.weight") and not adds_one else 0.0
        torch.nn.init.normal_(p, middle, next((std for part, std in STD.items() if part in name), 0.2))
        tensors[name] = p.to(torch.bfloat16)
        p.copy_(tensors[name])
    return tensors


def main():
    torch.set_num_threads(1)
    packed.compute_in_float64()
    for name in sys.argv[1:] or CASES:
        shutil.rmtree(HERE / name, ignore_errors=True)
        family, config = CASES[name]
        torch.manual_seed(3)  # well-conditioned gradients: float32 gives each of them to 6e-6
        model = family(config()).double().eval()
        tensors = randomize_(model)
        tokens = torch.randint(0, SHAPE["vocab_size"], (sum(LENGTHS),))
        packed.write(HERE / name, model, tensors, tokens.split(LENGTHS))


if __name__ == "__main__":
    main()
