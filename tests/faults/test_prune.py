"""Old checkpoints are removed only when those that stay are whole, whatever was done to them."""

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep as hs
from halfstep import checkpoint
from halfstep.callbacks.checkpoint import Checkpoint
from halfstep.checkpoint import CheckpointError, name_of, prune, save, verify
from halfstep.checkpoint.verified import RECENT_CHANGE_S, VerifiedCheckpoints
from halfstep.engine import Callback, Run
from tests.support.run_endings import Snapshots, differences, leaves_by_path, train_model

FILES = ("tensors.safetensors", "tree.json", "manifest.json")


def flip_bit(path: Path) -> None:
    """One bit in the middle: the size stays."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def flip_bit_unseen(path: Path) -> None:
    """One bit, written in place, with the old times of the file."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)[0]
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "bit": flip_bit,
    "bit, old times": flip_bit_unseen,
    "cut": cut,
    "gone": Path.unlink,
}


def is_whole(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def whole_steps(root: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.listing(root) if is_whole(path)]


def save_steps(root: Path, *steps: int) -> None:
    for step in steps:
        save(root / name_of(step), {"step": step, "w": torch.full((100,), float(step))})


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_ones_are_never_counted(damage: str, file: str, keep: int, tmp_path: Path) -> None:
    """The newest two are damaged: those that stay are `keep` whole ones."""
    save_steps(tmp_path, 1, 2, 3, 4, 5)
    for step in (4, 5):
        DAMAGES[damage](tmp_path / name_of(step) / file)
    removed = prune(tmp_path, keep)
    assert whole_steps(tmp_path) == [2, 3][-keep:]
    assert removed == [tmp_path / name_of(step) for step in (1, 2, 3)[:-keep]]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("pause_s", [0.0, 2 * RECENT_CHANGE_S])
def test_damage_between_two_calls_is_seen(
    damage: str, file: str, pause_s: float, tmp_path: Path
) -> None:
    """What one call found whole, and remembers, is damaged before the next call."""
    verified = VerifiedCheckpoints()
    save_steps(tmp_path, 1, 2, 3)
    time.sleep(pause_s)
    prune(tmp_path, 2, verified=verified)
    DAMAGES[damage](tmp_path / name_of(3) / file)
    save_steps(tmp_path, 4)
    prune(tmp_path, 2, verified=verified)
    assert whole_steps(tmp_path) == [2, 4]


def test_what_is_known_to_be_whole_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prune of a long run reads what is new, once, and the newest in any case."""
    verified = VerifiedCheckpoints()
    read = []
    monkeypatch.setattr(
        "halfstep.checkpoint.verified.verify", lambda path: read.append(path.name[-1])
    )
    save_steps(tmp_path, 1, 2, 3)
    time.sleep(2 * RECENT_CHANGE_S)
    for step in (4, 5, 6):
        save_steps(tmp_path, step)
        time.sleep(2 * RECENT_CHANGE_S)
        prune(tmp_path, 3, verified=verified)
        prune(tmp_path, 99, verified=verified)
    assert "".join(read) == "43256"
    os.utime(tmp_path / name_of(5) / "tree.json")
    save_steps(tmp_path, 7)
    prune(tmp_path, 3, verified=verified)
    assert "".join(read) == "43256" + "75"
    time.sleep(2 * RECENT_CHANGE_S)
    assert verified.examine(tmp_path / name_of(7))
    prune(tmp_path, 1, verified=verified)
    assert "".join(read) == "4325675" + "7" + "7"


class WholeAtEveryVisit(Callback):
    """After each visit: which whole checkpoints there are."""

    last = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.steps: list[list[int]] = []

    def visit(self, run: Run) -> None:
        self.steps.append(whole_steps(self.root))


@pytest.mark.parametrize("best", [None, "loss"])
@pytest.mark.parametrize("damage", ["bit", "bit, old times"])
def test_a_run_behind_damaged_checkpoints_keeps_what_it_saves(
    damage: str, best: str | None, tmp_path: Path
) -> None:
    """The newest two of a run are damaged. It resumes before them, with keep=1."""

    def train(folder: Path, *, epochs: int, every_steps: int, keep: int) -> dict[str, Any]:
        snapshots = Snapshots()
        saver = Checkpoint(folder, every_steps=every_steps, every_epochs=None, keep=keep, best=best)
        seen = WholeAtEveryVisit(folder)
        train_model(tmp_path, saver, snapshots, seen, epochs=epochs, resume="auto")
        return {"steps": seen.steps, "end": leaves_by_path(snapshots.trees["end"])}

    expected = train(tmp_path / "whole", epochs=2, every_steps=3, keep=5)
    train(tmp_path / "cut", epochs=1, every_steps=3, keep=5)
    for step in (6, 7):
        DAMAGES[damage](tmp_path / "cut" / name_of(step) / "tensors.safetensors")
    with pytest.warns(hs.Notice, match="2 checkpoints broken, .*step-000000003 is used instead"):
        resumed = train(tmp_path / "cut", epochs=2, every_steps=1, keep=1)

    # Each save is there after its own visit. Older ones: the best, and the one before a skip.
    newest = [steps[-1] for steps in resumed["steps"]]
    assert newest == list(range(4, 15))
    assert all(len(steps) <= 3 for steps in resumed["steps"])
    saver_state = ".writers.Checkpoint"
    different = differences(resumed["end"], expected["end"])
    assert [name for name in different if not name.startswith(saver_state)] == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.latest(tmp_path / "cut") == tmp_path / "cut" / name_of(14)
