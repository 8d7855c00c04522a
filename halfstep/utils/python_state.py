"""What the Python side of modules holds besides parameters: to compare it, and to put it back.

A step that is only tried (recorded, compiled, verified) runs forward once more than the user asked
for. What forward has written into its modules' attributes is taken back by `restore`. What a replay
would not repeat is named by `changes`: a replay runs no Python.
"""

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MAX_DEPTH = 5  # containers inside containers
MAX_ENTRIES = 1000  # of one container: a longer one holds data, which takes long to read

MAX_CALLS = 4  # functions that call functions: a forward, its helper, and two below
MAX_FUNCTIONS = 2000  # of which the surroundings are looked at

_CONTAINERS = (list, dict, set, deque)
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "halfstep"}  # they keep no user's values

# Where torch keeps the hooks of a module and of a parameter.
_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class _Variable(NamedTuple):
    """A global or an enclosing variable that holds a plain value or a tensor."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    value: Any


class PythonState:
    """The attributes of modules as they are now, also inside containers and small objects.

    Roots are modules and functions. Of a function, of a module's forward and of its hooks, and of
    the functions that those call, also what is around them: lists and other containers, counters in
    closures and globals, the object that a method or a callable is of.

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
        self._variables: list[_Variable] = []
        for function in _functions_run_by(roots):
            for name, value in _attached_values(function):
                if isinstance(value, _CONTAINERS) or _is_users_object(value):
                    self._collect(repr(name), value, MAX_DEPTH)
            self._variables += _variables_of(function)

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
        for variable in self._variables:
            variable.set(variable.value)

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
        for variable in self._variables:
            if _differs(variable.get(), variable.value) and repr(variable.name) not in names:
                names.append(repr(variable.name))
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
        elif _is_small_object(value) or _is_users_object(value):
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


def _functions_run_by(roots: Iterable[Any]) -> Iterator[Any]:
    """Forwards, hooks, functions and methods of the user's that a step runs, each once."""
    queue = deque((callee, MAX_CALLS) for root in roots for callee in _callees_of_root(root))
    seen: dict[tuple[int, int], Any] = {}  # with the callee: an id is used again once it is gone
    while queue and len(seen) < MAX_FUNCTIONS:
        callee, calls_left = queue.popleft()
        function = _python_function(callee)
        owner = getattr(callee, "__self__", callee)
        key = (id(function), id(owner))
        if key in seen:
            continue
        seen[key] = callee
        yield callee
        if calls_left > 1:
            queue.extend((inner, calls_left - 1) for inner in _callees_of(callee, function, owner))


def _callees_of_root(root: Any) -> Iterator[Any]:
    if not isinstance(root, nn.Module):
        yield root
        return
    for module in root.modules():
        yield module.forward
        for name in _MODULE_HOOKS:
            yield from getattr(module, name, {}).values()
    for parameter in root.parameters():
        for name in _TENSOR_HOOKS:
            yield from (getattr(parameter, name, None) or {}).values()


def _callees_of(callee: Any, function: FunctionType | None, owner: Any) -> Iterator[Any]:
    """What the code of a function may call: functions around it, and methods of its object."""
    for _, value in _attached_values(callee):
        is_function = isinstance(value, (FunctionType, MethodType, partial))
        if is_function or (_is_users_object(value) and callable(value)):
            yield value
    if function is None or owner is function:
        return
    for name in function.__code__.co_names:
        method = inspect.getattr_static(type(owner), name, None)
        if isinstance(method, FunctionType):
            yield MethodType(method, owner)


def _python_function(callee: Any) -> FunctionType | None:
    """The user's function behind a method, a partial or an object that is called."""
    function: Any = callee
    if isinstance(callee, partial):
        function = callee.func
    elif callable(callee) and not isinstance(callee, (FunctionType, MethodType)):
        function = type(callee).__call__
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or _package(function.__module__) in _LIBRARIES:
        return None
    return function


def _attached_values(callee: Any) -> Iterator[tuple[str, Any]]:
    """What is around a function, what a partial passes to it, and whose method it is."""
    name = getattr(callee, "__name__", type(callee).__name__)
    if isinstance(callee, partial):
        yield from ((f"an argument of {name}", value) for value in callee.args)
        yield from callee.keywords.items()
        yield name, callee.func
    owner = getattr(callee, "__self__", callee)  # also that of list.append
    if not isinstance(owner, nn.Module):
        yield name, owner
    function = _python_function(callee)
    if function is not None:
        yield from values_around(function)


def _variables_of(callee: Any) -> Iterator[_Variable]:
    """The variables around a function whose value code may replace: counters, tensors."""
    function = _python_function(callee)
    if function is None:
        return
    plain = (*_PLAIN_TYPES, tuple, Tensor)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # a cell that is empty
            if isinstance(cell.cell_contents, plain):
                yield _cell_variable(name, cell)
    for name in function.__code__.co_names:
        variables = function.__globals__
        if isinstance(variables.get(name, variables), plain):
            yield _global_variable(name, variables)


def _cell_variable(name: str, cell: CellType) -> _Variable:
    def set_value(value: Any) -> None:
        cell.cell_contents = value

    return _Variable(name, lambda: cell.cell_contents, set_value, cell.cell_contents)


def _global_variable(name: str, variables: dict[str, Any]) -> _Variable:
    def set_value(value: Any) -> None:
        variables[name] = value

    return _Variable(name, lambda: variables.get(name), set_value, variables[name])


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
    """Whether it is an instance of a user's class with attributes of its own, and no function."""
    if isinstance(value, (Tensor, nn.Module, type, *_PLAIN_TYPES)) or callable(value):
        return False
    package = _package(type(value).__module__)
    is_of_user = package not in sys.stdlib_module_names and package != "torch"
    return hasattr(value, "__dict__") and (is_of_user or package == "__main__")


def _is_users_object(value: Any) -> bool:
    """Whether it is an instance of a user's class with attributes, which may be callable."""
    if isinstance(value, (Tensor, nn.Module, type)) or not hasattr(value, "__dict__"):
        return False
    package = _package(type(value).__module__)
    is_of_user = package not in _LIBRARIES or package == "__main__"
    # An optimizer of a user's own has its state where torch's have it.
    return is_of_user and not isinstance(value, torch.optim.Optimizer)


def _package(module_name: str | None) -> str:
    return (module_name or "").partition(".")[0]


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
