"""Random tile programs, each with its results computed directly in NumPy.

A program runs on a grid. It loads tiles of random types and shapes, by pointers with and without masks and by block
pointers; combines the values that it has by random operations (elementwise with broadcasting, casts, shapes,
reductions, scans, dot, and loops or branches with carried values); changes memory by atomics, and stores some results.
Beside each value of the IR stand its arrays: `generator_values.py` and `generator_memory.py`. Results are compared bit
for bit, those of `generator_inexact.py` within bounds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from tests.tile.generator_inexact import Inexact
from tilewright.tile.executors import Facts
from tilewright.tile.interpret import interpret
from tilewright.tile.ir import Block, TileProgram
from tilewright.tile.kernel import tensor_argument

_GRIDS = ((1, 1, 1), (1, 1, 1), (3, 1, 1), (2, 2, 1), (1, 2, 1), (2, 1, 2))


@dataclass
class Generated:
    program: TileProgram
    arrays: dict[str, np.ndarray]  # the inputs, and outputs to be written
    wanted: dict[str, np.ndarray]
    numbers: dict[str, int]
    grid: tuple[int, int, int]
    unwritten: list[str]
    bounds: dict[str, np.ndarray]  # of results that are not exact: the greatest error of each element

    def facts(self, seed: int) -> Facts:
        """That hold: arrays begin at multiples of 16 bytes."""
        divisors = [(name, 16) for name in self.arrays]
        divisors += [(name, min(16, n & -n)) for name, n in self.numbers.items() if n and not n % 2]
        return Facts(disjoint=bool(seed % 2), divisors=tuple(divisors) if seed % 3 else ())

    def values(self, addresses: dict[str, int]) -> list[int]:
        """Of each parameter, as a launch takes them."""
        return [{**addresses, **self.numbers}[param.name] for param in self.program.params]

    def interpret(self, program: TileProgram | None = None) -> None:
        """In debug mode."""
        tensors = [tensor_argument(name, array) for name, array in self.arrays.items()]
        interpret(
            program or self.program, self.grid, tensors, self.numbers, debug=True, unwritten=self.unwritten
        )

    def check(self, found: dict[str, np.ndarray], note: str) -> None:
        for name, wanted in self.wanted.items():
            text = f"{note}, {name}\n{self.grid}\n{self.program}"
            if name not in self.bounds:
                np.testing.assert_array_equal(found[name], wanted, err_msg=text)
                continue
            one, other = (each.astype(np.float64) for each in (found[name], wanted))
            np.testing.assert_array_equal(np.isnan(one), np.isnan(other), err_msg=text)
            far = np.abs(one - other) > self.bounds[name]
            assert not far.any(), f"{text}\n{one[far]}\n{other[far]}\n{self.bounds[name][far]}"


class _Maker(Inexact):
    def step(self) -> None:
        if self.chance(0.12):
            self.approximate()
            return
        kinds = (
            self.arithmetic, self.compare, self.cast, self.reduce, self.shape, self.where, self.dot, self.scan,
            self.loop, self.leaving, self.branch,
        )  # fmt: skip
        if self.chance(0.2):
            with_memory = (self.load, self.atomic, self.loop_of_atomics)
            if (chosen := self.random.randrange(5)) < len(with_memory):
                with_memory[chosen]()
            else:
                self.keep(self.loop_of_loads() if chosen == 3 or self.chance(0.5) else self.loop_of_dots())
            return
        self.keep(self.random.choice(kinds)())


def generate(seed: int) -> Generated:
    chooser = random.Random(seed)
    maker = _Maker(chooser, chooser.choice(_GRIDS))
    with np.errstate(all="ignore"):
        maker.keep(maker.linear_instance())
        for _ in range(chooser.randint(1, 3)):
            maker.load()
        for _ in range(chooser.randint(3, 14)):
            maker.step()
        for made in maker.values[-3:]:
            maker.store(made)
    program = TileProgram(f"random_{seed}", tuple(maker.params), Block((), tuple(maker.b.nodes), ()))
    return Generated(
        program, maker.arrays, maker.wanted, maker.numbers, maker.grid, maker.unwritten, maker.bounds
    )
