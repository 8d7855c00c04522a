"""Records kept on the device until the host looks in: one row per step, one copy per visit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.engine.captured.record_buffer import pack
from halfstep.step import Record
from halfstep.step.state import ROW_FIELDS
from halfstep.utils.device_values import read_to_host


class RecordBuffer:
    """float64 rows. `at` [1] is the row of the next step: a device counter, so that a replay finds its place."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows, self.device = rows, device
        self.use_kernels = (
            False  # a long run: batches may be gathered by a kernel that has to be compiled
        )
        self.table = torch.empty(
            rows, 0, dtype=torch.float64, device=device
        )  # as wide as the first row
        self.prints = torch.zeros(rows, dtype=torch.int64, device=device)
        self.next_row = torch.zeros(1, dtype=torch.int64, device=device)

    def reset(self) -> None:
        self.next_row.zero_()
        self.prints.zero_()

    def write(self, values: Sequence[Tensor]) -> None:
        """One row, in a graph or out of it."""
        self._fit(sum(v.numel() for v in values))
        row = torch.cat([v.detach().reshape(-1).to(torch.float64) for v in values])
        self.table.index_copy_(0, self.next_row, row.unsqueeze(0))
        self.next_row.add_(1)

    def record(self, record: Record, *, tail: bool = False) -> None:
        """A step's record as a row; `tail`: the newest row again, but for its own loss, by the flush that followed."""
        self._fit(len(ROW_FIELDS) + record.lr.numel())
        fields = {name: getattr(record, name) for name in (*ROW_FIELDS, "lr")}
        pack(
            self.table,
            self.next_row,
            **fields,
            keep_loss=tail,
            move=not tail,
            compiled=self.use_kernels,
        )

    def _fit(self, width: int) -> None:
        if not self.table.shape[1]:
            self.table = torch.zeros(self.rows, width, dtype=torch.float64, device=self.device)

    def note(self, fingerprint: Tensor) -> None:
        """A fingerprint for the newest row."""
        self.prints.index_copy_(0, self.next_row - 1, fingerprint.view(1))

    def read(self, first: int, last: int) -> list[list[float]]:
        """Rows first..last−1 as numbers: the host's visit."""
        rows: list[list[float]] = read_to_host(self.table[first:last])
        return rows

    def read_prints(self, first: int, last: int) -> list[int]:
        numbers: list[int] = read_to_host(self.prints[first:last])
        return numbers
