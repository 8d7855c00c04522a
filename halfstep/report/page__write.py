"""The report's files: each appears whole or not at all."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfstep.report.load import read
from halfstep.report.markdown import markdown
from halfstep.report.page import page

FORMATS = ("html", "md", "json")


def write(
    folder: str | Path, *, out: str | Path | None = None, formats: Sequence[str] = ("html", "md")
) -> list[Path]:
    """Write report.html, report.md and report.json as asked, into the folder itself unless `out` names another."""
    summary = read(folder)
    made = {name: render(summary, name) for name in dict.fromkeys(formats)}
    source = Path(folder)
    target = Path(out) if out is not None else source.parent if source.is_file() else source
    target.mkdir(parents=True, exist_ok=True)
    return [_put(target / f"report.{name}", text) for name, text in made.items()]


def render(summary: Mapping[str, Any], format: str) -> str:
    """The summary as a page, as Markdown, or as JSON without bare NaN."""
    if format not in FORMATS:
        raise ValueError(
            f"report: expected one of the formats {', '.join(FORMATS)}, got {format!r}. Name one of those."
        )
    if format == "json":
        return json.dumps(_strict(summary), indent=1, allow_nan=False) + "\n"
    return page(summary) if format == "html" else markdown(summary)


def _put(path: Path, text: str) -> Path:
    """Beside its place first: a reader with the page open never gets half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def _strict(value: Any) -> Any:
    """NaN and inf as null."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {name: _strict(each) for name, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, list | tuple) else value
