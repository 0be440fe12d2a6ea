"""Resume is exact: k steps, a new process, the rest: bit for bit the uninterrupted run; on another world within
rounding."""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from conftest import HANG_S, HERE, QWEN35, in_ci, on_ranks, random_model, run_ranks, start_ranks, state_of

import model as lm
import train
import data
import nf4

# Six rows, two a step: the first epoch ends with step 3, the run in the middle of the second.
EDGE = 3
STEPS = 5
ALONE = train.Ranks(False, 1800)


@pytest.fixture(scope="module")
def six_rows(chats, tmp_path_factory):
    """A file of chats that fill six rows of 128 tokens."""
    path = tmp_path_factory.mktemp("six") / "chats.jsonl"
    lines = chats.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:11]))
    return path


@pytest.fixture(scope="module")
def settings(six_rows):
    """The flags of every run here but for its model: each step is logged and saved."""
    # The cosine gives each step another learning rate: a resume that counts wrong shows in it.
    size = f"--data {six_rows} --seq_len 128 --steps {STEPS}"
    mathematics = "--precision fp32 --lr 3e-3 --warmup 1"
    return f"{size} {mathematics} --log_every 1 --save_every 1 --keep 9".split()


@pytest.fixture(scope="module")
def job(folder, settings):
    return ["--model", folder, "--random_init", *settings]


def run(world, argv, out):
    """A run that must succeed -> (rows of metrics.jsonl, what all ranks said)."""
    rows, said, codes = run_ranks(world, argv, out)
    assert codes == [0] * world, said
    return rows, said


def steps_of(rows):
    return [row["step"] for row in rows]


def evaluations(rows):
    return [row for row in rows if "eval_loss" in row]


def trained(rows):
    """The rows of training steps."""
    return [row for row in rows if "loss" in row]


def curve(rows):
    """What a resume must repeat of each training step; seconds are not among it."""
    keys = "step", "epoch", "loss", "grad_norm", "lr", "tokens"
    return [[row[key] for key in keys] for row in trained(rows)]


def json_rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def state_at(out, step):
    return json.loads((out / f"checkpoint-{step}" / train.STATE).read_text())


def assert_same_end(one, other, step=STEPS):
    """The results and the last checkpoints of two runs are the same bytes."""
    files = [*one.glob("final/*.safetensors"), *one.glob(f"checkpoint-{step}/*.safetensors")]
    assert len(files) >= 2  # one of each at least, or nothing would be compared
    for file in files:
        assert file.read_bytes() == (other / file.relative_to(one)).read_bytes(), file


# ---------------------------------------------------------------- the same losses, the same bytes


@pytest.mark.parametrize("world, step, flags", [
    (1, EDGE - 1, "--grad_accum 2"),
    # dropout's random bits depend on the step, and no random state is saved
    (1, EDGE, "--batch_size 2 --lora --lora_dropout 0.1"),
    # whatever rounds at random must do so again in the same way
    (1, EDGE - 1, "--batch_size 2 --precision bf16 --stochastic_rounding --optim adamw8bit --optim_in_backward"),
    (2, EDGE, "--fsdp2 --qlora --lora_dropout 0.1 --offload --tiled_mlp 64"),
    (2, EDGE - 1, "--fsdp2 --model qwen3.5 --optim adamw8bit"),  # the folder of a small one
    *in_ci(
        (2, EDGE, "--fsdp2 --precision fp16 --qlora"),  # test_fp16.py has one whose loss scale has changed
        (2, EDGE - 1, "--lora --lora_dropout 0.1"),
        (2, EDGE, "--fsdp2 --optim adamw8bit"),
    ),
])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(job, six_rows, tmp_path, world, step, flags):
    one_of_each_kind = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    qwen35 = random_model(tmp_path / "qwen3.5", **QWEN35 | one_of_each_kind)
    flags = flags.replace("qwen3.5", str(qwen35))
    argv = [*job, *flags.split(), "--eval_data", six_rows, "--eval_every", 2]
    rows, _ = run(world, argv, tmp_path / "whole")
    # steps begin in the middle of an epoch and at the edge of two
    assert trained(rows)[EDGE - 1]["epoch"] == 1
    assert steps_of(evaluations(rows)) == [2, 4, STEPS]

    checkpoint = tmp_path / f"whole/checkpoint-{step}"
    rows_again, said = run(world, [*argv, "--resume", checkpoint], tmp_path / "again")
    assert f"continuing after step {step} of {checkpoint}" in said
    assert curve(rows_again) == curve(rows)[step:]
    # The evaluation of step 2 was noted in its checkpoint, so it is known and not repeated.
    assert evaluations(rows_again) == [row for row in evaluations(rows) if row["step"] > step]
    best = state_at(tmp_path / "whole", STEPS)["best_eval"]
    assert state_at(tmp_path / "again", STEPS)["best_eval"] == best
    assert_same_end(tmp_path / "whole", tmp_path / "again")


def test_a_newer_result_is_not_hidden_by_an_older_merged_model(job, tmp_path):
    out = tmp_path / "run"
    run(1, [*job, "--lora", "--merge", "--steps", 2], out)
    assert (out / "merged").exists()
    run(1, [*job, "--lora", "--resume", out], out)  # without --merge
    _, adapter = data.find_result(str(out))
    assert adapter == str(out / "final")
    assert not (out / "merged").exists()


@pytest.mark.rounding
def test_another_world_continues_with_the_same_losses(job, tmp_path):
    argv = [*job, "--fsdp2", "--qlora", "--optim", "adamw8bit"]
    # six rows a step: 2 ranks with 3 of them each, then 3 ranks with 2
    rows, _ = run(2, [*argv, "--grad_accum", 3], tmp_path / "whole")
    resumed = ["--grad_accum", 2, "--resume", tmp_path / "whole/checkpoint-2"]
    rows_again, _ = run(3, [*argv, *resumed], tmp_path / "again")
    expected = torch.tensor(curve(rows)[-3:], dtype=torch.float64)
    again = torch.tensor(curve(rows_again)[-3:], dtype=torch.float64)
    # float32 sums in another order; Adam divides by small numbers
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=0)


# ---------------------------------------------------------------- layouts of ranks


LAYOUTS = [
    (1, ""),
    (2, ""),
    (2, "--fsdp2"),
    (3, "--fsdp2"),
    (4, "--fsdp2"),
    (4, "--fsdp2 --replicas 2"),
]


def numbered_rows(name, tensor):
    """What this rank has to write of a tensor in which every number depends on its place and on the name."""
    mine, start = nf4.local(tensor)
    whole = torch.arange(tensor.numel()).reshape(tensor.shape) * 7 + zlib.crc32(name.encode()) % 1000
    rows = whole
    if mine.dim():  # a scalar has no rows to choose from
        rows = whole[start : start + len(mine)]
    return rows.to(mine.dtype)


def save_and_load(ranks, out, model_folder, flags):
    """Writes a checkpoint of this layout of ranks to its folder, then reads those that all layouts have written."""
    # adamw8bit has states of all kinds: codes, scales of blocks, and one scalar
    args = train.parse_args(["--precision", "fp32", "--optim", "adamw8bit", *flags.split()])
    model = lm.on_meta(lm.parse_config(data.read_json(model_folder / "config.json")), args)
    if args.fsdp2:
        train.shard_(model, args, ranks.device)
    model.to_empty(device="cpu")
    optimizer = train.make_optimizer(dict(model.named_parameters()), args, torch.zeros(()))
    # --precision fp16 has three scalars more, two of them integers
    nonfinite = train.NonFinite(ranks.device, is_fp16=True)
    tensors = train.training_tensors(model, optimizer, nonfinite)
    expected = {name: numbered_rows(name, tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        nf4.local(tensor)[0].copy_(expected[name])
    saver = train.Saver(out, args.keep, ranks, state_of(0))
    saver.save(tensors, state_of(1))

    for checkpoint in checkpoints_of_all_layouts(out.parent):
        state = train.read_state(checkpoint, {}, ranks)
        for tensor in tensors.values():
            nf4.local(tensor)[0].zero_()  # what is not read would otherwise look right
        train.load_checkpoint(checkpoint, state["files"], tensors)
        for name, tensor in tensors.items():
            assert torch.equal(nf4.local(tensor)[0], expected[name]), (checkpoint, name)


def checkpoints_of_all_layouts(folder):
    """Waits for them: the ranks of the other layouts run beside these."""
    deadline = time.time() + HANG_S
    while True:
        found = list(folder.glob("run*/checkpoint-1"))  # which has this name when it is complete
        if len(found) == len(LAYOUTS):
            return sorted(found)
        assert time.time() < deadline, found
        time.sleep(0.05)


def test_any_layout_of_ranks_loads_what_any_other_wrote_bit_for_bit(shallow, tmp_path):
    with ThreadPoolExecutor(len(LAYOUTS)) as pool:  # all at once: each waits for what the others write
        runs = []
        for world, flags in LAYOUTS:
            out = tmp_path / f"run {world} {flags}"
            out.mkdir()
            runs.append(pool.submit(on_ranks, world, save_and_load, out, shallow, flags))
    for layout in runs:
        layout.result()


# ---------------------------------------------------------------- one command, given again and again


def test_the_same_command_continues_by_itself(job, six_rows, chats, tmp_path):
    out = tmp_path / "run"
    schedule = "--schedule constant --save_every 2 --keep 1 --eval_every 2".split()
    argv = [*job, *schedule, "--eval_data", six_rows, "--resume"]

    # Nothing is there yet: it starts from step 0.
    rows, _ = run(1, [*argv, "--steps", 4], out)
    losses = {row["step"]: row["eval_loss"] for row in evaluations(rows)}
    assert losses.keys() == {2, 4}
    assert losses[4] < losses[2]
    # Only the evaluation after the last save shows that checkpoint-4 is the best one: then checkpoint-2 goes.
    assert train.checkpoints(out).keys() == {4}
    assert state_at(out, 4)["best_eval"]["step"] == 4

    # It is given again as if the process had been killed in step 5, in the middle of writing a row and of a save.
    shutil.rmtree(out / "final")
    (out / "checkpoint-9.part").mkdir()
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 9.9}\n{"step": 5, "lo')
    rows, said = run(1, argv, out)
    assert steps_of(trained(rows)) == [1, 2, 3, 4, 5]
    assert rows[-1].get("loss") != 9.9
    # Step 4 was the last one of a shorter run. Its evaluation counts, and is not repeated.
    assert {row["step"]: row["eval_loss"] for row in evaluations(rows[:-1])} == losses
    assert rows[-1]["step"] == 5
    assert said.count("eval loss") == 1
    newest = "checkpoint-5"
    best = f"checkpoint-{state_at(out, 5)['best_eval']['step']}"
    names = {path.name for path in out.iterdir()}
    assert names == {"args.json", newest, best, "final", "lock", "loss.svg", "metrics.jsonl"}

    # Given once more, it has nothing left to train, and nothing to evaluate.
    rows_again, said = run(1, argv, out)
    assert rows_again == rows
    assert "eval loss" not in said

    # A longer run with other data to evaluate on forgets losses that cannot be compared.
    rows, said = run(1, [*argv, "--steps", STEPS + 2, "--eval_data", chats], out)
    assert f"was planned for {STEPS} steps, not {STEPS + 2}: the learning-rate schedule differs" in said
    assert "was evaluated on different --eval_data: its best loss no longer counts" in said
    assert steps_of(trained(rows)) == [*range(1, STEPS + 3)]
    assert state_at(out, STEPS + 2)["best_eval"]["step"] > STEPS


def test_the_best_checkpoint_stays_though_its_evaluation_comes_later(tmp_path):
    saver = train.Saver(tmp_path, 1, ALONE, state_of(0))  # --keep 1
    state = state_of(0)

    def save(step):
        """-> steps of the checkpoints that are there then."""
        state["step"] = step
        saver.save({"w": torch.ones(2)}, state)
        return sorted(train.checkpoints(tmp_path))

    def evaluate(loss):
        """The same, of the step that was saved last. Log.write_eval() enters the best evaluation like this."""
        step = state["step"]
        if not state["best_eval"] or loss < state["best_eval"]["eval_loss"]:
            state["best_eval"] = {"step": step, "eval_loss": loss}
        saver.note_evaluation(state)
        noted = train.read_state(tmp_path / f"checkpoint-{step}", {}, ALONE)["best_eval"]
        assert noted == state["best_eval"]
        return sorted(train.checkpoints(tmp_path))

    assert save(1) == [1]
    assert evaluate(3.0) == [1]
    assert save(2) == [1, 2]  # 1 is the best one until 2 is evaluated
    assert evaluate(2.0) == [2]
    assert save(3) == [2, 3]
    assert evaluate(5.0) == [2, 3]
    assert save(4) == [2, 4]
    assert evaluate(4.0) == [2, 4]

    # An evaluation between two saves has no checkpoint to be noted in.
    before = (tmp_path / "checkpoint-4" / train.STATE).read_bytes()
    state["step"] = 5
    saver.note_evaluation(state)
    assert (tmp_path / "checkpoint-4" / train.STATE).read_bytes() == before


def test_an_evaluation_that_a_full_disk_refuses_is_said_and_harms_no_checkpoint(tmp_path, capsys):
    saver = train.Saver(tmp_path, 1, ALONE, state_of(0))
    state = state_of(1)
    saver.save({"w": torch.ones(2)}, state)
    (tmp_path / "checkpoint-1/trainer_state.json.part").symlink_to("/dev/full")
    saver.note_evaluation(state | {"evaluated": 1})
    said = capsys.readouterr().out
    assert "the evaluation was not noted: " in said
    assert "No space left" in said
    assert train.read_state(tmp_path / "checkpoint-1", {}, ALONE)["evaluated"] == 0


# ---------------------------------------------------------------- what must stay the same


@pytest.fixture(scope="module")
def lora_run(settings, tmp_path_factory):
    """A run of two steps on a copy of the built-in model -> (its folder, its flags). Beside it the same weights by
    another name, and weights of which one bit differs."""
    path = tmp_path_factory.mktemp("lora")
    for name in ("base", "same", "other"):
        shutil.copytree(HERE / "tiny", path / name)
    weights = bytearray((path / "other/model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1  # far behind the header, which would not load
    (path / "other/model.safetensors").write_bytes(weights)
    argv = ["--model", str(path / "base"), *settings, *"--steps 2 --save_every 2 --grad_accum 2 --lora".split()]
    run(1, argv, path / "run")
    return path / "run", argv


@pytest.mark.parametrize("flags, words", [
    ("--lr 1e-4", "--lr was 0.003, is 0.0001"),
    ("--min_lr 1", "--min_lr was 0.0"),
    ("--warmup 0", "--warmup was"),
    ("--schedule linear", "--schedule was cosine, is linear"),
    ("--optim adamw8bit", "--optim was adamw, is adamw8bit"),
    ("--weight_decay 0", "--weight_decay was"),
    ("--clip 2", "--clip was 1.0, is 2"),
    ("--precision bf16", "--precision was fp32, is bf16"),
    ("--seed 1", "--seed was 0, is 1"),
    ("--grad_accum 3", "its steps have 2 rows, and here they would have 3: give --batch_size 1 --grad_accum 2"),
    ("--steps 1", "this run ends at step 1: raise --steps"),
    ("--data {chats}", "--data's tokens and masks was"),
    ("--train_on all", "--data's tokens and masks was"),
    ("--seq_len 64", "--seq_len was 128, is 64"),
    ("--no-packing", "--packing was True, is False"),
    ("--model {other}", "--model's frozen weights was"),
    ("--qlora", "--qlora was False, is True"),
    ("--lora_rank 4", "--lora_rank was 16, is 4"),
    ("--lora_alpha 8", "--lora_alpha was 32"),
    ("--rslora", "--rslora was False, is True"),
    ("--lora_dropout 0.5", "--lora_dropout was 0.0, is 0.5"),
    ("--lora_targets q_proj", "--lora_targets was ['q_proj',"),
])
def test_what_would_change_the_mathematics_is_refused_by_name(lora_run, chats, capsys, flags, words):
    out, argv = lora_run
    given = flags.format(chats=chats, other=out.parent / "other").split()
    if flags == "--qlora":  # which stands for --lora, too
        argv = [arg for arg in argv if arg != "--lora"]
    assert train.launch([*argv, "--resume", "--out", str(out), *given]) == 1
    message = capsys.readouterr().err
    assert words in message
    assert f"--resume {out}/checkpoint-2" in message
    assert (out / "final").exists()
    assert (out / "checkpoint-2" / train.STATE).exists()


def test_a_checkpoint_of_a_version_without_a_flag_is_one_of_the_flags_default(lora_run, tmp_path):
    out, _ = lora_run
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(out / folder.name, folder)
    state = data.read_json(folder / train.STATE)
    settings = state["settings"]
    of_older_version = {name: value for name, value in settings.items() if name != "--rslora"}
    state = data.with_checksum(state | {"settings": of_older_version})
    (folder / train.STATE).write_text(json.dumps(state))
    ranks = SimpleNamespace(rank=0, world=1)
    assert train.read_state(folder, settings, ranks)["step"] == 2
    with pytest.raises(ValueError, match="--rslora was False, is True"):
        train.read_state(folder, settings | {"--rslora": True}, ranks)


@pytest.mark.parametrize("was, is_refused", [(["k_proj"], True), (None, False), (False, False)], ids=str)
def test_a_flag_that_this_version_does_not_have_is_refused_if_it_was_given(lora_run, tmp_path, was, is_refused):
    out, _ = lora_run
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(out / folder.name, folder)
    state = data.read_json(folder / train.STATE)
    settings = state["settings"]
    state = data.with_checksum(state | {"settings": settings | {"--nf4_skip": was}})
    (folder / train.STATE).write_text(json.dumps(state))
    if is_refused:
        words = r"--nf4_skip was \['k_proj'\], which this version does not have: .*\(flags, data, version of oomph\)"
        with pytest.raises(ValueError, match=words):
            train.read_state(folder, settings, ALONE)
    else:
        assert train.read_state(folder, settings, ALONE)["step"] == 2


def test_thousands_of_tokens_are_shown_by_their_beginning(tmp_path):
    tokens = [f"<token {i}>" for i in range(10_000)]
    state = state_of(1) | {"settings": {"--add_tokens": tokens}}
    train.Saver(tmp_path, 1, ALONE, state_of(0)).save({"w": torch.ones(2)}, state)
    with pytest.raises(ValueError, match=r"--add_tokens was .*<token 0>.* characters\), is None") as error:
        train.read_state(tmp_path / "checkpoint-1", {"--add_tokens": None}, ALONE)
    assert len(str(error.value)) < 1000


def test_what_does_not_change_the_mathematics_is_accepted(lora_run, tmp_path):
    out, argv = lora_run
    same_weights = f"--model {out.parent}/same"
    same_rows = "--batch_size 2 --grad_accum 1"
    memory = "--no-activation_checkpointing --fsdp2 --ce_chunk 64 --no-fused_adamw --tiled_mlp 64"
    changed = f"--resume {out} {same_weights} {same_rows} {memory} --steps 3 --save_every 9".split()
    rows, _ = run(1, [*argv, *changed], tmp_path / "branch")
    assert rows[0]["step"] == 3


def nf4_settings(*method):
    """What a checkpoint of a run with --lora or --qlora notes, and a resumed run compares."""
    config = lm.parse_config(data.PRESETS["qwen3-0.6b"])
    loader = SimpleNamespace(documents=SimpleNamespace(checksum=1))
    source = SimpleNamespace(crc=lambda: 2)
    return train.fixed_settings(train.parse_args(list(method)), config, loader, source)


def test_adapters_on_nf4_of_another_format_are_refused_by_name(tmp_path, monkeypatch):
    of_lora = nf4_settings("--lora")
    assert f"blocks of {nf4.BLOCK}" in nf4.FORMATS[4]
    assert f"{nf4.SCALE_STEPS} steps of scales" in nf4.FORMATS[4]
    state = state_of(1) | {"settings": nf4_settings("--qlora")}
    train.Saver(tmp_path, 1, ALONE, state_of(0)).save({"w": torch.ones(2)}, state)

    monkeypatch.setitem(nf4.FORMATS, 4, "another one")
    with pytest.raises(ValueError, match=r"the format of NF4 was codes by .*codebook [0-9a-f]{8}, is another one: "):
        train.read_state(tmp_path / "checkpoint-1", nf4_settings("--qlora"), ALONE)
    assert nf4_settings("--lora") == of_lora  # without NF4 its format does not matter


def test_adapters_on_nf5_of_another_format_are_refused_by_name(tmp_path, monkeypatch):
    in_nf5 = ["--qlora", "--nf5", "down_proj"]
    state = state_of(1) | {"settings": nf4_settings(*in_nf5)}
    train.Saver(tmp_path, 1, ALONE, state_of(0)).save({"w": torch.ones(2)}, state)
    with pytest.raises(ValueError, match=r"--nf5 was \['down_proj'\], is None"):
        train.read_state(tmp_path / "checkpoint-1", nf4_settings("--qlora"), ALONE)
    monkeypatch.setitem(nf4.FORMATS, 5, "another one")
    with pytest.raises(ValueError, match=r"the format of NF5 was codes by .*codebook [0-9a-f]{8}, is another one: "):
        train.read_state(tmp_path / "checkpoint-1", nf4_settings(*in_nf5), ALONE)


def test_a_change_of_nf4s_bytes_is_a_change_of_its_format():
    """If this fails because quantize() now chooses other codes or scales: give nf4.FORMATS other words, too, so that
    adapters are not resumed on weights that they were not trained on, and then write both down here."""
    # exact in float32 on any machine; the last row is zero
    numbers_ND = (torch.arange(1024) * 37 % 101 - 50).view(4, 256)
    sizes_N1 = torch.tensor([[1.0], [0.125], [7.0], [0.0]])
    crcs = {}
    for bits in (4, 5):
        codes, scales = nf4.quantize(numbers_ND * sizes_N1, bits)
        crc_of_codes = zlib.crc32(codes.numpy().tobytes())
        crcs[bits] = f"{zlib.crc32(scales.numpy().tobytes(), crc_of_codes):08x}"
    words = "codes by the largest magnitude, blocks of 64, 254 steps of scales, codebook "
    assert nf4.FORMATS[4] == words + "42a89f9f"
    assert nf4.FORMATS[5] == words + "1f390828"
    assert crcs == {4: "0a566979", 5: "50258c90"}


# ---------------------------------------------------------------- which run, which checkpoint


OLDER = "out/20251231-235959"
NEWER = "out/20260101-000000"
COMPLETE = [
    "run/checkpoint-2",
    "run/checkpoint-9",  # as a text it sorts behind 10
    "run/checkpoint-10",
    "run/checkpoint-300.part",  # a save that was killed before its rename
    f"{OLDER}/checkpoint-30",  # the newer run counts, not the larger step
    f"{NEWER}/checkpoint-5",
    "out/named/checkpoint-7",  # a name that --resume alone does not find
    "branched/checkpoint-3",
    f"{NEWER}-step-5/final",  # of --export
    "out/20260102-000000/checkpoint-2.part",  # a start that was killed in its first save
]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A working folder with runs in it. `early` ended before its first save, `branched` has gone on from another."""
    for name in COMPLETE:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / train.STATE).write_text("{}")
    (tmp_path / "run/checkpoint-200").mkdir()  # without a state
    (tmp_path / "early").mkdir()
    for name in ("run", "branched", "early", NEWER, OLDER):
        (tmp_path / name / "args.json").write_text(json.dumps(train.OURS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def find(out, resume):
    """--out and --resume -> (folder of the run, its checkpoint to resume from or None), as main looks for them."""
    checkpoint = train.checkpoint_to_resume(out, resume)
    with train.run_folder(out, checkpoint) as folder:
        return folder, checkpoint


@pytest.mark.parametrize("out, resume, run, checkpoint", [
    (None, "auto", NEWER, f"{NEWER}/checkpoint-5"),  # the newest of those with a checkpoint, by its name, a date
    ("run", "auto", "run", "run/checkpoint-10"),
    (None, "run", "run", "run/checkpoint-10"),
    (None, "run/checkpoint-10", "run", "run/checkpoint-10"),
    # an older checkpoint continues in a folder of its own
    ("branch", "run/checkpoint-2", "branch", "run/checkpoint-2"),
    ("branch", "run", "branch", "run/checkpoint-10"),
    ("early", "run", "early", "run/checkpoint-10"),  # where no checkpoint is lost
    ("branched", "auto", "branched", "branched/checkpoint-3"),
])
def test_resume_finds_the_run_and_its_newest_checkpoint(runs, out, resume, run, checkpoint):
    folder, found = find(out, resume)
    assert folder.resolve() == runs / run
    assert found.resolve() == runs / checkpoint


def test_a_resume_names_the_runs_that_it_passes_over_and_a_start_from_nothing(runs, capsys):
    find(None, "auto")
    said = " ".join(capsys.readouterr().out.split())
    assert said == f"note: no checkpoint in {NEWER}-step-5, out/20260102-000000: --resume takes an older run"
    for out, where in ((None, "out/"), ("early", "early")):
        shutil.rmtree(runs / "out")
        (runs / "out/20260103-000000").mkdir(parents=True)
        assert train.checkpoint_to_resume(out, "auto") is None
        assert capsys.readouterr().out == f"note: no checkpoint in {where}: starting anew\n"


@pytest.mark.parametrize("resume", [".", "../checkpoint-10", ".."])
def test_resume_finds_the_run_from_inside_its_checkpoint(runs, monkeypatch, resume):
    monkeypatch.chdir(runs / "run/checkpoint-10")
    folder, found = find(None, resume)
    assert folder.resolve() == runs / "run"
    assert found.resolve() == runs / "run/checkpoint-10"


@pytest.mark.parametrize("out, resume, run", [
    (None, None, "out/2"),  # a fresh name, the date
    ("nothing", "auto", "nothing"),
    # it ended before its first save and starts again, as a restart by torchrun does
    ("early", "auto", "early"),
    ("early", None, "early"),
])
def test_a_run_without_a_checkpoint_starts_at_step_0(runs, out, resume, run):
    folder, found = find(out, resume)
    assert str(folder.resolve()).startswith(str(runs / run))
    assert found is None


def test_a_run_of_an_older_version_is_named_as_one(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / train.STATE).write_text("{}")
    (tmp_path / "args.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no args.json of a run.*older versions' has no mark.*beside --resume"):
        train.run_folder(None, tmp_path / "checkpoint-2").__enter__()


def test_another_table_of_documents_is_no_other_data_and_a_checksum_of_before_is_another_versions(lora_run, tmp_path):
    tokens = np.arange(9, dtype=np.int32)
    parts = np.zeros(2, data.PART)
    parts["stop"] = 4, 5
    report = data.FileReport(checksums={"tokens": 1, "supervised": 2, "documents": 3})
    other_report = data.FileReport(checksums={"tokens": 1, "supervised": 2, "documents": 4})
    checksum = data.Documents([data.DataFile("a", report, tokens, tokens)], parts).checksum
    parts["line"] = 1, 7
    parts["hash"] = 5, 6
    assert data.Documents([data.DataFile("a", other_report, tokens, tokens)], parts).checksum == checksum
    parts["stop"] = 4, 6
    assert data.Documents([data.DataFile("a", report, tokens, tokens)], parts).checksum != checksum

    folder = tmp_path / "checkpoint-2"
    shutil.copytree(lora_run[0] / "checkpoint-2", folder)
    state = data.read_json(folder / train.STATE)
    new = "the checksum of all --data's tokens and masks"
    older = {name.replace("of all", "of"): value for name, value in state["settings"].items()}
    (folder / train.STATE).write_text(json.dumps(data.with_checksum(state | {"settings": older})))
    said = []
    ranks = SimpleNamespace(rank=0, world=1, note=said.append)
    assert new in state["settings"]
    assert train.read_state(folder, state["settings"], ranks)["step"] == 2
    assert "lacks the checksum of all --data's tokens and masks: whether these were the same is not compared" in said[0]


def test_a_state_of_the_version_before_is_read(lora_run, tmp_path):
    """settings-407b752.json has the settings of this run as 407b752 wrote them. Add the next version's beside it: its
    users resume their runs. Checksums are this run's own."""
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(lora_run[0] / "checkpoint-2", folder)
    state = data.read_json(folder / train.STATE)
    settings = state["settings"]
    assert "config.json's family" not in settings  # a trait more in Family is no other setting
    for path in HERE.glob("settings-*.json"):
        stored = data.read_json(path)
        older = stored | {name: settings[name] for name in stored if "checksum" in name}
        (folder / train.STATE).write_text(json.dumps(data.with_checksum(state | {"settings": older})))
        assert train.read_state(folder, settings, ALONE)["step"] == 2
        with pytest.raises(ValueError, match="--lora_rank was 16, is 8"):
            train.read_state(folder, settings | {"--lora_rank": 8}, ALONE)


def test_two_starts_in_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "datetime", SimpleNamespace(now=lambda: datetime(2026, 1, 2)))
    with train.run_folder(None, None) as first, train.run_folder(None, None) as second:
        assert [first.name, second.name] == ["20260102-000000", "20260102-000000-2"]
    assert not list((tmp_path / "out").iterdir())


FOREIGN = "contains files, and no args.json of a run"


@pytest.mark.parametrize("out, resume, words", [
    ("run", None, "contains a run, .*: --resume continues its newest checkpoint, checkpoint-10"),
    ("run", "branched", "contains a run"),
    ("branched", "run/checkpoint-2", "contains a run"),
    (None, "run/checkpoint-2", "contains a run, which is never overwritten"),  # it would overwrite 9 and 10
    (None, "nowhere", "--resume nowhere: no such folder"),
    (None, "early", "no complete checkpoint"),
    # checkpoints without an args.json may be anybody's
    (None, "out/named", FOREIGN),
    ("out/named", "auto", FOREIGN),
])
def test_a_run_is_never_overwritten(runs, out, resume, words):
    before = files_below(runs)
    with pytest.raises(ValueError, match=words):
        find(out, resume)
    assert files_below(runs) == before


def files_below(folder):
    return sorted(str(path) for path in folder.rglob("*") if path.name != "lock")


@pytest.mark.parametrize("name", ["final/mine", "merged/mine"])
@pytest.mark.parametrize("resume", [None, "auto", "run"])
def test_a_result_is_replaced_only_by_a_run_that_continues_a_checkpoint_beside_it(runs, name, resume):
    """It may be all that is left of a run whose checkpoints were removed."""
    (runs / "early" / name).parent.mkdir()
    (runs / "early" / name).write_text("work")
    folder, _, _ = name.partition("/")
    with pytest.raises(ValueError, match=r"contains a run, .*: no checkpoint of it is there to be continued"):
        find("early", resume)
    (runs / "run" / folder).mkdir()
    assert find("run", "auto")[1].name == "checkpoint-10"


@pytest.mark.parametrize("name, content", [
    ("merged/model.safetensors", "work"),
    ("metrics.jsonl", "{}"),
    ("notes.part", "work"),
    ("checkpoint-2/trainer_state.json", "{}"),
    ("args.json", "{}"),  # another trainer's
    ("args.json", "{"),
    ("args.json", '{"written_by": "another"}'),
])
@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_folder_that_is_not_a_runs_is_left_as_it_is(runs, name, content, resume):
    (runs / "mine" / name).parent.mkdir(parents=True)
    (runs / "mine" / name).write_text(content)
    before = sorted(runs.rglob("*"))
    with pytest.raises(ValueError, match=f"--out mine: {FOREIGN}"):
        find("mine", resume)
    assert sorted(runs.rglob("*")) == before
    assert (runs / "mine" / name).read_text() == content


@pytest.mark.parametrize("left", [[], ["lock"], ["lock", "args.json.part"], ["lock", "args.json"]], ids=str)
def test_an_empty_folder_becomes_a_runs_also_after_starts_that_have_failed(tmp_path, left):
    """Also one in which a start was killed at once."""
    for name in left:
        (tmp_path / name).write_text(json.dumps(train.OURS) if name == "args.json" else "")
    for _ in range(2):
        with train.run_folder(str(tmp_path), None):
            assert train.is_run(tmp_path)
        assert files_below(tmp_path) == [f"{tmp_path}/args.json"]


@pytest.mark.parametrize("out", [None, "a/b"])
def test_a_folder_that_a_start_has_made_goes_if_its_run_has_not_trained(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    with train.run_folder(out, None) as folder:
        assert folder.exists()
    assert not folder.exists()

    with train.run_folder(out, None) as folder:
        (folder / "metrics.jsonl").touch()  # the first step has been logged
    assert train.is_run(folder)


def test_a_lock_on_a_file_that_is_removed_meanwhile_is_none(tmp_path, monkeypatch):
    first = contextlib.ExitStack()
    first.enter_context(train.run_folder(str(tmp_path / "run"), None))
    flock = fcntl.flock

    def leave_and_lock(file, how):
        first.close()  # file is open by now, and has no name any more
        flock(file, how)

    monkeypatch.setattr(train.fcntl, "flock", leave_and_lock)
    with pytest.raises(ValueError, match="another process writes to it"), train.run_folder(str(tmp_path / "run"), None):
        pass
    monkeypatch.setattr(train.fcntl, "flock", flock)
    with train.run_folder(str(tmp_path / "run"), None):
        pass


def take_and_give_back(folder, seconds):
    """Starts in one folder, one behind the other, all of which end before their first step."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.ExitStack() as exits:
            try:
                exits.enter_context(train.run_folder(str(folder / "run"), None))
            except (ValueError, OSError):  # another process has it, or is about to remove it
                continue
            (folder / "taken").mkdir()  # raises if somebody else has taken it
            (folder / "taken").rmdir()


def test_starts_and_ends_at_once_share_no_folder(tmp_path):
    """With a lock on the file that another start has just removed, two had the folder 26 times a minute."""
    logs = [tmp_path / f"log{i}" for i in range(3)]
    codes = start_ranks(3, take_and_give_back, (tmp_path, 2), logs)
    assert codes == [0, 0, 0], "".join(log.read_text() for log in logs)


@pytest.mark.parametrize("name", ["args.json", "metrics.jsonl", "loss.svg", "trace.json.gz"])
def test_a_pipe_in_the_folder_of_a_run_is_named_and_not_waited_for(runs, name):
    (runs / "run" / name).unlink(missing_ok=True)
    os.mkfifo(runs / "run" / name)
    with pytest.raises(ValueError, match=f"{name}: not a file|{FOREIGN}"):
        find("run", "auto")


def test_a_start_that_loads_keeps_others_out_of_its_folder(job, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    argv = [str(word) for word in (*job, "--steps", 1, "--out", out)]
    load = data.load_weights_
    codes = []

    def load_later(*args, **kwargs):
        if not codes:
            codes.append(None)
            codes[0] = train.launch([*argv, "--seed", "1"])  # begins, and would end, while the other one loads
        return load(*args, **kwargs)

    monkeypatch.setattr(data, "load_weights_", load_later)
    codes.append(train.launch(argv))
    assert codes == [1, 0]
    assert f"train.py: error: --out {out}: another process writes to it" in capsys.readouterr().err
    assert json.loads((out / "args.json").read_text())["seed"] == 0


@pytest.mark.parametrize("method", [[], ["--lora"]], ids=["full", "lora"])
def test_the_best_checkpoint_is_named_at_the_end_and_its_command_writes_its_model(
        folder, six_rows, tmp_path, monkeypatch, capsys, method):
    losses = itertools.cycle([2.0, 1.0, 3.0])  # of the evaluations after steps 1, 2 and 3
    monkeypatch.setattr(train, "evaluate", lambda *_: {"eval_loss": next(losses), "eval_tokens": 9})
    out = tmp_path / "run"
    argv = ["--model", folder, "--random_init", "--data", six_rows, "--eval_data", six_rows, "--eval_every", 1]
    argv = [*map(str, argv), *method, *"--seq_len 64 --batch_size 2 --precision fp32".split()]
    argv += "--lr 1e-2 --schedule constant --warmup 0".split()  # a shorter run has the same rates
    assert train.launch([*argv, "--steps", "3", "--save_every", "1", "--keep", "1", "--out", str(out)]) == 0
    command = f"--export {out}/checkpoint-2"
    said = capsys.readouterr().out
    assert "best evaluation loss 1.0000 at step 2; final/ has step 3. To export the best:\n  python" in said
    assert f"python train.py {command}\n" in said

    # what says so, too, is a checkpoint that is given as a model, also by its run if that has no other result
    for name in ("run/checkpoint-2", "run/checkpoint-3"):
        assert train.launch(["--chat", "--model", str(tmp_path / name)]) == 2
        assert f"not a model yet: --export {tmp_path / name} makes one of it" in capsys.readouterr().err
    shutil.rmtree(out / "final")
    assert train.launch(["--chat", "--adapter", str(out)]) == 2
    assert f"--export {out}/checkpoint-3 makes" in capsys.readouterr().err

    # neither the data nor any flag of the run is needed
    kept = six_rows.rename(tmp_path / "elsewhere.jsonl")
    assert train.launch(command.split()) == 0
    kept.rename(six_rows)
    assert f"done: {out}-step-2/final has step 2" in capsys.readouterr().out
    # a run stands for its newest checkpoint, as for --resume
    assert train.launch(["--export", str(out)]) == 0
    assert f"done: {out}-step-3/final has step 3" in capsys.readouterr().out
    (out / "empty").mkdir()
    for name, what in {"empty": "no trainer_state.json and no complete checkpoint-", "checkpoint-7": "no such folder",
                       "checkpoint-2/trainer_state.json": "a file, and a checkpoint is a folder"}.items():
        assert train.launch(["--export", str(out / name)]) == 1
        message = capsys.readouterr().err
        assert f"--export {out}/{name}: {what}" in message
        assert message.endswith(f"; there is {out}/checkpoint-2, {out}/checkpoint-3\n")
    # a path is said as it was typed, and a command as a shell reads it
    monkeypatch.chdir(tmp_path)
    assert train.launch(["--export", "run", "--out", "a b"]) == 0
    assert capsys.readouterr().out.endswith(
        "done: a b/final has step 3. Try it:\n  python train.py --chat --model 'a b/final'\n")
    assert train.launch(["--export", "run"]) == 1
    assert "error: --out run-step-3: already contains a run" in capsys.readouterr().err
    assert train.launch([*argv, "--steps", "2", "--out", str(tmp_path / "two")]) == 0
    name = "adapter_model.safetensors" if method else "model.safetensors"
    assert (tmp_path / "run-step-2/final" / name).read_bytes() == (tmp_path / "two/final" / name).read_bytes()

    # --model counts: a base that has moved is the same, another one is not
    moved = shutil.copytree(folder, tmp_path / "moved")
    settings = data.read_json(out / "args.json")
    settings |= {"model": "/gone", "lora_rank": 4, "lora_alpha": "9", "seed": None}  # the state has these
    data.write_json(out / "args.json", settings)
    assert train.launch(command.split()) == 1
    assert "--model /gone: no such folder" in capsys.readouterr().err
    again = tmp_path / "again"
    assert train.launch([*command.split(), "--model", str(moved), "--out", str(again)]) == 0
    assert (again / "final" / name).read_bytes() == (tmp_path / "two/final" / name).read_bytes()
    random_model(tmp_path / "other", num_hidden_layers=2, rope_theta=5000.0)
    assert train.launch([*command.split(), "--model", str(tmp_path / "other")]) == 1
    assert "config.json's rope_theta was " in capsys.readouterr().err
    for broken in ({"model": 5}, {"adapter": ["a"]}, {"chat_template": {}}, {"revisions": 3}, {"revisions": {"a": 1}}):
        data.write_json(out / "args.json", settings | {"model": str(folder)} | broken)
        assert train.launch(command.split()) == 1
        assert f"{out}/args.json: {next(iter(broken))} is " in capsys.readouterr().err


def test_an_adapter_on_another_base_or_beside_a_model_is_said(lora_run, tmp_path, capsys):
    result = lora_run[0] / "final"
    base = data.read_json(result / "adapter_config.json")["base_model_name_or_path"]
    copy = shutil.copytree(base, tmp_path / "copy")
    data.note_once.cache_clear()
    for model, is_another in ((base, False), (copy, True)):
        args = train.parse_args(["--adapter", str(result), "--model", str(model)])
        train.open_config(args, 1, device=None, random_init=True)
        assert ("names another base" in " ".join(capsys.readouterr().out.split())) == is_another
    for path in result.glob("adapter_*"):
        shutil.copy(path, copy)
    for adapter, is_left_out in ((str(result), False), (None, True)):
        data.find_result(str(copy), adapter)
        said = " ".join(capsys.readouterr().out.split())
        assert (f"the adapter beside this model is not read: --adapter {copy}" in said) == is_left_out


def test_a_finished_run_says_so_and_has_no_answer_from_before_its_training(lora_run, tmp_path, capsys):
    out = shutil.copytree(lora_run[0], tmp_path / "run")
    command = [*map(str, lora_run[1]), "--sample", "hi", "--max_new_tokens", "2", "--out", str(out), "--resume"]
    assert train.launch(command) == 0
    said = capsys.readouterr().out
    assert f"note: this run is finished: {out}/checkpoint-2 has its last step;" in " ".join(said.split())
    assert "after: " in said
    assert "before:" not in said


def test_a_first_save_that_fails_speaks_of_no_older_checkpoints(tmp_path, monkeypatch, capsys):
    def write_rows(*_):
        raise OSError("No space left")

    monkeypatch.setattr(train, "write_rows", write_rows)
    train.Saver(tmp_path, 1, ALONE, state_of(0)).save({"w": torch.ones(2)}, state_of(1))
    assert "NOT written: No space left. There is no older one; steps" in capsys.readouterr().out


def test_an_export_compares_the_weights_of_its_base(lora_run, tmp_path, capsys):
    out, _ = lora_run
    command = ["--export", str(out / "checkpoint-2"), "--out", str(tmp_path / "run")]
    assert train.launch([*command, "--model", str(out.parent / "other")]) == 1
    assert "--model's frozen weights was" in capsys.readouterr().err
    assert train.launch([*command, "--model", str(out.parent / "same")]) == 0


def with_evaluations(losses, argv):
    """train.py whose evaluation of each step has this loss."""
    log_of = {}
    init = train.Log.__init__

    def noting_init(self, out, state, *others):
        log_of["state"] = state
        init(self, out, state, *others)

    train.Log.__init__ = noting_init
    train.evaluate = lambda *_: {"eval_loss": losses[log_of["state"]["step"] - 1], "eval_tokens": 9}
    return train.launch(argv)


@pytest.mark.parametrize("world, method", [(1, ""), (2, "--fsdp2 --qlora --merge")])
def test_a_run_ends_with_its_patience_and_the_best_weights_also_if_it_is_killed_and_resumed(
        shallow, six_rows, tmp_path, world, method):
    argv = ["--model", shallow, "--random_init", "--data", six_rows, "--eval_data", six_rows, "--seq_len", 128,
            "--precision", "fp32", "--steps", 6, "--eval_every", 1, "--save_every", 1, "--keep", 9, *method.split()]
    argv = [*map(str, argv), "--lr", "1e-2", "--schedule", "constant", "--warmup", "0"]

    def train_in(folder, losses, *flags):
        """-> (what rank 0 said, {name: bytes} of the weights in final/ and merged/)"""
        out = tmp_path / folder
        logs = [tmp_path / f"{folder}-{rank}.log" for rank in range(world)]
        codes = start_ranks(world, with_evaluations, (losses, [*argv, "--out", str(out), *flags]), logs)
        assert codes == [0] * world, logs[0].read_text()
        weights = [*out.glob("final/*.safetensors"), *out.glob("merged/*.safetensors")]
        return logs[0].read_text(), {str(path.relative_to(out)): path.read_bytes() for path in weights}

    losses = [3.0, 1.0, 2.0, 1.0, 0.5, 4.0]  # step 4 is as good as step 2, and not better
    patient = ["--patience", "2", "--resume"]
    said, expected = train_in("run", losses, *patient)
    assert "the run ends after 2 evaluations without a better one; final/ gets the best\n" in said
    assert "--patience 2 ends the run after step 4 of 6\n" in said
    assert "final/ gets the weights of step 2\n" in said
    assert "best evaluation loss" not in said  # nothing better is left to be exported
    assert state_at(tmp_path / "run", 4)["evals_since_best"] == 2
    _, of_step_2 = train_in("two", losses, "--steps", "2")
    assert expected == of_step_2
    rows = (tmp_path / "run/metrics.jsonl").read_text()

    # It was killed in step 4, and then after it. A resumed run counts on.
    for is_lost in ("checkpoint-4", "final"):
        shutil.rmtree(tmp_path / "run" / is_lost)
        said, weights = train_in("run", losses, *patient)
        assert "after step 4 of 6\n" in said
        assert weights == expected
        assert curve(json_rows(tmp_path / "run")) == curve(map(json.loads, rows.splitlines()))
    if world > 1:
        return

    # The state of a version without the count: it counts from there on. Then step 5 is the best, and step 6 the last.
    state = state_at(tmp_path / "run", 4)
    del state["evals_since_best"]
    (tmp_path / "run/checkpoint-4" / train.STATE).write_text(json.dumps(data.with_checksum(state)))
    said, weights = train_in("run", losses, *patient)
    assert "final/ gets the weights of step 5\n" in said
    assert weights.keys() == expected.keys()
    assert weights != expected
    # without the best checkpoint the result is what the run has
    shutil.rmtree(tmp_path / "run/checkpoint-5")
    said, weights_of_6 = train_in("run", losses, *patient)
    assert "note: final/ gets step 6: step 5 or 6 has no checkpoint\n" in said
    assert weights_of_6 != weights


# ---------------------------------------------------------------- names on the Hub


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_run_resumes_on_the_commit_of_the_model_that_it_began_with(six_rows, tmp_path, monkeypatch):
    newest = COMMIT
    asked = []

    def snapshot_download(name, revision, **_):
        asked.append(revision)
        folder = tmp_path / "snapshots" / (revision or newest)
        if not folder.exists():
            shutil.copytree(HERE / "tiny", folder)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    argv = ["--model", "a/b", "--data", str(six_rows), "--seq_len", "64", "--save_every", "1", "--schedule", "constant",
            "--resume", "--out", str(tmp_path / "run")]
    assert train.launch([*argv, "--steps", "1"]) == 0
    newest = "f" * 40
    assert train.launch([*argv, "--steps", "2"]) == 0
    # each start asks for config.json to say what it needs without a GPU, again for the run, and then for the weights
    assert asked == [None, *[COMMIT] * 5]
    assert data.read_json(tmp_path / "run/args.json")["revisions"] == {"a/b": COMMIT}


def test_an_adapter_of_the_hub_is_fetched_and_pinned_as_its_base_is(six_rows, tmp_path, monkeypatch):
    """Its base, too, when the adapter of the run is used again."""
    asked = []
    newest = {"a/base": COMMIT, "a/adapter": "a" * 40}  # commits
    argv = ["--data", str(six_rows), "--seq_len", "64", "--save_every", "1", "--schedule", "constant", "--sample", ""]
    assert train.launch([*argv, "--lora", "--steps", "1", "--out", str(tmp_path / "first")]) == 0
    sources = {"a/base": HERE / "tiny", "a/adapter": tmp_path / "first/final"}

    def snapshot_download(name, revision, **_):
        asked.append((name, revision))
        folder = tmp_path / "snapshots" / (revision or newest[name])
        shutil.copytree(sources[name], folder, dirs_exist_ok=True)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    out = tmp_path / "run"
    argv += ["--model", "a/base", "--adapter", "a/adapter", "--resume", "--out", str(out)]
    assert train.launch([*argv, "--steps", "1"]) == 0
    assert data.read_json(out / "args.json")["revisions"] == newest
    newest = {"a/base": "e" * 40, "a/adapter": "f" * 40}
    assert train.launch([*argv, "--steps", "2"]) == 0
    base = ("a/base", COMMIT)
    adapter = ("a/adapter", "a" * 40)
    first_of_all = [("a/adapter", None), ("a/base", None)]
    # configs to say what a start needs without a GPU, configs for the run, and the weights of the base
    assert asked == [*first_of_all, adapter, base, base, adapter, base, adapter, base, base]
    asked.clear()
    assert train.launch(["--merge", "--model", str(out)]) == 0
    assert asked == [base, base]
