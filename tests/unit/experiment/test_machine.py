"""Other processes on the cores of a comparison: how they are counted, and the warning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from halfstep.compare import Settings, compare
from halfstep.compare.progress import LineProgress
from halfstep.engine import Run
from halfstep.experiment import machine
from halfstep.experiment.machine import BusyMachineWarning, CpuUsage, busy_machine_advice

COMMAND = "halfstep compare --seeds 5"
RUN = Run(None, 1, None)
MORE_THREADS_THAN_CORES = 1 + (os.cpu_count() or 1)

# A child process that is busy for half a second.
BUSY_PROGRAM = """
import time
print(flush=True)
end = time.time() + 0.5
while time.time() < end: pass
"""

linux_only = pytest.mark.skipif(
    not Path("/proc/stat").is_file(), reason="the system does not count the work of its cores"
)


def pretend_busy_cores(monkeypatch: pytest.MonkeyPatch, cores_of_others: float) -> None:
    """Other processes seem to use so many cores; the first check comes at once."""
    monkeypatch.setattr(CpuUsage, "cores_of_others", lambda self: cores_of_others)
    monkeypatch.setattr(machine, "FIRST_CHECK_S", 0.0)


@pytest.mark.parametrize(
    ("cores_of_others", "cores", "threads", "advised"),
    [
        (None, 2, 2, None),  # not counted
        (0.4, 2, 2, None),  # the system's own housekeeping
        (1.0, 2, 2, 1),
        (1.0, 2, 1, None),  # one thread finds a core
        (2.0, 2, 2, 1),  # there is always one to ask for
        (3.0, 8, 8, 5),
        (3.0, 8, 5, None),
        (7.9, 8, 4, 1),
    ],
)
def test_advice_is_as_many_threads_as_there_are_free_cores(
    cores_of_others: float | None, cores: int, threads: int, advised: int | None
) -> None:
    advice = busy_machine_advice(cores_of_others, cores, threads, COMMAND)
    if advised is None:
        assert advice is None
    else:
        assert advice is not None
        assert advice.endswith(f"Quicker: OMP_NUM_THREADS={advised} {COMMAND} --fresh")


def test_advice_fits_the_caller() -> None:
    with_fresh = busy_machine_advice(1.0, 2, 2, f"{COMMAND} --fresh")
    assert str(with_fresh).count("--fresh") == 1
    from_python = busy_machine_advice(1.0, 2, 2, "halfstep.compare.compare")
    assert str(from_python).endswith(
        "Quicker: torch.set_num_threads(1), and compare(…, fresh=True)"
    )


@linux_only
def test_a_busy_process_is_counted() -> None:
    """A child that is busy for half a second, while this process waits for it."""
    command = [sys.executable, "-c", BUSY_PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        usage = CpuUsage()
        child.wait()
        busy_cores = usage.cores_of_others()
    assert busy_cores is not None
    assert busy_cores > 0.3  # of one core, which others may want too


@linux_only
def test_the_warning_comes_once_and_early(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    pretend_busy_cores(monkeypatch, 1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: MORE_THREADS_THAN_CORES)
    warning = BusyMachineWarning(torch.device("cpu"), COMMAND, messages.append)
    for _ in range(2):
        warning.begin(RUN)
        warning.visit(RUN)
        warning.visit(RUN)
    assert len(messages) == 1
    assert "other processes take 1.0 of" in messages[0]


@linux_only
def test_a_comparison_warns_among_its_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_busy_cores(monkeypatch, 1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: MORE_THREADS_THAN_CORES)
    settings = Settings(
        precisions=("fp32", "O2"), seeds=(0,), epochs=1, samples=64, test_samples=10, device="cpu"
    )
    compare(settings, tmp_path / "out", progress=LineProgress(), command=COMMAND)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["note:", "[1/2]", "[2/2]"]
    assert COMMAND in lines[1]


def test_no_warning_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    pretend_busy_cores(monkeypatch, 100.0)
    warning = BusyMachineWarning(torch.device("cuda"), COMMAND, messages.append)
    warning.begin(RUN)
    warning.visit(RUN)
    assert messages == []


def test_a_system_without_counters_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for content in (None, "", "cpu x y\n", "cpu 1 2\n"):
        path = tmp_path / "stat"
        if content is not None:
            path.write_text(content)
        monkeypatch.setattr(machine, "CPU_COUNTERS", path)
        assert CpuUsage().cores_of_others() is None
