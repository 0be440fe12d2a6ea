"""Size is a promise (DESIGN section 1), counted in tokens of code: line breaks, names and comments cost nothing.

These limits are raised by a decision, and not by drift. They hold for this project and not for a fork: .ci/run sets
OOMPH_SIZES, README's test command does not.
"""

import ast
import io
import os
import tokenize

import pytest
from conftest import HERE

ROOT = HERE.parent
FILES = "train.py", "model.py", "data.py", "nf4.py"
TOKENS, TEST_TOKENS, BENCH_TOKENS, README_LINES = 43_000, 52_000, 15_000, 240  # at most, as all that follows
LONGER, FUNCTION, LOOP, PARAMETERS, WIDTH = {"main": 150}, 60, 60, 8, 110
NO_CODE = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER}
pytestmark = pytest.mark.skipif("OOMPH_SIZES" not in os.environ, reason="sizes are held by .ci/run (OOMPH_SIZES=1)")


def docstring_lines(tree):
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def code_tokens(path):
    """[(line, text)] of a file's tokens, without comments and docstrings."""
    text = path.read_text()
    docstrings = docstring_lines(ast.parse(text))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [(token.start[0], token.string) for token in tokens
            if token.type not in NO_CODE and token.start[0] not in docstrings]


def n_tokens(paths):
    return sum(len(code_tokens(path)) for path in paths)


def functions(name):
    tree = ast.parse((ROOT / name).read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def code_lines(name, node):
    """Lines of code of a node of a file, without comments, docstrings and blank lines."""
    return len({line for line, _ in code_tokens(ROOT / name) if node.lineno <= line <= node.end_lineno})


def test_code_tests_and_benchmarks_are_no_larger_than_the_design_allows():
    assert n_tokens(ROOT / name for name in FILES) <= TOKENS
    assert n_tokens([*HERE.glob("test_*.py"), HERE / "conftest.py"]) <= TEST_TOKENS
    assert n_tokens(HERE.glob("bench_*.py")) <= BENCH_TOKENS
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("name", FILES)
def test_no_line_is_too_wide(name):
    wide = [number for number, line in enumerate((ROOT / name).read_text().splitlines(), 1) if len(line) > WIDTH]
    assert not wide


@pytest.mark.parametrize("name", FILES)
def test_functions_are_short_and_take_few_parameters(name):
    for node in functions(name):
        n, limit = code_lines(name, node), LONGER.get(node.name, FUNCTION)
        assert n <= limit, f"{node.name}: {n} lines of code"
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        assert len(names) - (names[:1] == ["self"]) <= PARAMETERS, f"{node.name}: {names}"


def test_the_training_loop_is_one_screen():
    (main,) = (node for node in functions("train.py") if node.name == "main")
    loops = [node for node in ast.walk(main) if isinstance(node, ast.For)]
    assert max(code_lines("train.py", loop) for loop in loops) <= LOOP
