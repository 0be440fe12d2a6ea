"""Shows that what oomph writes is what transformers and PEFT read, and that its NF4 is bitsandbytes'.

    python tests/check_peers.py                         # a few minutes on two cores, no GPU, no network

Run by hand, never by pytest: it needs transformers, peft and bitsandbytes, which the project itself does not. Seen with
transformers 5.24, peft 0.21.2, bitsandbytes 0.50.2. One line per check with its figure; exit status 1 where one fails.

    python tests/check_peers.py tiny qwen3.5            # these models alone
    python tests/check_peers.py --model FOLDER          # a trained model alone, such as that of make_smollm2.py

train.py runs a few steps on the built-in model and on random ones that transformers wrote (llama3.1 in several files,
qwen2 tied, qwen3 in float32, granite; qwen3.5, qwen3-vl, mistral3 and muse-glimmer with a vision tower), in full, with
--lora and with --qlora, at a learning rate so high that the result is another model. Every folder is then read by both
sides in float32 and must give the same logits. Merged models differ from base + adapter by the rounding of each weight
to bf16 and nothing else: they are held against PEFT's own merge, rounded the same way.

A trained model (--model) is trained by both sides, on the same rows in the same order, in full, with --lora and with
--qlora, in float32 and in bf16: one table of losses. QLoRA is compared with PEFT on a base whose weights are what
oomph's NF4 gives back, because bitsandbytes rounds its scales in another way; its own curve stands below as
information. Greedy answers, and the logits of what the runs in float32 have written, are compared, too. Shown with
SmolLM2-135M-Instruct.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import bitsandbytes
import peft
import tokenizers
import torch
import transformers
from bitsandbytes import functional as bnb
from safetensors.torch import save_file
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
import make_tiny
import model as lm
import nf4
import train as trainer

ROOT = Path(__file__).parent.parent
TINY = ROOT / "tests" / "tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SAME = 1e-4  # logits of both sides, same files, float32: sums in another order differ by a few 1e-6 of their spread
TIMES_THE_CONTROL = 3  # times a largest difference that is one sample of the same rounding
OTHER = 0.1  # logits of two models that are not the same
MOE = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, norm_topk_prob=True)
TEXT = "def naïve(x):\n    return [x]  # ☃ <|im_end|>\n"
failed = []


def check(what, passed, figure):
    print(f"{'ok    ' if passed else 'FAILED'} {what}: {figure}", flush=True)
    if not passed:
        failed.append(what)


def same(what, a, b, control=None):
    """control: b once more, by sums in another order, where these may differ by more than SAME: of a model that was
    trained until its logits are large."""
    difference = (a - b).abs().max().item()
    spread = b.std().item()  # of a trained model 8, of random ones about 1
    limit = SAME * max(1.0, spread)
    figure = f"max abs difference {difference:.1e}"
    if control is not None:
        of_control = (control - b).abs().max().item()
        limit = max(limit, TIMES_THE_CONTROL * of_control)
        figure += f", transformers' sdpa from its eager attention {of_control:.1e}"
    check(what, difference <= limit, figure)


def differs(what, a, b):
    difference = (a - b).abs().max().item()
    check(what, difference >= OTHER, f"max abs difference {difference:.2f}, as it should")


# ---------------------------------------------------------------- what is trained


def write_chats(path):
    rng = random.Random(0)
    words = "list map set walk the of file path join a name where how why open close".split()
    with open(path, "w") as file:
        for _ in range(40):
            turns = []
            for role in ("user", "assistant") * rng.randint(1, 2):
                content = " ".join(rng.choices(words, k=rng.randint(3, 20)))
                turns.append({"role": role, "content": content})
            file.write(json.dumps({"messages": turns}) + "\n")


def class_of(config):
    """Of a model with a vision tower, the class that has it: its names of tensors are those of the Hub's files."""
    with_a_tower = {
        "qwen3_5": transformers.Qwen3_5ForConditionalGeneration,
        "qwen3_5_moe": transformers.Qwen3_5MoeForConditionalGeneration,
        "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
        "mistral3": transformers.Mistral3ForConditionalGeneration,
        "muse_glimmer": transformers.MuseGlimmerForConditionalGeneration,
    }
    return with_a_tower.get(config.model_type, transformers.AutoModelForCausalLM)


def random_model(config, seed):
    torch.manual_seed(seed)
    kind = class_of(config)
    from_config = kind.from_config if hasattr(kind, "from_config") else kind._from_config  # Auto classes have the first
    model = from_config(config)
    # random norms and biases too: ones and zeros would hide a mistake
    for name, p in model.named_parameters():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        std = 0.2 if p.dim() < 2 else 0.08
        torch.nn.init.normal_(p, mean, std)
    return model


LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=32)  # so short that 96 positions reach every branch of the formula


class RandomModel(NamedTuple):
    config: object
    dtype: torch.dtype = torch.bfloat16  # of its file
    file_size: str = "5GB"  # a small one makes several files


def random_models():
    """{name: RandomModel}."""
    t = transformers
    shape = dict(vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=256)
    theta = dict(rope_type="default", rope_theta=1e6)
    plain = shape | dict(rope_parameters=theta)
    wide = plain | dict(head_dim=32)  # heads of twice the width that hidden_size gives
    qwen35 = wide | dict(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
        full_attention_interval=2,
        rope_parameters=theta | dict(partial_rotary_factor=0.25, mrope_section=[1, 1, 2]))
    qwen35_moe = qwen35 | MOE | dict(shared_expert_intermediate_size=64)
    qwen35_tower = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64)
    muse = wide | dict(num_hidden_layers=4, sliding_window=32)
    muse_tower = dict(num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2)
    smollm3 = plain | dict(num_hidden_layers=4, tie_word_embeddings=True, pad_token_id=None)
    granite = plain | dict(attention_multiplier=0.3, embedding_multiplier=6.0, residual_multiplier=0.4,
                           logits_scaling=3.0)
    yarn = dict(rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16, beta_fast=32.0,
                beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
    ministral3 = wide | dict(model_type="ministral3", rope_parameters=yarn, pad_token_id=None)
    pixtral = dict(model_type="pixtral", num_hidden_layers=1, hidden_size=32, intermediate_size=32,
                   num_attention_heads=2, head_dim=16)
    qwen3_vl = wide | dict(rope_parameters=theta | dict(mrope_interleaved=True, mrope_section=[8, 4, 4]))
    qwen3_vl_tower = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64,
                          deepstack_visual_indexes=[0])
    return {
        "llama3.1": RandomModel(t.LlamaConfig(**shape, rope_parameters=LLAMA3_ROPE), file_size="400KB"),
        "qwen2-tied": RandomModel(t.Qwen2Config(**plain, tie_word_embeddings=True)),
        "qwen3": RandomModel(t.Qwen3Config(**wide), torch.float32),
        "qwen3-moe": RandomModel(t.Qwen3MoeConfig(**wide, **MOE), file_size="400KB"),
        "qwen3.5": RandomModel(t.Qwen3_5Config(text_config=qwen35, vision_config=qwen35_tower)),
        "qwen3.5-moe": RandomModel(t.Qwen3_5MoeConfig(text_config=qwen35_moe, vision_config=qwen35_tower)),
        "smollm3": RandomModel(t.SmolLM3Config(**smollm3)),
        "granite": RandomModel(t.GraniteConfig(**granite)),
        "mistral3": RandomModel(t.Mistral3Config(
            text_config=ministral3, vision_config=pixtral, tie_word_embeddings=False), file_size="400KB"),
        "qwen3-vl": RandomModel(t.Qwen3VLConfig(text_config=qwen3_vl, vision_config=qwen3_vl_tower)),
        "muse-glimmer": RandomModel(t.MuseGlimmerConfig(
            text_config=muse, vision_config=muse_tower, out_hidden_size=32, projector_hidden_size=32)),
    }


def write_random_models(folder):
    """Random checkpoints, written by transformers, with the built-in model's tokenizer -> {name: path}."""
    paths = {}
    for seed, (name, case) in enumerate(random_models().items()):
        path = folder / name
        model = random_model(case.config, seed).to(case.dtype)
        model.save_pretrained(path, max_shard_size=case.file_size)
        if name == "qwen3.5-moe":  # experts in stacks, as on the Hub: transformers writes a matrix each
            save_file(dict(model.state_dict()), path / "model.safetensors")
        for file in TOKENIZER_FILES:
            shutil.copyfile(TINY / file, path / file)
        paths[name] = path
    return paths


def train(what, model, out, *flags, ranks=1):
    """Runs train.py, once. What it wrote is looked at even where it ended badly."""
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [
        *launch, ROOT / "train.py", "--model", model, "--data", out.parent / "chats.jsonl", "--seq_len", "128",
        "--precision", "fp32", "--lr", "1e-2", "--steps", "4", "--warmup", "0", "--schedule", "constant", "--out", out,
        *flags,
    ]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    check(f"{what}, train.py", done.returncode == 0, f"exit status {done.returncode}")
    if done.returncode:
        print(f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}", flush=True)


# ---------------------------------------------------------------- what both sides read


def fill(model, source, adapter=None):
    model.to_empty(device="cpu")
    model.tie_()
    data.load_weights_(model, source, adapter, 0, torch.device("cpu"), False)
    return model


def ours(folder, adapter_folder=None, precision="fp32"):
    """oomph's model of a folder, with an adapter where one is given."""
    args = trainer.parse_args(["--precision", precision])
    model = lm.on_meta(lm.parse_config(data.read_json(folder / "config.json")), args)
    source = data.WeightFiles(folder)
    adapter = None
    data.check_weights(model, source, folder)
    if adapter_folder:
        adapter, flags = data.open_adapter(adapter_folder)
        scale = lm.lora_scale(flags["lora_rank"], flags["lora_alpha"], flags["rslora"])
        lm.add_lora_(model, flags["lora_rank"], scale, 0.0, flags["lora_targets"])
        if flags["train_embeddings"]:
            model.model.embed_tokens.weight.requires_grad_()
            model.lm_head.weight.requires_grad_()
        data.check_weights(model, adapter, adapter_folder)
    return fill(model, source, adapter).eval()


def theirs(folder, dtype=torch.float32, attention="eager"):
    kind = class_of(transformers.AutoConfig.from_pretrained(folder))
    return kind.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()


def round_to_file(model, folder):
    """The model with every weight rounded to the dtype that it has in a checkpoint, in float32 again."""
    tensors = data.WeightFiles(folder).tensors
    embedding = next(stored for name, stored in tensors.items() if name.endswith("embed_tokens.weight"))
    for p in model.parameters():
        p.data = p.data.to(embedding.dtype).float()
    return model


# How far rounded weights may move the logits, as a part of how far the adapter does. A token whose experts were a near
# tie goes to another one; norms behind branches magnify small differences.
ROUNDING = {"qwen3-moe": 0.2, "qwen3.5-moe": 0.2, "muse-glimmer": 0.05}
ROUNDING_OF_OTHERS = 0.02
ROUNDING_OF_TRAINED = 0.2  # a few steps at an everyday rate do not move a trained model as far as the runs above


def check_model(name, base, runs, tokens):
    """runs: {how it was trained: folder}."""
    start = theirs(base)(tokens).logits
    same(f"{name}: the model before training", ours(base)(tokens), start)
    for run, folder in runs.items():
        if "lora" in run:
            check_adapter(f"{name}: {run}", base, folder, tokens, start, ROUNDING.get(name, ROUNDING_OF_OTHERS))
        else:
            check_full(f"{name}: {run}", folder / "final", tokens, start)


def check_full(what, final, tokens, start):
    logits = theirs(final)(tokens).logits
    control = theirs(final, attention="sdpa")(tokens).logits
    same(f"{what}, final/ in transformers", ours(final)(tokens), logits, control)
    differs(f"{what}, trained against untrained", logits, start)
    check_tokenizer(f"{what}, final/", final)


def check_adapter(what, base, folder, tokens, start, limit):
    final = folder / "final"
    merged = folder / "merged"
    model = peft.PeftModel.from_pretrained(theirs(base), final).eval()
    logits = model(tokens).logits
    same(f"{what}, final/ in PEFT on the unquantized base", ours(base, final)(tokens), logits)
    with model.disable_adapter():
        differs(f"{what}, PEFT with the adapter and without", logits, model(tokens).logits)
    merged_logits = theirs(merged)(tokens).logits
    control = theirs(merged, attention="sdpa")(tokens).logits
    same(f"{what}, merged/ in transformers", ours(merged)(tokens), merged_logits, control)
    unloaded = round_to_file(model.merge_and_unload(), merged)
    same(f"{what}, merged/ against PEFT's merge, rounded alike", merged_logits, unloaded(tokens).logits)
    ratio = ((merged_logits - logits).std() / (start - logits).std()).item()
    check(f"{what}, merged/ against base + adapter", ratio < limit,
          f"rounded weights move the logits {ratio:.2%} as far as the adapter does")
    check_tokenizer(f"{what}, merged/", merged)


def check_saved_embeddings(folder):
    """modules_to_save as PEFT writes it, read here, of tied pairs and of two matrices."""
    for is_tied in (False, True):
        path = folder / f"saved-{is_tied}"
        shape = dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2)
        random_model(transformers.Qwen2Config(**shape, tie_word_embeddings=is_tied), 3).save_pretrained(path)
        settings = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM", ensure_weight_tying=is_tied,
            modules_to_save=["embed_tokens", "lm_head"])
        model = peft.get_peft_model(theirs(path), settings).eval()
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p), alpha=0.1)
        model.save_pretrained(path / "adapter")
        tokens = torch.arange(96)[None]
        logits = model(tokens).logits
        same(f"PEFT's modules_to_save, tied {is_tied}, read here", ours(path, path / "adapter")(tokens), logits)
        differs(f"PEFT's modules_to_save, tied {is_tied}, against the base", ours(path)(tokens), logits)


def check_generation(folder):
    """Greedy continuations with the cache, by both sides, of six architectures in float32."""
    t = transformers
    shape = dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=256, rope_parameters={"rope_theta": 1e6})
    configs = {
        "llama3.1": t.LlamaConfig(**shape | {"rope_parameters": LLAMA3_ROPE}),
        "llama-tied": t.LlamaConfig(**shape, tie_word_embeddings=True),
        "mistral": t.MistralConfig(**shape, head_dim=16, sliding_window=48),
        "qwen2": t.Qwen2Config(**shape),
        "qwen3": t.Qwen3Config(**shape, head_dim=32),
        "qwen3-moe": t.Qwen3MoeConfig(**shape, head_dim=32, **MOE),
    }
    for seed, (name, config) in enumerate(configs.items()):
        path = folder / f"generate-{name}"
        model = random_model(config, seed).eval()
        model.save_pretrained(path)
        n_equal = 0
        for length in (1, 24, 47, 70):  # the third is one token less than Mistral's window
            prompt = torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(length))
            expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=80,
                                      do_sample=False, eos_token_id=None, pad_token_id=0)
            got = lm.generate(ours(path), prompt[0].tolist(), 80, set(), torch.device("cpu"))
            n_equal += list(got) == expected[0, length:].tolist()
        check(f"{name}: greedy continuations of 80 tokens", n_equal == 4, f"{n_equal} of 4 equal transformers'")


def check_yarn(folder):
    """Logits at 1 and 4 times the length of pretraining, by both sides, of files as people write them."""
    t = transformers
    length = 64
    shape = dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2)
    of_cards = dict(type="yarn", factor=4.0, original_max_position_embeddings=length)
    every_key = of_cards | dict(beta_fast=8.0, beta_slow=0.5, truncate=False, mscale=1.3, mscale_all_dim=0.8)
    configs = {
        # Qwen's cards leave max_position_embeddings as it was; Qwen3's is neither the length before nor that after
        "qwen2.5": (t.Qwen2Config, {"max_position_embeddings": length}, of_cards),
        "qwen3": (t.Qwen3Config, {"max_position_embeddings": 80, "head_dim": 32}, of_cards),
        "llama with every key": (t.LlamaConfig, {"max_position_embeddings": 4 * length}, every_key),
        "llama with an attention_factor": (t.LlamaConfig, {}, of_cards | {"attention_factor": 0.8}),
        "qwen3.5, a part of each head": (t.Qwen3_5TextConfig, {
            "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
            "linear_value_head_dim": 32, "full_attention_interval": 2, "partial_rotary_factor": 0.5}, of_cards),
    }
    for seed, (name, (kind, changes, scaling)) in enumerate(configs.items()):
        path = folder / f"yarn-{seed}"
        config = kind(**shape | changes, rope_theta=1e4, rope_scaling=scaling)
        model = random_model(config, seed).eval()
        model.save_pretrained(path)
        plain = random_model(kind(**shape | changes, rope_theta=1e4), seed).eval()
        for n_tokens in (length, 4 * length):
            tokens = torch.randint(0, 512, (1, n_tokens), generator=torch.Generator().manual_seed(1))
            logits = model(tokens).logits
            same(f"YaRN, {name}, {n_tokens} tokens", ours(path)(tokens), logits)
            difference = (plain(tokens).logits - logits).abs().max().item()
            check(f"YaRN, {name}, {n_tokens} tokens, with it and without", difference > 100 * SAME,
                  f"max abs difference {difference:.2g}, as it should")


# ---------------------------------------------------------------- tokenizer and chat template


def check_tokenizer(what, folder):
    expected = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    # AutoTokenizer puts Qwen's own byte-level pipeline around any vocabulary that lies beside such a config.json, the
    # built-in model's too, which has another one; the class below reads tokenizer.json as it is
    has_own = data.read_json(folder / "config.json")["model_type"].startswith(("qwen2", "qwen3_5", "qwen3_vl"))
    kind = transformers.PreTrainedTokenizerFast if has_own else AutoTokenizer
    encoded = kind.from_pretrained(folder)(TEXT)["input_ids"]
    check(f"{what} {kind.__name__}", encoded == expected, f"{len(expected)} ids, {len(set(expected))} distinct")


ODD_CHAT = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": " ☃\n\nnaïve? "},
    {"role": "assistant", "content": "\n  yes, \u00e9\u0301 "},
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": ""},
]


def check_chats(path):
    """The text of every chat, and the tokens in it that are trained on, against apply_chat_template."""
    mine = data.Tokenizer(TINY)
    auto = AutoTokenizer.from_pretrained(TINY)
    chats = [json.loads(line)["messages"] for line in path.read_text("utf-8").splitlines()]
    chats.append(ODD_CHAT)
    n_differ = {"rendered text": 0, "token ids": 0, "assistant mask": 0}
    n_tokens = 0
    n_targets = 0
    for chat in chats:
        text = auto.apply_chat_template(chat, tokenize=False)
        n_differ["rendered text"] += mine.render(chat)[0] != text
        prompt = auto.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        n_differ["rendered text"] += mine.render(chat[:1], generation_prompt=True)[0] != prompt
        (rendered,) = mine.conversation(chat)
        text = rendered.text
        spans = rendered.spans
        ids, mask = next(mine.encode([data.Text(text, spans, is_chat=True)]))
        expected = auto.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
        n_differ["token ids"] += ids.tolist() != expected["input_ids"]
        n_differ["assistant mask"] += mask.tolist() != [bool(flag) for flag in expected["assistant_masks"]]
        n_tokens += len(ids)
        n_targets += int(mask.sum())
    for what, count in n_differ.items():
        check(f"chat template: {what}", not count, f"{count} of {len(chats)} chats differ from transformers")
    check("chat template: trained on", 0 < n_targets < n_tokens, f"{n_targets} of {n_tokens} tokens")


def check_template_args(folder):
    """The template that is written with --template_args gives transformers the same texts without an argument, and an
    argument of its own wins."""
    golden = json.loads((ROOT / "tests" / "goldens-chat" / "template_args.json").read_text("utf-8"))
    conversations = json.loads((ROOT / "tests" / "goldens-chat" / "goldens.json").read_text("utf-8"))["conversations"]
    shutil.copytree(TINY, folder / "base")
    n_differ = 0
    n_overruled = 0
    for case in golden["cases"]:
        source = golden["templates"][case["template"]]
        (folder / "base" / "chat_template.jinja").write_text(source, "utf-8")
        out = folder / "written"
        out.mkdir(exist_ok=True)
        data.Tokenizer(folder / "base", template_args=case["template_args"]).save(out)
        auto = AutoTokenizer.from_pretrained(out)
        row = conversations[case["conversation"]]
        asked = {"tools": row["tools"], "add_generation_prompt": case["generation_prompt"], "tokenize": False}
        text = auto.apply_chat_template(row["messages"], **asked)
        with_arguments = auto.apply_chat_template(
            row["messages"], chat_template=source, **asked, **case["template_args"])
        n_differ += text != with_arguments
        others = {name: not value for name, value in case["template_args"].items()}
        overruled = auto.apply_chat_template(row["messages"], **asked, **others)
        n_overruled += overruled == auto.apply_chat_template(row["messages"], chat_template=source, **asked, **others)
    n_cases = len(golden["cases"])
    check("chat template with variables: as with arguments", not n_differ, f"{n_differ} of {n_cases} texts differ")
    check("chat template with variables: an argument wins", n_overruled == n_cases, f"{n_overruled} of {n_cases} texts")


# ---------------------------------------------------------------- NF4


def check_nf4_bytes(N, D):
    """Our codes are those of bitsandbytes, and what it makes of them with our scales are our weights."""
    for dtype in (torch.float32, torch.bfloat16):
        w_ND = (torch.randn(N, D) * 0.02).to(dtype)
        codes_NP, scales_NQ = nf4.quantize(w_ND, 4)
        own_ND = nf4.dequantize(codes_NP, scales_NQ, dtype)
        theirs, state = bnb.quantize_4bit(w_ND, blocksize=nf4.BLOCK, quant_type="nf4")
        n_codes = (theirs.flatten() != codes_NP.flatten()).sum().item()
        check(f"NF4 codes of {dtype} weights", not n_codes, f"{n_codes} of {codes_NP.numel():,} bytes differ")
        state.absmax = nf4.dequantize_scales(scales_NQ).flatten()
        theirs_ND = bnb.dequantize_4bit(codes_NP.view(-1, 1), state)
        n_weights = (own_ND != theirs_ND).sum().item()
        check(f"NF4 weights of {dtype} codes", not n_weights, f"{n_weights} of {w_ND.numel():,} weights differ")


def relative_errors(w_ND, back_ND):
    """RMS of the error after a round trip, relative to the weights: of all, and of the half of the blocks with the
    smaller absmax, because large blocks hide what happens to small ones."""
    blocks = w_ND.view(-1, nf4.BLOCK)
    squares = blocks.square().sum(-1)
    error_squares = (back_ND - w_ND).view(-1, nf4.BLOCK).square().sum(-1)
    largest = blocks.abs().amax(-1)
    is_small = largest <= largest.median()
    of_all = (error_squares.sum() / squares.sum()).sqrt().item()
    of_small = (error_squares[is_small].sum() / squares[is_small].sum()).sqrt().item()
    return of_all, of_small


def by_bitsandbytes(w_ND, double):
    packed, state = bnb.quantize_4bit(w_ND, blocksize=nf4.BLOCK, compress_statistics=double, quant_type="nf4")
    return bnb.dequantize_4bit(packed, state)


def check_nf4_errors(N, D):
    outliers = torch.randn(N, D) * 0.02
    outliers[:, ::512] *= 30
    uneven = torch.randn(N, D // nf4.BLOCK, 1).exp() * torch.randn(N, D // nf4.BLOCK, nf4.BLOCK) * 0.02
    cases = {
        "N(0, 0.02)": torch.randn(N, D) * 0.02,
        "outlier columns, x30 every 512": outliers,
        "log-normal blocks, sigma 1": uneven.view(N, D),
    }
    rows = []
    for name, w_ND in cases.items():
        codes_ND2, scales_NQ = nf4.quantize(w_ND, 4)
        bits = (codes_ND2.numel() + scales_NQ.numel()) * 8 / w_ND.numel()
        own, own_small = relative_errors(w_ND, nf4.dequantize(codes_ND2, scales_NQ, torch.float32))
        double, double_small = relative_errors(w_ND, by_bitsandbytes(w_ND, double=True))
        single, single_small = relative_errors(w_ND, by_bitsandbytes(w_ND, double=False))
        errors = own, own_small, double, double_small, single, single_small
        rows.append(f"| {name} | " + " | ".join(f"{error:.5f}" for error in errors) + " |")
        is_as_good = own <= double and own_small <= double_small
        of_small = f"smaller half of the blocks {own_small:.5f} and {double_small:.5f}"
        check(f"NF4 error on {name}", is_as_good, f"{own:.5f}, bitsandbytes {double:.5f}; {of_small}")
    single_bits = 4 + 32 / nf4.BLOCK  # a float32 scale for each block
    double_bits = 4 + 8 / nf4.BLOCK + 32 / nf4.BLOCK / 256  # a byte, and a float32 scale for 256 of these
    columns = (f"oomph, {bits:.3f} bits", f"bitsandbytes, double, {double_bits:.3f} bits",
               f"bitsandbytes, {single_bits:.3f} bits")
    print(f"\nRelative RMS error of [{N}, {D}] weights after the round trip, and that of the half of the blocks with "
          "the smaller absmax:\n")
    print("| weights | " + " | ".join(f"{column} | its small blocks" for column in columns) + " |")
    print("|---" * 7 + "|")
    print("\n".join(rows) + "\n")


def check_nf4():
    torch.manual_seed(0)
    check_nf4_bytes(1024, 4096)
    check_nf4_errors(1024, 4096)


# ---------------------------------------------------------------- a trained model

QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "What does a compiler do?",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "What is 12 plus 7?",
    "Who wrote Hamlet?",
    "Explain what a hash table is.",
    "How do I boil an egg?",
    "Translate 'good morning' into Spanish.",
    "What is the largest planet?",
    "Give me a synonym for happy.",
    "Write a Python function that adds two numbers.",
    "What year did the second world war end?",
    "How many legs does a spider have?",
    "What is photosynthesis?",
    "Tell me a joke.",
    "What is the opposite of cold?",
    "List the days of the week.",
    "What is an atom?",
]
LONGEST_ANSWER = 24  # tokens


class Method(NamedTuple):
    name: str
    flags: list
    lr: float
    bf16: str  # --precision of its run in bf16


METHODS = [
    Method("full", [], 1e-4, "bf16"),
    Method("lora", ["--lora"], 1e-3, "mixed"),
    Method("qlora", ["--qlora"], 1e-3, "mixed"),
]


class TrainedModel(NamedTuple):
    folder: Path
    chats: Path
    n_steps: int

    def argv(self, method, precision):
        return ["--model", self.folder, "--data", self.chats, *method.flags, "--precision", precision,
                "--seq_len", 128, "--batch_size", 1, "--steps", self.n_steps, "--lr", method.lr, "--warmup", 0,
                "--schedule", "constant"]

    def args(self, method, precision):
        return trainer.parse_args([str(word) for word in self.argv(method, precision)])

    def loader(self):
        """What deals out the rows in every run: none of the flags that differ change them."""
        config = data.read_json(self.folder / "config.json")
        args = self.args(METHODS[0], "fp32")
        loader, _ = data.open_data(args, data.Tokenizer(self.folder), config["vocab_size"], trainer.Ranks(False, 60.0))
        return loader


def write_docs_questions(path, n):
    """What the first n functions of the standard library do: rows of the same text for every run."""
    with open(path, "w") as file:
        for example in itertools.islice(make_tiny.stdlib_examples("docs"), n):
            file.write(json.dumps(example) + "\n")


def own_losses(trained, method, precision, out):
    """train.py's loss of each step."""
    command = [sys.executable, ROOT / "train.py", *trained.argv(method, precision), "--out", out, "--log_every", 1,
               "--save_every", 0, "--sample", "", *(["--merge"] if method.flags else [])]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return torch.tensor([row["loss"] for row in rows if "loss" in row])


def first_adapter(trained, method):
    """{PEFT's name: tensor} of the adapters that train.py starts with. They depend on the seed and their names."""
    args = trained.args(method, "fp32")
    model = lm.on_meta(lm.parse_config(data.read_json(trained.folder / "config.json")), args)
    fill(model, data.WeightFiles(trained.folder))
    return {data.PEFT_PREFIX + name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def with_nf4_errors_(model):
    """Gives the matrices of the blocks of transformers' model the values that oomph computes with under --qlora."""
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            codes_ND2, scales_NQ = nf4.quantize(layer.weight.bfloat16(), 4)
            layer.weight.data = nf4.dequantize(codes_ND2, scales_NQ, layer.weight.dtype)
    return model


def with_bitsandbytes(folder, dtype):
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", quantization_config=config)


def with_peft(model, trained, method):
    """PEFT's adapters on transformers' model, with the numbers that oomph starts from."""
    args = trained.args(method, "fp32")
    adapter = first_adapter(trained, method)
    targets = sorted({name.split(".lora_")[0].rsplit(".")[-1] for name in adapter})
    config = peft.LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, lora_dropout=0.0, target_modules=targets,
                             task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)  # adapters are float32, as oomph's are
    peft.set_peft_model_state_dict(model, adapter)
    started = peft.get_peft_model_state_dict(model)
    assert started.keys() == adapter.keys() and all(torch.equal(started[name], adapter[name]) for name in adapter)
    return model


def peers_losses(model, trained, method, precision):
    """The loss of each step of a plain loop around transformers' model: oomph's rows, order and AdamW of torch."""
    args = trained.args(method, precision)
    loader = trained.loader()
    params = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in params if p.dim() > 1]
    vectors = [p for p in params if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}]
    if vectors:  # LoRA has none, and torch refuses an empty group
        groups.append({"params": vectors, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=True)
    losses = []
    model.train()
    for step in range(trained.n_steps):
        (batch,), counts = loader.step(step, 1)
        # float32 adapters in a bf16 model are what the Trainer's bf16=True computes with, under autocast
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "mixed"):
            # transformers masks where positions restart
            logits = model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).logits
            loss_sum = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)), batch.targets.flatten(),
                reduction="sum", ignore_index=data.IGNORE)
            loss = loss_sum / counts.targets
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, args.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


class Limits(NamedTuple):
    """How far losses may be apart, absolute."""

    of_a_step: float
    of_the_mean: float  # over all steps, whose differences cancel where they are rounding


# Rounding differs in the last digit, and training enlarges that: by how much, transformers tells in float64 beside its
# own float32, and in bf16 by its other way to compute attention. In bf16 the logits of each side are 0.15 to 0.19 (RMS)
# from those in float32, and a row has only ten to fifty targets to average over.
CURVE_LIMITS = {"fp32": Limits(1e-3, 1e-3), "bf16": Limits(0.2, 0.03), "mixed": Limits(0.2, 0.03)}


def losses_of_transformers(trained, method, precision, dtype, attention):
    """The loss of each step by transformers, with PEFT's adapters, and for --qlora on the weights of oomph's NF4."""
    model = theirs(trained.folder, dtype, attention)
    # transformers gives the input embedding of pad_token_id no gradient, which here is the end of a turn
    model.get_input_embeddings().padding_idx = None
    if method.name == "qlora":
        with_nf4_errors_(model)
    if method.flags:
        model = with_peft(model, trained, method)
    if dtype is torch.float64:  # adapters as well
        model = model.double()
    return peers_losses(model, trained, method, precision)


def compare_curves(trained, method, precision, folder):
    """Trains on both sides -> rows of the table."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    name = f"{method.name}, --precision {precision}"
    own = own_losses(trained, method, precision, folder / f"{method.name}-{precision}")
    losses = losses_of_transformers(trained, method, precision, dtype, "eager")
    largest = (own - losses).abs().max().item()
    of_the_mean = abs((own - losses).mean().item())
    limits = CURVE_LIMITS[precision]
    figure = f"differ by at most {largest:.1e}, their means by {of_the_mean:.1e}"
    rows = [row_of(name, "oomph", own, own), row_of(name, "transformers", losses, own)]
    what = "transformers, float64" if precision == "fp32" else "transformers, sdpa"
    control_dtype = torch.float64 if precision == "fp32" else dtype
    control = losses_of_transformers(trained, method, precision, control_dtype, "sdpa")
    of_control = (control - losses).abs().max().item()
    limits = limits._replace(of_a_step=max(limits.of_a_step, TIMES_THE_CONTROL * of_control))
    figure += f"; {what}: from transformers by {of_control:.1e}, from oomph by {(control - own).abs().max():.1e}"
    rows.append(row_of(name, what, control, own))
    agrees = largest <= limits.of_a_step and of_the_mean <= limits.of_the_mean
    check(f"{name}: losses of {trained.n_steps} steps", agrees, figure)
    n = trained.n_steps // 4
    check(f"{name}: it learns", own[-n:].mean() < own[:n].mean(),
          f"mean of a quarter of the steps {own[:n].mean():.3f} -> {own[-n:].mean():.3f}")
    if method.name == "qlora" and precision == "fp32":
        other = with_peft(with_bitsandbytes(trained.folder, dtype), trained, method)
        rows.append(row_of(name, "bitsandbytes", peers_losses(other, trained, method, precision), own))
    return rows


def row_of(name, side, losses, own):
    """Of the table: a few losses, their mean, and how far they are from oomph's."""
    n = len(losses)
    shown = [losses[i].item() for i in (0, n // 4, n // 2, n - 1)]
    differences = (losses - own).abs()
    cells = [name, side, *(f"{loss:.5f}" for loss in (*shown, losses.mean().item())),
             f"{differences.mean().item():.1e}", f"{differences.max().item():.1e}"]
    return f"| {' | '.join(cells)} |"


def some_tokens(trained):
    """[2, T] of real text: the first rows that the model is trained on."""
    (batch,), _ = trained.loader().step(0, 1)
    return batch.tokens


def check_trained_logits(trained, tokens):
    reference = theirs(trained.folder)(tokens).logits
    same("logits in float32", ours(trained.folder)(tokens), reference)
    own_error = (ours(trained.folder, precision="bf16")(tokens) - reference).std().item()
    error = (theirs(trained.folder, torch.bfloat16)(tokens).logits - reference).std().item()
    check("logits in bf16", 0 < own_error <= 1.2 * error, "RMS distance to the logits in float32, of a spread of "
          f"{reference.std():.1f}: oomph {own_error:.3f}, transformers {error:.3f}")


def answers_of_oomph(model, prompts, stop_ids):
    return [list(lm.generate(model, prompt, LONGEST_ANSWER, stop_ids, torch.device("cpu"))) for prompt in prompts]


def answers_of_transformers(model, prompts, stop_ids):
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LONGEST_ANSWER,
                                do_sample=False, eos_token_id=sorted(stop_ids), pad_token_id=0)
        answer = output[0, len(prompt) :].tolist()
        answers.append(answer[:-1] if answer[-1] in stop_ids else answer)
    return answers


def check_answers(trained):
    tokenizer = data.Tokenizer(trained.folder)
    auto = AutoTokenizer.from_pretrained(trained.folder)
    prompts = []
    n_differ = 0
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompts.append(tokenizer.prompt(chat))
        expected = auto.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        n_differ += prompts[-1] != expected
    check("prompts of 20 questions", not n_differ, f"{n_differ} differ from transformers'")
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        own = answers_of_oomph(ours(trained.folder, precision=precision), prompts, tokenizer.stop_ids)
        answers = answers_of_transformers(theirs(trained.folder, dtype), prompts, tokenizer.stop_ids)
        n_equal = sum(a == b for a, b in zip(own, answers))
        n_ended = sum(len(answer) < LONGEST_ANSWER for answer in own)
        needed = len(QUESTIONS) if precision == "fp32" else 0  # in bf16 near ties fall to either side
        check(f"greedy answers, --precision {precision}", n_equal >= needed,
              f"{n_equal} of {len(QUESTIONS)} equal transformers', {sum(map(len, own))} tokens, {n_ended} end by "
              f"themselves; the first: {tokenizer.core.decode(own[0])!r}")


def check_trained_run(trained, method, folder):
    """What the run in float32 has written."""
    tokens = some_tokens(trained)
    start = theirs(trained.folder)(tokens).logits
    run = folder / f"{method.name}-fp32"
    if method.flags:
        check_adapter(method.name, trained.folder, run, tokens, start, ROUNDING_OF_TRAINED)
    else:
        check_full(method.name, run / "final", tokens, start)


TRAINED_PARTS = ("logits", "answers", "full", "full-bf16", "lora", "lora-bf16", "qlora", "qlora-bf16")


def check_trained(model, n_steps, wanted, folder):
    """wanted: of TRAINED_PARTS."""
    trained = TrainedModel(model, folder / "questions.jsonl", n_steps)
    # so few that every row comes several times: what is learned by heart is seen within 50 steps of a row each
    write_docs_questions(trained.chats, max(8, n_steps // 2))
    if "logits" in wanted:
        check_trained_logits(trained, some_tokens(trained))
    if "answers" in wanted:
        check_answers(trained)
    rows = []
    for method in METHODS:
        if method.name in wanted:
            rows += compare_curves(trained, method, "fp32", folder)
            check_trained_run(trained, method, folder)
        if f"{method.name}-bf16" in wanted:
            rows += compare_curves(trained, method, method.bf16, folder)
    n = n_steps
    steps = [f"step {i + 1}" for i in (0, n // 4, n // 2, n - 1)]
    columns = ("run", "by", *steps, "mean", "mean difference", "largest")
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    print("\n".join(rows) + "\n")


# ---------------------------------------------------------------- all of it


class Run(NamedTuple):
    name: str
    flags: list
    n_ranks: int = 1


RUNS = [
    Run("full", []),
    Run("full, 2 ranks --fsdp2", ["--fsdp2"], 2),
    Run("lora", ["--lora", "--merge"]),
    # a scale of 8 / 4: a power of 2, so that merging rounds in no product, whose order PEFT has otherwise
    Run("lora, --rslora", ["--lora", "--rslora", "--lora_alpha", "8", "--merge"]),
    Run("qlora, 2 ranks --fsdp2", ["--qlora", "--merge", "--fsdp2"], 2),
    Run("lora with embeddings, 2 ranks --fsdp2", ["--lora", "--train_embeddings", "--merge", "--fsdp2"], 2),
]


def train_all(name, base, folder):
    """-> {name of a run: its folder}."""
    folders = {}
    for number, run in enumerate(RUNS):
        flags = run.flags
        # PEFT 0.21 leaves adapters of Qwen3.5's experts out, and scales those of any by another factor with rsLoRA
        if "lora" in run.name and (name == "qwen3.5-moe" or (name == "qwen3-moe" and "rslora" in run.name)):
            targets = lm.targets_in(lm.parse_config(data.read_json(base / "config.json")))
            not_of_experts = [target for target in targets if target not in lm.MLP_TARGETS]
            flags = [*flags, "--lora_targets", *not_of_experts]
        folders[run.name] = folder / f"{name}-{number}"
        train(f"{name}: {run.name}", base, folders[run.name], *flags, ranks=run.n_ranks)
    return folders


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"models to check, or with --model some of {', '.join(TRAINED_PARTS)} (default: all)")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="check a trained model instead")
    parser.add_argument("--steps", type=int, default=50, help="of each run with --model (default: 50)")
    args = parser.parse_args()
    wanted = args.names
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}, "
          f"bitsandbytes {bitsandbytes.__version__}", flush=True)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # what peers do to each other
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        folder = Path(folder)
        if args.model:
            check_trained(args.model.resolve(), args.steps, wanted or TRAINED_PARTS, folder)
            end()
        write_chats(folder / "chats.jsonl")
        if not wanted:
            check_chats(folder / "chats.jsonl")
            check_template_args(folder / "template_args")
            check_nf4()
            check_generation(folder)
        if not wanted or "embeddings" in wanted:
            check_saved_embeddings(folder)
            check_yarn(folder)
        tokens = torch.randint(0, 4096, (2, 96), generator=torch.Generator().manual_seed(1))
        models = {"tiny": TINY, **write_random_models(folder)}
        for name, base in models.items():
            if not wanted or name in wanted:
                check_model(name, base, train_all(name, base, folder), tokens)
    end()


def end():
    print(f"{len(failed)} failed" + "".join(f"\n  {what}" for what in failed))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
