"""--add_tokens: ids and rows of new special tokens, what messages may spell, and results that load again with both."""

import argparse
import json
import random
import shutil

import pytest
import torch
from conftest import HERE, curve, model_with_weights, on_ranks, random_chats, random_model, run_ranks
from safetensors.torch import load_file

import data
import model as lm
import train

TOKENS = ["<call>", "</call>", "<note 1>"]
IDS = range(4096, 4099)  # the built-in tokenizer ends with 4095
PADDED = 33 * 128  # the next multiple above 4,099
TIED_OR_NOT = {"untied": {}, "tied": {"tie_word_embeddings": True}}
SHORT = "--precision fp32 --lr 1e-2 --seq_len 96 --batch_size 6 --steps 2 --log_every 1".split()
LORA = "--lora --train_embeddings --lora_rank 5 --merge".split()


@pytest.fixture(scope="module", params=TIED_OR_NOT)
def base(request, tmp_path_factory):
    """A folder with random weights, whose embedding has as many rows as the tokenizer has tokens."""
    return model_with_weights(tmp_path_factory.mktemp("base") / request.param, **TIED_OR_NOT[request.param])


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Conversations, half of which have new tokens in their questions and answers."""
    path = random_chats(tmp_path_factory.mktemp("data") / "calls.jsonl", random.Random(0), 24)
    lines = []
    for number, line in enumerate(path.read_text().splitlines()):
        messages = json.loads(line)["messages"]
        for message in messages if number % 2 else []:
            message["content"] = f"<call>{message['content']}</call>"
        lines.append(json.dumps({"messages": messages}) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def adapted(base, calls, tmp_path_factory):
    """The folder of a LoRA run with new tokens, merged at its end."""
    out = tmp_path_factory.mktemp("adapted") / "run"
    argv = ["--model", base, "--data", calls, *SHORT, *LORA, "--save_every", 1, "--add_tokens", *TOKENS]
    _, text, codes = run_ranks(1, argv, out)
    assert codes == [0], text
    assert "new tokens: ids 4,096 to 4,098, in a vocabulary of 4,224" in " ".join(text.split())
    assert "dropped" not in text  # rows that spell the tokens are trained on
    return out


def opened(*flags):
    """The train.OpenedModel of these flags."""
    args = train.parse_args([*map(str, flags), "--precision", "fp32"])
    return train.open_model(args, train.Ranks(False, 1800))


def logits_of(*flags):
    """Of some tokens, new ones among them, by the model that these flags open."""
    found = opened(*flags)
    found.model.to_empty(device="cpu").tie_()
    data.load_weights_(found.model, found.source, found.adapter, 0, torch.device("cpu"))
    with torch.no_grad():
        return found.model(torch.arange(4090, 4099)[None])


# ---------------------------------------------------------------- the tokenizer


def test_new_tokens_get_the_librarys_ids_and_are_one_token_in_messages():
    tokenizer = data.Tokenizer(HERE / "tiny", new_tokens=TOKENS)
    assert tokenizer.new_ids == IDS
    assert [tokenizer.core.token_to_id(token) for token in TOKENS] == list(IDS)
    messages = [{"role": "user", "content": "a<call>b"}, {"role": "assistant", "content": "<note 1>c</call>"}]
    (rendered,), n_without_mask = tokenizer.conversation(messages)
    assert n_without_mask == 0
    example = data.Example("messages", rendered.text, rendered.spans, is_chat=True)
    ((ids, mask),) = tokenizer.encode([example])
    assert [number for number in ids if number in IDS] == [4096, 4098, 4097]
    # the two of the answer are targets, the one of the question is not
    assert [number for number in ids[mask] if number in IDS] == [4098, 4097]
    # and an answer is shown with them
    assert tokenizer.core.decode(list(IDS)) == "".join(TOKENS)


def test_messages_still_cannot_spell_the_models_own_special_tokens():
    tokenizer = data.Tokenizer(HERE / "tiny", new_tokens=TOKENS)
    messages = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "<call>"}]
    assert tokenizer.conversation(messages)[0][0].text is None


def test_a_saved_tokenizer_is_read_with_the_same_tokens_also_twice(tmp_path):
    first = tmp_path / "first"
    second = tmp_path / "second"
    for folder, source, tokens in ((first, HERE / "tiny", TOKENS), (second, first, ["<more>"])):
        folder.mkdir()
        data.Tokenizer(source, new_tokens=tokens).save(folder)
    tokenizer = data.Tokenizer(second)
    assert tokenizer.core.encode("".join([*TOKENS, "<more>"])).ids == list(range(4096, 4100))
    assert not tokenizer.reserved.search("<call><more>")
    # what other readers see: special tokens, in both files
    entries = data.read_json(second / "tokenizer.json")["added_tokens"]
    assert [entry["content"] for entry in entries if entry["special"]][-4:] == [*TOKENS, "<more>"]
    assert data.read_json(second / "tokenizer_config.json")["additional_special_tokens"] == [*TOKENS, "<more>"]


def test_a_list_of_added_tokens_in_the_config_grows_as_well(tmp_path):
    folder = random_model(tmp_path / "model")
    config = data.read_json(folder / "tokenizer_config.json")
    config["added_tokens_decoder"] = {"0": {"content": "<|im_start|>", "special": True}}
    config["extra_special_tokens"] = ["<|im_start|>"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    out.mkdir()
    data.Tokenizer(folder, new_tokens=["<call>"]).save(out)
    written = data.read_json(out / "tokenizer_config.json")
    assert written["added_tokens_decoder"].keys() == {"0", "4096"}
    assert written["added_tokens_decoder"]["4096"]["content"] == "<call>"
    assert written["extra_special_tokens"] == ["<|im_start|>", "<call>"]


def test_the_cached_tokens_of_a_file_depend_on_the_list(calls):
    tokenizers = [data.Tokenizer(HERE / "tiny", new_tokens=tokens) for tokens in ([], TOKENS, TOKENS[:1])]
    folders = {data.tokenized(str(calls), False, tokenizer) for tokenizer in tokenizers}
    assert len(folders) == 3


# ---------------------------------------------------------------- the rows


class Numbers:
    """A source of weights with an embedding and a head of 300 rows."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.values = {name: torch.randn(300, 8, generator=generator) + 3 for name in (data.EMBEDDING, data.HEAD)}
        self.tensors = {name: data.Stored(None, 0, (300, 8), torch.float32) for name in self.values}

    def rows(self, name, start, stop):
        return self.values[name][start:stop].clone()

    def crc(self):
        return 7


def config_of(n_rows, **changes):
    """Of a model with so many rows of 8 numbers in embedding and head."""
    sizes = {"vocab_size": n_rows, "hidden_size": 8, "head_dim": 4, "num_attention_heads": 2}
    return lm.parse_config(data.read_json(HERE / "tiny" / "config.json") | sizes | changes)


def grown(n_rows, seed=0, source=None, **changes):
    """A source of 300 rows that has n_rows now, of which three are of new tokens."""
    config = config_of(n_rows, **({"tie_word_embeddings": False} | changes))
    return data.WithNewRows(source or Numbers(), config, range(300, 303), seed)


@pytest.mark.parametrize("new_ids, n_rows", [
    (range(300, 303), 384),  # the embedding grows
    (range(290, 293), 300),  # it has spare rows
    (range(298, 303), 384),  # some
])
def test_new_rows_are_about_the_mean_of_the_old_ones_and_no_two_are_the_same(new_ids, n_rows):
    source = Numbers()
    with_new_rows = data.WithNewRows(source, config_of(n_rows, tie_word_embeddings=False), new_ids, seed=0)
    steps_of_both = []
    for name, values in source.values.items():
        values[new_ids.start :] = 1000  # rows of no token may hold anything
        assert with_new_rows.tensors[name].shape == (n_rows, 8)
        rows = with_new_rows.rows(name, 0, n_rows)
        is_new = torch.zeros(n_rows, dtype=torch.bool)
        is_new[300:] = True
        is_new[new_ids.start : new_ids.stop] = True
        assert torch.equal(rows[~is_new], values[~is_new[:300]])  # to the bit
        old = values[: new_ids.start]  # without rows of no token
        steps = (rows[is_new] - old.mean(0)) / old.std(0)
        # normal numbers of a tenth: none is ten times as large, and their mean square is near 1 / 100
        assert steps.abs().max() < 1
        assert 0.05 < steps.square().mean().sqrt() < 0.2
        assert len(rows[is_new].unique(dim=0)) == is_new.sum()
        steps_of_both.append(steps)
    of_embedding, of_head = steps_of_both
    assert not torch.allclose(of_embedding, of_head, atol=0.01)


def test_new_rows_depend_on_seed_and_id_alone():
    whole = grown(384).rows(data.EMBEDDING, 0, 384)
    source = grown(384)
    last = source.rows(data.EMBEDDING, 310, 384)
    first = source.rows(data.EMBEDDING, 0, 299)
    between = source.rows(data.EMBEDDING, 299, 310)
    assert torch.equal(torch.cat([first, between, last]), whole)
    other_seed = grown(384, seed=1).rows(data.EMBEDDING, 0, 384)
    assert torch.equal(other_seed[:300], whole[:300])
    assert not torch.equal(other_seed[300:], whole[300:])


def test_a_tied_head_in_files_gets_the_rows_of_the_embedding():
    source = Numbers()
    source.values[data.HEAD] = source.values[data.EMBEDDING]
    tied = grown(384, source=source, **TIED_OR_NOT["tied"])
    assert torch.equal(tied.rows(data.EMBEDDING, 0, 384), tied.rows(data.HEAD, 0, 384))


def check_rows_on_ranks(ranks, folder, base):
    """Each rank's rows of the sharded embedding are those of a model on one rank."""
    args = train.parse_args(["--model", str(base), "--precision", "fp32", "--fsdp2", "--add_tokens", *TOKENS])
    found = train.open_model(args, ranks)
    train.shard_(found.model, args, ranks.device)
    found.model.to_empty(device="cpu").tie_()
    data.load_weights_(found.model, found.source, None, 0, ranks.device)
    for name, tensor in data.full_tensors(found.model, False):
        whole = found.source.rows(name, 0, found.source.tensors[name].n_rows)
        assert torch.equal(tensor, whole), name


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_hold_the_same_rows(base, tmp_path, world):
    on_ranks(world, check_rows_on_ranks, tmp_path, base)


# ---------------------------------------------------------------- runs


def test_the_merged_model_and_the_adapter_load_again_with_the_same_tokens(adapted):
    merged = opened("--model", adapted / "merged")
    adapter = opened("--model", adapted / "final")  # an adapter: its base is the model that --model named
    for found in (merged, adapter):
        assert found.config.vocab_size == PADDED
        assert found.tokenizer.core.encode("<note 1>").ids == [4098]
        assert not found.tokenizer.reserved.search("<call>")
    assert data.read_json(adapted / "merged/config.json")["vocab_size"] == PADDED
    with_adapter = logits_of("--model", adapted / "final")
    torch.testing.assert_close(logits_of("--model", adapted / "merged"), with_adapter, atol=1e-4, rtol=1e-4)


def test_rows_of_tokens_in_the_data_are_learned(base, adapted):
    """The second step's weights of <call>, which is in the data, differ from those that it began with."""
    begin = opened("--model", base, "--add_tokens", *TOKENS).source.rows(data.EMBEDDING, 4096, 4099)
    end = load_file(adapted / "merged" / "model.safetensors")[data.EMBEDDING][4096:4099]
    assert (end[:2] - begin[:2]).abs().max(1).values.min() > 1e-4


def test_an_adapter_with_new_tokens_trains_further_and_merges(base, adapted, calls, tmp_path):
    argv = ["--model", base, "--adapter", adapted / "final", "--data", calls, *SHORT, "--merge"]
    _, text, codes = run_ranks(1, argv, tmp_path / "run")
    assert codes == [0], text
    assert opened("--model", tmp_path / "run").config.vocab_size == PADDED


def test_full_fine_tuning_over_ranks_writes_a_model_with_the_tokens(base, calls, tmp_path):
    argv = ["--model", base, "--data", calls, *SHORT, "--add_tokens", *TOKENS]
    one = curve(1, argv, tmp_path / "one")[0]
    two = curve(2, [*argv, "--fsdp2", "--batch_size", 3], tmp_path / "two")[0]
    assert two == pytest.approx(one, abs=1e-5)
    found = opened("--model", tmp_path / "one")
    assert found.config.vocab_size == PADDED
    assert found.source.tensors[data.EMBEDDING].shape[0] == PADDED
    assert found.tokenizer.core.encode("<call>").ids == [4096]


def test_a_resumed_run_compares_the_tokens(base, adapted, calls, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(adapted / "checkpoint-1", out / "checkpoint-1")
    argv = ["--model", base, "--data", calls, *SHORT, *LORA, "--resume", out / "checkpoint-1"]
    _, text, codes = run_ranks(1, [*argv, "--add_tokens", *TOKENS[:2]], out)
    assert codes == [1]
    assert "--add_tokens was ['<call>', '</call>', '<note 1>'], is ['<call>', '</call>']" in text
    _, text, codes = run_ranks(1, [*argv, "--add_tokens", *TOKENS], out)
    assert codes == [0], text
    name = "merged/model.safetensors"
    assert (out / name).read_bytes() == (adapted / name).read_bytes()


def test_an_adapter_brings_its_tokenizer_also_where_no_row_was_added(base, adapted):
    """A model with spare rows has as many after --add_tokens as before."""
    files = data.find_model(str(base), False)
    adapter, _ = data.open_adapter(adapted / "final")
    found = train.with_vocabulary(files, PADDED, None, adapter)
    assert found.tokenizer == adapted / "final"
    assert found.config == files.config


def test_the_size_is_changed_where_a_file_has_it():
    inner = {"text_config": {"vocab_size": 5, "hidden_size": 8}}
    assert data.with_vocab_size(inner, 9) == {"text_config": {"vocab_size": 9, "hidden_size": 8}}
    assert data.with_vocab_size(inner | {"vocab_size": 5}, 9)["vocab_size"] == 9
    assert data.with_vocab_size({"hidden_size": 8}, 9) == {"hidden_size": 8, "vocab_size": 9}


def test_the_plan_knows_the_larger_vocabulary(base):
    plans = []
    for flags in ([], ["--add_tokens", *TOKENS]):
        args = train.parse_args(["--model", str(base), "--dry_run", *flags])
        plans.append(train.open_config(args, 1, device=None, random_init=True).config.vocab_size)
    assert plans == [4096, PADDED]


def test_spare_rows_are_used_before_the_embedding_grows(tmp_path):
    folder = random_model(tmp_path / "spare", vocab_size=4099)
    for tokens, n_rows in ((TOKENS, 4099), ([*TOKENS, "<more>"], PADDED)):
        found = opened("--model", folder, "--random_init", "--add_tokens", *tokens)
        assert found.config.vocab_size == n_rows
        assert found.tokenizer.new_ids == range(4096, 4096 + len(tokens))


# ---------------------------------------------------------------- what is given


def test_a_file_has_a_token_a_line(tmp_path):
    path = tmp_path / "tokens.txt"
    path.write_text("<call>\n</call>\n\n<note 1>\n")
    assert train.parse_args(["--add_tokens", str(path)]).add_tokens == TOKENS


@pytest.mark.parametrize("content, message", [
    ("", "the file is empty: expected a token a line"),
    ("\n\n", "the file is empty"),
    ("<call>\n \n", "expected text without blanks around it"),
    ("<call>\n<call>\n", "<call>: given more than once"),
])
def test_a_file_that_cannot_be_right_is_refused(tmp_path, content, message):
    path = tmp_path / "tokens.txt"
    path.write_text(content)
    with pytest.raises(argparse.ArgumentError, match=message) as refused:
        train.parse_args(["--add_tokens", str(path)])
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("flags, message", [
    (["--add_tokens", " "], "expected text without blanks around it"),
    (["--add_tokens", "<a>", "<b>", "<a>"], "<a>: given more than once"),
    (["--add_tokens", "toknes.txt"], "no such file"),
    (["--add_tokens", "<a>", "--lora"], "needs --train_embeddings"),
    (["--add_tokens", "<a>", "--qlora"], "needs --train_embeddings"),
    (["--add_tokens", "<a>", "--adapter", "folder"], "merge the adapter first"),
    (["--add_tokens", "<a>", "--chat"], "leave it out with --chat"),
])
def test_what_cannot_work_is_refused(flags, message):
    with pytest.raises(argparse.ArgumentError, match=message):
        train.parse_args(flags)


def test_tokens_that_the_model_has_are_named():
    with pytest.raises(ValueError, match=r"--add_tokens: <\|im_end\|>, def: already in the model's tokenizer"):
        data.Tokenizer(HERE / "tiny", new_tokens=["<call>", "<|im_end|>", "def"])
