"""The command line: thin commands over the library.

Exit codes: 0 done; 1 a user error, with what to try; 2 an invalid command line; 3 an internal error; 130 interrupted.

A command imports what it needs when it runs: `--help`, `--version`, `zoo` and `db ls` start without the compiler.
"""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from tilewright.cli.app import app
        from tilewright.cli.output import run_guarded

        code = run_guarded(app)
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(
            f"error: the command line needs {error.name}, which is not installed\n"
            "  try: pip install 'tilewright[cli]'\n"
        )
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
