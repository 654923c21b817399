"""No element beyond the promised bound: kernels of all templates and sketches, on inputs of every magnitude.

    python -m tests.space.promise --kernels 300 --draws 350 --jobs 2

Against float64, u = 2^-24: |error| <= c K u sum |a b| with c = 32 for paired products and 1 for all others, Winograd's
convolutions as `runtime/winograd.py` says, attention the same bound for both products, carried through the scores.
Data and weights are drawn anew each time (`measure/magnitudes.py`). A violation is printed with its seed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random

import numpy as np

from tests.space.checked import Inputs, stored_for
from tilewright.dtypes import DType
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.measure.bounds import UNIT, _of_tiles, may_be_transformed, summed_count
from tilewright.measure.magnitudes import spread_out
from tilewright.measure.single import SingleKernel
from tilewright.runtime.paired import BOUND_FACTOR
from tilewright.runtime.winograd import ERROR_FACTORS
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Applied, Work
from tilewright.space.templates.cpu.fast_algebra.paired import AppliedPaired
from tilewright.space.templates.cpu.fast_algebra.row_gemm import row_gemm_of
from tilewright.space.templates.cpu.gemm import gemm_of

UNDERFLOW = 2.0**-78  # for each product: of rows and columns that are scaled by up to 2^24
_EXPONENTIAL = 2.0**-19  # relative error of a weight of attention: exponentials have 20 bits


@dataclass(frozen=True)
class Violation:
    template: str
    seed: int
    excess: float  # the error relative to the bound

    def __str__(self) -> str:
        return f"{self.template}: {self.excess:.2f} times the bound (seed {self.seed})"


def tasks(random: Random) -> Task:
    """A matmul, a convolution or attention, of a random small size."""
    kind = random.choice(("matmul", "matmul", "conv", "conv", "conv", "attention"))
    x = Inputs()
    if kind == "matmul":
        m, n, k = random.randint(1, 60), random.randint(1, 120), random.choice((3, 17, 32, 64, 100, 257, 700))
        constant = random.random() < 0.8
        return x.task(apply("matmul", x(m, k), x(k, n, constant=constant)))
    if kind == "attention":
        queries, keys, width = random.randint(1, 70), random.randint(2, 90), random.choice((8, 16, 32, 64))
        shapes = [(1, 2, queries, width), (1, 2, keys, width), (1, 2, keys, width)]
        return x.task(apply("attention", *(x(*shape) for shape in shapes), causal=False, scale=width**-0.5))
    window = random.choice(((1, 1), (3, 3), (3, 3), (3, 3), (2, 5)))
    stride = random.choice((1, 1, 2))
    channels = random.choice((3, 16, 32, 48, 64))
    groups = channels if random.random() < 0.2 else 1
    outputs = channels if groups > 1 else random.choice((8, 24, 48, 80))
    size = (random.randint(window[0], 17), random.randint(window[1], 17))
    attrs = {"stride": (stride, stride), "dilation": (1, 1), "groups": groups, "padding": ((0, 0), (0, 0))}
    if random.random() < 0.5:
        image, weight = x(1, *size, channels), x(*window, channels // groups, outputs, constant=True)
        return x.task(apply("conv", image, weight, layout="channels_last", **attrs))
    image, weight = x(1, channels, *size), x(outputs, channels // groups, *window, constant=True)
    return x.task(apply("conv", image, weight, layout="channels_first", **attrs))


def implementations(task: Task, random: Random) -> Iterator[tuple[Applied, Config]]:
    """A config of each template and sketch that computes a task; paired products also where they do not pay."""
    work = Work(task, host())
    applied = list(Candidates.of(work).applied)
    sums = row_gemm_of(gemm_of(work.formula))
    if (
        sums is not None
        and host().vector_registers >= 32
        and not any(isinstance(a, AppliedPaired) for a in applied)
    ):
        applied.append(AppliedPaired(work, sums, max_uncertified=math.inf))
    for each in applied:
        if (config := each.space.sample(random)) is not None:
            yield each, config


def drawn(task: Task, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    node = task.output
    summed = {"matmul": (1, 0), "attention": (3, 3, 3)}.get(node.op)
    if summed is None:
        summed = (1, 1) if node.attrs["layout"] == "channels_first" else (3, 2)
    arrays = []
    for number, (source, axis) in enumerate(zip(task.graph.inputs, summed, strict=True)):
        plain = rng.standard_normal(source.shape).astype(np.float32)
        arrays.append(spread_out(plain, DType.F32, (axis,), number == 1, rng))
    if node.op == "attention":  # beyond, every score but one is nothing
        arrays[:2] = [np.clip(array, -30, 30) for array in arrays[:2]]
    return arrays


def allowed(node: Node, arrays: Sequence[np.ndarray], paired: bool) -> np.ndarray:
    wide = [array.astype(np.float64) for array in arrays]
    if node.op == "attention":
        return _of_attention(node, *wide)
    graph_sizes = _evaluated(node, [np.abs(array) for array in wide])
    count = summed_count(node)
    bound = (BOUND_FACTOR if paired else 1.0) * count * UNIT * graph_sizes + count * UNDERFLOW
    if may_be_transformed(node, "fast"):
        bound = bound + UNIT * max(ERROR_FACTORS.values()) * _of_tiles(node, *wide)
    return bound


def _of_attention(node: Node, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Both products' bounds: that of the scores moves weights, between values that differ."""
    scale, width, keys = abs(node.attrs["scale"]), query.shape[-1], key.shape[-2]
    scores = scale * query @ key.swapaxes(-1, -2)
    sizes = scale * np.abs(query) @ np.abs(key).swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    result = weights @ value
    moved = (width + 4) * UNIT * sizes + _EXPONENTIAL
    apart = np.abs(value[..., None, :, :] - result[..., :, None, :])
    through_scores = np.einsum("...qk,...qkv->...qv", weights * np.expm1(moved), apart)
    return 2.0 * through_scores + (keys + 4) * UNIT * (weights @ np.abs(value)) + keys * UNDERFLOW


def _evaluated(node: Node, arrays: Sequence[np.ndarray]) -> np.ndarray:
    task = Inputs()
    operands = [task(*array.shape, dtype=DType.F64) for array in arrays]
    (result,) = evaluate(task.task(apply(node.op, *operands, **node.attrs)).graph, list(arrays), precise=True)
    return result


def violations(kernels: int, draws: int, seed: int, taken: Counter[str]) -> Iterator[Violation]:
    """Of `kernels` kernels, each on `draws` inputs."""
    random, done = Random(seed), 0
    while done < kernels:
        task = tasks(random)
        for applied, config in implementations(task, random):
            if done == kernels:
                return
            done += 1
            template = config.template
            taken[template] += 1
            program = applied.program(config)
            kernel = SingleKernel(program, host(), threads=1)
            for draw in range(draws):
                arrays = drawn(task, seed * 1_000_003 + draw)
                (exact,) = evaluate(task.graph, arrays, precise=True)
                result = kernel(stored_for(program, arrays)).reshape(exact.shape)
                bound = allowed(task.output, arrays, template == "paired")
                with np.errstate(all="ignore"):
                    excess = np.abs(result - exact) / np.maximum(bound, np.finfo(np.float32).tiny)
                if not (excess <= 1.0).all():
                    yield Violation(template, seed, float(np.nanmax(np.nan_to_num(excess, nan=np.inf))))
                    break


def _part(arguments: tuple[int, int, int]) -> tuple[Counter[str], list[Violation]]:
    kernels, draws, seed = arguments
    taken: Counter[str] = Counter()
    return taken, list(violations(kernels, draws, seed, taken))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", type=int, default=300)
    parser.add_argument("--draws", type=int, default=350)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    each = 10  # kernels of a part
    parts = [(each, options.draws, options.seed + n) for n in range(-(-options.kernels // each))]
    taken: Counter[str] = Counter()
    found: list[Violation] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for done, (counted, wrong) in enumerate(pool.map(_part, parts), 1):
            taken += counted
            found += wrong
            print(f"{done * each} kernels, {len(found)} beyond their bound", file=sys.stderr, flush=True)
    for template, count in sorted(taken.items()):
        print(f"{template:24} {count} kernels x {options.draws} draws")
    for violation in found:
        print(violation)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
