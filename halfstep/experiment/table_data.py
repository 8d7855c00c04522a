"""Tables, csv:FILE, as training and test data: split by rows, encoded by the training rows."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.data import Dataset, Table, TableEncoding, read_csv
from halfstep.data.download.local_copy import local_path
from halfstep.data.splits import DEFAULT_SPLIT_SEED, DEFAULT_TEST_SHARE
from halfstep.errors import Notice
from halfstep.experiment.data_parts import DataParts
from halfstep.experiment.settings import Settings
from halfstep.model import Model
from halfstep.utils.text import list_some, plural, printable

CSV_PREFIX = "csv:"
MAX_NAMED = 10


def is_table(name: str) -> bool:
    """Whether the data is csv:FILE. A ValueError for the bare name of such a file."""
    if name.lower().endswith(".csv") and Path(name).is_file():
        raise ValueError(f"--data: expected a table as csv:FILE, got {name!r}; write csv:{name}")
    return name.startswith(CSV_PREFIX)


def table_path(name: str) -> Path:
    """The file of csv:FILE, on this machine: one of a store is copied first."""
    return local_path(name.removeprefix(CSV_PREFIX)).expanduser()


def read_table_data(
    settings: Settings, *, training: bool, split: bool, encoding: TableEncoding | None
) -> DataParts:
    """Training and test rows, as float32 inputs and labels or standardised targets.

    `encoding`: that of a run; None learns one from the training rows. Without `split` both parts
    are all rows.
    """
    path = table_path(settings.data)
    table = read_csv(
        path,
        _target_name(path, settings),
        task=settings.task,  # type: ignore[arg-type]  # checked by Settings
        drop=parse_drop(settings.drop),
    )
    chosen: dict[str, Any] = {"task": table.task}
    train = test = table
    if split:
        share = settings.test_share
        seed = settings.split_seed
        chosen["test_share"] = DEFAULT_TEST_SHARE if share is None else share
        chosen["split_seed"] = DEFAULT_SPLIT_SEED if seed is None else seed
        train, test = table.split(chosen["test_share"], seed=chosen["split_seed"])
    if encoding is None:
        encoding = TableEncoding.fit(train)
    if training:
        _announce(table, train, test, settings)
        missing = _describe_missing(table)
        if missing:
            _notice(missing)
    facts = {"train": train.size, "test": test.size, "table": encoding.to_json()}
    parts = [_dataset(part, encoding) for part in (train, test)]
    return DataParts(parts[0], parts[1], chosen, facts, encoding)


def predict_table(
    source: str,
    settings: Settings,
    encoding: TableEncoding,
    *,
    load: Callable[[Model], Any],
    batch: int,
) -> tuple[Tensor, list[str]]:
    """Outputs of a run's network for a CSV file, in the unit of the target; a name for each row.

    `load` brings the run's weights into a new model.
    """
    from halfstep.experiment.build import build_model
    from halfstep.experiment.datasets import TrainTestData

    table, notes = encoding.read_inputs(table_path(source))
    for note in notes:
        _notice(note)
    inputs = encoding.encode(table)
    labels = torch.zeros(table.size, 1)  # of nothing: the network gets no labels here
    rows = Dataset({"row": inputs, "label": labels})
    data = TrainTestData(
        train=rows,
        test=rows,
        classes=len(encoding.classes) or None,
        shape=(encoding.width,),
        encoding=encoding,
    )
    model = build_model(settings, data, settings.precisions[0], settings.seeds[0])
    load(model)
    outputs = model.predict(Dataset((inputs,)).batch(batch), targets=False)
    if encoding.task == "regression":
        outputs = encoding.in_units(outputs)
    return outputs, [f"{printable(table.path)}:{line}" for line in table.lines.tolist()]


def parse_drop(drop: str | None) -> tuple[str, ...]:
    """The names of columns with commas between them."""
    return tuple(name.strip() for name in (drop or "").split(",") if name.strip())


def _dataset(table: Table, encoding: TableEncoding) -> Dataset:
    columns = {"row": encoding.encode(table), encoding.target: encoding.targets(table)}
    if encoding.target == "row":
        columns = {"inputs": encoding.encode(table), "row": encoding.targets(table)}
    return Dataset(columns, classes=encoding.classes)


def _target_name(path: Path, settings: Settings) -> str:
    if settings.target is not None:
        return settings.target
    table = read_csv(path, drop=parse_drop(settings.drop))
    names = list(table.inputs)
    raise ValueError(
        f"target: expected the column of {printable(path)} to predict, got none. Say one of "
        f"{printable(list_some(names, MAX_NAMED))}: --target {printable(names[-1])}"
    )


def _announce(table: Table, train: Table, test: Table, settings: Settings) -> None:
    for note in table.notes:
        _notice(note)
    if settings.test_share is None:
        _notice(
            f"{settings.data} has no test part: {DEFAULT_TEST_SHARE:.0%} of its rows are test "
            f"data, {train.size:,} rows to train and {test.size:,} to test. "
            "--test-share and --split-seed change that"
        )
    if settings.task is None:
        _notice(_describe_task(table))
    _notice(_describe_columns(table))
    train_rows = set(train.digests)
    duplicates = sum(digest in train_rows for digest in test.digests)
    if duplicates:
        verb = "is" if duplicates == 1 else "are"
        _notice(
            f"{plural(duplicates, 'test row')} {verb} among the training rows too, cell for cell, "
            "which makes scores better than they are"
        )


def _describe_task(table: Table) -> str:
    """What was decided by the target, and how to decide otherwise."""
    if table.task == "classification":
        names = printable(list_some(table.classes, MAX_NAMED))
        text = f"target {table.target_name!r}: {len(table.classes)} classes ({names})"
        numbers = all(name.lstrip("-").isdecimal() for name in table.classes)
        return f"{text}. --task regression takes them as numbers" if numbers else text
    assert table.target is not None
    values = table.target.values
    low, high = (f"{float(value):g}" for value in (values.min(), values.max()))
    return (
        f"target {table.target_name!r}: a regression, of {len(torch.unique(values)):,} different "
        f"numbers from {low} to {high}. mae is in their unit, loss of the standardised target. "
        "--task classification takes them as classes"
    )


def _describe_columns(table: Table) -> str:
    """Which columns are numbers and which categories, and how to leave some out."""
    kinds = []
    for kind, plural_kind in (("number", "numbers"), ("category", "categories")):
        names = [name for name, column in table.inputs.items() if column.kind == kind]
        if names:
            word = kind if len(names) == 1 else plural_kind
            kinds.append(f"{len(names)} {word} ({printable(list_some(names, MAX_NAMED))})")
    return f"learns from {' and '.join(kinds)}. --drop leaves columns out"


def _describe_missing(table: Table) -> str:
    """How many cells of the inputs have no value, and what stands for them; "" where all have."""
    counts = {}
    for kind in ("number", "category"):
        columns = [column for column in table.inputs.values() if column.kind == kind]
        missing = {column.name: int(column.is_missing.sum()) for column in columns}
        counts[kind] = {name: count for name, count in missing.items() if count}
    total = sum(sum(of_kind.values()) for of_kind in counts.values())
    if not total:
        return ""

    parts = []
    for kind, stand_in in (
        ("number", "taken as the mean of the training rows"),
        ("category", "taken as none of the categories"),
    ):
        names = [f"{name} {count:,}" for name, count in counts[kind].items()]
        if names:
            parts.append(f"{printable(list_some(names, MAX_NAMED))}: {stand_in}")
    verb = "has" if total == 1 else "have"
    return (
        f"{plural(total, 'cell')} {verb} no value ({'; '.join(parts)}). "
        "One more input marks them in each column where training rows lack some"
    )


def _notice(text: str) -> None:
    warnings.warn(f"data: {text}", Notice, stacklevel=4)
