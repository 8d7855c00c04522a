"""torch's multi-tensor kernels on shorter pieces of the same tensors: more of the chip is busy.

A block of torch's foreach and fused-optimizer kernels takes 65,536 elements, so a small network
fills few of a chip's processors: the two large weights of the benchmark MLP are 11 blocks for 132
processors of an H200. Cut into pieces of 4,096 elements or more, the same kernels run in as many
launches on more blocks. Every element is computed by itself, and by the same instructions
(`_pieces_of_row`), so every bit is the same.

It is part of the row "compile=True, polish=True, fused SGD" of docs/internals/speed.md (0.289 s in
fp32); what it adds alone is not in the tables. To switch it off: `polish=False`. Only captured
steps use it: on the host it is slower.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

from halfstep.utils.tensor_pieces import MAX_ELEMENTS, piece_length, split

# torch's fused optimizers have two loops: one for four elements at a time, where the length of a
# tensor is a multiple of four, and one for single elements.
VECTOR_LENGTH = 4


def is_dense(t: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of axes."""
    strides_and_sizes = [
        (stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1
    ]
    expected_stride = 1
    for stride, size in sorted(strides_and_sizes):
        if stride != expected_stride:
            return t.numel() == 0
        expected_stride *= size
    return True


# --- Fused optimizers


class ParamBucket(NamedTuple):
    """Parameters of one group and one dtype: what torch gives to one call of its fused kernel.

    A row is a parameter, its gradient and its optimizer state of the same shape; it is empty where
    a part of that state is missing. `step_counters` are Adam's, one for each parameter.
    """

    group: dict[str, Any]
    rows: list[tuple[Tensor, ...]]
    step_counters: list[Tensor]


@torch.no_grad()
def fused_step_in_pieces(optimizer: Optimizer, found_inf: Tensor) -> bool:
    """Does what optimizer.step() does with `found_inf`, on pieces of the tensors.

    Returns False, having done nothing, where the result is not certain to be the same.
    """
    if not _is_plain_fused(optimizer):
        return False
    buckets = _param_buckets(optimizer)
    rows = [row for bucket in buckets for row in bucket.rows]
    if not rows or not all(_lie_alike(row) for row in rows):
        return False

    params = [row[0] for row in rows]
    counters = [counter for bucket in buckets for counter in bucket.step_counters]
    if any(t.device != found_inf.device for t in (*params, *counters)):
        return False
    if sum(p.numel() for p in params) > MAX_ELEMENTS:
        return False

    for bucket in buckets:
        if isinstance(optimizer, SGD):
            _sgd_step(bucket, found_inf)
        else:
            _adam_step(bucket, found_inf)

    # An LR scheduler replaces step() by a wrapper that sets this, and warns where it is not set.
    if "step" in vars(optimizer):
        optimizer._opt_called = True  # type: ignore[attr-defined]
    return True


def _is_plain_fused(optimizer: Optimizer) -> bool:
    """Whether step() is torch's own, without hooks, and calls the fused kernel for every group."""
    if type(optimizer) not in (SGD, Adam, AdamW) or not _has_own_step(optimizer):
        return False
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    if any(hooks):
        return False
    for group in optimizer.param_groups:
        has_tensor_betas = any(isinstance(beta, Tensor) for beta in group.get("betas", ()))
        if not group["fused"] or group["differentiable"] or has_tensor_betas:
            return False
    return True


def _has_own_step(optimizer: Optimizer) -> bool:
    """Whether step() is the class's, or an LR scheduler's wrapper around it."""
    replacement = vars(optimizer).get("step")
    if replacement is None:
        return True
    wraps_own_step = getattr(replacement, "__wrapped__", None) is type(optimizer).step
    return wraps_own_step and hasattr(replacement, "_wrapped_by_lr_sched")


def _param_buckets(optimizer: Optimizer) -> list[ParamBucket]:
    """The parameters that have a gradient, by group and dtype, as torch groups them."""
    buckets: list[ParamBucket] = []
    for group in optimizer.param_groups:
        state_names = _state_names(group)
        # Adam counts its steps in a tensor for each parameter.
        counter_names = ["step"] if "betas" in group else []

        by_dtype: dict[torch.dtype, ParamBucket] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            bucket = by_dtype.setdefault(p.dtype, ParamBucket(group, [], []))
            state = optimizer.state.get(p, {})
            names = [*state_names, *counter_names]
            has_state = all(isinstance(state.get(name), Tensor) for name in names)
            if has_state and _kernel_reads_lr(group["lr"], p):
                bucket.rows.append((p, p.grad, *[state[name] for name in state_names]))
            else:
                bucket.rows.append(())
            if has_state:
                bucket.step_counters.extend(state[name] for name in counter_names)
        buckets.extend(by_dtype.values())
    return buckets


def _state_names(group: dict[str, Any]) -> list[str]:
    """Names of the optimizer state that has its parameter's shape."""
    if "betas" not in group:  # SGD
        return ["momentum_buffer"] if group["momentum"] != 0 else []
    names = ["exp_avg", "exp_avg_sq"]
    if group["amsgrad"]:
        names.append("max_exp_avg_sq")
    return names


def _kernel_reads_lr(lr: Any, p: Tensor) -> bool:
    """Whether torch's kernel takes this learning rate as it is, without a copy."""
    if isinstance(lr, Tensor):
        return lr.device == p.device
    return isinstance(lr, (int, float))


def _lie_alike(row: tuple[Tensor, ...]) -> bool:
    """Whether a row's tensors are plain and dense, and have their elements in the same order."""
    if not row:
        return False
    param, *others = row
    if type(param) not in (Tensor, nn.Parameter) or any(type(t) is not Tensor for t in others):
        return False
    if any(t.layout != torch.strided for t in row):
        return False
    if not param.is_floating_point() or not is_dense(param):
        return False
    return len({(t.dtype, t.device, t.shape, t.stride()) for t in row}) == 1


def _sgd_step(bucket: ParamBucket, found_inf: Tensor) -> None:
    (params, grads, *momenta), _ = _split_bucket(bucket)
    names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    settings = {name: bucket.group[name] for name in names}
    torch._fused_sgd_(
        params,
        grads,
        momenta[0] if momenta else [],
        **settings,
        is_first_step=False,
        grad_scale=None,
        found_inf=found_inf,
    )


def _adam_step(bucket: ParamBucket, found_inf: Tensor) -> None:
    (params, grads, averages, squares, *max_squares), piece_counts = _split_bucket(bucket)
    names = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
    settings = {name: bucket.group[name] for name in names}
    beta1, beta2 = bucket.group["betas"]
    kernel = torch._fused_adamw_ if bucket.group["decoupled_weight_decay"] else torch._fused_adam_

    # A counter moves once, however many pieces read it, and back again if the step is skipped.
    counters = bucket.step_counters
    torch._foreach_add_(counters, 1)
    counter_of_piece: list[Tensor] = []
    for counter, piece_count in zip(counters, piece_counts, strict=True):
        counter_of_piece.extend([counter] * piece_count)
    kernel(
        params,
        grads,
        averages,
        squares,
        max_squares[0] if max_squares else [],
        counter_of_piece,
        **settings,
        beta1=beta1,
        beta2=beta2,
        grad_scale=None,
        found_inf=found_inf,
    )
    torch._foreach_sub_(counters, [found_inf] * len(counters))


def _split_bucket(bucket: ParamBucket) -> tuple[list[list[Tensor]], list[int]]:
    """The pieces of parameters, gradients and each state, a list for each; and pieces per row."""
    sizes = [row[0].numel() for row in bucket.rows]
    length = piece_length(sizes, list_count=len(bucket.rows[0]))
    split_rows = [_pieces_of_row(row, length) for row in bucket.rows]
    piece_lists = [
        [piece for pieces in column for piece in pieces] for column in zip(*split_rows, strict=True)
    ]
    return piece_lists, [len(pieces[0]) for pieces in split_rows]


def _pieces_of_row(row: tuple[Tensor, ...], length: int) -> list[tuple[Tensor, ...]]:
    """The pieces of each tensor of a row, or each tensor as one piece.

    The two loops of torch's kernels may round differently: of `gradient + decay * parameter`, one
    rounds the product and the sum, the other only the sum (seen for Adam with weight decay, torch
    2.11, H200). The pieces of a tensor whose length is not a multiple of four would take the other
    loop than the whole tensor, so it stays whole.
    """
    if row[0].numel() % VECTOR_LENGTH != 0:
        length = max(length, row[0].numel())
    return [split(t, length) for t in row]
