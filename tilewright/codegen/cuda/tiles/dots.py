"""`dot`: operands from shared memory, or from registers that hold them as the instruction takes them."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.codegen.cuda.scalars import conversion
from tilewright.codegen.cuda.tiles.assign import VIEWS, shape_of
from tilewright.codegen.cuda.tiles.contraction import FmaPlan, SharedTile, TensorPlan, WarpgroupPlan
from tilewright.codegen.cuda.tiles.moves import vector_width
from tilewright.codegen.cuda.tiles.text import THREAD, element_type, loop, of_bits
from tilewright.codegen.cuda.tiles.values import tile_type
from tilewright.codegen.cuda.tiles.warpgroups import Warpgroups
from tilewright.dtypes import DType
from tilewright.hw import tensor_cores
from tilewright.hw.intrinsics import Intrinsic, PtxAssembly
from tilewright.tile.ir import Op, Value
from tilewright.tile.passes.layouts import LANES, REPLICATED, Layout
from tilewright.tile.passes.shared_memory import SharedBuffer

_WORD = 4  # bytes of a register


class Dots(Warpgroups):
    def dot(self, op: Op, value: Value) -> str:
        plan = self.homes.plans[op]
        kind, layout = tile_type(value), plan.accumulators
        found = self._given_up(op, layout)
        if found is None:
            name, declared = self.array(kind.dtype, layout.size)
            first = self.at(op.operands[2], layout, "r") if len(op.operands) == 3 else "0"
            self.step([declared, *loop("r", layout.size, f"{name}[r] = {first};")])
        else:
            name = found
        if isinstance(plan, FmaPlan):
            self._by_fma(op, plan, name)
        elif isinstance(plan, WarpgroupPlan):
            self.by_warpgroups(op, plan, name)
        else:
            self._by_tensor_cores(op, plan, name)
        return name

    def _given_up(self, op: Op, layout: Layout) -> str | None:
        """The registers of the accumulator operand if it has no other use: the sums stay in them. The operand must be
        computed in, or carried into, the block of the dot; in a loop further inside, it would be changed repeatedly."""
        if len(op.operands) < 3:
            return None
        start = op.operands[2]
        defined = self.homes.definitions.get(start)
        if defined is not None and (defined.name in VIEWS or self.homes.is_cheap(start)):
            return None  # it may have the name of something else
        if len(self.homes.users.get(start, ())) > 1 or start in self.homes.region_uses:
            return None
        return self.scope.names.get((start, layout))

    # -- tensor cores ------------------------------------------------------------------------------------------------

    def _by_tensor_cores(self, op: Op, plan: TensorPlan, sums: str) -> None:
        a, b = op.operands[:2]
        sizes, dtype = plan.sizes, tile_type(a).dtype
        m_tiles, n_tiles, k_steps = plan.m_tiles, plan.n_tiles, list(plan.k_steps)
        multiply = self._multiply(plan.multiply)
        count = (1 << len(m_tiles), 1 << len(n_tiles), 1 << len(k_steps), 1 << sizes.batch)
        reads: list[SharedBuffer] = []
        # The first operand.
        tile = self.shared_operand(op, 0)
        if tile is None:
            held, each = self.get(a, plan.left), _WORD // dtype.bytes
            words = 4 * each
            index = f"{words} * (k + {count[2]} * (i + {count[0]} * z))"
            through = plan.multiply.emit.through if isinstance(plan.multiply.emit, PtxAssembly) else ""
            word = f"in_register({held} + {index} + {each} * e)"
            left = [
                "#pragma unroll",
                f"for (int i = 0; i < {count[0]}; ++i)",
                *loop("e", 4, f"a[i][e] = {f'{through}({word})' if through else word};"),
            ]
        else:
            buffer = self.in_shared(a, tile.masks, "an operand of dot")
            reads.append(buffer)
            low, high = list(range(sizes.k)), list(range(sizes.k, sizes.k + sizes.m))
            lanes = _matrix_lanes(high, low, plan.depth, transposed=not tile.by_rows, left=True)
            thread = _thread(tile, lanes, [high[m] if m != REPLICATED else REPLICATED for m in plan.m_warps])
            at = self._at(
                tile, thread, buffer, [low[k] for k in k_steps], "i", [high[m] for m in m_tiles], sizes.batch
            )
            load = self._matrices(4, dtype, not tile.by_rows)
            left = ["#pragma unroll", f"for (int i = 0; i < {count[0]}; ++i) {load}(a[i], {at});"]
        # The second: two neighbouring fragments at once where there are two.
        tile = self.shared_operand(op, 1)
        assert tile is not None
        buffer = self.in_shared(b, tile.masks, "an operand of dot")
        reads.append(buffer)
        low, high = list(range(sizes.n)), list(range(sizes.n, sizes.n + sizes.k))
        both = 3 in n_tiles
        lanes = _matrix_lanes(low, high, plan.depth, transposed=tile.by_rows, left=False)
        if not both:
            lanes[4] = REPLICATED
        thread = _thread(tile, lanes, plan.n_warps)
        at = self._at(
            tile, thread, buffer, [high[k] for k in k_steps], "j", [low[n] for n in n_tiles], sizes.batch
        )
        load = self._matrices(4 if both else 2, dtype, tile.by_rows)
        right = [
            "#pragma unroll",
            f"for (int j = 0; j < {count[1]}; j += {2 if both else 1}) {load}(b[j], {at});",
        ]
        lines = [
            "#pragma unroll",
            f"for (int z = 0; z < {count[3]}; ++z)",
            "#pragma unroll",
            f"for (int k = 0; k < {count[2]}; ++k) {{",
            f"unsigned a[{count[0]}][4], b[{count[1]}][2];",
            *left,
            *right,
            "#pragma unroll",
            f"for (int i = 0; i < {count[0]}; ++i)",
            *loop(
                "j",
                count[1],
                f"{multiply}({sums} + 4 * (j + {count[1]} * (i + {count[0]} * z)), a[i], b[j]);",
            ),
            "}",
        ]
        self.step(lines, reads=tuple(reads))

    def _at(
        self,
        tile: SharedTile,
        thread: str,
        buffer: SharedBuffer,
        steps: Sequence[int],
        variable: str,
        tiles: Sequence[int],
        batch: int,
    ) -> str:
        masks = tile.masks
        batches = masks[len(masks) - batch :] if batch else ()
        parts = [
            thread,
            of_bits("k", [masks[bit] for bit in steps]),
            of_bits(variable, [masks[bit] for bit in tiles]),
            of_bits("z", batches),
        ]
        return f"{self.address(buffer)} + ({' ^ '.join(part for part in parts if part != '0') or '0'})"

    # -- instructions ------------------------------------------------------------------------------------------------

    def _multiply(self, intrinsic: Intrinsic) -> str:
        """A function that wraps a matrix instruction; its operands are c, a, b."""
        assert isinstance(intrinsic.emit, PtxAssembly)
        name = f"multiply_{tensor_cores_name(intrinsic)}"
        if name not in self.functions:
            sums, a, b = intrinsic.fragments
            letter = "f" if sums.tensor.dtype.is_float else "r"
            counts = [fragment.size * fragment.tensor.dtype.bytes // _WORD for fragment in (sums, a, b)]
            numbers = iter(range(sum(counts)))
            groups = [", ".join(f"%{next(numbers)}" for _ in range(count)) for count in counts]
            text = f"{intrinsic.emit.mnemonic} {{{groups[0]}}}, {{{groups[1]}}}, {{{groups[2]}}}, {{{groups[0]}}};"
            outputs = ", ".join(f'"+{letter}"(c[{n}])' for n in range(counts[0]))
            inputs = ", ".join(
                f'"r"({operand}[{n}])'
                for operand, count in zip("ab", counts[1:], strict=True)
                for n in range(count)
            )
            kind = element_type(sums.tensor.dtype)
            self.functions[name] = (
                f"__device__ inline void {name}({kind}* c, const unsigned* a, const unsigned* b) {{\n"
                f'  asm volatile("{text}" : {outputs} : {inputs});\n}}'
            )
        return name

    def _matrices(self, count: int, dtype: DType, transposed: bool) -> str:
        """A function that wraps a load of matrices from shared memory (ldmatrix)."""
        intrinsic = tensor_cores.load_matrices(count, dtype, transposed)
        assert isinstance(intrinsic.emit, PtxAssembly)
        shorten = dtype is DType.F32
        name = f"load_matrices_{count}{'_transposed' * transposed}{'_shortened' * shorten}"
        if name not in self.functions:
            registers = ", ".join(f"%{n}" for n in range(count))
            outputs = ", ".join(f'"=r"(into[{n}])' for n in range(count))
            after = f"\n  for (int e = 0; e < {count}; ++e) into[e] = shortened(into[e]);" if shorten else ""
            self.functions[name] = (
                f"__device__ inline void {name}(unsigned* into, unsigned from) {{\n"
                f'  asm volatile("{intrinsic.emit.mnemonic} {{{registers}}}, [%{count}];" : {outputs} : "r"(from)'
                f' : "memory");{after}\n}}'
            )
        return name

    # -- FMAs --------------------------------------------------------------------------------------------------------

    def _by_fma(self, op: Op, plan: FmaPlan, sums: str) -> None:
        """Multiply by FMAs, one k after another: a thread's rows of the first operand with its columns of the
        second."""
        a, b = op.operands[:2]
        sizes, layout = plan.sizes, plan.accumulators
        dtype, wide = tile_type(a).dtype, tile_type(op.results[0]).dtype
        size = dtype.bytes
        n, m, batch = sizes.n, sizes.m, sizes.batch
        tiles = [self.shared_operand(op, number) for number in (0, 1)]
        masks = [tile.masks for tile in tiles if tile is not None]
        buffers = [
            self.in_shared(value, mask, "an operand of dot")
            for value, mask in zip((a, b), masks, strict=True)
        ]
        # Bits of the result's number: columns, rows, batch; of the operands': k in the row or in the column.
        left = {bit: bit - n + sizes.k for bit in range(n, n + m + batch)}
        right = {**{bit: bit for bit in range(n)}, **{n + m + z: n + sizes.k + z for z in range(batch)}}
        lines, reads = [], []
        for operand, bits, mask, buffer in (
            ("a", left, masks[0], buffers[0]),
            ("b", right, masks[1], buffers[1]),
        ):
            part = layout.mapped(bits)
            width = vector_width(part, mask, size)
            thread = of_bits(THREAD, [0 if bit == REPLICATED else mask[bit] for bit in part.threads])
            register = of_bits("r", [mask[bit] for bit in part.registers])
            stride = size if operand == "a" else size << n
            location = f"{self.address(buffer)} + ({thread} ^ {register}) + k * {stride}"
            lines.append(f"{element_type(dtype)} {operand}[{part.size}];")
            lines += ["#pragma unroll", f"for (int r = 0; r < {part.size}; r += {width})"]
            lines.append(f"  get_shared<{width}>({operand} + r, {location});")
            reads.append(f"{operand}[{self._kept(layout, bits)}]")
        items = [self._widened(read, dtype, wide, op) for read in reads]
        if wide.is_float:
            product = self.function("fma", wide, [*items, f"{sums}[r]"])
        else:
            product = self.function("add", wide, [f"{sums}[r]", f"({items[0]} * {items[1]})"])
        body = loop("r", layout.size, f"{sums}[r] = {product};")
        self.step([f"for (int k = 0; k < {1 << sizes.k}; ++k) {{", *lines, *body, "}"], reads=tuple(buffers))

    @staticmethod
    def _kept(layout: Layout, bits: dict[int, int]) -> str:
        kept = layout.kept_registers(bits)
        masks = [0] * len(layout.registers)
        for number, position in enumerate(kept):
            masks[position] = 1 << number
        return of_bits("r", masks)

    @staticmethod
    def _widened(text: str, dtype: DType, wide: DType, op: Op) -> str:
        if dtype is DType.F32 and op.settings["precision"] == "tf32":
            return f"__uint_as_float(to_tf32({text}))"
        return text if dtype is wide else conversion(text, dtype, wide)


def tensor_cores_name(intrinsic: Intrinsic) -> str:
    return intrinsic.name.removeprefix("mma.sync.aligned.").replace(".", "_")


def _matrix_lanes(
    outer: Sequence[int], k: Sequence[int], depth: int, *, transposed: bool, left: bool
) -> list[int]:
    """Maps each lane bit to the element bit of the row whose address that lane supplies (ldmatrix). The first operand's
    matrices are ordered by rows, then k; the second's by k, then rows. Rows of transposed matrices run along k."""
    later = k[depth - 1]  # the second half of k of an instruction
    rows = [k[n] for n in range(3)] if transposed else [outer[n] for n in range(3)]
    down = outer[3] if len(outer) > 3 else REPLICATED
    return [*rows, down, later] if left else [*rows, later, down]


def _thread(tile: SharedTile, lanes: Sequence[int], warps: Sequence[int]) -> str:
    masks = [0 if bit == REPLICATED else tile.masks[bit] for bit in (*lanes, *warps)]
    assert len(lanes) == LANES
    return of_bits(THREAD, masks)


__all__ = ["Dots", "shape_of"]
