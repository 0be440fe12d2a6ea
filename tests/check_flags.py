"""Any number of random flags at once must train what a plain run trains, or be refused in one line. test_sharding.py
holds pairs of them; this found that adapters from o_proj on with --tiled_mlp ended in a CheckpointError.

    python tests/check_flags.py --minutes 20 --compile 0.05             # 1 to 4 ranks on the CPU
    OOMPH_EMULATED_CUDA=1 python tests/check_flags.py --seed 2          # 1 or 2 ranks on the emulated device
    python tests/check_flags.py --plan                                  # the memory plan, as test_plan.py holds it
    python tests/check_flags.py --presets                               # the plan of a preset, from all of its blocks

A case is a model, a method and data, trained for four steps on one rank without a flag of memory. Four runs of it have
other ranks and flags, and half of these stop on the way and continue on yet others. Losses, gradient norms and exported
weights must be the plain run's within the rounding of float32, weights as check_same_weights() has it (conftest.py).

With --plan, a case is a step that test_plan.py counts: the plan must be within 2 % of its bytes. With --presets, it is
the plan of a preset with random blocks: from few blocks it must be within 1 % of a trace of all.
"""

import argparse
import contextlib
import io
import itertools
import json
import random
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from conftest import (
    MOE, MUSE, QWEN35, WEIGHTS_APART, emulated_cuda, norm_of_difference, norm_of_update, random_chats, random_model,
    run_ranks)
from safetensors.torch import load_file

import data
import test_plan
import train

ROWS = 12  # of a step, however they are split
STEPS = 4
ON_GPU = bool(emulated_cuda.LOADED)

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
FEW_EXPERTS = MOE | {"num_experts": 3, "norm_topk_prob": False}
MODELS = [{}, {"tie_word_embeddings": True}, {"num_hidden_layers": 1}, LLAMA, QWEN2, QWEN35, MUSE, MOE, FEW_EXPERTS]
ADAPTERS = [
    "",
    "--lora",
    "--lora --lora_targets q_proj v_proj",
    "--qlora",
    "--qlora --lora_targets o_proj down_proj",
    "--qlora --nf5 v_proj down_proj",
    "--qlora --lora_targets gate_proj up_proj down_proj",
]
NEW_TOKENS = ["--add_tokens <a> <b>", "--lora --train_embeddings --add_tokens <a> <b>"]
METHODS = [*ADAPTERS, "--dpo --lora", "--dpo --qlora", *NEW_TOKENS]
TRAINING = ["--no-packing", "--train_on all", "--train_on whole", "--clip 0", "--weight_decay 0.1", "--seq_len 130"]
# what becomes of a block's activations; with --gpu_gib the plan decides, here for a large and for a small GPU
BLOCKS = [
    "",
    "--offload activations",
    "--no-activation_checkpointing",
    "--activation_checkpointing 1",
    "--gpu_gib 99",
    "--gpu_gib 1.03",
]
SHARDED = ["--no-reshard_after_forward", "--no-shard_embeddings", "--replicas 2", "--offload params",
           "--offload params --resident_blocks 1"]
OTHERS = ["--no-chunked_ce", "--tiled_mlp 7", "--tiled_mlp 40", "--no-fused_adamw"]


def some(rng, flags, odds):
    return [flag for flag in flags if rng.random() < odds]


# ---------------------------------------------------------------- a run against other ways to the same end


class Answer(NamedTuple):
    wrong: str | None  # "" if nothing is, None if the flags were refused
    said: list  # what was tried


class Result(NamedTuple):
    losses: list
    norms: list
    tensors: dict  # that the run exported


def make_pairs(path):
    """Turns conversations into pairs for --dpo: the answer of the next row is the rejected one."""
    questions_and_answers = [json.loads(line)["messages"][:2] for line in path.read_text().splitlines()]
    with open(path, "w") as file:
        for (question, answer), (_, other) in itertools.pairwise(questions_and_answers):
            pair = {"prompt": [question], "chosen": [answer], "rejected": [other]}
            file.write(json.dumps(pair) + "\n")


def new_case(rng, folder):
    """Flags of a model, a method and data."""
    chats = folder / "chats.jsonl"
    random_model(folder, **rng.choice(MODELS))
    random_chats(chats, rng, 120)
    method = rng.choice(METHODS)
    training = TRAINING
    if "--add_tokens" in method:  # each has to be in some row
        chats.write_text(chats.read_text().replace('"content": "', '"content": "<a><b> '))
    if "--dpo" in method:
        make_pairs(chats)
        training = [flag for flag in TRAINING if "--train_on" not in flag]  # refused in every run of the case
    flags = (f"--model {folder} --random_init --data {chats} --precision fp32 --steps {STEPS} --lr 1e-3 "
             f"--log_every 1 --seq_len 96 {method}").split()
    if "lora" in method:
        flags += ["--lora_rank", "8"]
        if "--lora_targets q_proj" in method:  # it is refused for experts
            flags += some(rng, ["--rslora"], 0.5)
    for flag in some(rng, training, 0.3):
        flags += flag.split()
    return flags


def other_ways(rng, case, compiled):
    """-> (number of ranks, flags) that change nothing."""
    world = rng.choice([1, 1, 2] if ON_GPU else [1, 2, 3, 4])
    group = rng.choice([n for n in (1, 2, 4) if world % n == 0])
    n_rows = ROWS * group // world  # of a rank, or of a group under --sequence_parallel
    grad_accum = rng.choice([n for n in range(1, n_rows + 1) if n_rows % n == 0])
    flags = [f"--sequence_parallel {group}", rng.choice(BLOCKS), *some(rng, OTHERS, 0.2)]
    if rng.random() < 0.6:
        sharded = some(rng, SHARDED, 0.3)
        if world % 2:
            sharded = [flag for flag in sharded if flag != "--replicas 2"]
        flags += ["--fsdp2", *sharded]
    # the step inside the backward cannot clip, nor add up micro-batches
    if "--clip" in case and rng.random() < 0.4:
        flags.append("--optim_in_backward")
        grad_accum = 1
    flags += some(rng, ["--compile"], compiled)
    flags += [f"--grad_accum {grad_accum} --batch_size {n_rows // grad_accum}"]
    return world, " ".join(flags).split()


def result_of(out, rows):
    steps = [row for row in rows if "loss" in row]
    (file,) = (out / "final").glob("*.safetensors")
    return Result([row["loss"] for row in steps], [row["grad_norm"] for row in steps], load_file(file))


def largest_ratio(values, expected):
    return max(abs(value / other - 1) for value, other in zip(values, expected))


def difference(got, plain, update):
    """What differs by more than the rounding of float32, "" if nothing does. update: the norm of the last one."""
    if len(got.losses) != len(plain.losses) or got.tensors.keys() != plain.tensors.keys():
        return "other steps or tensors"
    losses = largest_ratio(got.losses, plain.losses)
    norms = largest_ratio(got.norms, plain.norms)
    weights = norm_of_difference(got.tensors, plain.tensors) / update
    if losses > 2e-5 or norms > 2e-4 or weights > WEIGHTS_APART:
        return f"losses, norms, weights differ by {[losses, norms, weights]}"
    return ""


def remove_what_came_after(out, step):
    """Leaves of a run what a kill after that step would leave."""
    for path in (*out.glob("final"), *out.glob("checkpoint-*")):
        if path.name != f"checkpoint-{step}":
            shutil.rmtree(path)


def check(rng, case, folder, plain, update, compiled):
    """A run, or one that stops after some step and its continuation -> Answer."""
    out = folder / "run"
    stop = rng.choice([0, 0, 0, 1, 2, 3])
    parts = [["--save_every", str(stop), "--keep", "4"]]
    if stop:
        parts.append(["--resume"])
    said = []
    for part in parts:
        world, flags = other_ways(rng, case, compiled)
        flags += part
        said.append(f"{world} ranks: {' '.join(flags)}")
        rows, text, codes = run_ranks(world, case + flags, out, ON_GPU)
        if any(codes):
            was_refused = "Traceback" not in text and "error:" in text.splitlines()[-1]
            return Answer(None if was_refused else text[-2000:], said)
        if stop and part is parts[0]:
            remove_what_came_after(out, stop)
    return Answer(difference(result_of(out, rows), plain, update), said)


def check_case(rng, folder, compiled):
    """Yields the Answers of a new case."""
    case = new_case(rng, folder)
    out = folder / "plain"
    rows, text, codes = run_ranks(1, [*case, "--batch_size", ROWS, "--save_every", 1], out, ON_GPU)
    assert codes == [0], f"{' '.join(case)}\n{text}"
    plain = result_of(out, rows)
    update = norm_of_update(out, STEPS)
    for _ in range(4):
        answer = check(rng, case, folder, plain, update, compiled)
        shutil.rmtree(folder / "run", ignore_errors=True)
        yield answer._replace(said=[" ".join(case), *answer.said])


# ---------------------------------------------------------------- the plan against the bytes of a step

# Of a model that test_plan.py counts. Adapters and BLOCKS are the same.
PLANNED = ["--no-chunked_ce", "--tiled_mlp 256", "--no-fused_adamw", "--batch_size 2", "--grad_accum 2"]
TRAINED = [
    "", "",  # as often as twice
    "--precision bf16",
    "--precision fp32",
    "--precision fp16",
    "--optim adamw8bit",
    "--optim adamw8bit --optim_in_backward",
    "--optim_in_backward",
    "--precision bf16 --stochastic_rounding",
    "--precision bf16 --optim_in_backward --optim adamw8bit --stochastic_rounding",
]


def check_plan(rng, folder):
    """Yields the Answer of a random step of rank 0 of up to 8."""
    # Of many words two runs of a rank alone with adapters counted 10 to 16 % more than planned. It may be the drawing
    # of random weights, before the step; it was not traced, so test_plan.py has this model and random flags do not.
    name = rng.choice([name for name in test_plan.MODELS if name != "words"])
    world = rng.choice([1, 1, 2, 4, 8])
    method = rng.choice(ADAPTERS)
    lengths = f"--seq_len {rng.choice([256, 512, 1024, 2048])} --ce_chunk {rng.choice([64, 128, 1024])}"
    flags = [lengths, method, rng.choice(TRAINED), rng.choice(BLOCKS), *some(rng, PLANNED, 0.2)]
    if method:
        flags += ["--lora_rank 8", *some(rng, ["--lora_dropout 0.1"], 0.2)]
    if world > 1:
        flags += ["--fsdp2", *some(rng, SHARDED, 0.3)]
    words = " ".join(flags)
    if "--no-chunked_ce" in words:  # which leaves no chunk
        words = re.sub(r"--ce_chunk \d+", "", words)
    said = [f"{name}, {world} ranks: {words}"]
    sizes = test_plan.MODELS["gqa"] | test_plan.MODELS[name]
    sizes |= {"max_position_embeddings": 4096, "num_hidden_layers": rng.choice([4, 4, 10])}
    model = random_model(folder / "model", **sizes)
    try:
        args = train.parse_args(["--model", str(model), "--random_init", "--dry_run", *words.split()])
        config = train.open_config(args, world, device=None, random_init=True).config
    except (argparse.ArgumentError, ValueError):
        yield Answer(None, said)
        return
    # planned_and_counted() plans without --offload params, and such a run has two slots for weights in addition
    if train.RunSpec(args, config, world, args.seq_len).streams:
        yield Answer(None, said)
        return
    planned, counted = test_plan.planned_and_counted(model, world, words, folder)
    said.append(f"planned {planned / 2**20:.1f}, counted {counted / 2**20:.1f} MiB")
    ratio = planned / counted
    yield Answer(f"{ratio:.3f}" if abs(ratio - 1) > 0.02 else "", said)


def check_preset(rng):
    """The Answer of a plan from few blocks: the peak, and host memory when the forward ends, beside a trace of all."""
    name = rng.choice(list(data.PRESETS))
    world = rng.choice([1, 1, 2, 4, 8, 64])
    method = rng.choice(ADAPTERS)
    flags = [f"--seq_len {rng.choice([1024, 4096, 16384, 65536])}", method, rng.choice(TRAINED), rng.choice(BLOCKS[:3]),
             *some(rng, ["--no-compile", "--tiled_mlp 4096", "--batch_size 3", "--grad_accum 2"], 0.2)]
    if world > 1:
        flags += ["--fsdp2", *some(rng, [*SHARDED[:4], "--sequence_parallel 2"], 0.3)]
    words = " ".join(flags)
    said = [f"{name}, {world} ranks: {words}"]
    try:
        args = train.parse_args(["--model", name, "--dry_run", "--world", str(world), *words.split()])
        config = train.open_config(args, world, device=None, random_init=True).config
    except (argparse.ArgumentError, ValueError):
        return Answer(None, said)
    run = train.RunSpec(args, config, world, args.seq_len)
    choices = train.choices_for(run)
    choice = rng.choice(choices)
    said.append(str(choice))
    policy = train.policy_of(config.num_hidden_layers, **choice)
    train.TRACES.clear()
    few, whole = train.extrapolate(run, policy), train.trace(run, policy)
    peaks = [max(step.peaks.values()) / 2**30 for step in (few, whole)]
    hosts = [max(start["host"] for start in step.starts.values()) / 2**30 for step in (few, whole)]
    said.append(f"few blocks {peaks[0]:.3f} GiB and {hosts[0]:.3f} of the host, all {peaks[1]:.3f} and {hosts[1]:.3f}")
    ratios = [peaks[0] / peaks[1], (1 + hosts[0]) / (1 + hosts[1])]
    is_wrong = any(abs(ratio - 1) > 0.01 for ratio in ratios)
    return Answer(" ".join(f"{ratio:.4f}" for ratio in ratios) if is_wrong else "", said)


def answers_until(end, args):
    """Yields the Answers of random cases, one behind the other. Each has a seed of its own, which repeats it."""
    for seed in itertools.count(args.seed):
        if time.time() > end:
            return
        rng = random.Random(seed)
        with tempfile.TemporaryDirectory() as folder:
            if args.presets:
                answers = [check_preset(rng)]
            elif args.plan:
                with contextlib.redirect_stdout(io.StringIO()):
                    answers = list(check_plan(rng, Path(folder)))
            else:
                answers = check_case(rng, Path(folder), args.compile)
            for answer in answers:
                yield answer._replace(said=[f"--seed {seed}", *answer.said])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", type=float, default=0.0, help="part of the runs that compile")
    parser.add_argument("--plan", action="store_true", help="check the memory plan")
    parser.add_argument("--presets", action="store_true", help="check plans of presets from few blocks")
    train.StoreOnce = argparse._StoreAction  # random flags come behind those of test_plan.py, and count
    args = parser.parse_args()
    n_right = n_refused = n_wrong = 0
    for wrong, said in answers_until(time.time() + 60 * args.minutes, args):
        if wrong is None:
            n_refused += 1
        elif wrong:
            n_wrong += 1
            print(*said, wrong, sep="\n  ", flush=True)
        else:
            n_right += 1
    print(f"{n_right + n_refused + n_wrong} runs, {n_refused} refused, {n_wrong} wrong")
    return n_wrong > 0


if __name__ == "__main__":
    raise SystemExit(main())
