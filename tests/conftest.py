"""What the tests share: small models, small data, and ranks that start in a fraction of a second. README.md beside this
file says how the tests are laid out, and which test holds which promise.

    OOMPH_CI=1                       # as .ci/run, with tests marked ci
    OOMPH_EMULATED_CUDA=required     # as .ci/run: no test of a GPU is skipped

another_machine.py lets them run as on another machine.
"""

import argparse
import atexit
import contextlib
import faulthandler
import functools
import gc
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from multiprocessing import forkserver
from pathlib import Path

# These have to be there before torch is imported.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin starve the others
os.environ["GOMP_SPINCOUNT"] = "0"

import pytest

import another_machine  # before torch
import emulated_cuda  # before torch
import torch
from side_by_side import EMULATED, WAITS, pytest_runtestloop  # noqa: F401

HERE = Path(__file__).parent
# As a command. What another_machine changes of torch and data.py is changed only where this file is imported.
TRAIN = HERE / "as_another_machine.py" if another_machine.IS_IMPORTED else HERE.parent / "train.py"
sys.path[:0] = [str(HERE), str(HERE.parent)]
another_machine.change()  # ranks import this file, and are changed, too

# The cache of tokenized files is one of this run of tests. Ranks import this file, too, and inherit the cache.
if "oomph-tests-" not in os.environ.get("XDG_CACHE_HOME", ""):
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="oomph-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# Ranks are forked from a process that has imported all that they need once: four of them cost less than one
# `import torch`.
processes = multiprocessing.get_context("fork" if emulated_cuda.LOADED else "forkserver")
processes.set_forkserver_preload(["fork_server"])
HANG_S = 600  # without a line in the log of any rank
# A run goes on uncompiled, with this warning. A test of compiled code would compare plain code with itself.
FAILED_TO_COMPILE = "torch.compile failed"


def in_ci(*cases):
    """[cases of a parametrized test that .ci/run alone runs]: README's command runs a part of each large grid."""
    return [pytest.param(*case, marks=pytest.mark.ci) for case in cases]


@pytest.fixture
def emulated(request):
    """The tests marked gpu on an emulated device, beside all others: (process, its output), or why there is none."""
    return request.config.stash[EMULATED]


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", f"error:{FAILED_TO_COMPILE}")
    config.addinivalue_line("markers", "ci: .ci/run alone runs it (OOMPH_CI)")
    config.addinivalue_line("markers", "gpu: needs a CUDA device, or an emulated one (test_cuda.py)")
    config.addinivalue_line("markers", "bf16: depends on whether the CPU has bf16 instructions (OOMPH_BF16)")
    config.addinivalue_line("markers", "rounding: compares numbers that are rounded in another way (OOMPH_MACHINE)")
    config.addinivalue_line("markers", "unperturbed: counts memory, or has weights without OOMPH_PERTURB beside it")


def pytest_terminal_summary(terminalreporter):
    if another_machine.WORDS:
        terminalreporter.write_line(f"as another machine: {another_machine.WORDS}")


def pytest_collection_modifyitems(config, items):
    # Tests of this project alone, which a fork's first edit may break, and the rest of large grids.
    if "OOMPH_CI" not in os.environ:
        of_ci = [item for item in items if item.get_closest_marker("ci")]
        config.hook.pytest_deselected(items=of_ci)
        items[:] = [item for item in items if item not in of_ci]
    torch.backends.cuda.enable_cudnn_sdp(False)  # as train.Ranks does, for tests of a block without a run
    if not torch.cuda.is_available():
        leave_gpu_to_the_emulated_device(config, items)
    if another_machine.PERTURB:
        for item in items:
            if "unperturbed" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="weights are perturbed"))
    items.sort(key=lambda item: item.name == WAITS)  # the last one: nothing is left to do beside it
    if emulated_cuda.LOADED:
        # ranks are forks, and a process may not fork once it has threads
        items.sort(key=lambda item: item.path.name != "test_cuda.py")
        torch.set_num_threads(1)
    else:
        gc.set_threshold(100_000, 20, 100)  # tracing and compiling make many objects, and little garbage
    gc.freeze()  # or the first collection in each fork would copy all that this process has imported


def leave_gpu_to_the_emulated_device(config, items):
    """Tests marked gpu go where the test runs that has the emulated device, else they are skipped."""
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if any(item.name == WAITS for item in items):
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason="no CUDA device in this process: test_cuda.py emulates one"))


# ---------------------------------------------------------------- ranks


def start_rank(rank, world, port, function, args, log, gpu=False):
    """A rank's process: function(*args), whose result or SystemExit is the exit code; all it prints goes to `log`."""
    trace = open(f"{log}.trace", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGQUIT, trace)  # where each thread stands, asked for when the rank hangs
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script that runs the tests may ignore it,
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup ignores this
    # Torch makes a fork's pool of threads anew in the first call that needs it. Two of autograd's threads may do so at
    # once, which ends the process: 115 of 200 forks on an emulated GPU, and none with this line.
    torch.set_num_threads(torch.get_num_threads())
    torch.backends.cuda.enable_cudnn_sdp(True)  # as torch has it: the run has to turn it off
    if not gpu:  # gloo, on any machine
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # what torchrun would set
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world)
    warnings.filterwarnings("error", FAILED_TO_COMPILE)
    import train

    train.StoreOnce = argparse._StoreAction  # see later_values_count()
    with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            code = function(*args) or 0
        except SystemExit as end:
            print(end, flush=True)
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 1
    sys.exit(code)


def free_port():
    """A port for the ranks to meet at. The system gives those from 32768 on to whoever asks for any, and other ranks do
    so all the time."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


STARTING = threading.Lock()  # two threads at once would leave this process in HERE


def start_fork_server():
    """Does nothing if it runs. Python 3.11 tells it no sys.path, and it would pass over a module that it does not find:
    it looks in the folder that it starts in. Ranks go back to that of this process."""
    with STARTING:
        folder = os.getcwd()
        os.chdir(HERE)
        try:
            forkserver.ensure_running()
        finally:
            os.chdir(folder)


@pytest.fixture(autouse=True)
def later_values_count(monkeypatch, request):
    """A test changes a flag of its job by giving it again, which train.py refuses. test_bad_input.py tries that."""
    if request.module.__name__ != "test_bad_input":
        import train

        monkeypatch.setattr(train, "StoreOnce", argparse._StoreAction)


def later_counts(argv):
    """The words of a command without the first of two values of a flag, for processes of their own."""
    flags = {}
    name = None  # of what comes before the first flag
    for word in map(str, argv):
        if word.startswith("--"):
            name = word.partition("=")[0]
            flags.pop(name, None)
        flags.setdefault(name, []).append(word)
    return [word for words in flags.values() for word in words]


def start_ranks(world, function, args, logs, gpu=False):
    """Runs function(*args) on `world` ranks at once -> their exit codes. TimeoutError if they hang."""
    if not emulated_cuda.LOADED:
        start_fork_server()
    port = free_port()
    ranks = []
    for rank in range(world):
        process = processes.Process(target=start_rank, args=(rank, world, port, function, args, logs[rank], gpu))
        process.start()
        ranks.append(process)
    started = time.time()
    while running := [process for process in ranks if process.is_alive()]:
        running[0].join(5)
        last_words = max([started, *(log.stat().st_mtime for log in logs if log.exists())])
        if time.time() > last_words + HANG_S:
            traces = kill_with_traces(running, logs)
            raise TimeoutError(f"{function} {args} on {world} ranks hung\n{traces}")
    return [process.exitcode for process in ranks]


def kill_with_traces(running, logs):
    """Ends ranks that hang -> what all ranks said, and where each thread stood."""
    for process in running:
        os.kill(process.pid, signal.SIGQUIT)
    time.sleep(5)  # for the traces
    for process in running:
        process.kill()
    parts = []
    for rank, log in enumerate(logs):
        parts += [f"rank {rank}:", log.read_text(), Path(f"{log}.trace").read_text()]
    return "\n".join(parts)


def train_main(argv):
    import train

    return train.launch(argv)


def run_ranks(world, argv, out, gpu=False):
    """Runs train.py with argv and --out on `world` ranks -> (rows of metrics.jsonl, what all ranks said, exit codes).
    Without checkpoints unless argv asks for them."""
    argv = [*map(str, argv), "--out", str(out)]
    if "--save_every" not in argv:
        argv += ["--save_every", "0"]
    logs = [out.parent / f"{out.name}-rank{rank}.log" for rank in range(world)]
    codes = start_ranks(world, train_main, (argv,), logs, gpu)
    rows = []
    if (out / "metrics.jsonl").exists():
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    text = "".join(log.read_text() for log in logs)
    return rows, text, codes


def check_merges_later(run, folder):
    """--merge of a finished run, without --data, writes the bytes that --merge in the run itself has written."""
    shutil.copytree(run, folder / "later", ignore=shutil.ignore_patterns("merged"))
    assert train_main(["--merge", "--model", str(folder / "later")]) == 0
    names = {path.name for path in (run / "merged").iterdir()}
    assert {path.name for path in (folder / "later/merged").iterdir()} == names
    for name in names:
        # compared outside of `assert`, where pytest would show how megabytes differ
        are_same = (run / "merged" / name).read_bytes() == (folder / "later/merged" / name).read_bytes()
        assert are_same, name


def ranks_that_print(**parts):
    """A stand-in for Ranks, as rank 0."""
    import train

    ranks = argparse.Namespace(rank=0, say=print, **parts)
    ranks.note = functools.partial(train.Ranks.note, ranks)
    return ranks


def state_of(step):
    """The state of a run after a step, as train.py hands it to its Saver, of a run without settings."""
    return {"step": step, "tokens": 0, "best_eval": None, "evaluated": 0, "eval_data": None, "metrics_bytes": 0,
            "steps": 9, "rows_a_step": 1, "settings": {}}


def on_ranks(world, function, folder, *args):
    """Runs function(ranks, folder, *args) inside a process group of `world` ranks, ranks being a train.Ranks; what it
    asserts must hold on each."""
    logs = [folder / f"{function.__name__}-rank{rank}.log" for rank in range(world)]
    codes = start_ranks(world, in_group, (function, folder, *args), logs)
    assert codes == [0] * world, "".join(log.read_text() for log in logs)


def in_group(function, *args):
    import train

    ranks = train.Ranks(True, 1800)
    function(ranks, *args)
    ranks.leave()


def losses(world, argv, out):
    """Losses of every step of a run that must succeed."""
    return curve(world, argv, out)[0]


def curve(world, argv, out, gpu=False):
    """(losses, gradient norms) of every step of a run that must succeed."""
    rows, text, codes = run_ranks(world, [*argv, "--log_every", 1], out, gpu)
    assert codes == [0] * world, text
    steps = [row for row in rows if "loss" in row]  # the others are evaluations
    return [row["loss"] for row in steps], [row["grad_norm"] for row in steps]


# ---------------------------------------------------------------- two runs that round in another way

# Sums in another order change the last bits of float32 numbers. How far results are then apart depends on what they
# are:
#
#     losses                 1e-6 at a loss of 8
#     a tensor's gradient    1e-6 of its norm with adapters; 1e-5 in full, as all gradients are clipped by one norm, for
#                            which torch adds up 262,144 squares one behind the other
#     a single weight        any part of the learning rate: Adam divides a gradient by its own size, so where it is near
#                            zero, rounding decides whether the weight moves up or down
#     all weights together   0.006 of the norm of the update, when 3 weights of an adapter had such gradients
#
# So no test compares single weights after Adam. A rank, a tile or a document that is left out changes the gradient of
# some tensor by a tenth and more.
GRADIENTS_APART = 1e-3  # of the norm of a tensor's gradient
WEIGHTS_APART = 0.05  # of the norm of the update


def tensors_at(checkpoint):
    """{name: tensor} of a checkpoint, put together of the rows of all ranks: trained weights, optimizer state."""
    import torch
    from safetensors.torch import load_file

    rows_of = {}  # {name: {number of the first row: rows}}
    for path in checkpoint.glob("*.safetensors"):
        for key, rows in load_file(path).items():
            name, _, first = key.rpartition(":")
            rows_of.setdefault(name, {})[int(first)] = rows
    assert rows_of, f"{checkpoint} has no tensors"
    return {name: torch.cat([rows[first] for first in sorted(rows)]) for name, rows in rows_of.items()}


def norm_of_difference(tensors, others):
    """The L2 norm of the difference of two {name: tensor}, over all tensors."""
    assert tensors.keys() == others.keys()
    squares = [(tensors[name].double() - others[name].double()).square().sum() for name in tensors]
    return sum(squares).sqrt().item()


def check_same_gradients(got, expected):
    """Two checkpoints of runs with AdamW, saved after the same step, come from the same gradients in each tensor. First
    moments are compared: they are means of gradients, and as well conditioned."""
    moments = tensors_at(got)
    expected_moments = tensors_at(expected)
    assert moments.keys() == expected_moments.keys()
    names = [name for name in moments if name.endswith(".exp_avg")]
    assert names
    for name in names:
        apart = (moments[name] - expected_moments[name]).norm()
        size = expected_moments[name].norm()
        assert apart <= GRADIENTS_APART * size, f"{name}: {apart / size:.2g}"


def norm_of_update(run, step):
    """How far a step has moved all weights of a run, which has saved before and after it."""
    def weights_at(step):
        tensors = tensors_at(run / f"checkpoint-{step}")
        return {name: tensor for name, tensor in tensors.items() if name.endswith("weight")}

    return norm_of_difference(weights_at(step - 1), weights_at(step))


def check_same_weights(got, expected, update):
    """{name: tensor} of what two runs have written are the same weights. update: norm_of_update() of one of them."""
    assert update > 0
    apart = norm_of_difference(got, expected)
    assert apart <= WEIGHTS_APART * update, f"{apart / update:.2g} of the update"


# ---------------------------------------------------------------- models

# Sizes that do not divide: 3 and 4 ranks hold unequal shards of the 16 key rows, of 4,096 / 3 words, of 5 adapter rows.
MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2,
       "moe_intermediate_size": 64, "norm_topk_prob": True}
# one block of attention between two of Gated DeltaNet
QWEN35 = MOE | {
    "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"],
    "shared_expert_intermediate_size": 64, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}
# two blocks with a window of less than a row, and one that sees all, without RoPE
MUSE = {
    "model_type": "muse_glimmer_text", "architectures": None, "sliding_window": 24, "qk_scale_factor": 2.0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "layer_rope_theta": [1e6, 1e6, 0],
}
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 64,
    "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 512, "dtype": "float32",
    "initializer_range": 0.05,
}


def random_model(path, **changes):
    """A folder with a config, SHAPE with changes, and the built-in tokenizer, for --random_init."""
    path.mkdir(exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(HERE / "tiny" / file, path)
    (path / "config.json").write_text(json.dumps(SHAPE | changes, indent=2) + "\n")
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model of two blocks: FSDP2, checkpoints and offload treat the first or the last one in another way."""
    return random_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="session")
def shallow(tmp_path_factory):
    """The same with one block, in half the time: for what does not depend on how many there are."""
    return random_model(tmp_path_factory.mktemp("shallow"), num_hidden_layers=1)


@pytest.fixture(scope="session")
def tiny():
    """The tokenizer of the built-in model."""
    import data

    return data.Tokenizer(HERE / "tiny")


def build(*flags, ranks=None, **changes):
    """(the model of a run with these flags and the weights of --random_init, its args). With --fsdp2 it is sharded over
    `ranks`. changes: of SHAPE."""
    import model as lm
    import data
    import train

    args = train.parse_args(["--precision", "fp32", *map(str, flags)])
    cpu = torch.device("cpu")
    config = lm.parse_config(SHAPE | changes)
    with torch.device("meta"):
        source = data.RandomWeights(lm.Transformer(config), 0, cpu)
    model = lm.on_meta(config, args)
    if args.fsdp2:
        train.shard_(model, args, ranks.device)
    model.to_empty(device="cpu").tie_()
    data.load_weights_(model, source, None, 0, cpu)
    return model, args


def model_with_weights(path, dtype=torch.float32, **changes):
    """A folder as random_model() makes it, with the weights that --random_init gives, in this dtype."""
    from safetensors.torch import save_file

    random_model(path, **changes)
    model, _ = build(**changes)
    tensors = {name: p.detach().to(dtype, copy=True) for name, p in model.named_parameters()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


# ---------------------------------------------------------------- data


def random_chats(path, rng, n=80):
    """A file of n conversations of uneven length."""
    words = "the file is read from disk and returned as a list of str self None import def".split()
    with open(path, "w") as file:
        for _ in range(n):
            messages = []
            for role in ("user", "assistant") * rng.randint(1, 2):
                content = " ".join(rng.choices(words, k=rng.randint(1, 20)))
                messages.append({"role": role, "content": content})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    return random_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", random.Random(0))


@pytest.fixture(scope="session")
def few_chats(chats):
    """The first ten of these, which fill seven rows of 96 tokens. To evaluate all 80 takes longer than to train for
    some steps."""
    path = chats.parent / "few.jsonl"
    lines = chats.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:10]))
    return path


def documents_of(tokens, supervised, starts):
    """data.Documents of one file: tokens [n], supervised [n] bool; a document from each start to the next."""
    import numpy as np

    import data

    stops = np.asarray(starts[1:])
    starts = np.asarray(starts[:-1])
    # a document's first token is nobody's target
    n_targets = [int(supervised[start + 1 : stop].sum()) for start, stop in zip(starts, stops)]
    parts = np.zeros(len(starts), data.PART)
    parts["start"] = starts
    parts["stop"] = stops
    parts["n_targets"] = n_targets
    parts["line"] = np.arange(1, len(starts) + 1)
    file = data.DataFile("file", data.FileReport(), tokens, supervised, n_tokens=len(tokens))
    return data.Documents([file], parts)


def read_data(path, tokenizer, seq_len=1000, **options):
    """A data file -> (Documents, its data.DataFile)."""
    import data

    folder = data.tokenized(str(path), tokenizer)
    documents = data.open_documents([folder], [str(path)], seq_len, **options)
    return documents, documents.files[0]


def noted(file, words):
    """How often a data.DataFile's report has a note with these words."""
    return sum(n for text, n in file.report.notes.items() if words in text)


def pieces(documents):
    """[(token ids, supervised)] of each part."""
    found = []
    for i in range(len(documents.parts["start"])):
        ids, supervised = documents.part(i)
        found.append((ids.tolist(), supervised.tolist()))
    return found


# ---------------------------------------------------------------- many ranks that do not exist


def start_fake_group(world):
    """Makes this process rank 0 of `world`, alone: collectives write at once what they would if all ranks held the
    same. torch's own fake group leaves outputs uninitialised, which may be nan and end a run."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def gather_or_scatter(output=None, input=None, output_tensor=None, input_tensor=None, **_):
        if output is None:  # the arguments of the older two have other names
            output, input = output_tensor, input_tensor
        if output.numel() > input.numel():
            rows = output.view(output.numel() // input.numel(), -1)
            rows[1:] = input.view(1, -1)  # `input` is the first row itself
        else:
            output.copy_(input.view(-1, output.numel())[0])

    def all_to_all(output, input, **_):
        output.copy_(input[:1].expand_as(input))

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    for name in ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"):
        setattr(dist, name, gather_or_scatter)
    dist.all_to_all_single = all_to_all
