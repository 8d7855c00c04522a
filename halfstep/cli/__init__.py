"""The command `halfstep`."""

from halfstep.cli.main import main

__all__ = ["main"]
