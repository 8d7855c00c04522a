"""`halfstep info`: the device, what it multiplies natively and how fast, and the precision that follows."""

from typing import Annotated, Any

import typer

from halfstep.cli import options__words as words
from halfstep.cli import output as text


def info(
    device: words.Device = "auto",
    seconds: Annotated[
        float, typer.Option(help="to measure each dtype for; 0 measures nothing")
    ] = 0.2,
    as_json: words.Json = False,
) -> None:
    """Show what this device does best, and the precision to begin with.

    Its dtypes, native or not, with the measured speed of their products, and what follows from that.

    Speeds are those of one large matrix product, the best of several: an upper bound for a network, which
    `halfstep bench` and `halfstep compare` measure.

    \b
    halfstep info
    halfstep info --device cpu --seconds 1
    halfstep info --json | jq -r .recommendation.precision
    """
    found = _found(device, seconds)
    if as_json:
        return text.dump(found)
    for name, value in found["environment"].items():
        typer.echo(f"{name:9} {'-' if value is None else value}")
    typer.echo("")
    for line in _lines(found["dtypes"], measured=seconds > 0):
        typer.echo(line)
    advice = found["recommendation"]
    typer.echo(f"\nbegin with {advice['precision']}: {advice['reason']}")
    return typer.echo("then measure yours: halfstep compare --net … --data …")


def _found(device: str, seconds: float) -> dict[str, Any]:
    from halfstep.cli.info__speed import dtypes, recommend
    from halfstep.experiment.machine import environment
    from halfstep.experiment.settings import chosen

    if not 0 <= seconds <= 60:
        raise ValueError(f"--seconds: expected 0 to 60, got {seconds:g}")
    place = chosen(device)
    rows = dtypes(place, seconds)
    return {
        "environment": environment(place),
        "dtypes": rows,
        "recommendation": recommend(place.type, rows),
    }


def _lines(rows: list[dict[str, Any]], *, measured: bool) -> list[str]:
    titles = ("dtype", "native", "by") + (("GFLOP/s", "") if measured else ())
    most = max((row["gflops"] or 0 for row in rows), default=1)
    cells = [titles]
    for row in rows:
        shown = ("yes" if row["native"] else "no", row["by"])
        speed = (
            (f"{row['gflops']:,.0f}", text.bar(row["gflops"] / most))
            if measured and row["gflops"]
            else ("-", "")
        )
        cells.append((row["dtype"], *shown, *(speed if measured else ())))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [_line(row, widths) for row in cells]


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    parts = [
        cell.rjust(w) if i == 3 else cell.ljust(w)
        for i, (cell, w) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(parts).rstrip()
