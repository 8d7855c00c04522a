"""Functions of the user's, named "package.module:function": imported, called, their result checked.

torch is imported inside functions only: the command line imports this module for its help.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from halfstep.errors import closest_name

if TYPE_CHECKING:
    from halfstep.engine import Callback
    from halfstep.model import Model

Builder = Callable[[], Any]


@dataclass(frozen=True)
class RunParts:
    """A model, its training data and the other arguments of `Model.fit`."""

    model: "Model"
    data: Any
    fit_arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def callbacks(self) -> list["Callback"]:
        """For a repeated run: without those that write (checkpoints, logs, progress bars)."""
        from halfstep.model.fit_arguments import check_callbacks

        callbacks = check_callbacks(self.fit_arguments.get("callbacks"))
        return [callback for callback in callbacks if not callback.writes]


def import_function(spec: str, what: str = "build") -> Builder:
    """The function that "package.module:function" names, importable from the current folder.

    `what` is the setting that error messages name.
    """
    module_name, _, function_name = spec.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"{what}: expected package.module:function, got {spec!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function: Any = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        close_name = closest_name(function_name, _callable_names(module_name))
        hint = f". Did you mean {module_name}:{close_name}?" if close_name else ""
        raise ValueError(
            f"{what}: {spec!r} cannot be imported from {os.getcwd()}: {error}{hint}"
        ) from error
    if not callable(function):
        raise TypeError(
            f"{what}: expected {spec!r} to be a function, got {type(function).__name__}"
        )
    builder: Builder = function
    return builder


def _callable_names(module_name: str) -> list[str]:
    """Public functions and classes of a module; none if it could not be imported."""
    if module_name not in sys.modules:
        return []
    attributes = vars(sys.modules[module_name])
    return [
        name for name, value in attributes.items() if callable(value) and not name.startswith("_")
    ]


def import_builder(spec: str) -> Builder:
    """A function that calls the user's builder; its errors get a note with the file and line.

    A builder for the command line may also return (model, data, valid).
    """
    from halfstep.utils.user_code import call_user_function

    function = import_function(spec)

    def build() -> Any:
        result = call_user_function(function, "the builder", spec)
        if isinstance(result, tuple) and len(result) == 3:
            model, data, valid = result
            return {"model": model, "data": data, "valid": valid}
        return result

    return build


def call_builder(build: Builder) -> RunParts:
    """Calls a builder and checks its result.

    It returns (model, data), or a dict of these and other arguments of `fit`.
    """
    from halfstep.model import Model

    result = build()
    if isinstance(result, tuple) and len(result) == 2:
        model, data = result
        result = {"model": model, "data": data}
    is_mapping = isinstance(result, Mapping)
    if not is_mapping or not isinstance(result.get("model"), Model) or "data" not in result:
        raise TypeError(
            "build: expected a function that returns (model, data), or a dict of model, data and "
            "other arguments of fit such as steps_per_epoch; "
            f"got {type(result).__name__}"
        )

    arguments = {name: value for name, value in result.items() if name not in ("model", "data")}
    known = set(inspect.signature(Model.fit).parameters) - {"self", "data"}
    unknown = sorted(set(arguments) - known)
    if unknown:
        raise TypeError(
            f"build: {', '.join(unknown)} is no argument of fit; "
            f"expected some of {', '.join(sorted(known))}"
        )
    return RunParts(result["model"], result["data"], arguments)
