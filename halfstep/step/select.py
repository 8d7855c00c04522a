"""Taking things back without asking the host: snapshot, go on, then keep the new or the old by a device flag."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.launching import is_capturing


class Snapshot(NamedTuple):
    """Copies of tensors, flattened into one tensor per dtype so that hundreds cost a few kernels; one by one on a CPU,
    where a compiled step has no need to make them."""

    live: list[list[Tensor]]
    old: list[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], old: Sequence[Tensor] | None = None) -> "Snapshot":
        """Of the tensors as they are, or of those in `old` for each."""
        pairs = list(zip(tensors, tensors if old is None else old, strict=True))
        groups = [[pair] for pair in pairs] if pairs and pairs[0][0].device.type == "cpu" else alike(pairs)
        return cls([[t for t, _ in group] for group in groups], [_flat([t for _, t in group]) for group in groups])

    def keep_old_where(self, flag: Tensor) -> None:
        """Every tensor becomes bit for bit what it was when `flag` is set, and stays as it is otherwise."""
        for tensors, old in zip(self.live, self.old, strict=True):
            chosen = torch.where(flag, old, _flat(tensors))
            parts = chosen.split([t.numel() for t in tensors])
            torch._foreach_copy_(tensors, [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])


def alike(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """In groups of the same dtypes: a foreach kernel takes those, and copies mixed ones one by one."""
    groups: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for a, b in pairs:
        groups.setdefault((a.dtype, b.dtype), []).append((a, b))
    return list(groups.values())


def copy_alike(to: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """In one kernel per dtype."""
    for group in alike(zip(to, given, strict=True)):
        torch._foreach_copy_([mine for mine, _ in group], [theirs for _, theirs in group])


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


class Buffers:
    """A network's buffers at the start of a cycle, and their return when its update is skipped."""

    def __init__(self, *roots: Any) -> None:
        modules = [m for root in roots if isinstance(root, nn.Module) for m in root.modules()]
        self._slots = [(m._buffers, k) for m in modules for k in m._buffers]
        self._held: list[Tensor | None] = []  # what was in the slots when they were copied

    def __bool__(self) -> bool:
        return bool(self._slots)

    def tensors(self) -> list[Tensor]:
        seen = {id(b): b for owner, key in self._slots if (b := owner.get(key)) is not None}
        return list(seen.values())

    def copy(self, into: list[Tensor]) -> list[Tensor]:
        """Copies of the buffers, in `into` when it fits."""
        now, self._held = self.tensors(), [owner.get(key) for owner, key in self._slots]
        if len(into) != len(now) or any(
            a.shape != b.shape or a.dtype != b.dtype for a, b in zip(into, now, strict=True)
        ):
            return [b.detach().clone() for b in now]
        copy_alike(into, now)
        return into

    def restore(self, old: Sequence[Tensor], where: Tensor | None = None) -> None:
        """The buffers as copied: always, or where the device flag is set."""
        if self._replaced():
            if where is not None and (is_capturing() or not bool(where)):  # which object is there: the host decides
                return
            for (owner, key), buffer in zip(self._slots, self._held, strict=True):
                owner[key] = buffer
            where = None
        if old and where is None:
            copy_alike(self.tensors(), old)
        elif old and where is not None:
            Snapshot.of(self.tensors(), old).keep_old_where(where)

    def _replaced(self) -> bool:
        """Whether forward has put other tensors there, perhaps the user's own, instead of writing into these."""
        return any(owner.get(key) is not b for (owner, key), b in zip(self._slots, self._held, strict=False))
