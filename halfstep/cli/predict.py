"""`halfstep predict`: what a trained network says about images, arrays or a data set."""

import csv
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli import options__words as words
from halfstep.cli import output as text
from halfstep.cli.evaluate import OwnDevice, OwnName, OwnNet, asked_for
from halfstep.experiment import training_run as runs

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = (
    "input",
    "label",
    "class",
    "probability",
)  # of every row, in CSV and JSON; class is empty without names
_KINDS = (".csv", ".json", ".npy")


def predict(
    run: words.Run,
    source: Annotated[str, typer.Argument(metavar="INPUT", help="image, folder of images, .npy, or a data set's name")],
    out: Annotated[Path | None, typer.Option(help="file to write: .csv, .json, or .npy for all outputs")] = None,
    net: OwnNet = None, precision: OwnName = None, build: words.Build = None, device: OwnDevice = None,
    batch: Annotated[int, typer.Option(help="samples at a time")] = 256, as_json: words.Json = False,
) -> None:  # fmt: skip
    """Predict with a run, a checkpoint or a file of weights.

    Prints a CSV, or writes OUT: input, the number of its likeliest class (label), the name of that where the data has
    names (class), its probability. Images are brought to the size and channels that the run was trained with; they
    and an .npy of uint8 are prepared as the training data was, an .npy of floats is taken as it is.

    \b
    halfstep predict runs/first shirt.png
    halfstep predict runs/first photos/ --out photos.csv
    halfstep predict runs/first images.npy --out logits.npy         outputs as they are, float32
    halfstep predict runs/first fashion-mnist --json                the test images of a data set
    halfstep predict runs/own x.npy --build train:build --out y.npy
    """
    from halfstep.cli import predict_inputs as inputs

    if out is not None and out.suffix.lower() not in _KINDS:
        raise ValueError(f"--out: expected a name that ends in {', '.join(_KINDS)}, got {out}")
    asked = asked_for(run, build, "predict", {"net": net, "precision": precision, "device": device})
    made = runs.make(asked)
    runs.load(made.model, run)
    given = inputs.read(source, made, asked)
    outputs = made.model.predict(given.batches(batch), targets=False)
    _deliver(outputs, given.names, _classes(made, asked), out, as_json=as_json)


def _classes(made: Any, asked: runs.Asked) -> list[str]:
    from halfstep.data.download.catalog import CATALOG

    if asked.build is None and asked.data == "sample":
        return list(CATALOG["fashion-mnist"].classes)
    return list(getattr(made.data, "classes", ()))


def _deliver(
    outputs: Any, names: list[str], classes: list[str], out: Path | None, *, as_json: bool
) -> None:
    from torch import Tensor

    if out is not None and out.suffix.lower() == ".npy":
        import numpy as np

        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"--out {out}: expected one tensor per batch from the network, got {type(outputs[0]).__name__}"
            )
        with out.open("wb") as file:
            np.save(file, outputs.numpy(), allow_pickle=False)
        return typer.echo(
            f"written: {out}, {list(outputs.shape)} {str(outputs.dtype).removeprefix('torch.')}",
            err=True,
        )
    rows = _rows(outputs, names, classes)
    if out is None:
        text.dump(rows) if as_json else sys.stdout.write(_csv(rows))
        return None
    out.write_text(text.encoded(rows) + "\n" if out.suffix.lower() == ".json" else _csv(rows))
    return typer.echo(f"written: {out}, {text.plural(len(rows), 'prediction')}", err=True)


def _rows(outputs: Any, names: list[str], classes: list[str]) -> list[dict[str, Any]]:
    """The likeliest class of each and its probability, the softmax in float64. Every row has every column."""
    from torch import Tensor

    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or outputs.shape[1] < 2:
        shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"predict: expected scores of classes, [samples, classes], got {shape}. Use --out outputs.npy"
        )
    return [
        _row(name, each, classes)
        for name, each in zip(names, outputs.double().softmax(1), strict=True)
    ]


def _row(name: str, chances: "Tensor", classes: list[str]) -> dict[str, Any]:
    label = int(chances.argmax())
    values = (
        name,
        label,
        classes[label] if label < len(classes) else None,
        round(float(chances[label]), 6),
    )
    return dict(zip(COLUMNS, values, strict=True))


def _csv(rows: list[dict[str, Any]]) -> str:
    page = io.StringIO()
    writer = csv.DictWriter(page, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return page.getvalue()
