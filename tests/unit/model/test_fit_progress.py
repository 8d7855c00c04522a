"""`fit` shows where it is: on terminals, in pipes, in threads, beside other bars. It costs no bit.

Notebooks are in test_notebook_progress.py, the callback itself in unit/callbacks.
"""

import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import halfstep as hs
from halfstep.callbacks import Lambda, LossMonitor, ProgressBar, ProgressLines, progress_bar
from halfstep.callbacks import progress_displays as displays
from halfstep.engine import Callback, Row, Run
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.engine.captured.step_program import StepProgram
from tests.support.emulated_graphs import CPU, EmulatedGraphs
from tests.support.pseudo_terminal import (
    CONTROL,
    ROOT,
    TERMINAL_SETTINGS,
    Terminal,
    run_on_terminal,
    visible_lines,
)
from tests.unit.callbacks.test_monitors import data_with_inf, fit, make_model, make_samples

EPOCH_LINE = (
    r"epoch \d+/\d+  loss \S+  acc \S+  (valid_loss \S+  valid_acc \S+  )?lr 0\.5  \d+\.\d s"
)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Whatever the machine's own settings. Every visit draws."""
    pseudo_terminal = Terminal()
    for name in TERMINAL_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress_bar, "REFRESH_EVERY_S", 0.0)
    yield pseudo_terminal
    pseudo_terminal.close()


def lines_of(text: str) -> list[str]:
    return [line for line in visible_lines(text) if line]


# What is shown without a word, and what `progress` changes


def test_a_pipe_gets_a_line_per_epoch_on_stderr_and_nothing_on_stdout(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = fit(3, valid=make_samples(30).batch(7))
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 3
    for line, entry in zip(lines, run.history, strict=True):
        assert re.fullmatch(EPOCH_LINE, line)
        for name in ("loss", "acc", "valid_loss", "valid_acc"):
            assert f"  {name} {entry[name]:#.4g}  " in line


def test_false_is_silent_and_lines_are_lines_on_a_terminal_too(
    terminal: Terminal, capfd: pytest.CaptureFixture[str]
) -> None:
    with terminal:
        fit(2, sink=1, progress=False)
        fit(2, sink=1, progress="lines")
    assert capfd.readouterr() == ("", "")
    assert re.fullmatch(rf"({EPOCH_LINE}\r\n){{2}}", terminal.text())
    with pytest.raises(ValueError, match="progress: expected True, False or 'lines', got 'bra'"):
        fit(1, progress="bra")


def test_a_terminal_gets_a_bar_that_leaves_a_line_per_epoch(terminal: Terminal) -> None:
    with terminal:
        fit(2, sink=1)
        fit(1, sink=1)  # the next one draws again
    drawn = terminal.text()
    assert len(re.findall("━+ 7/13  loss", CONTROL.sub("", drawn))) == 3
    heads = [line.split("  ")[0] for line in lines_of(drawn)]
    assert heads == ["epoch 1/2", "epoch 2/2", "epoch 1/1"]


class Shouter(Callback):
    shows_progress = True

    def epoch_end(self, run: Run) -> None:
        print("EPOCH", run.epoch)


@pytest.mark.parametrize("make", [lambda: LossMonitor(5), lambda: ProgressLines(5), Shouter])
def test_callbacks_that_show_it_are_left_alone(
    make: Any, terminal: Terminal, capfd: pytest.CaptureFixture[str]
) -> None:
    with terminal:
        fit(2, make(), sink=1)
    assert terminal.text() == ""
    assert capfd.readouterr().out.count("\n") >= 2


def test_a_progress_bar_of_the_users_own_is_the_only_one(
    capfd: pytest.CaptureFixture[str],
) -> None:
    fit(2, ProgressBar())
    assert len(capfd.readouterr().err.splitlines()) == 2


def test_callbacks_that_write_files_do_not_silence_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    callbacks = [hs.Checkpoint(tmp_path / "run"), hs.JSONLLog(tmp_path / "log"), hs.History()]
    fit(2, *callbacks)
    assert len(capfd.readouterr().err.splitlines()) == 2


def test_steps_by_hand_and_sunk_steps_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    step = make_model().step
    for x, y in make_samples().batch(6):
        step(x, y)
    for _ in hs.sink(step, make_samples().batch(6), every=5):
        pass
    make_model().evaluate(make_samples().batch(6))
    assert capfd.readouterr() == ("", "")


# It costs no bit


def train(progress: Any, captured: bool, **options: Any) -> tuple[list[Tensor], list[Row], list]:
    model = make_model(**options)
    if captured:
        records = RecordBuffer(8192, CPU)
        model.captures.training_runner = lambda step, feed, steps: CapturedRunner(
            StepProgram(step, records, EmulatedGraphs(CPU), "raise"), feed
        )
    rows: list[Row] = []
    visits: list[int] = []
    spy = Lambda(step=lambda run, row: rows.append(row), visit=lambda r: visits.append(r.position))
    data = data_with_inf(2) if "precision" in options else make_samples().batch(6)
    valid = make_samples(30).batch(7)
    model.fit(3, data, valid=valid, callbacks=spy, progress=progress, sink=4)
    state = [*model.net.parameters(), torch.random.get_rng_state()]
    return [tensor.detach().clone() for tensor in state], rows, visits


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 3},
        {"precision": hs.Precision("O2", scale=hs.DynamicScale(init=1024.0))},
    ],
    ids=["fp32", "accumulate", "O2"],
)
def test_weights_rows_and_visits_are_those_of_a_silent_run(
    terminal: Terminal, captured: bool, options: dict[str, Any]
) -> None:
    if captured:
        options = {**options, "decide": "device"}
    silent = train(False, captured, **options)
    with terminal:
        shown = train(True, captured, **options)
    assert "━" in terminal.text()
    for a, b in zip(silent[0], shown[0], strict=True):
        assert torch.equal(a, b)
    assert [repr(row) for row in shown[1]] == [repr(row) for row in silent[1]]
    assert shown[2] == silent[2]


# Kinds of runs


class Unsized:
    def __iter__(self) -> Iterator[Any]:
        return iter(list(make_samples().batch(6)))


def test_data_without_a_length_is_measured_in_its_first_epoch(terminal: Terminal) -> None:
    with terminal:
        make_model().fit(2, Unsized(), sink=1)
    drawn = CONTROL.sub("", terminal.text())
    assert re.search(r"epoch 1/2 ━+ 7  loss \S+  \S+ steps/s", drawn)
    assert re.search(r"epoch 2/2 [━╺╸]+ 7/~13  loss \S+  eta 0:00:00", drawn)


def test_a_long_validation_moves_a_bar_of_its_own(terminal: Terminal) -> None:
    with terminal:
        fit(1, valid=make_samples(30).batch(7))
    drawn = CONTROL.sub("", terminal.text())
    for batch in range(5):
        assert re.search(rf"epoch 1/1 valid ━+(╺━+)? {batch}/5  loss", drawn), batch


def test_each_evaluation_within_an_epoch_has_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    fit(1, valid=make_samples(30).batch(7), valid_every_steps=5, steps_per_epoch=12)
    heads = [line.split("  ")[0] for line in capfd.readouterr().err.splitlines()]
    assert heads == ["epoch 1/1 step 5", "epoch 1/1 step 10", "epoch 1/1"]


def test_a_resumed_run_says_where_it_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = Lambda(visit=lambda run: run.stop("enough") if run.position == 20 else None)
    fit(3, hs.Checkpoint(tmp_path), stop, sink=7)
    lines = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"epoch 2/3 step 7/13  loss \S+  acc \S+  lr 0\.5  \d\.\d s", lines[-2])
    assert lines[-1] == "stopped after step 20: enough"

    fit(3, hs.Checkpoint(tmp_path), resume="auto")
    lines = capfd.readouterr().err.splitlines()
    newest = tmp_path / "step-000000020"
    assert lines[0] == f"goes on after step 20, in epoch 2 of 3, from {newest}"
    assert [line.split("  ")[0] for line in lines[1:]] == ["epoch 2/3", "epoch 3/3"]

    fit(3, hs.Checkpoint(tmp_path), resume="auto", progress=False)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_that_has_its_epochs_says_that_nothing_is_trained(
    epochs: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(2, hs.Checkpoint(tmp_path))
    capfd.readouterr()
    run = fit(epochs, hs.Checkpoint(tmp_path), resume="auto")
    assert run.global_step == 26
    assert capfd.readouterr().err.splitlines() == [
        f"{tmp_path / 'step-000000026'} has 2 epochs already, and fit was asked for {epochs}: "
        "nothing is trained. To train further: 3 epochs, or more"
    ]
    fit(3, hs.Checkpoint(tmp_path), resume="auto")
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("goes on after step 26, in epoch 3 of 3, from ")


def test_skipped_steps_of_the_whole_run_are_said_to_be_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Beside means of one epoch: the count goes on from epoch to epoch."""
    model = make_model(precision=hs.Precision("O2", scale=hs.DynamicScale(init=1024.0)))
    model.fit(2, data_with_inf(2))
    lines = capfd.readouterr().err.splitlines()
    assert [re.findall(r"skipped .*?(?=  )", line) for line in lines] == [
        ["skipped 1 in all"],
        ["skipped 2 in all"],
    ]


def test_an_error_leaves_the_line_of_where_it_came(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(run: Run) -> None:
        if run.position >= 7:
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fit(1, Lambda(visit=fail), sink=7)
    assert re.fullmatch(r"epoch 1/1 step 7/13  loss .* s\n", capfd.readouterr().err)


def test_a_log_shows_that_a_long_epoch_is_alive(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "REFRESH_EVERY_S", 0.0)
    monkeypatch.setattr(displays, "LINE_EVERY_S", 0.0)
    fit(1, sink=6)
    heads = [line.split("  ")[0] for line in capfd.readouterr().err.splitlines()]
    assert heads[-3:] == ["epoch 1/1 step 6/13", "epoch 1/1 step 12/13", "epoch 1/1"]


# Who draws


def test_other_processes_of_a_distributed_run_are_silent(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with terminal:
        fit(1)
    assert terminal.text() == ""


def test_a_fit_inside_a_fit_and_one_in_a_thread_print_lines_above_the_bar(
    terminal: Terminal,
) -> None:
    def visit(run: Run) -> None:
        if run.position == 4:
            fit(1)  # of another model
        if run.position == 8:
            thread = threading.Thread(target=fit, args=(1,))
            thread.start()
            thread.join()

    with terminal:
        before = sys.stdout, sys.stderr
        fit(2, Lambda(visit=visit), sink=4)
        assert (sys.stdout, sys.stderr) == before
    drawn = terminal.text()
    lines = lines_of(drawn)
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/1"] * 2 + ["epoch 1/2", "epoch 2/2"]
    assert all(re.fullmatch(EPOCH_LINE, line) for line in lines)
    assert CONTROL.sub("", drawn).count("epoch 1/1 ━") == 0


def test_two_fits_at_a_time_leave_the_streams_as_they_were(terminal: Terminal) -> None:
    with terminal:
        before = sys.stdout, sys.stderr
        threads = [threading.Thread(target=fit, args=(20,), kwargs={"sink": 1}) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (sys.stdout, sys.stderr) == before
    lines = lines_of(terminal.text())
    assert len(lines) == 60
    assert all(re.fullmatch(EPOCH_LINE, line) for line in lines)


def test_beside_a_bar_of_tqdm_there_are_lines(terminal: Terminal) -> None:
    tqdm = pytest.importorskip("tqdm")
    with terminal:
        for _ in tqdm.tqdm(range(2), file=sys.stderr, mininterval=0):
            fit(1, sink=1)
    drawn = terminal.text()
    assert "━" not in drawn
    lines = lines_of(drawn)
    assert [bool(re.fullmatch(EPOCH_LINE, line)) for line in lines] == [True, True, False]
    assert lines[2].startswith("100%|")


def test_beside_a_bar_of_rich_there_are_lines(terminal: Terminal) -> None:
    console = pytest.importorskip("rich.console")
    progress = pytest.importorskip("rich.progress")
    with terminal:
        for _ in progress.track(range(2), console=console.Console(file=sys.stderr)):
            fit(1, sink=1)
    lines = lines_of(terminal.text())
    assert [bool(re.fullmatch(EPOCH_LINE, line)) for line in lines] == [True, True, False]


# Programs with a terminal of their own: stdin, stdout and stderr

PROGRAM = """
import sys, logging, threading, time, warnings
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from halfstep.callbacks import Lambda, progress_bar
from tests.unit.callbacks.test_monitors import fit, make_samples
progress_bar.REFRESH_EVERY_S = 0.0
"""


def program(code: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM.format(tests=str(ROOT)) + code]


def test_what_others_print_is_neither_torn_nor_broken_into_lines() -> None:
    """print, long lines, warnings, and a logger that was set up before."""
    long_line = "long " * 60
    code = f"""
logging.basicConfig(format="%(message)s")
def visit(run):
    if run.position == 3: print("printed")
    if run.position == 4: print({long_line!r})
    if run.position == 5: logging.warning("logged")
    if run.position == 6: warnings.warn("warned")
    if run.position == 7: print("on stderr", file=sys.stderr)
fit(1, Lambda(visit=visit), sink=1)
logging.warning("logged afterwards")
print("afterwards")
"""
    status, drawn = run_on_terminal(program(code))
    assert status == 0, drawn
    assert "━ 7/13" in CONTROL.sub("", drawn).replace("╺", "")  # drawn again after each of them
    lines = lines_of(drawn)
    assert lines[:3] == ["printed", long_line.strip(), "logged"]
    assert lines[3].endswith("UserWarning: warned")
    assert lines[4] == "on stderr"
    assert re.fullmatch(EPOCH_LINE, lines[5])
    assert lines[6:] == ["logged afterwards", "afterwards"]


def test_dots_and_prompts_are_seen_at_once() -> None:
    """A line that is begun and not ended: nothing is drawn into it."""
    code = """
def visit(run):
    if run.position in (3, 4, 5): print(".", end="", flush=True)
    if run.position == 5: print()
    if run.position == 8:
        print("answer:", input("ready? "))
fit(1, Lambda(visit=visit), sink=1)
"""
    status, drawn = run_on_terminal(program(code), typed="yes\n")
    assert status == 0, drawn
    text = CONTROL.sub("", drawn)
    assert re.search(r"\r\.\.\.\r\n", text)
    assert "━ 9/13" in text.replace("╺", "")  # and it goes on
    assert re.search(r"\rready\? ", text)  # on a line of its own: the bar is gone
    assert "answer: yes" in drawn
    assert re.fullmatch(EPOCH_LINE, lines_of(drawn)[-1])


def test_a_narrow_terminal_has_one_line_with_the_most_important_numbers() -> None:
    status, drawn = run_on_terminal(program("fit(1, sink=1)"), columns=40)
    assert status == 0, drawn
    assert re.search(r"\repoch 1/1 7/13  loss \d\.\d+  eta 0:00:00\r", CONTROL.sub("", drawn))
    assert "\x1b[1A" not in drawn  # never more than one line to wipe


def test_no_color_means_no_colour() -> None:
    status, drawn = run_on_terminal(program("fit(1, sink=1)"), NO_COLOR="1")
    assert status == 0, drawn
    assert "━" in drawn
    assert not re.search(r"\x1b\[[\d;]*3\d", drawn)


def test_a_job_in_the_background_of_a_shell_prints_lines() -> None:
    code = program("fit(1, sink=1)")[2]
    script = 'set -m; "$0" -c "$1" & wait'
    status, drawn = run_on_terminal(["bash", "-c", script, sys.executable, code])
    assert status == 0, drawn
    assert "━" not in drawn
    assert any(re.fullmatch(EPOCH_LINE, line) for line in lines_of(drawn))


def test_the_processes_of_a_pool_print_lines() -> None:
    code = """
import multiprocessing
process = multiprocessing.get_context("fork").Process(target=fit, args=(1,))
process.start()
process.join()
"""
    status, drawn = run_on_terminal(program(code))
    assert status == 0, drawn
    assert "━" not in drawn
    assert re.fullmatch(EPOCH_LINE, lines_of(drawn)[-1])


def test_a_reader_that_goes_away_does_not_end_the_training() -> None:
    code = """
import os
def visit(run):
    if run.epoch == 2: time.sleep(0.01)
run = fit(40, Lambda(visit=visit))
os.write(1, b"done %d" % run.global_step)
os._exit(0)
"""
    process = subprocess.Popen(
        program(code),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stderr is not None
    assert process.stdout is not None
    assert process.stderr.readline().startswith(b"epoch 1/40")
    process.stderr.close()
    with process.stdout as output:
        assert output.read() == b"done 520"
    assert process.wait() == 0


def test_a_program_without_stderr_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert fit(2).global_step == 26


def test_a_stream_that_was_closed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    file.close()
    monkeypatch.setattr(sys, "stderr", file)
    assert fit(2, progress="lines").global_step == 26


def test_a_run_is_shown_in_one_line() -> None:
    run = fit(2, valid=make_samples(30).batch(7), progress=False)
    entry = run.history[-1]
    scores = ", ".join(
        f"{name}={entry[name]:.4g}" for name in ("loss", "acc", "valid_loss", "valid_acc")
    )
    assert repr(run) == f"Run(epoch 2/2, step 26, {scores})"
