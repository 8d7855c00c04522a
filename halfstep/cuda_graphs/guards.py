"""Everything a captured graph holds fast: where its tensors are, and every plain value that its code has read."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
SETTINGS = 1000  # entries of a list or dict that may be settings
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    return [t.data_ptr() for t in tensors]


def module_guards(*roots: Any) -> Iterator[Any]:
    """Each module, its plain values (a dropout's p, settings in lists and dicts), hooks, tensors, what is frozen."""
    for root in roots:
        if not isinstance(root, nn.Module):
            yield root
            continue
        for module in root.modules():
            yield module
            yield tuple([(k, v) for k, v in vars(module).items() if _is_plain(v)])
            yield tuple(
                [
                    (k, i, v)
                    for k, held in vars(module).items()
                    for i, v in _items(held)
                    if _is_plain(v)
                ]
            )
            yield tuple([(k, *_place(v)) for k, v in vars(module).items() if isinstance(v, Tensor)])
            yield tuple([len(getattr(module, name)) for name in _HOOKS])
            for held in (module._parameters, module._buffers):
                tensors = [t for t in held.values() if t is not None]
                yield tuple(
                    [(t.data_ptr(), t.requires_grad, len(t._backward_hooks or ())) for t in tensors]
                )


class ContainerTensors:
    """Tensors in lists and dicts of modules, which a graph may read. Those that a step itself files there are others
    after every step, and no graph reads them."""

    def __init__(self, *roots: Any) -> None:
        self._roots, self._held = roots, dict[Any, tuple[int, int]]()

    @contextmanager
    def during_capture(self) -> Iterator[None]:
        """A capture: what is the same after it was not filed by the step."""
        before = _filed(self._roots)
        yield
        self._held = {
            key: place for key, place in _filed(self._roots).items() if before.get(key) == place
        }

    @property
    def were_replaced(self) -> bool:
        """Whether one is not what it was at the last capture."""
        now = _filed(self._roots)
        return any(now.get(key) != place for key, place in self._held.items())


def optimizer_guards(optimizer: Optimizer) -> Iterator[Any]:
    """Its plain settings by group, and where its tensors are, rates and state alike."""
    for group in optimizer.param_groups:
        settings = [v for k, v in group.items() if k != "params" and _is_plain(v, Tensor)]
        yield tuple([v.data_ptr() if isinstance(v, Tensor) else v for v in settings])
        for p in group["params"]:
            yield tuple(
                [v.data_ptr() for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
            )


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether something runs beside its step, which a replay would not run."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def module_attributes(*roots: Any) -> list[tuple[Any, Any, Any]]:
    """Every tensor and plain value of the modules by its place, to be put back when a capture did not become a step."""
    modules = [m for root in roots if isinstance(root, nn.Module) for m in root.modules()]
    places = [
        (owner, k, v)
        for m in modules
        for owner in (m._parameters, m._buffers, vars(m))
        for k, v in owner.items()
    ]
    inner = [(v, k, each) for _, _, v in places for k, each in _items(v)]
    return [place for place in (*places, *inner) if _is_plain(place[2], Tensor)]


def restore_attributes(places: list[tuple[Any, Any, Any]]) -> None:
    for owner, name, value in places:
        with suppress(IndexError):  # a list that is shorter now
            owner[name] = value


def _filed(roots: Iterable[Any]) -> dict[Any, tuple[int, int]]:
    modules = [m for root in roots if isinstance(root, nn.Module) for m in root.modules()]
    held = [
        (m, k, v)
        for m in modules
        for k, v in vars(m).items()
        if k not in ("_parameters", "_buffers")
    ]
    return {
        (id(m), k, i): _place(v)
        for m, k, each in held
        for i, v in _items(each)
        if isinstance(v, Tensor)
    }


def _place(t: Tensor) -> tuple[int, int]:
    """Which one it is, and where: one that is gone may leave either to the next."""
    return id(t), t.data_ptr() if t.layout == torch.strided else 0


def _is_plain(value: Any, *also: type) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(v, _PLAIN) for v in value)
    return isinstance(value, (*_PLAIN, *also))


def _items(value: Any) -> list[tuple[Any, Any]]:
    """What a list or a dict holds: settings and counters may be kept there. A long one is data: looking takes time."""
    if not isinstance(value, (list, dict)) or len(value) > SETTINGS:
        return []
    return list(value.items() if isinstance(value, dict) else enumerate(value))
