# ruff: noqa: B007, C416, F821, F841
"""Control flow; and every mistake of a user, shown at the user's line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright
import tilewright.tile as tl
from tests.tile.kernels import value_of
from tilewright import errors

WIDTH = 8


# -- control flow -----------------------------------------------------------------------------------------------------


@tilewright.kernel
def collatz(out, n):
    steps = 0
    while n != 1 and steps < 1000:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    tl.store(out, steps)


@tilewright.kernel
def loops(out, n, UNROLLED: tl.constexpr):
    total = 0
    for i in range(n, 0, -2):
        total += i
    for i in tl.static_range(UNROLLED):
        total += 100 * i
    for a, b in ((1, 2), (3, 4)):
        total += 1000 * a * b
    tl.store(out, total if n > 3 else -total)


@tilewright.kernel
def early(out, n):
    if n > 10:
        if n > 20:
            tl.store(out, 3)
            return
        tl.store(out + 1, 5)
    tl.store(out, 2)
    if n < 0:
        return
    tl.store(out + 1, 7)


@tilewright.kernel
def guarded(out, x, n):
    """The load runs only where the index is inside."""
    count = 0
    while count < n and tl.load(x + count) > 0:
        count += 1
    tl.store(out, count)


def test_while_if_and_short_circuit() -> None:
    assert value_of(collatz, 27) == [111]
    assert value_of(guarded, np.ones(5, np.int32), 5) == [5]
    assert value_of(guarded, np.array([1, 1, 0, 1], np.int32), 4) == [2]


def test_for_static_range_and_conditional_expressions() -> None:
    assert value_of(loops, 7, UNROLLED=3) == [7 + 5 + 3 + 1 + 300 + 14000]
    assert value_of(loops, 0, UNROLLED=0) == [-14000]


@tilewright.kernel
def leaves(out, n, m, LIMIT: tl.constexpr):
    odd = 0
    for i in range(n):
        if i * i > m:
            break
        if i % 2 == 0:
            continue
        odd += i
    tl.store(out, odd)
    count = 0
    while True:
        count += 3
        if count > m:
            if count > 2 * m:
                count = -1
            break
    tl.store(out + 1, count)
    unrolled = 0
    for i in tl.static_range(5):
        if i == n:
            break
        if i == LIMIT:
            continue
        unrolled += 10**i
    tl.store(out + 2, unrolled)
    both = 0
    for i in range(10, 0, -3):
        for k in range(i):
            if k > m:
                break
            if k == 1:
                continue
            both += 1
        if both > n:
            break
    tl.store(out + 3, both)
    inside = 0
    for i in range(m - n, m, m):
        inside += 1
        if LIMIT > 2:
            break
    tl.store(out + 4, inside)


def left(n: int, m: int, LIMIT: int) -> list[int]:
    """`leaves`, by Python."""
    odd = 0
    for i in range(n):
        if i * i > m:
            break
        if i % 2 == 0:
            continue
        odd += i
    count = 0
    while True:
        count += 3
        if count > m:
            if count > 2 * m:
                count = -1
            break
    unrolled = 0
    for i in range(5):
        if i == n:
            break
        if i == LIMIT:
            continue
        unrolled += 10**i
    both = 0
    for i in range(10, 0, -3):
        for k in range(i):
            if k > m:
                break
            if k == 1:
                continue
            both += 1
        if both > n:
            break
    inside = 0
    for i in range(m - n, m, m):
        inside += 1
        if LIMIT > 2:
            break
    return [odd, count, unrolled, both, inside]


@pytest.mark.parametrize(("n", "m", "limit"), [(10, 30, 1), (0, 5, 2), (3, 1000, 3), (100, 1, 9)])
def test_break_and_continue(n: int, m: int, limit: int) -> None:
    wanted = left(n, m, limit)
    assert value_of(leaves, n, m, size=5, LIMIT=limit) == wanted
    assert value_of(leaves.interpret, n, m, size=5, LIMIT=limit) == wanted


@tilewright.kernel
def last_index(out, first, end):
    steps = 0
    for i in range(first, end):
        steps += 1
        if steps > 5:
            break
    tl.store(out, steps)


def test_a_loop_with_a_break_up_to_the_largest_integer_ends() -> None:
    assert value_of(last_index, 2**31 - 3, 2**31 - 1) == [2]


@pytest.mark.parametrize(("n", "wanted"), [(25, [3, 0]), (15, [2, 7]), (5, [2, 7]), (-1, [2, 0])])
def test_early_returns(n: int, wanted: list[int]) -> None:
    assert value_of(early, n, size=2) == wanted


# -- mistakes while compiling -----------------------------------------------------------------------------------------


@tilewright.kernel
def bad_broadcast(x):
    a = tl.arange(0, 8)
    return a + tl.arange(0, 16)


@tilewright.kernel
def bad_dynamic_shape(x, n):
    a = tl.zeros((n, 8), tl.float32)


@tilewright.kernel
def bad_dynamic_arange(x, n):
    a = tl.arange(0, n)


@tilewright.kernel
def bad_name(x):
    offsets = tl.arange(0, 8)
    tl.load(x + ofsets)


@tilewright.kernel
def bad_tl_name(x):
    tl.laod(x)


@tilewright.kernel
def bad_branch_name(x, n):
    if n > 0:
        y = 1
    tl.store(x, y)


@tilewright.kernel
def bad_loop_name(x, n):
    for i in range(n):
        y = i
    tl.store(x, y)


@tilewright.kernel
def bad_construct(x):
    a = [i for i in range(3)]


@tilewright.kernel
def bad_endless(x, n):
    while True:
        if n > 3:
            continue
        n += 1


@tilewright.kernel
def bad_else(x, n):
    for i in range(n):
        break
    else:
        tl.store(x, 1)


@tilewright.kernel
def bad_return_in_loop(x, n):
    for i in range(n):
        if i > 3:
            return


@tilewright.kernel
def bad_name_behind_break(x, n):
    for i in range(n):
        if i > 3:
            break
        y = i
    tl.store(x, y)


@tilewright.kernel
def bad_index_behind(x, n):
    i = 3
    for i in range(n):
        n += 0
    tl.store(x, i)


@tilewright.kernel
def bad_unrolled_break(x, n):
    for i in tl.static_range(1000):
        if i > n:
            break


@tilewright.kernel
def bad_unsigned(x, n):
    a = n.to(tl.uint64) + n


def wrong_type(a, b):
    return (a + b).to(tl.float32)


def wrong_count(a, b):
    return a, b


def asks(a, b):
    if a > b:
        return a
    return b


@tilewright.kernel
def bad_scan_type(x):
    tl.associative_scan(tl.arange(0, 8), 0, wrong_type)


@tilewright.kernel
def bad_scan_count(x):
    tl.reduce(tl.arange(0, 8), 0, wrong_count)


@tilewright.kernel
def bad_scan_branch(x):
    tl.associative_scan(tl.arange(0, 8), 0, asks)


@tilewright.kernel
def bad_scan_axis(x):
    tl.associative_scan(tl.arange(0, 8), 1, tl.maximum)


@tilewright.kernel
def bad_scan_function(x):
    tl.reduce(tl.arange(0, 8), 0, 3)


@tilewright.kernel
def bad_scan_scalar(x, n):
    tl.reduce(n, 0, tl.maximum)


@tilewright.kernel
def bad_item(x):
    a = tl.arange(0, 8)
    a[0] = 1


@tilewright.kernel
def bad_matmul_operator(x):
    a = tl.zeros((8, 8), tl.float32)
    b = a @ a


@tilewright.kernel
def bad_float_shift(x):
    a = tl.zeros((8,), tl.float32) << 1


@tilewright.kernel
def bad_loop_type(x, n):
    acc = 0
    for i in range(n):
        acc += 0.5


@tilewright.kernel
def bad_tile_if(x):
    if tl.arange(0, 8) > 3:
        tl.store(x, 1)


@tilewright.kernel
def bad_mask(x):
    tl.load(x + tl.arange(0, 8), mask=tl.arange(0, 8))


@tilewright.kernel
def bad_dot(x):
    tl.dot(tl.zeros((8, 16), tl.float16), tl.zeros((8, 16), tl.float16))


@tilewright.kernel
def bad_power(x):
    tl.zeros((12,), tl.float32)


@tilewright.kernel
def bad_argument(x):
    tl.sum(tl.arange(0, 8), dim=0)


@tilewright.kernel
def bad_static(x):
    tl.static_assert(WIDTH == 7, "widths of seven only")


@tilewright.kernel
def bad_pointer(x):
    tl.store(x, x * 2)


def helper(a):
    return a + tl.zeros((16,), tl.float32)


@tilewright.kernel
def bad_inside(x):
    helper(tl.zeros((8,), tl.float32))


@tilewright.kernel
def bad_division(x, n):
    ZERO = 0
    tl.store(x, 1 // ZERO)


@tilewright.kernel
def bad_infinity(x, n):
    tl.store(x, tl.full((8,), float("inf"), tl.int32))


@tilewright.kernel
def bad_range(x, n):
    tl.store(x, tl.int32(3000000000))


@tilewright.kernel
def bad_overflow(x, n):
    tl.store(x, 2.0 * 10**400)


@tilewright.kernel
def bad_numpy(x, n):
    tl.store(x, np.exp(tl.load(x)))


@tilewright.kernel
def bad_new_axis(x, n):
    a = tl.load(x + tl.arange(0, 8))
    tl.store(x, tl.sum(tl.expand_dims(a, 5)))


@tilewright.kernel
def bad_new_axes(x, n):
    a = tl.load(x + tl.arange(0, 8))
    tl.store(x, tl.sum(tl.expand_dims(a, (0, 0))))


def endless(x):
    return endless(x)


@tilewright.kernel
def bad_recursion(x, n):
    tl.store(x, endless(n))


MISTAKES = [
    (bad_broadcast, errors.KernelShapeError, r"\(8,\) and \(16,\) do not broadcast", "a + tl.arange(0, 16)"),
    (
        bad_dynamic_shape,
        errors.DynamicShapeError,
        "`n` is a value of type i32",
        "tl.zeros((n, 8), tl.float32)",
    ),
    (bad_dynamic_arange, errors.DynamicShapeError, "`n` is a value of type i32", "tl.arange(0, n)"),
    (bad_name, errors.KernelNameError, "`ofsets` is not defined(.|\n)*did you mean `offsets`", "ofsets"),
    (bad_tl_name, errors.KernelNameError, "has no `laod`(.|\n)*did you mean `load`", "tl.laod"),
    (bad_branch_name, errors.KernelNameError, "one branch of the `if` in line", "y"),
    (bad_loop_name, errors.KernelNameError, "assigned in the loop in line", "y"),
    (bad_construct, errors.KernelSyntaxError, "a list comprehension is not part", "[i for i in range(3)]"),
    (bad_endless, errors.KernelSyntaxError, "a loop without end(.|\n)*leave it with break", "True"),
    (bad_else, errors.KernelSyntaxError, "else of a loop", None),
    (bad_return_in_loop, errors.KernelSyntaxError, "return inside of a loop", "return"),
    (bad_name_behind_break, errors.KernelNameError, "assigned in the loop in line", "y"),
    (bad_index_behind, errors.KernelNameError, "assigned in the loop in line", "i"),
    (
        bad_unrolled_break,
        errors.KernelSyntaxError,
        "1000 unrolled iterations with a break, of at most 128",
        "tl.static_range(1000)",
    ),
    (
        bad_unsigned,
        errors.KernelTypeError,
        "no integer type holds all numbers of u64 and i32",
        "n.to(tl.uint64) + n",
    ),
    (
        bad_scan_type,
        errors.KernelTypeError,
        r"returns f32\[4, 1\] where it is given i32",
        "tl.associative_scan(tl.arange(0, 8), 0, wrong_type)",
    ),
    (
        bad_scan_count,
        errors.KernelTypeError,
        "and 1 tiles are combined",
        "tl.reduce(tl.arange(0, 8), 0, wrong_count)",
    ),
    (bad_scan_branch, errors.KernelTypeError, "takes a scalar(.|\n)*tl.where", "a > b"),
    (
        bad_scan_axis,
        errors.KernelShapeError,
        "axis 1 of a tile with 1 axes",
        "tl.associative_scan(tl.arange(0, 8), 1, tl.maximum)",
    ),
    (bad_scan_function, errors.KernelTypeError, "takes a function", "tl.reduce(tl.arange(0, 8), 0, 3)"),
    (
        bad_scan_scalar,
        errors.KernelShapeError,
        "reduce needs a tile, got a scalar",
        "tl.reduce(n, 0, tl.maximum)",
    ),
    (bad_item, errors.KernelSyntaxError, "tiles are values", "a[0]"),
    (bad_matmul_operator, errors.KernelSyntaxError, "use tl.dot", "a @ a"),
    (bad_float_shift, errors.KernelTypeError, "<< takes", "tl.zeros((8,), tl.float32) << 1"),
    (
        bad_loop_type,
        errors.KernelTypeError,
        "`acc` is i32 before the loop, and f32 after",
        "for i in range(n):",
    ),
    (bad_tile_if, errors.KernelTypeError, "takes a scalar", "tl.arange(0, 8) > 3"),
    (
        bad_mask,
        errors.KernelTypeError,
        "a mask must be bool",
        "tl.load(x + tl.arange(0, 8), mask=tl.arange(0, 8))",
    ),
    (bad_dot, errors.KernelShapeError, "K is 16 in the first and 8", None),
    (bad_power, errors.KernelShapeError, "power of two(.|\n)*use 16", "tl.zeros((12,), tl.float32)"),
    (
        bad_argument,
        errors.KernelTypeError,
        "unexpected keyword argument 'dim'",
        "tl.sum(tl.arange(0, 8), dim=0)",
    ),
    (bad_division, errors.KernelTypeError, "by zero(.|\n)*try: divide by", "1 // ZERO"),
    (bad_infinity, errors.KernelTypeError, "i32 does not hold inf(.|\n)*try: use a type of floats", None),
    (
        bad_range,
        errors.KernelTypeError,
        "3000000000 does not fit(.|\n)*try: use a number in this range",
        None,
    ),
    (bad_overflow, errors.KernelTypeError, "too large(.|\n)*try: use smaller constexprs", "2.0 * 10**400"),
    (bad_numpy, errors.KernelTypeError, "cannot be called(.|\n)*try: use tl.exp", "np.exp(tl.load(x))"),
    (bad_new_axis, errors.KernelShapeError, "new axis 5 of a tile with 2 axes", "tl.expand_dims(a, 5)"),
    (bad_new_axes, errors.KernelShapeError, "two are the same", "tl.expand_dims(a, (0, 0))"),
    (bad_recursion, errors.KernelSyntaxError, r"recursion(.|\n)*\.\.\. 30 more calls", "endless(x)"),
    (bad_static, errors.StaticAssertionError, "widths of seven only", None),
    (bad_pointer, errors.KernelTypeError, "pointers can be moved", "x * 2"),
    (bad_inside, errors.KernelShapeError, 'called from "(.|\n)*helper', "a + tl.zeros((16,), tl.float32)"),
]


@pytest.mark.parametrize(
    ("kernel", "kind", "message", "under"), MISTAKES, ids=lambda each: getattr(each, "__name__", "")
)
def test_a_mistake_is_shown_at_its_place(kernel: Any, kind: type, message: str, under: str | None) -> None:
    names = [parameter.name for parameter in kernel.source.parameters]
    with pytest.raises(kind, match=message) as caught:
        kernel.program(*[np.zeros(8, np.float32), 5][: len(names)])
    text = str(caught.value)
    assert "\n  try: " in text
    where = caught.value.where
    assert where is not None and where.file == __file__
    lines = text.splitlines()
    caret = next(i for i, line in enumerate(lines) if re.fullmatch(r" +\^+", line))
    start, end = lines[caret].index("^"), len(lines[caret])
    if under is not None:
        assert lines[caret - 1][start:end] == under
    assert Path(__file__).read_text(encoding="utf-8").splitlines()[where.line - 1] == where.text


# -- mistakes at the launch -------------------------------------------------------------------------------------------


@tilewright.kernel
def uses_global(out):
    tl.store(out + tl.arange(0, WIDTH), tl.arange(0, WIDTH))


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (lambda x: uses_global(x), "without a grid"),
        (lambda x: uses_global[1](), "needs `out`"),
        (lambda x: uses_global[1](x, 1), "takes 1 arguments"),
        (lambda x: uses_global[1](x, blocks=1), "no parameter `blocks`"),
        (lambda x: uses_global[1]([1.0]), "is a list"),
        (lambda x: uses_global[1](x.astype(np.complex64)), "elements of type complex64"),
        (lambda x: uses_global[1.5](x), "one to three numbers"),
        (lambda x: uses_global[1, 1, 1, 1](x), "one to three numbers"),
        (lambda x: uses_global[lambda meta: -1](x), "one to three numbers"),
        (lambda x: uses_global[1](x, debug=True, unwritten=["y"]), "'y' is not a tensor"),
        (lambda x: uses_global[1](np.frombuffer(bytes(32), np.float32)), "read-only"),
        (lambda x: loops[1](x, 3, UNROLLED=[]), "not hashable"),
    ],
)
def test_a_launch_that_does_not_fit(launch: Any, message: str) -> None:
    with pytest.raises(errors.KernelArgumentError, match=message):
        launch(np.zeros(8, np.float32))


def test_functions_of_the_language_outside_of_a_kernel() -> None:
    with pytest.raises(errors.KernelSyntaxError, match=r"tl.load was called outside of a kernel"):
        tl.load(1)
    assert tl.cdiv(10, 4) == 3 and tl.next_power_of_2(33) == 64
