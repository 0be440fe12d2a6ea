"""Writes tests/goldens-qwen35/: tiny random Qwen3.5 checkpoints in the Hub's layout, with transformers' results.

Needs transformers (5.23 was used) and nothing of this project: python tests/make_goldens_qwen35.py
Every folder holds config.json, model.safetensors (16 bits, as on the Hub) and golden.safetensors, computed in float64:
    tokens, lengths      documents one after another. transformers cannot pack them without kernels: each ran alone
    logits, rows         logits of the first and the last token of each document, and which tokens these are
    nll                  of each token but a document's first: the cross-entropy of the token before it
    grad.<name in file>  gradients of the sum of nll
    generated            what greedy decoding appends to the first PROMPT tokens of the last document
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

HERE = Path(__file__).parent / "goldens-qwen35"
FLOAT32 = torch.float32
LENGTHS = [1, 63, 64, 65, 300]  # around the 64 tokens of a chunk, and across several
PROMPT, N_GENERATED = 40, 16
# rms_norm_eps: what a head that forgets all reads may be next to nothing. Blown up to a norm of 1, it would cost
# all gradients digits in float32. 1e-4 is no default either, so a reader that overlooks the key is found out.
TEXT = dict(
    vocab_size=48, hidden_size=16, intermediate_size=16, num_hidden_layers=4, full_attention_interval=4, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=4,
    attn_output_gate=True, mamba_ssm_dtype="float32", mlp_only_layers=[], mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False, rms_norm_eps=1e-4, partial_rotary_factor=0.5, rope_parameters={
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
        "mrope_section": [1, 1, 0]})
VISION = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=16, patch_size=2,
              num_position_embeddings=4)
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=8, shared_expert_intermediate_size=16,
               num_hidden_layers=2, full_attention_interval=2)
THREE = dict(num_hidden_layers=3, full_attention_interval=3)
# name: (class, what differs in the text part, whether A_log and the gated norm are float32, as in the files of 3.5,
# seed of a model whose gradients are well-conditioned: float32 gives each of them to 6e-6)
CASES = {
    "same-heads-tied": (Qwen3_5ForConditionalGeneration, {"linear_num_value_heads": 2}, True, 3),  # as 0.8B and 2B
    "twice-tied": (Qwen3_5ForConditionalGeneration, THREE, False, 4),  # as 4B; 9B is untied
    "thrice-text": (Qwen3_5ForCausalLM, {  # as 27B of 3.8 without its part for images
        "linear_num_value_heads": 6, "output_gate_type": "swish", **THREE}, False, 4),
    "experts": (Qwen3_5MoeForConditionalGeneration, EXPERTS, True, 1),  # as 35B-A3B
}
# exp(A_log) of the heads: usual ones, one that forgets nothing, and one that forgets all at each token
DECAYS = [0.3, 300.0, 1e-6, 0.03, 3.0, 30.0]
STD = {"embed_tokens": 0.5, "mlp.gate.": 1.0, "in_proj_a": 0.5, "in_proj_b": 0.5, "dt_bias": 1.0, "conv1d": 0.5}


def compute_in_float64():
    """Makes transformers' code, which asks for float32 by name, compute in float64. In float32 its differences of
    decays cost the gradients of strong gates three digits."""
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double


def build(family, changes):
    tied = family is Qwen3_5ForConditionalGeneration
    text = TEXT | changes | {"tie_word_embeddings": tied}
    if family is Qwen3_5ForCausalLM:
        return family(Qwen3_5TextConfig(**text, eos_token_id=0))
    config = Qwen3_5MoeConfig if family is Qwen3_5MoeForConditionalGeneration else Qwen3_5Config
    return family(config(text_config=text, vision_config=VISION, tie_word_embeddings=tied, language_model_only=False))


@torch.no_grad()
def randomize_(model, keep_float32):
    """Random numbers for all parameters, norms too: zeros and ones would hide a mistake. Rounded to what the file
    keeps -> {name: tensor of the file}."""
    tensors = {}
    for name, p in model.named_parameters():
        std = next((std for part, std in STD.items() if part in name), 0.2)
        torch.nn.init.normal_(p, 1.0 if name.endswith("linear_attn.norm.weight") else 0.0, std)
        if name.endswith("A_log"):
            p.copy_(torch.tensor(DECAYS[: len(p)]).log())
        stays = keep_float32 and name.endswith(("A_log", "linear_attn.norm.weight"))
        tensors[name] = p.to(FLOAT32 if stays else torch.bfloat16)
        p.copy_(tensors[name])
    return tensors


def extra_tensors(D):
    """A part of what the Hub's files have beside the model: a head that predicts the token after the next."""
    shapes = {"fc.weight": (D, 2 * D), "norm.weight": (D,), "pre_fc_norm_embedding.weight": (D,),
              "pre_fc_norm_hidden.weight": (D,), "layers.0.self_attn.o_proj.weight": (D, D)}
    return {f"mtp.{name}": torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def run_alone(model, documents):
    """-> what golden.safetensors holds, but for the tokens. Leaves gradients in the model."""
    logits, nll, rows, start = [], [], [], 0
    for tokens in documents:
        logits_TV = model(tokens[None]).logits[0]
        logits += [logits_TV[0], logits_TV[-1]]
        nll.append(torch.nn.functional.cross_entropy(logits_TV[:-1], tokens[1:], reduction="none"))
        rows += [start, start + len(tokens) - 1]
        start += len(tokens)
    nll = torch.cat(nll)
    nll.sum().backward()
    return {"logits": torch.stack(logits).detach(), "nll": nll.detach(), "rows": torch.tensor(rows)}


def write(folder, model, tensors, documents):
    """Writes a model's config, `tensors`, and golden.safetensors, what the model makes of each document alone."""
    golden = {"tokens": torch.cat(documents), "lengths": torch.tensor([len(tokens) for tokens in documents])}
    golden |= run_alone(model, documents)
    golden |= {f"grad.{key}": p.grad for key, p in model.named_parameters() if p.grad is not None}
    prompt = documents[-1][:PROMPT]
    answer = model.generate(prompt[None], max_new_tokens=N_GENERATED, do_sample=False, eos_token_id=None)
    golden["generated"] = answer[0, PROMPT:]
    golden = {key: t.to(FLOAT32) if t.is_floating_point() else t for key, t in golden.items()}
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file(golden, folder / "golden.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main():
    shutil.rmtree(HERE, ignore_errors=True)
    torch.set_num_threads(1)
    compute_in_float64()
    for name, (family, changes, keep_float32, seed) in CASES.items():
        torch.manual_seed(seed)
        model = build(family, changes).double().eval()
        model.set_experts_implementation("eager")  # grouped products have no float64
        tensors = randomize_(model, keep_float32)
        tokens = torch.randint(0, TEXT["vocab_size"], (sum(LENGTHS),))
        if family is not Qwen3_5ForCausalLM:
            tensors |= extra_tensors(TEXT["hidden_size"])
        write(HERE / name, model, tensors, tokens.split(LENGTHS))


if __name__ == "__main__":
    main()
