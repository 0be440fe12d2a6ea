"""What NF4 and NF5 cost a trained model, before any training: the loss with weights in 16, 4 and 5 bits. Run by hand:

    python tests/bench_nf4.py --model FOLDER            # all rows of the table: 20 times the seconds of one
    python tests/bench_nf4.py --model FOLDER --rows 8   # without the kinds of layers in 16 bits
    python tests/bench_nf4.py --model FOLDER --steps 20 # the time of a step in 4 and in 5 bits, nothing else

Three sets of tokens: `docs`, the answers to held-out questions about the standard library; `code`, held-out modules of
it as running text; `own`, the model's own greedy answers to some of these questions, by which a change shows
that a user would see. All is computed in float32, and the weights alone change.

The rules: by the largest magnitude of a block is nf4.quantize(), in 4 and in 5 bits. By the least squared error of a
block is in the same 4.14 bits, with scales that are mostly smaller. The row of bitsandbytes needs that package and is
left out where it is missing.

Two rules look at what a layer reads, in texts that are trained on: by the error of the output, where a weight's squared
error counts as much as the mean square of its input (as in AWQ, arXiv:2306.00978), and by passing errors on, where
the columns that are still to be rounded make up for the error of those that are (GPTQ, arXiv:2210.17323). Both keep
the format. nf4.py has neither: they need the data and minutes before a run starts. Nor has it the least squared error:
no model learned better for it.

The rotated model is a control. Its residual stream is multiplied by a random orthogonal matrix, and so are the values
of each head. Every layer's input and output changes, what the model computes does not, and a history that a
quantizer has left in the weights is gone. Outliers of single columns are gone, too.
"""

import argparse
import contextlib
import math
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from bench_harness import table

import data
import make_tiny
import model as lm
import nf4
import torch
import train

KINDS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
CPU = torch.device("cpu")


# ---------------------------------------------------------------- the model and its texts


def open_exact(folder):
    """-> (model in float32, tokenizer). The head is a matrix of its own, because rotate_() makes it another one."""
    args = train.parse_args(["--model", str(folder), "--precision", "fp32"])
    ranks = train.Ranks(False, args.timeout)
    opened = train.open_model(args, ranks)
    model = opened.model
    model.to_empty(device=CPU).tie_()
    data.load_weights_(model, opened.reader, None, 0, CPU)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model.eval(), opened.tokenizer


def linears_of(model):
    """{name: layer} of what --qlora quantizes."""
    return {name: layer for name, layer in model.model.layers.named_modules()
            if isinstance(layer, lm.Linear) and name.split(".")[-1] not in nf4.SMALL}


class Row(NamedTuple):
    """A text and what of it counts."""

    tokens_T: torch.Tensor
    targets_T: torch.Tensor  # lm.IGNORE where the next token does not count


def row_of(ids, counts):
    """ids and, for each, whether it counts -> Row."""
    ids = torch.as_tensor(ids).long()
    counts = torch.as_tensor(counts)
    return Row(ids[:-1], ids[1:].where(counts[1:], torch.tensor(lm.IGNORE)))


def questions(n):
    """n questions that are held out, from all over the standard library."""
    held_out = list(make_tiny.stdlib_examples("docs", held_out=True))
    return held_out[:: math.ceil(len(held_out) / n)]


def docs_rows(tokenizer, n):
    rows = []
    for question in questions(n):
        examples = data.parse_example(question, tokenizer)
        rows += [row_of(*encoded) for encoded in tokenizer.encode(examples)]
    return rows


def code_rows(tokenizer, n, held_out=True, length=256):
    """The beginnings of n modules, of those that are no empty __init__.py."""
    rows = []
    modules = [one for one in make_tiny.stdlib_examples("code", held_out) if len(one["text"]) > 2000]
    for example in modules[:: math.ceil(len(modules) / n)]:
        ids = tokenizer.core.encode(example["text"], add_special_tokens=False).ids[:length]
        rows.append(row_of(ids, [True] * len(ids)))
    return rows


def own_rows(model, tokenizer, n, length=40):
    """Answers of `length` tokens: each token reads all weights once, so these rows take most of the time."""
    rows = []
    for question in questions(n):
        prompt = tokenizer.prompt([{"role": "user", "content": question["instruction"]}])
        answer = list(lm.generate(model, prompt, length, tokenizer.stop_ids, CPU))
        rows.append(row_of(prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    return rows


def padded(rows):
    """Rows -> (tokens, targets), both [rows, longest]. Padding is behind a row, where no token of it looks."""
    tokens = torch.nn.utils.rnn.pad_sequence([row.tokens_T for row in rows], batch_first=True)
    targets = torch.nn.utils.rnn.pad_sequence([row.targets_T for row in rows], batch_first=True,
                                              padding_value=lm.IGNORE)
    return tokens, targets


def batches_of(rows, size=4):
    """[(tokens, targets)] of rows of about one length, because a short one alone takes nearly as long: all weights are
    read once in any case."""
    by_length = sorted(rows, key=lambda row: len(row.tokens_T))
    return [padded(by_length[start : start + size]) for start in range(0, len(rows), size)]


class Losses(NamedTuple):
    """Of each batch."""

    total: torch.Tensor
    n_tokens: torch.Tensor

    def mean(self):
        return (self.total.sum() / self.n_tokens.sum()).item()

    def cost(self, exact):
        """-> (how much more a token's loss is than the exact model's, the standard error of that). Batches are the
        sample: both models have seen the same ones."""
        more = self.total - exact.total
        mean = more.sum() / self.n_tokens.sum()
        residuals = more - mean * self.n_tokens
        n = len(residuals)
        error = (residuals.square().sum() * n / max(1, n - 1)).sqrt() / self.n_tokens.sum()
        return mean.item(), error.item()


def losses_of(model, batches):
    """Losses of the tokens that count."""
    totals = [model(tokens_BT, targets_BT).item() for tokens_BT, targets_BT in batches]
    counts = [(targets_BT != lm.IGNORE).sum().item() for _, targets_BT in batches]
    return Losses(torch.tensor(totals, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64))


# ---------------------------------------------------------------- rules


# A rule is a function of a weight [N, D] and the second moments of what its layer reads [D, D] -> the weight as it is
# after quantizing, [N, D]. Every one has 4 bits, but for in_nf5().


def largest_magnitude(w_ND, moments_DD):
    return nf4.dequantize(*nf4.quantize(w_ND, 4), torch.float32)


def in_nf5(w_ND, moments_DD):
    return nf4.dequantize(*nf4.quantize(w_ND, 5), torch.float32)


def rounded(w, scales):
    """Weights [..., 64] rounded to the levels under their scales [...]."""
    relative = w / scales.clamp_min(1e-30).unsqueeze(-1)
    nearest = nf4.nearest_levels(relative.clamp(-1, 1), 4)
    levels = torch.tensor(nf4.CODEBOOK)[nearest.int()]
    return levels.view_as(w) * scales.unsqueeze(-1)


# in units of the largest magnitude of a block; 36 of them would leave 0.2 % less error
FACTORS = (0.75, 0.79, 0.83, 0.88, 0.92, 0.96, 1.0, 1.05)


def least_error(w_ND, moments_DD):
    return output_error(w_ND, torch.eye(len(moments_DD)))  # where every column counts as much


def output_error(w_ND, moments_DD):
    blocks = w_ND.view(len(w_ND), -1, nf4.BLOCK)
    counts = moments_DD.diagonal().view(-1, nf4.BLOCK)  # how much the error of a column counts
    absmax = blocks.abs().amax(-1)
    scales = absmax
    least = torch.full_like(absmax, math.inf)
    for factor in FACTORS:
        levels = rounded(blocks, absmax * factor) / (absmax * factor).clamp_min(1e-30).unsqueeze(-1)
        best = (counts * blocks * levels).sum(-1) / (counts * levels.square()).sum(-1).clamp_min(1e-30)
        error = (counts * (blocks - rounded(blocks, best)).square()).sum(-1)
        scales = torch.where(error < least, best, scales)
        least = least.minimum(error)
    scales = nf4.dequantize_scales(nf4.quantize_scales(scales))
    return rounded(blocks, scales).view_as(w_ND)


def passed_on(w_ND, moments_DD):
    D = len(moments_DD)
    damped = moments_DD.double() + torch.eye(D) * moments_DD.diagonal().mean() * 0.01
    # row i says by how much the columns behind i change for an error of column i
    inverse_DD = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True).float()
    left_ND = w_ND.clone()
    in_nf4 = torch.empty_like(w_ND)
    for start in range(0, D, nf4.BLOCK):
        block = slice(start, start + nf4.BLOCK)
        w = left_ND[:, block]
        scales = w.abs().amax(-1)
        errors = torch.empty_like(w)
        for i in range(nf4.BLOCK):
            column = rounded(w[:, i, None], scales).squeeze(1)
            in_nf4[:, start + i] = column
            errors[:, i] = (w[:, i] - column) / inverse_DD[start + i, start + i]
            w[:, i:] -= errors[:, i, None] * inverse_DD[start + i, start + i : block.stop]
        left_ND[:, block.stop :] -= errors @ inverse_DD[block, block.stop :]
    return in_nf4


RULES = {
    "NF4 by the least squared error": least_error,
    "NF4 by the error of the output": output_error,
    "NF4 by passing errors on": passed_on,
    "NF4 by the largest magnitude": largest_magnitude,
    "NF5 by the largest magnitude": in_nf5,
}
with contextlib.suppress(ImportError):
    from bitsandbytes import functional as bnb

    def bitsandbytes_double(w_ND, moments_DD):
        packed, state = bnb.quantize_4bit(w_ND, blocksize=nf4.BLOCK, compress_statistics=True, quant_type="nf4")
        return bnb.dequantize_4bit(packed, state)

    RULES = {"NF4 of bitsandbytes, double quantization": bitsandbytes_double, **RULES}


def moments_of_inputs(model, batches):
    """{name: the mean of x xT [D, D]} of what each linear layer reads."""
    sums = {}
    handles = []
    for name, layer in linears_of(model).items():

        def add(_, inputs, name=name):
            x_XD = inputs[0].flatten(0, -2)
            sums[name] = sums.get(name, 0) + x_XD.T @ x_XD / len(x_XD) / len(batches)

        handles.append(layer.register_forward_pre_hook(add))
    losses_of(model, batches)
    for handle in handles:
        handle.remove()
    return sums


# ---------------------------------------------------------------- the control


def orthogonal(n, seed):
    q, r = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed)))
    return q * r.diagonal().sign()


def rotate_(model):
    """Rotates the residual stream and the values of each head; a norm's factors go into the layers that read it, as
    RMSNorm without factors commutes with a rotation. False for a family that it does not know."""
    c = model.config
    if c.model_type not in ("llama", "mistral"):  # others add norms, gates or biases
        return False
    stream_DD = orthogonal(c.hidden_size, 0)
    value_KK = orthogonal(c.head_dim, 1)

    def rotate_inputs_(layer, norm):
        layer.weight.copy_((layer.weight * norm.weight) @ stream_DD)

    def rotate_values(w_ND):  # its rows are values of heads
        return (value_KK @ w_ND.view(-1, c.head_dim, w_ND.shape[1])).view(w_ND.shape)

    model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ stream_DD)
    for block in model.model.layers:
        attention = block.self_attn
        for layer in attention.q_proj, attention.k_proj, attention.v_proj:
            rotate_inputs_(layer, block.input_layernorm)
        for layer in block.mlp.gate_proj, block.mlp.up_proj:
            rotate_inputs_(layer, block.post_attention_layernorm)
        attention.v_proj.weight.copy_(rotate_values(attention.v_proj.weight))
        attention.o_proj.weight.copy_(rotate_values(attention.o_proj.weight.T.contiguous()).T)
        for layer in attention.o_proj, block.mlp.down_proj:
            layer.weight.copy_(stream_DD.T @ layer.weight)
        block.input_layernorm.weight.fill_(1)
        block.post_attention_layernorm.weight.fill_(1)
    rotate_inputs_(model.lm_head, model.model.norm)
    model.model.norm.weight.fill_(1)
    return True


# ---------------------------------------------------------------- the table


class Weight(NamedTuple):
    """What a layer computes with."""

    w_ND: torch.Tensor
    n_bits: float  # of all its numbers


class Measuring:
    """A model whose layers are in 16, 4 or 5 bits, and the rows that it is measured on."""

    def __init__(self, model, sets, seen):
        """sets: {name: batches}. seen: batches that a rule may look at."""
        self.model = model
        self.sets = sets
        self.layers = linears_of(model)
        self.exact = {}
        for name, layer in self.layers.items():
            self.exact[name] = Weight(layer.weight.detach().clone(), 16 * layer.weight.numel())
        self.moments = moments_of_inputs(model, seen)
        self.cells = []
        self.exact_losses = None

    def quantize(self, rule):
        """{name: Weight} by a rule."""
        bits = 5 if rule is in_nf5 else 4
        weights = {}
        for name, exact in self.exact.items():
            N, D = exact.w_ND.shape
            n_bits = N * (bits * D + 8 * D / nf4.BLOCK + 8 * nf4.RANGE_BYTES)
            weights[name] = Weight(rule(exact.w_ND, self.moments[name]), n_bits)
        return weights

    def measure(self, what, weights):
        """Adds a line to the table, of a model with these weights. The first one has to be the exact model's."""
        n_weights = 0
        n_bits = 0
        square = 0.0
        error_square = 0.0
        for name, layer in self.layers.items():
            exact_ND = self.exact[name].w_ND
            w_ND = weights[name].w_ND
            layer.weight.copy_(w_ND)
            n_weights += w_ND.numel()
            n_bits += weights[name].n_bits
            square += exact_ND.square().sum().item()
            error_square += (w_ND - exact_ND).square().sum().item()
        losses = [losses_of(self.model, batches) for batches in self.sets.values()]
        self.exact_losses = self.exact_losses or losses
        figures = []
        for of_set, exact in zip(losses, self.exact_losses):
            cost, standard_error = of_set.cost(exact)
            figures.append(f"{of_set.mean():.3f} ({cost:+.3f} ± {standard_error:.3f})")
        error = math.sqrt(error_square / square)
        self.cells.append((what, f"{n_bits / n_weights:.2f}", f"{error:.4f}", *figures))
        print(*self.cells[-1], file=sys.stderr, flush=True)

    def print_table(self, title):
        table(title, ("blocks", "bits a weight", "error of the weights", *self.sets), self.cells)


def mixed(weights, others, is_other):
    """{name: Weight}, those of `others` where is_other(name)."""
    return {name: others[name] if is_other(name) else weight for name, weight in weights.items()}


def cases_of(model):
    """[(what has more bits, the same as a function of a layer's name)]."""
    n = model.config.num_hidden_layers
    cases = [("k_proj and v_proj", lambda name: name.endswith(("k_proj", "v_proj")))]
    cases += [(kind, lambda name, kind=kind: name.endswith(kind)) for kind in KINDS]
    for what, blocks in ("the first two blocks", (0, 1)), ("the last two blocks", (n - 2, n - 1)):
        cases.append((what, lambda name, blocks=blocks: int(name.split(".")[0]) in blocks))
    return cases


# ---------------------------------------------------------------- the time of a step


def open_in_training(folder, flags):
    """A model as main() of train.py makes it on a CPU. flags: those of QLoRA."""
    args = train.parse_args(["--qlora", *flags, "--model", str(folder), "--seq_len", "512"])
    ranks = train.Ranks(False, args.timeout)
    opened = train.open_model(args, ranks)
    model = opened.model
    for block in model.model.layers:
        lm.recompute_(block)
    model.to_empty(device=CPU).tie_()
    data.load_weights_(model, opened.reader, None, 0, CPU)
    return model.train()


def time_steps(folder, n):
    """Forward and backward of two rows of 512 tokens, in turns, so that what else runs delays all alike. The adapters'
    AdamW takes the same time in each."""
    models = {
        "NF4": open_in_training(folder, []),
        "NF5": open_in_training(folder, ["--nf5"]),
        "NF5, in NF4 gate_proj": open_in_training(
            folder, ["--nf5", *(kind for kind in KINDS if kind != "gate_proj")]),
    }
    generator = torch.Generator().manual_seed(0)
    seconds = {name: [] for name in models}
    for step in range(n + 1):
        tokens = torch.randint(4096, (2, 512), generator=generator)
        for name, model in models.items():
            started = time.process_time(), time.perf_counter()
            model(tokens, tokens.roll(-1)).backward()
            model.zero_grad()
            if step:  # the first one allocates
                seconds[name].append((time.process_time() - started[0], time.perf_counter() - started[1]))
    rows = []
    for name, taken in seconds.items():
        # of the same step, then the median
        ratios = [[ours[i] / nf4s[i] for ours, nf4s in zip(taken, seconds["NF4"])] for i in (0, 1)]
        rows.append([name, f"{statistics.median(wall for _, wall in taken):.3f}",
                     *(f"{statistics.median(of_steps):.4f}" for of_steps in ratios)])
    table(f"python tests/bench_nf4.py --model {folder.name} --steps {n}",
          ["weights", "s a step", "CPU s / NF4's", "s / NF4's"], rows)


# ---------------------------------------------------------------- all


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=99, help="of the table (all)")
    parser.add_argument("--n", type=int, default=40,
                        help="questions; of code a quarter, of own answers an eighth (%(default)s)")
    parser.add_argument("--steps", type=int, help="times that many steps, and measures no loss")
    args = parser.parse_args()
    if args.steps:
        time_steps(args.model, args.steps)
    else:
        compare_losses(args)


@torch.no_grad()
def compare_losses(args):
    model, tokenizer = open_exact(args.model)
    sets = {
        "docs": batches_of(docs_rows(tokenizer, args.n)),
        "code": batches_of(code_rows(tokenizer, max(1, args.n // 4))),
        "own": batches_of(own_rows(model, tokenizer, max(1, args.n // 8))),
    }
    seen = batches_of(code_rows(tokenizer, 32, held_out=False))
    plain = Measuring(model, sets, seen)
    plain.measure("16 bits", plain.exact)
    by_rule = {}
    for name, rule in RULES.items():
        by_rule[name] = plain.quantize(rule)
        plain.measure(name, by_rule[name])
    in_4_bits = by_rule["NF4 by the largest magnitude"]
    in_5_bits = by_rule["NF5 by the largest magnitude"]
    for layers in ("gate_proj", "up_proj"), ("gate_proj",):
        # about 4.6 and 4.9 bits a weight, because these layers are a quarter of the weights each
        weights = mixed(in_5_bits, in_4_bits, lambda name, layers=layers: name.endswith(layers))
        plain.measure(f"the same, in NF4 {' and '.join(layers)}", weights)
    for what, has_more in cases_of(model)[: max(0, args.rows - len(plain.cells))]:
        plain.measure(f"NF4, in 16 bits {what}", mixed(in_4_bits, plain.exact, has_more))
    for name, layer in plain.layers.items():  # as it was, for the rotation
        layer.weight.copy_(plain.exact[name].w_ND)
    if rotate_(model):
        rotated = Measuring(model, sets, seen)
        rotated.exact_losses = plain.exact_losses
        rotated.measure("rotated, 16 bits", rotated.exact)
        for name, rule in RULES.items():
            rotated.measure(f"rotated, {name}", rotated.quantize(rule))
        plain.cells += rotated.cells
    plain.print_table(f"python tests/bench_nf4.py --model {args.model.name}")


if __name__ == "__main__":
    main()
