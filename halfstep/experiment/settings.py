"""Settings of a comparison: one value, checked before anything is loaded or trained.

`halfstep train` uses the same settings with one precision and one seed (see training_run.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from halfstep.data.readers.resize_crop import format_image_size, parse_image_size
from halfstep.data.splits import check_test_share
from halfstep.precision import Precision
from halfstep.precision.advice import find_half_units, precisions_to_compare
from halfstep.precision.backend_flags import check_supported
from halfstep.utils.checks import expect, finite_number, one_of, whole_number
from halfstep.utils.rank_environment import local_rank_of_environment
from halfstep.utils.text import plural

# Name → description, and the learning rate that is used when none is set.
OPTIMIZERS: dict[str, tuple[str, float]] = {
    "sgd": ("SGD", 0.1),
    "momentum": ("SGD with momentum 0.9", 0.02),
    "adam": ("Adam", 1e-3),
    "adamw": ("AdamW", 1e-3),
}
SCHEDULES = ("constant", "linear", "cosine", "poly", "steps", "one_cycle")

# In place of a list of precisions: those that the device is good for.
BY_DEVICE = ("by device",)

CLASS_WEIGHTS = ("balanced",)
TASKS = ("classification", "regression")
EXACTNESS = ("bits",)
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
    precisions: tuple[str, ...] = BY_DEVICE
    """By default fp32 and, in each half dtype that the device has units for, stored low, O1 and O2;
    float16 on a device without such units."""
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
    size: str | None = None
    """Images are brought to it: "224", or "224x160" for another height than width."""
    test_share: float | None = None
    """Of data that nobody has split, the share that is test data; None: a fifth."""
    split_seed: int | None = None
    skip_damaged: bool | None = None
    """Whether images that cannot be decoded are left out, instead of being an error."""
    class_weights: str | None = None
    target: str | None = None
    """Of a table: the column to predict."""
    task: str | None = None
    """Of a table: classification or regression; None: by what the target column holds."""
    drop: str | None = None
    """Of a table: columns to leave out, with commas between."""
    device: str = "auto"
    ranks: int = 1
    """Processes that train together, each a part of every batch."""
    exact: str | None = None
    """"bits": the same results for any number of ranks."""
    logical: int | None = None
    """With `exact`: the micro-batches that every batch is cut into."""

    def __post_init__(self) -> None:
        device = resolve_device(self.device)
        if self.precisions == BY_DEVICE:
            self._set("precisions", precisions_to_compare(find_half_units(device)))
        self._set("precisions", _list_without_repeats("precisions", self.precisions))
        self._set("seeds", _list_without_repeats("seeds", self.seeds))

        for name in ("epochs", "batch"):
            self._set(name, whole_number(name, getattr(self, name), minimum=1))
        self._set("ranks", whole_number("ranks", self.ranks, minimum=1))
        for name in ("sink", "samples", "test_samples", "logical"):
            count = getattr(self, name)
            if count is not None:
                self._set(name, whole_number(name, count, minimum=1))

        self._check_data_settings()

        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("schedule", self.schedule, SCHEDULES)
        if self.exact is not None:
            one_of("exact", self.exact, EXACTNESS)
        if self.lr is None:
            _, usual_lr = OPTIMIZERS[self.optimizer]
            self._set("lr", usual_lr)
        finite_number("lr", self.lr, above=0)
        finite_number("margin", self.margin, above=0)
        for seed in self.seeds:
            is_integer = isinstance(seed, int) and not isinstance(seed, bool)
            is_valid = is_integer and 0 <= seed < SEED_LIMIT
            expect(is_valid, "seeds", "whole numbers, 0 or more", seed)

        for precision in self.precisions:
            check_supported(Precision.parse(precision), device)
        _refuse_synonyms(self.precisions)

    def _check_data_settings(self) -> None:
        """The settings of images, splits and tables; all of them may be None."""
        if self.size is not None:
            self._set("size", format_image_size(parse_image_size("size", self.size)))
        if self.test_share is not None:
            self._set("test_share", check_test_share(self.test_share))
        if self.split_seed is not None:
            self._set("split_seed", whole_number("split_seed", self.split_seed, minimum=0))
        if self.class_weights is not None:
            one_of("class_weights", self.class_weights, CLASS_WEIGHTS)
        if self.task is not None:
            one_of("task", self.task, TASKS)

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

    Each rank on a machine has a GPU of its own. A device that does not exist is refused.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        requested = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: expected auto, cpu or cuda, got {device!r}") from None
    if requested.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected auto, cpu or cuda, got {device!r}")
    if requested.type == "cpu":
        return requested

    device_count = torch.cuda.device_count()
    index = requested.index
    if ":" not in device:
        index = local_rank_of_environment() % max(1, device_count)
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
