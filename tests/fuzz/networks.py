"""Random small networks as users write them in PyTorch, down the whole road, against the oracle.

    python -m tests.fuzz.networks --graphs 20000 --seed 0 --jobs 16

Network number n is the same on every run, so a range of numbers is a part of the work: `--seed` is the first and
`--graphs` how many; `--seconds` ends a run early and says from which number to go on. Each network is

- run by PyTorch, imported, compiled (with numerics fast or strict, on one thread or two) and run;
- rewritten once more with made-up times, which send operators into orders and blocks that no machine would choose, some
  for a machine with libraries; the oracle runs the graph after every pass.

All of it must be what the float64 oracle of the imported graph says. A network that is not is shrunk, and the first
pass after which it is wrong is named. The compiler's trace counts which passes, rules and orders were taken; the
command fails if one never was.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch
from torch import Tensor, nn

from tests.fuzz import coverage
from tests.fuzz.judge import Judge, after_passes, skipped, with_dice
from tests.fuzz.layers import LAYERS, TAILS, Layer
from tilewright import frontend
from tilewright.driver import compile_imported
from tilewright.frontend import ImportedModel
from tilewright.graph.text import print_graph
from tilewright.hw import host
from tilewright.rewrites.pipeline import Abilities
from tilewright.support.trace import Trace
from tilewright.tune.oracle import PredictedCosts

SIZES = ((8, 8), (5, 15), (7, 7), (4, 4), (1, 1), (1, 9), (12, 6), (16, 16), (2, 2))
CHANNELS = (3, 3, 1, 4, 8, 16, 24, 46)
LARGE = (1, 16, 128, 128)  # enough for a reduction to be cut into several
MAX_ELEMENTS = 30_000
MAX_LAYERS = 5
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4 * 2.0**-11, torch.bfloat16: 4 * 2.0**-8}


class Network(nn.Module):
    """Layers one after another; each may read what the ones before it gave. Several values may be results."""

    def __init__(self, layers: Sequence[nn.Module], results: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.results = results

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for each in self.layers:
            values.append(each(values))
        return tuple(values[at] for at in self.results)


@dataclass(frozen=True)
class Drawn:
    """A network by its number, without the layers that were taken out."""

    number: int
    left_out: frozenset[int] = frozenset()

    @property
    def numerics(self) -> str:
        return "strict" if self.number % 3 == 2 else "fast"

    @property
    def threads(self) -> int:
        return 1 + self.number % 2

    def draw(self, *what: object) -> Random:
        return Random(":".join(map(str, (self.number, *what))))

    @property
    def dtype(self) -> torch.dtype:
        rare = {7: torch.float64, 17: torch.bfloat16, 27: torch.float16}
        return rare.get(self.number % 40, torch.float32)

    def functions(self) -> list[Layer]:
        draw = self.draw("layers")
        functions, weights = zip(*LAYERS, strict=True)
        chosen = draw.choices(functions, weights, k=draw.randint(1, MAX_LAYERS))
        return [*chosen, draw.choice(TAILS)]

    def shape(self) -> tuple[int, ...]:
        draw = self.draw("shape")
        if draw.random() < 0.01:
            return LARGE
        return (draw.choice((1, 1, 1, 2, 3, 4)), draw.choice(CHANNELS), *draw.choice(SIZES))

    def network(self) -> tuple[Network, Tensor]:
        """The module and its input. A layer that does not apply, or makes a value too large, is not there."""
        torch.manual_seed(self.number)
        x = torch.randn(self.shape())
        values, layers = [x], []
        for at, function in enumerate(self.functions()):
            torch.manual_seed(self.number * 100 + at)
            made = None if at in self.left_out else function(self.draw(at, function.__name__), values)
            if made is None:
                continue
            with torch.no_grad():
                value = made.eval()(values)
            if 0 < value.numel() <= max(MAX_ELEMENTS, x.numel()):
                layers.append(made)
                values.append(value)
        draw = self.draw("results")
        last = len(values) - 1
        results = [last, *(draw.randrange(last) for _ in range(draw.choice((0, 0, 0, 1))) if last)]
        return Network(layers, results).eval().to(self.dtype), x.to(self.dtype)

    def __str__(self) -> str:
        network, x = self.network()
        texts = "\n".join(f"    {getattr(each, 'text', each)}" for each in network.layers)
        about = f"{str(self.dtype).removeprefix('torch.')} {list(x.shape)}, numerics {self.numerics}"
        return (
            f"network {self.number}, {about}, {self.threads} thread(s), results {network.results}:\n{texts}"
        )


# -- checks -----------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What came of a network."""

    wrong: str = ""
    taken: Counter[str] = field(default_factory=Counter)


def check(drawn: Drawn, *, compiled: bool = True) -> Found:
    """Whether one network is right; `compiled`: machine code is made and run too."""
    network, x = drawn.network()
    found = Found()
    if not network.layers:
        return found
    array = x.float().numpy().astype(_numpy(x.dtype)) if x.dtype is torch.bfloat16 else x.numpy()
    imported = frontend.import_model(network, (x,))
    graph, arrays = imported.graph, [array]
    judge = Judge(graph, arrays, BOUNDS[drawn.dtype])

    with torch.no_grad():
        theirs = [y.numpy() for y in copy.deepcopy(network).double()(x.double())]
    found.wrong = judge.of(theirs, "as imported: PyTorch's result")
    if not found.wrong and compiled:
        found.wrong = _compiled(drawn, imported, judge, found.taken)
    if not found.wrong:
        trace = Trace()
        found.wrong = with_dice(judge, drawn.numerics, drawn.number, trace)
        found.taken.update(coverage.counted(trace, "priced"))
    return found


def _compiled(drawn: Drawn, imported: ImportedModel, judge: Judge, taken: Counter[str]) -> str:
    trace = Trace()
    model = compile_imported(imported, host(), numerics=drawn.numerics, threads=drawn.threads, trace=trace)
    taken.update(coverage.counted(trace, "compiled"))
    results = model(*judge.inputs)
    wrong = skipped(trace) or judge.of(results, f"compiled with numerics {drawn.numerics}: output")
    if not wrong:
        return ""
    guilty = after_passes(judge, drawn.numerics, PredictedCosts(host(), drawn.numerics), Abilities())
    if guilty:
        return f"{wrong}\n{guilty}"
    from tilewright.measure.bisect import first_deviation

    return f"{wrong}\nevery pass is right; the first kernel that is not: {first_deviation(model, tuple(judge.inputs))}"


def _numpy(dtype: torch.dtype) -> np.dtype:
    import ml_dtypes

    return (
        np.dtype(ml_dtypes.bfloat16)
        if dtype is torch.bfloat16
        else np.dtype(str(dtype).removeprefix("torch."))
    )


def failure(drawn: Drawn, *, compiled: bool = True) -> tuple[str, Counter[str]]:
    """What is wrong with a network, an exception included; nothing where it is right."""
    try:
        found = check(drawn, compiled=compiled)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}", Counter()
    return found.wrong, found.taken


def shrunk(drawn: Drawn, is_wrong: Callable[[Drawn], bool], seconds: float = 60) -> Drawn:
    """Without every layer that is not needed for the failure."""
    end = time.monotonic() + seconds
    for at in reversed(range(len(drawn.functions()))):
        smaller = Drawn(drawn.number, drawn.left_out | {at})
        if time.monotonic() < end and is_wrong(smaller):
            drawn = smaller
    return drawn


def explained(number: int, *, compiled: bool = True) -> tuple[str, Counter[str]]:
    """The failure of a network, shrunk, as text; nothing where it is right."""
    wrong, taken = failure(Drawn(number), compiled=compiled)
    if not wrong:
        return "", taken
    small = shrunk(Drawn(number), lambda each: bool(failure(each, compiled=compiled)[0]))
    network, x = small.network()
    lines = [f"{failure(small, compiled=compiled)[0]}", str(small)]
    try:
        lines.append(print_graph(frontend.import_model(network, (x,)).graph))
    except Exception as error:
        lines.append(f"it is not imported: {type(error).__name__}")
    return "\n".join(lines), taken


# -- the command ------------------------------------------------------------------------------------------------------


def run(numbers: Collection[int], *, compiled: bool = True) -> Counter[str]:
    """What was taken; AssertionError at the first network that is wrong."""
    taken: Counter[str] = Counter()
    for number in numbers:
        wrong, counts = explained(number, compiled=compiled)
        assert not wrong, wrong
        taken.update(counts)
    return taken


def main() -> None:
    from tests.fuzz import workers

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", type=int, default=2000, help="how many networks")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="to stop after")
    parser.add_argument("--passes-only", action="store_true", help="check rewrites, make no machine code")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        workers.serve(lambda number: explained(number, compiled=not options.passes_only))
        return

    print(f"networks {options.seed} to {options.seed + options.graphs - 1}", flush=True)
    numbers = range(options.seed, options.seed + options.graphs)
    command = [sys.executable, "-m", "tests.fuzz.networks", "--worker"]
    if options.passes_only:
        command.append("--passes-only")
    done = workers.spread(numbers, command, options.jobs, options.seconds)
    missing = coverage.missing(done.taken, compiled=not options.passes_only)
    print(coverage.table(done.taken))
    for number in done.failures:
        print(f"again: python -m tests.fuzz.networks --seed {number} --graphs 1")
    if done.next < numbers.stop:
        print(f"out of time; to go on: --seed {done.next} --graphs {numbers.stop - done.next}")
    print(f"{done.count} networks in {done.seconds:.0f} s, {len(done.failures)} wrong")
    if missing:
        print(f"never taken: {', '.join(missing)}")
    sys.exit(1 if done.failures or (missing and done.count >= coverage.ENOUGH) else 0)


if __name__ == "__main__":
    main()
