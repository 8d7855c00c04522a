"""Weights of classes for a loss: rare classes count as much as frequent ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.utils.checks import whole_number

# From this ratio of the most to the least frequent class on, commands speak of it.
IMBALANCE_RATIO = 3


def class_weights(labels: Any, classes: int | None = None) -> Tensor:
    """samples / (classes · samples of the class) for each class, float32: the "balanced" weights.

    For `nn.CrossEntropyLoss(weight=…)`. `labels` are whole numbers from 0: a tensor, an array, a
    list, or anything with `labels` or `targets`, as ImageFolder and torchvision's data sets have.
    `classes` is their number, if the largest label does not say it. A class without a sample gets
    the weight 0, and does not count as one.

    >>> class_weights([0, 0, 0, 1])
    tensor([0.6667, 2.0000])
    """
    for name in ("labels", "targets"):
        if not isinstance(labels, Tensor | np.ndarray) and hasattr(labels, name):
            labels = getattr(labels, name)
            break
    try:
        column = torch.as_tensor(labels).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"class_weights: expected labels as whole numbers, got {type(labels).__name__}: {error}"
        ) from error
    is_whole = not column.is_floating_point() and not column.is_complex()
    if column.dim() != 1 or not len(column) or not is_whole or column.min() < 0:
        raise ValueError(
            "class_weights: expected at least one label, whole numbers from 0 in one dimension, "
            f"got {column.dtype} of shape {tuple(column.shape)}"
        )
    largest = int(column.max())
    if classes is not None:
        classes = whole_number("classes", classes, minimum=largest + 1)
    counts = torch.bincount(column.long(), minlength=classes or 0)
    return weights_of_counts(counts.tolist())


def weights_of_counts(counts: Sequence[int]) -> Tensor:
    """The same from the number of samples of each class."""
    tensor = torch.tensor(counts, dtype=torch.float64)
    present = int((tensor > 0).sum())
    weights = torch.where(tensor > 0, tensor.sum() / (present * tensor), 0.0)
    return weights.float()


def describe_imbalance(names: Sequence[str], counts: Sequence[int]) -> str | None:
    """One line about classes of very different sizes; None where there are none."""
    pairs = [(count, name) for name, count in zip(names, counts, strict=True) if count]
    if len(pairs) < 2:
        return None
    fewest, rare = min(pairs)
    most, frequent = max(pairs)
    if most < IMBALANCE_RATIO * fewest:
        return None
    return (
        f"{most:,} samples of {frequent!r} and {fewest:,} of {rare!r}, "
        f"{most / fewest:.3g} times as many"
    )
