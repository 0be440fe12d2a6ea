"""Shows that llama.cpp reads what a run wrote: converts merged/ and the adapter in final/ to GGUF, and compares
tensors, logits and greedy answers with the files and with oomph.

    python train.py --lora --merge --steps 20 --out out/a
    python tests/check_after.py out/a --llama_cpp FOLDER    # a checkout of llama.cpp, which has the converters

Run by hand, never by pytest: the converters need transformers, gguf and sentencepiece. The source archive of
llama-cpp-python has a checkout in vendor/llama.cpp. Where llama-cpp-python is not installed, only tensors are compared.
The converter knows a tokenizer by the ids that it makes of one text. To one that it does not know, such as that of a
model made for a test, --pre gives the name of a known one. One line per check; exit status 1 where one fails.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
import model as lm

QUESTION = "What does `os.getcwd()` do?"
N_NEW = 40
TOLERANCE = 1e-4  # of the largest logit: sums in another order, 7e-7 seen
failed = []


def check(what, passed, figure):
    print(f"{'ok    ' if passed else 'FAILED'} {what}: {figure}", flush=True)
    if not passed:
        failed.append(what)


def convert(script, llama_cpp, pre, *arguments):
    """Runs a converter of llama.cpp, which takes every tokenizer for `pre` if that is given."""
    start = ["import runpy, sys", f"sys.path.insert(0, {str(llama_cpp)!r})", f"sys.argv[0] = {script!r}"]
    if pre:
        start.append("from conversion.base import TextModel")
        start.append(f"TextModel.get_vocab_base_pre = lambda self, tokenizer: {pre!r}")
    start.append(f"runpy.run_path({str(llama_cpp / script)!r}, run_name='__main__')")
    command = [sys.executable, "-c", "\n".join(start), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    check(script, done.returncode == 0, f"exit status {done.returncode}")
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])


def interleaved(w_ND, n_heads):
    """Rows of q_proj or k_proj in the order that llama.cpp has for Llama: a head's pairs are neighbours."""
    rows = w_ND.view(n_heads, 2, -1, *w_ND.shape[1:])
    return rows.transpose(1, 2).reshape(w_ND.shape)


def check_tensors(folder, file):
    """Every tensor of merged/ is in the GGUF, bit for bit."""
    config = lm.parse_config(data.read_json(folder / "config.json"))
    reader = gguf.GGUFReader(file)
    found = {tensor.name: tensor for tensor in reader.tensors}
    architecture = reader.fields["general.architecture"].contents()
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], config.num_hidden_layers)
    source = data.WeightFiles(folder)
    n_different = []
    for name, stored in source.tensors.items():
        w = source.rows(name, 0, stored.n_rows).float()
        if architecture == "llama" and ".q_proj." in name:
            w = interleaved(w, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            w = interleaved(w, config.num_key_value_heads)
        tensor = found.pop(names.get_name(name, (".weight", ".bias")))
        if not np.array_equal(tensor.data.reshape(w.shape), w.numpy()):
            n_different.append(name)
    left = [name for name in found if name != "rope_freqs.weight"]  # llama3's factors, made from config.json
    n = len(source.tensors)
    check("tensors of merged/", not n_different and not left, f"{n - len(n_different)} of {n} equal, {len(left)} more")


def ours(folder, adapter_folder):
    """oomph's model of a folder in float32, with an adapter where one is given."""
    with torch.device("meta"):
        model = lm.Transformer(lm.parse_config(data.read_json(folder / "config.json")))
    source = data.WeightFiles(folder)
    adapter = None
    if adapter_folder:
        adapter, flags = data.open_adapter(adapter_folder)
        scale = lm.lora_scale(flags["lora_rank"], flags["lora_alpha"], flags["rslora"])
        lm.add_lora_(model, flags["lora_rank"], scale, 0.0, flags["lora_targets"])
    model.to_empty(device="cpu").tie_()
    data.load_weights_(model, source, adapter, 0, torch.device("cpu"))
    return model.eval()


@torch.no_grad()
def check_answers(what, folder, adapter_folder, **files):
    """Logits of a prompt and the greedy answer, by llama.cpp from its files and by oomph from the folders."""
    import llama_cpp

    model = ours(folder, adapter_folder)
    tokenizer = data.Tokenizer(folder)
    prompt = tokenizer.prompt([{"role": "user", "content": QUESTION}])
    f32 = llama_cpp.GGML_TYPE_F32
    theirs = llama_cpp.Llama(
        **{key: str(path) for key, path in files.items()}, n_ctx=256, logits_all=True, verbose=False,
        type_k=f32, type_v=f32)
    theirs.eval(prompt)
    logits = torch.from_numpy(theirs.scores[: len(prompt)].copy())
    expected = model(torch.tensor([prompt]))[0]
    error = ((logits - expected).abs().max() / expected.abs().max()).item()
    check(f"{what}, logits", error < TOLERANCE, f"differ by {error:.1e} of the largest")
    answer = []
    while len(answer) < N_NEW:
        token = int(theirs.scores[theirs.n_tokens - 1].argmax())
        answer.append(token)
        theirs.eval([token])
    expected = list(lm.generate(model, prompt, N_NEW, set(), torch.device("cpu")))
    n_equal = sum(one == other for one, other in zip(answer, expected))
    check(f"{what}, greedy answer", answer == expected, f"{n_equal} of {N_NEW} tokens equal")
    text = tokenizer.core.decode(prompt, skip_special_tokens=False)
    ids = theirs.tokenize(text.encode(), add_bos=False, special=True)
    # that of a made-up tokenizer may be another one, because GGUF has no place for all of tokenizer.json
    print(f"note   {what}: llama.cpp's ids of the prompt {'equal' if ids == prompt else 'differ from'} oomph's")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run with --lora --merge")
    parser.add_argument("--llama_cpp", type=Path, required=True, help="a checkout of llama.cpp")
    parser.add_argument("--pre", help="the name of a tokenizer that llama.cpp knows, such as qwen2")
    args = parser.parse_args()
    merged = args.run / "merged"
    final = args.run / "final"
    settings = data.read_json(final / "adapter_config.json")
    base = data.find_model(settings["base_model_name_or_path"], False).weights
    has_llama = importlib.util.find_spec("llama_cpp")
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.gguf" for name in ("merged", "base", "adapter")}
        model = "convert_hf_to_gguf.py"
        adapter = "convert_lora_to_gguf.py"
        # float32, so that nothing is rounded on the way
        convert(model, args.llama_cpp, args.pre, merged, "--outfile", files["merged"], "--outtype", "f32")
        check_tensors(merged, files["merged"])
        convert(model, args.llama_cpp, args.pre, base, "--outfile", files["base"], "--outtype", "f32")
        convert(adapter, args.llama_cpp, args.pre, final, "--base", base, "--outfile", files["adapter"])
        if has_llama:
            check_answers("merged/", merged, None, model_path=files["merged"])
        if has_llama and settings.get("use_rslora"):
            print("note   final/: not compared, GGUF scales each adapter by alpha / rank: use merged/")
        elif has_llama:
            check_answers("base and final/", base, final, model_path=files["base"], lora_path=files["adapter"])
        if not has_llama:
            print("llama-cpp-python is not installed: nothing was computed with these files")
    print(f"{len(failed)} failed" + "".join(f"\n  {what}" for what in failed))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
