"""`train --resume`: a finished run with damaged files, and going back to an older checkpoint."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import halfstep as hs
from halfstep import checkpoint
from halfstep.cli.main import app
from tests.support.failing_disk import fill_up, small_tmpfs
from tests.support.user_module import write_user_module

USER_MODULE = """
from torch import nn

def net(inputs=784, classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, classes))

def wider(inputs=784, classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 18), nn.ReLU(), nn.Linear(18, classes))
"""
WORDS = ["--samples", "320", "--test-samples", "100", "--device", "cpu", "--schedule", "constant"]
WEIGHTS = "weights.safetensors"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_user_module(USER_MODULE, tmp_path, monkeypatch)
    return tmp_path


def train(out: str, epochs: int, *words: str, net: str = "mine:net") -> str:
    """Trains, and returns what the command prints, both streams together."""
    command = ["train", "--net", net, *WORDS, "--out", out, "--epochs", str(epochs), *words]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def contents(folder: str) -> dict[str, bytes]:
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.name != ".lock"
    }
    # The command line and the date differ.
    run = json.loads(files.pop("run.json"))
    return {**files, "asked": json.dumps([run["asked"], run.get("weights")]).encode()}


def logged_steps(folder: str) -> list[int]:
    lines = (Path(folder) / "log.jsonl").read_text().splitlines()
    return [entry["global_step"] for entry in map(json.loads, lines) if entry["kind"] == "step"]


# A finished run.


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def keep_older(path: Path) -> None:
    """The weights of the epoch before, as after a kill between the last checkpoint and them."""
    train("short", 1)
    shutil.copy(Path("short") / WEIGHTS, path)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, "bytes, and .* were written"),
    "a flipped bit": (flip_bit, "its checksum differs"),
    "empty": (empty, "has 0 bytes"),
    "missing": (Path.unlink, "is missing"),
    "older weights": (keep_older, "its checksum differs"),
}
UNKNOWN = {"cut": "is damaged", "a flipped bit": "is not that of", "older weights": "is not that"}


@pytest.mark.parametrize("has_record", [True, False], ids=["record", "earlier version"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_weights_of_a_finished_run_are_written_again(name: str, has_record: bool) -> None:
    damage, words = DAMAGE[name]
    train("r", 2)
    expected = contents("r")
    damage(Path("r") / WEIGHTS)
    if not has_record:
        run = json.loads(Path("r/run.json").read_text())
        del run["weights"]
        Path("r/run.json").write_text(json.dumps(run))
        words = UNKNOWN.get(name, "is ")
    output = train("r", 2, "--resume", "auto")
    assert "nothing was done" not in output
    note = next(line for line in output.splitlines() if line.startswith("note:"))
    assert "written again from step-000000010" in note
    assert re.search(words, note), note
    assert contents("r") == expected
    assert "nothing was done" in train("r", 2, "--resume", "auto")


@pytest.mark.parametrize(
    ("damage", "words"),
    [(cut, "log.jsonl has .* bytes of"), (empty, "has 0 bytes"), (Path.unlink, "is missing")],
)
def test_a_log_that_has_lost_lines_is_not_passed_over(
    damage: Callable[[Path], None], words: str
) -> None:
    train("r", 1)
    assert "note:" not in train("r", 1, "--resume", "auto")
    damage(Path("r/log.jsonl"))
    output = train("r", 1, "--resume", "auto")
    note = next(line for line in output.splitlines() if line.startswith("note:"))
    assert re.search(f"{words}.*nowhere else", note), note
    assert "nothing was done" in output


def test_a_finished_run_of_an_earlier_version_is_left_as_it_is() -> None:
    """Without a record its weights are compared with the checkpoint, bit for bit."""
    train("r", 1, "--ema", "0.9", "--precision", "O2")
    run = json.loads(Path("r/run.json").read_text())
    del run["weights"]
    Path("r/run.json").write_text(json.dumps(run))
    before = contents("r")
    words = ["--ema", "0.9", "--precision", "O2", "--resume", "auto"]
    assert "nothing was done" in train("r", 1, *words)
    assert contents("r") == before


def test_lines_that_a_full_disk_refused_are_written_when_there_is_room(tmp_path: Path) -> None:
    train("whole", 2)
    with small_tmpfs(tmp_path / "small", 1 << 16) as folder:
        fill_up(folder / "filler")
        Path("r").mkdir()
        (folder / "log").touch()
        # A mount and no link, which the command refuses.
        Path("r/log.jsonl").touch()
        subprocess.run(["mount", "--bind", folder / "log", "r/log.jsonl"], check=True)
        try:
            with (
                pytest.warns(hs.Notice, match="cannot be written"),
                pytest.warns(hs.Notice, match="lines could not be written"),
            ):
                train("r", 2)
            (folder / "filler").unlink()
            output = train("r", 2, "--resume", "auto")
            assert "log.jsonl lacks its last lines" in output
            assert Path("r/log.jsonl").read_bytes() == Path("whole/log.jsonl").read_bytes()
            assert "nothing was done" in train("r", 2, "--resume", "auto")
        finally:
            subprocess.run(["umount", "-l", "r/log.jsonl"], check=True)


# An older checkpoint.


def test_an_older_checkpoint_goes_on_in_a_new_folder_with_the_whole_log() -> None:
    train("r", 3)
    expected = contents("r")
    before = contents("r")
    output = train("new", 3, "--resume", "r/step-000000005")
    assert "goes on after step 5" in output
    assert contents("r") == before
    assert Path("new/log.jsonl").read_bytes() == expected["log.jsonl"]
    assert Path(f"new/{WEIGHTS}").read_bytes() == expected[WEIGHTS]
    assert [path.name for path in checkpoint.listing("new")] == [
        checkpoint.name_of(10),
        checkpoint.name_of(15),
    ]


def test_without_the_old_log_a_new_one_begins_and_says_so() -> None:
    train("r", 2)
    Path("r/log.jsonl").unlink()
    words = "new/log.jsonl is a new file, which begins after step 5"
    with pytest.warns(hs.Notice, match=words):
        train("new", 2, "--resume", "r/step-000000005")
    assert logged_steps("new") == [6, 7, 8, 9, 10]


def test_an_older_checkpoint_in_the_old_folder_needs_a_word() -> None:
    train("r", 3)
    before = contents("r")
    message = (
        r"r holds checkpoints of later steps than r/step-000000005, up to step-000000015\. To go "
        r"back to that one and throw 2 later ones away, add --discard-later; to keep them, go on "
        r"in another folder: --out"
    )
    with pytest.raises(ValueError, match=message):
        train("r", 3, "--resume", "r/step-000000005")
    assert contents("r") == before
    output = train("r", 3, "--resume", "r/step-000000005", "--discard-later")
    assert "goes on after step 5" in output
    assert contents("r") == before
    assert logged_steps("r") == list(range(1, 16))


def test_what_is_refused_discards_nothing() -> None:
    train("r", 3)
    before = contents("r")
    words = ["--resume", "r/step-000000005", "--discard-later"]
    with pytest.raises(ValueError, match="was saved from another network"):
        train("r", 3, *words, net="mine:wider")
    assert contents("r") == before
    with pytest.raises(ValueError, match=r"epoch 1 already|Go on with --epochs"):
        train("r", 2, "--resume", "r/step-000000015")
    with pytest.raises(ValueError, match="--discard-later: expected it beside --resume"):
        train("r", 3, "--resume", "auto", "--discard-later")
    assert contents("r") == before


def test_a_mutated_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    train("r", 2)
    tree: Any = checkpoint.load("r/step-000000005").tree
    del tree["loop"]["epoch"]
    checkpoint.save(tmp_path / "m" / "step-000000005", tree)
    with pytest.raises(ValueError, match=r"loop\.epoch: expected a value, received nothing there"):
        train("new", 2, "--resume", "m/step-000000005")
    assert not Path("new/run.json").exists()
    assert not Path("new/log.jsonl").exists()
