"""Instructions as they are declared: every element of a tile is some thread's, and programs use them as they may."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import VerificationError
from tilewright.hw.intrinsics import Intrinsic
from tilewright.hw.tensor_cores import columns, load_matrices, multiply
from tilewright.loops.interpret import UnorderedAccess, interpret_program
from tilewright.loops.ir import (
    Await,
    Buffer,
    Commit,
    Copy,
    For,
    Kind,
    Program,
    Scope,
    Stmt,
    Store,
    Warp,
    block,
)
from tilewright.loops.text import print_program
from tilewright.loops.verify import verify_program

INSTRUCTIONS = [
    *(
        multiply(depth, dtype)
        for dtype in (DType.F16, DType.BF16, DType.F32)
        for depth in (columns(dtype), 2 * columns(dtype))
    ),
    *(load_matrices(count, DType.F16, transposed) for count in (1, 2, 4) for transposed in (False, True)),
    load_matrices(4, DType.F32, False),
]


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda each: each.name)
def test_every_element_is_in_the_fragment_of_one_thread(instruction: Intrinsic) -> None:
    for fragment in instruction.fragments:
        positions = fragment.element(np.arange(fragment.lanes)[:, None], np.arange(fragment.size)[None])
        counts = np.zeros(fragment.tensor.shape, int)
        np.add.at(
            counts,
            tuple(np.broadcast_to(position, (fragment.lanes, fragment.size)) for position in positions),
            1,
        )
        assert (counts == 1).all()


X = Buffer("x", DType.F16, 256)
OUT = Buffer("out", DType.F16, 256)
TILE = Buffer("tile", DType.F16, 256, Scope.SCRATCH)
HELD = Buffer("held", DType.F16, 8, Scope.REGISTER)
T, E = te.Var("t", 32), te.Var("e", 8)
COPY = For(T, Kind.THREAD, Copy(TILE, T * 8, X, T * 8, 8))
LOAD = Warp(load_matrices(4, DType.F16, True), T, ((HELD, te.as_index(0)), (TILE, T * 8)))
WRITE = For(T, Kind.THREAD, For(E, Kind.UNROLL, Store(OUT, T * 8 + E, te.Load(HELD, (E,)))))


def program(*stmts: Stmt) -> Program:
    return Program("matrices", (X, OUT), block(*stmts))


def test_matrices_are_loaded_and_transposed() -> None:
    made = program(COPY, Commit(), Await(0), LOAD, WRITE)
    verify_program(made)
    x = np.arange(256, dtype=np.float16)
    got = interpret_program(made, [x]).reshape(32, 4, 2)
    matrices = x.reshape(4, 8, 8).swapaxes(1, 2)
    lanes = np.arange(32)
    for number in range(4):
        expected = np.stack([matrices[number, lanes // 4, lanes % 4 * 2 + e] for e in range(2)], -1)
        np.testing.assert_array_equal(got[:, number], expected)
    text = print_program(made)
    for line in ("copy tile[(t * 8)] <- x[(t * 8)] x 8", "commit", "await all but 0", "ldmatrix.sync"):
        assert line in text


def test_a_copy_from_a_multiple_of_its_lanes_on_ends_within_the_buffer() -> None:
    """Its index is a remainder, of which bounds say no more than that it is below the divisor."""
    x, out = Buffer("x", DType.F16, 240), Buffer("out", DType.F16, 240)
    at = te.call("mod", T * 8, te.as_index(240))
    copies = {index: For(T, Kind.THREAD, Copy(TILE, T * 8, x, index, 8)) for index in (at, at + 1)}
    verify_program(Program("remainder", (x, out), block(copies[at])))
    with pytest.raises(VerificationError, match="is accessed at"):
        verify_program(Program("remainder", (x, out), block(copies[at + 1])))


def test_what_is_on_its_way_is_nothing_yet() -> None:
    with pytest.raises(UnorderedAccess, match="before its copy was awaited"):
        interpret_program(program(COPY, Commit(), Await(1), LOAD, WRITE), [np.zeros(256, np.float16)])


def test_what_is_still_read_is_not_copied_over() -> None:
    with pytest.raises(UnorderedAccess, match="still read"):
        interpret_program(program(COPY, Commit(), Await(0), LOAD, COPY), [np.zeros(256, np.float16)])


@pytest.mark.parametrize(
    ("stmts", "words"),
    [
        ((For(T, Kind.THREAD, Commit()),), "commit inside a thread loop"),
        ((For(T, Kind.THREAD, LOAD),), "inside a thread loop"),
        ((For(T, Kind.THREAD, replace(COPY.body, index=T * 9)),), "accessed at"),  # type: ignore[type-var]
        ((For(T, Kind.THREAD, Copy(TILE, T * 8, TILE, T * 8, 8)),), "not from an input"),
        ((For(T, Kind.THREAD, Copy(TILE, T * 0, X, T * 0, 16)),), "a copy of 16"),
        ((COPY, Warp(LOAD.instruction, T, ((TILE, T * 8), (TILE, T * 8)))), "cannot be its operand into"),
        ((COPY, Warp(LOAD.instruction, te.Var("t", 16), LOAD.operands)), "among 32 threads"),
    ],
    ids=lambda x: re.sub(r"\W+", "-", x) if isinstance(x, str) else "",
)
def test_each_misuse_is_refused(stmts: tuple[Stmt, ...], words: str) -> None:
    with pytest.raises(VerificationError, match=words):
        verify_program(program(*stmts))
