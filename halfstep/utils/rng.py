"""Random states of a process: Python's, numpy's, torch's on the host and on every CUDA device."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def save() -> dict[str, Any]:
    """All states, as tensors, numbers and strings that a checkpoint can hold."""
    host = pack_host_states(host_states())
    return {
        "torch": host["torch"],
        "cuda": _cuda_states(),
        "python": host["python"],
        "numpy": host["numpy"],
    }


def load(state: dict[str, Any]) -> None:
    """Sets what `save` returned. CUDA devices that did not exist then keep their state."""
    set_host_states(unpack_host_states(state))
    _set_cuda_states(state["cuda"])


@contextmanager
def preserved_states(*, cuda: bool = True) -> Iterator[None]:
    """Restores all states on leaving, whatever was drawn inside. `cuda=False`: the host's only."""
    host = host_states()
    cuda_states = _cuda_states() if cuda else []
    try:
        yield
    finally:
        set_host_states(host)
        _set_cuda_states(cuda_states)


def host_states() -> dict[str, Any]:
    """The states of the three host generators, in each library's own form."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the generator that users draw from
        "torch": torch.get_rng_state(),
    }


def set_host_states(states: dict[str, Any], *, numpy: bool = True) -> None:
    """Sets what `host_states` returned; with `numpy=False`, numpy's state is left alone."""
    random.setstate(states["python"])
    if numpy:
        np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])


def equal_host_states(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether nothing was drawn between two calls of `host_states`."""
    words_a = a["numpy"][1]
    words_b = b["numpy"][1]
    return (
        torch.equal(a["torch"], b["torch"])
        and a["python"] == b["python"]
        and a["numpy"][2:] == b["numpy"][2:]
        and np.array_equal(words_a, words_b)
    )


def pack_host_states(states: dict[str, Any]) -> dict[str, Any]:
    """`host_states()` as tensors, numbers and strings in lists."""
    version, words, gauss = states["python"]
    algorithm, keys, position, has_gauss, cached_gauss = states["numpy"]
    return {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [
            str(algorithm),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),  # torch saves no uint32
            int(position),
            int(has_gauss),
            float(cached_gauss),
        ],
        "torch": states["torch"],
    }


def unpack_host_states(packed: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `pack_host_states`. Other entries of the dict are ignored."""
    version, words, gauss = packed["python"]
    algorithm, keys, position, has_gauss, cached_gauss = packed["numpy"]
    keys = keys.numpy().astype(np.uint32)
    return {
        "python": (version, tuple(words.tolist()), gauss),
        "numpy": (algorithm, keys, position, has_gauss, cached_gauss),
        "torch": packed["torch"],
    }


def _cuda_states() -> list[Tensor]:
    """One state for each CUDA device; none where CUDA is absent or not in use yet."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.get_rng_state_all()
    return []


def _set_cuda_states(states: list[Tensor]) -> None:
    for device, state in enumerate(states[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)
