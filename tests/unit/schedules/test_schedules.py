"""Schedules: MindSpore's tables bit for bit, torch's schedulers step by step, and the errors."""

import copy
import itertools
import math
import pickle
import re
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

UPDATES = 40


def as_float32(values: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float64).astype(np.float32))


# MindSpore's tables, restated with numpy arrays. i: the update; warmup, total: numbers of updates.


def mindspore_steps(lr: float, total: int) -> Any:
    i = np.arange(total)
    conditions = [i < 0.3 * total, i < 0.6 * total, i < 0.8 * total]
    return np.select(conditions, [lr, lr * 0.1, lr * 0.01], lr * 0.001)


def mindspore_poly(start: float, lr: float, warmup: int, total: int) -> Any:
    i = np.arange(total, dtype=np.float64)
    slope = (lr - start) / warmup if warmup else 0
    remaining = 1.0 - (i - warmup) / (total - warmup)
    falling = np.maximum(lr * remaining * remaining, 0)
    return np.where(i < warmup, start + slope * i, falling)


def mindspore_linear(start: float, lr: float, end: float, warmup: int, total: int) -> Any:
    i = np.arange(total, dtype=np.float64)
    rising = start + (lr - start) * i / max(warmup, 1)
    falling = lr - (lr - end) * (i - warmup) / (total - warmup)
    return np.where(i < warmup, rising, falling)


def mindspore_cosine(lr: float, warmup: int, total: int) -> Any:
    i = np.arange(total)
    decay = total - warmup
    cosines = np.array([math.cos(math.pi * 2 * 0.47 * update / decay) for update in range(total)])
    rising = lr / max(warmup, 1) * (i + 1)
    falling = lr * ((total - i) / decay * (0.5 * (1 + cosines)) + 0.00001)
    return np.where(i < warmup, rising, falling)


@pytest.mark.parametrize(
    ("warmup", "total"), [(7810, 15620), (0, 15620), (3, 10), (1, 7), (0, 1), (156, 157)]
)
@pytest.mark.parametrize(
    ("start", "lr", "end"), [(0.01, 0.1, 0.00001), (0.0, 1, 0), (0.3, 0.07, 0.011)]
)
def test_mindspore_tables_bit_for_bit(
    start: float, lr: float, end: float, warmup: int, total: int
) -> None:
    steps = schedules.steps(lr, total)
    poly = schedules.poly(lr, total, warmup=warmup, start=start)
    linear = schedules.linear(lr, total, warmup=warmup, start=start, end=end)
    warmup_cosine = schedules.warmup_cosine(lr, total, warmup=warmup)
    pairs = {
        steps: mindspore_steps(lr, total),
        poly: mindspore_poly(start, lr, warmup, total),
        linear: mindspore_linear(start, lr, end, warmup, total),
        warmup_cosine: mindspore_cosine(lr, warmup, total),
    }
    for schedule, expected in pairs.items():
        in_float32 = schedule.table(total, dtype=torch.float32)
        assert torch.equal(in_float32, as_float32(expected)), schedule
        in_float64 = torch.from_numpy(expected.astype(np.float64))
        assert torch.equal(schedule.table(total), in_float64), schedule


def test_the_resnet_run_of_mindspore() -> None:
    """10 epochs of 1562 updates, 5 of them warm-up, from 0.01 to 0.1: corner values by hand."""
    rate = schedules.poly(0.1, 15620, warmup=7810, start=0.01).at
    assert (rate(0), rate(7810)) == (0.01, 0.1)
    assert rate(3905) == pytest.approx(0.055, rel=1e-15)  # half-way up; one rounding per operation
    assert rate(11715) == 0.025  # half-way down: a quarter
    # 1e-11: 1 - x loses log10(7810) digits of 16
    assert rate(15619) == pytest.approx(0.1 / 7810**2, rel=1e-11)


def test_warm_up_and_milestones_of_steps() -> None:
    schedule = schedules.steps(
        1.0, 10, milestones=(4, 0.8), factors=(0.5, 0.25), warmup=2, start=0.5
    )
    assert [schedule.at(i) for i in range(10)] == [0.5, 0.75, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_cosine_is_torchs() -> None:
    optimizer = sgd(0.3)
    theirs = rates_of_loop(lrs.CosineAnnealingLR(optimizer, T_max=UPDATES, eta_min=0.01), UPDATES)[
        0
    ]
    # torch multiplies UPDATES times, each with a relative rounding of about 4 ulp
    assert cosine(0.3, UPDATES, end=0.01).table(UPDATES) == pytest.approx(
        theirs, rel=4 * UPDATES * 2**-52
    )
    warm = cosine(0.3, UPDATES, warmup=10, start=0.1, end=0.01)
    assert [warm.at(i) for i in (0, 5, 10)] == pytest.approx([0.1, 0.2, 0.3], rel=1e-15)
    assert warm.at(25) == pytest.approx(0.155, rel=1e-15)


CYCLES = list(itertools.product((1, 2, 7, UPDATES), (0.0, 0.3, 0.5, 0.99)))
CYCLES.remove((2, 0.5))  # there torch divides by zero


@pytest.mark.parametrize("shape", ["cos", "linear"])
@pytest.mark.parametrize(("total", "rise"), CYCLES)
def test_one_cycle_is_torchs_bit_for_bit(total: int, rise: float, shape: Any) -> None:
    scheduler = lrs.OneCycleLR(
        sgd(1.0),
        max_lr=0.7,
        total_steps=total,
        pct_start=rise,
        anneal_strategy=shape,
        div_factor=10,
        final_div_factor=100,
        cycle_momentum=False,
    )
    theirs = rates_of_loop(scheduler, total)
    ours = one_cycle(0.7, total, rise=rise, div=10, final_div=100, shape=shape)
    assert ours.table(total).tolist() == theirs[0]


def test_one_cycle_where_torch_divides_by_zero() -> None:
    assert one_cycle(0.7, 2, rise=0.5).at(0) == 0.7


@given(updates=st.integers(1, 60), data=st.data())
def test_every_rate_lies_between_its_ends(updates: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, updates))
    start, lr, end = (data.draw(st.floats(0, 10)) for _ in range(3))
    highest = max(start, lr, end) * (1 + 4 * 2**-52)
    for make in (schedules.linear, cosine):
        rates = make(lr, updates, warmup=warmup, start=start, end=end).table(updates)
        assert rates.max() <= highest
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
    full_table = schedule.table(100)
    assert full_table.dtype == torch.float64
    assert torch.equal(schedule.table(30, start=50), full_table[50:80])
    assert torch.equal(schedule.table(100, "cpu", torch.float32), full_table.float())
    assert [schedule.at(i) for i in range(100)] == full_table.tolist()


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
    message = r"expected rates for 3 updates, received 2; build it for 3"
    with pytest.raises(ValueError, match=message):
        schedule.at(2)
    with pytest.raises(ValueError, match=message):
        schedule.table(3)
    with pytest.raises(ValueError, match=message):
        schedule.table(1, start=2)
    with pytest.raises(ValueError, match="count from 0, received -1"):
        schedule.at(-1)


BAD_SETTINGS: list[tuple[Callable[[], Any], type[Exception], str]] = [
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
    (
        lambda: schedules.function(0.1),  # type: ignore[arg-type]
        TypeError,
        "expected a function update -> rate",
    ),
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


@pytest.mark.parametrize(("make", "error", "match"), BAD_SETTINGS, ids=range(len(BAD_SETTINGS)))
def test_bad_settings_are_refused_when_built(
    make: Callable[[], Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make()


def sgd(*rates: float | Tensor, **options: Any) -> torch.optim.SGD:
    groups = []
    for i, rate in enumerate(rates):
        param = nn.Parameter(torch.ones(2))
        groups.append({"params": [param], "lr": rate, "name": f"g{i}"})
    return torch.optim.SGD(groups, lr=9.0, **options)


def rates_of_loop(scheduler: Any, updates: int) -> list[list[float]]:
    """The rates that a loop of optimizer.step() and scheduler.step() uses, one row per group."""
    optimizer = scheduler.optimizer
    rates = []
    for i in range(updates):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        if i < updates - 1:
            scheduler.step()
    return [list(row) for row in zip(*rates, strict=True)]


class StatefulFactor:
    """A factor that is a callable object with a state: a copy must leave it alone."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / (1 + epoch + self.calls)


class UserScheduler(lrs.LRScheduler):
    """A user's scheduler, which multiplies the rate it finds."""

    def get_lr(self) -> list[Any]:
        return [g["lr"] * (1 - 0.01 * i) for i, g in enumerate(self.optimizer.param_groups, 1)]


def warm_then_cosine(o: Any) -> Any:
    return lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=5), lrs.CosineAnnealingLR(o, 20)], milestones=[5]
    )


TORCH_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, [StatefulFactor(), lambda e: 0.9**e]),
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
        o, [0.5, 0.3], UPDATES, cycle_momentum=False, three_phase=True
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
    "UserScheduler": UserScheduler,
}


def test_every_scheduler_of_torch_is_here() -> None:
    assert set(lrs.__all__) - set(TORCH_SCHEDULERS) == {"LRScheduler", "ReduceLROnPlateau"}


# The warning comes from torch's own SequentialLR, in some versions.
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize("name", TORCH_SCHEDULERS)
def test_a_scheduler_of_torch_gives_its_table_and_stays_as_it_was(name: str) -> None:
    optimizer = sgd(0.5, 0.2)
    scheduler = TORCH_SCHEDULERS[name](optimizer)
    optimizer_state = copy.deepcopy(optimizer.state_dict())
    scheduler_state = copy.deepcopy(scheduler.state_dict())
    table = tables(resolve(scheduler, optimizer, UPDATES), UPDATES).tolist()
    assert optimizer.state_dict() == optimizer_state
    assert repr(scheduler.state_dict()) == repr(scheduler_state)
    assert not hasattr(optimizer, "_opt_called"), (
        "torch still warns the user who steps in the wrong order"
    )
    assert table == rates_of_loop(scheduler, UPDATES)


def test_rates_that_are_tensors_are_rolled_in_their_dtype() -> None:
    optimizer = sgd(torch.tensor(0.5), torch.tensor(0.2), foreach=False)
    scheduler = lrs.ExponentialLR(optimizer, 0.9)
    table = tables(from_torch(scheduler, 9), 9).tolist()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert table == rates_of_loop(scheduler, 9)


def test_parameters_are_not_copied_and_optimizer_state_not_touched() -> None:
    net = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    scheduler = lrs.LambdaLR(optimizer, lambda e: float(net.weight.shape[0]) / (e + 3))
    from_torch(scheduler, 5)
    after = optimizer.state_dict()["state"]
    for i, tensors in before["state"].items():
        for name, tensor in tensors.items():
            assert torch.equal(after[i][name], tensor)


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
    rates_of_loop(scheduler, 3)
    with pytest.raises(
        ValueError,
        match=r"not been stepped.*build the scheduler anew.*from_torch\(scheduler, updates",
    ):
        resolve(scheduler, optimizer, 4)
    assert from_torch(scheduler, 3)[0].table(3).tolist() == [0.25, 0.125, 0.0625]
    chained = lrs.ChainedScheduler([scheduler])
    with pytest.raises(ValueError, match="received ChainedScheduler in the middle"):
        resolve(chained, optimizer, 4)


class UncopyableScheduler(lrs.LRScheduler):
    def __init__(self, optimizer: Any) -> None:
        self.lock = threading.Lock()
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [0.1]


class WrappingOptimizer(torch.optim.Optimizer):
    """An optimizer around another one, whose groups are its groups."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.defaults = inner.defaults

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups


def with_rate_set_by_hand(scheduler: Any, rate: float) -> Any:
    scheduler.optimizer.param_groups[0]["lr"] = rate
    return scheduler


REFUSED_SCHEDULERS: dict[str, tuple[Callable[[], Any], str]] = {
    "plateau": (
        lambda: lrs.ReduceLROnPlateau(sgd(0.1)),
        r"follows a measured value.*hs\.ReduceLROnPlateau",
    ),
    "momentum": (
        lambda: lrs.OneCycleLR(sgd(0.1, momentum=0.9), 0.5, UPDATES),
        "changes momentum besides the learning rate.*cycle_momentum=False",
    ),
    "betas": (
        lambda: lrs.CyclicLR(torch.optim.Adam([nn.Parameter(torch.ones(1))]), 0.1, 0.4, 6),
        "CyclicLR changes betas",
    ),
    "over": (
        lambda: lrs.OneCycleLR(sgd(0.1), 0.5, UPDATES // 2, cycle_momentum=False),
        "OneCycleLR was built for 20 updates and 40 are asked for; build it with total_steps=40",
    ),
    "not copied": (
        lambda: UncopyableScheduler(sgd(0.1)),
        "UncopyableScheduler cannot be run ahead.*it cannot be copied.*list of rates",
    ),
    "wrapped": (
        lambda: UserScheduler(WrappingOptimizer(sgd(0.1))),
        "its optimizer WrappingOptimizer wraps another one",
    ),
    "by hand": (
        lambda: with_rate_set_by_hand(lrs.ExponentialLR(sgd(0.1), 0.5), 0.3),
        r"as ExponentialLR left them, \[0.1\], received \[0.3\]; "
        "build the optimizer and its scheduler anew",
    ),
}


@pytest.mark.parametrize("case", REFUSED_SCHEDULERS)
def test_a_scheduler_that_is_no_table_is_refused(case: str) -> None:
    make, match = REFUSED_SCHEDULERS[case]
    scheduler = make()
    groups = scheduler.optimizer.param_groups
    rates_before = [group["lr"] for group in groups]
    with pytest.raises(ValueError, match=match):
        from_torch(scheduler, UPDATES)
    with pytest.raises(ValueError, match=match):
        resolve(scheduler, scheduler.optimizer, UPDATES)
    assert [group["lr"] for group in groups] == rates_before


# Each class of torch.optim.lr_scheduler with the fewest arguments that it takes.
DEFAULT_ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda e: 0.9**e),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda e: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 7),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [3, 20]),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.93),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 15),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 5),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.5, UPDATES),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.1, 0.4),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o), lrs.OneCycleLR(o, 0.5, UPDATES)], [5]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o), lrs.CyclicLR(o, 0.1, 0.4)]
    ),
}
# Refused with their default arguments, and what the message names.
REFUSED_BY_DEFAULT = {
    "OneCycleLR": "changes momentum .*schedule=hs.schedules.one_cycle(0.5, 40), or build "
    "OneCycleLR(…, cycle_momentum=False)",
    "CyclicLR": "changes momentum .*build CyclicLR(…, cycle_momentum=False)",
    "SequentialLR": "SequentialLR changes momentum .*build OneCycleLR(…, cycle_momentum=False)",
    "ChainedScheduler": "ChainedScheduler changes momentum .*build CyclicLR(…, cycle_momentum=F",
    "ReduceLROnPlateau": "measured value.*fit(…, callbacks=[hs.ReduceLROnPlateau('loss', 0.1, 10)]",
}


def torchs_scheduler_classes() -> list[str]:
    """The public classes of the module, whatever its version has."""
    classes = [getattr(lrs, name) for name in lrs.__all__]
    return [cls.__name__ for cls in classes if cls is not lrs.LRScheduler]


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("name", torchs_scheduler_classes())
def test_every_class_of_torch_is_exact_or_refused_with_the_name_of_what_to_use(
    name: str, optimizer_class: Any
) -> None:
    build = DEFAULT_ARGUMENTS.get(name, getattr(lrs, name))
    options = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}

    def optimizer() -> Any:
        return optimizer_class([nn.Parameter(torch.ones(2))], lr=0.5, **options)

    scheduler = build(optimizer())
    if name not in REFUSED_BY_DEFAULT:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            table = tables(resolve(scheduler, scheduler.optimizer, UPDATES), UPDATES).tolist()
            assert table == rates_of_loop(build(optimizer()), UPDATES)
        return
    match = ".*".join(map(re.escape, REFUSED_BY_DEFAULT[name].split(".*")))
    if options == {}:
        match = match.replace("momentum\\ ", "betas\\ ")
    with pytest.raises(ValueError, match=match):
        resolve(scheduler, scheduler.optimizer, UPDATES)
    with pytest.raises(ValueError, match=match):
        from_torch(scheduler, UPDATES)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pct_start": 0.45},
        {"anneal_strategy": "linear"},
        {"div_factor": 7.0, "final_div_factor": 300.0},
        {"pct_start": 0.1, "div_factor": 3.0, "anneal_strategy": "linear"},
    ],
    ids=str,
)
def test_the_formula_that_is_named_for_one_cycle_has_its_rates(settings: dict[str, Any]) -> None:
    optimizer = sgd(0.1, momentum=0.9)
    scheduler = lrs.OneCycleLR(optimizer, 0.3, UPDATES, **settings)
    with pytest.raises(ValueError, match=r"hs\.schedules\.one_cycle") as error:
        resolve(scheduler, optimizer, UPDATES)
    code = re.search(r"schedule=(hs\.schedules\.one_cycle\(.*?\)), or", str(error.value))
    assert code is not None
    formula: Schedule = eval(code[1], {"hs": hs})
    expected = rates_of_loop(
        lrs.OneCycleLR(sgd(0.1), 0.3, UPDATES, cycle_momentum=False, **settings), UPDATES
    )
    # The settings are shown with 12 digits; the lowest rate is a hundredth of a millionth of 0.3.
    assert formula.table(UPDATES).tolist() == [
        pytest.approx(rate, rel=1e-9) for rate in expected[0]
    ]


@pytest.mark.parametrize("max_lr", [0.3, [0.3, 0.5]], ids=str)
def test_where_no_formula_has_the_rates_none_is_named(max_lr: Any) -> None:
    optimizer = sgd(0.1, 0.2, momentum=0.9)
    three_phase = not isinstance(max_lr, list)
    scheduler = lrs.OneCycleLR(optimizer, max_lr, UPDATES, three_phase=three_phase)
    with pytest.raises(ValueError, match=r"build OneCycleLR\(…, cycle_momentum=False\)$") as error:
        resolve(scheduler, optimizer, UPDATES)
    assert "one_cycle(" not in str(error.value)


def test_a_scheduler_needs_its_optimizer_and_the_number_of_updates() -> None:
    scheduler = lrs.ExponentialLR(sgd(0.1), 0.5)
    with pytest.raises(ValueError, match="ExponentialLR drives another optimizer"):
        resolve(scheduler, sgd(0.1), 4)
    with pytest.raises(
        ValueError, match=r"number of updates must be known; give from_torch\(scheduler, updates\)"
    ):
        resolve(scheduler, scheduler.optimizer)


ACCEPTED: dict[str, tuple[Any, list[list[float]]]] = {
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


@pytest.mark.parametrize("form", ACCEPTED)
def test_what_may_be_given_as_learning_rate(form: str) -> None:
    value, expected = ACCEPTED[form]
    resolved = resolve(value, sgd(8.0, 4.0), 2)
    assert torch.equal(tables(resolved, 2), torch.tensor(expected, dtype=torch.float64))


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ("cosine", TypeError, "schedule: received str. Accepted: a number; a list, array or tensor"),
    (None, TypeError, "schedule: received NoneType. Accepted"),
    (object(), TypeError, "schedule: received object. Accepted"),
    (StatefulFactor, TypeError, "schedule: received type. Accepted"),
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


@pytest.mark.parametrize(("value", "error", "match"), REFUSED, ids=range(len(REFUSED)))
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
    x = torch.randn(8, 3, dtype=torch.float64)
    y = torch.randn(8, 2, dtype=torch.float64)
    net, optimizer = two_groups()
    scheduler = TORCH_SCHEDULERS[name](optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        scheduler.step()
    ours, optimizer = two_groups()
    table = tables(resolve(TORCH_SCHEDULERS[name](optimizer), optimizer, UPDATES), UPDATES)
    step = hs.TrainStep(ours, nn.MSELoss(), optimizer, precision="fp64", lr=table, nonfinite="skip")
    for i in range(6):
        assert torch.equal(step(x, y).lr, table[:, i])
        assert step(x * math.inf, y).skipped
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), ours.parameters(), strict=True))


def test_the_end_of_one_cycle_counts_from_where_it_stands() -> None:
    scheduler = lrs.OneCycleLR(sgd(0.1), 0.5, 10, cycle_momentum=False)
    rates_of_loop(scheduler, 5)  # rates of 5 updates, so that step() was called four times
    assert len(from_torch(scheduler, 7)[0].table(7)) == 7
    with pytest.raises(
        ValueError,
        match=r"built for 10 updates, 4 of which are over, and 8 are asked for.*steps=12",
    ):
        from_torch(scheduler, 8)


def scheduler_warnings(update: str) -> list[str]:
    """torch's warnings when the first update overflows and the user's scheduler is stepped.

    `update` says what makes the update: "step", "scaler", or "nothing".
    """
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = lrs.StepLR(optimizer, 2)
    x = torch.full((2, 3), math.inf)
    y = torch.zeros(2, 2)
    with warnings.catch_warnings(record=True, action="always") as caught:
        if update == "step":
            precision = hs.Precision("fp32", scale=hs.DynamicScale())
            step = hs.TrainStep(net, nn.MSELoss(), optimizer, precision=precision)
            assert step(x, y).skipped
        elif update == "scaler":
            scaler = hs.amp.GradScaler(device="cpu")
            scaler.scale(nn.functional.mse_loss(net(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
    return [str(warning.message) for warning in caught]


def test_a_skipped_first_update_is_no_wrong_order_for_torchs_scheduler() -> None:
    """With a TrainStep and with a GradScaler. Without either, torch's warning is right."""
    assert scheduler_warnings("step") == []
    assert scheduler_warnings("scaler") == []
    assert "`lr_scheduler.step()` before `optimizer.step()`" in scheduler_warnings("nothing")[0]
