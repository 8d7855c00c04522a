"""What a pipeline does to fetched samples: transforms on whole batches, functions of the user's."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.data import hashing
from halfstep.data.pipeline.collate import Batch, UnstackedColumn, stack_column, unstacked_column
from halfstep.data.transforms import Transform, apply

_PLAIN_TYPES = (int, float, complex, str, bytes, bool, type(None))


@dataclass(frozen=True)
class TransformMap:
    """Transforms on columns.

    Several columns get the same random numbers, so that an image and its mask stay together.
    """

    transforms: tuple[Transform, ...]
    columns: tuple[str, ...]
    seed: int = 0

    def __call__(self, batch: Batch, epochs: Tensor, samples: Tensor) -> Batch:
        transformed = {
            name: self._transform_column(name, batch[name], epochs, samples)
            for name in self.columns
        }
        return {**batch, **transformed}

    def output_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return names

    def _transform_column(self, name: str, column: Any, epochs: Tensor, samples: Tensor) -> Any:
        column = stack_column(name, column)
        if isinstance(column, Tensor):
            return self._apply(column, epochs, samples)
        if not isinstance(column, UnstackedColumn):
            raise TypeError(
                f"column {name!r}: expected tensors for {self}, got {type(column[0]).__name__}"
            )

        # Samples of different sizes: one by one. They get the same random numbers as in a batch.
        transformed = UnstackedColumn()
        rows = zip(column, epochs.split(1), samples.split(1), strict=True)
        for part, epoch, sample in rows:
            batch_of_one = torch.as_tensor(part)[None]
            transformed.append(self._apply(batch_of_one, epoch, sample)[0])
        return stack_column(name, transformed)

    def _apply(self, column: Tensor, epochs: Tensor, samples: Tensor) -> Tensor:
        return apply(self.transforms, column, seed=self.seed, epochs=epochs, samples=samples)

    def __str__(self) -> str:
        transforms = ", ".join(describe_callable(transform) for transform in self.transforms)
        return f"map({transforms} on {', '.join(self.columns)})"


@dataclass(frozen=True)
class AlreadyApplied:
    """Stands for a transform that .load() has applied, and changes nothing.

    The transforms behind it keep their numbers in the chain, and with them their random numbers;
    the pipeline's description stays the same, so that saved positions still fit.
    """

    transform: Transform
    draws: ClassVar[int] = 0

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        return batch

    def __repr__(self) -> str:
        return describe_callable(self.transform)


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


@dataclass(frozen=True)
class SelectMap:
    """Only these columns, in this order."""

    columns: tuple[str, ...]

    def __call__(self, batch: Batch, epochs: Tensor, samples: Tensor) -> Batch:
        return {name: batch[name] for name in self.columns}

    def output_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return self.columns

    def __str__(self) -> str:
        return f"select({', '.join(self.columns)})"


Map = TransformMap | FunctionMap | SelectMap


def build_maps(
    operations: Any, columns: tuple[str, ...], output: tuple[str, ...], per_sample: bool
) -> list[Map]:
    """The maps of one call of `.map`."""
    maps: list[Map] = []
    for operation in as_list(operations):
        if not callable(operation):
            raise TypeError(
                "map: expected a transform or a function, got "
                f"{type(operation).__name__} {operation!r}"
            )
        if not is_transform(operation):
            maps.append(FunctionMap(operation, columns, output, per_sample))
            columns = output
        elif columns == output or maps:
            maps.append(TransformMap((operation,), columns))
        else:
            raise ValueError(
                f"map: a transform writes back to its columns {list(columns)}, "
                "so output= is of no use"
            )
    return maps


def as_list(operations: Any) -> list[Any]:
    return list(operations) if isinstance(operations, list | tuple) else [operations]


def is_transform(operation: Any) -> bool:
    return hasattr(operation, "draws")


def join_chains(maps: tuple[Map, ...], seed: int) -> tuple[Map, ...]:
    """Joins neighbouring chains on the same columns, so that one hash gives their random numbers.

    A chain's own seed is a hash of the pipeline's and of its place among the maps.
    """
    joined: list[Map] = []
    for operation in maps:
        previous = joined[-1] if joined else None
        if not isinstance(operation, TransformMap):
            joined.append(operation)
        elif isinstance(previous, TransformMap) and previous.columns == operation.columns:
            joined[-1] = replace(previous, transforms=previous.transforms + operation.transforms)
        else:
            joined.append(replace(operation, seed=hashing.key(seed, len(joined))))
    return tuple(joined)


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
