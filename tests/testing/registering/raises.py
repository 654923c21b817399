"""Registers a template when it is imported, as a user's module does."""

from tests.testing.extensions import Raises
from tilewright.extend import register_template

register_template(Raises(), module=__name__)
