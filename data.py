"""From files to packed rows: reading, chat templates and loss masks, best-fit packing, the loader.

A document is a run of n tokens with a flag per token, "train on predicting this one". It fills n - 1 positions of a
row: position p holds token p and its target is token p + 1, so a target never crosses into the next document (torchtune
trained on exactly that until #2613). Packing puts several documents into one row of `seq_len` positions, longest first,
each into the fullest row that still has room (best-fit decreasing, arXiv:2404.10830). Positions restart in each
document and `spans` keeps attention inside it; the padding behind the last one is in no span and has no target.

Masks come from character spans, never from searching for marker tokens: a conversation is rendered once, the tokenizer
returns the characters behind each token, and a token is trained on if it overlaps a span. The spans are the template's
own {% generation %} blocks, or else what an assistant turn adds to the rendering, used only where the text before it
really is a prefix of the text after it (Qwen3's template rewrites earlier turns: trl #6361).

The order of the rows depends on --seed and the epoch alone. The global batch of a step is the same rows in the same
order however it is split over ranks and micro-batches, and the loader's whole position is the number of steps taken.
"""

import ast
import bisect
import functools
import inspect
import itertools
import json
import sysconfig
import zlib
from concurrent.futures import ThreadPoolExecutor
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

# ---------------------------------------------------------------- chat templates

CHATML = """\
{{ bos }}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content + end_of_turn }}{% endgeneration %}
{% else %}{{ m.content + end_of_turn }}{% endif %}

{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
OPEN, CLOSE = "\ue000<generation>", "\ue000</generation>"  # mark the tag's span in the rendered text; private use area
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


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """transformers' filter: jinja's own escapes HTML and sorts the keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(source):
    """A chat template in the sandbox that transformers uses: no attribute access to internals, nothing mutable."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = TODAY.strftime
    env.filters["tojson"] = tojson
    return env.from_string(source)


class Tokenizer:
    """tokenizer.json, the special tokens, and the chat template of a model folder (or of `template_file`).

    Raises ValueError where a file is missing or the template does not compile.
    """

    def __init__(self, folder, template_file=None):
        folder = Path(folder)
        if not (folder / "tokenizer.json").exists():
            raise ValueError(f"{folder}: no tokenizer.json: save the tokenizer with a fast tokenizer of transformers")
        try:
            self.core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{folder / 'tokenizer.json'}: {error}") from error
        self.core.no_truncation()
        self.core.no_padding()
        config = {}
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / file).exists():
                config |= read_json(folder / file)
        special = {key: value.get("content") if isinstance(value, dict) else value
                   for key, value in config.items() if key in ("bos_token", "eos_token", "unk_token", "pad_token")}
        self.eos = self.core.token_to_id(special.get("eos_token") or "")
        end_of_turn = "<|im_end|>" if self.core.token_to_id("<|im_end|>") is not None else special.get("eos_token")
        self.stop = {self.eos, self.core.token_to_id(end_of_turn or "")} - {None}

        template, self.template_from = config.get("chat_template"), "tokenizer_config.json"
        if isinstance(template, list):  # several named ones
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        if (folder / "chat_template.jinja").exists():
            template, self.template_from = (folder / "chat_template.jinja").read_text("utf-8"), "chat_template.jinja"
        if template_file:
            template, self.template_from = read_text(Path(template_file)), str(template_file)
        if not template:
            # the tokenizer's own post-processor tells whether its texts start with BOS
            bos = self.core.decode(self.core.encode("").ids[:1], skip_special_tokens=False)
            special |= {"bos": bos, "end_of_turn": end_of_turn}
            template, self.template_from = CHATML, "ChatML (the model has no template)"
        try:
            self.template = compile_template(template)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template ({self.template_from}), line {error.lineno}: {error.message}") from error
        self.template_variables = {key: value for key, value in special.items() if value is not None}

    def render(self, messages, generation_prompt=False):
        """Messages -> (text, [(start, stop) of each generation block]). ValueError where the template objects."""
        if OPEN[0] in json.dumps(messages, ensure_ascii=False):
            raise ValueError(f"the character {OPEN[0]!r} in a message marks spans here and cannot be trained on")
        pieces, size = [], 0
        try:
            for piece in self.template.generate(
                messages=messages, add_generation_prompt=generation_prompt, tools=None, **self.template_variables
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED:
                    raise jinja2.TemplateError(f"wrote more than {MAX_RENDERED} characters for one conversation")
        except Exception as error:  # foreign code, it can raise anything: 1 // 0, range(10**9), 'x' * 10**18
            raise ValueError(f"chat template ({self.template_from}): {str(error) or type(error).__name__}") from error
        text, spans = "", []
        for part in "".join(pieces).split(OPEN):
            said, closed, rest = part.partition(CLOSE)
            spans += [(len(text), len(text) + len(said))] * bool(closed)
            text += said + rest
        return text, spans

    def conversation(self, messages):
        """Messages -> (text, spans of what the assistant says, its end of turn included).

        A template without generation blocks is rendered up to each assistant turn and past it; a turn counts only if
        both are true prefixes of the whole text. ValueError where no turn does.
        """
        text, spans = self.render(messages)
        if spans or all(message["role"] != "assistant" for message in messages):
            return text, spans
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self.render(messages[:i], generation_prompt=True)[0], self.render(messages[: i + 1])[0]
            if after.startswith(before) and text.startswith(after):
                # a newline after the end-of-turn token is the template's, the model never says it
                stripped = after.rstrip()
                ended = stripped.endswith(tuple(t.content for t in self.core.get_added_tokens_decoder().values()))
                spans.append((len(before), len(stripped if ended else after)))
        if not spans:
            raise ValueError(
                f"chat template ({self.template_from}): no assistant turn can be told from the text around it; "
                "put {% generation %} ... {% endgeneration %} around what the assistant says (--chat_template)"
            )
        return text, spans


    def prompt(self, text, chat):
        """Token ids that ask for a continuation of a text, or for an answer to a user's message."""
        if chat:
            text = self.render([{"role": "user", "content": text}], generation_prompt=True)[0]
        return self.core.encode(text, add_special_tokens=not chat).ids


# ---------------------------------------------------------------- reading


@dataclass
class Source:
    """One document as text: spans of characters to train on (None: all), and how to tokenize it."""

    text: str
    spans: list | None = None
    special: bool = True  # let the tokenizer add BOS and end with EOS; a template writes its own
    where: str = ""  # file:line


def read_sources(spec, tokenizer, held_out=False):
    """Yields Sources from a .txt or .jsonl file or a built-in set. ValueError names file and line."""
    if spec in ("stdlib:code", "stdlib:docs"):
        for name, text in stdlib_modules():
            rows = [Source(text)] if spec == "stdlib:code" else stdlib_questions(name, text, tokenizer)
            for i, row in enumerate(rows):  # one in twenty is kept from training for --eval_data
                if (zlib.crc32(f"{name}/{i}".encode()) % 20 == 0) == held_out:
                    yield row
        return
    path = Path(spec)
    if not path.is_file():
        raise ValueError(f"{spec}: no such file; expected a .txt or .jsonl file, stdlib:docs or stdlib:code")
    if path.suffix == ".txt":
        text = read_text(path)
        if not text:
            raise ValueError(f"{spec}: nothing to train on, the file is empty")
        yield Source(text, where=spec)
    elif path.suffix == ".jsonl":
        n_rows = 0
        with open(path, "rb") as file:  # json.loads decodes, so that a byte that is not UTF-8 has a line number too
            for number, line in enumerate(file, 1):
                if line.strip():
                    n_rows += 1
                    yield parse_row(line, f"{spec}:{number}", tokenizer)
        if not n_rows:
            raise ValueError(f"{spec}: nothing to train on, the file has no rows")
    else:
        raise ValueError(f"{spec}: expected .txt or .jsonl; from datasets: load_dataset(...).to_json('data.jsonl')")


def read_text(path):
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from error


def parse_row(line, where, tokenizer):
    """One JSON line with `messages`, `prompt` + `completion`, or `text` -> Source."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON in UTF-8: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    if "messages" in row:
        messages = row["messages"]
        fine = isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)
        if not fine or not all(isinstance(m.get("content"), str) and isinstance(m.get("role"), str) for m in messages):
            raise ValueError(f"{where}: 'messages' must be a list of objects with strings for 'role' and 'content'")
        if unknown := {m["role"] for m in messages} - {"system", "user", "assistant", "tool"}:
            raise ValueError(f"{where}: unknown role {sorted(unknown)}; expected system, user, assistant or tool")
        try:
            source = Source(*tokenizer.conversation(messages), special=False, where=where)
            source.text.encode()  # JSON can spell half a surrogate pair, which no tokenizer takes
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return source
    keys = ("prompt", "completion") if "prompt" in row else ("text",)
    for key in keys:
        if not isinstance(row.get(key), str):
            raise ValueError(f"{where}: expected 'messages', or 'prompt' + 'completion' or 'text' as strings, "
                             f"got {list(row)}")
    text = "".join(row[key] for key in keys)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {error}") from error
    return Source(text, None if keys == ("text",) else [(len(row["prompt"]), len(text))], where=where)


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


def stdlib_questions(name, text, tokenizer):
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
                messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                yield Source(*tokenizer.conversation(messages), special=False)


# ---------------------------------------------------------------- tokenizing


@dataclass
class Documents:
    """All documents end to end. tokens [n] int32, supervised [n] bool, starts [documents + 1] int64, numpy."""

    tokens: np.ndarray
    supervised: np.ndarray
    starts: np.ndarray

    def crc(self):
        """A checksum of what is trained on."""
        return functools.reduce(lambda crc, array: zlib.crc32(array, crc), (self.tokens, self.supervised, self.starts), 0)


def tokenize(sources, tokenizer, seq_len, train_on, vocab_size, progress):
    """Sources -> (Documents, {what: count}). Texts are cut into pieces of seq_len positions; longer conversations and
    those without a token to train on are left out and counted. ValueError where nothing is left."""
    tokens, supervised, count = [], [], dict.fromkeys(("rows", "conversations", "too_long", "untrained"), 0)
    longest = 0
    bar = tqdm(desc="tokenizing", unit=" documents", disable=not progress, leave=False)
    sources = iter(sources)
    while batch := list(itertools.islice(sources, 512)):
        for special, group in itertools.groupby(batch, lambda source: source.special):
            group = list(group)
            encodings = tokenizer.core.encode_batch([source.text for source in group], add_special_tokens=special)
            for source, encoded in zip(group, encodings, strict=True):
                count["rows"] += 1
                count["conversations"] += not special
                ids, mask = np.array(encoded.ids, np.int32), np.ones(len(encoded.ids), bool)
                if special and tokenizer.eos is not None and (not len(ids) or ids[-1] != tokenizer.eos):
                    ids, mask = np.append(ids, np.int32(tokenizer.eos)), np.append(mask, True)
                if source.spans is not None and train_on == "targets":
                    first, last = np.array(encoded.offsets, np.int64).reshape(-1, 2).T
                    mask[: len(first)] = False
                    for start, stop in source.spans:
                        mask[: len(first)] |= (first < stop) & (last > start)
                    if special and len(ids) and ids[-1] == tokenizer.eos:
                        mask[-1] = True  # also where the tokenizer's own post-processor wrote it, behind all characters
                longest = max(longest, len(ids) - 1)
                if len(ids) and ids.max() >= vocab_size:
                    raise ValueError(f"token id {ids.max()} is beyond the model's {vocab_size} embeddings: "
                                     "this tokenizer belongs to another model")
                if source.spans is not None and len(ids) - 1 > seq_len:
                    count["too_long"] += 1
                    continue
                for start in range(0, max(len(ids) - 1, 1), seq_len):
                    piece = slice(start, start + seq_len + 1)
                    if mask[piece][1:].any():
                        tokens.append(ids[piece])
                        supervised.append(mask[piece])
                    elif not start:
                        count["untrained"] += 1
        bar.update(len(batch))
    bar.close()
    if not tokens:
        raise ValueError(
            f"nothing to train on: {count['rows']} rows read, {count['too_long']} longer than --seq_len {seq_len} (the "
            f"longest has {longest} tokens), {count['untrained']} without a supervised token"
        )
    starts = np.cumsum([0] + [len(t) for t in tokens])
    documents = Documents(np.concatenate(tokens), np.concatenate(supervised), starts)
    return documents, count


# ---------------------------------------------------------------- packing and loading


def pack(lengths, seq_len):
    """Best-fit decreasing: lengths of documents -> rows, each a list of document numbers that fit into seq_len."""
    rows, room = [], []  # room: sorted (positions left, row)
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        at = bisect.bisect_left(room, (length, -1))
        if at == len(room):
            left, row = seq_len, len(rows)
            rows.append([])
        else:
            left, row = room.pop(at)
        rows[row].append(document)
        bisect.insort(room, (left - length, row))
    return rows


@dataclass
class Batch:
    """A micro-batch of one rank. tokens, targets (IGNORE where untrained), positions: [B, T] int64. keep_S: flat
    indices of the targets. spans: (start, stop) of each document in the flattened tokens, on the host, or model.Packed."""

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    keep_S: torch.Tensor
    spans: list | Packed

    def each(self, move, spans):
        if isinstance(spans, Packed):
            spans = spans._replace(bounds=move(spans.bounds))
        return Batch(*(move(getattr(self, field.name)) for field in fields(self)[:4]), spans)

    def pin(self):
        """For a GPU: in pinned memory, from where a copy runs beside everything else; unequal documents packed."""
        lengths, n_tokens = {stop - start for start, stop in self.spans}, self.tokens.numel()
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
    rank g // B % world.
    """

    def __init__(self, documents, seq_len, packing, batch_size, rank, world, seed, shuffle=True):
        self.documents, self.seq_len, self.packing = documents, seq_len, packing
        self.batch_size, self.rank, self.world, self.seed, self.shuffle = batch_size, rank, world, seed, shuffle
        lengths = np.diff(documents.starts) - 1
        self.rows = pack(lengths, seq_len) if packing else [[i] for i in range(len(lengths))]
        first = np.zeros(len(documents.tokens), bool)
        first[documents.starts[:-1]] = True  # a document's first token is nobody's target
        per_document = np.add.reduceat(documents.supervised & ~first, documents.starts[:-1], dtype=np.int64)
        per_document = np.stack([per_document, lengths, lengths**2], 1)
        self.per_row = np.stack([per_document[row].sum(0) for row in self.rows])  # targets, tokens, squared lengths
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
        tokens, positions = np.zeros((2, B * T), np.int64)
        targets, spans = np.full(B * T, IGNORE, np.int64), []
        for b, row in enumerate(rows):
            at = b * T
            for document in self.rows[row]:
                start, stop = self.documents.starts[document : document + 2]
                span = slice(at, at + int(stop - start) - 1)
                tokens[span] = self.documents.tokens[start : stop - 1]
                positions[span] = np.arange(span.stop - at)
                chosen = self.documents.supervised[start + 1 : stop]
                targets[span] = np.where(chosen, self.documents.tokens[start + 1 : stop], IGNORE)
                spans.append((span.start, span.stop))
                at = span.stop
        grids = [torch.from_numpy(a.reshape(B, T)) for a in (tokens, targets, positions)]
        return Batch(*grids, torch.from_numpy((targets != IGNORE).nonzero()[0]), spans)


def show(tokenizer, documents, number):
    """A document as text, the tokens that are trained on in green."""
    start, stop = documents.starts[number : number + 2].tolist()
    runs = itertools.groupby(range(start, stop), lambda i: bool(documents.supervised[i]) and i > start)
    texts = ((said, tokenizer.core.decode(documents.tokens[list(run)].tolist(), False)) for said, run in runs)
    return "".join(f"\033[32m{text}\033[0m" if said else text for said, text in texts)
