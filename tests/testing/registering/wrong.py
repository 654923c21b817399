"""Registers a template when it is imported, as a user's module does."""

from tests.testing.extensions import Wrong
from tilewright.extend import register_template

register_template(Wrong(), module=__name__)
