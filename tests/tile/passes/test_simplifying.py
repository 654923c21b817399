"""Passes that simplify: the interpreter gives the same before and after, and each rule does what its table says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright
import tilewright.tile as tl
from tests.tile.generator import generate
from tests.tile.kernels import KERNELS, random
from tilewright.errors import VerificationError
from tilewright.tile.interpret import interpret
from tilewright.tile.ir import Block, For, If, Op, TileProgram, walk
from tilewright.tile.kernel import tensor_argument
from tilewright.tile.passes import run_passes
from tilewright.tile.passes.common_subexpressions import common_subexpressions
from tilewright.tile.passes.dead_code import dead_code
from tilewright.tile.passes.hoist import hoist
from tilewright.tile.passes.paired_exponentials import paired_exponentials
from tilewright.tile.passes.peephole import peephole
from tilewright.tile.passes.standard import STANDARD, simplified

PASSES = {each.__name__: each for each in (peephole, common_subexpressions, hoist, dead_code, simplified)}


@pytest.mark.parametrize("name", PASSES)
def test_random_programs_mean_the_same_after_a_pass(name: str) -> None:
    changed = 0
    for seed in range(60):
        made = generate(seed)
        program = run_passes(made.program, [PASSES[name]])
        changed += program is not made.program
        made.interpret(program)
        made.check(made.arrays, f"seed {seed}\n{program}")
        assert run_passes(program, [PASSES[name]]) is program or name == "peephole", (
            f"seed {seed}: not settled"
        )
    assert changed > 20, f"{name} changed {changed} of 60 programs"


def names(program: TileProgram) -> list[str]:
    return [node.name if isinstance(node, Op) else type(node).__name__ for node in walk(program.body)]


def both(kernel: Any, *args: Any, **constants: Any) -> tuple[TileProgram, TileProgram]:
    before = kernel.program(*args, **constants)
    return before, simplified(before)


@tilewright.kernel
def repeated(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(x + at, mask=at < n), mask=at < n)


def test_equal_operations_are_computed_once() -> None:
    before, after = both(repeated, random(8), random(8), 8, BLOCK=8)
    assert names(before).count("lt") == 3 and names(after).count("lt") == 1
    assert names(after).count("load") == 2  # memory may have changed between them


@tilewright.kernel
def two_zeros(out):
    tl.store(out, 0.0)
    tl.store(out + 1, -0.0)


def test_zeros_of_both_signs_stay_two() -> None:
    out = np.empty(2, np.float32)
    program = simplified(two_zeros.program(out))
    interpret(program, (1, 1, 1), [tensor_argument("out", out)], {})
    assert not np.signbit(out[0]) and np.signbit(out[1])


@tilewright.kernel
def invariant(x, out, n, divisor, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.float32)
    at = tl.arange(0, BLOCK)
    for _ in range(n):
        for j in range(n):
            scaled = tl.exp(tl.load(x + at) * 1.0 + divisor)
            offset = at * 3 + n
            acc += scaled + offset + n // divisor + j
    tl.store(out + at, acc)


def test_what_no_iteration_changes_leaves_all_loops() -> None:
    before, after = both(invariant, random(8), random(8), 3, 2, BLOCK=8)

    def inside(program: TileProgram) -> list[str]:
        (loop,) = (node for node in program.body.nodes if isinstance(node, For))
        return [node.name for node in walk(loop.body) if isinstance(node, Op)]

    assert "mul" in inside(before) and "mul" not in inside(after)
    assert "floordiv" in inside(after)  # undefined by 0, and the loop may have no iteration
    assert "load" in inside(after) and "exp" in inside(after)  # memory may change


@tilewright.kernel
def foldable(x, out, BLOCK: tl.constexpr, FAST: tl.constexpr):
    at = tl.arange(0, BLOCK) * 1 + 0
    value = tl.load(x + at, mask=tl.full((BLOCK,), True, tl.int1), other=3.0)
    value = tl.trans(tl.trans(tl.reshape(value, 2, BLOCK // 2)))
    value = tl.reshape(tl.reshape(value, BLOCK // 2, 2), BLOCK)
    value = tl.where(tl.full((BLOCK,), FAST, tl.int1), value.to(tl.float64).to(tl.float32), 0.0)
    value = value * 1.0 - 0.0
    tl.store(out + at, value / 1.0)


def test_peephole_rules() -> None:
    x, out = random(8), random(8)
    before, after = both(foldable, x, out, BLOCK=8, FAST=True)
    assert {"mul", "add", "trans", "reshape", "select", "cast", "sub", "div"} <= set(names(before))
    assert set(names(after)) == {"arange", "broadcast", "addptr", "load", "store"}
    load = next(node for node in walk(after.body) if isinstance(node, Op) and node.name == "load")
    assert len(load.operands) == 1  # neither mask nor other


@tilewright.kernel
def adds_zero(x, out):
    tl.store(out, tl.load(x) + 0.0)


def test_adding_zero_to_a_float_stays() -> None:
    x, out = np.array([-0.0], np.float32), np.ones(1, np.float32)
    program = simplified(adds_zero.program(x, out))
    interpret(program, (1, 1, 1), [tensor_argument("x", x), tensor_argument("out", out)], {})
    assert not np.signbit(out[0])


@tilewright.kernel
def chooses(out, n):
    flag = tl.full((), 3, tl.int32) > 2
    if flag:
        value = n + 1
    else:
        value = n - 1
    tl.store(out, value)


def test_a_branch_on_a_constant_is_decided() -> None:
    before, after = both(chooses, np.empty(1, np.int32), 4)
    assert any(isinstance(node, If) for node in walk(before.body))
    assert not any(isinstance(node, If) for node in walk(after.body)) and "sub" not in names(after)
    out = np.empty(1, np.int32)
    interpret(after, (1, 1, 1), [tensor_argument("out", out)], {"n": 4})
    assert out[0] == 5


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "matmul_gelu", "attention", "grouped_matmul"])
def test_kernels_get_shorter(name: str) -> None:
    f32, i32 = random(4, 4), np.zeros(4, np.int32)
    arguments: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "softmax": ([f32, f32, 4, 4], {"BLOCK": 4}),
        "layer_norm": ([f32] * 5 + [4, 1e-5], {"BLOCK": 4}),
        "matmul_gelu": ([f32] * 4 + [4, 4, 4], {"BM": 4, "BN": 4, "BK": 4}),
        "attention": ([f32] * 4 + [4, 1.0], {"D": 4, "BM": 4, "BN": 4, "CAUSAL": True}),
        "grouped_matmul": ([f32] * 3 + [i32, 4, 4, 4], {"BM": 4, "BN": 4, "BK": 4}),
    }
    args, constants = arguments[name]
    before, after = both(KERNELS[name], *args, **constants)
    assert len(names(after)) < len(names(before))
    assert names(after).count("store") == names(before).count("store")


def test_an_illegal_result_names_the_pass() -> None:
    def broken(program: TileProgram) -> TileProgram:
        store = program.body.nodes[-1]
        return TileProgram(program.name, program.params, Block((), (store,), ()))

    with pytest.raises(VerificationError, match="after the pass test_simplifying"):
        run_passes(repeated.program(random(8), random(8), 8, BLOCK=8), [*STANDARD, broken])


@tilewright.kernel
def rescales(x, y, out, N: tl.constexpr):
    n = tl.arange(0, N)
    a, b = tl.load(x + n), tl.load(y + n)
    now = tl.maximum(a, b)
    tl.store(out + n, tl.exp(a - now))
    tl.store(out + N + n, 2.0 * tl.exp(b - now) + tl.exp(a - now))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_two_exponentials_of_a_running_maximum_are_one(dtype: Any) -> None:
    special = [0.0, -0.0, 1.0, -2.5, 1e-4, 300.0, np.inf, -np.inf, np.nan]
    x, y = (each.ravel().astype(dtype) for each in np.meshgrid([*special, *special], special))
    count = 1 << (len(x) - 1).bit_length()
    x, y = np.resize(x, count), np.resize(y, count)
    before = simplified(rescales.program(x, y, np.zeros(2 * count, dtype), N=count))
    after = run_passes(before, [paired_exponentials, common_subexpressions, dead_code])
    assert names(before).count("exp") == 2 and names(after).count("exp") == 1
    outs = []
    for program in (before, after):
        out = np.zeros(2 * count, dtype)
        arguments = [tensor_argument(name, each) for name, each in (("x", x), ("y", y), ("out", out))]
        interpret(program, (1, 1, 1), arguments, {})
        outs.append(out)
    np.testing.assert_array_equal(*outs)
    compiled = np.zeros(2 * count, dtype)
    rescales[1](x, y, compiled, N=count)
    np.testing.assert_allclose(compiled, outs[0], rtol=2e-3 if dtype is np.float16 else 1e-6, atol=1e-37)


@tilewright.kernel
def rescales_another(x, y, out, N: tl.constexpr):
    n = tl.arange(0, N)
    a, b = tl.load(x + n), tl.load(y + n)
    now = tl.maximum(a, b)
    tl.store(out + n, tl.exp(a - now) + tl.exp(b + now) + tl.exp(now - b))


def test_other_exponentials_stay() -> None:
    x = np.zeros(8, np.float32)
    before = simplified(rescales_another.program(x, x, x, N=8))
    assert paired_exponentials(before) is before
