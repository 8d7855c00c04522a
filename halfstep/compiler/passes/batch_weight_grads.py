"""The gradients of several weights by one kernel: products that nothing waits for but the update.

A small batch's weight gradients, A·B with a short K, are a few microseconds each, one after the other, on a part of the
chip. Together they are one kernel. Bias gradients (the row sums of A), a cast of the results and the ReLU's mask of a
first layer, whose gradient goes no further, are part of it. Imported when a program is compiled, not before.
"""

from collections.abc import Callable
from math import ceil
from operator import getitem as _getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.library import Library

from halfstep.compiler.fx import call
from halfstep.kernels.launch import INSTEAD, attempt, launch

LONGEST = 256  # of K: beyond, a tile's program is longer than a product of torch's
TILES = 1024  # in all: beyond, each product fills the chip by itself
MOST = 16  # products of one kernel
ROWS, COLUMNS = 32, 64  # of a tile
STEP, WIDE_STEP = 64, 16  # of K at a time; in float32, which would not fit into registers

_aten, _cast = torch.ops.aten, torch.ops.prims.convert_element_type.default
_VIEWS, _TURNS = (
    (_aten.reshape.default, _aten.view.default),
    (_aten.permute.default, _aten.t.default),
)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_WORKS: dict[Any, bool] = {}  # whether the kernel could be compiled, by what it is compiled for
_library = Library("halfstep", "FRAGMENT")
_library.define(
    "leaves(Tensor[] lefts, Tensor[] rights, Tensor?[] masks, bool[] summed, ScalarType dtype) -> Tensor[]"
)


class Leaf(NamedTuple):
    """A product or a sum, and what the caller gets of it: itself, a view or a cast."""

    made: Node
    last: Node


def rewrite(graph: Graph, device: str, cut: Callable[[Node], bool] = lambda product: False) -> None:
    """Products of fixed shape on `device` whose result, or one cast of it, is returned and nothing else.

    `cut` tells products that become several: what adds those up masks the sum, too, at no cost.
    """
    found: dict[Any, list[Leaf]] = {}
    for product in graph.find_nodes(op="call_function", target=_aten.mm.default):
        last = _last(product)
        if last is not None and _fits(product, device):
            value = product.meta["val"]
            kind = value.device, value.dtype, last.meta["val"].dtype
            found.setdefault(kind, []).append(Leaf(product, last))
    for products in found.values():
        if (
            1 < len(products) <= MOST
            and sum(_tiles(*p.made.meta["val"].shape) for p in products) <= TILES
        ):
            _replace(graph, products, cut)


def _last(made: Node) -> Node | None:
    """It, or the cast that alone uses it, where only the caller gets it."""
    users = list(made.users)
    last = users[0] if len(users) == 1 and users[0].target is _cast else made
    return (
        last
        if last.users
        and last.meta["val"].dtype in _FLOATS
        and all(user.op == "output" for user in last.users)
        else None
    )


def _fits(product: Node, device: str) -> bool:
    a, b = (arg.meta["val"] for arg in product.args)  # type: ignore[union-attr]
    near = _near(a) and _near(b)
    return (
        near
        and a.device.type == device
        and a.dtype in _FLOATS
        and 0 < a.shape[1] <= LONGEST
        and b.shape[1] > 0
    )


def _near(t: Tensor) -> bool:
    """Whether it has a known shape, and how far its last tile goes: a tile's places are 32-bit numbers."""
    known = all(isinstance(n, int) for n in (*t.shape, *t.stride()))
    return (
        known
        and sum((n + COLUMNS) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
        < 2**31
    )


def _tiles(m: int, n: int) -> int:
    return ceil(m / ROWS) * ceil(n / COLUMNS)


def _turned(product: Node) -> Any:
    """What its left operand is the transpose of, a gradient [batch, M]; None where it is none."""
    left: Any = product.args[0]
    return left.args[0] if left.target in _TURNS and left.args[1:] in ((), ([1, 0],)) else None


def _sum(product: Node, dtype: torch.dtype) -> Leaf | None:
    """Its gradient's sum over the batch, where that is a leaf too, in the dtypes of the product's."""
    g = _turned(product)
    for made in g.users if g is not None else ():
        if made.target is _aten.sum.dim_IntList and made.args[1] == [0] and not made.kwargs:
            users = list(made.users)
            last = _last(users[0] if len(users) == 1 and users[0].target in _VIEWS else made)
            if last is not None and last.meta["val"].dtype == dtype and last.meta["val"].dim() == 1:
                return Leaf(made, last)
    return None


def _mask(product: Node, ours: set[Node], cut: Callable[[Node], bool]) -> tuple[Node, Node] | None:
    """g and h of the left operand where(h <= 0, 0, g), where leaves alone use that and both lie in memory anyway."""
    masked = _turned(product)
    if (
        masked is None
        or masked.target is not _aten.where.self
        or not all(_inside(user, ours) for user in masked.users)
    ):
        return None
    where, zero, g = masked.args
    compared = where.target is _aten.le.Scalar and where.args[1] == 0
    h, kinds = (where.args[0], _FLOATS) if compared else (where, (torch.bool,))
    lies = h.op == "placeholder" and (
        g.op == "placeholder" or (g.target is _aten.mm.default and not cut(g))
    )
    value, given, mask = (node.meta["val"] for node in (masked, g, h))
    whole = (
        value.shape == given.shape == mask.shape
        and value.dtype == given.dtype
        and _near(given)
        and _near(mask)
    )
    plain = zero.target is _aten.full.default and zero.args[1] == 0 and mask.dtype in kinds
    return (g, h) if lies and whole and plain else None


def _inside(user: Node, ours: set[Node]) -> bool:
    """A sum of ours, or a transpose that is nothing but the left operand of products of ours."""
    if user.target is _aten.sum.dim_IntList:
        return user in ours
    return user.target in _TURNS and all(
        next_ in ours and next_.args[1] is not user for next_ in user.users
    )


def _replace(graph: Graph, products: list[Leaf], cut: Callable[[Node], bool]) -> None:
    dtype = products[0].last.meta["val"].dtype
    sums: dict[Leaf, Leaf] = {}
    for product in products:
        if (found := _sum(product.made, dtype)) is not None:
            sums.setdefault(found, product)  # once, where several share a gradient
    wanted, summed = [*products, *sums], [product in sums.values() for product in products]
    ours = {leaf.made for leaf in wanted}
    masks = [_mask(product.made, ours, cut) for product in products]
    end = next(
        node for node in reversed(graph.nodes) if node in ours
    )  # not later: there, inputs may be overwritten
    with graph.inserting_before(end.next):
        turned = [
            [call(graph, _aten.permute.default, t, [1, 0]) for t in pair or ()] for pair in masks
        ]
        lefts = [new[0] if new else p.made.args[0] for p, new in zip(products, turned, strict=True)]
        given = (
            lefts,
            [p.made.args[1] for p in products],
            [new[1] if new else None for new in turned],
            summed,
            dtype,
        )
        made = graph.call_function(torch.ops.halfstep.leaves.default, given)
        made.meta["val"] = [leaf.last.meta["val"] for leaf in wanted]
        parts = [call(graph, _getitem, made, i) for i in range(len(wanted))]
    for leaf, part in zip(wanted, parts, strict=True):
        leaf.last.replace_all_uses_with(part)
        _erase(graph, leaf.last)


def _erase(graph: Graph, node: Node) -> None:
    """It, and what was there for it alone."""
    if node.op == "call_function" and not node.users:
        given = node.all_input_nodes
        graph.erase_node(node)
        for before in given:
            _erase(graph, before)


def _plain(
    lefts: list[Tensor],
    rights: list[Tensor],
    masks: list[Tensor | None],
    summed: list[bool],
    dtype: torch.dtype,
) -> list[Tensor]:
    """By torch's own operations."""
    lefts = [_zeroed(a, mask) for a, mask in zip(lefts, masks, strict=True)]
    sums = [
        a.sum(1, dtype=torch.float32).to(a.dtype)
        for a, too in zip(lefts, summed, strict=True)
        if too
    ]
    return [t.to(dtype) for t in (*map(torch.mm, lefts, rights), *sums)]


def _zeroed(a: Tensor, mask: Tensor | None) -> Tensor:
    """A gradient where its ReLU let something pass: NaN did. A mask of bool is True where nothing did."""
    return a if mask is None else torch.where(mask if mask.dtype == torch.bool else mask <= 0, 0, a)


def leaves(
    lefts: list[Tensor],
    rights: list[Tensor],
    masks: list[Tensor | None],
    summed: list[bool],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Each A·B, then the row sums of each A that is `summed`; A is 0 where its mask, a ReLU's output, is ≤ 0.

    In float32, rounded to the dtype of A and then to `dtype`; by torch's operations where Triton fails.
    """
    outs = [
        a.new_empty(a.shape[0], b.shape[1], dtype=dtype) for a, b in zip(lefts, rights, strict=True)
    ]
    sums = [
        a.new_empty(a.shape[0], dtype=dtype) for a, too in zip(lefts, summed, strict=True) if too
    ]
    hidden = [
        a if mask is None else mask for a, mask in zip(lefts, masks, strict=True)
    ]  # some pointer: it is not read
    rest = iter(sums)
    totals = [
        next(rest) if too else out for out, too in zip(outs, summed, strict=True)
    ]  # nor is this one written
    sizes = tuple(
        n
        for each in zip(lefts, rights, hidden, masks, summed, strict=True)
        for n in _numbers(*each)
    )
    step = WIDE_STEP if lefts[0].dtype == torch.float32 else STEP
    tensors = tuple(lefts), tuple(rights), tuple(hidden), tuple(outs), tuple(totals)

    def start() -> None:
        from halfstep.kernels.backward_triton import tiles

        programs, arguments = (
            sum(_tiles(*out.shape) for out in outs),
            (*tensors, sizes, len(outs), ROWS, COLUMNS, step),
        )
        launch(lefts[0].device, [(tiles, programs, arguments, 4)])

    pointers = tuple(
        (t.dtype, t.data_ptr() % 16 == 0) for t in (*lefts, *rights, *hidden)
    )  # Triton tells these apart
    key = lefts[0].device, dtype, pointers, sizes
    return (
        [*outs, *sums]
        if attempt(_WORKS, key, start, *INSTEAD)
        else _plain(lefts, rights, masks, summed, dtype)
    )


def _numbers(
    a: Tensor, b: Tensor, hidden: Tensor, mask: Tensor | None, summed: bool
) -> tuple[int, ...]:
    """What the kernel is compiled for."""
    sizes, strides = (
        (a.shape[0], b.shape[1], a.shape[1]),
        (*a.stride(), *b.stride(), *hidden.stride()),
    )
    return *sizes, *strides, int(mask is not None), int(summed)


_library.impl("leaves", _plain, "CompositeExplicitAutograd")
_library.impl("leaves", leaves, "CUDA")
