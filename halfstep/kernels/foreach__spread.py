"""torch's fused optimizers on more of the chip: the same kernels on shorter pieces of the same tensors, same bits."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as shared

from halfstep.kernels.foreach import MOST, cut, length
from halfstep.step.fast.fused_update__quick_plan import dense


class Lot(NamedTuple):
    """Parameters of one group and dtype: for each the parameter, its gradient and its averages; Adam's counters."""

    group: dict[str, Any]
    rows: list[tuple[Tensor, ...]]
    steps: list[Tensor]


@torch.no_grad()
def step(optimizer: Optimizer, found: Tensor) -> bool:
    """What optimizer.step() does with found_inf, where that is certain to be the same; False: nothing was done."""
    lots = list(_lots(optimizer)) if _plain(optimizer) else []
    rows = [row for lot in lots for row in lot.rows]
    here = all(
        t.device == found.device
        for lot in lots
        for t in (*[row[0] for row in lot.rows if row], *lot.steps)
    )
    if (
        not rows
        or not here
        or not all(_alike(row) for row in rows)
        or sum(row[0].numel() for row in rows) > MOST
    ):
        return False
    for lot in lots:
        (_sgd if isinstance(optimizer, SGD) else _adam)(lot, found)
    if "step" in vars(optimizer):
        optimizer._opt_called = True  # type: ignore[attr-defined] # what an LR scheduler's wrapper notes
    return True


def _plain(optimizer: Optimizer) -> bool:
    """torch's own step() and nothing around it, in groups that it would give to its fused kernels."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    everywhere = shared._global_optimizer_pre_hooks, shared._global_optimizer_post_hooks
    if (
        type(optimizer) not in (SGD, Adam, AdamW)
        or any(hooks)
        or any(everywhere)
        or not _own_step(optimizer)
    ):
        return False
    groups = optimizer.param_groups
    return all(
        g["fused"] and not g["differentiable"] and not _tensors(g.get("betas", ())) for g in groups
    )


def _own_step(optimizer: Optimizer) -> bool:
    """Whether nobody replaced step(). An LR scheduler wraps it, to note that it was called."""
    mine = vars(optimizer).get("step")
    noted = (
        hasattr(mine, "_wrapped_by_lr_sched")
        and getattr(mine, "__wrapped__", None) is type(optimizer).step
    )
    return mine is None or noted


def _tensors(values: Sequence[Any]) -> bool:
    return any(isinstance(v, Tensor) for v in values)


def _lots(optimizer: Optimizer) -> Iterator[Lot]:
    """Groups by dtype, as torch forms them. A row that lacks a part of its state is empty."""
    for group in optimizer.param_groups:
        lots: dict[torch.dtype, Lot] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            state, names = optimizer.state.get(p, {}), _names(group)
            whole = all(isinstance(state.get(name), Tensor) for name in (*names, *_counter(group)))
            lot = lots.setdefault(p.dtype, Lot(group, [], []))
            lot.rows.append(
                (p, p.grad, *(state[name] for name in names))
                if whole and _near(group["lr"], p)
                else ()
            )
            lot.steps.extend(state[name] for name in _counter(group) if whole)
        yield from lots.values()


def _names(group: dict[str, Any]) -> tuple[str, ...]:
    """The state that has its parameter's shape."""
    if "betas" in group:
        return "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())
    return ("momentum_buffer",) if group["momentum"] != 0 else ()


def _counter(group: dict[str, Any]) -> tuple[str, ...]:
    return ("step",) if "betas" in group else ()


def _near(lr: Any, p: Tensor) -> bool:
    """Whether torch's kernel reads this rate as it is."""
    return lr.device == p.device if isinstance(lr, Tensor) else isinstance(lr, (int, float))


def _alike(row: tuple[Tensor, ...]) -> bool:
    """Whether the tensors lie in memory element by element alike, without gaps."""
    if (
        not row
        or type(row[0]) not in (Tensor, nn.Parameter)
        or any(type(t) is not Tensor for t in row[1:])
    ):
        return False
    if (
        any(t.layout != torch.strided for t in row)
        or not row[0].is_floating_point()
        or not dense(row[0])
    ):
        return False
    return len({(t.dtype, t.device, t.shape, t.stride()) for t in row}) == 1


def _sgd(lot: Lot, found: Tensor) -> None:
    params, grads, *averages = _pieces(lot)[0]
    names = "weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize"
    settings = {name: lot.group[name] for name in names}
    momenta = averages[0] if averages else []
    torch._fused_sgd_(
        params, grads, momenta, **settings, is_first_step=False, grad_scale=None, found_inf=found
    )


def _adam(lot: Lot, found: Tensor) -> None:
    """A counter moves once, however many pieces read it, and back if the update was none."""
    (params, grads, first, second, *largest), counts = _pieces(lot)
    steps = [n for n, count in zip(lot.steps, counts, strict=True) for _ in range(count)]
    settings = {
        name: lot.group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")
    }
    settings["beta1"], settings["beta2"] = lot.group["betas"]
    kernel = torch._fused_adamw_ if lot.group["decoupled_weight_decay"] else torch._fused_adam_
    torch._foreach_add_(lot.steps, 1)
    lists = params, grads, first, second, largest[0] if largest else [], steps
    kernel(*lists, **settings, grad_scale=None, found_inf=found)
    torch._foreach_sub_(lot.steps, [found] * len(lot.steps))


def _pieces(lot: Lot) -> tuple[list[list[Tensor]], list[int]]:
    """Parameters, gradients and averages in pieces, one list for each; how many pieces each parameter has."""
    size = length([row[0].numel() for row in lot.rows], len(lot.rows[0]))
    cuts = [[cut(t, size) for t in row] for row in lot.rows]
    lists = [[piece for parts in column for piece in parts] for column in zip(*cuts, strict=True)]
    return lists, [len(parts[0]) for parts in cuts]
