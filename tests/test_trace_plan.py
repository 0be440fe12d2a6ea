"""The memory plan against a trace of whole steps, at the real sizes of every preset. The plan puts traces of single
blocks together and extends short rows to long ones; here a model of three blocks runs in one piece, and with FSDP2 one
of sixteen. What no trace sees, --offload activations, test_plan.py counts."""

import dataclasses
import itertools
import math
import pkgutil
import re
import sys

import conftest  # noqa: F401  (puts train.py on the path)
import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import data
import model as lm
import train

SETTINGS = [
    "",
    "--lora",
    "--qlora",
    "--activation_checkpointing 0",
    "--lora --activation_checkpointing 0 --lora_dropout 0.1",
    "--qlora --activation_checkpointing 1",
    "--tiled_mlp 1024",
    "--lora --tiled_mlp 1024 --activation_checkpointing 0",
    "--precision fp32 --activation_checkpointing 1",
    "--precision fp32 --qlora",
    "--precision bf16 --activation_checkpointing 0",
    "--precision bf16 --tiled_mlp 1024 --no-chunked_ce",
    "--qlora --lora_dropout 0.1",
    "--qlora --gpu_gib 400",  # keeps all NF4 weights in 16 bits
    "--lora --lora_targets q_proj v_proj",  # of Qwen3.5, blocks below the first adapter
    "--lora --lora_targets down_proj --activation_checkpointing 0",
    "--grad_accum 2",
    "--optim_in_backward",
    "--dpo --lora",
    "--fsdp2 --batch_size 2",
    "--qlora --sequence_parallel 2",
]
# with attention alone and beside Gated DeltaNet
WITH_NF5 = [
    ("llama-3.1-8b", "--qlora --nf5 --activation_checkpointing 1"),
    ("qwen3.5-27b", "--qlora --nf5 out_proj down_proj"),
]
# of a tied pair, a dense model, experts, Gated DeltaNet, and a norm of the embedding
WITH_EMBEDDINGS = [
    ("qwen3-0.6b", "--qlora --train_embeddings"),
    ("llama-3.1-8b", "--lora --train_embeddings --lora_targets q_proj v_proj --activation_checkpointing 0"),
    ("qwen3-30b-a3b", "--qlora --train_embeddings --grad_accum 2"),
    ("qwen3.5-9b", "--lora --train_embeddings"),
    ("muse-glimmer-30b", "--qlora --train_embeddings"),
]
# of cards without FlashAttention, on a model of each kind
ON_OLD_CARDS = [
    "--precision fp16 --lora --activation_checkpointing 0",
    "--precision fp16 --qlora --activation_checkpointing 1",
    "--precision fp16 --tiled_mlp 1024",
    "--precision fp16 --dpo --lora",  # two documents, each with a call of its own
]
KINDS = "llama-2-7b", "llama-3.1-8b", "qwen3-4b", "qwen3-30b-a3b", "qwen3.5-9b", "muse-glimmer-30b"
# what o_proj reads is no tensor that attention has saved
WITH_COPIES = [
    ("llama-3.1-8b", "--lora --lora_targets q_proj v_proj --sequence_parallel 2 --activation_checkpointing 0"),
    ("llama-2-7b", "--precision fp16 --lora --sequence_parallel 2 --activation_checkpointing 0"),
    ("qwen3.5-9b", "--lora --sequence_parallel 2 --activation_checkpointing 0"),
    ("qwen3.5-9b", "--precision fp32 --qlora --sequence_parallel 2"),
]
# of experts with adapters in attention alone: what nothing saves is the most of a recomputation
OF_EXPERTS = [
    ("qwen3-30b-a3b", "--precision fp16 --lora --lora_targets q_proj v_proj"),
    ("qwen3.5-35b-a3b", "--lora --lora_targets q_proj v_proj --batch_size 4"),
    ("qwen3-30b-a3b", "--lora --lora_targets gate_proj up_proj --batch_size 4"),
]
# of weights whose gradients are taken one by one, in the dtype of products first or not
TAKEN = [
    ("llama-3.1-8b", "--optim_in_backward"),
    ("llama-2-7b", "--optim_in_backward --precision fp32"),
    ("qwen3.5-9b", "--optim_in_backward --tiled_mlp 1024"),
    ("qwen3-30b-a3b", "--optim_in_backward --batch_size 8"),
    ("qwen3-30b-a3b", "--grad_accum 2 --tiled_mlp 1024"),
]
# of windows shorter than rows: four in a row, and in each of two rows four and a short one
IN_WINDOWS = [
    ("--precision fp16 --lora", 512),
    ("--precision fp16 --lora --activation_checkpointing 0 --no-compile", 512),
    ("--precision fp16 --lora --tiled_mlp 256", 512),
    ("--precision fp16 --qlora --batch_size 2 --no-compile", 500),
]
N_TOKENS = 2048  # two tiles, two chunks of the loss, two segments of Gated DeltaNet


def every_second_uncompiled(cases):
    """(preset, setting) of cases; without a flag the plan of such a model is one with --compile."""
    for number, (preset, setting) in enumerate(cases):
        yield preset, f"{setting} --no-compile" if number % 2 else setting


def cases():
    """(preset, setting): two settings for each preset, all of them in turn, and those of old cards."""
    yield from itertools.product(KINDS, ON_OLD_CARDS)
    turns = itertools.cycle(SETTINGS)
    for preset in data.PRESETS:
        for _ in range(2):
            yield preset, next(turns)
    yield from WITH_EMBEDDINGS
    yield from WITH_NF5
    yield from WITH_COPIES
    yield from OF_EXPERTS
    yield from TAKEN


def few_blocks(config):
    """A block that may be below the first adapter, one of another kind if there is one, and one above."""
    kinds = list(dict.fromkeys(config.layer_types))
    layer_types = [kinds[0], kinds[-1], kinds[0]]
    return dataclasses.replace(
        config, num_hidden_layers=3, layer_types=layer_types, rope_layers=config.rope_layers[:3])


def opened(flags):
    """Flags of a run -> (args, config), args without what a trace does not see."""
    args = train.parse_args([*flags.split(), "--dry_run"])
    config = train.open_config(args, args.world or 1, device=None, random_init=True).config
    if args.fsdp2 and args.precision == "mixed":
        args.precision = "bf16"  # a gathered weight, and its gradient, are in 16 bits
    args.fsdp2 = False
    args.replicas = 1
    args.offload = []
    return args, config


NOT_TRACED = "weights", "quantized weights", "adapters", "optimizer"  # kinds of bytes


def planned_bytes(args, config, blocks):
    """The most bytes of a step but for its last part, optimizer.step(), without weights and optimizer state."""
    events, _ = train.events_and_host(train.Run(args, config, 1, args.seq_len), blocks)
    return max(event.kinds.total() - sum(event.kinds[kind] for kind in NOT_TRACED)
               for event in events if event.moment != "step")


def traced_bytes(args, config, blocks):
    """The same of a step that runs in one piece."""
    weights = train.weights_of(train.Run(args, config, 1, args.seq_len), config)
    with lm.on_paper() as live:
        model = train.model_on_paper(config, args, blocks)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if args.optim_in_backward:
            train.update_in_backward(model, weights)
        before = live.alive
        if args.grad_accum > 1:  # gradients of an earlier micro-batch
            for p in trained.values():
                p.grad = torch.empty_like(p)
        live.begin("step")
        loss, _ = train.loss_of(model, train.batch_on_paper(args, args.seq_len), args)
        live.in_backward = True
        loss.backward()
    return max(live.most["step"].values()) - before


def assert_plan_is_whole_step(flags, **changes):
    """changes: of the config."""
    args, config = opened(flags)
    config = dataclasses.replace(few_blocks(config), **changes)
    run = train.Run(args, config, 1, args.seq_len)
    blocks = train.choose_blocks(run, (args.gpu_gib or math.inf) * train.GIB)
    # that of two gradients of one tensor, and of a tied pair, the second is there a moment later or earlier
    assert planned_bytes(args, config, blocks) == pytest.approx(traced_bytes(args, config, blocks), rel=0.01)


@pytest.mark.parametrize("preset, setting", list(every_second_uncompiled(cases())))
def test_parts_put_together_are_a_whole_step(preset, setting):
    assert_plan_is_whole_step(f"--model {preset} --seq_len {N_TOKENS} --world 2 {setting}")


@pytest.mark.parametrize("setting, window", IN_WINDOWS)
def test_parts_put_together_are_a_whole_step_in_windows(setting, window):
    flags = f"--model muse-glimmer-30b --seq_len {N_TOKENS} --world 2 {setting}"
    assert_plan_is_whole_step(flags, sliding_window=window)


# of rows longer than three of the pieces that traced() measures
LONG = [
    ("llama-3.1-8b", 9000, "--qlora"),
    ("qwen3-4b", 5000, "--no-activation_checkpointing --batch_size 2"),
    ("llama-3.1-8b", 16384, "--precision bf16 --tiled_mlp 2048 --no-compile"),
    ("qwen3-30b-a3b", 8192, "--lora --tiled_mlp 1024 --activation_checkpointing 0 --no-compile"),
    ("qwen3.5-9b", 7000, "--lora"),
    ("llama-3.1-8b", 20000, "--lora --sequence_parallel 2"),
    ("qwen3.5-9b", 20000, "--qlora --sequence_parallel 2 --no-compile"),
    ("qwen3.5-9b", 9000, "--lora --gpu_gib 400"),  # all tokens of a Gated DeltaNet at once
    # in segments of 4,096
    ("qwen3.5-9b", 13000, "--lora --activation_checkpointing all --gpu_gib 14 --no-compile"),
    ("muse-glimmer-30b", 9000, "--precision fp16 --lora --no-compile"),  # windows of 2,048 tokens
]


@pytest.mark.parametrize("preset, length, setting", LONG)
def test_long_rows_are_told_by_short_ones(preset, length, setting):
    assert_plan_is_whole_step(f"--model {preset} --seq_len {length} --world 2 {setting}")


# With FSDP2 the blocks that stand for all others run together. Of a dense model, of one whose blocks differ, and of
# those that are below the first adapter.
SHARDED = [
    ("llama-3.1-8b", "--world 4"),
    ("llama-3.2-3b", "--world 3 --no-reshard_after_forward --grad_accum 2"),
    ("llama-3.1-8b", "--world 8 --replicas 2 --grad_accum 2 --offload params"),
    ("qwen3-30b-a3b", "--world 2 --qlora --offload params --grad_accum 2"),
    ("qwen3-4b", "--world 4 --replicas 2 --lora --grad_accum 2"),
    ("qwen3.5-9b", "--world 2 --lora"),
    ("qwen3.5-9b", "--world 2 --lora --lora_targets q_proj v_proj --activation_checkpointing 0"),
    ("qwen3.5-35b-a3b", "--world 4 --optim_in_backward --optim adamw8bit"),
    ("muse-glimmer-30b", "--world 1 --qlora --offload params"),
]


@pytest.mark.parametrize("preset, setting", SHARDED)
def test_few_sharded_blocks_tell_of_all(preset, setting):
    args = train.parse_args(f"--model {preset} --seq_len {N_TOKENS} --fsdp2 {setting} --dry_run".split())
    config = train.open_config(args, args.world, device=None, random_init=True).config
    config = train.of_blocks(config, range(16))
    run = train.Run(args, config, args.world, args.seq_len)
    blocks = train.blocks_as_asked(run)
    variants = train.variants_of_blocks(run, blocks)
    assert all(variant.config.num_hidden_layers < 16 for variant, _ in variants)
    moments, _ = train.plan(run, blocks)
    planned = max(kinds.total() - sum(kinds[kind] for kind in NOT_TRACED)
                  for moment, kinds in moments.items() if moment != "step")
    whole = train.trace_step(
        run, train.Variant(config, blocks, run.trains_vocabulary), run.length)
    before = next(iter(whole.values()))["start"]
    traced = max(max(most.values()) for most in whole.values()) - before
    assert planned == pytest.approx(traced, rel=0.002)


def test_memory_that_has_stood_for_the_hosts_is_counted_when_it_is_used_again():
    with lm.on_paper() as live:
        for _ in range(100):  # a new storage often gets the id of the last one that has gone
            torch.ones(8, device="meta").to("cpu")
            before = live.alive
            on_device = torch.empty(64, device="meta")
            assert live.alive == before + on_device.nbytes
            del on_device


def test_a_trace_may_meet_the_mesh_of_an_earlier_one(monkeypatch):
    for _ in range(2):
        monkeypatch.setattr(train, "TRACES", {})
        args = train.parse_args("--model llama-3.1-8b --fsdp2 --world 2 --dry_run".split())
        run = train.Run(args, train.open_config(args, 2, None, True).config, 2, 64)
        assert train.blocks_in_unit(run) == 1
        # a run begins and ends
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        dist.destroy_process_group()


class Float32Products(TorchDispatchMode):
    """Collects the names of operators that multiply float32 matrices."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        if PRODUCT.fullmatch(name) and any(t.dtype is torch.float32 for t in tensors):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


PRODUCT = re.compile(".*(mm|mv|dot|linear|convolution|einsum)_?")


@pytest.mark.parametrize("setting", ["", "--qlora --batch_size 2", "--dpo --lora --tiled_mlp 512"])
@pytest.mark.parametrize("preset", ["qwen3-30b-a3b", "qwen3.5-9b", "qwen3.5-35b-a3b", "muse-glimmer-30b"])
def test_gated_deltanet_alone_has_float32_products(preset, setting):
    """main lets a GPU round them to TF32, in each run that computes in 16 bits. Those of Gated DeltaNet are batched;
    linear layers, the head and the router would be mm."""
    args, config = opened(f"--model {preset} --seq_len {N_TOKENS} {setting}")
    with lm.on_paper():
        model = train.model_on_paper(few_blocks(config), args, train.Blocks(1))
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        with Float32Products() as found:
            loss, _ = train.loss_of(model, train.batch_on_paper(args, args.seq_len), args)
            loss.backward()
            train.make_optimizer(named, args, torch.zeros((), device="meta")).step()
    has_deltanet = "linear_attention" in config.layer_types
    assert found.names == ({"bmm", "baddbmm", "baddbmm_"} if has_deltanet else set())


def test_a_name_of_torch_that_is_private_is_there():
    """If it is not, model.n_holders() says what to write in its place, and what that costs."""
    t = torch.empty(3, device="meta")
    assert lm.n_holders(t.untyped_storage()) == 2
    same = t.view(3, 1)
    assert lm.n_holders(t.untyped_storage()) == 3
    del same


# What FSDP2 runs on the meta device with: ranks_on_paper() replaces these. If a later torch lacks one, a plan with
# --fsdp2 ends with an AttributeError that names it. What to do:
PRIVATE = {
    "torch.distributed.distributed_c10d._world": "find where init_process_group() puts what it makes",
    "torch.distributed.distributed_c10d._World": "the class of _world",
    "torch.distributed.distributed_c10d._group_count": "find what numbers the groups: see the test below",
    "torch._C._distributed_c10d._set_global_rank": "leave it out: it is for log lines",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._validate_no_meta_params":
        "find what refuses parameters on the meta device",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._validate_cpu_offload_params":
        "find what refuses parameters that are not on the CPU with --offload params",
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo":
        "leave LiveBytes' out: plans are a tenth slower",
    **{f"torch.distributed.distributed_c10d.{name}": "find where torch keeps its process groups"
       for name in train.GROUP_TABLES},
}


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_name_that_a_plan_assigns_is_there(name):
    assert pkgutil.resolve_name(name) is not None, PRIVATE[name]


def test_a_missing_name_is_an_error_and_not_assigned():
    with pytest.raises(AttributeError, match="no_such_name"), lm.replaced([(torch, "no_such_name", None)]):
        pass
    assert not hasattr(torch, "no_such_name")


def test_a_plan_beside_a_run_leaves_no_trace_in_torch():
    """Rank 0 alone may print a plan, and its next groups must have the names that they have on the other ranks."""
    before = sys.excepthook, distributed_c10d._world, distributed_c10d._group_count
    args, config = opened("--model llama-3.1-8b --world 2 --qlora")
    args.fsdp2 = True
    run = train.Run(args, config, 2, 1024)
    train.trace_step(run, train.Variant(few_blocks(config), train.Blocks(0), False), 128)
    assert before == (sys.excepthook, distributed_c10d._world, distributed_c10d._group_count)
    assert not hasattr(torch, "meta")
    assert not torch.distributed.is_initialized()
