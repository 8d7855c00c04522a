"""manifest.json: what a checkpoint consists of, written last. It carries a seal, its own sha256."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from halfstep.errors import DAMAGED_ADVICE, checkpoint_error

FORMAT, VERSION = "halfstep checkpoint", 1
MANIFEST, TREE, TENSORS = "manifest.json", "tree.json", "tensors.safetensors"
LARGEST = 1 << 20  # bytes of a manifest; a thousand files with long names take a quarter of it
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")  # no separators, no .., nothing hidden
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class File:
    """What a file must be."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The format, who wrote it, and every other file of the checkpoint by name."""

    format: str
    version: int
    halfstep: str
    torch: str
    files: dict[str, File]

    def encode(self) -> bytes:
        """The bytes of manifest.json, the same for equal manifests."""
        content = asdict(self)
        seal = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
        return json.dumps({**content, "seal": seal}, indent=1).encode() + b"\n"


def made(files: dict[str, File]) -> Manifest:
    """The manifest of these files, with the versions at work."""
    import torch

    import halfstep

    return Manifest(FORMAT, VERSION, halfstep.__version__, str(torch.__version__), files)


def parse(path: Path, data: bytes) -> Manifest:
    """The manifest in these bytes: of this format and version, complete, and as its seal says."""
    content = as_json(path, data)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise checkpoint_error(
            path,
            f'"format": "{FORMAT}"',
            "something else",
            "Name the folder of a halfstep checkpoint.",
        )
    _check_version(path, content.get("version"))
    if set(content) != {*(field.name for field in fields(Manifest)), "seal"} or not _are_files(
        content["files"]
    ):
        raise checkpoint_error(
            path,
            "versions, files with size and sha256, and a seal",
            "other entries",
            DAMAGED_ADVICE,
        )
    listed = {name: File(**entry) for name, entry in content["files"].items()}
    manifest = Manifest(FORMAT, VERSION, str(content["halfstep"]), str(content["torch"]), listed)
    if manifest.encode() != data:
        raise checkpoint_error(
            path, "a manifest that agrees with its seal", "an altered one", DAMAGED_ADVICE
        )
    return manifest


def as_json(path: Path, data: bytes) -> Any:
    """The JSON in these bytes, NaN and Infinity refused as the standard does."""
    try:
        return json.loads(data.decode(), parse_constant=_refuse)
    except (
        ValueError,
        RecursionError,
    ) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise checkpoint_error(path, "JSON", f"something else ({error})", DAMAGED_ADVICE) from error


def check_extra(files: Mapping[str, object]) -> None:
    """A ValueError or TypeError unless these may be extra files, by their names on any file system."""
    if len(files) > 1000:
        raise ValueError(
            f"extra_files: expected at most 1000, got {len(files)}. Pack them into one."
        )
    for name, content in files.items():
        if not isinstance(content, bytes):
            advice = "Encode it first: text.encode()."
            raise TypeError(
                f"extra_files[{name!r}]: expected bytes, got {type(content).__name__}. {advice}"
            )
        if not is_file_name(name):
            rule = "1 to 100 letters, digits, '_', '-' and '.', the first no '.' or '-'"
            raise ValueError(
                f"extra_files: expected names of {rule}, got {name!r}. Rename the file."
            )
    lowered = [name.lower() for name in [*files, MANIFEST, TREE, TENSORS]]
    twice = sorted({name for name in lowered if lowered.count(name) > 1})
    if twice:
        raise ValueError(
            f"extra_files: expected each name once, case aside, got {twice} again. Rename the file."
        )


def is_file_name(name: object) -> bool:
    return isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None


def _check_version(path: Path, version: Any) -> None:
    if type(version) is not int or version < 1:
        raise checkpoint_error(path, f"a version of 1 to {VERSION}", repr(version), DAMAGED_ADVICE)
    if version > VERSION:
        came = f"version {version}, from a newer halfstep"
        raise checkpoint_error(
            path,
            f"format version {VERSION} at most",
            came,
            "Upgrade halfstep: pip install -U halfstep.",
        )


def _are_files(files: Any) -> bool:
    if not isinstance(files, dict) or not {TREE, TENSORS} <= set(files) or MANIFEST in files:
        return False
    return all(is_file_name(name) and _is_file(entry) for name, entry in files.items())


def _is_file(entry: Any) -> bool:
    if (
        not isinstance(entry, dict)
        or set(entry) != {"size", "sha256"}
        or not isinstance(entry["sha256"], str)
    ):
        return False
    return (
        type(entry["size"]) is int
        and 0 <= entry["size"] < 1 << 62
        and bool(_HEX.fullmatch(entry["sha256"]))
    )


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
