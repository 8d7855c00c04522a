"""Folders, disks, what is kept, data and steps of other kinds: what a Checkpoint meets outside of the usual run."""

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import halfstep as hs
from halfstep import checkpoint
from halfstep.callbacks.checkpoint import Checkpoint
from halfstep.callbacks.history import Lambda
from halfstep.engine import Callback, Run
from halfstep.model import Model
from tests.support.killed_run import build, seed
from tests.support.run_endings import Fails, Snap, differences, fit, leaves, logged

# folders and disks


@contextmanager
def largest_file(count: int) -> Iterator[None]:
    """Every file that is written grows to `count` bytes at most: a real error of the system in the middle of a save."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.listing(folder)]


def test_a_save_that_fails_is_a_notice_and_the_next_one_works(tmp_path: Path) -> None:
    """The log waits too; training is that of a run to which nothing happened; the best is the best on the disk."""
    expected = logged(tmp_path / "whole", model=build(init=1024.0))

    def full(run: Run) -> None:
        limit.enter_context(
            largest_file(100)
        ) if run.position == 2 else limit.close() if run.position == 5 else None

    with ExitStack() as limit, warnings.catch_warnings(record=True, action="always") as said:
        saver = Checkpoint(tmp_path / "cut" / "run", every_steps=1, keep=99, best="acc")
        found = logged(
            tmp_path / "cut", Lambda(visit=full), model=build(init=1024.0), sink=1, saver=saver
        )
    notices = [str(each.message) for each in said if "was not saved" in str(each.message)]
    assert [re.findall("step-0*([0-9]+)", text)[0] for text in notices] == ["2", "3", "4"]
    assert "training goes on: " in notices[0]
    assert "File too large. Allow files of " in notices[0]
    assert names(tmp_path / "cut" / "run") == [1, *range(5, 15)]
    assert saver.best_step in names(tmp_path / "cut" / "run")
    known = (".writers.Checkpoint", ".callbacks.Lambda")
    assert [name for name in differences(found, expected) if not name.startswith(known)] == []


def test_a_save_that_fails_at_the_end_is_an_error(tmp_path: Path) -> None:
    limit = ExitStack()
    fill = Lambda(epoch_end=lambda run: limit.enter_context(largest_file(100)))
    with (
        limit,
        pytest.warns(hs.Notice, match="step-000000007 was not saved, training goes on"),
        pytest.raises(checkpoint.CheckpointError, match="File too large") as caught,
    ):
        fit(tmp_path, fill, Checkpoint(tmp_path / "run"), epochs=1)
    assert "raised by the callback Checkpoint in end" in caught.value.__notes__[0]


# in a mount namespace of its own, so that nothing stays mounted
DISK = """
import os, subprocess, sys, warnings
sys.path.insert(0, sys.argv[2])
import torch
from tests.support.killed_run import Checkpoint, build, train_data
from halfstep.callbacks.history import Lambda
torch.set_num_threads(1)
root = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", root], check=True)
def fill(run):
    if run.position == 3:
        with open(f"{root}/filler", "wb", buffering=0) as file, __import__("contextlib").suppress(OSError):
            while file.write(bytes(4096)):
                pass
    if run.position == 5:
        os.remove(f"{root}/filler")
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as said:
    build().fit(1, train_data(), sink=1, callbacks=[Checkpoint(f"{root}/run", every_steps=1), Lambda(visit=fill)])
print([str(each.message).splitlines()[0] for each in said], sorted(os.listdir(f"{root}/run")))
"""


def test_a_full_disk_in_the_middle_of_training(tmp_path: Path) -> None:
    if subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True
    ).returncode:
        pytest.skip("this system lets no test mount a disk of its own")
    tests = str(Path(__file__).parents[2])
    command = ["unshare", "-rm", sys.executable, "-c", DISK, str(tmp_path), tests]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said, kept = done.stdout.split("] [")
    assert said.count("was not saved, training goes on") == 2
    assert "expected room for" in said
    assert re.findall("step-0*([0-9]+)", kept) == ["1", "2", "5", "6", "7"]


def test_a_folder_that_cannot_be_is_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "deep", Path("/proc/halfstep")):
        with pytest.raises(
            checkpoint.CheckpointError,
            match=r"expected a folder that can be written.*Name another folder",
        ):
            fit(tmp_path, Checkpoint(folder), Fails("step", 0))


def test_a_read_only_folder_is_told_before_the_first_step() -> None:
    folder, user = Path(tempfile.mkdtemp(dir="/tmp")), os.geteuid()
    folder.chmod(0o555)
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(
            checkpoint.CheckpointError, match=f"{folder} cannot: Permission denied. Name another"
        ):
            fit(folder, Checkpoint(folder), Fails("step", 0))
    finally:
        os.seteuid(user)
        folder.rmdir()


def test_another_runs_checkpoints_are_refused_and_left_alone(tmp_path: Path) -> None:
    fit(tmp_path, Checkpoint(tmp_path, every_steps=1, keep=99), epochs=1)
    advice = (
        r'up to step-000000007. Go on from them with fit\(resume="auto"\), or name another folder'
    )
    with pytest.raises(FileExistsError, match=advice):
        fit(tmp_path, Checkpoint(tmp_path, keep=1), epochs=1)
    assert names(tmp_path) == list(range(1, 8))
    older = tmp_path / checkpoint.name_of(3)
    with pytest.raises(
        FileExistsError,
        match=r"from step 3, and .* holds checkpoints of later steps, up to step-000000007",
    ):
        fit(tmp_path, Checkpoint(tmp_path, keep=1), epochs=1, resume=older)
    assert names(tmp_path) == list(range(1, 8))
    run = fit(tmp_path, Checkpoint(tmp_path / "elsewhere"), epochs=1, resume=older)
    assert (run.position, names(tmp_path / "elsewhere")) == (7, [7])


def damage(path: Path) -> None:
    content = bytearray((path / "tensors.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "tensors.safetensors").write_bytes(content)


def test_a_damaged_newest_one_is_passed_over_and_replaced(tmp_path: Path) -> None:
    def end(folder: Path, epochs: int) -> dict[str, Any]:
        snap = Snap()
        fit(
            tmp_path,
            Checkpoint(folder, every_steps=3, every_epochs=None),
            snap,
            epochs=epochs,
            resume="auto",
        )
        return leaves(snap.taken["end"])

    expected = end(tmp_path / "whole", 2)
    end(tmp_path / "cut", 1)
    damage(tmp_path / "cut" / checkpoint.name_of(6))
    damage(tmp_path / "cut" / checkpoint.name_of(7))
    with pytest.warns(hs.Notice, match=r"2 broken, .*step-000000003 is used instead"):
        found = end(tmp_path / "cut", 2)
    assert differences(found, expected) == []
    assert names(tmp_path / "cut") == [6, 7, 9, 12, 14]  # of its 7 nothing was wanted again
    assert checkpoint.verify(tmp_path / "cut" / checkpoint.name_of(6))


def test_only_damaged_ones_are_told(tmp_path: Path) -> None:
    fit(tmp_path, Checkpoint(tmp_path), epochs=1)
    damage(tmp_path / checkpoint.name_of(7))
    with (
        pytest.warns(hs.Notice, match="no whole one is left"),
        pytest.raises(
            FileExistsError,
            match=r"only broken checkpoints, up to step-000000007. Remove them, or name",
        ),
    ):
        fit(tmp_path, Checkpoint(tmp_path), epochs=1, resume="auto")


class Cell:
    """A step of the user's own."""

    def __init__(self) -> None:
        seed(0)
        self.net = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def __call__(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.net(x) * torch.rand(len(x), 1)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


class Saved(Cell):
    def state_dict(self) -> dict[str, Any]:
        return {"net": dict(self.net.state_dict()), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])


def test_a_custom_step_needs_a_state(tmp_path: Path) -> None:
    data = hs.data.Dataset({"x": torch.randn(20, 3)}).batch(4)
    cell = Cell()
    with pytest.raises(
        TypeError,
        match=r"has no state_dict and load_state_dict.*Give the cell both, or leave the Check",
    ):
        Model(cell.net, step=cell).fit(1, data, callbacks=[Checkpoint(tmp_path)])
    assert names(tmp_path) == []
    whole, cut = Saved(), Saved()
    Model(whole.net, step=whole).fit(2, data)
    seed(0)
    cut = Saved()
    Model(cut.net, step=cut).fit(1, data, callbacks=[Checkpoint(tmp_path)])
    again = Saved()
    Model(again.net, step=again).fit(2, data, callbacks=[Checkpoint(tmp_path)], resume="auto")
    assert torch.equal(again.net.weight, whole.net.weight)


# which are kept


def test_keep_and_best(tmp_path: Path) -> None:
    """The newest two, and the best beside them, as the scores in the history say; a tie is not better."""
    run = fit(tmp_path, Checkpoint(tmp_path, every_steps=1, keep=2, best="loss"), epochs=2)
    best = min((entry for entry in run.history), key=lambda entry: entry["valid_loss"])["step"]
    assert names(tmp_path) == sorted({best, 13, 14})
    with pytest.raises(
        ValueError,
        match=r"Checkpoint: expected metric as one of the scores 'loss', 'acc', got 'auc'",
    ):
        fit(tmp_path, Checkpoint(tmp_path / "other", best="auc"), Fails("step", 0))


def test_every_so_many_seconds(tmp_path: Path) -> None:
    wait = Lambda(step=lambda run, row: time.sleep(0.3) if row.global_step in (3, 5) else None)
    fit(tmp_path, wait, Checkpoint(tmp_path, every_epochs=None, every_seconds=0.25), epochs=1, sink=1, valid=None,
        valid_every_steps=0)  # fmt: skip
    assert {3, 5, 7} <= set(names(tmp_path))
    assert len(names(tmp_path)) <= 5  # a slow machine may save once more


def test_of_two_folders_the_newest_is_gone_on_from(tmp_path: Path) -> None:
    def savers() -> list[Callback]:
        return [
            Checkpoint(tmp_path / "a", every_epochs=1),
            Checkpoint(tmp_path / "b", every_steps=5),
        ]

    snap, other_snap = Snap(), Snap()
    fit(tmp_path, *savers(), snap)
    shutil.rmtree(tmp_path / "a" / checkpoint.name_of(14))
    shutil.rmtree(tmp_path / "b" / checkpoint.name_of(14))
    assert (names(tmp_path / "a"), names(tmp_path / "b")) == ([7], [5, 7, 10])
    run = fit(tmp_path, *savers(), other_snap, resume="auto")
    assert run.resumed is not None
    assert checkpoint.step_of(run.resumed) == 10
    assert differences(leaves(other_snap.taken["end"]), leaves(snap.taken["end"])) == []


# data of other kinds


def test_a_shuffled_dataloader_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its order comes from torch's generator; so does dropout."""
    x = torch.randn(26, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, torch.arange(26) % 3), batch_size=4, shuffle=True)
    first, second = Snap(9), Snap()
    fit(tmp_path, first, data=loader)
    path = checkpoint.save(tmp_path / "nine", first.taken["at"])
    with pytest.warns(
        hs.Notice, match="DataLoader cannot seek: its first 2 batches are fetched again"
    ):
        fit(tmp_path, second, data=loader, resume=path)
    assert differences(leaves(second.taken["end"]), leaves(first.taken["end"])) == []


def test_a_sampler_that_shuffles_by_epoch_is_told_every_epoch(tmp_path: Path) -> None:
    """torch's DistributedSampler gives the same order again unless set_epoch is called; after a resume too."""
    told: list[int] = []

    class Sampler(DistributedSampler[Any]):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)
            super().set_epoch(epoch)

    x = torch.randn(24, 1, 8, 8)
    source = TensorDataset(x, torch.arange(24) % 3)
    loader = DataLoader(source, batch_size=8, sampler=Sampler(source, num_replicas=1, rank=0))
    first = Snap(6)
    fit(tmp_path, first, data=loader, epochs=3, valid=None, valid_every_steps=0)
    path = checkpoint.save(tmp_path / "six", first.taken["at"])
    fit(tmp_path, data=loader, epochs=4, valid=None, valid_every_steps=0, resume=path)
    assert told == [0, 1, 2, 2, 3]


def test_data_that_can_be_gone_through_once_only_is_told(tmp_path: Path) -> None:
    class Once:
        def __init__(self) -> None:
            self.left = [(torch.randn(4, 1, 8, 8), torch.arange(4) % 3)] * 3

        def __iter__(self) -> Iterator[Any]:
            while self.left:
                yield self.left.pop()

    with pytest.raises(
        ValueError,
        match=r"at least one batch in a pass, got none in pass 1. Can the data be gone thr",
    ):
        fit(tmp_path, data=Once(), epochs=2, steps_per_epoch=3, valid=None, valid_every_steps=0)
