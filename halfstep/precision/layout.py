"""Which modules, parameters and forwards a network consists of, to notice that they have changed.

Casts and low copies are planned once for a network. After `net.head = nn.Linear(…)` or
`load_state_dict(assign=True)` that plan would compute with tensors that are no longer there.
"""

from collections.abc import Callable, Iterator
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

    Identities are compared, not values, and not names: two thousand entries take a tenth of a
    millisecond. torch's registration hooks would cost nothing here, but they slow down every module
    of the process, and assignments to `_parameters` pass them by.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        # A scripted module stands for all that is inside: it has no dictionaries of Python's.
        modules = [module for module in net.modules() if not is_scripted(module)]
        dictionaries: list[dict[str, Any]] = []
        for module in modules:
            dictionaries += [module._parameters, module._modules]

        # Views of dictionaries show what stands in them later too.
        self._views = [dictionary.values() for dictionary in dictionaries]
        self._entries = list(chain.from_iterable(self._views))

        # Buffers may be replaced by forward, as long as none is added.
        self._counted = [*dictionaries, *(module._buffers for module in modules)]
        self._count = sum(map(len, self._counted))

        self._params: list[Tensor] = [p for p in net.parameters() if _has_shape(p)]
        self._param_dtypes = list(map(_dtype_of, self._params))
        self._param_sizes = list(map(Tensor.numel, self._params))

        # A forward is the instance's own, or that of its class.
        self._modules = modules
        self._types = list(map(type, modules))
        self._attributes = list(map(vars, modules))
        self._own_forwards = list(self._forwards_of_instances())
        self._classes = list(set(self._types))
        self._class_forwards = list(map(_forward_of, self._classes))

    def has_other_count(self) -> bool:
        """Whether modules, parameters or buffers were added or taken away: the cheapest part."""
        return sum(map(len, self._counted)) != self._count

    def is_current(self) -> bool:
        """Whether the network still has these modules, parameters and forwards.

        Also the same dtype and size of each parameter. Not to be called while a precision is
        active, which puts other weights into the network.
        """
        # The count comes first: `map` stops at the end of the shorter one.
        return (
            not self.has_other_count()
            and all(map(is_, chain.from_iterable(self._views), self._entries))
            and list(map(_dtype_of, self._params)) == self._param_dtypes
            and list(map(Tensor.numel, self._params)) == self._param_sizes
            and all(map(is_, map(type, self._modules), self._types))
            and list(self._forwards_of_instances()) == self._own_forwards
            and all(map(is_, map(_forward_of, self._classes), self._class_forwards))
        )

    def _forwards_of_instances(self) -> Iterator[Any]:
        return (names["forward"] for names in self._attributes if "forward" in names)


def _has_shape(param: Tensor) -> bool:
    return not nn.parameter.is_lazy(param)
