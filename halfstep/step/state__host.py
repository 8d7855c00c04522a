"""The one door through which a step reads device values, and its counter."""

from torch import Tensor


class HostReads:
    """Counts the reads of device values: each waits for the device."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self, value: Tensor) -> float:
        """A device value as a number."""
        self.reads += 1
        return value.item()

    def read_all(self, values: Tensor) -> list[float]:
        """A small device vector as numbers: one wait."""
        self.reads += 1
        numbers: list[float] = values.tolist()
        return numbers
