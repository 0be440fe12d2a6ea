"""Resume is exact: k steps, a new process, the rest: bit for bit the uninterrupted run; on another world within
rounding."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from types import SimpleNamespace

import pytest
import torch
from conftest import HERE, QWEN35, on_ranks, random_model, run_ranks, state_of

import model as lm
import train
import data
import nf4

STEPS, EDGE = 5, 3  # six rows, two a step: the first epoch ends with step 3, the run in the middle of the second


@pytest.fixture(scope="module")
def job(folder, chats, tmp_path_factory):
    path = tmp_path_factory.mktemp("six") / "chats.jsonl"
    path.write_text("".join(chats.read_text().splitlines(keepends=True)[:11]))
    return (f"--model {folder} --random_init --data {path} --seq_len 128 --precision fp32 --lr 3e-3 --warmup 1 "
            f"--steps {STEPS} --log_every 1 --save_every 1 --keep 9").split()


def run(world, argv, out):
    rows, text, codes = run_ranks(world, argv, out)
    assert codes == [0] * world, text
    return rows, text


def evaluations(rows):
    return [row for row in rows if "eval_loss" in row]


def state_at(out, step):
    return json.loads((out / f"checkpoint-{step}" / train.STATE).read_text())


def curve(rows):
    keys = "step", "epoch", "loss", "grad_norm", "lr", "tokens"
    return [[row[key] for key in keys] for row in rows if "loss" in row]


def assert_same_end(one, other, step=STEPS):
    files = [*one.glob("final/*.safetensors"), *one.glob(f"checkpoint-{step}/*.safetensors")]
    assert len(files) >= 2
    for file in files:
        assert file.read_bytes() == (other / file.relative_to(one)).read_bytes(), file


@pytest.mark.parametrize("world, step, flags", [
    (1, EDGE - 1, "--grad_accum 2"), (1, EDGE, "--batch_size 2 --lora --lora_dropout 0.1"),
    (1, EDGE - 1, "--batch_size 2 --precision bf16 --stochastic_rounding --optim adamw8bit --optim_in_backward"),
    (2, EDGE - 1, "--lora --lora_dropout 0.1"), (2, EDGE, "--fsdp2 --optim adamw8bit"),
    (2, EDGE - 1, "--fsdp2 --qlora --lora_dropout 0.1 --offload --tiled_mlp 64"),
    (2, EDGE - 1, "--fsdp2 --model qwen3.5 --optim adamw8bit"),
])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(job, tmp_path, world, step, flags):
    flags = flags.replace("qwen3.5", str(random_model(tmp_path / "qwen3.5", **QWEN35)))
    job = [*job, "--eval_data", job[4], "--eval_every", 2]
    rows, _ = run(world, [*job, *flags.split()], tmp_path / "whole")
    # steps begin in the middle of an epoch and at the edge of two
    assert next(row["epoch"] for row in rows if row["step"] == EDGE and "loss" in row) == 1
    checkpoint = tmp_path / f"whole/checkpoint-{step}"
    again, text = run(world, [*job, *flags.split(), "--resume", checkpoint], tmp_path / "again")
    assert f"continuing after step {step} of {checkpoint}" in text
    assert curve(again) == curve(rows)[step:]
    # The evaluation of step 2 was noted in its checkpoint, so it is known and not repeated.
    assert evaluations(again) == [row for row in evaluations(rows) if row["step"] > step]
    assert [row["step"] for row in evaluations(rows)] == [2, 4, STEPS]
    assert state_at(tmp_path / "again", STEPS)["best_eval"] == state_at(tmp_path / "whole", STEPS)["best_eval"]
    assert_same_end(tmp_path / "whole", tmp_path / "again")


def test_a_newer_result_is_not_hidden_by_an_older_merged_model(job, tmp_path):
    run(1, [*job, "--lora", "--merge", "--steps", 2], tmp_path / "run")
    assert data.find_result(str(tmp_path / "run")) == (str(tmp_path / "run/merged"), None)
    run(1, [*job, "--lora", "--resume", tmp_path / "run"], tmp_path / "run")
    assert data.find_result(str(tmp_path / "run"))[1] == str(tmp_path / "run/final")
    assert not (tmp_path / "run/merged").exists()


def test_another_world_continues_with_the_same_losses(job, tmp_path):
    argv = [*job, "--fsdp2", "--qlora", "--optim", "adamw8bit"]
    rows, _ = run(2, [*argv, "--grad_accum", 3], tmp_path / "whole")
    again, _ = run(3, [*argv, "--grad_accum", 2, "--resume", tmp_path / "whole/checkpoint-2"], tmp_path / "again")
    one, other = (torch.tensor(curve(r)[-3:], dtype=torch.float64) for r in (rows, again))
    # float32 sums in another order; Adam divides by small numbers
    torch.testing.assert_close(one, other, rtol=1e-4, atol=0)


LAYOUTS = [(1, ""), (2, ""), (2, "--fsdp2"), (3, "--fsdp2"), (4, "--fsdp2"), (4, "--fsdp2 --replicas 2")]


def save_and_load(ranks, folder, model_folder, flags):
    """Writes a checkpoint of this layout of ranks, then reads those that other layouts have written."""
    args = train.parse_args(["--precision", "fp32", "--optim", "adamw8bit", *flags.split()])
    model = lm.on_meta(lm.parse_config(data.read_json(model_folder / "config.json")), args)
    if args.fsdp2:
        train.shard_(model, args, ranks.device)
    model.to_empty(device="cpu")
    optimizer = train.make_optimizer(dict(model.named_parameters()), args, torch.zeros(()))
    tensors = train.training_tensors(model, optimizer)
    expected = {}
    for name, tensor in tensors.items():  # every number depends on its tensor and its place
        mine, start = nf4.local(tensor)
        whole = torch.arange(tensor.numel()).reshape(tensor.shape) * 7 + zlib.crc32(name.encode()) % 1000
        expected[name] = (whole[start : start + len(mine)] if mine.dim() else whole).to(mine.dtype)
        mine.copy_(expected[name])
    saver = train.Saver(folder / f"run {ranks.world} {flags}", args.keep, ranks)
    saver.save(tensors, state_of(1))
    for checkpoint in folder.glob("run*/checkpoint-1"):
        state = train.read_state(checkpoint, {}, ranks)
        for tensor in tensors.values():
            nf4.local(tensor)[0].zero_()
        train.load_checkpoint(checkpoint, state["files"], tensors)
        assert all(torch.equal(nf4.local(tensor)[0], expected[name]) for name, tensor in tensors.items()), checkpoint


def test_any_layout_of_ranks_loads_what_any_other_wrote_bit_for_bit(folder, tmp_path):
    for world, flags in LAYOUTS + LAYOUTS[-2::-1]:  # the second time, those that come later have written theirs, too
        shutil.rmtree(tmp_path / f"run {world} {flags}", ignore_errors=True)
        on_ranks(world, save_and_load, tmp_path, folder, flags)
    assert len(list(tmp_path.glob("run*/checkpoint-1"))) == len(LAYOUTS)


def test_the_same_command_continues_by_itself(job, chats, tmp_path):
    out = tmp_path / "run"
    argv = [*job, *f"--schedule constant --save_every 2 --keep 1 --eval_data {job[4]} --eval_every 2 --resume".split()]
    rows, _ = run(1, [*argv, "--steps", 4], out)  # nothing there yet: from the start
    losses = {row["step"]: row["eval_loss"] for row in evaluations(rows)}
    assert losses.keys() == {2, 4} and losses[4] < losses[2]
    # Only the evaluation after the last save shows that checkpoint-4 is the best one: then checkpoint-2 goes.
    assert train.checkpoints(out).keys() == {4}
    assert state_at(out, 4)["best_eval"]["step"] == 4
    # as if the process had been killed in step 5, in the middle of writing a row, and in the middle of a save
    shutil.rmtree(out / "final")
    (out / "checkpoint-9.part").mkdir()
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 9.9}\n{"step": 5, "lo')
    rows, text = run(1, argv, out)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5] and rows[-1].get("loss") != 9.9
    # the last evaluation of a run that is made longer counts, and is not repeated
    assert {row["step"]: row["eval_loss"] for row in evaluations(rows[:-1])} == losses
    assert rows[-1]["step"] == 5 and text.count("eval loss") == 1
    names = {path.name for path in out.iterdir()}
    kept = {"checkpoint-5", f"checkpoint-{state_at(out, 5)['best_eval']['step']}"}
    assert names == {"args.json", *kept, "final", "lock", "loss.svg", "metrics.jsonl"}
    # The same command once more has nothing to train, and nothing to evaluate.
    again, text = run(1, argv, out)
    assert again == rows and "eval loss" not in text
    rows, text = run(1, [*argv, "--steps", STEPS + 2, "--eval_data", chats], out)
    assert f"was to end at step {STEPS}, not {STEPS + 2}: the learning rate changes" in text
    assert "was evaluated on other --eval_data: its best evaluation is forgotten" in text
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, STEPS + 3)]
    assert state_at(out, STEPS + 2)["best_eval"]["step"] > STEPS


def test_the_best_checkpoint_stays_though_its_evaluation_comes_later(tmp_path):
    alone = train.Ranks(False, 1800)
    saver = train.Saver(tmp_path, 1, alone)
    state = state_of(0)

    def save_and_evaluate(step, loss):
        """-> steps of the checkpoints after the save, and after the evaluation."""
        state["step"] = step
        saver.save({"w": torch.ones(2)}, state)
        saved = sorted(train.checkpoints(tmp_path))
        if not state["best_eval"] or loss < state["best_eval"]["eval_loss"]:
            state["best_eval"] = {"step": step, "eval_loss": loss}
        saver.note_evaluation(state)
        assert train.read_state(tmp_path / f"checkpoint-{step}", {}, alone)["best_eval"] == state["best_eval"]
        return saved, sorted(train.checkpoints(tmp_path))

    assert save_and_evaluate(1, 3.0) == ([1], [1])
    assert save_and_evaluate(2, 2.0) == ([1, 2], [2])  # 1 was the best one until 2 was evaluated
    assert save_and_evaluate(3, 5.0) == ([2, 3], [2, 3])
    assert save_and_evaluate(4, 4.0) == ([2, 4], [2, 4])
    # An evaluation between two saves has no checkpoint to be noted in.
    state["step"] = 5
    before = (tmp_path / "checkpoint-4" / train.STATE).read_bytes()
    saver.note_evaluation(state)
    assert (tmp_path / "checkpoint-4" / train.STATE).read_bytes() == before


def test_an_evaluation_that_a_full_disk_refuses_is_said_and_harms_no_checkpoint(tmp_path, capsys):
    alone = train.Ranks(False, 1800)
    saver = train.Saver(tmp_path, 1, alone)
    state = state_of(1)
    saver.save({"w": torch.ones(2)}, state)
    (tmp_path / "checkpoint-1/trainer_state.part").symlink_to("/dev/full")
    saver.note_evaluation(state | {"evaluated": 1})
    said = capsys.readouterr().out
    assert "the evaluation was not noted: " in said and "No space left" in said
    assert train.read_state(tmp_path / "checkpoint-1", {}, alone)["evaluated"] == 0


# ---------------------------------------------------------------- what must stay the same


@pytest.fixture(scope="module")
def lora_run(job, tmp_path_factory):
    """A run of two steps on a copy of the built-in model -> (its folder, its flags). Beside it the same weights by
    another name, and weights of which one bit differs."""
    path = tmp_path_factory.mktemp("lora")
    for name in ("base", "same", "other"):
        shutil.copytree(HERE / "tiny", path / name)
    weights = bytearray((path / "other/model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (path / "other/model.safetensors").write_bytes(weights)
    argv = ["--model", str(path / "base"), *job[3:], *"--steps 2 --save_every 2 --grad_accum 2 --lora".split()]
    run(1, argv, path / "run")
    return path / "run", argv


SETTINGS = {
    "--lr 1e-4": "--lr was 0.003, is 0.0001", "--seed 1": "--seed was 0, is 1", "--clip 2": "--clip was 1.0, is 2",
    "--seq_len 64": "--seq_len was 128, is 64", "--weight_decay 0": "--weight_decay was", "--warmup 0": "--warmup was",
    "--grad_accum 3": "rows per step (--batch_size x --grad_accum x ranks / --sequence_parallel) was 2, is 3",
    "--train_on all": "--data's tokens and masks was", "--data {chats}": "--data's tokens and masks was",
    "--optim adamw8bit": "--optim was adamw, is adamw8bit", "--precision bf16": "--precision was fp32, is bf16",
    "--no-packing": "--packing was True, is False", "--schedule linear": "--schedule was cosine, is linear",
    "--min_lr 1": "--min_lr was 0.0", "--qlora": "--qlora was False, is True", "--lora_alpha 8": "--lora_alpha was 32",
    "--lora_targets q_proj": "--lora_targets was ['q_proj',", "--lora_rank 4": "--lora_rank was 16, is 4",
    "--lora_dropout 0.5": "--lora_dropout was 0.0, is 0.5", "--model {other}": "--model's frozen weights was",
    "--steps 1": "this run ends at step 1: raise --steps",
}


@pytest.mark.parametrize("flags", SETTINGS)
def test_what_would_change_the_mathematics_is_refused_by_name(lora_run, chats, capsys, flags):
    out, argv = lora_run
    argv = [arg for arg in argv if arg != "--lora" or flags != "--qlora"]
    given = flags.format(chats=chats, other=out.parent / "other").split()
    assert train.launch([*argv, "--resume", "--out", str(out), *given]) == 1
    message = capsys.readouterr().err
    assert SETTINGS[flags] in message and f"--resume {out}/checkpoint-2" in message
    assert (out / "final").exists() and (out / "checkpoint-2" / train.STATE).exists()


def test_adapters_on_nf4_of_another_format_are_refused_by_name(tmp_path, monkeypatch):
    config = lm.parse_config(data.PRESETS["qwen3-0.6b"])
    loader = SimpleNamespace(documents=SimpleNamespace(checksum=1))
    source = SimpleNamespace(crc=lambda: 2)
    alone = train.Ranks(False, 1800)

    def settings(method):
        return train.fixed_settings(train.parse_args([method]), config, 4, loader, source)

    before = settings("--lora")
    for word in (f"blocks of {nf4.BLOCK}", f"{nf4.SCALE_STEPS} steps of scales"):
        assert word in nf4.FORMAT
    train.Saver(tmp_path, 1, alone).save({"w": torch.ones(2)}, state_of(1) | {"settings": settings("--qlora")})
    monkeypatch.setattr(nf4, "FORMAT", "another one")
    with pytest.raises(ValueError, match=r"the format of NF4 was codes by .*codebook [0-9a-f]{8}, is another one: "):
        train.read_state(tmp_path / "checkpoint-1", settings("--qlora"), alone)
    assert settings("--lora") == before  # without NF4 its format does not matter


def test_a_change_of_nf4s_bytes_is_a_change_of_its_format():
    """If this fails because quantize() now chooses other codes or scales: give nf4.FORMAT other words, too, so that
    adapters are not resumed on weights that they were not trained on, and then write both down here."""
    # exact in float32 on any machine; the last row is zero
    w_ND = (torch.arange(1024) * 37 % 101 - 50).view(4, 256) * torch.tensor([[1.0], [0.125], [7.0], [0.0]])
    crc = 0
    for part in nf4.quantize(w_ND):
        crc = zlib.crc32(part.numpy().tobytes(), crc)
    assert (nf4.FORMAT, f"{crc:08x}") == (
        "codes by the largest magnitude, blocks of 64, 254 steps of scales, codebook 42a89f9f", "0a566979")


def test_what_does_not_change_the_mathematics_is_accepted(lora_run, tmp_path):
    out, argv = lora_run
    changed = (f"--resume {out} --model {out.parent}/same --steps 3 --save_every 9 --no-activation_checkpointing "
               "--fsdp2 --ce_chunk 64 --no-fused_adamw --batch_size 2 --grad_accum 1 --tiled_mlp 64").split()
    rows, _ = run(1, [*argv, *changed], tmp_path / "branch")
    assert rows[0]["step"] == 3


# ---------------------------------------------------------------- which run, which checkpoint


OLDER, NEWER = "out/20251231-235959", "out/20260101-000000"
RUNS = [  # --out, --resume: folder of the run, its checkpoint, or words of the refusal
    (None, None, "out/2", None), (None, "auto", NEWER, f"{NEWER}/checkpoint-5"),
    ("run", "auto", "run", "run/checkpoint-10"), ("nothing", "auto", "nothing", None),
    # a run that ended before its first save starts again, as a restart by torchrun does; without --resume it stays
    ("early", "auto", "early", None), ("early", None, "contains a run", None),
    ("run", None, "contains a run", None), ("early", "run", "contains a run", None),
    (None, "nowhere", "no complete checkpoint", None), (None, "early", "no complete checkpoint", None),
    (None, "run/checkpoint-2", "contains a run, which is never overwritten", None),
    *((None, resume, "run", "run/checkpoint-10")
      for resume in ("run", "run/checkpoint-10", ".", "../checkpoint-10", "..")),  # the dots: inside the checkpoint
    ("branch", "run/checkpoint-2", "branch", "run/checkpoint-2"), ("branch", "run", "branch", "run/checkpoint-10"),
    ("branched", "run/checkpoint-2", "contains a run", None),
    ("branched", "auto", "branched", "branched/checkpoint-3"),
]


@pytest.mark.parametrize("out, resume, run, checkpoint", RUNS)
def test_resume_finds_the_run_and_never_overwrites_one(tmp_path, monkeypatch, out, resume, run, checkpoint):
    for name in ("run/checkpoint-2", "run/checkpoint-9", "run/checkpoint-10", "run/checkpoint-300.part",
                 f"{NEWER}/checkpoint-5", f"{OLDER}/checkpoint-30", "out/named/checkpoint-7", "branched/checkpoint-3"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / train.STATE).write_text("{}")
    for name in ("run/checkpoint-200", "early"):
        (tmp_path / name).mkdir()  # never completed
    for name in ("run", "branched", "early", NEWER, OLDER):
        (tmp_path / name / "args.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "run/checkpoint-10" if (resume or "").startswith(".") else tmp_path)
    if " " in run:
        with pytest.raises(ValueError, match=run):
            train.folder_of_run(out, resume, train.checkpoint_to_resume(out, resume))
        return
    continued = train.checkpoint_to_resume(out, resume)
    found = train.folder_of_run(out, resume, continued)
    assert str(found.resolve()).startswith(str(tmp_path / run))
    assert (continued and continued.resolve()) == (checkpoint and tmp_path / checkpoint)


# ---------------------------------------------------------------- torchrun


def test_torchrun_restarts_a_killed_rank_and_the_run_continues(job, tmp_path):
    argv = [*job, *"--fsdp2 --lora --steps 20 --save_every 2 --keep 2".split()]
    whole, out, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    run(2, argv, whole)
    command = [sys.executable, *"-m torch.distributed.run --standalone --max-restarts 1 --nproc_per_node 2".split()]
    with open(log, "w") as file:
        agent = subprocess.Popen([*command, HERE.parent / "train.py", *argv, "--out", out, "--resume"], stdout=file,
                                 stderr=subprocess.STDOUT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    try:
        deadline = time.monotonic() + 600
        while not train.checkpoints(out):
            assert agent.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        ranks = subprocess.run(["pgrep", "-P", str(agent.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(ranks[1]), signal.SIGKILL)
        assert agent.wait(600) == 0 and "continuing after step" in log.read_text(), log.read_text()
    finally:
        agent.terminate()  # and its ranks
    assert_same_end(whole, out, 20)
