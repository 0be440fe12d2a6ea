"""Whole runs on a GPU, real or emulated: every flag, what is written, taken and waited for. Where there is no GPU the
first test runs all that is marked gpu on an emulated one (emulated_cuda.py says what that shows)."""

import functools
import gzip
import io
import itertools
import json
import os
import pickle
import re
import shutil
import sys

import pytest
import standins
import torch
import torch.nn.functional as F
from conftest import MOE, MUSE, QWEN35, SHAPE, curve, model_with_weights, random_model, run_ranks, start_ranks
from emulated_cuda import LOADED
from packed_goldens import pairs_of
from safetensors.torch import load_file, save_file

import model as lm
import nf4
import data
import train

CPU = torch.device("cpu")
ROWS_OF_A_RANK = 6  # in a micro-batch


@pytest.mark.rounding
@pytest.mark.bf16
@pytest.mark.skipif(torch.cuda.is_available(), reason="this process has a GPU")
def test_what_is_marked_gpu_passes_on_an_emulated_device(emulated):
    if isinstance(emulated, Exception):  # there is no compiler, for example; .ci/run requires one
        assert os.environ.get("OOMPH_EMULATED_CUDA") != "required", emulated
        pytest.skip(f"no emulated GPU: {emulated}")
    process, log = emulated
    code = process.wait()
    print(log.read_text())
    assert code == 0, log.read_text()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model with weights in a file: --random_init draws other ones on a GPU than on a CPU."""
    return model_with_weights(tmp_path_factory.mktemp("gpu") / "model")


@pytest.fixture(scope="module")
def settings(chats):
    """The flags of every run here, beside its model."""
    # In the second step memory is reused that the first has left, and all adapters have gradients.
    sizes = ["--data", chats, "--seq_len", 96, "--batch_size", ROWS_OF_A_RANK, "--steps", 2]
    return [*sizes, "--precision", "mixed", "--lr", "1e-3", "--log_every", 1]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Rows for --dpo."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    question = [{"role": "user", "content": "the file"}]
    with open(path, "w") as file:
        for n in range(1, 60):
            chosen = [{"role": "assistant", "content": "is read from disk " * (1 + n % 4)}]
            rejected = [{"role": "assistant", "content": "returned as a list " * (1 + n % 3)}]
            file.write(json.dumps({"prompt": question, "chosen": chosen, "rejected": rejected}) + "\n")
    return path


@pytest.fixture(scope="module")
def job(model_folder, settings):
    return ["--model", model_folder, *settings]


def losses_on(device, world, argv, folder):
    """The loss of each step of a run on the device "gpu" or "cpu"."""
    losses, _ = curve(world, argv, folder / device, gpu=device == "gpu")
    return losses


# ---------------------------------------------------------------- every flag, in pairs


# What a column of the design stands for, where it is + and where it is -.
FLAGS = [
    ("--offload", "--no-activation_checkpointing"),
    ("--no-chunked_ce", "--ce_chunk 64"),  # 64 tokens: several chunks
    ("--tiled_mlp 200", ""),
    ("--no-reshard_after_forward", ""),
    ("--no-shard_embeddings", ""),
    ("--no-packing", ""),
    ("--optim adamw8bit", ""),
    ("--optim_in_backward", "--grad_accum 2"),  # which exclude each other: gradients are freed as they arrive
    ("--save_every 2", ""),
    ("--qlora", ""),
    ("--precision fp32", ""),
]


def plackett_burman():
    """Twelve rows of eleven switches, any two of which meet in all four combinations: the first row, each of its
    rotations, and a row in which all are off (Plackett and Burman, 1946)."""
    first_row = [sign == "+" for sign in "+-+++---+-+"]
    rows = [first_row[-shift:] + first_row[:-shift] for shift in range(11)]
    return [*rows, [False] * 11]


def test_any_two_flags_meet_in_all_four_combinations():
    for two_columns in itertools.combinations(zip(*plackett_burman()), 2):
        assert len(set(zip(*two_columns))) == 4


def runs_in_pairs():
    """[(ranks, flags)], a run of one rank for each row of the design."""
    cases = []
    for row in plackett_burman():
        flags = [if_on if is_on else if_off for is_on, (if_on, if_off) in zip(row, FLAGS)]
        cases.append((1, " ".join(["--fsdp2", *flags])))
    return cases


RUNS = [
    *runs_in_pairs(),
    (1, "--lora --offload"),
    (1, "--qlora --nf5 --offload --tiled_mlp 200"),
    (1, "--fsdp2 --offload params --optim adamw8bit --precision bf16 --stochastic_rounding"),
    (1, "--fsdp2 --qlora --nf5 v_proj down_proj --offload params --resident_blocks 1"),
    (2, "--fsdp2 --qlora --offload --sequence_parallel 2 --resident_blocks 1"),
    (2, "--fsdp2 --replicas 2 --grad_accum 2 --lora"),
    (2, "--optim_in_backward --no-chunked_ce --precision fp32 --no-fused_adamw"),
    (1, "--precision fp16 --fsdp2 --qlora --offload"),
]
if not LOADED:  # Triton compiles for real GPUs only
    RUNS.append((1, "--qlora --compile"))


# of the flags above
MATHEMATICS = (r"--(?:lora|qlora|nf5(?: [a-z]\w+)*|no-packing|optim_in_backward|stochastic_rounding|"
               r"(?:optim|precision) \w+)(?= |$)")


def mathematics_of(flags, world=1):
    """The flags of a plain run on one rank that learns the same: the rows of a step, and the flags that change the
    mathematics. On the CPU the others change no loss (test_sharding.py), so it needs no run with them."""
    args = train.parse_args(flags.split())
    n_rows = ROWS_OF_A_RANK * args.grad_accum * world // args.sequence_parallel
    words = " ".join(re.findall(MATHEMATICS, flags)).split()
    return ["--batch_size", n_rows, *words]


@pytest.fixture(scope="module")
def on_cpu(job, tmp_path_factory):
    """on_cpu(*words) -> the losses of a run with these flags. Tests that ask for the same ones share it."""
    @functools.cache
    def run(*words):
        return losses_on("cpu", 1, [*job, *words], tmp_path_factory.mktemp("cpu"))

    return run


@pytest.mark.rounding
@pytest.mark.gpu
@pytest.mark.parametrize("world, flags", RUNS)
def test_a_gpu_trains_to_the_losses_of_the_cpu(job, on_cpu, tmp_path, world, flags):
    if not LOADED and world > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    got = losses_on("gpu", world, [*job, *flags.split()], tmp_path)
    expected = on_cpu(*mathematics_of(flags, world))
    tolerance = 0.02  # 8 bits of mantissa
    if "fp32" in flags:
        tolerance = 1e-3  # sums in another order
    assert got == pytest.approx(expected, abs=tolerance)


@pytest.mark.rounding
@pytest.mark.gpu
@pytest.mark.bf16
@pytest.mark.parametrize("changes, flags", [
    pytest.param(MOE, "--qlora --offload", id="moe-qlora-offload"),
    pytest.param(MOE, "--lora --tiled_mlp 200", id="moe-lora-tiled"),
    pytest.param(MOE, "", id="moe-full"),
    pytest.param(QWEN35, "--qlora --offload", id="qwen3.5-qlora-offload"),
    pytest.param(QWEN35, "--fsdp2", id="qwen3.5-fsdp2"),
    pytest.param(QWEN35, "--fsdp2 --qlora --offload --sequence_parallel 2", id="qwen3.5-sequence-parallel"),
    pytest.param(MUSE, "--qlora --offload", id="muse-qlora-offload"),
    pytest.param(MUSE, "--no-packing --activation_checkpointing 0", id="muse-no-packing"),
    pytest.param(MUSE, "--precision fp32", id="muse-fp32"),
])
def test_other_families_train_on_a_gpu_to_the_losses_of_the_cpu(model_folder, settings, tmp_path, changes, flags):
    world = train.parse_args(flags.split()).sequence_parallel
    if not LOADED and world > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    path = shutil.copytree(model_folder, tmp_path / "model")
    config = SHAPE | changes
    (path / "config.json").write_text(json.dumps(config))
    model = lm.Transformer(lm.parse_config(config))
    data.load_weights_(model, data.RandomWeights(model, 0, CPU), None, 0, CPU)
    save_file(dict(data.full_tensors(model, False)), path / "model.safetensors")

    argv = ["--model", path, *settings]
    got = losses_on("gpu", world, [*argv, *flags.split()], tmp_path)
    expected = losses_on("cpu", 1, [*argv, *mathematics_of(flags, world)], tmp_path)
    assert got == pytest.approx(expected, abs=0.02)  # 8 bits of mantissa


def check_windows():
    """Attention in bf16 on a GPU, which runs FlashAttention, against the CPU's in float32 of the same numbers."""
    gpu = torch.device("cuda", 0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as train.Ranks does
    T = 96
    window = 24
    torch.manual_seed(0)
    qkv = [torch.randn(1, T, n_heads, 16).bfloat16() for n_heads in (4, 2, 2)]
    for lengths in ([60, 36], [48, 48]):  # documents of one length have no bounds, and get some for the window
        spans = data.pack_spans(pairs_of(lengths), T)
        expected = lm.attend(*(t.float() for t in qkv), spans, window)
        if spans.bounds is not None:
            spans.bounds = spans.bounds.to(gpu)
        got = lm.attend(*(t.to(gpu) for t in qkv), spans, window)
        # bf16 numbers below 4; a window of one token more or less would be 0.4 away
        torch.testing.assert_close(got.cpu().float(), expected, atol=2**-6, rtol=0)


@pytest.mark.rounding
@pytest.mark.gpu
@pytest.mark.bf16
def test_a_token_on_a_gpu_sees_the_window_that_it_sees_on_a_cpu(tmp_path):
    # losses of whole runs hardly show which tokens a window hides: those of a few steps change by less than 0.02
    log = tmp_path / "log"
    codes = start_ranks(1, check_windows, (), [log], gpu=True)
    assert codes == [0], log.read_text()


# ---------------------------------------------------------------- what a run writes and says


def chat(folder):
    """A rank that answers one line of a chat."""
    del os.environ["RANK"]  # with it the process would wait for other ranks, and --chat runs alone
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"hello\n"))
    return train.launch(["--chat", "--model", str(folder), "--max_new_tokens", "4"])


def rows_with(key, rows):
    return [row for row in rows if key in row]


@pytest.mark.gpu
def test_a_run_on_a_gpu_writes_all_that_was_asked_for_and_resumes(settings, chats, tmp_path):
    # The profile of step 3 also traces its evaluation and its sample, operator by operator: of more blocks, rows and
    # tokens it would be 100 MB of text.
    model = random_model(tmp_path / "model", num_hidden_layers=1)
    two_chats = tmp_path / "two.jsonl"
    lines = chats.read_text().splitlines(keepends=True)
    two_chats.write_text("".join(lines[:2]))
    argv = ["--model", model, "--random_init", *settings, *"--batch_size 2 --lora --lora_dropout 0.1".split()]
    argv += "--steps 3 --save_every 1 --keep 9".split()
    evaluations = ["--eval_every", 2, "--eval_data", two_chats]
    outputs = ["--merge", "--sample", "hello", "--max_new_tokens", 4, "--profile", "--memory_snapshot"]
    out = tmp_path / "whole"
    rows, text, codes = run_ranks(1, [*argv, *evaluations, *outputs], out, gpu=True)
    assert codes == [0], text
    assert "after:" in text, text  # the sample
    assert re.search(r"^to post: 1 x .* predicted \d.* measured \d.* oomph [0-9a-f]{8}$", text, re.MULTILINE), text
    assert [row["step"] for row in rows_with("eval_loss", rows)] == [2, 3], text
    # What these files say is checked by those who read them; here they have to be whole and not empty.
    assert json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))["traceEvents"]
    assert pickle.loads((out / "memory.pickle").read_bytes())["segments"]
    for name, tensor in load_file(out / "merged/model.safetensors").items():
        assert tensor.isfinite().all(), name

    resumed_argv = [*argv, "--resume", out / "checkpoint-1"]
    resumed_rows, text, codes = run_ranks(1, resumed_argv, tmp_path / "again", gpu=True)
    losses = [row["loss"] for row in rows_with("loss", resumed_rows)]
    expected = [row["loss"] for row in rows_with("loss", rows)][1:]
    assert losses[0] == expected[0], text  # a forward of the very same weights
    # after it FlashAttention's backward adds up dq in any order
    assert losses == pytest.approx(expected, rel=2e-2), text

    log = tmp_path / "chat"
    assert start_ranks(1, chat, (out / "merged",), [log], gpu=True) == [0]
    assert log.read_text().strip()


@pytest.mark.gpu
def test_a_gpu_run_that_fails_says_why(job, tmp_path):
    # such a step makes weights whose next loss overflows
    _, text, codes = run_ranks(1, [*job, "--lr", 1e11], tmp_path / "diverges", gpu=True)
    assert codes == [train.NOT_FINITE], text
    assert "is inf or nan" in text, text
    assert "The weights and checkpoints were not touched" in text, text

    gib = 0.002  # 2 MiB, less than the model's weights
    _, text, codes = run_ranks(1, [*job, "--gpu_gib", gib], tmp_path / "small", gpu=True)
    assert codes == [train.OUT_OF_MEMORY], text
    assert "does not fit: needs " in text, text
    assert "use more ranks" in text, text
    report = json.loads((tmp_path / "small/oom.json").read_text())
    assert 0 < report["max_memory_allocated_gib"] <= gib


# ---------------------------------------------------------------- runs of a changed train.py


@pytest.fixture
def run_changed(model_folder, settings, tmp_path):
    """run_changed(change, *flags, world, **config) -> (exit code, what it says, its flags). A run on `world` GPUs of
    random weights, whose processes call change() first; config: keys of config.json."""
    def run(change, *flags, world=1, **config):
        folder = shutil.copytree(model_folder, tmp_path / "model")
        # one resident block, and one streamed block more than there are slots
        raw = SHAPE | {"num_hidden_layers": 4} | config
        (folder / "config.json").write_text(json.dumps(raw))
        argv = [*settings, *flags, "--random_init", "--model", folder, "--out", tmp_path / "out"]
        argv = [str(word) for word in argv]
        logs = [tmp_path / f"log{rank}" for rank in range(world)]
        codes = start_ranks(world, change_and_run, (change, argv), logs, gpu=True)
        text = "".join(log.read_text() for log in logs)
        return max(codes, key=abs), text, argv

    return run


def change_and_run(change, argv):
    change()
    return train.launch(argv)


def change_nothing():
    pass


def install_stand_ins():
    standins.install_with_zeros()
    train.LiveBytes.has_flash = True  # as the emulated card


SMALL_ENDS = {"vocab_size": 4096}
LARGE_ENDS = {"vocab_size": 65536, "tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}


@pytest.mark.gpu
@pytest.mark.bf16
@pytest.mark.parametrize("world, flags, ends", [
    (1, "--lora --offload --tiled_mlp 384", SMALL_ENDS),
    (1, "--qlora --offload", SMALL_ENDS),
    (1, "--lora --precision fp16 --no-activation_checkpointing --train_on all", SMALL_ENDS),
    (1, "--lora --fsdp2 --offload --resident_blocks 1", SMALL_ENDS),
    (1, "--qlora --fsdp2 --offload --resident_blocks 0", SMALL_ENDS),
    # the head comes from the host, and is the peak
    (1, "--qlora --fsdp2 --offload --resident_blocks 0 --ce_chunk 128", LARGE_ENDS),
    (1, "--qlora --fsdp2 --offload --resident_blocks all --ce_chunk 128", LARGE_ENDS | TIED),
    (1, "--lora --fsdp2 --offload --no-chunked_ce --batch_size 2 --train_on all", LARGE_ENDS),
    (1, "--lora --fsdp2 --offload --no-shard_embeddings --ce_chunk 128", LARGE_ENDS),
    (2, "--lora --fsdp2 --activation_checkpointing all", SMALL_ENDS),
    (2, "--lora --fsdp2 --activation_checkpointing all --no-reshard_after_forward", SMALL_ENDS),
    (2, "--lora --fsdp2 --offload --resident_blocks 0", SMALL_ENDS),
    (2, "--lora --fsdp2 --offload --resident_blocks 2", SMALL_ENDS),
    (2, "--qlora --fsdp2 --offload --resident_blocks all", SMALL_ENDS),
])
def test_the_plan_is_what_a_gpu_run_of_real_widths_takes(run_changed, tmp_path, world, flags, ends):
    if not LOADED and world > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    change = change_nothing
    preset = "llama-3.2-1b"  # blocks of 116 MiB, beside which the workspaces of a GPU's libraries are small
    if LOADED:
        change = install_stand_ins  # the CPU's kernels keep other tensors than CUDA's
        preset = "qwen3-0.6b"  # blocks of 30 MiB: a CPU has no such workspaces, and every byte costs it time
    # in a third block of several ranks FSDP2 has the most buffers at once
    n_layers = 2 if world == 1 else 4
    config = data.PRESETS[preset] | {"num_hidden_layers": n_layers, "architectures": None} | ends
    # The second step is measured: in the first, a peak inside the forward is before autograd's thread has its
    # workspace of cuBLAS, which is half of the two.
    code, text, argv = run_changed(change, "--batch_size", 8, "--steps", 2, *flags.split(), world=world, **config)
    assert code == 0, text
    _, line = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    measured_gib = json.loads(line)["mem_gib"]
    # The plan counts the mean number of documents in a row. A batch of 8 rows has a few more, gaps for one, and for
    # each attention's backward has 1 MiB of float32 dq.
    rounding_gib = 4 / 1024
    if not LOADED and torch.cuda.get_device_capability() >= (9, 0):
        measured_gib -= 2**-4  # cuBLAS's workspaces of 2 x 32 MiB on Hopper, which the plan counts apart
        if "--resident_blocks 0 --ce_chunk" in flags:
            rounding_gib = 0.02  # an H200 had 16 MiB more than planned, which nobody has explained

    # in a process of its own: a process that has run a backward has threads, and ranks are forks of this one
    result = tmp_path / "planned"
    assert start_ranks(1, write_planned_bytes, (argv, config, world, result), [tmp_path / "log-of-plan"]) == [0]
    planned_gib = int(result.read_text()) / 2**30
    print(f"planned {planned_gib:.4f} GiB, measured {measured_gib:.4f}")
    assert planned_gib == pytest.approx(measured_gib, rel=0.02, abs=rounding_gib)


def write_planned_bytes(argv, config, world, result):
    args = train.parse_args(argv)
    args.lr = 1e-4  # as resolve_for_model() does
    config = lm.parse_config(config)
    tokens_of_a_row = 96
    ranks = train.Ranks(want_group=False, timeout=60.0)
    loader, _ = data.open_data(args, data.Tokenizer(args.model), config.vocab_size, ranks)
    has_flash = train.has_bf16(torch.device("cuda"))
    run = train.RunSpec(args, config, world, tokens_of_a_row, has_flash, train.documents_in_a_row(loader))
    moments, _ = train.plan(run, train.blocks_as_asked(run))
    _, planned_bytes = train.peak_of(moments)
    result.write_text(str(planned_bytes))


def strictly(function):
    """The function, in which the host must not wait for the device."""
    @functools.wraps(function)
    def run(*args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return run


def make_steps_strict():
    """All that a step does between two reads of the loss."""
    gpu = torch.device("cuda", 0)
    nf4.level_pairs(gpu, 4)  # tables that the first step would copy to the device, where the host may wait
    nf4.code_levels(gpu)
    train.data.Batch.to = strictly(train.data.Batch.to)
    lm.Transformer.forward = strictly(lm.Transformer.forward)
    torch.Tensor.backward = strictly(torch.Tensor.backward)
    train.clip_gradients_ = strictly(train.clip_gradients_)
    torch.optim.AdamW.step = strictly(torch.optim.AdamW.step)
    nf4.CompactAdamW.step = strictly(nf4.CompactAdamW.step)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ["--lora --offload", "--fsdp2 --qlora --tiled_mlp 200", "--optim adamw8bit"])
def test_the_host_waits_for_nothing_inside_a_step(run_changed, flags):
    code, text, _ = run_changed(make_steps_strict, *flags.split())
    assert code == 0, text


def with_a_metric_in_strict_steps():
    """A fork, whose loss returns itself as a metric."""
    make_steps_strict()
    on_meta = lm.on_meta

    def loss(logits_CV, targets_C):
        losses_C = F.cross_entropy(logits_CV, targets_C, reduction="none")
        return losses_C, {"the_same": losses_C}

    def changed(config, args):
        model = on_meta(config, args)
        model.lm_head.custom_loss = loss
        return model

    lm.on_meta = changed


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ["--lora --ce_chunk 100", "--fsdp2 --no-chunked_ce"])
def test_the_host_waits_for_no_metric_of_tokens(run_changed, tmp_path, flags):
    code, text, _ = run_changed(with_a_metric_in_strict_steps, *flags.split())
    assert code == 0, text
    for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["the_same"] == pytest.approx(row["loss"], rel=1e-6)  # float32 sums in another order


def make_old_card():
    """The device becomes one of Turing, without bf16 and FlashAttention, whose steps are strict."""
    torch.cuda.is_bf16_supported = lambda **_: False
    torch.cuda.get_device_capability = lambda _=None: (7, 5)
    make_steps_strict()
    for name in ("scaled", "unscale_", "step_if_finite", "end_step_", "take_counts_"):
        setattr(train.NonFinite, name, strictly(getattr(train.NonFinite, name)))
    train.NonFinite.FIRST_SCALE = 2.0**10  # so that no step is skipped, and losses are those of the CPU


@pytest.mark.rounding
@pytest.mark.gpu
@pytest.mark.parametrize("flags", [
    "",
    "--qlora --offload --no-packing",
    "--fsdp2 --offload params --optim adamw8bit",
    "--dpo --lora --activation_checkpointing 0",
])
def test_a_card_without_bf16_trains_in_fp16_and_waits_for_nothing(model_folder, settings, pairs, tmp_path, flags):
    where = settings.index("--precision")
    argv = ["--model", model_folder, *settings[:where], *settings[where + 2 :], *flags.split()]
    if "--dpo" in flags:
        argv[argv.index("--data") + 1] = pairs
    expected = losses_on("cpu", 1, [*argv, "--precision", "fp16"], tmp_path)
    argv = [str(word) for word in (*argv, "--out", tmp_path / "card", "--save_every", 0)]
    log = tmp_path / "log"
    codes = start_ranks(1, change_and_run, (make_old_card, argv), [log], gpu=True)
    said = log.read_text()
    assert codes == [0], said
    assert "--precision fp16: trained weights in float32, all else in float16" in said
    assert "fp16: this device has no bf16; the loss is scaled" in said
    rows = [json.loads(line) for line in (tmp_path / "card/metrics.jsonl").read_text().splitlines()]
    assert [row["loss_scale"] for row in rows] == [2**10] * 2
    assert [row["loss"] for row in rows] == pytest.approx(expected, abs=2e-3)  # 11 bits of mantissa


def make_streams_strict():
    """The forward, and each call of StreamedWeights or of FSDP2 that brings weights. At the end of the backward FSDP2
    waits for the gradients of adapters, which the CPU updates."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    nf4.level_pairs(torch.device("cuda", 0), 4)
    lm.Transformer.forward = strictly(lm.Transformer.forward)
    for name in ("bring", "wait_for", "before_forward", "after_forward", "before_backward"):
        setattr(train.StreamedWeights, name, strictly(getattr(train.StreamedWeights, name)))
    for name in ("unshard", "wait_for_unshard"):
        setattr(FSDPParamGroup, name, strictly(getattr(FSDPParamGroup, name)))


STREAMS = "--fsdp2 --offload params --resident_blocks 1"


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("method", ["--lora", "--qlora"])
def test_the_host_waits_for_no_copy_of_weights(run_changed, method, world):
    if not LOADED and world > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    code, text, _ = run_changed(make_streams_strict, method, *STREAMS.split(), world=world)
    assert code == 0, text


def check_where_ends_are():
    """Embedding and head are in host memory between two steps, each once, and the head alone is pinned. In its own
    forward it is on the GPU."""
    load_weights_ = data.load_weights_
    clip_gradients_ = train.clip_gradients_
    head_forward = lm.LMHead.forward
    models = []

    def load_and_note_(model, *rest, **flags):
        load_weights_(model, *rest, **flags)
        models.append(model)

    def head_forward_and_check(head, *inputs):
        assert head.weight.is_cuda or head.weight.is_meta  # the plan's
        return head_forward(head, *inputs)

    def clip_and_check_(params, clip):
        if params[0].is_meta:  # the plan's
            return clip_gradients_(params, clip)
        (model,) = models
        head = model.lm_head.weight
        embedding = model.model.embed_tokens.weight
        assert head.is_pinned()
        assert not embedding.is_cuda
        tied = model.config.tie_word_embeddings
        assert (head is embedding) == embedding.is_pinned() == tied
        return clip_gradients_(params, clip)

    data.load_weights_ = load_and_note_
    train.clip_gradients_ = clip_and_check_
    lm.LMHead.forward = head_forward_and_check


@pytest.mark.gpu
@pytest.mark.parametrize("n_resident, tied", [(1, False), ("all", True)])
def test_a_frozen_head_is_on_the_gpu_in_its_forward_alone(run_changed, n_resident, tied):
    flags = ["--lora", "--fsdp2", "--offload", "params", "--resident_blocks", n_resident]
    code, text, _ = run_changed(check_where_ends_are, *flags, tie_word_embeddings=tied)
    assert code == 0, text


@pytest.mark.gpu
@pytest.mark.skipif(not LOADED, reason="FlashAttention's backward adds up dq in any order")
@pytest.mark.parametrize("flags, tied", [
    ("--lora --eval_every 1 --sample hello --max_new_tokens 3 --no-packing", False),
    ("--qlora --no-chunked_ce --grad_accum 2", True),
    ("--lora --dpo --ce_chunk 64", False),
])
def test_weights_that_stay_on_the_host_train_to_the_bits_of_those_on_the_gpu(
        settings, pairs, few_chats, tmp_path, flags, tied):
    argv = [*settings, *flags.split(), "--batch_size", 2, "--lora_rank", 8, "--random_init"]
    argv += ["--model", random_model(tmp_path / "model", num_hidden_layers=4, tie_word_embeddings=tied)]
    if "--dpo" in flags:
        argv[argv.index("--data") + 1] = pairs
    if "--eval_every" in flags:
        argv += ["--eval_data", few_chats]
    results = []
    for name, streams in (("plain", []), ("streamed", ["--fsdp2", "--offload", "params", "--resident_blocks", 1])):
        out = tmp_path / name
        rows, text, codes = run_ranks(1, [*argv, *streams], out, gpu=True)
        assert codes == [0], text
        numbers = [[row.get(key) for key in ("loss", "grad_norm", "eval_loss")] for row in rows]
        results.append((numbers, load_file(out / "final/adapter_model.safetensors")))
    (plain, plain_weights), (streamed, streamed_weights) = results
    assert plain == streamed
    assert plain_weights.keys() == streamed_weights.keys()
    for name, tensor in plain_weights.items():
        assert torch.equal(tensor, streamed_weights[name]), name


def check_where_blocks_are():
    """Two resident blocks have their frozen shards on the GPU. All else is in host memory, pinned when a first step is
    done, and so are the gradients, which the CPU reads."""
    load_weights_ = data.load_weights_
    clip_gradients_ = train.clip_gradients_

    def load_and_check_(model, *rest, **flags):
        load_weights_(model, *rest, **flags)
        layers = model.model.layers
        streamed = train.policy_of(len(layers), 0, n_resident=2).on_host
        for i, block in enumerate(layers):
            for p in block.parameters():
                stays = not p.requires_grad and i not in streamed
                assert p.to_local().is_cuda == stays

    def clip_and_check_(params, clip):
        for p in params:
            if p.is_meta:  # the plan's
                continue
            assert p.to_local().is_pinned()
            assert not p.grad.to_local().is_cuda
        return clip_gradients_(params, clip)

    data.load_weights_ = load_and_check_
    train.clip_gradients_ = clip_and_check_


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["--lora", "--qlora"])
def test_frozen_shards_of_resident_blocks_are_on_the_gpus_and_adapters_on_the_host(run_changed, method):
    if not LOADED and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    flags = [method, "--fsdp2", "--offload", "params", "--resident_blocks", 2]
    code, text, _ = run_changed(check_where_blocks_are, *flags, world=2)
    assert code == 0, text


def check_byte_pairs():
    """Every word of 16 bits as two bytes of NF4, sharded and gathered."""
    ranks = train.Ranks(want_group=True, timeout=1800)
    config = lm.parse_config(SHAPE | {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1})
    args = train.parse_args(["--fsdp2", "--qlora", "--precision", "mixed"])
    args.lora_targets = ["q_proj"]  # an adapter, so that other dtypes are gathered together with the bytes
    model = lm.on_meta(config, args)
    train.shard_(model, args, ranks.device)
    model.to_empty(device=ranks.device)
    block = model.model.layers[0]
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    bytes_ND2 = words.view(torch.uint8).view(512, 256).to(ranks.device)  # gate_proj in 4 bits
    rows, start = nf4.local(block.mlp.gate_proj.weight_codes)
    assert len(rows) == 512 // ranks.world
    rows.copy_(bytes_ND2[start : start + len(rows)])
    for _ in range(2):
        block.unshard()
        assert torch.equal(block.mlp.gate_proj.weight_codes, bytes_ND2)
        block.reshard()
        rows, start = nf4.local(block.mlp.gate_proj.weight_codes)
        assert torch.equal(rows, bytes_ND2[start : start + len(rows)])
    ranks.leave()


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_every_pair_of_bytes_comes_back_from_fsdp2_as_it_was(tmp_path, world):
    # Packed under the dtype of bf16, as others have them, pairs that are a NaN all become one number on a GPU
    # (pytorch #159333, bitsandbytes #1945).
    if not LOADED and world > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    logs = [tmp_path / f"log{rank}" for rank in range(world)]
    codes = start_ranks(world, check_byte_pairs, (), logs, gpu=True)
    assert codes == [0] * world, "".join(log.read_text() for log in logs)


@pytest.mark.gpu
@pytest.mark.skipif(not LOADED, reason="FlashAttention's backward adds up dq in any order")
@pytest.mark.parametrize("method", ["--lora", "--qlora --grad_accum 2"])
def test_gpus_that_share_weights_train_to_the_same_bits_however_many_blocks_are_resident(job, tmp_path, method):
    argv = [*job, *method.split(), "--fsdp2", "--offload", "params"]
    argv += ["--batch_size", 2, "--lora_targets", "v_proj", "down_proj"]  # an adapter in each half of a block
    expected = curve(2, [*argv, "--resident_blocks", 0], tmp_path / "resident-0", gpu=True)
    for n_resident in (1, "all"):
        got = curve(2, [*argv, "--resident_blocks", n_resident], tmp_path / f"resident-{n_resident}", gpu=True)
        assert got == expected


@pytest.mark.gpu
def test_wide_heads_do_not_fall_to_the_math_kernel(run_changed):
    # FlashAttention supports up to 256; the emulated sdpa() refuses shared key heads, which need the math kernel here
    code, text, _ = run_changed(change_nothing, "--sample", "hello", "--max_new_tokens", 4, head_dim=264)
    assert code == 0, text


# ---------------------------------------------------------------- offload without its guards
# Each function leaves out one guard of OffloadActivations. Its docstring tells of the first two corruptions.


def forget_to_hold_leaving_tensors():
    """What is on its way to the host is freed at once, and the device's memory given to others."""
    def release(self, n_held):
        self.leaving.clear()

    train.OffloadActivations.release = release


def bring_back_into_memory_of_the_side_stream():
    """What comes back is allocated on the side stream, which may give it away while the default stream reads it."""
    bring_back = train.OffloadActivations.bring_back

    def on_side_stream(self, parked):
        with torch.cuda.stream(self.side.stream):
            bring_back(self, parked)

    train.OffloadActivations.bring_back = on_side_stream


def copy_without_waiting():
    """A copy to the host begins before the default stream has computed what it copies."""
    def wait_stream(self, other):
        pass

    torch.cuda.Stream.wait_stream = wait_stream


def compute_before_the_copy_has_arrived():
    """A block runs while its weights are on their way."""
    def wait_for(self, k):
        self.bring(k)

    train.StreamedWeights.wait_for = wait_for


def compute_the_loss_before_the_head_has_arrived():
    """The loss is computed while the head is on its way."""
    before_head = train.StreamedVocabulary.before_head

    def before_head_without_waiting(self, head, inputs):
        self.arriving = self.arriving._replace(end=None)
        before_head(self, head, inputs)

    train.StreamedVocabulary.before_head = before_head_without_waiting


@pytest.mark.gpu
@pytest.mark.skipif(not LOADED, reason="a real GPU may be lucky")
@pytest.mark.parametrize("leave_out_a_guard, flags, words", [
    (forget_to_hold_leaving_tensors, "--offload", "is inf or nan"),  # nan in place of what was freed
    (bring_back_into_memory_of_the_side_stream, "--offload", "is given away again while"),
    (copy_without_waiting, "--offload", "that the default stream still works on"),
    (copy_without_waiting, STREAMS, "that the default stream still works on"),
    (compute_before_the_copy_has_arrived, STREAMS, "memory is used while a copy is under way"),
    (compute_the_loss_before_the_head_has_arrived, STREAMS, "memory is used while a copy is under way"),
])
def test_offload_without_one_of_its_guards_is_caught(run_changed, leave_out_a_guard, flags, words):
    # with three blocks no memory of the side stream is given away again while the default stream may use it
    code, text, _ = run_changed(leave_out_a_guard, "--lora", *flags.split(), num_hidden_layers=6)
    assert code != 0, text
    assert words in text, text
