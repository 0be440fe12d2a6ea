"""The patches in tests/forks/, each a small fork of this project: they apply to the code as it is, and the test that
each brings along passes.

    git apply tests/forks/z_loss.patch && python -m pytest -q tests/test_fork_z_loss.py

When the code has moved and a patch no longer applies, commit the code, then

    tests/forks/refresh.sh z_loss.patch

merges the patch (git apply --3way) and writes it anew; without a name it does so for all. Where both have changed the
same lines, it says which worktree to resolve them in, and how to go on.

As with test_size.py, a fork need not care: these tests are marked ci.
"""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import HERE

ROOT = HERE.parent
PATCHES = sorted((HERE / "forks").glob("*.patch"))
pytestmark = pytest.mark.ci


def run(command, folder):
    """-> (whether it succeeded, what it printed)."""
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}  # git apply: the copy is no repository
    done = subprocess.run(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    return done.returncode == 0, done.stdout


def copy_of_the_project(folder):
    """Copies what git knows, as it is in the working tree."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, path)
    return folder


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_fork_applies_and_its_test_passes(patch, tmp_path):
    folder = copy_of_the_project(tmp_path / "fork")
    applies, said = run(["git", "apply", str(patch)], folder)
    assert applies, f"tests/forks/refresh.sh {patch.name} may mend this:\n{said}"
    # a fork in this project also keeps the limits of its code; only tests/README.md knows neither its own test nor its
    # lines
    tests = [f"tests/test_fork_{patch.stem}.py", "tests/test_size.py"]
    no_row = "tests/test_size.py::test_every_file_of_tests_holds_a_promise"
    other_lines = "tests/test_size.py::test_the_table_of_what_a_fork_deletes_is_true"
    options = ["-q", "-p", "no:cacheprovider", "--deselect", no_row, "--deselect", other_lines]
    passes, said = run([sys.executable, "-m", "pytest", *options, *tests], folder)
    assert passes, said


def test_there_are_forks():
    """A glob that finds nothing would pass without a word."""
    assert len(PATCHES) >= 4
