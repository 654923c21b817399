"""Run the command line as `python -m tilewright`: the same as `python -m tilewright.cli`."""

import tilewright.cli.__main__  # noqa: F401 - it runs the command line
