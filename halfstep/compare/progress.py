"""The display of a comparison while it runs: bars on a terminal, lines with --plain or a pipe."""

import sys
from typing import Any, Protocol, TextIO

from halfstep.callbacks import ProgressLines
from halfstep.callbacks.progress_bar import four_digits
from halfstep.callbacks.progress_displays import new_bars, start_bars
from halfstep.compare.summary import shorten_error
from halfstep.engine import Callback, Run
from halfstep.experiment.datasets import TrainTestData
from halfstep.experiment.settings import Settings
from halfstep.utils.text import plural, printable


class Progress(Protocol):
    """A display: `begin` once, then `callbacks` and `done` for each run, `end` in any case."""

    def begin(self, settings: Settings, data: TrainTestData, runs_done: int) -> None: ...

    def callbacks(self, precision: str, seed: int) -> list[Callback]:
        """Callbacks for the run that starts now."""
        ...

    def done(self, result: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


class SilentProgress:
    """Shows nothing."""

    def begin(self, settings: Settings, data: TrainTestData, runs_done: int) -> None: ...

    def callbacks(self, precision: str, seed: int) -> list[Callback]:
        return []

    def done(self, result: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


class LineProgress:
    """A line for each finished run; with `steps` also lines like `loss: 2.303  [   64/11000]`."""

    def __init__(self, *, steps: bool = False, file: TextIO | None = None) -> None:
        self.steps = steps
        self.file = file
        self._runs_done = 0
        self._total_runs = 0
        self._samples = 0
        self._name_width = 0
        self._notes: set[str] = set()

    def begin(self, settings: Settings, data: TrainTestData, runs_done: int) -> None:
        self._runs_done = runs_done
        self._total_runs = len(settings.precision_seed_pairs)
        self._samples = data.train.size
        self._name_width = max(map(len, settings.precisions))
        self._print(describe_comparison(settings, data, runs_done))

    def callbacks(self, precision: str, seed: int) -> list[Callback]:
        if not self.steps:
            return []
        number = self._runs_done + 1
        self._print(f"\n{precision}, seed {seed} (run {number} of {self._total_runs})")
        return [ProgressLines(total=self._samples, file=self.file)]

    def done(self, result: dict[str, Any]) -> None:
        self._runs_done += 1
        number_width = len(str(self._total_runs))
        position = f"[{self._runs_done:>{number_width}}/{self._total_runs}]"
        name = f"{result['precision']:<{self._name_width}}"
        self._print(f"{position} {name} seed {result['seed']}  {describe_result(result)}")

    def note(self, text: str) -> None:
        if text not in self._notes:  # once, though every run would say it
            self._notes.add(text)
            self._print(f"note: {text}")

    def end(self) -> None: ...

    def _print(self, text: str) -> None:
        print(printable(text, lines=True), file=self.file, flush=True)


class BarProgress:
    """A bar for each run on a terminal: epoch, steps and loss; its scores when it is done."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._task: Any = None
        self._epochs = 0
        self._total_steps = 0
        self._notes: set[str] = set()

    def begin(self, settings: Settings, data: TrainTestData, runs_done: int) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, TextColumn

        batches = data.train_batches(settings.seeds[0], settings.batch)
        self._epochs = settings.epochs
        self._total_steps = settings.epochs * batches.size

        console = Console(stderr=True, highlight=False)
        console.print(
            printable(describe_comparison(settings, data, runs_done)), markup=False, emoji=False
        )
        status = TextColumn("{task.fields[status]}", markup=False)
        self._bars = new_bars(console, MofNCompleteColumn(), status, one_line=False)
        if runs_done < len(settings.precision_seed_pairs):
            start_bars(self._bars)

    def callbacks(self, precision: str, seed: int) -> list[Callback]:
        self._task = self._bars.add_task(
            f"{precision:<8} seed {seed}", total=self._total_steps, status=""
        )
        return [_BarCallback(self)]

    def update(self, run: Run) -> None:
        """Moves the bar of the run that is being trained."""
        loss = "" if run.row is None else f"  loss {four_digits(run.row.loss)}"
        status = f"epoch {run.epoch}/{self._epochs}{loss}"
        self._bars.update(self._task, completed=run.position, status=status)

    def done(self, result: dict[str, Any]) -> None:
        status = printable(describe_result(result))
        self._bars.update(self._task, completed=result["steps"], status=status)

    def note(self, text: str) -> None:
        if text in self._notes:
            return
        self._notes.add(text)
        text = printable(text, lines=True)
        if self._bars is None:
            print(f"note: {text}", file=sys.stderr)
        else:
            self._bars.console.print(f"note: {text}", markup=False, emoji=False)

    def end(self) -> None:
        if self._bars is not None:
            self._bars.stop()


class _BarCallback(Callback):
    """Moves the bar at every visit of the host."""

    writes = True
    shows_progress = True

    def __init__(self, bars: BarProgress) -> None:
        self._bars = bars

    def visit(self, run: Run) -> None:
        self._bars.update(run)


def describe_comparison(settings: Settings, data: TrainTestData, runs_done: int) -> str:
    """What is about to happen, in one line."""
    runs = " × ".join(
        [
            plural(len(settings.precisions), "precision"),
            plural(len(settings.seeds), "seed"),
            plural(settings.epochs, "epoch"),
        ]
    )
    before = ""
    if runs_done:
        verb = "is" if runs_done == 1 else "are"
        before = f", {plural(runs_done, 'run')} {verb} done already"
    return (
        f"{settings.net} on {settings.data}: "
        f"{data.train.size:,} samples, {data.test.size:,} to test; "
        f"{runs}, batch {settings.batch}, on {settings.torch_device}{before}"
    )


def describe_result(result: dict[str, Any]) -> str:
    """The end of a run, in one line."""
    if result["status"] == "failed":
        return f"failed: {shorten_error(result['error'])}"
    skipped = f"  skipped {result['skipped']}" if result["skipped"] else ""
    return (
        f"loss {result['loss']:.4f}  accuracy {result['acc']:.2%}  "
        f"{result['ms_per_step']:.2f} ms/step{skipped}"
    )
