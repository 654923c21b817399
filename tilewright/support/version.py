"""The version, where every package may ask for it."""

from __future__ import annotations

VERSION = "0.1.0"
