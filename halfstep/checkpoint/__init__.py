"""Checkpoints: a state tree in one folder, written atomically, with checksums, without pickle."""

from halfstep.checkpoint.manifest import Manifest
from halfstep.checkpoint.runs import choose, latest, listing, name_of, prune, step_of
from halfstep.checkpoint.store import Loaded, load, save, verify
from halfstep.checkpoint.tree import check, pack, unpack
from halfstep.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "Loaded",
    "Manifest",
    "check",
    "choose",
    "latest",
    "listing",
    "load",
    "name_of",
    "pack",
    "prune",
    "save",
    "step_of",
    "unpack",
    "verify",
]
