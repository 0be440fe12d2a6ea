"""train.py as a command on the machine that OOMPH_BF16 and OOMPH_PERTURB ask for (another_machine.py)."""

import runpy

import conftest  # which changes torch and data.py

runpy.run_path(str(conftest.HERE.parent / "train.py"), run_name="__main__")
