"""Curves over seeds: for every place on the x axis the mean of the runs, their lowest and their highest."""

import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from halfstep.report.load__values import Report, Run
from halfstep.report.series__axes import HUGE

MOST = 100  # places on an x axis: at 600 pixels a place is 6 wide
Line = list[float | None]


@dataclass(frozen=True)
class Series:
    """One precision's line and band over the chart's shared x."""

    index: int
    name: str
    mid: Line
    lo: Line
    hi: Line
    seeds: int

    def values(self) -> list[float]:
        return [v for line in (self.mid, self.lo, self.hi) for v in line if v is not None]


@dataclass(frozen=True)
class Curves:
    """Lines over one x; `every` is how many points of a run went into one place."""

    x: list[float]
    lines: list[Series]
    every: int = 1

    def __bool__(self) -> bool:
        return any(v is not None for line in self.lines for v in line.mid)


def by_step(report: Report, name: str) -> Curves:
    """A column of the runs' curves by training step; long ones are averaged in even bins."""
    steps = _steps(report)
    if len(steps) <= MOST:
        return Curves(
            steps,
            _lines(
                report, lambda run: _binned(run, name, steps, statistics.fmean), statistics.fmean
            ),
        )
    width = (steps[-1] - steps[0]) / MOST
    edges = [steps[0] + width * i for i in range(MOST)]
    lines = _lines(
        report, lambda run: _binned(run, name, edges, statistics.fmean), statistics.fmean
    )
    return Curves([*edges[1:], steps[-1]], lines, -(-len(steps) // MOST))


def by_change(report: Report, name: str) -> Curves:
    """A column that moves in jumps, as a loss scale does: its places are the jumps, and no value is averaged."""
    steps = _steps(report)
    jumps = sorted({step for run in report.runs for step in _jumps(run, name)})
    edges = sorted({*_thin(steps, MOST // 2), *_thin(jumps, 2 * MOST), *steps[-1:]})
    return Curves(
        edges, _lines(report, lambda run: _binned(run, name, edges, _last), statistics.median_low)
    )


def by_epoch(report: Report, name: str) -> Curves:
    """A column of the runs' epochs."""
    epochs = sorted(
        {e for run in report.runs for each in run.epochs if (e := each.get("epoch")) is not None}
    )

    def line(run: Run) -> Line:
        found = {each.get("epoch"): each.get(name) for each in run.epochs}
        return [found.get(epoch) for epoch in epochs]

    return Curves(epochs, _lines(report, line, statistics.fmean))


def _lines(
    report: Report, line: Callable[[Run], Line], middle: Callable[[list[float]], float]
) -> list[Series]:
    made = []
    for row in report.rows:
        runs = [line(run) for run in report.of(row.precision)]
        columns = [[v for v in column if v is not None] for column in zip(*runs, strict=True)]
        made.append(
            Series(
                row.index,
                row.precision,
                [middle(c) if c else None for c in columns],
                [min(c, default=None) for c in columns],
                [max(c, default=None) for c in columns],
                len(runs),
            )
        )
    return [each for each in made if any(v is not None for v in each.mid)]


def _binned(
    run: Run, name: str, edges: Sequence[float], take: Callable[[list[float]], float]
) -> Line:
    """One run's values, a bin each; a bin without a point repeats the one before, up to the run's last step."""
    points = [
        (step, value)
        for step, value in zip(run.curve.get("step", ()), run.curve.get(name, ()), strict=False)
        if step is not None
    ]
    held: dict[int, list[float]] = {}
    for step, value in points:
        bin = held.setdefault(max(0, bisect_right(edges, step) - 1), [])
        if value is not None:
            bin.append(min(HUGE, max(-HUGE, value)))
    made: Line = []
    for i in range(len(edges)):
        if i in held:
            made.append(take(held[i]) if held[i] else None)
        else:
            made.append(made[-1] if made and i < max(held, default=0) else None)
    return made


def _steps(report: Report) -> list[float]:
    return sorted({s for run in report.runs for s in run.curve.get("step", ()) if s is not None})


def _jumps(run: Run, name: str) -> list[float]:
    """The steps at which a value is not the one before."""
    points = list(zip(run.curve.get("step", ()), run.curve.get(name, ()), strict=False))
    return [b[0] for a, b in pairwise(points) if a[1] != b[1] and b[0] is not None]


def _thin(values: list[float], most: int) -> list[float]:
    return values[:: -(-len(values) // most)] if values else []


def _last(values: list[float]) -> float:
    return values[-1]
