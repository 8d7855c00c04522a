"""Small files: JSON that every reader understands, and texts that appear whole or not at all."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def strict_json_value(value: Any) -> Any:
    """The value with NaN and infinity as None: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): strict_json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json_value(item) for item in value]
    return value


def to_json(value: Any) -> str:
    """Indented JSON, with null for NaN and infinity."""
    return json.dumps(strict_json_value(value), indent=1, allow_nan=False)


def write_text(path: Path, text: str) -> None:
    """Writes a file that a reader sees whole, as before or as after, even if the machine dies.

    The text goes into a temporary file in the same folder, is flushed to the disk, and takes the
    name of the old file in one step.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes strict JSON, whole or not at all."""
    write_text(path, to_json(value) + "\n")


def read_json(path: Path) -> Any:
    """The value that `write_json` wrote; None when there is no such file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(
            f"{path}: expected JSON, found something else ({error}). "
            "Remove it, or name another folder."
        ) from None
