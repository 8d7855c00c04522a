"""The host's generators, Python's, numpy's and torch's: seeded for one batch, kept, put back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from halfstep.data import hashing


@contextmanager
def seeded(*parts: int) -> Iterator[None]:
    """Seed the three host generators from `parts`, and put their states back afterwards.

    Most of its cost is numpy's copy of its state. A worker process seeds only: every fetch there is seeded anew.
    """
    worker = get_worker_info() is not None
    kept, own = ({}, None) if worker else (states(), np.random.get_bit_generator())  # type: ignore[attr-defined]
    if own is not None:
        np.random.set_bit_generator(_ours())  # type: ignore[attr-defined] # set_state would copy
    seed = hashing.key(*parts)
    random.seed(seed)
    np.random.seed(seed & hashing.WORD)  # noqa: NPY002 - the users' one
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device
    try:
        yield
    finally:
        if own is not None:
            np.random.set_bit_generator(own)  # type: ignore[attr-defined]
            put_back(
                kept, numpy=bool(kept["numpy"][3])
            )  # the second number of a normal pair is not the generator's


@cache
def _ours() -> np.random.MT19937:
    return np.random.MT19937(0)


def states() -> dict[str, Any]:
    """The three states, for now: `packed` makes values of them that a checkpoint takes."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "torch": torch.get_rng_state(),
    }


def put_back(states: dict[str, Any], *, numpy: bool = True) -> None:
    random.setstate(states["python"])
    if numpy:
        np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])


def packed(states: dict[str, Any]) -> dict[str, Any]:
    """Tensors, numbers and strings in lists."""
    version, words, gauss = states["python"]
    kind, keys, *rest = states["numpy"]
    numpy = [kind, torch.from_numpy(keys.astype(np.int64)), *rest]
    return {
        "python": [version, torch.tensor(words), gauss],
        "numpy": numpy,
        "torch": states["torch"],
    }


def unpacked(saved: dict[str, Any]) -> dict[str, Any]:
    version, words, gauss = saved["python"]
    kind, keys, *rest = saved["numpy"]
    numpy = (kind, keys.numpy().astype(np.uint32), *rest)
    return {
        "python": (version, tuple(words.tolist()), gauss),
        "numpy": numpy,
        "torch": saved["torch"],
    }
