"""Checkpoints on the disk: a folder of tensors.safetensors, tree.json, extra files and a manifest.

manifest.json is written last. A path that is no checkpoint is described by what it is instead, by
its first bytes or its file names.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfstep.checkpoint.disk import open_file, write_file, write_folder
from halfstep.checkpoint.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    TENSORS_FILE,
    TREE_FILE,
    FileEntry,
    Manifest,
    check_extra_files,
    make_manifest,
    parse_json,
    parse_manifest,
)
from halfstep.checkpoint.tensors import (
    hash_storages,
    read_storages,
    safetensors_chunks,
    safetensors_length,
)
from halfstep.checkpoint.tree import TreePlan, build_tree, pack, parse_tree
from halfstep.errors import DAMAGED_ADVICE, CheckpointError, checkpoint_error

# Bytes of tree.json and of an extra file, which are read in one piece: some 5 million leaves.
MAX_SMALL_FILE_BYTES = 1 << 28

MANIFEST_ROOM_BYTES = 4096  # what a save expects the manifest to take at most

TORCH_ADVICE = (
    "Read it with torch.load(path, weights_only=True) and give its weights to net.load_state_dict."
)
SAFETENSORS_ADVICE = (
    "Read it with safetensors.torch.load_file(path) and give it to net.load_state_dict."
)
HALFSTEP_ADVICE = "Name the folder of a halfstep checkpoint."
HUGGING_FACE_FILES = {
    "config.json",
    "model.safetensors",
    "pytorch_model.bin",
    "model.safetensors.index.json",
}
PICKLE_PROTOCOLS = (b"\2", b"\3", b"\4", b"\5")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint's tree, its manifest, and the content of its extra files by name."""

    tree: Any
    manifest: Manifest
    files: dict[str, bytes]


def save(
    folder: str | Path,
    tree: object,
    *,
    extra_files: Mapping[str, bytes] | None = None,
    guard: Callable[[], object] | None = None,
) -> Path:
    """Writes the tree as a new checkpoint, complete or not at all, whenever the process dies.

    The same tree gives the same bytes. TypeError or ValueError for what no checkpoint can hold,
    before the disk is touched; CheckpointError for the disk. `guard` is called when all is written,
    before the folder gets its name: what it raises leaves nothing.
    """
    folder = Path(folder)
    extra = dict(extra_files or {})
    check_extra_files(extra)

    # Encode everything but the tensors, which are written from where they are.
    tree_json, vectors = pack(tree)
    tree_bytes = json.dumps(tree_json, separators=(",", ":"), allow_nan=False).encode()
    small_files = {TREE_FILE: tree_bytes, **extra}
    for name, content in small_files.items():
        if len(content) > MAX_SMALL_FILE_BYTES:
            raise ValueError(
                f"{name}: expected at most {MAX_SMALL_FILE_BYTES} bytes, got {len(content)}. "
                "Keep large values in tensors."
            )

    storages = list(vectors.values())
    tensor_bytes = safetensors_length([storage.numel() for storage in storages])
    small_bytes = sum(len(content) for content in small_files.values())
    with write_folder(folder, tensor_bytes + small_bytes + MANIFEST_ROOM_BYTES) as temporary:
        chunks = safetensors_chunks(storages)
        entries = {TENSORS_FILE: write_file(temporary / TENSORS_FILE, chunks)}
        for name, content in small_files.items():
            entries[name] = write_file(temporary / name, [content])
        write_file(temporary / MANIFEST_FILE, [make_manifest(entries).encode()])
        if guard is not None:
            guard()
    return folder


def load(
    folder: str | Path,
    *,
    verify: bool = True,
    device: Callable[[torch.device], torch.device] | None = None,
) -> Loaded:
    """The checkpoint's content, or a CheckpointError.

    `verify=False` leaves out the checksum of the tensors only, for a checkpoint that `latest` has
    just verified. `device` maps the device that a tensor was saved from to the one it goes to.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    plan = _read_tree(folder, manifest)
    extra = _read_extra_files(folder, manifest)
    entry = manifest.files[TENSORS_FILE]
    with open_file(folder / TENSORS_FILE, entry) as file:
        storages = read_storages(file, plan.sizes)
        if verify:
            file.check_hash(entry)
    return Loaded(build_tree(plan, storages, device), manifest, extra)


def verify(folder: str | Path) -> Manifest:
    """Reads and checks all that `load` does, checksums included, in little memory."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    plan = _read_tree(folder, manifest)
    _read_extra_files(folder, manifest)
    entry = manifest.files[TENSORS_FILE]
    with open_file(folder / TENSORS_FILE, entry) as file:
        hash_storages(file, plan.sizes)
        file.check_hash(entry)
    return manifest


def read_extra_file(folder: Path, name: str) -> bytes | None:
    """The content of one extra file, checked by its checksum; None if there is none."""
    manifest = read_manifest(folder)
    if name not in manifest.files:
        return None
    return _read_small_file(folder / name, manifest.files[name])


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder that has exactly the listed files, each of its size.

    No other content is read.
    """
    path = folder / MANIFEST_FILE
    if not folder.is_dir() or not os.path.lexists(path):
        raise _not_a_checkpoint(folder)
    with open_file(path) as file:
        if file.size > MAX_MANIFEST_BYTES:
            raise checkpoint_error(
                path, f"at most {MAX_MANIFEST_BYTES} bytes", f"{file.size}", DAMAGED_ADVICE
            )
        manifest = parse_manifest(path, file.read(file.size))

    _check_file_names(folder, manifest)
    for name, entry in manifest.files.items():
        with open_file(folder / name, entry):
            pass  # opening checks the size
    return manifest


def _check_file_names(folder: Path, manifest: Manifest) -> None:
    try:
        names = set(os.listdir(folder)) - {MANIFEST_FILE}
    except OSError as error:
        reason = error.strerror or str(error)
        raise checkpoint_error(
            folder, "a folder that can be read", reason, DAMAGED_ADVICE
        ) from error

    missing = sorted(set(manifest.files) - names)
    if missing:
        raise checkpoint_error(
            folder, f"the files of its {MANIFEST_FILE}", f"no {', '.join(missing)}", DAMAGED_ADVICE
        )
    unknown = sorted(names - set(manifest.files))
    if unknown:
        raise checkpoint_error(
            folder,
            f"only the files of its {MANIFEST_FILE}",
            f"{', '.join(map(ascii, unknown[:5]))} too",
            "Move what does not belong there out of the folder.",
        )


def _read_tree(folder: Path, manifest: Manifest) -> TreePlan:
    path = folder / TREE_FILE
    content = parse_json(path, _read_small_file(path, manifest.files[TREE_FILE]))
    try:
        return parse_tree(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read_extra_files(folder: Path, manifest: Manifest) -> dict[str, bytes]:
    contents = {}
    for name, entry in manifest.files.items():
        if name not in (TREE_FILE, TENSORS_FILE):
            contents[name] = _read_small_file(folder / name, entry)
    return contents


def _read_small_file(path: Path, entry: FileEntry) -> bytes:
    if entry.size > MAX_SMALL_FILE_BYTES:
        raise checkpoint_error(
            path, f"at most {MAX_SMALL_FILE_BYTES} bytes", f"{entry.size}", DAMAGED_ADVICE
        )
    with open_file(path, entry) as file:
        content = file.read(file.size)
        file.check_hash(entry)
    return content


# Paths that are no checkpoint.


def _not_a_checkpoint(path: Path) -> CheckpointError:
    """The error for a path without a manifest: what it is instead, and what to do with it."""
    try:
        if path.is_file():
            description, advice = _describe_file(path)
        else:
            description, advice = _describe_folder(path)
    except OSError as error:
        description = error.strerror or str(error)
        advice = "Name a folder that can be read."
    expected = f"a checkpoint, a folder with {MANIFEST_FILE}"
    return checkpoint_error(path, expected, description, advice)


def _describe_file(path: Path) -> tuple[str, str]:
    """What a file is by its first bytes, and what to do with it."""
    with path.open("rb") as file:
        head = file.read(16)
    is_part_of_checkpoint = path.name in (MANIFEST_FILE, TREE_FILE, TENSORS_FILE)
    if is_part_of_checkpoint and (path.parent / MANIFEST_FILE).is_file():
        return "one file of it", f"Name its folder: {path.parent}"
    if head.startswith(b"PK"):
        return "a zip file, as torch.save and Lightning write (.pt, .ckpt)", TORCH_ADVICE
    if head[:1] == b"\x80" and head[1:2] in PICKLE_PROTOCOLS:
        return "a pickle, which is never loaded", TORCH_ADVICE
    header_bytes = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and header_bytes < path.stat().st_size:
        return "a bare safetensors file", SAFETENSORS_ADVICE
    if not head:
        return "an empty file", HALFSTEP_ADVICE
    return f"a file that starts with {head[:4].hex(' ')}", HALFSTEP_ADVICE


def _describe_folder(path: Path) -> tuple[str, str]:
    """What a folder is by the names in it, and what to do with it."""
    if not path.exists():
        return "nothing there", HALFSTEP_ADVICE
    names = sorted(os.listdir(path))
    if not names:
        return "an empty folder", HALFSTEP_ADVICE
    if TREE_FILE in names or TENSORS_FILE in names:
        return f"one without {MANIFEST_FILE}, so not a whole one", "Use another checkpoint."
    if HUGGING_FACE_FILES & set(names):
        advice = "Load the network with transformers' from_pretrained(path), then train it."
        return "a Hugging Face folder", advice
    if any(name.endswith(".distcp") for name in names):
        return "a torch.distributed checkpoint", "Read it with torch.distributed.checkpoint.load."
    steps = [name for name in names if name.startswith("step-")]
    if steps:
        return "a folder of checkpoints", f"Name one of them, such as {path / steps[-1]}"
    listed = ", ".join(names[:3])
    if len(names) > 3:
        listed = f"{listed} and more"
    return f"a folder with {listed}", HALFSTEP_ADVICE
