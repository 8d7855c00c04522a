"""What the commands print: columns, scores, strict JSON, commands to repeat."""

import json
import shlex
import sys

import pytest

from halfstep.cli.output import align_columns, command_line, format_scores, print_json
from halfstep.utils.text import plural


def test_columns_and_scores() -> None:
    assert align_columns([("a", "b"), ("long", "1.5")]) == ["a       b", "long  1.5"]
    scores = {"loss": 0.5, "valid_acc": 0.25, "note": "x"}
    assert format_scores(scores) == "loss 0.5000  valid_acc 25.00 %"


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [float("inf"), 1.5]})
    value = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert value == {"a": None, "b": [None, 1.5]}


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("train --out 'a b' --fresh", "halfstep train --out 'a b' --resume auto"),
        ("train --resume runs/x --out r", "halfstep train --out r --resume auto"),
        ("train --resume=auto --fresh --out r", "halfstep train --out r --resume auto"),
        ("train --out --fresh", "halfstep train --out --resume auto"),
    ],
)
def test_the_command_that_continues_a_run(
    typed: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["halfstep", *shlex.split(typed)])
    assert command_line(without=("--fresh", "--resume"), add="--resume auto") == expected
    assert command_line() == f"halfstep {typed}"


def test_counted_nouns() -> None:
    texts = [plural(count, "epoch") for count in (0, 1, 2, 1000)]
    assert texts == ["0 epochs", "1 epoch", "2 epochs", "1,000 epochs"]
