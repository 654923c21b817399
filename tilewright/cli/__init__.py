"""The command line: thin commands over the library.

Exit codes: 0 done; 1 the user's error, with what to try; 2 a wrong command line; 3 our bug; 130 interrupted.
"""

from __future__ import annotations

import sys


def main() -> None:
    from tilewright.cli.app import app
    from tilewright.cli.output import run_guarded

    sys.exit(run_guarded(app))
