"""A run's folder has one writer at a time: real processes, killed ones, forks, threads, systems without locks."""

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
from halfstep.checkpoint.lock import LOCK_FILE as LOCK
from halfstep.checkpoint.lock import hold_lock as held
from tests.support.killed_run import build, train_data
from tests.support.run_endings import Fails, fit


def in_use(pid: int) -> str:
    return f"is in use: process {pid} on {socket.gethostname()} writes there"


@contextmanager
def process(act: Callable[[int], Any]) -> Iterator[tuple[int, int]]:
    """A fork of this process that does `act(pipe)`; its number and the pipe's other end. Autograd does not survive a
    fork, so that it may not train."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings(
        action="ignore"
    ):  # Python remarks on threads, which the fork does not use
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


def holds(folder: Path) -> Callable[[int], None]:
    def act(pipe: int) -> None:
        with held(folder):
            os.write(pipe, b"held")
            time.sleep(60)

    return act


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run of one epoch, with its log beside its checkpoints."""
    fit(tmp_path, Checkpoint(tmp_path / "run"), JSONLLog(tmp_path / "run" / "log.jsonl"), epochs=1)
    return tmp_path / "run"


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOCK
    }


def test_a_second_process_is_refused_before_it_touches_anything(saved: Path) -> None:
    """Not the checkpoints, not the log, which another callback would cut or overwrite, and not the model."""
    model, before = build(), content(saved)
    weights = {name: (t, t.clone()) for name, t in model.net.state_dict(keep_vars=True).items()}
    with process(holds(saved)) as (pid, pipe):
        assert os.read(pipe, 9) == b"held"
        log = JSONLLog(saved / "log.jsonl", overwrite=True)
        with pytest.raises(checkpoint.CheckpointError, match=in_use(pid)) as caught:
            fit(saved, log, Checkpoint(saved, keep=1), model=model, resume="auto")
        assert "Wait until it has ended, stop it, or name another folder" in str(caught.value)
        assert content(saved) == before
        for name, t in model.net.state_dict(keep_vars=True).items():
            assert t is weights[name][0]
            assert torch.equal(t, weights[name][1])
        assert fit(saved, Checkpoint(saved.parent / "other"), epochs=1).epoch == 1  # the advice


def test_reading_needs_no_lock(saved: Path) -> None:
    with process(holds(saved)) as (_, pipe):
        assert os.read(pipe, 9) == b"held"
        newest = checkpoint.latest(saved)
        assert newest is not None
        checkpoint.load(newest)
        build().load(saved)
        run = fit(saved, Checkpoint(saved.parent / "other"), resume=saved)
        assert run.resumed == str(newest)


def test_a_killed_holder_blocks_nobody_though_its_workers_live_on(saved: Path) -> None:
    """As DataLoader workers do for some seconds: they were forked while the lock was held."""

    def act(pipe: int) -> None:
        with held(saved):
            worker = os.fork()
            if worker:
                os.write(pipe, str(worker).encode())
            time.sleep(60)

    with process(act) as (pid, pipe):
        worker = int(os.read(pipe, 99))
        try:
            with pytest.raises(checkpoint.CheckpointError, match=in_use(pid)):
                fit(saved, Checkpoint(saved), resume="auto")
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            os.kill(worker, 0)  # still there
            assert fit(saved, Checkpoint(saved), resume="auto").resumed is not None
        finally:
            os.kill(worker, signal.SIGKILL)
    assert not (saved / LOCK).exists()


def test_a_fork_of_the_holder_does_not_let_go_of_its_lock(tmp_path: Path) -> None:
    def leave(pipe: int) -> None:
        stack.__exit__(None, None, None)

    stack = held(tmp_path)
    with stack:
        with process(leave) as (pid, _):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert (tmp_path / LOCK).exists()
        with process(holds(tmp_path)) as (_, pipe):
            assert in_use(os.getpid()).encode() in os.read(pipe, 999)
    assert os.listdir(tmp_path) == []


def test_one_fit_after_the_other_with_the_same_folder_and_the_same_object(tmp_path: Path) -> None:
    saver = Checkpoint(tmp_path)
    model = build()
    fit(tmp_path, saver, model=model, epochs=1)
    assert fit(tmp_path, saver, model=model, resume="auto").epoch == 2
    assert fit(tmp_path, Checkpoint(tmp_path), epochs=3, resume="auto").epoch == 3
    assert not (tmp_path / LOCK).exists()


def test_an_error_in_a_fit_frees_the_folder(tmp_path: Path) -> None:
    for at in ("begin", "step", "visit"):
        with pytest.raises(LookupError):
            fit(tmp_path, Checkpoint(tmp_path), Fails(at, 0), epochs=1, resume="auto")
    fit(tmp_path, Checkpoint(tmp_path), epochs=1, resume="auto")


def test_two_fits_of_one_process_at_a_time(tmp_path: Path) -> None:
    """In two threads, and as two Checkpoints of one fit, which would remove each other's files by their own keep=."""
    with pytest.raises(
        checkpoint.CheckpointError, match=r"in this very process.*name another folder"
    ):
        fit(tmp_path, Checkpoint(tmp_path), Checkpoint(tmp_path, best="acc"))
    begun, over = threading.Event(), threading.Event()
    first = threading.Thread(
        target=lambda: fit(
            tmp_path, Checkpoint(tmp_path), Lambda(begin=lambda run: (begun.set(), over.wait(30)))
        )
    )
    first.start()
    try:
        assert begun.wait(30)
        with pytest.raises(checkpoint.CheckpointError, match="in this very process"):
            fit(tmp_path, Checkpoint(tmp_path))
    finally:
        over.set()
        first.join()
    assert checkpoint.latest(tmp_path) is not None


def test_never_two_holders_whoever_comes_and_goes(tmp_path: Path) -> None:
    """The file is removed with every release and made again: four processes take turns at that moment."""

    def act(pipe: int) -> None:
        taken = 0
        while taken < 25:
            try:
                with held(tmp_path):
                    inside = os.open(
                        tmp_path / "inside", os.O_CREAT | os.O_EXCL
                    )  # fails on a second one
                    os.close(inside)
                    os.unlink(tmp_path / "inside")
                    taken += 1
            except checkpoint.CheckpointError:
                continue
        os.write(pipe, b"done")

    with (
        process(act) as (_, a),
        process(act) as (_, b),
        process(act) as (_, c),
        process(act) as (_, d),
    ):
        assert [os.read(pipe, 999) for pipe in (a, b, c, d)] == [b"done"] * 4
    assert os.listdir(tmp_path) == []


def refuse_flock() -> None:
    """From here on the kernel answers flock with ENOLCK, as network file systems without locks do (seccomp)."""
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
        with warnings.catch_warnings(record=True, action="always") as said, held(tmp_path / "run"):
            assert os.listdir(tmp_path / "run") == []  # no file that would lock nothing
        os.write(pipe, f"{said[0].category.__name__}: {said[0].message}".encode())

    with process(act) as (_, pipe):
        said = os.read(pipe, 999).decode()
    if said.startswith(("NotImplementedError", "KeyError")):
        pytest.skip(f"this system lets no test refuse a call of the system: {said}")
    assert said.startswith(
        f"Notice: Checkpoint: {tmp_path}/run cannot be locked on this file system (No locks avail"
    )
    assert "see to it that no other run saves there" in said


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
    with pytest.warns(hs.Notice, match="cannot be locked") as said:
        model.fit(1, train_data(), callbacks=Checkpoint(tmp_path))
    assert said[0].filename == __file__
    assert checkpoint.latest(tmp_path) is not None
