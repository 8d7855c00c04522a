"""A 64-bit fingerprint of tensors, computed where they live: equal bits, equal number; one flipped bit, another."""

from collections.abc import Iterable

import torch
from torch import Tensor

_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_CHUNK = (
    1 << 20
)  # elements hashed at a time: bounds the int64 working memory to 8 MiB per temporary


def fingerprint(tensor: Tensor) -> Tensor:
    """An int64 that depends on every bit and its position (splitmix64 of bits xor counter, summed mod 2**64)."""
    if tensor.is_sparse:
        t = tensor.coalesce()
        return combine([fingerprint(t.indices()), fingerprint(t.values())])
    tensor = tensor.detach().resolve_conj().resolve_neg()
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = flat.detach().contiguous().reshape(-1).view(_INT[flat.element_size()])
    total = torch.full((), bits.numel(), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device) * _GOLDEN
        total = total + mix_bits(part ^ place).sum()
    return mix_bits(total)


def combine(prints: Iterable[Tensor]) -> Tensor:
    """One fingerprint of several, order included."""
    return fingerprint(torch.stack(list(prints)))


def mix_bits(h: Tensor) -> Tensor:
    """splitmix64's finaliser; int64 multiplication wraps. Right shifts are made logical by masks."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        h = (h ^ (h >> shift & (1 << (64 - shift)) - 1)) * factor
    return h ^ (h >> 31 & (1 << 33) - 1)
