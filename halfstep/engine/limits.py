"""Limits of a run that are not its epochs: wall time, and batches in a pass."""

import time
from dataclasses import dataclass, field
from typing import Any

from halfstep.utils.durations import duration_s, format_duration

TIME_IS_OVER = "max_time"  # how run.stopped begins then
LIMIT_EXPECTED = "a number of batches, 1 or more, or a fraction above 0 and up to 1.0"


@dataclass(frozen=True)
class TimeLimit:
    """So many seconds of wall time from now on."""

    seconds: float
    _started: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, max_time: Any) -> "TimeLimit | None":
        """From what `fit(max_time=…)` takes; None for None."""
        if max_time is None:
            return None
        return cls(duration_s("max_time", max_time))

    @property
    def is_over(self) -> bool:
        """Whether that time has passed."""
        return time.monotonic() - self._started >= self.seconds

    def reason(self, step: int) -> str:
        """What `run.stopped` says about it."""
        return f"{TIME_IS_OVER}: {format_duration(self.seconds)} were over after step {step}"


@dataclass(frozen=True)
class BatchLimit:
    """At most so many batches of a pass: a number of them, or a fraction of all."""

    value: int | float | None = None

    @classmethod
    def of(cls, limit_batches: Any) -> "BatchLimit":
        """From what `fit(limit_batches=…)` takes; None is no limit."""
        is_count = isinstance(limit_batches, int) and not isinstance(limit_batches, bool)
        ok = limit_batches is None
        if is_count:
            ok = limit_batches >= 1
        elif isinstance(limit_batches, float):
            ok = 0.0 < limit_batches <= 1.0
        if not ok:
            is_number = is_count or isinstance(limit_batches, float)
            error_class = ValueError if is_number else TypeError
            raise error_class(f"limit_batches: expected {LIMIT_EXPECTED}, got {limit_batches!r}")
        return cls(limit_batches)

    def apply(self, size: int | None) -> int | None:
        """How many of `size` batches there are under the limit; None where nobody knows.

        Of data without a length a number is taken as its length. A fraction is at least one batch.
        """
        if self.value is None:
            return size
        if isinstance(self.value, float):
            if size is None:
                raise ValueError(
                    f"limit_batches={self.value}: expected data that says how many batches it "
                    "has; give a number of batches instead"
                )
            return min(max(int(size * self.value), 1), size)
        return self.value if size is None else min(self.value, size)
