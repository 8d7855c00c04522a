"""Weights in a file of torch.save, which any program of PyTorch reads.

Such a file is a pickle. It is read by torch's restricted reader, which makes tensors and plain
values of it and runs no code, and refuses whatever else it names.
"""

import errno
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from halfstep.utils.atomic_files import atomic_file
from halfstep.utils.text import first_line

# How such a file begins: a zip archive, or before torch 1.6 a pickle.
FIRST_BYTES = (b"PK\x03\x04", b"\x80\x02")

# Files of programs are zip archives too, with one of these names inside.
PROGRAM_FILES = ("/code/", "/constants.pkl", "/archive_format", "/models/")

# Where programs of PyTorch keep the weights in a larger file.
USUAL_KEYS = ("state_dict", "model_state_dict", "model", "net", "weights")


def write_torch_file(path: str | Path, net: nn.Module) -> None:
    """Writes `net.state_dict()` with torch.save, on the host, whole or not at all.

    `torch.load(path, weights_only=True)` reads it, on machines without a GPU too. Tied weights stay
    one tensor.
    """
    state = net.state_dict()
    _check_can_be_read_back(path, state)
    copies: dict[Any, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = _on_host(value, copies)
    with atomic_file(path) as file:
        writer: Any = _ErrorKeepingFile(file)
        try:
            torch.save(state, writer)
        except RuntimeError:
            if writer.error is not None:
                raise writer.error from None
            raise


class _ErrorKeepingFile:
    """A file that remembers why a write failed: torch raises an error that does not say it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def _check_can_be_read_back(path: str | Path, state: Mapping[str, Any]) -> None:
    """ValueError for values that the restricted reader would refuse, before the disk is touched."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            if value.is_meta:
                raise ValueError(
                    f"{path}: expected tensors with values, got {name} on the device meta"
                )
            continue
        memory = io.BytesIO()
        try:
            torch.save(value, memory)
            memory.seek(0)
            torch.load(memory, weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{path}: expected tensors and plain values, got {type(value).__name__} as {name}, "
                "which torch.load(weights_only=True) does not read back. A .safetensors file holds "
                "the tensors alone"
            ) from error


def _on_host(tensor: Tensor, copies: dict[Any, Tensor]) -> Tensor:
    """The tensor on the host. Two names of one tensor are one tensor there too."""
    if tensor.device.type == "cpu" or tensor.layout != torch.strided:
        return tensor.cpu()
    shape = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
    place = (tensor.device, tensor.data_ptr(), *shape)
    if place not in copies:
        copies[place] = tensor.cpu()
    return copies[place]


def is_torch_file(path: Path) -> bool:
    """Whether a file begins as those of torch.save do."""
    with path.open("rb") as file:
        return file.read(4).startswith(FIRST_BYTES)


def read_torch_file(path: Path) -> dict[str, Any]:
    """The state_dict in a file of torch.save, on the host; ValueError for anything else."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # A cut archive seeks before its start, which the system calls an invalid argument.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise ValueError(f"{path}: {_reason_unread(path, error)}. Nothing was loaded") from error

    if not isinstance(content, Mapping):
        raise ValueError(
            f"{path}: expected a state_dict, tensors by name, found {type(content).__name__}; "
            "save net.state_dict(). Nothing was loaded"
        )
    has_tensors = any(isinstance(value, Tensor) for value in content.values())
    inner = [key for key in USUAL_KEYS if isinstance(content.get(key), Mapping)]
    if inner and not has_tensors:
        raise ValueError(
            f"{path}: expected a state_dict, found a larger file that has one as {inner[0]!r}: "
            f"model.load(torch.load({path.name!r}, weights_only=True)[{inner[0]!r}]). "
            "Nothing was loaded"
        )
    return dict(content)


def _reason_unread(path: Path, error: Exception) -> str:
    if _is_program(path):
        return (
            "expected weights, found a program (torch.jit.save or torch.export.save); save the "
            "weights of its network: torch.save(net.state_dict(), 'weights.pt')"
        )
    if "Unsupported global" in str(error) or "Unsupported operand" in str(error):
        return (
            "expected tensors by name, found other Python objects beside them, such as a whole "
            "network, which would run code to load; where it was made, save the weights alone: "
            "torch.save(net.state_dict(), 'weights.pt')"
        )
    return f"expected a file of torch.save, found a damaged one or another kind ({_short(error)})"


def _is_program(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False
    return any(part in f"/{name}" for name in names for part in PROGRAM_FILES)


def _short(error: Exception) -> str:
    return first_line(error)[:120].rstrip(". ")
