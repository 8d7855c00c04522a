"""What a pipeline does to the samples it fetched: device transforms on whole batches, and functions of the user's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfstep.data import hashing
from halfstep.data.flow.source import Batch, stacked
from halfstep.data.transforms import Transform, apply


@dataclass(frozen=True)
class Chain:
    """Transforms on columns; several columns get the same random numbers, so an image and its mask stay together."""

    transforms: tuple[Transform, ...]
    columns: tuple[str, ...]
    seed: int = 0

    def __call__(self, batch: Batch, epochs: Tensor, samples: Tensor) -> Batch:
        changed = {name: self._column(batch[name], epochs, samples) for name in self.columns}
        return {**batch, **changed}

    def names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return names

    def _column(self, column: Any, epochs: Tensor, samples: Tensor) -> Any:
        column = stacked(column)
        if isinstance(column, Tensor):
            return self._apply(column, epochs, samples)
        each = zip(column, epochs.split(1), samples.split(1), strict=True)  # sizes differ: one by one, same numbers
        return stacked([self._apply(torch.as_tensor(part)[None], epoch, sample)[0] for part, epoch, sample in each])

    def _apply(self, column: Tensor, epochs: Tensor, samples: Tensor) -> Tensor:
        return apply(self.transforms, column, seed=self.seed, epochs=epochs, samples=samples)

    def __str__(self) -> str:
        return f"map({', '.join(map(str, self.transforms))} on {', '.join(self.columns)})"


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
            results = list(zip(*(self._parts(self.function(*row)) for row in rows), strict=True))
            made: Sequence[Any] = [list(parts) for parts in results]
        else:
            made = self._parts(self.function(*(stacked(batch[name]) for name in self.columns)))
        columns = {**batch, **dict(zip(self.output, made, strict=True))}
        return {name: columns[name] for name in self.names(tuple(batch))}

    def names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Columns that went in and do not come out are gone; new ones come last."""
        kept = tuple(name for name in names if name not in self.columns or name in self.output)
        return kept + tuple(name for name in self.output if name not in names)

    def _parts(self, result: Any) -> tuple[Any, ...]:
        parts = result if isinstance(result, tuple) and len(self.output) > 1 else (result,)
        if len(parts) != len(self.output):
            raise ValueError(
                f"map: expected {self._name} to return {len(self.output)} values for {list(self.output)}, "
                f"got {len(parts)}"
            )
        return parts

    @property
    def _name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def __str__(self) -> str:
        return f"map({self._name} on {', '.join(self.columns)})"


Map = Chain | Function


def mapped(operations: Any, columns: tuple[str, ...], output: tuple[str, ...], per_sample: bool) -> list[Map]:
    """The maps of one call of `.map`."""
    maps: list[Map] = []
    for operation in operations if isinstance(operations, list | tuple) else [operations]:
        if not callable(operation):
            raise TypeError(f"map: expected a transform or a function, got {type(operation).__name__} {operation!r}")
        if not hasattr(operation, "draws"):
            maps.append(Function(operation, columns, output, per_sample))
            columns = output
        elif columns == output or maps:
            maps.append(Chain((operation,), columns))
        else:
            raise ValueError(f"map: a transform writes back to its columns {list(columns)}, so output= is of no use")
    return maps


def joined(maps: tuple[Map, ...], seed: int) -> tuple[Map, ...]:
    """Neighbouring chains on the same columns made one, so that their random numbers are one hash."""
    result: list[Map] = []
    for map in maps:
        last = result[-1] if result else None
        if isinstance(map, Chain) and isinstance(last, Chain) and last.columns == map.columns:
            result[-1] = replace(last, transforms=last.transforms + map.transforms)
        else:
            result.append(replace(map, seed=hashing.key(seed, len(result))) if isinstance(map, Chain) else map)
    return tuple(result)
