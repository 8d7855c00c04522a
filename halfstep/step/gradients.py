"""Pure arithmetic on gradients between backward and optimizer step: add, unscale, average, clip.

Names that end in _ change their tensors in place, with torch's foreach kernels: a network's worth
of small tensors costs a few launches. Except where sparse gradients are named, all are dense.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

CLIP_EPS = 1e-6  # added to the norm, as torch.nn.utils.clip_grad_norm_ does
BLAS_MIN_ELEMENTS = 1 << 16  # below this size torch's norm kernel is as fast as BLAS


def add_gradients_(totals: list[Tensor | None], grads: Sequence[Tensor | None]) -> None:
    """totals += grads, in the dtype of totals. Single gradients may be None or sparse."""
    dense_totals = []
    dense_grads = []
    for i, (total, grad) in enumerate(zip(totals, grads, strict=True)):
        if grad is None:
            continue
        if total is not None and not grad.is_sparse:
            dense_totals.append(total)
            dense_grads.append(grad)
        elif total is not None:
            totals[i] = total + grad
        elif grad.is_sparse:
            # The indices of an embedding's gradient are the batch itself, which may be overwritten.
            totals[i] = grad.clone()
        else:
            totals[i] = grad
    if dense_totals:
        torch._foreach_add_(dense_totals, dense_grads)


def coalesce(grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, with the duplicate indices of sparse ones summed."""
    return [grad.coalesce() if grad.is_sparse else grad for grad in grads]


def dense_values(grads: Sequence[Tensor]) -> list[Tensor]:
    """The memory behind each gradient: a coalesced sparse gradient's values, or the gradient.

    Of a complex gradient both of its parts, as real numbers: torch's kernels that check, clip and
    unscale know no others.
    """
    values = [grad._values() if grad.is_sparse else grad for grad in grads]
    return [torch.view_as_real(value) if value.is_complex() else value for value in values]


def unscale_(grads: list[Tensor], inverse_scale: Tensor) -> Tensor:
    """Multiplies by 1/scale. Returns 1.0 if an element was inf or NaN, else 0.0, on the device."""
    overflow = torch.zeros((), device=inverse_scale.device)
    # GradScaler's kernel: it multiplies and checks in one pass, for one dtype at a time.
    for dtype in {grad.dtype for grad in grads}:
        same_dtype = [grad for grad in grads if grad.dtype == dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, overflow, inverse_scale)
    return overflow


def nonfinite_flags(grads: list[Tensor]) -> Tensor:
    """Whether each gradient has an element that is inf or NaN, in few launches and one pass.

    The largest absolute value says it. A norm does not: that of a finite gradient may be infinite.
    """
    # There is no largest value of nothing.
    grads = [grad if grad.numel() else grad.new_zeros(1) for grad in grads]
    maxima = torch._foreach_norm(grads, float("inf"))
    dtype = maxima[0].dtype
    if any(maximum.dtype != dtype for maximum in maxima):
        maxima = tuple(maximum.double() for maximum in maxima)
    return ~torch.isfinite(torch.stack(maxima))


def average_(grads: list[Tensor], weight: Tensor) -> None:
    """Divides by N, the summed weight of a cycle's micro-batches."""
    # N is 0 for a cycle without terms. Its update does not happen, so any divisor will do.
    divisor = torch.where(weight > 0, weight, 1)
    torch._foreach_div_(grads, divisor.to(grads[0].dtype))


def grad_norms(grads: list[Tensor]) -> Tensor:
    """The 2-norm of each gradient as torch's clip_grad_norm_ computes it, all in one dtype."""
    # A 16-bit sum of squares would overflow. The rest may be wider: modules that are kept so.
    if any(grad.dtype.itemsize == 2 for grad in grads):
        has_fp64 = any(grad.dtype == torch.float64 for grad in grads)
        sum_dtype = torch.float64 if has_fp64 else torch.float32
        norms = torch._foreach_norm(grads, 2, sum_dtype)
        norms = tuple(norm.float() for norm in norms)
    else:
        norms = torch._foreach_norm(grads)
    dtype = norms[0].dtype
    if any(norm.dtype != dtype for norm in norms):
        norms = tuple(norm.to(dtype) for norm in norms)
    return torch.stack(norms)


def grad_norms_by_blas(grads: list[Tensor]) -> Tensor:
    """grad_norms() on a CPU, large gradients at memory speed. Differs from it by a few ulp."""
    norms: dict[int, Tensor] = {}
    for i, grad in enumerate(grads):
        if _is_large_dense_fp32(grad):
            flat = grad.view(-1)
            norms[i] = torch.dot(flat, flat).sqrt()
    if not norms:
        return grad_norms(grads)

    # One foreach call for the small ones.
    small = [i for i in range(len(grads)) if i not in norms]
    if small:
        small_norms = grad_norms([grads[i] for i in small])
        norms.update(zip(small, small_norms.unbind(), strict=True))
    result = torch.stack([norms[i] for i in range(len(grads))])

    # The dot product may leave the range of float32 where torch's kernel does not.
    in_range = bool(torch.isfinite(result).all()) and bool((result > 0).all())
    return result if in_range else grad_norms(grads)


def _is_large_dense_fp32(grad: Tensor) -> bool:
    is_large = grad.numel() >= BLAS_MIN_ELEMENTS
    return is_large and grad.dtype == torch.float32 and grad.is_contiguous()


def total_norm(norms: Tensor) -> Tensor:
    """The 2-norm of all gradients together, from the norm of each."""
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


def clip_value_(grads: list[Tensor], max_value: float) -> None:
    """Clamps every element to [-max_value, max_value]."""
    torch._foreach_clamp_min_(grads, -max_value)
    torch._foreach_clamp_max_(grads, max_value)


def clip_norm_(grads: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiplies by min(1, max_norm / (norm + 1e-6)), as torch's clip_grad_norm_ does."""
    factor = torch.clamp(max_norm / (norm + CLIP_EPS), max=1.0)
    torch._foreach_mul_(grads, factor)
