"""Bases that somebody has quantized, against transformers' own dequantized models of the same folders
(make_goldens_quantized.py writes them), and what a run on one says and writes."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import HERE, model_with_weights, run_ranks
from safetensors.torch import load_file, save_file
from test_model import build

import data
import model as lm
import train

FOLDERS = sorted((HERE / "goldens-quantized").iterdir())
every_format = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
UP = "model.layers.0.mlp.up_proj.weight"


def config_of(folder):
    return data.find_model(str(folder), random_init=False).config


@pytest.mark.rounding
@every_format
def test_logits_and_ten_losses_are_those_of_transformers_dequantized(folder):
    golden = load_file(folder / "golden.safetensors")
    tokens = golden["tokens"]
    model = build(folder, config_of(folder))
    torch.testing.assert_close(model(tokens), golden["logits"], atol=1e-5, rtol=0)  # float32 rounding: 3e-6 seen

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    targets = F.pad(tokens[:, 1:], (0, 1), value=lm.IGNORE)
    losses = []
    for _ in range(10):
        loss = model(tokens, targets) / tokens[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # Adam divides by the root of tiny squares, so rounding grows with the steps
    assert losses == pytest.approx(golden["losses"].tolist(), rel=1e-3)


@every_format
def test_any_rows_are_those_of_the_whole_matrix(folder):
    weights = data.WeightFiles(folder)
    whole = weights.rows(UP, 0, 256)
    assert whole.dtype == torch.bfloat16
    for start, stop in ((0, 0), (0, 1), (3, 130), (127, 129), (255, 256), (256, 256)):
        assert torch.equal(weights.rows(UP, start, stop), whole[start:stop])


@pytest.mark.parametrize("name", ["nf4", "nf4-double"])
def test_the_codes_of_bitsandbytes_come_out_of_qlora_as_they_were(name):
    folder = HERE / "goldens-quantized" / name
    args = train.parse_args(["--qlora", "--precision", "bf16"])
    model = lm.on_meta(lm.parse_config(config_of(folder)), args).to_empty(device="cpu")
    data.load_weights_(model, data.WeightFiles(folder), None, 0, torch.device("cpu"))
    codes = load_file(folder / "golden.safetensors")["codes"]
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight_codes, codes)


def test_blocks_at_the_ends_of_rows_and_columns_are_smaller(tmp_path):
    N, D = 300, 200
    codes = torch.randn(N, D).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2)
    save_file({UP: codes, f"{UP}_scale_inv": scales}, tmp_path / "model.safetensors")
    expected = torch.empty(N, D)
    for i in range(N):
        for j in range(D):
            expected[i, j] = codes[i, j].float() * scales[i // 128, j // 128]
    assert torch.equal(data.WeightFiles(tmp_path).rows(UP, 0, N), expected.bfloat16())


# ---------------------------------------------------------------- runs


def quantize_folder(path, quantization, **changes):
    """A model whose layers are FP8 with a scale a row -> {name: its dequantized weight}."""
    model_with_weights(path, torch.bfloat16, num_hidden_layers=1)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scales = tensors[name].float().abs().amax(1, keepdim=True) / 448
        codes = (tensors[name].float() / scales).to(torch.float8_e4m3fn)
        tensors |= {name: codes, f"{name}_scale": scales}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    raw = data.read_json(path / "config.json") | {"quantization_config": quantization} | changes
    (path / "config.json").write_text(json.dumps(raw))
    weights = data.WeightFiles(path)
    return {name: weights.rows(name, 0, stored.n_rows) for name, stored in weights.tensors.items()}


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}


@pytest.mark.parametrize("named", [None, "org/plain"])
def test_a_run_says_the_format_and_its_results_are_about_the_unquantized_model(tmp_path, few_chats, named):
    expected = quantize_folder(tmp_path / "model", COMPRESSED, _name_or_path=named)
    job = ["--data", few_chats, "--seq_len", 96, "--steps", 1, "--lr", 0, "--sample", ""]
    _, text, codes = run_ranks(1, ["--model", tmp_path / "model", "--lora", "--merge", *job], tmp_path / "run")
    assert codes == [0], text
    assert f"{tmp_path}/model: 7 matrices in FP8, dequantized as they are read" in text
    assert ("note: results name org/plain as their base" in text) == bool(named)
    # at a rate of 0 an adapter adds nothing
    merged = load_file(tmp_path / "run/merged/model.safetensors")
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    assert "quantization_config" not in data.read_json(tmp_path / "run/merged/config.json")
    base = data.read_json(tmp_path / "run/final/adapter_config.json")["base_model_name_or_path"]
    assert base == (named or str(tmp_path / "model"))


def test_an_adapter_whose_base_is_quantized_goes_on(tmp_path, few_chats):
    quantize_folder(tmp_path / "model", COMPRESSED)
    job = ["--data", few_chats, "--seq_len", 96, "--steps", 1, "--sample", ""]
    run_ranks(1, ["--model", tmp_path / "model", "--lora", *job], tmp_path / "first")
    _, text, codes = run_ranks(1, ["--model", tmp_path / "first", *job], tmp_path / "second")
    assert codes == [0], text
    assert "7 matrices in FP8" in text


@pytest.mark.parametrize("method", ["gptq", "awq", "mxfp4"])
def test_other_formats_are_refused_with_the_way_out(tmp_path, method):
    quantize_folder(tmp_path / "model", {"quant_method": method})
    with pytest.raises(ValueError, match=f"quantization_config.*{method}.*unquantized model, and --qlora"):
        data.find_model(str(tmp_path / "model"), random_init=True)


CODES = torch.zeros(3, 64, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("tensors, words", [
    ({UP: CODES}, "got torch.float8_e4m3fn.*unquantized model"),
    ({UP: CODES, f"{UP}_scale": torch.ones(2, 2)}, r"scales \[2, 2\], expected one, 3, or \[1, 1\]"),
    ({f"{UP}_scale": torch.ones(3, 1)}, "not as bitsandbytes or transformers write it"),
    ({UP: torch.zeros(96, 1, dtype=torch.uint8), f"{UP}.absmax": torch.ones(3)}, "got torch.uint8"),
    ({UP: torch.zeros(24, 64, dtype=torch.int32)}, "I32.*unquantized model"),
])
def test_tensors_that_are_no_matrix_together_are_refused_by_name(tmp_path, tensors, words):
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"up_proj.weight.*{words}"):
        data.WeightFiles(tmp_path)


@pytest.mark.parametrize("change", [
    {"blocksize": 128}, {"shape": [3, 32]}, {"shape": [192]}, {"dtype": "Tensor"}, {"dtype": "int8"}, {"shape": None}])
def test_a_state_of_bitsandbytes_that_does_not_fit_is_refused(tmp_path, change):
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [3, 64]} | change
    tensors = {UP: torch.zeros(96, 1, dtype=torch.uint8), f"{UP}.absmax": torch.ones(3)}
    tensors[UP + data.NF4_STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    words = "expected float32" if "dtype" in change else "not as bitsandbytes or transformers write it"
    with pytest.raises(ValueError, match=f"up_proj.weight.*{words}"):
        data.WeightFiles(tmp_path)


N_BLOCKS = 3 * 128 // 64
NF4_PARTS = {
    "": torch.zeros(192, 1, dtype=torch.uint8),
    ".absmax": torch.zeros(N_BLOCKS, dtype=torch.uint8),
    ".nested_absmax": torch.ones(1),
    ".nested_quant_map": torch.ones(256),
    ".quant_map": torch.ones(16),
}


@pytest.mark.parametrize("changes, state, words", [
    ({}, {}, None),
    ({}, {"nested_blocksize": 10**10}, None),  # one block, whatever its size: nothing is as large as this
    ({"": torch.zeros(191, 1, dtype=torch.uint8)}, {}, "codes: expected 192 numbers in torch.uint8"),
    ({"": torch.zeros(192, 1)}, {}, "codes: expected 192 numbers in torch.uint8"),
    ({".absmax": torch.zeros(N_BLOCKS - 1, dtype=torch.uint8)}, {}, ".absmax: expected 6 numbers"),
    ({".nested_absmax": None}, {}, ".nested_absmax: expected 1 numbers in torch.float32, got none"),
    ({".nested_quant_map": torch.ones(16)}, {}, ".nested_quant_map: expected 256 numbers"),
    ({}, {"nested_blocksize": 2}, ".nested_absmax: expected 3 numbers"),
    ({}, {"nested_blocksize": 0}, "not as bitsandbytes"),
], ids=str)
def test_parts_of_nf4_are_of_their_type_and_size(tmp_path, changes, state, words):
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [3, 128], "nested_blocksize": 256,
             "nested_offset": 0.5} | state
    tensors = {UP + part: tensor for part, tensor in (NF4_PARTS | changes).items() if tensor is not None}
    tensors[UP + data.NF4_STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    if words:
        with pytest.raises(ValueError, match=f"up_proj.weight.*{words}"):
            data.WeightFiles(tmp_path)
    else:
        assert data.WeightFiles(tmp_path).rows(UP, 0, 3).shape == (3, 128)


@pytest.mark.parametrize("codes, scale", [(torch.uint8, torch.float32), (torch.float8_e4m3fn, torch.int32)], ids=str)
def test_what_is_no_fp8_is_refused(tmp_path, codes, scale):
    tensors = {UP: torch.zeros(3, 64).to(codes), f"{UP}_scale": torch.ones(1).to(scale)}
    save_file(tensors, tmp_path / "model.safetensors")
    words = "a scale that is no float" if codes == torch.float8_e4m3fn else "expected 192 numbers in torch.float8"
    with pytest.raises(ValueError, match=f"up_proj.weight.*{words}"):
        data.WeightFiles(tmp_path)
