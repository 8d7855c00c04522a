"""A TrainStep as graphs: eager at first, then captured, then replayed.

Start with the docstring of `StepProgram`, then `StepProgram.run`.
"""

import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from halfstep.cuda_graphs.capture import (
    BATCHES_BEFORE_COMPILE,
    MAX_GRAPHS,
    CapturedGraph,
    GraphCache,
)
from halfstep.cuda_graphs.guards import (
    ContainerTensors,
    has_step_hooks,
)
from halfstep.engine.captured.inputs import UNCAPTURABLE, MakeBatches
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.static_step import (
    CyclePosition,
    MissingOptimizerState,
    StaticStep,
    step_guards,
)
from halfstep.engine.captured.uncapturable import (
    OnUncapturable,
    locate_error,
    raise_or_warn,
    record_host_syncs,
    unrepeatable_reason,
)
from halfstep.engine.feed import Args
from halfstep.errors import Notice
from halfstep.step import TrainStep
from halfstep.utils.python_state import PythonState

# From so many replays on a run is long enough to compile kernels for it: about 2 s, once on a
# machine.
POLISH_AFTER_REPLAYS = 5000

# A graph of several steps has at least so many.
MIN_BURST_STEPS = 8

# Changed settings make graphs stale. So many times, then: a warning where graphs are captured; no
# more programs where each is compiled for 5 to 30 s.
STALE_BEFORE_WARNING = 8
STALE_BEFORE_GIVING_UP = 2

LR_ADVICE = "A learning rate that moves goes into schedule= (or lr=), which costs none."


class BatchKind(NamedTuple):
    """Batches of one kind launch the same kernels on the same tensors: one graph serves them."""

    shape_key: Hashable
    first: bool  # the batch opens its update cycle
    last: bool  # it ends the cycle
    grad_indices: frozenset[int]  # parameters with a gradient in the cycle before this batch


class FlushKind(NamedTuple):
    """The update that ends a cycle early."""

    grad_indices: frozenset[int]


class BurstKind(NamedTuple):
    """Several batches of one shape, whole cycles, in one graph."""

    shape_key: Hashable
    steps: int


Kind = BatchKind | FlushKind | BurstKind


class StepProgram:
    """Runs a TrainStep batch by batch. How each batch runs changes only the time it takes.

    Batches are told apart by their kind: shape, position in the update cycle, gradients that the
    cycle has. A batch is

    - **run eagerly** while its kind is new. Optimizer state must exist, and the kind must have run
      once (more often where parts are compiled). The last eager run is watched: an operation that
      makes the host wait cannot be captured. Everything runs eagerly while the optimizer has step
      hooks, and from the moment on that a capture was refused (`refusal_reason` says why).
    - **captured** the next time: its kernels are recorded, none of them runs.
    - **replayed** at once for the same batch, and every time after that.

    All graphs are **dropped** after a visit, before the next steps (`begin_steps`), if something
    that they have read in Python has changed: an address, a setting, a mode. The next batches are
    captured again. `polish` and a refusal drop them too.

    On a CPU a "graph" is the step as one compiled program; the rules are the same.
    """

    def __init__(
        self,
        step: TrainStep,
        records: RecordBuffer,
        graphs: GraphCache,
        on_uncapturable: OnUncapturable = "raise",
    ) -> None:
        self.step = step
        self.records = records
        self.graphs = graphs
        self.on_uncapturable = on_uncapturable
        self.static = StaticStep(step)
        self.writes_fingerprints = bool(step.options.fingerprint_every)
        self.replays = 0  # steps that were replayed
        self.recaptures = 0  # how often graphs were dropped because they were stale
        self.polished = False  # kernels are compiled for the update, graphs hold many steps
        self.refusal_reason = ""  # why no more graphs are captured; empty while they are
        self._compiles = graphs.compile_body is not None

        # What is known about kinds, and what graphs depend on.
        self._eager_runs: dict[Kind, int] = {}
        self._grads_after: dict[Kind, frozenset[int]] = {}  # that the cycle has after a replay
        self._guards: tuple[Any, ...] = ()
        self._container_tensors = ContainerTensors(step.net, step.objective.loss)
        self._built_from: tuple[Any, ...] = (step.update, step.compiled.on, step.objective.observer)

        # Of the visit under way.
        self._in_eager_step = False
        self._has_step_hooks = False
        self._host_syncs = ""  # where the last eager step waited for the device

    def begin_steps(self) -> None:
        """Drops graphs that are stale after whatever happened since the last visit."""
        step = self.step
        self._in_eager_step = False
        step.check_network(for_replays=True)
        self._has_step_hooks = has_step_hooks(step.optimizer)
        step.compiled.inside_whole_step = (
            self._compiles and not self.refusal_reason and step.compiled.on
        )
        self.static.take_over_cycle()

        if len(self.graphs):
            is_stale = step_guards(step) != self._guards
            if is_stale or self._container_tensors.were_replaced:
                self._drop_graphs()

        # Another precision, schedule or compiled forward pass, other metrics: eagerly once more.
        built_from = (step.update, step.compiled.on, step.objective.observer)
        if self._built_from != built_from:
            self._built_from = built_from
            self._eager_runs.clear()
            step.update.use_fused_kernels = self.polished and not step.options.deterministic

        if not self.polished:
            polish = step.options.polish
            is_long_run = polish == "auto" and self.replays >= POLISH_AFTER_REPLAYS
            if polish is True or is_long_run:
                self.polish()

    def polish(self) -> None:
        """Prepares for a long run: kernels compiled for the update, graphs of many steps."""
        if self._compiles:
            return
        self.polished = True
        self.records.use_kernels = True
        if not self.step.options.deterministic:
            self.step.update.use_fused_kernels = True
        # Eagerly once more: kernels are compiled outside of captures.
        self.graphs.clear()
        self._eager_runs.clear()

    def run(self, shape_key: Hashable, make_batches: MakeBatches, same_shape: int = 1) -> int:
        """Runs the current batch; its record goes into the buffer. Returns how many batches ran.

        `same_shape`: so many batches from the current one on have its shape; they may run as one
        graph.
        """
        if self._host_syncs:
            self._refuse(self._host_syncs)

        position = self.static.position
        grad_indices = frozenset() if position.first else self.static.grad_indices
        kind = BatchKind(shape_key, position.first, position.last, grad_indices)

        # Short steps of a long run: whole cycles as one graph.
        if same_shape > 1 and self.polished and position.first and self._may_capture(kind):
            steps = self._run_burst(shape_key, make_batches, same_shape)
            if steps > 0:
                return steps

        graph = self._find_or_capture(kind, lambda: self._run_steps(make_batches, [position]))
        if graph is None:
            self._run_eagerly(kind, make_batches)
        else:
            self._replay(kind, graph, [position])
            self._write_fingerprint()
        return 1

    def flush(self, *, into_last_row: bool) -> bool:
        """Ends an open cycle early. Returns whether there was one.

        `into_last_row`: the record goes into the newest row of the buffer.
        """
        if self.static.micro == 0:
            return False
        kind = FlushKind(self.static.grad_indices)
        graph = None
        if into_last_row:
            graph = self._find_or_capture(kind, self._run_flush)
        if graph is None:
            self._flush_eagerly(kind, into_last_row=into_last_row)
        else:
            graph.replay()
            self.static.count_replay(last=True, batches=0)
        if into_last_row:
            self._write_fingerprint()
        return True

    def end_steps(self) -> None:
        """Makes the step's state what it would be without graphs."""
        self.step.compiled.inside_whole_step = False
        # After an error inside an eager step the state is the step's own already.
        if not self._in_eager_step:
            self.static.give_back_cycle()

    # The three ways in which batches run.

    def _run_eagerly(self, kind: BatchKind, make_batches: MakeBatches) -> None:
        """One batch by the TrainStep itself, and whether its kind may be captured next time."""
        self.static.give_back_cycle()

        # Decide before the step whether this run counts, and whether it is the last eager one.
        can_capture = self.graphs.usable and not self.refusal_reason and not self._has_step_hooks
        if can_capture and kind.shape_key is UNCAPTURABLE:
            can_capture = self.graphs.has_capacity(MAX_GRAPHS)  # False, and warns once
        counts = self.step.ready_for_capture and can_capture
        is_last = counts and self._eager_runs.get(kind, 0) + 1 == self._eager_runs_needed()

        self._in_eager_step = True
        with record_host_syncs(self.step.net, self.graphs.device, on=is_last) as host_syncs:
            record = self.step(*next(make_batches(1)))
        self._in_eager_step = False

        self.records.write_record(record)
        if self.writes_fingerprints:
            self.records.write_fingerprint(record.fingerprint)
        self.static.take_over_cycle()
        self._host_syncs = "\n  ".join(dict.fromkeys(map(str, host_syncs)))
        self._count_eager_run(kind, counts)

    def _flush_eagerly(self, kind: FlushKind, *, into_last_row: bool) -> None:
        self.static.give_back_cycle()
        counts = self.step.ready_for_capture and into_last_row
        record = self.step.flush()
        assert record is not None
        if into_last_row:
            self.records.write_record(record, into_last_row=True)
        self.static.take_over_cycle()
        self._count_eager_run(kind, counts)

    def _replay(self, kind: Kind, graph: CapturedGraph, positions: list[CyclePosition]) -> None:
        """Launches a graph, and counts its steps on the host."""
        fault = graph.replay()
        self.replays += len(positions)
        self.static.grad_indices = self._grads_after.get(kind, frozenset())
        for position in positions:
            self.static.count_replay(last=position.last)
        # A compiled program is compared with the step itself at first: it may turn out wrong.
        if fault:
            self._refuse(str(fault))

    def _run_burst(self, shape_key: Hashable, make_batches: MakeBatches, same_shape: int) -> int:
        """Replays a graph of whole cycles. Returns the number of its steps, 0 if there is none.

        Between two launches of graphs the device has a gap, between kernels of one graph hardly.
        """
        cycle_steps = self.step.options.accumulate
        steps = same_shape // cycle_steps * cycle_steps
        if steps < MIN_BURST_STEPS or self.writes_fingerprints:
            return 0
        positions = cycle_positions(cycle_steps) * (steps // cycle_steps)
        kind = BurstKind(shape_key, steps)
        graph = self.graphs.get(kind)
        if graph is None and self._knows_cycle(shape_key, cycle_steps):
            graph = self._capture(kind, lambda: self._run_steps(make_batches, positions))
        if graph is None:
            return 0
        self._replay(kind, graph, positions)
        return steps

    # What graphs hold.

    def _run_steps(self, make_batches: MakeBatches, positions: list[CyclePosition]) -> None:
        """The steps of one graph, and their records."""
        batches = make_batches(len(positions))
        for position in positions:
            self._run_step(next(batches), position)

    def _run_step(self, batch: Args, position: CyclePosition) -> None:
        # In a cycle of one batch the update's own kernel can write the record.
        target = None
        if position.first and position.last and self.records.table.shape[1] > 0:
            target = self.records
        record, record_written = self.static.run_on_device(batch, position, target)
        if record_written:
            self.records.write_extras(record)
        else:
            self.records.write_record(record)

    def _run_flush(self) -> None:
        record, _ = self.static.run_on_device(None, CyclePosition(first=False, last=True))
        self.records.write_record(record, into_last_row=True)

    # When a kind is captured.

    def _find_or_capture(self, kind: Kind, body: Callable[[], None]) -> CapturedGraph | None:
        """The graph of a kind, captured now if it is time; None: it must run eagerly."""
        if self._has_step_hooks:
            return None
        graph = self.graphs.get(kind)
        if graph is None and self._may_capture(kind):
            graph = self._capture(kind, body)
        return graph

    def _may_capture(self, kind: Kind) -> bool:
        """Whether a kind has run eagerly often enough, and graphs are possible."""
        if self._has_step_hooks or not self.graphs.usable or self.graphs.is_full:
            return False
        return self._eager_runs.get(kind, 0) >= self._eager_runs_needed()

    def _eager_runs_needed(self) -> int:
        """Eager runs of a kind before its capture."""
        if self._compiles:
            return BATCHES_BEFORE_COMPILE  # a program takes long to compile: it must be worth it
        if self.step.compiled.on:
            return 2  # the second one compiles forward and loss
        return 1

    def _count_eager_run(self, kind: Kind, counts: bool) -> None:
        """Notes an eager run, if the device could have decided it and one more kind fits."""
        if not counts or not self.graphs.usable or self.refusal_reason:
            return
        if kind in self._eager_runs or self.graphs.has_capacity(len(self._eager_runs)):
            self._eager_runs[kind] = self._eager_runs.get(kind, 0) + 1

    def _knows_cycle(self, shape_key: Hashable, cycle_steps: int) -> bool:
        """Whether every position of a cycle of such batches has run eagerly often enough."""
        known_positions = set()
        for kind in self._eager_runs:
            if not isinstance(kind, BatchKind) or kind.shape_key != shape_key:
                continue
            if self._may_capture(kind):
                known_positions.add(CyclePosition(kind.first, kind.last))
        return known_positions.issuperset(cycle_positions(cycle_steps))

    def _capture(self, kind: Kind, body: Callable[[], None]) -> CapturedGraph | None:
        """Records what `body` launches. None where that did not work: the batch runs eagerly."""
        step = self.step
        guards_before = step_guards(step)
        python_state = PythonState(*step.objective.parts)
        grads_before = self.static.grad_indices
        self.static.allocate()

        graph = None
        reason = ""
        cause = None
        try:
            with self._container_tensors.during_capture():
                graph = self.graphs.capture(kind, body)
            self._guards = step_guards(step)
            self._grads_after[kind] = self.static.grad_indices
        except MissingOptimizerState:
            pass  # no update has moved this parameter yet: the host decides once more
        except Exception as error:
            reason = str(locate_error(error, step.net))
            cause = error
        else:
            changes = python_state.changes()
            if changes or self._guards != guards_before:
                graph = None
                reason = unrepeatable_reason(changes)

        # A capture computes nothing. What the body has put into the network is not valid.
        self.static.grad_indices = grads_before
        if graph is None:
            python_state.restore()
        if reason:
            self._refuse(reason, cause)
        # The traceback holds this frame, and with it gradients that belong to the capture's stream.
        cause = None
        return graph

    # When graphs are dropped.

    def _drop_graphs(self) -> None:
        """Drops all graphs because they are stale. Says so when it happens often."""
        self.graphs.clear()
        self.recaptures += 1
        if self._compiles and self.recaptures == STALE_BEFORE_GIVING_UP:
            self._refuse(
                f"settings that it holds have changed {STALE_BEFORE_GIVING_UP} times, "
                f"each for a new program. {LR_ADVICE}"
            )
        elif self.recaptures == STALE_BEFORE_WARNING:
            message = (
                "sink: settings that graphs bake in have changed "
                f"{STALE_BEFORE_WARNING} times, and each change costs a capture. {LR_ADVICE}"
            )
            warnings.warn(message, Notice, stacklevel=2)

    def _refuse(self, reason: str, cause: BaseException | None = None) -> None:
        """Captures nothing any more: raises, or warns that all steps run eagerly from now on."""
        self.graphs.clear()
        self._eager_runs.clear()
        self.refusal_reason = reason
        self._host_syncs = ""
        self.step.compiled.inside_whole_step = False
        raise_or_warn(reason, "parts" if self._compiles else self.on_uncapturable, cause)

    def _write_fingerprint(self) -> None:
        """The state's fingerprint into the newest row, at the steps that ask for one."""
        every_steps = self.step.options.fingerprint_every
        if every_steps and self.step.state.steps % every_steps == 0:
            self.static.give_back_cycle()
            self.records.write_fingerprint(self.step.state_fingerprint())


def cycle_positions(cycle_steps: int) -> list[CyclePosition]:
    """The positions of the batches of one update cycle."""
    last = cycle_steps - 1
    return [CyclePosition(first=i == 0, last=i == last) for i in range(cycle_steps)]
