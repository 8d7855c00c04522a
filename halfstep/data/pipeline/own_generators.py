"""Random generators that the user's objects keep in attributes: where they are, and their states.

A data set with `self.rng = numpy.random.default_rng(0)`, a sampler with a `torch.Generator`, a
function that draws from a `random.Random` of its module.
"""

import json
import random
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

Generator: TypeAlias = (
    "torch.Generator | random.Random | np.random.Generator | np.random.RandomState"
)

# How far is looked. Data sets are small objects around large arrays, which are not looked into.
MAX_OBJECTS = 2000
MAX_ITEMS = 64  # of a list, tuple or dict, such as a chain of transforms
MAX_DEPTH = 6

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_LIBRARIES = ("torch", "numpy", "halfstep")  # their functions draw from generators of the process
_LEAVES = (str, bytes, int, float, complex, bool, type(None), Tensor, np.ndarray, type)


def find_generators(parts: dict[str, Any]) -> dict[str, Generator]:
    """The generators in the attributes of some objects, by a path such as "dataset.augment.rng".

    Those of the process are left out: random's, numpy's and torch's modules have them.
    """
    generators: dict[str, Generator] = {}
    seen = _ids_of_global_generators()
    queue = deque((name, part, 0) for name, part in parts.items())
    while queue and len(seen) < MAX_OBJECTS:
        path, value, depth = queue.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _KINDS):
            if not isinstance(value, random.SystemRandom):
                generators[path] = value
        elif depth < MAX_DEPTH:
            queue.extend((f"{path}.{name}", item, depth + 1) for name, item in _items_of(value))
    return generators


def generator_state(generator: Generator) -> Any:
    """The state as tensors, numbers and strings that a checkpoint can hold."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return [version, torch.tensor(words), gauss]
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state(legacy=False)
    else:
        state = generator.bit_generator.state
    return json.dumps(state, default=lambda number: number.tolist())


def set_generator_state(generator: Generator, state: Any) -> None:
    """Sets what `generator_state` returned for a generator of the same kind."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words.tolist()), gauss))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(json.loads(state))
    else:
        generator.bit_generator.state = json.loads(state)


def _items_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object refers to, by name: attributes, items, what a function uses."""
    if isinstance(value, ModuleType | nn.Module):
        return
    if isinstance(value, partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif isinstance(value, FunctionType):
        if (value.__module__ or "").split(".")[0] in _LIBRARIES:
            return
        yield from _names_used(value)
    # Of exactly these types: to go through another one may run code of the user's.
    elif type(value) is dict and len(value) <= MAX_ITEMS:
        yield from ((str(key), item) for key, item in value.items())
    elif type(value) in (list, tuple) and len(value) <= MAX_ITEMS:
        yield from ((str(i), item) for i, item in enumerate(value))
    # A DataLoader's `_iterator` is one pass of persistent workers, not a part of its settings.
    attributes = getattr(value, "__dict__", {})
    yield from ((name, item) for name, item in attributes.items() if name != "_iterator")
    yield from _items_of_slots(value)


def _items_of_slots(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object of a class with `__slots__`, which are in no `__dict__`."""
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if not isinstance(slot, MemberDescriptorType) or base.__module__ == "builtins":
                continue
            with suppress(AttributeError):  # one without a value yet
                yield name, slot.__get__(value)


def _names_used(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads from outside: enclosing variables, defaults, its module's names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    yield "defaults", function.__defaults__
    yield "kwdefaults", function.__kwdefaults__
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _ids_of_global_generators() -> set[int]:
    numpys = np.random.mtrand._rand
    pythons = random._inst
    generators = [torch.default_generator, numpys, pythons]
    return {id(generator) for generator in generators}
