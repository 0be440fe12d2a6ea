"""From files to batches: what is read, which tokens are trained on, how rows are packed and dealt out, and that
documents in one row do not see each other."""

import itertools
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

import data
import model as lm
from conftest import documents_of, pieces, read_data

HERE = Path(__file__).parent
VOCAB = 4096  # of tests/tiny
EOT = "<|im_end|>"

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set rest, system = messages[1:], '<<SYS>>\n' + messages[0].content + "
    "'\n<</SYS>>\n\n' %}{% else %}{% set rest, system = messages, '' %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# as Qwen3's: what came before </think> is dropped from every assistant turn but the last
FORGETFUL = CHATML.replace(
    "m.content", "(m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content)"
)
GENERATION = "{% generation %}BODY{% endgeneration %}"

TURNS = [
    {"role": "system", "content": "Answer in one line."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And in French, with a snowman?"},
    {"role": "assistant", "content": "Ça fait 4 ☃ 🙂,\n    n'est-ce pas ?"},
]
ANSWERS = [m["content"] for m in TURNS if m["role"] == "assistant"]


def model_folder(tmp_path, template=None, post_processor=None, extra_tokens=()):
    """tests/tiny's tokenizer in a new folder, with another chat template (None: no template) or post-processor."""
    core = tokenizers.Tokenizer.from_file(str(HERE / "tiny" / "tokenizer.json"))
    core.add_special_tokens(list(extra_tokens))
    if post_processor is not None:
        core.post_processor = post_processor
    core.save(str(tmp_path / "tokenizer.json"))
    config = json.loads((HERE / "tiny" / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


@pytest.fixture(scope="module")
def tiny():
    return data.Tokenizer(HERE / "tiny")


@pytest.fixture
def with_template(tmp_path):
    return lambda template: data.Tokenizer(model_folder(tmp_path, template))


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tokenize(tokenizer, *rows, seq_len=1000, **options):
    """Rows of a .jsonl file -> (Documents, counts)."""
    with tempfile.TemporaryDirectory() as folder:
        return read_data(jsonl(Path(folder, "rows.jsonl"), *rows), tokenizer, seq_len, **options)


def token_ids(documents):
    return [token for ids, _ in pieces(documents) for token in ids]


def trained_texts(tokenizer, row, **options):
    """What a row trains on, as text: one string for each run of supervised tokens."""
    ((ids, supervised),) = pieces(tokenize(tokenizer, row, **options)[0])
    runs = itertools.groupby(zip(ids, supervised), lambda pair: pair[1])
    return [tokenizer.core.decode([token for token, _ in run], skip_special_tokens=False) for said, run in runs if said]


# ---------------------------------------------------------------- reading


def test_a_txt_file_is_one_document(tiny, tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo ☃\n", encoding="utf-8")
    (piece,) = pieces(read_data(tmp_path / "a.txt", tiny)[0])
    ids = [*tiny.core.encode("one\n\ntwo ☃\n").ids, tiny.eos]
    assert piece == (ids, [True] * len(ids))


@pytest.fixture(scope="module")
def questions():
    """(held-out rows, training rows, all rows) of stdlib:docs over the first 50 modules of the standard library."""
    modules = list(itertools.islice(data.stdlib_modules(), 50))
    everything = [json.dumps(row).encode() for name, text in modules for row in data.stdlib_questions(name, text)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "stdlib_modules", lambda: modules)
        splits = [[raw for _, raw in data.stdlib_rows("stdlib:docs", held_out)] for held_out in (True, False)]
    return *splits, everything


def test_held_out_stdlib_is_disjoint_from_the_training_split(questions):
    held_out, training, _ = questions
    assert held_out and not set(held_out) & set(training)


def test_held_out_and_training_stdlib_are_all_of_it(questions):
    held_out, training, everything = questions
    assert sorted(held_out + training) == sorted(everything)


def test_one_stdlib_row_in_twenty_is_held_out(questions):
    held_out, _, everything = questions
    # a hash decides, so the count is binomial: 4 standard deviations either side, and it never changes between runs
    n, p = len(everything), 1 / 20
    assert abs(len(held_out) - n * p) < 4 * (n * p * (1 - p)) ** 0.5


# ---------------------------------------------------------------- chat masks


def test_generation_tags_mark_the_answers_to_the_token(tiny):
    assert trained_texts(tiny, {"messages": TURNS}) == [answer + EOT for answer in ANSWERS]


def test_a_model_without_template_gets_chatml_and_the_same_mask(tmp_path):
    tokenizer = data.Tokenizer(model_folder(tmp_path))
    assert "ChatML" in tokenizer.template_from
    assert trained_texts(tokenizer, {"messages": TURNS}) == [answer + EOT for answer in ANSWERS]


def test_default_template_renders_what_the_tiny_models_own_does(tiny, tmp_path):
    plain = data.Tokenizer(model_folder(tmp_path))
    assert plain.render(TURNS, generation_prompt=True) == tiny.render(TURNS, generation_prompt=True)


def test_default_template_writes_the_tokenizers_bos_once(tmp_path):
    bos = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", VOCAB)])
    tokenizer = data.Tokenizer(model_folder(tmp_path, post_processor=bos, extra_tokens=["<s>"]))
    ids = token_ids(tokenize(tokenizer, {"messages": TURNS})[0])
    assert ids.count(VOCAB) == 1 and ids[0] == VOCAB


def test_chatml_without_generation_tags_marks_the_same_tokens(with_template):
    assert trained_texts(with_template(CHATML), {"messages": TURNS}) == [answer + EOT for answer in ANSWERS]


def test_llama2_like_template_marks_the_answers_to_the_token(with_template):
    # the blanks around an answer are the template's, on the answer's side of [/INST]
    assert trained_texts(with_template(LLAMA2), {"messages": TURNS}) == [f" {answer} {EOT}" for answer in ANSWERS]


def test_newline_behind_the_end_of_turn_is_not_trained_on(with_template):
    tokenizer = with_template(CHATML)
    source, _ = tokenizer.conversation(TURNS)
    assert [source.text[stop] for _, stop in source.spans] == ["\n", "\n"]


def test_answer_that_quotes_the_chat_markup_of_its_prompt_is_marked_where_it_stands(tiny):
    messages = [{"role": "user", "content": "Say: assistant"}, {"role": "assistant", "content": "Say: assistant"}]
    assert trained_texts(tiny, {"messages": messages}) == ["Say: assistant" + EOT]


def test_conversation_that_ends_with_a_question_trains_on_the_earlier_answer(with_template):
    assert trained_texts(with_template(CHATML), {"messages": TURNS[:4]}) == [ANSWERS[0] + EOT]


def test_train_on_all_ignores_the_chat_mask(tiny):
    ((ids, supervised),) = pieces(tokenize(tiny, {"messages": TURNS}, train_on="all")[0])
    assert supervised == [True] * len(ids)


THINKING = [
    {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "<think>easy</think>4"},
    {"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "<think>hm</think>6"},
]


def test_template_that_rewrites_earlier_turns_trains_on_the_last_one_only(with_template):
    assert trained_texts(with_template(FORGETFUL), {"messages": THINKING}) == ["<think>hm</think>6" + EOT]


def test_template_that_rewrites_earlier_turns_trains_on_those_it_left_alone(with_template):
    messages = [THINKING[0], {"role": "assistant", "content": "4"}, *THINKING[2:]]
    assert trained_texts(with_template(FORGETFUL), {"messages": messages}) == ["4" + EOT, "<think>hm</think>6" + EOT]


def test_rewriting_template_with_generation_tags_marks_what_is_left_of_every_turn(with_template):
    body = "{{ (m.content.split('</think>')[-1] if not loop.last else m.content) + '<|im_end|>' }}"
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        + GENERATION.replace("BODY", body) + "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    )
    assert trained_texts(with_template(template), {"messages": THINKING}) == ["4" + EOT, "<think>hm</think>6" + EOT]


def test_template_whose_turns_cannot_be_told_apart_is_refused(with_template):
    tokenizer = with_template("{{ messages | length }}" + CHATML)
    with pytest.raises(ValueError, match=r"chat_template\.jinja.*\{% generation %\}"):
        tokenizer.conversation(TURNS)


# ---------------------------------------------------------------- templates run in a sandbox


def test_raise_exception_in_a_template_names_the_template(with_template):
    tokenizer = with_template(LLAMA2)
    with pytest.raises(ValueError, match=r"chat_template\.jinja.*roles must alternate"):
        tokenizer.conversation([TURNS[1], TURNS[1]])


def test_template_given_by_flag_wins_and_is_named(tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ raise_exception('no') }}")
    tokenizer = data.Tokenizer(HERE / "tiny", tmp_path / "mine.jinja")
    with pytest.raises(ValueError, match=r"mine\.jinja.*no"):
        tokenizer.render(TURNS)


@pytest.mark.parametrize("expression", [
    "''.__class__.__mro__", "messages.__class__.__base__.__subclasses__()", "raise_exception.__globals__.os",
    "strftime_now.__self__.__class__.__mro__", "cycler.__init__.__globals__.os", "messages.append(1)",
    "messages[0].update(a=1)",
])
def test_template_that_reaches_for_internals_is_refused(with_template, expression):
    tokenizer = with_template("{{ " + expression + " }}")
    with pytest.raises(ValueError, match=r"chat_template\.jinja"):
        tokenizer.render([dict(turn) for turn in TURNS])


@pytest.mark.parametrize("expression", ["1 // 0", "[][1].x", "messages[0]['content'] + 1", "'abc'.index('z')",
                                        "range(10**9)", "'x' * 10**18", "'%d' % 'x'"])
def test_template_that_fails_is_named(with_template, expression):
    tokenizer = with_template("{{ " + expression + " }}")
    with pytest.raises(ValueError, match=r"chat_template\.jinja"):
        tokenizer.render(TURNS)


class Counted(dict):
    """A message that counts how often a template reads its content."""

    reads = 0

    def __getitem__(self, key):
        Counted.reads += key == "content"
        return super().__getitem__(key)


@pytest.mark.parametrize("wrap", ["BODY", GENERATION], ids=["plain", "generation"])
def test_endless_output_stops_at_the_limit(with_template, monkeypatch, wrap):
    monkeypatch.setattr(data, "MAX_RENDERED", 1000)
    loop = "{% for i in range(20000) %}{{ messages[0].content }}{% endfor %}"
    tokenizer = with_template(wrap.replace("BODY", loop))
    Counted.reads = 0
    with pytest.raises(ValueError, match="more than 1000 characters"):
        tokenizer.render([Counted(role="user", content="x")])
    assert Counted.reads <= 1001  # and not 20,000: what is over the limit was never held in memory


def test_templates_see_a_fixed_date(with_template):
    assert with_template("{{ strftime_now('%Y-%m-%d') }}").render(TURNS)[0] == data.TODAY.strftime("%Y-%m-%d")


def test_tojson_does_not_escape_html(with_template):
    tokenizer = with_template("{{ messages[0].content | tojson }}")
    text, _ = tokenizer.render([{"role": "user", "content": "<a href='é'> & \""}])
    assert text == '"<a href=\'é\'> & \\""'


def test_tojson_takes_the_options_that_transformers_gives_it(with_template):
    template = "{{ messages[0] | tojson(ensure_ascii=False, indent=None, separators=(',', ':'), sort_keys=True) }}"
    assert with_template(template).render([{"role": "user", "content": "é"}])[0] == '{"content":"é","role":"user"}'


def test_block_whitespace_is_trimmed_as_in_transformers(with_template):
    assert with_template("{% if true %}\na\n  {% endif %}\nb").render(TURNS)[0] == "a\nb"


def test_message_with_the_span_marker_in_it_is_refused(tiny):
    with pytest.raises(ValueError, match="mark spans"):
        tiny.render([{"role": "user", "content": data.CLOSE + data.OPEN}])


# ---------------------------------------------------------------- prompt and completion, texts


def test_completion_and_end_of_text_are_trained_on(tiny):
    assert trained_texts(tiny, {"prompt": "2 + 2 =", "completion": " 4 ☃"}) == [" 4 ☃" + EOT]


def test_completion_of_an_empty_prompt_is_trained_on(tiny):
    assert trained_texts(tiny, {"prompt": "", "completion": "4"}) == ["4" + EOT]


def test_token_across_the_end_of_the_prompt_is_trained_on(tiny):
    assert trained_texts(tiny, {"prompt": "x = retu", "completion": "rn"}) == [" return" + EOT]


def test_bos_of_the_tokenizer_is_not_part_of_a_completion(tmp_path):
    bos = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", VOCAB)])
    tokenizer = data.Tokenizer(model_folder(tmp_path, post_processor=bos, extra_tokens=["<s>"]))
    assert trained_texts(tokenizer, {"prompt": "", "completion": "4"}) == ["4" + EOT]


def test_end_of_text_is_appended_to_a_text_once(tiny):
    assert token_ids(tokenize(tiny, {"text": "one two"}, {"text": "one two" + EOT})[0]).count(tiny.eos) == 2


def test_end_of_text_that_the_tokenizer_appends_is_trained_on_and_not_doubled(tmp_path):
    eos = tokenizers.processors.TemplateProcessing(f"$A {EOT}", special_tokens=[(EOT, 1)])
    tokenizer = data.Tokenizer(model_folder(tmp_path, post_processor=eos))
    assert trained_texts(tokenizer, {"prompt": "2 + 2 =", "completion": " 4"}) == [" 4" + EOT]


def test_conversations_get_no_end_of_text_beside_the_templates_own(tiny):
    assert token_ids(tokenize(tiny, {"messages": TURNS})[0]).count(tiny.eos) == len(TURNS)


# ---------------------------------------------------------------- tokenizing


@pytest.mark.parametrize("shorter", [-900, -1, 0, 1, 2, 40, "one position"])
def test_long_text_is_split_with_every_target_once_and_in_order(tiny, shorter):
    ids = [*tiny.core.encode("one two three four " * 10).ids, tiny.eos]
    seq_len = 1 if shorter == "one position" else len(ids) - 1 - shorter  # around the number of targets, and far off
    documents, _ = tokenize(tiny, {"text": "one two three four " * 10}, seq_len=seq_len)
    split = [ids for ids, _ in pieces(documents)]
    assert max(len(piece) for piece in split) - 1 <= seq_len
    assert [token for piece in split for token in piece[1:]] == ids[1:]


def test_conversation_longer_than_a_row_is_left_out_and_counted(tiny):
    short, long = {"messages": TURNS[:3]}, {"messages": TURNS}
    documents, count = tokenize(tiny, short, long, short, seq_len=len(token_ids(tokenize(tiny, short)[0])))
    assert (len(documents.start), count["long"], count["rows"]) == (2, 1, 3)


def test_conversation_that_fills_a_row_exactly_is_kept(tiny):
    n = len(token_ids(tokenize(tiny, {"messages": TURNS})[0]))
    assert tokenize(tiny, {"messages": TURNS}, seq_len=n - 1)[1]["long"] == 0


def test_row_without_a_target_is_left_out_and_counted(tiny):
    documents, count = tokenize(tiny, {"text": ""}, {"text": "one"})
    assert (len(documents.start), count["untrained"]) == (1, 1)


def test_no_supervised_token_at_all_is_refused(tiny):
    with pytest.raises(ValueError, match=r"nothing to train on.*2 without a supervised token"):
        tokenize(tiny, {"text": ""}, {"text": ""})


def test_train_on_all_supervises_everything_but_first_tokens(tiny):
    documents, _ = tokenize(tiny, {"messages": TURNS}, {"messages": TURNS[1:3]}, train_on="all")
    loader = data.Loader(documents, 1000, True, 1, 0, 1, seed=0)
    assert loader.per_row[:, 0].sum() == len(token_ids(documents)) - 2


def test_token_id_beyond_the_embedding_is_refused(tiny):
    with pytest.raises(ValueError, match="belongs to another model"):
        tokenize(tiny, {"text": "def f(x):"}, vocab_size=256)


# ---------------------------------------------------------------- packing


def packing_cases():
    """(lengths, seq_len) of a few hundred random sets: many short documents, few long ones, and all sizes between."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        seq_len = int(rng.integers(1, 200))
        longest = int(rng.integers(1, seq_len + 1))
        yield rng.integers(1, longest + 1, size=int(rng.integers(1, 120))), seq_len


def test_packing_places_every_document_once():
    for lengths, seq_len in packing_cases():
        assert sorted(itertools.chain(*data.pack(lengths, seq_len))) == list(range(len(lengths)))


def test_no_packed_row_is_longer_than_seq_len():
    for lengths, seq_len in packing_cases():
        assert max(lengths[row].sum() for row in data.pack(lengths, seq_len)) <= seq_len


def test_a_row_is_opened_only_for_a_document_that_fits_nowhere():
    for lengths, seq_len in packing_cases():
        rows = data.pack(lengths, seq_len)
        room = [seq_len - lengths[row].sum() for row in rows]  # at the end, so it was no smaller when a row was opened
        assert all(max(room[:i]) < lengths[row[0]] for i, row in enumerate(rows) if i)


def test_packing_is_within_the_bound_of_best_fit_decreasing():
    rng = np.random.default_rng(1)
    for _ in range(100):
        n, seq_len = int(rng.integers(1, 60)), int(rng.integers(8, 500))
        cuts = [np.unique([0, seq_len, *rng.integers(1, seq_len, size=rng.integers(0, 7))]) for _ in range(n)]
        lengths = rng.permutation(np.concatenate([np.diff(cut) for cut in cuts]))  # n rows filled to the brim
        # 11/9 of the optimum and 4 more: Johnson 1974, for first fit and best fit alike
        assert len(data.pack(lengths, seq_len)) <= 11 / 9 * n + 4


# ---------------------------------------------------------------- loader


def make_documents(lengths, supervised=None):
    """Documents of the given numbers of tokens; the tokens are 0, 1, 2, ... so that each is known by its value."""
    starts = np.cumsum([0, *lengths])
    tokens = np.arange(starts[-1], dtype=np.int32)
    return documents_of(tokens, np.ones(len(tokens), bool) if supervised is None else supervised, starts)


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 30, size=101)
    return make_documents(lengths, rng.random(lengths.sum()) < 0.5)


def rows_of(batch):
    """The documents of a batch, row by row, without padding."""
    tokens, width = batch.tokens.flatten().tolist(), batch.tokens.shape[1]
    rows = [[] for _ in batch.tokens]
    for start, stop in batch.spans:
        rows[start // width] += tokens[start:stop]
    return rows


def global_batches(documents, batch_size, grad_accum, world, packing, steps=5, seed=0):
    """Rows of each step in the order of the global batch: micro-batch by micro-batch, rank by rank."""
    loaders = [data.Loader(documents, 32, packing, batch_size, rank, world, seed) for rank in range(world)]
    for step in range(steps):
        ranks = [loader.step(step, grad_accum)[0] for loader in loaders]
        yield [row for micro in zip(*ranks, strict=True) for batch in micro for row in rows_of(batch)]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("split", [(2, 3, 2), (3, 2, 2), (1, 3, 4), (1, 12, 1), (1, 1, 12), (6, 1, 2), (4, 1, 3)])
def test_global_batch_does_not_depend_on_how_it_is_split(documents, split, packing):
    expected = list(global_batches(documents, 12, 1, 1, packing))
    assert len(expected[0]) == 12
    assert list(global_batches(documents, *split, packing)) == expected  # five steps cross the end of an epoch


@pytest.mark.parametrize("packing", [True, False])
def test_every_row_comes_once_an_epoch(documents, packing):
    loader = data.Loader(documents, 32, packing, 1, 0, 1, seed=0)
    n = len(loader.rows)
    assert all(sorted(loader.row(i) for i in range(e * n, e * n + n)) == list(range(n)) for e in range(3))


def first_rows(documents, seed, epoch=0):
    loader = data.Loader(documents, 32, True, 1, 0, 1, seed)
    return [loader.row(epoch * len(loader.rows) + i) for i in range(len(loader.rows))]


def test_order_differs_between_epochs(documents):
    assert first_rows(documents, seed=0, epoch=0) != first_rows(documents, seed=0, epoch=1)


def test_order_differs_between_seeds(documents):
    assert first_rows(documents, seed=0) != first_rows(documents, seed=1)


def test_order_is_equal_for_equal_seeds(documents):
    assert first_rows(documents, seed=3, epoch=2) == first_rows(documents, seed=3, epoch=2)


def largest_row(loader):
    """The row that takes the most memory: as packed rows are equally long, the one with the most targets."""
    lengths = [sum(loader.documents.stop[d] - loader.documents.start[d] for d in row) for row in loader.rows]
    n_targets = loader.per_row[:, 0].tolist()
    keys = n_targets if loader.packing else list(zip(lengths, n_targets, strict=True))
    return {row for row, key in enumerate(keys) if key == max(keys)}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("packing", [True, False])
def test_the_largest_row_runs_first(documents, packing, seed):
    loader = data.Loader(documents, 32, packing, 1, 0, 1, seed)
    assert loader.row(0) in largest_row(loader)


@pytest.mark.parametrize("packing, expected", [(True, [10, 9]), (False, [30])])
def test_a_full_row_is_the_largest_only_where_rows_are_not_padded_alike(packing, expected):
    supervised = np.ones(31 + 11 + 10, bool)
    supervised[5:31] = False  # 30 positions with 4 targets; 10 + 9 positions, all targets
    documents = make_documents([31, 11, 10], supervised)
    for seed in range(4):
        loader = data.Loader(documents, 30, packing, 1, 0, 1, seed)
        spans = loader.step(0, 1)[0][0].spans
        assert [stop - start for start, stop in spans] == expected


@pytest.mark.parametrize("split", [(1, 1, 4), (4, 1, 1), (2, 3, 2), (1, 4, 1)])
@pytest.mark.parametrize("packing", [True, False])
def test_the_largest_row_is_in_the_first_micro_batch_of_rank_0(documents, packing, split):
    batch_size, grad_accum, world = split
    loader = data.Loader(documents, 32, packing, batch_size, 0, world, seed=5)
    first = loader.step(0, grad_accum)[0][0]
    largest = largest_row(loader)
    assert rows_of(first)[0] in [rows_of(loader.batch([row]))[0] for row in largest]
    # no micro-batch of the run has longer rows, and rows behind it are at most as long
    assert first.tokens.shape[1] == loader.longest


@pytest.mark.parametrize("packing", [True, False])
def test_the_largest_row_trades_places_and_all_others_keep_theirs(documents, packing):
    for seed in range(8):
        loader = data.Loader(documents, 32, packing, 1, 0, 1, seed)
        n = len(loader.rows)
        shuffled = np.random.default_rng([seed, 0]).permutation(n).tolist()
        order = [loader.row(i) for i in range(n)]
        moved = [i for i in range(n) if order[i] != shuffled[i]]
        assert moved in ([], [0, shuffled.index(order[0])]) and sorted(order) == list(range(n))


def test_only_the_first_epoch_starts_with_the_largest_row(documents):
    for epoch in (1, 2):
        for seed in range(8):
            order = first_rows(documents, seed, epoch)
            assert order == np.random.default_rng([seed, epoch]).permutation(len(order)).tolist()


@pytest.mark.parametrize("packing", [True, False])
def test_evaluation_keeps_the_order_of_the_data(documents, packing):
    loader = data.Loader(documents, 32, packing, 1, 0, 1, seed=3)
    seen = [rows_of(batch)[0] for batch in loader.once()]
    assert seen == [rows_of(loader.batch([row]))[0] for row in range(len(loader.rows))]


def test_without_shuffle_rows_come_in_their_order(documents):
    loader = data.Loader(documents, 32, True, 1, 0, 1, seed=0, shuffle=False)
    assert [loader.row(i) for i in range(len(loader.rows))] == list(range(len(loader.rows)))


def test_a_step_does_not_depend_on_the_steps_asked_for_before(documents):
    fresh = [data.Loader(documents, 32, True, 3, 0, 1, seed=0).step(n, 2) for n in range(30)]
    used = data.Loader(documents, 32, True, 3, 0, 1, seed=0)
    for n in np.random.default_rng(0).integers(0, 30, size=60).tolist():  # back and forth over many epochs
        batches, counted = used.step(n, 2)
        assert counted == fresh[n][1] and [rows_of(b) for b in batches] == [rows_of(b) for b in fresh[n][0]]


def three_documents(packing):
    """Documents 0-3, 4-6 and 7-8, tokens 2, 5 and 6 not supervised -> the one batch of all of them."""
    supervised = np.array([1, 1, 0, 1, 1, 0, 0, 1, 1], bool)
    documents = make_documents([4, 3, 2], supervised)
    return data.Loader(documents, 8, packing, 3, 0, 1, seed=0, shuffle=False).batch([0] if packing else [0, 1, 2])


X = data.IGNORE


def test_packed_batch_is_right_to_the_token():
    batch = three_documents(packing=True)
    assert batch.tokens.tolist() == [[0, 1, 2, 4, 5, 7, 0, 0]]
    assert batch.targets.tolist() == [[1, X, 3, X, X, 8, X, X]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert batch.spans == [(0, 3), (3, 5), (5, 6)]
    assert batch.keep_S.tolist() == [0, 2, 5]


def test_unpacked_batch_is_right_to_the_token():
    batch = three_documents(packing=False)
    assert batch.tokens.tolist() == [[0, 1, 2], [4, 5, 0], [7, 0, 0]]
    assert batch.targets.tolist() == [[1, X, 3], [X, X, X], [8, X, X]]
    assert batch.positions.tolist() == [[0, 1, 2], [0, 1, 0], [0, 0, 0]]
    assert batch.spans == [(0, 3), (3, 5), (6, 7)]
    assert batch.keep_S.tolist() == [0, 2, 6]


def test_batch_of_no_rows_has_no_target_and_no_document(documents):
    batch = data.Loader(documents, 32, False, 1, 0, 1, seed=0).batch([])
    assert (batch.tokens.shape, batch.spans, len(batch.keep_S)) == ((1, 1), [], 0)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_evaluation_covers_every_row_once_over_three_ranks(documents, batch_size):
    loaders = [data.Loader(documents, 32, True, batch_size, rank, 3, seed=0) for rank in range(3)]
    assert len(loaders[0].rows) % (3 * batch_size)  # uneven
    seen = [row for loader in loaders for batch in loader.once() for row in rows_of(batch) if row]
    assert sorted(seen) == sorted(rows_of(loaders[0].batch(range(len(loaders[0].rows)))))


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_evaluation_has_equally_many_batches_on_every_rank(documents, batch_size):
    lengths = {len(list(data.Loader(documents, 32, True, batch_size, rank, 3, seed=0).once())) for rank in range(3)}
    assert len(lengths) == 1


@pytest.mark.parametrize("packing", [True, False])
def test_counts_of_a_step_are_those_of_all_ranks_batches(documents, packing):
    loaders = [data.Loader(documents, 32, packing, 2, rank, 3, seed=0) for rank in range(3)]
    for step in range(4):
        steps = [loader.step(step, 2) for loader in loaders]
        batches = [batch for ranks_batches, _ in steps for batch in ranks_batches]
        lengths = [stop - start for batch in batches for start, stop in batch.spans]
        n_targets = sum(int((batch.targets != data.IGNORE).sum()) for batch in batches)
        expected = [n_targets, sum(lengths), sum(length**2 for length in lengths)]
        assert [counted for _, counted in steps] == [expected] * 3


# ---------------------------------------------------------------- isolation


@pytest.fixture(scope="module")
def transformer():
    """A tiny random Qwen3 in float32."""
    device = torch.device("cpu")
    config = lm.parse_config(lm.read_json(HERE / "goldens" / "qwen3-tied" / "config.json"))
    with torch.device("meta"):
        model = lm.Transformer(config)
    model.to_empty(device=device)
    model.tie_()
    lm.load_weights_(model, lm.RandomWeights(model, 0, device), None, 0, device, False)
    with torch.no_grad():  # so large that a neighbour's token would move every logit far beyond rounding
        for p in model.parameters():
            p.mul_(10 if p.dim() == 2 else 1)
    return model


LENGTHS = {"unequal": [9, 6, 12], "equal": [9, 9, 9]}  # the two branches of attend()


def packed_row(lengths, seed, change=None):
    """One row of documents with random tokens; those of document `change` drawn anew."""
    rng, other = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    drawn = [rng.integers(0, 64, size=n) for n in lengths]
    if change is not None:
        drawn[change] = (drawn[change] + other.integers(1, 64, size=lengths[change])) % 64  # every token is another
    documents = make_documents(lengths)
    documents.tokens[0][:] = np.concatenate(drawn)
    seq_len = sum(lengths) - len(lengths)
    return data.Loader(documents, seq_len, True, 1, 0, 1, seed=0).batch([0]), drawn


@torch.no_grad()
def logits_of(model, batch):
    return model(batch.tokens, None, batch.positions, batch.spans).flatten(0, 1)


@pytest.mark.parametrize("change", [0, 1, 2])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_packed_documents_do_not_attend_to_each_other(transformer, lengths, change):
    before, _ = packed_row(lengths, seed=0)
    after, _ = packed_row(lengths, seed=0, change=change)
    same = torch.tensor([torch.equal(before.tokens[0, a:b], after.tokens[0, a:b]) for a, b in before.spans])
    assert (~same).sum() == 1
    logits = logits_of(transformer, before), logits_of(transformer, after)
    # bit for bit: the same products of the same shapes, and no neighbour in them
    assert [torch.equal(*(x[a:b] for x in logits)) for a, b in before.spans] == same.tolist()


def test_rows_of_a_batch_do_not_attend_to_each_other(transformer):
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = transformer(tokens)
        tokens[0] = (tokens[0] + 1) % 64
        after = transformer(tokens)
    assert torch.equal(before[1], after[1]) and not torch.equal(before[0], after[0])


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@torch.no_grad()
def test_packed_document_has_the_loss_it_has_alone(transformer, lengths):
    batch, drawn = packed_row(lengths, seed=0)
    losses = torch.nn.functional.cross_entropy(logits_of(transformer, batch), batch.targets.flatten(), reduction="none")
    packed = sorted(float(losses[a:b].sum()) for a, b in batch.spans)
    alone = []
    for piece in drawn:
        tokens = torch.from_numpy(piece)[None]
        alone.append(float(transformer(tokens[:, :-1], tokens[:, 1:])))
    # float32: matrix products of another height are summed in another order, about 1e-6 of a loss of 50
    assert packed == pytest.approx(sorted(alone), rel=1e-5)


@torch.no_grad()
def test_packed_loss_is_the_sum_of_the_losses_alone(transformer):
    batch, drawn = packed_row(LENGTHS["unequal"], seed=0)
    packed = transformer(batch.tokens, batch.targets, batch.positions, batch.spans, batch.keep_S)
    alone = sum(transformer(t[:, :-1], t[:, 1:]) for t in (torch.from_numpy(piece)[None] for piece in drawn))
    assert float(packed) == pytest.approx(float(alone), rel=1e-5)  # float32, sums in another order


@torch.no_grad()
def test_padding_does_not_change_a_document(transformer):
    documents = make_documents([9, 4])
    loader = data.Loader(documents, 32, False, 2, 0, 1, seed=0)
    together, alone = loader.batch([0, 1]), loader.batch([1])
    start, stop = together.spans[1]
    logits = logits_of(transformer, together)[start:stop], logits_of(transformer, alone)
    # float32: products of another height are summed in another order, about 1e-6 of logits up to 4
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def test_batch_without_a_target_has_a_zero_loss_and_zero_gradients(transformer):
    batch = data.Loader(make_documents([9, 4], np.zeros(13, bool)), 8, False, 2, 0, 1, seed=0).batch([0, 1])
    loss = transformer(batch.tokens, batch.targets, batch.positions, batch.spans, batch.keep_S)
    grads = torch.autograd.grad(loss, list(transformer.parameters()))
    assert loss == 0 and all(not grad.any() for grad in grads)


def test_last_batch_of_an_evaluation_without_rows_has_a_zero_loss(transformer):
    *_, last = data.Loader(make_documents([9, 4, 5, 6]), 8, True, 2, 2, 3, seed=0).once()
    assert not last.spans
    with torch.no_grad():
        assert transformer(last.tokens, last.targets, last.positions, last.spans, last.keep_S) == 0


def test_inspected_example_shows_what_is_trained_on_in_green(tiny):
    documents, _ = tokenize(tiny, {"messages": TURNS[1:3]})
    assert f"\033[32m{ANSWERS[0]}{EOT}\033[0m" in data.show(tiny, documents, 0)


def test_shuffled_rows_of_a_text_stay_documents_of_one_text(tiny, tmp_path):
    shutil.copy(HERE / "make_tiny.py", tmp_path / "a.txt")
    documents, _ = read_data(tmp_path / "a.txt", tiny, 64)
    loader = data.Loader(documents, 64, True, 1, 0, 1, seed=0)
    batch = loader.batch(range(len(loader.rows)))
    expected = {tuple(ids[:-1]) for ids, _ in pieces(documents)}
    assert {tuple(batch.tokens.flatten()[a:b].tolist()) for a, b in batch.spans} == expected


# ---------------------------------------------------------------- ahead of the device


@pytest.mark.parametrize("packing", [True, False])
def test_a_thread_makes_the_same_steps_ahead(documents, packing):
    loader, other = (data.Loader(documents, 32, packing, 2, 0, 1, seed=3) for _ in range(2))
    n = len(loader.rows)  # several epochs
    for step, (batches, counted) in zip(range(4, 4 + n), loader.ahead(4, 4 + n, 2, pin=False), strict=True):
        expected, expected_counted = other.step(step, 2)
        assert counted == expected_counted and [b.spans for b in batches] == [b.spans for b in expected]
        for batch, expectation in zip(batches, expected, strict=True):
            assert torch.equal(batch.tokens, expectation.tokens) and torch.equal(batch.keep_S, expectation.keep_S)


def test_what_goes_wrong_in_the_thread_is_raised_at_its_step(documents):
    loader = data.Loader(documents, 32, True, 1, 0, 1, seed=3)
    step = loader.step
    loader.step = lambda n, grad_accum: step(n, grad_accum) if n < 2 else 1 // 0
    rows = loader.ahead(0, 5, 1, pin=False)
    assert next(rows) and next(rows)
    with pytest.raises(ZeroDivisionError):
        next(rows)


def test_packed_rows_carry_the_bounds_of_documents_and_padding(documents, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    batch = data.Loader(documents, 32, True, 2, 0, 1, seed=3).step(0, 1)[0][0]
    spans = list(batch.spans)
    packed = batch.pin().spans
    bounds = packed.bounds.tolist()
    assert packed.spans == spans and packed.bounds.dtype is torch.int32
    assert bounds[0] == 0 and bounds[-1] == 64 and bounds == sorted(set(bounds))
    assert {edge for span in spans for edge in span} <= set(bounds)
    assert packed.longest == max(b - a for a, b in itertools.pairwise(bounds))


def test_whole_rows_are_not_packed(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    documents = make_documents([17, 17, 17], np.ones(51, bool))
    batch = data.Loader(documents, 16, True, 3, 0, 1, seed=0).step(0, 1)[0][0].pin()
    assert batch.spans == [(0, 16), (16, 32), (32, 48)]  # one call of the dense kernel
