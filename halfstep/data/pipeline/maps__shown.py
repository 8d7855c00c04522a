"""A user's function or transform as text that is the same in every process, to compare pipelines by."""

import re
from functools import partial
from typing import Any

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def shown(operation: Any) -> str:
    """A function by its name, a partial with its arguments, an object by a repr of its own or else by its class."""
    if isinstance(operation, partial):
        given = [_plain(value) for value in operation.args]
        given += [f"{name}={_plain(value)}" for name, value in operation.keywords.items()]
        return f"partial({', '.join([shown(operation.func), *given])})"
    name = getattr(operation, "__qualname__", None)
    if isinstance(name, str):
        return name
    kind: Any = type(operation)
    if kind.__repr__ is object.__repr__:
        return str(kind.__qualname__)
    return re.sub(
        r" at 0x[0-9a-fA-F]+", "", repr(operation)
    )  # an address is another one in the next process


def _plain(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(_plain, value))})"
    return repr(value) if isinstance(value, _PLAIN) else shown(value)
