"""`halfstep bench`: the time of a training step in each precision, beside a bare PyTorch loop.

The measurement stands in bench_timing.py, which needs torch; help and completion do not.
"""

from typing import Annotated, Any

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

# The shape of one input by network, where it is not DEFAULT_SHAPE.
NET_SHAPES = {"mlp": (1, 28, 28), "ffnn": (3,), "lenet5": (1, 32, 32)}
DEFAULT_SHAPE = (3, 32, 32)

MAX_SECONDS = 3600

HELP = """Time a training step in each precision on this machine.

Forward, backward and SGD, called one by one, beside the same loop in bare torch. The ways take
turns, so that other load hits them all; the median and the quartiles of the rounds are shown. Data
is random and stays on the device. Networks without labels of their own are given 10 classes.

\b
halfstep bench
halfstep bench --net resnet18 --batch 32 --shape 3,224,224 --precisions fp32,O1+bf16 --seconds 30
halfstep bench --json > steps.json
"""


def bench(
    net: NetOption = "mlp",
    precisions: Annotated[
        str,
        typer.Option(help="names, with commas between", autocompletion=complete_list(*PRECISIONS)),
    ] = "fp32,fp16,O1,O2",
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
    precisions: str,
    batch: int,
    shape: str | None,
    seconds: float,
    device: str,
) -> dict[str, Any]:
    """Times every way to train: a title, the environment, and a row of figures for each way."""
    from halfstep.cli.bench_timing import time_steps
    from halfstep.experiment.machine import describe_environment
    from halfstep.experiment.settings import Settings

    settings = Settings(net=net, precisions=parse_names(precisions), batch=batch, device=device)
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(
            f"--seconds: expected a number above 0, and an hour at most, got {seconds:g}"
        )
    input_shape = _parse_shape(net, shape)
    machine = describe_environment(settings.torch_device)
    rows, round_count = time_steps(settings, input_shape, seconds)

    sizes = " × ".join(map(str, input_shape))
    title = (
        f"{net}, batch {batch} of {sizes}, {round_count} rounds, {machine['device']}, "
        f"torch {machine['torch']}, threads: {machine['threads']}"
    )
    return {"title": title, "environment": machine, "rows": rows}


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
    cells = [("way", "ms/step", "quartiles", "samples/s", "against fp32")]
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
