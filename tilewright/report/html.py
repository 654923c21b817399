"""A report as one HTML file with styles, script, drawings and the trace inline; it fetches nothing.

Names come from users' models, so everything is escaped. The page's content security policy allows one script, by
digest, and no connections.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from importlib import resources

import jinja2

from tilewright.report import charts, figures
from tilewright.report.data import Report
from tilewright.report.network import network

MAX_BYTES = 2_000_000
_MAX_CURVES = 24
_MAX_LAYERS = 24  # of one kernel, by name
_TRACE_BYTES = 600_000  # maximum in the file; a longer trace is truncated
_SHORTER = (160, 60, 20, 0)  # lines of each task's code, reduced until the file is small enough


def render(report: Report) -> str:
    """Render below MOST_BYTES: for very many tasks, less of their code is shown."""
    page = ""
    for lines in _SHORTER:
        page = _render(report, lines)
        if len(page.encode()) < MAX_BYTES:
            break
    return page


def _render(report: Report, code_lines: int) -> str:
    templates = resources.files("tilewright.report")
    style, script = (templates.joinpath(name).read_text() for name in ("report.css", "report.js"))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "seconds": figures.seconds_text,
        "count": figures.count_text,
        "bytes": figures.bytes_text,
    }
    environment.globals |= {"rate": figures.rate_text}
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    drawn = [(number, task, charts.tuning_curve(task)) for number, task in enumerate(report.tasks, start=1)]
    curves = [one for one in drawn if one[2] is not None]
    template = environment.from_string(templates.joinpath("report.html.j2").read_text())
    return template.render(
        report=report,
        style=jinja2.utils.markupsafe.Markup(style),
        script=jinja2.utils.markupsafe.Markup(script),
        script_digest=digest,
        curves=curves[:_MAX_CURVES],
        more_curves=max(0, len(curves) - _MAX_CURVES),
        predictions=charts.predictions(report),
        beliefs=[(number, task) for number, task in enumerate(report.tasks, start=1) if task.beliefs],
        roofline=charts.roofline(report),
        memory=charts.memory(report),
        network=network(report),
        fusion=None if report.model is None else report.model.fusion,
        shapes=charts.SHAPES,
        above_roof=sum(task.is_above_roof for task in report.tasks),
        most_layers=_MAX_LAYERS,
        longest=max((task.total * max(task.gain or 1.0, 1.0) for task in report.tasks), default=0.0) or 1.0,
        code_lines=code_lines,
        trace=_trace_uri(report),
    )


def _trace_uri(report: Report) -> str:
    """The trace as a data link, gzipped, which Perfetto opens directly."""
    events = report.trace
    while events:
        text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))
        packer = zlib.compressobj(9, wbits=31)
        data = packer.compress(text.encode()) + packer.flush()
        if len(data) * 4 / 3 <= _TRACE_BYTES:
            return "data:application/gzip;base64," + base64.b64encode(data).decode()
        events = events[: len(events) // 2]
    return ""
