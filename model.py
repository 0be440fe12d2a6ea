"""The decoder of Llama 2/3, Mistral, Qwen2/2.5 and Qwen3, its loss, LoRA, and the files it is read from and written to.

Vanilla modules with Hugging Face's parameter names, so checkpoints need no mapping table. The families differ in biases
on q, k, v (Qwen2), RMSNorm on each head of q and k (Qwen3), a head tied to the embedding, and RoPE.

The loss is part of the model: logits are the largest tensor of a fine-tune (8,192 tokens x 128,256 words x 4 bytes =
3.9 GiB, and autograd would keep two of them), so `LMHead.forward` returns the summed loss.
`ChunkedCrossEntropy` computes the gradient in the forward, chunk by chunk: 4*V*D FLOP a token against 6*V*D for
recomputing, C*V*6 bytes alive, and tokens without a target never reach the head (Liger, arXiv:2410.10989; Cut
Cross-Entropy, arXiv:2411.09009). Given up: a second derivative.
Attention runs inside the (start, stop) of each packed document: no mask, no T*T bytes, no way to see a neighbour.

B rows, T tokens per row, D model, F mlp, H query heads, G kv heads, K head size, V vocabulary, R LoRA rank, N tokens of
a micro-batch or rows of a matrix, S supervised tokens, C tokens in a loss chunk. x is the residual stream.
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
from dataclasses import make_dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import nf4

IGNORE = -100  # a target that is not trained on, as in every Hugging Face dataset
HEAD_ROWS = 128  # the head works on a multiple of this many tokens, or on all
HEAD = "lm_head.weight"
TINY = Path(__file__).parent / "tests" / "tiny"  # the built-in model

# ---------------------------------------------------------------- config

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA31 = {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192}
# what the presets of one release share: model_type, theta, RoPE scaling, positions
RELEASES = {
    "llama-2": ("llama", 1e4, None, 4096),
    "llama-3": ("llama", 5e5, None, 8192),
    "llama-3.1": ("llama", 5e5, LLAMA31, 131072),
    "llama-3.2": ("llama", 5e5, {**LLAMA31, "factor": 32.0}, 131072),
    "mistral": ("mistral", 1e6, None, 32768),
    "qwen2.5-32k": ("qwen2", 1e6, None, 32768),
    "qwen2.5-128k": ("qwen2", 1e6, None, 131072),
    "qwen3": ("qwen3", 1e6, None, 40960),
}
# name: Hub id, release, V, D, F, layers, H, G, K, tied
PRESETS = {
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", "llama-2", 32000, 4096, 11008, 32, 32, 32, 128, False),
    "llama-2-13b": ("meta-llama/Llama-2-13b-hf", "llama-2", 32000, 5120, 13824, 40, 40, 40, 128, False),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf", "llama-2", 32000, 8192, 28672, 80, 64, 8, 128, False),
    "llama-3-8b": ("meta-llama/Meta-Llama-3-8B", "llama-3", 128256, 4096, 14336, 32, 32, 8, 128, False),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", "llama-3.1", 128256, 4096, 14336, 32, 32, 8, 128, False),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B", "llama-3.1", 128256, 8192, 28672, 80, 64, 8, 128, False),
    "llama-3.1-405b": ("meta-llama/Llama-3.1-405B", "llama-3.1", 128256, 16384, 53248, 126, 128, 8, 128, False),
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", "llama-3.2", 128256, 2048, 8192, 16, 32, 8, 64, True),
    "llama-3.2-3b": ("meta-llama/Llama-3.2-3B", "llama-3.2", 128256, 3072, 8192, 28, 24, 8, 128, True),
    "llama-3.3-70b": ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1", 128256, 8192, 28672, 80, 64, 8, 128, False),
    "mistral-7b": ("mistralai/Mistral-7B-v0.3", "mistral", 32768, 4096, 14336, 32, 32, 8, 128, False),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B", "qwen2.5-32k", 151936, 896, 4864, 24, 14, 2, 64, True),
    "qwen2.5-1.5b": ("Qwen/Qwen2.5-1.5B", "qwen2.5-128k", 151936, 1536, 8960, 28, 12, 2, 128, True),
    "qwen2.5-3b": ("Qwen/Qwen2.5-3B", "qwen2.5-32k", 151936, 2048, 11008, 36, 16, 2, 128, True),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", "qwen2.5-128k", 152064, 3584, 18944, 28, 28, 4, 128, False),
    "qwen2.5-14b": ("Qwen/Qwen2.5-14B", "qwen2.5-128k", 152064, 5120, 13824, 48, 40, 8, 128, False),
    "qwen2.5-32b": ("Qwen/Qwen2.5-32B", "qwen2.5-128k", 152064, 5120, 27648, 64, 40, 8, 128, False),
    "qwen2.5-72b": ("Qwen/Qwen2.5-72B", "qwen2.5-128k", 152064, 8192, 29568, 80, 64, 8, 128, False),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", "qwen3", 151936, 1024, 3072, 28, 16, 8, 128, True),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", "qwen3", 151936, 2048, 6144, 28, 16, 8, 128, True),
    "qwen3-4b": ("Qwen/Qwen3-4B", "qwen3", 151936, 2560, 9728, 36, 32, 8, 128, True),
    "qwen3-8b": ("Qwen/Qwen3-8B", "qwen3", 151936, 4096, 12288, 36, 32, 8, 128, False),
    "qwen3-14b": ("Qwen/Qwen3-14B", "qwen3", 151936, 5120, 17408, 40, 40, 8, 128, False),
    "qwen3-32b": ("Qwen/Qwen3-32B", "qwen3", 151936, 5120, 25600, 64, 64, 8, 128, False),
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def preset_config(name):
    """The published shapes of a preset as the contents of a config.json, RoPE in both spellings."""
    _, release, V, D, F_, layers, H, G, K, tied = PRESETS[name]
    family, theta, scaling, positions = RELEASES[release]
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"], "model_type": family, "vocab_size": V, "hidden_size": D,
        "intermediate_size": F_, "num_hidden_layers": layers, "num_attention_heads": H, "num_key_value_heads": G,
        "head_dim": K, "hidden_act": "silu", "rms_norm_eps": 1e-6 if family.startswith("qwen") else 1e-5,
        "rope_theta": theta, "rope_scaling": scaling, "tie_word_embeddings": tied,
        "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
        "max_position_embeddings": positions, "sliding_window": None, "torch_dtype": "bfloat16", "dtype": "bfloat16",
    }


# Sizes are bounded before memory is allocated. key: type, smallest, largest, default (None: the key must be there)
FIELDS = {
    "vocab_size": (int, 1, 1 << 20, None), "hidden_size": (int, 1, 1 << 16, None),
    "intermediate_size": (int, 1, 1 << 18, None), "num_hidden_layers": (int, 1, 1 << 10, None),
    "num_attention_heads": (int, 1, 1 << 10, None), "num_key_value_heads": (int, 1, 1 << 10, None),
    "head_dim": (int, 2, 1 << 10, None), "max_position_embeddings": (int, 1, 1 << 30, None),
    "rms_norm_eps": (float, 1e-30, 1, 1e-6), "initializer_range": (float, 0, 1e3, 0.02),
    "tie_word_embeddings": (bool, False, True, False),
}
POSITIVE = (float, 1e-30, 1e30, None)
# rope_scaling: {"rope_type": "default" | "linear" | "llama3", ...}; sliding_window: None or tokens; dtype: the files'
OTHER_FIELDS = ("model_type", "rope_theta", "rope_scaling", "sliding_window", "dtype")
Config = make_dataclass("Config", [*FIELDS, *OTHER_FIELDS], frozen=True)
# A key here, unless absent, null or equal to the value, asks for something that the model does not compute.
REFUSED = {"hidden_act": "silu", "mlp_bias": False, "attention_dropout": 0, "pretraining_tp": 1, "num_experts": 0,
           "use_sliding_window": False, "quantization_config": None, "num_local_experts": 0, "logit_scale": 1.0,
           "partial_rotary_factor": 1.0, "final_logit_softcapping": None}


def read_field(raw, key, field, where):
    """raw[key], or the default where it is absent or null. ValueError if it is not of the field's type and range."""
    kind, low, high, default = field
    value = default if raw.get(key) is None else raw[key]
    kinds = (int, float) if kind is float else (kind,)
    if type(value) not in kinds or not low <= value <= high:
        raise ValueError(f"{where}: {key} = {json.dumps(value)[:200]}: expected {kind.__name__} from {low} to {high}")
    return kind(value)


def parse_config(raw, where="config.json"):
    """The dict of a config.json, in transformers 4's or 5's spelling -> Config. ValueError names the offending key."""

    def refuse(wrong, key, why):
        if wrong:
            raise ValueError(f"{where}: {key} = {json.dumps(raw.get(key))[:200]}: {why}")

    family, D, H = raw.get("model_type"), raw.get("hidden_size"), raw.get("num_attention_heads")
    refuse(family not in FAMILIES, "model_type", f"not one of {', '.join(FAMILIES)}")
    for key, value in REFUSED.items():
        fix = "use the unquantized model and --qlora" if key == "quantization_config" else f"only {value} works"
        refuse(raw.get(key) not in (None, value), key, f"not implemented, {fix}")
    refuse(raw.get("attention_bias") and family != "qwen2", "attention_bias", f"not implemented for {family}")
    architecture = f"{family.capitalize()}ForCausalLM"
    refuse(raw.get("architectures") not in (None, [], [architecture]), "architectures", f"not {architecture}")
    defaults = {}
    if family == "llama":  # Llama-2 7B and 13B leave it out
        defaults["num_key_value_heads"] = H
    if family != "qwen3" and type(D) is type(H) is int and H > 0 and D % H == 0:
        defaults["head_dim"] = D // H
    given = defaults | {key: value for key, value in raw.items() if value is not None}
    values = {key: read_field(given, key, field, where) for key, field in FIELDS.items()}
    refuse(H % values["num_key_value_heads"], "num_key_value_heads", f"does not divide num_attention_heads {H}")
    refuse(values["head_dim"] % 2, "head_dim", "RoPE needs an even number")
    full = ["full_attention"] * values["num_hidden_layers"]
    refuse(given.get("layer_types", full) not in ([], full), "layer_types", "only full_attention is implemented")
    window = None
    if family == "mistral" and raw.get("sliding_window", 4096) is not None:  # 4096 is transformers' default
        window = read_field(raw, "sliding_window", (int, 1, 1 << 30, 4096), where)
    key = "dtype" if "dtype" in given else "torch_dtype"  # transformers 5, 4
    dtype = given.get(key, "bfloat16")
    refuse(dtype not in ("float32", "float16", "bfloat16"), key, "expected float32, float16 or bfloat16")
    theta, scaling = parse_rope(given, family, values, where, refuse)
    return Config(**values, model_type=family, rope_theta=theta, rope_scaling=scaling, sliding_window=window,
                  dtype=getattr(torch, dtype))


def parse_rope(given, family, values, where, refuse):
    """(theta, scaling) from `rope_theta` + `rope_scaling` or transformers 5's `rope_parameters`; they must agree."""
    fields = {"default": {}, "linear": {"factor": POSITIVE},
              "llama3": {"factor": POSITIVE, "low_freq_factor": POSITIVE, "high_freq_factor": POSITIVE,
                         "original_max_position_embeddings": (int, 1, 1 << 30, values["max_position_embeddings"])}}
    theta, scalings = given.get("rope_theta"), []
    for key in ("rope_scaling", "rope_parameters"):
        rope = given.get(key) or {}
        flat = isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values())
        refuse(not flat, key, "expected one flat object; rope parameters per layer type are not implemented")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        refuse(kind not in list(fields), key, f"rope_type is not one of {', '.join(fields)}")
        scaling = {name: read_field(rope, name, field, f"{where}: {key}") for name, field in fields[kind].items()}
        wrong = kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]
        refuse(wrong, key, "llama3 needs high_freq_factor above low_freq_factor")
        theta = rope.get("rope_theta", theta)
        if rope:
            scalings.append({"rope_type": kind, **scaling})
    scalings = scalings or [{"rope_type": "default"}]
    refuse(scalings[0] != scalings[-1], "rope_scaling", "rope_parameters differ: leave one of the two out")
    # Old Llama-2 files leave out their 10000. Elsewhere that default would train on wrong positions in silence:
    # transformers 4 reads 10000 from every file that transformers 5 wrote (vllm #42624).
    no_default = family.startswith("qwen") or scalings[-1]["rope_type"] == "llama3" or values["vocab_size"] >= 100_000
    refuse(theta is None and no_default, "rope_theta", "missing, with no safe default: copy it from the model's page")
    return read_field({"rope_theta": theta}, "rope_theta", (*POSITIVE[:3], 1e4), where), scalings[-1]


# ---------------------------------------------------------------- blocks


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)  # float32 inside


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


class Spans:
    """The documents of packed rows. pairs: their (start, stop) in the flattened tokens. bounds: int32 on the device,
    the limits of documents and padding; longest: of these, an int on the host. group: the ranks that each hold an equal
    piece of the tokens. No tuple and no dataclass: FSDP2 walks those in Python at every forward."""

    def __init__(self, pairs, bounds=None, longest=0, group=None):
        self.pairs, self.bounds, self.longest, self.group = pairs, bounds, longest, group


def pack_spans(pairs, n_tokens):
    """[(start, stop)] -> Spans with bounds, on the CPU."""
    bounds = torch.tensor(sorted({0, n_tokens, *itertools.chain(*pairs)}), dtype=torch.int32)
    return Spans(pairs, bounds, int(bounds.diff().max()))


class AllToAll(torch.autograd.Function):
    """[S, ...] -> [S, ...] on S ranks: row i goes to rank i. Twice it changes nothing: its gradient is itself."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, out = group, torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad.contiguous(), ctx.group), None


def attend_split(q_BTHK, k_BTGK, v_BTGK, spans):
    """attend() of rows on S ranks (Ulysses, arXiv:2309.14509): an all-to-all turns a piece of the tokens with all heads
    into all tokens with some heads, another turns it back. A rank sends 2 * tokens * (2*H + 2*G) * K / S bytes."""
    (B, T, H, K), S = q_BTHK.shape, spans.group.size()
    copies = S // math.gcd(k_BTGK.shape[2], S)  # of a key head, whose query heads lie on several ranks
    k_BTGK, v_BTGK = (t if copies == 1 else t.repeat_interleave(copies, 2) for t in (k_BTGK, v_BTGK))
    parts = [t.reshape(B * T, S, -1, K).transpose(0, 1) for t in (q_BTHK, k_BTGK, v_BTGK)]
    qkv = AllToAll.apply(torch.cat(parts, 2), spans.group).flatten(0, 1)
    q, k, v = (t[None] for t in qkv.split([part.shape[2] for part in parts], 1))
    out = attend(q, k, v, Spans(spans.pairs, spans.bounds, spans.longest)).view(S, B * T, -1)
    return AllToAll.apply(out, spans.group).transpose(0, 1).reshape(B, T, H * K)


@functools.cache
def takes_documents(dtype, K, device):
    """Whether FlashAttention over documents runs: 16 bits, heads of 8, 16, ... 256, an Ampere card or newer."""
    fits = device.type == "cuda" and dtype is not torch.float32 and K % 8 == 0 and K <= 256
    return fits and torch.cuda.get_device_capability(device) >= (8, 0)


# torch 2.11 shares key heads between query heads unasked, later versions want to be asked
GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def attend(q_BTHK, k_BTGK, v_BTGK, spans):
    """Causal attention inside each document of the flattened B*T tokens; padding gets arbitrary finite values."""
    if spans.group is not None:
        return attend_split(q_BTHK, k_BTGK, v_BTGK, spans)
    B, T, H, K = q_BTHK.shape
    q, k, v = (t.reshape(B * T, -1, K) for t in (q_BTHK, k_BTGK, v_BTGK))
    if spans.bounds is not None and takes_documents(q.dtype, K, q.device):
        limits = spans.bounds, spans.bounds, spans.longest, spans.longest
        return varlen_attn(q, k, v, *limits, window_size=(-1, 0), **GQA).view(B, T, H * K)
    if q.is_cuda and q.dtype is torch.float32:  # in float32 only the math kernel supports GQA, and it holds all scores
        k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    sdpa = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=k.shape[1] != H)
    lengths = {stop - start for start, stop in spans.pairs}
    if len(lengths) == 1 and len(spans.pairs) * min(lengths) == B * T:  # equal documents: one call
        q, k, v = (t.view(-1, min(lengths), t.shape[1], K).transpose(1, 2) for t in (q, k, v))
        return sdpa(q, k, v).transpose(1, 2).reshape(B, T, H * K)
    # oneDNN compiles its bf16 kernels for each length and keeps them: 1 GB after 500 lengths. So lengths are rounded up
    # to multiples of 32. The added tokens come later: causal attention hides them, and their outputs are cut off.
    step = 32 if q.device.type == "cpu" else 1
    pieces, end = [], 0
    for start, stop in spans.pairs:
        rounded = min(start + math.ceil((stop - start) / step) * step, B * T)
        out = sdpa(*(t[start:rounded].transpose(0, 1)[None] for t in (q, k, v)))[0]
        pieces += [q.new_zeros(start - end, H, K), out.transpose(0, 1)[: stop - start]]
        end = stop
    return torch.cat([*pieces, q.new_zeros(B * T - end, H, K)]).view(B, T, H * K)


class Block(nn.Module):
    """--compile compiles before_attention and before_down_proj: no list of documents reaches them, so packed rows
    compile once. down_proj stays out, because activation checkpointing's second forward ends before it."""

    def __init__(self, c):
        super().__init__()
        D, width, K, eps = c.hidden_size, c.intermediate_size, c.head_dim, c.rms_norm_eps
        q_size, kv_size, bias = c.num_attention_heads * K, c.num_key_value_heads * K, c.model_type == "qwen2"
        norm = RMSNorm if c.model_type == "qwen3" else nn.Identity
        self.head_dim, self.input_layernorm = K, RMSNorm(D, eps)
        self.self_attn = nn.ModuleDict({
            "q_proj": Linear(D, q_size, bias), "k_proj": Linear(D, kv_size, bias), "v_proj": Linear(D, kv_size, bias),
            "o_proj": Linear(q_size, D, bias=False), "q_norm": norm(K, eps), "k_norm": norm(K, eps),
        })
        self.post_attention_layernorm = RMSNorm(D, eps)
        self.mlp = nn.ModuleDict({
            "gate_proj": Linear(D, width, bias=False), "up_proj": Linear(D, width, bias=False),
            "down_proj": Linear(width, D, bias=False),
        })

    def forward(self, x, rope, spans):
        return self.after_attention(x, attend(*self.before_attention(x, rope), spans))

    def before_attention(self, x, rope):
        """-> q_BTHK, k_BTGK, v_BTGK."""
        h_BTD, attn = self.input_layernorm(x), self.self_attn
        projections = attn.q_proj, attn.k_proj, attn.v_proj
        q_BTHK, k_BTGK, v_BTGK = (proj(h_BTD).unflatten(-1, (-1, self.head_dim)) for proj in projections)
        # norm before rotation: torchtune shipped Qwen3 the other way round (torchtune #2822)
        return rotate(attn.q_norm(q_BTHK), rope), rotate(attn.k_norm(k_BTGK), rope), v_BTGK

    def before_down_proj(self, x, attention):
        x = x + self.self_attn.o_proj(attention)
        h = self.post_attention_layernorm(x)
        return x, F.silu(self.mlp.gate_proj(h)) * self.mlp.up_proj(h)

    def after_attention(self, x, attention):
        x, gated = self.before_down_proj(x, attention)
        return x + self.mlp.down_proj(gated)


class SaveNow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, needs_grad, *tensors):  # they are .grad_fn.saved_tensors of the result
        ctx.save_for_backward(*tensors)
        return needs_grad.new_empty(0)


def tile_mlp_(model, tile):
    """Runs what follows attention in every block, nearly all of it MLP, `tile` tokens at a time, forward and backward:
    6*F values a token live for one tile, not the row (ALST, arXiv:2506.13996; 8B at 128k: 0.7 GiB, not 21 GiB).
    Each tile is a checkpoint. In a block that is one too, tiles would run three times, because the block's second
    forward goes on to the last tensor that it saves, the input of the last tile. So SaveNow saves all inputs first, and
    the tiles save theirs outside the block's hooks: the second forward ends before the tiles."""

    def after_attention(plain, x, attention):
        inputs = SaveNow.apply(torch.empty(0, requires_grad=True), x, attention).grad_fn
        tiles = list(zip(x.flatten(0, 1).split(tile), attention.flatten(0, 1).split(tile)))

        def run(i):
            if not tiles:  # in the backward
                again = (t.detach().requires_grad_().flatten(0, 1).split(tile) for t in inputs.saved_tensors)
                tiles.extend(zip(*again))
            return plain(*tiles[i])

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            out_ND = torch.cat([checkpoint(run, i, use_reentrant=False) for i in range(len(tiles))])
        tiles.clear()
        return out_ND.view_as(x)

    for block in model.model.layers:
        block.after_attention = functools.partial(after_attention, block.after_attention)


# ---------------------------------------------------------------- loss


def softmax_gradient(logits_CV, targets_C1, with_grad):
    """-> (summed cross-entropy, its gradient softmax - one-hot in the dtype of the logits, or None). Rows whose target
    is IGNORE have neither. Works in place on one float32 copy; --compile makes two passes over the logits, no copy."""
    dtype, logits_CV = logits_CV.dtype, logits_CV.float()
    real_C1, targets_C1 = (targets_C1 != IGNORE).float(), targets_C1.clamp_min(0)
    logits_CV -= logits_CV.amax(-1, keepdim=True)
    target_logit_C1 = logits_CV.gather(-1, targets_C1)
    total_C1 = logits_CV.exp_().sum(-1, keepdim=True)
    loss = ((total_C1.log() - target_logit_C1) * real_C1).sum()
    if not with_grad:
        return loss, None
    scale_C1 = real_C1 / total_C1
    logits_CV *= scale_C1  # softmax
    grad_CV, rows_C1 = logits_CV.to(dtype), torch.arange(len(targets_C1), device=targets_C1.device)[:, None]
    # from the float32 logit: where the model is sure, softmax - 1 is far below a 16-bit softmax's rounding
    grad_CV[rows_C1, targets_C1] = (target_logit_C1.exp() * scale_C1 - real_C1).to(dtype)
    return loss, grad_CV


class ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of h_SD @ w_VD.T against targets_S, float32, gradients computed in the forward. Alive at
    once: a chunk of logits (C*V*6 bytes in bf16, C*V*4 in float32) and, if the head trains, its gradient, added up in
    float32 (V*D*4 bytes): sums in 16 bits would lose the small ones. S = 0 is a zero with zero gradients, so a rank
    without a supervised token still joins every collective of the backward."""

    @staticmethod
    def forward(ctx, h_SD, w_VD, targets_S, chunk, with_grad, softmax_gradient=softmax_gradient):
        loss_sum = torch.zeros((), dtype=torch.float32, device=h_SD.device)
        grad_h = torch.empty_like(h_SD) if with_grad and ctx.needs_input_grad[0] else None
        trained, grad_w = with_grad and ctx.needs_input_grad[1], None
        for start in range(0, len(h_SD), chunk):
            h_CD, targets_C1 = h_SD[start : start + chunk], targets_S[start : start + chunk, None]
            loss, grad_logits_CV = softmax_gradient(h_CD @ w_VD.T, targets_C1, grad_h is not None or trained)
            loss_sum += loss
            if grad_h is not None:
                torch.mm(grad_logits_CV, w_VD, out=grad_h[start : start + chunk])
            if trained and grad_w is not None:
                grad_w += grad_logits_CV.T @ h_CD
            elif trained:
                grad_w = (grad_logits_CV.T @ h_CD).to(w_VD.dtype if len(h_SD) <= chunk else torch.float32)
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
        # keep_S comes from the host with the batch: nonzero() on the device would wait for it. The last token, without
        # a target, fills up the rows: else each batch has its own size, and allocators and oneDNN keep memory for each.
        S = len(keep_S)
        keep_S = torch.cat([keep_S, keep_S[-1:].expand(min(-S % HEAD_ROWS, targets_BT.numel() - S))])
        h_SD, targets_S = x.flatten(0, 1)[keep_S], targets_BT.flatten()[keep_S]
        targets_S[S:] = IGNORE
        if self.chunk:
            options = self.chunk, torch.is_grad_enabled(), self.softmax_gradient
            return ChunkedCrossEntropy.apply(h_SD, w_VD, targets_S, *options)
        return F.cross_entropy(F.linear(h_SD, w_VD).float(), targets_S, reduction="sum")


class Transformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.compute_dtype = torch.float32
        self.activation_hooks = None  # a context manager around the blocks: train.py's activation offload
        self.sequence_group = None  # the ranks that hold pieces of the same rows: --sequence_parallel
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
        """tokens [B, T] -> summed loss over the supervised tokens; without targets logits [B, T, V]. positions restart
        at 0 in every document. With a sequence_group the tensors hold this rank's piece of the tokens and spans
        describe all of them; without positions, tokens are whole rows all the same."""
        B, T = tokens_BT.shape
        if positions_BT is None:
            positions_BT = torch.arange(T, device=tokens_BT.device).expand(B, T)
            spans = Spans([(row * T, row * T + T) for row in range(B)])
        elif self.sequence_group is not None:
            spans = Spans(spans.pairs, spans.bounds, spans.longest, self.sequence_group)
        if targets_BT is not None and keep_S is None:
            keep_S = (targets_BT.flatten() != IGNORE).nonzero().flatten()
        rope = rope_table(positions_BT, self.config)
        x = self.model.embed_tokens(tokens_BT).to(self.compute_dtype)
        *blocks, last = self.model.layers
        with self.activation_hooks or contextlib.nullcontext():
            for block in blocks:
                # rope is a tuple: of a block's arguments, checkpointing (and offload) saves bare tensors only
                x = block(x, rope, spans)
        x = last(x, rope, spans)  # the backward wants its input at once: not worth a trip to the host
        return self.lm_head(self.model.norm(x), targets_BT, keep_S)


@torch.no_grad()
@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])  # cuDNN plans each length
def generate(model, tokens, n, stop, device):
    """Greedy continuation: list of token ids -> list of at most n more, ending before an id in `stop`. The whole prefix
    runs again for every token: no cache to keep, and under FSDP2 every rank makes the same calls."""
    tokens, start = list(tokens), len(tokens)
    for _ in range(n):
        token = int(model(torch.tensor([tokens], device=device))[0, -1].argmax())
        if token in stop:
            break
        tokens.append(token)
    return tokens[start:]


def step_flops(c, counted, n_adapter):
    """FLOP that a step needs, recomputation not counted. Per weight and token: 2 forward, 2 for the input's gradient, 2
    for its own. Attention: 4*H*K per pair of tokens forward, half of the pairs masked, 2.5 times that backward.
    counted: supervised tokens (the head's), tokens, sum of squared document lengths. n_adapter: parameters, or None."""
    n_targets, n_tokens, n_squares = counted
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    block = c.hidden_size * (2 * q + 2 * kv + 3 * c.intermediate_size)
    products = block * c.num_hidden_layers * n_tokens + c.hidden_size * c.vocab_size * n_targets
    attention = 2 * q * c.num_hidden_layers * n_squares * 3.5
    return attention + (6 * products if n_adapter is None else 4 * products + 6 * n_adapter * n_tokens)


# ---------------------------------------------------------------- LoRA

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT_PREFIX = "base_model.model."  # PEFT's name of a tensor is this and ours


class LoRA:
    """A linear layer's other half: y = W x + (alpha / rank) B A x (arXiv:2106.09685), with PEFT's names."""

    def forward(self, x):
        # LoRA's product first, the frozen base last: the base saves nothing that its backward lacks, so checkpointing's
        # early stop ends the recomputation of a block before down_proj, a fifth of the block's FLOP.
        delta = self.lora_B(self.lora_A(F.dropout(x, self.lora_dropout, self.training)) * self.lora_scale)
        return delta + super().forward(x)


WITH_LORA = {base: type(f"LoRA{base.__name__}", (LoRA, base), {}) for base in (Linear, nf4.NF4Linear)}


def add_lora_(model, rank, alpha, dropout, targets):
    """Gives the linear layers of the blocks named in `targets` adapters, `lora_A.weight` [R, in] and `lora_B.weight`
    [out, R], and freezes all else. The layers change class: torch.compile, which looks at types, compiles one block."""
    model.requires_grad_(False)
    for name, linear in list(model.model.layers.named_modules()):
        if name.rsplit(".")[-1] in targets:
            with torch.device(next(linear.parameters()).device):
                linear.lora_A = Linear(linear.in_features, rank, bias=False)
                linear.lora_B = Linear(rank, linear.out_features, bias=False)
            linear.lora_scale, linear.lora_dropout = alpha / rank, dropout
            linear.__class__ = WITH_LORA[type(linear)]


# ---------------------------------------------------------------- precision, checkpointing, compile


def set_precision_(model, precision):
    """Stores trained parameters in float32 or bf16, frozen ones in bf16 or ("fp32") float32, and sets what products
    compute in. float32 masters: an update below 1/256 of a bf16 weight is lost (accelerate #2624)."""
    trained = torch.bfloat16 if precision == "bf16" else torch.float32
    frozen = torch.float32 if precision == "fp32" else torch.bfloat16
    for param in model.parameters():
        if param.is_floating_point():
            param.data = param.data.to(trained if param.requires_grad else frozen)
    model.compute_dtype = frozen


def on_meta(config, args):
    """The model of a run on the meta device: vanilla, then NF4, LoRA, dtypes. `main` and the plan both start here."""
    with torch.device("meta"):
        model = Transformer(config)
    if args.qlora:
        nf4.quantize_linears_(model.model.layers)
    if args.lora or args.qlora:
        add_lora_(model, args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_targets)
    set_precision_(model, args.precision)
    model.lm_head.chunk = args.ce_chunk
    return model


def compile_(model, packing):
    """torch.compile on the two parts of every block that attention separates, on the loss and on NF4's dequantization.
    One block is compiled for all. Evaluation runs uncompiled. Call it before tile_mlp_ and checkpoint_activations_."""

    def in_training(plain, dynamic):
        fast = torch.compile(plain, fullgraph=True, dynamic=dynamic)  # fullgraph: a graph break is an error
        return lambda *args: (fast if model.training else plain)(*args)

    for block in model.model.layers:
        block.before_attention = in_training(block.before_attention, dynamic=not packing)
        block.before_down_proj = in_training(block.before_down_proj, dynamic=not packing)
    for module in model.modules():
        if isinstance(module, nf4.NF4Linear):
            module.fast = True
    model.lm_head.softmax_gradient = in_training(softmax_gradient, dynamic=True)  # the last chunk is shorter


def checkpoint_activations_(model, preserve_rng):
    """Keeps each block's input and recomputes the rest in the backward: 2*D bytes a token and layer in bf16, not about
    34*D, for at most a third more FLOP (arXiv:1604.06174). Dropout needs the random state back for the same mask."""
    again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=preserve_rng)
    for block in model.model.layers:
        block.forward = functools.partial(again, block.forward)
        for module in block.modules():
            if isinstance(module, nf4.NF4Linear):
                module.checkpointed = True  # its backward uses the weight that the recomputation has dequantized


# ---------------------------------------------------------------- reading weights


def read_json(path):
    """A JSON object from a file. ValueError names the file and the place."""
    try:
        value = json.loads(Path(path).read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, thousands of digits, endless brackets
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


def listing(names):
    """The first five of some names, sorted, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(sorted(names)[:5]) + more


def find_model(name, random_init):
    """--model -> (raw config, folder of the tokenizer, folder of the weights or None for random ones, base name). A Hub
    id is downloaded once per node: huggingface_hub locks each file, and the other ranks find it in the cache."""
    if name in PRESETS:
        return preset_config(name), TINY, None, name
    folder, base = (TINY, str(TINY)) if name == "tiny" else (Path(name), name)
    if not folder.is_dir():
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise ValueError(f"--model {name}: no such folder; expected tiny, a folder, a Hub id (Qwen/Qwen3-4B), or "
                             f"with --random_init one of {', '.join(PRESETS)}")
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.jinja", "merges.txt", "tokenizer.model"]
        patterns += [] if random_init else ["model*.safetensors"]  # not consolidated.safetensors, the same again
        try:
            folder = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["onnx/*", "original/*"]))
        except (OSError, ValueError) as error:
            raise ValueError(f"--model {name}: no such folder, and not fetched from the Hub: {error}") from error
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: no config.json: expected a model folder as transformers saves it")
    return read_json(folder / "config.json"), folder, None if random_init else folder, base


def mix(x):
    """Index -> 32 well mixed bits (MurmurHash3's finalizer). For an int or an int64 tensor."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = x & 0xFFFFFFFF
        x = (x ^ x >> shift) * factor
    return x


DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of checkpoints
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.uint8: "U8"}


class Checkpoint:
    """The safetensors files of a folder, read row by row. `tensors`: {name: (file, shape, dtype)}. ValueError where a
    file is missing, cut short, in another format, or names a tensor twice."""

    def __init__(self, folder, single="model.safetensors"):
        folder, self.tensors = Path(folder), {}
        index = folder / f"{single}.index.json"
        weight_map = read_json(index).get("weight_map") if index.exists() else {"": single}
        plain = re.compile(r"[\w.-]+\.safetensors", re.ASCII).fullmatch
        if not isinstance(weight_map, dict) or not all(plain(str(file)) for file in weight_map.values()):
            raise ValueError(f"{index}: weight_map: expected plain names of files in the same folder")
        self.files = [folder / file for file in sorted(set(weight_map.values()))]
        for path in self.files:
            if not path.is_file():
                raise ValueError(f"{path}: no such file: the download is incomplete, or the weights are .bin files, "
                                 "which can run code when loaded (transformers' save_pretrained writes safetensors)")
            self.read_header(path)
        differ = weight_map.keys() ^ self.tensors.keys()
        if differ and index.exists():
            raise ValueError(f"{index}: does not list what the files hold: {listing(differ)}")

    def read_header(self, path):
        try:
            with safe_open(path, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118
                    part = reader.get_slice(name)
                    if part.get_dtype() not in DTYPES:
                        raise ValueError(f"{path}: {name}: expected float32, float16 or bfloat16, got "
                                         f"{part.get_dtype()}; for 4 bits use the unquantized model and --qlora")
                    if name in self.tensors:
                        raise ValueError(f"{path}: {name} is in {self.tensors[name][0].name} as well")
                    self.tensors[name] = path, tuple(part.get_shape()), DTYPES[part.get_dtype()]
        except SafetensorError as error:
            raise ValueError(f"{path}: damaged or cut short ({error}): download it again") from error

    def rows(self, name, start, stop):
        """Rows [start, stop) of a tensor, on the CPU. Mapped for this call only: else pages of the file pile up."""
        with safe_open(self.tensors[name][0], framework="pt") as reader:
            return reader.get_slice(name)[start:stop].clone()

    def crc(self):
        """Checksum of 1 MB from the middle of each file: tells base from Instruct, and one download from another."""
        crc = 0
        for path in self.files:
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size // 2 - (1 << 19)))
                crc = zlib.crc32(file.read(1 << 20), crc)
        return crc


class RandomWeights:
    """Stands for a Checkpoint where there is none: normal weights, norms of one, biases of zero, by name and row."""

    def __init__(self, model, seed, device):
        self.seed, self.device, self.config = seed, device, model.config
        self.tensors = {name: (None, tuple(p.shape), self.config.dtype) for name, p in model.named_parameters()}

    def rows(self, name, start, stop):
        shape = self.tensors[name][1]
        if len(shape) == 1:
            return torch.full((stop - start,), float(name.endswith("norm.weight")))
        return random_rows(name, shape[1], start, stop, self.seed, self.device).mul_(self.config.initializer_range)

    def crc(self):
        return zlib.crc32(repr((self.seed, self.config)).encode())


def random_rows(name, width, start, stop, seed, device, uniform=False):
    """Rows [start, stop) of a random matrix, normal or uniform in [-1, 1), equal for any sharding: 256 rows a seed."""
    pieces = []
    for block in range(start // 256, -(-stop // 256)):
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}/{block}".encode()))
        rows = torch.empty(256, width, device=device)
        rows.uniform_(-1, 1, generator=generator) if uniform else rows.normal_(generator=generator)
        pieces.append(rows[max(start - block * 256, 0) : stop - block * 256])
    return torch.cat(pieces)


def check_weights(model, checkpoint, folder):
    """Compares the names and shapes of a model, or of its LoRA layers if it has any, with a file's, or raises."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    expected = {PEFT_PREFIX + name: shape for name, shape in shapes.items() if ".lora_" in name} or shapes
    if model.config.tie_word_embeddings and HEAD in checkpoint.tensors and expected is shapes:
        expected[HEAD] = expected["model.embed_tokens.weight"]  # a duplicate, compared when it is read
    found = {name: shape for name, (_, shape, _) in checkpoint.tensors.items()
             if not name.endswith("rotary_emb.inv_freq")}  # old Llama-2 files have it
    other = [f"{name} is {list(found[name])}, not {list(shape)}"
             for name, shape in expected.items() if found.get(name, shape) != shape]
    differ = {"missing": expected.keys() - found, "unexpected": found.keys() - expected, "wrong shape": other}
    if any(differ.values()):
        text = "; ".join(f"{what}: {listing(names)}" for what, names in differ.items() if names)
        raise ValueError(f"{folder}: {text}")


check_adapter = check_weights
# A key here may have these values, or any; every other key of an adapter must be unset.
ADAPTER_KEYS = {"peft_type": ["LORA"], "task_type": ["CAUSAL_LM"], "bias": ["none"],
                "init_lora_weights": [True, False, "gaussian"]}  # PiSSA and others change the base weights
ADAPTER_FREE = ("r", "lora_alpha", "lora_dropout", "target_modules", "base_model_name_or_path", "revision",
                "auto_mapping", "inference_mode", "peft_version", "megatron_core", "qalora_group_size")


def open_adapter(folder):
    """A PEFT LoRA adapter -> (Checkpoint, rank, alpha, targets). ValueError names a key that is not understood."""
    where = f"{folder}/adapter_config.json"
    config = read_json(where)
    for key, value in config.items():
        if key not in ADAPTER_FREE and value not in [None, *ADAPTER_KEYS.get(key, [False, "", [], {}])]:
            raise ValueError(f"{where}: {key} = {json.dumps(value)[:200]} is not implemented")
    rank = read_field(config, "r", (int, 1, 4096, None), where)
    read_field(config, "lora_alpha", POSITIVE, where)
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets or any(target not in LORA_TARGETS for target in targets):
        raise ValueError(f"{where}: target_modules = {json.dumps(targets)[:200]}: expected some of {LORA_TARGETS}")
    return Checkpoint(folder, "adapter_model.safetensors"), rank, config["lora_alpha"], tuple(targets)


def local(param):
    """(this rank's rows of a parameter as a plain tensor, its first row in the full one)."""
    if not isinstance(param, DTensor):
        return param.data, 0
    (dim,) = (i for i, placement in enumerate(param.placements) if placement.is_shard(0))
    rows = -(-param.shape[0] // param.device_mesh.size(dim))  # FSDP2 cuts like torch.chunk
    return param.to_local().data, min(rows * param.device_mesh.get_local_rank(dim), param.shape[0])


@torch.no_grad()
def load_weights_(model, source, adapter, seed, device, progress=False, frozen_only=False):
    """Fills the parameters of a sharded, quantized, adapted model. A rank reads the rows it keeps and no others.
    adapter: Checkpoint of a PEFT adapter, or None for a fresh one; frozen_only: leave out what trains, which comes from
    a checkpoint of the run. Peak: one tensor's local rows above the model, in float32 while quantizing."""
    params = dict(model.named_parameters())
    for name in tqdm(params, "loading weights", unit="tensor", disable=not progress, leave=False):
        out, start = local(params[name])
        stop = start + len(out)
        if start == stop or name.endswith("weight_scales") or (frozen_only and params[name].requires_grad):
            continue  # an empty shard, or written along with the codes
        if name.endswith("weight_codes"):
            stem = name.removesuffix("_codes")
            try:
                codes, scales = nf4.quantize(source.rows(stem, start, stop).to(device))
            except ValueError as error:
                raise ValueError(f"{stem}: {error}") from error
            out.copy_(codes)
            local(params[f"{stem}_scales"])[0].copy_(scales)
        elif adapter is not None and ".lora_" in name:
            out.copy_(adapter.rows(PEFT_PREFIX + name, start, stop))
        elif name.endswith("lora_B.weight"):
            out.zero_()
        elif name.endswith("lora_A.weight"):  # PEFT's and torch's default, U(-1/sqrt(in), 1/sqrt(in))
            out.copy_(random_rows(name, out.shape[1], start, stop, seed, "cpu", uniform=True) * out.shape[1] ** -0.5)
        else:
            out.copy_(source.rows(name, start, stop))
        duplicate = name == "model.embed_tokens.weight" and HEAD not in params and HEAD in source.tensors
        if duplicate and not torch.equal(source.rows(name, start, stop), source.rows(HEAD, start, stop)):
            raise ValueError(f"config.json ties the head to the embedding, but the checkpoint's {HEAD} differs: "
                             "set tie_word_embeddings to false")


# ---------------------------------------------------------------- writing models and adapters

SHARD_BYTES = 5_000_000_000  # of a file; above it an index is written, as transformers does
COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja")


def reshard_(model):
    """Gives modules their shards back after an evaluation: FSDP2 keeps them gathered for a backward to come."""
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
    """Yields (name, W + scale * B A), summed in float32, in W's dtype. W is the original: NF4's error stays out."""
    for name in names:
        w = source.rows(name, 0, source.tensors[name][1][0])
        stem = name.removesuffix("weight")
        if stem + "lora_A.weight" in adapter:
            delta = adapter[stem + "lora_B.weight"].float() @ adapter[stem + "lora_A.weight"].float()
            w = w.float().add_(delta, alpha=scale)
        yield name, w.to(source.tensors[name][2])


@contextlib.contextmanager
def writing(path, what):
    """Names the path and what was being written in the message of an OSError: a full disk's own names neither."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path}: {what} not written: {error.strerror or error}") from error


class SafetensorsFile:
    """Writes a safetensors file tensor by tensor, in any order, in a `with`; layout: {name: (shape, dtype)}. The
    library's own writer wants all tensors of a file in memory. write() -> its bytes. OSError names path and tensor."""

    def __init__(self, path, layout, **metadata):
        header, self.offsets, end = {"__metadata__": {"format": "pt", **metadata}}, {}, 0  # older transformers need it
        for name, (shape, dtype) in sorted(layout.items(), key=lambda item: (-item[1][1].itemsize, item[0])):
            start, end = end, end + math.prod(shape) * dtype.itemsize  # wide numbers first: all of them are aligned
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            self.offsets[name] = start
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.path, self.head = path, len(text).to_bytes(8, "little") + text

    def __enter__(self):
        self.file = open(self.path, "wb")
        return self

    def write(self, name, tensor):
        data = tensor.contiguous().flatten().view(torch.uint8).numpy()
        with writing(self.path, name):
            self.file.seek(len(self.head) + self.offsets.pop(name))
            self.file.write(data)
        return data

    def __exit__(self, failed, *_):
        # closing writes what a full disk has refused, and fails again: the first error is the one to tell
        with contextlib.suppress(OSError) if failed else writing(self.path, "header"), self.file:
            if not failed:
                assert not self.offsets, f"{self.path}: never written: {list(self.offsets)}"
                self.file.seek(0)
                self.file.write(self.head)
                self.file.flush()
                os.fsync(self.file.fileno())


def save_model(tensors, layout, out, raw_config, tokenizer_folder, config_folder, write):
    """Writes a Hugging Face folder from an iterator of (name, tensor): config and tokenizer files byte for byte,
    weights in files of at most SHARD_BYTES, one tensor in memory at a time. OSError names what was not written. Every
    rank iterates, as the iterator may gather shards; the one with `write` writes. layout: {name: (shape, dtype)}."""
    tensors, groups, room, total = iter(tensors), [[]], SHARD_BYTES, 0
    for name, (shape, dtype) in layout.items():
        n_bytes = math.prod(shape) * dtype.itemsize
        if n_bytes > room and groups[-1]:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(name)
        room, total = room - n_bytes, total + n_bytes
    files = {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}
    if len(groups) == 1:
        files = {"model.safetensors": groups[0]}
    try:
        for path, names in files.items() if write else ():
            with SafetensorsFile(out / path, {name: layout[name] for name in names}) as file:
                for name, tensor in itertools.islice(tensors, len(names)):
                    file.write(name, tensor)
    finally:  # also where the disk is full: the other ranks wait in the iterator's collectives
        for _ in tensors:
            pass
    if not write:
        return
    with writing(out, "config and tokenizer"):
        if len(files) > 1:
            weight_map = {name: path for path, names in files.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        (out / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")
        for folder, names in (tokenizer_folder, COPIED), (config_folder, ["config.json"]):
            for name in names:
                if folder and (Path(folder) / name).exists():
                    shutil.copyfile(Path(folder) / name, out / name)


def save_adapter(tensors, out, base, rank, alpha, dropout, targets):
    """Writes adapter_model.safetensors and adapter_config.json as PEFT reads them. tensors: {name: tensor}."""
    layout = {PEFT_PREFIX + name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    with SafetensorsFile(out / "adapter_model.safetensors", layout) as file:
        for name, tensor in tensors.items():
            file.write(PEFT_PREFIX + name, tensor)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "lora_alpha": alpha,
        "lora_dropout": dropout, "bias": "none", "target_modules": list(targets), "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True, "use_rslora": False, "use_dora": False,
        "modules_to_save": None,
    }
    with writing(out, "adapter_config.json"):
        (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def export(args, model, source, files, out, ranks):
    """Writes final/, the PEFT adapter or the whole model. Collective -> on rank 0 the adapter's tensors, or None."""
    raw_config, tokenizer_folder, weights_folder, base = files
    part, adapters, first, adapter = out / "final.part", args.lora or args.qlora, ranks.rank == 0, None
    with ranks.agree():  # before the first collective
        if first:
            shutil.rmtree(part, ignore_errors=True)  # a killed process may have left it
            part.mkdir()
    tensors = full_tensors(model, trainable_only=adapters)
    if adapters:
        adapter = {name: tensor for name, tensor in tensors if first}
    with ranks.agree():
        if adapters and first:
            save_adapter(adapter, part, base, args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_targets)
        if not adapters:
            layout = {name: source.tensors[name][1:] for name, _ in model.named_parameters()}
            tensors = ((name, tensor.to(layout[name][1])) for name, tensor in tensors)
            save_model(tensors, layout, part, raw_config, tokenizer_folder, weights_folder, write=first)
        if first:
            put_in_place(part)
    return adapter


def merge(args, source, adapter, files, out):
    """Writes merged/: the original weights with the adapter added in. One process, one tensor at a time."""
    (raw_config, tokenizer_folder, weights_folder, _), part = files, out / "merged.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    names = [name for name in source.tensors if name != HEAD or not raw_config.get("tie_word_embeddings")]
    layout = {name: source.tensors[name][1:] for name in names}
    tensors = merged_tensors(source, names, adapter, args.lora_alpha / args.lora_rank)
    save_model(tensors, layout, part, raw_config, tokenizer_folder, weights_folder, write=True)
    put_in_place(part)


def put_in_place(part):
    """final.part/ -> final/. An older result, if there is one, stays until this one is whole."""
    target, old = part.with_suffix(""), part.with_suffix(".old.part")
    sync(part)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    part.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path):
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------- rows of a run's checkpoint

REMOVE = "remove this checkpoint to continue from an older one"


def training_tensors(model, optimizer):
    """{name: tensor or DTensor} of all that training changes: trained weights and their optimizer state."""
    reshard_(model)
    tensors = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            tensors[name] = p.detach()
            tensors |= {f"{name}.{key}": value for key, value in optimizer.state[p].items()}
    return tensors


def rows_of_rank(tensors, rank):
    """{"name:first row": rows} that this rank writes. Of ranks that hold the same (replicas, no FSDP2, numbers) the
    first writes."""
    rows = {}
    for name, tensor in tensors.items():
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        first = rank == 0 if mesh is None else mesh.ndim == 1 or mesh.get_local_rank(0) == 0
        part, start = local(tensor)
        if first and part.numel():
            rows[f"{name}:{start}"] = part.reshape(-1) if part.dim() == 0 else part
    return rows


def write_rows(path, rows):
    """Writes one safetensors file, tensor by tensor, synced -> [its size, its checksum]."""
    file = SafetensorsFile(path, {key: (tuple(part.shape), part.dtype) for key, part in rows.items()})
    with file:
        crc = zlib.crc32(file.head)
        for key in list(file.offsets):  # in the order of the file
            crc = zlib.crc32(file.write(key, rows[key].cpu()), crc)
    return [path.stat().st_size, crc]


def load_checkpoint(folder, tensors):
    """Fills this rank's rows of `tensors` from the files of however many ranks wrote them. ValueError where a row is
    missing, twice there, or of another shape or dtype."""
    n_missing = {name: len(local(tensor)[0].reshape(-1, *tensor.shape[1:])) for name, tensor in tensors.items()}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as reader:
            for key in reader.keys():  # noqa: SIM118
                name, _, first = key.rpartition(":")
                if name not in tensors:
                    raise ValueError(f"{path}: {key}: this run trains no such tensor; {REMOVE}")
                (mine, start), rows, first = local(tensors[name]), reader.get_slice(key), int(first)
                mine = mine.reshape(-1) if mine.dim() == 0 else mine
                n_rows, *shape = rows.get_shape()
                if list(mine.shape[1:]) != shape or DTYPE_NAMES[mine.dtype] != rows.get_dtype():
                    raise ValueError(f"{path}: {key}: {rows.get_dtype()} {rows.get_shape()}, this run has "
                                     f"{DTYPE_NAMES[mine.dtype]} {list(tensors[name].shape)}; {REMOVE}")
                begin, end = max(start, first), min(start + len(mine), first + n_rows)
                if begin < end:
                    mine[begin - start : end - start].copy_(rows[begin - first : end - first])
                    n_missing[name] -= end - begin
    wrong = [name for name, n in n_missing.items() if n]
    if wrong:
        raise ValueError(f"{folder}: rows are missing or there twice: {listing(wrong)}; {REMOVE}")
