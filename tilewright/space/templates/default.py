"""The default program: what every target has for every task with a formula, under one name."""

from __future__ import annotations

from tilewright.space.space import Config

NAME = "default"
DEFAULT = Config(NAME, ())
