"""The sum of gradients over lanes and ranks.

A lane is one of the slices into which every batch is cut (step/lanes.py). Each rank adds the
gradients of its own lanes with `add`, in order; `finish` returns the sum over all lanes of all
ranks, the same bits on every rank. Two ways:

- `AllReduceSum`: torch.distributed's all-reduce. Its order of additions depends on the number of
  ranks.
- `TreeSum`: lanes are added in a fixed binary tree, whoever computed them, so that the sum has the
  same bits for any number of ranks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from halfstep.distributed.process_group import Ranks

BUCKET_BYTES = 25 << 20  # of one all-reduce, as DDP has it: large enough for full bandwidth

WHAT = "the sum of gradients"  # how an error calls the collective


class GradientSum(Protocol):
    """Adds lanes, then ranks."""

    def reset(self) -> None:
        """Forgets the lanes of a batch that ended in an error."""

    def add(self, lane: int, grads: list[Tensor | None], factor: Tensor | None) -> None:
        """Takes the gradients of one lane of this rank, to be multiplied by `factor`."""

    def start(self, like: Sequence[Tensor], trained: Sequence[bool]) -> None:
        """All lanes of this rank are there: what can go on in the background begins.

        `like` has the shape, strides and dtype of each gradient, and no values; `trained` says
        which may have one. Both are the same on all ranks.
        """

    def finish(self, like: Sequence[Tensor], present: Sequence[bool]) -> list[Tensor | None]:
        """The sum over all lanes of all ranks.

        `present` says which parameters have a gradient in any lane; what this rank has none of
        counts as zero.
        """


class AllReduceSum:
    """The sum by all-reduce, one lane on each rank."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks = ranks
        self.device = device
        self._grads: list[Tensor | None] = []
        self._factor: Tensor | None = None
        self._buckets: list[tuple[list[int], Tensor, Any]] = []  # positions, values, work
        # The memory of each bucket, by its positions: new memory costs page faults each step.
        self._memory: dict[tuple[int, ...], Tensor] = {}

    def reset(self) -> None:
        self._grads = []
        self._factor = None
        self._buckets = []

    def add(self, lane: int, grads: list[Tensor | None], factor: Tensor | None) -> None:
        self._grads = grads
        self._factor = factor

    def start(self, like: Sequence[Tensor], trained: Sequence[bool]) -> None:
        """Starts the all-reduce of all buckets, one after another."""
        grads = self._grads or [None] * len(like)
        self._grads = []
        self._buckets = []
        for indices in _buckets(like, trained, BUCKET_BYTES):
            flat = self._bucket_memory(indices, like)
            _flatten(indices, grads, like, self._factor, flat)
            self._buckets.append((indices, flat, self.ranks.start_all_reduce_(flat, WHAT)))

    def _bucket_memory(self, indices: list[int], like: Sequence[Tensor]) -> Tensor:
        key = tuple(indices)
        if key not in self._memory:
            self._memory[key] = _new_bucket(indices, like, self.device)
        return self._memory[key]

    def finish(self, like: Sequence[Tensor], present: Sequence[bool]) -> list[Tensor | None]:
        sums: list[Tensor | None] = [None] * len(like)
        for indices, flat, work in self._buckets:
            if work is not None:
                with self.ranks.named_errors(WHAT):
                    work.wait()
            _set_views(flat, indices, like, sums)
        self._buckets = []
        return [s if is_present else None for s, is_present in zip(sums, present, strict=True)]


class _Node(NamedTuple):
    """The sum of the lanes start to start + size − 1."""

    start: int
    size: int
    grads: list[Tensor | None]


class TreeSum:
    """The sum in a fixed binary tree over the lanes.

    Two neighbours of the same size, the first of which starts at an even multiple of it, are added
    as soon as both are there. What is left at the end (of 12 lanes: 8 and 4) is added from the
    right. `lanes_of_ranks` says which lanes each rank has: ranges that follow each other.
    """

    def __init__(self, ranks: Ranks, lanes_of_ranks: Sequence[range], device: torch.device) -> None:
        self.ranks = ranks
        self.device = device
        self.lanes_of_ranks = lanes_of_ranks
        self._nodes: list[_Node] = []
        # The sums that each rank is left with, which every rank can count for all.
        self.node_ranges = [_sizes_of_nodes(lanes) for lanes in lanes_of_ranks]

    def reset(self) -> None:
        self._nodes = []

    def add(self, lane: int, grads: list[Tensor | None], factor: Tensor | None) -> None:
        """Adds the gradients of one lane, times `factor`. They become this object's."""
        if factor is not None:
            _multiply_(grads, factor)
        _push(self._nodes, _Node(lane, 1, list(grads)))

    def start(self, like: Sequence[Tensor], trained: Sequence[bool]) -> None:
        """Nothing: which gradients there are decides what is sent."""

    def finish(self, like: Sequence[Tensor], present: Sequence[bool]) -> list[Tensor | None]:
        nodes = self._nodes
        self._nodes = []
        if self.ranks.count == 1:
            grads = _fold(nodes).grads if nodes else [None] * len(like)
            return [_at_start_of_memory(grad) for grad in grads]
        assert [(n.start, n.size) for n in nodes] == self.node_ranges[self.ranks.index]
        sums: list[Tensor | None] = [None] * len(like)
        for indices in _buckets(like, present, BUCKET_BYTES):
            self._sum_bucket(indices, nodes, like, sums)
        return [_at_start_of_memory(grad) for grad in sums]

    def _sum_bucket(
        self,
        indices: list[int],
        nodes: list[_Node],
        like: Sequence[Tensor],
        sums: list[Tensor | None],
    ) -> None:
        """Each rank adds one piece of the bucket in tree order, then all get all pieces."""
        flat_nodes = torch.stack([_new_bucket(indices, like, self.device) for _ in nodes])
        for node, flat_node in zip(nodes, flat_nodes, strict=True):
            _flatten(indices, node.grads, like, None, flat_node)
        element_count = flat_nodes.shape[1]
        if element_count == 0:  # parameters without elements: nothing to send
            _set_views(flat_nodes[0], indices, like, sums)
            return
        rank_count = self.ranks.count
        piece_size = -(-element_count // rank_count)
        padded = torch.nn.functional.pad(flat_nodes, (0, piece_size * rank_count - element_count))

        # Piece i of every node goes to rank i: [nodes, ranks · piece] → [ranks, nodes · piece].
        pieces = padded.view(len(nodes), rank_count, piece_size).transpose(0, 1).contiguous()
        received = self.ranks.exchange_chunks(
            pieces.view(rank_count, -1),
            [len(ranges) * piece_size for ranges in self.node_ranges],
            WHAT,
        )

        # All nodes of the tree that are left, in the order of their lanes, of this rank's piece.
        all_ranges = [node_range for ranges in self.node_ranges for node_range in ranges]
        stack: list[_Node] = []
        for (start, size), piece in zip(all_ranges, received.split(piece_size), strict=True):
            _push(stack, _Node(start, size, [piece]))
        piece_sum = _fold(stack).grads[0]
        assert piece_sum is not None
        flat = self.ranks.all_gather(piece_sum, WHAT).view(-1)[:element_count]
        _set_views(flat, indices, like, sums)


def _sizes_of_nodes(lanes: range) -> list[tuple[int, int]]:
    """Start and size of each sum that is left when these lanes have been added."""
    nodes: list[_Node] = []
    for lane in lanes:
        _push(nodes, _Node(lane, 1, []))
    return [(node.start, node.size) for node in nodes]


def _push(nodes: list[_Node], node: _Node) -> None:
    """Puts a node behind the others, and adds neighbours that are the halves of a larger one."""
    while nodes and nodes[-1].size == node.size and nodes[-1].start % (2 * node.size) == 0:
        node = _add_nodes(nodes.pop(), node)
    nodes.append(node)


def _fold(nodes: list[_Node]) -> _Node:
    """The sum of what is left, from the right: the small ones first."""
    total = nodes.pop()
    while nodes:
        total = _add_nodes(nodes.pop(), total)
    return total


def _add_nodes(left: _Node, right: _Node) -> _Node:
    """left + right, in the memory of the left one. A gradient that only one has is taken as is."""
    grads = []
    both_left = []
    both_right = []
    for left_grad, right_grad in zip(left.grads, right.grads, strict=True):
        if left_grad is not None and right_grad is not None:
            both_left.append(left_grad)
            both_right.append(right_grad)
        grads.append(right_grad if left_grad is None else left_grad)
    if both_left:
        torch._foreach_add_(both_left, both_right)
    return _Node(left.start, left.size + right.size, grads)


def _multiply_(grads: Sequence[Tensor | None], factor: Tensor) -> None:
    """Multiplies by a number on the device. It is a power of two, so nothing is rounded."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        if grad is not None:
            values = torch.view_as_real(grad) if grad.is_complex() else grad
            by_dtype.setdefault(values.dtype, []).append(values)
    for dtype, tensors in by_dtype.items():
        torch._foreach_mul_(tensors, factor.to(dtype))


def _buckets(like: Sequence[Tensor], present: Sequence[bool], max_bytes: int) -> list[list[int]]:
    """The positions of the gradients to be sent, in groups of one dtype and a limited size.

    The same on all ranks. From the last parameter to the first, as backward computes them. Complex
    numbers are sent as pairs of real ones, in groups of their own: a pair begins at an even place.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[torch.dtype, list[int]] = {}
    bytes_in: dict[torch.dtype, int] = {}
    for i in reversed(range(len(like))):
        if not present[i]:
            continue
        dtype = like[i].dtype
        size = like[i].numel() * like[i].element_size()
        if dtype in open_buckets and bytes_in[dtype] + size > max_bytes:
            buckets.append(open_buckets.pop(dtype))
        if dtype not in open_buckets:
            open_buckets[dtype] = []
            bytes_in[dtype] = 0
        open_buckets[dtype].append(i)
        bytes_in[dtype] += size
    return [*buckets, *open_buckets.values()]


def _new_bucket(indices: Sequence[int], like: Sequence[Tensor], device: torch.device) -> Tensor:
    """Memory for these gradients, one behind another."""
    first = like[indices[0]]
    size = sum(_real_size(like[i]) for i in indices)
    return torch.empty(size, dtype=first.dtype.to_real(), device=device)


def _flatten(
    indices: Sequence[int],
    grads: Sequence[Tensor | None],
    like: Sequence[Tensor],
    factor: Tensor | None,
    flat: Tensor,
) -> None:
    """Writes the gradients into `flat`, one behind another, times `factor`.

    Where there is none stands −0, which changes nothing that it is added to: −0 + 0 is 0.
    """
    targets = flat.split([_real_size(like[i]) for i in indices])
    for i, target in zip(indices, targets, strict=True):
        grad = grads[i]
        if grad is None:
            target.fill_(-0.0)
        elif factor is None:
            target.copy_(_real_flat(grad, like[i]))
        else:
            torch.mul(_real_flat(grad, like[i]), factor.to(target.dtype), out=target)


def _at_start_of_memory(grad: Tensor | None) -> Tensor | None:
    """The gradient in memory of its own: kernels of norms round by where their input begins."""
    if grad is None or grad.storage_offset() == 0:
        return grad
    return grad.clone()


def _set_views(
    flat: Tensor, indices: Sequence[int], like: Sequence[Tensor], sums: list[Tensor | None]
) -> None:
    """Puts the pieces of `flat` into `sums`, each with the shape of its gradient."""
    sizes = [_real_size(like[i]) for i in indices]
    for i, piece in zip(indices, flat.split(sizes), strict=True):
        if like[i].is_complex():
            piece = torch.view_as_complex(piece.view(-1, 2))
        if _is_dense(like[i]):
            sums[i] = piece.as_strided(like[i].shape, like[i].stride(), piece.storage_offset())
        else:
            sums[i] = piece.view(like[i].shape)


def _real_flat(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements as real numbers in one dimension, in the order of `like` in memory."""
    if _is_dense(like):
        if tensor.stride() != like.stride():
            tensor = torch.empty_strided(
                like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor)
        tensor = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1)


def _real_size(tensor: Tensor) -> int:
    return tensor.numel() * 2 if tensor.is_complex() else tensor.numel()


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in whatever order: channels-last, for one."""
    return torch.ops.aten.is_non_overlapping_and_dense(tensor)  # type: ignore[no-any-return]
