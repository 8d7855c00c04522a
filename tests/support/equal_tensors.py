"""Checks that two lists of tensors are equal, bit for bit."""

from collections.abc import Iterable

import torch
from torch import Tensor


def assert_equal_tensors(tensors: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Fails unless both have the same number of tensors, with the same values."""
    for index, (tensor, other) in enumerate(zip(tensors, expected, strict=True)):
        assert torch.equal(tensor, other), f"tensor {index} differs"


def copy_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies that later changes do not reach, without gradients."""
    return [tensor.detach().clone() for tensor in tensors]
