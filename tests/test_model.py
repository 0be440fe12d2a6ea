"""The model against transformers' own logits and gradients (tests/make_goldens.py), and the loss against plain float32."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import model as lm

GOLDENS = sorted((Path(__file__).parent / "goldens").iterdir())


def build(folder, config="config.json"):
    c = lm.parse_config(lm.read_json(folder / config))
    with torch.device("meta"):
        model = lm.Transformer(c)
    source = lm.Checkpoint(folder)
    lm.check_weights(model, source, folder)
    model.to_empty(device="cpu").tie_()
    lm.load_weights_(model, source, None, 0, torch.device("cpu"), progress=False)
    return model


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
        assert (p.grad - expected).norm() <= 1e-5 * expected.norm(), name  # 3e-6 seen, the bound is 1e-4


def test_every_trait_has_a_golden():
    configs = [lm.parse_config(lm.read_json(f / "config.json")) for f in GOLDENS]
    assert {c.model_type for c in configs} == set(lm.FAMILIES)
    assert {c.rope_scaling["rope_type"] for c in configs} == {"default", "linear", "llama3"}
    assert {c.tie_word_embeddings for c in configs} == {True, False}
    assert any(c.head_dim * c.num_attention_heads != c.hidden_size for c in configs)
    assert any(c.num_key_value_heads < c.num_attention_heads for c in configs)


def test_long_positions_keep_float32_angles_in_bf16():
    c = lm.parse_config(lm.read_json(GOLDENS[0] / "config.json"))
    positions = torch.tensor([[100_001]])
    cos, _ = lm.rope_table(positions, c)
    expected = torch.cos(torch.tensor(100_001, dtype=torch.float64) / c.rope_scaling.get("factor", 1.0))
    assert cos.dtype == torch.float32
    assert cos.flatten()[0].item() == pytest.approx(expected.item(), abs=5e-3)  # one float32 ulp of the angle 5e4 is 4e-3


@pytest.mark.parametrize("name", lm.PRESETS)
def test_presets_hold_the_published_parameter_counts(name):
    published = {  # billions, from the model cards; those of a rounded name are checked to its rounding
        "llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-2-70b": 68.98, "llama-3-8b": 8.03, "llama-3.1-8b": 8.03,
        "llama-3.1-70b": 70.55, "llama-3.1-405b": 405.85, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "llama-3.3-70b": 70.55,
        "mistral-7b": 7.25, "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.62,
        "qwen2.5-14b": 14.77, "qwen2.5-32b": 32.76, "qwen2.5-72b": 72.71, "qwen3-0.6b": 0.60, "qwen3-1.7b": 1.72,
        "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.77, "qwen3-32b": 32.76,
    }
    with torch.device("meta"):
        model = lm.Transformer(lm.parse_config(lm.preset_config(name)))
    count = sum(p.numel() for p in model.parameters()) / 1e9
    assert count == pytest.approx(published[name], abs=0.006)  # two decimals on the cards


def test_a_preset_reads_the_same_in_both_spellings():
    raw = lm.preset_config("llama-3.1-8b")
    old = {key: value for key, value in raw.items() if key not in ("rope_parameters", "dtype")}
    new = {key: value for key, value in raw.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    assert lm.parse_config(old) == lm.parse_config(new) == lm.parse_config(json.loads(json.dumps(raw)))


# ---------------------------------------------------------------- loss


def random_loss_input(S=50, D=16, V=37, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    h = torch.randn(S, D, generator=g, dtype=dtype).requires_grad_()
    w = torch.randn(V, D, generator=g, dtype=dtype).requires_grad_()
    return h, w, torch.randint(0, V, (S,), generator=g)


@pytest.mark.parametrize("chunk", [1, 7, 25, 50, 64])
def test_chunked_cross_entropy_equals_the_full_one(chunk):
    h, w, targets = random_loss_input()
    expected = F.cross_entropy(h @ w.T, targets, reduction="sum")
    expected_grads = torch.autograd.grad(expected * 0.37, (h, w))
    loss = lm.ChunkedCrossEntropy.apply(h, w, targets, chunk, True)
    grads = torch.autograd.grad(loss * 0.37, (h, w))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # float32 sums in another order
    torch.testing.assert_close(grads, expected_grads, rtol=1e-5, atol=1e-6)


def test_rows_without_a_target_add_nothing():
    h, w, targets = random_loss_input()
    targets[[3, 11, -1]] = lm.IGNORE
    expected = F.cross_entropy(h @ w.T, targets, reduction="sum")
    expected_grads = torch.autograd.grad(expected, (h, w))
    loss = lm.ChunkedCrossEntropy.apply(h, w, targets, 7, True)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # float32 sums in another order
    grads = torch.autograd.grad(loss, (h, w))
    torch.testing.assert_close(grads, expected_grads, rtol=1e-5, atol=1e-6)
    assert not grads[0][[3, 11, -1]].any()


def test_the_head_works_on_few_sizes_whatever_the_number_of_targets(monkeypatch):
    model, sizes, apply = build(GOLDENS[0]), set(), lm.ChunkedCrossEntropy.apply
    monkeypatch.setattr(lm.ChunkedCrossEntropy, "apply", lambda h, *rest: (sizes.add(len(h)), apply(h, *rest))[1])
    tokens = torch.randint(0, 32, (1, 200), generator=torch.Generator().manual_seed(0))
    for n in (1, 77, 128, 129, 200):
        targets = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
        targets[:, n:] = lm.IGNORE
        loss, logits = model(tokens, targets), model(tokens)
        torch.testing.assert_close(loss, F.cross_entropy(logits[0], targets[0], reduction="sum"), rtol=1e-5, atol=0)
    assert sizes == {128, 200}


def test_chunked_cross_entropy_survives_huge_logits():
    h, w, targets = random_loss_input()
    loss = lm.ChunkedCrossEntropy.apply(h * 1000, w, targets, 8, True)
    expected = F.cross_entropy((h * 1000) @ w.T, targets, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert torch.autograd.grad(loss, h)[0].isfinite().all()


def test_bf16_loss_stays_within_bf16_rounding():
    h, w, targets = random_loss_input(dtype=torch.bfloat16)
    loss = lm.ChunkedCrossEntropy.apply(h, w, targets, 16, True)
    grad_h, grad_w = torch.autograd.grad(loss, (h, w))
    exact = [t.detach().float().requires_grad_() for t in (h, w)]
    expected = F.cross_entropy(exact[0] @ exact[1].T, targets, reduction="sum")
    expected_h, expected_w = torch.autograd.grad(expected, exact)
    assert loss.item() == pytest.approx(expected.item(), rel=4e-3)  # a logit is off by up to 1/256 of itself
    for got, want in ((grad_h, expected_h), (grad_w, expected_w)):
        assert (got.float() - want).norm() < 0.02 * want.norm()


def test_frozen_head_gets_no_gradient():
    h, w, targets = random_loss_input()
    lm.ChunkedCrossEntropy.apply(h, w.detach(), targets, 8, True).backward()
    assert w.grad is None and h.grad is not None


def test_no_supervised_token_gives_zero_loss_and_a_working_backward():
    model = build(GOLDENS[0])
    tokens = torch.ones(1, 4, dtype=torch.int64)
    loss = model(tokens, torch.full_like(tokens, lm.IGNORE))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_second_backward_is_refused_not_wrong():
    h, w, targets = random_loss_input()
    loss = lm.ChunkedCrossEntropy.apply(h, w, targets, 8, True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()


def test_no_tensor_of_tokens_by_vocabulary_is_ever_alive():
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for t in torch.utils._pytree.tree_leaves(result):
                if isinstance(t, torch.Tensor):
                    self.numel = max(self.numel, t.numel())
            return result

    h, w, targets = random_loss_input(S=640, D=8, V=512)
    with Largest() as largest:
        lm.ChunkedCrossEntropy.apply(h, w, targets, 16, True).backward()
    assert largest.numel == max(16 * 512, 640 * 8, 512 * 8)  # a chunk of logits, or h, or the weight's gradient


# ---------------------------------------------------------------- attention by documents


def test_attention_by_documents_equals_a_block_diagonal_mask():
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 40, heads, 8, generator=g) for heads in (4, 2, 2))
    spans = [(0, 7), (7, 8), (8, 33), (40, 80)]  # 33..40 is padding
    mask = torch.zeros(80, 80, dtype=torch.bool)
    for start, stop in spans:
        mask[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril().bool()
    mask[range(33, 40), range(33, 40)] = True  # softmax needs something there
    flat = [t.reshape(1, 80, -1, 8).transpose(1, 2) for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*flat, attn_mask=mask, enable_gqa=True).transpose(1, 2).reshape(2, 40, 32)
    expected[0, 33:] = 0
    torch.testing.assert_close(lm.attend(q, k, v, spans), expected, atol=1e-6, rtol=1e-5)  # float32 rounding


# ---------------------------------------------------------------- LoRA


def test_lora_starts_as_the_base_and_freezes_it():
    model, tokens = build(GOLDENS[0]), torch.arange(12)[None]
    before = model(tokens)
    lm.add_lora_(model, 3, 6, 0.0, ["q_proj", "down_proj"])
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 2 * 2 and all(".lora_" in name for name in names)
    for name, p in model.named_parameters():
        if name.endswith("lora_B.weight"):
            torch.nn.init.zeros_(p)
    assert torch.equal(model(tokens), before)


def test_lora_computes_w_plus_scaled_ba():
    model, tokens = build(GOLDENS[0]), torch.arange(12)[None]
    lm.add_lora_(model, 3, 6, 0.0, lm.LORA_TARGETS)
    merged = build(GOLDENS[0])
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in merged.named_parameters():
            stem = name.removesuffix("weight")
            if stem + "lora_A.weight" in params:
                p += 2 * params[stem + "lora_B.weight"] @ params[stem + "lora_A.weight"]
    torch.testing.assert_close(model(tokens), merged(tokens), atol=1e-4, rtol=1e-4)  # sums in another order


def test_checkpointing_does_not_recompute_the_frozen_down_projection(monkeypatch):
    import nf4
    import train

    calls = []
    monkeypatch.setattr(nf4, "dequantize", lambda c, s, dtype: calls.append(c.shape) or torch.zeros(len(c), 2 * c.shape[1]))
    shape = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "num_hidden_layers": 1}
    c = lm.parse_config(lm.read_json(GOLDENS[0] / "config.json") | shape)
    with torch.device("meta"):
        model = lm.Transformer(c)
    nf4.quantize_linears_(model.model.layers)
    lm.add_lora_(model, 4, 8, 0.0, lm.LORA_TARGETS)
    model.to_empty(device="cpu")
    train.checkpoint_activations_(model, preserve_rng=False)
    model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)).backward()
    down = (c.hidden_size, c.intermediate_size // 2)
    assert calls.count(down) == 2  # forward and backward, not the recomputation between them


# ---------------------------------------------------------------- packed attention


def test_float32_takes_packed_spans_document_by_document():
    q, k = torch.randn(2, 24, 4, 16), torch.randn(2, 24, 2, 16)
    spans = [(0, 7), (7, 20), (24, 48)]
    packed = lm.pack_spans(spans, 48)
    assert packed.bounds.tolist() == [0, 7, 20, 24, 48] and packed.longest == 24
    assert torch.equal(lm.attend(q, k, k, packed), lm.attend(q, k, k, spans))


@pytest.mark.gpu
@pytest.mark.parametrize("n_query, n_key", [(4, 4), (8, 2)])
def test_flash_attention_over_documents_is_a_call_for_each(n_query, n_key):
    spans = [(0, 100), (100, 517), (517, 1000), (1024, 2048)]  # 24 tokens of padding
    inside = torch.ones(2048, dtype=torch.bool, device="cuda")
    inside[1000:1024] = False
    results = []
    packed = lm.pack_spans(spans, 2048)
    for how, views in ((spans, False), (packed, False), (packed, True)):
        if isinstance(how, lm.Packed):
            how = how._replace(bounds=how.bounds.cuda())
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 1024, n, 64, device="cuda").bfloat16().requires_grad_() for n in (n_query, n_key, n_key))
        # as --sequence_parallel makes them: parts of one tensor
        heads = torch.cat([q, k, v], 2).split([n_query, n_key, n_key], 2) if views else (q, k, v)
        out = lm.attend(*heads, how)
        out.view(2048, -1)[inside].float().square().sum().backward()
        results.append([out.view(2048, -1)[inside], *(t.grad.view(2048, -1)[inside] for t in (q, k, v))])
    for single, *others in zip(*results, strict=True):  # bf16 has 8 bits; sums of up to 1,024 terms in another order
        for other in others:
            torch.testing.assert_close(other, single, rtol=0.02, atol=0.02 * single.abs().max().item())


@pytest.mark.gpu
def test_shared_key_heads_in_float32_keep_no_scores():
    T, H = 8192, 8
    q, k, v = (torch.randn(1, T, n, 64, device="cuda", requires_grad=True) for n in (H, 2, 2))
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    lm.attend(q, k, v, [(0, T)]).sum().backward()
    assert torch.cuda.max_memory_allocated() - start < H * T * T * 4 / 8  # the scores would be 2 GiB


@pytest.mark.gpu
def test_heads_that_flash_attention_cannot_take_run_document_by_document():
    spans = [(0, 100), (100, 250)]
    q, k = torch.randn(1, 256, 4, 12, device="cuda").bfloat16(), torch.randn(1, 256, 2, 12, device="cuda").bfloat16()
    packed = lm.pack_spans(spans, 256)
    packed = packed._replace(bounds=packed.bounds.cuda())
    assert torch.equal(lm.attend(q, k, k, packed)[0, :250], lm.attend(q, k, k, spans)[0, :250])
