"""The one door through which the host reads device values, and its counter."""

from collections.abc import Callable

import torch
from torch import Tensor


class Host:
    """Counts the reads of device values: each waits for the device."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self, value: Tensor) -> float:
        """A device value as a number."""
        self.reads += 1
        return value.item()


class Watch:
    """Learns of device flags some updates late, without waiting: a pinned copy and an event, looked at when done."""

    def __init__(self, device: torch.device, every_updates: int = 16) -> None:
        self.every, self.turn, self.cuda = every_updates, 0, device.type == "cuda"
        self._landing: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def look(self, flags: Callable[[], Tensor]) -> list[int] | None:
        """The newest flags that have reached the host, or None when there is no news."""
        if not self.cuda:
            return [int(v) for v in flags().tolist()]
        news = None
        if self._landing is not None and self._event is not None and self._event.query():
            news, self._event = [int(v) for v in self._landing.tolist()], None
        self.turn += 1
        if self._event is None and self.turn % self.every == 0:
            now = flags()
            self._landing = torch.empty(now.shape, dtype=now.dtype, pin_memory=True)
            self._landing.copy_(now, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        return news
