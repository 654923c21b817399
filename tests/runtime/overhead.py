"""How much a compiled call costs alongside its kernels. Not a test: `python -m tests.runtime.overhead [--torch]`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from tests.runtime import toys
from tilewright.runtime import threads


def microseconds(call: Callable[[], object], repeats: int = 3000) -> str:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    times.sort()
    return f"median {times[len(times) // 2] * 1e6:7.2f} us   fastest {times[0] * 1e6:7.2f} us"


def main() -> None:
    if "--torch" in sys.argv:
        import torch
    began = time.perf_counter()
    model = toys.identity((4,), extent=1, threads=1)
    print(f"first model, launcher compiled      {(time.perf_counter() - began) * 1e3:.1f} ms")
    x = np.zeros(4, np.float32)
    print("one kernel, numpy input            ", microseconds(lambda: model(x)))
    wide = toys.identity((64,), extent=64)
    print(
        f"one parallel kernel, {wide.threads} threads     ",
        microseconds(lambda: wide(np.zeros(64, np.float32))),
    )
    for count, label in ((1, "serial"), (wide.threads, "parallel")):
        deep = toys.chain(201, 8, 1, threads=count)
        y = np.zeros((8, 1), np.float32)
        print(f"201 kernels, {label:8}              ", microseconds(lambda: deep(y), 500))  # noqa: B023
        print(f"  per step, timed inside: {np.median(deep.executor.time_steps([y], 50)) * 1e9:.0f} ns")
    if "--torch" in sys.argv:
        t = torch.zeros(4)
        print("one kernel, torch input            ", microseconds(lambda: model(t)))
        print("torch.neg of the same              ", microseconds(lambda: torch.neg(t)))
    print(threads.describe())


if __name__ == "__main__":
    main()
