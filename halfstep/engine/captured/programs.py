"""A training step as graphs: eager until everything stands still, then captured, then replayed."""

import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from halfstep.cuda_graphs.capture import MOST, OFTEN, CapturedGraph, GraphCache
from halfstep.cuda_graphs.guards import (
    ContainerTensors,
    has_step_hooks,
    module_attributes,
    restore_attributes,
)
from halfstep.engine.captured import uncapturable as blame
from halfstep.engine.captured.inputs import UNCAPTURABLE
from halfstep.engine.captured.record_buffer__ring import RecordBuffer
from halfstep.engine.captured.static_step import MissingOptimizerState, StaticStep, step_guards
from halfstep.engine.captured.uncapturable import OnUncapturable, raise_or_warn
from halfstep.engine.feed import Args
from halfstep.errors import Notice
from halfstep.step import TrainStep

Batches = Callable[
    [int], Iterator[Args]
]  # so many from the current one on, each made when it is asked for
Place = tuple[bool, bool]
_OFTEN, _TWICE = (
    8,
    2,
)  # recaptures for changed settings before it is mentioned; new programs before they are given up
POLISH = 5000  # replays after which a run is long enough to compile kernels for it (about 2 s, once per machine)
BURST = 8  # steps that a graph of several must hold at least


class StepProgram:
    """Runs a TrainStep batch by batch; which way it ran changes nothing but the time it takes.

    A kind of batch (its shape, its place in the cycle) runs eagerly until its optimizer state exists and once more to
    see what it does, and as a graph from then on. A graph is dropped when something that it baked in has changed.
    """

    def __init__(
        self,
        step: TrainStep,
        ring: RecordBuffer,
        graphs: GraphCache,
        on_uncapturable: OnUncapturable = "raise",
    ) -> None:
        self.step, self.ring, self.graphs, self.on_uncapturable = (
            step,
            ring,
            graphs,
            on_uncapturable,
        )
        self.static = StaticStep(step)
        self.recaptures, self.replays, self.why, self.polished = 0, 0, "", False
        self._seen: dict[Hashable, int] = {}
        self._lives: dict[
            Hashable, frozenset[int]
        ] = {}  # gradients that a cycle has after each graph
        self._made = (step.update, step.compiled.on)
        self._held: tuple[Any, ...] = ()
        self._filed = ContainerTensors(step.net, step.objective.loss)
        self._found = ""  # what the last eager step waited for
        self._inside = self._by_hand = False  # an eager step is under way; hooks want every step
        self._compiles = graphs.compile_body is not None

    def begin(self) -> None:
        """A visit begins: whatever happened since the last one, graphs must still be right."""
        step, self._inside, self._by_hand = self.step, False, has_step_hooks(self.step.optimizer)
        step.compiled.inside_whole_step = self._compiles and not self.why and step.compiled.on
        self.static.take_over_cycle()
        if len(self.graphs) and (step_guards(step) != self._held or self._filed.were_replaced):
            self._drop()
        if self._made != (
            step.update,
            step.compiled.on,
        ):  # another precision, schedule or program: eagerly once more
            self._seen.clear()
            self._made = (step.update, step.compiled.on)
            step.update.use_fused_kernels = self.polished and not step.options.deterministic
        wish = step.options.polish
        if not self.polished and (wish is True or (wish == "auto" and self.replays >= POLISH)):
            self.polish()

    def polish(self) -> None:
        """The run is long: kernels are compiled for the update, and graphs hold many steps."""
        if self._compiles:
            return
        self.polished = self.ring.use_kernels = True
        self.graphs.clear()
        self._seen.clear()  # once more eagerly: kernels are compiled outside of captures
        if not self.step.options.deterministic:
            self.step.update.use_fused_kernels = True

    def run(self, key: Hashable, batches: Batches, alike: int = 1) -> int:
        """One batch, or `alike` ones of the same kind as one graph; their records in the ring. How many it was."""
        if self._found:
            self._refuse(self._found)
        first, last = self.static.position
        kind = (key, first, last, frozenset() if first else self.static.live)
        if alike > 1 and self.polished and first and self._known(kind):
            many = self._burst(key, batches, alike)
            if many:
                return many
        captured = self.graphs.get(kind) if not self._by_hand else None
        if captured is None and self._known(kind):
            captured = self._capture(kind, lambda: self._bodies(batches, [(first, last)]))
        if captured is None:
            self._eager(kind, batches)
        else:
            self._replay(kind, captured, [(first, last)])
            self._fingerprint()
        return 1

    def flush(self, *, told: bool) -> bool:
        """Ends an open cycle; whether there was one. `told`: its outcome joins the newest row of the ring."""
        if not self.static.micro:
            return False
        kind = ("flush", self.static.live)
        captured = self.graphs.get(kind) if told and not self._by_hand else None
        if captured is None and told and self._known(kind):
            captured = self._capture(kind, self._tail)
        if captured is not None:
            captured.replay()
            self.static.count_replay(last=True, steps=0)
        else:
            self.static.give_back_cycle()
            ready, record = self.step.ready_for_capture, self.step.flush()
            assert record is not None
            if told:
                self.ring.record(record, tail=True)
            self.static.take_over_cycle()
            self._saw(kind, ready and told)
        if told:
            self._fingerprint()
        return True

    def settle(self) -> None:
        """A visit ends: the step's state is as it would be without graphs. After an error inside an eager step it is
        the step's own."""
        self.step.compiled.inside_whole_step = False
        if not self._inside:
            self.static.give_back_cycle()

    def _replay(self, kind: Hashable, captured: CapturedGraph, places: list[Place]) -> None:
        wrong = captured.replay()
        self.replays += len(places)
        self.static.live = self._lives.get(kind, frozenset())
        for _, last in places:
            self.static.count_replay(last=last)
        if wrong:
            self._refuse(str(wrong))

    def _burst(self, key: Hashable, batches: Batches, alike: int) -> int:
        """Whole cycles, as many as a graph may hold: launches have gaps between them, kernels of one graph hardly."""
        cycle = self.step.options.accumulate
        many = alike // cycle * cycle
        if many < BURST or self.step.options.fingerprint_every:
            return 0
        places = [(i % cycle == 0, i % cycle == cycle - 1) for i in range(many)]
        kind = (key, many)
        captured = self.graphs.get(kind)
        if captured is None and self._cycle_known(key, cycle):
            captured = self._capture(kind, lambda: self._bodies(batches, places))
        if captured is None:
            return 0
        self._replay(kind, captured, places)
        return many

    def _cycle_known(self, key: Hashable, cycle: int) -> bool:
        """Whether every place of a cycle of such batches has run eagerly, gradients missing or not."""
        seen = {
            kind[1:3]  # type: ignore[index]
            for kind in self._seen
            if len(kind) == 4 and kind[0] == key and self._known(kind)  # type: ignore[index, arg-type]
        }
        return {(i == 0, i == cycle - 1) for i in range(cycle)} <= seen

    def _bodies(self, batches: Batches, places: list[Place]) -> None:
        given = batches(len(places))
        for first, last in places:
            self._body(next(given), first, last)

    def _body(self, batch: Args, first: bool, last: bool) -> None:
        ring = self.ring
        can_write = first and last and ring.table.shape[1] > 0
        record, record_written = self.static.body(
            batch, first=first, last=last, record_target=ring if can_write else None
        )
        if not record_written:
            ring.record(record)

    def _tail(self) -> None:
        record, _ = self.static.body(None, first=False, last=True)
        self.ring.record(record, tail=True)

    def _eager(self, kind: Hashable, batches: Batches) -> None:
        self.static.give_back_cycle()
        able = self.graphs.usable and not self.why and not self._by_hand
        if able and kind[0] is UNCAPTURABLE:  # type: ignore[index]
            able = self.graphs.has_capacity(MOST)
        ready = self.step.ready_for_capture and able
        last = ready and self._seen.get(kind, 0) + 1 == self._needed
        self._inside = True
        with blame.record_host_syncs(self.step.net, self.graphs.device, on=last) as found:
            record = self.step(*next(batches(1)))
        self._inside = False
        self.ring.record(record)
        if self.step.options.fingerprint_every:
            self.ring.note(record.fingerprint)
        self.static.take_over_cycle()
        self._found = "\n  ".join(dict.fromkeys(map(str, found)))
        self._saw(kind, ready)

    def _saw(self, kind: Hashable, ready: bool) -> None:
        """It may be captured next time, if the device could decide this time already."""
        if (
            ready
            and self.graphs.usable
            and not self.why
            and (kind in self._seen or self.graphs.has_capacity(len(self._seen)))
        ):
            self._seen[kind] = self._seen.get(kind, 0) + 1

    def _known(self, kind: Hashable) -> bool:
        often = self._seen.get(kind, 0) >= self._needed and not self.graphs.full
        return often and not self._by_hand and self.graphs.usable

    @property
    def _needed(self) -> int:
        """Eager runs of a kind before its capture: where it is compiled, that happens in the second."""
        return OFTEN if self._compiles else 2 if self.step.compiled.on else 1

    def _capture(self, kind: Hashable, body: Callable[[], Any]) -> CapturedGraph | None:
        step, live = self.step, self.static.live
        before, places = step_guards(step), module_attributes(step.net, step.objective.loss)
        self.static.prepare()
        captured, failed = None, None
        try:
            with self._filed.during_capture():
                captured = self.graphs.capture(kind, body)
            self._held, self._lives[kind] = step_guards(step), self.static.live
        except (
            MissingOptimizerState
        ):  # a parameter that no update has moved yet: once more by the host
            pass
        except Exception as error:
            failed = error
        replaced = captured is not None and self._held != before
        self.static.live = live
        if captured is None or replaced:
            restore_attributes(places)  # what the body put there was never computed
        if failed is not None:
            self._refuse(str(blame.locate_error(failed, step.net)), failed)
            failed = None  # its traceback holds this frame, and the spoiled pass, whose gradients are of its stream
        if replaced:
            self._refuse(
                "the step replaces a tensor of its network, or counts in Python: write in place, b.copy_(…)"
            )
            return None
        return captured

    def _refuse(self, reason: str, cause: BaseException | None = None) -> None:
        self.graphs.clear()
        self._seen.clear()
        self.why, self._found, self.step.compiled.inside_whole_step = reason, "", False
        raise_or_warn(reason, "parts" if self._compiles else self.on_uncapturable, cause)

    def _drop(self) -> None:
        """Addresses, modes or settings are not those of the graphs any more."""
        self.graphs.clear()
        self.recaptures += 1
        advice = "A learning rate that moves goes into schedule= (or lr=), which costs none."
        if self._compiles and self.recaptures == _TWICE:
            self._refuse(
                f"settings that it holds have changed {_TWICE} times, each for a new program. {advice}"
            )
        elif self.recaptures == _OFTEN:
            text = f"sink: settings that graphs bake in have changed {_OFTEN} times, and each change costs a capture."
            warnings.warn(f"{text} {advice}", Notice, stacklevel=2)

    def _fingerprint(self) -> None:
        every = self.step.options.fingerprint_every
        if every and self.step.state.steps % every == 0:
            self.static.give_back_cycle()
            self.ring.note(self.step.state_fingerprint())
