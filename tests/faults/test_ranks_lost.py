"""A rank that raises, exits, hangs or sees no checkpoints: the others say which one, and end."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_runs import errors_of, run_to_end

JOIN_AND_END_S = 60  # start, error, end of all processes, on a busy machine


def last_error(folder: Path, rank: int) -> str:
    """The line with which a rank's traceback ends."""
    lines = re.findall(rf"^\[rank{rank}\]: (\S.*)$", errors_of(folder), re.MULTILINE)
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exit)\b", line)]
    assert errors, errors_of(folder)[-3000:]
    return str(errors[-1])


def run_and_fail(folder: Path, ranks: int = 2, **options: Any) -> float:
    """Runs a job that fails, and nobody starts it again. Returns its seconds."""
    start = time.monotonic()
    assert run_to_end(folder, ranks, timeout=JOIN_AND_END_S, **options) != 0
    return time.monotonic() - start


@pytest.mark.slow
def test_a_rank_that_raises_is_named_by_the_others(tmp_path: Path) -> None:
    run_and_fail(tmp_path, disturb={"what": "raise", "at": 3})
    assert last_error(tmp_path, 1) == "LookupError: a mistake of the user's own"
    message = last_error(tmp_path, 0)
    assert message.startswith("halfstep.errors.RankLostError: rank 0 of 2: the losses of the lanes")
    assert "step 4: another rank did not take part: rank 1 has ended" in message
    assert "(LookupError: a mistake of the user's own), last seen at step 4" in message


@pytest.mark.slow
def test_the_first_rank_raises(tmp_path: Path) -> None:
    run_and_fail(tmp_path, 3, disturb={"what": "raise", "at": 3, "ranks": [0]})
    assert last_error(tmp_path, 0) == "LookupError: a mistake of the user's own"
    for rank in (1, 2):
        assert "rank 0 has ended (LookupError: a mistake" in last_error(tmp_path, rank)


@pytest.mark.slow
def test_a_rank_that_exits_in_the_middle(tmp_path: Path) -> None:
    run_and_fail(tmp_path, disturb={"what": "exit", "at": 3})
    message = last_error(tmp_path, 0)
    assert "rank 1 has ended (its program is over), last seen at step 4" in message


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_when_the_time_is_over(tmp_path: Path) -> None:
    """Of three ranks, two wait for the one that sleeps, in its third step."""
    options = {"group_timeout_s": 4, "disturb": {"what": "sleep", "at": 2, "ranks": [2]}}
    run_and_fail(tmp_path, 3, **options)
    expected = (
        r"rank \d of 3: the losses of the lanes, step 3: another rank did not take part: "
        r"rank 2 runs but did not come, last seen at step 3, outside of any collective for \d+ s"
    )
    # torchrun ends all when the first one has ended: one of the two is sure to say it.
    assert re.search(expected, errors_of(tmp_path)), errors_of(tmp_path)[-3000:]


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_silent(tmp_path: Path) -> None:
    options = {"group_timeout_s": 4, "disturb": {"what": "SIGSTOP", "at": 2}}
    run_and_fail(tmp_path, **options)
    message = last_error(tmp_path, 0)
    assert re.search(
        r"rank 1 has been silent for \d+ s: its process has ended or is stopped, last seen at step",
        message,
    )


@pytest.mark.slow
def test_a_folder_that_only_the_first_rank_sees(tmp_path: Path) -> None:
    """A relative path on two hosts: rank 1 finds no checkpoint where rank 0 has one."""
    options = {"own_folders": True, "checkpoint_folder": "run"}
    first = {**options, "disturb": {"what": "SIGTERM", "at": 3, "ranks": [0, 1]}}
    run_and_fail(tmp_path, **first)
    run_and_fail(tmp_path, first_attempt=1, **options)
    message = last_error(tmp_path, 1)
    assert f"rank 1 of 2, in {tmp_path / 'host-1'} on " in message
    assert "run/step-000000004: expected a checkpoint" in message
    assert "every rank reads it: its folder must be one that all hosts share" in message
    assert "reading the checkpoint failed on rank 1: CheckpointError" in last_error(tmp_path, 0)
