"""Every script of this folder that prints a table or checks something still runs to its end, at the smallest size that
it has. What it prints counts where somebody runs it by hand.

They are marked ci, as they take minutes: README's test command leaves them out.
"""

import pytest
from conftest import HERE
from test_train import shell

pytestmark = pytest.mark.ci
TINY = HERE / "tiny"
SCRIPTS = [
    "bench_checkpoints.py kill 1",
    "bench_data.py --mb 1 --rounds 1 --cores 1",
    "bench_kernels.py nf4 loss optimizer --rounds 1 --tokens 64",
    "bench_memory.py ce --tokens 128 --words 4096",
    "bench_memory.py targets",
    f"bench_nf4.py --model {TINY} --steps 1",
    "bench_precision.py --steps 2 --svg OUT/precision.svg",
    f"bench_quality.py --model {TINY} --out OUT/quality --seeds 1 --tasks dates --methods lora",
    "bench_scale.py paper",
    "bench_speed.py --shape nano --rounds 1 --methods lora qlora --arms oomph --fp32",
    "by_card.py --copies",
    "count_launches.py llama-3.1-8b --lora",
    f"count_operators.py {HERE.parent} --lora --seq_len 128",
    "check_flags.py --minutes 0.01",
    "check_flags.py --plan --minutes 0.01",
    # these need packages that the project does not, and are skipped without them
    f"check_templates.py {HERE / 'goldens-chat'}",
    "check_peers.py tiny",
]
OPTIONAL = "bitsandbytes", "transformers", "peft"


@pytest.mark.parametrize("command", SCRIPTS, ids=lambda command: command.split(".py")[0])
def test_a_script_runs_to_its_end(command, tmp_path):
    script, *words = command.replace("OUT", str(tmp_path)).split()
    done = shell(HERE / script, *words, cwd=tmp_path)
    for package in OPTIONAL:
        if f"No module named '{package}'" in done.stderr:
            pytest.skip(f"{script} needs {package}")
    assert done.returncode == 0, done.stdout + done.stderr
