"""Notebook representations of models and explanations: small HTML tables without scripts or styles."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright.runtime.dynamic import DynamicModel
    from tilewright.runtime.explain import Explanation
    from tilewright.runtime.model import CompiledModel

_ROWS = 40  # of an explanation: the slowest kernels
_BAR = 120  # pixels for 100% of the time


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Cells are HTML; the first `left` columns are left-aligned."""

    def line(cells: Sequence[str], tag: str) -> str:
        aligned = ("left" if position < left else "right" for position in range(len(cells)))
        return "".join(
            f'<{tag} style="text-align:{side}">{cell}</{tag}>'
            for side, cell in zip(aligned, cells, strict=True)
        )

    head = f"<thead><tr>{line(header, 'th')}</tr></thead>" if any(header) else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table>{head}<tbody>{body}</tbody></table>"


def model_html(model: CompiledModel) -> str:
    memory = model.plan.memory
    about = (
        f"{len(model.plan.steps)} kernels, {model.threads} thread(s), arena {memory.arena_bytes / 1e6:.1f} MB,"
        f" weights {memory.constant_bytes / 1e6:.1f} MB"
    )
    rows = [("input", html.escape(name), str(spec)) for name, spec in model.inputs.items()]
    rows += [("output", "", str(spec)) for spec in model.plan.outputs]
    return f"<b>CompiledModel</b>: {html.escape(about)}{table(('', 'name', 'type'), rows, left=3)}"


def dynamic_html(model: DynamicModel) -> str:
    rows = [(html.escape(variant.signature), str(len(variant.plan.steps))) for variant in model.variants]
    about = f"{len(rows)} variants of at most {model.policy.limit}"
    return f"<b>DynamicModel</b>: {about}{table(('signature', 'kernels'), rows)}"


def explanation_html(explanation: Explanation) -> str:
    rows = []
    shown = sorted(explanation.rows, key=lambda row: -row.seconds)[:_ROWS]
    for row in shown:
        bar = f'<div style="width:{row.share * _BAR:.0f}px;height:0.7em;background:#4c78a8"></div>'
        error = "" if row.error is None else f"{row.error:.1e}"
        rows.append(
            (
                str(row.step),
                html.escape(row.name or row.label),
                html.escape(row.label),
                bar,
                f"{row.seconds * 1e6:.1f}",
                f"{row.share:.1%}",
                error,
            )
        )
    left_out = len(explanation.rows) - len(shown)
    more = f"; {left_out} shorter ones are not shown" if left_out else ""
    header = ("step", "name", "task", "", "µs", "share", "error")
    about = f"{explanation.seconds * 1e6:.1f} µs in {len(explanation.rows)} kernels{more}"
    return f"<b>Explanation</b>: {about}{table(header, rows, left=4)}"
