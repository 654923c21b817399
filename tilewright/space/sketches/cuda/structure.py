"""The common part of sketches that fetch tiles of both factors into shared memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from tilewright.hw.gpu import GpuMachine
from tilewright.loops.ir import Program
from tilewright.space.contraction import TwoFactorContraction
from tilewright.space.mapping import Mapping
from tilewright.space.sketches.cuda.blocks import BlockGrid
from tilewright.space.sketches.cuda.fetch import Fetched, Summed, TileOperand
from tilewright.space.space import Config, Space
from tilewright.space.template import GpuTerms
from tilewright.support.batch import Truth, Values, both, joined, narrowed, select


class Sizes(Protocol):
    """The values of a config, or arrays of many: `mapping` is an index, the same for all; `bm`, `bn` and `bk` are the
    tile sizes of a block."""

    @property
    def mapping(self) -> int: ...
    @property
    def bm(self) -> int: ...
    @property
    def bn(self) -> int: ...
    @property
    def bk(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def threads(self) -> int: ...


S = TypeVar("S", bound=Sizes)


@dataclass(frozen=True)
class Structure(ABC, Generic[S]):
    """One config's program, and its properties that are known before it is built, also of many configs."""

    swizzled: ClassVar[bool] = False  # whether the chunks of a tile's rows are permuted

    work: TwoFactorContraction
    mapping: Mapping
    read: tuple[TileOperand, TileOperand]
    tiles: S

    @cached_property
    def summed(self) -> Summed:
        return Summed(self.mapping.k, self.mapping.outer, self.tiles.bk)

    @cached_property
    def operands(self) -> tuple[Fetched, Fetched]:
        t, (left, right) = self.tiles, self.read
        return (
            Fetched(left, t.bm, self.summed, t.stages, "left", swizzled=self.swizzled),
            Fetched(right, t.bn, self.summed, t.stages, "right", swizzled=self.swizzled),
        )

    @property
    def blocks(self) -> BlockGrid:
        return BlockGrid(self.mapping, self.tiles.bm, self.tiles.bn)

    @cached_property
    def copied(self) -> int:
        """Copies per thread and step."""
        return sum(operand.copy_count(self.tiles.threads) for operand in self.operands)

    @property
    @abstractmethod
    def shared_bytes(self) -> int: ...

    @property
    @abstractmethod
    def registers(self) -> float: ...

    @abstractmethod
    def program(self) -> Program: ...

    @abstractmethod
    def terms(self) -> GpuTerms: ...


class InTiles(ABC, Generic[S]):
    """A sketch applied to a contraction. `mappings_found`: the mappings to choose from; `read`: the operands
    of each."""

    sizes: type[S]
    structured: type[Structure[S]]
    most_copies: int  # per thread and step
    most_registers: int

    def __init__(
        self,
        work: TwoFactorContraction,
        mappings_found: list[Mapping],
        machine: GpuMachine,
        read: list[tuple[TileOperand, TileOperand]],
    ) -> None:
        self.work, self.mappings_found, self.machine, self.read = work, mappings_found, machine, read

    @property
    @abstractmethod
    def space(self) -> Space: ...

    @abstractmethod
    def suits(self, tiles: S) -> Truth:
        """Whether the sizes are compatible and suit the task."""

    def legal(self, values: Values) -> Truth:
        return self._by_mapping(values, self._legal)

    def _legal(self, values: Values) -> Truth:
        return both(self.suits(self.sizes(**values)), values, self._fits)

    def _fits(self, values: Values) -> Truth:
        tiles = self.sizes(**values)
        kernel = self.structure(tiles)
        fits = (kernel.shared_bytes <= self.machine.shared_block) & (kernel.copied <= self.most_copies)
        fits = fits & (kernel.registers <= self.most_registers)
        total = kernel.summed.total
        # A single step has no later one to load for.
        return fits & (tiles.stages <= select(total > 1, 1 + total, 1))

    @staticmethod
    def _by_mapping(values: Values, asked: Callable[[Values], Any]) -> Any:
        """Ask for the configs of each mapping: their operands differ."""
        mapping = values["mapping"]
        if not isinstance(mapping, np.ndarray):
            return asked(values)
        parts = [(mapping == one, one) for one in np.unique(mapping).tolist()]
        return joined([(at, asked({**narrowed(values, at), "mapping": one})) for at, one in parts])

    def structure(self, tiles: S) -> Structure[S]:
        return self.structured(self.work, self.mappings_found[tiles.mapping], self.read[tiles.mapping], tiles)

    def of_config(self, config: Config) -> Structure[S]:
        return self.structure(self.sizes(**dict(config.values)))

    def program(self, config: Config) -> Program:
        return self.of_config(config).program()

    def terms(self, config: Config) -> GpuTerms:
        return self.of_config(config).terms()

    def terms_of(self, values: Values) -> GpuTerms:
        """The terms of many configs at once."""
        found: GpuTerms = self._by_mapping(values, lambda own: self.structure(self.sizes(**own)).terms())
        return found
