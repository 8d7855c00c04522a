"""Skipped updates: counted on the device, looked at without waiting, and blamed on the parameters that overflowed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.utils.device_values import AsyncHostRead

ADVICE = ", do look for inf and NaN in the data and the loss, and lower the learning rate"
OTHER_ADVICE = ", or go on in another dtype with on_skips='bf16' or on_skips='fp32'"
GOES_ON = "autocast() goes on in {} from its next entry, with the scale at 1"


class OverflowStreak(FloatingPointError):
    """`max_skips` updates in a row were skipped; the scaler's state is as after any other skipped update."""


@dataclass(frozen=True)
class Tally:
    """The counts as plain values; `fallen` says that the scaler has gone on in another dtype, with the scale at 1."""

    skipped: int = 0
    skips_in_a_row: int = 0
    fallen: bool = False


class Streak:
    """Skips in all and in a row as one device tensor, which the host hears of without waiting."""

    def __init__(self) -> None:
        self._start = Tally()
        self._count: Tensor | None = (
            None  # (skipped, in a row), int32, made where the first verdict lies
        )
        self._watch = AsyncHostRead()

    def add(self, found: Tensor) -> None:
        """Count one update, skipped where found > 0, without a host sync."""
        if self._count is None:
            self._count = torch.empty(2, dtype=torch.int32, device=found.device)
            self.set(self._start)
        hit = (found > 0).to(torch.int32)
        self._count[0].add_(hit)
        self._count[1].add_(1).mul_(hit)

    @property
    def fallen(self) -> bool:
        return self._start.fallen

    def tally(self) -> Tally:
        """The counts now: waits for the device."""
        if self._count is None:
            return self._start
        skipped, row = self._count.tolist()
        return Tally(skipped, row, self.fallen)

    def set(self, start: Tally) -> None:
        """Count on from `start`, in place, and forget what is under way to the host."""
        self._start, self._watch = start, AsyncHostRead()
        if self._count is not None:
            self._count[0].fill_(start.skipped)  # a fill does not wait, a copy from a list does
            self._count[1].fill_(start.skips_in_a_row)

    def look(self) -> int:
        """Skips in a row as far as the host has heard: exact on a CPU, some updates old on CUDA."""
        count = self._count
        if count is None:
            return self._start.skips_in_a_row
        news = self._watch.poll(lambda: count, count.device)
        return 0 if news is None else news[1]

    def fall(self) -> None:
        """Remember the fallback and begin the row anew."""
        self.set(Tally(self.tally().skipped, 0, True))

    def __getstate__(self) -> dict[str, Any]:
        return {"start": self.tally()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._count = None
        self.set(state["start"])


def blame(optimizers: Iterable[Optimizer], dropped: Sequence[tuple[int, Tensor]]) -> str:
    """The parameters whose gradients are not finite: by name where the optimizer was given names. One device read.

    `dropped` are the gradients that unscale() took away, with their position in its list.
    """
    found = [(f"tensor {i} of unscale(), shape {tuple(g.shape)}", g) for i, g in dropped]
    for number, optimizer in enumerate(optimizers):
        found += _labelled(optimizer, f"optimizer {number} ({type(optimizer).__name__})")
    if not found:
        return "not known, they were cleared before update() (call zero_grad() after it)"
    finite = torch.stack(
        [_values(g).isfinite().all().to(found[0][1].device) for _, g in found]
    ).tolist()
    bad = [label for (label, _), ok in zip(found, finite, strict=True) if not ok]
    more = f"; {len(bad) - 8} more" if len(bad) > 8 else ""
    return ("; ".join(bad[:8]) or "none in this very update") + more


def complain(max_skips: int, scale: float, culprits: str) -> str:
    return (
        f"expected a finite update, received {max_skips} or more skipped in a row; the scale is {scale:g}; "
        f"non-finite gradients: {culprits}"
    )


def _labelled(optimizer: Optimizer, prefix: str) -> list[tuple[str, Tensor]]:
    labels = []
    for g, group in enumerate(optimizer.param_groups):
        names: Sequence[str] = group.get(
            "param_names", ()
        )  # there when it was given named_parameters()
        for i, p in enumerate(group["params"]):
            if p.grad is not None:
                called = repr(names[i]) if i < len(names) else f"of shape {tuple(p.shape)}"
                labels.append((f"{prefix}, group {g}, parameter {i} {called}", p.grad))
    return labels


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad
