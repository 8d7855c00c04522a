"""Transforms of whole batches, on the device, inside a captured step: uint8 travels, floats do not.

Every random number is a hash of (seed, epoch, sample, place in the chain, draw): a sample comes out the same whatever
batch, worker or device it came through.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from halfstep.data.transforms.fused import resize
from halfstep.data.transforms.fused__window import window
from halfstep.data.transforms.images import Cutout, Flip, PadCrop, Resize, ToCHW
from halfstep.data.transforms.values import Cast, Flatten, Normalize, OneHot, Rescale
from halfstep.data.transforms.values__affine import affine, linear
from halfstep.data.transforms.words import Words, draws_of

__all__ = [
    "Cast",
    "Cutout",
    "Flatten",
    "Flip",
    "Normalize",
    "OneHot",
    "PadCrop",
    "Rescale",
    "Resize",
    "ToCHW",
    "Transform",
    "apply",
    "spec",
]


class Transform(Protocol):
    """A function of a whole batch and its random words: no host sync, and no shape that depends on values.

    `words` is int64 [draws, B] on the batch's device, uniform over 0..2^32−1: row d is draw d of every sample. Whatever
    is random comes from it, `halfstep.data.hashing` turns words into numbers.
    """

    @property
    def draws(self) -> int: ...

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor: ...


def apply(
    transforms: Sequence[Transform], batch: Tensor, *, seed: int, epochs: Tensor, samples: Tensor
) -> Tensor:
    """The chain on a batch of `samples` (their numbers in the data set) in their `epochs`: int64 [B], on its device."""
    for name, given in (("epochs", epochs), ("samples", samples)):
        if (
            given.dtype != torch.int64
            or given.shape != batch.shape[:1]
            or given.device != batch.device
        ):
            came = f"{given.dtype} {list(given.shape)} on {given.device}"
            raise ValueError(
                f"apply: expected {name} as int64 {list(batch.shape[:1])} on {batch.device}, got {came}"
            )
    words = Words(transforms, seed, epochs, samples)
    place = 0
    while place < len(transforms):
        rest = transforms[place:]
        done = window(rest, batch, words, place) or resize(rest, batch)
        if done:
            batch, count = done
        elif (count := linear(rest)) > 1:
            batch = affine(rest[:count], batch)  # type: ignore[arg-type]
        else:
            batch, count = rest[0](batch, words[place]), 1
        place += count
    return batch


def spec(
    transforms: Sequence[Transform], shape: Sequence[int], dtype: torch.dtype
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype that the chain makes of a batch; nothing is computed. What would fail fails here, by name."""
    if not shape:
        raise ValueError("spec: expected the shape of a batch, samples first, got ()")
    batch = torch.empty(tuple(shape), dtype=dtype, device="meta")
    for place, transform in enumerate(transforms):
        words = torch.empty(
            (draws_of(place, transform), len(batch)), dtype=torch.int64, device="meta"
        )
        try:
            out = transform(batch, words)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            came = f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
            raise ValueError(
                f"transform {place}, {transform!r}, does not take a batch {came}: {error}"
            ) from error
        if out.shape[:1] != batch.shape[:1]:
            came = f"{len(batch)} samples as shape {tuple(out.shape)}"
            raise ValueError(
                f"transform {place}, {transform!r}: expected as many samples as before, got {came}"
            )
        batch = out
    return tuple(batch.shape), batch.dtype
