"""Other people's batches: a torch DataLoader or any iterable of batches.

They are counted, resumed, and copied to a device.
"""

import warnings
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any

import torch

from halfstep.data.pipeline.loader_limits import (
    OWN_GENERATOR_ADVICE,
    describe_changes,
    known_limits,
    watch_draws,
    what_to_watch,
)
from halfstep.data.pipeline.loader_states import (
    DRAWS_LATER,
    has_exact_state,
    load_own_states,
    load_random_states,
    match_workers,
    save_own_states,
    save_random_states,
    set_epoch,
)
from halfstep.data.pipeline.stream import copy_to_device
from halfstep.errors import CheckpointError, Notice
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

    @property
    def draws_later(self) -> bool:
        """Whether the order was seen to depend on draws from the process's generators meanwhile."""
        return bool(self.start_states.get(DRAWS_LATER))


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
        self._watched = ""  # "order": a sampler's draws, "batches": all draws of a fetch
        self._announced_draws = False
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

    def resume_limits(self) -> list[str]:
        """What a resumed run cannot repeat with these batches, in words.

        From now on a pass also notices when its order is drawn while it goes on.
        """
        self._watched = what_to_watch(self.batches)
        return known_limits(self.batches)

    def save_generators(self) -> dict[str, Any]:
        """The states of the random generators that the loader, its sampler or data set keeps."""
        return save_own_states(self.batches)

    def load_generators(self, states: dict[str, Any]) -> None:
        """Sets what `save_generators` returned."""
        load_own_states(self.batches, states)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Where the newest pass stands, and what is needed to go on there.

        That is the loader's own state, the random states that the pass began with, and the present
        ones: all of them between passes, those of generators of the loader's own within one.
        `step`: how many of the delivered batches count, where the last ones do not.
        """
        if self._loaded_state:
            return dict(self._loaded_state)
        newest = self._newest_pass
        if step is None:
            step = self.step
        own_state = None
        present_states = {}
        generators = {}
        if step == self.step:
            if has_exact_state(self.batches) and (step or newest.is_over):
                own_state = self.batches.state_dict()  # type: ignore[attr-defined]
            if step:
                generators = save_own_states(self.batches)
            else:
                present_states = save_random_states(self.batches)
        elif step == self.step - 1 and hasattr(self.batches, "previous_state_dict"):
            own_state = self.batches.previous_state_dict()
        elif not newest.start_states:
            raise CheckpointError(
                f"{type(self.batches).__name__} has delivered {self.step} batches of this pass, "
                f"of which {step} were trained on, and its own state cannot go back. Resume from "
                "an older checkpoint."
            )
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "step": step,
            "own": own_state,
            "began": dict(newest.start_states),
            "began_epoch": newest.epoch,
            "now": present_states,
            **({"generators": generators} if generators else {}),
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
            load_random_states(self.batches, state["now"])
            match_workers(self.batches, state["now"])
        if state["step"] and state["own"] is None:
            warnings.warn(
                f"{type(self.batches).__name__} cannot seek: its first {state['step']} batches are "
                "fetched again and thrown away, on the assumption that their order comes from "
                "Python's, numpy's and torch's random states or a sampler's generator. "
                "hs.data.Dataset seeks at no cost.",
                Notice,
                stacklevel=2,
            )
        for change in describe_changes(self.batches, state):
            warnings.warn(change, Notice, stacklevel=2)

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
        set_epoch(self.batches, new_pass.epoch)

        if state and state["own"] is not None:
            self.batches.load_state_dict(state["own"])  # type: ignore[attr-defined]
        elif state and state["began"] and state["began_epoch"] == new_pass.epoch:
            new_pass.start_states = dict(state["began"])
            match_workers(self.batches, new_pass.start_states)
            batches = self._replay(new_pass)
            # Whatever else draws from the loader's own generators has drawn since.
            load_own_states(self.batches, state.get("generators", {}))
            return new_pass, batches
        else:
            new_pass.start_states = save_random_states(self.batches)
        return new_pass, self._on_device(self._batches_of(new_pass))

    def _retry_batch(self, failed_pass: _LoaderPass) -> Iterator[Any]:
        """The batches from the failed one on, by a replay."""
        if not failed_pass.start_states or has_exact_state(self.batches):
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
            load_random_states(self.batches, of_pass.start_states)
            batches = self._batches_of(of_pass)
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

    def _batches_of(self, of_pass: _LoaderPass) -> Iterator[Any]:
        """A new iterator over the loader, watched where `resume_limits` says so."""
        batches = iter(self.batches)
        if not self._watched:
            return batches
        watch = partial(watch_draws, on_draw=partial(self._announce_draw, of_pass))
        sampled = getattr(batches, "_sampler_iter", None)  # torch's name, of its iterators
        if self._watched == "order" and sampled is not None:
            # Workers have been sent their first batches already.
            batches._sampler_iter = watch(sampled, skip=batches._num_workers == 0)  # type: ignore[attr-defined]
            return batches
        return watch(batches, skip=True)

    def _announce_draw(self, in_pass: _LoaderPass) -> None:
        if in_pass.draws_later:
            return
        in_pass.start_states[DRAWS_LATER] = True
        if not self._announced_draws:
            self._announced_draws = True
            warnings.warn(
                f"the batches of {type(self.batches).__name__} draw from the random generators of "
                "the process while a pass goes on, in turns with the training. A run that is "
                "resumed in the middle of a pass cannot repeat that, and may see other samples. "
                f"{OWN_GENERATOR_ADVICE}",
                Notice,
                stacklevel=2,
            )

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
