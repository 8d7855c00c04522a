"""Losses whose numbers other programs rely on, computed in float32 or wider."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.utils.checks import expect


class CrossEntropy(nn.Module):
    """torch's cross entropy with label smoothing in torch's form or in MindSpore's.

    It is computed in promote(dtype, float32). smoothing_over="all" spreads `smoothing` over every
    class, the target's included (torch). "others" leaves 1 - smoothing on the target and gives each
    other class smoothing / (classes - 1), or `off_value` (MindSpore).
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
        self.smoothing = smoothing
        self.smoothing_over = smoothing_over
        self.off_value = off_value
        self.classes = classes
        self.ignore_index = ignore_index
        self.reduction = reduction
        self._check_settings(weight)
        self.register_buffer("weight", weight)
        if classes is not None:
            self._smoothing_in_torchs_form(classes)  # raises where it is not possible

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of logits [N, C, ...] or [C].

        `target` holds class numbers in any integer dtype, or probabilities.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # exp overflows half
        class_dim = 1 if logits.dim() > 1 else 0
        factor, label_smoothing = self._smoothing_in_torchs_form(logits.shape[class_dim])

        if target.is_floating_point():
            target = target.to(logits.dtype)
        else:
            target = target.long()
        weight = self.weight
        if weight is not None:
            weight = weight.to(logits.dtype)
        loss = F.cross_entropy(
            logits,
            target,
            weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=label_smoothing,
        )
        return loss if factor == 1.0 else loss * factor

    def extra_repr(self) -> str:
        """The settings that torch shows when the module is printed."""
        return (
            f"smoothing={self.smoothing}, smoothing_over={self.smoothing_over!r}, "
            f"reduction={self.reduction!r}"
        )

    def _smoothing_in_torchs_form(self, classes: int) -> tuple[float, float]:
        """A factor and a label_smoothing: factor · torch's loss is the loss that was asked for.

        That loss has the weight `on` on the target and `off` on each other class. torch's target is
        (1 - s)·onehot + s/C. Times a factor k: off = k·s/C, and on - off = k·(1 - s).
        """
        if self.classes not in (None, classes):
            raise ValueError(
                f"CrossEntropy: expected logits of {self.classes} classes, received {classes}"
            )
        if self.smoothing_over == "all":
            return 1.0, self.smoothing
        if classes < 2:
            raise ValueError(
                "CrossEntropy: smoothing over the other classes needs 2 or more, "
                f"received {classes}"
            )

        on = 1.0 - self.smoothing
        if self.off_value is None:
            off = self.smoothing / (classes - 1)
            factor = 1.0
        else:
            off = self.off_value
            factor = on + off * (classes - 1)
        if off > on:
            raise ValueError(
                f"CrossEntropy: smoothing={self.smoothing} leaves {on:g} on the target and "
                f"{off:g} on each other of {classes} classes; give a smaller smoothing"
            )
        return factor, off * classes / factor

    def _check_settings(self, weight: Tensor | None) -> None:
        """Raises a ValueError for settings that make no loss."""
        name = "CrossEntropy"
        smoothing = self.smoothing
        expect(0 <= smoothing < 1, name, "smoothing from 0 to below 1", smoothing)

        smoothing_over = self.smoothing_over
        is_known = smoothing_over in ("all", "others")
        expect(is_known, name, "smoothing_over 'all' or 'others'", smoothing_over)

        off_value = self.off_value
        if off_value is not None and (smoothing_over == "all" or not 0 <= off_value < 1):
            raise ValueError(
                f"{name}: expected off_value from 0 to below 1 and smoothing_over='others', "
                f"received {off_value!r} and {smoothing_over!r}"
            )

        classes = self.classes
        is_count = classes is None or classes >= 1
        expect(is_count, name, "1 or more classes, or None to go by the logits", classes)

        if weight is not None and (weight.dim() != 1 or len(weight) != (classes or len(weight))):
            expected = f"{classes} weights" if classes else "a 1-D tensor of weights"
            raise ValueError(
                f"{name}: expected {expected}, one per class, received shape {tuple(weight.shape)}"
            )

        is_known = self.reduction in ("mean", "sum", "none")
        expect(is_known, name, "reduction 'mean', 'sum' or 'none'", self.reduction)
