"""Everything on a disk, in two halves: from texts to the rows of a batch, and model folders.

An example is a line of a .jsonl file, or a row of a table (csv, parquet) whose columns are its keys. Its
tokens are a document, and each token has a flag that says whether the model is trained to predict it.

A row of a batch has T positions. Position p contains token p, and its target is token p + 1: a document of n
tokens fills n - 1 positions, and no target crosses into the next document (torchtune #2613). Best-fit
decreasing (arXiv:2404.10830) packs documents into rows. A document that is longer than a row is split,
truncated or dropped (--overflow). A part is what goes into one row. A pair is two documents.

Masks come from spans of characters, never from a search for marker tokens: a token is trained on if it
overlaps a span. The spans are the template's {% generation %} blocks. A template without them is rendered up
to each assistant turn and again with it, and what the turn adds is its span (trl #6361).

Each machine tokenizes a file once into arrays that all its ranks map, 5 bytes a token (torchtune #1097: 900
GB of RAM for a 3 GB file). The order of the rows depends only on --seed and the epoch.

The second half finds a model (a preset, a folder, a Hub id, the result of a run) and writes models and
adapters as transformers and PEFT read them. In that half, a row is a row of a weight matrix. A reader
(WeightFiles, RandomWeights) returns any range of rows, so each rank reads only its own.
"""

import bisect
import contextlib
import copy
import csv
import dataclasses
import difflib
import errno
import fcntl
import functools
import glob
import gzip
import hashlib
import heapq
import io
import itertools
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import zlib
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import numpy as np
import tokenizers
import torch
from jinja2 import nodes
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

import model as lm
import nf4
from model import IGNORE, Spans, quoted

# ---------------- messages

# What can clear a terminal or reverse text (CVE-2021-42574), and halves of surrogate pairs.
CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text):
    """Makes text from a file safe to print: control characters except newline and tab become escapes."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def say(text="", end="\n", to_stderr=False):
    """Prints text, safe for a terminal, also where nobody reads it (a full disk, a closed pipe)."""
    stream = sys.stderr if to_stderr else sys.stdout
    with contextlib.suppress(OSError):
        print(printable(text), end=end, file=stream, flush=True)


def note(text, to_stderr=False):
    say(wrapped(f"note: {text}"), to_stderr=to_stderr)


@functools.cache
def note_once(text):
    """Prints a note that several ranks or files may have a reason for."""
    if os.environ.get("RANK", "0") == "0":
        note(text)


def listing(names, most=5):
    """At most `most` of these names, sorted and safe to print, and how many more there are."""
    names = sorted(names)
    text = ", ".join(name[:200] for name in names[:most])  # a damaged file may have endless names
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return printable(text)


def wrapped(text, indent=2):
    """Text in lines of 80 columns, all but the first indented. Paths and flags stay whole, to be copied."""
    return textwrap.fill(text, 80, subsequent_indent=" " * indent, break_on_hyphens=False,
                         break_long_words=False)


def count_of(n, noun):
    """2, "rows" -> "2 rows"."""
    return f"{n:,} {noun if n != 1 else noun.removesuffix('s')}"


def is_or_are(n):
    return "is" if n == 1 else "are"


# ---------------- files: safe reads and writes, which train.py uses for runs and checkpoints

def check_is_file(path):
    """Raises a ValueError for a folder, pipe or device (reading may never end), and for git-lfs' pointer."""
    if not os.path.exists(path):
        return
    if not os.path.isfile(path):
        raise ValueError(f"{path}: not a file, but a folder, a pipe or a device")
    with open(path, "rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            raise ValueError(f"{path}: a pointer of git-lfs, and not the file itself: git lfs pull")


def read_json(path, optional=False):
    """Reads a JSON object, {} if it is optional and not there. A ValueError names the file and the place."""
    if optional and not path.exists():
        return {}
    check_is_file(path)
    try:
        value = json.loads(Path(path).read_text("utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file: whoever copied the folder has to copy it, too") from error
    except (ValueError, RecursionError) as error:  # endless brackets are a RecursionError
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


@contextlib.contextmanager
def writing(path, what, done="written"):
    """Adds the path, and what was not done, to an OSError: that of a full disk or of fsync has neither."""
    try:
        yield
    except OSError as error:
        advice = ": free some disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise OSError(f"{path}: {what} not {done}: {error.strerror or error}{advice}") from error


# How a file system says that it has no locks (Lustre, some NFS), or no sync of folders (FUSE, SMB).
UNSUPPORTED = errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL


@contextlib.contextmanager
def where_supported(consequence):
    """For optional safety operations (fsync, locks). If the file system has none, prints one note."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        note_once(f"{consequence} ({error.strerror})")


def sync(path):
    kind = "folders" if path.is_dir() else "files"
    with (writing(path, kind.removesuffix("s"), "synced (fsync)"),
          where_supported(f"this disk does not sync {kind}: a power cut may cost what is new")):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def rename(part, path):
    with writing(part, "folder" if part.is_dir() else "file", f"renamed to {path.name}"):
        part.rename(path)


def remove(path):
    with contextlib.suppress(OSError):
        # rmtree would wait for the writer of a pipe, and it leaves links, which a save would follow
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def remove_complete(path):
    """Removes a folder. It is renamed first, because the rest of a checkpoint must not look complete."""
    part = path.with_name(f"{path.name}.old.part")  # the next start removes what this one cannot
    remove(part)
    rename(path, part)
    remove(part)


def make_folder(path):
    with writing(path, "folder"):
        path.mkdir(parents=True, exist_ok=True)


def put_in_place(part, path, keep_older=False):
    """keep_older: a folder that is there stays, because others may be reading it."""
    for made in (*part.rglob("*"), part):
        sync(made)  # first, or a power cut could leave the new name with files that are not on the disk
    if part.is_dir() and os.path.lexists(path):
        if keep_older:
            return
        remove_complete(path)  # a folder cannot be renamed to one that has files
    rename(part, path)
    sync(path.parent)


def replace_file(path, text):
    """Writes a file, never half of it: beside its place first."""
    part = path.with_name(f"{path.name}.part")
    with writing(path, "file"):
        part.write_text(text)
        put_in_place(part, path)


def json_of(content, default=None, indent=None):
    """A value as JSON, which has no inf and no nan: they become null."""
    plain = json.loads(json.dumps(content, default=default), parse_constant=lambda name: None)
    return json.dumps(plain, indent=indent, allow_nan=False)


def write_json(path, content):
    replace_file(path, json_of(content, indent=2) + "\n")


def crc_of(path, most=math.inf):
    """The CRC-32 of a file, 2 to 3 GB/s. The file is not mapped: a bad sector would kill the process. Of a
    file with more than `most` bytes it reads blocks at even distances."""
    check_is_file(path)
    n_bytes = os.path.getsize(path)
    n_passed = max(1, math.ceil(n_bytes / most))  # of so many blocks it reads one
    crc = 0
    with open(path, "rb") as file:
        for start in range(0, n_bytes, n_passed << 18):
            file.seek(start)
            crc = zlib.crc32(file.read(1 << 18), crc)
    return crc


def with_checksum(content):
    """Adds a checksum to a JSON object. It reveals damage and edits by hand, not forgery."""
    text = json.dumps(content | {"checksum": 0}, sort_keys=True)
    return content | {"checksum": zlib.crc32(text.encode())}


# Names as safetensors has them. Weights are read in these types; U8 is for a run's own checkpoints.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.uint8: "U8", torch.int32: "I32"}


class Stored(NamedTuple):
    """Where a matrix or vector is on the disk, and what it is."""

    path: Path | None  # None: random weights
    shape: tuple
    dtype: torch.dtype
    name: str  # the tensor that has it in the file, see OLD_PREFIXES
    first_row: int = 0  # in this tensor
    stack: tuple = ()  # the shape of this tensor if it has several matrices

    @property
    def n_rows(self):
        """[E, N, D] is E * N rows of D. The rows of a vector are its numbers."""
        return math.prod(self.shape[:-1] if len(self.shape) > 1 else self.shape)


def layout_of(tensors):
    return {name: Stored(None, tuple(tensor.shape), tensor.dtype, name) for name, tensor in tensors.items()}


def write_safetensors(path, layout, tensors, checksum=None):
    """Writes pairs (name, tensor on the CPU), in any order, to the places of layout, {name: Stored}. One is
    in memory at a time: the library wants all at once. -> [size of the file, checksum(bytes, so far)]"""
    header = {"__metadata__": {"format": "pt"}}  # older transformers need the format
    places = {}  # {name: (its first byte after the header, how many it has)}
    stop = 0
    for name, stored in layout.items():
        n_bytes = math.prod(stored.shape) * stored.dtype.itemsize
        places[name] = stop, n_bytes
        entry = {"dtype": DTYPE_NAMES[stored.dtype], "shape": stored.stack or stored.shape}
        entry = header.setdefault(stored.name, entry | {"data_offsets": [stop, stop]})
        stop += n_bytes
        entry["data_offsets"][1] = stop  # a stack ends with its last matrix
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8, as the library writes them
    text = len(text).to_bytes(8, "little") + text
    crc = checksum(text) if checksum else 0
    with writing(path, "tensors"), open(path, "wb") as file:
        file.write(text)
        for name, tensor in tensors:
            data = tensor.contiguous().flatten().view(torch.uint8).numpy()  # its bytes
            start, n_bytes = places.pop(name)
            assert len(data) == n_bytes, f"{path}: {name}: another size than in the header"
            file.seek(len(text) + start)
            file.write(data)
            if checksum:
                crc = checksum(data, crc)
        assert not places, f"{path}: not written: {listing(places)}"  # a hole in a file reads as zeros
        file.flush()
        sync(path)
    return [path.stat().st_size, crc]


# ================================ from texts to rows ================================

# ---------------- chat templates and the tokenizer

# Without {% generation %}, which llama-cpp-python, tabbyAPI and others with plain jinja cannot read.
CHATML = """\
{{ bos }}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content + end_of_turn }}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# private characters: the ends of a {% generation %} block, and around the number of a call, see with_marks()
OPEN, CLOSE, MARK = "\U00104000", "\U00104001", "\U00104002"
# A template is a stranger's program: a loop of ten lines could fill the memory, or never end.
MAX_RENDERED = 50_000_000  # characters that one conversation may become
MAX_RENDER_S = 2  # seconds of CPU time that this may take
# variables that each rendering sets: --template_args and examples cannot
GIVEN_TO_TEMPLATES = "messages", "tools", "documents", "add_generation_prompt"
NAMED_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
THOUGHTS = "reasoning_content", "thinking", "reasoning"  # what data call a thought
# what other models write around a thought, at the beginning of an answer
OTHER_TAG = re.compile(r"\s*([<\[]\|?[\w:]*(?:think|thought|reason)\w*\|?[>\]])", re.IGNORECASE)
SHORT_QUESTION = {"role": "user", "content": "a"}  # for trials
SHORT_CHAT = [SHORT_QUESTION, {"role": "assistant", "content": MARK}]
THINK = "<think>", "</think>"
TODAY = datetime(2024, 7, 26)  # the date that templates see: no text depends on the day of training
# What a result gets from its model's folder: other files may be private, or about other weights.
COPIED_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)
# {name of a template: its file, where transformers has it}; the second is for examples with tools
TEMPLATE_FILES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}


class GenerationTag(jinja2.ext.Extension):
    """transformers' {% generation %} ... {% endgeneration %} becomes OPEN, the answer and CLOSE."""

    tags = frozenset(["generation"])

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        before = nodes.Output([nodes.TemplateData(OPEN)])
        after = nodes.Output([nodes.TemplateData(CLOSE)])
        return nodes.Scope([before, *body, after]).set_lineno(line)


def check_is_variable(name, where):
    if name in GIVEN_TO_TEMPLATES or name in NAMED_TOKENS:
        raise ValueError(f"{where}: a template gets {name} from each conversation, or from the tokenizer")


def read_template_args(words):
    """The words of --template_args, such as "enable_thinking=false" -> {name: value}."""
    variables = {}
    for word in words or ():
        name, equals, text = word.partition("=")
        where = f"--template_args {quoted(word)}"
        if not equals or not name.isidentifier():
            raise ValueError(f"{where}: expected a name, = and a value, such as enable_thinking=false")
        check_is_variable(name, where)
        if name in variables:
            raise ValueError(f"{where}: {name} is given twice")
        try:
            variables[name] = json.loads(text)
        except ValueError:  # it is no JSON: a text
            variables[name] = text
            # a template would take each of the first ones for true, and the last ones for a single text
            if re.fullmatch(r"(?i)true|false|none|yes|no|on|off|.*,\w+=.*", text):
                raise ValueError(f"{where}: values are JSON: true, false or null; in quotes such a word is a "
                                 "text; blanks separate several values") from None
    return variables


@contextlib.contextmanager
def errors_of(source):
    """Turns any error into a ValueError that names the source."""
    try:
        yield
    except KeyboardInterrupt:  # Ctrl-C ends the run, and not only this text
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ValueError(f"{source}{line}: {listing([str(error) or repr(error)])}") from error


@contextlib.contextmanager
def cpu_time_limit(seconds):
    """Raises a TimeoutError in the block after so much CPU time: a template may loop for ever."""

    def stop(*_):
        raise TimeoutError(f"took more than {seconds} seconds")

    # CPU time, because on a busy machine a good template may wait for seconds
    handler = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1)  # and again each second: jinja swallows some errors
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)


class Text(NamedTuple):
    """A text to train on, which becomes a document. Most examples become one, pairs two."""

    text: str | None  # None: the example is not used
    spans: list | None = None  # [(start, stop)] of the characters to train on; None: all of them
    form: str = "text"  # the format of the example, one of FORMATS
    is_chat: bool = False  # a template has written it, with BOS, EOS and the ends of turns
    turns: list = ()  # the numbers of the messages that are trained on in this text
    is_further: bool = False  # it has answers that the example's first text rewrites
    hash: int = 0  # hash_of_text() of the example's first text
    dropped: str = ""  # why the example is not used


def is_in(part, text):
    """Whether a text contains a part, or at least all of its words: templates trim, quote and escape."""
    words = re.findall(r"\w+", part)
    return part.strip() in text or all(word in text for word in words)


def with_marks(messages, tools):
    """-> (messages, tools, {marker: (what it marks, its message or None)}): copies with a marker in each name
    and in arguments. Markers show what a template keeps: prose may have the same words."""
    items = {}

    def mark(what, answer=None):
        marker = f"{MARK}{len(items)}{MARK}"
        items[marker] = what, answer
        return marker

    tools = copy.deepcopy(tools)
    for tool in tools or ():
        function = tool.get("function", tool)
        name = function.get("name", "")
        function["name"] = name + mark(f"the tool {quoted(name)}")
    messages = [copy.deepcopy(message) if "tool_calls" in message else message for message in messages]
    for i, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["name"] += mark(f"a call of the tool {quoted(function['name'])}")
            if function["arguments"]:
                function["arguments"][mark("arguments", i)] = 0
    return messages, tools, items


def read_tokenizer(folder):
    """The tokens of a model folder, with the ids of transformers -> (the library's tokenizer,
    tokenizer_config.json, {"bos_token": its text, ...} for templates, texts of special tokens)."""
    path = folder / "tokenizer.json"
    config_path = folder / "tokenizer_config.json"
    if not path.exists():
        raise ValueError(
            f"{path}: no such file: copy tokenizer*.json and chat_template.jinja of the model that this one "
            "was made of to the folder, or make it of tokenizer.model or vocab.json with transformers: "
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')")
    check_is_file(path)
    config, old, added = (read_json(file, optional=True) for file in (
        config_path, folder / "special_tokens_map.json", folder / "added_tokens.json"))
    old = {key: value for key, value in old.items() if value is not None}
    with errors_of(config_path):
        # Unlike transformers this reads the older files beside a list, too: they may be alone to name EOS
        given = old | config
        entries = config.get("added_tokens_decoder")
        if entries is None:
            given = config | old
            entries = {number: {"content": token} for token, number in added.items()}
        extra = given.get("extra_special_tokens") or []
        if isinstance(extra, dict):  # a model with pictures has {"image_token": ...}
            given = given | extra
            extra = []
        named = {}
        for key in dict.fromkeys([*NAMED_TOKENS, *given]):  # transformers' order
            value = given.get(key)
            # add_bos_token and its like are no tokens
            if value and (key in NAMED_TOKENS or (key.endswith("_token") and isinstance(value, str))):
                named[key] = text_of_token(key, value)
        extra = [*extra, *(given.get("additional_special_tokens") or [])]
        listed = [text_of_token("extra_special_tokens", token) for token in extra]
        special = list(dict.fromkeys([*named.values(), *listed]))
        entries = [tokenizers.AddedToken(**entries[number]) for number in sorted(entries, key=int)]
    with errors_of(path):
        core = tokenizers.Tokenizer.from_file(str(path))
        core.add_tokens(entries)
        known = {token.content for token in core.get_added_tokens_decoder().values()}
        core.add_special_tokens([token for token in special
                                 if token not in known and not is_ordinary(core, token)])
    return core, config, named, special


def is_ordinary(core, token):
    """Whether plain text has this token, too: pad_token may be "!", which is Llama 3's token 0."""
    if token.isalnum():
        return [piece.value for piece in core.model.tokenize(token)] == [token]
    return len(token) == 1 and token.isascii()


def text_of_token(key, token):
    text = token.get("content") if isinstance(token, dict) else token  # a dict if it has options
    if not isinstance(text, str):
        raise ValueError(f"{key}: expected text, got {quoted(token)}")
    return text


def read_template(path):
    check_is_file(path)
    if not os.path.exists(path):  # other trainers have names for templates, such as chatml
        raise ValueError(f"--chat_template {path}: no such file. Without this flag the model's own template "
                         "is used, or ChatML")
    with errors_of(f"chat template ({path})"):
        text = Path(path).read_text("utf-8-sig")
        found = from_json(text)  # of tokenizer_config.json, or of a processor
        return found.get("chat_template") if isinstance(found, dict) else found


def named_templates(found):
    """A text, or several with names, as a list or an object -> {"default": text, maybe "tool_use"}."""
    if isinstance(found, list):
        found = {str(one.get("name")): one.get("template") for one in found if isinstance(one, dict)}
    elif not isinstance(found, dict):
        found = {"default": found}
    return {"default": None} | {name: found[name] for name in TEMPLATE_FILES if name in found}


def templates_in(folder):
    """-> (the file with a folder's chat templates, {"default": text, maybe "tool_use"}), or (None, {})."""
    files = {name: folder / file for name, file in TEMPLATE_FILES.items()}
    if files["default"].exists():
        return files["default"], {name: read_template(file) for name, file in files.items() if file.exists()}
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_json(folder / name, optional=True).get("chat_template")
        if found is not None:
            return name, named_templates(found)
    return None, {}


def read_new_tokens(words):
    """The words of --add_tokens, or the lines of the one file that they name -> [token]."""
    if not words:
        return words
    where = "--add_tokens"
    tokens = words
    if len(words) == 1 and os.path.isfile(words[0]):
        where += f" {words[0]}"
        with errors_of(where):
            lines = Path(words[0]).read_text("utf-8-sig").splitlines()
        tokens = [line for line in lines if line]
        if not tokens:
            raise ValueError(f"{where}: the file is empty: expected a token a line")
    elif len(words) == 1 and words[0].endswith(".txt"):  # or a misspelled name would become a token
        raise ValueError(f"{where} {quoted(words[0])}: no such file")
    for token in tokens:
        if not token or token != token.strip():
            raise ValueError(f"{where}: {quoted(token)}: expected text without blanks around it")
    if repeated := [token for token, n in Counter(tokens).items() if n > 1]:
        raise ValueError(f"{where}: {listing(repeated)}: given more than once")
    return tokens


def add_new_tokens_(core, tokens):
    """Appends tokens -> the range of their ids. They are not special: messages may contain them."""
    known = [token for token in tokens if core.token_to_id(token) is not None]
    if known:
        raise ValueError(f"--add_tokens: {listing(known)}: already in the model's tokenizer: leave it out")
    core.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens])
    first = core.token_to_id(tokens[0]) if tokens else 0
    return range(first, first + len(tokens))


def code_of(folder):
    """The modules that auto_map names, and those that they import from. Nothing here runs them."""
    configs = [read_json(folder / name, optional=True) for name in ("config.json", "tokenizer_config.json")]
    modules = re.findall(r'"(\w+)[.]\w+"', json.dumps([config.get("auto_map") for config in configs]))
    found = {}
    for module in modules:  # the loop also visits the modules that it appends
        path = folder / f"{module}.py"
        if path not in found and path.is_file():
            found[path] = path.read_text("utf-8", "replace")
            modules += re.findall(r"^\s*from [.](\w+) import", found[path], re.MULTILINE)
    return sorted(found)


class Tokenizer:
    """The tokens and the chat template of a model folder. Main thread only: a signal stops slow templates.

    train_on           "targets", "whole", "all" or "pairs": see --train_on, and --dpo
    bos_ids, eos_ids   the ids around a plain text
    stop_ids           the ids that end an answer; unnamed_ends: those that no file of the model calls an end
    markers            texts of the tokens that templates write around turns; is_marker [V]: which ids are
    reserved           regex of what messages must not contain: the markers, but not other special tokens
    template_reads     the variables that templates look up; template_words: all names in them
    tags, thought      what is around a thought, and the part of one that prompts end in, "" if there is none
    last_words         what is cut from the end of texts: see try_last_words()
    writes_python      whether the template writes arguments of calls as Python does, unless they are texts
    thought_form       how a thought is stated that the template reads, or None: see state_thought()
    variables          what templates see beside the messages; example_variables: see for_example()
    changed            {file: its dict}: save() writes them in place of the folder's own
    made_of            all that tokens and masks depend on: it names their folder in the cache"""

    def __init__(self, folder, template_file=None, train_on="targets", template_args=None,
                 new_tokens=(), adapter_folder=None):
        self.folder = Path(folder)
        self.train_on = train_on
        self.path = self.folder / "tokenizer.json"
        core, config, self.variables, special = read_tokenizer(self.folder)
        self.example_variables = {}
        self.code = code_of(self.folder)
        outdated = ["chat_template"]  # it stands in a file of its own
        if not self.code:
            outdated.append("auto_map")
        self.changed = {}
        with errors_of(self.path):
            self.new_ids = add_new_tokens_(core, new_tokens or ())
            if new_tokens:
                self.changed[self.path.name] = json.loads(core.to_str())
                # transformers 5 would add no other tokens than those of this list; tokenizer.json has all
                outdated.append("added_tokens_decoder")
            special = self.load_core(core, config, special)
        if config.keys() & {*outdated}:
            self.changed["tokenizer_config.json"] = {
                key: value for key, value in config.items() if key not in outdated}
        self.load_templates(template_file, adapter_folder, template_args or {})
        self.try_thoughts()
        end_of_turn, written = self.try_template()
        self.last_words = self.try_last_words(end_of_turn)
        self.thought = self.thought_of_prompt()
        turn_ends = {self.eos, self.core.token_to_id(end_of_turn)} - {None}
        of_texts = {*self.bos_ids, *self.eos_ids}
        of_texts |= {self.core.token_to_id(self.variables.get(name, "")) for name in NAMED_TOKENS}
        markers = {number for number, token in special.items() if number in of_texts or token in written}
        marker_ids = sorted(markers | turn_ends)
        self.is_marker = np.zeros(1 + max(self.core.get_vocab().values()), bool)
        self.is_marker[marker_ids] = True
        self.stop_ids = self.complete_stops(turn_ends)
        self.markers = tuple(self.core.id_to_token(number) for number in marker_ids)
        # the library makes these tokens wherever their texts stand: a message could end its own turn
        self.reserved = re.compile("|".join(map(re.escape, [OPEN, CLOSE, MARK, *self.markers])))
        self.made_of = (self.core.to_str(), self.bos_ids, self.eos_ids, marker_ids, self.variables,
                        self.template_texts, train_on)

    def load_core(self, core, config, names):
        """Completes the library's tokenizer -> {id: text} of its special tokens."""
        # the file has the truncation and padding that its author used last
        core.no_truncation()
        core.no_padding()
        added = core.get_added_tokens_decoder()
        self.added = tuple(token.content for token in added.values())
        special = {number: token for number, token in added.items()
                   if (token.special or token.content in names) and not is_ordinary(core, token.content)}
        # Llama 2 normalizes its special tokens and so finds them only after a blank (transformers #23833)
        as_written = [tokenizers.AddedToken(**(token.__getstate__() | {"normalized": False}))
                      for token in special.values()]
        core.add_special_tokens(as_written)
        self.core = core
        # what tokenizer.json puts around a text: only a trial tells
        encoded = core.encode("a")
        in_text = [i for i, is_added in enumerate(encoded.special_tokens_mask) if not is_added]
        self.bos_ids = encoded.ids[: in_text[0]]
        self.eos_ids = encoded.ids[in_text[-1] + 1 :]
        core.post_processor = None  # some leave blanks out of the offsets, and so out of the masks
        # It may lack the BOS that tokenizer_config.json asks for, and EOS, by which a text ends.
        bos = core.token_to_id(self.variables.get("bos_token", ""))
        if config.get("add_bos_token") and bos is not None and not self.bos_ids:
            self.bos_ids = [bos]
        self.eos = core.token_to_id(self.variables.get("eos_token", ""))
        if self.eos is not None and self.eos_ids[-1:] != [self.eos]:
            self.eos_ids.append(self.eos)
        # Qwen's base models have both: there EOS, <|endoftext|>, ends a text and no turn.
        self.default_end = self.variables.get("eos_token", "")
        if "<|im_end|>" in self.added:
            self.default_end = "<|im_end|>"
        return {number: token.content for number, token in special.items()}

    def complete_stops(self, turn_ends):
        """Adds ids that end a turn to generation_config.json -> all ids. Muse Glimmer's end is no EOS."""
        generation = read_json(self.folder / "generation_config.json", optional=True)
        config = read_json(self.folder / "config.json", optional=True)
        config = (config.get("text_config") or {}) | config
        ids = generation.get("eos_token_id") or config.get("eos_token_id") or []
        ids = {one for one in np.atleast_1d(ids).tolist() if isinstance(one, int)}
        self.unnamed_ends = turn_ends - ids - {self.eos}
        ids |= turn_ends
        # also if the base has no such file: a later merge reads final/, and no config.json
        self.changed["generation_config.json"] = generation | {"eos_token_id": sorted(ids)}
        return ids

    def load_templates(self, template_file, adapter_folder, template_args):
        """Compiles --chat_template, or else the adapter's templates, or else the model's, or else ChatML."""
        where = template_file
        found = named_templates(read_template(template_file)) if template_file else {}
        for folder in (adapter_folder, self.folder):  # an adapter may have another one than its base
            if folder and not found:
                where, found = templates_in(Path(folder))
        self.has_template = bool(found)  # its own
        self.source = f"chat template ({where})"
        if self.folder == TINY and not template_file and not adapter_folder:
            self.source += " of the built-in model; your own --model will use its own"
        if not found:
            self.source = "ChatML (the model has no template)"
            # as text, so that the file that save() writes means the same to everyone
            bos = self.core.decode(self.bos_ids, skip_special_tokens=False)
            template = CHATML.replace("end_of_turn", json.dumps(self.default_end, ensure_ascii=False))
            found = {"default": template.replace("bos", json.dumps(bos, ensure_ascii=False), 1)}
        self.writes_python = False  # until trials tell
        self.last_words = ""
        with errors_of(self.source), cpu_time_limit(MAX_RENDER_S):
            self.compile_templates(found, template_args)

    def compile_templates(self, named, template_args):
        """named: {name: text}. Compiled in jinja's sandbox, with transformers' settings and functions."""
        version = [int(number) for number in re.findall(r"\d+", jinja2.__version__)]
        if version < [3, 1, 6]:  # CVE-2025-27516: the filter |attr reached format(), and so any object
            raise ValueError(f"templates escape from jinja2 {jinja2.__version__}: pip install -U jinja2")

        def raise_exception(message):
            raise jinja2.TemplateError(message)

        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"])
        env.globals |= {"raise_exception": raise_exception, "strftime_now": TODAY.strftime}
        env.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # jinja's own escapes HTML
        self.template_reads = set()
        self.template_words = set()
        for text in named.values():
            if not isinstance(text, str) or not text.strip():
                raise ValueError("expected text; --chat_template FILE replaces it")
            tree = env.parse(text)
            self.template_reads |= jinja2.meta.find_undeclared_variables(tree)
            self.template_words |= {node.attr for node in tree.find_all(nodes.Getattr)}
            self.template_words |= {node.value for node in tree.find_all(nodes.Const)
                                    if isinstance(node.value, str)}
        if unread := template_args.keys() - self.template_reads:  # a misspelled one would change nothing
            others = [name for name in self.template_reads
                      if name not in GIVEN_TO_TEMPLATES and name not in NAMED_TOKENS]
            raise ValueError(f"does not read {listing(unread)} of --template_args; what it reads beside "
                             f"the conversation: {listing(others) or 'nothing'}")
        # as defaults, so that apply_chat_template(enable_thinking=True) counts; jinja reads Python's values
        default = "{%- if NAME is not defined %}{%- set NAME = VALUE %}{%- endif %}\n"
        defaults = ""
        for name, value in sorted(template_args.items()):
            defaults += default.replace("NAME", name).replace("VALUE", repr(value))
        self.template_texts = {TEMPLATE_FILES[name]: defaults + text for name, text in named.items()}
        self.templates = {name: env.from_string(defaults + text) for name, text in named.items()}

    def try_template(self):
        """-> (the token after an answer, as text; the templates' texts and all that they write in trials,
        without the tokens that they write inside of answers alone, such as <think> or [TOOL_CALLS])"""
        end = self.default_end
        written = "".join(self.template_texts.values())
        # Phi's template has '<|' + role + '|>': only a trial with each role shows these tokens
        for first in (*([{"role": role, "content": "a"}] for role in ROLES), []):
            with contextlib.suppress(ValueError):  # a template may want other messages
                text, _ = self.render(first + SHORT_CHAT)
                written += text
                _, is_there, behind = text.rpartition(MARK)
                if is_there:
                    end = max(filter(behind.lstrip().startswith, self.added), key=len, default=end)
        call = {"type": "function", "id": "a" * 9, "function": {"name": "a", "arguments": {"a": 0}}}
        answers = self.try_answer(self.state_thought("field", MARK, MARK))
        called = self.try_answer({"content": "", "tool_calls": [call]}).rstrip()
        self.writes_python = "{'a': 0}" in called  # where JSON is meant
        answers += called
        with contextlib.suppress(ValueError):
            prompt, _ = self.render([SHORT_QUESTION], generation_prompt=True)
            prompt = self.end_of_prompt.sub("", prompt)
            for token in self.added:
                if token in answers and token not in prompt and not answers.endswith(token):
                    written = written.replace(token, "")
        return end, written

    def try_last_words(self, end_of_turn):
        """What the template writes behind the last answer alone: the first one of Llama 3 Instruct ends each
        text with the header of an assistant, which no model should learn to write."""
        with contextlib.suppress(ValueError):
            last, followed = (self.render(SHORT_CHAT + more)[0].rpartition(MARK)[2]
                              for more in ([], [SHORT_QUESTION]))
            if not followed.startswith(last):
                return last.partition(end_of_turn)[2]
        return ""

    def try_answer(self, answer):
        """What the template writes behind a question. "" if it wants other messages."""
        question = f"{MARK}question"
        messages = [{"role": "user", "content": question}, {"role": "assistant", **answer}]
        with contextlib.suppress(ValueError):
            _, text, _ = self.render_calls(messages, None)
            return text.rpartition(question)[2]
        return ""

    def try_thoughts(self):
        """Finds the tags around a thought, and the first form of one that the template reads."""
        thought = f"{MARK}thought"
        said = f"{MARK}said"
        self.tags = THINK
        text = self.try_answer(self.state_thought("field", thought, said))
        if close := re.search(rf"{thought}\s*(\S?/\w+\S)", text):  # also [/THINK]
            tags = close[1].replace("/", ""), close[1]
            if text[: close.start()].rstrip().endswith(tags[0]):
                self.tags = tags
        opening, closing = map(re.escape, self.tags)
        self.empty_thought = re.compile(rf"{opening}\s*{closing}\n*")
        # the prompt may have its first tag
        self.empty_in_answer = re.compile(rf"({opening})?\s*{closing}\n*")
        self.end_of_prompt = re.compile(rf"({opening}\n?)\s*({closing}\s*)?\Z")
        self.thought_form = None
        if re.search(f"{thought}.*{said}", text, re.DOTALL):
            self.thought_form = "field"
        elif any(tag in "".join(self.template_texts.values()) for tag in self.tags):  # it knows thoughts
            in_tags = re.compile(rf"{opening}\s*{thought}\s*{closing}.*{said}", re.DOTALL)
            for form in "tags", "end":
                text = self.try_answer(self.state_thought(form, thought, said))
                if in_tags.search(text) and text.count(self.tags[0]) == text.count(self.tags[1]) == 1:
                    self.thought_form = form
                    break

    def state_thought(self, form, thought, said):
        """The keys of an answer with a thought in a "field", or in the content: between "tags", or (R1's) up
        to the "end" tag alone."""
        if form == "field":
            return {"content": said} | dict.fromkeys(THOUGHTS, thought)
        opening, closing = self.tags
        beginning = f"{opening}\n" if form == "tags" else ""
        return {"content": f"{beginning}{thought}\n{closing}\n\n{said}"}

    def move_thought(self, message):
        """An answer with its thought where the template reads one, if it reads one."""
        if message["role"] != "assistant" or not self.thought_form:
            return message
        said = message.get("content") or ""
        thought = message.get("reasoning_content") or ""
        if not thought.strip():
            opening, closing = self.tags if self.tags[1] in said else THINK
            before, is_there, said = said.partition(closing)
            thought = before.lstrip().removeprefix(opening).strip("\n")
            said = said.lstrip("\n")
            # if the prompt opens the thought, its blanks have to be the prompt's
            is_in_place = self.thought_form == "tags" and self.tags[0] in before and not self.thought
            if is_in_place or not is_there or opening in thought:  # or no thought, or words before it
                return message
        moved = message | self.state_thought(self.thought_form, thought, said)
        if self.thought_form != "field":
            for key in THOUGHTS:
                dict.pop(moved, key, None)
        return moved

    def thought_of_prompt(self):
        """How prompts end: in <think>, in an empty thought (the model is not to think), or in neither: ""."""
        with contextlib.suppress(ValueError):  # a template may insist on a question before an answer
            prompt, _ = self.render([SHORT_QUESTION], generation_prompt=True)
            if thought := self.end_of_prompt.search(prompt):
                return thought[0]
        return ""

    def for_example(self, variables):
        """A copy with the variables of one example, which count before those of --template_args."""
        if not variables:
            return self
        for name in variables:
            check_is_variable(name, "'chat_template_kwargs'")
        tokenizer = copy.copy(self)
        tokenizer.example_variables = {
            name: value for name, value in variables.items() if name in self.template_reads}
        tokenizer.thought = tokenizer.thought_of_prompt()
        return tokenizer

    def render(self, messages, tools=None, generation_prompt=False):
        """Messages -> (text, [(start, stop) of each generation block]). ValueError if the template raises."""
        rendered = ""
        template = self.templates["default"]
        if tools:
            template = self.templates.get("tool_use", template)
        with errors_of(self.source), cpu_time_limit(MAX_RENDER_S):
            variables = self.variables | self.example_variables
            outputs = template.generate(messages=messages, tools=tools, documents=None,
                                        add_generation_prompt=generation_prompt, **variables)
            for output in outputs:
                rendered += output
                if len(rendered) > MAX_RENDERED:
                    raise ValueError(f"wrote more than {MAX_RENDERED} characters")
            rendered = rendered.replace(CLOSE + OPEN, "")  # an answer and its end may have two blocks
            text, *blocks = rendered.split(OPEN)  # each block is an answer, CLOSE, and what follows it
            if CLOSE in text or any(block.count(CLOSE) != 1 for block in blocks):
                raise ValueError("{% generation %} blocks are nested or not closed, or a message contains "
                                 "U+104000 or U+104001, which mark them")
        spans = []
        for block in blocks:
            answer, _, rest = block.partition(CLOSE)
            spans.append((len(text), len(text) + len(answer)))
            text += answer + rest
        if not generation_prompt:
            text = text.removesuffix(self.last_words)
        return text, spans

    def render_calls(self, messages, tools):
        """Messages that may call tools -> (the messages as the template accepts them, text, spans)."""
        if not any("tool_calls" in message for message in messages):
            return messages, *self.render(messages, tools)
        problem = None
        ways = [True] if self.writes_python else [False, True]
        for as_text in ways:  # some templates want arguments as JSON, not as objects
            if as_text:
                messages = copy.deepcopy(messages)
                for function in [call["function"] for one in messages for call in one.get("tool_calls", ())]:
                    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            # a call has no content: some templates read it, if only to see that it is none, or join it
            for content in {}, {"content": None}, {"content": ""}:
                variant = [one if "content" in one else one | content for one in messages]
                try:
                    return variant, *self.render(variant, tools)
                except ValueError as error:
                    problem = error
        raise problem

    def conversation(self, messages, tools=None, report=None, is_completion=False):
        """Messages -> [Text]: up to the last answer, then one for each answer that loses a thought there.
        is_completion: an answer that is not trained on is the beginning of one that follows it."""
        report = report or FileReport()
        texts = texts_in([messages, tools, self.example_variables])
        spelled = next(filter(None, map(self.reserved.search, texts)), None)
        if spelled:
            return [Text(None, dropped=f"spell a special token, {spelled[0]}: dropped")]
        joined = join_prefill(messages)
        if is_completion:
            messages = joined
        elif joined is not messages:
            report.note("answers follow at once on an answer that is not trained on, and are turns of their "
                        "own: a prompt that ends in an answer, and its completion, are one turn")
        messages = [self.move_thought(message) for message in messages]
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [i for i in turns if is_trained(messages[i])]
        if self.train_on != "all":
            silent = [i for i in trained if self.says_nothing(messages[i], report)]
            if silent == trained and (silent or self.train_on == "pairs"):
                return [Text(None, dropped=NOTHING_SAID)]
            trained = [i for i in trained if i not in silent]
        if turns and self.train_on != "all":
            # what follows the last answer trains nothing, and a question makes templates rewrite that answer
            messages = messages[: turns[-1] + 1]
        accepted, text, spans = self.render_calls(messages, tools)
        if self.train_on == "all":
            documents = [Text(text, None, turns=turns)]
        elif spans:
            for i, (start, stop) in enumerate(spans):
                empty = self.empty_in_answer.match(text, start, stop)
                if empty and self.thought.endswith(empty[0]):  # the prompt has it: the model never says it
                    spans[i] = empty.end(), stop
            if trained != turns:  # else a template may also have two blocks in a turn, or none in some
                if len(spans) != len(turns):
                    raise ValueError(f"{len(spans)} generation blocks, {len(turns)} turns, some of weight 0")
                spans = [span for turn, span in zip(turns, spans) if turn in trained]
            documents = [Text(text, spans, turns=trained)]
        else:  # a template without generation blocks, as most models have
            documents = self.delimit_by_prefix(accepted, tools, text, trained)
        self.check_complete(messages, tools, documents, report)
        if self.train_on == "all":
            return [behind_prefill(document) for document in documents]
        n_spans = sum(len(document.spans) for document in documents)
        if trained and not n_spans:
            if trained == [0]:
                raise ValueError(f"{self.source}: an answer without a question before it; give a plain text "
                                 "as 'text'")
            raise ValueError(f"{self.source}: cannot delimit any assistant turn; put {{% generation %}} "
                             "... {% endgeneration %} around what the assistant says")
        report.note("assistant turns are not trained on, because the template changes them in later turns or "
                    "their start and end cannot be found", max(0, len(trained) - n_spans))
        self.note_thoughts(documents, report)
        return [behind_prefill(document) for document in documents]

    def says_nothing(self, message, report):
        """Whether an answer would train nothing but the end of a turn. Counts what it has instead."""
        opening, closing = self.tags
        content = message.get("content") or ""
        thought, _, said = content.rpartition(closing)
        said, is_cut, _ = said.replace(MARK, "").partition(opening)
        report.note(f"answers begin a thought that never ends: {opening} without {closing}", bool(is_cut))
        behind_prompt = content.rpartition(MARK)[2]
        if "tool_calls" in message or (said.strip() and behind_prompt.strip()):
            return False
        thought = thought.replace(opening, "") + message.get("reasoning_content", "")
        is_thought = bool(thought.strip()) and not said.strip()
        report.note("answers are a thought with nothing behind it: not trained on", is_thought)
        report.note("answers are empty: not trained on", not is_thought and not is_cut)
        return True

    def note_thoughts(self, documents, report):
        """Counts what would teach a model to think otherwise than it does."""
        opening, closing = self.tags
        opens = self.thought and closing not in self.thought
        forgets = "training on them teaches the model to stop reasoning in its default mode"
        if "enable_thinking" in self.template_reads:
            forgets += "; --template_args enable_thinking=false puts the empty thought into the prompt"
        for text, (start, stop) in [(one.text, span) for one in documents for span in one.spans]:
            if MARK in text[start:stop]:  # the prompt says how it begins
                continue
            answer = self.reserved.sub("", text[start:stop])
            if text[max(0, start - 99) : start].rstrip().endswith(opening):  # the prompt has it
                answer = opening + answer
            report.note(f"answers begin with an empty thought: {forgets}",
                        bool(self.empty_in_answer.match(answer)))
            report.note(f"answers have no reasoning although the prompt opens a thought: {forgets}",
                        bool(opens and not answer.lstrip().startswith(opening)))
            report.note("answers have a thought although their prompt ends in an empty one, as it does for a "
                        "model that is not to think", closing in self.thought and closing in answer)
            report.note(f"answers have {closing} more than once: the model learns to think in its answer",
                        answer.count(closing) > 1)
            said = answer.rpartition(closing)[2]
            if self.thought_form and (tag := OTHER_TAG.match(said)):
                report.note(f"answers begin with {tag[1]}, which is text: the template's thoughts are in "
                            f"{opening}")

    def check_complete(self, messages, tools, documents, report):
        """Notes what the template leaves out of answers. A ValueError if that is a question or a tool."""
        *marked, items = with_marks(messages, tools)
        lost = []
        with contextlib.suppress(ValueError):  # the template has looked at what it objects to
            if items:
                _, text, _ = self.render_calls(*marked)
                lost = [item for marker, item in items.items() if marker not in text]
        for what, answer in lost:
            if answer is None:  # a name
                raise ValueError(f"{self.source}: leaves out {what}")
        for message in messages:
            content = message.get("content") or ""
            if message["role"] != "assistant" and not is_in(content, documents[0].text):
                what = f"the {message['role']} message {quoted(content[:200])}"
                raise ValueError(f"{self.source}: leaves out {what} where an answer follows")
        for document in documents:
            for i in document.turns:
                opening, closing = self.tags
                thought, _, content = (messages[i].get("content") or "").rpartition(closing)
                said = {
                    "content": content,
                    "thought in content": thought.replace(opening, ""),
                    "thought": messages[i].get("reasoning_content", ""),
                }
                left_out = [what for what, part in said.items() if not is_in(part, document.text)]
                for what in [*left_out, *[what for what, answer in lost if answer == i]]:
                    report.note(f"answers lose their {what}: the chat template leaves it out")

    def delimit_by_prefix(self, messages, tools, text, turns):
        """Finds the spans of turns -> [Text]. text: the whole conversation, the first document. Qwen3 drops
        the thought T1 of an answer A1 once there is a second answer, which makes two documents:

            whole conversation    Q1 A1 Q2 T2 A2
            up to A2              Q1 A1 Q2 T2 A2     the whole begins with it: T2 A2 is a span there
            up to A1              Q1 T1 A1           the whole does not begin with it: one more document

        An answer that loses only an empty thought is trained in the whole: a fifth of the tokens."""
        documents = [Text(text, [], turns=[])]
        for i in reversed(turns):  # a document that a turn adds may begin with turns before it
            turn = self.render_turn(messages, tools, i)
            if turn is None:
                continue
            span = turn.spans[0]
            fitting = next((document for document in documents if document.text.startswith(turn.text)), None)
            if not fitting and (span := self.span_in_place(text, turn)):
                fitting = documents[0]
            if fitting:
                fitting.spans.append(span)
                fitting.turns.append(i)
            elif self.train_on == "targets":
                documents.append(turn)
        return documents

    def span_in_place(self, text, turn):
        """The span of an answer in the whole conversation, if its own text has but some more empty thoughts,
        or None. An answer behind the result of a tool has several before it under Qwen3.5's template."""
        start, stop = turn.spans[0]
        thought = self.empty_in_answer.match(turn.text, start, stop)
        if thought:
            start = thought.end()
        if self.empty_thought.search(turn.text, start, stop):
            return None
        place = 0
        for i, piece in enumerate(self.empty_thought.split(turn.text[:stop])):
            if i and (kept := self.empty_thought.match(text, place)):
                place = kept.end()
            if not text.startswith(piece, place):
                return None
            place += len(piece)
        return place - (stop - start), place

    def render_turn(self, messages, tools, i):
        """The conversation up to turn i, with its span. None if the template changes the prompt later."""
        with contextlib.suppress(ValueError):  # a template may insist on a question before an answer
            prompt, _ = self.render(messages[:i], tools, generation_prompt=True)
            text, _ = self.render(messages[: i + 1], tools)
            stop = len(text)
            if text.rstrip().endswith(self.markers):
                stop = len(text.rstrip())  # generation stops before the newline after the turn
            starts = [len(prompt)]
            if thought := self.end_of_prompt.search(prompt):
                # small Qwen3.5 models drop the empty thought of the prompt, DeepSeek's distilled ones any
                starts += [thought.end(1), thought.start()]
            for start in starts:
                if text.startswith(prompt[:start]):
                    return Text(text, [(start, stop)], turns=[i])
        return None

    def encode(self, texts, report=None):
        """[Text] -> yields (ids [n] int32, supervised [n] bool). Adds BOS and EOS to plain texts without."""
        report = report or FileReport()
        with errors_of(self.path):
            encodings = self.core.encode_batch([one.text for one in texts], add_special_tokens=False)
        for one, encoding in zip(texts, encodings):
            ids = encoding.ids
            bos = []
            eos = []
            if not one.is_chat:  # a template writes its own, and some models have none
                if ids[: len(self.bos_ids)] != self.bos_ids:
                    bos = self.bos_ids
                if self.eos is None or not one.text.rstrip().endswith(self.variables["eos_token"]):
                    eos = self.eos_ids
            mask = np.ones(len(ids), bool)
            if one.spans is not None and self.train_on != "all":
                mask, merged = tokens_in(encoding, one.spans, self.is_marker)
                # an empty thought behind an open one of the prompt has a note of its own: note_thoughts()
                merged = [start for start in merged
                          if not one.text[start:].lstrip().startswith(self.tags[1])]
                if one.is_chat or one.form == "prompt + completion":  # the texts of a pair begin anywhere
                    report.note("answers share a token with the end of their prompt, such as a blank between "
                                "the two: move it into the answer, because a prompt alone ends in another "
                                "token", len(merged))
            # nothing predicts BOS, and EOS is how a model learns to stop
            mask = np.concatenate([np.zeros(len(bos), bool), mask, np.ones(len(eos), bool)])
            yield np.array(bos + ids + eos, np.int32), mask

    def save(self, out):
        """Copies the folder's files, and writes the chat template that training has used."""
        with writing(out, "tokenizer"):
            for name in [*COPIED_FILES, *[path.name for path in self.code]]:
                if name in self.changed:
                    write_json(out / name, self.changed[name])
                elif (self.folder / name).is_file():
                    shutil.copyfile(self.folder / name, out / name)
            # only here: gguf-py and Ollama would read another one in tokenizer_config.json, transformers not
            for name, text in self.template_texts.items():
                (out / name).parent.mkdir(exist_ok=True)
                (out / name).write_text(text, "utf-8")

    def prompt(self, ask):
        """Token ids that ask for a continuation of a text (str), or for the answer to messages (list)."""
        bos = self.bos_ids
        text = ask
        if isinstance(ask, list):
            bos = []  # the template writes it
            text, _ = self.render(ask, generation_prompt=True)
        with errors_of(self.path):
            ids = bos + self.core.encode(text, add_special_tokens=False).ids
        if not ids:
            raise ValueError(f"{self.source}: makes no token of the question")
        return ids

    def text_of(self, ids):
        """The text of ids that a model has generated, with its own special tokens and without markers."""
        # a model may have more rows than there are tokens
        ids = [number for number in ids if number >= len(self.is_marker) or not self.is_marker[number]]
        return self.core.decode(ids, skip_special_tokens=False)


def join_prefill(messages):
    """Joins an answer that the prompt begins and the completion ends. MARK is between the two."""
    last = next((i for i, message in enumerate(messages)
                 if is_answer(message) and is_trained(message)), 0)
    first = last
    while first and messages[first - 1]["role"] == "assistant" and "tool_calls" not in messages[first - 1]:
        first -= 1
    if first == last:
        return messages
    joined = {}
    for message in messages[first : last + 1]:
        joined |= {key: value for key, value in message.items() if key not in TRAINED_KEYS}
    begin = [message.get("content") or "" for message in messages[first:last]]
    joined["content"] = "".join([*begin, MARK, messages[last].get("content") or ""])
    return [*messages[:first], joined, *messages[last + 1 :]]


def behind_prefill(document):
    """Takes MARK out of a document, and out of its spans what the prompt has before MARK."""
    text = document.text
    if not text or MARK not in text:
        return document
    seam = text.index(MARK)
    spans = None if document.spans is None else []
    for start, stop in document.spans or ():
        first = seam if start <= seam < stop else start
        spans.append((len(text[:first].replace(MARK, "")), len(text[:stop].replace(MARK, ""))))
    return document._replace(text=text.replace(MARK, ""), spans=spans)


def tokens_in(encoding, spans, is_marker):
    """-> (boolean mask of the tokens that overlap a span, the starts of spans that begin within a token)"""
    ids = encoding.ids
    offsets = encoding.offsets
    mask = np.zeros(len(ids), bool)
    merged = []
    for start, stop in spans:
        # a character may be in no token (a blank that a normalizer drops) or in several (an emoji)
        first = bisect.bisect_right(offsets, start, key=lambda token: token[1])
        last = bisect.bisect_left(offsets, stop, key=lambda token: token[0])
        # this token began before the span: a marker that swallowed blanks (lstrip), or there is no answer
        if first < last and offsets[first][0] < start and (is_marker[ids[first]] or start == stop):
            first += 1
        if first < last and offsets[first][0] < start:
            merged.append(start)
        mask[first:last] = True
    return mask, merged


# ---------------- examples

PAIR = "chosen + rejected"
# {format: the keys that it needs}. The first that fits counts: pairs may have messages.
FORMATS = {
    PAIR: ["chosen", "rejected"],
    "messages": ["messages"],
    "conversations": ["conversations"],
    "prompt + completion": ["prompt", "completion"],
    "instruction + output": ["instruction", "output"],
    "text": ["text"],
}
TOOLS_KEYS = "tools", "functions"  # OpenAI called tools functions first
# what may stand beside messages; a prompt in text beside one of these begins a conversation
OF_CHATS = "system", *TOOLS_KEYS, "chat_template_kwargs"
OF_CONVERSATIONS = *OF_CHATS, "history"
KEYS = {key: None for needs in [*FORMATS.values(), OF_CONVERSATIONS, ["input"]] for key in needs}
QUESTION_KEYS = ["question", "query", "instruction", "input"]  # Orca's and Alpaca's, for a pair's prompt
MAY_BE_CHATS = {"prompt", "completion", *FORMATS[PAIR]}  # the other keys have texts
# {a key: words in the names that it has elsewhere}, for advice
COLUMN_NAMES = {
    "chosen": "chosen preferred accepted winner positive better good pos j".split(),
    "rejected": "rejected dispreferred unpreferred loser negative worse bad neg k".split(),
    "instruction": "question query problem prompt user human q input request task instruction title".split(),
    "output": "answer answers response completion assistant gpt reply solution generation target a output "
              "chosen".split(),
    "input": ["context", "passage", "document"],
    "text": ["content", "body", "document", "article", "code", "passage"],
}
COLUMN_NAMES["completion"] = COLUMN_NAMES["output"]
METADATA = re.compile(r"(^|[\W_])(id|model|name|score|source|type)$", re.IGNORECASE)
ROLES = "system", "developer", "user", "assistant", "tool"
# what ShareGPT, LLaMA-Factory, ms-swift, Gemini, LangChain and OpenAI's first calls of functions call them
OTHER_ROLES = {
    "human": "user", "gpt": "assistant", "observation": "tool", "function": "tool", "tool_response": "tool",
    "function_call": "assistant", "tool_call": "assistant", "model": "assistant", "ai": "assistant",
}
CALL_ROLES = "function_call", "tool_call"  # whose content is a call
# with one of these, an object that has a role is a message
SAID = {"content", "tool_calls", "function_call", "refusal"}
# whether an answer is trained on, to OpenAI, ms-swift, axolotl, verl, Megatron and LLaMA-Factory
TRAINED_KEYS = "weight", "loss", "train", "trainable", "training", "loss_mask", "loss_weight"
# TRL's and LLaMA-Factory's keys of unpaired preferences, true or false: a number in one is a class
LABELS = "label", "kto_tag"
# the arguments of a call, in OpenAI's, LangChain's, Llama's and Anthropic's files
ARGUMENTS = "arguments", "args", "parameters", "input"
CHECKED_KEYS = *TRAINED_KEYS, "tool_calls", "function_call"  # check_message() has other keys for them
EMPTY = None, "", [], {}  # values that say nothing
TEXT_PARTS = "text", "input_text", "output_text", "refusal"  # the types of OpenAI's parts that are text
WITH_NULLS = "arguments", "default", "const"  # in these a null means something
# How a turn begins, in chat templates and in prompts (guanaco has all on a line). No alternative begins with
# ^ or \b, which would make the search five times slower. Names are bounded, or it would take quadratic time.
TURN = re.compile(
    r"<[|\uff5c](?i:\w{0,30}(im_start|header|turn|role|user|assistant)\w{0,30}|start)[|\uff5c]?>|"
    r"\[INST\]|<start_of_turn>|### ?(Response|Assistant|Output):|A((?<!\wA)SSISTANT|(?<=^A)ssistant):",
    re.MULTILINE)
# how a chat begins that JSON or Python has written into a text
CHAT_AS_TEXT = re.compile(r"\s*[\[{][^}]*['\"](role|from)['\"]: ?['\"](system|user|human|gpt)")
SCORE = re.compile("score|rating|reward|grade", re.IGNORECASE)
MEDIUM = re.compile("(image|video|audio)s?", re.IGNORECASE)
TEXT_ONLY = "oomph reads text only: leave such rows out of the file"


class Row(dict):
    """A JSON object that notes which of its keys are looked at, by this file or by a template. What nobody
    has looked at is listed, see unread_in(). A copy notes in the same place; `in`, keys() and dict(row) note
    nothing."""

    def __init__(self, items=(), looked_at=None):
        super().__init__(items)
        self._looked_at = set() if looked_at is None else looked_at

    def __or__(self, other):
        return Row(super().__or__(other), self._looked_at)

    def __deepcopy__(self, memo):
        return Row(copy.deepcopy(dict(self), memo), self._looked_at)


def noting(method):
    """A method of dict that notes the key that it gets, or all of them: json.dumps() calls items()."""
    def noting_method(row, *args):
        if args:
            row._looked_at.add(args[0])
        else:
            row._looked_at.update(row)
        return method(row, *args)

    return noting_method


for name in ("__getitem__", "get", "pop", "items", "values", "__repr__"):
    setattr(Row, name, noting(getattr(dict, name)))


def row_of_pairs(pairs):
    """For json.loads(), which would keep the last value of a key alone."""
    row = Row(pairs)
    if len(row) < len(pairs):
        (name, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {quoted(name)} twice")
    return row


def unread_in(value, path=""):
    """Yields the paths of the keys that nobody has looked at, and whose values say something."""
    if isinstance(value, list):
        for item in value:
            yield from unread_in(item, path)
    elif isinstance(value, Row):
        for key, item in dict.items(value):
            name = f"{path}.{key}" if path else key
            if key in value._looked_at:
                yield from unread_in(item, name)
            elif item not in EMPTY:
                yield name


def texts_in(value):
    """Yields the keys and texts in a value. In a Row this notes nothing."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)
    elif isinstance(value, dict):
        for key, item in dict.items(value):
            yield key
            yield from texts_in(item)


def parse_example(given, tokenizer, columns=(), report=None):
    """An example, a dict or a line of JSON, -> [Text], none if it is dropped and counted.
    columns: [(column, the key that it stands for)]."""
    report = report or FileReport()
    form = "JSON"  # for the message, until the format is known
    try:
        row = json.loads(given, object_pairs_hook=row_of_pairs) if isinstance(given, str) else given
        form = "example"
        if isinstance(row, str):
            row = Row({"text": row})
        elif are_messages(row):
            row = Row({"messages": row})
        if not isinstance(row, dict):
            raise ValueError(f"expected an object with {' or '.join(FORMATS)}; got {quoted(row)}")
        if not isinstance(row, Row):  # of a table, which has a cell for each key at every depth, too
            row = Row((key, without_nulls(value)) for key, value in row.items())
        nulls = [key for key, value in dict.items(row) if value is None]
        row = from_openai(rename_columns(row, columns, report))
        form = format_of(row, columns, tokenizer.train_on == "pairs", nulls)
        check_marks(row, form, report)
        check_is_text(row, form)
        if form in (PAIR, "prompt + completion"):
            keys = FORMATS[PAIR] if form == PAIR else ["completion"]
            prompt, answers = read_answers(row, keys)
            if isinstance(prompt, str):
                texts = [Text(prompt + answer, [(len(prompt), len(prompt + answer))], form)
                         for answer in answers]
            else:
                texts = [one for answer in answers
                         for one in read_chat(row, prompt + answer, form, tokenizer, report)]
        elif form == "text":
            texts = [Text(text_in(row, "text"))]
        else:
            texts = read_chat(row, messages_of(row, form), form, tokenizer, report)
        for path in sorted({*unread_in(row)}):
            if path in report.unread or len(report.unread) < MAX_UNREAD:
                report.unread[path] = report.unread.get(path, 0) + 1
        # what is trained of plain texts
        plain = [one.text[one.spans[0][0] :] if one.spans else one.text for one in texts if not one.is_chat]
        if any(has_turns(text, tokenizer) for text in plain):
            report.note("texts contain turns of a rendered chat, whose questions are trained on, too; give "
                        "'messages' instead, or a prompt and a completion")
        if not all(tokenizer.reserved.sub("", text).strip() for text in plain):
            texts = [Text(None, form=form, dropped=NOTHING_SAID)]
        # each raises if there is half a surrogate pair, which JSON can spell and the tokenizer cannot read
        hashes = [hash_of_text(one.text or "") for one in texts]
        # the two answers of a pair are on one side of --eval_data
        return [one._replace(hash=hashes[0]) for one in texts]
    except Exception as error:  # values may have any type, or endless brackets
        raise ValueError(printable(f"not valid {form}: {str(error) or type(error).__name__}")) from error


def rename_columns(row, columns, report):
    """A row with the keys of --columns in place of its columns, and without keys whose value is null."""
    # a table has a cell for each column in every row: null stands for a key that is not there
    row = Row((key, value) for key, value in dict.items(row) if value is not None)
    present = {column: key for column, key in columns if column in row}
    renamed = {key: row.pop(column) for column, key in present.items()}
    if len(renamed) < len(present):
        raise ValueError(f"--columns gives one key to two columns of this row: {', '.join(present)}")
    for column, key in present.items():
        if key in row:
            report.note(f"rows have {key!r} as well, which is not read: --columns {column}={key} takes its "
                        "place", example=quoted(dict.get(row, key)))
    report.renamed = sorted({*report.renamed, *present})
    return Row(dict(row) | renamed)


def format_of(row, columns, needs_pairs, nulls):
    wanted = {key for _, key in columns}
    # formats of renamed columns first: many examples have messages, too
    forms = [form for form, needs in FORMATS.items() if row.keys() >= {*needs}]
    forms.sort(key=lambda form: wanted.isdisjoint(FORMATS[form]))
    is_pair = PAIR in forms[:1]
    if forms and is_pair == needs_pairs:
        return forms[0]
    if is_pair:
        problem = "rows with 'chosen' and 'rejected': these need --dpo --lora"
        advice = "chosen=messages"
        if not begins_with_question(from_json(dict.get(row, "chosen"))):
            advice = columns_for({key: value for key, value in dict.items(row) if key != "rejected"}, False)
        if "chosen" in advice:  # and not the question alone
            problem += f"; --columns {advice} trains on the chosen answers alone"
        raise ValueError(problem)
    expected = f"expected an object with {' or '.join(FORMATS)}"
    if needs_pairs:
        expected = "--dpo needs rows with 'chosen' and 'rejected'"
    if nulls := KEYS.keys() & nulls:
        expected += f"; {listing(nulls)}: null"
    advice = columns_for(row, needs_pairs) or ("COLUMN=KEY renames them. A message has 'role' and 'content', "
                                               "or 'from' and 'value', and 'messages' lists them")
    raise ValueError(f"{expected}; got the keys {listing(row, 20) or '(none)'}: --columns {advice}")


def columns_for(row, needs_pairs):
    """The words of --columns that make an example of a row whose keys have other names, "" if none do."""
    if are_messages([row]):  # a message of a chat, whose content would become a text
        return ""
    values = {key: from_json(value) for key, value in dict.items(row)}
    values = {key: [value] if isinstance(value, dict) else value for key, value in values.items()}
    chats = {key: value for key, value in values.items() if are_messages(value)}
    words_of = {key: re.split(r"[\W_]+", key.lower()) for key, value in dict.items(row)
                if (key in chats or isinstance(value, str)) and not METADATA.search(key)}
    questions = [key for key, chat in chats.items() if not is_answer(chat[-1])]
    whole = [key for key, chat in chats.items() if begins_with_question(chat) and any(map(is_answer, chat))]
    forms = [["instruction", "output"], ["prompt", "completion"]]
    if {"prompt", *QUESTION_KEYS}.isdisjoint(itertools.chain(*words_of.values())):
        forms.append(["text"])  # beside a question it would be an answer
    may_have = ["input", "system"]
    if needs_pairs:
        forms = [FORMATS[PAIR]]
        may_have = ["system"]
        if {"prompt", *QUESTION_KEYS}.isdisjoint(row):
            may_have.append("prompt" if questions else "instruction")
    elif answered := [key for key in whole if key not in (*questions, "messages")]:
        return f"{answered[0]}=messages"
    for needs in forms:
        column_of = {}
        for key in (*needs, *may_have):
            names = [name for word in COLUMN_NAMES.get(key, [key]) for name in words_of
                     if word in words_of[name]]
            # query before original_question, and a title last
            names.sort(key=lambda name: ("title" in words_of[name], len(words_of[name])))
            if key == "prompt":
                names = questions
            free = [name for name in (key, *names) if name in words_of and name not in column_of.values()
                    and (name not in chats or key in MAY_BE_CHATS)
                    and ("system" not in words_of[name] or key == "system")]  # system_prompt is no question
            if free:
                column_of[key] = free[0]
        if all(key in column_of for key in needs):
            return " ".join(shlex.quote(f"{name}={key}") for key, name in column_of.items() if name != key)
    return f"{whole[0]}=messages" if whole and not needs_pairs else ""


def from_openai(row):
    """A pair of OpenAI's format, whose `input` has the messages and the tools, under our keys."""
    if not {"input", "preferred_output", "non_preferred_output"} <= row.keys():
        return row
    asked = dict(json_in(row, "input", dict, "'input' beside 'preferred_output' must be an object"))
    asked["prompt"] = asked.pop("messages", None)
    others = dict(row)
    del others["input"]
    asked["chosen"] = others.pop("preferred_output")
    asked["rejected"] = others.pop("non_preferred_output")
    if twice := asked.keys() & others.keys():
        raise ValueError(f"{listing(twice)}: both in the row and in its 'input'")
    return Row(others | asked)


def marks_in(place, keys):
    """{key: what a row or a message says of training: a number, true or false, maybe as a text}."""
    values = {key: dict.get(place, key) for key in keys}
    return {key: from_json(str(value).lower()) for key, value in values.items()
            if value not in (None, "", "null")}


def check_marks(row, form, report):
    """Raises a ValueError if a row says that nobody should learn its answer. Counts what says neither."""
    for key, mark in marks_in(row, (*TRAINED_KEYS, *LABELS)).items():
        is_class = key in LABELS and (form == "text" or not isinstance(mark, bool))
        if is_class or not isinstance(mark, int | float):
            continue  # it says nothing of training
        if mark <= 0:
            raise ValueError(f"{key!r} is {quoted(row[key])}: nobody should learn this answer: leave such "
                             f"rows out of the file, or {key!r} if it means something else")
        if mark == 1:
            row.get(key)  # it is read
        else:
            report.note(f"rows have a {key!r} other than 0 and 1: they are trained on like the others",
                        example=mark)
    for key, value in dict.items(row) if form == PAIR else ():
        other = dict.get(row, key.replace("chosen", "rejected"))
        are_scores = SCORE.search(key) and all(isinstance(one, int | float) for one in (value, other))
        if are_scores and value < other:
            report.note("pairs have a lower score for the chosen answer than for the rejected one",
                        example=f"{key} = {value} and {other}")


def check_is_text(row, form):
    """Raises a ValueError if a chat is about pictures, sound or video, which its messages may not mention."""
    for key in filter(MEDIUM.fullmatch, row):
        value = dict.get(row, key)
        mention = f"<{key.lower().removesuffix('s')}>"
        is_shown = isinstance(value, list | dict | bytes) and form != "text"
        # the address of a picture that nobody asks about is metadata
        if value and (is_shown or mention in " ".join(texts_in(row))):
            raise ValueError(f"{key!r} is {quoted(value)}: {TEXT_ONLY}, or {key!r} if it is something else")


def read_answers(row, keys):
    """-> (prompt, [the answer of each key]), which are all texts, or all lists of messages."""
    answers = [text_or_messages(row, key) for key in keys]
    has_question = any(map(begins_with_question, answers))
    question = "prompt"
    if len(keys) == 2 and not row.get("prompt") and not has_question:
        question = question_in(row, answers)
    prompt = text_or_messages(row, question) if row.get(question) else ""
    are_texts = all(isinstance(one, str) for one in [prompt, *answers])
    if are_texts and question == "prompt" and not any(row.get(key) for key in OF_CONVERSATIONS):
        n = 0
        if not prompt and answers[0] != answers[-1]:  # the texts of a pair may begin with the question
            n = len(os.path.commonprefix(answers))  # noqa: RUF071
        return prompt or answers[0][:n], [answer[n:] for answer in answers]

    answers = [[{"role": "assistant", "content": one}] if isinstance(one, str) else one for one in answers]
    asked = prompt
    if isinstance(prompt, str):
        words = row | {"instruction": prompt, "output": ""}
        if question == "input":  # it would stand below itself
            del words["input"]
        asked = [] if has_question else messages_of(words, "instruction + output")[:-1]
        if asked and len(keys) == 1:  # Alpaca's form, whose history is trained on
            return asked, answers
    answers = [behind_prompt(asked, answer) for answer in answers]
    # the messages that begin both answers; of one answer alone, those before the assistant's first message
    begin = [both[0] for both in itertools.takewhile(lambda both: both[0] == both[-1], zip(*answers))]
    if len(keys) == 1:
        begin = list(itertools.takewhile(lambda message: not is_answer(message), begin))
    elif len(begin) == min(map(len, answers)) and begin and is_answer(begin[-1]):
        begin.pop()  # the answers are equal, or one is the beginning of the other
    if isinstance(prompt, str) and has_question:
        is_there = any(prompt.strip() in str(message.get("content")) for message in begin)
        if not is_there or not begins_with_question(begin):
            missing = f"'prompt' = {quoted(prompt)}" if prompt else "the user's question"
            raise ValueError(f"the answers begin with {len(begin)} equal messages, and {missing} is in none "
                             "of them")
    repr([answer[: len(begin)] for answer in answers])  # they are read, as `begin`
    prompt = [message | {"weight": 0} for message in asked + begin]
    return prompt, [answer[len(begin) :] for answer in answers]


def behind_prompt(prompt, answer):
    """Messages without those that repeat the end of the prompt."""
    lengths = [n for n in range(1, len(answer) + 1)
               if answer[:n] == prompt[-n:] and not is_answer(answer[n - 1])]
    n_both = max(lengths, default=0)
    repr(answer[:n_both])  # they are read, in the prompt
    return answer[n_both:]


def role_of(message):
    role = str(dict.get(message, "role", dict.get(message, "from")))
    return OTHER_ROLES.get(role, role)


def is_answer(message):
    return role_of(message) == "assistant"


def begins_with_question(messages):
    """Whether the first message, except system messages, is the user's. A text has none."""
    roles = [role_of(one) for one in messages if isinstance(one, dict)]
    return next((role for role in roles if role not in ("system", "developer")), None) == "user"


def question_in(row, answers):
    """The key of the question in a pair without 'prompt', and 'prompt' if its texts may begin with it."""
    names = [key for key in QUESTION_KEYS if key in row]
    names = [key for key in names if key != "input"] or names  # Alpaca has it beside a question
    if len(names) == 1:
        return names[0]
    # else whatever holds text may be the question: without it answers would be trained on for themselves
    names = names or [key for key, value in dict.items(row) if next(texts_in(value), None) is not None
                      and key not in (*OF_CHATS, *FORMATS[PAIR], "label")]
    if names:
        key = "prompt" if "instruction" in names else "instruction"
        advice = columns_for(dict(row, chosen="", rejected=""), True) or f"{names[0]}={key}"
        raise ValueError(f"no prompt, but {listing(names)}: --columns {advice} has to say which is the "
                         "question")
    if any(isinstance(answer, list) for answer in answers) or any(row.get(key) for key in OF_CONVERSATIONS):
        raise ValueError("no prompt: expected 'prompt', or answers that both begin with the user's question")
    return "prompt"


def are_messages(value):
    """Whether a value is a list of messages. A text may be a JSON list of other objects."""
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        return False
    say_something = all({"from", "value"} <= one.keys() or ("role" in one and not SAID.isdisjoint(one))
                        for one in value)
    return say_something and not {*map(role_of, value)}.isdisjoint(ROLES)


def text_or_messages(row, key):
    """A text, or messages: a list of them, one of them, or JSON of these. Other JSON is a text."""
    value = row.get(key)
    found = from_json(value)
    if isinstance(found, dict):
        if are_messages(dict.get(found, "messages")):
            raise ValueError(f"{key!r} must be text or a list of messages, got an object that has 'messages'")
        found = [found]
    if are_messages(found) or isinstance(value, list):
        dict.__setitem__(row, key, found)
        return turns_of(row, key)
    return text_in(row, key, "text or a list of messages")


def has_turns(text, tokenizer):
    """Whether a text has turns of a chat: if it is trained on, questions are."""
    markers = {*tokenizer.markers} - {*tokenizer.variables.values()}  # EOS ends texts, too
    return bool(TURN.search(text) or CHAT_AS_TEXT.match(text)) or any(marker in text for marker in markers)


def read_chat(row, messages, form, tokenizer, report):
    """Messages, with what a row has beside them, -> [Text]. It may raise any error."""
    variables = {}
    if row.get("chat_template_kwargs"):
        variables = json_in(row, "chat_template_kwargs", dict, "'chat_template_kwargs' must be an object")
    tokenizer = tokenizer.for_example(dict(variables))
    for name in variables.keys() & tokenizer.template_reads:
        variables[name]  # it is looked at
    given = messages
    system = text_in(row, "system")
    if system and [message["role"] for message in messages[:1]] != ["system"]:
        given = [{"role": "system", "content": system}, *messages]
    elif system and messages[0].get("content") != system:
        raise ValueError("'system' is another text than the first message, which is a system message")
    reads_tools_of_messages = "tools" in tokenizer.template_words
    tools = read_tools([row] if reads_tools_of_messages else [row, *given], report)
    messages = check_messages(given, tools, report)
    if "developer" not in tokenizer.template_words:
        report.note("developer messages are read as system messages: the template has no such role",
                    sum(message["role"] == "developer" for message in messages))
        messages = [one | {"role": one["role"].replace("developer", "system")} for one in messages]
    texts = tokenizer.conversation(messages, tools, report, form in (PAIR, "prompt + completion"))
    if form != PAIR and tokenizer.train_on != "all" and not any(map(is_answer, messages)):
        report.note("chats have no answer, which is a message of the role 'assistant': dropped")
        return []
    return [one._replace(form=form, is_chat=True, is_further=i > 0) for i, one in enumerate(texts)]


def text_in(row, key, expected="text"):
    value = row.get(key, "")
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be {expected}, got {quoted(value)}")
    return value


def json_in(holder, key, kind, must):
    """A dict or a list in a Row or a list, maybe as JSON: a csv file has only texts. must: words of an error.
    It takes the place of the text: its keys, too, are listed if nobody looks at them."""
    value = holder[key]
    found = from_json(value)
    if found is None and value is not None:  # json.dumps(None)
        found = kind()
    if not isinstance(found, kind):
        raise ValueError(f"{must}, got {quoted(value)}")
    holder[key] = found
    return found


def from_json(value):
    """Parses a text that is JSON; any other value stays."""
    with contextlib.suppress(ValueError):
        while isinstance(value, str):
            value = json.loads(value, object_pairs_hook=row_of_pairs)
    return value


def without_nulls(value, keep=(), lost=None):
    """A copy of a value, with Rows in place of dicts and without keys whose value is null, at every depth
    except in the keys `keep`. lost: a set that gets the names of these keys."""
    if isinstance(value, list):
        return [without_nulls(item, keep, lost) for item in value]
    if not isinstance(value, dict):
        return value
    found = Row(looked_at=value._looked_at if isinstance(value, Row) else None)
    for key, item in dict.items(value):
        if item is not None or key in keep:
            found[key] = item if key in keep else without_nulls(item, keep, lost)
        elif lost is not None:
            lost.add(key)
    return found


def read_tools(places, report):
    """The tools of a row, or None. places: the row, and its messages (GLM's and DeepSeek's tools)."""
    given = [json_in(place, key, list, "'tools' must be a list of JSON schemas")
             for place in places for key in TOOLS_KEYS if place.get(key)]
    tools, *others = [tools for tools in given if tools] or [[]]
    if any(other != tools for other in others):
        raise ValueError("'tools' or 'functions' of the row and of its messages are not the same")
    repr(others)  # they are looked at
    must = "a tool of 'tools' must be an object"
    for i in range(len(tools)):
        tool = json_in(tools, i, dict, must)
        tool.get("type")  # all are functions
        function = json_in(tool, "function", dict, must) if "function" in tool else tool
        text_in(function, "name")
        function["parameters"] = from_json(function.get("parameters"))
    lost = set()
    tools = without_nulls(tools, WITH_NULLS, lost)
    lost.discard("parameters")
    report.note("tools have keys that are null, which are read as absent", bool(lost), listing(lost))
    return tools or None


def messages_of(row, form):
    """The messages of a row in a format, except those of a prompt and a completion."""
    if form != "instruction + output":
        return turns_of(row, form)
    parts = text_in(row, "instruction"), text_in(row, "input")
    must = "'history' must be a list of pairs of texts"
    history = json_in(row, "history", list, must) if row.get("history") else []
    messages = []
    for turn in [*history, ["\n".join(filter(None, parts)), text_in(row, "output")]]:
        if not isinstance(turn, list) or [type(text) for text in turn] != [str, str]:
            raise ValueError(f"'history' must list pairs of texts, got {quoted(turn)}")
        messages.append({"role": "user", "content": turn[0]})
        messages.append({"role": "assistant", "content": turn[1]})
    return messages


def turns_of(row, key):
    """The messages of a row, with the keys role and content: ShareGPT's have others."""
    messages = []
    for turn in json_in(row, key, list, f"{key!r} must be a list of messages"):
        if not isinstance(turn, dict) or not turn.keys() & {"role", "from"}:
            raise ValueError(f"a message of {key!r} must be an object with 'role' and 'content', or 'from' "
                             f"and 'value', got {quoted(turn)}")
        if "role" not in turn:
            turn = Row({"role": turn.pop("from")}, turn._looked_at) | dict(turn)
            if "content" not in turn:
                turn["content"] = turn.pop("value", None)
        messages.append(turn)
    return messages


def check_messages(messages, tools=None, report=None):
    """Messages as templates expect them: no None, texts joined, calls of tools as objects."""
    if not messages:
        raise ValueError("no messages")
    report = report or FileReport()
    functions = [dict.get(tool, "function", tool) for tool in tools or ()]
    # for arguments
    schemas = {dict.get(function, "name"): dict.get(function, "parameters") for function in functions}
    checked = []
    for given in messages:
        if not isinstance(given, Row):
            given = without_nulls(given, WITH_NULLS)
        message = check_message(given, schemas, report)
        before = checked[-1] if checked and given["role"] in CALL_ROLES else {}
        if before.get("role") == "assistant" and is_trained(before) == is_trained(message):
            # an answer that calls several tools, or says something first, is one turn
            message = before | {"tool_calls": before.get("tool_calls", []) + message["tool_calls"]}
            checked.pop()
        checked.append(message)
    return checked


def check_message(given, schemas, report):
    calls = []
    if given.get("tool_calls"):
        calls += json_in(given, "tool_calls", list, "'tool_calls' must be a list of objects")
    if given.get("role") in CALL_ROLES:  # one or several as JSON in place of a text
        given["content"] = from_json(given.get("content"))
        calls += given["content"] if isinstance(given["content"], list) else [given["content"]]
    if from_json(given.get("function_call")):  # OpenAI's, before an answer could have several
        calls.append(given["function_call"])
    calls = [read_call(calls, i, schemas, report) for i in range(len(calls))]
    # nulls in arguments may mean something; otherwise only an empty answer does
    message = {}  # a Row in the end: this function reads a few keys many times
    given._looked_at.update(("role", "content"))
    for key, value in dict.items(without_nulls(given, WITH_NULLS)):
        if key == "content" or (key not in CHECKED_KEYS and value not in (*EMPTY, "null")):
            message[key] = value
    if calls:
        message["tool_calls"] = calls
    role = message.get("role")
    if role in CALL_ROLES:
        del message["content"]
    if isinstance(role, str):
        message["role"] = role = OTHER_ROLES.get(role, role)
    if role not in ROLES:
        raise ValueError(f"unknown role {quoted(role)}; expected {', '.join(ROLES)}")
    for key, mark in marks_in(given, TRAINED_KEYS).items():
        if mark not in (0, 1):
            raise ValueError(f"{key!r} must be 0 or 1, got {quoted(given[key])}")
        if mark == 0 or role == "assistant":
            given.get(key)  # else it asks to train on what somebody else says: it is not looked at
        if mark == 0:
            message["weight"] = 0  # is_trained() reads it
    if not message.get("content") and "refusal" in message:  # OpenAI's answers have the one or the other
        message["content"] = given.get("refusal")
        del message["refusal"]
    must = f"'content' of a message of {role!r} must be text"
    if isinstance(message.get("content"), list):
        message["content"] = "".join(text_of_part(part, must) for part in message["content"])
    content = message.get("content")
    if not isinstance(content, str) and (content is not None or not calls):
        raise ValueError(f"{must}, got {quoted(content)}; its keys: {listing(message)}")
    if role == "assistant" and (names := [key for key in THOUGHTS if key in message]):
        thought = text_in(given, names[0])
        # templates read it by the first or by the second of these names
        message = {"thinking": thought} | message | {"reasoning_content": thought}
    return Row(message, given._looked_at)


def text_of_part(part, must):
    """The text of one of OpenAI's parts, {"type": "text", "text": ...}."""
    if not isinstance(part, dict):
        raise ValueError(f"{must}, got a part {quoted(part)}")
    kind = part.get("type", "text")
    text = part.get("refusal" if kind == "refusal" else "text", part.get("value"))  # LLaMA-Factory's
    if kind in TEXT_PARTS and isinstance(text, str):
        return text
    expected = ("expected calls in 'tool_calls', each result in a message of the role 'tool', and a thought "
                "in 'reasoning_content'")
    if re.match("image|input_image|audio|input_audio|video|file", str(kind)):
        expected = TEXT_ONLY
    raise ValueError(f"{must}, got a part of the type {quoted(kind)}: {quoted(part)}; {expected}")


def is_trained(message):
    return bool(message.get("weight", 1))


def read_call(calls, i, schemas, report):
    """A call of a tool, or only its function, also as JSON -> a call with arguments as an object."""
    must = "a call of a tool must be an object"
    call = json_in(calls, i, dict, must)
    call.get("type")  # all are functions
    if isinstance(from_json(call.get("function")), str):  # the name alone
        call = Row({"name": call.pop("function"), **call}, call._looked_at)
    function = json_in(call, "function", dict, must) if "function" in call else call
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"'name' of a call of a tool must be text, got {quoted(name)}")
    given = [json_in(place, key, dict, f"{key!r} of a call of {quoted(name)} must be an object")
             for place in (function, call) for key in ARGUMENTS if dict.get(place, key) not in (None, "")]
    arguments = next(filter(None, given), {})
    if any(one not in ({}, arguments) for one in given):
        raise ValueError(f"a call of {quoted(name)} has two different {' or '.join(ARGUMENTS)}")
    # beside arguments that are there and empty, only an object can be meant
    unread = {key for place in (function, call) for key, value in dict.items(place)
              if key not in ("id", "index") and key not in place._looked_at and value not in EMPTY
              and (not given or isinstance(from_json(value), dict))}
    if unread and not arguments:
        raise ValueError(f"a call of {quoted(name)} has no arguments, but {listing(unread)}: arguments are "
                         f"read from {' or '.join(ARGUMENTS)}")
    lost = set()
    arguments = without_unnamed_nulls(arguments, schemas.get(name), lost)
    report.note("calls have arguments that are null and that the tool does not have: left out", bool(lost),
                listing(lost))
    # in the order of its keys, which templates may write
    said = {"arguments" if key in ARGUMENTS else key: value for key, value in dict.items(function)
            if value is not None and (key == "name" or key in ARGUMENTS or function is not call)}
    said["arguments"] = arguments
    others = {key: value for key, value in dict.items(call)
              if value is not None and key not in said and key not in ARGUMENTS}
    return Row(others | {"type": "function", "function": Row(said, function._looked_at)}, call._looked_at)


def without_unnamed_nulls(value, schema, lost):
    """Removes arguments that are null, and that the tool does not have: a table has a cell for each name."""
    repr(value)  # it is all shown to the model, or counted as lost
    if not isinstance(schema, dict):
        return value
    if isinstance(value, list):
        return [without_unnamed_nulls(item, schema.get("items"), lost) for item in value]
    properties = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(properties, dict):
        return value
    lost.update(key for key, item in value.items() if item is None and key not in properties)
    return {key: without_unnamed_nulls(item, properties.get(key), lost) for key, item in value.items()
            if item is not None or key in properties}


# ---------------- data files, tokenized once

# The files of a folder in the cache: all tokens, which of them are trained on, and an entry per document.
DOCUMENT = np.dtype([
    ("length", np.int64),  # its number of tokens
    ("line", np.int64),  # where its example begins in the file
    ("hash", np.int64),  # hash_of_text() of its example
])
ARRAYS = {"tokens": np.int32, "supervised": bool, "documents": DOCUMENT}
HASHES = 2**56  # hashes of examples are 0 to HASHES - 1: int64 has them all
FILE_TYPES = "jsonl", "ndjson", "json", "csv", "parquet", "txt"
EXPECTED = ("expected a .jsonl, .json, .csv or .txt file (or .gz of it), a .parquet file, a data set of the "
            "Hub (org/name, org/name:split, org/name/subset:split) or a folder of datasets' save_to_disk()")
READ_CHARS = 2**20  # text that is tokenized at once
MAX_TEXT_BYTES = 2**24  # of a document: to tokenize it takes a hundred times as much memory
MAX_UNREAD_SHOWN = 20
MAX_UNREAD = 100  # names of keys in a report: each line of a file may have other ones
NOTHING_SAID = "have answers of nothing but their ends: dropped"


def files_matching(names):
    """The values of --data or --eval_data, with patterns replaced by their sorted files."""
    found = []
    for name in names:
        files = [] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        found += files or [name]
    return found


# {the first bytes of files that are not read: what they are}
OTHER_FILES = {
    b"PK\3\4": "a zip archive, or a .docx or .xlsx file: unzip it, or save its text as .csv or .jsonl",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: zstd -d makes the file that is read",
    b"\xfd7zXZ\0": "compressed by xz: xz -d makes the file that is read",
    b"BZh": "compressed by bzip2: bzip2 -d makes the file that is read",
    b"ARROW1": "an Arrow file: pyarrow.feather.read_table() and to_pylist() read it",
    b"%PDF": "a PDF: save its text as .txt",
}


@functools.cache
def copy_of_pipe(path):
    """A temporary file with all that a pipe gives: it can be read once, and data are read twice."""
    file = tempfile.NamedTemporaryFile(prefix="oomph-data-")  # noqa: SIM115, the cache keeps it open
    with open(path, "rb") as pipe:
        shutil.copyfileobj(pipe, file)
    file.flush()
    return file


def open_bytes(path):
    """Opens a file, decompressed if its first bytes are gzip's."""
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_gzip else open(path, "rb")


def type_of(path, name):
    """One of FILE_TYPES, by the first bytes of a file and then by its name."""
    with open(path, "rb") as file:
        raw = file.read(16)
    for first, what in OTHER_FILES.items():
        if raw.startswith(first):
            raise ValueError(f"{name}: {what}")
    if raw.startswith(b"PAR1"):
        return "parquet"
    file_type = name.lower().removesuffix(".gz").rpartition(".")[2]
    if file_type in FILE_TYPES and file_type != "txt":
        return file_type
    with errors_of(name), open_bytes(path) as file:
        first = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
    if file_type == "txt":  # as a text, JSON would be what the model learns to write
        return "jsonl" if re.match(rb'(\[\s*)?\{\s*"', first) else "txt"
    if not first.startswith((b"{", b"[")):
        raise ValueError(f"{name}: not a format that is read; {EXPECTED}")
    return "jsonl"


def files_of(name, revisions):
    """A value of --data -> (one of FILE_TYPES or "arrow", its files, fetched if on the Hub)."""
    path = Path(name)
    if path.is_fifo():
        path = Path(copy_of_pipe(path).name)
    if path.is_file():
        check_is_file(path)
        return type_of(path, name), [path]
    # data/train.jsonl looks like a data set's name, too, but who writes it means a file
    is_file_name = name.lower().removesuffix(".gz").endswith(tuple(f".{one}" for one in FILE_TYPES))
    is_hub_name = HUB_NAME.fullmatch(name) and not is_file_name and not path.exists()
    if not is_hub_name and not is_saved_set(name):
        problem = f"a folder: give '{name}/*.jsonl', in quotes" if path.is_dir() else "no such file"
        raise ValueError(f"{name}: {problem}; {EXPECTED}")
    key = f"datasets/{name}"  # a model may have the same name
    paths, commit = arrow_files(name, revisions.get(key))
    if commit:
        revisions[key] = commit
    return "arrow", paths


def examples_in(file_type, paths):
    """Yields (line, example) for the files of a value of --data: a dict, or a line of JSON."""
    try:
        for path in paths:
            if file_type in ("parquet", "arrow"):
                yield from enumerate(table_examples(path, file_type), 1)
            else:
                yield from text_examples(path, file_type)
    except Exception as error:  # some of gzip's, pyarrow's and datasets' are OSErrors, as if of the cache
        why = listing([str(error) or repr(error)])
        raise ValueError(f"cannot be read as {file_type}: {why}") from error


def text_examples(path, file_type):
    with open_bytes(path) as file:
        head = file.read(4096)
    # every second byte of English in UTF-16 is zero; a single one is a character
    if head[:2] in (b"\xff\xfe", b"\xfe\xff") or head.count(b"\0") > len(head) / 8:
        raise ValueError("not valid UTF-8: it has zero bytes, as UTF-16 has: save it as UTF-8")
    # bytes that are not UTF-8 become surrogates, which hash_of_text() refuses
    with open_bytes(path) as raw, io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape") as file:
        if file_type == "csv":
            yield from csv_examples(file)
        elif file_type == "txt":  # each megabyte of whole lines is a document
            line = 1
            while lines := file.readlines(READ_CHARS):
                yield line, {"text": "".join(lines)}
                line += len(lines)
        else:
            yield from json_examples(file)


def json_examples(file):
    """Yields (line, JSON or value) for a file with an object a line, one array, or objects over lines."""
    is_first = True
    for line, text in enumerate(file, 1):
        text = text.removeprefix("\ufeff")  # of a file that was appended to another
        start = text.strip()
        if not start:
            continue
        if is_first and start.startswith("[") and not are_messages(from_json(start)):
            items = json.loads(text + file.read(), object_pairs_hook=row_of_pairs)
            if are_messages(items):  # a chat, whose messages stand on lines of their own
                items = [items]
            yield from enumerate(({"text": item} if isinstance(item, str) else item for item in items), 1)
            return
        is_first = False
        if start == "{":  # an object over several lines
            text += file.read()
        # else an object a line, unless another one or a comma follows on it
        elif not start.endswith("},") and not re.search(r"\}\s*\{", start):
            yield line, text
            continue
        text = text.lstrip()
        position = 0
        try:
            while position < len(text):
                _, stop = json.JSONDecoder().raw_decode(text, position)
                yield line, text[position:stop]
                behind = re.compile(r"[\s,]*").match(text, stop).end()
                line += text.count("\n", position, behind)
                position = behind
        except ValueError:  # what is no JSON is a bad example
            yield from enumerate(text[position:].split("\n"), line)


def csv_examples(file):
    """Yields (line, example) for a csv file. Its first row names the columns, an empty field has no value."""
    csv.field_size_limit(MAX_TEXT_BYTES)  # a field is a whole text, and the default limit is 128 KiB
    # strict: a quote that is never closed would make one field of all that follows
    reader = csv.reader(file, strict=True)
    line = 1  # the first one of an example, which may have several
    try:
        header = [name.strip() for name in next(filter(None, reader), [])]  # blank lines may come before it
        if len(header) == 1 and (other := re.search("[;\t]", header[0])):
            raise ValueError(f"line {reader.line_num}: expected commas between columns, got {other[0]!r}")
        if len(set(header)) < len(header):
            raise ValueError(f"line {reader.line_num}: two columns have the same name: {listing(header)}")
        line = reader.line_num + 1
        for fields in reader:
            if fields and len(fields) != len(header):
                raise ValueError(f"line {line}: number of fields {len(fields)}, in the header {len(header)}: "
                                 "a field with a comma or a line break needs quotes")
            if fields:  # no blank line
                yield line, {name: field or None for name, field in zip(header, fields)}
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {line}: {error}") from error


def table_examples(path, file_type):
    """Yields the examples of a parquet or Arrow file."""
    if file_type == "arrow":
        import datasets

        # as tables: the library's own rows decode images, for which it needs Pillow
        batches = datasets.Dataset.from_file(str(path)).with_format("arrow").iter(100)
    else:
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ValueError(f"pip install pyarrow ({error})") from error
        # by default pyarrow reads whole row groups: a file of 145 MiB took 237 MiB of memory, so it takes 44
        table = pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
        batches = table.iter_batches(100, use_threads=False)
    for batch in batches:
        yield from batch.to_pylist()


def tokenized(spec, tokenizer, columns=(), revisions=None):
    """The folder in the cache with the documents of a value of --data, made if it is missing or damaged.
    revisions: {name on the Hub: commit} of a run that is resumed. The commits of other names are added."""
    file_type, paths = files_of(spec, {} if revisions is None else revisions)
    # its name is a hash of all that tokens depend on, data.py included: a fork may read files in another way
    contents = [sha256_of(path) for path in (__file__, *paths)]
    versions = sys.version, tokenizers.__version__, jinja2.__version__
    made_of = json.dumps([contents, file_type, columns, tokenizer.made_of, versions])
    cache = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "oomph"
    if str(cache).startswith("~"):
        raise ValueError("this user has no home folder for tokens: set XDG_CACHE_HOME to a folder")
    folder = cache / hashlib.sha256(made_of.encode()).hexdigest()[:32]
    if os.path.lexists(folder):
        with contextlib.suppress(OSError, ValueError):
            if read_report(folder).checksums == checksums_of(folder):  # it is as it was written, to the byte
                return folder
        say(f"{spec} is tokenized again: {folder} in the cache is damaged")
        remove(folder)
    try:
        with writing(f"{spec}: {cache} (XDG_CACHE_HOME can name another folder)", "tokens"):
            make_folder(cache)
            with own_folder(cache) as unfinished:
                tokenize(examples_in(file_type, paths), tokenizer, unfinished, columns)
                # or the tokens of a new file would stand under the name of the old one, for all later runs
                if [sha256_of(path) for path in (__file__, *paths)] != contents:
                    raise ValueError("changed while it was read: start again when it is complete")
                put_in_place(unfinished, folder, keep_older=True)  # another job may have made the same entry
    except ValueError as error:
        raise type(error)(f"{spec}: {error}") from error
    return folder


@contextlib.contextmanager
def own_folder(cache):
    """Yields a folder in the cache for this process alone: other jobs may be making the same entry. Removes
    those of processes that were killed, whose locks have ended with them."""
    for left in cache.glob("tmp*"):
        with contextlib.suppress(OSError), open(left / "lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: another process works in it
            remove(left)
    with contextlib.ExitStack() as held:
        lock = None
        # until its lock is taken, another start may take a folder for one that was left, and remove it
        while lock is None or not lock.exists():
            place = Path(held.enter_context(tempfile.TemporaryDirectory(dir=cache)))
            lock = place / "lock"
            with contextlib.suppress(FileNotFoundError):
                file = held.enter_context(open(lock, "a"))
                with contextlib.suppress(OSError):  # a disk without locks: nothing is removed there
                    fcntl.flock(file, fcntl.LOCK_EX)
        folder = place / "documents"  # `place` itself is for this user's eyes only
        folder.mkdir()
        yield folder


class EmptyFile(ValueError):
    """A file without examples, which may be one of many shards."""


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def read_report(folder):
    os.stat(folder / "report.json")  # an OSError if the folder has been removed from the cache
    content = read_json(folder / "report.json")
    if content != with_checksum(content):
        raise ValueError(f"{folder / 'report.json'}: damaged")
    return FileReport(**content)


def checksums_of(folder):
    return {name: crc_of(folder / name) for name in ARRAYS}


@dataclasses.dataclass
class FileReport:
    """What tokenizing a file has found, with the fields of report.json."""

    n_examples: int = 0
    n_bad: int = 0  # examples that could not be read
    errors: str = ""  # what is wrong with them: up to five different errors, a line each
    formats: dict = dataclasses.field(default_factory=Counter)  # {one of FORMATS: number of examples}
    n_chats: int = 0
    notes: dict = dataclasses.field(default_factory=Counter)  # {what to print: number of examples}
    renamed: list = dataclasses.field(default_factory=list)  # columns of --columns that an example has
    examples: dict = dataclasses.field(default_factory=dict)  # {a note: what it is about, once}
    unread: dict = dataclasses.field(default_factory=dict)  # {path of a key that is not read: examples}
    new_ids: list = dataclasses.field(default_factory=list)  # tokens of --add_tokens that occur
    n_tokens: int = 0
    n_further: int = 0  # further documents, and the tokens in them
    n_further_tokens: int = 0
    largest_id: int = 0  # of a token
    checksums: dict = dataclasses.field(default_factory=dict)  # see checksums_of()
    checksum: int = 0  # covers the fields above

    def note(self, text, n=1, example=None):
        if n:
            self.notes[text] += int(n)
            if example is not None:
                self.examples.setdefault(text, str(example))

    def note_lines(self):
        lines = ""
        for text, n in self.notes.items():
            lines += f"\n  {n:,} {text}"
            if text in self.examples:
                lines += f" ({self.examples[text]})"
        return lines


def tokenize(examples, tokenizer, folder, columns):
    """Writes ARRAYS and report.json of (line, example). A ValueError if there are no tokens."""
    report = FileReport()  # the functions below add what they find
    examples = tqdm(examples, "tokenizing", leave=False, disable=None)
    for some in read_examples(examples, tokenizer, columns, report):
        encoded = tokenizer.encode([one for _, texts in some for one in texts], report)
        documents = []
        for line, texts in some:
            encoded_here = [(one, *next(encoded)) for one in texts]
            documents += documents_of(line, encoded_here, tokenizer, report)
        if not documents:
            continue
        ids, masks, entries = zip(*documents)
        tokens = np.concatenate(ids)
        report.n_tokens += len(tokens)
        report.largest_id = max(report.largest_id, int(tokens.max(initial=0)))
        if tokenizer.new_ids:
            new_ids = np.intersect1d(tokens, tokenizer.new_ids)
            report.new_ids = sorted({*report.new_ids, *new_ids.tolist()})
        table = np.array(list(entries), DOCUMENT)  # numpy wants a list of tuples
        arrays = {"tokens": tokens, "supervised": np.concatenate(masks), "documents": table}
        for name, values in arrays.items():
            with open(folder / name, "ab") as file:
                file.write(values)
    if not report.n_examples:
        raise EmptyFile("nothing to train on: it has no examples")
    if not report.n_tokens:
        raise ValueError(f"nothing to train on{report.note_lines()}{report.errors}")
    report.checksums = checksums_of(folder)
    (folder / "report.json").write_text(json_of(with_checksum(vars(report))))


def read_examples(examples, tokenizer, columns, report):
    """Yields lists of (line, [Text]), about READ_CHARS each. A ValueError if the first 20 are all bad."""
    some = []
    n_chars = 0
    for line, example in examples:
        if isinstance(example, str) and not example.strip():
            continue
        report.n_examples += 1
        try:
            texts = parse_example(example, tokenizer, columns, report)
        except ValueError as error:
            report.n_bad += 1
            if report.errors.count("\n") < 5 and str(error) not in report.errors:
                report.errors += f"\n  line {line}: {error}"
            if report.n_bad == report.n_examples == 20:
                raise ValueError(f"none of the first 20 examples can be trained on:{report.errors}") from None
            continue
        if not texts:
            continue
        first = texts[0]
        report.formats[first.form] += 1
        if dropped := [one.dropped for one in texts if one.text is None]:  # both answers of a pair go
            report.note(dropped[0], example=f"the first: line {line}")
            continue
        report.n_chats += first.is_chat
        if first.form in (PAIR, "prompt + completion") and not first.is_chat and tokenizer.has_template:
            names = {key: column for column, key in columns}
            advice = f"{names.get('prompt', 'prompt')}=instruction"
            if first.form != PAIR:
                advice += f" {names.get('completion', 'completion')}=output"
            report.note("prompts are plain strings: the chat template is NOT applied to them; "
                        f"--columns {advice} applies it")
        some.append((line, texts))
        n_chars += sum(len(one.text) for one in texts)
        if n_chars >= READ_CHARS:
            yield some
            some = []
            n_chars = 0
    yield some


def documents_of(line, encoded, tokenizer, report):
    """[(Text, ids, mask)] of a line -> [(ids, mask, entry of DOCUMENT)], without equal answers."""
    if encoded[0][0].form == PAIR:
        _, (ids, other_ids), (mask, other_mask) = zip(*encoded)
        if np.array_equal(ids, other_ids) and np.array_equal(mask, other_mask):
            report.note("pairs have equal answers: dropped")
            return []
    documents = []
    for text, ids, mask in encoded:
        documents.append((ids, mask, (len(ids), line, text.hash)))
        if text.is_further:
            report.n_further += 1
            report.n_further_tokens += len(ids)
        if text.is_chat:
            # the last trained token of a turn should be a marker, or a newline after one
            ends = np.flatnonzero(mask & ~np.append(mask[1:], False))  # trained, and the next token is not
            before = np.maximum(ends - 1, 0)  # the first token has none before it
            is_marker = tokenizer.is_marker[ids]
            report.note("assistant turns end without a special token: the model cannot learn to stop",
                        (~(is_marker[ends] | is_marker[before])).sum())
    return documents


def hash_of_text(text):
    """A number from 0 to HASHES - 1, by which --eval_data SHARE holds an example out."""
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        if "\udc80" <= half <= "\udcff":  # from text_examples()
            raise ValueError(f"not valid UTF-8: {error}: save it as UTF-8") from error
        raise ValueError(f"{half!a} is half of a character (a surrogate): leave it out") from error
    if len(raw) > MAX_TEXT_BYTES:
        raise ValueError(f"larger than {MAX_TEXT_BYTES >> 20} MiB: split it")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=7).digest(), "big")


# ---------------- data sets of the Hub

HUB_NAME = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(/(?P<subset>[^/:]+))?(:(?P<split>[\w.-]+))?", re.ASCII)
HUB_PAUSES_S = 1, 4  # between the tries of from_hub()


def arrow_files(name, revision):
    """A data set of the Hub, or a folder that is_saved_set() -> (its Arrow files, its commit or None)."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{name}: no such file; for a data set: pip install datasets ({error})") from error
    try:
        if is_saved_set(name):
            folder, _, split = name.partition(":")
            data_set = datasets.load_from_disk(folder)
            if isinstance(data_set, datasets.DatasetDict):
                split = split or "train"
                if split not in data_set:
                    raise ValueError(f"no split {split}, but {listing(data_set, 20)}")
                data_set = data_set[split]
        else:
            parts = HUB_NAME.fullmatch(name)
            fetch = functools.partial(
                datasets.load_dataset, parts["id"], parts["subset"], split=parts["split"] or "train",
                revision=revision, keep_in_memory=False)
            data_set = from_hub(fetch, (LookupError, ValueError, datasets.exceptions.DatasetsError))
    except Exception as error:  # its HTTP library has others, which another version does not have
        words = f"{error} {error.__cause__ or ''}".split()  # the cause may name a file that cannot be read
        raise ValueError(f"{name}: {listing([' '.join(words)])}; {EXPECTED}") from error
    paths = [Path(file["filename"]) for file in data_set.cache_files]
    # The library names a folder of its cache after the commit. Without the Hub it takes any commit.
    commit = re.fullmatch(r"[0-9a-f]{40}", paths[0].parent.name) if paths else None
    if revision and (not commit or commit[0] != revision):
        raise ValueError(f"{name}: the run began with commit {revision}, which is gone, here and on the Hub")
    return paths, commit and commit[0]


def is_saved_set(name):
    """Whether --data is FOLDER or FOLDER:SPLIT of datasets' save_to_disk()."""
    folder = Path(name.partition(":")[0])
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def from_hub(function, refusals=()):
    """Asks the Hub, up to three times: errors of a network are often gone soon, and refusals are not."""
    from huggingface_hub import constants

    for pause_s in [*(() if constants.HF_HUB_OFFLINE else HUB_PAUSES_S), None]:
        try:
            # in a thread, because the Hub's library lets a signal wait until the last file is there
            return ThreadPoolExecutor(1).submit(function).result()
        except KeyboardInterrupt:
            say(to_stderr=True)  # the progress bars end without a newline
            raise
        except Exception as error:  # its HTTP library has others, which another version does not have
            response = getattr(error, "response", None)
            is_answer = response is not None and response.status_code < 500
            if pause_s is None or is_answer or isinstance(error, refusals):
                raise
            time.sleep(pause_s)


# ---------------- documents

# A part is the piece of a document that goes into one row. Its first token is no target.
PART = np.dtype([
    ("file", np.int64),  # the number of its file
    ("start", np.int64),  # its first token
    ("stop", np.int64),  # its last token + 1
    ("n_targets", np.int64),
    ("line", np.int64),  # as in DOCUMENT
    ("hash", np.int64),
])


class DataFile(NamedTuple):
    """A file of --data, with counts that depend on the flags of a run."""

    name: str
    report: FileReport
    tokens: np.ndarray  # [n] int32, mapped from the cache
    supervised: np.ndarray  # [n] bool, mapped
    overflow: str = "split"  # of long documents: split, drop or truncate
    seq_len: int = 0
    n_documents: int = 0  # or pairs
    n_long: int = 0  # of them, of more than --seq_len positions
    longest: int = 0  # positions of the longest document
    n_untrained: int = 0  # documents without a supervised token
    n_tokens: int = 0  # positions of the parts that are trained on, without those of other hashes
    n_trained: int = 0  # supervised tokens

    def too_long(self):
        together = " with both answers together" if PAIR in self.report.formats else ""
        return f"longer than --seq_len {self.seq_len}{together} (longest: {self.longest:,} tokens)"


class Documents:
    """The parts of all documents, a table [n] PART, and the files [DataFile] with their tokens."""

    def __init__(self, files, parts):
        self.files = files
        self.parts = parts
        self.has_pairs = any(PAIR in file.report.formats for file in files)
        # A resume compares this. Checksums of files stand for every token and mask.
        checksums = [[file.report.checksums.get(name) for name in ("tokens", "supervised")] for file in files]
        trained = [parts[name].tobytes() for name in ("file", "start", "stop")]
        self.checksum = zlib.crc32(json.dumps(checksums).encode() + b"".join(trained))

    def part(self, number):
        """(tokens [n] int32, supervised [n] bool) of a part."""
        part = self.parts[number]
        file = self.files[part["file"]]
        tokens = slice(part["start"], part["stop"])
        return file.tokens[tokens], file.supervised[tokens]

    def n_examples(self):
        return len(np.unique(self.parts[["file", "line"]]))

    def place(self, number):
        part = self.parts[number]
        return f"{self.files[part['file']].name}:{part['line']}"


def n_positions_of(parts):
    """Positions of parts in a row, [n]: the last token is only a target."""
    return parts["stop"] - parts["start"] - 1


def open_documents(folders, names, seq_len, overflow=None, vocab_size=1 << 31, hashes=range(HASHES)):
    """Folders of the cache -> Documents of the examples with these hashes."""
    files = []
    tables = []
    for number, (folder, name) in enumerate(zip(folders, names, strict=True)):
        try:
            tokens, supervised, documents = (
                np.asarray(np.memmap(folder / key, dtype, "r")) for key, dtype in ARRAYS.items())
            report = read_report(folder)
        except OSError as error:
            if error.errno == errno.EMFILE:
                limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                raise ValueError(f"{name}: file {number + 1} of {len(names)}: too many open files: a process "
                                 f"may have {limit:,} here, and each file of --data needs 3: ulimit -n "
                                 f"{4 * len(names) + 1000}, or join the files") from error
            # somebody has emptied the cache, for example
            raise OSError(f"{name}: its tokens in the cache, {folder}, cannot be read ({error.strerror}): "
                          "start again") from error
        long = overflow
        if not long:  # half a text is a text, but half a conversation ends in the middle of an answer
            long = "split" if report.formats.keys() == {"text"} else "drop"
        n_together = 2 if PAIR in report.formats else 1  # see Loader
        n_positions = (documents["length"] - 1).reshape(-1, n_together).sum(1)
        document, parts = parts_of(documents, np.repeat(n_positions, n_together), seq_len, long)
        parts["file"] = number
        parts["n_targets"] = [np.count_nonzero(supervised[start + 1 : stop])
                              for start, stop in zip(parts["start"], parts["stop"])]
        used = np.flatnonzero(parts["n_targets"])  # the rest would only make rows longer
        parts = parts[used]
        file = DataFile(
            name, report, tokens, supervised, long, seq_len,
            n_documents=len(n_positions),
            n_long=int((n_positions > seq_len).sum()),
            longest=int(n_positions.max(initial=0)),
            n_untrained=len(np.setdiff1d(document, document[used])),
            n_tokens=int(n_positions_of(parts).sum()),
            n_trained=int(parts["n_targets"].sum()))
        check_file(file, vocab_size)  # all of it: a good file may have no example with these hashes
        is_chosen = (parts["hash"] >= hashes.start) & (parts["hash"] < hashes.stop)
        parts = parts[is_chosen]
        files.append(file._replace(n_tokens=int(n_positions_of(parts).sum()),
                                   n_trained=int(parts["n_targets"].sum())))
        tables.append(parts)
    return Documents(files, np.concatenate(tables))


def parts_of(documents, n_positions, seq_len, overflow):
    """[n] DOCUMENT -> (each part's document, the parts). n_positions: [n], of both documents of a pair."""
    length = documents["length"]
    n_parts = np.ones(len(length), np.int64)  # also for "truncate", which takes the first part
    if overflow == "split":
        n_parts = np.maximum(nf4.ceil_div(length - 1, seq_len), 1)
    elif overflow == "drop":
        n_parts[n_positions > seq_len] = 0
    document = np.repeat(np.arange(len(length)), n_parts)
    first_part = np.cumsum(n_parts) - n_parts  # for each document
    nth = np.arange(len(document)) - first_part[document]  # 0, 1, ... within a document
    end = np.cumsum(length)
    parts = np.zeros(len(document), PART)
    # it begins with the last token of the part before it, which is a target there and an input here
    parts["start"] = (end - length)[document] + nth * seq_len
    parts["stop"] = np.minimum(parts["start"] + seq_len + 1, end[document])
    parts["line"] = documents["line"][document]
    parts["hash"] = documents["hash"][document]
    return document, parts


def check_file(file, vocab_size):
    """Raises a ValueError if a file has too many bad examples, too few targets, or another model's tokens."""
    report = file.report
    why = None
    if report.n_bad > 0.01 * report.n_examples:  # a few bad lines are usual
        why = f"{report.n_bad:,} of {report.n_examples:,} examples cannot be trained on:{report.errors}"
    elif report.largest_id >= vocab_size:
        why = f"token {report.largest_id} of {vocab_size} embeddings: the tokenizer belongs to another model"
    elif not file.n_trained:
        n_examples = count_of(report.n_examples, "examples")
        why = (f"nothing to train on: of {n_examples}, {file.n_long} are {file.too_long()} and "
               f"{file.n_untrained} have no trained token{report.note_lines()}")
    # The template or the masks are wrong. Further documents repeat the text before their answers.
    elif file.n_trained < 0.01 * file.n_tokens * (1 - report.n_further_tokens / report.n_tokens):
        why = f"only {file.n_trained:,} of {file.n_tokens:,} tokens are trained on: look with --inspect 3"
    if why:
        raise ValueError(f"{file.name}: {why}")


# ---------------- packing and loading

def pack_rows(lengths, seq_len):
    """Best-fit decreasing: lengths -> rows of document numbers. Each goes where it leaves the least room."""
    rows = defaultdict(list)  # {row number: its documents}
    rows_with = defaultdict(list)  # {free positions: heap of the numbers of rows with that many}
    rows_with[seq_len] = list(range(len(lengths)))  # empty rows, enough for a document each
    rooms = [seq_len]  # the keys of rows_with that have rows, sorted
    order = np.argsort(-lengths, kind="stable")
    for document, length in zip(order.tolist(), lengths[order].tolist()):
        best = bisect.bisect_left(rooms, length)  # the smallest room that is large enough
        room = rooms[best]
        row = heapq.heappop(rows_with[room])
        if not rows_with[room]:
            del rooms[best]
        if not rows_with[room - length]:
            bisect.insort(rooms, room - length)
        heapq.heappush(rows_with[room - length], row)
        rows[row].append(document)
    return list(rows.values())


def pack_spans(pairs, n_tokens):
    """[(start, stop)] -> Spans on the CPU. A plain batch, whose rows are a document each, needs no bounds."""
    # documents and the padding between them, each up to the next bound
    bounds = torch.tensor(sorted({0, n_tokens, *itertools.chain(*pairs)}), dtype=torch.int32)
    longest = int(bounds.diff().max())
    if len(bounds) - 1 == len(pairs) and len(pairs) * longest == n_tokens:
        return Spans(pairs)
    return Spans(pairs, bounds, longest)


class Batch(NamedTuple):
    """A micro-batch of one rank. Under --sequence_parallel: a shard [1, T] of the tokens, and all spans."""

    tokens: torch.Tensor  # [B, T] int64
    targets: torch.Tensor  # [B, T] int64, IGNORE where a token is not trained on
    positions: torch.Tensor  # [B, T] int64
    supervised_S: torch.Tensor  # indices of the targets that are not IGNORE, in the flattened batch
    spans: Spans
    n_targets: list  # of each document; if ranks share a row, only the first of them has these numbers

    def to(self, device):
        """Copies to a GPU asynchronously, out of pinned memory."""
        if device.type != "cuda":
            return self

        def copied(tensor):  # spans may have no bounds
            return None if tensor is None else tensor.pin_memory().to(device, non_blocking=True)

        spans = Spans(self.spans.pairs, copied(self.spans.bounds), self.spans.longest,
                      host_tokens_BT=self.tokens)
        return Batch(*map(copied, self[:4]), spans, self.n_targets)


class Loader:
    """Yields batches of packed rows, reshuffled every epoch. Row g of a step is in micro-batch g // (B *
    world) of rank g // B % world. Under sequence_parallel a "rank" is a group of ranks, each with a shard of
    the group's tokens.

    rows: the numbers of each row's parts, see Documents. per_row: lm.Counts of arrays, a number a row."""

    def __init__(self, documents, seq_len, packing, batch_size, seed, rank, world, sequence_parallel=1):
        self.documents = documents
        self.seq_len = seq_len
        self.packing = packing
        self.batch_size = batch_size
        self.seed = seed
        self.n_shards = sequence_parallel
        self.rank, self.shard = divmod(rank, sequence_parallel)
        self.world = world // sequence_parallel
        self.waited_s = 0.0  # seconds that ahead() let its caller wait
        self.of_files = {}  # {file of --eval_data: its Loader} if there are several
        # two epochs, because a step may reach into the next; a decorator would keep every loader in memory
        self.order = functools.lru_cache(maxsize=2)(self.make_order)

        parts = documents.parts
        # the answers of a pair follow each other, and the loss compares them: they share a row
        n_together = 2 if documents.has_pairs else 1
        self.term = "pairs" if documents.has_pairs else "tokens"  # what the loss is divided by
        n_terms = np.arange(len(parts)) % 2 if documents.has_pairs else parts["n_targets"]
        units = np.arange(len(parts)).reshape(-1, n_together)
        n_positions = n_positions_of(parts)
        self.rows = list(units)
        if packing:
            packed = pack_rows(n_positions[units].sum(1), seq_len)
            self.rows = [units[numbers].flatten() for numbers in packed]

        row_of = np.repeat(np.arange(len(self.rows)), [len(row) for row in self.rows])
        in_rows = np.concatenate(self.rows)  # the parts of row_of
        columns = parts["n_targets"], n_positions, n_positions**2, n_terms
        self.per_row = lm.Counts(*(np.bincount(row_of, column[in_rows]).astype(int) for column in columns))
        self.longest = seq_len if packing else int(self.per_row.tokens.max())  # positions of a row

    def make_order(self, epoch):
        """The row numbers of an epoch. A run's largest row comes first: memory runs out at step 0."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        if epoch == 0:
            # the one with the most targets; if not packed, the longest first (lexsort's last key)
            keys = [self.per_row.targets] if self.packing else [self.per_row.targets, self.per_row.tokens]
            largest = np.lexsort(keys)[-1]
            i = np.flatnonzero(order == largest)[0]
            order[[0, i]] = order[[i, 0]]
        return order

    def rows_of(self, step, grad_accum):
        """-> (row numbers of the global batch, [row numbers of each micro-batch of this rank])."""
        B = self.batch_size
        n = B * self.world * grad_accum  # rows a step
        numbers = []
        for i in range(step * n, step * n + n):  # rows since the run began
            epoch, nth = divmod(i, len(self.rows))
            numbers.append(int(self.order(epoch)[nth]))
        micro_batches = [numbers[i : i + B] for i in range(0, n, B)]
        return numbers, micro_batches[self.rank :: self.world]

    def step(self, step, grad_accum):
        """-> (this rank's micro-batches, the lm.Counts of the global batch)."""
        numbers, numbers_by_batch = self.rows_of(step, grad_accum)
        # every rank counts the rows of all ranks, so that they need not communicate
        counts = lm.Counts(*(int(column[numbers].sum()) for column in self.per_row))
        return [self.batch(batch_numbers) for batch_numbers in numbers_by_batch], counts

    def places(self, step, grad_accum):
        _, numbers_by_batch = self.rows_of(step, grad_accum)
        return [self.documents.place(part) for numbers in numbers_by_batch for number in numbers
                for part in self.rows[number]]

    def ahead(self, start, stop, grad_accum):
        """Yields step(start) to step(stop - 1). A thread makes the next one while the caller trains."""
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
        """Yields batches that cover every row once, equally many on each rank; the last may be empty."""
        B = self.batch_size
        n_rows = len(self.rows)
        first = self.rank * B
        for start in range(first, first + n_rows, B * self.world):
            yield self.batch(range(start, min(start + B, n_rows)))

    def batch(self, row_numbers):
        """Row numbers -> Batch on the CPU."""
        B = max(len(row_numbers), 1)  # without rows one padding token: all ranks run equally many batches
        T = self.seq_len  # always the same if packed, so that torch.compile sees one shape
        if not self.packing:
            T = int(self.per_row.tokens[list(row_numbers)].max(initial=1))
        n = B * T
        n += -n % self.n_shards  # shards are equal
        tokens = np.zeros(n, np.int64)
        positions = np.zeros(n, np.int64)
        targets = np.full(n, IGNORE)
        pairs = []  # (start, stop) of each document
        n_targets = []
        for b, number in enumerate(row_numbers):
            stop = b * T
            for part in self.rows[number]:
                ids, supervised = self.documents.part(part)
                start = stop
                stop += len(ids) - 1
                tokens[start:stop] = ids[:-1]
                positions[start:stop] = np.arange(stop - start)
                targets[start:stop] = np.where(supervised[1:], ids[1:], IGNORE)
                pairs.append((start, stop))
                n_targets.append(int(self.documents.parts["n_targets"][part]))
        if self.n_shards > 1:  # a shard is one row: it may begin and end within the rows above
            B = 1
            T = n // self.n_shards
            n_targets = n_targets if self.shard == 0 else []  # a metric counts each document once
        shard = slice(self.shard * B * T, (self.shard + 1) * B * T)
        supervised_S = np.flatnonzero(targets[shard] != IGNORE)
        grids = (torch.from_numpy(grid[shard]).view(B, T) for grid in (tokens, targets, positions))
        return Batch(*grids, torch.from_numpy(supervised_S), pack_spans(pairs, n), n_targets)


def share_of(eval_data):
    """--eval_data -> the fraction or number of examples to hold out, None if it names files."""
    numbers = []
    for word in eval_data or ():
        with contextlib.suppress(ValueError):  # a file
            numbers.append(float(word[:-1]) / 100 if word.endswith("%") else float(word))
    if not numbers:
        return None
    share = numbers[0] if len(eval_data) == 1 else 0.0
    if 0 < share < 1:
        return share
    if share >= 2 and share.is_integer():  # 1 may mean all, one example or one percent
        return int(share)
    raise ValueError(f"--eval_data {' '.join(eval_data)}: expected files, or one number alone: a share of "
                     "--data above 0 and below 1, such as 0.02 or 2%, or a number of its examples, 2 or more")


def held_out_hashes(share, folders):
    """The hashes to hold out. Copies of a text are on one side. With a share, new rows move no old row."""
    if share is None:
        return range(0)
    if share < 1:
        return range(int(share * HASHES))
    tables = [np.fromfile(folder / "documents", DOCUMENT) for folder in folders]
    hashes = np.unique(np.concatenate(tables)["hash"])
    if share >= len(hashes):
        raise ValueError(f"--eval_data {share}: --data has only {len(hashes):,} different examples, and some "
                         "must be left to train on")
    return range(int(hashes[share]))


def make_loader(args, specs, folders, hashes, vocab_size, ranks):
    documents = open_documents(folders, specs, args.seq_len, args.overflow, vocab_size, hashes)
    if not len(documents.parts):
        purpose = "train" if hashes.start else "evaluate"
        raise ValueError(f"--eval_data {args.eval_data[0]} leaves no example of --data to {purpose} on: give "
                         "another share, or more data (of a .txt file an example is a megabyte)")
    return Loader(documents, args.seq_len, args.packing, args.batch_size, args.seed,
                  ranks.rank, ranks.world, args.sequence_parallel)


def unused_tokens(tokenizer, files):
    """The tokens of --add_tokens that are in no file. A ValueError if no token is in any."""
    used = {number for file in files for number in file.report.new_ids}
    unused = [tokenizer.core.id_to_token(number) for number in tokenizer.new_ids if number not in used]
    if unused and not used:
        raise ValueError(f"--add_tokens {' '.join(map(repr, unused[:5]))}: no row of the data has such a "
                         "token; a blank separates two tokens")
    return unused


def open_data(args, tokenizer, vocab_size, ranks, revisions=None):
    """-> (loader of --data, loader of --eval_data or None). One rank of each machine fills its cache."""
    share = share_of(args.eval_data)
    specs = [(spec, False) for spec in args.data]  # (file, whether it is to evaluate on)
    if args.eval_data and share is None:
        specs += [(spec, True) for spec in args.eval_data]
    folders = []
    n_others = Counter(is_eval for _, is_eval in specs)
    with ranks.agree():
        if ranks.local == 0:
            for spec, is_eval in specs:
                try:
                    folders.append(tokenized(spec, tokenizer, args.columns or (), revisions))
                except EmptyFile as error:  # a shard of several
                    folders.append(None)
                    n_others[is_eval] -= 1
                    if not n_others[is_eval]:
                        raise
                    say(f"note: {error}: left out")
    every = ranks.gather(folders)  # for each rank: empty but for the first one of a machine
    folders = every[ranks.rank - ranks.local]
    with ranks.agree():
        # compare_ranks() has seen files alone, and large ones in part; the name is a hash of all that is read
        names = [[folder and folder.name for folder in of_rank] for of_rank in (folders, every[0])]
        differing = [spec for (spec, _), mine, first in zip(specs, *names) if mine != first]
        if differing:
            raise ValueError(f"--data {listing(differing)}: not what rank 0 reads, or by other packages")
        found = [(spec, is_eval, folder) for (spec, is_eval), folder in zip(specs, folders) if folder]
        eval_files = {spec: folder for spec, is_eval, folder in found if is_eval}
        specs = [spec for spec, is_eval, _ in found if not is_eval]
        folders = [folder for _, is_eval, folder in found if not is_eval]
        held_out = held_out_hashes(share, folders)
        loader = make_loader(args, specs, folders, range(held_out.stop, HASHES), vocab_size, ranks)
        files = loader.documents.files
        eval_loader = None
        if share is not None:
            eval_loader = make_loader(args, specs, folders, held_out, vocab_size, ranks)
        elif args.eval_data:
            eval_loader = make_loader(
                args, eval_files, eval_files.values(), range(HASHES), vocab_size, ranks)
            if len(eval_files) > 1:
                eval_loader.of_files = {
                    spec: make_loader(args, [spec], [folder], range(HASHES), vocab_size, ranks)
                    for spec, folder in eval_files.items()}
            files = files + eval_loader.documents.files
        # a file may lack a column of --columns; one that no file has is misspelled
        renamed = {column for file in files for column in file.report.renamed}
        unknown = {column for column, _ in args.columns or ()} - renamed
        if unknown:
            unread = {path for file in files for path in file.report.unread if "." not in path}
            raise ValueError(f"--columns {listing(unknown)}: no row of the data has such a key; keys that "
                             f"are not read: {listing(unread, 20) or 'none'}")
        unused_tokens(tokenizer, loader.documents.files)
    return loader, eval_loader


def show(tokenizer, documents, number):
    """A document as text, with brackets around trained tokens."""
    ids, supervised = documents.part(number)
    text = ""
    for is_trained, run in itertools.groupby(range(len(ids)), lambda i: bool(supervised[i]) and i > 0):
        run_text = tokenizer.core.decode(ids[list(run)].tolist(), skip_special_tokens=False)
        text += f"⟦{run_text}⟧" if is_trained else run_text
    return text


def print_data(args, loader, eval_loader, tokenizer):
    files = loader.documents.files
    print_loader(loader, files)
    if eval_loader and share_of(args.eval_data):  # it is a share of the files above
        n_held_out = eval_loader.documents.n_examples()
        n_all = n_held_out + loader.documents.n_examples()
        are = is_or_are(n_held_out)
        say(f"--eval_data {args.eval_data[0]}: {n_held_out:,} of {n_all:,} examples {are} held out, chosen "
            "by a hash of each")
        print_loader(eval_loader, [])
    elif eval_loader:
        print_loader(eval_loader, eval_loader.documents.files)
        files = files + eval_loader.documents.files
        both = np.intersect1d(loader.documents.parts["hash"], eval_loader.documents.parts["hash"])
        if len(both):
            say(f"note: {len(both):,} examples of --eval_data are trained on, too, word for word")
    if any(file.report.n_chats for file in files):
        source = re.sub(r"^chat template \((.*)\)", r"\1", tokenizer.source)
        source = source.replace(f"{Path.cwd()}/", "")
        source = re.sub(r"(\S{30})\S+(\S{28})", r"\1...\2", source)  # a long path
        say(wrapped(f"chat template: {source}"))
    if unused := unused_tokens(tokenizer, loader.documents.files):
        say(f"--add_tokens {listing(unused)}: in no row of the data, so that they are not learned")
    documents = loader.documents
    for i in range(min(args.inspect or 0, len(documents.parts))):
        say(f"--- example {i + 1}, {documents.place(i)}, trained on: ⟦this⟧")
        say(f"{show(tokenizer, documents, i)}\n---")


def print_loader(loader, files):
    for file in files:
        print_file(file)
    full = loader.per_row.tokens.sum() / (len(loader.rows) * loader.seq_len)
    say(f"  {count_of(len(loader.rows), 'rows')} of at most {loader.seq_len} tokens, {full:.1%} full")


def print_file(file):
    report = file.report
    formats = ", ".join(form for form in FORMATS if form in report.formats)
    say(f"{file.name}: {count_of(report.n_examples, 'examples')} ({formats})")
    # a small file may be held out as a whole
    say(f"  {file.n_tokens:,} tokens, {file.n_trained / max(file.n_tokens, 1):.1%} trained on")
    notes = []
    if file.n_long:
        noun = "pairs" if PAIR in report.formats else "documents" if report.n_further else "examples"
        keeps = f"--seq_len {file.longest} keeps all"
        are = is_or_are(file.n_long)
        ends = {
            "drop": f"and {are} dropped; {keeps}, --overflow truncate cuts them",
            "truncate": f"and {are} cut; {keeps}",
            "split": f"and {are} split; {keeps} in one part",
        }
        notes.append(f"note: {file.n_long:,} of {count_of(file.n_documents, noun)} {are} {file.too_long()} "
                     f"{ends[file.overflow]}")
    if report.n_further:
        ratio = report.n_tokens / (report.n_tokens - report.n_further_tokens)
        notes.append(f"{report.n_further:,} further documents, for answers or prompts that later turns "
                     f"change: {ratio:.1f} times the tokens; --train_on whole leaves such answers out")
    if file.n_untrained:
        notes.append(f"{file.n_untrained:,} without a token to train on: dropped; --inspect 3 shows which "
                     "are trained on")
    notes += report.note_lines().splitlines()
    if report.n_bad:
        notes += f"{report.n_bad:,} cannot be trained on: dropped{report.errors}".splitlines()
    if report.unread:
        # nested ones first: they are more than metadata
        paths = sorted(report.unread, key=lambda path: (-path.count("."), path))
        named = ", ".join(f"{path} ({report.unread[path]:,})" for path in paths[:MAX_UNREAD_SHOWN])
        notes.append(f"keys that are not read, and in how many examples: {named}")
    for line in filter(str.strip, notes):  # whole, so that it can be searched for
        say(f"  {line.strip()}")


# ================================ model folders ================================

# ---------------- presets

# {column of PRESETS, with the letters of model.py: its key in config.json}
PRESET_KEYS = {
    "V": "vocab_size", "D": "hidden_size", "F": "intermediate_size", "layers": "num_hidden_layers",
    "H": "num_attention_heads", "G": "num_key_value_heads", "K": "head_dim", "theta": "rope_theta",
    "positions": "max_position_embeddings", "tied": "tie_word_embeddings",
}


def preset(hub_id, model_type, further=None, **sizes):
    """The config.json of a model on the Hub. further: keys and values that PRESET_KEYS does not have."""
    norm_eps = 1e-6 if model_type.startswith("qwen") else 1e-5
    config = {"_name_or_path": hub_id, "model_type": model_type, "rms_norm_eps": norm_eps,
              "tie_word_embeddings": False}
    return config | {PRESET_KEYS[name]: size for name, size in sizes.items()} | (further or {})


LLAMA_3_1_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA_2 = functools.partial(preset, model_type="llama", V=32000, K=128, positions=4096, theta=1e4)
LLAMA_3 = functools.partial(preset, model_type="llama", V=128256, K=128, positions=8192, theta=5e5)
LLAMA_3_1 = functools.partial(LLAMA_3, positions=131072, further={"rope_scaling": LLAMA_3_1_ROPE})
LLAMA_3_2 = functools.partial(
    LLAMA_3_1, further={"rope_scaling": LLAMA_3_1_ROPE | {"factor": 32.0}}, tied=True)
QWEN_2_5 = functools.partial(preset, model_type="qwen2", V=152064, K=128, positions=131072, theta=1e6)
QWEN_3 = functools.partial(preset, model_type="qwen3", V=151936, K=128, positions=40960, theta=1e6)
QWEN_3_5 = functools.partial(preset, model_type="qwen3_5_text", V=248320, K=256, positions=262144, theta=1e7)
QWEN_3_5_SMALL = functools.partial(
    QWEN_3_5, layers=24, H=8, G=2, tied=True, further={"linear_num_value_heads": 16})
# For --dry_run and --random_init, which need no download. To add a preset, copy a row.
PRESETS = {
    "llama-2-7b": LLAMA_2("meta-llama/Llama-2-7b-hf", D=4096, F=11008, layers=32, H=32, G=32),
    "llama-2-13b": LLAMA_2("meta-llama/Llama-2-13b-hf", D=5120, F=13824, layers=40, H=40, G=40),
    "llama-2-70b": LLAMA_2("meta-llama/Llama-2-70b-hf", D=8192, F=28672, layers=80, H=64, G=8),
    "llama-3-8b": LLAMA_3("meta-llama/Meta-Llama-3-8B", D=4096, F=14336, layers=32, H=32, G=8),
    "llama-3.1-8b": LLAMA_3_1("meta-llama/Llama-3.1-8B", D=4096, F=14336, layers=32, H=32, G=8),
    "llama-3.1-70b": LLAMA_3_1("meta-llama/Llama-3.1-70B", D=8192, F=28672, layers=80, H=64, G=8),
    "llama-3.1-405b": LLAMA_3_1("meta-llama/Llama-3.1-405B", D=16384, F=53248, layers=126, H=128, G=8),
    "llama-3.2-1b": LLAMA_3_2("meta-llama/Llama-3.2-1B", D=2048, F=8192, layers=16, H=32, G=8, K=64),
    "llama-3.2-3b": LLAMA_3_2("meta-llama/Llama-3.2-3B", D=3072, F=8192, layers=28, H=24, G=8),
    "qwen2.5-0.5b": QWEN_2_5(
        "Qwen/Qwen2.5-0.5B", V=151936, D=896, F=4864, layers=24, H=14, G=2, K=64, positions=32768, tied=True),
    "qwen2.5-7b": QWEN_2_5("Qwen/Qwen2.5-7B", D=3584, F=18944, layers=28, H=28, G=4),
    "qwen2.5-32b": QWEN_2_5("Qwen/Qwen2.5-32B", D=5120, F=27648, layers=64, H=40, G=8),
    "qwen2.5-72b": QWEN_2_5("Qwen/Qwen2.5-72B", D=8192, F=29568, layers=80, H=64, G=8),
    "qwen3-0.6b": QWEN_3("Qwen/Qwen3-0.6B", D=1024, F=3072, layers=28, H=16, G=8, tied=True),
    "qwen3-1.7b": QWEN_3("Qwen/Qwen3-1.7B", D=2048, F=6144, layers=28, H=16, G=8, tied=True),
    "qwen3-4b": QWEN_3("Qwen/Qwen3-4B", D=2560, F=9728, layers=36, H=32, G=8, tied=True),
    "qwen3-8b": QWEN_3("Qwen/Qwen3-8B", D=4096, F=12288, layers=36, H=32, G=8),
    "qwen3-14b": QWEN_3("Qwen/Qwen3-14B", D=5120, F=17408, layers=40, H=40, G=8),
    "qwen3-32b": QWEN_3("Qwen/Qwen3-32B", D=5120, F=25600, layers=64, H=64, G=8),
    "qwen3-30b-a3b": QWEN_3(
        "Qwen/Qwen3-30B-A3B", model_type="qwen3_moe", D=2048, F=6144, layers=48, H=32, G=4,
        further={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                 "norm_topk_prob": True}),
    "qwen3.5-0.8b": QWEN_3_5_SMALL("Qwen/Qwen3.5-0.8B", D=1024, F=3584),
    "qwen3.5-2b": QWEN_3_5_SMALL("Qwen/Qwen3.5-2B", D=2048, F=6144),
    "qwen3.5-4b": QWEN_3_5("Qwen/Qwen3.5-4B", D=2560, F=9216, layers=32, H=16, G=4, tied=True),
    "qwen3.5-9b": QWEN_3_5("Qwen/Qwen3.5-9B", D=4096, F=12288, layers=32, H=16, G=4),
    "qwen3.5-27b": QWEN_3_5(
        "Qwen/Qwen3.5-27B", D=5120, F=17408, layers=64, H=24, G=4, further={"linear_num_value_heads": 48}),
    "qwen3.5-35b-a3b": QWEN_3_5(
        "Qwen/Qwen3.5-35B-A3B", model_type="qwen3_5_moe_text", D=2048, F=1, layers=40, H=16, G=2,
        further={"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}),
    "muse-glimmer-30b": preset(
        "meta-models/Muse-Glimmer-30B", "muse_glimmer_text", V=202048, D=6656, F=19968, layers=52,
        H=32, G=2, K=128, positions=131072, theta=5e5),
}

# ---------------- finding and reading a model

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# Weights that are copied to a whole result: vision towers, projectors, Qwen3.5's prediction of two tokens.
COPIED_PREFIXES = ("model.visual.", "mtp.", "model.vision_", "model.multi_modal_projector.")
# {prefix in files of Mistral 3, or of transformers' AutoModel: that of the modules}
OLD_PREFIXES = {
    "language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector.",
    "layers.": "model.layers.", "embed_tokens.": "model.embed_tokens.", "norm.": "model.norm.",
}
# What DDP, FSDP, torch.compile and PEFT's state_dict() have in names, and a model has not
WRAPPERS = re.compile(
    r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)[.]|(?<=[.]lora_[AB][.])default[.]")
PEFT_PREFIX = "base_model.model."  # PEFT's name of a tensor is this and ours
TINY = Path(__file__).parent / "tests" / "tiny"  # the built-in model, and its data: docs.jsonl

# What --model and --adapter may name, in the order in which it is looked for:
#
#                                         --model                               --adapter
#   tiny                                  the built-in model
#   a folder with config.json             this model
#   a folder with adapter_config.json     this adapter, on the base it names    this adapter
#   the folder of a run                   its final/, or else its merged/       its final/
#   the name of a preset                  random weights of its shape
#   an id on the Hub                      this model, downloaded                this adapter, downloaded
#
# find_result() looks for folders before any download, because an adapter decides which flags make sense.
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
BASE = "base_model_name_or_path"  # its key for the base
WEIGHTS = "model.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
FOLDERS = {"model": CONFIG, "adapter": ADAPTER_CONFIG}  # {flag: the file by which a folder is known}


def result_in(name, files=(CONFIG, ADAPTER_CONFIG)):
    """The first folder of NAME, NAME/final and NAME/merged that has one of these files, or None."""
    for folder in (Path(name), Path(name) / "final", Path(name) / "merged"):
        if any((folder / file).exists() for file in files):
            return folder
    return None


def is_adapter(folder):
    """Whether a folder has an adapter and no model: axolotl puts its base's config.json beside an adapter."""
    has_config = (folder / CONFIG).exists()
    return (folder / ADAPTER_CONFIG).exists() and not (has_config and weight_files(folder, WEIGHTS))


def find_result(model, adapter=None):
    """--model and --adapter, or None -> (model, adapter or None), by the table above."""
    if model is None and adapter:
        if not os.path.exists(adapter):
            raise ValueError(f"--adapter {adapter}: no such folder; one on the Hub needs its base as --model")
        if folder := result_in(adapter, [ADAPTER_CONFIG]):
            return find_result(str(folder))  # which names its base
    model = model or "tiny"
    folder = None if model == "tiny" else result_in(model)
    if folder and is_adapter(folder):
        if adapter:
            raise ValueError(f"--model {model} is an adapter: leave out --adapter, or merge this one first "
                             f"(--merge --model {model}) and give the merged/ that it writes")
        base = read_json(folder / ADAPTER_CONFIG).get(BASE)
        if not base or not isinstance(base, str):
            what = foreign_format(os.listdir(folder)) or f"name it: --adapter {folder} --model BASE"
            raise ValueError(f"{folder}/{ADAPTER_CONFIG}: {BASE} is {quoted(base)}, not the base: {what}")
        return base[:1000], str(folder)
    if folder and not adapter and (folder / CONFIG).exists() and (folder / ADAPTER_CONFIG).exists():
        note_once(f"the adapter beside this model is not read: --adapter {folder} reads it")
    if folder not in (None, Path(model)):  # ./tiny stays as it was typed: it is no built-in model
        model = str(folder)
    if adapter:
        adapter = str(result_in(adapter, [ADAPTER_CONFIG]) or adapter)
    return model, adapter or None


class ModelFiles(NamedTuple):
    """Where a model comes from."""

    config: dict  # config.json
    tokenizer: Path  # folder of the tokenizer
    weights: Path | None  # folder of the weights; None: random ones
    base: str  # what a PEFT adapter names as its base
    commit: str | None = None  # of the base on the Hub


@contextlib.contextmanager
def errors_of_base(model, adapter_folder):
    """Adds to an error about a base model which adapter names it, and how to give another base."""
    try:
        yield
    except ValueError as error:
        if not adapter_folder or read_json(adapter_folder / ADAPTER_CONFIG).get(BASE) != model:
            raise
        raise ValueError(f"{error}; {BASE} in {adapter_folder}/{ADAPTER_CONFIG} is {quoted(model)}; with "
                         f"another base: --adapter {adapter_folder} --model BASE") from error


def find_model(name, random_init, revisions=None):
    """--model -> ModelFiles. Downloads a Hub id. revisions: see tokenized()."""
    if name in PRESETS and not os.path.isdir(name):
        return ModelFiles(PRESETS[name], TINY, None, name)
    folder = folder_of("model", name, revisions, with_weights=False)
    base = str(folder.resolve()) if folder in (Path(name), TINY) else name
    raw = read_json(folder / CONFIG)
    quantization = raw.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method in ("bitsandbytes", "fp8", "compressed-tensors"):
        # WeightFiles dequantizes NF4 and FP8. A result names the model that these weights were made of.
        raw = {key: value for key, value in raw.items() if key != "quantization_config"}
        if HUB_NAME.fullmatch(str(raw.get("_name_or_path"))) and raw["_name_or_path"] != name:
            # said, because a copy of a fine-tuned model may still have that model's own base there
            base = raw["_name_or_path"]
            note_once(f"results name {base} as their base, which config.json says {name} was quantized from")
    config = lm.parse_config(raw, f"{name}: config.json")  # before a model that is refused is downloaded
    if not random_init:
        folder = folder_of("model", name, revisions)
    # Beside a tower there are two such keys. transformers 5 reads the one at the top, with a default if it is
    # absent, and older versions read the other one: where they differ, the weights decide.
    is_tied = config.tie_word_embeddings
    if config.prefix != "model." and is_tied != raw.get("tie_word_embeddings", not is_tied):
        if not random_init:
            is_tied = HEAD not in WeightFiles(folder).tensors
        raw = with_value(raw, "tie_word_embeddings", is_tied)
    commit = revisions.get(name) if base == name and revisions else None
    return ModelFiles(raw, folder, None if random_init else folder, base, commit)


def folder_of(flag, name, revisions=None, with_weights=True):
    """The folder of --model or --adapter, downloaded if it is on the Hub. revisions: see tokenized()."""
    config = FOLDERS[flag]
    folder = TINY if name == "tiny" else Path(name)
    if folder.is_file():
        what = foreign_format([name]) or f"give the folder that it is in, with its {config}"
        raise ValueError(f"--{flag} {name}: a file: {what}")
    if not folder.is_dir():
        if name.startswith((".", "/", "~")):
            raise ValueError(f"--{flag} {name}: no such folder")
        if name.count("/") != 1 or ":" in name:
            others = f"A folder of an adapter has its {config}"
            if flag == "model":
                others = did_you_mean(name) or f"Others are tiny and, with --random_init, {' '.join(PRESETS)}"
            raise ValueError(f"--{flag} {name}: no such folder, and no Hub id (org/name). {others}")
        from huggingface_hub import snapshot_download

        wanted = ["*.json", "*.jinja", "*.py", "merges.txt", "tokenizer.model", "README.md"]
        if with_weights:
            wanted.append("adapter*.safetensors" if flag == "adapter" else "*.safetensors")
        # consolidated.safetensors has the same weights once more
        ignored = ["onnx/*", "original/*", "*/*.safetensors", "consolidated*"]
        revisions = {} if revisions is None else revisions
        fetch = functools.partial(snapshot_download, name, revision=revisions.get(name),
                                  allow_patterns=wanted, ignore_patterns=ignored)
        try:
            folder = Path(from_hub(fetch))
        except Exception as error:  # its HTTP library has others, which another version does not have
            line = " ".join(str(error).split())[:1000]  # some have a whole page of HTML
            status = getattr(getattr(error, "response", None), "status_code", None)
            advice = "a partial download resumes at the next start"
            if status == 403 or type(error).__name__ == "GatedRepoError":
                advice = f"accept its licence at https://huggingface.co/{name}, then `hf auth login`"
            elif status in (401, 404):
                advice = f"misspelled, or private: then `hf auth login`. {did_you_mean(name)}"
            raise ValueError(f"--{flag} {name}: not a folder here, and the download from the Hub failed "
                             f"({advice.strip()}): {type(error).__name__}: {line}") from error
        revisions[name] = folder.name  # in the Hub's cache it has the name of its commit
    # find_result() has looked at folders that are here
    if flag == "model" and is_adapter(folder) and (with_weights or not (folder / CONFIG).exists()):
        base = read_json(folder / ADAPTER_CONFIG).get(BASE)
        raise ValueError(f"--model {name}: an adapter: give --adapter {name} and its base, --model {base}")
    if (folder / config).exists():
        return folder
    # what there is up to two levels below it, as in the Hub's cache
    below = [path for levels in ("", "*/", "*/*/") for path in folder.glob(f"{levels}*")]
    found = [f"--{other} {name if path.parent == folder else path.parent}"
             for other, file in FOLDERS.items() for path in below if path.name == file]
    what = f"give {listing(found)}" if found else foreign_format(below)
    if not what and any(path.suffix == ".safetensors" for path in below):
        what = f"weights alone: copy {config} and tokenizer*.json of the same training or its base to them"
    raise ValueError(f"{folder}: no {config}: {what or 'expected a folder as transformers or PEFT save it'}")


def did_you_mean(name):
    """A question with the presets' ids that a name may mean (Qwen3-4B, llama3:8b, meta/llama-3-8b), or ""."""
    def plain(text):
        return re.sub("[^a-z0-9.]", "", text.lower())

    typed = name.rstrip("/").rpartition("/")[2]
    ids = {}
    for preset_name, config in PRESETS.items():
        hub_id = config["_name_or_path"]
        known = hub_id.partition("/")[2]
        if typed.lower().startswith(known.lower()) and ":" not in typed:  # Llama-3.1-8B-Instruct
            hub_id += typed[len(known) :]
        ids |= {plain(preset_name): hub_id, plain(known): hub_id}
    inside = [known for known in ids if known in plain(typed)]
    similar = difflib.get_close_matches(plain(typed), ids, n=1, cutoff=0.8)
    similar = [known for known in similar if re.findall(r"\d", known) == re.findall(r"\d", typed)]
    begun = [known for known in ids if known.startswith(plain(typed))]
    meant = {ids[known] for known in sorted(inside, key=len)[-1:] or begun or similar} - {name}
    return f"Did you mean {listing(meant)}?" if meant else ""


# {a pattern of the names of files or of tensors: what has them, and what to do}
FOREIGN = {
    r"[.]gguf$": "GGUF is llama.cpp's format, mostly quantized: give the model that it was made of",
    r"adapters[.](safetensors|npz)$":
        "an adapter of MLX: `mlx_lm.fuse --model BASE --adapter-path DIR` makes a model of it",
    r"[.]distcp$|/pytorch_model_fsdp_\d+$":
        "shards of FSDP: `accelerate merge-weights` makes safetensors of them",
    r"/zero_to_fp32[.]py$|/global_step\d+$|_(model|optim)_states[.]pt$":
        "shards of DeepSpeed: its zero_to_fp32.py with --safe_serialization makes safetensors of them",
    r"/latest_checkpointed_iteration[.]txt$|[.]nemo$|/lit_model[.]pth|/(meta|hf)_model_\d+_\d+[.]pt$"
    r"|/adapter_\d+[.]pt$":
        "a format of Megatron, NeMo, LitGPT or torchtune: their converters make a folder of Hugging Face's",
    r"params[.]json$|consolidated[.]safetensors$|[.]00[.]pth$":
        "Meta's or Mistral's own format: take the same model's config.json and model*.safetensors",
    r"/model-rank-\d+-part-\d+[.]safetensors$|[.](qkv_proj|gate_up_proj|w?qkv|Wqkv|query_key_value)[.]":
        "fused layers, as vLLM has them: give the folder that transformers saves",
    r"[.]base_layer[.]": "base and adapter: PEFT's merge_and_unload() and save_pretrained() make one model",
    # others of these lie beside weights
    r"^(?!.*/(optimizer|scheduler|rng_state|scaler|training_args)).*[.](pth|pt|bin|h5|msgpack|onnx|npz)$":
        "safetensors alone are read (.bin and .pth can run code): transformers' save_pretrained writes them",
}


def foreign_format(names):
    """What FOREIGN says of the first of its patterns that one of these names has, or None."""
    for pattern, what in FOREIGN.items():
        if any(re.search(pattern, f"/{name}") for name in names):
            return what
    return None


def weight_files(folder, single):
    """The names of the files with a folder's weights: those of its index, or its one file, or all parts."""
    # An adapter may lie beside its base. Mistral's consolidated.safetensors has other names of tensors.
    kind = "^(?!adapter|consolidated).*(model|weights)" if single == WEIGHTS else "adapter|lora"
    index = folder / f"{single}.index.json"
    others = [path for path in folder.glob("*.safetensors.index.json") if re.search(kind, path.name)]
    if len(others) == 1 and not (folder / single).exists():
        index = others[0]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
        # a name with a slash could read any file of this machine
        if not names or not all(re.fullmatch(r"[^/\0-\x1f]{1,200}[.]safetensors", name) for name in names):
            raise ValueError(f"{index}: weight_map: expected {{tensor: file}} with plain names of files")
        # transformers would read the one, and vLLM the other
        if single not in names and (folder / single).exists():
            raise ValueError(f"{index}: does not name {single}, which is there as well: remove one of them")
        return names
    if (folder / single).exists():
        return [single]
    names = sorted(path.name for path in folder.glob("*.safetensors") if re.search(kind, path.name))
    n_parts = re.search(r"-of-(\d+)[.]safetensors$", names[0]) if names else None
    return names if len(names) == (int(n_parts[1]) if n_parts else 1) else []


# types of quantized weights, and the ends of the names of a matrix's tensors: FP8's scale, bitsandbytes' rest
QUANTIZED = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
NF4_STATE = ".quant_state.bitsandbytes__nf4"
PARTS = "", "_scale", "_scale_inv", NF4_STATE, ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
FP8_BLOCK = 128  # rows and columns that share a scale, if it is not that of a row or of the tensor
# Qwen3.5's files stack all experts: {name: the matrices of each}. write_safetensors() makes stacks again.
STACKS = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}


def matrices_in(name, stored):
    """Yields (name, Stored) for each matrix that a tensor of a file has: of experts.gate_up_proj [2, 6, 4]
    experts.0.gate_proj.weight [3, 4] of rows 0 to 2, experts.0.up_proj.weight of 3 to 5, and so on."""
    before, _, stack = name.partition(".experts.")
    if stack not in STACKS or len(stored.shape) != 3:  # see check_weights()
        yield name, stored
        return
    n_experts, n_rows, width = stored.shape
    n = n_rows // len(STACKS[stack])  # rows of a matrix
    for number, (i, layer) in enumerate(itertools.product(range(n_experts), STACKS[stack])):
        matrix = stored._replace(shape=(n, width), first_row=number * n, stack=stored.shape)
        yield f"{before}.experts.{i}.{layer}.weight", matrix


def module_name(name):
    name = WRAPPERS.sub("", name)
    for old, new in OLD_PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def check_parts(parts, state, shape):
    """Raises a ValueError if {one of PARTS: its Stored} have other types or sizes than FP8 or NF4."""
    n = math.prod(shape)
    n_blocks = n // nf4.BLOCK
    expected = {"": (QUANTIZED["F8_E4M3"], n)}
    if state:
        expected = {"": (torch.uint8, n // 2), ".absmax": (torch.float32, n_blocks)}
        if parts[".absmax"].dtype == torch.uint8:  # they are quantized, too
            n_nested = nf4.ceil_div(n_blocks, state["nested_blocksize"])
            expected |= {".absmax": (torch.uint8, n_blocks), ".nested_absmax": (torch.float32, n_nested),
                         ".nested_quant_map": (torch.float32, 256)}
    elif any(stored.dtype not in DTYPES.values() for part, stored in parts.items() if part):
        raise ValueError("a scale that is no float")
    for part, (dtype, size) in expected.items():
        stored = parts.get(part)
        if not stored or stored.dtype != dtype or math.prod(stored.shape) != size:
            found = f"{list(stored.shape)} in {stored.dtype}" if stored else "none"
            raise ValueError(f"{part or 'codes'}: expected {size:,} numbers in {dtype}, got {found}")


class WeightFiles:
    """The weights of a folder, read by rows. tensors: {name: Stored}. A ValueError if a file is damaged."""

    def __init__(self, folder, single=WEIGHTS):
        self.folder = Path(folder)
        self.tensors = {}
        self.quantized = {}  # {name of a matrix: ({one of PARTS: its Stored}, bitsandbytes' state or None)}
        self.format = "FP8"  # that of these
        self.open_files = {}  # {path: what the library has opened}
        for path in [self.folder / name for name in weight_files(self.folder, single) or [single]]:
            check_is_file(path)
            if not path.exists():
                why = foreign_format(os.listdir(self.folder)) or (
                    f"the download is incomplete, or several files lack their {single}.index.json")
                raise ValueError(f"{path}: no such file: {why}; there are {listing(os.listdir(self.folder))}")
            self.add_file(path)
        self.join_quantized()

    def add_file(self, path):
        try:
            # not mapped, as by default: the pages would pile up in memory
            file = safe_open(path, framework="pt", backend="pread")
        except SafetensorError as error:
            why = f"damaged or cut short ({listing([str(error)])}): download it again"
            raise ValueError(f"{path}: {why}") from error
        self.open_files[path] = file
        for name in file.keys():  # noqa: SIM118
            stored = file.get_slice(name)
            dtype = stored.get_dtype()
            if name.endswith((".activation_scale", ".input_scale", ".k_scale", ".v_scale")):
                continue  # scales of inputs, keys and values, which nothing here quantizes
            if name.startswith("v_head."):
                note_once(f"{path}: the value head (v_head.*) of TRL is left out")
                continue
            if 0 in stored.get_shape():
                raise ValueError(f"{path}: {listing([name])} is empty, as ZeRO-3 and FSDP save it: its "
                                 "zero_to_fp32.py or `accelerate merge-weights` makes weights of all shards")
            tensor = Stored(path, tuple(stored.get_shape()), (DTYPES | QUANTIZED).get(dtype, dtype), name)
            for module, matrix in matrices_in(module_name(name), tensor):
                if module in self.tensors:
                    other = self.tensors[module].path.name
                    raise ValueError(f"{path}: {listing([name])} is in {other} as well")
                self.tensors[module] = matrix

    def join_quantized(self):
        """Replaces the tensors of a quantized matrix by the matrix."""
        for name in list(self.tensors):
            layer, _, kind = name.partition(".weight")
            if kind not in (NF4_STATE, "_scale", "_scale_inv"):
                continue
            matrix = f"{layer}.weight"
            with errors_of(f"{self.folder}: {listing([name])}: not as bitsandbytes or transformers write it"):
                parts = {part: self.tensors.pop(matrix + part) for part in PARTS
                         if matrix + part in self.tensors}
                form = parts[""]._replace(dtype=torch.bfloat16)
                state = None
                if kind == NF4_STATE:
                    self.format = "bitsandbytes' NF4"
                    state = json.loads(bytes(self.open_files[parts[kind].path].get_tensor(name).tolist()))
                    N, D = state["shape"]
                    if state["blocksize"] != nf4.BLOCK or D % nf4.BLOCK:
                        raise ValueError(f"expected rows in blocks of {nf4.BLOCK}, got {quoted(state)}")
                    form = form._replace(shape=(N, D), dtype=getattr(torch, state["dtype"]))
                check_parts(parts, state, form.shape)
                self.tensors[matrix] = form
                self.quantized[matrix] = parts, state
                self.scales(matrix)  # so that an error comes now
        for name, stored in self.tensors.items():
            if stored.dtype not in DTYPES.values():
                raise ValueError(f"{stored.path}: {listing([name])}: expected float32, float16 or bfloat16, "
                                 f"got {stored.dtype}; {lm.UNQUANTIZED}")

    def scales(self, name):
        """The scales of a quantized matrix, [N, M] float32: one for each of M blocks in a row."""
        N, D = self.tensors[name].shape
        parts, state = self.quantized[name]
        found = {part: self.open_files[stored.path].get_tensor(stored.name).float()
                 for part, stored in parts.items() if part}
        if state:
            absmax = found[".absmax"]
            if parts[".absmax"].dtype == torch.uint8:
                nested = found[".nested_absmax"][torch.arange(len(absmax)) // state["nested_blocksize"]]
                absmax = found[".nested_quant_map"][absmax.int()] * nested + state["nested_offset"]
            return absmax.view(N, D // nf4.BLOCK)
        (scales,) = found.values()
        blocks = nf4.ceil_div(N, FP8_BLOCK), nf4.ceil_div(D, FP8_BLOCK)
        if scales.numel() == 1 or scales.shape in ((N,), (N, 1)):
            return scales.view(-1, 1).expand(N, 1)
        if scales.shape != blocks:
            raise ValueError(f"scales {list(scales.shape)}, expected one, {N}, or {list(blocks)}")
        return scales.repeat_interleave(FP8_BLOCK, 0)[:N]

    def rows(self, name, start, stop):
        """Rows [start, stop) of a matrix or vector on the CPU, dequantized."""
        if name not in self.quantized:
            return self.read(self.tensors[name], start, stop)
        N, D = self.tensors[name].shape
        dtype = self.tensors[name].dtype
        parts, state = self.quantized[name]
        n = parts[""].n_rows // N  # rows of the file for a row of the matrix
        codes = self.read(parts[""], start * n, stop * n)
        scales = self.scales(name)[start:stop]
        if state:
            return nf4.dequantize_blocks(codes.view(torch.uint8).view(-1, D // 2), scales, dtype)
        w_ND = torch.empty(codes.shape, dtype=dtype)
        for w, q, s in nf4.bands(w_ND, codes, scales):
            n = max(FP8_BLOCK, D // s.shape[1])  # columns that share a scale
            w.copy_(q.float() * s.repeat_interleave(n, 1)[:, :D])
        return w_ND

    def read(self, stored, start, stop):
        """Rows [start, stop) as they are stored."""
        shape = stored.stack or stored.shape
        if start == stop:
            start = stop = 0  # the library refuses an empty range at the end of a tensor
        try:
            entries = self.open_files[stored.path].get_slice(stored.name)
            start += stored.first_row
            stop += stored.first_row
            if len(shape) < 3:
                return entries[start:stop]
            # a stack, or a convolution: all rows of the entries that have some of these rows
            n_rows = math.prod(shape[1:-1])
            first = start // n_rows
            rows = entries[first : nf4.ceil_div(stop, n_rows)].flatten(0, -2)
            return rows[start - first * n_rows : stop - first * n_rows]
        except SafetensorError as error:
            raise OSError(f"{stored.path}: {stored.name}: became shorter while it was read") from error

    def crc(self):
        """Checksum of 1 MB from the middle of each file, to tell a base model from its Instruct version."""
        crc = 0
        for path in self.open_files:
            with open(path, "rb") as file:
                file.seek(path.stat().st_size // 2)
                crc = zlib.crc32(file.read(1 << 20), crc)
        return crc


class RandomWeights:
    """Replaces WeightFiles. Weights depend only on seed, name and row: any sharding gets the same model."""

    def __init__(self, model, seed, device):
        self.seed = seed
        self.device = device
        self.config = model.config
        dtype = self.config.dtype
        self.tensors = {name: Stored(None, shape, dtype, name)
                        for name, shape in shapes_in_files(model).items()}
        norms = [name for name, module in model.named_modules()
                 if isinstance(module, lm.RMSNorm) and not module.adds_one]
        self.ones = {names_in_files(f"{name}.weight", self.config)[0] for name in norms}

    def rows(self, name, start, stop):
        shape = self.tensors[name].shape
        if len(shape) == 1:
            return torch.full((stop - start,), float(name in self.ones))
        rows = random_rows(name, shape[-1], start, stop, self.seed, self.device)
        return rows.mul_(self.config.initializer_range)

    def crc(self):
        return zlib.crc32(repr((self.seed, self.config)).encode())


def with_value(raw, key, value):
    """Changes a value of config.json, which vision models have in text_config or in both places."""
    if "text_config" in raw:
        raw = raw | {"text_config": raw["text_config"] | {key: value}}
    # transformers reads tie_word_embeddings at the top, where it is true by default
    if key in raw or "text_config" not in raw or key == "tie_word_embeddings":
        raw = raw | {key: value}
    return raw


def has_two_matrices(adapter_reader, config):
    """Whether an adapter's embedding and head differ though its base ties them: PEFT trains both."""
    names = [PEFT_PREFIX + name for name in (embedding_in_files(config), HEAD)]
    if not config.tie_word_embeddings or not adapter_reader.tensors.keys() >= {*names}:
        return False
    embedding, head = (adapter_reader.tensors[name] for name in names)
    if embedding.shape != head.shape:
        return True
    for i in range(0, head.n_rows, 4096):  # whole matrices would be twice in host memory
        stop = min(i + 4096, head.n_rows)
        if not torch.equal(*(adapter_reader.rows(name, i, stop) for name in names)):
            return True
    return False


def random_rows(name, width, start, stop, seed, device, uniform=False):
    """Random rows, normal or uniform in [-1, 1). Each 256 rows have their own seed."""
    out = torch.empty(stop - start, width, device=device)
    for i in range(start // 256, nf4.ceil_div(stop, 256)):
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}/{i}".encode()))
        rows = torch.empty(256, width, device=device)
        if uniform:
            rows.uniform_(-1, 1, generator=generator)
        else:
            rows.normal_(generator=generator)
        first = max(start, i * 256)
        last = min(stop, i * 256 + 256)
        out[first - start : last - start] = rows[first - i * 256 : last - i * 256]
    return out


def names_in_files(name, config):
    """The names of a parameter, or of its NF4 codes, in files: one, or one for each of stacked experts."""
    # our own are NF4's codes, and the module that computes Gated DeltaNet's decay
    name = name.removesuffix("_codes").replace(".decay.", ".")
    # with a vision tower it is "model.language_model."
    name = re.sub("^model[.]", config.prefix, name)
    before, is_stack, after = name.partition(".experts.")
    return [f"{before}.experts.{i}.{after}" for i in range(config.num_experts)] if is_stack else [name]


def shapes_in_files(model):
    """{name: shape} of a model's parameters in files."""
    shapes = {}
    for parameter, p in model.named_parameters():
        names = names_in_files(parameter, model.config)
        n_rows, *width = p.shape
        if parameter.endswith("conv1d.weight"):
            width = 1, *width  # torch's Conv1d with a group per channel has [channels, 1, taps]
        shapes |= dict.fromkeys(names, (n_rows // len(names), *width))
    return shapes


def stacked_rows(reader, names, n_rows, start, stop):
    """Reads rows [start, stop) of a parameter that stacks these matrices: yields (rows, their slice)."""
    n = n_rows // len(names)  # all experts are of one size
    for i in range(start // n, nf4.ceil_div(stop, n)):
        first = max(start, i * n)
        last = min(stop, i * n + n)
        rows = reader.rows(names[i], first - i * n, last - i * n)
        yield rows, slice(first - start, last - start)


def whole(reader, name):
    return reader.rows(name, 0, reader.tensors[name].n_rows)


def check_weights(model, reader, folder):
    """Raises a ValueError if names or shapes in files are not those of the model, or of its LoRA."""
    expected = shapes_in_files(model)
    advice = "weights of another model?"
    vocabulary = model.config.vocab_size, model.config.hidden_size
    if any(".lora_" in name for name in expected):
        advice = f"{MERGE}, unless it is an adapter of another model"
        trained = []  # PEFT writes and expects both embedding and head, even if they are tied
        if model.model.embed_tokens.weight.requires_grad:
            trained = [embedding_in_files(model.config), HEAD]
        expected |= dict.fromkeys(trained, vocabulary)
        expected = {PEFT_PREFIX + name: shape for name, shape in expected.items()
                    if ".lora_" in name or name in trained}
    elif model.config.tie_word_embeddings and HEAD in reader.tensors:
        expected[HEAD] = vocabulary  # a duplicate: load_weights_() compares the values
    found = {name: stored.shape for name, stored in reader.tensors.items()
             if not name.endswith("rotary_emb.inv_freq")  # old Llama-2 files have it
             and not name.startswith(COPIED_PREFIXES)}
    differences = {
        "missing": expected.keys() - found,
        "unexpected": found.keys() - expected,
        "wrong shape": [f"{name} is {list(found[name])}, not {list(expected[name])}"
                        for name in expected.keys() & found if found[name] != expected[name]],
    }
    if differences["missing"] == {HEAD}:
        advice = "config.json does not tie the head: tie_word_embeddings true takes the embedding for it"
    if any(differences.values()):
        text = "; ".join(f"{what}: {listing(names)}" for what, names in differences.items() if names)
        raise ValueError(f"{folder}: {text}: {foreign_format(differences['unexpected']) or advice}")


def embedding_in_files(config):
    return re.sub("^model[.]", config.prefix, EMBEDDING)


def untrained_tokens(reader, config, ids):
    """Those of `ids` whose embedding is all zero, as Llama 3's base has them for its tokens of chats."""
    name = embedding_in_files(config)
    return [i for i in sorted(ids) if i < config.vocab_size and not reader.rows(name, i, i + 1).any()]


# These keys of adapter_config.json may have these values, ADAPTER_FREE any value; others must be unset.
ADAPTER_KEYS = {"peft_type": ["LORA"], "task_type": ["CAUSAL_LM"], "bias": ["none"],
                # PiSSA and others change the base weights
                "init_lora_weights": [True, False, "gaussian", "eva", "orthogonal"],
                "ensure_weight_tying": [True, False],  # a tied pair stays one here in any case
                "layers_to_transform": [],  # 0 and false are layer 0
                "rank_pattern": [{}], "alpha_pattern": [{}], "loftq_config": [{}]}
ADAPTER_FREE = (
    "r", "lora_alpha", "lora_dropout", "target_modules", "base_model_name_or_path", "auto_mapping",
    "revision", "inference_mode", "peft_version", "megatron_core", "qalora_group_size", "use_rslora",
    "modules_to_save", "exclude_modules", "layers_pattern",
)
# for adapters that are not read, such as PEFT's of stacked experts on transformers 5
MERGE = "merge it into its base with PEFT (merge_and_unload, save_pretrained) and give that folder as --model"


def open_adapter(folder):
    """A PEFT LoRA adapter -> (WeightFiles, {flag: value})."""
    where = f"{folder}/{ADAPTER_CONFIG}"
    config = read_json(where)
    if "peft_type" not in config:
        raise ValueError(f"{where}: no peft_type: {foreign_format(os.listdir(folder)) or 'expected LORA'}")
    for key, value in config.items():
        if key not in ADAPTER_FREE and value not in [None, *ADAPTER_KEYS.get(key, [False, "", []])]:
            raise ValueError(f"{where}: {listing([key])} = {quoted(value)} is not implemented: {MERGE}")
    reader = WeightFiles(folder, ADAPTER_WEIGHTS)
    # PEFT writes modules of a resized vocabulary three times: the plain name has the trained weights
    for name in list(reader.tensors):
        plain = re.sub("[.](modules_to_save|original_module)[.]weight$", ".weight", name)
        if plain != name and plain in reader.tensors:
            del reader.tensors[name]
    found = {lm.target_of(name.split(".lora_")[0]) for name in reader.tensors if ".lora_" in name}
    if not found or not found <= set(lm.LORA_TARGETS):
        raise ValueError(f"{folder}: {ADAPTER_WEIGHTS} has {listing(found)}, expected some of "
                         f"{', '.join(lm.LORA_TARGETS)}: {MERGE}")
    # PEFT writes embedding and head if modules_to_save names them, or if the vocabulary was resized
    in_full = {name.split(".")[-2] for name in reader.tensors if ".lora_" not in name}
    modules = config.get("modules_to_save")
    if in_full not in (set(), {"embed_tokens", "lm_head"}) or (modules and not in_full):
        raise ValueError(f"{where}: modules_to_save = {quoted(modules)}, and beside adapters there is "
                         f"{listing(in_full) or 'nothing'}: expected embed_tokens and lm_head, or neither: "
                         f"{MERGE}")
    return reader, {
        "lora_rank": lm.read_field(config, "r", lm.Bounds(int, 1, 4096), where),
        "lora_alpha": lm.read_field(config, "lora_alpha", lm.POSITIVE, where),
        "lora_dropout": lm.read_field(config, "lora_dropout", lm.Bounds(float, 0, 0.99, 0.0), where),
        "rslora": lm.read_field(config, "use_rslora", lm.Bounds(bool, False, True, False), where),
        "lora_targets": [target for target in lm.LORA_TARGETS if target in found],
        "train_embeddings": bool(in_full),
    }


@torch.no_grad()
def load_weights_(model, reader, adapter_reader, seed, device, progress=False, frozen_only=False):
    """Fills a model, one tensor at a time. adapter_reader: None for a fresh adapter."""
    params = dict(model.named_parameters())
    disable = None if progress else True  # None: no bar where stderr is no terminal
    for name in tqdm(params, "loading weights", unit="tensor", disable=disable, leave=False):
        if frozen_only and params[name].requires_grad:
            continue
        if name.endswith("weight_scales"):
            continue  # written along with their codes
        out, start = nf4.local(params[name])
        stop = start + len(out)
        names = names_in_files(name, model.config)
        source = reader
        trained_in_full = name in (EMBEDDING, HEAD) and params[name].requires_grad
        if ".lora_" in name or (adapter_reader and trained_in_full):
            source = adapter_reader
            names = [PEFT_PREFIX + one for one in names]
        if name in (EMBEDDING, HEAD):  # see fill_new_rows_() for those that files do not have
            stop = min(stop, source.tensors[names[0]].n_rows)
        if start >= stop:
            continue  # some ranks have no row of a small parameter
        if source is None:  # a fresh adapter: B is zero, and A is U(-1/sqrt(in), 1/sqrt(in)), as PEFT begins
            out.zero_()
            if name.endswith("lora_A.weight"):
                width = out.shape[1]
                # drawn on the CPU: a GPU draws others
                out.copy_(random_rows(name, width, start, stop, seed, "cpu", uniform=True) * width**-0.5)
            continue
        for rows, out_rows in stacked_rows(source, names, len(params[name]), start, stop):
            if name.endswith("weight_codes"):
                bits = out.shape[1] * 8 // rows.shape[1]
                scales, _ = nf4.local(params[name.removesuffix("codes") + "scales"])
                out[out_rows], scales[out_rows] = nf4.quantize(rows.to(device), bits, name)
            else:
                out[out_rows] = rows
        # A tied model has no place for another head. That of an adapter is equal, see has_two_matrices().
        has_head = name == EMBEDDING and HEAD not in params and source is reader and HEAD in reader.tensors
        if has_head and not torch.equal(reader.rows(names[0], start, stop), reader.rows(HEAD, start, stop)):
            raise ValueError(f"config.json ties the head to the embedding, but {HEAD} in the files differs: "
                             "set tie_word_embeddings to false")


@torch.no_grad()
def fill_new_rows_(model, reader, new_ids, seed):
    """Fills rows of embedding and head that files lack: the old rows' mean + 0.1 * deviation * noise."""
    params = dict(model.named_parameters())
    embedding = embedding_in_files(model.config)
    n_stored = reader.tensors[embedding].n_rows
    n_old = min(n_stored, new_ids.start)  # what follows are rows of no token
    for name, in_files in {EMBEDDING: embedding, HEAD: HEAD}.items():
        if name not in params:
            continue  # the head of a tied pair
        out, first = nf4.local(params[name])
        sums = torch.zeros(2, out.shape[1], dtype=torch.float64)
        for i in range(0, n_old, 4096):  # all rows in float64 would take much memory
            rows = reader.rows(in_files, i, min(i + 4096, n_old)).cpu().double()
            sums += torch.stack([rows.sum(0), rows.square().sum(0)])
        mean, mean_square = sums / n_old
        deviation = (mean_square - mean.square()).clamp_(min=0).sqrt()
        begin = max(first, n_old)
        end = min(first + len(out), new_ids.stop if new_ids.stop <= n_stored else params[name].shape[0])
        if begin < end:
            noise = random_rows(f"new rows of {name}", len(mean), begin, end, seed, "cpu")
            out[begin - first : end - first] = (mean + 0.1 * deviation * noise).to(out)


# ---------------- writing a model

def full_tensors(model, trainable_only):
    """Yields (name in files, full tensor on the CPU), one parameter in memory at a time. Collective."""
    lm.reshard_(model)
    shapes = shapes_in_files(model)
    for parameter, param in model.named_parameters():
        if trainable_only and not param.requires_grad:
            continue
        full = param.full_tensor() if nf4.is_sharded(param) else param
        names = names_in_files(parameter, model.config)
        matrices = full.detach().cpu().chunk(len(names))  # all experts are of one size
        for name, matrix in zip(names, matrices):
            yield name, matrix.view(shapes[name])


def save_model(tensors, layout, out, raw_config, write):
    """Writes config.json and model.safetensors. Every rank iterates (that gathers shards), one writes."""
    try:
        if write:
            write_safetensors(out / "model.safetensors", layout, tensors)
            if not any(out.glob("*.py")):  # auto_map would name code that the result does not have
                raw_config = {key: value for key, value in raw_config.items() if key != "auto_map"}
            write_json(out / "config.json", with_both_spellings(raw_config))
    finally:  # also where the disk is full: the other ranks wait in the iterator's collectives
        for _ in tensors:
            pass


def begin_result(out, tokenizer):
    remove(out)  # what a try before has left
    make_folder(out)
    tokenizer.save(out)


def layout_of_result(reader, config):
    """{name: Stored} of a result: as in the files, with a vocabulary that may have grown."""
    layout = {name: stored._replace(name=WRAPPERS.sub("", stored.name))
              for name, stored in reader.tensors.items()}
    for name in layout.keys() & {embedding_in_files(config), HEAD}:
        layout[name] = layout[name]._replace(shape=(config.vocab_size, config.hidden_size))
    if config.tie_word_embeddings:
        layout.pop(HEAD, None)  # readers take the embedding
    return layout


def with_both_spellings(raw):
    """dtype and RoPE as transformers 5 and 4 spell them: 4 would take float32, and a theta of 10,000."""
    config = lm.parse_config(raw)
    if dtype := raw.get("dtype") or raw.get("torch_dtype"):
        raw = raw | {"dtype": dtype, "torch_dtype": dtype}
    if config.family.norms_add_one:  # version 4 has neither Qwen3.5 nor Muse Glimmer
        return raw
    if "text_config" in raw:
        return raw | {"text_config": with_both_spellings(raw["text_config"])}
    rope = lm.rope_in_file(raw)  # numbers as the file has them: not every reader takes 8.0 for an 8
    rope.pop("partial_rotary_factor", None)  # RoPE rotates the whole of a head
    theta = rope.pop("rope_theta", config.rope_theta)
    old = None if rope == {"rope_type": "default"} else rope
    return raw | {"rope_theta": theta, "rope_scaling": old, "rope_parameters": {**rope, "rope_theta": theta}}


def save_adapter(adapter_tensors, out, base, rank, alpha, dropout, targets, rslora=False):
    """Writes an adapter for PEFT. A tied embedding is the head, too: an older PEFT would keep the base's."""
    saved = {}
    embedding = [name for name in adapter_tensors if name.endswith("embed_tokens.weight")]
    if embedding:
        saved = {"modules_to_save": ["embed_tokens", "lm_head"]}
        if HEAD not in adapter_tensors:  # a tied pair; PEFT of 2025 ends with a TypeError at an unknown key
            saved["ensure_weight_tying"] = True
            adapter_tensors = adapter_tensors | {HEAD: adapter_tensors[embedding[0]]}
    named = {PEFT_PREFIX + name: tensor for name, tensor in adapter_tensors.items()}
    write_safetensors(out / ADAPTER_WEIGHTS, layout_of(named), named.items())
    if any(".experts." in name for name in named):
        dropout = 0.0  # on transformers 5 PEFT stacks experts, and a stack has no dropout
    if float(alpha).is_integer():
        alpha = int(alpha)  # Ollama refuses 64.0
    write_json(out / ADAPTER_CONFIG, {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", BASE: base, "r": rank,
        "bias": "none", "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": list(targets),
        "use_rslora": rslora, "inference_mode": True, **saved})


def modules_in(adapter_tensors, config, targets):
    """PEFT's target_modules: self_attn.q_proj where a vision tower has a q_proj, or attention a gate_proj."""
    has_tower = config.prefix != "model."
    has_gate = lm.GATE_TARGET in lm.targets_in(config)
    if config.num_experts or not (has_tower or has_gate):
        return targets
    # not of the embedding and head of --train_embeddings
    return sorted({".".join(name.split(".")[-4:-2]) for name in adapter_tensors if ".lora_" in name})


def card_of(args, files):
    """The text of a result's README.md, by which the Hub finds the base. It names only what is public."""
    lines = ["---", f"library_name: {'peft' if args.lora else 'transformers'}"]
    base = files.base if HUB_NAME.fullmatch(files.base) else None
    if base:
        lines.append(f"base_model: {base}")
    card = files.weights and files.weights / "README.md"
    if card and card.is_file():
        found = re.search(r"\A---\n(?:.+\n)*?(license: *[\w.-]+)\n", card.read_text("utf-8", "replace"))
        lines += [found[1]] if found else []
    what = "A LoRA adapter for" if args.lora else "All weights, fine-tuned, of"
    return "\n".join([*lines, "---", "", f"{what} {base or 'a model of its own'}, trained with oomph.", ""])


def export(args, model, reader, files, tokenizer, out, ranks):
    """Writes final/. Collective. If that fails, all ranks raise the same OSError and may try again."""
    unfinished = out / "final.part"
    is_first = ranks.rank == 0
    with ranks.agree(end_run=False):  # before the first collective
        if is_first:
            begin_result(unfinished, tokenizer)
    tensors = full_tensors(model, args.lora)
    if args.lora:  # every rank goes through the tensors, which are gathered
        # embedding and head in the dtype of the base, as in a whole model
        adapter_tensors = {name: tensor if ".lora_" in name else tensor.to(reader.tensors[name].dtype)
                           for name, tensor in tensors if is_first}
    with ranks.agree(end_run=False):
        if not args.lora:
            layout = layout_of_result(reader, model.config)
            trained = ((name, tensor.to(layout[name].dtype)) for name, tensor in tensors)
            others = sorted(layout.keys() - shapes_in_files(model)) if is_first else []
            copies = ((name, whole(reader, name)) for name in others)
            tensors = itertools.chain(trained, copies)
            save_model(tensors, layout, unfinished, files.config, write=is_first)
        elif is_first:
            modules = modules_in(adapter_tensors, model.config, args.lora_targets)
            save_adapter(adapter_tensors, unfinished, files.base, args.lora_rank, args.lora_alpha,
                         args.lora_dropout, modules, args.rslora)
            if files.commit:
                settings = read_json(unfinished / ADAPTER_CONFIG)
                write_json(unfinished / ADAPTER_CONFIG, settings | {"revision": files.commit})
        if is_first:
            replace_file(unfinished / "README.md", card_of(args, files))
            remove(out / "merged")  # belongs to an older final/
            put_in_place(unfinished, out / "final")


def merge(args, reader, adapter_reader, files, tokenizer, out):
    """Writes merged/: the original weights, without NF4's error, plus scale * B A, summed in float32."""
    unfinished = out / "merged.part"
    scale = lm.lora_scale(args.lora_rank, args.lora_alpha, args.rslora)
    layout = layout_of_result(reader, lm.parse_config(files.config))
    where = f"--merge, {out}/final is complete" if (out / "final").exists() else f"--merge, {out}"
    with writing(where, "merged/"):
        begin_result(unfinished, tokenizer)
        tensors = ((name, merged_weight(reader, name, adapter_reader, scale)) for name in layout)
        save_model(tensors, layout, unfinished, files.config, write=True)
        put_in_place(unfinished, out / "merged")


def merged_weight(reader, name, adapter_reader, scale):
    """A matrix or vector on the CPU: the adapter's own, or the base's plus scale * B A."""
    own = PEFT_PREFIX + name
    if own in adapter_reader.tensors:
        return whole(adapter_reader, own).to(reader.tensors[name].dtype)
    weight = whole(reader, name).cpu()  # random weights are made on the GPU
    layer = own.removesuffix(".weight")
    if f"{layer}.lora_A.weight" in adapter_reader.tensors:
        a_RD = whole(adapter_reader, f"{layer}.lora_A.weight")
        b_NR = whole(adapter_reader, f"{layer}.lora_B.weight")
        product_ND = b_NR.float() @ a_RD.float()
        weight = weight.float().add_(product_ND, alpha=scale)
    return weight.to(reader.tensors[name].dtype)  # random weights are made in float32
