"""Reports the result of a search: an HTML page that needs no network, and a JSON file with the hardware's parameters
and each layer's mapping."""

from __future__ import annotations

import math
from dataclasses import fields
from html import escape
from typing import Any

import numpy as np

from tilewright.codesign.mapping import LEVELS, Hardware, needs
from tilewright.codesign.model import BOUNDS, Model
from tilewright.codesign.network import Design
from tilewright.codesign.problem import LOOPS
from tilewright.codesign.programs import LayerProgram, total_cycles
from tilewright.codesign.search import Exploration
from tilewright.hw.gemmini import KIB, GemminiMachine

Programs = tuple[LayerProgram | None, ...]

_COLOURS = dict(
    zip(LOOPS, ("#8da0cb", "#66c2a5", "#fc8d62", "#e5c494", "#e78ac3", "#a6d854", "#bbbbbb"), strict=True)
)
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%}td,th{padding:.25rem .5rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}code{font-size:.85em}svg text{font:12px system-ui,sans-serif}
"""


def parameters(design: Design, programs: Programs) -> dict[str, Any]:
    """The parameters of the hardware and its programs, which `target="gemmini:FILE"` reads. `machine` has the fields of
    GemminiMachine, `module` has the parameters of the RTL's module that follow from them, and mappings are in the
    notation of `codesign/mapping.py`."""
    machine = design.machine
    simple = {
        each.name: getattr(machine, each.name)
        for each in fields(GemminiMachine)
        if isinstance(getattr(machine, each.name), int | float | str)
    }
    return {
        "machine": simple,
        "module": {
            "DIM": machine.dim,
            "SP_ROWS": machine.scratchpad_rows,
            "ACC_ROWS": machine.accumulator_rows,
            "SP_BANKS": machine.scratchpad_banks,
            "BUS": machine.bus_bytes,
        },
        "area_mm2": design.area,
        "cycles": design.cycles,
        "simulated_cycles": total_cycles(design, programs),
        "microjoules": design.microjoules,
        "edp": design.edp,
        "layers": [
            {
                "name": layer.name,
                "extents": dict(zip(LOOPS, layer.extents, strict=True)),
                "stride": layer.stride,
                "dilation": layer.dilation,
                "count": layer.count,
                "mapping": design.mappings.text(index),
                "cycles": float(design.layer_cycles[index]),
                "microjoules": float(design.layer_microjoules[index]),
                "program": None if program is None else program.fields,
            }
            for index, (layer, program) in enumerate(zip(design.network.layers, programs, strict=True))
        ],
    }


def reasons(design: Design, designs: list[Design]) -> list[str]:
    """Explain the hardware: what bounds its layers, which layer needs each part, and what a change of one part
    costs."""
    network, machine = design.network, design.machine
    bound = bound_by(design)
    time = network.counts * design.layer_cycles / design.cycles
    found = [
        f"{part} decides the cycles of {int((bound == index).sum())} of {len(network)} layers,"
        f" {time[bound == index].sum():.0%} of the time."
        for index, part in enumerate(BOUNDS)
        if (bound == index).any()
    ]
    need = needs(network.nests, design.mappings)
    for name, words in (
        ("array", need.dim),
        ("scratchpad", need.scratchpad),
        ("accumulator", need.accumulator_column),
    ):
        widest = int(words.argmax())
        size = {
            "array": f"{machine.dim}x{machine.dim} PEs",
            "scratchpad": f"{machine.scratchpad // KIB} KiB",
            "accumulator": f"{machine.accumulator // KIB} KiB",
        }[name]
        found.append(f"The {name} has {size}: {network.layers[widest]} uses most of it.")
    labels = {"dim": "rows of PEs", "scratchpad": "KiB of scratchpad", "accumulator": "KiB of accumulator"}
    for name, label in labels.items():
        here = getattr(machine, name)
        alike = [
            (abs(math.log(getattr(other.machine, name) / here)), getattr(other.machine, name), other.edp)
            for other in designs
            if getattr(other.machine, name) != here
            and all(getattr(other.machine, each) == getattr(machine, each) for each in labels if each != name)
        ]
        for _, amount, edp in sorted(alike)[:2]:
            amount = amount if name == "dim" else amount / KIB
            found.append(f"With {amount:g} {label} the EDP would be {edp / design.edp - 1:+.1%}.")
    return found


def bound_by(design: Design) -> np.ndarray:
    """The index in BOUNDS of the part that determines each layer's cycles: [layers]."""
    hardware = Hardware.of([design.machine]).take(np.zeros(len(design.network), int))
    return Model.of(design.machine).estimate(design.network.nests, design.mappings, hardware).bound_by


def render(found: Exploration, title: str, programs: Programs, reference: Design | None = None) -> str:
    """Render the page. `reference`: a design to compare with, such as the default Gemmini with its library's tiling."""
    best = found.best
    head = [
        f"<h1>{escape(title)}</h1>",
        f"<p><b>{escape(best.machine.describe())}</b>; {best.area:.2f} mm², {best.watts(found.limits.clock):.2f} W at"
        f" {found.limits.clock / 1e9:g} GHz; {best.cycles:,.0f} cycles, {best.microjoules:,.0f} µJ,"
        f" EDP {best.edp:.4g} µJ·cycles.</p>",
        f"<p>{found.evaluations:,} evaluations of the network and {found.bounded:,} bounds of partial mappings in"
        f" {found.seconds:.0f} s; {len(found.designs)} hardware points were mapped"
        f"{'; the search was interrupted' if found.interrupted else ''}.</p>",
    ]
    if reference is not None:
        head.append(
            f"<p>{escape(reference.machine.describe())} with its library's tiling has {reference.edp / best.edp:.1f}"
            f" times that EDP at {reference.area:.2f} mm².</p>"
        )
    why = "".join(f"<li>{escape(reason)}</li>" for reason in reasons(best, found.designs))
    return "\n".join(
        [
            "<!doctype html><html lang=en><head><meta charset=utf-8>",
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            *head,
            f"<h2>Why this hardware</h2><ul>{why}</ul>",
            "<h2>EDP against area</h2>",
            _front(found),
            "<h2>Progress</h2>",
            _history(found),
            "<h2>Layers</h2>",
            _layers(best, programs),
            "</body></html>\n",
        ]
    )


def _chart(
    points: list[tuple[float, float]],
    line: list[tuple[float, float]],
    across: str,
    up: str,
    marked: tuple[float, float],
) -> str:
    """A chart of points and a line through some of them; both axes are logarithmic."""
    width, height, left, foot = 640.0, 280.0, 70.0, 40.0
    logs = np.log(np.maximum(np.array([*points, *line, marked]), 1e-12))
    low, high = logs.min(axis=0), logs.max(axis=0)
    span = np.maximum(high - low, 1e-9)

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x, y = (np.log(np.maximum(point, 1e-12)) - low) / span
        return left + x * (width - left - 20), (1 - y) * (height - foot - 20) + 10

    drawn = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#bbb"/>' for x, y in map(at, points)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, line))
    x, y = at(marked)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img">{"".join(drawn)}'
        f'<polyline points="{path}" fill="none" stroke="#1f77b4" stroke-width="2"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#d62728"/>'
        f'<text x="{left}" y="{height - 8:g}">{math.exp(low[0]):.3g}</text>'
        f'<text x="{width - 20:g}" y="{height - 8:g}" text-anchor="end">{math.exp(high[0]):.3g}</text>'
        f'<text x="{width / 2:g}" y="{height - 8:g}" text-anchor="middle">{escape(across)}</text>'
        f'<text x="4" y="20">{math.exp(high[1]):.3g}</text>'
        f'<text x="4" y="{height - foot - 8:g}">{math.exp(low[1]):.3g}</text>'
        f'<text x="4" y="{height / 2:g}">{escape(up)}</text></svg>'
    )


def _front(found: Exploration) -> str:
    best, front = found.best, found.front
    points = [(design.area, design.edp) for design in found.designs]
    drawn = _chart(points, [(one.area, one.edp) for one in front], "mm²", "EDP", (best.area, best.edp))
    rows = "".join(
        f"<tr><td>{escape(one.machine.describe())}<td>{one.area:.2f}<td>{one.edp:.4g}<td>{one.edp / best.edp:.2f}"
        f"<td>{one.watts(found.limits.clock):.2f}"
        for one in front
    )
    return f"{drawn}<table><tr><th>hardware<th>mm²<th>EDP<th>of the best<th>W{rows}</table>"


def _history(found: Exploration) -> str:
    rows = "".join(
        f"<tr><td>{escape(step.stage)}<td>{step.seconds:.1f}<td>{step.evaluations:,}<td>{step.edp:.4g}"
        for step in found.history
    )
    return f"<table><tr><th>stage<th>seconds<th>evaluations<th>least EDP{rows}</table>"


def simulated(program: LayerProgram | None) -> str:
    return "-" if program is None or program.cycles is None else f"{program.cycles:,}"


def _layers(design: Design, programs: Programs) -> str:
    bound, importance, utilisation = bound_by(design), design.importance, design.utilisation
    rows = []
    for index in np.argsort(-importance):
        layer = design.network.layers[index]
        rows.append(
            f"<tr><td>{escape(str(layer))}<br>{_drawn(design, int(index))}<br>"
            f"<code>{escape(design.mappings.text(int(index)))}</code>"
            f"<td>{layer.count}<td>{design.layer_cycles[index]:,.0f}<td>{simulated(programs[index])}<td>{design.layer_microjoules[index]:,.1f}"
            f"<td>{importance[index] / 2:.1%}<td>{utilisation[index]:.0%}<td>{escape(BOUNDS[bound[index]])}"
        )
    head = "<tr><th>layer and mapping<th>times<th>cycles<th>simulated<th>µJ<th>importance<th>array used<th>bound by"
    return f"<table>{head}{''.join(rows)}</table>"


def _drawn(design: Design, index: int) -> str:
    """A bar for each memory, from DRAM inwards, with a box for each loop; its width is the logarithm of the loop's
    factor."""
    mappings = design.mappings
    boxes, y = [], 0
    for level in reversed(range(len(LEVELS))):
        x = 90.0
        loops = [
            (LOOPS[loop], mappings.factors[index, level, loop], "") for loop in mappings.order[index, level]
        ]
        if level == 2:
            loops.append(("K", mappings.columns[index], " columns"))
        if level == 1:
            loops.append(("C", mappings.rows[index], " rows"))
        boxes.append(f'<text x="0" y="{y + 13}">{LEVELS[level]}</text>')
        for name, factor, where in loops:
            if factor <= 1:
                continue
            width = 26 + 14 * math.log2(factor)
            edge = ' stroke="#222"' if where else ""
            boxes.append(
                f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="16" fill="{_COLOURS[name]}"{edge}/>'
                f'<text x="{x + 4:.0f}" y="{y + 12}">{name}{factor:g}{where if width > 80 else ""}</text>'
            )
            x += width + 2
        y += 18
    return f'<svg viewBox="0 0 640 {y}" width="480" role="img">{"".join(boxes)}</svg>'
