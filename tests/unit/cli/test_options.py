"""Words on the command line: misspelt names, precisions with a plus, values that do not parse."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli.main import app
from halfstep.cli.options import NETS
from halfstep.errors import closest_name
from halfstep.precision import TABLE

CLOSEST_PRECISIONS = {
    "02": "O2",
    "o1": "O1",
    "bf-16": "bf16",
    "BF16": "bf16",
    "fp61": "fp16",
    "FP32": "fp32",
    "fp_64": "fp64",
    "t32": "tf32",
    "int8": None,
    "": None,
}


@pytest.mark.parametrize("word", CLOSEST_PRECISIONS)
def test_the_closest_precision(word: str) -> None:
    assert closest_name(word, TABLE) == CLOSEST_PRECISIONS[word]


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("MLP", "mlp"),
        ("ResNet-18", "resnet18"),
        ("resnet", "resnet18"),
        ("resnt50", "resnet50"),
        ("vgg", None),
    ],
)
def test_the_closest_network(word: str, name: str | None) -> None:
    assert closest_name(word, NETS) == name
    with pytest.raises(ValueError, match=f"received '{word}'") as error_info:
        hs.nets.load(word)
    assert (f"did you mean '{name}'?" in str(error_info.value)) == (name is not None)


@pytest.mark.parametrize(
    ("word", "name"), [("minst", "mnist"), ("samples", "sample"), ("CIFAR", "cifar10")]
)
def test_the_closest_data_set(word: str, name: str) -> None:
    for words in (["data", "check", word], ["train", "--data", word]):
        with pytest.raises(ValueError, match=f"no such folder. Did you mean '{name}'"):
            CliRunner().invoke(app, words, catch_exceptions=False)


# Precisions.


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("02", "'O2'"),
        ("half", "'fp16'"),
        ("bfloat16", "'bf16'"),
        ("amp", "'O1'"),
        ("o2+bf16", r"'O2\+bf16'"),
        ("O2+bf61", r"'O2\+bf16'"),
        ("fp16+khan", r"'fp16\+kahan'"),
    ],
)
def test_a_misspelt_precision_gets_a_suggestion(word: str, suggestion: str) -> None:
    with pytest.raises(ValueError, match=rf"Did you mean {suggestion}\?$"):
        hs.Precision(word)


def test_words_after_a_plus_are_read_everywhere() -> None:
    o2_bf16 = hs.Precision("O2", dtype="bfloat16")
    assert hs.Precision("O2+bf16") == o2_bf16
    assert hs.Precision("fp16+kahan") == hs.Precision("fp16", rounding="kahan")
    assert hs.Precision("mixed+bf16", keep={"head*": "fp32"}).name == "O1"
    assert hs.Precision(**hs.Precision("O2+bf16").state_dict()) == o2_bf16  # type: ignore[arg-type]
    net = nn.Linear(3, 2)
    model = hs.Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1), "O2+bf16")
    assert model.step.precision == o2_bf16


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: hs.Precision("O2+bf16", dtype="float16"),
            "received 'O2[+]bf16' and 'float16' too, expected one dtype",
        ),
        (
            lambda: hs.Precision("fp16+kahan+stochastic"),
            "and 'kahan' too, expected one rounding; leave one",
        ),
        (lambda: hs.Precision("fp32+bf16"), "'fp32' computes in float32"),
        (lambda: hs.Precision("fp8+bf16"), "planned, not there yet"),
        (lambda: hs.Precision("O2+"), r"received 'O2\+', expected fp16, bf16 or a rounding"),
    ],
)
def test_words_that_contradict_are_refused(build: Callable[[], hs.Precision], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# Values of options.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train", "--batch", "abc"],
            "Invalid value for '--batch': expected a whole number, got 'abc'",
        ),
        (
            ["compare", "--epochs", "1.5"],
            "Invalid value for '--epochs': expected a whole number, got '1.5'",
        ),
        (["info", "--seconds", "q"], "Invalid value for '--seconds': expected a number, got 'q'"),
        (
            ["data", "show", "sample", "--samples", "x"],
            "'--samples': expected a whole number, got 'x'",
        ),
        (
            ["eval", "r", "--split", "foo"],
            "Invalid value for '--split': 'foo' is not one of 'test', 'train'.",
        ),
    ],
)
def test_a_value_that_does_not_parse_is_named(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert message in result.output


def test_help_of_report_keeps_its_examples_on_lines_of_their_own() -> None:
    lines = CliRunner().invoke(app, ["report", "--help"]).output.splitlines()
    start = lines.index("  halfstep report runs/demo --open")
    assert lines[start + 1] == (
        "  halfstep report runs/demo --format md --out - | gh pr comment 12 --body-file -"
    )
    assert lines[start + 2] == "  halfstep report runs/mine/log.jsonl --out pages"
