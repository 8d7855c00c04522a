"""Tensors as views of storages, and the file tensors.safetensors that holds the storages.

Memory that several tensors share is saved once, and is shared again after loading. A storage is cut
to the bytes between the first and the last one that its tensors use, and bytes between their
elements are zero, so that the same values give the same file whatever they were a slice of.

The file's format is a length (8 bytes, little-endian), a JSON header padded with spaces to 8 bytes,
and the data. The package safetensors could read and write it, but hides which error the disk gave
and needs a second pass for the checksum. A reader knows every size beforehand, so the header must
equal, byte for byte, the one that a writer would make.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from halfstep.checkpoint.disk import HashedReader
from halfstep.errors import DAMAGED_ADVICE, CheckpointError, checkpoint_error

DTYPE_NAMES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}

# Elements are copied as these, by itemsize: no dtype can miss a kernel, and no NaN can change.
COPY_DTYPES = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}

CHUNK_BYTES = 1 << 22  # bytes that are written or read, then hashed, at a time


@dataclass(frozen=True)
class TensorView:
    """Where a tensor lies in its storage. The fields are keys of tree.json.

    Offset and strides count elements of the dtype.
    """

    storage: int
    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def itemsize(self) -> int:
        return int(DTYPES[self.dtype].itemsize)

    @property
    def byte_range(self) -> tuple[int, int]:
        """The first byte in the storage and the one after the last; (0, 0) without elements."""
        if 0 in self.size:
            return 0, 0
        last = self.offset
        for length, stride in zip(self.size, self.stride, strict=True):
            last += (length - 1) * stride
        return self.offset * self.itemsize, (last + 1) * self.itemsize


def why_not_savable(tensor: Tensor) -> tuple[str, str] | None:
    """What keeps a tensor out of a checkpoint, and what to do about it; None if nothing does."""
    if type(tensor) not in (Tensor, nn.Parameter):
        problem = f"the tensor subclass {type(tensor).__name__}"
        return problem, "Save the plain tensors that it is made of."
    if tensor.layout is not torch.strided:
        problem = f"a tensor of layout {tensor.layout}"
        return problem, "Save tensor.to_dense(), or its indices and values."
    if tensor.is_quantized:
        return "a quantized tensor", "Save tensor.int_repr() with its scale and zero point."
    if tensor.is_meta:
        problem = "a meta tensor, which has no values"
        return problem, "Give it values first: module.to_empty(device=...)."
    if tensor.dtype not in NAME_OF_DTYPE:
        problem = f"a tensor of {tensor.dtype}"
        return problem, f"Convert it to one of {', '.join(DTYPES)}."
    return None


def split_into_storages(tensors: Sequence[Tensor]) -> tuple[list[TensorView], list[Tensor]]:
    """One view for each tensor, and the storages in order of first use, cut to the bytes in use.

    A storage is a uint8 vector on its own device. Where the tensors are dense, it is their memory.
    """
    # In a list, so that they stay alive: their addresses identify the storages.
    plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
    storage_numbers: dict[tuple[torch.device, int], int] = {}
    views = [_view_of(tensor, storage_numbers) for tensor in plain]

    members: list[list[int]] = [[] for _ in storage_numbers]
    for i, view in enumerate(views):
        members[view.storage].append(i)

    # Cut each storage, and count the offsets of its tensors from the cut.
    storages = []
    for indices in members:
        start, end = _bytes_in_use([views[i] for i in indices])
        for i in indices:
            offset = views[i].offset - start // views[i].itemsize
            views[i] = replace(views[i], offset=offset)
        storage_views = [views[i] for i in indices]
        storage_tensors = [plain[i] for i in indices]
        storages.append(_storage_bytes(storage_views, storage_tensors, end - start))
    return views, storages


def view_tensor(view: TensorView, storage: Tensor) -> Tensor:
    """The tensor that a view describes, over this storage. The view must lie within it."""
    return _strided_tensor(view, storage, DTYPES[view.dtype])


def storage_name(number: int) -> str:
    """The name of a storage in tensors.safetensors."""
    return f"storage.{number}"


def _view_of(tensor: Tensor, storage_numbers: dict[tuple[torch.device, int], int]) -> TensorView:
    address = tensor.untyped_storage().data_ptr()
    offset = int(tensor.storage_offset())
    if tensor.numel() == 0:
        # Without elements nothing is shared: such a tensor has a storage of 0 bytes of its own.
        address = -1 - len(storage_numbers)
        offset = 0
    number = storage_numbers.setdefault((tensor.device, address), len(storage_numbers))
    dtype = NAME_OF_DTYPE[tensor.dtype]
    return TensorView(number, dtype, tuple(tensor.shape), tensor.stride(), offset)


def _bytes_in_use(views: Sequence[TensorView]) -> tuple[int, int]:
    """The bytes that views of one storage use. Every itemsize divides the start, so that offsets
    stay whole elements."""
    ranges = [view.byte_range for view in views]
    alignment = max(view.itemsize for view in views)
    first = min(start for start, _ in ranges)
    last = max(end for _, end in ranges)
    return first // alignment * alignment, last


def _storage_bytes(
    views: Sequence[TensorView], tensors: Sequence[Tensor], byte_count: int
) -> Tensor:
    """The bytes of a cut storage, as a uint8 vector."""
    # One dense tensor covers them all: its memory is the vector.
    for view, tensor in zip(views, tensors, strict=True):
        if view.byte_range == (0, byte_count) and _is_dense(view):
            start = tensor.storage_offset() * view.itemsize
            vector = _empty_tensor(torch.uint8, tensor.device)
            return vector.set_(tensor.untyped_storage(), start, (byte_count,), (1,))

    # Otherwise copy the elements, with zeros between them.
    vector = torch.zeros(byte_count, dtype=torch.uint8, device=tensors[0].device)
    for view, tensor in zip(views, tensors, strict=True):
        copy_dtype = COPY_DTYPES[view.itemsize]
        # One copy along an expanded dimension: torch refuses to write the others.
        size = []
        for length, stride in zip(view.size, view.stride, strict=True):
            size.append(min(length, 1) if stride == 0 else length)
        source = tensor.view(copy_dtype).as_strided(size, view.stride, tensor.storage_offset())
        target = _strided_tensor(replace(view, size=tuple(size)), vector, copy_dtype)
        target.copy_(source)
    return vector


def _is_dense(view: TensorView) -> bool:
    """Whether every byte from the first to the last belongs to exactly one element."""
    dimensions = []
    for length, stride in zip(view.size, view.stride, strict=True):
        if length > 1:
            dimensions.append((stride, length))

    expected_stride = 1
    for stride, length in sorted(dimensions):
        if stride != expected_stride:
            return False
        expected_stride *= length
    return True


def _strided_tensor(view: TensorView, storage: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = _empty_tensor(dtype, storage.device)
    return tensor.set_(storage.untyped_storage(), view.offset, view.size, view.stride)


def _empty_tensor(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


# The file tensors.safetensors.


def safetensors_header(sizes: Sequence[int]) -> bytes:
    """What stands before the data of uint8 vectors of these sizes."""
    entries = {}
    start = 0
    for number, size in enumerate(sizes):
        end = start + size
        entry = {"dtype": "U8", "shape": [size], "data_offsets": [start, end]}
        entries[storage_name(number)] = entry
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def safetensors_chunks(storages: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    """The file from start to end. The data are views of the storages' own memory."""
    yield safetensors_header([storage.numel() for storage in storages])
    for storage in storages:
        memory = storage.numpy().data
        for start in range(0, len(memory), CHUNK_BYTES):
            yield memory[start : start + CHUNK_BYTES]


def safetensors_length(sizes: Sequence[int]) -> int:
    """Bytes of the file."""
    return len(safetensors_header(sizes)) + sum(sizes)


def read_storages(file: HashedReader, sizes: Sequence[int]) -> list[Tensor]:
    """The storages in the file, each in memory of its own."""
    _check_header(file, sizes)
    storages = []
    for size in sizes:
        storage = _allocate(file, size)
        memory = storage.numpy().data
        for start in range(0, size, CHUNK_BYTES):
            file.read_into(memory[start : start + CHUNK_BYTES])
        storages.append(storage)
    return storages


def hash_storages(file: HashedReader, sizes: Sequence[int]) -> None:
    """Reads the whole file for its hash, and keeps nothing."""
    _check_header(file, sizes)
    remaining = sum(sizes)
    buffer = memoryview(bytearray(min(CHUNK_BYTES, remaining)))
    while remaining:
        byte_count = min(remaining, CHUNK_BYTES)
        file.read_into(buffer[:byte_count])
        remaining -= byte_count


def _check_header(file: HashedReader, sizes: Sequence[int]) -> None:
    """Raises unless the file has the length and the header that these sizes give.

    This comes before any memory is allocated for the sizes.
    """
    expected_length = safetensors_length(sizes)
    if file.size != expected_length:
        raise checkpoint_error(
            file.path,
            f"{expected_length} bytes, as tree.json has them",
            f"{file.size}",
            DAMAGED_ADVICE,
        )
    expected_header = safetensors_header(sizes)
    if file.read(len(expected_header)) != expected_header:
        raise checkpoint_error(
            file.path,
            "the safetensors header that tree.json asks for",
            "another one",
            DAMAGED_ADVICE,
        )


def _allocate(file: HashedReader, size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    except (RuntimeError, MemoryError) as error:
        advice = "Load it on a machine with more memory."
        raise CheckpointError(
            f"{file.path}: expected memory for {size} bytes, found less. {advice}"
        ) from error
