"""Networks by name: one table, with the user's own entries, and builders by their import path.

An import path is written "package.module:function".
"""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeAlias, TypeVar, overload

from torch import nn

from halfstep.nets.resnet import resnet18, resnet34, resnet50, resnet101, resnet152
from halfstep.nets.small import ffnn, lenet5, mlp
from halfstep.utils.checks import did_you_mean

Builder: TypeAlias = Callable[..., nn.Module]
B = TypeVar("B", bound=Builder)

_BUILDERS: dict[str, Builder] = {
    "mlp": mlp,
    "ffnn": ffnn,
    "lenet5": lenet5,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet101": resnet101,
    "resnet152": resnet152,
}


def names() -> list[str]:
    """The names that `load` knows, in the order of registration."""
    return list(_BUILDERS)


def load(name: str, /, **options: object) -> nn.Module:
    """A new network, its weights drawn from torch's current seed, on torch's default device.

    The options are those of the network's own function, such as `resnet18`, which says their types.

    >>> load("resnet18", classes=10).fc.out_features
    10
    """
    if not isinstance(name, str):
        raise TypeError(
            f"nets.load: expected a name, received {type(name).__name__}; "
            f"names:\n{_describe_builders()}"
        )
    if ":" in name:
        return build(name, _import_builder(name), options)
    builder = _find_builder(name)
    _check_options(name, builder, options)
    return _check_network(name, builder(**options))


def build(name: str, builder: Any, options: Mapping[str, object]) -> nn.Module:
    """A new network by a builder that was imported under this name; errors say the name."""
    if not _is_builder(builder):
        raise TypeError(
            f"nets.load: expected {name!r} to be a function or class, received {_describe(builder)}"
        )
    _check_options(name, builder, options)
    return _check_network(name, _call_imported(name, builder, options))


def _check_network(name: str, net: object) -> nn.Module:
    if not isinstance(net, nn.Module):
        raise TypeError(
            f"nets.load: expected {name!r} to return a torch.nn.Module, received {_describe(net)}"
        )
    return net


@overload
def register(name: str, *, replace: bool = False) -> Callable[[B], B]: ...
@overload
def register(name: str, builder: B, *, replace: bool = False) -> B: ...
def register(name: str, builder: Any = ..., *, replace: bool = False) -> Any:
    """Enters a function or class that makes a network, and returns it unchanged.

    It can be called, `register("tiny", tiny)`, or stand as a decorator, `@register("tiny")`.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"nets.register: expected a name first, received {name!r}. "
            "Write @nets.register('name')."
        )
    if not name or ":" in name:
        raise ValueError(
            "nets.register: expected a name without ':', which marks a module's path, "
            f"received {name!r}"
        )
    if name in _BUILDERS and not replace:
        raise ValueError(
            f"nets.register: {name!r} is taken. Choose another name, or pass replace=True."
        )
    if builder is ...:
        return lambda decorated: register(name, decorated, replace=replace)
    if not _is_builder(builder):
        raise TypeError(
            f"nets.register: expected a function or class that makes {name!r}, "
            f"received {_describe(builder)}. Pass it, do not call it."
        )
    _BUILDERS[name] = builder
    return builder


def _is_builder(value: object) -> bool:
    """Whether this may make a network. A network can be called too, but does not return one."""
    return callable(value) and not isinstance(value, nn.Module)


def _find_builder(name: str) -> Builder:
    if name not in _BUILDERS:
        raise ValueError(
            f"nets.load: received {name!r}{did_you_mean(name, _BUILDERS)}\n"
            f"Expected one of\n{_describe_builders()}\n"
            "or a function of your own as 'package.module:function'"
        )
    return _BUILDERS[name]


def _describe_builders() -> str:
    """One line for each name, with the options of its builder."""
    lines = [f"  {name:9} {_describe_options(builder)}" for name, builder in _BUILDERS.items()]
    return "\n".join(lines)


def _describe_options(builder: Builder) -> str:
    """The builder's parameters with their defaults, as a call would write them."""
    signature = _signature(builder)
    if signature is None:
        return "..."
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return ", ".join(map(str, parameters)) or "no options"


def _signature(builder: Builder) -> inspect.Signature | None:
    """None where Python does not know it, as for some classes written in C."""
    try:
        return inspect.signature(builder)
    except ValueError:
        return None


def _check_options(name: str, builder: Builder, options: Mapping[str, object]) -> None:
    signature = _signature(builder)
    if signature is None:
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        unknown = [option for option in options if option not in signature.parameters]
        suggestion = did_you_mean(unknown[0], signature.parameters) if unknown else ""
        raise TypeError(
            f"nets.load: {name!r} {error}{suggestion}\nIt accepts: {_describe_options(builder)}"
        ) from None


def _import_builder(path: str) -> Any:
    """The value at "package.module:function". The module is run, as by any import."""
    module_name, _, attribute_path = path.partition(":")
    attributes = attribute_path.split(".")
    if not all(part.isidentifier() for part in [*module_name.split("."), *attributes]):
        raise ValueError(f"nets.load: expected 'package.module:function', received {path!r}")

    value = _import_module(module_name)
    for attribute in attributes:
        if not hasattr(value, attribute):
            suggestion = did_you_mean(attribute, dir(value))
            raise ValueError(
                f"nets.load: {path!r}: found no {attribute!r} in {_describe(value)}{suggestion}"
            )
        value = getattr(value, attribute)
    return value


def _import_module(name: str) -> Any:
    try:
        return import_module(name)
    except Exception as error:
        advice = f"`python -c 'import {name}'` must work first"
        # This module itself, or a package above it, may be missing, and not one that it imports.
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            advice = "Put its folder on PYTHONPATH"
        raise ValueError(
            f"nets.load: expected a module {name!r}, importing it raised "
            f"{type(error).__name__}: {error}. {advice}."
        ) from error


def _call_imported(path: str, builder: Builder, options: Mapping[str, object]) -> nn.Module:
    """Calls the user's builder. An error names it: the path may come from a command line."""
    try:
        return builder(**options)
    except Exception as error:
        arguments = [f"{name}={value!r}" for name, value in options.items()]
        raise ValueError(
            f"nets.load: {path!r} raised {type(error).__name__}: {error}; "
            f"it was called with {', '.join(arguments) or 'no options'}"
        ) from error


def _describe(value: object) -> str:
    """What a value is, for an error: "the class ResNet", "a value of type int"."""
    if value is None:
        return "None"
    type_name = type(value).__name__
    name = getattr(value, "__name__", None)
    if name is None:
        return f"a value of type {type_name}"
    kind = "class" if isinstance(value, type) else type_name
    return f"the {kind} {name}"
