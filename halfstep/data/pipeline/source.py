"""Where samples come from: columns in memory, or any torch Dataset.

A source returns the samples for a tensor of their numbers. `as_source` makes one of whatever the
user has: a mapping, a tuple, one tensor or array, a list of samples, a torch Dataset.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from halfstep.data.pipeline.collate import (
    Batch,
    UnstackedColumn,
    tensor_from_numpy,
    unstacked_column,
)
from halfstep.data.pipeline.seeding import seeded_generators
from halfstep.utils.text import dtype_name

_CPU = torch.device("cpu")

# torch gathers no unsigned types but uint8: the same bits under a signed name.
_SIGNED_DTYPES = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

Names = tuple[str, ...]


class Source(Protocol):
    @property
    def names(self) -> Names:
        """The names of the columns, in order."""

    @property
    def size(self) -> int:
        """The number of samples."""

    @property
    def device(self) -> torch.device:
        """Where sample numbers are expected."""

    def fetch(self, samples: Tensor) -> Batch:
        """The columns of the samples with these numbers."""


@dataclass(frozen=True, eq=False)
class ColumnSource:
    """Tensors of one length, gathered on the device they are on.

    `origin` describes what they were read from.
    """

    tensors: dict[str, Tensor]
    origin: str = ""

    def __post_init__(self) -> None:
        sizes: dict[str, int | None] = {}
        for name, column in self.tensors.items():
            sizes[name] = len(column) if column.dim() else None
        if not sizes or None in sizes.values() or len(set(sizes.values())) > 1:
            raise ValueError(
                f"expected columns of one length, got {sizes}. Give each column one row per sample."
            )
        if self.size == 0:
            raise ValueError(
                "expected at least one sample, got columns of length 0. "
                "Is the right split or file named?"
            )
        devices = {name: str(column.device) for name, column in self.tensors.items()}
        if len(set(devices.values())) > 1:
            raise ValueError(
                f"expected columns on one device, got {devices}. Move them with .to(device) first."
            )

    @property
    def names(self) -> Names:
        return tuple(self.tensors)

    @property
    def size(self) -> int:
        return len(self._first_column)

    @property
    def device(self) -> torch.device:
        return self._first_column.device

    @property
    def nbytes(self) -> int:
        return sum(column.numel() * column.element_size() for column in self.tensors.values())

    @property
    def _first_column(self) -> Tensor:
        return next(iter(self.tensors.values()))

    def fetch(self, samples: Tensor) -> Batch:
        return {name: _gather(column, samples) for name, column in self.tensors.items()}

    def to(self, device: torch.device) -> "ColumnSource":
        tensors = {name: column.to(device) for name, column in self.tensors.items()}
        return ColumnSource(tensors, self.origin)

    def __str__(self) -> str:
        if self.origin:
            return self.origin
        columns = [
            f"{name} {dtype_name(column.dtype)}{list(column.shape[1:])}"
            for name, column in self.tensors.items()
        ]
        return f"{self.size} samples of {', '.join(columns)}"


def _gather(column: Tensor, samples: Tensor) -> Tensor:
    signed_dtype = _SIGNED_DTYPES.get(column.dtype)
    if signed_dtype is None:
        return column.index_select(0, samples)
    return column.view(signed_dtype).index_select(0, samples).view(column.dtype)


@dataclass(frozen=True, eq=False)
class RowSource:
    """A map-style torch Dataset, read sample by sample.

    Its `__getitems__` is used where it has one. With `keys`, samples are mappings.
    """

    dataset: Any
    names: Names
    keys: tuple[Any, ...] | None = None

    @property
    def size(self) -> int:
        return len(self.dataset)

    @property
    def device(self) -> torch.device:
        return _CPU  # samples are fetched by numbers on the host

    def fetch(self, samples: Tensor) -> Batch:
        numbers = samples.tolist()
        get_many = getattr(self.dataset, "__getitems__", None)
        items = get_many(numbers) if get_many else map(self.dataset.__getitem__, numbers)
        rows = [self._sample_parts(n, item) for n, item in zip(numbers, items, strict=True)]
        if not rows:
            return {name: UnstackedColumn() for name in self.names}
        columns = zip(*rows, strict=True)
        return {
            name: unstacked_column(column) for name, column in zip(self.names, columns, strict=True)
        }

    def _sample_parts(self, number: int, sample: Any) -> tuple[Any, ...]:
        """The sample's value for each column. Raises an error that names an unfit sample."""
        if self.keys is None:
            return self._tuple_parts(number, sample)
        if not isinstance(sample, Mapping):
            raise TypeError(
                f"sample {number}: expected a mapping like sample 0, got {type(sample).__name__}"
            )
        missing = [key for key in self.keys if key not in sample]
        if missing:
            raise ValueError(
                f"sample {number}: expected the key {missing[0]!r}, got {list(sample)}. "
                "Give it one."
            )
        return tuple(sample[key] for key in self.keys)

    def _tuple_parts(self, number: int, sample: Any) -> tuple[Any, ...]:
        parts = split_sample(sample)
        if len(parts) == len(self.names) and not isinstance(sample, Mapping):
            return parts
        if isinstance(sample, Mapping):
            received = f"a mapping of {list(sample)}"
        else:
            received = f"{len(parts)} parts"
        raise ValueError(
            f"sample {number}: expected {len(self.names)} parts {list(self.names)}, got {received}"
        )

    def __str__(self) -> str:
        return f"{self.size} samples of {type(self.dataset).__name__} ({', '.join(self.names)})"


def split_sample(sample: Any) -> tuple[Any, ...]:
    """The parts of a sample without keys: members of a tuple or list, anything else alone."""
    return tuple(sample) if isinstance(sample, tuple | list) else (sample,)


def only_sample(columns: Batch) -> Batch:
    """The one sample of columns of length 1, as it is: no batch dimension, nothing collated."""
    return {
        name: column[0] if isinstance(column, UnstackedColumn | Tensor) else column
        for name, column in columns.items()
    }


def as_source(data: Any, columns: Any) -> Source:
    """The user's data as a source.

    A mapping or a tuple holds columns; a list holds samples, and so does anything else with a
    length and an index.
    """
    names: Names | None
    if columns is None:
        names = None
    elif isinstance(columns, str):
        names = (columns,)
    elif isinstance(columns, Tensor | np.ndarray):
        raise TypeError(
            f"columns: expected names, got a {type(columns).__name__}; inputs and labels are one "
            "tuple: hs.data.Dataset((x, y))"
        )
    else:
        names = tuple(columns)

    if isinstance(data, IterableDataset | DataLoader):
        raise TypeError(
            f"expected data with a length and an index, got a {type(data).__name__}, which has "
            "only its own order. Hand it over as it is: hs.data.Loader(DataLoader(...)) keeps its "
            "batches and resumes them."
        )
    if isinstance(data, Mapping):
        keys = _select_keys(data, names)
        return ColumnSource({name: _as_tensor(name, data[key]) for name, key in keys.items()})
    if isinstance(data, Tensor | np.ndarray):
        data = (data,)
    if isinstance(data, tuple):
        names = _column_names(len(data), names, data)
        parts = zip(names, data, strict=True)
        return ColumnSource({name: _as_tensor(name, part) for name, part in parts})
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return _as_rows(data, names)
    raise TypeError(
        "expected tensors or arrays (a dict, a tuple or one), a list of samples, or a torch "
        f"Dataset with __len__ and __getitem__, got {type(data).__name__}. An iterable of batches "
        "goes into hs.data.Loader(...)."
    )


def _as_rows(data: Any, names: Names | None) -> RowSource:
    if not len(data):
        raise ValueError(f"expected at least one sample, got an empty {type(data).__name__}")
    with seeded_generators(0):  # looking at a sample must not move the user's generators
        first = data[0]
    if isinstance(first, Mapping):
        keys = _select_keys(first, names)
        return RowSource(data, tuple(keys), tuple(keys.values()))
    return RowSource(data, _column_names(len(split_sample(first)), names, first))


def _select_keys(mapping: Mapping[Any, Any], names: Names | None) -> dict[str, Any]:
    """The mapping's keys by their names: all of them, or those in `names`, in that order."""
    keys = {str(key): key for key in mapping}
    if len(keys) < len(mapping):
        raise ValueError(
            f"expected different column names, got {list(mapping)}, of which some are equal as text"
        )
    if names is None:
        return keys
    if set(names) - set(keys) or len(set(names)) < len(names) or not names:
        raise ValueError(f"expected columns out of {list(keys)}, each once, got {list(names)}")
    return {name: keys[name] for name in names}


def _column_names(count: int, names: Names | None, sample: Any) -> Names:
    """`names`, or where there are none the fields of a named tuple, x and y, or numbers."""
    if names is None:
        fields = getattr(sample, "_fields", None) if isinstance(sample, tuple) else None
        if fields:
            names = tuple(fields)
        elif count <= 2:
            names = ("x", "y")[:count]
        else:
            names = tuple(f"c{i}" for i in range(count))
    if len(names) != count or len(set(names)) != count:
        raise ValueError(
            f"expected {count} different column names, one per part of a sample, got {list(names)}"
        )
    return names


def _as_tensor(name: str, value: Any) -> Tensor:
    try:
        if isinstance(value, np.ndarray):
            return tensor_from_numpy(value)
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"column {name!r}: expected a tensor or an array of numbers, got "
            f"{type(value).__name__}: {error}. Other things go in sample by sample: "
            "Dataset(list(zip(...)))."
        ) from error
