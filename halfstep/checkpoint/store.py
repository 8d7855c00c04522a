"""Checkpoints on the disk: a folder of tensors.safetensors, tree.json, extra files, and manifest.json written last."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfstep.checkpoint import (
    store__foreign as foreign,
)
from halfstep.checkpoint import (
    tensors__container as container,
)
from halfstep.checkpoint import (
    tree__skeleton as skeleton,
)
from halfstep.checkpoint.disk import writing
from halfstep.checkpoint.disk__files import opened, write
from halfstep.checkpoint.manifest import (
    LARGEST,
    MANIFEST,
    TENSORS,
    TREE,
    File,
    Manifest,
    as_json,
    check_extra,
    made,
)
from halfstep.checkpoint.manifest import parse as parse_manifest
from halfstep.checkpoint.tree import pack
from halfstep.checkpoint.tree__skeleton import Plan
from halfstep.errors import DAMAGED_ADVICE, CheckpointError, checkpoint_error

LARGEST_FILE = (
    1 << 28
)  # bytes of tree.json and of an extra file, which are read whole: some five million leaves


@dataclass(frozen=True)
class Loaded:
    """A checkpoint's tree, its manifest, and the content of its extra files by name."""

    tree: Any
    manifest: Manifest
    files: dict[str, bytes]


def save(
    folder: str | Path, tree: object, *, extra_files: Mapping[str, bytes] | None = None
) -> Path:
    """Writes the tree as a new checkpoint, whole or not at all, whenever the process dies; the same tree gives the same
    bytes. TypeError or ValueError for what does not fit, before the disk is touched; CheckpointError for the disk."""
    folder, extra = Path(folder), dict(extra_files or {})
    check_extra(extra)
    json_tree, tensors = pack(tree)
    small = {TREE: json.dumps(json_tree, separators=(",", ":"), allow_nan=False).encode(), **extra}
    for name, content in small.items():
        if len(content) > LARGEST_FILE:
            advice = "Keep large values in tensors."
            raise ValueError(
                f"{name}: expected at most {LARGEST_FILE} bytes, got {len(content)}. {advice}"
            )
    flats = list(tensors.values())
    need = container.length([flat.numel() for flat in flats]) + sum(map(len, small.values())) + 4096
    with writing(folder, need) as temporary:
        files = {TENSORS: write(temporary / TENSORS, container.pieces(flats))}
        files |= {name: write(temporary / name, [content]) for name, content in small.items()}
        write(temporary / MANIFEST, [made(files).encode()])
    return folder


def load(
    folder: str | Path,
    *,
    verify: bool = True,
    device: Callable[[torch.device], torch.device] | None = None,
) -> Loaded:
    """The checkpoint's content, or a CheckpointError. `verify=False` leaves out the checksum of the tensors only, for
    one that `latest` has just verified. `device` maps the device a tensor was saved from to the one it goes to."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    plan = _plan(folder, manifest.files[TREE])
    extra = {name: _content(folder / name, entry) for name, entry in _extra(manifest).items()}
    entry = manifest.files[TENSORS]
    with opened(folder / TENSORS, entry) as file:
        flats = container.read(folder / TENSORS, file, plan.sizes)
        if verify:
            file.check(entry)
    return Loaded(skeleton.build(plan, flats, device), manifest, extra)


def verify(folder: str | Path) -> Manifest:
    """Reads and checks all that `load` does, checksums included, in little memory."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    plan = _plan(folder, manifest.files[TREE])
    for name, entry in _extra(manifest).items():
        _content(folder / name, entry)
    with opened(folder / TENSORS, manifest.files[TENSORS]) as file:
        container.skim(folder / TENSORS, file, plan.sizes)
        file.check(manifest.files[TENSORS])
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder that holds exactly the files it lists, each of its size; no content is read."""
    path = folder / MANIFEST
    if not folder.is_dir() or not os.path.lexists(path):
        raise foreign.stranger(folder)
    with opened(path) as file:
        if file.size > LARGEST:
            raise checkpoint_error(path, f"at most {LARGEST} bytes", f"{file.size}", DAMAGED_ADVICE)
        manifest = parse_manifest(path, file.take(file.size))
    _check_list(folder, manifest)
    for name, entry in manifest.files.items():
        with opened(folder / name, entry):
            pass
    return manifest


def _check_list(folder: Path, manifest: Manifest) -> None:
    try:
        found = set(os.listdir(folder)) - {MANIFEST}
    except OSError as error:
        raise checkpoint_error(
            folder, "a folder that can be read", error.strerror or str(error), DAMAGED_ADVICE
        ) from error
    missing, more = sorted(set(manifest.files) - found), sorted(found - set(manifest.files))
    if missing:
        raise checkpoint_error(
            folder, f"the files of its {MANIFEST}", f"no {', '.join(missing)}", DAMAGED_ADVICE
        )
    if more:
        advice = "Move what does not belong there out of the folder."
        raise checkpoint_error(
            folder,
            f"only the files of its {MANIFEST}",
            f"{', '.join(map(ascii, more[:5]))} too",
            advice,
        )


def _plan(folder: Path, entry: File) -> Plan:
    path = folder / TREE
    content = as_json(path, _content(path, entry))
    try:
        return skeleton.parse(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _content(path: Path, entry: File) -> bytes:
    if entry.size > LARGEST_FILE:
        raise checkpoint_error(
            path, f"at most {LARGEST_FILE} bytes", f"{entry.size}", DAMAGED_ADVICE
        )
    with opened(path, entry) as file:
        content = file.take(file.size)
        file.check(entry)
    return content


def _extra(manifest: Manifest) -> dict[str, File]:
    return {name: entry for name, entry in manifest.files.items() if name not in (TREE, TENSORS)}
