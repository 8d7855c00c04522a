"""Random numbers without a generator: an integer hash of what the number is for, the same bits on every device.

All arithmetic is on int64 tensors, whose products wrap alike on host and device. A word is an int64 in 0..2^32−1.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
_MASK = 0xFFFFFFFFFFFFFFFF
# SplitMix64's finaliser; its increments here are one odd constant per thing that is counted
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SAMPLE, EPOCH, _DRAW = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xDA942042E4DD58B5


def signed(value: int) -> int:
    """The low 64 bits as the int64 that torch takes for a scalar."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def mix(value: int) -> int:
    """A bijection of 64 bits in which every input bit turns about half of the output bits; unsigned."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * FIRST) & _MASK
    value = ((value ^ (value >> 27)) * SECOND) & _MASK
    return value ^ (value >> 31)


def mixed(values: Tensor) -> Tensor:
    """`mix` of each int64, read as unsigned."""
    values = (values ^ _shifted(values, 30)) * signed(FIRST)
    values = (values ^ _shifted(values, 27)) * signed(SECOND)
    return values ^ _shifted(values, 31)


def key(*parts: int) -> int:
    """One 64-bit key of several integers, in order."""
    value = 0
    for part in parts:
        value = mix(value + SAMPLE + mix(part))
    return value


def words(seed: int, epochs: Tensor, samples: Tensor, draws: Tensor) -> Tensor:
    """Uniform words [len(draws), B] for B pairs of epoch and sample, each a function of its own (seed, epoch, sample,
    draw) and of nothing else in the batch. `draws` holds the `draw_key` of each draw, int64, on the same device."""
    each = epochs * signed(EPOCH) + samples * signed(SAMPLE) + signed(key(seed))
    return _shifted(mixed(draws.unsqueeze(1) + each), 32)


def draw_key(number: int) -> int:
    """What stands for draw `number` in `words`: far from that of any other draw, sample or epoch."""
    return signed(mix(number * _DRAW))


def below(words: Tensor, n: int | Tensor) -> Tensor:
    """Uniform integers in 0..n−1; off from uniform by less than n / 2^32."""
    return (words * n) >> 32


def unit(words: Tensor) -> Tensor:
    """Uniform float32 in [0, 1): multiples of 2^-24, all of them exact."""
    return (words >> 8).to(torch.float32) * 2**-24


def _shifted(values: Tensor, bits: int) -> Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts the sign in: mask it off
