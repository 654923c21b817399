"""Depthwise convolutions: a window over each channel separately, with channels in the vector lanes.

    for every chunk of rows and block of channels:                  (parallel)
      for every row:
        for every `columns` neighbouring results of the row:
          for every vector of channels of the block:
            acc[columns] = sum over the window of data * weight
            out = epilogue(acc)

Neighbouring results share loaded values in registers. Zero padding costs nothing: results at the left and right end
have their own tiles at known columns, so code generation omits the taps outside the image; rows at the top and bottom
branch on each row of the window.

If channels are stored in blocks, the loop over vectors is outside the loop over rows, so that memory is accessed in a
few long runs.

`window_sums` and `stage_value` also serve the chains of `separable.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, input_node, rebuild
from tilewright.graph.lower import lower_graph
from tilewright.graph.separable import ConvStage, Separable, WindowAxis, separable_of
from tilewright.loops.ir import Buffer, For, If, Kind, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import Tiles, power_of_two_below, with_values
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import Applied, Terms, Work
from tilewright.support.arith import ceil_div
from tilewright.te.index import in_range, simplify

NAME = "depthwise"
_STREAMS = 24  # that the hardware prefetchers track
F32 = DType.F32
_WRITTEN_OUT = 1200  # maximum FMAs unrolled: code size and compile time

Position = Sequence[te.Expr]  # an index: batch, row, column, channel; or the block and the channel within it
ValueOf = Callable[[te.Expr, Position], te.Expr]


def stage_value(stage: ConvStage, inputs: Sequence[Node], buffers: Mapping[Node, Buffer]) -> ValueOf:
    """The elementwise nodes after a convolution as a function of its sum and the element's index."""
    if stage.last is stage.conv:
        return lambda total, position: total
    summed = input_node(len(inputs), stage.conv.type)

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        return summed if node is stage.conv else None

    after = rebuild(Graph(tuple(inputs), (stage.last,)), rule)
    output, tensors = lower_graph(Graph((*inputs, summed), after.outputs))
    sources = dict(zip(tensors, (*(buffers[node] for node in inputs), None), strict=True))

    def element(tensor: te.Source, position: Position, total: te.Expr) -> te.Expr:
        if isinstance(tensor, te.Compute):
            body = te.substitute(tensor.body, dict(zip(tensor.axes, position, strict=True)))
            return te.rewrite(body, lambda node: read(node, total))
        assert isinstance(tensor, te.Tensor)
        buffer = sources[tensor]
        return total if buffer is None else te.Load(buffer, (offset(position, tensor.shape),))

    def read(node: te.Expr, total: te.Expr) -> te.Expr | None:
        if isinstance(node, te.Load) and isinstance(node.source, te.Tensor):
            return element(node.source, node.indices, total)
        return None

    return lambda total, position: element(output, position, total)


def offset(position: Position, shape: Sequence[int]) -> te.Expr:
    total: te.Expr = te.as_index(0)
    for index, extent in zip(position, shape, strict=True):
        total = total * extent + index
    return simplify(total)


@dataclass(frozen=True)
class WindowAccumulators:
    """Neighbouring results of a row, and how their operands are read."""

    rows: WindowAxis
    columns: WindowAxis
    count: int  # results
    lane: te.Var
    accumulator: Buffer
    data: Callable[[int, te.Expr], te.Expr]  # (row of the window, column of the source) -> element
    weight: Callable[[int, int], te.Expr]

    def element(self, result: int) -> te.Expr:
        return self.lane + result * self.lane.extent

    def stmt(self, first: int | te.Expr, inside: Callable[[int], te.Expr | None] | None = None) -> Stmt:
        """Compute the sums of the results from column `first` on. If `first` is a number, taps beyond the ends are
        omitted; otherwise there are none. `inside`: whether a row of the window is in the image."""
        width, stride = self.columns.extent, self.columns.stride
        begun = set(range(self.count)) if inside else set()
        stmts: list[Stmt] = [self._zero(result) for result in sorted(begun)]
        for ky in range(self.rows.taps):
            taken: list[Stmt] = []
            for kx in range(self.columns.taps):
                for result in range(self.count):
                    reach = result * stride + kx * self.columns.dilation - self.columns.before
                    if isinstance(first, int) and not 0 <= first * stride + reach < width:
                        continue
                    column = simplify(te.as_index(first) * stride + reach)
                    product = (self.data(ky, column), self.weight(ky, kx))
                    at = self.element(result)
                    total = te.Load(self.accumulator, (at,))
                    value = te.call("fma", *product, total) if result in begun else te.call("mul", *product)
                    begun.add(result)
                    taken.append(Store(self.accumulator, at, value))
            row = For(self.lane, Kind.VECTOR, block(*taken)) if taken else None
            condition = inside(ky) if inside else None
            if row is not None:
                stmts.append(row if condition is None else If(condition, row))
        stmts.extend(self._zero(result) for result in range(self.count) if result not in begun)
        return block(*stmts)

    def _zero(self, result: int) -> Stmt:
        return For(self.lane, Kind.VECTOR, Store(self.accumulator, self.element(result), te.const(0, F32)))

    def results(self, write: Callable[[int, te.Expr], Store]) -> Stmt:
        """Call `write(result, its sum)` for all of them."""
        stores = [write(n, te.Load(self.accumulator, (self.element(n),))) for n in range(self.count)]
        return For(self.lane, Kind.VECTOR, block(*stores))


def column_tiles(window: WindowAxis, count: int) -> tuple[list[int], Tiles | None, int]:
    """(columns where tiles begin that touch an end or stand alone, number of tiles in between, where those begin)."""
    outputs = window.outputs
    everywhere = [*range(0, outputs - count + 1, count)]
    if everywhere[-1] + count < outputs:
        everywhere.append(outputs - count)
    if len(everywhere) <= 3:
        return everywhere, None, 0
    first_inside = ceil_div(window.before, window.stride)
    last_inside = (window.extent - window.reach + window.before) // window.stride
    left = [start for start in everywhere if start < first_inside]
    begin = left[-1] + count if left else 0
    right: list[int] = []
    end = outputs
    while end - 1 > last_inside:
        end -= count
        right.append(end)
    if end - begin < count:
        return everywhere, None, 0
    return left + right[::-1], Tiles(te.Var("x", end - begin), count), begin


def task_buffers(chain: Separable) -> dict[Node, Buffer]:
    return {
        node: Buffer(f"x{number}", node.dtype, node.type.size)
        for number, node in enumerate(chain.task.graph.inputs)
    }


def pixel(
    chain: Separable, batch: te.Expr, row: te.Expr, column: te.Expr, channel: te.Expr, lane: te.Var
) -> Position:
    """The index of a lane of the vector of channels that begins at `channel`."""
    if not chain.block:
        return (batch, row, column, channel + lane)
    return (batch, channel // chain.block, row, column, channel % chain.block + lane)


def image_rows(row: te.Expr, window: WindowAxis, ky: int | None = None) -> te.Expr | None:
    """Whether row `ky` of the window of result `row` is in the image (None: whether all rows are); None: always."""
    first = row * window.stride - window.before
    if ky is not None:
        return in_range(first + ky * window.dilation, window.extent)
    above, below = in_range(first, window.extent), in_range(first + (window.reach - 1), window.extent)
    return te.all_of([condition for condition in (above, below) if condition is not None])


class RowAccumulators:
    """One row of results from a source in memory: statements for tiles at the ends and in between, with the row
    inside."""

    def __init__(
        self,
        chain: Separable,
        buffers: Mapping[Node, Buffer],
        lanes: int,
        count: int,
    ) -> None:
        self.chain, self.count = chain, count
        self.lane = te.Var("v", lanes)
        self.source = buffers[chain.source]
        self.shape = chain.source.shape
        self.kernel = buffers[chain.depthwise.weight]
        self.accumulator = Buffer("window", F32, count * lanes, Scope.REGISTER)

    def stmt(
        self,
        batch: te.Expr,
        row: te.Expr,
        channel: te.Expr,
        loops: Sequence[te.Var],
        write: Callable[[te.Expr, te.Expr], Store],
    ) -> Stmt:
        """Call `write(column, sum)` for every result of the row, at the channels from `channel` on; `loops` iterate
        over these, inside the loop over columns."""
        chain, channels = self.chain, self.chain.depthwise.channels
        taps = chain.columns.taps

        def data(ky: int, column: te.Expr) -> te.Expr:
            y = row * chain.rows.stride + (ky * chain.rows.dilation - chain.rows.before)
            position = pixel(chain, batch, y, column, channel, self.lane)
            return te.Load(self.source, (offset(position, self.shape),))

        def weight(ky: int, kx: int) -> te.Expr:
            return te.Load(self.kernel, ((ky * taps + kx) * channels + channel + self.lane,))

        sums = WindowAccumulators(
            chain.rows, chain.columns, self.count, self.lane, self.accumulator, data, weight
        )
        ends, between, begin = column_tiles(chain.columns, self.count)

        def tiles(inside: Callable[[int], te.Expr | None] | None) -> Stmt:
            def tile(first: int | te.Expr) -> Stmt:
                written = sums.results(lambda n, total: write(te.as_index(first) + n, total))
                return nest([(loop, Kind.SERIAL) for loop in loops], block(sums.stmt(first, inside), written))

            stmts = [tile(first) for first in ends]
            if between is not None:
                stmts.append(nest([(between.var, Kind.SERIAL)], tile(between.start() + begin)))
            return block(*stmts)

        all_inside = image_rows(row, chain.rows)
        if all_inside is None:
            return tiles(None)
        return If(all_inside, tiles(None), tiles(lambda ky: image_rows(row, chain.rows, ky)))


def written_out(chain: Separable, count: int) -> int:
    """FMAs in the code for tiles of `count` results."""
    ends, between, _ = column_tiles(chain.columns, count)
    variants = (len(ends) + (between is not None)) * (2 if chain.rows.before or chain.rows.after else 1)
    return variants * count * chain.rows.taps * chain.columns.taps


# -- the template -----------------------------------------------------------------------------------------------------


class Depthwise:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        chain = separable_of(work.task)
        if chain is None or chain.expand is not None or chain.project is not None:
            return None
        return _AppliedDepthwise(work, chain)


class _AppliedDepthwise:
    def __init__(self, work: Work, chain: Separable) -> None:
        self.work, self.chain = work, chain
        together = chain.block or chain.depthwise.channels
        self.lanes = min(work.machine.lanes(F32), power_of_two_below(together))
        self.vectors = ceil_div(chain.depthwise.channels, self.lanes)

    @cached_property
    def space(self) -> Space:
        rows = self.chain.rows.outputs
        chunks = dict.fromkeys(ceil_div(rows, count) for count in (1, 2, 3, 4, 6, 8, 12, 16, 28, 56))
        # Threads that write neighbouring channels must not share a cache line.
        line = self.work.machine.line_bytes
        whole_lines = 4 * self.chain.depthwise.channels % line == 0 and 4 * self.lanes % line == 0
        blocks = (1, 2, 4, 8, 16) if whole_lines else (1,)
        return Space(
            NAME,
            (
                Knob("columns", column_choices(self.chain)),
                Knob("rows", tuple(chunks)),
                Knob("blocks", tuple(n for n in blocks if n <= self.vectors)),
            ),
            self._legal,
            together=(("rows", "blocks"),),
        )

    def _legal(self, values: Mapping[str, Value]) -> bool:
        blocks = int(values["blocks"])
        return ceil_div(self.vectors, blocks) * (blocks - 1) < self.vectors

    def terms(self, config: Config) -> Terms:
        chain, count = self.chain, config.int("columns")
        chunks = ceil_div(chain.rows.outputs, config.int("rows"))
        blocks = config.int("blocks")
        per_block = ceil_div(self.vectors, blocks)
        rows = chain.batch * chunks * config.int("rows")
        across = Tiles(te.Var("x", chain.columns.outputs), count).count
        tiles = rows * across * blocks * per_block
        taps = chain.rows.taps * chain.columns.taps
        seen = window_loads(chain, count)
        scattered = 0.0
        caches = self.work.machine.caches
        if chain.source.type.bytes > caches.l2_per_core and not chain.block:
            scattered = 2.0 * max(0, seen - _STREAMS)
        # Rows that two chunks share are still in L2.
        source = chain.source.type.bytes
        halo = source * (chain.rows.reach - chain.rows.stride) / config.int("rows")
        # The rows under a window stay in L1 with the row that is written, or are loaded again for each.
        pixels = chain.rows.reach * chain.columns.padded + chain.columns.outputs
        window = 4 * pixels * self.lanes * (1 if chain.block else per_block)
        again = 1.0 if window <= 0.75 * caches.l1 else chain.rows.reach / chain.rows.stride
        moved = source + 2.0 * chain.task.output.type.bytes
        near = caches.keep((source + chain.task.output.type.bytes) / self.work.machine.cores)
        # Lines are loaded in pairs. If threads share pixels, a pair at the border of their channels bounces between
        # cores; if data comes from beyond L2, half of the pair is evicted before the next channels need it.
        torn = 0.0
        if blocks > 1 and not chain.block:
            torn = self._torn(chain.batch * chunks, blocks) if near else 1.0
        return Terms(
            arithmetic=tiles * count * (taps + after(chain.depthwise)),
            loads=tiles * (seen + taps),
            stores=tiles * count,
            branches=2.0 * tiles,
            from_l2=source * again + halo + (moved if near else 0.0),
            from_l3=moved * (torn / per_block + (0.0 if near else 1.0)),
            iterations=chain.batch * chunks * blocks,
            scalar=tiles * (4.0 + scattered),
        )

    def _torn(self, chunks: int, blocks: int) -> float:
        """The share of row chunks whose blocks of channels go to different threads."""
        threads = min(self.work.machine.cores, chunks * blocks)
        ends = (ceil_div(chunks * blocks * thread, threads) for thread in range(1, threads))
        return min(1.0, sum(end % blocks != 0 for end in ends) / chunks)

    def program(self, config: Config) -> Program:
        chain, count = self.chain, config.int("columns")
        buffers = task_buffers(chain)
        inputs = chain.task.graph.inputs
        out = Buffer("out", F32, chain.task.output.type.size)
        rows = Tiles(te.Var("y", chain.rows.outputs), config.int("rows"))
        blocks = config.int("blocks")
        groups = Tiles(te.Var("g", self.vectors), ceil_div(self.vectors, blocks))
        parallel = te.Var("p", chain.batch * rows.count * groups.count)
        group = parallel % groups.count
        chunk = (parallel // groups.count) % rows.count
        batch = parallel // (groups.count * rows.count)
        y, vector = te.Var("yi", rows.size), te.Var("gi", groups.size)
        row = rows.start_of(chunk) + y
        channels = Tiles(te.Var("c", chain.depthwise.channels), self.lanes)
        channel = channels.start_of(groups.start_of(group) + vector)
        value = stage_value(chain.depthwise, inputs, buffers)
        line = RowAccumulators(chain, buffers, self.lanes, count)

        def write(column: te.Expr, total: te.Expr) -> Store:
            position = pixel(chain, batch, row, column, channel, line.lane)
            return Store(out, offset(position, chain.task.output.shape), value(total, position))

        outer, inner = ([vector, y], []) if chain.block else ([y], [vector])
        body = nest([(loop, Kind.SERIAL) for loop in outer], line.stmt(batch, row, channel, inner, write))
        program = with_values(nest([(parallel, Kind.PARALLEL)], body), {})
        return Program("kernel", (*(buffers[node] for node in inputs), out), program, str(config))


def column_choices(chain: Separable) -> tuple[int, ...]:
    outputs = chain.columns.outputs
    choices = [n for n in (2, 4, 5, 6, 7, 8, 10) if n < outputs] + ([outputs] if outputs <= 10 else [])
    return tuple(n for n in choices if written_out(chain, n) <= _WRITTEN_OUT) or (min(outputs, 2),)


def window_loads(chain: Separable, count: int) -> int:
    """Vectors of the source that `count` neighbouring results read."""
    columns = chain.columns
    return chain.rows.taps * min((count - 1) * columns.stride + columns.reach, count * columns.taps)


def after(stage: ConvStage) -> int:
    """Approximate instructions per vector for the elementwise nodes after a convolution."""
    nodes, node = 0, stage.last
    while node is not stage.conv:
        nodes += 2
        node = next(operand for operand in node.inputs if not operand.is_input and not operand.is_constant)
    return nodes
