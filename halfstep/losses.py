"""Losses whose numbers other programs rely on, computed in float32 or wider."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CrossEntropy(nn.Module):
    """torch's cross entropy with label smoothing in torch's form or in MindSpore's, in promote(dtype, float32).

    smoothing_over="all" spreads `smoothing` over every class, the target's included (torch). "others" leaves
    1 - smoothing on the target and gives each other class smoothing / (classes - 1), or `off_value` (MindSpore).
    """

    weight: Tensor | None

    def __init__(
        self,
        smoothing: float = 0.0,
        *,
        smoothing_over: Literal["all", "others"] = "all",
        off_value: float | None = None,
        classes: int | None = None,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        super().__init__()
        _check(smoothing, smoothing_over, off_value, classes, weight, reduction)
        self.smoothing, self.smoothing_over, self.off_value = smoothing, smoothing_over, off_value
        self.classes, self.ignore_index, self.reduction = classes, ignore_index, reduction
        self.register_buffer("weight", weight)
        if classes is not None:
            self._mixture(classes)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Logits [N, C, ...] or [C]; target of class numbers in any integer dtype, or of probabilities."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # exp overflows half
        factor, smoothing = self._mixture(logits.shape[1 if logits.dim() > 1 else 0])
        loss = F.cross_entropy(
            logits,
            target.to(logits.dtype) if target.is_floating_point() else target.long(),
            None if self.weight is None else self.weight.to(logits.dtype),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=smoothing,
        )
        return loss if factor == 1.0 else loss * factor

    def extra_repr(self) -> str:
        return f"smoothing={self.smoothing}, smoothing_over={self.smoothing_over!r}, reduction={self.reduction!r}"

    def _mixture(self, classes: int) -> tuple[float, float]:
        """Factor and label_smoothing that make torch's form give `on` to the target and `off` to each other class.

        torch's target is (1 - s)·onehot + s/C: times k, off = k·s/C and on - off = k·(1 - s).
        """
        if self.classes not in (None, classes):
            raise ValueError(
                f"CrossEntropy: expected logits of {self.classes} classes, received {classes}"
            )
        if self.smoothing_over == "all":
            return 1.0, self.smoothing
        if classes < 2:
            raise ValueError(
                f"CrossEntropy: smoothing over the other classes needs 2 or more, received {classes}"
            )
        on = 1.0 - self.smoothing
        off = self.smoothing / (classes - 1) if self.off_value is None else self.off_value
        if off > on:
            raise ValueError(
                f"CrossEntropy: smoothing={self.smoothing} leaves {on:g} on the target and {off:g} on each other of "
                f"{classes} classes; give a smaller smoothing"
            )
        factor = 1.0 if self.off_value is None else on + off * (classes - 1)
        return factor, off * classes / factor


def _check(
    smoothing: float,
    smoothing_over: str,
    off_value: float | None,
    classes: int | None,
    weight: Tensor | None,
    reduction: str,
) -> None:
    if not 0 <= smoothing < 1:
        raise ValueError(
            f"CrossEntropy: expected smoothing from 0 to below 1, received {smoothing!r}"
        )
    if smoothing_over not in ("all", "others"):
        raise ValueError(
            f"CrossEntropy: expected smoothing_over 'all' or 'others', received {smoothing_over!r}"
        )
    if off_value is not None and (smoothing_over == "all" or not 0 <= off_value < 1):
        raise ValueError(
            f"CrossEntropy: expected off_value from 0 to below 1 and smoothing_over='others', received {off_value!r} "
            f"and {smoothing_over!r}"
        )
    if classes is not None and classes < 1:
        raise ValueError(
            f"CrossEntropy: expected 1 or more classes, or None to go by the logits, received {classes!r}"
        )
    if weight is not None and (weight.dim() != 1 or len(weight) != (classes or len(weight))):
        expected = f"{classes} weights" if classes else "a 1-D tensor of weights"
        raise ValueError(
            f"CrossEntropy: expected {expected}, one per class, received shape {tuple(weight.shape)}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f"CrossEntropy: expected reduction 'mean', 'sum' or 'none', received {reduction!r}"
        )
