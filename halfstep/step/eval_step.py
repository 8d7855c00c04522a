"""The evaluation counterpart of a training step: same precision, eval mode, no gradients."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.precision import Applied, Precision
from halfstep.precision.backend_flags import backend
from halfstep.step.loss_terms import Count
from halfstep.step.objective import (
    Objective,
    loss_arguments,
    find_loss,
    batch_size,
    to_device,
    at_least_fp32,
)


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One evaluated batch, on the device.

    `loss` is the mean over its `count` terms (0 when there are none): Σ loss·count / Σ count is the mean over a whole
    data set, a last short batch included. `outputs` are in float32 or wider.
    """

    loss: Tensor
    count: Tensor
    outputs: Any


class EvalStep:
    """`record = evaluate(*batch)`: the network in eval mode under a precision; its train/eval flags come back after."""

    def __init__(
        self,
        net: nn.Module,
        loss: Any = None,
        *,
        precision: str | Precision = "fp32",
        forward: Callable[..., Any] | None = None,
        count: Callable[[Any], Count] | None = None,
        _applied: Callable[[], Applied] | None = None,
        _benchmark: bool = True,
    ) -> None:
        tensor = next(iter([*net.parameters(), *net.buffers()]), None)
        self.device = tensor.device if tensor is not None else torch.device("cpu")
        self.net, self._benchmark = net, _benchmark
        self._applied = _applied or self._own(
            Precision.parse(precision)
        )  # a training step may switch its precision
        self.objective = Objective(net, loss, forward, count)

    @property
    def applied(self) -> Applied:
        """The network under its precision, as it is now."""
        return self._applied()

    def _own(self, precision: Precision) -> Callable[[], Applied]:
        own = Applied(self.net, precision, self.device, convert=False)
        return lambda: own

    @torch.no_grad()
    def __call__(self, *batch: Any) -> EvalRecord:
        """Loss, count and outputs of one batch, on the device."""
        batch, applied = to_device(batch, self.device), self._applied()
        with eval_mode(self.net), self._backend(applied):
            return self._evaluate(applied, batch)

    @torch.no_grad()
    def predict(self, *inputs: Any) -> Any:
        """The network's outputs in eval mode, in float32 or wider; no loss and no target."""
        inputs, applied = to_device(inputs, self.device), self._applied()
        named = len(inputs) == 1 and isinstance(inputs[0], dict)
        with eval_mode(self.net), self._backend(applied), applied:
            out = self.net(**inputs[0]) if named else self.net(*inputs)
        return at_least_fp32(applied.unrounded(out), applied.precision.output)

    def _backend(self, applied: Applied) -> AbstractContextManager[None]:
        return backend(
            applied.precision, self.device, deterministic=False, benchmark=self._benchmark
        )

    def _evaluate(self, applied: Applied, batch: tuple[Any, ...]) -> EvalRecord:
        o, least = self.objective, applied.precision.output
        with applied:
            out = applied.unrounded(o.forward(self.net, *batch))
        if o.loss is None:
            out = at_least_fp32(out, least)
            loss, n = find_loss(out), o.count_terms(batch, ())
        else:
            taken = loss_arguments(out, least)
            loss, n, out = (
                at_least_fp32(o.loss(*taken), least),
                o.count_terms(batch, taken),
                taken[0],
            )
        if (
            n is None
        ):  # a sum counts once; of an unknown loss it is assumed that it averages over the batch
            n = 1 if o.is_sum else batch_size(batch)
        count = n if isinstance(n, Tensor) else torch.full((), n, device=loss.device)
        return EvalRecord(torch.where(count > 0, loss.sum(), 0), count, out)


@contextmanager
def eval_mode(net: nn.Module) -> Iterator[None]:
    """Every module in eval mode; each one's own flag comes back after."""
    modes = [(m, m.training) for m in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
