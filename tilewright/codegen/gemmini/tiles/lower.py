"""A launch of a tile kernel as a loop program: everything but the data is a number, or linear in loops and instances.

    acc = tl.zeros((8, 8), tl.int32)        for program_id < 4:
    for k in range(0, K, 16):                 for m, n: acc[m, n] = 0
      a = tl.load(a_block)             ->     for k < K / 16:
      b = tl.load(b_block)                      for r, c: copy a[r, c] <- x[...]     in the scratchpad
      acc = tl.dot(a, b, acc)                   for r, c: copy b[r, c] <- w[...]
    tl.store(out_block, acc)                    for m, n, k: acc[m, n] += a[m, k] * b[k, n]
                                              for m, n: out[...] = acc[m, n]

Loops over the elements of a tile are unrolled ones, all others serial. A tile is an element's expression in its
indices; only what is loaded and what `dot` computes has a buffer. Integers are those of `te`'s index arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from tilewright import te
from tilewright.codegen.gemmini.tiles.match import epilogue, operands_of
from tilewright.dtypes import DType
from tilewright.errors import AcceleratorMatchError
from tilewright.hw.gemmini import ACCUMULATOR, SCRATCHPAD
from tilewright.loops.ir import (
    Await,
    Buffer,
    Commit,
    Copy,
    If,
    Kind,
    Program,
    Scope,
    Stmt,
    Store,
    block,
    nest,
)
from tilewright.support.source import SourceLocation
from tilewright.te.index import simplify
from tilewright.te.scalars import SCALARS
from tilewright.tile import ir
from tilewright.tile.ops import broadcast_shapes

Indices = tuple[te.Expr, ...]
_ANYWHERE = 1 << 30  # the extent of a number that a loop carries, while its step is not known


@dataclass(frozen=True)
class TileAccess:
    """A tile. `at`: the element at given indices. `buffer`: its buffer, if a load or `dot` has written it."""

    shape: tuple[int, ...]
    at: Callable[[Indices], te.Expr]
    buffer: Buffer | None = None


@dataclass(frozen=True)
class Pointers:
    """A tile of pointers into `buffer`, one for each element."""

    buffer: Buffer
    shape: tuple[int, ...]
    at: Callable[[Indices], te.Expr]


@dataclass(frozen=True)
class BlockPointer:
    buffer: Buffer
    block: tuple[int, ...]
    shape: tuple[te.Expr, ...]
    strides: tuple[te.Expr, ...]
    offsets: tuple[te.Expr, ...]


Lowered = TileAccess | Pointers | BlockPointer


@dataclass
class Loops:
    """`tiles`: rows and columns of each local buffer. `where`: the source line that made each buffer, or stores to
    it."""

    program: Program
    tiles: dict[str, tuple[int, int]]
    where: dict[str, SourceLocation | None]


def lower(
    program: ir.TileProgram, grid: tuple[int, int, int], scalars: Mapping[str, bool | int | float]
) -> Loops:
    """Lower a kernel to loops. Raises AcceleratorMatchError, at the user's line, if the accelerator could not run its
    loops."""
    ids = tuple(te.Var(f"program_id.{axis}", extent) for axis, extent in enumerate(grid))
    lowering = _Lowering(ids, grid)
    params = []
    for param in program.params:
        assert isinstance(param.type, ir.TileType)
        if param.type.is_pointer:
            buffer = Buffer(param.name, param.type.dtype, 0)
            params.append(buffer)
            lowering.values[param] = Pointers(buffer, (), lambda at: te.as_index(0))
        else:
            lowering.values[param] = _constant(scalars[param.name], param.type.dtype)
    lowering.block(program.body)
    body = nest([(each, Kind.SERIAL) for each in reversed(ids)], block(*lowering.stmts))
    return Loops(Program(program.name, tuple(params), body), lowering.tiles, lowering.where)


def refuse(message: str, where: SourceLocation | None, remedy: str | None = None) -> NoReturn:
    raise AcceleratorMatchError(message, where=where, remedy=remedy)


def _constant(value: bool | int | float, dtype: DType) -> TileAccess:
    made = te.const(value, dtype) if dtype.is_float or dtype is DType.BOOL else te.as_index(int(value))
    return TileAccess((), lambda at: made)


@dataclass
class _Lowering:
    ids: tuple[te.Var, ...]
    grid: tuple[int, int, int]
    values: dict[ir.Value, Lowered] = field(default_factory=dict)
    stmts: list[Stmt] = field(default_factory=list)
    tiles: dict[str, tuple[int, int]] = field(default_factory=dict)
    where: dict[str, SourceLocation | None] = field(default_factory=dict)
    taken: set[ir.Value] = field(default_factory=set)  # sums to which a later dot has added, in their place
    number: int = 0

    def block(self, found: ir.Block) -> None:
        for node in found.nodes:
            if isinstance(node, ir.For):
                self._for(node)
            elif isinstance(node, ir.Op):
                self._op(node)
            else:
                kind = "while" if isinstance(node, ir.While) else "if"
                refuse(
                    f"Gemmini has no branches: the kernel has a `{kind}` that only a launch decides",
                    node.where,
                )

    # -- what operands are ----------------------------------------------------------------------------------------

    def _value(self, value: ir.Value, where: SourceLocation | None) -> Lowered:
        if value in self.taken:
            refuse("these sums are used again after a later dot has added to them in their place", where)
        return self.values[value]

    def _tile(self, value: ir.Value, where: SourceLocation | None) -> TileAccess:
        found = self._value(value, where)
        if not isinstance(found, TileAccess):
            refuse("Gemmini computes with numbers here, and this is a pointer", where)
        return found

    def _number(self, value: ir.Value, where: SourceLocation | None) -> te.Expr:
        return simplify(self._tile(value, where).at(()))

    def _fixed(self, value: ir.Value, what: str, where: SourceLocation | None) -> int:
        found = self._number(value, where)
        if not isinstance(found, te.Const):
            refuse(f"{what} must be the same in every program instance", where)
        return int(found.value)

    # -- operations -----------------------------------------------------------------------------------------------

    def _op(self, op: ir.Op) -> None:
        make = getattr(self, f"_{op.name}", None)
        if make is None and op.name in SCALARS:
            made: Lowered | None = self._scalar(op)
        elif make is None:
            refuse(
                f"Gemmini has no instruction for `{op.name}`",
                op.where,
                "it has loads and stores of int8 and int32, dot of int8, and scale, round, clamp and ReLU in a store",
            )
        else:
            made = make(op)
        if op.results:
            assert made is not None
            self.values[op.results[0]] = made

    def _scalar(self, op: ir.Op) -> TileAccess:
        tiles = [self._tile(each, op.where) for each in op.operands]
        dtype = _dtype(op.operands[0])

        def at(indices: Indices) -> te.Expr:
            args = [tile.at(indices) for tile in tiles]
            if any(arg.dtype not in (DType.I64, DType.BOOL) for arg in args):
                args = [_as(arg, dtype) for arg in args]
                return te.call(op.name, *args)
            return simplify(te.call(op.name, *args))

        return TileAccess(tiles[0].shape, at)

    def _constant(self, op: ir.Op) -> TileAccess:
        return _constant(op.settings["value"], op.settings["dtype"])

    def _program_id(self, op: ir.Op) -> TileAccess:
        var = self.ids[op.settings["axis"]]
        return TileAccess((), lambda at: var if var.extent > 1 else te.as_index(0))

    def _num_programs(self, op: ir.Op) -> TileAccess:
        return _constant(self.grid[op.settings["axis"]], DType.I32)

    def _arange(self, op: ir.Op) -> TileAccess:
        start = op.settings["start"]
        return TileAccess((op.settings["end"] - start,), lambda at: at[0] + start)

    def _cast(self, op: ir.Op) -> TileAccess:
        tile, dtype = self._tile(op.operands[0], op.where), op.settings["dtype"]

        def at(indices: Indices) -> te.Expr:
            found = tile.at(indices)
            return found if found.dtype is DType.I64 and dtype.is_integer else _as(found, dtype)

        return replace(tile, at=at, buffer=tile.buffer if dtype is _dtype(op.operands[0]) else None)

    def _moved(self, op: ir.Op, shape: tuple[int, ...], indices: Callable[[Indices], Indices]) -> Lowered:
        found = self._value(op.operands[0], op.where)
        if isinstance(found, BlockPointer):
            refuse(f"`{op.name}` of a block pointer", op.where)
        if isinstance(found, Pointers):
            return Pointers(found.buffer, shape, lambda at: found.at(indices(at)))
        return TileAccess(shape, lambda at: found.at(indices(at)))

    def _broadcast(self, op: ir.Op) -> Lowered:
        found = self._value(op.operands[0], op.where)
        assert not isinstance(found, BlockPointer)
        shape, old = op.settings["shape"], found.shape
        assert broadcast_shapes(old, shape) == shape
        if old == shape:
            return found

        def indices(at: Indices) -> Indices:
            own = at[len(shape) - len(old) :]
            return tuple(each if size > 1 else te.as_index(0) for each, size in zip(own, old, strict=True))

        return self._moved(op, shape, indices)

    def _expand_dims(self, op: ir.Op) -> Lowered:
        found = self._value(op.operands[0], op.where)
        assert not isinstance(found, BlockPointer)
        axis = op.settings["axis"] % (len(found.shape) + 1)
        shape = (*found.shape[:axis], 1, *found.shape[axis:])
        return self._moved(op, shape, lambda at: (*at[:axis], *at[axis + 1 :]))

    def _trans(self, op: ir.Op) -> Lowered:
        found = self._value(op.operands[0], op.where)
        assert not isinstance(found, BlockPointer)
        order = op.settings["order"]
        shape = tuple(found.shape[axis] for axis in order)
        return self._moved(op, shape, lambda at: tuple(at[order.index(axis)] for axis in range(len(order))))

    # -- memory ---------------------------------------------------------------------------------------------------

    def _addptr(self, op: ir.Op) -> Pointers:
        pointer, offset = self._value(op.operands[0], op.where), self._tile(op.operands[1], op.where)
        assert isinstance(pointer, Pointers)
        return Pointers(pointer.buffer, pointer.shape, lambda at: simplify(pointer.at(at) + offset.at(at)))

    def _make_block_ptr(self, op: ir.Op) -> BlockPointer:
        base = self._value(op.operands[0], op.where)
        assert isinstance(base, Pointers)
        if simplify(base.at(())) != te.as_index(0):
            refuse(
                "the base of a block pointer must be a parameter",
                op.where,
                "put the distance into the offsets",
            )
        numbers = [self._number(each, op.where) for each in op.operands[1:]]
        rank = len(op.settings["block"])
        shape, strides, offsets = (tuple(numbers[n * rank : (n + 1) * rank]) for n in range(3))
        return BlockPointer(base.buffer, op.settings["block"], shape, strides, offsets)

    def _advance(self, op: ir.Op) -> BlockPointer:
        pointer = self._value(op.operands[0], op.where)
        assert isinstance(pointer, BlockPointer)
        by = [self._number(each, op.where) for each in op.operands[1:]]
        moved = tuple(simplify(old + new) for old, new in zip(pointer.offsets, by, strict=True))
        return replace(pointer, offsets=moved)

    def _load_block(self, op: ir.Op) -> TileAccess:
        pointer = self._value(op.operands[0], op.where)
        assert isinstance(pointer, BlockPointer)
        element, inside = _block(pointer, op.settings["check"])
        return self._loaded(pointer.buffer, pointer.block, element, inside, op.where)

    def _load(self, op: ir.Op) -> TileAccess:
        pointer = self._value(op.operands[0], op.where)
        assert isinstance(pointer, Pointers)
        mask = self._tile(op.operands[1], op.where) if len(op.operands) > 1 else None
        if len(op.operands) > 2:
            other = self._tile(op.operands[2], op.where).at(_zeros(pointer.shape))
            if not isinstance(other, te.Const) or other.value != 0:
                refuse("Gemmini's loads put zeros where a mask is false", op.where, "pass other=0")
        elif mask is not None:
            refuse("a masked load without `other` reads anything there", op.where, "pass other=0")
        return self._loaded(pointer.buffer, pointer.shape, pointer.at, mask.at if mask else None, op.where)

    def _loaded(
        self,
        source: Buffer,
        shape: tuple[int, ...],
        element: Callable[[Indices], te.Expr],
        inside: Callable[[Indices], te.Expr | None] | None,
        where: SourceLocation | None,
    ) -> TileAccess:
        if source.dtype not in (DType.I8, DType.I32):
            refuse(
                f"Gemmini loads int8 and int32, and `{source.name}` has {source.dtype.numpy.name}",
                where,
                "quantise the tensor, or run the kernel on the processor",
            )
        scope = SCRATCHPAD if source.dtype is DType.I8 else ACCUMULATOR
        buffer = self._buffer(source.name, source.dtype, scope, shape, where)
        loops, at = self._elements(shape)
        cond = None if inside is None else inside(at)
        if cond is not None:
            cond = simplify(cond)
        index, source_index = _flat(at, shape), simplify(element(at))
        copy = Copy(buffer, index, source, source_index, 1, None if cond == _TRUE else cond)
        self.stmts += [nest(loops, copy), Commit(), Await(0)]
        return TileAccess(shape, lambda at: te.Load(buffer, (_flat(at, shape),)), buffer)

    def _store_block(self, op: ir.Op) -> None:
        pointer = self._value(op.operands[0], op.where)
        assert isinstance(pointer, BlockPointer)
        element, inside = _block(pointer, op.settings["check"])
        self._stored(pointer.buffer, pointer.block, element, inside, op)

    def _store(self, op: ir.Op) -> None:
        pointer = self._value(op.operands[0], op.where)
        assert isinstance(pointer, Pointers)
        mask = self._tile(op.operands[2], op.where) if len(op.operands) > 2 else None
        self._stored(pointer.buffer, pointer.shape, pointer.at, mask.at if mask else None, op)

    def _stored(
        self,
        buffer: Buffer,
        shape: tuple[int, ...],
        element: Callable[[Indices], te.Expr],
        inside: Callable[[Indices], te.Expr | None] | None,
        op: ir.Op,
    ) -> None:
        tile = self._tile(op.operands[1], op.where)
        _check_rank(shape, op.where)
        loops, at = self._elements(shape)
        value = _as(tile.at(at), buffer.dtype)
        if isinstance(wrong := epilogue(value), str):
            refuse(wrong, op.where)
        self.where.setdefault(buffer.name, op.where)
        stmt: Stmt = Store(buffer, simplify(element(at)), value)
        cond = None if inside is None else inside(at)
        if cond is not None and simplify(cond) != _TRUE:
            stmt = If(simplify(cond), stmt)
        self.stmts.append(nest(loops, stmt))

    def _buffer(
        self, name: str, dtype: DType, scope: Scope, shape: tuple[int, ...], where: SourceLocation | None
    ) -> Buffer:
        _check_rank(shape, where)
        self.number += 1
        made = Buffer(f"{name}.{self.number}", dtype, shape[0] * shape[1], scope)
        self.tiles[made.name] = (shape[0], shape[1])
        self.where[made.name] = where
        return made

    def _elements(self, shape: tuple[int, ...]) -> tuple[list[tuple[te.Var, Kind]], Indices]:
        found = [te.Var(name, extent) for name, extent in zip("rc", shape, strict=True)]
        return [(each, Kind.UNROLL) for each in found], _indices(found)

    # -- sums -----------------------------------------------------------------------------------------------------

    def _sums(self, value: ir.Value, where: SourceLocation | None) -> TileAccess:
        """The value as a tile in the accumulator: the tile that is already there, or zeros."""
        tile = self._tile(value, where)
        if tile.buffer is not None and tile.buffer.scope is ACCUMULATOR:
            return tile
        _, at = self._elements(tile.shape)
        if _dtype(value) is not DType.I32 or _as(tile.at(at), DType.I32) != te.const(0, DType.I32):
            refuse(
                "sums must be int32 and start from zeros or from a tile that was loaded",
                where,
                "start from tl.zeros(shape, tl.int32)",
            )
        return self._zeros(tile.shape, where)

    def _zeros(self, shape: tuple[int, ...], where: SourceLocation | None) -> TileAccess:
        buffer = self._buffer("sums", DType.I32, ACCUMULATOR, shape, where)
        loops, at = self._elements(shape)
        self.stmts.append(nest(loops, Store(buffer, _flat(at, shape), te.const(0, DType.I32))))
        return TileAccess(shape, lambda at: te.Load(buffer, (_flat(at, shape),)), buffer)

    def _dot(self, op: ir.Op) -> TileAccess:
        a, b = (self._tile(each, op.where) for each in op.operands[:2])
        if any(_dtype(each) is not DType.I8 for each in op.operands[:2]):
            found = " and ".join(_dtype(each).numpy.name for each in op.operands[:2])
            refuse(f"Gemmini multiplies int8 by int8, and dot has {found}", op.where)
        if len(a.shape) != 2:
            refuse(f"Gemmini multiplies matrices, and dot has tiles of {len(a.shape)} axes", op.where)
        (m, k), n = a.shape, b.shape[1]
        sums = self._sums(op.operands[2], op.where) if len(op.operands) > 2 else self._zeros((m, n), op.where)
        if len(op.operands) > 2:
            self.taken.add(op.operands[2])
        assert sums.buffer is not None
        axes = [te.Var(name, extent) for name, extent in zip("mnk", (m, n, k), strict=True)]
        row, col, depth = _indices(axes)
        element = sums.at((row, col))
        assert isinstance(element, te.Load)
        product = te.cast(a.at((row, depth)), DType.I32) * te.cast(b.at((depth, col)), DType.I32)
        stmt = Store(sums.buffer, element.indices[0], te.call("add", element, product))
        loops = [(each, Kind.UNROLL) for each in axes]
        if isinstance(wrong := operands_of(stmt, axes, self.tiles), str):
            refuse(wrong, op.where)
        self.stmts.append(nest(loops, stmt))
        return sums

    # -- loops ----------------------------------------------------------------------------------------------------

    def _for(self, node: ir.For) -> None:
        lower, upper, step = (
            self._fixed(each, "the bounds of a loop", node.where)
            for each in (node.lower, node.upper, node.step)
        )
        count = len(range(lower, upper, step)) if step else 0
        init = [self._carried(value, node.where) for value in node.init]
        if count == 0:
            self.values.update(zip(node.results, init, strict=True))
            return
        self.number += 1
        var = te.Var(f"{node.body.params[0].name or 'loop'}.{self.number}", count)
        now: te.Expr = var if count > 1 else te.as_index(0)
        index = TileAccess((), lambda at: simplify(now * step + lower))
        steps = self._steps(node, index, init)
        entering = [
            _further(each, [by * now for by in each_step])
            for each, each_step in zip(init, steps, strict=True)
        ]
        body = self._inside(node, index, entering)
        self.stmts.append(nest([(var, Kind.SERIAL)], block(*body.stmts)))
        self.tiles, self.where, self.number = body.tiles, body.where, body.number
        self.taken |= body.taken
        leaving = [
            _further(each, [by * count for by in each_step])
            for each, each_step in zip(init, steps, strict=True)
        ]
        self.values.update(zip(node.results, leaving, strict=True))

    def _carried(self, value: ir.Value, where: SourceLocation | None) -> Lowered:
        found = self._value(value, where)
        if not isinstance(found, TileAccess) or (not found.shape and _dtype(value).is_integer):
            return found
        return self._sums(value, where)

    def _inside(self, node: ir.For, index: TileAccess, entering: Sequence[Lowered]) -> _Lowering:
        params = dict(zip(node.body.params, (index, *entering), strict=True))
        inner = _Lowering(
            self.ids,
            self.grid,
            {**self.values, **params},
            [],
            dict(self.tiles),
            dict(self.where),
            set(self.taken),
            self.number,
        )
        inner.block(node.body)
        return inner

    def _steps(self, node: ir.For, index: TileAccess, init: Sequence[Lowered]) -> list[list[int]]:
        """The increment per iteration of each number that the loop carries."""
        vars: list[list[te.Expr]] = []
        for at, each in enumerate(init):
            vars.append([te.Var(f"step.{self.number}.{at}.{n}", _ANYWHERE) for n in range(_count(each))])
        entering = [_further(each, which) for each, which in zip(init, vars, strict=True)]
        inner = self._inside(node, index, entering)
        steps = []
        for before, after, name in zip(entering, node.body.yields, node.results, strict=True):
            found = inner._value(after, node.where)
            by = [simplify(new - old) for new, old in zip(_numbers(found), _numbers(before), strict=True)]
            same = _count(found) == _count(before) and _fixed_parts(found) == _fixed_parts(before)
            if not same or not all(isinstance(each, te.Const) for each in by):
                refuse(
                    f"`{name.name}` changes from one iteration to the next by more than a fixed step",
                    node.where,
                    "advance pointers by the same distance in each iteration, and add to sums by tl.dot(a, b, sums)",
                )
            steps.append([int(each.value) for each in by if isinstance(each, te.Const)])
        return steps


_TRUE = te.const(True, DType.BOOL)


def _dtype(value: ir.Value) -> DType:
    assert isinstance(value.type, ir.TileType)
    return value.type.dtype


def _as(expr: te.Expr, dtype: DType) -> te.Expr:
    if isinstance(expr, te.Const):
        return te.const(expr.value, dtype)
    return expr if expr.dtype is dtype else te.cast(expr, dtype)


def _indices(found: Sequence[te.Var]) -> Indices:
    return tuple(each if each.extent > 1 else te.as_index(0) for each in found)


def _zeros(shape: tuple[int, ...]) -> Indices:
    return tuple(te.as_index(0) for _ in shape)


def _flat(at: Indices, shape: tuple[int, ...]) -> te.Expr:
    return simplify(at[0] * shape[1] + at[1])


def _check_rank(shape: tuple[int, ...], where: SourceLocation | None) -> None:
    if len(shape) != 2:
        refuse(
            f"Gemmini's memories hold tiles of rows and columns, and this one has shape {shape}",
            where,
            "add an axis with x[:, None] or x[None, :]",
        )


def _block(
    pointer: BlockPointer, check: Sequence[int]
) -> tuple[Callable[[Indices], te.Expr], Callable[[Indices], te.Expr | None]]:
    """The element of a block at an index, and whether it is inside the tensor."""

    def element(at: Indices) -> te.Expr:
        total: te.Expr = te.as_index(0)
        for index, offset, stride in zip(at, pointer.offsets, pointer.strides, strict=True):
            total = total + (index + offset) * stride
        return simplify(total)

    def inside(at: Indices) -> te.Expr | None:
        found = []
        for axis in check:
            index = at[axis] + pointer.offsets[axis]
            found += [te.call("le", te.as_index(0), index), te.call("lt", index, pointer.shape[axis])]
        return te.all_of([simplify(each) for each in found])

    return element, inside


# -- numbers that a loop carries --------------------------------------------------------------------------------------


def _count(value: Lowered) -> int:
    if isinstance(value, BlockPointer):
        return len(value.offsets)
    return 0 if isinstance(value, TileAccess) and value.buffer is not None else 1


def _numbers(value: Lowered) -> list[te.Expr]:
    if isinstance(value, BlockPointer):
        return list(value.offsets)
    if isinstance(value, TileAccess) and value.buffer is not None:
        return []
    return [value.at(tuple(te.Var(f"at.{axis}", size) for axis, size in enumerate(value.shape)))]


def _fixed_parts(value: Lowered) -> Any:
    if isinstance(value, BlockPointer):
        return value.buffer, value.block, value.shape, value.strides
    return type(value), value.shape, value.buffer


def _further(value: Lowered, by: Sequence[te.Expr | int]) -> Lowered:
    """The value, moved by the given offsets."""
    if not by:
        return value
    if isinstance(value, BlockPointer):
        moved = tuple(simplify(old + new) for old, new in zip(value.offsets, by, strict=True))
        return replace(value, offsets=moved)
    return replace(value, at=lambda at: simplify(value.at(at) + by[0]))
