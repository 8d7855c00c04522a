"""A step function of the user's own as a program: captured as it is, its results kept row by row."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from halfstep.cuda_graphs.capture import MOST, CapturedGraph, GraphCache, rng_generation
from halfstep.cuda_graphs.guards import (
    ContainerTensors,
    module_attributes,
    module_guards,
    optimizer_guards,
    restore_attributes,
)
from halfstep.engine.captured import uncapturable as blame
from halfstep.engine.captured.inputs import UNCAPTURABLE
from halfstep.engine.captured.record_buffer__ring import RecordBuffer
from halfstep.engine.captured.uncapturable import OnUncapturable, raise_or_warn
from halfstep.engine.feed import Args
from halfstep.step import Record

WARM = (
    3  # calls before a capture: optimizer state, autotuned kernels and gradients exist after them
)


class FunctionProgram:
    """Calls `step(*batch)`, then replays it. Its results, tensors of one number each, are the columns of the rows."""

    def __init__(
        self, step: Callable[..., Any], ring: RecordBuffer, graphs: GraphCache, on_uncapturable: OnUncapturable,
        state: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        self.step, self.ring, self.graphs, self.on_uncapturable = (
            step,
            ring,
            graphs,
            on_uncapturable,
        )
        self.state, self.names = tuple(state), tuple[str, ...]()
        self.why, self.replays, self._found = "", 0, ""
        self._seen: dict[Hashable, int] = {}
        self._held: tuple[Any, ...] = ()
        self._filed = ContainerTensors(*self.state)

    def begin(self) -> None:
        """A visit begins: what `state` names must still be what the graphs were captured with."""
        if len(self.graphs) and (self._baked() != self._held or self._filed.were_replaced):
            self.graphs.clear()

    def settle(self) -> None: ...

    def _baked(self) -> tuple[Any, ...]:
        parts = (
            optimizer_guards(s) if isinstance(s, Optimizer) else module_guards(s)
            for s in self.state
        )
        return (rng_generation(self.ring.device), *(each for part in parts for each in part))

    def flush(self, *, told: bool) -> bool:
        """The tail, where the step has a notion of it."""
        flush = getattr(self.step, "flush", None)
        return bool(flush and flush())

    def run(self, key: Hashable, batches: Callable[[int], Iterator[Args]], alike: int = 1) -> int:
        if self._found:
            self._refuse(self._found)
        captured, seen = self.graphs.get(key), self._seen.get(key, 0)
        able = (
            self.graphs.usable
            and not self.why
            and (key is not UNCAPTURABLE or self.graphs.has_capacity(MOST))
        )
        if captured is None and seen >= WARM and able:
            captured = self._capture(key, batches)
        if captured is not None:
            captured.replay()
            self.replays += 1
            return 1
        with blame.record_host_syncs(
            None, self.graphs.device, on=able and seen == WARM - 1
        ) as found:
            self._call(batches)
        self._found = "\n  ".join(dict.fromkeys(map(str, found)))
        if able and (key in self._seen or self.graphs.has_capacity(len(self._seen))):
            self._seen[key] = seen + 1
        return 1

    def _call(self, batches: Callable[[int], Iterator[Args]]) -> None:
        names, values = columns(self.step(*next(batches(1))))
        if self.names and names != self.names:
            raise ValueError(
                f"sink: expected the step to return {list(self.names)} every time, got {list(names)}"
            )
        self.names = names
        self.ring.write(values)

    def _capture(
        self, key: Hashable, batches: Callable[[int], Iterator[Args]]
    ) -> CapturedGraph | None:
        places = module_attributes(*self.state)
        try:
            with self._filed.during_capture():
                captured = self.graphs.capture(key, lambda: self._call(batches))
            self._held = self._baked()
            return captured
        except Exception as error:
            restore_attributes(places)
            self._refuse(str(blame.locate_error(error, None)), error)
            return None

    def _refuse(self, reason: str, cause: BaseException | None = None) -> None:
        self.graphs.clear()
        self.why, self._found = reason, ""
        raise_or_warn(reason, self.on_uncapturable, cause)


def columns(result: Any) -> tuple[tuple[str, ...], list[Tensor]]:
    """What a step returned, by name: a Record, a dict, its loss, or a tuple that starts with it."""
    if isinstance(result, Record):
        return Record._fields, list(result)
    if isinstance(result, dict):
        named = dict(result)
    elif isinstance(result, tuple) and result:
        named = {"loss": result[0], **{f"value{i}": v for i, v in enumerate(result[1:], 1)}}
    else:
        named = {"loss": result}
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.numel() != 1:
            came = (
                f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            )
            raise TypeError(
                f"sink: expected the step to return tensors of one number each (its loss, a dict of them), got {came} "
                f"for {name!r}; return for instance loss.detach()"
            )
    return tuple(named), list(named.values())
