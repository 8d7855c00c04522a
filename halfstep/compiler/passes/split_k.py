"""Strict float32 products of small outputs, cut along K so that they use the whole chip.

Imported when a program is compiled, not before: torch's compiler is a heavy import.
"""

from math import ceil
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from halfstep.compiler import fx as nodes
from halfstep.compiler.fx import call
from halfstep.compiler.passes import batch_weight_grads as leaves

TILE = 64  # rows and columns of the output that one block of a float32 kernel computes
BLOCKS = 132  # multiprocessors of an H100 or H200: more blocks would wait for each other
LEAST_K = 256  # below, a product is too short for a second kernel to pay
LEAST_PART = 64  # of K in one part: below, a block spends its time starting
MOST = 7  # parts: torch's compiler writes a longer sum as a reduction, which took 20 us where this takes 1.3 (H200)

_aten = torch.ops.aten
_PRODUCTS: tuple[Any, ...] = (_aten.mm.default, _aten.addmm.default)


def cut(m: int, n: int, k: int) -> int:
    """Into how many parts of equal length to cut the K of an M·K·N product; 1 leaves it as it is.

    Parts of a multiple of 4 floats come first: their rows start at 16 bytes where those of the whole do.
    """
    if min(m, n) < 2 or k < LEAST_K:  # a product with a vector has kernels of its own
        return 1
    most = min(BLOCKS // (ceil(m / TILE) * ceil(n / TILE)), k // LEAST_PART, MOST)
    fitting = [s for s in range(2, most + 1) if k % s == 0]
    return max(fitting, key=lambda s: (k // s % 4 == 0, s), default=1)


class Cut(CustomGraphPass):
    """A·B becomes Σ_s A_s·B_s over parts of K, in one batched product: the same terms, summed in another order.

    Only float32 products of fixed shape on `device`. It runs on the forward and on the backward graph.
    """

    def __init__(self, device: str = "cuda") -> None:
        self.device = device

    def __call__(self, graph: Graph) -> None:
        leaves.rewrite(graph, self.device, cut=lambda product: self._parts(product) > 1)
        for target in _PRODUCTS:
            for node in graph.find_nodes(op="call_function", target=target):
                parts = self._parts(node)
                if parts > 1:
                    _replace(graph, node, parts)

    def uuid(self) -> bytes:
        """What torch's cache of compiled programs knows this pass by: its text and its device."""
        return get_hash_for_files((__file__, leaves.__file__, nodes.__file__), self.device)

    def _parts(self, node: Node) -> int:
        scaled = any(factor != 1 for factor in node.kwargs.values())  # addmm's alpha and beta
        return 1 if scaled or not all(map(self._takes, node.args)) else cut(*_sizes(node))

    def _takes(self, arg: Any) -> bool:
        value = arg.meta["val"]
        fixed = all(isinstance(size, int) for size in value.shape)
        return fixed and value.dtype == torch.float32 and value.device.type == self.device


def _sizes(node: Node) -> tuple[int, int, int]:
    """M, N and K."""
    *_, a, b = node.args
    assert isinstance(a, Node)
    assert isinstance(b, Node)
    (m, k), n = a.meta["val"].shape, b.meta["val"].shape[1]
    return m, n, k


def _replace(graph: Graph, node: Node, parts: int) -> None:
    """[S, M, K/S]·[S, K/S, N], summed over S, plus the bias: views of the operands as they lie, no copies."""
    *bias, a, b = node.args
    m, n, k = _sizes(node)
    with graph.inserting_before(node):
        rows = call(graph, _aten.reshape.default, a, [m, parts, k // parts])
        left = call(graph, _aten.permute.default, rows, [1, 0, 2])
        right = call(graph, _aten.reshape.default, b, [parts, k // parts, n])
        total = call(graph, _aten.sum.dim_IntList, call(graph, _aten.bmm.default, left, right), [0])
        for term in bias:
            total = call(graph, _aten.add.Tensor, total, term)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
