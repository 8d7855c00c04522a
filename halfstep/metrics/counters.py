"""Metrics as counters on the device: they add in place, never wait for the device, and can be captured in a graph."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_COUNTERS = ("total", "count")


class Ratio:
    """Σ total / Σ count over all updates, so that batches weigh by what they hold. Without updates: NaN, 0/0."""

    in_graph = True  # update() may run inside a captured CUDA graph

    def __init__(self, dtype: torch.dtype) -> None:
        self.total = torch.zeros((), dtype=dtype)
        self.count = torch.zeros((), dtype=dtype)

    def compute(self) -> Tensor:
        """The ratio so far, a float64 tensor on the device; float() of it waits."""
        return self.total.double() / self.count.double()

    def reset(self) -> None:
        """Back to no updates, in place."""
        self.total.zero_()
        self.count.zero_()

    def merge(self, other: Self) -> None:
        """Adds what another counter of the same settings has seen: another rank's, another shard's."""
        if type(other) is not type(self) or other.settings() != self.settings():
            raise ValueError(f"merge: expected another {self!r}, received {other!r}")
        self.total.add_(other.total.to(self.total.device))
        self.count.add_(other.count.to(self.count.device))

    def to(self, device: torch.device | str) -> Self:
        """Moves the counters; before a capture they must be where the outputs are."""
        self.total, self.count = self.total.to(device), self.count.to(device)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the counters."""
        return {name: getattr(self, name).clone() for name in _COUNTERS}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Puts saved counters in place, so that a captured graph goes on with them."""
        if sorted(saved) != sorted(_COUNTERS):
            raise ValueError(
                f"{self!r}: expected the counters {', '.join(_COUNTERS)}, received {', '.join(saved)}"
            )
        for name, value in saved.items():
            mine: Tensor = getattr(self, name)
            if value.dtype != mine.dtype or value.dim():
                expected = f"{name} as one {mine.dtype} number"
                raise ValueError(
                    f"{self!r}: expected {expected}, received {value.dtype} of shape {tuple(value.shape)}"
                )
        for name, value in saved.items():
            getattr(self, name).copy_(value)

    def settings(self) -> dict[str, Any]:
        """What two counters must share to be merged."""
        return {k: v for k, v in vars(self).items() if k not in _COUNTERS}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.settings().items())})"
        )

    def _add(self, total: Tensor, count: int | Tensor) -> None:
        if self.total.device != total.device:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{self!r}: its counters are on {self.total.device}, and a capture cannot move them; call "
                    f"to({str(total.device)!r}) before it"
                )
            self.to(total.device)
        self.total.add_(total)
        self.count.add_(count)


class Accuracy(Ratio):
    """The share of labels among the `top` largest scores; of equal scores the first class wins. NaN scores are wrong.

    Scores [N, C, ...] with labels [N, ...], one-hot or soft labels [N, C, ...], or one score per label, [N] or
    [N, 1, ...], where a logit above `threshold` means class 1, and so does a label above 0.5; labels outside 0 to 1 are
    refused there if they are on the CPU. Labels equal to `ignore_index` do not count.
    """

    def __init__(self, top: int = 1, *, ignore_index: int = -100, threshold: float = 0.0) -> None:
        if not isinstance(top, int) or top < 1:
            raise ValueError(f"Accuracy: expected top as 1 or more classes, received {top!r}")
        super().__init__(torch.int64)
        self.top, self.ignore_index, self.threshold = top, ignore_index, threshold

    def update(self, outputs: Any, labels: Tensor) -> None:
        """Counts one batch."""
        scores = logits_of(outputs)
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            came = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(
                f"Accuracy: expected scores as a floating tensor, or .logits, received {came}"
            )
        scores = scores.detach()
        classes = scores.shape[1] if scores.dim() > 1 else 1
        if self.top > classes:
            raise ValueError(
                f"Accuracy: expected scores of {self.top} or more classes, received {tuple(scores.shape)}"
            )
        truth, kept = self._truth(scores, labels, binary=classes == 1)
        hits = self._hits(scores, truth)
        self._add(
            (hits if kept is None else hits & kept).sum(),
            hits.numel() if kept is None else kept.sum(),
        )

    def _truth(
        self, scores: Tensor, labels: Tensor, *, binary: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Class numbers (0 where ignored), in the scores' shape without its classes, and which of them count."""
        places = scores.shape[:1] + scores.shape[2:]
        if binary and labels.shape in (scores.shape, places, (*places, 1)):
            labels, soft = labels.reshape(places), False
        else:
            soft = labels.shape == scores.shape
        if labels.shape != (scores.shape if soft else places) or (
            labels.is_floating_point() and not (soft or binary)
        ):
            raise ValueError(
                f"Accuracy: for scores of shape {tuple(scores.shape)} expected integer labels of shape {tuple(places)} "
                f"or soft labels of the scores' shape, received {labels.dtype} of shape {tuple(labels.shape)}"
            )
        if soft:
            return labels.argmax(1), None
        kept = (
            None if labels.is_floating_point() else labels.long() != self.ignore_index
        )  # uint8: -100 is class 156
        if binary and labels.device.type == "cpu":  # looking at others would wait for their device
            _check_binary(scores, labels if kept is None else labels[kept])
        truth = (labels > 0.5) if binary else labels
        return truth.long() if kept is None else torch.where(kept, truth, 0).long(), kept

    def _hits(self, scores: Tensor, truth: Tensor) -> Tensor:
        if scores.dim() == 1 or scores.shape[1] == 1:
            score = scores.reshape(truth.shape)
            return ((score > self.threshold) == truth.bool()) & ~score.isnan()
        if self.top == 1:
            best, place = scores.max(1)  # NaN when any score is
            return (place == truth) & ~best.isnan()
        own, number = (
            scores.gather(1, truth.unsqueeze(1)),
            torch.arange(scores.shape[1], device=scores.device),
        )
        earlier = number.view(-1, *[1] * (scores.dim() - 2)) < truth.unsqueeze(1)
        ahead = (scores > own) | ((scores == own) & earlier)
        return (ahead.sum(1) < self.top) & ~scores.isnan().any(1)


class Loss(Ratio):
    """The mean loss over all terms, in float64: Σ loss·count / Σ count, where count is what each loss averaged over."""

    def __init__(self) -> None:
        super().__init__(torch.float64)

    def update(self, loss: Tensor, count: float | Tensor = 1) -> None:
        """Adds a batch's mean loss; one over no terms (count 0, loss NaN) adds nothing."""
        if loss.numel() != 1:
            advice = "give its mean, and count=loss.numel()"
            raise ValueError(
                f"Loss: expected one number, received shape {tuple(loss.shape)}; {advice}"
            )
        value = loss.detach().double().reshape(())
        if isinstance(count, Tensor):
            n = count.detach().to(value.device, torch.float64).reshape(())
        else:
            n = torch.full_like(value, count)
        self._add(torch.where(n > 0, value * n, 0), n)


class Average(Ratio):
    """The mean of fn(outputs, labels): a tensor of terms counts each, a single number as often as there are labels."""

    in_graph = False  # nobody knows what fn does

    def __init__(self, fn: Callable[[Any, Any], Any]) -> None:
        super().__init__(torch.float64)
        self.fn = fn

    @torch.no_grad()
    def update(self, outputs: Any, labels: Any) -> None:
        """Adds one batch."""
        value = self.fn(outputs, labels)
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=torch.float64, device=self.total.device)
        rows = 1 if value.dim() else _rows(outputs, labels)
        n = value.numel() * rows
        total = value.detach().double().sum() * rows
        self._add(total if n else torch.zeros_like(total), n)  # a mean over no rows is NaN


def _check_binary(scores: Tensor, labels: Tensor) -> None:
    if not bool(((labels >= 0) & (labels <= 1)).all()):
        raise ValueError(
            f"Accuracy: for one score per sample, {tuple(scores.shape)}, expected labels 0 or 1, received "
            f"{labels.min().item()} to {labels.max().item()}; give scores of every class, [N, classes]"
        )


def _rows(outputs: Any, labels: Any) -> int:
    """The samples of a batch: the rows of its first tensor, labels first."""
    for leaf in tree_leaves((labels, outputs)):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise TypeError(
        "metric: a function that returns one number needs labels or outputs with rows to weigh it by"
    )


def logits_of(outputs: Any) -> Any:
    """The scores inside a Hugging Face output or a dict; anything else as it is."""
    found = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
    return outputs if found is None else found
