"""Skipped updates: counted on the device, read without waiting, and explained in an error."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.utils.device_values import AsyncHostRead

ADVICE = ", do look for inf and NaN in the data and the loss, and lower the learning rate"
FALLBACK_ADVICE = ", or go on in another dtype with on_skips='bf16' or on_skips='fp32'"
FALLBACK_NOTE = "autocast() goes on in {} from its next entry, with the scale at 1"

MAX_LABELS_SHOWN = 8  # gradients named in an error


class OverflowStreak(FloatingPointError):
    """`max_skips` updates in a row were skipped.

    The scaler's state is as after any other skipped update.
    """


@dataclass(frozen=True)
class SkipCounts:
    """Skipped updates as plain values. The fields are keys of a saved state."""

    skipped: int = 0
    skips_in_a_row: int = 0
    fallen: bool = False  # the scaler has gone on in another dtype, with the scale at 1


class SkipStreak:
    """Skips in all and in a row: one tensor on the device, read by the host without waiting."""

    def __init__(self) -> None:
        self._start = SkipCounts()
        # (skipped, in a row), int32, on the device of the first flag.
        self._counts: Tensor | None = None
        self._host_read = AsyncHostRead()

    @property
    def fallen(self) -> bool:
        """Whether the scaler has gone on in another dtype."""
        return self._start.fallen

    def add(self, found_inf: Tensor) -> None:
        """Counts one update, which is skipped if found_inf > 0. No host sync."""
        if self._counts is None:
            self._counts = torch.empty(2, dtype=torch.int32, device=found_inf.device)
            self.set(self._start)
        skipped = (found_inf > 0).to(torch.int32)
        self._counts[0].add_(skipped)
        self._counts[1].add_(1).mul_(skipped)

    def read(self) -> SkipCounts:
        """The counts now: waits for the device."""
        if self._counts is None:
            return self._start
        skipped, in_a_row = self._counts.tolist()
        return SkipCounts(skipped, in_a_row, self.fallen)

    def read_in_a_row(self) -> int:
        """Skips in a row, without waiting: exact on a CPU, some updates old on CUDA."""
        counts = self._counts
        if counts is None:
            return self._start.skips_in_a_row
        arrived = self._host_read.poll(lambda: counts, counts.device)
        return 0 if arrived is None else arrived[1]

    def set(self, start: SkipCounts) -> None:
        """Counts on from `start`, in place; a copy on its way to the host is forgotten."""
        self._start = start
        self._host_read = AsyncHostRead()
        if self._counts is not None:
            # A fill does not wait for the device; a copy from a list does.
            self._counts[0].fill_(start.skipped)
            self._counts[1].fill_(start.skips_in_a_row)

    def set_fallen(self) -> None:
        """Remembers that the scaler goes on in another dtype, and begins the row again."""
        self.set(SkipCounts(self.read().skipped, 0, True))

    def __getstate__(self) -> dict[str, Any]:
        return {"start": self.read()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._counts = None
        self.set(state["start"])


def describe_streak(max_skips: int, scale: float, nonfinite: str) -> str:
    """The message for too many skips in a row."""
    return (
        f"expected a finite update, received {max_skips} or more skipped in a row; "
        f"the scale is {scale:g}; non-finite gradients: {nonfinite}"
    )


def list_nonfinite(
    optimizers: Iterable[Optimizer], dropped_grads: Sequence[tuple[int, Tensor]]
) -> str:
    """The parameters whose gradients are not finite, for a message. One device read.

    They are named where the optimizer was given names. `dropped_grads` are the gradients that
    unscale() took away, with their position in its list.
    """
    labelled = []
    for i, grad in dropped_grads:
        labelled.append((f"tensor {i} of unscale(), shape {tuple(grad.shape)}", grad))
    for number, optimizer in enumerate(optimizers):
        label = f"optimizer {number} ({type(optimizer).__name__})"
        labelled += _label_grads(optimizer, label)
    if not labelled:
        return "not known, they were cleared before update() (call zero_grad() after it)"

    device = labelled[0][1].device
    flags = [_values(grad).isfinite().all().to(device) for _, grad in labelled]
    are_finite = torch.stack(flags).tolist()
    nonfinite = []
    for (label, _), is_finite in zip(labelled, are_finite, strict=True):
        if not is_finite:
            nonfinite.append(label)
    if not nonfinite:
        return "none in this very update"

    text = "; ".join(nonfinite[:MAX_LABELS_SHOWN])
    if len(nonfinite) > MAX_LABELS_SHOWN:
        text += f"; {len(nonfinite) - MAX_LABELS_SHOWN} more"
    return text


def _label_grads(optimizer: Optimizer, optimizer_label: str) -> list[tuple[str, Tensor]]:
    """Each gradient of the optimizer with its place in it, and its name if there is one."""
    labelled = []
    for group_number, group in enumerate(optimizer.param_groups):
        # There if the optimizer was made from named_parameters().
        names: Sequence[str] = group.get("param_names", ())
        for i, p in enumerate(group["params"]):
            if p.grad is None:
                continue
            name = repr(names[i]) if i < len(names) else f"of shape {tuple(p.shape)}"
            labelled.append(
                (f"{optimizer_label}, group {group_number}, parameter {i} {name}", p.grad)
            )
    return labelled


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad
