"""The command around the runs: help, completion, exit codes, what is printed; info, bench and data."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import halfstep as hs
from halfstep import nets
from halfstep.cli import info__speed as speed
from halfstep.cli import main
from halfstep.cli import options__words as words
from halfstep.cli import output as text
from halfstep.cli.main__app import app
from halfstep.data.download.catalog import CATALOG
from halfstep.data.download.find import SAMPLE
from halfstep.experiment.settings import OPTIMIZERS, SCHEDULES
from halfstep.precision.policy import TABLE

COMMANDS = ["compare", "report", "train", "eval", "predict", "info", "bench", "diff", "replay"]
COMMANDS += ["data get", "data show", "data check"]


def said(*line: str) -> str:
    result = CliRunner().invoke(app, list(line), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def ended(monkeypatch: pytest.MonkeyPatch, *line: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["halfstep", *line])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


# help and completion


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_by_example(command: str) -> None:
    shown = said(*command.split(), "--help")
    assert shown.count(f"halfstep {command}") >= 2  # the usage line is one of them


def test_the_words_of_completion_are_those_of_the_tables() -> None:
    assert list(words.NETS) == nets.names()[: len(words.NETS)]
    assert ("sample", *CATALOG) == words.DATA
    assert tuple(TABLE) == words.PRECISIONS
    assert (tuple(OPTIMIZERS), SCHEDULES) == (words.OPTIMIZERS, words.SCHEDULES)
    assert words.several("fp32", "O1", "O2")("O1,O") == ["O1,O2"]


def process(*line: str, **more: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from halfstep.cli import main; sys.argv[0] = 'halfstep'; import atexit\n"
    code += (
        "atexit.register(lambda: print('torch:', 'torch' in sys.modules, file=sys.stderr)); main()"
    )
    command = [sys.executable, "-c", code, *line]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **more}
    )


def test_help_version_and_completion_do_without_torch() -> None:
    spent = []
    for line in (["--help"], ["train", "--help"], ["--version"], ["data", "check", "--help"]):
        start = time.perf_counter()
        told = process(*line)
        spent.append(time.perf_counter() - start)
        assert told.returncode == 0, told.stderr
        assert told.stderr == "torch: False\n"
    assert min(spent) < 0.5  # the least disturbed; torch alone takes 2 s
    offer = process(
        _HALFSTEP_COMPLETE="complete_bash", COMP_WORDS="halfstep train --net res", COMP_CWORD="3"
    )
    assert offer.stdout.split() == [name for name in nets.names() if name.startswith("res")]
    assert offer.stderr == "torch: False\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_script(shell: str) -> None:
    assert "_HALFSTEP_COMPLETE" in process(_HALFSTEP_COMPLETE=f"source_{shell}").stdout


def test_version() -> None:
    assert said("--version") == f"halfstep {hs.__version__}\n"


# the frame around every command

ODD = """
import warnings
from halfstep import Notice
def notes():
    warnings.warn("something to know", Notice)
    raise ValueError("expected another thing, got this")
def interrupted(): raise KeyboardInterrupt
"""


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_build.py").write_text(ODD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_build", raising=False)


@pytest.mark.filterwarnings("default")
def test_a_notice_is_one_line(
    odd: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, "train", "--build", "odd_build:notes") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["note: something to know", "halfstep: expected another thing, got this"]
    assert lines[2].startswith("raised by the builder odd_build:notes, ")
    assert lines[2].endswith("odd_build.py, line 6")


def test_an_interrupt_is_130(odd: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(monkeypatch, "train", "--build", "odd_build:interrupted") == 130


def test_text() -> None:
    assert text.columns([("a", "b"), ("long", "1.5")]) == ["a       b", "long  1.5"]
    assert (
        text.scores({"loss": 0.5, "valid_acc": 0.25, "note": "x"})
        == "loss 0.5000  valid_acc 25.00 %"
    )


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    text.dump({"a": float("nan"), "b": [float("inf"), 1.5]})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": None,
        "b": [None, 1.5],
    }


# info and bench


def row(dtype: str, gflops: float | None, native: bool = True) -> dict[str, Any]:
    return {"dtype": dtype, "native": native, "by": "torch", "gflops": gflops}


RECOMMENDED = {
    "bf16 before fp16": ([row("fp32", 50.0), row("fp16", 500.0), row("bf16", 400.0)], "O1+bf16"),
    "fp16 alone": ([row("fp32", 10.0), row("fp16", 80.0), row("bf16", 1.0, native=False)], "O1"),
    "not worth it": ([row("fp32", 100.0), row("fp16", 149.0), row("bf16", 140.0)], "fp32"),
    "just worth it": ([row("fp32", 100.0), row("fp16", 150.0)], "O1"),
    "fast but not native": ([row("fp32", 100.0), row("fp16", 900.0, native=False)], "fp32"),
    "not measured": ([row("fp32", None), row("bf16", None)], "O1+bf16"),
}


@pytest.mark.parametrize("name", RECOMMENDED)
def test_the_recommendation_follows_the_units_and_their_speed(name: str) -> None:
    rows, expected = RECOMMENDED[name]
    assert speed.recommend("cuda", rows)["precision"] == expected


def test_info_shows_every_dtype_and_its_speed() -> None:
    found = json.loads(said("info", "--device", "cpu", "--seconds", "0.01", "--json"))
    assert {row["dtype"] for row in found["dtypes"]} == {"fp64", "fp32", "fp16", "bf16"}
    assert all(row["gflops"] > 0 for row in found["dtypes"])
    assert found["recommendation"] == speed.recommend("cpu", found["dtypes"])
    lines = said("info", "--device", "cpu", "--seconds", "0").splitlines()
    assert any(line.split() == ["fp32", "yes", "torch"] for line in lines)


def test_a_product_of_n_takes_two_n_cubed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a time of 1 s per product the first size, 256, is large enough."""
    monkeypatch.setattr(speed, "_best", lambda *_: 1.0)
    assert speed.gflops(torch.float32, torch.device("cpu"), 0.01) == 2 * 256**3 / 1e9


def test_bench_times_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    line = [
        "bench",
        "--net",
        "ffnn",
        "--precisions",
        "fp32,O2",
        "--batch",
        "8",
        "--seconds",
        "0.1",
        "--device",
        "cpu",
    ]
    found = json.loads(said(*line, "--json"))
    assert [each["way"] for each in found["rows"]] == ["torch, fp32", "fp32", "O2"]
    assert found["rows"][1]["ratio"] == 1
    for each in found["rows"]:
        assert each["quartiles"][0] <= each["ms"] <= each["quartiles"][1]
        assert each["samples_per_s"] == pytest.approx(8000 / each["ms"])
    with pytest.raises(ValueError, match=r"does not take inputs of 7: .*--shape 3,32,32"):
        said(*line, "--shape", "7")
    with pytest.raises(ValueError, match="--shape: expected the sizes of one input"):
        said(*line, "--shape", "3,x,y")


# data


def test_check_reads_all_of_the_sample() -> None:
    found = json.loads(said("data", "check", "sample", "--json"))
    for part, train in zip(found["parts"], (True, False), strict=True):
        images, labels = hs.data.sample(train)
        pixels = images.numpy().astype(np.float64) / 255
        assert part["samples"] == len(images)
        assert part["sizes"] == [[[28, 28, 1], len(images)]]
        assert list(part["classes"].values()) == torch.bincount(labels).tolist()
        assert part["mean"] == pytest.approx(
            [pixels.mean()], rel=1e-12
        )  # float64 sums of 1e7 values
        assert part["deviation"] == pytest.approx(
            [pixels.std()], rel=1e-9
        )  # a difference of squares
        assert part["damage"] == []


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Fashion-MNIST's sample with the test images cut short."""
    for file in SAMPLE.glob("*.gz"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    cut = tmp_path / "t10k-images-idx3-ubyte.gz"
    whole = gzip.decompress(cut.read_bytes())
    cut.unlink()
    cut.with_suffix("").write_bytes(whole[:-100])
    return tmp_path


def test_a_damaged_file_is_1_and_is_named(damaged: Path) -> None:
    told = CliRunner().invoke(
        app, ["data", "check", "fashion-mnist", "--path", str(damaged), "--json"]
    )
    assert told.exit_code == 1
    train, test = json.loads(told.output)["parts"]
    assert (train["samples"], train["damage"]) == (11_000, [])
    assert len(test["damage"]) == 1
    assert "t10k-images-idx3-ubyte" in test["damage"][0]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split, count in (("train", 3), ("test", 1)):
        for name in ("cat", "dog"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8 + i, 6), (255, 0, 51)).save(folder / f"{i}.png")
    return tmp_path / "photos"


SIZES = (
    "images of different sizes: halfstep train and compare take one size. Resize the files first."
)


def test_check_reads_every_image_and_names_the_bad_ones(photos: Path) -> None:
    found = json.loads(said("data", "check", str(photos), "--json"))
    train, test = found["parts"]
    assert (train["samples"], train["classes"]) == (6, {"cat": 3, "dog": 3})
    assert sorted(size for size, _ in train["sizes"]) == [[6, 8, 3], [6, 9, 3], [6, 10, 3]]
    assert test["mean"] == [1.0, 0.0, 0.2]
    assert test["deviation"] == [0.0, 0.0, 0.0]
    bad = [photos / "train" / "cat" / "0.png", photos / "train" / "dog" / "1.png"]
    for path in bad:
        path.write_bytes(b"no image")
    told = CliRunner().invoke(app, ["data", "check", str(photos)])
    assert told.exit_code == 1
    assert [str(path) in told.output for path in bad] == [True, True]
    assert told.stdout.endswith("\n2 damaged\n")
    assert told.stderr == f"note: {SIZES}\n"


def test_show_draws_a_sheet(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "sheet.png"
    said("data", "show", "sample", "--samples", "3", "--out", str(out))
    with Image.open(out) as page:
        narrow = page.width
    said("data", "show", str(photos), "--samples", "4", "--out", str(out))
    with Image.open(out) as page:
        assert (page.format, page.width > narrow) == ("PNG", True)


def test_get_finds_what_is_there(tmp_path: Path) -> None:
    found = json.loads(said("data", "get", "fashion-mnist", "--path", str(SAMPLE), "--json"))
    assert (found["folder"], found["origin"], found["sample"]) == (str(SAMPLE), "path", True)


MISTAKES = {
    "a name of nothing": (
        ["data", "check", "imagenet"],
        "expected sample, mnist, .*there is no such folder",
    ),
    "nothing to get": (
        ["data", "get", "sample"],
        "sample ships with the package, there is nothing to get",
    ),
    "a path for a folder": (
        ["data", "check", ".", "--path", "x"],
        "--path: expected with a data set of mnist",
    ),
    "a long time": (["info", "--seconds", "100"], "--seconds: expected 0 to 60, got 100"),
    "no time": (["bench", "--seconds", "0"], "--seconds: expected a number above 0"),
    "another suffix": (
        ["predict", "x", "y", "--out", "z.txt"],
        "expected a name that ends in .csv, .json, .npy",
    ),
    "no device": (["info", "--device", "tpu"], "device: expected auto, cpu or cuda, got 'tpu'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name: str) -> None:
    line, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        said(*line)
