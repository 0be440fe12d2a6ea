"""The decoder of Llama, Qwen, Mistral and others, dense and MoE, its loss, and what a trainer does to it.

Every family is Llama 2 with the traits that FAMILIES lists. Parameters have Hugging Face's names.

Two tensors are never materialized. Attention scores (T*T per head): the kernels work document by document.
Logits (8,192 x 128,256 x 4 bytes = 3.9 GiB): the loss overwrites them with their gradient in the forward,
chunk by chunk (Liger, arXiv:2410.10989; Cut Cross-Entropy, arXiv:2411.09009).

Read Transformer.forward first, then Block. "LoRA" and the section after it edit a finished model. The last
section reads a config.json. To use the model elsewhere, copy this file and nf4.py.

Shapes are in the names:

    B rows of a batch           T tokens per row            D model             V vocabulary
    H heads of a mixer's output, which are attention's query heads              G heads of its keys
    K size of a head            F mlp                       R LoRA rank         Y a mixer's output, H*K
    E experts                   k experts per token         S supervised tokens
    C tokens in a chunk         N rows of a matrix: tokens of an activation, out features of a weight

x is the residual stream in Block and Transformer, and the input of a layer elsewhere; h is x after a norm.
A mixer lets tokens see each other: attention or Gated DeltaNet. A chunk is the tokens that the loss or Gated
DeltaNet processes at a time, a tile the same for the MLP. To keep is to store for the backward."""

import contextlib
import functools
import inspect
import itertools
import json
import math
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import nf4

IGNORE = -100  # a target that is not trained on, as in every Hugging Face dataset
NO_WINDOW = 1 << 30  # tokens: no row is as long
# YaRN's defaults: rotations over the context of pretraining, above which a pair is fast, below which slow
BETA_FAST = 32
BETA_SLOW = 1

# ---------------- families and config

class Family(NamedTuple):
    """How a family differs from Llama 2. A new trait is a field, and `if c.family.TRAIT` in the model."""

    architecture: str  # what `architectures` in a config.json says
    # The mixers of its blocks, in config.json's words. linear_attention is Gated DeltaNet.
    layer_types: tuple = ("full_attention",)
    # Of two types, block n has the first one if n minus this divides by the interval. "last": counted from
    # the last block on. None: no block. For files that do not list the types.
    first_type_at: int | str | None = 0
    bias: bool = False  # q_proj, k_proj and v_proj have one
    qk_norm: bool = False  # RMSNorm on each head of q and k, which bounds the scores (arXiv:2302.05442)
    bare_qk_norm: bool = False  # the same without a weight
    norms_add_one: bool = False  # the norms of a block multiply by 1 + w
    last_norm_adds_one: bool = False  # and so does the last norm
    gate: bool = False  # attention's output is multiplied by a gate
    gate_in_q: bool = False  # the gate is a part of q_proj
    branch_norms: bool = False  # the outputs of attention and MLP are normed before they are added to x
    embed_norm: bool = False  # the embedding is normed, without a weight
    some_rope: bool = False  # RoPE rotates q and k in three blocks of four only
    part_rope: bool = False  # RoPE rotates only a part of each head
    growing_q: bool = False  # q grows with its position beyond the length of pretraining
    experts: bool = False  # in place of the MLP
    shared_expert: bool = False  # one more expert, which sees all tokens
    # what transformers 5 writes as `architectures` of a family that it computes with another one's class
    other_architecture: str | None = None
    # Files have a vision tower, and the decoder's keys are in `text_config` with one of these model_types.
    decoders: tuple = ()


# By model_type. To add a family, copy a row, and look at IMPLIED and REFUSED. Some lines below, and
# default_rate() in train.py, know Llama or Qwen by name.
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "iquestcoder": Family("IQuestCoderForCausalLM", other_architecture="LlamaForCausalLM"),
    "internlm3": Family("InternLM3ForCausalLM", other_architecture="LlamaForCausalLM"),
    "seed_oss": Family("SeedOssForCausalLM", bias=True),
    "cwm": Family(
        "CwmForCausalLM", layer_types=("full_attention", "sliding_attention"), first_type_at=1),
    "granite": Family("GraniteForCausalLM"),
    "mistral": Family(
        "MistralForCausalLM", layer_types=("full_attention", "sliding_attention"), first_type_at=None),
    "ministral": Family(
        "MinistralForCausalLM", layer_types=("full_attention", "sliding_attention"), first_type_at=None),
    "ministral3": Family("Ministral3ForCausalLM", layer_types=("sliding_attention",), growing_q=True),
    "mistral3": Family("Mistral3ForConditionalGeneration", decoders=("mistral", "ministral3")),
    "qwen2": Family("Qwen2ForCausalLM", bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, experts=True),
    "qwen3_vl": Family("Qwen3VLForConditionalGeneration", decoders=("qwen3_vl_text",)),
    "qwen3_vl_text": Family("Qwen3VLTextModel", qk_norm=True),
    "qwen3_5": Family("Qwen3_5ForConditionalGeneration", decoders=("qwen3_5_text",)),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM", layer_types=("full_attention", "linear_attention"), qk_norm=True,
        norms_add_one=True, last_norm_adds_one=True, gate=True, gate_in_q=True, part_rope=True),
    "qwen3_5_moe": Family("Qwen3_5MoeForConditionalGeneration", decoders=("qwen3_5_moe_text",)),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM", layer_types=("full_attention", "linear_attention"), qk_norm=True,
        norms_add_one=True, last_norm_adds_one=True, gate=True, gate_in_q=True, part_rope=True, experts=True,
        shared_expert=True),
    "smollm3": Family("SmolLM3ForCausalLM", some_rope=True),
    "muse_glimmer": Family("MuseGlimmerForConditionalGeneration", decoders=("muse_glimmer_text",)),
    "muse_glimmer_text": Family(
        "MuseGlimmerForCausalLM", layer_types=("full_attention", "sliding_attention"),
        first_type_at="last", bare_qk_norm=True, norms_add_one=True, gate=True, branch_norms=True,
        embed_norm=True, some_rope=True),
}


def within(*limits):
    """A field of Config: its smallest and largest value, and a default if it has one."""
    return field(metadata={"limits": limits})


@dataclass(frozen=True)
class Config:
    """What the model needs of a config.json, under the file's own names. parse_config() makes it."""

    model_type: str  # one of FAMILIES, the decoder's own if there is a vision tower
    family: Family
    prefix: str  # how tensors' names in files begin: "model.", beside a vision tower "model.language_model."
    dtype: torch.dtype  # what the files have
    vocab_size: int = within(1, 1 << 20)  # V
    hidden_size: int = within(1, 1 << 16)  # D
    intermediate_size: int = within(1, 1 << 18)  # F of a dense MLP
    num_hidden_layers: int = within(1, 1 << 10)
    num_attention_heads: int = within(1, 1 << 10)  # H
    num_key_value_heads: int = within(1, 1 << 10)  # G, divides H
    head_dim: int = within(2, 1 << 10)  # K; H * K may differ from D
    max_position_embeddings: int = within(1, 1 << 30)
    rms_norm_eps: float = within(1e-30, 1, 1e-6)
    initializer_range: float = within(0, 1e3, 0.02)  # standard deviation of random weights
    tie_word_embeddings: bool = within(False, True, False)  # head and embedding are one matrix
    num_experts: int = within(0, 1 << 12, 0)  # E; 0 for a dense model
    num_experts_per_tok: int = within(1, 1 << 8)  # k; 1 for a dense model
    moe_intermediate_size: int = within(1, 1 << 18)  # F of an expert
    norm_topk_prob: bool = within(False, True, False)  # the k chosen probabilities of a token sum to 1
    shared_expert_intermediate_size: int = within(0, 1 << 18, 0)  # F of Qwen3.5's expert for all tokens
    layer_types: list  # for each block, one of its family's
    full_attention_interval: int = within(1, 1 << 10, 4)  # makes layer_types where a file has none
    sliding_window: int = within(1, NO_WINDOW, NO_WINDOW)  # keys that a token sees in "sliding_attention"
    linear_num_key_heads: int = within(1, 1 << 10, 16)  # for Gated DeltaNet, as the next three
    linear_num_value_heads: int = within(1, 1 << 10, 32)
    linear_key_head_dim: int = within(2, 1 << 10, 128)  # the size of a value, too
    linear_conv_kernel_dim: int = within(2, 16, 4)  # taps of the convolution
    rope_theta: float
    rope_scaling: dict  # {"rope_type": one of ROPE_NUMBERS, and of that type's numbers those in the file}
    rope_ignored: tuple  # those of ROPE_IGNORED that the file has
    rope_size: int  # how many numbers of a head RoPE rotates: K, or a quarter of it in Qwen3.5
    rope_layers: list  # for each block, whether RoPE rotates its q and k
    qk_scale_factor: float = within(1e-30, 1e30, 1.0)  # q is multiplied by it
    attention_multiplier: float = within(0, 1e30, 0.0)  # scores are q k times it; 0: over the root of K
    embedding_multiplier: float = within(1e-30, 1e30, 1.0)  # the embedding is multiplied by it
    residual_multiplier: float = within(1e-30, 1e30, 1.0)  # and each branch
    logits_scaling: float = within(1e-30, 1e30, 1.0)  # logits are divided by it
    post_norm_eps: float = within(0, 1, 0.0)  # for branch_norms; 0: rms_norm_eps
    output_multiplier: float = within(1e-30, 1e30, 1.0)  # logits are multiplied by it
    final_logit_softcapping: float = within(0, 1e30, 0.0)  # then they become cap * tanh(logits / cap); 0: not
    # ignored, and the start says so
    attention_dropout: float = within(0, 1, 0.0)
    residual_dropout: float = within(0, 1, 0.0)

    @property
    def q_size(self):
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self):
        return self.num_key_value_heads * self.head_dim

    @property
    def n_positions(self):
        """Tokens of the longest row that the model is made for."""
        # under YaRN files have the length before it, the one after it, or neither (Qwen3's 40,960)
        if self.rope_scaling["rope_type"] != "yarn":
            return self.max_position_embeddings
        longest = int(self.rope_scaling["factor"] * self.n_pretrained_positions)
        return max(longest, self.max_position_embeddings)

    @property
    def n_pretrained_positions(self):
        """Tokens of a row before RoPE was scaled."""
        return self.rope_scaling.get("original_max_position_embeddings", self.max_position_embeddings)

    @property
    def value_size(self):
        """Numbers a token that out_proj of a Gated DeltaNet reads, Y."""
        return self.linear_num_value_heads * self.linear_key_head_dim

    @property
    def conv_size(self):
        """Channels of the convolution of a Gated DeltaNet, X."""
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.value_size


# ---------------- layers

class RMSNorm(nn.RMSNorm):
    """x / RMS(x) * w (arXiv:1910.07467), or times 1 + w."""

    def __init__(self, size, eps, adds_one=False):
        super().__init__(size, eps)
        self.adds_one = adds_one

    def forward(self, x):
        weight = 1 + self.weight if self.adds_one else self.weight
        # with a float32 w the error would be 1.7e-3, not 2.4e-3, but no fused kernel would run
        return F.rms_norm(x, self.normalized_shape, weight.to(x.dtype), self.eps)


class Linear(nn.Linear):
    """Computes in the dtype of its input: its weights may be float32 masters. row_stops: see nf4.linear()."""

    def forward(self, x, row_stops=None):
        # autograd takes the gradient through the cast, so a float32 master gets a float32 one
        y = nf4.linear(x, self.weight.to(x.dtype), row_stops)
        return y if self.bias is None else y + self.bias.to(x.dtype)


def rope_table(positions_BT, config):
    """-> cos and sin for q, cos and sin for k, each [B, T, 1 for heads, rope_size/2]."""
    scaling = config.rope_scaling  # `dynamic` differs from `default` only beyond max_position_embeddings
    even_numbers = torch.arange(0, config.rope_size, 2, device=positions_BT.device)
    # radians a token: from 1 for the first pair to almost 1 / theta for the last
    freq = 1.0 / config.rope_theta ** (even_numbers.float() / config.rope_size)
    if scaling["rope_type"] == "linear":
        freq = freq / scaling["factor"]  # `factor` times the context is rotated as far as pretraining's was
    if scaling["rope_type"] == "llama3":
        # long wavelengths are stretched by `factor` (blend 0), short ones stay (1), those between are blended
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        wavelength = 2 * math.pi / freq
        n_rotations = config.n_pretrained_positions / wavelength
        blend = ((n_rotations - low) / (high - low)).clamp(0, 1)
        freq = blend * freq + (1 - blend) * freq / scaling["factor"]
    attention_factor = 1.0
    if scaling["rope_type"] == "yarn":
        freq = yarn_frequencies(freq, config)
        attention_factor = yarn_attention_factor(scaling)
    # float32: in bf16 angles are wrong beyond a few hundred tokens
    angle = positions_BT.float()[..., None, None] * freq
    cos = angle.cos() * attention_factor
    sin = angle.sin() * attention_factor
    if not config.family.growing_q:
        return cos, sin, cos, sin
    # as in Llama 4, a query that sees more keys is longer, so that its softmax stays as sharp
    n_lengths = positions_BT[..., None, None] // config.n_pretrained_positions
    growth = 1 + scaling.get("llama_4_scaling_beta", 0) * torch.log1p(n_lengths.float())
    return cos * growth, sin * growth, cos, sin


def yarn_frequencies(freq, config):
    """YaRN (arXiv:2309.00071): fast pairs stay, slow pairs are stretched by `factor`, others are blended."""
    scaling = config.rope_scaling

    def pair_that_rotates(n_times):
        """-> float, the number of the pair that rotates so often over the context of pretraining."""
        wavelength = config.n_pretrained_positions / n_times
        return config.rope_size * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.rope_theta))

    first = pair_that_rotates(scaling.get("beta_fast", BETA_FAST))
    last = pair_that_rotates(scaling.get("beta_slow", BETA_SLOW))
    if scaling.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, config.rope_size - 1)  # the authors' bound, which is twice as far as there are pairs
    if first == last:
        last += 0.001  # all pairs are on one side
    pairs = torch.arange(config.rope_size // 2, device=freq.device)
    stretched = ((pairs - first) / (last - first)).clamp(0, 1)  # linear in the pair's number
    return stretched * freq / scaling["factor"] + (1 - stretched) * freq


def yarn_attention_factor(scaling):
    """A factor of cos and sin, because softmax over more keys is flatter."""

    def growth(mscale):
        return 1 + 0.1 * mscale * math.log(max(scaling["factor"], 1))

    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):  # one alone counts for nothing
        return growth(scaling["mscale"]) / growth(scaling["mscale_all_dim"])
    return growth(1)


def rotate(q_BTHK, cos, sin):
    """Rotates element i of a head with element i + K/2 (arXiv:2104.09864 pairs neighbours)."""
    # float32 until the end: the differences below would otherwise be taken of products rounded to 8 bits
    rotated, rest = q_BTHK.float().tensor_split((2 * cos.shape[-1],), -1)  # `rest` has no angles
    a, b = rotated.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(q_BTHK.dtype)


# ---------------- attention

class Spans:
    """Where the documents of packed rows lie in the flattened B*T tokens. A plain class, because FSDP2
    traverses tuples and dataclasses in Python at every forward."""

    def __init__(self, pairs, bounds=None, longest=0, positions_BT=None, host_tokens_BT=None):
        self.pairs = pairs  # (start, stop) of each document
        # where each document and each gap between two begins, and the end: int32 on the device; None if
        # documents are equally long and leave no gaps
        self.bounds = bounds
        self.longest = pairs[0][1] if bounds is None else longest  # tokens of the longest document or gap
        # of each token in its document, for Gated DeltaNet: Transformer.forward() adds them
        self.positions_BT = positions_BT
        # in a batch on a GPU, for an embedding in host memory: FSDP2 takes all tensors of a call to the GPU
        self.host_tokens_BT = host_tokens_BT


class Cache:
    """Keys and values of a generation's tokens, and states of Gated DeltaNets. Not a dict: on a GPU FSDP2
    copies a dict among a model's arguments, and what is added to the copy is lost."""

    def __init__(self):
        self.n_tokens = 0
        self.layers = {}  # {Attention: (keys, values), GatedDeltaNet: (tail, state)}

    def extend(self, layer, *new):
        """Adds a layer's new keys and values, [B, T, G, K] -> those that the tokens see, oldest first."""
        if layer in self.layers:
            new = [torch.cat(pair, 1) for pair in zip(self.layers[layer], new)]
        n_old = max(0, new[0].shape[1] + 1 - layer.window)  # + 1, because the window counts the next token
        self.layers[layer] = [t[:, n_old:] for t in new]
        return new


class Attention(nn.Module):
    """Block calls qkv(), forward() and o_proj in turn. The gate of some families: arXiv:2505.06708"""

    def __init__(self, c, number):
        super().__init__()
        self.head_dim = c.head_dim
        self.has_gate = c.family.gate
        self.gate_in_q = c.family.gate_in_q
        self.q_factor = c.qk_scale_factor
        if c.attention_multiplier:  # kernels divide scores by the root of K
            self.q_factor *= c.attention_multiplier * c.head_dim**0.5
        self.has_rope = c.rope_layers[number]  # SmolLM3 and Muse Glimmer leave some blocks without
        self.window = c.sliding_window if c.layer_types[number] == "sliding_attention" else NO_WINDOW
        # with a gate in it, each head has K rows of q, then K rows of its gate
        q_width = 2 * c.q_size if self.gate_in_q else c.q_size
        self.q_proj = Linear(c.hidden_size, q_width, c.family.bias)
        self.k_proj = Linear(c.hidden_size, c.kv_size, c.family.bias)
        self.v_proj = Linear(c.hidden_size, c.kv_size, c.family.bias)
        self.o_proj = Linear(c.q_size, c.hidden_size, bias=False)
        if self.has_gate and not self.gate_in_q:
            self.gate_proj = Linear(c.hidden_size, c.q_size, bias=False)
        self.q_norm = head_norm(c)
        self.k_norm = head_norm(c)

    def qkv(self, h_BTD, rope):
        """-> q_BTHK, k_BTGK, v_BTGK and gate_BTHK, which is None without a gate."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q_BTHK, k_BTGK, v_BTGK = (proj(h_BTD).unflatten(-1, (-1, self.head_dim)) for proj in projections)
        gate_BTHK = None
        if self.gate_in_q:  # so q has every second head here, and gates have the others
            gate_BTHK = q_BTHK[:, :, 1::2]
            q_BTHK = q_BTHK[:, :, ::2]
        elif self.has_gate:
            gate_BTHK = self.gate_proj(h_BTD).view_as(q_BTHK)
        # norm before rotation: torchtune shipped Qwen3 the other way round (torchtune #2822)
        q_BTHK = self.q_norm(q_BTHK)
        k_BTGK = self.k_norm(k_BTGK)
        if self.q_factor != 1:
            q_BTHK = q_BTHK * self.q_factor
        if self.has_rope:
            q_cos, q_sin, k_cos, k_sin = rope
            q_BTHK = rotate(q_BTHK, q_cos, q_sin)
            k_BTGK = rotate(k_BTGK, k_cos, k_sin)
        return q_BTHK, k_BTGK, v_BTGK, gate_BTHK

    def forward(self, q_BTHK, k_BTGK, v_BTGK, gate_BTHK, spans, cache, group, record=None):
        """-> [B, T, H*K], the input of o_proj. record: see RunOnce."""
        if cache is not None:
            k_BTGK, v_BTGK = cache.extend(self, k_BTGK, v_BTGK)  # now of all tokens so far
        out = attend(q_BTHK, k_BTGK, v_BTGK, spans, self.window, group, record)
        return out * gate_BTHK.flatten(2).sigmoid() if self.has_gate else out


def head_norm(c):
    """The norm of each head of q or k, if the family has one."""
    if c.family.bare_qk_norm:
        return nn.RMSNorm(c.head_dim, c.rms_norm_eps, elementwise_affine=False)
    if c.family.qk_norm:
        return RMSNorm(c.head_dim, c.rms_norm_eps, c.family.norms_add_one)
    return nn.Identity()


def attend(q_BTHK, k_BTGK, v_BTGK, spans, window=NO_WINDOW, group=None, record=None):
    """Causal attention inside each document -> [B, T, H*K]. A token sees itself and the window - 1 before it.
    Padding gets any finite values. With a group, the tensors have this rank's tokens only."""
    if group is not None:
        return attend_across_ranks(q_BTHK, k_BTGK, v_BTGK, spans, window, group, record)
    run = functools.partial(attend_here, spans, window)
    # without gradients there will be no backward to keep anything for
    if record is None or not q_BTHK.requires_grad:
        return run(q_BTHK, k_BTGK, v_BTGK)
    return RunOnce.apply(record, run, q_BTHK, k_BTGK, v_BTGK)


def attend_here(spans, window, q_BTHK, k_BTGK, v_BTGK):
    """attend() on one rank, in the fastest of four ways:

        FlashAttention, several lengths or a window    one call, which gets the `bounds` of documents
        a new token after a cache                      one call of sdpa(): it sees all keys
        documents of one length, without gaps          the same, each document a row of its batch
        else                                           a call of sdpa() for each document

    The last way is for packed rows in float32 or on a card older than Ampere. It launches kernels for each
    document and copies the outputs, but one call with a mask would need T*T numbers."""
    B, T, H, K = q_BTHK.shape
    has_cache = k_BTGK.shape[1] > T
    q, k, v = (t.flatten(0, 1) for t in (q_BTHK, k_BTGK, v_BTGK))  # the rows as one long row
    if k.shape[1] != H and not shares_key_heads(q):
        k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    bounds = spans.bounds
    longest = spans.longest
    are_equal = bounds is None
    # of documents of one length, those with a window: sdpa() would cut them into windows
    if runs_flash_attention(q) and (window < longest or not are_equal):
        if are_equal:
            bounds = torch.arange(0, len(q) + 1, longest, dtype=torch.int32, device=q.device)
        # how many earlier tokens a token sees, where -1 is all; and no later ones
        n_seen = window - 1 if window < longest else -1
        out = flash_attention()(q, k, v, bounds, bounds, longest, longest, window_size=(n_seen, 0))
    elif has_cache or (are_equal and longest % length_multiple(q) == 0):
        # views of the long row, so nothing is copied
        n_documents = len(spans.pairs)
        out = sdpa(*(t.unflatten(0, (n_documents, -1)) for t in (q, k, v)), window=window)
    else:
        out = attend_one_by_one(q, k, v, spans.pairs, window)
    return out.reshape(B, T, H * K)


# The plan has stand-ins for the next three (train.py, ON_PAPER). A new kernel needs one, too.

def runs_flash_attention(q):
    """FlashAttention needs 16 bits, heads of 8, 16, ... 256, and an Ampere card or newer."""
    fits = q.is_cuda and q.dtype is not torch.float32 and q.shape[-1] in range(8, 257, 8)
    return fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def shares_key_heads(q):
    """Whether query heads may share key heads. Elsewhere torch's math kernel would store all scores."""
    return not q.is_cuda or runs_flash_attention(q)


@functools.cache
def flash_attention():
    """FlashAttention over packed documents and gaps. Imported here: it takes 0.3 s and needs a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        # torch 2.11 lets query heads share key heads without being asked
        return functools.partial(varlen_attn, enable_gqa=True)
    return varlen_attn


def sdpa(*qkv, window):
    """q [B, T, H, K], k and v [B, T, G, K] -> [B, T, H, K]. A single query sees all keys. Rows longer than
    the window run in blocks of `window` queries, with the keys of their own block and of the one before."""
    q, k, v = (t.transpose(1, 2) for t in qkv)  # torch has heads before tokens
    run = functools.partial(F.scaled_dot_product_attention, enable_gqa=q.shape[1] != k.shape[1])
    T = q.shape[2]
    if window >= T:
        return run(q, k, v, is_causal=T > 1).transpose(1, 2)
    out = []
    key_blocks = k.split(window, 2)
    value_blocks = v.split(window, 2)
    # 0 for the keys that a query sees, -inf for the others; one for all blocks
    hidden = q.new_full((window, 2 * window), -torch.inf)
    mask = hidden.tril() + hidden.triu(window + 1)  # too old, or not there yet
    for i, queries in enumerate(q.split(window, 2)):
        seen = slice(max(i - 1, 0), i + 1)  # the first block has none before it
        keys = torch.cat(key_blocks[seen], 2)
        # column `window` of the mask is this block's first key; those of the block before are left of it
        stop = window + queries.shape[2]
        visible = mask[: queries.shape[2], stop - keys.shape[2] : stop]
        out.append(run(queries, keys, torch.cat(value_blocks[seen], 2), attn_mask=visible))
    return torch.cat(out, 2).transpose(1, 2)


def attend_one_by_one(q, k, v, pairs, window):
    """Runs attention once per document. Padding between documents outputs its own q."""
    stops = [0, *itertools.chain(*pairs), len(q)]
    # gap, document, gap, ... document, gap: documents have odd numbers, and a gap may be empty
    sizes = [stop - start for start, stop in itertools.pairwise(stops)]
    pieces = [list(t.split(sizes)) for t in (q, k, v)]
    out = pieces[0]
    for i in range(1, len(sizes), 2):
        qkv = [of_q_k_or_v[i] for of_q_k_or_v in pieces]
        n_more = -sizes[i] % length_multiple(q)
        if n_more:
            # causal attention hides the added tokens from the others, and their outputs are cut off
            qkv = [F.pad(t, (0, 0, 0, 0, 0, n_more)) for t in qkv]
        attended = sdpa(*(t[None] for t in qkv), window=window).squeeze(0)  # [0] would copy the gradient
        out[i] = attended[: sizes[i]] if n_more else attended
    return torch.cat(out)


def length_multiple(q):
    """On a CPU lengths are multiples of 32, because oneDNN stores up to 4 MiB of bf16 kernels for each."""
    return 32 if q.device.type == "cpu" else 1


def attend_across_ranks(q_BTHK, k_BTGK, v_BTGK, spans, window, group, record):
    """attend() of rows that are sharded over ranks (Ulysses, arXiv:2309.14509): an all-to-all from my tokens
    and all heads to all tokens and my heads, and one back, of 2 * (2*H + 2*G) * K bytes a token."""
    B, T, H, K = q_BTHK.shape
    n_ranks = group.size()
    # a key head goes to each of the ranks that have some of its query heads
    n_copies = n_ranks // math.gcd(k_BTGK.shape[2], n_ranks)
    if n_copies > 1:
        k_BTGK, v_BTGK = (t.repeat_interleave(n_copies, 2) for t in (k_BTGK, v_BTGK))
    qkv = q_BTHK, k_BTGK, v_BTGK
    mine = to_my_heads([t.flatten(2) for t in qkv], group).unflatten(-1, (-1, K))
    out = attend(*mine.split([t.shape[2] // n_ranks for t in qkv], 2), spans, window, record=record)
    return to_my_tokens(out, group).view(B, T, H * K)


def to_my_heads(parts, group):
    """Tensors [B, T, columns] of my tokens and all heads -> [1, all tokens, columns of my heads]."""
    return exchange(cut_heads(parts, group.size()), group).flatten(0, 1)[None]


def to_my_tokens(out, group):
    """The way back: [tokens of all ranks, columns of this rank's heads] -> [B * T, columns of all heads]."""
    n_ranks = group.size()
    return exchange(out.view(n_ranks, -1, out.shape[-1]), group).transpose(0, 1).flatten(1)


def cut_heads(parts, n_ranks):
    """Tensors [..., columns] -> [n_ranks, rows, columns]: at i the columns of rank i's heads."""
    by_rank = [t.flatten(0, -2).unflatten(-1, (n_ranks, -1)).transpose(0, 1) for t in parts]
    return torch.cat(by_rank, 2)


def exchange(x, group):
    """[n_ranks, ...] -> [n_ranks, ...]: row i goes to rank i."""
    return Exchange.apply(x, group)


class Exchange(torch.autograd.Function):
    """torch's own all_to_all_single() with a gradient is deprecated. The gradient goes the same ways."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad.contiguous(), ctx.group), None


# ---------------- Gated DeltaNet
# Three of four blocks of Qwen3.5 remember by a matrix instead of a list of keys (arXiv:2412.06464). A head
# has a state [K, P], the paper's S. Each token fades it, reads what is stored under its key, and writes the
# correction, with a decay g <= 0 and beta in 0 .. 1:
#
#     state <- e^g state,   state <- state + k (beta (v - state^T k))^T,   o = state^T q
#
# Tokens go in chunks: inside a chunk the writes solve a triangular system (section 3.3 of the paper), and
# only one step per chunk is sequential. Token by token there would be thousands of tiny kernels.
#
# Positions restart at 0 in every document, so the token j places back belongs to the same document where
# position >= j. These masks have the same shapes for every packing: nothing loops over documents or compiles
# again. All between the projections is float32.
#
# G heads of queries and keys, each for H / G heads of values; a key has size K, a value P, here the same, so
# Y = H*P. The convolution has X = 2*G*K + Y channels and J taps, and it reads L = J - 1 + N rows for the N
# tokens of a segment, which are n chunks of C.

SEGMENT = 1024  # tokens whose intermediates are in memory at once, 11 KiB and more a token and head


def chunk_length(device):
    """Tokens of one triangular system, which a CPU inverts slowly. On a GPU chunks wait for one another."""
    return 64 if device.type == "cpu" else 128


def unit_length(x):
    """x / |x|, as transformers computes it. Without it the state could grow with every token."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def chunk_system(q_NGK, k_NGK, v_NHP, g_NH, beta_NH, positions_nC):
    """Computes what does not depend on the state -> w, u, keys decayed to the end of the chunk, the state's
    decay, queries and scores, each [n, H, rows, columns]. With the state before the chunk,

        d = u + w state,   o = queries state + scores d,   state <- decay state + keys^T d."""
    n, C = positions_nC.shape
    G, K = k_NGK.shape[1:]

    def by_chunks(x_NHK):  # -> [n, G, H / G, C, K], where H / G is 1 for keys
        return x_NHK.unflatten(0, (n, C)).transpose(1, 2).contiguous().unflatten(1, (G, -1))

    q_CK = unit_length(by_chunks(q_NGK)) * K**-0.5  # as attention's scores are divided by sqrt(K)
    k_CK = unit_length(by_chunks(k_NGK))
    beta_C1 = by_chunks(beta_NH[..., None])
    # Decays are differences of these sums. In float32, strong gates would leave their gradients 3 digits.
    log_decay_C1 = by_chunks(g_NH[..., None]).double().cumsum(-2)

    i = torch.arange(C, device=g_NH.device)
    # where the token's document begins, counted from the start of the chunk: negative if it began before
    first_C1 = (i - positions_nC).view(n, 1, 1, C, 1)
    is_hidden = (i > i[:, None]) | (i < first_C1)
    # how much token i sees of the state before the chunk, then of what token j has written
    carry_C1 = log_decay_C1.to(k_CK.dtype).exp() * (first_C1 < 0)
    decay_CC = (log_decay_C1 - log_decay_C1.mT).to(k_CK.dtype)
    # masked before exp(), which could overflow above the diagonal: the gradient would be inf * 0 = nan
    decay_CC = decay_CC.masked_fill(is_hidden, -torch.inf).exp()

    # (1 + a) [w | u] = beta [-carry k | v], where a counts below its diagonal. To invert and multiply takes a
    # CPU less time than to solve for all K + P columns.
    a_CC = k_CK @ k_CK.mT * (decay_CC * beta_C1)
    unit_CC = torch.eye(C, dtype=a_CC.dtype, device=a_CC.device).expand_as(a_CC)
    # transposed, because a solution lies in memory column by column
    inverse_CC = torch.linalg.solve_triangular(a_CC.mT, unit_CC, upper=True, unitriangular=True).mT
    # beta and carry scale columns of the inverse, which is smaller than k and v
    inverse_CC = inverse_CC * beta_C1.mT
    u_CP = inverse_CC @ by_chunks(v_NHP)
    # the value heads of a key head share k: one product of all their rows
    w_CK = ((inverse_CC * -carry_C1.mT).flatten(2, 3) @ k_CK.squeeze(2)).unflatten(2, (-1, C))
    keys_CK = k_CK * decay_CC[..., -1:, :].mT
    scores_CC = q_CK @ k_CK.mT * decay_CC
    system = w_CK, u_CP, keys_CK, carry_C1[..., -1:, :], q_CK * carry_C1, scores_CC
    return [t.flatten(1, 2) for t in system]


def chunk_by_chunk(*tensors):
    """(what belongs to chunk 0), (chunk 1) ... It has a name because a plan runs only the first chunk."""
    return zip(*tensors)


def plus_product(x, a, b):
    """x + a @ b of [n, H, rows, columns], in one call."""
    return torch.baddbmm(x.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1)).view_as(x)


class Scan(torch.autograd.Function):
    """The sequential part -> d of all chunks, the state before each, and the last state. With d put into the
    last formula of chunk_system(), a chunk is one kernel, and one in the backward:

        state <- (decay + keys^T w) state + keys^T u

    Both formulas apart have fewer FLOP, but take 2.8 times as long on an H100 (tests/LOG.md)."""

    @staticmethod
    def forward(ctx, w_nHCK, u_nHCP, keys_nHCK, decay_nH11, state_HKP):
        move_nHKK = keys_nHCK.mT @ w_nHCK
        move_nHKK.diagonal(0, -2, -1).add_(decay_nH11[..., 0])
        # the initial state, then what each chunk writes
        states_HKP = state_HKP.new_empty(len(u_nHCP) + 1, *state_HKP.shape)
        states_HKP[0] = state_HKP
        before_nHKP = states_HKP[:-1]
        after_nHKP = states_HKP[1:]
        torch.bmm(keys_nHCK.mT.flatten(0, 1), u_nHCP.flatten(0, 1), out=after_nHKP.flatten(0, 1))
        for move_HKK, before_HKP, after_HKP in chunk_by_chunk(move_nHKK, before_nHKP, after_nHKP):
            after_HKP.baddbmm_(move_HKK, before_HKP)
        d_nHCP = plus_product(u_nHCP, w_nHCK, before_nHKP)
        ctx.save_for_backward(w_nHCK, keys_nHCK, move_nHKK, before_nHKP, d_nHCP)
        return d_nHCP, before_nHKP, states_HKP[-1].clone()  # a view would keep all states

    @staticmethod
    def backward(ctx, grad_d_nHCP, grad_before_nHKP, grad_last_HKP):
        w_nHCK, keys_nHCK, move_nHKK, before_nHKP, d_nHCP = ctx.saved_tensors
        # what each state gets from its own chunk, then the gradient of the last state
        grads_HKP = torch.cat([grad_before_nHKP, grad_last_HKP[None]])
        grads_HKP[:-1].flatten(0, 1).baddbmm_(w_nHCK.mT.flatten(0, 1), grad_d_nHCP.flatten(0, 1))
        after_nHKP = grads_HKP[1:]
        last_first = [t.unbind()[::-1] for t in (move_nHKK, grads_HKP[:-1], after_nHKP)]
        for move_HKK, before_HKP, after_HKP in chunk_by_chunk(*last_first):
            before_HKP.baddbmm_(move_HKK.mT, after_HKP)
        grad_u_nHCP = plus_product(grad_d_nHCP, keys_nHCK, after_nHKP)
        grad_w_nHCK = grad_u_nHCP @ before_nHKP.mT
        grad_keys_nHCK = d_nHCP @ after_nHKP.mT
        grad_decay_nH11 = (before_nHKP * after_nHKP).sum((-2, -1), keepdim=True)
        return grad_w_nHCK, grad_u_nHCP, grad_keys_nHCK, grad_decay_nH11, grads_HKP[0]


class ShortConv(nn.Module):
    """A causal depthwise convolution and SiLU, tap by tap: torch's kernel would mix packed documents."""

    def __init__(self, n_channels, n_taps):
        super().__init__()
        # [X, 1, J] in files. forward() gets the channels that a rank of --sequence_parallel has.
        self.weight = nn.Parameter(torch.empty(n_channels, n_taps))

    def forward(self, x_LX, w_XJ, positions_N):
        """x begins with the J - 1 tokens before the N of positions -> [N, X] float32."""
        w_XJ = w_XJ.float()
        N = len(positions_N)
        J = w_XJ.shape[1]
        y_NX = x_LX[:N] * w_XJ[:, 0]  # the oldest tap
        for j in range(1, J):
            # Older taps see tokens J - j places back and more. Masking their sum saves masked copies of x.
            y_NX.mul_(positions_N[:, None] >= J - j)
            y_NX.addcmul_(x_LX[j : j + N], w_XJ[:, j])
        return F.silu(y_NX)


class DecayGate(nn.Module):
    """Log of each token's decay factor for the state: g = -e^A_log softplus(a + dt_bias). A module of its
    own, which FSDP2 gathers in float32 (Automodel #2484). Names in files have no `decay.`"""

    def __init__(self, n_heads):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(n_heads))
        self.dt_bias = nn.Parameter(torch.empty(n_heads))

    def forward(self, a_BTH):
        return -self.A_log.exp() * F.softplus(a_BTH.float() + self.dt_bias)


def mix_segments(mix, size, tokens, tail_JX, state_HKP, w_XJ):
    """GatedDeltaNet.mix() of all tokens, `size` at a time. A plan has a stand-in."""
    if len(tokens[0]) <= size:  # split() and cat() would copy a whole row
        return mix(*tokens, tail_JX, state_HKP, w_XJ)
    out = []
    for segment in zip(*(t.split(size) for t in tokens)):
        out_NY, tail_JX, state_HKP = mix(*segment, tail_JX, state_HKP, w_XJ)
        out.append(out_NY)
    return torch.cat(out), tail_JX, state_HKP


class GatedDeltaNet(nn.Module):
    """The mixer of a linear_attention block, in the parts that Attention has: qkv(), forward() and o_proj.

    forward() runs a segment of tokens at a time and recomputes it in the backward. It saves the results of
    qkv(), (2*X + 2*Y + 12*H) bytes a token in bf16, and the state before each segment, 4*H*K*P bytes.

    Set from outside: segment, in tokens (wrap_blocks_ in train.py: long ones are fast on a GPU),
    is_recomputed (recompute_), before_scan and after_scan (compile_)."""

    def __init__(self, c):
        super().__init__()
        D = c.hidden_size
        G = c.linear_num_key_heads
        H = c.linear_num_value_heads
        K = c.linear_key_head_dim
        Y = c.value_size
        X = c.conv_size
        self.head_dim = K
        self.segment = SEGMENT
        self.is_recomputed = False
        self.qkv_sizes = G * K, G * K, Y  # columns
        self.in_proj_qkv = Linear(D, X, bias=False)
        self.in_proj_z = Linear(D, Y, bias=False)
        self.in_proj_a = Linear(D, H, bias=False)
        self.in_proj_b = Linear(D, H, bias=False)
        self.conv1d = ShortConv(X, c.linear_conv_kernel_dim)
        self.decay = DecayGate(H)
        self.norm = RMSNorm(K, c.rms_norm_eps)  # times w, where the other norms of Qwen3.5 have 1 + w
        self.out_proj = Linear(Y, D, bias=False)

    @property
    def o_proj(self):
        return self.out_proj

    def qkv(self, h_BTD, rope):
        """-> qkv_BTX, z_BTY, a_BTH and b_BTH."""
        return self.in_proj_qkv(h_BTD), self.in_proj_z(h_BTD), self.in_proj_a(h_BTD), self.in_proj_b(h_BTD)

    def forward(self, qkv_BTX, z_BTY, a_BTH, b_BTH, spans, cache, group, record=None):
        """-> [B, T, Y]. Rows are documents of one long row."""
        B, T = a_BTH.shape[:2]
        g_BTH = self.decay(a_BTH)
        beta_BTH = b_BTH.float().sigmoid()  # how much of a correction is written
        w_XJ = self.conv1d.weight
        if group is not None:
            qkv_BTX, z_BTY, g_BTH, beta_BTH, w_XJ = self.take_my_heads(qkv_BTX, z_BTY, g_BTH, beta_BTH, group)
        # what earlier tokens leave: the last J - 1 rows of qkv, and the state
        if cache is not None and self in cache.layers:
            tail_JX, state_HKP = cache.layers[self]
        else:
            n_before = w_XJ.shape[1] - 1
            tail_JX = qkv_BTX.new_zeros(n_before, qkv_BTX.shape[2])
            state_HKP = g_BTH.new_zeros(g_BTH.shape[2], self.head_dim, self.head_dim)
        tokens = [t.flatten(0, 1) for t in (qkv_BTX, z_BTY, g_BTH, beta_BTH, spans.positions_BT)]
        mix = self.mix
        # a recomputed block recomputes a single segment itself, and must not run it a third time
        if len(tokens[0]) > self.segment or not self.is_recomputed:
            mix = functools.partial(checkpoint, mix, use_reentrant=False, preserve_rng_state=False)
        out, tail_JX, state_HKP = mix_segments(mix, self.segment, tokens, tail_JX, state_HKP, w_XJ)
        if cache is not None:
            cache.layers[self] = (tail_JX, state_HKP)
        if group is not None:
            out = to_my_tokens(out, group)
        return out.view(B, T, -1)

    def take_my_heads(self, qkv_BTX, z_BTY, g_BTH, beta_BTH, group):
        """Of all heads and my tokens -> of my heads and all tokens, and the weight of my channels."""
        n_ranks = group.size()
        w_XJ = self.conv1d.weight
        qkvz = to_my_heads([*qkv_BTX.split(self.qkv_sizes, -1), z_BTY], group)
        qkv, z = qkvz.split([len(w_XJ) // n_ranks, z_BTY.shape[2] // n_ranks], -1)
        g, beta = to_my_heads([g_BTH, beta_BTH], group).chunk(2, -1)
        by_rank = cut_heads(w_XJ.T.split(self.qkv_sizes, -1), n_ranks)
        return qkv, z, g, beta, by_rank[group.rank()].T

    def mix(self, qkv_NX, z_NY, g_NH, beta_NH, positions_N, tail_JX, state_HKP, w_XJ):
        """A segment after tokens that left a tail and a state -> [N, Y], its own tail and state."""
        N = len(qkv_NX)
        # a single new token is a chunk of its own
        C = min(chunk_length(qkv_NX.device), 1 << (N - 1).bit_length())
        n_more = -N % C  # tokens that fill the last chunk
        if n_more:
            # they neither fade the state (g = 0) nor write to it (beta = 0)
            g_NH, beta_NH = (F.pad(t, (0, 0, 0, n_more)) for t in (g_NH, beta_NH))
            added = positions_N[-1] + torch.arange(1, n_more + 1, device=positions_N.device)
            positions_N = torch.cat([positions_N, added])
        x_LX = torch.cat([tail_JX, qkv_NX, qkv_NX.new_zeros(n_more, qkv_NX.shape[1])])
        *system, queries, scores = self.before_scan(x_LX, w_XJ, g_NH, beta_NH, positions_N.view(-1, C))
        # not compiled: the loop would be unrolled, minutes of compiling for no gain
        d_nHCP, states_nHKP, state_HKP = Scan.apply(*system, state_HKP)
        n_before = len(tail_JX)
        tail_JX = torch.cat([tail_JX, qkv_NX[-n_before:]])[-n_before:]
        return self.after_scan(queries, scores, states_nHKP, d_nHCP, z_NY), tail_JX, state_HKP

    def before_scan(self, x_LX, w_XJ, g_NH, beta_NH, positions_nC):
        """All that chunks compute without each other."""
        qkv_NX = self.conv1d(x_LX, w_XJ, positions_nC.flatten())
        heads = qkv_NX.unflatten(1, (-1, self.head_dim))
        H = g_NH.shape[1]
        G = (heads.shape[1] - H) // 2  # the other heads are of q and k
        return chunk_system(*heads.split((G, G, H), 1), g_NH, beta_NH, positions_nC)

    def after_scan(self, queries, scores, states_nHKP, d_nHCP, z_NY):
        """What tokens read from the state and from their chunk, normalized for each head and gated."""
        o_nHCP = queries @ states_nHKP + scores @ d_nHCP
        o_NHP = o_nHCP.transpose(1, 2).flatten(0, 1)[: len(z_NY)]
        return (self.norm(o_NHP).flatten(1) * F.silu(z_NY.float())).to(z_NY.dtype)


# ---------------- MLP and experts
# Both are finish(start(h)). --compile compiles an MLP's start(), see Block, and an MoE's start_experts().


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202), or a stack of such experts. row_stops: see nf4.linear()"""

    def __init__(self, D, width, n_experts=1):
        super().__init__()
        self.gate_proj = Linear(D, n_experts * width, bias=False)
        self.up_proj = Linear(D, n_experts * width, bias=False)
        self.down_proj = Linear(width, n_experts * D, bias=False)

    def start(self, h, row_stops=None):
        return F.silu(self.gate_proj(h, row_stops)) * self.up_proj(h, row_stops)

    def finish(self, gated, row_stops=None):
        return self.down_proj(gated, row_stops)


def take_rows(x, numbers):
    """The rows of x with these numbers; if there are k numbers for a row, [N, k], the sum of these k rows."""
    rows = x[numbers]
    return rows if numbers.dim() == 1 else rows.sum(1)


class MoveRows(torch.autograd.Function):
    """take_rows(x, there): a row for each of a token's k experts, or the way back. Autograd's own backward
    would add atomically on a GPU, with other bits in each run."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back  # if it were saved, a recomputation would run up to the last product for it
        return take_rows(x, there)

    @staticmethod
    def backward(ctx, grad):
        return take_rows(grad, ctx.back), None, None


def fills_rows(h):
    """Whether rows of router probability 0 fill each expert up to a length_multiple()."""
    return h.dtype is not torch.float32 and length_multiple(h) > 1


class MoE(nn.Module):
    """The MLP of Qwen3-MoE: each token goes to the k of E experts with the highest router probabilities. A
    stack of experts is one matrix of E * F rows, ordinary to NF4, FSDP2 and LoRA. Nothing balances the load.

    Set from outside: start_experts (compile_)."""

    def __init__(self, c):
        super().__init__()
        self.n_experts = c.num_experts
        self.n_chosen = c.num_experts_per_tok
        self.normalize = c.norm_topk_prob
        self.gate = Linear(c.hidden_size, c.num_experts, bias=False)
        self.experts = MLP(c.hidden_size, c.moe_intermediate_size, c.num_experts)
        self.has_shared = c.family.shared_expert
        if self.has_shared:
            self.shared_expert = MLP(c.hidden_size, c.shared_expert_intermediate_size)
            self.shared_expert_gate = Linear(c.hidden_size, 1, bias=False)

    def start(self, h):
        return h  # nothing: torch can compile start_experts() more rarely than the rest of a block

    def finish(self, h):
        started, shared, (tokens, rows_Nk), row_stops = self.start_experts(h)
        out = MoveRows.apply(self.experts.finish(started, row_stops), rows_Nk, tokens).view_as(h)
        return out + shared if self.has_shared else out

    def start_experts(self, h):
        """-> input of the experts' last product, sorted by expert, the shared expert's output or None, the
        route (the token of each row, the k rows of each token), and row_stops."""
        shared = None
        if self.has_shared:
            shared = self.shared_expert.finish(self.shared_expert.start(h))
            shared = self.shared_expert_gate(h).sigmoid() * shared
        h_ND = h.flatten(0, -2)
        logits_NE = self.gate(h_ND).float()
        if self.normalize:
            # probabilities of all experts over the sum of the chosen ones are a softmax over these
            logits_Nk, chosen_Nk = logits_NE.topk(self.n_chosen)
            probs_Nk = logits_Nk.softmax(-1)
        else:
            probs_Nk, chosen_Nk = logits_NE.softmax(-1).topk(self.n_chosen)
        order, row_stops = self.sort(chosen_Nk.flatten(), h)
        # the inverse of `order`
        numbers = torch.arange(len(order), device=h.device)
        rows = torch.empty_like(order).scatter_(0, order, numbers)[: chosen_Nk.numel()]
        tokens = order // self.n_chosen
        probs = probs_Nk.flatten()
        if fills_rows(h):
            tokens = tokens.clamp_max(len(h_ND) - 1)  # rows that only fill up are copies of the last token
            probs = F.pad(probs, (0, len(order) - len(probs)))
        route = tokens, rows.view(chosen_Nk.shape)
        started = self.experts.start(MoveRows.apply(h_ND, *route), row_stops)
        # before the last product, so that the recomputation of a block can end here
        return started * probs.index_select(0, order)[:, None].to(h.dtype), shared, route, row_stops

    def sort(self, chosen, h):
        """The expert of each (token, choice) -> (order: row i is that of chosen[order[i]], row_stops)."""
        experts = torch.arange(self.n_experts, device=h.device)
        if fills_rows(h):
            n_more = -chosen.bincount(minlength=self.n_experts) % length_multiple(h)
            chosen = torch.cat([chosen, experts.repeat_interleave(n_more)])
        chosen, order = chosen.sort(stable=True)  # stable, so that a run's bits do not change
        return order, torch.searchsorted(chosen, experts, right=True, out_int32=True)


# ---------------- the block

class Block(nn.Module):
    """Two branches, each added to the residual stream x [B, T, D]. In most families:

        h = input_layernorm(x)
        x = x + o_proj(attention(q_proj(h), k_proj(h), v_proj(h)))
        h = post_attention_layernorm(x)
        x = x + down_proj(silu(gate_proj(h)) * up_proj(h))

    The code cuts these lines elsewhere, so that --compile compiles qkv() and start_mlp() once for all blocks
    and packed rows:

        qkv()               input_layernorm and the projections of the mixer
        mixer.forward()     tokens see each other, which depends on where documents lie
        start_mlp()         o_proj, the first sum, the norm, gate_proj and up_proj
        mlp.finish()        down_proj. The recomputation of a block ends before it, and a compiled graph
                            would run to its end

    Set from outside: qkv and start_mlp (compile_), n_groups (tile_mlp_), forward (tile_mlp_,
    recompute_, fully_shard)."""

    n_groups = 1  # of key heads, see forward_in_tiles()

    def __init__(self, c, number):
        super().__init__()
        norm = functools.partial(RMSNorm, c.hidden_size, adds_one=c.family.norms_add_one)
        self.input_layernorm = norm(c.rms_norm_eps)
        if c.layer_types[number] == "linear_attention":
            self.linear_attn = GatedDeltaNet(c)
        else:
            self.self_attn = Attention(c, number)
        self.branch_factor = c.residual_multiplier  # Granite's
        self.has_branch_norms = c.family.branch_norms
        if self.has_branch_norms:
            branch_eps = c.post_norm_eps or c.rms_norm_eps
            self.post_attention_layernorm = norm(branch_eps)
            self.pre_feedforward_layernorm = norm(c.rms_norm_eps)
            self.post_feedforward_layernorm = norm(branch_eps)
        else:
            self.post_attention_layernorm = norm(c.rms_norm_eps)
        self.mlp = MoE(c) if c.num_experts else MLP(c.hidden_size, c.intermediate_size)

    @property
    def mixer(self):
        return self.linear_attn if hasattr(self, "linear_attn") else self.self_attn

    def forward(self, x, rope, spans, cache=None, group=None, record=None):
        """record: see AttentionRecord."""
        mixed = self.mixer(*self.qkv(x, rope), spans, cache, group, record)
        return self.o_proj_and_mlp(x, mixed)

    def qkv(self, x, rope):
        return self.mixer.qkv(self.input_layernorm(x), rope)

    def o_proj_and_mlp(self, x, mixed):
        """mixed [B, T, Y] -> x + both branches."""
        x, started = self.start_mlp(x, mixed)
        branch = self.mlp.finish(started)
        if self.has_branch_norms:
            branch = self.post_feedforward_layernorm(branch)
        return torch.add(x, branch, alpha=self.branch_factor)

    def start_mlp(self, x, mixed):
        """-> x + the mixer's branch, and what mlp.finish() needs."""
        branch = self.mixer.o_proj(mixed)
        norm = self.post_attention_layernorm
        if self.has_branch_norms:
            branch = norm(branch)
            norm = self.pre_feedforward_layernorm
        x = torch.add(x, branch, alpha=self.branch_factor)
        return x, self.mlp.start(norm(x))


# ---------------- the loss

FLOAT32_TOKENS = 256  # tokens of a chunk whose logits are in float32 at once
AUTOGRAD_TOKENS = 64  # the same of what autograd computes: it has four or five copies


def cross_entropy_and_grad(logits_CV, targets_C):
    """-> (cross-entropy of each token [C], its gradient softmax - one-hot [C, V] in the logits' dtype),
    both 0 where the target is IGNORE. By hand, because autograd's copies leave memory for fewer tokens at a
    time: compiled, 256 tokens would launch 32 operators, and not 3 (tests/LOG.md)."""
    dtype = logits_CV.dtype
    logits_CV = logits_CV.float()
    real_C1 = (targets_C != IGNORE).float()[:, None]
    targets_C1 = targets_C.clamp_min(0)[:, None]  # IGNORE is no index
    logits_CV -= logits_CV.amax(-1, keepdim=True)  # or exp() would overflow
    target_logit_C1 = logits_CV.gather(-1, targets_C1)
    total_C1 = logits_CV.exp_().sum(-1, keepdim=True)
    losses_C1 = (total_C1.log() - target_logit_C1) * real_C1
    scale_C1 = real_C1 / total_C1
    logits_CV *= scale_C1  # softmax
    grad_CV = logits_CV.to(dtype)
    token_C1 = torch.arange(len(targets_C), device=targets_C.device)[:, None]
    # from the float32 logit: where the model is sure, softmax - 1 is far below a 16-bit softmax's rounding
    grad_CV[token_C1, targets_C1] = (target_logit_C1.exp() * scale_C1 - real_C1).to(dtype)
    return losses_C1.flatten(), grad_CV


class ChunkedCrossEntropy(torch.autograd.Function):
    """Summed loss of h_SD @ w_VD.T against targets_S in float32, or with per_token that of each token, [S],
    where the head is frozen. The forward computes the gradients as well, so that no logits wait for the
    backward. That of h_SD overwrites h_SD. loss_and_grad_: see LMHead.

    Memory: a chunk of logits, which become their gradient (C*V*2 bytes in bf16); for FLOAT32_TOKENS tokens a
    float32 copy and a 16-bit gradient (V*6 bytes a token); a trained head's gradient in float32 (V*D*4)."""

    @staticmethod
    def forward(ctx, h_SD, w_VD, targets_S, chunk, with_grad, loss_and_grad_, per_token=False):
        # with_grad: whether gradients are wanted, because autograd is off in here. chunk: rows of h at a time
        losses_S = torch.empty(len(h_SD), dtype=torch.float32, device=h_SD.device)
        grad_h = h_SD.detach() if with_grad and ctx.needs_input_grad[0] else None
        grad_w = None
        trains_w = with_grad and ctx.needs_input_grad[1]
        # gradients of several chunks are summed in float32
        sum_dtype = w_VD.dtype if len(h_SD) <= chunk else torch.float32
        # one memory for all chunks: allocated anew, two of them would be alive for a moment
        memory_CV = h_SD.new_empty(min(chunk, len(h_SD)), len(w_VD))
        for start in chunk_starts(len(h_SD), chunk):
            rows = slice(start, start + chunk)
            h_CD = h_SD[rows]
            logits_CV = torch.mm(h_CD, w_VD.T, out=memory_CV[: len(h_CD)])
            loss_and_grad_(logits_CV, targets_S[rows], losses_S[rows])
            # from here on logits_CV is the gradient of the logits
            if trains_w and grad_w is None:
                grad_w = (logits_CV.T @ h_CD).to(sum_dtype)
            elif trains_w:
                grad_w += logits_CV.T @ h_CD
            if grad_h is not None:
                torch.mm(logits_CV, w_VD, out=grad_h[rows])  # overwrites h_CD
        if trains_w:
            grad_w = grad_w.to(w_VD.dtype)
        ctx.grads = (grad_h, grad_w)
        return losses_S if per_token else losses_S.sum()

    @staticmethod
    def backward(ctx, grad_loss):
        if ctx.grads is None:
            raise RuntimeError("chunked cross-entropy: backward ran twice, but its gradients are used up")
        # in place: a copy of grad_w would cost V*D. With per_token each row has a scale of its own
        scale = grad_loss[..., None]
        grad_h, grad_w = (None if grad is None else grad.mul_(scale.to(grad.dtype)) for grad in ctx.grads)
        ctx.grads = None
        return grad_h, grad_w, None, None, None, None, None


def chunk_starts(n_tokens, chunk):
    """Where chunks begin. It has a name because a plan runs only the first two chunks."""
    return range(0, n_tokens, chunk)


class LMHead(nn.Module):
    """The head with its loss, because under FSDP2 the weight exists inside this forward only.

    custom_loss, of a fork, gets (logits_CV, targets_C), float32, and returns a number for each token, [C], or
    these and {name: values_C} of metrics. Its gradient, and that of capped logits, is autograd's.

    Set from outside: chunk and per_token (on_meta), custom_loss (a fork, in on_meta), cross_entropy_and_grad
    and masked_loss (compile_)."""

    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        self.chunk = 1024  # tokens; 0 computes all logits at once, and leaves their gradient to autograd
        self.per_token = False
        self.factor = c.output_multiplier / c.logits_scaling
        self.cap = c.final_logit_softcapping
        self.custom_loss = None
        self.cross_entropy_and_grad = cross_entropy_and_grad
        self.metrics = {}  # {name: sum over the supervised tokens} of the last forward

    def capped(self, logits):
        return self.cap * (logits / self.cap).tanh() if self.cap else logits

    def masked_loss(self, logits_CV, targets_C):
        """-> losses [C], 0 where the target is IGNORE, and {name: sum of a metric}."""
        loss = self.custom_loss or functools.partial(F.cross_entropy, reduction="none")
        # also where a target is IGNORE the slope must be finite: 0 times infinity is nan
        losses_C = loss(self.capped(logits_CV), targets_C)
        metrics = {}
        if isinstance(losses_C, tuple):
            losses_C, metrics = losses_C
        is_ignored_C = targets_C == IGNORE
        sums = {}
        for name, values_C in metrics.items():
            values_C = values_C.detach().view_as(targets_C)  # an error if it is not one number a token
            sums[name] = torch.where(is_ignored_C, 0, values_C).sum(dtype=torch.float32)
        return torch.where(is_ignored_C, 0, losses_C), sums

    def masked_loss_and_grad(self, logits_CV, targets_C):
        leaf = logits_CV.detach().float().requires_grad_()
        with torch.enable_grad():  # off inside of forward(), and in evaluations
            losses_C, sums = self.masked_loss(leaf, targets_C)
            (grad_CV,) = torch.autograd.grad(losses_C.sum(), leaf)
        self.metrics.update(sums)
        return losses_C.detach(), grad_CV

    def loss_and_grad_(self, logits_CV, targets_C, losses_C):
        """Writes the loss of each token to losses_C, and its gradient in the place of the logits."""
        by_autograd = self.custom_loss or self.cap
        function = self.masked_loss_and_grad if by_autograd else self.cross_entropy_and_grad
        size = AUTOGRAD_TOKENS if by_autograd else FLOAT32_TOKENS
        for logits, targets, losses in zip(*(t.split(size) for t in (logits_CV, targets_C, losses_C))):
            losses[:], grad = function(logits, targets)
            logits.copy_(grad)
            del grad  # or it would stay beside the next one

    def forward(self, x, targets_BT=None, supervised_S=None):
        """-> summed loss of the tokens supervised_S, or with per_token of each; without targets logits."""
        w_VD = self.weight.to(x.dtype)
        if self.factor != 1:
            x = x * self.factor  # fewer numbers than logits
        if targets_BT is None:
            return self.capped(F.linear(x, w_VD).float())
        # Copies of token 0 without a target pad to a multiple of 128: allocators and oneDNN keep memory for
        # each size. So every rank has a row, and takes part in reducing the head's gradient and the metrics.
        S = len(supervised_S)
        n_rows = min(nf4.ceil_div(max(S, 1), 128) * 128, targets_BT.numel())
        supervised_S = F.pad(supervised_S, (0, n_rows - S))
        h_SD = x.flatten(0, 1)[supervised_S]
        targets_S = targets_BT.flatten()[supervised_S]
        targets_S[S:] = IGNORE  # in a copy, which indexing by a tensor has made
        self.metrics = Counter()  # update() adds
        if self.chunk:
            loss = ChunkedCrossEntropy.apply(h_SD, w_VD, targets_S, self.chunk, torch.is_grad_enabled(),
                                             self.loss_and_grad_, self.per_token)
        else:
            losses_S, sums = self.masked_loss(F.linear(h_SD, w_VD).float(), targets_S)
            self.metrics.update(sums)
            loss = losses_S if self.per_token else losses_S.sum()
        return loss[:S].clone() if self.per_token else loss  # a view, see run_in_tiles()


# ---------------- the decoder

class Transformer(nn.Module):
    """Embedding, blocks, norm, and the head with the loss.

    Set from outside: compute_dtype (set_precision_), dropout (add_lora_), activation_hooks (a context around
    the blocks, train.py's offload), sequence_group (the ranks that share a row)."""

    def __init__(self, c):
        super().__init__()
        self.config = c
        self.compute_dtype = torch.float32
        self.dropout = 0.0
        self.activation_hooks = None
        self.sequence_group = None
        self.embed_norm = None
        if c.family.embed_norm:
            self.embed_norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps, elementwise_affine=False)
        # made here: nn.Embedding's own initial values import torch._dynamo, 0.5 s
        embedding = torch.empty(c.vocab_size, c.hidden_size)
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(*embedding.shape, _weight=embedding),
            "layers": nn.ModuleList(Block(c, i) for i in range(c.num_hidden_layers)),
            "norm": RMSNorm(c.hidden_size, c.rms_norm_eps, c.family.last_norm_adds_one),
        })
        self.lm_head = LMHead(c)
        self.tie_()

    def tie_(self):
        """Makes head and embedding one parameter if the config says so; to_empty() makes two of it again."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
            self, tokens_BT, targets_BT=None, positions_BT=None, spans=None, supervised_S=None, cache=None):
        """tokens [B, T] -> summed loss over the supervised tokens; without targets logits [B, T, V], with a
        cache those of the last token only. One forward of a training step is

            x = embedding of the tokens          [B, T, D]
            x = block(x), for each block         + attention(norm(x)), then + MLP(norm(x))
            logits = norm(x) @ head.T            of the supervised tokens, [S, V], a chunk at a time
            loss = -log softmax(logits)[target]  summed over these tokens

        positions restart at 0 in every document; without positions each row is one document. With a
        sequence_group the tensors have this rank's tokens only, spans all."""
        B, T = tokens_BT.shape
        group = self.sequence_group
        if positions_BT is None:
            group = None  # whole rows on every rank
            n_before = cache.n_tokens if cache is not None else 0
            positions_BT = torch.arange(n_before, n_before + T, device=tokens_BT.device).expand(B, T)
            spans = Spans([(row * T, row * T + T) for row in range(B)])
        if targets_BT is not None and supervised_S is None:
            # the loader passes them along, because on a GPU nonzero() waits for the device
            supervised_S = (targets_BT.flatten() != IGNORE).nonzero().flatten()
        rope = rope_table(positions_BT, self.config)
        if group is not None and "linear_attention" in self.config.layer_types:
            # of all tokens: row i is that of rank i
            positions_BT = exchange(positions_BT.repeat(group.size(), 1), group)
        spans = Spans(spans.pairs, spans.bounds, spans.longest, positions_BT)
        x = self.model.embed_tokens(tokens_BT).to(self.compute_dtype)
        if self.config.embedding_multiplier != 1:
            x = x * self.config.embedding_multiplier
        if self.embed_norm:
            x = self.embed_norm(x)
        *blocks, last = self.model.layers
        with self.activation_hooks or contextlib.nullcontext():
            for block in blocks:
                # rope is a tuple: recomputation and offload save only a block's bare tensor arguments
                x = block(x, rope, spans, cache, group)
        # without the hooks: the backward begins here
        x = last(x, rope, spans, cache, group)
        if cache is not None:
            cache.n_tokens += T
            x = x[:, -1:]  # logits of a long prompt would take GiB
        return self.lm_head(self.model.norm(x), targets_BT, supervised_S)


# ---------------- generation

SEEDS = itertools.count()  # one for each answer, the same on every rank


@torch.no_grad()
def next_logits(model, tokens, device, cache):
    """[V] float32 on the CPU: the logits after a list of token ids, which are added to the cache."""
    return model(torch.tensor([tokens], device=device), cache=cache)[0, -1].cpu()


def generate(model, tokens, n, stop, device, temperature=0.0):
    """Yields up to n ids after `tokens`, none of `stop`. Temperature 0 takes the likeliest."""
    cache = Cache()
    # on the CPU, so that all ranks draw the same token
    generator = torch.Generator().manual_seed(next(SEEDS))
    for _ in range(n):
        logits_V = next_logits(model, tokens, device, cache)
        if logits_V.isnan().any():
            cause = "the files of --model are damaged, or --lr was too high"
            if model.compute_dtype is torch.float16:
                cause = f"its activations may be beyond float16's 65,504: try --precision fp32; or {cause}"
            raise FloatingPointError(f"the model computes nan: {cause}")
        token = int(logits_V.argmax())
        if temperature:
            # the largest becomes 0 first, or a tiny temperature would make it infinite
            probs_V = ((logits_V - logits_V.max()) / temperature).softmax(-1)
            token = int(torch.multinomial(probs_V, 1, generator=generator))
        if token in stop:
            return
        yield token
        tokens = [token]  # the cache has the others


# ---------------- LoRA

# Linear layers that may get an adapter, by the names of --lora_targets and PEFT's adapter_config.json.
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
GATE_TARGET = "self_attn.gate_proj"  # in Muse Glimmer: `gate_proj` alone is the MLP's
DELTANET_TARGETS = ("in_proj_qkv", "in_proj_z", "out_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
ALL_LINEAR = (*ATTENTION_TARGETS, *DELTANET_TARGETS, *MLP_TARGETS, GATE_TARGET)
DELTANET_GATES = ("in_proj_a", "in_proj_b")  # H rows each: PEFT's all-linear has them, and ours has not
LORA_TARGETS = (*ALL_LINEAR, *DELTANET_GATES)


def targets_in(c):
    """Those of ALL_LINEAR that a model has."""
    with torch.device("meta"):
        # one block of each type
        blocks = nn.ModuleList(Block(c, c.layer_types.index(name)) for name in set(c.layer_types))
    found = {target_of(name) for name, _ in blocks.named_modules()}
    return [name for name in ALL_LINEAR if name in found]


def target_of(layer):
    """The name in LORA_TARGETS of a layer, from the end of its own name."""
    return GATE_TARGET if layer.endswith(GATE_TARGET) else layer.rpartition(".")[2]


class LoRA:
    """y = w x + scale lora_B lora_A x (arXiv:2106.09685), with PEFT's names; w is frozen.

    Set from outside: adapter_on (switch_adapters_)."""

    adapter_on = True

    def add_adapter_(self, rank, scale, dropout, n_experts):
        """Adds lora_A [R, D] and lora_B [N, R] to a weight [N, D] or a stack. dropout: arXiv:1207.0580"""
        with torch.device(next(self.parameters()).device):
            self.lora_A = Linear(self.in_features, n_experts * rank, bias=False)
            self.lora_B = Linear(rank, self.out_features, bias=False)
        self.lora_scale = scale
        self.dropout = dropout

    def forward(self, x, row_stops=None):
        if not self.adapter_on:  # the reference of --dpo
            return super().forward(x, row_stops)
        seen = x
        if self.dropout and self.training:
            # F.dropout's kernel on a GPU; on a CPU F.dropout would store its mask in the dtype of x
            seen, _ = torch.native_dropout(x, self.dropout, True)
        a = self.lora_A(seen, row_stops) * self.lora_scale
        # the frozen weight last: it saves nothing, so the recomputation of a block ends before down_proj
        delta = self.lora_B(a, row_stops)
        return delta + super().forward(x, row_stops)


class LoRALinear(LoRA, Linear):
    pass


class LoRANF4Linear(LoRA, nf4.NF4Linear):
    pass


def lora_scale(rank, alpha, rslora):
    """rsLoRA (arXiv:2312.03732) divides by the root: a large rank updates no less than a small one."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def add_lora_(model, rank, scale, dropout, targets):
    """Adds adapters to the layers of the blocks that `targets` names, and freezes all else."""
    with_lora = {Linear: LoRALinear, nf4.NF4Linear: LoRANF4Linear}
    model.requires_grad_(False)  # before the adapters are there, which stay trainable
    model.dropout = dropout
    for name, layer in list(model.model.layers.named_modules()):
        if target_of(name) in targets:
            # not wrapped: the weight keeps its name, and torch.compile compiles one block for all
            layer.__class__ = with_lora[type(layer)]
            n_experts = model.config.num_experts if ".experts." in name else 1
            layer.add_adapter_(rank, scale, dropout, n_experts)


def switch_adapters_(model, on):
    """With on=False the model computes what it did before add_lora_()."""
    for module in model.modules():
        if isinstance(module, LoRA):
            module.adapter_on = on


# ---------------- precision, compile, tiles, recomputed blocks
# Each of these edits a finished model. After on_meta, build() in train.py calls compile_, wrap_blocks_, which
# calls tile_mlp_ and recompute_, and shard_, from the inside out: each wraps what is there.


def set_precision_(model, precision):
    """float32 masters except in bf16, where an update below 1/256 of a weight is lost (accelerate #2624)."""
    trained = torch.bfloat16 if precision == "bf16" else torch.float32
    frozen = {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
    for name, param in model.named_parameters():
        # uint8 is NF4
        if param.is_floating_point() and ".decay." not in name:
            param.data = param.data.to(trained if param.requires_grad else frozen)
    model.compute_dtype = frozen


def on_meta(config, args):
    """The model of a run on the meta device: vanilla, then NF4, LoRA, dtypes."""
    with torch.device("meta"):
        model = Transformer(config)
    # NF4 comes first: an adapter fits either linear layer, and its own two must not be quantized
    if args.qlora:
        in_nf5 = args.nf5 or ()
        nf4.quantize_linears_(model.model.layers, lambda name: 5 if target_of(name) in in_nf5 else 4)
    if args.lora:
        scale = lora_scale(args.lora_rank, args.lora_alpha, args.rslora)
        add_lora_(model, args.lora_rank, scale, args.lora_dropout, args.lora_targets)
    if args.train_embeddings:
        model.model.embed_tokens.weight.requires_grad_()
        model.lm_head.weight.requires_grad_()
    set_precision_(model, args.precision)
    model.lm_head.chunk = args.ce_chunk
    model.lm_head.per_token = args.dpo
    return model


def compile_(model, packing):
    """torch.compile on the parts of a block around the mixer, on experts, the loss and dequantization."""
    dynamic = not packing  # rows of changing length need dynamic shapes

    def is_training(*_):
        # evaluation and generation have other shapes: each would be compiled
        return model.training

    def trains_experts(h):
        # a graph has a fixed number of rows, but on a CPU it varies; torch traces grouped_mm only in bf16
        return model.training and h.dtype is torch.bfloat16 and not fills_rows(h)

    def compiled(function, dynamic=dynamic, can_compile=is_training):
        return nf4.CompiledOrPlain(function, dynamic, can_compile)

    # up to 15 graphs (types of blocks x tiles x with a gradient): torch's limit of 8 would end the run
    torch._dynamo.config.recompile_limit = 64
    # a backward that cannot be compiled then fails in the forward, where nf4.CompiledOrPlain can go on
    torch._functorch.config.force_non_lazy_backward_lowering = True
    for block in model.model.layers:
        block.qkv = compiled(block.qkv)
        block.start_mlp = compiled(block.start_mlp)
    for module in model.modules():
        if isinstance(module, nf4.NF4Linear):
            module.fast = True
        if isinstance(module, GatedDeltaNet):
            module.before_scan = compiled(module.before_scan)
            module.after_scan = compiled(module.after_scan)
        if isinstance(module, MoE):
            module.start_experts = compiled(module.start_experts, can_compile=trains_experts)
    head = model.lm_head
    if head.custom_loss or head.cap:  # only the forward: torch.autograd.grad() cannot be compiled
        head.masked_loss = compiled(head.masked_loss, dynamic=True)  # the last tokens are fewer
    else:
        head.cross_entropy_and_grad = compiled(head.cross_entropy_and_grad, dynamic=True)


def saving_as_usual():
    """Context in which saved tensors bypass any surrounding saved-tensor hooks."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


class SaveNow(torch.autograd.Function):
    """Saves tensors at once, in .grad_fn.saved_tensors of its empty result."""

    @staticmethod
    def forward(ctx, needs_grad, *tensors):
        ctx.save_for_backward(*tensors)
        return needs_grad.new_empty(0)


class Tiles:
    """A call of a function in tiles of `size` tokens. The backward runs each tile again, then its backward.

    The inputs [B, T, ...] are saved once, whole. In a recomputed block the first read of them starts the
    recomputation, which ends where the last call in tiles saves its inputs. If each tile saved its own, the
    recomputation would run all tiles, too: a third time."""

    def __init__(self, function, size, *inputs):
        self.function = function
        self.size = size
        # an attribute, because torch 2.11 frees what it saved together with it
        self.saved = SaveNow.apply(torch.empty(0, requires_grad=True), *inputs)
        self.inputs = self.cut(*inputs)

    def cut(self, *inputs):
        return list(zip(*(t.flatten(0, 1).split(self.size) for t in inputs)))

    def __iter__(self):
        return iter(range(len(self.inputs)))

    def run(self, i):
        return self.function(*self.read_inputs()[i])

    def read_inputs(self):
        """In the backward, which needs only values: gradients go through the graph of the forward."""
        if not self.inputs:
            saved = self.saved.grad_fn.saved_tensors
            self.inputs = self.cut(*(t.detach().requires_grad_(t.requires_grad) for t in saved))
        return self.inputs


def run_in_tiles(size, has_dropout, function, *inputs):
    """-> [tensors that function() returns, each [B, T, ...]], of inputs [B, T, ...]."""
    tiles = Tiles(function, size, *inputs)
    # a tile that runs again draws the same masks
    run = functools.partial(checkpoint, tiles.run, use_reentrant=False, preserve_rng_state=has_dropout)
    # a recomputed block around them would count what tiles save
    with saving_as_usual():
        out = [run(i) for i in tiles]
    tiles.inputs = []  # views, which would keep the inputs in memory
    # no view for autograd: FSDP2 warns of blocks that return one, because in-place operations on it go wrong
    B, T = inputs[0].shape[:2]
    whole = [torch.cat(parts) for parts in zip(*out)]
    return [torch.ops.aten._unsafe_view(t, [B, T, *t.shape[1:]]) for t in whole]


def forward_in_tiles(block, in_tiles, x, rope, spans, cache=None, group=None, record=None):
    """Block.forward() by --tiled_mlp: tiles of qkv(), then attention for one group of key heads, with their
    query heads, at a time, then tiles of o_proj_and_mlp(). A single group runs with a whole qkv().

    So one group at a time has what the kernel's backward adds: float32 dq, dk and dv of each query head."""
    n_groups = block.n_groups

    def start(x_ND, *rope_N):
        """-> [q, k, v and perhaps a gate of the first group of heads, then those of the second, ...]"""
        qkv = block.qkv(x_ND[None], tuple(t[None] for t in rope_N))
        by_group = zip(*(t[0].chunk(n_groups, 1) for t in qkv if t is not None))
        return [*itertools.chain(*by_group)]

    def finish(x_ND, *mixed_N):
        return [block.o_proj_and_mlp(x_ND, torch.cat(mixed_N, -1))]

    if cache is not None or n_groups == 1:
        mixed = [block.mixer(*block.qkv(x, rope), spans, cache, group, record)]
    else:
        heads = in_tiles(start, x, *rope)
        n_tensors = len(heads) // n_groups  # of a group: 3, or 4 with a gate
        mixed = []
        for number in range(n_groups):
            # out of the list: only autograd has them, and frees them after their backward
            q, k, v, *gate = (heads.pop(0) for _ in range(n_tensors))
            record_of_group = record.of_group(number) if record else None
            mixed.append(block.mixer(q, k, v, *(gate or [None]), spans, cache, group, record_of_group))
    return in_tiles(finish, x, *mixed)[0]


GROUP_TOKENS = 8192  # a group for so many tokens of a row: shorter rows would launch more and save little


def tile_mlp_(model, size, seq_len=0, n_ranks=1):
    """Runs the MLP `size` tokens at a time, and once more in the backward: 6*F values a token live for one
    tile (ALST, arXiv:2506.13996). In long rows attention runs by groups of key heads (as UPipe,
    arXiv:2602.21196). n_ranks: the ranks that share a row, each of which has heads of every group."""
    n_heads = model.config.num_key_value_heads
    sizes = range(1, min(seq_len // GROUP_TOKENS, n_heads) + 1)
    n_groups = max((n for n in sizes if n_heads % (n * n_ranks) == 0), default=1)
    in_tiles = functools.partial(run_in_tiles, size, model.dropout > 0)
    for block in model.model.layers:
        if isinstance(block.mixer, Attention):
            block.n_groups = n_groups
        block.forward = functools.partial(forward_in_tiles, block, in_tiles)


class AttentionRecord:
    """What RunOnce keeps of a call of attention for the backward."""

    inputs = ()  # copies of q, k and v, without memory between forward and recomputation
    out = None  # with its graph, which leads to `inputs`

    def __init__(self):
        self.groups = {}

    def of_group(self, number):
        """The record of a group of heads, the same in the forward and the recomputation."""
        return self.groups.setdefault(number, AttentionRecord())


class RunOnce(torch.autograd.Function):
    """Runs function(*inputs), which is attention, in the forward of a recomputed block, and not again in the
    recomputation. The output stays in memory, the inputs q, k and v do not:

        forward          run function() on copies of q, k, v, with a graph of its own; free their memory
        recomputation    give the copies memory again, with the new q, k, v in it; return record.out
        backward         go through function()'s graph

    torch's selective checkpointing makes small steps 1.3 times as slow (tests/LOG.md)."""

    @staticmethod
    def forward(ctx, record, function, *inputs):
        ctx.record = record
        if record.out is None:
            # copies, because q, k and v may be views
            record.inputs = [t.detach().clone().requires_grad_() for t in inputs]
            # the recomputed block around it drops what its parts save
            with torch.enable_grad(), saving_as_usual():
                record.out = function(*record.inputs)
            for t in record.inputs:
                t.untyped_storage().resize_(0)
        else:
            for t, recomputed in zip(record.inputs, inputs):
                t.untyped_storage().resize_(recomputed.nbytes)
                # .data, or autograd would refuse its graph: what it saved was changed in place
                t.data.copy_(recomputed)
        return record.out.detach()

    @staticmethod
    def backward(ctx, grad):
        inputs = ctx.record.inputs
        out = ctx.record.out
        # the checkpoint has `record` for longer, so what is in it would stay in memory
        ctx.record.inputs = ()
        ctx.record.out = None
        return None, None, *torch.autograd.grad(out, inputs, grad)


def recompute_(block, keeps_attention=False, has_dropout=False):
    """Stores only the input of a block, 2*D bytes a token instead of about 34*D (43*D without --compile), and
    recomputes the rest in the backward, at most a third more FLOP (arXiv:1604.06174)."""
    block.forward = functools.partial(call_recomputed, block.forward, keeps_attention, has_dropout)
    if isinstance(block.mixer, GatedDeltaNet):
        block.mixer.is_recomputed = True
    keep_weights_(block)


def call_recomputed(forward, keeps_attention, has_dropout, *args):
    """A block under torch's checkpoint, which saves its bare tensor, x, under the hooks around this call."""
    record = AttentionRecord() if keeps_attention else None  # for the forward and the recomputation
    run = functools.partial(forward, record=record)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=has_dropout)


def keep_weights_(module):
    """Keeps the 16-bit weights of the forward or the recomputation for the backward."""
    for layer in module.modules():
        if isinstance(layer, nf4.NF4Linear):
            layer.keeps_weight = True


def reshard_(model):
    """Frees the weights of all blocks: in an evaluation FSDP2 leaves them gathered for a backward."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


# ---------------- FLOP of a step

def mixer_weights(c, layer_type):
    """The number of weights of a mixer's projections."""
    if layer_type == "linear_attention":
        return c.hidden_size * (c.conv_size + 2 * c.value_size)
    n_square = 3 if c.family.gate else 2  # q, o and the gate
    return c.hidden_size * (n_square * c.q_size + 2 * c.kv_size)


class Counts(NamedTuple):
    """What a step has on all ranks together. In the loader: arrays with a number for each row."""

    targets: int  # supervised tokens
    tokens: int
    squares: int  # documents' squared lengths, summed: twice the pairs of tokens that attend to each other
    terms: int = 0  # what the loss is divided by: supervised tokens, or pairs of answers


def step_flops(c, counts, is_frozen, has_reference=False, trains_head=False):
    """FLOP of a step without recomputation, and without adapters, about 1 %. A weight costs a token 2 in the
    forward and 4 in the backward, 2 of them for its own gradient. is_frozen: only adapters are trained, and
    with trains_head the head. has_reference: --dpo's, which is one more forward."""
    n_linear = c.layer_types.count("linear_attention")
    n_sliding = c.layer_types.count("sliding_attention")
    n_full = c.num_hidden_layers - n_linear - n_sliding
    squares = n_full * counts.squares
    # a bound: in a window, a document has up to window**2 fewer
    squares += n_sliding * min(counts.squares, 2 * c.sliding_window * counts.tokens)
    # numbers a token between up_proj and down_proj
    mlp_size = c.num_experts_per_tok * c.moe_intermediate_size if c.num_experts else c.intermediate_size
    # three weights of the MLP or of k experts, three of the shared one, the router
    mlp = c.hidden_size * (3 * mlp_size + 3 * c.shared_expert_intermediate_size + c.num_experts)
    blocks = sum(mixer_weights(c, layer_type) + mlp for layer_type in c.layer_types)
    # the head sees only supervised tokens, and the embedding is a look-up
    head = c.hidden_size * c.vocab_size * counts.targets
    products = blocks * counts.tokens + head
    # Two tokens that attend to each other cost 4*H*K, and 2.5 times that in the backward. Here 2, because
    # squares count each pair twice.
    attention = 2 * c.q_size * squares
    # Gated DeltaNet reads its state twice and writes it once
    rule = 6 * c.linear_key_head_dim * c.value_size * n_linear * counts.tokens
    forward = attention + rule + 2 * products
    step = 3.5 * attention + 3 * rule + (4 if is_frozen else 6) * products
    if is_frozen and trains_head:
        step += 2 * head
    return step + forward if has_reference else step


# ---------------- reading a config.json

# what transformers takes where a file of the family does not have a key
IMPLIED = {
    "iquestcoder": {"head_dim": 128, "rms_norm_eps": 1e-5},
    "internlm3": {"head_dim": 128, "rms_norm_eps": 1e-5},
    "seed_oss": {"head_dim": 128, "attention_dropout": 0.1, "residual_dropout": 0.1},
    "cwm": {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 8192},
    "granite": {
        "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
        "logits_scaling": 1.0},
    "mistral": {"sliding_window": 4096},
    "ministral": {"sliding_window": 4096},
    "ministral3": {"head_dim": 128, "rms_norm_eps": 1e-5},
    "qwen3": {"head_dim": 128},
    "qwen3_vl_text": {"head_dim": 128},
    "qwen3_5_text": {"head_dim": 256},
    # no block has a dense MLP
    "qwen3_5_moe_text": {
        "head_dim": 256, "intermediate_size": 1, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True},
    "smollm3": {"tie_word_embeddings": True},
    "muse_glimmer_text": {
        "head_dim": 128, "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8, "sliding_window": 2048,
        "qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404, "final_logit_softcapping": 20.0},
}

# With other values, training would be silently wrong. Families with the key in IMPLIED compute it.
REFUSED = {
    "hidden_act": "silu", "hidden_activation": "silu", "mlp_bias": False, "attention_out_bias": False,
    "qkv_bias": False, "bias": False, "clip_qkv": None,  # InternLM3 and IQuest-Coder have them
    "attention_multiplier": None, "embedding_multiplier": 1, "residual_multiplier": 1, "logits_scaling": 1,
    "logit_scale": 1.0, "use_sliding_window": False, "output_router_logits": False,
    "is_causal": True, "final_logit_softcapping": None, "original_max_position_embeddings": None,
    "mlp_only_layers": [], "decoder_sparse_step": 1,  # every block has experts, or none has
    "attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32",
    "no_rope_layer_interval": 4,
}
UNQUANTIZED = "read are 16 bits, bitsandbytes' NF4 and FP8: use the unquantized model, and --qlora"


class Bounds(NamedTuple):
    """What a number in a JSON file may be, checked before it is used to allocate memory."""

    number_type: type
    low: float
    high: float
    default: float | None = None


POSITIVE = Bounds(float, 1e-30, 1e30)


def quoted(value):
    """The first 200 characters of a value as JSON, for a message."""
    return json.dumps(value, ensure_ascii=False, default=repr)[:200]


def read_field(raw, key, bounds, where):
    """raw[key], or the default where it is absent or null. ValueError if its type or its size is wrong."""
    number_type, low, high, default = bounds
    value = default if raw.get(key) is None else raw[key]
    # files write 10000 for 10000.0; and type(), because True is an instance of int
    types = (int, float) if number_type is float else (number_type,)
    if type(value) not in types or not low <= value <= high:
        expected = f"expected {number_type.__name__} from {low} to {high}"
        raise ValueError(f"{where}: {key} = {quoted(value)}: {expected}")
    return number_type(value)


def parse_config(raw, where="config.json"):
    """The dict of a config.json of transformers 4 or 5 -> Config. ValueError names a wrong key."""

    def error(key, why):
        return ValueError(f"{where}: {key} = {quoted(raw.get(key))}: {why}")

    name = raw.get("model_type")
    if name not in list(FAMILIES):  # a list, because a name may be anything, even a dict
        here = ", ".join(known for known in FAMILIES if not known.endswith("_text"))
        raise error("model_type", f"not implemented, only {here}. TRL and Unsloth train other architectures")
    family = FAMILIES[name]
    if raw.get("architectures") not in (None, [], [family.architecture], [family.other_architecture]):
        raise error("architectures", f"not {family.architecture}")
    prefix = "model."
    if family.decoders:
        # a vision tower: go on with the decoder, whose keys win over those at the top
        text = raw.get("text_config")
        if not isinstance(text, dict) or text.get("model_type") not in family.decoders:
            raise error("text_config", f"expected an object with model_type {' or '.join(family.decoders)}")
        raw = raw | text
        name = raw["model_type"]
        family = FAMILIES[name]
        prefix = "model.language_model."
    for key, value in REFUSED.items():
        if raw.get(key) not in (None, value) and key not in IMPLIED.get(name, {}):
            raise error(key, f"not implemented, only {quoted(value)} works")
    if raw.get("quantization_config") is not None:
        raise error("quantization_config", f"not implemented: {UNQUANTIZED}; if the weights in this folder "
                    "are in 16 bits already, remove the key")
    if raw.get("attention_bias") and not family.bias:
        raise error("attention_bias", f"not implemented for {name}")

    # the fields with limits are numbers; the others need more than one key
    given = with_implied_values(raw, name, family)
    values = {f.name: read_field(given, f.name, Bounds(f.type, *f.metadata["limits"]), where)
              for f in fields(Config) if f.metadata}
    H = values["num_attention_heads"]
    if H % values["num_key_value_heads"]:
        raise error("num_key_value_heads", f"does not divide num_attention_heads {H}")
    K = values["linear_key_head_dim"]
    if raw.get("linear_value_head_dim", K) != K:
        raise error("linear_value_head_dim", f"not linear_key_head_dim {K}")
    if values["linear_num_value_heads"] % values["linear_num_key_heads"]:
        raise error("linear_num_key_heads", "does not divide linear_num_value_heads")
    E = values["num_experts"]
    if (E > 0) != family.experts:
        raise error("num_experts", "above 0 for a model with experts, absent for others")
    if values["num_experts_per_tok"] > max(E, 1):
        raise error("num_experts_per_tok", f"above {E} experts")
    D = values["hidden_size"]
    if E and math.gcd(D, values["moe_intermediate_size"]) % 8:  # grouped_mm wants rows of 16 bytes
        raise error("moe_intermediate_size", f"this and hidden_size {D} must be multiples of 8")
    dtype_key = "dtype" if "dtype" in given else "torch_dtype"  # transformers 5, 4
    dtype = given.get(dtype_key, "bfloat16")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise error(dtype_key, "expected float32, float16 or bfloat16")
    rope = parse_rope(given, name, values, where, error)
    layer_types, rope_layers = blocks_of(given, family, values, rope["rope_theta"], error)
    return Config(
        **values, **rope, model_type=name, family=family, prefix=prefix, dtype=getattr(torch, dtype),
        layer_types=layer_types, rope_layers=rope_layers)


def blocks_of(given, family, values, theta, error):
    """-> (layer_types, rope_layers). By default every fourth block has the first type, or has no RoPE."""
    n_layers = values["num_hidden_layers"]
    allowed = family.layer_types
    interval = values["full_attention_interval"]
    offset = n_layers if family.first_type_at == "last" else family.first_type_at
    is_between = [offset is None or (i - offset) % interval > 0 for i in range(1, n_layers + 1)]

    def is_list_of(values, choices):
        return isinstance(values, list) and len(values) == n_layers and all(one in choices for one in values)

    default = [allowed[-1] if between else allowed[0] for between in is_between]
    layer_types = given.get("layer_types") or default
    if not is_list_of(layer_types, list(allowed)):
        raise error("layer_types", f"expected {' or '.join(allowed)} for each of {n_layers} blocks")
    if not family.some_rope:
        return layer_types, [True] * n_layers
    ropes = is_between
    for key in ("no_rope_layers", "layer_rope_theta"):  # SmolLM3's 0 or 1, Muse Glimmer's 0 or theta
        ropes = given.get(key) or ropes
        if not is_list_of(ropes, (0, 1, theta)):
            raise error(key, f"expected 0, or 1 or rope_theta, for each of {n_layers} blocks")
    return layer_types, [rope > 0 for rope in ropes]


def with_implied_values(raw, name, family):
    """The keys of a file, and what transformers derives if they are missing."""
    given = {key: value for key, value in (IMPLIED.get(name, {}) | raw).items() if value is not None}
    D = given.get("hidden_size")
    H = given.get("num_attention_heads")
    if "num_local_experts" in given:  # transformers 5
        given.setdefault("num_experts", given["num_local_experts"])
    if not family.experts:
        given.setdefault("num_experts_per_tok", 1)
        given.setdefault("moe_intermediate_size", 1)
    if name == "llama":  # Llama-2 7B and 13B leave it out
        given.setdefault("num_key_value_heads", H)
    if type(D) is type(H) is int and H > 0 and D % H == 0:
        given.setdefault("head_dim", D // H)
    return given


# The keys of each rope_type, and what they may be
ROPE_NUMBERS = {
    "default": {},
    "dynamic": {"factor": POSITIVE},
    "linear": {"factor": POSITIVE},
    "llama3": {
        "factor": POSITIVE, "low_freq_factor": POSITIVE, "high_freq_factor": POSITIVE,
        "original_max_position_embeddings": Bounds(int, 1, 1 << 30),
    },
    "yarn": {
        "factor": Bounds(float, 1, 1e30), "original_max_position_embeddings": Bounds(int, 1, 1 << 30),
        "attention_factor": POSITIVE, "beta_fast": POSITIVE, "beta_slow": POSITIVE,
        "mscale": Bounds(float, 0, 1e30), "mscale_all_dim": Bounds(float, 0, 1e30),
        "truncate": Bounds(bool, False, True), "llama_4_scaling_beta": Bounds(float, 0, 1e3),
    },
}
# A file may leave out the others, and then so does what is written.
ROPE_NEEDED = "factor", "low_freq_factor", "high_freq_factor"
# May stand beside them. Ministral 3 repeats max_position_embeddings, and the last two mean nothing for text,
# whose tokens have three equal positions.
ROPE_OTHERS = (
    "rope_type", "rope_theta", "partial_rotary_factor", "max_position_embeddings", "mrope_section",
    "mrope_interleaved",
)
ROPE_IGNORED = "attn_factor", "finetuned"  # in the first YaRN files: transformers does not read them either
ROPE_KEYS = "rope_scaling", "rope_parameters"  # as transformers 4 and 5 write
IMPLIED_THETAS = {"smollm3": 2e6, "cwm": 1e6}  # where transformers has a safe default


def rope_in_file(given, where="config.json"):
    """The values of RoPE in one dict, from `rope_theta`, `partial_rotary_factor` and `rope_scaling`, or
    transformers 5's `rope_parameters`. What is there twice must agree."""
    at_the_top = "rope_theta", "partial_rotary_factor"
    merged = {name: given[name] for name in at_the_top if given.get(name) is not None}
    for key in ROPE_KEYS:
        rope = given.get(key) or {}
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(f"{where}: {key} = {quoted(rope)}: expected one flat object; "
                             "rope parameters per layer type are not implemented")
        if rope:  # the type comes first: an error about it says more than one about its numbers
            rope_type = rope.get("rope_type") or rope.get("type") or "default"
            rope = {"rope_type": None} | rope | {"rope_type": rope_type, "type": None}
        for name, value in rope.items():
            if value is not None and merged.setdefault(name, value) != value:
                raise ValueError(f"{where}: {key}.{name} = {quoted(value)} differs from "
                                 f"{quoted(merged[name])}, which the file has, too: leave one of the two out")
    return {"rope_type": "default"} | merged


def parse_rope(given, model_type, values, where, error):
    """-> {field of Config: its value} for those about RoPE."""
    rope = rope_in_file(given, where)
    rope_type = rope["rope_type"]
    key = next((key for key in ROPE_KEYS if given.get(key)), "rope_scaling")
    if rope_type not in list(ROPE_NUMBERS):
        raise error(key, f"rope_type is not one of {', '.join(ROPE_NUMBERS)}")
    limits = ROPE_NUMBERS[rope_type]
    for name, value in rope.items():
        if name not in (*limits, *ROPE_OTHERS, *ROPE_IGNORED):
            raise error(key, f"{name} = {quoted(value)} is not implemented for rope_type {rope_type}")
    numbers = {name: read_field(rope, name, limits[name], f"{where}: {key}") for name in limits
               if name in ROPE_NEEDED or name in rope}
    # their difference is a divisor
    if rope_type == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise error(key, "low_freq_factor must be below high_freq_factor")
    if rope_type == "yarn" and numbers.get("beta_fast", BETA_FAST) < numbers.get("beta_slow", BETA_SLOW):
        raise error(key, "beta_fast must not be below beta_slow")
    if "llama_4_scaling_beta" in numbers and not FAMILIES[model_type].growing_q:
        raise error(key, f"llama_4_scaling_beta is not implemented for {model_type}")
    # old Llama-2 files leave out their 10000; elsewhere it would be wrong positions (vllm #42624)
    is_old_llama = not (model_type.startswith("qwen") or rope_type == "llama3"
                        or values["vocab_size"] >= 100_000)
    implied = IMPLIED_THETAS.get(model_type, 1e4 if is_old_llama else None)
    if "rope_theta" not in rope and implied is None:
        raise error("rope_theta", "missing, with no safe default: copy it from the model's page")
    theta = read_field(rope, "rope_theta", POSITIVE._replace(default=implied), where)
    if rope_type == "yarn" and theta <= 1:
        raise error("rope_theta", "YaRN needs one above 1")
    bounds = Bounds(float, 1, 1, 1)  # RoPE rotates the whole of a head
    if FAMILIES[model_type].part_rope:
        bounds = Bounds(float, 0, 1, 0.25)
    size = int(values["head_dim"] * read_field(rope, "partial_rotary_factor", bounds, where))
    if size == 0 or size % 2:  # elements are rotated in pairs
        raise error("head_dim", f"RoPE needs an even number, not {size}")
    return {"rope_theta": theta, "rope_scaling": {"rope_type": rope_type, **numbers}, "rope_size": size,
            "rope_ignored": tuple(name for name in ROPE_IGNORED if name in rope)}
