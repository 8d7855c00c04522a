"""Names of files, classes and tensors on a terminal: nothing that it obeys gets there.

A hostile name sets the title, clears the screen, turns the direction of text, breaks lines or is
markup for rich. Every command that prints names meets every such name.
"""

import ast
import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import halfstep as hs
from halfstep.cli import main
from halfstep.compare import table
from halfstep.report import render
from halfstep.utils.text import UNPRINTABLE_CATEGORIES, printable
from tests.support.command_line import CommandLine, run_command

ROOT = Path(hs.__file__).resolve().parents[1]

# What may stand in a name, and how it is shown.
HOSTILE = {
    "title": ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
    "clear": ("\x1b[2J\x1b[H", r"\x1b[2J\x1b[H"),
    "eight bits": ("\x9b31m", r"\x9b31m"),
    "direction": ("\u202etxt.gnp", r"\u202etxt.gnp"),
    "isolate": ("\u2066a\u2069", r"\u2066a\u2069"),
    "new line": ("a\nhalfstep: done", r"a\nhalfstep: done"),
    "carriage return": ("a\rhalfstep: done", r"a\rhalfstep: done"),
    "line separator": ("a\u2028b", r"a\u2028b"),
    "delete": ("a\x7f\x08b", r"a\x7f\x08b"),
    "half a pair": ("a\udcff", r"a\udcff"),
    "markup": ("[bold]x[red]:smile:", "[bold]x[red]:smile:"),
}


def assert_harmless(output: str) -> None:
    """No character but printed ones and the ends of lines; and no line is the attacker's."""
    for character in output:
        is_plain = character in "\n\t\u200b" or character.isprintable()
        is_plain |= unicodedata.category(character) not in UNPRINTABLE_CATEGORIES
        assert is_plain, f"{character!r} in {output!r}"
    assert "halfstep: done" not in re.split(r"[\r\n]", output)


@pytest.mark.parametrize("name", HOSTILE)
def test_printable_escapes_and_nothing_else(name: str) -> None:
    hostile, shown = HOSTILE[name]
    assert printable(hostile) == shown
    assert_harmless(printable(hostile))


def test_printable_leaves_names_of_all_languages_alone() -> None:
    for text in ("", "cat", "Кошка", "猫", "قطة", "gr\u00fcn\u00a0blau", "می‌خواهم", "👩‍🚀", "×–±"):
        assert printable(text) == text
    assert printable("a\n\tb", lines=True) == "a\n\tb"
    assert printable("a\r\n\x1bb", lines=True) == "a\\r\n\\x1bb"


@pytest.fixture(params=HOSTILE)
def hostile(request: pytest.FixtureRequest) -> tuple[str, str]:
    return HOSTILE[request.param]


@pytest.fixture
def photos(tmp_path: Path, hostile: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with classes and files of hostile names; one file is no image."""
    name, _ = hostile
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        for class_name in (name, "dog"):
            folder = tmp_path / "photos" / split / class_name
            folder.mkdir(parents=True)
            for i in range(2):
                Image.new("L", (28, 28), 40 * i).save(folder / f"{name}{i}.png")
    return tmp_path / "photos"


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> CommandLine:
    class RawCommandLine(CommandLine):
        def __call__(self, line: str) -> tuple[object, str]:
            self.monkeypatch.setattr(sys, "argv", ["halfstep", *shlex.split(line)])
            with pytest.raises(SystemExit) as exit_info:
                main()
            output = b"".join(capfdbinary.readouterr())
            return exit_info.value.code or 0, output.decode()

    return RawCommandLine(monkeypatch, capfdbinary)  # type: ignore[arg-type]


SMALL = "--net mlp --epochs 1 --batch 2 --device cpu"


@pytest.mark.filterwarnings("ignore")
def test_commands_on_a_folder_of_hostile_names(
    photos: Path, hostile: tuple[str, str], command: CommandLine
) -> None:
    name, shown = hostile

    # Whole, then with a file that is no image and a class in one part only.
    code, output = command("data check photos")
    assert code == 0, output
    assert f"  {shown}" in output
    assert_harmless(output)
    code, output = command("data check photos --json")
    assert list(json.loads(output)["parts"][0]["classes"]) == sorted([name, "dog"])
    assert_harmless(output)

    for line in (
        f"train --data photos {SMALL} --out r",
        f"compare --data photos {SMALL} --precisions fp32,bf16 --seeds 1 --out c",
        "eval r",
        "predict r photos/test",
        "predict r photos/test --json",
        "data show photos --out sheet.png",
        "report r --out -  -f md",
        "report c --out - -f html",
        "report c --out - -f json",
    ):
        code, output = command(line)
        assert code == 0, output
        assert_harmless(output)
        if line == "predict r photos/test":
            assert f"/{shown}0.png" in output
    code, output = command("predict r photos/test --out p.csv")
    assert code == 0, output
    assert f"{shown}0.png" in Path("p.csv").read_text()

    (photos / "train" / name / f"{name}0.png").write_bytes(b"no image")
    for line in ("data check photos", f"train --data photos {SMALL} --out n", "data show photos"):
        code, output = command(line)
        assert code in (1, 2), output
        assert f"{shown}0.png" in output
        assert_harmless(output)

    (photos / "train" / f"{name}2").mkdir()
    (photos / "train" / f"{name}2" / "x.png").write_bytes(b"")
    for line in ("data check photos", f"train --data photos {SMALL} --out n"):
        code, output = command(line)
        assert f"train/{shown}2" in output
        assert_harmless(output)
    (photos / "train" / f"{name}2" / "x.png").unlink()
    code, output = command("data check photos")
    assert code == 2
    assert_harmless(output)
    code, output = command("data check photos --debug")
    assert "Traceback" in output
    assert_harmless(output)


@pytest.mark.filterwarnings("ignore")
def test_what_run_folders_say(
    tmp_path: Path,
    hostile: tuple[str, str],
    command: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values of run.json, log.jsonl, compare.json and checkpoints; names of folders."""
    name, _ = hostile
    monkeypatch.chdir(tmp_path)
    run_command("train", *SMALL.split(), "--samples", "8", "--test-samples", "4", "--out", "r")
    compare = f"compare {SMALL} --samples 8 --test-samples 4 --precisions fp32 --seeds 1 --out c"
    assert command(compare)[0] == 0

    log = Path("r/log.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    for i, row in enumerate(rows):
        row[name] = i
    Path("other").mkdir()
    for folder, shift in (("r", 0), ("other", 1)):
        lines = [json.dumps({**row, name: row[name] + shift}) for row in rows]
        Path(folder, "log.jsonl").write_text("\n".join(lines) + "\n")
    key = name.replace("\udcff", "")  # which a checkpoint refuses
    hs.checkpoint.save(Path("x", "step-000000001"), {key: 1})
    hs.checkpoint.save(Path("y", "step-000000001"), {key: 2})

    content = json.loads(Path("r/run.json").read_text())
    content |= {"command": name, "date": name, "environment": {name: name}}
    for setting in ("net", "data", "path", "device"):
        content["asked"][setting] = name
    Path("r/run.json").write_text(json.dumps(content))

    summary = json.loads(Path("c/compare.json").read_text())
    summary |= {"title": name, "command": name, "date": name, "environment": {name: name}}
    summary["spec"] |= {"net": name, "data": name}
    for row in summary["rows"] + summary["runs"]:
        row |= {"precision": name, "verdict": name, "error": f"{name}: {name}", "status": "failed"}
    summary["recommendation"] |= {"precision": name, "reason": name}
    Path("c/compare.json").write_text(json.dumps(summary))
    assert_harmless(table.text(summary))
    # In Markdown an error stands in a block of its own, with its lines.
    for run in summary["runs"]:
        run["error"] = name.replace("\n", " ")
    Path("c/compare.json").write_text(json.dumps(summary))
    for format in ("md", "html", "json"):
        assert_harmless(render(summary, format))

    for line in (
        "diff r other",
        "diff x y",
        "eval r",
        "eval c",
        "predict r sample",
        "replay r --step 1",
        f"train {SMALL} --out r --resume auto",
        compare,
        "report r --out - -f md",
        "report c --out - -f md",
        "report c --out - -f html",
    ):
        _, output = command(line)
        assert_harmless(output)


@pytest.mark.filterwarnings("ignore")
def test_what_is_typed_is_quoted_harmlessly(
    tmp_path: Path, hostile: tuple[str, str], monkeypatch: pytest.MonkeyPatch, command: CommandLine
) -> None:
    """A file of a hostile name may be typed by a shell: `halfstep data check *`."""
    name, _ = hostile
    monkeypatch.chdir(tmp_path)
    word = shlex.quote(name)
    for line in (
        word,
        f"data {word}",
        f"data check {word}",
        f"data check --{word}",
        f"data check . {word}",
        f"eval {word}",
        f"predict {word} {word}",
        f"report {word}",
        f"train --batch {word}",
        f"train --precision {word}",
        f"train --data {word}",
        f"train --net {word}",
        f"train --build {word}:{word}",
        f"diff {word} {word}",
    ):
        code, output = command(line)
        assert code == 2, output
        # The end of a line in an argument is the user's own.
        assert_harmless(output.replace("\nhalfstep: done", ""))


@pytest.mark.parametrize("name", ["title", "direction", "markup", "eight bits"])
def test_bars_on_a_real_terminal(name: str, tmp_path: Path) -> None:
    """Rich draws the bars of a comparison on data of a hostile name; its own sequences are fine."""
    hostile, shown = HOSTILE[name]
    for split in ("train", "test"):
        for class_name in ("a", "b"):
            folder = tmp_path / hostile / split / class_name
            folder.mkdir(parents=True)
            Image.new("L", (28, 28), 9).save(folder / "0.png")
    code = "from halfstep.cli import main; main()"
    words = ["compare", "--data", hostile, *SMALL.split(), "--precisions", "fp32", "--seeds", "1"]
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    output = b""
    while select.select([master], [], [], 120)[0]:
        try:
            piece = os.read(master, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        output += piece
    os.close(master)
    assert process.wait() == 0, output
    text = output.decode()
    assert "\x1b[?25h" in text  # drawn by rich
    assert shown in text
    if shown != hostile:
        assert hostile not in text


def test_commands_print_in_one_way_only() -> None:
    """No file of the commands prints but through `echo`, which escapes."""
    allowed = {("output.py", "typer.echo")}
    found = set()
    for path in sorted((ROOT / "halfstep" / "cli").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in ("print", "typer.echo", "typer.secho", "typer.style", "rich.print"):
                    found.add((path.name, name))
                if re.fullmatch(r"sys\.(stdout|stderr)\.write(lines)?", name):
                    found.add((path.name, name))
    assert found == allowed


def test_progress_of_a_comparison_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    from halfstep.compare.progress import LineProgress

    result: dict[str, Any] = {"precision": "fp32", "seed": 0, "status": "failed"}
    for hostile, _ in HOSTILE.values():
        progress = LineProgress()
        progress.done({**result, "error": f"ValueError: {hostile}"})
        progress.note(hostile.replace("\n", ""))
        assert_harmless(capsys.readouterr().out)
