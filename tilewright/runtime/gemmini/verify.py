"""Verifies that a machine can execute a program: every rule, for all instructions of a kind at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tilewright.errors import InstructionError
from tilewright.runtime.gemmini.isa import (
    ACCUMULATOR,
    COMPUTES,
    FULL,
    GIVEN,
    LOOPS,
    MAX_BLOCKS,
    MVINS,
    NONE,
    ROW_MASK,
    Array,
    Convolution,
    Instruction,
    encode,
)
from tilewright.runtime.gemmini.words import WordTable

Fields = dict[str, np.ndarray]


def verify(program: Sequence[Instruction], machine: Array) -> None:
    """Raise InstructionError for the first instruction that the machine cannot execute, by its position."""
    verify_table(WordTable(encode(program)), machine)


def verify_table(table: WordTable, machine: Array) -> None:
    found = _Verification(table, machine)
    found.check()
    if found.first < len(table):
        at = found.first
        raise InstructionError(f"instruction {at} ({table.instruction(at)}): {found.message}")


class _Verification:
    """The first instruction that breaks a rule. Rules of one instruction are checked in order: the first one counts."""

    def __init__(self, table: WordTable, machine: Array) -> None:
        self.table, self.machine = table, machine
        self.first, self.message = len(table), ""
        # What a loop leaves of configuration and weights is not said.
        self.resets = table.positions("flush", *LOOPS)

    def _refuse(self, at: np.ndarray, bad: np.ndarray, why: Callable[[int], str] | str) -> None:
        """`why` gets an index into `at`."""
        if not bad.any():
            return
        index = int(np.argmax(bad))
        if at[index] < self.first:
            self.first = int(at[index])
            self.message = why if isinstance(why, str) else why(index)

    def _last(self, before: np.ndarray, at: np.ndarray) -> np.ndarray:
        """The index of the last of `before` since the machine was reset, for each position of `at`; or -1."""
        found = np.searchsorted(before, at) - 1
        if not before.size:
            return found
        return np.where(before[found] > self._reset(at), found, -1)

    def _reset(self, at: np.ndarray) -> np.ndarray:
        """The position of the last reset before."""
        found = np.searchsorted(self.resets, at) - 1
        if not self.resets.size:
            return found
        return np.where(found >= 0, self.resets[found], -1)

    def check(self) -> None:
        table = self.table
        at, found = table.positions("config_ex"), table.fields("config_ex")
        self._positive(at, found, "a_stride")
        at, found = table.positions("config_ld"), table.fields("config_ld")
        slot = found["slot"]
        self._refuse(at, slot >= len(MVINS), lambda n: f"slot must be 0, 1 or 2, got {slot[n]}")
        self._scale(at, found)
        for number, name in enumerate(MVINS):
            self._mvin(number, name, at[slot == number], {k: v[slot == number] for k, v in found.items()})
        self._stores()
        self._computes()
        for loop in LOOPS:
            self._loops(loop)

    # -- what rules ask -------------------------------------------------------------------------------------------

    def _positive(self, at: np.ndarray, found: Fields, name: str, where: np.ndarray | None = None) -> None:
        values = found[name]
        bad = values < 1 if where is None else (values < 1) & where
        self._refuse(at, bad, lambda n: f"{name} must be at least 1, got {values[n]}")

    def _scale(self, at: np.ndarray, found: Fields) -> None:
        bits = found["scale"] & 0x7FFFFFFF
        bad = (bits >= 0x7F800000) | ((bits > 0) & (bits < 0x00800000))
        self._refuse(
            at, bad, lambda n: f"the scale must be 0 or a normal 32-bit float, got {found['scale'][n]:#x}"
        )

    def _extent(
        self, at: np.ndarray, found: Fields, where: np.ndarray, prefix: str = "", blocks: int = 1
    ) -> None:
        self._positive(at, found, f"{prefix}rows", where)
        self._positive(at, found, f"{prefix}cols", where)
        rows, cols, dim = found[f"{prefix}rows"], found[f"{prefix}cols"], self.machine.dim
        bad = where & ((rows > dim) | (cols > blocks * dim))
        self._refuse(
            at,
            bad,
            lambda n: f"at most {dim} rows and {blocks * dim} columns, got {rows[n]} and {cols[n]}",
        )

    def _rows(
        self, at: np.ndarray, address: np.ndarray, count: np.ndarray, where: np.ndarray, memory: str = ""
    ) -> None:
        """`count`: rows from the address on."""
        inside = (address & ACCUMULATOR) != 0
        if memory:
            self._refuse(
                at, where & (inside != (memory == "accumulator")), f"the address must be in the {memory}"
            )
        self._refuse(
            at,
            where & ~inside & (address >> 29 != 0),
            "only an accumulator's address may have bits 29 and 30",
        )
        rows = np.where(inside, self.machine.accumulator_rows, self.machine.scratchpad_rows)
        last = (address & ROW_MASK) + count

        def why(n: int) -> str:
            kind = "accumulator" if inside[n] else "scratchpad"
            return f"it reaches row {last[n] - 1}; the {kind} has {rows[n]} rows"

        self._refuse(at, where & (last > rows), why)

    # -- instructions ---------------------------------------------------------------------------------------------

    def _mvin(self, slot: int, name: str, configured: np.ndarray, config: Fields) -> None:
        at, found = self.table.positions(name), self.table.fields(name)
        last = self._last(configured, at)
        self._refuse(at, last < 0, "config_ld must come before it")
        if not configured.size:
            return
        everywhere = np.ones(len(at), bool)
        self._extent(at, found, everywhere, blocks=MAX_BLOCKS)
        rows, stride = found["rows"], config["block_stride"][last]
        blocks = -(-found["cols"] // self.machine.dim)
        self._refuse(
            at,
            (blocks > 1) & (stride < rows),
            lambda n: f"blocks of {rows[n]} rows overlap at a block stride of {stride[n]}",
        )
        self._rows(at, found["local"], (blocks - 1) * stride + rows, everywhere)

    def _stores(self) -> None:
        table, dim = self.table, self.machine.dim
        configured, config = table.positions("config_st"), table.fields("config_st")
        self._scale(configured, config)
        pools = config["pool_size"] > 0
        for name in ("pool_stride", "pool_pitch", "rows_in", "cols_in", "rows_out", "cols_out"):
            self._positive(configured, config, name, pools)
        for axis, before in (("rows", "pool_top"), ("cols", "pool_left")):
            last = (config[f"{axis}_out"] - 1) * config["pool_stride"] - config[before]
            outside = (config[before] >= config["pool_size"]) | (last >= config[f"{axis}_in"])
            self._refuse(configured, pools & outside, "a pooling window lies outside the results")

        at, found = table.positions("mvout"), table.fields("mvout")
        of = self._last(configured, at)
        self._refuse(at, of < 0, "config_st must come before it")
        if not configured.size:
            return
        pooled, address = pools[of], found["local"]
        narrow = (address & ACCUMULATOR != 0) & (address & FULL == 0)
        self._refuse(at, pooled & ~narrow, "pooling requires 8-bit results of the accumulator")
        self._positive(at, found, "rows", pooled)
        cols = found["cols"]
        self._refuse(
            at,
            pooled & ((cols < 1) | (cols > dim)),
            lambda n: f"at most {dim} columns, got {cols[n]}",
        )
        self._rows(at, address, config["rows_in"][of] * config["cols_in"][of], pooled)
        self._extent(at, found, ~pooled)
        self._rows(at, address, found["rows"], ~pooled)

    def _computes(self) -> None:
        table = self.table
        loaded, weights = table.positions("preload"), table.fields("preload")
        own = weights["b"] != NONE
        self._extent(loaded, weights, own)
        self._rows(loaded, weights["b"], weights["rows"], own, "scratchpad")
        everywhere = np.ones(len(loaded), bool)
        self._extent(loaded, weights, everywhere, "c_")
        self._rows(loaded, weights["c"], weights["c_rows"], everywhere, "accumulator")

        at = table.positions(*COMPUTES)
        found = table.fields(COMPUTES[0], at)
        target, before = self._last(loaded, at), self._last(at, at)
        taken = np.where(before >= 0, at[before], -1) if at.size else at
        pending = target >= 0
        if loaded.size:
            pending &= loaded[target] > taken
        known = self._last(loaded[own], at) >= 0
        self._refuse(at, ~(pending & known), "a preload must come before it")
        further = table.named(COMPUTES[1], at)
        self._refuse(at, further & (before < 0), "a compute_preloaded must come before it")
        everywhere = np.ones(len(at), bool)
        self._extent(at, found, everywhere)
        rows = found["rows"]
        if loaded.size:
            expected = weights["c_rows"][target]
            self._refuse(
                at,
                rows != expected,
                lambda n: f"the preload before it expects {expected[n]} rows, got {rows[n]}",
            )
        self._refuse(at, found["d"] != NONE, "d must be NONE: a bias is loaded into the accumulator")
        strides, config = table.positions("config_ex"), table.fields("config_ex")["a_stride"]
        of = self._last(strides, at)
        stride = np.where(of >= 0, config[of], 1) if strides.size else np.ones_like(rows)
        self._rows(at, found["a"], (rows - 1) * stride + 1, everywhere, "scratchpad")

    # -- loops: few, one after the other --------------------------------------------------------------------------

    def _loops(self, loop: str) -> None:
        table = self.table
        self._scale(table.positions(loop), table.fields(loop))
        flushed = table.positions("flush")
        for at in table.positions(loop).tolist():
            if at >= self.first:
                return
            began = int(flushed[np.searchsorted(flushed, at) - 1]) if (flushed < at).any() else -1
            given: dict[str, Instruction] = {}
            missing = ""
            for name in GIVEN[loop]:
                before = table.positions(name)
                before = before[(before < at) & (before > began)]
                if before.size:
                    given[name] = table.instruction(int(before[-1]))
                elif not missing:
                    missing = name
            wrong = f"{missing} must come before it" if missing else ""
            if not missing and loop == "loop_conv_ws":
                wrong = _wrong_convolution(Convolution.of(table.instruction(at), given), self.machine)
            if wrong:
                self.first, self.message = at, wrong
                return
        if loop == "loop_ws":
            for at in table.positions("loop_ws_bounds").tolist():
                wrong = _wrong_bounds(table.instruction(at), self.machine)
                if wrong and at < self.first:
                    self.first, self.message = at, wrong
                    return


def _wrong_bounds(instruction: Instruction, machine: Array) -> str:
    """The error in a matmul's bounds; "" if there is none."""
    dim, half = machine.dim, machine.scratchpad_rows
    for axis in "ijk":
        if instruction[axis] < 1:
            return f"{axis} must be at least 1, got {instruction[axis]}"
    i, j, k = (instruction[axis] for axis in "ijk")
    if any(instruction[f"pad_{axis}"] >= dim for axis in "ijk"):
        return f"padding must be less than the array's {dim}"
    if (i * k + k * j) * dim > half:
        return f"A and B take {(i * k + k * j) * dim} rows of a scratchpad of {half}"
    if i * j * dim > machine.accumulator_rows:
        return f"C takes {i * j * dim} rows of {machine.accumulator_rows}"
    return ""


def _wrong_convolution(conv: Convolution, machine: Array) -> str:
    extents = (conv.in_rows, conv.in_cols, conv.in_channels, conv.out_channels, conv.out_rows, conv.out_cols)
    if min(extents) < 1:
        return "a convolution's extents must be at least 1"
    if min(conv.kernel_rows, conv.kernel_cols, conv.stride) < 1:
        return "a window's extents and its stride must be at least 1"
    data, weights, results = conv.rows(machine.dim)
    if data + weights > machine.scratchpad_rows:
        return f"data and weights take {data + weights} rows of a scratchpad of {machine.scratchpad_rows}"
    if results > machine.accumulator_rows:
        return f"results take {results} rows of {machine.accumulator_rows}"
    return ""
