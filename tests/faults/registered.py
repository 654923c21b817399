"""For builders alone, which a Runner tells to import this: here, and only there, these are templates."""

from __future__ import annotations

import tilewright.space.candidates as candidates
from tests.faults.templates import Faulty, Mutated

candidates.TEMPLATES = (*candidates.TEMPLATES, Faulty(), Mutated())
