"""Hostile model files, crafted: each asks for too much memory, work or nesting, or breaks a rule of the format."""

from __future__ import annotations

import itertools

from tests.faults.hostile.building import Case
from tests.faults.hostile.contradictions import contradictions
from tests.faults.hostile.files import files
from tests.faults.hostile.rules import rules
from tests.faults.hostile.sizes import asked
from tests.faults.hostile.structures import structures


def crafted() -> dict[str, Case]:
    """Every crafted case by name."""
    cases: dict[str, Case] = {}
    for name, case in itertools.chain(asked(), structures(), rules(), contradictions(), files()):
        assert name not in cases, name
        cases[name] = case
    return cases
