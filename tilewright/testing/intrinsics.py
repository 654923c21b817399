"""The conformance suite of intrinsics: compute what is declared, on machines that have the features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from unittest import SkipTest

import numpy as np

from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import IntrinsicError
from tilewright.hw import CpuMachine, host
from tilewright.hw.intrinsics import (
    Intrinsic,
    PtxAssembly,
    find_intrinsic,
    register_intrinsic,
    registered_intrinsics,
    unregister_intrinsic,
)
from tilewright.loops.ir import Buffer, Kind, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.schedule.tensorise import IntrinsicOperand, statement_of
from tilewright.loops.verify import verify_program
from tilewright.measure.single import SingleKernel
from tilewright.te.interpret import interpret
from tilewright.te.scalars import SCALARS

_DRAWS = 4  # of operands
_ROUNDINGS = 8.0  # for each element of a sum, relative to the largest result
_LARGEST = 1 << 15  # of integers that are wider than the operands of instructions usually are


class IntrinsicSuite:
    """Inherit it, and name your intrinsic. Intrinsics that this machine cannot run are skipped."""

    intrinsic: Intrinsic

    def draw(self, tensor: te.Tensor, random: np.random.Generator) -> np.ndarray:
        """An operand, or the initial output; override it to leave out unsupported values."""
        dtype = tensor.dtype
        if dtype.is_float:
            return random.standard_normal(tensor.shape).astype(dtype.numpy)
        if dtype is DType.BOOL:
            return random.integers(0, 2, tensor.shape).astype(dtype.numpy)
        info = np.iinfo(dtype.numpy)
        low, high = max(int(info.min), -_LARGEST), min(int(info.max), _LARGEST - 1)
        return random.integers(low, high, tensor.shape, endpoint=True).astype(dtype.numpy)

    def test_it_computes_what_it_is_declared_to(self) -> None:
        intrinsic, machine = self._on_this_machine()
        program = program_of(intrinsic)
        verify_program(program)
        kernel = SingleKernel(program, machine, threads=1)
        for seed in range(_DRAWS):
            random = np.random.default_rng(seed)
            tiles = {tensor: self.draw(tensor, random) for tensor in (*intrinsic.inputs, intrinsic.output)}
            got = kernel([tile.reshape(-1) for tile in tiles.values()]).reshape(intrinsic.output.shape)
            _check(intrinsic, got, declared(intrinsic, tiles))

    def test_it_is_legal_where_its_features_are(self) -> None:
        intrinsic, machine = self._on_a_processor()
        able = replace(machine, features=tuple(sorted({*machine.features, *intrinsic.features})))
        intrinsic.check_supported(able)
        for feature in intrinsic.features:
            unable = replace(able, features=tuple(name for name in able.features if name != feature))
            assert intrinsic.missing(unable) == (feature,)
            try:
                intrinsic.check_supported(unable)
            except IntrinsicError as error:
                assert feature in str(error)
            else:
                raise AssertionError(f"it is legal without {feature}")

    def test_it_is_offered_where_its_features_are(self) -> None:
        intrinsic, machine = self._on_a_processor()
        if callable(intrinsic.emit):
            raise SkipTest("a micro-kernel is given to a schedule, and not registered")
        if find_intrinsic(intrinsic.name) is not None:
            raise SkipTest(f"there is an intrinsic {intrinsic.name!r} already")
        able = replace(machine, features=tuple(sorted({*machine.features, *intrinsic.features})))
        register_intrinsic(intrinsic)
        try:
            assert intrinsic in registered_intrinsics(able)
            unable = replace(machine, features=())
            assert (intrinsic in registered_intrinsics(unable)) == (not intrinsic.features)
        finally:
            unregister_intrinsic(intrinsic.name)
        assert find_intrinsic(intrinsic.name) is None

    def _on_a_processor(self) -> tuple[Intrinsic, CpuMachine]:
        if isinstance(self.intrinsic.emit, PtxAssembly):
            raise SkipTest("it is an instruction of a GPU")
        return self.intrinsic, host()

    def _on_this_machine(self) -> tuple[Intrinsic, CpuMachine]:
        intrinsic, machine = self._on_a_processor()
        missing = intrinsic.missing(machine)
        if missing:
            raise SkipTest(f"this machine lacks {', '.join(missing)}")
        return intrinsic, machine


def program_of(intrinsic: Intrinsic) -> Program:
    """A program with only the intrinsic. Its inputs and initial output are given, each row-major."""
    given = [_buffer(tensor, tensor.name) for tensor in intrinsic.inputs]
    before, result = _buffer(intrinsic.output, "before"), _buffer(intrinsic.output, "result")
    held = replace(before, name="held", scope=Scope.SCRATCH)
    tensors = (intrinsic.output, *intrinsic.inputs)
    operands = [_operand(tensor, buffer) for tensor, buffer in zip(tensors, (held, *given), strict=True)]
    applied: Stmt = statement_of(intrinsic, operands)
    body = block(_copied(before, held), applied, _copied(held, result))
    return Program(f"only_{intrinsic.name}".replace(".", "_"), (*given, before, result), body)


def _copied(source: Buffer, to: Buffer) -> Stmt:
    location = te.Var("i", to.size)
    return nest([(location, Kind.SERIAL)], Store(to, location, te.Load(source, (location,))))


def declared(intrinsic: Intrinsic, tiles: Mapping[te.Tensor, np.ndarray]) -> np.ndarray:
    """The declared result for these operands, including the initial output."""
    value = interpret(intrinsic.output, {tensor: tiles[tensor] for tensor in intrinsic.inputs})
    reduction = intrinsic.stage.reduction
    if reduction is None:
        return value
    combined: np.ndarray = SCALARS[te.REDUCE_COMBINERS[reduction.kind]].numpy(tiles[intrinsic.output], value)
    return combined


def _check(intrinsic: Intrinsic, got: np.ndarray, expected: np.ndarray) -> None:
    """Integers must be equal, floats as near as a sum in another order."""
    what = f"{intrinsic.name} computes something else than {intrinsic.body!r}"
    if not intrinsic.output.dtype.is_float:
        np.testing.assert_array_equal(got, expected, what)
        return
    types = {tensor.dtype for tensor in (intrinsic.output, *intrinsic.inputs) if tensor.dtype.is_float}
    coarsest = max(_epsilon(dtype) for dtype in types)
    terms = 1 + math.prod(axis.extent for axis in intrinsic.reduced)
    wide = expected.astype(np.float64)
    most = _ROUNDINGS * terms * coarsest * max(1.0, float(np.abs(wide).max(initial=0.0)))
    np.testing.assert_allclose(got.astype(np.float64), wide, rtol=0.0, atol=most, err_msg=what)


def _epsilon(dtype: DType) -> float:
    one = np.ones((), dtype.numpy)
    step = 1.0
    while float((one + np.asarray(step / 2, dtype.numpy)).astype(dtype.numpy)) > 1.0:
        step /= 2
    return step


def _buffer(tensor: te.Tensor, name: str) -> Buffer:
    return Buffer(name, tensor.dtype, math.prod(tensor.shape))


def _operand(tensor: te.Tensor, buffer: Buffer) -> IntrinsicOperand:
    strides = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    return IntrinsicOperand(buffer, te.as_index(0), tuple(strides))
