"""The progress bar: on a real pseudo-terminal, lines elsewhere, cleaned up after errors."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep as hs
from halfstep.callbacks import Lambda, LossMonitor, ProgressBar
from halfstep.callbacks.progress_bar import REFRESH_EVERY_S
from halfstep.engine import Run
from tests.support.pseudo_terminal import (
    CONTROL,
    HIDE_CURSOR,
    SHOW_CURSOR,
    TERMINAL_SETTINGS,
    Terminal,
    visible_lines,
)
from tests.unit.callbacks.test_logs import log_bytes, train_logged
from tests.unit.callbacks.test_monitors import data_with_inf, fit, make_model, make_samples


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Whatever the machine's own settings."""
    pseudo_terminal = Terminal()
    for name in TERMINAL_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    yield pseudo_terminal
    pseudo_terminal.close()


def slow() -> Lambda:
    """Every visit takes longer than the bar waits between two moves."""
    return Lambda(visit=lambda run: time.sleep(REFRESH_EVERY_S))


def test_a_line_per_epoch_stays(terminal: Terminal) -> None:
    with terminal:
        run = fit(3, ProgressBar(), valid=make_samples(30).batch(7), sink=7)
    epoch_lines = [line for line in visible_lines(terminal.text()) if line]
    assert len(epoch_lines) == 3
    for epoch, (line, entry) in enumerate(zip(epoch_lines, run.history, strict=True), 1):
        loss = entry["valid_loss"]
        acc = entry["valid_acc"]
        mean = entry["loss"]
        training = f"loss {mean:#.4g}  acc {entry['acc']:#.4g}"
        scores = re.escape(f"{training}  valid_loss {loss:#.4g}  valid_acc {acc:#.4g}")
        assert re.fullmatch(rf"epoch {epoch}/3  {scores}  lr 0\.5  \d+\.\d s", line)


def test_the_kept_line_is_whole_on_a_narrow_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with terminal:
        run = fit(1, ProgressBar(), slow(), valid=make_samples(30).batch(7), sink=7)
    shown = " ".join(visible_lines(terminal.text()))
    assert f"valid_acc {run.history[0]['valid_acc']:#.4g}" in shown


def test_a_kept_line_breaks_between_two_numbers(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with terminal:
        fit(1, ProgressBar(), slow(), valid=make_samples(30).batch(7), sink=7)
    first, second = [line for line in visible_lines(terminal.text()) if line]
    assert re.fullmatch(r"epoch 1/1  loss \S+  acc \S+  valid_loss \S+", first)
    assert re.fullmatch(r"valid_acc \S+  lr 0\.5  \d+\.\d s", second)
    assert f"\n{' ' * 11}{second}" in terminal.text()  # below the first number


@pytest.mark.parametrize(("columns", "bar_columns"), [(59, 0), (60, 10), (79, 10), (80, 20)])
def test_the_bar_leaves_room_for_the_time_left(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int, bar_columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with terminal:
        fit(1, ProgressBar(), slow(), sink=4)
    bar = f"[━╸╺]{{{bar_columns}}} " if bar_columns else ""
    drawn = CONTROL.sub("", terminal.text())
    assert re.search(rf"epoch 1/1 {bar}8/13  loss \S+  eta 0:00:00", drawn), drawn


def test_the_moving_line_shows_scale_skips_and_the_time_left(terminal: Terminal) -> None:
    trained = make_model(precision=hs.Precision("O2", scale=hs.DynamicScale(init=1024.0)))
    with terminal:
        trained.fit(1, data_with_inf(2), callbacks=[ProgressBar(), slow()], sink=4)
    drawn = CONTROL.sub("", terminal.text())
    bar = "epoch 1/1 ━{12}╺━{7} 8/13"
    numbers = r"loss \S+  eta 0:00:00  \S+ steps/s  acc \S+  lr 0\.5  scale 512  skipped 1 in all"
    assert re.search(f"{bar}  {numbers}", drawn), drawn


def test_five_times_a_second_at_most(terminal: Terminal) -> None:
    began = time.monotonic()
    with terminal:
        fit(20, ProgressBar(), Lambda(visit=lambda run: time.sleep(0.005)), sink=1)
    spent = time.monotonic() - began
    moves = len(re.findall(r"\d+/13 ", CONTROL.sub("", terminal.text())))
    assert 2 <= moves <= spent / REFRESH_EVERY_S + 1  # of 260 visits


def test_lines_of_others_stay_whole(terminal: Terminal, capfd: pytest.CaptureFixture[str]) -> None:
    """stdout is no terminal here: its lines go where they went before."""
    with terminal:
        fit(1, ProgressBar(), LossMonitor(4), sink=1)
    out = capfd.readouterr().out
    steps = re.findall(r"^epoch: 1 step: (\d+), loss is [\d.e-]+$", out, re.MULTILINE)
    assert steps == ["4", "8", "12"]
    assert "loss is" not in terminal.text()


def fail(run: Run) -> None:
    if run.position >= 7:
        raise OSError("disk")


def interrupt(run: Run) -> None:
    if run.position == 7:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("visit", "error"), [(fail, OSError), (interrupt, KeyboardInterrupt)])
def test_it_is_put_away_after_errors_and_signals(
    terminal: Terminal, visit: Callable[[Run], None], error: type[BaseException]
) -> None:
    with terminal:
        before = sys.stdout, sys.stderr
        with pytest.raises(error):
            fit(3, ProgressBar(), Lambda(visit=visit), sink=7)
        assert (sys.stdout, sys.stderr) == before
        print("afterwards", file=sys.stderr, flush=True)
    drawn = terminal.text()
    assert drawn.rindex(SHOW_CURSOR) > drawn.rindex(HIDE_CURSOR)
    assert visible_lines(drawn)[-2] == "afterwards"  # on a line of its own
    bar = drawn[drawn.index("epoch 1/3") :]
    assert bar.index("\x1b[2K") < bar.index("afterwards")  # and the moving line is wiped


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE", ""])
def test_a_pipe_gets_a_line_per_epoch_on_stderr(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name:
        monkeypatch.setenv(name, "1")
    fit(2, ProgressBar(), valid=make_samples(30).batch(7), sink=1)
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(
        r"(epoch [12]/2  loss \S+  acc \S+  valid_loss \S+  valid_acc \S+.* s\n){2}", err
    )


def test_a_dumb_terminal_gets_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with terminal:
        fit(1, ProgressBar(), slow(), sink=1)
    assert re.fullmatch(r"epoch 1/1  loss \S+  acc \S+  lr 0\.5  \d+\.\d s\r\n", terminal.text())


def test_without_rich_the_lines_that_stay_are_printed(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)  # importing it is a ModuleNotFoundError
    with terminal:
        fit(2, ProgressBar(), sink=7)
    printed = terminal.text()
    assert "\x1b" not in printed
    first, second = [line for line in visible_lines(printed) if line]
    numbers = r"loss \S+  acc \S+  lr 0\.5  \d+\.\d s"
    assert re.fullmatch(f"epoch 1/2  {numbers}", first)
    assert re.fullmatch(f"epoch 2/2  {numbers}", second)


def test_skips_are_counted_over_a_resume() -> None:
    bar = ProgressBar()
    trained = make_model(precision=hs.Precision("O2", scale=hs.DynamicScale(init=1024.0)))
    trained.fit(2, data_with_inf(2), callbacks=bar)
    again = ProgressBar()
    again.load_state_dict(bar.state_dict())
    assert again.state_dict() == {"skipped": 2}


CHILD = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import pathlib, torch
torch.set_num_threads(1)
from halfstep.callbacks import Lambda, ProgressBar
from tests.unit.callbacks.test_logs import train_logged
die = lambda run, row: row.global_step == 18 and os.kill(os.getpid(), signal.SIGKILL)
train_logged(pathlib.Path(sys.argv[2]), ProgressBar(), Lambda(step=die), sink=1)
"""


def test_a_killed_process_leaves_a_cursor_and_a_log_that_goes_on(tmp_path: Path) -> None:
    terminal = Terminal()
    tests = Path(__file__).parent
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "PYTHONIOENCODING": "utf-8"}
    done: subprocess.CompletedProcess[Any] = subprocess.run(
        [sys.executable, "-c", CHILD, str(tests), str(tmp_path / "killed")],
        stderr=terminal.theirs,
        env=environment,
    )
    drawn = terminal.text()
    assert done.returncode == -signal.SIGKILL, drawn
    assert "epoch 1/2 " in drawn
    assert drawn.rindex(SHOW_CURSOR) > drawn.rindex(HIDE_CURSOR)
    with (tmp_path / "killed" / "log.csv").open("a") as file:
        file.write("step,2,5,half a li")  # what a kill inside a write leaves
    train_logged(tmp_path / "killed", resume="auto")
    torch.manual_seed(0)
    train_logged(tmp_path / "whole")
    assert log_bytes(tmp_path / "killed") == log_bytes(tmp_path / "whole")
