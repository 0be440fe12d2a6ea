"""Goldens of packed documents, for test_qwen35 and test_windows: transformers computed each document alone
(make_goldens_qwen35.py, make_goldens_windows.py), and the model computes all of them in one row."""

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from test_model import CPU, build

import data
import model as lm


def relative_error(got, expected):
    """The norm of the difference, relative to the norm of what is expected."""
    got = got.double()
    expected = expected.double()
    return ((got - expected).norm() / expected.norm().clamp_min(1e-12)).item()


def positions_of(lengths):
    """Where each token of documents of these lengths is in its document."""
    return torch.cat([torch.arange(n) for n in lengths])


def pairs_of(lengths):
    """(start, stop) of documents of these lengths, one behind the other."""
    stops = torch.tensor(lengths).cumsum(0).tolist()
    return [(stop - n, stop) for n, stop in zip(lengths, stops)]


def read_golden(folder):
    """{name: tensor} of a golden; make_goldens_qwen35.py lists the names."""
    return load_file(folder / "golden.safetensors")


def packed_logits(model, golden):
    """Logits [T, V] of the golden's documents in one row."""
    lengths = golden["lengths"].tolist()
    pairs = pairs_of(lengths)
    bounds = torch.tensor([0, *(stop for _, stop in pairs)])
    positions_BT = positions_of(lengths)[None]
    return model(golden["tokens"][None], positions_BT=positions_BT, spans=lm.Spans(pairs, bounds))[0]


def losses_in_documents(logits_TV, golden):
    """The loss of every token but the first one of each document."""
    lengths = golden["lengths"].tolist()
    documents = zip(logits_TV.split(lengths), golden["tokens"].split(lengths))
    return torch.cat([F.cross_entropy(logits[:-1], tokens[1:], reduction="none") for logits, tokens in documents])


def gradients_by_name(model, folder):
    """{name: gradient} with the names and the shapes that the weights have in the folder's files."""
    for p in model.parameters():
        p.data = p.grad  # full_tensors() takes gradients apart as it does weights
    gradients = {}
    stored = data.WeightFiles(folder).tensors
    for name, matrix in data.full_tensors(model, False):
        place = stored[name]
        if not place.stack:
            gradients[name] = matrix
            continue
        whole = gradients.setdefault(data.module_name(place.name), torch.empty(place.stack))
        whole.flatten(0, 1)[place.first_row : place.first_row + len(matrix)] = matrix
    return gradients


def check_packed_documents(folder):
    """Logits, losses and all gradients of packed documents are those that transformers has of each alone."""
    model = build(folder)
    golden = read_golden(folder)
    bound = 1e-5  # float32 rounding: 5e-7 seen of logits and losses
    logits_TV = packed_logits(model, golden)
    assert relative_error(logits_TV[golden["rows"]], golden["logits"]) < bound
    losses = losses_in_documents(logits_TV, golden)
    assert relative_error(losses, golden["nll"]) < bound

    losses.sum().backward()
    gradients = gradients_by_name(model, folder)
    expected = {name.removeprefix("grad."): t for name, t in golden.items() if name.startswith("grad.")}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient.shape == expected[name].shape, name
        # 1e-5 seen, where most of a gradient cancels; a document that sees another one changes them by 0.01
        assert relative_error(gradient, expected[name]) < 10 * bound, name


def check_greedy_tokens(folder):
    """Generation from the first 40 tokens of the last document goes on as transformers' does."""
    model = build(folder).eval()
    golden = read_golden(folder)
    last_document = golden["tokens"][-int(golden["lengths"][-1]) :]
    prompt = last_document[:40].tolist()  # PROMPT of make_goldens_qwen35.py
    expected = golden["generated"].tolist()
    assert list(lm.generate(model, prompt, len(expected), {-1}, CPU)) == expected  # no token is -1: none ends it
