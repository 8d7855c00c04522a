"""The random words of a chain of transforms, each a hash of what it is for.

A word is an int64 in 0..2^32−1. It depends on the seed, the epoch, the sample, the transform's
index in the chain, and which draw of that transform it is.
"""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from halfstep.data import hashing
from halfstep.data.transforms.values import constant_vector

# Draw numbers that each transform owns, whether it uses them or not: its words do not depend on the
# transforms before it.
DRAWS_PER_TRANSFORM = 256


class RandomWords:
    """The words of each transform. One hash makes them all, when the first of them are needed."""

    def __init__(
        self, transforms: Sequence[Any], seed: int, epochs: Tensor, samples: Tensor
    ) -> None:
        # index() also makes the seed a constant to torch.compile, which cannot hash a symbolic
        # integer.
        self.seed = index(seed)
        self.epochs = epochs
        self.samples = samples
        self.keys: list[list[int]] = []  # one key for each draw of each transform
        for number, transform in enumerate(transforms):
            first_draw = number * DRAWS_PER_TRANSFORM
            draws = range(first_draw, first_draw + count_draws(number, transform))
            self.keys.append([hashing.draw_key(draw) for draw in draws])
        self._words: tuple[Tensor, ...] | None = None

    def __getitem__(self, number: int) -> Tensor:
        """int64 [draws, B]: the words of transform `number`."""
        if not self.keys[number]:
            return self.samples.new_empty((0, len(self.samples)))
        if self._words is None:
            all_keys = tuple(key for keys in self.keys for key in keys)
            draw_keys = constant_vector(all_keys, torch.int64, self.samples.device)
            words = hashing.words(self.seed, self.epochs, self.samples, draw_keys)
            self._words = words.split([len(keys) for keys in self.keys])
        return self._words[number]


def count_draws(number: int, transform: Any) -> int:
    """How many random words a transform takes per sample: its attribute `draws`, checked."""
    draws = getattr(transform, "draws", None)
    is_valid = isinstance(draws, int) and 0 <= draws <= DRAWS_PER_TRANSFORM
    if not callable(transform) or not is_valid:
        raise TypeError(
            f"transform {number}: expected a transform: callable(batch, words), "
            f"with draws in 0..{DRAWS_PER_TRANSFORM}, received {transform!r}"
        )
    assert isinstance(draws, int)
    return draws
