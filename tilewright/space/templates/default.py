"""The default program: every target has one, under one name, for every task with a formula."""

from __future__ import annotations

from tilewright.space.space import Config

NAME = "default"
DEFAULT = Config(NAME, ())
