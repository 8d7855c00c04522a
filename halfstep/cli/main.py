"""The command `halfstep`: its subcommands, and what an error looks like.

Errors are shown without a traceback unless --debug is given. Exit codes are for scripts: 0 done,
1 a difference or a failed check, 2 a mistake in the command or an error on the way, 130 and 143
when stopped by SIGINT and SIGTERM.
"""

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, TextIO

import typer

from halfstep.cli.bench import HELP as BENCH_HELP
from halfstep.cli.bench import bench
from halfstep.cli.compare import HELP as COMPARE_HELP
from halfstep.cli.compare import compare
from halfstep.cli.data import data_app
from halfstep.cli.evaluate import evaluate
from halfstep.cli.find_lr import HELP as FIND_LR_HELP
from halfstep.cli.find_lr import find_lr
from halfstep.cli.info import info
from halfstep.cli.options import Command, Group, option_flag
from halfstep.cli.output import EXIT_INTERRUPTED, echo
from halfstep.cli.predict import predict
from halfstep.cli.rank_process import RankProcess, has_launcher
from halfstep.cli.report import report
from halfstep.cli.runs import diff, replay
from halfstep.cli.train import HELP as TRAIN_HELP
from halfstep.cli.train import train
from halfstep.experiment.rank_agreement import AgreedRefusal

EXIT_ERROR = 2
HELP_COLUMNS = 120  # help is as wide as the terminal, up to this

# Advice for Python in a message → the same for the command line.
COMMAND_LINE_HINTS = {
    "allow download=True": "On the command line: halfstep data get NAME downloads it, "
    "--path says where it lies.",
    'fit(resume="auto")': "On the command line: --resume auto.",
    "load(..., strict=False)": "On the command line: name the network the weights were made for, "
    "--net or --build.",
}

# Advice about a user's data. In Python, maps go behind .batch(…), for speed; a data function
# returns samples and leaves the batches to the command.
ADVICE_FOR_BATCHES = "In the data, behind .batch(…): .map("
ADVICE_FOR_DATA_FUNCTION = (
    "In the data function, on both parts (hs.data.Dataset(…) where they are none): .map("
)

HELP = """Train PyTorch models in any numeric precision, and know what it cost.

\b
halfstep compare         which precision to use? a minute, no data needed
halfstep info            what this machine does best
halfstep train --precision O2 --out runs/first
halfstep eval runs/first
halfstep COMMAND --help  more, with examples

Exit codes: 0 done, 1 a difference or a failed check, 2 a mistake or an error, 130 and 143 when
stopped.
"""

app = typer.Typer(
    cls=Group,
    name="halfstep",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": HELP_COLUMNS},
)


def _print_version(requested: bool) -> None:
    if requested:
        import halfstep

        echo(f"halfstep {halfstep.__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="print the version and exit"
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="errors with a traceback; anywhere on the line")
    ] = False,
) -> None:
    """The options of `halfstep` itself. main() reads --debug before typer sees it."""


# In the order of the help.
app.command(help=COMPARE_HELP, cls=Command)(compare)
app.command(cls=Command)(report)
app.command(help=TRAIN_HELP, cls=Command)(train)
app.command("eval", cls=Command)(evaluate)
app.command(cls=Command)(predict)
app.command("find-lr", help=FIND_LR_HELP, cls=Command)(find_lr)
app.command(cls=Command)(info)
app.command(help=BENCH_HELP, cls=Command)(bench)
app.add_typer(data_app, name="data")
app.command(cls=Command)(diff)
app.command(cls=Command)(replay)


def main() -> None:
    """Runs the command in sys.argv and ends the process with its exit code."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")

    # A terminal that lacks a character shows "?" for it. A stream may be closed, or another
    # program's object without `reconfigure`.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]

    process = RankProcess(debug=debug)
    try:
        with _short_notices(debug):
            _run_app()
    except SystemExit as end:
        if not has_launcher():
            raise
        sys.exit(process.end(end.code))
    except Exception as raised:
        is_agreed = isinstance(raised, AgreedRefusal)
        error = raised.error if isinstance(raised, AgreedRefusal) else raised
        if debug:
            text = "".join(traceback.format_exception(error)).rstrip()
        else:
            text = _error_message(error)
        sys.exit(process.show_error(error, text, agreed=is_agreed, exit_code=EXIT_ERROR))


def _run_app() -> None:
    try:
        with _children_with_safe_path():
            app(prog_name="halfstep")  # also when started as python -m halfstep
    except SystemExit as end:
        # typer takes these two for the end of the input and exits with 1.
        cause = getattr(end.__context__, "__cause__", None)
        if isinstance(cause, EOFError):
            raise cause from None
        if isinstance(cause, KeyboardInterrupt):
            # A training run that was interrupted has printed more and does not come here.
            echo("halfstep: stopped", err=True)
            sys.exit(EXIT_INTERRUPTED)
        raise


@contextlib.contextmanager
def _children_with_safe_path() -> Iterator[None]:
    """Inside, no Python that is started looks for modules in the current folder.

    The worker processes of a DataLoader are such, where they are not forked: `python -c`.
    """
    if "PYTHONSAFEPATH" in os.environ:
        yield
        return
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        os.environ.pop("PYTHONSAFEPATH", None)


@contextlib.contextmanager
def _short_notices(debug: bool) -> Iterator[None]:
    """Inside, halfstep's notices are printed as one line each: "note: …".

    Other warnings, and all of them with --debug, are shown as Python shows them.
    """
    with warnings.catch_warnings():

        def show_warning(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if category.__name__ == "Notice" and not debug:
                echo(f"note: {message}", err=True)
            else:
                text = warnings.formatwarning(message, category, filename, lineno, line)
                echo(text, err=True, nl=False)

        warnings.showwarning = show_warning
        yield


def _error_message(error: Exception) -> str:
    """The error's message, its notes, and what to do about it on the command line.

    The class of the error stands in front where its messages are not written for users.
    """
    message = str(error)
    class_name = type(error).__name__
    if not message:
        message = class_name
    elif not isinstance(error, ValueError | TypeError | OSError):
        message = f"{class_name}: {message}"
    message = _in_command_line_words(message)
    hints = [hint for advice, hint in COMMAND_LINE_HINTS.items() if advice in message]
    return "\n".join([message, *_error_notes(error), *hints])


def _error_notes(error: Exception) -> list[str]:
    """Notes attached to the error, the user's sample that raised it, and whether --debug helps."""
    notes = list(getattr(error, "__notes__", []))
    # Without torch no code of the user's has run, and torch takes seconds to import.
    if "torch" not in sys.modules:
        return notes
    from halfstep.utils.user_code import failing_sample, traceback_helps

    sample_note = failing_sample(error)
    if sample_note:
        notes.append(sample_note)
    if traceback_helps(error):
        notes.append("(--debug shows where it was raised)")
    return notes


def _in_command_line_words(message: str) -> str:
    """The message with --clip-norm for clip_norm, where that option was typed.

    Advice about batches becomes advice about the data function, where one was typed.
    """
    typed_words = [part for word in sys.argv[1:] for part in word.split("=", 1)]
    setting, colon, explanation = message.partition(":")
    option = option_flag(setting)
    if colon and option in typed_words:
        message = f"{option}:{explanation}"
    has_data_function = any(
        word == "--data" and ":" in value for word, value in pairwise(typed_words)
    )
    if has_data_function:
        message = message.replace(ADVICE_FOR_BATCHES, ADVICE_FOR_DATA_FUNCTION)
    return message
