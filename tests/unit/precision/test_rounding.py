"""fp32 updates of low weights: stochastic rounding is unbiased and repeatable, Kahan exact."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.precision.low_params import round_stochastically, rounding_key

F16 = torch.float16
BF16 = torch.bfloat16
F32 = torch.float32
LOW_DTYPES = [F16, BF16]
# dtype, its largest value, halfway to the next step, which nearest rounding overflows, and a value
# beyond
EDGES = [
    (F16, 65504.0, 65520.0, 70000.0),
    (BF16, 255 * 2.0**120, 255.5 * 2.0**120, math.inf),  # fp32 ends before the next step
]


def make_key(update: int, index: int, device: torch.device) -> Tensor:
    return rounding_key(torch.tensor(update, device=device), index)


def neighbours(value: float, low: torch.dtype) -> tuple[float, float]:
    """The representable values next to one that is not, the smaller magnitude first."""
    nearest = torch.tensor(abs(value), dtype=torch.float64).to(low)
    if nearest.double().item() > abs(value):
        up = nearest
        down = torch.nextafter(nearest, torch.zeros_like(nearest))
    else:
        up = torch.nextafter(nearest, torch.full_like(nearest, math.inf))
        down = nearest
    return math.copysign(down.double().item(), value), math.copysign(up.double().item(), value)


VALUES = {  # name: value; the first four are normal in both dtypes
    "just above 1": 1.0 + 2.0**-13,
    "a third": 1 / 3,
    "minus a third": -1 / 3,
    "large": 12345.678,
    "next to a power of two": 2.0 - 2.0**-15,
    "the smallest normals of float16": 2.0**-14 * 1.0004,
    "a subnormal of float16": 2.0**-24 * 700.4,
    "minus a subnormal of float16": -(2.0**-24) * 2.3,
    "below the smallest subnormal of float16": 2.0**-24 * 0.3,
}


@pytest.mark.parametrize("low", LOW_DTYPES)
@pytest.mark.parametrize("name", VALUES)
def test_it_goes_to_a_neighbour_with_the_probability_that_makes_the_mean_exact(
    name: str, low: torch.dtype, device: torch.device
) -> None:
    x = torch.tensor(VALUES[name], dtype=F32)
    down, up = neighbours(x.item(), low)
    n = 1 << 15
    out = round_stochastically(x.to(device).expand(n), low, make_key(3, 1, device)).double().cpu()
    assert ((out == down) | (out == up)).all()
    p = (x.double().item() - down) / (up - down)
    ups = (out == up).sum().item()
    # z = 5 standard deviations of a binomial: one false alarm in 1.7 million; plus the 2**-13 steps
    # of the draws.
    assert abs(ups / n - p) <= 5 * math.sqrt(p * (1 - p) / n) + 2.0**-13
    assert 0 < ups < n


@pytest.mark.parametrize("low", LOW_DTYPES)
def test_the_mean_over_random_values_is_exact_to_its_standard_error(
    low: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(1 << 15, generator=torch.Generator().manual_seed(5)).to(device)
    errors = round_stochastically(x, low, make_key(0, 0, device)).double() - x.double()
    z = errors.mean() / (errors.std() / math.sqrt(len(x)))
    assert abs(z.item()) < 5  # one false alarm in 1.7 million
    towards_zero = (errors * x.sign()).mean() / (errors.std() / math.sqrt(len(x)))
    assert abs(towards_zero.item()) < 5  # truncation would show here, hidden by symmetry above


@pytest.mark.parametrize("low", LOW_DTYPES)
def test_a_representable_value_never_moves(low: torch.dtype, device: torch.device) -> None:
    """All 65,536 bit patterns: normals, subnormals, zeros of both signs, infinities, NaN."""
    patterns = (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(low).to(device)
    )
    for update in range(3):
        out = round_stochastically(patterns.float(), low, make_key(update, 0, device))
        real = ~patterns.isnan()
        # signs of zero included
        assert torch.equal(out[real].view(torch.int16), patterns[real].view(torch.int16))
        assert out[~real].isnan().all()


@pytest.mark.parametrize("low", LOW_DTYPES)
def test_inf_and_nan_stay_and_signs_are_kept(low: torch.dtype, device: torch.device) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1e-30, -1e-30], device=device)
    out = round_stochastically(x, low, make_key(0, 0, device))
    assert out[0] == math.inf
    assert out[1] == -math.inf
    assert out[2].isnan()
    assert out.signbit().tolist()[3:] == [True, False, True]


@pytest.mark.parametrize(("low", "top", "halfway", "beyond"), EDGES)
def test_what_nearest_keeps_finite_stays_finite_and_what_it_overflows_overflows(
    low: torch.dtype, top: float, halfway: float, beyond: float, device: torch.device
) -> None:
    inside = torch.linspace(top, halfway, 4096, dtype=torch.float64, device=device)[:-1].float()
    assert inside.to(low).isfinite().all()
    for sign in (1, -1):
        out = round_stochastically(sign * inside, low, make_key(0, 0, device))
        assert (out == sign * top).all()
        out = round_stochastically(
            torch.full((4096,), sign * beyond, device=device), low, make_key(0, 0, device)
        )
        assert (out == sign * math.inf).all()


@pytest.mark.parametrize("low", LOW_DTYPES)
def test_the_draws_are_a_function_of_update_parameter_and_element(
    low: torch.dtype, device: torch.device
) -> None:
    x = torch.full((4096,), 1.0 + 2.0**-12, device=device)
    one = round_stochastically(x, low, make_key(7, 2, device))
    assert torch.equal(one, round_stochastically(x, low, make_key(7, 2, device)))
    # the shape does not matter
    assert torch.equal(
        one, round_stochastically(x.view(64, 64), low, make_key(7, 2, device)).view(-1)
    )
    assert torch.equal(one[:100], round_stochastically(x[:100], low, make_key(7, 2, device)))
    # nor the device
    assert torch.equal(
        one, round_stochastically(x.cpu(), low, make_key(7, 2, torch.device("cpu"))).to(device)
    )
    for other_key in (make_key(8, 2, device), make_key(7, 3, device)):
        differs = (round_stochastically(x, low, other_key) != one).float().mean().item()
        # of rounding up, so two independent draws differ with 2 p (1 - p)
        p = 2.0**-2 if low == F16 else 2.0**-5
        assert differs == pytest.approx(2 * p * (1 - p), abs=5 * math.sqrt(0.25 / 4096))  # z = 5


def test_a_key_far_into_training_is_a_key(device: torch.device) -> None:
    keys = [make_key(u, i, device).item() for u in (0, 1, 10**6, 2**31 - 1) for i in (0, 1, 10**4)]
    assert len(set(keys)) == len(keys)


def test_torchs_generator_is_left_alone(device: torch.device) -> None:
    before = torch.get_rng_state()
    round_stochastically(torch.randn(0, device=device), F16, make_key(0, 0, device))
    round_stochastically(torch.ones(100, device=device), F16, make_key(1, 0, device))
    assert torch.equal(torch.get_rng_state(), before)


class Drift(nn.Module):
    """A weight whose loss has gradient exactly 1: SGD subtracts lr at every update."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((256,), start))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w.float() * x).sum()


def train_drift(
    rounding: str, dtype: str, device: torch.device, lr: float, updates: int
) -> tuple[Tensor, hs.TrainStep]:
    net = Drift(1.0).to(device)
    precision = hs.Precision(dtype, rounding=rounding)
    step = hs.TrainStep(net, None, torch.optim.SGD(net.parameters(), lr=lr), precision=precision)
    for _ in range(updates):
        step(torch.ones(256, device=device))
    return net.w.detach().double(), step


# 0.06 of a unit of float16 at 1 (below it the unit is 2**-11, and 6e-5 is an eighth of one)
UPDATES = 400
LR = 6e-5


def test_nearest_loses_small_updates(device: torch.device) -> None:
    w, _ = train_drift("nearest", "fp16", device, LR, UPDATES)
    assert torch.equal(w, torch.ones_like(w))


def test_kahan_lands_on_the_exact_sum(device: torch.device) -> None:
    w, step = train_drift("kahan", "fp16", device, LR, UPDATES)
    exact = 1.0 - UPDATES * LR
    # Half a unit of float16 below 1 for the stored weight, and 400 fp32 roundings of hi + lo, which
    # have 11 + 11 bits.
    assert (w - exact).abs().max().item() <= 2.0**-12 + UPDATES * 2.0**-24
    weight_and_residue = w + step.state.residue[0].double()
    assert (weight_and_residue - exact).abs().max().item() <= UPDATES * 2.0**-23


def test_stochastic_lands_near_the_exact_sum_and_on_it_in_the_mean(device: torch.device) -> None:
    w, _ = train_drift("stochastic", "fp16", device, LR, UPDATES)
    exact = 1.0 - UPDATES * LR
    unit = 2.0**-11
    p = LR / unit
    sigma = unit * math.sqrt(UPDATES * p * (1 - p))  # a sum of independent roundings
    # z = 6 for 256 elements: one false alarm in a million
    assert (w - exact).abs().max().item() <= 6 * sigma
    assert abs(w.mean().item() - exact) <= 5 * sigma / math.sqrt(256)


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_small_updates_move_a_weight_of_one(rounding: str, device: torch.device) -> None:
    half, _ = train_drift(rounding, "fp16", device, 6e-4, 100)
    # z = 6 when stochastic
    assert (half - 0.94).abs().max().item() <= 2.0**-12 + 6 * 2.0**-11 * math.sqrt(100 * 0.25)
    brain, _ = train_drift(rounding, "bf16", device, 1e-3, 100)
    assert (brain.mean() - 0.9).abs().item() <= 2.0**-9 + 6 * 2.0**-8 * math.sqrt(100 * 0.25 / 256)
    nearest, _ = train_drift("nearest", "bf16", device, 1e-3, 100)
    assert torch.equal(nearest, torch.ones_like(nearest))


def make_regression(device: torch.device) -> tuple[nn.Linear, Tensor, Tensor]:
    net = nn.Linear(8, 4, bias=False).to(device)
    nn.init.uniform_(net.weight, 0.5, 1.0)
    net.weight.data = net.weight.data.half().float()  # every start below is the same
    return net, torch.randn(16, 8, device=device), torch.randn(16, 4, device=device)


def test_kahan_tracks_an_fp32_master_over_a_thousand_updates(device: torch.device) -> None:
    """The gradients are fixed, so that only the storage of the weights differs."""
    net, *_ = make_regression(device)
    master = net.weight.detach().clone()
    grads = torch.randn(1000, *master.shape, generator=torch.Generator().manual_seed(2)).to(device)
    step = hs.TrainStep(
        net,
        None,
        torch.optim.SGD(net.parameters(), lr=1e-3),
        precision=hs.Precision("fp16", rounding="kahan"),
        forward=lambda n, g: (n.weight.float() * g).sum(),
    )
    for g in grads:
        step(g)
        master -= 1e-3 * g.half().float()  # backward through the half weight rounds its gradient
    weight_and_residue = net.weight.double() + step.state.residue[0].double()
    # hi + lo hold 22 bits of a value below 1 (2**-23 relative per update), fp32 arithmetic adds
    # 2**-24: a random walk of 1,000 steps at z = 6 stays below 6 · sqrt(1000) · 1.5 · 2**-23.
    bound = 6 * math.sqrt(1000) * 1.5 * 2.0**-23
    assert (weight_and_residue - master.double()).abs().max().item() <= bound
    assert (net.weight.double() - master.double()).abs().max().item() <= 2.0**-12 + bound


def make_adam_step(rounding: str, device: torch.device) -> tuple[hs.TrainStep, Tensor, Tensor]:
    net, x, y = make_regression(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    return (
        hs.TrainStep(
            net, nn.MSELoss(), optimizer, precision=hs.Precision("fp16", rounding=rounding)
        ),
        x,
        y,
    )


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_the_optimizers_state_is_fp32_and_stays_so_through_a_round_trip(
    rounding: str, device: torch.device
) -> None:
    step, x, y = make_adam_step(rounding, device)
    for _ in range(3):
        step(x, y)
    moments = next(iter(step.optimizer.state.values()))
    assert {k: v.dtype for k, v in moments.items()} == {
        "step": F32,
        "exp_avg": F32,
        "exp_avg_sq": F32,
    }
    # not rounded on the way either
    assert not torch.equal(moments["exp_avg"], moments["exp_avg"].half().float())
    saved = copy.deepcopy(step.state_dict())
    torch.manual_seed(0)
    twin, *_ = make_adam_step(rounding, device)
    twin.load_state_dict(saved)
    loaded = next(iter(twin.optimizer.state.values()))
    assert all(torch.equal(loaded[k], moments[k]) and loaded[k].dtype == F32 for k in moments)
    records: list[Any] = [(step(x, y).loss, twin(x, y).loss) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in records)
    assert torch.equal(step.net.weight, twin.net.weight)
    assert (step.net.weight.dtype, twin.net.weight.dtype) == (F16, F16)
