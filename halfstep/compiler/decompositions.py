"""Operations that torch's compiler cannot take, or would call as they are, in plain operations.

The compiler fuses plain operations into the kernels around them: the step that is compiled as one
program on a CPU (docs/guide/cpu.md) needs them. `compile=False` uses none of this.
"""

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
TensorList = list[Tensor]


def _check_and_unscale(grads: TensorList, found_inf: Tensor, inverse_scale: Tensor) -> None:
    """GradScaler's kernel: grad ← grad · inverse_scale; found_inf ← 1 if any is non-finite."""
    for grad in grads:
        if grad.numel():
            # The largest magnitude is finite exactly where every element is.
            is_finite = torch.isfinite(grad.abs().amax())
            found_inf.copy_(torch.where(is_finite, found_inf, 1.0))
        grad.mul_(inverse_scale)


def _norms(grads: TensorList, ord: Any = 2, dtype: torch.dtype | None = None) -> TensorList:
    return [torch.linalg.vector_norm(grad, ord, dtype=dtype) for grad in grads]


def _batch_norm(
    x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, *options: Any
) -> Any:
    """The batch norm whose schema says that it changes the running statistics."""
    if running_mean is None or running_var is None:
        return _aten._native_batch_norm_legit.no_stats(x, weight, bias, *options)
    return _aten._native_batch_norm_legit.default(
        x, weight, bias, running_mean, running_var, *options
    )


def _sgd(
    params: TensorList,
    grads: TensorList,
    momenta: TensorList,
    *,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: None = None,
    found_inf: Tensor | None = None,
) -> None:
    """torch's fused SGD; where found_inf is 1, nothing changes."""
    for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
        signed_grad = -grad if maximize else grad
        decay = weight_decay * p if weight_decay else 0
        update = signed_grad + decay
        if momentum:
            if is_first_step:
                new_momentum = update
            else:
                new_momentum = momentum * momenta[i] + (1 - dampening) * update
            update = update + momentum * new_momentum if nesterov else new_momentum
            _store(momenta[i], new_momentum, found_inf)
        _store(p, p - lr * update, found_inf)


def _adam(
    params: TensorList,
    grads: TensorList,
    averages: TensorList,
    squares: TensorList,
    max_squares: TensorList,
    step_counters: TensorList,
    *,
    lr: Any,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: None = None,
    found_inf: Tensor | None = None,
    decoupled: bool = False,
) -> None:
    """torch's fused Adam, or AdamW if `decoupled`; where found_inf is 1, nothing changes."""
    for i, (p, grad, counter) in enumerate(zip(params, grads, step_counters, strict=True)):
        step = counter.double()  # a beta of 0.9999 is not a float32
        update = -grad if maximize else grad
        decayed = p
        if weight_decay and decoupled:
            decayed = p - lr * weight_decay * p
        elif weight_decay:
            update = update + weight_decay * p

        # Moments, and their correction for the zeros that they started from.
        average = torch.lerp(averages[i], update, 1 - beta1)
        square = beta2 * squares[i] + (1 - beta2) * update * update
        max_square = torch.maximum(max_squares[i], square) if amsgrad else square
        denominator = (max_square.sqrt() / torch.sqrt(1 - beta2**step).to(p.dtype)) + eps
        step_size = (lr / (1 - beta1**step)).to(p.dtype)

        _store(p, decayed - step_size * (average / denominator), found_inf)
        _store(averages[i], average, found_inf)
        _store(squares[i], square, found_inf)
        if amsgrad:
            _store(max_squares[i], max_square, found_inf)


def _adamw(*args: Any, **kwargs: Any) -> None:
    _adam(*args, **kwargs, decoupled=True)


def _store(target: Tensor, value: Tensor, found_inf: Tensor | None) -> None:
    """Copies a value into its tensor, except where found_inf is set."""
    if found_inf is not None:
        value = torch.where(found_inf != 0, target, value)
    target.copy_(value)


DECOMPOSITIONS: dict[Any, Any] = {
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _check_and_unscale,
    _aten._foreach_norm.Scalar: _norms,
    _aten.native_batch_norm.default: _batch_norm,
    _aten._fused_sgd_.default: _sgd,
    _aten._fused_sgd_.tensor_lr: _sgd,
    _aten._fused_adam_.default: _adam,
    _aten._fused_adam_.tensor_lr: _adam,
    _aten._fused_adamw_.default: _adamw,
    _aten._fused_adamw_.tensor_lr: _adamw,
}
