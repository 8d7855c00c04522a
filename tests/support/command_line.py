"""Runs the command `halfstep` inside the test's process."""

import json
import shlex
import sys
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from halfstep.cli import main
from halfstep.cli.main import app


def run_command(*words: str) -> str:
    """What a command that succeeds prints, both streams together. Its errors are raised."""
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def run_json(*words: str) -> Any:
    """The JSON that a command prints with --json; its errors are raised."""
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


class CommandLine:
    """The whole command, as a shell starts it, with main() around it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, line: str) -> tuple[object, str]:
        """The exit code, and what went to both streams."""
        self.monkeypatch.setattr(sys, "argv", ["halfstep", *shlex.split(line)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        return exit_info.value.code or 0, "".join(self.capsys.readouterr())


def every_command() -> list[str]:
    """The commands of the application as they are typed: "train", "data check", …"""
    names = []
    root = get_command(app)
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        inner_names = getattr(command, "commands", None)
        if inner_names is None:
            names.append(name)
        else:
            names += [f"{name} {inner_name}" for inner_name in inner_names]
    return names
