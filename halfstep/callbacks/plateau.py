"""When a score stops getting better: end the run, or lower its learning rate."""

import math
import re
import signal
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor

from halfstep.engine import Callback, Run
from halfstep.errors import Notice
from halfstep.step import TrainStep
from halfstep.utils.checks import expect, finite_number, one_of, whole_number
from halfstep.utils.keywords import suggest_keywords, user_stacklevel
from halfstep.utils.saved_state import SavedValue
from halfstep.utils.text import plural

Mode: TypeAlias = Literal["auto", "min", "max"]

# Words in the name of a metric that say which of two scores is better.
LOWER_IS_BETTER = (
    "loss",
    "losses",
    "err",
    "error",
    "errors",
    "mse",
    "rmse",
    "mae",
    "perplexity",
    "ppl",
    "nll",
    "wer",
    "cer",
)
HIGHER_IS_BETTER = (
    "acc",
    "accuracy",
    "auc",
    "auroc",
    "f1",
    "precision",
    "recall",
    "score",
    "iou",
    "miou",
    "dice",
    "top",
    "topk",
)

# Runs of letters: "top5_acc" is top, acc. "f1" is the only word with a digit.
METRIC_WORD = re.compile(r"f1(?!\d)|[^\W\d_]+")

# The words of other libraries.
FOREIGN_OPTIONS = {
    "monitor": "metric",
    **dict.fromkeys(("threshold", "early_stopping_threshold", "delta"), "min_delta"),
    "early_stopping_patience": "patience",
    "restore_best_weights": "restore_best",
    "start_from_epoch": "start_epoch",
}
# Options that nothing stands for.
NO_VERBOSE = {"verbose": "a message is always printed; leave it out"}


def is_lower_better(owner: str, metric: str, mode: Mode) -> bool:
    """Whether a lower score is better; for "auto", by the words in the metric's name.

    A name with no known word, or with words of both kinds, is a ValueError.
    """
    one_of(f"{owner}: mode", mode, ("auto", "min", "max"))
    if mode != "auto":
        return mode == "min"

    words = METRIC_WORD.findall(metric.lower())
    lower = [word for word in words if word in LOWER_IS_BETTER]
    higher = [word for word in words if word in HIGHER_IS_BETTER]
    if lower and not higher:
        return True
    if higher and not lower:
        return False

    name = repr(metric)
    if lower:
        name = f"{metric!r}, with {lower[0]!r} and {higher[0]!r} in it,"
    raise ValueError(
        f"{owner}: the name {name} does not say whether less is better; give mode='min' or 'max'"
    )


class Best:
    """The best value of a score so far; inf or -inf before the first.

    A score is better if it differs from the best by more than `min_delta`. NaN never is, and
    nothing is better than an infinite best: a notice says so, once.
    """

    def __init__(self, owner: str, metric: str, mode: Mode, min_delta: float) -> None:
        if not isinstance(metric, str):
            raise TypeError(
                f"{owner}: expected metric as the name of a score, such as 'loss', got {metric!r}"
            )
        self.owner = owner
        self.metric = metric
        self.lower_is_better = is_lower_better(owner, metric, mode)
        self.min_delta = finite_number(f"{owner}: min_delta", min_delta, minimum=0)
        self.reset()

    def reset(self) -> None:
        """Forgets all scores."""
        self._has_warned = False
        self._may_be_part = False
        self.value = math.inf if self.lower_is_better else -math.inf

    def check(self, run: Run) -> None:
        """ValueError unless this run's evaluations will have the score. Before training.

        What a loss of the user's own returns beside itself shows at the first visit.
        """
        self._may_be_part = False
        known = run.score_names or ("loss", *run.model.metrics)
        if self._find(known) is not None:
            return
        is_other_name = re.sub("^val(id)?_", "", self.metric) in known
        if run.may_have_parts and run.evaluates and not is_other_name:
            self._may_be_part = True
            return
        self._refuse(known)

    def check_part(self, run: Run) -> None:
        """At a visit: ValueError if the score was left open, and no part of the loss has its name.

        Several data sets have `clean_mask`, `noisy_mask`, …: the end of the name says the part.
        """
        if not self._may_be_part or not run.training:
            return
        self._may_be_part = False
        parts = [name for name in run.training if name not in run.train_metrics]
        if not any(self.metric == name or self.metric.endswith(f"_{name}") for name in parts):
            self._refuse([*run.score_names, *(name for name in parts if name != "loss")])

    def _find(self, names: Iterable[str]) -> str | None:
        """The score that is followed, which may have the name that the history gives it."""
        for name in names:
            if self.metric in (name, f"valid_{name}"):
                return name
        return None

    def _refuse(self, known: Iterable[str]) -> NoReturn:
        advice = f"More of them: Model(metrics={{{self.metric!r}: …}})"
        bare_name = re.sub("^val(id)?_", "", self.metric)
        close = get_close_matches(bare_name, list(known), 1, cutoff=0.8)
        sets_with_it = [name for name in known if name.endswith(f"_{bare_name}")]
        if close:
            advice = f"Did you mean {close[0]!r} (the history's 'valid_{close[0]}')?"
        if sets_with_it:
            advice = f"There are several validation sets: name one, such as {sets_with_it[0]!r}"
        raise ValueError(
            f"{self.owner}: expected metric as one of the scores {', '.join(map(repr, known))}, "
            f"got {self.metric!r}. {advice}"
        )

    def take(self, scores: dict[str, Any]) -> bool:
        """Whether this evaluation's score is better than the best so far. Then it is the best."""
        name = self._find(scores)
        if name is None:
            raise ValueError(
                f"{self.owner}: expected metric as one of {sorted(scores)}, got {self.metric!r}"
            )
        score = scores[name]
        if not isinstance(score, int | float):
            received = type(score).__name__
            if isinstance(score, Tensor):
                received = f"a tensor of shape {list(score.shape)}"
            raise TypeError(
                f"{self.owner}: expected {self.metric!r} as one number, got {received}; follow "
                "another score, or give a metric that computes one number, such as the mean"
            )
        if self.lower_is_better:
            better = score < self.value - self.min_delta
        else:
            better = score > self.value + self.min_delta
        if better:
            self.value = float(score)
        if not math.isfinite(score) and (better or math.isnan(score)):
            self._warn_nonfinite(score)
        return better

    def _warn_nonfinite(self, score: float) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        effect = "no later score can be better"
        if math.isnan(score):
            effect = "it counts as not better than any other"
        warnings.warn(
            f"{self.owner}: the score {self.metric!r} is {score}: {effect}. Look at the metric and "
            "the loss of the epochs before it",
            Notice,
            stacklevel=user_stacklevel(),
        )


class EarlyStopping(Callback):
    """Stops at the `patience`-th evaluation in a row that is not better than the best.

    A patience of 0 means the first, too. Better is better by more than `min_delta`; NaN never is.
    The first `start_epoch` epochs do not count. `restore_best` keeps a copy of the best weights and
    puts it back when the run ends by itself; after an error or a signal the weights are those of
    the last step, for a checkpoint to go on from. A resumed run that had stopped stays stopped,
    unless it is given more patience.
    """

    @suggest_keywords(None, names=FOREIGN_OPTIONS, advice=NO_VERBOSE)
    def __init__(
        self,
        metric: str = "loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Mode = "auto",
        *,
        restore_best: bool = False,
        start_epoch: int = 0,
    ) -> None:
        self.best = Best("EarlyStopping", metric, mode, min_delta)
        self.patience = whole_number("EarlyStopping: patience", patience, minimum=0)
        self.start_epoch = whole_number("EarlyStopping: start_epoch", start_epoch, minimum=0)
        self.restore_best = restore_best
        self._reset()

    def _reset(self) -> None:
        self.best.reset()
        self.wait = 0  # evaluations in a row that were not better
        self.best_step: int | None = None
        self._best_weights: dict[str, Tensor] = {}
        self._has_evaluated = False

    def begin(self, run: Run) -> None:
        # Another run's best is no measure for this one, and its weights are not this one's.
        if run.resumed is None:
            self._reset()
        self.best.check(run)
        self._stop_if_out_of_patience(run)

    def visit(self, run: Run) -> None:
        self.best.check_part(run)
        if run.scores is None:
            return
        self._has_evaluated = True
        if run.epoch <= self.start_epoch:
            return
        if self.best.take(run.scores):
            self.wait = 0
            self.best_step = run.position
            if self.restore_best:
                weights = _evaluated_tensors(run)
                self._best_weights = {name: w.detach().clone() for name, w in weights.items()}
        else:
            self.wait += 1
            self._stop_if_out_of_patience(run)

    def _stop_if_out_of_patience(self, run: Run) -> None:
        if self.wait < max(1, self.patience):
            return
        best = "there was none"
        if self.best_step is not None:
            best = f"{self.best.value:g} at step {self.best_step}"
        run.stop(
            f"EarlyStopping: {self.best.metric} was not better than its best ({best}) in "
            f"{plural(self.wait, 'evaluation')} in a row"
        )

    def end(self, run: Run) -> None:
        if run.error is not None or run.stopped in signal.Signals.__members__:
            return
        if not self._has_evaluated and run.stopped is None:
            _warn_nothing_evaluated("EarlyStopping")
        if self._best_weights:
            current = _evaluated_tensors(run)
            with torch.no_grad():
                for name, best in self._best_weights.items():
                    current[name].copy_(best)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best.value,
            "wait": self.wait,
            "best_step": self.best_step,
            "seen": self._has_evaluated,
            "weights": dict(self._best_weights),
        }

    def check_state(self, run: Run, saved: SavedValue) -> None:
        saved.field("best").number(not_nan=True)
        saved.field("wait").whole_number()
        saved.field("seen").flag()
        best_step = saved.field("best_step")
        if best_step.value is not None:
            best_step.whole_number()
        weights = saved.field("weights").entries()
        if not self.restore_best:
            return
        tensors = _evaluated_tensors(run)
        for name, weight in weights.items():
            if name not in tensors:
                weight.refuse("no tensor of that name, which the network has not")
            weight.tensor_like(tensors[name], same_dtype=False)
        if weights:
            for name in tensors:
                saved.field("weights").field(name)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best.value = state["best"]
        self.wait = state["wait"]
        self.best_step = state["best_step"]
        self._has_evaluated = state["seen"]
        self._best_weights = dict(state["weights"]) if self.restore_best else {}


class ReduceLROnPlateau(Callback):
    """Multiplies learning rates by `factor` when a score stops getting better.

    That is at evaluation number `patience + 1` in a row that is not better, as torch's scheduler of
    that name has it with threshold_mode="abs" and eps=0. After a cut, `cooldown` evaluations are
    not counted. `min_lr` is one number, or one per parameter group.
    """

    @suggest_keywords(
        None,
        names=FOREIGN_OPTIONS,
        advice={**NO_VERBOSE, "optimizer": "it moves the rates of the Model's optimizer"},
    )
    def __init__(
        self,
        metric: str = "loss",
        factor: float = 0.1,
        patience: int = 10,
        *,
        min_lr: float | Sequence[float] = 0.0,
        cooldown: int = 0,
        min_delta: float = 1e-4,
        mode: Mode = "auto",
    ) -> None:
        owner = "ReduceLROnPlateau"
        self.best = Best(owner, metric, mode, min_delta)
        self.factor = finite_number(f"{owner}: factor", factor)
        expect(0 < self.factor < 1, f"{owner}: factor", "a number between 0 and 1", factor)
        self.patience = whole_number(f"{owner}: patience", patience, minimum=0)
        self.cooldown = whole_number(f"{owner}: cooldown", cooldown, minimum=0)
        floors = min_lr if isinstance(min_lr, Sequence) else [min_lr]
        self.min_lr = [finite_number(f"{owner}: min_lr", floor, minimum=0) for floor in floors]
        self._reset()

    def _reset(self) -> None:
        self.best.reset()
        self.wait = 0  # evaluations in a row that were not better
        self.cooling = 0  # evaluations that are still not counted
        self._has_evaluated = False

    def begin(self, run: Run) -> None:
        if run.resumed is None:
            self._reset()
        self.best.check(run)

        options = getattr(run.model.step, "options", None)
        if run.model.schedule is not None or getattr(options, "lr", None) is not None:
            raise ValueError(
                "ReduceLROnPlateau: this model has a schedule, which sets the learning rate "
                "itself and would undo each cut. Leave out Model(schedule=…) or this "
                "callback."
            )
        if run.model.optimizer is None:
            raise ValueError(
                "ReduceLROnPlateau: expected a model with an optimizer; give Model(optimizer=…)"
            )
        group_count = len(run.model.optimizer.param_groups)
        if len(self.min_lr) not in (1, group_count):
            raise ValueError(
                f"ReduceLROnPlateau: expected one min_lr, or {group_count}, got {len(self.min_lr)}"
            )

    def visit(self, run: Run) -> None:
        self.best.check_part(run)
        if run.scores is None:
            return
        self._has_evaluated = True
        if self.best.take(run.scores):
            self.wait = 0
        else:
            self.wait += 1
        if self.cooling > 0:
            self.cooling -= 1
            self.wait = 0
        if self.wait > self.patience:
            self._cut_learning_rates(run)
            self.cooling = self.cooldown
            self.wait = 0

    def _cut_learning_rates(self, run: Run) -> None:
        groups = run.optimizer.param_groups
        floors = self.min_lr
        if len(floors) == 1:
            floors = floors * len(groups)
        for group, floor in zip(groups, floors, strict=True):
            if isinstance(group["lr"], Tensor):
                # In place: a captured step reads this very tensor.
                group["lr"].mul_(self.factor).clamp_(min=floor)
            else:
                group["lr"] = max(group["lr"] * self.factor, floor)

    def end(self, run: Run) -> None:
        if not self._has_evaluated and run.stopped is None and run.error is None:
            _warn_nothing_evaluated("ReduceLROnPlateau")

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best.value,
            "wait": self.wait,
            "cooling": self.cooling,
            "seen": self._has_evaluated,
        }

    def check_state(self, run: Run, saved: SavedValue) -> None:
        saved.field("best").number(not_nan=True)
        saved.field("wait").whole_number()
        saved.field("cooling").whole_number()
        saved.field("seen").flag()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best.value = state["best"]
        self.wait = state["wait"]
        self.cooling = state["cooling"]
        self._has_evaluated = state["seen"]


def _evaluated_tensors(run: Run) -> dict[str, Tensor]:
    """Every tensor that an evaluation depends on, by name.

    The network's tensors, their moving averages (EMA), and the parts of the weights that rounding
    has put aside.
    """
    tensors = {}
    for name, value in run.net.state_dict().items():
        if isinstance(value, Tensor):
            tensors[f"net.{name}"] = value
    if isinstance(run.model.step, TrainStep):
        state = run.model.step.state
        for i, average in enumerate(state.ema):
            tensors[f"ema.{i}"] = average
        for i, residue in enumerate(state.residue):
            tensors[f"residue.{i}"] = residue
    return tensors


def _warn_nothing_evaluated(owner: str) -> None:
    warnings.warn(
        f"{owner}: nothing was evaluated in this run, so it did nothing; give fit(valid=…)",
        Notice,
        stacklevel=user_stacklevel(),
    )
