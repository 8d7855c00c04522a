"""`python -m halfstep` is the command `halfstep`."""

import os
import sys

# Python puts the current folder first on the path for -m. The command takes nothing from there but
# the module that the user names.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from halfstep.cli import main

main()
