"""The loss by learning rate: smoothed, with the rate where it falls fastest; printed and drawn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halfstep.preflight.lr_drawing import draw_svg, sketch_lines
from halfstep.utils.atomic_files import write_chunks

# The width of the smoothing, as a share of all updates of the test: 4 of 100.
SMOOTHING_SHARE = 0.04
MIN_SMOOTHING = 2.0  # updates

# The smoothed loss falls if it does so by this many times the scatter of the losses around it. Of
# losses that only scatter, about one test of 100 updates in 200 would fall as far.
MIN_FALL = 1.5

# A loss that was smoothed over this many times the lowest has diverged (the rule of fastai's and
# Lightning's tests), if it is also above where it began.
DIVERGENCE_FACTOR = 4.0

# Samples that come again and again are learnt by heart: their loss falls fastest at rates that are
# too low to train with. 2 to 20 times below the rate of the lowest loss is usual.
FARTHEST_FALL = 30.0
SHARE_OF_LOWEST = (
    0.1  # of the rate of the lowest loss: what is suggested instead (a rule of fastai)
)

STEEPEST_RULE = "the smoothed loss falls fastest"

# Rows of the table that print shows.
MAX_TABLE_ROWS = 12


@dataclass(frozen=True)
class LRCurve:
    """What a learning-rate range test has found; print it, or `plot` it into a file."""

    rates: tuple[float, ...]
    """The rate of each update. With several parameter groups, that of the highest one."""
    losses: tuple[float, ...]
    """The loss of the batch (or the `accumulate` batches) of each update."""
    smoothed: tuple[float, ...]
    suggestion: float
    """The rate to begin with; `rule` says why."""
    group_suggestions: tuple[float, ...]
    """The suggestion for each parameter group: in the proportion of their present rates."""
    stop_reason: str
    """Why the test ended where it did."""
    rule: str = STEEPEST_RULE
    """How the suggestion was chosen."""

    def __str__(self) -> str:
        rule = self.rule.replace("; ", ";\n")  # a long one takes two lines
        lines = [
            f"suggested learning rate: {self.suggestion:.3g}  ({rule})",
            f"{len(self.rates)} updates from {self.rates[0]:.3g} to {self.rates[-1]:.3g}: "
            f"{self.stop_reason}",
        ]
        if len(set(self.group_suggestions)) > 1:
            groups = ", ".join(f"{rate:.3g}" for rate in self.group_suggestions)
            lines.append(f"by parameter group: {groups}")
        sketch = sketch_lines(self.rates, self.smoothed, self.suggestion)
        return "\n".join([*lines, "", *sketch, "", *self.table()])

    def table(self) -> list[str]:
        """The curve in a few lines of text: rate, loss, smoothed loss."""
        count = len(self.rates)
        rows = min(count, MAX_TABLE_ROWS)
        positions = {round(i * (count - 1) / max(rows - 1, 1)) for i in range(rows)}
        suggested = self.rates.index(self.suggestion)
        lines = [f"{'rate':>10}  {'loss':>10}  {'smoothed':>10}"]
        for i in sorted({*positions, suggested}):
            mark = "  <- suggested" if i == suggested else ""
            lines.append(
                f"{self.rates[i]:>10.3g}  {self.losses[i]:>10.4g}  {self.smoothed[i]:>10.4g}{mark}"
            )
        return lines

    def plot(self, path: str | Path) -> Path:
        """Draws the curve into an SVG file, which any browser shows. Returns its path."""
        path = Path(path)
        check_picture_name(path, "plot")
        write_chunks(path, [self._repr_svg_().encode()])
        return path

    def _repr_svg_(self) -> str:
        """The picture that a notebook shows."""
        return draw_svg(self.rates, self.losses, self.smoothed, self.suggestion)


def check_picture_name(path: Path, argument: str) -> None:
    """ValueError for a file that is no SVG."""
    if path.suffix.lower() != ".svg":
        raise ValueError(
            f"{argument}: expected a file that ends in .svg, got {str(path)!r}. For other formats, "
            "draw curve.rates and curve.smoothed with your library"
        )


def smooth(losses: Sequence[float], width: float) -> list[float]:
    """Means of the losses around each, weighted by a bell curve of this standard deviation.

    They lag behind on neither side. At the ends only one side is there.
    """
    reach = math.ceil(3 * width)
    weights = [math.exp(-0.5 * (offset / width) ** 2) for offset in range(reach + 1)]
    return [_mean_around(losses, i, weights) for i in range(len(losses))]


def _mean_around(losses: Sequence[float], i: int, weights: Sequence[float]) -> float:
    reach = len(weights) - 1
    first = max(0, i - reach)
    last = min(len(losses) - 1, i + reach)
    total = 0.0
    weight_sum = 0.0
    for j in range(first, last + 1):
        total += weights[abs(i - j)] * losses[j]
        weight_sum += weights[abs(i - j)]
    return total / weight_sum


def smoothing_width(updates: int) -> float:
    """The standard deviation of the smoothing, in updates, for a test of so many."""
    return max(MIN_SMOOTHING, updates * SMOOTHING_SHARE)


def divergence_limit(first: float, best: float) -> float:
    """A smoothed loss above this has diverged: far above the best, and above where it began."""
    return max(first, best + (DIVERGENCE_FACTOR - 1) * abs(best))


def smooth_curve(losses: Sequence[float], width: float) -> list[float]:
    """The losses smoothed; what has diverged counts as the limit, so that it flattens nothing."""
    roughly = smooth(losses, width)
    limit = divergence_limit(roughly[0], min(roughly))
    return smooth([min(loss, limit) for loss in losses], width)


def steepest_descent(smoothed: Sequence[float]) -> int:
    """The position up to the minimum where the curve falls fastest.

    Rates are spaced evenly in their logarithm, so that is the slope by log rate.
    """
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    slopes = []
    for i in range(lowest + 1):
        before = max(i - 1, 0)
        after = min(i + 1, len(smoothed) - 1)
        slopes.append((smoothed[after] - smoothed[before]) / max(after - before, 1))
    return min(range(len(slopes)), key=slopes.__getitem__)


def suggest_rate(rates: Sequence[float], smoothed: Sequence[float]) -> tuple[float, str]:
    """The rate to begin with, and the rule that chose it.

    Where the loss falls fastest; but a tenth of the rate of the lowest loss where that is far away.
    """
    steepest = rates[steepest_descent(smoothed)]
    lowest = rates[min(range(len(smoothed)), key=smoothed.__getitem__)]
    if lowest <= FARTHEST_FALL * steepest:
        return steepest, STEEPEST_RULE
    target = SHARE_OF_LOWEST * lowest
    suggestion = min(rates, key=lambda rate: abs(math.log(rate / target)))
    rule = (
        f"a tenth of the rate of the lowest loss, {lowest:.3g}; "
        f"the fastest fall, at {steepest:.3g}, is too far below it: few samples, or few updates"
    )
    return suggestion, rule


def descends(losses: Sequence[float], smoothed: Sequence[float]) -> bool:
    """Whether the smoothed loss falls by clearly more than the losses scatter around it."""
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    if lowest == 0:
        return False
    squares = [(losses[i] - smoothed[i]) ** 2 for i in range(lowest + 1)]
    scatter = math.sqrt(sum(squares) / len(squares))
    return smoothed[0] - smoothed[lowest] > MIN_FALL * scatter
