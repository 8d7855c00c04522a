"""Small files: texts, and JSON that every reader understands."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfstep.utils.atomic_files import write_chunks


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
    """Writes a text in UTF-8, whole or not at all."""
    write_chunks(path, [text.encode()])


def write_json(path: Path, value: Any) -> None:
    """Writes strict JSON, whole or not at all."""
    write_text(path, to_json(value) + "\n")


def read_json(path: Path) -> Any:
    """The value that `write_json` wrote; None when there is no such file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected JSON, found something else ({error}). "
            "Remove it, or name another folder."
        ) from None
