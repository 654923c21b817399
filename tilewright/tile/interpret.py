"""Runs tile programs in NumPy: the instances of the grid one after the other, each node over all elements of its tiles.

This is what a tile program means, executed. Every access is checked against the tensors that were passed. Debug mode
finds more: reads of elements that nothing wrote, races between instances, assertions that fail; and what a masked load
does not read is NaN, so that using it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import DeviceAssertionError
from tilewright.tile.ir import Block, For, If, Op, TileProgram, Value, While
from tilewright.tile.memory import Memory, TensorArgument
from tilewright.tile.ops import OPS


def interpret(
    program: TileProgram,
    grid: tuple[int, int, int],
    tensors: Sequence[TensorArgument],
    scalars: Mapping[str, bool | int | float],
    *,
    debug: bool = False,
    unwritten: Sequence[str] = (),
) -> None:
    """Runs all instances of a launch. `unwritten`: tensors whose elements count as unwritten until they are stored."""
    run_instances(program, Memory(tensors, debug, unwritten), grid, scalars, debug=debug)


def run_instances(
    program: TileProgram,
    memory: Memory,
    grid: tuple[int, int, int],
    scalars: Mapping[str, bool | int | float],
    numbers: Iterable[int] | None = None,
    *,
    debug: bool = False,
) -> None:
    """Runs instances of a launch on a memory: those of these numbers, in order; None: all."""
    memory.grid = grid
    arguments: dict[Value, Any] = {}
    for param in program.params:
        if param.name in memory.pointers:
            arguments[param] = memory.pointers[param.name]
        else:
            arguments[param] = np.asarray(scalars[param.name], param.type.dtype.numpy)
    with np.errstate(all="ignore"):
        for number in range(grid[0] * grid[1] * grid[2]) if numbers is None else numbers:
            memory.current = number
            _Instance(memory, number, debug).run(program.body, dict(arguments))


class _Instance:
    """One program instance: the machine that the meanings in `ops.py` ask."""

    def __init__(self, memory: Memory, number: int, debug: bool) -> None:
        self.memory = memory
        self.index = memory.instance(number)
        self.debug = debug

    def program_id(self, axis: int) -> int:
        return self.index[axis]

    def num_programs(self, axis: int) -> int:
        return self.memory.grid[axis]

    def load(self, addresses: np.ndarray, dtype: DType, mask: np.ndarray | None) -> np.ndarray:
        return self.memory.load(addresses, dtype, mask)

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray | None) -> None:
        self.memory.store(addresses, values, mask)

    def atomic(
        self,
        kind: str,
        addresses: np.ndarray,
        values: np.ndarray,
        mask: np.ndarray | None,
        expected: Any = None,
    ) -> np.ndarray:
        return self.memory.atomic(kind, addresses, values, mask, expected)

    def print(self, text: str) -> None:
        print(f"{self.index} {text}")

    def run(self, block: Block, values: dict[Value, Any]) -> tuple[Any, ...]:
        """The values that the block yields. `values` has those that are defined so far, and gets those of the block."""
        for node in block.nodes:
            if isinstance(node, Op):
                self.memory.site = node.where
                operands = [values[operand] for operand in node.operands]
                try:
                    result = OPS[node.name].meaning(self, node.settings, *operands)
                except DeviceAssertionError as error:
                    raise self.memory.failure(DeviceAssertionError, error.problem) from None
                if node.results:
                    values[node.results[0]] = result
            elif isinstance(node, For):
                self._for(node, values)
            elif isinstance(node, While):
                self._while(node, values)
            else:
                self._if(node, values)
        return tuple(values[each] for each in block.yields)

    def _for(self, node: For, values: dict[Value, Any]) -> None:
        carried = tuple(values[each] for each in node.init)
        lower, upper, step = (int(values[each]) for each in (node.lower, node.upper, node.step))
        index, *params = node.body.params
        for number in range(lower, upper, step):
            values[index] = np.asarray(number, index.type.dtype.numpy)
            values.update(zip(params, carried, strict=True))
            carried = self.run(node.body, values)
        values.update(zip(node.results, carried, strict=True))

    def _while(self, node: While, values: dict[Value, Any]) -> None:
        carried = tuple(values[each] for each in node.init)
        while True:
            values.update(zip(node.condition.params, carried, strict=True))
            (more,) = self.run(node.condition, values)
            if not more:
                break
            values.update(zip(node.body.params, carried, strict=True))
            carried = self.run(node.body, values)
        values.update(zip(node.results, carried, strict=True))

    def _if(self, node: If, values: dict[Value, Any]) -> None:
        taken = node.then if values[node.condition] else node.other
        values.update(zip(node.results, self.run(taken, values), strict=True))
