"""Evaluation and prediction as graphs: one per shape, counters on the device, outputs through pinned memory."""

import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep.cuda_graphs.capture import rng_generation
from halfstep.cuda_graphs.capture__graph import GraphCache
from halfstep.cuda_graphs.guards import (
    ContainerTensors,
    addresses,
    module_attributes,
    module_guards,
    restore_attributes,
)
from halfstep.engine.captured import uncapturable as blame
from halfstep.engine.captured.inputs import ROWS, UNCAPTURABLE, Resident, Staged, resident_dataset
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.runner import HostThrottle
from halfstep.engine.evaluate import Labels, final_scores
from halfstep.engine.feed import Args, Feed
from halfstep.errors import Notice
from halfstep.metrics import Loss, Metrics
from halfstep.metrics.counters import logits_of
from halfstep.step import EvalStep


class Forward:
    """A function of a batch over one network without gradients, eager the first time and as a graph from then on."""

    def __init__(self, net: nn.Module, device: torch.device, *, direct: bool = False) -> None:
        self.net, self.device = net, device
        self.graphs, self.ring = GraphCache(device, direct=direct), RecordBuffer(ROWS, device)
        self.inputs: Resident | Staged | None = None
        self._seen: set[Hashable] = set()
        self._held: tuple[Any, ...] = ()
        self._filed = ContainerTensors(net)

    def start(self, feed: Feed, *baked: Any) -> Resident | Staged:
        """One pass from its start. `baked`: what graphs hold besides the network."""
        data = resident_dataset(feed, self.device)
        mine = self.inputs.data if isinstance(self.inputs, Resident) else None
        same = self.inputs is not None and (data and data.plan) is (mine and mine.plan)
        held = (*baked, rng_generation(self.device), *module_guards(self.net))
        if not same or held != self._held or (len(self.graphs) and self._filed.were_replaced):
            self.graphs.clear()
            self._seen.clear()
            self.inputs = (
                Staged(feed, self.ring) if data is None else Resident(feed, self.ring, data)
            )
        self._held = held
        assert self.inputs is not None
        self.inputs.feed = feed
        if isinstance(self.inputs, Resident) and data is not None:
            self.inputs.data = data
        feed.go_to_pass(0)
        self.inputs.start()
        return self.inputs

    def __call__(self, key: Hashable, body: Callable[[], Any]) -> Any:
        captured = self.graphs.get(key)
        if captured is None and key in self._seen and self.graphs.usable:
            captured = self._capture(key, body)
        if captured is None:
            if (
                self.graphs.usable
                and key is not UNCAPTURABLE
                and self.graphs.has_capacity(len(self._seen))
            ):
                self._seen.add(key)
            return body()
        captured.replay()
        return captured.result[0] if self.graphs.direct else captured.result

    def _capture(self, key: Hashable, body: Callable[[], Any]) -> Any:
        places = module_attributes(self.net)
        try:
            with self._filed.during_capture():
                return self.graphs.capture(key, body)
        except Exception as error:
            restore_attributes(places)
            self.graphs.clear()
            self.graphs.stop()
            said = f"evaluation cannot be captured as a CUDA graph:\n  {blame.locate_error(error, self.net)}\nIt runs eagerly."
            warnings.warn(said, Notice, stacklevel=3)
            return None


class Scores:
    """Mean loss and metrics over one pass: what engine.evaluate gives, in one graph launch per batch."""

    def __init__(
        self, cell: EvalStep, metrics: Metrics, labels: Labels, *, direct: bool = False
    ) -> None:
        self.cell, self.metrics, self.labels = cell, metrics, labels
        self.forward = Forward(cell.net, cell.device, direct=direct)
        self.mean, (self.inside, self.outside) = Loss().to(cell.device), metrics.split()

    def __call__(self, feed: Feed, stop: Callable[[], bool]) -> dict[str, float] | None:
        """None when `stop` cut it short."""
        self.mean.reset()
        self.metrics.reset()
        self.metrics.to(self.cell.device)
        loss, device = self.cell.objective.loss, self.cell.device
        inputs, pace = (
            self.forward.start(feed, self.cell.applied, *module_guards(loss), *self._counters()),
            HostThrottle(device),
        )
        while (key := inputs.next()) is not None:
            if stop():
                return None
            outputs, truth = self.forward(key, lambda: self._batch(inputs))
            if len(
                self.outside
            ):  # they may keep what they are given, and the next replay writes over it
                self.outside.update(
                    *tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (outputs, truth))
                )
            pace.tick()
        return final_scores(self.mean, self.metrics)

    def _counters(self) -> list[int]:
        counters = [
            v for m in self.inside.each.values() for v in vars(m).values() if isinstance(v, Tensor)
        ]
        return addresses([*counters, self.mean.total, self.mean.count])

    @torch.no_grad()
    def _batch(self, inputs: Resident | Staged) -> tuple[Any, Any]:
        args = inputs.batch()
        record = self.cell(*args)
        self.mean.update(record.loss, record.count)
        outputs, truth = logits_of(record.outputs), None
        if len(self.metrics):
            found = self.labels(args[0] if len(args) == 1 else args)
            truth = found.to(self.cell.device) if isinstance(found, Tensor) else found
            self.inside.update(outputs, truth, loss=record.loss, count=record.count)
        self.forward.ring.next_row.add_(1)
        return outputs, truth


class Outputs:
    """Predictions batch by batch on the host; one is copied while the next is computed."""

    def __init__(self, net: nn.Module, device: torch.device, *, direct: bool = False) -> None:
        self.forward = Forward(net, device, direct=direct)

    def __call__(self, feed: Feed, cell: Callable[[Args], Any], *baked: Any) -> Iterator[Any]:
        inputs, waiting = self.forward.start(feed, *baked), None
        while (key := inputs.next()) is not None:
            out = self.forward(key, lambda: self._batch(inputs, cell))
            landed = tree_map(_sent, out)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.forward.device))
            if waiting is not None:
                yield _arrived(*waiting)
            waiting = landed, event
        if waiting is not None:
            yield _arrived(*waiting)

    @torch.no_grad()
    def _batch(self, inputs: Resident | Staged, cell: Callable[[Args], Any]) -> Any:
        out = cell(inputs.batch())
        self.forward.ring.next_row.add_(1)
        return out


def _sent(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    landing = torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True)
    return landing.copy_(leaf, non_blocking=True)


def _arrived(landed: Any, event: torch.cuda.Event) -> Any:
    event.synchronize()
    return tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, landed
    )  # pageable, the user's own
