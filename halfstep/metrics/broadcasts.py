"""Finds functions that broadcast outputs against labels: [N, 1] with [N] becomes [N, N].

Such a function compares every sample with every other one, and its mean looks like a score.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class BroadcastCheck:
    """Calls functions of (outputs, labels). Raises where one broadcasts rows against rows.

    Shapes that fit each other cost one comparison. Others are watched, operation by operation.
    """

    def __init__(self) -> None:
        self._checked_shapes: set[tuple[torch.Size, torch.Size]] = set()

    def __call__(self, fn: Callable[[Any, Any], Any], outputs: Any, labels: Any) -> Any:
        """What `fn` returns."""
        if not _would_mix_rows(outputs, labels):
            return fn(outputs, labels)
        shapes = (outputs.shape, labels.shape)
        if shapes in self._checked_shapes:
            return fn(outputs, labels)
        with _RaiseOnMixedRows(outputs, labels):
            result = fn(outputs, labels)
        self._checked_shapes.add(shapes)
        return result


class _RaiseOnMixedRows(TorchDispatchMode):
    """Inside, an elementwise operation that broadcasts rows against rows is a ValueError."""

    def __init__(self, outputs: Tensor, labels: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = len(labels)
        self.shapes = f"outputs {list(outputs.shape)} and labels {list(labels.shape)}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.pointwise in func.tags and len(args) >= 2:
            first, second = args[:2]
            has_rows = [isinstance(x, Tensor) and x.shape[:1] == (self.rows,) for x in args[:2]]
            if all(has_rows) and _would_mix_rows(first, second):
                mixed = list(torch.broadcast_shapes(first.shape, second.shape))
                raise ValueError(
                    f"metric: {self.shapes} were broadcast to {mixed} in the function's "
                    f"{func.overloadpacket.__name__}, which takes every row with every other one. "
                    "Give both the same shape, for instance labels.view_as(outputs); if pairs of "
                    "rows are meant, write labels[None, :]"
                )
        return func(*args, **(kwargs or {}))


def _would_mix_rows(first: Any, second: Any) -> bool:
    """Whether an operation on both has more elements than either, as they differ in dimensions."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    if first.dim() == second.dim() or not first.dim() or not second.dim():
        return False
    if len(first) != len(second):
        return False
    try:
        together = torch.broadcast_shapes(first.shape, second.shape)
    except RuntimeError:
        return False
    return bool(together.numel() > max(first.numel(), second.numel()))
