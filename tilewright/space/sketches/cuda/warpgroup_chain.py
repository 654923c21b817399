"""Two GEMMs of 16-bit floats in one kernel of the tile language, by the instructions of warpgroups (`wgmma`, sm_90a).

    y = gelu(x @ a + c) -> y @ b + d

A block has BM rows and all columns of both products. The first product's sums are, after its bias and activation and
rounded to 16 bits, the left operand of the second, which `wgmma` takes from the registers that they are in. The other
operands are in shared memory. The template `tensor-core-chain` is the same with `mma.sync`, for any number of products
and for windows. This is a sketch because no measured times stand behind its predictions: only tuning chooses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import tilewright.tile as tl
from tilewright.dtypes import DType
from tilewright.graph.chain import CONTRACTIONS, NORMS, Refused
from tilewright.graph.ir import Node
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.gpu.tensor import MatrixOperand
from tilewright.space.chain import Stage
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import Applied, GpuWork
from tilewright.space.templates.cuda.chain import chain_work
from tilewright.space.tile_operator import TileCall
from tilewright.support.arith import ceil_div
from tilewright.tile.ir import Pointer, TileType
from tilewright.tile.kernel import kernel

NAME = "sketch:warpgroup-chain"
_ACTIVATIONS = ("relu", "silu", "gelu", "tanh")
_MIN_SIZE = 16  # columns and steps of k that an instruction takes
_MAX_REGISTERS = 190  # of a thread for sums and the left operand
_WARPGROUP = 4  # warps


@kernel
def _activated(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "tanh":
        x = tl.tanh(x)
    return x


@kernel
def _ended(  # type: ignore[no-untyped-def]
    x, bias, more, rows, columns, M,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, MORE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    if BIAS:
        x = x + tl.load(bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
    if MORE:
        inside = (rows[:, None] < M) & (columns[None, :] < WIDTH)
        at = rows[:, None] * WIDTH + columns[None, :]
        x = x + tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
    return _activated(x, ACTIVATION)


@kernel
def _weight(b, k, columns, K: tl.constexpr, N: tl.constexpr, BY_COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = k[:, None] * N + columns[None, :]
    if BY_COLUMNS:
        at = columns[None, :] * K + k[:, None]
    return tl.load(b + at, mask=(k[:, None] < K) & (columns[None, :] < N), other=0.0)


@kernel
def chained(  # type: ignore[no-untyped-def]
    x, a, bias1, more1, b, bias2, more2, out, M, K: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BN1: tl.constexpr, BN2: tl.constexpr,
    BY_COLUMNS1: tl.constexpr, BIAS1: tl.constexpr, MORE1: tl.constexpr, ACTIVATION1: tl.constexpr,
    BY_COLUMNS2: tl.constexpr, BIAS2: tl.constexpr, MORE2: tl.constexpr, ACTIVATION2: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    first, second = tl.arange(0, BN1), tl.arange(0, BN2)
    sums = tl.zeros((BM, BN1), tl.float32)
    for start in range(0, K, BK):  # type: ignore[call-overload]
        k = start + tl.arange(0, BK)
        left = tl.load(
            x + rows[:, None] * K + k[None, :], mask=(rows[:, None] < M) & (k[None, :] < K), other=0.0
        )
        sums = tl.dot(left, _weight(a, k, first, K, N1, BY_COLUMNS1), sums)
    between = _ended(sums, bias1, more1, rows, first, M, N1, BIAS1, MORE1, ACTIVATION1)
    between = tl.where(first[None, :] < N1, between, 0.0).to(x.dtype.element_ty)
    results = tl.dot(between, _weight(b, first, second, N1, N2, BY_COLUMNS2), tl.zeros((BM, BN2), tl.float32))
    results = _ended(results, bias2, more2, rows, second, M, N2, BIAS2, MORE2, ACTIVATION2)
    inside = (rows[:, None] < M) & (second[None, :] < N2)
    tl.store(out + rows[:, None] * N2 + second[None, :], results.to(x.dtype.element_ty), mask=inside)


# -- which chains -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """What follows a product, in this order; the numbers of the task's inputs."""

    weight: int
    by_columns: bool  # whether the weight has rows of k
    bias: int | None
    more: int | None
    activation: str


@dataclass(frozen=True)
class WarpgroupWork:
    work: GpuWork
    m: int
    k: int
    widths: tuple[int, int]
    source: int
    endings: tuple[Ending, Ending]
    dtype: DType


def warpgroup_work(work: GpuWork) -> WarpgroupWork | Refused:
    """Match a task; Refused if a block of warpgroups cannot compute it."""
    if not work.machine.warpgroup_mma:
        return Refused(f"{work.machine.capability} has no instructions of warpgroups")
    found = chain_work(work)
    if isinstance(found, Refused):
        return found
    if len(found.products) != 2:
        return Refused("a block of warpgroups computes two products")
    first = found.first.left
    m, _, k = found.first.sizes
    if not isinstance(first, MatrixOperand) or first.transposed or first.pitch != k:
        return Refused("the first GEMM does not read rows of a matrix")
    if any(not isinstance(product.right, MatrixOperand) for product in found.products):
        return Refused("the weight of a GEMM is computed")
    endings = []
    for stage in found.stages:
        ending = _ending(stage)
        if isinstance(ending, Refused):
            return ending
        endings.append(ending)
    source = found.stages[0].sub.operands[0]
    one, two = found.widths
    return WarpgroupWork(
        work, m, k, (one, two), source.attrs["index"], (endings[0], endings[1]), found.first.dtype
    )


def _ending(stage: Stage) -> Ending | Refused:
    """The bias, what is added, and the activation of a stage, at most one each and in this order."""
    graph = stage.sub.task.graph
    numbers = {
        node: operand.attrs["index"] if operand.is_input else -1
        for node, operand in zip(graph.inputs, stage.sub.operands, strict=True)
    }
    nodes = [node for node in graph.nodes() if not (node.is_input or node.is_constant)]
    nodes = [node for node in nodes if node.op != "reshape"]
    anchor, *rest = nodes
    if anchor.op not in CONTRACTIONS or anchor.op == "conv" or len(anchor.inputs) != 2:
        return Refused(f"{stage.sub.task.label} is not a matmul or a linear layer")
    bias: int | None = None
    more: int | None = None
    activation = ""
    before = anchor
    for node in rest:
        other = [operand for operand in node.inputs if operand is not before]
        if activation or before not in node.inputs:
            return Refused(f"{node.op} is not a bias, a sum or an activation")
        if node.op == "add" and len(other) == 1 and other[0] in numbers:
            if other[0].shape == anchor.shape[-1:] and bias is None and more is None:
                bias = numbers[other[0]]
            elif other[0].shape == anchor.shape and more is None:
                more = numbers[other[0]]
            else:
                return Refused("it adds more than a bias and a tensor of the result's shape")
        elif node.op in _ACTIVATIONS and _is_exact(node):
            activation = node.op
        else:
            return Refused(f"{node.op} is not a bias, a sum or an activation")
        before = node
    weight = anchor.inputs[1]
    if weight not in numbers:
        return Refused("the weight of a GEMM is computed")
    return Ending(numbers[weight], anchor.op == "linear", bias, more, activation)


def _is_exact(node: Node) -> bool:
    return node.attrs.get("approximate", "none") == "none"


class WarpgroupChain:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        if any(node.op in NORMS for node in work.task.graph.nodes()):
            return None
        found = warpgroup_work(work)
        return None if isinstance(found, Refused) else AppliedWarpgroupChain(found)


class AppliedWarpgroupChain:
    def __init__(self, chain: WarpgroupWork) -> None:
        self.chain = chain
        self.machine: GpuMachine = chain.work.machine

    @cached_property
    def blocks(self) -> tuple[int, int]:
        """Columns of a block for each product: powers of two."""
        one, two = (max(_MIN_SIZE, 1 << (width - 1).bit_length()) for width in self.chain.widths)
        return one, two

    @cached_property
    def space(self) -> Space:
        knobs = (
            Knob("bm", (64, 128, 256)),
            Knob("bk", (32, 64)),
            Knob("warps", (4, 8)),
            Knob("stages", (2, 3, 4)),
        )
        return Space(NAME, knobs, self._legal, together=(("bm", "bk", "warps", "stages"),))

    def _legal(self, values: Mapping[str, Value]) -> bool:
        """A warpgroup has 64 rows or more; all operands are in shared memory, and all sums in registers."""
        bm, bk, warps, stages = (int(values[name]) for name in ("bm", "bk", "warps", "stages"))
        one, two = self.blocks
        if bm * _WARPGROUP // warps < 64 or (bk > 32 and bk >= 2 * self.chain.k):
            return False
        shared = 2 * (stages * (bm + one) * bk + one * two) + 4 * bm * two
        each = bm * (one + one // 2 + two) // (32 * warps)
        return shared <= self.machine.shared_block and each <= _MAX_REGISTERS

    def terms(self, config: Config) -> None:
        """They are counted in the tile program."""

    def program(self, config: Config) -> TileCall:
        chain, values = self.chain, dict(config.values)
        one, two = chain.endings
        absent = chain.source
        count = len(chain.work.task.graph.inputs)
        operands = {
            "x": chain.source, "a": one.weight, "b": two.weight, "out": count,
            "bias1": absent if one.bias is None else one.bias, "more1": absent if one.more is None else one.more,
            "bias2": absent if two.bias is None else two.bias, "more2": absent if two.more is None else two.more,
        }  # fmt: skip
        constants: dict[str, object] = {
            "K": chain.k, "N1": chain.widths[0], "N2": chain.widths[1], "BM": values["bm"], "BK": values["bk"],
            "BN1": self.blocks[0], "BN2": self.blocks[1],
        }  # fmt: skip
        for number, ending in enumerate(chain.endings, 1):
            constants |= {
                f"BY_COLUMNS{number}": ending.by_columns, f"BIAS{number}": ending.bias is not None,
                f"MORE{number}": ending.more is not None, f"ACTIVATION{number}": ending.activation,
            }  # fmt: skip
        types = {name: TileType(Pointer(chain.dtype)) for name in operands}
        program = chained.specialise({**types, "M": TileType(DType.I32)}, constants)
        nodes = (*chain.work.task.graph.inputs, chain.work.task.output)
        return TileCall(
            "warpgroup_chain",
            program,
            (ceil_div(chain.m, int(values["bm"])), 1, 1),
            tuple(operands.get(param.name) for param in program.params),
            tuple(0 if param.name in operands else chain.m for param in program.params),
            tuple((node.dtype, node.type.size) for node in nodes),
            (("warps", values["warps"]), ("stages", values["stages"])),
        )
