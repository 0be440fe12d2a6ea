"""--template_args: variables of chat templates, in texts, masks, the cache, a resume and final/, and answers that are
taught to begin with an empty thought."""

import json
import shutil
from types import SimpleNamespace

import pytest
from conftest import HERE, noted, read_data, run_ranks
from test_bad_input import assert_says
from test_formats import (
    ANSWER,
    CHATML,
    END,
    GOLDENS,
    QUESTION,
    chat,
    golden_template,
    jsonl,
    message,
    model_folder,
    read_rows,
    turn,
)

import data
import train

GOLDEN = json.loads((HERE / "goldens-chat" / "template_args.json").read_text("utf-8"))
TEMPLATES = GOLDEN["templates"]
# as TRL writes Qwen3's template for training: a generation block around all that an answer adds, the thought included
WITH_BLOCKS = (
    golden_template("qwen3")
    .replace("{{- '<|im_start|>assistant\\n' }}\n        {%- if loop.index0", "{{- '<|im_start|>assistant\\n' }}"
             "{%- generation %}\n        {%- if loop.index0")
    .replace("{{- '<|im_end|>\\n' }}\n    {%- elif turn.role == 'user'",
             "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}\n    {%- elif turn.role == 'user'"))
ASKED = turn("user", "2 + é?")
THOUGHTFUL = {**ANSWER, "reasoning_content": "hm"}
NO_THINKING = {"enable_thinking": False}


def tokenizer_of(path, template, template_args=None, **options):
    """tests/tiny's tokenizer with a template in a folder, and values for its variables."""
    return data.Tokenizer(model_folder(path, template), template_args=template_args, **options)


# ---------------------------------------------------------------- texts


def golden_tokenizer(path, source, template_args):
    """A tokenizer with the special tokens that the goldens were made with."""
    shutil.copy(HERE / "tiny" / "tokenizer.json", path)
    (path / "tokenizer_config.json").write_text(json.dumps(GOLDENS["variables"]))
    (path / "chat_template.jinja").write_text(source, "utf-8")
    return data.Tokenizer(path, template_args=template_args)


def render_case(tokenizer, case):
    """The text of a golden's conversation."""
    row = GOLDENS["conversations"][case["conversation"]]
    messages = data.check_messages(row["messages"])
    return tokenizer.render(messages, row["tools"], case["generation_prompt"])[0]


@pytest.mark.parametrize("template", TEMPLATES)
def test_texts_with_variables_are_those_of_transformers(tmp_path, template):
    source = TEMPLATES[template]
    plain = golden_tokenizer(tmp_path, source, {})
    n_cases = 0
    n_changed = 0
    for case in GOLDEN["cases"]:
        if case["template"] != template:
            continue
        tokenizer = golden_tokenizer(tmp_path, source, case["template_args"])
        assert render_case(tokenizer, case) == case["text"], case
        n_changed += render_case(plain, case) != case["text"]
        n_cases += 1
    assert n_cases == 20
    assert n_changed >= 5  # otherwise the values would not show


@pytest.mark.parametrize("value", [True, None, -1.5e-30, 10**30, "it's \"é\"\n\\ {{ 1 }} %} ☃\u2028", [1, [None]],
                                   {"a b": {"c": False}}])
def test_every_json_value_reaches_the_template_as_it_is(tmp_path, value):
    tokenizer = tokenizer_of(tmp_path, "{{ x | tojson }}", {"x": value})
    assert json.loads(tokenizer.render([QUESTION])[0]) == value


@pytest.mark.parametrize(("word", "value"), [
    ("x=1", 1), ("x=false", False), ("x=null", None), ("x=[1, {}]", [1, {}]), ('x="1"', "1"),
    # what is no JSON is a text
    ("x=1 May", "1 May"), ("x=", ""), ("x=a=b", "a=b"), ("x={", "{"),
])
def test_a_value_is_json_or_a_text(word, value):
    read = data.read_template_args([word])["x"]
    assert read == value
    assert type(read) is type(value)  # 1 is no True


def test_the_written_template_has_the_values_as_defaults_that_a_reader_may_override(tmp_path):
    base = tmp_path / "base"
    out = tmp_path / "out"
    base.mkdir()
    out.mkdir()
    trained = tokenizer_of(base, TEMPLATES["qwen3"], NO_THINKING)
    trained.save(out)
    first_line = (out / "chat_template.jinja").read_text().splitlines()[0]
    assert first_line == (
        "{%- if enable_thinking is not defined %}{%- set enable_thinking = False %}{%- endif %}")
    asked = ASKED + "<|im_start|>assistant\n"
    assert data.Tokenizer(out).render([QUESTION], generation_prompt=True)[0] == f"{asked}<think>\n\n</think>\n\n"
    # as apply_chat_template(enable_thinking=True) does
    given_by_reader = data.Tokenizer(out)
    given_by_reader.variables["enable_thinking"] = True
    assert given_by_reader.render([QUESTION], generation_prompt=True)[0] == asked
    # and so does the flag, in a further training
    again = data.Tokenizer(out, template_args={"enable_thinking": True})
    assert again.render([QUESTION], generation_prompt=True)[0] == asked


# ---------------------------------------------------------------- masks

# What is trained on is between ⟦ and ⟧: (of an answer without a thought, of one with the thought "hm"). A prompt that
# ends in "<think>\n" ends inside a token of an empty thought: "\n\n" is one of the built-in tokenizer's.
MASKS = {
    "qwen3": {
        "": ("⟦<think>\n\n</think>\n\nIt is 4.END⟧", "⟦<think>\nhm\n</think>\n\nIt is 4.END⟧"),
        "enable_thinking=false": ("<think>\n\n</think>\n\n⟦It is 4.END⟧", "<think>\n⟦hm\n</think>\n\nIt is 4.END⟧"),
    },
    "qwen3, with blocks": {
        "": ("⟦<think>\n\n</think>\n\nIt is 4.END⟧", "⟦<think>\nhm\n</think>\n\nIt is 4.END⟧"),
        # a block says itself what is trained on: only the thought that the model never says is taken out of it
        "enable_thinking=false": ("<think>\n\n</think>\n\n⟦It is 4.END⟧", "⟦<think>\nhm\n</think>\n\nIt is 4.END⟧"),
    },
    "qwen3.5, large": {
        "": ("<think>⟦\n\n</think>\n\nIt is 4.END⟧", "<think>\n⟦hm\n</think>\n\nIt is 4.END⟧"),
        "enable_thinking=false": ("<think>\n\n</think>\n\n⟦It is 4.END⟧", "<think>\n⟦hm\n</think>\n\nIt is 4.END⟧"),
    },
    "qwen3.5, small": {
        "": ("<think>\n\n</think>\n\n⟦It is 4.END⟧", "<think>\n⟦hm\n</think>\n\nIt is 4.END⟧"),
        "enable_thinking=true": ("<think>⟦\n\n</think>\n\nIt is 4.END⟧", "<think>\n⟦hm\n</think>\n\nIt is 4.END⟧"),
    },
}
CASES = [(template, args) for template, by_args in MASKS.items() for args in by_args]


@pytest.mark.parametrize(("template", "args"), CASES)
def test_masks_are_right_to_the_token_under_template_variables(tmp_path, template, args):
    template_args = data.read_template_args(args.split())
    source = WITH_BLOCKS if template == "qwen3, with blocks" else TEMPLATES[template]
    tokenizer = tokenizer_of(tmp_path, source, template_args)
    texts, _ = read_rows(tmp_path, tokenizer, chat(QUESTION, ANSWER), chat(QUESTION, THOUGHTFUL))
    expected = [f"{ASKED}<|im_start|>assistant\n{answer.replace('END', END)}\n" for answer in MASKS[template][args]]
    assert texts == expected


@pytest.mark.parametrize("template", ["qwen3", "with blocks"])
def test_blanks_at_the_start_of_an_answer_are_no_part_of_an_empty_thought(tmp_path, template):
    tokenizer = tokenizer_of(tmp_path, (TEMPLATES | {"with blocks": WITH_BLOCKS})[template], NO_THINKING)
    (text,), _ = read_rows(tmp_path, tokenizer, chat(QUESTION, message("assistant", "    x = 1")))
    assert text == f"{ASKED}<|im_start|>assistant\n<think>\n\n</think>\n\n⟦    x = 1{END}⟧\n"


def test_a_conversation_may_mix_answers_with_and_without_thoughts(tmp_path):
    tokenizer = tokenizer_of(tmp_path, TEMPLATES["qwen3"], NO_THINKING)
    texts, file = read_rows(tmp_path, tokenizer, chat(QUESTION, THOUGHTFUL, QUESTION, ANSWER))
    # Once the user asks again the template drops the first thought, so that this answer gets a document of its own.
    start = f"{ASKED}<|im_start|>assistant\n"
    assert texts == [
        f"{start}It is 4.{END}\n{start}<think>\n\n</think>\n\n⟦It is 4.{END}⟧\n",
        f"{start}<think>\n⟦hm\n</think>\n\nIt is 4.{END}⟧\n",
    ]
    assert noted(file, "begin with an empty thought") == 0


def test_thoughts_that_are_preserved_need_no_document_of_their_own(tmp_path):
    rows = [chat(QUESTION, THOUGHTFUL, QUESTION, THOUGHTFUL)]
    thoughtful = f"{ASKED}<|im_start|>assistant\n<think>\n⟦hm\n</think>\n\nIt is 4.{END}⟧\n"
    forgetful = tokenizer_of(tmp_path, TEMPLATES["qwen3.6"])
    assert len(read_rows(tmp_path, forgetful, *rows)[0]) == 2
    tokenizer = tokenizer_of(tmp_path, TEMPLATES["qwen3.6"], {"preserve_thinking": True})
    texts, file = read_rows(tmp_path, tokenizer, *rows)
    assert texts == [thoughtful + thoughtful]
    assert noted(file, "not trained on") == 0


# ---------------------------------------------------------------- empty thoughts

TURNS = [QUESTION, ANSWER] * 4
SHORT = f"{ASKED}<|im_start|>assistant\n⟦It is 4.{END}⟧\n"  # an answer whose empty thought is left out


@pytest.mark.parametrize("template, args, last", [
    ("qwen3", {}, f"⟦<think>\n\n</think>\n\nIt is 4.{END}⟧"),
    ("qwen3", NO_THINKING, f"<think>\n\n</think>\n\n⟦It is 4.{END}⟧"),
    ("qwen3.5, large", {}, f"<think>⟦\n\n</think>\n\nIt is 4.{END}⟧"),
    ("qwen3.5, large", NO_THINKING, f"<think>\n\n</think>\n\n⟦It is 4.{END}⟧"),
    ("qwen3.5, small", {}, f"<think>\n\n</think>\n\n⟦It is 4.{END}⟧"),
])
@pytest.mark.parametrize("train_on", ["targets", "whole"])
def test_answers_without_thoughts_are_trained_in_the_whole_conversation(tmp_path, template, args, last, train_on):
    tokenizer = tokenizer_of(tmp_path, TEMPLATES[template], args, train_on=train_on)
    texts, file = read_rows(tmp_path, tokenizer, chat(*TURNS))
    assert texts == [SHORT * 3 + f"{ASKED}<|im_start|>assistant\n{last}\n"]
    assert noted(file, "not trained on") == 0
    assert file.report.n_further == 0


def test_of_an_answer_that_begins_as_a_thought_does_all_is_trained(tmp_path):
    odd = message("assistant", "<b>4</b>\n</think> <think>")
    tokenizer = tokenizer_of(tmp_path, TEMPLATES["qwen3"], NO_THINKING, train_on="whole")
    for answer in (message("assistant", "<b>4</b>"), message("assistant", "    4")):
        texts, _ = read_rows(tmp_path, tokenizer, chat(QUESTION, answer, QUESTION, ANSWER))
        assert texts[0].startswith(f"{ASKED}<|im_start|>assistant\n⟦{answer['content']}{END}⟧\n")
    # what the template changes in the history is no empty thought
    texts, file = read_rows(tmp_path, tokenizer, chat(QUESTION, odd, QUESTION, ANSWER))
    assert texts[0].count("⟦") == 1
    assert noted(file, "not trained on") == 1


@pytest.mark.parametrize("train_on, n_documents", [("targets", 2), ("whole", 1)])
def test_an_answer_that_loses_a_thought_has_a_document_of_its_own_or_is_left_out(tmp_path, train_on, n_documents):
    tokenizer = tokenizer_of(tmp_path, TEMPLATES["qwen3"], NO_THINKING, train_on=train_on)
    texts, file = read_rows(tmp_path, tokenizer, chat(QUESTION, ANSWER, QUESTION, THOUGHTFUL, QUESTION, ANSWER))
    assert len(texts) == n_documents
    assert texts[0] == SHORT + SHORT.replace("⟦", "").replace("⟧", "") + (
        f"{ASKED}<|im_start|>assistant\n<think>\n\n</think>\n\n⟦It is 4.{END}⟧\n")
    assert noted(file, "not trained on") == 2 - n_documents


def test_what_further_documents_repeat_does_not_count_as_untrained(tmp_path):
    # 30 long questions with short answers that lose their thoughts: less than 1 % of all tokens are trained on, and
    # more of the tokens that the whole conversation has
    long = message("user", "and then it rained " * 60)
    rows = [chat(*[long, THOUGHTFUL] * 30)]
    tokenizer = tokenizer_of(tmp_path, TEMPLATES["qwen3"])
    _, file = read_data(jsonl(tmp_path / "a.jsonl", *rows), tokenizer, 10**6)
    assert file.report.n_further == 29
    assert file.n_trained < 0.01 * file.n_tokens
    data.check_file(file, 1 << 31)


NOTE = "answers begin with an empty thought: training on them teaches the model to stop reasoning in its default mode"
HINT = "; --template_args enable_thinking=false puts the empty thought into the prompt"
PLAIN_AND_THOUGHTFUL = [chat(QUESTION, ANSWER), chat(QUESTION, THOUGHTFUL), chat(QUESTION, ANSWER)]
# what the row itself says is as harmful
SPELLED = chat(QUESTION, message("assistant", "<think>\n\n</think>\n\nIt is 4."))


def start_up_lines(path, tokenizer, rows, capsys):
    documents, _ = read_data(jsonl(path / "a.jsonl", *rows), tokenizer)
    loader = data.Loader(documents, 1000, True, 1, 0, 0, 1)
    data.print_data(SimpleNamespace(inspect=0), loader, None, tokenizer)
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(("template", "args", "rows", "line"), [
    ("qwen3", {}, PLAIN_AND_THOUGHTFUL, f"2 {NOTE}{HINT}"),
    ("qwen3", {}, [SPELLED], f"1 {NOTE}{HINT}"),
    ("qwen3", {}, PLAIN_AND_THOUGHTFUL[1:2], None),
    ("qwen3", NO_THINKING, [*PLAIN_AND_THOUGHTFUL, SPELLED], None),
    ("with blocks", {}, PLAIN_AND_THOUGHTFUL, f"2 {NOTE}{HINT}"),
    ("with blocks", NO_THINKING, PLAIN_AND_THOUGHTFUL, None),
    ("qwen3.5, large", {}, PLAIN_AND_THOUGHTFUL, f"2 {NOTE}{HINT}"),
    ("qwen3.5, large", NO_THINKING, PLAIN_AND_THOUGHTFUL, None),
    ("qwen3.5, small", {}, PLAIN_AND_THOUGHTFUL, None),
    ("qwen3.5, small", {"enable_thinking": True}, PLAIN_AND_THOUGHTFUL, f"2 {NOTE}{HINT}"),
    ("without a switch", {}, [SPELLED], f"1 {NOTE}"),  # there the flag would be refused
])
def test_answers_that_begin_with_an_empty_thought_are_counted_at_the_start(
        tmp_path, capsys, template, args, rows, line):
    sources = TEMPLATES | {"with blocks": WITH_BLOCKS, "without a switch": CHATML}
    tokenizer = tokenizer_of(tmp_path, sources[template], args)
    lines = start_up_lines(tmp_path, tokenizer, rows, capsys)
    assert [one for one in lines if "empty thought" in one] == ([line] if line else [])


def test_where_every_token_is_trained_on_no_answer_has_a_beginning(tmp_path):
    tokenizer = tokenizer_of(tmp_path, TEMPLATES["qwen3"], train_on="all")
    _, file = read_rows(tmp_path, tokenizer, *PLAIN_AND_THOUGHTFUL)
    assert noted(file, "begin with an empty thought") == 0


def test_both_answers_of_a_pair_may_begin_with_an_empty_thought(tmp_path):
    pair = {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [message("assistant", "5")]}
    for template_args, n_empty in ({}, 2), (NO_THINKING, 0):
        tokenizer = tokenizer_of(tmp_path, TEMPLATES["qwen3"], template_args, train_on="pairs")
        _, file = read_rows(tmp_path, tokenizer, pair)
        assert noted(file, "begin with an empty thought") == n_empty


# ---------------------------------------------------------------- where a thought stands

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"


def template_with_field(key, opening, closing):
    """A template that writes a thought from a key of a message, and the content as it is."""
    return f"{HEAD}{{% if m.{key} %}}{opening}\n{{{{ m.{key} }}}}\n{closing}\n\n{{% endif %}}{TAIL}{{% endif %}}"


# as Qwen3.8's: each answer has a thought, of the field alone, and each prompt opens one
EACH_ANSWER = (HEAD + "{% if m.role == 'assistant' %}<think>\n{{ (m.reasoning_content or '') | trim }}\n</think>\n\n"
               "{% endif %}" + TAIL + "<think>\n{% endif %}")
OPENED = HEAD + TAIL + "<think>\n{% endif %}"  # as R1's distilled models: the content has the thought
OPENS_EACH_ANSWER = HEAD + "{% if m.role == 'assistant' %}<think>\n{% endif %}" + TAIL + "<think>\n{% endif %}"
# Harmony in short
CHANNELS = (HEAD + "{% if m.thinking %}analysis: {{ m.thinking }}\nfinal: {% endif %}" + TAIL + "{% endif %}")
THOUGHT = "⟦<think>\nhm\n</think>\n\nIt is 4.END⟧"
THOUGHT_GOES_ON = "<think>\n⟦hm\n</think>\n\nIt is 4.END⟧"  # the prompt has <think>
PLACES = {  # name: (template, what an answer with the thought "hm" becomes)
    "each answer has one": (EACH_ANSWER, THOUGHT_GOES_ON),
    "a field": (template_with_field("reasoning_content", "<think>", "</think>"), THOUGHT),
    "a field of another name": (template_with_field("reasoning", "<think>", "</think>"), THOUGHT),
    "other tags": (template_with_field("thinking", "[THINK]", "[/THINK]"),
                   THOUGHT.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")),
    "the content": (OPENED, THOUGHT_GOES_ON),
    "the content behind <think>": (OPENS_EACH_ANSWER, THOUGHT_GOES_ON),
    "no tags": (CHANNELS, "⟦analysis: hm\nfinal: It is 4.END⟧"),
    "both": (TEMPLATES["qwen3"], THOUGHT),
}


@pytest.mark.parametrize("template, expected", PLACES.values(), ids=PLACES)
def test_a_thought_is_moved_to_where_the_template_reads_it(tmp_path, template, expected):
    answers = [THOUGHTFUL, {**ANSWER, "thinking": "hm"}, message("assistant", "<think>\nhm\n</think>\n\nIt is 4."),
               message("assistant", "hm\n</think>\n\nIt is 4."), message("assistant", "<think>hm</think>It is 4.")]
    tokenizer = tokenizer_of(tmp_path, template)
    texts, file = read_rows(tmp_path, tokenizer, *[chat(QUESTION, answer) for answer in answers])
    assert texts == [f"{ASKED}<|im_start|>assistant\n{expected.replace('END', END)}\n"] * 5
    assert file.report.notes == {}


@pytest.mark.parametrize("content, note", [
    ("So: <think>hm</think> 4.", "answers have </think> more than once: the model learns to think in its answer"),
    ("<think>a</think><think>b</think>4.", "answers have </think> more than once"),
    ("<thinking>hm</thinking>4.",
     "answers begin with <thinking>, which is text: the template's thoughts are in <think>"),
    ("<|think|>hm", "answers begin with <|think|>, which is text"),
    ("<|begin_of_thought|>hm", "answers begin with <|begin_of_thought|>, which is text"),  # Bespoke's
    ("<think>\nhm, and then", "answers begin a thought that never ends: <think> without </think>"),
])
def test_a_thought_that_no_place_is_for_is_named(tmp_path, content, note):
    _, file = read_rows(tmp_path, tokenizer_of(tmp_path, EACH_ANSWER), chat(QUESTION, ANSWER),
                        chat(QUESTION, message("assistant", content)))
    assert noted(file, note) == 1
    assert noted(file, "no reasoning") == 0


CALLING = message("assistant", "", tool_calls=[{"function": {"name": "add", "arguments": {"a": 2}}}])
RESULT = message("tool", "4")


@pytest.mark.parametrize("train_on", ["targets", "whole"])
def test_calls_without_thoughts_are_one_document_and_all_answers_are_trained(tmp_path, train_on):
    tokenizer = tokenizer_of(tmp_path, TEMPLATES["qwen3.5, large"], train_on=train_on)
    turns = [QUESTION, CALLING, RESULT, CALLING, RESULT, ANSWER]
    texts, file = read_rows(tmp_path, tokenizer, chat(*turns * 3))
    assert [text.count("⟦") for text in texts] == [9]
    assert noted(file, "not trained on") == 0
    # a real thought has its document, with the answers that see it
    texts, file = read_rows(tmp_path, tokenizer, chat(QUESTION, {**CALLING, "thinking": "hm"}, RESULT, ANSWER, *turns))
    n_own = {"targets": [2], "whole": []}[train_on]
    assert [text.count("⟦") for text in texts] == [3, *n_own]
    assert noted(file, "not trained on") == 2 - sum(n_own)


# ---------------------------------------------------------------- variables of a row


@pytest.mark.parametrize("template", ["qwen3", "qwen3, with blocks", "qwen3.5, large"])
def test_the_variables_of_a_row_are_those_of_its_template_before_the_flags(tmp_path, template):
    source = WITH_BLOCKS if template == "qwen3, with blocks" else TEMPLATES[template]
    tokenizer = tokenizer_of(tmp_path, source, {"enable_thinking": True})
    rows = [
        chat(QUESTION, ANSWER, chat_template_kwargs=NO_THINKING),
        chat(QUESTION, ANSWER, chat_template_kwargs=json.dumps(NO_THINKING)),  # as a cell of csv
        chat(QUESTION, ANSWER),
        # only conversations have variables
        {"prompt": "2 + é?", "completion": "It is 4.", "chat_template_kwargs": NO_THINKING},
    ]
    texts, file = read_rows(tmp_path, tokenizer, *rows)
    thoughtful, _ = MASKS[template][""]
    without, _ = MASKS[template]["enable_thinking=false"]
    start = f"{ASKED}<|im_start|>assistant\n"
    assert texts == [f"{start}{one.replace('END', END)}\n" for one in (without, without, thoughtful, without)]
    assert noted(file, "begin with an empty thought") == 1
    assert sorted(file.report.unread) == []


@pytest.mark.parametrize("template", ["qwen3", "qwen3, with blocks", "qwen3.5, large"])
def test_a_thought_behind_a_prompt_that_closes_it_is_named(tmp_path, template):
    source = WITH_BLOCKS if template == "qwen3, with blocks" else TEMPLATES[template]
    rows = [chat(QUESTION, answer, chat_template_kwargs=kwargs) for answer in (ANSWER, THOUGHTFUL)
            for kwargs in (NO_THINKING, {"enable_thinking": True})]
    _, file = read_rows(tmp_path, tokenizer_of(tmp_path, source), *rows)
    assert noted(file, "a thought although their prompt ends in an empty one") == 1


def test_a_row_may_close_the_thought_that_prompts_open(tmp_path):
    opens = "{{ '<think>' if enable_thinking is not defined }}"
    tokenizer = tokenizer_of(tmp_path, CHATML.replace("assistant\n' }}", "assistant\n' }}" + opens))
    rows = [chat(QUESTION, ANSWER), chat(QUESTION, ANSWER, chat_template_kwargs=NO_THINKING)]
    _, file = read_rows(tmp_path, tokenizer, *rows)
    assert noted(file, "no reasoning although the prompt opens a thought") == 1


def test_a_variable_of_a_row_that_the_template_does_not_read_is_listed(tmp_path):
    tokenizer = tokenizer_of(tmp_path, TEMPLATES["qwen3"])
    row = chat(QUESTION, ANSWER, chat_template_kwargs={**NO_THINKING, "enable_thinkng": 1, "self": 2})
    _, file = read_rows(tmp_path, tokenizer, row)
    assert sorted(file.report.unread) == ["chat_template_kwargs.enable_thinkng", "chat_template_kwargs.self"]


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "eos_token"])
def test_a_row_cannot_replace_what_every_template_gets(tmp_path, name):
    row = chat(QUESTION, ANSWER, chat_template_kwargs={name: []})
    with pytest.raises(ValueError, match=f"'chat_template_kwargs': a template gets {name} from"):
        data.parse_example(row, tokenizer_of(tmp_path, CHATML))


def test_a_variable_of_a_row_cannot_spell_a_special_token(tmp_path):
    tokenizer = tokenizer_of(tmp_path, "{{ custom }}" + CHATML)
    texts, file = read_rows(
        tmp_path, tokenizer, chat(QUESTION, ANSWER, chat_template_kwargs={"custom": "s "}),
        chat(QUESTION, ANSWER, chat_template_kwargs={"custom": END}))
    assert texts == [f"s {ASKED}<|im_start|>assistant\n⟦It is 4.{END}⟧\n"]
    assert noted(file, "spell a special") == 1


# ---------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """(flags of a run, its folder, what it said) of adapters that were trained with enable_thinking=false."""
    path = tmp_path_factory.mktemp("run")
    rows = jsonl(path / "a.jsonl", *PLAIN_AND_THOUGHTFUL)
    (path / "mine.jinja").write_text(TEMPLATES["qwen3"])
    argv = ["--model", "tiny", "--lora", "--chat_template", path / "mine.jinja", "--data", rows, "--seq_len", 64,
            "--steps", 2, "--save_every", 2, "--sample", "2 + é?", "--max_new_tokens", 1]
    argv = [*argv, "--template_args", "enable_thinking=false"]  # the last one: a test below replaces it
    _, said, codes = run_ranks(1, argv, path / "out")
    assert codes == [0], said
    return argv, path / "out", said


def test_a_run_inspects_and_says_its_template_variables(job, tmp_path):
    argv, _, said = job
    _, inspected, codes = run_ranks(1, [*argv, "--inspect", 2], tmp_path / "out")
    assert codes == [0]
    assert f"<think>\n\n</think>\n\n⟦It is 4.{END}⟧" in inspected
    assert f"<think>\n⟦hm\n</think>\n\nIt is 4.{END}⟧" in inspected
    assert "--template_args enable_thinking=false" in " ".join(said.split())
    assert "empty thought" not in said


def test_a_chat_with_the_result_is_asked_as_the_training_was(job):
    _, out, _ = job

    def prompt_of(*flags):
        args = train.parse_args(["--chat", "--model", str(out), *flags])
        tokenizer = train.open_model(args, train.Ranks(False, 1800)).tokenizer
        return tokenizer.core.decode(tokenizer.prompt([QUESTION]), skip_special_tokens=False)

    asked = f"{ASKED}<|im_start|>assistant\n"
    assert prompt_of() == f"{asked}<think>\n\n</think>\n\n"
    assert prompt_of("--template_args", "enable_thinking=true") == asked


@pytest.mark.parametrize("words", [[], ["enable_thinking=true"]])
def test_a_resume_with_other_template_variables_is_refused_by_name(job, words):
    argv, out, _ = job
    others = argv[: argv.index("--template_args")]
    if words:
        others = [*others, "--template_args", *words]
    _, said, codes = run_ranks(1, [*others, "--steps", 3, "--resume"], out)
    assert codes == [1]
    assert_says(said, ["--resume", "--template_args was ['enable_thinking=false'], is"])


def test_a_resume_may_spell_the_same_variables_in_another_way():
    one = train.parse_args(["--template_args", "b=1.0", 'a="x"'])
    other = train.parse_args(["--template_args", "a=x", "b= 1.0"])
    assert one.template_args == other.template_args == ['a="x"', "b=1.0"]
    again = train.parse_args([], one)  # as the plan does
    assert again.template_args == one.template_args


def test_the_cache_knows_template_variables(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", chat(QUESTION, ANSWER))
    folders = set()
    for template_args in {}, NO_THINKING, {"enable_thinking": True}, NO_THINKING:
        folders.add(data.tokenized(path, tokenizer_of(tmp_path, TEMPLATES["qwen3"], template_args)))
    assert len(folders) == 3


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("template", [TEMPLATES["qwen3"], CHATML], ids=["qwen3", "chatml"])
def test_a_variable_that_the_template_does_not_read_is_refused_with_those_that_it_reads(tmp_path, template):
    # `thought` is one of its own, set in the branches of an if
    reads = "enable_thinking, thought" if "enable_thinking" in template else "nothing"
    with pytest.raises(ValueError, match="does not read enable_thinkng of --template_args; what it reads beside the "
                                         f"conversation: {reads}$"):
        tokenizer_of(tmp_path, template, {"enable_thinkng": False})
