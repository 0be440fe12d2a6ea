"""--offload params with adapters: frozen weights of some blocks stay on the GPU, those of the others come from host
memory ahead of their use. No bit depends on which. On one rank StreamedWeights brings them, and where ranks share the
weights FSDP2.

The tests run on the CPU, where copies are plain; those marked gpu add the side stream. test_cuda.py runs whole jobs,
and jobs that lack a guard."""

import functools
import itertools

import pytest
import torch
from conftest import MUSE, QWEN35, build, curve, random_model, run_ranks, start_ranks
from emulated_cuda import LOADED
from safetensors.torch import load_file

import data
import model as lm
import train

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
N_LAYERS = 5
N_LAYERS_OF_RUNS = 4  # two more than there are slots
STREAMS = ["--fsdp2", "--offload", "params"]
TWO_KINDS = QWEN35 | {"layer_types": [*QWEN35["layer_types"], "linear_attention"]}


# ---------------------------------------------------------------- whole runs


@pytest.fixture
def job(chats, tmp_path):
    """job(changes of SHAPE) -> the flags of a run that does not stream."""
    def flags(**changes):
        folder = random_model(tmp_path / "model", **{"num_hidden_layers": N_LAYERS_OF_RUNS} | changes)
        # The second step is the first whose forward finds in the slots what a backward has left there, and the first in
        # which all adapters have gradients.
        sizes = ["--seq_len", 96, "--batch_size", 4, "--steps", 2]
        # an adapter in each half of a block: it is the frozen weights that are streamed
        adapters = ["--lora_rank", 8, "--lora_targets", "v_proj", "down_proj"]
        flags = [*sizes, *adapters, "--precision", "fp32", "--lr", "1e-2"]
        return ["--model", folder, "--random_init", "--data", chats, *flags]

    return flags


@pytest.mark.parametrize("flags, changes, offload", [
    # an evaluation and a sample between two steps leave other blocks in the slots than a backward does
    pytest.param("--lora --eval_every 1 --sample hello --max_new_tokens 3", {}, "params", id="lora-eval"),
    pytest.param("--qlora --no-activation_checkpointing --grad_accum 2 --batch_size 2", {}, "params", id="qlora-keeps"),
    # below the first adapter nothing has a backward
    pytest.param("--lora --lora_targets down_proj --lora_dropout 0.2", {}, "params", id="lora-down"),
    # blocks of two kinds take turns in the slots
    pytest.param("--qlora", TWO_KINDS, "params activations", id="qwen3.5-offload"),
    pytest.param("--lora --tiled_mlp 100", MUSE | {"num_hidden_layers": 3}, "params", id="muse-tiled"),
    # embedding and head are one weight in host memory; without chunks the loss has a backward that needs the head
    pytest.param("--lora --no-chunked_ce --eval_every 1", {"tie_word_embeddings": True}, "params", id="tied-no-chunks"),
])
def test_losses_and_weights_are_bit_equal_however_many_blocks_are_resident(
        job, few_chats, tmp_path, flags, changes, offload):
    argv = [*job(**changes), *flags.split(), "--eval_data", few_chats]
    expected = curve(1, argv, tmp_path / "plain")
    expected_weights = load_file(tmp_path / "plain/final/adapter_model.safetensors")
    for n_resident in (0, 1, "all"):
        out = tmp_path / f"resident-{n_resident}"
        streams = ["--fsdp2", "--offload", *offload.split(), "--resident_blocks", n_resident]
        assert curve(1, [*argv, *streams], out) == expected
        weights = load_file(out / "final/adapter_model.safetensors")
        assert weights.keys() == expected_weights.keys()
        for name, tensor in weights.items():
            assert torch.equal(tensor, expected_weights[name]), name


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_resumes_bit_for_bit_with_another_number_of_resident_blocks(job, tmp_path, world):
    argv = [*job(), "--qlora", *STREAMS, "--steps", 3, "--log_every", 1]
    saves = ["--resident_blocks", 2, "--save_every", 1, "--keep", 9]
    whole, text, codes = run_ranks(world, [*argv, *saves], tmp_path / "whole")
    assert codes == [0] * world, text
    for n_resident in (0, "all"):
        resume = ["--resume", tmp_path / "whole/checkpoint-1", "--resident_blocks", n_resident]
        rows, text, codes = run_ranks(world, [*argv, *resume], tmp_path / f"again-{n_resident}")
        assert codes == [0] * world, text
        assert [row["loss"] for row in rows] == [row["loss"] for row in whole[1:]]
        assert [row["grad_norm"] for row in rows] == [row["grad_norm"] for row in whole[1:]]


@pytest.mark.parametrize("world, flags, changes, numbers", [
    pytest.param(2, "--lora --eval_every 1", {}, [2, "all"], id="2-lora-eval"),
    pytest.param(3, "--qlora --no-activation_checkpointing --grad_accum 2", {}, [2], id="3-qlora-keeps"),
    pytest.param(
        2, "--qlora --no-reshard_after_forward --offload params activations", TWO_KINDS, ["all"], id="2-qwen3.5"),
    # two replicas of two shards
    pytest.param(4, "--lora --replicas 2 --optim adamw8bit", {}, [2, "all"], id="4-replicas", marks=pytest.mark.ci),
])
def test_ranks_that_share_weights_train_to_the_same_bits_however_many_blocks_are_resident(
        job, few_chats, tmp_path, world, flags, changes, numbers):
    argv = [*job(**changes), *STREAMS, *flags.split(), "--batch_size", 2, "--eval_data", few_chats]
    expected = curve(world, [*argv, "--resident_blocks", 0], tmp_path / "resident-0")
    expected_weights = load_file(tmp_path / "resident-0/final/adapter_model.safetensors")
    for n_resident in numbers:
        out = tmp_path / f"resident-{n_resident}"
        assert curve(world, [*argv, "--resident_blocks", n_resident], out) == expected
        weights = load_file(out / "final/adapter_model.safetensors")
        for name, tensor in weights.items():
            assert torch.equal(tensor, expected_weights[name]), name


@pytest.mark.rounding
def test_replicas_stream_each_by_itself(job, tmp_path):
    # float32: only the order of sums over ranks differs
    argv = [*job(), "--lora"]
    expected, _ = curve(1, argv, tmp_path / "plain")
    flags = ["--batch_size", 2, "--replicas", 2, "--resident_blocks", 1]
    got, _ = curve(2, [*argv, *STREAMS, *flags], tmp_path / "replicas")
    assert got == pytest.approx(expected, abs=1e-5)


def test_a_weight_that_is_not_finite_is_named_though_its_slot_is_shared(job, tmp_path):
    log = tmp_path / "log"
    argv = [*job(), "--lora", *STREAMS, "--resident_blocks", 0, "--out", tmp_path / "out", "--save_every", 0]
    codes = start_ranks(1, damage_and_run, ([str(word) for word in argv],), [log])
    assert codes == [train.NOT_FINITE], log.read_text()
    assert "layers.2.mlp.up_proj.weight contains inf or nan" in log.read_text()


def damage_and_run(argv):
    """A run in which one number of a streamed weight is damaged, in host memory."""
    load_weights_ = train.data.load_weights_

    def load_and_damage_(model, *rest, **flags):
        load_weights_(model, *rest, **flags)
        model.model.layers[2].mlp.up_proj.weight.data[3, 4] = torch.nan

    train.data.load_weights_ = load_and_damage_
    return train.launch(argv)


# ---------------------------------------------------------------- which blocks, in which order


@pytest.mark.parametrize("n_layers", [1, 2, 5, 32, 61])
def test_streamed_blocks_are_as_many_as_asked_and_spread_evenly(n_layers):
    for n_resident in range(n_layers + 1):
        streamed = train.policy_of(n_layers, 0, n_resident=n_resident).on_host
        assert len(streamed) == n_layers - n_resident
        distances = {after - before for before, after in itertools.pairwise([-1, *streamed])}
        # or some copies would have less time than others; the last distance of a row may be any
        assert not distances or max(distances) - min(distances) <= 1


def matrices_of(block):
    return [p for p in train.frozen_of(block) if p.dim() > 1]


def streamed_model(device, n_resident, events):
    """-> (a model with adapters of which all but n_resident blocks are streamed, the numbers of these, their bytes in
    host memory). The order of what happens is appended to `events` as (what, number of the block)."""
    model = build("--lora", num_hidden_layers=N_LAYERS)[0].to(device)
    for name, p in model.named_parameters():
        if "lora_B" in name:  # which starts at 0: no gradient would reach lora_A
            torch.nn.init.constant_(p, 0.01)
    for block in model.model.layers:
        lm.recompute_(block)
    layers = model.model.layers
    numbers = train.policy_of(N_LAYERS, 0, n_resident=n_resident).on_host
    for i, block in enumerate(layers):
        block.register_forward_pre_hook(lambda block, inputs, i=i: events.append(("forward", i)))
        block.register_forward_hook(functools.partial(note_backward, events, i))
    for i in numbers:
        for p in matrices_of(layers[i]):
            p.data = p.data.cpu()
    streams = train.StreamedWeights([layers[i] for i in numbers], torch.device(device))
    bring = streams.bring

    def bring_and_note(k):
        before = list(streams.in_slot)
        bring(k)
        if streams.in_slot != before:
            events.append(("copy", numbers[k]))

    streams.bring = bring_and_note
    return model, numbers, streams.host_pages


def note_backward(events, i, block, inputs, x):
    if x.requires_grad:
        x.register_hook(lambda _: events.append(("backward", i)))


def gradients(model, tokens):
    model.zero_grad()
    model(tokens, tokens.roll(-1, 1)).backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.requires_grad}


@DEVICES
@pytest.mark.parametrize("n_resident", range(N_LAYERS + 1))
def test_only_streamed_blocks_are_copied_each_ahead_of_its_use(device, n_resident):
    tokens = torch.arange(96, device=device).view(2, 48)
    plain = build("--lora", num_hidden_layers=N_LAYERS)[0].to(device)
    for name, p in plain.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(p, 0.01)
    expected = gradients(plain, tokens)
    if n_resident == N_LAYERS:
        assert train.policy_of(N_LAYERS, 0, n_resident=n_resident).on_host == []
        return
    events = []
    model, numbers, _ = streamed_model(device, n_resident, events)
    for step in range(3):
        events.clear()
        got = gradients(model, tokens)
        for name, grad in expected.items():
            assert torch.equal(got[name], grad), name

        uses = [event for event in events if event[0] != "copy"]
        assert uses == [("forward", i) for i in range(N_LAYERS)] + [("backward", i) for i in reversed(range(N_LAYERS))]
        copied = [i for what, i in events if what == "copy"]
        # the first two are there from the backward before, and the last two from the forward
        first = numbers[2:] if step else numbers
        assert copied == first + numbers[:-2][::-1]
        starts = [position for position, (what, _) in enumerate(events) if what == "copy"]
        if step == 0:  # there is nothing to hide the first two behind
            starts = starts[2:]
        for start in starts:
            later = [i for what, i in events[start + 1 :] if what != "copy"]
            what, i = [use for use in events[:start] if use[0] != "copy"][-1]
            if what == "backward":  # noted when it begins: a block's backward runs behind the copy that it starts
                later.insert(0, i)
            before_use = later[: later.index(events[start][1])]
            assert set(before_use) & set(numbers)  # another streamed block, at least, runs in the meantime


OF_72B = data.PRESETS["qwen2.5-72b"] | {"num_hidden_layers": 4, "vocab_size": 512}
# the same shape with about a thirtieth of the widths, which a CPU computes in a second
NARROW = {"hidden_size": 256, "intermediate_size": 896, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [
    pytest.param({}, id="72b", marks=pytest.mark.skipif(LOADED, reason="a CPU would need minutes for 3.5e9 weights")),
    pytest.param(NARROW, id="narrow"),
])
def test_streamed_gradients_are_those_of_resident_weights_at_the_widths_of_72b(changes):
    """Elsewhere blocks of 165 MiB and more got wrong gradients behind an exact forward, because a layer kept the memory
    of its weight, which another block had by then (bitsandbytes #2034). Those of 72B have 432 MiB."""
    device = torch.device("cuda", 0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as train.Ranks does
    config = lm.parse_config(OF_72B | changes)
    args = train.parse_args(["--qlora", "--lora_rank", "8", "--precision", "mixed"])
    args.lora_targets = lm.targets_in(config)
    model = lm.on_meta(config, args).to_empty(device=device)
    with torch.device("meta"):
        vanilla = lm.Transformer(config)
    data.load_weights_(model, data.RandomWeights(vanilla, 0, device), None, 0, device)
    for name, p in model.named_parameters():
        if "lora_B" in name:  # which starts at 0: no gradient would reach lora_A
            torch.nn.init.constant_(p, 0.01)
    for block in model.model.layers:
        lm.recompute_(block)
    # one block of keys: over several, FlashAttention's backward adds up dq in any order
    tokens = torch.arange(64, device=device)[None]
    expected = gradients(model, tokens)
    assert all(grad.any() for grad in expected.values())

    layers = model.model.layers
    for block in layers:
        for p in matrices_of(block):
            p.data = p.data.cpu()
    train.StreamedWeights(list(layers), device)
    for _ in range(2):  # the second forward finds in the slots what a backward has left there
        for name, grad in gradients(model, tokens).items():
            assert torch.equal(grad, expected[name]), name


@DEVICES
def test_two_slots_are_all_that_streamed_blocks_have_on_the_device(device):
    model, numbers, host_pages = streamed_model(device, 1, [])
    layers = model.model.layers
    addresses = {layers[i].mlp.up_proj.weight.untyped_storage().data_ptr() for i in numbers}
    assert len(addresses) == 2
    for i in numbers:
        for p in matrices_of(layers[i]):
            n_bytes = sum(page.nbytes for page in host_pages[p])
            assert n_bytes == p.nbytes
            assert all(page.device.type == "cpu" for page in host_pages[p])
            assert all(page.is_pinned() for page in host_pages[p]) == (device == "cuda")
    resident = set(range(N_LAYERS)) - set(numbers)
    for i in resident:
        assert all(p.device.type == device for p in layers[i].parameters())
