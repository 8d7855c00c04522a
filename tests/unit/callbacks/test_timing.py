"""Times of epochs without evaluations and callbacks, and of steps without the warm-up."""

import io
import re
import time
from typing import Any

import numpy as np
import pytest

from halfstep.callbacks import Lambda, StepTimer, TimeMonitor
from halfstep.engine import Callback, Row, Run
from tests.unit.callbacks.test_monitors import fit


class Slow(Callback):
    """Takes 30 ms at each visit, which is no training time."""

    def visit(self, run: Run) -> None:
        time.sleep(0.03)


@pytest.mark.parametrize(
    ("style", "pattern"),
    [
        ("mindspore", r"epoch time: (\S+) ms, per step time: (\S+) ms"),
        ("seed003", r"Epoch time: (\S+), per step time: (\S+)"),
    ],
)
def test_epoch_times_are_training_times(
    capsys: pytest.CaptureFixture[str], style: Any, pattern: str
) -> None:
    spent: list[float] = []
    times = Lambda(epoch_end=lambda run: spent.append(1000 * run.seconds))
    fit(1, TimeMonitor(style=style), times, Slow(), sink=1)
    printed = re.findall(rf"^{pattern}$", capsys.readouterr().out, re.MULTILINE)
    assert printed == [(f"{ms:.3f}", f"{ms / 13:.3f}") for ms in spent]
    assert all(ms < 13 * 30 for ms in spent)  # the visits alone took 390 ms


def test_an_epoch_that_was_resumed_has_the_time_of_both_parts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    monitor = TimeMonitor()
    row = Row(1, 5, 5, 6, 0.0, 0.0, 0.1, 1.0, False, 0.0, True)
    monitor.step(Run(None, 1, 10, seconds=2.0), row)
    again = TimeMonitor()
    again.load_state_dict(monitor.state_dict())
    run = Run(None, 1, 10, step=10, seconds=3.0)
    again.step(run, row)
    again.epoch_end(run)
    assert capsys.readouterr().out == "epoch time: 5000.000 ms, per step time: 500.000 ms\n"


def test_step_times_leave_the_warm_up_out() -> None:
    """Ten visits of 10 steps, of 100 (warm-up), 1, 2, … 9 ms a step: statistics as numpy's."""
    out = io.StringIO()
    timer = StepTimer(warmup=3, every=50, file=out)
    run = Run(None, 1, 100)
    timer.begin(run)
    for visit, ms in enumerate((100, 1, 2, 3, 4, 5, 6, 7, 8, 9)):
        for i in range(10):
            n = 10 * visit + i + 1
            timer.step(run, Row(1, n, n, 6, 0.0, 0.0, 0.1, 1.0, False, 0.0, True))
        run.seconds += ms * 10 / 1024  # binary fractions: exact sums
        timer.visit(run)
    timer.end(run)
    step_times = np.repeat(np.arange(1, 10), 10)
    unit = 1000 / 1024
    times = timer.times()
    assert times is not None
    assert (times.steps, times.mean) == (90, pytest.approx(step_times.mean() * unit, rel=1e-14))
    quantiles = np.quantile(step_times, (0.5, 0.1, 0.9, 0.99), method="inverted_cdf") * unit
    assert [times.median, times.p10, times.p90, times.p99] == pytest.approx(
        quantiles.tolist(), rel=1e-14
    )
    again = StepTimer()
    again.load_state_dict(timer.state_dict())
    assert again.times() == times
    assert out.getvalue().splitlines() == [f"{4 * unit!r} ms", f"{9 * unit!r} ms", str(times)]


def test_step_timer_in_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    visits: list[int] = []
    timer = StepTimer(warmup=13, exact=True)
    fit(2, timer, Lambda(visit=lambda run: visits.append(run.position)))
    assert visits == list(range(1, 27))  # exact: the clock was read at every step
    times = timer.times()
    assert times is not None
    assert times.steps == 13
    assert 0 < times.p10 <= times.median <= times.p90 <= times.p99
    assert capsys.readouterr().out == f"{times}\n"
    fit(1, StepTimer(warmup=50))
    assert capsys.readouterr().out == "step time: no steps after the warm-up\n"
