"""What an optimizer can do: fused (takes found_inf), capturable (snapshot, step, select), host (a read an update)."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

OptimizerKind: TypeAlias = Literal["fused", "capturable", "host"]
_aten = torch.ops.aten
_STATELESS = ("lr", "initial_lr", "capturable", "foreach", "fused", "differentiable", "maximize")
HOST_READ_OPS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default)


def check_optimizer(optimizer: Any) -> None:
    """Refuses what cannot be one transaction: LBFGS and other optimizers that call a closure."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, received {type(optimizer).__name__}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needs = closure is not None and closure.default is inspect.Parameter.empty
    if isinstance(optimizer, torch.optim.LBFGS) or needs:
        raise ValueError(
            f"optimizer {type(optimizer).__name__} evaluates the loss again through a closure, so a step is not one "
            "transaction; use an optimizer whose step() takes no closure, for instance AdamW or SGD"
        )


class OptimizerGuard:
    """An optimizer as a step was built around it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.count, self._on = self._counted(), self._switches()

    def check(self) -> None:
        """Refuses parameters that came later: no gradient is asked for them."""
        if self._counted() != self.count:
            raise ValueError(
                f"optimizer: expected the {self.count} parameters that it had when the step was built, received "
                f"{self._counted()}; after add_param_group build a new step (or Model) around it"
            )

    def settings_switched(self) -> bool:
        """Whether something was switched on or off since the last time, a momentum that was 0: the next update makes
        state that does not exist yet, and must not be taken back by a flag."""
        before, self._on = self._on, self._switches()
        return before != self._on

    def _counted(self) -> int:
        return sum(len(group["params"]) for group in self.optimizer.param_groups)

    def _switches(self) -> list[list[bool]]:
        groups = self.optimizer.param_groups
        return [
            [bool(v) for k, v in g.items() if k not in _STATELESS and isinstance(v, (int, float))]
            for g in groups
        ]


def classify_optimizer(optimizer: Optimizer, *, tensor_lr: bool) -> OptimizerKind:
    """By flags where torch has them, else by running a tiny twin and watching for host reads and host state."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return "fused"
    try:
        return "host" if _reads(optimizer, tensor_lr) else "capturable"
    except Exception:  # no twin can be built, or it does not step: the safe class
        return "host"


def _reads(optimizer: Optimizer, tensor_lr: bool) -> bool:
    twin, p = _twin(optimizer, tensor_lr)
    before = _plain(twin)
    with HostReadCounter() as watcher:
        for _ in range(2):
            p.grad = torch.ones_like(p)
            twin.step()
    state = [v for values in twin.state.values() for v in values.values() if v is not None]
    off_device = any(not isinstance(v, Tensor) or v.device != p.device for v in state)
    return (
        watcher.reads > 0 or off_device or _plain(twin) != before
    )  # a counter in Python cannot be taken back


def _plain(optimizer: Optimizer) -> list[Any]:
    """The optimizer's Python-side values: settings, and counters where it keeps some."""
    values = [v for g in optimizer.param_groups for k, v in g.items() if k != "params"] + list(
        vars(optimizer).values()
    )
    return [v for v in values if isinstance(v, (bool, int, float, str))]


def _twin(optimizer: Optimizer, tensor_lr: bool) -> tuple[Optimizer, Tensor]:
    like = optimizer.param_groups[0]["params"][0]
    p = torch.nn.Parameter(torch.ones(2, 2, dtype=like.dtype, device=like.device))
    make: Callable[..., Optimizer] = type(optimizer)
    accepted = inspect.signature(make).parameters
    settings = {
        k: v for k, v in optimizer.param_groups[0].items() if k in accepted and k != "params"
    }
    twin = make([p], **settings)
    if tensor_lr:
        twin.param_groups[0]["lr"] = lr_tensor(float(settings["lr"]), like.device)
    return twin, p


class HostReadCounter(TorchDispatchMode):
    """Counts operations that make the host wait for a device value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        crosses = isinstance(out, Tensor) and any(
            isinstance(a, Tensor) and a.device != out.device and a.dim() for a in args
        )
        self.reads += func in HOST_READ_OPS or crosses
        return out


def prefer_fused(optimizer: Optimizer, *, on_cpu: bool = False) -> bool:
    """Turns on torch's fused kernels where the user said neither fused= nor foreach=, and whether it did: an update is
    one kernel instead of several, and skips by itself. Only before the optimizer has any state."""
    kinds = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    groups = optimizer.param_groups
    open_still = all(
        g.get("fused", 0) is None and g["foreach"] is None and not g["differentiable"]
        for g in groups
    )
    params = [p for g in groups for p in g["params"]]
    plain = all((p.is_cuda or (on_cpu and p.is_cpu)) and p.is_floating_point() for p in params)
    if type(optimizer) not in kinds or optimizer.state or not open_still or not plain:
        return False
    for group in groups:
        group["fused"] = True
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return True


def lr_tensor(value: float, device: torch.device) -> Tensor:
    """A learning rate on the device: float64 on the CPU (equal to the float), float32 elsewhere."""
    return torch.full(
        (), value, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device
    )


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Every tensor of the optimizer's state, in parameter order."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [v for p in params for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]


def named_parameters(optimizer: Optimizer, *modules: tuple[str, Any]) -> list[tuple[str, Tensor]]:
    """The optimizer's parameters, in the modules' order and by their names, so that norms add up as torch's would."""
    held = {
        id(p): (f"group{g}.{i}", p)
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    }
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in modules:
        if isinstance(module, torch.nn.Module):
            for name, p in module.named_parameters():
                if id(p) in held:
                    found.setdefault(id(p), (f"{prefix}{name}", p))
    return list({**found, **{k: v for k, v in held.items() if k not in found}}.values())
