"""An older attempt of a job that still lives can neither save nor remove checkpoints."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from halfstep import checkpoint
from halfstep.checkpoint.attempts import Job, claim_folder, read_attempt, release_older_attempt
from halfstep.checkpoint.lock import LOCK_FILE, hold_lock
from halfstep.errors import CheckpointError, NewerAttemptError
from tests.support import rank_runs
from tests.support.rank_jobs import ROOT
from tests.support.run_endings import differences

FIRST = Job("train-7", restart=0, ranks=2)
SECOND = Job("train-7", restart=1, ranks=3)
OTHER = Job("another", restart=4, ranks=2)
TREE = {"x": torch.ones(3)}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_attempts_are_counted_and_described(tmp_path: Path) -> None:
    first = claim_folder(tmp_path, FIRST)
    second = claim_folder(tmp_path, SECOND)
    assert first is not None
    assert second is not None
    assert (first.attempt.number, second.attempt.number) == (1, 2)
    assert read_attempt(tmp_path) == second.attempt
    second.check()
    expected = r"this is attempt 1 of the run in .* and attempt 2 \(process \d+ on .*\) has begun"
    with pytest.raises(NewerAttemptError, match=expected):
        first.check()


def test_a_process_alone_leaves_no_file_but_counts_after_ranks(tmp_path: Path) -> None:
    assert claim_folder(tmp_path, None) is None
    assert names_in(tmp_path) == []
    claim_folder(tmp_path, FIRST)
    alone = claim_folder(tmp_path, None)
    assert alone is not None
    assert (alone.attempt.number, alone.attempt.job) == (2, "")


def test_an_older_attempt_saves_and_removes_nothing(tmp_path: Path) -> None:
    first = claim_folder(tmp_path, FIRST)
    assert first is not None
    for step in (1, 2):
        checkpoint.save(tmp_path / checkpoint.name_of(step), TREE, guard=first.check)
    claim_folder(tmp_path, SECOND)
    before = names_in(tmp_path)
    with pytest.raises(NewerAttemptError):
        checkpoint.save(tmp_path / checkpoint.name_of(3), TREE, guard=first.check)
    with pytest.raises(NewerAttemptError):
        checkpoint.prune(tmp_path, keep=1, guard=first.check)
    assert names_in(tmp_path) == before


def test_a_save_that_a_newer_attempt_interrupts_gets_no_name(tmp_path: Path) -> None:
    """The newer one begins after the older one has looked, before its folder is renamed."""
    claim_folder(tmp_path, FIRST)
    with pytest.raises(CheckpointError):
        checkpoint.save(
            tmp_path / checkpoint.name_of(1), TREE, guard=lambda: claim_folder(tmp_path, SECOND)
        )
    assert names_in(tmp_path) == ["attempt.json"]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"number": "1"}', "{" * 5000])
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "attempt.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"attempt\.json: expected"):
        claim_folder(tmp_path, SECOND)


def test_the_lock_of_anybody_else_stays(tmp_path: Path) -> None:
    claim_folder(tmp_path, FIRST)
    with hold_lock(tmp_path):
        # This very process; another job; an attempt before the one that holds it.
        for job in (SECOND, OTHER, None):
            release_older_attempt(tmp_path, job)
            assert (tmp_path / LOCK_FILE).exists()


def start_rank(folder: Path, job: str, restart: int, pause: float) -> subprocess.Popen[str]:
    """A job of one rank as torchrun starts it, without a launcher that would end with it."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, rank_runs.__file__, str(folder), json.dumps({"pause": pause})]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)


@pytest.mark.slow
def test_an_attempt_that_wakes_up_ends_with_an_error(tmp_path: Path) -> None:
    """It is stopped in the middle of training and holds the lock. Its job is started again."""
    older = start_rank(tmp_path, "train-7", 0, pause=0.05)
    try:
        deadline = time.monotonic() + 60
        while not checkpoint.listing(tmp_path / "run"):
            assert time.monotonic() < deadline
            assert older.poll() is None
            time.sleep(0.01)
        older.send_signal(signal.SIGSTOP)

        # Another job is refused, as always; the next attempt of this one takes over.
        other = start_rank(tmp_path, "another", 1, pause=0)
        assert "is in use: process" in other.communicate(timeout=60)[1]
        newer = start_rank(tmp_path, "train-7", 1, pause=0)
        errors = newer.communicate(timeout=60)[1]
        assert newer.returncode == 0, errors
        left_by_newer = rank_runs.ending(tmp_path)
        names = names_in(tmp_path / "run")

        older.send_signal(signal.SIGCONT)
        errors = older.communicate(timeout=60)[1]
    finally:
        older.kill()
        older.wait()
    assert older.returncode == 1
    expected = r"NewerAttemptError: Checkpoint: this is attempt 1 of .* attempt 2 \(process"
    assert re.search(expected, errors), errors
    assert names_in(tmp_path / "run") == names
    assert differences(rank_runs.ending(tmp_path), left_by_newer) == []
