"""The file: sound HTML with every figure in it, nothing to fetch, nothing that a name could break; in a browser too."""

from __future__ import annotations

import base64
import gzip
import html.parser
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tilewright.report.code import Code, clipped, hot_loop
from tilewright.report.data import Machine, ModelReport, Report, TaskReport, Trial, report
from tilewright.report.figures import Scale, count_text, rate_text, seconds_text
from tilewright.report.html import MOST_BYTES, render

EVIL = "<script>alert('x')</script>\"><img src=http://evil.example/x onerror=alert(1)>"
MACHINE = Machine("a processor", True, 2, 3e11, {"L2": 2e11, "L3": 8e10, "memory": 2e10}, 48 << 20)
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)


def task(
    number: int, *, trials: int = 20, code: str = "program p()\n", label: str | None = None
) -> TaskReport:
    seconds = 1e-4 / (number + 1)
    return TaskReport(
        key=f"{number:032x}",
        label=label or f"conv+relu {number}",
        text="%0 = input : f32[1]\nreturn %0\n",
        output="f32[1]",
        calls=2,
        flops=10_000_000,
        bytes=400_000,
        schedule="contraction: rows=8",
        seconds=seconds,
        error=1e-7,
        before=1.5 * seconds,
        after=seconds,
        effort="quick",
        limit=0.6 * seconds,
        trials=tuple(
            Trial(
                f"contraction: rows={n}",
                None if n % 6 == 5 else seconds * (1 + 1 / (n + 1)),
                seconds * 1.3,
                "timeout" if n % 6 == 5 else "",
                "no answer" if n % 6 == 5 else "",
                1e9 + n,
                0.1,
            )
            for n in range(trials)
        ),
        code=Code("contraction: rows=8", code, "\tvfmadd231ps\t%zmm0, %zmm1, %zmm2\n", True),
    )


def sample(tasks: int = 4, **options: object) -> Report:
    model = ModelReport("net", "(x: f32[1]) -> (f32[1])", 3.21e-4, "2 (openmp)", "fast", "cpu", 100, 200)
    return report("net", MACHINE, [task(n, **options) for n in range(tasks)], model)  # type: ignore[arg-type]


class Reader(html.parser.HTMLParser):
    """Tags in pairs, attributes that would load something, and the text."""

    VOID = ("meta", "br", "img", "link", "input", "hr")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[tuple[str, str]] = []
        self.handlers: list[str] = []
        self.words = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "href" and tag == "a":
                self.links.append(value or "")
            elif name in ("src", "href", "srcset", "data", "action", "background", "xlink:href"):
                self.loaded.append((tag, value or ""))
            elif name.startswith("on"):
                self.handlers.append(name)
            elif name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words += data


def test_it_is_sound_and_fetches_nothing() -> None:
    page = render(sample())
    found = Reader(page)
    assert found.open == [] and found.loaded == [] and found.handlers == []
    assert found.tags.count("script") == 1 and "link" not in found.tags
    assert not re.search(r"https?://|url\(|@import|\bfetch\(|XMLHttp", page)
    anchors = [link[1:] for link in found.links if link.startswith("#")]
    assert set(anchors) <= set(found.ids) and len(set(found.ids)) == len(found.ids)
    assert all(link.startswith(("#", "data:application/gzip;base64,")) for link in found.links)
    assert "default-src 'none'" in page


def test_every_figure_is_there() -> None:
    data = sample()
    words = Reader(render(data)).words
    assert "321 µs" in words and "1.50×" in words and "conv+relu 3" in words
    for one in data.tasks:
        assert seconds_text(one.total) in words and seconds_text(one.typical) in words
        assert rate_text(one.flops, one.typical, "").strip() in words
    assert "60%" in words  # of the limit
    assert "timeout" in words and "12 failed" in words
    assert "a factor of 1.2" in words or "a factor of 1.1" in words
    assert "vfmadd231ps" in words and "program p()" in words


def test_the_trace_can_be_taken_out() -> None:
    data = sample()
    (link,) = (one for one in Reader(render(data)).links if one.startswith("data:"))
    trace = json.loads(gzip.decompress(base64.b64decode(link.partition(",")[2])))
    assert trace["traceEvents"] == data.trace


def test_names_are_only_names() -> None:
    data = sample(1, label=EVIL, code=EVIL)
    evil = replace(
        data.tasks[0],
        text=EVIL,
        output=EVIL,
        schedule=EVIL,
        effort=EVIL,
        trials=tuple(
            replace(one, config=EVIL, message=EVIL, failure=one.failure and EVIL) for one in data.trials
        ),
    )
    assert data.model is not None
    page = render(
        replace(data, title=EVIL, tasks=(evil,), model=replace(data.model, signature=EVIL, name=EVIL))
    )
    found = Reader(page)
    assert found.tags.count("script") == 1 and "img" not in found.tags
    assert found.loaded == [] and found.handlers == [] and found.open == []
    assert EVIL in found.words  # as text


@pytest.mark.parametrize(("tasks", "trials"), [(0, 0), (1, 0), (1, 1), (120, 48)])
def test_it_stays_small(tasks: int, trials: int) -> None:
    page = render(sample(tasks, trials=trials, code="  x[i] = a[i] * b[i]\n" * 150))
    assert len(page.encode()) < MOST_BYTES
    assert Reader(page).open == []


def test_a_task_without_any_figure() -> None:
    bare = replace(
        task(0, trials=0), seconds=None, error=None, before=None, after=None, effort="", limit=None, code=None,
        flops=0, bytes=0,
    )  # fmt: skip
    page = render(report("bare", MACHINE, [bare]))
    assert Reader(page).open == [] and "No trial was made." in page


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed here")
def test_a_browser_draws_it_without_a_complaint(tmp_path: Path) -> None:
    """In a sandbox without a network of its own; the page says in its title when something went wrong."""
    page = render(sample(3, label=EVIL))
    path = tmp_path / "report.html"
    path.write_text(page)
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=2000",
            f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={tmp_path / 'net.json'}",
            "--dump-dom", path.as_uri() + "#task2",
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line or "Refused" in line]
    assert complaints == []
    drawn = Reader(done.stdout)
    assert drawn.tags.count("svg") == 5 and drawn.tags.count("circle") > 50
    assert re.search(r'<details id="task2" open="">', done.stdout)  # the script ran
    requested = re.findall(r'"url":"(\w+://[^"]*)', (tmp_path / "net.json").read_text())
    assert [url for url in requested if path.name not in url and "evil" in url] == []


# -- parts ------------------------------------------------------------------------------------------------------------


def test_words_for_figures() -> None:
    assert [seconds_text(s) for s in (1.5, 0.0234, 1.2e-4, 5e-9, None)] == [
        "1.50 s",
        "23.4 ms",
        "120 µs",
        "5.00 ns",
        "–",
    ]
    assert rate_text(1e9, 0.5, "GFLOP/s") == "2.00 GFLOP/s" and rate_text(0, 1.0, "") == "–"
    assert count_text(12_300_000) == "12.3 M" and count_text(12) == "12 "


def test_scales() -> None:
    scale = Scale(1.0, 100.0, 0.0, 200.0)
    assert (scale(1), scale(10), scale(100), scale(1000)) == (0, 100, 200, 200)
    assert scale.ticks() == [1, 10, 100]
    assert Scale(0, 24, 0, 100, log=False).ticks() == [0, 10, 20]


def test_the_innermost_loop_is_found() -> None:
    assembly = (
        "kernel:\n\tmov\trax, 1\n.LBB0_1:\n\tvfmadd231ps\tzmm0, zmm1, zmm2\n\tjne\t.LBB0_1\n.LBB0_2:\n\tret\n"
    )
    assert hot_loop(assembly) == ".LBB0_1:\n\tvfmadd231ps\tzmm0, zmm1, zmm2\n\tjne\t.LBB0_1"
    assert hot_loop("") == "" and clipped("a\nb\nc", 2) == "a\nb\n... 1 more lines"
