"""The gradients of several weights by one kernel: products that nothing waits for but the update.

A small batch's weight gradients, A·B with a short K, are a few microseconds each, one after the other, on a part of the
chip. Together they are one kernel, and a cast of the results is part of it. Imported when a program is compiled, not
before.
"""

from math import ceil
from operator import getitem as _getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.library import Library

from halfstep.launching import INSTEAD, attempt, launch
from halfstep.step.nodes import call

LONGEST = 256  # of K: beyond, a tile's program is longer than a product of torch's
TILES = 1024  # in all: beyond, each product fills the chip by itself
MOST = 16  # products of one kernel
ROWS, COLUMNS = 32, 64  # of a tile
STEP, WIDE_STEP = 64, 16  # of K at a time; in float32, which would not fit into registers

_aten, _cast = torch.ops.aten, torch.ops.prims.convert_element_type.default
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_WORKS: dict[Any, bool] = {}  # whether the kernel could be compiled, by what it is compiled for
_library = Library("halfstep", "FRAGMENT")
_library.define("leaves(Tensor[] lefts, Tensor[] rights, ScalarType dtype) -> Tensor[]")


def rewrite(graph: Graph, device: str) -> None:
    """Products of fixed shape on `device` whose result, or one cast of it, is returned and nothing else."""
    found: dict[Any, list[tuple[Node, Node]]] = {}
    for product in graph.find_nodes(op="call_function", target=_aten.mm.default):
        last = _last(product)
        if last is not None and _fits(product, device):
            value = product.meta["val"]
            kind = value.device, value.dtype, last.meta["val"].dtype
            found.setdefault(kind, []).append((product, last))
    for (*_, dtype), pairs in found.items():
        if 1 < len(pairs) <= MOST and sum(_tiles(*_sizes(p)[:2]) for p, _ in pairs) <= TILES:
            _replace(graph, pairs, dtype)


def _last(product: Node) -> Node | None:
    """The product, or the cast that alone uses it, where only the caller gets it."""
    users = list(product.users)
    last = users[0] if len(users) == 1 and users[0].target is _cast else product
    return (
        last
        if last.users and last.meta["val"].dtype in _FLOATS and all(user.op == "output" for user in last.users)
        else None
    )


def _fits(product: Node, device: str) -> bool:
    a, b = (arg.meta["val"] for arg in product.args)  # type: ignore[union-attr]
    known = all(isinstance(n, int) for n in (*a.shape, *b.shape, *a.stride(), *b.stride()))
    near = known and max(map(_reach, (a, b))) < 2**31  # a tile's places are 32-bit numbers
    return near and a.device.type == device and a.dtype in _FLOATS and 0 < a.shape[1] <= LONGEST and b.shape[1] > 0


def _reach(t: Tensor) -> int:
    """How far the last tile of it goes."""
    return sum((size + COLUMNS) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def _sizes(product: Node) -> tuple[int, int, int]:
    a, b = (arg.meta["val"] for arg in product.args)  # type: ignore[union-attr]
    return a.shape[0], b.shape[1], a.shape[1]


def _tiles(m: int, n: int) -> int:
    return ceil(m / ROWS) * ceil(n / COLUMNS)


def _replace(graph: Graph, pairs: list[tuple[Node, Node]], dtype: torch.dtype) -> None:
    lefts, rights = zip(*(product.args for product, _ in pairs), strict=True)
    ours = {last for _, last in pairs}
    end = next(node for node in reversed(graph.nodes) if node in ours)  # not later: there, inputs may be overwritten
    with graph.inserting_before(end.next):
        made = graph.call_function(torch.ops.halfstep.leaves.default, (list(lefts), list(rights), dtype))
        made.meta["val"] = [last.meta["val"] for _, last in pairs]
        parts = [call(graph, _getitem, made, i) for i in range(len(pairs))]
    for (product, last), part in zip(pairs, parts, strict=True):
        last.replace_all_uses_with(part)
        for node in dict.fromkeys((last, product)):
            graph.erase_node(node)


def _plain(lefts: list[Tensor], rights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """By torch's own operations."""
    return [torch.mm(a, b).to(dtype) for a, b in zip(lefts, rights, strict=True)]


def leaves(lefts: list[Tensor], rights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Each A·B in float32, rounded to the dtype of A and then to `dtype`; by torch's products where Triton fails."""
    shapes = [(a.shape[0], b.shape[1], a.shape[1]) for a, b in zip(lefts, rights, strict=True)]
    outs = [a.new_empty(m, n, dtype=dtype) for a, (m, n, _) in zip(lefts, shapes, strict=True)]
    sizes = [n for s, a, b in zip(shapes, lefts, rights, strict=True) for n in (*s, *a.stride(), *b.stride())]
    step = WIDE_STEP if lefts[0].dtype == torch.float32 else STEP
    programs = sum(_tiles(m, n) for m, n, _ in shapes)
    arguments = tuple(lefts), tuple(rights), tuple(outs), tuple(sizes), len(outs), ROWS, COLUMNS, step

    def start() -> None:
        from halfstep.step.leaves_kernel import tiles

        launch(lefts[0].device, [(tiles, programs, arguments, 4)])

    pointers = tuple((t.dtype, t.data_ptr() % 16 == 0) for t in (*lefts, *rights))  # Triton tells these apart
    key = lefts[0].device, dtype, pointers, arguments[3]
    return outs if attempt(_WORKS, key, start, *INSTEAD) else _plain(lefts, rights, dtype)


_library.impl("leaves", _plain, "CompositeExplicitAutograd")
_library.impl("leaves", leaves, "CUDA")
