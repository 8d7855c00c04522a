"""The files of a report: report.html, report.md and report.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfstep.report.html_page import page
from halfstep.report.load import read
from halfstep.report.markdown_report import markdown
from halfstep.utils.files import to_json, write_text

FORMATS = ("html", "md", "json")


def write(
    folder: str | Path, *, out: str | Path | None = None, formats: Sequence[str] = ("html", "md")
) -> list[Path]:
    """Writes the report in each format and returns the files' paths.

    They go into the folder `out`, or into the folder that was read. Each appears whole or not at
    all: who has the page open never gets half of it.
    """
    summary = read(folder)
    # Everything is made before anything is written.
    texts = {format: render(summary, format) for format in formats}

    source = Path(folder)
    if out is not None:
        target = Path(out)
    elif source.is_file():
        target = source.parent
    else:
        target = source
    target.mkdir(parents=True, exist_ok=True)

    paths = []
    for format, text in texts.items():
        path = target / f"report.{format}"
        write_text(path, text)
        paths.append(path)
    return paths


def render(summary: Mapping[str, Any], format: str) -> str:
    """The summary as a page, as Markdown, or as JSON with null for NaN and infinity."""
    if format == "html":
        return page(summary)
    if format == "md":
        return markdown(summary)
    if format == "json":
        return to_json(summary) + "\n"
    raise ValueError(
        f"report: expected one of the formats {', '.join(FORMATS)}, got {format!r}. "
        "Name one of those."
    )
