"""Axes: a value's place between 0 and 1, and round numbers to mark."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

HUGE = 1e100  # beyond it sums overflow; no chart can show it anyway


@dataclass(frozen=True)
class Axis:
    """From `lo` to `hi`, linear or, with `log`, by powers."""

    lo: float
    hi: float
    log: bool = False

    def at(self, value: float) -> float:
        """0 at lo, 1 at hi; values far outside stay within −1 and 2, where the drawing is cut."""
        if self.log:
            low = math.log(self.lo)
            place = (math.log(max(value, 1 / HUGE)) - low) / (math.log(self.hi) - low)
        else:
            place = (value - self.lo) / (self.hi - self.lo)
        return min(2.0, max(-1.0, place))

    def ticks(self, most: int = 6) -> list[float]:
        """At most `most` round values inside."""
        return self._powers(most) if self.log else self._steps(most)

    def _steps(self, most: int) -> list[float]:
        rough = (self.hi - self.lo) / max(1, most - 1)
        base = 10.0 ** math.floor(math.log10(rough))
        step = next(
            base * m for m in (1, 2, 5, 10, 20) if (self.hi - self.lo) / (base * m) <= most - 1
        )
        first = math.ceil(self.lo / step - 1e-9)
        return [
            float(f"{i * step:.12g}") for i in range(first, math.floor(self.hi / step + 1e-9) + 1)
        ]

    def _powers(self, most: int) -> list[float]:
        """Powers of two: a loss scale moves by them, and a loss is read as well by halves as by tenths."""
        first, last = math.ceil(math.log2(self.lo) - 1e-9), math.floor(math.log2(self.hi) + 1e-9)
        stride = max(1, math.ceil((last - first + 1) / most))
        return [2.0**i for i in range(first, last + 1, stride)]


def around(
    values: Iterable[float], *, log: bool = False, pad: float = 0.05, floor: float | None = None
) -> Axis:
    """An axis that holds the values, with a little air; one value alone gets air as well."""
    found = [min(HUGE, max(1 / HUGE if log else -HUGE, v)) for v in values if not log or v > 0]
    lo, hi = (min(found), max(found)) if found else (1.0, 2.0)
    if log:
        air = max(1.2, (hi / lo) ** pad)
        return Axis(lo / air, hi * air, log=True)
    air = (
        (hi - lo) * pad if hi - lo > 1e-9 * abs(hi) else abs(hi) * 0.1 or 0.5
    )  # below it all marks would read alike
    low = lo - air
    return Axis(low if floor is None else max(low, floor) if lo > floor else floor, hi + air)
