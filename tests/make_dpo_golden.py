"""Writes tests/goldens-dpo/: 24 pairs of answers, and what TRL's DPOTrainer does in 50 steps of LoRA with them.

Needs trl, peft and transformers (1.16, 0.21.2 and 5.23 were used), in float32 on a CPU, half a minute:

    OMP_NUM_THREADS=1 python tests/make_dpo_golden.py

The model is tests/tiny, its reference the same model with its adapters off. The adapters start as train.py makes them
for --lora --lora_rank 8 --lora_alpha 16 --seed 0; data, loss, metrics, optimizer and clipping are TRL's own.

pairs.jsonl    {"prompt", "chosen", "rejected"}, each a list of messages
curve.json     "versions"; "settings" of the run; "ids", the tokens of the first pair; and of each step, which sees
               4 pairs, in the order of the file and again from its start: "loss", "reward_margin", "reward_accuracy",
               "logp_chosen", "logp_rejected" (means over pairs of sums over the tokens of an answer) and "grad_norm"
               before clipping
"""

import json
import os
import random
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")

import datasets
import peft
import torch
import transformers
import trl

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import data  # noqa: E402
import model as lm  # noqa: E402
import train  # noqa: E402

TINY = HERE / "tiny"
OUT = HERE / "goldens-dpo"
N_PAIRS = 24
N_STEPS = 50
RANK = 8
ALPHA = 16
SETTINGS = dict(
    beta=0.1, loss_type=["sigmoid"], learning_rate=1e-3, lr_scheduler_type="constant", warmup_steps=0,
    weight_decay=0.01, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, max_grad_norm=1.0,
    per_device_train_batch_size=4, gradient_accumulation_steps=1, max_steps=N_STEPS, max_length=None)
KEYS = {"loss": "loss", "reward_margin": "rewards/margins", "reward_accuracy": "rewards/accuracies",
        "logp_chosen": "logps/chosen", "logp_rejected": "logps/rejected", "grad_norm": "grad_norm"}


def make_pairs():
    """Random words, as in conftest.random_chats: what is learned is learned by heart."""
    rng = random.Random(0)
    words = "the file is read from disk and returned as a list of str self None import def".split()

    def message(role):
        return [{"role": role, "content": " ".join(rng.choices(words, k=rng.randint(3, 20)))}]

    pairs = [{"prompt": message("user"), "chosen": message("assistant"), "rejected": message("assistant")}
             for _ in range(N_PAIRS)]
    assert all(pair["chosen"] != pair["rejected"] for pair in pairs)
    return pairs


def as_strings(pair, tokenizer):
    """A pair as the strings that TRL tokenizes. From messages it would make an answer that ends in the newline after
    the end of the turn, which train.py never trains on. This is all that is adapted here. TRL appends an
    end-of-sequence token to a string that does not end in one, and these do; the tokenizer adds no token of its own."""
    prompt = tokenizer.apply_chat_template(pair["prompt"], add_generation_prompt=True, tokenize=False)
    strings = {"prompt": prompt}
    for name in ("chosen", "rejected"):
        whole = tokenizer.apply_chat_template(pair["prompt"] + pair[name], tokenize=False)
        assert whole.startswith(prompt) and whole.endswith(tokenizer.eos_token + "\n")
        strings[name] = whole.removeprefix(prompt).removesuffix("\n")
    return strings


def first_adapter():
    """{PEFT's name: tensor} of the adapters that train.py starts with."""
    args = train.parse_args(
        ["--precision", "fp32", "--seed", "0", "--lora", "--lora_rank", str(RANK), "--lora_alpha", str(ALPHA)])
    config = lm.parse_config(data.read_json(TINY / "config.json"))
    model = lm.on_meta(config, args)
    model.to_empty(device="cpu").tie_()
    data.load_weights_(model, data.WeightFiles(TINY), None, args.seed, torch.device("cpu"))
    return {data.PEFT_PREFIX + name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def make_trainer(pairs, folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    args = trl.DPOConfig(
        folder, **SETTINGS, optim="adamw_torch", train_sampling_strategy="sequential", logging_steps=1,
        gradient_checkpointing=False, bf16=False, use_cpu=True, save_strategy="no", report_to="none",
        disable_tqdm=True)
    adapter = first_adapter()
    targets = sorted({name.split(".lora_")[0].rsplit(".")[-1] for name in adapter})
    trainer = trl.DPOTrainer(
        str(TINY), args=args, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list([as_strings(pair, tokenizer) for pair in pairs]),
        peft_config=peft.LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=targets,
                                    task_type="CAUSAL_LM"))
    trainer.remove_callback(transformers.PrinterCallback)  # main() prints a few steps itself
    peft.set_peft_model_state_dict(trainer.model, adapter)
    started = peft.get_peft_model_state_dict(trainer.model)  # exactly these tensors, under exactly these names
    assert started.keys() == adapter.keys() and all(torch.equal(started[name], adapter[name]) for name in adapter)
    assert len(adapter) == sum(p.requires_grad for p in trainer.model.parameters())
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert trainer.ref_model is None and list(trainer.model.peft_config) == ["default"]
    return trainer


def main():
    OUT.mkdir(exist_ok=True)
    pairs = make_pairs()
    (OUT / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(pairs, folder)
        first = trainer.train_dataset[0]
        trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, N_STEPS + 1))
    assert {row["learning_rate"] for row in rows} == {SETTINGS["learning_rate"]}
    result = {
        "versions": {module.__name__: module.__version__ for module in (trl, peft, transformers, torch)},
        "settings": SETTINGS | {"lora_rank": RANK, "lora_alpha": ALPHA},
        "ids": {name: first[f"{name}_ids"] for name in ("prompt", "chosen", "rejected")},
    }
    result |= {key: [row[name] for row in rows] for key, name in KEYS.items()}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in result.items())
    (OUT / "curve.json").write_text(f"{{\n{lines}\n}}\n")
    for step in (*range(5), N_STEPS - 1):
        print(f"step {step + 1}:", ", ".join(f"{key} {result[key][step]:.7g}" for key in KEYS))


if __name__ == "__main__":
    main()
