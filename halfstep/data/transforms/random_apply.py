"""A transform that runs for some samples only."""

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.data.transforms.axes import check_probability
from halfstep.data.transforms.random_numbers import is_below
from halfstep.data.transforms.random_words import DRAWS_PER_TRANSFORM, count_draws
from halfstep.utils.checks import expect


@dataclass(frozen=True)
class RandomApply:
    """Another transform with probability p, each sample by itself.

    It must leave shape and dtype as they are, and runs on the whole batch.
    """

    transform: "object"
    p: float = 0.5

    def __post_init__(self) -> None:
        check_probability("RandomApply", self.p)
        draws = count_draws(0, self.transform)
        expect(draws < DRAWS_PER_TRANSFORM, "RandomApply", "a transform of 255 draws", draws)

    @property
    def draws(self) -> int:
        """Those of the transform, and one for whether it runs."""
        return count_draws(0, self.transform) + 1

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        assert callable(self.transform)
        transformed: Tensor = self.transform(batch, words[1:])
        if transformed.shape != batch.shape or transformed.dtype != batch.dtype:
            raise ValueError(
                "RandomApply: expected a transform that keeps shape and dtype, received "
                f"{self.transform!r}, which makes {transformed.dtype} {list(transformed.shape)} "
                f"of {batch.dtype} {list(batch.shape)}"
            )
        is_applied = is_below(words[0], self.p).view(-1, *[1] * (batch.dim() - 1))
        return torch.where(is_applied, transformed, batch)
