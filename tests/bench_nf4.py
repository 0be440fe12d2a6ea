"""What NF4 costs a trained model, before any training: the loss with weights in 16 bits and in NF4. Run by hand:

    python tests/bench_nf4.py --model FOLDER            # all rows of the table: 20 times the seconds of one
    python tests/bench_nf4.py --model FOLDER --rows 4   # the first rows alone: 16 bits and the rules

Three sets of tokens: `docs`, the answers to held-out questions of stdlib:docs; `code`, held-out modules of
stdlib:code as running text; `own`, the model's own greedy answers to some of these questions, by which a change shows
that a user would see. All is computed in float32, and the weights alone change.

The rules: by the least squared error is nf4.quantize(). By the largest magnitude of a block is the paper's scale, in
the same 4.14 bits. The row of bitsandbytes needs that package and is left out where it is missing.

The rotated model is a control. Its residual stream is multiplied by a random orthogonal matrix, and so are the values
of each head. Every layer's input and output changes, what the model computes does not, and a history that a
quantizer has left in the weights is gone. Outliers of single columns are gone, too.
"""

import argparse
import contextlib
import math
import sys
from pathlib import Path
from typing import NamedTuple

from bench_harness import table

import data
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
    data.load_weights_(model, opened.source, None, 0, CPU)
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
    """n questions of stdlib:docs that are held out, from all over the library."""
    held_out = list(data.stdlib_examples("stdlib:docs", held_out=True))
    return held_out[:: math.ceil(len(held_out) / n)]


def docs_rows(tokenizer, n):
    rows = []
    for question in questions(n):
        examples = data.read_example(question, "instruction + output", tokenizer)
        rows += [row_of(*encoded) for encoded in tokenizer.encode(examples)]
    return rows


def code_rows(tokenizer, n, length=256):
    """The beginnings of n modules, of those that are no empty __init__.py."""
    rows = []
    held_out = [one for one in data.stdlib_examples("stdlib:code", held_out=True) if len(one["text"]) > 2000]
    for example in held_out[:: math.ceil(len(held_out) / n)]:
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


def loss_of(model, rows, batch_size=8):
    """Mean loss of the tokens that count. Rows of about one length go through the model together, because a short one
    alone takes nearly as long: all weights are read once in any case."""
    total = 0.0
    n = 0
    by_length = sorted(rows, key=lambda row: len(row.tokens_T))
    for start in range(0, len(rows), batch_size):
        tokens_BT, targets_BT = padded(by_length[start : start + batch_size])
        total += model(tokens_BT, targets_BT).item()
        n += (targets_BT != lm.IGNORE).sum().item()
    return total / n


# ---------------------------------------------------------------- rules


def least_error(w_ND):
    return nf4.dequantize(*nf4.quantize(w_ND), torch.float32)


def largest_magnitude(w_ND):
    best_scales = nf4.best_scales
    nf4.best_scales = lambda blocks, absmax: absmax
    try:
        return least_error(w_ND)
    finally:
        nf4.best_scales = best_scales


RULES = {"by the largest magnitude": largest_magnitude, "by the least squared error": least_error}
with contextlib.suppress(ImportError):
    from bitsandbytes import functional as bnb

    def bitsandbytes_double(w_ND):
        packed, state = bnb.quantize_4bit(w_ND, blocksize=nf4.BLOCK, compress_statistics=True, quant_type="nf4")
        return bnb.dequantize_4bit(packed, state)

    RULES = {"of bitsandbytes, double quantization": bitsandbytes_double, **RULES}


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


class Measuring:
    """A model whose layers are in 16 bits or in NF4, and the rows that it is measured on."""

    def __init__(self, model, sets):
        self.model = model
        self.sets = sets
        self.layers = linears_of(model)
        self.exact = {name: layer.weight.detach().clone() for name, layer in self.layers.items()}
        self.cells = []
        self.exact_losses = None

    def quantize(self, rule):
        """{name: the weight in NF4 by a rule}."""
        return {name: rule(w_ND) for name, w_ND in self.exact.items()}

    def measure(self, what, in_nf4, stays_exact=lambda name: False):
        """Adds a line to the table, of a model whose weights are those of in_nf4, but for some."""
        n_weights = 0
        n_bits = 0
        square = 0.0
        error_square = 0.0
        for name, layer in self.layers.items():
            exact = self.exact[name]
            is_exact = in_nf4 is None or stays_exact(name)
            weight = exact if is_exact else in_nf4[name]
            layer.weight.copy_(weight)
            n_weights += exact.numel()
            n_bits += exact.numel() * (16 if is_exact else 4 + 8 / nf4.BLOCK) + (0 if is_exact else 64 * len(exact))
            square += exact.square().sum().item()
            error_square += (weight - exact).square().sum().item()
        losses = [loss_of(self.model, rows) for rows in self.sets.values()]
        self.exact_losses = self.exact_losses or losses
        costs = [loss - exact for loss, exact in zip(losses, self.exact_losses)]
        figures = [f"{loss:.3f} (+{cost:.3f})" for loss, cost in zip(losses, costs)]
        error = math.sqrt(error_square / square)
        self.cells.append((what, f"{n_bits / n_weights:.2f}", f"{error:.4f}", *figures))
        print(*self.cells[-1], file=sys.stderr, flush=True)

    def print_table(self, title):
        table(title, ("blocks", "bits a weight", "error of the weights", *self.sets), self.cells)


def cases_of(model):
    """[(what stays in 16 bits, the same as a function of a layer's name)]."""
    n = model.config.num_hidden_layers
    cases = [("k_proj and v_proj", lambda name: name.endswith(("k_proj", "v_proj")))]
    cases += [(kind, lambda name, kind=kind: name.endswith(kind)) for kind in KINDS]
    for what, blocks in ("the first two blocks", (0, 1)), ("the last two blocks", (n - 2, n - 1)):
        cases.append((what, lambda name, blocks=blocks: int(name.split(".")[0]) in blocks))
    return cases


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=99, help="of the table (all)")
    parser.add_argument("--n", type=int, default=40,
                        help="questions; of code a quarter, of own answers an eighth (%(default)s)")
    args = parser.parse_args()
    model, tokenizer = open_exact(args.model)
    sets = {
        "docs": docs_rows(tokenizer, args.n),
        "code": code_rows(tokenizer, max(1, args.n // 4)),
        "own": own_rows(model, tokenizer, max(1, args.n // 8)),
    }
    plain = Measuring(model, sets)
    plain.measure("16 bits", None)
    in_nf4 = {}
    for name, rule in RULES.items():
        in_nf4 = plain.quantize(rule)
        plain.measure(f"NF4 {name}", in_nf4)
    for what, stays_exact in cases_of(model)[: max(0, args.rows - len(plain.cells))]:
        plain.measure(f"the same, in 16 bits {what}", in_nf4, stays_exact)
    plain.measure("16 bits", None)  # as it was, for the rotation
    plain.cells.pop()
    if rotate_(model):
        rotated = Measuring(model, sets)
        rotated.exact_losses = plain.exact_losses
        rotated.measure("rotated, 16 bits", None)
        for name, rule in RULES.items():
            rotated.measure(f"rotated, NF4 {name}", rotated.quantize(rule))
        plain.cells += rotated.cells
    plain.print_table(f"python tests/bench_nf4.py --model {args.model.name}")


if __name__ == "__main__":
    main()
