"""Makes pairs for --dpo from the standard library: python tests/make_pairs.py TRAIN.jsonl HELD_OUT.jsonl

A question asks what a function does. The whole docstring is the rejected answer, its first sentence the chosen one, so
that a model that has learned the preference answers in one sentence. Docstrings of one sentence, and those that run
to more than a short row, are left out. Of functions with the same docstring one is taken, so none is in both files.
"""

import itertools
import json
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import data

N_TRAIN = 300
N_HELD_OUT = 40
LONGEST = 320  # characters of the whole docstring: about 80 tokens
SENTENCE = re.compile(r"(.+?\.)\s", re.DOTALL)


def pairs():
    """Yields the pairs of all modules, each docstring once."""
    seen = set()
    for name, text in data.stdlib_modules():
        for example in data.stdlib_questions(name, text):
            whole = " ".join(example["output"].split())  # on one line, or its layout would be what is learned
            first = SENTENCE.match(whole)
            if first and len(whole) <= LONGEST and whole not in seen:
                seen.add(whole)
                question = [{"role": "user", "content": example["instruction"]}]
                yield {
                    "prompt": question,
                    "chosen": [{"role": "assistant", "content": first[1]}],
                    "rejected": [{"role": "assistant", "content": whole}],
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
