"""Everything a graph bakes in: addresses of its tensors, and plain values that its code has read.

A graph may be replayed only while all of it is the same as at its capture, so guards are compared
at each visit of the host. They guard the graphs of capture.py, whose docstring says what these buy
and how to switch them off.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# Entries of a list or dict. A longer one holds data rather than settings, and takes long to read.
MAX_CONTAINER_ENTRIES = 1000

_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
_HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# The object's id and the address of its memory. Both: a tensor that is freed may leave either of
# them to the next one.
TensorIdentity: TypeAlias = tuple[int, int]


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Where each tensor begins in memory."""
    return [t.data_ptr() for t in tensors]


def module_guards(*roots: Any) -> Iterator[Any]:
    """What a graph bakes in of these modules. A root that is no module guards itself.

    Each module, its plain attributes (the p of a dropout), also in lists and dicts, its tensors,
    its hooks, and which of its parameters are frozen.
    """
    for root in roots:
        if not isinstance(root, nn.Module):
            yield root
            continue
        for module in root.modules():
            attributes = vars(module).items()
            yield module
            yield tuple([(name, value) for name, value in attributes if _is_plain(value)])
            yield tuple(
                [
                    (name, key, entry)
                    for name, value in attributes
                    for key, entry in _container_entries(value)
                    if _is_plain(entry)
                ]
            )
            yield tuple(
                [
                    (name, *_tensor_identity(value))
                    for name, value in attributes
                    if isinstance(value, Tensor)
                ]
            )
            yield tuple([len(getattr(module, name)) for name in _HOOK_DICTS])
            for tensors in (module._parameters, module._buffers):
                yield tuple(
                    [
                        (t.data_ptr(), t.requires_grad, len(t._backward_hooks or ()))
                        for t in tensors.values()
                        if t is not None
                    ]
                )


def hook_dictionaries(net: nn.Module) -> list[dict[int, Any]]:
    """The dictionaries that hold the hooks of a network's modules, and those of all modules."""
    of_modules = [getattr(module, name) for module in net.modules() for name in _HOOK_DICTS]
    return [*of_modules, *(getattr(torch.nn.modules.module, f"_global{n}") for n in _HOOK_DICTS)]


def optimizer_guards(optimizer: Optimizer) -> Iterator[Any]:
    """What a graph bakes in of an optimizer: settings, and addresses of its rates and its state."""
    for group in optimizer.param_groups:
        settings: list[Any] = []
        for name, value in group.items():
            if name == "params":
                continue
            if isinstance(value, Tensor):
                settings.append(value.data_ptr())
            elif _is_plain(value):
                settings.append(value)
        yield tuple(settings)
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            yield tuple([t.data_ptr() for t in state.values() if isinstance(t, Tensor)])


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks run before or after its step. A replay would not run them."""
    own_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own_hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


class ContainerTensors:
    """Tensors stored in list and dict attributes of modules.

    A graph is stale when one that existed before the capture is replaced. Tensors that the step
    itself stores there are ignored: they are new after every step.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._identities_at_capture: dict[Any, TensorIdentity] = {}

    @contextmanager
    def during_capture(self) -> Iterator[None]:
        """Around a capture: remembers the tensors that are the same before and after it."""
        before = _container_tensors(self._roots)
        yield
        after = _container_tensors(self._roots)
        self._identities_at_capture = {
            key: identity for key, identity in after.items() if before.get(key) == identity
        }

    @property
    def were_replaced(self) -> bool:
        """Whether one of them is another tensor now than at the last capture."""
        now = _container_tensors(self._roots)
        remembered = self._identities_at_capture.items()
        return any(now.get(key) != identity for key, identity in remembered)


def _modules(roots: Iterable[Any]) -> list[nn.Module]:
    return [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]


def _container_tensors(roots: Iterable[Any]) -> dict[Any, TensorIdentity]:
    """Which tensors are in lists and dicts of the modules, by module, attribute and index."""
    return {
        (id(module), name, key): _tensor_identity(entry)
        for module in _modules(roots)
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers")
        for key, entry in _container_entries(value)
        if isinstance(entry, Tensor)
    }


def _tensor_identity(t: Tensor) -> TensorIdentity:
    address = t.data_ptr() if t.layout == torch.strided else 0  # sparse tensors have none
    return id(t), address


def _is_plain(value: Any) -> bool:
    """Whether it is a number, a string or None, or a tuple of them."""
    if isinstance(value, tuple):
        return all(isinstance(entry, _PLAIN_TYPES) for entry in value)
    return isinstance(value, _PLAIN_TYPES)


def _container_entries(value: Any) -> list[tuple[Any, Any]]:
    """What a list or dict holds, by index or key: settings and counters may be there."""
    if not isinstance(value, (list, dict)) or len(value) > MAX_CONTAINER_ENTRIES:
        return []
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value))
