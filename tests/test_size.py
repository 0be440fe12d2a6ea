"""Limits that keep the four files and the README readable (DESIGN section 1). There is none on how much code there is.

They hold for this project and not for a fork: .ci/run sets OOMPH_SIZES, README's test command does not, and then
conftest.py leaves this file out.
"""

import ast
import functools
import io
import tokenize

import pytest
from conftest import HERE

ROOT = HERE.parent
FILES = "train.py", "model.py", "data.py", "nf4.py"
WIDTH = 110  # columns
LINES = {"main": 150, "parse_args": 190}  # of code, without comments, docstrings and blank lines
OTHER_LINES = 60  # of any other function
LOOP_LINES = 60
PARAMETERS = 8
README_LINES, README_WIDTH = 260, 100
NO_CODE = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER}


@functools.cache
def syntax_tree(name):
    return ast.parse((ROOT / name).read_text())


@functools.cache
def lines_of_code(name):
    """The numbers of a file's lines that hold code."""
    docstrings = set()
    for node in ast.walk(syntax_tree(name)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO((ROOT / name).read_text()).readline)
    return {token.start[0] for token in tokens if token.type not in NO_CODE} - docstrings


def functions(name):
    return [node for node in ast.walk(syntax_tree(name)) if isinstance(node, ast.FunctionDef)]


def n_lines(name, node):
    return len([line for line in lines_of_code(name) if node.lineno <= line <= node.end_lineno])


@pytest.mark.parametrize("name", FILES)
def test_no_line_is_too_wide(name):
    wide = [number for number, line in enumerate((ROOT / name).read_text().splitlines(), 1) if len(line) > WIDTH]
    assert not wide


@pytest.mark.parametrize("name", FILES)
def test_functions_are_short_and_take_few_parameters(name):
    for node in functions(name):
        n = n_lines(name, node)
        assert n <= LINES.get(node.name, OTHER_LINES), f"{node.name}: {n} lines of code"
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        assert len(names) - (names[:1] == ["self"]) <= PARAMETERS, f"{node.name}: {names}"


def test_the_training_loop_is_one_screen():
    (main,) = (node for node in functions("train.py") if node.name == "main")
    loops = [node for node in ast.walk(main) if isinstance(node, ast.For)]
    assert max(n_lines("train.py", loop) for loop in loops) <= LOOP_LINES


def test_the_readme_is_short_and_its_text_is_narrow():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= README_LINES
    # a row of a table, and a command that is copied, stay on one line
    text = [line for line in lines if not line.startswith(("|", "    "))]
    assert not [line for line in text if len(line) > README_WIDTH]
