"""How often the verdict of `halfstep compare` is false: simulated comparisons of known truth.

    python tools/verdict_rates.py [--trials 20000] [--json FILE]

A comparison is simulated image by image: for every seed, which test images are right in the
reference alone ("lost") and which in the other precision alone ("gained"). The true difference is
the mean over all seeds and all images that there could be, so images are drawn anew for every
trial as well as seeds. The table goes into docs/reference/compare.md.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halfstep.compare.verdict import judge, noise_of_counts

MARGIN = 0.5  # percentage points
CHUNK_ENTRIES = 4_000_000  # changes of one image by one seed that are simulated at once

Changes = npt.NDArray[np.int8]  # [trials, seeds, images]: -1 lost, 1 gained, 0 neither


@dataclass(frozen=True)
class Truth:
    """Where two precisions differ. Shares are of the test images."""

    seeds: int
    images: int = 2000
    own: float = 0.0
    """Images that a seed changes by itself."""
    shared: float = 0.0
    """Images that all seeds change alike."""
    fragile: float = 0.0
    """Images that every seed changes with probability 1/2, always in the same direction."""
    spread: float = 0.0
    """Standard deviation over seeds of the true difference, in points; needs `own`."""

    def at_difference(self, points: float) -> "Truth":
        """With as many more changes as a true difference of so many points needs."""
        available = self.own + self.shared + self.fragile / 2
        factor = max(1.0, 1.05 * abs(points) / 100 / available)
        return Truth(
            self.seeds,
            self.images,
            own=self.own * factor,
            shared=self.shared * factor,
            fragile=self.fragile * factor,
            spread=self.spread,
        )

    def simulate(self, rng: np.random.Generator, points: float, trials: int) -> Changes:
        """The changes of so many comparisons whose true difference is `points`."""
        # Of each kind of changes, this surplus of gains over losses, as a share of them.
        surplus = points / 100 / (self.own + self.shared + self.fragile / 2)
        changes = np.zeros((trials, self.seeds, self.images), np.int8)
        if self.own:
            seed_difference = rng.normal(0, self.spread / 100, (trials, self.seeds, 1))
            changes += _draw(rng, changes.shape, self.own, surplus + seed_difference / self.own)
        image_shape = (trials, 1, self.images)
        if self.fragile:
            directions = _draw(rng, image_shape, self.fragile, surplus)
            is_changed = rng.random(changes.shape, dtype=np.float32) < 0.5
            np.copyto(changes, directions, where=is_changed & (directions != 0))
        if self.shared:
            directions = _draw(rng, image_shape, self.shared, surplus)
            np.copyto(changes, directions, where=directions != 0)
        return changes


def _draw(rng: np.random.Generator, shape: tuple[int, ...], share: float, surplus: Any) -> Changes:
    """Changes of a share of all images: gained with probability (1 + surplus) / 2, else lost."""
    gained = share * np.clip((1 + surplus) / 2, 0, 1)
    draws = rng.random(shape, dtype=np.float32)
    changes: Changes = (draws < gained).astype(np.int8)
    changes -= (draws >= gained) & (draws < share)
    return changes


def verdict_kinds(truth: Truth, points: float, trials: int, seed: int) -> dict[str, float]:
    """The share of comparisons that end in each kind of verdict."""
    enlarged = truth.at_difference(points)
    rng = np.random.default_rng(seed)
    counts = dict.fromkeys(("same", "worse", "better", "unknown"), 0)
    for changes in _in_chunks(enlarged, rng, points, trials):
        differences = 100 * changes.mean(axis=2, dtype=np.float64)
        image_sums = changes.sum(axis=1, dtype=np.int64)
        totals = image_sums.sum(axis=1)
        squared_sums = (image_sums**2).sum(axis=1)
        changed = np.count_nonzero(changes, axis=(1, 2))
        for i in range(len(changes)):
            noise = noise_of_counts(
                truth.images,
                truth.seeds,
                total=int(totals[i]),
                squared_image_sums=int(squared_sums[i]),
                changed=int(changed[i]),
            )
            counts[judge(differences[i].tolist(), margin=MARGIN, images=noise).kind] += 1
    return {kind: count / trials for kind, count in counts.items()}


def _in_chunks(
    truth: Truth, rng: np.random.Generator, points: float, trials: int
) -> Iterator[Changes]:
    size = max(1, CHUNK_ENTRIES // (truth.seeds * truth.images))
    for start in range(0, trials, size):
        yield truth.simulate(rng, points, min(size, trials - start))


def standard_error(rate: float, trials: int) -> float:
    """Of a rate that was found in so many trials."""
    return math.sqrt(rate * (1 - rate) / trials)


TRUTHS = [
    # Every seed changes images of its own.
    *[
        Truth(seeds, own=own, spread=spread)
        for seeds in (3, 5, 10)
        for own, spread in ((0.005, 0.0), (0.01, 0.1), (0.03, 0.3))
    ],
    # All seeds change the same few images.
    Truth(3, shared=0.005),
    Truth(3, shared=0.01),
    Truth(3, 4000, shared=0.005),
    Truth(3, 10_000, shared=0.01),
    Truth(3, 10_000, shared=0.02),
    # Both.
    Truth(3, own=0.005, shared=0.005),
    Truth(10, own=0.005, shared=0.005),
    Truth(10, own=0.02, shared=0.003),
    Truth(10, 4000, own=0.02, shared=0.01, spread=0.2),
    # The same images, each in half of the seeds.
    Truth(3, fragile=0.01),
    Truth(10, fragile=0.02),
    # Few seeds, few images.
    Truth(2, shared=0.005),
    Truth(2, own=0.005),
    Truth(3, 1000, shared=0.005),
    Truth(5, 1000, own=0.005),
]


def rates(truth: Truth, trials: int, seed: int) -> dict[str, float]:
    """The columns of the table for one truth, as shares."""
    equal = verdict_kinds(truth, 0.0, trials, seed)
    at_margin = verdict_kinds(truth, -MARGIN, trials, seed + 1)
    beyond = verdict_kinds(truth, -2 * MARGIN, trials, seed + 2)
    return {
        "true 0: same": equal["same"],
        "true 0: worse or better": equal["worse"] + equal["better"],
        "true -0.5: same": at_margin["same"],
        "true -1: same": beyond["same"],
        "true -1: worse": beyond["worse"],
    }


def main() -> None:
    """Prints the table in Markdown, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    columns = [
        "seeds",
        "images",
        "spread",
        "own, shared, fragile",
        *rates(Truth(2, 10, own=0.5), 1, 0),
    ]
    print(f"| {' | '.join(columns)} |")
    print("|" + "---|" * len(columns))
    rows = []
    for i, truth in enumerate(TRUTHS):
        row = rates(truth, options.trials, seed=3 * i)
        rows.append({**asdict(truth), **row})
        shares = ", ".join(f"{100 * x:g} %" for x in (truth.own, truth.shared, truth.fragile))
        cells = [f"{truth.seeds}", f"{truth.images:,}", f"{truth.spread:g}", shares]
        cells += [f"{100 * rate:.1f} %" for rate in row.values()]
        print(f"| {' | '.join(cells)} |", flush=True)
    worst = 100 * standard_error(0.025, options.trials)
    print(f"{options.trials:,} trials a cell; one standard error at 2.5 % is {worst:.2f} %")
    if options.json is not None:
        options.json.write_text(json.dumps({"trials": options.trials, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
