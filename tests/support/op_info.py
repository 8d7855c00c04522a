"""torch's own table of its operations, with sample arguments for each: OpInfo.

torch tests itself with it. It is not public, so only tests use it.
"""

import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class OpSample(NamedTuple):
    """One call of an operation: its first argument, the others, and those by name."""

    first: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, function: Callable[..., Any]) -> Any:
        """What the function returns, with the same random numbers each time."""
        torch.manual_seed(1)
        return function(self.first, *self.args, **self.kwargs)

    def to(self, *dtypes: torch.dtype) -> "OpSample":
        """The same with its floating tensors in these dtypes; the last one is for all the rest."""
        remaining = list(dtypes)

        def cast_leaf(leaf: Any) -> Any:
            if not _is_float(leaf):
                return leaf
            dtype = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            return leaf.detach().to(dtype, copy=True).requires_grad_(leaf.requires_grad)

        return OpSample(*tree_map(cast_leaf, tuple(self)))

    def floats(self) -> list[Tensor]:
        """Its floating tensors."""
        return [leaf for leaf in tree_leaves(tuple(self)) if _is_float(leaf)]


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def float_operations() -> dict[str, Any]:
    """Every operation of torch's table that takes float32, by its name."""
    # The module that holds the table imports a package that none of this needs.
    if "expecttest" not in sys.modules:
        placeholder = types.ModuleType("expecttest")
        placeholder.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        placeholder.assert_expected_inline = None  # type: ignore[attr-defined]
        sys.modules["expecttest"] = placeholder
    # It imports numba where that is installed, which warns of newer versions of numpy.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        from torch.testing._internal.common_methods_invocations import op_db

    # It also forbids the whole process to set flags of backends, which other tests do.
    flags = torch.backends.disable_global_flags.__globals__
    flags["__allow_nonbracketed_mutation_flag"] = True

    operations = {}
    for op in op_db:
        if torch.float32 in op.dtypes:
            variant = f".{op.variant_test_name}" if op.variant_test_name else ""
            operations[f"{op.name}{variant}"] = op
    return operations


def samples_of(
    op: Any, limit: int, *, requires_grad: bool = False, device: str = "cpu"
) -> Iterator[OpSample]:
    """The first samples of an operation, in float32."""
    torch.manual_seed(0)
    samples = op.sample_inputs(device, torch.float32, requires_grad=requires_grad)
    for _, sample in zip(range(limit), samples, strict=False):
        yield OpSample(sample.input, tuple(sample.args), dict(sample.kwargs))
