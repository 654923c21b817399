"""For builders alone, which a Runner tells to import this: here, and only there, these are templates.

They are in the catalog as built-in ones are: what a registered template raises would cost its candidate alone."""

from __future__ import annotations

from tests.faults.templates import Faulty, Mutated
from tilewright.space.catalog import catalog

catalog("cpu").registered.extend([Faulty(), Mutated()])
