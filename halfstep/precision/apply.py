"""A network under a precision: while active, its modules see low weights and low inputs; outside, nothing changed."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from halfstep.precision.apply__slots import Slot, Swap
from halfstep.precision.backend_flags import refuse
from halfstep.precision.casting import (
    Exact,
    Forward,
    cast_both,
    cast_inputs,
    native_mixed,
    outside_autocast,
)
from halfstep.precision.casting__observe import Observed, observe
from halfstep.precision.casting__plan import Place, plan
from halfstep.precision.cpu_half import FastHalf, has_native
from halfstep.precision.low_params import LowCopies
from halfstep.precision.policy import BF16, F16, Precision


class Applied:
    """`with applied:` swaps a precision into the network's slots; afterwards every slot holds what it held before.

    fp64, fp16 and bf16 store the parameters themselves in that dtype; with `convert=False` they work on copies instead.
    """

    def __init__(
        self, net: nn.Module, precision: Precision, device: torch.device, *, convert: bool = True
    ) -> None:
        refuse(precision, device)
        self.net, self.precision, self.device = net, precision, device
        self.cast = "copies" if precision.cast == "whole" and not convert else precision.cast
        self.places = plan(net, precision)
        _check_parameters(net, precision, any_dtype=precision.cast == "whole")
        self.converted = _convert(net, self.places) if self.cast == "whole" else []
        self.observed: dict[
            str, Observed
        ] = {}  # dtypes of the first forward, leaf module by leaf module
        self._exact, self._swap = Exact(), Swap()
        self._forwards = self._wrap(observing=True)
        self._weights, self._copies = self._low_weights()
        self._buffers = self._low_buffers()
        self._contexts = self._make_contexts()
        self._observing = True
        self._last: tuple[
            Tensor, ...
        ] = ()  # the copies of the last forward, until its backward pass is over
        self._moved: list[tuple[Slot, Tensor]] = []

    @property
    def fast(self) -> bool:
        """Whether products run as round(fp32 product) on this CPU."""
        low = self.precision.compute
        wanted = (
            self.device.type == "cpu" and self.precision.kernels == "auto" and low in (F16, BF16)
        )
        return wanted and not has_native(low)

    def __enter__(self) -> "Applied":
        assert not self._swap, "a precision is not re-entrant on one network"
        try:
            self._put()
        except BaseException:
            self._swap.undo()
            raise
        for context in self._contexts:
            context.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exc)
        low = self._moved = [(slot, slot.get()) for slot, _ in self._buffers]
        self._swap.undo()
        self._exact.clear()
        if exc[0] is not None:
            self._last = ()
        for slot, now in low:  # statistics that a low norm moved
            _write_back(slot, now)
        if self._observing and self.observed:
            self._observing, self._forwards = False, self._wrap(observing=False)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the backward pass of the last forward: what computes parts of it anew (activation checkpointing) finds
        the same copies, casts and kernels. Autocast it brings along itself."""
        contexts = [c for c in self._contexts if isinstance(c, FastHalf)]
        try:
            self._put_again()
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                yield
        finally:
            self._swap.undo()
            self._last = ()

    def _put_again(self) -> None:
        for slot, forward in self._forwards:
            self._swap.put(slot, forward)
        for slot, index in self._weights if self._last else ():
            self._swap.put(slot, self._last[index])
        for slot, low in self._moved:
            self._swap.put(slot, low)

    def unrounded(self, out: Any) -> Any:
        """Outputs of kept modules as they were before rounding, where `out` holds them as they came."""
        return self._exact.restore(out) if self.precision.keep else out

    def _put(self) -> None:
        for slot, forward in self._forwards:
            self._swap.put(slot, forward)
        self._last = ()
        fresh = self._last = self._copies.fresh()
        for slot, index in self._weights:
            self._swap.put(slot, fresh[index])
        for slot, dtype in self._buffers:
            self._swap.put(slot, slot.get().detach().to(dtype))

    def _make_contexts(self) -> list[Any]:
        autocast, low = self.cast == "autocast", self.precision.compute
        contexts: list[Any] = [_OwnLayers()] if self.cast in ("copies", "whole") else []
        if autocast:  # cache off: an update or a no-grad forward inside one context must not serve stale casts
            contexts.append(torch.autocast(self.device.type, dtype=low, cache_enabled=False))
        if self.fast:
            contexts.append(FastHalf(low, cast=autocast))
        return contexts

    def _wrap(self, *, observing: bool) -> list[tuple[Slot, Forward]]:
        wrapped = []
        for name, module in self.net.named_modules():
            plain = forward = module.forward
            if observing and name and _reported(module):
                forward = observe(forward, module, name, self.observed)
            forward = self._cast(self.places[name], module, forward)
            if not name and self.cast != "none":
                forward = self._exact.leave(forward, self.precision.output)
            if observing and not name:
                forward = observe(forward, module, name, self.observed)
            if forward is not plain:
                wrapped.append((Slot(module.__dict__, "forward"), forward))
        return wrapped

    def _cast(self, place: Place, module: nn.Module, forward: Forward) -> Forward:
        if self.cast == "none":
            return forward
        if self.cast == "autocast":
            return outside_autocast(forward, self.device.type) if place.kept else forward
        if place.inside != place.around:
            if native_mixed(module) and not place.kept:
                return forward
            return cast_both(
                forward, place.inside, place.around, self._exact if place.kept else None
            )
        if module is self.net or any(True for _ in module.parameters(recurse=False)):
            return cast_inputs(forward, place.inside)
        return forward

    def _low_weights(self) -> tuple[list[tuple[Slot, int]], LowCopies]:
        """Slots that take a low copy, and the copies: one per (parameter, dtype), so tied weights stay tied."""
        index: dict[tuple[Tensor, torch.dtype], int] = {}
        slots: list[tuple[Slot, int]] = []
        for slot, dtype in self._floating("_parameters"):
            slots.append((slot, index.setdefault((slot.get(), dtype), len(index))))
        return slots, LowCopies([p for p, _ in index], [d for _, d in index])

    def _low_buffers(self) -> list[tuple[Slot, torch.dtype]]:
        return self._floating("_buffers")

    def _floating(self, kind: str) -> list[tuple[Slot, torch.dtype]]:
        """Slots of floating tensors whose module runs in another dtype than they are stored in (O2, O3)."""
        if self.cast != "copies":
            return []
        found = []
        for name, module in self.net.named_modules():
            owner = getattr(module, kind)
            for key, tensor in owner.items():
                if (
                    tensor is not None
                    and tensor.is_floating_point()
                    and tensor.dtype != self.places[name].inside
                ):
                    found.append((Slot(owner, key), self.places[name].inside))
        return found


class _OwnLayers:
    """torch's fused transformer layer reads its children's weights as if they had one dtype: off while active."""

    def __enter__(self) -> None:
        self._before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *exc: object) -> None:
        torch.backends.mha.set_fastpath_enabled(self._before)


def _reported(module: nn.Module) -> bool:
    """Modules whose dtypes are listed: leaves, and those that own weights beside their children."""
    own = any(True for _ in module.parameters(recurse=False)) or parametrize.is_parametrized(module)
    return own or not any(True for _ in module.children())


def _write_back(slot: Slot, now: Tensor | None) -> None:
    """What forward wrote into a low buffer, into the stored one, element by element: what it did not write stays exact.

    (Versions would not tell: batch norm's kernels move the statistics without counting.)
    """
    stored = slot.get()
    if now is not None and now.shape == stored.shape:
        with torch.no_grad():
            stored.copy_(torch.where(now == stored.to(now.dtype), stored, now.to(stored.dtype)))
    else:
        slot.owner[slot.key] = None if now is None else now.detach().to(stored.dtype)


def _check_parameters(net: nn.Module, precision: Precision, *, any_dtype: bool) -> None:
    for name, p in net.named_parameters():
        if is_lazy(p):
            raise ValueError(
                f"parameter {name!r} has no shape yet: run one forward of the network before building the step"
            )
        if not any_dtype and p.is_floating_point() and p.dtype != precision.params:
            raise ValueError(
                f"precision {precision.name!r} keeps parameters in {precision.params}, but {name!r} is {p.dtype}; "
                "call net.float() before building the optimizer, or choose 'fp16' or 'bf16' to train low parameters, "
                "'fp64' for float64 ones"
            )


def _convert(net: nn.Module, places: dict[str, Place]) -> list[str]:
    """Stores parameters and floating buffers in the precision's dtype, in place: the optimizer keeps its references."""
    converted = []
    for name, module in net.named_modules():
        for key, p in module.named_parameters(prefix=name, recurse=False):
            if p.is_floating_point() and p.dtype != places[name].inside:
                p.data, p.grad = p.data.to(places[name].inside), None
                converted.append(key)
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module._buffers[key] = buffer.to(places[name].inside)
    return converted
