"""The machine that a run is made on: its description, peak memory, and other processes' load.

The load is counted in /proc/stat, and not taken from os.getloadavg(): the load average counts our
own threads too, and needs a minute to follow. The warning has to come in a run's first seconds.
"""

import contextlib
import ctypes
import gc
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import halfstep
from halfstep.engine import Callback, Run

CPU_COUNTERS = Path("/proc/stat")
CPU_DESCRIPTION = Path("/proc/cpuinfo")
PROCESS_STATUS = Path("/proc/self/status")
PROCESS_CLEAR_REFS = Path("/proc/self/clear_refs")

# The system's counters tick a hundred times a second. Later checks come at twice the time of the
# one before.
FIRST_CHECK_S = 1.0

MIN_BUSY_CORES = 0.5  # every machine's own housekeeping takes less


def describe_environment(device: torch.device) -> dict[str, Any]:
    """What results and times depend on: device, versions, number of threads."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if is_cuda else None,
        "threads": torch.get_num_threads(),
        "halfstep": halfstep.__version__,
        "platform": platform.platform(),
    }


def _cpu_name() -> str:
    """The processor's model name where Linux has it, else its architecture."""
    try:
        lines = CPU_DESCRIPTION.read_text().splitlines()
    except OSError:
        lines = []
    model_names = [
        line.partition(":")[2].strip() for line in lines if line.startswith("model name")
    ]
    if model_names and model_names[0]:
        return f"CPU, {model_names[0]}"
    return f"CPU, {platform.processor() or platform.machine()}"


# Memory


class PeakMemory:
    """The peak memory of a run, counted from the construction of this object.

    On CUDA it is the most that tensors took on the device, data included. On a CPU all runs share
    one process: it is the most by which the process's resident set grew.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = "device" if device.type == "cuda" else "process"
        self._resident_before: int | None = None

        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            return

        # glibc keeps freed memory. Without this the run would live in what the last one left.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        # "5" sets the process's peak (VmHWM) to what is resident now.
        with contextlib.suppress(OSError):
            PROCESS_CLEAR_REFS.write_text("5")
            self._resident_before = _process_memory("VmRSS")

    def read(self) -> int | None:
        """Bytes; None where the system does not count them."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        if self._resident_before is None:
            return None
        peak = _process_memory("VmHWM")
        if peak is None:
            return None
        return max(0, peak - self._resident_before)


def _process_memory(field: str) -> int | None:
    """A field of this process's status, in bytes; None where the system has no such file."""
    with contextlib.suppress(OSError):
        match = re.search(rf"^{field}:\s+(\d+) kB", PROCESS_STATUS.read_text(), re.MULTILINE)
        return int(match[1]) * 1024 if match else None
    return None


# Other processes


class CpuTimes(NamedTuple):
    """Seconds since some fixed moment."""

    clock: float
    all_processes: float  # of all cores together
    this_process: float


class CpuUsage:
    """The work of other processes on this machine's cores, from the construction on (Linux)."""

    def __init__(self) -> None:
        self._start = _read_cpu_times()

    def cores_of_others(self) -> float | None:
        """Cores that other processes used on average; None where the system does not count."""
        now = _read_cpu_times()
        if self._start is None or now is None:
            return None
        clock = now.clock - self._start.clock
        all_processes = now.all_processes - self._start.all_processes
        this_process = now.this_process - self._start.this_process
        return max(0.0, (all_processes - this_process) / clock)


def _read_cpu_times() -> CpuTimes | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        # "cpu user nice system idle iowait irq softirq steal …", the sum over all cores.
        first_line = CPU_COUNTERS.read_text().partition("\n")[0]
        ticks = [int(word) for word in first_line.split()[1:9]]
        idle_ticks = ticks[3] + ticks[4]
        busy_ticks = sum(ticks) - idle_ticks
        return CpuTimes(
            clock=time.perf_counter(),
            all_processes=busy_ticks / os.sysconf("SC_CLK_TCK"),
            this_process=time.process_time(),
        )
    return None


class BusyMachineWarning(Callback):
    """Warns once, early in a run, when threads have to share their cores with other processes."""

    writes = True  # it decides nothing of a run, so a replay leaves it out

    def __init__(self, device: torch.device, command: str, warn: Callable[[str], None]) -> None:
        self._threads = torch.get_num_threads() if device.type == "cpu" else 1
        self._command = command
        self._warn = warn
        self._has_warned = False
        self._usage = CpuUsage()
        self._begin_time = 0.0
        self._next_check_s = 0.0

    def begin(self, run: Run) -> None:
        self._usage = CpuUsage()
        self._begin_time = time.perf_counter()
        self._next_check_s = FIRST_CHECK_S

    def visit(self, run: Run) -> None:
        elapsed_s = time.perf_counter() - self._begin_time
        if self._has_warned or elapsed_s < self._next_check_s:
            return
        self._next_check_s = 2 * elapsed_s
        advice = busy_machine_advice(
            self._usage.cores_of_others(), os.cpu_count() or 1, self._threads, self._command
        )
        if advice is not None:
            self._has_warned = True
            self._warn(advice)


def busy_machine_advice(
    cores_of_others: float | None, cores: int, threads: int, command: str
) -> str | None:
    """The warning, and a command with as many threads as there are free cores.

    None where every thread has a core. The command has --fresh: another number of threads adds in
    another order, so the results of runs that are done would not fit.
    """
    if cores_of_others is None or cores_of_others < MIN_BUSY_CORES:
        return None
    free_cores = max(1, int(cores - cores_of_others + MIN_BUSY_CORES))
    if threads <= free_cores:
        return None

    if not command.startswith("halfstep "):
        quicker = f"torch.set_num_threads({free_cores}), and compare(…, fresh=True)"
    elif "--fresh" in command.split():
        quicker = f"OMP_NUM_THREADS={free_cores} {command}"
    else:
        quicker = f"OMP_NUM_THREADS={free_cores} {command} --fresh"
    return (
        f"other processes take {cores_of_others:.1f} of {cores} cores: {threads} threads, which "
        f"wait for each other, may be many times slower, and times say little. Quicker: {quicker}"
    )
