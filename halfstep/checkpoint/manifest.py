"""manifest.json: the list of a checkpoint's files, written last, with a seal: its own sha256."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from halfstep.errors import DAMAGED_ADVICE, checkpoint_error

FORMAT = "halfstep checkpoint"
VERSION = 1

MANIFEST_FILE = "manifest.json"
TREE_FILE = "tree.json"
TENSORS_FILE = "tensors.safetensors"

MAX_EXTRA_FILES = 1000
MAX_MANIFEST_BYTES = 1 << 20  # 1,000 files with long names take a quarter of it
MAX_FILE_BYTES = 1 << 62  # sums of two still fit 64 bits

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")  # no separators, no .., nothing hidden
SHA256_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum that a file must have. The fields are keys of manifest.json."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The format, the versions that wrote it, and every other file of the checkpoint by name."""

    format: str
    version: int
    halfstep: str
    torch: str
    files: dict[str, FileEntry]

    def encode(self) -> bytes:
        """The bytes of manifest.json, the same for equal manifests."""
        content = asdict(self)
        seal = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
        return json.dumps({**content, "seal": seal}, indent=1).encode() + b"\n"


def make_manifest(files: dict[str, FileEntry]) -> Manifest:
    """The manifest of these files, with the versions of halfstep and torch in use."""
    import torch

    import halfstep

    return Manifest(FORMAT, VERSION, halfstep.__version__, str(torch.__version__), files)


def parse_manifest(path: Path, data: bytes) -> Manifest:
    """The manifest in these bytes. CheckpointError unless complete and as its seal says."""
    content = parse_json(path, data)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise checkpoint_error(
            path,
            f'"format": "{FORMAT}"',
            "something else",
            "Name the folder of a halfstep checkpoint.",
        )
    _check_version(path, content.get("version"))

    expected_keys = {field.name for field in fields(Manifest)} | {"seal"}
    if set(content) != expected_keys or not _is_file_table(content["files"]):
        raise checkpoint_error(
            path,
            "versions, files with size and sha256, and a seal",
            "other entries",
            DAMAGED_ADVICE,
        )

    files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
    manifest = Manifest(FORMAT, VERSION, str(content["halfstep"]), str(content["torch"]), files)
    if manifest.encode() != data:
        raise checkpoint_error(
            path, "a manifest that agrees with its seal", "an altered one", DAMAGED_ADVICE
        )
    return manifest


def parse_json(path: Path, data: bytes) -> Any:
    """The JSON value in these bytes. NaN and Infinity are refused, as the standard does."""
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    # UnicodeDecodeError and JSONDecodeError are ValueErrors; deep nesting is a RecursionError.
    except (ValueError, RecursionError) as error:
        raise checkpoint_error(path, "JSON", f"something else ({error})", DAMAGED_ADVICE) from error


def check_extra_files(files: Mapping[str, object]) -> None:
    """ValueError or TypeError unless every file system can hold these as extra files."""
    if len(files) > MAX_EXTRA_FILES:
        raise ValueError(
            f"extra_files: expected at most {MAX_EXTRA_FILES}, got {len(files)}. "
            "Pack them into one."
        )
    for name, content in files.items():
        if not isinstance(content, bytes):
            raise TypeError(
                f"extra_files[{name!r}]: expected bytes, got {type(content).__name__}. "
                "Encode it first: text.encode()."
            )
        if not is_file_name(name):
            raise ValueError(
                "extra_files: expected names of 1 to 100 letters, digits, '_', '-' and '.', "
                f"the first no '.' or '-', got {name!r}. Rename the file."
            )

    # Some file systems do not tell capitals from small letters.
    lowered = [name.lower() for name in [*files, MANIFEST_FILE, TREE_FILE, TENSORS_FILE]]
    duplicates = sorted({name for name in lowered if lowered.count(name) > 1})
    if duplicates:
        raise ValueError(
            f"extra_files: expected each name once, case aside, got {duplicates} again. "
            "Rename the file."
        )


def is_file_name(name: object) -> bool:
    """Whether a checkpoint may contain a file of this name."""
    return isinstance(name, str) and FILE_NAME.fullmatch(name) is not None


def _check_version(path: Path, version: Any) -> None:
    if type(version) is not int or version < 1:
        raise checkpoint_error(path, f"a version of 1 to {VERSION}", repr(version), DAMAGED_ADVICE)
    if version > VERSION:
        raise checkpoint_error(
            path,
            f"format version {VERSION} at most",
            f"version {version}, from a newer halfstep",
            "Upgrade halfstep: pip install -U halfstep.",
        )


def _is_file_table(files: Any) -> bool:
    if not isinstance(files, dict):
        return False
    if MANIFEST_FILE in files or TREE_FILE not in files or TENSORS_FILE not in files:
        return False
    return all(is_file_name(name) and _is_file_entry(entry) for name, entry in files.items())


def _is_file_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or set(entry) != {"size", "sha256"}:
        return False
    size = entry["size"]
    sha256 = entry["sha256"]
    if type(size) is not int or not 0 <= size < MAX_FILE_BYTES:
        return False
    return isinstance(sha256, str) and SHA256_HEX.fullmatch(sha256) is not None


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
