"""A function of the user's as a part of a pipeline, and functions as text."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from halfstep.data.pipeline.collate import Batch, stack_column, unstacked_column

_PLAIN_TYPES = (int, float, complex, str, bytes, bool, type(None))


@dataclass(frozen=True)
class FunctionMap:
    """A function of the user's, which takes the columns in order.

    It sees single samples before `batch`, whole batches after it.
    """

    function: Callable[..., Any]
    columns: tuple[str, ...]
    output: tuple[str, ...]
    per_sample: bool

    def __call__(self, batch: Batch, epochs: Tensor, samples: Tensor) -> Batch:
        inputs = [batch[name] for name in self.columns]
        results: Sequence[Any]
        if self.per_sample:
            rows = [self._result_parts(self.function(*row)) for row in zip(*inputs, strict=True)]
            results = [unstacked_column(parts) for parts in zip(*rows, strict=True)]
        else:
            named_inputs = zip(self.columns, inputs, strict=True)
            stacked_inputs = [stack_column(name, column) for name, column in named_inputs]
            results = self._result_parts(self.function(*stacked_inputs))
        columns = {**batch, **dict(zip(self.output, results, strict=True))}
        return {name: columns[name] for name in self.output_names(tuple(batch))}

    def output_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Columns that go in and do not come out are dropped; new ones come last."""
        remaining = [name for name in names if name not in self.columns or name in self.output]
        added = [name for name in self.output if name not in names]
        return (*remaining, *added)

    def _result_parts(self, result: Any) -> tuple[Any, ...]:
        """What the function returned, one value for each output column."""
        is_several = isinstance(result, tuple) and len(self.output) > 1
        parts: tuple[Any, ...] = result if is_several else (result,)
        if len(parts) != len(self.output):
            raise ValueError(
                f"map: expected {describe_callable(self.function)} to return {len(self.output)} "
                f"values for {list(self.output)}, got {len(parts)}"
            )
        return parts

    def __str__(self) -> str:
        inputs = ", ".join(self.columns)
        outputs = "" if self.output == self.columns else f" to {', '.join(self.output)}"
        kind = "per sample" if self.per_sample else "per batch"
        return f"map({describe_callable(self.function)} on {inputs}{outputs}, {kind})"


def describe_callable(operation: Any) -> str:
    """A function or transform as text that is the same in every process, to compare pipelines by.

    A function is its name, a partial its function and arguments, another object its own repr, or
    its class where it has none.
    """
    if isinstance(operation, partial):
        arguments = [_describe_value(value) for value in operation.args]
        for name, value in operation.keywords.items():
            arguments.append(f"{name}={_describe_value(value)}")
        return f"partial({', '.join([describe_callable(operation.func), *arguments])})"
    qualified_name = getattr(operation, "__qualname__", None)
    if isinstance(qualified_name, str):
        return qualified_name
    cls: Any = type(operation)
    if cls.__repr__ is object.__repr__:
        return str(cls.__qualname__)
    # A memory address is another one in the next process.
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(operation))


def _describe_value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(_describe_value, value))})"
    return repr(value) if isinstance(value, _PLAIN_TYPES) else describe_callable(value)
