"""For builders alone, which a Runner tells to import this: here, and only there, `Faulty` is a template."""

from __future__ import annotations

import tilewright.space.candidates as candidates
from tests.faults.templates import Faulty

candidates.TEMPLATES = (*candidates.TEMPLATES, Faulty())
