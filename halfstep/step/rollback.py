"""Roll-back: copies of tensors taken before an update, and their return if it is skipped."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.utils.device_values import is_capturing

TensorPair = tuple[Tensor, Tensor]


class Snapshot(NamedTuple):
    """Copies of tensors, to be written back by a device flag.

    On a GPU the tensors of one dtype share one flat copy: hundreds of tensors cost a few kernels.
    On a CPU each has its own, which a compiled step need not even make.
    """

    groups: list[list[Tensor]]
    flat_copies: list[Tensor]  # one for each group

    @classmethod
    def of(cls, tensors: Sequence[Tensor], copies: Sequence[Tensor] | None = None) -> "Snapshot":
        """Of the tensors as they are now, or as `copies` of them say."""
        sources = tensors if copies is None else copies
        pairs = list(zip(tensors, sources, strict=True))
        if pairs and pairs[0][0].device.type == "cpu":
            grouped_pairs = [[pair] for pair in pairs]
        else:
            grouped_pairs = group_by_dtype(pairs)
        groups = [[tensor for tensor, _ in group] for group in grouped_pairs]
        flat_copies = [_flatten([source for _, source in group]) for group in grouped_pairs]
        return cls(groups, flat_copies)

    def restore_if(self, flag: Tensor) -> None:
        """Writes the copies back, bit for bit, if the flag is set. Does not read it on the host."""
        for tensors, flat_copy in zip(self.groups, self.flat_copies, strict=True):
            chosen = torch.where(flag, flat_copy, _flatten(tensors))
            pieces = chosen.split([t.numel() for t in tensors])
            shaped = [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]
            torch._foreach_copy_(tensors, shaped)


def group_by_dtype(pairs: Iterable[TensorPair]) -> list[list[TensorPair]]:
    """Pairs in groups of equal dtypes: a foreach kernel falls back to a loop for mixed ones."""
    groups: dict[tuple[torch.dtype, torch.dtype], list[TensorPair]] = {}
    for a, b in pairs:
        groups.setdefault((a.dtype, b.dtype), []).append((a, b))
    return list(groups.values())


def foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target, in one kernel per dtype."""
    for group in group_by_dtype(zip(targets, sources, strict=True)):
        torch._foreach_copy_([target for target, _ in group], [source for _, source in group])


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def _buffer_slots(roots: Sequence[Any]) -> list[tuple[Any, str]]:
    """Where each buffer stands: a module's dictionary of buffers, and a name in it.

    A TorchScript module has something like a dictionary, which has no `get` and cannot be iterated.
    """
    modules = [m for root in roots if isinstance(root, nn.Module) for m in root.modules()]
    return [(m._buffers, name) for m in modules for name, _ in m._buffers.items()]


def _buffer_at(owner: Any, name: str) -> Tensor | None:
    try:
        buffer: Tensor | None = owner[name]
    except KeyError:
        return None
    return buffer


class Buffers:
    """The buffers of a network and its loss: copied when a cycle begins, restored on a skip.

    A forward pass may write into a buffer, or put another tensor in its place; both are undone.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._slots = _buffer_slots(roots)
        self._are_outdated = False
        self._tensors_at_copy: list[Tensor | None] = []  # what stood in each slot

    def collect_again(self) -> None:
        """Looks for buffers anew when the next cycle begins; the open one has its copies."""
        self._are_outdated = True

    def __bool__(self) -> bool:
        return bool(self._slots) or self._are_outdated

    def tensors(self) -> list[Tensor]:
        """The buffers, a shared one once."""
        buffers = [_buffer_at(owner, name) for owner, name in self._slots]
        unique = {id(buffer): buffer for buffer in buffers if buffer is not None}
        return list(unique.values())

    def copy(self, storage: list[Tensor]) -> list[Tensor]:
        """Copies of the buffers, in `storage` if it fits, else in new memory."""
        if self._are_outdated:
            self._slots = _buffer_slots(self._roots)
            self._are_outdated = False
        buffers = self.tensors()
        self._tensors_at_copy = [_buffer_at(owner, name) for owner, name in self._slots]
        shapes = [(b.shape, b.dtype) for b in buffers]
        if [(s.shape, s.dtype) for s in storage] != shapes:
            return [b.detach().clone() for b in buffers]
        foreach_copy(storage, buffers)
        return storage

    def restore(self, copies: Sequence[Tensor], only_if: Tensor | None = None) -> None:
        """Makes the buffers what they were: always, or if the device flag `only_if` is set."""
        if self._were_replaced():
            # Which tensor stands in a slot is up to Python, so the host has to read the flag. In a
            # capture it cannot.
            if only_if is not None and (is_capturing() or not bool(only_if)):
                return
            for (owner, name), buffer in zip(self._slots, self._tensors_at_copy, strict=True):
                owner[name] = buffer
            only_if = None

        if not copies:
            return
        if only_if is None:
            foreach_copy(self.tensors(), copies)
        else:
            Snapshot.of(self.tensors(), copies).restore_if(only_if)

    def _were_replaced(self) -> bool:
        """Whether a slot holds another tensor now than when it was copied."""
        pairs = zip(self._slots, self._tensors_at_copy, strict=False)  # none before the first copy
        return any(_buffer_at(owner, name) is not tensor for (owner, name), tensor in pairs)
