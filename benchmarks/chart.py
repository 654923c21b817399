"""Draws the README's chart of speed-ups over the best alternative from the committed results.

    python benchmarks/chart.py                    writes docs/speedups.svg
    python benchmarks/chart.py --check            fails where the committed picture is not what would be drawn

One bar a model, CPU on the left and GPU (batch 1) on the right; the line at 1x is the fastest alternative that was
measured in the same run. The picture follows the reader's light or dark colour scheme.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "speedups.svg"

_NAMES = {
    "resnet50": "ResNet-50",
    "mobilenetv2": "MobileNetV2",
    "vgg16": "VGG-16",
    "vit-b16": "ViT-B/16",
    "bert-base": "BERT-base",
    "gpt2": "GPT-2",
}
_BASELINES = {
    "torch-eager": "PyTorch",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "eager": "PyTorch eager",
    "compile": "torch.compile",
}

_WIDTH, _PANEL, _MARGIN = 890, 400, 24
_TOP, _ROW, _BAR = 96, 34, 20
_LABEL = 104  # pixels for a model's name
_VALUE = 150  # pixels behind the longest bar, for its figure
_STEP = 0.5  # between two grid lines, as a speed-up

_STYLE = """
  text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
  .title { font-size: 16px; font-weight: 600; }
  .note { font-size: 12px; fill: #59636e; }
  .value { font-weight: 600; }
  tspan.note { font-weight: 400; }
  .bar { fill: #1a7f64; }
  .grid { stroke: #d1d9e0; }
  .baseline { stroke: #59636e; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .note { fill: #9198a1; }
    .bar { fill: #3fb68e; }
    .grid { stroke: #3d444d; }
    .baseline { stroke: #9198a1; }
  }
"""


@dataclass(frozen=True)
class Bar:
    model: str
    speedup: float
    baseline: str  # the fastest alternative


@dataclass(frozen=True)
class Panel:
    title: str
    note: str
    bars: tuple[Bar, ...]

    @property
    def mean(self) -> float:
        """Geometric."""
        return math.exp(sum(math.log(bar.speedup) for bar in self.bars) / len(self.bars))


def cpu_panel(found: dict[str, object]) -> Panel:
    bars = tuple(
        Bar(_NAMES[row["model"]], row["ours_over_best_baseline"], _BASELINES[row["best_baseline"]])
        for row in found["models"]  # type: ignore[attr-defined]
    )
    machine = found["machine"]
    note = f"{machine['cores']} cores of an {machine['cpu']}, float32, batch 1, nothing tuned"  # type: ignore[index]
    return Panel("CPU", note, bars)


def gpu_panel(found: Sequence[dict[str, object]]) -> Panel:
    bars = []
    for row in found:
        times: dict[str, float] = row["milliseconds"]  # type: ignore[assignment]
        best = min((name for name in times if name != "ours"), key=lambda name: times[name])
        if row["batch"] == 1:
            name = str(row["model"]).partition(",")[0]
            bars.append(Bar(name, times[best] / times["ours"], _BASELINES[best]))
    return Panel("GPU", "NVIDIA H200, float16, batch 1, tuned for at most 60 s", tuple(bars))


def drawn(panels: Sequence[Panel]) -> str:
    height = _TOP + _ROW * max(len(panel.bars) for panel in panels) + 44
    most = max(bar.speedup for panel in panels for bar in panel.bars)
    scale = (_PANEL - _LABEL - _VALUE) / most
    title = "Speed-up over the fastest alternative"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-labelledby="title description">',
        f'<title id="title">{title}</title>',
        f'<desc id="description">{escape(_described(panels))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="{_MARGIN}" y="28">{title} (higher is better)</text>',
    ]
    for number, panel in enumerate(panels):
        lines += _panel(panel, _MARGIN + number * (_PANEL + 2 * _MARGIN), scale, most, height)
    return "\n".join([*lines, "</svg>", ""])


def _panel(panel: Panel, left: int, scale: float, most: float, height: int) -> list[str]:
    zero, bottom = left + _LABEL, height - 36
    lines = [
        f'<text class="title" x="{left}" y="58">{escape(panel.title)}: {panel.mean:.2f}x on average</text>',
        f'<text class="note" x="{left}" y="78">{escape(panel.note)}</text>',
    ]
    for step in range(int(most / _STEP) + 1):
        x = zero + step * _STEP * scale
        kind = "baseline" if step * _STEP == 1 else "grid"
        lines.append(f'<line class="{kind}" x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{bottom}"/>')
        if step % 2 == 0:
            word = f"{step * _STEP:g}x"
            lines.append(
                f'<text class="note" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{word}</text>'
            )
    for row, bar in enumerate(panel.bars):
        y = _TOP + row * _ROW
        width = bar.speedup * scale
        middle = y + _BAR - 5
        lines += [
            f'<text x="{zero - 8}" y="{middle}" text-anchor="end">{escape(bar.model)}</text>',
            f'<rect class="bar" x="{zero}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2"/>',
            f'<text class="value" x="{zero + width + 6:.1f}" y="{middle}">{bar.speedup:.2f}x '
            f'<tspan class="note">vs {escape(bar.baseline)}</tspan></text>',
        ]
    return lines


def _described(panels: Sequence[Panel]) -> str:
    """For readers who do not see it."""
    return " ".join(
        f"{panel.title} ({panel.note}): "
        + ", ".join(f"{bar.model} {bar.speedup:.2f}x {bar.baseline}" for bar in panel.bars)
        + "."
        for panel in panels
    )


def picture() -> str:
    cpu = json.loads((RESULTS / "cpu_models.json").read_text())
    gpu = json.loads((RESULTS / "gpu_models.json").read_text())
    return drawn([cpu_panel(cpu), gpu_panel(gpu)])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed picture")
    options = parser.parse_args()
    text = picture()
    if not options.check:
        PICTURE.write_text(text, encoding="utf-8")
        print(f"wrote {PICTURE.relative_to(ROOT)}")
        return 0
    if not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != text:
        print(
            "docs/speedups.svg does not show benchmarks/results: run python benchmarks/chart.py",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
