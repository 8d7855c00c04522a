"""Named tensors in one safetensors file, written piece by piece.

The package safetensors could write it, but not under a temporary name that later writes clean up,
and it refuses tensors that share memory, so that each would have to be copied first. The bytes are
those that the package writes.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from halfstep.checkpoint.tensors import CHUNK_BYTES
from halfstep.utils.atomic_files import write_chunks

# The format's name of each dtype, in the order in which the package writes them.
SAFETENSORS_DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPE_RANKS = {dtype: rank for rank, dtype in enumerate(SAFETENSORS_DTYPES)}


def write_safetensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes the tensors, whole or not at all; those that share memory once for each name.

    Needs the memory of one tensor more, where one is not contiguous or not on the host.
    """
    _check_tensors(path, tensors)
    names = sorted(tensors, key=lambda name: (DTYPE_RANKS[tensors[name].dtype], name))
    ordered = {name: tensors[name] for name in names}
    write_chunks(path, _file_chunks(ordered, metadata))


def _check_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """ValueError for what the format cannot hold, before the disk is touched."""
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS_DTYPES:
            received = f"{tensor.dtype} in {name}"
        elif tensor.layout is not torch.strided:
            received = f"{name} of layout {tensor.layout}"
        elif tensor.is_meta:
            received = f"{name} on the device meta, where it has no values"
        else:
            continue
        raise ValueError(
            f"{path}: expected dense tensors of dtypes that safetensors knows, got {received}. "
            "A Checkpoint, or torch.save, can hold more."
        )


def _file_chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The file from start to end, one tensor after the other."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text

    for tensor in tensors.values():
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        memory = plain.reshape(-1).view(torch.uint8).numpy().data
        for position in range(0, len(memory), CHUNK_BYTES):
            yield memory[position : position + CHUNK_BYTES]
