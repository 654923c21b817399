"""`tile_kernel`: an operator whose meaning is its reference graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright.tile as tl
from tests.graph.ops.checks import F32, Case, lowering_params, node_of, oracle_of, run_lowering
from tilewright.errors import TypeRuleError
from tilewright.graph.ir import Graph
from tilewright.graph.op import flops_of
from tilewright.graph.oracle import evaluate
from tilewright.graph.text import parse_graph, print_graph
from tilewright.graph.tile_operator import inlined
from tilewright.space.tile_operator import TileArgument, TileOperator, TileVariant
from tilewright.support.bundle import bundle_of

REFERENCE = """
%x = input {index=0} : f32[6,5]
%y = input {index=1} : f32[6,5]
%2 = constant [2.0] : f32[]
%3 = mul(%x, %2) : f32[6,5]
%4 = add(%3, %y) : f32[6,5]
return %4
"""


def axpy(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, 2.0 * tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


KERNEL = TileOperator(
    bundle_of(axpy),
    (
        *(TileArgument(name, "f32", operand=number) for number, name in enumerate(("x", "y", "out"))),
        TileArgument("n", "i32", number="30"),
    ),
    (),
    tuple(TileVariant((("BLOCK", block),), (-(-30 // block), 1, 1)) for block in (16, 8)),
)
ATTRS: dict[str, Any] = {"operator": "test::axpy", "kernel": KERNEL.text(), "reference": REFERENCE}
CASES = [Case("tile_kernel", [(6, 5), (6, 5)], ATTRS, lambda x, y: 2 * x + y, dtypes=(F32,))]


@pytest.mark.parametrize(("case", "dtype"), lowering_params(CASES))
def test_lowering(case: Case, dtype: Any) -> None:
    run_lowering(case, dtype)


def test_torch() -> None:
    x, y = CASES[0].arrays(F32)
    assert np.allclose(oracle_of("tile_kernel", [x, y], **ATTRS), 2 * x + y)


def test_inlining_keeps_the_meaning() -> None:
    arrays = CASES[0].arrays(F32)
    node = node_of("tile_kernel", arrays, ATTRS)
    graph = Graph(node.inputs, (node,))
    plain = inlined(graph)
    assert [each.op for each in plain.nodes()][2:] == ["constant", "mul", "add"]
    assert np.array_equal(evaluate(graph, arrays)[0], evaluate(plain, arrays)[0])
    assert flops_of(node) == sum(map(flops_of, plain.nodes()))
    assert print_graph(parse_graph(print_graph(graph), {})) == print_graph(graph)


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeRuleError, match="test::axpy takes"):
        node_of("tile_kernel", [np.zeros((6, 4), np.float32)] * 2, ATTRS)
