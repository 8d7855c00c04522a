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
from halfstep.checkpoint.attempts import (
    ATTEMPT_FILE,
    FolderClaim,
    Job,
    claim_folder,
    release_older_attempt,
)
from halfstep.checkpoint.disk import remove_folder
from halfstep.checkpoint.health import HEALTH_FILE, Health, find_nonfinite
from halfstep.checkpoint.lock import hold_lock, unwritable_folder
from halfstep.checkpoint.runs import finish_replacements, good_checkpoints, replace
from halfstep.checkpoint.verified import VerifiedCheckpoints
from halfstep.engine import Callback, Run
from halfstep.errors import NewerAttemptError, Notice, RankLostError
from halfstep.step import TrainStep
from halfstep.step.overflow import LONG_STREAK
from halfstep.storage.mirror import StoreMirror
from halfstep.storage.url import is_store_url
from halfstep.utils.atomic_files import TRASH_PREFIX
from halfstep.utils.checks import expect, whole_number
from halfstep.utils.keywords import suggest_keywords, user_stacklevel
from halfstep.utils.saved_state import SavedValue
from halfstep.utils.text import first_line

# The words of other libraries.
FOREIGN_OPTIONS = {
    **dict.fromkeys(("dirpath", "dirname", "filepath", "path", "directory"), "folder"),
    **dict.fromkeys(("output_dir", "save_dir"), "folder"),
    **dict.fromkeys(("monitor", "metric"), "best"),
    **dict.fromkeys(("save_top_k", "save_total_limit", "max_to_keep", "n_saved"), "keep"),
    "keep_checkpoint_max": "keep",
    **dict.fromkeys(("every_n_train_steps", "every_n_steps", "save_steps"), "every_steps"),
    "save_checkpoint_steps": "every_steps",
    **dict.fromkeys(("every_n_epochs", "period"), "every_epochs"),
    "train_time_interval": "every_seconds",
}
# Options that nothing stands for.
MISPLACED_OPTIONS = {
    "save_best_only": "write hs.Checkpoint('runs/mine', best='loss', keep=1)",
    "save_last": "the newest checkpoint is always there; leave it out",
    "save_weights_only": "weights alone are written by model.save('weights.safetensors')",
    **dict.fromkeys(
        ("filename", "prefix"),
        "a checkpoint is a folder named by its step; write hs.Checkpoint('runs/mine')",
    ),
    "save_freq": "write every_epochs=1, or every_steps=100",
}

MAX_ERROR_CHARS = 120  # of the error's first line, in a checkpoint that was saved after it


class Checkpoint(Callback):
    """Saves `folder/step-000000123/`, written atomically; `fit(resume="auto")` goes on from there.

    Saved at every `every_steps`-th step, at the end of every `every_epochs`-th epoch, when
    `every_seconds` have passed since the last save, when the run ends or is stopped by SIGINT or
    SIGTERM, and with `on_error` after an exception. The oldest are removed when there are more than
    `keep`. `best` names a score of the evaluations: the best checkpoint so far is kept too. A save
    that fails (a full disk) is a notice and training goes on; at the end of the run it is an error.
    The folder is locked during a fit: another process that wants to save there is refused at once.
    Of several ranks the first one saves. When another rank is lost, nothing is saved: the restart
    goes on from the newest checkpoint.

    `folder` may be the URL of a store, such as "s3://bucket/run". Then `self.folder` is a folder of
    this machine, and everything in it is uploaded while training goes on; `fit` waits for it at its
    end. `resume="auto"` brings the newest checkpoint from the store.
    """

    last = True
    writes = True

    @suggest_keywords(None, names=FOREIGN_OPTIONS, advice=MISPLACED_OPTIONS)
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
        self.store: StoreMirror | None = None
        if is_store_url(folder):
            self.store = StoreMirror(folder, "Checkpoint")
            folder = self.store.folder
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
        self._claim: FolderClaim | None = None  # of this attempt of a job, during a fit
        self._is_due = False  # a save waits for the end of the update cycle
        self._has_abandoned = False  # there may be some of steps that this run left to go back
        self._successor: Path | None = None  # the checkpoint that will take their place
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
        if self.store is not None:
            self.store.keep = self.keep
            self.store.protected_steps = self._protected_steps
            self.store.begin(None if run.resumed is None else run.position)
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
        if self.store is not None:
            self.store.check_no_other_run(resumed_step)
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
        if self.store is not None:
            self.store.warn_of_problems()
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
        # The state may be that of the middle of a step, and a newer attempt may have begun.
        if isinstance(run.error, RankLostError | NewerAttemptError):
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
        """The checkpoint of the best evaluation so far; None if there is none, or no `best`.

        One that another machine has saved comes from the store now.
        """
        if self.best_step is None:
            return None
        path = self.folder / checkpoint.name_of(self.best_step)
        if self.store is not None and not path.exists():
            self.store.fetch_step(self.best_step)
        return path

    def _save(self, run: Run) -> None:
        path = self.folder / checkpoint.name_of(run.position)
        if run.position != self._saved_step:
            tree = run.model.snapshot()
            health = _find_health(run, tree)
            extra_files = {HEALTH_FILE: health.encode()}
            if self._claim is not None:
                extra_files[ATTEMPT_FILE] = self._claim.attempt.encode()
            write = replace if path.exists() else checkpoint.save
            try:
                write(path, tree, extra_files=extra_files, guard=self._check_claim)
            except checkpoint.CheckpointError:
                self._check_claim()  # a newer attempt removes what an older one was writing
                raise
            self._saved_step = run.position
            self._saved_time = time.monotonic()
            if self._has_abandoned and health.is_good:
                self._successor = path
        if self.store is not None:
            self.store.protected_steps = self._protected_steps
            self.store.notify()
        self._prune()

    def _prune(self) -> None:
        """Removes what is too many: with a store, only where those that stay are there too."""
        uploaded = None if self.store is None else self.store.uploaded()
        if self._successor is not None and (uploaded is None or self._successor in uploaded):
            self._remove_abandoned(self._successor)
        protect = [self.folder / checkpoint.name_of(step) for step in self._protected_steps]
        checkpoint.prune(
            self.folder,
            self.keep,
            protect,
            verified=self._verified,
            successors=uploaded,
            guard=self._check_claim,
        )

    @property
    def _protected_steps(self) -> frozenset[int]:
        return frozenset() if self.best_step is None else frozenset([self.best_step])

    def fetch(self) -> None:
        """Brings the newest checkpoint of the store into the folder, where there is a store."""
        if self.store is not None:
            self.store.fetch()

    def finish_uploads(self, *, show: bool = True) -> None:
        """Waits until the store has everything in the folder, or a Notice says what it has not."""
        if self.store is not None:
            self.store.finish(self._prune, show=show)

    def _check_claim(self) -> None:
        """NewerAttemptError if a newer attempt of this job writes in the folder."""
        if self._claim is not None:
            self._claim.check()

    def _remove_abandoned(self, newest: Path) -> None:
        """Removes the checkpoints of later steps, from where training had failed.

        `begin` saw that none of them is good. They count updates that this run makes anew, and
        would pass for the future of its own checkpoints. The newest must be whole first.
        """
        self._successor = None
        if self._verified.examine(newest, read_again=True) is None:
            return
        for path in reversed(checkpoint.listing(self.folder)):
            is_later = checkpoint.step_of(path) > checkpoint.step_of(newest)
            if is_later and self._verified.examine(path) is not None:
                self._check_claim()
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
def lock_folders(callbacks: Iterable[Callback], job: Job | None = None) -> Iterator[None]:
    """Locks the folders of the Checkpoints among the callbacks, for one fit.

    It comes before anything in them is read, cut or overwritten. At the end, when the other
    callbacks have closed their files, it waits for uploads. `job`: this process is part of an
    attempt of a job of torchrun; an older one may write there no more.
    """
    callbacks = list(callbacks)
    shows_progress = any(callback.shows_progress for callback in callbacks)
    with ExitStack() as stack:
        for callback in callbacks:
            if isinstance(callback, Checkpoint):
                release_older_attempt(callback.folder, job)
                stack.enter_context(hold_lock(callback.folder))
                callback._claim = claim_folder(callback.folder, job)
                finish_replacements(callback.folder)
                stack.callback(callback.finish_uploads, show=shows_progress)
        yield


def check_claims(callbacks: Iterable[Callback]) -> None:
    """NewerAttemptError if a newer attempt of this job writes in the folder of a Checkpoint."""
    for callback in callbacks:
        if isinstance(callback, Checkpoint):
            callback._check_claim()


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
