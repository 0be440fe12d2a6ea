"""The operators of a training step in two checkouts: which ones differ. Times on a shared machine vary by more than
what a change of the code may cost, and where all operators have the same shapes, strides and types, the arithmetic
costs the same. What Python adds is in `bench_speed.py --shape launches`.

    python tests/count_operators.py OLD_CHECKOUT --lora --seq_len 4096     # any flags of train.py

trains two steps of the built-in model by each, in processes of their own, and prints how many operators the second
step has, and for each operator that they do not share how often either has it."""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve()
STEP = 2  # the first one makes what later ones find


def count(folder, out, argv):
    """Runs train.py of a checkout, and writes {operator and its tensors: number} of a step."""
    sys.path.insert(0, str(folder))
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    import train

    counts = Counter()
    n_steps = 0
    train_step = train.train_step

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            shapes = [f"{list(t.shape)} {t.stride()} {t.dtype}" for t in tensors]
            counts[f"{function} {', '.join(shapes)}"] += 1
            return function(*args, **kwargs or {})

    def counted(*args):
        nonlocal n_steps
        n_steps += 1
        if n_steps != STEP:
            return train_step(*args)
        with Count():
            return train_step(*args)

    train.train_step = counted
    code = train.launch([*argv, "--steps", str(STEP), "--out", f"{out}.run", "--save_every", "0", "--sample", ""])
    Path(out).write_text(json.dumps(counts))
    return code


def main(old, *argv):
    counts = []
    with tempfile.TemporaryDirectory() as folder:
        for name, checkout in (("old", Path(old)), ("new", HERE.parents[1])):
            out = Path(folder, name)
            subprocess.run([sys.executable, HERE, "--count", checkout.resolve(), out, *argv], check=True,
                           stdout=subprocess.DEVNULL)
            counts.append(json.loads(out.read_text()))
    old, new = counts
    different = [key for key in sorted({*old, *new}) if old.get(key, 0) != new.get(key, 0)]
    print(f"operators of a step: {sum(old.values()):,} -> {sum(new.values()):,}, kinds that differ: {len(different)}")
    for key in different:
        print(f"  {old.get(key, 0)} -> {new.get(key, 0)}  {key}")


if __name__ == "__main__":
    if sys.argv[1] == "--count":
        sys.exit(count(*sys.argv[2:4], sys.argv[4:]))
    main(*sys.argv[1:])
