"""Plans that do not fit their kernels and object code that is not well-formed are refused before anything is loaded."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime import toys
from tilewright.errors import CodegenError, VerificationError
from tilewright.runtime import elf, kinds
from tilewright.runtime.contract import Argument, Contract, Written, code_of, sealed, unsealed
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.plan import Place, Plan, TensorSpec

CODE = toys.compile_ir(toys.kernel_ir("add", "f32", 2, 8)[1])
SYMBOL = "toy_add_f32_8"
CONTRACT = Contract(SYMBOL, 1, (Argument("f32", 8),) * 3, {}, "")


def replaced(plan: Plan, **fields: Any) -> Plan:
    return msgspec.structs.replace(plan, **fields)


# -- seals ------------------------------------------------------------------------------------------------------------


def test_a_seal_gives_back_what_was_sealed() -> None:
    data = sealed(CODE, CONTRACT)
    assert unsealed(data) == (CODE, CONTRACT)
    assert code_of(data) == code_of(CODE) == CODE


@pytest.mark.parametrize("place", [0, 100, len(CODE) + 5, -50, -45, -10])
def test_a_changed_byte_breaks_the_seal(place: int) -> None:
    data = bytearray(sealed(CODE, CONTRACT))
    data[place] ^= 1
    with pytest.raises(CodegenError, match="contract"):
        unsealed(bytes(data))


def test_what_is_not_sealed() -> None:
    for data in (b"", CODE, b"TWKERNEL", CODE + struct.pack("<Q32s8s", 1 << 60, bytes(32), b"TWKERNEL")):
        with pytest.raises(CodegenError, match="contract"):
            unsealed(data)


# -- plans ------------------------------------------------------------------------------------------------------------


def larger(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.name, spec.dtype, (spec.shape[0] + 1, *spec.shape[1:]))


def first_task(plan: Plan, change: Callable[[Any], Any]) -> Plan:
    key = plan.steps[0].task
    return replaced(plan, tasks={**plan.tasks, key: change(plan.tasks[key])})


def first_step(plan: Plan, **fields: Any) -> Plan:
    return replaced(plan, steps=(replaced(plan.steps[0], **fields), *plan.steps[1:]))


CHANGES: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "more iterations": (lambda plan: first_step(plan, extent=17), "iterations"),
    "other types": (
        lambda plan: first_task(
            plan, lambda info: replaced(info, output=TensorSpec("out", "i32", info.output.shape))
        ),
        "other arguments",
    ),
    "an argument less": (
        lambda plan: first_step(
            first_task(plan, lambda info: replaced(info, inputs=info.inputs[1:])),
            arguments=plan.steps[0].arguments[1:],
        ),
        "other arguments",
    ),
    "the type of an input": (
        lambda plan: replaced(plan, inputs=(TensorSpec("x", "i32", plan.inputs[0].shape),)),
        "input 0 is not what",
    ),
    "a larger input": (lambda plan: replaced(plan, inputs=(larger(plan.inputs[0]),)), "input 0 is not"),
    "a larger output": (lambda plan: replaced(plan, outputs=(larger(plan.outputs[0]),)), "output 0 is not"),
    "steps in another order": (lambda plan: replaced(plan, steps=plan.steps[::-1]), "no step before"),
    "a value that is overwritten": (
        lambda plan: replaced(plan, steps=(plan.steps[0], plan.steps[0], *plan.steps[2:])),
        "no step before",
    ),
    "a huge arena": (
        lambda plan: replaced(plan, memory=replaced(plan.memory, arena_bytes=1 << 50)),
        "memory is not",
    ),
    "another processor": (
        lambda plan: replaced(plan, target={**plan.target, "features": ["sse2"]}),
        "another machine",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_plan_that_does_not_fit_its_kernels(name: str) -> None:
    model = toys.chain(5)
    objects = model.executor.objects
    kinds.check_contracts(model.plan, objects)
    change, said = CHANGES[name]
    plan = change(model.plan)
    with pytest.raises(VerificationError, match=r"was made for another (plan|machine)"):
        kinds.check_contracts(plan, objects)
    # Should somebody have made the kernels' contracts fit too, they say themselves what does not.
    made = {symbol: unsealed(objects[digest]) for symbol, digest in plan.kernels.items()}
    with pytest.raises(VerificationError, match=f"does not fit its kernels.*{said}"):
        kinds.check_contracts(*toys.resealed(plan, made))


def test_a_kernel_in_the_place_of_another() -> None:
    model = toys.chain(5)
    one, other = model.plan.kernels
    plan = replaced(model.plan, kernels={one: model.plan.kernels[other], other: model.plan.kernels[one]})
    with pytest.raises(VerificationError, match="has the object code of another"):
        kinds.check_contracts(plan, model.executor.objects)


def test_objects_that_are_missing_or_exchanged() -> None:
    model = toys.chain(2)
    objects = dict(model.executor.objects)
    one, other = objects
    with pytest.raises(VerificationError, match="no object code"):
        kinds.check_contracts(model.plan, {one: objects[one]})
    with pytest.raises(VerificationError, match="not the one that the plan names"):
        kinds.check_contracts(model.plan, {one: objects[other], other: objects[one]})


def test_a_value_is_read_where_it_was_written() -> None:
    model = toys.chain(5)
    step = model.plan.steps[1]
    moved = [Place("arena", 0, 64) if place.space == "arena" else place for place in step.arguments]
    plan = replaced(
        model.plan, steps=(model.plan.steps[0], replaced(step, arguments=tuple(moved)), *model.plan.steps[2:])
    )
    with pytest.raises(VerificationError):
        plan.validate()
        kinds.check_contracts(plan, model.executor.objects)


@pytest.mark.parametrize("space", ["input", "arena"])
@pytest.mark.parametrize(
    ("offset", "whole", "fits"),
    [(32, 64, True), (0, 64, True), (0, 0, False), (0, 32, False), (32, 60, False), (32, 128, False)],
)
def test_a_part_is_of_a_value_that_is_there(space: str, offset: int, whole: int, fits: bool) -> None:
    """A kernel that takes 8 numbers, of 16 that are given or were computed."""
    toy = toys.Toy()
    x = toy.input("x", (16,))
    if space == "arena":
        toy.apply("neg", x)
    part = toys.Value(TensorSpec("part", "f32", (8,)), Place(space, 0, offset, whole))
    plan, data, objects = toy.finish([toy.apply("copy", part, extent=1)])
    if not fits:
        with pytest.raises(VerificationError, match=r"input 0 is not|no step before it"):
            kinds.check_contracts(plan, objects)
        return
    kinds.check_contracts(plan, objects)
    given = np.arange(16, dtype=np.float32)
    result = CompiledModel(plan, data, objects, threads=1)(given)
    expected = given[offset // 4 :][:8]
    np.testing.assert_array_equal(result, expected if space == "input" else -expected)


# -- object files -----------------------------------------------------------------------------------------------------


@given(spans=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=30))
def test_what_is_written_replaces_what_it_overlaps(spans: list[tuple[int, int]]) -> None:
    buffer = Written()
    kept: dict[int, tuple[int, Argument]] = {}
    for number, (begin, size) in enumerate(spans):
        value, end = Argument("f32", number), begin + size
        buffer.write(begin, end, value)
        kept = {at: old for at, old in kept.items() if at >= end or old[0] <= begin}
        kept[begin] = end, value
    for place in range(60):
        before = max((at for at in kept if at <= place), default=None)
        assert buffer.at(place) == (None if before is None else (before, *kept[before]))


def test_generated_code_is_well_formed() -> None:
    elf.check(CODE, SYMBOL)
    calling = toys.compile_ir(
        "declare float @expf(float)\n"
        "define float @kernel(float %x) nounwind {\n  %y = call float @expf(float %x)\n  ret float %y\n}\n"
    )
    elf.check(calling, "kernel")
    with pytest.raises(CodegenError, match="no function 'other'"):
        elf.check(calling, "other")


def test_every_length_and_every_byte_of_the_headers() -> None:
    """Whatever it says, it says it with an error class of the package; most changes of a header are refused."""
    refused = 0
    for length in range(0, len(CODE), 7):
        with pytest.raises(CodegenError, match="well-formed"):
            elf.check(CODE[:length], SYMBOL)
    (table,) = struct.unpack_from("<Q", CODE, 0x28)
    places = [*range(64), *range(table, len(CODE))]
    for place in places:
        data = bytearray(CODE)
        data[place] ^= 0xFF
        try:
            elf.check(bytes(data), SYMBOL)
        except CodegenError:
            refused += 1
    assert refused > 0.6 * len(places)


def test_what_llvm_would_believe() -> None:
    (table,) = struct.unpack_from("<Q", CODE, 0x28)
    count, names = struct.unpack_from("<HH", CODE, 0x3C)
    sections = [struct.unpack_from("<IIQQQQIIQQ", CODE, table + 64 * number) for number in range(count)]
    strings = sections[names][4]
    data = bytearray(CODE)
    where = data.index(b".note.GNU-stack", strings)
    data[where : where + 15] = b".eh_frame\0\0\0\0\0\0"
    with pytest.raises(CodegenError, match="eh_frame"):
        elf.check(bytes(data), SYMBOL)
    (symbols,) = [section for section in sections if section[1] == 2]
    for field, value in (
        (4, 0x20),
        (5, 3),
        (6, 77),
        (8, 1 << 40),
        (16, 1 << 40),
    ):  # of the last symbol, the kernel
        data = bytearray(CODE)
        struct.pack_into("<Q" if field > 6 else "<B", data, symbols[4] + symbols[5] - 24 + field, value)
        with pytest.raises(CodegenError, match="well-formed"):
            elf.check(bytes(data), SYMBOL)


def test_a_sound_model_still_runs() -> None:
    model = toys.chain(3)
    x = np.ones((16, 32), np.float32)
    np.testing.assert_array_equal(model(x), toys.chain(3)(x))
