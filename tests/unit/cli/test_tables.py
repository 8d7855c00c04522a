"""csv:FILE from the first command to predictions, beside a plain torch loop."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import halfstep as hs
from tests.support.command_line import CommandLine

N = 240

pytestmark = pytest.mark.filterwarnings("default::halfstep.errors.Notice")


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """houses.csv (a price to predict) and flowers.csv (a kind to predict)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    g = np.random.default_rng(0)
    extra = {"Bern": 0, "Genf": 90_000, "Zürich": 150_000}
    lines = ["area,rooms,city,price"]
    for _ in range(N):
        area, rooms = g.uniform(30, 200), int(g.integers(1, 7))
        city = list(extra)[int(g.integers(3))]
        price = 3000 * area + 20_000 * rooms + extra[city] + g.normal(0, 5000)
        lines.append(f"{area:.1f},{rooms},{city},{price:.0f}")
    Path("houses.csv").write_text("\n".join(lines) + "\n")

    lines = ["width;length;kind"]
    for i in range(N):
        kind = ("iris", "rose", "lily")[0 if i % 8 else int(g.integers(1, 3))]
        shift = {"iris": 0, "rose": 3, "lily": 6}[kind]
        width, length = g.normal(shift, 0.5, 2)
        lines.append(f"{width:.2f};{length:.2f};{kind}".replace(".", ","))
    Path("flowers.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def run_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def first_json(output: str) -> Any:
    """The JSON that a command prints; notes follow it, from standard error."""
    value, _ = json.JSONDecoder().raw_decode(output)
    return value


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_regression_equals_a_plain_torch_loop(
    run_line: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "train --data csv:houses.csv --target price --epochs 30 --lr 0.01 --schedule constant "
        "--batch 32 --device cpu --out r"
    )
    code, output = run_line(line)
    assert code == 0, output
    assert "note: data: target 'price': a regression, of 24" in output
    assert "learns from 2 numbers (area, rooms) and 1 category (city). --drop leaves" in output
    assert "note: net: the usual network, mlp. --net resnet18 chooses another" in output

    # numpy reads and standardises, torch trains; only the split and the order are halfstep's.
    train, test = hs.data.read_csv("houses.csv", "price").split()
    rows = [line.split(",") for line in Path("houses.csv").read_text().splitlines()]
    parts = []
    for part in (train, test):
        chosen = [rows[number - 1] for number in part.lines.tolist()]
        numbers = np.array([[float(r[0]), float(r[1])] for r in chosen])
        cities = np.array([[r[2] == c for c in ("Bern", "Genf", "Zürich")] for r in chosen])
        parts.append((numbers, cities, np.array([float(r[3]) for r in chosen])))
    numbers, _, prices = parts[0]
    tensors = []
    for part_numbers, cities, part_prices in parts:
        inputs = (part_numbers - numbers.mean(0)) / numbers.std(0)
        x = torch.from_numpy(np.concatenate([inputs, cities], axis=1)).float()
        y = torch.from_numpy((part_prices - prices.mean()) / prices.std()).float()[:, None]
        tensors.append((x, y))
    (x, y), (x_test, y_test) = tensors
    torch.manual_seed(0)
    net = hs.nets.mlp(inputs=5, classes=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    order = hs.data.Dataset({"i": torch.arange(len(y))}).shuffle(seed=0).batch(32)
    for _ in range(30):
        for (i,) in order:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x[i]), y[i]).backward()
            optimizer.step()

    model = hs.Model(hs.nets.mlp(inputs=5, classes=1))
    model.load("r/weights.safetensors")
    for name, p in model.net.state_dict().items():
        # Means in another order of addition: inputs differ in their last bit.
        torch.testing.assert_close(p, net.state_dict()[name], rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        predicted = net(x_test).double().numpy() * prices.std() + prices.mean()
    errors = np.abs(predicted[:, 0] - parts[1][2])
    code, output = run_line("eval r --json")
    assert code == 0
    scores = first_json(output)["scores"]
    assert scores["mae"] == pytest.approx(errors.mean(), rel=1e-3)
    assert scores["r2"] > 0.9
    residual = ((y_test.numpy() - net(x_test).detach().numpy()) ** 2).sum()
    around = ((y_test.numpy() - y_test.numpy().mean()) ** 2).sum()
    assert scores["r2"] == pytest.approx(1 - residual / around, rel=1e-3)

    # Prediction needs run.json and the new file, not the training rows.
    Path("houses.csv").rename("gone.csv")
    new = ["city,rooms,area,remark", *(f"{rows[k][2]},{rows[k][1]},{rows[k][0]},x" for k in (1, 2))]
    Path("new.csv").write_text("\n".join(new) + "\n")
    code, output = run_line("predict r new.csv --out out.csv")
    assert code == 0, output
    predictions = rows_of(Path("out.csv").read_text())
    assert [row["input"] for row in predictions] == ["new.csv:2", "new.csv:3"]
    with torch.no_grad():
        all_x = torch.cat([x, x_test])
        all_lines = [*train.lines.tolist(), *test.lines.tolist()]
        places = [all_lines.index(number) for number in (2, 3)]
        expected = net(all_x[places]).double().numpy()[:, 0] * prices.std() + prices.mean()
    actual = [float(row["price"]) for row in predictions]
    assert actual == pytest.approx(expected.tolist(), rel=1e-3)


def test_empty_cells_that_training_never_had_are_named(run_line: CommandLine) -> None:
    assert run_line("train --data csv:houses.csv --target price --epochs 1 --out r")[0] == 0
    train, _ = hs.data.read_csv("houses.csv", "price").split()
    mean = float(train.inputs["area"].values.mean())
    Path("new.csv").write_text(f"area,rooms,city\n,3,Bern\n{mean},3,Bern\n90,2,\n")
    code, output = run_line("predict r new.csv")
    assert code == 0, output
    filled, as_mean = rows_of(output.partition("note")[0])[:2]
    assert float(filled["price"]) == pytest.approx(float(as_mean["price"]), rel=1e-5)
    assert (
        "note: data: new.csv: column 'area' has no value in 1 of 3 rows, which training rows "
        f"always had: taken as the mean of the training rows, {mean:.5g}\n"
    ) in output
    assert "column 'city' has no value in 1 of 3 rows, which training rows always had: " in output
    assert "column 'rooms'" not in output

    # Where training rows missed some, the network has an input for it, and nothing is said.
    lines = Path("houses.csv").read_text().splitlines()
    lines[1:] = [
        f",{line.partition(',')[2]}" if i % 4 else line for i, line in enumerate(lines[1:])
    ]
    Path("gaps.csv").write_text("\n".join(lines) + "\n")
    assert run_line("train --data csv:gaps.csv --target price --epochs 1 --out g")[0] == 0
    code, output = run_line("predict g new.csv")
    assert "column 'area'" not in output
    assert "column 'city'" in output


def test_a_classification_has_names_weights_and_probabilities(run_line: CommandLine) -> None:
    code, output = run_line(
        "train --data csv:flowers.csv --target kind --epochs 20 --class-weights balanced --out r"
    )
    assert code == 0, output
    assert "numbers with a decimal comma" in output
    assert "target 'kind': 3 classes (iris, lily, rose)" in output
    Path("new.csv").write_text("length;width\n0,1;0,2\n6,1;5,9\n3,0;3,1\n")
    code, output = run_line("predict r new.csv")
    assert code == 0
    rows = rows_of(output.partition("note")[0])
    assert [row["class"] for row in rows] == ["iris", "lily", "rose"]
    assert [row["label"] for row in rows] == ["0", "1", "2"]

    # The outputs, and the loss with its weights, against torch.
    encoding = hs.data.TableEncoding.from_json(
        json.loads(Path("r/run.json").read_text())["data"]["table"], "run.json"
    )
    table = hs.data.read_csv("flowers.csv", "kind")
    train, test = table.split()
    weight = hs.data.class_weights(train.labels())
    model = hs.Model(hs.nets.mlp(inputs=2, classes=3))
    model.load("r/weights.safetensors")
    with torch.no_grad():
        logits = model.net(encoding.encode(test))
    expected = nn.functional.cross_entropy(logits, test.labels(), weight)
    code, output = run_line("eval r --json")
    assert first_json(output)["scores"]["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_a_resumed_run_uses_the_same_rows_and_a_changed_file_is_refused(
    run_line: CommandLine,
) -> None:
    line = "train --data csv:houses.csv --target price --schedule constant"
    assert run_line(f"{line} --epochs 3 --out whole")[0] == 0
    assert run_line(f"{line} --epochs 1 --out r")[0] == 0
    assert run_line(f"{line} --epochs 3 --out r --resume auto")[0] == 0
    assert Path("r/weights.safetensors").read_bytes() == (
        Path("whole/weights.safetensors").read_bytes()
    )
    with Path("houses.csv").open("a") as file:
        file.write("70,3,Bern,1000\n")
    code, output = run_line(f"{line} --epochs 4 --out r --resume auto")
    assert code == 2
    assert "the data has changed since the run in r began" in output


@pytest.mark.parametrize("precision", ["O2+bf16", "bf16", "O1"])
def test_low_precisions_train_a_table(precision: str, run_line: CommandLine) -> None:
    code, output = run_line(
        f"train --data csv:houses.csv --target price --epochs 6 --precision {precision} "
        "--accumulate 2 --out r --json"
    )
    assert code == 0, output
    history = first_json(output)["history"]
    assert history[-1]["valid_r2"] > 0.8


def test_a_table_is_evaluated_as_a_whole_by_the_runs_encoding(run_line: CommandLine) -> None:
    assert run_line("train --data csv:flowers.csv --target kind --epochs 3 --out r")[0] == 0
    text = Path("flowers.csv").read_text().splitlines()
    Path("some.csv").write_text("\n".join([text[0], *text[1:41]]) + "\n")
    code, output = run_line("eval r --data csv:some.csv --json")
    assert code == 0, output
    encoding = hs.data.TableEncoding.from_json(
        json.loads(Path("r/run.json").read_text())["data"]["table"], "run.json"
    )
    table = hs.data.read_csv("some.csv", "kind")
    model = hs.Model(hs.nets.mlp(inputs=2, classes=3))
    model.load("r/weights.safetensors")
    with torch.no_grad():
        logits = model.net(encoding.encode(table))
    expected = nn.functional.cross_entropy(logits, encoding.targets(table))
    assert first_json(output)["scores"]["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_compare_takes_classes_and_says_that_it_takes_no_numbers(run_line: CommandLine) -> None:
    options = "--precisions fp32,O2+bf16 --seeds 1 --epochs 1 --device cpu"
    code, output = run_line(f"compare --data csv:flowers.csv --target kind {options} --out c")
    assert code == 0, output
    code, output = run_line(f"compare --data csv:houses.csv --target price {options} --out d")
    assert code == 2
    assert "--target: expected classes, and 'price' is a number" in output


def test_train_says_which_cells_have_no_value(run_line: CommandLine) -> None:
    lines = Path("houses.csv").read_text().splitlines()
    for i in (3, 5, 8):
        area, rooms, city, price = lines[i].split(",")
        lines[i] = f",{rooms},{city},{price}"
    area, rooms, city, price = lines[9].split(",")
    lines[9] = f"{area},{rooms},NA,{price}"
    Path("holes.csv").write_text("\n".join(lines) + "\n")
    code, output = run_line("train --data csv:holes.csv --target price --epochs 1 --out r")
    assert code == 0, output
    notes = [line for line in output.splitlines() if "no value" in line]
    assert notes == [
        "note: data: 4 cells have no value (area 3: taken as the mean of the training rows; "
        "city 1: taken as none of the categories). One more input marks them in each column where "
        "training rows lack some"
    ]
    code, output = run_line("train --data csv:houses.csv --target price --epochs 1 --out s")
    assert code == 0, output
    assert "no value" not in output


def test_check_leaves_columns_out_as_its_error_advises(run_line: CommandLine) -> None:
    rows = [f"2024-01-{1 + i % 28:02d},{i % 7},{'ab'[i % 2]}" for i in range(40)]
    Path("dated.csv").write_text("\n".join(["date,size,kind", *rows]) + "\n")
    code, output = run_line("data check csv:dated.csv --target kind")
    assert code == 2
    assert "--drop date" in output
    code, output = run_line("data check csv:dated.csv --target kind --drop date --json")
    assert code == 0, output
    assert [column["name"] for column in first_json(output)["columns"]] == ["size"]

    code, output = run_line("data check sample --drop date")
    assert code == 2
    assert "--drop: expected it with a table, csv:FILE, got 'sample'" in output


def test_check_shows_types_and_weights(run_line: CommandLine) -> None:
    code, output = run_line("data check csv:flowers.csv --target kind")
    assert code == 0
    assert "number" in output
    assert "classification" in output
    kinds = [line.split(";")[2] for line in Path("flowers.csv").read_text().splitlines()[1:]]
    smallest = min(kinds.count(kind) for kind in set(kinds))
    assert f"weight {N / (3 * smallest):.4g}" in output
    assert (
        "\nweight: of a sample of the class in the loss, with --class-weights balanced\n" in output
    )
    code, output = run_line("data check csv:houses.csv --json")
    table = first_json(output)
    assert [column["kind"] for column in table["columns"]] == [
        "number",
        "number",
        "category",
        "number",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "train --data csv:houses.csv",
            "target: expected the column of houses.csv to predict, got none. Say one of area, "
            "rooms, city, price: --target price",
        ),
        ("train --data csv:houses.csv --target prise", "did you mean 'price'?"),
        ("train --data csv:nothing.csv --target y", "expected a CSV file, found nothing there"),
        (
            "train --data csv:houses.csv --target price --size 8",
            "--size: expected it with a folder",
        ),
        (
            "train --data csv:houses.csv --target price --class-weights balanced",
            "--class-weights: expected classes, and 'price' is a number",
        ),
        (
            "train --data csv:houses.csv --target price --net resnet18",
            "--net: resnet18 does not take inputs of 5",
        ),
        ("data show csv:houses.csv", "a table has no pictures"),
    ],
)
def test_mistakes_are_answered(line: str, message: str, run_line: CommandLine) -> None:
    code, output = run_line(line)
    assert code == 2
    assert message in output


def test_the_bare_name_of_a_table_is_answered_with_csv(run_line: CommandLine) -> None:
    for options in ("", "--target price"):
        code, printed = run_line(f"train --data houses.csv --epochs 1 {options}")
        assert code == 2
        assert "expected a table as csv:FILE, got 'houses.csv'; write csv:houses.csv" in printed


def test_find_lr_for_a_table(run_line: CommandLine) -> None:
    line = "find-lr --data csv:houses.csv --updates 60"
    code, printed = run_line(f"{line} --target price")
    assert code == 0, printed
    assert "<- suggested" in printed
    code, printed = run_line(line)
    assert (code, "--target price" in printed) == (2, True)


def test_a_table_is_shown_by_its_columns() -> None:
    table = hs.data.read_csv("houses.csv", "price")
    assert repr(table) == (
        f"Table('houses.csv': {N} rows of area (number), rooms (number), city (category), "
        "price (target, regression))"
    )
