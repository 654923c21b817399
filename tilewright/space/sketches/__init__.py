"""Sketches: program structures that rules derive from a task's expressions, starting at the output."""

from tilewright.space.sketches.derivation import derive
from tilewright.space.sketches.rules import RULES, register, unregister
from tilewright.space.sketches.sketch import Move, Rule, Sketch

__all__ = ["RULES", "Move", "Rule", "Sketch", "derive", "register", "unregister"]
