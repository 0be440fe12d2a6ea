"""Sliding windows, layers without RoPE, and what else Muse Glimmer has: against plain definitions, and Mistral, SmolLM3
and Muse Glimmer against transformers (make_goldens_windows.py), whose documents are longer than the window."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import HERE, MUSE, build
from packed_goldens import check_greedy_tokens, check_packed_documents, pairs_of, relative_error
from test_model import CPU
from torch.utils._python_dispatch import TorchDispatchMode

import data
import model as lm
import train

FOLDER = HERE / "goldens-windows"
GOLDENS = pytest.mark.parametrize("folder", sorted(FOLDER.iterdir()), ids=lambda folder: folder.name)
MUSE_FILES = FOLDER / "muse-glimmer"
MUSE_PRESET = data.PRESETS["muse-glimmer-30b"]


# ---------------------------------------------------------------- transformers' numbers


@GOLDENS
def test_packed_documents_equal_transformers(folder):
    check_packed_documents(folder)


@GOLDENS
def test_greedy_tokens_equal_transformers(folder):
    check_greedy_tokens(folder)


# ---------------------------------------------------------------- attention in a window


def attention_by_definition(q_THK, k_TGK, v_TGK, pairs, window):
    """Attention as a table of all scores -> [T, H, K]."""
    T, H, K = q_THK.shape
    document = torch.full((T,), -1)
    for number, (start, stop) in enumerate(pairs):
        document[start:stop] = number
    in_another = document[:, None] != document
    distance = torch.arange(T)[:, None] - torch.arange(T)
    is_hidden = in_another | (distance < 0) | (distance >= window)
    k_THK = k_TGK.repeat_interleave(H // k_TGK.shape[1], 1)
    v_THK = v_TGK.repeat_interleave(H // v_TGK.shape[1], 1)
    scores_HTT = torch.einsum("thk,shk->hts", q_THK, k_THK) / K**0.5
    odds_HTT = scores_HTT.masked_fill(is_hidden, -torch.inf).softmax(-1)
    return torch.einsum("hts,shk->thk", odds_HTT, v_THK)


@pytest.mark.parametrize("window", [2, 7, 32, 64, 500])
@pytest.mark.parametrize("lengths", [[5, 32, 33, 1, 7, 128], [103, 103], [64, 64, 64]], ids=str)
def test_a_token_sees_the_window_inside_its_document(lengths, window):
    torch.manual_seed(0)
    T = sum(lengths)
    pairs = pairs_of(lengths)
    qkv = [torch.randn(T, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    out = lm.attend(*(t[None] for t in qkv), data.pack_spans(pairs, T), window)[0]
    expected = attention_by_definition(*qkv, pairs, window).flatten(1)
    assert relative_error(out, expected) < 1e-12  # float64, and so are the gradients
    up = torch.randn_like(out)
    gradients = torch.autograd.grad(out, qkv, up)
    expected_gradients = torch.autograd.grad(expected, qkv, up)
    for got, want in zip(gradients, expected_gradients):
        assert relative_error(got, want) < 1e-12


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        for t in made:
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return result


def test_no_tensor_of_a_windowed_row_grows_with_its_square():
    T, H, G, K = 4096, 2, 1, 8
    window = 128
    qkv = [torch.randn(1, T, heads, K, requires_grad=True) for heads in (H, G, G)]
    with Largest() as largest:
        lm.attend(*qkv, lm.Spans([(0, T)]), window).sum().backward()
    assert largest.numel == T * H * K  # q; the scores of a block are 128 * 256 numbers, of the row 16 million


def test_the_cache_keeps_what_the_next_token_sees():
    model, _ = build(**MUSE)
    cache = lm.Cache()
    for tokens in (list(range(40)), [7], [8]):
        lm.next_logits(model, tokens, CPU, cache)
    n_kept = [cache.layers[block.self_attn][0].shape[1] for block in model.model.layers]
    assert n_kept == [23, 23, 42]  # the window is 24 tokens, the new one among them; the last block sees all


# ---------------------------------------------------------------- Muse Glimmer's head and its two gates


@pytest.mark.parametrize("chunk", [7, 1024])  # several chunks and one
def test_capped_logits_have_the_gradient_of_autograd(chunk):
    torch.manual_seed(0)
    config = lm.parse_config(data.read_json(MUSE_FILES / "config.json"))
    head = lm.LMHead(config)
    torch.nn.init.normal_(head.weight)
    x = torch.randn(1, 20, config.hidden_size, requires_grad=True)
    bent = head.cap * (F.linear(x * head.factor, head.weight) / head.cap).tanh()
    assert (bent.abs() > 0.9 * head.cap).any()  # else the cap would not show
    assert torch.equal(head(x), bent)

    def loss_and_gradients(chunk):
        head.chunk = chunk
        loss = head(x, torch.arange(20)[None], torch.arange(20))
        return loss, *torch.autograd.grad(loss, [x, head.weight])

    all_at_once = 0  # F.cross_entropy and autograd
    for got, expected in zip(loss_and_gradients(chunk), loss_and_gradients(all_at_once)):
        assert relative_error(got, expected) < 1e-6  # float32 sums in another order


EVERY_LINEAR = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.gate_proj",
                "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}


@pytest.mark.parametrize("targets, modules", [
    (["all-linear"], EVERY_LINEAR),
    (["gate_proj"], {"mlp.gate_proj"}),
    (["self_attn.gate_proj"], {"self_attn.gate_proj"}),
])
def test_a_path_decides_between_the_gates_of_attention_and_mlp(tmp_path, targets, modules):
    args = train.parse_args(["--model", str(MUSE_FILES), "--lora", "--lora_targets", *targets, "--precision", "fp32"])
    config = train.open_config(args, 1, device=None, random_init=False).config
    model = lm.on_meta(config, args).to_empty(device="cpu")
    tensors = {name: t.contiguous() for name, t in data.full_tensors(model, True)}
    # model.language_model.layers.0.mlp.gate_proj.lora_A.weight -> mlp.gate_proj
    adapted = {name.split(".", 4)[-1].split(".lora_")[0] for name in tensors}
    assert adapted == modules

    found = data.modules_in(tensors, config, args.lora_targets)
    data.save_adapter(tensors, tmp_path, "base", 4, 8, 0.0, found)
    config_of_adapter = data.read_json(tmp_path / "adapter_config.json")
    assert set(config_of_adapter["target_modules"]) == modules
    _, flags = data.open_adapter(tmp_path)
    assert flags["lora_targets"] == args.lora_targets


# ---------------------------------------------------------------- files and sizes


@pytest.mark.parametrize("folder, key, value, words", [
    ("muse-glimmer", "layer_rope_theta", [0, 0, 0, 5e5], "rope_theta, for each of 4 blocks"),
    ("muse-glimmer", "layer_types", ["linear_attention"] * 4, "full_attention or sliding_attention"),
    ("muse-glimmer", "hidden_activation", "gelu", "silu"),
    ("mistral", "final_logit_softcapping", 30.0, "null"),
    ("mistral", "sliding_window", 0, "from 1"),
    ("smollm3", "no_rope_layers", [1, 0], "for each of 4 blocks"),
    ("smollm3", "use_sliding_window", True, "false"),
])
def test_what_the_model_does_not_compute_is_refused_by_name(folder, key, value, words):
    raw = data.read_json(FOLDER / folder / "config.json")
    of_text = raw.get("text_config") or raw  # Muse Glimmer's file has a vision tower beside it
    of_text[key] = value
    with pytest.raises(ValueError, match=f"{key} = .*{words}"):
        lm.parse_config(raw)


def test_a_file_without_windows_gets_those_of_muse_glimmer():
    config = lm.parse_config(MUSE_PRESET)
    assert config.layer_types == [*["sliding_attention"] * 3, "full_attention"] * 13
    assert config.rope_layers == [True, True, True, False] * 13
    assert config.sliding_window == 2048
    assert config.post_norm_eps == 1e-8
    assert config.final_logit_softcapping == 20


def test_mistral_has_a_window_unless_its_file_says_null():
    raw = data.read_json(FOLDER / "mistral/config.json")
    raw["sliding_window"] = None
    assert lm.parse_config(raw).sliding_window == lm.NO_WINDOW
    del raw["sliding_window"]
    assert lm.parse_config(raw).sliding_window == 4096


def test_flops_of_a_window_are_those_of_its_pairs():
    c = lm.parse_config(MUSE_PRESET)

    def pairs_counted(T):
        """Pairs of tokens in all blocks, by the FLOP that a row of T tokens without targets costs beyond products."""
        flops = lm.step_flops(c, lm.Counts(0, T, T**2), True)
        weights = c.num_hidden_layers * (lm.mixer_weights(c, "full_attention") + 3 * c.hidden_size * c.mlp_size)
        return (flops - 4 * weights * T) / (7 * c.q_size)  # frozen weights cost 4 a token; see step_flops()

    assert pairs_counted(2048) == pytest.approx(52 * 2048**2)  # the row is as long as the window
    assert pairs_counted(65536) == pytest.approx(13 * 65536**2 + 39 * 2 * 2048 * 65536)


@pytest.mark.parametrize("eos_token_id, ends", [(7, {7}), ([7, 9], {7, 9}), (None, set())], ids=str)
def test_a_model_that_names_its_end_of_a_turn_stops_there(tmp_path, tiny, eos_token_id, ends):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text((HERE / "tiny" / file).read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))
    assert data.Tokenizer(tmp_path).stop_ids == tiny.stop_ids | ends
