"""What the Python side of modules holds besides parameters: to compare it, and to put it back.

A step that is only tried (recorded, compiled, verified) runs forward once more than the user asked
for. What forward has written into its modules' attributes is taken back by `restore`. What a replay
would not repeat is named by `changes`: a replay runs no Python.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any

from torch import Tensor, nn

MAX_DEPTH = 5  # containers inside containers
MAX_ENTRIES = 1000  # of one container: a longer one holds data, which takes long to read

_CONTAINERS = (list, dict, set, deque)
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))


class PythonState:
    """The attributes of modules as they are now, also inside containers and small objects.

    Roots are modules and functions. Of a function, and of a module's forward, also the lists and
    other containers around it, in its closure or among the globals that it names.

    Tensors are remembered by identity, their values are not: those are for whoever tries the step.
    """

    def __init__(self, *roots: Any) -> None:
        # Each container (or the dictionary of an object) once, with its name and what it holds.
        self._contents: dict[int, tuple[str, Any, Any]] = {}
        for module_name, module in _named_modules(roots):
            self._remember(module_name, vars(module))
            self._remember(module_name, module._parameters)
            self._remember(module_name, module._buffers)
            for name, value in vars(module).items():
                if name not in ("_parameters", "_buffers", "_modules"):
                    self._collect(f"{name!r} of {module_name}", value, MAX_DEPTH)
        for name, value in _values_around(roots):
            if isinstance(value, _CONTAINERS):
                self._collect(repr(name), value, MAX_DEPTH)

    def restore(self) -> None:
        """Makes every container hold what it held, in the same order."""
        for _, container, content in self._contents.values():
            if isinstance(container, dict):
                if not _is_same_dict(container, content):
                    container.clear()
                    container.update(content)
            elif isinstance(container, set):
                container.clear()
                container.update(content)
            elif isinstance(content, int):
                del container[content:]
            elif isinstance(container, deque):
                container.clear()
                container.extend(content)
            else:
                container[:] = content

    def changes(self) -> list[str]:
        """The names of what has other entries now, or other numbers and strings.

        A tensor in place of another one is no change: a replay writes into the one that it knows.
        """
        names = []
        for name, container, content in self._contents.values():
            if not _has_changed(container, content):
                continue
            if isinstance(container, dict) and not name.startswith("'"):
                keys = [
                    key for key in {**content, **container} if _key_differs(key, container, content)
                ]
                names += [f"{key!r} of {name}" for key in keys]
            else:
                names.append(name)
        return names

    def _collect(self, name: str, value: Any, depth: int) -> None:
        if depth == 0 or id(value) in self._contents:
            return
        if isinstance(value, _CONTAINERS):
            self._remember(name, value)
            if len(value) > MAX_ENTRIES:
                return
            entries = value.values() if isinstance(value, dict) else value
            for entry in list(entries):
                self._collect(name, entry, depth - 1)
        elif _is_small_object(value):
            self._remember(name, vars(value))
            for entry in list(vars(value).values()):
                self._collect(name, entry, depth - 1)

    def _remember(self, name: str, container: Any) -> None:
        if not isinstance(container, _CONTAINERS):
            return  # what stands in for a dictionary in a TorchScript module
        content: Any = container.copy()
        if isinstance(container, list) and len(container) > MAX_ENTRIES:
            content = len(container)
        self._contents[id(container)] = (name, container, content)


def _named_modules(roots: Iterable[Any]) -> Iterator[tuple[str, nn.Module]]:
    for root in roots:
        if isinstance(root, nn.Module):
            for name, module in root.named_modules():
                yield f"module {name!r}" if name else type(root).__name__, module


def _values_around(roots: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """What forwards and functions take from around them, by name."""
    functions: dict[FunctionType, None] = {}
    for root in roots:
        modules = root.modules() if isinstance(root, nn.Module) else [root]
        for module in modules:
            forward = getattr(module, "forward", module)
            function = getattr(forward, "__func__", forward)
            is_of_torch = getattr(function, "__module__", "").startswith("torch.")
            if isinstance(function, FunctionType) and not is_of_torch:
                functions[function] = None
    for function in functions:
        yield from values_around(function)


def values_around(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The values of a function's closure, and the globals that its code names."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # a cell that is empty
            yield name, cell.cell_contents
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _is_small_object(value: Any) -> bool:
    """Whether it is an instance of a user's class with attributes of its own."""
    if isinstance(value, (Tensor, nn.Module, type, *_PLAIN_TYPES)) or callable(value):
        return False
    package = type(value).__module__.partition(".")[0]
    is_of_user = package not in sys.stdlib_module_names and package != "torch"
    return hasattr(value, "__dict__") and (is_of_user or package == "__main__")


def _is_same_dict(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    if list(now) != list(before):
        return False
    return all(value is before[key] for key, value in now.items())


def _has_changed(container: Any, content: Any) -> bool:
    if isinstance(content, int):
        return len(container) != content
    if len(container) != len(content):
        return True
    if isinstance(container, set):
        return bool(container != content)
    if isinstance(container, dict):
        if container.keys() != content.keys():
            return True
        return any(_differs(container[key], value) for key, value in content.items())
    if isinstance(container, deque):
        pairs = zip(container, content, strict=True)
        return any(now is not before for now, before in pairs)  # one that is full has moved on
    return any(_differs(now, before) for now, before in zip(container, content, strict=True))


def _key_differs(key: Any, now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    if key not in now or key not in before:
        return True
    return _differs(now[key], before[key])


def _differs(now: Any, before: Any) -> bool:
    """Whether a plain value is another one or no longer plain; a container, if one inside is."""
    if now is before:
        return False
    if isinstance(before, (list, dict, set, deque, tuple)):
        return type(now) is not type(before) or _has_changed(now, before)
    if isinstance(before, _PLAIN_TYPES) or isinstance(now, _PLAIN_TYPES):
        # A NaN is a value like any other.
        return type(now) is not type(before) or repr(now) != repr(before)
    return False
