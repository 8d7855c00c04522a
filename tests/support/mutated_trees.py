"""Random changes of a checkpoint's tree, each at one place, as damage with valid checksums."""

import copy
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Path = tuple[str | int, ...]

HUGE_NUMBERS = (10**15, 2**62, 2**80)


def paths_of(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Of every value below the root, containers too."""
    items: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list | tuple):
        items = list(enumerate(tree))
    for key, value in items:
        yield (*path, key)
        yield from paths_of(value, (*path, key))


def value_at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def with_value(tree: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy of the tree with another value at the path."""
    if not path:
        return change(tree)
    key, *rest = path
    if isinstance(tree, dict):
        return {k: with_value(v, tuple(rest), change) if k == key else v for k, v in tree.items()}
    return type(tree)(
        with_value(v, tuple(rest), change) if i == key else v for i, v in enumerate(tree)
    )


def mutate(tree: Any, draws: random.Random) -> tuple[Any, Path, str]:
    """The tree with one change, the path of the value that was changed, and the kind of change."""
    paths = list(paths_of(tree))
    while True:
        path = draws.choice(paths)
        value = value_at(tree, path)
        name, change = draws.choice(MUTATIONS)
        if name in ("delete", "rename"):
            parent = value_at(tree, path[:-1])
            if not isinstance(parent, dict):
                continue
            key = path[-1]
            if name == "delete":
                changed = {k: v for k, v in parent.items() if k != key}
            else:
                changed = {f"{k}_" if k == key else k: v for k, v in parent.items()}
            return with_value(tree, path[:-1], lambda _, c=changed: c), path, name
        new_value = change(copy.copy(value), draws)
        if new_value is not NotImplemented:
            return with_value(tree, path, lambda _, v=new_value: v), path, name


def _other_type(value: Any, draws: random.Random) -> Any:
    others = ["text", 3, 2.5, True, [], {}, [1, 2], {"a": 1}, b"bytes", torch.ones(2), (1, "b")]
    return draws.choice([other for other in others if type(other) is not type(value)])


def _other_shape(value: Any, draws: random.Random) -> Any:
    if not isinstance(value, Tensor):
        return NotImplemented
    shapes = [
        value.reshape(-1)[: value.numel() // 2],
        value.unsqueeze(0),
        torch.cat([value.view(-1)] * 2),
    ]
    return draws.choice([shape for shape in shapes if shape.shape != value.shape]).clone()


def _other_dtype(value: Any, draws: random.Random) -> Any:
    if not isinstance(value, Tensor):
        return NotImplemented
    dtypes = [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool]
    return value.to(draws.choice([dtype for dtype in dtypes if dtype != value.dtype]))


def _negative(value: Any, draws: random.Random) -> Any:
    if isinstance(value, Tensor) and value.dtype != torch.bool and value.numel():
        return -value - 1 if value.dtype != torch.uint8 else NotImplemented
    if isinstance(value, int | float) and not isinstance(value, bool):
        return -value - 1
    return NotImplemented


def _huge(value: Any, draws: random.Random) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.int64:
        return torch.full_like(value, draws.choice(HUGE_NUMBERS[:2]))
    if isinstance(value, int) and not isinstance(value, bool):
        return draws.choice(HUGE_NUMBERS)
    return NotImplemented


def _nan(value: Any, draws: random.Random) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.full_like(value, math.nan)
    if isinstance(value, int | float):
        return math.nan
    return NotImplemented


def _swapped(value: Any, draws: random.Random) -> Any:
    if isinstance(value, list) and len(value) > 1:
        return value[::-1]
    if isinstance(value, dict) and len(value) > 1:
        return dict(zip(value, list(value.values())[::-1], strict=True))
    return NotImplemented


def _extra(value: Any, draws: random.Random) -> Any:
    if isinstance(value, list):
        return [*value, draws.choice([None, 1, "more", torch.ones(1)])]
    if isinstance(value, dict):
        return {**value, draws.choice(["more", 77]): draws.choice([None, 1, torch.ones(1)])}
    return NotImplemented


def _empty(value: Any, draws: random.Random) -> Any:
    if isinstance(value, Tensor) and value.numel():
        return torch.empty(0, dtype=value.dtype)
    if isinstance(value, dict | list | str) and value:
        return type(value)()
    return NotImplemented


MUTATIONS: list[tuple[str, Callable[[Any, random.Random], Any]]] = [
    ("delete", lambda value, draws: value),
    ("rename", lambda value, draws: value),
    ("type", _other_type),
    ("None", lambda value, draws: NotImplemented if value is None else None),
    ("shape", _other_shape),
    ("dtype", _other_dtype),
    ("negative", _negative),
    ("huge", _huge),
    ("NaN", _nan),
    ("swap", _swapped),
    ("extra", _extra),
    ("empty", _empty),
]
