"""Writes tests/goldens-quantized/: a tiny random model in the formats in which people publish quantized weights, with
what transformers computes of it.

Needs transformers (5.23 was used), bitsandbytes (0.50.2) and compressed-tensors (0.20), and nothing of this project:
python tests/make_goldens_quantized.py. Every folder holds config.json and model.safetensors, which bitsandbytes has
written, or compressed-tensors, or this script, as Qwen and Mistral publish FP8. golden.safetensors is transformers'
own model of the same folder, dequantized: tokens [2, 24], logits, the losses of ten steps of AdamW in float32, and in
folders of bitsandbytes the codes of a matrix.
"""

import json
import shutil
from pathlib import Path

import bitsandbytes.functional as bnb
import torch
import torch.nn.functional as F
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, CompressedTensorsConfig, FineGrainedFP8Config
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent / "goldens-quantized"
# transformers reads no blocks of 128 that the rows or columns of a matrix end in
SHAPE = dict(vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
             num_key_value_heads=1, head_dim=64, max_position_embeddings=256, attn_implementation="eager")
LARGEST = 448  # of float8_e4m3fn
AS_QWEN = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
           "modules_to_not_convert": ["lm_head"]}
AS_MISTRAL = {"quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None,
              "modules_to_not_convert": ["lm_head"]}
A_ROW = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
         "ignore": ["lm_head"], "config_groups": {"group_0": {
             "targets": ["Linear"],
             "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
             "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True,
                                   "dynamic": True}}}}


def plain_model():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16()
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() < 2 else 0.0, 0.08)
    return model


def is_linear(name):
    return name.endswith("_proj.weight")


def block_scales(w_ND):
    """[N / 128, D / 128]: the largest magnitude of each block, over LARGEST."""
    N, D = w_ND.shape
    n, d = -(-N // 128), -(-D // 128)
    padded = F.pad(w_ND.float(), (0, d * 128 - D, 0, n * 128 - N))
    return padded.view(n, 128, d, 128).abs().amax((1, 3)) / LARGEST


def write_fp8(folder, quantization):
    """As Qwen publishes it, scales a block of 128 x 128, or as Mistral, a scale a tensor and one for its inputs."""
    tensors = {}
    for name, weight in plain_model().state_dict().items():
        tensors[name] = weight
        if not is_linear(name):
            continue
        N, D = weight.shape
        if quantization is AS_QWEN:
            scale = block_scales(weight)
            every = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:N, :D]
        else:
            scale = (weight.abs().max() / LARGEST).bfloat16()
            every = scale.float()
            tensors[name.replace("weight", "activation_scale")] = torch.tensor(0.01, dtype=torch.bfloat16)
        tensors[name] = (weight.float() / every).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = plain_model().config.to_dict() | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_compressed_tensors(folder):
    model = plain_model()
    apply_quantization_config(model, QuantizationConfig(**A_ROW | {"quantization_status": "initialized"}))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            scales = module.weight.detach().abs().amax(1, keepdim=True) / LARGEST
            module.weight_scale.data.copy_(scales)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="float-quantized")
    compressor.compress_model(model)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    config = plain_model().config.to_dict() | {"quantization_config": A_ROW}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_bitsandbytes(folder, double):
    plain_model().save_pretrained(folder / "plain")
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "plain", dtype=torch.bfloat16, device_map="cpu", quantization_config=settings)
    model.save_pretrained(folder)
    shutil.rmtree(folder / "plain")
    (folder / "generation_config.json").unlink()


def dequantized(folder):
    """transformers' model of a folder, whose weights are those that it or bitsandbytes dequantize."""
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    options = {"dtype": torch.bfloat16, "device_map": "cpu", "attn_implementation": "eager"}
    if quantization["quant_method"] == "fp8":
        of_file = {key: quantization[key] for key in ("activation_scheme", "weight_block_size")}
        options["quantization_config"] = FineGrainedFP8Config(**of_file, dequantize=True)
    elif quantization["quant_method"] == "compressed-tensors":
        options["quantization_config"] = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    plain = LlamaForCausalLM(LlamaConfig(**SHAPE))  # never in bf16, which would round the frequencies of RoPE
    tensors = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None:
            continue
        if hasattr(weight, "quant_state"):
            weight = bnb.dequantize_4bit(weight.data, weight.quant_state)
        assert weight.dtype == torch.bfloat16, (name, weight.dtype)
        tensors[f"{name}.weight"] = weight.detach()
    plain.load_state_dict(tensors)
    return plain


def golden_of(folder):
    model = dequantized(folder)
    torch.manual_seed(1)
    tokens = torch.randint(0, SHAPE["vocab_size"], (2, 24))
    golden = {"tokens": tokens, "logits": model(tokens).logits.detach()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for _ in range(10):
        logits = model(tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    golden["losses"] = torch.tensor(losses)
    name = "model.layers.0.mlp.up_proj.weight"
    stored = load_file(folder / "model.safetensors")
    if f"{name}.absmax" in stored:
        golden["codes"] = stored[name].view(SHAPE["intermediate_size"], -1)
    return golden


WRITERS = {
    "nf4": lambda folder: write_bitsandbytes(folder, double=False),
    "nf4-double": lambda folder: write_bitsandbytes(folder, double=True),
    "fp8-block": lambda folder: write_fp8(folder, AS_QWEN),
    "fp8-tensor": lambda folder: write_fp8(folder, AS_MISTRAL),
    "fp8-row": write_compressed_tensors,
}

if __name__ == "__main__":
    for name, write in WRITERS.items():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write(folder)
        golden = golden_of(folder)
        save_file(golden, folder / "golden.safetensors")
        print(name, golden["losses"].tolist())
