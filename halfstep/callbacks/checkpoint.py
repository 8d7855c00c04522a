"""Saving a run so that it goes on exactly: every n steps, epochs or seconds, at the end, on an error, and the best."""

import os
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from halfstep import checkpoint
from halfstep.callbacks.plateau import Best, Mode
from halfstep.checkpoint.disk import remove_folder as remove
from halfstep.checkpoint.lock import hold_lock as held
from halfstep.checkpoint.lock import unwritable_folder as unwritable
from halfstep.engine import Callback, Run
from halfstep.errors import Notice


class Checkpoint(Callback):
    """`folder/step-000000123/`, written atomically; `fit(resume="auto")` goes on from the newest.

    Saved at every `every_steps`-th step, every `every_epochs`-th epoch's end, when `every_seconds` have passed since
    the last, when the run ends or is told to (SIGINT, SIGTERM), and with `on_error` after an exception. The oldest go
    when there are more than `keep`. `best` names a score of the evaluations: the best so far is kept beside the newest.
    A save that fails (a full disk) is a notice and training goes on; at the end of the run it is an error. The folder
    is locked during a fit: another process that wants to save there is refused at once.
    """

    last = True
    writes = True

    def __init__(
        self, folder: str | Path, *, every_steps: int | None = None, every_epochs: int | None = 1,
        every_seconds: float | None = None, keep: int = 5, best: str | None = None, mode: Mode = "auto",
        on_error: bool = True,
    ) -> None:  # fmt: skip
        for name, value in (
            ("every_steps", every_steps),
            ("every_epochs", every_epochs),
            ("keep", keep),
        ):
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise ValueError(f"Checkpoint: expected {name} of 1 or more, got {value!r}")
        if every_seconds is not None and not every_seconds > 0:
            raise ValueError(f"Checkpoint: expected every_seconds above 0, got {every_seconds!r}")
        self.folder = Path(folder)
        self.every_steps, self.every_epochs, self.every_seconds = (
            every_steps,
            every_epochs,
            every_seconds,
        )
        self.keep, self.on_error = keep, on_error
        self.best = Best("Checkpoint", best, mode, 0.0) if best is not None else None
        self.best_step: int | None = None
        self._saved_at, self._clock, self._begun = -1, time.monotonic(), False

    def begin(self, run: Run) -> None:
        """The folder must be ours to write, and everything that will be saved must be savable: told before training."""
        self._begun = False  # a folder that is refused is left alone, also at the end
        if run.resumed is None:
            self.load_state_dict({})
        if self.best is not None:
            self.best.check(run)
            _tell_unevaluated(run, self.best.metric)
        self._try_folder()
        self._check_owner(run)
        tree = run.model.snapshot()
        checkpoint.check(tree)
        here = os.path.realpath(self.folder / checkpoint.name_of(run.position))
        whole = (
            run.resumed is not None
            and os.path.realpath(run.resumed) == here
            and not tree["loop"]["pending"]
        )
        self._saved_at = run.position if whole else -1
        self._clock, self._begun = time.monotonic(), True

    def _try_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(
                dir=self.folder, prefix=".halfstep-trash-", ignore_cleanup_errors=True
            ):
                pass  # the only way to know; the next save would remove it after a kill
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def _check_owner(self, run: Run) -> None:
        """Another run's checkpoints, or those of another course of this one, would be taken for this one's."""
        found = [
            path
            for path in checkpoint.listing(self.folder)
            if checkpoint.step_of(path) > run.position
        ]
        newer = [
            path for path in found if _is_whole(path)
        ]  # a broken one is replaced when its step comes
        if run.resumed is not None and newer:
            raise FileExistsError(
                f"Checkpoint: this run goes on from step {run.position}, and {self.folder} holds checkpoints of later "
                f'steps, up to {newer[-1].name}. Go on from the newest with fit(resume="auto"), remove those of later '
                "steps, or name another folder."
            )
        existing = checkpoint.listing(self.folder)
        if run.resumed is None and existing:
            whole = any(map(_is_whole, existing))
            what = "checkpoints of another run" if whole else "only broken checkpoints"
            advice = (
                'Go on from them with fit(resume="auto"), or name another'
                if whole
                else "Remove them, or name another"
            )
            raise FileExistsError(
                f"Checkpoint: {self.folder} holds {what}, up to {existing[-1].name}. {advice} folder."
            )

    def next_stop(self, run: Run) -> int | None:
        if self.every_steps is None:
            return None
        return (run.position // self.every_steps + 1) * self.every_steps

    def visit(self, run: Run) -> None:
        before = self.state_dict()
        better = self._is_better(run)
        by_steps = self.every_steps is not None and run.position % self.every_steps == 0
        by_epochs = (
            self.every_epochs is not None and run.epoch_over and run.epoch % self.every_epochs == 0
        )
        late = (
            self.every_seconds is not None and time.monotonic() - self._clock >= self.every_seconds
        )
        if better or by_steps or by_epochs or late:
            try:
                self._save(run)
            except checkpoint.CheckpointError as error:
                self.load_state_dict(before)  # the best is the best that is on the disk
                _notice(run, f"training goes on: {error}")

    def end(self, run: Run) -> None:
        """Saves where the run stopped; not after a KeyboardInterrupt, which may have come in the middle of a step."""
        if not self._begun or (
            run.error is not None and not (self.on_error and isinstance(run.error, Exception))
        ):
            return
        try:
            self._save(run)
        except checkpoint.CheckpointError as error:
            if run.error is None:
                raise
            _notice(run, str(error))

    @property
    def best_path(self) -> Path | None:
        """The checkpoint of the best evaluation so far; None before the first, and without `best`."""
        return None if self.best_step is None else self.folder / checkpoint.name_of(self.best_step)

    def _is_better(self, run: Run) -> bool:
        better = self.best is not None and run.scores is not None and self.best.take(run.scores)
        if better:
            self.best_step = run.position
        return better

    def _save(self, run: Run) -> None:
        path = self.folder / checkpoint.name_of(run.position)
        if run.position != self._saved_at:
            tree = run.model.snapshot()
            (_replace if path.exists() else checkpoint.save)(path, tree)
            self._saved_at, self._clock = run.position, time.monotonic()
        checkpoint.prune(self.folder, self.keep, [] if self.best_path is None else [self.best_path])

    def state_dict(self) -> dict[str, Any]:
        return {} if self.best is None else {"score": self.best.value, "best_step": self.best_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The best and its step; of an empty state, that there is none yet."""
        if self.best is not None:
            self.best.reset()
            self.best_step = None
            if state:
                self.best.value, self.best_step = state["score"], state["best_step"]


@contextmanager
def locked(callbacks: Iterable[Callback]) -> Iterator[None]:
    """The folders of the Checkpoints among them are one fit's, from before anything is read, cut or overwritten."""
    with ExitStack() as stack:
        for each in callbacks:
            if isinstance(each, Checkpoint):
                stack.enter_context(held(each.folder))
        yield


def _replace(path: Path, tree: Any) -> None:
    """Instead of a broken one, or of one whose evaluation was still to come: written first, then put in its place."""
    aside = (
        path.parent / f".halfstep-trash-{path.name}" / path.name
    )  # the next save removes it after a kill
    remove(aside.parent)
    checkpoint.save(aside, tree)
    remove(path)
    os.rename(aside, path)
    aside.parent.rmdir()


def _is_whole(path: Path) -> bool:
    try:
        checkpoint.verify(path)
    except checkpoint.CheckpointError:
        return False
    return True


def _tell_unevaluated(run: Run, metric: str) -> None:
    if not run.evaluates:
        said = f"nothing will be evaluated in this run, so best={metric!r} does nothing"
        warnings.warn(f"Checkpoint: {said}; give fit(valid=…)", Notice, stacklevel=3)


def _notice(run: Run, text: str) -> None:
    warnings.warn(
        f"checkpoint {checkpoint.name_of(run.position)} was not saved, {text}", Notice, stacklevel=3
    )
