"""Qwen3.5: the gated delta rule against its definition a token at a time in float64, and packed documents against
transformers, which computed each alone (tests/make_goldens_qwen35.py and make_goldens_windows.py)."""

import contextlib
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import HERE
from safetensors.torch import load_file, save_file
from test_model import build
from torch.autograd import grad

import data
import model as lm

GOLDENS = sorted((HERE / "goldens-qwen35").iterdir())
WINDOWS = sorted((HERE / "goldens-windows").iterdir())
EXPERTS, TIED, TEXT, _ = GOLDENS
G, H, K, P = 2, 4, 16, 24  # the rule alone does not need values as large as keys
MANY = [5, 1, 1, 30, 2, 64, 100, 3, 1, 1, 1, 47]
GATES = ["trained", "strong", "mixed", "none", "same keys", "no writing"]


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12)).item()


# ---------------------------------------------------------------- the rule


def rule_by_definition(q, k, v, g, beta, lengths):
    """All [T, heads, size] float64."""
    out = []
    q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    q, k = (t.repeat_interleave(v.shape[1] // k.shape[1], 1) for t in (q * q.shape[-1] ** -0.5, k))
    for document in zip(*(t.split(lengths) for t in (q, k, v, g, beta))):
        S = v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1])
        for q_, k_, v_, g_, beta_ in zip(*document):
            S = S * g_.exp()[:, None, None]
            S = S + k_[:, :, None] * (beta_[:, None] * (v_ - torch.einsum("hkv,hk->hv", S, k_)))[:, None]
            out.append(torch.einsum("hkv,hk->hv", S, q_))
    return torch.stack(out), S


def make(lengths, gates):
    torch.manual_seed(0)
    T = sum(lengths)
    q, k, v = torch.randn(T, G, K), torch.randn(T, G, K) + 0.3, torch.randn(T, H, P)
    A, beta = torch.empty(H).uniform_(0.01, 16), (2 * torch.randn(T, H)).sigmoid()
    g = -A * F.softplus(torch.randn(T, H) - 4)
    if gates == "strong":
        g = -200 * torch.rand(T, H)
    if gates == "mixed":
        g = torch.where(torch.rand(T, H) < 0.05, g - 20, -1e-2 * torch.rand(T, H))
    if gates == "none":
        g = torch.zeros(T, H)
    if gates == "same keys":
        g, beta, k = -1e-4 * torch.rand(T, H), torch.full_like(beta, 0.9999), torch.randn(1, G, K) + 0.05 * k
    if gates == "no writing":
        beta = 1e-6 * beta
    return [t.clone().requires_grad_() for t in (q, k, v, g, beta)], positions_of(lengths)


def positions_of(lengths):
    return torch.cat([torch.arange(n) for n in lengths])


def rule(q, k, v, g, beta, positions, S):
    T = len(g)
    C = min(lm.RULE_CHUNK, 1 << (T - 1).bit_length())
    more = -T % C
    q, k, v = (F.pad(t, (0, 0, 0, 0, 0, more)) for t in (q, k, v))
    positions = torch.cat([positions, positions[-1] + torch.arange(1, more + 1)]).view(-1, C)
    gates = (F.pad(t, (0, 0, 0, more)) for t in (g, beta))
    *system, queries, scores = lm.chunk_system(q, k, v, *gates, positions)
    d, S, last = lm.scan(*system, S)
    return (queries @ S + scores @ d).transpose(1, 2).flatten(0, 1)[:T], last


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("lengths", [MANY, [300, 1, 211], [1]], ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_the_rule_in_chunks_equals_its_definition_alone(gates, lengths, chunk, monkeypatch):
    monkeypatch.setattr(lm, "RULE_CHUNK", chunk)
    inputs, positions = make(lengths, gates)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    o, S = rule(*inputs, positions, torch.zeros(H, K, P))
    (expected, S_last), up = rule_by_definition(*exact, lengths), torch.randn_like(o)
    grads, exact_grads = grad(o, inputs, up), grad(expected, exact, up.double())
    bound = 4e-6  # float32 rounding: 2e-6 seen
    assert error(o, expected) < bound and error(S, S_last) < bound
    for i, (got, want) in enumerate(zip(grads, exact_grads)):
        if i == 3:  # where all is forgotten the gradient of g is 0, to rounding of what cancels
            assert (got.double() - want).norm() < 5e-6 * max(want.norm(), up.norm())
        else:
            assert error(got, want) < bound


# ---------------------------------------------------------------- transformers' numbers


def packed(folder, monkeypatch, segment=2048):
    """-> model, golden, logits and nll of the golden documents in one row."""
    monkeypatch.setattr(lm, "SEGMENT", segment)
    model, golden = build(folder), load_file(folder / "golden.safetensors")
    lengths, tokens = golden["lengths"].tolist(), golden["tokens"]
    ends = golden["lengths"].cumsum(0).tolist()
    spans = lm.Spans([(end - n, end) for n, end in zip(lengths, ends)], torch.tensor([0, *ends]))
    logits = model(tokens[None], positions_BT=positions_of(lengths)[None], spans=spans)[0]
    nll = [F.cross_entropy(part[:-1], rest[1:], reduction="none")
           for part, rest in zip(logits.split(lengths), tokens.split(lengths))]
    return model, golden, logits, torch.cat(nll)


@pytest.mark.parametrize("segment", [64, 2048])
@pytest.mark.parametrize("folder", [*GOLDENS, *WINDOWS], ids=lambda f: f.name)
def test_packed_documents_equal_transformers(folder, segment, monkeypatch):
    model, golden, logits, nll = packed(folder, monkeypatch, segment)
    assert error(logits[golden["rows"]], golden["logits"]) < 1e-5  # float32 rounding: 5e-7 seen
    assert error(nll, golden["nll"]) < 1e-5
    nll.sum().backward()
    for p in model.parameters():
        p.data = p.grad  # full_tensors() gives gradients the names and forms of the file
    grads = dict(data.full_tensors(model, False, data.Checkpoint(folder).tensors))
    expected = {name.removeprefix("grad."): t for name, t in golden.items() if name.startswith("grad.")}
    assert grads.keys() == expected.keys()
    for name, got in grads.items():
        assert got.shape == expected[name].shape and error(got, expected[name]) < 1e-5, name  # 5e-6 seen


@pytest.mark.parametrize("folder", [*GOLDENS, *WINDOWS], ids=lambda f: f.name)
def test_greedy_tokens_equal_transformers(folder):
    model, golden = build(folder).eval(), load_file(folder / "golden.safetensors")
    prompt = golden["tokens"][-int(golden["lengths"][-1]) :][:40].tolist()
    expected = golden["generated"].tolist()
    assert list(lm.generate(model, prompt, len(expected), {-1}, torch.device("cpu"))) == expected


@pytest.mark.parametrize("leak", ["convolution", "state", "attention"])
def test_a_leak_between_documents_would_be_seen(leak, monkeypatch):
    *_, golden, good, _ = packed(TIED, monkeypatch)
    conv, system = lm.ShortConv.forward, lm.chunk_system
    if leak == "convolution":
        monkeypatch.setattr(lm.ShortConv, "forward", lambda net, x, p: conv(net, x, p + 100))
    if leak == "state":
        monkeypatch.setattr(lm, "chunk_system", lambda *t: system(*t[:5], t[5] + 64))
    if leak == "attention":
        monkeypatch.setattr(lm, "attend_one_by_one", lambda q, k, v, _, window: lm.attend_alone(q, k, v, window=window))
    *_, leaking, _ = packed(TIED, monkeypatch)
    n = golden["lengths"][0]
    assert error(leaking[n:], good[n:]) > 1e-2


@torch.no_grad()
def test_a_state_in_the_cache_equals_the_whole_row_and_does_not_grow():
    net = build(TIED).model.layers[0]
    c = torch.randn(1, 150, 16, generator=torch.Generator().manual_seed(0))

    def run(x, start, cache):
        spans = lm.Spans([(0, x.shape[1])])
        spans.positions_BT = torch.arange(start, start + x.shape[1])[None]
        return net(x, None, spans, cache)

    cache, out, start = lm.Cache(), [], 0
    for part in c.split([1, 70, 1, 61, 1, 16], 1):
        out.append(run(part, start, cache))
        start += part.shape[1]
    assert error(torch.cat(out, 1), run(c, 0, None)) < 1e-6
    assert [t.shape for t in cache.layers[net.linear_attn]] == [(3, 48), (2, 8, 8)]


# ---------------------------------------------------------------- files


def in_float32(folder, out, change):
    """A copy of a golden checkpoint, changed -> its tensors."""
    tensors = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
    change(tensors)
    out.mkdir()
    save_file(tensors, out / "model.safetensors")
    shutil.copyfile(folder / "config.json", out / "config.json")
    return tensors


def split_stacks(tensors):
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        for i, expert in enumerate(tensors.pop(name)):
            stem = name.rpartition(".")[0]
            layers = {"down_proj": expert}
            if "gate_up" in name:
                layers = dict(zip(("gate_proj", "up_proj"), expert.chunk(2)))
            tensors |= {f"{stem}.{i}.{layer}.weight": t.contiguous() for layer, t in layers.items()}


def files_of(folder):
    """What data.export and data.merge need, without a tokenizer."""
    config = data.read_json(folder / "config.json")
    return data.ModelFiles(config, folder, folder, "base"), SimpleNamespace(save=lambda out: None)


FORMS = pytest.mark.parametrize("change", [dict, split_stacks], ids=["stacks of experts", "a matrix an expert"])


@FORMS
def test_a_whole_result_has_the_names_forms_and_other_parts_of_the_files(change, tmp_path):
    tensors = in_float32(EXPERTS, tmp_path / "base", change)
    assert {"mtp", "model"} <= {name.split(".")[0] for name in tensors}  # model.visual beside model.language_model
    model, source = build(tmp_path / "base"), data.Checkpoint(tmp_path / "base")
    ranks = SimpleNamespace(rank=0, agree=contextlib.nullcontext)
    data.export(SimpleNamespace(lora=False), model, source, *files_of(EXPERTS), tmp_path, ranks)
    written = load_file(tmp_path / "final/model.safetensors")
    assert written.keys() == tensors.keys() and all(torch.equal(written[name], t) for name, t in tensors.items())
    assert data.read_json(tmp_path / "final/config.json") == data.read_json(EXPERTS / "config.json")


@torch.no_grad()
@FORMS
def test_merged_experts_compute_what_base_and_adapter_do(change, tmp_path):
    in_float32(EXPERTS, tmp_path / "base", change)
    model, source = build(tmp_path / "base"), data.Checkpoint(tmp_path / "base")
    lm.add_lora_(model, 8, 16, 0.0, lm.targets_in(model.config))
    for name, p in model.named_parameters():
        if ".lora_" in name:
            p.normal_(0, 0.2)
    tokens = torch.arange(40)[None]
    expected = model(tokens)
    adapter = dict(data.full_tensors(model, True, source.tensors))
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv.lora_A.weight" in adapter
    assert "model.language_model.layers.0.mlp.experts.7.up_proj.lora_B.weight" in adapter
    data.merge(source, adapter, 2.0, *files_of(EXPERTS), tmp_path)
    assert source.tensors.keys() == data.Checkpoint(tmp_path / "merged").tensors.keys()
    assert error(build(tmp_path / "merged")(tokens), expected) < 1e-5  # float32 rounding
    assert error(build(tmp_path / "base")(tokens), expected) > 0.1


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize("key, value, words", [
    ("layer_types", ["linear_attention"], "for each of 3 blocks"),
    ("layer_types", ["sliding_attention"] * 3, "full_attention or linear_attention"),
    ("attn_output_gate", False, "only true works"),
    ("output_gate_type", "sigmoid", "swish"),
    ("linear_value_head_dim", 16, "linear_key_head_dim"),
    ("linear_num_key_heads", 4, "linear_num_value_heads"),
    ("partial_rotary_factor", 0.25, "rope_parameters.partial_rotary_factor = 0.5 differs"),
    ("mamba_ssm_dtype", "bfloat16", "float32"),
    ("num_experts", 4, "absent for others"),
])
def test_what_the_model_does_not_compute_is_refused_by_name(key, value, words):
    raw = data.read_json(TEXT / "config.json") | {key: value}
    with pytest.raises(ValueError, match=f"{key} = .*{words}"):
        lm.parse_config(raw)


def test_a_config_with_a_vision_tower_says_once_whether_the_head_is_tied():
    raw = data.read_json(TIED / "config.json")
    assert lm.parse_config(raw).tie_word_embeddings
    raw["tie_word_embeddings"] = False
    with pytest.raises(ValueError, match="tie_word_embeddings = false: differs from the one in text_config"):
        lm.parse_config(raw)
    del raw["text_config"]["layer_types"]
    raw["text_config"]["tie_word_embeddings"] = False
    assert lm.parse_config(raw).layer_types == ["linear_attention"] * 3 + ["full_attention"]
