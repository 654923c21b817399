"""Gemmini's templates: integer layers on the accelerator, everything else as on a processor."""

from tilewright.space.templates.gemmini.accelerated import Accelerated, OnHost

__all__ = ["Accelerated", "OnHost"]
