"""Data sets: readers and the sample that ships with the package."""

from pathlib import Path

from torch import Tensor

from halfstep.data.idx import read_idx, read_split

__all__ = ["read_idx", "read_split", "sample"]


def sample(train: bool = True) -> tuple[Tensor, Tensor]:
    """The shipped part of Fashion-MNIST, classes in equal numbers: uint8 images [N, 28, 28], int64 labels [N]."""
    return read_split(Path(__file__).with_name("sample"), train=train)
