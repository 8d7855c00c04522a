"""Words on the command line: what a misspelt one closest_name, precisions with a plus, values that do not parse, commands."""

import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli.main import app
from halfstep.cli.options import NETS
from halfstep.cli.output import command_line
from halfstep.errors import closest_name
from halfstep.precision import TABLE
from halfstep.utils.text import plural

MEANT = {
    "02": "O2", "o1": "O1", "bf-16": "bf16", "BF16": "bf16", "fp61": "fp16", "FP32": "fp32", "fp_64": "fp64",
    "t32": "tf32", "int8": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize("word", MEANT)
def test_the_precision_that_was_meant(word: str) -> None:
    assert closest_name(word, TABLE) == MEANT[word]


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
def test_the_network_that_was_meant(word: str, name: str | None) -> None:
    assert closest_name(word, NETS) == name
    with pytest.raises(ValueError, match=f"received '{word}'") as told:
        hs.nets.load(word)
    assert (f"did you mean '{name}'?" in str(told.value)) == (name is not None)


@pytest.mark.parametrize(
    ("word", "name"), [("minst", "mnist"), ("samples", "sample"), ("CIFAR", "cifar10")]
)
def test_the_data_that_was_meant(word: str, name: str) -> None:
    for line in (["data", "check", word], ["train", "--data", word]):
        with pytest.raises(ValueError, match=f"no such folder. Did you mean '{name}'"):
            CliRunner().invoke(app, line, catch_exceptions=False)


# precisions


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("02", "'O2'"), ("half", "'fp16'"), ("bfloat16", "'bf16'"), ("amp", "'O1'"), ("o2+bf16", r"'O2\+bf16'"),
        ("O2+bf61", r"'O2\+bf16'"), ("fp16+khan", r"'fp16\+kahan'"),
    ],
)  # fmt: skip
def test_a_precision_that_is_misspelt_is_asked_about(word: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"Did you mean {said}\?$"):
        hs.Precision(word)


def test_words_after_a_plus_are_read_everywhere() -> None:
    assert hs.Precision("O2+bf16") == hs.Precision("O2", dtype="bfloat16")
    assert hs.Precision("fp16+kahan") == hs.Precision("fp16", rounding="kahan")
    assert hs.Precision("mixed+bf16", keep={"head*": "fp32"}).name == "O1"
    assert hs.Precision(**hs.Precision("O2+bf16").state_dict()) == hs.Precision("O2+bf16")  # type: ignore[arg-type]
    net = nn.Linear(3, 2)
    model = hs.Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1), "O2+bf16")
    assert model.step.precision == hs.Precision("O2", dtype="bfloat16")


@pytest.mark.parametrize(
    ("make", "said"),
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
def test_words_that_contradict_are_refused(make: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()  # type: ignore[operator]


# options


@pytest.mark.parametrize(
    ("line", "said"),
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
def test_a_value_that_does_not_parse_is_named(line: list[str], said: str) -> None:
    told = CliRunner().invoke(app, line)
    assert told.exit_code == 2
    assert said in told.output


def test_help_of_report_keeps_its_examples_on_lines_of_their_own() -> None:
    lines = CliRunner().invoke(app, ["report", "--help"]).output.splitlines()
    start = lines.index("  halfstep report runs/demo --open")
    assert (
        lines[start + 1]
        == "  halfstep report runs/demo --format md --out - | gh pr comment 12 --body-file -"
    )
    assert lines[start + 2] == "  halfstep report runs/mine/log.jsonl --out pages"


# commands to repeat


@pytest.mark.parametrize(
    ("given", "again"),
    [
        ("train --out 'a b' --fresh", "halfstep train --out 'a b' --resume auto"),
        ("train --resume runs/x --out r", "halfstep train --out r --resume auto"),
        ("train --resume=auto --fresh --out r", "halfstep train --out r --resume auto"),
        ("train --out --fresh", "halfstep train --out --resume auto"),
    ],
)
def test_the_command_that_goes_on(given: str, again: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import shlex

    monkeypatch.setattr(sys, "argv", ["halfstep", *shlex.split(given)])
    assert command_line(without=("--fresh", "--resume"), add="--resume auto") == again
    assert command_line() == f"halfstep {given}"


def test_numbers_of_things() -> None:
    assert [plural(n, "epoch") for n in (0, 1, 2, 1000)] == [
        "0 epochs",
        "1 epoch",
        "2 epochs",
        "1,000 epochs",
    ]
