"""A step on a CPU as one compiled program: its operations are written down while it runs once, and taken back."""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from halfstep.engine import rng
from halfstep.engine.sunk.plain import PLAIN

_aten = torch.ops.aten
_READS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default)
_PAST_TORCH = (Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.data_ptr)
_UNDECLARED = {_aten.native_batch_norm.default: (3, 4)}  # arguments written to without saying so


class ReadError(RuntimeError):
    """A value is looked at on the host: a program would go on with the value of today."""


class Tape(TorchDispatchMode):
    """Operations as a graph over `inputs`, the tensors that were there before; tensors are known by their storage,
    since autograd hands out other objects for the same memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.inputs, self.random = Graph(), list[Tensor](), False
        self._nodes: dict[Any, Node] = {}
        self._bases: dict[int, Node] = {}
        self._alive: list[Tensor] = []  # memory that is freed would be known again as something else
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            raise ReadError(f"{func.overloadpacket} looks at a value on the host")
        if func.namespace == "profiler" or not _gives_tensors(func):
            return func(*args, **kwargs)
        self._keep(_written(func, args, kwargs))
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        node = self.graph.call_function(PLAIN.get(func, func), *tree_map(self._named, (args, kwargs)))
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self._know(out, node)
        elif isinstance(out, (tuple, list)):
            for i, each in enumerate(out):
                if isinstance(each, Tensor):
                    self._know(each, self.graph.call_function(operator.getitem, (node, i)))
        return out

    @property
    def written(self) -> list[Tensor]:
        """The inputs that the step changes."""
        return [t for t, _ in self._before.values()]

    @torch.no_grad()
    def take_back(self) -> None:
        for t, value in self._before.values():
            t.copy_(value)

    def _keep(self, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            storage = t.untyped_storage()
            if self._bases.get(storage._cdata) is None or self._bases[storage._cdata].op == "placeholder":
                whole = torch.empty(0, dtype=t.dtype).set_(storage)
                self._before.setdefault(storage._cdata, (whole, whole.clone()))

    def _named(self, value: Any) -> Any:
        """The node of a tensor: made here, or an input, or another view of either."""
        if not isinstance(value, Tensor):
            return value
        key = _key(value)
        if key not in self._nodes:
            base = self._bases.get(key[0])
            if base is None:
                self.inputs.append(value.detach())
                node = self.graph.placeholder(f"input_{len(self.inputs)}")
            else:
                shape = (list(value.shape), list(value.stride()), value.storage_offset())
                node = self.graph.call_function(_aten.as_strided.default, (base, *shape))
            self._know(value, node)
        return self._nodes[key]

    def _know(self, t: Tensor, node: Node) -> None:
        key = _key(t)
        if key not in self._nodes:
            self._nodes[key] = node
            self._bases.setdefault(key[0], node)
            self._alive.append(t)

    def module(self) -> GraphModule:
        """A function of the inputs that changes them and returns nothing."""
        ordered, seen = Graph(), dict[Node, Node]()
        for node in sorted(self.graph.nodes, key=lambda n: n.op != "placeholder"):
            seen[node] = ordered.node_copy(node, seen.__getitem__)
        ordered.output(())
        return GraphModule({}, ordered)


class _Watch(TorchFunctionMode):
    """Refuses what reads a tensor's memory past torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PAST_TORCH:
            raise ReadError(f"Tensor.{func.__name__} looks at values on the host")
        return func(*args, **(kwargs or {}))


def written_down(body: Callable[[], Any]) -> Tape:
    """The operations of `body`, which runs once: what it changed, random numbers too, is afterwards as before."""
    numbers, tape = rng.save(), Tape()
    try:
        with tape, _Watch():
            body()
    finally:
        tape.take_back()
        rng.load(numbers)
    return tape


def _key(t: Tensor) -> Any:
    return t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), t.stride(), t.dtype


def _gives_tensors(func: Any) -> bool:
    """Whether it computes with tensors at all: torch.promote_types is an operation too."""
    schema = func._schema
    return any("Tensor" in str(r.type) for r in schema.returns) or any(
        a.alias_info is not None and a.alias_info.is_write for a in schema.arguments
    )


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    hidden = _UNDECLARED.get(func, ())
    given = [
        args[i] if i < len(args) else kwargs.get(a.name)
        for i, a in enumerate(func._schema.arguments)
        if i in hidden or (a.alias_info is not None and a.alias_info.is_write)
    ]
    return [t for t in tree_leaves(given) if isinstance(t, Tensor)]
