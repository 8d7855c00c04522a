"""64-bit fingerprints of tensors, computed where they live.

Equal bits give equal numbers; one flipped bit gives another. `fingerprints` names every tensor that
decides the next step, so that two runs can be compared and the first difference found.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.step.state import state_to_dict

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

INT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
GOLDEN_RATIO = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
CHUNK_ELEMENTS = 1 << 20  # hashed at a time: bounds the int64 working memory to 8 MiB a temporary

# splitmix64's finaliser: (shift, factor) of its two rounds, then a last shift.
MIX_ROUNDS = ((30, -4658895280553007687), (27, -7723592293110705685))
LAST_SHIFT = 31


def fingerprint(tensor: Tensor) -> Tensor:
    """An int64 that depends on every bit and its position.

    It is splitmix64 of (bits xor counter), summed modulo 2**64.
    """
    if tensor.is_sparse:
        sparse = tensor.coalesce()
        return combine([fingerprint(sparse.indices()), fingerprint(sparse.values())])

    # The bits of every element as an integer.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = real.detach().contiguous().reshape(-1).view(INT_DTYPES[real.element_size()])

    total = torch.full((), bits.numel(), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK_ELEMENTS):
        chunk = bits[start : start + CHUNK_ELEMENTS].to(torch.int64)
        counter = torch.arange(start + 1, start + 1 + chunk.numel(), device=tensor.device)
        total = total + mix_bits(chunk ^ (counter * GOLDEN_RATIO)).sum()
    return mix_bits(total)


def combine(fingerprints: Iterable[Tensor]) -> Tensor:
    """One fingerprint of several; their order counts."""
    return fingerprint(torch.stack(list(fingerprints)))


def mix_bits(h: Tensor) -> Tensor:
    """splitmix64's finaliser. int64 products wrap; masks make right shifts logical."""
    for shift, factor in MIX_ROUNDS:
        h = (h ^ (h >> shift & (1 << (64 - shift)) - 1)) * factor
    return h ^ (h >> LAST_SHIFT & (1 << (64 - LAST_SHIFT)) - 1)


def fingerprints(step: "TrainStep") -> dict[str, Tensor]:
    """A fingerprint of each tensor that decides the next step, all on the step's device."""
    return {name: fingerprint(t).to(step.device) for name, t in named_state(step).items()}


def named_state(step: "TrainStep") -> dict[str, Tensor]:
    """Every tensor that decides the next step, by name.

    The prefixes "net.", "beside.", "optimizer." and "state." are those of saved checkpoints.
    """
    named: dict[str, Tensor] = {}
    for name, value in step.net.state_dict().items():
        if isinstance(value, Tensor):
            named[f"net.{name}"] = value
    for name, value in step.extra_tensors().items():
        named[f"beside.{name}"] = value
    for name, p in zip(step.names, step.params, strict=True):
        for key, value in step.optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                named[f"optimizer.{name}.{key}"] = value
    named.update(_flatten_state("state", state_to_dict(step.state), step.device))
    return named


def _flatten_state(prefix: str, value: Any, device: torch.device) -> dict[str, Tensor]:
    """The tensors and whole numbers in a tree, by dotted names."""
    if isinstance(value, Tensor):
        return {prefix: value}
    if isinstance(value, int):
        return {prefix: torch.full((), value, device=device)}  # a fill, not a copy from the host
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    flat: dict[str, Tensor] = {}
    for key, item in items:
        flat.update(_flatten_state(f"{prefix}.{key}", item, device))
    return flat
