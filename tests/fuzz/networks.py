"""Random small networks as users write them in PyTorch, down the whole road, against the oracle.

    python -m tests.fuzz.networks --graphs 20000 --seed 0 --jobs 16
    python -m tests.fuzz.networks --graphs 2000 --as znver4       what this processor runs of a Zen 4's kernels
    python -m tests.fuzz.networks --graphs 5000 --seed 5000 --counts FILE

Network number n is the same on every run, so a range of numbers is a part of the work: `--seed` is the first and
`--graphs` how many; `--seconds` ends a run early and says from which number to go on. Each network is

- run by PyTorch, imported, compiled (with numerics fast or strict, on one thread or two) and run;
- rewritten once more with made-up times, which send operators into orders and blocks that no machine would choose, some
  for a machine with libraries; the oracle runs the graph after every pass.

All of it must be what the float64 oracle of the imported graph says. A network that is not is shrunk, and the first
pass after which it is wrong is named. The compiler's trace counts which passes, rules and orders were taken; the
command fails if one never was. `--counts` adds what earlier parts of a campaign took, and keeps the sum in the file.
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
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor, nn

from tests.fuzz import coverage
from tests.fuzz.judge import Judge, after_passes, skipped, with_dice
from tests.fuzz.layers import LAYERS, TAILS, Layer, Of
from tests.machines import here_as
from tilewright import frontend
from tilewright.driver import compile_imported
from tilewright.frontend import ImportedModel
from tilewright.graph.text import print_graph
from tilewright.hw import CpuMachine, host
from tilewright.rewrites.pipeline import Abilities
from tilewright.support.trace import Trace
from tilewright.tune.oracle import PredictedCosts

SIZES = ((8, 8), (5, 15), (7, 7), (4, 4), (1, 1), (1, 9), (12, 6), (16, 16), (2, 2))
CHANNELS = (3, 3, 1, 4, 8, 16, 24, 46)
LARGE = (1, 16, 128, 128)  # enough for a reduction to be cut into several
WIDE = (1, 128, 8, 8)  # enough rows, channels and columns for paired products
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


def wide(draw: Random, values: Sequence[Tensor]) -> nn.Module:
    """A linear layer over the channels of each pixel, wider than the ones in `LAYERS`."""
    layer = nn.Linear(WIDE[1], draw.choice((192, 256, 272)))

    def of_pixels(x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    return Of(f"{layer} of each pixel", of_pixels, layer)


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

    @property
    def is_wide(self) -> bool:
        return self.number % 40 == 33

    def functions(self) -> list[Layer]:
        draw = self.draw("layers")
        functions, weights = zip(*LAYERS, strict=True)
        chosen = draw.choices(functions, weights, k=draw.randint(1, MAX_LAYERS))
        return [*([wide] if self.is_wide else []), *chosen, draw.choice(TAILS)]

    def shape(self) -> tuple[int, ...]:
        if self.is_wide:
            return WIDE
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


def check(drawn: Drawn, machine: CpuMachine | None) -> Found:
    """Whether one network is right. `machine`: what machine code is made for, and run; None: only rewrites."""
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
    if not found.wrong and machine is not None:
        found.wrong = _compiled(drawn, imported, judge, machine, found.taken)
    if not found.wrong:
        trace = Trace()
        found.wrong = with_dice(judge, drawn.numerics, drawn.number, trace)
        found.taken.update(coverage.counted(trace, "priced"))
    return found


def _compiled(
    drawn: Drawn, imported: ImportedModel, judge: Judge, machine: CpuMachine, taken: Counter[str]
) -> str:
    trace = Trace()
    model = compile_imported(imported, machine, numerics=drawn.numerics, threads=drawn.threads, trace=trace)
    taken.update(coverage.counted(trace, "compiled") + coverage.templates_of(model))
    results = model(*judge.inputs)
    wrong = skipped(trace) or judge.of(results, f"compiled with numerics {drawn.numerics}: output")
    if not wrong:
        return ""
    guilty = after_passes(judge, drawn.numerics, PredictedCosts(machine, drawn.numerics), Abilities())
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


def failure(drawn: Drawn, machine: CpuMachine | None) -> tuple[str, Counter[str]]:
    """What is wrong with a network, an exception included; nothing where it is right."""
    try:
        found = check(drawn, machine)
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


def explained(number: int, machine: CpuMachine | None) -> tuple[str, Counter[str]]:
    """The failure of a network, shrunk, as text; nothing where it is right."""
    wrong, taken = failure(Drawn(number), machine)
    if not wrong:
        return "", taken
    small = shrunk(Drawn(number), lambda each: bool(failure(each, machine)[0]))
    network, x = small.network()
    lines = [f"{failure(small, machine)[0]}", str(small)]
    try:
        lines.append(print_graph(frontend.import_model(network, (x,)).graph))
    except Exception as error:
        lines.append(f"it is not imported: {type(error).__name__}")
    return "\n".join(lines), taken


# -- the command ------------------------------------------------------------------------------------------------------


def run(numbers: Collection[int], machine: CpuMachine | None) -> Counter[str]:
    """What was taken; AssertionError at the first network that is wrong."""
    taken: Counter[str] = Counter()
    for number in numbers:
        wrong, counts = explained(number, machine)
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
    parser.add_argument("--as", dest="cpu", help="compile for a processor of this name, such as znver4")
    parser.add_argument("--counts", type=Path, help="a file of what earlier parts took")
    options = parser.parse_args()
    machine = here_as(options.cpu) if options.cpu else host()
    if machine is None:
        parser.error(f"this processor does not run code for {options.cpu}")
    made_for = None if options.passes_only else machine
    if options.worker:
        workers.serve(lambda number: explained(number, made_for))
        return

    print(f"networks {options.seed} to {options.seed + options.graphs - 1}", flush=True)
    numbers = range(options.seed, options.seed + options.graphs)
    command = [sys.executable, "-m", "tests.fuzz.networks", "--worker"]
    if options.passes_only:
        command.append("--passes-only")
    if options.cpu:
        command += ["--as", options.cpu]
    done = workers.spread(numbers, command, options.jobs, options.seconds)
    done.taken["networks"] = done.count
    taken = coverage.added(done.taken, options.counts) if options.counts else done.taken
    missing = coverage.missing(taken, made_for)
    print(coverage.table(taken))
    for number in done.failures:
        print(f"again: python -m tests.fuzz.networks --seed {number} --graphs 1")
    if done.next < numbers.stop:
        print(f"out of time; to go on: --seed {done.next} --graphs {numbers.stop - done.next}")
    print(f"{done.count} networks in {done.seconds:.0f} s, {len(done.failures)} wrong")
    if missing:
        print(f"never taken: {', '.join(missing)}")
    sys.exit(1 if done.failures or (missing and taken["networks"] >= coverage.ENOUGH) else 0)


if __name__ == "__main__":
    main()
