"""How the ranks of a command agree before they train: what rank 0 decides, and refusals.

Rank 0 alone reads and writes the output folder. What it finds there, the others are told.

torch is imported inside functions only: the command line imports this module for its help.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from halfstep.distributed import Ranks


class AgreedRefusal(Exception):
    """An error on one rank that all ranks know of: all of them end, and this rank shows it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


EXIT_REFUSED = 2  # of the ranks that have nothing to show


def join_ranks(device: "torch.device") -> "Ranks":
    """The ranks that this process is one of; in a process started alone, itself."""
    from halfstep.distributed import Ranks, find_ranks

    return find_ranks(device) or Ranks()


@contextmanager
def refused_together(ranks: "Ranks", what: str) -> Iterator[None]:
    """Inside, nothing is exchanged. If any rank raises an error, all ranks end after the block.

    The first one that has an error raises it, the others leave silently. `what` names the block.
    """
    if ranks.count == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    has_error = ranks.gather_objects(error is not None, what)
    if not any(has_error):
        return
    if error is not None and has_error.index(True) == ranks.index:
        raise AgreedRefusal(error) from error
    raise SystemExit(EXIT_REFUSED)
