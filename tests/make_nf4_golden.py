"""Writes tests/goldens-nf4.safetensors: random weights and the NF4 codes that bitsandbytes (0.50.2) gives them."""

from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from safetensors.torch import save_file

tensors = {}
for dtype in (torch.float32, torch.bfloat16):
    name = str(dtype).removeprefix("torch.")
    weight = (torch.randn(48, 512, generator=torch.Generator().manual_seed(2)) * 0.02).to(dtype)
    weight[0, :64] = 0
    tensors[f"weight.{name}"] = weight
    tensors[f"codes.{name}"] = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")[0].flatten()
save_file(tensors, Path(__file__).parent / "goldens-nf4.safetensors")
