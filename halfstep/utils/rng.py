"""The random state of a process: Python's, numpy's, torch's on the host and on every CUDA device."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def save() -> dict[str, Any]:
    """Numbers and tensors only."""
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - the users' one
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all()
        if torch.cuda.is_available() and torch.cuda.is_initialized()
        else [],
        "python": [version, torch.tensor(words), gauss],
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(place),
            int(has_gauss),
            float(cached),
        ],
    }


def load(state: dict[str, Any]) -> None:
    """Everything as it was saved; CUDA devices that were not there keep theirs."""
    torch.set_rng_state(state["torch"])
    for i, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(each, i)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), place, has_gauss, cached))  # noqa: NPY002


@contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn inside, the states are afterwards what they were before."""
    before = save()
    try:
        yield
    finally:
        load(before)
