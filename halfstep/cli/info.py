"""`halfstep info`: what the device multiplies natively and how fast, and a precision for it.

The precision is decided by precision/advice.py, as it is for `bench` and `compare`. The measurement
stands in info_speed.py, which needs torch; help and completion do not.
"""

from typing import Annotated, Any

import typer

from halfstep.cli.options import DeviceOption, JsonOption
from halfstep.cli.output import draw_bar, echo, print_json

MAX_SECONDS = 60


def info(
    device: DeviceOption = "auto",
    seconds: Annotated[
        float, typer.Option(help="to measure each dtype for; 0 measures nothing")
    ] = 0.2,
    as_json: JsonOption = False,
) -> None:
    """Show what this device does best, and the precision to begin with.

    Its dtypes, native or not, with the measured speed of their products, and what follows from
    that.

    Speeds are those of one large matrix product, the best of several: an upper bound for a
    network, which `halfstep bench` and `halfstep compare` measure.

    \b
    halfstep info
    halfstep info --device cpu --seconds 1
    halfstep info --json | jq -r .recommendation.precision
    """
    result = _examine_device(device, seconds)
    if as_json:
        print_json(result)
        return

    for name, value in result["environment"].items():
        echo(f"{name:9} {'-' if value is None else value}")
    echo("")
    for line in _dtype_table(result["dtypes"], measured=seconds > 0):
        echo(line)
    advice = result["recommendation"]
    echo(f"\nbegin with {advice['precision']}: {advice['reason']}")
    echo("then measure yours: halfstep compare --net … --data …")


def _examine_device(device_name: str, seconds: float) -> dict[str, Any]:
    """The environment, a row for each dtype, and the recommended precision."""
    from halfstep.cli.info_speed import measure_dtypes, product_speedups
    from halfstep.experiment.machine import describe_environment
    from halfstep.experiment.settings import resolve_device
    from halfstep.precision.advice import advise, find_half_units

    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"--seconds: expected 0 to {MAX_SECONDS}, got {seconds:g}")
    device = resolve_device(device_name)
    rows = measure_dtypes(device, seconds)
    advice = advise(find_half_units(device), product_speedups=product_speedups(rows))
    return {
        "environment": describe_environment(device),
        "dtypes": rows,
        "recommendation": advice._asdict(),
    }


def _dtype_table(rows: list[dict[str, Any]], *, measured: bool) -> list[str]:
    """The lines of the table; the columns of speed only where it was measured."""
    header = ["dtype", "native", "by"]
    if measured:
        header += ["GFLOP/s", ""]
    cells = [header]
    best_gflops = max((row["gflops"] or 0 for row in rows), default=1)
    for row in rows:
        row_cells = [row["dtype"], "yes" if row["native"] else "no", row["by"]]
        if measured and row["gflops"]:
            row_cells += [f"{row['gflops']:,.0f}", draw_bar(row["gflops"] / best_gflops)]
        elif measured:
            row_cells += ["-", ""]
        cells.append(row_cells)

    # All columns are aligned left but the numbers.
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    number_column = header.index("GFLOP/s") if measured else None
    lines = []
    for row_cells in cells:
        padded = [cell.ljust(width) for cell, width in zip(row_cells, widths, strict=True)]
        if number_column is not None:
            padded[number_column] = row_cells[number_column].rjust(widths[number_column])
        lines.append("  ".join(padded).rstrip())
    return lines
