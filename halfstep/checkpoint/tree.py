"""A state tree as JSON and flat tensors, and back.

A state tree is made of dict (keys str or int), list, tuple, None, bool, int, float, str, bytes and
Tensor. An OrderedDict counts as a dict, a Parameter as its tensor. In tree.json, what JSON holds
exactly stands for itself. Everything else is an object with one key, its tag: {"tensor": number},
{"tuple": [...]}, {"dict": [[key, value], ...]}, {"bytes": hex digits}, {"int": hex digits} beyond
64 bits, {"float": the 64 bits in hex} if not finite.

Reading trusts nothing: every number is checked before memory is allocated for it.
"""

import math
import reprlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from halfstep.checkpoint.tensors import (
    DTYPES,
    TensorView,
    split_into_storages,
    storage_name,
    view_tensor,
    why_not_savable,
)
from halfstep.errors import DAMAGED_ADVICE, CheckpointError, checkpoint_error

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Scalar: TypeAlias = bool | int | float | str | bytes | None
TreePath: TypeAlias = tuple[str | int, ...]
DeviceMap: TypeAlias = Callable[[torch.device], torch.device]

SCALAR_TYPES = (type(None), bool, int, float, str, bytes)
CONTAINER_TYPES = (dict, OrderedDict, list, tuple)

MAX_DEPTH = 100  # levels; Python's own recursion, and json's, ends near 1,000
MAX_DIMENSIONS = 64  # torch's own limit

# An int beyond 64 bits is written as hex digits. Other JSON readers stop there, and Python's
# conversion to decimal stops at 4,300 digits.
INT64_LIMIT = 1 << 63

MAX_COUNT = 1 << 62  # bytes, elements and strides: sums of two still fit torch's int64

TREE_KEYS = {"tree", "tensors", "storages"}
VIEW_KEYS = {field.name for field in fields(TensorView)}

SAVABLE_TYPES = "dict, list, tuple, None, bool, int, float, str, bytes or Tensor"
DEFAULT_ADVICE = "Turn it into one of these before it is saved, or leave it out."
ADVICE_BY_TYPE = {
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


# Writing.


def check(tree: object) -> None:
    """TypeError that names the first value that no checkpoint can hold. Copies nothing."""
    _TreeWriter().write(tree, ())


def pack(tree: object) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """The tree as JSON, and its storages by name as uint8 vectors in host memory.

    The vectors may be the tree's own memory, so write them before the tree changes.
    """
    writer = _TreeWriter()
    root = writer.write(tree, ())
    views, storages = split_into_storages(writer.tensors)

    storage_table: list[Json] = []
    for storage in storages:
        storage_table.append({"bytes": storage.numel(), "device": str(storage.device)})

    view_table: list[Json] = []
    for view in views:
        entry = asdict(view)
        entry["size"] = list(view.size)
        entry["stride"] = list(view.stride)
        view_table.append(entry)

    vectors = {storage_name(number): storage.cpu() for number, storage in enumerate(storages)}
    return {"tree": root, "tensors": view_table, "storages": storage_table}, vectors


def format_path(path: TreePath) -> str:
    """A path as one would write it in Python: optimizer.state[3].exp_avg."""
    text = ""
    for key in path:
        if isinstance(key, str) and key.isidentifier():
            text += f".{key}"
        else:
            text += f"[{key!r}]"
    return text.removeprefix(".") or "the tree"


class _TreeWriter:
    """Turns a tree into JSON in one walk, and numbers its tensors in order of appearance."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._tensor_numbers: dict[int, int] = {}
        self._open_containers: set[int] = set()

    def write(self, value: object, path: TreePath) -> Json:
        if isinstance(value, Tensor):
            return {"tensor": self._tensor_number(value, path)}
        if type(value) in CONTAINER_TYPES:
            container = cast("dict[Any, Any] | list[Any] | tuple[Any, ...]", value)
            return self._write_container(container, path)
        # The exact type: a subclass would come back as another type.
        if type(value) not in SCALAR_TYPES:
            raise _unsavable(path, SAVABLE_TYPES, _type_name(value), _advice_for(value))
        if isinstance(value, str):
            _check_utf8(value, path)
        return encode_scalar(cast(Scalar, value))

    def _write_container(
        self, container: dict[Any, Any] | list[Any] | tuple[Any, ...], path: TreePath
    ) -> Json:
        if id(container) in self._open_containers:
            received = f"a {type(container).__name__} that contains itself"
            raise _unsavable(path, "a tree", received, "Leave that entry out.")
        if len(path) == MAX_DEPTH:
            raise _unsavable(path, f"at most {MAX_DEPTH} levels", "more", "Flatten the structure.")

        self._open_containers.add(id(container))
        try:
            items: list[Json] = []
            if isinstance(container, dict):
                for key, value in container.items():
                    items.append([self._write_key(key, path), self.write(value, (*path, key))])
                return {"dict": items}
            for index, value in enumerate(container):
                items.append(self.write(value, (*path, index)))
            if isinstance(container, tuple):
                return {"tuple": items}
            return items
        finally:
            self._open_containers.remove(id(container))

    def _write_key(self, key: object, path: TreePath) -> Json:
        if type(key) not in (str, int):
            received = f"the key {key!r}, a {_type_name(key)}"
            raise _unsavable(path, "keys that are str or int", received, "Make it str(key).")
        if isinstance(key, str):
            _check_utf8(key, path)
        return encode_scalar(cast("str | int", key))

    def _tensor_number(self, tensor: Tensor, path: TreePath) -> int:
        number = self._tensor_numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            problem = why_not_savable(tensor)
            if problem is not None:
                received, advice = problem
                raise _unsavable(path, "a dense tensor with values", received, advice)
            self.tensors.append(tensor)
        return number


def _check_utf8(text: str, path: TreePath) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        advice = "Save the bytes: os.fsencode(name) for a file name."
        raise _unsavable(path, "text that UTF-8 can hold", f"{text!r}", advice) from error


def _unsavable(path: TreePath, expected: str, received: str, advice: str) -> TypeError:
    return TypeError(f"{format_path(path)}: expected {expected}, got {received}. {advice}")


def _type_name(value: object) -> str:
    value_type = type(value)
    if value_type.__module__ == "builtins":
        return value_type.__name__
    return f"{value_type.__module__}.{value_type.__name__}"


def _advice_for(value: object) -> str:
    value_type = type(value)
    if value_type.__name__ in ADVICE_BY_TYPE:
        return ADVICE_BY_TYPE[value_type.__name__]
    if value_type.__module__ == "numpy":
        return "Save value.item()."
    return DEFAULT_ADVICE


# Scalars, to the bit.


def encode_scalar(value: Scalar) -> Json:
    """The value as JSON. A str must be text that UTF-8 can hold."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}  # a NaN has a sign and a payload
    if isinstance(value, int) and not -INT64_LIMIT <= value < INT64_LIMIT:
        return {"int": hex(value)}
    return value


def decode_scalar(tag: str, text: str) -> Scalar:
    """The value of a tagged scalar. ValueError unless it is exactly what `encode_scalar` writes."""
    value = SCALAR_DECODERS[tag](text)
    if encode_scalar(value) != {tag: text}:
        raise ValueError("a value that is never written so")
    return value


SCALAR_DECODERS: dict[str, Callable[[str], Scalar]] = {
    "bytes": bytes.fromhex,
    "float": lambda text: float(struct.unpack(">d", bytes.fromhex(text))[0]),
    "int": lambda text: int(text, 16),  # base 16 has no limit of digits
}


# Reading.


@dataclass(frozen=True)
class TreePlan:
    """The content of a tree.json that was checked: storages, tensors, and the tree as JSON."""

    sizes: list[int]
    """Bytes of each storage."""
    devices: list[str]
    """The device that each storage was saved from."""
    views: list[TensorView]
    root: Any


def unpack(
    skeleton: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    device: DeviceMap | None = None,
) -> Any:
    """A copy of the tree that was given to `pack`, from the two values that it returned.

    Tensors are on the CPU, or where `device` maps the device they were saved from. Those that
    shared memory share it again.
    """
    plan = parse_tree(skeleton)
    storages = []
    for number, size in enumerate(plan.sizes):
        name = storage_name(number)
        vector = tensors.get(name)
        if vector is None:
            raise _wrong_vector(name, size, "none")
        if vector.dtype != torch.uint8 or vector.shape != (size,):
            received = f"{vector.dtype} of shape {tuple(vector.shape)}"
            raise _wrong_vector(name, size, received)
        storages.append(vector.clone())  # memory of its own, aligned for every dtype
    return build_tree(plan, storages, device)


def parse_tree(content: Any) -> TreePlan:
    """The checked content of a tree.json. CheckpointError if something in it is wrong.

    Every number is in range, every tensor lies within its storage, and the tree refers to existing
    tensors only. No tensor is allocated.
    """
    if not isinstance(content, Mapping) or set(content) != TREE_KEYS:
        expected = f"an object with {', '.join(sorted(TREE_KEYS))}"
        raise _damaged("the skeleton", expected, content)
    for table in ("tensors", "storages"):
        if not isinstance(content[table], list):
            raise _damaged(table, "a list", content[table])

    sizes = []
    devices = []
    for i, entry in enumerate(content["storages"]):
        size, device = _parse_storage(f"storages[{i}]", entry)
        sizes.append(size)
        devices.append(device)

    views = []
    for i, entry in enumerate(content["tensors"]):
        views.append(_parse_view(f"tensors[{i}]", entry, sizes))

    # Walk through the tree once to check it, with the views in place of the tensors.
    root = content["tree"]
    _build_node(root, views)
    return TreePlan(sizes, devices, views, root)


def build_tree(plan: TreePlan, storages: Sequence[Tensor], device: DeviceMap | None) -> Any:
    """The tree over these storages, uint8 vectors whose memory it takes over."""
    placed = list(storages)
    if device is not None:
        for i, saved_from in enumerate(plan.devices):
            placed[i] = placed[i].to(device(torch.device(saved_from)))
    tensors = [view_tensor(view, placed[view.storage]) for view in plan.views]
    return _build_node(plan.root, tensors)


def _build_node(node: Any, tensors: Sequence[Any], depth: int = 0) -> Any:
    """The value of a JSON node; `tensors` are what its tensor numbers refer to."""
    if depth > MAX_DEPTH:
        raise checkpoint_error("tree", f"at most {MAX_DEPTH} levels", "more", DAMAGED_ADVICE)
    if isinstance(node, list):
        return [_build_node(item, tensors, depth + 1) for item in node]
    if isinstance(node, float) and not math.isfinite(node):
        raise checkpoint_error("tree", "a finite number", "one beyond float64", DAMAGED_ADVICE)
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if not isinstance(node, dict) or len(node) != 1:
        raise _damaged("tree", "an object of one key", node)

    [(tag, value)] = node.items()
    if tag in SCALAR_DECODERS:
        try:
            return decode_scalar(tag, value)
        except (ValueError, TypeError, struct.error) as error:
            raise _damaged("tree", f"a value of kind {tag!r}", value) from error
    if tag == "tensor" and _is_count(value) and value < len(tensors):
        return tensors[value]
    if tag == "tuple" and isinstance(value, list):
        return tuple(_build_node(item, tensors, depth + 1) for item in value)
    if tag == "dict" and isinstance(value, list):
        return _build_dict(value, tensors, depth + 1)
    raise _damaged("tree", "a tagged value", node)


def _build_dict(entries: list[Any], tensors: Sequence[Any], depth: int) -> dict[str | int, Any]:
    result: dict[str | int, Any] = {}
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 2:
            raise _damaged("tree", "a pair of key and value", entry)
        key = _build_node(entry[0], (), depth)
        if type(key) not in (str, int) or key in result:
            raise _damaged("tree", "keys that are str or int, each once", entry[0])
        result[key] = _build_node(entry[1], tensors, depth)
    return result


def _parse_storage(name: str, entry: Any) -> tuple[int, str]:
    """Size in bytes and device of a storage."""
    if not isinstance(entry, dict) or set(entry) != {"bytes", "device"}:
        raise _damaged(name, "a size in bytes and a device", entry)
    if not _is_count(entry["bytes"]):
        raise _damaged(name, "a size in bytes and a device", entry)
    try:
        return entry["bytes"], str(torch.device(entry["device"]))
    except (RuntimeError, TypeError) as error:
        raise _damaged(name, "a device such as cuda:0", entry["device"]) from error


def _parse_view(name: str, entry: Any, sizes: list[int]) -> TensorView:
    """A tensor's view, checked to lie within its storage."""
    if not isinstance(entry, dict) or set(entry) != VIEW_KEYS:
        raise _damaged(name, f"an object with {', '.join(sorted(VIEW_KEYS))}", entry)

    # Shape.
    size = entry["size"]
    stride = entry["stride"]
    offset = entry["offset"]
    if not (_is_count_list(size) and _is_count_list(stride) and _is_count(offset)) or not (
        len(size) == len(stride) <= MAX_DIMENSIONS
    ):
        expected = "sizes and strides of 0..2^62, as many of each, and an offset"
        raise _damaged(name, expected, entry)
    if math.prod(max(length, 1) for length in size) > MAX_COUNT:
        raise _damaged(name, "at most 2^62 elements", size)

    # Dtype.
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _damaged(name, f"a dtype of {', '.join(DTYPES)}", dtype)

    # Storage.
    storage = entry["storage"]
    if not _is_count(storage) or storage >= len(sizes):
        raise _damaged(name, f"one of {len(sizes)} storages", storage)
    view = TensorView(storage, dtype, tuple(size), tuple(stride), offset)
    _, end = view.byte_range
    if end > sizes[storage]:
        expected = f"a window within {sizes[storage]} bytes"
        raise checkpoint_error(name, expected, f"one that ends at {end}", DAMAGED_ADVICE)
    return view


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _is_count_list(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_count, values))


def _damaged(name: str, expected: str, value: Any) -> CheckpointError:
    """The error for a value in tree.json. It is shown in bounded length and depth."""
    return checkpoint_error(name, expected, reprlib.repr(value), DAMAGED_ADVICE)


def _wrong_vector(name: str, size: int, received: str) -> ValueError:
    return ValueError(
        f"tensors: expected {size} uint8 under {name!r}, found {received}. Pass what pack returned."
    )
