"""Tables with typed columns: numbers and categories, and one column to predict."""

import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from halfstep.data.splits import (
    DEFAULT_SPLIT_SEED,
    DEFAULT_TEST_SHARE,
    check_test_share,
    split_rank,
    stratified_split,
)
from halfstep.data.tables.csv_cells import CellColumn, Cells, read_cells
from halfstep.errors import closest_name
from halfstep.utils.checks import one_of
from halfstep.utils.text import list_some, plural, printable

Kind = Literal["number", "category"]
Task = Literal["classification", "regression"]
TASKS = ("classification", "regression")

MAX_CATEGORIES = 100  # of a column of texts; each is an input of the network
MAX_CLASSES = 1000
# Whole numbers of so few different values are classes, unless the task is said.
MAX_WHOLE_CLASSES = 20
# A column with so few texts among its numbers is one of numbers with mistakes in it.
MAX_TEXT_SHARE = 0.1
MIN_NUMBERS = 10
MAX_NAMED = 10

DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))([ T].*)?"
    r"|\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?"
)


@dataclass(frozen=True, eq=False)
class Column:
    """A column of numbers (float64, NaN where missing) or of codes into `texts` (-1 if missing)."""

    name: str
    kind: Kind
    values: Tensor
    texts: tuple[str, ...] = ()

    @property
    def is_missing(self) -> Tensor:
        return self.values.isnan() if self.kind == "number" else self.values < 0

    def rows(self, indices: Tensor) -> "Column":
        return replace(self, values=self.values[indices])


@dataclass(frozen=True, eq=False)
class Table:
    """Rows with inputs by name and, unless it is to be predicted, a target.

    `notes` say what was decided while reading; `lines` are those of the file.
    """

    path: Path
    inputs: dict[str, Column]
    target: Column | None
    target_name: str | None
    task: Task | None
    classes: tuple[str, ...]
    lines: Tensor
    digests: tuple[bytes, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """The file, its rows and its columns; not the values."""
        columns = [f"{name} ({column.kind})" for name, column in self.inputs.items()]
        if self.target is not None:
            columns.append(f"{self.target_name} (target, {self.task})")
        return f"Table({str(self.path)!r}: {plural(self.size, 'row')} of {', '.join(columns)})"

    @property
    def size(self) -> int:
        return len(self.lines)

    def labels(self) -> Tensor:
        """The class of every row, int64; for a classification."""
        assert self.target is not None
        assert self.task == "classification"
        return self.target.values.long()

    def rows(self, indices: Sequence[int]) -> "Table":
        """The table with these rows only."""
        index = torch.tensor(indices, dtype=torch.int64)
        return replace(
            self,
            inputs={name: column.rows(index) for name, column in self.inputs.items()},
            target=None if self.target is None else self.target.rows(index),
            lines=self.lines[index],
            digests=tuple(self.digests[i] for i in indices),
        )

    def split(
        self, test_share: float = DEFAULT_TEST_SHARE, *, seed: int = DEFAULT_SPLIT_SEED
    ) -> tuple["Table", "Table"]:
        """Training and test rows; of a classification `test_share` of each class are test rows.

        Which, depends on the seed and the content of each row: other rows in the file, or another
        order, change next to nothing.
        """
        ranks = [split_rank(digest, seed) for digest in self.digests]
        labels = self.labels().tolist() if self.task == "classification" else None
        train, test = stratified_split(ranks, labels, check_test_share(test_share))
        if not test:
            raise ValueError(
                f"{printable(self.path)}: expected two rows or more of a class, to split them, "
                f"found {self.size} in all"
            )
        return self.rows(train), self.rows(test)


def read_csv(
    path: str | Path,
    target: str | None = None,
    *,
    task: Task | None = None,
    drop: Sequence[str] = (),
    delimiter: str | None = None,
) -> Table:
    """A CSV file whose first line has the names of the columns, in UTF-8.

    Delimiters are , ; tab or |. Columns hold numbers or categories; cells that are empty or say NA
    are missing. Dates are refused, and columns of nearly as many texts as rows are left out, which
    `notes` says. `task` is decided by the target: texts, and whole numbers of at most 20 different
    values, are classes; other numbers are a regression.
    """
    if task is not None:
        one_of("task", task, TASKS)
    cells = read_cells(path, delimiter=delimiter)
    for name in (*drop, target):
        if name is not None and name not in cells.columns:
            raise _no_such_column(cells, name)
    notes = list(cells.notes)

    target_column = None
    classes: tuple[str, ...] = ()
    if target is not None:
        target_column, task, classes = _read_target(cells, cells.columns[target], task)

    inputs = {}
    for name, column in cells.columns.items():
        if name == target or name in drop:
            continue
        typed, note = _read_input(cells, column)
        if typed is not None:
            inputs[name] = typed
        if note is not None:
            notes.append(note)
    if not inputs:
        raise ValueError(f"{printable(cells.path)}: expected a column to learn from, found none")
    return Table(
        path=cells.path,
        inputs=inputs,
        target=target_column,
        target_name=target,
        task=task,
        classes=classes,
        lines=torch.tensor(cells.lines, dtype=torch.int64),
        digests=tuple(cells.digests),
        notes=tuple(notes),
    )


def _tensor(values: "array[Any]") -> Tensor:
    """A copy of the numbers, of the array's own type, without a Python object for each."""
    return torch.from_numpy(np.array(values))


def _no_such_column(cells: Cells, name: str) -> ValueError:
    close = closest_name(name, cells.columns)
    hint = f"; did you mean {close!r}?" if close else ""
    names = printable(list_some(list(cells.columns), MAX_NAMED))
    return ValueError(f"{printable(cells.path)}: expected a column of {names}; got {name!r}{hint}")


def numbers_of(cells: Cells, column: CellColumn) -> Column:
    """The column as numbers; a cell that is none, or infinite, is an error with its line."""
    where = f"{printable(cells.path)}: column {printable(column.name)!r}"
    if column.text_count:
        line, text = column.first_text
        raise ValueError(
            f"{where}, line {line}: expected a number as in {column.number_count:,} other rows, "
            f"found {printable(text)!r}. Correct it, leave it empty, or leave the column out: "
            f"--drop {column.name}"
        )
    values = _tensor(column.numbers)
    if values.isinf().any():
        line = cells.lines[int(values.isinf().nonzero()[0])]
        raise ValueError(f"{where}, line {line}: expected a finite number, found an infinite one")
    return Column(column.name, "number", values)


def categories_of(column: CellColumn) -> Column:
    """The column as categories, in the order of their texts."""
    texts = sorted(column.texts)
    # The last place is for what is missing: codes of -1.
    new_codes = torch.full((len(texts) + 1,), -1, dtype=torch.int64)
    for position, text in enumerate(texts):
        new_codes[column.texts[text]] = position
    codes = _tensor(column.codes).long()
    return Column(column.name, "category", new_codes[codes], tuple(texts))


def _read_input(cells: Cells, column: CellColumn) -> tuple[Column | None, str | None]:
    """The column with its type, or None; and a note about what was decided."""
    where = f"{printable(cells.path)}: column {printable(column.name)!r}"
    if not column.number_count and not column.text_count:
        return None, f"{where} is empty: left out"
    if _holds_numbers(column):
        return numbers_of(cells, column), None
    _refuse_dates(where, column)
    text_rows = column.number_count + column.text_count
    has_many = len(column.texts) > MAX_CATEGORIES or (
        2 * len(column.texts) > text_rows and text_rows > MIN_NUMBERS
    )
    if has_many or column.has_too_many_texts:
        more = "more than " if column.has_too_many_texts else ""
        return None, (
            f"{where} has {more}{len(column.texts):,} different texts in {cells.size:,} rows: "
            "no categories, left out"
        )
    return categories_of(column), None


def _holds_numbers(column: CellColumn) -> bool:
    """Whether this is a column of numbers, perhaps with a few mistakes."""
    is_mostly = column.text_count <= MAX_TEXT_SHARE * column.number_count
    return not column.text_count or (column.number_count >= MIN_NUMBERS and is_mostly)


def _refuse_dates(where: str, column: CellColumn) -> None:
    texts = list(column.texts)
    dates = [text for text in texts if DATE.fullmatch(text)]
    if 2 * len(dates) > len(texts):
        raise ValueError(
            f"{where} holds dates or times ({printable(dates[0])!r}), which no network takes as "
            "they are. Replace it by numbers (year, month, days since …), or leave it out: "
            f"--drop {column.name}"
        )


def _read_target(
    cells: Cells, column: CellColumn, task: Task | None
) -> tuple[Column, Task, tuple[str, ...]]:
    """The target, what is to be done, and the names of its classes."""
    where = f"{printable(cells.path)}: the target {printable(column.name)!r}"
    if column.missing_count:
        lines = [
            str(line) for line, code in zip(cells.lines, column.codes, strict=True) if code < 0
        ]
        if not column.has_too_many_texts:
            raise ValueError(
                f"{where} is missing in {column.missing_count:,} of {cells.size:,} rows, "
                f"lines {list_some(lines, MAX_NAMED)}. Remove these rows, or predict them later: "
                "halfstep predict takes rows without it"
            )
        raise ValueError(f"{where} is missing in {column.missing_count:,} of {cells.size:,} rows")

    is_number = _holds_numbers(column)
    if task == "regression" or (is_number and task is None and not _are_few_whole(column)):
        numbers = numbers_of(cells, column)
        return numbers, "regression", ()
    if is_number:
        column_numbers = numbers_of(cells, column)
        distinct = torch.unique(column_numbers.values)  # sorted
        _check_class_count(where, len(distinct), cells.size)
        codes = torch.searchsorted(distinct, column_numbers.values)
        names = tuple(_number_name(float(value)) for value in distinct)
        return Column(column.name, "category", codes, names), "classification", names
    _refuse_dates(where, column)
    count = math.inf if column.has_too_many_texts else len(column.texts)
    _check_class_count(where, count, cells.size)
    categories = categories_of(column)
    return categories, "classification", categories.texts


def _are_few_whole(column: CellColumn) -> bool:
    values = _tensor(column.numbers)
    distinct = torch.unique(values)
    return len(distinct) <= MAX_WHOLE_CLASSES and bool((distinct == distinct.round()).all())


def _check_class_count(where: str, count: float, rows: int) -> None:
    if count < 2:
        raise ValueError(f"{where} has one value in all rows: nothing to tell apart")
    if count > MAX_CLASSES or 2 * count > rows:
        raise ValueError(
            f"{where} has {count:,} different values in {rows:,} rows: no classes. "
            "Is it the right column?"
        )


def _number_name(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"
