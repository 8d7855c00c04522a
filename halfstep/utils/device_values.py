"""Values on a device: reading them on the host without waiting, and what reads them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Operations whose result the host must know: each waits for the device.
HOST_READ_OPS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
)


def is_capturing() -> bool:
    """Whether a CUDA graph is being recorded. A torch without CUDA cannot even be asked."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def read_to_host(tensor: Tensor) -> Any:
    """The values of a tensor as (nested) lists: one wait for the device.

    On CUDA by way of pinned memory, and waiting for this copy alone.
    """
    if tensor.device.type != "cuda":
        return tensor.tolist()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    copy_done = torch.cuda.Event()
    copy_done.record(torch.cuda.current_stream(tensor.device))
    copy_done.synchronize()
    return pinned.tolist()


class AsyncHostRead:
    """Brings the values of a small device tensor to the host some calls later, without a wait.

    The values are copied to pinned memory behind the work already launched. A later call finds the
    copy complete and returns them.
    """

    def __init__(self, every_calls: int = 1) -> None:
        self.every_calls = every_calls
        self._calls = 0
        self._pinned: Tensor | None = None
        self._copy_done: torch.cuda.Event | None = None

    def poll(self, value: Callable[[], Tensor], device: torch.device) -> list[int] | None:
        """The newest values that have arrived, or None. On a CPU always the present values."""
        if device.type != "cuda":
            return [int(number) for number in value().tolist()]
        if torch.cuda.is_current_stream_capturing():  # a capture has no values
            return None

        values = None
        if self._pinned is not None and self._copy_done is not None and self._copy_done.query():
            values = [int(number) for number in self._pinned.tolist()]
            self._copy_done = None

        # One copy at a time, and not at every call: most steps have nothing to report.
        self._calls += 1
        if self._copy_done is None and self._calls % self.every_calls == 0:
            self._start_copy(value())
        return values

    def _start_copy(self, value: Tensor) -> None:
        if self._pinned is None:
            self._pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._pinned.copy_(value, non_blocking=True)
        self._copy_done = torch.cuda.Event()
        self._copy_done.record()
