"""`halfstep bench`: the time of a training step in each precision on this machine, beside a bare PyTorch loop."""

from typing import Annotated, Any

import typer

from halfstep.cli import options__words as words
from halfstep.cli import output as text

_SHAPES = {"mlp": (1, 28, 28), "ffnn": (3,), "lenet5": (1, 32, 32)}


def bench(
    net: words.Net = "mlp",
    precisions: Annotated[
        str,
        typer.Option(
            help="names, with commas between", autocompletion=words.several(*words.PRECISIONS)
        ),
    ] = "fp32,fp16,O1,O2",
    batch: words.Batch = 64,
    shape: Annotated[
        str | None, typer.Option(help="of one input, as 3,224,224; else the network's usual one")
    ] = None,
    seconds: Annotated[float, typer.Option(help="to measure for, all ways together")] = 10.0,
    device: words.Device = "auto",
    as_json: words.Json = False,
) -> None:
    """Time a training step in each precision on this machine.

    Forward, backward and SGD, called one by one, beside the same loop in bare torch. The ways take turns, so that
    other load hits them all; the median and the quartiles of the rounds are shown. Data is random and stays on the
    device. Networks without labels of their own are given 10 classes.

    \b
    halfstep bench
    halfstep bench --net resnet18 --batch 32 --shape 3,224,224 --precisions fp32,O1+bf16 --seconds 30
    halfstep bench --json > steps.json
    """
    found = _measured(net, precisions, batch, shape, seconds, device)
    if as_json:
        return text.dump(found)
    typer.echo(found["title"])
    cells = [("way", "ms/step", "quartiles", "samples/s", "against fp32")]
    for row in found["rows"]:
        low, high = row["quartiles"]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f} ×"
        cells.append(
            (
                row["way"],
                f"{row['ms']:.3f}",
                f"{low:.3f}–{high:.3f}",
                f"{row['samples_per_s']:,.0f}",
                ratio,
            )
        )
    for line in text.columns(cells):
        typer.echo(line)
    return None


def _measured(
    net: str, precisions: str, batch: int, shape: str | None, seconds: float, device: str
) -> dict[str, Any]:
    from halfstep.cli.bench__timing import measure
    from halfstep.experiment.machine import environment
    from halfstep.experiment.settings import Settings

    names = tuple(name.strip() for name in precisions.split(",") if name.strip())
    settings = Settings(net=net, precisions=names, batch=batch, device=device)
    if not 0 < seconds <= 3600:
        raise ValueError(
            f"--seconds: expected a number above 0, and an hour at most, got {seconds:g}"
        )
    size = _shape(net, shape)
    around = environment(settings.place)
    rows, rounds = measure(settings, size, seconds)
    title = f"{net}, batch {batch} of {' × '.join(map(str, size))}, {rounds} rounds, {around['device']}, torch"
    return {
        "title": f"{title} {around['torch']}, threads: {around['threads']}",
        "environment": around,
        "rows": rows,
    }


def _shape(net: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return _SHAPES.get(net, (3, 32, 32))
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ValueError(
            f"--shape: expected the sizes of one input, as 3,224,224 or 784, got {text!r}"
        )
    return tuple(int(part) for part in parts)
