"""Logs on disks that fail, really: lines wait, training goes on, and its results are there."""

import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep as hs
from halfstep.callbacks import Checkpoint, CSVLog, JSONLLog
from halfstep.engine import Run
from tests.support.failing_disk import failing_disk, fill_up, small_tmpfs
from tests.unit.callbacks.test_monitors import fit, make_model

WRITERS: dict[str, Callable[..., Any]] = {"CSVLog": CSVLog, "JSONLLog": JSONLLog}
EPOCHS = 20
STEPS = EPOCHS * 13

# Where only fsync fails, the log is longer, 70 KiB and more. What the disk has already can still be
# written, and a disk in memory has it in pieces of up to 16 KiB.
LONG_EPOCHS = 60
LONG_STEPS = LONG_EPOCHS * 13


def whole_log(writer: str, folder: Path, epochs: int = EPOCHS) -> bytes:
    fit(epochs, WRITERS[writer](folder / "whole"), sink=1)
    return (folder / "whole").read_bytes()


def at_step(actions: dict[int, Callable[[], object]]) -> hs.Lambda:
    """Does something at a step, before the logs see its visit."""

    def visit(run: Run) -> None:
        if run.position in actions and not run.epoch_over:
            actions[run.position]()

    return hs.Lambda(visit=visit)


def messages(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if issubclass(w.category, hs.Notice)]


@pytest.mark.parametrize("writer", WRITERS)
def test_lines_that_could_not_be_synced_are_written_again(writer: str, tmp_path: Path) -> None:
    """fsync fails at checkpoints from step 60 to 640: no line is lost, one notice is given."""
    expected = whole_log(writer, tmp_path, LONG_EPOCHS)
    states: dict[int, Any] = {}
    with failing_disk(tmp_path) as disk:
        path = disk.inside / "log"
        log = WRITERS[writer](path)

        def check_that_only_fsync_fails() -> None:
            with (disk.inside / "probe").open("wb", buffering=0) as file:
                assert file.write(bytes(1 << 16)) == 1 << 16
                with pytest.raises(OSError, match=r"space|error"):
                    os.fsync(file.fileno())

        watch = at_step({40: disk.fail, 41: check_that_only_fsync_fails, 640: disk.heal})
        look = hs.Lambda(visit=lambda run: states.update({run.position: log.state_dict()}))
        saver = Checkpoint(tmp_path / "run", every_steps=20, keep=9)
        with warnings.catch_warnings(record=True, action="always") as caught:
            run = fit(LONG_EPOCHS, watch, log, look, saver, sink=1)
        assert run.position == LONG_STEPS
        assert path.read_bytes() == expected
    assert len([m for m in messages(caught) if "cannot be written" in m]) == 1, messages(caught)
    # While it failed, checkpoints held what was not sure to be on the disk.
    waiting = states[620]["waiting"]
    assert len(waiting) >= 60
    assert expected.startswith(expected[: states[620]["offset"]] + "".join(waiting).encode())
    assert states[660]["waiting"] == []


@pytest.mark.parametrize("writer", WRITERS)
def test_a_log_that_stays_unwritten_costs_nothing_else(writer: str, tmp_path: Path) -> None:
    """The disk of the log fails to the end: fit returns, the last checkpoint has the lines."""
    expected = whole_log(writer, tmp_path)
    with failing_disk(tmp_path) as disk:
        path = disk.inside / "log"
        saver = Checkpoint(tmp_path / "run")
        with warnings.catch_warnings(record=True, action="always") as caught:
            run = fit(
                EPOCHS,
                at_step({40: disk.fail}),
                WRITERS[writer](path),
                saver,
                sink=1,
                of=make_model(),
            )
        assert (run.position, run.error, len(run.history)) == (STEPS, None, EPOCHS)
        weights = {name: value.clone() for name, value in run.model.net.state_dict().items()}
        told = [m for m in messages(caught) if "lines could not be written to" in m]
        assert len(told) == 1, messages(caught)
        assert "Nothing else of the run is lost" in told[0]

        # As the notice says: make room, and resume.
        disk.heal()
        saver = Checkpoint(tmp_path / "run")
        run = fit(EPOCHS, WRITERS[writer](path), saver, sink=1, of=make_model(), resume="auto")
        assert path.read_bytes() == expected
    for name, value in run.model.net.state_dict().items():
        assert torch.equal(value, weights[name])


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_tmpfs(writer: str, tmp_path: Path) -> None:
    expected = whole_log(writer, tmp_path)
    with small_tmpfs(tmp_path / "small", 1 << 17) as folder:
        filler = folder / "filler"

        def fill() -> None:
            fill_up(filler)

        actions = {40: fill, 200: filler.unlink}
        with warnings.catch_warnings(record=True, action="always") as caught:
            fit(EPOCHS, at_step(actions), WRITERS[writer](folder / "log", times=False), sink=1)
        assert (folder / "log").read_bytes() == expected
    told = [m for m in messages(caught) if "cannot be written" in m]
    assert len(told) == 1, messages(caught)


@pytest.mark.parametrize("writer", WRITERS)
def test_an_old_log_stays_until_the_new_one_can_be_written(writer: str, tmp_path: Path) -> None:
    """overwrite=True on a full disk: the old lines are whole until the new ones are."""
    expected = whole_log(writer, tmp_path)
    old = b"the log of another run\n" * 200
    seen: dict[int, bytes] = {}
    with small_tmpfs(tmp_path / "small", 1 << 17) as folder:
        path = folder / "log"
        path.write_bytes(old)
        filler = folder / "filler"
        fill_up(filler)
        log = WRITERS[writer](path, overwrite=True)
        look = hs.Lambda(visit=lambda run: seen.update({run.position: path.read_bytes()}))
        with warnings.catch_warnings(record=True, action="always") as caught:
            fit(EPOCHS, log, at_step({200: filler.unlink}), look, sink=1)
        assert path.read_bytes() == expected
        assert [file.name for file in folder.iterdir()] == ["log"]
    assert seen[1] == old
    assert seen[199] == old
    assert seen[201].startswith(expected[: len(seen[201])])
    assert len([m for m in messages(caught) if "cannot be written" in m]) == 1, messages(caught)


# In a mount namespace of its own, so that nothing stays mounted.
MOUNTED_FILE = """
import subprocess, sys
subprocess.run(["mount", "--bind", sys.argv[1], sys.argv[2]], check=True)
from halfstep.callbacks.logs import LogFile
log = LogFile("CSVLog", sys.argv[2], overwrite=True)
log.open("kind,epoch\\n")
log.add("step,1\\n")
log.close()
"""


def test_a_log_that_cannot_be_replaced_is_cut(tmp_path: Path) -> None:
    """A file that is a mount, as containers have them, can be written but not replaced."""
    source = tmp_path / "source"
    path = tmp_path / "log"
    source.write_text("old\n" * 20)
    path.touch()
    probe = ["unshare", "-rm", "mount", "--bind", str(source), str(path)]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("this system lets no test mount a file")
    command = ["unshare", "-rm", sys.executable, "-c", MOUNTED_FILE, str(source), str(path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    assert source.read_text() == "kind,epoch\nstep,1\n"


@pytest.mark.parametrize("writer", WRITERS)
def test_a_device_that_takes_nothing(writer: str, tmp_path: Path) -> None:
    """/dev/full: every write fails with ENOSPC, and fsync with EINVAL."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        run = fit(EPOCHS, WRITERS[writer]("/dev/full"), Checkpoint(tmp_path / "run"), sink=1)
    assert run.position == STEPS
    told = messages(caught)
    assert len([m for m in told if "cannot be written" in m]) == 1, told
    assert len([m for m in told if "lines could not be written to /dev/full" in m]) == 1, told


def test_a_pipe_which_cannot_be_synced(tmp_path: Path) -> None:
    """A reader gets every line; fsync of a pipe is EINVAL, which is no error of the log."""
    expected = whole_log("JSONLLog", tmp_path)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(path.read_bytes()))
    reader.start()
    fit(EPOCHS, JSONLLog(path), Checkpoint(tmp_path / "run", every_steps=50), sink=1)
    reader.join(timeout=10)
    assert received == [expected]
    assert all(json.loads(line)["kind"] == "step" for line in received[0].splitlines())
