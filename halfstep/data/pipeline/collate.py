"""Columns on their way to a batch: samples that are not stacked yet, and how they are stacked."""

import warnings
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

# For each column a tensor, or an UnstackedColumn.
Batch: TypeAlias = dict[str, Any]


class UnstackedColumn(list[Any]):
    """The samples of one column, not stacked.

    It is a type of its own because a user's function may return a plain list as its result.
    """


def unstacked_column(samples: Iterable[Any]) -> UnstackedColumn:
    """The samples as a column, with tensors for numpy arrays."""
    return UnstackedColumn(
        tensor_from_numpy(sample) if isinstance(sample, np.ndarray) else sample
        for sample in samples
    )


def tensor_from_numpy(array: "np.ndarray[Any, Any]") -> Tensor:
    """A tensor over the array's own memory, or over a copy where torch cannot read it.

    torch reads no negative strides and no foreign byte order.
    """
    if array.dtype.kind in "biufc" and not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.flags.writeable:
        return torch.as_tensor(array)
    # torch warns that a read-only array might be written to; no code of ours does.
    with warnings.catch_warnings(action="ignore"):
        return torch.as_tensor(array)


def stack_column(name: str, column: Any) -> Any:
    """The samples of a column as one tensor, or as torch's default_collate makes them a batch.

    A column that is stacked already is returned as it is, and so are tensors of different shapes.
    """
    if not isinstance(column, UnstackedColumn):
        return column
    first = column[0]
    if isinstance(first, Tensor) and any(
        getattr(sample, "shape", None) != first.shape for sample in column
    ):
        return column
    try:
        return default_collate(list(column))
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise TypeError(
            f"column {name!r}: expected samples that make a batch (tensors, arrays, numbers, "
            f"strings), got {type(first).__name__}: {error}. Make tensors of them with "
            f".map(function, {name!r}) before .batch, or leave the column out with .select(...)."
        ) from error


def stack_or_raise(name: str, column: Any) -> Any:
    """The column, stacked. Raises a ValueError where samples differ in shape."""
    column = stack_column(name, column)
    if not isinstance(column, UnstackedColumn):
        return column
    shapes = sorted({tuple(getattr(sample, "shape", ())) for sample in column})
    raise ValueError(
        f"column {name!r}: expected samples of one shape in a batch, got {shapes[:4]}. "
        "Make them equal before batch(), for instance with "
        f".map(hs.data.Resize((224, 224)), {name!r})."
    )
