"""What `halfstep compare` offers where its folder holds another comparison: commands that go on.

In a terminal it asks and runs the one that is chosen; elsewhere the message has them all.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import typer

from halfstep.cli.output import echo
from halfstep.experiment.output_folder import OtherComparisonError
from halfstep.experiment.typed_command import option_value, replace_option, without_options

# Options of the earlier command that are not repeated: they would throw runs away, or run some
# again.
NOT_REPEATED = ("--fresh", "--retry")
WHAT_TO_TRAIN = ("--precisions", "--seeds")


class Choice(NamedTuple):
    """A way to go on, the words of its command, and the threads it needs (None: as here)."""

    text: str
    words: list[str]
    threads: int | None = None

    def command(self) -> str:
        threads = f"OMP_NUM_THREADS={self.threads} " if self.threads else ""
        return f"{threads}{shlex.join(['halfstep', *self.words])}"


def ask_how_to_go_on(error: OtherComparisonError, out: Path) -> NoReturn:
    """Shows what differs and the ways on; in a terminal runs the chosen one in this one's place."""
    choices = list_choices(error, out, sys.argv[1:])
    echo(f"halfstep: {error.problem}", err=True)
    for number, choice in enumerate(choices, 1):
        echo(f"  {number}  {choice.text}:\n     {choice.command()}", err=True)

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise typer.Exit(2)
    numbers = [str(number) for number in range(1, len(choices) + 1)]
    answer = typer.prompt(
        f"Which one? {', '.join(numbers)} (Enter: none of them)",
        default="",
        show_default=False,
        err=True,
    ).strip()
    if answer not in numbers:
        raise typer.Exit(2)
    _run_instead(choices[int(answer) - 1])


def list_choices(error: OtherComparisonError, out: Path, words: Sequence[str]) -> list[Choice]:
    """The ways on: with the comparison of before, beside it, or in its place."""
    choices = []
    if error.same_machine:
        earlier = _earlier_words(error, out, words)
        if earlier is not None:
            text = "go on with the one that is there; finished runs stay"
            choices.append(Choice(text, earlier, error.threads))
    kept_words = without_options(words, NOT_REPEATED)
    beside = _free_folder(out)
    choices.append(
        Choice(
            f"keep it, and put this one into {beside}",
            replace_option(kept_words, "--out", str(beside)),
        )
    )
    choices.append(Choice("throw it away and start over", [*kept_words, "--fresh"]))
    return choices


def _earlier_words(
    error: OtherComparisonError, out: Path, words: Sequence[str]
) -> list[str] | None:
    """The command of before, with the precisions and seeds that were typed now.

    None where it was no command: a program called `halfstep.compare.compare`.
    """
    if error.same_spec:
        return without_options(words, NOT_REPEATED)
    try:
        program, *earlier = shlex.split(error.command)
    except ValueError:
        return None
    if program != "halfstep":
        return None
    earlier = without_options(earlier, NOT_REPEATED)
    if option_value(earlier, "--out") is not None or option_value(words, "--out") is not None:
        earlier = replace_option(earlier, "--out", str(out))
    for option in WHAT_TO_TRAIN:
        typed = option_value(words, option)
        if typed is not None:
            earlier = replace_option(earlier, option, typed)
    return earlier


def _free_folder(out: Path) -> Path:
    """The first of OUT-2, OUT-3 … that does not exist."""
    number = 2
    while out.with_name(f"{out.name}-{number}").exists():
        number += 1
    return out.with_name(f"{out.name}-{number}")


def _run_instead(choice: Choice) -> NoReturn:
    """Runs the command of the choice in place of this process, on the same terminal."""
    echo(f"\n{choice.command()}", err=True)
    environment = dict(os.environ)
    environment.pop("PYTHONSAFEPATH", None)  # main() sets it for its children only
    if choice.threads:
        environment["OMP_NUM_THREADS"] = str(choice.threads)
    words = [*_interpreter_words(), *choice.words]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, words, environment)


def _interpreter_words() -> list[str]:
    """How this process was started, up to the name of the command."""
    if "compare" in sys.orig_argv:
        return sys.orig_argv[: sys.orig_argv.index("compare")]
    return [sys.executable, "-m", "halfstep"]
