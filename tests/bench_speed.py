"""How fast oomph trains beside its peers, and beside other checkouts of itself: the same weights and tokens, in turns.

    tests/make_peers.sh FOLDER                                        # the peers' environments, once
    python tests/bench_speed.py --peers FOLDER                        # full, LoRA and QLoRA on a small model
    python tests/bench_speed.py --peers FOLDER --shape large chat --methods lora --rounds 5 --arms oomph transformers
    python tests/bench_speed.py --peers FOLDER --shape qwen3.5 --fp32 --threads 1 --arms oomph transformers
    python tests/bench_speed.py --oomph ../old --arms old oomph old+compile oomph+compile    # two checkouts, no peer

Every arm trains once in each round, in a fresh process, in an order that rotates: 3 steps to warm up (there
torch.compile compiles; later rounds find its cache), then the timed ones. tok/s leave out padding. A ratio is taken
within each round, then the median: to the fastest peer, or without peers to the same arm of the first other checkout.
CPU seconds are user and system time of all threads in a step. Memory is the peak above the imports, loading and
compiling included: VmHWM on a CPU, torch.cuda.max_memory_allocated on a GPU. The first losses of every arm must be
oomph's within rounding, else its row says so and the exit code is 1.

All arms have bf16 weights (float32 with --fp32, for a CPU without bf16 instructions), torch's fused AdamW at a
constant 1e-4, weight decay 0.01 on matrices, gradients clipped to a norm of 1, LoRA of rank 16 and alpha 32 on all
linear layers, SDPA attention, no activation checkpointing, and read the loss at each step. Adapters are float32 in
oomph and in Unsloth, there under autocast, and bf16 in the others.
"""

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import bench_harness as harness
import numpy as np

IGNORE = -100  # a label that is not trained on
LR = 1e-4
DECAY = 0.01
CLIP = 1.0
RANK = 16
ALPHA = 32
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
           "in_proj_qkv", "in_proj_z", "out_proj"]  # the last three are Gated DeltaNet's
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]  # stacks of matrices in transformers 5
WARMUP = 3  # steps; their losses are compared
# Of losses, absolute. Each arm rounds to bf16 in another order (0.005 seen) and compresses the scales of the same NF4
# codes in another way (0.012 seen). A wrong RoPE makes 0.06, documents that see each other 0.07.
TOLERANCE = {"full": 0.012, "lora": 0.012, "qlora": 0.025}
GAIN = 1.36  # of a random matrix: attention is then far from uniform, and the loss shows what is wrong with it


class Shape(NamedTuple):
    layers: int
    D: int
    F: int
    heads: int
    B: int  # rows of a step
    T: int  # tokens of a row
    steps: int  # that a round times
    chat: bool = False  # whether documents have 20 to 400 tokens, with prompts
    V: int = 32000
    kv_heads: int | None = None  # None: as many as heads
    preset: str = "llama-2-7b"  # of data.py, for what is not said here
    K: int | None = None  # size of a head; None: D / heads
    key_heads: int = 4  # of Gated DeltaNet, which has twice as many value heads


SHAPES = {
    "small": Shape(4, 512, 1536, 8, 2, 512, 8),
    "large": Shape(12, 1024, 2816, 16, 1, 1024, 4),
    "chat": Shape(4, 512, 1536, 8, 2, 512, 8, chat=True),
    "chats": Shape(4, 512, 1536, 8, 2, 512, 100, chat=True),  # to see whether memory grows
    "nano": Shape(2, 64, 192, 4, 2, 512, 2, chat=True),  # only to see it run
    "launches": Shape(4, 64, 192, 4, 1, 64, 300, V=512),  # as many blocks as small's, and hardly any arithmetic
    # three blocks of Gated DeltaNet and one of attention; the head's part of the work is that of Qwen3.5-9B
    "qwen3.5": Shape(4, 512, 1536, 4, 1, 2048, 2, V=4096, kv_heads=2, preset="qwen3.5-9b"),
    "qwen3.5-8k": Shape(4, 512, 1536, 4, 1, 8192, 1, V=4096, kv_heads=2, preset="qwen3.5-9b"),
    "4k": Shape(2, 512, 1536, 8, 1, 4096, 3, V=4096, kv_heads=2),
    "long": Shape(4, 512, 1536, 8, 1, 16384, 1, V=4096, kv_heads=2),
    "gpu-long": Shape(4, 4096, 14336, 32, 1, 65536, 5, kv_heads=8),
    "gpu": Shape(4, 4096, 14336, 32, 1, 8192, 20, kv_heads=8),  # an eighth of the blocks of Llama-3.1-8B
    # four blocks in the widths of Qwen3.5-9B, Qwen3-30B-A3B and Qwen3-8B, and as large a part of the vocabulary
    "gpu-qwen3.5": Shape(4, 4096, 12288, 16, 1, 8192, 20, kv_heads=4, preset="qwen3.5-9b", key_heads=16),
    "gpu-moe": Shape(4, 2048, 6144, 32, 1, 4096, 20, V=12800, kv_heads=4, preset="qwen3-30b-a3b", K=128),
    "gpu-short": Shape(4, 4096, 12288, 32, 2, 2048, 20, V=16896, kv_heads=8, preset="qwen3-8b"),
}


class Clock:
    """Called before each step and after the last one."""

    def __init__(self, device):
        self.cuda = sys.modules["torch"].cuda if device == "cuda" else None  # the arm has imported torch
        self.wall_s = []
        self.cpu_s = []
        self.base_mib = harness.resident("VmRSS")
        self.built_from = time.perf_counter()
        harness.reset_peak()

    def tick(self):
        if self.cuda:
            self.cuda.synchronize()
        self.wall_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())

    def result(self, losses):
        n_timed = len(self.wall_s) - 1 - WARMUP
        if self.cuda:
            mib = self.cuda.max_memory_allocated() / harness.MIB
        else:
            mib = harness.resident("VmHWM") - self.base_mib
        return {
            "seconds": self.wall_s[-1] - self.wall_s[WARMUP],
            "cpu_s": (self.cpu_s[-1] - self.cpu_s[WARMUP]) / n_timed,
            "mib": mib,
            "build_s": self.wall_s[0] - self.built_from,
            "warm_up_s": self.wall_s[WARMUP] - self.wall_s[0],
            "losses": losses[:WARMUP],
        }


# ---------------------------------------------------------------- what an arm's process does


def train_plainly(spec, clock, model, loss_of):
    """The loop that anyone would write around a model. loss_of(tokens, labels, positions) -> mean loss of the step."""
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() > 1]
    vectors = [p for p in trained if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}]
    if vectors:  # LoRA has none, and torch refuses an empty group
        groups.append({"params": vectors, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    losses = []
    with np.load(Path(spec["folder"], "steps.npz")) as arrays:
        steps = [torch.from_numpy(arrays[key]).to(spec["device"]) for key in ("tokens", "labels", "positions")]
    model.train()
    for tokens, labels, positions in zip(*steps):
        clock.tick()
        loss = loss_of(tokens, labels, positions)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    clock.tick()
    return losses


def oomph(spec, clock):
    """train.py of a checkout. Its own loader packs and orders these documents, which replace those of --data."""
    import data
    import torch
    import train
    from conftest import documents_of

    with np.load(Path(spec["folder"], "documents.npz")) as arrays:
        documents = documents_of(arrays["tokens"], arrays["supervised"], arrays["starts"])
    data.open_documents = lambda *_, **__: documents if hasattr(documents, "files") else (documents, [])  # older ones
    torch.cuda.reset_peak_memory_stats = lambda *_: None  # train.py's log would forget the peak
    is_full = spec["method"] == "full"
    precision = "bf16" if is_full else "mixed"
    out = Path(spec["folder"], "out")
    argv = [
        "--model", spec["model"], "--out", out, "--data", f"{spec['folder']}/any.txt",
        "--batch_size", spec["B"], "--seq_len", spec["T"], "--no-activation_checkpointing",
        "--warmup", 0, "--schedule", "constant", "--lr", LR, "--weight_decay", DECAY, "--clip", CLIP,
        "--precision", "fp32" if spec["fp32"] else precision,
    ]
    if not is_full:
        argv += [f"--{spec['method']}", "--lora_rank", RANK, "--lora_alpha", ALPHA]
    if spec["compile"]:
        argv.append("--compile")
    elif hasattr(train, "compiles_by_default"):  # older ones compile only if they are told to
        argv.append("--no-compile")
    argv += spec["flags"]
    shutil.rmtree(out, ignore_errors=True)
    harness.run_steps([str(word) for word in argv], WARMUP + spec["steps"], clock.tick)
    return [row["loss"] for row in harness.metrics(out)]


def transformers(spec, clock):
    import peft
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    family = json.loads(Path(spec["model"], "config.json").read_text())["model_type"].removesuffix("_text")
    if spec["name"] == "liger":
        getattr(importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{family}")()
    dtype = torch.float32 if spec["fp32"] else torch.bfloat16
    quantization = None
    if spec["method"] == "qlora":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(
        spec["model"], dtype=dtype, attn_implementation="sdpa", device_map=spec["device"],
        quantization_config=quantization)
    if spec["method"] != "full":
        adapters = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=LINEARS, target_parameters=EXPERTS if "moe" in family else None,
            task_type="CAUSAL_LM")
        # PEFT's default, float32 adapters in a bf16 model, is for loops under autocast
        model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    forward = torch.compile(model) if spec["compile"] else model

    def loss_of(tokens, labels, positions):
        isolated = {"position_ids": positions} if spec["chat"] else {}  # transformers masks where they restart
        return forward(input_ids=tokens, labels=labels, use_cache=False, **isolated).loss

    return train_plainly(spec, clock, model, loss_of)


def unsloth(spec, clock):
    if spec["chat"]:
        raise ValueError("packed documents are not written for it")
    import torch
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        spec["model"], max_seq_length=spec["T"], dtype=torch.bfloat16, load_in_4bit=spec["method"] == "qlora",
        full_finetuning=spec["method"] == "full", local_files_only=True)
    if spec["method"] != "full":
        model = FastLanguageModel.get_peft_model(
            model, r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, bias="none", target_modules=LINEARS,
            use_gradient_checkpointing=False)

    def loss_of(tokens, labels, positions):
        with torch.autocast(spec["device"], torch.bfloat16):  # its trainer's
            return model(input_ids=tokens, labels=labels).loss

    return train_plainly(spec, clock, model, loss_of)


class Peer(NamedTuple):
    folder: str  # its environment, under --peers
    run: object  # run(spec, clock) -> losses
    modules: str  # imports that neither its time nor its memory counts


OWN_MODULES = "train conftest torch._dynamo"  # of a checkout
MODULES = ("transformers.models.llama.modeling_llama transformers.models.qwen3.modeling_qwen3 "
           "transformers.models.qwen3_moe.modeling_qwen3_moe transformers.models.qwen3_5.modeling_qwen3_5 "
           "peft bitsandbytes torch._dynamo")
PEERS = {
    "transformers": Peer("hf", transformers, MODULES),
    "unsloth": Peer("unsloth", unsloth, "unsloth"),
    "liger": Peer("hf", transformers, MODULES),  # a GPU's kernels
}
PEER_ARMS = ["transformers", "transformers+compile", "unsloth", "liger"]


def work(spec):
    """An arm's process."""
    peer = PEERS.get(spec["name"])
    if peer is None:
        sys.path[:0] = [spec["checkout"], f"{spec['checkout']}/tests"]
        peer = Peer("", oomph, OWN_MODULES)
    for name in peer.modules.split():
        importlib.import_module(name)
    clock = Clock(spec["device"])
    losses = peer.run(spec, clock)
    Path(spec["folder"], "result").write_text(json.dumps(clock.result(losses)))


# ---------------------------------------------------------------- what all arms are given


def make_config(shape):
    import data

    return data.PRESETS[shape.preset] | {
        "vocab_size": shape.V, "hidden_size": shape.D, "intermediate_size": shape.F, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads or shape.heads,
        "head_dim": shape.K or shape.D // shape.heads, "max_position_embeddings": shape.T,
        "initializer_range": GAIN / shape.D**0.5, "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": 2 * shape.key_heads}


def random_documents(rng, shape, n):
    """Yields n documents (tokens, which of them are trained on) of a whole row, or of 20 to 400 tokens with a prompt.
    Each has one token more than is trained on: of n tokens oomph counts n - 1 positions."""
    for _ in range(n):
        length = shape.T
        prompt = 0
        if shape.chat:
            length = int(np.clip(rng.lognormal(np.log(90), 0.8), 20, 400))
            prompt = rng.uniform(0.2, 0.7) * length
        places = np.arange(length + 1)
        yield rng.integers(0, shape.V, length + 1, dtype=np.int32), (places >= prompt) & (places < length)


def write_documents(folder, shape, n_steps):
    """As many random documents as the steps need -> oomph's loader of them."""
    import data
    from conftest import documents_of

    rng = np.random.default_rng(0)
    tokens = []
    supervised = []
    loader = None
    while loader is None or len(loader.rows) < n_steps * shape.B:
        for document, trained_on in random_documents(rng, shape, n_steps * shape.B):
            tokens.append(document)
            supervised.append(trained_on)
        starts = np.cumsum([0, *map(len, tokens)])
        arrays = {"tokens": np.concatenate(tokens), "supervised": np.concatenate(supervised), "starts": starts}
        loader = data.Loader(documents_of(**arrays), shape.T, True, shape.B, seed=0, rank=0, world=1)
    np.savez(folder / "documents.npz", **arrays)
    (folder / "any.txt").write_text("train.py reads this, and trains on the documents")
    return loader


def write_steps(folder, shape, n_steps):
    """Documents for the checkouts, and for peers the same tokens in the rows and the order of oomph's loader -> of the
    timed steps, the tokens, and how many a token's document has on average."""
    loader = write_documents(folder, shape, n_steps)
    grids = {name: np.zeros((n_steps, shape.B, shape.T), np.int64) for name in ("tokens", "labels", "positions")}
    n_tokens = 0
    squares = 0
    for step in range(n_steps):
        (batch,), counts = loader.step(step, 1)
        if step >= WARMUP:
            n_tokens += counts.tokens
            squares += counts.squares
        for b, (tokens_T, targets_T, positions_T) in enumerate(zip(batch.tokens, batch.targets, batch.positions)):
            end = int(positions_T.nonzero().max()) + 1  # padding follows, at position 0: a document of its own
            positions_T[end:] = positions_T.new_tensor(range(shape.T - end))
            labels_T = targets_T.roll(1)  # peers shift them back by one
            labels_T[0] = IGNORE
            grids["tokens"][step, b] = tokens_T
            grids["labels"][step, b] = labels_T
            grids["positions"][step, b] = positions_T
    np.savez(folder / "steps.npz", **grids)
    return n_tokens, squares / n_tokens


# ---------------------------------------------------------------- rounds and tables


def run_arm(args, spec, arm):
    """A fresh process of the arm -> its result. RuntimeError says why it failed."""
    name = arm.removesuffix("+compile")
    python = Path(sys.executable)
    if name in PEERS:
        python = Path(args.peers, PEERS[name].folder, "bin", "python").absolute()
    if not python.exists():
        raise RuntimeError(f"no environment {python.parent.parent}: see make_peers.sh")
    print(f"{arm}, {spec['method']} ...", file=sys.stderr, flush=True)
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "XDG_CACHE_HOME": spec["folder"],
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # what train.py sets, for all
        "TORCHINDUCTOR_CACHE_DIR": f"{spec['folder']}/inductor-{arm}",
    }
    env.pop("OMP_NUM_THREADS", None)
    if args.threads:
        env["OMP_NUM_THREADS"] = str(args.threads)
    spec = spec | {"name": name, "compile": arm != name, "checkout": str(args.checkouts.get(name))}
    command = [python, Path(__file__).resolve(), "--worker", json.dumps(spec)]
    done = subprocess.run(command, env=env, cwd=spec["folder"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode} {done.stderr.strip()}".splitlines()[-1][-300:])
    return json.loads(Path(spec["folder"], "result").read_text())


def compare(args, model, name, method):
    """One table: all arms of a shape and a method -> whether their first losses agree."""
    shape = SHAPES[name]
    results = {arm: [] for arm in args.arms}
    failed = {}
    with tempfile.TemporaryDirectory() as folder:
        n_tokens, length = write_steps(Path(folder), shape, WARMUP + shape.steps)
        spec = {
            "folder": folder, "model": str(model), "method": method, "flags": args.flags.split(),
            "device": args.device, "fp32": args.fp32,
            "B": shape.B, "T": shape.T, "steps": shape.steps, "chat": shape.chat,
        }
        for number in range(args.rounds):
            arms = [arm for arm in args.arms if arm not in failed]
            first = number % max(len(arms), 1)
            for arm in arms[first:] + arms[:first]:
                try:
                    result = run_arm(args, spec, arm)
                except RuntimeError as error:
                    failed[arm] = error
                else:
                    results[arm].append(result | {"speed": n_tokens / result["seconds"]})
    timed = {arm: rounds for arm, rounds in results.items() if arm not in failed}
    return show(args, name, method, timed, failed, length)


def median_of(rounds, key):
    return statistics.median(result[key] for result in rounds)


class Reference(NamedTuple):
    """What all arms are compared with."""

    fastest_peer: str | None
    checkout: str  # where no peer ran: the same arm of this one
    losses: list | None  # the first ones of a checkout

    def median_ratio(self, timed, arm, key):
        """Of the rounds, each against the same round of the reference."""
        other = self.fastest_peer or arm.replace(arm.removesuffix("+compile"), self.checkout)
        if other not in timed:
            return ""
        ratios = [result[key] / against[key] for result, against in zip(timed[arm], timed[other])]
        return f"{statistics.median(ratios):.3f}"


def reference_of(timed, checkouts):
    peers = [arm for arm in timed if arm in PEER_ARMS]
    own = [arm for arm in timed if arm not in PEER_ARMS]
    others = [checkout for checkout in checkouts if checkout != "oomph"]
    return Reference(
        fastest_peer=max(peers, key=lambda arm: median_of(timed[arm], "speed"), default=None),
        checkout=others[0] if others else "oomph",
        losses=timed[own[0]][0]["losses"] if own else None)


def show(args, name, method, timed, failed, length):
    """Prints the table -> whether first losses agree. timed: {arm: its result of each round}. length: see
    write_steps()."""
    shape = SHAPES[name]
    reference = reference_of(timed, args.checkouts)
    agreed = True
    rows = []
    for arm in args.arms:
        if arm in failed:
            rows.append((arm, f"did not run: {failed[arm]}", *[""] * 6))
            continue
        rounds = timed[arm]
        start = rounds[0]
        expected = reference.losses or start["losses"]
        difference = max(abs(loss - other) for loss, other in zip(start["losses"], expected))
        agrees = difference <= TOLERANCE[method]
        agreed &= agrees
        rows.append((
            arm,
            harness.spread([result["speed"] for result in rounds], 0),
            reference.median_ratio(timed, arm, "speed"),
            f"{median_of(rounds, 'cpu_s'):.3f}",
            reference.median_ratio(timed, arm, "cpu_s"),
            f"{max(result['mib'] for result in rounds):,.0f}",
            f"{start['build_s']:.1f} + {start['warm_up_s']:.1f}",
            f"{difference:.4f}" if agrees else f"{difference:.4f} **differs**",
        ))
    documents = f", documents of 20 to 400, {length:,.0f} in a token's" if shape.chat else ", a document a row"
    against = reference.fastest_peer or reference.checkout
    harness.table(
        f"{method}, {name}: {shape.layers} layers, D={shape.D}, F={shape.F}, {shape.heads} heads, V={shape.V:,}, "
        f"{shape.B} x {shape.T} tokens a step{documents}; {args.device}, {args.rounds} rounds of {shape.steps} steps",
        ("arm", "tok/s (range)", f"ratio to {against}", "CPU s a step", "its ratio", "MiB above imports",
         f"build + {WARMUP} first steps, s", "first losses: largest difference"), rows)
    return agreed


def launch_us(device):
    """Microseconds in which the host launches a small operator under autograd, or its backward: a mean of both. So few
    fit into a GPU's queue that the host waits for none."""
    import torch

    for _ in range(2):  # the second round counts
        x = torch.ones(1, device=device, requires_grad=True)
        y = x
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            y = y * 2
        y.backward()
        seconds = time.perf_counter() - start
    return 1e6 * seconds / 400


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--peers", metavar="FOLDER", default="peers", help="of make_peers.sh (default: peers)")
    parser.add_argument("--oomph", nargs="+", type=Path, default=[], metavar="FOLDER",
                        help="other checkouts; each adds the arms NAME and NAME+compile, NAME being the folder's")
    parser.add_argument("--methods", nargs="+", choices=TOLERANCE, default=list(TOLERANCE), help="(default: all three)")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["small"], help="(default: small)")
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="(default: every checkout and every peer)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: 7)")
    parser.add_argument("--flags", default="", help="more flags of train.py for the checkouts, as one string")
    parser.add_argument("--fp32", action="store_true", help="float32 in place of bf16")
    parser.add_argument("--threads", type=int, help="of each arm (default: torch's)")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker)
    args.checkouts = {"oomph": harness.ROOT} | {folder.resolve().name: folder.resolve() for folder in args.oomph}
    own = [name + suffix for name in args.checkouts for suffix in ("", "+compile")]
    import torch

    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    known = [*own, *PEER_ARMS]
    if not args.arms:
        args.arms = [arm for arm in known if args.device == "cuda" or arm != "liger"]
    unknown = [arm for arm in args.arms if arm not in known]
    if unknown:
        parser.error(f"--arms {', '.join(unknown)}: expected some of {', '.join(known)}")
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"torch {torch.__version__}, Python {python}, {torch.get_num_threads()} threads; "
          f"the host launches an operator in {launch_us(args.device):.1f} us")
    agreed = True
    with tempfile.TemporaryDirectory() as models:
        for name in args.shape:
            harness.write_model(Path(models, name), make_config(SHAPES[name]))
            for method in args.methods:
                agreed &= compare(args, Path(models, name), name, method)
    if not agreed:
        raise SystemExit("first losses differ: see the tables")


if __name__ == "__main__":
    main()
