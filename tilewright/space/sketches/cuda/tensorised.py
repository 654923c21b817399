"""Contractions on tensor cores: 16-bit floats, or 32-bit floats that may be rounded ("tf32"). The structure is
multi-level tiling down to an instruction, cooperative fetching, a software pipeline and a cache write.

    for blocks, tiles of BM x BN:                                     (parallel)
      for steps of BK:                                                (serial; STAGES tiles are under way)
        for threads: tiles of left[BM, BK], right[BN, BK]             (copies)
        for warps, WM x WN each, steps of the instruction's depth:    (unrolled)
          fragments, acc[WM, WN] += left * right                      (instructions)
      sums[BM, BN] = acc;  for threads: out = value(sums)             (vectors)

The mapping (`mapping.py`) of axes to the instruction's m, n and k is a knob. So is the instruction, where users
registered some that multiply the same fragments as tensor cores do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.gpu import WARP, GpuMachine
from tilewright.hw.intrinsics import Fragment, Intrinsic, PtxAssembly, registered, registered_intrinsics
from tilewright.hw.tensor_cores import columns, multiply
from tilewright.loops.ir import Block, For, Kind, Program, Stmt, block, nest
from tilewright.numerics import may_round_to_tf32
from tilewright.space.contraction import TwoFactorContraction, contraction_of
from tilewright.space.mapping import Mapping, access_matrix, mappings
from tilewright.space.sketches.cuda.fetch import TileOperand
from tilewright.space.sketches.cuda.pipeline import REGISTER_STAGES, TileLoop, pipelined
from tilewright.space.sketches.cuda.results import Results
from tilewright.space.sketches.cuda.structure import InTiles, Structure
from tilewright.space.sketches.cuda.warps import Fragments, WarpAccumulators
from tilewright.space.space import Knob, Space
from tilewright.space.template import Applied, GpuTerms, GpuWork
from tilewright.space.terms import InnerLoop, TileGrid
from tilewright.support.batch import Number, Truth, least, most, rounded, select

NAME = "sketch:tensorised"
DTYPES = (DType.F16, DType.BF16)
_MIN, _MAX = 32, 256  # minimum and maximum threads of a block
_FEW = 32  # rows or columns of a product that counts as tiny
_MAX_SUMS = 128  # maximum registers of a thread for results
_MAX_REGISTERS = 255
_MAX_COPIES = 40  # maximum per thread and step
_REGISTERS_COPY, _ADDRESSES = (
    0.7,
    16,
)  # registers per copied chunk, and how many chunks have addresses of their own
_LONGEST = 4  # maximum aspect ratio of a block
_GATHERED = 4  # registers per chunk that goes through registers, and for its address
_COPY = 5  # instructions per copied chunk
_SHALLOW = 1.2  # slowdown of instructions with a small k
_GATHER = 14  # additional instructions for a chunk whose index needs divisions or conditions


@dataclass(frozen=True)
class WarpTiles:
    mapping: int
    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    instruction_k: int  # k of the instruction
    stages: int
    prefetch: bool  # fragments are loaded a step before they are multiplied
    fused: bool  # also across tiles: the first fragments of a tile at the end of the one before
    instruction: str = ""  # the digest of a registered one that multiplies; "": that of tensor cores

    @property
    def threads(self) -> int:
        return WARP * (self.bm // self.wm) * (self.bn // self.wn)


class Tensorised:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        if work.formula is None or not work.machine.async_copy:
            return None
        rounded = (DType.F32,) if may_round_to_tf32(work.numerics) else ()
        found = contraction_of(work.formula, (*DTYPES, *rounded))
        if found is None:
            return None
        mappings_found = mappings(found, multiply(2 * columns(found.dtype), found.dtype))
        return AppliedTensorised(found, mappings_found, work.machine) if mappings_found else None


def instructions(dtype: DType, machine: GpuMachine) -> dict[str, Intrinsic]:
    """The registered instructions of a machine, by digest, that compute what those of tensor cores do: the same
    dependence of each operand on m, n and k, in the same fragments."""
    known = [multiply(depth, dtype) for depth in (columns(dtype), 2 * columns(dtype))]
    return {
        each.digest: each
        for each in registered_intrinsics(machine)
        if isinstance(each.emit, PtxAssembly) and any(_is_like(each, one) for one in known)
    }


def _is_like(one: Intrinsic, other: Intrinsic) -> bool:
    if len(one.fragments) != len(other.fragments) or not one.accumulates:
        return False
    if access_matrix(one)[1] != access_matrix(other)[1]:
        return False
    return all(_held(a) == _held(b) for a, b in zip(one.fragments, other.fragments, strict=True))


def _held(fragment: Fragment) -> tuple[object, ...]:
    """What identifies a fragment: its tile, and the elements that each thread holds."""
    lanes, count = range(fragment.lanes), range(fragment.size)
    elements = [tuple(fragment.element(lane, n)) for lane in lanes for n in count]
    return fragment.tensor.shape, fragment.tensor.dtype, fragment.scope, fragment.lanes, elements


class TensorisedKernel(Structure[WarpTiles]):
    swizzled = True

    @cached_property
    def results(self) -> Results:
        return Results(self.work, self.mapping.m, self.mapping.n, self.tiles.bm, self.tiles.bn)

    @cached_property
    def shared_bytes(self) -> Number:
        operands = sum(o.bytes for o in self.operands)
        return most(operands, self.tiles.bm * self.results.pitch * 4) + 256

    @cached_property
    def registers(self) -> Number:
        """Estimated registers of a thread, fitted to what the compiler used for 90 kernels."""
        t = self.tiles
        sums = t.wm * t.wn / WARP
        fragments = (
            (t.wm + t.wn)
            * t.instruction_k
            * self.work.dtype.bytes
            / WARP
            / 4
            * select(t.prefetch, REGISTER_STAGES, 1)
        )
        held = sum(
            o.copy_count(t.threads) * (_GATHERED if o.operand.is_gathered else 1)
            for o in self.operands
            if o.is_small
        )
        return 24 + sums + fragments + held + _REGISTERS_COPY * least(self.copied, _ADDRESSES)

    # -- the program ----------------------------------------------------------------------------------------------

    def program(self) -> Program:
        t, formula = self.tiles, self.work.formula
        thread = te.Var("t", t.threads)
        blocks = self.blocks
        (m0, n0), batch = blocks.starts, blocks.batch
        warp, across = thread // WARP, t.bn // t.wn
        starts = warp // across * t.wm, warp % across * t.wn
        left, right = (
            Fragments(operand, operand is self.operands[0], size, start, t.instruction_k, thread)
            for operand, size, start in zip(self.operands, (t.wm, t.wn), starts, strict=True)
        )
        sums = WarpAccumulators(left, right, self._instruction)
        body = block(
            sums.clear(),
            TileLoop(self.operands, (m0, n0), batch, thread).loop(_multiplied(sums, t)),
            sums.store(self.results.sums, self.results.pitch),
            self.results.write(thread, m0, n0, batch),
        )
        m, n, k = self.mapping.sizes
        words = (
            f"tensorised: {m} x {n} x {k} (mapping {t.mapping}) by {t.bm} x {t.bn} x {t.bk}, warps of {t.wm} x {t.wn},"
            f" m16n8k{t.instruction_k}"
        )
        params = (*formula.inputs, formula.output)
        program = Program(formula.name, params, nest([(blocks.number, Kind.PARALLEL)], body), words)
        ahead = (left.buffer.name, right.buffer.name) if t.prefetch else ()
        return pipelined(program, self.operands, t.stages, ahead, t.fused)

    @property
    def _instruction(self) -> Intrinsic:
        t, dtype = self.tiles, self.work.dtype
        if not t.instruction:
            return multiply(t.instruction_k, dtype)
        return next(each for each in registered() if each.digest == t.instruction)

    def terms(self) -> GpuTerms:
        t = self.tiles
        size = self.work.dtype.bytes
        tile_bytes = size * (t.bm + t.bn) * t.bk
        copy_count = [o.rows * o.columns / o.lanes / WARP for o in self.operands]
        copies = sum(copy_count)
        gathered = sum(
            each for each, o in zip(copy_count, self.operands, strict=True) if o.operand.is_gathered
        )
        fragments = t.threads // WARP * (t.wm + t.wn) * t.bk * size
        multiplications = t.bm * t.bn * t.bk / (128 * t.instruction_k)
        results = t.bm * t.bn
        slower = select(t.instruction_k == columns(self.work.dtype), _SHALLOW, 1.0)
        blocks = self.blocks
        inner = InnerLoop(
            t.bk // t.instruction_k,
            select(t.prefetch, REGISTER_STAGES, 1),
            (t.wm + t.wn) * t.instruction_k * float(size),
            t.fused & t.prefetch & (t.stages > 1),
        )
        grid = TileGrid(blocks.rows, blocks.columns, blocks.together, size * t.bm * t.bk, size * t.bn * t.bk)
        return GpuTerms(
            blocks=blocks.count,
            threads=t.threads,
            registers=least(255, rounded(self.registers)),
            shared_bytes=self.shared_bytes,
            steps=self.summed.total,
            stages=t.stages,
            flops=size * t.bm * t.bn * t.bk * slower,
            scalar=fragments / 512 + multiplications + copies * _COPY + gathered * _GATHER,
            copies=copies,
            shared_traffic=1.0 * (tile_bytes + fragments),
            loaded=1.0 * tile_bytes,
            memory=float(self.work.formula.moved),
            write_loaded=self.work.formula.epilogue_reads * results,
            written=1.0 * results * self.work.formula.output.dtype.bytes,
            write_shared=12.0 * results,
            inner=inner,
            grid=grid,
        )


def _multiplied(sums: WarpAccumulators, tiles: WarpTiles) -> list[Stmt]:
    """One tile in steps of the instruction, each after loading its fragments."""
    count = tiles.bk // tiles.instruction_k
    if not tiles.prefetch:
        return [stmt for number in range(count) for stmt in sums.step(te.as_index(number))]
    step = te.Var("part", count)
    return [For(step, Kind.UNROLL, Block(tuple(sums.step(step))))]


class AppliedTensorised(InTiles[WarpTiles]):
    sizes, structured = WarpTiles, TensorisedKernel
    most_copies, most_registers = _MAX_COPIES, _MAX_REGISTERS

    def __init__(
        self, work: TwoFactorContraction, mappings_found: list[Mapping], machine: GpuMachine
    ) -> None:
        may_transpose = work.dtype.bytes == 2  # as loading the fragments does
        read = [
            (
                TileOperand(mapping.left, mapping.m, mapping.k, may_transpose),
                TileOperand(mapping.right, mapping.n, mapping.k, may_transpose),
            )
            for mapping in mappings_found
        ]
        super().__init__(work, mappings_found, machine, read)
        self.wide = columns(work.dtype)
        self.instructions = instructions(work.dtype, machine)

    @cached_property
    def space(self) -> Space:
        m, n, k = (max(mapping.sizes[at] for mapping in self.mappings_found) for at in range(3))

        def sizes(extent: int, *choices: int) -> tuple[int, ...]:
            """Sizes up to twice the extent."""
            return tuple(size for size in choices if size < 2 * extent or size == choices[0])

        knobs: tuple[Knob, ...] = (
            Knob("mapping", tuple(range(len(self.mappings_found))), ordered=False),
            Knob("bm", sizes(m, 16, 32, 64, 128, 256)),
            Knob("bn", sizes(n, 16, 32, 64, 128, 256)),
            Knob("bk", sizes(k, 4 * self.wide, 8 * self.wide)),
            Knob("wm", sizes(m, 16, 32, 64)),
            Knob("wn", sizes(n, 16, 32, 64)),
            Knob("instruction_k", (2 * self.wide, self.wide)),
            Knob("stages", (1, 2, 3, 4, 5, 6)),
            Knob("prefetch", (False, True), ordered=False),
            Knob("fused", (True, False), ordered=False),
        )
        if self.instructions:
            knobs = (*knobs, Knob("instruction", ("", *self.instructions), ordered=False))
        names = tuple(knob.name for knob in knobs)
        return Space(NAME, knobs, self.legal, together=(names,), batched=True)

    @cached_property
    def _fewest(self) -> int:
        """The minimum threads of a block: one warp is enough for a tiny task."""
        m, n, _ = self.mappings_found[0].sizes
        return _MIN if min(m, n) < _FEW else 2 * _MIN

    def suits(self, t: WarpTiles) -> Truth:
        suits = (t.bm % t.wm == 0) & (t.bn % t.wn == 0)
        suits = suits & (self._fewest <= t.threads) & (t.threads <= _MAX) & (t.wm * t.wn <= WARP * _MAX_SUMS)
        suits = suits & select(t.prefetch, t.instruction_k != self.wide, True)
        # Where there is nothing to fuse, the knob changes nothing.
        suits = suits & (t.fused | (t.prefetch & (t.stages > 1)))
        for name, instruction in self.instructions.items():
            depth = instruction.inputs[0].shape[1]
            suits = suits & select(t.instruction == name, t.instruction_k == depth, True)
        suits = suits & (most(t.bm, t.bn) <= _LONGEST * least(t.bm, t.bn))
        return suits & (most(t.wm, t.wn) <= 2 * least(t.wm, t.wn))
