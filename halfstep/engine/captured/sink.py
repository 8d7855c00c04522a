"""`hs.sink`: a loop over visits instead of steps, for a TrainStep or a step function of the user's own."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.cuda_graphs.capture import GraphCache
from halfstep.data import Dataset
from halfstep.engine.captured.inputs import ROWS
from halfstep.engine.captured.programs__own import FunctionProgram
from halfstep.engine.captured.record_buffer__ring import RecordBuffer
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.engine.captured.uncapturable import OnUncapturable, why_not_capturable
from halfstep.engine.captured.verify import VerifiedStep, cloned, warmup_steps
from halfstep.engine.captured.verify import verify as compare
from halfstep.engine.feed import Feed
from halfstep.engine.memory import kept
from halfstep.errors import Notice
from halfstep.step import TrainStep
from halfstep.step.overflow import raise_device_errors
from halfstep.step.state import ROW_FIELDS
from halfstep.utils import rng


class Records:
    """The records of one visit, column by column, on the host: `records.loss` has one number per step.

    Of a TrainStep: loss, cycle_loss, lr ([steps] or [steps, groups]), scale, grad_norm, skipped, updated, fingerprint.
    Of a function: what it returned, by name. `samples` is the size of each batch.
    """

    def __init__(self, columns: dict[str, Tensor], samples: list[int]) -> None:
        self.columns, self.samples = columns, samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getattr__(self, name: str) -> Tensor:
        columns = self.__dict__.get("columns", {})
        if name not in columns:
            raise AttributeError(f"records: expected one of {', '.join(columns)}, got {name!r}")
        found: Tensor = columns[name]
        return found

    def __repr__(self) -> str:
        return f"Records({len(self)} steps: {', '.join(self.columns)})"


class Sink:
    """Each `for` over it is one pass over the data, in visits of `every` steps; graphs are kept from pass to pass."""

    def __init__(self, sunk: CapturedRunner, step: Any, every: int, data: Any = None) -> None:
        self.runner, self.step, self.every = sunk, step, every
        self._data = data if isinstance(data, Dataset) else None  # its passes are counted there

    @property
    def captures(self) -> int:
        """Graphs captured so far."""
        return self.runner.program.graphs.captures

    def __iter__(self) -> Iterator[Records]:
        with kept() if self.runner.ring.device.type == "cpu" else nullcontext():
            yield from self._visits()

    def _visits(self) -> Iterator[Records]:
        sunk, feed = self.runner, self.runner.feed
        if self._data is not None:
            feed.load_state_dict(self._data.take_pass())
        elif not sunk.over:  # a pass that was left early counts
            feed.go_to_pass(feed.pass_number + 1)
        sunk.over = True
        while True:
            samples = sunk.run(self.every, lambda: False)
            if sunk.over:
                sunk.flush()
                feed.end_pass()
            rows, prints = sunk.rows()
            if isinstance(self.step, TrainStep):
                raise_device_errors(self.step)
            if samples:
                yield self._records(rows, prints, samples)
            if sunk.over:
                return

    def _records(self, rows: list[list[float]], prints: list[int], samples: list[int]) -> Records:
        table = torch.tensor(rows, dtype=torch.float64)
        if not isinstance(self.step, TrainStep):
            names = self.runner.program.names  # type: ignore[attr-defined]
            return Records({name: table[:, i] for i, name in enumerate(names)}, samples)
        columns = {name: table[:, i] for i, name in enumerate(ROW_FIELDS)}
        rates = table[:, len(ROW_FIELDS) :]
        columns |= {name: columns[name] != 0 for name in ("skipped", "updated")}
        columns["lr"] = rates.squeeze(1) if rates.shape[1] == 1 else rates
        columns["fingerprint"] = torch.tensor(prints)
        return Records(columns, samples)


def sink(
    step: TrainStep | Callable[..., Any], data: Any, *, every: int = 100, on_uncapturable: OnUncapturable = "raise",
    verify: int = 0, state: Sequence[Any] = (), device: torch.device | str | None = None,
) -> Sink:  # fmt: skip
    """Train with one host visit per `every` steps: `for records in hs.sink(step, data): …` is one pass.

    On CUDA the step is captured as graphs after a few eager ones and replayed. It gives what calling the step batch by
    batch gives, the tail of an update cycle flushed with the pass's last step. A function of your own must do the same
    work at every call, on tensors that stay where they are, and return its loss or a dict of numbers (as tensors);
    `state` names the network, optimizer and so on that it changes, so that a rate set by hand is seen, and `device`
    says where it runs when neither they nor the data do. `verify=K` first runs the steps up to K replays eagerly,
    eagerly again and sunk, compares every tensor bit by bit, and puts everything back. The data's own passes go on.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every: expected a number of steps of 1 or more, got {every!r}")
    if on_uncapturable not in ("raise", "eager"):
        raise ValueError(f"on_uncapturable: expected 'raise' or 'eager', got {on_uncapturable!r}")
    if not isinstance(verify, int) or verify < 0:
        raise ValueError(f"verify: expected a number of replays to check, or 0, got {verify!r}")
    if not callable(step):
        raise TypeError(
            f"step: expected a TrainStep or a function of a batch, got {type(step).__name__}"
        )
    if isinstance(step, TrainStep):
        _check(step)
        feed = Feed(data, named=step.objective.loss is None, device=step.device)
        make = partial(CapturedRunner.of, step, on_uncapturable=on_uncapturable)
        check(VerifiedStep(step), feed, make, step.device, verify)
        return Sink(make(feed), step, every, data)
    place = _place(device, data, state)
    feed = Feed(data, device=place)

    def own(feed: Feed) -> CapturedRunner:
        return CapturedRunner(
            FunctionProgram(
                step, RecordBuffer(ROWS, place), GraphCache(place), on_uncapturable, state
            ),
            feed,
        )

    if verify:
        check(VerifiedStep(step, state), feed, own, place, verify)
    return Sink(own(feed), step, every, data)


def check(
    subject: VerifiedStep,
    feed: Feed,
    make: Callable[[Feed], CapturedRunner],
    device: torch.device,
    replays: int,
) -> None:
    """verify=K, on the first batches of the data: the feed is afterwards where it was."""
    if not replays:
        return
    if device.type == "cpu" and isinstance(subject.step, TrainStep) and subject.step.compiled.on:
        raise ValueError(
            "verify: expected a step that is not compiled, got compile=True: on a CPU all of it is one program, which "
            "rounds in an order of its own. Its first run is compared with the step's own, to rounding, in any case."
        )
    numbers, place = rng.save(), feed.state_dict()
    batches = [
        cloned(args, device) for args in islice(feed.start(), warmup_steps(subject.step) + replays)
    ]
    feed.load_state_dict(place)
    rng.load(numbers)

    def sunk(batches: list[Any], look: Callable[[], None]) -> None:
        runs = make(Feed(batches))
        for _ in batches:
            runs.run(1, lambda: False)
            look()
        seen = runs.program.replays
        if device.type == "cuda" and seen < replays:
            warnings.warn(
                f"verify: {seen} of {replays} replays were compared in the {len(batches)} batches there were: give "
                "more data, or a step whose first updates are not skipped", Notice, stacklevel=5,
            )  # fmt: skip

    compare(subject, batches, sunk)


def _check(step: TrainStep) -> None:
    why = why_not_capturable(step, step.device)
    if why and step.device.type == "cuda":
        raise ValueError(f"sink: {why}; call the step batch by batch otherwise")


def _place(device: torch.device | str | None, data: Any, state: Sequence[Any]) -> torch.device:
    if device is not None:
        return torch.device(device)
    for module in state:
        if isinstance(module, nn.Module) and next(module.parameters(), None) is not None:
            return next(module.parameters()).device
    where = getattr(getattr(data, "placement", None), "device", None)
    return where if isinstance(where, torch.device) else torch.device("cpu")
