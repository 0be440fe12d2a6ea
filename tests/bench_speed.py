"""Measures how fast oomph trains beside its peers: the same shapes, weights and tokens, in one interleaved run, as markdown.

    tests/make_peers.sh FOLDER                                   # the peers' environments, once
    python tests/bench_speed.py --peers FOLDER                   # full, LoRA and QLoRA on a small model
    python tests/bench_speed.py --peers FOLDER --shape large chat --methods lora --rounds 5 --arms oomph transformers
    python tests/bench_speed.py --shape 8b 8bx2 --methods lora   # on a GPU, all arms in this environment

The driver writes a model folder with random bf16 weights and the documents of every step, and starts a process for each arm
with that peer's python. A process builds its model, warms up (that is where torch.compile compiles), says READY and then
waits for its turn. A turn is one step that is not timed, for caches that others have used meanwhile, and --steps that are;
in each round every arm has one, in an order that rotates. Processes that wait are stopped (SIGSTOP): no thread of theirs
spins, and the arm at work has the machine and its usual OpenMP settings. Models of 8b do not fit beside each other: their
arms come one after the other, --rounds turns each, and the same once more.

tok/s are real tokens, padding left out, of the timed steps: the median over the rounds. The ratio to the fastest peer is
taken within each round, then the median. Peak memory is, on a CPU (Linux), VmHWM, reset after the imports and read at the
end, so that it holds loading and compiling too; `stepping` is that of the measured turns alone. On a GPU both are
torch.cuda.max_memory_allocated. `of peak` is the model's FLOP (train.step_flops: recomputation and padding not counted) per
second over a bf16 matrix product that is measured first, 8192^3 on a GPU, 2048^3 on a CPU.

What is the same in all arms: bf16 weights; torch's fused AdamW, learning rate 1e-4, constant, weight decay 0.01 on matrices,
gradients clipped to a norm of 1; LoRA of rank 16, alpha 32, no dropout, on all seven linear layers; SDPA attention; no
activation checkpointing but for full and qlora on 8b; the loss is read once a step. Full fine-tuning is pure bf16 in every
arm, `--precision bf16` here; adapters are float32 or bf16 as each product does it, see the last column. Every arm's losses of
the first three steps (same weights, LoRA's B is zero) must be oomph's within rounding, else the row says so and the exit code
is 1. An arm that cannot run keeps its row, with the reason.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parent
IGNORE, LR, DECAY, CLIP, RANK, ALPHA = -100, 1e-4, 0.01, 1.0, 16, 32
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WARMUP = 3  # steps
# of the losses of the first steps, absolute. bf16 rounds differently in each arm's order of operations, 0.005 seen; the scales
# of the same NF4 codes are compressed differently, 0.012. A wrong RoPE makes 0.06, documents that see each other 0.07
TOLERANCE = {"full": 0.012, "lora": 0.012, "qlora": 0.025}
GAIN = 1.36  # of a random matrix: large enough that attention is far from uniform and the loss sees what is wrong with it


@dataclasses.dataclass
class Shape:
    layers: int
    D: int
    F: int
    heads: int
    kv_heads: int
    V: int
    B: int  # rows in a step
    T: int  # tokens in a row
    steps: int  # timed, in a turn
    chat: bool = False  # documents of uneven length, prompts not trained on
    preset: str = ""  # RoPE and the rest of config.json are this preset's


SHAPES = {
    "small": Shape(4, 512, 1536, 8, 8, 32000, 2, 512, 4),
    "large": Shape(12, 1024, 2816, 16, 16, 32000, 1, 1024, 2),
    "chat": Shape(4, 512, 1536, 8, 8, 32000, 2, 512, 4, chat=True),
    "8b": Shape(32, 4096, 14336, 32, 8, 128256, 1, 4096, 5, preset="llama-3.1-8b"),
    "8bx2": Shape(32, 4096, 14336, 32, 8, 128256, 2, 4096, 5, preset="llama-3.1-8b"),
    "nano": Shape(2, 64, 192, 4, 2, 32000, 2, 64, 2),  # only to see it run
    "nano-chat": Shape(2, 64, 192, 4, 2, 32000, 2, 512, 2, chat=True),
}


# ---------------------------------------------------------------- the worker's end: turns, memory, documents


class Stop(BaseException):
    """The driver has heard enough. No Exception: nothing on the way out should take it for an error of a step."""


class Turns:
    """Called around every step of a worker: answers the driver when a turn is over, waits for the next one."""

    def __init__(self, spec, steps, commands, answers):
        self.spec, self.steps, self.commands, self.answers = spec, steps, commands, answers
        self.step, self.timed_from, self.until, self.losses = 0, 0, WARMUP, []
        self.base = self.seen = 0.0
        self.started, self.how = time.perf_counter(), []

    def imported(self):
        """After the imports and before the model: memory and time count from here."""
        self.base, self.started = self.resident("VmRSS"), time.perf_counter()
        self.reset_peak()

    def before_step(self):
        if self.cuda():
            self.cuda().synchronize()
        now = time.perf_counter()
        if self.step == self.timed_from:
            self.mark = now
        if self.step == self.until:
            self.say(seconds=now - self.mark, build=self.mark - self.started, losses=self.losses, peak=self.peak(),
                     tokens=self.steps.count(self.timed_from, self.until), base=self.base, how="; ".join(self.how))
            command = json.loads(self.commands.readline() or "0")  # nothing: the driver is gone
            if not command:
                raise Stop
            self.reset_peak()
            self.timed_from, self.until, self.losses = self.step + 1, self.step + 1 + command, []
        self.step += 1

    def after_step(self, loss):
        self.losses.append(loss)

    def note_dtype(self, dtype):
        """Of what is trained."""
        what = "weights" if self.spec["method"] == "full" else "adapters"
        self.how.insert(0, f"{what} {str(dtype).removeprefix('torch.')}")

    def say(self, **answer):
        self.answers.write(json.dumps(answer) + "\n")
        self.answers.flush()

    def cuda(self):
        torch = sys.modules.get("torch")
        return torch.cuda if torch and self.spec["device"] == "cuda" else None

    def resident(self, key):
        """MiB of VmRSS or VmHWM; nothing on a GPU, where the host's memory is not the question."""
        if self.cuda():
            return 0.0
        status = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in status if line.startswith(key))) / 2**10

    def reset_peak(self):
        self.seen = 0.0
        if self.cuda():
            self.cuda().reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self):
        return max(self.seen, self.cuda().max_memory_allocated() / 2**20) if self.cuda() else self.resident("VmHWM")


class Steps:
    """What each step trains on: B rows of whole documents, the same in all arms.

    A document is stored with one token more that is neither read nor trained on: oomph counts positions, of which n tokens
    have n - 1, and so has n of them as every peer has.
    """

    def __init__(self, spec):
        with np.load(Path(spec["folder"], "documents.npz")) as arrays:
            self.tokens, self.supervised, self.starts = (arrays[key] for key in ("tokens", "supervised", "starts"))
        self.rows = json.loads(Path(spec["folder"], "rows.json").read_text())
        self.B, self.T = spec["shape"]["B"], spec["shape"]["T"]

    def of(self, step):
        """-> B rows, each a list of documents, each (token ids, labels); a label is of its own token, unshifted."""
        at = step * self.B % len(self.rows)
        return [[self.document(number) for number in row] for row in self.rows[at : at + self.B]]

    def document(self, number):
        span = slice(self.starts[number], self.starts[number + 1] - 1)
        labels = np.where(self.supervised[span], self.tokens[span], IGNORE).astype(np.int64)
        labels[0] = IGNORE  # nobody predicts it
        return self.tokens[span].astype(np.int64), labels

    def count(self, start, stop):
        """Tokens of the steps from start to stop."""
        return sum(len(tokens) for step in range(start, stop) for row in self.of(step) for tokens, _ in row)

    def packed(self, step):
        """-> tokens, labels, positions, numbers of the documents: [B, T] each, and the lengths of each row's documents.
        Padding is a document of its own, for masks that must not leave a row of attention empty."""
        grids = tokens, labels, positions, numbers = np.zeros((4, self.B, self.T), np.int64)
        labels[:], lengths = IGNORE, []
        for b, row in enumerate(self.of(step)):
            at = 0
            for number, (ids, target) in enumerate(row):
                span = slice(at, at + len(ids))
                tokens[b, span], labels[b, span], positions[b, span], numbers[b, span] = ids, target, range(len(ids)), number
                at = span.stop
            positions[b, at:], numbers[b, at:] = np.arange(self.T - at), len(row)
            lengths.append([len(ids) for ids, _ in row] + [self.T - at] * (at < self.T))
        return *grids, lengths

    def padded(self, step):
        """-> tokens, labels, mask [documents, the longest]: each document a row of its own."""
        documents = list(itertools.chain(*self.of(step)))
        tokens, labels, mask = np.zeros((3, len(documents), max(len(ids) for ids, _ in documents)), np.int64)
        labels[:] = IGNORE
        for i, (ids, target) in enumerate(documents):
            tokens[i, : len(ids)], labels[i, : len(ids)], mask[i, : len(ids)] = ids, target, 1
        return tokens, labels, mask


def on_device(spec, *arrays):
    import torch

    return [torch.from_numpy(array).to(spec["device"]) for array in arrays]


def shifted(labels):
    """Labels of the next token, for losses that do not shift them."""
    return np.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE)


def train_plainly(spec, turns, model, loss_of):
    """The loop that anyone would write around a model: loss_of(step) -> mean loss of the step."""
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    turns.note_dtype(trained[0].dtype)
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": DECAY},
              {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=LR, fused=True)
    model.train()
    for step in itertools.count():
        turns.before_step()
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        turns.after_step(loss.item())


# ---------------------------------------------------------------- the arms; each imports what it needs, then says imported()


def oomph(spec, turns, steps, compiled=False):
    sys.path.insert(0, str(TESTS.parent))
    import data
    import train
    from conftest import documents_of

    turns.imported()
    adapters = spec["method"] != "full"
    turns.how += ["documents packed, attention to one at a time"] * spec["shape"]["chat"]
    turns.note_dtype("float32" if adapters else "bfloat16")
    documents = documents_of(steps.tokens, steps.supervised, steps.starts)
    data.cached = lambda *_: Path()  # in place of reading --data; the loader packs and orders as ever
    data.open_documents = lambda *_: (documents, [])
    start_step, write, memory_gib = train.Log.start_step, train.Log.write, train.memory_gib

    def start_in_turn(log):
        turns.before_step()
        start_step(log)

    def write_and_note(log, step, loss, *rest):
        write(log, step, loss, *rest)
        turns.after_step(loss)

    def memory_seen(device):  # it resets the peak
        now = memory_gib(device)
        turns.seen = max(turns.seen, now[0] * 2**10)
        return now

    train.Log.start_step, train.Log.write, train.memory_gib = start_in_turn, write_and_note, memory_seen
    flags = f"--model {spec['model']} --out {spec['folder']}/{spec['arm']} --data stdlib:code --sample= --log_every 1"
    flags += f" --save_every 0 --batch_size {steps.B} --seq_len {steps.T} --steps 1000000 --warmup 0 --schedule constant"
    flags += f" --lr {LR} --weight_decay {DECAY} --clip {CLIP} --precision {'mixed' if adapters else 'bf16'}"
    flags += f" --{spec['method']} --lora_rank {RANK} --lora_alpha {ALPHA}" * adapters
    flags += " --no-activation_checkpointing" * (not spec["checkpointing"]) + " --compile" * compiled
    train.main(flags.split())


def load_transformers(spec, peft_model=True):
    """AutoModelForCausalLM from the folder, in NF4 and with PEFT's adapters where the method has them."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = None
    if spec["method"] == "qlora":
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                          bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.bfloat16, attn_implementation="sdpa",
                                                 device_map=spec["device"], quantization_config=quantization)
    if spec["method"] != "full" and peft_model:
        from peft import get_peft_model

        # PEFT's own default, float32 adapters in a bf16 model, is for loops under autocast: TRL's arm has it
        model = get_peft_model(model, lora_config(), autocast_adapter_dtype=False)
    return model


def lora_config():
    from peft import LoraConfig

    return LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, bias="none", target_modules=LINEARS, task_type="CAUSAL_LM")


def transformers(spec, turns, steps, compiled=False, padding=False):
    import torch
    from transformers.models.llama import modeling_llama  # noqa: F401

    if spec["method"] != "full":
        import peft  # noqa: F401
    if spec["method"] == "qlora":
        import bitsandbytes  # noqa: F401
    turns.imported()
    model = load_transformers(spec)
    if spec["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    chat = spec["shape"]["chat"]
    turns.how += ["torch.compile of the model"] * compiled
    turns.how += ["a row a document, padded" if padding else "documents packed, block mask"] * chat
    forward = torch.compile(model) if compiled else model

    def loss_of(step):
        if padding:
            tokens, labels, mask = on_device(spec, *steps.padded(step))
            return forward(input_ids=tokens, labels=labels, attention_mask=mask, use_cache=False).loss
        tokens, labels, positions = on_device(spec, *steps.packed(step)[:3])
        isolated = {"position_ids": positions} if chat else {}  # transformers sees where they restart, and masks
        return forward(input_ids=tokens, labels=labels, use_cache=False, **isolated).loss

    train_plainly(spec, turns, model, loss_of)


def trl(spec, turns, steps):
    from transformers.models.llama import modeling_llama  # noqa: F401
    from trl import SFTTrainer  # noqa: F401

    if spec["method"] == "qlora":
        import bitsandbytes  # noqa: F401

    turns.imported()
    turns.how += ["packing without padding, block mask"] * spec["shape"]["chat"]
    config = lora_config() if spec["method"] != "full" else None
    train_with_trl(spec, turns, steps, load_transformers(spec, peft_model=False), config, padding=False)


def unsloth(spec, turns, steps):
    import unsloth as package  # first: it changes trl
    import torch
    from trl import SFTTrainer  # noqa: F401

    turns.imported()
    turns.how += ["a row a document, padded"] * spec["shape"]["chat"]
    model, _ = package.FastLanguageModel.from_pretrained(
        spec["model"], max_seq_length=steps.T, dtype=torch.bfloat16, load_in_4bit=spec["method"] == "qlora",
        full_finetuning=spec["method"] == "full", local_files_only=True)
    checkpointing = "unsloth" if spec["checkpointing"] else False
    if spec["method"] != "full":
        model = package.FastLanguageModel.get_peft_model(
            model, r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, bias="none", target_modules=LINEARS,
            use_gradient_checkpointing=checkpointing, random_state=0)
    train_with_trl(spec, turns, steps, model, None, padding=spec["shape"]["chat"])


def train_with_trl(spec, turns, steps, model, peft_config, padding):
    """SFTTrainer with its defaults (loss, autocast to bf16) on rows that are tokens already."""
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class InTurn(TrainerCallback):
        def on_step_begin(self, *_, **__):
            turns.before_step()

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in logs:
                turns.after_step(logs["loss"])

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

    def pad_documents(examples):
        (step,) = examples
        tokens, labels, mask = map(torch.from_numpy, steps.padded(step["number"]))
        return {"input_ids": tokens, "labels": labels, "attention_mask": mask}

    chat, n_steps = spec["shape"]["chat"], len(steps.rows) // steps.B
    if padding:  # an example is a whole step
        columns = {"number": list(range(n_steps)), "input_ids": [[0]] * n_steps, "labels": [[0]] * n_steps}
    else:
        rows = [row for step in range(n_steps) for row in steps.of(step)]
        columns = {key: [np.concatenate([document[i] for document in row]) for row in rows]
                   for i, key in enumerate(("input_ids", "labels"))}
        if chat:
            columns["seq_lengths"] = [[len(ids) for ids, _ in row] for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    args = SFTConfig(
        output_dir=f"{spec['folder']}/{spec['arm']}", max_steps=1_000_000, save_strategy="no", report_to="none",
        per_device_train_batch_size=1 if padding else steps.B, learning_rate=LR, lr_scheduler_type="constant", warmup_steps=0,
        weight_decay=DECAY, max_grad_norm=CLIP, optim="adamw_torch_fused", logging_steps=1, disable_tqdm=True,
        max_length=None, padding_free=chat and not padding, dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=spec["checkpointing"], use_cpu=spec["device"] == "cpu", dataloader_pin_memory=False,
        remove_unused_columns=not padding)
    trainer = InOrder(model, args, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer, callbacks=[InTurn()],
                      peft_config=peft_config, data_collator=pad_documents if padding else None)
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    turns.note_dtype(trained[0].dtype)
    turns.how += ["autocast"] * bool(args.bf16)
    trainer.train()


def torchtune(spec, turns, steps, compiled=False):
    import torch
    from safetensors.torch import load_file
    from torchtune.models import convert_weights, llama2, llama3_1
    from torchtune.modules import TransformerSelfAttentionLayer
    from torchtune.modules.attention_utils import packed_block_causal_mask
    from torchtune.modules.loss import CEWithChunkedOutputLoss
    from torchtune.modules.peft import get_adapter_params, set_trainable_params
    from torchtune.training import compile_loss, compile_model, set_activation_checkpointing, set_default_dtype

    turns.imported()
    c, chat, adapters = spec["config"], spec["shape"]["chat"], spec["method"] != "full"
    sizes = {"vocab_size": c["vocab_size"], "num_layers": c["num_hidden_layers"], "num_heads": c["num_attention_heads"],
             "num_kv_heads": c["num_key_value_heads"], "embed_dim": c["hidden_size"], "max_seq_len": steps.T,
             "intermediate_dim": c["intermediate_size"], "norm_eps": c["rms_norm_eps"]}
    family = (llama3_1, "llama3_1") if spec["shape"]["preset"] else (llama2, "llama2")
    with set_default_dtype(torch.bfloat16), torch.device(spec["device"]):
        if adapters:
            model = getattr(family[0], f"lora_{family[1]}")(
                ["q_proj", "k_proj", "v_proj", "output_proj"], apply_lora_to_mlp=True, **sizes, lora_rank=RANK,
                lora_alpha=ALPHA, quantize_base=spec["method"] == "qlora")
            set_trainable_params(model, get_adapter_params(model))
        else:
            model = getattr(family[0], family[1])(**sizes)
    weights = {}
    for file in Path(spec["model"]).glob("*.safetensors"):
        weights |= load_file(file)
    weights = convert_weights.hf_to_tune(weights, c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"])
    missing, extra = model.load_state_dict(weights, strict=False)
    assert not extra and all("lora" in name for name in missing), (missing, extra)
    del weights
    loss_fn = CEWithChunkedOutputLoss()
    model.set_num_output_chunks(loss_fn.num_output_chunks)
    if compiled:
        compile_model(model, verbose=False)
        loss_fn = compile_loss(loss_fn, verbose=False)
    if spec["checkpointing"]:
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    turns.how += ["layers and loss compiled"] * compiled + ["documents packed, block mask"] * chat

    def loss_of(step):
        tokens, labels, positions, _, lengths = steps.packed(step)
        tokens, labels, positions = on_device(spec, tokens, shifted(labels), positions)
        isolated = {}
        if chat:
            lengths = [torch.tensor(row, device=spec["device"]) for row in lengths]
            isolated = {"mask": packed_block_causal_mask(seq_lens=lengths), "input_pos": positions}
        return loss_fn(model(tokens, **isolated), labels)

    train_plainly(spec, turns, model, loss_of)


def litgpt(spec, turns, steps):
    if spec["method"] == "qlora" and spec["device"] == "cpu":
        raise ValueError("its 4-bit training is lightning's, which asks for a GPU")
    import litgpt
    import torch
    from litgpt import lora
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from litgpt.utils import chunked_cross_entropy
    from safetensors.torch import load_file

    turns.imported()
    if spec["method"] == "qlora" or spec["shape"]["preset"]:
        raise ValueError("not written: its 4-bit training goes through lightning's Fabric, its 8B has another RoPE")
    c, chat, module, adapters = spec["config"], spec["shape"]["chat"], litgpt, {}
    if spec["method"] == "lora":
        module = lora
        adapters = {f"lora_{part}": True for part in ("query", "key", "value", "projection", "mlp")}
        adapters |= {"lora_r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0}
    config = module.Config(
        name="bench", block_size=steps.T, padded_vocab_size=c["vocab_size"], vocab_size=c["vocab_size"],
        n_layer=c["num_hidden_layers"], n_head=c["num_attention_heads"], n_query_groups=c["num_key_value_heads"],
        n_embd=c["hidden_size"], intermediate_size=c["intermediate_size"], norm_eps=c["rms_norm_eps"],
        rotary_percentage=1.0, rope_base=int(c["rope_theta"]), parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", **adapters)
    torch.set_default_dtype(torch.bfloat16)  # what its precision bf16-true does
    with torch.device(spec["device"]):
        model = module.GPT(config)
    weights = {}
    for file in Path(spec["model"]).glob("*.safetensors"):
        copy_weights_hf_llama(config, {}, weights, load_file(file))
    missing, extra = model.load_state_dict(weights, strict=False)
    assert not extra and all("lora_" in name for name in missing), (missing, extra)
    del weights
    if spec["method"] == "lora":
        lora.mark_only_lora_as_trainable(model)
    turns.how += ["a row a document, padded"] * chat

    def loss_of(step):
        tokens, labels = on_device(spec, *(steps.padded if chat else steps.packed)(step)[:2])
        logits = model(tokens, lm_head_chunk_size=128)  # as in its finetune/
        logits[-1] = logits[-1][..., :-1, :]
        if step < WARMUP:  # its loss is a bf16 number, a multiple of 1/16: these are to be compared
            logits = [chunk.float() for chunk in logits]
        return chunked_cross_entropy(logits, labels[..., 1:])

    train_plainly(spec, turns, model, loss_of)


@dataclasses.dataclass
class Arm:
    environment: str  # its folder under --peers; oomph's is the driver's own
    run: object
    shapes: tuple = ()  # with chat in their names; empty: all


ARMS = {
    "oomph": Arm("", oomph),
    "oomph+compile": Arm("", functools.partial(oomph, compiled=True)),
    "transformers": Arm("hf", transformers),
    "transformers+compile": Arm("hf", functools.partial(transformers, compiled=True)),
    "transformers+padding": Arm("hf", functools.partial(transformers, padding=True), ("chat", "nano-chat")),
    "trl": Arm("hf", trl),
    "torchtune": Arm("torchtune", torchtune),
    "torchtune+compile": Arm("torchtune", functools.partial(torchtune, compiled=True)),
    "litgpt": Arm("litgpt", litgpt),
    "unsloth": Arm("unsloth", unsloth),
}


def work(spec):
    """A worker process: runs an arm, talks over the pipes it was born with and sends what others print to the log."""
    commands, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    steps = Steps(spec)
    turns = Turns(spec, steps, commands, answers)
    try:
        ARMS[spec["arm"]].run(spec, turns, steps)
    except Stop:
        pass
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        text = "" if isinstance(error, SystemExit) else str(error).strip() or type(error).__name__
        turns.say(failed=text.splitlines()[0] if text else "")
    sys.stderr.flush()
    os._exit(0)


# ---------------------------------------------------------------- the driver's end: what the arms share


def make_config(shape):
    sys.path.insert(0, str(TESTS.parent))
    import model as lm

    return lm.preset_config(shape.preset or "llama-2-7b") | {
        "vocab_size": shape.V, "hidden_size": shape.D, "intermediate_size": shape.F, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.D // shape.heads,
        "max_position_embeddings": max(shape.T, 2048), "initializer_range": GAIN / shape.D**0.5}


def write_model(folder, config, device):
    """A Hugging Face folder with random weights, in bf16, and the built-in model's tokenizer."""
    import torch

    import model as lm

    with torch.device("meta"):
        model = lm.Transformer(lm.parse_config(config))
    source = lm.RandomWeights(model, 0, torch.device(device))
    layout = {name: (shape, torch.bfloat16) for name, (_, shape, _) in source.tensors.items()}
    tensors = ((name, source.rows(name, 0, shape[0]).cpu().bfloat16()) for name, (shape, _) in layout.items())
    lm.save_model(tensors, layout, folder, config, TESTS / "tiny", None, write=True)
    if device == "cuda":
        torch.cuda.empty_cache()  # the arms need it


def write_documents(folder, shape, n_rows):
    """Random tokens: one document a row, or uneven ones with a part at their start that is not trained on. The rows and
    their order are those of oomph's own loader. -> the loader and its rows' numbers."""
    import data
    from conftest import documents_of

    rng = np.random.default_rng(0)
    tokens, supervised, lengths, loader = [], [], [], None
    while loader is None or len(loader.rows) < n_rows:
        for _ in range(n_rows):
            n = int(np.clip(rng.lognormal(np.log(90), 0.8), 20, 400)) if shape.chat else shape.T
            tokens.append(rng.integers(0, shape.V, n + 1, dtype=np.int32))
            supervised.append(np.arange(n + 1) >= (rng.uniform(0.2, 0.7) * n if shape.chat else 0))
            supervised[-1][-1] = False  # the one token more, see Steps
            lengths.append(n + 1)
        arrays = np.concatenate(tokens), np.concatenate(supervised), np.cumsum([0, *lengths])
        loader = data.Loader(documents_of(*arrays), shape.T, True, shape.B, 0, 1, seed=0)
    order = [loader.row(i) for i in range(n_rows)]
    np.savez(folder / "documents.npz", **dict(zip(("tokens", "supervised", "starts"), arrays)))
    (folder / "rows.json").write_text(json.dumps([loader.rows[row].tolist() for row in order]))
    return loader, order


def flops_a_token(config, method, loader, order):
    """The model's FLOP for a token of these rows."""
    import model as lm
    import train

    c = lm.parse_config(config)
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    ends = 4 * c.hidden_size + 2 * (q + kv) + 3 * (c.hidden_size + c.intermediate_size)  # of the seven linear layers
    sums = loader.per_row[order].sum(0).tolist()
    return train.step_flops(c, *sums, None if method == "full" else RANK * ends * c.num_hidden_layers) / sums[1]


def measure_peak(device):
    """FLOP/s of a large bf16 product, the best in 2 seconds."""
    import torch

    n = 8192 if device == "cuda" else 2048
    a, b = torch.randn(2, n, n, device=device, dtype=torch.bfloat16)
    best, begin = 0.0, time.perf_counter()
    while (started := time.perf_counter()) < begin + 2:
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2 * n**3 / (time.perf_counter() - started))
    return best


# ---------------------------------------------------------------- the driver's end: processes, rounds, tables


class Failed(Exception):
    """Why an arm did not run."""


class Worker:
    def __init__(self, args, spec):
        environment = ARMS[spec["arm"]].environment
        python = Path(args.peers, environment, "bin", "python") if args.peers and environment else Path(sys.executable)
        if not python.exists():
            raise Failed(f"no environment {python.parent.parent}: see make_peers.sh")
        self.log = Path(spec["folder"], f"{spec['arm']}.log")
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
               "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # what train.py sets, for all
               "TORCHINDUCTOR_CACHE_DIR": f"{spec['folder']}/inductor-{spec['arm']}"}  # a compile is a compile in each run
        env.pop("OMP_NUM_THREADS", None)
        if spec["device"] == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [python, Path(__file__).resolve(), "--worker", json.dumps(spec)], env=env, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, cwd=spec["folder"], start_new_session=True)

    def hear(self, seconds):
        """The next answer; then the process stands still."""
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise Failed(f"no answer in {seconds} s")
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"failed": ""}
        if "failed" in answer:
            last = [text for text in self.log.read_text(errors="replace").splitlines() if text.strip()][-1:]
            raise Failed(answer["failed"] or " ".join(last)[-300:] or "it ended without a word")
        os.killpg(self.process.pid, signal.SIGSTOP)
        return answer

    def turn(self, n, seconds):
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(f"{n}\n".encode())
        self.process.stdin.flush()
        return self.hear(seconds)

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with what torch.compile started
        self.process.wait()


def free_mib():
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) / 2**10


def start(args, spec, results):
    """A worker that is READY, or None and the reason in its result."""
    result, worker = results.setdefault(spec["arm"], {"turns": [], "failed": None}), None
    print(f"{spec['arm']}, {spec['method']}, {spec['shape_name']} ...", file=sys.stderr, flush=True)
    try:
        largest = max((other["ready"]["peak"] for other in results.values() if "ready" in other), default=0)
        if spec["device"] == "cpu" and free_mib() < 1.2 * largest:
            raise Failed(f"not enough memory left beside the other arms ({free_mib():,.0f} MiB): see --arms")
        worker = Worker(args, spec)
        result["ready"] = worker.hear(args.timeout)
        return worker
    except Failed as failed:
        result["failed"] = str(failed)
        if worker:
            worker.end()


def play(args, workers, results, rounds, n_steps):
    """Rounds of turns, in an order that rotates."""
    for number in range(rounds):
        names = list(workers)
        at = number % max(len(names), 1)
        for name in names[at:] + names[:at]:
            try:
                results[name]["turns"].append(workers[name].turn(n_steps, args.timeout))
            except (Failed, OSError) as failed:
                results[name]["failed"] = f"in round {number + 1}: {failed}"
                workers.pop(name).end()


def compare(args, models, name, method, peak_flops):
    """One table: all arms of a shape and a method -> whether their first losses agree. models: folder of model folders."""
    shape, config = SHAPES[name], make_config(SHAPES[name])
    n_steps, resident = args.steps or SHAPES[name].steps, not shape.preset
    rounds = args.rounds if resident else 2 * args.rounds
    results, workers = {}, {}
    model = models / f"{shape.layers}-{shape.D}-{shape.V}"
    if not model.exists():
        model.mkdir()
        write_model(model, config, args.device)
    with tempfile.TemporaryDirectory() as folder:
        loader, order = write_documents(Path(folder), shape, shape.B * (WARMUP + rounds * (n_steps + 1)))
        spec = {"folder": folder, "model": str(model), "shape": dataclasses.asdict(shape), "shape_name": name,
                "method": method, "config": config, "device": args.device,
                "checkpointing": bool(shape.preset) and method != "lora"}
        arms = [arm for arm in args.arms or ARMS if not ARMS[arm].shapes or name in ARMS[arm].shapes]
        try:
            if resident:
                for arm in arms:
                    if worker := start(args, spec | {"arm": arm}, results):
                        workers[arm] = worker
                play(args, workers, results, args.rounds, n_steps)
            for arm in arms * (2 * (not resident)):
                if not results.get(arm, {}).get("failed") and (worker := start(args, spec | {"arm": arm}, results)):
                    workers[arm] = worker
                    play(args, {arm: worker}, results, args.rounds, n_steps)
                    workers.pop(arm).end()
        finally:
            for worker in workers.values():
                worker.end()
        if args.logs:
            for log in Path(folder).glob("*.log"):
                print(f"==== {log.name}\n{log.read_text(errors='replace')}", file=sys.stderr)
    return show(args, name, method, results, n_steps, peak_flops / flops_a_token(config, method, loader, order))


def show(args, name, method, results, n_steps, most):
    """most: tok/s that the measured matrix product would allow."""
    shape = SHAPES[name]
    speeds = {arm: [turn["tokens"] / turn["seconds"] for turn in result["turns"]] for arm, result in results.items()}
    ran = {arm: statistics.median(values) for arm, values in speeds.items() if values and not results[arm]["failed"]}
    fastest = max((arm for arm in ran if ARMS[arm].environment), key=ran.get, default=None)
    first_losses = {arm: results[arm]["ready"]["losses"] for arm in ran}
    wanted = next((first_losses[arm] for arm in [*(arm for arm in ran if not ARMS[arm].environment), *ran]), None)
    agreed, rows = True, []
    for arm, result in results.items():
        if arm not in ran:
            rows.append((arm, f"did not run: {result['failed']}", *[""] * 9))
            continue
        ready, turns = result["ready"], result["turns"]
        last, unlike = turns[-1]["losses"][-1], max(abs(a - b) for a, b in zip(first_losses[arm], wanted))
        agreed &= unlike <= TOLERANCE[method]
        ratio = statistics.median(a / b for a, b in zip(speeds[arm], speeds[fastest])) if fastest else None
        stepping = max(turn["peak"] for turn in turns)
        rows.append((
            arm, f"{ran[arm]:,.0f} ({min(speeds[arm]):,.0f}-{max(speeds[arm]):,.0f})", f"{ratio:.2f}" if ratio else "",
            f"{ran[arm] / most:.0%}", f"{max(ready['peak'], stepping):,.0f}",
            f"{max(ready['peak'], stepping) - ready['base']:,.0f}", f"{stepping - ready['base']:,.0f}",
            f"{ready['build']:.1f} + {ready['seconds']:.1f}",
            f"{first_losses[arm][0]:.4f}", f"{unlike:.4f}" + " **differs**" * (unlike > TOLERANCE[method]), f"{last:.4f}",
            ready["how"]))
    sizes = (f"{shape.layers} layers, D={shape.D}, F={shape.F}, {shape.heads} heads, V={shape.V:,}, {shape.B} x {shape.T} "
             "tokens a step" + ", documents of 20 to 400 tokens" * shape.chat)
    columns = ("arm", "tok/s (range)", f"ratio to {fastest or 'a peer'}", "of peak", "peak MiB", "above imports", "stepping",
               f"build + {WARMUP} first steps, s", "first loss", f"first {WARMUP}: largest difference", "last loss", "how")
    rounds = args.rounds * (1 + bool(shape.preset))
    print(f"\n{method}, {name}: {sizes}; {args.device}, median of {rounds} rounds of {n_steps} steps\n")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |")
    sys.stdout.flush()
    if args.raw:
        with open(args.raw, "a") as file:
            file.write(json.dumps({"shape": name, "method": method, "steps": n_steps, "results": results}) + "\n")
    return agreed


# ---------------------------------------------------------------- command line


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--peers", metavar="FOLDER", help="of make_peers.sh (default: all arms in this environment)")
    parser.add_argument("--methods", nargs="+", choices=TOLERANCE, default=list(TOLERANCE), help="(default: all three)")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["small"], help="(default: small)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="NAME", help=f"of {', '.join(ARMS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: 7)")
    parser.add_argument("--steps", type=int, help="timed in a turn (default: 4 small and chat, 2 large, 5 8b)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda if there is one)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for an answer, compiling included (default: 900)")
    parser.add_argument("--raw", metavar="FILE", help="append every turn as JSON")
    parser.add_argument("--logs", action="store_true", help="print what the arms printed")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker)
    import torch

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    peak_flops = measure_peak(args.device)
    print(f"bf16 matrix product {peak_flops / 1e12:,.2f} TFLOP/s, torch {torch.__version__}, {torch.get_num_threads()} threads")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the stopped processes would stay
    with tempfile.TemporaryDirectory() as models:
        agreed = [compare(args, Path(models), *case, peak_flops) for case in itertools.product(args.shape, args.methods)]
    if not all(agreed):
        raise SystemExit("first losses differ: see the tables")


if __name__ == "__main__":
    main()
