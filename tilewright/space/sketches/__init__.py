"""Sketches: structures of programs that rules derive from a task's expressions, from the output back."""

from __future__ import annotations

from tilewright.space.sketches.sketch import Move, Rule, Sketch
from tilewright.space.template import Applied, Work

__all__ = ["Move", "Rule", "Sketch", "derive"]


def derive(work: Work) -> tuple[Applied, ...]:
    return ()
