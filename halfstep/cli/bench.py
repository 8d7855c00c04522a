"""`halfstep bench`: the time of a training step in each precision, beside a bare PyTorch loop.

The measurement stands in bench_timing.py, which needs torch; help and completion do not.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halfstep.cli.options import (
    PRECISIONS,
    BatchOption,
    DeviceOption,
    JsonOption,
    NetOption,
    complete_list,
    parse_names,
)
from halfstep.cli.output import align_columns, echo, print_json

if TYPE_CHECKING:
    from halfstep.precision.advice import HalfUnits, StepTime

BARE_TORCH = "torch, fp32"  # the row that every other one is measured beside

# The shape of one input by network, where it is not DEFAULT_SHAPE.
NET_SHAPES = {"mlp": (1, 28, 28), "ffnn": (3,), "lenet5": (1, 32, 32)}
DEFAULT_SHAPE = (3, 32, 32)

MAX_SECONDS = 3600

HELP = """Time a training step in each precision on this machine.

Forward, backward and SGD, called one by one, beside the same loop in bare torch. The ways take
turns, so that other load hits them all; the median and the quartiles of the rounds are shown, and
in words which precisions are faster or slower, and why. Data is random and stays on the device.
Networks without labels of their own are given 10 classes.

\b
halfstep bench
halfstep bench --net resnet18 --batch 32 --shape 3,224,224 --precisions fp32,O1+bf16 --seconds 30
halfstep bench --json > steps.json
"""


def bench(
    net: NetOption = "mlp",
    precisions: Annotated[
        str | None,
        typer.Option(
            help="names, with commas between; else those that the device has units for",
            autocompletion=complete_list(*PRECISIONS),
        ),
    ] = None,
    batch: BatchOption = 64,
    shape: Annotated[
        str | None, typer.Option(help="of one input, as 3,224,224; else the network's usual one")
    ] = None,
    seconds: Annotated[float, typer.Option(help="to measure for, all ways together")] = 10.0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """The command; its help is HELP."""
    result = _measure(net, precisions, batch, shape, seconds, device)
    if as_json:
        print_json(result)
    else:
        _print_table(result)


def _measure(
    net: str,
    precisions: str | None,
    batch: int,
    shape: str | None,
    seconds: float,
    device: str,
) -> dict[str, Any]:
    """Times every way to train: a title, the environment, and a row of figures for each way."""
    from halfstep.cli.bench_timing import time_steps
    from halfstep.experiment.machine import describe_environment
    from halfstep.experiment.settings import BY_DEVICE, Settings
    from halfstep.precision.advice import advise, find_half_units

    names = BY_DEVICE if precisions is None else parse_names(precisions)
    settings = Settings(net=net, precisions=names, batch=batch, device=device)
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(
            f"--seconds: expected a number above 0, and an hour at most, got {seconds:g}"
        )
    input_shape = _parse_shape(net, shape)
    machine = describe_environment(settings.torch_device)
    rows, round_count = time_steps(settings, input_shape, seconds)
    units = find_half_units(settings.torch_device)
    steps = _step_times(rows)

    sizes = " × ".join(map(str, input_shape))
    title = (
        f"{net}, batch {batch} of {sizes}, {round_count} rounds, {machine['device']}, "
        f"torch {machine['torch']}, threads: {machine['threads']}"
    )
    recommendation = advise(units, steps=steps)._asdict() if len(steps) > 1 else None
    return {
        "title": title,
        "environment": machine,
        "rows": rows,
        "in_words": _in_words(units, rows),
        "recommendation": recommendation,
    }


def _step_times(rows: list[dict[str, Any]]) -> list["StepTime"]:
    """What `advise` decides by: the times of fp32 and of the precisions beside it.

    Empty without fp32, as there is nothing to compare with.
    """
    from halfstep.precision.advice import StepTime

    fp32_rows = [row for row in rows if row["way"] == "fp32"]
    if not fp32_rows:
        return []
    steps = []
    for row in [*fp32_rows, *_rows_beside_fp32(rows)]:
        steps.append(StepTime(row["way"], row["ms"], is_faster=_pace(row) == "faster"))
    return steps


def _pace(row: dict[str, Any]) -> Literal["faster", "slower", "equal", "unclear"]:
    """Beside fp32, by 5 % or more, in three quarters of the rounds and by the medians."""
    from halfstep.precision.advice import FASTER_SHARE

    low, high = row["ratio_quartiles"]
    ratios = (low, row["ratio"], high)
    if max(ratios) < FASTER_SHARE:
        return "faster"
    if min(ratios) * FASTER_SHARE > 1:
        return "slower"
    if min(ratios) >= FASTER_SHARE and max(ratios) * FASTER_SHARE <= 1:
        return "equal"
    return "unclear"


def _rows_beside_fp32(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of all precisions but fp32, if that was timed."""
    return [
        row for row in rows if row["way"] not in (BARE_TORCH, "fp32") and row["ratio"] is not None
    ]


def _in_words(units: "HalfUnits", rows: list[dict[str, Any]]) -> list[str]:
    """A sentence for each precision: faster or slower than fp32, and why slower."""
    from halfstep.precision.advice import describe_pace, why_slow

    sentences = []
    for row in _rows_beside_fp32(rows):
        pace = _pace(row)
        if pace == "unclear":
            low, high = row["ratio_quartiles"]
            sentence = (
                f"{row['way']} takes {low:.2f} to {high:.2f} × the time of fp32 in half of the "
                "rounds: faster or slower is not clear"
            )
        else:
            sentence = f"{row['way']} is {describe_pace(row['ratio'], 1, 'fp32')} here"
        reason = why_slow(units, [row["way"]]) if pace == "slower" else ""
        sentences.append(f"{sentence}: {reason}" if reason else sentence)
    return sentences


def _parse_shape(net: str, text: str | None) -> tuple[int, ...]:
    """The shape of one input: as the option says it, or the network's usual one."""
    if text is None:
        return NET_SHAPES.get(net, DEFAULT_SHAPE)
    sizes = text.replace("x", ",").split(",")
    if not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise ValueError(
            f"--shape: expected the sizes of one input, as 3,224,224 or 784, got {text!r}"
        )
    return tuple(int(size) for size in sizes)


def _print_table(result: dict[str, Any]) -> None:
    echo(result["title"])
    cells = [("way", "ms/step", "quartiles", "samples/s", "time of fp32")]
    for row in result["rows"]:
        low, high = row["quartiles"]
        ratio = row["ratio"]
        cells.append(
            (
                row["way"],
                f"{row['ms']:.3f}",
                f"{low:.3f}–{high:.3f}",
                f"{row['samples_per_s']:,.0f}",
                "" if ratio is None else f"{ratio:.2f} ×",
            )
        )
    for line in align_columns(cells):
        echo(line)
    if result["in_words"]:
        echo()
    for sentence in result["in_words"]:
        echo(sentence)
    advice = result["recommendation"]
    if advice is not None:
        echo(f"\nby time alone, use {advice['precision']}: {advice['reason']}")
        echo("with accuracies: halfstep compare --net … --data …")
