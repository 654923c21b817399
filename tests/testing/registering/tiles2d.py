"""Registers a sketch rule when it is imported, as a user's module does."""

from tests.testing.extensions import Tiles2D
from tilewright.extend import register_rule

register_rule(Tiles2D(), module=__name__)
