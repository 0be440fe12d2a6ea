"""A GPU does not wait for Python: what the host launches for a block, as deterministic as bytes."""

import re

import pytest
from conftest import HERE
from count_launches import ROWS, launches_a_block
from test_train import shell

MOST = {
    "llama-3.1-8b --lora": 251,
    "llama-3.1-8b --qlora": 440,
    # 4,437 with three kernels a chunk in segments of 1,024. Now 144 are those of the scan: three of four blocks have 64
    # chunks, and three passes over them.
    "qwen3.5-9b --lora": 575,
    "qwen3-30b-a3b --qlora": 490,
}
MOST_COMPILED = {"qwen3.5-9b --lora --compile": 355}


def check(launches, most, slack):
    # further below it, what has been gained could be lost again unseen
    assert (1 - slack) * most <= launches <= most


@pytest.mark.parametrize("row", MOST)
def test_a_block_launches_no_more_operators(row):
    preset, *flags = row.split()
    counts = launches_a_block(preset, flags, ROWS[row])
    check(counts.total() / 4, MOST[row], slack=0.05)


@pytest.mark.ci  # half a minute of compiling
@pytest.mark.parametrize("row", MOST_COMPILED)
def test_a_compiled_block_launches_no_more_operators(row, tmp_path):
    done = shell(HERE / "count_launches.py", *row.split(), cwd=tmp_path)  # its settings of the compiler go with it
    launches = re.search(r"(\d+) operations a block", done.stdout)
    assert launches, done.stdout + done.stderr
    check(int(launches[1]), MOST_COMPILED[row], slack=0.1)  # torch 2.11 fuses more
