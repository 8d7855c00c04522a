"""16-bit weights: low copies of fp32 masters, and low parameters that are updated in fp32.

O2 and O3 compute with low copies of float32 parameters. fp16 and bf16 store the parameters
themselves low; there an update is often smaller than half a unit of the low dtype and would be
lost. float32 arithmetic with stochastic rounding, or with a Kahan residue, keeps it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from halfstep.precision.policy import BF16, F16
from halfstep.utils.tensor_pieces import split_alike

_version_of = attrgetter("_version")


class LowCopies:
    """Storage for the low copies of `masters`."""

    def __init__(self, masters: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
        self.masters = list(masters)
        self.storage = [
            torch.empty_like(master, dtype=dtype, requires_grad=False)
            for master, dtype in zip(masters, dtypes, strict=True)
        ]

        # What shows that a copy was written into. Tensors made in inference mode count no versions.
        self._addresses = [low.data_ptr() for low in self.storage]
        self._have_versions = not any(low.is_inference() for low in self.storage)
        self._versions: list[int] = []

    def cast_masters(self) -> tuple[Tensor, ...]:
        """Low copies of the masters as they are now, connected to them by autograd."""
        if not self.masters:
            return ()
        copies: tuple[Tensor, ...]
        copies = _CastMasters.apply(self.storage, *self.masters)  # type: ignore[no-untyped-call]
        if self._have_versions:
            self._versions = list(map(_version_of, copies))
        return copies

    def written_numbers(self, copies: Sequence[Tensor]) -> set[int]:
        """The numbers of those `copies` that were written into since they were cast.

        A version counter shows an operation in place, an address an assignment to `.data`. An
        operation in place on `.data` shows in neither: `changed_numbers` finds it.
        """
        # A recorder of whole steps refuses to look at addresses, by a mode of torch functions.
        with torch._C.DisableTorchFunction():
            addresses = list(map(Tensor.data_ptr, copies))
            versions = list(map(_version_of, copies)) if self._have_versions else []
        if addresses == self._addresses and versions == self._versions:
            return set()
        moved = _differing_positions(addresses, self._addresses)
        return moved | _differing_positions(versions, self._versions)

    @torch.no_grad()
    def changed_numbers(self) -> set[int]:
        """The numbers of the parameters whose copies hold other values than their masters cast.

        It waits for the device, once.
        """
        if not self.masters:
            return set()
        flags = []
        for low, master in zip(self.storage, self.masters, strict=True):
            expected = master.to(low.dtype)
            both_nan = low.isnan() & expected.isnan()
            flags.append(((low != expected) & ~both_nan).any())
        is_changed = torch.stack(flags).tolist()
        return {number for number, changed in enumerate(is_changed) if changed}


def _differing_positions(values: Sequence[int], expected: Sequence[int]) -> set[int]:
    pairs = zip(values, expected, strict=True)
    return {position for position, (value, other) in enumerate(pairs) if value != other}


class _CastMasters(torch.autograd.Function):
    """Masters → low copies as one node of the graph; gradients come back in the masters' dtypes.

    One foreach cast in each direction: 161 parameters cost a few kernels instead of 322.
    """

    @staticmethod
    def forward(ctx: Any, storage: list[Tensor], *masters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an unused parameter keeps grad None
        ctx.dtypes = [master.dtype for master in masters]
        foreach_cast_(storage, list(masters))
        copies = tuple(low.detach() for low in storage)

        pairs = zip(copies, masters, strict=True)
        frozen = [copy for copy, master in pairs if not master.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # Modes of torch functions are on in backward, for forwards that are repeated there. Here
        # they have nothing to see, and would cost 2 µs for each look at a gradient.
        with torch._C.DisableTorchFunction():
            return (None, *widen(grads, ctx.dtypes))


def widen(grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> list[Tensor | None]:
    """Each gradient in its dtype: itself if it is already, None if it is None.

    All dense gradients are cast by one foreach call, sparse ones one by one.
    """
    results: list[Tensor | None] = []
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for grad, dtype in zip(grads, dtypes, strict=True):
        if grad is None or grad.dtype == dtype or grad.is_sparse:
            results.append(grad)
        else:
            target = torch.empty_like(grad, dtype=dtype)
            results.append(target)
            targets.append(target)
            sources.append(grad)
    if targets:
        foreach_cast_(targets, sources)

    for i, (result, dtype) in enumerate(zip(results, dtypes, strict=True)):
        if result is not None and result.is_sparse:
            results[i] = result.to(dtype)
    return results


def foreach_cast_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source into its target, in the target's dtype, by one foreach call."""
    # Pieces use more of the GPU, but making them takes the host longer than they save on the
    # device. In a capture the host's time does not count.
    if targets[0].is_cuda and torch.cuda.is_current_stream_capturing():
        targets, sources = split_alike(targets, sources)
    torch._foreach_copy_(targets, sources)


class Fp32Update:
    """Low parameters as float32 while the optimizer steps: its arithmetic and state are float32.

    With rounding "kahan" what rounding cuts off (the residue, in the low dtype) is stored beside
    each parameter and added back at the next update. With "stochastic" nothing is stored.
    """

    def __init__(self, params: Sequence[Tensor], rounding: str) -> None:
        self.params = [p for p in params if p.dtype in (F16, BF16)]
        self.uses_kahan = rounding == "kahan"

    def new_residues(self) -> list[Tensor]:
        """A residue of zeros for each low parameter; none unless the rounding is "kahan"."""
        if not self.uses_kahan:
            return []
        return [torch.zeros_like(p, requires_grad=False) for p in self.params]

    @contextmanager
    def fp32_params(self, residue: list[Tensor], update: Tensor) -> Iterator[None]:
        """Inside, the parameters are float32; on leaving they are rounded into their low storage.

        `update` is the number of the update: stochastic rounding draws by it.
        """
        low_data = [p.data for p in self.params]
        for i, p in enumerate(self.params):
            fp32_data = p.data.float()
            if self.uses_kahan:
                fp32_data.add_(residue[i])
            p.data = fp32_data
        try:
            yield
            for i, (p, low) in enumerate(zip(self.params, low_data, strict=True)):
                if self.uses_kahan:
                    low.copy_(p.data)
                    residue[i].copy_(p.data.sub_(low))
                else:
                    key = rounding_key(update, i)
                    low.copy_(round_stochastically(p.data, low.dtype, key))
        finally:
            for p, low in zip(self.params, low_data, strict=True):
                p.data = low
                p.grad = None

    @contextmanager
    def fp32_params_for_loading(self) -> Iterator[None]:
        """Inside, the parameters are float32 copies, which are dropped on leaving.

        Optimizer state that is loaded inside keeps its float32 values.
        """
        low_data = [p.data for p in self.params]
        for p in self.params:
            p.data = p.data.float()
        try:
            yield
        finally:
            for p, low in zip(self.params, low_data, strict=True):
                p.data = low


def round_stochastically(x: Tensor, dtype: torch.dtype, key: Tensor) -> Tensor:
    """float32 → fp16/bf16, up or down with probabilities that make the mean exact.

    A value that the low dtype holds never moves. The draws are an integer hash of (key, element):
    they repeat on any device, and torch's random generators are not used.
    """
    # Noise below the last kept bit of the mantissa, then truncation: a value is rounded up as often
    # as its position between its two low neighbours says.
    dropped_bits = 13 if dtype == F16 else 16  # of the mantissa, that the low dtype does not have
    noise = _hash32(x.numel(), key).view(x.shape) & ((1 << dropped_bits) - 1)
    noisy_bits = x.contiguous().view(torch.int32) + noise
    rounded = (noisy_bits >> dropped_bits << dropped_bits).view(torch.float32)

    # Below 2**-14 float16 has steps of 2**-24 whatever the exponent.
    if dtype == F16:
        steps = (x.abs() * 2.0**24 + noise * 2.0**-dropped_bits).floor()
        subnormal = torch.copysign(steps * 2.0**-24, x)
        rounded = torch.where(x.abs() < 2.0**-14, subnormal, rounded)

    # At the top of the range, what rounding to nearest keeps finite stays finite.
    low = torch.where(x.isfinite(), rounded, x).to(dtype)
    return torch.where(low.isinf(), x.to(dtype), low)


def rounding_key(update: Tensor, param_index: int) -> Tensor:
    """One int32 key for each (update, parameter)."""
    return ((update * 0x9E3779B1 + param_index * 0x85EBCA77) & 0x7FFFFFFF).to(torch.int32)


def _hash32(count: int, key: Tensor) -> Tensor:
    """That many well-mixed 32-bit integers: the hash "lowbias32" of a counter.

    int32 arithmetic wraps around, in the same way on host and device.
    """
    h = torch.arange(count, dtype=torch.int32, device=key.device) * -1640531527 + key
    for shift, factor in ((16, 0x7FEB352D), (15, -2073254261)):  # 0x846CA68B as int32
        h = (h ^ (h >> shift & (1 << (32 - shift)) - 1)) * factor
    return h ^ (h >> 16 & 0xFFFF)
