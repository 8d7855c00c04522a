"""Networks by name: one table, the user's own entries included, and builders named as "package.module:function"."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias, TypeVar, overload

from torch import nn

from halfstep.nets.resnet import resnet18, resnet34, resnet50, resnet101, resnet152
from halfstep.nets.small import ffnn, lenet5, mlp
from halfstep.utils.checks import did_you_mean

Builder: TypeAlias = Callable[..., nn.Module]
B = TypeVar("B", bound=Builder)

_TABLE: dict[str, Builder] = {
    "mlp": mlp, "ffnn": ffnn, "lenet5": lenet5, "resnet18": resnet18, "resnet34": resnet34, "resnet50": resnet50,
    "resnet101": resnet101, "resnet152": resnet152,
}  # fmt: skip


def names() -> list[str]:
    """What `load` knows, in the order of registration."""
    return list(_TABLE)


def load(name: str, /, **options: Any) -> nn.Module:
    """A new network, its weights drawn from torch's current seed, on torch's current default device.

    >>> load("resnet18", classes=10).fc.out_features
    10
    """
    if not isinstance(name, str):
        raise TypeError(
            f"nets.load: expected a name, received {type(name).__name__}; names:\n{_table()}"
        )
    own = ":" in name
    builder = _import(name) if own else _find(name)
    _check_options(name, builder, options)
    net = _call(name, builder, options) if own else builder(**options)
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
    """Enter a function or class that makes a network, which comes back unchanged: `@register("tiny")` or a call."""
    if not isinstance(name, str):
        raise TypeError(
            f"nets.register: expected a name first, received {name!r}. Write @nets.register('name')."
        )
    if not name or ":" in name:
        raise ValueError(
            f"nets.register: expected a name without ':', which marks a module's path, received {name!r}"
        )
    if name in _TABLE and not replace:
        raise ValueError(
            f"nets.register: {name!r} is taken. Choose another name, or pass replace=True."
        )
    if builder is ...:
        return lambda given: register(name, given, replace=replace)
    if not _makes(builder):
        expected = f"a function or class that makes {name!r}"
        raise TypeError(
            f"nets.register: expected {expected}, received {_describe(builder)}. Pass it, do not call it."
        )
    _TABLE[name] = builder
    return builder


def _makes(value: object) -> bool:
    """A network can be called too, but what it returns is no network."""
    return callable(value) and not isinstance(value, nn.Module)


def _find(name: str) -> Builder:
    if name not in _TABLE:
        own = "or a function of your own as 'package.module:function'"
        raise ValueError(
            f"nets.load: received {name!r}{did_you_mean(name, _TABLE)}\nExpected one of\n{_table()}\n{own}"
        )
    return _TABLE[name]


def _table() -> str:
    return "\n".join(f"  {name:9} {_accepted(builder)}" for name, builder in _TABLE.items())


def _accepted(builder: Builder) -> str:
    """The builder's arguments with their defaults, as a call would write them."""
    signature = _signature(builder)
    if signature is None:
        return "..."
    return (
        ", ".join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())
        or "no options"
    )


def _signature(builder: Builder) -> inspect.Signature | None:
    """None where Python cannot tell, as for some classes written in C: what they accept shows in the call."""
    try:
        return inspect.signature(builder)
    except ValueError:
        return None


def _check_options(name: str, builder: Builder, options: dict[str, Any]) -> None:
    signature = _signature(builder)
    if signature is None:
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        unknown = next((o for o in options if o not in signature.parameters), "")
        close = did_you_mean(unknown, signature.parameters) if unknown else ""
        raise TypeError(
            f"nets.load: {name!r} {error}{close}\nIt accepts: {_accepted(builder)}"
        ) from None


def _import(path: str) -> Builder:
    """The function that "package.module:function" names; importing the module runs it, as any import does."""
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise ValueError(f"nets.load: expected 'package.module:function', received {path!r}")
    found = _import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(
                f"nets.load: {path!r}: found no {part!r} in {_describe(found)}{did_you_mean(part, dir(found))}"
            )
        found = getattr(found, part)
    if not _makes(found):
        raise TypeError(
            f"nets.load: expected {path!r} to be a function or class, received {_describe(found)}"
        )
    builder: Builder = found
    return builder


def _import_module(name: str) -> Any:
    try:
        return import_module(name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        advice = (
            "Put its folder on PYTHONPATH"
            if missing
            else f"`python -c 'import {name}'` must work first"
        )
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"nets.load: expected a module {name!r}, importing it raised {reason}. {advice}."
        ) from error


def _call(path: str, builder: Builder, options: dict[str, Any]) -> nn.Module:
    """A path may come from a command line, far from the code it names: the error says which builder failed, and how."""
    try:
        return builder(**options)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"nets.load: {path!r} raised {reason}; it was called with {given}"
        ) from error


def _describe(value: object) -> str:
    kind, name = type(value).__name__, getattr(value, "__name__", None)
    if value is None or name is None:
        return "None" if value is None else f"a value of type {kind}"
    return f"the {'class' if isinstance(value, type) else kind} {name}"
