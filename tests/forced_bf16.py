"""train.py as a command on a CPU that has bf16 instructions, or none, as OOMPH_BF16 says (conftest.py)."""

import runpy

import conftest  # which forces torch's answer

runpy.run_path(str(conftest.HERE.parent / "train.py"), run_name="__main__")
