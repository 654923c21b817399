"""The code around one loop whose loads the tensor copy engine brings, issued by one thread.

    before the loop       barriers of each slot: `full`, for its bytes, and `empty`, for every warp; the first copies
    in each iteration     wait for `full`; multiply; the slot of the iteration before is empty: its next copies
    after the loop        no copy is under way; the barriers end

No barrier of the block is in the loop: warps run apart by as much as the slots allow. Where a dot only adds to what the
loop carries, its multiplications run on while the next iteration begins, and a slot is empty one iteration later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.codegen.cuda.tiles.prefetch import Copied, LoopPrefetch
from tilewright.codegen.cuda.tiles.tensor_maps import BulkCopy
from tilewright.codegen.cuda.tiles.text import THREAD
from tilewright.codegen.cuda.tiles.warpgroups import FENCE
from tilewright.hw.bulk_copies import BARRIER_BYTES, Box, copy_box, function_text
from tilewright.tile.ir import For, Op
from tilewright.tile.passes.shared_memory import SharedBuffer

if TYPE_CHECKING:
    from tilewright.codegen.cuda.tiles.pipeline import Pipelines


class BulkPrefetch(LoopPrefetch):
    def __init__(
        self,
        emitter: Pipelines,
        node: For,
        copied: Sequence[Copied],
        multiplies: Sequence[Op],
        bulk: Sequence[BulkCopy],
        running: Op | None,
    ) -> None:
        """`bulk`: the bulk copy of each load. `running`: the dot that is left running."""
        self.bulk, self.running = bulk, running
        self.phase, self.started = emitter.name("phase"), emitter.name("started")
        size = 2 * copied[0].slots * BARRIER_BYTES
        self.barriers = SharedBuffer(
            emitter.name("shared"), size, "barriers of copies", node.where, ring=True
        )
        if running is not None:
            emitter.in_flight[running] = None
        super().__init__(emitter, node, copied, multiplies)

    def _full(self, slot: str) -> str:
        return f"{self.emitter.address(self.barriers)} + {BARRIER_BYTES} * {slot}"

    def _empty(self, slot: str) -> str:
        return f"{self._full(slot)} + {BARRIER_BYTES * self.slots}"

    def begin(self) -> None:
        emitter = self.emitter
        begin = [
            f"int {self.phase} = 0;",
            f"bool {self.started} = false;",
            FENCE,  # what was done with this memory before is seen by the copy engine
            "__syncthreads();",
            f"if ({THREAD} == 0) {{",
            f"  for (int s = 0; s < {self.slots}; ++s) {{",
            f"    begin_barrier({self._full('s')}, 1);",
            f"    begin_barrier({self._empty('s')}, {1 << emitter.warps});",
            "  }",
            "  fence_barriers();",
            "}",
            "__syncthreads();",
        ]
        emitter.step(begin, writes=(self.barriers,), barrier=True)

    def copy(self, slot: str) -> None:
        emitter = self.emitter
        lines = [f"if ({THREAD} == 0) {{"]
        if slot != "s":  # not before the loop, where all slots are empty
            lines.append(
                f"  await_phase({self._empty(slot)}, {self.slot} ? {self.phase} : {self.phase} ^ 1);"
            )
        total = sum(each.bytes for each in self.bulk)
        lines.append(f"  expect_bytes({self._full(slot)}, {total});")
        for copied, bulk in zip(self.copied, self.bulk, strict=True):
            held = emitter.blocks[copied.op.operands[0]]
            if bulk.map not in emitter.maps:
                emitter.maps.append(bulk.map)
            name = f"map{emitter.maps.index(bulk.map)}"
            box, function = bulk.map.box, self._function(bulk.map.box)
            for panel in range(bulk.panels):
                to = f"{emitter.address(copied.ring)} + {panel * box.bytes}"
                column = f"(int){held.offsets[bulk.inner]} + {panel * box.columns}"
                row = f"(int){held.offsets[1 - bulk.inner]}"
                lines.append(f"  {function}({to}, {name}, {column}, {row}, {self._full(slot)});")
        rings = tuple(each.ring for each in self.copied)
        emitter.step([*lines, "}"], reads=(self.barriers,), writes=rings)

    def _function(self, box: Box) -> str:
        name = "copy_box"
        if name not in self.emitter.functions:
            self.emitter.functions[name] = function_text(copy_box(box), name)
        return name

    def issued(self) -> list[str]:
        return ["__syncwarp();"]

    def await_copies(self) -> None:
        self.emitter.step([f"await_phase({self._full(self.slot)}, {self.phase});"], reads=(self.barriers,))

    def _issue(self, slot: str) -> None:
        if slot != "s" and self.running is not None:
            # The data that the previous iteration read are no longer needed.
            arrives = f"if ({self.started} && ({THREAD} & 31) == 0) arrive({self._empty(slot)});"
            self.emitter.step([arrives, f"{self.started} = true;"], reads=(self.barriers,))
        super()._issue(slot)

    def end_iteration(self) -> list[str]:
        arrives = f"if (({THREAD} & 31) == 0) arrive({self._empty(self.slot)});"
        turn = f"if ({self.slot} == 0) {self.phase} ^= 1;"
        return [*([] if self.running is not None else [arrives]), *super().end_iteration(), turn]

    def end(self) -> None:
        emitter = self.emitter
        if self.running is not None:
            found = emitter.in_flight[self.running]
            assert found is not None
            name, count = found
            rings = tuple(each.ring for each in self.copied)
            emitter.step([f"{emitter.wait_for_multiplications(count)}({name});"], reads=rings)
        lines = [f"if ({THREAD} == 0)", f"  for (int s = 0; s < {2 * self.slots}; ++s)"]
        lines.append(f"    end_barrier({self._full('s')});")
        emitter.step(["__syncthreads();", *lines], writes=(self.barriers,))
