"""Columns on their way to a batch: samples that are not stacked yet, and how they are stacked."""

import warnings
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

Batch: TypeAlias = dict[str, Any]  # per column a tensor, or Parts


class Parts(list[Any]):
    """The samples of one column, not stacked: a type of its own, for a user's function may return a list."""


def parts(values: Any) -> Parts:
    """The samples, arrays among them as tensors."""
    return Parts(from_numpy(value) if isinstance(value, np.ndarray) else value for value in values)


def from_numpy(array: "np.ndarray[Any, Any]") -> Tensor:
    """The array's own memory where torch can read it; a copy where it runs backwards or in the other byte order."""
    if array.dtype.kind in "biufc" and not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.flags.writeable:
        return torch.as_tensor(array)
    with warnings.catch_warnings(
        action="ignore"
    ):  # torch fears that somebody writes; nothing here does
        return torch.as_tensor(array)


def stacked(name: str, column: Any) -> Any:
    """One tensor (or torch's collation) of the samples of a column; Parts still where tensors differ in shape."""
    if not isinstance(column, Parts):
        return column
    if isinstance(column[0], Tensor) and any(
        getattr(part, "shape", None) != column[0].shape for part in column
    ):
        return column
    try:
        return default_collate(list(column))
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise TypeError(
            f"column {name!r}: expected samples that make a batch (tensors, arrays, numbers, strings), got "
            f"{type(column[0]).__name__}: {error}. Make tensors of them with .map(function, {name!r}) before .batch, "
            "or leave the column out with .select(...)."
        ) from error


def checked(name: str, column: Any) -> Any:
    """The column, stacked; samples that differ in shape are an error that says how to make them equal."""
    column = stacked(name, column)
    if not isinstance(column, Parts):
        return column
    shapes = sorted({tuple(getattr(part, "shape", ())) for part in column})
    raise ValueError(
        f"column {name!r}: expected samples of one shape in a batch, got {shapes[:4]}. Make them equal before batch(), "
        f"for instance with .map(hs.data.Resize((224, 224)), {name!r})."
    )
