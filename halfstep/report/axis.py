"""Axes of charts: where a value is drawn, and which round numbers are marked."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

# Larger values are cut to this: sums of them would overflow, and no chart can show them anyway.
MAX_VALUE = 1e100
MIN_POSITIVE = 1 / MAX_VALUE

# A tick that lies on the end of an axis counts as inside, whatever its last bits are.
TICK_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`: linear, or logarithmic with `log`."""

    low: float
    high: float
    log: bool = False

    def fraction(self, value: float) -> float:
        """Where the value lies: 0 at `low`, 1 at `high`.

        Values far outside stay within −1 and 2; the drawing is cut at 0 and 1.
        """
        if self.log:
            log_low = math.log(self.low)
            log_value = math.log(max(value, MIN_POSITIVE))
            fraction = (log_value - log_low) / (math.log(self.high) - log_low)
        else:
            fraction = (value - self.low) / (self.high - self.low)
        return min(2.0, max(-1.0, fraction))

    def ticks(self, limit: int = 6) -> list[float]:
        """At most `limit` round values on the axis."""
        if self.log:
            return self._powers_of_two(limit)
        return self._round_multiples(limit)

    def _round_multiples(self, limit: int) -> list[float]:
        """Multiples of 1, 2 or 5 times a power of ten."""
        length = self.high - self.low
        smallest_step = length / max(1, limit - 1)
        power_of_ten = 10.0 ** math.floor(math.log10(smallest_step))
        candidates = [power_of_ten * factor for factor in (1, 2, 5, 10, 20)]
        step = next(step for step in candidates if length / step <= limit - 1)

        first = math.ceil(self.low / step - TICK_TOLERANCE)
        last = math.floor(self.high / step + TICK_TOLERANCE)
        return [float(f"{i * step:.12g}") for i in range(first, last + 1)]

    def _powers_of_two(self, limit: int) -> list[float]:
        """A loss scale moves by powers of two, and a loss can be read by halves as by tenths."""
        first = math.ceil(math.log2(self.low) - TICK_TOLERANCE)
        last = math.floor(math.log2(self.high) + TICK_TOLERANCE)
        stride = max(1, math.ceil((last - first + 1) / limit))
        return [2.0**i for i in range(first, last + 1, stride)]


def linear_axis(
    values: Iterable[float], *, padding: float = 0.05, floor: float | None = None
) -> Axis:
    """An axis that holds the values, with some space around them; it does not go below `floor`."""
    clipped = [min(MAX_VALUE, max(-MAX_VALUE, value)) for value in values]
    low = min(clipped, default=1.0)
    high = max(clipped, default=2.0)

    if high - low > 1e-9 * abs(high):
        space = (high - low) * padding
    else:
        # All values are alike. On an axis shorter than ±10 % the ticks would read alike too.
        space = abs(high) * 0.1
    if space == 0:
        space = 0.5

    axis_low = low - space
    if floor is not None:
        axis_low = max(axis_low, floor)
    return Axis(axis_low, high + space)


def log_axis(values: Iterable[float], *, padding: float = 0.05) -> Axis:
    """A logarithmic axis that holds the positive values, with some space around them."""
    clipped = [min(MAX_VALUE, max(MIN_POSITIVE, value)) for value in values if value > 0]
    low = min(clipped, default=1.0)
    high = max(clipped, default=2.0)
    space = max(1.2, (high / low) ** padding)
    return Axis(low / space, high * space, log=True)
