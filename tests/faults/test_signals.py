"""SIGTERM and SIGINT: a run ends at its next visit with a checkpoint, and goes on exactly."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from halfstep import checkpoint
from halfstep.callbacks.checkpoint import Checkpoint
from halfstep.callbacks.history import Lambda
from halfstep.engine import Callback, Row, Run
from tests.support.killed_run import build_model, fork_server, train_data, valid_data
from tests.support.run_endings import differences, run_ending, undisturbed_ending

TERM = signal.SIGTERM
INT = signal.SIGINT
EXIT = {TERM: 143, INT: 130}  # the latter for a KeyboardInterrupt, as a shell shows it

# When the process sends itself the signal: (moment, step, n for its n-th occurrence from there on).
MOMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "before the first step": (("step", 0), {"every_steps": None}),
    "in forward": (("forward", 4), {"every_steps": None}),
    "inside a long sink": (("step", 4), {"every_steps": None, "sink": 100}),
    "inside a cycle": (("backward", 5), {"every_steps": None, "accumulate": 4, "sink": 100}),
    "while rows are handed out": (("row", 2), {"every_steps": None, "sink": 7}),
    "in an evaluation by steps": (("evaluation", 6, 2), {"every_steps": None}),
    "in an evaluation at an epoch's end": (
        ("evaluation", 7, 2),
        {"every_steps": None, "accumulate": 4},
    ),
    "in the last evaluation": (("evaluation", 14, 1), {"every_steps": None}),
    "during a save": (("system", 6, 9), {"every_steps": 3}),
    "between a visit and the next step": (("visit", 6), {"every_steps": None}),
    "at an epoch's last visit": (("visit", 7), {"every_steps": 1, "steps_per_epoch": 7}),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_a_signal_ends_the_run_and_a_resume_is_exact(name: str, tmp_path: Path) -> None:
    death, case = MOMENTS[name]
    number = (TERM, INT)[len(name) % 2]
    moment = (*death, 1)[:3]
    assert fork_server()(tmp_path, (*moment, number), **case) == EXIT[number]
    assert fork_server().seconds < 5
    position = checkpoint.step_of(checkpoint.listing(tmp_path / "run")[-1])
    assert position in (death[1], death[1] + 1)  # the very next visit
    assert fork_server()(tmp_path, **case) == 0
    assert differences(run_ending(tmp_path), undisturbed_ending(case)) == []


@pytest.mark.parametrize("number", [TERM, INT])
def test_a_signal_is_heard_within_a_step_of_a_long_sink(number: int, tmp_path: Path) -> None:
    """The whole sink would take 14 × 0.5 s."""
    assert (
        fork_server()(tmp_path, delay=0.3, send=[number], sink=100, pause=0.5, every_steps=None)
        == EXIT[number]
    )
    assert fork_server().seconds < 5
    assert 0 <= checkpoint.step_of(checkpoint.listing(tmp_path / "run")[-1]) < 3


@pytest.mark.parametrize(("number", "code"), [(TERM, -TERM), (INT, 130)])
def test_a_second_signal_ends_the_process_at_once(number: int, code: int, tmp_path: Path) -> None:
    """In the middle of a step, so that nothing is saved: there is no whole state."""
    assert (
        fork_server()(tmp_path, delay=0.3, send=[number, number], pause=30, every_steps=None)
        == code
    )
    assert fork_server().seconds < 5
    assert checkpoint.listing(tmp_path / "run") == []


# in this process


class SendSignal(Callback):
    """A real signal to this process, after a step."""

    def __init__(self, number: int, at: int = 2) -> None:
        self.number = number
        self.at_step = at

    def step(self, run: Run, row: Row) -> None:
        if row.global_step == self.at_step:
            os.kill(os.getpid(), self.number)


def test_handlers_of_the_users_are_back_afterwards() -> None:
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (TERM, INT)
    }
    handlers = {number: signal.getsignal(number) for number in before}
    try:
        build_model().fit(1, train_data())
        assert {number: signal.getsignal(number) for number in before} == handlers
        with pytest.raises(SystemExit) as caught:
            build_model().fit(1, train_data(), callbacks=[SendSignal(TERM)], sink=1)
        assert caught.value.code == 143
        with pytest.raises(KeyboardInterrupt):
            build_model().fit(1, train_data(), callbacks=[SendSignal(INT)], sink=1)
        with pytest.raises(ZeroDivisionError):
            build_model().fit(1, train_data(), callbacks=[Lambda(visit=lambda run: 1 / 0)])
        assert {number: signal.getsignal(number) for number in before} == handlers
        assert received == []  # the first signal was the run's
        second = build_model().fit(
            1, train_data(), callbacks=[Lambda(begin=lambda run: signal.raise_signal(INT))]
        )
    except KeyboardInterrupt:
        second = None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert second is None


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(INT, signal.SIG_IGN)  # as a shell starts jobs in the background
    try:
        run = build_model().fit(1, train_data(), callbacks=[SendSignal(INT)], sink=1)
    except KeyboardInterrupt:
        pytest.fail("it was heard")  # as it is, it would end all tests
    finally:
        signal.signal(INT, before)
    assert run.position == 7
    assert run.stopped is None


def test_fit_in_another_thread_leaves_signals_alone() -> None:
    handlers: list[Any] = []
    positions: list[int] = []

    def work() -> None:
        witness = Lambda(visit=lambda run: handlers.append(signal.getsignal(TERM)))
        run = build_model().fit(1, train_data(), callbacks=[witness])
        positions.append(run.position)

    before = signal.getsignal(TERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert positions == [7]
    assert set(handlers) == {before}


def test_an_evaluation_cut_short_leaves_no_trace_in_the_random_state(tmp_path: Path) -> None:
    """A DataLoader draws from torch's generator when a pass begins, and so once more here."""
    x = torch.stack([sample["x"] for sample in valid_data().dicts()][:1]).flatten(0, 1)
    valid = DataLoader(
        TensorDataset(x, torch.zeros(len(x), dtype=torch.int64)), batch_size=2, shuffle=True
    )
    ends = []
    for cut in (False, True):
        folder = tmp_path / str(cut)
        sent: list[str] = []

        def send(moment: str, cut: bool = cut, sent: list[str] = sent) -> None:
            if cut and moment == "evaluation" and not sent:
                sent.append(moment)
                os.kill(os.getpid(), TERM)

        options = {"valid": valid, "valid_every_steps": 3, "resume": "auto"}
        model = build_model()
        model.net.on_moment = send
        if cut:
            with pytest.raises(SystemExit):
                model.fit(1, train_data(), callbacks=[Checkpoint(folder)], **options)
            model = build_model()
        model.fit(1, train_data(), callbacks=[Checkpoint(folder)], **options)
        ends.append({**dict(model.net.state_dict()), "random": torch.get_rng_state()})
    assert differences(*ends) == []
