"""Sliding windows, layers without RoPE, and what else Muse Glimmer has: against plain definitions, and families with
one trait or another against transformers (make_goldens_windows.py), whose documents are longer than the window."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import HERE, MUSE, build, ranks_that_print
from packed_goldens import check_greedy_tokens, check_packed_documents, pairs_of, relative_error
from safetensors.torch import load_file
from test_model import CPU
from test_model import build as build_folder
from test_qwen35 import NoTokenizer, check_result_is, model_files
from torch.utils._python_dispatch import TorchDispatchMode

import data
import model as lm
import train

FOLDER = HERE / "goldens-windows"
GOLDENS = pytest.mark.parametrize("folder", sorted(FOLDER.iterdir()), ids=lambda folder: folder.name)
MUSE_FILES = FOLDER / "muse-glimmer"
MUSE_PRESET = data.PRESETS["muse-glimmer-30b"]


# ---------------------------------------------------------------- transformers' numbers


@pytest.mark.rounding
@GOLDENS
def test_packed_documents_equal_transformers(folder):
    check_packed_documents(folder)


@pytest.mark.rounding
@GOLDENS
def test_greedy_tokens_equal_transformers(folder):
    check_greedy_tokens(folder)


# ---------------------------------------------------------------- attention in a window


def attention_by_definition(q_THK, k_TGK, v_TGK, pairs, window):
    """Attention as a table of all scores -> [T, H, K]."""
    T, H, K = q_THK.shape
    n_shared = H // k_TGK.shape[1]  # query heads of a key head
    k_THK = k_TGK.repeat_interleave(n_shared, 1)
    v_THK = v_TGK.repeat_interleave(n_shared, 1)
    document = torch.full((T,), -1)
    for number, (start, stop) in enumerate(pairs):
        document[start:stop] = number
    in_another = document[:, None] != document
    place = torch.arange(T)
    distance = place[:, None] - place
    is_hidden = in_another | (distance < 0) | (distance >= window)  # the window counts the token itself
    scores_HTT = torch.einsum("thk,shk->hts", q_THK, k_THK) / K**0.5
    scores_HTT = scores_HTT.masked_fill(is_hidden, -torch.inf)
    probs_HTT = scores_HTT.softmax(-1)
    return torch.einsum("hts,shk->thk", probs_HTT, v_THK)


def random_qkv(T, H, G, K, dtype=torch.float32):
    """q, k and v of one row."""
    shapes = (T, H, K), (T, G, K), (T, G, K)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def attend(qkv, spans, window):
    """lm.attend() of one row -> [T, H*K]."""
    batch = [t[None] for t in qkv]
    return lm.attend(*batch, spans, window)[0]


LENGTHS = [
    [5, 32, 33, 1, 7, 128],  # multiples of the 32 that a CPU works with, one token more, and a single token
    [103, 103],  # documents of one length, one by one,
    [64, 64, 64],  # and as rows of a batch
]


@pytest.mark.rounding
@pytest.mark.parametrize("window", [2, 7, 32, 64, 500])  # the last one is longer than any document
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_token_sees_the_window_inside_its_document(lengths, window):
    torch.manual_seed(0)
    T = sum(lengths)
    pairs = pairs_of(lengths)
    qkv = random_qkv(T, 4, 2, 8, torch.float64)
    out = attend(qkv, data.pack_spans(pairs, T), window)
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
    T = 4096
    H = 2
    K = 8
    qkv = random_qkv(T, H, 1, K)
    one_document = lm.Spans([(0, T)])
    with Largest() as largest:
        attend(qkv, one_document, window=128).sum().backward()
    assert largest.numel == T * H * K  # q; the scores of a block are 128 * 256 numbers, of the row 16 million


def test_the_cache_keeps_what_the_next_token_sees():
    model, _ = build(**MUSE)
    cache = lm.Cache()
    question = list(range(40))
    for tokens in (question, [7], [8]):
        lm.next_logits(model, tokens, CPU, cache)
    n_kept = []
    for block in model.model.layers:
        k_BTGK, _ = cache.layers[block.self_attn]
        n_kept.append(k_BTGK.shape[1])
    assert n_kept == [23, 23, 42]  # the window is 24 tokens, the new one among them; the last block sees all


# ---------------------------------------------------------------- Muse Glimmer's head and its two gates


@pytest.mark.rounding
@pytest.mark.parametrize("chunk", [7, 1024])  # several chunks and one
def test_capped_logits_have_the_gradient_of_autograd(chunk):
    torch.manual_seed(0)
    config = lm.parse_config(data.read_json(MUSE_FILES / "config.json"))
    head = lm.LMHead(config)
    torch.nn.init.normal_(head.weight)
    x = torch.randn(1, 20, config.hidden_size, requires_grad=True)
    logits = F.linear(x * head.factor, head.weight)
    capped = head.cap * (logits / head.cap).tanh()
    assert capped.abs().max() > 0.9 * head.cap  # else the cap would not show
    assert torch.equal(head(x), capped)

    def loss_and_gradients(chunk):
        head.chunk = chunk
        targets_BT = torch.arange(20)[None]
        supervised_S = torch.arange(20)
        loss = head(x, targets_BT, supervised_S)
        return loss, *torch.autograd.grad(loss, [x, head.weight])

    got = loss_and_gradients(chunk)
    expected = loss_and_gradients(0)  # all at once: F.cross_entropy and autograd
    for one, expected_one in zip(got, expected, strict=True):
        assert relative_error(one, expected_one) < 1e-6  # float32 sums in another order


EVERY_LINEAR = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.gate_proj",
                "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}


@pytest.mark.parametrize("targets, modules", [
    (["all-linear"], EVERY_LINEAR),
    (["gate_proj"], {"mlp.gate_proj"}),
    (["self_attn.gate_proj"], {"self_attn.gate_proj"}),
    (["gate_proj", "--train_embeddings"], {"mlp.gate_proj"}),  # embedding and head get no adapter
])
def test_a_path_decides_between_the_gates_of_attention_and_mlp(tmp_path, targets, modules):
    args = train.parse_args(["--model", str(MUSE_FILES), "--lora", "--lora_targets", *targets, "--precision", "fp32"])
    config = train.open_config(args, 1, device=None, random_init=False).config
    model = lm.on_meta(config, args).to_empty(device="cpu")
    tensors = dict(data.full_tensors(model, True))
    adapted = set()
    for name in tensors:  # model.language_model.layers.0.mlp.gate_proj.lora_A.weight -> mlp.gate_proj
        if ".lora_" in name:
            in_block = name.split(".", 4)[-1]
            adapted.add(in_block.split(".lora_")[0])
    assert adapted == modules

    found = data.modules_in(tensors, config, args.lora_targets)
    data.save_adapter(tensors, tmp_path, "base", 4, 8, 0.0, found)
    config_of_adapter = data.read_json(tmp_path / "adapter_config.json")
    assert set(config_of_adapter["target_modules"]) == modules
    _, flags = data.open_adapter(tmp_path)
    assert flags["lora_targets"] == args.lora_targets


# ---------------------------------------------------------------- names in files

WITH_A_TOWER = pytest.mark.parametrize("name", ["mistral3", "qwen3-vl", "muse-glimmer"])


@pytest.mark.unperturbed
@WITH_A_TOWER
def test_a_whole_result_has_the_names_and_the_tower_of_the_files(name, tmp_path):
    folder = FOLDER / name
    check_result_is(load_file(folder / "model.safetensors"), folder, model_files(folder), tmp_path)
    raw = data.read_json(folder / "config.json")
    exported = data.read_json(tmp_path / "final/config.json")
    assert exported["vision_config"] == raw["vision_config"]
    rope = exported["text_config"]["rope_parameters"]
    for key, value in raw["text_config"]["rope_parameters"].items():
        if key != "type":  # an older name of rope_type
            assert rope[key] == value
    assert lm.parse_config(exported) == lm.parse_config(raw)


@pytest.mark.rounding
@torch.no_grad()
@WITH_A_TOWER
def test_an_adapter_has_the_names_of_modules_and_merges_into_those_of_the_files(name, tmp_path):
    folder = FOLDER / name
    model = build_folder(folder)
    source = data.WeightFiles(folder)
    targets = lm.targets_in(model.config)
    lm.add_lora_(model, 4, 2.0, 0.0, targets)
    for key, p in model.named_parameters():
        if ".lora_" in key:  # B begins as zeros, which would hide a wrong merge
            p.normal_(0, 0.2)
    tokens = torch.arange(40)[None]
    expected = model(tokens)
    adapter = dict(data.full_tensors(model, True))
    # PEFT's names are those of the modules, also where files have older ones
    assert "model.language_model.layers.0.self_attn.q_proj.lora_A.weight" in adapter
    # the ends by which PEFT finds the layers: those of a tower, attention.q_proj, must not be among them
    modules = data.modules_in(adapter, model.config, targets)
    assert {"self_attn.q_proj", "mlp.down_proj"} <= set(modules)
    assert not set(modules) & set(targets) - {lm.GATE_TARGET}

    data.save_adapter(adapter, tmp_path, "base", 4, 8, 0.0, modules)
    saved = data.WeightFiles(tmp_path, data.ADAPTER_WEIGHTS)
    args = SimpleNamespace(lora_rank=4, lora_alpha=8, rslora=False)
    data.merge(args, source, saved, model_files(folder), NoTokenizer(), tmp_path)
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert merged.keys() == load_file(folder / "model.safetensors").keys()
    # the merged weights are rounded to bf16, 2**-9 of each
    assert relative_error(build_folder(tmp_path / "merged")(tokens), expected) < 0.02
    assert relative_error(build_folder(folder)(tokens), expected) > 0.1  # the adapter counts


def test_an_index_with_old_names_is_that_of_its_files(tmp_path):
    """Large models have their tensors in several files, and an index with the names that are in them."""
    tensors = load_file(FOLDER / "mistral3/model.safetensors")
    shutil.copyfile(FOLDER / "mistral3/model.safetensors", tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}))
    assert data.WeightFiles(tmp_path).tensors.keys() == data.WeightFiles(FOLDER / "mistral3").tensors.keys()


# ---------------------------------------------------------------- config.json of each family


@pytest.mark.parametrize("folder, architecture", [
    ("internlm3", "InternLM3ForCausalLM"),  # of the Hub, where transformers 5 writes LlamaForCausalLM
    ("iquestcoder", "IQuestCoderForCausalLM"),
])
def test_a_family_that_is_computed_as_llama_has_two_names(folder, architecture):
    raw = data.read_json(FOLDER / folder / "config.json")
    assert raw["architectures"] == ["LlamaForCausalLM"]
    assert lm.parse_config(raw | {"architectures": [architecture]}) == lm.parse_config(raw)
    with pytest.raises(ValueError, match=r"architectures = .*Qwen2ForCausalLM"):
        lm.parse_config(raw | {"architectures": ["Qwen2ForCausalLM"]})


FULL = "full_attention"
SLIDING = "sliding_attention"


@pytest.mark.parametrize("folder, expected", [
    ("cwm", [FULL, SLIDING, SLIDING, SLIDING, FULL]),  # counted from the first
    ("ministral", [SLIDING] * 5),
    ("mistral", [SLIDING] * 5),
    ("muse-glimmer", [FULL, SLIDING, SLIDING, SLIDING, FULL]),  # counted from the last
])
def test_layer_types_that_a_file_leaves_out_are_those_of_its_family(folder, expected):
    raw = data.read_json(FOLDER / folder / "config.json")
    of_text = raw.get("text_config") or raw
    of_text["num_hidden_layers"] = 5
    for key in ("layer_types", "layer_rope_theta"):
        of_text.pop(key, None)
    assert lm.parse_config(raw).layer_types == expected


def test_a_mistral_with_layer_types_is_computed_as_ministral():
    """As files of Ministral 8B have it: the older name, and a list."""
    raw = data.read_json(FOLDER / "ministral/config.json")
    older = lm.parse_config(raw | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]})
    assert older.layer_types == lm.parse_config(raw).layer_types == [FULL, SLIDING]


def test_queries_of_ministral3_grow_with_the_lengths_of_pretraining_before_them():
    config = lm.parse_config(data.read_json(FOLDER / "ministral3/config.json"))
    positions = [0, 15, 16, 47, 160]  # the length of pretraining is 16
    q_cos, q_sin, k_cos, k_sin = lm.rope_table(torch.tensor([positions]), config)
    growth = q_cos.hypot(q_sin) / k_cos.hypot(k_sin)
    for got, position in zip(growth[0, :, 0, 0].tolist(), positions):
        assert got == pytest.approx(1 + 0.1 * math.log(1 + position // 16), rel=1e-6)  # float32


def test_rows_that_dynamic_rope_would_turn_otherwise_are_refused():
    args = train.parse_args(["--model", str(FOLDER / "internlm3"), "--seq_len", "1024", "--dry_run"])
    config = train.open_config(args, 1, device=None, random_init=False).config
    assert config.rope_scaling == {"rope_type": "dynamic", "factor": 6.0}
    args = train.parse_args(["--model", str(FOLDER / "internlm3"), "--seq_len", "1025", "--dry_run"])
    with pytest.raises(ValueError, match="--seq_len 1025: beyond 1024 tokens"):
        train.open_config(args, 1, device=None, random_init=False)


def test_dropouts_of_a_file_are_not_applied_and_the_start_says_so(capsys):
    args = train.parse_args(["--model", "tiny", "--lr", "1e-3"])
    ranks = ranks_that_print(device=CPU)
    for folder, said in [("seed-oss", ["attention_dropout 0.1, residual_dropout 0.1"]), ("granite", [])]:
        config = lm.parse_config(data.read_json(FOLDER / folder / "config.json"))
        args.lr = train.default_rate(config, args.lora, args.dpo)  # another one has a note of its own
        train.say_notes(args, config, 100, ranks)
        notes = capsys.readouterr().out.splitlines()
        assert [note.removeprefix("note: ").removesuffix(" in config.json is ignored") for note in notes] == said


# ---------------------------------------------------------------- files and sizes


@pytest.mark.parametrize("folder, key, value, words", [
    ("muse-glimmer", "layer_rope_theta", [0, 0, 0, 5e5], "rope_theta, for each of 4 blocks"),
    ("muse-glimmer", "layer_types", ["linear_attention"] * 4, "full_attention or sliding_attention"),
    ("muse-glimmer", "hidden_activation", "gelu", "silu"),
    ("mistral3", "model_type", "qwen3", "mistral or ministral3"),
    ("qwen3-vl", "model_type", "qwen3_vl_moe_text", "qwen3_vl_text"),
    ("seed-oss", "attention_out_bias", True, "false"),
    ("cwm", "layer_types", ["full_attention"] * 4, "for each of 5 blocks"),
    ("granite", "residual_multiplier", 0.0, "float from 1e-30"),
    ("mistral", "final_logit_softcapping", 30.0, "null"),
    ("mistral", "sliding_window", 0, "from 1"),
    ("smollm3", "no_rope_layers", [1, 0], "for each of 4 blocks"),
    ("smollm3", "use_sliding_window", True, "false"),
])
def test_what_the_model_does_not_compute_is_refused_by_name(folder, key, value, words):
    raw = data.read_json(FOLDER / folder / "config.json")
    of_text = raw.get("text_config") or raw  # Muse Glimmer's file has a vision tower beside it
    of_text[key] = value
    with pytest.raises(ValueError, match=f"{key}.*{words}"):
        lm.parse_config(raw)


def test_a_file_without_windows_gets_those_of_muse_glimmer():
    config = lm.parse_config(MUSE_PRESET)
    four_layers = ["sliding_attention"] * 3 + ["full_attention"]
    assert config.layer_types == four_layers * 13
    assert config.rope_layers == [True, True, True, False] * 13  # no RoPE where a token sees all
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
        counts = lm.Counts(targets=0, tokens=T, squares=T**2)
        flops = lm.step_flops(c, counts, is_frozen=True)
        weights_of_block = lm.mixer_weights(c, "full_attention") + 3 * c.hidden_size * c.intermediate_size
        flops_of_products = 4 * c.num_hidden_layers * weights_of_block * T  # frozen weights cost 4 a token,
        return (flops - flops_of_products) / (7 * c.q_size)  # and a pair 7 a channel: see step_flops()

    row = 2048  # as long as the window, which hides nothing
    assert pairs_counted(row) == pytest.approx(52 * row**2)
    row = 65536
    of_full_layers = 13 * row**2
    of_windows = 39 * 2 * 2048 * row
    assert pairs_counted(row) == pytest.approx(of_full_layers + of_windows)


@pytest.mark.parametrize("eos_token_id, ends", [
    (7, {7}),
    ([7, 9], {7, 9}),
    (None, set()),
], ids=str)
def test_a_model_that_names_its_end_of_a_turn_stops_there(tmp_path, tiny, eos_token_id, ends):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(HERE / "tiny" / file, tmp_path)
    generation_config = {"eos_token_id": eos_token_id}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert data.Tokenizer(tmp_path).stop_ids == tiny.stop_ids | ends
