"""Targets that an elementwise loss would repeat: outputs [32, 1] against targets [32].

torch compares every output with every target then, [32, 32] terms, and the training goes nowhere.
Here that is an error. It reads shapes only, which the host has: no wait for a device.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from halfstep.step.loss_terms import ELEMENTWISE_FUNCTIONS
from halfstep.utils.text import dtype_name

# torch fails on targets that are no floats there, with a message about its own types.
FLOAT_TARGET_LOSSES = (
    "BCELoss",
    "BCEWithLogitsLoss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)


class ShapeProblem(NamedTuple):
    """What is wrong with the shape of a target, in words and as code."""

    expected: str
    effect: str  # what torch would do
    fix: str  # code that changes a target y; "" where only the network or the data can change
    advice: str  # what to write else


def check_target_shape(loss: Any, arguments: tuple[Any, ...]) -> None:
    """Refuses a target of another shape than the outputs, for an elementwise loss.

    And whole numbers, for one that computes with floats only.
    """
    problem = find_shape_problem(arguments)
    if problem is None:
        check_target_dtype(loss, arguments)
        return
    sentences = [f"{problem.effect}."]
    if problem.fix:
        sentences.append(f"Write {problem.fix} for the target y.")
    if problem.advice:
        sentences.append(f"{problem.advice}.")
    raise ValueError(
        f"{loss_name(loss)}: expected {problem.expected}, received {list(arguments[1].shape)}, "
        f"{' '.join(sentences)}"
    )


def check_target_dtype(loss: Any, arguments: tuple[Any, ...]) -> None:
    """Refuses whole numbers and booleans as the target of a binary cross-entropy."""
    if len(arguments) < 2 or not isinstance(arguments[1], Tensor):
        return
    dtype = arguments[1].dtype
    if dtype.is_floating_point or loss_name(loss) not in FLOAT_TARGET_LOSSES:
        return
    raise TypeError(
        f"{loss_name(loss)}: expected a target of floats, 0.0 to 1.0, "
        f"received {dtype_name(dtype)}. Write y.float() for the target y"
    )


def find_shape_problem(arguments: tuple[Any, ...]) -> ShapeProblem | None:
    """What is wrong with the target of an elementwise loss; None where it has the right shape.

    Shapes that pair each output with one target are right too: [1, 3] and [3].
    """
    if len(arguments) < 2:
        return None
    out, target = arguments[:2]
    if not isinstance(out, Tensor) or not isinstance(target, Tensor) or out.shape == target.shape:
        return None
    compared_shape = _broadcast_shape(out, target)
    if compared_shape is not None and math.prod(compared_shape) == out.numel() == target.numel():
        return None

    effect = "which cannot be compared with them"
    advice = ""
    if compared_shape is not None:
        effect = f"which torch would repeat, like the outputs, to {list(compared_shape)}"
        advice = (
            "To compare so on purpose: "
            "forward=lambda net, x, y: tuple(torch.broadcast_tensors(net(x), y))"
        )
    if out.dim() == target.dim() + 1 and out.shape[:-1] == target.shape and out.shape[-1] > 1:
        count = out.shape[-1]
        one_output = f"The network has {count} outputs and a sample one target: let it end with 1"
        if not target.is_floating_point():
            one_output += ", or give nn.CrossEntropyLoss() as the loss of class numbers"
        advice = f"{one_output}. {advice}" if advice else one_output
    return ShapeProblem(
        expected=f"a target of the outputs' shape {list(out.shape)}",
        effect=effect,
        fix=_reshaping_code(out, target),
        advice=advice,
    )


def loss_name(loss: Any) -> str:
    """The class of a module, the name of a function."""
    if isinstance(loss, nn.Module):
        return type(loss).__name__
    function = loss.func if isinstance(loss, partial) else loss
    return getattr(function, "__name__", type(function).__name__)


class RefuseRepeatedTargets(TorchFunctionMode):
    """Inside, torch's elementwise losses refuse targets of another shape than their inputs.

    For losses of the user's own, which call them.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        if func in ELEMENTWISE_FUNCTIONS:
            named = [keywords[name] for name in ("input", "target") if name in keywords]
            check_inner_call(func, (*args, *named))
        return func(*args, **keywords)


def check_inner_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Refuses a call of one of torch's losses inside a loss of the user's own."""
    problem = find_shape_problem(arguments)
    if problem is None:
        check_target_dtype(function, arguments)
        return
    name = loss_name(function)
    fix = f"Write {problem.fix} for the target y" if problem.fix else "Give both one shape"
    raise ValueError(
        f"{name}, which the loss calls: expected {problem.expected}, "
        f"received {list(arguments[1].shape)}, {problem.effect}. {fix}; "
        f"to compare so on purpose: F.{name}(*torch.broadcast_tensors(out, y))"
    )


def _broadcast_shape(out: Tensor, target: Tensor) -> torch.Size | None:
    try:
        shape: torch.Size = torch.broadcast_shapes(out.shape, target.shape)
    except RuntimeError:
        return None
    return shape


def _reshaping_code(out: Tensor, target: Tensor) -> str:
    """Code that gives a target y the shape of the outputs, for any number of samples."""
    if out.numel() != target.numel():
        return ""
    if out.shape == (*target.shape, 1):
        return "y.unsqueeze(-1)"
    if target.shape == (*out.shape, 1):
        return "y.squeeze(-1)"
    sizes = ", ".join(map(str, [-1, *out.shape[1:]]))
    return f"y.reshape({sizes})"
