"""Reads a CSV file once, row by row, into numbers and codes: some 40 bytes for a cell.

Errors name the line. The first line has the names of the columns.
"""

import csv
import hashlib
import io
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from halfstep.data.download.local_copy import local_path
from halfstep.utils.text import list_some, printable

DELIMITERS = (",", ";", "\t", "|")
MISSING_WORDS = frozenset(["", "na", "n/a", "nan", "null", "none", "?", "-", "#n/a"])
MAX_CELLS = 1 << 26  # 67 million, some 2.6 GB in memory
MAX_TEXTS = 10_000  # different texts of a column that are kept; more are no categories
PROBE_ROWS = 1000  # that say how numbers are written
MAX_NAMED = 8

DECIMAL_COMMA = re.compile(r"[+-]?\d+(,\d+)?([eE][+-]?\d+)?")
THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?|[+-]?\d{1,3}(\.\d{3})+,\d+")


@dataclass
class CellColumn:
    """One column as it was read: every cell as a number, and as the code of its text."""

    name: str
    numbers: "array[float]" = field(default_factory=lambda: array("d"))
    """NaN for what is missing or no number."""
    codes: "array[int]" = field(default_factory=lambda: array("i"))
    """Into `texts`; -1 for what is missing, or has a text beyond MAX_TEXTS."""
    texts: dict[str, int] = field(default_factory=dict)
    number_count: int = 0
    text_count: int = 0
    """Cells that are no number and not missing."""
    missing_count: int = 0
    has_too_many_texts: bool = False
    first_text: tuple[int, str] = (0, "")
    """Line and content of the first such cell."""

    def add(self, cell: str, line: int, decimal: str) -> None:
        """Adds the next cell."""
        text = cell.strip()
        if text.lower() in MISSING_WORDS:
            self.missing_count += 1
            self.numbers.append(math.nan)
            self.codes.append(-1)
            return
        number = parse_number(text, decimal)
        if number is None:
            if not self.text_count:
                self.first_text = (line, text)
            self.text_count += 1
            self.numbers.append(math.nan)
        else:
            self.number_count += 1
            self.numbers.append(number)
        code = self.texts.get(text)
        if code is None:
            if len(self.texts) < MAX_TEXTS:
                code = self.texts[text] = len(self.texts)
            else:
                self.has_too_many_texts = True
                code = -1
        self.codes.append(code)


@dataclass(frozen=True)
class Cells:
    """All columns of a file, the line that each row ends on, and a digest of each row."""

    path: Path
    columns: dict[str, CellColumn]
    lines: "array[int]"
    digests: list[bytes]
    delimiter: str
    decimal: str
    notes: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.lines)


def parse_number(text: str, decimal: str) -> float | None:
    """The number that a cell says; None where it says none."""
    if decimal != ".":
        text = text.replace(decimal, ".")
    if "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def read_cells(path: str | Path, *, delimiter: str | None = None) -> Cells:
    """Reads a whole file. The delimiter is the one that the first line has most of."""
    path = local_path(path, "read_csv").expanduser()
    with _open_text(path) as file:
        try:
            return _read(path, file, delimiter)
        except UnicodeDecodeError as error:
            raise _error(
                path, f"UTF-8, found byte {error.object[error.start]:#04x}", "Save it as UTF-8."
            ) from error


def _open_text(path: Path) -> io.TextIOWrapper:
    if not path.is_file():
        actual = "a folder" if path.is_dir() else "nothing"
        raise FileNotFoundError(f"{printable(path)}: expected a CSV file, found {actual} there")
    with path.open("rb") as binary:
        head = binary.read(4)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise _error(path, "UTF-8, found UTF-16", "Save it as UTF-8.")
    if head == b"PK\x03\x04":
        raise _error(
            path, "text, found a zip or a spreadsheet (xlsx)", "Save the sheet as CSV first."
        )
    if head[:2] == b"\x1f\x8b":
        raise _error(path, "text, found gzip", "Unpack it first.")
    return path.open(encoding="utf-8-sig", newline="")


def _read(path: Path, file: io.TextIOWrapper, delimiter: str | None) -> Cells:
    first_line = file.readline()
    if not first_line.strip():
        raise _error(path, "column names in the first line, found it empty", "Add them.")
    delimiter = delimiter or _most_frequent_delimiter(path, first_line)
    file.seek(0)
    rows = _rows(path, file, delimiter)
    _, header = next(rows)
    names, notes = _check_header(path, header)

    probe = list(islice(rows, PROBE_ROWS))
    decimal = _find_decimal(path, header, [row for _, row in probe])
    if decimal == ",":
        notes.append(f"{printable(path)}: numbers with a decimal comma, 1,5 for 1.5")
    columns = [CellColumn(name) for name in names]
    lines = array("q")
    digests: list[bytes] = []
    for line, row in chain(probe, rows):
        if len(row) != len(header):
            raise _error(
                path,
                f"{len(header)} cells in line {line}, one for each column, found {len(row)}",
                'A text with the delimiter in it needs quotes: "a, b".',
            )
        if (len(lines) + 1) * len(header) > MAX_CELLS:
            raise _error(
                path,
                f"at most {MAX_CELLS:,} cells, found more",
                "Leave out columns or rows, or train on tensors by a data function.",
            )
        for column, cell in zip(columns, row, strict=True):
            column.add(cell, line, decimal)
        lines.append(line)
        digests.append(hashlib.blake2b("\x1f".join(row).encode(), digest_size=8).digest())
    if not lines:
        raise _error(path, "rows below the names of the columns, found none", "Add some.")
    by_name = {column.name: column for column in columns if column.name}
    return Cells(path, by_name, lines, digests, delimiter, decimal, tuple(notes))


def _rows(path: Path, file: io.TextIOWrapper, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Every row that is not blank, with the number of the line that it ends on."""
    reader = csv.reader(file, delimiter=delimiter, strict=True, skipinitialspace=True)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise _error(
                path, f"CSV in line {reader.line_num}, found: {error}", "Are its quotes in pairs?"
            ) from error
        if any(cell.strip() for cell in row) or len(row) > 1:
            yield reader.line_num, row


def _most_frequent_delimiter(path: Path, first_line: str) -> str:
    outside_quotes = re.sub(r'"[^"]*"', "", first_line)
    counts = {delimiter: outside_quotes.count(delimiter) for delimiter in DELIMITERS}
    best = max(counts, key=lambda delimiter: counts[delimiter])
    if not counts[best]:
        raise _error(
            path,
            "two or more columns, with , ; tab or | between",
            f"Found one in the first line: {printable(first_line.strip()[:80])}.",
        )
    return best


def _check_header(path: Path, header: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names of the columns, "" for one to leave out, and notes about them."""
    names = [name.strip() for name in header]
    numbers = [name for name in names if parse_number(name, ".") is not None]
    if numbers:
        raise _error(
            path,
            "names of columns in the first line, found numbers: "
            f"{printable(list_some(numbers, MAX_NAMED))}",
            "Write a line with names above it: price,rooms,city",
        )
    notes = []
    for i, name in enumerate(names):
        if not name and i:
            raise _error(
                path, f"a name for column {i + 1}, found none", "Write it into the first line."
            )
        if names.index(name) < i:
            raise _error(
                path, f"every name once, found {printable(name)!r} twice", "Rename one of them."
            )
    if not names[0]:
        notes.append(
            f"{printable(path)}: the first column has no name: taken for row numbers, left out"
        )
    return names, notes


def _find_decimal(path: Path, header: Sequence[str], rows: list[list[str]]) -> str:
    """ "," where the numbers of a column have a decimal comma, else "."."""
    decimal = "."
    for name, *cells in zip(header, *(row for row in rows if len(row) == len(header)), strict=True):
        texts = [cell.strip() for cell in cells if cell.strip().lower() not in MISSING_WORDS]
        with_comma = [text for text in texts if "," in text]
        if not with_comma:
            continue
        with_thousands = [text for text in texts if THOUSANDS.fullmatch(text)]
        if len(with_thousands) == len(with_comma) and 2 * len(with_comma) > len(texts):
            raise _error(
                path,
                f"plain numbers in column {printable(name)!r}, found {with_thousands[0]!r}: "
                "a thousands separator, or a decimal comma",
                "Write 1234.5 instead.",
            )
        if all(DECIMAL_COMMA.fullmatch(text) for text in texts):
            decimal = ","
    return decimal


def _error(path: Path, expected: str, advice: str) -> ValueError:
    return ValueError(f"{printable(path)}: expected {expected}. {advice}")
