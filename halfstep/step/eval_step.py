"""The evaluation counterpart of a training step: same precision, eval mode, no gradients."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.precision import Applied, Precision, PrecisionName
from halfstep.precision.backend_flags import set_backend_flags
from halfstep.precision.module_support import check_has_values
from halfstep.step.batch_context import attach_loss_arguments
from halfstep.step.loss_terms import Count
from halfstep.step.objective import (
    Batch,
    Objective,
    at_least_fp32,
    batch_size,
    check_loss,
    find_loss,
    loss_arguments,
    outputs_beside_loss,
    to_device,
)

# Names of the parameter of a loss that is its target.
TARGET_PARAMETERS = ("target", "targets", "label", "labels", "y", "y_true")

# In an EvalRecord: the loss has three or more arguments, and none is called a target.
AMBIGUOUS_TARGET = object()


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One evaluated batch, on the device.

    `loss` is the mean over its `count` terms (0 when there are none): Σ loss·count / Σ count is the
    mean over a whole data set, a last short batch included. `outputs` are in float32 or wider, and
    None where only the loss was returned. `target` is the target that the loss was called with;
    None where the network or the forward computes the loss itself, AMBIGUOUS_TARGET where the loss
    has several arguments and none of them is called one.
    """

    loss: Tensor
    count: Tensor
    outputs: Any
    target: Any = None


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
        self._measures_algorithms = _benchmark
        # A function, because the training step that shares its precision may switch to another.
        self._get_applied = _applied or self._apply_precision(Precision.parse(precision))
        self.objective = Objective(net, loss, forward, count)
        self._target_position = _find_target_parameter(loss)

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

        target = None
        if objective.loss is None:
            wide_out = at_least_fp32(out, min_dtype)
            loss = check_loss(find_loss(wide_out))
            outputs = outputs_beside_loss(wide_out)
            count = objective.count_terms(batch, ())
        else:
            try:
                arguments = loss_arguments(out, min_dtype)
                loss = at_least_fp32(check_loss(objective.loss(*arguments)), min_dtype)
            except Exception as error:
                attach_loss_arguments(error, objective.loss, out)
                raise
            count = objective.count_terms(batch, arguments)
            outputs = arguments[0]
            target = self._find_target(arguments)

        # A sum counts once. A loss that is not known is taken to average over the batch.
        if count is None:
            count = 1 if objective.is_sum else batch_size(batch)
        if not isinstance(count, Tensor):
            count = torch.full((), count, device=loss.device)
        mean_loss = torch.where(count > 0, loss.sum(), 0)
        return EvalRecord(loss=mean_loss, count=count, outputs=outputs, target=target)

    def _find_target(self, arguments: tuple[Any, ...]) -> Any:
        """The target among the arguments of the loss: the second of two, or the one of that name.

        None where there is only one.
        """
        if len(arguments) <= 2:
            return arguments[1] if len(arguments) == 2 else None
        if self._target_position is None or self._target_position >= len(arguments):
            return AMBIGUOUS_TARGET
        return arguments[self._target_position]


def _find_target_parameter(loss: Any) -> int | None:
    """The position of the parameter of a loss that is called a target; None where none is."""
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # no loss, or a function of C
        return None
    positions = [i for i, name in enumerate(names) if name in TARGET_PARAMETERS]
    return positions[0] if len(positions) == 1 else None


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
