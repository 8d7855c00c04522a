"""Types of columns, what is to be predicted, and the encoding: against numpy by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import halfstep as hs
from halfstep.data.tables.table_encoding import TableEncoding


def write(tmp_path: Path, **columns: Sequence[object]) -> Path:
    path = tmp_path / "t.csv"
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    path.write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n")
    return path


def test_numbers_categories_and_what_is_left_out(tmp_path: Path) -> None:
    n = 60
    path = write(
        tmp_path,
        area=[i / 2 for i in range(n)],
        city=["Bern", "Genf", "Basel"] * (n // 3),
        name=[f"house {i}" for i in range(n)],
        empty=[""] * n,
        price=[1000.5 * i for i in range(n)],
    )
    table = hs.data.read_csv(path, "price")
    assert {name: column.kind for name, column in table.inputs.items()} == {
        "area": "number",
        "city": "category",
    }
    assert table.inputs["city"].texts == ("Basel", "Bern", "Genf")
    assert table.inputs["city"].values.tolist()[:3] == [1, 2, 0]
    assert [note.partition("column ")[2] for note in table.notes] == [
        "'name' has 60 different texts in 60 rows: no categories, left out",
        "'empty' is empty: left out",
    ]
    dropped = hs.data.read_csv(path, "price", drop=["name", "empty", "city"])
    assert list(dropped.inputs) == ["area"]
    assert dropped.notes == ()


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (["yes", "no"] * 30, "classification", ("no", "yes")),
        ([2, 10, 3] * 20, "classification", ("2", "3", "10")),
        (["0", "1.0"] * 30, "classification", ("0", "1")),
        (list(range(60)), "regression", ()),
        ([0.5, 1] * 30, "regression", ()),
        ([True, False] * 30, "classification", ("False", "True")),
    ],
)
def test_the_target_decides_what_is_to_be_done(
    tmp_path: Path, values: list[object], task: str, classes: tuple[str, ...]
) -> None:
    path = write(tmp_path, x=range(60), y=values)
    table = hs.data.read_csv(path, "y")
    assert (table.task, table.classes) == (task, classes)
    if classes:
        names = {str(v).removesuffix(".0") for v in values}
        assert set(table.classes) == names
        by_name = [table.classes[label] for label in table.labels()]
        assert by_name == [str(v).removesuffix(".0") for v in values]


def test_the_task_may_be_said(tmp_path: Path) -> None:
    path = write(tmp_path, x=range(60), y=[1, 2] * 30, z=[0.5, 1] * 30, w=["a", "b"] * 30)
    assert hs.data.read_csv(path, "y", task="regression").task == "regression"
    table = hs.data.read_csv(path, "z", task="classification")
    assert table.classes == ("0.5", "1")
    with pytest.raises(ValueError, match=r"'w', line 2: expected a number .* found 'a'"):
        hs.data.read_csv(path, "w", task="regression")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["2024-01-31"] * 30, r"'x' holds dates or times \('2024-01-31'\).* --drop x"),
        (["31.01.2024"] * 30, "holds dates or times"),
        (["1/31/24 10:30"] * 30, "holds dates or times"),
        (["10:30"] * 30, "holds dates or times"),
        (
            [*range(29), "many"],
            r"'x', line 31: expected a number as in 29 other rows, found 'many'",
        ),
        ([*range(29), "inf"], r"'x', line 31: expected a finite number"),
    ],
)
def test_columns_that_are_refused(tmp_path: Path, column: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hs.data.read_csv(write(tmp_path, x=column, y=[1, 2] * 15), "y")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("pricee", "expected a column of x, price, one, id; got 'pricee'; did you mean 'price'"),
        ("one", "'one' has one value in all rows"),
        ("id", "'id' has 30 different values in 30 rows: no classes"),
        ("price", "'price' is missing in 2 of 30 rows, lines 2, 31"),
    ],
)
def test_targets_that_are_refused(tmp_path: Path, target: str, message: str) -> None:
    path = write(
        tmp_path,
        x=range(30),
        price=["", *range(28), "NA"],
        one=["a"] * 30,
        id=[f"r{i}" for i in range(30)],
    )
    with pytest.raises(ValueError, match=message):
        hs.data.read_csv(path, target)


@pytest.fixture
def table(tmp_path: Path) -> hs.data.Table:
    g = np.random.default_rng(0)
    n = 200
    area = [f"{value:.3f}" if i % 9 else "" for i, value in enumerate(g.uniform(20, 200, n))]
    path = write(
        tmp_path,
        area=area,
        rooms=g.integers(1, 6, n),
        city=[["Bern", "Genf", "NA"][k] for k in g.integers(0, 3, n)],
        price=g.normal(5e5, 1e5, n).round(2),
    )
    return hs.data.read_csv(path, "price")


def test_the_encoding_is_learnt_from_the_training_rows_alone(table: hs.data.Table) -> None:
    train, test = table.split(0.25, seed=3)
    assert (train.size, test.size) == (150, 50)
    encoding = TableEncoding.fit(train)

    columns = []
    area = train.inputs["area"].values.numpy()
    mean, deviation = np.nanmean(area), np.nanstd(area)
    for part in (train, test):
        values = part.inputs["area"].values.numpy()
        rooms = part.inputs["rooms"].values.numpy()
        train_rooms = train.inputs["rooms"].values.numpy()
        codes = part.inputs["city"].values.numpy()
        columns.append(
            np.stack(
                [
                    np.where(np.isnan(values), 0, (values - mean) / deviation),
                    np.isnan(values),
                    (rooms - train_rooms.mean()) / train_rooms.std(),
                    codes == 0,
                    codes == 1,
                    codes == -1,
                ],
                axis=1,
            ).astype(np.float32)
        )
    for part, expected in zip((train, test), columns, strict=True):
        actual = encoding.encode(part)
        assert actual.dtype == torch.float32
        # float64 sums of 150 numbers in another order, then float32
        torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=1e-6, atol=1e-6)
    assert train.target is not None
    price = train.target.values.numpy()
    expected = torch.from_numpy((price - price.mean()) / price.std()).float()[:, None]
    torch.testing.assert_close(encoding.targets(train), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        encoding.in_units(encoding.targets(train))[:, 0],
        train.target.values,
        rtol=1e-6,
        atol=0,
    )


def test_the_encoding_is_plain_values_and_comes_back(table: hs.data.Table) -> None:
    encoding = TableEncoding.fit(table)
    content = json.loads(json.dumps(encoding.to_json()))
    assert content == encoding.to_json()
    again = TableEncoding.from_json(content, "run.json")
    assert again == encoding
    assert torch.equal(again.encode(table), encoding.encode(table))


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": []},
        {"inputs": [{"name": "x"}]},
        {"task": "other"},
        {"target_mean": None},
        {"target_deviation": "1"},
        {"classes": [1]},
    ],
)
def test_an_encoding_that_is_none_is_refused(
    table: hs.data.Table, change: dict[str, object]
) -> None:
    content = {**TableEncoding.fit(table).to_json(), **change}
    with pytest.raises(ValueError, match=r"run\.json: expected the encoding of a table"):
        TableEncoding.from_json(content, "run.json")


def test_rows_stay_on_their_side_when_rows_are_added_or_sorted(tmp_path: Path) -> None:
    values = [[i, (i * 7) % 50, i % 2] for i in range(100)]

    def test_rows(rows: list[list[int]]) -> set[float]:
        path = write(
            tmp_path, a=[r[0] for r in rows], b=[r[1] for r in rows], y=[r[2] for r in rows]
        )
        _, test = hs.data.read_csv(path, "y").split(0.2)
        return set(test.inputs["a"].values.tolist())

    before = test_rows(values)
    assert len(before) == 20
    assert test_rows(values[::-1]) == before
    after = test_rows([*values, [1000, 3, 0]]) - {1000.0}
    assert len(before ^ after) <= 1


def test_new_rows_are_read_by_the_columns_of_training(table: hs.data.Table, tmp_path: Path) -> None:
    encoding = TableEncoding.fit(table)
    path = write(tmp_path, other=["x", "y"], city=["Genf", "Rom"], rooms=[2, ""], area=["", 50])
    new, notes = encoding.read_inputs(path)
    inputs = encoding.encode(new)
    assert inputs.shape == (2, encoding.width) == (2, 6)
    assert inputs[0, :2].tolist() == [0, 1]  # missing
    assert inputs[0, 3:].tolist() == [0, 1, 0]  # Genf
    assert inputs[1, 2:].tolist() == [0, 0, 0, 0]  # missing rooms, an unknown city
    assert len(notes) == 2
    assert "'rooms' has no value in 1 of 2 rows" in notes[0]
    assert "'city' has categories in 1 of 2 rows that training did not have" in notes[1]
    with pytest.raises(ValueError, match="found no area, rooms"):
        encoding.read_inputs(write(tmp_path, city=["Genf"], x=[1]))
    with pytest.raises(ValueError, match=r"'rooms', line 2: expected a number"):
        encoding.read_inputs(write(tmp_path, city=["Genf"], rooms=["two"], area=[1]))
