"""Limits that keep the four files and the README readable, and that tests/README.md tells the truth.
There is no limit on how much code there is.

They hold for this project and not for a fork, so they are marked ci: .ci/run sets OOMPH_CI, README's test command does
not, and leaves them out.
"""

import ast
import functools
import io
import re
import tokenize

import pytest
from conftest import HERE

import train

pytestmark = pytest.mark.ci
ROOT = HERE.parent
FILES = "train.py", "model.py", "data.py", "nf4.py"
WIDTH = 110  # columns
LINES = {"main": 150}  # of code, without comments, docstrings and blank lines
OTHER_LINES = 100  # of any other function
LOOP_LINES = 60
PARAMETERS = 8
README_LINES, README_WIDTH = 320, 100
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


def is_print(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def test_nothing_but_say_prints():
    """Another print() would end a run whose log is on a full disk, and send a terminal the control characters of a
    file."""
    printing = []
    for name in FILES:
        for function in functions(name):
            printing += [(name, function.name) for node in ast.walk(function) if is_print(node)]
    assert printing == [("data.py", "say")]


def test_the_readme_is_short_and_its_text_is_narrow():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= README_LINES
    # a row of a table, and a command that is copied, stay on one line
    text = [line for line in lines if not line.startswith(("|", "    "))]
    assert not [line for line in text if len(line) > README_WIDTH]


# ---------------------------------------------------------------- what a fork deletes with a feature

# {flag: the names in code that go with it, behind that of their file where others have another meaning}
FEATURES = {
    "dpo": "dpo|train.py beta|preferences|log_probabilities|has_reference|PAIR|has_pairs",
    "resident_blocks": "resident_blocks|n_resident|resident",
    "tiled_mlp": "tiled_mlp|tile_mlp_|run_in_tiles|Tiles|tiles?",
    "wandb": "wandb|WandB",
}


def names_in(node):
    """[(line, name)] of the code of a function, a class or a file, without the functions and classes inside of it."""
    found = []
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(part, ast.Name):
            found.append((part.lineno, part.id))
        elif isinstance(part, ast.Attribute):
            found.append((part.end_lineno, part.attr))
        elif isinstance(part, ast.arg | ast.keyword):
            found.append((part.lineno, str(part.arg)))  # None is **
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            # a name in quotes, or the flags in a message
            words = [part.value, *re.findall(r"--(\w+)", part.value)]
            found += [(part.lineno, word) for word in words]
        found += names_in(part)
    return found


def places_of(feature):
    """{(file, the number of a line that begins it): (its name, its lines that mention the feature)} of the functions
    and classes that do, and of files outside of these."""
    places = {}
    for file in FILES:
        for node in ast.walk(syntax_tree(file)):
            if not isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                continue
            place = getattr(node, "name", "outside of functions")
            first = getattr(node, "lineno", 1)
            lines = set()
            for line, name in [(first, place), *names_in(node)]:
                if any(re.fullmatch(FEATURES[feature], text) for text in (name, f"{file} {name}")):
                    lines.add(line)
            lines &= lines_of_code(file)  # what a docstring mentions breaks nothing
            if lines:
                places[file, first] = place, sorted(lines)
    return places


@pytest.mark.parametrize("feature", FEATURES)
def test_the_table_of_what_a_fork_deletes_is_true(feature):
    table = (HERE / "README.md").read_text().split("\n## What a fork deletes\n")[1].split("\n## ")[0]
    (row,) = re.findall(rf"^\| `--{feature}` \| (\d+) \| (\d+) \|", table, re.MULTILINE)
    places = places_of(feature)
    n_lines = sum(len(lines) for _, lines in places.values())
    assert row == (str(len(places)), str(n_lines)), places


# ---------------------------------------------------------------- tests/README.md

N_PROMISES = 12


@functools.cache
def names_of_tests(file):
    """The names of a file's tests."""
    tree = ast.parse((HERE / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def named_in(text):
    """[(file, test)] of all that is written as `test_x.py::test_y`."""
    return re.findall(r"`(test_\w+\.py)::(\w+)`", text)


def promises():
    """{number: its section of tests/README.md}."""
    table = (HERE / "README.md").read_text().split("\n## Promises\n")[1].split("\n## ")[0]
    _, *parts = re.split(r"^### (\d+)\. ", table, flags=re.MULTILINE)
    return dict(zip(map(int, parts[::2]), parts[1::2]))


def test_every_promise_names_tests_that_hold_it():
    sections = promises()
    assert list(sections) == list(range(1, N_PROMISES + 1))
    for number, section in sections.items():
        named = named_in(section)
        assert named, f"promise {number} names no test"
        gone = [f"{file}::{name}" for file, name in named if name not in names_of_tests(file)]
        assert not gone, f"promise {number}: bring these back, or name the tests that hold what they held"
        # a cell without a name would be a claim that nothing holds
        for row in re.findall(r"^\| (?!claim|---)(.*)", section, re.MULTILINE):
            assert "`" in row, f"promise {number}: {row}"


def test_every_file_of_tests_holds_a_promise():
    named = {file for section in promises().values() for file, _ in named_in(section)}
    assert named == {path.name for path in HERE.glob("test_*.py")}


def test_every_script_and_helper_is_in_a_table():
    tables = (HERE / "README.md").read_text().split("\n## Scripts\n")[1]
    first_cells = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| `")]
    listed = re.findall(r"`(.+?)`", " ".join(first_cells))
    others = {path.name for path in HERE.iterdir() if not path.name.startswith(("test_", "README", "_", "."))}
    others.discard("out")  # where somebody has started a run in this folder; git ignores it, too
    assert sorted(listed) == sorted(others)


def test_every_flag_is_given_in_a_test():
    """In a test of what it does: a refusal in test_bad_input.py does not count."""
    files = [path for path in HERE.glob("test_*.py") if path.name not in ("test_bad_input.py", "test_size.py")]
    tests = "".join(path.read_text() for path in files)
    names = list(vars(train.parse_args([])))
    never = {name for name in names if not re.search(rf"--(no-)?{name}\b", tests)}
    assert never == {"tensorboard"}  # its package is in no environment of tests; test_train.py gives the log a stub
