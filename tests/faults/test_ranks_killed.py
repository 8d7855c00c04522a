"""A worker is killed: torchrun starts the group again, which ends as if nothing had happened."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from halfstep import checkpoint
from halfstep.checkpoint.attempts import read_attempt
from tests.support.rank_runs import (
    SAMPLES,
    ending,
    errors_of,
    launch,
    run_to_end,
    sample_counts,
    undisturbed,
)
from tests.support.run_endings import differences

ONCE_EACH = Counter(dict.fromkeys(range(SAMPLES), 1))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return undisturbed(tmp_path_factory.mktemp("alone"))


def check_ended_as(expected: dict[str, Any], folder: Path, epochs: int = 2) -> None:
    """Weights, optimizer, averages, history, random states, log bytes, names of checkpoints."""
    assert differences(ending(folder), expected) == []
    assert sample_counts(folder) == dict.fromkeys(range(epochs), ONCE_EACH)


def test_a_killed_worker(alone: dict[str, Any], tmp_path: Path) -> None:
    code = run_to_end(tmp_path, 2, restarts=1, disturb={"what": "SIGKILL", "at": 4})
    assert code == 0, errors_of(tmp_path)
    check_ended_as(alone, tmp_path)

    # The other rank has said who is missing, and the checkpoints know their attempt.
    assert "[rank0]: halfstep.errors.RankLostError: rank 0 of 2" in errors_of(tmp_path)
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    assert b'"number": 2' in checkpoint.load(newest).files["attempt.json"]
    attempt = read_attempt(tmp_path / "run")
    assert attempt is not None
    assert (attempt.number, attempt.restart, attempt.ranks) == (2, 1, 2)


@pytest.mark.slow
def test_two_then_three_ranks_then_one(alone: dict[str, Any], tmp_path: Path) -> None:
    """Each job is killed for good; the next one has another number of ranks."""
    for attempt, (ranks, at) in enumerate([(2, 3), (3, 6)]):
        disturb = {"what": "SIGKILL", "at": at, "attempt": attempt}
        assert run_to_end(tmp_path, ranks, first_attempt=attempt, disturb=disturb) != 0
        assert checkpoint.step_of(checkpoint.listing(tmp_path / "run")[-1]) == at
    assert run_to_end(tmp_path, 1, first_attempt=2) == 0, errors_of(tmp_path)
    check_ended_as(alone, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """20 times, a random one of three workers, from outside: in a step, a save, an evaluation."""
    kills = 20
    options = {"epochs": 60, "every_steps": 3}
    expected = undisturbed(tmp_path / "alone", **options)
    chance = random.Random(20)
    folder = tmp_path / "ranks"
    process = launch(folder, 3, restarts=kills, pause=0.02, **options)
    try:
        for attempt in range(kills):
            pid_files = [folder / "pids" / f"{attempt}-{rank}" for rank in range(3)]
            deadline = time.monotonic() + 120
            while not all(path.exists() and path.read_text() for path in pid_files):
                assert time.monotonic() < deadline, errors_of(folder)[-3000:]
                assert process.poll() is None, errors_of(folder)[-3000:]
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 1.2))
            os.kill(int(chance.choice(pid_files).read_text()), signal.SIGKILL)
        assert process.wait(300) == 0, errors_of(folder)[-3000:]
    finally:
        process.kill()
        process.wait()
    check_ended_as(expected, folder, epochs=60)
