"""Run folders that hold links to files elsewhere: no command writes through them."""

from pathlib import Path

import pytest

from tests.support.command_line import CommandLine

TEXT = "a file of mine"
SMALL = "--samples 64 --test-samples 16 --epochs 1 --device cpu --plain"
COMPARE = f"compare {SMALL} --precisions fp32 --seeds 1 --out {{folder}}"
TRAIN = f"train {SMALL} --out {{folder}}"

# A command, and the file that it writes.
LINES = {
    "report.html": "report {folder}",
    "report.md": "report {folder}/log.jsonl --format md",
    "run.json": TRAIN,
    "log.jsonl": TRAIN,
    "weights.safetensors": f"{TRAIN} --resume auto",
    "compare.json": COMPARE,
    "report.json": COMPARE,
    "runs": COMPARE,
    "runs/fp32-s0": COMPARE,
    "runs/fp32-s0/result.json": COMPARE,
}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LINES)
def test_a_link_out_of_the_folder_is_refused(
    name: str, command: CommandLine, tmp_path: Path
) -> None:
    folder = tmp_path / "downloaded"
    line = LINES[name].format(folder=folder)
    if line.startswith("report"):
        code, output = command(TRAIN.format(folder=folder))
        assert code == 0, output
    mine = tmp_path / "mine"
    if Path(name).suffix:
        mine.write_text(TEXT)
    else:
        mine.mkdir()
    link = folder / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(mine)

    code, output = command(line)
    assert code == 2, output
    assert f"got a link to {mine}" in output.replace("\n", " ")
    assert link.is_symlink()
    if mine.is_dir():
        assert list(mine.iterdir()) == []
    else:
        assert mine.read_text() == TEXT


@pytest.mark.filterwarnings("ignore")
def test_a_link_inside_the_folder_and_one_to_it_stay(command: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "log.jsonl").symlink_to("logs/first")
    shortcut = tmp_path / "shortcut"
    shortcut.symlink_to(folder)
    code, output = command(TRAIN.format(folder=shortcut))
    assert code == 0, output
    assert (folder / "log.jsonl").is_symlink()
    assert (folder / "logs" / "first").read_text().startswith("{")
