"""`python -m halfstep` is the command `halfstep`."""

from halfstep.cli import main

main()
