"""The device form of an update as one CUDA graph: forty small launches become one.

Small networks spend more time launching the bookkeeping of an update than computing it. This serves
a hand-written loop over TrainStep on CUDA; `fit` and `hs.sink` capture the whole step. The same
kernels with the same bits. Switched off by decide="host".

Gradients are copied into the graph's inputs; everything else it touches stays where it is. A graph
is replayed only while every address and every setting baked into it still holds. Otherwise the
update runs eagerly, and is captured again once it is the same three times in a row.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.cuda_graphs.capture import CaptureStream, capture_into
from halfstep.step.optimizer import capturable_optimizer, state_tensors
from halfstep.step.state import StepState, UpdateResult
from halfstep.step.update import Update

MAX_GRAD_BYTES = 256 << 20  # larger networks are not bound by launches, and copies cost memory
REPEATS_BEFORE_CAPTURE = 3  # updates in a row with the same key
MAX_CAPTURES = 16  # what changes more often than that is left to run eagerly
RESULTS_PER_ALLOCATION = 64
PACKING_BYTES = 8  # results are aligned to their widest dtype


class CapturedUpdate(NamedTuple):
    """A graph, the tensors that it reads gradients from, and the result that it leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: list[list[Tensor]]  # by dtype
    packed_result: Tensor  # bytes
    result: UpdateResult


class UpdateGraph:
    """Runs `update.on_device`, from a graph where one fits."""

    def __init__(self, update: Update) -> None:
        self.update = update
        self.captures = 0
        self._graphs: dict[Any, CapturedUpdate] = {}
        self._last_key: Any = None
        self._repeats = 0  # updates in a row with that key
        self._free_results: dict[Any, Iterator[tuple[Tensor, UpdateResult]]] = {}  # by dtypes
        self._is_usable = update.device.type == "cuda"
        self._stream: CaptureStream | None = None

    def __call__(self, state: StepState, grad_indices: list[int]) -> UpdateResult:
        optimizer = self.update.commit.optimizer
        # A replay would run no hook.
        has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if not self._is_usable or has_hooks or torch.cuda.is_current_stream_capturing():
            return self.update.on_device(state, grad_indices)

        key = self._guards(state, grad_indices)
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._capture_if_stable(key, state, grad_indices)
        if captured is None:
            return self.update.on_device(state, grad_indices)
        return self._replay(captured, state)

    def _capture_if_stable(
        self, key: Any, state: StepState, grad_indices: list[int]
    ) -> CapturedUpdate | None:
        """A new graph once the same key has come three times in a row."""
        self._repeats = self._repeats + 1 if key == self._last_key else 1
        self._last_key = key
        grad_bytes = sum(grad.nbytes for grad in state.cycle.grads if grad is not None)
        is_stable = self._repeats >= REPEATS_BEFORE_CAPTURE
        if not is_stable or self.captures >= MAX_CAPTURES or grad_bytes > MAX_GRAD_BYTES:
            return None
        try:
            captured = self._capture(state, grad_indices)
        except RuntimeError:  # it cannot be captured: the eager update does the same
            self._is_usable = False
            return None
        self._graphs[key] = captured
        self.captures += 1
        return captured

    def _capture(self, state: StepState, grad_indices: list[int]) -> CapturedUpdate:
        graph = torch.cuda.CUDAGraph()
        cycle = state.cycle
        grads_before = cycle.grads
        weight_before = cycle.weight
        loss_before = cycle.loss

        # Inputs of the graph's own, in place of this cycle's tensors.
        cycle.grads = [None if grad is None else torch.empty_like(grad) for grad in cycle.grads]
        if cycle.weight is not None:
            cycle.weight = torch.empty_like(cycle.weight)
        if cycle.loss is not None:
            cycle.loss = torch.empty_like(cycle.loss)
        inputs = _inputs_by_dtype(state)
        if self._stream is None:
            self._stream = CaptureStream(self.update.device)
        try:
            commit = self.update.commit
            may_capture = capturable_optimizer(commit.optimizer, commit.optimizer_kind)
            with may_capture, capture_into(graph, self._stream):
                result = self.update.on_device(state, grad_indices)
                packed = torch.cat([t.reshape(-1).view(torch.uint8) for t in result.tensors()])
        except BaseException:
            self._graphs.clear()  # with the one that failed, torch may free what they use
            self._stream = None
            raise
        finally:
            cycle.grads = grads_before
            cycle.weight = weight_before
            cycle.loss = loss_before
        return CapturedUpdate(graph, inputs, packed, result)

    def _replay(self, captured: CapturedUpdate, state: StepState) -> UpdateResult:
        for static_inputs, cycle_tensors in zip(
            captured.inputs, _inputs_by_dtype(state), strict=True
        ):
            torch._foreach_copy_(static_inputs, cycle_tensors)
        captured.graph.replay()

        # The next replay overwrites the graph's own result: copy it out.
        dtypes = tuple(t.dtype for t in captured.result.tensors())
        free = next(self._free_results.get(dtypes, iter(())), None)
        if free is None:
            self._free_results[dtypes] = _allocate_results(captured.result)
            free = next(self._free_results[dtypes])
        packed, result = free
        packed.copy_(captured.packed_result)
        return result

    def _guards(self, state: StepState, grad_indices: list[int]) -> Any:
        """Everything a graph bakes in: addresses, the cycle's form, the optimizer's settings."""
        cycle = state.cycle
        commit = self.update.commit
        settings = []
        lr_tensors = []
        for group in commit.optimizer.param_groups:
            settings += [v for v in group.values() if isinstance(v, (int, float, str, tuple))]
            if isinstance(group["lr"], Tensor):
                lr_tensors.append(group["lr"])
        tensors = [
            *state.tensors(),
            *lr_tensors,
            *self.update.params,
            *state_tensors(commit.optimizer),
            *cycle.buffers,
            *commit.buffers.tensors(),
        ]
        loss_dtype = None if cycle.loss is None else cycle.loss.dtype
        addresses = [t.data_ptr() for t in tensors]
        return (cycle.weight is None, loss_dtype, *grad_indices, *settings, *addresses)


def _inputs_by_dtype(state: StepState) -> list[list[Tensor]]:
    """What changes from update to update, by dtype, so that each copy is one kernel."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in (*state.cycle.grads, state.cycle.weight, state.cycle.loss):
        if tensor is not None:
            groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _allocate_results(like: UpdateResult) -> Iterator[tuple[Tensor, UpdateResult]]:
    """Memory for the results of the next updates, each as bytes and as an UpdateResult.

    One allocation, cut once, instead of six views for each update.
    """
    tensors = like.tensors()
    result_bytes = sum(t.nbytes for t in tensors)
    row_bytes = -(-result_bytes // PACKING_BYTES) * PACKING_BYTES
    memory = torch.empty(
        RESULTS_PER_ALLOCATION, row_bytes, dtype=torch.uint8, device=like.lr.device
    )
    columns = []
    start = 0
    for t in tensors:
        column = memory[:, start : start + t.nbytes].view(t.dtype)
        if not t.dim():
            column = column.squeeze(1)
        columns.append(column.unbind(0))
        start += t.nbytes
    for row, *values in zip(memory.unbind(0), *columns, strict=True):
        yield row[:result_bytes], UpdateResult(*values)
