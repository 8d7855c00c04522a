"""Low precision in fewer kernels: casts of parameters by one, casts of their gradients by one.

A small network's step is as long as its chain of kernels, and each of these would be one. Bits of casts are
those of what is replaced. Imported when a program is compiled, not before: torch's compiler is a heavy import.
"""

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.library import Library

from halfstep.compiler import fx as nodes
from halfstep.compiler.passes import batch_weight_grads as leaves
from halfstep.precision.low_params import widen

MOST = (
    1 << 26
)  # bytes that are cast at once: where there are more, kernels are long, and memory counts

_aten, _cast = torch.ops.aten, torch.ops.prims.convert_element_type.default
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
}
_BACKWARD = _aten.convolution_backward.default  # several results, each behind a getitem
_VIEWS = {_aten.reshape.default, _aten.view.default, _aten.permute.default, _aten.t.default}
_LOW = (torch.float16, torch.bfloat16)

_library = Library("halfstep", "FRAGMENT")
_library.define("casts(Tensor[] tensors, ScalarType dtype) -> Tensor[]")


def _casts(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Each in `dtype`, all by one foreach cast."""
    return [t for t in widen(tensors, [dtype] * len(tensors)) if t is not None]


_library.impl("casts", _casts, "CompositeExplicitAutograd")


class Fewer(CustomGraphPass):
    """Rewrites the forward and the backward graph of a low program on `device`."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device

    def __call__(self, graph: Graph) -> None:
        leaves.rewrite(graph, self.device)
        casts = [
            n for n in graph.find_nodes(op="call_function", target=_cast) if _fixed(n, self.device)
        ]
        enter, leave = [n for n in casts if _enters(n)], [n for n in casts if _leaves(n)]
        _join(graph, enter, lambda: next(node for node in graph.nodes if node.op != "placeholder"))
        _join(graph, leave, graph.output_node)

    def uuid(self) -> bytes:
        """What torch's cache of compiled programs knows this pass by: its text and its device."""
        return get_hash_for_files((__file__, leaves.__file__, nodes.__file__), self.device)


def _fixed(cast: Node, device: str) -> bool:
    """Whether it turns a float32 into a low number or back, in a shape that is known."""
    source, value = cast.args[0].meta["val"], cast.meta["val"]  # type: ignore[union-attr]
    pair = {source.dtype, value.dtype}
    known = all(isinstance(size, int) for size in value.shape) and value.device.type == device
    return known and torch.float32 in pair and len(pair & set(_LOW)) == 1


def _enters(cast: Node) -> bool:
    """An input, for products alone: it has to lie in memory anyway."""
    source: Any = cast.args[0]
    while source.target in _VIEWS:
        source = source.args[0]
    return (
        source.op == "placeholder"
        and cast.meta["val"].dtype in _LOW
        and all(_product(user) for user in cast.users)
    )


def _product(user: Node) -> bool:
    """Whether this is one, what it returns, or a view that only such see."""
    if user.target in _VIEWS:
        return all(_product(next_) for next_ in user.users)
    return user.op == "output" or user.target in _PRODUCTS or user.target is _BACKWARD


def _leaves(cast: Node) -> bool:
    """A product's result, for the caller alone."""
    source: Any = cast.args[0]
    behind = source.args[0] if source.target is getitem else source
    made = behind.target in _PRODUCTS or behind.target is _BACKWARD
    return made and len(source.users) == 1 and all(user.op == "output" for user in cast.users)


def _join(graph: Graph, casts: list[Node], before: Callable[[], Node]) -> None:
    """One node for those to the same dtype, before the one that is found then."""
    for dtype in dict.fromkeys(cast.meta["val"].dtype for cast in casts):
        alike = [cast for cast in casts if cast.meta["val"].dtype == dtype]
        if len(alike) > 1 and sum(cast.meta["val"].nbytes for cast in alike) <= MOST:
            _replace(graph, alike, dtype, before())


def _replace(graph: Graph, casts: list[Node], dtype: torch.dtype, at: Node) -> None:
    with graph.inserting_before(at):
        sources = [_lifted(graph, cast.args[0]) for cast in casts]
        joined = graph.call_function(torch.ops.halfstep.casts.default, (sources, dtype))
        joined.meta["val"] = [cast.meta["val"] for cast in casts]
        for i, cast in enumerate(casts):
            part = graph.call_function(getitem, (joined, i))
            part.meta["val"] = cast.meta["val"]
            cast.replace_all_uses_with(part)
    for cast in casts:
        graph.erase_node(cast)


def _lifted(graph: Graph, source: Any) -> Node:
    """A view of an input made once more, here: the one that is there may come after the first product."""
    return (
        graph.node_copy(source, lambda n: _lifted(graph, n)) if source.target in _VIEWS else source
    )
