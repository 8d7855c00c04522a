"""Entry of the command: errors without tracebacks unless asked, exit codes that scripts can use."""

import sys
import traceback


def main() -> None:
    """Run the command. Exit codes: 0 done, 1 a difference, 2 a mistake in what was asked or an error on the way."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        _run()
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        else:
            print(f"halfstep: {_said(error)}\n(--debug shows where it was raised)", file=sys.stderr)
        sys.exit(2)


def _run() -> None:
    from halfstep.cli.app import app

    try:
        app()
    except SystemExit as end:
        cause = getattr(end.__context__, "__cause__", None)
        if isinstance(cause, EOFError):  # typer takes it for the end of the input and exits with 1
            raise cause from None
        raise


def _said(error: Exception) -> str:
    """The message, with the kind where it is not one written for users, and its notes."""
    kind, text = type(error).__name__, str(error)
    plain = text and isinstance(error, ValueError | TypeError | OSError)
    first = text if plain else f"{kind}: {text}" if text else kind
    return "\n".join([first, *getattr(error, "__notes__", [])])
