"""What a path that is no checkpoint is instead, by its first bytes or its file names, and what to do with it."""

import os
from pathlib import Path

from halfstep.checkpoint.manifest import MANIFEST, TENSORS, TREE
from halfstep.errors import CheckpointError, checkpoint_error

_TORCH = (
    "Read it with torch.load(path, weights_only=True) and give its weights to net.load_state_dict."
)
_SAFETENSORS = "Read it with safetensors.torch.load_file(path) and give it to net.load_state_dict."
_ANOTHER = "Name the folder of a halfstep checkpoint."
_HUGGING_FACE = {
    "config.json",
    "model.safetensors",
    "pytorch_model.bin",
    "model.safetensors.index.json",
}


def stranger(path: Path) -> CheckpointError:
    """The error for a path without a manifest."""
    try:
        came, advice = _file(path) if path.is_file() else _folder(path)
    except OSError as error:
        came, advice = error.strerror or str(error), "Name a folder that can be read."
    return checkpoint_error(path, f"a checkpoint, a folder with {MANIFEST}", came, advice)


def _file(path: Path) -> tuple[str, str]:
    with path.open("rb") as file:
        head = file.read(16)
    inside = path.parent / MANIFEST
    if path.name in (MANIFEST, TREE, TENSORS) and inside.is_file():
        return "one file of it", f"Name its folder: {path.parent}"
    if head.startswith(b"PK"):
        return "a zip file, as torch.save and Lightning write (.pt, .ckpt)", _TORCH
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return "a pickle, which is never loaded", _TORCH
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return "a bare safetensors file", _SAFETENSORS
    return f"a file that starts with {head[:4].hex(' ')}" if head else "an empty file", _ANOTHER


def _folder(path: Path) -> tuple[str, str]:
    if not path.exists():
        return "nothing there", _ANOTHER
    names = sorted(os.listdir(path))
    if not names:
        return "an empty folder", _ANOTHER
    if {TREE, TENSORS} & set(names):
        return f"one without {MANIFEST}, so not a whole one", "Use another checkpoint."
    if _HUGGING_FACE & set(names):
        advice = "Load the network with transformers' from_pretrained(path), then train it."
        return "a Hugging Face folder", advice
    if any(name.endswith(".distcp") for name in names):
        return "a torch.distributed checkpoint", "Read it with torch.distributed.checkpoint.load."
    steps = [name for name in names if name.startswith("step-")]
    if steps:
        return "a folder of checkpoints", f"Name one of them, such as {path / steps[-1]}"
    return f"a folder with {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}", _ANOTHER
