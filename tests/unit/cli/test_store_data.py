"""Data in a store, by its URL in every command."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from halfstep.data.download import local_copy
from tests.support.command_line import CommandLine
from tests.support.flaky_source import FaultEvery, FlakySource, flaky_source

pytestmark = pytest.mark.filterwarnings("default::halfstep.errors.Notice")
URL = "flaky://bucket/photos"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FlakySource]]:
    """photos/ with two classes, bright and dark, and a table; every fifth answer fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("halfstep.data.download.store_reads.FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(local_copy, "_recent", {})
    draw = np.random.default_rng(0)
    photos: dict[str, Any] = {}
    for label, name in enumerate(("dark", "light")):
        for i in range(12):
            pixels = draw.integers(150 * label, 150 * label + 60, (16, 16, 3), dtype=np.uint8)
            path = Path(f"{name}-{i}.png")
            Image.fromarray(pixels).save(path)
            photos[f"bucket/photos/{name}/{i}.png"] = path.read_bytes()
            path.unlink()
    rows = "".join(f"{i},{3 * i + 1}\n" for i in range(40))
    with flaky_source({**photos, "bucket/houses.csv": f"area,price\n{rows}".encode()}) as store:
        store.fault = FaultEvery(5)
        yield store


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: type[FlakySource]
) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def first_json(output: str) -> Any:
    """The value that --json has printed, among what else went to the terminal."""
    start = min(output.index(letter) for letter in "{[" if letter in output)
    return json.JSONDecoder().raw_decode(output[start:])[0]


def test_from_training_to_predictions(command: CommandLine, store: type[FlakySource]) -> None:
    """The store is read once; eval and predict use the copy."""
    code, output = command(
        f"train --data {URL} --net mlp --epochs 5 --batch 4 --lr 0.02 --out run --device cpu"
    )
    assert code == 0, output
    assert f"data: {URL}, 24 objects: copying of " in output
    assert f"{URL} has no test part" in output
    assert json.loads(Path("run/run.json").read_text())["asked"]["data"] == URL
    reads = len(store.requests)
    code, output = command("eval run --json")
    assert code == 0, output
    assert first_json(output)["scores"]["acc"] >= 0.75
    code, output = command(f"predict run {URL}/light/3.png --json")
    assert code == 0, output
    assert first_json(output)[0]["class"] == "light"
    assert len(store.requests) - reads <= 3  # the one photo, and a failure of the store


def test_data_get_check_and_show(command: CommandLine, store: type[FlakySource]) -> None:
    code, output = command(f"data get {URL} --json")
    assert code == 0, output
    got = first_json(output)
    assert (got["files"], got["origin"]) == (24, URL)
    path = Path(got["folder"], "dark", "5.png")
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)))
    code, output = command(f"data get {URL}")
    assert code == 0, output
    assert "1 file in " in output
    assert "dark/5.png" in output
    assert path.read_bytes() == whole
    code, output = command(f"data check {URL}")
    assert code == 0, output
    assert "24 samples" in output
    code, output = command(f"data show {URL} --samples 4")
    assert code == 0, output
    assert Path("sheet.png").exists()


def test_a_table(command: CommandLine) -> None:
    line = "train --data csv:flaky://bucket/houses.csv --target price --epochs 1 --out run"
    code, output = command(f"{line} --device cpu")
    assert code == 0, output
    code, output = command("data check csv:flaky://bucket/houses.csv --target price")
    assert code == 0, output
    assert "40 rows" in output


def test_what_is_missing_is_an_error_in_one_line(command: CommandLine) -> None:
    for line in (
        "train --data flaky://bucket/nothing --out run",
        "compare --data flaky://bucket/nothing --out run",
        "data check flaky://bucket/nothing",
        "data get flaky://bucket/nothing",
    ):
        code, output = command(line)
        assert code == 2, output
        assert "found nothing there" in output
        assert "Traceback" not in output
        assert not Path("run", "run.json").exists()
