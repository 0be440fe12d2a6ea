"""Renders the conversations of make_chat_goldens.py by real chat templates, here and in transformers, and compares the
texts and the spans of {% generation %} blocks. Needs transformers (5.23 was used); no test, as the templates are not
ours to keep:

    python tests/check_templates.py FOLDER      # of *.jinja files, such as trl/chat_templates of a checkout of TRL
"""

import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from make_chat_goldens import CONVERSATIONS, HERE, TOOLS, VARIABLES, Calendar
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

sys.path.insert(0, str(HERE.parent))

import data


def theirs(tokenizer, source, messages, tools, prompt):
    """-> (text, spans), or None where the template raises."""
    options = {"tools": tools, "chat_template": source, "add_generation_prompt": prompt}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception:
        return None
    if "generation %}" not in source and "generation -%}" not in source:
        return text, []
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    (again,), (spans,) = chat_template_utils.render_jinja_template(
        [messages], return_assistant_tokens_mask=True, **options, **tokenizer.special_tokens_map)
    assert again == text
    joined = []  # ours are: an answer and its end may have a block each
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            start, _ = joined.pop()
        joined.append((start, stop))
    return text, joined


def ours(tokenizer, messages, tools, prompt):
    try:
        return tokenizer.render(data.check_messages(messages), tools, prompt)
    except ValueError:
        return None


def main():
    chat_template_utils.datetime = Calendar
    reference = PreTrainedTokenizerFast(tokenizer_file=str(HERE / "tiny/tokenizer.json"), **VARIABLES)
    files, total = sorted(Path(sys.argv[1]).glob("*.jinja")), Counter()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(HERE / "tiny/tokenizer.json", folder)
        Path(folder, "tokenizer_config.json").write_text(json.dumps(VARIABLES))
        for file in files:
            tokenizer, source, unlike = data.Tokenizer(folder, file), file.read_text("utf-8"), []
            for name, messages in CONVERSATIONS.items():
                for prompt in (False, True):
                    expected = theirs(reference, source, messages, TOOLS.get(name), prompt)
                    if ours(tokenizer, messages, TOOLS.get(name), prompt) != expected:
                        unlike.append(name + " (prompt)" * prompt)
                    else:
                        total["both raise" if expected is None else "equal"] += 1
            total["different"] += len(unlike)
            print(f"{file.name}: " + (", ".join(unlike) or "equal"))
    print(f"{len(files)} templates: " + ", ".join(f"{n} {what}" for what, n in total.items()))
    raise SystemExit(bool(total["different"]))


if __name__ == "__main__":
    main()
