"""Run the command line as `python -m tilewright.cli`, without the current folder on the import path."""

import os
import sys

# `python -m` puts the current folder first on the path, so a file there could shadow an installed module. Until this
# has run, import only modules that the interpreter has already loaded.
if not getattr(sys.flags, "safe_path", False) and os.path.realpath(sys.path[0]) == os.path.realpath(""):
    sys.path.append(sys.path.pop(0))

from tilewright.cli import main

main()
