"""Sliding windows, and what else Muse Glimmer has. Its numbers, Mistral's beyond its window and SmolLM3's are compared
with transformers' in test_qwen35.py (goldens-windows)."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import HERE, MUSE, build
from test_model import CPU
from test_qwen35 import error
from torch.utils._python_dispatch import TorchDispatchMode

import data
import model as lm
import train

MUSE_FILES = HERE / "goldens-windows/muse-glimmer"


def by_definition(q, k, v, pairs, window):
    """Attention as a table of all scores -> [T, H, K]."""
    T, H, K = q.shape
    document = torch.full((T,), -1)
    for number, (start, stop) in enumerate(pairs):
        document[start:stop] = number
    distance = torch.arange(T)[:, None] - torch.arange(T)
    hidden = (document[:, None] != document) | (distance < 0) | (distance >= window)
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("thk,shk->hts", q, k) / K**0.5
    return torch.einsum("hts,shk->thk", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [2, 7, 32, 64, 500])
@pytest.mark.parametrize("lengths", [[5, 32, 33, 1, 7, 128], [103, 103], [64, 64, 64]], ids=str)
def test_a_token_sees_the_window_inside_its_document(lengths, window):
    T = sum(lengths)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    pairs = [(end - n, end) for n, end in zip(lengths, ends)]
    torch.manual_seed(0)
    qkv = [torch.randn(T, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    out = lm.attend(*(t[None] for t in qkv), data.pack_spans(pairs, T), window)[0]
    expected = by_definition(*qkv, pairs, window).flatten(1)
    up = torch.randn_like(out)
    assert error(out, expected) < 1e-12  # float64
    for got, want in zip(torch.autograd.grad(out, qkv, up), torch.autograd.grad(expected, qkv, up)):
        assert error(got, want) < 1e-12


class Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else [result]
        self.numel = max([self.numel, *(t.numel() for t in tensors if isinstance(t, torch.Tensor))])
        return result


def test_no_tensor_of_a_windowed_row_grows_with_its_square():
    T, window = 4096, 128
    qkv = [torch.randn(1, T, heads, 8, requires_grad=True) for heads in (2, 1, 1)]
    with Largest() as largest:
        lm.attend(*qkv, lm.Spans([(0, T)]), window).sum().backward()
    assert largest.numel == T * 2 * 8  # q; the scores of a block are 128 * 256 numbers, of the row 16 million


def test_the_cache_keeps_what_the_next_token_sees():
    model, _ = build(**MUSE)
    cache = lm.Cache()
    for tokens in ([*range(40)], [7], [8]):
        lm.next_logits(model, tokens, CPU, cache)
    held = [cache.layers[block.self_attn][0].shape[1] for block in model.model.layers]
    assert held == [23, 23, 42]  # the window is 24 tokens, the new one among them; the last block sees all


@pytest.mark.parametrize("chunk", [7, 1024])
def test_capped_logits_have_the_gradient_of_autograd(chunk):
    torch.manual_seed(0)
    config = lm.parse_config(data.read_json(MUSE_FILES / "config.json"))
    head = lm.LMHead(config)
    torch.nn.init.normal_(head.weight)
    x = torch.randn(1, 20, config.hidden_size, requires_grad=True)
    targets, results = torch.arange(20)[None], []
    for head.chunk in (chunk, 0):
        loss = head(x, targets, torch.arange(20))
        results.append((loss, *torch.autograd.grad(loss, [x, head.weight])))
    bent = head.cap * (F.linear(x * head.factor, head.weight) / head.cap).tanh()
    assert (bent.abs() > 0.9 * head.cap).any() and torch.equal(head(x), bent)
    for got, expected in zip(*results):
        assert error(got, expected) < 1e-6  # float32 sums in another order


@pytest.mark.parametrize("targets, modules", [
    (["all-linear"], {"mlp.gate_proj", "self_attn.gate_proj", "self_attn.q_proj", "self_attn.o_proj"}),
    (["gate_proj"], {"mlp.gate_proj"}), (["self_attn.gate_proj"], {"self_attn.gate_proj"})])
def test_a_path_decides_between_the_gates_of_attention_and_mlp(tmp_path, targets, modules):
    args = train.parse_args(["--model", str(MUSE_FILES), "--lora", "--lora_targets", *targets, "--precision", "fp32"])
    _, config, _ = train.open_config(args, 1, False)
    model = lm.on_meta(config, args).to_empty(device="cpu")
    tensors = {name: t.contiguous() for name, t in data.full_tensors(model, True)}
    assert modules <= {name.split(".", 4)[-1].split(".lora_")[0] for name in tensors}
    data.save_adapter(tensors, tmp_path, "base", 4, 8, 0.0, data.modules_in(tensors, config, args.lora_targets))
    written = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert modules <= set(written) and (len(written) == 1) == (len(modules) == 1)
    assert data.open_adapter(tmp_path)[1]["lora_targets"] == args.lora_targets


@pytest.mark.parametrize("folder, key, value, words", [
    ("muse-glimmer", "layer_rope_theta", [0, 0, 0, 5e5], "rope_theta, for each of 4 blocks"),
    ("muse-glimmer", "layer_types", ["linear_attention"] * 4, "full_attention or sliding_attention"),
    ("muse-glimmer", "hidden_activation", "gelu", "silu"),
    ("mistral", "final_logit_softcapping", 30.0, "null"), ("mistral", "sliding_window", 0, "from 1"),
    ("smollm3", "no_rope_layers", [1, 0], "for each of 4 blocks"), ("smollm3", "use_sliding_window", True, "false")])
def test_what_the_model_does_not_compute_is_refused_by_name(folder, key, value, words):
    raw = data.read_json(HERE / "goldens-windows" / folder / "config.json")
    (raw.get("text_config") or raw)[key] = value
    with pytest.raises(ValueError, match=f"{key} = .*{words}"):
        lm.parse_config(raw)


def test_a_file_that_leaves_them_out_gets_the_windows_of_its_family():
    preset = lm.parse_config(data.PRESETS["muse-glimmer-30b"])
    assert preset.layer_types == [*["sliding_attention"] * 3, "full_attention"] * 13
    assert preset.rope_layers == [True, True, True, False] * 13
    assert (preset.sliding_window, preset.post_norm_eps, preset.final_logit_softcapping) == (2048, 1e-8, 20)
    raw = data.read_json(HERE / "goldens-windows/mistral/config.json")
    for value, expected in (None, lm.NO_WINDOW), (..., 4096):  # null, absent
        raw["sliding_window"] = value
        given = {key: value for key, value in raw.items() if value is not ...}
        assert lm.parse_config(given).sliding_window == expected


def test_flops_of_a_window_are_those_of_its_pairs():
    c = lm.parse_config(data.PRESETS["muse-glimmer-30b"])
    flops = [lm.step_flops(c, lm.Counts(0, T, T**2), True) for T in (2048, 65536)]
    products = 4 * c.num_hidden_layers * (lm.mixer_weights(c, "full_attention") + 3 * c.hidden_size * c.mlp_size)
    pairs = [(n - products * T) / (7 * c.q_size) for n, T in zip(flops, (2048, 65536))]
    assert pairs == pytest.approx([52 * 2048**2, 13 * 65536**2 + 39 * 2 * 2048 * 65536])


def test_a_model_that_names_its_end_of_a_turn_stops_there(tmp_path, tiny):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text((HERE / "tiny" / file).read_text())
    for ends in (7, [7, 9], None):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        assert data.Tokenizer(tmp_path).stop_ids == tiny.stop_ids | {*([ends] if ends == 7 else ends or [])}
