"""Entry of the command: errors without tracebacks unless asked, exit codes that scripts can use."""

import sys


def main() -> None:
    """Run the command. Exit codes: 0 done, 1 a difference or a failed run, 2 a mistake in what was asked."""
    from halfstep.cli.app import app

    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        app()
        return
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        print(f"halfstep: {error}" + (f"\n{notes}" if notes else ""), file=sys.stderr)
        print("(--debug shows where it was raised)", file=sys.stderr)
        sys.exit(2)
