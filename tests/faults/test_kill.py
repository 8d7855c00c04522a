"""Killed with SIGKILL at any step and moment, a resumed run ends as if nothing had happened."""

import json
import os
import random
import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.killed_run import fork_server
from tests.support.run_endings import Case, differences, run_ending, undisturbed_ending

KILLED = -signal.SIGKILL

# Each value of accumulate, sink, every_steps and the epoch's end at least once with each value of
# the option beside it.
CASES: dict[str, Case] = {
    "plain": {},
    "sgd": {"optimizer": "sgd", "every_steps": 3},
    "sink 1": {"sink": 1, "every_steps": 3},
    "sink 7": {"sink": 7, "every_steps": None},
    "sink 100": {"sink": 100, "every_steps": 1},
    "epochs of 5 steps": {"steps_per_epoch": 5, "epochs": 3, "every_steps": None},
    "cycles": {"accumulate": 4, "every_steps": 1},
    "cycles, sink 1": {"accumulate": 4, "sink": 1, "every_steps": None, "optimizer": "sgd"},
    "cycles, sink 7": {
        "accumulate": 4,
        "sink": 7,
        "every_steps": 3,
        "steps_per_epoch": 5,
        "epochs": 3,
    },
    "cycles, sink 100": {"accumulate": 4, "sink": 100, "every_steps": 3},
}
STEPS = 14
EVERY_STEP = ("plain", "cycles, sink 7")
Death = tuple[Any, ...]


def test_the_run_has_it_all() -> None:
    """Skips at first, then a growing scale; a warm-up; evaluations by steps and epochs."""
    end = undisturbed_ending(CASES["plain"])
    rows = [json.loads(line) for line in end["log"].splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    scales = [row["scale"] for row in steps]
    assert [row["skipped"] for row in steps[:6]] == [True, True, False, True, False, False]
    assert any(a < b for a, b in pairwise(scales))
    assert len({row["lr"] for row in steps}) > 4
    assert len(steps) == STEPS
    evaluated = [row["global_step"] for row in rows if row["kind"] == "evaluation"]
    assert evaluated == [3, 6, 7, 9, 12, 14]


def check_survives(folder: Path, case: Case, deaths: Sequence[Death]) -> None:
    """One run of many processes, each but the last killed at its moment."""
    for death in deaths:
        assert fork_server()(folder, death, **case) == KILLED, death
    assert fork_server()(folder, **case) == 0
    assert differences(run_ending(folder), undisturbed_ending(case)) == []


@pytest.mark.parametrize("name", CASES)
def test_killed_after_a_step_again_and_again(name: str, tmp_path: Path) -> None:
    """Two cases at every step; the others right after a skipped step and inside a cycle of 4."""
    steps = range(STEPS) if name in EVERY_STEP else (2, 9)
    check_survives(tmp_path, CASES[name], [("step", step) for step in steps])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in EVERY_STEP])
def test_killed_after_every_step(name: str, tmp_path: Path) -> None:
    check_survives(tmp_path, CASES[name], [("step", step) for step in range(STEPS)])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_killed_once_at_every_step(name: str, tmp_path: Path) -> None:
    for step in range(STEPS):
        check_survives(tmp_path / str(step), CASES[name], [("step", step)])


@pytest.mark.parametrize("name", ["plain", "cycles, sink 7"])
def test_killed_in_the_middle_of_things(name: str, tmp_path: Path) -> None:
    """Inside forward, backward, the optimizer's step and an evaluation, at rows, after a save."""
    middle = [
        ("forward", 1),
        ("backward", 2),
        ("update", 3),
        ("row", 4),
        ("evaluation", 6, 2),
        ("visit", 6),
    ]
    check_survives(
        tmp_path, CASES[name], [*middle, ("update", 8), ("evaluation", 12, 2), ("row", STEPS)]
    )


def test_killed_in_the_middle_of_saves(tmp_path: Path) -> None:
    """Killed before one of the some 40 calls of the system that a save and a prune make.

    Which call it is moves on from save to save.
    """
    case = {"epochs": 4}
    deaths = [
        ("system", step, call) for step, call in zip(range(2, 26), range(1, 48, 2), strict=True)
    ]
    check_survives(tmp_path, case, deaths)
    assert [name for name in os.listdir(tmp_path / "run") if name.startswith(".")] == []


@pytest.mark.parametrize(
    ("count", "case"),
    [
        (10, CASES["plain"]),
        (10, CASES["cycles, sink 7"]),
        *(
            pytest.param(25, case, marks=pytest.mark.slow, id=f"slow-{name}")
            for name, case in CASES.items()
        ),
    ],
)
def test_killed_at_random_moments(count: int, case: Case, tmp_path: Path) -> None:
    """From outside, at any time of a run and a little after; a run that got through is checked."""
    delays = random.Random(count)
    runs = 0
    killed = 0
    expected = undisturbed_ending(case)
    while killed < count:
        code = fork_server()(
            tmp_path / str(runs), delay=delays.uniform(0.001, 0.2), send=[signal.SIGKILL], **case
        )
        killed += code == KILLED
        if code == 0:
            assert differences(run_ending(tmp_path / str(runs)), expected) == []
            runs += 1
    check_survives(tmp_path / str(runs), case, [])
