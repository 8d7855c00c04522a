"""What a pipeline does to fetched samples: transforms on whole batches, functions of the user's."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.data import hashing
from halfstep.data.pipeline.collate import Batch, UnstackedColumn, stack_column
from halfstep.data.pipeline.function_map import FunctionMap, describe_callable
from halfstep.data.pipeline.torchvision_maps import TorchvisionMap, is_torchvision, mixes_batches
from halfstep.data.transforms import BatchMixer, Transform, apply, mix_batch


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
class MixMap:
    """MixUp or CutMix, on the images and the labels of a whole batch."""

    mixer: BatchMixer
    columns: tuple[str, ...]
    seed: int = 0

    def __call__(self, batch: Batch, epochs: Tensor, samples: Tensor) -> Batch:
        columns = [stack_column(name, batch[name]) for name in self.columns]
        for name, column in zip(self.columns, columns, strict=True):
            if not isinstance(column, Tensor):
                raise ValueError(
                    f"column {name!r}: expected samples of one shape for {self}. Make them equal "
                    f"before it, for instance with .map(hs.data.Resize((224, 224)), {name!r})."
                )
        images, labels = columns
        mixed = mix_batch(
            self.mixer, images, labels, seed=self.seed, epochs=epochs, samples=samples
        )
        return {**batch, **dict(zip(self.columns, mixed, strict=True))}

    def output_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return names

    def __str__(self) -> str:
        return f"map({describe_callable(self.mixer)} on {', '.join(self.columns)})"


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


Map = TransformMap | FunctionMap | MixMap | SelectMap


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
        if is_mixer(operation):
            _check_mixing(operation, columns, output, per_sample)
            maps.append(MixMap(operation, columns))
        elif is_torchvision(operation):
            maps.append(_torchvision_map(operation, columns, output, per_sample))
            columns = output
        elif not is_transform(operation):
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


def is_mixer(operation: Any) -> bool:
    return is_transform(operation) and getattr(operation, "mixes_samples", False) is True


def _check_mixing(
    mixer: Any, columns: tuple[str, ...], output: tuple[str, ...], per_sample: bool
) -> None:
    """Raises a ValueError unless the mixer gets the images and the labels of whole batches."""
    name = type(mixer).__name__
    if per_sample:
        raise ValueError(f"map: {name} mixes the samples of a batch; call map after batch(n)")
    if len(columns) != 2 or columns != output:
        raise ValueError(
            f"map: expected two columns for {name}, the images and the labels, got "
            f'{list(columns)} to {list(output)}. For instance .map({name}(10), ["image", "label"])'
        )


def _torchvision_map(
    operation: Any, columns: tuple[str, ...], output: tuple[str, ...], per_sample: bool
) -> TorchvisionMap:
    mixes = mixes_batches(operation)
    if mixes and per_sample:
        name = type(operation).__name__
        raise ValueError(f"map: {name} mixes the samples of a batch; call map after batch(n)")
    return TorchvisionMap(operation, columns, output, per_sample=not mixes)


def join_chains(maps: tuple[Map, ...], seed: int) -> tuple[Map, ...]:
    """Joins neighbouring chains on the same columns, so that one hash gives their random numbers.

    A chain's own seed is a hash of the pipeline's and of its place among the maps.
    """
    joined: list[Map] = []
    for operation in maps:
        previous = joined[-1] if joined else None
        if isinstance(operation, MixMap | TorchvisionMap):
            joined.append(replace(operation, seed=hashing.key(seed, len(joined))))
        elif not isinstance(operation, TransformMap):
            joined.append(operation)
        elif isinstance(previous, TransformMap) and previous.columns == operation.columns:
            joined[-1] = replace(previous, transforms=previous.transforms + operation.transforms)
        else:
            joined.append(replace(operation, seed=hashing.key(seed, len(joined))))
    return tuple(joined)
