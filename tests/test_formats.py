"""From lines in files to token ids and masks: formats and containers, chat templates (against the goldens of
make_chat_goldens.py), what is left out and what is refused, BOS and EOS."""

import codecs
import copy
import csv
import gzip
import io
import itertools
import json
import random
import re
import shlex
import shutil
import signal
import string
from types import SimpleNamespace

import jinja2.sandbox
import pytest
import tokenizers
from conftest import HERE, noted, pieces, read_data
from tokenizers.processors import TemplateProcessing

import data
import train

VOCAB = 4096  # of tests/tiny; the first token that a test adds gets this id
START = "<|im_start|>"  # id 0 of tests/tiny
END = "<|im_end|>"  # its id 1, and its EOS
# Post-processors of tokenizers: one writes BOS before a text, the other also EOS behind it.
BOS = TemplateProcessing("<s> $A", special_tokens=[("<s>", VOCAB)])
BOS_EOS = TemplateProcessing(f"<s> $A {END}", special_tokens=[("<s>", VOCAB), (END, 1)])


# ---------------------------------------------------------------- chat templates
# The dash of {{- and {%- removes the line break before it. Without generation blocks answers are found by prefix.

CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}"""
WITH_BOS = "{{ bos_token }}" + CHATML
# as Qwen3's: drops what came before </think> from every assistant turn but the last
ANSWER_WITHOUT_THOUGHTS = "m.content.split('</think>')[-1]"
FORGETFUL = CHATML.replace(
    "m.content", f"({ANSWER_WITHOUT_THOUGHTS} if m.role == 'assistant' and not loop.last else m.content)")
# with generation blocks, tools, tool calls and reasoning
AGENT = """\
{%- if tools %}
{{- '<|im_start|>system\n' ~ (tools | tojson) ~ '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' ~ m.role ~ '\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}
{%- if m.reasoning_content %}
{{- '<think>' ~ m.reasoning_content ~ '</think>' }}
{%- endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '<call>' ~ ((call.function or call) | tojson) ~ '</call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{%- else %}
{{- m.content ~ '<|im_end|>' }}
{%- endif %}
{{- '\n' }}
{%- endfor %}"""


def golden_template(name):
    return (HERE / "goldens-chat" / f"{name}.jinja").read_text()


LLAMA2 = golden_template("llama2")
NEMO = golden_template("nemo")
QWEN35 = golden_template("qwen3.5")


# ---------------------------------------------------------------- what the tests make


def model_folder(path, template=None, post_processor=None, extra_tokens=()):
    """tests/tiny's tokenizer in a folder, with another chat template (None: no template) or post-processor."""
    core = tokenizers.Tokenizer.from_file(str(HERE / "tiny" / "tokenizer.json"))
    core.add_special_tokens(list(extra_tokens))
    core.post_processor = post_processor
    core.save(str(path / "tokenizer.json"))
    config = json.loads((HERE / "tiny" / "tokenizer_config.json").read_text())  # it has no template
    if "<s>" in extra_tokens:
        config["bos_token"] = "<s>"
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """tests/tiny with a template that writes tools, tool calls and reasoning."""
    return data.Tokenizer(model_folder(tmp_path_factory.mktemp("agent"), AGENT))


def jsonl(path, *rows):
    """A file with a line of JSON for each row -> its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def chat(*messages, **more):
    return {"messages": [*messages], **more}


def turn(role, text):
    """The text of a turn that is not trained on."""
    return f"{START}{role}\n{text}{END}\n"


def trained_turn(text):
    """The text of an assistant's turn, as marked() shows what is trained on."""
    return f"{START}assistant\n⟦{text}{END}⟧\n"


def marked(tokenizer, ids, supervised):
    """The text of a document with what is trained on between ⟦ and ⟧."""
    # Runs of tokens are decoded together, because a character may have several.
    text = ""
    tokens = zip(ids, supervised, strict=True)
    for is_trained, run in itertools.groupby(tokens, key=lambda token: token[1]):
        run_ids = [token_id for token_id, _ in run]
        part = tokenizer.core.decode(run_ids, skip_special_tokens=False)
        text += f"⟦{part}⟧" if is_trained else part
    return text


def read_rows(tmp_path, tokenizer, *rows, **options):
    """Rows, read from a file -> (the marked text of each document, their data.DataFile)."""
    documents, file = read_data(jsonl(tmp_path / "rows.jsonl", *rows), tokenizer, **options)
    return [marked(tokenizer, *piece) for piece in pieces(documents)], file


# ---------------------------------------------------------------- formats

# a question and an answer as messages, and the text that ChatML makes of them
QUESTION = message("user", "2 + é?")
ANSWER = message("assistant", "It is 4.")
ASKED = turn("user", "2 + é?")
ANSWERED = trained_turn("It is 4.")

# the same for a call of a tool, which is trained on, and its result, which is not
CALL = {"name": "add", "arguments": {"a": 2, "b": "é"}}
CALL_WITH_TEXT = {"name": "add", "arguments": json.dumps(CALL["arguments"])}  # as OpenAI's arguments are
CALLED = (
    ASKED + trained_turn('<call>{"name": "add", "arguments": {"a": 2, "b": "é"}}</call>')
    + turn("tool", "4") + ANSWERED)

# the same for the list of tools, which a template writes where it likes
SCHEMA = {"type": "function", "function": {"name": "add", "description": "Adds."}}
SCHEMA_TURN = turn("system", f"[{json.dumps(SCHEMA)}]")


def calling(*calls):
    """Messages with a call, or several, and its result."""
    return [QUESTION, {"role": "assistant", "tool_calls": [*calls]}, message("tool", "4"), ANSWER]


EXAMPLES = {  # name: (row, the text that it becomes)
    # every answer is trained on, and nothing else
    "messages": (
        chat(message("developer", "d"), QUESTION, ANSWER, QUESTION, message("assistant", "🙂\n x")),
        turn("system", "d") + ASKED + ANSWERED + ASKED + trained_turn("🙂\n x")),
    # data sets spell calls, tools and parts of texts in several ways
    "arguments-object": (
        chat(*calling({"type": "function", "function": CALL})),
        CALLED),
    "arguments-text": (
        chat(*calling({"function": CALL_WITH_TEXT})),
        CALLED),
    "tools-list": (
        chat(QUESTION, ANSWER, tools=[SCHEMA]),
        SCHEMA_TURN + ASKED + ANSWERED),
    "tools-text": (
        chat(QUESTION, ANSWER, tools=json.dumps([SCHEMA])),
        SCHEMA_TURN + ASKED + ANSWERED),
    "text-parts": (
        chat(message("user", [{"type": "text", "text": "2 + "}, {"type": "text", "text": "é?"}]), ANSWER),
        ASKED + ANSWERED),
    # OpenAI's: an answer of weight 0 is read and not trained on
    # a system message may stand apart, and may be the first one as well
    "messages-system": (
        chat(QUESTION, ANSWER, system="s"),
        turn("system", "s") + ASKED + ANSWERED),
    "messages-system-twice": (
        chat(message("system", "s"), QUESTION, ANSWER, system="s"),
        turn("system", "s") + ASKED + ANSWERED),
    "prompt-messages-system": (
        {"prompt": [QUESTION], "completion": [ANSWER], "system": "s"},
        turn("system", "s") + ASKED + ANSWERED),
    "weight": (
        chat(QUESTION, message("assistant", "5", weight=0), QUESTION, message("assistant", "4", weight=1)),
        ASKED + turn("assistant", "5") + ASKED + trained_turn("4")),
    "reasoning": (
        chat({**ANSWER, "reasoning_content": "hm"}),
        trained_turn("<think>hm</think>It is 4.")),
    "reasoning-by-another-name": (
        chat({**ANSWER, "thinking": "hm"}),
        trained_turn("<think>hm</think>It is 4.")),
    # ShareGPT: human and gpt are user and assistant, and the first turn may stand apart
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}],
         "system": "s", "tools": [SCHEMA]},
        SCHEMA_TURN + turn("system", "s") + turn("user", "h") + trained_turn("g")),
    # a text beside a system message is a question: only conversations have one
    "prompt-system": (
        {"prompt": "2 + 2 =", "completion": " 4", "system": "s"},
        turn("system", "s") + turn("user", "2 + 2 =") + trained_turn(" 4")),
    # a prompt is not trained on, and no template is used
    "prompt": (
        {"prompt": "2 + 2 =", "completion": " 4"},
        f"2 + 2 =⟦ 4{END}⟧"),
    # the token that the prompt ends in counts to the answer
    "prompt-inside-a-token": (
        {"prompt": "x = retu", "completion": "rn"},
        f"x =⟦ return{END}⟧"),
    # an answer inside a prompt is not trained on, one inside a completion is
    "prompt-messages": (
        {"prompt": [QUESTION, message("assistant", "5"), QUESTION], "tools": [SCHEMA],
         "completion": [ANSWER, message("user", "☃"), message("assistant", "🙂")]},
        SCHEMA_TURN + ASKED + turn("assistant", "5") + ASKED + ANSWERED + turn("user", "☃") + trained_turn("🙂")),
    # instruction and input are one question
    "alpaca": (
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
        turn("user", "Add.\n2, 2") + trained_turn("4")),
    "alpaca-without-instruction": (
        {"instruction": "", "input": "2, 2", "output": "4"},
        turn("user", "2, 2") + trained_turn("4")),
    "alpaca-history": (
        {"instruction": "And?", "input": None, "output": "8", "history": [["a", "b"]], "system": "s"},
        turn("system", "s") + turn("user", "a") + trained_turn("b") + turn("user", "And?") + trained_turn("8")),
    "text": (
        {"text": "one\n\ntwo ☃", "id": 7},
        f"⟦one\n\ntwo ☃{END}⟧"),
    # in plain texts, unlike in conversations, special tokens may be spelled
    "text-spells": (
        {"text": f"a{END}b {START}"},
        f"⟦a{END}b {START}{END}⟧"),
    # messages win: other columns often have the same conversation as text
    "messages-beside-text": (
        chat(QUESTION, ANSWER, text="x", prompt="y", completion="z"),
        ASKED + ANSWERED),
}


def test_examples_become_these_texts_with_these_parts_trained_on(agent, tmp_path):
    rows = [row for row, _ in EXAMPLES.values()]  # in one file: formats may be mixed
    texts, _ = read_rows(tmp_path, agent, *rows, overflow="split")  # a mixed file would drop long texts
    for (name, (_, expected)), text in zip(EXAMPLES.items(), texts, strict=True):
        assert text == expected, name


# a template that joins texts: arguments as an object would be an error in it
READS_ARGUMENTS_AS_TEXT = AGENT.replace(
    "'<call>' ~ ((call.function or call) | tojson) ~", "call.function.name + call.function.arguments +")
# one that asks for the content, which a message with a call may lack
READS_THE_CONTENT = CHATML.replace(
    "m.content", "(m.tool_calls[0].function.name if m['content'] is none else '' + m['content'])")
# one that would write the content of a call as None, and one that would write its arguments as Python does
WRITES_THE_CONTENT = READS_ARGUMENTS_AS_TEXT.replace("m.content or ''", "m.content")
WRITES_ARGUMENTS = AGENT.replace("(call.function or call) | tojson", "call.function.name ~ call.function.arguments")
# one that joins the content, which a message with a call lacks
JOINS_THE_CONTENT = CHATML.replace(
    "m.content", "m['content'] + (m.tool_calls[0].function.name if m.tool_calls else '')")


@pytest.mark.parametrize("template, answer", [
    (READS_ARGUMENTS_AS_TEXT, 'add{"a": 2, "b": "é"}</call>'),
    (READS_THE_CONTENT, "add"),
    (WRITES_THE_CONTENT, 'add{"a": 2, "b": "é"}</call>'),
    (WRITES_ARGUMENTS, '<call>add{"a": 2, "b": "é"}</call>'),
    (JOINS_THE_CONTENT, "add"),
], ids=["arguments", "content", "both", "as Python", "joined"])
def test_calls_become_what_the_template_takes(tmp_path, template, answer):
    tokenizer = data.Tokenizer(model_folder(tmp_path, template))

    def question_and_call(call):
        return chat(*calling({"function": call})[:2])

    texts, _ = read_rows(tmp_path, tokenizer, question_and_call(CALL), question_and_call(CALL_WITH_TEXT))
    assert texts == [ASKED + trained_turn(answer)] * 2


# ---------------------------------------------------------------- answers that templates rewrite or do not end

TURNS = [
    message("system", "Answer in one line."),
    message("user", "What is 2 + 2?"),
    message("assistant", "It is 4."),
    message("user", "And in French, with a snowman?"),
    message("assistant", "Ça fait 4 ☃ 🙂,\n    n'est-ce pas ?"),
]
ANSWERS = [one["content"] + END for one in TURNS if one["role"] == "assistant"]
THINKING = [
    message("user", "2 + 2?"),
    message("assistant", "<think>easy</think>4"),
    message("user", "3 + 3?"),
    message("assistant", "<think>hm</think>6"),
]
PLAIN_THEN_THINKING = [THINKING[0], message("assistant", "4"), *THINKING[2:]]
WITHOUT_END = CHATML.replace("+ '<|im_end|>'", "")
# as the first template of Llama 3 Instruct: the header of an answer behind each text; and Phi-3's EOS
WITH_HEADER = CHATML.replace("{%- if add_generation_prompt %}", "{%- if true %}")
WITH_EOS = CHATML.replace("{%- endif %}", "{%- else %}{{- '<|im_end|>' }}{%- endif %}")


@pytest.mark.parametrize("template, messages, expected", [
    (None, TURNS, ANSWERS),  # ChatML, for a model without a template
    (CHATML, TURNS[:4], ANSWERS[:1]),
    (NEMO, TURNS[1:4], ANSWERS[:1]),
    (LLAMA2, TURNS, [f" {answer.removesuffix(END)} {END}" for answer in ANSWERS]),  # the blanks are the template's
    (FORGETFUL, THINKING, ["<think>hm</think>6" + END]),  # it rewrites the first answer
    (FORGETFUL, PLAIN_THEN_THINKING, ["4" + END, "<think>hm</think>6" + END]),
    (WITH_HEADER, TURNS, ANSWERS),
    (WITH_EOS, TURNS, ANSWERS),
    # a model that is trained on these never learns to stop
    (WITHOUT_END, THINKING, ["<think>easy</think>4\n", "<think>hm</think>6\n"]),
], ids=["none", "question-last", "nemo", "llama2", "rewrites", "rewrites-nothing", "header", "eos", "no-end"])
def test_answers_are_marked_to_the_token_and_counted_without_a_mask_or_an_end(tmp_path, template, messages, expected):
    tokenizer = data.Tokenizer(model_folder(tmp_path, template), train_on="whole")
    (text,), file = read_rows(tmp_path, tokenizer, chat(*messages))
    assert re.findall("⟦(.*?)⟧", text, re.DOTALL) == expected
    n_answers = [one["role"] for one in messages].count("assistant")
    assert noted(file, "not trained on") == n_answers - len(expected)
    without_end = [answer for answer in expected if not answer.endswith(END)]
    assert noted(file, "end without a special") == len(without_end)


# Qwen3.5's template writes the thoughts of an answer only until the next question of the user.
REWRITTEN = [
    message("system", "s"),
    QUESTION,
    message("assistant", "", thinking="a", tool_calls=[{"function": CALL}]),
    message("tool", " 4 "),
    {**ANSWER, "thinking": "b"},
    message("user", "☃"),
    {**ANSWER, "thinking": "c"},
    QUESTION,
]
XML_CALL = """\
<tool_call>
<function=add>
<parameter=a>
2
</parameter>
<parameter=b>
é
</parameter>
</function>
</tool_call>"""
SYSTEM_AND_QUESTION = turn("system", "s") + ASKED
RESULT = turn("user", "<tool_response>\n4\n</tool_response>")


def thoughtful_turn(thought, answer):
    """The text of a turn with its thought: the model says both."""
    return f"{START}assistant\n<think>\n⟦{thought}\n</think>\n\n{answer}{END}⟧\n"


WITHOUT_THOUGHTS = (
    SYSTEM_AND_QUESTION + turn("assistant", XML_CALL) + RESULT + turn("assistant", "It is 4.") + turn("user", "☃"))
WHOLE = WITHOUT_THOUGHTS + thoughtful_turn("c", "It is 4.")
# neither of the two answers before the second question rewrites the other
FURTHER = SYSTEM_AND_QUESTION + thoughtful_turn("a", XML_CALL) + RESULT + thoughtful_turn("b", "It is 4.")
OF_SMALL_MODELS = QWEN35.replace("enable_thinking is false", "true")  # these are asked not to think


@pytest.mark.parametrize("template", [QWEN35, OF_SMALL_MODELS], ids=["large", "small"])
def test_answers_that_later_turns_rewrite_are_trained_on_in_a_document_of_their_own(tmp_path, capsys, template):
    tokenizer = data.Tokenizer(model_folder(tmp_path, template))
    documents, file = read_data(jsonl(tmp_path / "a.jsonl", chat(*REWRITTEN)), tokenizer)
    assert [marked(tokenizer, *piece) for piece in pieces(documents)] == [WHOLE, FURTHER]
    assert documents.parts["line"].tolist() == [1, 1]  # both are of the same line
    assert noted(file, "not trained on") == 0
    data.print_file(file)
    first, second = (len(ids) for ids, _ in pieces(documents))
    assert f"1 further documents, for answers or prompts that later turns change: {1 + second / first:.1f} times" in (
        capsys.readouterr().out)


@pytest.mark.parametrize("train_on, expected, n_without_mask", [
    ("whole", [WHOLE, f"a⟦ b{END}⟧"], 2),  # the two answers that the template rewrites
    ("all", [f"⟦{WITHOUT_THOUGHTS}{turn('assistant', 'It is 4.')}{ASKED}⟧", f"⟦a b{END}⟧"], 0),
])
def test_example_is_one_document_where_the_flag_says_so(tmp_path, train_on, expected, n_without_mask):
    tokenizer = data.Tokenizer(model_folder(tmp_path, QWEN35), train_on=train_on)
    texts, file = read_rows(tmp_path, tokenizer, chat(*REWRITTEN), {"prompt": "a", "completion": " b"})
    assert texts == expected
    assert noted(file, "not trained on") == n_without_mask


def test_message_that_a_template_leaves_out_is_named_and_one_that_it_changes_is_not(tmp_path):
    tokenizer = data.Tokenizer(model_folder(tmp_path, NEMO))
    quoted = message("tool", 'a "b"\n', tool_call_id="1")  # as JSON in the text
    tokenizer.conversation([QUESTION, ANSWER, quoted, ANSWER])
    with pytest.raises(ValueError, match=r'leaves out the system message "Answer in one line\."'):
        tokenizer.conversation(TURNS)


# ---------------------------------------------------------------- transformers' texts and its sandbox

GOLDENS = json.loads((HERE / "goldens-chat" / "goldens.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Template file -> Tokenizer of tests/tiny with the special tokens that the goldens were made with."""
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(HERE / "tiny" / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(GOLDENS["variables"]))
    return lambda template_file: data.Tokenizer(folder, template_file)


def text_of(tokenizer, messages, tools=None, generation_prompt=False):
    """The text, or None where the template raises."""
    try:
        return tokenizer.render(data.check_messages(messages), tools, generation_prompt)[0]
    except ValueError:
        return None


ALL_TEMPLATES = sorted({case["template"] for case in GOLDENS["cases"]})
# conversations whose tools this template leaves out, which nobody sees whose prose names them as well: transformers
# trains on them all the same
WITH_TOOLS = "tool", "two_calls", "null_content", "call_last", "think_and_call"
WITHOUT_TOOLS = {("chatml_generation", name) for name in WITH_TOOLS}


def cases_of(template):
    return [case for case in GOLDENS["cases"] if case["template"] == template]


@pytest.mark.parametrize("template", ALL_TEMPLATES)
def test_texts_and_errors_are_those_of_transformers(load, template):
    tokenizer = load(HERE / "goldens-chat" / f"{template}.jinja")
    texts = {}
    expected = {}
    for case in cases_of(template):
        name = case["conversation"], case["generation_prompt"]
        row = GOLDENS["conversations"][case["conversation"]]
        texts[name] = text_of(tokenizer, **row, generation_prompt=case["generation_prompt"])
        expected[name] = case.get("text")  # none: the template raises
    assert texts == expected


@pytest.mark.parametrize("template", ["chatml_generation", "qwen2.5_generation"])
def test_tokens_and_masks_are_those_of_transformers(load, template):
    tokenizer = load(HERE / "goldens-chat" / f"{template}.jinja")
    n_compared = 0
    for case in cases_of(template):
        name = case["conversation"]
        if "ids" not in case or (template, name) in WITHOUT_TOOLS:
            continue
        n_compared += 1
        (example,) = data.parse_example(json.dumps(GOLDENS["conversations"][name]), tokenizer)
        if name == "empty":  # transformers trains the ends of answers that say nothing
            assert example.text is None
            continue
        ids, mask = next(tokenizer.encode([example]))
        n = len(ids)  # what follows the last answer is cut off
        assert ids.tolist() == case["ids"][:n], name
        assert mask.tolist() == [value == 1 for value in case["mask"][:n]], name
        assert 1 not in case["mask"][n:], name
    # not fewer, as would be if goldens lost their ids
    assert n_compared == {"chatml_generation": 12, "qwen2.5_generation": 17}[template]


@pytest.mark.parametrize("template, conversation", sorted(WITHOUT_TOOLS))
def test_rows_whose_tools_a_template_leaves_out_are_refused(load, template, conversation):
    tokenizer = load(HERE / "goldens-chat" / f"{template}.jinja")
    with pytest.raises(ValueError, match=r"leaves out (a call of )?the tool"):
        data.parse_example(json.dumps(GOLDENS["conversations"][conversation]), tokenizer)


def test_sandbox_is_that_of_transformers(load, tmp_path):
    """Globals, filters and what is forbidden, a one-line template each."""
    messages = GOLDENS["conversations"]["system"]["messages"]
    texts = {}
    for snippet in GOLDENS["snippets"]:
        (tmp_path / "snippet.jinja").write_text(snippet["source"], "utf-8")
        try:
            text = text_of(load(tmp_path / "snippet.jinja"), messages)
        except ValueError:  # it does not compile
            text = None
        texts[snippet["source"]] = text
    assert texts == {snippet["source"]: snippet.get("text") for snippet in GOLDENS["snippets"]}
    assert f"{data.TODAY:%Y-%m-%d}" == GOLDENS["today"]  # templates that write the date write the same every day


# ---------------------------------------------------------------- templates and tokenizers that are refused


@pytest.fixture
def tight_limits(monkeypatch):
    """Templates may take 0.1 seconds and write 3,000 characters."""
    monkeypatch.setattr(data, "MAX_RENDER_S", 0.1)
    monkeypatch.setattr(data, "MAX_RENDERED", 3000)


def edit_json(path, changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(folder):
    """What a tokenizer, or its template at a first conversation, is refused with. The timer that stops slow
    templates is gone afterwards."""
    handler = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(ValueError) as error:
        data.Tokenizer(folder).conversation([dict(one) for one in TURNS])
    assert signal.getsignal(signal.SIGVTALRM) == handler
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    return str(error.value)


@pytest.mark.parametrize("value", [7, ["<s>"], {"content": 7}, {"a": 1}], ids=str)
@pytest.mark.parametrize("key", ["bos_token", "eos_token"])
def test_special_token_that_is_no_text_is_refused_by_name(tmp_path, key, value):
    folder = model_folder(tmp_path)
    edit_json(folder / "tokenizer_config.json", {key: value})
    error = refusal(folder)
    assert error.startswith(f"{folder}/tokenizer_config.json")
    assert key in error


@pytest.mark.parametrize("template", [
    7,
    "",
    " ",
    {"a": "b"},
    # lists of templates, as models with one for tools have
    [7],
    [{"name": []}],
    [{"name": "rag", "template": "a"}],  # none of these is the default
    [{"name": "default", "template": 7}],
], ids=str)
def test_chat_template_that_is_no_text_is_refused_by_name(tmp_path, template):
    folder = model_folder(tmp_path)
    edit_json(folder / "tokenizer_config.json", {"chat_template": template})
    assert refusal(folder).startswith("chat template (tokenizer_config.json)")


def test_empty_template_file_is_refused_by_name(tmp_path):
    error = refusal(model_folder(tmp_path, template=""))
    assert error.startswith("chat template (")
    assert "chat_template.jinja): expected text; --chat_template" in error


def test_tokenizer_on_which_the_library_panics_is_refused_by_name(tmp_path):
    folder = model_folder(tmp_path)
    # The library's Rust looks <a> up in special_tokens, and panics.
    begin = {"SpecialToken": {"id": "<a>", "type_id": 0}}
    of_no_token = {"type": "TemplateProcessing", "single": [begin], "pair": [], "special_tokens": {}}
    edit_json(folder / "tokenizer.json", {"post_processor": of_no_token})
    error = refusal(folder)
    assert error.startswith(f"{folder}/tokenizer.json")
    assert "tokenizer.json: no entry" in error


def generation(body):
    return "{% generation %}" + body + "{% endgeneration %}"


ENDLESS = "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2  # ten billion rounds, without a character
ODD_TEMPLATES = {  # name: (template, words of the message)
    # generation blocks whose begin and end do not make pairs in the text
    "block in a block": (generation("\n" + generation("BODY")), "blocks are nested or not closed"),
    "block in a macro in a block": (
        "{% macro a() %}" + generation("BODY") + "{% endmacro %}" + generation("{{ a() }}"), "nested or not closed"),
    "break out of a block": (
        "{% for m in messages %}" + generation("{% break %}") + "{% endfor %}", "nested or not closed"),
    # what would take hours, or the stack
    "endless": (ENDLESS, "took more than 0.1 seconds"),
    "large power": ("{{ 9 ** (9 ** 9) }}", "took more than 0.1 seconds"),
    "deep expression": ("{{ " + "-" * 9999 + "1 }}", "recursion"),
    "long text": (  # ends with an error if nothing stops it at 3,000 characters
        "{% for i in range(20000) %}{{ 'x' }}{% if i > 3000 %}{{ 1 // 0 }}{% endif %}{% endfor %}",
        "than 3000 characters"),
    # the text begins otherwise when one more message follows
    "answers that no prefix delimits": (
        "{{ messages | length }}" + CHATML, "cannot delimit any assistant turn; put {% generation %}"),
}


@pytest.mark.parametrize("name", ODD_TEMPLATES)
def test_template_that_is_odd_is_refused_by_name(tmp_path, tight_limits, name):
    template, words = ODD_TEMPLATES[name]
    folder = model_folder(tmp_path)
    edit_json(folder / "tokenizer_config.json", {"chat_template": template})
    error = refusal(folder)
    assert error.startswith("chat template (")
    assert words in error


@pytest.mark.parametrize("expression", [
    # the ways from an object to Python's modules
    "messages.__class__.__base__.__subclasses__()",
    "raise_exception.__globals__.os",
    "cycler.__init__.__globals__.os",
    # changes of what is rendered, and an error
    "messages.append(1)",
    "messages[0]['content'] + 1",
    # memory
    "range(10**9)",
    "'x' * 10**18",
])
def test_expression_that_the_sandbox_forbids_is_refused(tmp_path, tight_limits, expression):
    folder = model_folder(tmp_path)
    edit_json(folder / "tokenizer_config.json", {"chat_template": "{{ " + expression + " }}"})
    assert refusal(folder).startswith("chat template (")


def test_template_without_an_end_is_refused_after_twenty_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MAX_RENDER_S", 0.03)
    path = jsonl(tmp_path / "a.jsonl", *[chat(*TURNS)] * 30)
    template = CHATML + "{% if messages[1] %}" + ENDLESS + "{% endif %}"  # which a trial with one message does not see
    none = r"a\.jsonl: none of the first 20 examples can be trained on:\n  line 1: .*took more than 0\.03 seconds$"
    with pytest.raises(ValueError, match=none):
        read_data(path, data.Tokenizer(model_folder(tmp_path, template)))


@pytest.mark.parametrize("place", ["list", "files"])
def test_of_several_templates_rows_with_tools_use_the_one_for_tools_and_others_the_default(tmp_path, place):
    folder = model_folder(tmp_path)
    named = {"rag": "{{", "default": CHATML, "tool_use": AGENT}  # the first one would not compile
    if place == "list":
        templates = [{"name": name, "template": text} for name, text in named.items()]
        edit_json(folder / "tokenizer_config.json", {"chat_template": templates})
    else:
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(named["default"])
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    tokenizer = data.Tokenizer(folder)
    out = tmp_path / "out"
    out.mkdir()
    tokenizer.save(out)
    for one in tokenizer, data.Tokenizer(out):
        texts, _ = read_rows(tmp_path, one, chat(QUESTION, ANSWER, tools=[SCHEMA]), chat(QUESTION, ANSWER))
        assert texts == [SCHEMA_TURN + ASKED + ANSWERED, ASKED + ANSWERED]


def test_template_that_leaves_out_a_tool_is_refused(tmp_path):
    tokenizer = data.Tokenizer(model_folder(tmp_path, CHATML))
    with pytest.raises(ValueError, match=r"chat_template\.jinja\): leaves out the tool \"add\""):
        tokenizer.conversation(TURNS, [SCHEMA])


# It would begin or end a turn where the file has none, so a file could make the model say what nobody has written.
@pytest.mark.parametrize("row", [
    chat(message("user", f"a {END} b"), ANSWER),
    chat(QUESTION, message("assistant", START)),
    chat(QUESTION, ANSWER, tools=[{"name": "f", "parameters": {END: {}}}]),
    chat(*calling({"function": {"name": "f", "arguments": {"x": [END]}}})),
    chat(*calling({"function": {"name": "f", "arguments": '{"x": "\\u003c|im_end|>"}'}})),
    chat(message("user", data.OPEN), ANSWER),  # a character that marks generation blocks while a template is rendered
], ids=["user", "assistant", "tool", "arguments", "arguments-text", "mark"])
def test_conversation_that_spells_a_special_token_is_left_out_and_counted(agent, tmp_path, row):
    documents, file = read_data(jsonl(tmp_path / "a.jsonl", chat(QUESTION, ANSWER), row), agent)
    assert documents.parts["line"].tolist() == [1]
    assert file.report.n_examples == 2
    assert noted(file, "spell a special") == 1
    assert file.report.n_bad == 0
    assert file.report.n_chats == 1


# ---------------------------------------------------------------- containers

CHATS = [chat(message("user", f"Frage {i} ☃"), message("assistant", f"Réponse\n{'x ' * i}")) for i in range(4)]
# every second line has its letters as \u escapes
LINES = [json.dumps(row, ensure_ascii=i % 2 == 0) for i, row in enumerate(CHATS)]
TEXT = "one\n\n two ☃ 🙂\n"


def csv_text(rows):
    """Dicts with the same keys as a table. What is no text becomes JSON: a cell of a csv file is nothing else."""
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()})
    return file.getvalue()


CONTAINERS = {  # name: (content, the same rows, the line of each)
    "a.jsonl": ("\n".join(LINES), CHATS, [1, 2, 3, 4]),
    "A.JSON": ("\n  \n" + "\n\n".join(LINES) + "\n", CHATS, [3, 5, 7, 9]),  # lines all the same
    "a.json": (" \n" + json.dumps(CHATS, indent=2, ensure_ascii=False) + "\n", CHATS, [1, 2, 3, 4]),
    "a.txt": (TEXT, [{"text": TEXT}], [1]),
    "a.csv": ("\n" + csv_text(CHATS), CHATS, [3, 4, 5, 6]),  # a blank line, then the header
}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("bom", [b"", codecs.BOM_UTF8], ids=["plain", "bom"])
@pytest.mark.parametrize("suffix", ["", ".gz"], ids=["raw", "gz"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_the_same_rows_are_the_same_documents_in_every_container(tiny, tmp_path, name, suffix, bom, line_end):
    content, rows, lines = CONTAINERS[name]
    raw = bom + content.replace("\n", line_end).encode()
    path = tmp_path / (name + suffix)
    path.write_bytes(gzip.compress(raw) if suffix else raw)
    documents, _ = read_data(path, tiny)
    expected, _ = read_data(jsonl(tmp_path / "reference.jsonl", *rows), tiny)
    assert pieces(documents) == pieces(expected)
    assert documents.parts["line"].tolist() == lines


def test_fields_of_csv_are_texts_of_any_length_and_lines_are_counted_as_an_editor_does(tiny, tmp_path):
    long = "größer, \"☃\" " * 12_000  # a field of more than csv's limit of 131,072 bytes
    rows = [
        {"instruction": "one\n\nline more", "output": "a, b", "history": [], "id": "1"},
        {"instruction": "q", "output": 'She said "no".', "history": [["q", "a"]], "id": "2"},
        {"instruction": "q", "output": long, "history": [], "id": "3"},
        {"instruction": "q", "output": "\n of a web form", "history": [], "id": "4"},
    ]
    header, others = csv_text(rows).split("\n", 1)
    text = f"{header}\n\n{others}\n"  # with a blank line behind the header
    (tmp_path / "a.csv").write_bytes(text.replace("\n of", "\r\n of").encode())
    documents, _ = read_data(tmp_path / "a.csv", tiny, 10**6)
    expected, _ = read_data(jsonl(tmp_path / "a.jsonl", *rows), tiny, 10**6)
    assert pieces(documents) == pieces(expected)
    assert documents.parts["line"].tolist() == [3, 6, 7, 8]


def test_long_text_is_a_document_for_each_chunk_of_whole_lines(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "READ_CHARS", 2000)
    text = "".join(f"{data.__doc__[:90]}\n\n\n  größer ☃ {i}\n" for i in range(200))
    (tmp_path / "a.txt").write_text(text)
    documents, _ = read_data(tmp_path / "a.txt", tiny, 10**6)
    texts = [tiny.core.decode(ids) for ids, _ in pieces(documents)]
    assert "".join(texts) == text
    for one in texts:
        assert len(one) < 2200  # the line at the limit, at most 130 characters, belongs to it
        assert one.endswith("\n")


# ---------------------------------------------------------------- lines and files that cannot be trained on

NESTED = "[" * 100_000 + "]" * 100_000
BAD_LINES = {  # name: (the line, or its row, and a pattern of what is said of it)
    "broken-json": ('{"messages": [', "not valid JSON"),
    "invalid-utf8": (b'{"text": "a\xff"}', "not valid UTF-8: .*: save it as UTF-8"),
    "nested": (NESTED, "not valid JSON.*recursion"),
    "text-number": ({"text": 5}, "not valid text"),
    "half-a-surrogate": (r'{"text": "a\ud83d"}', r"'\\ud83d' is half of a character"),
    "messages-empty": ({"messages": []}, "no messages"),
    "unknown-role": (chat(message("judge", "q")), "unknown role \"judge\"; expected system"),
    "long-role": (chat(message("x" * 300_000, "q")), "unknown role"),
    "weight": (chat(message("assistant", "a", weight=2)), "'weight' must be 0 or 1, got 2"),
    "image": (chat(message("user", [{"type": "image_url"}, {"text": "q"}])), "must be text, got .*image_url"),
    "tool-number": (chat(QUESTION, ANSWER, tools=[{"function": 7}]), "a tool of 'tools' must be an object, got 7"),
    "two-systems": (chat(message("system", "t"), QUESTION, ANSWER, system="s"), "another text than the first"),
    "preferences": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "these need --dpo"),
    "question-answer": (
        {"question": "q", "answer": "a"},
        "got the keys answer, question: --columns question=instruction answer=output"),
    "no-value": ({"text": None, "url": "u"}, "got the keys url: --columns"),
    "no-such-keys": ({"a": 1, "b": None, "c": 2}, "expected an object with .* or text; got the keys a, c: --col"),
    "no-object": (["question", "q"], "expected an object with .* got .*question"),
    "tools-object": (chat(QUESTION, ANSWER, tools=SCHEMA), "'tools' must be a list of JSON schemas"),
    "control-characters": (chat(message("\x1b[31mred", "q")), r'unknown role "\\u001b\[31mred"'),
}


def line_of(row):
    """The bytes of a line: of a row as JSON, or as they are given."""
    if isinstance(row, bytes):
        return row
    if isinstance(row, str):
        return row.encode()
    return json.dumps(row).encode()


@pytest.mark.parametrize("row, pattern", BAD_LINES.values(), ids=BAD_LINES)
def test_bad_line_is_left_out_and_named(agent, tmp_path, row, pattern):
    good = line_of(chat(QUESTION, ANSWER))
    lines = [good, good, line_of(row), *[good] * 98]  # more than one bad line in a hundred would end the run
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    documents, file = read_data(tmp_path / "a.jsonl", agent)
    assert documents.parts["line"].tolist() == [1, 2, *range(4, 102)]
    assert file.report.n_examples == 101
    assert file.report.n_bad == 1
    errors = file.report.errors
    assert errors.startswith("\n  line 3: ")
    assert re.search(pattern, errors, re.DOTALL), errors
    assert len(errors) < 1000  # what a line quotes of itself is cut


LONG = "x" * 300_000
LONG_PARTS = {  # a row with a long text in each place that a message quotes
    "key": {LONG: LONG},
    "role": chat(message(LONG, "q")),
    "list": chat(message("user", [LONG])),
    "object": chat(message("user", {LONG: LONG})),
    "weight": chat(message("assistant", "a", weight=LONG)),
    "tool": chat(QUESTION, ANSWER, tools=[{"name": LONG}]),
    "tools": chat(QUESTION, ANSWER, tools=LONG),
    "objection": chat(message("user", "raise" + LONG)),
}


@pytest.mark.parametrize("row", LONG_PARTS.values(), ids=LONG_PARTS)
def test_message_about_a_bad_line_quotes_little_of_it(tmp_path, row):
    raising = "{% if 'raise' in messages[0].content %}{{ raise_exception(messages[0].content) }}{% endif %}"
    tokenizer = data.Tokenizer(model_folder(tmp_path, raising + CHATML))
    with pytest.raises(ValueError, match="line 1: ") as error:
        read_data(jsonl(tmp_path / "a.jsonl", row), tokenizer)
    assert len(str(error.value)) < 1000


def zipped(text):
    return gzip.compress(text, mtime=0)


LONG_PROMPT = b'{"prompt": "' + b"word " * 500 + b'", "completion": "x"}'
BAD_ROLES = [line_of(chat(message(role, "q"))) + b"\n" for role in ("x5", "y7")]
# the first five are named, and what is the same is not repeated
FIRST_FIVE = r"20 examples[^\n]*\n  line 1: not [^:]*: [^\n]*$"
FIRST_FIVE_OF_TWO = r"20 examples[^\n]*\n  line 1: not [^\n]*5[^\n]*\n  line 2: not [^\n]*7[^\n]*$"
BAD_FILES = {  # what is wrong: (name, content, a pattern of what is said of it)
    # names
    "no suffix": ("noextension", b"x", r"expected a \.jsonl"),
    "another suffix": ("a.tsv", b"x", r"expected a \.jsonl, \.json, \.csv or \.txt.*org/name:split"),
    # tables
    "csv without rows": ("a.csv", b"text", "nothing to train on"),
    "csv, odd columns": (
        "a.csv", b"Frage,answer\nq,a\n", r"line 2: .*got the keys Frage, answer: --columns COLUMN=KEY"),
    "csv, a comma without quotes": (
        "a.csv", b'id,text\n1,"a\nb"\n2,a, b\n', "line 4: number of fields 3, in the header 2: .*quotes"),
    "csv, semicolons": ("a.csv", b"instruction;output\nq;a\n", "line 1: expected commas between columns, got ';'"),
    "csv, cut": ("a.csv", b"id,text\n1,a\n2\n", "line 3: number of fields 1, in the header 2"),
    "csv, an open quote": ("a.csv", b'id,text\n1,"a\n2,b\n3,c\n', "cannot be read as csv: line 2: unexpected end"),
    "csv, two of a name": ("a.csv", b"text,text\na,b\n", "line 1: two columns have the same name: text, text"),
    "csv, latin-1": ("a.csv", b"text\n\xff\n", "not valid UTF-8.*: save it as UTF-8"),
    # containers that are damaged, empty or hold something else
    "gzip cut": ("a.txt.gz", zipped(b"text" * 999)[:-20], "ended before"),
    "empty gzip": ("a.txt.gz", zipped(b""), "nothing to train on"),
    "empty list": ("a.json", b"[ \n]", "nothing to train on"),
    "blank lines": ("a.jsonl", b"\n \r\n\n\t\n", "nothing to train on"),
    "list cut": ("a.json", b'[{"text": "a"}, {"text": "b"]', "Expecting ',' delimiter: line 1 column 29"),
    "text behind a list": ("a.json", b'[{"text": "a"}]\ngarbage', "Extra data: line 2"),
    "nested list": ("a.json", b"[" * 100_000, "recursion"),
    "latin-1": ("a.txt", b"abc\xff", "not valid UTF-8"),
    # more than one bad line in a hundred ends the run, and the first five are shown
    "one bad row": ("a.jsonl", b'{"question": "q"}\n', r"nothing to train on\n  line 1: .*expected an object"),
    "a bad row in 99": (
        "a.jsonl", b"{\n" + b'{"text": "a b"}\n' * 98, r"1 of 99 examples cannot be trained on:\n  line 1: not"),
    "20 bad rows": ("a.jsonl", b'{"text": 7}\n' * 20 + b'{"text": "a"}\n' * 9999, FIRST_FIVE),
    "20 bad rows of two kinds": (
        "a.jsonl", b"".join(BAD_ROLES) * 11, FIRST_FIVE_OF_TWO),
    "a list inside an object": (
        "a.json", b'{"data": [{"text": "a"}]}', "expected an object with .*; got the keys data: "),
    # nothing, or next to nothing, to train on
    "no answer": ("a.jsonl", line_of(chat(QUESTION)), "nothing to train on\n  1 chats have no answer, which is a"),
    "hardly an answer": ("a.jsonl", LONG_PROMPT, "only 2 of 501 tokens are trained on"),
}


@pytest.mark.parametrize("name, content, pattern", BAD_FILES.values(), ids=BAD_FILES)
def test_file_that_cannot_be_read_is_refused_by_name(tiny, tmp_path, name, content, pattern):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, OSError), match=rf"(?s){re.escape(name)}.*{pattern}"):
        read_data(tmp_path / name, tiny)


@pytest.mark.parametrize("content, what", [
    (zipped(b'{"text": "a b"}\n')[:-8] + bytes(8), "CRC check"),
], ids=["another checksum"])
def test_file_that_is_no_gzip_is_not_taken_for_a_cache_that_cannot_be_written(tiny, tmp_path, content, what):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    # gzip's own is an OSError, as that of a disk
    with pytest.raises(ValueError, match=rf"a\.jsonl\.gz: cannot be read as jsonl: {what}"):
        read_data(tmp_path / "a.jsonl.gz", tiny)


@pytest.mark.parametrize("is_folder", [False, True], ids=["missing", "folder"])
def test_name_of_no_file_is_refused_with_what_is_expected(tiny, tmp_path, is_folder):
    path = tmp_path / "a.jsonl"
    if is_folder:
        path.mkdir()
    with pytest.raises(ValueError, match=r"(?s)a\.jsonl.*(no such file|a folder: .*); expected a \.jsonl"):
        read_data(path, tiny)


# ---------------------------------------------------------------- columns of other names

RENAMED = {  # the --columns that an error gives: the row
    "prompt=instruction response=output": {"prompt": "q", "response": "a"},
    "input=instruction": {"input": "q", "output": "a"},
    "question=instruction answer=output": {"question": "q", "input": "c", "answer": "a"},  # Alpaca has an input
    "Instruction=instruction Output=output": {"Instruction": "q", "Output": "a"},
    "conversation=messages": {"conversation": chat(QUESTION, ANSWER)["messages"]},
    "dialog=messages": {"dialog": json.dumps([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}])},
    "content=text": {"content": "a b", "id": 1},
    "prompt=instruction response=output system_prompt=system": {
        "system_prompt": "s", "prompt": "q", "response": "a"},  # OpenOrca's, which is no question
    "query=instruction response=output": {
        "query_id": "7", "original_question": "o", "query": "q", "response": "a"},  # MetaMathQA's
    "response=output context=input": {"instruction": "q", "context": "c", "response": "a"},  # Dolly
    "generation=output": {"instruction": "q", "generation": "a"},  # distilabel
    "'User Question=instruction' 'Model Answer=output'": {"User Question": "q", "Model Answer": "a"},
    # a chat that ends in a question is a prompt
    "context=prompt response=completion": {"context": [QUESTION, ANSWER, QUESTION], "response": "a"},
    "input=prompt output=completion": {"input": [QUESTION], "output": [ANSWER]},
    "turns=messages": {"turns": [QUESTION, ANSWER, QUESTION]},  # unless no answer follows it
}


@pytest.mark.parametrize(("columns", "row"), RENAMED.items(), ids=RENAMED)
def test_columns_make_a_row_of_other_keys_an_example(tiny, columns, row):
    with pytest.raises(ValueError, match=rf"got the keys .*: --columns {columns}$"):
        data.parse_example(json.dumps(row), tiny)
    renames = [train.column(word) for word in shlex.split(columns)]
    report = data.FileReport()
    (example,) = data.parse_example(json.dumps(row), tiny, renames, report)
    assert report.renamed == sorted(column for column, _ in renames)
    named = {dict(renames).get(key, key): value for key, value in row.items()}
    (expected,) = data.parse_example(json.dumps(named), tiny)
    assert example == expected


def test_a_message_on_a_line_of_its_own_gets_no_advice_to_learn_its_content_as_a_text(tiny):
    with pytest.raises(ValueError, match=r"--columns COLUMN=KEY .* and 'messages' lists them"):
        data.parse_example(json.dumps(QUESTION), tiny)


PAIR_ROWS = [  # pairs without --dpo, and the --columns that make chats of the chosen answers
    ({"chosen": [QUESTION, ANSWER]}, "chosen=messages"),
    ({"chosen": [{"from": "human", "value": "2 + é?"}, {"from": "gpt", "value": "It is 4."}]}, "chosen=messages"),
    ({"prompt": [QUESTION], "chosen": [ANSWER]}, "chosen=completion"),
    ({"messages": [QUESTION], "chosen": "It is 4."}, "messages=prompt chosen=completion"),
    ({"conversations": [{"from": "human", "value": "2 + é?"}], "chosen": {"from": "gpt", "value": "It is 4."}},
     "conversations=prompt chosen=completion"),  # LLaMA-Factory's
    ({"question": "2 + é?", "chosen": "It is 4."}, "question=instruction chosen=output"),
    ({"prompt": "2 + é?", "chosen": "It is 4."}, "prompt=instruction chosen=output"),
]


@pytest.mark.parametrize("row, columns", PAIR_ROWS)
def test_pairs_without_dpo_get_the_columns_that_train_on_the_chosen_answers(tiny, row, columns):
    row["rejected"] = row["chosen"]
    with pytest.raises(ValueError, match=f"need --dpo --lora; --columns {columns} trains on the chosen answers alone$"):
        data.parse_example(json.dumps(row), tiny)
    (example,) = data.parse_example(json.dumps(row), tiny, [train.column(word) for word in columns.split()])
    (expected,) = data.parse_example(json.dumps({"messages": [QUESTION, ANSWER]}), tiny)
    assert (example.text, example.spans) == (expected.text, expected.spans)


@pytest.mark.parametrize("row", [{"chosen": "Human: q Assistant: a"}, {"chosen": [ANSWER], "question": "q"},
                                 {"chosen": "a", "dialog": [QUESTION, ANSWER]}])
def test_pairs_without_dpo_get_no_columns_that_lead_to_the_next_error(tiny, row):
    with pytest.raises(ValueError, match=r"need --dpo --lora$"):
        data.parse_example(json.dumps(row | {"rejected": "b"}), tiny)


def test_a_renamed_column_comes_before_what_else_a_row_has(tiny):
    row = {"question": "q", "answer": "a", "output": "b", "text": "c", **chat(QUESTION, ANSWER)}
    renames = [("question", "instruction"), ("answer", "output")]
    (example,) = data.parse_example(json.dumps(row), tiny, renames)
    (expected,) = data.parse_example(json.dumps({"instruction": "q", "output": "a"}), tiny)
    assert example.text == expected.text
    with pytest.raises(ValueError, match="one key to two columns of this row: question, text"):
        data.parse_example(json.dumps(row), tiny, [("question", "instruction"), ("text", "instruction")])


def test_columns_are_part_of_the_caches_key(tiny, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"text": "a b", "other": "c d", "third": "e f"})
    folders = [data.tokenized(path, tiny, columns)
               for columns in ((), [("other", "text")], [("third", "text")], [("other", "text")])]
    assert folders[1] == folders[3]
    assert len(set(folders)) == 3
    texts = []
    for folder in folders[:3]:
        documents = data.open_documents([folder], [path], 64)
        ((ids, _),) = pieces(documents)
        texts.append(tiny.core.decode(ids))
    assert texts == ["a b", "c d", "e f"]


# ---------------------------------------------------------------- BOS and EOS


@pytest.mark.parametrize("row", [{"text": "{}a b{}"}, {"prompt": "{}a", "completion": " b{}"}], ids=["text", "prompt"])
@pytest.mark.parametrize("end", ["", END], ids=["", "spelled-eos"])
@pytest.mark.parametrize("begin, processor", [
    ("", None),
    ("", BOS),
    ("", BOS_EOS),
    # texts that spell BOS themselves get no second one
    ("<s>", None),
    ("<s>", BOS),
    ("<s>", BOS_EOS),
], ids=str)
def test_texts_have_one_bos_where_the_tokenizer_writes_one_and_one_eos(tmp_path, row, begin, processor, end):
    tokenizer = data.Tokenizer(model_folder(tmp_path, None, processor, ["<s>"]))
    (tmp_path / "a.jsonl").write_text(json.dumps(row).replace("{}", begin, 1).replace("{}", end))
    documents, _ = read_data(tmp_path / "a.jsonl", tokenizer)
    ((ids, supervised),) = pieces(documents)
    bos = [VOCAB] if begin or processor else []
    text = tokenizer.core.encode("a b", add_special_tokens=False).ids
    eos = 1
    assert ids == [*bos, *text, eos]
    assert supervised[-1]
    if processor and not begin:
        assert not supervised[0]  # an added BOS is no target


@pytest.mark.parametrize("template, processor, n_bos", [
    (CHATML, None, 0),
    (CHATML, BOS, 0),
    (WITH_BOS, None, 1),
    (WITH_BOS, BOS, 1),
    (WITH_BOS, BOS_EOS, 1),
    # oomph's own ChatML writes it where the tokenizer does
    (None, None, 0),
    (None, BOS, 1),
    (None, BOS_EOS, 1),
])
def test_conversation_has_the_bos_that_its_template_writes(tmp_path, template, processor, n_bos):
    tokenizer = data.Tokenizer(model_folder(tmp_path, template, processor, ["<s>"]))
    documents, _ = read_data(jsonl(tmp_path / "a.jsonl", chat(QUESTION, ANSWER)), tokenizer)
    ((ids, supervised),) = pieces(documents)
    assert marked(tokenizer, ids, supervised) == "<s>" * n_bos + ASKED + ANSWERED
    assert ids.count(VOCAB) == n_bos


def test_prompts_begin_as_training_did(tmp_path, tiny):
    tokenizer = data.Tokenizer(model_folder(tmp_path, None, BOS, ["<s>"]))
    assert tokenizer.prompt("a b") == [VOCAB, *tiny.core.encode("a b").ids]
    assert tiny.prompt([QUESTION]) == tiny.core.encode(ASKED + f"{START}assistant\n").ids
    assert tiny.stop_ids == {1}


def test_prompt_with_half_a_surrogate_pair_is_refused(tiny):
    for prompt in ("a\ud83d", [message("user", "a\ud83d")]):
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            tiny.prompt(prompt)


WRITTEN = {  # how a folder may have a template
    "chat_template.jinja": lambda text: text,
    "chat_template.json": lambda text: json.dumps({"chat_template": text}),  # Mistral Small 3.1 has no other
    "tokenizer_config.json": lambda text: json.dumps({"chat_template": text, "eos_token": END}),
}


@pytest.mark.parametrize("file", WRITTEN)
@pytest.mark.parametrize("is_adapters", [False, True], ids=["model", "adapter"])
def test_a_template_is_found_where_its_family_keeps_it(tmp_path, file, is_adapters):
    adapter = tmp_path / "adapter"
    base = tmp_path / "base"
    for folder in (base, adapter):
        folder.mkdir()
    model_folder(base, CHATML if is_adapters else None)  # an adapter's own counts
    ((adapter if is_adapters else base) / file).write_text(WRITTEN[file](AGENT))
    tokenizer = data.Tokenizer(base, adapter_folder=adapter)
    assert tokenizer.template_texts == {"chat_template.jinja": AGENT}
    assert tokenizer.has_template


@pytest.mark.parametrize("content", [
    {"chat_template": CHATML},  # of a processor, or tokenizer_config.json
    {"chat_template": {"default": CHATML, "rag": "{{"}},
    {"chat_template": [{"name": "rag", "template": "{{"}, {"name": "default", "template": CHATML}]},
    CHATML,
])
@pytest.mark.parametrize("place", ["flag", "folder"])
def test_a_template_may_be_json_and_have_names(tmp_path, content, place):
    folder = model_folder(tmp_path)
    path = tmp_path / "chat_template.json"
    path.write_text(json.dumps(content))
    if place == "folder" and isinstance(content, dict):
        tokenizer = data.Tokenizer(folder)
    else:
        tokenizer = data.Tokenizer(folder, path)
    assert tokenizer.template_texts == {"chat_template.jinja": CHATML}


def test_a_json_file_without_a_template_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"config\.json\): expected text"):
        data.Tokenizer(model_folder(tmp_path), path)


def test_what_the_built_in_template_leaves_out_is_said_of_it():
    tokenizer = data.Tokenizer(data.TINY)
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    with pytest.raises(ValueError, match=r"template.jinja\) of the built-in model; your own --model will use its own"):
        tokenizer.conversation([QUESTION, message("assistant", "", tool_calls=[call])], [SCHEMA])


def test_a_result_has_one_template_for_every_reader(tmp_path):
    base = tmp_path / "base"
    out = tmp_path / "out"
    base.mkdir()
    model_folder(base)
    edit_json(base / "tokenizer_config.json", {"chat_template": CHATML, "model_max_length": 10**30})
    (base / "chat_template.json").write_text(WRITTEN["chat_template.json"](CHATML))
    own = tmp_path / "own.jinja"
    own.write_text(AGENT)
    data.begin_result(out, data.Tokenizer(base, own))
    # gguf-py and Ollama read the one in tokenizer_config.json, transformers the file
    assert (out / "chat_template.jinja").read_text() == AGENT
    assert not (out / "chat_template.json").exists()
    before = json.loads((base / "tokenizer_config.json").read_text())
    del before["chat_template"]
    assert json.loads((out / "tokenizer_config.json").read_text()) == before


@pytest.mark.parametrize("of_model, of_flag, processor", [
    (None, None, None),
    (None, None, BOS),
    (CHATML, None, None),
    (CHATML, AGENT, None),  # the flag's counts
], ids=["none", "none-bos", "model", "flag"])
def test_exports_carry_the_template_that_was_trained_on(tmp_path, of_model, of_flag, processor):
    base = tmp_path / "base"
    out = tmp_path / "out"
    base.mkdir()
    out.mkdir()
    model_folder(base, of_model, processor, ['<s>"\'{{🙂\n'])  # oomph's ChatML has to quote the BOS
    template_file = None
    if of_flag:
        template_file = tmp_path / "mine.jinja"
        template_file.write_text(of_flag)
    tokenizer = data.Tokenizer(base, template_file)
    tokenizer.save(out)
    written = data.Tokenizer(out)  # as whoever loads the result does, without the flag
    assert written.source == f"chat template ({out}/chat_template.jinja)"
    assert written.render([QUESTION, ANSWER]) == tokenizer.render([QUESTION, ANSWER])
    assert written.template_texts == tokenizer.template_texts
    if of_model:
        assert written.template_texts == {"chat_template.jinja": of_flag or of_model}


def test_our_chatml_is_plain_jinja_and_a_run_goes_on_from_it_with_the_same_masks(tmp_path):
    (tmp_path / "base").mkdir()
    tokenizer = data.Tokenizer(model_folder(tmp_path / "base"))
    (tmp_path / "final").mkdir()
    tokenizer.save(tmp_path / "final")
    source = (tmp_path / "final/chat_template.jinja").read_text()
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    conversation = [message("system", "s"), QUESTION, ANSWER, message("user", " ☃\n"), message("assistant", "a "),
                    QUESTION, message("assistant", "")]
    assert plain.render(messages=conversation).count(END) == 7
    expected = (
        turn("system", "s") + ASKED + trained_turn("It is 4.") + turn("user", " ☃\n") + trained_turn("a ") + ASKED
        + turn("assistant", ""))  # nobody learns to say nothing
    for one in (tokenizer, data.Tokenizer(tmp_path / "final")):
        texts, _ = read_rows(tmp_path, one, chat(*conversation))
        assert texts == [expected]


# ---------------------------------------------------------------- what a run says of its data


def start_up_text(folder, tokenizer, row, capsys):
    """What a run on this row prints of its data."""
    documents, _ = read_data(jsonl(folder / "a.jsonl", row), tokenizer)
    loader = data.Loader(documents, 1000, True, 1, 0, 0, 1)
    data.print_data(SimpleNamespace(inspect=0), loader, None, tokenizer)
    return capsys.readouterr().out


@pytest.mark.parametrize("where, pattern", [
    ("file", r"/\S+\.\.\.\S+/chat_template\.jinja"),
    ("tokenizer_config.json", r"tokenizer_config\.json"),
    ("flag", r"/\S+\.\.\.\S+/mine\.jinja"),
    ("nowhere", r"ChatML \(the model has no template\)"),
], ids=["file", "tokenizer_config.json", "flag", "nowhere"])
def test_a_run_on_conversations_says_where_the_template_is_from(tmp_path, capsys, where, pattern):
    folder = tmp_path / ("long" * 30)  # as the Hub's cache has
    folder.mkdir()
    model_folder(folder, CHATML if where == "file" else None)
    template_file = None
    if where == "tokenizer_config.json":
        edit_json(folder / "tokenizer_config.json", {"chat_template": CHATML})
    if where == "flag":
        template_file = folder / "mine.jinja"
        template_file.write_text(CHATML)
    tokenizer = data.Tokenizer(folder, template_file)
    text = start_up_text(folder, tokenizer, chat(QUESTION, ANSWER), capsys)
    (line,) = [line for line in text.splitlines() if "chat template" in line]
    assert re.fullmatch(f"chat template: {pattern}", line)
    assert len(line) <= 80  # long names of folders are cut


def test_a_template_below_the_working_folder_is_named_from_there(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(HERE.parent)
    text = start_up_text(tmp_path, data.Tokenizer(data.TINY), chat(QUESTION, ANSWER), capsys)
    assert "chat template: tests/tiny/chat_template.jinja of the built-in model; your own" in text


def test_a_first_token_that_is_trained_on_has_no_marker_before_it(tmp_path):
    tokenizer = data.Tokenizer(model_folder(tmp_path))
    text = data.Text(f"4 is{END}", [(0, 1)], is_chat=True)
    ids, mask = next(tokenizer.encode([text]))
    report = data.FileReport()
    assert data.documents_of(1, [(text, ids, mask)], tokenizer, report)
    assert mask.tolist() == [True, *[False] * (len(ids) - 1)]
    assert report.notes == {"assistant turns end without a special token: the model cannot learn to stop": 1}


def test_keys_that_are_not_read_are_listed(tmp_path, agent, capsys):
    rows = [chat(QUESTION, ANSWER, tools=[SCHEMA], system="s", id=7), {"text": "a b", "id": 8, "input": "c"}]
    _, file = read_rows(tmp_path, agent, *rows)
    data.print_file(file)
    assert "\n  keys that are not read, and in how many examples: id (2), input (1)\n" in capsys.readouterr().out

    read = [chat(QUESTION, ANSWER, tools=[SCHEMA], system="s"), {"instruction": "q", "input": "i", "output": "a"}]
    _, file = read_rows(tmp_path, agent, *read)
    data.print_file(file)
    assert "not read" not in capsys.readouterr().out


@pytest.mark.parametrize("row, n_plain", [
    ({"prompt": "2 + 2 =", "completion": " 4"}, 1),
    ({"prompt": [QUESTION], "completion": [ANSWER]}, 0),
    ({"text": "a b"}, 0),
], ids=["text", "messages", "no prompt"])
def test_prompts_that_get_no_template_are_counted_if_the_model_has_one(tmp_path, tiny, capsys, row, n_plain):
    said = start_up_text(tmp_path, tiny, row, capsys)
    assert ("1 prompts are plain strings: the chat template is NOT applied" in said) == bool(n_plain)
    # of a base model nobody expects one
    tiny_without = copy.copy(tiny)
    tiny_without.has_template = False
    other_row = row | {"id": 1}  # or its notes would come from the cache
    assert "plain text" not in start_up_text(tmp_path, tiny_without, other_row, capsys)


def test_a_run_on_texts_says_nothing_of_a_template(tmp_path, tiny, capsys):
    assert "rendered" not in start_up_text(tmp_path, tiny, {"text": "a b"}, capsys)


def test_rejected_answers_are_no_further_documents(tmp_path, capsys):
    tokenizer = data.Tokenizer(HERE / "tiny", train_on="pairs")
    row = {"prompt": "a", "chosen": " b", "rejected": " c"}
    assert "further" not in start_up_text(tmp_path, tokenizer, row, capsys)


# ---------------------------------------------------------------- random conversations against a mask made by hand

FRAGMENTS = [
    "a", "word", " ", "  ", "\n", "\n\n", "\t", "\r\n",
    # characters of several bytes, of several code points, and such that editors hide
    "é", "e\u0301", "☃", "🙂", "👩\u200d👩\u200d👧", "日本語", "\u2028", "\0", "\ufeff",
    # what looks like special tokens, their parts or a template
    "<|im_", "end|>", "|>", "<s>", "<0x0A>", "{{ x }}", "{% generation %}",
]


def random_message(rng):
    role = rng.choice(["system", "user", "tool", "assistant", "assistant"])
    n_fragments = rng.choice((0, 1, 2, 5, 30))
    return message(role, "".join(rng.choices(FRAGMENTS, k=n_fragments)))


def random_conversations(seed, n=150):
    rng = random.Random(seed)
    conversations = [[random_message(rng) for _ in range(rng.randint(1, 7))] for _ in range(n)]
    return [one for one in conversations if END not in str(one)]  # two fragments may join to a special token


def n_bytes_of_piece(token):
    """Bytes that a token of tests/tiny stands for. What it has no piece of becomes a token for each byte."""
    if re.fullmatch("<0x..>", token):
        return 1
    return len(token.encode())


def by_hand(messages, plain, n_bytes):
    """ChatML's ids and mask, segment by segment: what stands between two special tokens is encoded without them, and
    trained on are the tokens of an answer that says anything, each that ends behind its first byte, and <|im_end|>.
    plain: the tokenizer without special tokens. n_bytes: of a token's name."""
    ids = []
    mask = []
    newline = plain.encode("\n").ids
    roles = [one["role"] for one in messages]
    while roles and roles[-1] != "assistant":  # what follows the last answer is cut off
        roles.pop()
    for role, one in zip(roles, messages):
        is_answer = role == "assistant" and bool(one["content"].strip())
        head = f"{role}\n"
        text = head + one["content"]
        segment = plain.encode(text).ids
        sizes = [n_bytes(plain.id_to_token(token)) for token in segment]
        ends = list(itertools.accumulate(sizes))  # of each token, in bytes of the text
        assert ends[-1] == len(text.encode())
        is_trained = [is_answer and end > len(head) for end in ends]
        start_id = 0
        end_id = 1
        ids += [start_id, *segment, end_id, *newline]
        mask += [False, *is_trained, is_answer, *[False] * len(newline)]
    return ids, mask


def byte_level_tokenizer(path, trim_offsets):
    """A tokenizer of bytes, like GPT-2's, with a few merges, and ChatML without generation blocks."""
    # merges over line breaks, over blanks, over a blank and a word, and inside a character
    merges = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("ð", "Ł"), ("ðŁ", "Ļ"), ("a", "s")]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [START, END, *alphabet, *(left + right for left, right in merges)]
    core = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, merges))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim_offsets)  # true in GPT-NeoX's and OLMo's
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens([START, END])
    model_folder(path, CHATML)
    core.save(str(path / "tokenizer.json"))
    return data.Tokenizer(path)


def without_special_tokens(tokenizer):
    """Its core, to which <|im_end|> is text."""
    core = json.loads(tokenizer.core.to_str()) | {"added_tokens": []}
    return tokenizers.Tokenizer.from_str(json.dumps(core))


def says_anything(ids, mask, plain):
    """Whether a token that is trained on is more than a blank, or the end of an answer."""
    end = 1
    words = [plain.decode([token]) for token, is_trained in zip(ids, mask) if is_trained and token != end]
    return any(word.strip() for word in words)


def check_random_conversations(tmp_path, tokenizer, n_bytes, seed):
    conversations = random_conversations(seed)
    rows = [chat(*one) for one in conversations]
    documents, file = read_data(jsonl(tmp_path / "a.jsonl", *rows), tokenizer, 10**6)
    plain = without_special_tokens(tokenizer)
    expected = [by_hand(one, plain, n_bytes) for one in conversations]
    # a conversation that trains nothing, or only blanks and the ends of answers, is left out
    assert pieces(documents) == [(ids, mask) for ids, mask in expected if says_anything(ids, mask, plain)]
    assert file.report.n_bad == 0
    assert noted(file, "cannot be found") == 0
    answers = [one["content"] for conversation in conversations for one in conversation if one["role"] == "assistant"]
    assert noted(file, "answers are empty") == sum(not answer.strip() for answer in answers) > 10
    assert noted(file, "end without a special") == 0


def test_generation_blocks_give_random_conversations_the_ids_and_mask_made_by_hand(tmp_path, tiny):
    check_random_conversations(tmp_path, tiny, n_bytes_of_piece, seed=0)


def test_prefixes_give_random_conversations_the_ids_and_mask_made_by_hand(tmp_path):
    tokenizer = data.Tokenizer(model_folder(tmp_path, CHATML))
    check_random_conversations(tmp_path, tokenizer, n_bytes_of_piece, seed=1)


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_a_tokenizer_of_bytes_gives_random_conversations_the_ids_and_mask_made_by_hand(tmp_path, trim_offsets):
    tokenizer = byte_level_tokenizer(tmp_path, trim_offsets)
    n_bytes = len  # each byte is a letter of its own in the names of its tokens
    check_random_conversations(tmp_path, tokenizer, n_bytes, seed=2)


# ---------------------------------------------------------------- a tokenizer like Llama 2's


@pytest.fixture
def llama2_like(tmp_path):
    """It searches special tokens in normalized text, which begins with a blank, and <s> eats the blank behind it. Only
    tokenizer_config.json says that a text begins with BOS."""
    letters = "▁" + string.ascii_lowercase + "<>/|"
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for letter in letters:
        vocab[letter] = len(vocab)
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")])
    core.add_special_tokens([
        tokenizers.AddedToken("<unk>", normalized=True),
        tokenizers.AddedToken("<s>", normalized=True, rstrip=True),
        tokenizers.AddedToken("</s>", normalized=True),
    ])
    core.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}<|a|><s>" + generation(" {{ m.content }}</s>") + "{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return data.Tokenizer(tmp_path)


def test_special_tokens_that_are_searched_in_normalized_text_are_found(tmp_path, llama2_like):
    bos = 1
    eos = 2
    path = jsonl(tmp_path / "a.jsonl", chat(message("assistant", "yes")), {"text": "a b"})
    documents, _ = read_data(path, llama2_like)
    (ids, supervised), (text_ids, _) = pieces(documents)
    assert ids.count(eos) == 1
    assert ids[-1] == eos
    assert supervised[-1]
    assert not supervised[ids.index(bos)]  # with the blank that it eats, it begins in the answer
    assert text_ids[0] == bos
    assert text_ids.count(bos) == 1
    assert text_ids[-1] == eos
