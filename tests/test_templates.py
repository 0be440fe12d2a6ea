"""Chat templates render, raise and mask exactly as in transformers. Goldens: make_chat_goldens.py."""

import json
import shutil
from pathlib import Path

import pytest

import data

HERE = Path(__file__).parent
CHAT = HERE / "goldens-chat"
GOLDENS = json.loads((CHAT / "goldens.json").read_text("utf-8"))
TEMPLATES = sorted({case["template"] for case in GOLDENS["cases"]})
MASKED = sorted({case["template"] for case in GOLDENS["cases"] if "ids" in case})


def prepare(messages):
    """Messages as rows are read: what transformers does to them before the template sees them happens there."""
    return data.check_messages(messages, "messages")


def encode_row(tokenizer, row):
    """One row of a .jsonl file -> (token ids, True for each token that is trained on)."""
    source, _ = data.parse_row(json.dumps(row).encode(), "messages", tokenizer)
    return next(tokenizer.encode([source]))


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Template file -> Tokenizer of tests/tiny with the special tokens that the goldens were made with."""
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(HERE / "tiny" / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(GOLDENS["variables"]))
    return lambda template_file: data.Tokenizer(folder, template_file)


def rendered(tokenizer, messages, tools=None, generation_prompt=False):
    """The text, or None where the template raises."""
    try:
        return tokenizer.render(prepare(messages), tools=tools, generation_prompt=generation_prompt)[0]
    except ValueError:
        return None


def differences(tokenizer, template, raises):
    """Names of the template's cases that raise in transformers (or do not), and do not come out the same here."""
    names = []
    for case in GOLDENS["cases"]:
        if case["template"] == template and ("error" in case) == raises:
            text = rendered(tokenizer, **GOLDENS["conversations"][case["conversation"]],
                            generation_prompt=case["generation_prompt"])
            if text != case.get("text"):
                names.append(case["conversation"] + " (prompt)" * case["generation_prompt"])
    return names


def test_today_is_the_day_of_the_goldens():
    assert f"{data.TODAY:%Y-%m-%d}" == GOLDENS["today"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_text_is_that_of_transformers(load, template):
    assert differences(load(CHAT / f"{template}.jinja"), template, raises=False) == []


def test_errors_are_those_of_transformers(load):
    wrong = {t: differences(load(CHAT / f"{t}.jinja"), t, raises=True) for t in TEMPLATES}
    assert not {template: names for template, names in wrong.items() if names}


@pytest.mark.parametrize("template", MASKED)
def test_tokens_and_mask_are_those_of_transformers(load, template):
    tokenizer, wrong = load(CHAT / f"{template}.jinja"), []
    for case in GOLDENS["cases"]:
        if case["template"] == template and "ids" in case:
            row = GOLDENS["conversations"][case["conversation"]]
            calls = any(message.get("tool_calls") for message in row["messages"])
            if template == "chatml_generation" and calls and case["conversation"] != "think_and_call":  # it says clock
                with pytest.raises(data.BadRow, match="leaves out the calls"):  # where transformers trains on an empty answer
                    encode_row(tokenizer, row)
                continue
            ids, mask = encode_row(tokenizer, row)
            mask = [int(m) for m in mask]
            if list(ids) != case["ids"] or mask != case.get("mask", mask):
                wrong.append(case["conversation"])
    assert wrong == []


def test_sandbox_is_that_of_transformers(load, tmp_path):
    """Globals, filters and what is forbidden, a one-line template each."""
    messages, wrong = GOLDENS["conversations"]["system"]["messages"], []
    for snippet in GOLDENS["snippets"]:
        (tmp_path / "snippet.jinja").write_text(snippet["source"], "utf-8")
        try:
            text = rendered(load(tmp_path / "snippet.jinja"), messages)
        except ValueError:  # it does not compile
            text = None
        if text != snippet.get("text"):
            wrong.append((snippet["source"], text))
    assert wrong == []
