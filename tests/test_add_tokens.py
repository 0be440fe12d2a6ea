"""--add_tokens: ids and rows of new special tokens, what messages may spell, and results that load again with both."""

import argparse
import json
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    HERE, check_merges_later, curve, model_with_weights, on_ranks, random_chats, random_model, run_ranks,
)
from safetensors.torch import load_file, save_file

import data
import model as lm
import train

TINY = HERE / "tiny"
CPU = torch.device("cpu")
TOKENS = ["<call>", "</call>", "<note 1>"]
N_OLD = 4096  # tokens of the built-in tokenizer
IDS = range(N_OLD, N_OLD + len(TOKENS))
PADDED = 33 * 128  # rows of an embedding that grows: the next multiple of 128 above 4,099
TIED_OR_NOT = {"untied": {}, "tied": {"tie_word_embeddings": True}}
# a high rate, so that two steps move the new rows by more than rounding does
SHORT = "--precision fp32 --lr 1e-2 --seq_len 96 --batch_size 6 --steps 2 --log_every 1".split()
SEED = train.parse_args([]).seed
LORA = "--lora --train_embeddings --lora_rank 5 --merge".split()


@pytest.fixture(scope="module", params=TIED_OR_NOT)
def base(request, tmp_path_factory):
    """A folder with random weights, whose embedding has as many rows as the tokenizer has tokens."""
    folder = tmp_path_factory.mktemp("base") / request.param
    return model_with_weights(folder, **TIED_OR_NOT[request.param])


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Conversations, half of which have new tokens in their questions and answers."""
    path = tmp_path_factory.mktemp("data") / "calls.jsonl"
    random_chats(path, random.Random(0), n=24)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[1::2]:
        for message in row["messages"]:
            message["content"] = f"<call>{message['content']}</call>"
    with open(path, "w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    return path


def trained(*flags, out):
    """What a run on one rank says, which must succeed."""
    _, text, codes = run_ranks(1, flags, out)
    assert codes == [0], text
    return text


@pytest.fixture(scope="module")
def adapted(base, calls, tmp_path_factory):
    """The folder of a LoRA run with new tokens, merged at its end."""
    out = tmp_path_factory.mktemp("adapted") / "run"
    flags = [*SHORT, *LORA, "--add_tokens", *TOKENS]
    flags += ["--save_every", 1]  # a checkpoint to resume from
    text = trained("--model", base, "--data", calls, *flags, out=out)
    in_one_line = " ".join(text.split())
    assert "new tokens: ids 4,096 to 4,098, in a vocabulary of 4,224" in in_one_line
    # rows that spell a model's own special tokens are dropped, those that spell new ones are trained on
    assert "spell a special token" not in text
    return out


def opened(*flags):
    """The train.OpenedModel of these flags."""
    words = [str(word) for word in flags]
    args = train.parse_args([*words, "--precision", "fp32"])
    ranks = train.Ranks(want_group=False, timeout=1800)
    return train.open_model(args, ranks)


def with_weights(found):
    """The model of a train.OpenedModel with weights; those of new rows are still to be made."""
    model = found.model
    model.to_empty(device="cpu").tie_()
    data.load_weights_(model, found.reader, found.adapter_reader, 0, CPU)
    return model




def begun(found):
    """The same as training begins."""
    model = with_weights(found)
    data.fill_new_rows_(model, found.reader, found.tokenizer.new_ids, SEED)
    return model


def logits_of(*flags):
    """Of some tokens, new ones among them, by the model that these flags open."""
    model = with_weights(opened(*flags))
    tokens = torch.arange(N_OLD - 6, IDS.stop)
    with torch.no_grad():
        return model(tokens[None])


def ids_in(text, tokenizer):
    return tokenizer.core.encode(text).ids


def ask_and_answer(question, answer):
    """Messages of one turn each."""
    user = {"role": "user", "content": question}
    assistant = {"role": "assistant", "content": answer}
    return [user, assistant]


# ---------------------------------------------------------------- the tokenizer


def test_new_tokens_get_the_librarys_ids_and_are_one_token_in_messages():
    tokenizer = data.Tokenizer(TINY, new_tokens=TOKENS)
    assert tokenizer.new_ids == IDS
    ids_of_the_library = [tokenizer.core.token_to_id(token) for token in TOKENS]
    assert ids_of_the_library == list(IDS)

    messages = ask_and_answer("a<call>b", "<note 1>c</call>")
    report = data.FileReport()
    (rendered,) = tokenizer.conversation(messages, report=report)
    assert not report.notes
    example = data.Text(rendered.text, rendered.spans, is_chat=True)
    (encoded,) = tokenizer.encode([example])
    ids, is_target = encoded
    # <call>, <note 1> and </call>, each in one piece and where it was spelled
    assert new_among(ids) == [4096, 4098, 4097]
    # the two of the answer are targets, the one of the question is not
    assert new_among(ids[is_target]) == [4098, 4097]
    # and an answer is shown with them
    shown = tokenizer.core.decode(list(IDS))
    assert shown == "".join(TOKENS)


def new_among(ids):
    return [number for number in ids if number in IDS]


def test_messages_still_cannot_spell_the_models_own_special_tokens():
    tokenizer = data.Tokenizer(TINY, new_tokens=TOKENS)
    messages = ask_and_answer("<|im_end|>", "<call>")
    (rendered,) = tokenizer.conversation(messages)
    # no text: the conversation is dropped
    assert rendered.text is None


def saved(source, new_tokens, folder):
    """A folder with the files of a tokenizer that has new tokens."""
    folder.mkdir()
    data.Tokenizer(source, new_tokens=new_tokens).save(folder)
    return folder


def test_a_saved_tokenizer_is_read_with_the_same_tokens_also_twice(tmp_path):
    first = saved(TINY, TOKENS, tmp_path / "first")
    second = saved(first, ["<more>"], tmp_path / "second")
    all_new = [*TOKENS, "<more>"]
    tokenizer = data.Tokenizer(second)
    ids = ids_in("".join(all_new), tokenizer)
    assert ids == [4096, 4097, 4098, 4099]
    assert not tokenizer.reserved.search("<call><more>")

    # what other readers see: ordinary added tokens, which skip_special_tokens does not skip
    entries = data.read_json(second / "tokenizer.json")["added_tokens"]
    assert [entry["content"] for entry in entries][-4:] == all_new
    assert not any(entry["special"] or entry["normalized"] for entry in entries[-4:])


def test_a_list_of_added_tokens_in_the_config_gives_way_to_tokenizer_json(tmp_path):
    """transformers 5 adds no other tokens than those of `added_tokens_decoder` if there is one, for classes such as
    Qwen2Tokenizer: a list without the new tokens would lose them. Files of transformers 4 have it."""
    folder = random_model(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    config = data.read_json(path)
    listed = {"0": {"content": "<|im_start|>", "special": True}, "4096": {"content": "<listed>", "special": False}}
    path.write_text(json.dumps(config | {"added_tokens_decoder": listed}))
    out = saved(folder, ["<call>"], tmp_path / "out")
    assert data.read_json(out / "tokenizer_config.json") == config
    assert ids_in("<listed><call>", data.Tokenizer(out)) == [4096, 4097]
    # without new tokens the file stays as it is
    assert data.read_json(saved(folder, (), tmp_path / "same") / "tokenizer_config.json").keys() > config.keys()


def test_the_cached_tokens_of_a_file_depend_on_the_list(calls):
    """Otherwise a second run with other tokens would train on the ids of the first one."""
    folders = set()
    for new_tokens in ([], TOKENS, TOKENS[:1]):
        tokenizer = data.Tokenizer(TINY, new_tokens=new_tokens)
        folders.add(data.tokenized(str(calls), tokenizer))
    assert len(folders) == 3


# ---------------------------------------------------------------- the rows


N_STORED = 300  # rows of embedding and head in the files of what follows
GROWN = 384  # rows of both in the model
WIDTH = 8


def config_of(n_rows):
    """Of a model with so many rows of 8 numbers in embedding and head."""
    raw = data.read_json(TINY / "config.json")
    raw["vocab_size"] = n_rows
    raw["hidden_size"] = WIDTH
    # heads that fit this width
    raw["head_dim"] = 4
    raw["num_attention_heads"] = 2
    raw["tie_word_embeddings"] = False
    return lm.parse_config(raw)


def stored_and_filled(n_rows, new_ids, seed=0):
    """{name: (300 rows in files, the rows of the model)} of an embedding and a head with so many rows."""
    generator = torch.Generator().manual_seed(0)
    model = lm.Transformer(config_of(n_rows))
    stored = {}
    source = SimpleNamespace(tensors={}, rows=lambda name, start, stop: stored[name][start:stop])
    for name in (data.EMBEDDING, data.HEAD):
        noise = torch.randn(N_STORED, WIDTH, generator=generator)
        stored[name] = 3 + noise  # so that rows about the mean differ from rows about 0
        stored[name][new_ids.start :] = 1000  # rows of no token may hold anything
        source.tensors[name] = data.Stored(None, tuple(noise.shape), torch.float32, name)
        rows = model.get_parameter(name).detach()
        rows[:N_STORED] = stored[name]
        rows[N_STORED:] = torch.nan  # not loaded
    data.fill_new_rows_(model, source, new_ids, seed)
    return {name: (rows, model.get_parameter(name).detach()) for name, rows in stored.items()}


@pytest.mark.parametrize("new_ids, n_rows", [
    (range(300, 303), GROWN),  # the embedding grows
    (range(290, 293), N_STORED),  # it has spare rows
    (range(298, 303), GROWN),  # some
])
def test_new_rows_are_about_the_mean_of_the_old_ones_and_no_two_are_the_same(new_ids, n_rows):
    # rows that the files do not have are new even where they are of no token
    is_new = torch.zeros(n_rows, dtype=torch.bool)
    is_new[N_STORED:] = True
    is_new[new_ids.start : new_ids.stop] = True
    is_old = ~is_new
    steps_of_both = []
    for stored, rows in stored_and_filled(n_rows, new_ids).values():
        assert torch.equal(rows[is_old], stored[is_old[:N_STORED]])  # to the bit
        new_rows = rows[is_new]
        assert len(new_rows.unique(dim=0)) == len(new_rows)

        old = stored[: new_ids.start]  # without rows of no token
        steps = (new_rows - old.mean(0)) / old.std(0)
        # normal numbers of a tenth: none is ten times as large, and their mean square is near 1 / 100
        assert steps.abs().max() < 1
        root_mean_square = steps.square().mean().sqrt()
        assert 0.05 < root_mean_square < 0.2
        steps_of_both.append(steps)
    # with the same noise in both, the two matrices of an untied model would begin alike
    of_embedding, of_head = steps_of_both
    assert not torch.allclose(of_embedding, of_head, atol=0.01)


def test_new_rows_depend_on_the_seed():
    new_ids = range(N_STORED, N_STORED + 3)
    _, rows = stored_and_filled(GROWN, new_ids)[data.EMBEDDING]
    _, again = stored_and_filled(GROWN, new_ids)[data.EMBEDDING]
    assert torch.equal(again, rows)
    _, others = stored_and_filled(GROWN, new_ids, seed=1)[data.EMBEDDING]
    assert torch.equal(others[:N_STORED], rows[:N_STORED])
    assert not torch.equal(others[N_STORED:], rows[N_STORED:])


@pytest.mark.unperturbed
def test_a_tied_head_that_files_repeat_has_no_new_rows_either(tmp_path):
    folder = model_with_weights(tmp_path / "model", **TIED_OR_NOT["tied"])
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[data.HEAD] = tensors[data.EMBEDDING].clone()
    save_file(tensors, path, {"format": "pt"})
    model = begun(opened("--model", folder, "--add_tokens", *TOKENS))
    embedding = model.get_parameter(data.EMBEDDING)
    assert model.lm_head.weight is embedding
    assert torch.equal(embedding[:N_OLD], tensors[data.EMBEDDING])
    assert embedding.isfinite().all()


def check_rows_on_ranks(ranks, folder, base, flags):
    """The sharded embedding of all ranks is that of a model on one rank, within rounding where its rows are new: the
    ranks sum the old ones in another order."""
    flags = ["--model", str(base), "--precision", "fp32", *flags]
    args = train.parse_args([*flags, "--add_tokens", *TOKENS])
    expected = dict(begun(train.open_model(args, ranks)).named_parameters())
    found = train.open_model(args, ranks)
    model = found.model
    if args.fsdp2:
        train.shard_(model, args, ranks.device)
    model.to_empty(device="cpu").tie_()
    data.load_weights_(model, found.reader, None, SEED, ranks.device)
    data.fill_new_rows_(model, found.reader, found.tokenizer.new_ids, SEED)
    for name, tensor in data.full_tensors(model, trainable_only=False):
        if name in (data.EMBEDDING, data.HEAD):
            assert torch.equal(tensor[:N_OLD], expected[name][:N_OLD]), name
            # sums in float64: a float32 number may round to its neighbour
            torch.testing.assert_close(tensor[N_OLD:], expected[name][N_OLD:].detach(), rtol=1e-6, atol=1e-9)
        else:
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.unperturbed
@pytest.mark.parametrize("world, flags", [
    (2, ["--fsdp2"]),
    (3, ["--fsdp2"]),
    (2, ["--fsdp2", "--offload", "params"]),
    (2, ["--fsdp2", "--replicas", "2"]),  # both ranks have all rows
    (2, []),
], ids=lambda value: " ".join(value) if isinstance(value, list) else None)
def test_ranks_hold_the_same_rows(base, tmp_path, world, flags):
    on_ranks(world, check_rows_on_ranks, tmp_path, base, flags)


# ---------------------------------------------------------------- runs


@pytest.mark.rounding
def test_the_merged_model_and_the_adapter_load_again_with_the_same_tokens(adapted):
    merged = ["--model", adapted / "merged"]
    adapter = ["--model", adapted / "final"]  # an adapter: its base is the model that --model named
    for flags in (merged, adapter):
        found = opened(*flags)
        assert found.config.vocab_size == PADDED
        assert ids_in("<note 1>", found.tokenizer) == [4098]
        assert not found.tokenizer.reserved.search("<call>")
    config = data.read_json(adapted / "merged/config.json")
    assert config["vocab_size"] == PADDED
    # merging adds the product of the adapters to the weights first: float32 rounds at another place
    logits = logits_of(*merged)
    expected = logits_of(*adapter)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_new_tokens_are_merged_later_to_the_same_bytes(adapted, tmp_path):
    check_merges_later(adapted, tmp_path)


def test_rows_of_tokens_in_the_data_are_learned(base, adapted):
    """The second step's weights of <call>, which is in the data, differ from those that it began with."""
    model = begun(opened("--model", base, "--add_tokens", *TOKENS))
    begin = model.get_parameter(data.EMBEDDING)[IDS.start : IDS.stop]
    merged = load_file(adapted / "merged" / "model.safetensors")
    end = merged[data.EMBEDDING][IDS.start : IDS.stop]
    change_of_each = (end - begin).abs().max(1).values
    # <call> and </call>; <note 1> is in no conversation
    assert change_of_each[:2].min() > 1e-4


def test_an_adapter_with_new_tokens_trains_further_and_merges(base, adapted, calls, tmp_path):
    """Without --add_tokens: the adapter brings the tokens."""
    out = tmp_path / "run"
    flags = ["--adapter", adapted / "final", *SHORT, "--merge"]
    trained("--model", base, "--data", calls, *flags, out=out)
    assert opened("--model", out).config.vocab_size == PADDED


@pytest.mark.rounding
def test_full_fine_tuning_over_ranks_writes_a_model_with_the_tokens(base, calls, tmp_path):
    flags = ["--model", base, "--data", calls, *SHORT, "--add_tokens", *TOKENS]
    # half the rows on each of two ranks: the same step
    over_two = [*flags, "--fsdp2", "--batch_size", 3]
    losses_of_one, _ = curve(1, flags, tmp_path / "one")
    losses_of_two, _ = curve(2, over_two, tmp_path / "two")
    # two ranks sum in another order
    assert losses_of_two == pytest.approx(losses_of_one, abs=1e-5)

    found = opened("--model", tmp_path / "one")
    embedding = found.reader.tensors[data.EMBEDDING]
    assert found.config.vocab_size == PADDED
    assert embedding.shape[0] == PADDED
    assert ids_in("<call>", found.tokenizer) == [4096]


def test_a_resumed_run_compares_the_tokens(base, adapted, calls, tmp_path):
    out = tmp_path / "run"
    checkpoint = adapted / "checkpoint-1"
    flags = ["--model", base, "--data", calls, *SHORT, *LORA, "--resume", checkpoint]
    two_of_them = ["--add_tokens", *TOKENS[:2]]
    _, text, codes = run_ranks(1, [*flags, *two_of_them], out)
    assert codes == [1]
    assert "--add_tokens was ['<call>', '</call>', '<note 1>'], is ['<call>', '</call>']" in text

    # with all three it ends as the run that was not resumed, to the byte
    trained(*flags, "--add_tokens", *TOKENS, out=out)
    resumed = out / "merged/model.safetensors"
    in_one_go = adapted / "merged/model.safetensors"
    assert resumed.read_bytes() == in_one_go.read_bytes()


def test_an_adapter_brings_its_tokenizer_also_where_no_row_was_added(base, adapted):
    """A model with spare rows has as many after --add_tokens as before."""
    files = data.find_model(str(base), False)
    adapter, _ = data.open_adapter(adapted / "final")
    # as if the base had as many rows as the adapter's embedding
    found = train.with_vocabulary(files, PADDED, None, adapter)
    assert found.tokenizer == adapted / "final"
    assert found.config == files.config


def test_the_size_is_changed_where_a_file_has_it():
    # a model with a vision tower has it in text_config
    inner = {"text_config": {"vocab_size": 5, "hidden_size": 8}}
    larger = data.with_value(inner, "vocab_size", 9)
    assert larger == {"text_config": {"vocab_size": 9, "hidden_size": 8}}
    # and some of them at the top as well
    both = inner | {"vocab_size": 5}
    assert data.with_value(both, "vocab_size", 9)["vocab_size"] == 9
    # without text_config, the top is the place to look for it
    nowhere = {"hidden_size": 8}
    assert data.with_value(nowhere, "vocab_size", 9) == {"hidden_size": 8, "vocab_size": 9}


def planned_vocabulary(*flags):
    args = train.parse_args([*flags, "--dry_run"])
    planned = train.open_config(args, 1, device=None, random_init=True)
    return planned.config.vocab_size


def test_the_plan_knows_the_larger_vocabulary(base):
    flags = ["--model", str(base)]
    assert planned_vocabulary(*flags) == N_OLD
    assert planned_vocabulary(*flags, "--add_tokens", *TOKENS) == PADDED


def test_spare_rows_are_used_before_the_embedding_grows(tmp_path):
    """Many models have rows that no token uses: an embedding that grew would cost memory for nothing."""
    n_rows = IDS.stop  # room for three more tokens, not for four
    folder = random_model(tmp_path / "spare", vocab_size=n_rows)
    flags = ["--model", folder, "--random_init", "--add_tokens"]
    three = opened(*flags, *TOKENS)
    assert three.config.vocab_size == n_rows
    assert three.tokenizer.new_ids == range(4096, 4099)
    four = opened(*flags, *TOKENS, "<more>")
    assert four.config.vocab_size == PADDED
    assert four.tokenizer.new_ids == range(4096, 4100)


# ---------------------------------------------------------------- what is given


@pytest.fixture
def token_file(tmp_path):
    return tmp_path / "tokens.txt"


def test_a_file_has_a_token_a_line(token_file):
    # an empty line is no token
    token_file.write_text("<call>\n</call>\n\n<note 1>\n")
    args = train.parse_args(["--add_tokens", str(token_file)])
    assert args.add_tokens == TOKENS


@pytest.mark.parametrize("content, message", [
    ("", "the file is empty: expected a token a line"),
    ("\n\n", "the file is empty"),
    ("<call>\n \n", "expected text without blanks around it"),
    ("<call>\n<call>\n", "<call>: given more than once"),
])
def test_a_file_that_cannot_be_right_is_refused(token_file, content, message):
    token_file.write_text(content)
    with pytest.raises(argparse.ArgumentError, match=message) as refused:
        train.parse_args(["--add_tokens", str(token_file)])
    # the line is at fault, so the message names the file that has it
    assert str(token_file) in str(refused.value)


@pytest.mark.parametrize("tokens, message", [
    ([" "], "expected a value, got an empty string"),
    (["a "], "expected text without blanks around it"),
    (["<a>", "<b>", "<a>"], "<a>: given more than once"),
    # what ends like a file is one: it would be a strange token, and is a likely misspelling
    (["toknes.txt"], "no such file"),
])
def test_a_token_that_cannot_be_right_is_refused(tokens, message):
    with pytest.raises(argparse.ArgumentError, match=message):
        train.parse_args(["--add_tokens", *tokens])


@pytest.mark.parametrize("others, message", [
    # adapters alone would leave the rows of the new tokens as they began
    (["--lora"], "needs --train_embeddings"),
    (["--qlora"], "needs --train_embeddings"),
    (["--model", "tiny", "--adapter", "folder"], "merge the adapter first"),
    (["--chat"], "--chat does not read --add_tokens"),
])
def test_what_cannot_work_is_refused(others, message):
    with pytest.raises(argparse.ArgumentError, match=message):
        train.parse_args(["--add_tokens", "<a>", *others])


def test_tokens_that_the_model_has_are_named():
    """Also an ordinary one, such as `def`: the library would let it keep its id, so it would get no row."""
    with pytest.raises(ValueError, match=r"--add_tokens: <\|im_end\|>, def: already in the model's tokenizer"):
        data.Tokenizer(TINY, new_tokens=["<call>", "<|im_end|>", "def"])
