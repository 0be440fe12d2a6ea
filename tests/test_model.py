"""The model against transformers' own logits and gradients (tests/make_goldens.py), its loss and attention against
plain ones, generation, and the files that it reads and writes."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
import torch
import torch.nn.functional as F
from conftest import HERE, MOE, MUSE, QWEN35
from safetensors.torch import load_file, save_file

import data
import model as lm
import nf4

CPU = torch.device("cpu")
GOLDENS = sorted((HERE / "goldens").iterdir())
TOKENS = torch.arange(96).view(2, 48)


def build(folder, config="config.json"):
    with torch.device("meta"):
        model = lm.Transformer(lm.parse_config(data.read_json(folder / config)))
    source = data.Checkpoint(folder)
    data.check_weights(model, source, folder)
    model.to_empty(device="cpu").tie_()
    data.load_weights_(model, source, None, 0, CPU)
    return model


def build_random(method="full", tile=0, checkpointing=False, dropout=0.0, **shape):
    flags = [] if method == "full" else [f"--{method}", "--lora_rank", 8, "--lora_dropout", dropout]
    model, _ = conftest.build(*flags, **shape)
    generator = torch.Generator().manual_seed(0)
    for name, param in model.named_parameters():
        if "lora_B" in name:  # zeros would hide a wrong adapter
            param.data.normal_(std=0.1, generator=generator)
    if tile:
        lm.tile_mlp_(model, tile)
    if checkpointing:
        lm.checkpoint_activations_(model)
    return model


def gradients(model, tokens=TOKENS):
    if model.dropout:
        lm.set_dropout_bits_(model, nf4.token_bits(0, 0, 0, *tokens.shape))
    loss = model(tokens, tokens.roll(-1, 1))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------- transformers' numbers


@pytest.mark.parametrize("config", ["config.json", "config-v4.json"])
@pytest.mark.parametrize("folder", GOLDENS, ids=lambda f: f.name)
def test_logits_equal_transformers(folder, config):
    golden = load_file(folder / "golden.safetensors")
    logits = build(folder, config)(golden["tokens"])
    torch.testing.assert_close(logits, golden["logits"], atol=1e-5, rtol=0)  # float32 rounding: 1e-6 seen


@pytest.mark.parametrize("chunk", [0, 7, 1024])
@pytest.mark.parametrize("folder", GOLDENS, ids=lambda f: f.name)
def test_loss_and_gradients_equal_transformers(folder, chunk):
    golden = load_file(folder / "golden.safetensors")
    model, tokens = build(folder), golden["tokens"]
    model.lm_head.chunk = chunk
    targets = F.pad(tokens[:, 1:], (0, 1), value=lm.IGNORE)
    loss = model(tokens, targets)
    assert loss.item() == pytest.approx(golden["loss"].item(), rel=1e-6)  # float32 sums in another order
    loss.backward()
    for name, p in model.named_parameters():
        expected = golden[f"grad.{name}"]
        assert (p.grad - expected).norm() <= 1e-5 * expected.norm(), name  # float32 rounding: 3e-6 seen


def test_long_positions_keep_float32_angles_in_bf16():
    c = lm.parse_config(data.read_json(GOLDENS[0] / "config.json"))
    cos, _ = lm.rope_table(torch.tensor([[100_001]]), c)
    expected = torch.cos(torch.tensor(100_001, dtype=torch.float64) / c.rope_scaling.get("factor", 1.0))
    assert cos.dtype == torch.float32
    assert cos.flatten()[0].item() == pytest.approx(expected.item(), abs=5e-3)  # an ulp of the angle 5e4 is 4e-3


@pytest.mark.parametrize("changes", [{}, QWEN35, MUSE], ids=["qwen3", "qwen3.5", "muse"])
def test_attention_that_a_checkpointed_block_keeps_runs_once_and_changes_no_bit(changes, monkeypatch):
    calls, n_calls, results, plain = [], [], [], lm.sdpa
    monkeypatch.setattr(lm, "sdpa", lambda *args, **options: calls.append(1) or plain(*args, **options))
    for n_kept in (0, 9):
        calls.clear()
        model = build_random("lora", **changes)
        lm.checkpoint_activations_(model, None, n_kept)
        results.append(gradients(model))
        n_calls.append(len(calls))
    kept = [block.mixer.kept for block in model.model.layers]
    assert all(not one.inputs and one.out is None for one in kept)  # or q, k and v would stay in memory
    assert n_calls[0] == 2 * n_calls[1] > 0
    (loss, grads), (kept_loss, kept_grads) = results
    assert loss == kept_loss and all(torch.equal(grads[name], kept_grads[name]) for name in grads)


# ---------------------------------------------------------------- generation


def continuation(model, n, **options):
    return list(lm.generate(model.eval(), list(range(20, 60)), n, {1}, CPU, **options))


@pytest.mark.parametrize("method", ["tiny", "qlora"])
def test_the_cache_changes_no_token_and_holds_keys_and_values_only(method):
    model = build(data.TINY) if method == "tiny" else build_random("qlora", tile=32, checkpointing=True)
    got, tokens, cache, c = continuation(model, 24), list(range(20, 60)), lm.Cache(), model.config
    while len(tokens) < 40 + 24 and (token := int(model(torch.tensor([tokens]))[0, -1].argmax())) != 1:
        tokens.append(token)
    assert got == tokens[40:] and len(got) > 3
    lm.next_logits(model, tokens, CPU, cache)
    lm.next_logits(model, [5], CPU, cache)
    n_bytes = sum(t.nbytes for pair in cache.layers.values() for t in pair)
    assert n_bytes == 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * (len(tokens) + 1) * 4


def test_draws_follow_the_temperature_and_are_the_same_on_every_rank(monkeypatch):
    model, runs = build_random(), []
    for temperature in (0, 1e-30, 1.0, 1.0):
        monkeypatch.setattr(lm, "SEEDS", iter([7]))  # of another rank
        runs.append(continuation(model, 24, temperature=temperature))
    assert runs[0] == runs[1] != runs[2] == runs[3]


# ---------------------------------------------------------------- config


def test_presets_hold_the_published_parameter_counts():
    published = {  # billions, from the model cards
        "llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-2-70b": 68.98, "llama-3-8b": 8.03, "llama-3.1-8b": 8.03,
        "llama-3.1-70b": 70.55, "llama-3.1-405b": 405.85, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21,
        "llama-3.3-70b": 70.55, "mistral-7b": 7.25, "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09,
        "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.77, "qwen2.5-32b": 32.76, "qwen2.5-72b": 72.71, "qwen3-0.6b": 0.60,
        "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.77, "qwen3-32b": 32.76,
        "qwen3-30b-a3b": 30.53, "qwen3-235b-a22b": 235.09, "qwen3.5-0.8b": 0.75,
        "qwen3.5-2b": 1.88, "qwen3.5-4b": 4.21, "qwen3.5-9b": 8.95, "qwen3.5-27b": 26.90, "qwen3.5-35b-a3b": 34.66,
        "muse-glimmer-30b": 27.85,
    }
    assert published.keys() == data.PRESETS.keys()
    for name, count in published.items():
        with torch.device("meta"):
            model = lm.Transformer(lm.parse_config(data.PRESETS[name]))
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(count, abs=0.006), name  # two decimals


# ---------------------------------------------------------------- loss


# float32: sums in another order. bf16: a logit is off by up to 1/256 of itself, its gradient is rounded to 8 bits
@pytest.mark.bf16
@pytest.mark.parametrize("dtype, loss_error, error", [(torch.float32, 1e-6, 1e-5), (torch.bfloat16, 4e-3, 0.02)])
@pytest.mark.parametrize("chunk", [1, 7, 320, 400])
def test_chunked_cross_entropy_equals_the_full_one(chunk, dtype, loss_error, error):
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, 8, generator=g, dtype=dtype).requires_grad_() for n in (320, 512))
    targets = torch.randint(0, 512, (320,), generator=g)
    targets[[3, 11, -1]] = lm.IGNORE
    exact = [t.detach().float().requires_grad_() for t in (h, w)]
    expected = F.cross_entropy(exact[0] @ exact[1].T, targets, reduction="sum")
    loss = lm.ChunkedCrossEntropy.apply(h, w, targets, chunk, True)
    grads = torch.autograd.grad(loss * 0.37, (h, w), retain_graph=True)
    assert loss.item() == pytest.approx(expected.item(), rel=loss_error)
    for got, want in zip(grads, torch.autograd.grad(expected * 0.37, exact)):
        assert (got.float() - want).norm() < error * want.norm()
    assert not grads[0][[3, 11, -1]].any()
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()


def test_a_sure_targets_gradient_is_not_rounded_away_in_16_bits():
    logits = torch.zeros(1, 8, dtype=torch.bfloat16)
    logits[0, 3] = 12
    _, grad = lm.softmax_gradient(logits, torch.tensor([[3]]))
    exact = torch.softmax(torch.tensor([0.0] * 3 + [12.0] + [0.0] * 4), 0)[3].item() - 1  # -4e-5; bf16's 1 - 4e-5 is 1
    assert grad[0, 3].item() == pytest.approx(exact, rel=0.01)  # bf16 has 8 bits, float32's 1 - 4e-5 another 8


def with_z_loss(logits_CV, targets_C1):
    """A fork's loss: cross-entropy plus the squared log of the softmax's total (PaLM, arXiv:2204.02311)."""
    losses_C1, grad_CV = lm.softmax_gradient(logits_CV.clone(), targets_C1)
    log_total_C1 = logits_CV.float().logsumexp(-1, keepdim=True)
    slope_CV = 2 * log_total_C1 * logits_CV.softmax(-1)
    return losses_C1 + log_total_C1.square(), grad_CV + slope_CV


def test_a_forks_loss_sees_capped_logits_and_its_gradient_passes_the_cap():
    config = lm.parse_config(data.read_json(HERE / "goldens-windows/muse-glimmer/config.json"))
    torch.manual_seed(0)
    head = lm.LMHead(config)
    torch.nn.init.normal_(head.weight)
    head.softmax_gradient = with_z_loss
    x = torch.randn(1, 20, config.hidden_size, requires_grad=True)
    targets = torch.arange(20)
    loss = head(x, targets[None], torch.arange(20))
    logits = head(x)[0]  # capped, by the code of generation
    expected = F.cross_entropy(logits, targets, reduction="sum") + logits.logsumexp(-1).square().sum()
    for got, want in zip(torch.autograd.grad(loss, [x, head.weight]), torch.autograd.grad(expected, [x, head.weight])):
        assert (got - want).norm() < 1e-6 * want.norm()  # float32 sums in another order
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name, value", [("chunk", 0), ("per_token", True)])  # --no-chunked_ce, --dpo
def test_a_forks_loss_is_refused_where_only_cross_entropy_is_computed(name, value):
    head = lm.LMHead(lm.parse_config(conftest.SHAPE))
    head.softmax_gradient = with_z_loss
    setattr(head, name, value)
    tokens = torch.arange(4)[None]
    with pytest.raises(ValueError, match="--no-chunked_ce computes plain cross-entropy"):
        head(torch.zeros(1, 4, 64), tokens, torch.arange(4))


def test_merging_refuses_tensors_that_it_would_lose(tmp_path):
    files = SimpleNamespace(config=data.read_json(HERE / "tiny" / "config.json"))
    adapter = {"model.embed_tokens.weight": torch.zeros(4096, 192)}  # as of a fork that trains the embedding
    with pytest.raises(ValueError, match=r"final is complete, but merge\(\) knows only LoRA.*embed_tokens"):
        data.merge(data.Checkpoint(HERE / "tiny"), adapter, 1.0, files, None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_supervised_token_gives_zero_loss_and_a_working_backward():
    model = build(GOLDENS[0])
    tokens = torch.ones(1, 4, dtype=torch.int64)
    loss = model(tokens, torch.full_like(tokens, lm.IGNORE))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# ---------------------------------------------------------------- attention by documents


@pytest.mark.bf16
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])  # of numbers below 4
@pytest.mark.parametrize("T, pairs", [
    (40, [(0, 7), (7, 8), (8, 33), (40, 80)]),  # 33..40 is padding
    (64, [(0, 64), (64, 128)]),  # equal documents, in one call
])
def test_attention_by_documents_equals_a_block_diagonal_mask(T, pairs, dtype, tolerance):
    g = torch.Generator().manual_seed(1)
    q, k, v = qkv = [torch.randn(2, T, heads, 8, generator=g).to(dtype).requires_grad_() for heads in (4, 2, 2)]
    mask = torch.zeros(2 * T, 2 * T, dtype=torch.bool)
    for start, stop in pairs:
        mask[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril().bool()
    real = mask.any(1)
    mask[~real, ~real] = True  # softmax needs something there
    flat = [t.float().reshape(1, 2 * T, -1, 8).transpose(1, 2) for t in qkv]
    expected = F.scaled_dot_product_attention(*flat, attn_mask=mask, enable_gqa=True)
    expected = expected.transpose(1, 2).reshape(2 * T, 32)[real].to(dtype)
    out = lm.attend(q, k, v, data.pack_spans(pairs, 2 * T)).view(2 * T, 32)[real]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    grads = [torch.autograd.grad(y, qkv, torch.ones_like(y)) for y in (out, expected)]
    torch.testing.assert_close(*grads, atol=4 * tolerance, rtol=tolerance)


# ---------------------------------------------------------------- LoRA


TARGETS = lm.ATTENTION_TARGETS + lm.MLP_TARGETS
DOTTED = [f"self_attn.{target}" for target in lm.ATTENTION_TARGETS] + [f"mlp.{target}" for target in lm.MLP_TARGETS]
MODULES = {
    "none": None,  # PEFT has defaults for a family
    "all-linear": "all-linear",
    "pattern": r".*\.(q|k|v|o|gate|up|down)_proj",
    "endless pattern": r"(([a-z._0-9]+)*)*!",  # to match it would take longer than the universe has
    "names": [*TARGETS],
    "longer names": DOTTED,
    "every layer": [f"model.layers.{i}.{end}" for i in range(3) for end in DOTTED],
    "names of other models": [*TARGETS, "query_key_value", "j_proj", "proj.q_proj"],  # PEFT skips what no layer is
}


@pytest.mark.parametrize("modules", MODULES.values(), ids=MODULES)
def test_an_adapter_is_read_back_with_the_layers_that_its_tensors_name(tmp_path, modules):
    tensors = {name: p.data for name, p in build_random("lora").named_parameters() if p.requires_grad}
    data.save_adapter(tensors, tmp_path, "base", 4, 8, 0.1, TARGETS)
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | {"target_modules": modules}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    source, flags = data.open_adapter(tmp_path)
    assert flags == dict(lora_rank=4, lora_alpha=8, lora_dropout=0.1, lora_targets=list(TARGETS))
    data.check_weights(build_random("lora"), source, tmp_path)


def test_an_adapter_of_experts_lists_its_modules_and_has_no_dropout(tmp_path):
    tensors = {"model.layers.0.mlp.experts.1.down_proj.lora_A.weight": torch.zeros(8, 16)}
    data.save_adapter(tensors, tmp_path, "base", 8, 16, 0.1, ["down_proj"])
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["target_modules"], config["lora_dropout"]) == (["down_proj"], 0)
    assert data.open_adapter(tmp_path)[1]["lora_targets"] == ["down_proj"]


# ---------------------------------------------------------------- activation checkpointing


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("tile", [96, 32, 7])
def test_tiles_do_not_change_loss_and_gradients(method, tile, checkpointing):
    loss, expected = gradients(build_random(method))
    got_loss, got = gradients(build_random(method, tile, checkpointing))
    assert got_loss == pytest.approx(loss, rel=1e-6)
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        # the gradient of a weight is summed tile by tile: float32 rounding of up to 14 terms
        scale = 0 if tile == 96 else 1e-5
        torch.testing.assert_close(grad, expected[name], rtol=scale, atol=scale * expected[name].abs().max().item())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_tile_runs_once_in_the_forward_and_once_in_the_backward(monkeypatch, checkpointing):
    start, n_tokens = lm.MLP.start, []
    monkeypatch.setattr(lm.MLP, "start", lambda self, h: n_tokens.append(h.shape[0]) or start(self, h))
    gradients(build_random("full", 40, checkpointing))
    # 96 tokens in three blocks. A tile that kept its own input would run once more in a checkpointed block
    assert sorted(n_tokens) == [16] * 2 * 3 + [40] * 4 * 3


@pytest.mark.parametrize("method, shape", [("qlora", {}), ("lora", QWEN35)], ids=["qwen3", "qwen3.5-moe"])
@pytest.mark.parametrize("tile, checkpointing", [(20, False), (0, True), (20, True)])
def test_tiles_and_recomputing_drop_the_same_inputs(method, shape, tile, checkpointing):
    loss, expected = gradients(build_random(method, dropout=0.3, **shape))
    got_loss, got = gradients(build_random(method, tile, checkpointing, dropout=0.3, **shape))
    assert got_loss == pytest.approx(loss, rel=1e-6)
    for name, grad in got.items():  # sums of tiles in another order; another mask would be 0.1 away
        bound = 1e-5 * expected[name].abs().max().item()
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=bound)


# ---------------------------------------------------------------- experts


@pytest.mark.parametrize("method", ["full", "lora"])
def test_experts_in_16_bits_get_rows_by_32_on_a_cpu_which_change_nothing(monkeypatch, method):
    plain, n_rows, results = nf4.linear, set(), []

    def counted(x, w_ND, ends=None):
        if ends is not None:
            n_rows.update(ends.diff(prepend=ends.new_zeros(1)).tolist())
        return plain(x, w_ND, ends)

    monkeypatch.setattr(nf4, "linear", counted)
    for multiple in (1, 32):
        monkeypatch.setattr(lm, "length_multiple", lambda q, multiple=multiple: multiple)
        model = build_random(method, **MOE)
        lm.set_precision_(model, "mixed")
        n_rows.clear()
        results.append(gradients(model))
        # each new number would cost 0.6 MiB of oneDNN's kernels: 1.3 GiB of a small model
        assert all(n % multiple == 0 for n in n_rows) and len(n_rows) > 1
    (loss, expected), (got_loss, got) = results
    assert got_loss == pytest.approx(loss, rel=1e-5)
    for name, grad in got.items():  # bf16 products of another height may be summed in another order
        assert (grad - expected[name]).norm() <= 0.02 * expected[name].norm(), name


# ---------------------------------------------------------------- dropout


def dropped_parts(tokens_NN, columns_AD, rate):
    """Which inputs [A, N, D] of A adapters are dropped."""
    tokens_N = tokens_NN.flatten()
    threshold = lm.Dropout(rate).threshold
    ones = [torch.ones(len(tokens_N), len(columns_D)) for columns_D in columns_AD]
    return torch.stack([nf4.drop_(x, tokens_N, columns_D, threshold) for x, columns_D in zip(ones, columns_AD)]) == 0


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5])
def test_masks_have_their_rate_and_are_independent_of_each_other(rate):
    N, D = 512, 256
    steps = [nf4.token_bits(7, step, 0, 2, N // 2) for step in (0, 1)]
    columns_AD = [nf4.column_bits(number, D, CPU) for number in range(4)]
    masks_SAND = torch.stack([dropped_parts(tokens, columns_AD, rate) for tokens in steps]).double()
    n = masks_SAND.numel()
    # of n independent draws: 4 standard deviations of their mean, which chance exceeds once in 16,000
    assert (masks_SAND.mean() - rate).abs() < 4 * (rate * (1 - rate) / n) ** 0.5
    noise_SAND = (masks_SAND - rate) / (rate * (1 - rate)) ** 0.5  # of variance 1
    flat = noise_SAND.flatten(2)
    pairs = {
        "steps": noise_SAND[0] * noise_SAND[1],
        "adapters": noise_SAND[:, :1] * noise_SAND[:, 1:],
        "neighbouring tokens": noise_SAND[:, :, 1:] * noise_SAND[:, :, :-1],
        "neighbouring columns": noise_SAND[..., 1:] * noise_SAND[..., :-1],
        "rows of a step": noise_SAND[:, :, : N // 2] * noise_SAND[:, :, N // 2 :],
        "a token and another column": flat[..., D + 1 :] * flat[..., : -D - 1],
    }
    for name, products in pairs.items():  # the mean of n independent products has a deviation of 1 / sqrt(n)
        assert products.mean().abs() < 4 / products.numel() ** 0.5, name
    # The share that a token or a column drops has a binomial's variance: none is dropped more often than others.
    for dims, n_each in (((0, 1, 3), 8 * D), ((2,), N), ((3,), D)):
        shares = masks_SAND.mean(dims)
        expected = rate * (1 - rate) / n_each
        # The variance of m shares is itself off by sqrt(2 / m), and by the kurtosis of rare drops
        bound = 5 * ((2 + 1 / (rate * n_each)) / shares.numel()) ** 0.5
        assert (shares.var().item() / expected) == pytest.approx(1, abs=bound), dims


def test_products_of_every_token_with_every_column_spread_evenly():
    tokens_N = nf4.token_bits(3, 5, 0, 1, 512).flatten()
    bits_ND = tokens_N[:, None] * nf4.column_bits(1, 512, CPU)
    counts = torch.histc(bits_ND.double(), 64, -(2**31), 2**31)
    expected = bits_ND.numel() / 64
    # chi-square of 63 degrees of freedom: mean 63, deviation 11.2; 110 is exceeded once in 5,000
    assert ((counts - expected) ** 2 / expected).sum() < 110


def test_dropout_of_an_adapter_is_torchs_with_these_masks_and_keeps_the_mean():
    model = build_random("lora", dropout=0.25)
    lm.set_dropout_bits_(model, nf4.token_bits(1, 2, 0, *TOKENS.shape))
    layers = model.model.layers[0].self_attn
    x = torch.randn(2, 48, 64, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    masks = []
    for layer in (layers.q_proj, layers.k_proj):
        mask = 1 - dropped_parts(model.dropout.bits_N, [layer.column_bits], 0.25)[0].float().view_as(x)
        y = layer(x)
        y2 = x2 @ layer.weight.T + x2 * mask / 0.75 @ layer.lora_A.weight.T @ layer.lora_B.weight.T * layer.lora_scale
        torch.testing.assert_close(y, y2)
        weights = [x, layer.lora_A.weight, layer.lora_B.weight]
        grads = torch.autograd.grad(y.square().sum(), weights)
        weights[0] = x2
        for got, expected in zip(grads, torch.autograd.grad(y2.square().sum(), weights), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
        masks.append(mask)
    assert not torch.equal(*masks)  # of q and k


def test_experts_of_a_token_drop_different_inputs_and_tokens_keep_theirs_wherever_they_stand():
    dropout = lm.Dropout(0.5)
    dropout.bits_N = nf4.token_bits(0, 0, 0, 1, 3).flatten()
    # tokens 0, 1, 2 with two experts each: choices 0, 1 are token 0's
    chosen = torch.tensor([4, 9, 4, 9, 9, 5])
    by_expert, order = chosen.sort(stable=True)
    with lm.rows_of_experts(dropout, by_expert, order, 2, 3):
        bits = dict(zip(zip((order // 2).tolist(), by_expert.tolist()), dropout.bits_N.tolist()))
    assert len(set(bits.values())) == 6
    dropout.bits_N = dropout.bits_N[1:2]  # token 1 alone
    with lm.rows_of_experts(dropout, torch.tensor([4, 9]), torch.tensor([0, 1]), 2, 1):
        assert dropout.bits_N.tolist() == [bits[1, 4], bits[1, 9]]


def saved_bytes(model):
    """What the forward saves for the backward."""
    if model.dropout:
        lm.set_dropout_bits_(model, nf4.token_bits(0, 0, 0, *TOKENS.shape))
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        model(TOKENS, TOKENS)
    return sum(t.nbytes for t in saved.values())


def test_adapters_with_dropout_save_what_they_save_without():
    without, with_dropout = (saved_bytes(build_random("lora", dropout=rate)) for rate in (0, 0.1))
    bits = 4 * (TOKENS.numel() + 3 * (6 * 64 + 192))  # of tokens, and of the inputs of each adapter
    bits += 3 * 8 * 64 * 4  # q, k and v of the first block save A, too, although their input needs no gradient
    assert with_dropout - without == bits < without / 100


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("names, has_index", [
    ("model.safetensors", False),
    ("model.safetensors", True),
    ("model-00001-of-00002.safetensors model-00002-of-00002.safetensors", False),
    ("model-00001-of-00002.safetensors model-00002-of-00002.safetensors", True),
    ("model.safetensors-00001-of-00002.safetensors model.safetensors-00002-of-00002.safetensors", False),  # Qwen3.5's
    ("a.safetensors b.safetensors model-00001-of-00009.safetensors", True),
])
def test_the_files_of_a_model_are_read_bit_for_bit_and_no_others(tmp_path, names, has_index):
    model = build_random()
    tensors = dict(data.full_tensors(model, False))
    files = names.split()
    places = {name: files[i % len(files)] for i, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if places[name] == file}, tmp_path / file)
    if has_index:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for other in ("model-old", "model-00001-of-2", "consolidated", "modelx-00001-of-00009"):
        save_file({"other": torch.ones(1)}, tmp_path / f"{other}.safetensors")
    source = data.Checkpoint(tmp_path)
    data.check_weights(model, source, tmp_path)
    for name, p in model.named_parameters():
        assert torch.equal(source.rows(name, 0, len(p)), p.data)


def test_a_file_that_a_full_disk_refuses_is_named_with_the_part_of_it():
    model = build_random()
    with pytest.raises(OSError, match="/dev/full: header not written: No space left"):
        data.write_safetensors("/dev/full", dict(model.named_parameters()), [])


def test_a_rank_that_cannot_write_goes_on_gathering_for_the_others():
    model = build_random()
    tensors = iter(list(model.parameters()))  # with --fsdp2 each next() is a collective
    with pytest.raises(OSError, match=r"/dev/null/model\.safetensors"):
        data.save_model(tensors, dict(model.named_parameters()), Path("/dev/null"), conftest.SHAPE, write=True)
    assert next(tensors, None) is None


@pytest.mark.parametrize("family", ["llama3.1", "llama-linear", "qwen2"])
@pytest.mark.parametrize("version", [4, 5])
def test_exported_config_has_rope_as_transformers_4_and_5_spell_it(tmp_path, family, version):
    raw = data.read_json(HERE / "goldens" / family / "config.json")  # as version 5 writes it
    rope = raw["rope_parameters"]
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": {key: rope[key] for key in rope if key != "rope_theta"}}
    if family == "qwen2":
        old["rope_scaling"] = None
    given = raw if version == 5 else {key: raw[key] for key in raw if key != "rope_parameters"} | old
    data.save_model(iter([]), {}, tmp_path, given, write=True)
    written = data.read_json(tmp_path / "config.json")
    assert written == raw | old
    assert lm.parse_config(written) == lm.parse_config(raw)


def test_a_run_or_an_adapter_is_a_model_and_folders_are_named_absolutely(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert data.find_result("tiny") == ("tiny", None) and data.find_result("Qwen/Qwen3-4B") == ("Qwen/Qwen3-4B", None)
    (tmp_path / "run/final").mkdir(parents=True)
    assert data.find_result("run") == ("run", None)
    data.save_adapter({}, tmp_path / "run/final", "base", 4, 8, 0.1, [])
    assert data.find_result("run") == data.find_result("run/final") == ("base", "run/final")
    shutil.copytree(data.TINY, tmp_path / "run/merged")
    assert data.find_result("run") == ("run/merged", None)
    assert data.find_model("run/merged", False)[3] == str(tmp_path / "run/merged")
