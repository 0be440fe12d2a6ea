"""--dpo: the curve of TRL's own trainer, what must not change a curve, and how rows of chosen and rejected answers are
read and packed."""

import json
import shutil

import numpy as np
import pytest
from conftest import HERE, in_ci, random_model, read_data, run_ranks, start_ranks
from test_compile import trace_only
from test_formats import END, START, jsonl, message, turn

import data
import train

GOLDEN = HERE / "goldens-dpo"  # of make_dpo_golden.py
PAIRS = GOLDEN / "pairs.jsonl"
# the settings of the golden
FLAGS = [
    "--dpo", "--data", PAIRS,
    "--lora", "--lora_rank", 8, "--lora_alpha", 16,
    "--lr", 1e-3, "--warmup", 0, "--schedule", "constant",
    "--precision", "fp32",
    "--log_every", 1,
    "--sample", "",  # nothing is generated after the run
]


# ---------------------------------------------------------------- TRL's numbers


def in_the_order_of_the_file(argv):
    """train.py without shuffling: TRL has trained on the pairs in this order."""
    data.Loader.make_order = lambda self, epoch: np.arange(len(self.rows))
    return train.launch(argv)


def run_alone(function, argv, out):
    """Runs function(argv) in a rank of its own, because it changes train.py or data.py -> rows of metrics.jsonl."""
    log = out.parent / f"{out.name}.log"
    argv = [*argv, "--out", out, "--save_every", 0]
    words = [str(word) for word in argv]
    codes = start_ranks(1, function, (words,), [log])
    assert codes == [0], log.read_text()
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# TRL itself, in float64 or with other kernels, is up to half as far from its curve
TOLERANCES = {
    "loss": 2e-5,
    "reward_margin": 2e-4,
    "reward_accuracy": 0,
    "grad_norm": 1e-3,
    "logp_chosen": 2e-3,  # a sum over the tokens of an answer, about -100
    "logp_rejected": 2e-3,
}


@pytest.mark.rounding
def test_the_curve_is_that_of_trl(tmp_path):
    batches = ["--no-packing", "--batch_size", 4, "--steps", 50]
    faster = ["--no-activation_checkpointing"]  # a quarter less time
    rows = run_alone(in_the_order_of_the_file, [*FLAGS, *batches, *faster], tmp_path / "out")
    curve = json.loads((GOLDEN / "curve.json").read_text())
    for name, tolerance in TOLERANCES.items():
        got = [row[name] for row in rows]
        assert got == pytest.approx(curve[name], rel=0, abs=tolerance), name

    # before the first update the model is its own reference, to the last bit
    assert rows[0]["loss"] == np.float32(np.log(2))
    assert rows[0]["reward_margin"] == 0


# ---------------------------------------------------------------- what must not change a curve


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Flags of a smaller model than TRL's curve has. Its random weights need a larger rate to learn in a few steps."""
    return [*FLAGS, "--model", random_model(tmp_path_factory.mktemp("model")), "--random_init", "--lr", 1e-2]


@pytest.fixture(scope="module")
def job(small, tmp_path_factory):
    """Flags of a run of four steps. Its figures are those of `undisturbed` however the 4 rows of a step are split."""
    few_pairs = tmp_path_factory.mktemp("few") / "pairs.jsonl"
    # six rows, of which each of four ranks has one or two
    few_pairs.write_text("".join(PAIRS.read_text().splitlines(keepends=True)[:12]))
    # without clipping, the rounding of one gradient changes no other one
    return [*small, "--eval_data", few_pairs, "--seq_len", 200, "--clip", 0, "--steps", 4]


@pytest.fixture(scope="module")
def undisturbed_out(tmp_path_factory):
    return tmp_path_factory.mktemp("dpo") / "out"


@pytest.fixture(scope="module")
def undisturbed(job, undisturbed_out):
    """Rows of metrics.jsonl of the job on one rank, which saves in the middle."""
    rows, said, codes = run_ranks(1, [*job, "--batch_size", 4, "--save_every", 2], undisturbed_out)
    assert codes == [0], said
    return rows


def is_compared(name):
    """Whether it is a figure of what is learned. Times and memory differ from run to run."""
    return name in TOLERANCES or "loss" in name or "eval" in name


def check_rows(rows, expected, tolerance):
    assert len(rows) == len(expected)
    for row, expected_row in zip(rows, expected):
        names = [name for name in expected_row if is_compared(name)]
        assert names, row
        for name in names:
            wanted = pytest.approx(expected_row[name], rel=tolerance, abs=tolerance)
            assert row[name] == wanted, (name, row["step"])


ANOTHER_ORDER = 1e-4  # of float32 sums: how far figures may be apart


@pytest.mark.rounding
@pytest.mark.parametrize("world, flags", [
    # each with 4 rows a step: --batch_size 1 is the default
    (4, "--fsdp2 --replicas 2"),
    (2, "--batch_size 2 --optim_in_backward"),
    # chunks of the loss and tiles of an MLP that end inside an answer
    (1, "--grad_accum 4 --no-activation_checkpointing --ce_chunk 64"),
    (1, "--batch_size 4 --tiled_mlp 40 --gpu_gib 9"),  # --gpu_gib: the plan chooses what is recomputed
    *in_ci(
        (2, "--fsdp2 --grad_accum 2"),
        (1, "--batch_size 4 --offload activations --no-fused_adamw --no-chunked_ce"),
    ),
])
def test_ranks_and_memory_flags_change_nothing(job, undisturbed, tmp_path, world, flags):
    rows, said, codes = run_ranks(world, [*job, *flags.split()], tmp_path / "out")
    assert codes == [0] * world, said
    check_rows(rows, undisturbed, ANOTHER_ORDER)


@pytest.mark.rounding
def test_beta_is_the_scale_of_rewards(job, undisturbed, tmp_path):
    rows, said, codes = run_ranks(1, [*job, "--batch_size", 4, "--steps", 2, "--beta", 0.2], tmp_path / "out")
    assert codes == [0], said
    # The first step is the same one: its gradients are twice as large, and Adam divides by their size, but for eps.
    margin = undisturbed[1]["reward_margin"]
    assert abs(margin) > 0.01  # 1,000 times the rounding of sums of log probabilities near -100
    assert rows[1]["reward_margin"] == pytest.approx(2 * margin, rel=0.01)


def traced(argv):
    """train.py with a --compile that traces, which takes a second, and generates no code."""
    trace_only()
    return train.launch(argv)


@pytest.mark.rounding
def test_compiled_pairs_compute_the_same(job, undisturbed, tmp_path):
    rows = run_alone(traced, [*job, "--batch_size", 4, "--compile"], tmp_path / "out")
    check_rows(rows, undisturbed, ANOTHER_ORDER)


@pytest.mark.rounding
def test_pairs_in_one_row_are_as_pairs_in_rows_of_their_own(small, tmp_path):
    job = [*small, "--steps", 3]
    packed, said, codes = run_ranks(1, [*job, "--seq_len", 4000], tmp_path / "packed")
    assert codes == [0], said

    n_pairs = len(PAIRS.read_text().splitlines())  # a step trains on all of them, as the one row does
    a_row_each = ["--no-packing", "--batch_size", n_pairs]
    unpacked, said, codes = run_ranks(1, [*job, *a_row_each], tmp_path / "unpacked")
    assert codes == [0], said
    check_rows(packed, unpacked, ANOTHER_ORDER)


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(job, undisturbed, undisturbed_out, tmp_path):
    out = tmp_path / "out"
    after_step_2 = shutil.ignore_patterns("final", "checkpoint-4")
    shutil.copytree(undisturbed_out, out, ignore=after_step_2)  # as if the run had been killed
    rows, said, codes = run_ranks(1, [*job, "--batch_size", 4, "--save_every", 2, "--resume"], out)
    assert codes == [0], said
    check_rows(rows, undisturbed, tolerance=0)
    adapter = "final/adapter_model.safetensors"
    assert (out / adapter).read_bytes() == (undisturbed_out / adapter).read_bytes()


# ---------------------------------------------------------------- rows of pairs


@pytest.fixture(scope="module")
def pairs():
    """The tokenizer of a run with --dpo."""
    return data.Tokenizer(HERE / "tiny", train_on="pairs")


QUESTION = [message("user", "the file")]
GOOD = [message("assistant", "is read from disk")]
BAD = [message("assistant", "import None")]

# What is shown for these answers. The question comes before both of them, and is trained on in neither.
ASKED = turn("user", "the file") + f"{START}assistant\n"
CHATS = [f"{ASKED}⟦is read from disk{END}⟧\n", f"{ASKED}⟦import None{END}⟧\n"]
TEXTS = [f"def f⟦(x): pass{END}⟧", f"def f⟦[]{END}⟧"]


@pytest.mark.parametrize("row, shown", [
    ({"prompt": QUESTION, "chosen": GOOD, "rejected": BAD}, CHATS),
    # without a prompt it is what both begin with: messages, or characters
    ({"chosen": QUESTION + GOOD, "rejected": QUESTION + BAD}, CHATS),
    ({"prompt": QUESTION, "chosen": GOOD, "rejected": BAD, "system": "s"},
     [turn("system", "s") + chat for chat in CHATS]),
    ({"prompt": "def f", "chosen": "(x): pass", "rejected": "[]"}, TEXTS),
    ({"chosen": "def f(x): pass", "rejected": "def f[]"}, TEXTS),
    # UltraFeedback's: beside whole conversations a text names what both of them begin with
    ({"prompt": "the file", "chosen": QUESTION + GOOD, "rejected": QUESTION + BAD}, CHATS),
    ({"question": "unread", "chosen": QUESTION + GOOD, "rejected": QUESTION + BAD}, CHATS),
    # Orca's and Alpaca's: a question is what the user asks, and so is a text beside a system message
    ({"question": "the file", "chosen": "is read from disk", "rejected": "import None"}, CHATS),
    ({"instruction": "the", "input": "file", "chosen": "is read from disk", "rejected": "import None"},
     [chat.replace("the file", "the\nfile") for chat in CHATS]),
    ({"system": "s", "question": "the file", "chosen": "is read from disk", "rejected": "import None"},
     [turn("system", "s") + chat for chat in CHATS]),
    ({"system": "s", "prompt": "the file", "chosen": "is read from disk", "rejected": "import None"},
     [turn("system", "s") + chat for chat in CHATS]),
    # the prompt and the answers may be texts or messages, in any mixture
    ({"prompt": "the file", "chosen": GOOD, "rejected": BAD}, CHATS),
    ({"question": "the file", "chosen": GOOD, "rejected": BAD}, CHATS),
    ({"question": QUESTION, "chosen": "is read from disk", "rejected": "import None"}, CHATS),
    ({"prompt": QUESTION, "chosen": "is read from disk", "rejected": "import None"}, CHATS),
    ({"prompt": "the file", "chosen": "is read from disk", "rejected": BAD}, CHATS),
    ({"prompt": json.dumps(QUESTION), "chosen": json.dumps(GOOD), "rejected": json.dumps(BAD)}, CHATS),
    ({"prompt": "the file", "chosen": GOOD, "rejected": BAD, "system": "s"},
     [turn("system", "s") + chat for chat in CHATS]),
    # what came before the question is context in both documents
    ({"prompt": "the file", "history": [["a", "b"]], "chosen": "is read from disk", "rejected": "import None"},
     [turn("user", "a") + turn("assistant", "b") + chat for chat in CHATS]),
    ({"instruction": "the file", "history": [["a", "b"]], "chosen": GOOD, "rejected": BAD},
     [turn("user", "a") + turn("assistant", "b") + chat for chat in CHATS]),
    # OpenAI's
    ({"input": {"messages": QUESTION, "tools": [], "parallel_tool_calls": True},
      "preferred_output": GOOD, "non_preferred_output": BAD}, CHATS),
    # also where both answers begin with the same letters
    ({"question": "the file", "chosen": "import a", "rejected": "import None"},
     [CHATS[1].replace("None", "a"), CHATS[1]]),
], ids=["prompt", "common messages", "system", "text", "common text", "UltraFeedback", "UltraFeedback question",
        "question", "instruction and input", "Orca", "Orca renamed", "text and messages", "question and messages",
        "messages by another name", "messages and texts", "text, text, messages", "messages in csv",
        "system, text and messages", "history, texts", "history", "OpenAI", "the same letters"])
def test_answers_alone_are_trained_on(pairs, tmp_path, row, shown):
    path = jsonl(tmp_path / "rows.jsonl", row)
    documents, _ = read_data(path, pairs)
    chosen = data.show(pairs, documents, 0)
    rejected = data.show(pairs, documents, 1)
    assert [chosen, rejected] == shown


@pytest.fixture(scope="module")
def six_pairs(pairs, tmp_path_factory):
    """(Documents, data.DataFile) of six pairs for rows of 100 tokens. The fourth one is too long for a row, and only
    because its two answers have to share it."""
    n_words_of_prompts = [40, 3, 9, 90, 20, 7]
    rows = []
    for number, n_words in enumerate(n_words_of_prompts, 1):
        rows.append({
            "prompt": "self " * n_words,
            "chosen": "str",
            "rejected": "list " * number,  # so that no two pairs are equally long
        })
    path = jsonl(tmp_path_factory.mktemp("pairs") / "rows.jsonl", *rows)
    return read_data(path, pairs, seq_len=100)


def test_a_pair_that_is_too_long_is_dropped_with_both_answers_and_counted(six_pairs):
    documents, file = six_pairs
    assert file.n_long == 1
    assert documents.parts["line"].tolist() == [1, 1, 2, 2, 3, 3, 5, 5, 6, 6]


@pytest.mark.parametrize("packing", [True, False])
def test_the_answers_of_a_pair_share_a_row(six_pairs, packing):
    documents, _ = six_pairs
    n_positions = documents.parts["stop"] - documents.parts["start"] - 1
    loader = data.Loader(documents, 100, packing, batch_size=1, seed=0, rank=0, world=1)
    for number, row in enumerate(loader.rows):  # a row is a list of documents by number
        chosen = row[0::2]
        rejected = row[1::2]
        assert [answer % 2 for answer in chosen] == [0] * len(chosen)
        assert list(rejected) == [answer + 1 for answer in chosen]  # the next document is of the same line

        assert loader.per_row.tokens[number] == n_positions[row].sum()
        assert loader.per_row.tokens[number] <= 100
        assert loader.per_row.terms[number] == len(row) // 2
        batch = loader.batch([number])
        assert len(batch.n_targets) == len(row)  # by which the loss finds the tokens of each answer
        assert sum(batch.n_targets) == len(batch.supervised_S)


@pytest.mark.parametrize("row, message", [
    ({"messages": QUESTION + GOOD}, "--dpo needs rows with 'chosen' and 'rejected'"),
    # without their questions answers would be trained on for themselves
    ({"question": "q", "instruction": "r", "chosen": "a", "rejected": "b"},
     "no prompt, but instruction, question: --columns question=prompt has to say which is the question"),
    ({"question": "q", "response_j": "a", "response_k": "b"},
     "got the keys question, response_j, response_k: --columns response_j=chosen response_k=rejected"),
    ({"prompt": "another", "chosen": QUESTION + GOOD, "rejected": QUESTION + BAD},
     "the answers begin with 1 equal messages, and 'prompt' = \"another\" is in none of them"),
    ({"chosen": [message("system", "s"), *QUESTION, *GOOD], "rejected": [message("system", "s"), *BAD]},
     "the answers begin with 1 equal messages, and the user's question is in none of them"),
    ({"chosen": GOOD, "rejected": BAD, "score": 4}, "no prompt: expected 'prompt', or answers that both begin with"),
    ({"system": "s", "chosen": "It is 4.", "rejected": "It is 5."}, "no prompt: expected 'prompt', or answers"),
    # LLaMA-Factory's
    ({"conversations": QUESTION, "chosen": GOOD[0], "rejected": BAD[0]},
     "no prompt, but conversations: --columns conversations=prompt has to say which is the question"),
    # a chat is the question, rather than a text whose name is one of a question
    ({"task": "code", "trajectory": QUESTION, "chosen": GOOD, "rejected": BAD},
     "no prompt, but task, trajectory: --columns trajectory=prompt has to say which is the question"),
    ({"conversation_a": QUESTION + GOOD, "conversation_b": QUESTION + BAD}, "--columns COLUMN=KEY renames them"),
])
def test_rows_that_are_no_pairs_are_refused_by_name(pairs, tmp_path, row, message):
    path = jsonl(tmp_path / "rows.jsonl", row)
    with pytest.raises(ValueError, match=message):
        read_data(path, pairs)


ANSWERS = [
    {"chosen": "is read from disk", "rejected": "import None"}, {"chosen": GOOD, "rejected": BAD},
    {"chosen": GOOD, "rejected": "import None"},
]


@pytest.mark.parametrize("answers", ANSWERS, ids=["texts", "messages", "both"])
@pytest.mark.parametrize("name", ["messages", "conversations", "context", "history"])
@pytest.mark.parametrize("question", [
    "the file", QUESTION, [{"from": "human", "value": "the file"}], json.dumps(QUESTION)],
    ids=["text", "messages", "ShareGPT", "csv"])
def test_a_question_by_a_name_that_nobody_reads_is_named_and_its_column_can_be_given(
        pairs, tmp_path, name, question, answers):
    row = {"id": 7, "source": "web", name: question, **answers}
    words = f"no prompt, but .*{name}.*: --columns .*=(prompt|instruction) has to say which is the question"
    with pytest.raises(ValueError, match=words):
        data.parse_example(row, pairs)
    report = data.FileReport()
    chosen, rejected = data.parse_example(row, pairs, [(name, "prompt")], report)
    if question == "the file" and answers == ANSWERS[0]:  # texts are trained on as they stand
        assert (chosen.text, rejected.text) == ("the fileis read from disk", "the fileimport None")
    else:
        assert [chosen.text, rejected.text] == [one.replace("⟦", "").replace("⟧", "") for one in CHATS]
    assert sorted(report.unread) == ["id", "source"]


@pytest.mark.parametrize("name", data.QUESTION_KEYS)
def test_the_question_of_a_pair_stands_in_its_prompt_once(pairs, name):
    row = {name: "the file", "chosen": "is read from disk", "rejected": BAD}
    chosen, rejected = data.parse_example(json.dumps(row), pairs)
    assert [chosen.text, rejected.text] == [one.replace("⟦", "").replace("⟧", "") for one in CHATS]


def test_texts_that_begin_alike_may_have_numbers_beside_them_and_no_other_text(pairs):
    row = {"chosen": "def f(x): pass", "rejected": "def f[]", "id": 7, "scores": [4, 5]}
    chosen, _ = data.parse_example(row, pairs)
    assert chosen.spans == [(5, 14)]
    for name, value in {"source": "web", "tags": ["a", "b"]}.items():
        with pytest.raises(ValueError, match=f"no prompt, but {name}: --columns {name}=instruction has to say"):
            data.parse_example(row | {name: value}, pairs)


@pytest.mark.parametrize("row, n_equal, n_empty", [
    # equal, with a prompt or without one
    ({"prompt": QUESTION, "chosen": GOOD, "rejected": GOOD}, 1, 0),
    ({"chosen": QUESTION + GOOD, "rejected": QUESTION + GOOD}, 1, 0),
    ({"prompt": "a", "chosen": " b", "rejected": " b"}, 1, 0),
    ({"chosen": "a b", "rejected": "a b"}, 1, 0),
    # in tokens: the template writes nothing of an id
    ({"prompt": QUESTION, "chosen": [GOOD[0] | {"id": 1}], "rejected": [GOOD[0] | {"id": 2}]}, 1, 0),
    # without an answer, in each way
    ({"prompt": QUESTION, "chosen": GOOD, "rejected": []}, 0, 1),
    ({"prompt": QUESTION, "chosen": GOOD, "rejected": [message("assistant", " ")]}, 0, 1),
    ({"chosen": QUESTION, "rejected": QUESTION + BAD}, 0, 1),
    ({"prompt": "a", "chosen": "", "rejected": " b"}, 0, 1),
    ({"chosen": "a", "rejected": "a b"}, 0, 1),
])
def test_pairs_with_equal_answers_or_an_empty_one_are_dropped_and_counted(
        pairs, tmp_path, capsys, row, n_equal, n_empty):
    good = {"prompt": QUESTION, "chosen": GOOD, "rejected": BAD}
    documents, file = read_data(jsonl(tmp_path / "rows.jsonl", good, row, good), pairs)
    assert documents.parts["line"].tolist() == [1, 1, 3, 3]
    assert file.report.n_bad == 0
    data.print_file(file)
    note = "1 pairs have equal answers: dropped" if n_equal else "1 have answers of nothing but their ends: dropped"
    assert note in capsys.readouterr().out


@pytest.mark.parametrize("prompt, chosen, rejected", [
    (QUESTION, GOOD[0], BAD[0]), (QUESTION, json.dumps(GOOD[0]), json.dumps(BAD)),
    (QUESTION, QUESTION + GOOD, QUESTION + BAD), (QUESTION[0], GOOD, BAD[0]["content"]),
])
def test_answers_may_be_one_message_json_or_the_whole_conversation(pairs, prompt, chosen, rejected):
    report = data.FileReport()
    read = data.parse_example(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}), pairs, (), report)
    assert [one.text for one in read] == [one.replace("⟦", "").replace("⟧", "") for one in CHATS]
    assert not report.unread


@pytest.mark.parametrize("scores, is_said", [
    ({"score_chosen": 3.0, "score_rejected": 8}, True), ({"chosen-rating": 5, "rejected-rating": 2}, False),
    ({"chosen_rank": 1, "rejected_rank": 2}, False)])
def test_scores_that_contradict_a_pair_are_counted(pairs, scores, is_said):
    report = data.FileReport()
    data.parse_example({"prompt": "q", "chosen": "a", "rejected": "b", **scores}, pairs, (), report)
    assert any("a lower score for the chosen answer" in text for text in report.notes) == is_said


def test_a_null_answer_is_named(pairs):
    with pytest.raises(ValueError, match="--dpo needs rows with 'chosen' and 'rejected'; rejected: null"):
        data.parse_example({"prompt": "q", "chosen": "a", "rejected": None}, pairs)


def test_answers_may_repeat_the_end_of_the_prompt_and_one_may_go_on_where_the_other_ends(pairs):
    system = [message("system", "s")]
    row = {"prompt": system + QUESTION, "chosen": QUESTION + GOOD, "rejected": QUESTION + BAD}
    once = {"prompt": system + QUESTION, "chosen": GOOD, "rejected": BAD}
    for key in ("chosen", "rejected"):
        assert data.parse_example(row, pairs) == data.parse_example(once | {key: row[key]}, pairs)
    longer = GOOD + QUESTION + BAD
    chosen, rejected = data.parse_example({"prompt": QUESTION, "chosen": GOOD, "rejected": longer}, pairs)
    assert [len(chosen.spans), len(rejected.spans)] == [1, 2]
