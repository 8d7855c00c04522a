"""Schedules: MindSpore's tables bit for bit, torch's schedulers step by step, and everything that is refused."""

import copy
import math
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

import halfstep as hs
from halfstep import schedules
from halfstep.schedules import (
    Schedule,
    constant,
    cosine,
    from_torch,
    one_cycle,
    per_epoch,
    resolve,
    sequence,
    tables,
)

N = 40


def bits(values: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float64).astype(np.float32))


# MindSpore's tables, restated with whole arrays: i counts updates, w of them warm up, t is their number.


def in_steps(top: float, t: int) -> Any:
    i = np.arange(t)
    return np.select(
        [i < 0.3 * t, i < 0.6 * t, i < 0.8 * t], [top, top * 0.1, top * 0.01], top * 0.001
    )


def in_poly(low: float, top: float, w: int, t: int) -> Any:
    i = np.arange(t, dtype=np.float64)
    slope = (top - low) / w if w else 0
    left = 1.0 - (i - w) / (t - w)
    return np.where(i < w, low + slope * i, np.maximum(top * left * left, 0))


def in_lines(low: float, top: float, end: float, w: int, t: int) -> Any:
    i = np.arange(t, dtype=np.float64)
    return np.where(i < w, low + (top - low) * i / max(w, 1), top - (top - end) * (i - w) / (t - w))


def in_cosine(top: float, w: int, t: int) -> Any:
    wave = np.array([math.cos(math.pi * 2 * 0.47 * i / (t - w)) for i in range(t)])
    i = np.arange(t)
    return np.where(
        i < w, top / max(w, 1) * (i + 1), top * ((t - i) / (t - w) * (0.5 * (1 + wave)) + 0.00001)
    )


@pytest.mark.parametrize(
    ("w", "t"), [(7810, 15620), (0, 15620), (3, 10), (1, 7), (0, 1), (156, 157)]
)
@pytest.mark.parametrize(
    ("low", "top", "end"), [(0.01, 0.1, 0.00001), (0.0, 1, 0), (0.3, 0.07, 0.011)]
)
def test_mindspore_tables_bit_for_bit(low: float, top: float, end: float, w: int, t: int) -> None:
    pairs = {
        schedules.steps(top, t): in_steps(top, t),
        schedules.poly(top, t, warmup=w, start=low): in_poly(low, top, w, t),
        schedules.linear(top, t, warmup=w, start=low, end=end): in_lines(low, top, end, w, t),
        schedules.warmup_cosine(top, t, warmup=w): in_cosine(top, w, t),
    }
    for schedule, expected in pairs.items():
        assert torch.equal(schedule.table(t, dtype=torch.float32), bits(expected)), schedule
        assert torch.equal(schedule.table(t), torch.from_numpy(expected.astype(np.float64))), (
            schedule
        )


def test_the_resnet_run_of_mindspore() -> None:
    """10 epochs of 1562 updates, 5 of them warm-up, from 0.01 to 0.1: corner values by hand."""
    rate = schedules.poly(0.1, 15620, warmup=7810, start=0.01).at
    assert (rate(0), rate(7810)) == (0.01, 0.1)
    assert rate(3905) == pytest.approx(0.055, rel=1e-15)  # half-way up; one rounding per operation
    assert rate(11715) == 0.025  # half-way down: a quarter
    assert rate(15619) == pytest.approx(
        0.1 / 7810**2, rel=1e-11
    )  # 1 - x loses log10(7810) digits of 16


def test_warm_up_and_milestones_of_steps() -> None:
    schedule = schedules.steps(
        1.0, 10, milestones=(4, 0.8), factors=(0.5, 0.25), warmup=2, start=0.5
    )
    assert [schedule.at(i) for i in range(10)] == [0.5, 0.75, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_cosine_is_torchs() -> None:
    optimizer = sgd(0.3)
    theirs = run(lrs.CosineAnnealingLR(optimizer, T_max=N, eta_min=0.01), N)[0]
    # torch multiplies N times, each with a relative rounding of about 4 ulp
    assert cosine(0.3, N, end=0.01).table(N) == pytest.approx(theirs, rel=4 * N * 2**-52)
    warm = cosine(0.3, N, warmup=10, start=0.1, end=0.01)
    assert [warm.at(i) for i in (0, 5, 10)] == pytest.approx([0.1, 0.2, 0.3], rel=1e-15)
    assert warm.at(25) == pytest.approx(0.155, rel=1e-15)


CYCLES = [(total, rise) for total in (1, 2, 7, N) for rise in (0.0, 0.3, 0.5, 0.99)]


@pytest.mark.parametrize("shape", ["cos", "linear"])
@pytest.mark.parametrize(
    ("total", "rise"), [c for c in CYCLES if c != (2, 0.5)]
)  # there torch divides by zero
def test_one_cycle_is_torchs_bit_for_bit(total: int, rise: float, shape: Any) -> None:
    options = {"max_lr": 0.7, "total_steps": total, "pct_start": rise, "anneal_strategy": shape}
    theirs = run(
        lrs.OneCycleLR(
            sgd(1.0), **options, div_factor=10, final_div_factor=100, cycle_momentum=False
        ),
        total,
    )
    ours = one_cycle(0.7, total, rise=rise, div=10, final_div=100, shape=shape)
    assert ours.table(total).tolist() == theirs[0]


def test_one_cycle_where_torch_divides_by_zero() -> None:
    assert one_cycle(0.7, 2, rise=0.5).at(0) == 0.7


@given(updates=st.integers(1, 60), data=st.data())
def test_every_rate_lies_between_its_ends(updates: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, updates))
    start, lr, end = (data.draw(st.floats(0, 10)) for _ in range(3))
    top = max(start, lr, end) * (1 + 4 * 2**-52)
    for make in (schedules.linear, cosine):
        rates = make(lr, updates, warmup=warmup, start=start, end=end).table(updates)
        assert rates.max() <= top
        assert warmup == updates or rates[warmup] == pytest.approx(lr, rel=4 * 2**-52)
        assert rates[0] == (start if warmup else pytest.approx(lr, rel=4 * 2**-52))


def test_a_schedule_is_a_value() -> None:
    a, b = (schedules.poly(0.1, 10, warmup=2) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != schedules.poly(0.1, 10, warmup=3)
    assert pickle.loads(pickle.dumps(a)) == a
    assert repr(a) == "poly(lr=0.1, updates=10, warmup=2, start=0.0)"
    assert repr(sequence(range(9))) == "sequence(values=<9 values>)"
    with pytest.raises(AttributeError):
        a.length = 3  # type: ignore[misc]


def test_a_table_starts_anywhere_and_rounds_once() -> None:
    schedule = cosine(0.1, 100)
    whole = schedule.table(100)
    assert whole.dtype == torch.float64
    assert torch.equal(schedule.table(30, start=50), whole[50:80])
    assert torch.equal(schedule.table(100, "cpu", torch.float32), whole.float())
    assert [schedule.at(i) for i in range(100)] == whole.tolist()


def test_groups_that_share_a_schedule_share_its_computation() -> None:
    calls: list[int] = []
    shared = schedules.function(lambda i: calls.append(i) or 0.5)
    table = tables([shared, constant(0.25), shared], 4)
    assert calls == [0, 1, 2, 3]
    assert torch.equal(
        table, torch.tensor([[0.5], [0.25], [0.5]], dtype=torch.float64).expand(3, 4)
    )


def test_an_epoch_holds_its_rate() -> None:
    schedule = per_epoch(sequence([3.0, 2.0, 1.0]), 4)
    assert schedule.table(12).tolist() == [3] * 4 + [2] * 4 + [1] * 4
    assert per_epoch(constant(1.0), 4).length is None
    with pytest.raises(ValueError, match="rates for 13 updates, received 12"):
        schedule.at(12)


@pytest.mark.parametrize(
    "schedule", [sequence([1.0, 2.0]), cosine(1.0, 2), schedules.poly(1.0, 2)], ids=repr
)
def test_past_the_end_is_an_error(schedule: Schedule) -> None:
    schedule.table(2)
    for ask in (
        lambda: schedule.at(2),
        lambda: schedule.table(3),
        lambda: schedule.table(1, start=2),
    ):
        with pytest.raises(
            ValueError, match=r"expected rates for 3 updates, received 2; build it for 3"
        ):
            ask()
    with pytest.raises(ValueError, match="count from 0, received -1"):
        schedule.at(-1)


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: constant(-1.0),
        ValueError,
        "constant: lr: expected a finite rate of 0 or more, received -1.0",
    ),
    (lambda: constant(math.nan), ValueError, "received nan"),
    (lambda: constant("0.1"), TypeError, "constant: lr: expected a number, received str '0.1'"),
    (lambda: constant(True), TypeError, "received bool"),
    (
        lambda: cosine(0.1, 0),
        ValueError,
        "cosine: updates: expected a whole number of updates, 1 or more, received 0",
    ),
    (
        lambda: cosine(0.1, 10.0),
        TypeError,
        "cosine: updates: expected a whole number of updates, 1 or more, received 10.0",
    ),
    (
        lambda: cosine(0.1, 10, warmup=11),
        ValueError,
        "a warm-up within its 10 updates, received 11",
    ),
    (
        lambda: cosine(0.1, 10, warmup=-1),
        ValueError,
        "cosine: warmup: expected a whole number of updates, 0 or more, received -1",
    ),
    (lambda: cosine(0.1, 10, start=-0.1), ValueError, "cosine: start"),
    (lambda: cosine(0.1, 10, end=math.inf), ValueError, "cosine: end"),
    (lambda: schedules.linear(0.1, 10, end=-1), ValueError, "linear: end"),
    (
        lambda: schedules.steps(0.1, 10, milestones=(30.0,), factors=(0.1,)),
        ValueError,
        "inside 10 updates.*30.0",
    ),
    (
        lambda: schedules.steps(0.1, 10, milestones=(6, 0.3), factors=(0.1, 0.1)),
        ValueError,
        "increasing",
    ),
    (lambda: schedules.steps(0.1, 10, milestones=("a",), factors=(0.1,)), ValueError, "increasing"),
    (
        lambda: schedules.steps(0.1, 10, milestones=(6,)),
        ValueError,
        "one factor per milestone, received 3 for 1",
    ),
    (lambda: one_cycle(0.1, 10, rise=1.0), ValueError, "rise as a fraction"),
    (lambda: one_cycle(0.1, 10, div=0), ValueError, "div as a positive number, received 0"),
    (
        lambda: one_cycle(0.1, 10, shape="cosine"),
        ValueError,
        "'cos' or 'linear', received 'cosine'",
    ),  # type: ignore[arg-type]
    (lambda: sequence([]), ValueError, "at least one rate"),
    (
        lambda: sequence([0.1, -2.0]),
        ValueError,
        "rate of update 1: expected a finite rate of 0 or more",
    ),
    (
        lambda: sequence(torch.zeros(2, 2)),
        TypeError,
        "rate of update 0: expected a number, received list",
    ),
    (lambda: sequence("0.1"), TypeError, "expected numbers, one per update, received str"),
    (lambda: schedules.function(0.1), TypeError, "expected a function update -> rate"),  # type: ignore[arg-type]
    (
        lambda: schedules.function(lambda i: -1.0).at(3),
        ValueError,
        "<lambda> gives at update 3.*received -1.0",
    ),
    (
        lambda: schedules.function(lambda i: None).at(3),
        TypeError,
        "expected a number, received NoneType",
    ),
    (
        lambda: per_epoch([0.1], 3),
        TypeError,
        r"expected a schedule, received list; wrap it: sequence\(\[...\]\)",
    ),
    (
        lambda: from_torch(cosine(1.0, 3), 3),
        TypeError,
        "torch.optim.lr_scheduler, received Schedule",
    ),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "error", "match"), BAD, ids=range(len(BAD)))
def test_bad_settings_are_refused_when_built(
    make: Callable[[], Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make()


def sgd(*rates: float | Tensor, **options: Any) -> torch.optim.SGD:
    groups = [
        {"params": [nn.Parameter(torch.ones(2))], "lr": r, "name": f"g{i}"}
        for i, r in enumerate(rates)
    ]
    return torch.optim.SGD(groups, lr=9.0, **options)


def run(scheduler: Any, updates: int) -> list[list[float]]:
    """The rates that a loop of optimizer.step() and scheduler.step() really uses, one row per group."""
    optimizer, used = scheduler.optimizer, []
    for i in range(updates):
        used.append([float(g["lr"]) for g in optimizer.param_groups])
        optimizer.step()
        if i < updates - 1:
            scheduler.step()
    return [list(row) for row in zip(*used, strict=True)]


class Falling:
    """A factor that is a callable object with a memory: a copy must leave it alone."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / (1 + epoch + self.calls)


class Own(lrs.LRScheduler):
    """A user's scheduler, which multiplies the rate it finds."""

    def get_lr(self) -> list[Any]:
        return [g["lr"] * (1 - 0.01 * i) for i, g in enumerate(self.optimizer.param_groups, 1)]


def warm_then_cosine(o: Any) -> Any:
    return lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=5), lrs.CosineAnnealingLR(o, 20)], milestones=[5]
    )


TORCH: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, [Falling(), lambda e: 0.9**e]),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda e: 1 - e / 100),
    "StepLR": lambda o: lrs.StepLR(o, 7, 0.3),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [3, 3, 20], 0.3),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.3, 9),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.1, 0.9, 30),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.93),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 25, 1.7),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 15, 0.01),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 5, 2),
    "OneCycleLR": lambda o: lrs.OneCycleLR(
        o, [0.5, 0.3], N, cycle_momentum=False, three_phase=True
    ),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.1, 0.4, 6, mode="triangular2", cycle_momentum=False),
    "CyclicLR by range": lambda o: lrs.CyclicLR(
        o, 0.1, 0.4, 6, mode="exp_range", gamma=0.9, cycle_momentum=False
    ),
    "CyclicLR by function": lambda o: lrs.CyclicLR(
        o, 0.1, 0.4, 6, scale_fn=lambda x: 0.5**x, cycle_momentum=False
    ),
    "SequentialLR": warm_then_cosine,
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.1, 4), lrs.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, 0.01, 8),
    "Own": Own,
}


def test_every_scheduler_of_torch_is_here() -> None:
    assert set(lrs.__all__) - set(TORCH) == {"LRScheduler", "ReduceLROnPlateau"}


@pytest.mark.filterwarnings(
    "ignore:The epoch parameter:UserWarning"
)  # torch's own SequentialLR, in some versions
@pytest.mark.parametrize("name", TORCH)
def test_a_scheduler_of_torch_gives_its_table_and_stays_as_it_was(name: str) -> None:
    optimizer = sgd(0.5, 0.2)
    scheduler = TORCH[name](optimizer)
    groups, state = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(scheduler.state_dict())
    table = tables(resolve(scheduler, optimizer, N), N).tolist()
    assert optimizer.state_dict() == groups
    assert repr(scheduler.state_dict()) == repr(state)
    assert not hasattr(optimizer, "_opt_called"), (
        "torch still warns the user who steps in the wrong order"
    )
    assert table == run(scheduler, N)


def test_rates_that_are_tensors_are_rolled_in_their_dtype() -> None:
    optimizer = sgd(torch.tensor(0.5), torch.tensor(0.2), foreach=False)
    scheduler = lrs.ExponentialLR(optimizer, 0.9)
    table = tables(from_torch(scheduler, 9), 9).tolist()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert table == run(scheduler, 9)


def test_parameters_are_not_copied_and_optimizer_state_not_touched() -> None:
    net = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    scheduler = lrs.LambdaLR(optimizer, lambda e: float(net.weight.shape[0]) / (e + 3))
    from_torch(scheduler, 5)
    after = optimizer.state_dict()["state"]
    assert all(
        torch.equal(after[i][k], v)
        for i, values in before["state"].items()
        for k, v in values.items()
    )


def test_an_optimizers_state_is_not_copied() -> None:
    """Moments may fill half the memory; here one cannot be copied at all."""
    optimizer = sgd(1.0)
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"lock": threading.Lock()}
    assert from_torch(lrs.ExponentialLR(optimizer, 0.5), 2)[0].table(2).tolist() == [1.0, 0.5]


def test_a_scheduler_stepped_per_epoch() -> None:
    scheduler = lrs.StepLR(sgd(1.0), 1, 0.5)
    (schedule,) = from_torch(scheduler, 10, every=4)
    assert schedule.table(10).tolist() == [1.0] * 4 + [0.5] * 4 + [0.25] * 2


def test_a_scheduler_in_the_middle_of_its_run() -> None:
    optimizer = sgd(1.0)
    scheduler = lrs.ExponentialLR(optimizer, 0.5)
    run(scheduler, 3)
    with pytest.raises(
        ValueError,
        match=r"not been stepped.*build the scheduler anew.*from_torch\(scheduler, updates",
    ):
        resolve(scheduler, optimizer, 4)
    assert from_torch(scheduler, 3)[0].table(3).tolist() == [0.25, 0.125, 0.0625]
    chained = lrs.ChainedScheduler([scheduler])
    with pytest.raises(ValueError, match="received ChainedScheduler in the middle"):
        resolve(chained, optimizer, 4)


class Locked(lrs.LRScheduler):
    def __init__(self, optimizer: Any) -> None:
        self.lock = threading.Lock()
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [0.1]


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, whose groups are its groups."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.defaults = inner, inner.defaults

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups


def by_hand(scheduler: Any, rate: float) -> Any:
    scheduler.optimizer.param_groups[0]["lr"] = rate
    return scheduler


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "plateau": (
        lambda: lrs.ReduceLROnPlateau(sgd(0.1)),
        r"follows a measured value.*hs\.ReduceLROnPlateau",
    ),
    "momentum": (
        lambda: lrs.OneCycleLR(sgd(0.1, momentum=0.9), 0.5, N),
        "changes momentum besides the learning rate.*cycle_momentum=False",
    ),
    "betas": (
        lambda: lrs.CyclicLR(torch.optim.Adam([nn.Parameter(torch.ones(1))]), 0.1, 0.4, 6),
        "CyclicLR changes betas",
    ),
    "over": (
        lambda: lrs.OneCycleLR(sgd(0.1), 0.5, N // 2, cycle_momentum=False),
        "OneCycleLR was built for 20 updates and 40 are asked for; build it with total_steps=40",
    ),
    "not copied": (
        lambda: Locked(sgd(0.1)),
        "Locked cannot be run ahead.*it cannot be copied.*list of rates",
    ),
    "wrapped": (lambda: Own(Wrapper(sgd(0.1))), "its optimizer Wrapper wraps another one"),
    "by hand": (
        lambda: by_hand(lrs.ExponentialLR(sgd(0.1), 0.5), 0.3),
        r"as ExponentialLR left them, \[0.1\], received \[0.3\]; build the optimizer and its scheduler anew",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_scheduler_that_is_no_table_is_refused(case: str) -> None:
    make, match = REFUSED[case]
    scheduler = make()
    before = [g["lr"] for g in scheduler.optimizer.param_groups]
    for ask in (
        lambda: from_torch(scheduler, N),
        lambda: resolve(scheduler, scheduler.optimizer, N),
    ):
        with pytest.raises(ValueError, match=match):
            ask()
    assert [g["lr"] for g in scheduler.optimizer.param_groups] == before


def test_a_scheduler_needs_its_optimizer_and_the_number_of_updates() -> None:
    scheduler = lrs.ExponentialLR(sgd(0.1), 0.5)
    with pytest.raises(ValueError, match="ExponentialLR drives another optimizer"):
        resolve(scheduler, sgd(0.1), 4)
    with pytest.raises(
        ValueError, match=r"number of updates must be known; give from_torch\(scheduler, updates\)"
    ):
        resolve(scheduler, scheduler.optimizer)


GIVEN: dict[str, tuple[Any, list[list[float]]]] = {
    "number": (0.5, [[0.5, 0.5], [0.5, 0.5]]),
    "numpy number": (np.float32(0.5), [[0.5, 0.5], [0.5, 0.5]]),
    "tensor number": (torch.tensor(0.5), [[0.5, 0.5], [0.5, 0.5]]),
    "list": ([0.5, 0.25], [[0.5, 0.25], [0.5, 0.25]]),
    "tensor": (torch.tensor([0.5, 0.25]), [[0.5, 0.25], [0.5, 0.25]]),
    "array": (np.array([0.5, 0.25], dtype=np.float32), [[0.5, 0.25], [0.5, 0.25]]),
    "list of 0-dim tensors": ([torch.tensor(0.5), torch.tensor(0.25)], [[0.5, 0.25], [0.5, 0.25]]),
    "range": (range(1, 3), [[1, 2], [1, 2]]),
    "schedule": (sequence([0.5, 0.25]), [[0.5, 0.25], [0.5, 0.25]]),
    "function": (lambda i: 1 / (i + 1), [[1, 0.5], [1, 0.5]]),
    "function of tensors": (lambda i: torch.tensor(0.5) ** i, [[1, 0.5], [1, 0.5]]),
    "rows": ([[0.5, 0.25], [1, 2]], [[0.5, 0.25], [1, 2]]),
    "2-D tensor": (torch.tensor([[0.5, 0.25], [1, 2]]), [[0.5, 0.25], [1, 2]]),
    "list of schedules": ([sequence([0.5, 0.25]), lambda i: i], [[0.5, 0.25], [0, 1]]),
    "list with a number": ([0.75, sequence([0.5, 0.25])], [[0.75, 0.75], [0.5, 0.25]]),
    "dict by index": ({1: [0.5, 0.25]}, [[8, 8], [0.5, 0.25]]),
    "dict by name": ({"g0": 0.25, "g1": lambda i: i}, [[0.25, 0.25], [0, 1]]),
    "empty dict": ({}, [[8, 8], [4, 4]]),
}


@pytest.mark.parametrize("form", GIVEN)
def test_what_may_be_given_as_learning_rate(form: str) -> None:
    value, expected = GIVEN[form]
    found = resolve(value, sgd(8.0, 4.0), 2)
    assert torch.equal(tables(found, 2), torch.tensor(expected, dtype=torch.float64))


WRONG: list[tuple[Any, type[Exception], str]] = [
    ("cosine", TypeError, "schedule: received str. Accepted: a number; a list, array or tensor"),
    (None, TypeError, "schedule: received NoneType. Accepted"),
    (object(), TypeError, "schedule: received object. Accepted"),
    (Falling, TypeError, "schedule: received type. Accepted"),
    (iter([0.1]), TypeError, "schedule: received list_iterator. Accepted"),
    (torch.zeros(2, 2, 2), TypeError, r"schedule\[0\]: received list. Accepted"),
    ([0.1, "cosine"], TypeError, r"schedule\[1\]: received str. Accepted"),
    ({"g1": "cosine"}, TypeError, r"schedule\['g1'\]: received str. Accepted"),
    (
        [cosine(0.1, 9)],
        ValueError,
        r"per parameter group, 2 in all \(0 \('g0'\), 1 \('g1'\)\), received 1. Accepted",
    ),
    ([[0.1] * 9] * 3, ValueError, "received 3. Accepted"),
    (
        {"g2": 0.1},
        ValueError,
        r"no parameter group is called 'g2'; groups are: 0 \('g0'\), 1 \('g1'\)",
    ),
    ({2: 0.1}, ValueError, "no parameter group is called 2"),
    ({-1: 0.1}, ValueError, "no parameter group is called -1"),
    ({True: 0.1}, ValueError, "called True"),
    ({"g1": 0.1, 1: 0.2}, ValueError, "group 1 is given twice, the second time as 1"),
    (
        [0.1] * 8,
        ValueError,
        "rates for 9 updates, received 8; build it for 9 updates, or train for 8 at most",
    ),
    (
        {"g1": cosine(0.1, 8)},
        ValueError,
        r"cosine\(lr=0.1, updates=8.*rates for 9 updates, received 8",
    ),
    (-0.1, ValueError, "finite rate of 0 or more, received -0.1"),
]


@pytest.mark.parametrize(("value", "error", "match"), WRONG, ids=range(len(WRONG)))
def test_what_is_refused_as_learning_rate(value: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        resolve(value, sgd(8.0, 4.0), 9)


def test_a_scheduler_cannot_drive_one_group_of_several() -> None:
    optimizer = sgd(8.0, 4.0)
    with pytest.raises(
        TypeError,
        match=r"schedule\['g0'\]: received ExponentialLR; a scheduler of torch drives all",
    ):
        resolve({"g0": lrs.ExponentialLR(optimizer, 0.5)}, optimizer, 9)


def test_two_groups_of_one_name_are_told_apart_by_number() -> None:
    optimizer = sgd(8.0, 4.0)
    optimizer.param_groups[1]["name"] = "g0"
    with pytest.raises(ValueError, match="2 groups are called 'g0'"):
        resolve({"g0": 0.1}, optimizer, 9)
    assert [s.at(0) for s in resolve({1: 0.1}, optimizer, 9)] == [8.0, 0.1]


def test_a_length_is_checked_only_where_the_end_is_known() -> None:
    assert resolve([0.1, 0.2], sgd(1.0))[0].length == 2


def two_groups() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    groups = [
        {"params": net[0].parameters(), "lr": 0.5},
        {"params": net[1].parameters(), "lr": 0.2},
    ]
    return net, torch.optim.SGD(groups, momentum=0.9)


@pytest.mark.parametrize("name", ["ExponentialLR", "SequentialLR", "OneCycleLR"])
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_a_step_with_the_table_is_torchs_loop_bit_for_bit_and_skips_do_not_move_it(
    name: str,
) -> None:
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    net, optimizer = two_groups()
    scheduler = TORCH[name](optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        scheduler.step()
    ours, optimizer = two_groups()
    table = tables(resolve(TORCH[name](optimizer), optimizer, N), N)
    step = hs.TrainStep(ours, nn.MSELoss(), optimizer, precision="fp64", lr=table, nonfinite="skip")
    for i in range(6):
        assert torch.equal(step(x, y).lr, table[:, i])
        assert step(x * math.inf, y).skipped
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), ours.parameters(), strict=True))


def test_the_end_of_one_cycle_counts_from_where_it_stands() -> None:
    scheduler = lrs.OneCycleLR(sgd(0.1), 0.5, 10, cycle_momentum=False)
    run(scheduler, 5)  # rates of 5 updates, so that step() was called four times
    assert len(from_torch(scheduler, 7)[0].table(7)) == 7
    with pytest.raises(
        ValueError,
        match=r"built for 10 updates, 4 of which are over, and 8 are asked for.*steps=12",
    ):
        from_torch(scheduler, 8)


def stepped(act: str) -> list[str]:
    """What torch says when the first update overflows and the user's own scheduler is stepped all the same."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler, x = lrs.StepLR(optimizer, 2), torch.full((2, 3), math.inf)
    with warnings.catch_warnings(record=True, action="always") as said:
        if act == "step":
            scale = hs.Precision("fp32", scale=hs.DynamicScale())
            assert hs.TrainStep(net, nn.MSELoss(), optimizer, precision=scale)(
                x, torch.zeros(2, 2)
            ).skipped
        elif act == "scaler":
            scaler = hs.amp.GradScaler(device="cpu")
            scaler.scale(nn.functional.mse_loss(net(x), torch.zeros(2, 2))).backward()
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
    return [str(each.message) for each in said]


def test_a_skipped_first_update_is_no_wrong_order_for_torchs_scheduler() -> None:
    """In a loop with a TrainStep and in one with a GradScaler; without either, torch's warning is right and stays."""
    assert stepped("step") == stepped("scaler") == []
    assert "`lr_scheduler.step()` before `optimizer.step()`" in stepped("nothing")[0]
