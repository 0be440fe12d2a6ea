"""Any number of random flags at once must train what a plain run trains, or be refused in one line. test_sharding.py
holds pairs of them; this found that adapters from o_proj on with --tiled_mlp ended in a CheckpointError.

    python tests/check_flags.py --minutes 20 --compile 0.05             # 1 to 4 ranks on the CPU
    OOMPH_EMULATED_CUDA=1 python tests/check_flags.py --seed 2          # 1 or 2 ranks on the emulated device
    python tests/check_flags.py --plan                                  # the memory plan, as test_plan.py holds it

A case is a model, a method and data, trained for four steps on one rank without a flag of memory. Four runs of it have
other ranks and flags, and half of these stop on the way and continue on yet others. Losses, gradient norms and exported
weights must be the plain run's within the rounding of float32.

With --plan, a case is a step that test_plan.py counts: the plan must be within 5 % of its bytes.
"""

import argparse
import contextlib
import io
import json
import random
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from conftest import MOE, MUSE, QWEN35, emulated_cuda, random_chats, random_model, run_ranks
from safetensors.numpy import load_file

import test_plan
import train

ROWS, STEPS, ON_GPU = 12, 4, bool(emulated_cuda.LOADED)  # rows a step, however they are split
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
MODELS = [{}, {"tie_word_embeddings": True}, {"num_hidden_layers": 1}, LLAMA, QWEN2, QWEN35, MUSE, MOE,
          MOE | {"num_experts": 3, "norm_topk_prob": False}]
METHODS = ["", "--lora", "--lora --lora_targets q_proj v_proj", "--qlora", "--qlora --lora_targets o_proj down_proj",
           "--qlora --lora_targets gate_proj up_proj down_proj", "--dpo --lora", "--dpo --qlora"]
TRAINING = ["--no-packing", "--train_on all", "--train_on whole", "--clip 0", "--weight_decay 0.1", "--seq_len 130"]
BLOCKS = ["", "--offload activations", "--no-activation_checkpointing", "--activation_checkpointing 1",
          "--gpu_gib 99", "--gpu_gib 1.03"]
SHARDED = ["--no-reshard_after_forward", "--no-shard_embeddings", "--replicas 2", "--offload params"]
OTHERS = ["--no-chunked_ce", "--tiled_mlp 7", "--tiled_mlp 40", "--no-fused_adamw"]


def some(rng, flags, odds):
    return [flag for flag in flags if rng.random() < odds]


def new_case(rng, folder):
    """Flags of a model, a method and data."""
    random_model(folder, **rng.choice(MODELS))
    random_chats(folder / "chats.jsonl", rng, 120)
    method, training = rng.choice(METHODS), TRAINING
    if "--dpo" in method:  # the next row's answer is the rejected one; flags that it refuses count as refused
        rows = [json.loads(line)["messages"][:2] for line in (folder / "chats.jsonl").read_text().splitlines()]
        pairs = [{"prompt": a[:1], "chosen": a[1:], "rejected": b[1:]} for a, b in zip(rows, rows[1:])]
        (folder / "chats.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        training = [flag for flag in TRAINING if "--train_on" not in flag]
    return (f"--model {folder} --random_init --data {folder}/chats.jsonl --precision fp32 --steps {STEPS} --lr 1e-3 "
            f"--log_every 1 --seq_len 96 {method} {'--lora_rank 8' if method else ''} "
            + " ".join(some(rng, training, 0.3))).split()


def other_ways(rng, case, compiled):
    """-> (number of ranks, flags) that change nothing."""
    world = rng.choice([1, 1, 2] if ON_GPU else [1, 2, 3, 4])
    group = rng.choice([n for n in (1, 2, 4) if world % n == 0])
    rows = ROWS * group // world  # of a rank, or of a group under --sequence_parallel
    accum = rng.choice([n for n in range(1, rows + 1) if rows % n == 0])
    flags = [f"--sequence_parallel {group}", rng.choice(BLOCKS), *some(rng, OTHERS, 0.2)]
    if rng.random() < 0.6:
        flags += ["--fsdp2", *(flag for flag in some(rng, SHARDED, 0.3) if flag != "--replicas 2" or world % 2 == 0)]
    if "--clip" in case and rng.random() < 0.4:
        accum, flags = 1, [*flags, "--optim_in_backward"]
    flags += some(rng, ["--compile"], compiled)
    return world, f"{' '.join(flags)} --grad_accum {accum} --batch_size {rows // accum}".split()


def results(out, rows):
    """(losses and norms of a run, its exported tensors)."""
    return ([row[key] for row in rows for key in ("loss", "grad_norm") if key in row],
            load_file(next((out / "final").glob("*.safetensors"))))


def check(rng, case, folder, plain, compiled):
    """A run, or one and its continuation -> (what is wrong, "" if nothing is, None if it was refused; the flags)."""
    out, said, stop = folder / "run", [], rng.choice([0, 0, 0, 1, 2, 3])
    for part in range(2 if stop else 1):
        world, flags = other_ways(rng, case, compiled)
        flags += ["--resume"] if part else ["--save_every", str(stop), "--keep", "4"]
        said.append(f"{world} ranks: {' '.join(flags)}")
        rows, text, codes = run_ranks(world, case + flags, out, ON_GPU)
        if any(codes):
            refused = "Traceback" not in text and "error:" in text.splitlines()[-1]
            return (None if refused else text[-2000:]), said
        if stop and not part:
            for path in (*out.glob("final"), *out.glob("checkpoint-*")):
                if path.name != f"checkpoint-{stop}":
                    shutil.rmtree(path)
    (curve, tensors), (expected, weights) = results(out, rows), plain
    if len(curve) != len(expected) or tensors.keys() != weights.keys():
        return "other steps or tensors", said
    worst = [max(abs(a / b - 1) for a, b in zip(curve[i::2], expected[i::2])) for i in (0, 1)]  # of losses, of norms
    # Adam divides a gradient by its own size: rounding in a tiny one moves a weight by a part of the learning rate
    worst.append(max(np.abs(tensors[name] - weights[name]).max() for name in weights))
    differs = any(value > bound for value, bound in zip(worst, (2e-5, 2e-4, 2e-3)))
    return (f"losses, norms, weights differ by {worst}" if differs else ""), said


# of a model that test_plan.py counts; methods and BLOCKS are the same
PLANNED = ["--no-chunked_ce", "--tiled_mlp 256", "--no-fused_adamw", "--batch_size 2", "--grad_accum 2"]
TRAINED = ["", "", "--precision bf16", "--precision fp32", "--optim adamw8bit", "--optim adamw8bit --optim_in_backward",
           "--optim_in_backward", "--precision bf16 --stochastic_rounding",
           "--precision bf16 --optim_in_backward --optim adamw8bit --stochastic_rounding"]


def check_plan(rng, folder):
    """A random step of rank 0 of up to 8 -> (what is wrong, "" if nothing is, None if it was refused; the flags)."""
    name, world = rng.choice(list(test_plan.MODELS)), rng.choice([1, 1, 2, 4, 8])
    method = rng.choice(METHODS[:-2])
    flags = [f"--seq_len {rng.choice([256, 512, 1024, 2048])} --ce_chunk {rng.choice([64, 128, 1024])}", method,
             rng.choice(TRAINED), rng.choice(BLOCKS), *some(rng, PLANNED, 0.2)]
    if method:
        flags += ["--lora_rank 8", *some(rng, ["--lora_dropout 0.1"], 0.2)]
    if world > 1:
        flags += ["--fsdp2", *some(rng, SHARDED, 0.3)]
    words = " ".join(flags)
    said = [f"{name}, {world} ranks: {words}"]
    model = random_model(folder / "model", **test_plan.MODELS["gqa"] | test_plan.MODELS[name]
                         | {"max_position_embeddings": 4096, "num_hidden_layers": rng.choice([4, 4, 10])})
    try:
        args = train.parse_args(["--model", str(model), "--random_init", "--dry_run", *words.split()])
        train.open_config(args, world, device=None, random_init=True)
    except (argparse.ArgumentError, ValueError):
        return None, said
    planned, counted = test_plan.planned_and_counted(model, world, words, folder)
    said.append(f"planned {planned / 2**20:.1f}, counted {counted / 2**20:.1f} MiB")
    return (f"{planned / counted:.3f}" if abs(planned / counted - 1) > 0.05 else ""), said


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", type=float, default=0.0, help="part of the runs that compile")
    parser.add_argument("--plan", action="store_true", help="check the memory plan")
    args = parser.parse_args()
    rng, end, answers = random.Random(args.seed), time.time() + 60 * args.minutes, []
    while time.time() < end:
        with tempfile.TemporaryDirectory() as top:
            if args.plan:
                with contextlib.redirect_stdout(io.StringIO()):
                    wrong, said = check_plan(rng, Path(top))
                answers.append(wrong)
                if wrong:
                    print(*said, wrong, sep="\n  ", flush=True)
                continue
            case, out = new_case(rng, Path(top)), Path(top, "plain")
            rows, text, codes = run_ranks(1, [*case, "--batch_size", ROWS], out, ON_GPU)
            assert codes == [0], f"{' '.join(case)}\n{text}"
            plain = results(out, rows)
            for _ in range(4):
                wrong, said = check(rng, case, Path(top), plain, args.compile)
                shutil.rmtree(Path(top, "run"), ignore_errors=True)
                answers.append(wrong)
                if wrong:
                    print(" ".join(case), *said, wrong, sep="\n  ", flush=True)
    print(f"{len(answers)} runs, {answers.count(None)} refused, {sum(map(bool, answers))} wrong")
    return any(answers)


if __name__ == "__main__":
    raise SystemExit(main())
