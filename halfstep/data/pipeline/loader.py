"""Other people's batches: a torch DataLoader or any iterable of batches, counted, resumed, and moved to a device."""

import warnings
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch

from halfstep.data.pipeline import loader__generators as generators
from halfstep.data.pipeline.iterate__stream import moved
from halfstep.errors import Notice

VERSION = 1
_KEYS = ("epoch", "step", "own", "began", "began_epoch", "now")


@dataclass(eq=False)
class _Pass:
    """What a pass has delivered, the random states it began with, and whether the loader has said that it is over."""

    epoch: int
    step: int = 0
    began: dict[str, Any] = field(default_factory=dict)
    over: bool = False


class Loader:
    """Batches in an order that is not ours, one pass per `for`; the next `for` is the next pass. A resumed one goes on
    by the loader's own `state_dict` where it has one; otherwise it is gone through again up to the position, from the
    random states it began with: Python's, numpy's, torch's, and those of generators that hang on a DataLoader."""

    def __init__(self, batches: Iterable[Any]) -> None:
        if not hasattr(batches, "__iter__") or hasattr(batches, "__next__"):
            raise TypeError(
                f"expected batches that can be gone through again, such as a DataLoader or a list, got "
                f"{type(batches).__name__}. Wrap a generator function in a class whose __iter__ calls it."
            )
        self.batches = batches
        self.epoch, self.step = (
            0,
            0,
        )  # the newest pass, or the one to come, and what it has delivered
        self._device: torch.device | None = None
        self._newest = _Pass(0, over=True)
        self._resume: dict[str, Any] | None = None

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
        """The same batches from the same position on, copied to the device through pinned memory, without a wait."""
        new = copy(self)
        new._device = torch.device(device)
        return new

    def __iter__(self) -> Iterator[Any]:
        return _Batches(self)

    def _begin(self) -> tuple[_Pass, Iterator[Any]]:
        state, self._resume = self._resume, None
        if state is None:
            self.epoch, self.step = (
                self.epoch + bool(self.step),
                0,
            )  # a pass that was left early counts
        this = self._newest = _Pass(self.epoch, self.step)
        generators.set_epoch(self.batches, this.epoch)
        if state and state["own"] is not None:
            self.batches.load_state_dict(state["own"])  # type: ignore[attr-defined]
        elif state and state["began"] and state["began_epoch"] == this.epoch:
            this.began = state["began"]
            return this, self._moved(self._replayed(this.began, this.step))
        else:
            this.began = generators.save(self.batches)
        return this, self._moved(iter(self.batches))

    def _again(self, this: _Pass) -> Iterator[Any]:
        """After a batch that could not be had: the same one, by a replay."""
        if not this.began or hasattr(self.batches, "state_dict"):
            name = type(self.batches).__name__
            raise RuntimeError(
                f"{name} failed after {this.step} batches and cannot go on. Begin another pass."
            )
        return self._moved(self._replayed(this.began, this.step))

    def _delivered(self, this: _Pass) -> None:
        if this is self._newest:
            self.epoch, self.step = (this.epoch + 1, 0) if this.over else (this.epoch, this.step)

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        return moved(batches, self._device) if self._device else batches

    def _replayed(self, began: dict[str, Any], step: int) -> Iterator[Any]:
        """The pass begun again from its random states; those of the process are afterwards what they were before."""
        with generators.kept():
            generators.load(self.batches, began)
            batches = iter(self.batches)
            for done in range(step):
                if next(batches, self) is self:
                    raise ValueError(
                        f"expected {type(self.batches).__name__} to give the {step} batches it had given, got {done}. "
                        "Make the loader as it was, or start a new pass without the position."
                    )
            head = [] if step else list(islice(batches, 1))  # samplers draw with the first batch
        return chain(head, batches)

    def state_dict(self) -> dict[str, Any]:
        """Where the newest pass stands, with the loader's own state, the random states that the pass began with, and,
        between passes, the present ones."""
        if self._resume:
            return dict(self._resume)
        known = hasattr(self.batches, "state_dict") and (self.step or self._newest.over)
        return {
            "version": VERSION, "epoch": self.epoch, "step": self.step,
            "own": self.batches.state_dict() if known else None,  # type: ignore[attr-defined]
            "began": dict(self._newest.began), "began_epoch": self._newest.epoch,
            "now": {} if self.step else generators.save(self.batches),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `for` go on there. Between passes, the random states are set at once; within one, a loader that
        cannot seek is replayed, which is announced."""
        lacking = [key for key in _KEYS if key not in state]
        if state.get("version") != VERSION or lacking:
            raise ValueError(
                f"expected the state of a hs.data.Loader, version {VERSION}, got {sorted(state)}"
            )
        self._resume, self.epoch, self.step = dict(state), state["epoch"], state["step"]
        self._newest = _Pass(self.epoch, over=True)
        if not state["step"] and state["now"]:
            generators.load(self.batches, state["now"])
        if state["step"] and state["own"] is None:
            warnings.warn(
                f"{type(self.batches).__name__} cannot seek: its first {state['step']} batches are fetched again "
                "and thrown away, on the assumption that their order comes from Python's, numpy's and torch's random "
                "states or a sampler's generator. hs.data.Dataset seeks at no cost.", Notice, stacklevel=2,
            )  # fmt: skip


class _Batches:
    """The batches of one pass, which begins with the first of them."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.this: _Pass | None = None
        self.source: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.this is None:
            self.this, self.source = self.loader._begin()
        if self.source is None:
            self.source = self.loader._again(self.this)
        this = self.this
        try:
            batch = next(self.source)
            this.step += 1
        except StopIteration:
            this.over = True
            raise
        except BaseException:
            self.source = None  # the next `next` begins a replay
            raise
        finally:
            self.loader._delivered(this)
        return batch
