"""Training loops in plain torch, one per way of casting, written out: what a TrainStep must equal bit for bit."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Make = Callable[[list[Tensor]], torch.optim.Optimizer]


class Spec(NamedTuple):
    """A precision spelled out, independently of the table under test."""

    cast: str  # "none", "autocast", "copies" (low copies of fp32 masters) or "whole" (the parameters themselves)
    dtype: torch.dtype
    scaled: bool = False
    low_norms: bool = False
    rounding: str = "nearest"


class Row(NamedTuple):
    """One step of a loop; `norm` is None on steps that end no cycle."""

    loss: Tensor
    cycle_loss: Tensor
    scale: float
    norm: Tensor | None
    updated: bool


class Loop:
    """forward, loss in float32, backward, Σ gradients / N, clip, optimizer.step(); with torch's GradScaler when scaled.

    Backward fills `leaves`; `held` carries their sums in float32 or wider: the parameters themselves, or stand-ins
    when those are half.
    `rates` has one row per parameter group, one column per update.
    """

    def __init__(
        self, net: nn.Module, make: Make, spec: Spec, *, accumulate: int = 1, clip_norm: float | None = None,
        loss: Callable[..., Tensor] = F.cross_entropy, scaler: dict[str, Any] | None = None,
        rates: Sequence[Sequence[float]] | None = None, ema: float | None = None,
    ) -> None:  # fmt: skip
        self.net = net.to(spec.dtype) if spec.cast == "whole" else net
        self.spec, self.accumulate, self.clip_norm, self.loss, self.rates = (
            spec,
            accumulate,
            clip_norm,
            loss,
            rates,
        )
        self.params = self.leaves = list(net.parameters())
        self.device = self.params[0].device.type
        self.low = self.params[0].dtype in (F16, BF16)
        self.held = (
            [nn.Parameter(p.detach().float()) for p in self.params] if self.low else self.params
        )
        self.rounded = self.low and spec.rounding != "nearest"
        self.residue = [torch.zeros_like(p) for p in self.params]
        self.optimizer = make(self.held if self.rounded else self.params)
        # GradScaler refuses half gradients: there it scales stand-ins, under an optimizer that moves nothing.
        self.scales = torch.optim.SGD(self.held, lr=0.0) if self.low else self.optimizer
        self.scaler = torch.amp.GradScaler(self.device, enabled=spec.scaled, **(scaler or {}))
        self.decay, self.ema = ema, [h.detach().clone() for h in self.held]
        self.updates = 0
        self._open()

    def run(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[Row]:
        """Every batch, then the tail of the last cycle as an update of its own."""
        rows = [self.step(x, y) for x, y in batches]
        return (
            rows
            if self.micro == 0
            else [*rows, self._end(torch.zeros((), dtype=self.dtype, device=self.device))]
        )

    def step(self, x: Tensor, y: Tensor) -> Row:
        """One micro-batch; the last of its cycle updates."""
        self.first = self.first or len(y)
        weight = len(y) / self.first  # of a batch of another size than the cycle's first
        loss = self.loss(self.forward(x), y)
        self.scaler.scale(loss if weight == 1 else loss * weight).backward()
        self._widen()
        self.micro, self.N = self.micro + 1, self.N + weight
        self.total, self.dtype = self.total + loss.detach().double() * weight, loss.dtype
        if self.micro == self.accumulate:
            return self._end(loss.detach())
        return Row(loss.detach(), self._mean(), self._scale(), None, False)

    def forward(self, x: Tensor) -> Tensor:
        """The network's output, in float32 or wider."""
        if self.spec.cast == "autocast":
            with torch.autocast(self.device, dtype=self.spec.dtype):
                out = self.net(x)
        elif self.spec.cast == "copies":
            out = self._on_copies(x)
        else:
            out = self.net(_to(x, self.spec.dtype))
        return out.float() if out.dtype in (F16, BF16) else out

    def _on_copies(self, x: Tensor) -> Tensor:
        """On low leaves beside the masters; the statistics of a low norm go through the low dtype and back."""
        named = dict(self.net.named_parameters())
        self.leaves = [p if self._stays(n) else _leaf(p, self.spec.dtype) for n, p in named.items()]
        stats = {
            n: _to(b, self.spec.dtype) for n, b in self.net.named_buffers() if self.spec.low_norms
        }
        swapped = {**dict(zip(named, self.leaves, strict=True)), **stats}
        out: Tensor = functional_call(self.net, swapped, (_to(x, self.spec.dtype),))
        with torch.no_grad():
            for name, low in stats.items():
                self.net.get_buffer(name).copy_(low)
        return out

    def _stays(self, name: str) -> bool:
        module = self.net.get_submodule(name.rpartition(".")[0])
        return isinstance(module, nn.BatchNorm2d) and not self.spec.low_norms

    def _widen(self) -> None:
        """Half gradients are added up in float32."""
        for h, leaf in zip(self.held, self.leaves, strict=True):
            if h is not leaf:
                # model.half() and nothing else: the optimizer adds repeated rows in half
                sums_itself = self.low and self._untouched and leaf.grad.is_sparse
                wide = (leaf.grad.coalesce() if sums_itself else leaf.grad).float()
                h.grad = wide if h.grad is None else h.grad + wide
                leaf.grad = leaf.grad if self._untouched else None

    @property
    def _untouched(self) -> bool:
        """model.half() and nothing else: the optimizer steps on what backward left."""
        return (
            not self.rounded
            and self.accumulate == 1
            and self.clip_norm is None
            and not self.spec.scaled
        )

    def _end(self, loss: Tensor) -> Row:
        cycle_loss, scale = self._mean(), self._scale()
        if self.spec.scaled:
            self.scaler.unscale_(self.scales)
        values = self._values()
        if (
            self.accumulate > 1
        ):  # by a tensor: on CUDA a division by a number is a product with its reciprocal
            for g in values:
                g.div_(torch.full((), self.N, dtype=g.dtype, device=g.device))
        finite = all(bool(g.isfinite().all()) for g in values)
        norm = self._clip(values)
        self._set_rates()
        self._commit(finite)
        self.scaler.update()
        self.updates += finite
        self._open()
        return Row(loss, cycle_loss, scale, norm, finite)

    def _clip(self, values: list[Tensor]) -> Tensor:
        if self.clip_norm is None:
            return torch.nn.utils.get_total_norm(values)
        return torch.nn.utils.clip_grad_norm_(_carriers(values), self.clip_norm)

    def _values(self) -> list[Tensor]:
        """The gradients to work on in place; of a sparse one its summed values."""
        for h in self.held:
            if h.grad.is_sparse:
                h.grad = h.grad.coalesce()
        return [h.grad._values() if h.grad.is_sparse else h.grad for h in self.held]

    def _commit(self, finite: bool) -> None:
        """A skipped update restores the buffers; GradScaler skips the optimizer by itself."""
        if not finite:
            with torch.no_grad():
                for b, old in zip(self.net.buffers(), self.buffers, strict=True):
                    b.copy_(old)
        if self.spec.scaled:
            self.scaler.step(self.scales)
        if finite and (self.low or not self.spec.scaled):
            self._optimizer_step()
        if finite and self.decay is not None:
            for average, p in zip(self.ema, self.params, strict=True):
                average.lerp_(p.detach().to(average.dtype), 1 - self.decay)

    def _optimizer_step(self) -> None:
        if self.rounded:
            for h, p, r in zip(self.held, self.params, self.residue, strict=True):
                h.data = p.detach().float() + r.float()
        elif self.low and not self._untouched:
            for h, p in zip(self.held, self.params, strict=True):
                p.grad = h.grad.to(p.dtype)
        self.optimizer.step()
        if self.rounded:
            self._store()

    def _store(self) -> None:
        """The fp32 result in low storage, with a Kahan residue or rounded at random."""
        for i, (h, p, r) in enumerate(zip(self.held, self.params, self.residue, strict=True)):
            if self.spec.rounding == "kahan":
                p.data = h.detach().to(p.dtype)
                r.copy_(h.detach() - p.detach().float())
            else:
                p.data = round_stochastically(h.detach(), p.dtype, update=self.updates, index=i)

    def _set_rates(self) -> None:
        for group, row in zip(
            self.optimizer.param_groups, self.rates or (), strict=bool(self.rates)
        ):
            group["lr"] = row[min(self.updates, len(row) - 1)]

    def _scale(self) -> float:
        return self.scaler.get_scale()

    def _mean(self) -> Tensor:
        return (self.total / self.N).to(self.dtype)

    def _open(self) -> None:
        self.micro, self.N, self.first, self.total = (
            0,
            0.0,
            0,
            torch.zeros((), dtype=F64, device=self.device),
        )
        self.buffers = [b.clone() for b in self.net.buffers()]
        for p in (*self.params, *self.held):
            p.grad = None


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _leaf(p: Tensor, dtype: torch.dtype) -> Tensor:
    return p.detach().to(dtype).requires_grad_()


def _carriers(values: list[Tensor]) -> list[Tensor]:
    """Parameters whose gradients are these very tensors, as torch.nn.utils takes them."""
    carriers = [nn.Parameter(torch.empty_like(v)) for v in values]
    for c, v in zip(carriers, values, strict=True):
        c.grad = v
    return carriers


def round_stochastically(x: Tensor, dtype: torch.dtype, *, update: int, index: int) -> Tensor:
    """x to the grid of `dtype` below or above, in exact float64: |x| / step plus a draw in [0, 1), then floor.

    The draw is 13 (fp16) or 16 (bf16) low bits of lowbias32 on a counter, keyed by (update, parameter).
    """
    drop, mantissa, lowest = (13, 10, -24) if dtype == F16 else (16, 7, -133)
    key = (update * 0x9E3779B1 + index * 0x85EBCA77) & 0x7FFFFFFF
    h = np.arange(x.numel(), dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(key)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    draw = ((h ^ (h >> np.uint32(16))) & np.uint32((1 << drop) - 1)) / 2.0**drop
    values = x.detach().cpu().double().flatten().numpy()
    step = 2.0 ** np.maximum(np.frexp(values)[1] - 1 - mantissa, lowest)
    rounded = np.copysign(np.floor(np.abs(values) / step + draw) * step, values)
    return torch.from_numpy(rounded).view(x.shape).to(x.device, dtype)
