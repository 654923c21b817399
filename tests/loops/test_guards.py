"""What conditions on one variable leave of it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.guards import conjuncts, interval_of
from tilewright.loops.ir import Buffer
from tilewright.te.index import simplify


@st.composite
def conditions(draw: st.DrawFn, var: te.Var) -> te.Expr:
    """A comparison of the variable with a number, or two of them."""
    sides = [var * draw(st.integers(1, 3)) + draw(st.integers(-9, 9)), te.as_index(draw(st.integers(-9, 40)))]
    one = te.call(draw(st.sampled_from(["lt", "le"])), *draw(st.permutations(sides)))
    return te.call("and", one, draw(conditions(var))) if draw(st.booleans()) else one


def holds(condition: te.Expr, var: te.Var, value: int) -> bool:
    decided = simplify(te.substitute(condition, {var: te.as_index(value)}))
    assert isinstance(decided, te.Const)
    return bool(decided.value)


@settings(max_examples=40)
@given(data=st.data(), extent=st.integers(2, 20))
def test_an_interval_is_all_that_conditions_leave(data: st.DataObject, extent: int) -> None:
    var = te.Var("i", extent)
    condition = data.draw(conditions(var))
    inside = [value for value in range(extent) if holds(condition, var, value)]
    expected = (inside[0], inside[-1] + 1) if inside else None
    assert interval_of(conjuncts(condition), var) == expected


def test_a_long_axis_takes_no_longer() -> None:
    var = te.Var("i", 1 << 40)
    border = [te.call("le", te.as_index(3), var), te.call("lt", var, te.as_index((1 << 40) - 3))]
    assert interval_of(border, var) == (3, (1 << 40) - 3)


def test_data_and_other_variables_leave_no_interval() -> None:
    var, other = te.Var("i", 1 << 40), te.Var("j", 4)
    element = te.Load(Buffer("x", DType.F32, 1 << 40), (var,))
    assert interval_of([te.call("lt", te.const(0.0, DType.F32), element)], var) is None
    assert interval_of([te.call("lt", var, other)], var) is None
    assert interval_of([te.call("eq", var % 2, te.as_index(0))], var) is None
