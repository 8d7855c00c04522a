"""`Model(device=…)`: the network, its loss and the optimizer's state on one device."""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from halfstep.errors import Notice
from halfstep.precision.module_support import check_has_values
from halfstep.step import TrainStep
from halfstep.utils.keywords import user_stacklevel
from halfstep.utils.rank_environment import local_rank_of_environment, started_by_torchrun
from halfstep.utils.text import list_some, write_line

CPU = torch.device("cpu")


def place_parts(
    device: str | torch.device | None, net: nn.Module, loss: Any, optimizer: Any, step: Any
) -> None:
    """Moves network, loss and optimizer state to the device; with None everything stays.

    Parameters stay the same objects, so the optimizer goes on with them.
    """
    if device is None:
        if optimizer is not None or step is not None:
            _warn_idle_device(net)
        return
    target = resolve_device(device)
    modules = [part for part in (net, loss) if isinstance(part, nn.Module)]
    for module in modules:
        check_has_values(module)
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    if all(tensor.device == target for tensor in tensors):
        return
    if isinstance(step, TrainStep):
        raise ValueError(
            f"device: the step was built on {step.device}, and its network cannot leave it; "
            f"call net.to({str(target)!r}) before you build the step, and leave device= out"
        )
    for module in modules:
        _check_movable(module, target)
    parameters = [p for module in modules for p in module.parameters()]
    for module in modules:
        module.to(target)
    moved = [p for module in modules for p in module.parameters()]
    if any(a is not b for a, b in zip(parameters, moved, strict=True)):
        raise ValueError(
            f"device: on {target} the network has new parameters, which the optimizer does not "
            f"know; build it now, from net.parameters(), and then the Model"
        )
    if isinstance(optimizer, Optimizer):
        move_optimizer_state(optimizer)


def resolve_device(device: Any) -> torch.device:
    """The torch device of a word, with its index; an error says which devices there are."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, int) and not isinstance(device, bool):
        device = f"cuda:{device}"
    try:
        requested = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(_unknown_device_message(device)) from None
    if requested.type == "cpu":
        return CPU
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or requested.type != accelerator.type:
        raise ValueError(_unknown_device_message(device))
    index = torch.accelerator.current_device_index()
    if ":" in str(requested):
        index = requested.index
    elif started_by_torchrun():  # each rank on a machine has a GPU of its own
        index = local_rank_of_environment() % torch.accelerator.device_count()
    if index >= torch.accelerator.device_count():
        raise ValueError(_unknown_device_message(device))
    return torch.device(requested.type, index)


def _unknown_device_message(device: Any) -> str:
    """The devices of this machine as they are written, and a line that works."""
    names = ["'cpu'"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        count = torch.accelerator.device_count()
        names += [f"'{accelerator.type}:{index}'" for index in range(count)]
    word = str(device)
    line_word = "auto"
    kind, _, index = word.lower().partition(":")
    usual_kind = "cuda" if kind == "gpu" else kind
    usual_word = f"{usual_kind}:{index}" if index else usual_kind
    called = ""
    if usual_kind in ("cpu", "cuda") and word != usual_word:
        called = f"{word!r} is called {usual_word!r}; "
        line_word = "cpu" if usual_kind == "cpu" else "auto"
    problem = f"device: {called}there is no {word!r} here, only {', '.join(names)}"
    if str(device) == "meta":
        problem = f"device: 'meta' has shapes and no values; use one of {', '.join(names)}"
    return write_line(problem, f"hs.Model(net, loss, optimizer, device={line_word!r})")


def _warn_idle_device(net: nn.Module) -> None:
    """A notice where the network is on the CPU, and torch sees a GPU.

    The count comes from the driver's library where it can: CUDA is not started for it, so that
    workers may still be forked.
    """
    on_cpu = all(p.device.type == "cpu" for p in net.parameters())
    if on_cpu and torch.cuda.device_count():
        warnings.warn(
            "net: it is on the CPU, and a CUDA device lies idle; "
            "hs.Model(…, device='auto') trains there, device='cpu' says that this is meant",
            Notice,
            stacklevel=user_stacklevel(),
        )


def move_optimizer_state(optimizer: Optimizer) -> None:
    """Moves what an optimizer remembers of each parameter to where the parameter is now.

    Values and dtypes stay. The step counter stays on the host where torch keeps it there.
    """
    counts_on_device = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            counts_on_device[p] = bool(group.get("capturable") or group.get("fused"))

    for p, state in optimizer.state.items():
        for name, value in state.items():
            target = p.device
            if name == "step" and not counts_on_device.get(p, False):
                target = CPU
            state[name] = tree_map(lambda leaf, to=target: _to(leaf, to), value)


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _check_movable(net: nn.Module, target: torch.device) -> None:
    """Refuses tensors that share memory, which torch would copy apart when it moves them."""
    shared = shared_tensors(net)
    if shared:
        raise ValueError(
            f"device: {list_some(shared, 4)} share memory, and moving would copy them apart; "
            f"call net.to({str(target)!r}) and tie them again, before optimizer and Model"
        )


def shared_tensors(net: nn.Module) -> list[str]:
    """Names of parameters and buffers that share memory without being one Parameter.

    In the order of the network. One Parameter under two names is moved as one, and so is a module
    that stands in two places.
    """
    extents = list(_extents(net))
    shared = set()
    reaches_furthest: _Extent | None = None  # of those that begin before the next one
    for extent in sorted(extents):
        previous = reaches_furthest
        overlaps = previous is not None and extent.start < previous.end
        if previous is not None and overlaps and extent.owner != previous.owner:
            shared |= {previous.name, extent.name}
        if previous is None or extent.end > previous.end:
            reaches_furthest = extent
    return [extent.name for extent in extents if extent.name in shared]


class _Extent(NamedTuple):
    """The memory of a tensor, from its first address to behind its last."""

    start: int
    end: int
    name: str
    owner: str
    """What torch moves at once: a Parameter under all its names, a buffer of one module."""


def _extents(net: nn.Module) -> Iterator[_Extent]:
    for module_name, module in net.named_modules():
        tensors = [*module._parameters.items(), *module._buffers.items()]
        for tensor_name, tensor in tensors:
            has_memory = tensor is not None and not nn.parameter.is_lazy(tensor)
            if not has_memory or tensor.layout is not torch.strided or not tensor.numel():
                continue
            name = f"{module_name}.{tensor_name}".lstrip(".")
            owner = str(id(tensor)) if isinstance(tensor, nn.Parameter) else name
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            end = tensor.data_ptr() + (last + 1) * tensor.element_size()
            yield _Extent(tensor.data_ptr(), end, name, owner)
