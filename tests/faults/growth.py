"""A process that compiles one model after the other: does it grow?

    python -m tests.faults.growth --models 1000
    python -m tests.faults.growth --models 1000 --torch        through torch.export, which grows by itself

Every model has shapes of its own, is compiled, called and forgotten. After the first ones, which fill the caches, the
process may have grown by so much and no more.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

WARM_UP = 0.3  # of the models
LIMIT_MB = 100.0


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def onnx_model(rng: random.Random) -> tuple[Any, Any]:
    """A small network of random sizes, and inputs for it."""
    import onnx

    size, channels, width = rng.randrange(5, 40), rng.randrange(3, 40), rng.randrange(2, 60)
    text = (
        '<ir_version: 10, opset_import: ["" : 17]>'
        f" net (float[1, 3, {size}, {size}] x) => (float[1, {width}] y) {{"
        "  c = Conv <pads = [1, 1, 1, 1]> (x, w)  r = Relu(c)  s = Sigmoid(r)  m = Mul(r, s)"
        "  p = GlobalAveragePool(m)  f = Flatten(p)  t = MatMul(f, v)  y = Softmax(t) }"
    )
    model = onnx.parser.parse_model(text)
    generator = np.random.default_rng(rng.randrange(1 << 30))
    for name, shape in (("w", (channels, 3, 3, 3)), ("v", (channels, width))):
        array = generator.standard_normal(shape, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model, {"x": generator.standard_normal((1, 3, size, size), np.float32)}


def torch_model(rng: random.Random) -> tuple[Any, Any]:
    import torch

    size, channels, width = rng.randrange(5, 40), rng.randrange(3, 40), rng.randrange(2, 60)
    model = torch.nn.Sequential(
        *(torch.nn.Conv2d(3, channels, 3, padding=1), torch.nn.SiLU(), torch.nn.AdaptiveAvgPool2d(1)),
        *(torch.nn.Flatten(), torch.nn.Linear(channels, width), torch.nn.Softmax(1)),
    ).eval()
    return model, (torch.randn(1, 3, size, size),)


def sizes(count: int, *, through_torch: bool = False, seed: int = 0) -> Iterator[float]:
    """Megabytes of memory after each model."""
    import tilewright

    rng = random.Random(seed)
    for number in range(count):
        model, inputs = (torch_model if through_torch else onnx_model)(rng)
        compiled = tilewright.compile(model, inputs)
        compiled(**inputs) if isinstance(inputs, dict) else compiled(*inputs)
        del compiled, model, inputs
        if number % 10 == 9:
            gc.collect()
        yield resident_mb()


def growth(found: list[float]) -> float:
    """Megabytes from the end of the warm-up to the end."""
    return found[-1] - max(found[: max(1, int(WARM_UP * len(found)))])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--torch", action="store_true", help="nn.Modules instead of ONNX models")
    parser.add_argument("--limit", type=float, default=LIMIT_MB, help="megabytes after the warm-up")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILEWRIGHT_CACHE_DIR"] = folder
        for number, size in enumerate(
            sizes(given.models, through_torch=given.torch, seed=given.seed), start=1
        ):
            found.append(size)
            if number % max(1, given.models // 20) == 0:
                print(f"{number:6} models: {size:8.1f} MB", flush=True)
    grown = growth(found)
    print(
        f"grown by {grown:.1f} MB after the first {int(WARM_UP * given.models)} models; allowed {given.limit:.0f}"
    )
    return int(grown > given.limit)


if __name__ == "__main__":
    sys.exit(main())
