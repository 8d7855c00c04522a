"""A step's operations recorded while it runs once, as a graph that torch can run or compile.

This is how a whole step becomes one program on a CPU: docs/guide/cpu.md has what that buys, and
`compile=False` switches it off.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from halfstep.compiler.decompositions import DECOMPOSITIONS
from halfstep.utils import rng
from halfstep.utils.device_values import HOST_READ_OPS

_aten = torch.ops.aten

# Methods that read a tensor's memory without an operation of torch's.
_MEMORY_READS = (Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.data_ptr, Tensor.__dlpack__)

# Arguments, by position, that an operation writes to though its schema does not say so.
_UNDECLARED_WRITES = {_aten.native_batch_norm.default: (3, 4)}

# Operations that a program of fixed shapes cannot repeat, by their tag.
_SHAPE_CHANGES = {
    torch.Tag.inplace_view: "changes the shape of a tensor in place",
    torch.Tag.dynamic_output_shape: "has an output whose shape depends on values",
}


class UnwritableError(RuntimeError):
    """An operation that a program cannot repeat: it would go on with the value of today."""


class TracedStep(NamedTuple):
    """The operations of a step over `inputs`: tensors that existed before it ran.

    `written` are the inputs that it changes, each as its whole memory. `random`: it draws random
    numbers.
    """

    graph: Graph
    inputs: list[Tensor]
    written: list[Tensor]
    random: bool

    def module(self, *, plain: bool) -> GraphModule:
        """A function of the inputs that changes them and returns nothing.

        `plain`: operations that torch's compiler cannot take are decomposed into others.
        """
        ordered = Graph()
        new_nodes: dict[Node, Node] = {}
        # Inputs were added where they were met; a function's come first.
        for node in sorted(self.graph.nodes, key=lambda node: node.op != "placeholder"):
            new_node = ordered.node_copy(node, new_nodes.__getitem__)
            if plain:
                new_node.target = DECOMPOSITIONS.get(new_node.target, new_node.target)
            new_nodes[node] = new_node
        ordered.output(())
        return GraphModule({}, ordered)


def written_down(step: Callable[[], Any]) -> TracedStep:
    """Runs `step` once and returns its operations.

    Afterwards all tensors and torch's random numbers are what they were before.
    """
    recorder = _Recorder()
    with rng.preserved_states():
        try:
            with recorder, _RefuseMemoryReads():
                step()
        finally:
            recorder.restore_inputs()
    written = [memory for memory, _ in recorder.copies_before_write.values()]
    return TracedStep(recorder.graph, recorder.inputs, written, recorder.random)


class _Recorder(TorchDispatchMode):
    """Adds every operation on tensors to a graph, and runs it.

    A tensor is identified by its memory, not by its object: autograd hands out other objects for
    the same tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self.inputs: list[Tensor] = []
        self.random = False

        # Inputs that were written to, by their storage: the whole memory, and a copy of it.
        self.copies_before_write: dict[int, tuple[Tensor, Tensor]] = {}
        # The node of each view that was seen, and the first node of each storage.
        self._nodes: dict[Any, Node] = {}
        self._storage_nodes: dict[int, Node] = {}
        # Keeps all tensors alive: freed memory would be used again, and taken for the old tensor.
        self._alive: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler" or not _computes_with_tensors(func):
            return func(*args, **kwargs)
        _check_repeatable(func, tree_leaves((args, kwargs)))
        self._copy_before_write(_written_tensors(func, args, kwargs))
        self.random |= torch.Tag.nondeterministic_seeded in func.tags

        node_args, node_kwargs = tree_map(self._node_of, (args, kwargs))
        node = self.graph.call_function(func, node_args, node_kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self._remember(result, node)
        elif isinstance(result, (tuple, list)):
            for i, item in enumerate(result):
                if isinstance(item, Tensor):
                    item_node = self.graph.call_function(operator.getitem, (node, i))
                    self._remember(item, item_node)
        return result

    @torch.no_grad()
    def restore_inputs(self) -> None:
        """Writes the copies back to the inputs that the step has changed."""
        for memory, copy in self.copies_before_write.values():
            memory.copy_(copy)

    def _copy_before_write(self, tensors: Iterable[Tensor]) -> None:
        """Copies the inputs among these tensors; what the step itself has made needs no copy."""
        for t in tensors:
            storage = _storage_id(t)
            node = self._storage_nodes.get(storage)
            if node is None or node.op == "placeholder":
                memory = _whole_memory(t)
                self.copies_before_write.setdefault(storage, (memory, memory.clone()))

    def _node_of(self, value: Any) -> Any:
        """The node of a tensor: a result, an input, or a new view of either. Others stay."""
        if not isinstance(value, Tensor):
            return value
        key = _memory_key(value)
        if key in self._nodes:
            return self._nodes[key]

        storage_node = self._storage_nodes.get(_storage_id(value))
        if storage_node is None:
            storage_node = self._add_input(value)
        if key not in self._nodes:
            layout = (list(value.shape), list(value.stride()), value.storage_offset())
            arguments = (storage_node, *layout)
            view = self.graph.call_function(_aten.as_strided.default, arguments)
            self._remember(value, view)
        return self._nodes[key]

    def _add_input(self, t: Tensor) -> Node:
        """Adds an input: the tensor if it is all of its memory, else all of that memory.

        There may be other views of it.
        """
        is_whole = t.untyped_storage().nbytes() == t.numel() * t.itemsize
        graph_input = t.detach() if is_whole else _whole_memory(t)
        self.inputs.append(graph_input)
        node = self.graph.placeholder(f"input_{len(self.inputs)}")
        self._remember(graph_input, node)
        return node

    def _remember(self, t: Tensor, node: Node) -> None:
        """Notes which node a tensor comes from."""
        if t.layout != torch.strided:
            raise UnwritableError(f"{node.target} gives a sparse tensor")
        key = _memory_key(t)
        if key not in self._nodes:
            self._nodes[key] = node
            self._storage_nodes.setdefault(_storage_id(t), node)
            self._alive.append(t)


class _RefuseMemoryReads(TorchFunctionMode):
    """Raises where a tensor's memory is read without an operation of torch's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MEMORY_READS:
            raise UnwritableError(f"Tensor.{func.__name__} looks at values on the host")
        return func(*args, **(kwargs or {}))


def _check_repeatable(func: Any, leaves: list[Any]) -> None:
    """Raises for an operation that no program can repeat, before it runs."""
    name = func.overloadpacket
    if func in HOST_READ_OPS:
        raise UnwritableError(f"{name} looks at a value on the host")
    for tag, change in _SHAPE_CHANGES.items():
        if tag in func.tags:
            raise UnwritableError(f"{name} {change}")

    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(t.layout != torch.strided for t in tensors):
        raise UnwritableError(f"{name} takes a sparse tensor")
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        raise UnwritableError(f"{name} draws from a generator of its own")
    if func is _aten.index.Tensor:
        _, *indices = tensors
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            raise UnwritableError(f"{name} by a mask has an output whose shape depends on values")


def _storage_id(t: Tensor) -> Any:
    """Identifies the memory that a tensor is a view of."""
    return t.untyped_storage()._cdata


def _memory_key(t: Tensor) -> Any:
    """What two objects of the same tensor share: memory, shape, strides and dtype."""
    layout = (t.storage_offset(), tuple(t.shape), t.stride())
    return (_storage_id(t), *layout, t.dtype, t.is_conj(), t.is_neg())


def _whole_memory(t: Tensor) -> Tensor:
    """All of the memory that a tensor is a view of, as a flat tensor."""
    with torch.no_grad():
        return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())


def _computes_with_tensors(func: Any) -> bool:
    """Whether it returns, reads or changes tensors: torch.promote_types is an operation, too."""
    schema = func._schema
    if func in HOST_READ_OPS or any("Tensor" in str(result.type) for result in schema.returns):
        return True
    return any(_is_written(argument) for argument in schema.arguments)


def _is_written(argument: Any) -> bool:
    """Whether the schema says that an operation changes this argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call changes."""
    undeclared = _UNDECLARED_WRITES.get(func, ())
    values = []
    for i, argument in enumerate(func._schema.arguments):
        if i in undeclared or _is_written(argument):
            values.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
