"""How far the run in a folder is: finished with all its files, or where it stopped.

A run is finished when its newest checkpoint has all epochs and what the run writes at its end is
whole: weights.safetensors with the size and the SHA-256 that run.json notes, and every line of the
log.

torch is imported inside functions only: the command line imports this module for its help.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.experiment.training_run import LOG_FILE, RUN_FILE, WEIGHTS_FILE
from halfstep.utils.files import read_json, write_json

CHECKPOINT_WORD = "the newest checkpoint"
HASH_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FinishedRun:
    """A run that has all the epochs that are requested."""

    checkpoint: Path
    epochs: int
    steps: int
    history: list[dict[str, Any]]
    missing: str | None = None
    """What its files lack, in words; None where they are whole."""
    lost_lines: str | None = None
    """What its log lacks and nothing can write again, in words; None where it is whole."""

    def summary(self, out: Path) -> dict[str, Any]:
        """What `halfstep train --json` prints for it."""
        return {
            "out": str(out),
            "resumed": str(self.checkpoint),
            "steps": self.steps,
            "history": self.history,
        }


def finished_run(folder: Path, epochs: int) -> FinishedRun | None:
    """The run in the folder, if it has `epochs` or more, else None.

    A run that was stopped inside a later epoch is refused, and one that has more epochs and lacks
    files: nothing could write them without changing `epochs`.
    """
    newest, tree = _newest_checkpoint(folder)
    loop_state = _loop_state(tree)
    if newest is None or loop_state is None:
        return None
    epochs_done = loop_state["epoch"]
    if not loop_state["epoch_over"] or loop_state["pending"]:
        epochs_done -= 1
    finished = None
    if epochs_done >= epochs:
        finished = FinishedRun(
            checkpoint=newest,
            epochs=epochs_done,
            steps=loop_state["global_step"],
            history=loop_state["history"],
            missing=_missing_parts(folder, tree),
            lost_lines=_lost_lines(folder, tree),
        )
    if finished is None or finished.missing is not None:
        refuse_fewer_epochs(folder, epochs)
    return finished


def refuse_fewer_epochs(folder: Path, epochs: int) -> None:
    """Refuses a run that is beyond `epochs`: no step would be made, and its weights are others."""
    _, tree = _newest_checkpoint(folder)
    loop_state = _loop_state(tree)
    if loop_state is not None and loop_state["epoch"] > epochs:
        epoch = loop_state["epoch"]
        raise ValueError(
            f"--epochs: {folder} is in epoch {epoch} already, "
            f"after step {loop_state['global_step']}, and {epochs} are asked for. "
            f"Go on with --epochs {epoch} or more."
        )


def record_weights(folder: Path) -> None:
    """Notes in run.json what weights.safetensors is, now that the run is finished."""
    content = read_json(folder / RUN_FILE)
    if isinstance(content, dict):
        path = folder / WEIGHTS_FILE
        record = {"size": path.stat().st_size, "sha256": _sha256(path)}
        write_json(folder / RUN_FILE, {**content, "weights": record})


def _newest_checkpoint(folder: Path) -> tuple[Path | None, Any]:
    """A run's newest checkpoint, or the one that is named, and its tree."""
    from halfstep import checkpoint

    newest = checkpoint.choose(folder)
    return newest, None if newest is None else checkpoint.load(newest, verify=False).tree


def _loop_state(tree: Any) -> dict[str, Any] | None:
    """Where the loop stood; None where the checkpoint does not say it: `fit` will refuse that."""
    from halfstep.utils.saved_state import SavedValue

    try:
        loop = SavedValue(tree, "").field("loop")
        for name in ("epoch", "global_step"):
            loop.field(name).whole_number()
        for name in ("epoch_over", "pending"):
            loop.field(name).flag()
        loop.field("history").items()
    except ValueError:
        return None
    state: dict[str, Any] = loop.value
    return state


def _missing_parts(folder: Path, tree: Any) -> str | None:
    """What a finished run has not written, or what was damaged since; None for a whole one."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        return f"{WEIGHTS_FILE} is missing"
    content = read_json(folder / RUN_FILE)
    record = content.get("weights") if isinstance(content, dict) else None
    if isinstance(record, dict):
        size = path.stat().st_size
        if size != record.get("size"):
            return f"{WEIGHTS_FILE} has {size} bytes, and {record.get('size')} were written"
        if _sha256(path) != record.get("sha256"):
            return f"{WEIGHTS_FILE} is not what was written: its checksum differs"
    try:
        if not isinstance(record, dict):
            # Of an earlier version, or stopped between its last checkpoint and its end.
            difference = _difference_to_checkpoint(path, tree)
            if difference is not None:
                return difference
        return _missing_lines(folder, tree)
    except (AttributeError, KeyError, TypeError):  # a tree that `fit` will refuse by name
        return f"{WEIGHTS_FILE} cannot be compared with {CHECKPOINT_WORD}"


def _missing_lines(folder: Path, tree: Any) -> str | None:
    """The lines of the log that could not be written, and wait in the checkpoint."""
    state = tree.get("writers", {}).get("JSONLLog") or {}
    waiting = "".join(state.get("waiting", []))
    log = folder / LOG_FILE
    if waiting and log.is_file() and log.stat().st_size < state["offset"] + len(waiting.encode()):
        return f"{LOG_FILE} lacks its last lines, which could not be written then"
    return None


def _lost_lines(folder: Path, tree: Any) -> str | None:
    """Lines that were in the log when the checkpoint was saved, and are not any more."""
    from halfstep.utils.saved_state import SavedValue

    try:
        offset = SavedValue(tree["writers"]["JSONLLog"], "").field("offset").whole_number()
    except (KeyError, TypeError, ValueError):  # a builder's run without this log, or a damaged tree
        return None
    log = folder / LOG_FILE
    if not log.is_file():
        return f"{LOG_FILE} is missing, and its lines are nowhere else"
    size = log.stat().st_size
    if size < offset:
        return f"{LOG_FILE} has {size} bytes of {offset}, and the rest is nowhere else"
    return None


def _difference_to_checkpoint(path: Path, tree: Any) -> str | None:
    """Why a file of weights is not that of a checkpoint; None where it is, bit for bit."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        in_file = load_file(str(path))
    except (SafetensorError, OSError) as error:
        return f"{WEIGHTS_FILE} is damaged ({error})"
    step = tree.get("step", {})
    if "net" not in step:  # of a step that the user wrote: only reading it can be tried
        return None
    averages = dict(zip(tree["config"].get("names", ()), step["state"]["ema"], strict=False))
    expected = {**step["net"], **averages}
    for name, tensor in expected.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if name not in in_file or not torch.equal(in_file[name], tensor):
            return f"{WEIGHTS_FILE} is not that of {CHECKPOINT_WORD}"
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
