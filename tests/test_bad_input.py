"""What is wrong with flags, models, adapters and data is said before anything is written: the message names the thing
and the way out, and the folder of the run stays empty."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import model as lm
import train

HERE = Path(__file__).parent
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CHAT = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]}


def write_jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def edit_json(path, remove=(), **changes):
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if key not in remove}))


def edit_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def chat(tmp_path):
    return write_jsonl(tmp_path / "chat.jsonl", CHAT, CHAT)


@pytest.fixture
def golden(tmp_path):
    """A copy of a folder of tests/goldens: a few KB of weights and no tokenizer."""
    return lambda name: Path(shutil.copytree(HERE / "goldens" / name, tmp_path / "model"))


@pytest.fixture
def tiny(tmp_path):
    return Path(shutil.copytree(HERE / "tiny", tmp_path / "model"))


@pytest.fixture
def shapes(tmp_path):
    """A folder for --random_init: tests/tiny's tokenizer and config with one block."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (*TOKENIZER, "config.json"):
        shutil.copy(HERE / "tiny" / file, folder)
    edit_json(folder / "config.json", num_hidden_layers=1)
    return folder


@pytest.fixture
def refused(tmp_path, chat):
    """Runs train.main on a model, expects it to stop, -> the message. `flags` come last and win."""

    def run(model, *flags):
        argv = ["--model", model, "--data", chat, "--seq_len", 64, "--steps", 1, "--out", tmp_path / "out", *flags]
        with pytest.raises(SystemExit) as stop:
            train.main([str(arg) for arg in argv])
        assert isinstance(stop.value.code, str), "stopped without a message"
        assert not list((tmp_path / "out").rglob("*")), "something was written"
        return stop.value.code

    return run


@pytest.fixture
def refused_data(tmp_path, refused):
    """The same for the built-in model on a file of the given content."""

    def run(name, content, *flags):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return refused("tiny", "--data", path, *flags)

    return run


def assert_says(message, *words):
    assert not [word for word in words if str(word) not in message], message


# ---------------------------------------------------------------- flags


FLAGS = {
    "--nonsense 1": ["--nonsense"],
    "--qlor": ["--qlor"],
    "--lora --qlora": ["--lora and --qlora", "choose one"],
    "--lora_rank 8": ["--lora_rank needs --lora or --qlora"],
    "--lora_alpha 8": ["--lora_alpha needs --lora or --qlora"],
    "--lora_dropout 0.1": ["--lora_dropout needs --lora or --qlora"],
    "--lora_targets q_proj": ["--lora_targets needs --lora or --qlora"],
    "--adapter a": ["--adapter needs --lora or --qlora"],
    "--merge": ["--merge needs --lora or --qlora"],
    "--lora --adapter a --lora_rank 8": ["--lora_rank and --adapter", "leave out --lora_rank"],
    "--lora --adapter a --lora_alpha 8": ["--lora_alpha and --adapter", "leave out --lora_alpha"],
    "--lora --adapter a --lora_targets q_proj": ["--lora_targets and --adapter", "leave out"],
    "--lora --adapter a --random_init": ["--adapter and --random_init", "leave one out"],
    "--lora --lora_dropout 1": ["--lora_dropout", "below 1"],
    "--lora --lora_targets lm_head": ["--lora_targets", "lm_head", "q_proj"],
    "--model qwen3-0.6b": ["qwen3-0.6b", "--random_init", "Qwen/Qwen3-0.6B"],
    "--no-reshard_after_forward": ["--no-reshard_after_forward", "add --fsdp2"],
    "--no-shard_embeddings": ["--no-shard_embeddings", "add --fsdp2"],
    "--offload params": ["--offload params", "add --fsdp2"],
    "--replicas 2": ["--replicas", "add --fsdp2"],
    "--offload activations params": ["--offload params", "add --fsdp2"],
    "--offload disk": ["--offload", "disk", "activations"],
    "--offload --no-activation_checkpointing": ["--offload activations needs --activation_checkpointing"],
    "--offload activations --no-activation_checkpointing": ["needs --activation_checkpointing"],
    "--fsdp2 --offload activations params --no-activation_checkpointing": ["needs --activation_checkpointing"],
    "--compile --tiled_mlp 64 --lora --lora_dropout 0.1": ["--compile, --tiled_mlp and --lora_dropout", "leave one of"],
    "--ce_chunk 8 --no-chunked_ce": ["--ce_chunk and --no-chunked_ce", "leave one out"],
    "--stochastic_rounding": ["--stochastic_rounding", "add --precision bf16"],
    "--stochastic_rounding --precision mixed": ["--stochastic_rounding", "add --precision bf16"],
    "--optim adamw8bit --no-fused_adamw": ["--no-fused_adamw and --optim adamw8bit", "leave out --no-fused_adamw"],
    "--stochastic_rounding --precision bf16 --no-fused_adamw": ["--no-fused_adamw and --stochastic_rounding", "leave out"],
    "--optim_in_backward --grad_accum 2": ["--optim_in_backward needs --grad_accum 1: gradients are freed as they arrive"],
    "--optim_in_backward --clip 1": ["--optim_in_backward and --clip", "leave out --clip"],
    "--optim sgd": ["--optim", "sgd", "adamw8bit"],
    "--eval_every 5": ["--eval_every needs --eval_data"],
    "--precision fp16": ["--precision", "fp16", "bf16"],
    "--schedule step": ["--schedule", "step", "cosine"],
    "--steps 0": ["--steps", "0", "positive"],
    "--steps 1.5": ["--steps", "1.5", "int"],
    "--batch_size -1": ["--batch_size", "-1", "positive"],
    "--seq_len many": ["--seq_len", "many", "int"],
    "--epochs inf": ["--epochs", "inf", "positive"],
    "--lr nan": ["--lr", "nan", "zero or a positive"],
    "--clip -1": ["--clip", "-1", "zero or a positive"],
    "--seed -1": ["--seed", "positive"],
    "--world 4": ["--world is for --dry_run", "torchrun --nproc_per_node"],
    "--dry_run --world 0": ["--world", "0", "positive"],
    "--gpu_gib 0": ["--gpu_gib", "0", "positive"],
    "--gpu_gib -8": ["--gpu_gib", "-8", "positive"],
    "--gpu_gib inf": ["--gpu_gib", "inf", "positive"],
    "--dry_run --gpu_gib 24GB": ["--gpu_gib", "24GB", "float"],
}


@pytest.mark.parametrize("flags", FLAGS)
def test_bad_flags_end_with_the_flag_to_change(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        train.parse_args(flags.split())
    assert stop.value.code == 2
    assert_says(capsys.readouterr().err.split("error:")[-1], *FLAGS[flags])


@pytest.mark.parametrize("flags, clip", [("", 1.0), ("--clip 0.5", 0.5), ("--optim_in_backward", 0.0),
                                         ("--optim_in_backward --clip 0", 0.0)])
def test_gradients_are_clipped_to_one_unless_the_step_is_in_the_backward(flags, clip):
    assert train.parse_args(flags.split()).clip == clip


# ---------------------------------------------------------------- the model folder and its config


def test_missing_model_folder_is_refused(refused, tmp_path):
    assert_says(refused(tmp_path / "nowhere"), tmp_path / "nowhere", "no such folder", "Hub id", "qwen3-0.6b")


def test_hub_id_that_cannot_be_fetched_is_refused(refused, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # no network, and an empty cache
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert_says(refused("nobody/nothing-at-all"), "nobody/nothing-at-all")


def test_folder_without_config_is_refused(refused, golden):
    folder = golden("qwen2")
    (folder / "config.json").unlink()
    assert_says(refused(folder), folder, "no config.json")


@pytest.mark.parametrize("content", ["{", "[]", b"\xff\xfe"], ids=["cut", "list", "not UTF-8"])
def test_config_that_is_not_a_json_object_is_refused(refused, golden, content):
    folder = golden("qwen2")
    (folder / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_says(refused(folder), folder / "config.json", "JSON")


FULL, SLIDING = "full_attention", "sliding_attention"
NAN, INFINITY = float("nan"), float("inf")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5,
          "original_max_position_embeddings": 16}


@pytest.mark.parametrize("family, changes, words", [
    ("qwen2", {"model_type": "gpt2"}, ["model_type", "gpt2", "llama", "qwen3"]),
    ("qwen2", {"model_type": None}, ["model_type", "llama"]),
    ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"]}, ["architectures", "Qwen2ForCausalLM"]),
    ("qwen2", {"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
    ("qwen2", {"use_sliding_window": True}, ["use_sliding_window"]),
    ("qwen2", {"layer_types": [FULL, SLIDING]}, ["layer_types", SLIDING, FULL]),
    ("qwen2", {"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq", "--qlora"]),
    ("qwen2", {"num_experts": 8}, ["num_experts"]),
    ("qwen2", {"num_local_experts": 8}, ["num_local_experts"]),
    ("llama2", {"attention_bias": True}, ["attention_bias", "qwen2"]),
    ("llama2", {"mlp_bias": True}, ["mlp_bias"]),
    ("llama2", {"attention_dropout": 0.1}, ["attention_dropout"]),
    ("llama2", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ("qwen2", {"rope_parameters": {"rope_type": "default"}}, ["rope_theta", "missing", "copy"]),
    ("qwen2", {"rope_parameters": None}, ["rope_theta", "missing", "copy"]),
    ("qwen3-tied", {"rope_parameters": None}, ["rope_theta", "missing", "copy"]),
    ("llama3.1", {"rope_parameters": {**LLAMA3, "rope_theta": None}}, ["rope_theta", "missing", "copy"]),
    ("llama3.1", {"rope_parameters": {FULL: LLAMA3, SLIDING: LLAMA3}}, ["rope_parameters", "flat"]),
    ("llama3.1", {"rope_parameters": [1]}, ["rope_parameters", "flat"]),
    ("llama3.1", {"rope_parameters": {**LLAMA3, "rope_type": "yarn"}}, ["rope_parameters", "yarn", "llama3"]),
    ("llama3.1", {"rope_parameters": {**LLAMA3, "factor": 0}}, ["rope_parameters", "factor", "positive"]),
    ("llama3.1", {"rope_parameters": {**LLAMA3, "low_freq_factor": None}}, ["rope_parameters", "low_freq_factor"]),
    ("llama3.1", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": "16"}},
     ["original_max_position_embeddings"]),
    ("llama-linear", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": INFINITY}}, ["factor"]),
    ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": NAN}}, ["rope_theta", "positive"]),
    ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": INFINITY}}, ["rope_theta", "positive"]),
    ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": "1e6"}}, ["rope_theta", "positive"]),
    # transformers 5 would take the second one; both are there when somebody adds YaRN to a file that it has written
    ("llama3.1", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, ["rope_scaling", "yarn", "rope_parameters", "leave"]),
    ("qwen2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "linear", "rope_parameters"]),
    ("llama3.1", {"rope_scaling": {**LLAMA3, "factor": 2 * LLAMA3["factor"]}}, ["rope_scaling", "rope_parameters"]),
    ("qwen2", {"num_key_value_heads": 3}, ["num_key_value_heads", "divide"]),
    ("qwen2", {"num_attention_heads": 5}, ["num_attention_heads", "divide"]),
    ("qwen3-tied", {"head_dim": None}, ["head_dim"]),
    ("qwen3-tied", {"head_dim": 15}, ["head_dim", "even"]),
    ("qwen2", {"rms_norm_eps": NAN}, ["rms_norm_eps"]),
    ("qwen2", {"rms_norm_eps": "1e-6"}, ["rms_norm_eps"]),
    ("qwen2", {"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn", "bfloat16"]),
    ("qwen2", {"initializer_range": "small"}, ["initializer_range"]),
    ("qwen2", {"tie_word_embeddings": "false"}, ["tie_word_embeddings"]),
    ("mistral", {"sliding_window": "64"}, ["sliding_window"]),
], ids=lambda part: json.dumps(part)[1:50] if isinstance(part, dict) else "" if isinstance(part, list) else part)
def test_config_that_asks_for_something_else_is_refused_by_key(refused, golden, family, changes, words):
    folder = golden(family)
    edit_json(folder / "config.json", **changes)
    assert_says(refused(folder), folder, *words)


@pytest.mark.parametrize("value", [10**12, -1, 0, True, "64", 64.0, None, [64]], ids=repr)
@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                 "num_attention_heads", "num_key_value_heads", "max_position_embeddings"])
def test_absurd_sizes_are_refused_before_anything_is_allocated(refused, golden, key, value):
    folder = golden("qwen3-tied")
    edit_json(folder / "config.json", **{key: value})
    assert_says(refused(folder), folder, key, json.dumps(value), "integer from 1 to")


def test_rows_beyond_the_sliding_window_are_refused(refused, golden):
    folder = golden("mistral")
    edit_json(folder / "config.json", sliding_window=32)
    assert_says(refused(folder), "--seq_len 64", "sliding_window = 32")


def test_mistral_without_the_key_has_the_sliding_window_of_transformers(refused, golden):
    folder = golden("mistral")
    edit_json(folder / "config.json", remove=["sliding_window"])  # transformers takes 4096 then
    assert_says(refused(folder, "--seq_len", 5000), "sliding_window")


# ---------------------------------------------------------------- the weights


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.99])
def test_truncated_weights_are_refused(refused, golden, share):
    file = golden("qwen2") / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    assert_says(refused(file.parent), file, "cut short", "download it again")


def test_weight_of_another_shape_is_refused(refused, golden):
    folder = golden("qwen2")
    edit_json(folder / "config.json", intermediate_size=56)
    assert_says(refused(folder), folder, "wrong shape", "model.layers.0.mlp.down_proj.weight is [32, 48]", "[32, 56]")


def test_unexpected_weight_is_refused(refused, golden):
    folder = golden("llama2")
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.update({"model.extra.weight": torch.zeros(1)}))
    assert_says(refused(folder), folder, "unexpected: model.extra.weight")


def test_biases_that_the_config_denies_are_refused(refused, golden):
    folder = golden("qwen2")
    edit_json(folder / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    assert_says(refused(folder), folder, "unexpected: model.layers.0.self_attn.k_proj.bias")


def test_missing_weight_is_refused(refused, golden):
    folder = golden("qwen2")
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.pop("model.norm.weight"))
    assert_says(refused(folder), folder, "missing: model.norm.weight")


def test_long_list_of_missing_weights_is_cut(refused, golden):
    folder = golden("qwen2")
    edit_json(folder / "config.json", num_hidden_layers=100, layer_types=None)
    assert_says(refused(folder), "missing: model.layers.10.", f"and {98 * 12 - 5} more")


def write_index(folder, weight_map, copies=()):
    """Turns model.safetensors into a.safetensors behind an index; `copies` are more files with the same content."""
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    for copy in copies:
        shutil.copy(folder / "a.safetensors", folder / copy)
    names = load_file(folder / "a.safetensors")
    index = {"weight_map": {name: weight_map.get(name, "a.safetensors") for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "x.bin",
                                  "x\n.safetensors", 5], ids=repr)
def test_index_that_leaves_the_folder_is_refused(refused, golden, file):
    folder = write_index(golden("qwen2"), {"lm_head.weight": file})
    assert_says(refused(folder), "index.json", "lm_head.weight", repr(file), "plain file name")


def test_index_of_a_file_that_is_absent_is_refused(refused, golden):
    folder = write_index(golden("qwen2"), {"lm_head.weight": "b.safetensors"})
    assert_says(refused(folder), "index.json", "b.safetensors", "not there", "incomplete")


def test_tensor_in_two_files_is_refused(refused, golden):
    folder = write_index(golden("qwen2"), {"lm_head.weight": "b.safetensors"}, copies=["b.safetensors"])
    assert_says(refused(folder), folder, "stored twice", "lm_head.weight")


def test_index_that_leaves_a_tensor_out_is_refused(refused, golden):
    folder = write_index(golden("qwen2"), {})
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map["lm_head.weight"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_says(refused(folder), index, "lm_head.weight")


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": []}], ids=json.dumps)
def test_index_without_weight_map_is_refused(refused, golden, content):
    folder = golden("qwen2")
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    assert_says(refused(folder), "index.json", "weight_map")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_way_to_convert_them(refused, golden, name):
    folder = golden("qwen2")
    (folder / "model.safetensors").rename(folder / name)
    assert_says(refused(folder), folder, ".bin", "save_pretrained", "safetensors")


def test_folder_without_weights_is_refused(refused, golden):
    folder = golden("qwen2")
    (folder / "model.safetensors").unlink()
    (folder / "golden.safetensors").unlink()
    assert_says(refused(folder), folder, "no model.safetensors")


def test_checkpoint_quantized_by_bitsandbytes_is_refused(refused, golden):
    folder = golden("qwen2")
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.update({
        name: torch.zeros(768, 1, dtype=torch.uint8), f"{name}.absmax": torch.zeros(24, dtype=torch.uint8),
        f"{name}.quant_state.bitsandbytes__nf4": torch.zeros(90, dtype=torch.uint8),
    }))
    assert_says(refused(folder), folder, "bitsandbytes", "unquantized model", "--qlora")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64], ids=str)
def test_weights_of_another_dtype_are_refused(refused, golden, dtype):
    folder = golden("qwen2")
    edit_tensors(folder / "model.safetensors",
                 lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(dtype)}))
    assert_says(refused(folder), folder, "lm_head.weight", "bfloat16")


def test_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(refused, tiny):
    edit_tensors(tiny / "model.safetensors",
                 lambda tensors: tensors.update({lm.HEAD: tensors["model.embed_tokens.weight"] + 1}))
    assert json.loads((tiny / "config.json").read_text())["tie_word_embeddings"]
    assert_says(refused(tiny), "lm_head.weight", "set tie_word_embeddings to false")


def test_head_without_its_weight_is_refused(refused, golden):
    folder = golden("qwen3-tied")
    edit_json(folder / "config.json", tie_word_embeddings=False)
    assert_says(refused(folder), folder, "missing: lm_head.weight")


@pytest.mark.parametrize("value", [NAN, INFINITY])
def test_nf4_refuses_weights_that_are_not_finite(refused, tiny, value):
    edit_tensors(tiny / "model.safetensors",
                 lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"][3, 5].fill_(value))
    assert_says(refused(tiny, "--qlora"), "inf or nan", "model.layers.0.mlp.up_proj")


def test_nf4_names_the_layer_that_its_blocks_do_not_fit(refused, shapes):
    edit_json(shapes / "config.json", hidden_size=96, num_attention_heads=3, num_key_value_heads=1)
    assert_says(refused(shapes, "--random_init", "--qlora"), "96", "64", "q_proj", "use --lora")


# ---------------------------------------------------------------- adapters


@pytest.fixture
def adapter(tmp_path):
    """Writes a rank 2 adapter of q_proj for a model of one block; `changes` go to its config -> the folder."""

    def write(width=192, **changes):
        folder = tmp_path / "adapter"
        folder.mkdir()
        stem = "model.layers.0.self_attn.q_proj"
        tensors = {f"{stem}.lora_A.weight": torch.zeros(2, width), f"{stem}.lora_B.weight": torch.zeros(192, 2)}
        lm.save_adapter(tensors, folder, "base", 2, 4.0, 0.0, ["q_proj"])
        edit_json(folder / "adapter_config.json", **changes)
        return folder

    return write


@pytest.fixture
def refused_adapter(refused, tiny):
    """The same for an adapter of the first block of tests/tiny."""
    edit_json(tiny / "config.json", num_hidden_layers=1)

    def keep_one_block(tensors):
        for name in list(tensors):
            if "layers." in name and "layers.0." not in name:
                del tensors[name]

    edit_tensors(tiny / "model.safetensors", keep_one_block)
    return lambda folder: refused(tiny, "--lora", "--adapter", folder)


@pytest.mark.parametrize("key, value", [
    ("peft_type", "IA3"), ("bias", "all"), ("use_dora", True), ("use_rslora", True), ("modules_to_save", ["lm_head"]),
    ("fan_in_fan_out", True), ("rank_pattern", {"q_proj": 4}), ("layers_to_transform", [0]), ("r", 0), ("r", "2"),
    ("lora_alpha", None), ("lora_alpha", NAN), ("target_modules", "all-linear"), ("target_modules", ["lm_head"]),
], ids=str)
def test_adapter_config_that_asks_for_something_else_is_refused(refused_adapter, adapter, key, value):
    folder = adapter(**{key: value})
    message = refused_adapter(folder)
    assert_says(message, folder / "adapter_config.json", key, "nan" if value is NAN else repr(value))


def test_adapter_of_other_layers_is_refused(refused_adapter, adapter):
    folder = adapter(target_modules=["q_proj", "v_proj"])
    message = refused_adapter(folder)
    assert_says(message, folder, "missing", "model.layers.0.self_attn.v_proj.lora_A.weight")
    assert "q_proj" not in message  # which fits


def test_adapter_of_another_width_is_refused(refused_adapter, adapter):
    folder = adapter(width=128)
    message = refused_adapter(folder)
    assert_says(message, folder, "another shape", "model.layers.0.self_attn.q_proj.lora_A.weight")
    assert "lora_B" not in message  # which fits


def test_missing_adapter_is_refused(refused_adapter, tmp_path):
    assert_says(refused_adapter(tmp_path / "nowhere"), tmp_path / "nowhere", "adapter_config.json")


def test_adapter_in_a_pickle_is_refused(refused_adapter, adapter):
    folder = adapter()
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert_says(refused_adapter(folder), folder, ".bin", "safetensors")


# ---------------------------------------------------------------- the tokenizer and its template


def test_model_without_tokenizer_is_refused(refused, golden):
    folder = golden("qwen2")
    assert_says(refused(folder), folder, "no tokenizer.json")


def test_damaged_tokenizer_is_refused(refused, shapes):
    (shapes / "tokenizer.json").write_text('{"version": "1.0"')
    assert_says(refused(shapes, "--random_init"), shapes / "tokenizer.json")


def test_tokenizer_of_a_larger_model_is_refused(refused, golden):
    folder = golden("qwen2")
    for file in TOKENIZER:
        shutil.copy(HERE / "tiny" / file, folder)
    assert_says(refused(folder), "beyond the model's 64 embeddings", "another model")


def test_template_with_a_syntax_error_is_refused(refused, tmp_path):
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    assert_says(refused("tiny", "--chat_template", tmp_path / "mine.jinja"), tmp_path / "mine.jinja", "line 2")


def test_template_file_that_is_missing_is_refused(refused, tmp_path):
    assert_says(refused("tiny", "--chat_template", tmp_path / "mine.jinja"), tmp_path / "mine.jinja", "No such file")


def test_template_file_that_is_not_utf8_is_refused(refused, tmp_path):
    (tmp_path / "mine.jinja").write_bytes(b"\xff\xfe")
    assert_says(refused("tiny", "--chat_template", tmp_path / "mine.jinja"), tmp_path / "mine.jinja", "UTF-8")


def test_template_that_objects_to_a_conversation_names_the_row(refused, tmp_path, chat):
    (tmp_path / "mine.jinja").write_text("{{ raise_exception('no system message') }}")
    message = refused("tiny", "--chat_template", tmp_path / "mine.jinja")
    assert_says(message, f"{chat}:1", "mine.jinja", "no system message")


# ---------------------------------------------------------------- the data


GOOD = json.dumps(CHAT) + "\n"


ROWS = {
    '{"text": "cut': ["JSON"],
    "[1, 2]": ["JSON object", "list"],
    '"text"': ["JSON object", "str"],
    "null": ["JSON object", "NoneType"],
    '{"question": "a", "answer": "b"}': ["question", "answer", "'messages'", "first row"],
    '{"messages": []}': ["'messages'", "list"],
    '{"messages": "hello"}': ["'messages'", "list"],
    '{"messages": ["hello"]}': ["'messages'", "objects"],
    '{"messages": [{"from": "human", "value": "a"}]}': ["role", "None"],
    '{"messages": [{"role": "user", "content": null}]}': ["'content'", "'user'"],
    '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}': ["'content'", "image_url"],
    '{"messages": [{"role": "gpt", "content": "a"}]}': ["gpt", "assistant"],
    '{"messages": [{"role": "user", "content": "\\udbd0\\udc00"}]}': ["U+104000"],
    '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]}': ["surrogate"],
    '{"messages": [], "id": ' + "1" * 5000 + "}": ["JSON"],
    "[" * 100_000: ["JSON"],
}


@pytest.mark.parametrize("line", ROWS, ids=lambda line: line[:50])
def test_bad_row_is_refused_by_file_and_line(refused_data, tmp_path, line):
    message = refused_data("bad.jsonl", GOOD + "\n" + line + "\n" + GOOD)
    assert_says(message, f"{tmp_path / 'bad.jsonl'}:3", *ROWS[line])


@pytest.mark.parametrize("name", ["bad.txt", "bad.jsonl"])
def test_data_that_is_not_utf8_is_refused_by_file(refused_data, tmp_path, name):
    assert_says(refused_data(name, b'{"text": "caf\xe9"}\n'), tmp_path / name, "UTF-8")


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
def test_empty_file_is_refused_by_name(refused_data, tmp_path, name):
    assert_says(refused_data(name, ""), tmp_path / name, "nothing to train on")


def test_empty_evaluation_file_is_refused_by_name(refused_data, tmp_path, chat):
    message = refused_data("empty.jsonl", "", "--data", chat, "--eval_data", tmp_path / "empty.jsonl")
    assert_says(message, tmp_path / "empty.jsonl", "nothing")


@pytest.mark.parametrize("name", ["data.parquet", "data.csv", "data.xml", "data"])
def test_file_of_another_format_is_refused(refused_data, tmp_path, name):
    message = refused_data(name, GOOD)
    assert_says(message, tmp_path / name, "expected a .jsonl, .json or .txt file")
    assert ("to_json" in message) == (name in ("data.parquet", "data.csv"))


def test_rows_of_no_known_format_are_refused_by_their_keys(refused_data, tmp_path):
    message = refused_data("dpo.jsonl", '{"chosen": "a", "rejected": "b"}\n')
    assert_says(message, f"{tmp_path / 'dpo.jsonl'}:1", "chosen", "'messages'", "'prompt' + 'completion'", "'text'")


@pytest.mark.parametrize("weight", ["0", "-1", "1e9", "1e"])
def test_weight_that_is_no_positive_number_is_refused(refused, chat, weight):
    assert_says(refused("tiny", "--data", f"{chat}:{weight}"), f"{chat}:{weight}", "positive number")


def test_data_of_which_hardly_anything_is_trained_on_is_refused(refused_data, tmp_path):
    long = {"messages": [{"role": "user", "content": "What? " * 200}, CHAT["messages"][1]]}
    message = refused_data("few.jsonl", (json.dumps(long) + "\n") * 2, "--seq_len", 1024)
    assert_says(message, tmp_path / "few.jsonl", "only ", "--inspect", "--min_supervised")


def test_cache_that_cannot_be_written_is_refused(refused, tmp_path, chat):
    (tmp_path / "file").write_text("mine")
    assert_says(refused("tiny", "--data_cache", tmp_path / "file"), tmp_path / "file")


@pytest.mark.parametrize("name", ["nowhere.jsonl", "stdlib:nothing"])
def test_missing_data_file_is_refused(refused, tmp_path, name):
    assert_says(refused("tiny", "--data", name), name, "no such file", "stdlib:docs")


def test_data_longer_than_a_row_is_refused(refused, chat):
    assert_says(refused("tiny", "--seq_len", 8), "nothing to train on", "2 longer than --seq_len 8", "the longest has")


def test_rows_of_one_token_predict_nothing_and_are_refused(refused_data):
    assert_says(refused_data("empty.jsonl", '{"prompt": "", "completion": ""}\n'), "without a supervised token")


def test_conversations_without_an_answer_are_not_blamed_on_the_template(refused_data):
    message = refused_data("asked.jsonl", json.dumps({"messages": CHAT["messages"][:1]}) + "\n")
    assert_says(message, "nothing to train on", "1 without a supervised token")
    assert "{% generation %}" not in message


def test_conversation_without_an_answer_among_others_is_left_out(refused_data):
    asked = json.dumps({"messages": CHAT["messages"][:1]}) + "\n"
    # two good rows make one packed row, and a step of two is refused: so the file was read to its end
    assert_says(refused_data("mixed.jsonl", GOOD + asked + GOOD, "--batch_size", 2), "the data makes 1 ")


def test_step_of_more_rows_than_the_data_has_is_refused(refused):
    message = refused("tiny", "--batch_size", 3, "--grad_accum", 5)
    assert_says(message, "15 rows", "--batch_size 3", "--grad_accum 5", "makes 1 ", "lower one")


# ---------------------------------------------------------------- --dry_run


def test_dry_run_of_an_unknown_model_is_refused(refused, tmp_path):
    message = refused(tmp_path / "nowhere", "--dry_run")
    assert_says(message, "train.py: error: ", tmp_path / "nowhere", "no such folder", "Hub id", "qwen3-0.6b")


def test_dry_run_of_a_config_that_is_not_implemented_is_refused(refused, shapes):
    edit_json(shapes / "config.json", model_type="gpt2")
    assert_says(refused(shapes, "--dry_run"), "train.py: error: ", shapes, "gpt2", "qwen3")


def test_replicas_that_the_ranks_do_not_make_are_refused(refused):
    assert_says(refused("tiny", "--fsdp2", "--replicas", 2), "--replicas 2", "1 rank", "torchrun")
    assert_says(refused("tiny", "--fsdp2", "--replicas", 3, "--dry_run", "--world", 8), "--replicas 3", "8 rank", "1, 2, 4, 8")


def test_places_that_cannot_be_written_to_are_named_with_their_flag(refused, tmp_path, chat):
    (tmp_path / "file").write_text("")
    assert_says(refused("tiny", "--out", tmp_path / "file"), f"--out {tmp_path}/file", "is a file", "folder")
    assert_says(refused("tiny", "--out", tmp_path / "file/below"), f"--out {tmp_path}/file/below", "Not a directory")
    assert_says(refused("tiny", "--data_cache", tmp_path / "file"), tmp_path / "file", "--data_cache")
    assert_says(refused("tiny", "--chat_template", tmp_path / "none.jinja"), tmp_path / "none.jinja", "No such file")
    assert_says(refused("tiny", "--data", tmp_path), tmp_path, "a folder", ".jsonl")
    (tmp_path / "wide.jsonl").write_bytes(chat.read_text().encode("utf-16"))
    assert_says(refused("tiny", "--data", tmp_path / "wide.jsonl"), "wide.jsonl", "UTF-16", "iconv")


def test_tensorboard_without_its_package_is_refused(refused, monkeypatch):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    assert_says(refused("tiny", "--tensorboard"), "--tensorboard", "pip install tensorboard")


def test_groups_of_ranks_that_cannot_share_the_rows_are_refused(refused):
    # before anything is downloaded
    assert_says(refused("nobody/nothing", "--sequence_parallel", 2), "--sequence_parallel 2", "1 rank", "torchrun")
    assert_says(refused("tiny", "--sequence_parallel", 4, "--dry_run", "--world", 6), "--sequence_parallel 4", "6 rank",
                "1, 2, 3, 6", "--world")
    # 14 query heads
    assert_says(refused("qwen2.5-0.5b", "--sequence_parallel", 4, "--dry_run", "--world", 28),
                "--sequence_parallel 4", "14 attention heads", "28 ranks: 1, 2, 7, 14")


def test_dry_run_of_a_missing_adapter_is_refused(refused, tmp_path):
    assert_says(refused("tiny", "--dry_run", "--lora", "--adapter", tmp_path / "nowhere"), tmp_path / "nowhere")


# ---------------------------------------------------------------- the run's folder


@pytest.mark.parametrize("left", ["args.json", "final"])
def test_folder_that_holds_a_run_is_not_overwritten(refused, tmp_path, left):
    taken = tmp_path / "taken"
    (taken / left).mkdir(parents=True)
    assert_says(refused("tiny", "--out", taken), taken, "holds a run", "another folder")
    assert [path.name for path in taken.iterdir()] == [left]


def test_out_that_is_a_file_is_refused(refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert_says(refused("tiny", "--out", tmp_path / "file"), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
