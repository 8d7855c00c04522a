"""What a step reported, as plain numbers: one read from the device for all the steps of a visit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halfstep.step import Record

COLUMNS = (
    "loss",
    "cycle_loss",
    "scale",
    "grad_norm",
    "skipped",
    "updated",
)  # then one rate per parameter group


@dataclass(frozen=True, slots=True)
class Row:
    """One step's record on the host. Epochs and steps count from 1; `global_step` never starts again.

    `lr` is a number, or one per parameter group when there are several. `samples` is the size of the batch.
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


@dataclass(frozen=True, slots=True)
class StepPosition:
    """Where in the run a record belongs."""

    epoch: int
    step: int
    global_step: int
    samples: int


def read(
    places: Sequence[StepPosition], records: Sequence[Record], *, fingerprints: bool
) -> list[Row]:
    """The rows of a visit. With `fingerprints`, a second read: 64 bits do not fit a float."""
    table = torch.stack(
        [torch.stack([getattr(r, name) for r in records]).double() for name in COLUMNS]
    )
    rates = torch.stack([r.lr for r in records]).double()  # [steps] or [steps, groups]
    numbers = torch.cat([table, rates.view(len(records), -1).t()]).t().tolist()  # the host visit
    prints = (
        torch.stack([r.fingerprint for r in records]).tolist()
        if fingerprints
        else [0] * len(records)
    )
    return rows(places, numbers, prints)


def rows(
    places: Sequence[StepPosition], numbers: Sequence[Sequence[float]], prints: Sequence[int]
) -> list[Row]:
    """Rows from numbers, a step each: those of COLUMNS, then the rates."""
    made = []
    for place, (loss, cycle_loss, scale, norm, skipped, updated, *lr), mark in zip(
        places, numbers, prints, strict=True
    ):
        rate = lr[0] if len(lr) == 1 else tuple(lr)
        made.append(
            Row(
                place.epoch, place.step, place.global_step, place.samples, loss, cycle_loss, rate, scale, skipped != 0,
                norm, updated != 0, mark,
            )
        )  # fmt: skip
    return made
