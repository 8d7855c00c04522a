"""A run as callbacks see it: where it stands, what each step reported, when things happen."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, SupportsIndex, overload

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import closest_name
from halfstep.step import Record
from halfstep.step.state import ROW_FIELDS, row_columns

# Where each field stands in a row of numbers.
LOSS, CYCLE_LOSS, SCALE, GRAD_NORM, SKIPPED, UPDATED = row_columns(
    ("loss", "cycle_loss", "scale", "grad_norm", "skipped", "updated")
)


class HistoryEntries(list[dict[str, Any]]):
    """The entries of a run's history, in order. By a name: its value in each entry.

    `history[-1]` is the newest entry, `history["loss"]` the curve of the loss. An entry that has no
    such value, as one without an evaluation, has None there.
    """

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice, /) -> list[dict[str, Any]]: ...
    @overload
    def __getitem__(self, key: str, /) -> list[Any]: ...
    def __getitem__(self, key: SupportsIndex | slice | str, /) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        names = list(dict.fromkeys(name for entry in self for name in entry))
        if key not in names:
            close = closest_name(key, names)
            suggestion = f"did you mean {close!r}? " if close else ""
            raise KeyError(
                f"history: no entry has {key!r}; {suggestion}names are: {', '.join(names) or '-'}"
            )
        return [entry.get(key) for entry in self]


@dataclass(repr=False)
class Run:
    """Progress of one `fit`. Epochs and steps count from 1; `step` is 0 before an epoch's first.

    While rows are handed out, `epoch`, `step` and `global_step` are those of the row; `position` is
    where the network stands. They agree at a visit.
    """

    model: Any
    epochs: int
    epoch_steps: int | None
    """Steps in an epoch; None when the data does not say."""
    epoch_samples: int | None = None
    """Samples in an epoch, where the data says."""
    evaluates: bool = False
    """Whether there is validation data."""
    valid_steps: int | None = None
    """Batches in an evaluation; None when the data does not say."""
    valid_step: int = 0
    """Batches that the evaluation under way has done."""
    epoch: int = 1
    step: int = 0
    global_step: int = 0
    position: int = 0
    row: "Row | None" = None
    """The last row that was handed out: in `visit`, that of the last step."""
    skipped: int = 0
    """Steps that were skipped, since this fit began or went on."""
    seconds: float = 0.0
    """Time spent training in this epoch, evaluations left out."""
    scores: dict[str, float] | None = None
    """What an evaluation at this very step gave; None between evaluations."""
    training: dict[str, float | None] = field(default_factory=dict)
    """Means over the steps since the last entry of the history, up to now.

    The loss, its parts and the metrics on training data; skipped steps are left out.
    """
    train_metrics: tuple[str, ...] = ()
    """The columns of the metrics that are counted on training data."""
    may_have_parts: bool = False
    """Whether the loss may return more than itself; the first batch shows."""
    score_names: tuple[str, ...] = ()
    """The scores of an evaluation, as far as they are known before the first."""
    valid_sets: tuple[str, ...] = ()
    """The names of the validation sets; an only one has the name ""."""
    history: HistoryEntries = field(default_factory=HistoryEntries)
    """One entry for each evaluation or epoch end; `history["loss"]` is the loss of each.

    It holds epoch, step, the mean training loss since the last entry (with its parts and the
    metrics on training data), and the scores.
    """
    epoch_over: bool = False
    """At a visit: this one ends the epoch."""
    has_begun: bool = False
    """Whether the `begin` of every callback is over: nothing refuses the run any more."""
    stopped: str | None = None
    error: BaseException | None = None
    resume: str | None = None
    """What fit(resume=…) asked for."""
    resumed: str | None = None
    """The checkpoint that this run continued from; None also where resume="auto" found none."""

    def stop(self, reason: str) -> None:
        """Ends the run after this visit."""
        self.stopped = self.stopped or reason

    def __repr__(self) -> str:
        """Where the run is and its newest scores: a notebook shows what `fit` returns."""
        parts = [f"epoch {self.epoch}/{self.epochs}", f"step {self.global_step}"]
        newest = self.history[-1] if self.history else {}
        parts += [
            f"{name}={value:.4g}" for name, value in newest.items() if isinstance(value, float)
        ]
        if self.stopped is not None:
            parts.append(f"stopped={self.stopped!r}")
        return f"Run({', '.join(parts)})"

    @property
    def net(self) -> nn.Module:
        """The network, where its weights are those of the step at hand; elsewhere an error."""
        self._check_at_visit("net")
        net: nn.Module = self.model.net
        return net

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, where its state is that of the step at hand; elsewhere an error."""
        self._check_at_visit("optimizer")
        optimizer: Optimizer = self.model.optimizer
        return optimizer

    def _check_at_visit(self, attribute: str) -> None:
        if self.global_step != self.position:
            raise RuntimeError(
                f"run.{attribute}: the row is that of step {self.global_step}, "
                f"the network stands at {self.position}. Read weights in visit(), "
                "name the step in next_stop(), or set exact = True on the callback."
            )


@dataclass(frozen=True)
class Timing:
    """When things happen in a run."""

    epochs: int
    epoch_steps: int | None
    sink: int | None  # steps between two visits; None: by time
    valid_epochs: Callable[[int], bool]  # whether an epoch ends with an evaluation
    valid_steps: int = 0  # steps between evaluations; 0: never by steps


@dataclass(frozen=True, slots=True)
class StepPosition:
    """Where in the run a record belongs. Epochs and steps count from 1."""

    epoch: int
    step: int
    global_step: int
    samples: int


@dataclass(frozen=True, slots=True)
class Row:
    """One step's record on the host. `global_step` never starts again.

    `lr` is a number, or one for each parameter group when there are several. `samples` is the size
    of the batch.
    """

    epoch: int
    step: int
    global_step: int
    samples: int
    loss: float
    cycle_loss: float
    lr: float | tuple[float, ...]
    scale: float
    skipped: bool
    grad_norm: float
    updated: bool
    fingerprint: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the loss returned beside itself, by column."""
    counts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of each metric on training data, by column: what this batch adds to its total and count."""

    @property
    def extras(self) -> dict[str, float]:
        """More columns: the parts of the loss, and each training metric of this batch alone."""
        metrics = {name: ratio(total, count) for name, (total, count) in self.counts.items()}
        return {**self.parts, **metrics}


def ratio(total: float, count: float) -> float:
    """A mean; NaN where nothing was counted."""
    return total / count if count else math.nan


# The columns that every row has.
ROW_COLUMNS = tuple(column.name for column in fields(Row) if column.name not in ("parts", "counts"))

# Names of columns and entries that nothing else may have.
RESERVED_COLUMNS = (*ROW_COLUMNS, "kind", "time")


@dataclass(frozen=True)
class ExtraColumns:
    """The names under which parts of the loss and training metrics are recorded."""

    parts: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()

    @classmethod
    def of(cls, part_names: Sequence[str], metric_names: Sequence[str]) -> "ExtraColumns":
        """A part has its own name where that is free, else `loss_…`; a metric `train_…`."""
        metrics = [f"train_{name}" if name in RESERVED_COLUMNS else name for name in metric_names]
        return cls(tuple(part_columns(part_names, metric_names)), tuple(metrics))

    def split(
        self, numbers: Sequence[float]
    ) -> tuple[Mapping[str, float], Mapping[str, tuple[float, float]]]:
        """The numbers of a record as parts and counts. Without numbers there are none."""
        if not numbers:
            return {}, {}
        part_count = len(self.parts)
        parts = dict(zip(self.parts, numbers[:part_count], strict=True))
        pairs = zip(numbers[part_count::2], numbers[part_count + 1 :: 2], strict=True)
        return parts, dict(zip(self.metrics, pairs, strict=True))


def score_name(set_name: str, name: str) -> str:
    """A score of a validation set as fit and evaluate name it; an only set has the name ""."""
    return f"{set_name}_{name}" if set_name else name


def part_columns(part_names: Sequence[str], metric_names: Sequence[str]) -> list[str]:
    """The column of each part of the loss: its name where that is free, else `loss_…`."""
    taken = {*RESERVED_COLUMNS, *metric_names}
    return [f"loss_{name}" if name in taken else name for name in part_names]


def read_rows(
    positions: Sequence[StepPosition],
    records: Sequence[Record],
    *,
    fingerprints: bool,
    extra_columns: ExtraColumns,
) -> list[Row]:
    """The rows of a visit: one read from the device for all of its steps.

    With `fingerprints` a second read: 64 bits do not fit a float. A third one for extras.
    """
    columns = [
        torch.stack([getattr(record, name) for record in records]).double() for name in ROW_FIELDS
    ]
    rates = torch.stack([record.lr for record in records]).double()  # [steps] or [steps, groups]
    rate_columns = rates.view(len(records), -1).t()
    numbers = torch.cat([torch.stack(columns), rate_columns]).t().tolist()  # the host waits here
    prints = [0] * len(records)
    if fingerprints:
        prints = torch.stack([record.fingerprint for record in records]).tolist()
    return make_rows(positions, numbers, prints, _read_extras(records), extra_columns)


def _read_extras(records: Sequence[Record]) -> list[list[float]]:
    """Parts and counts of each record: one read from the device, where any has some."""
    extras = [record.extra_numbers() for record in records]
    width = max(map(len, extras))
    if width == 0:
        return [[] for _ in records]
    # An empty batch before the first real one does not know the parts yet.
    if not all(extras):
        zero = torch.zeros_like(records[0].loss, dtype=torch.float64)
        extras = [[n.double() for n in numbers] or [zero] * width for numbers in extras]
    columns = [torch.stack(list(column)).double() for column in zip(*extras, strict=True)]
    rows: list[list[float]] = torch.stack(columns, 1).tolist()
    return rows


def make_rows(
    positions: Sequence[StepPosition],
    numbers: Sequence[Sequence[float]],
    fingerprints: Sequence[int],
    extras: Sequence[Sequence[float]],
    extra_columns: ExtraColumns,
) -> list[Row]:
    """Rows from numbers: for each step those of ROW_FIELDS, then the learning rates."""
    rows = []
    for position, step_numbers, fingerprint, extra_numbers in zip(
        positions, numbers, fingerprints, extras, strict=True
    ):
        parts, counts = extra_columns.split(extra_numbers)
        rates = step_numbers[len(ROW_FIELDS) :]
        rows.append(
            Row(
                epoch=position.epoch,
                step=position.step,
                global_step=position.global_step,
                samples=position.samples,
                loss=step_numbers[LOSS],
                cycle_loss=step_numbers[CYCLE_LOSS],
                lr=rates[0] if len(rates) == 1 else tuple(rates),
                scale=step_numbers[SCALE],
                skipped=step_numbers[SKIPPED] != 0,
                grad_norm=step_numbers[GRAD_NORM],
                updated=step_numbers[UPDATED] != 0,
                fingerprint=fingerprint,
                parts=parts,
                counts=counts,
            )
        )
    return rows
