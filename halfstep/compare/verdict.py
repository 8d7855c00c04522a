"""Is a precision as good as the reference? Differences paired by seed, an interval of 95 %, and what it proves.

"Same" is proved, not assumed: the whole interval must lie within ±margin. Everything is in percentage points.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Kind: TypeAlias = Literal["reference", "same", "worse", "better", "unknown", "failed"]
Bits: TypeAlias = npt.NDArray[np.bool_]

LEVEL, POWER = 0.95, 0.80
_Z = 1.959963984540054  # the normal's 97.5 % quantile
_NONE_SEEN = -math.log(0.025)  # 0 events in N: the rate is below 3.69 / N with 97.5 %
_MOST_SEEDS = 200


@dataclass(frozen=True)
class Images:
    """What the test images say by themselves: how many they are, and the standard error they leave in the mean.

    `apart` is the part of the error in which seeds stumble over different images: its square falls as seeds are added,
    what is left of the error's square does not.
    """

    count: int
    error: float
    apart: float = 0.0

    def with_seeds(self, more: float) -> float:
        """The error to expect with `more` times the seeds."""
        return math.sqrt(max(0.0, self.error**2 - self.apart**2 * (1 - 1 / more)))


@dataclass(frozen=True)
class Verdict:
    """What was found: the mean difference, the half-width of its 95 % interval, and the sentence for the table."""

    kind: Kind
    text: str
    difference: float | None = None
    interval: float | None = None


def judge(differences: Sequence[float], *, margin: float, images: Images | None = None) -> Verdict:
    """The verdict on differences from the reference, one per seed.

    The interval is Student's over the seeds, and never narrower than the test images alone allow: each of the two holds
    the true difference with 95 % under its own assumptions, so the wider one does under either's.
    """
    n, mean = len(differences), float(np.mean(differences))
    least = floor(images) if images else 0.0
    if n == 1:
        by_images = f" (± {least:.2f} by the test images alone)" if images else ""
        return Verdict(
            "unknown",
            f"cannot tell from one seed: {mean:+.2f} points{by_images}; give 3 or more",
            mean,
        )
    spread = float(np.std(differences, ddof=1))
    half = max(student(spread, n), least)
    if abs(mean) + half <= margin:
        return Verdict("same", f"same within {margin:g} points", mean, half)
    if abs(mean) > half:
        kind: Kind = "worse" if mean < 0 else "better"
        return Verdict(kind, f"{kind} by {abs(mean):.1f} ± {half:.1f}", mean, half)
    target = max(margin - abs(mean), abs(mean))  # at this half-width one of the above is reached
    return Verdict("unknown", f"cannot tell: {_needs(n, spread, target, images)}", mean, half)


def student(spread: float, n: int) -> float:
    """The half-width of the 95 % interval of a mean of n values with this standard deviation."""
    return quantile((1 + LEVEL) / 2, n - 1) * spread / math.sqrt(n)


def half_width(values: Sequence[float]) -> float | None:
    """The same from the values themselves; None for fewer than two."""
    return student(float(np.std(values, ddof=1)), len(values)) if len(values) > 1 else None


def floor(images: Images) -> float:
    """The half-width that the test images alone leave. With next to no disagreement the normal approximation would
    claim too much: a rate of which nothing was seen may still be 3.69 / N."""
    return _floor(images.count, images.error)


def _floor(count: int, error: float) -> float:
    return max(_Z * error, 100 * _NONE_SEEN / count)


def images_of(reference: Sequence[Bits], other: Sequence[Bits]) -> Images:
    """From which images each run got right, seed by seed: the standard error of the mean difference over images.

    Taken over the per-image means of all seeds, so it holds too where every seed stumbles over the same images.
    """
    changes = np.stack([b.astype(np.float64) - a for a, b in zip(reference, other, strict=True)])
    seeds, count = changes.shape
    error = 100 * float(np.std(changes.mean(axis=0))) / math.sqrt(count)
    within = (
        float(np.mean(np.var(changes, axis=0, ddof=1))) if seeds > 1 else 0.0
    )  # of one image, seed by seed
    return Images(count, error, min(error, 100 * math.sqrt(within / seeds / count)))


def seeds_needed(spread: float, target: float) -> int | None:
    """How many seeds make the half-width smaller than `target` with a probability of 80 %; None: more than 200."""
    for n in range(2, _MOST_SEEDS + 1):
        reach = quantile((1 + LEVEL) / 2, n - 1) + quantile(POWER, n - 1)
        if reach * spread / math.sqrt(n) <= target:
            return n
    return None


def _needs(n: int, spread: float, target: float, images: Images | None) -> str:
    """What would settle it: more seeds; more test images, where no number of seeds would do; or both."""
    seeds = seeds_needed(spread, target) if student(spread, n) > target else n
    if seeds is None or images is None:
        return (
            f"more seeds needed, about {seeds}"
            if seeds
            else f"more seeds needed, over {_MOST_SEEDS}"
        )
    for more in range(max(seeds, n + 1), _MOST_SEEDS + 1):
        if _floor(images.count, images.with_seeds(more / n)) <= target:
            return f"more seeds needed, about {more}"
    error = images.with_seeds(seeds / n)  # 3.69 / N falls with N, a standard error with its root
    needed = max(100 * _NONE_SEEN / target, images.count * (_Z * error / target) ** 2)
    wanted = f"{math.ceil(needed / 100) * 100:,}"
    if seeds == n:
        return f"{images.count:,} test images are too few, about {wanted} needed"
    return f"{n} seeds and {images.count:,} test images are too few, about {seeds} seeds and {wanted} images needed"


@cache
def quantile(p: float, dof: int) -> float:
    """Student's t: the value below which the share p lies, by bisection of the exact distribution; p from 0.5 up."""
    if not 0.5 <= p < 1 or dof < 1:
        raise ValueError(
            f"quantile: expected p from 0.5 to below 1 and dof of 1 or more, got {p!r} and {dof!r}"
        )
    low, high = 0.0, 1.0
    while _below(high, dof) < p:
        high *= 2
    for _ in range(80):  # halves to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, dof) < p else (low, middle)
    return (low + high) / 2


def _below(t: float, dof: int) -> float:
    """P(T ≤ t), t ≥ 0: for whole degrees of freedom a finite sum in the angle atan(t / √dof)."""
    angle = math.atan(t / math.sqrt(dof))
    cos, odd = math.cos(angle), dof % 2
    term, total = cos if odd else 1.0, 0.0
    for k in range(2 + odd, dof + 1, 2):
        total += term
        term *= cos * cos * (k - 1) / k
    sine = math.sin(angle) * total
    return 0.5 + (angle + sine) / math.pi if odd else 0.5 + sine / 2


def pack(correct: Any) -> str:
    """One bit per image, as base64."""
    return base64.b64encode(np.packbits(np.asarray(correct, dtype=bool)).tobytes()).decode()


def unpack(text: str, count: int) -> Bits:
    """The bits that `pack` took, `count` of them."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count).astype(bool)
