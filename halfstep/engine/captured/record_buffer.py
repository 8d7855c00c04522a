"""A step's record as a row of a table on the device, by one kernel where that can be."""

from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.launch import MORE, SAME, attempt, launch, usable

_WORKS: dict[
    Any, bool
] = {}  # whether the kernel could be compiled, by the dtypes it is compiled for


def pack(
    table: Tensor,
    at: Tensor,
    loss: Tensor,
    cycle_loss: Tensor,
    lr: Tensor,
    scale: Tensor,
    skipped: Tensor,
    grad_norm: Tensor,
    updated: Tensor,
    *,
    keep_loss: bool,
    move: bool,
    compiled: bool = True,
) -> None:
    """table[at] = loss, cycle_loss, scale, grad_norm, skipped, updated, *lr in float64; `move` adds 1 to `at`.

    With keep_loss the row before `at` gets all but its loss, and `at` stays. On CUDA, where `compiled` allows it, one
    kernel: it leaves out a row that the table does not have.
    """
    move = move and not keep_loss
    if compiled and usable(table.device):
        fields = loss, cycle_loss, lr, scale, skipped, grad_norm, updated
        if _launched(table, at, fields, keep_loss, move):
            return
    row = torch.cat(
        [t.reshape(-1).double() for t in (loss, cycle_loss, scale, grad_norm, skipped, updated, lr)]
    )
    first = int(keep_loss)
    table[:, first:].index_copy_(0, at - first, row[None, first:])
    if move:
        at += 1


def _launched(
    table: Tensor, at: Tensor, fields: tuple[Tensor, ...], keep_loss: bool, move: bool
) -> bool:
    """Whether the kernel ran."""
    key = (table.device, table.shape[1], keep_loss, move, *(t.dtype for t in fields))
    lr = fields[2]
    sizes = (
        len(table),
        table.stride(0),
        lr.stride(0) if lr.dim() else 0,
        lr.numel(),
        keep_loss,
        move,
    )

    def start() -> None:
        from halfstep.kernels.update_triton import record

        launch(table.device, [(record, 1, (table, at, *fields, *sizes), 1)])

    return attempt(_WORKS, key, start, MORE, SAME)
