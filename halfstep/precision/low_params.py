"""Low copies of fp32 masters, as one node of the autograd graph: gradients come back to the masters in fp32."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.foreach import cut_alike


class _Copy(torch.autograd.Function):
    """masters → low copies. One foreach cast each way, so that 161 parameters cost a few kernels, not 322."""

    @staticmethod
    def forward(ctx: Any, store: list[Tensor], *masters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an unused parameter keeps grad None
        ctx.dtypes = [m.dtype for m in masters]
        copy_(store, list(masters))
        copies = tuple(s.detach() for s in store)
        ctx.mark_non_differentiable(
            *(c for c, m in zip(copies, masters, strict=True) if not m.requires_grad)
        )
        return copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, *widen(grads, ctx.dtypes))


class LowCopies:
    """Storage for the low copies of `masters`; `fresh()` casts the masters as they are now, never stale ones."""

    def __init__(self, masters: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
        self.masters = list(masters)
        self.store = [
            torch.empty_like(m, dtype=d, requires_grad=False)
            for m, d in zip(masters, dtypes, strict=True)
        ]

    def fresh(self) -> tuple[Tensor, ...]:
        """Low copies that autograd connects to the masters."""
        if not self.masters:
            return ()
        copies: tuple[Tensor, ...] = _Copy.apply(self.store, *self.masters)  # type: ignore[no-untyped-call]
        return copies


def widen(grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> list[Tensor | None]:
    """Each gradient in its dtype, None and sparse ones included: as it is, or all the rest by one foreach cast."""
    out = [
        g if g is None or g.dtype == d or g.is_sparse else torch.empty_like(g, dtype=d)
        for g, d in zip(grads, dtypes, strict=True)
    ]
    pairs = [
        (o, g)
        for o, g in zip(out, grads, strict=True)
        if o is not None and g is not None and o is not g
    ]
    if pairs:
        copy_([o for o, _ in pairs], [g for _, g in pairs])
    return [
        o.to(d) if o is not None and o.is_sparse else o for o, d in zip(out, dtypes, strict=True)
    ]


def copy_(to: list[Tensor], given: list[Tensor]) -> None:
    """One foreach cast. On more of the chip in a capture only: outside, the host would cut for longer than it saves."""
    if to[0].is_cuda and torch.cuda.is_current_stream_capturing():
        to, given = cut_alike(to, given)
    torch._foreach_copy_(to, given)
