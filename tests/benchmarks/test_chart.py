"""The README's chart: drawn from the committed results, and readable without seeing it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.chart import PICTURE, Bar, Panel, drawn, picture

SVG = "{http://www.w3.org/2000/svg}"


def widths(text: str) -> list[float]:
    return [float(bar.attrib["width"]) for bar in ElementTree.fromstring(text).iter(f"{SVG}rect")]


def test_the_committed_picture_shows_the_committed_results() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), "run python benchmarks/chart.py"


def test_bars_are_as_long_as_the_speedups() -> None:
    panels = [
        Panel("CPU", "one", (Bar("A & B", 2.0, "x"), Bar("C", 1.0, "y"))),
        Panel("GPU", "two", (Bar("D", 0.5, "z"),)),
    ]
    text = drawn(panels)
    long, middle, short = widths(text)
    assert middle == pytest.approx(long / 2, abs=0.1) and short == pytest.approx(long / 4, abs=0.1)
    assert "1.41x on average" in text and "A &amp; B" in text
    description = next(ElementTree.fromstring(text).iter(f"{SVG}desc")).text
    assert description is not None and "D 0.50x z" in description


def test_it_has_colours_for_dark_pages_too() -> None:
    assert "prefers-color-scheme: dark" in picture()


def test_the_readme_quotes_the_averages_of_the_picture() -> None:
    readme = (Path(PICTURE).parents[1] / "README.md").read_text(encoding="utf-8")
    for average in re.findall(r"([\d.]+)x on average", picture()):
        assert f"{average}x" in readme
