"""Operations along an axis: reductions, cumsum, sort, flip and split.

A step combines elements whose numbers differ in one bit of the axis: two registers of a thread, registers of two lanes
(a shuffle), or of two warps (through shared memory).
"""

from __future__ import annotations

from tilewright.codegen.cuda.scalars import conversion
from tilewright.codegen.cuda.tiles.assign import shape_of
from tilewright.codegen.cuda.tiles.memory import Memory
from tilewright.codegen.cuda.tiles.text import THREAD, element_type, loop, of_bits
from tilewright.codegen.cuda.tiles.values import tile_type
from tilewright.dtypes import DType
from tilewright.tile.ir import Op, Value
from tilewright.tile.ops import sum_type
from tilewright.tile.passes.layouts import LANES, REPLICATED, Layout, axis_bits, bits_of, reduced_bits


class Along(Memory):
    # -- reductions --------------------------------------------------------------------------------------------------

    def reduce(self, op: Op, value: Value) -> str:
        source, kind = op.operands[0], op.settings["kind"]
        shape, dtype = shape_of(source), tile_type(source).dtype
        axis = op.settings["axis"] % len(shape)
        layout = self.homes.of(source)
        held = self.get(source, layout)
        wide = (sum_type(dtype) if kind == "sum" else dtype).compute
        bits = list(axis_bits(shape, axis))
        chosen = kind.startswith("arg")
        kept = layout.mapped(reduced_bits(shape, axis))
        best, declared = self.array(wide, kept.size)
        index, also = self.array(DType.I32, kept.size)
        lines = [declared, also] if chosen else [declared]
        names = [best, index] if chosen else [best]
        # In registers.
        outer = [1 << n for n, bit in enumerate(layout.registers) if bit not in bits]
        inner = [1 << n for n, bit in enumerate(layout.registers) if bit in bits]
        register = f"{of_bits('q', outer)} + {of_bits('a', inner)}"
        item = conversion(f"{held}[r]", dtype, wide)
        body = ["#pragma unroll", f"for (int q = 0; q < {kept.size}; ++q) {{", "#pragma unroll"]
        body += [f"  for (int a = 0; a < {1 << len(inner)}; ++a) {{", f"    const int r = {register};"]
        body += [f"    const {element_type(wide)} x = {item};"]
        if chosen:
            where = self.coordinate(layout, bits).replace("@", "r")
            body.append(f"    const i32 i = {where};")
        body.append(f"    if (a == 0) {{ {best}[q] = x;{f' {index}[q] = i;' if chosen else ''} }}")
        body += [f"    else {self._combined(kind, wide, names, 'q', 'x', 'i')}", "  }", "}"]
        self.step([*lines, *body])
        # Over lanes, then over warps.
        for lane, bit in enumerate(layout.lanes):
            if bit in bits:
                self._over_lanes(kind, wide, names, kept.size, 1 << lane)
        warps = [n for n, bit in enumerate(layout.warps) if bit in bits]
        if warps:
            self._over_warps(kind, wide, names, kept, warps, bits_of(shape_of(value)))
        target = tile_type(value).dtype
        if chosen:
            found = index
        elif target is not wide:
            found, declared = self.array(target, kept.size)
            text = conversion(f"{best}[r]", wide, target)
            self.step([declared, *loop("r", kept.size, f"{found}[r] = {text};")])
        else:
            found = best
        return found if shape_of(value) else f"{found}[0]"

    def _combined(self, kind: str, wide: DType, names: list[str], at: str, x: str, i: str) -> str:
        best = f"{names[0]}[{at}]"
        if kind.startswith("arg"):
            index = f"{names[1]}[{at}]"
            over = "over_max" if kind == "argmax" else "over_min"
            return f"if ({over}({x}, {i}, {best}, {index})) {{ {best} = {x}; {index} = {i}; }}"
        function = "add" if kind == "sum" else kind
        return f"{best} = {self.function(function, wide, [best, x])};"

    def _over_lanes(self, kind: str, wide: DType, names: list[str], count: int, distance: int) -> None:
        lines = ["#pragma unroll", f"for (int q = 0; q < {count}; ++q) {{"]
        lines.append(f"  const {element_type(wide)} x = other_lane({names[0]}[q], {distance});")
        if len(names) > 1:
            lines.append(f"  const i32 i = other_lane({names[1]}[q], {distance});")
        self.step([*lines, f"  {self._combined(kind, wide, names, 'q', 'x', 'i')}", "}"])

    def _over_warps(
        self, kind: str, wide: DType, names: list[str], kept: Layout, warps: list[int], bits: int
    ) -> None:
        """Combine the warps' partial results: each writes its own once, and all threads read all of them."""
        types = [wide, DType.I32][: len(names)]
        own = sum(1 << (LANES + warp) for warp in warps)
        owner = kept.replicated & ~own
        buffers = []
        for name, dtype in zip(names, types, strict=True):
            buffer = self.buffer((dtype.bytes << bits) << len(warps), "a reduction over warps")
            masks = [0 if bit == REPLICATED else dtype.bytes << bit for bit in kept.threads]
            for n, warp in enumerate(warps):
                masks[LANES + warp] = (dtype.bytes << bits) << n
            location = (
                f"{self.address(buffer)} + ({of_bits(THREAD, masks)} ^ {self._registers(kept, dtype, 'q')})"
            )
            line = f"for (int q = 0; q < {kept.size}; ++q) put_shared<1>({location}, {name} + q);"
            lines = ["#pragma unroll", line]
            self.step(
                [f"if (({THREAD} & {owner}) == 0) {{", *lines, "}"] if owner else lines, writes=(buffer,)
            )
            buffers.append(buffer)
        lines = ["#pragma unroll", f"for (int q = 0; q < {kept.size}; ++q) {{", "#pragma unroll"]
        lines.append(f"  for (int w = 0; w < {1 << len(warps)}; ++w) {{")
        for variable, dtype, buffer in zip("xi", types, buffers, strict=False):
            masks = [0 if bit == REPLICATED else dtype.bytes << bit for bit in kept.threads]
            location = f"({of_bits(THREAD, masks)} ^ {self._registers(kept, dtype, 'q')})"
            lines.append(f"    {element_type(dtype)} {variable};")
            lines.append(
                f"    get_shared<1>(&{variable}, {self.address(buffer)} + {location} + w * {dtype.bytes << bits});"
            )
        first = f"{names[0]}[q] = x;" + (f" {names[1]}[q] = i;" if len(names) > 1 else "")
        lines += [
            f"    if (w == 0) {{ {first} }}",
            f"    else {self._combined(kind, wide, names, 'q', 'x', 'i')}",
        ]
        self.step([*lines, "  }", "}"], reads=tuple(buffers))

    @staticmethod
    def _registers(layout: Layout, dtype: DType, variable: str) -> str:
        return of_bits(variable, [dtype.bytes << bit for bit in layout.registers])

    # -- cumsum and sort ---------------------------------------------------------------------------------------------

    def cumsum(self, op: Op, value: Value, layout: Layout) -> str:
        """A scan, one bit of the axis at a time: an element whose bit is set adds the sum of all elements whose bit is
        not set."""
        source = op.operands[0]
        dtype, into = tile_type(source).dtype, tile_type(value).dtype
        wide = into.compute
        held, count = self.get(source, layout), layout.size
        sums, declared = self.array(wide, count)
        totals, also = self.array(wide, count)
        item = conversion(f"{held}[r]", dtype, wide)
        self.step([declared, also, *loop("r", count, f"{sums}[r] = {totals}[r] = {item};")])
        shape = shape_of(source)
        for bit in axis_bits(shape, op.settings["axis"] % len(shape)):
            if bit in layout.registers:
                step = 1 << layout.registers.index(bit)
                body = [
                    f"  if (r & {step}) continue;",
                    f"  const {element_type(wide)} x = {totals}[r], y = {totals}[r + {step}];",
                    f"  {sums}[r + {step}] = {self.function('add', wide, [f'{sums}[r + {step}]', 'x'])};",
                    f"  {totals}[r] = {totals}[r + {step}] = {self.function('add', wide, ['x', 'y'])};",
                ]
                self.step(["#pragma unroll", f"for (int r = 0; r < {count}; ++r) {{", *body, "}"])
                continue
            thread = layout.threads.index(bit)
            other = self._other_thread(totals, wide, count, thread)
            more = self.function("add", wide, [f"{sums}[r]", f"{other}[r]"])
            both = self.function("add", wide, [f"{totals}[r]", f"{other}[r]"])
            body = [f"  if ({THREAD} >> {thread} & 1) {sums}[r] = {more};", f"  {totals}[r] = {both};"]
            self.step(["#pragma unroll", f"for (int r = 0; r < {count}; ++r) {{", *body, "}"])
        if into is wide:
            return sums
        made, declared = self.array(into, count)
        self.step([declared, *loop("r", count, f"{made}[r] = {conversion(f'{sums}[r]', wide, into)};")])
        return made

    def _other_thread(self, held: str, dtype: DType, count: int, thread: int) -> str:
        """The registers of the thread whose number differs in one bit."""
        if thread >= LANES:
            return self.exchanged(held, dtype, count, thread - LANES)
        name, declared = self.array(dtype, count)
        self.step([declared, *loop("r", count, f"{name}[r] = other_lane({held}[r], {1 << thread});")])
        return name

    def sort(self, op: Op, value: Value, layout: Layout) -> str:
        """A bitonic network: each step orders pairs of elements whose indices differ in one bit of the axis."""
        source = op.operands[0]
        shape, dtype, count = shape_of(source), tile_type(source).dtype, layout.size
        held = self.get(source, layout)
        made, declared = self.array(dtype, count)
        self.step([declared, *loop("r", count, f"{made}[r] = {held}[r];")])
        bits = list(axis_bits(shape, op.settings["axis"] % len(shape)))
        down = bool(op.settings["descending"])
        for level in range(1, len(bits) + 1):
            for distance in reversed(range(level)):
                self._sort_step(made, dtype, layout, bits, level, distance, down)
        return made

    def _sort_step(
        self, made: str, dtype: DType, layout: Layout, bits: list[int], level: int, distance: int, down: bool
    ) -> None:
        count, bit, element = layout.size, bits[distance], element_type(dtype)
        # Blocks of 2**level elements are sorted alternately up and down.
        falls = (
            self.coordinate(layout, bits[level : level + 1]).replace("@", "r") if level < len(bits) else "0"
        )
        up = f"(({falls}) == {int(down)})"
        if bit in layout.registers:
            step = 1 << layout.registers.index(bit)
            body = [
                f"  if (r & {step}) continue;",
                f"  const {element} x = {made}[r], y = {made}[r + {step}];",
                f"  const bool swap = {up} ? sorts_before(y, x) : sorts_before(x, y);",
                f"  {made}[r] = swap ? y : x;",
                f"  {made}[r + {step}] = swap ? x : y;",
            ]
            self.step(["#pragma unroll", f"for (int r = 0; r < {count}; ++r) {{", *body, "}"])
            return
        thread = layout.threads.index(bit)
        other = self._other_thread(made, dtype, count, thread)
        body = [
            f"  const bool upper = {THREAD} >> {thread} & 1;",
            f"  const {element} x = upper ? {other}[r] : {made}[r], y = upper ? {made}[r] : {other}[r];",
            f"  if ({up} ? sorts_before(y, x) : sorts_before(x, y)) {made}[r] = {other}[r];",
        ]
        self.step(["#pragma unroll", f"for (int r = 0; r < {count}; ++r) {{", *body, "}"])

    # -- flip and split ----------------------------------------------------------------------------------------------

    def flip(self, op: Op, value: Value, layout: Layout) -> str:
        """Exchange elements whose indices differ in all bits of the axis."""
        source = op.operands[0]
        shape, dtype, count = shape_of(source), tile_type(source).dtype, layout.size
        bits = list(axis_bits(shape, op.settings["axis"] % len(shape)))
        held = self.get(source, layout)
        for thread, bit in enumerate(layout.threads):
            if bit in bits:
                held = self._other_thread(held, dtype, count, thread)
        mask = sum(1 << n for n, bit in enumerate(layout.registers) if bit in bits)
        made, declared = self.array(dtype, count)
        self.step([declared, *loop("r", count, f"{made}[r] = {held}[r ^ {mask}];")])
        return made

    def split(self, op: Op, value: Value) -> str:
        """Every other element: the lowest bit of the source's element index becomes a register bit."""
        source, index = op.operands[0], op.settings["index"]
        dtype = tile_type(value).dtype
        layout = self.homes.of(value)

        def up(bits: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(bit if bit == REPLICATED else bit + 1 for bit in bits)

        wanted = Layout((0, *up(layout.registers)), up(layout.lanes), up(layout.warps))
        held = self.get(source, wanted)
        made, declared = self.array(dtype, layout.size)
        self.step([declared, *loop("r", layout.size, f"{made}[r] = {held}[2 * r + {index}];")])
        return made if shape_of(value) else f"{made}[0]"


__all__ = ["Along"]
