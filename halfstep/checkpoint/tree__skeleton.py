"""The JSON half of a checkpoint, read with suspicion: every number is checked before memory follows it."""

import math
import reprlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from halfstep.checkpoint import tensors as storages
from halfstep.checkpoint import tree__scalars as scalars
from halfstep.checkpoint.tensors import DTYPES, Window
from halfstep.errors import DAMAGED_ADVICE, CheckpointError, checkpoint_error

DEPTH = 100  # levels; Python's own recursion, and json's, ends near 1,000
_PARTS = {"tree", "tensors", "storages"}
_FIELDS = {field.name for field in fields(Window)}
_LARGEST = 1 << 62  # bytes, elements and strides: sums of two still fit torch's int64


@dataclass(frozen=True)
class Plan:
    """A skeleton that was found sound: the storages' sizes in bytes and devices, the windows, the tree as JSON."""

    sizes: list[int]
    devices: list[str]
    windows: list[Window]
    root: Any


def parse(skeleton: Any) -> Plan:
    """The skeleton's tables, each number of them in range and each window within its storage, and a tree that only
    refers to them; a CheckpointError otherwise. Allocates no tensor."""
    if not isinstance(skeleton, Mapping) or set(skeleton) != _PARTS:
        raise _bad("the skeleton", f"an object with {', '.join(sorted(_PARTS))}", _shown(skeleton))
    for part in ("tensors", "storages"):
        if not isinstance(skeleton[part], list):
            raise _bad(part, "a list", _shown(skeleton[part]))
    pairs = [_storage(f"storages[{i}]", entry) for i, entry in enumerate(skeleton["storages"])]
    sizes = [size for size, _ in pairs]
    windows = [
        _window(f"tensors[{i}]", entry, sizes) for i, entry in enumerate(skeleton["tensors"])
    ]
    plan = Plan(sizes, [device for _, device in pairs], windows, skeleton["tree"])
    _node(plan.root, windows)  # the windows themselves stand in for the tensors
    return plan


def build(
    plan: Plan, flats: Sequence[Tensor], device: Callable[[torch.device], torch.device] | None
) -> Any:
    """The tree over these uint8 vectors, each a storage of its own; the tree takes over their memory."""
    held = list(flats)
    if device is not None:
        held = [
            flat.to(device(torch.device(where)))
            for flat, where in zip(held, plan.devices, strict=True)
        ]
    placed = [storages.place(w, held[w.storage]) for w in plan.windows]
    return _node(plan.root, placed)


def _node(node: Any, leaves: Sequence[Any], level: int = 0) -> Any:
    if level > DEPTH:
        raise _bad("tree", f"at most {DEPTH} levels", "more")
    if isinstance(node, list):
        return [_node(item, leaves, level + 1) for item in node]
    if isinstance(node, float) and not math.isfinite(node):
        raise _bad("tree", "a finite number", "one beyond float64")
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if not isinstance(node, dict) or len(node) != 1:
        raise _bad("tree", "an object of one key", _shown(node))
    [(tag, value)] = node.items()
    if tag in scalars.TAGS:
        return _scalar(tag, value)
    if tag == "tensor" and _is_count(value) and value < len(leaves):
        return leaves[value]
    if tag == "tuple" and isinstance(value, list):
        return tuple(_node(item, leaves, level + 1) for item in value)
    if tag == "dict" and isinstance(value, list):
        return _mapping(value, leaves, level + 1)
    raise _bad("tree", "a tagged value", _shown(node))


def _mapping(entries: list[Any], leaves: Sequence[Any], level: int) -> dict[str | int, Any]:
    made: dict[str | int, Any] = {}
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 2:
            raise _bad("tree", "a pair of key and value", _shown(entry))
        key = _node(entry[0], (), level)
        if type(key) not in (str, int) or key in made:
            raise _bad("tree", "keys that are str or int, each once", _shown(entry[0]))
        made[key] = _node(entry[1], leaves, level)
    return made


def _scalar(tag: str, text: Any) -> Any:
    try:
        return scalars.decode(tag, text)
    except (ValueError, TypeError, struct.error) as error:
        raise _bad("tree", f"a value of kind {tag!r}", _shown(text)) from error


def _storage(at: str, entry: Any) -> tuple[int, str]:
    if (
        not isinstance(entry, dict)
        or set(entry) != {"bytes", "device"}
        or not _is_count(entry["bytes"])
    ):
        raise _bad(at, "a size in bytes and a device", _shown(entry))
    try:
        return entry["bytes"], str(torch.device(entry["device"]))
    except (RuntimeError, TypeError) as error:
        raise _bad(at, "a device such as cuda:0", _shown(entry["device"])) from error


def _window(at: str, entry: Any, sizes: list[int]) -> Window:
    if not isinstance(entry, dict) or set(entry) != _FIELDS:
        raise _bad(at, f"an object with {', '.join(sorted(_FIELDS))}", _shown(entry))
    size, stride, dtype = entry["size"], entry["stride"], entry["dtype"]
    if not (
        _is_counts(size)
        and _is_counts(stride)
        and len(size) == len(stride) <= 64
        and _is_count(entry["offset"])
    ):
        raise _bad(
            at, "sizes and strides of 0..2^62, as many of each, and an offset", _shown(entry)
        )
    if math.prod(max(n, 1) for n in size) > _LARGEST:
        raise _bad(at, "at most 2^62 elements", _shown(size))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _bad(at, f"a dtype of {', '.join(DTYPES)}", _shown(dtype))
    window = Window(entry["storage"], dtype, tuple(size), tuple(stride), entry["offset"])
    return _within(at, window, sizes)


def _within(at: str, window: Window, sizes: list[int]) -> Window:
    if not _is_count(window.storage) or window.storage >= len(sizes):
        raise _bad(at, f"one of {len(sizes)} storages", _shown(window.storage))
    if window.bytes[1] > sizes[window.storage]:
        raise _bad(
            at,
            f"a window within {sizes[window.storage]} bytes",
            f"one that ends at {window.bytes[1]}",
        )
    return window


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_counts(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_count, values))


def _shown(value: Any) -> str:
    return reprlib.repr(value)  # bounded in length and depth


def _bad(at: str, expected: str, came: str) -> CheckpointError:
    return checkpoint_error(at, expected, came, DAMAGED_ADVICE)
