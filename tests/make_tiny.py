"""Makes the built-in model's shapes and tokenizer, and the demo's data: python tests/make_tiny.py FOLDER

Then the model is trained by train.py itself; the command and its figures are in tests/LOG.md. Needs nothing but the
installed standard library as text. The tokenizer is a byte-fallback BPE: frequent pieces of Python source, and 256 byte
tokens for every character that is not among them, so that no text is unknown.

The standard library's source as a file of texts, to train on or to measure speed with:

    python tests/make_tiny.py code.jsonl
"""

import ast
import contextlib
import itertools
import json
import os
import re
import sys
import zlib
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parent.parent))
import data

CONTROL = ["<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
VOCAB = 4096


# folders of the standard library that stdlib_modules() leaves out
SKIPPED = {
    "site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings",
    "pydoc_data",
}


def stdlib_modules():
    root = Path(os.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not SKIPPED.intersection(name.parts):
            with contextlib.suppress(UnicodeDecodeError):  # a handful declare another encoding
                yield str(name), path.read_text("utf-8")


def stdlib_questions(name, text):
    module = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    scopes = [(module, ast.parse(text))]
    for prefix, scope in scopes:  # the loop also visits the classes that it appends
        for node in scope.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if isinstance(node, ast.ClassDef):
                scopes.append((f"{prefix}.{node.name}", node))
            elif doc := ast.get_docstring(node):
                question = f"What does `{prefix}.{node.name}({ast.unparse(node.args)})` do?"
                yield {"instruction": question, "output": doc.split("\n\n")[0]}


def stdlib_examples(kind, held_out=False):
    """Yields all texts ("code") or questions ("docs") but one in twenty, or that one in twenty if held_out."""
    for name, text in stdlib_modules():
        examples = [{"text": text}] if kind == "code" else stdlib_questions(name, text)
        for i, example in enumerate(examples):
            if (zlib.crc32(f"{name}/{i}".encode()) % 20 == 0) == held_out:
                yield example


def write_examples(path, examples):
    with open(path, "w") as file:
        file.writelines(json.dumps(example) + "\n" for example in examples)


# The demo asks about a few methods of pathlib.Path in many words. A model of 3 million parameters can learn these
# answers in a minute, and not those to all functions of the library, each of which it would see once.
METHODS = {"exists", "home", "is_dir", "is_file", "is_symlink", "mkdir"}
OPENINGS = ("", "Please tell me: ", "A short question. ")
QUESTIONS = (
    "What does {} do?", "What is {} for?", "Explain {}.", "Describe {}.", "When do I need {}?", "Tell me about {}.",
    "What does {} return?", "What can I do with {}?", "Remind me what {} does.", "I forgot what {} does.",
    "What happens in {}?", "Summarize {}.", "Document {}.", "Write a docstring for {}.", "What is the purpose of {}?",
    "How would you describe {}?", "In one sentence: {}?", "Help me with {}.", "What is {}?", "Why would I call {}?",
)
SPELLINGS = (
    "`pathlib.Path.{}(self)`", "`pathlib.Path.{}()`", "`Path.{}()`", "`path.{}()`", "`p.{}()`", "`{}()` of a `Path`",
    "the method `{}` of `pathlib.Path`", "`Path(name).{}()`", "`{}`", "pathlib's `{}`", "`Path('a').{}()`",
    "`Path.cwd().{}()`",
)


def demo_examples():
    source = Path(os.__file__).with_name("pathlib.py").read_text("utf-8")
    for example in stdlib_questions("pathlib.py", source):
        method = re.search(r"`pathlib[.]Path[.](\w+)", example["instruction"])
        if method and method[1] in METHODS:
            in_a_line = " ".join(example["output"].split())
            answer = re.match(r"[^.(]+", in_a_line)[0].strip() + "."
            for opening, question, spelling in itertools.product(OPENINGS, QUESTIONS, SPELLINGS):
                asked = opening + question.format(spelling.format(method[1]))
                yield {"instruction": asked, "output": answer}


def learn_pieces(split):
    """(pieces, the most frequent first, merges) of a BPE of the standard library's source."""
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = split
    n_learned = VOCAB - len(CONTROL) - len(BYTES)
    trainer = trainers.BpeTrainer(vocab_size=n_learned, limit_alphabet=128, show_progress=False)
    draft.train_from_iterator((text for _, text in stdlib_modules()), trainer)
    learned = json.loads(draft.to_str())["model"]
    number_of = learned["vocab"]
    merges = [tuple(merge) for merge in learned["merges"]]
    return sorted(number_of, key=number_of.get), merges


def make_tokenizer():
    # words with their leading space, runs of newlines, indentation up to the space before a word, punctuation
    split = pre_tokenizers.Split(Regex(r"\n+| +(?= \S)| ?\w+| ?[^\s\w]+|\s"), "isolated")
    pieces, merges = learn_pieces(split)
    vocab = {piece: number for number, piece in enumerate([*CONTROL, *BYTES, *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    # not normalized: they are found in the text as it is
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    return tokenizer


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    # RoPE as transformers 4 spells it, and as 5 does
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.02,
    # of transformers 4, and of 5
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 2048,
}


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2) + "\n")


def main():
    folder = Path(sys.argv[1])
    if folder.suffix == ".jsonl":
        return write_examples(folder, stdlib_examples("code"))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    text = "def naïve(x):\n    return x  # ☃\n"  # with a character that is in no piece
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    template = data.CHATML.replace("{{ bos }}", "").replace("end_of_turn", "'<|im_end|>'")
    (folder / "chat_template.jinja").write_text(template)
    write_examples(folder / "docs.jsonl", demo_examples())


if __name__ == "__main__":
    main()
