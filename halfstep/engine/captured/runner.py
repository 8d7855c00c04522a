"""Many steps per host visit: batches from a feed, a program that runs them, rows when the host looks in."""

import time
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, Protocol

from halfstep.cuda_graphs.capture import Compiles, GraphCache
from halfstep.engine.captured.inputs import ROWS, Resident, Staged, resident_dataset
from halfstep.engine.captured.programs import StepProgram
from halfstep.engine.captured.record_buffer__ring import RecordBuffer
from halfstep.engine.captured.runner__pace import HostThrottle
from halfstep.engine.captured.uncapturable import OnUncapturable
from halfstep.engine.feed import Feed
from halfstep.step import TrainStep

MOST, SHORT_S = (
    16,
    5e-4,
)  # steps in one graph, when they are so short that the gaps between graphs show


class Program(Protocol):
    """What Sunk asks of a program."""

    ring: RecordBuffer
    graphs: GraphCache
    replays: int

    def begin(self) -> None: ...
    def run(
        self, key: Hashable, batches: Callable[[int], Iterator[tuple[Any, ...]]], alike: int
    ) -> int: ...
    def flush(self, *, told: bool) -> bool: ...
    def settle(self) -> None: ...


class CapturedRunner:
    """Runs a program over a feed. `over`: the pass has given its last batch; the next run begins another."""

    def __init__(self, program: Program, feed: Feed) -> None:
        self.program, self.feed, self.ring = program, feed, program.ring
        data = resident_dataset(feed, self.ring.device)
        self.inputs = Staged(feed, self.ring) if data is None else Resident(feed, self.ring, data)
        self.pace = HostThrottle(self.ring.device)
        self.over, self.done = True, list[int]()  # samples of each step of the run under way
        self._read = self._made = (
            0  # rows of the ring that the host has, and that the device has been asked for
        )
        self._rows: list[list[float]] = []
        self._prints: list[int] = []

    @classmethod
    def of(
        cls,
        step: TrainStep,
        feed: Feed,
        *,
        on_uncapturable: OnUncapturable = "raise",
        direct: bool = False,
    ) -> "CapturedRunner":
        graphs = GraphCache(step.device, direct=direct, compiles=whole_step_compiler(step))
        return cls(
            StepProgram(step, RecordBuffer(ROWS, step.device), graphs, on_uncapturable), feed
        )

    def run(
        self, limit: int, stop: Callable[[], object], seconds: float | None = None
    ) -> list[int]:
        """Up to `limit` steps: fewer where the pass ends, `stop()` is true, or after about `seconds`. The number of
        samples of each."""
        program = self.program
        self.done = list[int]()
        program.begin()
        self._start()
        try:
            self._steps(limit, stop, seconds)
        finally:
            program.settle()
        return self.done

    def _steps(self, limit: int, stop: Callable[[], object], seconds: float | None) -> None:
        program, inputs, feed, pace, done = (
            self.program,
            self.inputs,
            self.feed,
            self.pace,
            self.done,
        )
        end = None if seconds is None else time.perf_counter() + seconds
        while len(done) < limit and not stop():
            full = inputs.full()
            if full:
                self._drain()
            key = inputs.next()
            if key is None:
                self.over = True
                break
            if full:
                self._read = self._made = 0
            quick = pace.step_s is not None and pace.step_s < SHORT_S
            many = program.run(
                key, inputs.batches, inputs.alike(min(MOST, limit - len(done))) if quick else 1
            )
            inputs.skip(many - 1)
            self._made += many
            done += [inputs.samples] * many
            feed.advance(many)
            if feed.step == feed.size:
                self.over = True
                break
            pace.tick(many)
            if end is not None and time.perf_counter() > end:
                break

    def feeds(self, feed: Feed) -> bool:
        """Goes on with another feed, and whether it can: graphs gather from the data set they were captured with."""
        data = resident_dataset(feed, self.ring.device)
        mine = self.inputs.data if isinstance(self.inputs, Resident) else None
        if (data and data.plan) is not (mine and mine.plan):
            return False
        if isinstance(self.inputs, Resident) and data is not None:
            self.inputs.data = data
        self.feed = self.inputs.feed = feed
        self.over = True
        return True

    def flush(self) -> bool:
        """The tail of a pass as an update of its own; whether there was one. Its outcome joins the last row."""
        flushed = self.program.flush(told=self._made > 0)
        self.program.settle()
        return flushed

    def rows(self) -> tuple[list[list[float]], list[int]]:
        """The rows since the last call, and their fingerprints: one wait for the device."""
        self._drain()
        rows, prints = self._rows, self._prints
        self._rows, self._prints = [], []
        return rows, prints

    def _start(self) -> None:
        if self.over:
            self.inputs.start()
            self.over, self._read, self._made = False, 0, 0
            self._rows, self._prints = [], []  # of a pass that failed

    def _drain(self) -> None:
        first, last = self._read, self._made
        if last > first:
            self._rows += self.ring.read(first, last)
            self._prints += (
                self.ring.read_prints(first, last) if self._hashed() else [0] * (last - first)
            )
            self._read = last

    def _hashed(self) -> bool:
        step = getattr(self.program, "step", None)
        return bool(getattr(getattr(step, "options", None), "fingerprint_every", 0))


def whole_step_compiler(step: TrainStep) -> Compiles | None:
    """On a CPU, where the step is to be compiled: all of it as one program."""
    if step.device.type != "cpu" or not step.compiled.on:
        return None
    from halfstep.engine.captured.whole_step import (
        WholeStepProgram,
    )  # torch's compiler is a heavy import

    return partial(WholeStepProgram, step)
