"""How the columns of a table become the inputs of a network, learnt from training rows alone.

Numbers are standardised, a missing one is the mean, and where training rows miss some, one more
input says so. A category is one input for each of its values (one-hot).
"""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.data.tables.csv_cells import Cells, read_cells
from halfstep.data.tables.typed_table import (
    TASKS,
    Column,
    Table,
    Task,
    categories_of,
    numbers_of,
)
from halfstep.utils.files import strict_json_value
from halfstep.utils.text import list_some, printable

MAX_NAMED = 10


@dataclass(frozen=True)
class InputEncoding:
    """One column: `texts` are its categories, "" for missing cells; None where it has numbers."""

    name: str
    mean: float
    deviation: float
    marks_missing: bool
    texts: tuple[str, ...] | None

    @classmethod
    def fit(cls, column: Column) -> "InputEncoding":
        """From the training rows."""
        is_missing = column.is_missing
        marks_missing = bool(is_missing.any())
        if column.kind == "number":
            mean, deviation = _mean_and_deviation(column.values[~is_missing])
            return cls(column.name, mean, deviation, marks_missing, None)
        present = torch.bincount(column.values[~is_missing], minlength=len(column.texts))
        texts = [text for text, count in zip(column.texts, present.tolist(), strict=True) if count]
        return cls(column.name, 0.0, 1.0, marks_missing, tuple(texts))

    @property
    def width(self) -> int:
        """How many inputs of the network it makes."""
        width = 1 if self.texts is None else len(self.texts)
        return width + self.marks_missing

    def encode(self, column: Column) -> Tensor:
        """float32 [rows, width]; a category that training did not have is all zeros."""
        is_missing = column.is_missing
        if self.texts is None:
            values = (column.values - self.mean) / self.deviation
            parts = [torch.where(is_missing, 0.0, values)[:, None]]
        else:
            positions = {text: i for i, text in enumerate(self.texts)}
            # The last row is for codes of -1.
            table = torch.zeros(len(column.texts) + 1, len(self.texts), dtype=torch.float64)
            for code, text in enumerate(column.texts):
                if text in positions:
                    table[code, positions[text]] = 1
            parts = [table[column.values]]
        if self.marks_missing:
            parts.append(is_missing[:, None].double())
        return torch.cat(parts, 1).float()

    def count_unknown(self, column: Column) -> int:
        """Rows with a category that training did not have."""
        if self.texts is None:
            return 0
        unknown = [code for code, text in enumerate(column.texts) if text not in self.texts]
        return int(torch.isin(column.values, torch.tensor(unknown, dtype=torch.int64)).sum())

    def describe_filled(self, column: Column) -> str:
        """What is put into empty cells where training rows had none; "" where none are empty."""
        count = int(column.is_missing.sum())
        if self.marks_missing or not count:
            return ""
        value = "none of its categories"
        if self.texts is None:
            value = f"the mean of the training rows, {self.mean:.5g}"
        return (
            f"column {printable(self.name)!r} has no value in {count:,} of "
            f"{len(column.values):,} rows, which training rows always had: taken as {value}"
        )


@dataclass(frozen=True)
class TableEncoding:
    """The inputs of a network and its target, by the columns of the training rows."""

    inputs: tuple[InputEncoding, ...]
    target: str
    task: Task
    classes: tuple[str, ...]
    target_mean: float = 0.0
    target_deviation: float = 1.0

    @classmethod
    def fit(cls, table: Table) -> "TableEncoding":
        """Learnt from these rows, which are the training rows."""
        if table.target is None or table.task is None or table.target_name is None:
            raise ValueError(
                "TableEncoding.fit: expected a table with a target; read_csv(…, target=…)"
            )
        mean, deviation = 0.0, 1.0
        if table.task == "regression":
            mean, deviation = _mean_and_deviation(table.target.values)
        inputs = tuple(InputEncoding.fit(column) for column in table.inputs.values())
        return cls(inputs, table.target_name, table.task, table.classes, mean, deviation)

    @property
    def width(self) -> int:
        """Inputs of the network."""
        return sum(column.width for column in self.inputs)

    def encode(self, table: Table) -> Tensor:
        """float32 [rows, width]."""
        return torch.cat([each.encode(table.inputs[each.name]) for each in self.inputs], 1)

    def targets(self, table: Table) -> Tensor:
        """int64 [rows] of a classification; standardised float32 [rows, 1] of a regression."""
        assert table.target is not None
        if self.task == "classification":
            codes = {name: i for i, name in enumerate(self.classes)}
            of_texts = torch.tensor([codes.get(text, -1) for text in table.target.texts])
            labels = of_texts[table.target.values]
            if (labels < 0).any():
                unknown = [text for text in table.target.texts if text not in codes]
                raise ValueError(
                    f"{printable(table.path)}: expected classes of "
                    f"{printable(list_some(self.classes, MAX_NAMED))}, "
                    f"found {printable(list_some(unknown, MAX_NAMED))}"
                )
            return labels
        values = (table.target.values - self.target_mean) / self.target_deviation
        return values.float()[:, None]

    def in_units(self, outputs: Tensor) -> Tensor:
        """Outputs of the network in the unit of the target column, float64."""
        return outputs.double() * self.target_deviation + self.target_mean

    def read_inputs(self, path: str | Path) -> tuple[Table, list[str]]:
        """A CSV file to predict from, by the columns of the training rows; and notes about it.

        Other columns, and the target, are not looked at.
        """
        cells = read_cells(path)
        missing = [each.name for each in self.inputs if each.name not in cells.columns]
        if missing:
            raise ValueError(
                f"{printable(cells.path)}: expected the columns that the network was trained with, "
                f"found no {printable(list_some(missing, MAX_NAMED))}"
            )
        notes = list(cells.notes)
        inputs = {}
        for each in self.inputs:
            column = _typed(cells, each)
            inputs[each.name] = column
            unknown = each.count_unknown(column)
            if unknown:
                notes.append(
                    f"{printable(cells.path)}: column {printable(each.name)!r} has categories in "
                    f"{unknown:,} of {cells.size:,} rows that training did not have: "
                    "taken as none of its own"
                )
            filled = each.describe_filled(column)
            if filled:
                notes.append(f"{printable(cells.path)}: {filled}")
        table = Table(
            path=cells.path,
            inputs=inputs,
            target=None,
            target_name=None,
            task=None,
            classes=(),
            lines=torch.tensor(cells.lines, dtype=torch.int64),
            digests=tuple(cells.digests),
        )
        return table, notes

    def to_json(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        content: dict[str, Any] = strict_json_value(asdict(self))
        return content

    @classmethod
    def from_json(cls, content: Any, where: str) -> "TableEncoding":
        """From what `to_json` gave; a ValueError that begins with `where` for anything else."""
        try:
            inputs = tuple(_input_from_json(item) for item in content["inputs"])
            encoding = cls(
                inputs=inputs,
                target=_checked(content["target"], str),
                task=_checked(content["task"], str),
                classes=tuple(_checked(name, str) for name in content["classes"]),
                target_mean=_finite(content["target_mean"]),
                target_deviation=_finite(content["target_deviation"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: expected the encoding of a table, got {error}") from error
        if encoding.task not in TASKS or not inputs:
            raise ValueError(f"{where}: expected the encoding of a table, got something else")
        return encoding


def _mean_and_deviation(values: Tensor) -> tuple[float, float]:
    """In float64, of all values; the deviation of equal values counts as 1, as of no values."""
    if not len(values):
        return 0.0, 1.0
    mean = float(values.mean())
    deviation = float((values - mean).square().mean().sqrt())
    return mean, deviation or 1.0


def _typed(cells: Cells, encoding: InputEncoding) -> Column:
    column = cells.columns[encoding.name]
    return numbers_of(cells, column) if encoding.texts is None else categories_of(column)


def _input_from_json(item: Any) -> InputEncoding:
    names = {f.name for f in fields(InputEncoding)}
    if set(item) != names:
        raise ValueError(f"an input with {sorted(item)}")
    texts = item["texts"]
    return InputEncoding(
        name=_checked(item["name"], str),
        mean=_finite(item["mean"]),
        deviation=_finite(item["deviation"]),
        marks_missing=_checked(item["marks_missing"], bool),
        texts=None if texts is None else tuple(_checked(text, str) for text in texts),
    )


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r}")
    return value


def _finite(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise TypeError(f"{value!r}")
    return float(value)
