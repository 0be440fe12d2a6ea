"""Holds the formulas of the memory plan (train.py) against the model's own code: a training step at real sizes on
torch's meta device, where tensors have shapes and no memory, with the bytes counted that are alive.

    python tests/trace_plan.py --model llama-3.1-8b --qlora --seq_len 8192 --gpu_gib 24

takes the flags of a run and prints for each part of the step what the formulas plan, what the trace counts, and the
ratio. Run it after a change of model.py or nf4.py that saves or allocates something. A ratio below 1 means that the
plan would let a run start that dies of memory. PARTS says which formula to edit.

How it works. main's wraps are put around the model of on_meta(): tiles, checkpoints, kept weights. Then its forward and
backward run under a TorchDispatchMode, which sees the result of each operator. A storage counts from there until its
weak reference dies; torch's own distributed/_tools/mem_tracker.py does the same. Hooks cut the step into parts. Kernels
of CUDA are the stand-ins of standins.py, as in the steps that test_plan.py counts on a CPU's allocator.

What it does not see: weights and optimizer state, which need no formula; FSDP2, so a run with --fsdp2 is traced as one
rank whose weights are as they are gathered; --offload, optimizer.step(), --compile. test_plan.py counts these.
"""

import functools
import math
import sys
import types
import weakref

import conftest  # noqa: F401  (puts train.py on the path)
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import model as lm
import standins
import train

# the parts of a step that formulas plan, and the functions of train.py to edit
PARTS = {
    "saved": "bytes_of_attention, bytes_of_deltanet, saved_by_mlp, n_norm_inputs, block_bytes",
    "loss": "loss_bytes, inputs_of_loss",
    "attention": "bytes_of_attention, bytes_of_deltanet, block_bytes",
    "block": "what \"saved\" needs, added_in_mlp, bytes_of_forward, play_backward_of_block",
    "embedding": "play_backward_of_embedding",
    "peak": "whichever is wrong above",
}
UNTRACED = ("weights", "quantized weights", "adapters", "optimizer")  # kinds of bytes of the plan


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of meta tensors that are alive. `peaks` has the most of each part; begin() starts a part.
    Tensors of `known` count as nothing."""

    def __init__(self, known):
        super().__init__()
        self.peaks = {}
        self.part = "forward"
        self.alive = 0
        self.sizes = {}  # {address of a storage: its bytes, as counted}
        self.references = {}  # {address: weak reference}
        # storages are held here, or another tensor could get the address of one
        self.known = {t.untyped_storage()._cdata: t.untyped_storage() for t in known}

    def begin(self, part, *_):
        # no operator says that RunOnce has resized a storage
        for reference in list(self.references.values()):
            self.count(reference())
        self.part = part
        self.note_peak()

    def note_peak(self):
        self.peaks[self.part] = max(self.peaks.get(self.part, 0), self.alive)

    def count(self, storage):
        address = storage._cdata
        if address in self.known:
            return
        if address not in self.sizes:
            self.sizes[address] = 0
            self.references[address] = weakref.ref(storage, functools.partial(self.forget, address))
        self.alive += storage.nbytes() - self.sizes[address]
        self.sizes[address] = storage.nbytes()

    def forget(self, address, _):
        self.alive -= self.sizes.pop(address)
        del self.references[address]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_sum_of_gradients(func, args):
            return args[0]
        if func is torch.ops.aten._grouped_mm.default:
            out = standins.grouped_product(*args[:3])
        else:
            out = result_of(func, args, kwargs or {})
        results = out if isinstance(out, tuple | list) else [out]
        for t in results:
            if isinstance(t, torch.Tensor) and t.is_meta:
                self.count(t.untyped_storage())
        self.note_peak()
        return out


FORMS = {}  # {operator and its arguments, tensors by their form: (shape, strides, dtype) of the result}


def form_of(value):
    """What an argument of an operator says about the shape of its result."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(form_of, value))
    return type(value), value


@functools.cache
def makes_a_tensor(func):
    """Whether an operator makes one new tensor, and no more."""
    if func is torch.ops.aten._unsafe_view.default:  # a view, which its schema does not say
        return False
    schema = func._schema
    types = [str(value.type) for value in schema.returns]
    has_aliases = any(value.alias_info for value in (*schema.arguments, *schema.returns))
    return types == ["Tensor"] and not has_aliases


def result_of(func, args, kwargs):
    """func(*args, **kwargs). For meta tensors many operators are Python functions. The form of what they make is noted
    and looked up, which halves the time of a trace."""
    if not makes_a_tensor(func):
        return func(*args, **kwargs)
    key = func, form_of(args), form_of(tuple(kwargs.items()))
    if key in FORMS:
        shape, strides, dtype = FORMS[key]
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    out = func(*args, **kwargs)
    if out.is_meta:
        FORMS[key] = out.shape, out.stride(), out.dtype
    return out


def is_sum_of_gradients(func, args):
    """Whether autograd adds up two gradients of one tensor. On a GPU it adds into the first one. For meta tensors, and
    under any dispatch mode, it makes a third."""
    if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
        return False
    is_in_backward = torch._C._current_graph_task_id() >= 0
    return is_in_backward and isinstance(args[1], torch.Tensor) and args[0].shape == args[1].shape


def wrapped_model(args, config, blocks):
    """The model as main() wraps it before the weights are read."""
    model = lm.on_meta(config, args)
    train.wrap_blocks_(model, args, blocks)
    if args.sequence_parallel > 1:
        model.sequence_group = types.SimpleNamespace(size=lambda: args.sequence_parallel)
    return model


def batch_on_meta(args, length):
    """A micro-batch of this rank: a document in each row, each token supervised. With --dpo a row is a pair. Where
    FlashAttention does not run a token of each row is a gap, which sends it through attend_one_by_one()."""
    n_tokens = args.batch_size * length
    n_documents = 2 * args.batch_size if args.dpo else args.batch_size
    ends = [n_tokens * (i + 1) // n_documents for i in range(n_documents)]
    starts = [0, *ends[:-1]]
    bounds = None
    if not train.has_flash_attention(args):
        ends = [end - 1 for end in ends]
        bounds = torch.empty(2 * n_documents + 1, dtype=torch.int32, device="meta")
    n_here = -(-n_tokens // args.sequence_parallel)
    shape = (1, n_here)
    if args.sequence_parallel == 1:
        shape = (args.batch_size, length)
    tokens, targets, positions, supervised = torch.empty(4, *shape, dtype=torch.int64, device="meta").unbind()
    return types.SimpleNamespace(
        tokens=tokens, targets=targets, positions=positions, supervised_S=supervised.flatten(),
        spans=lm.Spans(list(zip(starts, ends)), bounds, length), n_targets=[n_tokens // n_documents] * n_documents,
        dropout_bits=torch.empty(shape, dtype=torch.int32, device="meta"))


def begin_parts_at(model, live):
    """Hooks that begin a part of the step where the model gets there."""

    def at_block(number, _, inputs):
        live.begin("forward")
        x = inputs[0]
        if x.requires_grad:
            # when the gradient of a block's input is there, the block below is next
            below = "backward" if number else "embedding"
            x.register_hook(functools.partial(live.begin, below))

    def at_output_of_mixer(_, __, output):
        if output.requires_grad:
            # its gradient is there when all of the MLP is done, tiles or not
            output.register_hook(functools.partial(live.begin, "attention"))

    def at_loss(_, inputs):
        live.begin("saved")
        live.begin("loss")
        x = inputs[0]
        if x.requires_grad:
            x.register_hook(functools.partial(live.begin, "backward"))

    for number, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(functools.partial(at_block, number))
        block.mixer.register_forward_hook(at_output_of_mixer)
    model.model.norm.register_forward_pre_hook(at_loss)


def free_gradient(p):
    p.grad = None


def traced(args, config, length, blocks):
    """{part: the most bytes that are alive in it, without weights and optimizer state}"""
    model = wrapped_model(args, config, blocks)
    trained = [p for p in model.parameters() if p.requires_grad]
    live = LiveBytes([*model.parameters(), *model.buffers()])
    begin_parts_at(model, live)
    if args.optim_in_backward:
        for p in trained:
            p.register_post_accumulate_grad_hook(free_gradient)
    with standins.on_meta(), live:
        batch = batch_on_meta(args, length)
        if args.grad_accum > 1:  # gradients of an earlier micro-batch
            for p in trained:
                p.grad = torch.empty_like(p)
        loss, _ = train.loss_of(model, batch, args.beta)
        loss.backward()
        live.begin("end")
    del live.peaks["end"]
    return live.peaks


def planned(args, config, length, blocks):
    """traced() by the formulas."""
    events, _ = train.events_and_host(args, config, 1, length, blocks)
    peaks = {}
    for event in events:
        n_bytes = event.kinds.total() - sum(event.kinds[kind] for kind in UNTRACED)
        peaks[event.part] = max(peaks.get(event.part, 0), n_bytes)
    peaks.pop("step", None)
    return peaks


def compared(args, config, length, blocks):
    """{part: (bytes as planned, bytes as traced)}, parts in the order of PARTS."""
    by_plan = planned(args, config, length, blocks)
    by_trace = traced(args, config, length, blocks)
    for peaks in (by_plan, by_trace):
        # a block's forward has less than its backward, if it has a backward
        peaks["block"] = max(peaks.pop("forward"), peaks.pop("backward"), peaks.get("attention", 0))
        peaks["peak"] = max(peaks.values())
    return {part: (by_plan[part], by_trace[part]) for part in PARTS if part in by_trace}


def is_off(n_planned, n_traced):
    return abs(n_planned / n_traced - 1) > 0.05


def report_of(parts):
    """compared() as lines of text. Those that are off say what to edit in train.py."""
    lines = [f"  {'GiB':<12}{'planned':>10}{'traced':>10}{'ratio':>8}"]
    for part, (n_planned, n_traced) in parts.items():
        line = f"  {part:<12}{n_planned / train.GIB:>10.3f}{n_traced / train.GIB:>10.3f}{n_planned / n_traced:>8.3f}"
        if is_off(n_planned, n_traced):
            line += f"   train.py: {PARTS[part]}"
        lines.append(line)
    return "\n".join(lines)


def opened(argv):
    """Flags of a run -> (args, config), args without what a trace does not see."""
    args = train.parse_args([*argv, "--dry_run"])
    config = train.open_config(args, args.world or 1, device=None, random_init=True).config
    if args.fsdp2 and args.precision == "mixed":
        args.precision = "bf16"  # a gathered weight, and its gradient, are in 16 bits
    args.fsdp2 = False
    args.replicas = 1
    args.offload = []
    # an optimizer whose step allocates nothing
    args.optim = "adamw"
    args.fused_adamw = True
    args.stochastic_rounding = False
    return args, config


def main(argv):
    args, config = opened(argv)
    room = (args.gpu_gib or math.inf) * train.GIB
    blocks = train.choose_blocks(args, config, 1, args.seq_len, room)
    print(f"{args.model}: {config.num_hidden_layers} blocks, rows of {args.seq_len} tokens, one rank, without weights "
          f"and optimizer state; {blocks.describe(config.num_hidden_layers)}")
    parts = compared(args, config, args.seq_len, blocks)
    print(report_of(parts))
    return any(is_off(*sizes) for sizes in parts.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
