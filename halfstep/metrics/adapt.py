"""Turns what a user gives as a metric into one.

Accepted are the metrics of this package and of torchmetrics, any object with update, compute and
reset, and functions. torchmetrics is never imported: its metrics are known by their attributes.
"""

import inspect
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep.metrics.broadcasts import BroadcastCheck
from halfstep.metrics.counters import Accuracy, Average, Loss, logits_of
from halfstep.utils.saved_state import SavedValue

ACCEPTED = (
    "a metric of halfstep.metrics, one of torchmetrics, any object with update(outputs, labels), "
    "compute() and reset(), or a function (outputs, labels) -> tensor"
)


class Metric(Protocol):
    """What the library needs of a metric."""

    in_graph: bool  # whether update() may run inside a captured CUDA graph

    def update(self, outputs: Any, labels: Any, /) -> None: ...
    def compute(self) -> Any: ...
    def reset(self) -> None: ...
    def merge(self, other: Any) -> None: ...
    def to(self, device: torch.device | str) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, saved: dict[str, Any]) -> None: ...


def as_metric(given: Any) -> Metric:
    """`given` as a metric. A function becomes the mean of its values, weighted by their count."""
    if isinstance(given, Accuracy | Loss | Average | AdaptedMetric):
        return given
    if isinstance(given, type):
        raise TypeError(
            f"metric: expected an instance, received the class {given.__name__}; "
            f"write {given.__name__}()"
        )
    if isinstance(given, nn.ModuleDict):
        raise TypeError(
            f"metric: a {type(given).__name__} holds several metrics; "
            "give them by name: {**collection}"
        )
    if all(callable(getattr(given, name, None)) for name in ("update", "compute", "reset")):
        _check_takes_labels(given)
        return AdaptedMetric(given)
    if callable(given):
        return Average(given)
    raise TypeError(f"metric: received {type(given).__name__} {given!r}. Accepted: {ACCEPTED}")


def _check_takes_labels(metric: Any) -> None:
    """Refuses metrics that aggregate values, such as torchmetrics' MeanMetric.

    Their update takes values and weights, and labels would silently become weights.
    """
    try:
        names = list(inspect.signature(metric.update).parameters)
    except (TypeError, ValueError):
        return
    if names[:1] == ["value"]:
        raise TypeError(
            f"metric: {type(metric).__name__}.update({', '.join(names)}) aggregates values, and a "
            "metric gets outputs and labels; give a function (outputs, labels) -> tensor, whose "
            "values are averaged, or hs.metrics.Loss() for the mean loss"
        )


class AdaptedMetric:
    """A metric of another library, or of the user, with the methods of `Metric`.

    It is updated outside any graph, with outputs that are detached from autograd.
    """

    in_graph = False

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self._check_broadcasts = BroadcastCheck()

    @torch.no_grad()
    def update(self, outputs: Any, labels: Any) -> None:
        """Passes one batch on, detached: a metric that keeps its inputs must not keep the graph."""
        scores, labels = tree_map(_detach, (logits_of(outputs), labels))
        self._check_broadcasts(self.metric.update, scores, labels)

    def compute(self) -> Any:
        """The metric's own value, of what this process has seen.

        Every rank evaluates all of the data: torchmetrics would add up its states over the ranks.
        """
        if hasattr(self.metric, "sync_on_compute"):
            self.metric.sync_on_compute = False
        return self.metric.compute()

    def reset(self) -> None:
        """Resets the metric by its own reset()."""
        self.metric.reset()

    def to(self, device: torch.device | str) -> Self:
        """Moves the metric if it can be moved."""
        if callable(getattr(self.metric, "to", None)):
            self.metric.to(device)
        return self

    def merge(self, other: Any) -> None:
        """Adds what another metric of the same class has seen, by merge_state() or merge()."""
        metric = self.metric
        other_metric = other.metric if isinstance(other, AdaptedMetric) else other
        if type(other_metric) is not type(metric):
            raise ValueError(
                f"merge: expected another {type(metric).__name__}, received {other_metric!r}"
            )
        if self._is_torchmetrics("merged"):
            metric.merge_state(other_metric)
            metric._update_count += other_metric._update_count
            metric._computed = None  # else compute() returns its value from before the merge
        elif hasattr(metric, "merge"):
            metric.merge(other_metric)
        else:
            raise TypeError(
                f"merge: {type(metric).__name__} has neither merge_state(other) nor merge(other)"
            )

    def state_dict(self) -> dict[str, Any]:
        """The metric's state. Of torchmetrics all states, which it leaves out by default."""
        metric = self.metric
        if self._is_torchmetrics("saved"):
            states = tree_map(_detached_copy, dict(metric.metric_state))
            return {"updates": metric._update_count, **states}
        if not hasattr(metric, "state_dict"):
            raise TypeError(
                f"{type(metric).__name__} cannot be saved: "
                "give it state_dict() and load_state_dict()"
            )
        state: dict[str, Any] = metric.state_dict()
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restores what state_dict() returned."""
        metric = self.metric
        if not self._is_torchmetrics("loaded"):
            metric.load_state_dict(saved)
            return

        expected = sorted(["updates", *metric.metric_state])
        received = sorted(map(str, saved)) if isinstance(saved, dict) else type(saved).__name__
        if received != expected:
            raise ValueError(
                f"{type(metric).__name__}: expected the states {expected}, received {received}"
            )
        states_of_metric = SavedValue(saved, type(metric).__name__)
        states_of_metric.field("updates").whole_number()
        for name, present in metric.metric_state.items():
            state = states_of_metric.field(name)
            if isinstance(present, Tensor):
                state.tensor(present.dtype)
            else:  # what was appended, or all of it as one tensor
                for item in state.items() if isinstance(state.value, list) else [state]:
                    item.tensor()

        def to_device(value: Any) -> Any:
            return value.to(metric.device) if isinstance(value, Tensor) else value

        states = tree_map(to_device, tree_map(_detached_copy, dict(saved)))
        metric._update_count = states.pop("updates")
        for name, state in states.items():
            setattr(metric, name, state)
        metric._computed = None  # else compute() returns its value from before

    def __repr__(self) -> str:
        return f"Adapted({self.metric!r})"

    def _is_torchmetrics(self, action: str) -> bool:
        """Whether this is a metric of torchmetrics, whose states are known.

        A wrapper around other metrics keeps more than its states, so it is refused: it cannot be
        `action`, which completes the message ("saved").
        """
        metric = self.metric
        if not isinstance(metric, nn.Module) or not hasattr(metric, "metric_state"):
            return False
        inner_modules = [module for module in metric.modules() if module is not metric]
        if any(hasattr(module, "metric_state") for module in inner_modules):
            raise TypeError(
                f"{type(metric).__name__} cannot be {action}: it wraps other metrics; "
                "give the metric inside it instead"
            )
        return True


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _detached_copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
