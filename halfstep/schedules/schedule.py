"""A learning rate as a function of the number of real updates."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

_SHOWN = 4  # rates that a repr spells out


@dataclass(frozen=True, repr=False)
class Schedule:
    """The rate of each update: `formula(update, **settings)` in float64, on the host. Past `length` there is none.

    A skipped step is no update, so it does not move the position.
    """

    name: str
    formula: Callable[..., float]
    settings: tuple[tuple[str, Any], ...] = ()
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
        """The rates of `updates` updates from `start` on, computed in float64 and rounded to `dtype` once."""
        self.check(start + updates, first=start)
        rates = [self.at(update) for update in range(start, start + updates)]
        return torch.tensor(rates, dtype=torch.float64).to(device, dtype)

    def check(self, updates: int, *, first: int = 0) -> None:
        """Refuses updates that this schedule has no rate for."""
        if first < 0:
            raise ValueError(f"{self}: updates count from 0, received {first}")
        if self.length is not None and updates > self.length:
            raise ValueError(
                f"{self}: expected rates for {updates} updates, received {self.length}; "
                f"build it for {updates} updates, or train for {self.length} at most"
            )

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={_short(v)}' for k, v in self.settings)})"


def tables(
    schedules: list[Schedule],
    updates: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """One row of rates per parameter group, [groups, updates]; a schedule that groups share is computed once."""
    rows = {id(s): s.table(updates, device, dtype) for s in {id(s): s for s in schedules}.values()}
    return torch.stack([rows[id(s)] for s in schedules])


def is_number(value: object) -> bool:
    """A real number, numpy's included; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def rate_of(value: Any, name: str) -> float:
    """A rate a user gave, as a float: finite, 0 or more; a tensor of one element counts as its value."""
    one = isinstance(value, Tensor) and value.numel() == 1
    if not one and not is_number(value):
        raise TypeError(
            f"{name}: expected a number, received {type(value).__name__} {_short(value)}"
        )
    rate = float(value)
    if not math.isfinite(rate) or rate < 0:
        raise ValueError(f"{name}: expected a finite rate of 0 or more, received {rate}")
    return rate


def whole_of(value: Any, name: str, *, least: int) -> int:
    """A count of updates a user gave."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"{name}: expected a whole number of updates, received {type(value).__name__} {_short(value)}"
        )
    if value < least:
        raise ValueError(f"{name}: expected {least} or more updates, received {value}")
    return int(value)


def _short(value: Any) -> str:
    if isinstance(value, tuple | list) and len(value) > _SHOWN:
        return f"<{len(value)} values>"
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
