"""SIGTERM to one rank or all: all stop at the same step with a checkpoint, and go on exactly."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_runs import ending, errors_of, run_to_end, undisturbed
from tests.support.run_endings import differences

SIGTERM_CODE = 143

# Case → what happens, the step at which all ranks stop. A signal inside a step (its number is one
# more than `at`) travels with the exchange of the next one.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "rank 1": ({"what": "SIGTERM", "at": 2, "ranks": [1]}, 4),
    "rank 0": ({"what": "SIGTERM", "at": 2, "ranks": [0]}, 4),
    "all ranks": ({"what": "SIGTERM", "at": 6, "ranks": [0, 1]}, 8),
    "rank 1 in an evaluation": (
        {"what": "SIGTERM", "at": 4, "ranks": [1], "moment": "evaluation"},
        4,
    ),
    "rank 0 at a visit": ({"what": "SIGTERM", "at": 4, "ranks": [0], "moment": "visit"}, 4),
}
RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One job that goes through all cases."""
    job_folder = tmp_path_factory.mktemp("signals")
    cases = {
        name: {"disturb": disturb, "every_steps": None} for name, (disturb, _) in CASES.items()
    }
    assert run_to_end(job_folder, RANKS, cases=cases) == 0, errors_of(job_folder)
    return job_folder


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_stop_and_go_on_exactly(name: str, folder: Path, tmp_path: Path) -> None:
    _, step = CASES[name]
    for rank in range(RANKS):
        ended = json.loads((folder / name / f"ended-{rank}.json").read_text())
        assert ended["code"] == SIGTERM_CODE
        assert ended["step"] == step
        assert ended["reason"] in ("SIGTERM", "a signal to another rank")
    expected = undisturbed(tmp_path, every_steps=None)
    # The checkpoint of the signal is one more than an undisturbed run has.
    found = ending(folder / name)
    found["kept"] = expected["kept"]
    assert differences(found, expected) == []
