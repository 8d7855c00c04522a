"""Scalars for TensorBoard, an optional extra."""

from pathlib import Path
from typing import Any

from halfstep.callbacks.plateau import whole
from halfstep.engine import Callback, Row, Run


class TensorBoard(Callback):
    """Event files in `folder`: loss, lr, scale, skipped and grad_norm by step of the run, and `valid/…` by evaluation.

    Several parameter groups have `lr/0`, `lr/1`, …; grad_norm is that of the steps that end an update cycle. A resumed
    run hides what the interrupted one wrote after the checkpoint.
    """

    writes = True

    def __init__(self, folder: str | Path, *, every: int = 1) -> None:
        self.path, self.every = Path(folder), whole("TensorBoard", "every", every, 1)
        self._writer: Any = None

    def begin(self, run: Run) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard: expected the package tensorboard, which is not installed. "
                "Install it: pip install 'halfstep[tensorboard]'"
            ) from error
        purge = None if run.resumed is None else run.position + 1
        self._writer = SummaryWriter(str(self.path), purge_step=purge)

    def step(self, run: Run, row: Row) -> None:
        if row.global_step % self.every:
            return
        values = {"loss": row.loss, "scale": row.scale, "skipped": float(row.skipped)}
        values |= (
            {f"lr/{i}": lr for i, lr in enumerate(row.lr)}
            if isinstance(row.lr, tuple)
            else {"lr": row.lr}
        )
        if row.updated or row.skipped:
            values["grad_norm"] = row.grad_norm
        for name, value in values.items():
            self._writer.add_scalar(name, value, row.global_step)

    def visit(self, run: Run) -> None:
        for name, value in (run.scores or {}).items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"valid/{name}", value, run.position)

    def end(self, run: Run) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def state_dict(self) -> dict[str, Any]:
        """Nothing to remember: the steps are in the files. What was handed over is in them from here on."""
        if self._writer is not None:
            self._writer.flush()
        return {}
