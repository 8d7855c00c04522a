"""What is seen while a comparison runs: bars on a terminal, the seeds' lines with --plain, few lines in a pipe."""

import sys
from typing import Any, Protocol, TextIO

from halfstep.callbacks import ProgressLines
from halfstep.compare.summary import short
from halfstep.engine import Callback, Row, Run
from halfstep.experiment.datasets import Material
from halfstep.experiment.settings import Settings


class Progress(Protocol):
    """Told of every run; `callbacks` are those that watch it."""

    def begin(self, settings: Settings, given: Material, done: int) -> None: ...

    def callbacks(self, name: str, seed: int) -> list[Callback]: ...

    def done(self, result: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


class Silent:
    """Nothing at all."""

    def begin(self, settings: Settings, given: Material, done: int) -> None: ...

    def callbacks(self, name: str, seed: int) -> list[Callback]:
        return []

    def done(self, result: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


class Lines:
    """A line per finished run; `steps`: the lines of seed 000 too, `loss: 2.303  [   64/11000]`."""

    def __init__(self, *, steps: bool = False, file: TextIO | None = None) -> None:
        self.steps, self.file = steps, file
        self._at = self._total = self._samples = self._width = 0
        self._notes: set[str] = set()

    def begin(self, settings: Settings, given: Material, done: int) -> None:
        self._at, self._total, self._samples = done, len(settings.pairs), given.train.size
        self._width = max(map(len, settings.precisions))
        self._print(introduced(settings, given, done))

    def callbacks(self, name: str, seed: int) -> list[Callback]:
        if not self.steps:
            return []
        self._print(f"\n{name}, seed {seed} (run {self._at + 1} of {self._total})")
        return [ProgressLines(total=self._samples, file=self.file)]

    def done(self, result: dict[str, Any]) -> None:
        self._at += 1
        place = f"[{self._at:>{len(str(self._total))}}/{self._total}]"
        self._print(
            f"{place} {result['precision']:<{self._width}} seed {result['seed']}  {ended(result)}"
        )

    def note(self, text: str) -> None:
        if text not in self._notes:  # once, though every run would say it
            self._notes.add(text)
            self._print(f"note: {text}")

    def end(self) -> None: ...

    def _print(self, text: str) -> None:
        print(text, file=self.file, flush=True)


class Bars:
    """One line per run on a terminal: epoch, bar, steps and loss while it runs, its scores when it is done."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._task: Any = None
        self._epochs = self._steps = 0
        self._notes: set[str] = set()

    def begin(self, settings: Settings, given: Material, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._epochs = settings.epochs
        self._steps = settings.epochs * given.batches(settings.seeds[0], settings.batch).size
        console = Console(stderr=True, highlight=False)
        console.print(introduced(settings, given, done), markup=False)
        columns = [
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            MofNCompleteColumn(),
        ]
        self._bars = Progress(
            *columns, TextColumn("{task.fields[said]}", markup=False), console=console
        )
        if done < len(settings.pairs):
            self._bars.start()
            console.show_cursor(
                True
            )  # a process that is killed must not leave a terminal without one

    def callbacks(self, name: str, seed: int) -> list[Callback]:
        self._task = self._bars.add_task(f"{name:<8} seed {seed}", total=self._steps, said="")
        return [_Bar(self)]

    def moved(self, run: Run, row: Row | None) -> None:
        loss = "" if row is None else f"  loss {row.loss:.4f}"
        self._bars.update(
            self._task, completed=run.position, said=f"epoch {run.epoch}/{self._epochs}{loss}"
        )

    def done(self, result: dict[str, Any]) -> None:
        self._bars.update(self._task, completed=result["steps"], said=ended(result))

    def note(self, text: str) -> None:
        if text in self._notes:
            return
        self._notes.add(text)
        if self._bars is None:
            print(f"note: {text}", file=sys.stderr)
        else:
            self._bars.console.print(f"note: {text}", markup=False)

    def end(self) -> None:
        if self._bars is not None:
            self._bars.stop()


class _Bar(Callback):
    """Moves the bar of the run at hand, at visits."""

    writes = True

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._row: Row | None = None

    def step(self, run: Run, row: Row) -> None:
        self._row = row

    def visit(self, run: Run) -> None:
        self._bars.moved(run, self._row)


def introduced(settings: Settings, given: Material, done: int) -> str:
    """What is about to happen, in one line."""
    what = f"{settings.net} on {settings.data}: {given.train.size:,} samples, {given.test.size:,} to test"
    counts = {
        "precision": len(settings.precisions),
        "seed": len(settings.seeds),
        "epoch": settings.epochs,
    }
    runs = " × ".join(plural(n, word) for word, n in counts.items())
    before = f", {plural(done, 'run')} {'is' if done == 1 else 'are'} done already" if done else ""
    return f"{what}; {runs}, batch {settings.batch}, on {settings.place}{before}"


def plural(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def ended(result: dict[str, Any]) -> str:
    """A run's end in one line."""
    if result["status"] == "failed":
        return f"failed: {short(result['error'])}"
    skipped = f"  skipped {result['skipped']}" if result["skipped"] else ""
    return f"loss {result['loss']:.4f}  accuracy {result['acc']:.2%}  {result['ms_per_step']:.2f} ms/step{skipped}"
