"""Holds config.json files as the Hub has them, and adapters as PEFT writes them, against transformers and PEFT.

    python tests/check_folders.py               # two minutes on two cores, no GPU, no network
    python tests/check_folders.py configs

Run by hand, never by pytest: it needs what check_peers.py needs. Each config has the keys of a model's own file, those
that nobody reads included, and the values that decide what is computed; its sizes are tiny. transformers makes random
weights for it, and both sides must compute the same logits from the folder. An adapter is trained by one step of noise,
saved by PEFT, and gives the same logits here, or is refused by a message that names the key and what to do.
"""

import argparse
import copy
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import peft
import torch
import transformers
from check_peers import OTHER, TINY, TOKENIZER_FILES, check, class_of, end, random_model, same, shutil
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
import train as trainer

# ---------------------------------------------------------------- config.json

# what stands in most files and changes nothing
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02,
    "max_position_embeddings": 4096, "num_key_value_heads": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0", "use_cache": True}
MISTRAL = LLAMA | {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 32768,
    "sliding_window": 48}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 32768,
    "max_window_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.1",
    "use_cache": True, "use_sliding_window": False}
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 32,
    "max_position_embeddings": 40960, "rope_scaling": None, "sliding_window": None}
MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
    "mlp_only_layers": [], "moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts": 8,
    "num_experts_per_tok": 3, "output_router_logits": False, "router_aux_loss_coef": 0.001}
SMOLLM3 = LLAMA | {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "bos_token_id": None, "eos_token_id": 128012,
    "pad_token_id": 4, "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4,
    "layer_types": ["full_attention"] * 4, "no_rope_layers": [1, 1, 1, 0], "pretraining_tp": 2, "rms_norm_eps": 1e-06,
    "max_position_embeddings": 65536, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False}
SMOLLM3.pop("tie_word_embeddings")  # the file does not say it: transformers ties them
LLAMA3_ROPE = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 32,
               "rope_type": "llama3"}
LLAMA31 = LLAMA | {
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "max_position_embeddings": 131072,
    "mlp_bias": False, "rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "type": "yarn"}
QUANTIZED = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def less(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def hub_configs():
    """{name of a model: its config.json, but for sizes}."""
    deepseek = {"bos_token_id": 151646, "eos_token_id": 151643, "max_position_embeddings": 131072, "use_mrope": False,
                "sliding_window": 4096}
    no_rope = {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}, "dtype": "bfloat16"}
    text_of_35 = {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "eos_token_id": 248044,
        "full_attention_interval": 4, "head_dim": 32, "hidden_act": "silu", "initializer_range": 0.02,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 16,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "use_cache": True, "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default"}}
    qwen35 = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 30,
              "tie_word_embeddings": False, "video_token_id": 31, "vision_start_token_id": 32,
              "vision_end_token_id": 33, "text_config": text_of_35, "vision_config": {
                  "depth": 1, "hidden_size": 32, "intermediate_size": 32, "model_type": "qwen3_5", "num_heads": 2,
                  "out_hidden_size": 64}}
    return {
        "meta-llama/Llama-2-7b-hf": less(LLAMA, "num_key_value_heads", "rope_theta"),
        "meta-llama/Llama-2-13b-hf": less(LLAMA, "num_key_value_heads", "rope_theta") | {"pretraining_tp": 2},
        "meta-llama/Llama-2-70b-hf": less(LLAMA, "rope_theta") | {"torch_dtype": "float16"},
        "lmsys/vicuna-7b-v1.5": less(LLAMA, "rope_theta") | {"pad_token_id": 0, "num_key_value_heads": 4},
        "lmsys/vicuna-7b-v1.5-16k": LLAMA | {"rope_scaling": {"factor": 4.0, "type": "linear"}},
        "togethercomputer/LLaMA-2-7B-32K": LLAMA | {
            "rope_scaling": {"factor": 8.0, "type": "linear"}, "max_position_embeddings": 32768},
        "NousResearch/Yarn-Llama-2-7b-64k": LLAMA | {
            "rope_scaling": YARN | {"finetuned": True}, "max_position_embeddings": 256,
            "auto_map": {"AutoConfig": "configuration_llama.LlamaConfig"}},
        "NousResearch/Yarn-Llama-2-13b-128k": LLAMA | {
            "rope_scaling": YARN | {"factor": 32.0, "finetuned": True}, "pretraining_tp": 2,
            "max_position_embeddings": 2048},
        "codellama/CodeLlama-7b-hf": LLAMA | {"rope_theta": 1000000, "max_position_embeddings": 16384},
        "codellama/CodeLlama-34b-hf": LLAMA | {"rope_theta": 1000000, "num_key_value_heads": 1},
        "deepseek-ai/deepseek-coder-6.7b-base": LLAMA | {
            "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000, "bos_token_id": 32013},
        "deepseek-ai/deepseek-llm-7b-base": LLAMA | {"rms_norm_eps": 1e-06, "bos_token_id": 100000},
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0": LLAMA | {"max_position_embeddings": 2048},
        "01-ai/Yi-6B": LLAMA | {"rope_theta": 5000000.0, "pad_token_id": 0},
        "HuggingFaceTB/SmolLM-135M": LLAMA | {"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0},
        "HuggingFaceTB/SmolLM2-135M-Instruct": LLAMA | {
            "tie_word_embeddings": True, "rope_theta": 100000, "rope_interleaved": False, "is_llama_config": True,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
        "HuggingFaceTB/SmolLM2-1.7B": LLAMA | {"tie_word_embeddings": True, "rope_theta": 130000},
        "tiiuae/Falcon3-7B-Base": less(LLAMA, "pretraining_tp") | {
            "head_dim": 32, "rope_theta": 1000042, "rms_norm_eps": 1e-06, "activation": "swiglu", "mlp_bias": False},
        "meta-llama/Meta-Llama-3-8B": LLAMA | {"rope_theta": 500000.0, "bos_token_id": 128000, "eos_token_id": 128001},
        "meta-llama/Meta-Llama-3-70B-Instruct": LLAMA | {"rope_theta": 500000.0, "eos_token_id": 128009},
        "NousResearch/Hermes-2-Pro-Llama-3-8B": LLAMA | {"rope_theta": 500000.0, "_name_or_path": "NousResearch/Meta"},
        "meta-llama/Llama-3.1-8B": LLAMA31,
        "meta-llama/Llama-3.1-405B": LLAMA31 | {"num_key_value_heads": 1},
        "meta-llama/Llama-3.2-1B": LLAMA31 | {
            "rope_scaling": LLAMA3_ROPE | {"factor": 32.0}, "tie_word_embeddings": True, "head_dim": 16},
        "meta-llama/Llama-3.2-3B-Instruct": LLAMA31 | {
            "rope_scaling": LLAMA3_ROPE | {"factor": 32.0}, "tie_word_embeddings": True, "head_dim": 32},
        "meta-llama/Llama-3.3-70B-Instruct": LLAMA31 | {"head_dim": 16},
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": LLAMA31 | {"eos_token_id": 128001},
        "unsloth/Llama-3.2-1B": LLAMA31 | {
            "rope_scaling": LLAMA3_ROPE | {"factor": 32.0}, "tie_word_embeddings": True, "unsloth_fixed": True,
            "pad_token_id": 40},
        "Llama-3.1-8B, saved by transformers 5": less(LLAMA31, "rope_scaling", "rope_theta", "torch_dtype") | {
            "rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}, "dtype": "bfloat16"},
        "mistralai/Mistral-7B-v0.1": MISTRAL,
        "mistralai/Mistral-7B-Instruct-v0.2": MISTRAL | {"sliding_window": None, "rope_theta": 1000000.0},
        "mistralai/Mistral-7B-v0.3": MISTRAL | {"sliding_window": None, "rope_theta": 1000000.0},
        "mistralai/Mistral-Nemo-Base-2407": MISTRAL | {
            "sliding_window": None, "rope_theta": 1000000.0, "head_dim": 32, "max_position_embeddings": 131072},
        "mistralai/Mistral-Small-24B-Base-2501": MISTRAL | {
            "sliding_window": None, "rope_theta": 100000000.0, "head_dim": 32},
        "mistralai/Ministral-8B-Instruct-2410": MISTRAL | {"rope_theta": 100000000.0, "head_dim": 32},
        "HuggingFaceH4/zephyr-7b-beta": MISTRAL | {"pad_token_id": 2},
        "teknium/OpenHermes-2.5-Mistral-7B": MISTRAL | {"eos_token_id": 32000, "use_cache": False},
        "NousResearch/Yarn-Mistral-7b-128k": MISTRAL | {
            "rope_scaling": YARN | {"factor": 16.0, "finetuned": True}, "max_position_embeddings": 1024},
        "Qwen/Qwen1.5-0.5B": QWEN2 | {"tie_word_embeddings": True, "num_key_value_heads": 4},
        "Qwen/Qwen1.5-7B-Chat": QWEN2 | {"num_key_value_heads": 4, "seq_length": 32768},
        "Qwen/Qwen2-0.5B": QWEN2 | {"tie_word_embeddings": True, "max_position_embeddings": 131072},
        "Qwen/Qwen2-7B-Instruct": QWEN2 | {"rope_theta": 1000000.0},
        "Qwen/Qwen2.5-0.5B": QWEN2 | {"tie_word_embeddings": True, "use_mrope": False},
        "Qwen/Qwen2.5-7B": QWEN2 | {"use_mrope": False, "max_position_embeddings": 131072},
        "Qwen/Qwen2.5-32B-Instruct, YaRN by its card": QWEN2 | {
            "rope_scaling": YARN, "max_position_embeddings": 64},
        "Qwen/Qwen2.5-Coder-1.5B": QWEN2 | {"tie_word_embeddings": True, "rope_theta": 1000000.0},
        "Qwen/Qwen2.5-Math-7B": QWEN2 | {"rope_theta": 10000, "max_position_embeddings": 4096},
        "Qwen/QwQ-32B": QWEN2 | {"max_position_embeddings": 40960, "eos_token_id": 151645},
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": QWEN2 | deepseek | {"rope_theta": 10000},
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": QWEN2 | deepseek | {"max_window_layers": 64},
        "Qwen2.5-7B with attn_factor": QWEN2 | {
            "rope_scaling": YARN | {"attn_factor": 1.0}, "max_position_embeddings": 64},
        "Qwen2.5-0.5B, saved by transformers 5": less(QWEN2, "rope_theta", "torch_dtype") | {
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "dtype": "bfloat16",
            "layer_types": ["full_attention"] * 4, "tie_word_embeddings": True},
        "Qwen/Qwen3-0.6B": QWEN3 | {"tie_word_embeddings": True},
        "Qwen/Qwen3-8B": QWEN3,
        "Qwen/Qwen3-4B-Thinking-2507": QWEN3 | {"rope_theta": 5000000, "max_position_embeddings": 262144},
        "Qwen/Qwen3-32B, YaRN by its card": QWEN3 | {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        "Qwen/Qwen3-30B-A3B": MOE,
        "Qwen/Qwen3-Coder-30B-A3B-Instruct": MOE | {
            "rope_theta": 10000000, "shared_expert_intermediate_size": 0, "qkv_bias": False, "use_qk_norm": True},
        "Qwen/Qwen3-235B-A22B": MOE | {"num_key_value_heads": 1},
        "HuggingFaceTB/SmolLM3-3B": SMOLLM3,
        "HuggingFaceTB/SmolLM3-3B-Base": SMOLLM3 | {"eos_token_id": 128001, "use_cache": False},
        "SmolLM3 without a theta": less(SMOLLM3, "rope_theta", "rope_scaling"),
        "Qwen/Qwen3.5-9B": qwen35,
        "Qwen/Qwen3.5-0.8B": qwen35 | {"tie_word_embeddings": True,
                                       "text_config": text_of_35 | {"tie_word_embeddings": True}},
        "Llama-2-7b, saved by transformers 5": less(LLAMA, "rope_scaling", "rope_theta", "torch_dtype") | no_rope,
    }


SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512}


def loaded(*flags):
    """train.py's model of these flags, with its weights."""
    args = trainer.parse_args([*map(str, flags), "--precision", "fp32"])
    found = trainer.open_model(args, trainer.Ranks(False, 1800))
    model = found.model
    model.to_empty(device="cpu").tie_()
    data.load_weights_(model, found.reader, found.adapter_reader, 0, torch.device("cpu"))
    return model.eval()


def copy_tokenizer(folder):
    for file in TOKENIZER_FILES:
        shutil.copyfile(TINY / file, folder / file)


def check_configs(folder):
    tokens = torch.randint(0, 512, (1, 200), generator=torch.Generator().manual_seed(1))
    for number, (name, config) in enumerate(hub_configs().items()):
        path = folder / f"config-{number}"
        path.mkdir()
        if "text_config" in config:
            config = config | {"text_config": config["text_config"] | SIZES}
        else:
            config = config | SIZES
        copy_tokenizer(path)
        (path / "config.json").write_text(json.dumps(less(config, "auto_map")))
        model = random_model(transformers.AutoConfig.from_pretrained(path), number).eval().float()  # of what is in bf16
        is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        tensors = {key: value.contiguous() for key, value in model.state_dict().items()
                   if not (is_tied and key == "lm_head.weight")}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config))  # as it is on the Hub
        try:
            mine = loaded("--model", path)(tokens)
        except (ValueError, SystemExit) as error:
            check(name, False, str(error)[:300])
            continue
        same(name, mine, model(tokens).logits)
    quantized = folder / "config-quantized"
    shutil.copytree(folder / "config-0", quantized)
    raw = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(raw | {"quantization_config": QUANTIZED}))
    # the weights decide: whoever has dequantized them may have left the key
    plain = loaded("--model", folder / "config-0")(tokens)
    same("a quantization_config beside weights in 16 bits", loaded("--model", quantized)(tokens), plain)


def refused(what, words, *flags):
    try:
        loaded(*flags)
    except (ValueError, SystemExit) as error:
        lost = [word for word in words if word not in str(error)]
        check(f"{what} is refused", not lost, f"{str(error)[:250]!r}{f', which lacks {lost}' if lost else ''}")
    else:
        check(f"{what} is refused", False, "loaded")


# ---------------------------------------------------------------- adapters


class Adapter(NamedTuple):
    settings: dict  # of LoraConfig
    base: str = "untied"
    resized: bool = False
    has_tokenizer: bool = True  # beside the adapter, as TRL saves it
    words: tuple = ()  # of a refusal; none: it loads


BOTH = ["embed_tokens", "lm_head"]
MERGE = "merge it into its base"
ADAPTERS = {
    "q_proj": Adapter({"target_modules": ["q_proj"]}),
    "q_proj and v_proj of a tied model": Adapter({"target_modules": ["q_proj", "v_proj"]}, "tied"),
    "all-linear": Adapter({"target_modules": "all-linear"}),
    "a regular expression for all blocks": Adapter({"target_modules": r".*\.self_attn\.(q|k)_proj"}),
    "rsLoRA": Adapter({"target_modules": ["q_proj"], "use_rslora": True}),
    "dropout": Adapter({"target_modules": ["up_proj"], "lora_dropout": 0.1}),
    "gaussian": Adapter({"target_modules": ["down_proj"], "init_lora_weights": "gaussian"}),
    "Qwen3.5": Adapter({"target_modules": ["q_proj", "in_proj_qkv", "up_proj"]}, "qwen3.5"),
    "embedding and head": Adapter({"target_modules": ["q_proj"], "modules_to_save": BOTH}),
    "embedding and head, tied": Adapter(
        {"target_modules": ["q_proj"], "modules_to_save": BOTH, "ensure_weight_tying": True}, "tied"),
    "resized": Adapter({"target_modules": ["q_proj"]}, resized=True),
    "resized, tied": Adapter({"target_modules": ["q_proj"]}, "tied", resized=True),
    "resized, embedding and head": Adapter({"target_modules": ["q_proj"], "modules_to_save": BOTH}, resized=True),
    "resized, embedding and head, tied": Adapter(
        {"target_modules": ["q_proj"], "modules_to_save": BOTH, "ensure_weight_tying": True}, "tied", resized=True),
    "resized, the embedding": Adapter(
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, resized=True),
    "resized, without its tokenizer": Adapter(
        {"target_modules": ["q_proj"], "modules_to_save": BOTH}, resized=True, has_tokenizer=False,
        words=("no tokenizer.json", "4,104", "save the tokenizer")),
    "the embedding alone": Adapter(
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, words=("modules_to_save", MERGE)),
    "a norm": Adapter({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, words=("modules_to_save", MERGE)),
    "layers_to_transform": Adapter(
        {"target_modules": ["q_proj"], "layers_to_transform": [0]}, words=("layers_to_transform", MERGE)),
    "a regular expression for one block": Adapter(
        {"target_modules": r"model\.layers\.1\.self_attn\.q_proj"}, words=("missing: ", "layers.0.", MERGE)),
    "names of one block": Adapter(
        {"target_modules": ["layers.0.self_attn.q_proj"]}, words=("missing: ", "layers.1.", MERGE)),
    "DoRA": Adapter({"target_modules": ["q_proj"], "use_dora": True}, words=("use_dora", MERGE)),
    "rank_pattern": Adapter(
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 8}}, words=("rank_pattern", MERGE)),
    "biases": Adapter({"target_modules": ["q_proj"], "bias": "lora_only"}, words=("bias", MERGE)),
    "PiSSA": Adapter({"target_modules": ["q_proj"], "init_lora_weights": "pissa"}, words=("init_lora_weights", MERGE)),
    "the head": Adapter({"target_modules": ["q_proj", "lm_head"]}, words=("lm_head", MERGE)),
    "the embedding as an adapter": Adapter(
        {"target_modules": ["q_proj", "embed_tokens"]}, words=("embed_tokens", MERGE)),
    "trainable_token_indices": Adapter(
        {"target_modules": ["q_proj"], "trainable_token_indices": [1]}, words=("trainable_token_indices", MERGE)),
    "Qwen3.5 without language_model": Adapter(
        {"target_modules": ["q_proj"]}, "qwen3.5 text", words=("unexpected: ", "language_model", MERGE)),
    "Qwen3.5 with its tower": Adapter(
        {"target_modules": ["q_proj", "linear_fc1"]}, "qwen3.5", words=("linear_fc1", MERGE)),
    "Muse Glimmer with its tower": Adapter(
        {"target_modules": ["q_proj"]}, "muse", words=("unexpected: ", "vision", MERGE)),
}


def write_bases(folder):
    """{name: folder of a model}, with the built-in tokenizer."""
    t = transformers
    shape = dict(vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    text = shape | dict(
        head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        full_attention_interval=2, rope_parameters={"rope_type": "default", "rope_theta": 1e6,
                                                    "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 2]})
    tower = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64)
    muse = shape | dict(head_dim=32, num_hidden_layers=4, sliding_window=32)
    configs = {
        "untied": t.LlamaConfig(**shape), "tied": t.Qwen2Config(**shape, tie_word_embeddings=True),
        "qwen3.5": t.Qwen3_5Config(text_config=text, vision_config=tower),
        "muse": t.MuseGlimmerConfig(text_config=muse, out_hidden_size=32, projector_hidden_size=32, vision_config=dict(
            num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2))}
    for seed, (name, config) in enumerate(configs.items()):
        random_model(config, seed).save_pretrained(folder / name)
        copy_tokenizer(folder / name)
    return {name: folder / name for name in configs}


def check_adapters(folder):
    bases = write_bases(folder)
    tokens = torch.randint(0, 4096, (1, 96), generator=torch.Generator().manual_seed(1))
    for number, (name, case) in enumerate(ADAPTERS.items()):
        base = bases[case.base.split()[0]]
        kind = class_of(transformers.AutoConfig.from_pretrained(base))
        if case.base.endswith("text"):
            kind = transformers.Qwen3_5ForCausalLM
        model = kind.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(base)
        if case.resized:
            tokenizer.add_special_tokens({"additional_special_tokens": [f"<{i}>" for i in range(8)]})
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        settings = copy.deepcopy(case.settings)  # PEFT appends to its lists
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings))
        torch.manual_seed(number)
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p), alpha=0.1)
        path = folder / f"adapter-{number}"
        model.save_pretrained(path)
        if case.has_tokenizer:
            tokenizer.save_pretrained(path)
        if case.words:
            refused(f"adapter, {name},", case.words, "--model", base, "--adapter", path)
            continue
        logits = model.eval()(tokens).logits
        try:
            with_adapter = loaded("--model", base, "--adapter", path)
        except (ValueError, SystemExit) as error:
            check(f"adapter, {name}", False, str(error)[:300])
            continue
        same(f"adapter, {name}", with_adapter(tokens), logits)
        plain = loaded("--model", base)(tokens)
        difference = (plain - logits[..., :4096]).abs().max().item()
        check(f"adapter, {name}, against the base", difference > OTHER,
              f"max abs difference {difference:.2f}, as it should")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("parts", nargs="*", default=["configs", "adapters"])
    args = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}: "
          f"{len(hub_configs())} configs, {len(ADAPTERS)} adapters", flush=True)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        if "configs" in args.parts:
            check_configs(Path(folder))
        if "adapters" in args.parts:
            check_adapters(Path(folder))
    end()


if __name__ == "__main__":
    main()
