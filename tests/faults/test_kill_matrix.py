"""Runs over a matrix of data, precisions, cycles and visits, killed at random times."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def kill_matrix(results: Path, *options: Any) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, what it printed, and the results."""
    command = [sys.executable, ROOT / "tools" / "kill_matrix.py", "--results", results, *options]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    lines = results.read_text().splitlines() if results.exists() else []
    return done.returncode, done.stdout + done.stderr, [json.loads(line) for line in lines]


def may_be_announced(result: dict[str, Any]) -> bool:
    """Persistent workers, and streams that draw with each sample."""
    data = result["combination"]["data"]
    draws = result["combination"]["with"] in ("augmentation", "all three")
    return "persistent" in data or ("streaming" in data and draws)


@pytest.mark.parametrize(
    ("kills", "options"),
    [
        pytest.param(12, ("--kills", 12, "--seed", 9), id="12"),
        # All 288 combinations, of which the first 12 have two kills.
        pytest.param(108, ("--kills", 300, "--last", 96), id="300-a", marks=pytest.mark.slow),
        pytest.param(
            96, ("--kills", 300, "--first", 96, "--last", 192), id="300-b", marks=pytest.mark.slow
        ),
        pytest.param(96, ("--kills", 300, "--first", 192), id="300-c", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(3600)
def test_killed_runs_end_with_equal_bits_or_were_announced(
    kills: int, options: tuple[Any, ...], tmp_path: Path
) -> None:
    code, text, results = kill_matrix(tmp_path / "results", *options)
    assert code == 0, text
    assert sum(result["kills"] for result in results) == kills
    for result in results:
        allowed = ["equal"]
        if may_be_announced(result):
            allowed += ["announced, equal", "announced, different"]
        assert result["outcome"] in allowed, result


def test_one_silent_difference_fails_and_is_listed(tmp_path: Path) -> None:
    combination = {"data": "Dataset", "precision": "O2", "accumulate": 4, "sink": 1, "with": "EMA"}
    result = {
        "combination": combination,
        "kills": 3,
        "runs_missed": 0,
        "outcome": "different",
        "details": ".step.net.last.weight",
    }
    path = tmp_path / "results"
    path.write_text(json.dumps(result) + "\n")
    code, text, _ = kill_matrix(path, "--kills", 0)
    assert code == 1
    assert "different: Dataset, with EMA: 1 combinations (.step.net.last.weight)" in text
