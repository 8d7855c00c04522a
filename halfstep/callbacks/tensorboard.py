"""Scalars for TensorBoard, an optional extra."""

from pathlib import Path
from typing import Any

from halfstep.engine import Callback, Row, Run
from halfstep.utils.checks import whole_number
from halfstep.utils.keywords import suggest_keywords

# The words of other libraries.
FOREIGN_OPTIONS = {
    **dict.fromkeys(("log_dir", "logdir", "save_dir", "path"), "folder"),
    **dict.fromkeys(("update_freq", "every_steps"), "every"),
}


class TensorBoard(Callback):
    """Event files in `folder`: numbers of the steps by step, `valid/…` by evaluation.

    The numbers are loss, lr, scale, skipped and grad_norm, parts of the loss and metrics of the
    batch. Several parameter groups have `lr/0`,
    `lr/1`, …; grad_norm is that of the steps that end an update cycle. A resumed run hides what the
    interrupted one wrote after the checkpoint.
    """

    writes = True

    @suggest_keywords(None, names=FOREIGN_OPTIONS)
    def __init__(self, folder: str | Path, *, every: int = 1) -> None:
        self.path = Path(folder)
        self.every = whole_number("TensorBoard: every", every, minimum=1)
        self._writer: Any = None

    def begin(self, run: Run) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard: expected the package tensorboard, which is not installed. "
                "Install it: pip install 'halfstep[tensorboard]'"
            ) from error
        purge_step = None if run.resumed is None else run.position + 1
        self._writer = SummaryWriter(str(self.path), purge_step=purge_step)

    def step(self, run: Run, row: Row) -> None:
        if row.global_step % self.every:
            return
        values = {"loss": row.loss, "scale": row.scale, "skipped": float(row.skipped)}
        if isinstance(row.lr, tuple):
            for i, lr in enumerate(row.lr):
                values[f"lr/{i}"] = lr
        else:
            values["lr"] = row.lr
        if row.updated or row.skipped:
            values["grad_norm"] = row.grad_norm
        values.update(row.extras)
        for name, value in values.items():
            self._writer.add_scalar(name, value, row.global_step)

    def visit(self, run: Run) -> None:
        scores = run.scores or {}
        for name, score in scores.items():
            if isinstance(score, int | float):
                self._writer.add_scalar(f"valid/{name}", score, run.position)

    def end(self, run: Run) -> None:
        writer = self._writer
        self._writer = None
        if writer is not None:
            writer.close()

    def state_dict(self) -> dict[str, Any]:
        """Empty: the steps are in the files. Flushes them, so that a checkpoint is not ahead."""
        if self._writer is not None:
            self._writer.flush()
        return {}
