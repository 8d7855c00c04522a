"""Strict float32 products with small outputs, split along K so that they use the whole chip.

64×784 by 784×512 is 8 tiles of 64×64 for the 132 multiprocessors of an H200; split in 7 parts of K
= 112 it is 56. It is part of the row "compile=True, polish=True, fused SGD" of
docs/internals/speed.md: 5 epochs of the benchmark MLP take 0.289 s in fp32. What it adds alone is
not in the tables. To switch it off: a pass of your own in torch's `post_grad_custom_pre_pass`.

Imported when a program is compiled, not before: torch's compiler is a heavy import.
"""

from math import ceil
from typing import Any

import torch
from torch.fx import Graph, Node

from halfstep.compiler.fx import GraphPass, call
from halfstep.compiler.passes import batch_weight_grads

# Rows and columns of the output that one block of a float32 kernel computes.
TILE = 64

# Multiprocessors of an H100 or H200: more blocks would wait for each other.
MAX_BLOCKS = 132

# The shortest K that is split: below, a second kernel does not pay.
MIN_K = 256

# The shortest part of K: below, a block spends its time starting.
MIN_PART = 64

# The most parts: torch's compiler writes a longer sum as a reduction, which took 20 µs where this
# takes 1.3 (H200).
MAX_PARTS = 7

_aten = torch.ops.aten
_PRODUCTS: tuple[Any, ...] = (_aten.mm.default, _aten.addmm.default)


def count_parts(m: int, n: int, k: int) -> int:
    """Into how many equal parts to split the K of an M·K·N product; 1 leaves it as it is.

    Parts of a multiple of 4 floats come first: their rows are aligned to 16 bytes if those of the
    whole product are.
    """
    if min(m, n) < 2 or k < MIN_K:  # a product with a vector has kernels of its own
        return 1
    tiles = ceil(m / TILE) * ceil(n / TILE)
    max_parts = min(MAX_BLOCKS // tiles, k // MIN_PART, MAX_PARTS)
    divisors = [parts for parts in range(2, max_parts + 1) if k % parts == 0]
    return max(divisors, key=lambda parts: (k // parts % 4 == 0, parts), default=1)


class SplitK(GraphPass):
    """A·B becomes Σ_s A_s·B_s over parts of K, in one batched product.

    It has the same terms, summed in another order. Only float32 products of fixed shape on
    `device`. Runs on the forward graph and on the backward graph.
    """

    def __call__(self, graph: Graph) -> None:
        batch_weight_grads.rewrite(
            graph, self.device, is_split=lambda product: self._count_parts(product) > 1
        )
        for target in _PRODUCTS:
            for node in graph.find_nodes(op="call_function", target=target):
                parts = self._count_parts(node)
                if parts > 1:
                    _replace(graph, node, parts)

    def _count_parts(self, node: Node) -> int:
        """Into how many parts this product is split; 1 where it stays."""
        has_factors = any(factor != 1 for factor in node.kwargs.values())  # addmm's alpha and beta
        if has_factors or not all(self._takes(operand) for operand in node.args):
            return 1
        m, n, k = _product_sizes(node)
        return count_parts(m, n, k)

    def _takes(self, operand: Any) -> bool:
        value = operand.meta["val"]
        has_fixed_shape = all(isinstance(size, int) for size in value.shape)
        is_float32 = value.dtype == torch.float32
        return has_fixed_shape and is_float32 and value.device.type == self.device


def _product_sizes(node: Node) -> tuple[int, int, int]:
    """M, N and K of a product."""
    *_, a, b = node.args
    assert isinstance(a, Node)
    assert isinstance(b, Node)
    m, k = a.meta["val"].shape
    n = b.meta["val"].shape[1]
    return m, n, k


def _replace(graph: Graph, node: Node, parts: int) -> None:
    """[S, M, K/S]·[S, K/S, N], summed over S, plus the bias. Operands are views, not copies."""
    *bias, a, b = node.args
    m, n, k = _product_sizes(node)
    with graph.inserting_before(node):
        split_a = call(graph, _aten.reshape.default, a, [m, parts, k // parts])
        left = call(graph, _aten.permute.default, split_a, [1, 0, 2])
        right = call(graph, _aten.reshape.default, b, [parts, k // parts, n])
        products = call(graph, _aten.bmm.default, left, right)
        total = call(graph, _aten.sum.dim_IntList, products, [0])
        for term in bias:
            total = call(graph, _aten.add.Tensor, total, term)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
