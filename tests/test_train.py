"""train.py as people start it: whole runs, what they print and what they write."""

import fcntl
import io
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import HERE, TRAIN, build, losses, read_data, run_ranks
from safetensors.torch import load_file, save_file
from test_formats import byte_level_tokenizer

import data
import model as lm
import nf4
import train

CPU, MAIN = torch.device("cpu"), HERE.parent / "train.py"
ALONE = train.Ranks(False, 1800)
ALONE.device = CPU


def shell(*argv, cwd=HERE.parent, **environment):
    """A command on the CPU."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
    command = [sys.executable, *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=600)


def names(folder):
    return {path.name for path in folder.iterdir()}


def loader_of(chats, packing=True):
    """All rows of the chats, 96 tokens long, one after the other."""
    documents, _ = read_data(chats, data.Tokenizer(HERE / "tiny"), seq_len=96)
    return data.Loader(documents, 96, packing, 4, 0, 0, 1)


@pytest.fixture(scope="module")
def main_job(chats, tmp_path_factory):
    """The README's main command, cut to a few steps."""
    out = tmp_path_factory.mktemp("main") / "run"
    done = shell("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, TRAIN, "--fsdp2", "--qlora",
                 "--offload", "--seq_len", 256, "--steps", 12, "--merge", "--eval_data", chats, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.bf16
def test_main_job_writes_what_it_promises(main_job):
    out, _, rows = main_job
    assert names(out) == {"args.json", "metrics.jsonl", "loss.svg", "lock", "checkpoint-12", "final", "merged"}
    assert names(out / "final") >= {"adapter_config.json", "adapter_model.safetensors"}
    assert names(out / "merged") == names(HERE / "tiny")
    args = json.loads((out / "args.json").read_text())
    assert args["world"] == 2 and args["torch"] == torch.__version__ and args["qlora"] is True
    keys = {"step", "epoch", "loss", "losses", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "mem_gib",
            "mem_reserved_gib", "step_s", "data_s"}
    assert [set(row) for row in rows] == [keys] * (len(rows) - 1) + [{"step", "eval_loss", "eval_tokens"}]
    assert {*range(1, 11), 12} <= {row["step"] for row in rows}  # on a slow machine 11 as well
    assert all(math.isfinite(row["loss"]) and row["tokens_per_s"] > 0 for row in rows[:-1])
    assert rows[-2]["loss"] < rows[0]["loss"] < 5  # nats a token; ln(4096) = 8.3 is knowing nothing of Python


@pytest.mark.parametrize("has_bf16", [True, False])
def test_the_default_precision_is_what_the_cpu_computes_fast(monkeypatch, has_bf16):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    for flags, precision in (["--qlora"], "mixed"), (["--chat"], "bf16"):
        args = train.parse_args(flags)
        assert train.default_precision(args, CPU) == (precision if has_bf16 else "fp32")


@pytest.mark.bf16
def test_main_job_says_what_is_on_and_why(main_job):
    said = main_job[1]
    precision = "mixed" if torch.cpu._is_avx512_bf16_supported() else "fp32"
    for line in (f"--precision {precision}: trained float32, all else ", "--lora: adapters of rank 16 are trained",
                 "--qlora: ", "--fsdp2: parameters, gradients and optimizer state in 2 shards",
                 "--offload activations params: ",
                 "--activation_checkpointing auto: the backward recomputes 6 of 6 blocks\n",
                 "--chunked_ce: head and loss see 1024 tokens at a time", "--fused_adamw: ", "--packing: documents ",
                 "settings: --lora_rank 16 --lora_alpha 32 ", "off: dpo, replicas, sequence_parallel, tiled_mlp, "):
        assert f"\n  {line}" in said
    for line in ("\nbefore: ", "\nafter: ", "\nstep  1/12  loss ", "checkpoint-12: ", "12 steps in ",
                 "step 12  eval loss ", f"done: {main_job[0]}/final and {main_job[0]}/merged"):
        assert line in said
    shown = said[said.index("\ntiny (") : said.index("\n12 steps of ")].splitlines()[1:]
    assert len(shown) <= 25 and all(len(line) <= 80 for line in shown), said


def start_of(flags, capsys):
    """What print_start() prints for a run of qwen3-0.6b on eight ranks."""
    model = SimpleNamespace(config=lm.parse_config(data.PRESETS["qwen3-0.6b"]), compute_dtype=torch.bfloat16,
                            parameters=list)
    ranks = SimpleNamespace(world=8, device_name="CPU", say=print)
    args = train.parse_args(flags.split())
    blocks = train.blocks_as_asked(args, model.config)
    train.print_start(args, model, SimpleNamespace(tensors={}), blocks, ranks)
    return capsys.readouterr().out


def test_the_start_fits_a_screen_with_every_feature_on(capsys):
    said = start_of("--precision bf16 --qlora --seq_len 99999 --fsdp2 --replicas 2 --sequence_parallel 2 --offload "
                    "--tiled_mlp 4096 --optim adamw8bit --stochastic_rounding --optim_in_backward --compile --clip 0 "
                    "--lora_dropout 0.1 --min_lr 0.1 --warmup 0 --schedule linear --weight_decay 0 --seed 1", capsys)
    assert "  off: dpo, fused_adamw\n" in said  # AdamW of 8 bits has no fused kernel
    assert len(said.splitlines()) <= 25 and max(map(len, said.splitlines())) <= 80, said


def test_a_new_flag_that_changes_the_mathematics_needs_no_list(monkeypatch, capsys):
    make_parser = train.make_parser

    def make_fork():
        parser = make_parser()
        train.add(parser, "--z_loss", float, 0.0, "weight of the z-loss", fixed=True)
        return parser

    monkeypatch.setattr(train, "make_parser", make_fork)
    assert "--z_loss 0.5" in start_of("--z_loss 0.5", capsys)
    assert "z_loss" not in start_of("", capsys)
    config = lm.parse_config(data.PRESETS["qwen3-0.6b"])
    loader = SimpleNamespace(documents=SimpleNamespace(checksum=0))
    assert train.fixed_settings(train.parse_args(["--z_loss", "0.5"]), config, 4, loader, None)["--z_loss"] == 0.5


def test_the_names_in_the_tables_of_flags_are_flags():
    flags = vars(train.parse_args([])).keys()
    assert {name.removeprefix("--") for name in train.OTHER_NAMES.values()} <= flags
    assert train.NEEDED.keys() | set(train.NEEDED.values()) <= flags
    assert train.EVERYDAY - {"help"} <= flags


def test_merged_model_is_base_plus_adapter(main_job):
    out = main_job[0]
    base, merged = load_file(HERE / "tiny/model.safetensors"), load_file(out / "merged/model.safetensors")
    adapter = load_file(out / "final/adapter_model.safetensors")
    assert {t.dtype for t in adapter.values()} == {torch.float32}  # the parameters that train, not their bf16 copies
    assert base.keys() == merged.keys()
    for name, w in base.items():
        stem = data.PEFT_PREFIX + name.removesuffix("weight")
        if stem + "lora_A.weight" in adapter:
            w = w.float() + 2.0 * (adapter[stem + "lora_B.weight"] @ adapter[stem + "lora_A.weight"])
            assert not torch.equal(merged[name], base[name])
        # bf16 keeps 8 bits: half a unit of the last, and a rounding of the float32 sum that may tip it over
        torch.testing.assert_close(merged[name].float(), w.float(), rtol=0.0041, atol=1e-7)


def test_plain_python_finds_a_hub_id_in_the_cache_and_names_a_fresh_folder(tmp_path, chats):
    snapshot = tmp_path / "hub/models--someone--tiny/snapshots/abc"
    shutil.copytree(HERE / "tiny", snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text("abc")
    done = shell(TRAIN, "--model", "someone/tiny", "--data", chats, "--seq_len", 128, "--lora", "--steps", 1,
                 "--sample", "", cwd=tmp_path, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "out").iterdir()
    assert json.loads((run / "final/adapter_config.json").read_text())["base_model_name_or_path"] == "someone/tiny"
    assert "before:" not in done.stdout


def test_epochs_and_overflow_say_how_many_steps_a_run_has(folder, chats, tmp_path):
    documents, _ = read_data(chats, data.Tokenizer(HERE / "tiny"), seq_len=32, overflow="truncate")
    n_rows = len(data.Loader(documents, 32, True, 4, 0, 0, 1).rows)
    fewer, _ = read_data(chats, data.Tokenizer(HERE / "tiny"), seq_len=32)  # long conversations are dropped by default
    assert len(fewer.start) < 0.9 * len(documents.start)  # or the flag would not show
    argv = ["--model", folder, "--random_init", "--data", chats, "--seq_len", 32, "--precision", "fp32", "--batch_size",
            4, "--overflow", "truncate", "--epochs", 0.25]
    rows, said, codes = run_ranks(1, argv, tmp_path / "run")
    assert codes == [0], said
    assert rows[-1]["step"] == math.ceil(0.25 * n_rows / 4)


def test_evaluation_is_the_training_loss(folder, chats, tmp_path):
    argv = ["--model", folder, "--random_init", "--data", chats, "--eval_data", chats, "--seq_len", 96, "--precision",
            "fp32", "--lr", 0, "--steps", 1]
    # all rows as one step of training; then evaluated by three ranks, which have unequal numbers of them
    (step, one), _, _ = run_ranks(1, [*argv, "--batch_size", len(loader_of(chats).rows)], tmp_path / "one")
    (_, three), _, _ = run_ranks(3, [*argv, "--fsdp2"], tmp_path / "three")
    assert one["eval_loss"] == pytest.approx(step["loss"], rel=1e-6)  # float32 sums in another order
    assert three["eval_loss"] == pytest.approx(step["loss"], rel=1e-6)
    assert one["eval_tokens"] == three["eval_tokens"] == step["tokens"]


def test_unpacked_rows_have_the_loss_and_the_gradients_of_packed_ones(chats):
    results = []
    for packing in (True, False):
        model, _ = build()
        for b in loader_of(chats, packing).once():
            model(b.tokens, b.targets, b.positions, b.spans, b.keep_S).backward()
        loss, _, n_targets = train.evaluate(model, loader_of(chats, packing), ALONE)
        results.append([torch.tensor([loss, n_targets]), *(p.grad for p in model.parameters())])
    for packed, unpacked in zip(*results, strict=True):  # sums in another order, of some 2,000 tokens
        torch.testing.assert_close(packed, unpacked, rtol=1e-4, atol=1e-3 * packed.abs().max().item())


def test_adapters_start_as_in_peft_and_their_dropout_depends_on_seed_and_step_and_is_off_in_evaluation():
    tokens, losses_of_bits = torch.arange(30)[None], []
    model, _ = build("--lora", "--lora_dropout", 0.5)
    for p in model.parameters():
        if p.requires_grad:
            assert 0.9 < p.abs().max() * p.shape[1] ** 0.5 <= 1 or not p.any()  # A in U(-1/sqrt(in), 1/sqrt(in)), B 0
            torch.nn.init.normal_(p)
    for seed, step in ((1, 0), (1, 0), (2, 0), (1, 1)):
        lm.set_dropout_bits_(model, nf4.token_bits(seed, step, 0, *tokens.shape))
        losses_of_bits.append(model(tokens, tokens).item())
    assert losses_of_bits[0] == losses_of_bits[1]
    assert len({*losses_of_bits}) == 3
    assert model.eval()(tokens, tokens) == model(tokens, tokens)


def test_inspect_prints_examples_and_trains_nothing(folder, chats, tmp_path):
    argv = ["--model", folder, "--random_init", "--data", chats, "--inspect", 2]
    _, text, codes = run_ranks(2, argv, tmp_path / "run")
    assert codes == [0, 0] and text.count("--- example") == 2 and "⟦" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("schedule, middle, end", [("constant", 1, 1), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)])
def test_learning_rate_schedules(schedule, middle, end):
    args = train.parse_args(["--lr", "1", "--min_lr", "0.1", "--warmup", "10", "--schedule", schedule])
    lrs = [train.lr_at(step, 110, args) for step in range(111)]
    assert lrs[0] == pytest.approx(1 / 11) and lrs[9] == pytest.approx(10 / 11) and lrs[10] == 1.0
    assert lrs[60] == pytest.approx(middle) and lrs[110] == pytest.approx(end)


def test_decay_spares_norms_and_biases():
    matrix, norm = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    named = {"matrix": matrix, "norm": norm}
    optimizer = train.make_optimizer(named, train.parse_args(["--lr", "1e-3"]), torch.zeros(()))
    assert [(group["weight_decay"], group["params"]) for group in optimizer.param_groups] == [
        (0.01, [matrix]), (0.0, [norm])]


def test_flops_of_a_step_are_six_per_weight_and_token():
    c = lm.parse_config(data.PRESETS["llama-3.1-8b"])
    counts = lm.Counts(4096, 4096, 4096**2)
    assert lm.step_flops(c, counts, False) / 4096 == pytest.approx(48.8e9, rel=0.01)  # 6 * 7.5e9 + attention, by hand
    assert lm.step_flops(c, counts, True) / 4096 == pytest.approx(33.8e9, rel=0.01)
    # 8 * 58.7e6 in attention, 24 * 67.1e6 in Gated DeltaNet, 32 * 151e6 in MLPs, 1.02e9 in the head: 6 times that, plus
    # 0.94e9 of attention and 0.23e9 of the delta rule
    c = lm.parse_config(data.PRESETS["qwen3.5-9b"])
    assert lm.step_flops(c, counts, False) / 4096 == pytest.approx(48.7e9, rel=0.002)


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A Log at step 4 of 9 whose TensorBoard keeps what it gets."""
    board = SimpleNamespace(scalars=set(), flush=lambda: None, add_scalar=lambda *scalar: board.scalars.add(scalar))
    made = SimpleNamespace(SummaryWriter=lambda folder, purge_step: vars(board).update(purge_step=purge_step) or board)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", made)
    state = {"step": 4, "steps": 9, "tokens": 0, "best_eval": None, "rows_a_step": 1}
    return train.Log(tmp_path, state, SimpleNamespace(rows=[0] * 9, waited_s=0.0), ALONE, tensorboard=True)


def test_an_evaluation_between_log_lines_does_not_count_as_training(log, tmp_path, monkeypatch):
    clock = iter([log.mark + 5.0, log.mark + 25.0])  # an evaluation of 20 seconds, and the log line after it
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(clock, log.mark + 10.0))
    log.count(torch.tensor(20.0), torch.zeros(0), 10, 100, 0)
    with log.paused():
        log.write_eval(train.Evaluation(1.0, [], 5))
    log.count(torch.tensor(10.0), torch.zeros(0), 10, 100, 0)
    log.state["step"] = 6
    losses, _ = log.means()
    log.write(losses.tolist(), [], 1e-3, 1.0)
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["losses"] == [2.0, 1.0] and row["loss"] == 1.0
    assert row["step_s"] == pytest.approx(5.0) and row["tokens_per_s"] == pytest.approx(20.0)  # 200 tokens, 10 s


def test_a_line_of_a_long_run_on_a_large_gpu_has_80_columns(log, monkeypatch, capsys):
    log.state |= {"step": 2000, "steps": 10_000}
    log.start -= 10_000  # seconds: more than ten hours are left
    log.mark -= 1.0
    log.n_tokens = 123_000
    monkeypatch.setattr(train, "memory_gib", lambda device: (139.51, 140.0))
    log.write([12.3456], [], 0.0123, 2e-4)
    line = capsys.readouterr().out.strip()
    assert "step  2000/10000  loss 12.3456  norm 0.0123  12" in line and "139.51 GiB  11:" in line
    assert len(line) <= 80


def test_an_evaluation_of_pairs_says_how_often_the_chosen_answer_wins(log, capsys):
    log.write_eval(train.Evaluation(0.5, [1.25, 0.75, -10.0, -20.0], 40))
    assert capsys.readouterr().out == (
        "step 4  eval loss 0.5000 over 40 pairs, accuracy 0.750, best 0.5000 at step 4\n")


def test_tensorboard_gets_the_numbers_of_metrics(log, tmp_path):
    log.write_eval(train.Evaluation(2.5, [], 100))
    assert log.board.purge_step == 5 and log.board.scalars == {("eval_loss", 2.5, 4), ("eval_tokens", 100, 4)}
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 4, "eval_loss": 2.5, "eval_tokens": 100}


@pytest.mark.bf16
def test_chat_answers_each_line_of_a_pipe_with_what_a_run_has_made(main_job):
    asked = "What does `os.getcwd()` do?\n/reset\n\nWhat does `os.getcwd()` do?\n"
    argv = [sys.executable, TRAIN, "--chat", "--model", main_job[0], "--max_new_tokens", "8"]
    done = subprocess.run(argv, input=asked, capture_output=True, text=True)
    first, second = done.stdout.splitlines()  # the same question after /reset: the same greedy answer
    assert done.returncode == 0 and first == second != ""


QUESTION = b"What does `os.getcwd()` do?\n"


def ask(monkeypatch, lines, *argv):
    """--chat with these bytes as its input, on the built-in model unless argv has another -> the exit code."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), "utf-8"))
    return train.launch(["--chat", "--model", "tiny", "--max_new_tokens", "3", *map(str, argv)])


def test_chat_goes_on_after_a_question_that_cannot_be_asked(monkeypatch, capsys):
    assert ask(monkeypatch, "a \U00104000 b\n".encode() + b"caf\xe9\n") == 0  # the second is not UTF-8
    said = capsys.readouterr()
    assert "U+104000" in said.err and len(said.err.splitlines()) == 1
    empty, answered, *_ = said.out.splitlines()
    assert not empty and answered


def answer_with(monkeypatch, ids):
    """--chat gets these ids for each question -> the list of all questions, as messages."""
    asked = []
    prompt = data.Tokenizer.prompt
    monkeypatch.setattr(data.Tokenizer, "prompt", lambda self, ask: asked.append(ask) or prompt(self, ask))
    monkeypatch.setattr(lm, "generate", lambda *rest: iter(ids))
    return asked


def test_chat_prints_and_remembers_a_run_of_odd_bytes(tiny, monkeypatch, capsys):
    ids = [109, 179, 1466]  # a byte that is a character, one that is none, a word: DecodeStream raised here
    asked = answer_with(monkeypatch, ids)
    assert ask(monkeypatch, b"hi\nagain\n") == 0
    text = tiny.core.decode(ids)
    assert text.startswith("��") and asked[1][1] == {"role": "assistant", "content": text}
    # the first byte was shown as a character before the second one made it part of a run that is none
    assert capsys.readouterr().out.splitlines() == [f"{tiny.core.decode(ids[:1])}{text[1:]}"] * 2


def test_a_character_that_the_last_token_cuts_is_shown_as_one(tiny, monkeypatch, capsys):
    euro = tiny.core.encode("a €", add_special_tokens=False).ids[:-1]  # it has three bytes
    asked = answer_with(monkeypatch, euro)
    assert ask(monkeypatch, b"hi\nagain\n") == 0
    shown = capsys.readouterr().out.splitlines()[0]
    assert shown == asked[1][1]["content"] == tiny.core.decode(euro)
    assert shown.startswith("a ") and shown.endswith("�")


@pytest.mark.parametrize("kind", ["built-in", "bytes"])
def test_random_streams_of_ids_are_shown_and_returned_as_their_text(tiny, tmp_path, capsys, kind):
    core = tiny.core if kind == "built-in" else byte_level_tokenizer(tmp_path, trim_offsets=False).core
    rng = random.Random(0)
    n_equal = 0
    for _ in range(300):
        # half of them bytes, most of which are no characters
        ids = [rng.randrange(256 if rng.random() < 0.5 else core.get_vocab_size()) for _ in range(12)]
        text = train.print_answer(core, iter(ids))
        assert text == core.decode(ids)
        is_equal = capsys.readouterr().out == data.printable(text)
        # In the built-in one, bytes that are no character spoil the characters before them, which stay on the screen
        assert is_equal or (kind == "built-in" and "�" in text)
        n_equal += is_equal
    assert n_equal > 150  # otherwise it shows nothing


def test_ctrl_c_ends_an_answer_and_keeps_what_was_said(tiny, monkeypatch, capsys):
    ids = tiny.core.encode("one two", add_special_tokens=False).ids

    def interrupted(*_):
        yield from ids
        raise KeyboardInterrupt

    asked = answer_with(monkeypatch, [])
    monkeypatch.setattr(lm, "generate", interrupted)
    assert ask(monkeypatch, b"hi\nagain\n") == 0
    assert capsys.readouterr().out.splitlines() == ["one two"] * 2
    assert asked[1][1]["content"] == "one two"


def test_ctrl_c_while_a_long_prompt_is_made_ends_that_question_alone(monkeypatch, capsys):
    def prompt(self, messages, original=data.Tokenizer.prompt):
        if messages[-1]["content"] == "long":
            raise KeyboardInterrupt
        return original(self, messages)

    monkeypatch.setattr(data.Tokenizer, "prompt", prompt)
    assert ask(monkeypatch, b"long\n" + QUESTION) == 0
    interrupted, answer = capsys.readouterr().out.splitlines()
    assert not interrupted
    assert answer


def test_a_chat_answers_at_the_temperature_that_was_asked_for(monkeypatch):
    temperatures = []
    monkeypatch.setattr(lm, "generate", lambda *args: temperatures.append(args[-1]) or iter([]))
    assert ask(monkeypatch, QUESTION, "--temperature", 0.5) == 0
    assert temperatures == [0.5]


def test_chat_tells_of_a_prompt_beyond_the_trained_positions_and_refuses_an_endless_one(monkeypatch, capsys):
    asked = answer_with(monkeypatch, [])
    monkeypatch.setattr(lm, "generate", lambda model, prompt, *rest: asked.append(len(prompt)) or iter([]))
    lines = ["a", "é" * 2100, "a" * 100_000, "b"]  # the built-in model has seen 2,048 positions
    assert ask(monkeypatch, "\n/reset\n".join(lines).encode()) == 0
    n_short, n_long, n_next = (n for n in asked if isinstance(n, int))  # the third question reaches no model
    assert n_short == n_next < 2048 < n_long
    told, refused = capsys.readouterr().err.splitlines()
    assert f"{n_long:,} tokens" in told and "2,048 positions" in told and "/reset" in told
    assert "error" in refused and "more than 4 times the 2,048 positions" in refused


def test_chat_says_what_is_wrong_with_template_and_weights(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.jinja").write_text("{% set nothing = messages %}")
    assert ask(monkeypatch, b"What?\n", "--chat_template", tmp_path / "mine.jinja") == 0
    assert "mine.jinja): makes no token of the question" in capsys.readouterr().err
    model = tmp_path / "model"
    shutil.copytree(HERE / "tiny", model)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert ask(monkeypatch, b"What?\n", "--model", model) == train.NOT_FINITE
    message = capsys.readouterr().err.splitlines()[-1]
    assert message == "train.py: error: the model computes nan: the files of --model are damaged"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_lock_that_is_no_file_is_refused_by_name(tmp_path, make):
    make(tmp_path / "lock")  # to open a pipe for writing would wait for its reader
    with pytest.raises(OSError, match=f"--out {tmp_path}: folder, or the file lock in it, not written"):
        train.lock_folder(tmp_path)


def test_a_lock_that_is_a_link_empties_nothing(tmp_path):
    (tmp_path / "mine").write_text("work")
    (tmp_path / "lock").symlink_to("mine")
    train.lock_folder(tmp_path)
    assert (tmp_path / "mine").read_text() == "work"


def test_what_is_left_of_a_save_is_removed_and_not_waited_for_or_followed(tmp_path):
    (tmp_path / "mine").write_text("work")
    (tmp_path / "loss.svg.part").symlink_to("mine")
    (tmp_path / "checkpoint-9.part/rank").mkdir(parents=True)
    os.mkfifo(tmp_path / "final.part")
    train.lock_folder(tmp_path)
    assert names(tmp_path) == {"lock", "mine"} and (tmp_path / "mine").read_text() == "work"


def test_two_processes_never_write_to_one_run(tmp_path, chats, capsys):
    argv = ["--data", str(chats), "--seq_len", "64", "--steps", "1", "--sample", "", "--out", str(tmp_path)]
    with open(tmp_path / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert train.launch(argv) == 1
    assert "another process writes to it" in capsys.readouterr().err and names(tmp_path) == {"lock"}


@pytest.mark.parametrize("step, cause", [(0, "files of --model are damaged"), (3, "lower --lr")])
def test_weights_that_are_not_finite_are_named_and_not_saved(tmp_path, step, cause):
    saver = train.Saver(tmp_path, 1, ALONE)
    message = f"w contains inf or nan after {step} steps, nothing is saved: .*{cause}"
    with pytest.raises(FloatingPointError, match=message):
        saver.save({"v": torch.ones(2), "w": torch.tensor([1, torch.nan])}, {"step": step})
    assert not names(tmp_path)


@pytest.mark.parametrize("rank, argv, printed, message", [
    ("0", ["--learning_rate", "1"], True, "did you mean --lr?"),
    ("1", ["--learning_rate", "1"], False, "did you mean --lr?"),  # rank 0 may be ended before it has judged the flags
    (None, ["--data", "nowhere.jsonl"], True, "nowhere.jsonl: no such file"),
])
def test_one_rank_says_what_is_wrong_for_torchrun_to_end_with(
        tmp_path, monkeypatch, capsys, rank, argv, printed, message):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
    assert train.launch(argv) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("train.py: error: ") == printed and (not printed or message in said.splitlines()[-1])
    assert message in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


def test_help_is_short_and_help_all_has_every_flag(capsys):
    shown = {}
    for flag in ("--help", "--help_all"):
        assert train.launch([flag]) == 0
        shown[flag] = set(re.findall(r"^  (--\w+)", capsys.readouterr().out, re.M))
    assert {"--model", "--data", "--qlora"} <= shown["--help"] < shown["--help_all"] and len(shown["--help"]) <= 27
    names = {f"--{name}" for name in vars(train.parse_args([]))}
    assert names == shown["--help_all"] - {"--no"}


def test_the_curve_has_every_step_however_often_a_run_logs_and_stops(folder, chats, tmp_path):
    argv = ["--model", folder, "--random_init", "--data", chats, "--seq_len", 64, "--precision", "fp32", "--lora",
            "--schedule", "constant", "--warmup", 2]
    # three ranks: a float32 sum of more than two numbers depends on their order
    expected = losses(3, [*argv, "--steps", 16], tmp_path / "each")
    run_ranks(3, [*argv, "--steps", 13, "--log_every", 99, "--save_every", 13], tmp_path / "few")
    rows, text, codes = run_ranks(3, [*argv, "--steps", 16, "--log_every", 99, "--resume"], tmp_path / "few")
    assert codes == [0] * 3 and "continuing after step 13" in text, text
    logged = [row for row in rows if "loss" in row]
    assert [loss for row in logged for loss in row["losses"]] == expected
    assert [row["loss"] for row in logged] == [expected[row["step"] - 1] for row in logged]
    (points,) = re.findall('<polyline points="(.*?)"', (tmp_path / "few/loss.svg").read_text())
    assert len(points.split()) == 16 and len(logged) < 16


def test_the_curve_and_a_resume_survive_strange_rows(tmp_path):
    rows = ['{"step": 1, "losses": [2.5]}', '{"step": 2, "eval_loss": Infinity}', '{"step": 3, "lo',
            '{"step": 3, "losses": [2.0]}', '{"step": 4, "losses": [1.0]}', '{"step": 3, "eval_loss": 2.25}',
            # JSON, and no rows
            "7", "{}", '{"step": 1}', '{"step": 1.5, "loss": 2.0}', '{"step": -1, "loss": 2.0}',
            '{"step": [1], "loss": 2.0}', '{"step": 1, "loss": "2"}', '{"step": 1, "loss": NaN}',
            '{"step": 1, "loss": 2.0, "losses": 2.0}', '{"step": 1, "loss": 1' + "0" * 400 + "}",
            '{"step": 1, "loss": 2.0, "eval_loss": "x"}', "[" * 100_000]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    train.prune_metrics(tmp_path, 3, 3)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    train.prune_metrics(tmp_path, 3, 2)  # the checkpoint of step 3 has no evaluation of it: it is repeated
    assert "eval_loss" not in (tmp_path / "metrics.jsonl").read_text()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write("\n".join(rows))  # edited while the run goes on
    state = {"step": 3, "steps": 3}
    log = train.Log(tmp_path, state, SimpleNamespace(waited_s=0.0), ALONE, tensorboard=False)
    log.draw()
    picture = (tmp_path / "loss.svg").read_text()
    assert picture.count("<polyline") == 2 and "inf" not in picture and "nan" not in picture
    assert "2.50<" in picture and "2.00<" in picture and "step 3<" in picture


def test_a_row_that_a_full_disk_has_cut_ends_no_run_and_does_not_swallow_the_next(log, tmp_path, capsys):
    metrics = tmp_path / "metrics.jsonl"
    metrics.symlink_to("/dev/full")
    log.write_eval(train.Evaluation(3.0, [], 10))
    assert f"{metrics}: not written: [Errno 28]" in capsys.readouterr().out
    metrics.unlink()
    metrics.write_text('{"step": 4, "eval_lo')  # what a disk may take before it is full
    for loss in (2.0, 1.0):
        log.write_eval(train.Evaluation(loss, [], 10))
    assert [row["eval_loss"] for row in train.read_metrics(tmp_path, 4)] == [2.0, 1.0]
    assert len(metrics.read_text().splitlines()) == 3


def test_a_disk_that_is_full_costs_the_profile_and_not_the_run(tmp_path, capsys):
    (tmp_path / "trace.json.gz").symlink_to("/dev/full")
    profiler = train.tracer(SimpleNamespace(profile=True, memory_snapshot=False), tmp_path, ALONE)
    for _ in range(4):
        profiler.step()
    assert f"{tmp_path}: profile not written: [Errno 28] No space left on device" in capsys.readouterr().out


# ---------------------------------------------------------------- copies of some files


TRAIN_ON_TENSORS = """
import json, torch, model, nf4
config = model.parse_config(json.load(open("config.json")))
torch.manual_seed(0)
transformer = model.Transformer(config)
for p in transformer.parameters():
    torch.nn.init.normal_(p, std=0.05) if p.dim() > 1 else torch.nn.init.ones_(p)
optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-2)
tokens = torch.randint(0, config.vocab_size, (2, 16))
for _ in range(5):
    loss = transformer(tokens, tokens.roll(-1, 1)) / tokens.numel()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""


def test_model_and_nf4_train_on_tensors_as_a_copy_elsewhere(folder, tmp_path):
    for path in (MAIN.parent / "model.py", MAIN.parent / "nf4.py", folder / "config.json"):
        shutil.copy(path, tmp_path)
    done = shell("-c", TRAIN_ON_TENSORS, cwd=tmp_path)
    losses = [float(line) for line in done.stdout.split()]
    assert len(losses) == 5 and losses[-1] < losses[0] - 1, done.stderr  # the same rows again are soon learnt


def test_a_fork_without_tests_has_all_but_the_built_in_model(folder, chats, tmp_path):
    for path in MAIN.parent.glob("*.py"):
        shutil.copy(path, tmp_path)
    assert "--random_init one of llama-2-7b" in " ".join(shell("train.py", "--help", cwd=tmp_path).stdout.split())
    done = shell("train.py", "--model", folder, "--random_init", "--data", chats, "--steps", 1, cwd=tmp_path)
    assert "done: " in done.stdout, done.stderr
    done = shell("train.py", cwd=tmp_path)
    assert "--model tiny: no such folder" in done.stderr and "Traceback" not in done.stderr
