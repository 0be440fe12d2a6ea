"""--train_embeddings: embedding and head trained in full beside adapters, whole and tied, over ranks, resumed, merged
and in PEFT's files. check_peers.py holds the files against PEFT itself."""

import argparse
import filecmp
import json
import shutil

import pytest
import torch
from conftest import (
    build, check_merges_later, check_same_gradients, check_same_weights, curve, in_ci, losses, model_with_weights,
    norm_of_update, run_ranks)
from safetensors.torch import load_file, save_file

import data
import model as lm
import train

TIED_OR_NOT = {
    "untied": {"num_hidden_layers": 2},
    "tied": {"num_hidden_layers": 2, "tie_word_embeddings": True},
}
EMBEDDING = data.PEFT_PREFIX + data.EMBEDDING
HEAD = data.PEFT_PREFIX + data.HEAD
FLAGS = "--lora --train_embeddings --lora_rank 5 --lr 1e-2 --precision fp32 --seq_len 96 --steps 3".split()
SIX_ROWS = ["--batch_size", 3, "--grad_accum", 2]


@pytest.fixture(scope="module", params=TIED_OR_NOT)
def base(request, tmp_path_factory):
    """A folder with random weights."""
    return model_with_weights(tmp_path_factory.mktemp("base") / request.param, **TIED_OR_NOT[request.param])


@pytest.fixture(scope="module")
def argv(base, chats):
    return ["--model", base, "--data", chats, *FLAGS]


@pytest.fixture(scope="module")
def plain(argv, tmp_path_factory):
    """(losses, norms, the folder) of a run on one rank, merged at its end."""
    out = tmp_path_factory.mktemp("plain") / "run"
    got, norms = curve(1, [*argv, *SIX_ROWS, "--save_every", 1, "--keep", 9, "--merge"], out)
    return got, norms, out


def adapter_of(out):
    return load_file(out / "final" / "adapter_model.safetensors")


def test_embedding_and_head_are_trained_and_written_as_peft_reads_them(base, plain):
    _, _, out = plain
    adapter = adapter_of(out)
    config = data.read_json(out / "final/adapter_config.json")
    weights = load_file(base / "model.safetensors")
    is_tied = data.HEAD not in weights
    assert config["modules_to_save"] == ["embed_tokens", "lm_head"]
    assert config.get("ensure_weight_tying", False) is is_tied
    assert not torch.equal(adapter[EMBEDDING], weights[data.EMBEDDING])
    if is_tied:
        assert torch.equal(adapter[HEAD], adapter[EMBEDDING])
    else:
        assert not torch.equal(adapter[HEAD], weights[data.HEAD])


@pytest.mark.rounding
@pytest.mark.parametrize("world, flags", [
    (2, "--batch_size 3 --grad_accum 2 --sequence_parallel 2 --fsdp2 --no-shard_embeddings --no-chunked_ce"),
    (3, "--batch_size 2 --grad_accum 1 --fsdp2 --offload --tiled_mlp 100 --no-activation_checkpointing"),
    *in_ci(
        (2, "--batch_size 1 --grad_accum 3 --fsdp2"),  # each micro-batch reduces its gradients
        (2, "--batch_size 3 --grad_accum 1"),
    ),
])
def test_ranks_and_flags_change_no_losses_norms_and_weights(argv, plain, tmp_path, world, flags):
    if "--tiled_mlp" in flags:
        flags = flags.replace("--offload", "--offload params")
    out = tmp_path / "run"
    got, norms = curve(world, [*argv, *flags.split(), "--save_every", 1, "--keep", 9], out)
    # float32: only the order of sums differs
    assert got == pytest.approx(plain[0], abs=1e-5)
    assert norms == pytest.approx(plain[1], rel=1e-4)
    for step in (1, 2, 3):
        check_same_gradients(out / f"checkpoint-{step}", plain[2] / f"checkpoint-{step}")
    check_same_weights(adapter_of(out), adapter_of(plain[2]), norm_of_update(plain[2], 3))


@pytest.mark.rounding
def test_a_resumed_run_ends_with_the_same_bytes_and_in_another_world_with_the_same_weights(argv, plain, tmp_path):
    for world, flags in ((1, SIX_ROWS), (2, ["--fsdp2", "--batch_size", 3])):
        out = tmp_path / f"{world}"
        _, text, codes = run_ranks(world, [*argv, *flags, "--resume", plain[2] / "checkpoint-2"], out)
        assert codes == [0] * world, text
        found = adapter_of(out)
        expected = adapter_of(plain[2])
        if world > 1:
            check_same_weights(found, expected, norm_of_update(plain[2], 3))
            continue
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.unperturbed
@pytest.mark.parametrize("world", [1, 3])
def test_an_adapter_with_embeddings_is_read_and_written_byte_for_byte(base, chats, plain, tmp_path, world):
    final = plain[2] / "final"
    flags = ["--adapter", final, "--lr", 0, "--steps", 1, "--seq_len", 96, "--precision", "fp32"]
    if world > 1:
        flags.append("--fsdp2")
    losses(world, ["--model", base, "--data", chats, *flags], tmp_path / "run")
    name = "adapter_model.safetensors"
    assert filecmp.cmp(final / name, tmp_path / "run/final" / name, shallow=False)


def test_embeddings_are_merged_later_to_the_same_bytes(plain, tmp_path):
    check_merges_later(plain[2], tmp_path)


def logits_of(folder):
    """Those of a model's folder, or of an adapter's with its base."""
    args = train.parse_args(["--model", str(folder), "--precision", "fp32", "--dry_run"])
    opened = train.open_model(args, train.Ranks(False, 1800))
    opened.model.to_empty(device="cpu").tie_()
    data.load_weights_(opened.model, opened.reader, opened.adapter_reader, 0, torch.device("cpu"))
    with torch.no_grad():
        return opened.model(torch.arange(40)[None])


@pytest.mark.rounding
def test_the_merged_model_computes_what_base_and_adapter_do(plain):
    out = plain[2]
    torch.testing.assert_close(logits_of(out / "final"), logits_of(out / "merged"), atol=1e-4, rtol=1e-4)


def changed_adapter(final, folder, tensors=None, **keys):
    shutil.copytree(final, folder)
    config = data.read_json(folder / "adapter_config.json") | keys
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if tensors:
        save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_embedding_and_head_are_read_together_and_other_modules_are_refused(plain, tmp_path):
    final = plain[2] / "final"
    # of a resized vocabulary PEFT writes both, whatever modules_to_save names
    for i, modules in enumerate((["model.embed_tokens", "lm_head"], ["embed_tokens"], None)):
        adapter = changed_adapter(final, tmp_path / f"good-{i}", modules_to_save=modules)
        assert data.open_adapter(adapter)[1]["train_embeddings"]
    of_one = {name: tensor for name, tensor in adapter_of(plain[2]).items() if not name.endswith("lm_head.weight")}
    bad = changed_adapter(final, tmp_path / "one", of_one, modules_to_save=["embed_tokens"])
    with pytest.raises(ValueError, match="beside adapters there is embed_tokens: expected embed_tokens and lm_head"):
        data.open_adapter(bad)


def test_an_adapter_with_another_head_than_its_embedding_has_both(base, chats, plain, tmp_path):
    tensors = adapter_of(plain[2])
    tensors[HEAD] = tensors[HEAD] + 1
    folder = changed_adapter(plain[2] / "final", tmp_path / "adapter", tensors)
    flags = ["--adapter", folder, "--steps", 1, "--seq_len", 96, "--lr", 0, "--merge", "--precision", "fp32"]
    out = tmp_path / "run"
    losses(1, ["--model", base, "--data", chats, *flags], out)
    written = adapter_of(out)
    merged = load_file(out / "merged/model.safetensors")
    for name in (EMBEDDING, HEAD):
        assert torch.equal(written[name], tensors[name])
        assert torch.equal(merged[name.removeprefix(data.PEFT_PREFIX)], tensors[name])
    # as PEFT loads them: two matrices, and a base that is not tied any more
    assert not data.read_json(out / "merged/config.json").get("tie_word_embeddings")
    torch.testing.assert_close(logits_of(out / "final"), logits_of(out / "merged"), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("flags, message", [
    ("--train_embeddings", "full fine-tuning already trains the embeddings"),
    ("--train_embeddings --lora --dpo", "--dpo: leave out --train_embeddings"),
    ("--train_embeddings --model tiny --adapter folder", "--train_embeddings and --adapter: leave one out"),
])
def test_what_cannot_work_is_refused(flags, message):
    with pytest.raises(argparse.ArgumentError, match=message):
        train.parse_args(flags.split())


def test_a_rate_of_embeddings_without_any_is_refused(tmp_path, capsys):
    assert train.launch(["--lora", "--embedding_lr", "1e-4", "--out", str(tmp_path / "run")]) == 2
    assert "--embedding_lr needs --train_embeddings" in capsys.readouterr().err


@pytest.mark.parametrize("flags, lr, embedding_lr", [
    (["--lr", 1e-3], 1e-3, 1e-4),  # what is right for adapters is too high for weights that are trained in full
    (["--lr", 1e-3, "--embedding_lr", 3e-4], 1e-3, 3e-4),
    (["--lr", 0, "--embedding_lr", 3e-4], 0.0, 3e-4),
    (["--lr", 1e-3, "--embedding_lr", 3e-4, "--min_lr", 1e-4], 1e-3, 3e-4),
])
def test_embedding_and_head_have_a_rate_of_their_own(flags, lr, embedding_lr):
    model, args = build("--lora", "--train_embeddings", "--warmup", 0, *flags)
    train.resolve_for_model(args, model.config, {}, torch.device("cpu"))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = train.make_optimizer(named, args, torch.zeros(()))
    fraction = args.min_lr / (args.lr or 1)  # of both rates at the end
    for step, expected in ((0, 1), (100, fraction)):
        assert train.set_rates_(optimizer, step, 100, args) == pytest.approx(expected * lr)
        rate_of = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        assert len(rate_of) == len(named)
        for name, p in named.items():
            of_peak = lr if ".lora_" in name else embedding_lr
            assert rate_of[id(p)] == pytest.approx(expected * of_peak), name


def test_the_heads_own_gradient_is_counted():
    config = lm.parse_config(json.loads((data.TINY / "config.json").read_text()))
    counts = lm.Counts(targets=100, tokens=200, squares=200**2)
    more = lm.step_flops(config, counts, True, trains_head=True) - lm.step_flops(config, counts, True)
    assert more == 2 * 100 * config.vocab_size * config.hidden_size  # 2 a weight and target
    assert lm.step_flops(config, counts, False, trains_head=True) == lm.step_flops(config, counts, False)
