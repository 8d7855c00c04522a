"""Which modules, parameters and forwards a network consists of, to notice that they have changed.

Casts and low copies are planned once for a network. After `net.head = nn.Linear(…)` or
`load_state_dict(assign=True)` that plan would compute with tensors that are no longer there.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

_dtype_of = attrgetter("dtype")
_forward_of: Callable[[Any], Any] = attrgetter("forward")


def is_scripted(module: nn.Module) -> bool:
    """Whether TorchScript runs it: its weights and its forward cannot be swapped from Python."""
    return isinstance(module, torch.jit.ScriptModule)


class NetworkLayout:
    """The modules, parameters and forwards of a network as they are now.

    Identities are compared, not values, and not names. What each step looks at is as little as will
    do: every object costs a miss of the processor's caches, which the step before has filled with
    something else. torch's registration hooks would cost nothing here, but they slow down every
    module of the process, and assignments to `_parameters` pass them by.

    `wrapped`: the modules whose forward a precision has wrapped; that of any other is called as it
    is, so that a change of it takes effect by itself.
    """

    def __init__(self, net: nn.Module, wrapped: Iterable[nn.Module] = ()) -> None:
        self.net = net
        # A scripted module stands for all that is inside: it has no dictionaries of Python's.
        modules = [module for module in net.modules() if not is_scripted(module)]

        # Views of dictionaries show what stands in them later too.
        dictionaries: list[dict[str, Any]] = []
        for module in modules:
            dictionaries += [module._parameters, module._modules]
        self._views = [dictionary.values() for dictionary in dictionaries if dictionary]
        self._entries = list(chain.from_iterable(self._views))

        # Buffers may be replaced by forward, as long as none is added.
        buffers = [module._buffers for module in modules]
        self._buffers = [dictionary for dictionary in buffers if dictionary]
        self._buffer_count = sum(map(len, self._buffers))
        self._empty = [dictionary for dictionary in (*dictionaries, *buffers) if not dictionary]

        # Where forward makes layers, if it does.
        parents = [module for module in modules if module._modules or module is net]
        self._children = [module._modules for module in parents if not is_scripted(module)]
        self._child_count = sum(map(len, self._children))

        self._params: list[Tensor] = [p for p in net.parameters() if _has_shape(p)]
        self._param_dtypes = list(map(_dtype_of, self._params))
        self._param_sizes = list(map(Tensor.numel, self._params))
        self._wrapped_forwards = Forwards(wrapped)
        self._all_forwards = Forwards(modules)

    def has_new_children(self) -> bool:
        """Whether modules with children have more of them, or fewer: a look behind a forward."""
        return sum(map(len, self._children)) != self._child_count

    def is_current(self, *, every_forward: bool = True) -> bool:
        """Whether the network still has these modules and parameters, of these dtypes and sizes.

        And the forwards: of all modules, or only of those that are wrapped. Not to be called while
        a precision is active, which puts other weights into the network.
        """
        entries = list(chain.from_iterable(self._views))
        forwards = self._all_forwards if every_forward else self._wrapped_forwards
        return (
            not any(self._empty)
            and len(entries) == len(self._entries)
            and all(map(is_, entries, self._entries))
            and sum(map(len, self._buffers)) == self._buffer_count
            and list(map(_dtype_of, self._params)) == self._param_dtypes
            and list(map(Tensor.numel, self._params)) == self._param_sizes
            and forwards.are_current()
        )


class Forwards:
    """The forwards of some modules: of a module's own, or that of its class."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._types = list(map(type, self._modules))
        self._attributes = list(map(vars, self._modules))
        self._own_forwards = list(self._forwards_of_instances())
        self._classes = list(set(self._types))
        self._class_forwards = list(map(_forward_of, self._classes))

    def are_current(self) -> bool:
        """Whether they are the same functions now."""
        return (
            all(map(is_, map(type, self._modules), self._types))
            and list(self._forwards_of_instances()) == self._own_forwards
            and all(map(is_, map(_forward_of, self._classes), self._class_forwards))
        )

    def _forwards_of_instances(self) -> Iterator[Any]:
        return (names["forward"] for names in self._attributes if "forward" in names)


def _has_shape(param: Tensor) -> bool:
    return not nn.parameter.is_lazy(param)
