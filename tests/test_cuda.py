"""Whole runs on a GPU, real or emulated: every flag, what is written, taken and waited for. Where there is no GPU the
first test runs all that is marked gpu on an emulated one."""

import contextlib
import gzip
import io
import json
import os
import pickle
import shutil
import sys

import pytest
import standins
import torch
from conftest import MOE, MUSE, QWEN35, SHAPE, build, curve, run_ranks, start_ranks
from emulated_cuda import LOADED
from safetensors.torch import load_file, save_file

import model as lm
import nf4
import data
import train

# Plackett and Burman's twelve runs: any two of the eleven flags meet in all four combinations.
FLAGS = [("--offload", "--no-activation_checkpointing"), ("--no-chunked_ce", "--ce_chunk 64"), ("--tiled_mlp 200", ""),
         ("--no-reshard_after_forward", ""), ("--no-shard_embeddings", ""), ("--no-packing", ""),
         ("--optim adamw8bit", ""), ("--optim_in_backward", "--grad_accum 2"), ("--save_every 2", ""),
         ("--qlora", ""), ("--precision fp32", "")]
ROWS = [["+-+++---+-+"[column - shift] == "+" for column in range(11)] for shift in range(11)] + [[False] * 11]
PAIRS = [" ".join(["--fsdp2", *(flag[not on] for flag, on in zip(FLAGS, row))]) for row in ROWS]


@pytest.mark.bf16
@pytest.mark.skipif(torch.cuda.is_available(), reason="this process has a GPU")
def test_what_is_marked_gpu_passes_on_an_emulated_device(emulated):
    if isinstance(emulated, Exception):
        assert os.environ.get("OOMPH_EMULATED_CUDA") != "required", emulated
        pytest.skip(f"no emulated GPU: {emulated}")
    process, log = emulated
    code = process.wait()
    print(log.read_text())
    assert code == 0, log.read_text()


@pytest.fixture(scope="module")
def job(folder, chats, tmp_path_factory):
    path = shutil.copytree(folder, tmp_path_factory.mktemp("gpu") / "model")
    save_file(dict(build()[0].named_parameters()), path / "model.safetensors")  # a GPU's random ones would be others
    return ["--model", path, "--data", chats, "--seq_len", 96, "--batch_size", 6, "--steps", 3, "--precision", "mixed",
            "--lr", "1e-3", "--log_every", 1]


@pytest.mark.gpu
@pytest.mark.parametrize("world, flags", [
    *((1, flags) for flags in PAIRS), (1, "--lora --offload"), (1, "--qlora --offload --tiled_mlp 200"),
    (1, "--fsdp2 --offload params --optim adamw8bit --precision bf16 --stochastic_rounding"),
    *([] if LOADED else [(1, "--qlora --compile")]),  # Triton compiles for real GPUs only
    (2, "--fsdp2 --qlora --offload --sequence_parallel 2"), (2, "--fsdp2 --replicas 2 --grad_accum 2 --lora"),
    (2, "--optim_in_backward --no-chunked_ce --precision fp32 --no-fused_adamw"),
])
def test_a_gpu_trains_to_the_losses_of_the_cpu(job, tmp_path, world, flags):
    if not LOADED and world > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    argv = [*job, "--steps", 2, *flags.split()]
    (got, _), (expected, _) = (curve(world, argv, tmp_path / str(gpu), gpu) for gpu in (True, False))
    assert got == pytest.approx(expected, abs=1e-3 if "fp32" in flags else 0.02)  # sums in another order, or 8 bits


def chat(folder):
    del os.environ["RANK"]  # --chat runs alone
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"hello\n"))
    return train.launch(["--chat", "--model", str(folder), "--max_new_tokens", "4"])


@pytest.mark.gpu
def test_a_run_on_a_gpu_writes_all_that_was_asked_for_and_resumes(job, chats, tmp_path):
    argv = [*job, *"--random_init --lora --lora_dropout 0.1 --save_every 1 --keep 9".split()]
    more = ["--eval_every", 2, "--eval_data", chats, "--merge", "--sample", "hello", "--profile", "--memory_snapshot"]
    out = tmp_path / "whole"
    rows, text, codes = run_ranks(1, [*argv, *more], out, gpu=True)
    assert codes == [0] and "after:" in text and [row["step"] for row in rows if "eval_loss" in row] == [2, 3], text
    assert json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))["traceEvents"]
    assert pickle.loads((out / "memory.pickle").read_bytes())["segments"]
    assert all(t.isfinite().all() for t in load_file(out / "merged/model.safetensors").values())
    again, text, codes = run_ranks(1, [*argv, "--resume", out / "checkpoint-1"], tmp_path / "again", gpu=True)
    losses, expected = ([row["loss"] for row in part if "loss" in row] for part in (again, rows))
    # the first is a forward of the very same weights; after it FlashAttention's backward adds up dq in any order
    assert losses[0] == expected[1] and losses == pytest.approx(expected[1:], rel=2e-2), text
    assert start_ranks(1, chat, (out / "merged",), [tmp_path / "chat"], gpu=True) == [0]
    assert (tmp_path / "chat").read_text().strip()


@pytest.mark.gpu
def test_a_gpu_run_that_fails_says_why(job, tmp_path):
    _, text, codes = run_ranks(1, [*job, "--lr", 1e11], tmp_path / "diverges", gpu=True)
    assert codes == [train.NOT_FINITE], text
    assert "not finite: " in text and "no weight was changed by it" in text, text
    _, text, codes = run_ranks(1, [*job, "--gpu_gib", 0.002], tmp_path / "small", gpu=True)
    assert codes == [train.OUT_OF_MEMORY] and "does not fit\n" in text and "use more ranks" in text, text
    assert 0 < json.loads((tmp_path / "small/oom.json").read_text())["max_memory_allocated_gib"] <= 0.002


# ---------------------------------------------------------------- runs of a changed train.py


def run_changed(job, tmp_path, change, *flags, **config):
    """-> (exit code, what it says, its flags) of a run of a model of other sizes, after change()."""
    shutil.copytree(job[1], tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 6} | config))
    argv = [*map(str, [*job, *flags, "--random_init", "--model", tmp_path / "model", "--out", tmp_path / "out"])]
    codes = start_ranks(1, change_and_run, (change, argv), [tmp_path / "log"], gpu=True)
    return codes[0], (tmp_path / "log").read_text(), argv


def change_and_run(change, argv):
    change()
    return train.launch(argv)


@pytest.mark.gpu
@pytest.mark.bf16
@pytest.mark.parametrize("flags", ["--lora --offload --tiled_mlp 384", "--qlora --offload"])
def test_the_plan_is_what_a_gpu_run_of_real_widths_takes(job, tmp_path, flags):
    flags = ["--batch_size", 8, "--steps", 1, *flags.split()]
    change = standins.install_with_zeros if LOADED else list
    config = data.PRESETS["llama-3.2-1b"] | {
        "num_hidden_layers": 2, "vocab_size": 4096, "architectures": ["LlamaForCausalLM"]}
    code, text, argv = run_changed(job, tmp_path, change, *flags, **config)
    assert code == 0, text
    (row,) = map(json.loads, (tmp_path / "out/metrics.jsonl").read_text().splitlines())
    args = train.parse_args(argv)
    config = lm.parse_config(config)
    moments, _ = train.plan(args, config, 1, 96, train.blocks_as_asked(args, config))  # 96 tokens a row
    workspaces = 0 if LOADED or torch.cuda.get_device_capability() < (9, 0) else 2**-4  # cuBLAS's 64 MiB on Hopper
    assert train.peak_of(moments)[1] / 2**30 == pytest.approx(row["mem_gib"] - workspaces, rel=0.05)


@contextlib.contextmanager
def strict():  # an error where the host waits for the device
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def strict_steps():
    for table in (nf4.levels_of_bytes, nf4.code_levels):  # else copied in the first step
        table(torch.device("cuda", 0))
    for owner, name in ((lm.Transformer, "forward"), (torch.Tensor, "backward"), (train, "clip_gradients_"),
                        (torch.optim.AdamW, "step"), (nf4.CompactAdamW, "step"), (train.data.Batch, "to")):
        setattr(owner, name, strict()(getattr(owner, name)))


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ["--lora --offload", "--fsdp2 --qlora --tiled_mlp 200", "--optim adamw8bit"])
def test_the_host_waits_for_nothing_inside_a_step(job, tmp_path, flags):
    code, text, _ = run_changed(job, tmp_path, strict_steps, *flags.split())
    assert code == 0, text


@pytest.mark.gpu
def test_wide_heads_do_not_fall_to_the_math_kernel(job, tmp_path):
    code, text, _ = run_changed(job, tmp_path, list, "--sample", "hello", head_dim=264)  # FlashAttention: 256
    assert not code, text


@pytest.mark.gpu
@pytest.mark.bf16
@pytest.mark.parametrize("changes, flags", [
    (MOE, "--qlora --offload"), (MOE, "--lora --tiled_mlp 200"), (MOE, ""),
    (QWEN35, "--qlora --offload"), (QWEN35, "--fsdp2"), (MUSE, "--qlora --offload"),
    (MUSE, "--no-packing --activation_checkpointing 0"), (MUSE, "--precision fp32"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_other_families_train_on_a_gpu_to_the_losses_of_the_cpu(job, tmp_path, changes, flags):
    path = shutil.copytree(job[1], tmp_path / "model")
    config = SHAPE | changes
    (path / "config.json").write_text(json.dumps(config))
    vanilla = lm.Transformer(lm.parse_config(config))
    data.load_weights_(vanilla, data.RandomWeights(vanilla, 0, torch.device("cpu")), None, 0, torch.device("cpu"))
    save_file(dict(data.full_tensors(vanilla, False)), path / "model.safetensors")
    argv = ["--model", path, *job[2:], "--steps", 2, *flags.split()]
    (got, _), (expected, _) = (curve(1, argv, tmp_path / str(gpu), gpu) for gpu in (True, False))
    assert got == pytest.approx(expected, abs=0.02)  # 8 bits of mantissa


def on_side_stream(self, parked, plain=train.OffloadActivations.bring_back):
    with torch.cuda.stream(self.stream):  # whose memory it then is
        plain(self, parked)


GUARDS = {  # what is left out of it, and how that shows: the first two are the corruptions that its docstring tells of
    "release": (train.OffloadActivations, lambda self, n_held: self.leaving.clear(), "gradients, first that of"),
    "bring_back": (train.OffloadActivations, on_side_stream, "is given away again while"),
    "wait_stream": (torch.cuda.Stream, lambda *_: None, "that the default stream still works on"),
}


@pytest.mark.gpu
@pytest.mark.skipif(not LOADED, reason="a real GPU may be lucky")
@pytest.mark.parametrize("name", GUARDS)
def test_offload_without_one_of_its_guards_is_caught(job, tmp_path, name):
    owner, method, words = GUARDS[name]
    code, text, _ = run_changed(job, tmp_path, lambda: setattr(owner, name, method), "--lora", "--offload")
    assert code and words in text, text
