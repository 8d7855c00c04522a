"""Arguments of callbacks, checked when they are built; and which of two scores is better."""

import math
import re
from typing import Any, Literal, TypeAlias

from halfstep.engine import Run

Mode: TypeAlias = Literal["auto", "min", "max"]
_LOWER = (
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
_HIGHER = (
    "acc", "accuracy", "auc", "auroc", "f1", "precision", "recall", "score", "iou", "miou", "dice", "top", "topk"
)  # fmt: skip
_WORD = re.compile(
    r"f1(?!\d)|[^\W\d_]+"
)  # runs of letters: "top5_acc" is top, acc; and the one word with a digit


def whole(owner: str, name: str, value: Any, least: int = 0) -> int:
    """A whole number of `least` or more; True is none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"{owner}: expected {name} as a whole number of {least} or more, got {value!r}"
        )
    return value


def real(owner: str, name: str, value: Any, least: float = 0.0) -> float:
    """A finite number of `least` or more."""
    good = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= least
    )
    if not good:
        raise ValueError(
            f"{owner}: expected {name} as a finite number of {least} or more, got {value!r}"
        )
    return float(value)


def one_of(owner: str, name: str, value: Any, table: Any) -> Any:
    """The entry of `table` under `value`; anything else is told what there is."""
    if not isinstance(value, str) or value not in table:
        raise ValueError(
            f"{owner}: expected {name} as one of {', '.join(map(repr, table))}, got {value!r}"
        )
    return table[value]


def is_lower_better(owner: str, metric: str, mode: Mode) -> bool:
    """For "auto", by the words of the metric's name; one that has none of the tables', or of both, is refused."""
    if mode not in ("auto", "min", "max"):
        raise ValueError(f"{owner}: expected mode as 'auto', 'min' or 'max', got {mode!r}")
    if mode != "auto":
        return mode == "min"
    words = _WORD.findall(metric.lower())
    lower, higher = [w for w in words if w in _LOWER], [w for w in words if w in _HIGHER]
    if bool(lower) == bool(higher):
        name = f"{metric!r}, with {lower[0]!r} and {higher[0]!r} in it," if lower else repr(metric)
        raise ValueError(
            f"{owner}: the name {name} does not say whether less is better; give mode='min' or 'max'"
        )
    return bool(lower)


class Best:
    """The best of a score so far, ±inf before the first. Better is better by more than `min_delta`; NaN never is."""

    def __init__(self, owner: str, metric: str, mode: Mode, min_delta: float) -> None:
        if not isinstance(metric, str):
            raise TypeError(
                f"{owner}: expected metric as the name of a score, such as 'loss', got {metric!r}"
            )
        self.owner, self.metric = owner, metric
        self.lower = is_lower_better(owner, metric, mode)
        self.min_delta = real(owner, "min_delta", min_delta)
        self.reset()

    def reset(self) -> None:
        self.value = math.inf if self.lower else -math.inf

    def check(self, run: Run) -> None:
        """Whether evaluations will have this score, before anything is trained."""
        known = {"loss": None, **dict.fromkeys(run.model.metrics)}
        if self.metric not in known:
            bare = re.sub("^val(id)?_", "", self.metric)
            more = f"More of them: Model(metrics={{{self.metric!r}: …}})"
            hint = (
                f"Did you mean {bare!r} (the history's {f'valid_{bare}'!r})?"
                if bare in known
                else more
            )
            raise ValueError(
                f"{self.owner}: expected metric as one of the scores {', '.join(map(repr, known))}, got "
                f"{self.metric!r}. {hint}"
            )

    def take(self, scores: dict[str, float]) -> bool:
        """Whether this evaluation's score is better than the best so far; it is the best from then on."""
        if self.metric not in scores:
            raise ValueError(
                f"{self.owner}: expected metric as one of {sorted(scores)}, got {self.metric!r}"
            )
        value = scores[self.metric]
        if not isinstance(value, int | float):
            raise TypeError(
                f"{self.owner}: expected {self.metric!r} as one number, got {type(value).__name__}"
            )
        better = (
            value < self.value - self.min_delta
            if self.lower
            else value > self.value + self.min_delta
        )
        if better:
            self.value = float(value)
        return better
