"""Is a precision as good as the reference? Paired by seed, with a 95 % interval.

"Same" is proved, not assumed: the complete interval must lie within ±margin. Everything is in
percentage points.
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

CONFIDENCE = 0.95  # of all intervals
UPPER_QUANTILE = (1 + CONFIDENCE) / 2  # 97.5 % lie below the upper end of a two-sided interval
POWER = 0.80  # probability that the proposed number of seeds settles it

NORMAL_QUANTILE = 1.959963984540054  # 97.5 % of a normal distribution lie below it

MAX_SEEDS = 200  # more are not proposed

AT_CHANCE = "at chance level: nothing can be concluded"


@dataclass(frozen=True)
class Verdict:
    """The mean difference, the half-width of its interval, and the sentence for the table."""

    kind: Kind
    text: str
    difference: float | None = None
    interval: float | None = None


@dataclass(frozen=True)
class ImageNoise:
    """The uncertainty that the choice of test images leaves in the mean difference."""

    count: int
    """Test images."""
    standard_error: float
    seed_part: float = 0.0
    """The part of the standard error in which seeds are wrong on different images. Its square
    falls as seeds are added; the rest of the squared error does not."""

    @property
    def shared_error(self) -> float:
        """The rest: the standard error of what all seeds do on the same images."""
        return math.sqrt(max(0.0, self.standard_error**2 - self.seed_part**2))

    def half_width(self, mean: float) -> float:
        """The half-width of the interval about `mean` by the test images alone.

        Tango's score interval for a difference of paired proportions, at its longer side. Where few
        images differ, 1.96 standard errors claim too much: images that were not seen to differ
        count too. In units of one image, with Q = Σ (mean difference of an image over the seeds)²
        and M the images by which `mean` differs from 0, x solves x³ = z² (Q + z²) x + z⁴ M.
        """
        z = NORMAL_QUANTILE
        points_per_image = 100 / self.count
        q = (self.standard_error / points_per_image) ** 2
        m = min(abs(mean) / points_per_image, q)  # the seeds may have changed the same images
        p = z**2 * (q + z**2)
        cosine = min(1.0, 1.5 * math.sqrt(3) * z * m / (q + z**2) ** 1.5)
        return points_per_image * 2 * math.sqrt(p / 3) * math.cos(math.acos(cosine) / 3)

    def with_seeds(self, factor: float) -> "ImageNoise":
        """What to expect with `factor` times the seeds."""
        seed_part = self.seed_part / math.sqrt(factor)
        return ImageNoise(self.count, math.hypot(self.shared_error, seed_part), seed_part)

    def images_needed(self, target: float, mean: float, seed_half_width: float) -> float:
        """How many images bring both half-widths of `judge` down to `target`.

        `seed_half_width` is Student's over the seeds, below the target.
        """
        # The cubic of half_width in points, as a quadratic in 1 / images.
        z = NORMAL_QUANTILE
        a = z**4 * 100**2 * (target + abs(mean))
        b = z**2 * self.standard_error**2 * self.count * target
        by_score = (b + math.sqrt(b**2 + 4 * a * target**3)) / (2 * target**3)
        if not self.shared_error:
            return by_score
        by_shared = self.count * (z * self.shared_error) ** 2 / (target**2 - seed_half_width**2)
        return max(by_score, by_shared)


def judge(
    differences: Sequence[float], *, margin: float, images: ImageNoise | None = None
) -> Verdict:
    """The verdict on differences from the reference, one per seed.

    Seeds and test images are both drawn, so the squared half-width is Student's over the seeds plus
    that of what all seeds do on the same images. (What each seed does on images of its own is in
    the spread of the seeds already.) It is never narrower than the test images alone allow.
    """
    seed_count = len(differences)
    mean = float(np.mean(differences))
    # One seed has no spread.
    if seed_count == 1:
        by_images = ""
        if images:
            by_images = f" (± {images.half_width(mean):.2f} by the test images alone)"
        text = f"cannot tell from one seed: {mean:+.2f} points{by_images}; give 3 or more"
        return Verdict("unknown", text, mean)

    spread = float(np.std(differences, ddof=1))
    half_width = _half_width(mean, spread, seed_count, images)

    # The interval lies within ±margin.
    if abs(mean) + half_width <= margin:
        return Verdict("same", f"same within {margin:g} points", mean, half_width)

    # The interval excludes 0.
    if abs(mean) > half_width:
        kind: Kind = "worse" if mean < 0 else "better"
        return Verdict(kind, f"{kind} by {abs(mean):.1f} ± {half_width:.1f}", mean, half_width)

    # Neither. At the half-width `target`, one of the two would be reached.
    target = max(margin - abs(mean), abs(mean))
    text = f"cannot tell: {_what_is_needed(seed_count, mean, spread, target, images)}"
    return Verdict("unknown", text, mean, half_width)


def _half_width(mean: float, spread: float, seed_count: int, images: ImageNoise | None) -> float:
    """The half-width of the interval about the mean of seeds with this standard deviation."""
    by_seeds = student_half_width(spread, seed_count)
    if images is None:
        return by_seeds
    by_both = math.hypot(by_seeds, NORMAL_QUANTILE * images.shared_error)
    return max(by_both, images.half_width(mean))


def measure_image_noise(reference: Sequence[Bits], other: Sequence[Bits]) -> ImageNoise:
    """The noise of the test images, from the images that each run got right, seed by seed.

    The standard error is taken over the per-image means of all seeds, so it also holds where every
    seed is wrong on the same images.
    """
    changes = np.stack([b.astype(np.int64) - a for a, b in zip(reference, other, strict=True)])
    seed_count, image_count = changes.shape
    image_sums = changes.sum(axis=0)
    return noise_of_counts(
        image_count,
        seed_count,
        total=int(image_sums.sum()),
        squared_image_sums=int((image_sums**2).sum()),
        changed=int((changes != 0).sum()),
    )


def is_above_chance(runs: Sequence[Bits], chance: Sequence[Bits]) -> bool:
    """Whether the runs are right more often than always the most frequent class, by the images.

    Both by seed: the images that the run got right, and those of the most frequent class. Seeds
    cannot lift a network that learned nothing above it, so the test images alone decide.
    """
    images = measure_image_noise(chance, runs)
    mean = 100 * float(np.mean(runs) - np.mean(chance))
    return mean > images.half_width(mean)


def noise_of_counts(
    image_count: int, seed_count: int, *, total: int, squared_image_sums: int, changed: int
) -> ImageNoise:
    """The noise of the test images, from sums of changes: 1 is an image that is right only now.

    `total` is Σ change over images and seeds, `squared_image_sums` Σ over images (Σ over seeds
    change)², and `changed` the number of changes.
    """
    mean = total / image_count
    variance = max(0.0, squared_image_sums / image_count - mean**2) / seed_count**2
    standard_error = 100 * math.sqrt(variance / image_count)

    # The variance of one image over the seeds.
    seed_variance = 0.0
    if seed_count > 1:
        squares = changed - squared_image_sums / seed_count
        seed_variance = squares / (seed_count - 1) / image_count
    seed_part = 100 * math.sqrt(seed_variance / seed_count / image_count)
    return ImageNoise(image_count, standard_error, min(standard_error, seed_part))


def _what_is_needed(
    seed_count: int, mean: float, spread: float, target: float, images: ImageNoise | None
) -> str:
    """What would settle it: more seeds; more images, where no number of seeds would do; or both."""
    seeds: int | None = seed_count
    if student_half_width(spread, seed_count) > target:
        seeds = seeds_needed(spread, target)
    if seeds is None:
        return f"more seeds needed, over {MAX_SEEDS}"
    if images is None:
        return f"more seeds needed, about {seeds}"

    # Seeds alone, where they reduce the noise of the images enough.
    for more_seeds in range(max(seeds, seed_count + 1), MAX_SEEDS + 1):
        expected = images.with_seeds(more_seeds / seed_count)
        if _half_width(mean, spread, more_seeds, expected) <= target:
            return f"more seeds needed, about {more_seeds}"

    # More images. Where the two parts together are too wide, seeds and images share the rest.
    by_seeds = student_half_width(spread, seeds)
    if math.hypot(by_seeds, NORMAL_QUANTILE * images.shared_error) > target:
        seed_target = max(target / math.sqrt(2), student_half_width(spread, MAX_SEEDS))
        if by_seeds > seed_target:
            seeds = seeds_needed(spread, seed_target) or MAX_SEEDS
        by_seeds = min(by_seeds, seed_target)
    expected = images.with_seeds(seeds / seed_count)
    image_count = expected.images_needed(target, mean, by_seeds)
    images_needed = f"{math.ceil(image_count / 100) * 100:,}"
    if seeds == seed_count:
        return f"{images.count:,} test images are too few, about {images_needed} needed"
    return (
        f"{seed_count} seeds and {images.count:,} test images are too few, "
        f"about {seeds} seeds and {images_needed} images needed"
    )


def seeds_needed(spread: float, target: float) -> int | None:
    """How many seeds make the half-width smaller than `target` with a probability of 80 %.

    None: more than 200.
    """
    for n in range(2, MAX_SEEDS + 1):
        quantiles = student_quantile(UPPER_QUANTILE, n - 1) + student_quantile(POWER, n - 1)
        if quantiles * spread / math.sqrt(n) <= target:
            return n
    return None


# Student's t


def student_half_width(spread: float, n: int) -> float:
    """The half-width of the 95 % interval of a mean of n values with this standard deviation."""
    return student_quantile(UPPER_QUANTILE, n - 1) * spread / math.sqrt(n)


def interval_half_width(values: Sequence[float]) -> float | None:
    """The half-width of the 95 % interval of the values' mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return student_half_width(float(np.std(values, ddof=1)), len(values))


@cache
def student_quantile(p: float, dof: int) -> float:
    """The value below which the share p lies, for p from 0.5 up and `dof` degrees of freedom.

    By bisection of the exact distribution.
    """
    if not 0.5 <= p < 1 or dof < 1:
        raise ValueError(
            f"quantile: expected p from 0.5 to below 1 and dof of 1 or more, got {p!r} and {dof!r}"
        )
    low = 0.0
    high = 1.0
    while _student_cdf(high, dof) < p:
        high *= 2
    for _ in range(80):  # more halvings than a float64 has bits
        middle = (low + high) / 2
        if _student_cdf(middle, dof) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_cdf(t: float, dof: int) -> float:
    """P(T ≤ t) for t ≥ 0: with whole degrees of freedom a finite sum in atan(t / √dof)."""
    angle = math.atan(t / math.sqrt(dof))
    cosine = math.cos(angle)
    is_odd = dof % 2 == 1
    first_k = 3 if is_odd else 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for k in range(first_k, dof + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    sine_sum = math.sin(angle) * total
    if is_odd:
        return 0.5 + (angle + sine_sum) / math.pi
    return 0.5 + sine_sum / 2


# Bits


def pack_bits(is_correct: Any) -> str:
    """One bit per test image, as base64."""
    bits = np.packbits(np.asarray(is_correct, dtype=bool))
    return base64.b64encode(bits.tobytes()).decode()


def unpack_bits(text: str, count: int) -> Bits:
    """The `count` bits that `pack_bits` packed."""
    packed = np.frombuffer(base64.b64decode(text), np.uint8)
    return np.unpackbits(packed, count=count).astype(bool)
