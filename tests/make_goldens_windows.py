"""Writes tests/goldens-windows/: tiny random checkpoints of families with sliding windows, layers without RoPE or other
traits beyond Qwen3, with transformers' results.

Needs transformers and nothing of this project: python tests/make_goldens_windows.py NAMES (5.23 was used for mistral,
smollm3 and muse-glimmer, 5.24 for the others). The files are those of make_goldens_qwen35.py. All is computed in
float64, and each document alone: some are shorter than the window, one as long, and one many times as long.
"""

import shutil
import sys
from pathlib import Path

import make_goldens_qwen35 as packed
import torch
from transformers import (CwmConfig, CwmForCausalLM, GraniteConfig, GraniteForCausalLM, InternLM3Config,
                          IQuestCoderConfig, LlamaForCausalLM, Ministral3Config, Ministral3ForCausalLM, MinistralConfig,
                          MinistralForCausalLM, Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig,
                          MistralForCausalLM, MuseGlimmerConfig, MuseGlimmerForConditionalGeneration, Qwen3VLConfig,
                          Qwen3VLForConditionalGeneration, SeedOssConfig, SeedOssForCausalLM, SmolLM3Config,
                          SmolLM3ForCausalLM)

HERE = Path(__file__).parent / "goldens-windows"
WINDOW = 24
LENGTHS = [5, 24, 1, 25, 60, 150]
SHAPE = dict(vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=1024, rms_norm_eps=1e-4, attn_implementation="eager")
ROPE = {"rope_type": "default", "rope_theta": 1e4}
VISION = dict(num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2, patch_size=2,
              pos_emb_height=2, pos_emb_width=2)
PIXTRAL = dict(model_type="pixtral", num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2,
               head_dim=4, patch_size=2, image_size=8)
QWEN_VISION = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=16, patch_size=2,
                   num_position_embeddings=4, deepstack_visual_indexes=[0])
TWO = SHAPE | dict(num_hidden_layers=2, head_dim=8, pad_token_id=None)  # a pad token would get no gradient
# keys as in files of the Hub, but documents of up to 10 times the length of pretraining
YARN = {"rope_type": "yarn", "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
# pairs of low frequencies are blended or stretched, as in the golden of Llama 3.1
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
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
    "seed-oss": (SeedOssForCausalLM, lambda: SeedOssConfig(**TWO, rope_parameters=ROPE)),  # dropouts of 0.1
    "iquestcoder": (LlamaForCausalLM, lambda: IQuestCoderConfig(**TWO, rope_parameters=ROPE)),
    "internlm3": (LlamaForCausalLM, lambda: InternLM3Config(
        **TWO, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0})),
    # without a list of layer types: of five blocks the first and the last see all
    "cwm": (CwmForCausalLM, lambda: CwmConfig(
        **TWO | {"num_hidden_layers": 5}, sliding_window=WINDOW, rope_parameters=LLAMA3)),
    "ministral": (MinistralForCausalLM, lambda: MinistralConfig(
        **TWO, sliding_window=WINDOW, rope_parameters=ROPE, layer_types=["full_attention", "sliding_attention"])),
    "ministral3": (Ministral3ForCausalLM, lambda: Ministral3Config(**TWO, rope_parameters=YARN)),
    # as Ministral 3 3B: with a vision tower, and tied
    "mistral3": (Mistral3ForConditionalGeneration, lambda: Mistral3Config(
        text_config=dict(**TWO, model_type="ministral3", rope_parameters=YARN, tie_word_embeddings=True),
        vision_config=PIXTRAL)),
    "qwen3-vl": (Qwen3VLForConditionalGeneration, lambda: Qwen3VLConfig(
        text_config=dict(**TWO, rope_parameters=MROPE), vision_config=QWEN_VISION)),
    "granite": (GraniteForCausalLM, lambda: GraniteConfig(
        **SHAPE | {"num_hidden_layers": 2}, rope_parameters=ROPE, tie_word_embeddings=True, attention_multiplier=0.3,
        embedding_multiplier=6.0, residual_multiplier=0.4, logits_scaling=3.0)),
}
# The Hub's files of Mistral 3, and those that transformers writes, have the names that modules had before.
OLD_NAMES = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
             "model.vision_tower.": "vision_tower.", "model.multi_modal_projector.": "multi_modal_projector."}
STD = {"embed_tokens": 0.5, "lm_head": 0.5}


@torch.no_grad()
def randomize_(model):
    """As packed.randomize_, with norms around what their families multiply by -> {name: tensor of the file}."""
    tensors = {}
    for name, p in model.named_parameters():
        adds_one = isinstance(model, MuseGlimmerForConditionalGeneration) and ".language_model.layers." in name
        middle = 1.0 if name.endswith("norm.weight") and not adds_one else 0.0
        torch.nn.init.normal_(p, middle, next((std for part, std in STD.items() if part in name), 0.2))
        tensors[name] = p.to(torch.bfloat16)
        p.copy_(tensors[name])
    return tensors


def name_in_file(model, name):
    if isinstance(model, Mistral3ForConditionalGeneration):
        for new, old in OLD_NAMES.items():
            if name.startswith(new):
                return old + name.removeprefix(new)
    return name


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
        tensors = {name_in_file(model, key): t for key, t in tensors.items()}
        packed.write(HERE / name, model, tensors, tokens.split(LENGTHS))


if __name__ == "__main__":
    main()
