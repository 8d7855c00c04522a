"""What a comparison is asked to do, checked as one value before anything is loaded or trained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from halfstep.errors import closest_name
from halfstep.precision import Precision
from halfstep.precision.backend_flags import check_supported

# name → what it is, and the learning rate when none is given
OPTIMIZERS: dict[str, tuple[str, float]] = {
    "sgd": ("SGD", 0.1),
    "momentum": ("SGD with momentum 0.9", 0.02),
    "adam": ("Adam", 1e-3),
    "adamw": ("AdamW", 1e-3),
}
SCHEDULES = ("constant", "linear", "cosine", "poly", "steps", "one_cycle")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One network, one set of data, one recipe; several precisions and seeds.

    The defaults bring an MLP to about 85 % on the shipped sample in 4 epochs. The first precision is the reference.
    """

    net: str = "mlp"
    data: str = "sample"
    path: str | None = None
    """Where the data lies, for a name that is not found by itself."""
    precisions: tuple[str, ...] = ("fp32", "fp16", "O1", "O2")
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: int = 4
    batch: int = 64
    optimizer: str = "momentum"
    lr: float | None = None
    """None: the optimizer's own in the table."""
    schedule: str = "linear"
    sink: int | None = None
    margin: float = 0.5
    """In points: what counts as the same."""
    samples: int | None = None
    """Only so many of the training samples; None: all."""
    test_samples: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        self._set("precisions", _listed("precisions", self.precisions))
        self._set("seeds", _listed("seeds", self.seeds))
        for name in ("epochs", "batch", "sink", "samples", "test_samples"):
            _whole(name, getattr(self, name), optional=name not in ("epochs", "batch"))
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("schedule", self.schedule, SCHEDULES)
        self._set("lr", OPTIMIZERS[self.optimizer][1] if self.lr is None else self.lr)
        for name in ("lr", "margin"):
            _above_zero(name, getattr(self, name))
        for seed in self.seeds:
            if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 63:
                raise ValueError(f"seeds: expected whole numbers of 0 or more, got {seed!r}")
        device = chosen(self.device)
        for name in self.precisions:
            check_supported(Precision.parse(name), device)
        _refuse_twins(self.precisions)

    @property
    def place(self) -> torch.device:
        """The device that "auto" stands for."""
        return chosen(self.device)

    @property
    def pairs(self) -> list[tuple[str, int]]:
        """Every run: seed by seed, so that an early look compares all precisions."""
        return [(name, seed) for seed in self.seeds for name in self.precisions]

    def asked(self) -> dict[str, Any]:
        """What decides the results, as JSON has it."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "device"}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)


def chosen(device: str) -> torch.device:
    """CUDA where there is any for "auto"; a device that is named and not there is refused."""
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: expected auto, cpu or cuda, got {device!r}") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected auto, cpu or cuda, got {device!r}")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        seen = f"{count or 'no'} CUDA device{'' if count == 1 else 's'} here"
        raise ValueError(f"device: got {device!r}, and torch sees {seen}; leave it out, or say cpu")
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else found


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name}: expected a list, got {values!r}")
    if not values:
        raise ValueError(f"{name}: expected at least one, got none")
    twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
    if twice is not None:
        raise ValueError(f"{name}: {twice!r} is there twice; name each once")
    return tuple(values)


def _refuse_twins(given: Sequence[str]) -> None:
    """The same precision under two names would be compared with itself."""
    seen: dict[Precision, str] = {}
    for name in given:
        other = seen.setdefault(Precision.parse(name), name)
        if other != name:
            raise ValueError(
                f"precisions: {name!r} is {other!r} under another name; leave one of them out"
            )


def _whole(name: str, value: Any, *, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: expected a whole number of 1 or more, got {value!r}")


def _above_zero(name: str, value: Any) -> None:
    good = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )
    if not good:
        raise ValueError(f"{name}: expected a number above 0, got {value!r}")


def _one_of(name: str, value: Any, table: Any) -> None:
    if value not in table:
        close = closest_name(value, table)
        hint = f". Did you mean {close!r}?" if close else ""
        raise ValueError(f"{name}: expected one of {', '.join(table)}, got {value!r}{hint}")
