"""Evaluation and prediction from CUDA graphs, one graph for each shape of a batch.

What it buys: one launch a batch in place of one for each operation, which for small networks is
most of the time (docs/internals/speed.md). The same kernels with the same bits. Switched off by
`Model(capture=False)`; engine/evaluate.py then does the same batch by batch.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep.cuda_graphs.capture import CapturedGraph, GraphCache, rng_generation
from halfstep.cuda_graphs.guards import (
    ContainerTensors,
    addresses,
    module_guards,
)
from halfstep.data import Dataset
from halfstep.engine.captured.inputs import (
    RECORD_ROWS,
    UNCAPTURABLE,
    ResidentInputs,
    StagedInputs,
    resident_dataset,
)
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.runner import HostThrottle
from halfstep.engine.captured.uncapturable import locate_error, unrepeatable_reason
from halfstep.engine.evaluate import Labels, add_parts, final_scores, metric_arguments
from halfstep.engine.feed import Args, Feed
from halfstep.errors import Notice
from halfstep.metrics import Loss, Metrics
from halfstep.step import EvalStep
from halfstep.utils.python_state import PythonState


class CapturedForward:
    """Runs a function of a batch over one network, without gradients.

    The first batch of a kind runs eagerly. From the second on it is replayed from a graph.
    """

    def __init__(self, net: nn.Module, device: torch.device, *, direct: bool = False) -> None:
        self.net = net
        self.device = device
        self.graphs = GraphCache(device, direct=direct)
        self.record_buffer = RecordBuffer(RECORD_ROWS, device)  # only its count of batches is used
        self.inputs: ResidentInputs | StagedInputs | None = None
        self._seen_kinds: set[Hashable] = set()
        self._guards: tuple[Any, ...] = ()
        self._container_tensors = ContainerTensors(net)

    def start(self, feed: Feed, *extra_guards: Any) -> ResidentInputs | StagedInputs:
        """Begins a pass at its first batch. Graphs are dropped if they are stale.

        `extra_guards`: what graphs bake in beside the network.
        """
        dataset = resident_dataset(feed, self.device)
        guards = (*extra_guards, rng_generation(self.device), *module_guards(self.net))
        is_stale = guards != self._guards
        if len(self.graphs) and self._container_tensors.were_replaced:
            is_stale = True
        inputs = self.inputs

        # Graphs read their batches from these inputs: new inputs, new graphs.
        if inputs is None or is_stale or _plan(_resident_data(inputs)) is not _plan(dataset):
            self.graphs.clear()
            self._seen_kinds.clear()
            if dataset is None:
                inputs = StagedInputs(feed, self.record_buffer)
            else:
                inputs = ResidentInputs(feed, self.record_buffer, dataset)
            self.inputs = inputs
        self._guards = guards

        inputs.feed = feed
        if isinstance(inputs, ResidentInputs) and dataset is not None:
            inputs.data = dataset
        feed.go_to_pass(0)
        inputs.start()
        return inputs

    def __call__(self, kind: Hashable, body: Callable[[], Any]) -> Any:
        """What `body` returns for the current batch, which is of this kind."""
        captured = self.graphs.get(kind)
        if captured is None and kind in self._seen_kinds and self.graphs.usable:
            captured = self._capture(kind, body)
        if captured is not None:
            captured.replay()
            return captured.result

        # Eagerly; the next batch of this kind may be captured.
        is_capturable = self.graphs.usable and kind is not UNCAPTURABLE
        if is_capturable and self.graphs.has_capacity(len(self._seen_kinds)):
            self._seen_kinds.add(kind)
        return body()

    def count_batch(self) -> None:
        """Moves the device's count of batches, by which a graph finds its next one."""
        self.record_buffer.next_row.add_(1)

    def _capture(self, kind: Hashable, body: Callable[[], Any]) -> CapturedGraph | None:
        python_state = PythonState(self.net)
        reason = ""
        captured = None
        try:
            with self._container_tensors.during_capture():
                captured = self.graphs.capture(kind, body)
        except Exception as error:
            reason = str(locate_error(error, self.net))
        changes = python_state.changes()
        if not reason and not changes:
            return captured

        python_state.restore()
        self.graphs.clear()
        self.graphs.stop()
        message = (
            "evaluation cannot be captured as a CUDA graph:\n"
            f"  {reason or unrepeatable_reason(changes)}\n"
            "It runs eagerly."
        )
        warnings.warn(message, Notice, stacklevel=3)
        return None


class EvalRunner:
    """Mean loss and metrics over one pass, as engine.evaluate gives them, from graphs.

    The loss and halfstep's own metrics are counted inside the graph, others from its outputs.
    """

    def __init__(
        self,
        eval_step: EvalStep,
        metrics: Metrics,
        labels: Labels | None,
        *,
        direct: bool = False,
    ) -> None:
        self.eval_step = eval_step
        self.metrics = metrics
        self.labels = labels
        self.forward = CapturedForward(eval_step.net, eval_step.device, direct=direct)
        self.mean_loss = Loss().to(eval_step.device)
        self.mean_parts: dict[str, Loss] = {}  # of the loss, from the first batch on
        self._is_first_batch = True
        self.metrics_in_graph, self.metrics_outside = metrics.split()

    def __call__(self, feed: Feed, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """The scores; None when `stop` cut the pass short."""
        device = self.eval_step.device
        self.mean_loss.reset()
        for mean_part in self.mean_parts.values():
            mean_part.reset()
        self.metrics.reset()
        self.metrics.to(device)

        inputs = self.forward.start(
            feed,
            self.eval_step.applied,
            *module_guards(self.eval_step.objective.loss),
            *self._counter_addresses(),
        )
        run_batch = partial(self._run_batch, inputs)
        throttle = HostThrottle(device)
        batch_count = 0
        while (kind := inputs.next()) is not None:
            if stop():
                return None
            outputs, labels = self.forward(kind, run_batch)
            # Metrics may keep what they get, and the next replay overwrites the graph's tensors.
            if len(self.metrics_outside):
                self.metrics_outside.update(*_clone_tensors((outputs, labels)))
            batch_count += 1
            throttle.tick()
        return final_scores(self.mean_loss, self.metrics, batch_count, self.mean_parts)

    @torch.no_grad()
    def _run_batch(self, inputs: ResidentInputs | StagedInputs) -> tuple[Any, Any]:
        """Evaluates the current batch. Returns its outputs and labels."""
        args = inputs.batch()
        record = self.eval_step(*args)
        self.mean_loss.update(record.loss, record.count)
        add_parts(self.mean_parts, record, is_first=self._is_first_batch)
        self._is_first_batch = False
        outputs, labels = metric_arguments(record, args, self.labels, self.metrics)
        self.metrics_in_graph.update(outputs, labels, loss=record.loss, count=record.count)
        self.forward.count_batch()
        return outputs, labels

    def _counter_addresses(self) -> list[int]:
        """Where the graphs count: the loss and the metrics."""
        counters = [self.mean_loss.total, self.mean_loss.count]
        for metric in (*self.mean_parts.values(), *self.metrics_in_graph.by_name.values()):
            counters += [value for value in vars(metric).values() if isinstance(value, Tensor)]
        return addresses(counters)


class PredictRunner:
    """Predictions on the host, batch by batch. One is copied while the next is computed."""

    def __init__(self, net: nn.Module, device: torch.device, *, direct: bool = False) -> None:
        self.forward = CapturedForward(net, device, direct=direct)

    def __call__(
        self, feed: Feed, predict: Callable[[Args], Any], *extra_guards: Any
    ) -> Iterator[Any]:
        """The outputs of `predict` for each batch. `extra_guards`: what it reads beside the net."""
        inputs = self.forward.start(feed, *extra_guards)
        run_batch = partial(self._run_batch, inputs, predict)
        previous: _HostCopy | None = None
        while (kind := inputs.next()) is not None:
            copy = _HostCopy(self.forward(kind, run_batch), self.forward.device)
            if previous is not None:
                yield previous.wait()
            previous = copy
        if previous is not None:
            yield previous.wait()

    @torch.no_grad()
    def _run_batch(
        self, inputs: ResidentInputs | StagedInputs, predict: Callable[[Args], Any]
    ) -> Any:
        outputs = predict(inputs.batch())
        self.forward.count_batch()
        return outputs


class _HostCopy:
    """A copy of outputs in pinned memory, under way behind the work that is launched already."""

    def __init__(self, outputs: Any, device: torch.device) -> None:
        self._pinned = tree_map(_start_copy, outputs)
        self._copy_done = torch.cuda.Event()
        self._copy_done.record(torch.cuda.current_stream(device))

    def wait(self) -> Any:
        """The outputs once they have arrived, in ordinary memory: pinned memory is scarce."""
        self._copy_done.synchronize()
        return _clone_tensors(self._pinned)


def _start_copy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    pinned = torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True)
    return pinned.copy_(leaf, non_blocking=True)


def _clone_tensors(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def _resident_data(inputs: ResidentInputs | StagedInputs) -> Dataset | None:
    return inputs.data if isinstance(inputs, ResidentInputs) else None


def _plan(dataset: Dataset | None) -> Any:
    return None if dataset is None else dataset.plan
