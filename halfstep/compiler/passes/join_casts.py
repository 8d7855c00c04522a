"""Casts of 16-bit programs joined: the parameters' casts in one kernel, their gradients' in one.

A small network's step is as long as its chain of kernels, and each of these casts would be one.
With batch_weight_grads.py, forward and backward of the benchmark MLP are 13 kernels in place of 26
in O1 (docs/internals/fast-paths.md); 5 epochs of it take 0.249 s in place of 0.291 (an H200,
docs/internals/speed.md, both passes together). Casts give the same bits as before. To switch it
off: a pass of your own in torch's `post_grad_custom_pre_pass`.

Imported when a program is compiled, not before: torch's compiler is a heavy import. Importing it
registers torch.ops.halfstep.casts.
"""

from collections.abc import Callable, Iterator
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.library import Library

from halfstep.compiler.fx import GraphPass
from halfstep.compiler.passes import batch_weight_grads
from halfstep.precision.low_params import widen

# Bytes that are cast at once. Where there are more, kernels are long anyway, and memory counts.
MAX_BYTES = 1 << 26

_aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
}
_CONVOLUTION_BACKWARD = _aten.convolution_backward.default  # several results, through getitem
_VIEWS = {_aten.reshape.default, _aten.view.default, _aten.permute.default, _aten.t.default}
_LOW_DTYPES = (torch.float16, torch.bfloat16)

_library = Library("halfstep", "FRAGMENT")
_library.define("casts(Tensor[] tensors, ScalarType dtype) -> Tensor[]")


def cast_all(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Each tensor in `dtype`, all by one foreach kernel."""
    return [t for t in widen(tensors, [dtype] * len(tensors)) if t is not None]


_library.impl("casts", cast_all, "CompositeExplicitAutograd")


class JoinCasts(GraphPass):
    """Rewrites the forward and the backward graph of a 16-bit program on `device`."""

    def __call__(self, graph: Graph) -> None:
        batch_weight_grads.rewrite(graph, self.device)
        all_casts = graph.find_nodes(op="call_function", target=_cast)
        casts = [node for node in all_casts if _is_low_cast(node, self.device)]
        input_casts = [node for node in casts if _casts_input(node)]
        result_casts = [node for node in casts if _casts_result(node)]

        # Inputs are cast before the first operation, results at the end.
        _join(graph, input_casts, lambda: _first_operation(graph))
        _join(graph, result_casts, graph.output_node)


def _first_operation(graph: Graph) -> Node:
    operations: Iterator[Node] = (node for node in graph.nodes if node.op != "placeholder")
    return next(operations)


def _is_low_cast(cast: Node, device: str) -> bool:
    """Whether it is a cast between float32 and a 16-bit dtype, of a known shape on `device`."""
    value = cast.meta["val"]
    has_known_shape = all(isinstance(size, int) for size in value.shape)
    if not has_known_shape or value.device.type != device:
        return False
    source_dtype = cast.args[0].meta["val"].dtype  # type: ignore[union-attr]
    dtypes = {source_dtype, value.dtype}
    return torch.float32 in dtypes and len(dtypes & set(_LOW_DTYPES)) == 1


def _casts_input(cast: Node) -> bool:
    """Whether it casts an input, for products alone: these need the cast in memory anyway."""
    source: Any = cast.args[0]
    while source.target in _VIEWS:
        source = source.args[0]
    is_low_input = source.op == "placeholder" and cast.meta["val"].dtype in _LOW_DTYPES
    return is_low_input and all(_is_for_product(user) for user in cast.users)


def _is_for_product(user: Node) -> bool:
    """Whether it is a product, the graph's output, or a view that only such nodes use."""
    if user.target in _VIEWS:
        return all(_is_for_product(view_user) for view_user in user.users)
    return user.op == "output" or _is_product(user)


def _is_product(node: Node) -> bool:
    return node.target in _PRODUCTS or node.target is _CONVOLUTION_BACKWARD


def _casts_result(cast: Node) -> bool:
    """Whether it casts a product's result that nothing else uses, and is only returned."""
    source: Any = cast.args[0]
    producer = source.args[0] if source.target is getitem else source
    is_only_use = len(source.users) == 1 and all(user.op == "output" for user in cast.users)
    return is_only_use and _is_product(producer)


def _join(graph: Graph, casts: list[Node], find_insertion_point: Callable[[], Node]) -> None:
    """One node for the casts to each dtype, before the node that `find_insertion_point` returns."""
    for dtype in dict.fromkeys(cast.meta["val"].dtype for cast in casts):
        same_dtype = [cast for cast in casts if cast.meta["val"].dtype == dtype]
        total_bytes = sum(cast.meta["val"].nbytes for cast in same_dtype)
        if len(same_dtype) > 1 and total_bytes <= MAX_BYTES:
            _replace(graph, same_dtype, dtype, find_insertion_point())


def _replace(graph: Graph, casts: list[Node], dtype: torch.dtype, insertion_point: Node) -> None:
    """Replaces the casts by one call of torch.ops.halfstep.casts before that node."""
    with graph.inserting_before(insertion_point):
        sources = [_copy_views(graph, cast.args[0]) for cast in casts]
        joined = graph.call_function(torch.ops.halfstep.casts.default, (sources, dtype))
        joined.meta["val"] = [cast.meta["val"] for cast in casts]
        for i, cast in enumerate(casts):
            result = graph.call_function(getitem, (joined, i))
            result.meta["val"] = cast.meta["val"]
            cast.replace_all_uses_with(result)
    for cast in casts:
        graph.erase_node(cast)


def _copy_views(graph: Graph, source: Any) -> Node:
    """A copy of the views that lead to `source`: the original may come after the first product."""
    if source.target not in _VIEWS:
        return source  # type: ignore[no-any-return]
    return graph.node_copy(source, lambda node: _copy_views(graph, node))
