"""Other people's batches: a torch DataLoader or any iterable of batches.

They are counted, resumed, and copied to a device.
"""

import warnings
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch

from halfstep.data.pipeline.stream import copy_to_device
from halfstep.errors import Notice
from halfstep.utils import rng

VERSION = 1
_STATE_KEYS = ("epoch", "step", "own", "began", "began_epoch", "now")


@dataclass(eq=False)
class _LoaderPass:
    """What a pass has delivered, and the random states that it began with."""

    epoch: int
    step: int = 0
    start_states: dict[str, Any] = field(default_factory=dict)
    is_over: bool = False  # the loader has said that there are no more batches


class Loader:
    """Batches in an order that is not ours, one pass for each `for`.

    A resumed pass goes on by the loader's own `state_dict` where it has one. Otherwise its batches
    are fetched again up to the position, from the random states that the pass began with:
    Python's, numpy's, torch's, and those of generators attached to a DataLoader.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        if not hasattr(batches, "__iter__") or hasattr(batches, "__next__"):
            raise TypeError(
                "expected batches that can be gone through again, such as a DataLoader or a list, "
                f"got {type(batches).__name__}. Wrap a generator function in a class whose "
                "__iter__ calls it."
            )
        self.batches = batches
        # The newest pass, or the one to come, and what it has delivered.
        self.epoch = 0
        self.step = 0
        self._device: torch.device | None = None
        self._newest_pass = _LoaderPass(0, is_over=True)
        self._loaded_state: dict[str, Any] | None = None

    @property
    def size(self) -> int | None:
        """Batches in a pass; None when the loader does not know."""
        try:
            return len(self.batches)  # type: ignore[arg-type]
        except TypeError:
            return None

    def __len__(self) -> int:
        if self.size is None:
            raise TypeError(f"{type(self.batches).__name__} does not know how many batches it has")
        return self.size

    def to_device(self, device: torch.device | str) -> "Loader":
        """The same batches from the same position on, copied to the device through pinned memory.

        The host does not wait for the copies.
        """
        loader = copy(self)
        loader._device = torch.device(device)
        return loader

    def __iter__(self) -> Iterator[Any]:
        return _PassIterator(self)

    def state_dict(self) -> dict[str, Any]:
        """Where the newest pass stands, and what is needed to go on there.

        That is the loader's own state, the random states that the pass began with, and, between
        passes, the present ones.
        """
        if self._loaded_state:
            return dict(self._loaded_state)
        newest = self._newest_pass
        own_state = None
        if hasattr(self.batches, "state_dict") and (self.step or newest.is_over):
            own_state = self.batches.state_dict()
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "step": self.step,
            "own": own_state,
            "began": dict(newest.start_states),
            "began_epoch": newest.epoch,
            "now": {} if self.step else _save_random_states(self.batches),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next `for` go on there.

        Between passes, the random states are set at once. Within a pass, a loader that cannot seek
        is replayed, with a notice.
        """
        missing = [key for key in _STATE_KEYS if key not in state]
        if state.get("version") != VERSION or missing:
            raise ValueError(
                f"expected the state of a hs.data.Loader, version {VERSION}, got {sorted(state)}"
            )
        self._loaded_state = dict(state)
        self.epoch = state["epoch"]
        self.step = state["step"]
        self._newest_pass = _LoaderPass(self.epoch, is_over=True)
        if not state["step"] and state["now"]:
            _load_random_states(self.batches, state["now"])
        if state["step"] and state["own"] is None:
            warnings.warn(
                f"{type(self.batches).__name__} cannot seek: its first {state['step']} batches are "
                "fetched again and thrown away, on the assumption that their order comes from "
                "Python's, numpy's and torch's random states or a sampler's generator. "
                "hs.data.Dataset seeks at no cost.",
                Notice,
                stacklevel=2,
            )

    # For the iterator of a pass

    def _begin_pass(self) -> tuple[_LoaderPass, Iterator[Any]]:
        """The next pass, or what is left of the one loaded, and its batches."""
        state = self._loaded_state
        self._loaded_state = None
        if state is None:
            if self.step:  # a pass that was left early counts
                self.epoch += 1
            self.step = 0
        new_pass = _LoaderPass(self.epoch, self.step)
        self._newest_pass = new_pass
        _set_epoch(self.batches, new_pass.epoch)

        if state and state["own"] is not None:
            self.batches.load_state_dict(state["own"])  # type: ignore[attr-defined]
        elif state and state["began"] and state["began_epoch"] == new_pass.epoch:
            new_pass.start_states = state["began"]
            return new_pass, self._replay(new_pass)
        else:
            new_pass.start_states = _save_random_states(self.batches)
        return new_pass, self._on_device(iter(self.batches))

    def _retry_batch(self, failed_pass: _LoaderPass) -> Iterator[Any]:
        """The batches from the failed one on, by a replay."""
        if not failed_pass.start_states or hasattr(self.batches, "state_dict"):
            raise RuntimeError(
                f"{type(self.batches).__name__} failed after {failed_pass.step} batches and cannot "
                "go on. Begin another pass."
            )
        return self._replay(failed_pass)

    def _record_progress(self, of_pass: _LoaderPass) -> None:
        """Takes over the position of a pass, if no newer one has begun."""
        if of_pass is not self._newest_pass:
            return
        if of_pass.is_over:
            self.epoch = of_pass.epoch + 1
            self.step = 0
        else:
            self.epoch = of_pass.epoch
            self.step = of_pass.step

    def _replay(self, of_pass: _LoaderPass) -> Iterator[Any]:
        """The batches that a pass has not delivered yet, begun again from its random states.

        The states of the process are afterwards what they were before.
        """
        step = of_pass.step
        end = object()
        with rng.preserved_states(cuda=False):
            _load_random_states(self.batches, of_pass.start_states)
            batches = iter(self.batches)
            for count in range(step):
                if next(batches, end) is end:
                    raise ValueError(
                        f"expected {type(self.batches).__name__} to give the {step} batches it had "
                        f"given, got {count}. Make the loader as it was, or start a new pass "
                        "without the position."
                    )
            # Samplers draw with the first batch, so it has to be fetched with these states.
            first_batch = [] if step else list(islice(batches, 1))
        return self._on_device(chain(first_batch, batches))

    def _on_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        return copy_to_device(batches, self._device) if self._device else batches


class _PassIterator:
    """The batches of one pass, which begins with the first of them."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.current_pass: _LoaderPass | None = None
        self.batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.current_pass is None:
            self.current_pass, self.batches = self.loader._begin_pass()
        current_pass = self.current_pass
        if self.batches is None:
            self.batches = self.loader._retry_batch(current_pass)
        try:
            batch = next(self.batches)
            current_pass.step += 1
        except StopIteration:
            current_pass.is_over = True
            raise
        except BaseException:
            self.batches = None  # the next `next` begins a replay
            raise
        finally:
            self.loader._record_progress(current_pass)
        return batch


# What decides the order of a DataLoader: generators attached to it, and those of the process


def _save_random_states(batches: Any) -> dict[str, Any]:
    """The states of all generators, as tensors, numbers and strings."""
    states = rng.pack_host_states(rng.host_states())
    for name, generator in _attached_generators(batches).items():
        states[name] = generator.get_state()
    return states


def _load_random_states(batches: Any, states: dict[str, Any]) -> None:
    """Sets the states; a generator that the saved loader did not have is left alone."""
    rng.set_host_states(rng.unpack_host_states(states))
    for name, generator in _attached_generators(batches).items():
        if name in states:
            generator.set_state(states[name])


def _attached_generators(batches: Any) -> dict[str, torch.Generator]:
    """By the part of the loader; one of two parts is set twice, to the same state."""
    generators = {}
    for name, part in _loader_parts(batches).items():
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generators[name] = generator
    return generators


def _set_epoch(batches: Any, epoch: int) -> None:
    """Calls `set_epoch` of each part that has it, such as torch's DistributedSampler."""
    updated_ids: set[int] = set()
    for part in _loader_parts(batches).values():
        if callable(getattr(part, "set_epoch", None)) and id(part) not in updated_ids:
            part.set_epoch(epoch)
            updated_ids.add(id(part))


def _loader_parts(batches: Any) -> dict[str, Any]:
    """The parts of a DataLoader that may decide its order. The names are keys of saved states."""
    batch_sampler = getattr(batches, "batch_sampler", None)
    return {
        "loader": batches,
        "sampler": getattr(batches, "sampler", None),
        "batch_sampler": batch_sampler,
        "inner_sampler": getattr(batch_sampler, "sampler", None),
        "dataset": getattr(batches, "dataset", None),
    }
