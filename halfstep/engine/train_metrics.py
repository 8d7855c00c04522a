"""Metrics on training batches, from the outputs of the forward pass that is trained on.

A metric that is a total over a count (`Accuracy`, `Loss`, functions) gives both numbers for each
batch. They are part of the step's record, on the device and inside captured steps, and the loop
adds them up on the host: a skipped step is left out as its loss is. Other metrics (torchmetrics)
are updated batch by batch where steps are eager.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.engine.evaluate import Labels, metric_arguments, plain_value
from halfstep.engine.run import ExtraColumns
from halfstep.errors import Notice
from halfstep.metrics import Accuracy, Average, Loss, Metric, Metrics
from halfstep.step.eval_step import EvalRecord
from halfstep.step.objective import Batch, BatchLoss, batch_size
from halfstep.utils.keywords import user_stacklevel
from halfstep.utils.saved_state import SavedValue
from halfstep.utils.text import first_line, list_some

Counts = dict[str, tuple[Tensor, Tensor]]

OWN_METRICS = (Accuracy, Loss, Average)

OFF_ADVICE = "Model(train_metrics=False) counts none on training data"


class TrainMetrics:
    """The observer of a step: copies of the model's metrics, for training batches."""

    def __init__(
        self, metrics: Metrics, labels: Labels | None, requested: bool | Iterable[str]
    ) -> None:
        self.labels = labels
        self._captured = False
        self._divided = False
        self._has_warned_captured = False
        self._failed: set[str] = set()
        self._other_updates = 0  # batches that the other metrics have seen since their reset
        by_name, self._left_out = _copies(metrics, _requested_names(metrics, requested))
        self._all = Metrics(by_name)
        self._ratios = {name: metric for name, metric in by_name.items() if _is_ratio(metric)}
        self._others = {name: m for name, m in by_name.items() if name not in self._ratios}
        # halfstep's own, that a captured step may hold.
        self._in_graph = tuple(name for name, m in self._ratios.items() if m.in_graph)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics that are part of the records."""
        return self._in_graph if self._captured else tuple(self._ratios)

    @property
    def other_names(self) -> tuple[str, ...]:
        """The metrics that are no part of the records."""
        return () if self._captured or self._divided else tuple(self._others)

    def begin(self) -> None:
        """Before the first step of a fit: nothing is counted, and nothing has failed."""
        self._failed.clear()
        self.reset()
        if self._left_out:
            names = list_some([repr(name) for name in self._left_out], 4)
            warnings.warn(
                f"metrics: {names}: counted in evaluations only, as a metric of this kind may keep "
                f"all outputs of an epoch; train_metrics=[…] with its name counts it on training "
                f"data too, and train_metrics=False counts none there",
                Notice,
                stacklevel=user_stacklevel(),
            )
            self._left_out = []

    def use_captured(self, captured: bool) -> None:
        """Whether steps are captured from here on: then only halfstep's own metrics are counted."""
        self._captured = captured
        names = [name for name in self._all if name not in self._in_graph]
        if captured and names and not self._has_warned_captured:
            self._has_warned_captured = True
            warnings.warn(
                f"metrics: {list_some([repr(name) for name in names], 4)}: counted in evaluations "
                "only, as the steps are captured and only Accuracy and Loss of hs.metrics can be "
                f"part of that. capture=False counts them on training data too; {OFF_ADVICE}",
                Notice,
                stacklevel=user_stacklevel(),
            )

    def use_divided_batches(self) -> None:
        """Batches are divided over ranks or lanes: only totals and counts can be put together."""
        if self._others and not self._divided:
            names = list_some([repr(name) for name in self._others], 4)
            warnings.warn(
                f"metrics: {names}: counted in evaluations only, as each batch is divided over "
                "ranks or lanes and only metrics of hs.metrics and functions can be put together "
                f"again; {OFF_ADVICE}",
                Notice,
                stacklevel=user_stacklevel(),
            )
        self._divided = True

    @torch.no_grad()
    def __call__(self, batch: Batch, result: BatchLoss) -> Counts:
        """What each metric of `names` adds to its total and count for this batch."""
        loss = result.loss.detach().sum()
        count = result.term_count
        if count is None:
            count = batch_size(batch)
        record = EvalRecord(loss, loss, result.outputs, result.target)
        outputs = None
        labels = None
        try:
            outputs, labels = metric_arguments(record, batch, self.labels, self._all)
        except Exception as error:
            self._give_up(self._all.names_that_read_outputs, error)

        counts: Counts = {}
        for name in self.names:
            counts[name] = self._count(name, outputs, labels, loss, count)
        for name in self.other_names:
            self._update_other(name, outputs, labels)
        self._other_updates += 1
        return counts

    def _count(
        self, name: str, outputs: Any, labels: Any, loss: Tensor, count: Any
    ) -> tuple[Tensor, Tensor]:
        metric: Any = self._ratios[name]
        arguments = (loss, count) if isinstance(metric, Loss) else (outputs, labels)
        if name not in self._failed:
            try:
                total, added = metric.terms(*arguments)
            except Exception as error:
                self._give_up([name], error)
            else:
                # Values are looked at once: that takes long, and no graph can repeat it.
                metric._checks_values = False
                if not isinstance(added, Tensor):
                    added = torch.full((), added, dtype=torch.float64, device=total.device)
                return total, added
        zero = torch.zeros((), dtype=torch.float64, device=loss.device)
        return zero, zero

    def _update_other(self, name: str, outputs: Any, labels: Any) -> None:
        if name in self._failed:
            return
        try:
            metric = self._others[name]
            if self._other_updates == 0 and isinstance(outputs, Tensor):
                metric.to(outputs.device)
            metric.update(outputs, labels)
        except Exception as error:
            self._give_up([name], error)

    def _give_up(self, names: Iterable[str], error: Exception) -> None:
        """Leaves metrics to evaluations for the rest of the fit, and says why."""
        new = [name for name in names if name not in self._failed]
        self._failed.update(new)
        if new:
            warnings.warn(
                f"metrics: {list_some([repr(name) for name in new], 4)} cannot be counted on "
                f"training data, and will be in evaluations only: {type(error).__name__}: "
                f"{first_line(error)}. {OFF_ADVICE}",
                Notice,
                stacklevel=user_stacklevel(),
            )

    def other_values(self) -> dict[str, Any]:
        """The values of the metrics that are no part of the records. Then they begin anew."""
        values = {}
        for name in self.other_names:
            if name in self._failed or not self._other_updates:
                continue
            try:
                values[name] = plain_value(self._others[name].compute())
            except Exception as error:
                self._give_up([name], error)
        self.reset()
        return values

    def reset(self) -> None:
        """Forgets what the metrics that are no part of the records have seen."""
        self._other_updates = 0
        for metric in self._others.values():
            metric.reset()

    # Over a resume. Totals and counts are the loop's to save.

    def state_dict(self) -> dict[str, Any]:
        """The states of the metrics that are no part of the records and that can be saved."""
        states = {}
        for name in self.other_names:
            try:
                states[name] = self._others[name].state_dict()
            except TypeError:  # a metric without a state_dict
                continue
        if not states or not self._other_updates:
            return {}
        return {"updates": self._other_updates, "metrics": states}

    def check_state(self, saved: SavedValue) -> None:
        """ValueError for a state that `load_state_dict` cannot take. Changes nothing."""
        saved.field("updates").whole_number()
        for name, state in saved.field("metrics").entries().items():
            if name in self._others:
                copy.deepcopy(self._others[name]).load_state_dict(state.value)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with saved states; a metric that was not saved misses the batches before."""
        for name, metric_state in state.get("metrics", {}).items():
            if name in self._others:
                self._others[name].load_state_dict(metric_state)
        self._other_updates = state.get("updates", 0)


def train_metric_columns(train_metrics: TrainMetrics) -> tuple[str, ...]:
    """The columns of the rows that the metrics have."""
    return ExtraColumns.of((), train_metrics.names).metrics


def _requested_names(metrics: Metrics, requested: Any) -> list[str] | None:
    """The names of the metrics to count; None: those that are safe to count."""
    if requested is True:
        return None
    if requested is False:
        return []
    names = [requested] if isinstance(requested, str) else list(requested)
    for name in names:
        if name not in metrics.by_name:
            raise ValueError(
                "train_metrics: expected True, False or names of metrics= "
                f"({', '.join(map(repr, metrics)) or 'none'}), got {name!r}"
            )
    return names


def _copies(metrics: Metrics, requested: list[str] | None) -> tuple[dict[str, Metric], list[str]]:
    """Copies of the metrics to count on training data, and the names that were left out."""
    copies: dict[str, Metric] = {}
    left_out = []
    for name, metric in metrics.by_name.items():
        if requested is not None and name not in requested:
            continue
        if name == "loss":  # the mean loss has that name already
            continue
        if requested is None and not _is_safe(metric):
            left_out.append(name)
            continue
        if type(metric) is Average:
            copies[name] = Average(metric.fn)  # a function may be a large object
        else:
            copies[name] = copy.deepcopy(metric)
            copies[name].reset()
    return copies, left_out


def _is_ratio(metric: Metric) -> bool:
    """Whether a metric is one of ours, and no subclass that counts in another way."""
    if not isinstance(metric, OWN_METRICS):
        return False
    own = next(kind for kind in OWN_METRICS if isinstance(metric, kind))
    methods = ("update", "terms", "compute", "reset")
    return all(getattr(type(metric), name) is getattr(own, name) for name in methods)


def _is_safe(metric: Metric) -> bool:
    """Whether a metric's memory stays as it is, however many batches it sees."""
    if isinstance(metric, OWN_METRICS):
        return True
    defaults = getattr(getattr(metric, "metric", None), "_defaults", None)  # of torchmetrics
    return isinstance(defaults, dict) and all(isinstance(v, Tensor) for v in defaults.values())
