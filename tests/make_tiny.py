"""Makes the shapes and the tokenizer of the built-in model: python tests/make_tiny.py FOLDER

Then it is trained by train.py itself; the command and its figures are in tests/LOG.md. Needs nothing but the installed
standard library as text. The tokenizer is a byte-fallback BPE: frequent pieces of Python source, and 256 byte tokens
for every character that is not among them, so that no text is unknown.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parent.parent))
import data

CONTROL = ["<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
VOCAB = 4096


def learn_pieces(split):
    """(pieces, the most frequent first, merges) of a BPE of the standard library's source."""
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = split
    n_learned = VOCAB - len(CONTROL) - len(BYTES)
    trainer = trainers.BpeTrainer(vocab_size=n_learned, limit_alphabet=128, show_progress=False)
    draft.train_from_iterator((text for _, text in data.stdlib_modules()), trainer)
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
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    text = "def naïve(x):\n    return x  # ☃\n"  # with a character that is in no piece
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    template = data.CHATML.replace("{{ bos }}", "").replace("end_of_turn", "'<|im_end|>'")
    (folder / "chat_template.jinja").write_text(template)


if __name__ == "__main__":
    main()
