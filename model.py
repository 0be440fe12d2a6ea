"""The decoder of Llama 2/3, Mistral, Qwen2/2.5, Qwen3 and Qwen3-MoE, its loss, LoRA, and the files it is kept in.

Vanilla modules with Hugging Face's parameter names: no mapping table. The families differ in biases on q, k, v (Qwen2),
RMSNorm on each head of q and k (Qwen3), experts, a tied head, and RoPE. Logits are the largest tensor (8,192 x 128,256
x 4 bytes = 3.9 GiB), so they become their gradient in the forward, chunk by chunk (Liger, arXiv:2410.10989; Cut
Cross-Entropy, arXiv:2411.09009).

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
import zlib
from dataclasses import make_dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import nf4
from data import IGNORE, Spans, listing, put_in_place, read_json, writing

HEAD = "lm_head.weight"
TINY = Path(__file__).parent / "tests" / "tiny"  # the built-in model

# ---------------- config

PRESETS = json.loads((TINY.parent / "presets.json").read_text())  # {short name: config.json of a Hub model}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
# Bounds, before memory is allocated. key: type, smallest, largest, default (None: the key must be there)
FIELDS = {
    "vocab_size": (int, 1, 1 << 20, None), "hidden_size": (int, 1, 1 << 16, None),
    "intermediate_size": (int, 1, 1 << 18, None), "num_hidden_layers": (int, 1, 1 << 10, None),
    "num_attention_heads": (int, 1, 1 << 10, None), "num_key_value_heads": (int, 1, 1 << 10, None),
    "head_dim": (int, 2, 1 << 10, None), "max_position_embeddings": (int, 1, 1 << 30, None),
    "rms_norm_eps": (float, 1e-30, 1, 1e-6), "initializer_range": (float, 0, 1e3, 0.02),
    "tie_word_embeddings": (bool, False, True, False), "norm_topk_prob": (bool, False, True, False),
    "num_experts": (int, 0, 1 << 12, 0), "num_experts_per_tok": (int, 1, 1 << 8, None),
    "moe_intermediate_size": (int, 1, 1 << 18, None), "decoder_sparse_step": (int, 1, 1 << 10, 1),
}
POSITIVE = (float, 1e-30, 1e30, None)
# rope_scaling: {"rope_type": "default", "linear" or "llama3", ...}; mlp_only_layers: numbers of blocks without experts
OTHER_FIELDS = ("model_type", "rope_theta", "rope_scaling", "sliding_window", "dtype", "mlp_only_layers")
Config = make_dataclass("Config", [*FIELDS, *OTHER_FIELDS], frozen=True)
# A key here, unless absent, null or equal to the value, asks for something that the model does not compute.
REFUSED = {"hidden_act": "silu", "mlp_bias": False, "attention_dropout": 0, "pretraining_tp": 1, "logit_scale": 1.0,
           "use_sliding_window": False, "quantization_config": None, "output_router_logits": False, "is_causal": True,
           "partial_rotary_factor": 1.0, "final_logit_softcapping": None, "original_max_position_embeddings": None}


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
    architecture = f"{family.title().replace('_', '')}ForCausalLM"
    refuse(raw.get("architectures") not in (None, [], [architecture]), "architectures", f"not {architecture}")
    given = {key: value for key, value in raw.items() if value is not None}
    if "num_local_experts" in given:  # transformers 5
        given.setdefault("num_experts", given["num_local_experts"])
    if family == "llama":  # Llama-2 7B and 13B leave it out
        given.setdefault("num_key_value_heads", H)
    if family != "qwen3" and type(D) is type(H) is int and H > 0 and D % H == 0:
        given.setdefault("head_dim", D // H)
    unused = {} if family == "qwen3_moe" else {"num_experts_per_tok": 1, "moe_intermediate_size": 1}
    values = {key: read_field(unused | given, key, field, where) for key, field in FIELDS.items()}
    refuse(H % values["num_key_value_heads"], "num_key_value_heads", f"does not divide num_attention_heads {H}")
    refuse(values["head_dim"] % 2, "head_dim", "RoPE needs an even number")
    n_experts, dense = values["num_experts"], given.get("mlp_only_layers", [])
    refuse((n_experts > 0) != (family == "qwen3_moe"), "num_experts", "above 0 for qwen3_moe, absent for others")
    refuse(values["num_experts_per_tok"] > max(n_experts, 1), "num_experts_per_tok", f"above {n_experts} experts")
    key = "moe_intermediate_size"
    refuse(n_experts and math.gcd(D, values[key]) % 8, key, f"this and hidden_size {D} must be multiples of 8")
    refuse(not isinstance(dense, list) or any(type(i) is not int for i in dense), "mlp_only_layers", "expected numbers")
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
                  dtype=getattr(torch, dtype), mlp_only_layers=dense)


def parse_rope(given, family, values, where, refuse):
    """-> (theta, scaling). `rope_theta` + `rope_scaling` and transformers 5's `rope_parameters` must agree."""
    fields = {"default": {}, "linear": {"factor": POSITIVE},
              "llama3": {"factor": POSITIVE, "low_freq_factor": POSITIVE, "high_freq_factor": POSITIVE,
                         "original_max_position_embeddings": (int, 1, 1 << 30, values["max_position_embeddings"])}}
    theta, scalings = given.get("rope_theta"), []
    for key in [key for key in ("rope_scaling", "rope_parameters") if given.get(key)]:
        rope = given[key]
        flat = isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values())
        refuse(not flat, key, "expected one flat object; rope parameters per layer type are not implemented")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        refuse(kind not in list(fields), key, f"rope_type is not one of {', '.join(fields)}")
        refuse(rope.get("partial_rotary_factor") not in (None, 1), key, "partial_rotary_factor is not implemented")
        scaling = {name: read_field(rope, name, field, f"{where}: {key}") for name, field in fields[kind].items()}
        wrong = kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]
        refuse(wrong, key, "llama3 needs high_freq_factor above low_freq_factor")
        theta = rope.get("rope_theta", theta)
        scalings.append({"rope_type": kind, **scaling})
    scalings = scalings or [{"rope_type": "default"}]
    refuse(scalings[0] != scalings[-1], "rope_scaling", "rope_parameters differ: leave one of the two out")
    # Old Llama-2 files leave out their 10000. Elsewhere that default would train on wrong positions (vllm #42624).
    no_default = family.startswith("qwen") or scalings[-1]["rope_type"] == "llama3" or values["vocab_size"] >= 100_000
    refuse(theta is None and no_default, "rope_theta", "missing, with no safe default: copy it from the model's page")
    return read_field({"rope_theta": theta}, "rope_theta", (*POSITIVE[:3], 1e4), where), scalings[-1]


# ---------------- blocks


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)  # float32 inside


class Linear(nn.Linear):  # its weights may be stored in another dtype (float32 masters) than it computes in
    def forward(self, x, ends=None):  # ends: of a stack of experts, see nf4.linear
        y = nf4.linear(x, self.weight.to(x.dtype), ends)
        return y if self.bias is None else y + self.bias.to(x.dtype)


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


def attend_split(q_BTHK, k_BTGK, v_BTGK, spans):
    """attend() of rows on S ranks (Ulysses, arXiv:2309.14509): an all-to-all turns a piece of the tokens with all heads
    into all tokens with some heads, another turns it back: 2 * tokens * (2*H + 2*G) * K / S bytes a rank."""

    def exchange(x):  # [S, ...]: row i goes to rank i
        return all_to_all_single(torch.empty_like(x), x, group=spans.group)

    (B, T, H, K), S = q_BTHK.shape, spans.group.size()
    copies = S // math.gcd(k_BTGK.shape[2], S)  # of a key head, whose query heads lie on several ranks
    k_BTGK, v_BTGK = (t if copies == 1 else t.repeat_interleave(copies, 2) for t in (k_BTGK, v_BTGK))
    parts = [t.reshape(B * T, S, -1, K).transpose(0, 1) for t in (q_BTHK, k_BTGK, v_BTGK)]
    qkv = exchange(torch.cat(parts, 2)).flatten(0, 1)
    q, k, v = (t[None] for t in qkv.split([part.shape[2] for part in parts], 1))
    out = attend(q, k, v, Spans(spans.pairs, spans.bounds, spans.longest)).view(S, B * T, -1)
    return exchange(out).transpose(0, 1).reshape(B, T, H * K)


def takes_documents(dtype, K, device):
    """Whether FlashAttention over documents runs: 16 bits, heads of 8, 16, ... 256, an Ampere card or newer."""
    fits = device.type == "cuda" and dtype is not torch.float32 and K in range(8, 257, 8)
    return fits and torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def attend_documents():
    """FlashAttention over documents. Its import takes 0.3 s, and only a GPU has it."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 shares key heads between query heads unasked, later versions want to be asked
    gqa = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return functools.partial(varlen_attn, window_size=(-1, 0), **gqa)


def attend(q_BTHK, k_BTGK, v_BTGK, spans):
    """Causal attention inside each document of the flattened B*T tokens. Nothing takes T*T bytes. Padding gets any
    finite values."""
    if spans.group is not None:
        return attend_split(q_BTHK, k_BTGK, v_BTGK, spans)
    (B, T, H, K), one_more = q_BTHK.shape, k_BTGK.shape[1] > q_BTHK.shape[1]  # a token behind a cache sees all of it
    q, k, v = (t.flatten(0, 1) for t in (q_BTHK, k_BTGK, v_BTGK))
    if spans.bounds is not None and takes_documents(q.dtype, K, q.device):
        limits = spans.bounds, spans.bounds, spans.longest, spans.longest
        return attend_documents()(q, k, v, *limits).view(B, T, H * K)
    if q.is_cuda and not takes_documents(q.dtype, K, q.device):  # else the math kernel, which holds all scores
        k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    sdpa = functools.partial(F.scaled_dot_product_attention, is_causal=not one_more, enable_gqa=k.shape[1] != H)
    # oneDNN keeps 4 MiB of bf16 kernels for each length. So every length is filled up to a multiple of 32: causal
    # attention hides the added tokens, which come later, and their outputs are cut off.
    step = 32 if q.device.type == "cpu" else 1
    if one_more or (spans.bounds is None and spans.pairs[0][1] % step == 0):  # equal documents: no copy is saved
        q, k, v = (t.unflatten(0, (len(spans.pairs), -1)).transpose(1, 2) for t in (q, k, v))
        return sdpa(q, k, v).transpose(1, 2).reshape(B, T, H * K)
    sizes = [stop - start for start, stop in itertools.pairwise([0, *itertools.chain(*spans.pairs), B * T])]
    parts = [t.split(sizes) for t in (q, k, v)]  # gap, document, gap, ... document, gap
    out = list(parts[0])
    for i in range(1, len(sizes), 2):
        qkv = (F.pad(t[i], (0, 0, 0, 0, 0, -sizes[i] % step)) if sizes[i] % step else t[i] for t in parts)
        out[i] = sdpa(*(t.transpose(0, 1)[None] for t in qkv))[0].transpose(0, 1)[: sizes[i]]
    return torch.cat(out).view(B, T, H * K)


def gated_mlp(D, width, n_experts=1):
    return nn.ModuleDict({"gate_proj": Linear(D, n_experts * width, bias=False),
                          "up_proj": Linear(D, n_experts * width, bias=False),
                          "down_proj": Linear(width, n_experts * D, bias=False)})


class Route(torch.autograd.Function):
    """[N, D] -> [N * k, D]: tokens for each of their k experts, sorted by expert; with `back` [N * k, D] -> [N, D], the
    sums: each is the other's backward. Autograd's own adds atomically on a GPU: other bits in each run."""

    @staticmethod
    def forward(ctx, x, order, k, N, back):
        ctx.route = order, k, N, not back  # no saved tensor: a recomputation would run up to the last product for it
        if back:
            return x[order.argsort()[: N * k]].unflatten(0, (N, k)).sum(1)
        return x[(order // k).clamp_max(N - 1)]

    @staticmethod
    def backward(ctx, grad):
        return Route.apply(grad, *ctx.route), None, None, None, None


class MoE(nn.Module):
    """The MLP of Qwen3-MoE: each token takes the k of E experts with the highest odds. A stack of experts is one matrix
    of E * N rows: NF4, FSDP2 and LoRA see a matrix like any other. Nothing balances the load of the experts."""

    def __init__(self, c):
        super().__init__()
        D, E, width = c.hidden_size, c.num_experts, c.moe_intermediate_size
        self.n_experts, self.n_chosen, self.normalize = E, c.num_experts_per_tok, c.norm_topk_prob
        self.gate, self.experts = Linear(D, E, bias=False), gated_mlp(D, width, E)

    def forward(self, h):
        k, h_ND, E = self.n_chosen, h.flatten(0, -2), self.n_experts
        odds_Nk, chosen_Nk = self.gate(h_ND).softmax(-1, dtype=torch.float32).topk(k)
        if self.normalize:
            odds_Nk = odds_Nk / odds_Nk.sum(-1, keepdim=True)
        chosen, route = chosen_Nk.flatten(), (k, len(h_ND))
        if h.device.type == "cpu" and h.dtype is not torch.float32:  # as in attend: rows of odds 0, to multiples of 32
            n_more = -chosen.bincount(minlength=E) % 32
            chosen = torch.cat([chosen, torch.arange(E).repeat_interleave(n_more)])
        chosen, order = chosen.sort(stable=True)  # rows by expert, order[i] // k is the token of row i
        ends = torch.searchsorted(chosen, torch.arange(E, device=h.device), right=True, out_int32=True)
        rows = Route.apply(h_ND, order, *route, False)
        gated = F.silu(self.experts.gate_proj(rows, ends)) * self.experts.up_proj(rows, ends)
        # scaled before the last product: the sums are the same, and a recomputation can end here
        odds = F.pad(odds_Nk.flatten(), (0, len(order) - odds_Nk.numel()))[order, None]
        return Route.apply(self.experts.down_proj(gated * odds.to(h.dtype), ends), order, *route, True).view_as(h)


class Block(nn.Module):
    """--compile compiles before_attention and before_down_proj: no list of documents reaches them, so packed rows
    compile once. down_proj stays out, because activation checkpointing's second forward ends before it."""

    def __init__(self, c, number):
        super().__init__()
        D, width, K, eps = c.hidden_size, c.intermediate_size, c.head_dim, c.rms_norm_eps
        q_size, kv_size, bias = c.num_attention_heads * K, c.num_key_value_heads * K, c.model_type == "qwen2"
        norm = RMSNorm if c.model_type.startswith("qwen3") else nn.Identity
        self.head_dim, self.input_layernorm = K, RMSNorm(D, eps)
        self.self_attn = nn.ModuleDict({
            "q_proj": Linear(D, q_size, bias), "k_proj": Linear(D, kv_size, bias), "v_proj": Linear(D, kv_size, bias),
            "o_proj": Linear(q_size, D, bias=False), "q_norm": norm(K, eps), "k_norm": norm(K, eps),
        })
        self.post_attention_layernorm = RMSNorm(D, eps)
        is_dense = not c.num_experts or number in c.mlp_only_layers or (number + 1) % c.decoder_sparse_step
        self.mlp = gated_mlp(D, width) if is_dense else MoE(c)

    def forward(self, x, rope, spans):
        q_BTHK, *kv = self.before_attention(x, rope)
        if spans.cache is not None:
            if self in spans.cache:
                kv = [torch.cat(pair, 1) for pair in zip(spans.cache[self], kv)]
            spans.cache[self] = kv
        return self.after_attention(x, attend(q_BTHK, *kv, spans))

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
        if isinstance(self.mlp, MoE):
            return x, h
        return x, F.silu(self.mlp.gate_proj(h)) * self.mlp.up_proj(h)

    def after_attention(self, x, attention):
        x, h = self.before_down_proj(x, attention)
        rest = self.mlp if isinstance(self.mlp, MoE) else self.mlp.down_proj
        return x + rest(h)


class SaveNow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, needs_grad, *tensors):  # they are .grad_fn.saved_tensors of the result
        ctx.save_for_backward(*tensors)
        return needs_grad.new_empty(0)


def tile_mlp_(model, tile):
    """Runs what follows attention `tile` tokens at a time, each tile a checkpoint: 6*F values a token live for one tile
    (ALST, arXiv:2506.13996). In a checkpointed block tiles would run three times: its second forward ends at its last
    saved tensor, a tile's input. So SaveNow saves all inputs first, tiles outside those hooks."""

    def after_attention(plain, x, attention):
        saved = SaveNow.apply(torch.empty(0, requires_grad=True), x, attention)  # torch 2.11 frees them with it
        tiles = list(zip(x.flatten(0, 1).split(tile), attention.flatten(0, 1).split(tile)))

        def run(i):
            if not tiles:  # in the backward
                inputs = (t.detach().requires_grad_(t.requires_grad) for t in saved.grad_fn.saved_tensors)
                tiles.extend(zip(*(t.flatten(0, 1).split(tile) for t in inputs)))
            return plain(*tiles[i])

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            out_ND = torch.cat([checkpoint(run, i, use_reentrant=False) for i in range(len(tiles))])
        tiles.clear()
        return out_ND.view_as(x)

    for block in model.model.layers:
        block.after_attention = functools.partial(after_attention, block.after_attention)


# ---------------- loss

PIECE = 256  # rows of logits that are in float32 at once


def softmax_gradient(logits_CV, targets_C1):
    """-> (summed cross-entropy, its gradient softmax - one-hot in the dtype of the logits), without rows whose target
    is IGNORE. Works in place on one float32 copy; --compile makes two passes over the logits, no copy."""
    dtype, logits_CV = logits_CV.dtype, logits_CV.float()
    real_C1, targets_C1 = (targets_C1 != IGNORE).float(), targets_C1.clamp_min(0)
    logits_CV -= logits_CV.amax(-1, keepdim=True)
    target_logit_C1 = logits_CV.gather(-1, targets_C1)
    total_C1 = logits_CV.exp_().sum(-1, keepdim=True)
    loss = ((total_C1.log() - target_logit_C1) * real_C1).sum()
    scale_C1 = real_C1 / total_C1
    logits_CV *= scale_C1  # softmax
    grad_CV, rows_C1 = logits_CV.to(dtype), torch.arange(len(targets_C1), device=targets_C1.device)[:, None]
    # from the float32 logit: where the model is sure, softmax - 1 is far below a 16-bit softmax's rounding
    grad_CV[rows_C1, targets_C1] = (target_logit_C1.exp() * scale_C1 - real_C1).to(dtype)
    return loss, grad_CV


class ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of h_SD @ w_VD.T against targets_S, float32, gradients computed in the forward. Alive at
    once: a chunk of logits, which become their gradient (C*V*2 bytes in bf16), PIECE rows of both (V*6 bytes each), and
    a trained head's gradient in float32 (V*D*4 bytes). A rank without a target (S = 0) joins every collective, too."""

    @staticmethod
    def forward(ctx, h_SD, w_VD, targets_S, chunk, with_grad, softmax_gradient=softmax_gradient):
        loss_sum = torch.zeros((), dtype=torch.float32, device=h_SD.device)
        grad_h = torch.empty_like(h_SD) if with_grad and ctx.needs_input_grad[0] else None
        trained, grad_w = with_grad and ctx.needs_input_grad[1], None
        memory_CV = h_SD.new_empty(min(chunk, len(h_SD)), len(w_VD))
        for start in range(0, len(h_SD), chunk):
            h_CD, targets_C1 = h_SD[start : start + chunk], targets_S[start : start + chunk, None]
            logits_CV = torch.mm(h_CD, w_VD.T, out=memory_CV[: len(h_CD)])
            for piece, targets in zip(logits_CV.split(PIECE), targets_C1.split(PIECE)):
                loss, grad = softmax_gradient(piece, targets)
                piece.copy_(grad)
                del grad  # or it would stay alive beside the next piece's
                loss_sum += loss
            if grad_h is not None:
                torch.mm(logits_CV, w_VD, out=grad_h[start : start + chunk])
            if trained and grad_w is not None:
                grad_w += logits_CV.T @ h_CD
            elif trained:
                grad_w = (logits_CV.T @ h_CD).to(w_VD.dtype if len(h_SD) <= chunk else torch.float32)
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
    """Head and loss are one module: under FSDP2 the weight exists only inside this forward."""

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
        # the last token, without a target, fills up 128 rows: allocators and oneDNN keep memory for each new size
        S = len(keep_S)
        keep_S = torch.cat([keep_S, keep_S[-1:].expand(min(-S % 128, targets_BT.numel() - S))])
        h_SD, targets_S = x.flatten(0, 1)[keep_S], targets_BT.flatten()[keep_S]
        targets_S[S:] = IGNORE
        if self.chunk:
            options = self.chunk, torch.is_grad_enabled(), self.softmax_gradient
            return ChunkedCrossEntropy.apply(h_SD, w_VD, targets_S, *options)
        return F.cross_entropy(F.linear(h_SD, w_VD).float(), targets_S, reduction="sum")


class Transformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config, self.compute_dtype = c, torch.float32
        self.activation_hooks = None  # a context manager around the blocks: train.py's activation offload
        self.sequence_group = None  # the ranks that hold pieces of the same rows: --sequence_parallel
        self.model = nn.ModuleDict({
            # without the initial values, which import torch._dynamo: 0.5 s
            "embed_tokens": nn.Embedding(c.vocab_size, c.hidden_size, _weight=torch.empty(c.vocab_size, c.hidden_size)),
            "layers": nn.ModuleList(Block(c, i) for i in range(c.num_hidden_layers)),
            "norm": RMSNorm(c.hidden_size, c.rms_norm_eps),
        })
        self.lm_head = LMHead(c)
        self.tie_()

    def tie_(self):
        """Makes head and embedding one parameter where the config says so; to_empty() makes two of it again."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_BT, targets_BT=None, positions_BT=None, spans=None, keep_S=None, cache=None):
        """tokens [B, T] -> summed loss over the supervised tokens; without targets logits [B, T, V], with a cache of
        the last token. With a sequence_group tensors hold this rank's piece of the tokens, spans describe all of
        them. positions restart at 0 in every document; without them tokens are whole rows."""
        B, T = tokens_BT.shape
        if positions_BT is None:
            first = next(iter(cache.values()))[0].shape[1] if cache else 0
            positions_BT = torch.arange(first, first + T, device=tokens_BT.device).expand(B, T)
            spans = Spans([(row * T, row * T + T) for row in range(B)], cache=cache)
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
        if cache is not None:
            x = x[:, -1:]
        return self.lm_head(self.model.norm(x), targets_BT, keep_S)


SEEDS = itertools.count()  # one for each answer, the same on every rank


@torch.no_grad()
@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])  # cuDNN plans each length
def next_logits(model, tokens, device, cache):
    """[V] float32 on the CPU: logits after a list of token ids. The cache takes 2 * layers * G * K values a token."""
    return model(torch.tensor([tokens], device=device), cache=cache)[0, -1].cpu()


def generate(model, tokens, n, stop, device, temperature=0.0):
    """Yields up to n ids after `tokens`, none of `stop`, inside a sliding window. Temperature 0: the likeliest."""
    cache, generator = {}, torch.Generator().manual_seed(next(SEEDS))
    for _ in range(min(n, (model.config.sliding_window or math.inf) - len(tokens))):
        logits_V = next_logits(model, tokens, device, cache)
        token = int(logits_V.argmax())
        if temperature:
            odds_V = ((logits_V - logits_V.max()) / temperature).softmax(-1)
            token = int(torch.multinomial(odds_V, 1, generator=generator))
        if token in stop:
            return
        yield token
        tokens = [token]


def step_flops(c, counted, is_frozen):
    """FLOP of a step without recomputation. A weight and token: 2 forward, 4 backward; two tokens: 4*H*K forward, half
    of them masked, 2.5 times that backward. Adapters, about 1 %, are left out. counted: targets, tokens, squared
    document lengths."""
    n_targets, n_tokens, n_squares = counted
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    width = c.num_experts_per_tok * c.moe_intermediate_size if c.num_experts else c.intermediate_size
    block = c.hidden_size * (2 * q + 2 * kv + 3 * width + c.num_experts)
    products = block * c.num_hidden_layers * n_tokens + c.hidden_size * c.vocab_size * n_targets
    attention = 2 * q * c.num_hidden_layers * n_squares * 3.5
    return attention + (4 if is_frozen else 6) * products


def activation_bytes(args, c, size, n_tokens, checkpointed, keeps_weights):
    """{what: bytes}: a block's input, all it saves for the backward, and the most that its backward holds in attention
    and in the MLP, for products of `size` bytes a number, as CUDA kernels save them. FlashAttention: q, k, v, its
    output, a float32 a head; its backward adds up dq in float32 and makes dk, dv of each query head. The kernel for
    float32 has no such sums and needs keys of each query head. attention, mlp, down are numbers a token."""
    D, F, N, k = c.hidden_size, c.intermediate_size, n_tokens, 1
    Q, own_G = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    adapters, split = args.lora_targets if args.lora else [], args.sequence_parallel > 1
    n_weights, rows, router = D * F, 0, 0  # of down_proj
    if c.num_experts:
        k, n_weights = c.num_experts_per_tok, D * c.num_experts * c.moe_intermediate_size
        F, rows = k * c.moe_intermediate_size, k * D
        router = F + (4 * c.num_experts + 32 * k) / size + (0 if adapters else D)  # F: what the odds are applied to

    def input_of(width, *names):  # what the gradients of these weights need of their common input
        n = sum(name in (adapters or LORA_TARGETS) for name in names)
        return n * width * (1 + 1 / size) if args.lora_dropout else min(n, 1) * width  # a copy and a byte mask for each

    # under --sequence_parallel key heads are repeated until each rank has as many
    G = c.head_dim * math.lcm(c.num_key_value_heads, args.sequence_parallel)
    attention = 2 * Q + 2 * G + 4 / size * c.num_attention_heads + input_of(D, "q_proj", "k_proj", "v_proj")
    attention += (args.lora_rank or 0) * sum(k if name in LORA_TARGETS[4:] else 1 for name in adapters)
    attention += Q if split else 0  # the kernel's output, and what the second all-to-all makes of it
    if size == 4 and G < Q:
        attention += 2 * Q - (0 if split else 2 * G)  # what the first all-to-all brought stays beside the copies
    if c.model_type.startswith("qwen3"):
        attention += Q + own_G  # inputs of the norms of q and k
    kernel = (2 * Q if size == 2 else 0) + (2 * Q if G < Q else 0)
    in_attention = N * (attention + D + Q + (Q + 2 * G) * (2 if split else 1) + kernel)

    down, tile, weight = input_of(F, "down_proj"), min(args.tiled_mlp or N, N), n_weights if args.qlora else 0
    mlp = 3 * F + router + input_of(k * D, "gate_proj", "up_proj")
    mlp += input_of(Q, "o_proj") if args.lora_dropout else 0  # else it is attention's output
    dequantizing = 6 / size * min(nf4.CHUNK, weight) + (tile * rows if weight and "down_proj" in adapters else 0)
    in_mlp = N * attention + tile * (mlp + 2 * D) + max(
        tile * max(3 * F, down + 2 * F, 3 * rows), tile * (F + 2 * rows) + weight + max(tile * down, dequantizing))
    saved = N * (attention + mlp + down + 2 * D)
    if args.tiled_mlp:  # gradients of the output, and of what earlier tiles read
        saved = N * (attention + D)
        in_mlp += N * D + (N - tile) * (D + Q)
    if keeps_weights:
        saved += 2 * D * (Q + own_G) + 3 * n_weights
    if checkpointed:
        saved = N * (D + (8 * k / size if c.num_experts else 0))  # and the order of the experts' rows
    if keeps_weights or (checkpointed and args.qlora):  # dequantized, and `weight` is down_proj's
        in_attention += 2 * D * (Q + own_G)
        in_mlp += 2 * D * (Q + own_G) + 2 * n_weights
    numbers = {"input": N * D, "saved": saved, "in attention": in_attention, "in mlp": in_mlp}
    return {what: int(size * n) for what, n in numbers.items()}


def loss_bytes(args, c, size, n_tokens):
    """Of the logits, their gradient and the head's, while the loss computes them chunk by chunk."""
    n_head, chunk = 0 if args.lora else c.vocab_size * c.hidden_size, min(args.ce_chunk, n_tokens)
    if not args.chunked_ce:
        return 12 * n_tokens * c.vocab_size
    sums = 4 * n_head if chunk < n_tokens else 0  # gradients of several chunks are added up in float32
    piece = min(chunk, PIECE) * c.vocab_size * (6 if size == 2 else 0)
    return sums + chunk * c.vocab_size * size + max(piece, n_head * size)


# ---------------- LoRA

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT_PREFIX = "base_model.model."  # PEFT's name of a tensor is this and ours


class LoRA:
    """y = W x + (alpha / rank) B A x (arXiv:2106.09685), with PEFT's names."""

    def forward(self, x, ends=None):
        # the frozen base last: it saves nothing, so the recomputation of a block ends before down_proj
        delta = self.lora_B(self.lora_A(F.dropout(x, self.lora_dropout, self.training), ends) * self.lora_scale, ends)
        return delta + super().forward(x, ends)


WITH_LORA = {base: type(f"LoRA{base.__name__}", (LoRA, base), {}) for base in (Linear, nf4.NF4Linear)}


def add_lora_(model, rank, alpha, dropout, targets):
    """Gives the layers of the blocks named in `targets` adapters, A [R, in] and B [out, R], and freezes all else. They
    change class: torch.compile, which looks at types, compiles one block for all."""
    model.requires_grad_(False)
    for name, linear in list(model.model.layers.named_modules()):
        if name.rsplit(".")[-1] in targets:
            n = len(file_names(name, model.config))
            with torch.device(next(linear.parameters()).device):
                linear.lora_A = Linear(linear.in_features, n * rank, bias=False)
                linear.lora_B = Linear(rank, linear.out_features, bias=False)
            linear.lora_scale, linear.lora_dropout = alpha / rank, dropout
            linear.__class__ = WITH_LORA[type(linear)]


# ---------------- precision, checkpointing, compile


def set_precision_(model, precision):
    """float32 masters: an update below 1/256 of a bf16 weight is lost (accelerate #2624)."""
    trained = torch.bfloat16 if precision == "bf16" else torch.float32
    frozen = torch.float32 if precision == "fp32" else torch.bfloat16
    for param in model.parameters():
        if param.is_floating_point():
            param.data = param.data.to(trained if param.requires_grad else frozen)
    model.compute_dtype = frozen


def on_meta(config, args):
    """The model of a run on the meta device: vanilla, then NF4, LoRA, dtypes. `main` and the plan start here."""
    with torch.device("meta"):
        model = Transformer(config)
    if args.qlora:
        nf4.quantize_linears_(model.model.layers)
    if args.lora:
        add_lora_(model, args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_targets)
    set_precision_(model, args.precision)
    model.lm_head.chunk = args.ce_chunk
    return model


def compile_(model, packing):
    """torch.compile on both parts of a block around attention, once for all blocks, on the loss and on dequantization.
    Evaluation runs uncompiled. Call it before tile_mlp_ and checkpoint_activations_."""

    def in_training(plain, dynamic):
        fast = torch.compile(plain, fullgraph=True, dynamic=dynamic)  # fullgraph: a graph break is an error
        return lambda *args: (fast if model.training else plain)(*args)

    torch._dynamo.config.recompile_limit = 64  # beyond it a run ends; torch's is 8
    for block in model.model.layers:
        block.before_attention = in_training(block.before_attention, dynamic=not packing)
        block.before_down_proj = in_training(block.before_down_proj, dynamic=not packing)
    for module in model.modules():
        if isinstance(module, nf4.NF4Linear):
            module.fast = True
    model.lm_head.softmax_gradient = in_training(softmax_gradient, dynamic=True)  # the last piece is shorter


def checkpoint_activations_(model, preserve_rng, n_blocks=None):
    """Keeps the inputs of the first blocks, 2*D bytes a token and not about 34*D, and recomputes the rest in the
    backward, at most a third more FLOP (arXiv:1604.06174). Dropout needs the random state back."""
    again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=preserve_rng)
    for block in model.model.layers[:n_blocks]:
        block.forward = functools.partial(again, block.forward)
        keep_weights_(block)


def keep_weights_(module):
    """The backward uses the NF4 weights that the forward (checkpointed: the second one) has dequantized."""
    for layer in module.modules():
        if isinstance(layer, nf4.NF4Linear):
            layer.keeps_weight = True


# ---------------- reading weights

def find_result(name):
    """--model, also the folder of a run (merged/, else final/) or of an adapter -> (model, adapter or None)."""
    for folder in (Path(name), Path(name) / "merged", Path(name) / "final"):
        if (folder / "config.json").exists():
            return str(folder), None
        if (folder / "adapter_config.json").exists():
            return str(read_json(folder / "adapter_config.json").get("base_model_name_or_path")), str(folder)
    return name, None


def find_model(name, random_init):
    """--model -> (raw config, folder of the tokenizer, folder of the weights or None for random ones, base name)."""
    if name in PRESETS:
        return PRESETS[name], TINY, None, name
    folder = TINY if name == "tiny" else Path(name)
    if folder.is_dir():
        name = str(folder.resolve())
    elif name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"--model {name}: no such folder; expected tiny, a folder, a Hub id (Qwen/Qwen3-4B) or, with "
                         f"--random_init, {' '.join(PRESETS)}")
    else:
        from huggingface_hub import snapshot_download

        weights = [] if random_init else ["model*.safetensors"]  # not consolidated.safetensors, the same again
        wanted = ["*.json", "*.jinja", "merges.txt", "tokenizer.model", *weights]
        try:
            folder = Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=["onnx/*", "original/*"]))
        except (OSError, ValueError) as error:
            raise ValueError(f"--model {name}: no such folder, and not fetched from the Hub: {error}") from error
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: no config.json: expected a model folder as transformers saves it")
    return read_json(folder / "config.json"), folder, None if random_init else folder, name


DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of checkpoints
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.uint8: "U8"}


class Checkpoint:
    """The safetensors files of a folder, read by rows. tensors: {name: ((file, first byte), shape, dtype)}. ValueError
    where a file is missing, cut short, in another format, or names a tensor twice."""

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
                                 "which can run code (transformers' save_pretrained writes safetensors)")
            self.read_header(path)

    def read_header(self, path):
        try:
            with safe_open(path, framework="pt"), open(path, "rb") as file:  # the library checks header and length
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except SafetensorError as error:
            raise ValueError(f"{path}: damaged or cut short ({listing([str(error)])}): download it again") from error
        header.pop("__metadata__", None)
        for name, part in header.items():
            if part["dtype"] not in DTYPES:
                raise ValueError(f"{path}: {listing([name])}: expected float32, float16 or bfloat16, got "
                                 f"{part['dtype']}; for 4 bits use the unquantized model and --qlora")
            if name in self.tensors:
                raise ValueError(f"{path}: {listing([name])} is in {self.tensors[name][0][0].name} as well")
            place = path, 8 + length + part["data_offsets"][0]
            self.tensors[name] = place, tuple(part["shape"]), DTYPES[part["dtype"]]

    def rows(self, name, start, stop):
        """Rows [start, stop) of a tensor, on the CPU. Not by the library: its mapped pages pile up."""
        (path, first), (_, *shape), dtype = self.tensors[name]
        out = torch.empty(stop - start, *shape, dtype=dtype)
        with open(path, "rb") as file:
            file.seek(first + start * math.prod(shape) * dtype.itemsize)
            if file.readinto(out.view(torch.uint8).numpy()) != out.nbytes:
                raise OSError(f"{path}: {name}: the file became shorter while it was read")
        return out

    def crc(self):
        """Checksum of 1 MB from the middle of each file: tells base from Instruct."""
        crc = 0
        for path in self.files:
            with open(path, "rb") as file:
                file.seek(path.stat().st_size // 2)
                crc = zlib.crc32(file.read(1 << 20), crc)
        return crc


def file_names(name, config):
    """Names in files of a parameter, or of its adapter: each expert of a stack has a matrix of its own there."""
    before, is_stack, after = name.partition(".experts.")
    return [f"{before}.experts.{i}.{after}" for i in range(config.num_experts)] if is_stack else [name]


def rows_of(source, names, start, stop):
    """Yields (rows of a matrix, their slice of [start, stop)) of the matrices `names`, as if these were one."""
    n = source.tensors[names[0]][1][0]
    for i in range(start // n, -(-stop // n)):
        first, last = max(start, i * n), min(stop, i * n + n)
        yield source.rows(names[i], first - i * n, last - i * n), slice(first - start, last - start)


class RandomWeights:
    """In place of a Checkpoint: normal weights, norms of one, biases of zero, by name and row."""

    def __init__(self, model, seed, device):
        self.seed, self.device, self.config = seed, device, model.config
        self.tensors = {name: (None, shape, self.config.dtype) for name, shape in shapes_in_files(model).items()}

    def rows(self, name, start, stop):
        shape = self.tensors[name][1]
        if len(shape) == 1:
            return torch.full((stop - start,), float(name.endswith("norm.weight")))
        return random_rows(name, shape[1], start, stop, self.seed, self.device).mul_(self.config.initializer_range)

    def crc(self):
        return zlib.crc32(repr((self.seed, self.config)).encode())


def random_rows(name, width, start, stop, seed, device, uniform=False):
    """Rows [start, stop) of a random matrix, normal or uniform in [-1, 1), for any sharding: 256 rows a seed."""
    out = torch.empty(stop - start, width, device=device)
    for block in range(start // 256, -(-stop // 256)):
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}/{block}".encode()))
        rows, first = torch.empty(256, width, device=device), max(start, block * 256)
        rows.uniform_(-1, 1, generator=generator) if uniform else rows.normal_(generator=generator)
        rows = rows[first - block * 256 : stop - block * 256]
        out[first - start : first - start + len(rows)] = rows
    return out


def shapes_in_files(model):
    """{name: shape} of a model's parameters as files hold them."""
    shapes = {}
    for stack, p in model.named_parameters():
        names = file_names(stack, model.config)
        shapes |= {name: (len(p) // len(names), *p.shape[1:]) for name in names}
    return shapes


def check_weights(model, checkpoint, folder):
    """Compares the names and shapes of a model, or of its LoRA layers if it has any, with a file's, or raises."""
    shapes = shapes_in_files(model)
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


# These keys may have these values, those any; every other one must be unset.
ADAPTER_KEYS = {"peft_type": ["LORA"], "task_type": ["CAUSAL_LM"], "bias": ["none"],
                "init_lora_weights": [True, False, "gaussian"],  # PiSSA and others change the base weights
                "layers_to_transform": [],  # 0 and false are layer 0
                "rank_pattern": [{}], "alpha_pattern": [{}], "loftq_config": [{}]}
ADAPTER_FREE = ("r", "lora_alpha", "lora_dropout", "target_modules", "base_model_name_or_path", "auto_mapping",
                "revision", "inference_mode", "peft_version", "megatron_core", "qalora_group_size", "target_parameters")


def open_adapter(folder):
    """A PEFT LoRA adapter -> (Checkpoint, {flag: value}). ValueError names a key that is not understood. Tensors say
    which layers are meant: target_modules may be a regular expression, which could run for ever."""
    where = f"{folder}/adapter_config.json"
    config = read_json(where)
    for key, value in config.items():
        if key not in ADAPTER_FREE and value not in [None, *ADAPTER_KEYS.get(key, [False, "", []])]:
            raise ValueError(f"{where}: {listing([key])} = {json.dumps(value)[:200]} is not implemented")
    checkpoint, modules = Checkpoint(folder, "adapter_model.safetensors"), config.get("target_modules")
    found = {name.split(".lora_")[0].rsplit(".")[-1] for name in checkpoint.tensors}
    named = {str(module).rsplit(".")[-1] for module in modules} if isinstance(modules, list) else found
    if not isinstance(modules, list | str) or not found or found != named or found - set(LORA_TARGETS):
        raise ValueError(f"{where}: target_modules = {json.dumps(modules)[:200]}: adapter_model.safetensors has "
                         f"{listing(found)}, expected some of {', '.join(LORA_TARGETS)}")
    fields = {"r": (int, 1, 4096, None), "lora_alpha": POSITIVE, "lora_dropout": (float, 0, 0.99, 0.0)}
    rank, alpha, dropout = (read_field(config, key, field, where) for key, field in fields.items())
    return checkpoint, {"lora_rank": rank, "lora_alpha": alpha, "lora_dropout": dropout,
                        "lora_targets": [target for target in LORA_TARGETS if target in found]}


def is_sharded(tensor):
    """Whether it is a DTensor of FSDP2. Only what shards imports that class: 0.4 s."""
    return hasattr(tensor, "placements")


def local(param):
    """(this rank's rows of a parameter as a plain tensor, its first row in the full one)."""
    if not is_sharded(param):
        return param.data, 0
    (dim,) = (i for i, placement in enumerate(param.placements) if placement.is_shard(0))
    rows = -(-param.shape[0] // param.device_mesh.size(dim))  # FSDP2 cuts like torch.chunk
    return param.to_local().data, min(rows * param.device_mesh.get_local_rank(dim), param.shape[0])


def check_finite(tensors, step, ranks):
    """Ends the run where a tensor of {name: tensor} is inf or nan. Collective."""
    wrong = [name for name, tensor in tensors.items() if not local(tensor)[0].isfinite().all()]
    if wrong := list(itertools.chain(*ranks.gather(wrong))):
        ranks.leave()
        cause = "lower --lr" if step else "the files of --model are damaged"
        raise FloatingPointError(f"{wrong[0]} holds inf or nan after {step} steps, nothing is saved: {cause}")


@torch.no_grad()
def load_weights_(model, source, adapter, seed, device, progress=False, frozen_only=False):
    """Fills a sharded, quantized, adapted model. A rank reads the rows it keeps, a tensor at a time. adapter: a
    Checkpoint, or None for a fresh one; frozen_only: leave out what trains."""
    params = dict(model.named_parameters())
    for name in tqdm(params, "loading weights", unit="tensor", disable=not progress, leave=False):
        out, start = local(params[name])
        stop, names = start + len(out), file_names(name, model.config)
        if start == stop or name.endswith("weight_scales") or (frozen_only and params[name].requires_grad):
            continue  # an empty shard, or written along with the codes
        if name.endswith("weight_codes"):
            names = [name.removesuffix("_codes") for name in names]
            scales, _ = local(params[name.removesuffix("codes") + "scales"])
            for rows, place in rows_of(source, names, start, stop):
                out[place], scales[place] = nf4.quantize(rows.to(device), name)
        elif adapter is None and name.endswith("lora_B.weight"):
            out.zero_()
        elif adapter is None and name.endswith("lora_A.weight"):  # PEFT's default, U(-1/sqrt(in), 1/sqrt(in))
            out.copy_(random_rows(name, out.shape[1], start, stop, seed, "cpu", uniform=True) * out.shape[1] ** -0.5)
        else:
            files = (adapter, [PEFT_PREFIX + name for name in names]) if ".lora_" in name else (source, names)
            for rows, place in rows_of(*files, start, stop):
                out[place] = rows
        duplicate = name == "model.embed_tokens.weight" and HEAD not in params and HEAD in source.tensors
        if duplicate and not torch.equal(source.rows(name, start, stop), source.rows(HEAD, start, stop)):
            raise ValueError(f"config.json ties the head to the embedding, but the checkpoint's {HEAD} differs: "
                             "set tie_word_embeddings to false")


# ---------------- writing models and adapters


def reshard_(model):
    """After an evaluation, in which FSDP2 leaves modules gathered for a backward to come."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def full_tensors(model, trainable_only):
    """Yields (name in files, full tensor on the CPU). Collective."""
    reshard_(model)
    for name, param in model.named_parameters():
        if param.requires_grad or not trainable_only:
            whole = (param.full_tensor() if is_sharded(param) else param).detach().cpu()
            names = file_names(name, model.config)
            yield from zip(names, whole.chunk(len(names)))


def write_safetensors(path, layout, tensors, checksum=lambda data, crc: 0):
    """Writes tensors in the order of layout, {name: (shape, dtype)}, one in memory at a time (the library wants all)
    -> [size of the file, its checksum]. OSError names path and tensor."""
    header, end, crc = {"__metadata__": {"format": "pt"}}, 0, 0  # older transformers need the format
    for name, (shape, dtype) in layout.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    data_of = ((name, t.contiguous().flatten().view(torch.uint8).numpy()) for name, t in zip(layout, tensors))
    with open(path, "wb", buffering=0) as file:  # closing it has nothing to write, so a full disk fails once
        for what, data in itertools.chain([("header", len(text).to_bytes(8, "little") + text)], data_of):
            crc, data = checksum(data, crc), memoryview(data)
            with writing(path, what):
                while data:
                    data = data[file.write(data) :]
        with writing(path, "end"):
            os.fsync(file.fileno())
    return [path.stat().st_size, crc]


def save_model(tensors, layout, out, raw_config, write):
    """Writes config.json and model.safetensors from an iterator of tensors. Every rank iterates, as the iterator may
    gather shards; the one with `write` writes."""
    try:
        if write:
            write_safetensors(out / "model.safetensors", layout, tensors)
            with writing(out, "config"):
                (out / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")
    finally:  # also where the disk is full: the other ranks wait in the iterator's collectives
        for _ in tensors:
            pass


def save_adapter(tensors, out, base, rank, alpha, dropout, targets):
    """Writes adapter_model.safetensors and adapter_config.json as PEFT reads them."""
    layout = {PEFT_PREFIX + name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    write_safetensors(out / "adapter_model.safetensors", layout, tensors.values())
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "bias": "none",
              "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": list(targets), "inference_mode": True}
    if any(".experts." in name for name in tensors):  # PEFT stacks experts, and then overlooks dense blocks' modules
        dense = [name for name in targets if any(f".mlp.{name}." in tensor for tensor in tensors)]
        config |= {"target_parameters": [f"mlp.{name}.weight" for name in dense], "lora_dropout": 0.0}  # it refuses one
    with writing(out, "adapter_config.json"):
        (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def export(args, model, source, files, tokenizer, out, ranks):
    """Writes final/, the PEFT adapter or the whole model. Collective -> on rank 0 the adapter's tensors, or None."""
    part, first, adapter = out / "final.part", ranks.rank == 0, None
    with ranks.agree():  # before the first collective
        if first:
            part.mkdir()
            tokenizer.save(part)
    tensors = full_tensors(model, trainable_only=args.lora)
    if args.lora:
        adapter = {name: tensor for name, tensor in tensors if first}
    with ranks.agree():
        if args.lora and first:
            save_adapter(adapter, part, files[3], args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_targets)
        if not args.lora:
            layout = {name: source.tensors[name][1:] for name in shapes_in_files(model)}
            tensors = (tensor.to(layout[name][1]) for name, tensor in tensors)
            save_model(tensors, layout, part, files[0], write=first)
        if first:
            put_in_place(part)
    return adapter


def merge(args, source, adapter, files, tokenizer, out):
    """Writes merged/: the original weights, without NF4's error, + alpha / rank * B A, summed in float32."""
    raw_config, part = files[0], out / "merged.part"
    layout = {name: shape_dtype for name, (_, *shape_dtype) in source.tensors.items()
              if name != HEAD or not raw_config.get("tie_word_embeddings")}

    def merged(name, shape, dtype):
        w, stem = source.rows(name, 0, shape[0]).cpu(), name.removesuffix("weight")  # random: made on the GPU
        if stem + "lora_A.weight" in adapter:
            delta = adapter[stem + "lora_B.weight"].float() @ adapter[stem + "lora_A.weight"].float()
            w = w.float().add_(delta, alpha=args.lora_alpha / args.lora_rank)
        return w.to(dtype)

    with writing(f"--merge, {out}/final is complete", "merged/"):
        part.mkdir()
        tokenizer.save(part)
        save_model((merged(name, *entry) for name, entry in layout.items()), layout, part, raw_config, write=True)
        put_in_place(part)


# ---------------- rows of a run's checkpoint

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
    """{"name:first row": rows} that this rank writes. Of ranks that hold the same, the first writes."""
    rows = {}
    for name, tensor in tensors.items():
        mesh = tensor.device_mesh if is_sharded(tensor) else None
        first = rank == 0 if mesh is None else mesh.ndim == 1 or mesh.get_local_rank(0) == 0
        part, start = local(tensor)
        if first and part.numel():
            rows[f"{name}:{start}"] = part.reshape(-1) if part.dim() == 0 else part
    return rows


def write_rows(path, rows):
    """Writes the file of a rank, synced -> [its size, its checksum]. Wide numbers first, so that all are aligned."""
    rows = dict(sorted(rows.items(), key=lambda row: -row[1].dtype.itemsize))
    layout = {key: (tuple(part.shape), part.dtype) for key, part in rows.items()}
    return write_safetensors(path, layout, (part.cpu() for part in rows.values()), zlib.crc32)


def load_checkpoint(folder, tensors):
    """Fills this rank's rows of `tensors` from the files of any number of ranks. ValueError names what is wrong."""
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
    if wrong := [name for name, n in n_missing.items() if n]:
        raise ValueError(f"{folder}: rows are missing or there twice: {listing(wrong)}; {REMOVE}")
