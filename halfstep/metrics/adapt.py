"""What may stand as a metric: ours, torchmetrics', anything with update / compute / reset, or a function."""

from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep.metrics.counters import Accuracy, Average, Loss, logits_of

ACCEPTED = (
    "a metric of halfstep.metrics, one of torchmetrics, any object with update(outputs, labels), compute() and "
    "reset(), or a function (outputs, labels) -> tensor"
)


class Metric(Protocol):
    """What the library asks of a metric."""

    in_graph: bool

    def update(self, outputs: Any, labels: Any, /) -> None: ...
    def compute(self) -> Any: ...
    def reset(self) -> None: ...
    def merge(self, other: Any) -> None: ...
    def to(self, device: torch.device | str) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, saved: dict[str, Any]) -> None: ...


def as_metric(given: Any) -> Metric:
    """`given` as a metric; a function becomes the mean of its values, weighted by their count."""
    if isinstance(given, Accuracy | Loss | Average | Adapted):
        return given
    if isinstance(given, type):
        raise TypeError(
            f"metric: expected an instance, received the class {given.__name__}; write {given.__name__}()"
        )
    if isinstance(given, nn.ModuleDict):
        raise TypeError(
            f"metric: a {type(given).__name__} holds several metrics; give them by name: {{**collection}}"
        )
    if all(callable(getattr(given, name, None)) for name in ("update", "compute", "reset")):
        return Adapted(given)
    if callable(given):
        return Average(given)
    raise TypeError(f"metric: received {type(given).__name__} {given!r}. Accepted: {ACCEPTED}")


class Adapted:
    """A foreign metric under the library's names. It sees outputs without their history, outside any graph."""

    in_graph = False

    def __init__(self, metric: Any) -> None:
        self.metric = metric

    @torch.no_grad()
    def update(self, outputs: Any, labels: Any) -> None:
        """Passes one batch on; a metric that keeps its inputs must not keep the graph behind them."""
        scores, truth = tree_map(
            lambda x: x.detach() if isinstance(x, Tensor) else x, (logits_of(outputs), labels)
        )
        self.metric.update(scores, truth)

    def compute(self) -> Any:
        """The metric's own value."""
        return self.metric.compute()

    def reset(self) -> None:
        """The metric's own reset."""
        self.metric.reset()

    def to(self, device: torch.device | str) -> Self:
        """Moves the metric where it can be moved."""
        if callable(getattr(self.metric, "to", None)):
            self.metric.to(device)
        return self

    def merge(self, other: Any) -> None:
        """torchmetrics' merge_state, or the metric's own merge."""
        mine, its = self.metric, other.metric if isinstance(other, Adapted) else other
        if type(its) is not type(mine):
            raise ValueError(f"merge: expected another {type(mine).__name__}, received {its!r}")
        if self._is_torchmetrics("merged"):
            mine.merge_state(its)
            mine._update_count += its._update_count
            mine._computed = None  # it would return the value from before the merge
        elif hasattr(mine, "merge"):
            mine.merge(its)
        else:
            raise TypeError(
                f"merge: {type(mine).__name__} has neither merge_state(other) nor merge(other)"
            )

    def state_dict(self) -> dict[str, Any]:
        """torchmetrics' states, which its own state_dict() leaves out by default; else the metric's own."""
        metric = self.metric
        if self._is_torchmetrics("saved"):
            return {"updates": metric._update_count, **_copy(metric.metric_state)}
        if not hasattr(metric, "state_dict"):
            raise TypeError(
                f"{type(metric).__name__} cannot be saved: give it state_dict() and load_state_dict()"
            )
        own: dict[str, Any] = metric.state_dict()
        return own

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Puts back what state_dict() gave."""
        metric = self.metric
        if not self._is_torchmetrics("loaded"):
            metric.load_state_dict(saved)
            return
        expected = sorted(["updates", *metric.metric_state])
        if sorted(saved) != expected:
            raise ValueError(
                f"{type(metric).__name__}: expected the states {expected}, received {sorted(saved)}"
            )
        for key, value in _on(_copy(saved), metric.device).items():
            setattr(metric, "_update_count" if key == "updates" else key, value)
        metric._computed = None

    def __repr__(self) -> str:
        return f"Adapted({self.metric!r})"

    def _is_torchmetrics(self, what: str) -> bool:
        """Whether its states are known. A wrapper around other metrics keeps more than its states, so it is refused."""
        if not isinstance(self.metric, nn.Module) or not hasattr(self.metric, "metric_state"):
            return False
        if any(
            hasattr(part, "metric_state")
            for part in self.metric.modules()
            if part is not self.metric
        ):
            name = type(self.metric).__name__
            raise TypeError(
                f"{name} cannot be {what}: it wraps other metrics; give the metric inside it instead"
            )
        return True


def _copy(state: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, dict(state))


def _on(value: Any, device: torch.device) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, value)
