"""Gradients between backward and update: unscale, check, measure, clip. In that order, always."""

from collections.abc import Sequence

import torch
from torch import Tensor

EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s
LARGE = 1 << 16  # elements: below, torch's kernel is as fast


def dense(grads: Sequence[Tensor]) -> list[Tensor]:
    """The values behind each gradient, to work on in place: a coalesced sparse gradient's values, or itself."""
    return [g._values() if g.is_sparse else g for g in grads]


def unscale_(grads: list[Tensor], inverse: Tensor) -> Tensor:
    """Multiplies in place and returns 1.0 if anything was non-finite, else 0.0, on the device; torch's own kernel."""
    found = torch.zeros((), device=inverse.device)
    for dtype in {g.dtype for g in grads}:
        torch._amp_foreach_non_finite_check_and_unscale_([g for g in grads if g.dtype == dtype], found, inverse)
    return found


def norms(grads: list[Tensor]) -> Tensor:
    """The 2-norm of each gradient, as torch's clip_grad_norm_ computes them; of low gradients in float32."""
    low = any(g.dtype.itemsize == 2 for g in grads)  # fp16 beside modules that are kept in fp32
    each = torch._foreach_norm(grads, 2, torch.float32) if low else torch._foreach_norm(grads)
    mixed = any(n.dtype != each[0].dtype for n in each)
    return torch.stack([n.to(each[0].dtype) for n in each] if mixed else each)


def quick_norms(grads: list[Tensor]) -> Tensor:
    """norms() at memory speed on a CPU: a large gradient by BLAS, which rounds in another order (a few ulp)."""
    large = [i for i, g in enumerate(grads) if g.numel() >= LARGE and g.dtype == torch.float32 and g.is_contiguous()]
    if not large:
        return norms(grads)
    squares = {i: torch.dot(flat, flat) for i in large for flat in (grads[i].view(-1),)}
    rest = norms([g for i, g in enumerate(grads) if i not in squares]).unbind() if len(large) < len(grads) else ()
    small = iter(rest)
    each = torch.stack([squares[i].sqrt() if i in squares else next(small) for i in range(len(grads))])
    sure = bool(torch.isfinite(each).all()) and bool((each > 0).all())
    return each if sure else norms(grads)  # squares beyond the range of float32


def total(each: Tensor) -> Tensor:
    """The norm of all gradients together."""
    norm: Tensor = torch.linalg.vector_norm(each)
    return norm


def clip_norm_(grads: list[Tensor], norm: Tensor, limit: float) -> None:
    """torch's clip: × min(1, limit / (norm + 1e-6))."""
    torch._foreach_mul_(grads, torch.clamp(limit / (norm + EPS), max=1.0))


def clip_value_(grads: list[Tensor], limit: float) -> None:
    torch._foreach_clamp_min_(grads, -limit)
    torch._foreach_clamp_max_(grads, limit)


def add_(into: list[Tensor | None], grads: Sequence[Tensor | None]) -> None:
    """into += grads, where either may be missing; the sum is formed in into's dtype."""
    both = [(a, b) for a, b in zip(into, grads, strict=True) if a is not None and b is not None and not b.is_sparse]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    for i, b in enumerate(grads):
        a = into[i]
        if a is None:
            into[i] = b.clone() if b is not None and b.is_sparse else b  # an embedding's indices are the batch itself
        elif b is not None and b.is_sparse:
            into[i] = a + b
