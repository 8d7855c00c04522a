"""CSV files as they come: delimiters, quotes, marks, decimal commas, and what is refused."""

from pathlib import Path

import pytest

from halfstep.data import read_csv
from halfstep.data.tables import csv_cells
from halfstep.data.tables.csv_cells import read_cells


def write(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "t.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(tmp_path: Path, content: str | bytes) -> str:
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=r"t\.csv: expected") as error:
        read_cells(path)
    return str(error.value)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_any_delimiter_newline_and_byte_order_mark(
    tmp_path: Path, delimiter: str, newline: str, mark: str
) -> None:
    rows = [["area", "city"], ["1.5", "Zürich"], ["-2e3", "Genf"], [" 7 ", ""]]
    text = newline.join(delimiter.join(row) for row in rows)
    cells = read_cells(write(tmp_path, mark + text))
    assert cells.delimiter == delimiter
    assert list(cells.columns) == ["area", "city"]
    assert list(cells.columns["area"].numbers) == [1.5, -2000.0, 7.0]
    assert list(cells.columns["city"].codes) == [0, 1, -1]
    assert list(cells.lines) == [2, 3, 4]


def test_quotes_hold_delimiters_quotes_and_line_ends(tmp_path: Path) -> None:
    cells = read_cells(write(tmp_path, 'a,"b, c"\n1,"x, ""y""\nz"\n2,w\n'))
    assert list(cells.columns) == ["a", "b, c"]
    assert list(cells.columns["b, c"].texts) == ['x, "y"\nz', "w"]
    assert list(cells.lines) == [3, 4]  # where each row ends


def test_blank_lines_do_not_count_and_missing_words_are_missing(tmp_path: Path) -> None:
    words = ["", "NA", "n/a", "NaN", "null", "None", "?", "-"]
    cells = read_cells(write(tmp_path, "a,b\n\n1,2\n" + "\n".join(f"{w},1" for w in words) + "\n"))
    column = cells.columns["a"]
    assert (column.number_count, column.missing_count, column.text_count) == (1, len(words), 0)


def test_a_decimal_comma_is_read_and_said(tmp_path: Path) -> None:
    cells = read_cells(write(tmp_path, "a;b\n1,5;x\n-2;y\n0,25;y\n"))
    assert list(cells.columns["a"].numbers) == [1.5, -2.0, 0.25]
    assert cells.notes[0].endswith("numbers with a decimal comma, 1,5 for 1.5")
    # Between commas, quotes keep it together.
    cells = read_cells(write(tmp_path, 'a,b\n"1,5",x\n"12,75",y\n'))
    assert list(cells.columns["a"].numbers) == [1.5, 12.75]


@pytest.mark.parametrize("number", ["1,234,567", "1.234,5", "1,234"])
def test_a_thousands_separator_is_refused(tmp_path: Path, number: str) -> None:
    message = refusal(tmp_path, f"a;b\n{number};x\n{number};y\n")
    assert f"plain numbers in column 'a', found '{number}'" in message
    assert message.endswith("Write 1234.5 instead.")


def test_the_index_that_pandas_writes_is_left_out(tmp_path: Path) -> None:
    cells = read_cells(write(tmp_path, ",a,b\n0,1,2\n1,3,4\n"))
    assert list(cells.columns) == ["a", "b"]
    assert "the first column has no name" in cells.notes[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n1,2,3\n", "2 cells in line 3, one for each column, found 3"),
        ("a,b\n1,2\n\n1\n", "2 cells in line 4, one for each column, found 1"),
        ("5.1,3.5,setosa\n4.9,3.0,setosa\n", "in the first line, found numbers: 5.1, 3.5"),
        ("a,,b\n1,2,3\n", "a name for column 2, found none"),
        ("a,b,a\n1,2,3\n", "every name once, found 'a' twice"),
        ("", "column names in the first line, found it empty"),
        ("a,b\n", "rows below the names of the columns, found none"),
        ("alone\n1\n", "two or more columns, with , ; tab or | between"),
        ('a,b\n1,"x\n', "CSV in line 2, found"),
        ("a,b\n1,caf\u00e9\n".encode("latin-1"), "UTF-8, found byte 0xe9"),
        ("a,b\n1,2\n".encode("utf-16"), "UTF-8, found UTF-16"),
        (b"PK\x03\x04rest", "found a zip or a spreadsheet (xlsx)"),
        (b"\x1f\x8b\x08\x00", "found gzip"),
    ],
)
def test_what_is_refused_says_where_and_what_to_do(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    text = refusal(tmp_path, content)
    assert message in text
    assert text.endswith(".") or "price,rooms,city" in text or "pairs?" in text or '"' in text


def test_a_file_with_too_many_cells_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_cells, "MAX_CELLS", 20)
    read_cells(write(tmp_path, "a,b\n" + "1,2\n" * 10))
    assert "at most 20 cells, found more" in refusal(tmp_path, "a,b\n" + "1,2\n" * 11)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no\.csv: expected a CSV file, found nothing"):
        read_csv(tmp_path / "no.csv")
    with pytest.raises(FileNotFoundError, match="found a folder there"):
        read_csv(tmp_path)
