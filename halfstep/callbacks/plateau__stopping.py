"""Ending a run, or lowering its learning rate, when a score no longer gets better."""

import signal
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.callbacks.plateau import Best, Mode, real, whole
from halfstep.engine import Callback, Run
from halfstep.errors import Notice
from halfstep.step import TrainStep


class EarlyStopping(Callback):
    """Stops at the `patience`-th evaluation in a row whose score is not better than the best; 0 means the first, too.

    Better by more than `min_delta`; NaN never is. The first `start_epoch` epochs do not count. `restore_best` keeps a
    copy of the best weights and puts it back when the run ends by itself; after an error or a signal the weights are
    those of the last step, for a checkpoint to go on from. A resumed run that had stopped stays stopped, unless it is
    given more patience.
    """

    def __init__(
        self, metric: str = "loss", patience: int = 3, min_delta: float = 0.0, mode: Mode = "auto", *,
        restore_best: bool = False, start_epoch: int = 0,
    ) -> None:  # fmt: skip
        self.best = Best("EarlyStopping", metric, mode, min_delta)
        self.patience = whole("EarlyStopping", "patience", patience)
        self.start_epoch = whole("EarlyStopping", "start_epoch", start_epoch)
        self.restore_best = restore_best
        self._reset()

    def _reset(self) -> None:
        self.best.reset()
        self.wait = 0
        self.best_step: int | None = None
        self._weights: dict[str, Tensor] = {}
        self._seen = False

    def begin(self, run: Run) -> None:
        if (
            run.resumed is None
        ):  # another run's best is no measure for this one, and its weights are not ours
            self._reset()
        self.best.check(run)
        self._decide(run)

    def visit(self, run: Run) -> None:
        if run.scores is None:
            return
        self._seen = True
        if run.epoch <= self.start_epoch:
            return
        if self.best.take(run.scores):
            self.wait, self.best_step = 0, run.position
            if self.restore_best:
                self._weights = {name: t.detach().clone() for name, t in _weights(run).items()}
        else:
            self.wait += 1
            self._decide(run)

    def _decide(self, run: Run) -> None:
        if self.wait >= max(1, self.patience):
            best = (
                "there was none"
                if self.best_step is None
                else f"{self.best.value:g} at step {self.best_step}"
            )
            times = f"{self.wait} evaluation{'' if self.wait == 1 else 's'} in a row"
            run.stop(
                f"EarlyStopping: {self.best.metric} was not better than its best ({best}) in {times}"
            )

    def end(self, run: Run) -> None:
        if run.error is not None or run.stopped in signal.Signals.__members__:
            return
        _tell_unevaluated("EarlyStopping", self._seen or run.stopped is not None)
        with torch.no_grad():
            now = _weights(run) if self._weights else {}
            for name, kept in self._weights.items():
                now[name].copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best.value, "wait": self.wait, "best_step": self.best_step, "seen": self._seen,
            "weights": dict(self._weights),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best.value, self.wait, self.best_step = (
            state["best"],
            state["wait"],
            state["best_step"],
        )
        self._seen, self._weights = (
            state["seen"],
            dict(state["weights"]) if self.restore_best else {},
        )


class ReduceLROnPlateau(Callback):
    """Multiplies every learning rate by `factor` at evaluation number `patience + 1` in a row that is not better.

    torch's scheduler of that name with threshold_mode="abs" and eps=0. After a cut, `cooldown` evaluations are not
    counted. `min_lr` is one number, or one per parameter group.
    """

    def __init__(
        self, metric: str = "loss", factor: float = 0.1, patience: int = 10, *, min_lr: float | Sequence[float] = 0.0,
        cooldown: int = 0, min_delta: float = 1e-4, mode: Mode = "auto",
    ) -> None:  # fmt: skip
        self.best = Best("ReduceLROnPlateau", metric, mode, min_delta)
        self.factor = real("ReduceLROnPlateau", "factor", factor)
        if not 0 < self.factor < 1:
            raise ValueError(f"ReduceLROnPlateau: expected factor between 0 and 1, got {factor!r}")
        self.patience = whole("ReduceLROnPlateau", "patience", patience)
        self.cooldown = whole("ReduceLROnPlateau", "cooldown", cooldown)
        each = min_lr if isinstance(min_lr, Sequence) else [min_lr]
        self.min_lr = [real("ReduceLROnPlateau", "min_lr", lr) for lr in each]
        self._reset()

    def _reset(self) -> None:
        self.best.reset()
        self.wait, self.cooling, self._seen = 0, 0, False

    def begin(self, run: Run) -> None:
        if run.resumed is None:
            self._reset()
        self.best.check(run)
        options = getattr(run.model.step, "options", None)
        if run.model.schedule is not None or getattr(options, "lr", None) is not None:
            raise ValueError(
                "ReduceLROnPlateau: this model has a schedule, which sets the learning rate at every update and would "
                "undo each cut. Leave out Model(schedule=…) or this callback."
            )
        if run.model.optimizer is None:
            raise ValueError(
                "ReduceLROnPlateau: expected a model with an optimizer; give Model(optimizer=…)"
            )
        groups = len(run.model.optimizer.param_groups)
        if len(self.min_lr) not in (1, groups):
            raise ValueError(
                f"ReduceLROnPlateau: expected one min_lr, or {groups}, got {len(self.min_lr)}"
            )

    def visit(self, run: Run) -> None:
        if run.scores is None:
            return
        self._seen = True
        self.wait = 0 if self.best.take(run.scores) else self.wait + 1
        if self.cooling > 0:
            self.cooling, self.wait = self.cooling - 1, 0
        if self.wait > self.patience:
            self._cut(run)
            self.cooling, self.wait = self.cooldown, 0

    def _cut(self, run: Run) -> None:
        groups = run.optimizer.param_groups
        floors = self.min_lr * len(groups) if len(self.min_lr) == 1 else self.min_lr
        for group, floor in zip(groups, floors, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(self.factor).clamp_(
                    min=floor
                )  # in place: a captured step reads this very tensor
            else:
                group["lr"] = max(group["lr"] * self.factor, floor)

    def end(self, run: Run) -> None:
        _tell_unevaluated(
            "ReduceLROnPlateau", self._seen or run.stopped is not None or run.error is not None
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best.value,
            "wait": self.wait,
            "cooling": self.cooling,
            "seen": self._seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best.value, self._seen = state["best"], state["seen"]
        self.wait, self.cooling = state["wait"], state["cooling"]


def _weights(run: Run) -> dict[str, Tensor]:
    """What an evaluation looks at: the network's tensors, their averages, and what rounding has put aside of them."""
    found = {f"net.{name}": t for name, t in run.net.state_dict().items() if isinstance(t, Tensor)}
    if isinstance(run.model.step, TrainStep):
        state = run.model.step.state
        found |= {f"ema.{i}": t for i, t in enumerate(state.ema)}
        found |= {f"residue.{i}": t for i, t in enumerate(state.residue)}
    return found


def _tell_unevaluated(owner: str, fine: bool) -> None:
    if not fine:
        warnings.warn(
            f"{owner}: nothing was evaluated in this run, so it did nothing; give fit(valid=…)",
            Notice,
            2,
        )
