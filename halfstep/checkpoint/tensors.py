"""Tensors as windows on storages: memory that several tensors share is kept once, and shared again afterwards.

A storage is cut to the bytes between the first and the last one its tensors use, and what lies between their elements
is zero, so that the same values give the same bytes whatever they were a slice of.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
        "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz",
        "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# copied as these, no dtype can miss a kernel and no NaN can change on the way
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True)
class Window:
    """A tensor's place: offset and strides count elements of its dtype."""

    storage: int
    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def itemsize(self) -> int:
        return int(DTYPES[self.dtype].itemsize)

    @property
    def bytes(self) -> tuple[int, int]:
        """The first byte in the storage, and the one after the last; none without elements."""
        if 0 in self.size:
            return 0, 0
        last = self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return self.offset * self.itemsize, (last + 1) * self.itemsize


def refusal(tensor: Tensor) -> tuple[str, str] | None:
    """What keeps the tensor out of a checkpoint, and what to do about it; None when nothing does."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return (
            f"the tensor subclass {type(tensor).__name__}",
            "Save the plain tensors that it is made of.",
        )
    if tensor.layout is not torch.strided:
        return (
            f"a tensor of layout {tensor.layout}",
            "Save tensor.to_dense(), or its indices and values.",
        )
    if tensor.is_quantized:
        return "a quantized tensor", "Save tensor.int_repr() with its scale and zero point."
    if tensor.is_meta:
        return (
            "a meta tensor, which has no values",
            "Give it values first: module.to_empty(device=...).",
        )
    if tensor.dtype not in _NAMES:
        return f"a tensor of {tensor.dtype}", f"Convert it to one of {', '.join(DTYPES)}."
    return None


def lay_out(tensors: Sequence[Tensor]) -> tuple[list[Window], list[Tensor]]:
    """Each tensor's window, and the cut storages in order of first use: uint8 vectors on their own devices, which
    show the tensors' own memory wherever that is dense."""
    plain = [
        tensor.detach().resolve_conj().resolve_neg() for tensor in tensors
    ]  # kept alive: addresses are keys
    numbers: dict[tuple[torch.device, int], int] = {}
    windows = [_window(tensor, numbers) for tensor in plain]
    members: list[list[int]] = [[] for _ in numbers]
    for i, window in enumerate(windows):
        members[window.storage].append(i)
    cut = [_cut([windows[i] for i in group]) for group in members]
    for group, (start, _) in zip(members, cut, strict=True):
        for i in group:
            windows[i] = replace(
                windows[i], offset=windows[i].offset - start // windows[i].itemsize
            )
    groups = zip(members, cut, strict=True)
    return windows, [
        _bytes([(windows[i], plain[i]) for i in group], end - start)
        for group, (start, end) in groups
    ]


def place(window: Window, storage: Tensor) -> Tensor:
    """The tensor that looks at the storage through the window; the window must lie within it."""
    return _through(window, storage, DTYPES[window.dtype])


def label(storage: int) -> str:
    """The name of a storage's bytes among the flat tensors."""
    return f"storage.{storage}"


def _window(tensor: Tensor, numbers: dict[tuple[torch.device, int], int]) -> Window:
    # without elements nothing is shared: such a tensor has a storage of 0 bytes to itself
    address, offset = tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())
    key, offset = (address, offset) if tensor.numel() else (-1 - len(numbers), 0)
    number = numbers.setdefault((tensor.device, key), len(numbers))
    return Window(number, _NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride(), offset)


def _cut(windows: Sequence[Window]) -> tuple[int, int]:
    """The bytes in use; the start divides by every itemsize, so that offsets stay whole elements."""
    spans = [window.bytes for window in windows]
    align = max(window.itemsize for window in windows)
    return min(start for start, _ in spans) // align * align, max(end for _, end in spans)


def _bytes(pairs: list[tuple[Window, Tensor]], count: int) -> Tensor:
    for window, tensor in pairs:
        if window.bytes == (0, count) and _dense(window):
            start = tensor.storage_offset() * window.itemsize
            return _empty(torch.uint8, tensor.device).set_(
                tensor.untyped_storage(), start, (count,), (1,)
            )
    flat = torch.zeros(count, dtype=torch.uint8, device=pairs[0][1].device)
    for window, tensor in pairs:
        raw = _RAW[window.itemsize]
        # one copy of an expanded dimension: torch refuses to write the others
        once = tuple(
            min(n, 1) if s == 0 else n for n, s in zip(window.size, window.stride, strict=True)
        )
        source = tensor.view(raw).as_strided(once, window.stride, tensor.storage_offset())
        _through(replace(window, size=once), flat, raw).copy_(source)
    return flat


def _dense(window: Window) -> bool:
    """Every byte from the first to the last belongs to one element."""
    expected = 1
    for stride, n in sorted(
        (s, n) for n, s in zip(window.size, window.stride, strict=True) if n > 1
    ):
        if stride != expected:
            return False
        expected *= n
    return True


def _through(window: Window, flat: Tensor, dtype: torch.dtype) -> Tensor:
    return _empty(dtype, flat.device).set_(
        flat.untyped_storage(), window.offset, window.size, window.stride
    )


def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)
