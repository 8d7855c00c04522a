"""Curves over seeds: at every place of the x axis the middle, the lowest and the highest run."""

import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from halfstep.report.axis import MAX_VALUE
from halfstep.report.report_data import Report, Run

# Places on an x axis. A chart is about 600 pixels wide, so each is 6 pixels wide.
MAX_BINS = 100

Values = list[float | None]  # one for each place of the x axis; None where nothing is known
Average = Callable[[list[float]], float]


@dataclass(frozen=True)
class Series:
    """The line of one precision and its band over seeds, over the x axis that all share."""

    index: int
    name: str
    mid: Values
    low: Values
    high: Values
    seeds: int

    def known_values(self) -> list[float]:
        """All numbers of the line and its band."""
        return [value for value in (*self.mid, *self.low, *self.high) if value is not None]


@dataclass(frozen=True)
class Curves:
    """Lines over one x axis. `steps_per_bin` recorded steps of a run were averaged to a place."""

    x: list[float]
    lines: list[Series]
    steps_per_bin: int = 1

    def __bool__(self) -> bool:
        return bool(self.lines)

    def known_values(self) -> list[float]:
        """All numbers of all lines."""
        return [value for line in self.lines for value in line.known_values()]

    def max_seeds(self) -> int:
        """The seeds of the precision that has most of them."""
        return max((line.seeds for line in self.lines), default=1)


def curves_by_step(report: Report, name: str) -> Curves:
    """A column of the runs' curves by training step. Long ones are averaged in even bins."""
    steps = _recorded_steps(report)
    if len(steps) <= MAX_BINS:
        edges = steps
        x = steps
        steps_per_bin = 1
    else:
        width = (steps[-1] - steps[0]) / MAX_BINS
        edges = [steps[0] + width * i for i in range(MAX_BINS)]
        x = [*edges[1:], steps[-1]]  # a bin is drawn where it ends
        steps_per_bin = _divide_rounding_up(len(steps), MAX_BINS)

    def binned(run: Run) -> Values:
        return _in_bins(run, name, edges, statistics.fmean)

    return Curves(x, _merge_seeds(report, binned, statistics.fmean), steps_per_bin)


def curves_by_change(report: Report, name: str) -> Curves:
    """A column that moves in jumps, as a loss scale does, by training step.

    The places of the x axis are the jumps, and no value is an average: all have occurred.
    """
    steps = _recorded_steps(report)
    jumps = sorted({step for run in report.runs for step in _jumps(run, name)})
    thin_steps = _thin_out(steps, MAX_BINS // 2)
    thin_jumps = _thin_out(jumps, 2 * MAX_BINS)
    edges = sorted({*thin_steps, *thin_jumps, *steps[-1:]})

    def binned(run: Run) -> Values:
        return _in_bins(run, name, edges, _last)

    return Curves(edges, _merge_seeds(report, binned, statistics.median_low))


def curves_by_epoch(report: Report, name: str) -> Curves:
    """A column of the runs' epochs."""
    numbers = {epoch.get("epoch") for run in report.runs for epoch in run.epochs}
    epochs = sorted(number for number in numbers if number is not None)

    def by_epoch(run: Run) -> Values:
        values = {epoch.get("epoch"): epoch.get(name) for epoch in run.epochs}
        return [values.get(epoch) for epoch in epochs]

    return Curves(epochs, _merge_seeds(report, by_epoch, statistics.fmean))


def _merge_seeds(
    report: Report, values_of: Callable[[Run], Values], average: Average
) -> list[Series]:
    """One series for each precision that has any value."""
    series = []
    for row in report.rows:
        runs = [values_of(run) for run in report.runs_of(row.precision)]
        # For each place of the x axis, the values of the runs that have one.
        columns = [[v for v in column if v is not None] for column in zip(*runs, strict=True)]
        if not any(columns):
            continue
        series.append(
            Series(
                index=row.index,
                name=row.precision,
                mid=[average(column) if column else None for column in columns],
                low=[min(column, default=None) for column in columns],
                high=[max(column, default=None) for column in columns],
                seeds=len(runs),
            )
        )
    return series


def _in_bins(run: Run, name: str, edges: Sequence[float], average: Average) -> Values:
    """One run's values, one for each bin; `edges` are where the bins begin.

    A bin in which no step was recorded repeats the one before, up to the run's last step.
    """
    values_in_bin: dict[int, list[float]] = {}
    for step, value in _points(run, name):
        if step is None:
            continue
        bin_index = max(0, bisect_right(edges, step) - 1)
        values = values_in_bin.setdefault(bin_index, [])
        if value is not None:
            values.append(min(MAX_VALUE, max(-MAX_VALUE, value)))

    last_bin = max(values_in_bin, default=0)
    result: Values = []
    for i in range(len(edges)):
        if i in values_in_bin:
            values = values_in_bin[i]
            result.append(average(values) if values else None)
        elif result and i < last_bin:
            result.append(result[-1])
        else:
            result.append(None)
    return result


def _points(run: Run, name: str) -> Iterator[tuple[float | None, float | None]]:
    """Pairs (step, value) of a run's curve; none where it has no such column."""
    return zip(run.curve.get("step", ()), run.curve.get(name, ()), strict=False)


def _recorded_steps(report: Report) -> list[float]:
    """Every training step that some run has recorded, in order."""
    steps = {step for run in report.runs for step in run.curve.get("step", ())}
    return sorted(step for step in steps if step is not None)


def _jumps(run: Run, name: str) -> list[float]:
    """The steps at which the value differs from the one before."""
    jumps = []
    for (_, old_value), (step, value) in pairwise(_points(run, name)):
        if step is not None and value != old_value:
            jumps.append(step)
    return jumps


def _thin_out(values: list[float], limit: int) -> list[float]:
    """Every n-th of the values, so that at most `limit` are left."""
    if not values:
        return []
    return values[:: _divide_rounding_up(len(values), limit)]


def _divide_rounding_up(a: int, b: int) -> int:
    return -(-a // b)


def _last(values: list[float]) -> float:
    return values[-1]
