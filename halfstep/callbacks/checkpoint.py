"""Saving a run so that it can go on exactly: every n steps, epochs or seconds, and at its end."""

import os
import textwrap
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from halfstep import checkpoint
from halfstep.callbacks.plateau import Best, Mode
from halfstep.checkpoint.disk import remove_folder
from halfstep.checkpoint.health import HEALTH_FILE, Health, find_nonfinite
from halfstep.checkpoint.lock import hold_lock, unwritable_folder
from halfstep.checkpoint.runs import finish_replacements, good_checkpoints, replace
from halfstep.checkpoint.verified import VerifiedCheckpoints
from halfstep.engine import Callback, Run
from halfstep.errors import Notice
from halfstep.step import TrainStep
from halfstep.step.overflow import LONG_STREAK
from halfstep.utils.atomic_files import TRASH_PREFIX
from halfstep.utils.checks import expect, whole_number
from halfstep.utils.keywords import user_stacklevel
from halfstep.utils.saved_state import SavedValue
from halfstep.utils.text import first_line

MAX_ERROR_CHARS = 120  # of the error's first line, in a checkpoint that was saved after it


class Checkpoint(Callback):
    """Saves `folder/step-000000123/`, written atomically; `fit(resume="auto")` goes on from there.

    Saved at every `every_steps`-th step, at the end of every `every_epochs`-th epoch, when
    `every_seconds` have passed since the last save, when the run ends or is stopped by SIGINT or
    SIGTERM, and with `on_error` after an exception. The oldest are removed when there are more than
    `keep`. `best` names a score of the evaluations: the best checkpoint so far is kept too. A save
    that fails (a full disk) is a notice and training goes on; at the end of the run it is an error.
    The folder is locked during a fit: another process that wants to save there is refused at once.
    """

    last = True
    writes = True

    def __init__(
        self,
        folder: str | Path,
        *,
        every_steps: int | None = None,
        every_epochs: int | None = 1,
        every_seconds: float | None = None,
        keep: int = 5,
        best: str | None = None,
        mode: Mode = "auto",
        on_error: bool = True,
    ) -> None:
        if every_steps is not None:
            every_steps = whole_number("Checkpoint: every_steps", every_steps, minimum=1)
        if every_epochs is not None:
            every_epochs = whole_number("Checkpoint: every_epochs", every_epochs, minimum=1)
        if every_seconds is not None:
            expect(
                every_seconds > 0, "Checkpoint: every_seconds", "a number above 0", every_seconds
            )
        self.folder = Path(folder)
        self.every_steps = every_steps
        self.every_epochs = every_epochs
        self.every_seconds = every_seconds
        self.keep = whole_number("Checkpoint: keep", keep, minimum=1)
        self.on_error = on_error
        self.allows_later = False  # whoever sets it removes later checkpoints when the run begins
        self.best: Best | None = None
        if best is not None:
            self.best = Best("Checkpoint", best, mode, min_delta=0.0)
        self.best_step: int | None = None
        self._saved_step = -1  # the step of the last checkpoint that holds all of that step
        self._saved_time = time.monotonic()
        self._may_save = False  # the folder was checked and is this run's
        self._is_due = False  # a save waits for the end of the update cycle
        self._has_abandoned = False  # there may be some of steps that this run left to go back
        self._verified = VerifiedCheckpoints()

    def begin(self, run: Run) -> None:
        """Checks before training that the folder can be written and the run can be saved."""
        self._may_save = False  # a folder that is refused is left alone, also at the end
        if run.resumed is None:
            self.load_state_dict({})
        if self.best is not None:
            self.best.check(run)
            if not run.evaluates:
                warnings.warn(
                    "Checkpoint: nothing will be evaluated in this run, so "
                    f"best={self.best.metric!r} does nothing; give fit(valid=…)",
                    Notice,
                    stacklevel=user_stacklevel(),
                )
        self._check_writable()
        self.check_no_other_run(run.position if run.resumed is not None else None)
        tree = run.model.snapshot()
        checkpoint.check(tree)

        # The checkpoint that the run goes on from need not be saved again, unless an evaluation of
        # its step is still to come.
        self._saved_step = -1
        if run.resumed is not None and not tree["loop"]["pending"]:
            path = self.folder / checkpoint.name_of(run.position)
            if os.path.realpath(run.resumed) == os.path.realpath(path):
                self._saved_step = run.position
        self._saved_time = time.monotonic()
        self._has_abandoned = run.resumed is not None
        self._is_due = False
        self._may_save = True

    def _check_writable(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Creating something is the only way to know. After a kill, the next save removes it.
            with TemporaryDirectory(
                dir=self.folder, prefix=TRASH_PREFIX, ignore_cleanup_errors=True
            ):
                pass
        except OSError as error:
            raise unwritable_folder(self.folder, error) from error

    def check_no_other_run(self, resumed_step: int | None) -> None:
        """FileExistsError if the folder holds checkpoints that would be taken for this run's.

        They are another run's, or those of later steps of this one, from before it was resumed.
        `resumed_step` is the step that this run goes on from; None for a new one.
        """
        existing = checkpoint.listing(self.folder)
        if resumed_step is not None and self.allows_later:
            return
        if resumed_step is not None:
            # A broken or failed one does no harm: it is replaced when its step comes.
            good = good_checkpoints(self.folder, self._verified)
            if good and checkpoint.step_of(good[-1]) > resumed_step:
                raise FileExistsError(
                    f"Checkpoint: this run goes on from step {resumed_step}, and {self.folder} "
                    f"holds checkpoints of later steps, up to {good[-1].name}. Go on from the "
                    'newest with fit(resume="auto"), remove those of later steps, or name another '
                    "folder."
                )
        elif existing:
            whole = [path for path in existing if self._verified.examine(path) is not None]
            if good_checkpoints(self.folder, self._verified):
                what = "checkpoints of another run"
                advice = 'Go on from them with fit(resume="auto"), or name another folder.'
            elif whole:
                what = "only checkpoints of training that had failed"
                advice = (
                    f"Go on from one of them with fit(resume={str(whole[-1])!r}), remove them, "
                    "or name another folder."
                )
            else:
                what = "only broken checkpoints"
                advice = "Remove them, or name another folder."
            raise FileExistsError(
                f"Checkpoint: {self.folder} holds {what}, up to {existing[-1].name}. {advice}"
            )

    def next_stop(self, run: Run) -> int | None:
        if self._is_due:
            step: TrainStep = run.model.step
            return run.position + step.options.accumulate - step.state.cycle.micro
        if self.every_steps is None:
            return None
        return (run.position // self.every_steps + 1) * self.every_steps

    def visit(self, run: Run) -> None:
        state_before = self.state_dict()
        is_best = False
        if self.best is not None:
            self.best.check_part(run)
        if self.best is not None and run.scores is not None:
            is_best = self.best.take(run.scores)
        if is_best:
            self.best_step = run.position
        save = is_best or self._is_due
        if self.every_steps is not None and run.position % self.every_steps == 0:
            save = True
        if self.every_epochs is not None and run.epoch_over and run.epoch % self.every_epochs == 0:
            save = True
        seconds = time.monotonic() - self._saved_time
        if self.every_seconds is not None and seconds >= self.every_seconds:
            save = True
        if not save:
            return
        # Where batches are divided over ranks or lanes, an open cycle is saved when it has ended.
        self._is_due = not getattr(run.model.step, "can_be_saved", True)
        if self._is_due:
            return

        try:
            self._save(run)
        except checkpoint.CheckpointError as error:
            self.load_state_dict(state_before)  # the best is the best that is on the disk
            _warn_not_saved(run, f"training goes on: {error}")

    def end(self, run: Run) -> None:
        """Saves where the run stopped.

        Not after a KeyboardInterrupt, which may have come in the middle of a step.
        """
        if not self._may_save:
            return
        if run.error is not None and not (self.on_error and isinstance(run.error, Exception)):
            return
        # After a value that is not finite this state leads to the error again, also where it was
        # saved already: then it is saved once more, with a mark.
        if isinstance(run.error, FloatingPointError):
            self._saved_step = -1
        if not getattr(run.model.step, "can_be_saved", True):
            _warn_not_saved(
                run,
                "as its update cycle is open and spread over ranks or lanes; the newest "
                "checkpoint is of an earlier step. Give steps_per_epoch= as a multiple of "
                "accumulate=, where that is how the run ended",
            )
            return
        try:
            self._save(run)
        except checkpoint.CheckpointError as error:
            if run.error is None:
                raise
            _warn_not_saved(run, str(error))

    @property
    def best_path(self) -> Path | None:
        """The checkpoint of the best evaluation so far; None if there is none, or no `best`."""
        if self.best_step is None:
            return None
        return self.folder / checkpoint.name_of(self.best_step)

    def _save(self, run: Run) -> None:
        path = self.folder / checkpoint.name_of(run.position)
        if run.position != self._saved_step:
            tree = run.model.snapshot()
            health = _find_health(run, tree)
            extra_files = {HEALTH_FILE: health.encode()}
            if path.exists():
                replace(path, tree, extra_files=extra_files)
            else:
                checkpoint.save(path, tree, extra_files=extra_files)
            self._saved_step = run.position
            self._saved_time = time.monotonic()
            if self._has_abandoned and health.is_good:
                self._remove_abandoned(path)
        protect = [] if self.best_path is None else [self.best_path]
        checkpoint.prune(self.folder, self.keep, protect, verified=self._verified)

    def _remove_abandoned(self, newest: Path) -> None:
        """Removes the checkpoints of later steps, from where training had failed.

        `begin` saw that none of them is good. They count updates that this run makes anew, and
        would pass for the future of its own checkpoints. The newest must be whole first.
        """
        if self._verified.examine(newest, read_again=True) is None:
            return
        for path in reversed(checkpoint.listing(self.folder)):
            is_later = checkpoint.step_of(path) > checkpoint.step_of(newest)
            if is_later and self._verified.examine(path) is not None:
                remove_folder(path)
        self._has_abandoned = False

    def state_dict(self) -> dict[str, Any]:
        if self.best is None:
            return {}
        return {"score": self.best.value, "best_step": self.best_step}

    def check_state(self, run: Run, saved: SavedValue) -> None:
        if self.best is None or not saved.entries():
            return
        saved.field("score").number(not_nan=True)
        best_step = saved.field("best_step")
        if best_step.value is not None:
            best_step.whole_number()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the best score and its step; with an empty state, there is none yet."""
        if self.best is None:
            return
        self.best.reset()
        self.best_step = None
        if state:
            self.best.value = state["score"]
            self.best_step = state["best_step"]


@contextmanager
def lock_folders(callbacks: Iterable[Callback]) -> Iterator[None]:
    """Locks the folders of the Checkpoints among the callbacks, for one fit.

    It comes before anything in them is read, cut or overwritten.
    """
    with ExitStack() as stack:
        for callback in callbacks:
            if isinstance(callback, Checkpoint):
                stack.enter_context(hold_lock(callback.folder))
                finish_replacements(callback.folder)
        yield


def _find_health(run: Run, tree: dict[str, Any]) -> Health:
    """What is wrong with the run at this moment. The host reads its tensors now anyway."""
    step = run.model.step
    if isinstance(step, TrainStep):
        parameter_names = step.names
        updates = int(tree["step"]["state"]["updates"])
        skips_in_a_row = int(tree["step"]["state"]["streak"])
    else:
        parameter_names = [name for name, _ in run.model.net.named_parameters()]
        updates = None
        skips_in_a_row = 0
    error = None
    if isinstance(run.error, FloatingPointError):
        text = f"{type(run.error).__name__}: {first_line(run.error)}"
        error = textwrap.shorten(text, MAX_ERROR_CHARS, placeholder=" …")
    return Health(
        nonfinite=find_nonfinite(tree, parameter_names),
        updates=updates,
        skips_in_a_row=skips_in_a_row,
        stalled=skips_in_a_row >= LONG_STREAK,
        error=error,
    )


def _warn_not_saved(run: Run, text: str) -> None:
    name = checkpoint.name_of(run.position)
    warnings.warn(f"checkpoint {name} was not saved, {text}", Notice, stacklevel=user_stacklevel())
