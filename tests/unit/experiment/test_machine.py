"""Other processes on the cores of a comparison: counted by the system's own figures, and what is said of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from halfstep.compare import Settings, compare
from halfstep.compare.progress import Lines
from halfstep.engine import Run
from halfstep.experiment import machine
from halfstep.experiment.machine import BusyMachineWarning, CpuUsage, busy_machine_advice

COMMAND = "halfstep compare --seeds 5"
RUN = Run(None, 1, None)
linux = pytest.mark.skipif(
    not Path("/proc/stat").is_file(), reason="the system tells nothing of its cores"
)


@pytest.mark.parametrize(
    ("others", "cores", "threads", "advised"),
    [
        (None, 2, 2, None),  # not told
        (0.4, 2, 2, None),  # housekeeping
        (1.0, 2, 2, 1),
        (1.0, 2, 1, None),  # one thread finds a core
        (2.0, 2, 2, 1),  # there is always one to ask for
        (3.0, 8, 8, 5),
        (3.0, 8, 5, None),
        (7.9, 8, 4, 1),
    ],
)
def test_the_advice_is_as_many_threads_as_find_a_core(
    others: float | None, cores: int, threads: int, advised: int | None
) -> None:
    found = busy_machine_advice(others, cores, threads, COMMAND)
    if advised is None:
        assert found is None
    else:
        assert found is not None
        assert found.endswith(f"Quicker: OMP_NUM_THREADS={advised} {COMMAND} --fresh")


def test_the_advice_fits_the_caller() -> None:
    assert str(busy_machine_advice(1.0, 2, 2, f"{COMMAND} --fresh")).count("--fresh") == 1
    python = busy_machine_advice(1.0, 2, 2, "halfstep.compare.compare")
    assert str(python).endswith("Quicker: torch.set_num_threads(1), and compare(…, fresh=True)")


@linux
def test_a_process_that_works_is_counted() -> None:
    """A child that spins for half a second, while this process waits for it."""
    spin = "import time; print(flush=True); end = time.time() + 0.5\nwhile time.time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        count = CpuUsage()
        child.wait()
        busy = count.cores_of_others()
    assert busy is not None
    assert busy > 0.3  # of one core, which others may want too


@linux
def test_it_is_said_once_and_early(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + (os.cpu_count() or 1))
    monkeypatch.setattr(CpuUsage, "cores_of_others", lambda self: 1.0)
    monkeypatch.setattr(machine, "FIRST_CHECK_S", 0.0)
    crowd = BusyMachineWarning(torch.device("cpu"), COMMAND, told.append)
    for _ in range(2):
        crowd.begin(RUN)
        crowd.visit(RUN)
        crowd.visit(RUN)
    assert len(told) == 1
    assert "other processes take 1.0 of" in told[0]


@linux
def test_a_comparison_says_it_among_its_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CpuUsage, "cores_of_others", lambda self: 1.0)
    monkeypatch.setattr(machine, "FIRST_CHECK_S", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + (os.cpu_count() or 1))
    settings = Settings(
        precisions=("fp32", "O2"), seeds=(0,), epochs=1, samples=64, test_samples=10, device="cpu"
    )
    compare(settings, tmp_path / "out", progress=Lines(), command=COMMAND)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["note:", "[1/2]", "[2/2]"]
    assert COMMAND in lines[1]


def test_a_device_with_units_of_its_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(CpuUsage, "cores_of_others", lambda self: 100.0)
    monkeypatch.setattr(machine, "FIRST_CHECK_S", 0.0)
    crowd = BusyMachineWarning(torch.device("cuda"), COMMAND, told.append)
    crowd.begin(RUN)
    crowd.visit(RUN)
    assert told == []


def test_a_system_that_does_not_tell_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for content in (None, "", "cpu x y\n", "cpu 1 2\n"):
        path = tmp_path / "stat"
        if content is not None:
            path.write_text(content)
        monkeypatch.setattr(machine, "CPU_COUNTERS", path)
        assert CpuUsage().cores_of_others() is None
