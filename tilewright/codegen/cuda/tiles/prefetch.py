"""The code around one loop whose loads are copied ahead by all threads; `pipeline.py` says which loads those are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.codegen.cuda.tiles.control import Cell
from tilewright.codegen.cuda.tiles.text import element_type
from tilewright.codegen.cuda.tiles.values import tile_type
from tilewright.codegen.cuda.tiles.warpgroups import FENCE
from tilewright.tile.ir import For, Op, Value
from tilewright.tile.passes.shared_memory import SharedBuffer

if TYPE_CHECKING:
    from tilewright.codegen.cuda.tiles.pipeline import Pipelines


@dataclass(frozen=True)
class Copied:
    """A load and its ring buffer. `operands`: the dot operands, with the address masks that they need; if there are
    none, the load is read back."""

    op: Op
    masks: tuple[int, ...]
    operands: tuple[tuple[Value, tuple[int, ...]], ...]
    width: int
    ring: SharedBuffer
    slots: int  # of the ring

    @property
    def slot_bytes(self) -> int:
        return self.ring.bytes // self.slots


class LoopPrefetch:
    """The prefetching code around one loop."""

    def __init__(
        self, emitter: Pipelines, node: For, copied: Sequence[Copied], multiplies: Sequence[Op]
    ) -> None:
        """`multiplies`: the dots of the body that warpgroups compute."""
        self.emitter, self.node, self.copied, self.multiplies = emitter, node, copied, multiplies
        self.slots = copied[0].slots
        wanted = [operand for each in copied for operand in each.op.operands]
        found = emitter.slice_of(node, wanted)
        assert found is not None
        self.ops, self.carried = found
        self.params = [node.body.params[1 + n] for n in self.carried]
        self.cells: list[list[Cell]] = emitter.cells(self.params, [node.init[n] for n in self.carried])
        self.ahead, self.slot = emitter.name("ahead"), emitter.name("slot")
        emitter.step([f"i64 {self.ahead} = {emitter.scalar(node.lower)};", f"int {self.slot} = 0;"])
        self.begin()
        with emitter.inside() as scope:
            self._issue("s")
        head = [f"#pragma unroll 1\nfor (int s = 0; s < {self.slots - 1}; ++s) {{"]
        emitter.region(True, [(head, scope, ["}"])])

    def begin(self) -> None:
        """Code before the loop. It synchronises, because threads may still read the slots of the previous loop."""
        self.emitter.step(["__syncthreads();"], barrier=True)

    def copy(self, slot: str) -> None:
        for each in self.copied:
            self.emitter.copy_ahead(each)

    def issued(self) -> list[str]:
        return ["commit_copies();"]

    def _issue(self, slot: str) -> None:
        """Issue the copies for the iteration `ahead`, if it exists."""
        emitter, node = self.emitter, self.node
        index = node.body.params[0]
        kept = dict(emitter.slots), dict(emitter.blocks), emitter.op
        for each in self.copied:
            emitter.slots[each.ring] = f"{slot} * {each.slot_bytes}"
        name = emitter.name()
        with emitter.inside() as scope:
            emitter.define(index, emitter.homes.uniform, name)
            emitter.define_cells(self.params, self.cells)
            for op in node.body.nodes:
                if isinstance(op, Op) and op in self.ops:
                    emitter.operation(op)
            self.copy(slot)
            yields = [node.body.yields[n] for n in self.carried]
            tail = emitter.assigned(self.cells, yields, self.params)
        kind = element_type(tile_type(index).element)
        head = [f"if ({emitter.more(node, self.ahead)}) {{", f"  const {kind} {name} = ({kind}){self.ahead};"]
        emitter.region(False, [(head, scope, [*tail, "}"])])
        step = emitter.scalar(node.step)
        emitter.step([*self.issued(), f"{self.ahead} += {step};"])
        emitter.slots, emitter.blocks, emitter.op = kept

    def await_copies(self) -> None:
        """Wait until this iteration's copies are complete in all threads."""
        fence = [FENCE] if self.multiplies else []
        wait = f"await_copies<{self.slots - 2}>();"
        self.emitter.step([wait, *fence, "__syncthreads();"], barrier=True)

    def begin_iteration(self) -> None:
        emitter = self.emitter
        self.await_copies()
        free = emitter.name("free")
        emitter.step([f"const int {free} = {self.slot} ? {self.slot} - 1 : {self.slots - 1};"])
        if self.multiplies:
            emitter.pending = lambda: self._issue(free)
        else:
            self._issue(free)
        for each in self.copied:
            emitter.slots[each.ring] = f"{self.slot} * {each.slot_bytes}"
            if each.operands:
                emitter.skipped.add(each.op)
            else:
                emitter.read_back[each.op] = (each.masks, each.ring)
            for value, masks in each.operands:
                emitter.scope.buffers[value, masks] = each.ring

    def end_iteration(self) -> list[str]:
        return [f"{self.slot} = {self.slot} + 1 == {self.slots} ? 0 : {self.slot} + 1;"]

    def end(self) -> None:
        self.emitter.step(["await_copies<0>();"])
