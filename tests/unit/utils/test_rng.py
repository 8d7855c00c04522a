"""Random states: saved, loaded, and restored after a block, for all three host generators."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch

from halfstep.utils import rng


def draw() -> list[float]:
    """A number of each host generator; numpy's is the first or second of a normal pair."""
    return [random.random(), np.random.standard_normal(), torch.rand(()).item()]  # noqa: NPY002


def test_loaded_states_give_the_same_numbers() -> None:
    draw()  # the second number of numpy's pair is part of the state
    saved = rng.save()
    numbers = [draw(), draw()]
    rng.load(saved)
    assert [draw(), draw()] == numbers


BLOCKS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "all states": lambda: rng.preserved_states(),
    "the host's": lambda: rng.preserved_states(cuda=False),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_what_a_block_draws_is_not_seen_after_it(name: str) -> None:
    saved = rng.save()
    expected = draw()
    rng.load(saved)
    with BLOCKS[name]():
        draw()
    assert draw() == expected


def test_states_are_restored_after_an_error() -> None:
    saved = rng.save()
    expected = draw()
    rng.load(saved)

    def fail_in_block() -> None:
        with rng.preserved_states():
            draw()
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_in_block()
    assert draw() == expected


def test_saved_states_hold_only_what_a_checkpoint_takes() -> None:
    def leaves(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [leaf for item in value.values() for leaf in leaves(item)]
        if isinstance(value, list):
            return [leaf for item in value for leaf in leaves(item)]
        return [value]

    saved = rng.save()
    assert list(saved) == ["torch", "cuda", "python", "numpy"]
    for leaf in leaves(saved):
        assert leaf is None or isinstance(leaf, torch.Tensor | int | float | str)
