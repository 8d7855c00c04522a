"""What a checkpoint that cannot be written or read raises."""

from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint could not be written, or what is on the disk is not a whole one; nothing of it was used."""


def wrong(path: Path | str, expected: str, came: str, advice: str) -> CheckpointError:
    """The error that names the place, what was expected there, what came and what to do."""
    return CheckpointError(f"{path}: expected {expected}, found {came}. {advice}")
