"""The random words of a chain of transforms: each a hash of what it is for."""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from halfstep.data import hashing
from halfstep.data.transforms.values import constant

DRAWS = 256  # draw numbers that each place in a chain owns


class Words:
    """Each transform's words, all of them from one hash, made when the first of them are asked for."""

    def __init__(
        self, transforms: Sequence[Any], seed: int, epochs: Tensor, samples: Tensor
    ) -> None:
        # index() also makes the seed a constant to torch.compile, which cannot hash a symbolic integer
        self.seed, self.epochs, self.samples = index(seed), epochs, samples
        counts = [draws_of(place, transform) for place, transform in enumerate(transforms)]
        self.keys = [
            [hashing.draw_key(place * DRAWS + i) for i in range(count)]
            for place, count in enumerate(counts)
        ]
        self._rows: tuple[Tensor, ...] | None = None

    def __getitem__(self, place: int) -> Tensor:
        if not self.keys[place]:
            return self.samples.new_empty((0, len(self.samples)))
        if self._rows is None:
            numbers = constant(
                tuple(key for keys in self.keys for key in keys), torch.int64, self.samples.device
            )
            words = hashing.words(self.seed, self.epochs, self.samples, numbers)
            self._rows = words.split([len(keys) for keys in self.keys])
        return self._rows[place]


def draws_of(place: int, transform: Any) -> int:
    """How many a transform wants, which it must say."""
    draws = getattr(transform, "draws", None)
    if not callable(transform) or not isinstance(draws, int) or not 0 <= draws <= DRAWS:
        wanted = f"a transform: callable(batch, words), with draws in 0..{DRAWS}"
        raise TypeError(f"transform {place}: expected {wanted}, got {transform!r}")
    return draws
