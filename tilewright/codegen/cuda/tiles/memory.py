"""Loads, stores and atomics: addresses and masks by register, several neighbours in one access."""

from __future__ import annotations

from tilewright.codegen.cuda.tiles.assign import shape_of
from tilewright.codegen.cuda.tiles.moves import Moves
from tilewright.codegen.cuda.tiles.text import THREAD, element_type
from tilewright.codegen.cuda.tiles.values import tile_type
from tilewright.tile.atomics import mask_of
from tilewright.tile.ir import BlockPointerType, Op, Value
from tilewright.tile.passes.coalesce import SECTOR_BYTES, access_elements, run_bytes
from tilewright.tile.passes.layouts import Layout, axis_bits, bits_of
from tilewright.tile.passes.shared_memory import GlobalAccess


class Memory(Moves):
    def resource(self, op: Op, layout: Layout) -> GlobalAccess:
        pointer = op.operands[0]
        origins = self.origins.get(pointer, ())
        tensors = frozenset(param.name for param in origins if tile_type(param).is_pointer)
        return GlobalAccess(tensors, (pointer, layout))

    def _addresses(self, op: Op, layout: Layout) -> tuple[str, str | None]:
        """Arrays of pointers and of masks; scalars for a scalar access."""
        pointer = op.operands[0]
        if isinstance(pointer.type, BlockPointerType):
            return self._block_addresses(op, layout)
        mask = mask_of(op)
        return self.get(pointer, layout), None if mask is None else self.get(mask, layout)

    def _block_addresses(self, op: Op, layout: Layout) -> tuple[str, str | None]:
        kind, held = op.operands[0].type, self.blocks[op.operands[0]]
        assert isinstance(kind, BlockPointerType)
        check = {axis % len(kind.block) for axis in op.settings["check"]}
        pointers, masks = self.name(), self.name()
        element = element_type(kind.dtype)
        lines = [f"{element}* {pointers}[{layout.size}];"]
        lines += [f"bool {masks}[{layout.size}];"] if check else []
        sums, inside = [held.base], []
        body = [f"for (int r = 0; r < {layout.size}; ++r) {{"]
        for axis in range(len(kind.block)):
            name = self.name("n")
            index = self.coordinate(layout, axis_bits(kind.block, axis)).replace("@", "r")
            body.append(f"  const i64 {name} = {held.offsets[axis]} + ({index});")
            sums.append(f"{name} * {held.strides[axis]}")
            if axis in check:
                inside.append(f"{name} >= 0 && {name} < {held.shape[axis]}")
        body.append(f"  {pointers}[r] = {' + '.join(sums)};")
        if check:
            body.append(f"  {masks}[r] = {' && '.join(inside)};")
        self.step([*lines, "#pragma unroll", *body, "}"])
        return pointers, masks if check else None

    def load(self, op: Op, value: Value, layout: Layout) -> str:
        kind = tile_type(value)
        pointers, masks = self._addresses(op, layout)
        element = element_type(kind.dtype)
        other = self._other(op, value, layout)
        if not kind.shape:
            name = self.name()
            found = f"*{pointers}" if masks is None else f"{masks} ? *{pointers} : {other}"
            self.step([f"const {element} {name} = {found};"], reads=(self.resource(op, layout),))
            return name
        info, constancy = self.homes.pointers(op)
        width = access_elements(layout, kind.shape, info, constancy, kind.dtype.bytes)
        name, declared = self.array(kind.dtype, layout.size)
        lines = [declared, "#pragma unroll", f"for (int r = 0; r < {layout.size}; r += {width}) {{"]
        read = f"get_global<{width}>({name} + r, {pointers}[r]);"
        if masks is None:
            lines += [f"  {read}", "}"]
        else:
            rest = f"for (int e = 0; e < {width}; ++e) {name}[r + e] = {other.replace('@', 'r + e')};"
            lines += [
                f"  if ({masks}[r]) {{",
                f"    {read}",
                "  } else {",
                "#pragma unroll",
                f"    {rest}",
                "  }",
                "}",
            ]
        self.step(lines, reads=(self.resource(op, layout),))
        return name

    def _other(self, op: Op, value: Value, layout: Layout) -> str:
        """The value of a masked element in register @."""
        if op.name == "load" and len(op.operands) == 3:
            return self.at(op.operands[2], layout, "@")
        if op.name == "load_block" and op.settings["padding"] == "nan":
            kind = tile_type(value).dtype
            nan = "__int_as_float(0x7fffffff)"
            return f"narrow<{kind.short}>({nan})" if kind.is_half else f"({kind.short}){nan}"
        return f"{element_type(tile_type(value).dtype)}()"

    def store(self, op: Op) -> None:
        value = op.operands[1]
        kind = tile_type(value)
        layout = self._store_layout(op, value)
        held = self.get(value, layout)
        pointers, masks = self._addresses(op, layout)
        owner = f"({THREAD} & {layout.replicated}) == 0" if layout.replicated else ""
        resource = self.resource(op, layout)
        if not kind.shape:
            conditions = [each for each in (owner, masks) if each]
            self.step([f"if ({' && '.join(conditions)}) *{pointers} = {held};"], writes=(resource,))
            return
        info, constancy = self.homes.pointers(op)
        width = access_elements(layout, kind.shape, info, constancy, kind.dtype.bytes)
        guards = [each for each in (owner, masks and f"{masks}[r]") if each]
        write = f"put_global<{width}>({pointers}[r], {held} + r);"
        line = f"if ({' && '.join(guards)}) {write}" if guards else write
        head = f"for (int r = 0; r < {layout.size}; r += {width})"
        self.step(["#pragma unroll", f"{head} {line}"], writes=(resource,))

    def _store_layout(self, op: Op, value: Value) -> Layout:
        """The layout in which a value is stored: its own, if a warp's instruction then writes whole sectors; otherwise
        the coalesced one."""
        if not shape_of(value):
            return self.homes.uniform
        best = self.homes.access(op)
        home = self.homes.home.get(value)
        if home is None or home == best:
            return best
        shape, size = shape_of(value), tile_type(value).dtype.bytes
        if size << bits_of(shape) > self.machine.shared_block // 2:
            return home  # a change of layout would take most of shared memory
        info, constancy = self.homes.pointers(op)
        runs = [
            run_bytes(each, shape, info, size, access_elements(each, shape, info, constancy, size))
            for each in (home, best)
        ]
        return home if runs[0] >= min(SECTOR_BYTES, runs[1]) else best

    def atomic(self, op: Op, value: Value, layout: Layout) -> str:
        kind = tile_type(value)
        pointers, masks = self._addresses(op, layout)
        change = op.name.removeprefix("atomic_")
        held = [self.get(each, layout) for each in op.operands[1 : 3 if change == "cas" else 2]]
        owner = f"({THREAD} & {layout.replicated}) == 0" if layout.replicated else ""
        resource = self.resource(op, layout)
        name, declared = self.array(kind.dtype, layout.size)
        index = "[r]" if kind.shape else ""
        guards = " && ".join(each for each in (owner, masks and f"{masks}{index}") if each)
        given = ", ".join(f"{each}{index}" for each in (pointers, *held))
        step = f"{name}[r] = {change}_atomically({given});"
        self.step(
            [
                declared,
                "#pragma unroll",
                f"for (int r = 0; r < {layout.size}; ++r) {{",
                f"  {name}[r] = {element_type(kind.dtype)}();",
                f"  if ({guards}) {step}" if guards else f"  {step}",
                "}",
            ],
            writes=(resource,),
        )
        if layout.replicated and (self.homes.users.get(value) or value in self.homes.region_uses):
            name = self.through_shared(name, kind.element, bits_of(kind.shape), layout, layout)
        return name if kind.shape else f"{name}[0]"
