"""Holds what data.py makes of rows as people bring them against transformers, TRL, datasets and pyarrow.

    python tests/check_data.py                  # three minutes on two cores, no GPU, no network
    python tests/check_data.py 1 3 --mutants 100 --seed 7

Run by hand, never by pytest: it needs transformers, trl, datasets and pyarrow. Seen with transformers 5.24, trl 1.16.0,
datasets 5.2.0 and pyarrow 26. Each rule has a generator of mutants: rows, files or folders that differ from a plain one
in what the rule is about, twenty or more of them. What is right of each comes from the other libraries, or from a
definition that is slower than data.py's: rendering once without each field, for example. One line per rule; exit status
1 where one fails. Rule 11 (names given for the data) needs no peer, and has its tests in test_brought.py; configs and
adapters, rule 14, are in check_folders.py.
"""

import argparse
import copy
import datetime
import decimal
import gzip
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import transformers
import trl
from make_chat_goldens import Calendar
from transformers.utils import chat_template_utils
from trl.trainer.utils import remove_none_values

sys.path.insert(0, str(Path(__file__).parent.parent))

import data

HERE = Path(__file__).parent
TINY = HERE / "tiny"
START, END = "<|im_start|>", "<|im_end|>"
TEMPLATES = {path.stem: path.read_text("utf-8") for path in [
    *sorted((HERE / "goldens-chat").glob("*.jinja")),
    *sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))]}
CHATML = TEMPLATES["chatml_generation"]
QWEN = TEMPLATES["qwen2.5"]
# what a message to a user must not contain: words of Python's own errors
PYTHON = re.compile("object has no attribute|not subscriptable|unhashable|can only concatenate|unsupported operand|"
                    "not iterable|KeyError|IndexError|indices must be|argument of type|NoneType|unexpected keyword|"
                    "positional argument|the file has to be that list alone")
rng = random.Random()
failed = []


class Rule:
    """Counts the mutants of a rule, and prints those on which both sides differ."""

    def __init__(self, title):
        self.title = title
        self.n = 0
        self.kinds = Counter()
        self.wrong = []

    def holds(self, mutant, passed, kind, found=""):
        self.n += 1
        self.kinds[kind] += 1
        if not passed:
            self.wrong.append(f"    {str(mutant)[:500]}\n      {kind}: {str(found)[:500]}")

    def end(self):
        kinds = ", ".join(f"{n} {kind}" for kind, n in self.kinds.most_common())
        print(f"{'FAILED' if self.wrong else 'ok    '} {self.title}: {self.n} mutants ({kinds})", flush=True)
        for line in self.wrong[:5]:
            print(line)
        if self.wrong:
            failed.append(self.title)


# ---------------------------------------------------------------- both sides


def peer(template=None, folder=TINY):
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    if template:
        tokenizer.chat_template = template
    return tokenizer


def own(template, folder, **options):
    """data.Tokenizer of the built-in tokenizer with a template."""
    path = Path(folder) / "template.jinja"
    path.write_text(template, "utf-8")
    return data.Tokenizer(TINY, path, **options)


def theirs(tokenizer, messages, tools=None, **options):
    """The text of messages in transformers, None where the template raises."""
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    except Exception:  # a template may raise anything
        return None


WITH_BLOCKS = (r"{% if m.role == 'assistant' %}{% generation %}\1{% endgeneration %}" "\n"
               r"{% else %}\1{% endif %}" "\n\n")


def read(row, tokenizer, columns=(), report=None):
    """-> ([Text], None), or (None, what the row is refused with)."""
    try:
        return data.parse_example(json.dumps(row), tokenizer, columns, report), None
    except ValueError as error:
        return None, str(error)


def shown(tokenizer, example):
    """The text of an example with what is trained on between ⟦ and ⟧."""
    text = example.text
    for start, stop in sorted(example.spans, reverse=True):
        text = f"{text[:start]}⟦{text[start:stop]}⟧{text[stop:]}"
    return text


def read_file(path, tokenizer):
    """-> (the decoded documents of a file, its report, None), or (None, None, what it is refused with)."""
    try:
        folder = data.tokenized(str(path), tokenizer)
    except (ValueError, OSError) as error:
        return None, None, str(error)
    report = data.read_report(folder)
    tokens, table = (np.fromfile(folder / key, data.ARRAYS[key]) for key in ("tokens", "documents"))
    documents = np.split(tokens, np.cumsum(table["length"])[:-1])
    return [tokenizer.core.decode(ids, skip_special_tokens=False) for ids in documents], report, None


# ---------------------------------------------------------------- what is mutated

WORDS = "weather search clock city Ulm rain days please look the a now It is été ☃ 4".split()


def words(n=5):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, n)))


def schema(name):
    properties = {key: {"type": "string", "description": words()} for key in rng.sample(["city", "days", "unit"], 2)}
    parameters = {"type": "object", "properties": properties, "required": [next(iter(properties))]}
    return {"type": "function", "function": {"name": name, "description": words(), "parameters": parameters}}


def call(name, number):
    arguments = {"city": words(2), "days": rng.randint(1, 9)}
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def conversation():
    """(messages, tools): questions and answers with thoughts, calls and their results, each now and then."""
    tools = [schema(name) for name in rng.sample(["weather", "search", "clock"], rng.randint(1, 2))]
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": words()})
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": words()})
        if rng.random() < 0.4:
            calls = [call(rng.choice(tools)["function"]["name"], i) for i in range(rng.randint(1, 2))]
            messages.append({"role": "assistant", "content": rng.choice(["", words()]), "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": one["id"], "content": words()} for one in calls]
        answer = {"role": "assistant", "content": words()}
        if rng.random() < 0.3:
            answer["reasoning_content"] = words()
        messages.append(answer)
    return messages, tools if any("tool_calls" in message for message in messages) or rng.random() < 0.2 else None


# ---------------------------------------------------------------- 1: what a template leaves out


def variants(messages, tools):
    """Yields (what, number of the answer or None, messages, tools), a field less each, or with another value where a
    template may insist on one. Thoughts are not among them: many templates drop those of earlier answers."""
    for i in range(len(tools or [])):
        yield "tool", None, messages, [*tools[:i], *tools[i + 1 :]] or None
    for i, message in enumerate(messages):
        is_answer = message["role"] == "assistant"
        for j in range(len(message.get("tool_calls", []))):
            changed = copy.deepcopy(messages)
            del changed[i]["tool_calls"][j]
            if not changed[i]["tool_calls"]:
                del changed[i]["tool_calls"]
            yield "call", None, changed, tools
        if (message.get("content") or "").strip():
            changed = copy.deepcopy(messages)
            changed[i]["content"] += " and more"
            yield ("content", i, changed, tools) if is_answer else (message["role"], None, changed, tools)


def check_left_out(n, folder):
    """Rule 1: each field of an answer, each tool, call and message changes the text, or is refused or counted."""
    rule = Rule("1 what a template leaves out")
    for (name, template), _ in itertools.product(TEMPLATES.items(), range(max(2, n // 10))):
        messages, tools = conversation()
        for i, message in enumerate(messages):
            if message["content"]:  # its words alone tell that it is there: with one that no other has, they do
                message["content"] += f" number{i}"
        tokenizer = own(template, folder)
        reference = peer(template)
        forms = [messages]  # as data.py gives them: with content, and with arguments as text
        with_none = [message | {"content": message.get("content")} for message in messages]
        with_text = copy.deepcopy(with_none)
        for one in itertools.chain(*(message.get("tool_calls", []) for message in with_text)):
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"], ensure_ascii=False)
        for form in (with_none, with_text):
            if theirs(reference, forms[-1], tools) is None:
                forms.append(form)
        messages = forms[-1]
        text = theirs(reference, messages, tools)
        row = {"messages": messages, "tools": tools}
        report = data.FileReport()
        examples, refusal = read(row, tokenizer, report=report)
        if text is None:
            rule.holds((name, row), refusal, "both raise", examples)
            continue
        lost = Counter()
        for what, _, changed, changed_tools in variants(messages, tools):
            lost[what] += theirs(reference, changed, changed_tools) == text
        must_refuse = {what for what in lost if lost[what] and what != "content"}
        if must_refuse:
            rule.holds((name, row, must_refuse), refusal and "leaves" in refusal, "refused", refusal or examples)
        elif refusal:  # nothing is left of an answer, or no answer can be delimited: not for this rule to say
            fine = "nothing but its end" in refusal or "delimit" in refusal
            rule.holds((name, row), fine, "answers that cannot be used", refusal)
        else:
            n_contents = sum(n for note, n in report.notes.items() if "lose their content:" in note)
            rule.holds((name, row, lost), n_contents == lost["content"] and examples[0].text == text,
                       "equal texts", examples[0])
    rule.end()


# ---------------------------------------------------------------- 2: keys


def check_keys(n, folder):
    """Rule 2: keys that transformers' text does not depend on are listed; marked turns are context."""
    rule = Rule("2 unread keys, turns that are context")
    unknown = ["emotion", "rating", "custom", "lang", "cache_control", "speaker", "index2"]
    for template in (CHATML, QWEN, TEMPLATES["constructs"], TEMPLATES["qwen3.5"]) * (1 + n // 2):
        messages, tools = conversation()
        for message in messages:
            message.pop("reasoning_content", None)
        tokenizer, reference = own(template, folder), peer(template)
        plain, _ = read({"messages": messages, "tools": tools}, tokenizer)
        if plain is None:
            continue
        changed = copy.deepcopy(messages)
        added = set()
        for message in rng.sample(changed, min(2, len(changed))):
            key = rng.choice(unknown)
            message[key] = words()
            added.add(f"messages.{key}")
        if theirs(reference, changed, tools) != theirs(reference, messages, tools):
            continue  # a template that reads these
        marks = {}
        for i, message in enumerate(changed):
            if message["role"] == "assistant" and rng.random() < 0.5:
                key = rng.choice(["weight", "loss", "train", "trainable", "training"])
                message[key] = rng.choice([True, False, 0, 1, None])
                marks[i] = message[key] in (None, True, 1)
        answers = [i for i, message in enumerate(changed) if message["role"] == "assistant"]
        report = data.FileReport()
        examples, refusal = read({"messages": changed, "tools": tools}, tokenizer, report=report)
        n_without_mask = sum(n for text, n in report.notes.items() if "not trained on" in text)
        trained = sum(marks.get(i, True) for i in answers)
        fine = examples and sorted(report.unread) == sorted(added) and (
            sum(len(one.spans) for one in examples) + n_without_mask == trained)
        rule.holds(changed, fine, "lists and masks", refusal or examples)
    rule.end()


# ---------------------------------------------------------------- 3: nulls


def with_nulls(value):
    """A value with nulls at random keys of its objects."""
    if isinstance(value, list):
        return [with_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    value = {key: with_nulls(item) for key, item in value.items()}
    if rng.random() < 0.3:
        value[rng.choice(["enum", "amount", "extra", "name2"])] = None
    return value


def check_nulls(n, folder):
    """Rule 3: what a table adds does not show; a null that means something stays; empty cells have no value."""
    rule = Rule("3 nulls and empty values")
    tokenizer, reference = own(QWEN, folder), peer(QWEN)
    for i in range(n):
        rows = []
        for _ in range(3):
            messages, tools = conversation()
            for message in messages:
                message.pop("reasoning_content", None)
            rows.append({"messages": messages, "tools": tools or [schema("clock")]})
        path = Path(folder) / f"nulls-{i}.parquet"
        table = pyarrow.Table.from_pylist(rows)  # one type a column: structs with the keys of all rows
        if i % 2:
            table = datasets.Dataset.from_list(rows).with_format("arrow")[:]
        pyarrow.parquet.write_table(table, path)
        rows = [remove_none_values(row) for row in table.to_pylist()]  # keys in the order of the table
        expected = [theirs(reference, row["messages"], row["tools"]) for row in rows]
        texts, _, refusal = read_file(path, tokenizer)
        # data.py ends a text with its last answer, as these rows do
        rule.holds(rows, texts == expected, "tables", refusal or texts)

        messages, tools = conversation()
        row = {"messages": messages, "tools": tools}
        plain, _ = read(row, tokenizer)
        if plain:
            mutant = with_nulls({key: value for key, value in row.items() if value is not None})
            for message in mutant["messages"]:
                for one in message.get("tool_calls", []):  # nulls that no schema names, and in the object itself
                    one["function"]["arguments"] |= {"amount": None}
            examples, refusal = read(mutant, tokenizer)
            fine = examples and (tools is None or examples[0].text == plain[0].text)
            rule.holds(mutant, fine, "lines", refusal or examples)
        # a null that the tool's own schema names
        tool = schema("weather")
        key = next(iter(tool["function"]["parameters"]["properties"]))
        asked = [{"role": "user", "content": words()}]
        said = {"role": "assistant", "content": "", "tool_calls": [call("weather", 1)]}
        said["tool_calls"][0]["function"]["arguments"] = {key: None, "other": None}
        examples, refusal = read({"messages": [*asked, said], "tools": [tool]}, tokenizer)
        del said["tool_calls"][0]["function"]["arguments"]["other"]
        fine = examples and examples[0].text == theirs(reference, [*asked, said], [tool])
        rule.holds(said, fine, "nulls that a schema names", refusal or examples)
        for empty in ("", None, "{}", "null", {}):
            said["tool_calls"][0]["function"]["arguments"] = empty
            examples, refusal = read({"messages": [*asked, said], "tools": [tool]}, tokenizer)
            said["tool_calls"][0]["function"]["arguments"] = {}
            fine = examples and examples[0].text == theirs(reference, [*asked, said], [tool])
            rule.holds(empty, fine, "empty arguments", refusal or examples)
        said["tool_calls"][0]["function"]["arguments"] = rng.choice(["[1]", "x = 1", 5, [1], "7"])
        examples, refusal = read({"messages": [*asked, said], "tools": [tool]}, tokenizer)
        rule.holds(said, refusal and "'arguments' of a call of" in refusal, "arguments that are no object", examples)
    rule.end()


# ---------------------------------------------------------------- 4: tokens of a folder


def added_token(number, token):
    """An entry of tokenizer.json for a special token."""
    return {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": True}


def tokenizer_folder(path):
    """A folder whose tokens stand in some of the files that transformers reads."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    raw = json.loads((TINY / "tokenizer.json").read_text())
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    named = {key: config.pop(key) for key in list(config) if key.endswith("_token")}
    named = {key: value for key, value in named.items() if value is not None}
    old = {}
    new = rng.sample(["<call>", "</call>", "<a b>", "[PAD]", "<|tool|>", "the", "<think>"], rng.randint(0, 4))
    if rng.random() < 0.5:
        named["pad_token"] = rng.choice(["[PAD]", END])
    if rng.random() < 0.3:
        named["image_token"] = "<image>"
    place = rng.choice(["decoder", "added_tokens", "extra", "additional", "map", "tokenizer.json"])
    by_id = {str(4096 + i): {"content": token, "special": rng.random() < 0.5} for i, token in enumerate(new)}
    if place == "decoder":
        config["added_tokens_decoder"] = by_id
    elif place == "added_tokens":
        (path / "added_tokens.json").write_text(json.dumps({token: 4096 + i for i, token in enumerate(new)}))
    elif place == "extra":
        config["extra_special_tokens"] = new
    elif place == "additional":
        config["additional_special_tokens"] = [{"content": token} for token in new] if rng.random() < 0.3 else new
        if config["additional_special_tokens"] != new:  # a dict where it has options: with "__type", as it is written
            config["additional_special_tokens"] = [{"__type": "AddedToken", "content": token} for token in new]
    elif place == "map":
        old["additional_special_tokens"] = new
    else:
        raw["added_tokens"] += [added_token(4096 + i, token) for i, token in enumerate(new)]
    in_map = {key for key in named if rng.random() < 0.5 and place != "decoder"}
    for key, value in named.items():
        as_object = {"content": value, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
        if key in in_map:
            old[key] = as_object if rng.random() < 0.5 and key != "image_token" else value
        if key not in in_map or rng.random() < 0.2:
            config[key] = value
    if old:
        (path / "special_tokens_map.json").write_text(json.dumps(old))
    (path / "tokenizer.json").write_text(json.dumps(raw))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return new, place, config, old


def check_tokens(n, folder):
    """Rule 4: ids, named tokens and special ones of a folder are transformers'."""
    rule = Rule("4 tokens of all files")
    for i in range(5 * n):
        path = Path(folder) / f"tokens-{i}"
        shape = tokenizer_folder(path)
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(path)
        try:
            tokenizer = data.Tokenizer(path)
        except ValueError as error:
            rule.holds(shape, False, shape[1], error)
            continue
        text = "a <call> b</call><a b>[PAD]<|tool|> the <think><image> now" + END
        ids = tokenizer.core.encode(text, add_special_tokens=False).ids
        named = tokenizer.variables == reference.special_tokens_map
        special = set(reference.all_special_tokens) | {
            str(token) for token in reference.added_tokens_decoder.values() if token.special}
        # messages may spell those that neither ChatML nor the ends of a text have
        kept = {START, END, *(named_token for key, named_token in reference.special_tokens_map.items()
                              if key in data.NAMED_TOKENS)}
        spelled = all(bool(tokenizer.reserved.search(token)) == (token in kept) for token in special)
        # ours has no generation blocks, which plain jinja cannot read
        reference.chat_template = re.sub(
            r"(\{\{ m\.content .*\}\})\n", WITH_BLOCKS, tokenizer.template_texts["chat_template.jinja"])
        answer = "so" + "".join(token for token in sorted(special) if token not in kept)
        messages = [{"role": "user", "content": f"a {answer}"}, {"role": "assistant", "content": answer}]
        ((chat_ids, mask),) = tokenizer.encode(read({"messages": messages}, tokenizer)[0])
        theirs = reference.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True)
        n = len(chat_ids)
        same = chat_ids.tolist() == theirs["input_ids"][:n] and mask.tolist() == [
            value == 1 for value in theirs["assistant_masks"][:n]]
        ((text_ids, _),) = tokenizer.encode([data.Text("a now")])
        has_end = reference.eos_token_id is None or text_ids[-1] == reference.eos_token_id
        has_ids = ids == reference(text, add_special_tokens=False)["input_ids"]
        fine = has_ids and named and spelled and has_end and same
        rule.holds(shape, fine, shape[1], (ids, tokenizer.variables, reference.special_tokens_map))
    rule.end()


def check_stops(n, folder):
    """Rules 4 and 5: the named template for tools is used, and transformers stops where --chat does."""
    rule = Rule("4, 5 templates by name, ends of turns in generation_config.json")
    for i in range(n):
        path, out = Path(folder) / f"stops-{i}", Path(folder) / f"stops-{i}-out"
        for one in (path, out):
            one.mkdir()
        raw = json.loads((TINY / "tokenizer.json").read_text())
        raw["added_tokens"] += [added_token(4096 + k, token)
                                for k, token in enumerate(["<|endoftext|>", "<|eot|>", "<|end|>"])]
        (path / "tokenizer.json").write_text(json.dumps(raw))
        end = rng.choice([END, "<|eot|>", "<|end|>", "<|endoftext|>"])
        template = TEMPLATES["chatml"].replace(END, end)
        with_tools = TEMPLATES["qwen2.5"].replace(END, end)
        config = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
        has_tool_template = rng.random() < 0.5
        if has_tool_template:
            named = [{"name": "default", "template": template}, {"name": "tool_use", "template": with_tools}]
            if rng.random() < 0.5:
                config["chat_template"] = named
            else:
                (path / "additional_chat_templates").mkdir()
                (path / "chat_template.jinja").write_text(template)
                (path / "additional_chat_templates/tool_use.jinja").write_text(with_tools)
        else:
            config["chat_template"] = with_tools
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        stops = rng.choice([None, 4096, [4096, 7], [4096]])
        if stops is not None:
            name = rng.choice(["generation_config.json", "config.json"])
            (path / name).write_text(json.dumps({"eos_token_id": stops, "bos_token_id": 5, "model_type": "llama"}))
        tokenizer = data.Tokenizer(path)
        tokenizer.save(out)
        if not (out / "generation_config.json").exists() and (path / "config.json").exists():
            shutil.copy(path / "config.json", out)  # as an export has it
            written = transformers.GenerationConfig.from_model_config(transformers.AutoConfig.from_pretrained(out))
        else:
            written = transformers.GenerationConfig.from_pretrained(out)
        ids = written.eos_token_id
        ids = set(ids if isinstance(ids, list) else [ids])
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(path)
        end_id = reference.convert_tokens_to_ids(end)
        named_stops = {stops} if isinstance(stops, int) else set(stops or [])
        fine = ids == tokenizer.stop_ids == {4096, end_id} | named_stops
        rule.holds((end, stops), fine, "stops", (ids, tokenizer.stop_ids))
        again = transformers.PreTrainedTokenizerFast.from_pretrained(out)
        messages, _ = conversation()
        for message in messages:
            message.pop("reasoning_content", None)
        for given in (None, [schema("clock"), schema("weather"), schema("search")]):
            if given is None and any("tool_calls" in message for message in messages):
                continue
            text = theirs(reference, messages, given)
            examples, refusal = read({"messages": messages, "tools": given}, tokenizer)
            fine = examples and examples[0].text == text and theirs(again, messages, given) == text
            rule.holds((has_tool_template, given), fine, "templates", refusal or (examples, text))
    rule.end()


# ---------------------------------------------------------------- 6, 7, 8: what a file may be


def check_encodings(n, folder):
    """Rule 6: a file in another encoding is refused, and says how to save it."""
    rule = Rule("6 encodings")
    tokenizer = own(CHATML, folder)
    codecs = ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252", "gb18030", "shift_jis", "utf-8",
              "utf-8-sig"]
    texts = {"gb18030": "价格是四块", "shift_jis": "値段は四円"}
    for codec, suffix, zipped in itertools.product(codecs, ["jsonl", "ndjson", "json", "csv", "txt"], [False, True]):
        answer = texts.get(codec, "été, it costs 4 £")
        n_rows = rng.choice([1, 30, 150])
        rows = [{"instruction": f"Price {i}?", "output": answer} for i in range(n_rows)]
        content = {
            "json": json.dumps(rows, ensure_ascii=False),
            "csv": "instruction,output\n" + "".join(f'"{row["instruction"]}","{row["output"]}"\n' for row in rows),
            "txt": "".join(f"{row['instruction']} {row['output']}\n" for row in rows),
        }.get(suffix, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        raw = content.encode(codec)
        path = Path(folder) / f"encoded-{rule.n}.{suffix}{'.gz' if zipped else ''}"
        path.write_bytes(gzip.compress(raw) if zipped else raw)
        found, report, refusal = read_file(path, tokenizer)
        if codec.startswith("utf-8"):
            fine = found and all("été, it costs 4 £" in one for one in found) and report.n_bad == 0
            rule.holds((codec, path.name), fine, "read", refusal or found)
        else:
            rule.holds((codec, path.name), refusal and "save it as UTF-8" in refusal, "refused", refusal or found)
    rule.end()


def check_values(n, folder):
    """Rule 7: values that are no text are refused by name, bytes among them; csv is strict."""
    rule = Rule("7 values that are no text")
    tokenizer = own(CHATML, folder)
    day = datetime.datetime(2024, 7, 26, 12, 30)
    texts = ["café 4", pyarrow.scalar("café 4", pyarrow.large_string())]
    others = [b"caf\xc3\xa9 4", b"\xff\xd8\xff", "café".encode("utf-16-le"), day.date(), day, datetime.timedelta(1),
              decimal.Decimal("4.50"), 4, 4.5, True, ["a", "b"], {"a": "b"}]
    places = {
        "text": lambda value: {"text": value},
        "output": lambda value: {"instruction": "q", "output": value},
        "completion": lambda value: {"prompt": "q", "completion": value},
        "system": lambda value: {"instruction": "q", "output": "café 4", "system": value},
        "content": lambda value: {"messages": [{"role": "user", "content": value},
                                               {"role": "assistant", "content": value}]},
        "part": lambda value: {"messages": [{"role": role, "content": [{"type": "text", "text": value}]}
                                            for role in ("user", "assistant")]},
        "unread": lambda value: {"instruction": "q", "output": "café 4", "other": value}}
    for value, (place, make) in itertools.product([*texts, *others], places.items()):
        scalar = value.as_py() if isinstance(value, pyarrow.Scalar) else value
        table = pyarrow.Table.from_pylist([make(scalar)])
        if isinstance(value, pyarrow.Scalar) and place == "text":
            table = pyarrow.table({"text": pyarrow.array([scalar], value.type)})
        path = Path(folder) / f"values-{rule.n}.parquet"
        pyarrow.parquet.write_table(table, path)
        found, _, refusal = read_file(path, tokenizer)
        if any(value is text for text in texts) or place == "unread":
            rule.holds((value, place), found and "café 4" in found[0], "read", refusal or found)
        else:
            named = "content" if place == "part" else place
            fine = refusal and named in refusal and "must be" in refusal and not PYTHON.search(refusal)
            rule.holds((value, place), fine, "refused", refusal or found)
    rows = {  # a row of csv, and the answer in it, None: refused
        'q,a b': "a b", 'q,"a, b"': "a, b", 'q,"say ""a"""': 'say "a"', 'q," ""a"" b"': ' "a" b',
        'q, "a, b"': None, 'q, "a b"': ' "a b"', 'q,\t"a"': '\t"a"', '  "q",a': "a", 'q,"a" ': None, 'q,"a" b': None,
        'q,"a': None, 'q,say "a"': 'say "a"', "q, a b": " a b", 'q,"a\nb"': "a\nb", 'q,"a\r\nb"': "a\nb",
        "q,a,b": None, "q": None, "q,": None, 'q,""': None, '"q","a" , b': None}
    for row, answer in rows.items():
        path = Path(folder) / f"values-{rule.n}.csv"
        path.write_bytes(f"instruction,output\n{row}\n".encode())
        found, _, refusal = read_file(path, tokenizer)
        if answer is None:
            rule.holds(row, refusal and not PYTHON.search(refusal), "csv, refused", refusal or found)
        else:
            rule.holds(row, found and f"assistant\n{answer}{END}" in found[0], "csv, read", refusal or found)
    rule.end()


READ_A_FILE = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
import data
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
tokenizer = data.Tokenizer(sys.argv[2])
before = peak()
try:
    said = data.read_report(data.tokenized(sys.argv[3], tokenizer)).errors
except ValueError as error:
    said = str(error)
print(json.dumps([said, peak() - before]))
"""


def read_alone(path):
    """-> (what a process of its own says of a file, its peak of memory above what it starts with, in MiB)."""
    command = [sys.executable, "-c", READ_A_FILE, HERE.parent, TINY, path]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def check_sizes(n, folder):
    """Rule 8: what is larger than a row may be is counted as bad, in little memory."""
    rule = Rule("8 sizes")
    large = "x y " * (15 * 2**20)  # 60 MiB
    good = "a b c"
    for n_good, suffix in itertools.product([0, 200], ["txt", "jsonl", "json", "csv", "txt.gz", "jsonl.gz", "json.gz",
                                                       "csv.gz", "parquet", "dictionary.parquet"]):
        path = Path(folder) / f"large-{rule.n}.{suffix}"
        texts = [good] * n_good + [large]
        if suffix.endswith("parquet"):
            table = pyarrow.table({"text": texts})
            pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary="dictionary" in suffix)
        else:
            lines = {"txt": texts, "csv": ["text", *texts], "json": [json.dumps([{"text": text} for text in texts])],
                     "jsonl": [json.dumps({"text": text}) for text in texts]}[suffix.removesuffix(".gz")]
            with gzip.open(path, "wt", compresslevel=1) if suffix.endswith(".gz") else open(path, "w") as file:
                file.writelines(f"{line}\n" for line in lines)
        said, peak = read_alone(path)
        # tokenizing it took 6,500
        fine = re.search("larger than (16 MiB|field limit)", said) and peak < 500
        rule.holds((path.name, path.stat().st_size), fine, f"{suffix} of {n_good + 1} rows", (said, peak))
        path.unlink()
    rule.end()


# ---------------------------------------------------------------- 9, 10, 11: rows


def check_pairs(n, folder):
    """Rule 9: pairs in every shape become the prompt and the answers of TRL."""
    rule = Rule("9 pairs")
    template = TEMPLATES["chatml"]
    tokenizer, reference = own(template, folder, train_on="pairs"), peer(template)
    for _ in range(3 * n):
        start = rng.choice(["", '{"a": ', "<think>", "The "])  # both answers may begin alike
        question, good, bad = words(), start + words() + " good", start + words() + " bad"
        system = rng.choice([None, words()])
        asked = [{"role": "user", "content": question}]
        chosen, rejected = [{"role": "assistant", "content": good}], [{"role": "assistant", "content": bad}]
        head = [{"role": "system", "content": system}, *asked] if system else asked
        beside = {"system": system} if system else {}
        name = rng.choice(["question", "query", "instruction"])
        shapes = {
            "explicit": {"prompt": head, "chosen": chosen, "rejected": rejected},
            "implicit": {"chosen": head + chosen, "rejected": head + rejected},
            "a label": {"prompt": question, "chosen": head + chosen, "rejected": head + rejected, "score": 8.5},
            "a question": {name: question, "chosen": good, "rejected": bad, **beside},
            "a question that is a label": {name: question, "chosen": head + chosen, "rejected": head + rejected},
            "a question and messages": {name: question, "chosen": chosen, "rejected": rejected, **beside},
            "a prompt in messages and texts": {"prompt": head, "chosen": good, "rejected": rejected},
            "OpenAI": {"input": {"messages": head, "tools": []}, "preferred_output": chosen,
                       "non_preferred_output": rejected},
            "ShareGPT": {key: [{"from": {"user": "human", "assistant": "gpt"}.get(one["role"], one["role"]),
                                "value": one["content"]} for one in head + answer]
                         for key, answer in (("chosen", chosen), ("rejected", rejected))},
        }
        if system:
            shapes["a prompt beside a system message"] = {"prompt": question, "chosen": good, "rejected": bad, **beside}
        kind = rng.choice(list(shapes))
        row = shapes[kind]
        canonical = trl.data_utils.maybe_apply_chat_template(
            {"prompt": head, "chosen": chosen, "rejected": rejected}, reference)
        examples, refusal = read(row, tokenizer)
        # TRL counts the newline behind the end of a turn to the answer, data.py stops at its end
        expected = [f"{canonical['prompt']}⟦{canonical[key].rstrip()}⟧\n" for key in ("chosen", "rejected")]
        fine = examples and [shown(tokenizer, one) for one in examples] == expected
        rule.holds(row, fine, kind, refusal or examples)
    for _ in range(n):
        row = {"prompt": "another question", "chosen": [{"role": "user", "content": words()}, *chosen],
               "rejected": [{"role": "user", "content": words()}, *rejected]}
        examples, refusal = read(row, tokenizer)
        rule.holds(row, refusal and "'prompt'" in refusal, "labels of nothing, refused", examples)
        name = rng.choice(["messages", "history", "context", "turns"])
        answers = rng.choice([{"chosen": good, "rejected": bad}, {"chosen": chosen, "rejected": rejected},
                              {"chosen": chosen, "rejected": bad}])
        row = {name: asked, "source": "web", **answers}
        _, refusal = read(row, tokenizer)
        fine = refusal and name in refusal and "--columns" in refusal
        examples, refusal = read(row, tokenizer, [(name, "prompt")])
        fine = fine and examples and question in examples[0].text and question in examples[1].text
        rule.holds(row, fine, "questions by other names", refusal or examples)
    rule.end()


def check_copies(n, folder):
    """Rule 10: rows that train the same text are held out together, others are not."""
    rule = Rule("10 copies")
    tokenizer = own(CHATML, folder)
    for _ in range(n):
        rows = []
        for number in range(30):
            question, answer = f"{words()} {number}", words()
            plain = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            rows += [
                {"messages": plain, "id": 2 * number},
                {"messages": [plain[0] | {"id": "u1"}, plain[1] | {"loss": True}], "id": rng.random()},
                {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]},
                {"instruction": question, "output": answer, "source": words()},
                {"messages": [*plain, {"role": "user", "content": "thanks"}]}]
        rng.shuffle(rows)
        sides = {}
        for row in rows:
            (example,), _ = read(row, tokenizer)
            sides.setdefault(example.text, set()).add(example.hash)
        one_each = all(len(hashes) == 1 for hashes in sides.values())
        rule.holds(rows[:2], one_each and len(set(map(min, sides.values()))) == 30, "files of 150 rows", sides)
    rule.end()


# ---------------------------------------------------------------- 12: types

WRONG = [None, 7, 4.5, True, "text", "", [], ["a"], [1], {}, {"a": 1}, [["a", "b"]], [None], [{}], [{"role": "user"}],
         "[1]", '{"a": 1}', [{"from": "human", "value": 5}]]
SOUND = {
    "messages": {"messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"}, {"role": "assistant", "content": "a", "weight": 1}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
            "a": {"type": "integer"}}}}}], "system": "s"},
    "function_call": {"messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "content": "4"}, {"role": "assistant", "content": "a"}]},
    "sharegpt": {"conversations": [
        {"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "4"}, {"from": "gpt", "value": "a"}], "tools": '[{"name": "f"}]'},
    "alpaca": {"instruction": "q", "input": "i", "output": "a", "history": [["b", "c"]], "system": "s"},
    "prompt": {"prompt": "q", "completion": "a"},
    "prompt in messages": {"prompt": [{"role": "user", "content": "q"}],
                           "completion": [{"role": "assistant", "content": "a"}]},
    "text": {"text": "a"},
}
SOUND_PAIRS = {
    "pair": {"prompt": [{"role": "user", "content": "q"}], "chosen": [{"role": "assistant", "content": "a"}],
             "rejected": [{"role": "assistant", "content": "b"}]},
    "pair in texts": {"prompt": "q", "chosen": "a", "rejected": "b", "system": "s"},
    "implicit pair": {"chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
                      "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}]},
    "question": {"question": "q", "chosen": "a", "rejected": "b"},
}


def places_in(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places_in(item, (*path, key))


def with_value(row, path, value):
    row = copy.deepcopy(row)
    inner = row
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return row


def check_types(n, folder):
    """Rule 12: every value of every format in every wrong type is read or refused in words for users."""
    rule = Rule("12 types")
    qwen, chatml = own(QWEN, folder), own(CHATML, folder)
    pairs = own(QWEN, folder, train_on="pairs")
    for name, row in {**SOUND, **SOUND_PAIRS}.items():
        tokenizer = pairs if name in SOUND_PAIRS else qwen
        examples, refusal = read(row, tokenizer)
        rule.holds(row, examples, "sound", refusal)
        for path in places_in(row):
            for value in WRONG:
                mutant = with_value(row, path, value) if path else value
                examples, refusal = read(mutant, tokenizer)
                if examples:
                    rule.holds(mutant, all(isinstance(one.text, str) for one in examples), "read")
                else:
                    rule.holds(mutant, not PYTHON.search(refusal) and len(refusal) < 1000, "refused", refusal)
    path = Path(folder) / "rows.ndjson"
    path.write_text('{"text": "a b"}\n')
    texts, _, refusal = read_file(path, chatml)
    rule.holds(path, texts, "ndjson", refusal)
    rule.end()


# ---------------------------------------------------------------- 13: prompts that open a thought


def check_thoughts(n, folder):
    """Rule 13: under templates whose prompt opens a thought the answers of the history are trained on as they stand."""
    rule = Rule("13 prompts that open a thought")
    openings = ["<think>\n", "<think>", "<think>\n\n</think>\n\n", "<think>\n\n", "<think></think>"]
    histories = ["m.content", "m.content.split('</think>')[-1]", "m.content.split('</think>')[-1].lstrip('\n')"]
    for opening, history, mark in itertools.product(openings, histories, ["<|im_start|>assistant\n", "\nAssistant: "]):
        answer = "{{- " + json.dumps(mark) + " + " + history + " + '<|im_end|>' }}"
        template = ("{%- for m in messages %}{%- if m.role == 'assistant' %}" + answer + "{%- else %}"
                    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
                    "{%- if add_generation_prompt %}{{- " + json.dumps(mark + opening) + " }}{%- endif %}")
        tokenizer, reference = own(template, folder), peer(template)
        asked, said = {"role": "user", "content": words()}, {"role": "assistant", "content": "<b> " + words()}
        examples, refusal = read({"messages": [asked, said, asked, said]}, tokenizer)
        text = theirs(reference, [asked, said, asked, said])
        spans = [span for one in examples or [] for span in one.spans]
        trained = [text[start:stop] for start, stop in sorted(spans)]
        fine = trained == [said["content"] + END] * 2 and examples[0].text == text
        fine = fine and tokenizer.thoughts.opens == ("</think>" not in opening)
        rule.holds((opening, history, mark), fine, "plain answers", refusal or (trained, tokenizer.thoughts.opens))
    for name in ("deepseek_r1_distill", "deepseekv3", "qwen3_5_think", "qwen3.5", "nemotron_3_nano"):
        tokenizer, reference = own(TEMPLATES[name], folder), peer(TEMPLATES[name])
        for _ in range(n // 5):
            asked, said = {"role": "user", "content": words()}, {"role": "assistant", "content": words()}
            text = theirs(reference, [asked, said])
            examples, refusal = read({"messages": [asked, said]}, tokenizer)
            spans = examples[0].spans if examples else []
            fine = examples and examples[0].text == text and len(spans) == 1
            fine = fine and said["content"] in text[slice(*spans[0])]
            rule.holds((name, said), fine, "models' own templates", refusal or examples)
    rule.end()


RULES = {
    "1": check_left_out, "2": check_keys, "3": check_nulls, "4": check_tokens, "5": check_stops, "6": check_encodings,
    "7": check_values, "8": check_sizes, "9": check_pairs, "10": check_copies, "12": check_types, "13": check_thoughts}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("rules", nargs="*", metavar="RULE", help=f"some of {', '.join(RULES)} (default: all)")
    parser.add_argument("--mutants", type=int, default=20, help="of a rule, or of each of its kinds (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"transformers {transformers.__version__}, trl {trl.__version__}, datasets {datasets.__version__}, pyarrow "
          f"{pyarrow.__version__}, {len(TEMPLATES)} templates", flush=True)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    chat_template_utils.datetime = Calendar
    for number in args.rules or RULES:
        rng.seed(f"{args.seed}/{number}")
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder + "/cache"
            RULES[number](args.mutants, folder)
    print(f"{len(failed)} failed" + "".join(f"\n  {title}" for title in failed))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
