"""The evaluation counterpart of a training step: same precision, eval mode, no gradients."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.precision import Applied, Precision, PrecisionName
from halfstep.precision.backend_flags import set_backend_flags
from halfstep.precision.module_support import check_has_values
from halfstep.step.batch_context import attach_loss_arguments
from halfstep.step.loss_terms import Count
from halfstep.step.objective import (
    AMBIGUOUS_TARGET,
    Batch,
    Objective,
    at_least_fp32,
    batch_size,
    to_device,
)
from halfstep.step.step_copy import check_functions

__all__ = ["AMBIGUOUS_TARGET", "EvalRecord", "EvalStep", "eval_mode"]


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One evaluated batch, on the device.

    `loss` is the mean over its `count` terms (0 when there are none): Σ loss·count / Σ count is the
    mean over a whole data set, a last short batch included. `outputs` are in float32 or wider, and
    None where only the loss was returned. `target` is the target that the loss was called with;
    None where the network or the forward computes the loss itself, AMBIGUOUS_TARGET where the loss
    has several arguments and none of them is called one. `parts` are other numbers that were
    returned with the loss, by name: their means are weighted as the loss.
    """

    loss: Tensor
    count: Tensor
    outputs: Any
    target: Any = None
    parts: dict[str, Tensor] = field(default_factory=dict)


class EvalStep:
    """`record = evaluate(*batch)`: the network in eval mode, under a precision.

    Afterwards every module has its own train/eval flag again.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: Any = None,
        *,
        precision: PrecisionName | Precision = "fp32",
        forward: Callable[..., Any] | None = None,
        count: Callable[[Any], Count] | None = None,
        _applied: Callable[[], Applied] | None = None,
        _benchmark: bool = True,
    ) -> None:
        check_has_values(net)
        first_tensor = next(iter([*net.parameters(), *net.buffers()]), None)
        self.device = torch.device("cpu")
        if first_tensor is not None:
            self.device = first_tensor.device
        self.net = net
        self._forward = forward
        self._count = count
        self._shared_applied = _applied
        self._measures_algorithms = _benchmark
        # A function, because the training step that shares its precision may switch to another.
        self._get_applied = _applied or self._apply_precision(Precision.parse(precision))
        self.objective = Objective(net, loss, forward, count)

    @property
    def applied(self) -> Applied:
        """The network under its precision, as it is now."""
        return self._get_applied()

    def _apply_precision(self, precision: Precision) -> Callable[[], Applied]:
        applied = Applied(self.net, precision, self.device, convert=False)

        def current() -> Applied:
            """Planned anew where modules or parameters of the network were exchanged."""
            nonlocal applied
            if not applied.is_current():
                applied = Applied(self.net, precision, self.device, convert=False)
            return applied

        return current

    @torch.no_grad()
    def __call__(self, *batch: Any) -> EvalRecord:
        """Loss, count and outputs of one batch, on the device."""
        batch = to_device(batch, self.device)
        applied = self._get_applied()
        with eval_mode(self.net), self._backend(applied):
            return self._evaluate(applied, batch)

    @torch.no_grad()
    def predict(self, *inputs: Any) -> Any:
        """The network's outputs in eval mode, in float32 or wider; no loss and no target."""
        inputs = to_device(inputs, self.device)
        applied = self._get_applied()
        with eval_mode(self.net), self._backend(applied), applied:
            if len(inputs) == 1 and isinstance(inputs[0], dict):
                out = self.net(**inputs[0])
            else:
                out = self.net(*inputs)
        return at_least_fp32(applied.unrounded_outputs(out), applied.precision.output)

    def __deepcopy__(self, memo: dict[int, Any]) -> "EvalStep":
        """An evaluation of copies of network and loss, and of the training step it belongs to."""
        loss = self.objective.loss
        functions = {"loss": loss, "forward": self._forward, "count": self._count}
        check_functions(functions, self.net, others=[self, self.objective])
        copied = type(self)(
            copy.deepcopy(self.net, memo),
            copy.deepcopy(loss, memo),
            precision=self.applied.precision,
            forward=copy.deepcopy(self._forward, memo),
            count=copy.deepcopy(self._count, memo),
            _applied=copy.deepcopy(self._shared_applied, memo),
            _benchmark=self._measures_algorithms,
        )
        memo[id(self)] = copied
        return copied

    def _backend(self, applied: Applied) -> AbstractContextManager[None]:
        return set_backend_flags(
            applied.precision,
            self.device,
            deterministic=False,
            benchmark=self._measures_algorithms,
        )

    def _evaluate(self, applied: Applied, batch: Batch) -> EvalRecord:
        objective = self.objective
        min_dtype = applied.precision.output
        with applied:
            out = applied.unrounded_outputs(objective.forward(self.net, *batch))

        try:
            arguments: tuple[Any, ...] = ()
            if objective.loss is not None:
                arguments = objective.loss_arguments(out, min_dtype)
            returned = out if objective.loss is None else objective.call_loss(arguments)
            result = objective.split(returned, arguments, min_dtype, with_outputs=True)
        except Exception as error:
            if objective.loss is not None:
                attach_loss_arguments(error, objective.loss, out)
            raise
        count = objective.count_terms(batch, arguments)

        # A sum counts once. A loss that is not known is taken to average over the batch.
        if count is None:
            count = 1 if objective.is_sum else batch_size(batch)
        if not isinstance(count, Tensor):
            count = torch.full((), count, device=result.loss.device)
        mean_loss = torch.where(count > 0, result.loss.sum(), 0)
        return EvalRecord(
            loss=mean_loss,
            count=count,
            outputs=result.outputs,
            target=result.target,
            parts=result.parts,
        )


@contextmanager
def eval_mode(net: nn.Module) -> Iterator[None]:
    """Inside, every module is in eval mode; afterwards each has its own flag again."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
