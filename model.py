"""The decoder of Llama 2/3, Mistral, Qwen2/2.5 and Qwen3, its loss, LoRA, and the files it is read from and written to.

One class per piece, vanilla modules, Hugging Face's parameter names (`model.layers.0.self_attn.q_proj.weight`), so
reading and writing checkpoints needs no mapping table. The families differ in four facts of `Config`: biases on q, k, v
(Qwen2), RMSNorm on each head of q and k before RoPE (Qwen3), a head tied to the embedding, and RoPE's scaling.

The loss is part of the model: logits are the largest tensor of a fine-tune (8,192 tokens x 128,256 words x 4 bytes =
3.9 GiB, and autograd would keep two of them), so `LMHead.forward` returns the summed loss and never the logits.
`ChunkedCrossEntropy` computes the gradient in the forward, chunk by chunk: 4*V*D FLOP a token against 6*V*D for
recomputing, C*V*6 bytes alive, and tokens that carry no target never reach the head (Liger, arXiv:2410.10989; Cut
Cross-Entropy, arXiv:2411.09009). Given up: a second derivative.

Packed rows hold several documents. `spans` lists their (start, stop) in the flattened [B*T] tokens, on the host, and
attention runs inside each span: no mask tensor, no T*T bytes, no way to see a neighbour. On a GPU that is one kernel for
all documents, on a CPU a call for each.

Shapes: B rows, T tokens per row, D model, F mlp, H query heads, G kv heads, K head size, V vocabulary, R LoRA rank,
N tokens of a micro-batch or rows of a matrix, S supervised tokens, C tokens in a loss chunk. x is the residual stream.
"""

import contextlib
import functools
import inspect
import itertools
import json
import math
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from tqdm import tqdm

import nf4

IGNORE = -100  # a target that is not trained on, as in every Hugging Face dataset
HEAD_ROWS = 128  # the head works on a multiple of so many tokens, or on all
HEAD = "lm_head.weight"

# ---------------------------------------------------------------- config

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA31 = {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA32 = {**LLAMA31, "factor": 32.0}
# name: Hub id, model_type, V, D, F, layers, H, G, K, theta, rope scaling, tied, positions
PRESETS = {
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", "llama", 32000, 4096, 11008, 32, 32, 32, 128, 1e4, None, False, 4096),
    "llama-2-13b": ("meta-llama/Llama-2-13b-hf", "llama", 32000, 5120, 13824, 40, 40, 40, 128, 1e4, None, False, 4096),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf", "llama", 32000, 8192, 28672, 80, 64, 8, 128, 1e4, None, False, 4096),
    "llama-3-8b": ("meta-llama/Meta-Llama-3-8B", "llama", 128256, 4096, 14336, 32, 32, 8, 128, 5e5, None, False, 8192),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B", "llama", 128256, 4096, 14336, 32, 32, 8, 128, 5e5, LLAMA31, False, 131072),
    "llama-3.1-70b": (
        "meta-llama/Llama-3.1-70B", "llama", 128256, 8192, 28672, 80, 64, 8, 128, 5e5, LLAMA31, False, 131072),
    "llama-3.1-405b": (
        "meta-llama/Llama-3.1-405B", "llama", 128256, 16384, 53248, 126, 128, 8, 128, 5e5, LLAMA31, False, 131072),
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", "llama", 128256, 2048, 8192, 16, 32, 8, 64, 5e5, LLAMA32, True, 131072),
    "llama-3.2-3b": (
        "meta-llama/Llama-3.2-3B", "llama", 128256, 3072, 8192, 28, 24, 8, 128, 5e5, LLAMA32, True, 131072),
    "llama-3.3-70b": (
        "meta-llama/Llama-3.3-70B-Instruct", "llama", 128256, 8192, 28672, 80, 64, 8, 128, 5e5, LLAMA31, False, 131072),
    "mistral-7b": ("mistralai/Mistral-7B-v0.3", "mistral", 32768, 4096, 14336, 32, 32, 8, 128, 1e6, None, False, 32768),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B", "qwen2", 151936, 896, 4864, 24, 14, 2, 64, 1e6, None, True, 32768),
    "qwen2.5-1.5b": ("Qwen/Qwen2.5-1.5B", "qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 1e6, None, True, 131072),
    "qwen2.5-3b": ("Qwen/Qwen2.5-3B", "qwen2", 151936, 2048, 11008, 36, 16, 2, 128, 1e6, None, True, 32768),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", "qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 1e6, None, False, 131072),
    "qwen2.5-14b": ("Qwen/Qwen2.5-14B", "qwen2", 152064, 5120, 13824, 48, 40, 8, 128, 1e6, None, False, 131072),
    "qwen2.5-32b": ("Qwen/Qwen2.5-32B", "qwen2", 152064, 5120, 27648, 64, 40, 8, 128, 1e6, None, False, 131072),
    "qwen2.5-72b": ("Qwen/Qwen2.5-72B", "qwen2", 152064, 8192, 29568, 80, 64, 8, 128, 1e6, None, False, 131072),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", "qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 1e6, None, True, 40960),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", "qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 1e6, None, True, 40960),
    "qwen3-4b": ("Qwen/Qwen3-4B", "qwen3", 151936, 2560, 9728, 36, 32, 8, 128, 1e6, None, True, 40960),
    "qwen3-8b": ("Qwen/Qwen3-8B", "qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 1e6, None, False, 40960),
    "qwen3-14b": ("Qwen/Qwen3-14B", "qwen3", 151936, 5120, 17408, 40, 40, 8, 128, 1e6, None, False, 40960),
    "qwen3-32b": ("Qwen/Qwen3-32B", "qwen3", 151936, 5120, 25600, 64, 64, 8, 128, 1e6, None, False, 40960),
}
FAMILIES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM"}


def preset_config(name):
    """The published shapes of a preset as the contents of a config.json, RoPE in both spellings."""
    _, family, V, D, F_, layers, H, G, K, theta, scaling, tied, positions = PRESETS[name]
    return {
        "architectures": [FAMILIES[family]], "model_type": family, "vocab_size": V, "hidden_size": D,
        "intermediate_size": F_, "num_hidden_layers": layers, "num_attention_heads": H, "num_key_value_heads": G,
        "head_dim": K, "hidden_act": "silu", "rms_norm_eps": 1e-6 if family.startswith("qwen") else 1e-5,
        "rope_theta": theta, "rope_scaling": scaling, "tie_word_embeddings": tied,
        "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
        "max_position_embeddings": positions, "sliding_window": None, "torch_dtype": "bfloat16", "dtype": "bfloat16",
    }


@dataclass(frozen=True)
class Config:
    """What the model needs of a config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict  # {"rope_type": "default" | "linear" | "llama3", ...}
    max_position_embeddings: int
    sliding_window: int | None  # attention equals the full one up to this many tokens
    tie_word_embeddings: bool
    initializer_range: float
    dtype: torch.dtype  # of the checkpoint


# A key here, unless absent, null or equal to the value, asks for something that the model does not compute.
REFUSED = {"hidden_act": "silu", "mlp_bias": False, "attention_dropout": 0, "pretraining_tp": 1,
           "use_sliding_window": False, "quantization_config": None, "num_experts": 0, "num_local_experts": 0,
           "partial_rotary_factor": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None}
LIMITS = {"vocab_size": 1 << 20, "hidden_size": 1 << 16, "intermediate_size": 1 << 18, "num_hidden_layers": 1 << 10,
          "num_attention_heads": 1 << 10, "num_key_value_heads": 1 << 10, "head_dim": 1 << 10,
          "max_position_embeddings": 1 << 30}


def parse_config(raw, where="config.json"):
    """The dict of a config.json, in transformers 4's or 5's spelling -> Config. ValueError names the offending key."""

    def refuse(key, why):
        raise ValueError(f"{where}: {key} = {json.dumps(raw.get(key))[:200]}: {why}")

    family = raw.get("model_type")
    if family not in FAMILIES:
        refuse("model_type", f"not one of {', '.join(FAMILIES)}")
    for key, value in REFUSED.items():
        if raw.get(key) not in (None, value):
            fix = "use the unquantized model and --qlora" if key == "quantization_config" else f"only {value} works"
            refuse(key, f"not implemented, {fix}")
    if family != "qwen2" and raw.get("attention_bias"):
        refuse("attention_bias", f"biases on q, k, v exist in qwen2 only, not in {family}")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        refuse("layer_types", "only full_attention is implemented")
    if raw.get("architectures") and FAMILIES[family] not in raw["architectures"]:
        refuse("architectures", f"only {FAMILIES[family]} is implemented for {family}")

    ints = {key: raw.get(key) for key in LIMITS}
    if family == "llama" and ints["num_key_value_heads"] is None:  # Llama-2 7B and 13B
        ints["num_key_value_heads"] = ints["num_attention_heads"]
    if family != "qwen3" and ints["head_dim"] is None and isinstance(ints["hidden_size"], int):
        if not isinstance(ints["num_attention_heads"], int) or ints["num_attention_heads"] < 1:
            refuse("num_attention_heads", "expected a positive integer")
        if ints["hidden_size"] % ints["num_attention_heads"]:
            refuse("num_attention_heads", f"does not divide hidden_size {ints['hidden_size']}; give head_dim")
        ints["head_dim"] = ints["hidden_size"] // ints["num_attention_heads"]
    for key, value in ints.items():
        if type(value) is not int or not 0 < value <= LIMITS[key]:
            refuse(key, f"expected an integer from 1 to {LIMITS[key]}")
    if ints["num_attention_heads"] % ints["num_key_value_heads"]:
        refuse("num_key_value_heads", f"does not divide num_attention_heads {ints['num_attention_heads']}")
    if ints["head_dim"] % 2:
        refuse("head_dim", "RoPE needs an even number")

    eps = raw.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or not 0 < eps < 1:
        refuse("rms_norm_eps", "expected a number between 0 and 1")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"  # transformers 5 renamed it; `dtype` wins
    if dtype not in ("float32", "float16", "bfloat16"):
        refuse("dtype" if raw.get("dtype") else "torch_dtype", "expected float32, float16 or bfloat16")
    window = raw.get("sliding_window", 4096) if family == "mistral" else None  # transformers' default is 4096
    if window is not None and (type(window) is not int or window < 1):
        refuse("sliding_window", "expected a positive integer or null")
    if raw.get("tie_word_embeddings") not in (None, True, False):
        refuse("tie_word_embeddings", "expected true or false")
    std = raw.get("initializer_range", 0.02)
    if not isinstance(std, int | float) or not 0 <= std < math.inf:
        refuse("initializer_range", "expected a number")
    theta, scaling = parse_rope(raw, family, ints, refuse)
    return Config(
        model_type=family, **ints, rms_norm_eps=float(eps), rope_theta=theta, rope_scaling=scaling,
        sliding_window=window,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        initializer_range=float(std), dtype=getattr(torch, dtype),
    )


def parse_rope(raw, family, ints, refuse):
    """(theta, scaling) from `rope_theta` + `rope_scaling` or transformers 5's `rope_parameters`, which wins."""
    key = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    rope = raw.get(key) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        refuse(key, "expected one flat object; rope parameters per layer type are not implemented")
    scaling = {"rope_type": rope.get("rope_type") or rope.get("type") or "default"}
    other = raw.get("rope_scaling")  # added by hand to a file of transformers 5, which has the former
    if isinstance(other, dict):
        said = {"rope_type": other.get("type"), **other, "type": None}
        if any(value not in (None, {**rope, **scaling}.get(part)) for part, value in said.items()):
            refuse("rope_scaling", f"rope_parameters say {json.dumps(rope)[:200]}: leave one of the two out")
    needs = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    if scaling["rope_type"] not in needs:
        refuse(key, f"rope_type {scaling['rope_type']!r} is not one of {', '.join(needs)}")
    for part in needs[scaling["rope_type"]]:
        if not isinstance(rope.get(part), int | float) or not 0 < rope[part] < math.inf:
            refuse(key, f"{scaling['rope_type']} needs a positive number for {part!r}")
        scaling[part] = float(rope[part])
    if scaling["rope_type"] == "llama3":
        original = rope.get("original_max_position_embeddings") or ints["max_position_embeddings"]
        if type(original) is not int or original < 1:
            refuse(key, "llama3 needs a positive integer for 'original_max_position_embeddings'")
        if scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
            refuse(key, "llama3 needs high_freq_factor above low_freq_factor")
        scaling["original_max_position_embeddings"] = original
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        # Old Llama-2 files leave out their 10000. Anywhere else a default would train on wrong positions without a
        # word: transformers 4 reads 10000 from every file that transformers 5 wrote (vllm #42624).
        if family in ("qwen2", "qwen3") or scaling["rope_type"] == "llama3" or ints["vocab_size"] >= 100_000:
            refuse("rope_theta", "missing, and this family has no safe default: copy it from the model's page")
        theta = 10000.0
    if not isinstance(theta, int | float) or not 0 < theta < math.inf:
        refuse("rope_theta", "expected a positive number")
    return float(theta), scaling


# ---------------------------------------------------------------- blocks


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)  # float32 inside


class Linear(nn.Linear):
    """nn.Linear whose weights may be stored in another dtype (float32 masters) than it computes in."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def rope_table(positions_BT, config):
    """positions [B, T] -> (cos, sin), each [B, T, 1, K/2] float32. bf16 angles go wrong beyond a few hundred tokens."""
    scaling, half = config.rope_scaling, torch.arange(0, config.head_dim, 2, device=positions_BT.device)
    freq = 1.0 / config.rope_theta ** (half.float() / config.head_dim)
    if scaling["rope_type"] == "linear":
        freq = freq / scaling["factor"]
    if scaling["rope_type"] == "llama3":  # long wavelengths are stretched, short ones kept, those between blended
        wavelength, original = 2 * math.pi / freq, scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((original / wavelength - low) / (high - low)).clamp(0, 1)
        freq = keep * freq + (1 - keep) * freq / scaling["factor"]
    angle = positions_BT.float()[..., None, None] * freq
    return angle.cos(), angle.sin()


def rotate(q_BTHK, rope):
    """Hugging Face's pairing: element i turns with element i + K/2."""
    (cos, sin), (a, b) = rope, q_BTHK.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(q_BTHK.dtype)


class Packed(NamedTuple):
    """What attention on a GPU needs to know of packed rows, built once a batch on the host."""

    spans: list  # (start, stop) of the documents in the flattened tokens
    bounds: torch.Tensor  # int32 on the device: where they start and end, with the padding between as documents of its own
    longest: int  # of those; an int, so that no kernel launch waits for the device


# torch 2.11 shares key heads between query heads unasked, later ones want to be asked
GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def pack_spans(spans, n_tokens):
    """-> Packed, its bounds on the CPU."""
    bounds = torch.tensor(sorted({0, n_tokens, *itertools.chain(*spans)}), dtype=torch.int32)
    return Packed(spans, bounds, int(bounds.diff().max()))


class Split(NamedTuple):
    """The documents of rows that the ranks of a group share, each an equal piece of the flattened tokens."""

    spans: list | Packed  # of all the pieces, one after the other
    group: dist.ProcessGroup


class AllToAll(torch.autograd.Function):
    """[S, ...] -> [S, ...] on the S ranks of a group: row i goes to rank i, and row i of the result came from there. Done
    twice it changes nothing, so the gradient goes the same way."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, out = group, torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad.contiguous(), ctx.group), None


def shared_kv_heads(n_heads, n_ranks):
    """Key heads of all ranks together, copies counted: the fewest that can be dealt out as evenly as the query heads."""
    return math.lcm(n_heads, n_ranks)


def attend_split(q_BTHK, k_BTGK, v_BTGK, split):
    """attend() of rows whose tokens lie on several ranks (Ulysses, arXiv:2309.14509): one all-to-all turns a piece of the
    tokens with all heads into all tokens with a share of the heads, one turns the result back. What a rank sends, two
    bytes x tokens x (2*H + 2*G) * K / S, falls with the ranks as its products do; the pieces need no mask of their own.
    """
    (B, T, H, K), S = q_BTHK.shape, split.group.size()
    copies = shared_kv_heads(k_BTGK.shape[2], S) // k_BTGK.shape[2]  # of a key head that query heads of several ranks look at
    if copies > 1:
        k_BTGK, v_BTGK = (t.repeat_interleave(copies, 2) for t in (k_BTGK, v_BTGK))
    parts = [t.reshape(B * T, S, -1, K).transpose(0, 1) for t in (q_BTHK, k_BTGK, v_BTGK)]
    qkv = AllToAll.apply(torch.cat(parts, 2), split.group).flatten(0, 1)
    q, k, v = (t[None] for t in qkv.split([part.shape[2] for part in parts], 1))
    out = AllToAll.apply(attend(q, k, v, split.spans).view(S, B * T, -1), split.group)
    return out.transpose(0, 1).reshape(B, T, H * K)


@functools.cache
def takes_documents(dtype, K, device):
    """Whether torch's FlashAttention can: 16 bits, heads of whole 8 numbers up to 256, an Ampere card or newer."""
    return dtype is not torch.float32 and K % 8 == 0 and K <= 256 and torch.cuda.get_device_capability(device) >= (8, 0)


def attend(q_BTHK, k_BTGK, v_BTGK, spans):
    """Causal attention inside each (start, stop) of the flattened B*T tokens; outside (padding) any finite numbers.

    Packed spans run as one FlashAttention over all documents, where it can.
    """
    if isinstance(spans, Split):
        return attend_split(q_BTHK, k_BTGK, v_BTGK, spans)
    B, T, H, K = q_BTHK.shape
    q, k, v = (t.reshape(B * T, -1, K) for t in (q_BTHK, k_BTGK, v_BTGK))
    if isinstance(spans, Packed):
        if takes_documents(q.dtype, K, q.device):
            lengths = spans.bounds, spans.bounds, spans.longest, spans.longest
            return varlen_attn(q, k, v, *lengths, window_size=(-1, 0), **GQA).view(B, T, H * K)
        spans = spans.spans
    if q.is_cuda and q.dtype is torch.float32 and k.shape[1] != H:  # in float32 only the kernel that holds all scores shares
        k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    sdpa = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=k.shape[1] != H)
    length = spans[0][1] - spans[0][0] if spans else 0
    if all(stop - start == length for start, stop in spans) and length * len(spans) == B * T:
        q, k, v = (t.view(len(spans), length, -1, K).transpose(1, 2) for t in (q, k, v))
        return sdpa(q, k, v).transpose(1, 2).reshape(B, T, H * K)  # equal documents: one call
    # oneDNN compiles its bf16 kernels for each length and keeps them, 1 GB after 500 lengths. Up to 31 tokens more bound
    # that; they are later ones, which causal attention hides from the document, and their outputs are cut off.
    step = 32 if q.device.type == "cpu" else 1
    pieces, at = [], 0
    for start, stop in spans:
        end = min(start - (start - stop) // step * step, B * T)
        pieces.append(q.new_zeros(start - at, H, K))
        pieces.append(sdpa(*(t[start:end].transpose(0, 1)[None] for t in (q, k, v)))[0].transpose(0, 1)[: stop - start])
        at = stop
    pieces.append(q.new_zeros(B * T - at, H, K))
    return torch.cat(pieces).view(B, T, H * K)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.head_dim
        bias = c.model_type == "qwen2"
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=bias)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=bias)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=bias)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        qk_norm = c.model_type == "qwen3"
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if qk_norm else nn.Identity()

    def heads(self, x, rope):
        """-> q_BTHK, k_BTGK, v_BTGK."""
        B, T, _ = x.shape
        # norm before rotation: torchtune shipped Qwen3 the other way round (torchtune #2822)
        q_BTHK = rotate(self.q_norm(self.q_proj(x).view(B, T, -1, self.head_dim)), rope)
        k_BTGK = rotate(self.k_norm(self.k_proj(x).view(B, T, -1, self.head_dim)), rope)
        return q_BTHK, k_BTGK, self.v_proj(x).view(B, T, -1, self.head_dim)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=False)

    def hidden(self, x):
        return F.silu(self.gate_proj(x)) * self.up_proj(x)


class Block(nn.Module):
    """Its methods before and after attention are what --compile compiles: no list of documents reaches them, so packed
    rows compile once. Where it runs again in the backward the last product stays out: that can end before it."""

    def __init__(self, c):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)
        self.recomputing = False  # set by activation checkpointing while it runs the forward again

    def forward(self, x, rope, spans):
        return self.after_attention(x, attend(*self.heads(x, rope), spans))

    def heads(self, x, rope):
        return self.self_attn.heads(self.input_layernorm(x), rope)

    def after_attention(self, x, out):
        return self.feed_forward(self.add_attention(x, out))

    def add_attention(self, x, out):
        return x + self.self_attn.o_proj(out)

    def hidden(self, x):
        return self.mlp.hidden(self.post_attention_layernorm(x))

    def feed_forward(self, x):
        return x + self.mlp.down_proj(self.hidden(x))


class TiledFeedForward(torch.autograd.Function):
    """x -> x + mlp(norm(x)) in tiles of tokens, forward and backward: 6*F values a token live for one tile and not for
    the row (ALST, arXiv:2506.13996; 8B at 128k tokens: 0.7 GiB for tiles of 4,096 in place of 21 GiB).

    The backward runs each tile forward again, with gradients. Under activation checkpointing that replaces the block's
    own recomputation, which needs x and not the result: `recomputing` skips it, so the MLP runs forward twice in all
    and not three times (DeepSpeed's TiledMLP under checkpointing). Gradients of the weights are added up in float32.
    """

    @staticmethod
    def forward(ctx, x_ND, function, tile, recomputing, *weights):
        ctx.save_for_backward(x_ND)
        ctx.rest = function, tile, weights
        if recomputing:
            return x_ND.new_empty(()).expand_as(x_ND)  # nobody reads it: recomputation ends when x_ND is saved
        ctx.rng = random_state(x_ND).get_rng_state()
        out_ND = torch.empty_like(x_ND)
        for x, out in zip(x_ND.detach().split(tile), out_ND.split(tile)):
            out.copy_(function(x))
        return out_ND

    @staticmethod
    def backward(ctx, grad_ND):
        (x_ND,), (function, tile, weights) = ctx.saved_tensors, ctx.rest
        grad_x_ND, sums = torch.empty_like(x_ND), None
        generator = random_state(x_ND)
        now = generator.get_rng_state()
        generator.set_rng_state(ctx.rng)  # the dropout masks of the forward
        for x, grad, grad_x in zip(x_ND.detach().split(tile), grad_ND.split(tile), grad_x_ND.split(tile)):
            with torch.enable_grad():
                x.requires_grad_()
                grad_tile, *grads = torch.autograd.grad(function(x), (x, *weights), grad)
            grad_x.copy_(grad_tile)
            if sums is None:
                sums = grads if len(x) == len(x_ND) else [g.float() for g in grads]
            else:
                sums = [s.add_(g) for s, g in zip(sums, grads)]
        generator.set_rng_state(now)
        return grad_x_ND, None, None, None, *(s.to(w.dtype) for s, w in zip(sums, weights))


def random_state(tensor):
    """Module whose get_rng_state and set_rng_state are those of the tensor's device."""
    return torch.cuda if tensor.device.type == "cuda" else torch


def tile_feed_forward_(model, tile):
    """Runs the MLP of every block, with the norm and the residual around it, `tile` tokens at a time."""

    def feed_forward(block, plain, x):
        # looked up in each forward: under FSDP2 the modules hold other tensors by then
        weights = [p for part in (block.post_attention_layernorm, block.mlp) for p in part.parameters() if p.requires_grad]
        out = TiledFeedForward.apply(x.flatten(0, 1), plain, tile, block.recomputing, *weights)
        return out.view_as(x)

    for block in model.model.layers:
        block.feed_forward = functools.partial(feed_forward, block, block.feed_forward)


# ---------------------------------------------------------------- loss


def softmax_gradient(logits_CV, targets_C1, with_grad):
    """-> (summed cross-entropy, its gradient softmax - one-hot in the dtype of the logits, or None). Rows whose target is
    IGNORE have neither. Works in place on one float32 copy."""
    dtype, logits_CV = logits_CV.dtype, logits_CV.float()
    real_C1, targets_C1 = (targets_C1 != IGNORE).float(), targets_C1.clamp_min(0)
    logits_CV -= logits_CV.amax(-1, keepdim=True)
    target_logit_C1 = logits_CV.gather(-1, targets_C1)
    total_C1 = logits_CV.exp_().sum(-1, keepdim=True)
    loss = ((total_C1.log() - target_logit_C1) * real_C1).sum()
    if not with_grad:
        return loss, None
    logits_CV *= real_C1 / total_C1  # softmax, in place
    logits_CV.scatter_add_(-1, targets_C1, -real_C1)
    return loss, logits_CV.to(dtype)


def softmax_gradient_fused(logits_CV, targets_C1, with_grad):
    """The same for torch.compile: two passes over the logits, no copy in float32, and the targets' own gradient, which is
    small where the model is sure, put in its place from float32."""
    real_C1, targets_C1 = (targets_C1 != IGNORE).float(), targets_C1.clamp_min(0)
    largest_C1 = logits_CV.amax(-1, keepdim=True).float()
    shifted_CV = logits_CV.float() - largest_C1
    total_C1 = shifted_CV.exp().sum(-1, keepdim=True)
    target_logit_C1 = logits_CV.gather(-1, targets_C1).float() - largest_C1
    loss = ((total_C1.log() - target_logit_C1) * real_C1).sum()
    if not with_grad:
        return loss, None
    softmax_CV = (shifted_CV.exp() * (real_C1 / total_C1)).to(logits_CV.dtype)
    target_grad_C1 = (target_logit_C1.exp() / total_C1 - 1) * real_C1
    return loss, softmax_CV.scatter(-1, targets_C1, target_grad_C1.to(logits_CV.dtype))


class ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of h_SD @ w_VD.T against targets_S, float32, gradients computed in the forward.

    Alive at once: one chunk of logits (C*V*6 bytes in bf16, C*V*4 in float32) and, if the head trains, the gradient of it;
    that of several chunks is added up in float32 (V*D*4 bytes): sums of 16-bit chunks in 16 bits would lose the small
    ones. S = 0 is a zero with zero gradients, so a rank without a supervised token still takes part in every collective
    of the backward.
    """

    @staticmethod
    def forward(ctx, h_SD, w_VD, targets_S, chunk, with_grad, softmax_gradient=softmax_gradient):
        loss_sum = torch.zeros((), dtype=torch.float32, device=h_SD.device)
        grad_h = torch.empty_like(h_SD) if with_grad and ctx.needs_input_grad[0] else None
        trained, grad_w = with_grad and ctx.needs_input_grad[1], None
        for start in range(0, len(h_SD), chunk):
            h_CD, targets_C1 = h_SD[start : start + chunk], targets_S[start : start + chunk, None]
            loss, grad_logits_CV = softmax_gradient(h_CD @ w_VD.T, targets_C1, grad_h is not None or trained)
            loss_sum += loss
            if grad_logits_CV is None:
                continue
            if grad_h is not None:
                torch.mm(grad_logits_CV, w_VD, out=grad_h[start : start + chunk])
            if trained:
                product = grad_logits_CV.T @ h_CD
                if len(h_SD) > chunk:  # several terms: added up in float32
                    grad_w = product.float() if grad_w is None else grad_w.add_(product)
                else:
                    grad_w = product
                del product
            del grad_logits_CV  # or it would stay alive beside the next chunk's logits
        if trained:
            grad_w = torch.zeros_like(w_VD) if grad_w is None else grad_w.to(w_VD.dtype)
        ctx.grads = grad_h, grad_w
        return loss_sum

    @staticmethod
    def backward(ctx, grad_loss):
        if ctx.grads is None:
            raise RuntimeError("chunked cross-entropy: backward ran twice, its gradients were used up by the first")
        (grad_h, grad_w), ctx.grads = ctx.grads, None  # scaled in place: a copy of grad_w would cost V*D
        grads = [None if g is None else g.mul_(grad_loss.to(g.dtype)) for g in (grad_h, grad_w)]
        return *grads, None, None, None, None


class LMHead(nn.Module):
    """The head and the loss in one module, because under FSDP2 its weight exists only inside this forward."""

    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        self.chunk = 1024  # tokens; 0 computes all logits at once and leaves the gradient to autograd
        self.softmax_gradient = softmax_gradient

    def forward(self, x, targets_BT=None, keep_S=None):
        """Summed loss over the supervised tokens `keep_S` (flat indices into B*T); without targets float32 logits."""
        w_VD = self.weight.to(x.dtype)
        if targets_BT is None:
            return F.linear(x, w_VD).float()
        # The indices come from the host with the batch: nonzero() on the device would wait for it. The last token, without its
        # target, fills up the rows: else every batch is of another size, and allocators and oneDNN keep something for each.
        S = len(keep_S)
        keep_S = torch.cat([keep_S, keep_S[-1:].expand(min(-S % HEAD_ROWS, targets_BT.numel() - S))])
        h_SD, targets_S = x.flatten(0, 1)[keep_S], targets_BT.flatten()[keep_S]
        targets_S[S:] = IGNORE
        if self.chunk:
            return ChunkedCrossEntropy.apply(h_SD, w_VD, targets_S, self.chunk, torch.is_grad_enabled(),
                                             self.softmax_gradient)
        return F.cross_entropy(F.linear(h_SD, w_VD).float(), targets_S, reduction="sum")


class Transformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.compute_dtype = torch.float32
        self.activation_hooks = None  # a context manager around the blocks: train.py's activation offload
        self.sequence_group = None  # the ranks that share the rows of a batch: --sequence_parallel
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(c.vocab_size, c.hidden_size),
            "layers": nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers)),
            "norm": RMSNorm(c.hidden_size, c.rms_norm_eps),
        })
        self.lm_head = LMHead(c)
        self.tie_()

    def tie_(self):
        """Makes head and embedding one parameter where the config says so; to_empty() makes two of it again."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_BT, targets_BT=None, positions_BT=None, spans=None, keep_S=None):
        """tokens [B, T] -> summed loss over the supervised tokens; without targets logits [B, T, V].

        positions restart at 0 in every document; spans are the documents' (start, stop) in the flattened tokens. With a
        sequence_group these are this rank's piece of the tokens and the spans of the whole; without positions, tokens
        are whole rows all the same.
        """
        B, T = tokens_BT.shape
        if positions_BT is not None and self.sequence_group is not None:
            spans = Split(spans, self.sequence_group)
        if positions_BT is None:
            positions_BT = torch.arange(T, device=tokens_BT.device).expand(B, T)
            spans = [(row * T, row * T + T) for row in range(B)]
        if targets_BT is not None and keep_S is None:
            keep_S = (targets_BT.flatten() != IGNORE).nonzero().flatten()
        rope = rope_table(positions_BT, self.config)
        x = self.model.embed_tokens(tokens_BT).to(self.compute_dtype)
        *blocks, last = self.model.layers
        with self.activation_hooks or contextlib.nullcontext():
            for block in blocks:
                # rope is a tuple: of a block's arguments, checkpointing (and the offload under it) saves bare tensors only
                x = block(x, rope, spans)
        x = last(x, rope, spans)  # the backward wants its input at once: not worth a trip to the host
        return self.lm_head(self.model.norm(x), targets_BT, keep_S)


@torch.no_grad()
@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])  # cuDNN plans for each length
def generate(model, tokens, n, stop, device):
    """Greedy continuation: list of token ids -> list of at most n more, ending before an id in `stop`.

    The whole prefix runs again for every token: no cache to keep, and under FSDP2 every rank makes the same calls.
    """
    tokens, start = list(tokens), len(tokens)
    while len(tokens) < start + n:
        logits = model(torch.tensor([tokens], device=device))
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] in stop:
            return tokens[start:-1]
    return tokens[start:]


# ---------------------------------------------------------------- LoRA

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT_PREFIX = "base_model.model."  # PEFT's name of a tensor is this and ours


class LoRA:
    """A linear layer's other half: y = W x + (alpha / rank) B A x (arXiv:2106.09685), with PEFT's names below the layer."""

    def forward(self, x):
        # LoRA's product first, the frozen base last: the base saves nothing that its backward lacks, so checkpointing's
        # early stop ends the recomputation of a block before down_proj, a fifth of the block's FLOP.
        delta = self.lora_B(self.lora_A(F.dropout(x, self.lora_dropout, self.training)) * self.lora_scale)
        return delta + super().forward(x)


class LoRALinear(LoRA, Linear):
    pass


class LoRANF4Linear(LoRA, nf4.NF4Linear):
    pass


def add_lora_(model, rank, alpha, dropout, targets):
    """Gives the linear layers of the blocks named in `targets` adapters, `lora_A.weight` [R, in] and `lora_B.weight`
    [out, R], and freezes all else. The layers change class: torch.compile, which looks at types, compiles one block."""
    model.requires_grad_(False)
    for name, linear in list(model.model.layers.named_modules()):
        if not isinstance(linear, nn.Linear | nf4.NF4Linear) or name.rsplit(".")[-1] not in targets:
            continue
        with torch.device(next(linear.parameters()).device):
            linear.lora_A = Linear(linear.in_features, rank, bias=False)
            linear.lora_B = Linear(rank, linear.out_features, bias=False)
        linear.lora_scale, linear.lora_dropout = alpha / rank, dropout
        linear.__class__ = LoRANF4Linear if isinstance(linear, nf4.NF4Linear) else LoRALinear


# ---------------------------------------------------------------- reading weights


class Checkpoint:
    """The safetensors files of a folder, read row by row. `tensors` is {name: (file, shape, dtype)}.

    ValueError where a file is missing, cut short, in another format, or names a tensor twice.
    """

    DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

    def __init__(self, folder, single="model.safetensors"):
        folder = Path(folder)
        index = folder / f"{single}.index.json"
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ValueError(f"{index}: no 'weight_map' in it")
            for name, file in weight_map.items():
                if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file, re.ASCII):
                    raise ValueError(f"{index}: {name} -> {file!r}: expected a plain file name in the same folder")
            files = sorted(set(weight_map.values()))
        elif (folder / single).exists():
            weight_map, files = None, [single]
        elif list(folder.glob("*.bin")) or list(folder.glob("*.pth")):
            raise ValueError(f"{folder}: only .bin/.pth weights, which can run code when loaded. Convert them once:\n"
                             "  model.save_pretrained(folder) in transformers writes safetensors")
        else:
            raise ValueError(f"{folder}: no {single} and no {index.name} in it")

        self.tensors, twice = {}, []
        for file in files:
            if not (folder / file).exists():
                raise ValueError(f"{index}: names {file}, which is not there: the download is incomplete")
            try:
                with safe_open(folder / file, framework="pt") as reader:
                    for name in reader.keys():  # noqa: SIM118
                        part = reader.get_slice(name)
                        twice += [name] * (name in self.tensors)
                        self.tensors[name] = folder / file, tuple(part.get_shape()), part.get_dtype()
            except SafetensorError as error:
                raise ValueError(f"{folder / file}: damaged or cut short ({error}): download it again") from error
        if any("quant_state.bitsandbytes" in name for name in self.tensors):
            raise ValueError(f"{folder}: already quantized by bitsandbytes: use the unquantized model and --qlora")
        other = [f"{name} ({dtype})" for name, (_, _, dtype) in self.tensors.items() if dtype not in self.DTYPES]
        if other:
            raise ValueError(f"{folder}: expected float32, float16 or bfloat16, got {listing(other)}")
        if twice:
            raise ValueError(f"{folder}: tensors stored twice: {listing(twice)}")
        if weight_map is not None and set(weight_map) != set(self.tensors):
            unlike = set(weight_map) ^ set(self.tensors)
            raise ValueError(f"{index}: does not list what the files hold: {listing(unlike)}")

    def dtype(self, name):
        return self.DTYPES[self.tensors[name][2]]

    def rows(self, name, start, stop):
        """Rows [start, stop) of a tensor, on the CPU. The file is mapped for this call only, so that the pages of a
        large file do not pile up in the process (RSS stays flat)."""
        with safe_open(self.tensors[name][0], framework="pt") as reader:
            return reader.get_slice(name)[start:stop].clone()


class RandomWeights:
    """Stands for a Checkpoint where there is none: normal weights, norms of one, biases of zero, by name and row."""

    def __init__(self, model, seed, device):
        self.seed, self.device = seed, device
        self.std, self.saved_dtype = model.config.initializer_range, model.config.dtype
        self.tensors = {name: (None, tuple(p.shape), None) for name, p in model.named_parameters()}

    def dtype(self, name):
        return self.saved_dtype

    def rows(self, name, start, stop):
        shape = self.tensors[name][1]
        if len(shape) == 1:
            return torch.full((stop - start,), float(name.endswith("norm.weight")))
        return random_rows(name, shape[1], start, stop, self.seed, self.device).mul_(self.std)


def random_rows(name, width, start, stop, seed, device, uniform=False):
    """Rows [start, stop) of a random matrix (normal, or uniform in [-1, 1)) that do not depend on who asks for them:
    every 256 rows have a seed of their own, so any sharding sees the same matrix."""
    pieces = []
    for block in range(start // 256, -(-stop // 256)):
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}/{block}".encode()))
        rows = torch.empty(256, width, device=device)
        rows.uniform_(-1, 1, generator=generator) if uniform else rows.normal_(generator=generator)
        pieces.append(rows[max(start - block * 256, 0) : stop - block * 256])
    return torch.cat(pieces)


def check_weights(model, checkpoint, folder):
    """Compares names and shapes of the vanilla model (on meta) with a checkpoint. ValueError lists what differs."""
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}  # a tied head counts once
    found = {name: shape for name, (_, shape, _) in checkpoint.tensors.items()}
    found = {name: shape for name, shape in found.items() if not name.endswith("rotary_emb.inv_freq")}  # old Llama-2
    if model.config.tie_word_embeddings and HEAD in found:
        expected[HEAD] = expected["model.embed_tokens.weight"]  # a duplicate, compared when it is read
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    shapes = [f"{name} is {list(found[name])}, config.json says {list(expected[name])}"
              for name in expected.keys() & found.keys() if found[name] != expected[name]]
    if missing or extra or shapes:
        parts = [("missing", missing), ("unexpected", extra), ("wrong shape", shapes)]
        raise ValueError(f"{folder}: " + "; ".join(f"{what}: {listing(names)}" for what, names in parts if names))


def listing(names):
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def read_json(path):
    """A JSON object from a file. ValueError names the file and the place."""
    try:
        value = json.loads(Path(path).read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number of thousands of digits, endless brackets
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


def mix(x):
    """Index -> 32 well mixed bits (MurmurHash3's finalizer). For an int or an int64 tensor."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = x & 0xFFFFFFFF
        x = (x ^ x >> shift) * factor
    return x


def fingerprint(name, rows, start):
    """A sum modulo 2**64 over the bits of each number times an odd factor of its place: it changes with any number that
    changes, and the ranks' sums over their rows add up to the same, however the rows are cut. Not for security."""
    width = math.prod(rows.shape[1:])
    words_NW = rows.reshape(len(rows), width).view(torch.int16 if rows.itemsize == 2 else torch.int32)
    cols_W, total = mix(torch.arange(width, device=rows.device)) | 1, torch.zeros((), dtype=torch.int64, device=rows.device)
    n = max(1, (1 << 20) // width)  # rows at a time: 8 MiB of int64
    for at in range(0, len(rows), n):
        sums_N = words_NW[at : at + n].long().mul_(cols_W).sum(1)
        places_N = torch.arange(start + at, start + at + len(sums_N), device=rows.device)
        total += (sums_N * (mix(places_N + zlib.crc32(name.encode())) | 1)).sum()
    return int(total)


def local(param):
    """(this rank's rows of a parameter as a plain tensor, its first row in the full one)."""
    if not isinstance(param, DTensor):
        return param.data, 0
    (dim,) = (i for i, placement in enumerate(param.placements) if placement.is_shard(0))
    rows = -(-param.shape[0] // param.device_mesh.size(dim))  # FSDP2 cuts like torch.chunk
    return param.to_local().data, min(rows * param.device_mesh.get_local_rank(dim), param.shape[0])


@torch.no_grad()
def load_weights_(model, source, adapter, seed, device, progress, frozen_only=False):
    """Fills the parameters of a sharded, quantized, adapted model. A rank reads the rows it keeps and no others.

    source: Checkpoint or RandomWeights; adapter: Checkpoint of a PEFT adapter, or None for a fresh one; frozen_only:
    leave out what trains, which comes from a checkpoint of the run. Peak: one tensor's local rows above the model, in
    the checkpoint's dtype (and in float32 on `device` while quantizing). -> the fingerprint of the frozen rows.
    """
    params, total = dict(model.named_parameters()), 0
    for name in tqdm(params, "loading weights", unit="tensor", disable=not progress, leave=False):
        out, start = local(params[name])
        stop = start + out.shape[0]
        if start == stop or name.endswith("weight_scales"):  # an empty shard, or written along with the codes
            continue
        if frozen_only and params[name].requires_grad:
            continue
        if name.endswith("weight_codes"):
            rows = source.rows(name.removesuffix("_codes"), start, stop).to(device)
            total += fingerprint(name, rows, start)
            try:
                codes, scales = nf4.quantize(rows)
            except ValueError as error:
                raise ValueError(f"{name.removesuffix('_codes')}: {error}") from error
            out.copy_(codes)
            local(params[name.removesuffix("codes") + "scales"])[0].copy_(scales)
        elif adapter is not None and ".lora_" in name:
            out.copy_(adapter.rows(PEFT_PREFIX + name, start, stop))
        elif name.endswith("lora_B.weight"):
            out.zero_()
        elif name.endswith("lora_A.weight"):  # PEFT's and torch's default, U(-1/sqrt(in), 1/sqrt(in))
            bound = out.shape[1] ** -0.5
            out.copy_(random_rows(name, out.shape[1], start, stop, seed, "cpu", uniform=True).mul_(bound))
        else:
            rows = source.rows(name, start, stop)
            total += 0 if params[name].requires_grad else fingerprint(name, rows, start)
            out.copy_(rows)
        duplicate = name == "model.embed_tokens.weight" and HEAD not in params and HEAD in source.tensors
        if duplicate and not torch.equal(source.rows(name, start, stop), source.rows(HEAD, start, stop)):
            raise ValueError(f"config.json ties the head to the embedding, but the checkpoint's {HEAD} differs: "
                             "set tie_word_embeddings to false")
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)  # an int64 again, so that ranks can add theirs


# ---------------------------------------------------------------- writing models and adapters

SHARD_BYTES = 5_000_000_000  # of a file; above it an index is written, as transformers does
COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja")


def reshard_(model):
    """Frees what FSDP2 keeps gathered for a backward that will not come: after an evaluation, a sample. Until then the
    modules hold the gathered copies, in the products' dtype, and not the parameters that train."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_tensors(model, trainable_only):
    """Yields (name, full tensor on the CPU). A collective for every sharded parameter: all ranks must iterate."""
    reshard_(model)
    for name, param in model.named_parameters():
        if param.requires_grad or not trainable_only:
            yield name, (param.full_tensor() if isinstance(param, DTensor) else param).detach().cpu()


def merged_tensors(source, names, adapter, scale):
    """Yields (name, W + scale * B A) over the original weights, one at a time, the sum in float32, the dtype W's.

    Into the original 16-bit weights and not the dequantized NF4: this keeps NF4's error out of the merged model.
    """
    for name in names:
        w = source.rows(name, 0, source.tensors[name][1][0])
        stem = name.removesuffix("weight")
        if stem + "lora_A.weight" in adapter:
            delta = adapter[stem + "lora_B.weight"].float() @ adapter[stem + "lora_A.weight"].float()
            w = w.float().add_(delta, alpha=scale)
        yield name, w.to(source.dtype(name))


DTYPE_NAMES = {dtype: name for name, dtype in Checkpoint.DTYPES.items()} | {torch.uint8: "U8"}


class SafetensorsFile:
    """Writes a safetensors file tensor by tensor, in any order: the header, which comes first, is known from `layout`,
    {name: (shape, dtype)}. safetensors' own writer wants all tensors of a file in memory, and copies them there."""

    def __init__(self, path, layout, **metadata):
        header, self.at, end = {"__metadata__": {"format": "pt", **metadata}}, {}, 0  # older transformers ask for "format"
        for name, (shape, dtype) in sorted(layout.items(), key=lambda item: (-item[1][1].itemsize, item[0])):
            start, end = end, end + math.prod(shape) * dtype.itemsize  # wide numbers first: all of them are aligned
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            self.at[name] = start
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.file = open(path, "wb")  # noqa: SIM115
        self.head = len(text).to_bytes(8, "little") + text
        self.file.write(self.head)

    def write(self, name, tensor):
        """-> the bytes, as numpy."""
        self.file.seek(len(self.head) + self.at.pop(name))
        written = tensor.contiguous().flatten().view(torch.uint8).numpy()
        self.file.write(written)
        return written

    def close(self):
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        assert not self.at, f"{self.file.name}: never written: {list(self.at)}"


def save_model(tensors, layout, out, raw_config, tokenizer_folder, config_folder, write):
    """Writes a Hugging Face folder from an iterator of (name, tensor): config and tokenizer files byte for byte,
    weights in files of at most 5 GB, one tensor in memory at a time.

    Every rank iterates, since the iterator may gather shards, and only the one with `write` writes; an error there is
    raised when all have iterated. layout: {name: (shape, dtype)} in the iterator's order.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in layout.items()}
    shards, room = [[]], SHARD_BYTES
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    error = file = None
    tensors = iter(tensors)
    for path, names in zip(files, shards, strict=True):
        for name in names:
            came, tensor = next(tensors)
            assert came == name, f"{came} came, {name} was planned"
            if not write or error:
                continue
            try:
                if name == names[0]:
                    need_space(out, sum(sizes.values()) if path == files[0] else 0)
                    file = SafetensorsFile(out / path, {other: layout[other] for other in names})
                file.write(name, tensor)
                if name == names[-1]:
                    file.close()
            except (OSError, ValueError) as caught:
                error = caught
    if error:
        raise ValueError(f"{out}: not written: {error}")
    if not write:
        return
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if config_folder is not None:
        shutil.copyfile(Path(config_folder) / "config.json", out / "config.json")
    else:
        (out / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")
    for file in COPIED:
        if (Path(tokenizer_folder) / file).exists():
            shutil.copyfile(Path(tokenizer_folder) / file, out / file)


def save_adapter(tensors, out, base, rank, alpha, dropout, targets):
    """Writes adapter_model.safetensors and adapter_config.json as PEFT reads them. tensors: {name: tensor}."""
    need_space(out, sum(t.nbytes for t in tensors.values()))
    layout = {PEFT_PREFIX + name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    file = SafetensorsFile(out / "adapter_model.safetensors", layout)
    for name, tensor in tensors.items():
        file.write(PEFT_PREFIX + name, tensor)
    file.close()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "lora_alpha": alpha,
        "lora_dropout": dropout, "bias": "none", "target_modules": list(targets), "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True, "use_rslora": False, "use_dora": False,
        "modules_to_save": None,
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def open_adapter(folder):
    """A PEFT LoRA adapter -> (Checkpoint, rank, alpha, targets). ValueError for what LoRA here cannot express."""
    config = read_json(Path(folder) / "adapter_config.json")
    wanted = {"peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False, "modules_to_save": None,
              "fan_in_fan_out": False, "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None}
    for key, value in wanted.items():
        if config.get(key, value) not in (value, None):
            raise ValueError(f"{folder}/adapter_config.json: {key} = {config[key]!r} is not implemented, "
                             f"only {value!r}")
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if type(rank) is not int or not 0 < rank <= 4096 or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ValueError(f"{folder}/adapter_config.json: r = {rank!r}, lora_alpha = {alpha!r}: expected numbers")
    if not isinstance(targets, list) or not set(targets) <= set(LORA_TARGETS):
        raise ValueError(f"{folder}/adapter_config.json: target_modules = {targets!r}: expected some of {LORA_TARGETS}")
    return Checkpoint(folder, "adapter_model.safetensors"), rank, alpha, tuple(targets)


def check_adapter(model, adapter, folder):
    """Compares an adapter's names and shapes with the model that carries LoRA layers. ValueError lists the rest."""
    expected = {PEFT_PREFIX + n: tuple(p.shape) for n, p in model.named_parameters() if ".lora_" in n}
    found = {name: shape for name, (_, shape, _) in adapter.tensors.items()}
    unlike = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
    if unlike:
        raise ValueError(f"{folder}: missing, unexpected or of another shape for this model: {listing(unlike)}")


def need_space(folder, n_bytes):
    """ValueError when the disk below `folder` has less than `n_bytes` (and a little) left."""
    free = shutil.disk_usage(folder).free
    if free < n_bytes * 1.01 + (1 << 20):
        raise ValueError(f"{folder}: {n_bytes / 2**30:.3g} GiB to write, {free / 2**30:.3g} GiB free on this disk")
