"""The files of a comparison, with wrong values: it goes on, or refuses the file by its name."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfstep.compare import Settings, compare
from halfstep.compare.summary import build_rows
from halfstep.experiment.saved_comparison import check_summary, read_result
from tests.support.user_module import write_user_module

USER_MODULE = """
from torch import nn

def tiny(inputs=784, classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))
"""
SETTINGS = Settings(
    net="mine:tiny",
    samples=64,
    test_samples=100,
    epochs=1,
    batch=32,
    seeds=(0,),
    precisions=("fp32", "bf16"),
    device="cpu",
)
SUMMARY = "compare.json"
RESULT = "runs/bf16-s0/result.json"
RESULT_BESIDE = "runs/O2-s0/result.json"  # of a precision that is not asked for any more

WRONG_VALUES: list[Any] = [None, [], {}, "x", -1, 1.5, [None], "missing"]


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_user_module(USER_MODULE, tmp_path, monkeypatch)


def files_of(folder: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*.json")}


def refuses(file: str) -> None:
    """The comparison does not go on: it names the file, and has changed nothing."""
    before = files_of("out")
    with pytest.raises(ValueError, match=f"out/{file}"):
        compare(SETTINGS, "out")
    assert files_of("out") == before


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        (RESULT, "seed", "missing"),
        (RESULT, "precision", "fp32"),
        (RESULT_BESIDE, "acc", None),
        (SUMMARY, "spec", "missing"),
        (SUMMARY, "environment", 7),
    ],
)
def test_a_comparison_refuses_the_file_by_name(file: str, name: str, value: Any) -> None:
    compare(replace(SETTINGS, precisions=("fp32", "bf16", "O2")), "out")
    change_entry(Path("out") / file, [name], value)
    refuses(file)


def test_every_wrong_value_of_a_result_is_refused_or_does_no_harm() -> None:
    """What is taken goes through the table of the comparison."""
    spec = compare(SETTINGS, "out")["spec"]
    path = Path("out") / RESULT
    whole = path.read_bytes()
    results = [json.loads((Path("out") / "runs/fp32-s0/result.json").read_text())]
    refused = 0
    for name in json.loads(whole):
        for value in WRONG_VALUES:
            path.write_bytes(whole)
            change_entry(path, [name], value)
            try:
                result = read_result(path, image_count=100)
            except ValueError as error:
                refused += f"{path}: {name}" in str(error)
            else:
                build_rows(spec, [*results, result])
    assert refused > 100


def test_every_wrong_setting_of_a_summary_is_refused() -> None:
    summary = {"spec": {"precisions": ["fp32"], "seeds": [0]}, "environment": {}}
    path = Path("compare.json")
    check_summary(path, summary)
    for names in (["spec"], ["spec", "seeds"], ["spec", "precisions"], ["environment"]):
        for value in WRONG_VALUES:
            if (names[-1], value) in (("seeds", []), ("environment", {})):
                continue
            path.write_text(json.dumps(summary))
            change_entry(path, names, value)
            with pytest.raises(ValueError, match=f"compare.json: {names[0]}"):
                check_summary(path, json.loads(path.read_text()))


def change_entry(path: Path, names: list[str], value: Any) -> None:
    content = json.loads(path.read_text())
    parent = content
    for name in names[:-1]:
        parent = parent[name]
    if value == "missing":
        del parent[names[-1]]
    else:
        parent[names[-1]] = value
    path.write_text(json.dumps(content))


def test_bits_that_were_cut_do_not_count_as_wrong_answers() -> None:
    compare(SETTINGS, "out")
    path = Path("out") / RESULT
    content = json.loads(path.read_text())
    bits = base64.b64decode(content["correct"])
    content["correct"] = base64.b64encode(bits[:-3]).decode()
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="correct: expected one bit for each of 100 test images"):
        compare(SETTINGS, "out")


@pytest.mark.parametrize("file", [SUMMARY, RESULT])
@pytest.mark.parametrize(
    "text", ["[]", "7", "[" * 100_000, "{"], ids=["list", "int", "deep", "cut"]
)
def test_what_is_no_object_is_refused_by_name(file: str, text: str) -> None:
    compare(SETTINGS, "out")
    (Path("out") / file).write_text(text)
    refuses(file)
