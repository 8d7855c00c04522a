"""A checkpoint that replaces another one of its step: killed anywhere, a whole one is there."""

import signal
import warnings
from pathlib import Path

import pytest
import torch

from halfstep import checkpoint
from halfstep.checkpoint import CheckpointError, latest, listing, load, name_of, save, verify
from halfstep.checkpoint.runs import finish_replacements, replace
from tests.support.kill_points import run_killed
from tests.support.killed_run import fork_server
from tests.support.run_endings import differences, run_ending, undisturbed_ending

OLD = {"which": "old", "w": torch.arange(1000.0)}
NEW = {"which": "new", "w": torch.arange(1000.0) + 1}
KILLED = -signal.SIGKILL
TERMINATED = 143


def damage(path: Path) -> None:
    content = bytearray((path / "tensors.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "tensors.safetensors").write_bytes(content)


def check_names(root: Path) -> None:
    """What the next writer leaves: the one checkpoint under its own name, and it is whole."""
    finish_replacements(root)
    assert [path.name for path in listing(root)] == [name_of(3)]
    verify(root / name_of(3))


def test_killed_before_every_call_a_whole_one_is_there(tmp_path: Path) -> None:
    """The old or the new, under a name that `latest` finds; from the end on the new."""
    seen = []
    call_count = None
    while call_count is None:
        root = tmp_path / str(len(seen))
        path = save(root / name_of(3), OLD)
        call_count = run_killed(lambda path=path: replace(path, NEW), len(seen) + 1)
        newest = latest(root)  # a Notice would be an error
        assert newest is not None
        assert checkpoint.step_of(newest) == 3
        seen.append(load(newest).tree["which"])
        check_names(root)
        assert load(path).tree["which"] == seen[-1]
    assert len(seen) > 20
    assert seen == sorted(seen, reverse=True)  # first the old ones, then the new ones
    assert set(seen) == {"old", "new"}


def test_killed_again_while_the_next_one_makes_up_for_it(tmp_path: Path) -> None:
    """Killed while both are there, or only the new one; then before every call of the next."""
    unfinished = []
    call = 1
    finished = False
    while not finished:
        path = save(tmp_path / f"probe{call}" / name_of(3), OLD)
        finished = run_killed(lambda path=path: replace(path, NEW), call) is not None
        if [folder.name for folder in listing(path.parent)] != [name_of(3)]:
            unfinished.append(call)
        call += 1
    assert len(unfinished) > 5

    for first_kill in (unfinished[0], unfinished[-1]):
        second_kill = 0
        finished = False
        while not finished:
            second_kill += 1
            root = tmp_path / f"{first_kill}-{second_kill}"
            path = save(root / name_of(3), OLD)
            assert run_killed(lambda path=path: replace(path, NEW), first_kill) is None
            again = run_killed(lambda root=root: finish_replacements(root), second_kill)
            finished = again is not None
            newest = latest(root)
            assert newest is not None
            assert load(newest).tree["which"] == "new"
            check_names(root)


def test_a_damaged_replacement_does_not_cost_the_old_one(tmp_path: Path) -> None:
    path = save(tmp_path / name_of(3), OLD)
    new = save(tmp_path / f"{name_of(3)}.new", NEW)
    damage(new)
    with pytest.warns(match="1 checkpoint broken"):
        assert latest(tmp_path) == path
    check_names(tmp_path)
    assert load(path).tree["which"] == "old"


def test_a_replacement_that_is_not_whole_on_the_disk_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that keeps other bytes than it was given."""
    path = save(tmp_path / name_of(3), OLD)

    def save_and_damage(folder: Path, tree: object, extra_files: object) -> None:
        save(folder, tree)
        damage(folder)

    monkeypatch.setattr("halfstep.checkpoint.runs.save", save_and_damage)
    with pytest.raises(CheckpointError, match="expected sha256"):
        replace(path, NEW)
    check_names(tmp_path)
    assert load(path).tree["which"] == "old"


CALLS = 90  # of the system in a resume, a replacement and the save after it: some 70


@pytest.mark.parametrize(
    "calls",
    [
        range(1, CALLS, 6),
        pytest.param(range(1, CALLS), marks=pytest.mark.slow, id="slow-all"),
    ],
)
def test_stopped_in_an_evaluation_then_killed_with_keep_1(calls: range, tmp_path: Path) -> None:
    """The resumed run replaces its only checkpoint, which was saved before the evaluation."""
    case = {"every_steps": 6, "keep": 1}
    stop = ("evaluation", 6, 1, signal.SIGTERM)
    expected = undisturbed_ending(case)
    for call in calls:
        folder = tmp_path / str(call)
        assert fork_server()(folder, stop, **case) == TERMINATED
        assert fork_server()(folder, ("system", 6, call), **case) == KILLED
        with warnings.catch_warnings(action="error"):
            newest = latest(folder / "run")
        assert newest is not None, call
        assert checkpoint.step_of(newest) >= 6
        assert fork_server()(folder, **case) == 0
        assert differences(run_ending(folder), expected) == []
