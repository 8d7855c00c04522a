"""Other people's batches: a torch DataLoader or any iterable of batches, counted, resumed, and moved to a device."""

import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from halfstep.data.flow.stream import moved
from halfstep.errors import Notice

VERSION = 1


class Loader:
    """Batches in an order that is not ours, one pass per `for`. A resumed pass goes on by the loader's own `state_dict`
    where it has one; otherwise it is gone through again up to the position, from the random state it began with."""

    def __init__(self, batches: Iterable[Any]) -> None:
        if not hasattr(batches, "__iter__") or iter(batches) is batches:
            raise TypeError(
                f"expected batches that can be gone through again, such as a DataLoader or a list, got "
                f"{type(batches).__name__}. Wrap a generator function in a class whose __iter__ calls it."
            )
        self.batches = batches
        self.epoch, self.step = 0, 0  # the pass under way or to come, and what it has delivered
        self._device: torch.device | None = None
        self._began: dict[str, torch.Tensor] = {}
        self._resume: dict[str, Any] | None = None

    @property
    def size(self) -> int | None:
        """Batches in a pass; None when the loader does not know."""
        try:
            return len(self.batches)  # type: ignore[arg-type]
        except TypeError:
            return None

    def to_device(self, device: torch.device | str) -> "Loader":
        """The same batches copied to the device through pinned memory, without a wait of the host."""
        new = Loader(self.batches)
        new._device = torch.device(device)
        return new

    def __iter__(self) -> Iterator[Any]:
        source = self._started()
        for batch in moved(source, self._device) if self._device else source:
            self.step += 1
            yield batch
        self.epoch, self.step = self.epoch + 1, 0

    def _started(self) -> Iterator[Any]:
        state, self._resume = self._resume, None
        if state is None:
            self.step = 0
        _set_epoch(self.batches, self.epoch)
        if state and state["own"] is not None:
            self.batches.load_state_dict(state["own"])  # type: ignore[attr-defined]
            return iter(self.batches)
        if state:
            return self._replayed(state)
        self._began = {name: generator.get_state() for name, generator in _generators(self.batches).items()}
        return iter(self.batches)

    def _replayed(self, state: dict[str, Any]) -> Iterator[Any]:
        """The pass begun again from its random state; torch's own random state afterwards is what it was before."""
        now = torch.get_rng_state()
        self._began = state["began"]
        for name, generator in _generators(self.batches).items():
            generator.set_state(self._began[name])
        batches = iter(self.batches)
        for _ in islice(batches, state["step"]):
            pass
        torch.set_rng_state(now)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Where the pass stands, with the loader's own state or the random state the pass began with."""
        own = self.batches.state_dict() if hasattr(self.batches, "state_dict") and self.step else None
        return {"version": VERSION, "epoch": self.epoch, "step": self.step, "own": own, "began": dict(self._began)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `for` go on there; a loader that cannot seek is replayed, which is announced."""
        if state.get("version") != VERSION or "began" not in state:
            raise ValueError(f"expected the state of a hs.data.Loader, version {VERSION}, got {sorted(state)}")
        self.epoch, self.step = state["epoch"], state["step"]
        self._resume = state if self.step else None
        if self._resume and state["own"] is None:
            warnings.warn(
                f"{type(self.batches).__name__} cannot seek: its first {self.step} batches are fetched again "
                "and thrown away. hs.data.Dataset seeks at no cost.", Notice, stacklevel=2,
            )  # fmt: skip


def _generators(batches: Any) -> dict[str, torch.Generator]:
    """The random generators that decide a DataLoader's order, by where they hang; torch's own among them."""
    sampler = getattr(batches, "sampler", None)
    inner = getattr(getattr(batches, "batch_sampler", None), "sampler", None)
    places = {"loader": batches, "sampler": sampler, "batch_sampler": inner}
    found = {name: getattr(place, "generator", None) for name, place in places.items()}
    return {"torch": torch.default_generator, **{k: v for k, v in found.items() if isinstance(v, torch.Generator)}}


def _set_epoch(batches: Any, epoch: int) -> None:
    set_epoch = getattr(getattr(batches, "sampler", None), "set_epoch", None)
    if set_epoch:  # torch's DistributedSampler shuffles by it
        set_epoch(epoch)
