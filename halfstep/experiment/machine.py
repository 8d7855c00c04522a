"""Whether other processes take the cores that a comparison's threads wait for each other on, said while it runs."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from halfstep.engine import Callback, Run

_STAT = Path("/proc/stat")
_FIRST_S = (
    1.0  # the counters tick a hundred times a second; looked at again when the run is twice as old
)
_WORTH = 0.5  # cores: less than that taken by others is every machine's own housekeeping


class Load:
    """Counts from here on, on Linux: the time that the cores were at work, and this process's own part of it."""

    def __init__(self) -> None:
        self._start = _counters()

    def others(self) -> float | None:
        """Cores that other processes had, on average; None where the system does not tell."""
        now = _counters()
        if self._start is None or now is None:
            return None
        wall, busy, own = (b - a for a, b in zip(self._start, now, strict=True))
        return max(0.0, (busy - own) / wall)


def _counters() -> tuple[float, float, float] | None:
    """Seconds: of the clock, of all cores at work, of this process at work."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = [int(word) for word in _STAT.read_text().partition("\n")[0].split()[1:9]]
        idle = ticks[3] + ticks[4]  # the other is waiting for the disk
        return (
            time.perf_counter(),
            (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"),
            time.process_time(),
        )
    return None


class Crowd(Callback):
    """Says once, early in a run, that its threads have to share their cores, and what is quicker."""

    writes = True  # nothing of it decides a run

    def __init__(self, device: torch.device, command: str, tell: Callable[[str], None]) -> None:
        self._threads = torch.get_num_threads() if device.type == "cpu" else 1
        self._command, self._tell = command, tell
        self._load, self._begun, self._due, self._told = Load(), 0.0, 0.0, False

    def begin(self, run: Run) -> None:
        self._load, self._begun, self._due = Load(), time.perf_counter(), _FIRST_S

    def visit(self, run: Run) -> None:
        spent = time.perf_counter() - self._begun
        if self._told or spent < self._due:
            return
        self._due = 2 * spent
        text = said(self._load.others(), os.cpu_count() or 1, self._threads, self._command)
        if text:
            self._told = True
            self._tell(text)


def said(others: float | None, cores: int, threads: int, command: str) -> str | None:
    """What to say, if anything, and the way out: as many threads as find a core; --fresh, for they decide bits too."""
    if others is None or others < _WORTH:
        return None
    free = max(1, int(cores - others + _WORTH))
    if threads <= free:
        return None
    again = f"OMP_NUM_THREADS={free} {command}{'' if '--fresh' in command.split() else ' --fresh'}"
    if not command.startswith("halfstep "):
        again = f"torch.set_num_threads({free}), and compare(…, fresh=True)"
    return (
        f"other processes take {others:.1f} of {cores} cores: {threads} threads, which wait for each other, may be "
        f"many times slower, and times say little. Quicker: {again}"
    )
