"""Where a run stands: over, begun further than it is asked for, or with all its steps behind a disk that was full."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.experiment.training_run import WEIGHTS


@dataclass(frozen=True)
class Over:
    """A run that has all the epochs it is asked for."""

    checkpoint: Path
    epochs: int
    steps: int
    history: list[dict[str, Any]]

    def summary(self, out: Path) -> dict[str, Any]:
        return {
            "out": str(out),
            "resumed": str(self.checkpoint),
            "steps": self.steps,
            "history": self.history,
        }


def over(folder: Path, epochs: int) -> Over | None:
    """Where a run stands that has `epochs` or more behind it, and its weights written; None when there is work left."""
    newest, loop = _newest(folder)
    if newest is None or loop is None:
        return None
    ended = loop["epoch_over"] and not loop["pending"]
    done = loop["epoch"] if ended else loop["epoch"] - 1
    if done >= epochs and (folder / WEIGHTS).is_file():
        return Over(newest, done, loop["global_step"], loop["history"])
    refuse_fewer(folder, epochs)
    return None


def refuse_fewer(place: Path, epochs: int) -> None:
    """A run that was stopped in a later epoch: its weights are not those after `epochs`, and no step would be made."""
    _, loop = _newest(place)
    if loop is not None and loop["epoch"] > epochs:
        where = f"{place} is in epoch {loop['epoch']} already, after step {loop['global_step']}"
        raise ValueError(
            f"--epochs: {where}, and {epochs} are asked for. Go on with --epochs {loop['epoch']} or more."
        )


def _newest(place: Path) -> tuple[Path | None, Any]:
    """A run's newest checkpoint, or the one that is named, and its place in the run; None where fit will refuse it."""
    from halfstep import checkpoint

    newest = place if (place / "manifest.json").is_file() else checkpoint.latest(place)
    return newest, checkpoint.load(newest).tree.get("loop") if newest is not None else None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Of a signal the command tells alone."""
    from halfstep.engine import signals

    before, signals.QUIET = signals.QUIET, True
    try:
        yield
    finally:
        signals.QUIET = before


class Kept:
    """Remembers the run, so that its weights are not lost with the last checkpoint."""

    def __init__(self) -> None:
        self.run: Any = None

    def begin(self, run: Any) -> None:
        self.run = run

    def rescue(self, model: Any, path: Path, error: Exception) -> None:
        """The weights of a run that made all its steps, where the disk still takes them; the error says so."""
        run = self.run
        if run is None or (run.epoch, run.epoch_over) != (run.epochs, True):
            return
        with contextlib.suppress(OSError, ValueError):
            model.save(path)
            error.add_note(f"Training is done, and its weights are in {path}.")
