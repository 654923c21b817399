"""`dot` by instructions of warpgroups: which operands are where, and the multiplications.

Multiplications are asynchronous. Shared memory that they read was written by ordinary stores or copies, so each writing
thread has a fence behind its writes, before the barrier. While they run, a pipelined loop starts its next copies
(`pending`). Then all wait: nothing is in flight where the next operation begins. The exception are sums that a loop
only adds to, with copies that a barrier for each slot keeps apart (`bulk_pipeline.py`): there the multiplications of
one iteration run on into the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.codegen.cuda.tiles.along import Along
from tilewright.codegen.cuda.tiles.contraction import (
    FmaPlan,
    SharedTile,
    WarpgroupPlan,
    shared_tile,
)
from tilewright.codegen.cuda.tiles.text import of_bits
from tilewright.codegen.cuda.tiles.values import tile_type
from tilewright.hw.warpgroups import function_text, matrix_descriptor, wait_text
from tilewright.tile.ir import Op, Value
from tilewright.tile.passes.layouts import REPLICATED
from tilewright.tile.passes.shared_memory import SharedBuffer

FENCE = "fence_for_warpgroups();"
ATOM_BYTES = 1024  # what operands of warpgroups are aligned to
_WORD = 4


class Warpgroups(Along):
    pending: Callable[[], None] | None = None  # code that may run beside multiplications
    # Dots whose multiplications may still run when the next iteration begins, with the names and sizes of their sums.
    in_flight: dict[Op, tuple[str, int] | None]

    def shared_operand(self, op: Op, number: int) -> SharedTile | None:
        """The shared-memory layout of an operand; None if it is in registers in the instruction's layout."""
        plan, value = self.homes.plans[op], op.operands[number]
        sizes, dtype = plan.sizes, tile_type(value).dtype
        rows, columns = (sizes.m, sizes.k) if number == 0 else (sizes.k, sizes.n)
        if isinstance(plan, FmaPlan):
            return SharedTile(tuple(dtype.bytes << bit for bit in range(rows + columns + sizes.batch)), True)
        if number == 0 and self.homes.of(value).holds(plan.left):
            return None
        return self._tile(value, rows, columns, sizes.batch, k_last=number == 0)

    def _tile(self, value: Value, rows: int, columns: int, batch: int, *, k_last: bool) -> SharedTile:
        """The shared-memory tile of an operand: contiguous as its threads hold neighbours, if the loading instruction
        can transpose, and otherwise contiguous along k."""
        dtype = tile_type(value).dtype
        by_rows = k_last
        if dtype.bytes == 2:
            layout = self.homes.of(value)
            inner = next((bit for bit in (*layout.registers, *layout.lanes) if bit != REPLICATED), 0)
            by_rows = inner < columns
        return shared_tile(rows, columns, batch, dtype.bytes, by_rows=by_rows)

    def by_warpgroups(self, op: Op, plan: WarpgroupPlan, sums: str) -> None:
        a, b = op.operands[:2]
        sizes = plan.sizes
        left, right = self.shared_operand(op, 0), self.shared_operand(op, 1)
        assert right is not None
        across = (left is not None and not left.by_rows, right.by_rows)
        multiply = self._function(plan, left is None, across)
        m, n, k = 1 << len(plan.m_tiles), 1 << len(plan.n_tiles), 1 << len(plan.k_steps)
        lines, reads = ["{"], []
        # Bits of the operands' numbers: (k, m) and (n, k), the lowest first.
        rows, columns = range(sizes.k, sizes.k + sizes.m), range(sizes.n)
        if left is None:
            held, each = self.get(a, plan.left), _WORD // plan.dtype.bytes
            count = m * k << sizes.batch
            lines.append(f"unsigned a[{count}][4];")
            lines += ["#pragma unroll", f"for (int e = 0; e < {4 * count}; ++e)"]
            lines.append(f"  a[e / 4][e % 4] = in_register({held} + {each} * e);")
            first = f"a[k + {k} * (i + {m} * z)]"
        else:
            buffer = self._operand(a, left)
            reads.append(buffer)
            warps = [rows[bit] if bit != REPLICATED else REPLICATED for bit in plan.m_warps]
            lines.append(f"const u64 a = {self._descriptor(left, buffer, warps)};")
            first = self._further(
                "a", left, plan.k_steps, "i", [rows[bit] for bit in plan.m_tiles], sizes.batch
            )
        buffer = self._operand(b, right)
        reads.append(buffer)
        lines.append(f"const u64 b = {self._descriptor(right, buffer, plan.n_warps)};")
        steps = [sizes.n + bit for bit in plan.k_steps]
        second = self._further("b", right, steps, "j", [columns[bit] for bit in plan.n_tiles], sizes.batch)
        size = plan.multiply(False).fragments[0].size
        into = f"{sums} + {size} * (j + {n} * (i + {m} * z))"
        loops = [(("z", 1 << sizes.batch)), ("i", m), ("j", n), ("k", k)]
        lines.append("begin_multiplications();")
        for variable, count in loops:
            lines += ["#pragma unroll", f"for (int {variable} = 0; {variable} < {count}; ++{variable})"]
        lines += [f"  {multiply}({into}, {first}, {second}, 1);", "commit_multiplications();", "}"]
        self.step(lines, reads=tuple(reads))
        flies = op in self.in_flight
        if flies:
            self.in_flight[op] = (sums, plan.accumulators.size)
            self.step(["await_multiplications_but_one();"])
        if self.pending is not None:
            run, self.pending = self.pending, None
            run()
        if flies:
            return
        # The step still reads the operands: whoever writes there later comes behind it.
        self.step([f"{self.wait_for_multiplications(plan.accumulators.size)}({sums});"], reads=tuple(reads))

    def _operand(self, value: Value, tile: SharedTile) -> SharedBuffer:
        return self.in_shared(value, tile.masks, "an operand of dot", after=FENCE, alignment=ATOM_BYTES)

    def _descriptor(self, tile: SharedTile, buffer: SharedBuffer, warps: Sequence[int]) -> str:
        """The matrix descriptor of the first element for the thread's warpgroup."""
        masks = [0 if bit == REPLICATED or n < 2 else tile.masks[bit] for n, bit in enumerate(warps)]
        own = of_bits("warp", masks)
        self.uses_warp = True
        constant = matrix_descriptor(tile.row_bytes, tile.panel_bytes)
        return f"matrix_descriptor({self.address(buffer)}{f' + {own}' if own != '0' else ''}, {constant}ull)"

    uses_warp = False

    @staticmethod
    def _further(
        name: str, tile: SharedTile, steps: Sequence[int], variable: str, tiles: Sequence[int], batch: int
    ) -> str:
        """The descriptor of step k of a tile. Its address is the operand's address plus bits that the swizzle does not
        affect."""
        masks = tile.masks
        parts = [
            of_bits("k", [masks[bit] // 16 for bit in steps]),
            of_bits(variable, [masks[bit] // 16 for bit in tiles]),
            of_bits("z", [mask // 16 for mask in masks[len(masks) - batch :]] if batch else []),
        ]
        return " + ".join([name, *(part for part in parts if part != "0")])

    def _function(self, plan: WarpgroupPlan, held: bool, across: tuple[bool, bool]) -> str:
        intrinsic = plan.multiply(held)
        short = intrinsic.name.removeprefix("wgmma.mma_async.sync.aligned.").replace(".", "_")
        suffix = "".join(
            name for name, on in zip(("_registers", "_a", "_b"), (held, *across), strict=True) if on
        )
        name = f"multiply_{short}{suffix}"
        if name not in self.functions:
            self.functions[name] = function_text(intrinsic, name, across=across)
        return name

    def wait_for_multiplications(self, count: int) -> str:
        name = f"await_multiplications_{count}"
        if name not in self.functions:
            self.functions[name] = wait_text(count, name)
        return name
