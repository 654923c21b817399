"""`python -m tilewright.cli`: the command line, without the current folder in front of what is installed."""

import os
import sys

# `python -m` puts the current folder first on the path: a file there would be taken for an installed module. Only what
# the interpreter has loaded by now may be imported before this.
if not getattr(sys.flags, "safe_path", False) and os.path.realpath(sys.path[0]) == os.path.realpath(""):
    sys.path.append(sys.path.pop(0))

from tilewright.cli import main

main()
