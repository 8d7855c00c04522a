"""Many steps for each visit of the host.

A feed gives batches, a program runs them, a buffer on the device keeps their records. The host
reads these when it looks in.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Protocol

import torch

from halfstep.cuda_graphs.capture import BodyCompiler, GraphCache
from halfstep.engine.captured.inputs import RECORD_ROWS, MakeBatches, make_inputs
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.step_program import StepProgram
from halfstep.engine.captured.uncapturable import OnUncapturable
from halfstep.engine.feed import Feed
from halfstep.step import TrainStep

# Steps shorter than this run several to a graph: the gaps between two graphs show.
SHORT_STEP_S = 5e-4
MAX_STEPS_PER_GRAPH = 16

# The host waits for the device about this often, and has three such spans under way at most.
WAIT_EVERY_S = 0.1
MAX_STEPS_BETWEEN_WAITS = 256


class Program(Protocol):
    """What runs batches: StepProgram for a TrainStep, FunctionProgram for a user's function."""

    records: RecordBuffer
    graphs: GraphCache
    replays: int

    @property
    def writes_fingerprints(self) -> bool: ...
    def begin_steps(self) -> None: ...
    def run(self, shape_key: Hashable, make_batches: MakeBatches, same_shape: int) -> int: ...
    def flush(self, *, into_last_row: bool) -> bool: ...
    def end_steps(self) -> None: ...


class CapturedRunner:
    """Runs a program over a feed: the `Runner` of engine/loop.py.

    `run` until `pass_over`, then `flush`. The next `run` begins another pass.
    """

    def __init__(self, program: Program, feed: Feed) -> None:
        self.program = program
        self.feed = feed
        self.records = program.records
        self.inputs = make_inputs(feed, self.records)
        self.throttle = HostThrottle(self.records.device)
        self.pass_over = True  # the pass has given its last batch
        self.step_samples: list[int] = []  # the samples of each step since `run` was called

        # Rows of the record buffer since its last reset: on the host, and requested of the device.
        self._rows_read = 0
        self._rows_written = 0
        # Read before the buffer was reset, or for the next visit.
        self._rows: list[list[float]] = []
        self._fingerprints: list[int] = []
        self._extras: list[list[float]] = []

    @classmethod
    def for_step(
        cls,
        step: TrainStep,
        feed: Feed,
        *,
        on_uncapturable: OnUncapturable = "raise",
        direct: bool = False,
    ) -> "CapturedRunner":
        """For a TrainStep. `direct`: a replay calls the step again, on any device (for tests)."""
        graphs = GraphCache(step.device, direct=direct, compile_body=whole_step_compiler(step))
        records = RecordBuffer(RECORD_ROWS, step.device)
        return cls(StepProgram(step, records, graphs, on_uncapturable), feed)

    def run(
        self, max_steps: int, should_stop: Callable[[], object], max_seconds: float | None = None
    ) -> list[int]:
        """Runs up to `max_steps` steps. Returns the number of samples of each.

        It is fewer steps where the pass ends, `should_stop()` is true, or after about
        `max_seconds`.
        """
        self.step_samples = []
        self.program.begin_steps()
        if self.pass_over:
            self._start_pass()
        try:
            self._run_steps(max_steps, should_stop, max_seconds)
        finally:
            self.program.end_steps()
        return self.step_samples

    def flush(self) -> bool:
        """Ends an open cycle: the tail of a pass is an update of its own.

        Returns whether there was one. Its record joins the last row.
        """
        flushed = self.program.flush(into_last_row=self._rows_written > 0)
        self.program.end_steps()
        return flushed

    def rows(self) -> tuple[list[list[float]], list[int]]:
        """The rows since the last call, and their fingerprints. Waits for the device."""
        self._read_new_rows()
        rows = self._rows
        fingerprints = self._fingerprints
        self._rows = []
        self._fingerprints = []
        return rows, fingerprints

    def extras(self) -> list[list[float]]:
        """Parts of the loss and counts of metrics of the rows that `rows` has returned last."""
        extras = self._extras
        self._extras = []
        return extras

    def switch_feed(self, feed: Feed) -> bool:
        """Goes on with another feed; False if the graphs gather from other data."""
        if not self.inputs.switch_feed(feed):
            return False
        self.feed = feed
        self.pass_over = True
        return True

    def _start_pass(self) -> None:
        self.inputs.start()
        self.pass_over = False
        self._rows_read = 0
        self._rows_written = 0
        # Rows of a pass that failed are of no use.
        self._rows = []
        self._fingerprints = []
        self._extras = []

    def _run_steps(
        self, max_steps: int, should_stop: Callable[[], object], max_seconds: float | None
    ) -> None:
        inputs = self.inputs
        feed = self.feed
        step_samples = self.step_samples
        deadline = None
        if max_seconds is not None:
            deadline = time.perf_counter() + max_seconds

        while len(step_samples) < max_steps and not should_stop():
            # A refill of the inputs resets the record buffer: its rows are read before.
            refills = inputs.needs_refill()
            if refills:
                self._read_new_rows()
            shape_key = inputs.next()
            if shape_key is None:
                self.pass_over = True
                break
            if refills:
                self._rows_read = 0
                self._rows_written = 0

            # One batch, or several of the same shape as one graph.
            same_shape = 1
            if self.throttle.steps_are_short():
                limit = min(MAX_STEPS_PER_GRAPH, max_steps - len(step_samples))
                same_shape = inputs.count_same_shape(limit)
            steps = self.program.run(shape_key, inputs.batches, same_shape)
            inputs.skip(steps - 1)
            self._rows_written += steps
            step_samples += [inputs.batch_size] * steps

            feed.advance(steps)
            if feed.pass_is_over:
                self.pass_over = True
                break
            self.throttle.tick(steps)
            if deadline is not None and time.perf_counter() > deadline:
                break

    def _read_new_rows(self) -> None:
        start = self._rows_read
        stop = self._rows_written
        if stop <= start:
            return
        self._rows += self.records.read(start, stop)
        self._extras += self.records.read_extras(start, stop)
        if self.program.writes_fingerprints:
            self._fingerprints += self.records.read_fingerprints(start, stop)
        else:
            self._fingerprints += [0] * (stop - start)
        self._rows_read = stop


class HostThrottle:
    """Keeps the host from running too far ahead of a GPU.

    Far enough to keep it busy, near enough to react to a signal soon. Call `tick` after every step:
    now and then it waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps_between_waits = 1
        self.step_s: float | None = None  # seconds that a step took lately
        self._steps = 0  # since the last event
        self._events: deque[tuple[torch.cuda.Event, int]] = deque()  # with the steps before each
        self._last_wait_s = time.perf_counter()

    def steps_are_short(self) -> bool:
        """Whether a step is so short that the gap to the next one shows."""
        return self.step_s is not None and self.step_s < SHORT_STEP_S

    def tick(self, steps: int = 1) -> None:
        """Counts steps that were launched; waits when too many are under way."""
        self._steps += steps
        if self.device.type != "cuda" or self._steps < self.steps_between_waits:
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._events.append((event, self._steps))
        self._steps = 0
        if len(self._events) >= 3:
            oldest_event, event_steps = self._events.popleft()
            oldest_event.synchronize()
            self._adapt(event_steps)

    def _adapt(self, steps: int) -> None:
        """Twice or half as many steps between waits, where these do not take the time wished."""
        now = time.perf_counter()
        seconds = now - self._last_wait_s
        self._last_wait_s = now
        self.step_s = seconds / steps
        if seconds < WAIT_EVERY_S / 2:
            doubled = self.steps_between_waits * 2
            self.steps_between_waits = min(doubled, MAX_STEPS_BETWEEN_WAITS)
        elif seconds > WAIT_EVERY_S * 2:
            self.steps_between_waits = max(self.steps_between_waits // 2, 1)


def whole_step_compiler(step: TrainStep) -> BodyCompiler | None:
    """What compiles the step as one program: on a CPU, if the step is to be compiled."""
    if step.device.type != "cpu" or not step.compiled.on:
        return None
    # torch's compiler is a heavy import.
    from halfstep.engine.captured.whole_step import WholeStepProgram

    return partial(WholeStepProgram, step)
