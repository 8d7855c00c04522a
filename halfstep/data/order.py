"""The order of samples as a function of (seed, epoch, position).

There is no table, so seeking costs nothing and neither does memory. The numbers 0..n−1 are written
row by row into a table of about √n rows, the last of which may be short. Each row is rotated by its
own hash, then each column by its own: a Feistel network on a ragged table, so a permutation for
every n, in a fixed number of rounds. Integers only: host and device agree bit for bit.
"""

import math
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from halfstep.data import hashing
from halfstep.utils.checks import whole_number

# A round rotates all rows, then all columns. Pairs of positions pass a chi-square test from 3
# rounds at 100 samples, and from 4 at 16.
_ROUNDS = 4

# All permutations of 5 to 8 samples come out equally often only from 12 rounds.
_ROUNDS_SMALL = 16
_SMALL_SIZE = 256  # samples; below, the larger number of rounds

# Positions computed at a time on a CPU. 256 KiB a tensor: the dozen that are alive at once stay in
# a core's cache.
_CHUNK = 1 << 15

# Odd multipliers of the hash that rotates a row or a column.
_LINE_MULTIPLIER = 0x9E3779B97F4A7C15
_MIX_MULTIPLIER = 0xD6E8FEB86659FD93
_EPOCH_MULTIPLIER = 0xBF58476D1CE4E5B9


@dataclass(frozen=True)
class Order:
    """A permutation of 0..size−1 for every epoch.

    Positions and epochs are int64 tensors, on any device.
    """

    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not hasattr(self.size, "__index__") or not 1 <= self.size < 1 << 62:
            raise ValueError(
                f"expected a size of 1 to 2^62 samples, got {self.size!r}. "
                "Name the data set's length."
            )
        seed = whole_number("Order: seed", self.seed, type_error=TypeError)
        # As Python's integers: numpy's would wrap at 64 bits.
        object.__setattr__(self, "size", index(self.size))
        object.__setattr__(self, "seed", seed)

    def indices(
        self, epoch: int, start: int, count: int, device: torch.device | str = "cpu"
    ) -> Tensor:
        """The sample numbers at positions start..start+count−1 of one epoch."""
        if not 0 <= start <= start + count <= self.size:
            raise IndexError(
                f"expected positions within 0..{self.size}, got {start}..{start + count}"
            )
        return self.at(epoch, torch.arange(start, start + count, device=device))

    def at(self, epochs: int | Tensor, positions: Tensor) -> Tensor:
        """The sample at each position; a position outside 0..size−1 has no meaning."""
        return self._permute_in_chunks(epochs, positions, forward=True)

    def position_of(self, epochs: int | Tensor, samples: Tensor) -> Tensor:
        """The inverse of `at`: the position of each sample in its epoch."""
        return self._permute_in_chunks(epochs, samples, forward=False)

    def _permute_in_chunks(self, epochs: int | Tensor, numbers: Tensor, *, forward: bool) -> Tensor:
        """`_permute`, on a CPU in pieces that fit its cache."""
        if numbers.device.type != "cpu" or numbers.numel() <= _CHUNK:
            return self._permute(epochs, numbers, forward=forward)

        chunks = numbers.reshape(-1).split(_CHUNK)
        epochs_of_chunks: tuple[int | Tensor, ...]
        if isinstance(epochs, Tensor):
            epochs_of_chunks = epochs.expand_as(numbers).reshape(-1).split(_CHUNK)
        else:
            epochs_of_chunks = (epochs,) * len(chunks)

        permuted = [
            self._permute(chunk_epochs, chunk, forward=forward)
            for chunk_epochs, chunk in zip(epochs_of_chunks, chunks, strict=True)
        ]
        return torch.cat(permuted).reshape(numbers.shape)

    def _permute(self, epochs: int | Tensor, numbers: Tensor, *, forward: bool) -> Tensor:
        if self.size == 1:
            return torch.zeros_like(numbers)

        # The table. Its width is even: rotations of odd lengths alone would only ever give even
        # permutations.
        width_bits = max(1, round(math.log2(self.size) / 2))
        width = 1 << width_bits
        rows = -(-self.size // width)
        last_row_length = self.size - (rows - 1) * width

        # Half rounds: even ones rotate rows, odd ones columns. The inverse runs them backwards.
        rounds = _ROUNDS_SMALL if self.size < _SMALL_SIZE else _ROUNDS
        half_rounds = range(2 * rounds)
        if not forward:
            half_rounds = half_rounds[::-1]

        row = numbers >> width_bits
        column = numbers & (width - 1)
        for half_round in half_rounds:
            key = self._round_key(epochs, half_round)
            if half_round % 2 == 0:
                row_length = torch.where(row == rows - 1, last_row_length, width)
                column = _rotate(column, row_length, row, key, forward)
            else:
                column_length = torch.where(column < last_row_length, rows, rows - 1)
                row = _rotate(row, column_length, column, key, forward)
        return (row << width_bits) | column

    def _round_key(self, epochs: int | Tensor, half_round: int) -> int | Tensor:
        base = hashing.signed(hashing.key(self.seed, half_round))
        if isinstance(epochs, int):
            return hashing.signed(base + epochs * _EPOCH_MULTIPLIER)
        return base + epochs * hashing.signed(_EPOCH_MULTIPLIER)


def _rotate(
    positions: Tensor, lengths: Tensor, lines: Tensor, key: int | Tensor, forward: bool
) -> Tensor:
    """Positions in their lines (rows or columns), rotated by a hash of the line's number.

    Each line has its own length. Backward undoes forward.
    """
    hashes = lines * hashing.signed(_LINE_MULTIPLIER) + key
    hashes = (hashes ^ ((hashes >> 32) & hashing.WORD_MASK)) * hashing.signed(_MIX_MULTIPLIER)
    shift = hashing.below((hashes >> 32) & hashing.WORD_MASK, lengths)
    if forward:
        rotated = positions + shift
        return torch.where(rotated >= lengths, rotated - lengths, rotated)
    rotated = positions - shift
    return torch.where(rotated < 0, rotated + lengths, rotated)
