"""Writes tests/forks/olmo2/, a tiny random OLMo 2 with transformers' results, for the test in olmo2.patch.

Needs transformers (5.23 was used) and nothing of this project: PYTHONPATH=tests python tests/forks/make_olmo2.py
The files are those of make_goldens_qwen35.py; sizes, weights and documents are those of make_goldens_windows.py.
"""

import shutil
from pathlib import Path

import make_goldens_qwen35 as packed
import make_goldens_windows as windows
import torch
from transformers import Olmo2Config, Olmo2ForCausalLM

HERE = Path(__file__).parent / "olmo2"


def main():
    torch.set_num_threads(1)
    packed.compute_in_float64()
    shutil.rmtree(HERE, ignore_errors=True)
    torch.manual_seed(3)  # well-conditioned gradients: float32 gives each of them to 6e-6
    config = Olmo2Config(**windows.SHAPE, rope_parameters=windows.ROPE, pad_token_id=None, bos_token_id=None,
                         eos_token_id=None)
    model = Olmo2ForCausalLM(config).double().eval()
    tensors = windows.randomize_(model)
    tokens = torch.randint(0, config.vocab_size, (sum(windows.LENGTHS),))
    packed.write(HERE, model, tensors, tokens.split(windows.LENGTHS))


if __name__ == "__main__":
    main()
