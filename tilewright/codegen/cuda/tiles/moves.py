"""Tiles on the move: between layouts, and to and from shared memory.

An address in shared memory is the exclusive or of masks, one for each bit of the element's number that is set. A
thread's part of it is computed once, a register's part is a constant.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.codegen.cuda.tiles.assign import shape_of
from tilewright.codegen.cuda.tiles.text import THREAD, element_bytes, element_type, of_bits
from tilewright.codegen.cuda.tiles.values import Element, Values, tile_type
from tilewright.tile.ir import Value
from tilewright.tile.passes.layouts import REPLICATED, Layout, bits_of
from tilewright.tile.passes.shared_memory import SharedBuffer

_ACCESS_BYTES = 16
_BANK_BITS = (2, 7)  # of an address in bytes: which bank
_SELECTED = 3  # bits of a register's number that may depend on the thread, by selection


class Moves(Values):
    def convert(self, value: Value, home: Layout, layout: Layout) -> str:
        held = self.known(value, home)
        assert held is not None
        element = tile_type(value).element
        chosen = [bit for bit in home.registers if bit in layout.threads]
        if home.holds(layout) and len(chosen) <= _SELECTED:
            return self.filled(value, layout, lambda r: self._selected(held, home, layout, r))
        self.conversions.append(str(value.type))
        return self.through_shared(held, element, bits_of(shape_of(value)), home, layout)

    def _selected(self, held: str, home: Layout, layout: Layout, r: str) -> str:
        """The thread's register with another number."""
        positions = {bit: n for n, bit in enumerate(layout.registers)}
        masks = [0] * len(layout.registers)
        dynamic = []
        for n, bit in enumerate(home.registers):
            if bit in positions:
                masks[positions[bit]] = 1 << n
            else:
                dynamic.append((n, layout.threads.index(bit)))
        index = of_bits(r, masks)

        def pick(left: Sequence[tuple[int, int]], offset: int) -> str:
            if not left:
                return f"{held}[({index}) + {offset}]" if offset else f"{held}[{index}]"
            (register, thread), rest = left[0], left[1:]
            return (
                f"({THREAD} >> {thread} & 1 ? {pick(rest, offset + (1 << register))} : {pick(rest, offset)})"
            )

        return pick(dynamic, 0)

    def through_shared(self, held: str, element: Element, bits: int, home: Layout, layout: Layout) -> str:
        size = element_bytes(element)
        masks = _exchange_masks(home, layout, bits, size)
        buffer = self.buffer(size << bits, "a change of layout")
        self.put(held, element, home, masks, buffer)
        return self.take(element, layout, masks, buffer)

    # -- shared memory -----------------------------------------------------------------------------------------------

    def put(
        self,
        held: str,
        element: Element,
        layout: Layout,
        masks: Sequence[int],
        buffer: SharedBuffer,
        after: str = "",
    ) -> None:
        """Store a tile to shared memory; each element is stored by one thread."""
        width = vector_width(layout, masks, element_bytes(element))
        thread, register = _parts(layout, masks)
        line = f"put_shared<{width}>({self.address(buffer)} + ({thread} ^ {register}), {held} + r);"
        lines = ["#pragma unroll", f"for (int r = 0; r < {layout.size}; r += {width}) {line}"]
        if layout.replicated:
            lines = [f"if (({THREAD} & {layout.replicated}) == 0) {{", *lines, "}"]
        self.step([*lines, after] if after else lines, writes=(buffer,))

    def take(self, element: Element, layout: Layout, masks: Sequence[int], buffer: SharedBuffer) -> str:
        """Load a tile from shared memory in all threads."""
        name, declared = self.array(element, layout.size)
        width = vector_width(layout, masks, element_bytes(element))
        thread, register = _parts(layout, masks)
        line = f"get_shared<{width}>({name} + r, {self.address(buffer)} + ({thread} ^ {register}));"
        self.step(
            [declared, "#pragma unroll", f"for (int r = 0; r < {layout.size}; r += {width}) {line}"],
            reads=(buffer,),
        )
        return name

    def in_shared(
        self, value: Value, masks: tuple[int, ...], what: str, *, after: str = "", alignment: int = 0
    ) -> SharedBuffer:
        """A tile in shared memory, stored where it is defined. `after`: a line after the stores."""
        for scope in reversed(self.scopes):
            found = scope.buffers.get((value, masks))
            if found is not None:
                return found
        if value not in self.homes.home:
            return self._placed(value, masks, what, after, alignment)
        with self.at_definition(self._source(value)):
            return self._placed(value, masks, what, after, alignment)

    def _source(self, value: Value) -> Value:
        """The value that a view shows, which has a definition in the code."""
        while self.known(value, self.homes.of(value)) is None:
            value = next(each for each in self.homes.definitions[value].operands if each in self.homes.home)
        return value

    def _placed(
        self, value: Value, masks: tuple[int, ...], what: str, after: str, alignment: int
    ) -> SharedBuffer:
        element, layout = tile_type(value).element, self.homes.of(value)
        held = self.get(value, layout)
        buffer = self.buffer(element_bytes(element) << bits_of(shape_of(value)), what, alignment)
        self.put(held, element, layout, masks, buffer, after)
        self.scope.buffers[value, masks] = buffer
        return buffer

    def exchanged(self, held: str, element: Element, count: int, warp: int) -> str:
        """The same registers of the thread in the warp whose number differs in one bit."""
        size = element_bytes(element)
        buffer = self.buffer(count * self.threads * size, "an exchange between warps")
        location = f"{self.address(buffer)} + (r * {self.threads} + %s) * {size}"
        mine, other = (location % text for text in (THREAD, f"({THREAD} ^ {32 << warp})"))
        loop = ["#pragma unroll", f"for (int r = 0; r < {count}; ++r)"]
        self.step([*loop, f"  put_shared<1>({mine}, {held} + r);"], writes=(buffer,))
        name, declared = self.array(element, count)
        self.step([declared, *loop, f"  get_shared<1>({name} + r, {other});"], reads=(buffer,))
        return name


def _parts(layout: Layout, masks: Sequence[int]) -> tuple[str, str]:
    thread = of_bits(THREAD, [0 if bit == REPLICATED else masks[bit] for bit in layout.threads])
    return thread, of_bits("r", [masks[bit] for bit in layout.registers])


def vector_width(layout: Layout, masks: Sequence[int], size: int) -> int:
    """The number of consecutive registers whose elements are contiguous at an aligned address."""
    count = 0
    while (
        count < len(layout.registers)
        and size << (count + 1) <= _ACCESS_BYTES
        and masks[layout.registers[count]] == size << count
    ):
        count += 1
    others = [masks[bit] for bit in (*layout.registers[count:], *layout.threads) if bit != REPLICATED]
    while count and any(mask % (size << count) for mask in others):
        count -= 1
        others.append(masks[layout.registers[count]])
    return 1 << count


def _exchange_masks(home: Layout, layout: Layout, bits: int, size: int) -> tuple[int, ...]:
    """Address masks for a change of layout: elements that a thread reads together are contiguous, and lanes that write
    together write to different banks as far as possible."""
    vector = [bit for n, bit in enumerate(layout.registers) if size << n < _ACCESS_BYTES]
    order = [*vector, *(bit for bit in range(bits) if bit not in vector)]
    shift = size.bit_length() - 1
    position = {bit: n + shift for n, bit in enumerate(order)}
    lanes = [bit for bit in home.lanes if bit != REPLICATED]
    used = {position[bit] for bit in (*lanes, *vector)}
    free = [bank for bank in range(max(_BANK_BITS[0], shift), _BANK_BITS[1]) if bank not in used]
    masks = {bit: 1 << location for bit, location in position.items()}
    for bit in lanes:
        if position[bit] >= _BANK_BITS[1] and free:
            masks[bit] |= 1 << free.pop()
    return tuple(masks[bit] for bit in range(bits))


__all__ = ["Moves", "element_type", "vector_width"]
