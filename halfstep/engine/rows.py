"""What a step reported, as plain numbers: one read from the device for all the steps of a visit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halfstep.step import Record

_FLOATS = ("loss", "cycle_loss", "scale", "grad_norm", "skipped", "updated")


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
class Place:
    """Where in the run a record belongs."""

    epoch: int
    step: int
    global_step: int
    samples: int


def read(places: Sequence[Place], records: Sequence[Record], *, fingerprints: bool) -> list[Row]:
    """The rows of a visit. With `fingerprints`, a second read: 64 bits do not fit a float."""
    table = torch.stack([torch.stack([getattr(r, name) for r in records]).double() for name in _FLOATS])
    rates = torch.stack([r.lr for r in records]).double()  # [steps] or [steps, groups]
    groups = 1 if rates.dim() == 1 else rates.shape[1]
    numbers = torch.cat([table.flatten(), rates.flatten()]).tolist()  # the host visit
    prints = torch.stack([r.fingerprint for r in records]).tolist() if fingerprints else [0] * len(records)
    n = len(records)
    columns = [numbers[i * n : (i + 1) * n] for i in range(len(_FLOATS))]
    each = numbers[len(_FLOATS) * n :]
    rows = []
    for i, place in enumerate(places):
        loss, cycle_loss, scale, norm, skipped, updated = (column[i] for column in columns)
        lr = each[i] if groups == 1 else tuple(each[i * groups : (i + 1) * groups])
        rows.append(
            Row(
                place.epoch, place.step, place.global_step, place.samples, loss, cycle_loss, lr, scale, skipped != 0,
                norm, updated != 0, prints[i],
            )
        )  # fmt: skip
    return rows
