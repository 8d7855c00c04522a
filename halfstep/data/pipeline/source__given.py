"""Whatever the user has as a source: a mapping, a tuple, one tensor or array, a list of samples, a torch Dataset."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from halfstep.data.pipeline.maps__parts import from_numpy
from halfstep.data.pipeline.seeding import seeded
from halfstep.data.pipeline.source import Columns, Rows, Source, parts_of

Names = tuple[str, ...]


def source_of(data: Any, columns: str | Sequence[str] | None) -> Source:
    """A mapping or a tuple holds columns, a list holds samples, and so does anything with a length and an index."""
    names = (columns,) if isinstance(columns, str) else None if columns is None else tuple(columns)
    if isinstance(data, IterableDataset | DataLoader):
        raise TypeError(
            f"expected data with a length and an index, got a {type(data).__name__}, which has only its own order. "
            "Hand it over as it is: hs.data.Loader(DataLoader(...)) keeps its batches and resumes them."
        )
    if isinstance(data, Mapping):
        keys = _selected(data, names)
        return Columns({name: _tensor(name, data[key]) for name, key in keys.items()})
    if isinstance(data, Tensor | np.ndarray):
        data = (data,)
    if isinstance(data, tuple):
        found = _names(len(data), names, data)
        return Columns({name: _tensor(name, part) for name, part in zip(found, data, strict=True)})
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return _rows(data, names)
    raise TypeError(
        f"expected tensors or arrays (a dict, a tuple or one), a list of samples, or a torch Dataset with __len__ and "
        f"__getitem__, got {type(data).__name__}. An iterable of batches goes into hs.data.Loader(...)."
    )


def _rows(data: Any, names: Names | None) -> Rows:
    if not len(data):
        raise ValueError(f"expected at least one sample, got an empty {type(data).__name__}")
    with seeded(0):  # looking at a sample must not move the user's generators
        first = data[0]
    if isinstance(first, Mapping):
        keys = _selected(first, names)
        return Rows(data, tuple(keys), tuple(keys.values()))
    return Rows(data, _names(len(parts_of(first)), names, first))


def _selected(mapping: Mapping[Any, Any], names: Names | None) -> dict[str, Any]:
    """The keys by their names: all of them, or those that are asked for, in that order."""
    keys = {str(key): key for key in mapping}
    if len(keys) < len(mapping):
        raise ValueError(
            f"expected different column names, got {list(mapping)}, of which some are equal as text"
        )
    if names is not None and (set(names) - set(keys) or len(set(names)) < len(names) or not names):
        raise ValueError(f"expected columns out of {list(keys)}, each once, got {list(names)}")
    return {name: keys[name] for name in (keys if names is None else names)}


def _names(count: int, names: Names | None, sample: Any) -> Names:
    """Names for parts that have none: those given, a named tuple's fields, x and y, or numbers."""
    fields = getattr(sample, "_fields", None) if isinstance(sample, tuple) else None
    default = (
        tuple(fields)
        if fields
        else ("x", "y")[:count]
        if count <= 2
        else tuple(f"c{i}" for i in range(count))
    )
    names = default if names is None else names
    if len(names) != count or len(set(names)) != count:
        raise ValueError(
            f"expected {count} different column names, one per part of a sample, got {list(names)}"
        )
    return names


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return from_numpy(value) if isinstance(value, np.ndarray) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"column {name!r}: expected a tensor or an array of numbers, got {type(value).__name__}: {error}. "
            "Other things go in sample by sample: Dataset(list(zip(...)))."
        ) from error
