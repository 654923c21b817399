"""A command in this process: quick, and with what is patched here."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tilewright.cli.app import app
from tilewright.cli.output import run_guarded


class Done(NamedTuple):
    code: int
    out: str
    err: str


def run_here(patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Done:
    """As `tilewright ARGUMENTS` into two pipes."""
    patch.setattr("sys.argv", ["tilewright", *arguments])
    capsys.readouterr()
    code = run_guarded(app)
    said = capsys.readouterr()
    return Done(code, said.out, said.err)
