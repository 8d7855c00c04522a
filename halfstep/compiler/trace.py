"""The operations of a step, written down while it runs once, as a graph that torch can run or compile."""

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from halfstep.compiler.decompositions import PLAIN
from halfstep.utils import rng
from halfstep.utils.device_values import HOST_READ_OPS

_aten = torch.ops.aten
_PAST_TORCH = (Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.data_ptr, Tensor.__dlpack__)
_UNDECLARED = {_aten.native_batch_norm.default: (3, 4)}  # arguments written to without saying so
_SHAPED = {
    torch.Tag.inplace_view: "changes the shape of a tensor in place",
    torch.Tag.dynamic_output_shape: "has an output whose shape depends on values",
}


class UnwritableError(RuntimeError):
    """An operation that a program cannot repeat: it would go on with the value of today."""


class Written(NamedTuple):
    """Operations over `inputs`, the tensors that were there before; `written` are those they change, whole."""

    graph: Graph
    inputs: list[Tensor]
    written: list[Tensor]
    random: bool

    def module(self, *, plain: bool) -> GraphModule:
        """A function of the inputs that changes them and returns nothing; `plain`: in words for torch's compiler."""
        ordered, seen = Graph(), dict[Node, Node]()
        for node in sorted(self.graph.nodes, key=lambda n: n.op != "placeholder"):
            new = seen[node] = ordered.node_copy(node, seen.__getitem__)
            new.target = PLAIN.get(new.target, new.target) if plain else new.target
        ordered.output(())
        return GraphModule({}, ordered)


def written_down(body: Callable[[], Any]) -> Written:
    """The operations of `body`, which runs once. Tensors and torch's random numbers are afterwards as before."""
    tape = _Tape()
    with rng.kept():
        try:
            with tape, _Watch():
                body()
        finally:
            tape.take_back()
    return Written(tape.graph, tape.inputs, [t for t, _ in tape.before.values()], tape.random)


class _Tape(TorchDispatchMode):
    """Tensors are known by their memory: autograd hands out other objects for the same."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.inputs, self.random = Graph(), list[Tensor](), False
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self._nodes: dict[Any, Node] = {}
        self._bases: dict[int, Node] = {}
        self._alive: list[
            Tensor
        ] = []  # memory that is freed would be known again as something else

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler" or not _gives_tensors(func):
            return func(*args, **kwargs)
        _check(func, tree_leaves((args, kwargs)))
        self._keep(_written(func, args, kwargs))
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        node = self.graph.call_function(func, *tree_map(self._named, (args, kwargs)))
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self._know(out, node)
        elif isinstance(out, (tuple, list)):
            for i, each in enumerate(out):
                if isinstance(each, Tensor):
                    self._know(each, self.graph.call_function(operator.getitem, (node, i)))
        return out

    @torch.no_grad()
    def take_back(self) -> None:
        for t, value in self.before.values():
            t.copy_(value)

    def _keep(self, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            base = self._bases.get(t.untyped_storage()._cdata)
            if base is None or base.op == "placeholder":
                flat = _flat(t)
                self.before.setdefault(t.untyped_storage()._cdata, (flat, flat.clone()))

    def _named(self, value: Any) -> Any:
        """The node of a tensor: made here, or an input, or another view of either."""
        if not isinstance(value, Tensor):
            return value
        key = _key(value)
        if key not in self._nodes:
            base = self._bases.get(key[0])
            if base is None:
                base = self._input(value)
            if key not in self._nodes:
                shape = (list(value.shape), list(value.stride()), value.storage_offset())
                self._know(
                    value, self.graph.call_function(_aten.as_strided.default, (base, *shape))
                )
        return self._nodes[key]

    def _input(self, t: Tensor) -> Node:
        """As it is where it is all of its memory, else all of that: there may be other views of it."""
        whole = t.untyped_storage().nbytes() == t.numel() * t.itemsize
        given = t.detach() if whole else _flat(t)
        self.inputs.append(given)
        node = self.graph.placeholder(f"input_{len(self.inputs)}")
        self._know(given, node)
        return node

    def _know(self, t: Tensor, node: Node) -> None:
        if t.layout != torch.strided:
            raise UnwritableError(f"{node.target} gives a sparse tensor")
        key = _key(t)
        if key not in self._nodes:
            self._nodes[key] = node
            self._bases.setdefault(key[0], node)
            self._alive.append(t)


class _Watch(TorchFunctionMode):
    """Refuses what reads a tensor's memory past torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PAST_TORCH:
            raise UnwritableError(f"Tensor.{func.__name__} looks at values on the host")
        return func(*args, **(kwargs or {}))


def _check(func: Any, leaves: list[Any]) -> None:
    """Refuses what no program can repeat, before it is done."""
    name, tensors = func.overloadpacket, [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if func in HOST_READ_OPS:
        raise UnwritableError(f"{name} looks at a value on the host")
    for tag, what in _SHAPED.items():
        if tag in func.tags:
            raise UnwritableError(f"{name} {what}")
    if any(t.layout != torch.strided for t in tensors):
        raise UnwritableError(f"{name} takes a sparse tensor")
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        raise UnwritableError(f"{name} draws from a generator of its own")
    if func is _aten.index.Tensor and any(
        t.dtype in (torch.bool, torch.uint8) for t in tensors[1:]
    ):
        raise UnwritableError(f"{name} by a mask has an output whose shape depends on values")


def _key(t: Tensor) -> Any:
    place = t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), t.stride()
    return *place, t.dtype, t.is_conj(), t.is_neg()


def _flat(t: Tensor) -> Tensor:
    """All of its memory."""
    with torch.no_grad():
        return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())


def _gives_tensors(func: Any) -> bool:
    """Whether it computes with tensors at all: torch.promote_types is an operation too."""
    schema = func._schema
    given = any("Tensor" in str(r.type) for r in schema.returns)
    return (
        given
        or func in HOST_READ_OPS
        or any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    )


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    hidden = _UNDECLARED.get(func, ())
    given = [
        args[i] if i < len(args) else kwargs.get(a.name)
        for i, a in enumerate(func._schema.arguments)
        if i in hidden or (a.alias_info is not None and a.alias_info.is_write)
    ]
    return [t for t in tree_leaves(given) if isinstance(t, Tensor)]
