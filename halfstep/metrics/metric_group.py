"""Several metrics by name, used as one."""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from halfstep.metrics.adapt import ACCEPTED, AdaptedMetric, Metric, as_metric
from halfstep.metrics.counters import Loss
from halfstep.utils.text import dtype_name

# A list or tuple of more items is described by its length in an error.
MAX_DESCRIBED_ITEMS = 8

_VALID_NAME = re.compile(r"\w[\w.@-]*")


class Metrics:
    """Metrics by name. "loss" is the name of the loss itself: only a Loss() may have it."""

    def __init__(self, metrics: Any = None) -> None:
        if metrics is not None and not isinstance(metrics, Mapping):
            raise TypeError(
                'metrics: expected a dict by name, such as {"acc": Accuracy()}, '
                f"received {type(metrics).__name__}"
            )
        self.by_name: dict[str, Metric] = {}
        for name, candidate in (metrics or {}).items():
            _check_name(name, candidate)
            metric = as_metric(candidate)
            for other_name, other in self.by_name.items():
                if _unwrapped(other) is _unwrapped(metric):
                    raise ValueError(
                        f"metrics: {name!r} and {other_name!r} are one object, which would count "
                        "every batch twice"
                    )
            self.by_name[name] = metric

    def update(
        self, outputs: Any, labels: Any, *, loss: Tensor | None = None, count: float | Tensor = 1
    ) -> None:
        """Passes one batch to every metric.

        `loss` is the batch's mean loss over `count` terms, for the metrics that follow the loss.
        """
        for name, metric in self.by_name.items():
            arguments: tuple[Any, Any] = (outputs, labels)
            if isinstance(metric, Loss):
                if loss is None:
                    raise ValueError(
                        f"metrics: {name!r} follows the loss; "
                        "give update() the batch's loss= and count="
                    )
                arguments = (loss, count)
            try:
                metric.update(*arguments)
            except Exception as error:
                first, second = map(_describe, arguments)
                error.add_note(f"in the metric {name!r}, which was given {first} and {second}")
                raise

    def compute(self) -> dict[str, Any]:
        """Every metric's value, on the device."""
        values = {}
        for name, metric in self.by_name.items():
            try:
                values[name] = metric.compute()
            except Exception as error:
                error.add_note(f"in the metric {name!r}, when it was computed")
                raise
        return values

    def reset(self) -> None:
        """Resets every metric to no updates."""
        for metric in self.by_name.values():
            metric.reset()

    def merge(self, other: "Metrics") -> None:
        """Adds what another group of the same metrics has seen."""
        self._check_same_names(other.by_name, "merge")
        for name, metric in self.by_name.items():
            metric.merge(other.by_name[name])

    def to(self, device: torch.device | str) -> Self:
        """Moves every metric."""
        for metric in self.by_name.values():
            metric.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Every metric's state, by name."""
        return {name: metric.state_dict() for name, metric in self.by_name.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores what state_dict() returned. A missing or unknown name is an error.

        If one of the metrics refuses its state, all of them are as before.
        """
        self._check_same_names(saved, "load_state_dict")
        before = copy.deepcopy(self.state_dict())
        try:
            for name, metric in self.by_name.items():
                metric.load_state_dict(saved[name])
        except Exception:
            for name, metric in self.by_name.items():
                metric.load_state_dict(before[name])
            raise

    def split(self) -> tuple["Metrics", "Metrics"]:
        """The metrics that a captured graph may update, and those that it may not.

        Both groups share the metrics with this one.
        """
        inside = {name: metric for name, metric in self.by_name.items() if metric.in_graph}
        outside = {name: metric for name, metric in self.by_name.items() if name not in inside}
        return Metrics(inside), Metrics(outside)

    @property
    def names_that_read_outputs(self) -> list[str]:
        """The names of the metrics that are computed from outputs and labels, not from the loss."""
        return [name for name, metric in self.by_name.items() if not isinstance(metric, Loss)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    def _check_same_names(self, names: Mapping[str, Any], method: str) -> None:
        expected = sorted(self.by_name)
        received = sorted(names)
        if received != expected:
            raise ValueError(f"metrics: {method}: expected {expected}, received {received}")


def is_valid_name(name: Any) -> bool:
    """Whether a name can be that of a column or a file."""
    return isinstance(name, str) and _VALID_NAME.fullmatch(name) is not None


def _check_name(name: Any, candidate: Any) -> None:
    if not is_valid_name(name):
        raise ValueError(
            "metrics: expected a name of letters, digits and _ . @ - (no spaces or slashes: it "
            f"names columns and files), received {name!r}. A metric is {ACCEPTED}"
        )
    if name == "loss" and not isinstance(candidate, Loss):
        raise ValueError(
            "metrics: 'loss' is the name of the loss itself; give this metric another one, "
            "or use Loss()"
        )


def _describe(value: Any) -> str:
    """Dtypes and shapes of tensors, inside tuples, lists and dicts too."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
    if isinstance(value, Mapping):
        items = [f"{name!r}: {_describe(item)}" for name, item in value.items()]
        return "{" + ", ".join(items) + "}"
    if not isinstance(value, list | tuple):
        return type(value).__name__
    if len(value) > MAX_DESCRIBED_ITEMS:
        return f"{type(value).__name__} of {len(value)}"
    return "(" + ", ".join(_describe(item) for item in value) + ")"


def _unwrapped(metric: Metric) -> Any:
    """The object that counts: another library's metric is the same one, however often adapted."""
    return metric.metric if isinstance(metric, AdaptedMetric) else metric
