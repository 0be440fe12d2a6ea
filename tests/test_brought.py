"""What people bring is read as they mean it, or refused by name: rows, files and folders in shapes of public data sets
and bug reports. check_data.py and check_folders.py hold many more of them against transformers, TRL and PEFT."""

import argparse
import datetime
import decimal
import gzip
import json
import os
import re
import shutil
import subprocess
import sys

import huggingface_hub
import pytest
import torch
from conftest import HERE, TRAIN, model_with_weights, noted, random_model, read_data, run_ranks
from safetensors.torch import load_file, save_file
from test_formats import (
    AGENT, ANSWER, ANSWERED, ASKED, CALL, CHATML, END, LLAMA2, QUESTION, QWEN35, SCHEMA, SCHEMA_TURN, START, calling,
    chat, edit_json, golden_template, jsonl, message, model_folder, pieces, read_rows, trained_turn, turn)

import data
import model as lm
import train

QWEN = golden_template("qwen2.5")
LLAMA31 = golden_template("llama3.1")


def tokenizer_of(path, template, **options):
    return data.Tokenizer(model_folder(path, template), **options)


def unwrapped(capsys):
    """What is printed, without the line breaks in long notes."""
    return capsys.readouterr().out.replace("\n    ", " ")


def refusal(row, tokenizer, columns=()):
    """What a row is refused with."""
    with pytest.raises(ValueError) as error:
        data.parse_example(json.dumps(row), tokenizer, columns)
    return str(error.value)


def text_of(row, tokenizer):
    (example,) = data.parse_example(json.dumps(row), tokenizer)
    return example.text


# ---------------------------------------------------------------- 1: what a template leaves out

THOUGHTFUL = {**ANSWER, "reasoning_content": "hm"}
IN_TEXT = message("assistant", "<think>\nhm\n</think>\n\nIt is 4.")
CALL_AND_TEXT = message("assistant", "Let me add.", tool_calls=[{"type": "function", "function": CALL}])
RESULT = message("tool", "4")
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {}}}
# as DeepSeek's: no thought in the history, and a prompt that opens one
NO_THOUGHTS = CHATML.replace("m.content", "m.content.split('</think>')[-1]").replace(
    "assistant\n' }}", "assistant\n<think>\n' }}")
DROPS_THE_SECOND_CALL = AGENT.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
DROPS_SYSTEM = CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")

LOST = {  # name: (template, messages, tools, what is counted)
    "a thought": (QWEN, [QUESTION, THOUGHTFUL], None, ["thought"]),
    "a thought by another name": (QWEN, [QUESTION, {**ANSWER, "thinking": "hm"}], None, ["thought"]),
    "a thought inside of the text": (NO_THOUGHTS, [QUESTION, IN_TEXT], None, ["thought in content"]),
    "text beside a call": (LLAMA31, [QUESTION, CALL_AND_TEXT, RESULT, ANSWER], None, ["content"]),
    "arguments": (AGENT.replace("(call.function or call) | tojson", "call.function.name"),
                  [QUESTION, CALL_AND_TEXT, RESULT, ANSWER], None, ["arguments"]),
    # nothing is lost
    "thoughts of the last answers": (QWEN35, [QUESTION, THOUGHTFUL, QUESTION, THOUGHTFUL], None, []),
    "a call": (QWEN, [QUESTION, CALL_AND_TEXT, RESULT, ANSWER], [SCHEMA], []),
    "an answer beside no calls": (LLAMA31, [QUESTION, {**ANSWER, "tool_calls": []}], None, []),
    "an empty answer": (CHATML, [QUESTION, message("assistant", ""), QUESTION, ANSWER], None, []),
}


@pytest.mark.parametrize("template, messages, tools, what", LOST.values(), ids=LOST)
def test_what_a_template_leaves_out_of_answers_is_counted_and_said(tmp_path, capsys, template, messages, tools, what):
    tokenizer = tokenizer_of(tmp_path, template)
    _, file = read_rows(tmp_path, tokenizer, chat(*messages, tools=tools), chat(*messages, tools=tools))
    assert [noted(file, f"lose their {one}:") for one in what] == [2] * len(what)
    data.print_file(file)
    said = capsys.readouterr().out
    for name in what:
        assert f"2 answers lose their {name}: the chat template leaves it out" in said
    assert ("lose their" in said) == bool(what)


REFUSED = {  # name: (template, messages, tools, words of the refusal)
    # what is left out may stand in the text all the same
    "a tool whose name is in the prose": (CHATML, [message("user", "search"), ANSWER], [SEARCH], 'the tool "search"'),
    "a call whose name is in the prose": (
        CHATML, [message("user", "add"), CALL_AND_TEXT], None, 'a call of the tool "add"'),
    "the second call": (
        DROPS_THE_SECOND_CALL, calling({"function": CALL}, {"function": CALL}), None, 'a call of the tool "add"'),
    "a system message": (
        DROPS_SYSTEM, [message("system", "Be brief."), QUESTION, ANSWER], None, 'the system message "Be brief." where'),
}


@pytest.mark.parametrize("template, messages, tools, words", REFUSED.values(), ids=REFUSED)
def test_a_tool_a_call_or_a_message_that_is_left_out_is_refused_by_name(tmp_path, template, messages, tools, words):
    assert words in refusal(chat(*messages, tools=tools), tokenizer_of(tmp_path, template))


# ---------------------------------------------------------------- 2: keys of messages


@pytest.mark.parametrize("key", ["weight", "loss", "train", "trainable", "training", "loss_mask", "loss_weight"])
@pytest.mark.parametrize("value", [0, False])
def test_a_turn_that_is_marked_as_context_is_not_trained_on(tmp_path, tiny, key, value):
    rows = [
        chat(QUESTION, {**ANSWER, key: value}, QUESTION, {**ANSWER, key: not value}, QUESTION, {**ANSWER, key: None}),
        {"conversations": [{"from": "human", "value": "2 + é?"}, {"from": "gpt", "value": "5", key: value},
                           {"from": "gpt", "value": "It is 4."}]}]
    texts, _ = read_rows(tmp_path, tiny, *rows)
    context = turn("assistant", "It is 4.")
    assert texts == [ASKED + context + 2 * (ASKED + ANSWERED), ASKED + turn("assistant", "5") + ANSWERED]
    assert f"{key!r} must be 0 or 1, got \"no\"" in refusal(chat(QUESTION, {**ANSWER, key: "no"}), tiny)


def test_keys_of_messages_that_nobody_reads_are_listed(tmp_path, agent, capsys):
    row = chat(
        message("user", "2 + é?", emotion="curious"), {**ANSWER, "train": True, "score": None},
        message("user", "?", loss=True), {**ANSWER, "name": "x"})
    _, file = read_rows(tmp_path, agent, row)
    data.print_file(file)
    expected = "messages.emotion (1), messages.loss (1), messages.name (1)"
    assert f"\n  keys that are not read, and in how many examples: {expected}\n" in unwrapped(capsys)


def test_a_key_that_the_template_reads_is_not_listed(tmp_path):
    tokenizer = tokenizer_of(tmp_path, CHATML.replace("+ m.content", "+ m.get('mood', '') + m.content"))
    texts, file = read_rows(tmp_path, tokenizer, chat(QUESTION, {**ANSWER, "mood": "gay "}))
    assert texts == [ASKED + trained_turn("gay It is 4.")]
    assert sorted(file.report.unread) == []


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("agent"), AGENT)


# ---------------------------------------------------------------- 3: nulls and what is empty

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "required": ["city"], "properties": {
        "city": {"type": "string"}, "at": {"type": "object", "properties": {"lat": {"type": "number"}}},
        "spots": {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}}}}}}


def weather(arguments):
    """Messages with a call of the tool."""
    call = {"function": {"name": "weather", "arguments": arguments}}
    return [QUESTION, message("assistant", None, tool_calls=[call])]


def with_null_keys(value):
    """A value with one more key in each of its objects, whose value is null."""
    if isinstance(value, list):
        return [with_null_keys(item) for item in value]
    if isinstance(value, dict):
        return {key: with_null_keys(item) for key, item in value.items()} | {"enum": None}
    return value


ARGUMENTS = {  # arguments in a line of JSON: what they become
    "of no parameter": ({"city": "Ulm", "amount": None}, {"city": "Ulm"}),
    "of a parameter": ({"city": None}, {"city": None}),
    "inside of an object": ({"at": {"lat": None, "amount": None}}, {"at": {"lat": None}}),
    "inside of a list": ({"spots": [{"name": None, "amount": None}]}, {"spots": [{"name": None}]}),
    "text": ('{"city": null, "amount": null}', {"city": None}),
    "text in text": (json.dumps('{"city": "Ulm"}'), {"city": "Ulm"}),
    "empty text": ("", {}),
    "null": (None, {}),
    "null in text": ("null", {}),
}


@pytest.mark.parametrize("arguments, expected", ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_null_of_arguments_stays_where_the_tools_schema_has_the_parameter(agent, arguments, expected):
    row = chat(*weather(arguments), tools=[WEATHER])
    assert text_of(row, agent) == text_of(chat(*weather(expected), tools=[WEATHER]), agent)
    if arguments == expected:
        assert "null" in text_of(row, agent)


@pytest.mark.parametrize("arguments", ["x = 1", "[1]", [1], 7])
def test_arguments_that_are_no_object_are_named(agent, arguments):
    words = "'arguments' of a call of \"weather\" must be an object, got"
    assert words in refusal(chat(*weather(arguments), tools=[WEATHER]), agent)


def test_nulls_of_a_table_are_absent_at_every_depth(agent):
    row = chat(*weather({"city": "Ulm"}), message("tool", "rain"), ANSWER, tools=[WEATHER])
    expected = text_of(row, agent)
    # in lines of JSON all but those of arguments, whose schema is asked
    assert text_of(with_null_keys(row), agent) == expected
    # a table has the keys of all its rows in each
    as_table = with_null_keys(row)
    for one in as_table["messages"]:
        one.setdefault("tool_calls", None)
    as_table["messages"][1]["tool_calls"][0]["function"]["arguments"]["at"] = {"lat": None}
    (example,) = data.parse_example({key: data.without_nulls(value) for key, value in as_table.items()}, agent)
    assert example.text == expected.replace('{"city": "Ulm"}', '{"city": "Ulm", "at": {}}')


def test_an_empty_cell_of_csv_has_no_value(tmp_path, tiny):
    path = tmp_path / "a.csv"
    path.write_text("instruction,input,output\nq,,a\n" + "q,i,a\n" * 200 + 'r,,\ns,,""\n')
    documents, file = read_data(path, tiny)
    assert len(documents.parts["line"]) == 201
    assert file.report.n_bad == 2
    assert file.report.errors.startswith("\n  line 203: not valid example: expected an object with")
    assert file.report.errors.endswith("got the keys instruction: --columns COLUMN=KEY renames them. "
                                       "A message has 'role' and 'content', or 'from' and 'value', and "
                                       "'messages' lists them")


@pytest.mark.parametrize("row", [
    {"instruction": "q", "output": ""}, {"prompt": "q", "completion": ""}, chat(QUESTION, message("assistant", " \n")),
    {"text": " "},
], ids=["alpaca", "prompt", "blanks", "text"])
def test_what_trains_nothing_but_an_end_is_dropped_and_counted(tmp_path, tiny, capsys, row):
    texts, file = read_rows(tmp_path, tiny, chat(QUESTION, ANSWER), row)
    assert texts == [ASKED + ANSWERED]
    data.print_file(file)
    assert "1 have answers of nothing but their ends: dropped" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"(?s)nothing to train on\n.*  1 have answers of nothing but"):
        read_rows(tmp_path, tiny, row)


SILENT = {  # name: (answer, what is counted)
    "empty": (message("assistant", ""), "answers are empty"),
    "blank": (message("assistant", " \n"), "answers are empty"),
    "an empty thought": (message("assistant", "<think>\n\n</think>\n\n"), "answers are empty"),
    "a thought": (message("assistant", "<think>hm</think>"), "answers are a thought with nothing behind it"),
    "a thought in a field": (message("assistant", "", thinking="hm"), "answers are a thought with nothing behind it"),
    "a thought that is cut off": (message("assistant", "<think>hm"), "answers begin a thought that never ends"),
}


@pytest.mark.parametrize("answer, note", SILENT.values(), ids=SILENT)
def test_an_answer_that_says_nothing_is_left_out_beside_others_and_in_pairs(tmp_path, answer, note):
    tokenizer = tokenizer_of(tmp_path, golden_template("qwen3"))
    row = chat(QUESTION, answer, QUESTION, THOUGHTFUL)
    texts, file = read_rows(tmp_path, tokenizer, row, chat(QUESTION, answer), chat(QUESTION, THOUGHTFUL))
    assert [text.partition("⟦")[2] for text in texts] == [f"<think>\nhm\n</think>\n\nIt is 4.{END}⟧\n"] * 2
    assert noted(file, note) == 2
    assert noted(file, "answers of nothing but their ends") == 1
    pairs = data.Tokenizer(tmp_path, train_on="pairs")
    pair = {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [answer]}
    texts, file = read_rows(tmp_path, pairs, pair, pair | {"rejected": [THOUGHTFUL]})
    assert len(texts) == 2
    assert noted(file, note) == noted(file, "answers of nothing but their ends") == 1


@pytest.mark.parametrize("template, answer", [
    (QWEN, message("assistant", "", thinking="hm")), (NO_THOUGHTS, message("assistant", "<think>hm</think>"))])
def test_a_thought_alone_that_a_template_leaves_out_is_counted_and_not_trained_on(tmp_path, template, answer):
    texts, file = read_rows(tmp_path, tokenizer_of(tmp_path, template), chat(QUESTION, answer, QUESTION, ANSWER))
    assert texts[0].count("⟦") == noted(file, "a thought with nothing behind it: not trained on") == 1


def test_an_answer_that_a_template_wraps_says_nothing_either(tmp_path):
    wrapped = "('<reply>' + turn.content + '</reply>' if turn.role == 'assistant' else turn.content)"
    tokenizer = tokenizer_of(tmp_path, golden_template("chatml").replace("turn['content']", wrapped))
    texts, file = read_rows(tmp_path, tokenizer, chat(QUESTION, message("assistant", ""), QUESTION, ANSWER))
    assert texts[0].count("<reply>") == 2
    assert texts[0].count("⟦") == noted(file, "answers are empty") == 1


def test_a_call_is_more_than_nothing(tmp_path):
    row = chat(QUESTION, {**CALL_AND_TEXT, "content": "", "thinking": "hm"}, RESULT, ANSWER)
    texts, _ = read_rows(tmp_path, tokenizer_of(tmp_path, golden_template("qwen3")), row)
    assert "".join(texts).count("⟦") == 2


BEGUN = message("assistant", "It")
PREFILLED = {  # name: (prompt, completion, trained text)
    "an answer": ([QUESTION, BEGUN], [message("assistant", " is 4.")], f"It⟦ is 4.{END}⟧"),
    "ShareGPT's": ([{"from": "human", "value": "?"}, {"from": "gpt", "value": "It"}],
                   [{"from": "gpt", "value": " is 4."}], f"It⟦ is 4.{END}⟧"),
    "words that come again": ([QUESTION, message("assistant", "a")], [message("assistant", " a")], f"a⟦ a{END}⟧"),
    "three in a row": ([QUESTION, BEGUN, message("assistant", " is")], [message("assistant", " 4.")],
                       f"It is⟦ 4.{END}⟧"),
    "a thought": ([QUESTION, message("assistant", "<think>\nhm")], [message("assistant", " so</think>It is 4.")],
                  f"<think>\nhm⟦ so\n</think>\n\nIt is 4.{END}⟧"),
}


@pytest.mark.parametrize("prompt, completion, expected", PREFILLED.values(), ids=PREFILLED)
def test_a_prompt_that_ends_in_the_beginning_of_the_answer_is_one_answer(tmp_path, prompt, completion, expected):
    tokenizer = tokenizer_of(tmp_path, golden_template("qwen3"))
    texts, _ = read_rows(tmp_path, tokenizer, {"prompt": prompt, "completion": completion})
    assert texts[0].rstrip("\n").removesuffix(expected)[-10:] in ("assistant\n", "</think>\n\n")
    *_, said = completion[0].values()
    pair = {"prompt": prompt, "chosen": completion, "rejected": [message("assistant", said + " No.")]}
    pairs = data.Tokenizer(tmp_path, train_on="pairs")
    assert read_rows(tmp_path, pairs, pair)[0][0] == texts[0]


def test_a_beginning_in_the_prompt_is_judged_with_the_whole_answer(tmp_path):
    thinking = golden_template("qwen3.5")  # its prompts open a thought
    tokenizer = tokenizer_of(tmp_path, thinking)
    begun = [QUESTION, message("assistant", "<think>\nhm")]
    rows = [{"prompt": begun, "completion": end} for end in (" so\n</think>\n\nIt is 4.", " so", "\n</think>\n\n")]
    texts, file = read_rows(tmp_path, tokenizer, *rows)
    assert [text.partition("⟦")[2] for text in texts] == [f" so\n</think>\n\nIt is 4.{END}⟧\n"]
    assert noted(file, "no reasoning") == 0
    assert noted(file, "begin a thought that never ends") == noted(file, "a thought with nothing behind it") == 1


def test_an_answer_behind_one_of_weight_0_stays_a_turn_and_is_counted(tmp_path, tiny):
    texts, file = read_rows(tmp_path, tiny, chat(QUESTION, {**BEGUN, "weight": 0}, ANSWER))
    assert texts == [ASKED + turn("assistant", "It") + ANSWERED]
    assert noted(file, "answers follow at once on an answer that is not trained on") == 1


# ---------------------------------------------------------------- 4, 5: a folder's tokens and ends


def tokenizer_files(path, named=(), **files):
    """A folder with the built-in tokenizer. named: keys of tokenizer_config.json that stay; files: others by name."""
    path.mkdir(exist_ok=True)
    shutil.copy(HERE / "tiny" / "tokenizer.json", path)
    config = json.loads((HERE / "tiny" / "tokenizer_config.json").read_text())
    config = {key: value for key, value in config.items() if not key.endswith("_token") or key in named}
    (path / "tokenizer_config.json").write_text(json.dumps(config | files.pop("tokenizer_config", {})))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


CALL_TOKEN = {"content": "<call>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
IN_DECODER = {"4096": CALL_TOKEN | {"special": True}}
ORDINARY_IN_DECODER = {"4096": CALL_TOKEN | {"special": False}}
TOKEN_FILES = {  # what the files say: whether the token is one around turns or texts, which messages may not spell
    "added_tokens_decoder": ({"tokenizer_config": {"added_tokens_decoder": IN_DECODER}}, False),
    "an ordinary one": ({"tokenizer_config": {"added_tokens_decoder": ORDINARY_IN_DECODER}}, False),
    "added_tokens.json": ({"added_tokens": {"<call>": 4096}}, False),
    "added_tokens.json and special_tokens_map.json": (
        {"added_tokens": {"<call>": 4096}, "special_tokens_map": {"additional_special_tokens": ["<call>"]}}, False),
    "additional_special_tokens": ({"tokenizer_config": {"additional_special_tokens": ["<call>"]}}, False),
    "extra_special_tokens": ({"tokenizer_config": {"extra_special_tokens": ["<call>"]}}, False),
    "a named one": ({"tokenizer_config": {"image_token": "<call>"}}, False),
    "pad_token": ({"special_tokens_map": {"pad_token": CALL_TOKEN}}, True),
    "one that the template writes": (
        {"tokenizer_config": {"extra_special_tokens": ["<call>"], "chat_template": "<call>" + CHATML}}, True),
    "one that the template writes of pieces": (
        {"tokenizer_config": {"extra_special_tokens": ["<call>"], "chat_template": "{{ '<' + 'call>' }}" + CHATML}},
        True),
    "one of a role": (
        {"tokenizer_config": {"extra_special_tokens": ["<system>"], "chat_template": CHATML.replace(
            "m.role +", "'<' + m.role + '>' +")}}, True),
}


@pytest.mark.parametrize("files, is_marker", TOKEN_FILES.values(), ids=TOKEN_FILES)
def test_a_token_that_stands_in_one_file_alone_is_one_token_and_reserved_if_templates_write_it(
        tmp_path, files, is_marker):
    tokenizer = data.Tokenizer(tokenizer_files(tmp_path, ["eos_token"], **files))
    token = tokenizer.core.id_to_token(4096)
    assert token in ("<call>", "<system>")
    assert tokenizer.core.encode(token).ids == [4096]
    assert bool(tokenizer.reserved.search(f"a {token}")) == is_marker
    assert tokenizer.is_marker.tolist() == [i in (0, 1) or (i == 4096 and is_marker) for i in range(4097)]


@pytest.mark.parametrize("key, token", [("pad_token", "!"), ("unk_token", "is"), ("pad_token", "4")])
def test_a_pad_token_that_is_ordinary_text_reserves_nothing(tmp_path, key, token):
    tokenizer = data.Tokenizer(tokenizer_files(tmp_path, ["eos_token"], tokenizer_config={key: token}))
    answer = message("assistant", "It is 4!")
    texts, _ = read_rows(tmp_path, tokenizer, chat(QUESTION, answer))
    assert texts == [ASKED + trained_turn("It is 4!")]
    plain = data.Tokenizer(tokenizer_files(tmp_path, ["eos_token"]))
    assert tokenizer.core.encode("It is 4!").ids == plain.core.encode("It is 4!").ids


def test_a_special_token_that_the_template_writes_inside_of_answers_drops_no_row(tmp_path):
    named = {"additional_special_tokens": ["<think>", "</think>", "<tool_call>"]}
    config = named | {"chat_template": golden_template("qwen3")}
    tokenizer = data.Tokenizer(tokenizer_files(tmp_path, ["eos_token"], tokenizer_config=config))
    texts, file = read_rows(tmp_path, tokenizer, chat(message("user", "<think> and <tool_call>?"), THOUGHTFUL))
    assert texts[0].endswith(f"⟦<think>\nhm\n</think>\n\nIt is 4.{END}⟧\n")
    assert file.report.notes == {}


def test_a_special_token_that_rows_spell_is_named_with_the_first_line(tmp_path, tiny, capsys):
    rows = [chat(QUESTION, ANSWER), *[chat(QUESTION, message("assistant", f"4{END}"))] * 2]
    _, file = read_rows(tmp_path, tiny, *rows, chat(message("user", START), ANSWER))
    data.print_file(file)
    said = capsys.readouterr().out
    assert f"\n  2 spell a special token, {END}: dropped (the first: line 2)\n" in said
    assert f"\n  1 spell a special token, {START}: dropped (the first: line 4)\n" in said


def tokenizer_with_call(path, template, **options):
    """A tokenizer with a special token <call> that the template does not write."""
    in_decoder = {"4096": CALL_TOKEN | {"special": True} | options}
    config = {"added_tokens_decoder": in_decoder, "chat_template": template}
    return data.Tokenizer(tokenizer_files(path, ["eos_token"], tokenizer_config=config))


def test_a_models_own_special_token_is_that_token_in_every_message(tmp_path):
    rows = [
        chat(message("user", "<call>?"), message("assistant", "<call>add(2)"), message("tool", "4<call>"), ANSWER),
        chat(QUESTION, message("assistant", "<call>")),  # which is more than nothing
        chat(QUESTION, message("assistant", f"<call>{END}")),  # the second one is the template's
    ]
    tokenizer = tokenizer_with_call(tmp_path, CHATML)
    texts, file = read_rows(tmp_path, tokenizer, *rows)
    assert texts == [
        turn("user", "<call>?") + trained_turn("<call>add(2)") + turn("tool", "4<call>") + ANSWERED,
        ASKED + trained_turn("<call>")]
    assert noted(file, "spell a special") == 1
    assert noted(file, "end without a special") == 0
    documents, _ = read_data(tmp_path / "rows.jsonl", tokenizer)
    assert [ids.count(4096) for ids, _ in pieces(documents)] == [3, 1]


def test_what_a_model_says_is_shown_with_its_own_special_tokens_and_without_markers(tmp_path):
    tokenizer = tokenizer_with_call(tmp_path, CHATML)
    ids = [4096, *tokenizer.core.encode("add(2)").ids, tokenizer.eos, 5000]  # the last one is no token's
    assert tokenizer.text_of(ids) == "<call>add(2)"


def test_an_own_special_token_that_takes_the_blanks_before_it_is_trained_on(tmp_path):
    row = chat(QUESTION, message("assistant", "<call>add(2)"))
    texts, _ = read_rows(tmp_path, tokenizer_with_call(tmp_path, CHATML, lstrip=True), row)
    assert texts == [ASKED + f"{START}assistant⟦<call>add(2){END}⟧\n"]  # the line break is gone, as in transformers


def test_an_own_special_token_is_no_end_of_a_turn(tmp_path):
    without_end = CHATML.replace("+ '<|im_end|>'", "")
    row = chat(QUESTION, message("assistant", "add(2)<call>"))
    texts, file = read_rows(tmp_path, tokenizer_with_call(tmp_path, without_end), row)
    assert texts[0].endswith("⟦add(2)<call>\n⟧")
    assert noted(file, "end without a special") == 1


@pytest.mark.parametrize("files, eos", [
    ({"special_tokens_map": {"eos_token": END}}, END),
    ({"special_tokens_map": {"eos_token": {"content": END}}}, END),
    # transformers reads the older file last, and not at all beside a list of added tokens
    ({"special_tokens_map": {"eos_token": END}, "tokenizer_config": {"eos_token": START}}, END),
    ({"special_tokens_map": {"eos_token": END}, "tokenizer_config": {
        "eos_token": START, "added_tokens_decoder": {}}}, START),
    # what only the older file says is better than texts without an end
    ({"special_tokens_map": {"eos_token": END}, "tokenizer_config": {"added_tokens_decoder": {}}}, END),
])
def test_eos_is_found_in_every_file(tmp_path, files, eos):
    tokenizer = data.Tokenizer(tokenizer_files(tmp_path, **files))
    assert tokenizer.variables["eos_token"] == eos
    ((ids, mask),) = tokenizer.encode([data.Text("a b")])
    assert ids[-1] == tokenizer.core.token_to_id(eos)
    assert mask[-1]


def test_new_tokens_come_behind_those_of_all_files(tmp_path):
    base = tokenizer_files(tmp_path / "base", ["eos_token"], added_tokens={"<call>": 4096})
    tokenizer = data.Tokenizer(base, new_tokens=["<a>"])
    assert tokenizer.new_ids == range(4097, 4098)
    with pytest.raises(ValueError, match="--add_tokens: <call>: already in the model's tokenizer"):
        data.Tokenizer(base, new_tokens=["<call>"])
    out = tmp_path / "out"
    out.mkdir()
    tokenizer.save(out)
    assert data.Tokenizer(out).core.encode("<call><a>").ids == [4096, 4097]


ENDS = {  # (template, EOS, files): the end of a turn
    "ChatML, whatever the EOS": (CHATML, START, {}, END),
    "another template's": (CHATML.replace(END, "<|eot|>"), END, {}, "<|eot|>"),
    "none": (LLAMA2, END, {}, END),
}


@pytest.mark.parametrize("template, eos, files, end", ENDS.values(), ids=ENDS)
def test_the_end_of_a_turn_is_what_the_template_writes_behind_an_answer(tmp_path, template, eos, files, end):
    added = {"4096": {"content": "<|eot|>", "special": False}}  # no file calls it special
    files = {"tokenizer_config": {"eos_token": eos, "chat_template": template, "added_tokens_decoder": added}}
    tokenizer = data.Tokenizer(tokenizer_files(tmp_path, **files))
    assert tokenizer.core.token_to_id(end) in tokenizer.stop_ids
    assert tokenizer.reserved.search(end)
    assert bool(tokenizer.reserved.search("<|eot|>")) == (end == "<|eot|>")


@pytest.mark.parametrize("name, given, written", [
    ("config", {"eos_token_id": 0, "bos_token_id": 5}, {"eos_token_id": [0, 1]}),
    ("generation_config", {"eos_token_id": [0, 7], "top_p": 0.8}, {"eos_token_id": [0, 1, 7], "top_p": 0.8}),
    ("generation_config", {"eos_token_id": [0, 1], "top_p": 0.8}, {"eos_token_id": [0, 1], "top_p": 0.8}),
    ("config", {"eos_token_id": [1, 0]}, {"eos_token_id": [0, 1]}),
])
def test_a_result_says_where_readers_look_at_what_a_chat_stops(tmp_path, name, given, written):
    """A base model whose EOS ends a text, tuned on chats with ChatML."""
    base = tokenizer_files(tmp_path / "base", tokenizer_config={"eos_token": START, "chat_template": CHATML})
    (base / f"{name}.json").write_text(json.dumps(given))
    out = tmp_path / "out"
    out.mkdir()
    tokenizer = data.Tokenizer(base)
    tokenizer.save(out)
    named = given["eos_token_id"]
    assert tokenizer.stop_ids == {0, 1} | set(named if isinstance(named, list) else [named])
    assert data.read_json(out / "generation_config.json") == written


def test_final_and_merged_of_a_base_model_name_all_ends(tmp_path, chats):
    base = model_with_weights(tmp_path / "base", eos_token_id=0)
    edit_json(base / "tokenizer_config.json", {"eos_token": START})
    job = ["--model", base, "--data", chats, "--seq_len", 96, "--steps", 1, "--precision", "fp32"]
    methods = {"full": [], "lora": ["--lora", "--merge"], "embeddings": ["--lora", "--train_embeddings", "--merge"]}
    for name, flags in methods.items():
        _, said, codes = run_ranks(1, [*job, *flags], tmp_path / name)
        assert codes == [0], said
    # merged later, from the run alone, it is what the run's own end has merged
    run = tmp_path / "embeddings"
    own = {path.name: path.read_bytes() for path in (run / "merged").iterdir()}
    shutil.rmtree(run / "merged")
    assert train.launch(["--merge", "--model", str(run)]) == 0
    assert {path.name: path.read_bytes() for path in (run / "merged").iterdir()} == own
    for folder in ("full/final", "lora/final", "lora/merged", "embeddings/merged"):
        assert data.read_json(tmp_path / folder / "generation_config.json")["eos_token_id"] == [0, 1]


@pytest.mark.parametrize("is_zero, said_of_it", [(True, "never trained"), (False, "may never have trained")])
def test_an_end_of_a_turn_that_the_base_never_learned_is_said(tmp_path, capsys, is_zero, said_of_it):
    """Llama 3's base has rows of zeros for the tokens that only its chats use, Qwen's has rows of noise."""
    base = model_with_weights(tmp_path / "base")
    if is_zero:
        tensors = load_file(base / "model.safetensors")
        tensors["model.embed_tokens.weight"][data.Tokenizer(base).core.token_to_id(END)] = 0
        save_file(tensors, base / "model.safetensors")
    else:  # the end of its texts is another token
        edit_json(base / "tokenizer_config.json", {"eos_token": START})
    for flags, is_said in ((["--lora"], True), (["--lora", "--train_embeddings"], False), ([], False)):
        train.open_model(train.parse_args(["--model", str(base), *flags]), train.Ranks(False, timeout=60))
        assert (f"{END}: the base {said_of_it}" in capsys.readouterr().out) == is_said


# ---------------------------------------------------------------- 6, 7, 8: what a file may be


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1", "gb18030"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.csv", "a.txt", "a.jsonl.gz"])
def test_a_file_in_another_encoding_is_refused_with_what_to_do(tmp_path, tiny, name, encoding):
    answer = "它值四元" if encoding == "gb18030" else "It costs 4 £."
    rows = [json.dumps({"instruction": f"Price {i}?", "output": answer}, ensure_ascii=False) for i in range(150)]
    lines = {"csv": ["text", *[f'"{answer}"'] * 150], "json": [f"[{','.join(rows)}]"]}.get(name.split(".")[1], rows)
    raw = "\n".join(lines).encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    with pytest.raises(ValueError, match=r"not valid UTF-8: .*: save it as UTF-8"):
        read_data(tmp_path / name, tiny)


def test_ndjson_is_read(tmp_path, tiny):
    (tmp_path / "a.ndjson").write_text('{"text": "a b"}\n{"text": "c d"}\n')
    documents, _ = read_data(tmp_path / "a.ndjson", tiny)
    assert len(pieces(documents)) == 2


VALUES = [
    datetime.date(2024, 7, 26), datetime.timedelta(1), decimal.Decimal("4.5"), 4, 4.5, True, b"\xff\xd8", b"a b", ["a"]]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("place", ["text", "output", "system", "content", "unread"])
def test_a_value_of_a_table_that_is_no_text_is_refused_where_it_is_read(tiny, value, place):
    row = {"text": {"text": value}, "content": chat(QUESTION, message("assistant", value)),
           "unread": {"text": "a b", "made": value}}.get(place, {"instruction": "q", "output": "a", place: value})
    if place == "unread":
        report = data.FileReport()
        data.parse_example(row, tiny, report=report)
        assert sorted(report.unread) == ["made"]
        return
    with pytest.raises(ValueError, match=f"'{place}'.* must be text, got "):
        data.parse_example(row, tiny)


@pytest.mark.parametrize("fields, answer", [
    ('q,"a, b"', "a, b"), ('q," ""a"" b"', ' "a" b'), ('q,say "a"', 'say "a"'), ("q, a", " a"),
    ('q,"a\r\nb"', "a\nb"),
    ('q, "a, b"', None), ('q,"a" ', None),
])
def test_quotes_of_csv_begin_and_end_their_fields(tmp_path, tiny, fields, answer):
    (tmp_path / "a.csv").write_bytes(f"instruction,output\n{fields}\n".encode())
    if answer is None:
        with pytest.raises(ValueError, match=r"a\.csv: cannot be read as csv"):
            read_data(tmp_path / "a.csv", tiny)
        return
    documents, _ = read_data(tmp_path / "a.csv", tiny)
    ((ids, _),) = pieces(documents)
    assert tiny.core.decode(ids, skip_special_tokens=False) == turn("user", "q") + turn("assistant", answer)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.csv", "a.jsonl.gz", "a.txt.gz"])
def test_a_row_that_is_too_large_is_bad_and_the_others_are_read(tmp_path, tiny, monkeypatch, name):
    monkeypatch.setattr(data, "MAX_TEXT_BYTES", 1000)  # 16 MiB in a run
    monkeypatch.setattr(data, "READ_CHARS", 1)
    texts = ["a b"] * 120 + ["c " * 600] + ["d e"]
    rows = [json.dumps({"text": text}) for text in texts]
    lines = {"csv": ["text", *texts], "json": [f"[{','.join(rows)}]"], "txt": texts}.get(name.split(".")[1], rows)
    raw = "\n".join(lines).encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    if name == "a.csv":  # csv has a limit of its own, and cannot go on behind it
        with pytest.raises(ValueError, match=r"cannot be read as csv: line 122: field larger than field lim"):
            read_data(tmp_path / name, tiny)
        return
    documents, file = read_data(tmp_path / name, tiny)
    assert len(pieces(documents)) == 121
    assert file.report.errors == "\n  line 121: not valid text: larger than 0 MiB: split it"


# ---------------------------------------------------------------- 11: names given for the data


def test_new_tokens_that_no_row_has_are_named(tmp_path, capsys):
    path = jsonl(tmp_path / "a.jsonl", {"text": "<a> b"}, {"text": "c"})

    def start(*tokens):
        argv = ["--data", path, "--seq_len", "64", "--add_tokens", *tokens]
        args = train.parse_args(argv)
        tokenizer = data.Tokenizer(HERE / "tiny", new_tokens=args.add_tokens)
        loader, _ = data.open_data(args, tokenizer, 5000, train.Ranks(False, 1800))
        data.print_data(args, loader, None, tokenizer)
        return capsys.readouterr().out

    assert "--add_tokens <b>: in no row of the data, so that they are not learned" in start("<a>", "<b>")
    assert "--add_tokens" not in start("<a>")
    with pytest.raises(SystemExit, match=r"--add_tokens '<a>,<b>': no row of the data has such a token; a blank separ"):
        start("<a>,<b>")


# ---------------------------------------------------------------- 12: types

CALLED = ASKED + trained_turn('<call>{"name": "add", "arguments": {"a": 2, "b": "é"}}</call>')
CALL_IN_TEXT = json.dumps(CALL, ensure_ascii=False)
READ = {  # rows of public sets: the text that they become
    "function_call": (chat(QUESTION, message("assistant", "", function_call=CALL)), CALLED),
    "function_call of null content": (chat(QUESTION, message("assistant", None, function_call=CALL)), CALLED),
    "function_call beside text": (
        chat(QUESTION, message("assistant", "So: ", function_call=CALL)), CALLED.replace("⟦", "⟦So: ")),
    "result of a function": (
        chat(QUESTION, message("assistant", "", function_call=CALL), message("function", "4"), ANSWER),
        CALLED + turn("tool", "4") + ANSWERED),
    "APIGen-MT": (
        {"tools": json.dumps([SCHEMA]), "conversations": [
            {"from": "human", "value": "2 + é?"}, {"from": "function_call", "value": CALL_IN_TEXT},
            {"from": "observation", "value": "4"}, {"from": "gpt", "value": "It is 4."}]},
        SCHEMA_TURN + CALLED + turn("tool", "4") + ANSWERED),
    "LLaMA-Factory's roles": (
        chat(QUESTION, message("function_call", f"[{CALL_IN_TEXT}]"), message("observation", "4"), ANSWER),
        CALLED + turn("tool", "4") + ANSWERED),
    "calls as text": (
        chat(QUESTION, message("assistant", "", tool_calls=json.dumps([{"function": CALL}]))), CALLED),
    "each call as text": (
        chat(QUESTION, message("assistant", "", tool_calls=[json.dumps({"function": CALL_IN_TEXT})])), CALLED),
    "each tool as text": (chat(QUESTION, ANSWER, tools=[json.dumps(SCHEMA)]), SCHEMA_TURN + ASKED + ANSWERED),
    "functions, as tools were called": (chat(QUESTION, ANSWER, functions=[SCHEMA]), SCHEMA_TURN + ASKED + ANSWERED),
    "GLM's tools": (
        chat(message("system", "s", tools=[SCHEMA]), QUESTION, ANSWER),
        SCHEMA_TURN + turn("system", "s") + ASKED + ANSWERED),
    "tools of the row and the same of a message": (
        chat(message("system", "s", tools=json.dumps([SCHEMA])), QUESTION, ANSWER, tools=[SCHEMA]),
        SCHEMA_TURN + turn("system", "s") + ASKED + ANSWERED),
    "a refusal": (chat(QUESTION, message("assistant", None, refusal="It is 4.")), ASKED + ANSWERED),
    "a refusal as a part": (
        chat(QUESTION, message("assistant", [{"type": "refusal", "refusal": "It is 4."}])), ASKED + ANSWERED),
    "LLaMA-Factory's parts": (
        chat(QUESTION, message("assistant", [{"type": "text", "value": "It is 4."}], loss_weight=1.0)),
        ASKED + ANSWERED),
    "KTO's good answer": ({"prompt": [QUESTION], "completion": [ANSWER], "label": True}, ASKED + ANSWERED),
    "a history beside a text": (
        {"prompt": "2 + é?", "completion": "It is 4.", "history": [["a", "b"]]},
        turn("user", "a") + trained_turn("b") + ASKED + ANSWERED),
    "no tools as text": (chat(QUESTION, ANSWER, tools="[]"), ASKED + ANSWERED),
    "from in messages": (
        chat({"from": "human", "value": "2 + é?"}, {"from": "gpt", "value": "It is 4."}), ASKED + ANSWERED),
    "tools beside a text": (
        {"prompt": "2 + é?", "completion": "It is 4.", "tools": [SCHEMA]}, SCHEMA_TURN + ASKED + ANSWERED),
}


@pytest.mark.parametrize("row, expected", READ.values(), ids=READ)
def test_calls_tools_and_roles_are_read_in_every_spelling(tmp_path, agent, row, expected):
    texts, file = read_rows(tmp_path, agent, row)
    assert texts == [expected]
    assert sorted(file.report.unread) == []


def test_a_template_that_reads_the_tools_of_a_message_gets_them_there_alone(tmp_path):
    in_message = "{%- for m in messages %}{%- if m.tools %}{{- m.tools[0].function.name }}{%- endif %}{%- endfor %}"
    tokenizer = tokenizer_of(tmp_path, in_message + AGENT)
    texts, _ = read_rows(tmp_path, tokenizer, chat(message("system", "s", tools=[SCHEMA]), QUESTION, ANSWER))
    assert texts == ["add" + turn("system", "s") + ASKED + ANSWERED]


WITH_KEYS = "must be an object with 'role' and 'content', or 'from' and 'value', got"
NAMED = {  # rows: words of the refusal
    "LIMA": ({"conversations": ["q", "a"]}, f'a message of \'conversations\' {WITH_KEYS} "q"'),
    "Capybara": ({"conversation": [{"input": "q", "output": "a"}]}, "got the keys conversation: --columns COLUMN=KEY"),
    "Capybara, renamed": ({"conversations": [{"input": "q", "output": "a"}]},
                          f"a message of 'conversations' {WITH_KEYS} {{\"input\": \"q\", \"output\": \"a\"}}"),
    "messages in an object": ({"messages": {"role": "user"}}, "'messages' must be a list of messages, got {"),
    "a number": ({"instruction": "q", "output": 4}, "'output' must be text, got 4"),
    "a completion": ({"prompt": "q", "completion": ["a"]}, f"a message of 'completion' {WITH_KEYS} \"a\""),
    "a completion that is a number": (
        {"prompt": "q", "completion": 4}, "'completion' must be text or a list of messages, got 4"),
    "a history": ({"instruction": "q", "output": "a", "history": [["b"]]}, "'history' must list pairs of texts"),
    "a system message": (chat(QUESTION, ANSWER, system=["s"]), "'system' must be text, got"),
    "tools": (chat(QUESTION, ANSWER, tools=[["f"]]), "a tool of 'tools' must be an object, got [\"f\"]"),
    "calls": (chat(QUESTION, {**ANSWER, "tool_calls": {"name": "f"}}), "'tool_calls' must be a list of objects, got"),
    "a call": (chat(QUESTION, {**ANSWER, "tool_calls": ["f"]}), "a call of a tool must be an object, got \"f\""),
    "a name": (chat(QUESTION, {**ANSWER, "tool_calls": [{"function": {"name": 7}}]}),
               "'name' of a call of a tool must be text, got 7"),
    "a function_call": (
        chat(QUESTION, message("function_call", "f(x)")), "a call of a tool must be an object, got \"f(x)\""),
    "a thought": (chat(QUESTION, {**ANSWER, "reasoning_content": 7}), "'reasoning_content' must be text, got 7"),
    # what stands beside the messages, or in place of a text
    "variables": (chat(QUESTION, ANSWER, chat_template_kwargs=["a"]), "'chat_template_kwargs' must be an object, got"),
    "other tools in a message": (
        chat(message("system", "s", tools=[SCHEMA]), QUESTION, ANSWER, tools=[SEARCH]), "'tools' or 'functions' of"),
    "Anthropic's call": (
        chat(QUESTION, message("assistant", [{"type": "text", "text": "So: "}, {
            "id": "1", "input": {}, "name": "add", "type": "tool_use"}])),
        "must be text, got a part of the type \"tool_use\": {\"id\": \"1\""),
    "Anthropic's result": (
        chat(message("user", [{"type": "tool_result", "tool_use_id": "1", "content": "4"}]), ANSWER),
        "expected calls in 'tool_calls', each result in a message of the role 'tool', and a thought in "),
    "a part of another type": (
        chat(QUESTION, message("assistant", [{"type": "thinking", "text": "hm"}])), "a part of the type \"thinking\""),
    "an answer that is no text": (
        chat(QUESTION, {"role": "assistant", "audio": {"id": "1"}}), "must be text, got null; its keys: audio, role"),
    "KTO's bad answer": ({"prompt": "q", "completion": "a", "label": False}, "'label' is false: nobody should learn"),
    "KTO's bad answer of csv": (
        {"prompt": "q", "completion": "a", "label": "FALSE"}, "'label' is \"FALSE\": nobody should learn"),
    "LLaMA-Factory's bad answer": (chat(QUESTION, ANSWER, kto_tag=False), "'kto_tag' is false: nobody should learn"),
    "a row that is not trained on": (chat(QUESTION, ANSWER, train=False), "'train' is false: nobody should learn this"),
}


@pytest.mark.parametrize("row, words", NAMED.values(), ids=NAMED)
def test_a_refusal_names_the_key_what_was_expected_and_what_was_found(agent, row, words):
    assert words in refusal(row, agent)


# ---------------------------------------------------------------- 13: prompts that open a thought


def test_a_prompt_that_opens_a_thought_ends_before_it_and_plain_answers_are_counted(tmp_path, capsys):
    tokenizer = tokenizer_of(tmp_path, NO_THOUGHTS)
    rows = [chat(QUESTION, ANSWER, QUESTION, ANSWER), chat(QUESTION, message("assistant", "<b>4</b>"))]
    texts, file = read_rows(tmp_path, tokenizer, *rows)
    assert texts == [2 * (ASKED + ANSWERED), ASKED + trained_turn("<b>4</b>")]
    assert noted(file, "no reasoning although the prompt") == 3
    documents, _ = read_data(jsonl(tmp_path / "rows.jsonl", *rows), tokenizer)
    loader = data.Loader(documents, 1000, True, 1, 0, 0, 1)
    args = train.parse_args([])
    data.print_data(args, loader, None, tokenizer)
    assert ("3 answers have no reasoning although the prompt opens a thought: training on them teaches the model to "
            "stop reasoning in its default mode") in unwrapped(capsys)


# ---------------------------------------------------------------- 14: configs and adapters


def golden_config(family, *folders):
    return data.read_json(HERE.joinpath(*folders, family, "config.json"))


def test_smollm3_is_read_as_the_hub_has_it():
    raw = golden_config("smollm3", "goldens-windows")
    raw = {key: value for key, value in raw.items() if key not in ("rope_parameters", "tie_word_embeddings")}
    config = lm.parse_config(raw | {"pretraining_tp": 2, "rope_theta": 5e6, "rope_scaling": None})
    assert config.rope_theta == 5e6
    assert config.tie_word_embeddings
    assert lm.parse_config(raw).rope_theta == 2e6


def test_what_a_config_leaves_out_is_what_transformers_takes():
    raw = golden_config("qwen3-tied", "goldens")
    del raw["head_dim"]
    assert lm.parse_config(raw).head_dim == 128 != raw["hidden_size"] // raw["num_attention_heads"]
    raw = golden_config("cwm", "goldens-windows") | {"vocab_size": 512, "rope_parameters": {"rope_type": "default"}}
    assert lm.parse_config(raw).rope_theta == 1e6


def test_keys_of_the_first_yarn_files_are_ignored_and_said(tmp_path, chats):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    raw = golden_config("qwen2", "goldens") | {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": scaling}
    plain = lm.parse_config(raw)
    ignored = {"finetuned": True, "attn_factor": 1.0}
    config = lm.parse_config(raw | {"rope_scaling": scaling | ignored})
    assert config.rope_scaling == plain.rope_scaling
    assert config.rope_ignored == ("attn_factor", "finetuned")
    assert plain.rope_ignored == ()
    folder = model_with_weights(tmp_path / "model", rope_scaling=scaling | ignored, rope_theta=1e6)
    job = ["--model", folder, "--random_init", "--data", chats, "--seq_len", 96, "--steps", 1, "--precision", "fp32"]
    _, said, codes = run_ranks(1, job, tmp_path / "out")
    assert codes == [0], said
    assert "note: config.json: attn_factor, finetuned of RoPE: ignored, as by transformers" in " ".join(said.split())


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """(a model, an adapter of it with a larger embedding of its own)."""
    folder = tmp_path_factory.mktemp("grown")
    base = model_with_weights(folder / "base")
    rows = jsonl(folder / "rows.jsonl", *[chat(QUESTION, message("assistant", "<call>"))] * 3)
    job = ["--model", base, "--data", rows, "--seq_len", 96, "--steps", 1, "--precision", "fp32", "--lora",
           "--train_embeddings", "--add_tokens", "<call>"]
    _, said, codes = run_ranks(1, job, folder / "run")
    assert codes == [0], said
    return base, folder / "run" / "final"


def opened(base, adapter):
    args = train.parse_args(["--model", str(base), "--adapter", str(adapter), "--precision", "fp32"])
    return train.open_model(args, train.Ranks(False, 1800))


def test_an_adapter_of_a_resized_model_loads_by_its_plain_names(tmp_path, grown):
    """PEFT writes each trained module three times."""
    base, final = grown
    adapter = tmp_path / "adapter"
    shutil.copytree(final, adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if ".lora_" not in name]:
        for part, value in (("modules_to_save", 1), ("original_module", 2)):
            tensors[name.replace(".weight", f".{part}.weight")] = tensors[name] + value
    save_file(tensors, adapter / "adapter_model.safetensors")
    found = opened(base, adapter)
    assert found.adapter_reader.tensors.keys() == load_file(final / "adapter_model.safetensors").keys()
    assert found.config.vocab_size == opened(base, final).config.vocab_size


def test_an_adapter_with_more_rows_needs_its_tokenizer(tmp_path, grown):
    base, final = grown
    adapter = tmp_path / "adapter"
    shutil.copytree(final, adapter)
    (adapter / "tokenizer.json").unlink()
    with pytest.raises(SystemExit, match=r"an embedding of 4,224 rows for a model of 4,096, and no tokenizer\.json: s"):
        opened(base, adapter)


@pytest.mark.parametrize("old, new", [
    ("model.layers", "model.language_model.layers"),  # of another class of the model
    ("model.layers.0", "model.vision_tower.layers.0"),  # of a tower
])
def test_an_adapter_with_other_names_is_refused_with_the_way_out(tmp_path, grown, old, new):
    base, final = grown
    adapter = tmp_path / "adapter"
    shutil.copytree(final, adapter)
    path = adapter / "adapter_model.safetensors"
    save_file({name.replace(old, new): tensor for name, tensor in load_file(path).items()}, path)
    with pytest.raises(SystemExit, match=rf"adapter: missing: .*; unexpected: .*{new}.*: merge it into its base"):
        opened(base, adapter)


# ---------------------------------------------------------------- what is on the disk, flags that are given twice


def test_a_list_that_is_given_twice_adds_up():
    once = "--data a --eval_data b --lora_targets v_proj --template_args x=1 --columns q=text --offload activations"
    again = "--data c d --eval_data e --lora_targets q_proj --template_args y=2 --columns r=input --offload"
    args = train.parse_args(f"--lora {once} {again}".split())
    assert (args.data, args.eval_data, args.lora_targets) == (["a", "c", "d"], ["b", "e"], ["q_proj", "v_proj"])
    assert args.template_args == ["x=1", "y=2"]
    assert args.columns == [("q", "text"), ("r", "input")]
    assert args.offload == ["activations"]
    # without a value one of these is all that there is, also beside a value
    for bare in ("--nf5 --nf5 q_proj", "--nf5 q_proj --nf5", "--nf5"):
        assert train.parse_args(f"--qlora {bare}".split()).nf5 == list(lm.ALL_LINEAR)
    for bare in ("--offload --offload params", "--offload params --offload", "--offload"):
        assert train.parse_args(f"--fsdp2 {bare}".split()).offload == ["activations", "params"]
    assert train.parse_args("--qlora --nf5 q_proj --nf5 k_proj".split()).nf5 == ["q_proj", "k_proj"]


def test_one_value_may_be_given_twice():
    assert train.parse_args("--lr 1e-4 --lr 0.0001 --steps 3".split()).lr == 1e-4


@pytest.mark.parametrize("name", ["./tiny", "./llama-3.1-8b", "llama-3.1-8b"])
def test_a_folder_comes_before_the_built_in_model_or_the_preset_of_its_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    random_model(tmp_path / name, hidden_size=32)
    args = train.parse_args(["--model", name])
    assert data.find_model(args.model, random_init=True).config["hidden_size"] == 32
    # without --model the built-in one is meant, and so it is by its bare name
    for argv in ([], ["--model", "tiny"]):
        assert data.find_model(train.parse_args(argv).model, random_init=True).tokenizer == data.TINY


@pytest.mark.parametrize("address, name", [
    ("https://huggingface.co/Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
    ("https://hf.co/datasets/a/b.c/viewer?row=3", "a/b.c"),
    ("https://huggingface.co/a/b/tree/main/", "a/b"),
    ("hf://datasets/a/b", "a/b"),
])
def test_the_address_of_a_page_of_the_hub_is_its_id(address, name):
    args = train.parse_args(["--model", address, "--data", address])
    assert [args.model, *args.data] == [name, name]


# ---------------------------------------------------------------- marks of parts, classes, roles of others


def test_keys_of_parts_that_nobody_reads_are_listed(tmp_path, tiny):
    marked = [{"type": "text", "text": "It is 55. ", "train": False}, {"text": "No, 4.", "weight": None}]
    _, file = read_rows(tmp_path, tiny, chat(QUESTION, message("assistant", marked)))
    assert sorted(file.report.unread) == ["messages.content.train"]


@pytest.mark.parametrize("label", [0, 1, 2, "0", "joy"])
def test_a_label_that_is_no_boolean_is_another_column(tmp_path, tiny, label):
    _, file = read_rows(tmp_path, tiny, {"instruction": "Mood?", "output": "good", "label": label})
    assert (file.report.n_bad, sorted(file.report.unread)) == (0, ["label"])


@pytest.mark.parametrize("call, result", [("tool_call", "tool_response"), ("function_call", "observation")])
@pytest.mark.parametrize("said", [[], [message("assistant", "Let me see.")]])
def test_calls_in_a_row_are_one_turn(agent, call, result, said):
    calls = [message(call, json.dumps({"name": "add", "arguments": {"a": n}})) for n in (1, 2)]
    given = [QUESTION, *said, *calls, message(result, "1"), message(result, "2"), ANSWER]
    in_one = [{"type": "function", "function": {"name": "add", "arguments": {"a": n}}} for n in (1, 2)]
    content = {"content": said[0]["content"]} if said else {}
    turn_with_calls = {"role": "assistant", **content, "tool_calls": in_one}
    plain = [QUESTION, turn_with_calls, message("tool", "1"), message("tool", "2"), ANSWER]
    assert text_of(chat(*given), agent) == text_of(chat(*plain), agent)


def test_calls_that_are_trained_on_differently_stay_two_turns():
    calls = [message("tool_call", '{"name": "add"}', loss=mark) for mark in (0, 1)]
    assert len(data.check_messages([QUESTION, *calls])) == 3


def test_a_developer_message_is_a_system_message_where_the_template_has_no_such_role(tmp_path, capsys):
    developer = message("developer", "Be brief.")
    tokenizer = tokenizer_of(tmp_path, QWEN)
    documents, file = read_rows(tmp_path, tokenizer, chat(developer, QUESTION, ANSWER))
    assert documents == read_rows(tmp_path, tokenizer, chat(message("system", "Be brief."), QUESTION, ANSWER))[0]
    data.print_file(file)
    assert "1 developer messages are read as system messages: the template has no such role" in capsys.readouterr().out
    knows = CHATML + "{% if messages[0].role == 'developer' %}{% endif %}"
    assert "<|im_start|>developer" in text_of(chat(developer, QUESTION, ANSWER), tokenizer_of(tmp_path, knows))


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_csv_with_other_separators_is_named(tmp_path, tiny, separator):
    (tmp_path / "a.csv").write_text(f"instruction{separator}output\nq{separator}a\n")
    with pytest.raises(ValueError, match="line 1: expected commas between columns, got"):
        read_data(tmp_path / "a.csv", tiny)


# ---------------------------------------------------------------- a JSON null in a text, halves of characters


@pytest.mark.parametrize("key", ["tools", "functions", "chat_template_kwargs", "history"])
def test_a_null_in_a_text_is_no_value(agent, key):
    row = chat(QUESTION, ANSWER)
    assert text_of(row | {key: "null"}, agent) == text_of(row, agent)


@pytest.mark.parametrize("key", ["tool_calls", "function_call", "reasoning_content", "weight"])
def test_a_null_in_a_text_of_a_message_is_no_value(agent, key):
    assert text_of(chat(QUESTION, {**ANSWER, key: "null"}), agent) == text_of(chat(QUESTION, ANSWER), agent)


def test_content_may_say_null(agent):
    assert "null" in text_of(chat(QUESTION, message("assistant", "null")), agent)


def test_half_of_a_character_is_not_blamed_on_the_encoding(agent):
    said = refusal(chat(QUESTION, message("assistant", "\ud83d")), agent)
    assert r"'\ud83d' is half of a character" in said
    assert "UTF-8" not in said


# ---------------------------------------------------------------- thoughts


def test_thoughts_that_never_end_are_counted(tmp_path):
    tokenizer = tokenizer_of(tmp_path, golden_template("qwen3"))
    cut_off = message("assistant", "<think>\nhm, and then")
    rows = [chat(QUESTION, answer) for answer in (cut_off, THOUGHTFUL, ANSWER)]
    _, file = read_rows(tmp_path, tokenizer, *rows)
    assert noted(file, "begin a thought that never ends") == 1


# ---------------------------------------------------------------- folders


def test_a_value_head_is_left_out_and_said(tmp_path, capsys):
    folder = model_with_weights(tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = data.WeightFiles(folder).tensors.keys()
    save_file(tensors | {"v_head.summary.weight": torch.zeros(1, 8)}, path)
    assert data.WeightFiles(folder).tensors.keys() == names
    assert "the value head (v_head.*) of TRL is left out" in capsys.readouterr().out


def test_names_of_automodel_are_read(tmp_path):
    folder = model_with_weights(tmp_path / "model", tie_word_embeddings=True)
    path = folder / "model.safetensors"
    before = data.WeightFiles(folder).tensors.keys()
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path)
    assert data.WeightFiles(folder).tensors.keys() == before


SHARDS = {  # what lies beside other trainers' states: what is said of it
    "pytorch_model_fsdp_0/__0_0.distcp": "accelerate merge-weights",
    "global_step9/mp_rank_00_model_states.pt": "zero_to_fp32.py",
}


@pytest.mark.parametrize("name", SHARDS)
def test_shards_of_other_trainers_are_named(tmp_path, name):
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_bytes(b"PK")
    (tmp_path / train.STATE).write_text('{"global_step": 9}')
    for flag in ("--model", "--resume"):
        with pytest.raises((argparse.ArgumentError, ValueError)) as error:
            if flag == "--resume":
                train.checkpoint_to_resume(None, str(tmp_path))
            args = train.parse_args([flag, str(tmp_path)])
            data.find_model(args.model, random_init=True)
        assert SHARDS[name] in str(error.value)


def test_a_checkpoint_of_another_trainer_is_no_damaged_one(tmp_path):
    folder = model_with_weights(tmp_path / "checkpoint-100")
    (folder / train.STATE).write_text('{"global_step": 100, "log_history": []}')
    for flag in ("resume", "export"):
        for named in (folder, tmp_path):  # a checkpoint, or the folder that has some
            with pytest.raises(ValueError, match=f"--{flag} .* another trainer: --model .*-100 begins with"):
                train.find_checkpoint(flag, str(named))
    # nor is it a run's that has no model yet
    assert train.parse_args(["--model", str(folder)]).model == str(folder)


def test_what_is_in_the_place_of_the_weights_is_named(tmp_path):
    folder = model_with_weights(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "optimizer.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors: no such file: .*there are .*optimizer.safetensors"):
        data.WeightFiles(folder)


def in_parts(folder, names, index=None):
    """Puts a model's weights into several files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: names[i % len(names)] for i, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    if index:
        (folder / index).write_text(json.dumps({"weight_map": places}))


NAMES_OF_WEIGHTS = {  # files, and the name of their index
    "one": (["weights.safetensors"], None),
    "one part": (["model-00001-of-00001.safetensors"], None),
    "all parts": (["pytorch_model-1-of-2.safetensors", "pytorch_model-2-of-2.safetensors"], None),
    "another index": (["a.safetensors", "b.safetensors"], "ft_model.safetensors.index.json"),
    "names that are not ASCII": (["mod\u00e8le (1).safetensors", "\u6a21.safetensors"], "model.safetensors.index.json"),
}


@pytest.mark.parametrize("names, index", NAMES_OF_WEIGHTS.values(), ids=NAMES_OF_WEIGHTS)
def test_weights_under_other_names_are_read(tmp_path, names, index):
    folder = model_with_weights(tmp_path / "model")
    before = data.WeightFiles(folder).tensors.keys()
    in_parts(folder, names, index)
    assert data.WeightFiles(folder).tensors.keys() == before


@pytest.mark.parametrize("names", [
    ["model-00001-of-00002.safetensors"], ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"],
    ["model.fp16.safetensors", "model.fp32.safetensors"], ["consolidated.safetensors"], ["adapter_model.safetensors"]])
def test_weights_that_are_not_whole_or_of_several_meanings_are_not_read(tmp_path, names):
    folder = model_with_weights(tmp_path / "model")
    in_parts(folder, names)
    with pytest.raises(ValueError, match=r"model/model\.safetensors: no such file"):
        data.WeightFiles(folder)


def test_fused_layers_and_the_state_of_a_peft_model_are_named(tmp_path):
    folder = model_with_weights(tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    with torch.device("meta"):
        model = lm.Transformer(lm.parse_config(data.read_json(folder / "config.json")))
    for old, new, words in (
        (".self_attn.q_proj.", ".self_attn.qkv_proj.", "fused layers, as vLLM has them"),
        (".mlp.up_proj.", ".mlp.gate_up_proj.", "fused layers, as vLLM has them"),
        (".q_proj.", ".q_proj.base_layer.", "merge_and_unload"),
    ):
        save_file({name.replace(old, new): tensors[name] for name in tensors}, path)
        with pytest.raises(ValueError, match=f"unexpected: .*{words}"):
            data.check_weights(model, data.WeightFiles(folder), "m")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module._orig_mod."])
def test_names_of_wrapped_modules_are_read(tmp_path, prefix):
    folder = model_with_weights(tmp_path / "model")
    path = folder / "model.safetensors"
    before = data.WeightFiles(folder).tensors.keys()
    tensors = load_file(path)
    save_file({prefix + name.replace(".mlp.", ".mlp._orig_mod."): tensors[name] for name in tensors}, path)
    reader = data.WeightFiles(folder)
    assert reader.tensors.keys() == before
    config = lm.parse_config(data.read_json(folder / "config.json"))
    written = data.layout_of_result(reader, config)
    assert {stored.name for stored in written.values()} == before  # and a result has them without the prefix
    assert data.module_name("base_model.model.a.lora_A.default.weight") == "base_model.model.a.lora_A.weight"


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0)])
def test_empty_tensors_of_zero_3_are_named(tmp_path, shape):
    save_file({"model.norm.weight": torch.zeros(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.norm.weight is empty, as ZeRO-3.*zero_to_fp32.py"):
        data.WeightFiles(tmp_path)


def test_the_config_of_the_base_beside_an_adapter_makes_it_no_model(tmp_path, grown):
    """As axolotl's folders have it."""
    base, final = grown
    adapter = tmp_path / "adapter"
    shutil.copytree(final, adapter)
    shutil.copy(base / "config.json", adapter)
    assert data.find_result(str(adapter)) == (str(base), str(adapter))
    shutil.copy(base / "model.safetensors", adapter)
    assert data.find_result(str(adapter)) == (str(adapter), None)


@pytest.mark.parametrize("changes, words", [
    ({"hidden_size": 64, "num_attention_heads": 2}, r"wrong shape: .*192.*, not .*64.*"),
    ({"num_hidden_layers": 2}, r"unexpected: .*layers\.\d\..* and \d+ more"),
])
def test_an_adapter_or_weights_of_another_model_are_named_as_such(changes, words):
    config = lm.parse_config(data.read_json(data.TINY / "config.json"))
    other = lm.parse_config(data.read_json(data.TINY / "config.json") | changes)
    for target in ("q_proj", "down_proj"):
        with torch.device("meta"):
            models = lm.Transformer(config), lm.Transformer(other)
        for model in models:
            lm.add_lora_(model, 2, 1.0, 0.0, [target])
        shapes = {data.PEFT_PREFIX + name: shape for name, shape in data.shapes_in_files(models[0]).items()
                  if ".lora_" in name}
        reader = argparse.Namespace(tensors={
            name: data.Stored(None, shape, torch.float32, name) for name, shape in shapes.items()})
        with pytest.raises(ValueError, match=rf"^a: {words}: merge it .*an adapter of another model$") as error:
            data.check_weights(models[1], reader, "a")
        assert len(str(error.value)) < 1000  # a few names of hundreds
    with torch.device("meta"):
        model = lm.Transformer(other)
    with pytest.raises(ValueError, match=rf"^m: {words}: weights of another model\?$"):
        data.check_weights(model, data.WeightFiles(data.TINY), "m")


@pytest.mark.parametrize("files, words", [
    (["checkpoint-5/pytorch_model_fsdp_0/__0_0.distcp"], "accelerate merge-weights"),
    (["mp_rank_00_model_states.pt"], "zero_to_fp32.py"),
    (["epoch/hf_model_0001_0.pt"], "torchtune"),
    (["lit_model.pth", "model_config.yaml"], "LitGPT"),
    (["original/consolidated.00.pth"], "Meta's"),
    (["a/iter_1/model.pt", "a/latest_checkpointed_iteration.txt"], "Megatron"),
    (["model.safetensors"], "weights alone: copy config.json and tokenizer"),
    (["optimizer.pt", "rng_state_0.pth", "training_args.bin"], "expected a folder as transformers or PEFT save it"),
])
def test_folders_of_other_trainers_are_named(tmp_path, files, words):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(ValueError, match=f"no config.json: .*{words}"):
        data.find_model(str(tmp_path), random_init=True)


def test_an_adapter_of_mlx_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"fine_tune_type": "lora", "num_layers": 16}')
    (tmp_path / "adapters.safetensors").write_bytes(b"")
    for open_it in (data.open_adapter, data.find_result):
        with pytest.raises(ValueError, match=r"adapter_config\.json: .*: an adapter of MLX: `mlx_lm\.fuse"):
            open_it(tmp_path)


@pytest.mark.parametrize("typed, meant", {
    "Qwen3-4B": "Qwen/Qwen3-4B", "qwen3:4b": "Qwen/Qwen3-4B", "qwne3-4b": "Qwen/Qwen3-4B",
    "llama3:8b": "meta-llama/Meta-Llama-3-8B", "llama3.1:8b-instruct-q4_K_M": "meta-llama/Llama-3.1-8B",
    "Llama-3.2-1B-Instruct": "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-4B/": "Qwen/Qwen3-4B",
    "hf.co/Qwen/Qwen3-8B-GGUF:Q4": "Qwen/Qwen3-8B", "qwen3-30b": "Qwen/Qwen3-30B-A3B",
}.items())
def test_a_name_without_its_organization_is_answered_with_the_id(typed, meant):
    with pytest.raises(ValueError, match=rf"no Hub id \(org/name\)\. Did you mean {meant}\?$"):
        data.find_model(typed, random_init=False)


@pytest.mark.parametrize("typed", ["qwen3.6-27b", "gemma3:4b", "nobody", "qwen3-14bb:", "Qwen/Qwen3-4B"])
def test_another_model_is_not_guessed(typed):
    assert data.did_you_mean(typed) == ("Did you mean Qwen/Qwen3-14B?" if "14" in typed else "")


@pytest.mark.parametrize("name", ["twice-tied", "experts"])
def test_where_two_keys_tie_differently_the_weights_decide(tmp_path, name):
    """transformers 5 reads the key at the top, with its default if it is absent, and older versions the other one."""
    folder = tmp_path / "model"
    shutil.copytree(HERE / "goldens-qwen35" / name, folder)
    raw = data.read_json(folder / "config.json")
    has_head = data.HEAD in data.WeightFiles(folder).tensors
    assert has_head == (name == "experts")
    for top, text in ((True, False), (False, True), (None, True), (None, False)):
        changed = raw | {"text_config": raw["text_config"] | {"tie_word_embeddings": text}, "tie_word_embeddings": top}
        (folder / "config.json").write_text(json.dumps({k: v for k, v in changed.items() if v is not None}))
        for random_init, is_tied in ((False, not has_head), (True, text)):
            found = data.find_model(str(folder), random_init).config
            assert found["tie_word_embeddings"] is found["text_config"]["tie_word_embeddings"] is is_tied


def test_a_user_without_a_home_is_told_of_the_cache(tmp_path, tiny, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", chat(QUESTION, ANSWER))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as Python has it for a user without an entry
    with pytest.raises(ValueError, match="no home folder for tokens: set XDG_CACHE_HOME"):
        data.tokenized(str(path), tiny)


def test_the_program_runs_without_docstrings():
    command = [sys.executable, "-OO", TRAIN, "--help"]
    assert "--qlora" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


# ---------------------------------------------------------------- results


def test_an_adapter_is_trained_on_with_the_commit_of_its_base_and_names_it(
        tmp_path, monkeypatch, few_chats, capsys):
    commits = {"1" * 40: model_with_weights(tmp_path / ("1" * 40)), "2" * 40: model_with_weights(tmp_path / ("2" * 40))}
    refs = {None: "1" * 40, "main": "1" * 40, "old": "2" * 40} | {commit: commit for commit in commits}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, revision, **_: commits[refs[revision]])
    (commits["2" * 40] / "README.md").write_text("---\ntags:\n- a\nlicense: apache-2.0\n---\nA model.\n")
    job = ["--data", str(few_chats), "--seq_len", "96", "--steps", "1", "--precision", "fp32", "--sample="]
    monkeypatch.chdir(tmp_path)
    assert train.launch(["--model", "ann/legs", "--lora", *job, "--out", "first"]) == 0
    settings = data.read_json(tmp_path / "first/final/adapter_config.json")
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("ann/legs", "1" * 40)
    # as PEFT reads it: a branch, or a commit
    data.write_json(tmp_path / "first/final/adapter_config.json", settings | {"revision": "old"})
    assert train.launch(["--model", "first", *job, "--out", "second"]) == 0
    said = capsys.readouterr().out
    assert "\nann/legs (" in said
    assert "  first/final is trained on: adapters on all-linear: rank 16" in said
    assert train.launch(["--model", "first", "--dry_run"]) == 0
    assert capsys.readouterr().out.startswith("planning first/final on ann/legs\n")
    assert re.search(r"\n1 step in \d+ s\n", said)
    assert data.read_json(tmp_path / "second/final/adapter_config.json")["revision"] == "2" * 40
    card = (tmp_path / "second/final/README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\nbase_model: ann/legs\nlicense: apache-2.0\n---\n")
    assert str(tmp_path) not in card  # nor the name of a private file of data


def test_random_weights_are_merged_in_the_models_own_dtype():
    """--random_init --merge: they are made in float32, and the header of the merged file names the model's dtype."""
    raw = data.read_json(HERE / "tiny/config.json")
    model = lm.Transformer(lm.parse_config(raw | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    reader = data.RandomWeights(model, 0, torch.device("cpu"))
    norm = "model.norm.weight"
    layer = "model.layers.0.self_attn.k_proj"
    made = {f"{data.PEFT_PREFIX}{layer}.lora_{which}.weight": torch.full(shape, 0.1)
            for which, shape in {"A": (1, 192), "B": (64, 1)}.items()}
    adapter = argparse.Namespace(tensors=data.layout_of(made), rows=lambda name, start, stop: made[name][start:stop])
    merged = {name: data.merged_weight(reader, name, adapter, 2.0) for name in (norm, f"{layer}.weight")}
    assert {weight.dtype for weight in merged.values()} == {torch.bfloat16}
    expected = data.whole(reader, f"{layer}.weight") + 0.02
    assert torch.allclose(merged[f"{layer}.weight"].float(), expected, rtol=2**-8)  # bf16 has 8 bits


def test_a_result_has_what_a_model_needs_and_nothing_of_others(tmp_path):
    base = model_folder(tmp_path)
    others = ["trainer_state.json", "args.json", "hf_quant_config.json", "secrets.json", "zero_to_fp32.py"]
    for name in others:
        (base / name).write_text("{}")
    auto_map = {"AutoModel": "modeling.A", "AutoConfig": "org/a--other.B"}
    (base / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    (base / "modeling.py").write_text("import os\nfrom .parts import x\nraise SystemExit\n")
    for name in ("parts.py", "other.py", "preprocessor_config.json"):
        (base / name).write_text("{}")
    data.begin_result(tmp_path / "out", data.Tokenizer(base))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert not names & {*others, "other.py"}
    assert names >= {"modeling.py", "parts.py", "preprocessor_config.json", "tokenizer.json"}


def test_a_loss_that_ends_ten_times_higher_and_rows_in_both_sets_get_a_note(tmp_path, chats):
    job = ["--model", "tiny", "--data", chats, "--seq_len", 96, "--steps", 12, "--schedule", "constant", "--sample="]
    _, said, codes = run_ranks(1, [*job, "--lr", 1, "--eval_data", chats], tmp_path / "out")
    assert codes == [0], said
    assert re.search(r"note: the loss rose from \d+\S* to \d+\S*: lower --lr", said)
    assert re.search(r"note: \d+ examples of --eval_data are trained on, too", said)
    _, said, _ = run_ranks(1, [*job, "--lr", 1e-4, "--steps", 2], tmp_path / "good")
    assert "note: the loss" not in said
    assert "are trained on, too" not in said


def test_an_old_transformers_and_an_old_peft_find_what_they_read(tmp_path):
    for key in ("dtype", "torch_dtype"):
        raw = {name: value for name, value in golden_config("qwen2", "goldens").items() if "dtype" not in name}
        written = data.with_both_spellings(raw | {key: "float16"})
        assert (written["dtype"], written["torch_dtype"]) == ("float16", "float16")
        assert "dtype" not in data.with_both_spellings(raw)
    # PEFT of 2025 ends with a TypeError at a key that it does not know
    pair = {"model.embed_tokens.weight": torch.zeros(4, 2), data.HEAD: torch.ones(4, 2)}
    for tensors, is_said in ((pair, False), (dict([*pair.items()][:1]), True), ({}, False)):
        data.save_adapter(tensors, tmp_path, "base", 2, 4.0, 0.0, ["q_proj"])
        settings = data.read_json(tmp_path / "adapter_config.json")
        assert settings.get("ensure_weight_tying", False) is is_said
        assert ("ensure_weight_tying" in settings) is is_said


# ---------------------------------------------------------------- every value of a row is read, shown or named

CITY = {"city": "Ulm"}


@pytest.mark.parametrize("call", [
    {"name": "weather", "args": CITY, "id": "c1", "type": "tool_call"},
    {"type": "function", "function": {"name": "weather", "parameters": json.dumps(CITY)}},
    {"type": "tool_use", "name": "weather", "input": CITY},
    {"function": {"name": "weather"}, "arguments": CITY},
    {"function": {"name": "weather", "arguments": {}}, "args": CITY},
    {"function": "weather", "arguments": CITY},
], ids=["LangChain", "Llama", "Anthropic", "beside the function", "beside empty ones", "beside a name"])
def test_arguments_are_read_by_the_names_that_they_have_elsewhere(agent, call):
    plain = message("assistant", None, tool_calls=[{"function": {"name": "weather", "arguments": CITY}}])
    given = message("assistant", None, tool_calls=[call])
    assert text_of(chat(QUESTION, given), agent) == text_of(chat(QUESTION, plain), agent)


@pytest.mark.parametrize("call, key", [
    ({"name": "weather", "kwargs": CITY}, "kwargs"),
    ({"function": {"name": "weather", "city": "Ulm"}}, "city"),
    ({"function": {"name": "weather", "arguments": "{}"}, "params": json.dumps(CITY)}, "params"),
])
def test_a_call_without_arguments_beside_a_key_that_is_not_read_is_refused(agent, call, key):
    row = chat(QUESTION, message("assistant", None, tool_calls=[call]))
    assert f'a call of "weather" has no arguments, but {key}: arguments are read from' in refusal(row, agent)


def test_a_key_that_nobody_reads_is_listed_at_any_depth(tmp_path, capsys):
    names_alone = "{%- for tool in tools or [] %}{{- tool.function.name }}{%- endfor %}"
    tokenizer = tokenizer_of(tmp_path, names_alone + CHATML.replace(
        "m.content", "(m.content or '') + (m.tool_calls[0].function | tojson if m.tool_calls else '')"))
    call = {"type": "function", "seconds": 3, "function": {"name": "weather", "arguments": CITY, "hint": "x"}}
    tool = {"type": "function", "function": {"name": "weather", "strict": True}}
    answer = message("assistant", [{"text": "a", "cached": True}], tool_calls=[call])
    rows = [chat(QUESTION, answer, tools=[tool], id=1), chat(QUESTION, ANSWER, id=2)]
    _, file = read_rows(tmp_path, tokenizer, *rows)
    # the template writes the function of a call whole
    expected = {"messages.tool_calls.seconds": 1, "tools.function.strict": 1, "messages.content.cached": 1, "id": 2}
    assert file.report.unread == expected
    data.print_file(file)
    assert ("messages.content.cached (1), messages.tool_calls.seconds (1), tools.function.strict (1), id (2)"
            in unwrapped(capsys))


@pytest.mark.parametrize("row, columns, words", [
    ({"instruction": "r", "question": "q", "output": "a"}, [("question", "instruction")],
     "rows have 'instruction' as well, which is not read: --columns question=instruction takes its place"),
    ({"instruction": "q", "output": "a", "weight": 0.5}, [], "rows have a 'weight' other than 0 and 1"),
    (chat(QUESTION, ANSWER, tools=[{"name": "f", "parameters": {"type": "object", "title": None}}]), [],
     "tools have keys that are null"),
    (chat(QUESTION), [], "chats have no answer"),
    ({"text": "<|im_start|>user\nq"}, [], "texts contain turns of a rendered chat"),
    ({"text": "[INST] q [/INST] a"}, [], "texts contain turns of a rendered chat"),
    ({"text": "### Human: q### Assistant: a"}, [], "texts contain turns of a rendered chat"),  # guanaco's
    ({"text": "A chat. USER: q ASSISTANT: a</s>"}, [], "texts contain turns of a rendered chat"),  # Vicuna's
    ({"text": "<|header_start|>user<|header_end|>\n\nq<|eot|>"}, [], "texts contain turns of a rendered chat"),
    ({"text": "<\uff5cUser\uff5c>q<\uff5cAssistant\uff5c>a"}, [], "texts contain turns of a rendered chat"),
    ({"text": json.dumps(chat(QUESTION, ANSWER))}, [], "texts contain turns of a rendered chat"),
    ({"text": str([QUESTION, ANSWER])}, [], "texts contain turns of a rendered chat"),
])
def test_what_is_lost_on_the_way_is_counted(tmp_path, row, columns, words):
    # a template that shows all
    tokenizer = tokenizer_of(tmp_path, "{{ tools | tojson }}" + CHATML)
    report = data.FileReport()
    data.parse_example(json.dumps(row), tokenizer, columns, report)
    assert noted(argparse.Namespace(report=report), words) == 1


@pytest.mark.parametrize("messages, unread", [
    ([{**QUESTION, "reasoning_content": "hm"}, ANSWER], {"messages.reasoning_content": 1}),  # nobody thinks there
    ([QUESTION, {**ANSWER, "reasoning_content": "hm", "reasoning": "no"}], {"messages.reasoning": 1}),
    ([QUESTION, message("assistant", "<think>hm</think>a", score=7)], {"messages.score": 1}),  # its thought moves
    ([{"from": "human", "value": "q", "content": "r"}, ANSWER], {"messages.value": 1}),
])
def test_a_second_text_of_a_message_is_listed(tmp_path, agent, messages, unread):
    _, file = read_rows(tmp_path, agent, {"messages": messages})
    assert file.report.unread == unread


def test_a_null_that_a_schema_needs_stays(agent):
    schema = {"name": "f", "parameters": {"properties": {"a": {"default": None, "const": None, "title": None}}}}
    assert '{"a": {"default": null, "const": null}}' in text_of(chat(QUESTION, ANSWER, tools=[schema]), agent)


@pytest.mark.parametrize("row, words", [
    ({"instruction": "q", "output": "a", "weight": -1}, "'weight' is -1: nobody should learn"),
    ({"text": "a", "train": False}, "'train' is false: nobody should learn"),
    ({"instruction": "q", "output": "a", "loss": "0"}, "'loss' is \"0\": nobody should learn"),
    (chat(QUESTION, {**ANSWER, "weight": 0.5}), "'weight' must be 0 or 1, got 0.5"),
    (chat(message("user", [{"type": "image_url", "image_url": {"url": "x"}}]), ANSWER), "oomph reads text only"),
    (chat(message("user", "<image>\n2 + é?"), ANSWER, image="x.jpg"), "'image' is \"x.jpg\": oomph reads text only"),
    (chat(QUESTION, ANSWER, videos=["x.mp4"]), "oomph reads text only: leave such rows out of the file, or 'videos'"),
    ({"prompt": json.dumps(chat(QUESTION)), "completion": "a"}, "'prompt' must be text or a list of messages"),
])
def test_marks_and_parts_that_mean_something_else_are_refused(tiny, row, words):
    assert words in refusal(row, tiny)


def test_turns_are_searched_in_linear_time(tiny):
    with data.cpu_time_limit(5):  # an hour, if each part of a long word were tried as a name
        assert not data.has_turns("<|" + "user" * 250_000, tiny)


def test_a_text_in_the_place_of_an_answer_is_no_fault_of_the_template(tmp_path):
    tokenizer = tokenizer_of(tmp_path, "{{ raise_exception('no question') if not messages }}" + CHATML)
    assert "an answer without a question before it; give a plain text as 'text'" in refusal(chat(ANSWER), tokenizer)


def test_the_address_of_a_picture_that_nobody_asks_about_is_metadata(tmp_path, tiny):
    rows = chat(QUESTION, ANSWER, image="x.jpg", audio=False, videos=[]), {"text": "a b", "images": ["x.jpg"]}
    texts, file = read_rows(tmp_path, tiny, *rows)
    assert texts[0] == ASKED + ANSWERED
    assert file.report.unread.keys() == {"image", "audio", "images"}


@pytest.mark.parametrize("prompt, completion, n", [("Q: x\nA: ", "Paris", 1), ("Q: x\nA:", " Paris", 0)])
def test_an_answer_that_begins_within_a_token_of_the_prompt_is_counted(tmp_path, tiny, prompt, completion, n):
    _, file = read_rows(tmp_path, tiny, {"prompt": prompt, "completion": completion})
    notes = [note for note in file.report.notes if "share a token with the end of their prompt" in note]
    assert len(notes) == n


def test_an_empty_thought_behind_an_open_one_of_the_prompt_has_one_note(tmp_path):
    tokenizer = data.Tokenizer(data.TINY, str(HERE / "goldens-chat/qwen3.5.jinja"))
    _, file = read_rows(tmp_path, tokenizer, chat(QUESTION, ANSWER))
    (note,) = file.report.notes
    assert note.startswith("answers begin with an empty thought")


def test_a_key_that_an_object_has_twice_is_refused(tiny):
    with pytest.raises(ValueError, match='an object has the key "text" twice'):
        data.parse_example('{"text": "a", "text": "b"}', tiny)


TURNS = [message("user", "2 + é?")], [message("assistant", "It is 4.")]


@pytest.mark.parametrize("prompt, completion", [
    TURNS, (TURNS[0], "It is 4."), ("2 + é?", TURNS[1]), (TURNS[0][0], TURNS[1][0]),
    (json.dumps(TURNS[0]), json.dumps(TURNS[1][0])), ("2 + é?", [*TURNS[0], *TURNS[1]]),
    ([{"from": "human", "value": "2 + é?"}], TURNS[1]),
])
def test_a_prompt_and_a_completion_are_texts_or_messages(tmp_path, tiny, prompt, completion):
    texts, _ = read_rows(tmp_path, tiny, {"prompt": prompt, "completion": completion})
    assert texts == [ASKED + ANSWERED]


def test_an_answer_of_the_role_model_is_one_in_json_too(tmp_path, tiny):
    turns = [message("user", "2 + é?"), message("model", "It is 4.")]
    rows = [{"messages": turns}, {"prompt": "2 + é?", "completion": json.dumps(turns[1:])}]
    texts, _ = read_rows(tmp_path, tiny, *rows)
    assert texts == [ASKED + ANSWERED] * 2


@pytest.mark.parametrize("answer", [
    '[{"role": "CEO", "content": "Ann"}]', '{"role": "user", "n": 1}', '[{"from": "Ulm", "to": "Bonn"}]', "[]", "7"])
def test_json_that_is_no_message_is_a_text(tiny, answer):
    assert text_of({"prompt": "q", "completion": answer}, tiny) == "q" + answer


# ---------------------------------------------------------------- a file is opened by its bytes

GOOD = b'{"text": "a b"}\n{"text": "c d"}\n'
BYTES = {  # name: content, which is two texts
    "packed.jsonl": gzip.compress(GOOD),
    "plain.jsonl.gz": GOOD,
    "noending": GOOD,
    "line.jsonl": GOOD.replace(b"\n", b""),
    "commas.jsonl": GOOD.replace(b"\n", b",\n"),
    "texts.json": b'["a b", "c d"]',
    "pretty.json": b'{\n  "text": "a b"\n}\n{\n  "text": "c d"\n}\n',
    "lines.txt": GOOD,
    "pretty.txt": b'[\n  {\n    "text": "a b"\n  },\n  {\n    "text": "c d"\n  }\n]\n',
    "blanks.csv": b" text , n\na b,\nc d,\n",
    "marks.jsonl": b"\xef\xbb\xbf" + GOOD.replace(b"\n", "\n\ufeff".encode(), 1),
    "chats.csv": gzip.compress(b"text\na b\nc d\n"),
}


@pytest.mark.parametrize("name, content", BYTES.items(), ids=BYTES)
def test_a_file_is_read_as_its_bytes_say(tmp_path, tiny, name, content):
    (tmp_path / name).write_bytes(content)
    documents, file = read_data(tmp_path / name, tiny)
    assert [tiny.core.decode(ids.tolist()) for ids, _ in map(documents.part, range(2))] == ["a b", "c d"]
    assert file.report.n_bad == 0


def test_a_chat_over_several_lines_is_one_example(tmp_path, tiny):
    (tmp_path / "a.json").write_text(json.dumps([QUESTION, ANSWER], indent=1))
    _, file = read_data(tmp_path / "a.json", tiny)
    assert (file.report.n_examples, file.report.n_chats, file.report.n_bad) == (1, 1, 0)


def test_what_stands_between_objects_over_several_lines_is_named(tmp_path, tiny):
    (tmp_path / "a.json").write_text('{\n "text": "a b"\n},\nlost\n' + '{"text": "a"}\n' * 200)
    _, file = read_data(tmp_path / "a.json", tiny)
    assert (file.report.n_examples, file.report.n_bad) == (202, 1)
    assert "line 4: not valid JSON" in file.report.errors


def test_a_line_separator_inside_of_a_text_ends_no_line_behind_a_bad_one(tmp_path, tiny):
    separator = "\u2028"  # JSON has it in texts, and str.splitlines() ends a line there
    lines = ['{"text": "a b"} {"text": }', *[f'{{"text": "a{separator}b"}}'] * 200]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    _, file = read_data(tmp_path / "a.jsonl", tiny)
    assert (file.report.n_examples, file.report.n_bad) == (202, 1)


@pytest.mark.parametrize("content, words", [
    (b"PK\3\4abc", "a zip archive"), (b"\x28\xb5\x2f\xfdabc", "compressed by zstd"), (b"%PDF-1.4", "a PDF")])
def test_a_file_of_another_kind_is_named(tmp_path, tiny, content, words):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_data(tmp_path / "a.jsonl", tiny)


def test_a_pipe_is_read_and_an_empty_shard_is_left_out(tmp_path, tiny, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "empty.jsonl").touch()
    writer = subprocess.Popen(["sh", "-c", f"printf '{{\"text\": \"a b\"}}\\n' > {pipe}"])
    args = train.parse_args(["--data", str(pipe), str(tmp_path / "empty.jsonl"), "--seq_len", "64"])
    loader, _ = data.open_data(args, tiny, 4096, train.Ranks(False, 1800))
    assert writer.wait() == 0
    assert loader.documents.n_examples() == 1
    assert "empty.jsonl: nothing to train on: it has no examples: left out" in capsys.readouterr().out
    args.data = args.data[1:]
    with pytest.raises(SystemExit, match="nothing to train on: it has no examples"):
        data.open_data(args, tiny, 4096, train.Ranks(False, 1800))
