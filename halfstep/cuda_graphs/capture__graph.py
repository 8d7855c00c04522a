"""The device room: capture once, replay often. CUDA has graphs, a CPU a compiled program where that is asked for;
everything else runs the same code call by call."""

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from halfstep.cuda_graphs.capture import CaptureStream, capture_into
from halfstep.errors import Notice

MOST = 64  # graphs held at once, and kinds of batches that are looked at: whatever comes beyond runs eagerly
PROGRAMS, OFTEN = (
    6,
    20,
)  # compiled ones, each after so many batches: one takes as long as thousands of small steps


Compiles: TypeAlias = Callable[[Callable[[], Any]], Callable[[], object]]


@dataclass(frozen=True)
class CapturedGraph:
    """A graph and what its body returned: tensors that every replay fills anew."""

    replay: Callable[[], object]  # returns what turned out to be wrong with it, or nothing
    result: Any


class GraphCache:
    """Captured bodies by key. `captures` counts them; they share one pool of memory, as they never run at once."""

    def __init__(
        self, device: torch.device, *, direct: bool = False, compiles: Compiles | None = None
    ) -> None:
        self.device, self.captures = device, 0
        self.compile_body = compiles  # on a CPU: what makes a program of a body
        self.direct = (
            direct  # replay by calling the body again: what a graph would do, on any device
        )
        self._stopped = self._told = False
        self._held: dict[Hashable, CapturedGraph] = {}
        self._pool: Any = None
        self._lane: CaptureStream | None = None
        self._spoiled: list[
            torch.cuda.CUDAGraph
        ] = []  # captures that failed: torch would free memory of the others

    @property
    def usable(self) -> bool:
        return (
            self.direct or self.device.type == "cuda" or self.compile_body is not None
        ) and not self._stopped

    def has_capacity(self, kinds: int) -> bool:
        """Whether one more kind may be captured; where not, it is said once."""
        if kinds >= MOST and not self._told:
            self._told = True
            text = f"sink: batches in more than {MOST} kinds, or with values of unknown types, run eagerly"
            warnings.warn(text, Notice, stacklevel=3)
        return kinds < MOST

    @property
    def full(self) -> bool:
        return self.compile_body is not None and len(self._held) >= PROGRAMS

    def stop(self) -> None:
        """No more captures: what was tried cannot be captured."""
        self._stopped = True

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Hashable) -> CapturedGraph | None:
        return self._held.get(key)

    def clear(self) -> None:
        """What the graphs had baked in has changed. Their memory goes with them."""
        self._held.clear()
        self._spoiled.clear()
        self._pool = self._lane = None

    def capture(self, key: Hashable, body: Callable[[], Any]) -> CapturedGraph:
        """Records what `body` launches, without running it. Raises what it raised."""
        if self.direct:
            captured = _direct(body)
        elif self.compile_body is not None:
            captured = CapturedGraph(self.compile_body(body), None)
        else:
            graph = torch.cuda.CUDAGraph()
            if self._pool is None or self._lane is None:
                torch.cuda.empty_cache()  # what the eager steps used is not needed beside the graphs' own memory
                self._pool, self._lane = torch.cuda.graph_pool_handle(), CaptureStream(self.device)
            try:
                with capture_into(graph, self._lane, self._pool):
                    result = body()
            except BaseException:
                if self._held:
                    self._spoiled.append(graph)
                else:
                    self._pool = self._lane = (
                        None  # torch takes no pool again that no graph has any more
                    )
                raise
            captured = CapturedGraph(graph.replay, result)
        self.captures += 1
        self._held[key] = captured
        return captured


def _direct(body: Callable[[], Any]) -> CapturedGraph:
    box: list[Any] = [None]

    def replay() -> None:
        box[0] = body()

    return CapturedGraph(replay, box)
