#!/usr/bin/env python3
"""Errors of single elements of float32 matmuls compared with PyTorch's, on data that is hard for fast algorithms.

    python benchmarks/cpu_accuracy.py [--markdown table.md]

For each case and numerics mode: the largest |error| / sum_k |a_k b_k| over all elements and its root mean square, as
multiples of PyTorch's on the same inputs; the reference is float64. `certified` is the share of elements whose row and
column are certified for paired products (docs/numerics.md), on any machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

MODES = ("fast", "strict", "relaxed")


def cases() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(name, data, weight)."""
    rng = np.random.default_rng(0)
    data, weight = rng.standard_normal((128, 768)), rng.standard_normal((768, 3072)) / 768**0.5
    yield "normal", data, weight
    channels = [5, 100, 333, 700]
    for factor in (32, 128, 1024, 4096):
        larger, smaller = data.copy(), weight.copy()
        larger[:, channels] *= factor
        smaller[channels] /= factor
        yield f"4 channels x{factor}", larger, weight
        yield f"4 channels x{factor}, balanced", larger, smaller
    yield "after ReLU", np.maximum(data, 0), weight
    yield "80% zeros", data * (rng.random(data.shape) < 0.2), weight
    spectrum = rng.standard_normal((100, 257)) ** 2 * 10.0 ** np.linspace(3, -3, 257)
    centres, bins = np.linspace(0, 256, 82), np.arange(257)[:, None]
    rising, falling = bins - centres[:-2], centres[2:] - bins
    yield "mel filter bank", spectrum, np.maximum(0, np.minimum(rising, falling)) / (256 / 81)
    yield (
        "logits of 100,000 classes",
        rng.standard_normal((16, 768)),
        0.02 * rng.standard_normal((768, 100_000)),
    )
    spread, other = (
        rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 6, shape) for shape in ((64, 512), (512, 512))
    )
    yield "magnitudes over 12 decades", spread, other
    yield "K = 64", rng.standard_normal((784, 64)), rng.standard_normal((64, 128)) / 8
    yield "K = 4608", rng.standard_normal((196, 4608)), rng.standard_normal((4608, 512)) / 68


def row_of(name: str, data: np.ndarray, weight: np.ndarray) -> str:
    import torch

    import tilewright
    from tilewright.runtime.paired import prepare_weights, row_ratios

    a, b = data.astype(np.float32), weight.astype(np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    sizes = np.maximum(np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64), 1e-300)
    layer = torch.nn.Linear(*b.shape, bias=False).eval()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(np.ascontiguousarray(b.T)))
        x = torch.from_numpy(a)
        usual = np.abs(layer(x).numpy() - exact) / sizes
    certified = np.mean(row_ratios(a)[:, None] >= prepare_weights(b)[3])
    cells = [name, f"{certified:.0%}"]
    for mode in MODES:
        compiled: Any = tilewright.compile(layer, (x,), target="cpu", numerics=mode)
        error = np.abs(compiled(x).numpy() - exact) / sizes
        largest, typical = error.max() / usual.max(), np.sqrt(np.mean(error**2) / np.mean(usual**2))
        cells.append(f"{largest:.2f}, {typical:.2f}")
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", type=Path, help="where the table is written")
    options = parser.parse_args()
    from baselines.machine import describe

    machine: dict[str, Any] = describe()
    versions = machine["versions"]
    lines = [
        f"{machine['cpu']}, {machine['system']}, {machine['date']}; torch {versions['torch']}.",
        "Largest |error| / sum |ab| and its root mean square, in multiples of PyTorch's.",
        "",
        f"| case | certified | {' | '.join(MODES)} |",
        "| --- | --: | --: | --: | --: |",
    ]
    print("\n".join(lines), flush=True)
    for case in cases():
        lines.append(row_of(*case))
        print(lines[-1], flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
