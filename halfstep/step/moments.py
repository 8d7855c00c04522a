"""A batch norm's mean and variance from plain sums, read at the memory's speed.

torch's compiler writes Welford's recurrence, a division an element: 2.2 of an H200's 4.3 TB/s. Here the rows of a batch
come in parts, and a part sums d and d², where d is the distance from its first row. That row is one of its values, so
Σd² is at most 1 + R times the part's Σ(x − mean)², and no more than R·n·2⁻²⁴ of that is lost, n being the additions one
after the other, whatever the mean is: 2·10⁻⁴ at worst. Means of parts are then few. Imported when a program
is compiled, not before: torch's compiler is a heavy import.
"""

from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from halfstep.step.nodes import call

LANES = 1 << 17  # sums that run side by side, parts times channels, so that they fill the chip
MOST, LEAST = 128, 8  # rows of a part

_aten = torch.ops.aten


def rewrite(graph: Graph, device: str) -> None:
    """Of images whose channels come last; others stay."""
    for node in graph.find_nodes(op="call_function", target=_aten.var_mean.correction):
        rows = _rows(node, device)
        if rows >= LEAST:
            _replace(graph, node, rows)


def part(rows: int, channels: int) -> int:
    """The rows of a part: as many as leave enough parts, and go into all of them."""
    most = min(MOST, rows * channels // LANES)
    return max((r for r in range(1, most + 1) if rows % r == 0), default=1)


def _rows(node: Node, device: str) -> int:
    """Of a part; 0 where this is no norm's variance over the rows of a batch."""
    source: Any = node.args[0]
    x: Tensor = source.meta["val"]
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    whole = list(node.args[1:]) == [[0, 2, 3]] and dict(node.kwargs) == {"correction": 0, "keepdim": True}
    if not (last and whole) or x.dtype != torch.float32 or x.device.type != device:
        return 0
    return part(x.numel() // x.shape[1], x.shape[1])


def _replace(graph: Graph, node: Node, rows: int) -> None:
    """Parts × rows × channels; the variance is that of the parts' means, and the mean of those in the parts."""
    source: Any = node.args[0]
    count, shape = source.meta["val"].numel(), node.meta["val"][0].shape
    with graph.inserting_before(node):
        last = call(graph, _aten.permute.default, source, [0, 2, 3, 1])
        x = call(graph, _aten.reshape.default, last, [count // shape[1] // rows, rows, shape[1]])
        first = call(graph, _aten.slice.Tensor, x, 1, 0, 1)
        d = call(graph, _aten.sub.Tensor, x, first)
        sums = call(graph, _aten.sum.dim_IntList, d, [1], True)
        squares = call(graph, _aten.sum.dim_IntList, call(graph, _aten.mul.Tensor, d, d), [1], True)
        off = call(graph, _aten.div.Tensor, sums, rows)
        inside = call(graph, _aten.sub.Tensor, squares, call(graph, _aten.mul.Tensor, sums, off))
        means = call(graph, _aten.add.Tensor, first, off)
        both = call(graph, _aten.var_mean.correction, means, [0], correction=0, keepdim=True)
        total = call(graph, _aten.sum.dim_IntList, inside, [0], True)
        within = call(graph, _aten.div.Tensor, total, count // shape[1])
        var = call(graph, _aten.add.Tensor, call(graph, getitem, both, 0), within)
        found = var, call(graph, getitem, both, 1)
        results = [call(graph, _aten.reshape.default, value, list(shape)) for value in found]
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)
