"""Where samples come from: columns in memory, or any torch Dataset. A source gives the samples of a list of numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep.data.pipeline.maps__parts import Batch, Parts, parts

_CPU = torch.device("cpu")
# torch gathers no unsigned types but uint8: the same bits under a signed name
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Source(Protocol):
    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def fetch(self, samples: Tensor) -> Batch: ...


@dataclass(frozen=True, eq=False)
class Columns:
    """Tensors of one length, gathered on the device they are on. `origin` is what they were read from, in words."""

    tensors: dict[str, Tensor]
    origin: str = ""

    def __post_init__(self) -> None:
        sizes = {
            name: len(column) if column.dim() else None for name, column in self.tensors.items()
        }
        if not sizes or None in sizes.values() or len(set(sizes.values())) > 1:
            raise ValueError(
                f"expected columns of one length, got {sizes}. Give each column one row per sample."
            )
        if not next(iter(sizes.values())):
            raise ValueError(
                "expected at least one sample, got columns of length 0. Is the right split or file named?"
            )
        devices = {name: str(column.device) for name, column in self.tensors.items()}
        if len(set(devices.values())) > 1:
            raise ValueError(
                f"expected columns on one device, got {devices}. Move them with .to(device) first."
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    @property
    def size(self) -> int:
        return len(next(iter(self.tensors.values())))

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def nbytes(self) -> int:
        return sum(column.numel() * column.element_size() for column in self.tensors.values())

    def fetch(self, samples: Tensor) -> Batch:
        return {name: _gathered(column, samples) for name, column in self.tensors.items()}

    def to(self, device: torch.device) -> "Columns":
        return Columns(
            {name: column.to(device) for name, column in self.tensors.items()}, self.origin
        )

    def __str__(self) -> str:
        columns = (
            f"{k} {str(v.dtype).removeprefix('torch.')}{list(v.shape[1:])}"
            for k, v in self.tensors.items()
        )
        return self.origin or f"{self.size} samples of {', '.join(columns)}"


def _gathered(column: Tensor, samples: Tensor) -> Tensor:
    signed = _SIGNED.get(column.dtype)
    if signed is None:
        return column.index_select(0, samples)
    return column.view(signed).index_select(0, samples).view(column.dtype)


@dataclass(frozen=True, eq=False)
class Rows:
    """A map-style torch Dataset; its `__getitems__` is used where it has one. With `keys`, samples are mappings."""

    dataset: Any
    names: tuple[str, ...]
    keys: tuple[Any, ...] | None = None

    @property
    def size(self) -> int:
        return len(self.dataset)

    @property
    def device(self) -> torch.device:
        return _CPU  # samples are asked for by numbers on the host

    def fetch(self, samples: Tensor) -> Batch:
        numbers = samples.tolist()
        many = getattr(self.dataset, "__getitems__", None)
        rows = many(numbers) if many else map(self.dataset.__getitem__, numbers)
        made = [self._row(number, row) for number, row in zip(numbers, rows, strict=True)]
        columns = zip(*made, strict=True) if made else ([] for _ in self.names)
        return {name: parts(column) for name, column in zip(self.names, columns, strict=True)}

    def _row(self, number: int, sample: Any) -> tuple[Any, ...]:
        if self.keys is None:
            row = parts_of(sample)
            if len(row) != len(self.names) or isinstance(sample, Mapping):
                came = (
                    f"a mapping of {list(sample)}"
                    if isinstance(sample, Mapping)
                    else f"{len(row)} parts"
                )
                raise ValueError(
                    f"sample {number}: expected {len(self.names)} parts {list(self.names)}, got {came}"
                )
            return row
        if not isinstance(sample, Mapping):
            raise TypeError(
                f"sample {number}: expected a mapping like sample 0, got {type(sample).__name__}"
            )
        lacking = [key for key in self.keys if key not in sample]
        if lacking:
            raise ValueError(
                f"sample {number}: expected the key {lacking[0]!r}, got {list(sample)}. Give it one."
            )
        return tuple(sample[key] for key in self.keys)

    def __str__(self) -> str:
        return f"{self.size} samples of {type(self.dataset).__name__} ({', '.join(self.names)})"


def parts_of(sample: Any) -> tuple[Any, ...]:
    """What a sample without keys is made of: a tuple's or a list's members, anything else by itself."""
    return tuple(sample) if isinstance(sample, tuple | list) else (sample,)


def first_of(item: Batch) -> Batch:
    """The one sample of columns of length 1, as it is: no batch dimension, nothing collated."""
    return {
        name: column[0] if isinstance(column, Parts | Tensor) else column
        for name, column in item.items()
    }
