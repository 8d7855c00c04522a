"""What an optimizer can do inside a step, and the learning rates that it is given.

Optimizers are of three kinds:

- fused: the kernel takes `found_inf` and skips by itself;
- capturable: it never reads a device value on the host, so a skip is a snapshot and a select;
- host: it reads values on the host or keeps state there, which costs one wait an update.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.step.state import HostReads
from halfstep.utils.device_values import HOST_READ_OPS, is_capturing
from halfstep.utils.text import write_line

OptimizerKind: TypeAlias = Literal["fused", "capturable", "host"]

# Settings that create no optimizer state when they are switched on.
_STATELESS_SETTINGS = (
    "lr",
    "initial_lr",
    "capturable",
    "foreach",
    "fused",
    "differentiable",
    "maximize",
)


def check_optimizer(optimizer: Any) -> None:
    """Refuses what cannot be one transaction: LBFGS and others that call a closure."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, received {type(optimizer).__name__}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    if isinstance(optimizer, torch.optim.LBFGS) or needs_closure:
        raise ValueError(
            f"optimizer {type(optimizer).__name__} evaluates the loss again through a closure, "
            "so a step is not one transaction; use an optimizer whose step() takes no closure, "
            "for instance AdamW or SGD"
        )


class OptimizerGuard:
    """Notices what a user changes in an optimizer after the step was built around it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._params = list(self._current_params())
        self._switches = self._read_switches()

    def check(self) -> None:
        """Refuses parameters that came later, added or exchanged: they get no gradient."""
        param_count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if param_count != len(self._params):
            raise ValueError(
                f"optimizer: expected the {len(self._params)} parameters that it had when the step "
                f"was built, received {param_count}; "
                "after add_param_group build a new step (or Model) around it"
            )
        if not all(map(is_, self._current_params(), self._params)):
            raise ValueError(
                "optimizer: expected the parameters that it had when the step was built, received "
                "others in their place; build a new step (or Model) around it"
            )

    def settings_switched(self) -> bool:
        """Whether a setting went from zero to non-zero or back since the last call (momentum, say).

        The next update then creates optimizer state, which a skip on the device could not undo.
        """
        before = self._switches
        self._switches = self._read_switches()
        return before != self._switches

    def _current_params(self) -> Iterator[Tensor]:
        return chain.from_iterable([group["params"] for group in self.optimizer.param_groups])

    def _read_switches(self) -> list[list[bool]]:
        switches = []
        for group in self.optimizer.param_groups:
            settings = [
                value
                for name, value in group.items()
                if name not in _STATELESS_SETTINGS and isinstance(value, (int, float))
            ]
            switches.append([bool(value) for value in settings])
        return switches


def classify_optimizer(optimizer: Optimizer, *, tensor_lr: bool) -> OptimizerKind:
    """The kind, by torch's own flag where it has one, else by trying.

    The trial runs a tiny twin of the optimizer and watches for host reads and host state.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return "fused"
    try:
        return "host" if _uses_host(optimizer, tensor_lr) else "capturable"
    except Exception:  # no twin can be built, or it does not step: the safe class
        return "host"


def _uses_host(optimizer: Optimizer, tensor_lr: bool) -> bool:
    """Whether two steps of a twin read the device, or keep state outside it."""
    twin, p = _build_twin(optimizer, tensor_lr)
    values_before = _python_values(twin)
    with HostReadCounter() as counter:
        for _ in range(2):
            p.grad = torch.ones_like(p)
            twin.step()

    state = [value for values in twin.state.values() for value in values.values()]
    state = [value for value in state if value is not None]
    has_host_state = any(not isinstance(v, Tensor) or v.device != p.device for v in state)
    counts_in_python = _python_values(twin) != values_before  # a skip could not take it back
    return counter.reads > 0 or has_host_state or counts_in_python


def _python_values(optimizer: Optimizer) -> list[Any]:
    """The optimizer's values on the Python side: settings, and counters where it has some."""
    values: list[Any] = []
    for group in optimizer.param_groups:
        values.extend(value for name, value in group.items() if name != "params")
    values.extend(vars(optimizer).values())
    return [value for value in values if isinstance(value, (bool, int, float, str))]


def _build_twin(optimizer: Optimizer, tensor_lr: bool) -> tuple[Optimizer, Tensor]:
    """An optimizer of the same class and settings for one 2 × 2 parameter, and that parameter."""
    like = optimizer.param_groups[0]["params"][0]
    p = torch.nn.Parameter(torch.ones(2, 2, dtype=like.dtype, device=like.device))
    build: Callable[..., Optimizer] = type(optimizer)
    accepted = inspect.signature(build).parameters
    settings = {
        name: value
        for name, value in optimizer.param_groups[0].items()
        if name in accepted and name != "params"
    }
    twin = build([p], **settings)
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
        crosses_devices = isinstance(out, Tensor) and any(
            isinstance(a, Tensor) and a.device != out.device and a.dim() for a in args
        )
        if func in HOST_READ_OPS or crosses_devices:
            self.reads += 1
        return out


def prefer_fused(optimizer: Optimizer, *, on_cpu: bool = False) -> bool:
    """Turns on torch's fused kernels where the user said neither fused= nor foreach=.

    An update is then one kernel instead of several, and skips by itself. Only before the optimizer
    has any state. Returns whether it did.
    """
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return False
    groups = optimizer.param_groups
    user_left_it_open = all(
        group.get("fused", 0) is None and group["foreach"] is None and not group["differentiable"]
        for group in groups
    )
    params = [p for group in groups for p in group["params"]]
    kernels_fit = all(
        (p.is_cuda or (on_cpu and p.is_cpu)) and p.is_floating_point() for p in params
    )
    if optimizer.state or not user_left_it_open or not kernels_fit:
        return False
    for group in groups:
        group["fused"] = True
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return True


def lr_tensor(value: float, device: torch.device) -> Tensor:
    """A learning rate on the device: float64 on the CPU (equal to the float), float32 elsewhere."""
    return torch.full((), value, dtype=lr_dtype(device), device=device)


def lr_dtype(device: torch.device) -> torch.dtype:
    """The dtype of learning rates on a device: the optimizers' kernels take no more elsewhere."""
    return torch.float64 if device.type == "cpu" else torch.float32


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Every tensor of the optimizer's state, in parameter order."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [v for p in params for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]


def named_parameters(optimizer: Optimizer, *modules: tuple[str, Any]) -> list[tuple[str, Tensor]]:
    """The optimizer's parameters by name, in the modules' order, so that norms add up as torch's.

    A parameter outside the modules is named by its group: "group0.3".
    """
    by_group: dict[int, tuple[str, Tensor]] = {}
    for group_index, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            by_group[id(p)] = (f"group{group_index}.{i}", p)

    by_module: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in modules:
        if isinstance(module, torch.nn.Module):
            for name, p in module.named_parameters():
                if id(p) in by_group:
                    by_module.setdefault(id(p), (f"{prefix}{name}", p))

    outside = {key: named for key, named in by_group.items() if key not in by_module}
    return list({**by_module, **outside}.values())


@contextmanager
def capturable_optimizer(optimizer: Optimizer, kind: OptimizerKind) -> Iterator[None]:
    """Inside, a fused optimizer may be captured.

    Its counters are on the device already; Adam asks for the flag all the same.
    """
    groups = []
    if kind == "fused":
        groups = [group for group in optimizer.param_groups if "capturable" in group]
    flags_before = [group["capturable"] for group in groups]
    try:
        for group in groups:
            group["capturable"] = True
        yield
    finally:
        for group, flag in zip(groups, flags_before, strict=True):
            group["capturable"] = flag


class LearningRates:
    """The learning rate of each parameter group at each update, from a table on the device.

    The position in the table is the number of real updates. Without a table the optimizer's own
    rates are left alone. With `as_tensors` rates go to the optimizer as device tensors: then the
    host need not know the position.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        table: Any,
        device: torch.device,
        host_reads: HostReads,
        *,
        as_tensors: bool,
    ) -> None:
        self.optimizer = optimizer
        self.device = device
        self.host_reads = host_reads
        self.as_tensors = as_tensors
        self.table: Tensor | None = None
        if table is not None:
            self.table = _lr_table(table, len(self.groups), device)

        # The rates last reported, as numbers and as a tensor.
        self._reported: tuple[list[Any], Tensor] = ([], torch.zeros(()))
        # Tensors that a graph reads: they must live as long as it does.
        self._read_by_graphs: list[Tensor] = []

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups  # load_state_dict replaces them

    def set(self, update: Tensor) -> None:
        """Puts the rates of the coming update into the optimizer's groups.

        Past the end of the table its last column holds.
        """
        if self.table is None:
            return
        last_column = self.table.shape[1] - 1
        position = update.clamp(max=last_column).view(1)
        rates = self.table.index_select(1, position).squeeze(1)

        if not self.as_tensors:
            numbers = self.host_reads.read_all(rates)
            for group, number in zip(self.groups, numbers, strict=True):
                group["lr"] = number
            return
        for i, group in enumerate(self.groups):
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device == rates.device and lr.dtype == rates.dtype:
                lr.copy_(rates[i])
            else:
                group["lr"] = rates[i].clone()

    def current(self) -> Tensor:
        """The rates in force, for the record: one number, or one for each group.

        A new tensor is made only when a rate has changed.
        """
        rates = [group["lr"] for group in self.groups]
        if any(isinstance(rate, Tensor) for rate in rates):
            stacked = torch.stack([self._as_tensor(rate) for rate in rates])
            return stacked if len(rates) > 1 else stacked[0]

        if rates == self._reported[0]:
            if is_capturing():
                self._read_by_graphs.append(self._reported[1])
            return self._reported[1]
        tensors = [self._as_tensor(rate) for rate in rates]
        result = torch.stack(tensors) if len(tensors) > 1 else tensors[0]
        if not is_capturing():  # memory of a capture belongs to its graph
            self._reported = (rates, result)
        return result

    def _as_tensor(self, rate: Any) -> Tensor:
        if isinstance(rate, Tensor):
            return rate.detach().to(self.device, torch.float64).reshape(())
        # A fill, not a copy from the host: it does not wait.
        return torch.full((), rate, dtype=torch.float64, device=self.device)


def _lr_table(table: Any, group_count: int, device: torch.device) -> Tensor:
    """The user's table as a tensor [groups, updates] on the device, checked."""
    try:
        rows = torch.as_tensor(table, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"lr: expected a table of rates, received {type(table).__name__}; "
            "hs.Model(…, schedule=…) takes a schedule, a function or a torch scheduler as it is; "
            "for a step, make a table of it: "
            "hs.schedules.tables(hs.schedules.resolve(schedule, optimizer, updates=n), n)"
        ) from error
    if rows.dim() == 0:
        problem = f"lr: expected a table of rates by update, received the number {rows.item():g}"
        line = f"torch.optim.SGD(net.parameters(), lr={rows.item():g})"
        raise ValueError(write_line(f"{problem}. A rate that stays is the optimizer's own", line))
    if rows.dim() == 1:
        rows = rows.expand(group_count, -1)
    if rows.dim() != 2 or rows.shape[0] != group_count or rows.shape[1] == 0:
        expected = f"one row of rates, or {group_count} rows (one per parameter group)"
        raise ValueError(
            f"lr: expected {expected}, received shape {tuple(torch.as_tensor(table).shape)}"
        )
    is_wrong = ~torch.isfinite(rows) | (rows < 0)
    if bool(is_wrong.any()):
        raise ValueError(
            f"lr: expected finite rates of 0 or more, received {rows[is_wrong][0].item()}"
        )
    return rows.to(device, lr_dtype(device))
