"""A learning rate as a function of the number of real updates."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from halfstep.utils.checks import whole_number

# A repr shows the values of a list up to this many, and of a longer one only their number.
MAX_VALUES_IN_REPR = 4

# Longer texts of a setting are cut in a repr.
MAX_CHARS_IN_REPR = 60

Settings = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, repr=False)
class Schedule:
    """The rate of each update: `formula(update, **settings)` in float64, on the host.

    A skipped step is no update, so it does not move the position. Past `length` updates there is
    no rate; None means without end.
    """

    name: str
    formula: Callable[..., float]
    settings: Settings = ()
    length: int | None = None

    def at(self, update: int) -> float:
        """The rate of update number `update`, from 0; past the end is a ValueError."""
        self.check(update + 1, first=update)
        rate = self.formula(update, **dict(self.settings))
        if not math.isfinite(rate) or rate < 0:
            raise ValueError(
                f"{self}: expected a finite rate of 0 or more at update {update}, received {rate}"
            )
        return rate

    def table(
        self,
        updates: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float64,
        *,
        start: int = 0,
    ) -> Tensor:
        """The rates of `updates` updates from `start` on, rounded from float64 to `dtype` once."""
        self.check(start + updates, first=start)
        rates = [self.at(update) for update in range(start, start + updates)]
        return torch.tensor(rates, dtype=torch.float64).to(device, dtype)

    def check(self, updates: int, *, first: int = 0) -> None:
        """Raises a ValueError unless there is a rate for all updates from `first` to `updates`."""
        if first < 0:
            raise ValueError(f"{self}: updates count from 0, received {first}")
        if self.length is not None and updates > self.length:
            raise ValueError(
                f"{self}: expected rates for {updates} updates, received {self.length}; "
                f"build it for {updates} updates, or train for {self.length} at most"
            )

    def __repr__(self) -> str:
        settings = [f"{name}={_short_repr(value)}" for name, value in self.settings]
        return f"{self.name}({', '.join(settings)})"


def tables(
    schedules: list[Schedule],
    updates: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """One row of rates for each parameter group, [groups, updates]."""
    rows: dict[int, Tensor] = {}
    for schedule in schedules:
        if id(schedule) not in rows:  # groups that share a schedule share its computation
            rows[id(schedule)] = schedule.table(updates, device, dtype)
    return torch.stack([rows[id(schedule)] for schedule in schedules])


def is_number(value: object) -> bool:
    """Whether this is a real number, of Python or numpy. True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_rate(name: str, value: Any) -> float:
    """A rate that a user gave, as a float: finite, 0 or more. A tensor may hold one element."""
    is_single_tensor = isinstance(value, Tensor) and value.numel() == 1
    if not is_single_tensor and not is_number(value):
        raise TypeError(
            f"{name}: expected a number, received {type(value).__name__} {_short_repr(value)}"
        )
    rate = float(value)
    if not math.isfinite(rate) or rate < 0:
        raise ValueError(f"{name}: expected a finite rate of 0 or more, received {rate}")
    return rate


def check_updates(name: str, value: Any, *, minimum: int) -> int:
    """A number of updates that a user gave, as an int."""
    return whole_number(name, value, minimum=minimum, of_what="updates", type_error=TypeError)


def _short_repr(value: Any) -> str:
    if isinstance(value, tuple | list) and len(value) > MAX_VALUES_IN_REPR:
        return f"<{len(value)} values>"
    text = getattr(value, "__name__", None) or repr(value)
    if len(text) > MAX_CHARS_IN_REPR:
        text = text[: MAX_CHARS_IN_REPR - 3] + "..."
    return text
