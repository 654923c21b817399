"""Registers a template when it is imported, as a user's module does."""

from tests.testing.extensions import RaisesLater
from tilewright.extend import register_template

register_template(RaisesLater(), module=__name__)
