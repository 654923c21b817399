"""Registers an intrinsic when it is imported, as a user's module does."""

from tests.hw.declared import FMA
from tilewright.extend import register_intrinsic

register_intrinsic(FMA)
