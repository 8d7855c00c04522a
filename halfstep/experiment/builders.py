"""Functions that the user names: imported, called, their result checked.

The name is "package.module:function" or "path/to/file.py:function".

torch is imported inside functions only: the command line imports this module for its help.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from halfstep.errors import closest_name
from halfstep.utils.user_modules import (
    import_user_file,
    import_user_module,
    is_file_spec,
    shadowed_sibling,
)

if TYPE_CHECKING:
    from halfstep.data import TableEncoding
    from halfstep.engine import Callback
    from halfstep.model import Model

Builder = Callable[[], Any]


@dataclass(frozen=True)
class RunParts:
    """A model, its training data and the other arguments of `Model.fit`."""

    model: "Model"
    data: Any
    fit_arguments: dict[str, Any] = field(default_factory=dict)
    chosen: dict[str, Any] = field(default_factory=dict)
    """Settings that were chosen by the data, as the size of photos."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What is noted of the data in run.json, as plain values."""
    encoding: "TableEncoding | None" = None
    """Of the table that the run is trained on."""

    @property
    def callbacks(self) -> list["Callback"]:
        """For a repeated run: without those that write (checkpoints, logs, progress bars)."""
        from halfstep.model.fit_arguments import check_callbacks

        callbacks = check_callbacks(self.fit_arguments.get("callbacks"))
        return [callback for callback in callbacks if not callback.writes]


def import_function(spec: str, what: str = "build") -> Builder:
    """The function that "package.module:function" or "path/to/file.py:function" names.

    A module is looked for in the current folder and among the installed ones, where only that one
    name is taken from the current folder. `what` is the setting that error messages name.
    """
    module_name, _, function_name = spec.rpartition(":")
    if not module_name or not function_name:
        raise ValueError(
            f"{what}: expected package.module:function or path/to/file.py:function, got {spec!r}"
        )
    folder = Path.cwd()
    module: ModuleType | None = None
    try:
        if is_file_spec(module_name):
            folder = Path(module_name).expanduser().resolve().parent
            module = import_user_file(Path(module_name))
        else:
            module = import_user_module(module_name, folder)
        function: Any = getattr(module, function_name)
    except (ImportError, AttributeError, ValueError) as error:
        close_name = None
        if module is not None:
            close_name = closest_name(function_name, _callable_names(module))
        hint = f". Did you mean {module_name}:{close_name}?" if close_name else ""
        if isinstance(error, ImportError) and not hint:
            hint = shadowed_sibling(error, folder) and f".{shadowed_sibling(error, folder)}"
        raise ValueError(
            f"{what}: {spec!r} cannot be imported from {folder}: {error}{hint}"
        ) from error
    if not callable(function):
        raise TypeError(
            f"{what}: expected {spec!r} to be a function, got {type(function).__name__}"
        )
    builder: Builder = function
    return builder


def _callable_names(module: ModuleType) -> list[str]:
    """Public functions and classes of a module."""
    return [
        name for name, value in vars(module).items() if callable(value) and not name.startswith("_")
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
