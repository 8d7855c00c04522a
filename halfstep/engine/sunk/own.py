"""A step function of the user's own as a program: captured as it is, its results kept row by row."""

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from halfstep.engine.feed import Args
from halfstep.engine.sunk import blame
from halfstep.engine.sunk.graph import Captured, Graphs
from halfstep.engine.sunk.program import OnUncapturable, refusal
from halfstep.engine.sunk.ring import Ring
from halfstep.step import Record

WARM = 3  # calls before a capture: optimizer state, autotuned kernels and gradients exist after them


class OwnProgram:
    """Calls `step(*batch)`, then replays it. Its results, tensors of one number each, are the columns of the rows."""

    def __init__(self, step: Callable[..., Any], ring: Ring, graphs: Graphs, on_uncapturable: OnUncapturable) -> None:
        self.step, self.ring, self.graphs, self.on_uncapturable = step, ring, graphs, on_uncapturable
        self.names: tuple[str, ...] = ()
        self.why = ""
        self._seen: dict[Hashable, int] = {}

    def begin(self) -> None: ...

    def settle(self) -> None: ...

    def flush(self) -> bool:
        """The tail, where the step has a notion of it."""
        flush = getattr(self.step, "flush", None)
        return bool(flush and flush())

    def run(self, key: Hashable, batch: Callable[[], Args], alike: int = 1) -> int:
        captured = self.graphs.get(key)
        if captured is None and self._seen.get(key, 0) >= WARM and not self.why:
            captured = self._capture(key, batch)
        if captured is not None:
            captured.replay()
            return 1
        last = self._seen.get(key, 0) == WARM - 1 and self.graphs.usable and not self.why
        with blame.watched(None, self.graphs.device, on=last) as found:
            self._call(batch)
        if found:
            self._refuse("\n  ".join(dict.fromkeys(map(str, found))))
        self._seen[key] = self._seen.get(key, 0) + self.graphs.usable
        return 1

    def _call(self, batch: Callable[[], Args]) -> None:
        names, values = columns(self.step(*batch()))
        if self.names and names != self.names:
            raise ValueError(f"sink: expected the step to return {list(self.names)} every time, got {list(names)}")
        self.names = names
        self.ring.write(values)

    def _capture(self, key: Hashable, batch: Callable[[], Args]) -> Captured | None:
        try:
            return self.graphs.capture(key, lambda: self._call(batch))
        except Exception as error:
            self._refuse(str(blame.of(error, None)), error)
            return None

    def _refuse(self, reason: str, cause: BaseException | None = None) -> None:
        self.graphs.clear()
        self.why = reason
        refusal(reason, self.on_uncapturable, cause)


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
            came = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"sink: expected the step to return tensors of one number each (its loss, a dict of them), got {came} "
                f"for {name!r}; return for instance loss.detach()"
            )
    return tuple(named), list(named.values())
