"""What a run does to its uint8 inputs before the network sees them, to be done to others."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from halfstep import data
from halfstep.data import Dataset
from halfstep.data.pipeline.collate import stack_column
from halfstep.data.pipeline.maps import Chain, Function, Select


@dataclass(frozen=True)
class Form:
    """How one image lies in memory: its sides, its channels, and where these are; gray may have none."""

    sides: tuple[int, int]
    channels: int
    order: Literal["HW", "HWC", "CHW"]

    @property
    def mode(self) -> str:
        return "L" if self.channels == 1 else "RGB"

    @property
    def sample(self) -> tuple[int, ...]:
        return self._shapes[self.order]

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "HWC": (*self.sides, self.channels),
            "CHW": (self.channels, *self.sides),
        }
        return {**shapes, "HW": self.sides} if self.channels == 1 else shapes

    def lay(self, images: Tensor) -> Tensor:
        """[N, H, W, C] in this order."""
        return (
            images[..., 0]
            if self.order == "HW"
            else images.permute(0, 3, 1, 2)
            if self.order == "CHW"
            else images
        )

    def found(self, array: Tensor) -> Tensor | None:
        """Images of these sides and channels, one or several, in whatever order they come, in this order."""
        for order, shape in self._shapes.items():
            images = array[None] if tuple(array.shape) == shape else array
            if tuple(images.shape[1:]) == shape:
                last = (
                    images[..., None]
                    if order == "HW"
                    else images.movedim(1, 3)
                    if order == "CHW"
                    else images
                )
                return self.lay(last)
        return None


def form_of(shape: tuple[int, ...]) -> Form | None:
    """[H, W], [H, W, C] or [C, H, W] with 1 or 3 channels; None for what is no image."""
    if len(shape) == 2:
        return Form((shape[0], shape[1]), 1, "HW")
    if len(shape) == 3 and shape[2] in (1, 3):
        return Form((shape[0], shape[1]), shape[2], "HWC")
    return (
        Form((shape[1], shape[2]), shape[0], "CHW")
        if len(shape) == 3 and shape[0] in (1, 3)
        else None
    )


@dataclass(frozen=True)
class Preparation:
    """The maps of a run's data on its inputs, without those that draw random numbers: they vary what is trained on."""

    column: str
    shape: tuple[int, ...]
    """Of one sample as it was read, uint8."""
    maps: tuple[Chain | Function, ...]

    @property
    def resizes(self) -> bool:
        return any(
            isinstance(t, data.Resize)
            for m in self.maps
            if isinstance(m, Chain)
            for t in m.transforms
        )

    def batches(self, samples: Tensor | list[Tensor], size: int) -> Dataset:
        """What the network takes, of uint8 samples that are as the run's were when they were read."""
        given = (
            {self.column: samples} if isinstance(samples, Tensor) else [(each,) for each in samples]
        )
        made = Dataset(given, [self.column])
        for each in self.maps:
            if isinstance(each, Function) and not each.per_sample and not made.plan.batch:
                made = made.batch(size)
            made = made.map(
                list(each.transforms) if isinstance(each, Chain) else each.function, self.column
            )
        return made if made.plan.batch else made.batch(size)

    def result(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a sample of this shape comes to."""
        (made,) = next(iter(self.batches(torch.zeros(1, *shape, dtype=torch.uint8), 1)))
        return tuple(made.shape[1:])


def preparation(given: Any) -> Preparation | None:
    """None where it cannot be told: no Dataset, inputs that were not read as uint8, or made of several columns."""
    if not isinstance(given, Dataset) or (name := given.columns[0]) not in given.plan.source.names:
        return None
    maps = [
        each for each in given.plan.maps if not isinstance(each, Select) and name in _writes(each)
    ]
    if any(
        (each.columns, each.output) != ((name,), (name,))
        for each in maps
        if isinstance(each, Function)
    ):
        return None
    source = given.plan.source
    first = stack_column(
        name, source.fetch(torch.zeros(1, dtype=torch.int64, device=source.device))[name]
    )
    if not isinstance(first, Tensor) or first.dtype != torch.uint8:
        return None
    kept = (_still(each) if isinstance(each, Chain) else each for each in maps)
    return Preparation(
        name,
        tuple(first.shape[1:]),
        tuple(m for m in kept if isinstance(m, Function) or m.transforms),
    )


def _writes(change: Chain | Function) -> tuple[str, ...]:
    return change.columns if isinstance(change, Chain) else change.output


def _still(chain: Chain) -> Chain:
    return replace(chain, transforms=tuple(t for t in chain.transforms if not t.draws))
