"""The decoder of Llama 2/3, Mistral, Qwen2/2.5, Qwen3 and Qwen3-MoE, its loss, and LoRA: torch and nf4.py alone.

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
from dataclasses import make_dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import nf4

IGNORE = -100  # a target that is not trained on, as in every Hugging Face dataset

# ---------------- config

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


class Spans:
    """The documents of packed rows: pairs, their (start, stop) in the flattened tokens; bounds, int32 on the device;
    group, the ranks that each hold an equal piece of the tokens; cache, {block: its keys and values so far}. No tuple
    and no dataclass: FSDP2 walks those in Python at every forward."""

    def __init__(self, pairs, bounds=None, longest=0, group=None, cache=None):
        self.pairs, self.bounds, self.longest, self.group, self.cache = pairs, bounds, longest, group, cache


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
            n = model.config.num_experts if ".experts." in name else 1  # an adapter for each expert
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


def reshard_(model):
    """After an evaluation, in which FSDP2 leaves modules gathered for a backward to come."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def keep_weights_(module):
    """The backward uses the NF4 weights that the forward (checkpointed: the second one) has dequantized."""
    for layer in module.modules():
        if isinstance(layer, nf4.NF4Linear):
            layer.keeps_weight = True
