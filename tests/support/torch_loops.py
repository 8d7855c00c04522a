"""Training loops in plain torch, one per way of casting, written out.

A TrainStep must equal them bit for bit.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

F16 = torch.float16
BF16 = torch.bfloat16
F32 = torch.float32
F64 = torch.float64
HALF_DTYPES = (F16, BF16)
MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


class CastSpec(NamedTuple):
    """A precision spelled out, independently of the table under test.

    `cast` is "none", "autocast", "copies" (low copies of fp32 masters) or "params" (the parameters
    themselves are converted).
    """

    cast: str
    dtype: torch.dtype
    scaled: bool = False
    low_norms: bool = False
    rounding: str = "nearest"


class LoopRecord(NamedTuple):
    """One step of a loop; `norm` is None on steps that end no cycle."""

    loss: Tensor
    cycle_loss: Tensor
    scale: float
    norm: Tensor | None
    updated: bool


class TorchLoop:
    """Forward, loss in float32, backward, Σ gradients / N, clip, optimizer.step().

    torch's GradScaler scales the loss when the spec says so. Backward fills the gradients of
    `leaves`; `wide_params` carry their sums in float32 or wider: they are the parameters
    themselves, or float32 stand-ins where the parameters are half.
    `rates` has one row per parameter group, one column per update.
    """

    def __init__(
        self,
        net: nn.Module,
        make_optimizer: MakeOptimizer,
        spec: CastSpec,
        *,
        accumulate: int = 1,
        clip_norm: float | None = None,
        loss: Callable[..., Tensor] = F.cross_entropy,
        scaler: dict[str, Any] | None = None,
        rates: Sequence[Sequence[float]] | None = None,
        ema: float | None = None,
    ) -> None:
        self.net = net.to(spec.dtype) if spec.cast == "params" else net
        self.spec = spec
        self.accumulate = accumulate
        self.clip_norm = clip_norm
        self.loss = loss
        self.rates = rates

        self.params = list(net.parameters())
        self.leaves = self.params
        self.device = self.params[0].device.type
        self.is_half = self.params[0].dtype in HALF_DTYPES
        if self.is_half:
            self.wide_params = [nn.Parameter(p.detach().float()) for p in self.params]
        else:
            self.wide_params = self.params

        # Kahan and stochastic rounding: the optimizer steps on float32, then the result is rounded.
        self.updates_wide = self.is_half and spec.rounding != "nearest"
        self.residue = [torch.zeros_like(p) for p in self.params]
        self.optimizer = make_optimizer(self.wide_params if self.updates_wide else self.params)

        # GradScaler refuses half gradients: then it unscales the stand-ins, under an optimizer
        # that moves nothing.
        self.scaled_optimizer = self.optimizer
        if self.is_half:
            self.scaled_optimizer = torch.optim.SGD(self.wide_params, lr=0.0)
        self.scaler = torch.amp.GradScaler(self.device, enabled=spec.scaled, **(scaler or {}))

        self.ema_decay = ema
        self.ema = [p.detach().clone() for p in self.wide_params]
        self.updates = 0
        self._start_cycle()

    def run(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[LoopRecord]:
        """Runs every batch, then the tail of the last cycle as an update of its own."""
        records = [self.step(x, y) for x, y in batches]
        if self.micro_batches > 0:
            no_loss = torch.zeros((), dtype=self.loss_dtype, device=self.device)
            records.append(self._end_cycle(no_loss))
        return records

    def step(self, x: Tensor, y: Tensor) -> LoopRecord:
        """Runs one micro-batch; the last of its cycle updates."""
        # A batch of another size than the cycle's first counts in proportion.
        if self.first_batch_size == 0:
            self.first_batch_size = len(y)
        weight = len(y) / self.first_batch_size

        loss = self.loss(self.forward(x), y)
        self.scaler.scale(loss if weight == 1 else loss * weight).backward()
        self.add_wide_grads()
        self.micro_batches += 1
        self.N += weight
        self.loss_sum = self.loss_sum + loss.detach().double() * weight
        self.loss_dtype = loss.dtype
        if self.micro_batches == self.accumulate:
            return self._end_cycle(loss.detach())
        return LoopRecord(
            loss=loss.detach(),
            cycle_loss=self._mean_loss(),
            scale=self.scaler.get_scale(),
            norm=None,
            updated=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the network's output, in float32 or wider."""
        if self.spec.cast == "autocast":
            with torch.autocast(self.device, dtype=self.spec.dtype):
                out = self.net(x)
        elif self.spec.cast == "copies":
            out = self._forward_on_copies(x)
        else:
            out = self.net(_cast(x, self.spec.dtype))
        return out.float() if out.dtype in HALF_DTYPES else out

    def _forward_on_copies(self, x: Tensor) -> Tensor:
        """Runs the network on low copies of the masters.

        The statistics of a low norm go through the low dtype and back.
        """
        low = self.spec.dtype
        params = dict(self.net.named_parameters())
        self.leaves = []
        for name, param in params.items():
            if self._stays_wide(name):
                self.leaves.append(param)
            else:
                self.leaves.append(param.detach().to(low).requires_grad_())

        # Statistics are float32. Beside them torch's kernel takes float32 weights.
        replaced = {
            name: leaf.float() if self._is_in_norm(name) else leaf
            for name, leaf in zip(params, self.leaves, strict=True)
        }
        out: Tensor = functional_call(self.net, replaced, (_cast(x, low),))
        return out

    def _is_in_norm(self, name: str) -> bool:
        return isinstance(self.net.get_submodule(name.rpartition(".")[0]), nn.BatchNorm2d)

    def _stays_wide(self, name: str) -> bool:
        return self._is_in_norm(name) and not self.spec.low_norms

    def add_wide_grads(self) -> None:
        """Adds the half gradients of backward to the float32 sums."""
        for wide_param, leaf in zip(self.wide_params, self.leaves, strict=True):
            if wide_param is leaf:
                continue
            grad = leaf.grad
            if self.is_half and self._steps_on_raw_grads and grad.is_sparse:
                grad = grad.coalesce()  # the optimizer adds repeated rows in half
            wide_grad = grad.float()
            if wide_param.grad is not None:
                wide_grad = wide_param.grad + wide_grad
            wide_param.grad = wide_grad
            if not self._steps_on_raw_grads:
                leaf.grad = None

    @property
    def _steps_on_raw_grads(self) -> bool:
        """model.half() and nothing else: the optimizer steps on the gradients of backward."""
        return (
            not self.updates_wide
            and self.accumulate == 1
            and self.clip_norm is None
            and not self.spec.scaled
        )

    def _end_cycle(self, loss: Tensor) -> LoopRecord:
        cycle_loss = self._mean_loss()
        scale = self.scaler.get_scale()
        if self.spec.scaled:
            self.scaler.unscale_(self.scaled_optimizer)

        # Average by a tensor: on CUDA a division by a number is a product with its reciprocal.
        grads = self._grad_values()
        if self.accumulate > 1:
            for grad in grads:
                grad.div_(torch.full((), self.N, dtype=grad.dtype, device=grad.device))

        is_finite = all(bool(grad.isfinite().all()) for grad in grads)
        norm = self._clip(grads)
        self._set_rates()
        self._commit(is_finite)
        self.scaler.update()
        self.updates += is_finite
        self._start_cycle()
        return LoopRecord(loss, cycle_loss, scale, norm, is_finite)

    def _clip(self, grads: list[Tensor]) -> Tensor:
        if self.clip_norm is None:
            return torch.nn.utils.get_total_norm(grads)
        return torch.nn.utils.clip_grad_norm_(_params_with_grads(grads), self.clip_norm)

    def _grad_values(self) -> list[Tensor]:
        """Returns the gradients to work on in place; of a sparse one its summed values."""
        values = []
        for param in self.wide_params:
            if param.grad.is_sparse:
                param.grad = param.grad.coalesce()
                values.append(param.grad._values())
            else:
                values.append(param.grad)
        return values

    def _commit(self, is_finite: bool) -> None:
        """Updates, or restores the buffers; GradScaler skips the optimizer by itself."""
        if not is_finite:
            with torch.no_grad():
                for buffer, saved in zip(self.net.buffers(), self.saved_buffers, strict=True):
                    buffer.copy_(saved)
        if self.spec.scaled:
            self.scaler.step(self.scaled_optimizer)
        if is_finite and (self.is_half or not self.spec.scaled):
            self._optimizer_step()
        if is_finite and self.ema_decay is not None:
            for average, param in zip(self.ema, self.params, strict=True):
                average.lerp_(param.detach().to(average.dtype), 1 - self.ema_decay)

    def _optimizer_step(self) -> None:
        if self.updates_wide:
            triples = zip(self.wide_params, self.params, self.residue, strict=True)
            for wide_param, param, residue in triples:
                wide_param.data = param.detach().float() + residue.float()
        elif self.is_half and not self._steps_on_raw_grads:
            for wide_param, param in zip(self.wide_params, self.params, strict=True):
                param.grad = wide_param.grad.to(param.dtype)
        self.optimizer.step()
        if self.updates_wide:
            self._store_rounded()

    def _store_rounded(self) -> None:
        """Stores the fp32 result in half, with a Kahan residue or rounded at random."""
        triples = zip(self.wide_params, self.params, self.residue, strict=True)
        for i, (wide_param, param, residue) in enumerate(triples):
            value = wide_param.detach()
            if self.spec.rounding == "kahan":
                param.data = value.to(param.dtype)
                residue.copy_(value - param.detach().float())
            else:
                param.data = round_stochastically(value, param.dtype, update=self.updates, index=i)

    def _set_rates(self) -> None:
        if not self.rates:
            return
        for group, row in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = row[min(self.updates, len(row) - 1)]

    def _mean_loss(self) -> Tensor:
        return (self.loss_sum / self.N).to(self.loss_dtype)

    def _start_cycle(self) -> None:
        self.micro_batches = 0
        self.N = 0.0
        self.first_batch_size = 0
        self.loss_sum = torch.zeros((), dtype=F64, device=self.device)
        self.saved_buffers = [buffer.clone() for buffer in self.net.buffers()]
        for param in (*self.params, *self.wide_params):
            param.grad = None


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts a floating-point tensor; token ids stay as they are."""
    return x.to(dtype) if x.is_floating_point() else x


def _params_with_grads(grads: list[Tensor]) -> list[Tensor]:
    """Parameters whose gradients are these very tensors, as torch.nn.utils takes them."""
    params = [nn.Parameter(torch.empty_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def round_stochastically(x: Tensor, dtype: torch.dtype, *, update: int, index: int) -> Tensor:
    """Rounds x to the grid of `dtype` below or above, in exact float64.

    |x| / step plus a draw in [0, 1), then floor. The draw is 13 (fp16) or 16 (bf16) low bits of
    lowbias32 on a counter, keyed by (update, parameter).
    """
    if dtype == F16:
        dropped_bits = 13
        mantissa_bits = 10
        lowest_exponent = -24
    else:
        dropped_bits = 16
        mantissa_bits = 7
        lowest_exponent = -133

    key = (update * 0x9E3779B1 + index * 0x85EBCA77) & 0x7FFFFFFF
    hashes = np.arange(x.numel(), dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(key)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        hashes = (hashes ^ (hashes >> np.uint32(shift))) * np.uint32(factor)
    hashes = hashes ^ (hashes >> np.uint32(16))
    draws = (hashes & np.uint32((1 << dropped_bits) - 1)) / 2.0**dropped_bits

    values = x.detach().cpu().double().flatten().numpy()
    steps = 2.0 ** np.maximum(np.frexp(values)[1] - 1 - mantissa_bits, lowest_exponent)
    rounded = np.copysign(np.floor(np.abs(values) / steps + draws) * steps, values)
    return torch.from_numpy(rounded).view(x.shape).to(x.device, dtype)
