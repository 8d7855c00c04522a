"""The device half of an update as one CUDA graph: forty small launches become one, with the same kernels inside.

Small networks spend more time launching the bookkeeping of an update than computing it. Gradients are copied into the
graph's inputs; everything else it touches stays where it is. A graph is used only while every address and every
hyper-parameter it was captured with still holds; otherwise the update runs eagerly, and is captured anew when things
have settled.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.step.optim import state_tensors
from halfstep.step.record import Outcome
from halfstep.step.state import StepState
from halfstep.step.update import Update

LIMIT_BYTES = 256 << 20  # of gradients: larger networks are not bound by launches, and the copy would cost memory
SETTLED = 3  # updates with the same key before a new capture
MOST = 8  # captures kept


class Captured(NamedTuple):
    """A graph, the tensors it reads gradients from, and the outcome it leaves, packed into bytes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[list[Tensor]]
    packed: Tensor
    like: Outcome


class Replay:
    """Runs `update.on_device`, replayed from a graph where one fits."""

    def __init__(self, update: Update) -> None:
        self.update, self.captures = update, 0
        self._graphs: dict[Any, Captured] = {}
        self._seen: tuple[Any, int] = (None, 0)
        self._usable = update.device.type == "cuda"

    def __call__(self, state: StepState, live: list[int]) -> Outcome:
        if not self._usable or torch.cuda.is_current_stream_capturing():
            return self.update.on_device(state, live)
        key = self._key(state, live)
        graph = self._graphs.get(key)
        if graph is None:
            self._seen = (key, self._seen[1] + 1 if self._seen[0] == key else 1)
            if self._seen[1] < SETTLED:
                return self.update.on_device(state, live)
            graph = self.capture(state, live)
        return self.update.on_device(state, live) if graph is None else self._replay(graph, state)

    def capture(self, state: StepState, live: list[int]) -> Captured | None:
        """A graph of this update, unless its gradients are large or something in it cannot be captured."""
        inputs = _by_dtype(_inputs(state))
        if not self._usable or sum(t.nbytes for group in inputs for t in group) > LIMIT_BYTES:
            self._usable = False
            return None
        static = [[torch.empty_like(t) for t in group] for group in inputs]
        try:
            captured = self._capture(state, live, inputs, static)
        except RuntimeError:  # an operation that cannot be captured: the eager update does the same, launch by launch
            self._usable = False
            return None
        self.captures += 1
        if len(self._graphs) >= MOST:
            self._graphs.pop(next(iter(self._graphs)))
        self._graphs[self._key(state, live)] = captured
        return captured

    def _capture(
        self, state: StepState, live: list[int], inputs: list[list[Tensor]], static: list[list[Tensor]]
    ) -> Captured:
        graph = torch.cuda.CUDAGraph()
        given = {
            id(t): s for group, statics in zip(inputs, static, strict=True) for t, s in zip(group, statics, strict=True)
        }
        cycle = state.cycle
        before = cycle.grads, cycle.weight, cycle.loss
        cycle.grads = [None if g is None else given[id(g)] for g in cycle.grads]
        cycle.weight = None if cycle.weight is None else given[id(cycle.weight)]
        cycle.loss = None if cycle.loss is None else given[id(cycle.loss)]
        try:
            with _allowed(self.update), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                outcome = self.update.on_device(state, live)
                packed = torch.cat([t.reshape(-1).view(torch.uint8) for t in outcome])
        finally:
            cycle.grads, cycle.weight, cycle.loss = before
        return Captured(graph, static, packed, outcome)

    def _replay(self, captured: Captured, state: StepState) -> Outcome:
        for statics, group in zip(captured.inputs, _by_dtype(_inputs(state)), strict=True):
            torch._foreach_copy_(statics, group)
        captured.graph.replay()
        return _unpack(captured.packed.clone(), captured.like)

    def _key(self, state: StepState, live: list[int]) -> Any:
        """Everything a graph has baked in: addresses, shapes of the cycle, and the optimizer's plain settings."""
        optimizer = self.update.commit.optimizer
        settings = [
            tuple((k, v) for k, v in g.items() if isinstance(v, (int, float, str, tuple)))
            for g in optimizer.param_groups
        ]
        own = (
            state.updates,
            state.skips,
            state.streak,
            state.scale,
            state.growth,
            state.halted,
            state.bad,
        )
        rates = [g["lr"] for g in optimizer.param_groups if isinstance(g["lr"], Tensor)]
        held = (
            *own,
            *rates,
            *self.update.params,
            *state_tensors(optimizer),
            *state.ema,
            *state.residue,
            *state.cycle.buffers,
        )
        buffers = self.update.commit.buffers.tensors()
        cycle = state.cycle.weight is None, state.cycle.loss is None
        return tuple(live), cycle, tuple(settings), tuple(t.data_ptr() for t in (*held, *buffers))


def _inputs(state: StepState) -> list[Tensor]:
    return [t for t in (*state.cycle.grads, state.cycle.weight, state.cycle.loss) if t is not None]


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault(t.dtype, []).append(t)
    return list(groups.values())


def _unpack(packed: Tensor, like: Outcome) -> Outcome:
    """The outcome's tensors as views of one fresh copy: the graph will overwrite its own."""
    parts = packed.split([t.nbytes for t in like])
    return Outcome(*(part.view(t.dtype).view(t.shape) for part, t in zip(parts, like, strict=True)))


@contextmanager
def _allowed(update: Update) -> Iterator[None]:
    """Fused optimizers keep their counters on the device and can be captured; Adam asks for the flag all the same."""
    groups = [g for g in update.commit.optimizer.param_groups if update.commit.kind == "fused" and "capturable" in g]
    before = [g["capturable"] for g in groups]
    try:
        for g in groups:
            g["capturable"] = True
        yield
    finally:
        for g, flag in zip(groups, before, strict=True):
            g["capturable"] = flag
