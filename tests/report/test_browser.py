"""The report in a real browser: no complaint, light and dark, on a phone, by keyboard, and read out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.browser import BROWSER, Page, browser
from tests.report.test_html import EVIL, sample
from tilewright.report.html import render

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed here")

# The contrast of every text with what is behind it, by the formula of WCAG; the smallest, with its text.
CONTRAST = """
(() => {
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    probe.clearRect(0, 0, 1, 1); probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const part = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const found = rgba(getComputedStyle(element).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255];
  };
  let worst = [99, "", ""];
  for (const details of document.querySelectorAll("details")) details.open = true;
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = texts.nextNode()); ) {
    const element = text.parentElement, style = getComputedStyle(element);
    if (!text.data.trim() || !element.checkVisibility() || element.closest("script, title, desc, .hidden")) continue;
    const ink = element instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(rgba(ink)), light(behind(element))].sort((p, q) => q - p);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < worst[0]) worst = [ratio, text.data.trim().slice(0, 40), ink];
  }
  return worst;
})()
"""

# Pairs of texts of a chart that lie on each other.
OVERLAPS = """
[...document.querySelectorAll("figure.chart > svg")].flatMap((svg) => {
  const boxes = [...svg.querySelectorAll("text")].map((t) => [t.textContent, t.getBBox()]);
  return boxes.flatMap(([name, a], n) => boxes.slice(0, n)
    .filter(([, b]) => a.x < b.x + b.width && b.x < a.x + a.width)
    .filter(([, b]) => a.y + 2 < b.y + b.height - 2 && b.y + 2 < a.y + a.height - 2)
    .map(([other]) => `${name} on ${other}`));
})
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("page") / "report.html"
    found.write_text(render(sample(5)))
    return found


def test_it_draws_without_a_complaint_and_fetches_nothing(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "evil.html"
    path.write_text(render(sample(3, label=EVIL)))
    page.open(path)
    assert page.complaints == [] and page.requested == [path.as_uri()]
    assert page.run("document.querySelectorAll('figure svg[role=img]').length") == 6
    assert page.run("document.querySelectorAll('circle').length") > 50
    page.run("location.hash = '#task2'; new Promise(requestAnimationFrame)")
    assert page.run("[...document.querySelectorAll('details[open]')].map((d) => d.id)") == ["task2"]
    assert page.complaints == []


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_can_be_read_in_light_and_dark(page: Page, path: Path, dark: bool) -> None:
    page.open(path, dark=dark)
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(21, 23, 26)") == dark
    ratio, text, ink = page.run(CONTRAST)
    assert ratio >= 4.5, f"{text!r} in {ink}: {ratio:.2f}"


def test_no_text_of_a_chart_lies_on_another(page: Page, path: Path) -> None:
    page.open(path)
    assert page.run(OVERLAPS) == []


@pytest.mark.parametrize("width", [360, 390, 430])
def test_on_a_phone_the_table_fits(page: Page, path: Path, width: int) -> None:
    page.open(path, width=width)
    assert page.run("document.documentElement.scrollWidth") <= width
    table = "document.querySelector('table')"
    assert page.run(f"{table}.scrollWidth <= {table}.parentElement.clientWidth")
    heads = f"[...{table}.tHead.rows[0].cells].filter((cell) => cell.checkVisibility())"
    assert page.run(f"{heads}.map((cell) => cell.textContent.trim())") == [
        "layer",
        "total",
        "share",
        "tuning",
    ]
    rows = f"[...{table}.tBodies[0].rows].map((row) => row.getBoundingClientRect().right)"
    assert max(page.run(rows)) <= width
    # What is left out is below, with each kernel.
    page.run("document.getElementById('task1').open = true")
    assert "GFLOP/s" in page.run("document.getElementById('task1').innerText")


def test_what_the_cost_model_believes_opens_and_fits(page: Page, path: Path) -> None:
    page.open(path, width=390)
    section = "document.getElementById('beliefs').nextElementSibling.nextElementSibling"
    page.run(f"{section}.open = true")
    assert "chosen: contraction: rows=8" in page.run(f"{section}.innerText")
    assert page.run("document.documentElement.scrollWidth") <= 390
    bars = page.run(
        f"[...{section}.querySelectorAll('.bar i')].map((bar) => bar.getBoundingClientRect().width)"
    )
    assert bars[0] > bars[1] > bars[2] > 0
    assert page.complaints == []


def test_the_table_is_sorted_by_keyboard(page: Page, path: Path) -> None:
    page.open(path)
    rows = "[...document.querySelectorAll('table')][0].tBodies[0].rows"
    names = f"[...{rows}].map((row) => row.cells[0].querySelector('a').textContent)"
    before = page.run(names)
    for _ in range(60):
        page.press("Tab")
        if page.run("document.activeElement.textContent.trim()") == "one call":
            break
    assert page.run("document.activeElement.tagName") == "BUTTON"
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.press("Enter")
    assert page.run(names) == before  # the longest first, as it was
    page.press(" ")
    assert page.run(names) == before[::-1]
    assert page.run("document.activeElement.closest('th').getAttribute('aria-sort')") == "ascending"
    assert page.run("document.getElementById('sorted').textContent") == "Sorted by one call, ascending."
    assert page.run("document.querySelectorAll('th[aria-sort]').length") == 1


def test_the_first_key_leads_past_the_head(page: Page, path: Path) -> None:
    page.open(path)
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"
    assert page.run("document.activeElement.getBoundingClientRect().left") >= 0
    page.press("Enter")
    assert page.run("document.activeElement.id") == "tasks"


def test_a_screen_reader_finds_a_name_for_everything(page: Page, path: Path) -> None:
    page.open(path)
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    named = (
        "link",
        "button",
        "image",
        "img",
        "columnheader",
        "rowheader",
        "region",
        "navigation",
        "DisclosureTriangle",
    )
    kinds = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node.get("ignored") and node.get("role", {}).get("value") in named
    ]
    assert [role for role, name in kinds if not name.strip()] == []
    roles = {role for role, _ in kinds}
    assert {"link", "button", "columnheader", "rowheader", "region"} <= roles and roles & {"image", "img"}
    assert ("region", "Graph of the model") in kinds
    assert ("region", "Table of groups") in kinds


def test_the_groups_of_fusion_are_shown(page: Page, path: Path) -> None:
    page.open(path)
    table = "document.querySelector('#fusion ~ .scroll table')"
    assert page.run("getComputedStyle(document.getElementById('fusion')).display") != "none"
    rows = f"[...{table}.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.innerText)[1])"
    assert page.run(rows) == ["yes", "no"]
    assert page.run("document.querySelector('nav a[href=\"#fusion\"]').innerText") == "Fusion"
