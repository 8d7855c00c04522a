"""Folders, disks, which checkpoints stay, data and steps of other kinds."""

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
from halfstep.callbacks.logs import JSONLLog
from halfstep.engine import Callback, Run
from halfstep.model import Model
from tests.support.killed_run import build_model, seed_all
from tests.support.run_endings import (
    RaisesAt,
    Snapshots,
    differences,
    leaves_by_path,
    train_and_log,
    train_model,
)

# folders and disks


@contextmanager
def limit_file_size(count: int) -> Iterator[None]:
    """Files grow to `count` bytes at most: a real error of the system in the middle of a save."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def saved_steps(folder: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.listing(folder)]


def test_a_save_that_fails_is_a_notice_and_the_next_one_works(tmp_path: Path) -> None:
    """The log waits too, training is undisturbed, and the best is the best on the disk."""
    expected = train_and_log(tmp_path / "whole", model=build_model(init=1024.0))

    def fill_disk(run: Run) -> None:
        if run.position == 2:
            limit.enter_context(limit_file_size(100))
        if run.position == 5:
            limit.close()

    with ExitStack() as limit, warnings.catch_warnings(record=True, action="always") as caught:
        saver = Checkpoint(tmp_path / "cut" / "run", every_steps=1, keep=99, best="acc")
        ending = train_and_log(
            tmp_path / "cut",
            Lambda(visit=fill_disk),
            model=build_model(init=1024.0),
            sink=1,
            saver=saver,
        )
    messages = [str(warning.message) for warning in caught]
    notices = [message for message in messages if "was not saved" in message]
    assert [re.findall("step-0*([0-9]+)", text)[0] for text in notices] == ["2", "3", "4"]
    assert "training goes on: " in notices[0]
    assert "File too large. Allow files of " in notices[0]
    assert saved_steps(tmp_path / "cut" / "run") == [1, *range(5, 15)]
    assert saver.best_step in saved_steps(tmp_path / "cut" / "run")
    may_differ = (".writers.Checkpoint", ".callbacks.Lambda")
    different = differences(ending, expected)
    assert [name for name in different if not name.startswith(may_differ)] == []


def test_a_save_that_fails_at_the_end_is_an_error(tmp_path: Path) -> None:
    limit = ExitStack()
    fill = Lambda(epoch_end=lambda run: limit.enter_context(limit_file_size(100)))
    with (
        limit,
        pytest.warns(hs.Notice, match="step-000000007 was not saved, training goes on"),
        pytest.raises(checkpoint.CheckpointError, match="File too large") as caught,
    ):
        train_model(tmp_path, fill, Checkpoint(tmp_path / "run"), epochs=1)
    assert "raised by the callback Checkpoint in end" in caught.value.__notes__[0]


# in a mount namespace of its own, so that nothing stays mounted
DISK = """
import os, subprocess, sys, warnings
sys.path.insert(0, sys.argv[2])
import torch
from contextlib import suppress
from tests.support.killed_run import Checkpoint, build_model, train_data
from halfstep.callbacks.history import Lambda
from halfstep.callbacks.logs import JSONLLog
torch.set_num_threads(1)
root = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", root], check=True)
def fill(run):
    if run.position == 3:
        with open(f"{root}/filler", "wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
    if run.position == 5:
        os.remove(f"{root}/filler")
warnings.simplefilter("always")
callbacks = [Checkpoint(f"{root}/run", every_steps=1), Lambda(visit=fill)]
with warnings.catch_warnings(record=True) as caught:
    build_model().fit(1, train_data(), sink=1, callbacks=callbacks)
messages = [str(warning.message).splitlines()[0] for warning in caught]
print(messages, sorted(os.listdir(f"{root}/run")))
"""


def test_a_full_disk_in_the_middle_of_training(tmp_path: Path) -> None:
    if subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True
    ).returncode:
        pytest.skip("this system lets no test mount a disk of its own")
    tests = str(Path(__file__).parents[2])
    command = ["unshare", "-rm", sys.executable, "-c", DISK, str(tmp_path), tests]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    messages, checkpoints = done.stdout.split("] [")
    assert messages.count("was not saved, training goes on") == 2
    assert "expected room for" in messages
    assert re.findall("step-0*([0-9]+)", checkpoints) == ["1", "2", "5", "6", "7"]


def test_an_impossible_folder_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "deep", Path("/proc/halfstep")):
        with pytest.raises(
            checkpoint.CheckpointError,
            match=r"expected a folder that can be written.*Name another folder",
        ):
            train_model(tmp_path, Checkpoint(folder), RaisesAt("step", 0))


def test_a_read_only_folder_is_refused_before_the_first_step() -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    user = os.geteuid()
    folder.chmod(0o555)
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(
            checkpoint.CheckpointError, match=f"{folder} cannot: Permission denied. Name another"
        ):
            train_model(folder, Checkpoint(folder), RaisesAt("step", 0))
    finally:
        os.seteuid(user)
        folder.rmdir()


def test_another_runs_checkpoints_are_refused_and_left_alone(tmp_path: Path) -> None:
    train_model(tmp_path, Checkpoint(tmp_path, every_steps=1, keep=99), epochs=1)
    advice = (
        r'up to step-000000007. Go on from them with fit\(resume="auto"\), or name another folder'
    )
    with pytest.raises(FileExistsError, match=advice):
        train_model(tmp_path, Checkpoint(tmp_path, keep=1), epochs=1)
    assert saved_steps(tmp_path) == list(range(1, 8))
    older = tmp_path / checkpoint.name_of(3)
    with pytest.raises(
        FileExistsError,
        match=r"from step 3, and .* holds checkpoints of later steps, up to step-000000007",
    ):
        train_model(tmp_path, Checkpoint(tmp_path, keep=1), epochs=1, resume=older)
    assert saved_steps(tmp_path) == list(range(1, 8))
    run = train_model(tmp_path, Checkpoint(tmp_path / "elsewhere"), epochs=1, resume=older)
    assert (run.position, saved_steps(tmp_path / "elsewhere")) == (7, [7])


def damage(path: Path) -> None:
    content = bytearray((path / "tensors.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "tensors.safetensors").write_bytes(content)


def test_a_damaged_newest_one_is_passed_over_and_replaced(tmp_path: Path) -> None:
    def end(folder: Path, epochs: int) -> dict[str, Any]:
        snapshots = Snapshots()
        train_model(
            tmp_path,
            Checkpoint(folder, every_steps=3, every_epochs=None),
            snapshots,
            epochs=epochs,
            resume="auto",
        )
        return leaves_by_path(snapshots.trees["end"])

    expected = end(tmp_path / "whole", 2)
    end(tmp_path / "cut", 1)
    damage(tmp_path / "cut" / checkpoint.name_of(6))
    damage(tmp_path / "cut" / checkpoint.name_of(7))
    with pytest.warns(hs.Notice, match=r"2 checkpoints broken, .*step-000000003 is used instead"):
        resumed = end(tmp_path / "cut", 2)
    assert differences(resumed, expected) == []
    # Nobody wanted step 7 again: it is damaged still, and not one of the five that are kept.
    assert saved_steps(tmp_path / "cut") == [3, 6, 7, 9, 12, 14]
    assert checkpoint.verify(tmp_path / "cut" / checkpoint.name_of(6))


def test_a_folder_of_only_damaged_ones_is_refused(tmp_path: Path) -> None:
    train_model(tmp_path, Checkpoint(tmp_path), epochs=1)
    damage(tmp_path / checkpoint.name_of(7))
    with (
        pytest.warns(hs.Notice, match="no whole one is left"),
        pytest.raises(
            FileExistsError,
            match=r"only broken checkpoints, up to step-000000007. Remove them, or name",
        ),
    ):
        train_model(tmp_path, Checkpoint(tmp_path), epochs=1, resume="auto")


class StatelessStep:
    """A step of the user's own."""

    def __init__(self) -> None:
        seed_all(0)
        self.net = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def __call__(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.net(x) * torch.rand(len(x), 1)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


class StepWithState(StatelessStep):
    def state_dict(self) -> dict[str, Any]:
        return {"net": dict(self.net.state_dict()), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])


def test_a_custom_step_needs_a_state(tmp_path: Path) -> None:
    data = hs.data.Dataset({"x": torch.randn(20, 3)}).batch(4)
    cell = StatelessStep()
    with pytest.raises(
        TypeError,
        match=r"has no state_dict and load_state_dict.*Give the step both, or leave the Check",
    ):
        Model(cell.net, step=cell).fit(1, data, callbacks=[Checkpoint(tmp_path)])
    assert saved_steps(tmp_path) == []
    whole = StepWithState()
    Model(whole.net, step=whole).fit(2, data)
    seed_all(0)
    cut = StepWithState()
    Model(cut.net, step=cut).fit(1, data, callbacks=[Checkpoint(tmp_path)])
    again = StepWithState()
    Model(again.net, step=again).fit(2, data, callbacks=[Checkpoint(tmp_path)], resume="auto")
    assert torch.equal(again.net.weight, whole.net.weight)


# which are kept


def test_keep_and_best(tmp_path: Path) -> None:
    """The newest two and the best, as the scores in the history say; a tie is not better."""
    run = train_model(tmp_path, Checkpoint(tmp_path, every_steps=1, keep=2, best="loss"), epochs=2)
    best = min((entry for entry in run.history), key=lambda entry: entry["valid_loss"])["step"]
    assert saved_steps(tmp_path) == sorted({best, 13, 14})
    with pytest.raises(
        ValueError,
        match=r"Checkpoint: expected metric as one of the scores 'loss', 'acc', got 'auc'",
    ):
        train_model(tmp_path, Checkpoint(tmp_path / "other", best="auc"), RaisesAt("step", 0))


def test_every_so_many_seconds(tmp_path: Path) -> None:
    wait = Lambda(step=lambda run, row: time.sleep(0.3) if row.global_step in (3, 5) else None)
    saver = Checkpoint(tmp_path, every_epochs=None, every_seconds=0.25)
    train_model(tmp_path, wait, saver, epochs=1, sink=1, valid=None, valid_every_steps=0)
    assert {3, 5, 7} <= set(saved_steps(tmp_path))
    assert len(saved_steps(tmp_path)) <= 5  # a slow machine may save once more


def test_of_two_folders_the_newest_is_gone_on_from(tmp_path: Path) -> None:
    def savers() -> list[Callback]:
        return [
            Checkpoint(tmp_path / "a", every_epochs=1),
            Checkpoint(tmp_path / "b", every_steps=5),
        ]

    first = Snapshots()
    second = Snapshots()
    train_model(tmp_path, *savers(), first)
    shutil.rmtree(tmp_path / "a" / checkpoint.name_of(14))
    shutil.rmtree(tmp_path / "b" / checkpoint.name_of(14))
    assert (saved_steps(tmp_path / "a"), saved_steps(tmp_path / "b")) == ([7], [5, 7, 10])
    run = train_model(tmp_path, *savers(), second, resume="auto")
    assert run.resumed is not None
    assert checkpoint.step_of(run.resumed) == 10
    ends = [leaves_by_path(snapshots.trees["end"]) for snapshots in (first, second)]
    assert differences(*ends) == []


# data of other kinds


def test_a_shuffled_dataloader_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its order comes from torch's generator; so does dropout."""
    x = torch.randn(26, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, torch.arange(26) % 3), batch_size=4, shuffle=True)
    first = Snapshots(9)
    second = Snapshots()
    train_model(tmp_path, first, data=loader)
    path = checkpoint.save(tmp_path / "nine", first.trees["at"])
    with pytest.warns(
        hs.Notice, match="DataLoader cannot seek: its first 2 batches are fetched again"
    ):
        train_model(tmp_path, second, data=loader, resume=path)
    assert (
        differences(leaves_by_path(second.trees["end"]), leaves_by_path(first.trees["end"])) == []
    )


def test_a_sampler_that_shuffles_by_epoch_is_set_every_epoch(tmp_path: Path) -> None:
    """torch's DistributedSampler repeats its order unless set_epoch is called; resumed too."""
    epochs_set: list[int] = []

    class Sampler(DistributedSampler[Any]):
        def set_epoch(self, epoch: int) -> None:
            epochs_set.append(epoch)
            super().set_epoch(epoch)

    x = torch.randn(24, 1, 8, 8)
    source = TensorDataset(x, torch.arange(24) % 3)
    loader = DataLoader(source, batch_size=8, sampler=Sampler(source, num_replicas=1, rank=0))
    first = Snapshots(6)
    train_model(tmp_path, first, data=loader, epochs=3, valid=None, valid_every_steps=0)
    path = checkpoint.save(tmp_path / "six", first.trees["at"])
    train_model(tmp_path, data=loader, epochs=4, valid=None, valid_every_steps=0, resume=path)
    assert epochs_set == [0, 1, 2, 2, 3]


def test_data_that_can_be_gone_through_only_once_is_refused(tmp_path: Path) -> None:
    class Once:
        def __init__(self) -> None:
            self.batches = [(torch.randn(4, 1, 8, 8), torch.arange(4) % 3)] * 3

        def __iter__(self) -> Iterator[Any]:
            while self.batches:
                yield self.batches.pop()

    with pytest.raises(
        ValueError,
        match=r"at least one batch in a pass, got none in pass 1. Can the data be gone thr",
    ):
        train_model(
            tmp_path, data=Once(), epochs=2, steps_per_epoch=3, valid=None, valid_every_steps=0
        )


@pytest.mark.parametrize("refusal", ["a new run", "only damaged ones", "an older checkpoint"])
def test_a_refused_folder_leaves_the_log_alone(refusal: str, tmp_path: Path) -> None:
    """The log of the run that is there is not begun anew, and not cut back."""

    def fit(resume: str | None) -> None:
        log = JSONLLog(tmp_path / "log", overwrite=True)
        saver = Checkpoint(tmp_path / "run", every_steps=3)
        with warnings.catch_warnings(action="ignore"):
            train_model(tmp_path, log, saver, epochs=1, resume=resume)

    fit(None)
    lines = (tmp_path / "log").read_bytes()
    resume = {"only damaged ones": "auto", "a new run": None}.get(
        refusal, str(tmp_path / "run" / checkpoint.name_of(3))
    )
    if refusal == "only damaged ones":
        for path in checkpoint.listing(tmp_path / "run"):
            damage(path)
    with pytest.raises(FileExistsError, match="Checkpoint: "):
        fit(resume)
    assert (tmp_path / "log").read_bytes() == lines
