"""A run rebuilt from code: a function that gives the model, the data and the other arguments of its `fit`."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from halfstep.engine import Callback
from halfstep.errors import closest_name
from halfstep.model import Model
from halfstep.model.fit_arguments import check_callbacks


@dataclass(frozen=True)
class Built:
    """What `fit` was given. Callbacks that write (checkpoints, logs, bars) are left out when a run is repeated."""

    model: Model
    data: Any
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def callbacks(self) -> list[Callback]:
        return [
            each for each in check_callbacks(self.arguments.get("callbacks")) if not each.writes
        ]


Builder = Callable[[], Any]


def built(build: Builder) -> Built:
    """Call the builder and check what it returned: (model, data), or a dict of these and other arguments of fit."""
    result = build()
    if isinstance(result, tuple) and len(result) == 2:
        result = {"model": result[0], "data": result[1]}
    if (
        not isinstance(result, Mapping)
        or not isinstance(result.get("model"), Model)
        or "data" not in result
    ):
        raise TypeError(
            "build: expected a function that returns (model, data), or a dict of model, data and other arguments of "
            f"fit such as steps_per_epoch; got {type(result).__name__}"
        )
    known = set(inspect.signature(Model.fit).parameters) - {"self", "data"}
    unknown = sorted(set(result) - known - {"model", "data"})
    if unknown:
        raise TypeError(
            f"build: {', '.join(unknown)} is no argument of fit; expected some of {', '.join(sorted(known))}"
        )
    return Built(
        result["model"],
        result["data"],
        {k: v for k, v in result.items() if k not in ("model", "data")},
    )


def builder(spec: str, what: str = "build") -> Builder:
    """The function called "package.module:function", importable from the current folder."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ValueError(f"{what}: expected package.module:function, got {spec!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        close = closest_name(name, _functions(module))
        hint = f". Did you mean {module}:{close}?" if close else ""
        raise ValueError(
            f"{what}: {spec!r} cannot be imported from {os.getcwd()}: {error}{hint}"
        ) from error
    if not callable(function):
        raise TypeError(
            f"{what}: expected {spec!r} to be a function, got {type(function).__name__}"
        )
    found: Builder = function
    return found


def _functions(module: str) -> list[str]:
    """What a module that could be imported has to call."""
    names = vars(sys.modules[module]) if module in sys.modules else {}
    return [name for name, value in names.items() if callable(value) and not name.startswith("_")]
