"""Random numbers without a generator: an integer hash of what the number is for.

The same bits come out on every device: all arithmetic is on int64 tensors, whose products wrap
alike on host and device. A word is an int64 in 0..2^32−1.
"""

import torch
from torch import Tensor

WORD_MASK = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF

# The two multipliers of SplitMix64's finaliser.
FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
SECOND_MULTIPLIER = 0x94D049BB133111EB

# One odd constant for each thing that is counted, so that their multiples do not meet.
SAMPLE_INCREMENT = 0x9E3779B97F4A7C15
EPOCH_INCREMENT = 0xD1342543DE82EF95
_DRAW = 0xDA942042E4DD58B5


def signed(value: int) -> int:
    """The low 64 bits as the int64 that torch takes for a scalar."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64 bits, unsigned.

    Every bit of the input flips about half of the output bits.
    """
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * FIRST_MULTIPLIER) & _MASK_64
    value = ((value ^ (value >> 27)) * SECOND_MULTIPLIER) & _MASK_64
    return value ^ (value >> 31)


def mix_tensor(values: Tensor) -> Tensor:
    """`mix` of each int64, read as unsigned."""
    values = (values ^ _shift_right(values, 30)) * signed(FIRST_MULTIPLIER)
    values = (values ^ _shift_right(values, 27)) * signed(SECOND_MULTIPLIER)
    return values ^ _shift_right(values, 31)


def key(*parts: int) -> int:
    """One 64-bit key of several integers, in order."""
    value = 0
    for part in parts:
        value = mix(value + SAMPLE_INCREMENT + mix(part))
    return value


def words(seed: int, epochs: Tensor, samples: Tensor, draws: Tensor) -> Tensor:
    """Uniform words [len(draws), B] for B pairs of epoch and sample.

    Each is a function of its own (seed, epoch, sample, draw) and of nothing else in the batch.
    `draws` holds the `draw_key` of each draw, int64, on the same device.
    """
    pairs = (
        epochs * signed(EPOCH_INCREMENT) + samples * signed(SAMPLE_INCREMENT) + signed(key(seed))
    )
    return _shift_right(mix_tensor(draws.unsqueeze(1) + pairs), 32)


def draw_key(number: int) -> int:
    """The int64 for draw `number` in `words`, far from that of any other draw, sample or epoch."""
    return signed(mix(number * _DRAW))


def below(words: Tensor, n: int | Tensor) -> Tensor:
    """Uniform integers in 0..n−1; off from uniform by less than n / 2^32."""
    return (words * n) >> 32


def unit(words: Tensor) -> Tensor:
    """Uniform float32 in [0, 1): multiples of 2^-24, all of them exact."""
    return (words >> 8).to(torch.float32) * 2**-24


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """An unsigned shift. torch's is signed and copies the sign bit in, so it is masked off."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
