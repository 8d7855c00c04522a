"""Operations that torch's compiler cannot take, or would call as they are, in terms of ones that it can join."""

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
Tensors = list[Tensor]


def _check_and_unscale(grads: Tensors, found: Tensor, inverse: Tensor) -> None:
    """The largest magnitude is finite where every element is."""
    for g in grads:
        if g.numel():
            found.copy_(torch.where(torch.isfinite(g.abs().amax()), found, 1.0))
        g.mul_(inverse)


def _norms(grads: Tensors, ord: Any = 2, dtype: torch.dtype | None = None) -> Tensors:
    return [torch.linalg.vector_norm(g, ord, dtype=dtype) for g in grads]


def _batch_norm(x: Tensor, w: Any, b: Any, mean: Any, var: Any, *rest: Any) -> Any:
    """The one that says that it moves the statistics."""
    if mean is None or var is None:
        return _aten._native_batch_norm_legit.no_stats(x, w, b, *rest)
    return _aten._native_batch_norm_legit.default(x, w, b, mean, var, *rest)


def _sgd(
    params: Tensors, grads: Tensors, moments: Tensors, *, weight_decay: float, momentum: float, lr: Any,
    dampening: float, nesterov: bool, maximize: bool, is_first_step: bool,
    grad_scale: None = None, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        g = (-g if maximize else g) + (weight_decay * p if weight_decay else 0)
        if momentum:
            new = g if is_first_step else momentum * moments[i] + (1 - dampening) * g
            g = g + momentum * new if nesterov else new
            _put(moments[i], new, found_inf)
        _put(p, p - lr * g, found_inf)


def _adam(
    params: Tensors, grads: Tensors, firsts: Tensors, seconds: Tensors, largest: Tensors, steps: Tensors, *,
    lr: Any, beta1: float, beta2: float, weight_decay: float, eps: float, amsgrad: bool, maximize: bool,
    grad_scale: None = None, found_inf: Tensor | None = None, decoupled: bool = False,
) -> None:  # fmt: skip
    for i, (p, g, t) in enumerate(zip(params, grads, steps, strict=True)):
        g, old, t = -g if maximize else g, p, t.double()  # 0.9999 is not a float32
        if weight_decay:
            old, g = (p - lr * weight_decay * p, g) if decoupled else (p, g + weight_decay * p)
        first, second = (
            torch.lerp(firsts[i], g, 1 - beta1),
            beta2 * seconds[i] + (1 - beta2) * g * g,
        )
        most = torch.maximum(largest[i], second) if amsgrad else second
        unbiased = (most.sqrt() / torch.sqrt(1 - beta2**t).to(p.dtype)) + eps
        new = old - (lr / (1 - beta1**t)).to(p.dtype) * (first / unbiased)
        kept = [
            (p, new),
            (firsts[i], first),
            (seconds[i], second),
            *([(largest[i], most)] if amsgrad else []),
        ]
        for tensor, value in kept:
            _put(tensor, value, found_inf)


def _adamw(*args: Any, **kwargs: Any) -> None:
    _adam(*args, **kwargs, decoupled=True)


def _put(into: Tensor, value: Tensor, found: Tensor | None) -> None:
    into.copy_(value if found is None else torch.where(found != 0, into, value))


PLAIN: dict[Any, Any] = {
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _check_and_unscale,
    _aten._foreach_norm.Scalar: _norms,
    _aten.native_batch_norm.default: _batch_norm,
    **dict.fromkeys((_aten._fused_sgd_.default, _aten._fused_sgd_.tensor_lr), _sgd),
    **dict.fromkeys((_aten._fused_adam_.default, _aten._fused_adam_.tensor_lr), _adam),
    **dict.fromkeys((_aten._fused_adamw_.default, _aten._fused_adamw_.tensor_lr), _adamw),
}
