"""--compile: the same numbers, no graph breaks, no compilation after the first step, whatever documents a row holds.

Most of it runs under the backend "eager", which traces and guards like the default one and then calls the same kernels: equal
to the last bit, in a second. What Inductor makes of it is compared once, in a whole run.
"""

import functools
import itertools
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import HERE, SHAPE, on_ranks, run_ranks

import data
import model as lm
import nf4
import train

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def build(method, compile_=False, checkpoint=False, tile=0, precision="fp32", sharded=False, dropout=0.0, **shape):
    config = lm.parse_config(SHAPE | shape)
    with torch.device("meta"):
        model = lm.Transformer(config)
    source = lm.RandomWeights(model, 0, CPU)
    if method == "qlora":
        nf4.quantize_linears_(model.model.layers)
    if method != "full":
        lm.add_lora_(model, 5, 10, dropout, lm.LORA_TARGETS)
    train.set_precision_(model, precision)
    if compile_:
        train.compile_(model, fixed_length=True, names=train.regions(checkpoint, tile))
    if tile:
        lm.tile_feed_forward_(model, tile)
    if checkpoint:
        train.checkpoint_activations_(model, preserve_rng=bool(dropout))
    if sharded:
        train.shard_(model, CPU, precision, True, True, False, True)
    model.to_empty(device="cpu").tie_()
    lm.load_weights_(model, source, None, 0, CPU, progress=False)
    for name, p in model.named_parameters():
        if "lora_B" in name:  # zeros would hide a wrong adapter
            torch.nn.init.constant_(lm.local(p)[0], 0.01)
    return model


def packed_batches(n=3, rows=2, length=64):
    """Batches of one shape whose rows hold other documents each time."""
    rng = torch.Generator().manual_seed(1)
    for i in range(n):
        tokens = torch.randint(4096, (rows, length), generator=rng)
        cuts = [sorted({0, length, *torch.randint(1, length, (i + 1,), generator=rng).tolist()}) for _ in range(rows)]
        spans = [(row * length + a, row * length + b) for row in range(rows) for a, b in itertools.pairwise(cuts[row])]
        positions = torch.cat([torch.arange(b - a) for a, b in spans]).view(rows, length)
        keep = torch.randperm(rows * length, generator=rng)[: 40 + 7 * i].sort().values
        yield tokens, tokens.roll(-1), positions, spans, keep


def losses_and_gradients(model):
    results = []
    for tokens, targets, positions, spans, keep in packed_batches():
        torch.manual_seed(0)
        if model.sequence_group:  # two ranks, two rows
            row, n = slice(dist.get_rank(), dist.get_rank() + 1), tokens.shape[1]
            tokens, targets, positions = tokens[row], targets[row], positions[row]
            keep = keep[keep // n == row.start] % n
        loss = model(tokens, targets, positions, spans, keep)
        loss.backward()
        grads = {name: lm.local(p.grad)[0].clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append((loss.detach(), grads))
        model.zero_grad()
    return results


def check_equal(got, expected):
    for (loss, grads), (expected_loss, expected_grads) in zip(got, expected, strict=True):
        assert torch.equal(loss, expected_loss)
        assert grads.keys() == expected_grads.keys()
        for name in grads:
            assert torch.equal(grads[name], expected_grads[name]), name


def tracing_only(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    nf4.compiled.cache_clear()


@pytest.mark.parametrize("method, how", [
    ("full", {}), ("full", {"tile": 16, "checkpoint": True}), ("lora", {"precision": "mixed", "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"]}), ("qlora", {"precision": "mixed", "checkpoint": True}),
], ids=str)
def test_regions_have_no_graph_breaks_and_compile_once_for_all_blocks_and_documents(monkeypatch, method, how):
    expected = losses_and_gradients(build(method, **how))
    tracing_only(monkeypatch)
    monkeypatch.setattr(lm, "softmax_gradient_fused", lm.softmax_gradient)
    # NF4 by selects rounds exp() of a scale elsewhere than the gather's loop does, see test_nf4.py
    monkeypatch.setattr(nf4, "dequantize_compiled", lambda *packed: nf4.dequantize(*packed, torch.bfloat16))
    model = build(method, compile_=True, **how)
    graphs = []
    step = model.forward
    model.forward = lambda *batch: (step(*batch), graphs.append(train.compiled_so_far()[0]))[0]
    check_equal(losses_and_gradients(model), expected)
    # the regions and the loss; the first block's input needs no gradient where the embedding is frozen, which makes two
    # more; a tile of the MLP runs without gradients, then with them
    least = len(train.regions(how.get("checkpoint"), how.get("tile"))) + 1
    assert least <= graphs[0] <= least + 3 and graphs[-1] - graphs[0] <= bool(how.get("tile"))
    assert not torch._dynamo.utils.counters["graph_break"]


def test_dropout_masks_return_in_a_compiled_recomputation(monkeypatch):
    expected = losses_and_gradients(build("lora", checkpoint=True, dropout=0.3))
    tracing_only(monkeypatch)
    monkeypatch.setattr(lm, "softmax_gradient_fused", lm.softmax_gradient)
    check_equal(losses_and_gradients(build("lora", compile_=True, checkpoint=True, dropout=0.3)), expected)


def check_compiled_shards(folder):
    torch.manual_seed(0)
    torch.compile = functools.partial(torch.compile, backend="eager")
    lm.softmax_gradient_fused = lm.softmax_gradient
    nf4.dequantize_compiled = lambda *packed: nf4.dequantize(*packed, torch.bfloat16)
    for group, checkpoint in itertools.product((None, dist.group.WORLD), (True, False)):
        how = {"checkpoint": checkpoint, "precision": "mixed", "sharded": True}
        compiled, eager = build("qlora", compile_=True, **how), build("qlora", **how)
        compiled.sequence_group = eager.sequence_group = group
        check_equal(losses_and_gradients(compiled), losses_and_gradients(eager))
    assert not torch._dynamo.utils.counters["graph_break"]
    assert dist.get_world_size() == 2


def test_compiled_shards_compute_the_same(tmp_path):
    on_ranks(2, check_compiled_shards, tmp_path)


def test_evaluation_and_samples_compile_nothing(monkeypatch):
    tracing_only(monkeypatch)
    model = build("lora", compile_=True).eval()
    with torch.no_grad():
        lm.generate(model, [1, 2, 3], 4, (), CPU)
        model(*next(packed_batches()))
    assert train.compiled_so_far()[0] == 0


def test_what_is_not_finite_is_found_in_a_compiled_model(monkeypatch):
    tracing_only(monkeypatch)
    model = build("lora", compile_=True, checkpoint=True)
    batch = data.Batch(*(x for i, x in enumerate(next(packed_batches())) if i != 3), spans=[(0, 128)])
    assert train.first_not_finite(model, [batch], 1.0, CPU) is None
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    assert train.first_not_finite(model, [batch], 1.0, CPU) == "the output of model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("with_grad", [True, False])
def test_the_fused_softmax_gradient_is_that_of_the_plain_one(with_grad):
    logits, targets = torch.randn(7, 50) * 5, torch.randint(50, (7, 1))
    targets[4] = lm.IGNORE
    loss, grad = lm.softmax_gradient(logits.clone(), targets, with_grad)
    fused_loss, fused_grad = lm.softmax_gradient_fused(logits, targets, with_grad)
    torch.testing.assert_close(fused_loss, loss)
    assert (fused_grad is None and grad is None) if not with_grad else torch.allclose(fused_grad, grad, atol=1e-6)


def test_a_missing_compiler_is_said_before_anything_is_loaded(monkeypatch):
    from torch._inductor import cpp_builder, exc

    def missing():
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(ValueError, match="--compile needs a C\\+\\+ compiler: install g\\+\\+, or name one in the environment"):
        train.check_compiler(CPU)


def test_a_compiled_run_learns_what_an_eager_one_does(folder, chats, tmp_path):
    job = ["--model", folder, "--random_init", "--data", chats, "--seq_len", 96, "--steps", 4, "--precision", "mixed",
           "--batch_size", 2, "--qlora", "--lora_rank", 5, "--lr", "1e-2", "--log_every", 1]
    rows, text, codes = run_ranks(1, [*job, "--compile", "--profile"], tmp_path / "compiled")
    assert codes == [0], text
    assert re.findall(r"compiled in step (\d+): \d+ graphs, [\d.]+ s", text) == ["1"]
    assert re.search(r"where step 3 went, [\d,]+ ms under the profiler: \w+", text)
    expected, text, codes = run_ranks(1, job, tmp_path / "eager")
    assert codes == [0], text
    # bf16: 3 significant digits of a sum over hundreds of tokens; random weights lose 0.3 in these steps
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], abs=0.02)
    assert expected[0]["loss"] - expected[-1]["loss"] > 0.1


# ---------------------------------------------------------------- on a GPU

WATCHED = """
import sys
import torch, train
start_step = train.Log.start_step
started = []

def watch(log):  # the fourth step is compiled and warm; the first and every tenth are logged
    started.append(1)
    torch.cuda.set_sync_debug_mode("error" if 4 <= len(started) <= 9 else "default")
    start_step(log)

train.Log.start_step = watch
train.main(sys.argv[1:])
assert len(started) == 12
"""


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ["", "--lora", "--qlora --compile", "--fsdp2 --qlora --offload activations",
                                   "--optim adamw8bit --compile", "--optim_in_backward", "--grad_accum 2 --tiled_mlp 256"])
def test_no_step_between_log_lines_waits_for_the_gpu(folder, chats, tmp_path, flags):
    argv = ["--model", folder, "--random_init", "--data", chats, "--seq_len", 512, "--steps", 12, "--epochs", 9, "--sample", "",
            "--log_every", 10, "--out", tmp_path / "out", *flags.split()]
    done = subprocess.run([sys.executable, "-c", WATCHED, *map(str, argv)], capture_output=True, text=True, timeout=300,
                          cwd=HERE.parent, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"})
    assert done.returncode == 0, done.stdout + done.stderr
    if "--compile" in flags:
        assert re.findall(r"compiled in step (\d+):", done.stdout) == ["1"]


@pytest.mark.gpu
def test_compiled_nf4_on_a_gpu_is_the_plain_one():
    codes, scales = nf4.quantize(torch.randn(512, 1024, device="cuda"))
    got, expected = nf4.dequantize_compiled(codes, scales), nf4.dequantize(codes, scales, torch.bfloat16)
    # exp() of Triton and of the CUDA library differ in the last bit of float32: seldom one of bf16
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=0)
    assert (got != expected).float().mean() < 1e-3


@pytest.mark.gpu
def test_the_faster_attention_is_chosen_and_said():
    c = lm.parse_config(lm.preset_config("qwen2.5-0.5b"))
    try:
        said = train.choose_attention_(c, 2048, True, torch.bfloat16, torch.device("cuda"), 0, 1)
        assert torch.backends.cuda.flash_sdp_enabled() != torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.cuda.enable_cudnn_sdp(True)
    times = r"\(FlashAttention ([\d.]+|inf) ms, cuDNN ([\d.]+|inf) ms for 2,048 tokens\)"
    assert re.search(rf"others by (FlashAttention|cuDNN) {times}", said)
