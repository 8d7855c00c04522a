"""A run as callbacks see it: where it stands, what each step reported, when things happen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.step import Record
from halfstep.step.state import ROW_FIELDS, row_columns

# Where each field stands in a row of numbers.
LOSS, CYCLE_LOSS, SCALE, GRAD_NORM, SKIPPED, UPDATED = row_columns(
    ("loss", "cycle_loss", "scale", "grad_norm", "skipped", "updated")
)


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
    history: list[dict[str, Any]] = field(default_factory=list)
    """One entry for each evaluation or epoch end.

    It holds epoch, step, the mean training loss since the last entry, and the scores.
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


def read_rows(
    positions: Sequence[StepPosition], records: Sequence[Record], *, fingerprints: bool
) -> list[Row]:
    """The rows of a visit: one read from the device for all of its steps.

    With `fingerprints` a second read: 64 bits do not fit a float.
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
    return make_rows(positions, numbers, prints)


def make_rows(
    positions: Sequence[StepPosition],
    numbers: Sequence[Sequence[float]],
    fingerprints: Sequence[int],
) -> list[Row]:
    """Rows from numbers: for each step those of ROW_FIELDS, then the learning rates."""
    rows = []
    for position, step_numbers, fingerprint in zip(positions, numbers, fingerprints, strict=True):
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
            )
        )
    return rows
