"""--dpo: TRL's curve, what must not change it, and rows of chosen and rejected answers."""

import json
import shutil

import numpy as np
import pytest
from conftest import HERE, read_data, run_ranks, start_ranks
from test_compile import trace_only
from test_formats import jsonl

import data
import train

PAIRS = HERE / "goldens-dpo" / "pairs.jsonl"  # of make_dpo_golden.py
LORA = ["--dpo", "--lora", "--lora_rank", 8, "--lora_alpha", 16, "--precision", "fp32", "--sample", "",
        "--log_every", 1, "--data", PAIRS, "--lr", 1e-3, "--warmup", 0, "--schedule", "constant"]
ASKED = [{"role": "user", "content": "the file"}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("is read from disk", "import None"))


def in_the_order_of_the_file(argv):
    data.Loader.make_order = lambda self, epoch: np.arange(len(self.rows))
    return train.launch(argv)


def rows_in(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_the_curve_is_that_of_trl(tmp_path):
    argv = [*LORA, "--no-packing", "--batch_size", 4, "--steps", 50, "--save_every", 0, "--out", tmp_path / "out",
            "--no-activation_checkpointing"]  # a quarter less time
    log = tmp_path / "log"
    assert start_ranks(1, in_the_order_of_the_file, ([*map(str, argv)],), [log]) == [0], log.read_text()
    rows = rows_in(tmp_path / "out")
    curve = json.loads((PAIRS.parent / "curve.json").read_text())
    # TRL itself, in float64 or with other kernels, is up to half as far from its curve
    for name, atol in ("loss", 2e-5), ("reward_margin", 2e-4), ("reward_accuracy", 0), ("grad_norm", 1e-3), (
            "logp_chosen", 2e-3), ("logp_rejected", 2e-3):
        assert [row[name] for row in rows] == pytest.approx(curve[name], rel=0, abs=atol), name
    assert rows[0]["loss"] == np.float32(np.log(2)) and rows[0]["reward_margin"] == 0


@pytest.fixture(scope="module")
def small(folder):
    """Flags of a smaller model than TRL's curve has. Its random weights need a larger rate to learn in a few steps."""
    return [*LORA, "--model", folder, "--random_init", "--lr", 1e-2]


@pytest.fixture(scope="module")
def job(small):
    return [*small, "--eval_data", PAIRS, "--seq_len", 200, "--clip", 0, "--steps", 4]


@pytest.fixture(scope="module")
def undisturbed(job, tmp_path_factory):
    out = tmp_path_factory.mktemp("dpo") / "out"
    return run_ranks(1, [*job, "--batch_size", 4, "--save_every", 2], out)[0], out


def check_equal(rows, expected, tolerance):
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected):
        for name in [name for name in wanted if name in train.DPO_FIGURES or "loss" in name or "eval" in name]:
            assert row[name] == pytest.approx(wanted[name], rel=tolerance, abs=tolerance), (name, row["step"])


@pytest.mark.parametrize("world, flags", [
    (4, "--fsdp2 --replicas 2"), (2, "--fsdp2 --grad_accum 2"), (2, "--batch_size 2 --optim_in_backward"),
    (1, "--grad_accum 4 --no-activation_checkpointing --ce_chunk 64"), (1, "--batch_size 4 --tiled_mlp 40 --gpu_gib 9"),
    (1, "--batch_size 4 --offload activations --no-fused_adamw"),
])
def test_ranks_and_memory_flags_change_nothing(job, undisturbed, tmp_path, world, flags):
    rows, said, codes = run_ranks(world, [*job, *flags.split()], tmp_path / "out")
    assert not any(codes), said
    check_equal(rows, undisturbed[0], 1e-4)  # float32 sums in another order


def test_beta_is_the_scale_of_rewards(job, undisturbed, tmp_path):
    rows, said, codes = run_ranks(1, [*job, "--batch_size", 4, "--steps", 2, "--beta", 0.2], tmp_path / "out")
    assert codes == [0], said
    # The first step is the same one: its gradients are twice as large, and Adam divides by their size, but for eps.
    margin = undisturbed[0][1]["reward_margin"]
    assert abs(margin) > 0.01  # 1,000 times the rounding of sums of log probabilities near -100
    assert rows[1]["reward_margin"] == pytest.approx(2 * margin, rel=0.01)


def traced(argv):
    trace_only()
    return train.launch(argv)


def test_compiled_pairs_compute_the_same(job, undisturbed, tmp_path):
    argv = [*job, "--batch_size", 4, "--compile", "--save_every", 0, "--out", tmp_path / "out"]
    assert start_ranks(1, traced, ([*map(str, argv)],), [tmp_path / "log"]) == [0], (tmp_path / "log").read_text()
    check_equal(rows_in(tmp_path / "out"), undisturbed[0], 1e-4)


def test_pairs_in_one_row_are_as_pairs_in_rows_of_their_own(small, tmp_path):
    (packed, *_), (unpacked, *_) = (
        run_ranks(1, [*small, "--steps", 3, *flags.split()], tmp_path / flags.split()[1])
        for flags in ("--seq_len 4000", "--batch_size 24 --no-packing"))
    check_equal(packed, unpacked, 1e-4)


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(job, undisturbed, tmp_path):
    expected, out = undisturbed
    shutil.copytree(out, tmp_path / "out", ignore=shutil.ignore_patterns("final", "checkpoint-4"))
    rows, _, _ = run_ranks(1, [*job, "--batch_size", 4, "--save_every", 2, "--resume"], tmp_path / "out")
    check_equal(rows, expected, 0)
    name = "final/adapter_model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (out / name).read_bytes()


# ---------------------------------------------------------------- rows


def read_pairs(path, *rows, **options):
    return read_data(jsonl(path / "rows.jsonl", *rows), data.Tokenizer(HERE / "tiny", None, "pairs"), **options)


ASKED_TEXT = "<|im_start|>user\nthe file<|im_end|>\n<|im_start|>assistant\n"
OF_CHATS = [f"{ASKED_TEXT}⟦is read from disk<|im_end|>⟧\n", f"{ASKED_TEXT}⟦import None<|im_end|>⟧\n"]
OF_TEXTS = ["def f⟦(x): pass<|im_end|>⟧", "def f⟦[]<|im_end|>⟧"]


@pytest.mark.parametrize("row, shown", [
    ({"prompt": ASKED, "chosen": GOOD, "rejected": BAD}, OF_CHATS),
    ({"chosen": ASKED + GOOD, "rejected": ASKED + BAD}, OF_CHATS),
    ({"prompt": "def f", "chosen": "(x): pass", "rejected": "[]"}, OF_TEXTS),
    ({"chosen": "def f(x): pass", "rejected": "def f[]"}, OF_TEXTS),
], ids=["prompt", "common messages", "text", "common text"])
def test_answers_alone_are_trained_on(tiny, tmp_path, row, shown):
    documents, _ = read_pairs(tmp_path, row)
    assert [data.show(tiny, documents, i) for i in (0, 1)] == shown


def test_pairs_share_a_row_or_are_dropped_both_and_counted(tmp_path):
    rows = [{"prompt": "self " * n, "chosen": "str", "rejected": "list " * (i + 1)}
            for i, n in enumerate((40, 3, 9, 90, 20, 7))]
    documents, file = read_pairs(tmp_path, *rows, seq_len=100)
    lengths = (documents.stop - documents.start - 1).tolist()
    assert file.n_long == 1 and documents.line.tolist() == [1, 1, 2, 2, 3, 3, 5, 5, 6, 6]
    for packing in (True, False):
        loader = data.Loader(documents, 100, packing, 1, 0, 0, 1)
        for i, parts in enumerate(loader.rows):
            assert [part % 2 for part in parts] == [0, 1] * (len(parts) // 2) and (np.diff(parts)[::2] == 1).all()
            assert loader.per_row.tokens[i] == sum(lengths[part] for part in parts) <= 100
            assert loader.per_row.documents[i] == len(parts)
            batch = loader.batch([i])
            assert sum(batch.n_targets) == len(batch.keep_S) and len(batch.n_targets) == len(parts)


@pytest.mark.parametrize("row, message", [
    ({"messages": ASKED + GOOD}, "--dpo needs rows with 'chosen' and 'rejected'"),
    ({"prompt": ASKED, "chosen": GOOD, "rejected": []}, "empty, or begins the other one"),
    ({"chosen": ASKED, "rejected": ASKED + BAD}, "empty, or begins the other one"),
    ({"prompt": ASKED, "chosen": "text", "rejected": "other"}, "not valid chosen"),
])
def test_rows_that_are_no_pairs_are_refused_by_name(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        read_pairs(tmp_path, row)
