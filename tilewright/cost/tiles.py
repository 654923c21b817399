"""Counts what a launch of a tile program does: the terms of the analytical model, and features for one that learns.

    TileProgram + scalars + grid  ->  TileCounts  ->  Terms (processors), GpuTerms or StreamTerms (GPUs), features

Loops count as often as they run, where their bounds follow from the scalar arguments: of the program instance in the
middle of the grid, which stands for all. Where they depend on what is in memory they count once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.cost.tile_accesses import Accesses
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine, Machine
from tilewright.hw.gpu import GpuMachine
from tilewright.space.terms import Counted, GpuTerms, StreamTerms, Terms
from tilewright.tile.atomics import ATOMICS
from tilewright.tile.ir import Block, BlockPointerType, For, If, Op, TileProgram, TileType, Value, While
from tilewright.tile.ops import OPS

_EXPENSIVE = {
    "exp": 10.0, "exp2_nonpositive": 8.0, "exp2_rough": 5.0, "expm1": 14.0, "log": 12.0, "log1p": 14.0, "erf": 16.0,
    "tanh": 16.0, "sin": 14.0, "cos": 14.0, "pow": 24.0, "atan2": 24.0, "div": 5.0, "sqrt": 5.0, "rsqrt": 6.0,
    "fmod": 10.0, "floordiv": 10.0, "mod": 10.0, "sort": 40.0, "cumsum": 4.0, "reduce": 1.5,
}  # fmt: skip
_FREE = {
    "constant", "arange", "broadcast", "expand_dims", "reshape", "bitcast", "make_block_ptr", "advance", "program_id",
    "num_programs",
}  # fmt: skip
_MEMORY = frozenset(["load", "store", "load_block", "store_block", *ATOMICS])
_UNKNOWN_TRIPS = 1.0
_UNKNOWN_RUN = 256.0  # bytes that lie together, of an access whose addresses depend on what is in memory
_WARPS, _STAGES = 4, 2  # GPU launch defaults
_BASE_REGISTERS = 24  # of a thread, besides tiles
_GPU_OPERATION, _GPU_INDEX = (
    0.5,
    0.35,
)  # instructions for an operation: functions are fewer, index arithmetic is shared
_MAX_REGISTERS = 255
_SPILL = 3.0  # instructions of a warp for a register that does not fit, in each step
_EXCHANGE = 8.0  # instructions of a thread for a byte that one dot gives to the next through shared memory
_CARRIED_VECTORS = 8  # of a tile that stays in registers
_SHORT_RUN, _SHORT_RUNS = 1400.0, 0.8  # bytes; the share of time that shorter runs take longer
_ACCUMULATORS = 0.75  # of the vector registers, what a dot keeps its sums in


@dataclass
class TileCounts:
    """The counts of one program instance: elementwise operations, FMAs of dots, bytes; and how many `instances` run."""

    instances: int
    operations: float = 0.0  # on elements, an expensive function counted as several
    index_operations: float = 0.0  # the same on integers and pointers
    fmas: float = 0.0  # of dots
    half_fmas: float = 0.0  # of these, on 16-bit operands
    dots: float = 0.0
    packed: float = 0.0  # bytes of operands that are copied for dots
    resumed: float = 0.0  # elements of accumulators that enter a dot and do not fit into registers
    loaded: float = 0.0  # bytes
    stored: float = 0.0
    accesses: float = 0.0  # loads and stores of tiles
    runs: float = 0.0  # of neighbouring bytes that these consist of
    steps: float = 1.0  # iterations of all innermost loops
    carried: float = 0.0  # bytes that loops carry
    carried_tile: float = 0.0  # bytes of the largest tile among these
    operand_bytes: float = 0.0  # of the largest dot's operands
    largest: float = 0.0  # bytes of the largest tile
    working: float = (
        0.0  # bytes of the largest tile that a loop makes and does not carry; without loops, of any
    )
    chained: float = 0.0  # bytes of operands of dots that come from a dot
    tensors: float = 0.0  # bytes of the tensors, each once
    sides: list[float] = field(default_factory=list)  # sizes of the dots' tiles: M, N, K

    def features(self) -> dict[str, float]:
        """Ratios and logarithms, with names that all tile kernels share."""
        moved = self.loaded + self.stored
        found = {
            "tile.instances": self.instances,
            "tile.steps": self.steps,
            "tile.work": self.operations + 2 * self.fmas,
            "tile.intensity": (self.operations + 2 * self.fmas) / max(1.0, moved),
            "tile.reuse": self.instances * moved / max(1.0, self.tensors),
            "tile.bytes_per_access": moved / max(1.0, self.accesses),
            "tile.bytes_per_run": moved / max(1.0, self.runs),
            "tile.carried": self.carried,
            "tile.operands": self.operand_bytes,
            "tile.largest": self.largest,
            "tile.index": self.index_operations / max(1.0, self.operations + self.fmas),
        }
        found |= {f"tile.dot{axis}": side for axis, side in enumerate(self.sides)}
        return {name: math.log2(1 + value) for name, value in found.items()}


def count_tiles(
    program: TileProgram,
    scalars: Mapping[str, bool | int | float],
    grid: tuple[int, int, int],
    tensor_bytes: int,
) -> TileCounts:
    counter = _Counter(grid, tensor_bytes)
    known = {
        param: np.asarray(scalars[param.name], param.type.dtype.numpy)
        for param in program.params
        if param.name in scalars
    }
    counter.enter(known)
    counter.block(program.body, known, 1.0)
    counts = counter.counts
    counts.working = counts.working or counts.largest
    return counts


class _Counter:
    def __init__(self, grid: tuple[int, int, int], tensor_bytes: int) -> None:
        self.grid = grid
        self.counts = TileCounts(max(1, math.prod(grid)), tensors=tensor_bytes)
        self._addresses = Accesses({})
        self._of_dots: set[Value] = set()  # results of dots, and what elementwise operations make of them

    # -- what meanings in `ops.py` may ask for scalars

    def program_id(self, axis: int) -> int:
        return self.grid[axis] // 2

    def num_programs(self, axis: int) -> int:
        return self.grid[axis]

    # -- counting

    def enter(self, known: Mapping[Value, Any]) -> None:
        self._addresses = Accesses(dict(known))

    def block(self, block: Block, known: dict[Value, Any], times: float) -> None:
        for node in block.nodes:
            if isinstance(node, Op):
                self._op(node, known, times)
            elif isinstance(node, For):
                trips = _trips(node, known)
                self._addresses.enter(node)
                self._loop(node.init, node.body, known, times * trips)
            elif isinstance(node, While):
                self.block(node.condition, dict(known), times)
                self._loop(node.init, node.body, known, times * _UNKNOWN_TRIPS)
            elif isinstance(node, If):
                self._if(node, known, times)

    def _loop(self, init: Sequence[Value], body: Block, known: dict[Value, Any], times: float) -> None:
        carried = sum(_bytes(value) for value in init)
        self.counts.carried = max(self.counts.carried, carried)
        self.counts.carried_tile = max([self.counts.carried_tile, *map(_bytes, init)])
        if not any(isinstance(node, For | While) for node in body.nodes):
            self.counts.steps += times
        made = [result for node in body.nodes for result in node.results if result not in body.yields]
        self.counts.working = max([self.counts.working, *map(_bytes, made)])
        self.block(body, dict(known), times)

    def _if(self, node: If, known: dict[Value, Any], times: float) -> None:
        taken = known.get(node.condition)
        if taken is None:
            for branch in (node.then, node.other):
                self.block(branch, dict(known), 0.5 * times)
        else:
            self.block(node.then if taken else node.other, dict(known), times)

    def _op(self, op: Op, known: dict[Value, Any], times: float) -> None:
        counts = self.counts
        result = op.results[0] if op.results else None
        size = _elements(result) if result is not None else 0.0
        if result is not None:
            counts.largest = max(counts.largest, _bytes(result))
        if op.name in _MEMORY:
            self._access(op, times)
        elif op.name in ("dot", "dot4"):
            self._dot(op, times)
            self._of_dots.update(op.results)
        elif op.name not in _FREE:
            if op.name not in ("reduce", "sort", "cumsum") and any(
                each in self._of_dots for each in op.operands
            ):
                self._of_dots.update(op.results)
            weight = _EXPENSIVE.get(op.name, 1.0)
            inside = max([size, *map(_elements, op.operands)])
            if result is not None and _is_float(result):
                counts.operations += times * weight * inside
            else:
                counts.index_operations += times * min(weight, 2.0) * inside
        self._evaluate(op, known)
        self._addresses.op(op)

    def _access(self, op: Op, times: float) -> None:
        stores = op.name.startswith("store")
        moved = _bytes(op.operands[1]) if stores or op.name in ATOMICS else _bytes(op.results[0])
        self.counts.accesses += times
        together = self._addresses.run_bytes(op.operands[0]) or _UNKNOWN_RUN
        self.counts.runs += times * moved / together
        if op.name in ("load", "load_block") or op.name in ATOMICS:
            self.counts.loaded += times * moved
        if stores or op.name in ATOMICS:
            self.counts.stored += times * moved

    def _dot(self, op: Op, times: float) -> None:
        left, right = (_shape(operand) for operand in op.operands[:2])
        m, k, n = left[-2], left[-1], right[-1]
        batch = math.prod(left[:-2])
        fmas = times * batch * m * n * k
        counts = self.counts
        counts.fmas += fmas
        if _dtype(op.operands[0]).bytes <= 2:
            counts.half_fmas += fmas
        counts.dots += times
        counts.packed += times * sum(map(_bytes, op.operands[:2]))
        counts.chained += times * sum(_bytes(each) for each in op.operands[:2] if each in self._of_dots)
        counts.resumed += times * batch * m * n
        counts.operand_bytes = max(counts.operand_bytes, _bytes(op.operands[0]) + _bytes(op.operands[1]))
        if not counts.sides or m * n * k > math.prod(counts.sides):
            counts.sides = [float(m), float(n), float(k)]

    def _evaluate(self, op: Op, known: dict[Value, Any]) -> None:
        """Evaluate the scalars that depend only on scalar arguments, such as bounds of loops."""
        if len(op.results) != 1 or op.name in _MEMORY or op.name in ("print", "assert"):
            return
        (result,) = op.results
        if not isinstance(result.type, TileType) or result.type.shape or result.type.is_pointer:
            return
        if all(operand in known for operand in op.operands):
            with np.errstate(all="ignore"):
                operands = [known[operand] for operand in op.operands]
                known[result] = OPS[op.name].meaning(self, op.settings, *operands)


def _trips(node: For, known: Mapping[Value, Any]) -> float:
    bounds = [known.get(each) for each in (node.lower, node.upper, node.step)]
    if any(bound is None for bound in bounds):
        return _UNKNOWN_TRIPS
    lower, upper, step = (int(bound) for bound in bounds if bound is not None)
    return float(len(range(lower, upper, step))) if step else _UNKNOWN_TRIPS


def _shape(value: Value) -> tuple[int, ...]:
    return value.type.block if isinstance(value.type, BlockPointerType) else value.type.shape


def _dtype(value: Value) -> DType:
    return value.type.dtype


def _is_float(value: Value) -> bool:
    return isinstance(value.type, TileType) and not value.type.is_pointer and value.type.dtype.is_float


def _elements(value: Value) -> float:
    return float(math.prod(_shape(value))) if isinstance(value.type, TileType) else 1.0


def _bytes(value: Value) -> float:
    if not isinstance(value.type, TileType) or value.type.is_pointer:
        return 0.0
    return _elements(value) * value.type.dtype.bytes


# -- terms ------------------------------------------------------------------------------------------------------------


def tile_terms(counts: TileCounts, machine: Machine, options: Mapping[str, Any]) -> Counted:
    if isinstance(machine, CpuMachine):
        return _cpu_terms(counts, machine, options)
    assert isinstance(machine, GpuMachine)
    return _gpu_terms(counts, options)


def _cpu_terms(counts: TileCounts, machine: CpuMachine, options: Mapping[str, Any]) -> Terms:
    lanes = machine.lanes(DType.F32)
    instances = counts.instances
    # A dot keeps a part of its sums in registers: what does not fit is read and written again at each step.
    registers = _ACCUMULATORS * machine.vector_registers * lanes
    resumed = counts.resumed if counts.sides and counts.sides[0] * counts.sides[1] > registers else 0.0
    narrow = max(1.0, lanes / counts.sides[1]) if counts.sides else 1.0
    fmas = counts.fmas / lanes * narrow
    arithmetic = fmas + (counts.operations + 0.5 * counts.index_operations) / lanes
    moved = (counts.loaded + counts.stored) / machine.vector_bytes
    # What a loop without dots carries stays in registers as long as a tile has few vectors.
    kept = 0.0
    if not counts.sides and counts.carried_tile > _CARRIED_VECTORS * machine.vector_bytes:
        kept = counts.steps * counts.carried / machine.vector_bytes
    # Operands are copied before a dot multiplies them, so its arithmetic hides nothing of that.
    copies = counts.packed / machine.vector_bytes / machine.throughput.stores
    loads = moved + 0.35 * fmas + resumed / lanes + kept
    working_set = counts.carried + counts.operand_bytes + counts.largest
    moved_bytes = counts.loaded + counts.stored
    # Prefetchers follow long runs; of short ones they find the begin late, and fetch beyond the end.
    short = 1.0 + _SHORT_RUNS * min(1.0, _SHORT_RUN * counts.runs / max(1.0, moved_bytes))
    traffic = instances * moved_bytes * short
    beyond_l1 = instances * counts.steps * working_set if working_set > machine.caches.l1 else 0.0
    beyond_l2 = traffic if counts.tensors > machine.caches.l2_per_core else 0.0
    return Terms(
        arithmetic=instances * arithmetic,
        loads=instances * loads,
        stores=instances * (counts.stored / machine.vector_bytes + resumed / lanes + kept),
        branches=instances * (counts.steps + counts.accesses),
        from_l2=traffic + beyond_l1,
        from_l3=beyond_l2,
        from_memory=short * counts.tensors if counts.tensors > machine.caches.last else 0.0,
        iterations=min(instances, int(options.get("threads") or instances)),
        scalar=(40.0 + copies) * instances,
    )


def _gpu_terms(counts: TileCounts, options: Mapping[str, Any]) -> GpuTerms | StreamTerms:
    warps = int(options.get("warps") or options.get("num_warps") or _WARPS)
    stages = int(options.get("stages") or options.get("num_stages") or _STAGES)
    steps = max(1, round(counts.steps))
    threads = 32 * warps
    registers = _BASE_REGISTERS + (counts.carried + counts.working) / 4 / threads
    scalar = (_GPU_OPERATION * counts.operations + _GPU_INDEX * counts.index_operations) / 32
    if not counts.fmas:
        return StreamTerms(
            blocks=counts.instances,
            threads=threads,
            registers=registers,
            steps=counts.steps,
            loaded=counts.loaded,
            written=counts.stored,
            memory=counts.tensors,
            scalar=scalar,
        )
    # A warp has 16 rows of a result. Where there are more warps than rows for them, what one dot gives to the next goes
    # through shared memory, as do the sums and maxima of its rows.
    rows = counts.sides[0] if counts.sides else 1.0
    exchanged = _EXCHANGE * counts.chained / 32 / steps if 16 * warps > rows else 0.0
    spilled = max(0.0, registers - _MAX_REGISTERS) * warps
    return GpuTerms(
        blocks=counts.instances,
        threads=threads,
        registers=int(min(_MAX_REGISTERS, registers)),
        shared_bytes=int(stages * counts.operand_bytes),
        steps=steps,
        stages=stages,
        flops=2 * counts.fmas / steps,
        scalar=scalar / steps + _SPILL * spilled,
        copies=counts.loaded / 512 / steps,
        shared_traffic=2 * counts.operand_bytes,
        loaded=counts.loaded / steps,
        memory=counts.tensors,
        write_loaded=0.0,
        written=counts.stored,
        write_shared=0.0,
        ordinary=exchanged,
    )
