"""From files to packed rows: reading, chat templates and loss masks, tokenizing once, best-fit packing, the loader.

A document is a run of n tokens with a flag per token, "train on predicting this one". It fills n - 1 positions of a
row: position p holds token p and its target is token p + 1, so a target never crosses into the next document (torchtune
trained on exactly that until #2613). Packing puts several documents into one row of `seq_len` positions, longest first,
each into the fullest row that still has room (best-fit decreasing, arXiv:2404.10830). Positions restart in each
document and `spans` keeps attention inside it; the padding behind the last one is in no span and has no target.

Masks come from character spans, never from searching for marker tokens: a conversation is rendered once, the tokenizer
returns the characters behind each token, and a token is trained on if it overlaps a span. The spans are the template's
own {% generation %} blocks, or else what an assistant turn adds to the rendering, used only where the text before it
really is a prefix of the text after it (Qwen3's template rewrites earlier turns: trl #6361). Special tokens come from
the template alone: what a message spells like one stays text.

Each file is tokenized once per machine, by as many processes as there are cores, into a folder of flat arrays that all
ranks map into memory: 5 bytes a token on disk, next to nothing in RAM (torchtune #1097: 900 GB for a 3 GB file). Its
name is a hash of everything the arrays depend on, this file's source included. --seq_len, --train_on, --overflow and
weights are applied to the arrays when they are opened, so changing them tokenizes nothing again.

The order of the rows depends on --seed and the epoch alone. The global batch of a step is the same rows in the same
order however it is split over ranks and micro-batches, and the loader's whole position is the number of steps taken.
"""

import ast
import bisect
import codecs
import contextlib
import fcntl
import functools
import gzip
import hashlib
import heapq
import inspect
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import sysconfig
import tempfile
import threading
import time
import zlib
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path

import jinja2
import numpy as np
import tokenizers
import torch
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tqdm import tqdm

from model import IGNORE, Packed, pack_spans, read_json


class BadRow(ValueError):
    """A row that cannot be trained on. args: what is wrong in a word or two, the message."""

    def __str__(self):
        return self.args[1]


# ---------------------------------------------------------------- chat templates

CHATML = """\
{{ bos }}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content + end_of_turn }}{% endgeneration %}
{% else %}{{ m.content + end_of_turn }}{% endif %}

{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
RESERVED = range(0x104000, 0x10FFFE)  # private characters at the end of Unicode that mark things in rendered texts
OPEN, CLOSE = map(chr, RESERVED[:2])  # where a {% generation %} block begins and ends
MARKS = re.compile(f"[{chr(RESERVED[0])}-{chr(RESERVED[-1])}]")
OUTSIDE_ASCII = re.compile(f"[^\\x00-\\x7e{MARKS.pattern[1:]}")
MAX_RENDERED = 50_000_000  # characters of one conversation
TODAY = datetime(2024, 7, 26)  # what templates see as today's date: the text must not depend on the day of training


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: what the assistant says, in the templates of transformers."""

    tags = frozenset(["generation"])

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        nodes = jinja2.nodes
        marks = [nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (OPEN, CLOSE)]
        return [marks[0], nodes.Scope(body).set_lineno(line), marks[1]]  # no call block: that would hold all of the body


class TemplateNamespace(jinja2.utils.Namespace):
    """jinja's namespace() without names that reach into Python."""

    def __init__(self, /, *args, **kwargs):
        attributes = dict(*args, **kwargs)
        for name in attributes:
            TemplateNamespace.check(name)  # an attribute of self would be one of the template's
        super().__init__(attributes)

    def __setitem__(self, name, value):
        TemplateNamespace.check(name)
        super().__setitem__(name, value)

    @staticmethod
    def check(name):
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r}: must not begin with an underscore")


class TemplateDict:
    """dict() for templates, and nothing else of Python's class."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """transformers' filter: jinja's own escapes HTML and sorts the keys."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return OUTSIDE_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def compile_template(source):
    """A chat template in the sandbox that transformers uses: no attribute access to internals, nothing mutable."""
    if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < (3, 1, 6):
        raise ValueError(f"jinja2 {jinja2.__version__}: templates can leave its sandbox: pip install -U 'jinja2>=3.1.6'")
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    env.globals |= {"raise_exception": raise_exception, "strftime_now": TODAY.strftime, "dict": TemplateDict(),
                    "namespace": TemplateNamespace}
    env.filters["tojson"] = tojson
    return env.from_string(source)


def any_of(words):
    """A pattern that matches the longest of these words."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)")


def map_strings(function, value):
    """The same lists and dicts with function(s) for every string s, keys too."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, list):
        return [map_strings(function, item) for item in value]
    if isinstance(value, dict):
        return {function(key): map_strings(function, item) for key, item in value.items()}
    return value


@dataclass
class Source:
    """One document as text: spans of characters to train on (None: all), and how to tokenize it."""

    text: str
    spans: list | None = None
    chat: bool = False  # a template wrote its special tokens; else the tokenizer adds BOS and EOS
    renamed: str | None = None  # where a message spells a special token: text for Tokenizer.plain


class Tokenizer:
    """tokenizer.json, the special tokens, and the chat template of a model folder (or of `template_file`).

    Raises ValueError where a file is missing or the template does not compile.
    """

    def __init__(self, folder, template_file=None):
        self.made_of = folder, template_file
        folder = Path(folder)
        if not (folder / "tokenizer.json").exists():
            raise ValueError(f"{folder}: no tokenizer.json: save the tokenizer with a fast tokenizer of transformers")
        try:
            self.core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{folder / 'tokenizer.json'}: {error}") from error
        self.core.no_truncation()
        self.core.no_padding()
        if (processor := self.core.post_processor) is not None:  # some leave blanks out of the offsets, and so of the masks
            processor.__setstate__(re.sub(rb'("trim_offsets": *)true', rb"\1false", bytes(processor.__getstate__())))
            self.core.post_processor = processor
        # Llama 2's are looked for in the normalized text, behind a blank that is not there (transformers #23833)
        added = self.core.get_added_tokens_decoder().values()
        self.core.add_special_tokens([
            tokenizers.AddedToken(token.content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
                                  normalized=False) for token in added if token.special and token.normalized])
        config = {}
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / file).exists():
                config |= read_json(folder / file)
        named = {key: value.get("content") if isinstance(value, dict) else value
                 for key, value in config.items() if re.fullmatch("(bos|eos|unk|sep|pad|cls|mask)_token", key)}
        self.eos = self.core.token_to_id(named.get("eos_token") or "")
        end_of_turn = "<|im_end|>" if self.core.token_to_id("<|im_end|>") is not None else named.get("eos_token")
        self.stop = {self.eos, self.core.token_to_id(end_of_turn or "")} - {None}
        encoded = self.core.encode("a")  # what the post-processor writes around a text
        added = np.array(encoded.special_tokens_mask, bool)
        first, last = (added.argmin(), len(added) - added[::-1].argmin()) if not added.all() else (len(added), len(added))
        self.before, self.after = encoded.ids[:first], encoded.ids[last:]
        bos = self.core.token_to_id(named.get("bos_token") or "")
        if config.get("add_bos_token") and bos is not None and not self.before:  # transformers adds it, tokenizer.json does not
            self.before = [bos]
        if self.eos is not None and self.after[-1:] != [self.eos]:
            self.after.append(self.eos)

        tokens = self.core.get_added_tokens_decoder()
        self.added = tuple(token.content for token in tokens.values())
        special = [token.content for token in tokens.values() if token.special]
        self.special = np.array(sorted({*(number for number, token in tokens.items() if token.special), *self.stop}), np.int32)
        # a name of the same length for each special token: spans of characters stay what they are
        if len(special) > len(RESERVED) - 2:
            raise ValueError(f"{folder / 'tokenizer.json'}: more than {len(RESERVED) - 2:,} special tokens")
        self.names = {token: chr(character) * len(token) for token, character in zip(special, RESERVED[2:])}
        self.tokens = {name: token for token, name in self.names.items()}
        self.spelled, self.renamed = any_of(self.names), any_of(self.tokens)

        template, self.template_from = config.get("chat_template"), "tokenizer_config.json"
        if isinstance(template, list):
            template = {one.get("name"): one.get("template") for one in template}
        if (folder / "chat_template.jinja").exists():
            template, self.template_from = read_text(folder / "chat_template.jinja"), "chat_template.jinja"
        if template_file:
            template, self.template_from = read_text(Path(template_file)), str(template_file)
        named_templates = template if isinstance(template, dict) else {"default": template}
        for file in () if template_file else sorted((folder / "additional_chat_templates").glob("*.jinja")):
            named_templates.setdefault(file.stem, read_text(file))
        template, with_tools = named_templates.get("default"), named_templates.get("tool_use")
        if not template:
            bos = self.core.decode(self.before, skip_special_tokens=False)
            named |= {"bos": bos, "end_of_turn": end_of_turn or ""}
            template, with_tools, self.template_from = CHATML, None, "ChatML (the model has no template)"
        try:
            self.template = compile_template(template)
            self.template_with_tools = compile_template(with_tools) if with_tools else self.template
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template ({self.template_from}), line {error.lineno}: {error.message}") from error
        self.variables = {key: value for key, value in named.items() if value is not None}
        self.fingerprint = hashlib.sha256(json.dumps([
            (folder / "tokenizer.json").read_text("utf-8"), self.before, self.variables, template, with_tools
        ]).encode()).hexdigest()

    def render(self, messages, tools=None, generation_prompt=False):
        """Messages -> (text, [(start, stop) of each generation block]). ValueError where the template objects."""
        text, spans = self.run_template(*self.rename([messages, tools]), generation_prompt)
        return self.restore(text), spans

    def rename(self, value):
        """Messages and tools with other names for the special tokens that they spell."""
        def rename(text):
            if MARKS.search(text):
                raise BadRow("characters", f"the characters U+{RESERVED[0]:X} to U+{RESERVED[-1]:X} in a message mark "
                             "spans here and cannot be trained on")
            return self.spelled.sub(lambda match: self.names[match[0]], text)

        return map_strings(rename, value)

    def restore(self, text):
        """A rendered text with the renamed special tokens as they were spelled."""
        text = self.renamed.sub(lambda match: self.tokens[match[0]], text)
        if MARKS.search(text):
            raise BadRow("special tokens", f"chat template ({self.template_from}): takes a special token apart that a message "
                         "spells")
        return text

    def run_template(self, messages, tools, generation_prompt=False):
        """render() of messages whose special tokens are renamed."""
        template, pieces, size = self.template_with_tools if tools else self.template, [], 0
        try:
            for piece in template.generate(messages=messages, add_generation_prompt=generation_prompt, tools=tools,
                                           documents=None, **self.variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED:
                    raise jinja2.TemplateError(f"wrote more than {MAX_RENDERED} characters for one conversation")
        except Exception as error:  # foreign code, it can raise anything: 1 // 0, range(10**9), 'x' * 10**18
            raise BadRow("template", f"chat template ({self.template_from}): {str(error) or type(error).__name__}") from error
        text, spans = "", []
        for part in "".join(pieces).split(OPEN):
            said, closed, rest = part.partition(CLOSE)
            spans += [(len(text), len(text) + len(said))] * bool(closed)
            text += said + rest
        return text, spans

    def render_calls(self, messages, tools):
        """-> (messages, text, spans) with the arguments of tool calls in the form that the template wants, objects or
        strings of JSON. The other one it would escape a second time, or write as Python does."""
        attempts, refused = [messages], None
        if any(True for _ in arguments_of(messages)):
            attempts += [with_arguments(messages, as_text) for as_text in (False, True)]
        if any("content" not in message for message in messages):  # some templates ask whether it is none
            attempts += [[{"content": None, **message} for message in attempt] for attempt in attempts]
        for attempt in attempts:
            try:
                text, spans = self.run_template(attempt, tools)
            except BadRow as error:
                refused = refused or error
                continue
            if not is_garbled(attempt, text):
                return attempt, text, spans
        raise refused or BadRow("tool calls", f"chat template ({self.template_from}): writes the arguments of tool calls "
                                "neither from objects nor from strings of JSON")

    def conversation(self, messages, tools=None, trained=None):
        """Messages -> (Source, counts). Trained on is what the assistant says, its end of turn included.

        A template without generation blocks is rendered up to each assistant turn and past it; a turn counts only if
        both are true prefixes of the whole text. trained: a flag per message, False for turns that are context alone, as
        are those of weight 0.
        BadRow where no turn can be told from the text around it.
        """
        given, tools = self.rename([messages, tools])
        messages, text, spans = self.render_calls(given, tools)
        calls = [call.get("function", call) for message in messages for call in message.get("tool_calls", ())]
        if any(str(call.get("name", "")) not in text and as_json(call.get("arguments")) not in text for call in calls):
            raise BadRow("tool calls", f"chat template ({self.template_from}): leaves out the calls of tools")
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [i for i in turns if (trained is None or trained[i]) and messages[i].get("weight") != 0]  # as OpenAI has it
        if spans and wanted != turns:
            if len(spans) != len(turns):
                raise BadRow("template", f"chat template ({self.template_from}): {len(spans)} generation blocks for "
                             f"{len(turns)} assistant turns: cannot tell which of them are trained on")
            spans = [span for i, span in zip(turns, spans) if i in wanted]
        elif not spans:
            spans = list(self.spans_by_prefix(messages, tools, text, wanted))
            if wanted and not spans:
                raise BadRow("template", f"chat template ({self.template_from}): no assistant turn can be told from the text "
                             "around it; put {% generation %} ... {% endgeneration %} around what the assistant says "
                             "(--chat_template)")
        source = self.source(text, spans)
        said = [str(tool.get("function", tool).get("name", "")) for tool in tools or ()]
        said += [str(message["reasoning_content"]).strip() for message in messages if "reasoning_content" in message]
        count = Counter(
            conversations=1, turns=len(wanted), untold=max(0, len(wanted) - len(spans)), spelled=source.renamed is not None,
            unsaid=any(part not in text for part in said), converted=messages is not given,
        )
        return source, count

    def source(self, text, spans):
        """What run_template() has written, as a Source."""
        if not MARKS.search(text):
            return Source(text, spans, True)
        other = self.names | self.tokens
        return Source(self.restore(text), spans, True, any_of(other).sub(lambda match: other[match[0]], text))

    def spans_by_prefix(self, messages, tools, text, turns):
        for i in turns:
            try:
                before, after = self.run_template(messages[:i], tools, True)[0], self.run_template(messages[: i + 1], tools)[0]
            except BadRow:  # a template may want a question first
                continue
            if after.startswith(before) and text.startswith(after):
                # a newline after the end-of-turn token is the template's, the model never says it
                stripped = after.rstrip()
                yield len(before), len(stripped if stripped.endswith(self.added) else after)

    @functools.cached_property
    def plain(self):
        """The tokenizer with other names for its special tokens: what spells one of them is text to it."""
        layout = json.loads(self.core.to_str())
        for token in layout["added_tokens"]:
            token["content"] = self.names.get(token["content"], token["content"])
        model = layout["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self.names.get(piece, piece): number for piece, number in model["vocab"].items()}
        else:
            model["vocab"] = [[self.names.get(piece, piece), score] for piece, score in model["vocab"]]
        if model.get("unk_token"):
            model["unk_token"] = self.names.get(model["unk_token"], model["unk_token"])
        try:
            plain = tokenizers.Tokenizer.from_str(json.dumps(layout))
        except Exception as error:  # the library raises nothing narrower
            raise BadRow("special tokens", f"a message spells a special token; this tokenizer cannot: {error}") from error
        wrong = [token for token, name in self.names.items() if plain.token_to_id(name) != self.core.token_to_id(token)]
        if wrong:
            raise BadRow("special tokens", f"a message spells a special token; this tokenizer cannot take {wrong[:3]} as text")
        return plain

    def check(self, source):
        """BadRow where the template's special tokens do not all come out as such beside those that are text."""
        if source.renamed is not None:
            ids = self.plain.encode(source.renamed, add_special_tokens=False).ids
            if np.isin(ids, self.special).sum() < len(self.renamed.findall(source.renamed)):
                raise BadRow("special tokens", "a message spells a special token; this tokenizer then takes others for text")

    def encode(self, sources):
        """Sources -> an iterator of (ids [n] int32, supervised [n] bool)."""
        encodings = {}
        for spans, encode in ((True, self.core.encode_batch), (False, self.core.encode_batch_fast)):  # fast: no offsets
            chosen = [i for i, source in enumerate(sources) if (source.spans is not None) == spans
                      and source.renamed is None and (spans or len(source.text) <= PIECE)]
            encodings |= zip(chosen, encode([sources[i].text for i in chosen], add_special_tokens=False))
        for i, source in enumerate(sources):
            if source.renamed is not None:
                encodings[i] = self.plain.encode(source.renamed, add_special_tokens=False)
            if i in encodings:
                ids = np.array(encodings[i].ids, np.int32)
            else:
                text = (source.text[start : start + PIECE] for start in range(0, len(source.text), PIECE))
                ids = np.concatenate([self.encode_piece(piece) for piece in self.cut(text)])
            mask = np.ones(len(ids), bool) if source.spans is None else tokens_in(encodings.pop(i), source.spans, self.special)
            if not source.chat:
                before, after = self.missing_ends(ids, ids)
                if self.eos is not None and source.text.rstrip().endswith(self.core.id_to_token(self.eos)):
                    after = after[:0]  # the text says itself where it ends
                ids = np.concatenate([before, ids, after])
                mask = np.concatenate([np.zeros(len(before), bool), mask, np.ones(len(after), bool)])
            yield ids, mask

    def missing_ends(self, first, last):
        """What the tokenizer writes before and behind a text, BOS and EOS, and these first and last ids of it lack."""
        before = [] if self.before == first[: len(self.before)].tolist() else self.before
        after = [] if self.after == last[max(0, len(last) - len(self.after)) :].tolist() else self.after
        return np.array(before, np.int32), np.array(after, np.int32)

    def encode_piece(self, text):
        return np.array(self.core.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)

    def cut(self, blocks):
        """Blocks of a long text -> pieces of it, 0.5 to 1 million characters, that have the whole text's tokens: cut behind
        a newline where what stands around it has the same tokens together and apart. Some tokenizers have no such places
        (Llama 2's writes a blank before every text): all in one piece, with about 100 bytes of memory a character."""
        def same(left, right):
            return self.encode_piece(left + right).tolist() == [*self.encode_piece(left), *self.encode_piece(right)]

        def place(text):
            stop = len(text) - AROUND
            while at := text.rfind("\n", PIECE // 2, stop) + 1:
                if not text[at].isspace() and same(text[at - AROUND : at], text[at : at + AROUND]):
                    return at
                stop = at - 1

        text, has_places = "", same("a b\n", "c d")
        for block in blocks:
            text += block
            while has_places and len(text) > PIECE and (at := place(text)):
                yield text[:at]
                text = text[at:]
        if text:
            yield text

    def prompt(self, text, chat):
        """Token ids that ask for a continuation of a text, or for an answer to a user's message."""
        if not chat:
            return self.before + self.core.encode(text, add_special_tokens=False).ids
        text, _ = self.run_template(self.rename([{"role": "user", "content": text}]), None, generation_prompt=True)
        return next(self.encode([self.source(text, [])]))[0].tolist()


def tokens_in(encoded, spans, special):
    """[n] bool: the tokens that overlap a span of characters, but for a special one (ids) that begins before it: that has
    swallowed blanks."""
    mask = np.zeros(len(encoded), bool)
    for start, stop in spans:
        # a character may belong to no token (a blank that the offsets leave out) and to several (the bytes of an emoji)
        first = next((t for at in range(start, stop) if (t := encoded.char_to_token(at)) is not None), None)
        if first is not None:
            last = next(t for at in range(stop - 1, start - 1, -1) if (t := encoded.char_to_token(at)) is not None)
            while last + 1 < len(encoded) and encoded.token_to_chars(last + 1)[0] < stop:
                last += 1
            first += encoded.token_to_chars(first)[0] < start and encoded.ids[first] in special
            mask[first : last + 1] = True
    return mask


# ---------------------------------------------------------------- rows

FORMATS = {  # name: the keys that a row of it has
    "messages": ("messages",),
    "ShareGPT": ("conversations",),
    "prompt and completion": ("prompt", "completion"),
    "Alpaca": ("instruction", "output"),
    "text": ("text",),
}
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
REASONING = ("reasoning_content", "thinking", "reasoning")  # what templates and data call it


def recognise(row):
    """The format of a row, by its keys. BadRow if it has none."""
    found = next((name for name, keys in FORMATS.items() if all(key in row for key in keys)), None)
    if found is None:
        known = ", ".join(" + ".join(f"'{key}'" for key in keys) for keys in FORMATS.values())
        raise BadRow("format", f"expected one of {known}, got {list(row)[:9]}")
    return found


def parse_json(raw):
    """Bytes -> a JSON object, or BadRow."""
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRow("JSON", f"not valid JSON in UTF-8: {error}") from error
    if not isinstance(row, dict):
        raise BadRow("JSON", f"expected a JSON object, got {type(row).__name__}")
    return row


def parse_row(raw, kind, tokenizer):
    """Bytes of a row of the format `kind` -> (Source, counts), or BadRow."""
    row, keys = parse_json(raw), " and ".join(map(repr, FORMATS[kind]))
    if not all(key in row for key in FORMATS[kind]):
        raise BadRow("format", f"expected {keys} as in the file's first row, got {list(row)[:9]}")
    parts = [row[key] for key in FORMATS[kind]]
    try:
        if kind == "text" or (kind == "prompt and completion" and not isinstance(parts[0], list)):
            if not all(isinstance(part, str) for part in parts):
                raise BadRow("format", f"{keys}: expected strings" + " or lists of messages" * len(parts[1:])
                             + f", got {' and '.join(type(part).__name__ for part in parts)}")
            text = "".join(parts)
            source, count = Source(text, [(len(parts[0]), len(text))] if parts[1:] else None), Counter()
        else:
            source, count = tokenizer.conversation(*READERS[kind](row))
        source.text.encode()  # JSON can spell half a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError as error:
        raise BadRow("characters", str(error)) from error
    except RecursionError as error:
        raise BadRow("JSON", f"too many brackets in each other: {error}") from error
    return source, count


def messages_of(row):
    return check_messages(row["messages"], "messages"), tools_of(row)


def sharegpt_of(row):
    turns = row["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow("format", "'conversations' must be a list of objects with 'from' and 'value'")
    messages = [turn if "role" in turn else sharegpt_message(turn) for turn in turns]
    if isinstance(row.get("system"), str) and row["system"] and not (messages and messages[0].get("role") == "system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return check_messages(messages, "conversations"), tools_of(row)


def sharegpt_message(turn):
    said_by, value = turn.get("from"), turn.get("value")
    rest = {key: turn[key] for key in turn if key not in ("from", "value")}
    if said_by != "function_call":
        return {**rest, "role": SHAREGPT_ROLES.get(str(said_by), said_by), "content": value}
    try:
        calls = json.loads(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow("tool calls", f"'function_call' must hold JSON: {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    return {**rest, "role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def alpaca_of(row):
    for key in ("instruction", "input", "output", "system"):
        if not isinstance(row.get(key) or "", str):
            raise BadRow("format", f"{key!r} must be a string, got {type(row[key]).__name__}")
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise BadRow("format", "'history' must be a list of pairs, question and answer")
    for turn in history:
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    question = f"{row['instruction']}\n{row['input']}" if row.get("input") else row["instruction"]
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    return check_messages(messages, "history"), None


def completion_of(row):
    prompt, completion = (check_messages(row[key], key) for key in ("prompt", "completion"))
    return prompt + completion, tools_of(row), [False] * len(prompt) + [True] * len(completion)


READERS = {"messages": messages_of, "ShareGPT": sharegpt_of, "Alpaca": alpaca_of, "prompt and completion": completion_of}


def check_messages(messages, key):
    """Messages as templates take them, as transformers hands them over: without None, reasoning under all its names, lists
    of text parts joined. BadRow where there is no such list, a role is unknown, or content is not text."""
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise BadRow("format", f"{key!r} must be a list of objects with strings for 'role' and 'content'")
    checked = []
    for message in messages:
        message = {name: value for name, value in message.items() if value is not None}
        role, content = message.get("role"), message.get("content")
        if message.get("weight") not in (None, 0, 1):
            raise BadRow("weight", f"'weight' must be 0 or 1, got {message['weight']!r}")
        if role not in ROLES:
            raise BadRow("roles", f"unknown role {role!r}; expected {', '.join(ROLES)}")
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            message["content"] = content = "".join(part["text"] for part in content)
        calls = message.get("tool_calls", [])
        fine = isinstance(calls, list) and all(isinstance(c, dict) and isinstance(c.get("function", c), dict) for c in calls)
        if not fine:
            raise BadRow("tool calls", "'tool_calls' must be a list of objects with a 'function'")
        if not isinstance(content, str) and (content is not None or not calls):
            raise BadRow("content", f"'content' of a message of {role!r} must be text, got "
                         + (f"{sorted({str(p.get('type')) for p in content if isinstance(p, dict)})} parts"
                            if isinstance(content, list) else type(content).__name__))
        reasoning = next((message[name] for name in REASONING if name in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        checked.append(message)
    return checked


def tools_of(row):
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except (ValueError, RecursionError) as error:
            raise BadRow("tools", f"'tools' is not valid JSON: {error}") from error
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise BadRow("tools", "'tools' must be a list of JSON schemas")
    return tools or None


def as_json(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def arguments_of(messages):
    calls = (call.get("function", call) for message in messages for call in message.get("tool_calls", ()))
    return (call["arguments"] for call in calls if "arguments" in call)


def with_arguments(messages, as_text):
    """Messages with the arguments of all tool calls as strings of JSON, or as the objects that such strings hold."""
    def other(arguments):
        if as_text and isinstance(arguments, dict):
            return json.dumps(arguments, ensure_ascii=False)
        with contextlib.suppress(ValueError):
            return arguments if as_text or not isinstance(arguments, str) else json.loads(arguments)
        return arguments

    def change(call):
        inner = call.get("function", call)
        inner = {**inner, "arguments": other(inner["arguments"])} if "arguments" in inner else inner
        return {**call, "function": inner} if "function" in call else inner

    return [{**message, "tool_calls": [change(call) for call in message["tool_calls"]]} if "tool_calls" in message else message
            for message in messages]


def is_garbled(messages, text):
    """Whether a template has escaped an argument that is a string of JSON, or written an object in Python's spelling: such a
    thing stands in the text more often than in what the messages say themselves."""
    said = [message["content"] for message in messages if isinstance(message.get("content"), str)]
    for arguments in arguments_of(messages):
        forms = {str(arguments)} - {json.dumps(arguments, ensure_ascii=False)} if isinstance(arguments, dict) else ()
        if isinstance(arguments, str) and arguments.lstrip()[:1] == "{":
            forms = {json.dumps(arguments, ensure_ascii=ascii_only) for ascii_only in (True, False)}
        if any(text.count(form) > sum(content.count(form) for content in said) for form in forms):
            return True
    return False


# ---------------------------------------------------------------- files

PIECE, AROUND = 1_000_000, 200  # characters of a long text that are tokenized at once; those compared where it is cut
MAX_ROW = 2**26  # bytes
MAX_BAD = 0.01  # share of a file's rows
CONVERT = "python -c \"import pandas; pandas.read_{}({!r}).to_json({!r}, orient='records', lines=True)\""
READABLE = "a .jsonl, .json or .txt file (or .gz of it), stdlib:docs or stdlib:code"


def split_weight(spec):
    """"a.jsonl:2" -> ("a.jsonl", 2.0)."""
    name, colon, weight = spec.rpartition(":")
    if not colon or Path(spec).exists() or not re.fullmatch(r"[\d.eE+-]+", weight):
        return spec, 1.0
    try:
        weight = float(weight)
    except ValueError:
        weight = 0.0
    if not 0 < weight < 1e6:
        raise ValueError(f"{spec}: how often a file is used must be a positive number")
    return name, weight


def check_file(name):
    """Path of a data file. ValueError where it is missing, or of a format that is not read."""
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{name}: {'a folder' if path.is_dir() else 'no such file'}; expected {READABLE}")
    kind = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    if kind not in ("jsonl", "json", "txt"):
        reader = {"tsv": "table", "arrow": "feather", "xlsx": "excel"}.get(kind, kind)
        known = kind in ("parquet", "csv", "tsv", "arrow", "feather", "xlsx")
        hint = "; convert it with: " + CONVERT.format(reader, name, f"{name.removesuffix('.gz').rpartition('.')[0]}.jsonl")
        raise ValueError(f"{name}: expected {READABLE}" + hint * known)
    return path, kind


def read_text(path):
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


def read_blocks(path):
    """Yields the bytes of a file, a .gz unpacked, a megabyte at a time."""
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb") as file:
            block = file.read(2**20)
            if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise ValueError(f"{path}: UTF-16, expected UTF-8: convert it with iconv -f UTF-16 -t UTF-8")
            while block:
                yield block
                block = file.read(2**20)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file: {error}") from error


def read_characters(path):
    """The same as text, without a byte order mark."""
    decoder, n_bytes, first = codecs.getincrementaldecoder("utf-8")(), 0, True
    for block in itertools.chain(read_blocks(path), [b""]):
        held_back = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            at = n_bytes - held_back + error.start
            raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {at}") from error
        yield text.removeprefix("\ufeff") if first else text
        n_bytes, first = n_bytes + len(block), False


def read_rows(path):
    """Yields (line, bytes) of each row: of each line that is not blank, or of each element of a JSON array."""
    blocks = read_blocks(path)
    first = next(blocks, b"").removeprefix(codecs.BOM_UTF8)
    if first.lstrip()[:1] == b"[":
        yield from read_array(path)
        return
    line, rest = 1, b""
    for block in itertools.chain([first], blocks):
        *rows, rest = (rest + block).split(b"\n")
        yield from ((number, raw) for number, raw in enumerate(rows, line) if raw.strip())
        line += len(rows)
        if len(rest) > MAX_ROW:
            raise ValueError(f"{path}:{line}: a line of more than {MAX_ROW >> 20} MiB")
    if rest.strip():
        yield line, rest


def read_array(path):
    """read_rows() of a file that is one JSON array, without ever holding all of it."""
    scan, blank = json.JSONDecoder().raw_decode, re.compile(r"[ \t\r\n]*")
    blocks, text, at, line = read_characters(path), "", 0, 1

    def next_character():
        """Moves to what is not blank -> that character, or "" at the end of the file."""
        nonlocal text, at, line
        while True:
            start, at = at, blank.match(text, at).end()
            line += text.count("\n", start, at)
            if at < len(text):
                return text[at]
            text, at = next(blocks, None), 0
            if text is None:
                text = ""
                return ""

    def wrong(reason):
        reason = reason if at < len(text) else "no ']' at its end"
        return ValueError(f"{path}:{line}: the array is not valid JSON: {reason}")

    next_character()
    at, rows = at + 1, 0
    while (character := next_character()) != "]":
        if rows and character != ",":
            raise wrong("expected ',' or ']' behind an element")
        at += rows > 0
        next_character()
        stop = None
        while stop is None:
            try:
                stop, error = scan(text, at)[1], None
            except (json.JSONDecodeError, RecursionError) as caught:
                error = caught
            if error or (stop == len(text) and text[at] not in '{["'):  # it may go on in the next block, a number too
                text, at = text[at:], 0
                more = "".join(itertools.islice(blocks, 1 + (len(text) >> 20)))  # as much again: rows may be long
                if not more and stop is None:
                    raise wrong(error)
                if len(text) > MAX_ROW:
                    raise wrong(f"{error}, or an element of more than {MAX_ROW >> 20} MiB")
                text, stop = text + more, None if more else len(text)
        yield line, text[at:stop].encode(errors="surrogatepass")
        line += text.count("\n", at, stop)
        at, rows = stop, rows + 1
    at += 1
    if next_character():
        raise wrong("something stands behind its end")


BUILT_IN = "stdlib:code", "stdlib:docs"
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings", "pydoc_data"}


def stdlib_modules():
    """Yields (module path, source) of the installed Python's standard library, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED & set(path.relative_to(root).parts):
            try:
                yield str(path.relative_to(root)), path.read_text("utf-8")
            except UnicodeDecodeError:  # a handful declare another encoding
                continue


def stdlib_rows(spec, held_out):
    """Yields (number, JSON) of the rows of a built-in set. One in twenty is kept from training for --eval_data."""
    number = 0
    for name, text in stdlib_modules():
        for i, row in enumerate([{"text": text}] if spec == "stdlib:code" else stdlib_questions(name, text)):
            if (zlib.crc32(f"{name}/{i}".encode()) % 20 == 0) == held_out:
                number += 1
                yield number, json.dumps(row).encode()


def stdlib_questions(name, text):
    """Yields a conversation per documented public function: its signature asked, its docstring's summary answered."""
    module = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    scopes = [(module, ast.parse(text))]
    for prefix, scope in scopes:
        for node in scope.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if isinstance(node, ast.ClassDef):
                scopes.append((f"{prefix}.{node.name}", node))
            elif doc := ast.get_docstring(node):
                question = f"What does `{prefix}.{node.name}({ast.unparse(node.args)})` do?"
                answer = inspect.cleandoc(doc).split("\n\n")[0]
                yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


# ---------------------------------------------------------------- tokenizing

ARRAYS = {"tokens": np.int32, "supervised": bool, "lengths": np.int64, "lines": np.int64}  # the last two per document
WORTH = 2**24  # bytes of a file for which one more process, three seconds of start, pays


def cached(spec, held_out, tokenizer, cache, tick, progress):
    """Folder of a file's documents in the cache, made there if it is missing or damaged. Two processes that want the same
    wait for each other where the file system has locks, and else both make it."""
    path, kind = (None, spec) if spec in BUILT_IN else check_file(spec)

    def state():  # of the file, which must not change between its hash and its tokens
        found = path and path.stat()
        return found and (found.st_size, found.st_mtime_ns, found.st_ino)

    before, digest = state(), hashlib.sha256(Path(__file__).read_bytes())
    if path is None:
        for name, text in stdlib_modules():
            digest.update(f"{name}\0{text}\0".encode())
    else:
        with open(path, "rb") as file:
            while block := file.read(2**22):
                digest.update(block)
                tick()
    digest.update(json.dumps([kind, held_out, tokenizer.fingerprint, tokenizers.__version__, jinja2.__version__]).encode())
    name = digest.hexdigest()[:32]
    folder = Path(cache, name)
    if is_whole(folder, tick):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.with_suffix(".lock"), "w")  # noqa: SIM115
    except OSError as error:
        raise ValueError(f"{cache}: {error.strerror}: name a folder to write to by --data_cache") from error
    with lock:
        locked = lock_file(lock, tick)
        if is_whole(folder, tick):  # another process has made it meanwhile
            return folder
        for left in folder.parent.glob(f"{name}.*.part") if locked else ():  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        part = Path(tempfile.mkdtemp(".part", f"{name}.", folder.parent))
        try:
            report = tokenize(spec, held_out, tokenizer, part, tick, progress)
            if state() != before:
                raise ValueError(f"{spec}: has changed while it was read: start again when it is complete")
            sealed = {"report": report, "crc": zlib.crc32(json.dumps(report).encode())}
            (part / "report.json").write_text(json.dumps(sealed))
            part.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                part.rename(folder)
            except OSError:
                if not is_whole(folder, tick):  # else another process was faster, on a file system without locks
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def lock_file(file, tick):
    """Waits until no other process holds the lock. -> False where the file system knows no locks."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            tick()
            time.sleep(0.1)
        except OSError:
            return False


def read_report(folder):
    sealed = json.loads((folder / "report.json").read_bytes())
    if zlib.crc32(json.dumps(sealed["report"]).encode()) != sealed["crc"]:
        raise ValueError(f"{folder / 'report.json'}: damaged")
    return sealed["report"]


def is_whole(folder, tick):
    """Whether a folder of the cache holds what its report says, to the byte."""
    try:
        crc = read_report(folder)["crc"]
        return all(crc_of(folder / name, tick) == crc[name] for name in ARRAYS)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def crc_of(path, tick=lambda: None):
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(2**22):
            crc = zlib.crc32(block, crc)
            tick()
    return crc


def tokenize(spec, held_out, tokenizer, folder, tick, progress):
    """Writes a file's documents into a folder, an array a file -> the report: counts, and bad rows by what is wrong.

    tick() is called all the time. ValueError where the file cannot be read. Memory stays flat, some megabytes for each
    process, unless the tokenizer has to take a .txt in one piece (cut).
    """
    path, kind = (None, None) if spec in BUILT_IN else check_file(spec)
    n_bytes = path.stat().st_size if path else 0
    report, bad, crc = Counter(), {}, dict.fromkeys(ARRAYS, 0)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / name, "wb")) for name in ARRAYS}
        bar = stack.enter_context(tqdm(desc=f"tokenizing {spec}", unit="B", unit_scale=True, disable=not progress, leave=False))
        run = stack.enter_context(workers(n_bytes, tokenizer))

        def write(**arrays):
            for name, array in arrays.items():
                array = np.ascontiguousarray(array, ARRAYS[name])
                files[name].write(array)
                crc[name] = zlib.crc32(array, crc[name])
                report[name] += array.size
                if name == "tokens":
                    report["largest_id"] = max(report["largest_id"], int(array.max(initial=0)))

        def step(size):
            bar.update(size)
            tick()

        if kind == "txt":
            form, last = "text", np.zeros(0, np.int32)
            for size, ids in run(encode_text, tokenizer.cut(read_characters(path))):
                before, _ = tokenizer.missing_ends(ids, ids)
                ids = ids if report["tokens"] else np.concatenate([before, ids])
                write(tokens=ids, supervised=np.ones(len(ids), bool))
                last = np.concatenate([last, ids])[-9:]
                step(size)
            if not report["tokens"]:
                raise ValueError(f"{spec}: nothing to train on, the file is empty")
            _, after = tokenizer.missing_ends(last, last)
            write(tokens=after, supervised=np.ones(len(after), bool))
            write(lengths=[report["tokens"]], lines=[1])
            report["rows"] = 1
        else:
            batches = batched(read_rows(path) if path else stdlib_rows(spec, held_out))
            first = next(batches, None)
            if first is None:
                raise ValueError(f"{spec}: nothing to train on, the file has no rows")
            form = form_of(first, spec)
            for size, arrays, count, wrong in run(functools.partial(encode_rows, form), itertools.chain([first], batches)):
                write(**arrays)
                report.update(count)
                for what, line, message in wrong:
                    bad.setdefault(what, [0, []])[0] += 1
                    bad[what][1] += [(line, message)] * (len(bad[what][1]) < 3)
                step(size)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    return {"format": form, **report, "bad": bad, "crc": crc}


def batched(rows):
    """(line, bytes) of rows -> lists of about a megabyte."""
    batch, size = [], 0
    for line, raw in rows:
        batch.append((line, raw))
        size += len(raw)
        if size >= 2**20:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def form_of(rows, spec):
    """The format of a file, by the first of its rows that has one. ValueError if none has."""
    first = None
    for line, raw in rows:
        try:
            return recognise(parse_json(raw))
        except BadRow as error:
            hint = "; expected a JSON object on each line, or one array of objects" * (error.args[0] == "JSON")
            first = first or f"{spec}:{line}: {error}{hint}"
    raise ValueError(first)


def encode_rows(form, tokenizer, rows):
    """(line, bytes) of rows -> (bytes, arrays of ARRAYS, counts, bad rows as (what is wrong, line, message))."""
    sources, lines, count, bad = [], [], Counter(rows=len(rows)), []
    for line, raw in rows:
        try:
            source, counted = parse_row(raw, form, tokenizer)
            tokenizer.check(source)
        except BadRow as error:
            bad.append((error.args[0], line, str(error)))
            continue
        sources.append(source)
        lines.append(line)
        count.update(counted)
    encoded = list(tokenizer.encode(sources))
    for source, (ids, mask) in zip(sources, encoded):
        if source.chat:  # the last trained token of a turn, or the one before a newline, should be special
            ends, special = np.flatnonzero(mask & ~np.append(mask[1:], False)), np.isin(ids, tokenizer.special)
            count["unended"] += int((~(special[ends] | special[ends - 1])).sum())
    arrays = {"tokens": np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in encoded)]),
              "supervised": np.concatenate([np.zeros(0, bool), *(mask for _, mask in encoded)]),
              "lengths": [len(ids) for ids, _ in encoded], "lines": lines}
    return sum(len(raw) for _, raw in rows), arrays, count, bad


def encode_text(tokenizer, text):
    return len(text), tokenizer.encode_piece(text)


def n_cores():
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@contextlib.contextmanager
def workers(n_bytes, tokenizer):
    """-> run(function, tasks), which yields function(tokenizer, task) of each in order, on all cores where that pays.

    The processes come from a fork server: they share none of this one's threads, sockets or GPU.
    """
    n = min(n_cores(), 16, n_bytes // WORTH)
    if n < 2:
        yield lambda function, tasks: (function(tokenizer, task) for task in tasks)
        return

    def run(function, tasks):
        waiting = deque()
        for task in tasks:
            waiting.append(pool.submit(in_worker, function, task))
            if len(waiting) > 2 * n:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    with ProcessPoolExecutor(n, multiprocessing.get_context("forkserver"), start_worker, tokenizer.made_of) as pool:
        try:
            yield run
        except BrokenProcessPool as error:
            raise OSError(f"a process that tokenizes was killed, perhaps for its memory: {error}") from error


worker = {}  # the tokenizer of such a process


def start_worker(*made_of):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(multiprocessing.parent_process().sentinel,), daemon=True).start()
    worker["tokenizer"] = Tokenizer(*made_of)


def end_with(sentinel):
    multiprocessing.connection.wait([sentinel])  # else a killed parent would leave its workers waiting for ever
    os._exit(1)


def in_worker(function, task):
    return function(worker["tokenizer"], task)


# ---------------------------------------------------------------- documents


@dataclass
class Documents:
    """What is trained on, as pieces of tokenized files. tokens and supervised: an array per file, mapped into memory
    (supervised None: every token). file, start, stop, n_targets, line: [n] int64, of each piece; a piece's first token is
    nobody's target. checksum: of the files' contents."""

    tokens: list
    supervised: list
    file: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    n_targets: np.ndarray
    line: np.ndarray
    checksum: int = 0

    def crc(self):
        """A checksum of what is trained on."""
        arrays = self.file, self.start, self.stop, self.n_targets
        return functools.reduce(lambda crc, array: zlib.crc32(array, crc), arrays, self.checksum)

    def piece(self, number):
        """(tokens [n] int32, supervised [n] bool) of a piece."""
        file, start, stop = int(self.file[number]), int(self.start[number]), int(self.stop[number])
        supervised = self.supervised[file]
        return self.tokens[file][start:stop], np.ones(stop - start, bool) if supervised is None else supervised[start:stop]


def open_documents(folders, specs, seq_len, train_on="targets", overflow=None, seed=0, vocab_size=1 << 31, min_supervised=0.0):
    """Folders of the cache -> (Documents, a dict of counts for each file).

    overflow: what becomes of documents of more than seq_len positions; None splits texts and drops the others. A weight
    in specs ("a.jsonl:2.5") takes all documents twice and half of them, chosen by seed, once more. ValueError where a
    file has too many bad rows or too few supervised tokens, or the tokenizer is another model's.
    """
    parts, counts, documents = [], [], Documents([], [], *[None] * 5)
    for number, (folder, spec) in enumerate(zip(folders, specs, strict=True)):
        report = read_report(Path(folder))
        name, weight = split_weight(spec)
        check_report(report, name, vocab_size)
        arrays = {key: np.memmap(Path(folder, key), kind, "r").view(np.ndarray) if report[key] else np.zeros(0, kind)
                  for key, kind in ARRAYS.items()}
        documents.tokens.append(arrays["tokens"])
        documents.supervised.append(arrays["supervised"] if train_on == "targets" else None)
        documents.checksum = zlib.crc32(json.dumps(report["crc"]).encode(), documents.checksum)

        policy = overflow or ("split" if report["format"] == "text" else "drop")
        document, start, stop = pieces_of(arrays["lengths"], seq_len, policy)
        n_targets = count_targets(documents.supervised[-1], start, stop)
        longest, n_long = int(arrays["lengths"].max(initial=1)) - 1, int((arrays["lengths"] - 1 > seq_len).sum())
        kept = np.flatnonzero(n_targets)
        n_tokens, n_trained = int((stop - start - 1)[kept].sum()), int(n_targets.sum())
        n_kept = len(np.unique(document[kept]))
        n_untrained = len(np.unique(document)) - n_kept
        counts.append({**report, "name": name, "weight": weight, "policy": policy, "long": n_long, "longest": longest,
                       "untrained": n_untrained, "kept": n_kept, "n_tokens": n_tokens, "n_trained": n_trained})
        if not n_trained:
            raise ValueError(f"{name}: nothing to train on: {report['rows']} rows read, {n_long} longer than --seq_len "
                             f"{seq_len} (the longest has {longest} tokens), {n_untrained} without a supervised token")
        if n_trained < min_supervised * n_tokens:
            raise ValueError(f"{name}: only {n_trained:,} of {n_tokens:,} tokens ({n_trained / n_tokens:.2%}) are trained on; "
                             "look at them with --inspect 3, and if that is right, lower --min_supervised")
        n_some = max(round(len(kept) * (weight % 1)), weight < 1)
        some = np.sort(np.random.default_rng([seed, number]).permutation(kept)[:n_some])
        chosen = np.concatenate([*[kept] * int(weight), some])
        columns = np.full(len(start), number), start, stop, n_targets, arrays["lines"][document]
        parts.append([column[chosen] for column in columns])
    columns = (np.concatenate(column) for column in zip(*parts))
    documents.file, documents.start, documents.stop, documents.n_targets, documents.line = columns
    return documents, counts


def pieces_of(lengths, seq_len, policy):
    """Numbers of tokens of documents -> for each piece that is used [n] its document, first token and the one behind its
    last. A piece fills at most seq_len positions; the last token of one is the first of the next."""
    ends, positions = np.cumsum(lengths), lengths - 1
    n_pieces = np.ones(len(lengths), np.int64)
    if policy == "split":
        n_pieces = np.maximum(-(-positions // seq_len), 1)
    elif policy == "drop":
        n_pieces[positions > seq_len] = 0
    document = np.repeat(np.arange(len(lengths)), n_pieces)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(n_pieces) - n_pieces, n_pieces)
    start = (ends - lengths)[document] + nth * seq_len
    return document, start, np.minimum(start + seq_len + 1, ends[document])


def check_report(report, name, vocab_size):
    """ValueError for a file with too many bad rows, or with tokens of another model."""
    n_bad, n = sum(n for n, _ in report["bad"].values()), report["rows"]
    if n_bad > MAX_BAD * n:
        raise ValueError("\n".join([f"{name}: {n_bad:,} of {n:,} rows cannot be trained on, the other {n - n_bad:,} can (up to "
                                    f"{MAX_BAD:.0%} would be left out):", *bad_rows(report, name)]))
    if report["largest_id"] >= vocab_size:
        raise ValueError(f"{name}: token id {report['largest_id']} is beyond the model's {vocab_size} embeddings: this "
                         "tokenizer belongs to another model")


def bad_rows(report, name):
    """Lines that say what is wrong with the bad rows of a file, the first three of each kind."""
    for what, (n, examples) in report["bad"].items():
        yield from (f"  {name}:{line}: {message}" for line, message in examples)
        if n > len(examples):
            yield f"  and {n - len(examples):,} more ({what})"


def count_targets(supervised, start, stop):
    """[n] int64: the supervised tokens of each piece but its first. In blocks: a cumulative sum of all would be 8 bytes a
    token."""
    if supervised is None:
        return np.maximum(stop - start - 1, 0)
    counted, i = np.zeros(len(start), np.int64), 0
    while i < len(start):
        j = max(i + 1, int(np.searchsorted(start, start[i] + 2**22)))
        base, end = int(start[i]), int(stop[i:j].max())
        sums = np.concatenate([[0], np.cumsum(supervised[base:end], dtype=np.int64)])
        counted[i:j] = sums[stop[i:j] - base] - sums[np.minimum(start[i:j] + 1, stop[i:j]) - base]
        i = j
    return counted


# ---------------------------------------------------------------- packing and loading


def pack(lengths, seq_len):
    """Best-fit decreasing: lengths of documents -> rows, each an array of document numbers that fit into seq_len."""
    order = np.argsort(-lengths, kind="stable")
    row_of, n_rows = np.empty(len(order), np.int64), 0
    rooms, rows_with = [], {}  # positions left, sorted; those rows, the first one first
    for at, length in enumerate(lengths[order].tolist()):
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            row, left = n_rows, seq_len - length
            n_rows += 1
        else:
            room = rooms[place]
            row, left = heapq.heappop(rows_with[room]), room - length
            if not rows_with[room]:
                del rooms[place]
        if not rows_with.setdefault(left, []):
            bisect.insort(rooms, left)
        heapq.heappush(rows_with[left], row)
        row_of[at] = row
    by_row = np.argsort(row_of, kind="stable")
    return np.split(order[by_row], np.flatnonzero(np.diff(row_of[by_row])) + 1)


@dataclass
class Batch:
    """A micro-batch of one rank. tokens, targets (IGNORE where untrained), positions: [B, T] int64. keep_S: flat
    indices of the targets. spans: (start, stop) of each document in the flattened tokens, on the host, or model.Packed.
    With n_pieces above 1 the grids are [1, N / n_pieces], one of the pieces of all N tokens, and spans are of all."""

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    keep_S: torch.Tensor
    spans: list | Packed
    n_pieces: int = 1

    def each(self, move, spans):
        if isinstance(spans, Packed):
            spans = spans._replace(bounds=move(spans.bounds))
        return Batch(*(move(getattr(self, field.name)) for field in fields(self)[:4]), spans, self.n_pieces)

    def pin(self):
        """For a GPU: in pinned memory, from where a copy runs beside everything else; unequal documents packed."""
        lengths, n_tokens = {stop - start for start, stop in self.spans}, self.tokens.numel() * self.n_pieces
        whole = len(lengths) == 1 and lengths.pop() * len(self.spans) == n_tokens
        return self.each(torch.Tensor.pin_memory, self.spans if whole else pack_spans(self.spans, n_tokens))

    def to(self, device):
        """On a GPU by copies that nobody waits for, out of pinned memory."""
        if device.type != "cuda":
            return self
        pinned = self if self.tokens.is_pinned() else self.pin()
        return pinned.each(lambda tensor: tensor.to(device, non_blocking=True), pinned.spans)


class Loader:
    """Rows of documents in an order that depends on seed and epoch alone; `step(n)` can be asked for any n.

    batch_size is rows per rank and micro-batch. Row g of a step's global batch goes to micro-batch g // (B * world),
    rank g // B % world. With n_pieces above 1 a "rank" is a group of so many ranks that follow one another: each gets one
    piece of the group's tokens.
    """

    def __init__(self, documents, seq_len, packing, batch_size, rank, world, seed, shuffle=True, n_pieces=1):
        self.documents, self.seq_len, self.packing = documents, seq_len, packing
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.rank, self.world, self.piece, self.n_pieces = rank // n_pieces, world // n_pieces, rank % n_pieces, n_pieces
        lengths = documents.stop - documents.start - 1
        self.rows = pack(lengths, seq_len) if packing else np.arange(len(lengths))[:, None]
        starts = np.cumsum([0, *map(len, self.rows)])[:-1]
        per_document = np.stack([documents.n_targets, lengths, lengths**2], 1)[np.concatenate(self.rows)]
        self.per_row = np.add.reduceat(per_document, starts)  # targets, tokens, squared lengths
        self.longest = seq_len if packing else int(self.per_row[:, 1].max())  # tokens of the longest row as it is run
        self.orders = {}

    def row(self, index):
        """Number of the row at a place of the endless stream of epochs."""
        epoch, place = divmod(index, len(self.rows))
        if epoch not in self.orders:
            rng = np.random.default_rng([self.seed, epoch])
            order = rng.permutation(len(self.rows)) if self.shuffle else np.arange(len(self.rows))
            if self.shuffle and epoch == 0:  # the largest row runs first: memory runs out at step 0 or not at all
                targets, tokens, _ = self.per_row.T
                first = np.flatnonzero(order == np.lexsort([targets, tokens * (not self.packing)])[-1])[0]
                order[[0, first]] = order[[first, 0]]
            self.orders = {epoch: order, **{e: o for e, o in self.orders.items() if e == epoch - 1}}
        return int(self.orders[epoch][place])

    def step(self, step, grad_accum):
        """(this rank's micro-batches, [targets, tokens, squared document lengths] of the step over all ranks)."""
        n = self.batch_size * self.world * grad_accum
        rows = [self.row(i) for i in range(step * n, step * n + n)]
        mine = [rows[at : at + self.batch_size] for at in range(0, n, self.batch_size)][self.rank :: self.world]
        return [self.batch(m) for m in mine], self.per_row[rows].sum(0).tolist()

    def ahead(self, start, stop, grad_accum, pin):
        """Yields step(start), ... step(stop - 1). A thread makes the next one while the caller works on this one."""
        def make(step):
            batches, counted = self.step(step, grad_accum)
            return [batch.pin() if pin else batch for batch in batches], counted

        with ThreadPoolExecutor(1) as thread:
            coming = thread.submit(make, start)
            for step in range(start, stop):
                batches = coming.result()
                coming = thread.submit(make, step + 1) if step + 1 < stop else None
                yield batches

    def once(self):
        """Yields batches that cover every row once over all ranks, equally many on each; the last may be empty."""
        for start in range(0, len(self.rows), self.batch_size * self.world):
            at = start + self.rank * self.batch_size
            yield self.batch(range(at, min(at + self.batch_size, len(self.rows))))

    def batch(self, rows):
        """Row numbers -> Batch on the CPU. No rows make a row of one padding token."""
        T = self.seq_len if self.packing else max((int(self.per_row[row, 1]) for row in rows), default=1)
        B = max(len(rows), 1)
        N = B * T + -B * T % self.n_pieces
        tokens, positions = np.zeros((2, N), np.int64)
        targets, spans = np.full(N, IGNORE, np.int64), []
        for b, row in enumerate(rows):
            at = b * T
            for document in self.rows[row]:
                ids, supervised = self.documents.piece(document)
                span = slice(at, at + len(ids) - 1)
                tokens[span] = ids[:-1]
                positions[span] = np.arange(span.stop - at)
                targets[span] = np.where(supervised[1:], ids[1:], IGNORE)
                spans.append((span.start, span.stop))
                at = span.stop
        if self.n_pieces > 1:
            B, T = 1, N // self.n_pieces
            tokens, targets, positions = (a[self.piece * T : self.piece * T + T] for a in (tokens, targets, positions))
        grids = [torch.from_numpy(a.reshape(B, T)) for a in (tokens, targets, positions)]
        return Batch(*grids, torch.from_numpy((targets != IGNORE).nonzero()[0]), spans, self.n_pieces)


GREEN, NO_COLOUR = "\033[32m", "\033[0m"


def show(tokenizer, documents, number, colour=True):
    """A document as text, the tokens that are trained on in green, or between ⟦ and ⟧."""
    ids, supervised = documents.piece(number)
    open_, close = (GREEN, NO_COLOUR) if colour else "⟦⟧"
    runs = itertools.groupby(range(len(ids)), lambda i: bool(supervised[i]) and i > 0)
    texts = ((said, tokenizer.core.decode(ids[list(run)].tolist(), False)) for said, run in runs)
    return "".join(f"{open_}{text}{close}" if said else text for said, text in texts)
