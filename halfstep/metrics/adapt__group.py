"""Several metrics by name, as one."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from halfstep.metrics.adapt import ACCEPTED, Adapted, Metric, as_metric
from halfstep.metrics.counters import Loss

_NAME = re.compile(r"\w[\w.@-]*")


class Metrics:
    """Metrics by name. `loss` is the name of the loss itself: only a Loss() may have it."""

    def __init__(self, metrics: Any = None) -> None:
        if metrics is not None and not isinstance(metrics, Mapping):
            example = '{"acc": Accuracy()}'
            raise TypeError(
                f"metrics: expected a dict by name, such as {example}, received {type(metrics).__name__}"
            )
        self.each: dict[str, Metric] = {}
        for name, given in (metrics or {}).items():
            _check_name(name, given)
            metric = as_metric(given)
            twin = next((n for n, m in self.each.items() if _core(m) is _core(metric)), None)
            if twin is not None:
                raise ValueError(
                    f"metrics: {name!r} and {twin!r} are one object, which would count every batch twice"
                )
            self.each[name] = metric

    def update(
        self, outputs: Any, labels: Any, *, loss: Tensor | None = None, count: float | Tensor = 1
    ) -> None:
        """Hands one batch to every metric; `loss` is its mean over `count` terms, for those that follow the loss."""
        for name, metric in self.each.items():
            follows = isinstance(metric, Loss)
            if follows and loss is None:
                raise ValueError(
                    f"metrics: {name!r} follows the loss; give update() the batch's loss= and count="
                )
            given = (loss, count) if follows else (outputs, labels)
            try:
                metric.update(*given)
            except Exception as error:
                error.add_note(
                    f"in the metric {name!r}, which was given {' and '.join(map(_said, given))}"
                )
                raise

    def compute(self) -> dict[str, Any]:
        """Every metric's value, on the device."""
        return {name: self._computed(name) for name in self.each}

    def _computed(self, name: str) -> Any:
        try:
            return self.each[name].compute()
        except Exception as error:
            error.add_note(f"in the metric {name!r}, when it was computed")
            raise

    def reset(self) -> None:
        """Every metric back to no updates."""
        for metric in self.each.values():
            metric.reset()

    def merge(self, other: "Metrics") -> None:
        """Adds what another group of the same metrics has seen."""
        self._same_names(other.each, "merge")
        for name, metric in self.each.items():
            metric.merge(other.each[name])

    def to(self, device: torch.device | str) -> Self:
        """Moves every metric."""
        for metric in self.each.values():
            metric.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Every metric's state, by name."""
        return {name: metric.state_dict() for name, metric in self.each.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Puts back what state_dict() gave; a missing or unknown name is an error."""
        self._same_names(saved, "load_state_dict")
        for name, metric in self.each.items():
            metric.load_state_dict(saved[name])

    def split(self) -> tuple["Metrics", "Metrics"]:
        """The metrics that may be updated inside a captured graph, and those that may not; the objects are shared."""
        inside = {name: metric for name, metric in self.each.items() if metric.in_graph}
        return Metrics(inside), Metrics({n: m for n, m in self.each.items() if n not in inside})

    def __iter__(self) -> Iterator[str]:
        return iter(self.each)

    def __len__(self) -> int:
        return len(self.each)

    def _same_names(self, other: Mapping[str, Any], what: str) -> None:
        if sorted(other) != sorted(self.each):
            raise ValueError(
                f"metrics: {what}: expected {sorted(self.each)}, received {sorted(other)}"
            )


def _check_name(name: Any, given: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = "a name of letters, digits and _ . @ - (no spaces or slashes: it names columns and files)"
        raise ValueError(f"metrics: expected {expected}, received {name!r}. A metric is {ACCEPTED}")
    if name == "loss" and not isinstance(given, Loss):
        raise ValueError(
            "metrics: 'loss' is the name of the loss itself; give this metric another one, or use Loss()"
        )


def _said(value: Any) -> str:
    """dtypes and shapes, as they stand in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {_said(each)}' for name, each in value.items())}}}"
    if not isinstance(value, list | tuple):
        return type(value).__name__
    return (
        f"({', '.join(map(_said, value))})"
        if len(value) < 9
        else f"{type(value).__name__} of {len(value)}"
    )


def _core(metric: Metric) -> Any:
    """The object that counts: a foreign metric wrapped twice is still one."""
    return metric.metric if isinstance(metric, Adapted) else metric
