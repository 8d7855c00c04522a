"""A training step as graphs: eager until everything stands still, then captured, then replayed."""

import warnings
from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeAlias

from halfstep.engine.feed import Args
from halfstep.engine.sunk import blame
from halfstep.engine.sunk.graph import Captured, Graphs
from halfstep.engine.sunk.ring import Ring
from halfstep.errors import Notice, UncapturableError
from halfstep.step import TrainStep
from halfstep.step.static import Static, Unsettled, addresses

OnUncapturable: TypeAlias = Literal["raise", "eager"]
Batch = Callable[[], Args]
_OFTEN = 8  # recaptures for changed settings before it is mentioned
POLISH = 5000  # replays after which a run is long enough to compile kernels for it (about 2 s, once per machine)
BURST = 8  # steps that a graph of several must hold at least


class Program:
    """Runs a TrainStep batch by batch; which way it ran changes nothing but the time it takes.

    A kind of batch (its shape, its place in the cycle) runs eagerly until its optimizer state exists and once more to
    see what it does, and as a graph from then on. A graph is dropped when something that it baked in has changed.
    """

    def __init__(self, step: TrainStep, ring: Ring, graphs: Graphs, on_uncapturable: OnUncapturable = "raise") -> None:
        self.step, self.ring, self.graphs, self.on_uncapturable = step, ring, graphs, on_uncapturable
        self.static = Static(step)
        self.recaptures, self.replays, self.why, self.polished = 0, 0, "", False
        self._seen: dict[Hashable, int] = {}
        self._update = step.update
        self._held: tuple[Any, ...] = ()

    def begin(self) -> None:
        """A visit begins: whatever happened since the last one, graphs must still be right."""
        self.static.adopt()
        if len(self.graphs) and addresses(self.step) != self._held:
            self._drop()
        if self._update is not self.step.update:  # another precision or schedule: it runs eagerly once more
            self._seen.clear()
            self._update = self.step.update
            self._update.quick = self.polished and not self.step.options.deterministic
        wish = self.step.options.polish
        if not self.polished and (wish is True or (wish == "auto" and self.replays >= POLISH)):
            self.polish()

    def polish(self) -> None:
        """The run is long: kernels are compiled for the update, and graphs hold many steps."""
        self.polished = self.ring.quick = True
        self.graphs.clear()
        self._seen.clear()  # once more eagerly: kernels are compiled outside of captures
        if not self.step.options.deterministic:
            self.step.update.quick = True

    def run(self, key: Hashable, batch: Batch, alike: int = 1) -> int:
        """One batch, or `alike` ones of the same kind as one graph; their records in the ring. How many it was."""
        first, last = self.static.place
        kind = (key, first, last)
        if alike > 1 and self.polished and self._known(kind):
            many = self._burst(key, batch, alike)
            if many:
                return many
        captured = self.graphs.get(kind)
        if captured is None and self._known(kind):
            captured = self._capture(kind, lambda: self._body(batch(), first, last))
        if captured is None:
            self._eager(kind, batch)
        else:
            captured.replay()
            self.replays += 1
            self.static.ran(last=last)
            self._fingerprint()
        return 1

    def _burst(self, key: Hashable, batch: Batch, alike: int) -> int:
        """Whole cycles, as many as a graph may hold: launches have gaps between them, kernels of one graph hardly."""
        cycle = self.step.options.accumulate
        many = alike // cycle * cycle
        if self.static.micro or many < 2 or many < BURST or self.step.options.fingerprint_every:
            return 0
        places = [(i % cycle == 0, i % cycle == cycle - 1) for i in range(many)]
        if not all(self._known((key, *place)) for place in places):
            return 0
        captured = self.graphs.get((key, many))
        if captured is None:
            captured = self._capture((key, many), lambda: self._bodies(batch, places))
        if captured is None:
            return 0
        captured.replay()
        self.replays += many
        for _, last in places:
            self.static.ran(last=last)
        return many

    def flush(self) -> bool:
        """Ends an open cycle; whether there was one."""
        if not self.static.micro:
            return False
        captured = self.graphs.get("flush")
        if captured is None and self._known("flush"):
            captured = self._capture("flush", self._tail)
        if captured is None:
            self.static.settle()
            ready, record = self.step.ready, self.step.flush()
            assert record is not None
            self.ring.record(record, tail=True)
            self.static.adopt()
            self._saw("flush", ready)
        else:
            captured.replay()
            self.static.ran(last=True, steps=0)
        self._fingerprint()
        return True

    def settle(self) -> None:
        """A visit ends: the step's state is as it would be without graphs."""
        self.static.settle()

    def _body(self, batch: Args, first: bool, last: bool) -> None:
        self.ring.record(self.static.body(batch, first=first, last=last))

    def _bodies(self, batch: Batch, places: list[tuple[bool, bool]]) -> None:
        for first, last in places:
            self._body(batch(), first, last)

    def _tail(self) -> None:
        self.ring.record(self.static.body(None, first=False, last=True), tail=True)

    def _eager(self, kind: Hashable, batch: Batch) -> None:
        self.static.settle()
        ready = self.step.ready and self.graphs.usable and not self.why
        last = ready and self._seen.get(kind, 0) + 1 == self._needed
        with blame.watched(self.step.net, self.graphs.device, on=last) as found:
            record = self.step(*batch())
        self.ring.record(record)
        if self.step.options.fingerprint_every:
            self.ring.note(record.fingerprint)
        self.static.adopt()
        if found:
            self._refuse("\n  ".join(dict.fromkeys(map(str, found))))
        self._saw(kind, ready)

    def _saw(self, kind: Hashable, ready: bool) -> None:
        """It may be captured next time, if the device could decide this time already."""
        if ready and self.graphs.usable and not self.why:
            self._seen[kind] = self._seen.get(kind, 0) + 1

    def _known(self, kind: Hashable) -> bool:
        return self._seen.get(kind, 0) >= self._needed

    @property
    def _needed(self) -> int:
        """Eager runs of a kind before its capture: where it is compiled, that happens in the second."""
        return 2 if self.step.compiled.on else 1

    def _capture(self, kind: Hashable, body: Callable[[], Any]) -> Captured | None:
        before = addresses(self.step)
        self.static.prepare()
        try:
            captured = self.graphs.capture(kind, body)
        except Unsettled:  # a parameter that no update has moved yet: once more by the host
            return None
        except Exception as error:
            self._refuse(str(blame.of(error, self.step.net)), error)
            return None
        self._held = addresses(self.step)
        if self._held != before:
            self._refuse("the step replaces a buffer, a parameter or a mode of its network; write in place: b.copy_(…)")
            return None
        return captured

    def _refuse(self, reason: str, cause: BaseException | None = None) -> None:
        self.graphs.clear()
        self._seen.clear()
        self.why = reason
        refusal(reason, self.on_uncapturable, cause)

    def _drop(self) -> None:
        """Addresses, modes or settings are not those of the graphs any more."""
        self.graphs.clear()
        self.recaptures += 1
        if self.recaptures == _OFTEN:
            warnings.warn(
                f"sink: settings that graphs bake in have changed {_OFTEN} times, and each change costs a capture. A "
                "learning rate that moves goes into schedule= (or lr=), which costs none.", Notice, stacklevel=2,
            )  # fmt: skip

    def _fingerprint(self) -> None:
        every = self.step.options.fingerprint_every
        if every and self.step.state.steps % every == 0:
            self.static.settle()
            self.ring.note(self.step.print())


def refusal(reason: str, policy: OnUncapturable, cause: BaseException | None = None) -> None:
    """Raises, or says that the step runs launch by launch."""
    said = f"this step cannot be captured as a CUDA graph:\n  {reason}"
    if policy == "raise":
        advice = "Keep values on the device, or give on_uncapturable='eager'."
        raise UncapturableError(f"{said}\n{advice}") from cause
    warnings.warn(f"{said}\nIt runs eagerly, launch by launch.", Notice, stacklevel=3)
