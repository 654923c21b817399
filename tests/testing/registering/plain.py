"""Registers a template when it is imported, as a user's module does."""

from tests.testing.extensions import Plain
from tilewright.extend import register_template

register_template(Plain(), module=__name__)
