"""How far the host may run ahead of the device: far enough to keep it busy, near enough to hear a signal."""

import time
from collections import deque

import torch

AHEAD_S = 0.1  # between two waits; three are under way at most
MOST = 256  # steps between two waits


class Pace:
    """`tick()` after every step: now and then it waits until the device has come nearer."""

    def __init__(self, device: torch.device) -> None:
        self.on = device.type == "cuda"
        self.stride, self._count = 1, 0
        self.step_s: float | None = None  # of late
        self._events: deque[torch.cuda.Event] = deque()
        self._last = time.perf_counter()

    def tick(self, steps: int = 1) -> None:
        self._count += steps
        if not self.on or self._count < self.stride:
            return
        event = torch.cuda.Event()
        event.record()
        self._events.append(event)
        self._count = 0
        if len(self._events) >= 3:
            self._events.popleft().synchronize()
            self._adapt()

    def _adapt(self) -> None:
        now = time.perf_counter()
        took, self._last = now - self._last, now
        self.step_s = took / self.stride
        if took < AHEAD_S / 2:
            self.stride = min(self.stride * 2, MOST)
        elif took > AHEAD_S * 2:
            self.stride = max(self.stride // 2, 1)
