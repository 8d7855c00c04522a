"""A run's folder has one writer at a time.

With real processes, killed ones, forks, threads, and systems without locks.
"""

import ctypes
import errno
import os
import platform
import signal
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import checkpoint
from halfstep.callbacks import Checkpoint, JSONLLog, Lambda
from halfstep.checkpoint.lock import LOCK_FILE, hold_lock
from tests.support.killed_run import build_model, train_data
from tests.support.run_endings import RaisesAt, train_model


def in_use_message(pid: int) -> str:
    return f"is in use: process {pid} on {socket.gethostname()} writes there"


@contextmanager
def forked_process(act: Callable[[int], Any]) -> Iterator[tuple[int, int]]:
    """A fork of this process that calls `act(pipe)`; yields its pid and the pipe's other end.

    Autograd does not survive a fork, so the fork must not train.
    """
    ours, theirs = os.pipe()
    # Python warns about threads, which the fork does not use.
    with warnings.catch_warnings(action="ignore"):
        pid = os.fork()
    if pid == 0:
        try:
            act(theirs)
            os._exit(0)
        except BaseException as error:
            os.write(theirs, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
    os.close(theirs)
    try:
        yield pid, ours
    finally:
        os.close(ours)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def hold_for_a_minute(folder: Path) -> Callable[[int], None]:
    def act(pipe: int) -> None:
        with hold_lock(folder):
            os.write(pipe, b"held")
            time.sleep(60)

    return act


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run of one epoch, with its log beside its checkpoints."""
    train_model(
        tmp_path, Checkpoint(tmp_path / "run"), JSONLLog(tmp_path / "run" / "log.jsonl"), epochs=1
    )
    return tmp_path / "run"


def file_contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOCK_FILE
    }


def test_a_second_process_is_refused_before_it_touches_anything(saved: Path) -> None:
    """Neither the checkpoints, nor the log of another callback, nor the model."""
    model = build_model()
    before = file_contents(saved)
    weights = {name: (t, t.clone()) for name, t in model.net.state_dict(keep_vars=True).items()}
    with forked_process(hold_for_a_minute(saved)) as (pid, pipe):
        assert os.read(pipe, 9) == b"held"
        log = JSONLLog(saved / "log.jsonl", overwrite=True)
        with pytest.raises(checkpoint.CheckpointError, match=in_use_message(pid)) as caught:
            train_model(saved, log, Checkpoint(saved, keep=1), model=model, resume="auto")
        assert "Wait until it has ended, stop it, or name another folder" in str(caught.value)
        assert file_contents(saved) == before
        for name, t in model.net.state_dict(keep_vars=True).items():
            assert t is weights[name][0]
            assert torch.equal(t, weights[name][1])
        assert (
            train_model(saved, Checkpoint(saved.parent / "other"), epochs=1).epoch == 1
        )  # the advice


def test_reading_needs_no_lock(saved: Path) -> None:
    with forked_process(hold_for_a_minute(saved)) as (_, pipe):
        assert os.read(pipe, 9) == b"held"
        newest = checkpoint.latest(saved)
        assert newest is not None
        checkpoint.load(newest)
        build_model().load(saved)
        run = train_model(saved, Checkpoint(saved.parent / "other"), resume=saved)
        assert run.resumed == str(newest)


def test_a_killed_holder_blocks_nobody_though_its_workers_live_on(saved: Path) -> None:
    """As DataLoader workers do for some seconds: they were forked while the lock was held."""

    def act(pipe: int) -> None:
        with hold_lock(saved):
            worker = os.fork()
            if worker:
                os.write(pipe, str(worker).encode())
            time.sleep(60)

    with forked_process(act) as (pid, pipe):
        worker = int(os.read(pipe, 99))
        try:
            with pytest.raises(checkpoint.CheckpointError, match=in_use_message(pid)):
                train_model(saved, Checkpoint(saved), resume="auto")
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            os.kill(worker, 0)  # still there
            assert train_model(saved, Checkpoint(saved), resume="auto").resumed is not None
        finally:
            os.kill(worker, signal.SIGKILL)
    assert not (saved / LOCK_FILE).exists()


def test_a_fork_of_the_holder_does_not_let_go_of_its_lock(tmp_path: Path) -> None:
    def leave(pipe: int) -> None:
        stack.__exit__(None, None, None)

    stack = hold_lock(tmp_path)
    with stack:
        with forked_process(leave) as (pid, _):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert (tmp_path / LOCK_FILE).exists()
        with forked_process(hold_for_a_minute(tmp_path)) as (_, pipe):
            assert in_use_message(os.getpid()).encode() in os.read(pipe, 999)
    assert os.listdir(tmp_path) == []


def test_one_fit_after_the_other_with_the_same_folder_and_the_same_object(tmp_path: Path) -> None:
    saver = Checkpoint(tmp_path)
    model = build_model()
    train_model(tmp_path, saver, model=model, epochs=1)
    assert train_model(tmp_path, saver, model=model, resume="auto").epoch == 2
    assert train_model(tmp_path, Checkpoint(tmp_path), epochs=3, resume="auto").epoch == 3
    assert not (tmp_path / LOCK_FILE).exists()


def test_an_error_in_a_fit_frees_the_folder(tmp_path: Path) -> None:
    for at in ("begin", "step", "visit"):
        with pytest.raises(LookupError):
            train_model(tmp_path, Checkpoint(tmp_path), RaisesAt(at, 0), epochs=1, resume="auto")
    train_model(tmp_path, Checkpoint(tmp_path), epochs=1, resume="auto")


def test_two_fits_of_one_process_at_a_time(tmp_path: Path) -> None:
    """In two threads, and as two Checkpoints of one fit.

    Those would remove each other's files by their own keep=.
    """
    with pytest.raises(
        checkpoint.CheckpointError, match=r"in this very process.*name another folder"
    ):
        train_model(tmp_path, Checkpoint(tmp_path), Checkpoint(tmp_path, best="acc"))
    begun = threading.Event()
    over = threading.Event()
    first = threading.Thread(
        target=lambda: train_model(
            tmp_path, Checkpoint(tmp_path), Lambda(begin=lambda run: (begun.set(), over.wait(30)))
        )
    )
    first.start()
    try:
        assert begun.wait(30)
        with pytest.raises(checkpoint.CheckpointError, match="in this very process"):
            train_model(tmp_path, Checkpoint(tmp_path))
    finally:
        over.set()
        first.join()
    assert checkpoint.latest(tmp_path) is not None


def test_never_two_holders_whoever_comes_and_goes(tmp_path: Path) -> None:
    """The file is removed at every release and made again: four processes take turns there."""

    def act(pipe: int) -> None:
        times_held = 0
        while times_held < 25:
            try:
                with hold_lock(tmp_path):
                    # Creating it fails if another process is inside.
                    os.close(os.open(tmp_path / "inside", os.O_CREAT | os.O_EXCL))
                    os.unlink(tmp_path / "inside")
                    times_held += 1
            except checkpoint.CheckpointError:
                continue
        os.write(pipe, b"done")

    with (
        forked_process(act) as (_, a),
        forked_process(act) as (_, b),
        forked_process(act) as (_, c),
        forked_process(act) as (_, d),
    ):
        assert [os.read(pipe, 999) for pipe in (a, b, c, d)] == [b"done"] * 4
    assert os.listdir(tmp_path) == []


def refuse_flock() -> None:
    """Makes the kernel answer flock with ENOLCK, as file systems without locks do (seccomp)."""
    number = {"x86_64": 73, "aarch64": 32}[platform.machine()]
    rules = [
        (0x20, 0, 0, 0),
        (0x15, 0, 1, number),
        (0x06, 0, 0, 0x50000 | errno.ENOLCK),
        (0x06, 0, 0, 0x7FFF0000),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((38, 1, 0, 0, 0), (22, 2, ctypes.create_string_buffer(program), 0, 0)):
        if libc.prctl(*call):
            raise NotImplementedError(os.strerror(ctypes.get_errno()))


def test_where_there_are_no_locks_training_goes_on_with_a_notice(tmp_path: Path) -> None:
    def act(pipe: int) -> None:
        refuse_flock()
        with (
            warnings.catch_warnings(record=True, action="always") as caught,
            hold_lock(tmp_path / "run"),
        ):
            assert os.listdir(tmp_path / "run") == []  # no file that would lock nothing
        os.write(pipe, f"{caught[0].category.__name__}: {caught[0].message}".encode())

    with forked_process(act) as (_, pipe):
        message = os.read(pipe, 999).decode()
    if message.startswith(("NotImplementedError", "KeyError")):
        pytest.skip(f"this system lets no test refuse a call of the system: {message}")
    assert message.startswith(
        f"Notice: Checkpoint: {tmp_path}/run cannot be locked on this file system (No locks avail"
    )
    assert "see to it that no other run saves there" in message


def test_the_notice_points_at_the_users_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    net = nn.Linear(64, 3)
    model = hs.Model(
        nn.Sequential(nn.Flatten(), net),
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=0.1),
    )
    with pytest.warns(hs.Notice, match="cannot be locked") as caught:
        model.fit(1, train_data(), callbacks=Checkpoint(tmp_path))
    assert caught[0].filename == __file__
    assert checkpoint.latest(tmp_path) is not None
