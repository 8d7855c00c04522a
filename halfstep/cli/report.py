"""`halfstep report`: the page, the Markdown and the JSON of a comparison or a run that is there already."""

from pathlib import Path
from typing import Annotated

import typer


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

    from halfstep.report import write

    wanted = formats or ["html", "md"]
    if show and "html" not in wanted:
        raise ValueError(
            f"--open: expected html among the formats, got {', '.join(wanted)}. Add --format html."
        )
    if out is not None and str(out) == "-":
        _print(folder, wanted, show=show)
        return
    written = write(folder, out=out, formats=wanted)
    for path in written:
        typer.echo(str(path))
    if show:
        page = next(path for path in written if path.suffix == ".html")
        if not webbrowser.open(page.resolve().as_uri()):
            typer.echo(f"no browser could be started; open {page} yourself", err=True)


def _print(folder: Path, wanted: list[str], *, show: bool) -> None:
    from halfstep.report import read, render

    if len(wanted) != 1 or show:
        raise ValueError(
            "--out -: expected one --format and no --open, as one stream holds one file. Name a folder."
        )
    typer.echo(render(read(folder), wanted[0]), nl=False)
