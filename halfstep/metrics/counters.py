"""Metrics as counters on the device.

They add in place, never wait for the device, and can be captured in a CUDA graph.
"""

import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from halfstep.errors import Notice
from halfstep.metrics.broadcasts import BroadcastCheck
from halfstep.utils.checks import whole_number
from halfstep.utils.keywords import suggest_keywords, user_stacklevel
from halfstep.utils.saved_state import describe_value

COUNTER_NAMES = ("total", "count")

# So many scores of one batch are taken for probabilities where all are between 0 and 1.
MIN_PROBABILITIES = 8

# Options of torchmetrics' and torchvision's accuracies, which have other names here or none.
FOREIGN_OPTIONS = {"top_k": "top", "topk": "top", "k": "top"}
NEEDLESS_OPTIONS = {
    "task": "write Accuracy(): the shapes of the scores and labels say what the task is",
    "num_classes": "write Accuracy(): the scores have one column for each class",
    "average": "every sample counts once; torchmetrics' own classes have other averages",
}


class Ratio:
    """Σ total / Σ count over all updates, so that batches weigh by what they hold.

    Without updates it is NaN, as 0/0.
    """

    in_graph = True  # update() may run inside a captured CUDA graph

    def __init__(self, dtype: torch.dtype) -> None:
        self.total = torch.zeros((), dtype=dtype)
        self.count = torch.zeros((), dtype=dtype)

    def terms(self, first: Any, second: Any, /) -> tuple[Tensor, int | Tensor]:
        """What `update` with these arguments adds to total and count. Changes nothing."""
        raise NotImplementedError

    def compute(self) -> Tensor:
        """The ratio so far, a float64 tensor on the device; float() of it waits."""
        return self.total.double() / self.count.double()

    def reset(self) -> None:
        """Sets the counters to zero, in place."""
        self.total.zero_()
        self.count.zero_()

    def merge(self, other: Self) -> None:
        """Adds what another counter of the same settings has seen, on another rank or shard."""
        if type(other) is not type(self) or other.settings() != self.settings():
            raise ValueError(f"merge: expected another {self!r}, received {other!r}")
        self.total.add_(other.total.to(self.total.device))
        self.count.add_(other.count.to(self.count.device))

    def to(self, device: torch.device | str) -> Self:
        """Moves the counters. Before a capture they must be where the outputs are."""
        self.total = self.total.to(device)
        self.count = self.count.to(device)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the counters."""
        return {name: getattr(self, name).clone() for name in COUNTER_NAMES}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Copies saved counters into these, so that a captured graph goes on with them."""
        received = sorted(map(str, saved)) if isinstance(saved, dict) else [type(saved).__name__]
        if received != sorted(COUNTER_NAMES):
            raise ValueError(
                f"{self!r}: expected the counters {', '.join(COUNTER_NAMES)}, "
                f"received {', '.join(received)}"
            )
        # Check all before the first is written.
        for name, value in saved.items():
            counter: Tensor = getattr(self, name)
            is_counter = isinstance(value, Tensor) and value.dtype == counter.dtype
            if not is_counter or value.dim():
                received_value = describe_value(value)
                if isinstance(value, Tensor):
                    received_value = f"{value.dtype} of shape {tuple(value.shape)}"
                raise ValueError(
                    f"{self!r}: expected {name} as one {counter.dtype} number, "
                    f"received {received_value}"
                )
        for name, value in saved.items():
            getattr(self, name).copy_(value)

    def settings(self) -> dict[str, Any]:
        """What two counters must share to be merged."""
        names = [name for name in vars(self) if name not in COUNTER_NAMES and name[0] != "_"]
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        settings = [f"{name}={value!r}" for name, value in self.settings().items()]
        return f"{type(self).__name__}({', '.join(settings)})"

    def _add(self, total: Tensor, count: int | Tensor) -> None:
        if self.total.device != total.device:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{self!r}: its counters are on {self.total.device}, and a capture cannot move "
                    f"them; call to({str(total.device)!r}) before it"
                )
            self.to(total.device)
        self.total.add_(total)
        self.count.add_(count)


class Accuracy(Ratio):
    """The share of labels among the `top` largest scores.

    Of equal scores the first class wins, and NaN scores are wrong. Accepted are

    - scores [N, C, ...] with labels [N, ...], or one-hot or soft labels [N, C, ...];
    - one score for each label, [N] or [N, 1, ...]: a logit above `threshold` means class 1, and so
      does a label above 0.5.

    Labels equal to `ignore_index` do not count. On a CPU, where looking at values does not wait,
    labels that no score stands for and labels of several classes at once are refused.
    """

    @suggest_keywords("Accuracy", names=FOREIGN_OPTIONS, advice=NEEDLESS_OPTIONS)
    def __init__(self, top: int = 1, *, ignore_index: int = -100, threshold: float = 0.0) -> None:
        super().__init__(torch.int64)
        self.top = whole_number("Accuracy: top", top, minimum=1, of_what="classes")
        self.ignore_index = ignore_index
        self.threshold = threshold
        self._checks_values = True
        self._has_warned = False

    def update(self, outputs: Any, labels: Tensor) -> None:
        """Counts one batch."""
        self._add(*self.terms(outputs, labels))

    def terms(self, outputs: Any, labels: Tensor) -> tuple[Tensor, int | Tensor]:
        """The right answers of a batch, and its answers."""
        scores = logits_of(outputs)
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            received = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(
                f"Accuracy: expected scores as a floating tensor, or .logits, received {received}"
            )
        scores = scores.detach()
        class_count = scores.shape[1] if scores.dim() > 1 else 1
        if self.top > class_count:
            raise ValueError(
                f"Accuracy: expected scores of {self.top} or more classes, "
                f"received {tuple(scores.shape)}"
            )

        is_binary = class_count == 1
        classes, counts = self._true_classes(scores, labels, is_binary=is_binary)
        if is_binary:
            correct = self._binary_correct(scores, classes)
        elif self.top == 1:
            correct = self._top_1_correct(scores, classes)
        else:
            correct = self._top_k_correct(scores, classes)

        if counts is None:
            return correct.sum(), correct.numel()
        return (correct & counts).sum(), counts.sum()

    def _true_classes(
        self, scores: Tensor, labels: Tensor, *, is_binary: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The true class of each label, and a mask of the labels that count (None: all do).

        Both have the shape of the scores without its dimension of classes; an ignored class is 0.
        """
        label_shape = scores.shape[:1] + scores.shape[2:]
        binary_shapes = (scores.shape, label_shape, (*label_shape, 1))
        if is_binary and labels.shape in binary_shapes:
            labels = labels.reshape(label_shape)
            is_soft = False
        else:
            is_soft = labels.shape == scores.shape

        has_shape = is_soft or labels.shape == label_shape
        has_dtype = is_soft or is_binary or not labels.is_floating_point()
        if not has_shape or not has_dtype:
            raise ValueError(
                f"Accuracy: for scores of shape {tuple(scores.shape)} expected integer labels of "
                f"shape {tuple(label_shape)} or soft labels of the scores' shape, received "
                f"{labels.dtype} of shape {tuple(labels.shape)}"
            )

        if is_soft:
            if self._may_look_at(labels):
                _check_one_class_each(labels)
            return labels.argmax(1), None

        counts = None
        if not labels.is_floating_point():
            counts = labels.long() != self.ignore_index  # in uint8, -100 would be class 156
        if is_binary and self._may_look_at(labels):
            counted_labels = labels if counts is None else labels[counts]
            _check_binary_labels(scores, counted_labels)
            if self.threshold == 0.0 and not self._has_warned:
                self._has_warned = _warn_of_probabilities(scores, counted_labels)

        if not is_binary and self._may_look_at(labels):
            _check_class_numbers(labels if counts is None else labels[counts], scores.shape[1])

        classes = labels > 0.5 if is_binary else labels
        if counts is not None:
            classes = torch.where(counts, classes, 0)
        return classes.long(), counts

    def _may_look_at(self, labels: Tensor) -> bool:
        """Whether values are checked: on a GPU that would wait, and no graph can repeat it."""
        return self._checks_values and labels.device.type == "cpu"

    def _binary_correct(self, scores: Tensor, classes: Tensor) -> Tensor:
        """Whether each score is on the right side of the threshold."""
        scores = scores.reshape(classes.shape)
        return ((scores > self.threshold) == classes.bool()) & ~scores.isnan()

    def _top_1_correct(self, scores: Tensor, classes: Tensor) -> Tensor:
        """Whether the true class has the highest score."""
        highest, predicted = scores.max(1)  # the highest is NaN when any score is
        return (predicted == classes) & ~highest.isnan()

    def _top_k_correct(self, scores: Tensor, classes: Tensor) -> Tensor:
        """Whether fewer than `top` classes rank before the true one."""
        classes = classes.unsqueeze(1)
        true_scores = scores.gather(1, classes)
        class_numbers = torch.arange(scores.shape[1], device=scores.device)
        class_numbers = class_numbers.view(-1, *[1] * (scores.dim() - 2))
        is_tie_won = (scores == true_scores) & (class_numbers < classes)
        ranks_before = (scores > true_scores) | is_tie_won
        return (ranks_before.sum(1) < self.top) & ~scores.isnan().any(1)


class Loss(Ratio):
    """The mean loss over all terms, in float64: Σ loss · count / Σ count.

    `count` is the number of terms that each loss averaged over.
    """

    def __init__(self) -> None:
        super().__init__(torch.float64)

    def update(self, loss: Tensor, count: float | Tensor = 1) -> None:
        """Adds a batch's mean loss. One over no terms (count 0, loss NaN) adds nothing."""
        self._add(*self.terms(loss, count))

    def terms(self, loss: Tensor, count: float | Tensor = 1) -> tuple[Tensor, Tensor]:
        """Loss · count, and the count."""
        if loss.numel() != 1:
            raise ValueError(
                f"Loss: expected one number, received shape {tuple(loss.shape)}; "
                "give its mean, and count=loss.numel()"
            )
        value = loss.detach().double().reshape(())
        if isinstance(count, Tensor):
            weight = count.detach().to(value.device, torch.float64).reshape(())
        else:
            weight = torch.full_like(value, count)
        return torch.where(weight > 0, value * weight, 0), weight


class Average(Ratio):
    """The mean of fn(outputs, labels).

    If fn returns a tensor of terms, each counts once. If it returns a single number, that is taken
    for a mean and counts as often as the batch has rows. A function that broadcasts outputs [N, 1]
    against labels [N] to [N, N] is a ValueError.
    """

    in_graph = False  # nobody knows what fn does

    def __init__(self, fn: Callable[[Any, Any], Any]) -> None:
        super().__init__(torch.float64)
        self.fn = fn
        self._check_broadcasts = BroadcastCheck()
        self._has_warned = False

    def update(self, outputs: Any, labels: Any) -> None:
        """Adds one batch."""
        self._add(*self.terms(outputs, labels))

    @torch.no_grad()
    def terms(self, outputs: Any, labels: Any) -> tuple[Tensor, int]:
        """The sum of the function's values, and their number."""
        value = self._check_broadcasts(self.fn, outputs, labels)
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=torch.float64, device=self.total.device)
        if value.is_complex():
            raise TypeError(
                "metric: expected the function to return real numbers, received "
                f"{value.dtype}; return its .abs() or .real"
            )
        weight = 1
        if not value.dim():
            weight = _batch_size(outputs, labels)
        elif value.numel() == 1 and not self._has_warned:
            self._has_warned = _warn_of_one_term(value, _row_count(outputs, labels))
        count = value.numel() * weight
        total = value.detach().double().sum() * weight
        if count == 0:
            total = torch.zeros_like(total)  # a mean over no rows is NaN
        return total, count


def _check_binary_labels(scores: Tensor, labels: Tensor) -> None:
    in_range = (labels >= 0) & (labels <= 1)
    if not bool(in_range.all()):
        raise ValueError(
            f"Accuracy: for one score per sample, {tuple(scores.shape)}, expected labels 0 or 1, "
            f"received {labels.min().item()} to {labels.max().item()}; "
            "give scores of every class, [N, classes]"
        )


def _check_class_numbers(labels: Tensor, class_count: int) -> None:
    """Refuses class numbers that no score stands for: they would count as wrong answers."""
    if not labels.numel():
        return
    lowest = int(labels.min())
    highest = int(labels.max())
    if lowest < 0 or highest >= class_count:
        outside = lowest if lowest < 0 else highest
        raise ValueError(
            f"Accuracy: expected labels from 0 to {class_count - 1}, as there are {class_count} "
            f"scores, received {lowest} to {highest}; to leave out the label {outside}, write "
            f"Accuracy(ignore_index={outside})"
        )


def _check_one_class_each(labels: Tensor) -> None:
    """Refuses labels of 0 and 1 where a sample has several classes, or none."""
    is_one = labels == 1
    is_hot = bool((is_one | (labels == 0)).all())
    if is_hot and not bool((is_one.sum(1) == 1).all()):
        raise ValueError(
            "Accuracy: expected labels of the scores' shape with one class for each sample, "
            "one-hot or soft, received samples with several classes or none; to measure each "
            "output by itself, give a function: lambda outputs, labels: (outputs > 0) == "
            "labels.bool()"
        )


def _warn_of_probabilities(scores: Tensor, labels: Tensor) -> bool:
    """Warns of scores between 0 and 1, of which none is below the threshold of a logit.

    Returns whether it did.
    """
    if scores.numel() < MIN_PROBABILITIES or not bool((labels < 0.5).any()):
        return False
    if not bool(((scores >= 0) & (scores <= 1)).all()):
        return False
    warnings.warn(
        "Accuracy: all scores of a batch are between 0 and 1, as probabilities are, and a score "
        "above 0 means class 1. If the network ends with a sigmoid, write Accuracy(threshold=0.5)",
        Notice,
        stacklevel=user_stacklevel(),
    )
    return True


def _warn_of_one_term(value: Tensor, rows: int | None) -> bool:
    """Warns of a mean that would count as one term, whatever the size of its batch.

    Returns whether it did.
    """
    if rows is None or rows == 1:
        return False
    warnings.warn(
        f"metric: the function returned one term of shape {list(value.shape)} for a batch of "
        f"{rows} rows, and it counts once. If it is the mean of the batch, return it without "
        "dimensions (.squeeze()), so that a short batch counts less",
        Notice,
        stacklevel=user_stacklevel(),
    )
    return True


def _batch_size(outputs: Any, labels: Any) -> int:
    """The rows of a batch, which must have some."""
    rows = _row_count(outputs, labels)
    if rows is None:
        raise TypeError(
            "metric: a function that returns one number needs labels or outputs with rows to weigh "
            "it by"
        )
    return rows


def _row_count(outputs: Any, labels: Any) -> int | None:
    """The rows of a batch: those of its first tensor, labels first; None where none has rows."""
    for leaf in tree_leaves((labels, outputs)):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    return None


def logits_of(outputs: Any) -> Any:
    """The scores inside a Hugging Face output or a dict; anything else as it is."""
    if isinstance(outputs, dict):
        logits = outputs.get("logits")
    else:
        logits = getattr(outputs, "logits", None)
    return outputs if logits is None else logits
