"""How far the host may run ahead of the device: far enough to keep it busy, near enough to hear a signal."""

import time
from collections import deque

import torch

AHEAD_S = 0.1  # between two waits; three are under way at most
MOST = 256  # steps between two waits


class HostThrottle:
    """`tick()` after every step: now and then it waits until the device has come nearer."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stride, self._count = device, 1, 0
        self.step_s: float | None = None  # of late
        self._events: deque[tuple[torch.cuda.Event, int]] = deque()
        self._last = time.perf_counter()

    def tick(self, steps: int = 1) -> None:
        self._count += steps
        if self.device.type != "cuda" or self._count < self.stride:
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._events.append((event, self._count))
        self._count = 0
        if len(self._events) >= 3:
            done, count = self._events.popleft()
            done.synchronize()
            self._adapt(count)

    def _adapt(self, count: int) -> None:
        now = time.perf_counter()
        took, self._last = now - self._last, now
        self.step_s = took / count
        if took < AHEAD_S / 2:
            self.stride = min(self.stride * 2, MOST)
        elif took > AHEAD_S * 2:
            self.stride = max(self.stride // 2, 1)
