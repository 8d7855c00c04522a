"""copy.deepcopy of a step: network, loss, optimizer and state together, ready to train on.

A step holds entries of the network's own dictionaries and functions over its modules, which no
generic copy can follow. So the parts are copied, and a step is built around them.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from halfstep.errors import Notice
from halfstep.step.lane_accumulate import LaneAccumulate
from halfstep.utils.python_state import values_around

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep


def deep_copy_step(step: "TrainStep", memo: dict[int, Any]) -> "TrainStep":
    """A step of its own over copies, in the state that `step` is in, inside a cycle too."""
    options = {f.name: getattr(step.options, f.name) for f in fields(step.options)}
    options["nonfinite"] = step.requested_nonfinite
    functions = {name: options[name] for name in ("forward", "count")}
    functions["loss"] = step.objective.loss
    others = [*step.params, step, step.optimizer, step.objective]
    check_functions(functions, step.net, others=others)

    net = copy.deepcopy(step.net, memo)
    loss = copy.deepcopy(step.objective.loss, memo)
    optimizer = _copy_optimizer(step.optimizer, memo)
    options = copy.deepcopy(options, memo)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)  # whoever built the step has read them
        copied = type(step)(net, loss, optimizer, precision=step.precision, **options)
    copied.state = copy.deepcopy(step.state, memo)
    copied.set_lane_seed(step.lane_seed)
    if isinstance(copied.accumulator, LaneAccumulate):
        assert isinstance(step.accumulator, LaneAccumulate), "a copy has the same options"
        copied.accumulator.copy_cycle(step.accumulator, memo)
    copied.compiled(step.compiled.on, step.compiled.reason)
    memo[id(step)] = copied
    return copied


def refuse_copy(kind: str, how: str, advice: str) -> NoReturn:
    """The TypeError of copy.copy and pickle."""
    raise TypeError(f"{kind} cannot be {how}: {advice}")


def _copy_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """An optimizer over the copies of its parameters, with its attributes.

    torch copies settings and state. What else an optimizer has in attributes it leaves out: that it
    is fused, its hooks, counters of its own.
    """
    copied = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        # A scheduler of torch's hangs a function over step() that runs the original.
        is_wrapped_method = callable(value) and hasattr(type(optimizer), name)
        if not is_wrapped_method and (name not in vars(copied) or name.endswith("_hooks")):
            setattr(copied, name, copy.deepcopy(value, memo))
    return copied


def check_functions(
    functions: Mapping[str, Any], net: nn.Module, *, others: Iterable[Any] = ()
) -> None:
    """Refuses functions that would go on with the original's network: they are not copied.

    `functions` are named as the arguments that they came by; `others` are further parts of it.
    """
    own = {id(module) for module in net.modules()}
    own |= {id(p) for p in net.parameters()} | {id(other) for other in others}
    for name, function in functions.items():
        for variable, value in _captured_values(function):
            if id(value) in own:
                raise TypeError(
                    f"copy.deepcopy: {name}= uses the network of the original step by its variable "
                    f"{variable!r}, so the copy would go on with it; take the network from the "
                    f"first argument of {name}=, or build another step around a copy of the "
                    "network; a TrainStep then takes step.state_dict()"
                )


def _captured_values(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function takes from around it, by name, and what functions that it calls do."""
    if not isinstance(function, FunctionType):
        return
    for name, value in values_around(function):
        yield name, value
        if isinstance(value, FunctionType):
            yield from ((f"{name}.{inner}", v) for inner, v in values_around(value))
