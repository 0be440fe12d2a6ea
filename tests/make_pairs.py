"""Makes pairs for --dpo from the standard library: python tests/make_pairs.py TRAIN.jsonl HELD_OUT.jsonl

A question asks what a function does, and the shorter of two answers is preferred: the first sentence of the docstring.
The rejected answer is the whole docstring behind the words with which a small chat model begins such an answer. So a
model that has learned the preference leaves these words out, and stops after a sentence. Docstrings of one sentence,
and those that run to more than a short row, are left out. Of functions with the same docstring one is taken, so none
is in both files.
"""

import itertools
import json
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import make_tiny

N_TRAIN = 300
N_HELD_OUT = 40
LONGEST = 320  # characters of the whole docstring: about 80 tokens
SENTENCE = re.compile(r"(.+?\.)\s", re.DOTALL)
CALL = re.compile(r"`.+`")  # in a question


def message(role, content):
    return [{"role": role, "content": content}]


def pairs():
    """Yields the pairs of all modules, each docstring once."""
    seen = set()
    for name, text in make_tiny.stdlib_modules():
        for example in make_tiny.stdlib_questions(name, text):
            question = example["instruction"]
            whole = " ".join(example["output"].split())  # on one line, or its layout would be what is learned
            first = SENTENCE.match(whole)
            if not first or len(whole) > LONGEST or whole in seen:
                continue
            seen.add(whole)
            wordy = f"{CALL.search(question)[0]} is a Python function that {whole[0].lower()}{whole[1:]}"
            yield {
                "prompt": message("user", question),
                "chosen": message("assistant", first[1]),
                "rejected": message("assistant", wordy),
            }


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    found = list(pairs())
    random.Random(0).shuffle(found)
    shuffled = iter(found)
    for path, n in zip(sys.argv[1:], (N_TRAIN, N_HELD_OUT)):
        lines = [json.dumps(pair) + "\n" for pair in itertools.islice(shuffled, n)]
        Path(path).write_text("".join(lines))
    print(f"{N_TRAIN} and {N_HELD_OUT} of {len(found)} pairs")


if __name__ == "__main__":
    main()
