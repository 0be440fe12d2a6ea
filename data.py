"""Everything on a disk. First from texts to packed rows: reading, chat templates and loss masks, tokenizing once,
best-fit packing, the loader. Then model folders: presets, weights and adapters, read and written.

An example is a line of a .jsonl file; its tokens are a document, with a flag for each: "train on predicting this one".
Position p of a row holds token p and its target is token p + 1, so n tokens fill n - 1 positions and no target crosses
into the next document (torchtune #2613). Best-fit decreasing (arXiv:2404.10830) packs several into a row.

Masks come from character spans, never from searching for marker tokens: a conversation is rendered once, and a token is
trained on if it overlaps a span. The spans are the template's {% generation %} blocks, or else what an assistant turn
adds to the rendering, where the text before it is a prefix of the text after it (trl #6361).

A machine tokenizes a file once, its rows on all cores, into flat arrays that all ranks map into memory: 5 bytes a token
on disk (torchtune #1097: 900 GB of RAM for a 3 GB file). The order of rows depends on --seed and the epoch alone, so
the loader's whole state is the number of steps taken.
"""

import ast
import bisect
import contextlib
import functools
import gzip
import hashlib
import heapq
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import zlib
from collections import Counter, defaultdict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import jinja2.ext
import jinja2.sandbox
import numpy as np
import tokenizers
import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

import model as lm
import nf4
from model import IGNORE, Spans

# ---------------- texts and files

CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # the last ones reorder what follows


def printable(text):
    """Text from a file for a terminal: control characters except newline and tab become escapes."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def listing(names):
    """The first five of some names, sorted and made printable, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return printable(", ".join(name[:200] for name in sorted(names)[:5]) + more)


def read_json(path):
    """A JSON object from a file. ValueError names the file and the place."""
    try:
        if Path(path).exists() and not Path(path).is_file():  # reading a pipe would wait for ever
            raise ValueError("not a file")
        value = json.loads(Path(path).read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, thousands of digits, endless brackets
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


@contextlib.contextmanager
def writing(path, what):
    """Names the path and what was being written in the message of an OSError: a full disk's own names neither."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path}: {what} not written: {error.strerror or error}") from error


def sync(path):
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put_in_place(part):
    """final.part/ -> final/. An older folder of that name, if there is one, stays until this one is whole."""
    sync(part)
    shutil.rmtree(part.with_suffix(""), ignore_errors=True)
    part.rename(part.with_suffix(""))
    sync(part.parent)


# ---------------- chat templates and examples

CHATML = """\
{{ bos }}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content + end_of_turn }}{% endgeneration %}
{% else %}{{ m.content + end_of_turn }}{% endif %}

{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
OPEN, CLOSE = "\U00104000", "\U00104001"  # private characters around a {% generation %} block while it is rendered
MAX_RENDERED, MAX_RENDER_S = 50_000_000, 2  # characters and seconds of CPU time of one conversation
TODAY = datetime(2024, 7, 26)  # for templates: no text depends on the day of training


class GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: what the assistant says, in the templates of transformers."""
    tags = frozenset(["generation"])

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        before, after = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line) for mark in (OPEN, CLOSE))
        return [before, jinja2.nodes.Scope(body, lineno=line), after]


def compile_template(template):
    """A chat template in jinja's sandbox: no attribute with a leading underscore, no change of its inputs."""
    if tuple(map(int, re.findall(r"\d+", jinja2.__version__)[:3])) < (3, 1, 6):
        raise ValueError(f"templates can leave the sandbox of jinja2 {jinja2.__version__}: pip install -U jinja2")

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"])
    env.globals |= {"raise_exception": raise_exception, "strftime_now": TODAY.strftime}
    env.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # jinja's own escapes HTML
    return env.from_string(template)


@contextlib.contextmanager
def errors_of(source, limit_s=0):
    """Makes errors ValueErrors: templates raise anything, or never end (limit_s of CPU time), and panics of Rust."""
    def stop(*_):
        raise TimeoutError(f"took more than {limit_s} seconds")

    handler = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s, 1)  # and each second: jinja swallows some errors
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ValueError(f"{source}{line}: {str(error) or type(error)}") from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)


COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model")


class Tokenizer:
    """Tokens and chat templates of a model folder. bos_ids and eos_ids stand around a plain text, stop_ids end answers.
    Only for the main thread, in which a signal ends slow templates."""

    def __init__(self, folder, template_file=None):
        self.folder, self.path = Path(folder), Path(folder, "tokenizer.json")
        path = self.folder / "tokenizer_config.json"
        config = read_json(path) if path.exists() else {}
        self.variables = {}  # what templates see
        for key, value in config.items():
            if value and re.fullmatch("(bos|eos|unk|sep|pad|cls|mask)_token", key):
                self.variables[key] = text = value.get("content") if isinstance(value, dict) else value
                if not isinstance(text, str):
                    raise ValueError(f"{path}: {key}: expected text, got {str(value)[:60]}")
        with errors_of(self.path):
            self.core = tokenizers.Tokenizer.from_file(str(self.path))
            self.core.no_truncation()
            self.core.no_padding()
            added = self.core.get_added_tokens_decoder()
            special = {number: token for number, token in added.items() if token.special}
            as_written = [tokenizers.AddedToken(**(t.__getstate__() | {"normalized": False})) for t in special.values()]
            self.core.add_special_tokens(as_written)  # Llama 2's are searched after a blank (transformers #23833)
            encoded = self.core.encode("a")
            of_text = [i for i, is_added in enumerate(encoded.special_tokens_mask) if not is_added]
            self.bos_ids, self.eos_ids = encoded.ids[: of_text[0]], encoded.ids[of_text[-1] + 1 :]
            self.core.post_processor = None  # some leave blanks out of the offsets, and so out of the masks
        bos, self.eos = (self.core.token_to_id(self.variables.get(key, "")) for key in ("bos_token", "eos_token"))
        if config.get("add_bos_token") and bos is not None and not self.bos_ids:  # tokenizer.json does not say so
            self.bos_ids = [bos]
        if self.eos is not None and self.eos_ids[-1:] != [self.eos]:
            self.eos_ids.append(self.eos)

        self.added = tuple(token.content for token in added.values())
        self.reserved = re.compile("|".join(map(re.escape, [OPEN, CLOSE, *(t.content for t in special.values())])))
        end_of_turn = "<|im_end|>" if "<|im_end|>" in self.added else self.variables.get("eos_token", "")
        self.stop_ids = {self.eos, self.core.token_to_id(end_of_turn)} - {None}
        self.special_ids = sorted({*special, *self.stop_ids})

        self.load_template(config.get("chat_template"), template_file, end_of_turn)
        # what the cache of tokens depends on
        self.made_of = self.path.read_text("utf-8"), self.bos_ids, self.variables, self.template_text

    def load_template(self, template, template_file, end_of_turn):
        """Compiles --chat_template, or the folder's file, or chat_template of tokenizer_config.json, or ChatML."""
        path = Path(template_file or self.folder / "chat_template.jinja")
        has_file = template_file or path.exists()
        self.source = f"chat template ({path if has_file else 'tokenizer_config.json'})"
        with errors_of(self.source, MAX_RENDER_S):
            if has_file:
                template = path.read_text("utf-8-sig")
            elif template is None:
                self.source = "ChatML (the model has no template)"
                bos = self.core.decode(self.bos_ids, skip_special_tokens=False)
                bos, end_of_turn = (json.dumps(text, ensure_ascii=False) for text in (bos, end_of_turn))
                template = CHATML.replace("end_of_turn", end_of_turn).replace("bos", bos, 1)
            elif isinstance(template, list):  # several, by name
                template = {one["name"]: one["template"] for one in template}["default"]
            if not isinstance(template, str) or not template.strip():
                raise ValueError("expected text; --chat_template FILE replaces it")
            self.template, self.template_text = compile_template(template), template

    def render(self, messages, tools=None, generation_prompt=False):
        """Messages -> (text, [(start, stop) of each generation block]). ValueError where the template objects."""
        rendered, spans = "", []
        with errors_of(self.source, MAX_RENDER_S):
            for chunk in self.template.generate(messages=messages, tools=tools, documents=None,
                                                add_generation_prompt=generation_prompt, **self.variables):
                rendered += chunk
                if len(rendered) > MAX_RENDERED:
                    raise ValueError(f"wrote more than {MAX_RENDERED} characters")
            text, *blocks = rendered.split(OPEN)
            if CLOSE in text or any(block.count(CLOSE) != 1 for block in blocks):
                raise ValueError("{% generation %} blocks inside each other, or cut")
        for block in blocks:
            answer, _, rest = block.partition(CLOSE)
            spans.append((len(text), len(text) + len(answer)))
            text += answer + rest
        return text, spans

    def render_calls(self, messages, tools):
        """render() of messages that may call tools: changes them to what the template takes."""
        with contextlib.suppress(ValueError):
            return self.render(messages, tools)
        for message in messages:  # some templates read the content, if only to see that it is none
            message.setdefault("content", None)
        with contextlib.suppress(ValueError):
            return self.render(messages, tools)
        for function in functions_of(messages):  # and some want arguments as JSON, not as objects
            if isinstance(function.get("arguments"), dict):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return self.render(messages, tools)

    def conversation(self, messages, tools=None):
        """Messages -> (text or None where they spell a special token, spans to train on, counts): answers, except those
        of weight 0 (OpenAI's key). ValueError where none can be delimited, or a tool is left out."""
        if self.reserved.search(json.dumps([messages, tools], ensure_ascii=False)):
            return None, None, Counter(spells_special=1)
        text, spans = self.render_calls(messages, tools)
        for function in functions_of(messages, tools):
            if str(function.get("name")) not in text:
                raise ValueError(f"{self.source}: leaves out the tool {function.get('name')!r}")
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [i for i in turns if messages[i].get("weight") != 0]
        if not spans:
            spans = list(self.spans_by_prefix(messages, tools, text, trained))
            if trained and not spans:
                raise ValueError(f"{self.source}: cannot delimit any assistant turn; put {{% "
                                 "generation %} ... {% endgeneration %} around what the assistant says")
        elif trained != turns:
            if len(spans) != len(turns):
                raise ValueError(f"{len(spans)} generation blocks for {len(turns)} assistant turns, some of weight 0")
            spans = [span for i, span in zip(turns, spans) if i in trained]
        return text, spans, Counter(chats=1, without_mask=max(0, len(trained) - len(spans)))

    def spans_by_prefix(self, messages, tools, text, turns):
        """Yields the span of each turn for which the renderings without and with it are prefixes of the whole text."""
        for i in turns:
            with contextlib.suppress(ValueError):  # a template may want a question first
                before, _ = self.render(messages[:i], tools, generation_prompt=True)
                after, _ = self.render(messages[: i + 1], tools)
                if after.startswith(before) and text.startswith(after):
                    stripped = after.rstrip()  # the model never says the newline that follows the end of turn
                    yield len(before), len(stripped if stripped.endswith(self.added) else after)

    def encode(self, texts):
        """[(text, spans or None for all of it, is it plain)] -> an iterator of (ids [n] int32, supervised [n] bool).
        A plain text gets the BOS and EOS that it does not spell."""
        with errors_of(self.path):
            encodings = self.core.encode_batch([text for text, *_ in texts], add_special_tokens=False)
        for (text, spans, is_plain), encoding in zip(texts, encodings):
            ids, spells_eos = encoding.ids, self.eos is not None and text.rstrip().endswith(self.variables["eos_token"])
            bos = self.bos_ids if is_plain and ids[: len(self.bos_ids)] != self.bos_ids else []
            eos = self.eos_ids if is_plain and not spells_eos else []
            mask = np.ones(len(ids), bool) if spans is None else tokens_in(encoding, spans, self.special_ids)
            mask = np.concatenate([np.zeros(len(bos), bool), mask, np.ones(len(eos), bool)])
            yield np.array(bos + ids + eos, np.int32), mask

    def save(self, out):
        """Copies the files, and writes the chat template that training has used."""
        with writing(out, "tokenizer"):
            for name in COPIED:
                if (self.folder / name).exists():
                    shutil.copyfile(self.folder / name, out / name)
            (out / "chat_template.jinja").write_text(self.template_text, "utf-8")  # comes before all others

    def prompt(self, ask):
        """Token ids that ask for a continuation of a text (str), or for the answer to messages (list)."""
        bos, text = self.bos_ids, ask
        if isinstance(ask, list):
            bos, (text, _) = [], self.render(ask, generation_prompt=True)
        with errors_of(self.path):
            return bos + self.core.encode(text, add_special_tokens=False).ids


def tokens_in(encoding, spans, special_ids):
    """[n] bool: the tokens that overlap a span of characters, except a special one that absorbed blanks before it."""
    mask, ids, offsets = np.zeros(len(encoding), bool), encoding.ids, encoding.offsets
    for start, stop in spans:
        # a character may belong to no token (a blank that a normalizer drops) or to several (the bytes of an emoji)
        first = bisect.bisect_right(offsets, start, key=lambda token: token[1])
        last = bisect.bisect_left(offsets, stop, key=lambda token: token[0])
        if first < last and offsets[first][0] < start and (ids[first] in special_ids or start == stop):
            first += 1
        mask[first:last] = True
    return mask


FORMATS = "messages", "conversations", "prompt + completion", "instruction + output", "text"  # the keys of an example
ROLES = "system", "developer", "user", "assistant", "tool"


def parse_example(line, tokenizer):
    """A line of JSON -> (text or None, spans to train on or None for all of it, counts, error or None)."""
    form = "JSON in UTF-8"
    try:
        example, spans, counts = json.loads(line), None, Counter()
        form = next((form for form in FORMATS if all(key in example for key in form.split(" + "))), "example")
        if form == "example":
            raise ValueError(f"expected an object with {' or '.join(FORMATS)}: rename 'question' to 'instruction', "
                             f"'answer' to 'output'; 'chosen' and 'rejected' are data for DPO; got {str(example)[:60]}")
        if form == "text":
            text = "" + example["text"]
        elif form == "prompt + completion" and isinstance(example["prompt"], str):
            text = example["prompt"] + example["completion"]
            spans = [(len(example["prompt"]), len(text))]
        else:
            messages, tools = check_messages(messages_of(example, form)), example.get("tools") or None
            if isinstance(tools, str):
                tools = json.loads(tools) or None
            if not isinstance(tools, list | None):
                raise ValueError("'tools' must be a list of JSON schemas")
            text, spans, counts = tokenizer.conversation(messages, tools)
        if text:
            text.encode()  # no half a surrogate pair
    except Exception as error:  # a row can hold anything: other types, endless brackets
        return None, None, Counter(n_bad=1), printable(f"not valid {form}: {str(error) or type(error).__name__}")
    counts[form] += 1
    return text, spans, counts, None


def messages_of(example, form):
    """The messages of an example, not yet checked."""
    if form == "messages":
        return example["messages"]
    if form == "prompt + completion":
        return [{**message, "weight": 0} for message in example["prompt"]] + example["completion"]
    messages = []
    if form == "instruction + output":
        question = example["instruction"]
        if example.get("input"):
            question += "\n" + example["input"]
        for asked, answer in [*(example.get("history") or []), (question, example["output"])]:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    else:
        for turn in example["conversations"]:
            role = turn.get("from")
            role = {"human": "user", "gpt": "assistant"}.get(role, role)
            messages.append({"role": role, "content": turn.get("value"), **turn})
    if example.get("system") and not (messages and messages[0].get("role") == "system"):
        messages.insert(0, {"role": "system", "content": example["system"]})
    return messages


def check_messages(messages):
    """Messages as transformers hands them to templates: no None, parts of text joined, arguments as objects."""
    if not messages:
        raise ValueError("no messages")
    checked = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None}
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; expected {', '.join(ROLES)}")
        if message.get("weight", 1) not in (0, 1):
            raise ValueError(f"'weight' must be 0 or 1, got {message['weight']!r}")
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            message["content"] = content = "".join(part["text"] for part in content)
        if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
            raise ValueError(f"'content' of a message of {role!r} must be text, got {str(content)[:60]}")
        names = "reasoning_content", "thinking", "reasoning"  # what data and templates call it
        if found := [message[name] for name in names if name in message]:
            message = {"thinking": found[0], **message, "reasoning_content": found[0]}
        checked.append(message)
    for function in functions_of(checked):
        if isinstance(function.get("arguments"), str):
            with contextlib.suppress(ValueError):
                function["arguments"] = json.loads(function["arguments"])
    return checked


def functions_of(messages, tools=None):
    """The functions that tool calls in messages name, and those of tools, each a dict."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return [call.get("function", call) for call in [*calls, *(tools or [])]]


# ---------------- files, and tokenizing them

ARRAYS = {"tokens": np.int32, "supervised": bool, "lengths": np.int64, "lines": np.int64}  # the last two per document
BUILT_IN = "stdlib:code", "stdlib:docs"
KINDS = "jsonl", "json", "txt"
CHUNK = 2**20  # bytes of whole lines that are tokenized at once
BOM = b"\xef\xbb\xbf"
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings", "pydoc_data"}


def chunks_of(path, kind, held_out):
    """Yields lists of lines, an example each: a megabyte of a file, or 100 of what it would be as .jsonl."""
    if kind in BUILT_IN:
        examples = stdlib_examples(kind, held_out)
    else:
        with gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb") as file:
            head = file.read(4096)
            file.seek(len(BOM) if head.startswith(BOM) else 0)
            is_array = kind != "txt" and head.removeprefix(BOM).lstrip().startswith(b"[")
            examples = iter(json.loads(file.read()) if is_array else [])
            while lines := file.readlines(CHUNK):
                if kind == "txt":
                    lines = [json.dumps({"text": b"".join(lines).decode()}).encode()]
                yield lines
    while lines := [json.dumps(example).encode() for example in itertools.islice(examples, 100)]:
        yield lines


def stdlib_examples(kind, held_out):
    """Yields what is trained on, or the one example in twenty that is held out for --eval_data."""
    for name, text in stdlib_modules():
        examples = [{"text": text}] if kind == "stdlib:code" else stdlib_questions(name, text)
        for i, example in enumerate(examples):
            if (zlib.crc32(f"{name}/{i}".encode()) % 20 == 0) == held_out:
                yield example


def stdlib_modules():
    """Yields (module path, source) of the installed Python's standard library, in a fixed order."""
    root = Path(os.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not SKIPPED.intersection(name.parts):
            with contextlib.suppress(UnicodeDecodeError):  # a handful declare another encoding
                yield str(name), path.read_text("utf-8")


def stdlib_questions(name, text):
    """Yields an example per documented public function: its signature is asked, its docstring's summary answers."""
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
                yield {"instruction": question, "output": doc.split("\n\n")[0]}


def unreadable(path, kind):
    """What is wrong with a name in --data, and a line that converts tables and datasets of the Hub."""
    wrong, source = "expected a .jsonl, .json or .txt file (or .gz of it), stdlib:docs or stdlib:code", None
    if kind in ("csv", "parquet"):
        source = f"'{kind}', data_files='{path}'"
    elif not path.exists() and len(path.parts) == 2 and kind not in KINDS:
        source = f"'{path}'"
    if source:
        code = f"import datasets as d; d.load_dataset({source}, split='train').to_json('{path.stem}.jsonl')"
        wrong += f'; convert it: pip install datasets && python -c "{code}"'
    return wrong if path.is_file() else f"no such file; {wrong}"


def tokenized(spec, held_out, tokenizer):
    """Folder of a file's documents in the cache, made there if missing. Its name is a hash of all they depend on."""
    path, kind, digest = Path(spec), spec, hashlib.sha256(Path(__file__).read_bytes())
    if spec not in BUILT_IN:
        kind = path.name.lower().removesuffix(".gz").rpartition(".")[2]
        if not path.is_file() or kind not in KINDS:
            raise ValueError(f"{spec}: {unreadable(path, kind)}")
        with open(path, "rb") as file:
            while block := file.read(2**22):
                digest.update(block)
    others = kind, held_out, tokenizer.made_of, sys.version, tokenizers.__version__, jinja2.__version__
    digest.update(json.dumps(others).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "oomph", digest.hexdigest()[:32]).expanduser()
    if folder.is_dir():
        return folder
    part = folder.with_suffix(f".{os.urandom(8).hex()}.part")
    try:
        with writing(f"{spec}: {part} (XDG_CACHE_HOME moves this cache)", "tokens"):
            part.mkdir(parents=True)
            report = tokenize(chunks_of(path, kind, held_out), tokenizer, part)
            (part / "report.json").write_text(json.dumps(report))
            for made in [*part.iterdir(), part]:
                sync(made)  # what has its name is whole, power cut or not
            if not folder.is_dir():
                part.rename(folder)
    except (EOFError, RecursionError, ValueError, zlib.error) as error:
        raise ValueError(f"{spec}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def tokenize(chunks, tokenizer, folder):
    """Writes documents into a folder, a file for each of ARRAYS -> the report: counts, a checksum, errors."""
    report = Counter(bad="")
    for chunk in tqdm(chunks, "tokenizing", leave=False, disable=None):
        for (key, dtype), values in zip(ARRAYS.items(), encode_chunk(tokenizer, chunk, report)):
            array = np.array(values, dtype)
            report["crc"] = zlib.crc32(array, report["crc"])
            with open(folder / key, "ab") as file:
                file.write(array)
        report["lines"] += len(chunk)
    if not report["n_tokens"]:
        raise ValueError("nothing to train on" + report["bad"])
    return report


def encode_chunk(tokenizer, chunk, report):
    """Lines -> the values of ARRAYS. Adds to the counts in the report, and to its first five bad lines."""
    texts, lines = [], []
    for line, row in enumerate(chunk, report["lines"] + 1):
        if row.strip():
            text, spans, counts, error = parse_example(row, tokenizer)
            report.update(counts, examples=1)
            if error and report["n_bad"] <= 5:
                report["bad"] += f"\n  line {line}: {error}"
            elif text is not None:
                texts.append((text, spans, not counts["chats"]))
                lines.append(line)
            if report["n_bad"] == report["examples"] == 20:  # a wrong format or template fails on each
                raise ValueError("20 examples in turn cannot be trained on:" + report["bad"])
    tokens, supervised, lengths = [], [], []
    for (*_, is_plain), (ids, mask) in zip(texts, tokenizer.encode(texts)):
        tokens += ids.tolist()
        supervised += mask.tolist()
        lengths.append(len(ids))
        if not is_plain:  # the last trained token of a turn, or the one before a newline, should be special
            ends, special = np.flatnonzero(mask & ~np.append(mask[1:], False)), np.isin(ids, tokenizer.special_ids)
            report["without_end"] += int((~(special[ends] | special[ends - 1])).sum())
    report["n_tokens"] += len(tokens)
    report["largest_id"] = max([report["largest_id"], *tokens])
    return tokens, supervised, lengths, lines


# ---------------- documents, packing and loading


class Documents:
    """Parts of documents that fit into a row. files: of each a dict of its name, tokens, supervised and counts. file,
    start, stop, n_targets, line: [n] int64, of each part; its first token is no target."""

    def __init__(self, files, columns, checksum=0):
        self.files, self.checksum = files, zlib.crc32(np.ascontiguousarray(columns[:4]), checksum)
        self.file, self.start, self.stop, self.n_targets, self.line = columns

    def part(self, number):
        """(tokens [n] int32, supervised [n] bool) of a part."""
        file, place = self.files[self.file[number]], slice(self.start[number], self.stop[number])
        return file["tokens"][place], file["supervised"][place]

    def place(self, number):
        """The "FILE:LINE" of a part."""
        return f"{self.files[self.file[number]]['name']}:{self.line[number]}"


def open_documents(folders, names, seq_len, train_on="targets", overflow=None, vocab_size=1 << 31):
    """Folders of the cache -> Documents. overflow: what becomes of those of more than seq_len positions; None splits
    texts and drops the others. ValueError where a file should not be trained on."""
    files, columns, checksum = [], [], 0
    for number, (folder, name) in enumerate(zip(folders, names, strict=True)):
        n = defaultdict(int, read_json(folder / "report.json"))
        tokens, supervised, lengths, lines = (
            np.asarray(np.memmap(folder / key, kind, "r")) for key, kind in ARRAYS.items())
        if train_on == "all":
            supervised = np.broadcast_to(True, len(tokens))
        checksum = zlib.crc32(b"%d" % n["crc"], checksum)
        n["policy"] = overflow or ("split" if n["text"] == n["examples"] - n["n_bad"] else "drop")
        document, start, stop = parts_of(lengths, seq_len, n["policy"])
        n_targets = np.array([np.count_nonzero(supervised[i + 1 : j]) for i, j in zip(start, stop)], np.int64)
        used = np.flatnonzero(n_targets)
        n |= {"name": name, "tokens": tokens, "supervised": supervised, "seq_len": seq_len, "vocab_size": vocab_size,
              "n_trained": int(n_targets.sum()), "n_tokens": int((stop - start - 1)[used].sum()),
              "n_long": int((lengths - 1 > seq_len).sum()), "longest": int(lengths.max(initial=1)) - 1,
              "n_untrained": len(np.setdiff1d(document, document[used]))}
        files.append(n)
        for refused, why in (
            (n["n_bad"] > 0.01 * n["examples"], "{n_bad:,} of {examples:,} examples cannot be trained on:{bad}"),
            (n["largest_id"] >= vocab_size,
             "token {largest_id} of {vocab_size} embeddings: the tokenizer belongs to another model"),
            (not n["n_trained"],
             "nothing to train on: of {examples} examples {n_long} are longer than --seq_len {seq_len} (up to "
             "{longest}), {n_untrained} without a supervised token, {spells_special} spell a special token"),
            (n["n_trained"] < 0.01 * n["n_tokens"],
             "only {n_trained:,} of {n_tokens:,} tokens are trained on: look at it with --inspect 3")):
            if refused:
                raise ValueError(f"{name}: {why.format_map(n)}")
        columns.append(np.stack([np.full(len(start), number), start, stop, n_targets, lines[document]])[:, used])
    return Documents(files, np.concatenate(columns, 1), checksum)


def parts_of(lengths, seq_len, policy):
    """Lengths -> of each part [n] its document, first token and last token + 1; the next one begins with the last."""
    n_parts, stop = np.ones(len(lengths), np.int64), np.cumsum(lengths)
    if policy == "split":
        n_parts = np.maximum(-(-(lengths - 1) // seq_len), 1)
    elif policy == "drop":
        n_parts[lengths - 1 > seq_len] = 0
    document = np.repeat(np.arange(len(lengths)), n_parts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(n_parts) - n_parts, n_parts)
    start = (stop - lengths)[document] + nth * seq_len
    return document, start, np.minimum(start + seq_len + 1, stop[document])


def pack(lengths, seq_len):
    """Best-fit decreasing: lengths of documents -> rows, each a list of document numbers that fit into seq_len."""
    rows, rooms, rows_with = defaultdict(list), [seq_len], defaultdict(list)
    rows_with[seq_len] = list(range(len(lengths)))  # of each number of free positions a heap of rows; rooms are sorted
    order = np.argsort(-lengths, kind="stable")
    for document, length in zip(order.tolist(), lengths[order].tolist()):
        place = bisect.bisect_left(rooms, length)
        room = rooms[place]
        row = heapq.heappop(rows_with[room])
        if not rows_with[room]:
            del rooms[place]
        if not rows_with[room - length]:
            bisect.insort(rooms, room - length)
        heapq.heappush(rows_with[room - length], row)
        rows[row].append(document)
    return list(rows.values())


def pack_spans(pairs, n_tokens):
    """[(start, stop)] -> Spans on the CPU. Equal documents without padding need no bounds."""
    bounds = torch.tensor(sorted({0, n_tokens, *itertools.chain(*pairs)}), dtype=torch.int32)
    longest, n = int(bounds.diff().max()), len(bounds) - 1
    return Spans(pairs) if n == len(pairs) and n * longest == n_tokens else Spans(pairs, bounds, longest)


class Batch(namedtuple("Batch", "tokens targets positions keep_S spans")):
    """A micro-batch of one rank. tokens, targets (IGNORE where untrained), positions: [B, T] int64. keep_S: flat places
    of the targets. Under --sequence_parallel a rank holds one of N pieces of the tokens, [1, T]; spans are of all."""

    def to(self, device):
        """On a GPU by asynchronous copies out of pinned memory."""
        if device.type != "cuda":
            return self

        def copied(tensor):
            return None if tensor is None else tensor.pin_memory().to(device, non_blocking=True)

        return Batch(*map(copied, self[:4]), Spans(self.spans.pairs, copied(self.spans.bounds), self.spans.longest))


class Loader:
    """Rows of documents. batch_size B: per rank and micro-batch; row g of a step is in micro-batch g // (B * world) of
    rank g // B % world. Under sequence_parallel a "rank" is a group of so many, and each gets a shard of its tokens."""

    def __init__(self, documents, seq_len, packing, batch_size, seed, rank, world, sequence_parallel=1):
        self.waited_s = 0.0  # seconds that ahead() let its caller wait
        self.documents, self.seq_len, self.packing = documents, seq_len, packing
        self.batch_size, self.seed, self.n_shards = batch_size, seed, sequence_parallel
        (self.rank, self.shard), self.world = divmod(rank, sequence_parallel), world // sequence_parallel
        lengths = documents.stop - documents.start - 1
        self.rows = pack(lengths, seq_len) if packing else np.arange(len(lengths))[:, None]
        per_part = np.stack([documents.n_targets, lengths, lengths**2], 1)[np.concatenate(self.rows)]
        self.per_row = np.add.reduceat(per_part, np.cumsum([0, *map(len, self.rows)])[:-1])
        self.longest = seq_len if packing else int(self.per_row[:, 1].max())  # tokens of the longest row as it is run

        self.order = functools.lru_cache(maxsize=2)(self.make_order)

    def make_order(self, epoch):
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        if epoch == 0:  # the largest row runs first: memory runs out at step 0 or not at all
            targets, tokens, _ = self.per_row.T
            largest = np.lexsort([targets] if self.packing else [targets, tokens])[-1]
            first = np.flatnonzero(order == largest)[0]
            order[[0, first]] = order[[first, 0]]
        return order

    def rows_of(self, step, grad_accum):
        """-> (rows of the global batch, [rows of each micro-batch of this rank])."""
        B, n, n_rows = self.batch_size, self.batch_size * self.world * grad_accum, len(self.rows)
        rows = [int(self.order(i // n_rows)[i % n_rows]) for i in range(step * n, step * n + n)]
        return rows, [rows[i : i + B] for i in range(0, n, B)][self.rank :: self.world]

    def step(self, step, grad_accum):
        """-> (this rank's micro-batches, [targets, tokens, squared document lengths] of the step over all ranks)."""
        rows, rows_by_batch = self.rows_of(step, grad_accum)
        return [self.batch(rows) for rows in rows_by_batch], self.per_row[rows].sum(0).tolist()

    def places(self, step, grad_accum):
        """["FILE:LINE"] of what is in this rank's rows of a step."""
        parts = np.concatenate([self.rows[row] for rows in self.rows_of(step, grad_accum)[1] for row in rows])
        return [self.documents.place(part) for part in parts]

    def ahead(self, start, stop, grad_accum):
        """Yields step(start), ... step(stop - 1). A thread makes the next one while the caller works on this one."""
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(self.step, start, grad_accum)
            for step in range(start, stop):
                started = time.perf_counter()
                made = future.result()
                self.waited_s += time.perf_counter() - started
                if step + 1 < stop:
                    future = thread.submit(self.step, step + 1, grad_accum)
                yield made

    def once(self):
        """Yields batches that cover every row once over all ranks, equally many on each; the last may be empty."""
        B, n = self.batch_size, len(self.rows)
        for start in range(self.rank * B, n + self.rank * B, B * self.world):
            yield self.batch(range(start, min(start + B, n)))

    def batch(self, rows):
        """Row numbers -> Batch on the CPU. No rows make a row of one padding token."""
        T = self.seq_len if self.packing else int(self.per_row[list(rows), 1].max(initial=1))
        B = max(len(rows), 1)
        N = B * T + -B * T % self.n_shards
        tokens, positions = np.zeros((2, N), np.int64)
        targets, pairs = np.full(N, IGNORE), []
        for b, row in enumerate(rows):
            stop = b * T
            for part in self.rows[row]:
                ids, supervised = self.documents.part(part)
                start, stop = stop, stop + len(ids) - 1
                tokens[start:stop] = ids[:-1]
                positions[start:stop] = np.arange(stop - start)
                targets[start:stop] = np.where(supervised[1:], ids[1:], IGNORE)
                pairs.append((start, stop))
        if self.n_shards > 1:
            B, T = 1, N // self.n_shards
        grids = [grid[self.shard * T :][: B * T].reshape(B, T) for grid in (tokens, targets, positions)]
        return Batch(*map(torch.from_numpy, (*grids, np.flatnonzero(grids[1] != IGNORE))), pack_spans(pairs, N))


def show(tokenizer, documents, number):
    """A document as text, with brackets around the tokens that are trained on."""
    ids, supervised = documents.part(number)
    text = ""
    for is_trained, run in itertools.groupby(range(len(ids)), lambda i: bool(supervised[i]) and i > 0):
        run_text = printable(tokenizer.core.decode(ids[list(run)].tolist(), skip_special_tokens=False))
        text += f"⟦{run_text}⟧" if is_trained else run_text
    return text


def print_data(args, loader, eval_loader, tokenizer):
    """Prints what was read, what was dropped and why, and the first --inspect documents."""
    for one in filter(None, (loader, eval_loader)):
        for n in one.documents.files:
            formats = ", ".join(form for form in FORMATS if n[form])
            print(f"{printable(n['name'])}: {n['examples']:,} examples ({formats})\n"
                  f"  {n['n_tokens']:,} tokens, {n['n_trained'] / n['n_tokens']:.1%} trained on")
            for key, note in (
                ("n_long", "longer than --seq_len (up to {longest:,}): --overflow {policy}"),
                ("n_untrained", "without a token to train on: dropped"),
                ("spells_special", "spell a special token: dropped"),
                ("without_mask", "assistant turns not trained on: the template rewrites them"),
                ("without_end", "assistant turns end without a special token: no stop is learned"),
                ("n_bad", "cannot be trained on: dropped{bad}")):
                if n[key]:
                    print(f"  {n[key]:,} {note.format_map(n)}")
        full = one.per_row[:, 1].sum() / (len(one.rows) * one.seq_len)
        print(f"  {len(one.rows):,} rows of at most {one.seq_len} tokens, {full:.1%} full")
    for i in range(min(args.inspect or 0, len(loader.documents.start))):
        print(f"--- example {i + 1}, {printable(loader.documents.place(i))}, trained on: ⟦this⟧")
        print(show(tokenizer, loader.documents, i) + "\n---")


def open_data(args, tokenizer, vocab_size, ranks):
    """-> [loader of --data, loader of --eval_data or None]. A machine tokenizes a file once."""
    sets, folders = [args.data, args.eval_data or []], []
    with ranks.agree():
        for held_out, specs in enumerate(sets if ranks.local == 0 else []):
            folders.append([tokenized(spec, held_out, tokenizer) for spec in specs])
    every = ranks.gather(folders)
    folders, loaders = every[ranks.rank - ranks.local], [None, None]
    with ranks.agree():
        if any(a.name != b.name for mine, first in zip(folders, every[0]) for a, b in zip(mine, first)):
            raise ValueError(f"--data: {os.uname().nodename} has other files or package versions than rank 0's machine")
        for i, specs in enumerate(specs for specs in sets if specs):
            documents = open_documents(folders[i], specs, args.seq_len, args.train_on, args.overflow, vocab_size)
            loaders[i] = Loader(documents, args.seq_len, args.packing, args.batch_size, args.seed, ranks.rank,
                                ranks.world, args.sequence_parallel)
    return loaders


# ---------------- model folders: reading

HEAD = "lm_head.weight"
PEFT_PREFIX = "base_model.model."  # PEFT's name of a tensor is this and ours
TINY = Path(__file__).parent / "tests" / "tiny"  # the built-in model
# Shapes of models on the Hub. n: blocks; tokens: the positions that the model has seen; RoPE: its theta; x: the
# factor of Llama 3.1's scaling of RoPE, 0 for none; t: whether head and embedding are tied.
PRESET_TABLE = """
name            Hub-id                            family         V     D     F   n   H  G   K tokens RoPE  x t
llama-2-7b      meta-llama/Llama-2-7b-hf          llama      32000  4096 11008  32  32 32 128   4096  1e4  0 0
llama-2-13b     meta-llama/Llama-2-13b-hf         llama      32000  5120 13824  40  40 40 128   4096  1e4  0 0
llama-2-70b     meta-llama/Llama-2-70b-hf         llama      32000  8192 28672  80  64  8 128   4096  1e4  0 0
llama-3-8b      meta-llama/Meta-Llama-3-8B        llama     128256  4096 14336  32  32  8 128   8192  5e5  0 0
llama-3.1-8b    meta-llama/Llama-3.1-8B           llama     128256  4096 14336  32  32  8 128 131072  5e5  8 0
llama-3.1-70b   meta-llama/Llama-3.1-70B          llama     128256  8192 28672  80  64  8 128 131072  5e5  8 0
llama-3.1-405b  meta-llama/Llama-3.1-405B         llama     128256 16384 53248 126 128  8 128 131072  5e5  8 0
llama-3.2-1b    meta-llama/Llama-3.2-1B           llama     128256  2048  8192  16  32  8  64 131072  5e5 32 1
llama-3.2-3b    meta-llama/Llama-3.2-3B           llama     128256  3072  8192  28  24  8 128 131072  5e5 32 1
llama-3.3-70b   meta-llama/Llama-3.3-70B-Instruct llama     128256  8192 28672  80  64  8 128 131072  5e5  8 0
mistral-7b      mistralai/Mistral-7B-v0.3         mistral    32768  4096 14336  32  32  8 128  32768  1e6  0 0
qwen2.5-0.5b    Qwen/Qwen2.5-0.5B                 qwen2     151936   896  4864  24  14  2  64  32768  1e6  0 1
qwen2.5-1.5b    Qwen/Qwen2.5-1.5B                 qwen2     151936  1536  8960  28  12  2 128 131072  1e6  0 1
qwen2.5-3b      Qwen/Qwen2.5-3B                   qwen2     151936  2048 11008  36  16  2 128  32768  1e6  0 1
qwen2.5-7b      Qwen/Qwen2.5-7B                   qwen2     152064  3584 18944  28  28  4 128 131072  1e6  0 0
qwen2.5-14b     Qwen/Qwen2.5-14B                  qwen2     152064  5120 13824  48  40  8 128 131072  1e6  0 0
qwen2.5-32b     Qwen/Qwen2.5-32B                  qwen2     152064  5120 27648  64  40  8 128 131072  1e6  0 0
qwen2.5-72b     Qwen/Qwen2.5-72B                  qwen2     152064  8192 29568  80  64  8 128 131072  1e6  0 0
qwen3-0.6b      Qwen/Qwen3-0.6B                   qwen3     151936  1024  3072  28  16  8 128  40960  1e6  0 1
qwen3-1.7b      Qwen/Qwen3-1.7B                   qwen3     151936  2048  6144  28  16  8 128  40960  1e6  0 1
qwen3-4b        Qwen/Qwen3-4B                     qwen3     151936  2560  9728  36  32  8 128  40960  1e6  0 1
qwen3-8b        Qwen/Qwen3-8B                     qwen3     151936  4096 12288  36  32  8 128  40960  1e6  0 0
qwen3-14b       Qwen/Qwen3-14B                    qwen3     151936  5120 17408  40  40  8 128  40960  1e6  0 0
qwen3-32b       Qwen/Qwen3-32B                    qwen3     151936  5120 25600  64  64  8 128  40960  1e6  0 0
qwen3-30b-a3b   Qwen/Qwen3-30B-A3B                qwen3_moe 151936  2048  6144  48  32  4 128  40960  1e6  0 0
qwen3-235b-a22b Qwen/Qwen3-235B-A22B              qwen3_moe 151936  4096 12288  94  64  4 128  40960  1e6  0 0
"""
PRESET_KEYS = ("_name_or_path", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
               "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_theta")
PRESET_EXPERTS = {"qwen3-30b-a3b": (128, 8, 768), "qwen3-235b-a22b": (128, 8, 1536)}  # all, per token, width of one


def read_presets():
    """{name: what config.json of that model says} of PRESET_TABLE."""
    presets = {}
    for line in PRESET_TABLE.strip().splitlines()[1:]:
        name, hub_id, family, *sizes, scale, tied = line.split()
        config = dict(zip(PRESET_KEYS, [hub_id, family, *map(json.loads, sizes)]))
        config["rms_norm_eps"] = 1e-6 if family.startswith("qwen") else 1e-5
        config["tie_word_embeddings"] = tied == "1"
        config["sliding_window"] = None
        if scale != "0":
            config["rope_scaling"] = {"rope_type": "llama3", "factor": float(scale), "low_freq_factor": 1.0,
                                      "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        if name in PRESET_EXPERTS:
            keys = "num_experts", "num_experts_per_tok", "moe_intermediate_size"
            config |= dict(zip(keys, PRESET_EXPERTS[name]), norm_topk_prob=True)
        presets[name] = config
    return presets


PRESETS = read_presets()


class ModelFiles(NamedTuple):
    """Where a model comes from."""
    config: dict  # config.json
    tokenizer: Path  # folder of the tokenizer
    weights: Path | None  # folder of the weights; None: random ones
    base: str  # what a PEFT adapter names as its base


def find_result(name):
    """--model, also the folder of a run (merged/, else final/) or of an adapter -> (model, adapter or None)."""
    for folder in (Path(name), Path(name) / "merged", Path(name) / "final"):
        if (folder / "config.json").exists():
            return str(folder), None
        if (folder / "adapter_config.json").exists():
            return str(read_json(folder / "adapter_config.json").get("base_model_name_or_path")), str(folder)
    return name, None


def find_model(name, random_init):
    """--model -> ModelFiles."""
    if name in PRESETS:
        return ModelFiles(PRESETS[name], TINY, None, name)
    folder = TINY if name == "tiny" else Path(name)
    if folder.is_dir():
        name = str(folder.resolve())
    elif name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"--model {name}: no such folder; expected tiny, a folder, a Hub id (Qwen/Qwen3-4B) or, with "
                         f"--random_init, {' '.join(PRESETS)}")
    else:
        from huggingface_hub import snapshot_download

        patterns = [] if random_init else ["model*.safetensors"]  # not consolidated.safetensors, the same again
        wanted = ["*.json", "*.jinja", "merges.txt", "tokenizer.model", *patterns]
        try:
            folder = Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=["onnx/*", "original/*"]))
        except (OSError, ValueError) as error:
            raise ValueError(f"--model {name}: no such folder, and not fetched from the Hub: {error}") from error
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: no config.json: expected a model folder as transformers saves it")
    weights = None if random_init else folder
    return ModelFiles(read_json(folder / "config.json"), folder, weights, name)


DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of checkpoints
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.uint8: "U8"}


class Checkpoint:
    """The safetensors files of a folder, read by rows. tensors: {name: ((file, first byte), shape, dtype)}. ValueError
    where a file is missing, cut short, in another format, or names a tensor twice."""

    def __init__(self, folder, single="model.safetensors"):
        folder, self.tensors = Path(folder), {}
        index = folder / f"{single}.index.json"
        weight_map = read_json(index).get("weight_map") if index.exists() else {"": single}
        plain = re.compile(r"[\w.-]+\.safetensors", re.ASCII).fullmatch
        if not isinstance(weight_map, dict) or not all(plain(str(file)) for file in weight_map.values()):
            raise ValueError(f"{index}: weight_map: expected plain names of files in the same folder")
        self.files = [folder / file for file in sorted(set(weight_map.values()))]
        for path in self.files:
            if not path.is_file():
                raise ValueError(f"{path}: no such file: the download is incomplete, or the weights are .bin files, "
                                 "which can run code (transformers' save_pretrained writes safetensors)")
            self.read_header(path)

    def read_header(self, path):
        try:
            with safe_open(path, framework="pt"), open(path, "rb") as file:  # the library checks header and length
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except SafetensorError as error:
            raise ValueError(f"{path}: damaged or cut short ({listing([str(error)])}): download it again") from error
        header.pop("__metadata__", None)
        for name, part in header.items():
            if part["dtype"] not in DTYPES:
                raise ValueError(f"{path}: {listing([name])}: expected float32, float16 or bfloat16, got "
                                 f"{part['dtype']}; for 4 bits use the unquantized model and --qlora")
            if name in self.tensors:
                raise ValueError(f"{path}: {listing([name])} is in {self.tensors[name][0][0].name} as well")
            place = path, 8 + length + part["data_offsets"][0]
            self.tensors[name] = place, tuple(part["shape"]), DTYPES[part["dtype"]]

    def rows(self, name, start, stop):
        """Rows [start, stop) of a tensor, on the CPU. Not by the library: its mapped pages pile up."""
        (path, first), (_, *shape), dtype = self.tensors[name]
        out = torch.empty(stop - start, *shape, dtype=dtype)
        with open(path, "rb") as file:
            file.seek(first + start * math.prod(shape) * dtype.itemsize)
            if file.readinto(out.view(torch.uint8).numpy()) != out.nbytes:
                raise OSError(f"{path}: {name}: the file became shorter while it was read")
        return out

    def crc(self):
        """Checksum of 1 MB from the middle of each file: tells base from Instruct."""
        crc = 0
        for path in self.files:
            with open(path, "rb") as file:
                file.seek(path.stat().st_size // 2)
                crc = zlib.crc32(file.read(1 << 20), crc)
        return crc


def file_names(name, config):
    """Names in files of a parameter, or of its adapter: each expert of a stack has a matrix of its own there."""
    before, is_stack, after = name.partition(".experts.")
    return [f"{before}.experts.{i}.{after}" for i in range(config.num_experts)] if is_stack else [name]


def rows_of(source, names, start, stop):
    """Yields (rows of a matrix, their slice of [start, stop)) of the matrices `names`, as if these were one."""
    n = source.tensors[names[0]][1][0]
    for i in range(start // n, -(-stop // n)):
        first, last = max(start, i * n), min(stop, i * n + n)
        yield source.rows(names[i], first - i * n, last - i * n), slice(first - start, last - start)


class RandomWeights:
    """In place of a Checkpoint: normal weights, norms of one, biases of zero, by name and row."""

    def __init__(self, model, seed, device):
        self.seed, self.device, self.config = seed, device, model.config
        self.tensors = {name: (None, shape, self.config.dtype) for name, shape in shapes_in_files(model).items()}

    def rows(self, name, start, stop):
        shape = self.tensors[name][1]
        if len(shape) == 1:
            return torch.full((stop - start,), float(name.endswith("norm.weight")))
        return random_rows(name, shape[1], start, stop, self.seed, self.device).mul_(self.config.initializer_range)

    def crc(self):
        return zlib.crc32(repr((self.seed, self.config)).encode())


def random_rows(name, width, start, stop, seed, device, uniform=False):
    """Rows [start, stop) of a random matrix, normal or uniform in [-1, 1), for any sharding: 256 rows a seed."""
    out = torch.empty(stop - start, width, device=device)
    for block in range(start // 256, -(-stop // 256)):
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}/{block}".encode()))
        rows, first = torch.empty(256, width, device=device), max(start, block * 256)
        rows.uniform_(-1, 1, generator=generator) if uniform else rows.normal_(generator=generator)
        rows = rows[first - block * 256 : stop - block * 256]
        out[first - start : first - start + len(rows)] = rows
    return out


def shapes_in_files(model):
    """{name: shape} of a model's parameters as files hold them."""
    shapes = {}
    for stack, p in model.named_parameters():
        names = file_names(stack, model.config)
        shapes |= {name: (len(p) // len(names), *p.shape[1:]) for name in names}
    return shapes


def check_weights(model, checkpoint, folder):
    """Compares the names and shapes of a model, or of its LoRA layers if it has any, with a file's, or raises."""
    shapes = shapes_in_files(model)
    expected = {PEFT_PREFIX + name: shape for name, shape in shapes.items() if ".lora_" in name} or shapes
    if model.config.tie_word_embeddings and HEAD in checkpoint.tensors and expected is shapes:
        expected[HEAD] = expected["model.embed_tokens.weight"]  # a duplicate, compared when it is read
    found = {name: shape for name, (_, shape, _) in checkpoint.tensors.items()
             if not name.endswith("rotary_emb.inv_freq")}  # old Llama-2 files have it
    other = [f"{name} is {list(found[name])}, not {list(shape)}"
             for name, shape in expected.items() if found.get(name, shape) != shape]
    differ = {"missing": expected.keys() - found, "unexpected": found.keys() - expected, "wrong shape": other}
    if any(differ.values()):
        text = "; ".join(f"{what}: {listing(names)}" for what, names in differ.items() if names)
        raise ValueError(f"{folder}: {text}")


# These keys may have these values, those any; every other one must be unset.
ADAPTER_KEYS = {"peft_type": ["LORA"], "task_type": ["CAUSAL_LM"], "bias": ["none"],
                "init_lora_weights": [True, False, "gaussian"],  # PiSSA and others change the base weights
                "layers_to_transform": [],  # 0 and false are layer 0
                "rank_pattern": [{}], "alpha_pattern": [{}], "loftq_config": [{}]}
ADAPTER_FREE = ("r", "lora_alpha", "lora_dropout", "target_modules", "base_model_name_or_path", "auto_mapping",
                "revision", "inference_mode", "peft_version", "megatron_core", "qalora_group_size", "target_parameters")


def open_adapter(folder):
    """A PEFT LoRA adapter -> (Checkpoint, {flag: value}). ValueError names a key that is not understood. Tensors say
    which layers are meant: target_modules may be a regular expression, which could run for ever."""
    where = f"{folder}/adapter_config.json"
    config = read_json(where)
    for key, value in config.items():
        if key not in ADAPTER_FREE and value not in [None, *ADAPTER_KEYS.get(key, [False, "", []])]:
            raise ValueError(f"{where}: {listing([key])} = {json.dumps(value)[:200]} is not implemented")
    checkpoint, modules = Checkpoint(folder, "adapter_model.safetensors"), config.get("target_modules")
    found = {name.split(".lora_")[0].rsplit(".")[-1] for name in checkpoint.tensors}
    named = {str(module).rsplit(".")[-1] for module in modules} if isinstance(modules, list) else found
    if not isinstance(modules, list | str) or not found or found != named or found - set(lm.LORA_TARGETS):
        raise ValueError(f"{where}: target_modules = {json.dumps(modules)[:200]}: adapter_model.safetensors has "
                         f"{listing(found)}, expected some of {', '.join(lm.LORA_TARGETS)}")
    fields = {"r": (int, 1, 4096, None), "lora_alpha": lm.POSITIVE, "lora_dropout": (float, 0, 0.99, 0.0)}
    rank, alpha, dropout = (lm.read_field(config, key, field, where) for key, field in fields.items())
    return checkpoint, {"lora_rank": rank, "lora_alpha": alpha, "lora_dropout": dropout,
                        "lora_targets": [target for target in lm.LORA_TARGETS if target in found]}


@torch.no_grad()
def load_weights_(model, source, adapter, seed, device, progress=False, frozen_only=False):
    """Fills a sharded, quantized, adapted model. A rank reads the rows it keeps, a tensor at a time. adapter: a
    Checkpoint, or None for a fresh one; frozen_only: leave out what trains."""
    params = dict(model.named_parameters())
    for name in tqdm(params, "loading weights", unit="tensor", disable=not progress, leave=False):
        out, start = nf4.local(params[name])
        stop, names = start + len(out), file_names(name, model.config)
        if start == stop or name.endswith("weight_scales") or (frozen_only and params[name].requires_grad):
            continue  # an empty shard, or written along with the codes
        if name.endswith("weight_codes"):
            names = [name.removesuffix("_codes") for name in names]
            scales, _ = nf4.local(params[name.removesuffix("codes") + "scales"])
            for rows, place in rows_of(source, names, start, stop):
                out[place], scales[place] = nf4.quantize(rows.to(device), name)
        elif adapter is None and name.endswith("lora_B.weight"):
            out.zero_()
        elif adapter is None and name.endswith("lora_A.weight"):  # PEFT's default, U(-1/sqrt(in), 1/sqrt(in))
            out.copy_(random_rows(name, out.shape[1], start, stop, seed, "cpu", uniform=True) * out.shape[1] ** -0.5)
        else:
            files = (adapter, [PEFT_PREFIX + name for name in names]) if ".lora_" in name else (source, names)
            for rows, place in rows_of(*files, start, stop):
                out[place] = rows
        duplicate = name == "model.embed_tokens.weight" and HEAD not in params and HEAD in source.tensors
        if duplicate and not torch.equal(source.rows(name, start, stop), source.rows(HEAD, start, stop)):
            raise ValueError(f"config.json ties the head to the embedding, but the checkpoint's {HEAD} differs: "
                             "set tie_word_embeddings to false")


# ---------------- model folders: writing


def full_tensors(model, trainable_only):
    """Yields (name in files, full tensor on the CPU). Collective."""
    lm.reshard_(model)
    for name, param in model.named_parameters():
        if param.requires_grad or not trainable_only:
            whole = (param.full_tensor() if nf4.is_sharded(param) else param).detach().cpu()
            names = file_names(name, model.config)
            yield from zip(names, whole.chunk(len(names)))


def write_safetensors(path, layout, tensors, checksum=lambda data, crc: 0):
    """Writes tensors in the order of layout, {name: (shape, dtype)}, one in memory at a time (the library wants all)
    -> [size of the file, its checksum]. OSError names path and tensor."""
    header, end, crc = {"__metadata__": {"format": "pt"}}, 0, 0  # older transformers need the format
    for name, (shape, dtype) in layout.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    data_of = ((name, t.contiguous().flatten().view(torch.uint8).numpy()) for name, t in zip(layout, tensors))
    with open(path, "wb", buffering=0) as file:  # closing it has nothing to write, so a full disk fails once
        for what, data in itertools.chain([("header", len(text).to_bytes(8, "little") + text)], data_of):
            crc, data = checksum(data, crc), memoryview(data)
            with writing(path, what):
                while data:
                    data = data[file.write(data) :]
        with writing(path, "end"):
            os.fsync(file.fileno())
    return [path.stat().st_size, crc]


def save_model(tensors, layout, out, raw_config, write):
    """Writes config.json and model.safetensors from an iterator of tensors. Every rank iterates, as the iterator may
    gather shards; the one with `write` writes."""
    try:
        if write:
            write_safetensors(out / "model.safetensors", layout, tensors)
            with writing(out, "config"):
                (out / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n")
    finally:  # also where the disk is full: the other ranks wait in the iterator's collectives
        for _ in tensors:
            pass


def save_adapter(tensors, out, base, rank, alpha, dropout, targets):
    """Writes adapter_model.safetensors and adapter_config.json as PEFT reads them."""
    layout = {PEFT_PREFIX + name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    write_safetensors(out / "adapter_model.safetensors", layout, tensors.values())
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "bias": "none",
              "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": list(targets), "inference_mode": True}
    if any(".experts." in name for name in tensors):  # PEFT stacks experts, and then overlooks dense blocks' modules
        dense = [name for name in targets if any(f".mlp.{name}." in tensor for tensor in tensors)]
        config |= {"target_parameters": [f"mlp.{name}.weight" for name in dense], "lora_dropout": 0.0}  # it refuses one
    with writing(out, "adapter_config.json"):
        (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def export(args, model, source, files, tokenizer, out, ranks):
    """Writes final/, the PEFT adapter or the whole model. Collective -> on rank 0 the adapter's tensors, or None."""
    part, first, adapter = out / "final.part", ranks.rank == 0, None
    with ranks.agree():  # before the first collective
        if first:
            part.mkdir()
            tokenizer.save(part)
    tensors = full_tensors(model, trainable_only=args.lora)
    if args.lora:
        adapter = {name: tensor for name, tensor in tensors if first}
    with ranks.agree():
        if args.lora and first:
            save_adapter(adapter, part, files.base, args.lora_rank, args.lora_alpha, args.lora_dropout,
                         args.lora_targets)
        if not args.lora:
            layout = {name: source.tensors[name][1:] for name in shapes_in_files(model)}
            tensors = (tensor.to(layout[name][1]) for name, tensor in tensors)
            save_model(tensors, layout, part, files.config, write=first)
        if first:
            put_in_place(part)
    return adapter


def merge(args, source, adapter, files, tokenizer, out):
    """Writes merged/: the original weights, without NF4's error, + alpha / rank * B A, summed in float32."""
    raw_config, part = files.config, out / "merged.part"
    layout = {name: shape_dtype for name, (_, *shape_dtype) in source.tensors.items()
              if name != HEAD or not raw_config.get("tie_word_embeddings")}

    def merged(name, shape, dtype):
        w, stem = source.rows(name, 0, shape[0]).cpu(), name.removesuffix("weight")  # random: made on the GPU
        if stem + "lora_A.weight" in adapter:
            delta = adapter[stem + "lora_B.weight"].float() @ adapter[stem + "lora_A.weight"].float()
            w = w.float().add_(delta, alpha=args.lora_alpha / args.lora_rank)
        return w.to(dtype)

    with writing(f"--merge, {out}/final is complete", "merged/"):
        part.mkdir()
        tokenizer.save(part)
        save_model((merged(name, *entry) for name, entry in layout.items()), layout, part, raw_config, write=True)
        put_in_place(part)
