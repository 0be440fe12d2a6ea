"""From lines in files to token ids and masks: formats and containers, chat templates (against the goldens of
make_chat_goldens.py), what is left out and what is refused, BOS and EOS."""

import codecs
import gzip
import itertools
import json
import random
import re
import shutil
import signal
import string
from types import SimpleNamespace

import pytest
import tokenizers
from conftest import HERE, pieces, read_data
from tokenizers.processors import TemplateProcessing

import data

VOCAB = 4096  # of tests/tiny
START, END = "<|im_start|>", "<|im_end|>"  # ids 0 and 1 of tests/tiny

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
AGENT = (
    "{% if tools %}{{ '<|im_start|>system\n' ~ (tools | tojson) ~ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}{{ '<think>' ~ m.reasoning_content ~ '</think>' }}{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' ~ ((call.function or call) | tojson) ~ '</call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content ~ '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}")
BOS_EOS = TemplateProcessing(f"<s> $A {END}", special_tokens=[("<s>", VOCAB), (END, 1)])
BOS = TemplateProcessing("<s> $A", special_tokens=[("<s>", VOCAB)])
LLAMA2, NEMO, QWEN35 = ((HERE / "goldens-chat" / f"{name}.jinja").read_text() for name in ("llama2", "nemo", "qwen3.5"))
FORGETFUL = CHATML.replace(  # as Qwen3's: drops what came before </think> from every assistant turn but the last
    "m.content", "(m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content)")


def model_folder(path, template=None, post_processor=None, extra_tokens=()):
    """tests/tiny's tokenizer in a folder, with another chat template (None: no template) or post-processor."""
    core = tokenizers.Tokenizer.from_file(str(HERE / "tiny" / "tokenizer.json"))
    core.add_special_tokens(list(extra_tokens))
    core.post_processor = post_processor
    core.save(str(path / "tokenizer.json"))
    config = json.loads((HERE / "tiny" / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<s>"} if "<s>" in extra_tokens else {}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """tests/tiny with a template that writes tools, tool calls and reasoning."""
    return data.Tokenizer(model_folder(tmp_path_factory.mktemp("agent"), AGENT))


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def chat(*messages, **more):
    return {"messages": [*messages], **more}


def turn(role, text):
    return f"{START}{role}\n{text}{END}\n"


def said(text):
    return f"{START}assistant\n⟦{text}{END}⟧\n"


def marked(tokenizer, ids, supervised):
    """The text of a document with what is trained on between ⟦ and ⟧."""
    runs = itertools.groupby(zip(ids, supervised, strict=True), lambda pair: pair[1])
    texts = ((on, tokenizer.core.decode([token for token, _ in run], skip_special_tokens=False)) for on, run in runs)
    return "".join(f"⟦{text}⟧" if on else text for on, text in texts)


def trained_on(tmp_path, tokenizer, *rows, **options):
    documents, _ = read_data(jsonl(tmp_path / "rows.jsonl", *rows), tokenizer, 4096, **options)
    return [marked(tokenizer, *piece) for piece in pieces(documents)]


# ---------------------------------------------------------------- formats

CALL = {"name": "add", "arguments": {"a": 2, "b": "é"}}
AS_TEXT = {**CALL, "arguments": json.dumps(CALL["arguments"])}
CALL_TEXT = '<call>{"name": "add", "arguments": {"a": 2, "b": "é"}}</call>'
SCHEMA = {"type": "function", "function": {"name": "add", "description": "Adds."}}
SCHEMA_TEXT = turn("system", f"[{json.dumps(SCHEMA)}]")
QUESTION, ANSWER = message("user", "2 + é?"), message("assistant", "It is 4.")
ASKED, ANSWERED = turn("user", "2 + é?"), said("It is 4.")
CALLED = ASKED + said(CALL_TEXT) + turn("tool", "4") + ANSWERED


def calling(*calls, **more):
    return [QUESTION, {"role": "assistant", "tool_calls": [*calls], **more}, message("tool", "4"), ANSWER]


ROWS = {
    "messages": (chat(message("developer", "d"), QUESTION, ANSWER, QUESTION, message("assistant", "🙂\n x")),
                 turn("developer", "d") + ASKED + ANSWERED + ASKED + said("🙂\n x")),
    "arguments-object": (chat(*calling({"type": "function", "function": CALL})), CALLED),
    "arguments-text": (chat(*calling({"function": AS_TEXT})), CALLED),
    "tools-list": (chat(QUESTION, ANSWER, tools=[SCHEMA]), SCHEMA_TEXT + ASKED + ANSWERED),
    "tools-text": (chat(QUESTION, ANSWER, tools=json.dumps([SCHEMA])), SCHEMA_TEXT + ASKED + ANSWERED),
    "text-parts": (chat(message("user", [{"type": "text", "text": "2 + "}, {"type": "text", "text": "é?"}]), ANSWER),
                   ASKED + ANSWERED),
    "weight": (chat(QUESTION, message("assistant", "5", weight=0), QUESTION, message("assistant", "4", weight=1)),
               ASKED + turn("assistant", "5") + ASKED + said("4")),
    "reasoning": (chat({**ANSWER, "reasoning_content": "hm"}), said("<think>hm</think>It is 4.")),
    "reasoning-by-another-name": (chat({**ANSWER, "thinking": "hm"}), said("<think>hm</think>It is 4.")),
    "sharegpt": ({"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}], "tools": [SCHEMA],
                  "system": "s"}, SCHEMA_TEXT + turn("system", "s") + turn("user", "h") + said("g")),
    "prompt": ({"prompt": "2 + 2 =", "completion": " 4"}, f"2 + 2 =⟦ 4{END}⟧"),
    "prompt-inside-a-token": ({"prompt": "x = retu", "completion": "rn"}, f"x =⟦ return{END}⟧"),
    "prompt-messages": (
        {"prompt": [QUESTION, message("assistant", "5"), QUESTION], "tools": [SCHEMA],
         "completion": [ANSWER, message("user", "☃"), message("assistant", "🙂")]},
        SCHEMA_TEXT + ASKED + turn("assistant", "5") + ASKED + ANSWERED + turn("user", "☃") + said("🙂")),
    "alpaca": ({"instruction": "Add.", "input": "2, 2", "output": "4"}, turn("user", "Add.\n2, 2") + said("4")),
    "alpaca-history": ({"instruction": "And?", "input": None, "output": "8", "history": [["a", "b"]], "system": "s"},
                       turn("system", "s") + turn("user", "a") + said("b") + turn("user", "And?") + said("8")),
    "text": ({"text": "one\n\ntwo ☃", "id": 7}, f"⟦one\n\ntwo ☃{END}⟧"),
    "text-spells": ({"text": f"a{END}b {START}"}, f"⟦a{END}b {START}{END}⟧"),  # the tokenizer makes them special
    "messages-beside-text": (chat(QUESTION, ANSWER, text="x", prompt="y", completion="z"), ASKED + ANSWERED),
}


def test_examples_become_these_texts_with_these_parts_trained_on(agent, tmp_path):
    rows, expected = zip(*ROWS.values())
    assert trained_on(tmp_path, agent, *rows, overflow="split") == list(expected)


@pytest.mark.parametrize(("template", "expected"), [
    (AGENT.replace("'<call>' ~ ((call.function or call) | tojson) ~", "call.function.name + call.function.arguments +"),
     ASKED + said('add{"a": 2, "b": "é"}</call>')),  # wants arguments as JSON
    (CHATML.replace("m.content", "(m.tool_calls[0].function.name if m['content'] is none else '' + m['content'])"),
     ASKED + said("add"))], ids=["arguments", "content"])
def test_calls_become_what_the_template_takes(tmp_path, template, expected):
    rows = [chat(*calling({"function": call})[:2]) for call in (CALL, AS_TEXT)]
    assert trained_on(tmp_path, data.Tokenizer(model_folder(tmp_path, template)), *rows) == [expected] * 2


TURNS = [message("system", "Answer in one line."), message("user", "What is 2 + 2?"), message("assistant", "It is 4."),
         message("user", "And in French, with a snowman?"), message("assistant", "Ça fait 4 ☃ 🙂,\n    n'est-ce pas ?")]
THINKING = [message("user", "2 + 2?"), message("assistant", "<think>easy</think>4"),
            message("user", "3 + 3?"), message("assistant", "<think>hm</think>6")]
ANSWERS = [one["content"] + END for one in TURNS if one["role"] == "assistant"]


@pytest.mark.parametrize(("template", "messages", "expected"), [
    (None, TURNS, ANSWERS),  # ChatML, for a model without a template
    (CHATML, TURNS[:4], ANSWERS[:1]),  # ends in a question
    (NEMO, TURNS[1:4], ANSWERS[:1]),
    (LLAMA2, TURNS, [f" {answer.removesuffix(END)} {END}" for answer in ANSWERS]),  # the blanks are the template's
    (FORGETFUL, THINKING, ["<think>hm</think>6" + END]),  # it rewrites the first answer: see below
    (FORGETFUL, [THINKING[0], message("assistant", "4"), *THINKING[2:]], ["4" + END, "<think>hm</think>6" + END]),
    (CHATML.replace("+ '<|im_end|>'", ""), THINKING, ["<think>easy</think>4\n", "<think>hm</think>6\n"]),
], ids=["none", "question-last", "nemo", "llama2", "rewrites", "rewrites-nothing", "no-end"])
def test_answers_are_marked_to_the_token_and_counted_without_a_mask_or_an_end(tmp_path, template, messages, expected):
    tokenizer = data.Tokenizer(model_folder(tmp_path, template), train_on="whole")
    documents, file = read_data(jsonl(tmp_path / "a.jsonl", chat(*messages)), tokenizer)
    assert re.findall("⟦(.*?)⟧", marked(tokenizer, *pieces(documents)[0]), re.DOTALL) == expected
    assert file.report.n_without_mask == [one["role"] for one in messages].count("assistant") - len(expected)
    assert file.report.n_without_end == sum(not answer.endswith(END) for answer in expected)


def thought(thought, answer):
    return f"{START}assistant\n<think>\n⟦{thought}\n</think>\n\n{answer}{END}⟧\n"


REWRITTEN = [
    message("system", "s"), QUESTION, message("assistant", "", thinking="a", tool_calls=[{"function": CALL}]),
    message("tool", " 4 "), {**ANSWER, "thinking": "b"}, message("user", "☃"), {**ANSWER, "thinking": "c"}, QUESTION]
XML = ("<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\né\n</parameter>\n</function>\n"
       "</tool_call>")
HEAD, RESULT = turn("system", "s") + ASKED, turn("user", "<tool_response>\n4\n</tool_response>")
BEFORE = HEAD + turn("assistant", XML) + RESULT + turn("assistant", "It is 4.") + turn("user", "☃")
WHOLE = BEFORE + thought("c", "It is 4.")
SMALL = QWEN35.replace("enable_thinking is false", "true")  # small models are asked not to think


@pytest.mark.parametrize("template", [QWEN35, SMALL], ids=["large", "small"])
def test_answers_that_later_turns_rewrite_are_trained_on_in_a_document_of_their_own(tmp_path, capsys, template):
    tokenizer = data.Tokenizer(model_folder(tmp_path, template))
    documents, file = read_data(jsonl(tmp_path / "a.jsonl", chat(*REWRITTEN)), tokenizer)
    further = HEAD + thought("a", XML) + RESULT + thought("b", "It is 4.")  # neither rewrites the other
    assert [marked(tokenizer, *piece) for piece in pieces(documents)] == [WHOLE, further]
    assert documents.line.tolist() == [1, 1] and file.report.n_without_mask == 0
    data.print_file(file)
    n_tokens = len(pieces(documents)[1][0])
    assert f"1 further documents, {n_tokens} tokens: " in capsys.readouterr().out


@pytest.mark.parametrize(("train_on", "expected", "n_lost"), [
    ("whole", [WHOLE, f"a⟦ b{END}⟧"], 2),
    ("all", [f"⟦{BEFORE}{turn('assistant', 'It is 4.')}{ASKED}⟧", f"⟦a b{END}⟧"], 0)])
def test_example_is_one_document_where_the_flag_says_so(tmp_path, train_on, expected, n_lost):
    tokenizer = data.Tokenizer(model_folder(tmp_path, QWEN35), train_on=train_on)
    rows = chat(*REWRITTEN), {"prompt": "a", "completion": " b"}
    documents, file = read_data(jsonl(tmp_path / "a.jsonl", *rows), tokenizer)
    assert [marked(tokenizer, *piece) for piece in pieces(documents)] == expected
    assert file.report.n_without_mask == n_lost


def test_message_that_a_template_leaves_out_is_named_and_one_that_it_changes_is_not(tmp_path):
    tokenizer = data.Tokenizer(model_folder(tmp_path, NEMO))
    quoted = message("tool", 'a "b"\n', tool_call_id="1")  # as JSON in the text
    tokenizer.conversation([QUESTION, ANSWER, quoted, ANSWER])
    with pytest.raises(ValueError, match=r'leaves out the system message "Answer in one line\."'):
        tokenizer.conversation(TURNS)


# ---------------------------------------------------------------- templates: transformers' texts, its sandbox, limits

GOLDENS = json.loads((HERE / "goldens-chat" / "goldens.json").read_text("utf-8"))


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
        return tokenizer.render(data.check_messages(messages), tools, generation_prompt)[0]
    except ValueError:
        return None


@pytest.mark.parametrize("template", sorted({case["template"] for case in GOLDENS["cases"]}))
def test_texts_errors_tokens_and_masks_are_those_of_transformers(load, template):
    tokenizer, wrong = load(HERE / "goldens-chat" / f"{template}.jinja"), []
    for case in [case for case in GOLDENS["cases"] if case["template"] == template]:
        row, prompt = GOLDENS["conversations"][case["conversation"]], case["generation_prompt"]
        if rendered(tokenizer, **row, generation_prompt=prompt) != case.get("text"):
            wrong.append((case["conversation"], prompt))
        if "ids" in case:
            try:
                example, = data.parse_example(json.dumps(row), tokenizer)
            except ValueError as error:  # transformers trains on an empty answer, and on answers without their tools
                assert template == "chatml_generation" and "tool" in str(row) and "leaves out the tool" in str(error)
                continue
            ids, mask = next(tokenizer.encode([example]))
            rest = len(case["ids"]) - len(ids)  # what follows the last answer is cut off
            if (ids.tolist(), [*mask.astype(int).tolist(), *[0] * rest]) != (case["ids"][: len(ids)], case["mask"]):
                wrong.append((case["conversation"], "mask"))
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
    assert wrong == [] and f"{data.TODAY:%Y-%m-%d}" == GOLDENS["today"]


PANIC = {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<a>", "type_id": 0}}],
                            "pair": [], "special_tokens": {}}}  # the library's Rust finds no such token
BLOCK = "{% generation %}BODY{% endgeneration %}"
TEMPLATES = {  # what is odd: words of the message
    BLOCK.replace("BODY", "\n" + BLOCK): "blocks are nested or not closed",
    "{% macro a() %}" + BLOCK + "{% endmacro %}" + BLOCK.replace("BODY", "{{ a() }}"): "nested or not closed",
    "{% for m in messages %}" + BLOCK.replace("BODY", "{% break %}") + "{% endfor %}": "nested or not closed",
    "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2: "took more than 0.1 seconds",
    "{{ 9 ** (9 ** 9) }}": "took more than 0.1 seconds", "{{ " + "-" * 9999 + "1 }}": "recursion",
    "{% for i in range(20000) %}{{ 'x' }}{% if i > 3000 %}{{ 1 // 0 }}{% endif %}{% endfor %}": "than 3000 characters",
    "{{ messages | length }}" + CHATML: "cannot delimit any assistant turn; put {% generation %}",
    **{"{{ " + expression + " }}": "" for expression in (
        "messages.__class__.__base__.__subclasses__()", "raise_exception.__globals__.os", "messages.append(1)",
        "cycler.__init__.__globals__.os", "messages[0]['content'] + 1", "range(10**9)", "'x' * 10**18")}}


@pytest.mark.parametrize(("changes", "words"), [
    *(({key: value}, key) for key in ("bos_token", "eos_token") for value in (7, ["<s>"], {"content": 7}, {"a": 1})),
    *(({"chat_template": value}, "") for value in (7, "", " ", {"a": "b"}, [7], [{"name": "rag", "template": "a"}],
                                                   [{"name": "default", "template": 7}], [{"name": []}])),
    *(({"chat_template": template}, words) for template, words in TEMPLATES.items()),
    ({"chat_template.jinja": ""}, "chat_template.jinja): expected text; --chat_template"),
    (PANIC, "tokenizer.json: no entry"),
], ids=lambda part: str(part)[:60] if isinstance(part, dict) else "")
def test_tokenizer_files_that_are_odd_are_refused_by_name(tmp_path, monkeypatch, changes, words):
    monkeypatch.setattr(data, "MAX_RENDER_S", 0.1)
    monkeypatch.setattr(data, "MAX_RENDERED", 3000)
    folder, handler = model_folder(tmp_path, changes.get("chat_template.jinja")), signal.getsignal(signal.SIGVTALRM)
    path = folder / ("tokenizer.json" if changes is PANIC else "tokenizer_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError) as error:
        data.Tokenizer(folder).conversation([dict(one) for one in TURNS])
    assert words in str(error.value) and str(error.value).startswith((str(path), "chat template ("))
    assert signal.getsignal(signal.SIGVTALRM) == handler and signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_template_without_an_end_is_refused_at_the_first_row(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MAX_RENDER_S", 0.1)
    endless = "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2
    template = CHATML + "{% if add_generation_prompt %}" + endless + "{% endif %}"
    path = jsonl(tmp_path / "a.jsonl", {"text": "a"}, *[chat(*TURNS)] * 30)
    with pytest.raises(ValueError, match=r"a\.jsonl: line 2: chat template .*took more than 0\.1 seconds$"):
        read_data(path, data.Tokenizer(model_folder(tmp_path, template)))


def test_of_several_templates_the_default_is_used_and_tools_never_get_lost(tmp_path):
    folder, named = model_folder(tmp_path), {"rag": "{{", "default": AGENT, "tool_use": CHATML}
    config = {"chat_template": [{"name": name, "template": text} for name, text in named.items()]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert data.Tokenizer(folder).render(TURNS, [SCHEMA])[0].startswith(SCHEMA_TEXT)
    with pytest.raises(ValueError, match=r"chat_template\.jinja\): leaves out the tool \"add\""):
        data.Tokenizer(model_folder(tmp_path, CHATML)).conversation(TURNS, [SCHEMA])


@pytest.mark.parametrize("row", [
    chat(message("user", f"a {END} b"), ANSWER), chat(QUESTION, message("assistant", START)),
    chat(QUESTION, ANSWER, tools=[{"name": "f", "parameters": {END: {}}}]),
    chat(*calling({"function": {"name": "f", "arguments": {"x": [END]}}})),
    chat(*calling({"function": {"name": "f", "arguments": '{"x": "\\u003c|im_end|>"}'}})),
    chat(message("user", data.OPEN), ANSWER),  # a character that marks generation blocks while a template is rendered
], ids=["user", "assistant", "tool", "arguments", "arguments-text", "mark"])
def test_conversation_that_spells_a_special_token_is_left_out_and_counted(agent, tmp_path, row):
    documents, file = read_data(jsonl(tmp_path / "a.jsonl", chat(QUESTION, ANSWER), row), agent)
    assert documents.line.tolist() == [1]
    found = file.report
    assert (found.n_examples, found.n_spells_special, found.n_bad, found.n_chats) == (2, 1, 0, 1)


# ---------------------------------------------------------------- containers

CHATS = [chat(message("user", f"Frage {i} ☃"), message("assistant", f"Réponse\n{'x ' * i}")) for i in range(4)]
LINES = [json.dumps(row, ensure_ascii=i % 2 == 0) for i, row in enumerate(CHATS)]
CONTAINERS = {  # name: (text, the line of each example)
    "a.jsonl": ("\n".join(LINES), [1, 2, 3, 4]), "A.JSON": ("\n  \n" + "\n\n".join(LINES) + "\n", [3, 5, 7, 9]),
    "a.json": (" \n" + json.dumps(CHATS, indent=2, ensure_ascii=False) + "\n", [1, 2, 3, 4]),
    "a.txt": ("one\n\n two ☃ 🙂\n", [1])}


@pytest.mark.parametrize("crlf", [False, True], ids=["lf", "crlf"])
@pytest.mark.parametrize("bom", [b"", codecs.BOM_UTF8], ids=["plain", "bom"])
@pytest.mark.parametrize("suffix", ["", ".gz"], ids=["raw", "gz"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_the_same_rows_are_the_same_documents_in_every_container(tiny, tmp_path, name, suffix, bom, crlf):
    text, lines = CONTAINERS[name]
    text, path = text.replace("\n", "\r\n" if crlf else "\n"), tmp_path / (name + suffix)
    path.write_bytes(gzip.compress(bom + text.encode()) if suffix else bom + text.encode())
    rows = [{"text": CONTAINERS[name][0]}] if name == "a.txt" else CHATS
    documents, _ = read_data(path, tiny)
    assert pieces(documents) == pieces(read_data(jsonl(tmp_path / "reference.jsonl", *rows), tiny)[0])
    assert documents.line.tolist() == lines


def test_long_text_is_a_document_for_each_chunk_of_whole_lines(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CHUNK", 2000)
    text = "".join(f"{data.__doc__[:90]}\n\n\n  größer ☃ {i}\n" for i in range(200))
    (tmp_path / "a.txt").write_text(text)
    texts = [tiny.core.decode(ids) for ids, _ in pieces(read_data(tmp_path / "a.txt", tiny, 10**6)[0])]
    assert "".join(texts) == text and all(len(one) < 2200 and one.endswith("\n") for one in texts)


def test_held_out_stdlib_is_one_line_in_twenty_and_not_trained_on(monkeypatch):
    modules = list(itertools.islice(data.stdlib_modules(), 50))
    monkeypatch.setattr(data, "stdlib_modules", lambda: modules)
    held_out, training = (
        [json.dumps(row) for row in data.stdlib_examples("stdlib:docs", one)] for one in (True, False))
    everything = [json.dumps(row) for one in modules for row in data.stdlib_questions(*one)]
    assert not set(held_out) & set(training) and sorted(held_out + training) == sorted(everything)
    assert len(held_out) == pytest.approx(len(everything) / 20, rel=0.3)  # a hash decides, the same in every run


# ---------------------------------------------------------------- lines that cannot be trained on

NESTED = "[" * 100_000 + "]" * 100_000
BAD = {  # name: (the line, what is said of it)
    "broken-json": (b'{"messages": [', "not valid JSON"),
    "invalid-utf8": (b'{"text": "a\xff"}', "not valid JSON in UTF-8"),
    "nested": (NESTED.encode(), "not valid JSON.*recursion"),
    "text-number": ({"text": 5}, "not valid text"),
    "half-a-surrogate": (b'{"text": "a\\ud83d"}', "surrogates not allowed"),
    "messages-empty": ({"messages": []}, "no messages"),
    "unknown-role": (chat(message("human", "q")), "unknown role \"human\"; expected system"),
    "long-role": (chat(message("x" * 300_000, "q")), "unknown role"),
    "weight": (chat(message("assistant", "a", weight=2)), "'weight' must be 0 or 1, got 2"),
    "image": (chat(message("user", [{"type": "image_url"}, {"text": "q"}])), "must be text, got .*image_url"),
    "tool-number": (chat(QUESTION, ANSWER, tools=[{"function": 7}]), "'int' object"),
    "preferences": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "these need --dpo"),
    "question-answer": ({"question": "q", "answer": "a"}, "'question' to 'instruction', 'answer' to 'output'"),
    "tools-object": (chat(QUESTION, ANSWER, tools=SCHEMA), "'tools' must be a list of JSON schemas"),
    "control-characters": (chat(message("\x1b[31mred", "q")), r'unknown role "\\u001b\[31mred"'),
}


@pytest.mark.parametrize(("line", "what"), BAD.values(), ids=BAD)
def test_bad_line_is_left_out_and_named(agent, tmp_path, line, what):
    good = json.dumps(chat(QUESTION, ANSWER)).encode()
    lines = [good] * 2 + [line if isinstance(line, bytes) else json.dumps(line).encode()] + [good] * 98
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    documents, file = read_data(tmp_path / "a.jsonl", agent)
    found = file.report
    assert documents.line.tolist() == [1, 2, *range(4, 102)] and (found.n_examples, found.n_bad) == (101, 1)
    assert found.errors.startswith("\n  line 3: ") and re.search(what, found.errors, re.DOTALL), found.errors
    assert len(found.errors) < 1000


@pytest.mark.parametrize(("name", "raw", "what"), [
    ("a.jsonl", "missing", r"no such file; expected a \.jsonl"), ("a.jsonl", None, "no such file; expected"),
    ("noextension", b"x", r"expected a \.jsonl"), ("a.json.gz", b'{"text": 1}', "Not a gzipped"),
    ("a.json", b"[ \n]", "nothing to train on"), ("a.txt.gz", gzip.compress(b"", mtime=0), "nothing to train on"),
    ("a.jsonl", b"\n \r\n\n\t\n", "nothing to train on"),
    ("a.jsonl", b'{"question": "q"}\n', r"nothing to train on\n  line 1: .*expected an object"),
    ("a.jsonl", b"{\n" + b'{"text": "a b"}\n' * 98, r"1 of 99 examples cannot be trained on:\n  line 1: not"),
    ("a.jsonl", json.dumps(chat(QUESTION)).encode(), "nothing to train on: of 1 examples .* 1 have no supervised"),
    ("a.jsonl", b'{"prompt": "' + b"word " * 500 + b'", "completion": "x"}', "only 2 of 501 tokens are trained on"),
    ("a.csv", b"x", r"expected a \.jsonl.*csv.*load_dataset"),
    ("a.txt", b"abc\xff", "'utf-8' codec can't decode byte 0xff in position 3"),
    ("a.json", b'[{"text": "a"}, {"text": "b"]', "Expecting ',' delimiter: line 1 column 29"),
    ("a.json", b'[{"text": "a"}]\ngarbage', "Extra data: line 2"), ("a.json", b"[" * 100_000, "recursion"),
    ("a.jsonl", b'{"text": 7}\n' * 20 + b'{"text": "a"}\n' * 9999, r"20 examples.*(\n  line .: not [^:]*: [^\n]*){5}$"),
    ("a.txt.gz", gzip.compress(b"text" * 999, mtime=0)[:-20], "ended before"),
], ids=str)
def test_file_that_cannot_be_read_is_refused_by_name(tiny, tmp_path, name, raw, what):
    if raw is None:
        (tmp_path / name).mkdir()
    elif raw != "missing":
        (tmp_path / name).write_bytes(raw)
    with pytest.raises((ValueError, OSError), match=rf"(?s){re.escape(name)}.*{what}"):
        read_data(tmp_path / name, tiny)


# ---------------------------------------------------------------- BOS and EOS

WITH_BOS = "{{ bos_token }}" + CHATML


@pytest.mark.parametrize("row", [{"text": "{}a b{}"}, {"prompt": "{}a", "completion": " b{}"}], ids=["text", "prompt"])
@pytest.mark.parametrize("end", ["", END], ids=["", "spelled-eos"])
@pytest.mark.parametrize(("begin", "processor"), [
    ("", None), ("", BOS), ("<s>", BOS), ("", BOS_EOS), ("<s>", BOS_EOS), ("<s>", None)], ids=str)
def test_texts_have_one_bos_where_the_tokenizer_writes_one_and_one_eos(tmp_path, row, begin, processor, end):
    tokenizer = data.Tokenizer(model_folder(tmp_path, None, processor, ["<s>"]))
    (tmp_path / "a.jsonl").write_text(json.dumps(row).replace("{}", begin, 1).replace("{}", end))
    ((ids, supervised),) = pieces(read_data(tmp_path / "a.jsonl", tokenizer)[0])
    bos = [VOCAB] if begin or processor else []
    assert ids == [*bos, *tokenizer.core.encode("a b", add_special_tokens=False).ids, 1] and supervised[-1]
    assert not (processor and not begin and supervised[0])  # an added BOS is no target


@pytest.mark.parametrize(("template", "processor", "n"), [
    (CHATML, None, 0), (CHATML, BOS, 0), (WITH_BOS, None, 1), (WITH_BOS, BOS, 1), (WITH_BOS, BOS_EOS, 1),
    (None, None, 0), (None, BOS, 1), (None, BOS_EOS, 1)])
def test_conversation_has_the_bos_that_its_template_writes(tmp_path, template, processor, n):
    tokenizer = data.Tokenizer(model_folder(tmp_path, template, processor, ["<s>"]))
    ((ids, supervised),) = pieces(read_data(jsonl(tmp_path / "a.jsonl", chat(QUESTION, ANSWER)), tokenizer)[0])
    assert marked(tokenizer, ids, supervised) == "<s>" * n + ASKED + ANSWERED and ids.count(VOCAB) == n


def test_prompts_begin_as_training_did(tmp_path, tiny):
    tokenizer = data.Tokenizer(model_folder(tmp_path, None, BOS, ["<s>"]))
    assert tokenizer.prompt("a b") == [VOCAB, *tiny.core.encode("a b").ids]
    assert tiny.prompt([QUESTION]) == tiny.core.encode(ASKED + f"{START}assistant\n").ids
    assert tiny.stop_ids == {1}
    for ask in ("a\ud83d", [message("user", "a\ud83d")]):  # half a surrogate pair
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            tiny.prompt(ask)


@pytest.mark.parametrize("own, mine, processor", [
    (None, None, None), (None, None, BOS), (CHATML, None, None), (CHATML, AGENT, None)])
def test_exports_carry_the_template_that_was_trained_on(tmp_path, own, mine, processor):
    (tmp_path / "mine.jinja").write_text(mine or "")
    for name in ("base", "out"):
        (tmp_path / name).mkdir()
    base = model_folder(tmp_path / "base", own, processor, ['<s>"\'{{🙂\n'])  # ChatML's BOS has to be quoted
    tokenizer = data.Tokenizer(base, mine and tmp_path / "mine.jinja")
    tokenizer.save(tmp_path / "out")
    written = data.Tokenizer(tmp_path / "out")
    assert written.source == f"chat template ({tmp_path}/out/chat_template.jinja)"
    assert written.render([QUESTION, ANSWER]) == tokenizer.render([QUESTION, ANSWER])
    assert written.template_text == tokenizer.template_text == (mine or own or written.template_text)


def start_up_lines(folder, tokenizer, row, capsys):
    """What a run on this row says of its data."""
    documents, _ = read_data(jsonl(folder / "a.jsonl", row), tokenizer)
    loader = data.Loader(documents, 1000, True, 1, 0, 0, 1)
    data.print_data(SimpleNamespace(inspect=0), loader, None, tokenizer)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("where, named", [
    ("file", "chat template ("), ("tokenizer_config.json", "chat template (tokenizer_config.json)"),
    ("flag", "mine.jinja)"), ("nowhere", "ChatML (the model has no template)")])
def test_a_run_on_conversations_says_where_the_template_is_from(tmp_path, capsys, where, named):
    folder = tmp_path / ("long" * 30)  # as the Hub's cache has
    folder.mkdir()
    model_folder(folder, CHATML if where == "file" else None)
    if where == "tokenizer_config.json":
        config = json.loads((folder / where).read_text())
        (folder / where).write_text(json.dumps(config | {"chat_template": CHATML}))
    mine = folder / "mine.jinja"
    mine.write_text(CHATML)
    tokenizer = data.Tokenizer(folder, mine if where == "flag" else None)
    (said,) = [line for line in start_up_lines(folder, tokenizer, chat(QUESTION, ANSWER), capsys) if "rendered" in line]
    assert said.startswith("conversations are rendered by ") and named in said and len(said) <= 80
    assert said.endswith("/chat_template.jinja)") or where != "file"


def test_a_run_on_texts_says_nothing_of_a_template(tmp_path, tiny, capsys):
    assert "rendered" not in str(start_up_lines(tmp_path, tiny, {"text": "a b"}, capsys))


def test_rejected_answers_are_no_further_documents(tmp_path, capsys):
    tokenizer = data.Tokenizer(HERE / "tiny", train_on="pairs")
    row = {"prompt": "a", "chosen": " b", "rejected": " c"}
    assert "further" not in str(start_up_lines(tmp_path, tokenizer, row, capsys))


PIECES = ["a", "word", " ", "  ", "\n", "\n\n", "\t", "\r\n", "é", "e\u0301", "☃", "🙂", "👩\u200d👩\u200d👧", "日本語",
          "\u2028", "\0", "\ufeff", "<|im_", "end|>", "|>", "<s>", "<0x0A>", "{{ x }}", "{% generation %}"]


def random_conversations(seed, n=150):
    rng = random.Random(seed)
    chats = [[message(rng.choice(["system", "user", "tool", "assistant", "assistant"]),
                      "".join(rng.choices(PIECES, k=rng.choice((0, 1, 2, 5, 30))))) for _ in range(rng.randint(1, 7))]
             for _ in range(n)]
    return [one for one in chats if END not in str(one)]  # joined by chance


def by_hand(messages, plain, n_bytes):
    """ChatML's ids and mask, segment by segment: what stands between two special tokens is encoded without them, and
    trained on are an answer's tokens, each that ends behind the answer's first byte, and its <|im_end|>."""
    ids, mask = [], []
    last = max((i for i, one in enumerate(messages) if one["role"] == "assistant"), default=-1)
    for one in messages[: last + 1]:
        head, answers = f"{one['role']}\n", one["role"] == "assistant"
        segment, behind = plain.encode(head + one["content"]).ids, plain.encode("\n").ids
        ends = list(itertools.accumulate(n_bytes(plain.id_to_token(token)) for token in segment))
        assert ends[-1] == len((head + one["content"]).encode())
        ids += [0, *segment, 1, *behind]
        mask += [False, *(answers and end > len(head) for end in ends), answers, *[False] * len(behind)]
    return ids, mask


def byte_level(path, trim_offsets):
    """A tokenizer of bytes, like GPT-2's, with a few merges, and ChatML without generation blocks."""
    merges = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("ð", "Ł"), ("ðŁ", "Ļ"), ("a", "s")]
    words = [START, END, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    core = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, merges))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim_offsets)  # true in GPT-NeoX's and OLMo's
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens([START, END])
    model_folder(path, CHATML)
    core.save(str(path / "tokenizer.json"))
    return data.Tokenizer(path)


@pytest.mark.parametrize("kind", ["generation", "prefix", "bytes", "bytes-trimmed-offsets"])
def test_random_conversations_have_the_ids_and_the_mask_made_by_hand(tmp_path, tiny, kind):
    n_bytes = len
    if kind.startswith("bytes"):
        tokenizer = byte_level(tmp_path, "trimmed" in kind)
    else:
        tokenizer = tiny if kind == "generation" else data.Tokenizer(model_folder(tmp_path, CHATML))
        n_bytes = lambda piece: 1 if re.fullmatch("<0x..>", piece) else len(piece.encode())  # noqa: E731
    chats = random_conversations(seed=len(kind))
    documents, file = read_data(jsonl(tmp_path / "a.jsonl", *(chat(*one) for one in chats)), tokenizer, 10**6)
    plain = json.dumps({**json.loads(tokenizer.core.to_str()), "added_tokens": []})  # special tokens are text to it
    expected = [by_hand(one, tokenizers.Tokenizer.from_str(plain), n_bytes) for one in chats]
    assert pieces(documents) == [(ids, mask) for ids, mask in expected if any(mask[1:])]
    assert (file.report.n_bad, file.report.n_without_mask, file.report.n_without_end) == (0, 0, 0)


def test_special_tokens_that_are_searched_in_normalized_text_are_found(tmp_path):
    letters = "▁" + string.ascii_lowercase + "<>/|"
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{letter: i + 3 for i, letter in enumerate(letters)}}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")])
    special = [tokenizers.AddedToken(token, normalized=True, rstrip=token == "<s>") for token in list(vocab)[:3]]
    core.add_special_tokens(special)
    core.save(str(tmp_path / "tokenizer.json"))  # as Llama 2's
    template = "{% for m in messages %}<|a|><s>{% generation %} {{ m.content }}</s>{% endgeneration %}{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = data.Tokenizer(tmp_path)
    rows = [chat(message("assistant", "yes")), {"text": "a b"}]
    (ids, supervised), (text_ids, _) = pieces(read_data(jsonl(tmp_path / "a.jsonl", *rows), tokenizer)[0])
    assert ids.count(2) == 1 and ids[-1] == 2 and supervised[-1] and not supervised[ids.index(1)]  # "<s> " is no answer
    assert (text_ids.index(1), text_ids.count(1), text_ids[-1]) == (0, 1, 2)  # BOS by tokenizer_config.json alone
