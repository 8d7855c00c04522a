"""The device half of an update as one CUDA graph: forty small launches become one, with the same kernels inside.

Small networks spend more time launching the bookkeeping of an update than computing it. Gradients are copied into the
graph's inputs; everything else it touches stays where it is. A graph is replayed only while every address and every
hyper-parameter baked into it still holds; otherwise the update runs eagerly, and is captured when things settle.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.cuda_graphs.capture import CaptureStream, capture_into
from halfstep.step.optimizer import state_tensors
from halfstep.step.state import StepState
from halfstep.step.state__record import UpdateResult
from halfstep.step.update import Update

LIMIT_BYTES = (
    256 << 20
)  # of gradients: larger networks are not bound by launches, and the copy would cost memory
SETTLED = 3  # updates in a row with the same key before a capture
MOST = 16  # captures in all: whatever changes more often than that is left to run eagerly
ROWS = 64  # outcomes per allocation


class CapturedUpdate(NamedTuple):
    """A graph, the tensors it reads gradients from (by dtype), and the outcome it leaves, packed into bytes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[list[Tensor]]
    packed: Tensor
    like: UpdateResult


class UpdateGraph:
    """Runs `update.on_device`, replayed from a graph where one fits."""

    def __init__(self, update: Update) -> None:
        self.update, self.captures = update, 0
        self._graphs: dict[Any, CapturedUpdate] = {}
        self._seen: tuple[Any, int] = (None, 0)
        self._rows: dict[
            Any, Iterator[tuple[Tensor, UpdateResult]]
        ] = {}  # by the dtypes that a row holds
        self._usable = update.device.type == "cuda"
        self._lane: CaptureStream | None = None

    def __call__(self, state: StepState, live: list[int]) -> UpdateResult:
        optimizer = self.update.commit.optimizer
        hooked = (
            optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        )  # a replay runs no hook
        if not self._usable or hooked or torch.cuda.is_current_stream_capturing():
            return self.update.on_device(state, live)
        key = self._key(state, live)
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._capture_if_stable(key, state, live)
        return (
            self.update.on_device(state, live)
            if captured is None
            else self._replay(captured, state)
        )

    def _capture_if_stable(
        self, key: Any, state: StepState, live: list[int]
    ) -> CapturedUpdate | None:
        """A new graph once the same key has come three times running."""
        self._seen = (key, self._seen[1] + 1 if self._seen[0] == key else 1)
        large = sum(g.nbytes for g in state.cycle.grads if g is not None) > LIMIT_BYTES
        if self._seen[1] < SETTLED or self.captures >= MOST or large:
            return None
        try:
            captured = self._graphs[key] = self._capture(state, live)
        except (
            RuntimeError
        ):  # an operation that cannot be captured: the eager update does the same, launch by launch
            self._usable = False
            return None
        self.captures += 1
        return captured

    def _capture(self, state: StepState, live: list[int]) -> CapturedUpdate:
        graph, cycle = torch.cuda.CUDAGraph(), state.cycle
        before = cycle.grads, cycle.weight, cycle.loss
        cycle.grads = [None if g is None else torch.empty_like(g) for g in cycle.grads]
        cycle.weight = None if cycle.weight is None else torch.empty_like(cycle.weight)
        cycle.loss = None if cycle.loss is None else torch.empty_like(cycle.loss)
        inputs, self._lane = _inputs(state), self._lane or CaptureStream(self.update.device)
        try:
            with capturable_optimizer(self.update), capture_into(graph, self._lane):
                outcome = self.update.on_device(state, live)
                packed = torch.cat([t.reshape(-1).view(torch.uint8) for t in outcome])
        except BaseException:
            self._graphs.clear()  # with the one that failed, torch may free what they use
            self._lane = None
            raise
        finally:
            cycle.grads, cycle.weight, cycle.loss = before
        return CapturedUpdate(graph, inputs, packed, outcome)

    def _replay(self, captured: CapturedUpdate, state: StepState) -> UpdateResult:
        for static, now in zip(captured.inputs, _inputs(state), strict=True):
            torch._foreach_copy_(static, now)
        captured.graph.replay()
        layout = tuple(t.dtype for t in captured.like)
        row = next(self._rows.get(layout, iter(())), None)
        if row is None:
            self._rows[layout] = _rows(captured.like)
            row = next(self._rows[layout])
        row[0].copy_(captured.packed)  # the graph will overwrite its own
        return row[1]

    def _key(self, state: StepState, live: list[int]) -> Any:
        """Everything a graph bakes in: addresses, the shape of the cycle, and the optimizer's plain settings."""
        cycle, commit = state.cycle, self.update.commit
        groups = commit.optimizer.param_groups
        settings = [
            v for g in groups for v in g.values() if isinstance(v, (int, float, str, tuple))
        ]
        rates = [g["lr"] for g in groups if isinstance(g["lr"], Tensor)]
        own = (
            state.updates,
            state.skips,
            state.streak,
            state.scale,
            state.growth,
            state.halted,
            state.bad,
        )
        beside = (*state.ema, *state.residue, *cycle.buffers, *commit.buffers.tensors())
        held = (*own, *rates, *self.update.params, *state_tensors(commit.optimizer), *beside)
        loss = None if cycle.loss is None else cycle.loss.dtype
        return (cycle.weight is None, loss, *live, *settings, *[t.data_ptr() for t in held])


def _inputs(state: StepState) -> list[list[Tensor]]:
    """What changes from update to update, by dtype, so that each copy is one kernel."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for t in (*state.cycle.grads, state.cycle.weight, state.cycle.loss):
        if t is not None:
            groups.setdefault(t.dtype, []).append(t)
    return list(groups.values())


def _rows(like: UpdateResult) -> Iterator[tuple[Tensor, UpdateResult]]:
    """Room for the outcomes of the next updates: one allocation, cut once, instead of six views for each."""
    size = sum(t.nbytes for t in like)
    rows = torch.empty(ROWS, -(-size // 8) * 8, dtype=torch.uint8, device=like.lr.device)
    fields, start = [], 0
    for t in like:
        part = rows[:, start : start + t.nbytes].view(t.dtype)
        fields.append((part if t.dim() else part.squeeze(1)).unbind(0))
        start += t.nbytes
    return (
        (row[:size], UpdateResult(*each))
        for row, *each in zip(rows.unbind(0), *fields, strict=True)
    )


@contextmanager
def capturable_optimizer(update: Update) -> Iterator[None]:
    """Fused optimizers keep their counters on the device and can be captured; Adam asks for the flag all the same."""
    is_fused = update.commit.optimizer_kind == "fused"
    groups = [g for g in update.commit.optimizer.param_groups if is_fused and "capturable" in g]
    before = [g["capturable"] for g in groups]
    try:
        for g in groups:
            g["capturable"] = True
        yield
    finally:
        for g, flag in zip(groups, before, strict=True):
            g["capturable"] = flag
