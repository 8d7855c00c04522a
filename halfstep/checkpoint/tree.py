"""The grammar of a checkpoint's content: which values fit, and how they become JSON and flat tensors and come back.

A state tree is made of dict (keys str or int), list, tuple, None, bool, int, float, str, bytes and Tensor. An
OrderedDict counts as a dict, a Parameter as the tensor that it is.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from halfstep.checkpoint import tensors as storages
from halfstep.checkpoint import tree__scalars as scalars
from halfstep.checkpoint.tree__scalars import Json, Scalar
from halfstep.checkpoint.tree__skeleton import DEPTH, Plan, build, parse

Path: TypeAlias = tuple[str | int, ...]
_EXPECTED = "dict, list, tuple, None, bool, int, float, str, bytes or Tensor"
_ADVICE = {
    "ndarray": "Save torch.from_numpy(array).",
    "set": "Save sorted(values).",
    "frozenset": "Save sorted(values).",
    "device": "Save str(device).",
    "dtype": "Save str(dtype).",
    "Generator": "Save generator.get_state().",
    "Size": "Save tuple(size).",
    "Counter": "Save dict(counter).",
    "defaultdict": "Save dict(values).",
    "PosixPath": "Save str(path).",
}


def check(tree: object) -> None:
    """A TypeError that names the path of the first value that no checkpoint can hold; copies nothing."""
    _Writer().write(tree, ())


def pack(tree: object) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """The tree as JSON and as uint8 vectors in host memory, one per storage; they may show the tree's own memory, so
    write them before the next change."""
    writer = _Writer()
    root = writer.write(tree, ())
    windows, flats = storages.lay_out(writer.tensors)
    kept: list[Json] = [{"bytes": flat.numel(), "device": str(flat.device)} for flat in flats]
    table = cast(list[Json], [_listed(asdict(window)) for window in windows])
    tensors = {storages.label(i): flat.cpu() for i, flat in enumerate(flats)}
    return {"tree": root, "tensors": table, "storages": kept}, tensors


def unpack(
    skeleton: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    device: Callable[[torch.device], torch.device] | None = None,
) -> Any:
    """A copy of the tree that `pack` took. Tensors lie on the CPU, or where `device` puts what was saved on the device
    given to it; those that shared memory share it again."""
    plan = parse(skeleton)
    return build(plan, [_given(plan, tensors, i) for i in range(len(plan.sizes))], device)


class _Writer:
    """One walk over a tree: numbers the tensors in order of appearance, refuses what does not fit."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._open: set[int] = set()

    def write(self, value: object, path: Path) -> Json:
        if isinstance(value, Tensor):
            return {"tensor": self._number(value, path)}
        if type(value) in (dict, OrderedDict, list, tuple):
            return self._container(
                cast("dict[Any, Any] | list[Any] | tuple[Any, ...]", value), path
            )
        if type(value) not in scalars.KINDS:  # a subclass would come back as another type
            raise _refused(path, _EXPECTED, _named(value), _advice(value))
        if isinstance(value, str):
            _check_text(value, path)
        return scalars.encode(cast(Scalar, value))

    def _container(self, value: dict[Any, Any] | list[Any] | tuple[Any, ...], path: Path) -> Json:
        if id(value) in self._open:
            raise _refused(
                path,
                "a tree",
                f"a {type(value).__name__} that contains itself",
                "Leave that entry out.",
            )
        if len(path) == DEPTH:
            raise _refused(path, f"at most {DEPTH} levels", "more", "Flatten the structure.")
        self._open.add(id(value))
        try:
            if isinstance(value, dict):
                return {
                    "dict": [
                        [self._key(key, path), self.write(v, (*path, key))]
                        for key, v in value.items()
                    ]
                }
            items = [self.write(v, (*path, i)) for i, v in enumerate(value)]
            return {"tuple": items} if isinstance(value, tuple) else items
        finally:
            self._open.remove(id(value))

    def _key(self, key: object, path: Path) -> Json:
        if type(key) not in (str, int):
            raise _refused(
                path,
                "keys that are str or int",
                f"the key {key!r}, a {_named(key)}",
                "Make it str(key).",
            )
        if isinstance(key, str):
            _check_text(key, path)
        return scalars.encode(cast("str | int", key))

    def _number(self, tensor: Tensor, path: Path) -> int:
        found = self._numbers.setdefault(id(tensor), len(self.tensors))
        if found == len(self.tensors):
            if (problem := storages.refusal(tensor)) is not None:
                raise _refused(path, "a dense tensor with values", *problem)
            self.tensors.append(tensor)
        return found


def spelled(path: Path) -> str:
    """A path as one would write it in Python: optimizer.state[3].exp_avg."""
    text = "".join(
        f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in path
    )
    return text.removeprefix(".") or "the tree"


def _given(plan: Plan, tensors: Mapping[str, Tensor], storage: int) -> Tensor:
    name, size = storages.label(storage), plan.sizes[storage]
    flat = tensors.get(name)
    if flat is None or flat.dtype != torch.uint8 or flat.shape != (size,):
        came = "none" if flat is None else f"{flat.dtype} of shape {tuple(flat.shape)}"
        raise ValueError(
            f"tensors: expected {size} uint8 under {name!r}, found {came}. Pass what pack returned."
        )
    return flat.clone()  # a storage of its own, aligned for every dtype


def _check_text(text: str, path: Path) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        advice = "Save the bytes: os.fsencode(name) for a file name."
        raise _refused(path, "text that UTF-8 can hold", f"{text!r}", advice) from error


def _refused(path: Path, expected: str, came: str, advice: str) -> TypeError:
    return TypeError(f"{spelled(path)}: expected {expected}, got {came}. {advice}")


def _named(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _advice(value: object) -> str:
    kind, default = type(value), "Turn it into one of these before it is saved, or leave it out."
    return _ADVICE.get(
        kind.__name__, "Save value.item()." if kind.__module__ == "numpy" else default
    )


def _listed(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()
    }
