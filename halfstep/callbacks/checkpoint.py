"""Saving a run so that it goes on exactly: every n steps, epochs or seconds, at the end, on an error, and the best."""

import time
import warnings
from pathlib import Path
from typing import Any, Literal

from halfstep import checkpoint
from halfstep.engine import Callback, Run
from halfstep.errors import Notice

Mode = Literal["auto", "min", "max"]


class Checkpoint(Callback):
    """`folder/step-000000123/`, written atomically; `fit(resume="auto")` goes on from the newest.

    Saved at every `every_steps`-th step, every `every_epochs`-th epoch's end, when `every_seconds` have passed since
    the last, when the run ends or is told to (SIGINT, SIGTERM), and with `on_error` after an exception. The oldest go
    when there are more than `keep`. `best` names a score of the evaluations: the best so far is kept beside the newest.
    A save that fails (a full disk) is a notice and training goes on; at the end of the run it is an error.
    """

    last = True
    writes = True

    def __init__(
        self, folder: str | Path, *, every_steps: int | None = None, every_epochs: int | None = 1,
        every_seconds: float | None = None, keep: int = 5, best: str | None = None, mode: Mode = "auto",
        on_error: bool = True,
    ) -> None:  # fmt: skip
        for name, value in (("every_steps", every_steps), ("every_epochs", every_epochs), ("keep", keep)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"Checkpoint: expected {name} of 1 or more, got {value!r}")
        if every_seconds is not None and not every_seconds > 0:
            raise ValueError(f"Checkpoint: expected every_seconds above 0, got {every_seconds!r}")
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"Checkpoint: expected mode 'auto', 'min' or 'max', got {mode!r}")
        self.folder = Path(folder)
        self.every_steps, self.every_epochs, self.every_seconds = every_steps, every_epochs, every_seconds
        self.keep, self.best, self.on_error = keep, best, on_error
        self.lower = mode == "min" or (mode == "auto" and best is not None and "loss" in best)
        self.score: float | None = None
        self.best_step: int | None = None
        self._saved_at, self._clock = -1, time.monotonic()

    def begin(self, run: Run) -> None:
        """The folder must be ours to write, and everything that will be saved must be savable: told before training."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise checkpoint.CheckpointError(
                f"Checkpoint: cannot make the folder {self.folder}: {error.strerror}. Name one that can be written."
            ) from error
        existing = checkpoint.listing(self.folder)
        if existing and run.resumed is None:
            raise FileExistsError(
                f"Checkpoint: {self.folder} holds checkpoints of another run, up to {existing[-1].name}. Go on from "
                'them with fit(resume="auto"), or name another folder.'
            )
        checkpoint.check(run.model.snapshot())
        self._clock = time.monotonic()

    def next_stop(self, run: Run) -> int | None:
        if self.every_steps is None:
            return None
        return (run.position // self.every_steps + 1) * self.every_steps

    def visit(self, run: Run) -> None:
        better = self._is_better(run)
        by_steps = self.every_steps is not None and run.position % self.every_steps == 0
        by_epochs = self.every_epochs is not None and run.epoch_over and run.epoch % self.every_epochs == 0
        late = self.every_seconds is not None and time.monotonic() - self._clock >= self.every_seconds
        if better or by_steps or by_epochs or late:
            self._save(run)

    def end(self, run: Run) -> None:
        if run.error is not None and not self.on_error:
            return
        if run.position != self._saved_at or run.error is not None:
            failed = self._save(run)
            if failed is not None and run.error is None:
                raise failed

    def _is_better(self, run: Run) -> bool:
        if self.best is None or run.scores is None:
            return False
        if self.best not in run.scores:
            raise ValueError(f"Checkpoint: expected best= one of the scores {sorted(run.scores)}, got {self.best!r}")
        value = run.scores[self.best]
        better = value == value and (self.score is None or (value < self.score if self.lower else value > self.score))
        if better:
            self.score, self.best_step = value, run.position
        return better

    def _save(self, run: Run) -> Exception | None:
        name = checkpoint.name_of(run.position)
        path = self.folder / name
        try:
            if not path.exists():
                checkpoint.save(path, run.model.snapshot())
            self._saved_at, self._clock = run.position, time.monotonic()
            best = [] if self.best_step is None else [self.folder / checkpoint.name_of(self.best_step)]
            checkpoint.prune(self.folder, self.keep, best)
            return None
        except checkpoint.CheckpointError as error:
            warnings.warn(f"checkpoint {name} was not saved, training goes on: {error}", Notice, stacklevel=2)
            return error

    def state_dict(self) -> dict[str, Any]:
        return {"score": self.score, "best_step": self.best_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.score, self.best_step = state["score"], state["best_step"]
