"""`halfstep report`: a finished comparison or run as a page, as Markdown, as JSON."""

from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli.output import echo
from halfstep.cli.output_links import refuse_links_out_of
from halfstep.utils.text import printable

DEFAULT_FORMATS = ["html", "md"]


def report(
    folder: Annotated[
        Path,
        typer.Argument(help="folder of a comparison or a run, or its compare.json or log.jsonl"),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="folder to write into, else FOLDER; - is standard output"),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", "-f", help="html, md or json, once for each; else html and md"),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="show the page in the browser")] = False,
) -> None:
    """Write a comparison or a run as a page, as Markdown, as JSON.

    The page is one file that holds all it shows; the Markdown is for a pull request.

    \b
    halfstep report runs/demo --open
    halfstep report runs/demo --format md --out - | gh pr comment 12 --body-file -
    halfstep report runs/mine/log.jsonl --out pages
    """
    import webbrowser

    from halfstep.report import read, render, write

    formats = formats or DEFAULT_FORMATS
    if show and "html" not in formats:
        raise ValueError(
            f"--open: expected html among the formats, got {', '.join(formats)}. Add --format html."
        )

    # Standard output holds one file and nothing else.
    if out is not None and str(out) == "-":
        if len(formats) != 1 or show:
            raise ValueError(
                "--out -: expected one --format and no --open, as one stream holds one file. "
                "Name a folder."
            )
        echo(render(read(folder), formats[0]), nl=False)
        return

    # A run folder may come from elsewhere, and hold links.
    target = out or (folder.parent if folder.is_file() else folder)
    refuse_links_out_of(target, [f"report.{name}" for name in formats])
    written = write(folder, out=out, formats=formats)
    for path in written:
        echo(printable(path))
    if show:
        page = next(path for path in written if path.suffix == ".html")
        if not webbrowser.open(page.resolve().as_uri()):
            echo(f"no browser could be started; open {printable(page)} yourself", err=True)
