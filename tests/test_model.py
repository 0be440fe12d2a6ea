"""The model against transformers' own logits and gradients (make_goldens.py writes them), its loss, attention, tiles
and dropout against plain definitions, generation, and the files that it reads and writes."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

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
every_family = pytest.mark.parametrize("folder", GOLDENS, ids=lambda folder: folder.name)
TOKENS = torch.arange(96).view(2, 48)
N_BLOCKS = conftest.SHAPE["num_hidden_layers"]
LONG = 1 << 20  # --seq_len, for as many groups of key heads as --tiled_mlp makes
EIGHT = {"num_attention_heads": 16, "num_key_value_heads": 8}


def build(folder, config="config.json"):
    """The model in a folder, with its weights. config: a file of it, or the dict of one."""
    raw = config if isinstance(config, dict) else data.read_json(folder / config)
    with torch.device("meta"):
        model = lm.Transformer(lm.parse_config(raw))
    source = data.WeightFiles(folder)
    data.check_weights(model, source, folder)
    model.to_empty(device="cpu").tie_()
    data.load_weights_(model, source, None, 0, CPU)
    return model


def build_random(method="full", tile=0, checkpointing=False, dropout=0.0, seq_len=0, **shape):
    """A model of random weights, the same ones in each call."""
    flags = []
    if method != "full":
        flags = [f"--{method}", "--lora_rank", 8, "--lora_dropout", dropout]
    model, _ = conftest.build(*flags, **shape)
    generator = torch.Generator().manual_seed(0)
    for name, param in model.named_parameters():
        if "lora_B" in name:  # zeros, as training starts with, would hide a wrong adapter
            param.data.normal_(std=0.1, generator=generator)
    if tile:
        lm.tile_mlp_(model, tile, seq_len)
    if checkpointing:
        for block in model.model.layers:
            lm.recompute_(block, has_dropout=model.dropout > 0)
    return model


def loss_and_gradients(model):
    """(loss, {name: gradient}) of TOKENS, each of which is to predict the next one."""
    torch.manual_seed(0)  # for dropout, as the loop seeds each step
    loss = model(TOKENS, TOKENS.roll(-1, 1))
    loss.backward()
    grads = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            grads[name] = p.grad
    return loss.item(), grads


def assert_close(got, expected, tolerance):
    """Each number is within `tolerance` of its own size, or of the largest number where that is more."""
    largest = expected.abs().max().item()
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * largest)


# ---------------------------------------------------------------- transformers' numbers


@pytest.mark.rounding
@pytest.mark.parametrize("config", ["config.json", "config-v4.json"])  # as transformers 5 and 4 write it
@every_family
def test_logits_equal_transformers(folder, config):
    golden = load_file(folder / "golden.safetensors")
    logits = build(folder, config)(golden["tokens"])
    torch.testing.assert_close(logits, golden["logits"], atol=1e-5, rtol=0)  # float32 rounding: 1e-6 seen


@pytest.mark.rounding
@pytest.mark.parametrize("chunk", [0, 7, 1024])  # tokens: not chunked, many chunks, one chunk
@every_family
def test_loss_and_gradients_equal_transformers(folder, chunk):
    golden = load_file(folder / "golden.safetensors")
    tokens = golden["tokens"]
    targets = F.pad(tokens[:, 1:], (0, 1), value=lm.IGNORE)
    model = build(folder)
    model.lm_head.chunk = chunk
    loss = model(tokens, targets)
    assert loss.item() == pytest.approx(golden["loss"].item(), rel=1e-6)  # float32 sums in another order
    loss.backward()
    for name, p in model.named_parameters():
        expected = golden[f"grad.{name}"]
        assert (p.grad - expected).norm() <= 1e-5 * expected.norm(), name  # float32 rounding: 3e-6 seen


def test_long_positions_keep_float32_angles_in_bf16():
    config = lm.parse_config(data.read_json(GOLDENS[0] / "config.json"))
    position = 100_001  # bf16 would round it to 99,840
    *_, cos, _ = lm.rope_table(torch.tensor([[position]]), config)
    angle = position / config.rope_scaling.get("factor", 1.0)  # of the first frequency, which is 1
    expected = torch.tensor(angle, dtype=torch.float64).cos()
    assert cos.dtype == torch.float32
    # neighbouring float32 numbers near an angle of 5e4 are 4e-3 apart
    assert cos.flatten()[0].item() == pytest.approx(expected.item(), abs=5e-3)


# ---------------------------------------------------------------- YaRN


QWEN_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}  # as Qwen's cards say


def yarn_config(scaling, theta=1e6, **changes):
    raw = conftest.SHAPE | {"head_dim": 128, "rope_theta": theta, "rope_scaling": scaling}
    return lm.parse_config(raw | changes)


def yarn_of_the_authors(scaling, theta, K):
    """Radians a token of each pair of a head, in Python's float64, after arXiv:2309.00071 and its authors' code."""
    L = scaling["original_max_position_embeddings"]
    fast = scaling.get("beta_fast", 32)
    slow = scaling.get("beta_slow", 1)
    radians = []
    # the pair d for which L / wavelength is `turns`, where wavelength is 2 pi theta^(2d/K)
    first = K / 2 * math.log(L / (2 * math.pi * fast), theta)
    last = K / 2 * math.log(L / (2 * math.pi * slow), theta)
    if scaling.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    for d in range(K // 2):
        plain = theta ** (-2 * d / K)
        if d <= first:
            radians.append(plain)
        elif d >= last:
            radians.append(plain / scaling["factor"])
        else:
            ramp = (d - first) / (last - first)
            radians.append(plain * (1 - ramp) + plain / scaling["factor"] * ramp)
    return radians


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("changes", [
    {},
    {"truncate": False},
    {"beta_fast": 64.0, "beta_slow": 2.0},
    {"factor": 32.0, "original_max_position_embeddings": 4096},
], ids=str)
def test_yarn_turns_pairs_as_the_paper_and_its_authors_do(theta, changes):
    scaling = QWEN_YARN | changes
    config = yarn_config(scaling, theta)
    *_, cos, sin = lm.rope_table(torch.tensor([[1]]), config)
    radians = torch.atan2(sin, cos).flatten()  # at position 1
    expected = yarn_of_the_authors(scaling, theta, 128)
    for got, exact in zip(radians.tolist(), expected, strict=True):
        assert got == pytest.approx(exact, rel=2e-6)  # a power in float32 is off by a few of its last bits

    # the paper's own words: pairs of more turns than beta_fast stay, those of fewer than beta_slow are interpolated
    n_kept = 0
    n_stretched = 0
    for d, got in enumerate(radians.tolist()):
        plain = theta ** (-2 * d / 128)
        n_turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
        if n_turns >= scaling.get("beta_fast", 32):
            assert got == pytest.approx(plain, rel=2e-6)
            n_kept += 1
        if n_turns <= scaling.get("beta_slow", 1):
            assert got == pytest.approx(plain / scaling["factor"], rel=2e-6)
            n_stretched += 1
    assert n_kept > 2
    assert n_stretched > 2
    assert n_kept + n_stretched < 60  # of 64: between them some are blended


@pytest.mark.parametrize("changes, expected", [
    ({}, 0.1 * math.log(4) + 1),  # the paper's sqrt(1/t)
    ({"factor": 1.0}, 1.0),
    ({"attention_factor": 0.7}, 0.7),
    ({"attention_factor": 0.7, "mscale": 2.0, "mscale_all_dim": 1.0}, 0.7),
    ({"mscale": 2.0}, 0.1 * math.log(4) + 1),  # counts only with the other one
    ({"mscale": 2.0, "mscale_all_dim": 0.0}, 0.1 * math.log(4) + 1),
    ({"mscale": 2.0, "mscale_all_dim": 0.5}, (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
], ids=str)
def test_yarn_scales_cos_and_sin(changes, expected):
    config = yarn_config(QWEN_YARN | changes)
    *_, cos, sin = lm.rope_table(torch.tensor([[0, 5000]]), config)
    torch.testing.assert_close(cos.hypot(sin), torch.full_like(cos, expected))


@pytest.mark.rounding
@pytest.mark.parametrize("folder", [HERE / "goldens/qwen2-yarn", HERE / "goldens/qwen3-yarn"], ids=lambda f: f.name)
def test_yarn_is_transformers_at_one_and_four_times_the_length_of_pretraining(folder):
    """It is the same at every length: a row of 64 tokens has the logits that they have in one of 256."""
    golden = load_file(folder / "golden.safetensors")
    model = build(folder)
    for length in (64, 256):
        logits = model(golden["tokens"][:, :length])
        torch.testing.assert_close(logits, golden["logits"][:, :length], atol=1e-5, rtol=0)


@pytest.mark.parametrize("scaling, max_position_embeddings, longest", [
    (QWEN_YARN, 32768, 131072),  # Qwen2.5
    (QWEN_YARN, 40960, 131072),  # Qwen3
    (QWEN_YARN, 262144, 262144),  # a file of somebody else
    ({"type": "yarn", "factor": 2.0}, 32768, 65536),  # transformers takes max_position_embeddings for the one before
    (None, 40960, 40960),
])
def test_the_longest_row_of_a_model_with_yarn(scaling, max_position_embeddings, longest):
    config = yarn_config(scaling, max_position_embeddings=max_position_embeddings)
    assert config.n_positions == longest


# ---------------------------------------------------------------- attention that is kept


@pytest.mark.parametrize("tile", [0, 40])
@pytest.mark.parametrize("changes", [{}, QWEN35, MUSE, EIGHT], ids=["qwen3", "qwen3.5", "muse", "eight groups"])
def test_attention_that_a_checkpointed_block_keeps_runs_once_and_changes_no_bit(changes, tile, monkeypatch):
    sdpa = Mock(wraps=lm.sdpa)
    monkeypatch.setattr(lm, "sdpa", sdpa)
    records = []
    make_record = lm.AttentionRecord
    monkeypatch.setattr(lm, "AttentionRecord", lambda: records.append(make_record()) or records[-1])

    def run(n_attention_kept):
        """(loss, gradients, number of calls of sdpa())"""
        sdpa.reset_mock()
        model = build_random("lora", tile, seq_len=LONG, **changes)
        for i, block in enumerate(model.model.layers):
            lm.recompute_(block, keeps_attention=i >= len(model.model.layers) - n_attention_kept)
        return *loss_and_gradients(model), sdpa.call_count

    expected_loss, expected_grads, n_calls = run(0)
    loss, grads, n_calls_kept = run(9)  # more than there are blocks: all of them
    assert n_calls == 2 * n_calls_kept > 0  # else the backward ran attention's forward once more
    assert loss == expected_loss
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, expected_grads[name]), name
    assert len(records) >= N_BLOCKS  # one for each group
    for record in records:  # or q, k and v would stay in memory after the backward
        assert not record.inputs
        assert record.out is None


# ---------------------------------------------------------------- generation

PROMPT = range(20, 60)
N_NEW = 24
STOP = 1


def continuation(model, **options):
    """The tokens that generate() adds to PROMPT: N_NEW, or fewer if it draws STOP."""
    tokens = lm.generate(model.eval(), list(PROMPT), N_NEW, {STOP}, CPU, **options)
    return list(tokens)


def continuation_without_cache(model):
    """The likeliest tokens, each by a forward of all tokens before it."""
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + N_NEW:
        logits_BTV = model(torch.tensor([tokens]))
        token = int(logits_BTV[0, -1].argmax())
        if token == STOP:
            break
        tokens.append(token)
    return tokens[len(PROMPT):]


def test_an_answer_ends_before_its_stop_token(monkeypatch):
    drawn = iter([5, STOP, 7])
    monkeypatch.setattr(lm, "next_logits", lambda *_: F.one_hot(torch.tensor(next(drawn)), 4096).float())
    assert list(lm.generate(None, [1], 9, {STOP}, CPU)) == [5]


@pytest.mark.parametrize("method", ["tiny", "qlora"])
def test_the_cache_changes_no_token_and_holds_keys_and_values_only(method):
    if method == "tiny":
        model = build(data.TINY)
    else:
        model = build_random("qlora", tile=32, checkpointing=True)  # which are made for training alone
    got = continuation(model)
    assert got == continuation_without_cache(model)
    assert len(got) > 3  # or nearly nothing was compared

    cache = lm.Cache()
    tokens = [*PROMPT, *got]
    lm.next_logits(model, tokens, CPU, cache)
    lm.next_logits(model, [5], CPU, cache)
    n_bytes = 0
    for k, v in cache.layers.values():
        n_bytes += k.nbytes + v.nbytes
    c = model.config
    bytes_of_a_token = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 4  # k and v in float32
    assert n_bytes == bytes_of_a_token * (len(tokens) + 1)


def test_draws_follow_the_temperature_and_are_the_same_on_every_rank(monkeypatch):
    model = build_random()

    def draw(temperature):
        """The first answer of a rank. Ranks count seeds by themselves, and must not drift apart."""
        monkeypatch.setattr(lm, "SEEDS", iter([7]))
        return continuation(model, temperature=temperature)

    likeliest = draw(0)
    assert draw(1e-30) == likeliest
    drawn = draw(1.0)
    assert drawn != likeliest
    assert draw(1.0) == drawn


# ---------------------------------------------------------------- presets

PUBLISHED = {  # billions of parameters, from the model cards
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.02,
    "llama-2-70b": 68.98,
    "llama-3-8b": 8.03,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-7b": 7.62,
    "qwen2.5-32b": 32.76,
    "qwen2.5-72b": 72.71,
    "qwen3-0.6b": 0.60,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "qwen3.5-0.8b": 0.75,
    "qwen3.5-2b": 1.88,
    "qwen3.5-4b": 4.21,
    "qwen3.5-9b": 8.95,
    "qwen3.5-27b": 26.90,
    "qwen3.5-35b-a3b": 34.66,
    "muse-glimmer-30b": 27.85,
}


def test_presets_hold_the_published_parameter_counts():
    assert PUBLISHED.keys() == data.PRESETS.keys()
    for name, billions in PUBLISHED.items():
        with torch.device("meta"):
            model = lm.Transformer(lm.parse_config(data.PRESETS[name]))
        n_params = sum(p.numel() for p in model.parameters())
        assert n_params / 1e9 == pytest.approx(billions, abs=0.006), name  # cards give two decimals


# ---------------------------------------------------------------- loss


@pytest.mark.rounding
@pytest.mark.bf16
@pytest.mark.parametrize("dtype, loss_error, gradient_error", [
    (torch.float32, 1e-6, 1e-5),  # sums in another order
    (torch.bfloat16, 4e-3, 0.02),  # a logit is off by up to 1/256 of itself, its gradient is rounded to 8 bits
])
@pytest.mark.parametrize("chunk", [1, 7, 320, 400])  # 7 leaves a rest of 5 tokens; 320 and 400 are all at once
def test_chunked_cross_entropy_equals_the_full_one(chunk, dtype, loss_error, gradient_error):
    S, D, V = 320, 8, 512
    generator = torch.Generator().manual_seed(0)
    h_SD = torch.randn(S, D, generator=generator, dtype=dtype, requires_grad=True)
    w_VD = torch.randn(V, D, generator=generator, dtype=dtype, requires_grad=True)
    targets_S = torch.randint(0, V, (S,), generator=generator)
    ignored = [3, 11, -1]
    targets_S[ignored] = lm.IGNORE

    exact_h_SD = h_SD.detach().float().requires_grad_()
    exact_w_VD = w_VD.detach().float().requires_grad_()
    expected = F.cross_entropy(exact_h_SD @ exact_w_VD.T, targets_S, reduction="sum")
    expected_grads = torch.autograd.grad(expected * 0.37, [exact_h_SD, exact_w_VD])

    head = lm.LMHead(lm.parse_config(conftest.SHAPE))
    loss = lm.ChunkedCrossEntropy.apply(h_SD, w_VD, targets_S, chunk, True, head.loss_and_grad_)
    # a factor after the loss: gradients are made in the forward, before it is known
    grads = torch.autograd.grad(loss * 0.37, [h_SD, w_VD], retain_graph=True)
    assert loss.item() == pytest.approx(expected.item(), rel=loss_error)
    for got, want in zip(grads, expected_grads):
        assert (got.float() - want).norm() < gradient_error * want.norm()
    grad_h_SD = grads[0]
    assert not grad_h_SD[ignored].any()
    with pytest.raises(RuntimeError, match="backward ran twice"):  # gradients were scaled in place
        loss.backward()


def test_a_sure_targets_gradient_is_not_rounded_away_in_16_bits():
    logits_CV = torch.zeros(1, 8, dtype=torch.bfloat16)
    logits_CV[0, 3] = 12
    _, grad_CV = lm.cross_entropy_and_grad(logits_CV, torch.tensor([3]))
    probability = logits_CV.float().softmax(1)[0, 3].item()
    exact = probability - 1  # -4e-5; 1 - 4e-5 is 1 in bf16, and the gradient would be 0
    assert grad_CV[0, 3].item() == pytest.approx(exact, rel=0.01)  # bf16 has 8 bits, float32's 1 - 4e-5 another 8


def plain_cross_entropy(logits_CV, targets_C):
    """Ours, as a fork would write it."""
    return F.cross_entropy(logits_CV, targets_C, reduction="none")


@pytest.mark.rounding
@pytest.mark.bf16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [0, 7, 300, 1024])  # all at once without chunks, several, a chunk in two parts, one
@pytest.mark.parametrize("name", ["per_token", "trained head", "capped", "without a target"])
def test_a_loss_written_as_a_plain_function_is_ours(name, chunk, dtype):
    config = lm.parse_config(conftest.SHAPE)
    if name == "capped":
        config = lm.parse_config(data.read_json(HERE / "goldens-windows/muse-glimmer/config.json"))
    n_tokens = 400
    generator = torch.Generator().manual_seed(0)
    head = lm.LMHead(config).to(dtype)
    torch.nn.init.normal_(head.weight, std=0.3, generator=generator)
    head.weight.requires_grad_(name != "per_token")  # in chunks, a loss of each token has no gradient of the head
    head.per_token = name == "per_token"
    head.chunk = chunk
    x = torch.randn(1, n_tokens, config.hidden_size, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(config.vocab_size, (1, n_tokens), generator=generator)
    supervised_S = torch.arange(3, n_tokens - 5)
    if name == "without a target":
        supervised_S = supervised_S[:0]
    weights = torch.rand(len(supervised_S), generator=generator)  # as --dpo has them, of each token
    trained = [p for p in (x, head.weight) if p.requires_grad]

    def loss_and_gradients():
        loss = head(x, targets, supervised_S)
        total = loss @ weights if head.per_token else loss
        return [loss.detach(), *torch.autograd.grad(total, trained)]

    ours = loss_and_gradients()
    head.custom_loss = plain_cross_entropy
    rounding = 2**-7 if dtype is torch.bfloat16 else 1e-6  # gradients of logits are in that dtype
    for got, expected in zip(loss_and_gradients(), ours, strict=True):
        assert got.dtype == expected.dtype
        assert (got - expected).norm() <= rounding * expected.norm()


def with_z_loss(logits_CV, targets_C):
    """A fork's loss: cross-entropy plus the squared log of the softmax's total (PaLM, arXiv:2204.02311)."""
    return plain_cross_entropy(logits_CV, targets_C) + logits_CV.logsumexp(-1).square()


@pytest.mark.rounding
def test_a_forks_loss_sees_capped_logits_and_its_gradient_passes_the_cap():
    config = lm.parse_config(data.read_json(HERE / "goldens-windows/muse-glimmer/config.json"))
    torch.manual_seed(0)
    head = lm.LMHead(config)
    torch.nn.init.normal_(head.weight)
    head.custom_loss = with_z_loss
    x = torch.randn(1, 20, config.hidden_size, requires_grad=True)
    targets = torch.arange(20)
    loss = head(x, targets[None], torch.arange(20))
    grads = torch.autograd.grad(loss, [x, head.weight])

    logits = head(x)[0]  # capped, by the code of generation
    cross_entropy = F.cross_entropy(logits, targets, reduction="sum")
    expected = cross_entropy + logits.logsumexp(-1).square().sum()
    expected_grads = torch.autograd.grad(expected, [x, head.weight])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # float32 sums in another order
    for got, want in zip(grads, expected_grads):
        assert (got - want).norm() < 1e-6 * want.norm()


def with_metrics(logits_CV, targets_C):
    """A fork's loss with two metrics: of numbers, which are nan where no token is trained on, and of booleans."""
    losses_C = plain_cross_entropy(logits_CV, targets_C)
    log_z_C = logits_CV.logsumexp(-1).where(targets_C != lm.IGNORE, torch.nan)
    return losses_C, {"log_z": log_z_C, "is_even": logits_CV.argmax(-1) % 2 == 0}


@pytest.mark.rounding
@pytest.mark.parametrize("chunk", [0, 7, 300, 1024])  # as above
@pytest.mark.parametrize("n_targets", [0, 1, 200])  # 56 rows without a target fill up the last ones
def test_metrics_that_a_loss_returns_are_summed_over_the_tokens_that_are_trained_on(chunk, n_targets):
    torch.manual_seed(0)
    head = lm.LMHead(lm.parse_config(conftest.SHAPE))
    torch.nn.init.normal_(head.weight)
    head.chunk = chunk
    x = torch.randn(1, 400, head.weight.shape[1], requires_grad=True)
    targets = torch.randint(len(head.weight), (1, 400))
    supervised_S = torch.arange(3, 3 + n_targets)
    logits_SV = head(x)[0, supervised_S]
    losses = []
    for loss in (plain_cross_entropy, with_metrics):
        head.custom_loss = loss
        loss_sum = head(x, targets, supervised_S)
        losses.append([loss_sum.detach(), *torch.autograd.grad(loss_sum, [x, head.weight])])
    assert all(map(torch.equal, *losses))
    log_z = logits_SV.logsumexp(-1).sum().item()
    assert set(head.metrics) == {"log_z", "is_even"}  # also without a target: all ranks log the same names
    assert head.metrics["log_z"].item() == pytest.approx(log_z, rel=1e-6)  # float32 sums in another order
    assert head.metrics["is_even"].item() == (logits_SV.argmax(-1) % 2 == 0).sum().item()
    head(x, targets, supervised_S)
    assert head.metrics["log_z"].item() == pytest.approx(log_z, rel=1e-6)  # those of the last forward alone


@pytest.mark.parametrize("chunk", [0, 64])
def test_a_forks_loss_sees_which_rows_have_no_target(chunk):
    """A sum inside it would else count them, as tokens of any number."""
    head = lm.LMHead(lm.parse_config(conftest.SHAPE))
    torch.nn.init.normal_(head.weight)
    head.chunk = chunk
    seen = []

    def loss(logits_CV, targets_C):
        seen.extend(targets_C.tolist())
        return plain_cross_entropy(logits_CV, targets_C)

    head.custom_loss = loss
    targets = torch.arange(100, 300)
    head(torch.ones(1, 200, head.weight.shape[1]), targets[None], torch.arange(130))
    assert [target for target in seen if target != lm.IGNORE] == targets[:130].tolist()
    assert len(seen) == 200


@pytest.mark.parametrize("values", [torch.mean, lambda losses_C: losses_C.expand(2, -1)], ids=["a mean", "two rows"])
def test_a_metric_that_is_not_one_number_a_token_is_an_error(values):
    head = lm.LMHead(lm.parse_config(conftest.SHAPE))
    torch.nn.init.normal_(head.weight)

    def loss(logits_CV, targets_C):
        losses_C = plain_cross_entropy(logits_CV, targets_C)
        return losses_C, {"values": values(losses_C)}

    head.custom_loss = loss
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        head(torch.ones(1, 20, head.weight.shape[1]), torch.arange(20)[None], torch.arange(20))


def test_no_supervised_token_gives_zero_loss_and_a_working_backward():
    model = build(GOLDENS[0])
    tokens = torch.ones(1, 4, dtype=torch.int64)
    loss = model(tokens, torch.full_like(tokens, lm.IGNORE))
    loss.backward()
    assert loss.item() == 0
    for name, p in model.named_parameters():
        assert p.grad is not None, name  # FSDP2 reduces the gradient over ranks that may have targets
        assert not p.grad.any(), name


# ---------------------------------------------------------------- attention by documents


def block_diagonal_mask(pairs, n):
    """[n, n] bool: which tokens see each other, if each document stands alone."""
    mask = torch.zeros(n, n, dtype=torch.bool)
    for start, stop in pairs:
        length = stop - start
        mask[start:stop, start:stop] = torch.ones(length, length).tril().bool()
    return mask


@pytest.mark.rounding
@pytest.mark.bf16
@pytest.mark.parametrize("dtype, tolerance", [
    (torch.float32, 1e-6),
    (torch.bfloat16, 2**-6),  # of numbers below 4, whose neighbours in bf16 are that far apart
])
@pytest.mark.parametrize("T, pairs", [
    (40, [(0, 7), (7, 8), (8, 33), (40, 80)]),  # tokens 33 to 39 are padding
    (64, [(0, 64), (64, 128)]),  # equal documents, in one call
])
def test_attention_by_documents_equals_a_block_diagonal_mask(T, pairs, dtype, tolerance):
    B, H, G, K = 2, 4, 2, 8
    generator = torch.Generator().manual_seed(1)
    qkv = []
    for n_heads in (H, G, G):
        t = torch.randn(B, T, n_heads, K, generator=generator).to(dtype)
        qkv.append(t.requires_grad_())

    mask = block_diagonal_mask(pairs, B * T)
    is_real = mask.any(1)
    mask[~is_real, ~is_real] = True  # softmax of nothing would be nan
    qkv_of_one_row = [t.float().reshape(1, B * T, -1, K).transpose(1, 2) for t in qkv]
    expected_1HNK = F.scaled_dot_product_attention(*qkv_of_one_row, attn_mask=mask, enable_gqa=True)
    expected_NE = expected_1HNK.transpose(1, 2).reshape(B * T, H * K)
    expected = expected_NE[is_real].to(dtype)

    out_BTE = lm.attend(*qkv, data.pack_spans(pairs, B * T))
    out = out_BTE.view(B * T, H * K)[is_real]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    grads = torch.autograd.grad(out, qkv, torch.ones_like(out))
    expected_grads = torch.autograd.grad(expected, qkv, torch.ones_like(expected))
    torch.testing.assert_close(grads, expected_grads, atol=4 * tolerance, rtol=tolerance)


# ---------------------------------------------------------------- LoRA


TARGETS = lm.ATTENTION_TARGETS + lm.MLP_TARGETS
DOTTED = [
    *[f"self_attn.{target}" for target in lm.ATTENTION_TARGETS],
    *[f"mlp.{target}" for target in lm.MLP_TARGETS],
]
MODULES = {  # what target_modules of the same adapter may say
    "none": None,  # PEFT has defaults for a family
    "all-linear": "all-linear",
    "pattern": r".*\.(q|k|v|o|gate|up|down)_proj",
    "names": [*TARGETS],
    "longer names": DOTTED,
    "every layer": [f"model.layers.{number}.{end}" for number in range(N_BLOCKS) for end in DOTTED],
    "names of other models": [*TARGETS, "query_key_value", "j_proj", "proj.q_proj"],  # PEFT skips what no layer is
}


@pytest.mark.parametrize("modules", MODULES.values(), ids=MODULES)
def test_an_adapter_is_read_back_with_the_layers_that_its_tensors_name(tmp_path, modules):
    model = build_random("lora")
    tensors = dict(data.full_tensors(model, trainable_only=True))
    data.save_adapter(tensors, tmp_path, "base", 4, 8, 0.1, TARGETS)
    config_file = tmp_path / "adapter_config.json"
    config = json.loads(config_file.read_text())
    config["target_modules"] = modules
    config_file.write_text(json.dumps(config))
    source, flags = data.open_adapter(tmp_path)
    assert flags == {
        "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.1, "rslora": False,
        "train_embeddings": False, "lora_targets": list(TARGETS)}
    data.check_weights(build_random("lora"), source, tmp_path)


@pytest.mark.rounding
@torch.no_grad()
@pytest.mark.parametrize("flags, scale", [
    ([], 6 / 16),
    (["--rslora"], 6 / 4),  # the root of the rank
])
def test_an_adapter_adds_its_product_times_its_scale(flags, scale):
    model, _ = conftest.build("--lora", "--lora_rank", 16, "--lora_alpha", 6, *flags)
    layer = model.model.layers[0].mlp.up_proj
    layer.lora_B.weight.normal_()  # zeros would hide the scale
    x = torch.randn(5, layer.in_features)
    product = x @ layer.lora_A.weight.T @ layer.lora_B.weight.T
    torch.testing.assert_close(layer(x), x @ layer.weight.T + scale * product)


def test_an_adapter_of_experts_lists_its_modules_and_has_no_dropout(tmp_path):
    tensors = {"model.layers.0.mlp.experts.1.down_proj.lora_A.weight": torch.zeros(8, 16)}
    data.save_adapter(tensors, tmp_path, "base", 8, 16, 0.1, ["down_proj"])
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj"]
    assert config["lora_dropout"] == 0  # PEFT makes one stack of the experts, which has none
    _, flags = data.open_adapter(tmp_path)
    assert flags["lora_targets"] == ["down_proj"]


def test_merging_takes_what_is_trained_in_full(tmp_path):
    source = data.WeightFiles(HERE / "tiny")
    files = data.find_model("tiny", False)
    norm = source.tensors["model.norm.weight"]
    adapter = {"model.norm.weight": torch.zeros(norm.shape, dtype=norm.dtype)}  # a fork trains the last norm
    data.save_adapter(adapter, tmp_path, "tiny", 1, 1, 0.0, [])
    saved = data.WeightFiles(tmp_path, data.ADAPTER_WEIGHTS)
    args = SimpleNamespace(lora_rank=1, lora_alpha=1, rslora=False)
    data.merge(args, source, saved, files, data.Tokenizer(HERE / "tiny"), tmp_path)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in load_file(HERE / "tiny" / "model.safetensors").items():
        assert torch.equal(merged.pop(name), adapter.get(name, tensor)), name
    assert not merged


# ---------------------------------------------------------------- tiles


@pytest.mark.rounding
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("tile", [96, 32, 7])  # all 96 tokens, three equal tiles, thirteen and a rest of 5
def test_tiles_do_not_change_loss_and_gradients(method, tile, checkpointing):
    expected_loss, expected_grads = loss_and_gradients(build_random(method))
    loss, grads = loss_and_gradients(build_random(method, tile, checkpointing))
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert grads.keys() == expected_grads.keys()
    # the gradient of a weight is summed tile by tile: float32 rounding of up to 14 terms, and none of one
    tolerance = 0 if tile == 96 else 1e-5
    for name, grad in grads.items():
        assert_close(grad, expected_grads[name], tolerance)


QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
GROUPS = {  # name: (number of groups, query heads of each, key heads of each, shape)
    "eight": (8, 2, 1, EIGHT),
    "three": (3, 4, 1, {"num_attention_heads": 12, "num_key_value_heads": 3}),
    "sixteen": (16, 1, 1, {"num_attention_heads": 16, "num_key_value_heads": 16}),
    "one": (1, 4, 1, {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "windows, gates": (8, 2, 1, MUSE | EIGHT),
    "gates in q_proj": (8, 2, 1, QWEN35 | EIGHT),
    "biases": (8, 2, 1, QWEN2 | EIGHT),
}


@pytest.mark.rounding
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", GROUPS)
def test_attention_by_groups_of_heads_changes_no_gradient(name, checkpointing, precision, monkeypatch):
    n_groups, H, G, shape = GROUPS[name]
    n_heads = []  # of each call
    attend = lm.attend_here

    def noting_attend(spans, window, q, k, v):
        n_heads.append((q.shape[2], k.shape[2]))
        return attend(spans, window, q, k, v)

    whole = build_random("qlora", checkpointing=checkpointing, **shape)
    lm.set_precision_(whole, precision)
    expected_loss, expected_grads = loss_and_gradients(whole)
    monkeypatch.setattr(lm, "attend_here", noting_attend)
    model = build_random("qlora", 40, checkpointing, seq_len=LONG, **shape)
    lm.set_precision_(model, precision)
    loss, grads = loss_and_gradients(model)
    n_attention = model.config.num_hidden_layers - model.config.layer_types.count("linear_attention")
    n_forwards = 2 if checkpointing else 1
    assert n_heads == [(H, G)] * (n_groups * n_attention * n_forwards)
    # Sums in another order, which depends on the number of threads, too. In float32, Gated DeltaNet magnifies rounding:
    # weights that change by 2**-24 of themselves change a gradient of it by 4e-6. In bf16 a gradient is rounded before
    # and after sums; without tiles it is 0.03 to 0.07 from that in float32.
    tolerance = 1e-5 if precision == "fp32" else 0.01
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert grads.keys() == expected_grads.keys()
    for key, grad in grads.items():
        expected = expected_grads[key]
        assert (grad - expected).norm() <= tolerance * expected.norm(), key


@pytest.mark.parametrize("seq_len, n_ranks, n_groups", [
    (4096, 1, 1), (8192, 1, 1), (16384, 1, 2), (24576, 1, 2), (32768, 1, 4), (65536, 1, 8), (1 << 20, 1, 8),
    (1 << 20, 2, 4), (1 << 20, 8, 1), (1 << 20, 3, 1),  # ranks that share a row
])
def test_long_rows_have_more_groups_of_heads(seq_len, n_ranks, n_groups):
    model = build_random(**EIGHT)
    lm.tile_mlp_(model, 40, seq_len, n_ranks)
    assert {block.n_groups for block in model.model.layers} == {n_groups}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_tile_runs_once_in_the_forward_and_once_in_the_backward(monkeypatch, checkpointing):
    n_tokens = []  # in each call of a tile's first half
    start = lm.MLP.start

    def noting_start(self, h):
        n_tokens.append(len(h))
        return start(self, h)

    monkeypatch.setattr(lm.MLP, "start", noting_start)
    model = build_random("full", 40, checkpointing)
    loss_and_gradients(model)
    # 96 tokens are two tiles of 40 and one of 16. If a tile kept its own input, the second forward of a checkpointed
    # block would have to run up to it, and each tile would run three times.
    assert Counter(n_tokens) == {40: 2 * 2 * N_BLOCKS, 16: 2 * N_BLOCKS}


@pytest.mark.rounding
@pytest.mark.parametrize("method, shape", [
    ("qlora", {}),
    ("lora", QWEN35),
], ids=["qwen3", "qwen3.5-moe"])
@pytest.mark.parametrize("tile", [0, 20])
def test_a_recomputation_drops_the_inputs_that_the_forward_has_dropped(method, shape, tile):
    expected_loss, expected_grads = loss_and_gradients(build_random(method, tile, dropout=0.3, **shape))
    loss, grads = loss_and_gradients(build_random(method, tile, checkpointing=True, dropout=0.3, **shape))
    assert loss == expected_loss
    for name, grad in grads.items():  # another mask would be 0.1 away
        assert torch.equal(grad, expected_grads[name]), name


@pytest.mark.rounding
@pytest.mark.parametrize("method", ["full", "lora"])
def test_experts_in_16_bits_get_rows_by_32_on_a_cpu_which_change_nothing(monkeypatch, method):
    plain_linear = nf4.linear
    n_rows = set()  # that experts have been given

    def noting_linear(x, w_ND, row_stops=None):
        if row_stops is not None:
            first = row_stops.new_zeros(1)
            n_rows.update(row_stops.diff(prepend=first).tolist())
        return plain_linear(x, w_ND, row_stops)

    def run(multiple):
        """(loss, gradients), where rows are filled up to a multiple"""
        monkeypatch.setattr(lm, "length_multiple", lambda q: multiple)
        model = build_random(method, **MOE)
        lm.set_precision_(model, "mixed")
        n_rows.clear()
        results = loss_and_gradients(model)
        assert len(n_rows) > 1
        # each new number would cost 0.6 MiB of oneDNN's kernels: 1.3 GiB of a small model
        assert all(n % multiple == 0 for n in n_rows)
        return results

    monkeypatch.setattr(nf4, "linear", noting_linear)
    expected_loss, expected_grads = run(1)
    loss, grads = run(32)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, grad in grads.items():  # bf16 products of another height may be summed in another order
        expected = expected_grads[name]
        assert (grad - expected).norm() <= 0.02 * expected.norm(), name


# ---------------------------------------------------------------- dropout


def test_an_adapter_does_not_see_inputs_that_are_dropped_and_the_mean_stays():
    rate = 0.25
    model = build_random("lora", dropout=rate)
    x = torch.randn(2, 48, 64, requires_grad=True)
    torch.manual_seed(0)
    kept = []
    attention = model.model.layers[0].self_attn
    for layer in (attention.q_proj, attention.k_proj):
        # adapters that pass their first 8 inputs on, so that what they see can be read off
        layer.lora_A.weight.data = torch.eye(8, 64)
        layer.lora_B.weight.data = torch.eye(layer.out_features, 8)
        delta = layer(x) - x @ layer.weight.T
        seen = delta[..., :8] / layer.lora_scale
        is_kept = seen.abs() > 1e-3 * x[..., :8].abs()  # float32 rounding is 1e-6
        expected = torch.where(is_kept, x[..., :8] / (1 - rate), 0)
        torch.testing.assert_close(seen, expected, atol=1e-5, rtol=1e-5)
        # of 768 draws: within 4 standard deviations of 0.016
        assert is_kept.float().mean() == pytest.approx(1 - rate, abs=0.064)

        (grad_x,) = torch.autograd.grad(delta[..., :8].sum(), x, retain_graph=True)
        assert ((grad_x[..., :8].abs() > 1e-3) == is_kept).all()
        kept.append(is_kept)
    assert not torch.equal(*kept)


# ---------------------------------------------------------------- files

TWO_FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
FILES_OF_OTHERS = ["model-old", "model-00001-of-2", "consolidated", "modelx-00001-of-00009"]


@pytest.mark.parametrize("files, has_index", [
    (["model.safetensors"], False),
    (["model.safetensors"], True),
    (TWO_FILES, True),
    (["a.safetensors", "b.safetensors", "model-00001-of-00009.safetensors"], True),  # the index alone decides
], ids=str)
def test_the_files_of_a_model_are_read_bit_for_bit_and_no_others(tmp_path, files, has_index):
    model = build_random()
    tensors = dict(data.full_tensors(model, False))
    places = {name: files[number % len(files)] for number, name in enumerate(tensors)}
    for file in files:
        in_file = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        save_file(in_file, tmp_path / file)
    if has_index:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for name in FILES_OF_OTHERS:
        save_file({"other": torch.ones(1)}, tmp_path / f"{name}.safetensors")

    source = data.WeightFiles(tmp_path)
    data.check_weights(model, source, tmp_path)  # a tensor of another file would be one too many
    for name, p in model.named_parameters():
        assert torch.equal(source.rows(name, 0, len(p)), p.data), name


def test_a_file_that_a_full_disk_refuses_is_named_with_the_part_of_it():
    model = build_random()
    with pytest.raises(OSError, match="/dev/full: tensors not written: No space left"):
        data.write_safetensors("/dev/full", data.layout_of(dict(model.named_parameters())), [])


def test_a_rank_that_cannot_write_goes_on_gathering_for_the_others():
    model = build_random()
    tensors = iter(list(model.named_parameters()))  # with --fsdp2 each next() is a collective
    layout = data.layout_of(dict(model.named_parameters()))
    with pytest.raises(OSError, match=r"/dev/null/model\.safetensors"):
        data.save_model(tensors, layout, Path("/dev/null"), conftest.SHAPE, write=True)
    assert next(tensors, None) is None


@pytest.mark.parametrize("family", ["llama3.1", "llama-linear", "qwen2", "qwen2-yarn", "qwen3-yarn"])
@pytest.mark.parametrize("version", [4, 5])
def test_exported_config_has_rope_as_transformers_4_and_5_spell_it(tmp_path, family, version):
    config = data.read_json(HERE / "goldens" / family / "config.json")  # as version 5 writes it
    scaling = dict(config["rope_parameters"])
    spelled_by_4 = {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    if family == "qwen2":  # which has no scaling, for which version 4 writes null
        spelled_by_4["rope_scaling"] = None
    given = config
    if version == 4:
        given = config | spelled_by_4
        del given["rope_parameters"]
    data.save_model(iter([]), {}, tmp_path, given, write=True)
    written = data.read_json(tmp_path / "config.json")
    assert written == config | spelled_by_4 | {"torch_dtype": config["dtype"]}
    assert lm.parse_config(written) == lm.parse_config(config)


def test_numbers_are_written_as_they_were_given(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}
    given = data.read_json(HERE / "goldens/qwen3-yarn/config.json") | {"rope_parameters": yarn, "rope_theta": 1000000}
    data.save_model(iter([]), {}, tmp_path, given, write=True)
    written = (tmp_path / "config.json").read_text()
    assert '"factor": 4,' in written
    assert '"rope_theta": 1000000\n' in written
    for alpha, text in {64.0: "64", 0.5: "0.5"}.items():
        data.save_adapter({}, tmp_path, "base", 4, alpha, 0.1, [])
        assert f'"lora_alpha": {text},' in (tmp_path / "adapter_config.json").read_text()  # Ollama refuses 64.0


def test_a_run_or_an_adapter_is_a_model_and_folders_are_named_absolutely(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert data.find_result("tiny") == ("tiny", None)
    assert data.find_result("Qwen/Qwen3-4B") == ("Qwen/Qwen3-4B", None)
    run = tmp_path / "run"
    final = run / "final"
    final.mkdir(parents=True)
    assert data.find_result("run") == ("run", None)  # without a result the name stays what it is
    data.save_adapter({}, final, "base", 4, 8, 0.1, [])
    assert data.find_result("run") == ("base", "run/final")
    assert data.find_result("run/final") == ("base", "run/final")
    shutil.copytree(data.TINY, run / "merged")
    assert data.find_result("run") == ("base", "run/final")  # what the same words meant before merged/ was made
    shutil.rmtree(final)
    assert data.find_result("run") == ("run/merged", None)
    assert data.find_model("run/merged", False).base == str(run / "merged")
