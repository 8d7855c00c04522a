"""Too many skips in a row, and updates that raise: the same error, names and rows on every path.

Eager steps raise at once, captured ones at the host's next visit, also for what is over by then.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.engine.captured.sink import Sink
from halfstep.engine.feed import Feed
from tests.support.emulated_graphs import sink_with_emulated_graphs

CPU = torch.device("cpu")
MAX_SKIPS = 4
Batches = list[tuple[Tensor, Tensor]]


def make_batches(poisoned: set[int], count: int = 24) -> Batches:
    """Batches of four; the losses of the poisoned ones are infinite. Steps count from 1."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for step in range(1, count + 1):
        x = torch.randn(4, 6, generator=generator)
        y = torch.randn(4, 3, generator=generator)
        if step in poisoned:
            y[0] = torch.inf
        batches.append((x, y))
    return batches


def make_step(
    decide: str, *, on_skips: Any = "raise", accumulate: int = 1, precision: str = "fp32"
) -> hs.TrainStep:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    scale = hs.DynamicScale(init=2.0**10, max_skips=MAX_SKIPS, on_skips=on_skips)
    return hs.TrainStep(
        net,
        nn.MSELoss(),
        torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True),
        precision=hs.Precision(precision, scale=scale),
        decide=decide,
        accumulate=accumulate,
    )


def direct_sink(step: hs.TrainStep, batches: Batches, *, every: int) -> Sink:
    sink = hs.sink(step, batches, every=every)
    sink.runner = CapturedRunner.for_step(step, Feed(batches), direct=True)
    return sink


SINKS: dict[str, Callable[..., Sink]] = {
    "direct": direct_sink,
    "emulated graphs": sink_with_emulated_graphs,
}


def run_by_hand(step: hs.TrainStep, batches: Batches) -> None:
    for batch in batches:
        step(*batch)
    step.flush()


def error_of(run: Callable[[], object]) -> str:
    with pytest.raises(hs.NonFiniteError) as error:
        run()
    return str(error.value)


# Streaks


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("every", [5, 7, 24])
@pytest.mark.parametrize(
    "streak",
    [range(6, 10), range(6, 16), range(17, 25)],
    ids=["ends after as many", "ends later", "does not end"],
)
@pytest.mark.parametrize("sink", SINKS)
def test_captured_and_eager_steps_raise_alike_for_a_streak(
    sink: str, streak: range, every: int, accumulate: int
) -> None:
    """Where it ends before the host looks in, too; the same words, step and scale."""
    poisoned = set(streak)
    if accumulate == 2:  # a poisoned batch spoils its update: the same updates, twice as long
        poisoned = {2 * step for step in streak}
    batches = make_batches(poisoned, count=24 * accumulate)
    expected = error_of(partial(run_by_hand, make_step("host", accumulate=accumulate), batches))
    at_step = (streak[0] + MAX_SKIPS - 1) * accumulate
    assert f"step {at_step}, scale 64: {MAX_SKIPS} updates in a row overflowed" in expected

    captured = make_step("device", accumulate=accumulate)
    assert error_of(lambda: list(SINKS[sink](captured, batches, every=every))) == expected


@pytest.mark.parametrize("every", [3, 7, 24])
@pytest.mark.parametrize("sink", SINKS)
def test_skips_that_finite_updates_interrupt_are_no_streak(sink: str, every: int) -> None:
    poisoned = {2, 3, 4, 6, 7, 8, 10, 12, 13, 14, 22, 23, 24}
    batches = make_batches(poisoned)
    step = make_step("device")
    visits = list(SINKS[sink](step, batches, every=every))
    skipped = torch.cat([records.skipped for records in visits]).sum().item()
    assert skipped == int(step.state.skips) == len(poisoned)
    run_by_hand(make_step("host"), batches)


@pytest.mark.parametrize("sink", SINKS)
def test_after_the_error_the_run_goes_on_and_raises_again(sink: str) -> None:
    """The streak goes on in the next pass: each visit raises, as each eager step does."""
    batches = make_batches(set(range(21, 25)) | {1}, count=24)
    step = make_step("device")
    passes = SINKS[sink](step, batches, every=24)
    # Step 1 is the first of 24; the second pass begins with another one.
    assert "step 24," in error_of(lambda: list(passes))
    assert "step 25," in error_of(lambda: list(passes))


@pytest.mark.parametrize("every", [7, 24])
@pytest.mark.parametrize("sink", SINKS)
def test_a_streak_that_is_over_changes_the_precision_at_the_visit(sink: str, every: int) -> None:
    step = make_step("device", on_skips="fp32", precision="O1")
    batches = make_batches(set(range(8, 13)))
    with pytest.warns(hs.Notice, match="step 11, scale 64: 4 updates in a row.*going on in fp32"):
        list(SINKS[sink](step, batches, every=every))
    assert step.precision.name == "fp32"


def test_a_visit_inside_a_cycle_postpones_the_fallback() -> None:
    step = make_step("device", on_skips="fp32", precision="O1", accumulate=2)
    batches = make_batches(set(range(3, 2 * MAX_SKIPS + 3)), count=16)
    visits = iter(direct_sink(step, batches, every=11))  # ends inside the sixth cycle
    next(visits)
    assert step.state.cycle.micro == 1
    assert step.precision.name == "O1"
    with pytest.warns(hs.Notice, match="step 10, scale 64: 4 updates in a row"):
        list(visits)
    assert step.precision.name == "fp32"


# Which gradients are named


class TwoGains(nn.Module):
    """`large` gets finite gradients whose square overflows, `gain` an infinite one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(4))
        self.gain = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, z: Tensor) -> Tensor:
        # √(z·gain) is finite at z = 0, its gradient is not.
        return self.large.sum() * 1e25 + torch.sqrt(z * self.gain).sum() + self.empty.sum()


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("precision", ["fp32", hs.Precision("fp32", scale=2.0)], ids=str)
def test_a_finite_gradient_with_an_infinite_norm_is_not_named(precision: Any, decide: str) -> None:
    net = TwoGains()
    step = hs.TrainStep(
        net,
        None,
        torch.optim.SGD(net.parameters(), lr=0.0, fused=True),
        precision=precision,
        decide=decide,
        nonfinite="raise",
    )
    assert step(torch.ones(())).updated
    said = error_of(lambda: step(torch.zeros(())))
    assert "gradient in gain." in said
    assert step.state.bad.tolist() == [False, True, False]


# Rows


class Rows(hs.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.skipped: list[bool] = []

    def step(self, run: Any, row: Any) -> None:
        self.steps.append(row.global_step)
        self.skipped.append(row.skipped)


def fit(batches: Batches, **options: Any) -> tuple[Rows, str]:
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, fused=True)
    model = hs.Model(net, nn.MSELoss(), optimizer, **options)
    rows = Rows()
    return rows, error_of(lambda: model.fit(1, batches, callbacks=[rows]))


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize(
    ("accumulate", "poisoned", "at_step"), [(1, 9, 9), (2, 9, 10), (5, 24, 24)]
)
def test_the_step_that_raises_has_a_row(
    accumulate: int, poisoned: int, at_step: int, decide: str
) -> None:
    """At the end of a cycle, and at the end of a pass, where the tail raises."""
    batches = make_batches({poisoned})
    rows, said = fit(batches, accumulate=accumulate, decide=decide)
    assert f"step {at_step}: " in said
    assert rows.steps == list(range(1, at_step + 1))
    assert rows.skipped == [False] * (at_step - 1) + [True]


def test_the_error_of_a_step_by_hand_has_its_record() -> None:
    step = make_step("host")
    batches = make_batches(set(range(1, 24)))
    with pytest.raises(hs.NonFiniteError) as error:
        run_by_hand(step, batches)
    assert error.value.record.skipped
    assert error.value.record.scale.item() == 2.0**10 * 0.5 ** (MAX_SKIPS - 1)


@pytest.mark.parametrize("poisoned", [1, 9, 12])
def test_a_checkpoint_of_the_error_knows_that_the_step_is_over(
    poisoned: int, tmp_path: Any
) -> None:
    """The resumed run goes on with the next batch; at the end of a pass there is none."""
    batches = make_batches({poisoned}, count=12)
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))

    def data() -> hs.data.Dataset:
        return hs.data.Dataset((x, y)).batch(4)

    def build() -> tuple[hs.Model, nn.Module]:
        torch.manual_seed(0)
        net = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        return hs.Model(net, nn.MSELoss(), optimizer), net

    model, _ = build()
    with pytest.raises(hs.NonFiniteError, match=f"step {poisoned}: "):
        model.fit(1, data(), callbacks=[hs.Checkpoint(tmp_path / "run")])
    resumed, net = build()
    path = tmp_path / "run" / hs.checkpoint.name_of(poisoned)
    with pytest.warns(hs.Notice, match="the run ended there: NonFiniteError"):
        run = resumed.fit(1, data(), callbacks=[hs.Checkpoint(tmp_path / "run")], resume=path)
    assert run.global_step == 12

    expected, expected_net = build()
    expected.fit(1, batches[: poisoned - 1] + batches[poisoned:])
    assert torch.equal(net.weight, expected_net.weight)
