"""From rows in files to token ids and masks: every format and container, every kind of bad row, weights, what becomes of
long documents, the cache, worker processes, long texts, BOS and EOS, special tokens that a message spells."""

import codecs
import contextlib
import errno
import gzip
import itertools
import json
import os
import random
import re
import string
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from conftest import pieces
from test_data import CHATML, HERE, LLAMA2, VOCAB, jsonl, model_folder
from tokenizers.processors import TemplateProcessing

import data
from model import IGNORE

START, END = "<|im_start|>", "<|im_end|>"  # ids 0 and 1 of tests/tiny
AGENT = (
    "{% if tools %}{{ '<|im_start|>system\n' ~ (tools | tojson) ~ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}{{ '<think>' ~ m.reasoning_content ~ '</think>' }}{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' ~ ((call.function or call) | tojson) ~ '</call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content ~ '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def folder_of(path, tokenizer, cache, held_out=False):
    return data.cached(str(path), held_out, tokenizer, cache, lambda: None, False)


def opened(path, tokenizer, cache, seq_len=4096, **options):
    """A file's (Documents, its counts)."""
    documents, (count,) = data.open_documents([folder_of(path, tokenizer, cache)], [str(path)], seq_len, **options)
    return documents, count


def arrays_of(folder):
    return {name: np.fromfile(folder / name, kind).tolist() for name, kind in data.ARRAYS.items()}


def marked(tokenizer, ids, supervised):
    """The text of a document with what is trained on between ⟦ and ⟧."""
    runs = itertools.groupby(zip(ids, supervised, strict=True), lambda pair: pair[1])
    texts = ((said, tokenizer.core.decode([token for token, _ in run], skip_special_tokens=False)) for said, run in runs)
    return "".join(f"⟦{text}⟧" if said else text for said, text in texts)


def trained_on(path, tokenizer, cache, **options):
    documents, _ = opened(path, tokenizer, cache, **options)
    return [marked(tokenizer, *piece) for piece in pieces(documents)]


def turn(role, text):
    return f"{START}{role}\n{text}{END}\n"


def said(text):
    return f"{START}assistant\n⟦{text}{END}⟧\n"


def message(role, content, **more):
    return {"role": role, "content": content, **more}


@pytest.fixture(scope="module")
def tiny():
    return data.Tokenizer(HERE / "tiny")


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """tests/tiny with a template that writes tools, tool calls and reasoning."""
    return data.Tokenizer(model_folder(tmp_path_factory.mktemp("agent"), AGENT))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


# ---------------------------------------------------------------- formats

CALL = {"name": "add", "arguments": {"a": 2, "b": "é"}}
CALL_TEXT = '<call>{"name": "add", "arguments": {"a": 2, "b": "é"}}</call>'
SCHEMA = {"type": "function", "function": {"name": "add", "description": "Adds."}}
SCHEMA_TEXT = turn("system", f"[{json.dumps(SCHEMA)}]")
QUESTION, ANSWER = message("user", "2 + é?"), message("assistant", "It is 4.")
CALLED = turn("user", "2 + é?") + said(CALL_TEXT) + turn("tool", "4") + said("It is 4.")


def calling(call, **more):
    return [QUESTION, {"role": "assistant", "tool_calls": [call], **more}, message("tool", "4"), ANSWER]


ROWS = {
    "messages": (
        {"messages": [message("system", "Be brief."), QUESTION, ANSWER, message("user", "☃"), message("assistant", "🙂\n x")]},
        turn("system", "Be brief.") + turn("user", "2 + é?") + said("It is 4.") + turn("user", "☃") + said("🙂\n x")),
    "messages-developer": (
        {"messages": [message("developer", "d"), QUESTION, ANSWER]},
        turn("developer", "d") + turn("user", "2 + é?") + said("It is 4.")),
    "messages-arguments-object": ({"messages": calling({"type": "function", "function": CALL})}, CALLED),
    "messages-arguments-string": (
        {"messages": calling({"function": {**CALL, "arguments": json.dumps(CALL["arguments"])}})}, CALLED),
    "messages-call-without-function": ({"messages": calling(CALL)}, CALLED),
    "messages-content-null": ({"messages": calling({"function": CALL}, content=None)}, CALLED),
    "messages-content-beside-call": (
        {"messages": calling({"function": CALL}, content="Well:")[:2]}, turn("user", "2 + é?") + said("Well:" + CALL_TEXT)),
    "messages-two-calls": (
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": [{"function": CALL}, {"function": CALL}]}]},
        turn("user", "2 + é?") + said(CALL_TEXT * 2)),
    "messages-tools-list": ({"messages": [QUESTION, ANSWER], "tools": [SCHEMA]},
                            SCHEMA_TEXT + turn("user", "2 + é?") + said("It is 4.")),
    "messages-tools-string": ({"messages": [QUESTION, ANSWER], "tools": json.dumps([SCHEMA])},
                              SCHEMA_TEXT + turn("user", "2 + é?") + said("It is 4.")),
    "messages-tools-null": ({"messages": [QUESTION, ANSWER], "tools": None}, turn("user", "2 + é?") + said("It is 4.")),
    "messages-tools-empty": ({"messages": [QUESTION, ANSWER], "tools": ""}, turn("user", "2 + é?") + said("It is 4.")),
    "messages-text-parts": (
        {"messages": [message("user", [{"type": "text", "text": "2 + "}, {"type": "text", "text": "é?"}]),
                      message("assistant", [{"type": "text", "text": "It is 4."}])]},
        turn("user", "2 + é?") + said("It is 4.")),
    "messages-weight": (
        {"messages": [QUESTION, message("assistant", "5", weight=0), QUESTION, message("assistant", "4", weight=1)]},
        turn("user", "2 + é?") + turn("assistant", "5") + turn("user", "2 + é?") + said("4")),
    "messages-reasoning-content": ({"messages": [QUESTION, {**ANSWER, "reasoning_content": "hm"}]},
                                   turn("user", "2 + é?") + said("<think>hm</think>It is 4.")),
    "messages-reasoning": ({"messages": [QUESTION, {**ANSWER, "reasoning": "hm"}]},
                           turn("user", "2 + é?") + said("<think>hm</think>It is 4.")),
    "messages-empty-answer": ({"messages": [QUESTION, message("assistant", "")]}, turn("user", "2 + é?") + said("")),
    "ShareGPT": (
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]},
        turn("system", "s") + turn("user", "h") + said("g")),
    "ShareGPT-tools": (
        {"conversations": [{"from": "human", "value": "2 + é?"}, {"from": "function_call", "value": json.dumps(CALL)},
                           {"from": "observation", "value": "4"}, {"from": "gpt", "value": "It is 4."}]}, CALLED),
    "ShareGPT-calls": (
        {"conversations": [{"from": "human", "value": "h"}, {"from": "function_call", "value": json.dumps([CALL, CALL])}]},
        turn("user", "h") + said(CALL_TEXT * 2)),
    "ShareGPT-roles": ({"conversations": [QUESTION, ANSWER]}, turn("user", "2 + é?") + said("It is 4.")),
    "ShareGPT-system": (
        {"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}], "system": "s", "tools": [SCHEMA]},
        SCHEMA_TEXT + turn("system", "s") + turn("user", "h") + said("g")),
    "prompt-strings": ({"prompt": "2 + 2 =", "completion": " 4"}, f"2 + 2 =⟦ 4{END}⟧"),
    "prompt-empty": ({"prompt": "", "completion": "4"}, f"⟦4{END}⟧"),
    "prompt-messages": ({"prompt": [QUESTION], "completion": [ANSWER]}, turn("user", "2 + é?") + said("It is 4.")),
    "prompt-messages-earlier-answers": (
        {"prompt": [QUESTION, message("assistant", "5"), QUESTION],
         "completion": [ANSWER, message("user", "☃"), message("assistant", "🙂")], "tools": [SCHEMA]},
        SCHEMA_TEXT + turn("user", "2 + é?") + turn("assistant", "5") + turn("user", "2 + é?") + said("It is 4.")
        + turn("user", "☃") + said("🙂")),
    "Alpaca": ({"instruction": "Add.", "output": "4"}, turn("user", "Add.") + said("4")),
    "Alpaca-input": ({"instruction": "Add.", "input": "2, 2", "output": "4"}, turn("user", "Add.\n2, 2") + said("4")),
    "Alpaca-input-empty": ({"instruction": "Add.", "input": "", "output": "4"}, turn("user", "Add.") + said("4")),
    "Alpaca-history": (
        {"instruction": "And?", "input": None, "output": "8", "history": [["a", "b"], ["c", "d"]], "system": "s"},
        turn("system", "s") + turn("user", "a") + said("b") + turn("user", "c") + said("d") + turn("user", "And?") + said("8")),
    "text": ({"text": "one\n\ntwo ☃", "id": 7}, f"⟦one\n\ntwo ☃{END}⟧"),
}


@pytest.mark.parametrize(("row", "expected"), ROWS.values(), ids=ROWS)
def test_row_becomes_this_text_with_this_part_trained_on(agent, tmp_path, cache, row, expected):
    assert trained_on(jsonl(tmp_path / "a.jsonl", row), agent, cache) == [expected]


def test_arguments_that_a_template_wants_as_a_string_are_written_as_one(tmp_path, cache):
    template = AGENT.replace("((call.function or call) | tojson)", "call.function.arguments")
    tokenizer = data.Tokenizer(model_folder(tmp_path, template))
    strings = {**CALL, "arguments": json.dumps(CALL["arguments"], ensure_ascii=False)}
    path = jsonl(tmp_path / "a.jsonl", *({"messages": calling({"function": call})[:2]} for call in (CALL, strings)))
    assert trained_on(path, tokenizer, cache) == [turn("user", "2 + é?") + said('<call>{"a": 2, "b": "é"}</call>')] * 2


@pytest.mark.parametrize("quoted", [str(CALL["arguments"]), json.dumps(json.dumps(CALL["arguments"], ensure_ascii=False))])
@pytest.mark.parametrize("as_string", [False, True], ids=["object", "string"])
def test_text_that_quotes_the_arguments_does_not_change_how_they_are_written(agent, tmp_path, cache, quoted, as_string):
    call = {**CALL, "arguments": json.dumps(CALL["arguments"], ensure_ascii=False)} if as_string else CALL
    messages = [*calling({"function": call})[:2], message("tool", quoted), ANSWER]
    expected = turn("user", "2 + é?") + said(CALL_TEXT) + turn("tool", quoted) + said("It is 4.")
    assert trained_on(jsonl(tmp_path / "a.jsonl", chat(*messages)), agent, cache) == [expected]


def test_arguments_of_one_conversation_may_be_objects_and_strings(agent, tmp_path, cache):
    calls = [{"function": CALL}, {"function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}]
    path = jsonl(tmp_path / "a.jsonl", chat(message("user", "q"), {"role": "assistant", "tool_calls": calls}))
    assert trained_on(path, agent, cache) == [turn("user", "q") + said(CALL_TEXT * 2)]


def test_later_rows_of_a_prompt_file_may_be_strings_or_messages(agent, tmp_path, cache):
    path = jsonl(tmp_path / "a.jsonl", ROWS["prompt-strings"][0], ROWS["prompt-messages"][0], ROWS["prompt-strings"][0])
    expected = [ROWS[name][1] for name in ("prompt-strings", "prompt-messages", "prompt-strings")]
    assert trained_on(path, agent, cache) == expected


@pytest.mark.parametrize("generation", [True, False])
def test_weights_of_messages_count_with_and_without_generation_tags(tmp_path, cache, generation):
    tokenizer = data.Tokenizer(model_folder(tmp_path, AGENT if generation else CHATML))
    path = jsonl(tmp_path / "a.jsonl", ROWS["messages-weight"][0])
    assert trained_on(path, tokenizer, cache) == [ROWS["messages-weight"][1]]


def test_train_on_all_trains_on_every_token(agent, tmp_path, cache):
    path = jsonl(tmp_path / "a.jsonl", ROWS["messages"][0])
    expected = ROWS["messages"][1].replace("⟦", "").replace("⟧", "")
    assert trained_on(path, agent, cache, train_on="all") == [f"⟦{expected}⟧"]


def test_counts_of_a_file_are_those_of_its_rows(agent, tmp_path, cache):
    rows = [ROWS["messages"][0], {"messages": [QUESTION]}, {"messages": [message("user", END), ANSWER]},
            ROWS["messages-weight"][0]]
    documents, count = opened(jsonl(tmp_path / "a.jsonl", *rows), agent, cache)
    wanted = {"format": "messages", "rows": 4, "conversations": 4, "turns": 4, "untold": 0, "spelled": 1, "unended": 0,
              "untrained": 1, "kept": 3, "long": 0, "bad": {}, "policy": "drop", "weight": 1.0}
    assert {key: count.get(key, 0) for key in wanted} == wanted
    assert count["n_trained"] == sum(sum(supervised) for _, supervised in pieces(documents))
    assert count["n_tokens"] == sum(len(ids) - 1 for ids, _ in pieces(documents))


# ---------------------------------------------------------------- containers

CHATS = [{"messages": [message("user", f"Frage {i} ☃"), message("assistant", f"Réponse\n{'x ' * i}")]} for i in range(4)]


def lines_json(rows):
    return "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows)), [1, 2, 3, 4]


def blank_lines(rows):
    return "\n  \n" + "\n\n".join(json.dumps(row) for row in rows), [3, 5, 7, 9]


def array_pretty(rows):
    text = json.dumps(rows, indent=2, ensure_ascii=False)
    return text + "\n", [i for i, line in enumerate(text.split("\n"), 1) if line == "  {"]


def array_one_line(rows):
    return json.dumps(rows), [1] * 4


def array_of_lines(rows):
    return " \n[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n\n", [3, 4, 5, 6]


@pytest.mark.parametrize("crlf", [False, True], ids=["lf", "crlf"])
@pytest.mark.parametrize("bom", [False, True], ids=["plain", "bom"])
@pytest.mark.parametrize("suffix", ["", ".gz"], ids=["raw", "gz"])
@pytest.mark.parametrize(("name", "write"), [
    ("a.jsonl", lines_json), ("a.jsonl", blank_lines), ("a.json", array_pretty), ("a.json", array_one_line),
    ("a.json", array_of_lines), ("a.json", lines_json), ("a.jsonl", array_one_line), ("A.JSONL", lines_json),
])
def test_the_same_rows_are_the_same_documents_in_every_container(tiny, tmp_path, cache, name, write, suffix, bom, crlf):
    reference = arrays_of(folder_of(jsonl(tmp_path / "reference.jsonl", *CHATS), tiny, cache))
    text, lines = write(CHATS)
    raw = codecs.BOM_UTF8 * bom + text.replace("\n", "\r\n" if crlf else "\n").encode()
    path = tmp_path / (name + suffix)
    path.write_bytes(gzip.compress(raw) if suffix else raw)
    assert arrays_of(folder_of(path, tiny, cache)) == {**reference, "lines": lines}
    documents, _ = opened(path, tiny, cache)
    assert documents.line.tolist() == lines


@pytest.mark.parametrize("bom", [False, True], ids=["plain", "bom"])
@pytest.mark.parametrize("suffix", ["", ".gz"], ids=["raw", "gz"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_txt_file_is_one_document_of_its_characters(tiny, tmp_path, cache, suffix, bom, newline):
    text = f"one{newline}{newline} two ☃ 🙂{newline}"
    raw = codecs.BOM_UTF8 * bom + text.encode()
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix else raw)
    documents, count = opened(path, tiny, cache)
    ids = [*tiny.core.encode(text).ids, 1]
    assert pieces(documents) == [(ids, [True] * len(ids))]
    assert documents.line.tolist() == [1] and count["rows"] == 1 and count["format"] == "text"


def test_rows_across_the_blocks_of_a_read_are_whole(tiny, tmp_path, cache):
    rows = [{"text": f"{i} " + "é☃🙂" * 30_000} for i in range(5)]  # 1.3 MB, and a megabyte is read at once
    expected = [row["text"] for row in rows]
    (tmp_path / "a.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1), "utf-8")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    read = {name: [json.loads(raw)["text"] for _, raw in data.read_rows(tmp_path / name)] for name in ("a.json", "a.jsonl")}
    assert read == {"a.json": expected, "a.jsonl": expected}


# ---------------------------------------------------------------- bad rows

GOOD_CHAT = {"messages": [message("user", "q"), message("assistant", "a")]}
GOOD = {
    "messages": GOOD_CHAT,
    "ShareGPT": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "prompt and completion": {"prompt": "q", "completion": "a"},
    "Alpaca": {"instruction": "q", "output": "a"},
    "text": {"text": "a b"},
}


def chat(*messages, **more):
    return {"messages": [*messages], **more}


def nested(depth):
    return "[" * depth + "]" * depth


BAD = {  # name: (format, the row, what is said of it)
    "broken-json": ("messages", b'{"messages": [', "not valid JSON"),
    "two-objects": ("text", b'{"text": "a"} {"text": "b"}', "not valid JSON"),
    "not-an-object": ("messages", [1, 2], "expected a JSON object, got list"),
    "a-string": ("text", "text", "expected a JSON object, got str"),
    "invalid-utf8": ("text", b'{"text": "a\xff"}', "not valid JSON in UTF-8"),
    "nested-100000": ("messages", nested(100_000).encode(), "not valid JSON"),
    "wrong-keys": ("messages", {"text": "a"}, r"expected 'messages' as in the file's first row, got \['text'\]"),
    "no-keys": ("prompt and completion", {}, r"expected 'prompt' and 'completion' as in the file's first row, got \[\]"),
    "text-number": ("text", {"text": 5}, "'text': expected strings, got int"),
    "text-null": ("text", {"text": None}, "'text': expected strings, got NoneType"),
    "messages-string": ("messages", {"messages": "hello"}, "'messages' must be a list of objects"),
    "messages-empty": ("messages", {"messages": []}, "'messages' must be a list of objects"),
    "messages-of-strings": ("messages", {"messages": ["q", "a"]}, "'messages' must be a list of objects"),
    "unknown-role": ("messages", chat(message("human", "q")), "unknown role 'human'; expected system"),
    "no-role": ("messages", chat({"content": "q"}), "unknown role None"),
    "role-list": ("messages", chat(message(["user"], "q")), r"unknown role \['user'\]"),
    "image": ("messages", chat(message("user", [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "q"}])),
              r"'content' of a message of 'user' must be text, got \['image_url', 'text'\] parts"),
    "content-number": ("messages", chat(message("user", 5)), "must be text, got int"),
    "content-null": ("messages", chat(message("assistant", None)), "must be text, got NoneType"),
    "content-null-no-calls": ("messages", chat(message("assistant", None, tool_calls=[])), "must be text, got NoneType"),
    "half-a-surrogate": ("text", b'{"text": "a\\ud83d"}', "surrogates not allowed"),
    "half-a-surrogate-in-chat": ("messages", b'{"messages": [{"role": "user", "content": "\\ude00"}]}',
                                 "surrogates not allowed"),
    "half-a-surrogate-in-bytes": ("text", b'{"text": "a\xed\xa0\xbd"}', "surrogates not allowed"),
    "reserved": ("messages", chat(message("user", data.OPEN)), r"U\+104000 to U\+10FFFD in a message"),
    "reserved-name": ("messages", chat(message("user", chr(data.RESERVED[2]) * 12)), r"U\+104000 to U\+10FFFD"),
    "tool-calls-object": ("messages", chat(message("assistant", "", tool_calls={})), "'tool_calls' must be a list"),
    "tool-calls-strings": ("messages", chat(message("assistant", "", tool_calls=["f"])), "'tool_calls' must be a list"),
    "tool-calls-function": ("messages", chat(message("assistant", "", tool_calls=[{"function": "f"}])),
                            "'tool_calls' must be a list of objects with a 'function'"),
    "tools-object": ("messages", {**GOOD_CHAT, "tools": SCHEMA}, "'tools' must be a list of JSON schemas"),
    "tools-strings": ("messages", {**GOOD_CHAT, "tools": ["f"]}, "'tools' must be a list of JSON schemas"),
    "tools-broken": ("messages", {**GOOD_CHAT, "tools": "[{"}, "'tools' is not valid JSON"),
    "conversations-strings": ("ShareGPT", {"conversations": ["q"]}, "'conversations' must be a list of objects"),
    "conversations-object": ("ShareGPT", {"conversations": {}}, "'conversations' must be a list of objects"),
    "from-unknown": ("ShareGPT", {"conversations": [{"from": "bot", "value": "q"}]}, "unknown role 'bot'"),
    "value-missing": ("ShareGPT", {"conversations": [{"from": "gpt"}]}, "must be text, got NoneType"),
    "function-call": ("ShareGPT", {"conversations": [{"from": "function_call", "value": "f(x)"}]}, "must hold JSON"),
    "function-call-null": ("ShareGPT", {"conversations": [{"from": "function_call", "value": None}]}, "must hold JSON"),
    "function-call-number": ("ShareGPT", {"conversations": [{"from": "function_call", "value": "5"}]}, "'tool_calls' must be"),
    "instruction-number": ("Alpaca", {"instruction": 5, "output": "a"}, "'instruction' must be a string, got int"),
    "output-null": ("Alpaca", {"instruction": "q", "output": None}, "must be text, got NoneType"),
    "history-strings": ("Alpaca", {**GOOD["Alpaca"], "history": ["q", "a"]}, "'history' must be a list of pairs"),
    "history-triple": ("Alpaca", {**GOOD["Alpaca"], "history": [["q", "a", "b"]]}, "'history' must be a list of pairs"),
    "history-number": ("Alpaca", {**GOOD["Alpaca"], "history": [["q", 5]]}, "must be text, got int"),
    "prompt-string-completion-list": ("prompt and completion", {"prompt": "q", "completion": [message("assistant", "a")]},
                                      "expected strings or lists of messages, got str and list"),
    "prompt-list-completion-string": ("prompt and completion", {"prompt": [message("user", "q")], "completion": "a"},
                                      "'completion' must be a list of objects"),
    "prompt-number": ("prompt and completion", {"prompt": 5, "completion": "a"}, "got int and str"),
}
HARD = {  # types that are not expected where they stand, and JSON that Python's recursion does not reach the end of
    "from-list": ("ShareGPT", {"conversations": [{"from": ["gpt"], "value": "a"}]}, "unknown role"),
    "from-object": ("ShareGPT", {"conversations": [{"from": {}, "value": "a"}]}, "unknown role"),
    "history-an-int": ("Alpaca", {**GOOD["Alpaca"], "history": 5}, "'history' must be a list of pairs"),
    "nested-600-in-a-message": ("messages", chat(message("user", "q", x=json.loads(nested(600))), GOOD_CHAT["messages"][1]),
                                "nested|recursion"),
    "nested-in-tools": ("messages", {**GOOD_CHAT, "tools": nested(100_000)}, "'tools'"),
    "nested-in-function-call": ("ShareGPT", {"conversations": [{"from": "function_call", "value": nested(100_000)}]},
                                "must hold JSON"),
    "nested-in-arguments": ("messages", chat(message("user", "q"), message("assistant", "", tool_calls=[
        {"function": {"name": "f", "arguments": '{"a": ' + nested(100_000) + "}"}}])), "tool call|nested|recursion"),
}


def with_bad_rows(path, kind, *bad, good=100):
    """A file of `good` good rows with bad ones from line 3 on -> the lines of the good rows."""
    raw = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in bad]
    rows = [json.dumps(GOOD[kind]).encode()] * good
    rows[2:2] = raw
    path.write_bytes(b"\n".join(rows))
    return [line for line in range(1, len(rows) + 1) if not 3 <= line < 3 + len(raw)]


def check_bad_row(tokenizer, tmp_path, cache, kind, row, what):
    lines = with_bad_rows(tmp_path / "a.jsonl", kind, row)
    documents, count = opened(tmp_path / "a.jsonl", tokenizer, cache)
    assert documents.line.tolist() == lines and count["rows"] == 101
    assert len({tuple(ids) for ids, _ in pieces(documents)}) == 1  # the good rows, which are all alike
    assert [n for n, _ in count["bad"].values()] == [1]
    (said_of_it,) = data.bad_rows(count, "some/a.jsonl")
    prefix, _, text = said_of_it.partition("a.jsonl:3: ")
    assert prefix == "  some/" and re.search(what, text), said_of_it


@pytest.mark.parametrize(("kind", "row", "what"), BAD.values(), ids=BAD)
def test_bad_row_is_left_out_and_named(agent, tmp_path, cache, kind, row, what):
    check_bad_row(agent, tmp_path, cache, kind, row, what)


@pytest.mark.parametrize(("kind", "row", "what"), HARD.values(), ids=HARD)
def test_row_of_a_shape_that_nobody_expects_is_left_out_and_named(agent, tmp_path, cache, kind, row, what):
    check_bad_row(agent, tmp_path, cache, kind, row, what)


def test_row_to_which_the_template_objects_is_left_out_and_named(tmp_path, cache):
    tokenizer = data.Tokenizer(model_folder(tmp_path, LLAMA2))
    row = chat(message("user", "a"), message("user", "b"))
    check_bad_row(tokenizer, tmp_path, cache, "messages", row, r"chat_template\.jinja.*roles must alternate")


def test_too_many_bad_rows_are_refused_with_their_kinds_and_lines(tiny, tmp_path, cache):
    bad = [b"{"] * 5 + [{"text": "a"}] + [chat(message("human", "q"))] * 4
    with_bad_rows(tmp_path / "a.jsonl", "messages", *bad, good=40)
    with pytest.raises(ValueError) as error:
        opened(tmp_path / "a.jsonl", tiny, cache)
    first, *rest = str(error.value).replace(str(tmp_path), "").split("\n")
    assert first == "/a.jsonl: 10 of 50 rows cannot be trained on, the other 40 can (up to 1% would be left out):"
    assert [line.split(": ")[0] for line in rest] == [
        "  /a.jsonl:3", "  /a.jsonl:4", "  /a.jsonl:5", "  and 2 more (JSON)", "  /a.jsonl:8",
        "  /a.jsonl:9", "  /a.jsonl:10", "  /a.jsonl:11", "  and 1 more (roles)"]


@pytest.mark.parametrize(("good", "fine"), [(99, True), (98, False)])
def test_one_row_in_a_hundred_may_be_bad(tiny, tmp_path, cache, good, fine):
    lines = with_bad_rows(tmp_path / "a.jsonl", "text", b"{", good=good)
    if fine:
        assert opened(tmp_path / "a.jsonl", tiny, cache)[0].line.tolist() == lines
    else:
        with pytest.raises(ValueError, match=r"1 of 99 rows cannot be trained on, the other 98 can"):
            opened(tmp_path / "a.jsonl", tiny, cache)


def test_the_first_row_that_has_a_format_decides_on_it(tiny, tmp_path, cache):
    rows = [b"{", b'{"id": 1}', *[json.dumps(GOOD["text"]).encode()] * 200]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(rows))
    documents, count = opened(tmp_path / "a.jsonl", tiny, cache)
    assert count["format"] == "text" and documents.line.tolist() == list(range(3, 203))


def test_file_without_a_known_format_names_its_first_row_and_the_formats(tiny, tmp_path, cache):
    path = jsonl(tmp_path / "a.jsonl", {"question": "q", "answer": "a"})
    with pytest.raises(ValueError, match=r"a\.jsonl:1: expected one of 'messages', 'conversations', 'prompt' \+ 'completion', "
                                         r"'instruction' \+ 'output', 'text', got \['question', 'answer'\]"):
        folder_of(path, tiny, cache)


# ---------------------------------------------------------------- bad files

BAD_ARRAYS = {
    "no-end": (b'[{"text": "a"},\n{"text": "b"}', ":2: the array is not valid JSON: no ']'"),
    "no-end-behind-a-comma": (b'[{"text": "a"},\n', ":2: the array is not valid JSON: no ']'"),
    "only-a-bracket": (b"\n[", ":2: the array is not valid JSON: no ']'"),
    "broken-element": (b'[{"text": "a"},\n{"text": "b},\n{"text": "c"}]', ":2: the array is not valid JSON"),
    "bare-word": (b'[{"text": "a"},\n\nfoo]', ":3: the array is not valid JSON: Expecting value"),
    "invalid-utf8": (b'[{"text": "a\xff"}]', "not UTF-8 text: .*byte 12"),
    "nested": (b'[{"text": "a"},\n' + b"[" * 100_000, ":2: the array is not valid JSON.*recursion"),
}
BAD_COMMAS = {
    "trailing-garbage": (b'[{"text": "a"}]\ngarbage', "not valid JSON"),
    "two-arrays": (b'[{"text": "a"}]\n[{"text": "b"}]', "not valid JSON"),
    "no-comma": (b'[{"text": "a"} {"text": "b"}]', "not valid JSON"),
}


@pytest.mark.parametrize(("raw", "what"), BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_broken_array_is_refused_with_its_line(tiny, tmp_path, cache, raw, what):
    (tmp_path / "a.json").write_bytes(raw)
    with pytest.raises(ValueError, match=rf"a\.json:? ?{what}"):
        folder_of(tmp_path / "a.json", tiny, cache)


@pytest.mark.parametrize(("raw", "what"), BAD_COMMAS.values(), ids=BAD_COMMAS)
def test_array_with_something_else_around_its_elements_is_refused(tiny, tmp_path, cache, raw, what):
    (tmp_path / "a.json").write_bytes(raw)
    with pytest.raises(ValueError, match=what):
        folder_of(tmp_path / "a.json", tiny, cache)


def test_number_across_the_blocks_of_a_read_is_one_row(tmp_path):
    text = json.dumps([{"text": "a" * (2**20 - 18)}, 123456])
    (tmp_path / "a.json").write_text(text)
    assert text[: 2**20][-3:] == "123" and [raw for _, raw in data.read_rows(tmp_path / "a.json")][1:] == [b"123456"]


def test_bad_elements_of_an_array_are_bad_rows(tiny, tmp_path, cache):
    rows = [GOOD["text"], 5, "a, [string]", *[GOOD["text"]] * 300]
    (tmp_path / "a.json").write_text("[" + ",\n".join(map(json.dumps, rows)) + "]")
    documents, count = opened(tmp_path / "a.json", tiny, cache)
    assert documents.line.tolist() == [1, *range(4, 304)]
    assert [line.split(": ")[0] for line in data.bad_rows(count, "a.json")] == ["  a.json:2", "  a.json:3"]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.json.gz"])
@pytest.mark.parametrize("damage", ["truncated", "not-gzip", "flipped"])
def test_broken_gzip_is_refused(tiny, tmp_path, cache, name, damage):
    rows = [{"text": str(i)} for i in range(500)]
    raw = gzip.compress(json.dumps(rows).encode() if ".json." in name else "\n".join(map(json.dumps, rows)).encode())
    flipped = bytearray(raw)
    flipped[len(raw) // 2] ^= 255
    (tmp_path / name).write_bytes({"truncated": raw[:-20], "not-gzip": b'{"text": "a"}\n', "flipped": bytes(flipped)}[damage])
    with pytest.raises(ValueError, match=rf"{name}: not a whole gzip file"):
        folder_of(tmp_path / name, tiny, cache)


@pytest.mark.parametrize(("name", "command"), [
    ("a.parquet", "read_parquet('PATH/a.parquet').to_json('PATH/a.jsonl', orient='records', lines=True)"),
    ("a.csv", "read_csv('PATH/a.csv').to_json('PATH/a.jsonl', orient='records', lines=True)"),
    ("a.csv.gz", "read_csv('PATH/a.csv.gz').to_json('PATH/a.jsonl', orient='records', lines=True)"),
    ("a.tsv", "read_table('PATH/a.tsv').to_json('PATH/a.jsonl', orient='records', lines=True)"),
    ("a.xlsx", "read_excel('PATH/a.xlsx').to_json('PATH/a.jsonl', orient='records', lines=True)"),
    ("a.arrow", "read_feather('PATH/a.arrow').to_json('PATH/a.jsonl', orient='records', lines=True)"),
])
def test_tables_are_refused_with_a_command_that_converts_them(tiny, tmp_path, cache, name, command):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError) as error:
        folder_of(tmp_path / name, tiny, cache)
    text = str(error.value).replace(str(tmp_path), "PATH")
    assert text.startswith(f"PATH/{name}: expected {data.READABLE}; convert it with: python -c \"import pandas; pandas.")
    assert command in text


@pytest.mark.parametrize(("name", "raw", "what"), [
    ("a.pdf", b"x", r"a\.pdf: expected a \.jsonl, \.json or \.txt file[^;]*$"),
    ("noextension", b"x", r"noextension: expected a \.jsonl[^;]*$"),
    ("a.jsonl", None, r"a\.jsonl: no such file; expected a \.jsonl"),
    ("a.jsonl", b"", r"a\.jsonl: nothing to train on"), ("a.json", b"", r"a\.json: nothing to train on"),
    ("a.txt", b"", r"a\.txt: nothing to train on"), ("a.txt", codecs.BOM_UTF8, r"a\.txt: nothing to train on"),
    ("a.jsonl.gz", b"", r"a\.jsonl\.gz: nothing to train on"), ("a.txt.gz", gzip.compress(b""), r"nothing to train on"),
    ("a.jsonl", b"\n \r\n\n\t\n", r"a\.jsonl: nothing to train on"), ("a.json", b"[ \n]", r"a\.json: nothing to train on"),
    ("a.txt", b"abc\xff", r"a\.txt: not UTF-8 text: .*byte 3"),
    ("a.txt", "abc☃".encode()[:-1], r"a\.txt: not UTF-8 text: .*byte 3"),
    ("a.txt", codecs.BOM_UTF8 + b"ab\xff", r"a\.txt: not UTF-8 text: .*byte 5"),
])
def test_file_that_cannot_be_read_is_refused_by_name(tiny, tmp_path, cache, name, raw, what):
    if raw is not None:
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=what):
        folder_of(tmp_path / name, tiny, cache)


def test_directory_is_no_data_file(tiny, tmp_path, cache):
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"a\.jsonl: a folder"):
        folder_of(tmp_path / "a.jsonl", tiny, cache)


@pytest.mark.parametrize(("name", "text", "line"), [
    ("a.jsonl", '{"text": "a"}\n\n{"text": "%s"}\n{"text": "b"}\n', 3), ("a.json", '[{"text": "a"},\n{"text": "%s"}]', 2)])
def test_row_beyond_the_limit_is_refused_with_its_line(tiny, tmp_path, cache, monkeypatch, name, text, line):
    monkeypatch.setattr(data, "MAX_ROW", 2**20)
    (tmp_path / name).write_text(text % ("x" * (4 * 2**20)))
    with pytest.raises(ValueError, match=rf"{name}:{line}: .*(more than 1 MiB|row is too long)"):
        folder_of(tmp_path / name, tiny, cache)


def test_documents_without_a_target_are_refused(tiny, tmp_path, cache):
    path = jsonl(tmp_path / "a.jsonl", *[{"messages": [message("user", "q")]}] * 3)
    with pytest.raises(ValueError, match=r"nothing to train on: 3 rows read, 0 longer than --seq_len 4096 .*, 3 without"):
        opened(path, tiny, cache)


def test_too_few_supervised_tokens_are_refused(tiny, tmp_path, cache):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "word " * 500, "completion": "x"})
    with pytest.raises(ValueError, match=r"a\.jsonl: only 2 of 501 tokens .* lower --min_supervised"):
        opened(path, tiny, cache, min_supervised=0.01)


def test_tokens_beyond_the_vocabulary_are_refused(tiny, tmp_path, cache):
    path = jsonl(tmp_path / "a.jsonl", {"text": "word"})
    largest = max(tiny.core.encode("word").ids)
    assert opened(path, tiny, cache, vocab_size=largest + 1)[1]["largest_id"] == largest
    with pytest.raises(ValueError, match=rf"token id {largest} is beyond the model's {largest} embeddings"):
        opened(path, tiny, cache, vocab_size=largest)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize(("weight", "times"), [("", 8), (":1", 8), (":2", 16), (":0.5", 4), (":2.5", 20), (":.25", 2)])
def test_weight_is_how_often_a_file_is_used(tiny, tmp_path, cache, weight, times):
    path = jsonl(tmp_path / "a.jsonl", *({"text": f"word {i}"} for i in range(8)))
    spec = path + weight
    documents, (count,) = data.open_documents([folder_of(path, tiny, cache)], [spec], 64)
    used = Counter(documents.line.tolist())
    assert documents.line.size == times and (count["name"], count["kept"]) == (path, 8)
    assert set(used.values()) <= {times // 8, -(-times // 8)}


def test_part_of_a_file_that_a_weight_takes_depends_on_the_seed_alone(tiny, tmp_path, cache):
    path = jsonl(tmp_path / "a.jsonl", *({"text": f"word {i}"} for i in range(40)))
    folder = folder_of(path, tiny, cache)
    lines = [data.open_documents([folder], [f"{path}:0.5"], 64, seed=seed)[0].line.tolist() for seed in (3, 3, 4)]
    assert lines[0] == lines[1] != lines[2] and [len(set(some)) for some in lines] == [20] * 3


def test_files_follow_each_other_in_the_documents(tiny, tmp_path, cache):
    paths = [jsonl(tmp_path / f"{name}.jsonl", *({"text": f"{name} {i}"} for i in range(3))) for name in "ab"]
    documents, counts = data.open_documents([folder_of(path, tiny, cache) for path in paths], [f"{paths[0]}:2", paths[1]], 64)
    assert documents.file.tolist() == [0] * 6 + [1] * 3 and documents.line.tolist() == [1, 2, 3] * 3
    texts = [tiny.core.decode(ids) for ids, _ in pieces(documents)]
    assert texts == ["a 0", "a 1", "a 2"] * 2 + ["b 0", "b 1", "b 2"] and [c["kept"] for c in counts] == [3, 3]


@pytest.mark.parametrize("weight", ["0", "0.0", "-1", "1e6", "1e999", "1.2.3", "e", "-", "--2"])
def test_weight_that_is_no_positive_number_is_refused(weight):
    with pytest.raises(ValueError, match=rf"a\.jsonl:{weight}: how often a file is used must be a positive number"):
        data.split_weight(f"a.jsonl:{weight}")


@pytest.mark.parametrize("spec", ["a.jsonl:nan", "a.jsonl:inf", "a.jsonl:two"])
def test_word_behind_a_colon_is_part_of_a_name_that_is_missing(spec):
    assert data.split_weight(spec) == (spec, 1.0)
    with pytest.raises(ValueError, match=f"{spec}: no such file"):
        data.check_file(spec)


@pytest.mark.parametrize(("spec", "expected"), [
    ("stdlib:docs", ("stdlib:docs", 1.0)), ("stdlib:docs:3", ("stdlib:docs", 3.0)), ("stdlib:code:0.5", ("stdlib:code", 0.5)),
    ("a.jsonl", ("a.jsonl", 1.0)), ("a:b.jsonl:2", ("a:b.jsonl", 2.0))])
def test_name_and_weight_of_a_file(spec, expected):
    assert data.split_weight(spec) == expected


def test_file_whose_name_ends_like_a_weight_is_that_file(tmp_path):
    (tmp_path / "a.jsonl:2").write_text("x")
    assert data.split_weight(f"{tmp_path}/a.jsonl:2") == (f"{tmp_path}/a.jsonl:2", 1.0)
    assert data.split_weight(f"{tmp_path}/a.jsonl:2:3") == (f"{tmp_path}/a.jsonl:2", 3.0)


# ---------------------------------------------------------------- documents that do not fit


def windows(ids, supervised, seq_len):
    """Pieces of seq_len positions: each begins with the last target of the one before."""
    return [(ids[at : at + seq_len + 1], supervised[at : at + seq_len + 1]) for at in range(0, max(len(ids) - 1, 1), seq_len)]


LONG_CHAT = {"messages": [message("user", "a b c " * 30), message("assistant", "d e " * 20), message("user", "f " * 40),
                          message("assistant", "g h")]}
SHORT_CHAT = {"messages": [message("user", "q"), message("assistant", "a")]}
LONG_ROWS = {"text": [{"text": "w x y " * 40}, {"text": "z"}, {"text": "v " * 31}],
             "messages": [LONG_CHAT, SHORT_CHAT, SHORT_CHAT]}


@pytest.mark.parametrize(("kind", "overflow", "policy"), [
    ("text", None, "split"), ("messages", None, "drop"),
    *((kind, policy, policy) for kind in LONG_ROWS for policy in ("split", "drop", "truncate"))])
@pytest.mark.parametrize("seq_len", [16, 31, 32, 33])
def test_what_becomes_of_long_documents(tiny, tmp_path, cache, kind, overflow, policy, seq_len):
    path = jsonl(tmp_path / "a.jsonl", *LONG_ROWS[kind])
    whole = pieces(opened(path, tiny, cache)[0])
    assert len(whole) == 3
    if policy == "split":
        expected = [(line, piece) for line, document in enumerate(whole, 1) for piece in windows(*document, seq_len)]
    elif policy == "truncate":
        expected = [(line, windows(*document, seq_len)[0]) for line, document in enumerate(whole, 1)]
    else:
        expected = [(line, document) for line, document in enumerate(whole, 1) if len(document[0]) <= seq_len + 1]
    expected = [(line, piece) for line, piece in expected if any(piece[1][1:])]

    documents, count = opened(path, tiny, cache, seq_len=seq_len, overflow=overflow)
    assert list(zip(documents.line.tolist(), pieces(documents), strict=True)) == expected
    assert documents.n_targets.tolist() == [sum(supervised[1:]) for _, (_, supervised) in expected]
    assert max(len(ids) for ids, _ in pieces(documents)) <= seq_len + 1
    positions = [len(ids) - 1 for ids, _ in whole]
    kept = {line for line, _ in expected}
    assert (count["policy"], count["long"], count["longest"]) == (policy, sum(n > seq_len for n in positions), max(positions))
    assert count["kept"] == len(kept) and count["n_tokens"] == sum(len(ids) - 1 for _, (ids, _) in expected)
    tried = [i for i, n in enumerate(positions, 1) if policy != "drop" or n <= seq_len]
    assert count["untrained"] == len(set(tried) - kept)


@pytest.mark.parametrize("kind", LONG_ROWS)
def test_split_documents_have_every_target_once(tiny, tmp_path, cache, kind):
    path = jsonl(tmp_path / "a.jsonl", *LONG_ROWS[kind])
    whole, split = opened(path, tiny, cache)[0], opened(path, tiny, cache, seq_len=7, overflow="split")[0]
    targets = [[token for ids, on in pieces(documents) for token, one in zip(ids[1:], on[1:]) if one]
               for documents in (whole, split)]
    assert targets[0] == targets[1]


def test_all_documents_too_long_says_how_long_they_are(tiny, tmp_path, cache):
    path = jsonl(tmp_path / "a.jsonl", LONG_CHAT, LONG_CHAT)
    longest = opened(path, tiny, cache)[1]["longest"]
    with pytest.raises(ValueError, match=rf"2 rows read, 2 longer than --seq_len 16 \(the longest has {longest} tokens\)"):
        opened(path, tiny, cache, seq_len=16)


# ---------------------------------------------------------------- the cache


def refuse(*_):
    raise AssertionError("tokenized although the cache has it")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_second_use_of_a_file_does_not_tokenize_it(tiny, tmp_path, cache, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", *CHATS)
    folder = folder_of(path, tiny, cache)
    monkeypatch.setattr(data, "tokenize", refuse)
    assert folder_of(path, tiny, cache) == folder


def test_renamed_file_is_found_in_the_cache(tiny, tmp_path, cache, monkeypatch):
    folder = folder_of(jsonl(tmp_path / "a.jsonl", *CHATS), tiny, cache)
    (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
    monkeypatch.setattr(data, "tokenize", refuse)
    assert folder_of(tmp_path / "b.jsonl", tiny, cache) == folder


def test_same_tokenizer_in_another_folder_finds_the_cache(tiny, tmp_path, cache, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", *CHATS)
    template = (HERE / "tiny" / "chat_template.jinja").read_text()
    folder = folder_of(path, tiny, cache)
    monkeypatch.setattr(data, "tokenize", refuse)
    assert folder_of(path, data.Tokenizer(model_folder(tmp_path, template)), cache) == folder


def test_one_changed_byte_of_a_file_makes_another_folder(tiny, tmp_path, cache):
    path = tmp_path / "a.jsonl"
    folder = folder_of(jsonl(path, *CHATS), tiny, cache)
    path.write_bytes(path.read_bytes().replace(b"Frage 3", b"Frage 7"))
    other = folder_of(path, tiny, cache)
    assert other != folder and (other / "tokens").read_bytes() != (folder / "tokens").read_bytes()


def test_another_kind_of_file_makes_another_folder(tiny, tmp_path, cache):
    (tmp_path / "a.txt").write_text('{"text": "a"}')
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    assert folder_of(tmp_path / "a.txt", tiny, cache) != folder_of(tmp_path / "a.jsonl", tiny, cache)


@pytest.mark.parametrize("change", ["template", "tokenizer", "variables", "held_out"])
def test_what_the_tokens_depend_on_makes_another_folder(tiny, tmp_path, cache, change):
    path = jsonl(tmp_path / "a.jsonl", *CHATS)
    template = (HERE / "tiny" / "chat_template.jinja").read_text() + ("{# other #}" if change == "template" else "")
    model = model_folder(tmp_path, template, extra_tokens=["<s>"] if change == "tokenizer" else [])
    if change == "variables":
        config = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": START}))
    other = folder_of(path, data.Tokenizer(model), cache, held_out=change == "held_out")
    assert other != folder_of(path, tiny, cache)


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


DAMAGES = {
    "flipped": flip, "deleted": lambda path: path.unlink(), "emptied": lambda path: os.truncate(path, 0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "garbage": lambda path: path.write_bytes(b"garbage"), "json": lambda path: path.write_bytes(b"[]"),
    "other-json": lambda path: path.write_bytes(b'{"crc": []}'), "not-utf8": lambda path: path.write_bytes(b"\xff{}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*data.ARRAYS, "report.json"])
def test_damaged_folder_of_the_cache_is_made_again(tiny, tmp_path, cache, name, damage):
    path = jsonl(tmp_path / "a.jsonl", *CHATS)
    folder = folder_of(path, tiny, cache)
    whole = contents(folder)
    DAMAGES[damage](folder / name)
    assert folder_of(path, tiny, cache) == folder and contents(folder) == whole


@pytest.mark.parametrize(("was", "becomes"), [
    ('"rows": 4', '"rows": 5'), ('"format": "messages"', '"format": "text"'), ('"largest_id": ', '"largest_id": 9'),
    ('"lengths": 4', '"lengths": 0'), ('"bad": {}', '"bad": 5'), ('"bad": {}', '"bat": {}')])
def test_report_that_was_altered_is_made_again(tiny, tmp_path, cache, was, becomes):
    path = jsonl(tmp_path / "a.jsonl", *CHATS)
    folder = folder_of(path, tiny, cache)
    report = (folder / "report.json").read_text()
    assert was in report
    (folder / "report.json").write_text(report.replace(was, becomes, 1))
    assert folder_of(path, tiny, cache) == folder and (folder / "report.json").read_text() == report


def test_what_a_killed_process_left_disappears(tiny, tmp_path, cache):
    path = jsonl(tmp_path / "a.jsonl", *CHATS)
    folder = folder_of(path, tiny, cache)
    left, of_others = cache / f"{folder.name}.abc.part", cache / f"{'0' * 32}.abc.part"
    for part in (left, of_others):
        part.mkdir()
        (part / "tokens").write_bytes(b"x")
    (folder / "report.json").unlink()
    folder_of(path, tiny, cache)
    assert not left.exists() and of_others.exists()


def test_nothing_but_the_folder_and_its_lock_stays_in_the_cache(tiny, tmp_path, cache):
    folder = folder_of(jsonl(tmp_path / "a.jsonl", *CHATS), tiny, cache)
    assert {path.name for path in cache.iterdir()} == {folder.name, f"{folder.name}.lock"}
    assert set(contents(folder)) == {*data.ARRAYS, "report.json"}


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt(), ValueError("bad")])
def test_error_while_tokenizing_leaves_nothing(tiny, tmp_path, cache, monkeypatch, error):
    path = jsonl(tmp_path / "a.jsonl", *CHATS)

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(data, "encode_rows", fail)
        with pytest.raises(type(error)):
            folder_of(path, tiny, cache)
    assert [left.name for left in cache.iterdir() if left.suffix != ".lock"] == []
    assert trained_on(path, tiny, cache)  # and the lock is free


def test_two_that_want_the_same_file_tokenize_it_once(tiny, tmp_path, cache, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", *CHATS)
    calls, ticks, tokenize = [], [], data.tokenize

    def slow(*args):
        calls.append(args[0])
        time.sleep(0.3)
        return tokenize(*args)

    monkeypatch.setattr(data, "tokenize", slow)
    with ThreadPoolExecutor(3) as threads:
        folders = list(threads.map(lambda _: data.cached(path, False, tiny, cache, lambda: ticks.append(1), False), range(3)))
    assert calls == [path] and len(set(folders)) == 1


def test_file_system_without_locks_will_do(tiny, tmp_path, cache, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    path = jsonl(tmp_path / "a.jsonl", *CHATS)
    expected = contents(folder_of(path, tiny, tmp_path / "other"))
    monkeypatch.setattr(data.fcntl, "flock", no_locks)
    assert contents(folder_of(path, tiny, cache)) == expected


def test_without_locks_two_may_make_the_same_folder_at_once(tiny, tmp_path, cache, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    path = jsonl(tmp_path / "a.jsonl", *CHATS)
    rmtree, meet = data.shutil.rmtree, threading.Barrier(2)

    def remove(folder, **options):
        rmtree(folder, **options)
        if folder.suffix != ".part":  # both are about to put theirs in its place
            with contextlib.suppress(threading.BrokenBarrierError):
                meet.wait(timeout=1)

    monkeypatch.setattr(data.fcntl, "flock", no_locks)
    monkeypatch.setattr(data.shutil, "rmtree", remove)
    with ThreadPoolExecutor(2) as threads:
        made = [one.result() for one in [threads.submit(folder_of, path, tiny, cache) for _ in range(2)]]
    monkeypatch.setattr(data, "tokenize", refuse)
    assert made == [folder_of(path, tiny, cache)] * 2 and not list(cache.glob("*.part"))


# ---------------------------------------------------------------- worker processes


def test_worker_processes_write_the_same_bytes(tiny, tmp_path, monkeypatch):
    path, rng = tmp_path / "a.jsonl", random.Random(0)
    with open(path, "wb") as file:
        for i in range(3000):  # 2.5 MB: three tasks
            row = {"prompt": f"{i} ", "completion": " ".join(rng.choices(("self", "None", "é☃", "def f(x):\n", END), k=140))}
            file.write(b"{" + b"x" * 800 + b"\n" if i % 150 == 7 else json.dumps(row).encode() + b"\n")
    alone = folder_of(path, tiny, tmp_path / "alone")
    monkeypatch.setattr(data, "WORTH", 2**18)
    started = []
    pool = data.ProcessPoolExecutor
    monkeypatch.setattr(data, "ProcessPoolExecutor", lambda *args: started.append(args[0]) or pool(*args))
    together = folder_of(path, tiny, tmp_path / "together")
    cores = min(len(os.sched_getaffinity(0)), 16)
    assert started == ([min(cores, path.stat().st_size // 2**18)] if cores > 1 else [])
    assert contents(together) == contents(alone)
    report = data.read_report(together)
    ((n, examples),) = report["bad"].values()
    assert report["rows"] == 3000 and n == 20 and [line for line, _ in examples] == [8, 158, 308]


# ---------------------------------------------------------------- long texts

BOS_EOS = TemplateProcessing(f"<s> $A {END}", special_tokens=[("<s>", VOCAB), (END, 1)])
BOS = TemplateProcessing("<s> $A", special_tokens=[("<s>", VOCAB)])


def with_bos(tmp_path, template=None, post_processor=BOS):
    """tests/tiny with a BOS token <s>, id 4096."""
    folder = model_folder(tmp_path, template, post_processor, ["<s>"])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<s>"}))
    return data.Tokenizer(folder)


def with_normalizer(tmp_path, normalizer):
    folder = model_folder(tmp_path)
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.normalizer = normalizer
    core.save(str(folder / "tokenizer.json"))
    return data.Tokenizer(folder)


def prose(n, seed=0):
    """n lines of uneven length, with blank lines, indents and characters of up to four bytes."""
    rng = random.Random(seed)
    words = ["the", "file", "größer", "☃", "🙂🙂", "日本語", "x=1", "def f(self):", "\t", "  ", "e\u0301", "\r", ".", "123456"]
    return "".join(" " * rng.choice((0, 0, 0, 4)) + " ".join(rng.choices(words, k=rng.randint(0, 14)))
                   + "\n" * rng.choice((1, 1, 1, 2, 3)) for _ in range(n))


TEXTS = {"prose": prose(400), "crlf": prose(200).replace("\n", "\r\n"), "no-newlines": "word é🙂 " * 1500,
         "newlines": "\n" * 9000, "no-blanks": "日本語☃" * 2500, "indented": "".join(f"    line {i}\n" for i in range(900)),
         "spelled": f"a{START}b\n{END}c " * 500, "a-newline-now-and-then": ("x " * 700 + "\n") * 12}


@pytest.mark.parametrize("row", [False, True], ids=["txt", "row"])
@pytest.mark.parametrize("bos", [False, True], ids=["tiny", "bos-eos"])
@pytest.mark.parametrize("name", TEXTS)
def test_long_text_has_the_tokens_of_the_text_at_once(tmp_path, cache, monkeypatch, name, bos, row):
    monkeypatch.setattr(data, "PIECE", 2000)
    tokenizer = with_bos(tmp_path, post_processor=BOS_EOS) if bos else data.Tokenizer(HERE / "tiny")
    text, path = TEXTS[name], tmp_path / ("a.jsonl" if row else "a.txt")
    path.write_text(json.dumps({"text": text}) if row else text, "utf-8", newline="")
    arrays = arrays_of(folder_of(path, tokenizer, cache))
    expected = tokenizer.core.encode(text).ids + [1] * (not bos)
    assert arrays == {"tokens": expected, "supervised": [not bos, *[True] * (len(expected) - 1)] if row else
                      [True] * len(expected), "lengths": [len(expected)], "lines": [1]}


def test_long_text_is_cut_into_pieces_of_half_the_size_to_all_of_it(tiny, monkeypatch):
    monkeypatch.setattr(data, "PIECE", 2000)
    text = prose(800, seed=1)
    parts = list(tiny.cut(text[at : at + 700] for at in range(0, len(text), 700)))
    assert "".join(parts) == text and len(parts) > 10
    assert all(1000 <= len(part) <= 2700 for part in parts[:-1])


@pytest.mark.parametrize(("normalizer", "whole"), [
    (tokenizers.normalizers.Prepend("▁"), True), (tokenizers.normalizers.NFC(), False),
    (tokenizers.normalizers.Strip(), True)])
def test_normalizer_that_sees_where_a_text_begins_gets_it_whole(tmp_path, cache, monkeypatch, normalizer, whole):
    monkeypatch.setattr(data, "PIECE", 2000)
    tokenizer = with_normalizer(tmp_path, normalizer)
    text = prose(400)
    (tmp_path / "a.txt").write_text(text, "utf-8", newline="")
    assert (len(list(tokenizer.cut([text[:5000], text[5000:]]))) == 1) == whole
    expected = [*tokenizer.core.encode(text).ids, 1]
    assert arrays_of(folder_of(tmp_path / "a.txt", tokenizer, cache))["tokens"] == expected


def test_long_text_beside_short_rows_keeps_its_place(tiny, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(data, "PIECE", 2000)
    texts = ["one", prose(200), "two", "w " * 2500, "three"]
    documents, _ = opened(jsonl(tmp_path / "a.jsonl", *({"text": text} for text in texts)), tiny, cache, seq_len=1 << 20)
    assert [ids for ids, _ in pieces(documents)] == [[*tiny.core.encode(text).ids, 1] for text in texts]


# ---------------------------------------------------------------- BOS and EOS

WITH_BOS = "{{ bos_token }}" + CHATML


def ids_of(tokenizer, tmp_path, row):
    """Ids and mask of the only document of a row, or of a text in a .txt file."""
    path = tmp_path / ("a.txt" if isinstance(row, str) else "a.jsonl")
    path.write_text(row if isinstance(row, str) else json.dumps(row))
    arrays = arrays_of(folder_of(path, tokenizer, tmp_path / "cache"))
    return arrays["tokens"], arrays["supervised"]


@pytest.mark.parametrize("row", [{"text": "a b"}, {"prompt": "a", "completion": " b"}, "a b"], ids=["text", "prompt", "txt"])
@pytest.mark.parametrize("end", ["", END], ids=["", "spelled-eos"])
@pytest.mark.parametrize(("begin", "processor"), [
    ("", None), ("", BOS), ("<s>", BOS), ("", BOS_EOS), ("<s>", BOS_EOS), ("<s>", None)], ids=str)
def test_texts_have_one_bos_where_the_tokenizer_writes_one_and_one_eos(tmp_path, row, begin, processor, end):
    tokenizer = with_bos(tmp_path, post_processor=processor)
    keys = list(row) if isinstance(row, dict) else []
    row = begin + row + end if not keys else {**row, keys[0]: begin + row[keys[0]]}
    if keys:
        row[keys[-1]] += end
    ids, _ = ids_of(tokenizer, tmp_path, row)
    bos = [VOCAB] if begin or processor else []
    assert ids == [*bos, *tokenizer.core.encode("a b", add_special_tokens=False).ids, 1]


@pytest.mark.parametrize(("template", "processor", "n"), [
    (CHATML, None, 0), (CHATML, BOS, 0), (WITH_BOS, None, 1), (WITH_BOS, BOS, 1), (WITH_BOS, BOS_EOS, 1),
    (None, None, 0), (None, BOS, 1), (None, BOS_EOS, 1)])
def test_conversation_has_the_bos_that_its_template_writes(tmp_path, template, processor, n):
    tokenizer = with_bos(tmp_path, template, processor)
    ids, supervised = ids_of(tokenizer, tmp_path, SHORT_CHAT)
    assert ids.count(VOCAB) == n and ids[:n] == [VOCAB] * n
    assert marked(tokenizer, ids, supervised) == "<s>" * n + turn("user", "q") + said("a")
    assert ids.count(1) == 2 and ids[-1] != 1  # the ends of the two turns, and nothing behind the last newline


def test_bos_is_no_target_of_a_row(tmp_path):
    ids, supervised = ids_of(with_bos(tmp_path), tmp_path, {"prompt": "", "completion": "a"})
    assert (ids[0], ids[-1]) == (VOCAB, 1) and supervised == [False] + [True] * (len(ids) - 1)


def test_empty_txt_file_is_refused_whatever_the_tokenizer_writes_around_a_text(tmp_path, cache):
    model = model_folder(tmp_path, None, BOS, ["<s>"])
    core = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    core.normalizer = tokenizers.normalizers.Prepend("▁")
    core.save(str(model / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="nothing to train on, the file is empty"):
        folder_of(tmp_path / "a.txt", data.Tokenizer(model), cache)


def test_text_of_nothing_is_left_without_a_target(tiny, tmp_path, cache):
    documents, count = opened(jsonl(tmp_path / "a.jsonl", {"text": ""}, {"text": "a"}, {"text": ""}), tiny, cache)
    assert documents.line.tolist() == [2] and count["untrained"] == 2 and count["rows"] == 3


# ---------------------------------------------------------------- special tokens that a message spells


def without_special_tokens(layout):
    """A tokenizer, as JSON, to which its special tokens are text: none is added and none is in the vocabulary."""
    special = {token["content"]: f"\uf8ff{token['id']}" for token in layout["added_tokens"]}
    model = layout["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {special.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:
        model["vocab"] = [[special.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = special[model["unk_token"]]
    return tokenizers.Tokenizer.from_str(json.dumps({**layout, "added_tokens": []}))


PLAIN = without_special_tokens(json.loads((HERE / "tiny" / "tokenizer.json").read_text("utf-8")))


def n_bytes(piece):
    return 1 if re.fullmatch("<0x..>", piece) else len(piece.encode())


def by_hand(messages, plain=PLAIN, n_bytes=n_bytes):
    """ChatML's ids and mask, segment by segment: what stands between two control tokens is encoded without knowing them,
    and trained on are an answer's tokens, each that ends behind the answer's first byte, and its <|im_end|>."""
    ids, mask = [], []
    for one in messages:
        head, answers = f"{one['role']}\n", one["role"] == "assistant"
        segment = plain.encode(head + one["content"]).ids
        behind = plain.encode("\n").ids
        ends = list(itertools.accumulate(n_bytes(plain.id_to_token(token)) for token in segment))
        assert ends[-1] == len((head + one["content"]).encode())
        ids += [0, *segment, 1, *behind]
        mask += [False, *(answers and end > len(head) for end in ends), answers, *[False] * len(behind)]
    return ids, mask


SPELLED = [END, START, f"a {END} b", f"{START}assistant\nhi{END}\n", END * 3, f"{START}{END}\n ☃{END}", "<|im_end|", "im_end|>"]


@pytest.mark.parametrize("spelled", SPELLED)
@pytest.mark.parametrize("role", data.ROLES)
@pytest.mark.parametrize("template", [None, CHATML], ids=["generation", "prefix"])
def test_special_token_in_a_message_is_text(tiny, tmp_path, cache, template, role, spelled):
    tokenizer = data.Tokenizer(model_folder(tmp_path, template)) if template else tiny
    messages = [message("user", "q"), message(role, spelled), message("assistant", "é a")]
    path = jsonl(tmp_path / "a.jsonl", chat(*messages), SHORT_CHAT)
    documents, count = opened(path, tokenizer, cache)
    assert pieces(documents) == [by_hand(messages), by_hand(SHORT_CHAT["messages"])]
    assert count["spelled"] == (START in spelled or END in spelled)
    text = "".join(turn(one["role"], one["content"]) for one in messages)
    assert tokenizer.core.decode(pieces(documents)[0][0], skip_special_tokens=False) == text


def agent_ids(tmp_path, cache, tokenizer, row):
    (piece,) = pieces(opened(jsonl(tmp_path / "a.jsonl", row), tokenizer, cache)[0])
    return piece


@pytest.mark.parametrize("name", ["description", "nested", "key"])
def test_special_token_in_a_tool_is_text(agent, tmp_path, cache, name):
    tool = {"description": {"name": "f", "description": f"ends with {END}"}, "key": {"name": "f", "parameters": {END: {}}},
            "nested": {"name": "f", "parameters": {"required": [START], "enum": [[END]]}}}[name]
    piece = agent_ids(tmp_path, cache, agent, {**SHORT_CHAT, "tools": [tool]})
    assert piece == by_hand([message("system", json.dumps([tool])), *SHORT_CHAT["messages"]])


@pytest.mark.parametrize("as_string", [False, True], ids=["object", "string"])
@pytest.mark.parametrize("arguments", [{"a": END}, {"a": [f"x{START}"]}, {END: 1}], ids=["value", "list", "key"])
def test_special_token_in_a_tool_call_is_text(agent, tmp_path, cache, arguments, as_string):
    given = {"name": "f", "arguments": json.dumps(arguments) if as_string else arguments}
    row = chat(message("user", "q"), {"role": "assistant", "tool_calls": [{"function": given}]})
    written = f"<call>{json.dumps({'name': 'f', 'arguments': arguments})}</call>"
    assert agent_ids(tmp_path, cache, agent, row) == by_hand([message("user", "q"), message("assistant", written)])


def test_reserved_character_in_a_key_is_refused_like_one_in_a_text(agent, tmp_path, cache):
    row = {**GOOD_CHAT, "tools": [{"name": "f", "parameters": {data.OPEN: {}}}]}
    check_bad_row(agent, tmp_path, cache, "messages", row, r"U\+104000 to U\+10FFFD")


@pytest.mark.parametrize("row", [{"text": f"a{END}b {START}"}, {"prompt": f"a{START}", "completion": f"b{END}\nc"}])
def test_texts_and_prompts_keep_their_control_tokens(tiny, tmp_path, cache, row):
    ((ids, supervised),) = pieces(opened(jsonl(tmp_path / "a.jsonl", row), tiny, cache)[0])
    assert ids == [*tiny.core.encode("".join(row.values())).ids, 1] and ids.count(0) == 1
    assert marked(tiny, ids, supervised) == (f"⟦{row['text']}{END}⟧" if "text" in row else f"a{START}⟦b{END}\nc{END}⟧")


def unigram():
    pieces = ["<unk>", "<s>", START, END, *string.printable, "é", "im", "user", "assistant", "<|", "|>"]
    vocab = [(piece, -1.0 * (i > 3)) for i, piece in enumerate(pieces)]
    return tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, 0, False))


def wordpiece():
    pieces = ["<unk>", "<s>", START, END, *(f"{joined}{c}" for c in string.printable for joined in ("", "##")), "user"]
    return tokenizers.Tokenizer(tokenizers.models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))


def wordlevel():
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {piece: i for i, piece in enumerate(["<unk>", "<s>", START, END, "user", "assistant", "\n"])}, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("\n", "isolated")
    return core


def merging():
    """A BPE one whose merges make <|im_end|> out of its characters."""
    pieces = ["<unk>", "<s>", START, END, *string.printable, *(END[:n] for n in range(2, len(END)))]
    merges = [(END[:n], END[n]) for n in range(1, len(END))]
    return tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>"))


def saved(tmp_path, core):
    core.add_special_tokens(["<unk>", "<s>", START, END])
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "bos_token": "<s>", "unk_token": "<unk>"}))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    return data.Tokenizer(tmp_path)


@pytest.mark.parametrize("make", [unigram, wordpiece, wordlevel])
@pytest.mark.parametrize("spelled", [END, f"{START} a<s>", "<unk>", f"a {END}"])
def test_special_token_that_the_vocabulary_has_too_is_text(tmp_path, cache, make, spelled):
    tokenizer, plain = saved(tmp_path, make()), without_special_tokens(json.loads((tmp_path / "tokenizer.json").read_text()))
    messages = [message("user", spelled), message("assistant", "a"), message("user", "b"), message("assistant", spelled)]
    ((ids, supervised),) = pieces(opened(jsonl(tmp_path / "a.jsonl", chat(*messages)), tokenizer, cache)[0])
    expected = [[2, *plain.encode(f"{one['role']}\n{one['content']}").ids, 3, *plain.encode("\n").ids] for one in messages]
    assert ids == [token for one in expected for token in one]
    assert [token for token, on in zip(ids, supervised) if on].count(3) == 2 and not any(supervised[: len(expected[0])])


def test_special_token_that_merges_make_is_text_or_the_row_is_left_out(tmp_path, cache):
    tokenizer = saved(tmp_path, merging())
    rows = [chat(message("user", END), message("assistant", "a")), *[GOOD_CHAT] * 100]
    documents, count = opened(jsonl(tmp_path / "a.jsonl", *rows), tokenizer, cache)
    assert count["bad"].keys() <= {"special tokens"} and documents.line.tolist()[-100:] == list(range(2, 102))
    assert all(ids.count(3) == 2 for ids, _ in pieces(documents))


def test_mask_follows_characters_that_a_normalizer_joins_and_splits(tmp_path, cache):
    model = model_folder(tmp_path, CHATML)
    core = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    core.normalizer = tokenizers.normalizers.NFKC()
    core.save(str(model / "tokenizer.json"))
    odd = "\ufb01 e\u0301 \u2460"
    row = chat(message("user", odd), message("assistant", odd), message("user", END), message("assistant", "e\u0301"))
    assert trained_on(jsonl(tmp_path / "a.jsonl", row), data.Tokenizer(model), cache) == [
        turn("user", "fi \xe9 1") + said("fi \xe9 1") + turn("user", END) + said("\xe9")]


def test_blank_that_a_normalizer_prepends_belongs_to_the_answer(tmp_path, cache):
    model = model_folder(tmp_path, CHATML.replace("m.role + '\n' + ", "").replace("assistant\n", ""))
    core = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    core.normalizer = tokenizers.normalizers.Prepend("▁")
    core.save(str(model / "tokenizer.json"))
    ((ids, supervised),) = pieces(opened(jsonl(tmp_path / "a.jsonl", SHORT_CHAT), data.Tokenizer(model), cache)[0])
    segments = [core.encode(text).ids for text in ("q", "a")]
    newline = core.encode("\n").ids
    assert ids == [0, *segments[0], 1, *newline, 0, *segments[1], 1, *newline]
    begin = len(segments[0]) + 2 + len(newline)  # of the second turn
    assert supervised == [False] * (begin + 1) + [True] * (len(segments[1]) + 1) + [False] * len(newline)


# ---------------------------------------------------------------- random conversations

PIECES = ["a", "word", " ", "  ", "\n", "\n\n", "\t", "\r\n", "é", "e\u0301", "☃", "🙂", "👩\u200d👩\u200d👧", "日本語",
          "\u2028", "\0", "\ufeff", END, START, f"{START}assistant\n", "<|im_", "end|>", "|>", "<s>", "<0x0A>", "{{ x }}",
          "{% generation %}"]


def random_conversations(seed, n=200):
    rng = random.Random(seed)
    return [[message(rng.choice(["system", "user", "tool", "assistant", "assistant"]),
                     "".join(rng.choices(PIECES, k=rng.choice((0, 1, 2, 5, 30))))) for _ in range(rng.randint(1, 7))]
            for _ in range(n)]


@pytest.fixture(scope="module", params=["generation", "prefix"])
def conversations(request, tiny, tmp_path_factory):
    """(random conversations, the folder of the cache that holds them, their file) with and without generation tags."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = tiny if request.param == "generation" else data.Tokenizer(model_folder(folder, CHATML))
    chats = random_conversations(seed=len(request.param))
    path = jsonl(folder / "random.jsonl", *(chat(*messages) for messages in chats))
    return chats, folder_of(path, tokenizer, folder / "cache"), path


def test_random_conversations_have_the_ids_and_the_mask_made_by_hand(conversations):
    chats, folder, _ = conversations
    expected = [by_hand(messages) for messages in chats]
    assert arrays_of(folder) == {
        "tokens": [token for ids, _ in expected for token in ids], "supervised": [on for _, mask in expected for on in mask],
        "lengths": [len(ids) for ids, _ in expected], "lines": list(range(1, len(chats) + 1))}
    report = data.read_report(folder)
    spelled = [any(START in one["content"] or END in one["content"] for one in messages) for messages in chats]
    turns = sum(one["role"] == "assistant" for messages in chats for one in messages)
    assert (report["spelled"], report["turns"], report["untold"], report["bad"]) == (sum(spelled), turns, 0, {})


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "alone"])
@pytest.mark.parametrize("overflow", ["split", "drop", "truncate"])
def test_loader_deals_out_each_piece_of_each_conversation_once(conversations, overflow, packing):
    chats, folder, path = conversations
    seq_len, expected = 64, Counter()
    for ids, mask in map(by_hand, chats):
        cut = windows(ids, mask, seq_len)
        cut = {"split": cut, "truncate": cut[:1], "drop": cut * (len(ids) <= seq_len + 1)}[overflow]
        expected.update((tuple(part[:-1]), tuple(token if one else IGNORE for token, one in zip(part[1:], on[1:])))
                        for part, on in cut if any(on[1:]))
    documents, _ = data.open_documents([folder], [path], seq_len, overflow=overflow)
    dealt, rows = Counter(), []
    for rank in range(2):
        loader = data.Loader(documents, seq_len, packing, 2, rank, 2, seed=1)
        for batch in loader.once():
            tokens, targets, positions = (grid.flatten().tolist() for grid in (batch.tokens, batch.targets, batch.positions))
            assert batch.keep_S.tolist() == [i for i, target in enumerate(targets) if target != IGNORE]
            dealt.update((tuple(tokens[a:b]), tuple(targets[a:b])) for a, b in batch.spans)
            assert all(positions[a:b] == list(range(b - a)) for a, b in batch.spans)
            inside = {i for a, b in batch.spans for i in range(a, b)}
            assert all(target == IGNORE for i, target in enumerate(targets) if i not in inside)
    assert dealt == expected
    rows = np.concatenate(loader.rows).tolist()
    assert sorted(rows) == list(range(len(documents.start)))
    for epoch in range(2):  # and training takes each row once an epoch
        n = len(loader.rows)
        assert sorted(loader.row(epoch * n + i) for i in range(n)) == list(range(n))


def byte_level(tmp_path, trim_offsets):
    """A tokenizer of bytes, like GPT-2's, with a few merges -> (Tokenizer with ChatML, the same without special tokens)."""
    merges = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("ð", "Ł"), ("ðŁ", "Ļ"), ("a", "s")]
    pieces = [START, END, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    core = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim_offsets)  # true in GPT-NeoX's and OLMo's
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens([START, END])
    model = model_folder(tmp_path, CHATML)
    core.save(str(model / "tokenizer.json"))
    return data.Tokenizer(model), without_special_tokens(json.loads(core.to_str()))


@pytest.mark.parametrize("trim_offsets", [False, True], ids=["whole-offsets", "trimmed-offsets"])
@pytest.mark.parametrize("answer", ["a", " word", "  word", "\n\nword", " ", "\n\n", "🙂", " 🙂🙂 ", "é\n", f"\n{END}\n", ""])
def test_mask_of_a_byte_level_tokenizer_is_right_to_the_token(tmp_path, cache, trim_offsets, answer):
    tokenizer, plain = byte_level(tmp_path, trim_offsets)
    messages = [message("user", "a 🙂"), message("assistant", answer), message("user", " "), message("assistant", "b")]
    documents, _ = opened(jsonl(tmp_path / "a.jsonl", chat(*messages)), tokenizer, cache)
    assert pieces(documents) == [by_hand(messages, plain, len)]


def test_random_conversations_of_a_byte_level_tokenizer_have_the_mask_made_by_hand(tmp_path, cache):
    tokenizer, plain = byte_level(tmp_path, False)
    chats = random_conversations(seed=5, n=100)
    folder = folder_of(jsonl(tmp_path / "a.jsonl", *(chat(*messages) for messages in chats)), tokenizer, cache)
    arrays, expected = arrays_of(folder), [by_hand(messages, plain, len) for messages in chats]
    assert arrays["tokens"] == [token for ids, _ in expected for token in ids]
    assert arrays["supervised"] == [on for _, mask in expected for on in mask]


# ---------------------------------------------------------------- met in real files and tokenizers


def test_special_tokens_that_are_looked_for_in_normalized_text_are_found(tmp_path, cache):
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, **{c: i + 3 for i, c in enumerate(
        "▁" + string.ascii_lowercase + "<>/|")}}, merges=[], unk_token="<unk>"))
    core.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")])
    core.add_special_tokens([tokenizers.AddedToken(token, normalized=True) for token in ("<unk>", "<s>", "</s>")])
    model = tmp_path / "model"  # as Llama 2's
    model.mkdir()
    core.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}))
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|{{ m.role }}|>{% generation %}{{ m.content }}</s>{% endgeneration %}{% endfor %}")
    tokenizer = data.Tokenizer(model)
    for answer in ("yes", "see </s> there"):  # the latter is text to it
        path = jsonl(tmp_path / "a.jsonl", chat(message("assistant", answer)))
        ((ids, supervised),) = pieces(opened(path, tokenizer, cache)[0])
        assert ids.count(2) == 1 and ids[-1] == 2 and supervised[-1]
    ((ids, _),) = pieces(opened(jsonl(tmp_path / "b.jsonl", {"text": "a b"}), tokenizer, cache)[0])
    assert ids[0] == 1 and ids[-1] == 2 and ids.count(1) == 1  # BOS by tokenizer_config.json alone


def test_calls_that_a_template_leaves_out_are_refused(tmp_path, cache):
    tokenizer = data.Tokenizer(model_folder(tmp_path, CHATML))
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
    row = chat(message("user", "q"), message("assistant", "", tool_calls=calls))
    with pytest.raises(ValueError, match="leaves out the calls of tools"):
        opened(jsonl(tmp_path / "a.jsonl", row), tokenizer, cache)


def test_thoughts_that_a_template_leaves_out_are_counted(tmp_path, cache):
    tokenizer = data.Tokenizer(model_folder(tmp_path, CHATML))
    row = chat(message("user", "q"), message("assistant", "a", reasoning_content="because"))
    assert opened(jsonl(tmp_path / "a.jsonl", row), tokenizer, cache)[1]["unsaid"] == 1


def test_template_that_asks_for_none_gets_it(tmp_path, cache):
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n"
                "{% if m['content'] is none %}{{ m.tool_calls[0].function.name }}{% else %}{{ '' + m['content'] }}{% endif %}"
                "<|im_end|>{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {}}}]
    row = chat(message("user", "q"), {"role": "assistant", "content": None, "tool_calls": calls})
    tokenizer = data.Tokenizer(model_folder(tmp_path, template))
    assert trained_on(jsonl(tmp_path / "a.jsonl", row), tokenizer, cache) == [
        f"{START}user\nq{END}{START}assistant\n⟦weather{END}⟧"]


def test_sharegpt_turn_of_weight_0_is_context(tiny, tmp_path, cache):
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "wrong", "weight": 0},
                             {"from": "human", "value": "q"}, {"from": "gpt", "value": "right"}]}
    (text,) = trained_on(jsonl(tmp_path / "a.jsonl", row), tiny, cache)
    assert f"⟦right{END}⟧" in text and text.count("⟦") == 1


def test_file_that_changes_while_it_is_read_is_refused_and_not_cached(tiny, tmp_path, cache, monkeypatch):
    path, tokenize = Path(jsonl(tmp_path / "a.jsonl", {"text": "one"})), data.tokenize

    def grow(*args):
        with open(path, "a") as file:
            file.write('{"text": "two"}\n')
        return tokenize(*args)

    monkeypatch.setattr(data, "tokenize", grow)
    with pytest.raises(ValueError, match="has changed while it was read"):
        opened(path, tiny, cache)
    assert not [entry for entry in Path(cache).iterdir() if entry.is_dir()]


def test_text_that_ends_in_eos_and_a_newline_gets_no_other(tiny, tmp_path, cache):
    ((ids, _),) = pieces(opened(jsonl(tmp_path / "a.jsonl", {"text": f"a{END}\n"}), tiny, cache)[0])
    assert ids.count(1) == 1
