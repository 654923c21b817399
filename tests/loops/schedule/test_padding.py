"""The primitives `pad` and `widen`, `cache_read` with an order, and tiles in registers without gaps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.loops import formulas
from tests.loops.schedule.examples import chain, check_meaning
from tests.loops.schedule.test_primitives import of, shows
from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import ScheduleError
from tilewright.loops.schedule import Schedule, from_json, replay, to_json
from tilewright.loops.schedule.nest import find_leaf
from tilewright.loops.schedule.patches import Patches, patches_of
from tilewright.loops.schedule.vectors import over_lanes
from tilewright.te.index import linear

F32 = DType.F32
MATMUL = formulas.matmul(5, 6, 7)


def copied() -> Schedule:
    return of(MATMUL).cache_read("a", "product").cache_read("b", "product")


def test_pad_rounds_up_and_its_operands_are_zero() -> None:
    schedule = copied().pad("product", [4, 1], [4])
    shows(
        schedule,
        MATMUL,
        """
        scratch a.of.product: f32[8, 8]
        scratch b.of.product: f32[8, 6]
        scratch product: f32[8, 6]
        serial a.of.product.i0 < 8:
          serial a.of.product.i1 < 8:
            a.of.product[a.of.product.i0, a.of.product.i1] = (a[a.of.product.i0, a.of.product.i1] if ((a.of.product.i0 < 5) & (a.of.product.i1 < 7)) else 0.0f32)
        serial b.of.product.i0 < 8:
          serial b.of.product.i1 < 6:
            b.of.product[b.of.product.i0, b.of.product.i1] = (b[b.of.product.i0, b.of.product.i1] if (b.of.product.i0 < 7) else 0.0f32)
        serial product.i0 < 8:
          serial product.i1 < 6:
            serial product.r0 < 8:
              product[product.i0, product.i1] += (a.of.product[product.i0, product.r0] * b.of.product[product.r0, product.i1])
        serial out.i0 < 5:
          serial out.i1 < 6:
            out[out.i0, out.i1] = max((product[out.i0, out.i1] + bias[out.i1]), 0.0f32)
        """,  # noqa: E501
    )
    again = replay(from_json(to_json(schedule.trace)), of(MATMUL))
    assert str(again) == str(schedule)


def test_a_padded_sum_of_several_terms_means_the_same() -> None:
    """Of two operands that are zero beyond the end, and one that is not read there."""
    check_meaning(copied().pad("product", [8, 8], [3]), MATMUL)


def test_widen_leaves_a_gap_after_each_row() -> None:
    schedule = of(MATMUL).cache_read("a", "product").widen("a.of.product", 3)
    assert "scratch a.of.product: f32[5, 7], rows of 10\n" in str(schedule)
    tile = find_leaf(schedule.nest, "a.of.product")[1].target
    assert tile.size == 5 * 10 and tile.shape == (5, 7)
    check_meaning(schedule, MATMUL, native=True)


def test_cache_read_in_another_order() -> None:
    schedule = of(MATMUL).cache_read("a", "product", order=[1, 0])
    assert find_leaf(schedule.nest, "a.of.product")[1].target.shape == (7, 5)
    check_meaning(schedule, MATMUL, native=True)


def two_factors(operand: Callable[[te.Tensor, te.Expr], te.Expr], kind: str = "sum") -> Schedule:
    x, y = te.Tensor("x", (8,), F32), te.Tensor("y", (5, 8), F32)
    (r,) = te.reduce_axes([8])
    total = te.compute("total", (5,), F32, lambda i: te.reduce_over(kind, y[i, r] * operand(x, r), [r]))
    return Schedule.of(te.compute("out", (5,), F32, lambda i: total[i] + 1.0), [x, y])


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no sum": (lambda: of(chain(5, 13)).pad("scaled", [4, 4], []), "stage scaled is not a sum of products"),
    "a maximum": (
        lambda: two_factors(lambda x, r: x[r], "max").pad("total", [4], [1]),
        "not a sum of products",
    ),
    "the output": (
        lambda: of(formulas.matmul(5, 6, 7)).pad("out", [4, 4], []),
        "stage out is not a sum of products",
    ),
    "other ranks": (lambda: copied().pad("product", [4], [4]), "stage product has 2 axes, got the factors"),
    "no factor": (lambda: copied().pad("product", [4, 0], [4]), "got the factors"),
    "an input": (lambda: of(MATMUL).pad("product", [1, 1], [4]), "reads a, which ends where it ends"),
    "no plain index": (
        lambda: (
            two_factors(lambda x, r: x[7 - r])
            .cache_read("x", "total")
            .cache_read("y", "total")
            .pad("total", [1], [3])
        ),
        "at an index that is not one of its axes",
    ),
    "no zero": (
        lambda: (
            two_factors(lambda x, r: x[r] + 1.0)
            .cache_read("x", "total")
            .cache_read("y", "total")
            .split("total.r0", 4)
            .pad("total", [1], [1, 3])
        ),
        "at an index that is not one of its axes",
    ),
    "scheduled already": (
        lambda: copied().split("a.of.product.i0", 2, "guard").pad("product", [4, 1], [1]),
        "stage a.of.product has been scheduled already",
    ),
    "rows of the output": (lambda: of(MATMUL).widen("out", 4), "widen: out must be a tile"),
    "a negative gap": (lambda: copied().widen("a.of.product", -1), "a gap of -1"),
    "two ways at once": (
        lambda: (
            Schedule.of(*formulas.matmul(8, 8, 8))
            .cache_read("a", "product")
            .swizzle("a.of.product")
            .widen("a.of.product", 4)
        ),
        "is swizzled",
    ),
    "and the other way": (
        lambda: (
            Schedule.of(*formulas.matmul(8, 8, 8))
            .cache_read("a", "product")
            .widen("a.of.product", 4)
            .swizzle("a.of.product")
        ),
        "in different banks already",
    ),
    "no order": (lambda: of(MATMUL).cache_read("a", "product", order=[0, 0]), "the order of a's axes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    made, reason = REFUSED[name]
    with pytest.raises(ScheduleError) as refusal:
        made()
    assert reason in str(refusal.value)


def test_patches_are_runs_at_regular_distances() -> None:
    v, r = te.Var("v", 4), te.Var("r", 2)
    assert patches_of([linear(v * 16 + r)]) == Patches(width=2, step=16, count=4)
    assert patches_of([linear(v * 2 + r)]) is None, "one run"
    assert patches_of([linear(v * 16 + r), linear(v * 12 + r)]) is None, "not regular"
    assert patches_of([linear(v * 16 + r + 1)]) is None, "does not begin at 0"
    found = Patches(2, 16, 4)
    for one in range(4):
        for other in range(2):
            at = found.position(linear(v * 16 + r)).expr()
            values = {v: te.as_index(one), r: te.as_index(other)}
            position = linear(te.substitute(at, values)).constant
            assert position == one * 2 + other
            assert linear(found.at(te.as_index(position))).constant == one * 16 + other


def test_the_lanes_of_an_aligned_vector_share_divisions_and_conditions() -> None:
    i, lane = te.Var("i", 12), te.Var("v", 8)
    index = i * 8 + lane
    assert lane not in te.variables(over_lanes(index // 24, lane))
    assert linear(over_lanes(index % 24, lane)).terms[lane] == 1
    assert lane not in te.variables(over_lanes(te.call("lt", index, te.as_index(64)), lane))
    for other in (te.call("lt", index, te.as_index(63)), te.call("lt", i * 8 + lane + 1, te.as_index(64))):
        assert lane in te.variables(over_lanes(other, lane)), "lanes differ"
    for at in range(12):
        for one in range(8):
            values = {i: te.as_index(at), lane: te.as_index(one)}
            for made in (index // 24, index % 24):
                assert (
                    linear(te.substitute(over_lanes(made, lane), values)).constant
                    == linear(te.substitute(made, values)).constant
                )
