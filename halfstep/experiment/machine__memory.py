"""The peak memory of one run: the device's allocator on CUDA, the growth of the process elsewhere."""

import contextlib
import ctypes
import gc
import re
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """Counts from here on. On CUDA the most that tensors took, data included. On a CPU all runs share one process: the
    most by which its resident set grew over what it was here, after what earlier runs freed was given back."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._before = device, None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            return
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(
                0
            )  # glibc's: else a run would live in what the last one left
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")  # the high-water mark starts again from what is resident now
            self._before = _read("VmRSS")

    @property
    def kind(self) -> str:
        return "device" if self.device.type == "cuda" else "process"

    def read(self) -> int | None:
        """Bytes; None where the system does not tell."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        most = _read("VmHWM") if self._before is not None else None
        return None if most is None or self._before is None else max(0, most - self._before)


def _read(field: str) -> int | None:
    with contextlib.suppress(OSError):
        found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    return None
