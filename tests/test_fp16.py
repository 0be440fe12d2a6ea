"""--precision fp16: it learns what float32 does; a step whose gradients overflow is skipped on all ranks, and counted;
a run whose numbers fit at no scale ends with a message; old cards get it by default. test_cuda.py has such a card."""

import contextlib
import functools
import json
import math
import re

import pytest
import torch
from conftest import losses, random_model, run_ranks, start_ranks, train_main
from safetensors.torch import load_file

import model as lm
import train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def flags_of_job(chats):
    """Flags of a short run, but for its model: each step is logged."""
    size = f"--data {chats} --seq_len 96 --batch_size 2 --steps 4"
    return ["--random_init", *f"{size} --lr 1e-2 --log_every 1 --save_every 0".split()]


@pytest.fixture(scope="module")
def job(flags_of_job, tmp_path_factory):
    return ["--model", random_model(tmp_path_factory.mktemp("model")), *flags_of_job]


@pytest.fixture(scope="module")
def shallow_job(shallow, flags_of_job):
    """For what happens to the gradients of a step as a whole."""
    return ["--model", shallow, *flags_of_job]


# ---------------------------------------------------------------- what it learns


@pytest.mark.rounding
@pytest.mark.parametrize("flags", ["--lora", "--qlora", "", "--lora --no-chunked_ce --tiled_mlp 64"])
def test_fp16_follows_float32(job, tmp_path, flags):
    got = losses(1, [*job, "--precision", "fp16", *flags.split()], tmp_path / "fp16")
    exact = losses(1, [*job, "--precision", "fp32", *flags.split()], tmp_path / "fp32")
    # 11 bits of mantissa, so logits are off by 5e-4 of their size, and gradients, too: 3.5e-4 of the losses seen
    assert got == pytest.approx(exact, rel=2e-3)
    assert exact[0] - exact[-1] > 0.05  # else there would be nothing to learn


@pytest.mark.rounding
@pytest.mark.parametrize("flags", ["--fsdp2 --qlora", "--fsdp2 --offload params --optim adamw8bit", "--grad_accum 1"])
def test_ranks_have_the_losses_of_one_in_fp16(job, tmp_path, flags):
    argv = [*job, "--precision", "fp16", "--steps", 2, *flags.split()]
    alone = losses(1, argv, tmp_path / "one")
    together = losses(2, [*argv, "--batch_size", 1], tmp_path / "two")
    assert together == pytest.approx(alone, abs=2e-3)  # fp16 gradients, summed in another order


def test_what_was_trained_in_fp16_is_exported_in_the_dtype_of_its_files(job, few_chats, tmp_path):
    others = ["--sample", "hello", "--max_new_tokens", 4, "--eval_data", few_chats]
    rows, text, codes = run_ranks(1, [*job, "--precision", "fp16", "--steps", 1, *others], tmp_path / "run")
    assert codes == [0], text
    assert math.isfinite(rows[-1]["eval_loss"])
    assert "after:" in text
    config = json.loads((tmp_path / "run/final/config.json").read_text())
    tensors = load_file(tmp_path / "run/final/model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{config['dtype']}"} == {"torch.float32"}


# ---------------------------------------------------------------- the scale


def scales_of(found_inf, interval):
    """The loss scale after each step of a list, by NonFinite."""
    nonfinite = train.NonFinite(CPU, is_fp16=True)
    nonfinite.GROWTH_INTERVAL = interval
    values = []
    for overflowed in found_inf:
        nonfinite.found_inf.fill_(overflowed)
        nonfinite.end_step_()
        assert not nonfinite.found_inf  # the next step begins without
        values.append(nonfinite.scale.item())
    return values


def scales_of_torch(found_inf, interval):
    """The same by torch.amp.GradScaler, whose gradients become inf where a list says so."""
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
    values = []
    for overflowed in found_inf:
        scaler.scale(p.sum()).backward()
        if overflowed:
            p.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        values.append(scaler.get_scale())
    return values


def test_the_scale_goes_as_that_of_torchs_gradscaler():
    found_inf = [1, 1, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    ours = scales_of(found_inf, interval=3)
    assert ours == scales_of_torch(found_inf, interval=3)
    assert ours[0] > ours[1] < ours[4]  # halved by each overflow, doubled by three steps without


def test_gradients_lose_no_bit_to_the_scale_and_only_skipped_steps_are_counted():
    nonfinite = train.NonFinite(CPU, is_fp16=True)
    w = torch.nn.Parameter(torch.linspace(0.1, 3.0, 7))
    (w**3).sum().backward()
    plain = w.grad.clone()
    w.grad = None
    nonfinite.scaled((w**3).sum()).backward()
    assert torch.equal(w.grad, plain * 2**16)
    nonfinite.unscale_([w])
    assert torch.equal(w.grad, plain)

    for overflowed in (1, 0, 1):
        nonfinite.found_inf.fill_(overflowed)
        nonfinite.end_step_()
    assert nonfinite.take_counts_() == {"skipped_steps": 2, "loss_scale": 2**14}
    assert nonfinite.take_counts_() == {"skipped_steps": 0, "loss_scale": 2**14}


@pytest.mark.parametrize("world", [2, 4])
def test_no_number_of_ranks_makes_gradients_overflow_that_one_rank_has(world):
    # one more doubling of the scale, or of the loss by the ranks, would be inf
    for n_ranks in (1, world):
        nonfinite = train.NonFinite(CPU, is_fp16=True, world=n_ranks)
        w = torch.nn.Parameter(torch.full((3,), 0.75, dtype=torch.float16))
        (nonfinite.scaled(w.sum().float()) * n_ranks / 2).backward()  # as train_step() multiplies it
        assert w.grad.tolist() == [2**15] * 3
        nonfinite.unscale_([w])
        assert w.grad.tolist() == [n_ranks / 2] * 3  # which the mean over ranks divides


def test_other_precisions_have_no_scale_and_forget_nothing():
    nonfinite = train.NonFinite(CPU)
    loss = torch.ones(())
    assert nonfinite.scaled(loss) is loss
    assert nonfinite.tensors == {}
    nonfinite.found_inf.fill_(1)
    for _ in range(2):
        nonfinite.end_step_()
    assert nonfinite.found_inf == 1
    assert nonfinite.take_counts_() == {"skipped_steps": 2}


# ---------------------------------------------------------------- a step that is skipped


def run_changed(change, argv):
    change()
    return train_main(argv)


def changed(world, change, argv, out):
    """A run whose ranks call change() first -> (exit codes, rows of metrics.jsonl, what each rank said)."""
    argv = [str(word) for word in (*argv, "--precision", "fp16", "--out", out)]
    logs = [out.with_name(f"{out.name}-{rank}.log") for rank in range(world)]
    codes = start_ranks(world, run_changed, (change, argv), logs)
    rows = []
    with contextlib.suppress(FileNotFoundError):
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return codes, rows, [log.read_text() for log in logs]


def change_nothing():
    pass


def begin_with(scale):
    train.NonFinite.FIRST_SCALE = scale


@pytest.mark.parametrize("world, flags", [
    # each optimizer skips by itself: the fused kernel, torch's loop, ours
    (1, "--lora"),
    (1, "--no-fused_adamw"),
    (2, "--fsdp2 --qlora --optim adamw8bit"),
])
def test_steps_that_overflow_are_skipped_and_counted(shallow_job, tmp_path, world, flags):
    # twice the largest scale with which a loss of mean 1 could have a gradient of 1
    change = functools.partial(begin_with, 2.0**20)
    codes, rows, said = changed(world, change, [*shallow_job, "--steps", 8, *flags.split()], tmp_path / "run")
    assert codes == [0] * world, said
    n_skipped = sum(row["skipped_steps"] for row in rows)
    assert 1 <= n_skipped < 8
    assert said[0].count("skipped 1 of the last 1 steps: gradients overflowed; loss scale") == n_skipped
    assert re.search(r"8 steps in \d+ s$", said[0], re.MULTILINE)
    scale = 2.0**20
    for row in rows:
        assert (row["grad_norm"] is None) == row["skipped_steps"]  # inf or nan is no JSON
        scale /= 2 ** row["skipped_steps"]
        assert row["loss_scale"] == scale
    # a skipped step takes its place in the schedule, as with torch's GradScaler
    args = train.parse_args([*map(str, shallow_job), "--steps", "8"])
    assert [row["lr"] for row in rows] == [train.lr_at(step, 8, args, args.lr) for step in range(8)]
    # the first one that is not skipped changes the weights, and its norm is that of unscaled gradients
    first = next(row for row in rows if not row["skipped_steps"])
    assert first["grad_norm"] < 100


def test_a_skipped_step_changes_no_weight(shallow_job, tmp_path):
    change = functools.partial(begin_with, 2.0**100)
    codes, rows, said = changed(1, change, [*shallow_job, "--lora"], tmp_path / "run")
    assert codes == [0], said
    assert [row["skipped_steps"] for row in rows] == [1, 1, 1, 1]
    tensors = load_file(tmp_path / "run/final/adapter_model.safetensors")
    of_b = [tensor for name, tensor in tensors.items() if "lora_B" in name]
    assert of_b
    assert not any(tensor.any() for tensor in of_b)  # as they began


def overflow_on_rank_1_in_step_2():
    """Each rank prints its scale after each step; the gradients of rank 1 alone overflow in the second."""
    scaled = train.NonFinite.scaled
    end_step_ = train.NonFinite.end_step_
    ranks = []
    steps = []

    def note_ranks(self, *args):
        ranks.append(self)
        init(self, *args)

    def spoilt_scaled(self, loss):
        is_spoilt = ranks[0].rank == 1 and len(steps) == 1
        return scaled(self, loss) * (torch.inf if is_spoilt else 1)

    def shown_end_step_(self):
        end_step_(self)
        steps.append(self.scale.item())
        print(f"scale {steps[-1]}")

    init = train.Ranks.__init__
    train.Ranks.__init__ = note_ranks
    train.NonFinite.scaled = spoilt_scaled
    train.NonFinite.end_step_ = shown_end_step_


@pytest.mark.parametrize("flags", ["--fsdp2 --lora", "--lora"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(shallow_job, tmp_path, flags):
    change = functools.partial(begin_with_and, 2.0**10, overflow_on_rank_1_in_step_2)
    codes, rows, said = changed(2, change, [*shallow_job, *flags.split()], tmp_path / "run")
    assert codes == [0, 0], said
    assert [row["skipped_steps"] for row in rows] == [0, 1, 0, 0]
    for of_rank in said:
        assert re.findall(r"scale (\d+)\.0\n", of_rank) == ["1024", "512", "512", "512"]


def begin_with_and(scale, change):
    begin_with(scale)
    change()


def test_a_resumed_run_goes_on_with_the_scale_that_it_had_bit_for_bit(shallow_job, tmp_path):
    argv = [*shallow_job, "--steps", 8, "--save_every", 1, "--keep", 9, "--optim", "adamw8bit"]
    codes, rows, said = changed(1, functools.partial(begin_with, 2.0**21), argv, tmp_path / "whole")
    assert codes == [0], said
    step = next(row["step"] for row in rows if not row["skipped_steps"])
    assert 1 < step < 8
    # a process that knows of no other first scale than its own, 2**16
    resumed = [*argv, "--resume", tmp_path / f"whole/checkpoint-{step}"]
    codes, rows_again, said = changed(1, change_nothing, resumed, tmp_path / "again")
    assert codes == [0], said
    for row, again in zip(rows[step:], rows_again, strict=True):
        for name in ("step", "loss", "grad_norm", "lr", "loss_scale", "skipped_steps"):
            assert again[name] == row[name], name
    for file in ("final/model.safetensors", "checkpoint-8/rank-00000-of-00001.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file
    saved = load_file(tmp_path / "again/checkpoint-8/rank-00000-of-00001.safetensors")
    assert saved["loss_scale:0"] == rows[-1]["loss_scale"] != 2**16
    last_skipped = max(row["step"] for row in rows if row["skipped_steps"])
    assert saved["loss_scale.n_good:0"] == 8 - last_skipped


# ---------------------------------------------------------------- what fits at no scale


def test_activations_that_overflow_end_the_run_and_name_the_flag(shallow_job, tmp_path):
    # Of inputs of size 1, weights of size 8 make an MLP's output 8**3 * 64 * 14 times as large: beyond 65,504, and
    # far from what float32 has.
    wild = random_model(tmp_path / "wild", initializer_range=8.0)
    argv = [*shallow_job, "--model", wild]
    codes, _, (said,) = changed(1, change_nothing, argv, tmp_path / "run")
    assert codes == [train.NOT_FINITE], said
    assert "step 1: the loss or a gradient is inf or nan. The weights and checkpoints were not touched" in said
    assert "fp16 numbers end at 65,504: use --precision fp32, or mixed on a GPU with bf16" in said
    assert not (tmp_path / "run/final").exists()
    assert math.isfinite(sum(losses(1, [*argv, "--precision", "fp32", "--steps", 1], tmp_path / "fp32")))


def make_every_gradient_infinite():
    begin_with(4.0)
    forward = lm.Transformer.forward

    def spoilt_forward(*args, **given):
        loss = forward(*args, **given)
        if loss.requires_grad:
            loss.register_hook(lambda grad: grad * torch.inf)
        return loss

    lm.Transformer.forward = spoilt_forward


def test_a_scale_below_1_ends_the_run_and_names_the_flag(shallow_job, tmp_path):
    codes, rows, (said,) = changed(1, make_every_gradient_infinite, [*shallow_job, "--lora"], tmp_path / "run")
    assert codes == [train.NOT_FINITE], said
    assert [row["loss_scale"] for row in rows] == [2, 1]
    assert "step 3: the loss or a gradient is inf or nan" in said
    assert "fp16 numbers end at 65,504" in said


# ---------------------------------------------------------------- the default


def complete(argv, device):
    args = train.parse_args(argv)
    config = lm.parse_config(train.data.PRESETS["qwen3-0.6b"])
    train.resolve_for_model(args, config, {}, device)
    return args


def test_a_card_without_bf16_gets_fp16_unless_it_updates_in_the_backward(monkeypatch):
    card = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    # a Turing; a torch that is built for GPUs would ask the card, which is not there, for what it can
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert complete(["--qlora"], card).precision == "fp16"
    assert complete(["--chat"], card).precision == "fp16"
    assert complete(["--optim_in_backward", "--precision", "fp32"], card).precision == "fp32"
    with pytest.raises(ValueError, match=r"--optim_in_backward: this GPU has no bf16, .*--precision fp32"):
        complete(["--optim_in_backward"], card)
    assert complete(["--qlora"], None).precision == "mixed"  # a plan is for a card that has bf16


def test_the_search_for_what_fits_proposes_no_bf16_where_fp16_is_used():
    args = complete(["--precision", "fp16"], None)
    run = train.RunSpec(args, None, 1, 1024)
    assert not any("bf16" in option for option in train.ladder_of(run))
    args.precision = "mixed"
    assert any("bf16" in option for option in train.ladder_of(run))


@pytest.mark.parametrize("losses_of_row, n_skipped, scale, step", [
    ([1.0, 2.0, 3.0], 0, None, None),
    ([1.0, 2.0, 3.0], 2, None, 9),  # the bad step and the one after it, which found_inf skipped
    ([1.0, math.nan, 3.0], 0, None, 9),  # beside gradients that are finite: its own step, not the newest
    ([1.0, math.inf, 3.0], 2, 2.0**10, 9),
    ([1.0, 2.0, 3.0], 2, 2.0**10, None),  # skipped, and the run goes on
    ([1.0, 2.0, 3.0], 1, 0.5, 10),
])
def test_the_step_that_ends_a_run_is_the_one_that_was_not_finite(losses_of_row, n_skipped, scale, step):
    numbers = {"losses": losses_of_row, "skipped_steps": float(n_skipped)}
    if scale is not None:
        numbers["loss_scale"] = scale
    assert train.bad_step_of(10, numbers) == step  # a row of steps 8, 9 and 10
