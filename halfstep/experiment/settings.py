"""Settings of a comparison: one value, checked before anything is loaded or trained.

`halfstep train` uses the same settings with one precision and one seed (see training_run.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from halfstep.precision import Precision
from halfstep.precision.backend_flags import check_supported
from halfstep.utils.checks import expect, finite_number, one_of, whole_number
from halfstep.utils.text import plural

# Name → description, and the learning rate that is used when none is set.
OPTIMIZERS: dict[str, tuple[str, float]] = {
    "sgd": ("SGD", 0.1),
    "momentum": ("SGD with momentum 0.9", 0.02),
    "adam": ("Adam", 1e-3),
    "adamw": ("AdamW", 1e-3),
}
SCHEDULES = ("constant", "linear", "cosine", "poly", "steps", "one_cycle")

SEED_LIMIT = 1 << 63  # torch.manual_seed takes seeds below it


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One network, one data set and one recipe, trained in several precisions with several seeds.

    The defaults bring an MLP to about 85 % on the shipped sample in 4 epochs. The first precision
    is the reference.
    """

    net: str = "mlp"
    data: str = "sample"
    path: str | None = None
    """The folder of a named data set that is not found by itself."""
    precisions: tuple[str, ...] = ("fp32", "fp16", "O1", "O2")
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: int = 4
    batch: int = 64
    optimizer: str = "momentum"
    lr: float | None = None
    """None becomes the optimizer's own rate in OPTIMIZERS."""
    schedule: str = "linear"
    sink: int | None = None
    margin: float = 0.5
    """Percentage points of accuracy: a smaller difference counts as the same."""
    samples: int | None = None
    """Use only the first so many training samples; None: all."""
    test_samples: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        self._set("precisions", _list_without_repeats("precisions", self.precisions))
        self._set("seeds", _list_without_repeats("seeds", self.seeds))

        for name in ("epochs", "batch"):
            self._set(name, whole_number(name, getattr(self, name), minimum=1))
        for name in ("sink", "samples", "test_samples"):
            count = getattr(self, name)
            if count is not None:
                self._set(name, whole_number(name, count, minimum=1))

        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("schedule", self.schedule, SCHEDULES)
        if self.lr is None:
            _, usual_lr = OPTIMIZERS[self.optimizer]
            self._set("lr", usual_lr)
        finite_number("lr", self.lr, above=0)
        finite_number("margin", self.margin, above=0)
        for seed in self.seeds:
            is_integer = isinstance(seed, int) and not isinstance(seed, bool)
            is_valid = is_integer and 0 <= seed < SEED_LIMIT
            expect(is_valid, "seeds", "whole numbers, 0 or more", seed)

        device = resolve_device(self.device)
        for precision in self.precisions:
            check_supported(Precision.parse(precision), device)
        _refuse_synonyms(self.precisions)

    @property
    def torch_device(self) -> torch.device:
        """The device to train on: "auto" is resolved."""
        return resolve_device(self.device)

    @property
    def precision_seed_pairs(self) -> list[tuple[str, int]]:
        """(precision, seed) of every run, seed by seed: early results compare all precisions."""
        return [(precision, seed) for seed in self.seeds for precision in self.precisions]

    def to_spec(self) -> dict[str, Any]:
        """Everything that decides the results, as plain JSON values; the device does not."""
        spec: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                value = list(value)
            if field.name != "device":
                spec[field.name] = value
        return spec

    def _set(self, field_name: str, value: Any) -> None:
        """Sets a field although the dataclass is frozen; only while it is constructed."""
        object.__setattr__(self, field_name, value)


def resolve_device(device: str) -> torch.device:
    """The torch device of a setting. "auto" is CUDA where torch sees a GPU, else the CPU.

    A device that does not exist on this machine is refused.
    """
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        requested = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: expected auto, cpu or cuda, got {device!r}") from None
    if requested.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected auto, cpu or cuda, got {device!r}")
    if requested.type == "cpu":
        return requested

    index = requested.index or 0
    device_count = torch.cuda.device_count()
    if index >= device_count:
        visible = plural(device_count, "CUDA device") if device_count else "no CUDA devices"
        raise ValueError(
            f"device: got {device!r}, and torch sees {visible} here; leave it out, or say cpu"
        )
    return torch.device("cuda", index)


def _list_without_repeats(name: str, values: Any) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name}: expected a list, got {values!r}")
    if not values:
        raise ValueError(f"{name}: expected at least one, got none")
    for i, value in enumerate(values):
        if value in values[:i]:
            raise ValueError(f"{name}: {value!r} is there twice; name each once")
    return tuple(values)


def _refuse_synonyms(precisions: Sequence[str]) -> None:
    """One precision under two names would be compared with itself."""
    name_of: dict[Precision, str] = {}
    for name in precisions:
        first_name = name_of.setdefault(Precision.parse(name), name)
        if first_name != name:
            raise ValueError(
                f"precisions: {name!r} is {first_name!r} under another name; leave one of them out"
            )
