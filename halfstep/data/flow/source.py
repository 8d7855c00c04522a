"""Where samples come from: columns in memory, or any torch Dataset. A source gives the samples of a list of numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

Batch: TypeAlias = dict[str, Any]  # a tensor per column, or a list of samples where they do not stack


class Source(Protocol):
    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def size(self) -> int: ...

    def fetch(self, samples: Tensor) -> Batch: ...


@dataclass(frozen=True, eq=False)
class Columns:
    """Tensors of one length, gathered on the device they are on."""

    tensors: dict[str, Tensor]

    def __post_init__(self) -> None:
        sizes = {name: len(column) if column.dim() else None for name, column in self.tensors.items()}
        if not sizes or None in sizes.values() or len(set(sizes.values())) > 1:
            raise ValueError(f"expected columns of one length, got {sizes}. Give each column one row per sample.")
        if not next(iter(sizes.values())):
            raise ValueError("expected at least one sample, got columns of length 0. Is the right split or file named?")

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
        return {name: column.index_select(0, samples) for name, column in self.tensors.items()}

    def to(self, device: torch.device) -> "Columns":
        return Columns({name: column.to(device) for name, column in self.tensors.items()})

    def __str__(self) -> str:
        columns = (f"{k} {str(v.dtype).removeprefix('torch.')}{list(v.shape[1:])}" for k, v in self.tensors.items())
        return f"{self.size} samples of {', '.join(columns)}"


@dataclass(frozen=True, eq=False)
class Rows:
    """A map-style torch Dataset; its `__getitems__` is used where it has one."""

    dataset: Any
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.dataset)

    def fetch(self, samples: Tensor) -> Batch:
        numbers = samples.tolist()
        many = getattr(self.dataset, "__getitems__", None)
        rows = [_row(row) for row in (many(numbers) if many else map(self.dataset.__getitem__, numbers))]
        if any(len(row) != len(self.names) for row in rows):
            raise ValueError(f"expected samples of {len(self.names)} parts {self.names}, got {[len(r) for r in rows]}")
        return {name: [row[i] for row in rows] for i, name in enumerate(self.names)}

    def __str__(self) -> str:
        return f"{self.size} samples of {type(self.dataset).__name__} ({', '.join(self.names)})"


def source_of(data: Any, columns: Sequence[str] | None) -> Source:
    """The source for whatever the user has: a dict, tuple or list of arrays or tensors, one of them, or a Dataset."""
    if isinstance(data, IterableDataset | DataLoader):
        raise TypeError(
            f"expected data with a length and an index, got a {type(data).__name__}, which has only its own order. "
            "Hand it over as it is: hs.data.Loader(DataLoader(...)) keeps its batches and resumes them."
        )
    if isinstance(data, Tensor | np.ndarray):
        data = (data,)
    if isinstance(data, Mapping):
        return Columns(_named({str(name): _tensor(name, value) for name, value in data.items()}, columns))
    if isinstance(data, tuple | list) and data and all(isinstance(part, Tensor | np.ndarray) for part in data):
        names = _names(len(data), columns)
        return Columns({name: _tensor(name, part) for name, part in zip(names, data, strict=True)})
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        if not len(data):
            raise ValueError(f"expected at least one sample, got an empty {type(data).__name__}")
        first = data[0]
        return Rows(data, _names(len(_row(first)), columns, first))
    raise TypeError(
        f"expected tensors or arrays (a dict, a tuple or one), or a torch Dataset with __len__ and __getitem__, got "
        f"{type(data).__name__}. An iterable of batches goes into hs.data.Loader(...)."
    )


def _named(tensors: dict[str, Tensor], columns: Sequence[str] | None) -> dict[str, Tensor]:
    if columns is not None and set(columns) - set(tensors):
        raise ValueError(f"expected columns out of {list(tensors)}, got {list(columns)}")
    return {name: tensors[name] for name in columns or tensors}


def _names(count: int, columns: Sequence[str] | None, first: Any = None) -> tuple[str, ...]:
    default = tuple(first) if isinstance(first, Mapping) else ("x", "y")[:count]
    names = tuple(columns) if columns is not None else default if len(default) == count else ()
    names = names or tuple(f"c{i}" for i in range(count))
    if len(names) != count or len(set(names)) != count:
        raise ValueError(f"expected {count} different column names, one per part of a sample, got {list(names)}")
    return names


def _row(sample: Any) -> tuple[Any, ...]:
    if isinstance(sample, Mapping):
        return tuple(sample.values())
    return tuple(sample) if isinstance(sample, tuple | list) else (sample,)


def _tensor(name: Any, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"column {name!r}: expected a tensor or an array of numbers, got {type(value).__name__}"
        ) from error


def loaded(source: Source) -> Columns:
    """Every sample read into memory; samples that do not stack are an error that names the column."""
    parts = source.fetch(torch.arange(source.size))
    stacks = {name: stacked(column) for name, column in parts.items()}
    odd = [name for name, column in stacks.items() if not isinstance(column, Tensor)]
    if odd:
        raise ValueError(f"load: expected samples that stack to tensors, got others in {odd}. Make them equal in size.")
    return Columns(stacks)


def stacked(column: Any) -> Any:
    """One tensor (or torch's collation) of a list of samples; the list itself where tensors differ in shape."""
    if not isinstance(column, list):
        return column
    if isinstance(column[0], Tensor) and any(part.shape != column[0].shape for part in column):
        return column
    return default_collate(column)
