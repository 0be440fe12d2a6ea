"""The memory plan against the bytes that torch's allocator hands out: rank 0 of N, every flag, within 5 %.

A run under torch's fake process group (collectives that move nothing) is rank 0 of any number of ranks in one process,
and torch.profiler's memory events count each allocation of the CPU allocator, kernels' temporaries included.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import HERE, SHAPE, start_fake_group, start_ranks

MODELS = {
    "gqa": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 768,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 6},
    "mha": {"num_key_value_heads": 8},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "tied": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "wide": {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_hidden_layers": 8},
}
CASES = [  # model, tokens in a row, ranks, flags
    ("gqa", 1024, 1, ""),
    ("gqa", 2048, 1, "--lora"),
    ("mha", 2048, 1, "--lora --tiled_mlp 256"),
    ("gqa", 1024, 1, "--qlora --precision mixed"),
    ("qwen3", 2048, 1, "--lora --precision bf16"),
    ("wide", 64, 1, "--qlora --ce_chunk 16"),
    ("gqa", 1024, 1, "--no-activation_checkpointing --precision mixed"),
    ("gqa", 1024, 1, "--no-chunked_ce"),
    ("gqa", 1024, 1, "--lora --ce_chunk 128 --batch_size 2"),
    ("gqa", 1024, 1, "--lora --lora_dropout 0.1 --lora_targets q_proj v_proj down_proj"),
    ("gqa", 1024, 1, "--lora --offload activations"),
    ("wide", 512, 1, "--optim adamw8bit --ce_chunk 128"),
    ("wide", 512, 1, "--optim_in_backward"),
    ("wide", 512, 1, "--optim_in_backward --optim adamw8bit --precision bf16 --stochastic_rounding"),
    ("wide", 512, 1, "--no-fused_adamw"),
    ("gqa", 1024, 1, "--grad_accum 2 --precision bf16"),
    ("gqa", 1024, 2, "--fsdp2"),
    ("gqa", 2048, 4, "--fsdp2 --precision mixed"),
    ("wide", 1024, 8, "--fsdp2 --offload"),
    ("wide", 2048, 8, "--fsdp2 --qlora --offload --tiled_mlp 512"),
    ("gqa", 1024, 2, "--fsdp2 --no-reshard_after_forward"),
    ("gqa", 1024, 2, "--fsdp2 --no-shard_embeddings --lora"),
    ("tied", 1024, 3, "--fsdp2"),
    ("gqa", 1024, 2, "--fsdp2 --grad_accum 2 --no-activation_checkpointing"),
    ("wide", 512, 4, "--fsdp2 --optim_in_backward"),
    ("wide", 512, 4, "--fsdp2 --replicas 2 --optim_in_backward"),
    ("wide", 512, 4, "--fsdp2 --replicas 2 --optim_in_backward --precision bf16"),
    ("gqa", 1024, 8, "--fsdp2 --replicas 2"),
    ("wide", 512, 4, "--fsdp2 --replicas 4 --lora --grad_accum 2"),
    ("gqa", 4096, 4, "--fsdp2 --sequence_parallel 4"),
    ("mha", 4096, 2, "--lora --sequence_parallel 2 --no-activation_checkpointing"),
]


def count(argv, world, result):
    """Runs train.main as rank 0 of `world`, up to the export, and writes planned and counted bytes."""
    import numpy as np
    import torch
    from torch.profiler import profile

    import model as lm
    import train

    def init_processes(distributed, timeout):
        if world > 1 or distributed:
            start_fake_group(world)
        return torch.device("cpu"), 0, world, None

    seen, load, parse = {}, lm.load_weights_, train.parse_args

    def parse_args(argv):
        seen["args"] = args = parse(argv)
        seen["offload"] = list(args.offload)
        return args

    def load_weights_(model, *rest, frozen_only):
        fingerprint = load(model, *rest)
        seen["config"] = model.config
        if "activations" in seen["offload"]:  # a CPU run would not; here numpy's memory stands for the host's
            train.OffloadActivations.buffer = lambda self, n: [torch.from_numpy(np.empty(n, np.uint8))]
            model.activation_hooks = train.OffloadActivations(torch.device("cpu"))
        return fingerprint

    def stop(*_):
        profiler.stop()
        events = []

        def walk(tree):
            for event in tree:
                if event.tag.name == "Allocation":
                    events.append((event.start_time_ns, event.typed[1].total_allocated, event.typed[1].alloc_size))
                walk(event.children)

        walk(profiler.profiler.kineto_results.experimental_event_tree())
        _, total, size = min(events)
        args = seen["args"]
        moments, host = train.plan(args, seen["config"], world, train.tokens_of(args, args.seq_len), False)
        host.pop("activations", None)  # not torch's
        here = {name: sum(kinds.values()) + sum(host.values()) for name, kinds in moments.items()}
        here["head and loss"] -= host.get("gradients", 0)  # there are none on the host yet
        figures = {"planned": max(here.values()), "counted": max(event[1] for event in events) - (total - size)}
        Path(result).write_text(json.dumps(figures | {"moments": here, "host": sum(host.values())}))
        os._exit(0)

    train.init_processes, train.parse_args, train.export, lm.load_weights_ = init_processes, parse_args, stop, load_weights_
    profiler = profile(profile_memory=True)
    profiler.start()
    train.main(argv)


def write_models(root):
    """{name: folder} of the models, and a text that fills every row."""
    paths = {}
    for name, changes in MODELS.items():
        paths[name] = root / name
        paths[name].mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(HERE / "tiny" / file, paths[name])
        config = SHAPE | MODELS["gqa"] | changes | {"max_position_embeddings": 4096}
        (paths[name] / "config.json").write_text(json.dumps(config))
    paths["text"] = root / "text.txt"
    paths["text"].write_text("the file is read from disk and returned as a list of str self None import def " * 3000)
    return paths


def run_counted(folders, out, model, tokens, world, flags):
    """A run of one step, at whose start all state exists -> {"planned", "counted", "host": bytes, "moments": {name: bytes}}."""
    argv = ["--model", folders[model], "--random_init", "--data", folders["text"], "--seq_len", tokens, "--steps", 1,
            "--precision", "fp32", "--sample", "", "--save_every", 0, "--out", out / "out", *flags.split()]
    log, result = out / "log", out / "result"
    codes = start_ranks(1, count, ([str(arg) for arg in argv], world, str(result)), [log])
    assert codes == [0], log.read_text()
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("plan"))


@pytest.mark.parametrize("model, tokens, world, flags", CASES)
def test_the_plan_is_what_the_allocator_counts(folders, tmp_path, model, tokens, world, flags):
    figures = run_counted(folders, tmp_path, model, tokens, world, flags)
    print({name: f"{n / 2**20:.1f}" for name, n in figures["moments"].items()}, f"counted {figures['counted'] / 2**20:.1f}")
    # what is not modelled: scratch of a kernel, a [T] tensor here and there, the order in which autograd frees
    assert figures["planned"] == pytest.approx(figures["counted"], rel=0.05)


@pytest.mark.parametrize("flags", ["", "--qlora --precision mixed", "--optim adamw8bit", "--precision bf16"])
def test_the_copy_of_async_save_is_the_training_state(folders, flags):
    import model as lm
    import nf4
    import train

    args = train.parse_args(["--precision", "fp32", "--async_save", *flags.split()])
    config = lm.parse_config(lm.read_json(folders["tied"] / "config.json"))
    model = lm.Transformer(config)
    if args.qlora:
        nf4.quantize_linears_(model.model.layers)
        lm.add_lora_(model, args.lora_rank, args.lora_alpha, 0.0, args.lora_targets)
    train.set_precision_(model, args.precision)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = train.make_optimizer(trained, 1e-3, 0.0, True, args.optim == "adamw8bit")
    sizes = [t.nbytes for t in train.training_tensors(model, optimizer).values() if t.dim()]
    assert train.plan(args, config, 1, 64, cuda=False)[1] == {"copy of a checkpoint": sum(sizes)}
    pinned = sum(1 << (n - 1).bit_length() for n in sizes)  # torch's allocator of pinned memory rounds up
    assert train.plan(args, config, 1, 64, cuda=True)[1] == {"copy of a checkpoint": pinned}


def test_what_goes_between_replicas_waits_on_the_device():
    import model as lm
    import train

    def gradients(*flags):  # GiB at the end of the backward
        args = train.parse_args(["--model", "llama-3-8b", "--dry_run", "--fsdp2", "--offload", "params", *flags])
        moments, _ = train.plan(args, lm.parse_config(lm.preset_config("llama-3-8b")), 8, 2048, cuda=True)
        return moments["embedding's gradient"]["gradients"] / 2**30

    # float32 shards of 8 billion parameters over 4 ranks are 7.5 GiB; without replicas all of them are on the host by then
    for more in ([], ["--grad_accum", "2"]):
        assert gradients("--replicas", "2", *more) - gradients(*more) == pytest.approx(7.5, abs=0.3)
