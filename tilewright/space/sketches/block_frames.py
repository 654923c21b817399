"""The frames of contractions on GPUs: what the blocks, warps and threads compute, and what it costs.

Sizes, legality and counted terms are those of `cuda/tiled.py` and `cuda/tensorised.py`; kernels are schedules.
A location (`AT`) says where an operand's tile is fetched: in every step of the reduction, or once per block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tilewright.loops.tiling import extent_of
from tilewright.space.sketches.analysis import Extents
from tilewright.space.sketches.cuda.structure import InTiles
from tilewright.space.sketches.matrices import LEFT, RIGHT, Matrices
from tilewright.space.space import Knob
from tilewright.space.template import GpuTerms
from tilewright.support.arith import round_up
from tilewright.support.batch import Number, Truth, select

Values = Mapping[str, Any]
STEP, BLOCK = "step", "block"
_DECIDED = ("mapping", "fused")  # knobs of the written structures that a derived one has no choice of


def at(operand: str) -> str:
    """The knob with the location of an operand's tile."""
    return f"{operand}_at"


@dataclass(frozen=True)
class MatricesFrame:
    """Matmuls of which no tiles are decided yet."""

    matrices: Matrices

    @property
    def block_loop(self) -> str | None:
        return None

    def at_block(self, values: Values) -> Extents:
        raise NotImplementedError

    def terms(self, sketch: object) -> Callable[[Values], GpuTerms] | None:
        return None


@dataclass(frozen=True)
class BlockFrame:
    """Matmuls in tiles of blocks. `applied`: its sizes, with this one mapping."""

    matrices: Matrices
    applied: InTiles[Any]

    batched = True

    @property
    def block_loop(self) -> str | None:
        return None

    def at_block(self, values: Values) -> Extents:
        sizes = self.sizes(values)
        return sizes.bm, sizes.bn

    @cached_property
    def knobs(self) -> tuple[Knob, ...]:
        return tuple(knob for knob in self.applied.space.knobs if knob.name not in _DECIDED)

    def sizes(self, values: Values) -> Any:
        return self.applied.sizes(**self._all(values))

    def legal(self, values: Values) -> Truth:
        once = [values.get(at(operand), STEP) == BLOCK for operand in (LEFT, RIGHT)]
        # What is fetched once has no pipeline.
        legal = self.applied.legal(self._all(values)) & select(once[0] & once[1], values["stages"] == 1, True)
        return legal & (self.shared_bytes(values) <= self.applied.machine.shared_block)

    def terms(self, sketch: object) -> Callable[[Values], GpuTerms]:
        return lambda values: replace(
            self.applied.terms_of(self._all(values)), shared_bytes=self.shared_bytes(values)
        )

    def shared_bytes(self, values: Values) -> Number:
        kernel = self.applied.structure(self.sizes(values))
        depth = round_up(extent_of(self.matrices.mapping.k), kernel.tiles.bk)
        found = kernel.shared_bytes
        for name, operand in zip((LEFT, RIGHT), kernel.operands, strict=True):
            whole = operand.size * depth * extent_of(self.matrices.mapping.outer) * operand.factor.dtype.bytes
            found = found + select(values.get(at(name), STEP) == BLOCK, whole, 0)
        return found

    def _all(self, values: Values) -> dict[str, Any]:
        names = {knob.name for knob in self.knobs}
        return {
            **{name: value for name, value in values.items() if name in names},
            "mapping": 0,
            "fused": True,
        }
