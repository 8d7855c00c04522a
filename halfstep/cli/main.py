"""Entry of the command: errors without tracebacks unless asked, exit codes that scripts can use."""

import contextlib
import os
import sys
import traceback
import warnings
from itertools import pairwise
from typing import Any, TextIO

# what a message advises in Python, as the command line has it
_HINTS = {
    "allow download=True": "On the command line: halfstep data get NAME downloads it, --path says where it lies.",
    'fit(resume="auto")': "On the command line: --resume auto.",
    "load(..., strict=False)": "On the command line: name the network the weights were made for, --net or --build.",
}
# hs.data's maps go behind .batch(…) for speed; a data function leaves the batches to the command
_BATCHED = "In the data, behind .batch(…): .map("
_SAMPLED = "In the data function, on both parts (hs.data.Dataset(…) where they are none): .map("


def main() -> None:
    """Run the command. Exit codes: 0 done, 1 a difference or a failed check, 2 a mistake in what was asked or an error
    on the way, 130 and 143 when stopped by SIGINT and SIGTERM."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(
            AttributeError, ValueError
        ):  # a stream that is somebody else's, or closed
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        with _notices(debug):
            _run()
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        else:
            print(f"halfstep: {_said(error)}", file=sys.stderr)
        sys.exit(2)


def _run() -> None:
    from halfstep.cli.main__app import app

    if os.getcwd() not in sys.path:
        sys.path.insert(
            0, os.getcwd()
        )  # module:function of the user's, beside where the command is called
    try:
        app(prog_name="halfstep")  # however it was started, python -m halfstep too
    except SystemExit as end:
        cause = getattr(end.__context__, "__cause__", None)
        if isinstance(cause, EOFError):  # typer takes it for the end of the input and exits with 1
            raise cause from None
        if isinstance(cause, KeyboardInterrupt):  # likewise; a run that was going on has said more
            print("halfstep: stopped", file=sys.stderr)
            sys.exit(130)
        raise


@contextlib.contextmanager
def _notices(debug: bool) -> Any:
    """halfstep's notices as one line each; with --debug, and for other warnings, as Python has them."""
    with warnings.catch_warnings():
        before = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
            line: str | None = None,
        ) -> None:  # fmt: skip
            if category.__name__ == "Notice" and not debug:
                print(f"note: {message}", file=sys.stderr)
            else:
                before(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def _said(error: Exception) -> str:
    """The message, with the kind where it is not one written for users, its notes, and --debug where that says more."""
    kind, text = type(error).__name__, str(error)
    plain = text and isinstance(error, ValueError | TypeError | OSError)
    first = _worded(text if plain else f"{kind}: {text}" if text else kind)
    hints = [hint for words, hint in _HINTS.items() if words in first]
    return "\n".join([first, *_notes(error), *hints])


def _notes(error: Exception) -> list[str]:
    found = list(getattr(error, "__notes__", []))
    if (
        "torch" not in sys.modules
    ):  # no code of the user's has run, and torch takes seconds to import
        return found
    from halfstep.utils.user_code import helps, sample

    place = sample(error)
    return [
        *found,
        *([place] if place else []),
        *(["(--debug shows where it was raised)"] if helps(error) else []),
    ]


def _worded(text: str) -> str:
    """A setting as the option that was given for it; what to do to batches as what to do in a data function."""
    name, colon, rest = text.partition(":")
    option = f"--{name.replace('_', '-')}"
    given = [part for word in sys.argv[1:] for part in word.split("=", 1)]
    text = f"{option}{colon}{rest}" if colon and option in given else text
    own = any(name == "--data" and ":" in value for name, value in pairwise(given))
    return text.replace(_BATCHED, _SAMPLED) if own else text
