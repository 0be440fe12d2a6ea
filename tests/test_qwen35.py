"""Qwen3.5: the gated delta rule against its definition a token at a time in float64, and packed documents against
transformers, which computed each alone (make_goldens_qwen35.py)."""

import contextlib
import json
import shutil
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from conftest import HERE
from packed_goldens import (check_greedy_tokens, check_packed_documents, packed_logits, positions_of, read_golden,
                            relative_error)
from safetensors.torch import load_file, save_file
from test_model import build
from torch.autograd import grad

import data
import model as lm
import train

FOLDER = HERE / "goldens-qwen35"
EXPERTS = FOLDER / "experts"
TIED = FOLDER / "same-heads-tied"
TEXT = FOLDER / "thrice-text"
GOLDENS = pytest.mark.parametrize("folder", sorted(FOLDER.iterdir()), ids=lambda folder: folder.name)

G = 2  # heads of keys
H = 4  # heads of values
K = 16  # size of a key
P = 24  # size of a value. The rule alone does not need values as large as keys
MANY = [5, 1, 1, 30, 2, 64, 100, 3, 1, 1, 1, 47]  # several documents in a chunk, and several chunks in a document


# ---------------------------------------------------------------- the rule


class Inputs(NamedTuple):
    q: torch.Tensor  # [T, G, K], and so is k
    k: torch.Tensor
    v: torch.Tensor  # [T, H, P]
    g: torch.Tensor  # [T, H], and so is beta
    beta: torch.Tensor


def random_inputs(lengths, gates):
    """Inputs for documents of these lengths, with gates of some kind."""
    torch.manual_seed(0)
    T = sum(lengths)
    q = torch.randn(T, G, K)
    k = torch.randn(T, G, K) + 0.3  # of a mean, so that keys are far from orthogonal
    v = torch.randn(T, H, P)
    # as in trained models: a state fades by the factor exp(g), some heads fast and some slowly
    decay = torch.empty(H).uniform_(0.01, 16)
    beta = (2 * torch.randn(T, H)).sigmoid()
    g = -decay * F.softplus(torch.randn(T, H) - 4)
    if gates == "untrained":
        # as transformers begins: all is forgotten within a few tokens
        decay = torch.empty(H).uniform_(0.01, 16)
        g = -decay * F.softplus(torch.randn(T, H) + 1)
    elif gates == "strong":
        # exp(-200) is 0 in float32: quotients of such factors would be nan
        g = -200 * torch.rand(T, H)
    elif gates == "mixed":
        # one token in twenty forgets nearly all
        forgets = torch.rand(T, H) < 0.05
        g = torch.where(forgets, g - 20, -1e-2 * torch.rand(T, H))
    elif gates == "none":
        # nothing fades: the state adds up
        g = torch.zeros(T, H)
    elif gates == "same keys":
        # each token writes over what the one before it has written: ill-conditioned
        g = -1e-4 * torch.rand(T, H)
        beta = torch.full_like(beta, 0.9999)
        k = torch.randn(1, G, K) + 0.05 * k
    elif gates == "no writing":
        beta = 1e-6 * beta
    return Inputs(*(t.clone().requires_grad_() for t in (q, k, v, g, beta)))


def unit_length(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def rule_by_definition(inputs, lengths):
    """A token at a time, every document alone -> what is read [T, H, P], and the state that the last one leaves."""
    q_TGK = unit_length(inputs.q) * K**-0.5
    k_TGK = unit_length(inputs.k)
    # as in grouped attention, a head of keys serves several heads of values
    q_THK = q_TGK.repeat_interleave(H // G, 1)
    k_THK = k_TGK.repeat_interleave(H // G, 1)
    starts = {sum(lengths[:i]) for i in range(len(lengths))}
    out = []
    for t in range(sum(lengths)):
        if t in starts:
            S_HKP = inputs.v.new_zeros(H, K, P)
        k_HK = k_THK[t]
        # fade, then replace a part of what is stored under this key by the new value
        S_HKP = S_HKP * inputs.g[t].exp()[:, None, None]
        stored_HP = torch.einsum("hkp,hk->hp", S_HKP, k_HK)
        change_HP = inputs.beta[t][:, None] * (inputs.v[t] - stored_HP)
        S_HKP = S_HKP + k_HK[:, :, None] * change_HP[:, None]
        out.append(torch.einsum("hkp,hk->hp", S_HKP, q_THK[t]))
    return torch.stack(out), S_HKP


def rule_in_chunks(inputs, positions, chunk):
    """The same as GatedDeltaNet.mix() computes it, which has a convolution before it and a norm behind it."""
    T = len(positions)
    C = min(chunk, 1 << (T - 1).bit_length())
    # Added tokens fill the last chunk. With g and beta of 0 they change no state.
    n_more = -T % C
    padded = Inputs(*(torch.cat([t, t.new_zeros(n_more, *t.shape[1:])]) for t in inputs))
    added = positions[-1] + torch.arange(1, n_more + 1)
    positions_nC = torch.cat([positions, added]).view(-1, C)
    *system, queries, scores = lm.chunk_system(*padded, positions_nC)
    d_nHCP, S_nHKP, S_HKP = lm.Scan.apply(*system, torch.zeros(H, K, P))
    o_nHCP = queries @ S_nHKP + scores @ d_nHCP
    return o_nHCP.transpose(1, 2).flatten(0, 1)[:T], S_HKP


@pytest.mark.rounding
@pytest.mark.parametrize("lengths", [MANY, [300, 1, 211], [1]], ids=str)
@pytest.mark.parametrize("gates", ["trained", "untrained", "strong", "mixed", "none", "same keys", "no writing"])
def test_the_rule_in_chunks_equals_its_definition_alone(gates, lengths):
    inputs = random_inputs(lengths, gates)
    exact = Inputs(*(t.detach().double().requires_grad_() for t in inputs))  # the same numbers in float64
    expected, expected_last = rule_by_definition(exact, lengths)
    up = torch.randn_like(expected).float()
    expected_gradients = Inputs(*grad(expected, exact, up.double()))
    bound = 2e-5  # float32 rounding: 2e-6 seen
    for chunk in (32, 64, 128):  # 64 is a CPU's, and 128 a GPU's
        out, last = rule_in_chunks(inputs, positions_of(lengths), chunk)
        assert relative_error(out, expected) < bound
        assert relative_error(last, expected_last) < bound

        gradients = Inputs(*grad(out, inputs, up))
        for name in ("q", "k", "v", "beta"):
            assert relative_error(getattr(gradients, name), getattr(expected_gradients, name)) < bound, name
        # where all is forgotten the gradient of g is 0, to rounding of what cancels
        error = (gradients.g.double() - expected_gradients.g).norm()
        assert error < bound * max(expected_gradients.g.norm(), up.norm())


def test_the_gradient_of_the_scan_is_that_of_finite_differences():
    torch.manual_seed(0)
    n, C = 3, 4
    shapes = [(n, H, C, 3), (n, H, C, 2), (n, H, C, 3), (n, H, 1, 1), (H, 3, 2)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lm.Scan.apply, inputs)


# ---------------------------------------------------------------- transformers' numbers


@pytest.mark.rounding
@pytest.mark.parametrize("segment", [64, 2048])  # the 493 tokens in eight segments, and in one
@GOLDENS
def test_packed_documents_equal_transformers(folder, segment, monkeypatch):
    monkeypatch.setattr(lm, "SEGMENT", segment)
    check_packed_documents(folder)


@pytest.mark.rounding
@GOLDENS
def test_greedy_tokens_equal_transformers(folder):
    check_greedy_tokens(folder)


# Leaks between documents, to be seen by the comparison with transformers.


def leak_through_convolution(monkeypatch):
    """Positions that say that no token of a document is near its start."""
    forward = lm.ShortConv.forward
    monkeypatch.setattr(lm.ShortConv, "forward", lambda net, x, w, positions: forward(net, x, w, positions + 100))


def leak_through_state(monkeypatch):
    """Positions that say that every document began in an earlier chunk."""
    chunk_system = lm.chunk_system

    def leaking(q, k, v, g, beta, positions):
        return chunk_system(q, k, v, g, beta, positions + 64)

    monkeypatch.setattr(lm, "chunk_system", leaking)


def leak_through_attention(monkeypatch):
    """The whole row as one document."""
    attend_one_by_one = lm.attend_one_by_one

    def leaking(q, k, v, pairs, window):
        return attend_one_by_one(q, k, v, [(0, len(q))], window)

    monkeypatch.setattr(lm, "attend_one_by_one", leaking)


@pytest.mark.rounding
@pytest.mark.parametrize("leak", [leak_through_convolution, leak_through_state, leak_through_attention])
def test_a_leak_between_documents_would_be_seen(leak, monkeypatch):
    monkeypatch.setattr(lm, "SEGMENT", 2048)  # the row is one segment
    golden = read_golden(TIED)
    good = packed_logits(build(TIED), golden)
    leak(monkeypatch)
    leaking = packed_logits(build(TIED), golden)
    first = golden["lengths"][0]  # nothing can leak into the first document
    assert relative_error(leaking[first:], good[first:]) > 1e-2


@pytest.mark.rounding
@torch.no_grad()
def test_a_state_in_the_cache_equals_the_whole_row_and_does_not_grow():
    block = build(TIED).model.layers[0]  # one of Gated DeltaNet
    x_BTD = torch.randn(1, 150, 16, generator=torch.Generator().manual_seed(0))

    def run(x_BTD, start, cache):
        T = x_BTD.shape[1]
        spans = lm.Spans([(0, T)], positions_BT=torch.arange(start, start + T)[None])
        return block(x_BTD, None, spans, cache)

    cache = lm.Cache()
    out = []
    start = 0
    # prompts of more and of less than a chunk of 64, and single tokens
    for part in x_BTD.split([1, 70, 1, 61, 1, 16], 1):
        out.append(run(part, start, cache))
        start += part.shape[1]
    assert relative_error(torch.cat(out, 1), run(x_BTD, 0, None)) < 1e-6
    tail_X, S_HKP = cache.layers[block.linear_attn]
    assert tail_X.shape == (3, 48)  # the last three rows before the convolution of 48 channels
    assert S_HKP.shape == (2, 8, 8)


@torch.no_grad()
def test_a_mixer_in_bf16_rounds_what_it_is_given_and_what_it_gives_and_nothing_between():
    mixer = build(TIED).model.layers[0].linear_attn.bfloat16()
    mixer.decay.float()  # it stays float32 in a run, too
    T = 128
    spans = lm.Spans([(0, T)], positions_BT=torch.arange(T)[None])
    parts = mixer.qkv(torch.randn(1, T, 16).bfloat16(), None)
    out = mixer(*parts, spans, None, None)
    assert out.dtype is torch.bfloat16
    exact = mixer(*(part.float() for part in parts), spans, None, None)
    assert torch.equal(out, exact.bfloat16())


# ---------------------------------------------------------------- files


def write_in_float32(folder, out, change):
    """Writes a copy of a golden checkpoint whose tensors `change` has changed -> these tensors."""
    tensors = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
    change(tensors)
    out.mkdir()
    save_file(tensors, out / "model.safetensors")
    shutil.copyfile(folder / "config.json", out / "config.json")
    return tensors


def keep_stacks(tensors):
    """Experts as stacks, as they are in the golden files."""


def split_stacks(tensors):
    """Makes a matrix of every expert, gate_proj and up_proj apart, as older files have them."""
    stacks = [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]
    for name in stacks:
        stem, _, projection = name.rpartition(".")  # ...mlp.experts
        for i, expert in enumerate(tensors.pop(name)):
            if projection == "down_proj":
                tensors[f"{stem}.{i}.down_proj.weight"] = expert.contiguous()
                continue
            gate, up = expert.chunk(2)
            tensors[f"{stem}.{i}.gate_proj.weight"] = gate.contiguous()
            tensors[f"{stem}.{i}.up_proj.weight"] = up.contiguous()


class NoTokenizer:
    """For data.export() and data.merge(), which ask a tokenizer to save itself."""

    def save(self, out):
        pass


def check_result_is(tensors, folder, files, out, tokenizer=None):
    """A run that changes nothing writes the tensors of the folder that it has read, under the same names."""
    ranks = SimpleNamespace(rank=0, agree=lambda end_run: contextlib.nullcontext())
    source = data.WeightFiles(folder)
    data.export(SimpleNamespace(lora=False, data=[]), build(folder), source, files, tokenizer or NoTokenizer(), out,
                ranks)
    written = load_file(out / "final/model.safetensors")
    assert written.keys() == tensors.keys()
    for name, t in tensors.items():
        assert torch.equal(written[name], t), name


def model_files(folder):
    config = data.read_json(folder / "config.json")
    return data.ModelFiles(config, folder, folder, "base")


FORMS = pytest.mark.parametrize("change", [keep_stacks, split_stacks])


@pytest.mark.unperturbed
@FORMS
def test_a_whole_result_has_the_names_forms_and_other_parts_of_the_files(change, tmp_path):
    tensors = write_in_float32(EXPERTS, tmp_path / "base", change)
    # what the model does not compute: a head for the token after the next, and the tower of images
    parts = {".".join(name.split(".")[:2]) for name in tensors}
    assert parts >= {"model.visual", "model.language_model"}
    assert any(part.startswith("mtp.") for part in parts)

    check_result_is(tensors, tmp_path / "base", model_files(EXPERTS), tmp_path)
    assert data.read_json(tmp_path / "final/config.json") == data.read_json(EXPERTS / "config.json")


@pytest.mark.unperturbed
@pytest.mark.parametrize("code", [None, "modeling.py"])
def test_a_whole_result_has_all_that_describes_the_model(code, tmp_path):
    base = tmp_path / "base"
    tensors = write_in_float32(EXPERTS, base, keep_stacks)
    # without the first of them vLLM and transformers do not start the tower that the result has
    described = {"preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"}
    of_others = {"model.safetensors.index.json", "adapter_config.json", "chat_template.json"}
    for name in described | of_others:
        places = dict.fromkeys(tensors, "model.safetensors")
        (base / name).write_text(json.dumps({"chat_template": "a", "weight_map": places}))
    if code:
        (base / code).write_text("raise SystemExit('nobody runs this')")
    config = data.read_json(base / "config.json")
    auto_map = {"auto_map": {"AutoModel": "modeling.Other"}}
    (base / "config.json").write_text(json.dumps(config | auto_map))
    (base / "tokenizer.json").symlink_to(data.TINY / "tokenizer.json")
    files = model_files(base)

    check_result_is(tensors, base, files, tmp_path, data.Tokenizer(base))
    expected = described | {"config.json", "generation_config.json", "model.safetensors", "README.md", "tokenizer.json",
                            "chat_template.jinja"}
    expected |= {code} if code else set()
    assert {path.name for path in (tmp_path / "final").iterdir()} == expected
    # it names no code that the result does not have
    assert data.read_json(tmp_path / "final/config.json") == config | (auto_map if code else {})

    args = SimpleNamespace(lora_rank=1, lora_alpha=1, rslora=False)
    empty = SimpleNamespace(tensors={})  # an adapter of nothing
    data.merge(args, data.WeightFiles(base), empty, files, data.Tokenizer(base), tmp_path)
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert names >= described
    assert not names & of_others
    assert ("auto_map" in data.read_json(tmp_path / "merged/config.json")) == (code in names)


@pytest.mark.rounding
@torch.no_grad()
@FORMS
def test_merged_experts_compute_what_base_and_adapter_do(change, tmp_path):
    write_in_float32(EXPERTS, tmp_path / "base", change)
    model = build(tmp_path / "base")
    source = data.WeightFiles(tmp_path / "base")
    rank = 8  # the products of experts need a multiple of 8
    alpha = 16
    # PEFT's all-linear, which has in_proj_a and in_proj_b, too
    lm.add_lora_(model, rank, alpha / rank, 0.0, lm.LORA_TARGETS)
    for name, p in model.named_parameters():
        if ".lora_" in name:  # B begins as zeros, which would hide a wrong merge
            p.normal_(0, 0.2)
    tokens = torch.arange(40)[None]
    expected = model(tokens)

    adapter = dict(data.full_tensors(model, True))
    for layer in ("in_proj_qkv", "in_proj_a", "in_proj_b"):
        assert f"model.language_model.layers.0.linear_attn.{layer}.lora_A.weight" in adapter
    assert "model.language_model.layers.0.mlp.experts.7.up_proj.lora_B.weight" in adapter
    data.save_adapter(adapter, tmp_path, "base", rank, alpha, 0.0, lm.LORA_TARGETS)
    saved = data.WeightFiles(tmp_path, data.ADAPTER_WEIGHTS)
    args = SimpleNamespace(lora_rank=rank, lora_alpha=alpha, rslora=False)
    data.merge(args, source, saved, model_files(EXPERTS), NoTokenizer(), tmp_path)
    assert data.WeightFiles(tmp_path / "merged").tensors.keys() == source.tensors.keys()
    assert relative_error(build(tmp_path / "merged")(tokens), expected) < 1e-5  # float32 rounding
    assert relative_error(build(tmp_path / "base")(tokens), expected) > 0.1  # the adapter counts


def completed(*flags, **of_adapter):
    """The flags of a run on TEXT, with their final values."""
    args = train.parse_args([*flags, "--model", str(TEXT)])
    config = lm.parse_config(data.read_json(TEXT / "config.json"))
    train.resolve_for_model(args, config, of_adapter, torch.device("cpu"))
    return args


def test_adapters_on_in_proj_a_and_b_are_taken_and_are_no_default(tmp_path):
    config = lm.parse_config(data.read_json(TEXT / "config.json"))
    gates = ["in_proj_a", "in_proj_b"]
    assert completed("--lora").lora_targets == lm.targets_in(config)
    assert not {*gates} & {*lm.targets_in(config)}
    args = completed("--lora", "--lora_targets", "all-linear,in_proj_a")
    assert args.lora_targets == [*lm.targets_in(config), "in_proj_a"]

    tensors = {}
    for layer in [f"model.layers.{block}.linear_attn.{gate}" for block in (0, 1) for gate in gates]:
        tensors[f"{layer}.lora_A.weight"] = torch.ones(2, config.hidden_size)
        tensors[f"{layer}.lora_B.weight"] = torch.ones(config.linear_num_value_heads, 2)
    data.save_adapter(tensors, tmp_path, str(TEXT), 2, 4, 0.0, gates)
    weights, of_adapter = data.open_adapter(tmp_path)
    args = completed("--lora", "--adapter", str(tmp_path), **of_adapter)
    assert args.lora_targets == gates
    data.check_weights(lm.on_meta(config, args), weights, tmp_path)


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize("key, value, words", [
    ("layer_types", ["linear_attention"], "for each of 3 blocks"),
    ("layer_types", ["sliding_attention"] * 3, "full_attention or linear_attention"),
    ("attn_output_gate", False, "only true works"),
    ("output_gate_type", "sigmoid", "swish"),
    ("linear_value_head_dim", 16, "linear_key_head_dim"),
    ("linear_num_key_heads", 4, "linear_num_value_heads"),
    ("partial_rotary_factor", 0.25, "0.5 differs from 0.25, which the file has, too"),
    ("mamba_ssm_dtype", "bfloat16", "float32"),
    ("num_experts", 4, "absent for others"),
])
def test_what_the_model_does_not_compute_is_refused_by_name(key, value, words):
    raw = data.read_json(TEXT / "config.json") | {key: value}  # a file without a tower, where keys stand on top
    with pytest.raises(ValueError, match=f"{key} = .*{words}"):
        lm.parse_config(raw)


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_decide_whether_the_head_is_tied_where_a_config_says_both(tmp_path, is_tied):
    # transformers 5 writes such files of each untied Mistral 3, and reads them so
    shutil.copytree(TIED, tmp_path / "model")
    tensors = load_file(TIED / "model.safetensors")
    embedding = tensors["model.language_model.embed_tokens.weight"]
    if not is_tied:
        tensors["lm_head.weight"] = embedding.flip(0)
    save_file(tensors, tmp_path / "model/model.safetensors", {"format": "pt"})
    raw = data.read_json(TIED / "config.json")
    assert lm.parse_config(raw).tie_word_embeddings
    for top, text in ((True, False), (False, True)):
        changed = raw | {"tie_word_embeddings": top, "text_config": raw["text_config"] | {"tie_word_embeddings": text}}
        (tmp_path / "model/config.json").write_text(json.dumps(changed))
        found = data.find_model(str(tmp_path / "model"), random_init=False).config
        # what a result's config.json says to readers of either place
        assert found["tie_word_embeddings"] == found["text_config"]["tie_word_embeddings"] == is_tied
        # a plan has no weights
        planned = data.find_model(str(tmp_path / "model"), random_init=True).config
        assert lm.parse_config(planned).tie_word_embeddings == text


def test_a_config_without_layer_types_has_attention_in_every_fourth_block():
    raw = data.read_json(TIED / "config.json")
    del raw["text_config"]["layer_types"]
    assert lm.parse_config(raw).layer_types == ["linear_attention"] * 3 + ["full_attention"]
