"""Records of steps, kept on the device until the host looks in: one row for each step.

A row has the numbers of ROW_FIELDS, then the learning rates; parts of the loss and counts of
metrics have a table of their own. Long runs (`polish`) write a row by one Triton kernel; torch
takes about ten. That is part of the row "compile=True, polish=True" of docs/internals/speed.md;
`polish=False` switches it off.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.launch import (
    MORE_UPDATE_KERNELS,
    SAME_RESULTS,
    launch,
    run_or_fall_back,
    triton_runs_on,
)
from halfstep.step import Record
from halfstep.step.state import ROW_FIELDS, row_columns
from halfstep.utils.device_values import read_to_host

# Whether the kernel could be compiled, by everything that it is compiled for.
_kernel_works: dict[Any, bool] = {}


class RecordBuffer:
    """A table of float64 numbers on the device, with a row for each step, and their fingerprints.

    `next_row` [1] is the number of the next step's row. It counts on the device, so that a replayed
    graph writes to another row each time.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity  # rows
        self.device = device
        self.use_kernels = False  # Triton kernels may be compiled: the run is long enough

        # The first row says how many columns there are.
        self.table = torch.empty(capacity, 0, dtype=torch.float64, device=device)
        self.fingerprints = torch.zeros(capacity, dtype=torch.int64, device=device)
        # Parts of the loss and counts of metrics, beside the table: the kernels know nothing of it.
        self.extras = torch.empty(capacity, 0, dtype=torch.float64, device=device)
        self.next_row = torch.zeros(1, dtype=torch.int64, device=device)

    def reset(self) -> None:
        """Starts again with the first row."""
        self.next_row.zero_()
        self.fingerprints.zero_()

    def write_values(self, values: Sequence[Tensor]) -> None:
        """Appends a row of any numbers."""
        self._allocate_table(sum(value.numel() for value in values))
        row = torch.cat([value.detach().reshape(-1).to(torch.float64) for value in values])
        self.table.index_copy_(0, self.next_row, row.unsqueeze(0))
        self.next_row.add_(1)

    def write_record(self, record: Record, *, into_last_row: bool = False) -> None:
        """Appends a step's record as a row.

        `into_last_row`: the record is that of the flush after the last step. It replaces all of
        that step's row but its loss.
        """
        self._allocate_table(len(ROW_FIELDS) + record.lr.numel())
        write_row(
            self.table,
            self.next_row,
            record,
            keep_loss=into_last_row,
            advance=not into_last_row,
            use_kernel=self.use_kernels,
        )
        if not into_last_row:
            self.write_extras(record)

    def write_extras(self, record: Record) -> None:
        """Stores a step's parts and counts, where it has some, with the newest row."""
        numbers = record.extra_numbers()
        if not numbers:
            return
        if self.extras.shape[1] != len(numbers):
            self.extras = torch.zeros(
                self.capacity, len(numbers), dtype=torch.float64, device=self.device
            )
        row = torch.stack([number.detach().double() for number in numbers])
        self.extras.index_copy_(0, self.next_row - 1, row.unsqueeze(0))

    def write_fingerprint(self, fingerprint: Tensor) -> None:
        """Stores a fingerprint with the newest row."""
        self.fingerprints.index_copy_(0, self.next_row - 1, fingerprint.view(1))

    def read(self, start: int, stop: int) -> list[list[float]]:
        """The rows from `start` up to `stop`, on the host: one wait for the device."""
        rows: list[list[float]] = read_to_host(self.table[start:stop])
        return rows

    def read_fingerprints(self, start: int, stop: int) -> list[int]:
        """The fingerprints of these rows, on the host: one wait for the device."""
        fingerprints: list[int] = read_to_host(self.fingerprints[start:stop])
        return fingerprints

    def read_extras(self, start: int, stop: int) -> list[list[float]]:
        """Parts and counts of these rows, on the host: one wait for the device, where any are."""
        if self.extras.shape[1] == 0:
            return [[] for _ in range(start, stop)]
        extras: list[list[float]] = read_to_host(self.extras[start:stop])
        return extras

    def _allocate_table(self, columns: int) -> None:
        if self.table.shape[1] == 0:
            self.table = torch.zeros(
                self.capacity, columns, dtype=torch.float64, device=self.device
            )


def write_row(
    table: Tensor,
    next_row: Tensor,
    record: Record,
    *,
    keep_loss: bool,
    advance: bool,
    use_kernel: bool = True,
) -> None:
    """Writes a record into row `next_row` of the table; `advance` then adds 1 to `next_row`.

    With `keep_loss` it goes into the row before, all but its loss, and `next_row` stays. On CUDA,
    where `use_kernel` allows it, one kernel does it; that leaves out a row beyond the table.
    """
    advance = advance and not keep_loss
    kernel_wrote = False
    if use_kernel and triton_runs_on(table.device):
        kernel_wrote = _write_by_kernel(
            table, next_row, record, keep_loss=keep_loss, advance=advance
        )
    if kernel_wrote:
        return

    numbers = [getattr(record, name) for name in ROW_FIELDS]
    row = torch.cat([number.reshape(-1).double() for number in (*numbers, record.lr)])
    if keep_loss:
        assert ROW_FIELDS[0] == "loss"
        table[:, 1:].index_copy_(0, next_row - 1, row[None, 1:])
    else:
        table.index_copy_(0, next_row, row[None])
    if advance:
        next_row += 1


def _write_by_kernel(
    table: Tensor, next_row: Tensor, record: Record, *, keep_loss: bool, advance: bool
) -> bool:
    """Whether the kernel has written the row."""
    values = {name: getattr(record, name) for name in (*ROW_FIELDS, "lr")}
    dtypes = [value.dtype for value in values.values()]
    compiled_for = (table.device, table.shape[1], keep_loss, advance, *dtypes)

    arguments = dict(
        record_table=table,
        record_row=next_row,
        **values,
        record_rows=len(table),
        record_stride=table.stride(0),
        lr_stride=record.lr.stride(0) if record.lr.dim() else 0,
        GROUPS=record.lr.numel(),
        KEEP_LOSS=keep_loss,
        ADVANCE=advance,
        FIELD_COUNT=len(ROW_FIELDS),
    )

    def run_kernel() -> None:
        from halfstep.kernels import update_triton

        arguments["COLUMNS"] = row_columns(update_triton.RECORD_FIELDS)
        launch(table.device, [(update_triton.record, 1, arguments, 1)])

    return run_or_fall_back(
        _kernel_works, compiled_for, run_kernel, MORE_UPDATE_KERNELS, SAME_RESULTS
    )
