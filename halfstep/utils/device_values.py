"""Device values that reach the host without anybody waiting for them."""

from collections.abc import Callable

import torch
from torch import Tensor


class AsyncHostRead:
    """Learns of a device tensor some calls late: a copy to pinned memory and an event, looked at when it is done."""

    def __init__(self, every_calls: int = 1) -> None:
        self.every, self._turn = every_calls, 0
        self._landing: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def poll(self, value: Callable[[], Tensor], device: torch.device) -> list[int] | None:
        """The newest values that have arrived, or None when there is no news; on a CPU always the present ones."""
        if device.type != "cuda":
            return [int(v) for v in value().tolist()]
        if torch.cuda.is_current_stream_capturing():  # a capture has no values
            return None
        news = None
        if self._landing is not None and self._event is not None and self._event.query():
            news, self._event = [int(v) for v in self._landing.tolist()], None
        self._turn += 1
        if self._event is None and self._turn % self.every == 0:
            self._send(value())
        return news

    def _send(self, value: Tensor) -> None:
        if self._landing is None:
            self._landing = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._landing.copy_(value, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()
