"""What is wrong with flags, models, adapters and data is said before anything is written: one message names the thing
and the way out. A case is what to spoil or which flags to give, and words of the message, separated by " | "."""

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from conftest import HERE
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import model as lm
import data
import train


def assert_says(message, words):
    assert not [word for word in words.split(" | ") if word not in message], message


# ---------------------------------------------------------------- flags

FLAGS = {
    "--nonsense 1": "--nonsense", "--qlor": "mean --qlora?", "--learning_rate 1": "mean --lr?", "--seq-len 8": "_len?",
    "--no_compile": "mean --compile?", "--no_packing": "mean --no-packing?", "tiny": "tiny: no such flag",
    **{f"--{flag}": f"--{flag.split()[0]} needs --lora" for flag in (
        "lora_rank 8", "lora_alpha 8", "lora_dropout 0.1", "lora_targets q_proj", "merge")},
    **{f"--lora --adapter a --{flag}": f"--{flag.split()[0]} | --adapter | leave" for flag in (
        "lora_rank 8", "lora_alpha 8", "lora_targets q_proj", "random_init")},
    "--lora --lora_dropout 1": "--lora_dropout | below 1",
    "--lora --lora_targets lm_head": "--lora_targets | lm_head | q_proj",
    "--model qwen3-0.6b": "qwen3-0.6b | --random_init | Qwen/Qwen3-0.6B",
    **{flags: f"{flags.split()[0]} | add --fsdp2" for flags in (
        "--no-reshard_after_forward", "--no-shard_embeddings", "--offload params", "--replicas 2")},
    "--offload disk": "--offload | disk | activations",
    "--offload --no-activation_checkpointing": "--offload activations | --activation_checkpointing",
    "--offload --activation_checkpointing 2": "--offload activations | --activation_checkpointing all",
    "--activation_checkpointing some": "--activation_checkpointing | some | all or auto",
    "--stochastic_rounding": "needs --precision bf16",
    "--optim_in_backward --grad_accum 2": "needs --grad_accum 1", "--optim_in_backward --clip 1": "no --clip",
    "--seq_len 99999999999999999999": "--seq_len | below",
    "--eval_every 5": "--eval_every needs --eval_data", "--world 4": "--world needs --dry_run",
    "--precision fp16": "--precision | fp16 | bf16", "--steps 0": "--steps | 0 | above 0",
    "--steps 1.5": "--steps | 1.5 | int", "--batch_size -1": "--batch_size | -1 | above 0",
    "--epochs inf": "--epochs | inf | above 0", "--lr nan": "--lr | nan | 0 or above",
    "--dpo": "needs --lora", "--lora --beta 1": "--beta needs --dpo", "--dpo --adapter X": "merge it first",
    **{f"--dpo --lora --{flag}": f"--{flag.split()[0]} | leave out" for flag in (
        "no-chunked_ce", "overflow split", "train_on all", "sequence_parallel 2")},
    **{f"--{flag}=--": f"--{flag}=--: expected a value" for flag in ("model", "data", "steps", "resume")},
    "--model --": "--model | expected one argument", "--model -- tiny": "--model",
    "--model=": "--model: expected a name, got an empty text",
    "--lora --lora_targets q_proj,x_proj k_proj": "--lora_targets x_proj: expected all-linear or some of q_proj, k_",
    "--chat --fsdp2": "--chat | one device", "--seed -1": "--seed | above 0", "--gpu_gib 24GB": "_gib | 24GB | float",
}


@pytest.mark.parametrize("flags", FLAGS)
def test_bad_flags_end_with_the_flag_to_change(flags, capsys):
    assert train.launch(flags.split()) == 2
    message = capsys.readouterr().err
    assert message.startswith("train.py: error: ") and message.count("\n") == 1
    assert_says(message, FLAGS[flags])


# ---------------------------------------------------------------- config.json

FULL, SLIDING, NAN, INFINITY = "full_attention", "sliding_attention", float("nan"), float("inf")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5,
          "original_max_position_embeddings": 16}
ASKED_FOR = [  # a family, what its config.json asks for, words of the message beside the key
    ("qwen2", {"model_type": "gpt2"}, "gpt2 | llama | qwen3"), ("qwen2", {"model_type": None}, "llama"),
    ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForCausalLM"),
    ("qwen2", {"hidden_act": "gelu"}, "gelu | silu"), ("qwen2", {"use_sliding_window": True}, "true"),
    ("qwen2", {"layer_types": [FULL, SLIDING]}, f"{SLIDING} | {FULL}"),
    ("qwen2", {"quantization_config": {"quant_method": "gptq"}}, "gptq | --qlora"),
    ("qwen3-moe", {"num_experts_per_tok": None}, "null"), ("qwen3-moe", {"moe_intermediate_size": None}, "null"),
    ("qwen2", {"num_experts": 8}, "8"), ("qwen3-moe", {"num_experts_per_tok": 13}, "12"),
    ("qwen3-moe", {"mlp_only_layers": [1]}, "[1]"), ("qwen3-moe", {"decoder_sparse_step": 2}, "2 | only 1"),
    ("qwen3-moe", {"output_router_logits": True}, "true"),
    ("qwen3-moe", {"moe_intermediate_size": 44}, "44 | multiples of 8"),
    ("llama2", {"mlp_bias": True}, ""), ("llama2", {"attention_bias": True}, ""),
    ("llama2", {"attention_dropout": 0.1}, "0.1"),
    ("llama2", {"partial_rotary_factor": 0.5}, "0.5"), ("qwen2", {"num_key_value_heads": 3}, "divide"),
    ("qwen3-tied", {"head_dim": None}, ""), ("qwen3-tied", {"head_dim": 15}, "even"),
    ("qwen2", {"rms_norm_eps": NAN}, "NaN"), ("qwen2", {"dtype": "float8_e4m3fn"}, "float8 | bfloat16"),
    ("qwen2", {"tie_word_embeddings": "false"}, "bool"), ("mistral", {"sliding_window": "64"}, "int"),
    # transformers 5 would take rope_parameters; both are there when somebody adds YaRN to a file that it has written
    ("llama3.1", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn"),
    *(("llama3.1", {"rope_scaling": rope}, "rope_parameters") for rope in (
        {**LLAMA3, "factor": 2 * LLAMA3["factor"]}, {"rope_theta": 5e5})),  # without a type it means "default"
    ("qwen2", {"rope_theta": 1e4}, "rope_parameters.rope_theta = 1000000.0 differs"),
    *(("llama3.1", {"rope_parameters": rope}, words) for rope, words in (
        ({**LLAMA3, "rope_theta": None}, "rope_theta | missing | copy"), ([1], "flat"),
        ({FULL: LLAMA3, SLIDING: LLAMA3}, "flat"), ({**LLAMA3, "rope_type": "yarn"}, "yarn | llama3"),
        ({**LLAMA3, "rope_type": None, "type": "yarn"}, "yarn | llama3"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor must be below"),
        ({**LLAMA3, "low_freq_factor": 4.5}, "low_freq_factor must be below"),
        ({**LLAMA3, "factor": INFINITY}, "factor"), ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor"),
        ({**LLAMA3, "original_max_position_embeddings": "16"}, "original_max_position_embeddings"))),
    *(("qwen2", {"rope_parameters": rope}, words) for rope, words in (
        (None, "rope_theta | missing | copy"), ({"rope_type": "default"}, "rope_theta | missing | copy"),
        ({"rope_type": "default", "rope_theta": NAN}, "NaN"), ({"rope_type": "default", "rope_theta": "1e6"}, "1e6"))),
]


@pytest.mark.parametrize("family, changes, words", ASKED_FOR,
                         ids=lambda part: json.dumps(part)[1:50] if isinstance(part, dict) else "")
def test_config_that_asks_for_something_else_is_refused_by_key(family, changes, words):
    with pytest.raises(ValueError) as error:
        lm.parse_config(data.read_json(HERE / "goldens" / family / "config.json") | changes, "model/config.json")
    (key,) = changes
    key = "rope_" if key.startswith("rope_") else key  # rope_theta is in rope_parameters
    assert_says(str(error.value), f"model/config.json: | {key} | {words}")


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                 "num_attention_heads", "num_key_value_heads", "max_position_embeddings"])
def test_absurd_sizes_are_refused_before_anything_is_allocated(key):
    raw = data.read_json(HERE / "goldens/qwen3-tied/config.json")
    for value in (10**12, -1, 0, True, "64", 64.0, None, [64]):
        with pytest.raises(ValueError) as error:
            lm.parse_config(raw | {key: value})
        assert_says(str(error.value), f"{key} = {json.dumps(value)} | int from 1 to")


# ---------------------------------------------------------------- folders and files
# A case runs in an empty folder with `model`, a copy of tests/goldens/qwen2, which has no tokenizer, and `chat.jsonl`.

CHAT = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]}
GOOD = json.dumps(CHAT) + "\n"
MODEL = "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
LONG = 300_000  # characters of which a message should quote a few
WEIGHTS = "model/model.safetensors"
INDEX = "model/model.safetensors.index.json"
EMBEDDING, UP = "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"


def write(name, content):
    def spoil():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return spoil


def rename(old, new):
    return lambda: Path(old).rename(new)


def edit(name, **changes):
    return lambda: Path(name).write_text(json.dumps(json.loads(Path(name).read_text()) | changes))


def config(**changes):
    return edit("model/config.json", **changes)


def tensors(change):
    def spoil():
        found = load_file(WEIGHTS)
        change(found)
        save_file(found, WEIGHTS, metadata={"format": "pt"})
    return spoil


def truncate(share):
    return lambda: os.truncate(WEIGHTS, int(share * os.path.getsize(WEIGHTS)))


def tiny(*files):
    """Files of the built-in model in place of the folder's."""
    return lambda: [shutil.copy(HERE / "tiny" / file, "model") for file in files]


def in_parts(again=(), begin="model"):
    """Puts the weights into two files, the head into the second, with tensors that are in the first one as well."""
    def spoil():
        found = load_file(WEIGHTS)
        Path(WEIGHTS).unlink()
        head = {name: found[name] for name in (*again, data.HEAD)}
        del found[data.HEAD]
        save_file(found, f"model/{begin}-00001-of-00002.safetensors")
        save_file(head, f"model/{begin}-00002-of-00002.safetensors")
    return spoil


def tower_in_a_part():
    """Puts the weights into the first of two files, and a vision tower, which is not trained, into the second one."""
    Path(WEIGHTS).rename("model/model-00001-of-00002.safetensors")
    save_file({"model.visual.proj.weight": torch.zeros(2, 2)}, "model/model-00002-of-00002.safetensors")


def index(**places):
    """Writes an index that names the one file, or what is said here, for each tensor."""
    def spoil():
        known = dict.fromkeys(load_file(WEIGHTS), "model.safetensors")
        Path(INDEX).write_text(json.dumps({"weight_map": known | places}))
    return spoil


def remove(name):
    return lambda: Path(name).unlink()


def pipe(name):
    """A pipe that nobody writes to."""
    def spoil():
        Path(name).unlink(missing_ok=True)
        os.mkfifo(name)
    return spoil


def device(name):
    def spoil():
        Path(name).unlink(missing_ok=True)
        os.symlink("/dev/zero", name)
    return spoil


def directory(name):
    def spoil():
        Path(name).unlink(missing_ok=True)
        Path(name).mkdir()
    return spoil


def adapter(blocks=2, **changes):
    """A rank 2 adapter of q_proj for the two blocks of the model."""
    def spoil():
        Path("adapter").mkdir()
        stems = [f"model.layers.{block}.self_attn.q_proj" for block in range(blocks)]
        values = {f"{stem}.lora_A.weight": torch.zeros(2, 32) for stem in stems}
        values |= {f"{stem}.lora_B.weight": torch.zeros(32, 2) for stem in stems}
        data.save_adapter(values, Path("adapter"), "base", 2, 4.0, 0.0, ["q_proj"])
        edit("adapter/adapter_config.json", **changes)()
    return spoil


def bitsandbytes(found):
    name = "model.layers.0.mlp.up_proj.weight"
    found |= {name: torch.zeros(768, 1, dtype=torch.uint8), f"{name}.absmax": torch.zeros(24, dtype=torch.uint8)}


ADAPTER, TEMPLATE = "--lora --adapter adapter", "--model tiny --chat_template mine.jinja"
FILES = {  # what is wrong: (functions that spoil, flags, words of the message)
    "no model folder": ([], "--model nowhere", "--model nowhere | no such folder | Hub id | qwen3-0.6b"),
    "no such id": ([], "--model nobody/nothing-at-all", "--model nobody/nothing-at-all | not fetched from the Hub"),
    "no config": ([rename("model/config.json", "gone")], "", "model | no config.json"),
    "config cut": ([write("model/config.json", "{")], "", "model/config.json | JSON"),
    **{f"a {what.__name__} as {name}": ([tiny(*MODEL), what(f"model/{name}")], "", f"model/{name} | not a file")
       for name in (*MODEL, "generation_config.json", "chat_template.jinja", "model.safetensors.index.json")
       for what in (pipe, device, directory)},
    "a pipe as a template": ([pipe("mine.jinja")], TEMPLATE, "mine.jinja | not a file"),
    "no weights": ([rename(WEIGHTS, "gone")], "", f"{WEIGHTS} | no such file"),
    "a pickle": ([rename(WEIGHTS, "model/pytorch_model.bin")], "", f"{WEIGHTS} | .bin | save_pretrained | safetensors"),
    **{f"weights cut at {share}": ([truncate(share)], "", f"{WEIGHTS} | cut short | download it again")
       for share in (0, 0.001, 0.5, 0.99)},
    "another shape": ([config(intermediate_size=56)], "",
                      "wrong shape | model.layers.0.mlp.down_proj.weight is [32, 48] | [32, 56]"),
    "a tensor less": ([tensors(lambda t: t.pop("model.norm.weight"))], "", "missing: model.norm.weight"),
    "escapes": ([tensors(lambda t: t.update({"\x1b[2J": t[EMBEDDING] + 0}))], "", "unexpected: \\x1b[2J"),
    "int8": ([tensors(lambda t: t.update({data.HEAD: t[data.HEAD].to(torch.int8)}))], "", "lm_head.weight | bfloat16"),
    "bitsandbytes": ([tensors(bitsandbytes)], "", "unquantized model | --qlora"),
    **{f"a part less of {begin}": ([in_parts(begin=begin), remove(f"model/{begin}-00002-of-00002.safetensors")], "",
                                   f"model/{begin}-00002-of-00002.safetensors | no such file | incomplete")
       for begin in ("model", "model.safetensors")},
    "a part that is a pipe": ([in_parts(), pipe("model/model-00001-of-00002.safetensors")], "",
                              "model/model-00001-of-00002.safetensors | not a file"),
    "a tower less": ([tower_in_a_part, remove("model/model-00002-of-00002.safetensors")], "",
                     "model/model-00002-of-00002.safetensors | no such file | incomplete"),
    "two sets of parts": ([in_parts(), write("model/model-00001-of-00003.safetensors", "")], "",
                          "model-00001-of-00002.safetensors | model-00001-of-00003.safetensors | several sets"),
    "an old file alone": ([rename(WEIGHTS, "model/model-old.safetensors")], "", f"{WEIGHTS} | no such file"),
    **{f"index of {file!r}": ([index(**{data.HEAD: file})], "", f"{INDEX} | plain names")
       for file in ("../x.safetensors", "/x.safetensors", "sub/x.safetensors", "x.bin", "x\n.safetensors", 5)},
    "index of a missing file": ([index(**{data.HEAD: "b.safetensors"})], "",
                                "model/b.safetensors | no such file | incomplete"),
    "index of a missing tensor": ([index(**{"model.visual.proj.weight": "model.safetensors"})], "",
                                  f"{INDEX} | model.visual.proj.weight | not in the files | incomplete"),
    "index of other files": ([write(INDEX, '{"weight_map": {"a": "a.safetensors"}}')], "",
                             f"{INDEX} | does not name model.safetensors | remove one"),
    **{f"index {text}": ([write(INDEX, text)], "", f"{INDEX} | weight_map") for text in (
        "{}", '{"weight_map": {}}', '{"weight_map": []}')},
    "a long name of a file": ([index(**{data.HEAD: f"{'x' * LONG}.safetensors"})], "", f"{INDEX} | plain names"),
    "a tensor twice": ([in_parts(again=[UP])], "", f"{UP} | model-00001-of-00002.safetensors | as well"),
    "a head that differs": ([tiny(*MODEL), tensors(lambda t: t.update({data.HEAD: t[EMBEDDING] + 1}))], "",
                            "lm_head.weight | set tie_word_embeddings to false"),
    "nan under NF4": ([tiny(*MODEL), tensors(lambda t: t[UP][3, 5].fill_(NAN))], "--qlora",
                      "inf or nan | model.layers.0.mlp.up_proj"),
    "rows that NF4 cannot cut": ([], "--qlora", "64 | 32 | q_proj | use --lora"),
    **{f"adapter: {key} = {value!r}": ([adapter(**{key: value})], ADAPTER, f"adapter/adapter_config.json | {key}")
       for key, value in (
           ("peft_type", "IA3"), ("bias", "all"), ("use_dora", True), ("use_rslora", True), ("fan_in_fan_out", True),
           ("modules_to_save", ["lm_head"]), ("rank_pattern", {"q_proj": 4}), ("layers_to_transform", [0]), ("r", 0),
           ("r", "2"), ("lora_alpha", None), ("lora_alpha", NAN), ("lora_dropout", 1.5),
           ("target_modules", 5), ("target_modules", {"q_proj": 1}), ("target_modules", [["q_proj"]]),
           ("target_modules", []), ("target_modules", ["lm_head"]),
           ("alora_invocation_tokens", [1]), ("loftq_config", {"loftq_bits": 4}), ("key_of_tomorrow", 1),
           ("kasa_config", {}), *(("init_lora_weights", way) for way in ("pissa", "olora", "eva", "corda", "loftq")))},
    "adapter that PEFT trains on transformers 5": (
        [adapter(rank_pattern={r".*\.gate_up_proj": 4}, alpha_pattern={r".*\.gate_up_proj": 8},
                 target_parameters=["gate_up_proj", "down_proj"])], ADAPTER,
        "adapter_config.json: | gate_up_proj | merge it | merge_and_unload, save_pretrained | --model"),
    "adapter of the head": ([lambda: data.save_adapter({"lm_head.lora_A.weight": torch.ones(2, 32)}, Path("model"), "",
        2, 4, 0, ["lm_head"])], "--adapter model", "model: adapter_model.safetensors has lm_head | q_proj | merge it"),
    "adapter's key of escapes": ([adapter(**{"key_\x1b": 1})], ADAPTER, "adapter_config.json | key_\\x1b"),
    "adapter of one block": ([adapter(blocks=1)], ADAPTER, "missing | model.layers.1.self_attn.q_proj.lora_A.weight"),
    "a long name of a base": ([adapter(base_model_name_or_path="x" * LONG)], "--model adapter", "xxx"),
    "long keys": ([adapter(**{"k" * LONG: "v" * LONG})], ADAPTER, "adapter_config.json: kkk | = \"vvv"),
    "a long template": ([write("mine.jinja", f"{{% {'x' * LONG} %}}")], TEMPLATE, "mine.jinja | xxx"),
    # both blocks have a v_proj, and the file adapts none
    "adapter less a target": ([adapter(target_modules=["q_proj", "v_proj"])], ADAPTER,
                              "target_modules | does not adapt: model.layers.0.self_attn.v_proj, | incomplete"),
    "adapter less the head": ([adapter(target_modules=["q_proj", "lm_head"])], ADAPTER,
                              "target_modules | does not adapt: lm_head | incomplete"),
    "adapter of one named block": ([adapter(target_modules=["model.layers.0.self_attn.q_proj"])], ADAPTER,
                                   "target_modules | does not name | model.layers.1.self_attn.q_proj"),
    "a pipe as an adapter": ([adapter(), pipe("adapter/adapter_config.json")], ADAPTER,
                             "adapter/adapter_config.json | not a file"),
    "no adapter": ([], ADAPTER, "adapter/adapter_config.json"),
    "adapter in a pickle": ([adapter(), rename("adapter/adapter_model.safetensors", "adapter/adapter_model.bin")],
                            ADAPTER, "adapter/adapter_model.safetensors | .bin | safetensors"),
    "no tokenizer": ([], "", "model | tokenizer.json"),
    "tokenizer.model alone": ([write("model/tokenizer.model", "")], "",
                              "model/tokenizer.json: no such file | AutoTokenizer | .save_pretrained('model')"),
    "tokenizer cut": ([write("model/tokenizer.json", '{"version": "1.0"')], "", "model/tokenizer.json"),
    "template's syntax": ([write("mine.jinja", "{% for m in messages %}\n{{ m }")], TEMPLATE, "mine.jinja | line 2"),
    "template that objects": ([write("mine.jinja", "{{ raise_exception('no \x1b[31m system') }}")], TEMPLATE,
                              "chat.jsonl | line 1 | mine.jinja | system"),
    "a table": ([write("bad.parquet", "")], "--model tiny --data bad.parquet", "load_dataset | to_json | parquet"),
    "a name of the Hub": ([], "--model tiny --data a/b", "a/b: no such file | load_dataset | Hub"),
    "escapes in a name": ([], "--model tiny --data \x1b[31m.jsonl", r"\x1b[31m.jsonl: no such file"),
    "rows too short": ([], "--model tiny --seq_len 8", "nothing to train on | 2 are longer than --seq_len 8"),
    "step beyond the data": ([], "--model tiny --batch_size 3 --grad_accum 5", "15 rows | --batch_size | has 1"),
    "out a file": ([write("file", "")], "--model tiny --out file", "--out file | folder"),
    "out of a run": ([write("taken/args.json", "{}")], "--model tiny --out taken", "taken | contains a run | --resume"),
    "nothing to resume": ([], "--model tiny --resume model", "--resume model | no complete checkpoint"),
    "replicas of a plan": ([], "--fsdp2 --replicas 3 --dry_run --world 8", "--replicas 3 | 8 rank | divisor of 8"),
    "groups of a plan": ([], "--sequence_parallel 4 --dry_run --world 6", "--sequence_parallel 4 | 6 rank | of 2"),
    "half of the experts": ([], "--lora --lora_targets up_proj --dry_run --model qwen3-30b-a3b", "up_proj | give both"),
    "rank in an adapter": ([lambda: data.save_adapter({"mlp.experts.0.down_proj.lora_A.weight": torch.ones(12, 8)},
        Path("model"), "", 12, 8, 0, ["down_proj"])], "--dry_run --model qwen3-30b-a3b --adapter model", "12 | of 8"),
    "ranks of experts": ([], "--lora --lora_rank 4 --dry_run --model qwen3-30b-a3b", "--lora_rank 4 | multiple of 8"),
    "groups of heads": ([], "--model qwen2.5-0.5b --sequence_parallel 4 --dry_run --world 28",
                        "--sequence_parallel 4 | 14 heads | of 14"),
    "plan without an adapter": ([], f"--dry_run {ADAPTER}", "adapter/adapter_config.json"),
}


@pytest.mark.parametrize("case", FILES)
def test_what_is_wrong_is_named_before_anything_is_written(case, tmp_path, monkeypatch, capsys):
    spoil, flags, words = FILES[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    shutil.copytree(HERE / "goldens/qwen2", "model")
    Path("chat.jsonl").write_text(GOOD * 2)
    for change in spoil:
        change()
    before = sorted(tmp_path.rglob("*"))
    argv = "--model model --data chat.jsonl --seq_len 64 --steps 1 --out out " + flags  # the last one of a flag wins
    assert train.launch(argv.split()) == 1
    message = capsys.readouterr().err
    assert message.startswith("train.py: error: ") and "\x1b" not in message and "Traceback" not in message
    assert len(message) < 3000
    assert_says(message, words)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("error", [RuntimeError, ConnectionError, type("RemoteProtocolError", (Exception,), {})])
def test_broken_download_is_one_line_with_the_model_and_what_to_do(monkeypatch, capsys, error):
    """huggingface_hub raises its HTTP library's errors, which are neither OSError nor ValueError."""
    def fail(*_, **__):
        raise error("peer closed\n\nconnection " + "x" * LONG)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert train.launch(["--model", "a/b"]) == 1
    message = capsys.readouterr().err
    assert_says(message, f"--model a/b: | Hub | next start continues | {error.__name__}: peer closed connection xxx")
    assert message.count("\n") == 1 and len(message) < 500
