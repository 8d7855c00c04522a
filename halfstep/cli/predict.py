"""`halfstep predict`: the classes that a trained network gives images, arrays or a data set."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli.evaluate import settings_of_run
from halfstep.cli.options import (
    BuildOption,
    JsonOption,
    RunArgument,
    RunDeviceOption,
    RunNetOption,
    RunPrecisionOption,
    SkipDamagedOption,
    TrustOption,
)
from halfstep.cli.output import echo, print_json
from halfstep.experiment import training_run
from halfstep.utils.atomic_files import atomic_file
from halfstep.utils.files import to_json, write_text
from halfstep.utils.text import dtype_name, plural, printable

if TYPE_CHECKING:
    from halfstep.data import TableEncoding
    from halfstep.experiment.builders import RunParts

# The columns of CSV and JSON. Every row has all of them; class is empty where there are no names.
COLUMNS = ("input", "label", "class", "probability")
OUTPUT_SUFFIXES = (".csv", ".json", ".npy")
PROBABILITY_DIGITS = 6
VALUE_DIGITS = 7  # of a number that was predicted in float32


def predict(
    run: RunArgument,
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT", help="image, folder of images, .npy, .csv, or a data set's name"
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="file to write: .csv, .json, or .npy for all outputs")
    ] = None,
    net: RunNetOption = None,
    precision: RunPrecisionOption = None,
    build: BuildOption = None,
    device: RunDeviceOption = None,
    batch: Annotated[int, typer.Option(help="samples at a time")] = 256,
    skip_damaged: SkipDamagedOption = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict with a run, a checkpoint or a file of weights.

    Prints a CSV, or writes OUT: input, the number of its likeliest class (label), the name of that
    where the data has names (class), its probability. Images are brought to the size and channels
    that the run was trained with; they and an .npy of uint8 are prepared as the training data was,
    an .npy of floats is taken as it is. A run on a table takes a CSV with the columns that it was
    trained with; of a regression, the prediction has the name and the unit of the target column.

    \b
    halfstep predict runs/first shirt.png
    halfstep predict runs/first photos/ --out photos.csv
    halfstep predict runs/first images.npy --out a.npy  outputs as they are
    halfstep predict runs/first fashion-mnist --json    a data set's test images
    halfstep predict runs/houses new.csv --out prices.csv
    halfstep predict runs/own x.npy --build train:build --out y.npy
    """
    from halfstep.cli.predict_inputs import check_skips, read_inputs

    suffix = None if out is None else out.suffix.lower()
    if suffix is not None and suffix not in OUTPUT_SUFFIXES:
        raise ValueError(
            f"--out: expected a name that ends in {', '.join(OUTPUT_SUFFIXES)}, got {out}"
        )
    options = {"net": net, "precision": precision, "device": device}
    settings = settings_of_run("predict", run, build, options, trust=trust)
    if skip_damaged:
        check_skips(source)
    table_outputs = _predict_table(run, source, settings, batch)
    if table_outputs is not None:
        outputs, names, encoding = table_outputs
        class_names = list(encoding.classes)
    else:
        encoding = None
        built = training_run.build_run(settings)
        training_run.load_weights(built.model, run)
        inputs = read_inputs(source, built, settings, skip_damaged=bool(skip_damaged))
        outputs = built.model.predict(inputs.batches(batch), targets=False)
        names = inputs.names
        class_names = _class_names(built, settings)

    columns: tuple[str, ...]
    # All outputs as an array, or the likeliest class of each as a table.
    if out is not None and suffix == ".npy":
        _write_array(outputs, out)
        return
    if encoding is not None and encoding.task == "regression":
        columns, rows = _value_rows(outputs, names, encoding.target)
    else:
        columns = COLUMNS
        rows = _prediction_rows(outputs, names, class_names)
    if out is not None:
        write_text(out, to_json(rows) + "\n" if suffix == ".json" else _to_csv(rows, columns))
        echo(f"written: {out}, {plural(len(rows), 'prediction')}", err=True)
    elif as_json:
        print_json(rows)
    else:
        echo(_to_csv(rows, columns), nl=False)


def _predict_table(
    run: Path, source: str, settings: training_run.TrainSettings, batch: int
) -> "tuple[Any, list[str], TableEncoding] | None":
    """Outputs for a CSV file, in the unit of the target, and a name for each row.

    None for a run on other data. The file of the training rows is not opened: run.json says how
    they were encoded.
    """
    from halfstep.experiment.table_data import is_table, predict_table

    if settings.build is not None or not is_table(settings.data):
        return None
    encoding = training_run.table_encoding(training_run.read_data_facts(run))
    if encoding is None:
        raise ValueError(f"predict: expected how the table was encoded in the run.json of {run}")
    outputs, names = predict_table(
        source,
        settings.comparison_settings(),
        encoding,
        load=lambda model: training_run.load_weights(model, run),
        batch=batch,
    )
    return outputs, names, encoding


def _class_names(built: "RunParts", settings: training_run.TrainSettings) -> list[str]:
    """The names of the classes by number; empty where the data has none."""
    from halfstep.data.download.catalog import CATALOG

    if settings.build is None and settings.data == "sample":
        return list(CATALOG["fashion-mnist"].classes)
    return list(getattr(built.data, "classes", ()))


def _write_array(outputs: Any, path: Path) -> None:
    """Writes the outputs of the network as they are, as numpy.save does."""
    import numpy as np
    from torch import Tensor

    if not isinstance(outputs, Tensor):
        raise TypeError(
            f"--out {path}: expected one tensor per batch from the network, "
            f"got {type(outputs[0]).__name__}"
        )
    # Not np.save, which writes past the file object and hides the disk's error.
    array = np.ascontiguousarray(outputs.numpy())
    with atomic_file(path) as file:
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(file, header)
        file.write(array.data)
    echo(f"written: {path}, {list(outputs.shape)} {dtype_name(outputs.dtype)}", err=True)


def _value_rows(
    outputs: Any, input_names: list[str], target: str
) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """The columns, and a row for each sample: the number that is predicted for the target."""
    columns = ("input", target if target != "input" else "value")
    rows = []
    for input_name, value in zip(input_names, outputs.flatten().tolist(), strict=True):
        rows.append({columns[0]: input_name, columns[1]: float(f"{value:.{VALUE_DIGITS}g}")})
    return columns, rows


def _prediction_rows(
    outputs: Any, input_names: list[str], class_names: list[str]
) -> list[dict[str, Any]]:
    """A row for each sample: its likeliest class and the probability of that."""
    from torch import Tensor

    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or outputs.shape[1] < 2:
        shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"predict: expected scores of classes, [samples, classes], got {shape}. "
            "Use --out outputs.npy"
        )
    rows = []
    probabilities = outputs.double().softmax(1)  # float64: six digits are shown
    for input_name, chances in zip(input_names, probabilities, strict=True):
        label = int(chances.argmax())
        class_name = class_names[label] if label < len(class_names) else None
        probability = round(float(chances[label]), PROBABILITY_DIGITS)
        values = (input_name, label, class_name, probability)
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def _to_csv(rows: list[dict[str, Any]], columns: Sequence[str]) -> str:
    """The table as CSV. Names are printable here; JSON has them as they are."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_csv_cell(column) for column in columns])
    for row in rows:
        writer.writerow([_csv_cell(value) for value in row.values()])
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value
