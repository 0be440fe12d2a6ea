"""Writes tests/goldens-chat/goldens.json: conversations as transformers renders them, and its masks. Writes
template_args.json beside it: some of them again, with variables of the template.

Needs transformers (5.23 was used) and nothing of this project: python tests/make_chat_goldens.py
The templates beside it, *.jinja, are written for these tests: each lays out turns, tools and thoughts as the models it
is named after do, in as few lines as that takes. `constructs` is no model's, it walks through the features of jinja.

variables      special tokens that the tokenizer (that of tests/tiny) and so the templates know
today          the date that strftime_now saw
conversations  {name: {"messages", "tools"}}
cases          {"template", "conversation", "generation_prompt", "text"}, one a line; "error": true for "text" where the
               template raises; with "ids" and "mask" of the whole conversation where it has {% generation %} tags
               and no message spells a special token
snippets       {"source": a one-line template, "text" or "error"}: what transformers adds to jinja's sandbox

template_args.json has "templates", {name: source}, and "cases", {"template", "template_args", "conversation" of
goldens.json, "generation_prompt", "text"}.
"""

import json
from datetime import datetime
from pathlib import Path

import jinja2
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent
TODAY = datetime(2024, 7, 26)
VARIABLES = {"bos_token": "<s>", "eos_token": "<|im_end|>"}


class Calendar(datetime):
    @classmethod
    def now(cls, tz=None):
        return TODAY


# ---------------------------------------------------------------- conversations


def system(content):
    return {"role": "system", "content": content}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(name, arguments, call_id="call00001"):  # nine characters, as Mistral's template wants
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content, call_id="call00001", **more):
    return {"role": "tool", "tool_call_id": call_id, **more, "content": content}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Temperature & sky; <now> or \"later\", été compris",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                       "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": {}}}
CODE = "\n\n```python\ndef f(x):\n    if x:\n\treturn [x, \"{{ x }}\"]  \n\n    return {}\n```\n  \n"

CONVERSATIONS = {
    "system": [system("Answer in one line."), user("What is 2 + 2?"), assistant("It is 4.")],
    "no_system": [user("What is 2 + 2?"), assistant("It is 4.")],
    "multi_turn": [system("Be brief."), user("Hi"), assistant("Hello."), user("Bye"), assistant("Bye."),
                   user("No, wait"), assistant("Yes?")],
    "unicode": [user("Ça va, 日本? ☃"), assistant("Ça va 👩‍👩‍👧 e\u0301\u00a0\u2028ok 🙂"), user("🙂"),
                assistant("🇫🇷🦊")],
    "code": [system("  Two blanks around.  "), user("\n  Write f.\n\n"), assistant(CODE), user("\tAgain"),
             assistant("    x = 1\r\n  ")],
    "empty": [user("Say nothing."), assistant(""), user(""), assistant("\n")],
    "markers": [user("What is this:\n<|im_start|>system\n{{ 1 }} {% if %}"),
                assistant("<b>&amp;'\"</b> {% generation %} \\n")],
    "tool": [system("Use the tools."), user("Weather in Nîmes?"),
             assistant("", tool_calls=[call("weather", {"days": 2, "city": "Nîmes <30>"})]), result("31.5"),
             assistant("It is 31.5 degrees.")],
    "two_calls": [user("Weather and time?"),
                  assistant("Let me look.", tool_calls=[
                      call("weather", {"city": "Oslo", "days": None, "units": ["C", "F"],
                                       "at": {"lat": 59.9, "sea": True}}),
                      call("clock", {}, "call00002")]),
                  result('{"sky": "☁"}', name="weather"), result("12:00", "call00002", name="clock"),
                  assistant("Cloudy ☁, and noon."), user("Thanks"), assistant("🙂")],
    "null_content": [user("Time?"), {"role": "assistant", "content": None, "tool_calls": [call("clock", {})]},
                     result("12:00"), assistant("Noon.", tool_calls=None, name=None)],
    "call_last": [user("Time?"), {"role": "assistant", "tool_calls": [call("clock", {}, "1")]}],
    "reasoning_content": [user("2 + 2?"), assistant("4", reasoning_content="Two and two."), user("3 + 3?"),
                          assistant("6", reasoning_content="\nThree,\nthree.\n")],
    "reasoning": [user("2 + 2?"), assistant("4", thinking="Two and two."), user("3 + 3?"),
                  assistant("6", reasoning="Hm."), user("4 + 4?"),
                  assistant("8", reasoning="b", thinking="a", reasoning_content=None)],
    "think": [user("2 + 2?"), assistant("<think>\nTwo and two.\n</think>\n\n4"), user("3 + 3?"),
              assistant("<think>\nThree, three.\n</think>\n\n6")],
    "think_and_call": [user("Time?"), assistant("<think>\nThe clock.\n</think>\n\n", tool_calls=[call("clock", {})]),
                       result("12:00"), assistant("Noon.", reasoning_content="It said 12."), user("Sure?"),
                       assistant("Yes.")],
    "two_questions": [user("Hi"), user("Are you there?"), assistant("Yes.")],
    "ends_in_user": [system("Be brief."), user("Hi"), assistant("Hello."), user("Bye")],
    "late_system": [user("Hi"), assistant("Hello."), system("Now be rude."), user("Bye"), assistant("Whatever.")],
}
TOOLS = {"tool": [WEATHER], "two_calls": [WEATHER, CLOCK], "null_content": [CLOCK], "think_and_call": [CLOCK],
         "no_system": []}

SNIPPETS = [
    "{{ dict(a=1, b='<é>') | tojson }}",
    "{{ dict([['a', 1]]) }} {{ dict.fromkeys('ab', 0) }}",
    "{{ dict.mro() }}",
    "{{ ''.__class__ }}",
    "{% set ns = namespace(a=1) %}{% set ns.b = ns.a + 1 %}{{ ns.b }}",
    "{% set ns = namespace({'self': 1}, other=2) %}{{ ns['self'] + ns.other }}",
    "{% set ns = namespace() %}{{ ns.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ documents is defined }} {{ documents is none }} {{ tools is none }} {{ pad_token is defined }}",
    "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=True) }}",
    "{{ {'b': '<é>', 'a': 1} | tojson }} {{ 'é' | tojson(ensure_ascii=true) }} {{ [1] | tojson(indent=1) }}",
    "{{ 'é' | tojson(sort=true) }}",
    "{{ raise_exception('no') }}",
    "{{ 1 // 0 }}",
    "{{ missing.attribute }}",
    "{{ 'a' + missing }}",
    "{{ 'a' ~ missing ~ messages[0].missing }}",
    "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{{ range(100001) | length }}",
    "{{ messages[0] | length }} {{ messages[0].items() | list }} {{ messages[0].get('no', 'none') }}",
    "{{ strftime_now('%d %B %Y, %H:%M') }}",
    "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}",
    "{% do messages %}",
    "{{ 'a' | no_such_filter }}",
    "{{ '<b>' | escape }} {{ '<b>' | safe }} {{ '<b>' }}",
    "{% set s %}<b>{% endset %}{{ s ~ '<' }} {{ '\\n' in 'a\\nb' }} {{ 'a\\tb'.splitlines() }}",
]

# ---------------------------------------------------------------- templates with variables

# {name: (file, a part of it, what stands there instead)}
WITH_VARIABLES = {
    "qwen3": ("qwen3", "", ""),
    "qwen3.5, large": ("qwen3.5", "", ""),
    # these are asked not to think unless somebody wants them to
    "qwen3.5, small": ("qwen3.5", "enable_thinking is false", "enable_thinking is not true"),
    # can keep the thoughts of all answers
    "qwen3.6": ("qwen3.5", "if loop.index0 > last.question", "if preserve_thinking or loop.index0 > last.question"),
    "llama3.1": ("llama3.1", "", ""),
}
TEMPLATE_ARGS = {
    "qwen3": [{"enable_thinking": False}, {"enable_thinking": True}],
    "qwen3.5, large": [{"enable_thinking": False}, {"enable_thinking": True}],
    "qwen3.5, small": [{"enable_thinking": False}, {"enable_thinking": True}],
    "qwen3.6": [{"preserve_thinking": True}, {"preserve_thinking": True, "enable_thinking": False}],
    "llama3.1": [{"date_string": "1 'Août' \"2025\"\n"}, {"date_string": None}],
}
# answers with thoughts, without, and both in one conversation
WITH_AND_WITHOUT_THOUGHTS = ["no_system", "multi_turn", "reasoning_content", "think", "think_and_call"]


def with_template_args(tokenizer, conversations):
    """-> the content of template_args.json."""
    templates = {}
    for name, (file, part, other) in WITH_VARIABLES.items():
        source = (HERE / "goldens-chat" / f"{file}.jinja").read_text("utf-8")
        assert part in source
        templates[name] = source.replace(part, other) if part else source
    cases = []
    for name, source in templates.items():
        for template_args in TEMPLATE_ARGS[name]:
            for conversation in WITH_AND_WITHOUT_THOUGHTS:
                for generation_prompt in (False, True):
                    case = {"template": name, "template_args": template_args, "conversation": conversation,
                            "generation_prompt": generation_prompt}
                    row = conversations[conversation]
                    cases.append(case | render(tokenizer, source, **row, generation_prompt=generation_prompt,
                                               **template_args))
    return {"templates": templates, "cases": cases}


# ---------------------------------------------------------------- what transformers makes of them


def render(tokenizer, source, messages, tools=None, generation_prompt=False, **template_args):
    """-> {"text": ...}, or {"error": True} where the template raises."""
    try:
        return {"text": tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=source, add_generation_prompt=generation_prompt, tokenize=False,
            **template_args)}
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, AttributeError, KeyError, OverflowError):
        return {"error": True}


def encode(tokenizer, source, messages, tools):
    """Token ids of the conversation and 1 for each that a generation block wrote."""
    encoded = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=source, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    return {"ids": encoded["input_ids"], "mask": encoded["assistant_masks"]}


def main():
    chat_template_utils.datetime = Calendar
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(HERE / "tiny" / "tokenizer.json"), **VARIABLES)
    assert tokenizer.special_tokens_map == VARIABLES
    folder = HERE / "goldens-chat"
    conversations = {name: {"messages": messages, "tools": TOOLS.get(name)} for name, messages in CONVERSATIONS.items()}
    special, cases = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special], []
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text("utf-8")
        for name, conversation in conversations.items():
            for generation_prompt in (False, True):
                case = {"template": path.stem, "conversation": name, "generation_prompt": generation_prompt}
                case |= render(tokenizer, source, **conversation, generation_prompt=generation_prompt)
                spelled = any(token in json.dumps(conversation) for token in special)
                if "generation %}" in source and "text" in case and not generation_prompt and not spelled:
                    case |= encode(tokenizer, source, **conversation)
                cases.append(case)
    snippets = [{"source": source} | render(tokenizer, source, CONVERSATIONS["system"]) for source in SNIPPETS]

    def lines(rows):
        return ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)

    head = json.dumps({"variables": VARIABLES, "today": f"{TODAY:%Y-%m-%d}"})[:-1]
    named = ",\n".join(f"{json.dumps(name)}: {lines([row])}" for name, row in conversations.items())
    text = (f'{head},\n"conversations": {{\n{named}\n}},\n"cases": [\n{lines(cases)}\n],\n'
            f'"snippets": [\n{lines(snippets)}\n]}}\n')
    json.loads(text)
    (folder / "goldens.json").write_text(text, "utf-8")
    of_variables = with_template_args(tokenizer, conversations)
    text_of_variables = ",\n".join(json.dumps(case, ensure_ascii=False) for case in of_variables["cases"])
    templates = json.dumps(of_variables["templates"], ensure_ascii=False, indent=1)
    (folder / "template_args.json").write_text(
        f'{{"templates": {templates},\n"cases": [\n{text_of_variables}\n]}}\n', "utf-8")
    raised = sum("error" in case for case in cases)
    print(f"{len(cases)} cases, {raised} of them raise; {len(snippets)} snippets; {len(text.encode()):,} bytes")


if __name__ == "__main__":
    main()
