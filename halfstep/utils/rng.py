"""Random states of a process: Python's, numpy's, torch's on the host and on every CUDA device."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.utils.checks import whole_number
from halfstep.utils.keywords import suggest_keywords
from halfstep.utils.saved_state import SavedValue

MAX_SEED = (1 << 63) - 1  # of torch.manual_seed


@suggest_keywords(
    "seed_everything", advice={"workers": "a DataLoader's workers always follow this seed"}
)
def seed_everything(seed: int, *, deterministic: bool = False) -> int:
    """Seeds Python's, numpy's and torch's generators, on all devices; returns the seed.

    That decides what is drawn from them: new weights, dropout, the order and the workers of a
    DataLoader. `Dataset.shuffle` and augmentations of hs.data have the seed of their `Dataset`.
    `deterministic=True` also restricts torch to kernels that repeat their results, for the rest of
    the process; without it, torch's switches stay as they are.
    """
    number = whole_number("seed", seed, minimum=0)
    if number > MAX_SEED:
        raise ValueError(f"seed: expected a whole number below 2**63, received {seed!r}")
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic: expected True or False, received {deterministic!r}")
    if deterministic:
        _use_deterministic_kernels()
    random.seed(number)
    np.random.seed(number % (1 << 32))  # noqa: NPY002 - the global one, which takes 32 bits
    torch.manual_seed(number)
    return number


def _use_deterministic_kernels() -> None:
    """Sets torch's switches, and cuBLAS's workspace, which CUDA reads when it starts."""
    if not os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
        if torch.cuda.is_initialized():
            raise RuntimeError(
                "seed_everything: deterministic=True comes too late, as CUDA has started without "
                "CUBLAS_WORKSPACE_CONFIG; call it before anything is put on the GPU, or start "
                "Python with CUBLAS_WORKSPACE_CONFIG=:4096:8"
            )
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


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


# Checks of saved states, on generators of their own: the process's are not touched.


def check(saved: SavedValue) -> None:
    """ValueError unless `load` could set these states."""
    check_host_states(saved)
    for state in saved.field("cuda").items():
        state.tensor(torch.uint8)


def check_host_states(saved: SavedValue) -> None:
    """ValueError unless these are the packed states of the three host generators."""
    check_generator_state(saved.field("torch"))

    python = saved.field("python")
    version, words, gauss = python.items(3)
    version.whole_number()
    words.tensor(torch.int64)
    if gauss.value is not None:
        gauss.number()
    numpy = saved.field("numpy")
    algorithm, keys, position, has_gauss, cached_gauss = numpy.items(5)
    algorithm.text()
    keys.tensor(torch.int64)
    position.whole_number(maximum=624)  # words of a Mersenne twister
    has_gauss.whole_number(maximum=1)
    cached_gauss.number()

    # What is left is for the libraries to say.
    packed = {"python": python.value, "numpy": numpy.value, "torch": None}
    try:
        states = unpack_host_states(packed)
        random.Random().setstate(states["python"])
    except (TypeError, ValueError, OverflowError):
        python.refuse("a state of Python's random numbers")
    try:
        np.random.RandomState().set_state(states["numpy"])
    except (TypeError, ValueError, OverflowError):
        numpy.refuse("a state of numpy's random numbers")


def check_generator_state(saved: SavedValue) -> None:
    """ValueError unless it is the state of one of torch's generators on the host."""
    state = saved.tensor(torch.uint8)
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError):
        saved.refuse("a state of torch's random numbers")
