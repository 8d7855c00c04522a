"""MixUp and CutMix: every sample of a batch is mixed with the one before it, image and label.

Labels become probabilities, float32 [B, classes], which torch's and halfstep's cross entropy take
as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from halfstep.data.hashing import below
from halfstep.data.transforms.axes import (
    Layout,
    check_layout,
    check_pixel_dtype,
    check_probability,
    image_axes,
)
from halfstep.data.transforms.chunks import in_chunks
from halfstep.data.transforms.crops import rectangle_mask
from halfstep.data.transforms.random_numbers import is_below, symmetric_beta
from halfstep.data.transforms.random_words import RandomWords
from halfstep.data.transforms.values import OneHot
from halfstep.utils.checks import expect


class BatchMixer(Protocol):
    """A function of the images and labels of a whole batch, and its random words.

    `words` are as for a Transform. The samples around it change what a sample becomes.
    """

    mixes_samples: ClassVar[bool]

    @property
    def draws(self) -> int: ...

    def __call__(self, images: Tensor, labels: Tensor, words: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class MixUp:
    """λ · sample + (1 − λ) · the sample before it in the batch; the first one's is the last.

    λ follows Beta(alpha, alpha), for each sample by itself. Labels are class numbers [B], or
    probabilities [B, classes] of a mixer before this one. With probability 1 − p a sample stays.
    uint8 is rounded to nearest.
    """

    classes: int
    alpha: float = 1.0
    p: float = field(default=1.0, kw_only=True)
    draws: ClassVar[int] = 2
    mixes_samples: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_settings("MixUp", self.classes, self.alpha, self.p)

    def __call__(self, images: Tensor, labels: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        targets = _probabilities("MixUp", labels, self.classes, len(images))
        check_pixel_dtype("MixUp", images)
        share = self.shares(words)

        mixed = in_chunks(self._mix_images, images, images.roll(1, 0), share)
        return mixed, _mix(targets, targets.roll(1, 0), share)

    def _mix_images(self, images: Tensor, others: Tensor, share: Tensor) -> Tensor:
        dtype = torch.promote_types(images.dtype, torch.float32)
        mixed = _mix(images.to(dtype), others.to(dtype), share)
        if images.dtype == torch.uint8:
            mixed = mixed.round_()
        mixed = mixed.to(images.dtype)
        if self.p == 1:
            return mixed
        return torch.where(_per_sample(share < 1, images), mixed, images)

    def shares(self, words: Tensor) -> Tensor:
        """λ of each sample, float64 [B]; 1 where it stays."""
        share = symmetric_beta(words[0], self.alpha)
        return torch.where(is_below(words[1], self.p), share, 1.0)


@dataclass(frozen=True)
class CutMix:
    """Pastes a rectangle of the sample before it into each; the first one's is the last.

    The rectangle covers 1 − λ of the image, with λ from Beta(alpha, alpha) for each sample by
    itself; its centre is uniform, and the border cuts it off. The labels are mixed by the pixels
    that were pasted. Labels and p are as in MixUp.
    """

    classes: int
    alpha: float = 1.0
    p: float = field(default=1.0, kw_only=True)
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 4
    mixes_samples: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_settings("CutMix", self.classes, self.alpha, self.p)
        check_layout("CutMix", self.layout)

    def __call__(self, images: Tensor, labels: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        targets = _probabilities("CutMix", labels, self.classes, len(images))
        axes = image_axes("CutMix", images, self.layout)
        height = images.shape[axes.row]
        width = images.shape[axes.column]
        rectangles = self.rectangles(words, height, width)

        is_pasted = rectangle_mask(rectangles, height, width)
        if axes.channel is not None:
            is_pasted = is_pasted.unsqueeze(axes.channel)
        mixed = torch.where(is_pasted, images.roll(1, 0), images)
        pasted = (rectangles[:, 2] * rectangles[:, 3]).to(torch.float64)
        return mixed, _mix(targets, targets.roll(1, 0), 1 - pasted / (height * width))

    def rectangles(self, words: Tensor, height: int, width: int) -> Tensor:
        """int64 [B, 4]: top, left, height and width of what is pasted."""
        share = symmetric_beta(words[0], self.alpha)
        half_side = (1 - share).sqrt() * 0.5
        half_rows = (half_side * height).to(torch.int64)
        half_columns = (half_side * width).to(torch.int64)
        row = below(words[1], height)
        column = below(words[2], width)
        top = (row - half_rows).clamp(min=0)
        left = (column - half_columns).clamp(min=0)
        rows = (row + half_rows).clamp(max=height) - top
        columns = (column + half_columns).clamp(max=width) - left
        rows = torch.where(is_below(words[3], self.p), rows, 0)
        return torch.stack([top, left, rows, columns], dim=1)


def mix_batch(
    mixer: BatchMixer,
    images: Tensor,
    labels: Tensor,
    *,
    seed: int,
    epochs: Tensor,
    samples: Tensor,
) -> tuple[Tensor, Tensor]:
    """Images and labels after the mixer; the numbers are as for `apply`."""
    words = RandomWords([mixer], seed, epochs, samples)[0]
    return mixer(images, labels, words)


def mixed_specs(
    mixer: BatchMixer,
    images: tuple[Sequence[int], torch.dtype],
    labels: tuple[Sequence[int], torch.dtype],
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes that the mixer gives images and labels, without computing anything."""
    image_batch = torch.empty(tuple(images[0]), dtype=images[1], device="meta")
    label_batch = torch.empty(tuple(labels[0]), dtype=labels[1], device="meta")
    words = torch.empty((mixer.draws, len(image_batch)), dtype=torch.int64, device="meta")
    mixed = mixer(image_batch, label_batch, words)
    return [(tuple(column.shape), column.dtype) for column in mixed]


def _check_settings(name: str, classes: Any, alpha: Any, p: Any) -> None:
    ok = isinstance(classes, int) and not isinstance(classes, bool) and classes >= 1
    expect(ok, name, "classes of at least 1", classes)
    ok = isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0.01 <= alpha <= 1000
    expect(ok, name, "alpha in 0.01..1000", alpha)
    check_probability(name, p)


def _probabilities(name: str, labels: Tensor, classes: int, count: int) -> Tensor:
    """The labels as float32 [B, classes]; probabilities stay as they are."""
    if labels.is_floating_point() and tuple(labels.shape) == (count, classes):
        return labels
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.shape != (count,):
        raise ValueError(
            f"{name}: expected labels as class numbers [{count}], or probabilities "
            f"[{count}, {classes}], got {labels.dtype} {list(labels.shape)}. Map it on the "
            'images and the labels, in this order: .map(…, ["image", "label"])'
        )
    no_words = labels.new_empty((0, count), dtype=torch.int64)
    return OneHot(classes)(labels, no_words)


def _mix(values: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """share · values + (1 − share) · others, row by row."""
    own_share = _per_sample(share, values).to(values.dtype)
    other_share = _per_sample(1 - share, values).to(values.dtype)
    return (others * other_share).add_(values * own_share)


def _per_sample(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.view(-1, *[1] * (like.dim() - 1))
