"""Rings, roles and running multiplications of a program as CUDA text: `emit.py` has the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright import te
from tilewright.codegen.cuda.shared import barriers
from tilewright.hw.bulk_copies import BARRIER_BYTES, Box, copy_box, function_text
from tilewright.hw.gpu import WARP
from tilewright.hw.warpgroups import WARPGROUP, matrix_descriptor, wait_text
from tilewright.hw.warpgroups import function_text as multiply_text
from tilewright.loops.ir import (
    BoxCopy,
    Buffer,
    Fill,
    Filled,
    Multiplied,
    Program,
    Release,
    Ring,
    Roles,
    Scope,
    SourceMatrix,
    Stmt,
    Warp,
    walk_stmts,
)
from tilewright.runtime.plan import MatrixMap
from tilewright.te.index import simplify

if TYPE_CHECKING:
    from tilewright.codegen.cuda.emit import _Emitter

_COPY, _COPY_TO_ALL = "copy_box", "copy_box_to_all"


def maps_of(program: Program) -> tuple[MatrixMap, ...]:
    """The tensor maps that a launch passes, after the program's buffers."""
    names = [buffer.name for buffer in program.params]
    return tuple(
        MatrixMap(
            names.index(matrix.buffer.name), matrix.rows, matrix.columns, matrix.stride, box.rows, box.columns
        )
        for matrix, box in _mapped(program)
    )


def _mapped(program: Program) -> list[tuple[SourceMatrix, Box]]:
    copies = (stmt for stmt in walk_stmts(program.body) if isinstance(stmt, BoxCopy))
    return list(dict.fromkeys((copy.source, _own_part(copy, program)) for copy in copies))


def _own_part(copy: BoxCopy, program: Program) -> Box:
    """The box that a block copies: of one that is shared, its part."""
    return replace(copy.box, rows=copy.box.rows // program.together) if copy.shared else copy.box


class RingText:
    def __init__(self, emitter: _Emitter, program: Program) -> None:
        self.emitter, self.program = emitter, program
        self.threads = emitter.threads  # that compute
        self.mapped = _mapped(program)
        self.barriers = barriers(program)
        fills = [stmt for stmt in walk_stmts(program.body) if isinstance(stmt, Fill)]
        self.shared = {stmt.ring for stmt in fills if any(copy.shared for copy in stmt.copies)}
        self.role = ""
        self.is_multiplying = False
        self.matrix_statements = [
            stmt for stmt in walk_stmts(program.body) if isinstance(stmt, Warp) and stmt.threads == WARPGROUP
        ]
        instructions = dict.fromkeys(stmt.instruction for stmt in self.matrix_statements)
        self.multiply = {each: f"multiply_{number}" for number, each in enumerate(instructions)}
        running = [stmt.operands[0][0] for stmt in self.matrix_statements if stmt.running]
        self.sums = list(dict.fromkeys(running))

    @property
    def is_needed(self) -> bool:
        return bool(self.mapped or self.multiply)

    @property
    def parameters(self) -> list[str]:
        return [f"const __grid_constant__ TensorMap map{number}" for number in range(len(self.mapped))]

    def functions(self) -> str:
        texts = [multiply_text(each, name) for each, name in self.multiply.items()]
        counts = sorted({stmt.operands[0][0].size for stmt in self.matrix_statements})
        texts += [wait_text(count, f"await_multiplications_{count}") for count in counts]
        if self.mapped:
            texts.append(function_text(copy_box(self.mapped[0][1]), _COPY))
        if self.shared:
            texts.append(function_text(copy_box(self.mapped[0][1]), _COPY_TO_ALL, multicast=True))
        return "".join(texts)

    def declarations(self) -> None:
        line = self.emitter.line
        if self.multiply:
            line(f"const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / {WARPGROUP}, 0);")
        if not self.barriers:
            return
        for ring, offset in self.barriers.items():
            line(f"const unsigned {self._name(ring)} = shared_address(shared) + {offset};")
        with self.emitter.braces("if (threadIdx.x == 0)"):
            for number in range(len(self.mapped)):
                line(f"prefetch_map(map{number});")
            for ring in self.barriers:
                with self.emitter.braces(f"for (int slot = 0; slot < {ring.slots}; ++slot)"):
                    line(f"begin_barrier({self._name(ring)} + {BARRIER_BYTES} * slot, 1);")
                    after = f"{BARRIER_BYTES} * (slot + {ring.slots})"
                    readers = self.threads // WARP * (self.program.together if ring in self.shared else 1)
                    line(f"begin_barrier({self._name(ring)} + {after}, {readers});")
            line("fence_barriers();")
        if self.shared:
            line("const unsigned rank = rank_in_cluster();")
        line("meet_blocks();" if self.shared else "__syncthreads();")

    def uniform(self, thread: te.Var) -> dict[te.Expr, str]:
        """What is the same for all threads of a warp, so that the compiler knows: descriptors are computed once."""
        return {te.call("floordiv", thread, te.as_index(WARPGROUP)): "warpgroup"} if self.multiply else {}

    def _name(self, ring: Ring) -> str:
        return f"ring_{list(self.barriers).index(ring)}"

    def _full(self, ring: Ring, number: te.Expr) -> str:
        slot = self.emitter.value(simplify(number % ring.slots))
        return f"{self._name(ring)} + {BARRIER_BYTES} * ({slot})"

    def _empty(self, ring: Ring, number: te.Expr) -> str:
        return f"{self._full(ring, number)} + {BARRIER_BYTES * ring.slots}"

    def _parity(self, ring: Ring, number: te.Expr) -> str:
        return self.emitter.value(simplify(number // ring.slots % 2))

    # -- statements ---------------------------------------------------------------------------------------------------

    def statement(self, stmt: Fill | Filled | Release | Multiplied | Roles) -> None:
        emitter = self.emitter
        if isinstance(stmt, Fill):
            self.fill(stmt)
        elif isinstance(stmt, Filled):
            arguments = f"{self._full(stmt.ring, stmt.number)}, {self._parity(stmt.ring, stmt.number)}"
            emitter.line(f"await_phase({arguments});")
        elif isinstance(stmt, Release):
            emitter.line("__syncwarp();")
            empty, lane = self._empty(stmt.ring, stmt.number), "(threadIdx.x & 31)"
            if stmt.ring in self.shared:  # a lane for each block that copies to this one
                emitter.line(f"if ({lane} < {self.program.together}) arrive_in_block({empty}, {lane});")
            else:
                emitter.line(f"if ({lane} == 0) arrive({empty});")
        elif isinstance(stmt, Multiplied):
            emitter.line("commit_multiplications();")
            self.is_multiplying = False
            if stmt.pending == 1:
                emitter.line("await_multiplications_but_one();")
            else:
                assert stmt.pending == 0, "what the pass makes"
                for sums in self.sums:
                    self._await(sums)
        else:
            self.roles(stmt)

    def _await(self, sums: Buffer) -> None:
        self.emitter.line(f"await_multiplications_{sums.size}({sums.name});")

    def fill(self, stmt: Fill) -> None:
        emitter = self.emitter
        if self.role != "producer":
            with emitter.braces("if (threadIdx.x == 0)"):
                self.copies(stmt)
            emitter.line("__syncwarp();")
        else:
            self.copies(stmt)

    def copies(self, stmt: Fill) -> None:
        emitter, ring = self.emitter, stmt.ring
        names = dict(emitter.names)
        before = self._parity(
            ring, stmt.number + ring.slots
        )  # of the phase before: at first, one that has ended
        emitter.line(f"await_phase({self._empty(ring, stmt.number)}, {before});")
        full = self._full(ring, stmt.number)
        emitter.line(f"expect_bytes({full}, {stmt.bytes});")
        for copy in stmt.copies:
            to = emitter.hoisted_index(f"{copy.buffer.name}_at", copy.index, copy.buffer.dtype.bytes)
            part = _own_part(copy, self.program)
            number = self.mapped.index((copy.source, part))
            first = f"(int)({emitter.value(copy.column)}), (int)({emitter.value(copy.row)})"
            if copy.shared:
                first, everybody = f"{first} + (int)rank * {part.rows}", (1 << self.program.together) - 1
                to = f"{to} + rank * {part.bytes}"
                emitter.line(f"{_COPY_TO_ALL}({to}, map{number}, {first}, {full}, {everybody});")
            else:
                emitter.line(f"{_COPY}({to}, map{number}, {first}, {full});")
        emitter.names = names

    def roles(self, stmt: Roles) -> None:
        emitter = self.emitter
        with emitter.braces(f"if (threadIdx.x >= {self.threads})"):
            self.role = "producer"
            if stmt.registers is not None:
                emitter.line(f"give_registers<{stmt.registers[0]}>();")
            with emitter.braces(f"if (threadIdx.x == {self.threads})"):
                emitter.statement(stmt.producer)
        with emitter.braces("else"):
            self.role = "consumer"
            if stmt.registers is not None:
                emitter.line(f"take_registers<{stmt.registers[1]}>();")
            emitter.statement(stmt.consumer)
        self.role = ""
        if self.shared:
            emitter.line("meet_blocks();")  # none ends while another may still copy to it

    def begin(self, stmt: Stmt) -> None:
        """Before multiplications, once for a group of them: registers and tiles are ready."""
        inside = list(walk_stmts(stmt))
        if self.is_multiplying or any(isinstance(each, Multiplied) for each in inside):
            return
        if any(isinstance(each, Warp) and each.running for each in inside):
            self.emitter.line("begin_multiplications();")
            self.is_multiplying = True

    def warpgroup(self, stmt: Warp) -> None:
        emitter = self.emitter
        names = dict(emitter.names)
        (sums, start), *operands = stmt.operands
        texts = []
        for (buffer, index), pitch in zip(operands, stmt.operand_pitches[1:], strict=True):
            assert buffer.scope is Scope.SCRATCH and pitch
            at = emitter.hoisted_index(f"{buffer.name}_at", index, buffer.dtype.bytes)
            texts.append(f"matrix_descriptor({at}, {matrix_descriptor(pitch * buffer.dtype.bytes)}ull)")
        if not stmt.running:
            emitter.line("begin_multiplications();")
        first = emitter.value(start)
        emitter.line(f"{self.multiply[stmt.instruction]}({sums.name} + {first}, {', '.join(texts)}, 1);")
        if not stmt.running:
            emitter.line("commit_multiplications();")
            self._await(sums)
        emitter.names = names
