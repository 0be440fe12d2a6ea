"""AdamW on shards and in 8 bits, random rounding and the step inside the backward: what is stored, that it stays right
in the mean, and that none of it depends on ranks or flags. Where a mean is tested, the tolerance is five standard
errors."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import build, curve, losses, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import data
import nf4
import train

CPU = torch.device("cpu")
M_LEVELS, V_LEVELS = nf4.code_levels(CPU)
EIGHT = ["--optim", "adamw8bit"]
RANDOM = ["--stochastic_rounding"]


def optimizer_of(params, *flags, found_inf=None):
    """The optimizer that a run with these flags has for such parameters; `bad` is the scalar that stops updates."""
    params = list(params)
    defaults = ["--precision", "bf16", "--lr", "1e-3", "--weight_decay", "0.1"]
    args = train.parse_args([*defaults, *flags])
    if found_inf is None:
        found_inf = torch.zeros((), device=params[0].device)
    named = {f"parameter {number}": p for number, p in enumerate(params)}
    return train.make_optimizer(named, args, found_inf)


def normal(shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def log_uniform(shape, decades):
    """Magnitudes spread evenly over that many decades below 1."""
    generator = torch.Generator().manual_seed(1)
    return 10 ** -(torch.rand(shape, generator=generator) * decades)


# ---------------------------------------------------------------- random bits and rounding


def dither(step, shape, number=0, use=0):
    """The random bits for a matrix: parameter `number`, used for m (0), for v (1) or for the weight (2)."""
    N, D = shape
    rows_3N, cols_D = nf4.dither_words(step, number, 0, N, D, "cpu")
    return rows_3N[use][:, None] * cols_D


def round_in_codes(x_ND, signed, step):
    """x after it was stored in codes, of m if signed and else of v, and read back. Each row is one block."""
    codes = torch.zeros(x_ND.shape, dtype=torch.uint8)
    scales = torch.zeros(len(x_ND), 1)
    moment = nf4.Moment(codes, scales, M_LEVELS if signed else V_LEVELS, signed)
    nf4.write_moment_(moment, x_ND, dither(step, x_ND.shape), skip=torch.tensor(False))
    return nf4.read_moment(moment)


def round_as_m(x, step):
    return round_in_codes(x, True, step)


def round_as_v(x, step):
    return round_in_codes(x.abs(), False, step)


def round_to_bf16(x, step):
    return nf4.round_to(torch.bfloat16, x, dither(step, x.shape))


def fractions(step=7, number=0, use=0):
    """The 20 bits that decide a rounding, as numbers [512, 512] from 0 to 1."""
    bits = dither(step, (512, 512), number, use)
    return (bits & 0xFFFFF).double() / 2**20


def test_dither_is_uniform():
    u = fractions()
    deviation = 12**-0.5  # of a uniform number
    assert u.mean().item() == pytest.approx(0.5, abs=5 * deviation / 512)  # of 512 * 512 numbers
    counts = torch.histc(u, 64, 0, 1)
    n_expected = 4096  # in each of 64 bins, with a standard deviation of 64
    assert ((counts - n_expected).abs() < 5 * 64).all()


def test_dither_of_neighbours_steps_parameters_and_moments_is_independent():
    u = fractions()
    others = {
        "v": fractions(use=1),
        "next step": fractions(step=8),
        "next parameter": fractions(number=1),
        "row above": u.roll(1, 0),
        "column before": u.roll(1, 1),
        "row as column": u.T,
    }
    for name, other in others.items():
        covariance = ((u - 0.5) * (other - 0.5)).mean()
        correlation = covariance * 12  # a uniform number has a variance of 1/12
        assert abs(correlation) < 5 / 512, name


def test_dither_is_no_sum_of_a_rows_and_a_columns_bits():
    signs = (fractions() > 0.5).float() - 0.5
    # such a sum has one large singular value, 512 * 0.4; independent signs have 2 * sqrt(512) / 2
    assert torch.linalg.svdvals(signs)[0] < 1.1 * 512**0.5


BLOCK_SCALES = 10 ** torch.linspace(-18, 18, 4096)[:, None]  # with any mantissa


def test_v_is_stored_within_an_eighth_over_nine_decades():
    v = log_uniform((4096, 256), 9.5) * BLOCK_SCALES
    v[:, :1] = BLOCK_SCALES  # the largest of a block must not wrap around
    error = (round_as_v(v, step=1) / v - 1).abs()
    assert error.max() < 0.125  # neighbouring codes are at most that far apart,
    assert error[:, 0].max() < 0.07  # the two largest 6.7 %,
    # and 9 % on average, of which random rounding leaves 1 / sqrt(6)
    assert error.square().mean().sqrt() < 0.045


def test_v_below_the_range_of_its_block_is_rounded_up():
    v = 1e-20 * BLOCK_SCALES.repeat(1, 256)
    v[:, :1] = BLOCK_SCALES
    small = round_as_v(v, step=1)[:, 1:] / BLOCK_SCALES
    assert 2.4e-10 < V_LEVELS[0] < 2.6e-10
    torch.testing.assert_close(small, V_LEVELS[0].expand_as(small), rtol=1e-6, atol=0)  # float32


def test_a_block_of_zeros_stays_zero():
    assert not round_as_v(torch.zeros(3, 256), step=1).any()
    assert not round_as_m(torch.zeros(3, 256), step=1).any()


@pytest.mark.parametrize("decades", [3, 8])
def test_m_is_stored_within_an_eighth_and_two_millionths(decades):
    m = log_uniform((4096, 256), decades) * normal((4096, 256), 0).sign() * BLOCK_SCALES
    m[:, :1] = -BLOCK_SCALES  # the largest of a block must not wrap around
    got = round_as_m(m, step=1)
    near_zero = 2.1e-6 * BLOCK_SCALES  # where codes have equal steps of 2.0e-6
    assert ((got - m).abs() <= m.abs() / 8 + near_zero).all()
    assert (got / m - 1)[:, 0].abs().max() < 0.07
    assert (got * m >= 0).all()  # no sign changes


def code_spread(x):
    """Half of the largest distance of two neighbouring codes; near zero those of m have equal steps."""
    return x.abs() / 16 + 1.1e-6


def bf16_spread(x):
    return x.abs() / 256


@pytest.mark.parametrize("rounded, decades, spread", [
    (round_as_m, 7, code_spread),
    (round_as_v, 7, code_spread),
    (round_to_bf16, 30, bf16_spread),
], ids=["m", "v", "bf16"])
def test_what_is_rounded_is_right_in_the_mean(rounded, decades, spread):
    n = 2000
    x = log_uniform((8, 256), decades)
    x[:, 0] = 1.0  # the largest of each block
    x *= normal((8, 256), 0).sign()
    mean = sum(rounded(x, step).double() for step in range(n)) / n
    error = (mean.abs() - x.abs()).abs()  # round_as_v() drops the sign
    assert (error < 5 * spread(x) / n**0.5).all()


def test_random_rounding_keeps_what_bf16_holds():
    x = torch.tensor([[0.0, -0.0, 1.0, -3.5, 2**-126, float("inf"), float("-inf"), float("nan")]])
    for step in range(50):
        got = round_to_bf16(x, step).float()
        assert torch.equal(got.nan_to_num(7.0), x.nan_to_num(7.0))
        signs = got.signbit()[0, :-1]  # of -0.0 too; that of a nan, the last one, means nothing
        assert torch.equal(signs, x.signbit()[0, :-1])


# ---------------------------------------------------------------- against torch's AdamW


class Twins:
    """Two equal weights, `exact` under torch's AdamW and `ours` under that of the flags."""

    def __init__(self, shape, *flags):
        self.exact = nn.Parameter(normal(shape, 2))
        self.ours = nn.Parameter(normal(shape, 2))
        self.exact_optimizer = optimizer_of([self.exact])
        self.our_optimizer = optimizer_of([self.ours], *flags)

    def step(self, grad):
        self.exact.grad = grad.clone()
        self.exact_optimizer.step()
        self.ours.grad = grad.clone()
        self.our_optimizer.step()


@pytest.mark.rounding
@pytest.mark.parametrize("shape, flags, n_steps", [
    ((20, 300), RANDOM, 50),  # which rounds nothing in float32
    # one step: moments are rounded after their use
    ((20, 512), EIGHT, 1),  # two whole blocks a row
    ((20, 300), EIGHT, 1),  # a shorter one at the end
    ((20, 16), EIGHT, 1),  # less than one
    ((20,), EIGHT, 1),  # a vector
], ids=str)
def test_without_rounding_it_is_torchs_adamw(shape, flags, n_steps):
    twins = Twins(shape, *flags)
    for i in range(n_steps):
        twins.step(normal(shape, i))
    torch.testing.assert_close(twins.ours, twins.exact, atol=1e-6, rtol=1e-5)  # float32, operations in another order


def moment_of(state, name, levels):
    """A moment [N, D] in float32, from its codes and the scales of its blocks."""
    codes = state[name].int()
    D = codes.shape[1]
    scales = state[f"{name}_scales"].repeat_interleave(nf4.MOMENT_BLOCK, 1)
    return levels[codes] * scales[:, :D]


def test_moments_in_8_bits_follow_adamw_and_do_not_freeze():
    shape = 64, 300
    twins = Twins(shape, *EIGHT)
    spread = log_uniform(shape, 3)  # large and small gradients side by side
    for i in range(400):
        smaller = 1 if i < 200 else 1 / 4  # v has to follow, 0.1 % a step
        twins.step(normal(shape, i) * spread * smaller)
    exact = twins.exact_optimizer.state[twins.exact]
    ours = twins.our_optimizer.state[twins.ours]

    v_ratio = moment_of(ours, "exp_avg_sq", V_LEVELS) / exact["exp_avg_sq"]
    assert v_ratio.mean() == pytest.approx(1, abs=0.01)  # 19,200 random walks of 0.2 each: 0.0015
    assert v_ratio.std() < 0.3

    m_error = (moment_of(ours, "exp_avg", M_LEVELS) - exact["exp_avg"]) / spread
    m_size = exact["exp_avg"] / spread
    assert m_error.square().mean() < 0.1**2 * m_size.square().mean()  # 8.5 % RMS


@pytest.mark.parametrize("flags, moved", [
    (EIGHT, 0),  # each update is rounded away
    (RANDOM, 40 * 2e-4),
    (EIGHT + RANDOM, 40 * 2e-4),
], ids=str)
def test_updates_below_the_resolution_of_bf16_count(flags, moved):
    w = nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16))  # its neighbours are 1/256 below and 1/128 above
    optimizer = optimizer_of([w], "--lr", "2e-4", "--weight_decay", "0", *flags)
    w.grad = torch.ones_like(w)
    for _ in range(40):
        optimizer.step()
    assert w.float().mean().item() == pytest.approx(1 - moved, abs=2e-4)  # 16,384 roundings of 0.004


# ---------------------------------------------------------------- shards


def three_layers(dtype):
    """Layers with uneven shards: of the second one's two rows the third rank has none."""
    layers = nn.Sequential(
        nn.Linear(300, 7),
        nn.Linear(16, 2),
        nn.Linear(600, 5, bias=False),
    )
    return layers.to(dtype)


def check_state_does_not_depend_on_ranks(ranks, folder, flags, dtype):
    whole = three_layers(dtype)
    shards = three_layers(dtype)
    for p, q in zip(whole.parameters(), shards.parameters()):
        dist.broadcast(p.data, 0)
        q.data.copy_(p.data)
    fully_shard(shards, mesh=init_device_mesh("cpu", (ranks.world,)))
    pairs = list(zip(whole.parameters(), shards.parameters()))
    optimizer = optimizer_of(whole.parameters(), "--lr", "1e-2", *flags)
    sharded_optimizer = optimizer_of(shards.parameters(), "--lr", "1e-2", *flags)
    for step in range(5):
        for number, (p, q) in enumerate(pairs):
            p.grad = normal(p.shape, 100 * step + number, dtype)
            q.grad = torch.zeros_like(q)
            mine, start = nf4.local(q.grad)
            mine.copy_(p.grad[start : start + len(mine)])
        optimizer.step()
        sharded_optimizer.step()

    for p, q in pairs:
        assert torch.equal(q.full_tensor(), p)
        sharded_state = sharded_optimizer.state[q]
        for name, x in optimizer.state[p].items():
            y = sharded_state[name]
            if name != "step":
                assert isinstance(y, DTensor), name
                assert y.placements == q.placements, name
                assert y.shape == x.shape, name
                y = y.full_tensor()
            assert torch.equal(x, y), name


@pytest.mark.parametrize("world, flags, dtype", [
    (2, EIGHT, torch.float32),
    (3, EIGHT, torch.float32),
    (3, RANDOM, torch.bfloat16),
    (3, EIGHT + RANDOM, torch.bfloat16),
], ids=str)
def test_state_is_the_same_bytes_on_every_number_of_ranks(tmp_path, world, flags, dtype):
    on_ranks(world, check_state_does_not_depend_on_ranks, tmp_path, flags, dtype)


def check_clipped_adamw(ranks, folder, flags, replicas):
    whole = three_layers(torch.float32)
    shards = three_layers(torch.float32)
    for p, q in zip(whole.parameters(), shards.parameters()):
        dist.broadcast(p.data, 0)
        q.data.copy_(p.data)
    sizes = replicas, ranks.world // replicas
    fully_shard(shards, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")))
    weights = list(whole.parameters())
    sharded = list(shards.parameters())
    expected = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1, fused="--no-fused_adamw" not in flags)
    optimizer = optimizer_of(sharded, "--precision", "fp32", "--lr", "1e-2", *flags)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1  # of vectors, too

    for step in range(3):
        for number, (p, q) in enumerate(zip(weights, sharded)):
            p.grad = normal(p.shape, 100 * step + number)
            q.grad = torch.zeros_like(q)
            mine, start = nf4.local(q.grad)
            mine.copy_(p.grad[start : start + len(mine)])
        expected_norm = nn.utils.clip_grad_norm_(weights, 1.0)
        expected.step()
        norm = train.clip_gradients_(sharded, 1.0)
        assert not nf4.is_sharded(norm)  # one number, the same on all ranks
        optimizer.step()
        # the same squares in another order
        assert norm.item() == pytest.approx(expected_norm.item(), rel=1e-6), step
    for p, q in zip(weights, sharded):
        torch.testing.assert_close(q.full_tensor(), p, rtol=0, atol=1e-6)  # three updates are 3e-2


@pytest.mark.rounding
@pytest.mark.parametrize("world, replicas, flags", [
    (3, 1, []),
    (3, 1, ["--no-fused_adamw"]),
    (4, 2, []),
], ids=str)
def test_adamw_and_clipping_on_shards_are_those_of_whole_weights(tmp_path, world, replicas, flags):
    on_ranks(world, check_clipped_adamw, tmp_path, flags, replicas)


# ---------------------------------------------------------------- the step inside the backward


@pytest.fixture(scope="module")
def job(folder, chats):
    return [
        "--model", folder, "--random_init", "--precision", "fp32",
        "--data", chats, "--seq_len", 96, "--steps", 4,
    ]


RUNS = {
    "full": ["--lr", "3e-3"],
    "bf16": ["--lr", "3e-3", "--precision", "bf16", *EIGHT, *RANDOM],
    "lora": ["--lora", "--lora_rank", 5, "--lr", "1e-2", "--no-fused_adamw"],
    "qlora": ["--qlora", "--lora_rank", 5, "--lr", "1e-2", *EIGHT],
}
TWO_ROWS = ["--batch_size", 2]  # on one rank as many as two ranks have


@pytest.fixture(scope="module")
def after_backward(job, tmp_path_factory):
    """{name: (losses, norms) of the step after the backward, without clipping, on one rank}."""
    out = tmp_path_factory.mktemp("after")
    curves = {}
    for name, flags in RUNS.items():
        argv = [*job, *TWO_ROWS, "--clip", 0, *flags]
        curves[name] = curve(1, argv, out / name)
    return curves


@pytest.mark.rounding
@pytest.mark.bf16
@pytest.mark.parametrize("name", RUNS)
def test_stepping_in_the_backward_changes_no_bit_on_one_rank(job, after_backward, tmp_path, name):
    argv = [*job, *TWO_ROWS, *RUNS[name], "--optim_in_backward"]
    got, norms = curve(1, argv, tmp_path / "run")
    expected, expected_norms = after_backward[name]
    assert got == expected
    # float32 sums in another order; clipping takes norms of bf16 gradients in bf16
    tolerance = 2**-8 if name == "bf16" else 1e-5
    assert norms == pytest.approx(expected_norms, rel=tolerance)


@pytest.mark.rounding
@pytest.mark.parametrize("name, flags", [
    ("full", ["--fsdp2"]),
    ("lora", []),
    ("full", ["--fsdp2", "--offload", "params"]),
    ("full", ["--fsdp2", "--replicas", 2]),
    ("qlora", ["--fsdp2", "--offload"]),
], ids=str)
def test_stepping_in_the_backward_changes_no_loss_on_two_ranks(job, after_backward, tmp_path, name, flags):
    argv = [*job, *RUNS[name], *flags, "--optim_in_backward"]
    got, norms = curve(2, argv, tmp_path / "run")
    expected, expected_norms = after_backward[name]
    # sums in another order; in 8 bits that rounds some moments to the next code, 6 to 12 % away
    tolerance = 1e-3 if "adamw8bit" in RUNS[name] else 1e-5
    assert got == pytest.approx(expected, abs=tolerance)
    assert norms == pytest.approx(expected_norms, rel=10 * tolerance)


def check_gradients_are_gone(ranks, folder, flags, tied):
    flags = ["--lr", "1e-3", "--optim_in_backward", *flags]
    model, args = build(*flags, ranks=ranks, tie_word_embeddings=tied)
    trained = list(model.parameters())
    nonfinite = train.NonFinite(CPU)
    optimizer = train.make_optimizer(dict(model.named_parameters()), args, nonfinite.found_inf)
    step = optimizer.step
    alive = []  # in each step, the parameters that have a gradient

    def noting_step():
        alive.append([p for p in trained if p.grad is not None])
        step()

    optimizer.step = noting_step
    hooks = train.StepInBackward(optimizer, trained, nonfinite, ranks, args.fsdp2, args.replicas)
    before = [nf4.local(p)[0].clone() for p in trained]
    tokens = torch.arange(16)[None]
    model(tokens, tokens).backward()

    assert all(len(params) == 1 for params in alive), "more than one gradient alive"
    stepped = [id(params[0]) for params in alive]
    assert sorted(stepped) == sorted(map(id, trained)), "each steps once, tied ones too"
    assert all(p.grad is None for p in trained)
    assert hooks.norm() > 0
    for old, p in zip(before, trained):
        new, _ = nf4.local(p)
        assert not len(new) or not torch.equal(new, old)  # a rank may have no row of it


@pytest.mark.parametrize("tied, flags", [
    (False, []),
    (True, []),
    (False, ["--fsdp2"]),
    (True, ["--fsdp2", "--offload", "params"]),
], ids=str)
def test_one_gradient_is_alive_at_a_time(tmp_path, tied, flags):
    on_ranks(2, check_gradients_are_gone, tmp_path, flags, tied)


class WithoutFoundInf(torch.optim.SGD):
    """An optimizer as a fork adds it: it does not know found_inf and would apply inf."""


@pytest.mark.parametrize("flags", [[], EIGHT, RANDOM, ["--no-fused_adamw"], None], ids=str)
def test_the_host_waits_only_for_optimizers_that_cannot_skip_by_themselves(flags):
    nonfinite = train.NonFinite(CPU)
    p = nn.Parameter(torch.ones(4, 256, dtype=torch.bfloat16))
    if flags is None:
        optimizer = WithoutFoundInf([p], lr=1.0)
    else:
        optimizer = optimizer_of([p], *flags, found_inf=nonfinite.found_inf)
    skips_by_itself = flags in ([], EIGHT, RANDOM)
    assert getattr(optimizer, "found_inf", None) is (nonfinite.found_inf if skips_by_itself else None)
    p.grad = torch.full_like(p, torch.inf)
    nonfinite.step_if_finite(optimizer, torch.tensor(torch.inf))
    assert nonfinite.found_inf == 1
    assert (p == 1).all()


@pytest.mark.parametrize("flags", [[], EIGHT, ["--no-fused_adamw"]], ids=str)
def test_nothing_is_updated_after_a_gradient_that_is_not_finite(flags):
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    first, middle, last = params
    nonfinite = train.NonFinite(CPU)
    optimizer = optimizer_of(params, *flags, found_inf=nonfinite.found_inf)
    ranks = SimpleNamespace(world=1, device=CPU)
    args = train.parse_args([*flags, "--optim_in_backward"])
    train.StepInBackward(optimizer, params, nonfinite, ranks, args.fsdp2, args.replicas)

    def backward(scale, seed):
        # Autograd begins with what was computed last: so `last` is updated before the gradient of `middle` is seen,
        # and `first` is not.
        of_first = first.sum()
        of_middle = (middle * scale).sum()
        of_last = (last * normal((4, 4), seed)).sum()
        (of_first + of_middle + of_last).backward()
        assert nonfinite.found_inf == 1
        assert (first == 1).all()
        assert (middle == 1).all()

    def last_and_its_moments():
        moments = [x for name, x in optimizer.state[last].items() if name != "step"]
        return [x.detach().clone() for x in (last, *moments)]

    backward(float("inf"), seed=0)
    updated = last_and_its_moments()
    assert not (last == 1).all()
    backward(1.0, seed=1)  # `bad` stays 1
    for x, y in zip(last_and_its_moments(), updated):
        assert torch.equal(x, y)


@pytest.mark.rounding
def test_adamw8bit_learns_what_adamw_learns(folder, tmp_path):
    path = tmp_path / "docs.jsonl"
    lines = (data.TINY / "docs.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:400]))  # all of them would take longer to read than to train on
    argv = [
        "--model", folder, "--random_init", "--precision", "fp32",
        "--data", path, "--train_on", "all", "--seq_len", 64,
        "--steps", 80, "--lr", "4e-3",
        "--no-activation_checkpointing",  # faster, and the model is small
        "--sample", "",  # no answers before and after it
    ]
    exact = losses(1, [*argv, "--optim", "adamw"], tmp_path / "adamw")
    ours = losses(1, [*argv, "--optim", "adamw8bit"], tmp_path / "adamw8bit")
    exact_mean = sum(exact[-40:]) / 40
    our_mean = sum(ours[-40:]) / 40
    assert exact_mean < 0.5 * exact[0]  # from random weights, where moments matter most, the loss falls by half
    assert our_mean == pytest.approx(exact_mean, rel=0.005)  # the bound promised for it
