"""Registers a sketch for GPUs when it is imported, as a user's module does."""

from tests.testing.extensions import Strips
from tilewright.extend import register_sketch

register_sketch(Strips(), target="cuda", module=__name__)
