"""Resume is exact: k steps, a new process, the rest: bit for bit the uninterrupted run; on another world within rounding."""

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import HERE, run_ranks, start_ranks, train_main
from safetensors.torch import load_file, safe_open

import data
import model as lm
import train

STEPS, EDGE = 5, 3  # six rows, two a step: the first epoch ends with step 3, the run in the middle of the second


@pytest.fixture(scope="module")
def job(folder, chats, tmp_path_factory):
    data = tmp_path_factory.mktemp("six") / "chats.jsonl"
    data.write_text("".join(chats.read_text().splitlines(keepends=True)[:6]))
    return ["--model", folder, "--random_init", "--data", data, "--seq_len", 128, "--no-packing", "--precision", "fp32", "--lr",
            "3e-3", "--warmup", 1, "--steps", STEPS, "--log_every", 1, "--save_every", 1, "--keep", 9]


def run(world, argv, out):
    rows, text, codes = run_ranks(world, argv, out)
    assert codes == [0] * world, text
    return rows, text


def state_of(checkpoint):
    """{(tensor, first row): rows} of a checkpoint's shards."""
    state = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            places = json.loads(reader.metadata()["DCP_SHARDING_INFO"])
        state |= {(name, *places[name]["saved_offsets"]): tensor for name, tensor in load_file(file).items()}
    return state


def curve(rows):
    return [[row[key] for key in ("step", "epoch", "loss", "grad_norm", "lr", "tokens")] for row in rows if "loss" in row]


def assert_same_end(one, other, step=STEPS):
    assert (one / "final").exists()
    for file in (one / "final").glob("*.safetensors"):
        assert file.read_bytes() == (other / "final" / file.name).read_bytes()
    ours, theirs = state_of(one / f"checkpoint-{step}"), state_of(other / f"checkpoint-{step}")
    assert ours.keys() == theirs.keys() and any(name.startswith("optimizer.") for name, *_ in ours)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("world, split", [
    (1, "--grad_accum 2"), (1, "--batch_size 2 --lora --lora_dropout 0.1 --optim adamw8bit --async_save"),
    (1, "--grad_accum 2 --qlora --lora_dropout 0.1 --fsdp2"), (1, "--batch_size 2 --precision bf16 --stochastic_rounding"),
    (1, "--batch_size 2 --optim_in_backward --async_save"),
    (2, "--fsdp2 --optim adamw8bit --async_save"), (2, "--lora --lora_dropout 0.1"), (2, "--fsdp2 --qlora --offload"),
])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(job, tmp_path, world, split):
    argv = [*job, *split.split()]
    rows, _ = run(world, argv, tmp_path / "whole")
    for at in (EDGE - 1, EDGE):  # in the middle of an epoch, and at the edge of two
        again, text = run(world, [*argv, "--resume", tmp_path / f"whole/checkpoint-{at}"], tmp_path / f"from{at}")
        assert f"continuing from {tmp_path}/whole/checkpoint-{at}: {at} steps" in text
        assert curve(again) == curve(rows)[at:]
        assert_same_end(tmp_path / "whole", tmp_path / f"from{at}")


@pytest.mark.parametrize("before, after, flags", [
    (2, 1, "--qlora"), (1, 2, "--optim adamw8bit"), (2, 3, ""), (4, 2, "--lora"), (2, 2, "--lora --no-fsdp2"),
    (4, 3, "--optim adamw8bit"),
])
def test_another_world_goes_on_with_the_same_losses(job, chats, tmp_path, before, after, flags):
    # 12 rows a step in any split. Float32 sums in another order: 1e-4 relative after Adam has divided by small numbers
    sharded = [*job, "--data", chats, "--steps", 4, "--save_every", 2, "--fsdp2", *flags.replace("--no-fsdp2", "").split()]
    # from one mesh to another, too, and from pieces of rows to whole ones
    pieces = 2 if (before, after) == (4, 3) else 1
    mesh = [*["--replicas", 2] * (before == 4), "--sequence_parallel", pieces]
    rows, _ = run(before, [*sharded, "--grad_accum", 12 * pieces // before, *mesh], tmp_path / "whole")
    argv = [*sharded, "--grad_accum", 12 // after, "--resume", tmp_path / "whole/checkpoint-2"]
    argv = [flag for flag in argv if flag != "--fsdp2" or "--no-fsdp2" not in flags]  # sharded before, whole on each rank after
    again, _ = run(after, argv, tmp_path / "again")
    one, other = (torch.tensor(curve(r)[-2:], dtype=torch.float64) for r in (rows, again))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=0)


def test_the_same_command_goes_on_by_itself(job, tmp_path):
    argv = [*job, "--save_every", 2, "--keep", 1, "--lora", "--eval_data", job[4], "--eval_every", 2]
    whole, _ = run(1, argv, tmp_path / "whole")
    assert [path.name for path in (tmp_path / "whole").glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]
    # as if the process had been killed in step 5, in the middle of writing a row, and in the middle of a save
    out = tmp_path / "killed"
    run(1, [*argv, "--resume", "--steps", 4, "--schedule", "constant"], out)  # nothing there yet: from the start
    shutil.rmtree(out / "final")
    _, text, codes = run_ranks(1, [*argv, "--resume"], out)
    assert codes == [1] and "--schedule was constant, is cosine" in text
    (out / "checkpoint-9.part").mkdir()
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 9.9}\n{"step": 5, "lo')
    rows, text = run(1, [*argv, "--resume", "--schedule", "constant"], out)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5] and 9.9 not in [row.get("loss") for row in rows]
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4, 5] and text.count("eval loss") == 1
    assert sorted(path.name for path in out.iterdir()) == ["args.json", f"checkpoint-{STEPS}", "final", "metrics.jsonl"]
    # once more, with nothing left to do, and then with more steps
    again, text = run(1, [*argv, "--resume", "--schedule", "constant"], out)
    assert again == rows and "done: " in text
    rows, _ = run(1, [*argv, "--resume", "--schedule", "constant", "--steps", STEPS + 2], out)
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, STEPS + 3)]
    assert whole[0]["loss"] == rows[0]["loss"]


def test_the_newest_checkpoints_stay_and_numbers_are_no_strings(tmp_path):
    for step in (9, 10, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / train.STATE).write_text("{}")
    for other in ("checkpoint-200", "checkpoint-300.part", "checkpoint-1e3", "checkpoint-"):
        (tmp_path / other).mkdir()  # the first lacks its last file
    (tmp_path / "checkpoint-300.part" / train.STATE).write_text("{}")
    assert [step for step, _ in train.checkpoints(tmp_path)] == [9, 10, 100]


SETTINGS = {
    "--lr 1e-4": "--lr was 0.003, is 0.0001", "--seed 1": "--seed was 0, is 1", "--seq_len 64": "--seq_len was 128, is 64",
    "--lora_rank 4": "--lora_rank was 16, is 4", "--weight_decay 0": "--weight_decay was", "--clip 2": "--clip was 1.0, is 2",
    "--grad_accum 3": "rows a step (--batch_size x --grad_accum x ranks / --sequence_parallel) was 2, is 3",
    "--train_on all": "masks of --data differ",
    "--data {chats}": "masks of --data differ", "--optim adamw8bit": "--optim was adamw, is adamw8bit",
    "--precision mixed": "--precision was fp32, is mixed", "--packing": "--packing was False, is True",
    "--schedule linear": "--schedule was cosine, is linear", "--min_lr 1": "--min_lr was 0.0", "--warmup 0": "--warmup was 1",
    "--qlora": "method was --lora, is --qlora", "--lora_targets q_proj": "--lora_targets was ['down_proj', 'gate_proj',",
    "--lora_dropout 0.5": "--lora_dropout was 0.0, is 0.5", "--lora_alpha 8": "--lora_alpha was 32, is 8",
    "--steps 1": "step 2, and this run ends at step 1",
}


@pytest.fixture(scope="module")
def lora_run(job, tmp_path_factory):
    """A run of two steps, and what main() says in this process to its flags and others."""
    out = tmp_path_factory.mktemp("lora") / "run"
    argv = [*job, "--steps", 2, "--save_every", 2, "--grad_accum", 2, "--lora", "--sample", ""]
    run(1, argv, out)
    return out, [str(arg) for arg in argv]


@pytest.mark.parametrize("flags, says", SETTINGS.items())
def test_what_would_change_the_mathematics_is_refused_by_name(lora_run, chats, flags, says):
    out, argv = lora_run
    flags = flags.format(chats=chats)
    argv = [arg for arg in argv if arg != "--lora"] if flags == "--qlora" else argv
    with pytest.raises(SystemExit) as stop:
        train.main([*argv, "--resume", "--out", str(out), *flags.split()])
    assert says in str(stop.value) and f"--resume {out}/checkpoint-2" in str(stop.value)
    assert (out / "final").exists() and (out / "checkpoint-2" / train.STATE).exists()


def test_what_does_not_change_the_mathematics_is_accepted(lora_run, tmp_path):
    out, argv = lora_run
    flags = ["--steps", 3, "--save_every", 9, "--keep", 1, "--no-activation_checkpointing", "--ce_chunk", 64,
             "--no-fused_adamw", "--log_every", 5, "--batch_size", 2, "--grad_accum", 1, "--tiled_mlp", 64, "--fsdp2",
             "--resume", out]
    rows, _ = run(1, [*argv, *flags], tmp_path / "branch")
    assert rows[0]["step"] == 3


def test_another_base_model_is_refused(folder, job, tmp_path):
    base = tmp_path / "base"
    run(1, [*job, "--steps", 1, "--save_every", 0], tmp_path / "make")
    shutil.copytree(tmp_path / "make/final", base)
    argv = [*job[3:], "--model", base, "--qlora", "--grad_accum", 2]
    run(1, [*argv, "--steps", 2], tmp_path / "run")
    moved = tmp_path / "moved"
    base.rename(moved)  # another name for the same weights is no other model
    argv[argv.index(base)] = moved
    run(1, [*argv, "--steps", 3, "--resume"], tmp_path / "run")
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-3] ^= 1  # one bit of one number
    (moved / "model.safetensors").write_bytes(weights)
    _, text, codes = run_ranks(1, [*argv, "--resume"], tmp_path / "run")
    assert codes == [1] and "the frozen weights (checksum) differ" in text and "give what the checkpoint was made with" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fingerprint_does_not_depend_on_the_cut_and_sees_any_change(dtype):
    w = torch.randn(37, 53).to(dtype)
    whole = lm.fingerprint("w", w, 0)
    for cuts in ([0, 37], [0, 1, 37], [0, 10, 20, 37]):
        parts = sum(lm.fingerprint("w", w[a:b], a) for a, b in zip(cuts, cuts[1:]))
        assert (parts - whole) % (1 << 64) == 0
    others = [lm.fingerprint("v", w, 0), lm.fingerprint("w", w.flip(0), 0), lm.fingerprint("w", w.flip(1), 0)]
    assert len({whole, *others}) == 4
    w[36, 52] = -w[36, 52]
    assert (lm.fingerprint("w", w, 0) - whole) % (1 << 64)


def test_where_there_is_nothing_to_resume(job, tmp_path):
    _, text, codes = run_ranks(1, [*job, "--resume", tmp_path / "nowhere"], tmp_path / "a")
    assert codes == [1] and "no complete checkpoint" in text and str(tmp_path / "nowhere") in text
    run(1, [*job, "--steps", 2, "--grad_accum", 2], tmp_path / "run")
    _, text, codes = run_ranks(1, [*job, "--grad_accum", 2, "--resume", tmp_path / "run/checkpoint-1"], tmp_path / "run")
    assert codes == [1] and "holds checkpoint-2, which is newer" in text
    _, text, codes = run_ranks(1, [*job, "--grad_accum", 2], tmp_path / "run")
    assert codes == [1] and "--resume continues it" in text
    run(1, [*job, "--steps", 1, "--save_every", 0], tmp_path / "unsaved")
    _, text, codes = run_ranks(1, [*job, "--resume"], tmp_path / "unsaved")
    assert codes == [1] and "holds a finished run and no checkpoint" in text


def test_resume_without_out_takes_the_newest_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.find_run(None, "auto", [])[1] is None  # none at all: a new one
    for age, name in enumerate(("20260101-000000", "20250101-000000")):
        (tmp_path / "out" / name / "checkpoint-3").mkdir(parents=True)
        (tmp_path / "out" / name / "checkpoint-3" / train.STATE).write_text("{}")
        (tmp_path / "out" / name / "args.json").write_text(json.dumps({"torchrun": [name]}))
        os.utime(tmp_path / "out" / name / "args.json", (age, age))
    assert train.find_run(None, "auto", []) == ("out/20250101-000000", "out/20250101-000000/checkpoint-3")
    # started again by torchrun: its own run, without --resume and without --out
    assert train.find_run(None, None, ["20260101-000000"]) == ("out/20260101-000000", "out/20260101-000000/checkpoint-3")
    assert train.find_run(None, None, ["another"])[1] is None


def make_run(folder, *steps, **args):
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        (folder / f"checkpoint-{step}" / train.STATE).write_text("{}")
    folder.mkdir(exist_ok=True)
    (folder / "args.json").write_text(json.dumps(args))


def test_resume_finds_the_folder_of_the_run(tmp_path, monkeypatch):
    make_run(tmp_path / "run", 2, 4)
    monkeypatch.chdir(tmp_path / "run/checkpoint-4")
    for way in (".", "../checkpoint-4", str(tmp_path / "run"), ".."):  # its parent, and not itself, is where the run goes on
        assert train.find_run(None, way, []) == (str(tmp_path / "run"), str(tmp_path / "run/checkpoint-4"))
    shutil.copytree(tmp_path / "run/checkpoint-2", tmp_path / "run/best")
    with pytest.raises(ValueError, match="holds checkpoint-4, which is newer"):
        train.find_run(None, str(tmp_path / "run/best"), [])


def test_torchrun_restarts_a_branch_from_its_own_checkpoint(tmp_path):
    make_run(tmp_path / "run", 2, 4)
    make_run(tmp_path / "branch", 3, torchrun=["me", "gone"])
    branch = str(tmp_path / "branch"), str(tmp_path / "run/checkpoint-2")
    assert train.find_run(*branch, ["me"]) == (branch[0], f"{branch[0]}/checkpoint-3")
    with pytest.raises(ValueError, match="holds a run already"):
        train.find_run(*branch, ["another"])
    make_run(tmp_path / "early", torchrun=["me", "gone"], resume=branch[1])  # killed before its first save
    assert train.find_run(str(tmp_path / "early"), branch[1], ["me", "new"]) == (str(tmp_path / "early"), branch[1])
    with pytest.raises(ValueError, match="has no checkpoint of its own yet"):
        train.find_run(str(tmp_path / "early"), "auto", ["another"])
    (tmp_path / "out/other").mkdir(parents=True)
    (tmp_path / "out/other/args.json").write_text("{")  # damaged: no reason not to start
    assert not train.started_by(["me"], tmp_path / "out/other")


def signal_in_evaluation(argv):
    evaluate = train.evaluate

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args)

    train.evaluate = interrupted
    train_main(argv)


def test_a_branch_that_is_stopped_at_once_has_a_checkpoint_of_its_own(job, tmp_path):
    argv = [*job, "--grad_accum", 2, "--lora", "--eval_data", job[4], "--eval_every", 1, "--sample", ""]
    rows, _ = run(1, argv, tmp_path / "run")
    branch = [str(arg) for arg in [*argv, "--resume", tmp_path / "run/checkpoint-2", "--out", tmp_path / "branch"]]
    log = tmp_path / "rank.log"
    assert start_ranks(1, signal_in_evaluation, (branch,), [log]) == [128 + signal.SIGTERM], log.read_text()
    assert f"stopped by SIGTERM after step 2 of {STEPS}: {tmp_path}/branch/checkpoint-2 is saved" in log.read_text()
    again, _ = run(1, [*argv, "--resume"], tmp_path / "branch")
    assert curve(again) == curve(rows)[2:]
    assert [row["step"] for row in again if "eval_loss" in row] == [2, 3, 4, 5]
    assert_same_end(tmp_path / "run", tmp_path / "branch")


def two_torchruns(argv, folder):
    """Two agents of a rank each, as on two nodes; the first hosts the rendezvous -> (processes, their logs)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 1, "--max-restarts", 1,
               "--rdzv_backend", "c10d", "--rdzv_id", "two", "--rdzv_endpoint", f"localhost:{port}", "--rdzv_conf"]
    agents, logs = [], [folder / f"node{node}.log" for node in range(2)]
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)  # for each: as many threads a rank as on one machine, and so the same sums
    for node, log in enumerate(logs):
        own = functools.partial(os.sched_setaffinity, 0, cores[node * half :][:half] or cores)
        words = [*command, f"is_host={1 - node}", HERE.parent / "train.py", *argv]
        with open(log, "w") as file:
            agents.append(subprocess.Popen([str(word) for word in words], stdout=file, stderr=subprocess.STDOUT,
                                           env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
                                           preexec_fn=own))
    return agents, logs


def ranks_of(agent):
    return [int(pid) for pid in subprocess.run(["pgrep", "-P", str(agent.pid)], capture_output=True, text=True).stdout.split()]


def wait_for(done, agents, logs):
    deadline = time.monotonic() + 120
    while not done():
        text = "".join(log.read_text() for log in logs)
        assert time.monotonic() < deadline and all(agent.poll() is None for agent in agents), text
        time.sleep(0.002)


def test_two_torchruns_survive_a_killed_rank_and_go_on_after_a_killed_node(job, tmp_path):
    steps, out = 40, tmp_path / "run"
    argv = [*job, "--fsdp2", "--lora", "--sample", "", "--steps", steps, "--save_every", 3, "--keep", 2]
    run(2, argv, tmp_path / "whole")
    agents, logs = two_torchruns([*argv, "--out", out], tmp_path)
    try:
        wait_for(lambda: train.checkpoints(out), agents, logs)
        os.kill(ranks_of(agents[1])[0], signal.SIGKILL)
        wait_for(lambda: any("continuing from" in log.read_text() for log in logs), agents, logs)  # both nodes started anew
        again = int(re.findall(r"continuing from \S+/checkpoint-(\d+)", "".join(log.read_text() for log in logs))[0])
        wait_for(lambda: train.checkpoints(out)[-1][0] > again, agents, logs)
        for pid in (*ranks_of(agents[0]), agents[0].pid):  # the machine that hosts the rendezvous is gone
            os.kill(pid, signal.SIGKILL)
        assert agents[1].wait(60) != 0
        assert not (out / "final").exists()
    finally:
        for agent in agents:
            for pid in ranks_of(agent):
                os.kill(pid, signal.SIGKILL)
            agent.kill()
    _, text = run(2, [*argv, "--resume"], out)
    assert "continuing from" in text
    assert_same_end(tmp_path / "whole", out, steps)


# ---------------------------------------------------------------- numbers that are not finite


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def break_at(step, rank, what, argv):
    """train.main(argv) in which one rank's second MLP meets a number that is not finite, from a step on."""
    make, read, forward, state = data.Loader.ahead, data.Loader.step, lm.Block.feed_forward, {}

    def ahead(loader, start, *args, **kwargs):
        for n, rows in enumerate(make(loader, start, *args, **kwargs), start):
            state["broken"] = loader.rank == rank and n == step - 1
            yield rows

    def read_step(loader, n, grad_accum):
        if threading.current_thread() is threading.main_thread():  # the second run of a step
            state["broken"] = loader.rank == rank and n == step - 1
        return read(loader, n, grad_accum)

    def feed_forward(block, x):
        if not state.get("broken") or block is not state["blocks"][1]:
            return forward(block, x)
        mlp, normed = block.mlp, block.post_attention_layernorm(x)
        if what == "forward":
            return x + mlp.down_proj(mlp.hidden(normed * torch.nan))
        y = mlp.down_proj(mlp.hidden(normed))
        if what == "weight":
            return x + y + (BadGradient.apply(mlp.up_proj.weight, torch.nan).sum() * 0).to(x.dtype)
        return x + BadGradient.apply(y, torch.inf)

    build = lm.Transformer.__init__

    def init(model, c):
        build(model, c)
        state["blocks"] = list(model.model.layers)

    data.Loader.ahead, data.Loader.step, lm.Block.feed_forward, lm.Transformer.__init__ = ahead, read_step, feed_forward, init
    train_main(argv)


@pytest.mark.parametrize("what, flags, place", [
    ("forward", "--fsdp2 --lora", "rank 1: the output of model.layers.1.mlp.gate_proj.lora_A"),
    ("forward", "--no-activation_checkpointing", "rank 1: the output of model.layers.1.mlp.gate_proj"),
    ("backward", "--fsdp2 --qlora --no-chunked_ce", "rank 1: the gradient of the output of model.layers.1.mlp.down_proj"),
    ("weight", "--no-activation_checkpointing", "rank 1: the gradient of model.layers.1.mlp.up_proj.weight"),
    ("backward", "--optim_in_backward", "rank 1: the gradient of the output of model.layers.1.mlp.down_proj"),
])
def test_a_number_that_is_not_finite_is_traced_to_step_rank_and_module(job, tmp_path, what, flags, place):
    argv = [*job, "--save_every", 2, "--log_every", 4, *flags.split(), "--sample", "", "--out", tmp_path / "run"]
    logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
    codes = start_ranks(2, break_at, (3, 1, what, [str(arg) for arg in argv]), logs)
    text = "".join(log.read_text() for log in logs)
    assert codes == [train.NOT_FINITE] * 2, text
    assert f"not finite at step 3, first in {place}" in text and text.count("not finite") == 1
    # found at step 4, the next one that is logged and saved: what is saved is that of step 2
    assert [step for step, _ in train.checkpoints(tmp_path / "run")] == [2] and not (tmp_path / "run/final").exists()


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [
    "--lora --lora_dropout 0.1", "--fsdp2 --qlora --offload --async_save", "--fsdp2 --async_save",
    "--optim adamw8bit --async_save", "--precision bf16 --stochastic_rounding --fsdp2",
])
def test_a_resumed_run_on_a_gpu_goes_on_with_the_same_losses(job, tmp_path, flags):
    argv = [*job, "--precision", "mixed", "--grad_accum", 2, *flags.split(), "--sample", ""]
    rows = []
    for out, more in (("whole", []), ("again", ["--resume", tmp_path / "whole" / f"checkpoint-{EDGE}"])):
        command = [sys.executable, HERE.parent / "train.py", *argv, "--out", tmp_path / out, *more]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True,
                              env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"})
        assert done.returncode == 0, done.stderr
        rows.append(curve(json.loads(line) for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()))
    whole, again = rows
    assert again[0][2] == whole[EDGE][2]  # the first loss is a forward of the very same weights and dropout
    # after it flash attention's backward adds up dq in any order
    torch.testing.assert_close(torch.tensor(again), torch.tensor(whole[EDGE:]), rtol=2e-2, atol=0)
