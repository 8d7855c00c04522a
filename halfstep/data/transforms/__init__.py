"""Transforms of whole batches on the device, also inside a captured step.

The host sends uint8; floats first appear on the device. Every random number is a hash of (seed,
epoch, sample, index in the chain, draw), so a sample comes out the same in whatever batch, worker
or device.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from halfstep.data.transforms.affine import RandomAffine, RandomRotation
from halfstep.data.transforms.colour import ColorJitter, GaussianBlur, Grayscale, RandomGrayscale
from halfstep.data.transforms.crops import CenterCrop, RandomErasing, RandomResizedCrop
from halfstep.data.transforms.images import Cutout, Flip, PadCrop, Resize, ToCHW
from halfstep.data.transforms.mixing import BatchMixer, CutMix, MixUp, mix_batch, mixed_specs
from halfstep.data.transforms.random_apply import RandomApply
from halfstep.data.transforms.random_words import RandomWords, count_draws
from halfstep.data.transforms.trivial_augment import TrivialAugment
from halfstep.data.transforms.values import (
    Cast,
    Flatten,
    Normalize,
    OneHot,
    Rescale,
    apply_affine,
    count_affine,
)
from halfstep.utils.optional_folders import is_left_out
from halfstep.utils.text import dtype_name

__all__ = [
    "BatchMixer",
    "Cast",
    "CenterCrop",
    "ColorJitter",
    "CutMix",
    "Cutout",
    "Flatten",
    "Flip",
    "GaussianBlur",
    "Grayscale",
    "MixUp",
    "Normalize",
    "OneHot",
    "PadCrop",
    "RandomAffine",
    "RandomApply",
    "RandomErasing",
    "RandomGrayscale",
    "RandomResizedCrop",
    "RandomRotation",
    "Rescale",
    "Resize",
    "ToCHW",
    "Transform",
    "TrivialAugment",
    "apply",
    "mix_batch",
    "mixed_specs",
    "spec",
]


class Transform(Protocol):
    """A function of a whole batch and its random words.

    It makes no host sync, and no shape that depends on values. `words` is int64 [draws, B] on the
    batch's device, uniform over 0..2^32−1: row d is draw d of every sample. Whatever is random
    comes from it; `halfstep.data.hashing` turns words into numbers.
    """

    @property
    def draws(self) -> int: ...

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor: ...


def apply(
    transforms: Sequence[Transform], batch: Tensor, *, seed: int, epochs: Tensor, samples: Tensor
) -> Tensor:
    """The batch after the chain of transforms.

    `samples` are the numbers of the batch's samples in the data set, `epochs` the epoch of each:
    int64 [B], on the batch's device.
    """
    _check_numbers("epochs", epochs, batch)
    _check_numbers("samples", samples, batch)
    words = RandomWords(transforms, seed, epochs, samples)

    applied_count = 0
    while applied_count < len(transforms):
        remaining = transforms[applied_count:]
        fused = _apply_by_one_kernel(remaining, batch, words, applied_count)
        if fused is not None:
            batch, count = fused
            applied_count += count
            continue

        affine_count = count_affine(remaining)
        if affine_count > 1:
            batch = apply_affine(remaining[:affine_count], batch)  # type: ignore[arg-type]
            applied_count += affine_count
        else:
            batch = remaining[0](batch, words[applied_count])
            applied_count += 1
    return batch


def _apply_by_one_kernel(
    transforms: Sequence[Transform], batch: Tensor, words: RandomWords, first: int
) -> tuple[Tensor, int] | None:
    """The batch after several transforms, and how many; None where no kernel does them."""
    try:
        from halfstep.data.transforms.fused_augment import crop_flip_cutout
        from halfstep.data.transforms.fused_resize import resize_and_convert
    except ModuleNotFoundError as error:
        if not is_left_out(error):
            raise
        return None
    fused = crop_flip_cutout(transforms, batch, words, first)
    if fused is None:
        fused = resize_and_convert(transforms, batch)
    return fused


def _check_numbers(name: str, numbers: Tensor, batch: Tensor) -> None:
    shape = batch.shape[:1]
    has_shape = numbers.dtype == torch.int64 and numbers.shape == shape
    if not has_shape or numbers.device != batch.device:
        raise ValueError(
            f"apply: expected {name} as int64 {list(shape)} on {batch.device}, "
            f"got {numbers.dtype} {list(numbers.shape)} on {numbers.device}"
        )


def spec(
    transforms: Sequence[Transform], shape: Sequence[int], dtype: torch.dtype
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype that the chain gives a batch, without computing anything.

    A transform that would fail on such a batch fails here, and is named.
    """
    if not shape:
        raise ValueError("spec: expected the shape of a batch, samples first, got ()")
    batch = torch.empty(tuple(shape), dtype=dtype, device="meta")
    for number, transform in enumerate(transforms):
        draw_count = count_draws(number, transform)
        words = torch.empty((draw_count, len(batch)), dtype=torch.int64, device="meta")
        try:
            transformed = transform(batch, words)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            raise ValueError(
                f"transform {number}, {transform!r}, does not take a batch "
                f"{dtype_name(batch.dtype)} {list(batch.shape)}: {error}"
            ) from error
        if transformed.shape[:1] != batch.shape[:1]:
            raise ValueError(
                f"transform {number}, {transform!r}: expected as many samples as before, "
                f"got {len(batch)} samples as shape {tuple(transformed.shape)}"
            )
        batch = transformed
    return tuple(batch.shape), batch.dtype
