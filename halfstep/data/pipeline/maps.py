"""What a pipeline does to the samples it fetched: device transforms on whole batches, and functions of the user's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.data import hashing
from halfstep.data.pipeline.maps__parts import Batch, Parts, parts, stacked
from halfstep.data.pipeline.maps__shown import shown
from halfstep.data.transforms import Transform, apply


@dataclass(frozen=True)
class Chain:
    """Transforms on columns; several columns get the same random numbers, so an image and its mask stay together."""

    transforms: tuple[Transform, ...]
    columns: tuple[str, ...]
    seed: int = 0

    def __call__(self, batch: Batch, epochs: Tensor, samples: Tensor) -> Batch:
        changed = {name: self._column(name, batch[name], epochs, samples) for name in self.columns}
        return {**batch, **changed}

    def names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return names

    def _column(self, name: str, column: Any, epochs: Tensor, samples: Tensor) -> Any:
        column = stacked(name, column)
        if isinstance(column, Tensor):
            return self._apply(column, epochs, samples)
        if not isinstance(column, Parts):
            raise TypeError(
                f"column {name!r}: expected tensors for {self}, got {type(column[0]).__name__}"
            )
        each = zip(
            column, epochs.split(1), samples.split(1), strict=True
        )  # sizes differ: one by one, same numbers
        made = Parts(
            self._apply(torch.as_tensor(part)[None], epoch, sample)[0]
            for part, epoch, sample in each
        )
        return stacked(name, made)

    def _apply(self, column: Tensor, epochs: Tensor, samples: Tensor) -> Tensor:
        return apply(self.transforms, column, seed=self.seed, epochs=epochs, samples=samples)

    def __str__(self) -> str:
        return f"map({', '.join(map(shown, self.transforms))} on {', '.join(self.columns)})"


@dataclass(frozen=True)
class Done:
    """A transform that .load() has applied: it stands for its place, so that random numbers and states stay."""

    transform: Transform
    draws: ClassVar[int] = 0

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        return batch

    def __repr__(self) -> str:
        return shown(self.transform)


@dataclass(frozen=True)
class Function:
    """A function of the user's, of the columns in order; per sample before `batch`, of whole batches after it."""

    function: Callable[..., Any]
    columns: tuple[str, ...]
    output: tuple[str, ...]
    per_sample: bool

    def __call__(self, batch: Batch, epochs: Tensor, samples: Tensor) -> Batch:
        if self.per_sample:
            rows = zip(*(batch[name] for name in self.columns), strict=True)
            results = zip(*(self._parts(self.function(*row)) for row in rows), strict=True)
            made: Sequence[Any] = [parts(result) for result in results]
        else:
            made = self._parts(
                self.function(*(stacked(name, batch[name]) for name in self.columns))
            )
        columns = {**batch, **dict(zip(self.output, made, strict=True))}
        return {name: columns[name] for name in self.names(tuple(batch))}

    def names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Columns that went in and do not come out are gone; new ones come last."""
        kept = tuple(name for name in names if name not in self.columns or name in self.output)
        return kept + tuple(name for name in self.output if name not in names)

    def _parts(self, result: Any) -> tuple[Any, ...]:
        found = result if isinstance(result, tuple) and len(self.output) > 1 else (result,)
        if len(found) != len(self.output):
            raise ValueError(
                f"map: expected {shown(self.function)} to return {len(self.output)} values for {list(self.output)}, "
                f"got {len(found)}"
            )
        return found

    def __str__(self) -> str:
        to = "" if self.output == self.columns else f" to {', '.join(self.output)}"
        kind = "per sample" if self.per_sample else "per batch"
        return f"map({shown(self.function)} on {', '.join(self.columns)}{to}, {kind})"


@dataclass(frozen=True)
class Select:
    """Only these columns, in this order."""

    columns: tuple[str, ...]

    def __call__(self, batch: Batch, epochs: Tensor, samples: Tensor) -> Batch:
        return {name: batch[name] for name in self.columns}

    def names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return self.columns

    def __str__(self) -> str:
        return f"select({', '.join(self.columns)})"


Map = Chain | Function | Select


def mapped(
    operations: Any, columns: tuple[str, ...], output: tuple[str, ...], per_sample: bool
) -> list[Map]:
    """The maps of one call of `.map`."""
    maps: list[Map] = []
    for operation in listed(operations):
        if not callable(operation):
            raise TypeError(
                f"map: expected a transform or a function, got {type(operation).__name__} {operation!r}"
            )
        if not is_transform(operation):
            maps.append(Function(operation, columns, output, per_sample))
            columns = output
        elif columns == output or maps:
            maps.append(Chain((operation,), columns))
        else:
            raise ValueError(
                f"map: a transform writes back to its columns {list(columns)}, so output= is of no use"
            )
    return maps


def listed(operations: Any) -> list[Any]:
    return list(operations) if isinstance(operations, list | tuple) else [operations]


def is_transform(operation: Any) -> bool:
    return hasattr(operation, "draws")


def joined(maps: tuple[Map, ...], seed: int) -> tuple[Map, ...]:
    """Neighbouring chains on the same columns made one, so that their random numbers are one hash."""
    result: list[Map] = []
    for map in maps:
        last = result[-1] if result else None
        if isinstance(map, Chain) and isinstance(last, Chain) and last.columns == map.columns:
            result[-1] = replace(last, transforms=last.transforms + map.transforms)
        else:
            result.append(
                replace(map, seed=hashing.key(seed, len(result))) if isinstance(map, Chain) else map
            )
    return tuple(result)
