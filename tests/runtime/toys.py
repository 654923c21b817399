"""Small models made by hand, for testing the runtime without a compiler.

A toy kernel works on rows: iteration i of its parallel loop computes row i, elementwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import msgspec
import numpy as np

from tilewright.dtypes import DType
from tilewright.runtime import host, tree
from tilewright.runtime.contract import Argument, Contract, plan_digest, sealed
from tilewright.runtime.loader import object_digest
from tilewright.runtime.memory import LiveBuffer, plan_memory
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.plan import Place, Plan, Step, TaskInfo, TensorSpec

LLVM_TYPES = {
    "f64": "double",
    "f32": "float",
    "f16": "i16",
    "bf16": "i16",
    "i64": "i64",
    "i32": "i32",
    "i16": "i16",
    "i8": "i8",
    "u64": "i64",
    "u32": "i32",
    "u16": "i16",
    "u8": "i8",
    "bool": "i8",
}

KERNEL = """
define void @{symbol}(ptr %arguments, i64 %begin, i64 %end) nounwind {{
entry:
{pointers}
  %first = mul i64 %begin, {width}
  %last = mul i64 %end, {width}
  br label %head
head:
  %i = phi i64 [ %first, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %last
  br i1 %more, label %body, label %done
body:
{loads}
{compute}
  %out.at = getelementptr {type}, ptr %p{arity}, i64 %i
  store {type} %r, ptr %out.at
  %next = add i64 %i, 1
  br label %head
done:
  ret void
}}
"""

POINTER = """  %a{n} = getelementptr ptr, ptr %arguments, i64 {n}
  %p{n} = load ptr, ptr %a{n}"""

LOAD = """  %x{n}.at = getelementptr {type}, ptr %p{n}, i64 %i
  %x{n} = load {type}, ptr %x{n}.at"""


def kernel_ir(op: str, dtype: str, arity: int, width: int, extent: int = 1) -> tuple[str, str]:
    """(symbol, IR) of a kernel with `arity` inputs, of which each iteration computes `width` elements."""
    kind = LLVM_TYPES[dtype]
    is_float = kind in ("float", "double")
    compute = {
        "copy": f"  %r = select i1 true, {kind} %x0, {kind} %x0",
        "neg": f"  %r = fneg {kind} %x0" if is_float else f"  %r = sub {kind} 0, %x0",
        "add": f"  %r = {'fadd' if is_float else 'add'} {kind} %x0, %x1",
        "mul": f"  %r = {'fmul' if is_float else 'mul'} {kind} %x0, %x1",
    }[op]
    symbol = f"toy_{op}_{dtype}_{width}" + (f"_{extent}" if extent != 1 else "")
    text = KERNEL.format(
        symbol=symbol,
        type=kind,
        width=width,
        arity=arity,
        compute=compute,
        pointers="\n".join(POINTER.format(n=n) for n in range(arity + 1)),
        loads="\n".join(LOAD.format(n=n, type=kind) for n in range(arity)),
    )
    return symbol, text


@cache
def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        opt=2, reloc="pic", codemodel="small"
    )


@cache
def compile_ir(text: str) -> bytes:
    module = llvm.parse_assembly(text)
    module.verify()
    return bytes(_machine().emit_object(module))


ARITY = {"copy": 1, "neg": 1, "add": 2, "mul": 2}


def resealed(plan: Plan, made: Mapping[str, tuple[bytes, Contract]]) -> tuple[Plan, dict[str, bytes]]:
    """The plan with its kernels, given as (code, contract) by symbol, sealed for it; and these by digest."""
    digest = plan_digest(plan)
    code = {
        symbol: sealed(data, msgspec.structs.replace(contract, plan=digest))
        for symbol, (data, contract) in made.items()
    }
    kernels = {symbol: object_digest(data) for symbol, data in code.items()}
    return msgspec.structs.replace(plan, kernels=kernels), {
        object_digest(data): data for data in code.values()
    }


@dataclass
class Value:
    spec: TensorSpec
    place: Place | None = None
    size: int = 0
    first: int = 0
    last: int = 0


@dataclass
class Toy:
    """A model under construction."""

    inputs: list[Value] = field(default_factory=list)
    constants: list[Value] = field(default_factory=list)
    data: list[np.ndarray] = field(default_factory=list)
    temporaries: list[Value] = field(default_factory=list)
    steps: list[tuple[str, list[Value], str, int]] = field(default_factory=list)
    tasks: dict[str, TaskInfo] = field(default_factory=dict)
    made: dict[str, tuple[bytes, Contract]] = field(default_factory=dict)

    def input(self, name: str, shape: Sequence[int], dtype: str = "f32") -> Value:
        value = Value(TensorSpec(name, dtype, tuple(shape)), Place("input", len(self.inputs)))
        self.inputs.append(value)
        return value

    def constant(self, name: str, array: np.ndarray) -> Value:
        spec = TensorSpec(name, DType.of(array).short, array.shape)
        value = Value(spec, Place("constant", len(self.constants)))
        self.constants.append(value)
        self.data.append(array)
        return value

    def apply(self, op: str, *operands: Value, extent: int | None = None) -> Value:
        spec = operands[0].spec
        extent = (spec.shape[0] if spec.shape else 1) if extent is None else extent
        width = math.prod(spec.shape) // extent if extent else 1
        symbol, text = kernel_ir(op, spec.dtype, ARITY[op], width, extent)
        arguments = tuple(Argument.of(operand.spec) for operand in (*operands, operands[0]))
        self.made[symbol] = compile_ir(text), Contract(symbol, extent, arguments, {}, "")
        task = f"{op}:{spec}:{extent}"
        specs = tuple(operand.spec for operand in operands)
        self.tasks[task] = TaskInfo(
            op, f"{op} {spec}", math.prod(spec.shape), spec.bytes * (len(specs) + 1), specs, spec
        )
        step = len(self.steps)
        result = Value(spec, size=spec.bytes, first=step, last=step)
        for operand in operands:
            operand.last = step
        self.temporaries.append(result)
        self.steps.append((symbol, [*operands, result], task, extent))
        return result

    def finish(
        self,
        outputs: Sequence[Value],
        *,
        input_tree: dict[str, Any] | None = None,
        output_tree: dict[str, Any] | None = None,
        input_names: tuple[str, ...] = (),
        features: Sequence[str] = (),
    ) -> tuple[Plan, list[np.ndarray], dict[str, bytes]]:
        for index, output in enumerate(outputs):
            output.place = Place("output", index)
        inner = [value for value in self.temporaries if value.place is None]
        offsets, memory = plan_memory(
            [LiveBuffer(v.size, v.first, v.last) for v in inner], sum(a.nbytes for a in self.data)
        )
        for value, offset in zip(inner, offsets, strict=True):
            value.place = Place("arena", 0, offset)
        if input_tree is None:
            _, input_tree = tree.flatten((tuple(object() for _ in self.inputs), {}))
        if output_tree is None:
            _, output_tree = tree.flatten(object() if len(outputs) == 1 else tuple(object() for _ in outputs))
        target = {"triple": host.triple(), "cpu": "generic", "features": list(features)}
        steps = tuple(
            Step(symbol, tuple(v.place for v in values if v.place is not None), extent, task, f"step{n}")
            for n, (symbol, values, task, extent) in enumerate(self.steps)
        )
        plan = Plan(
            inputs=tuple(value.spec for value in self.inputs),
            outputs=tuple(value.spec for value in outputs),
            constants=tuple(value.spec for value in self.constants),
            steps=steps,
            kernels={},
            tasks=self.tasks,
            memory=memory,
            input_tree=input_tree,
            output_tree=output_tree,
            target=target,
            producer="toys",
            input_names=input_names,
        )
        contracts = {
            symbol: (code, msgspec.structs.replace(contract, target=target))
            for symbol, (code, contract) in self.made.items()
        }
        plan, objects = resealed(plan, contracts)
        return plan, self.data, objects

    def model(self, outputs: Sequence[Value], *, threads: int | None = None, **options: Any) -> CompiledModel:
        return CompiledModel(*self.finish(outputs, **options), threads=threads)


def identity(
    shape: Sequence[int] = (4,), dtype: str = "f32", extent: int | None = None, **options: Any
) -> CompiledModel:
    """The smallest model: one input, one kernel that copies it."""
    toy = Toy()
    x = toy.input("x", shape, dtype)
    return toy.model([toy.apply("copy", x, extent=extent)], **options)


def chain(depth: int = 5, rows: int = 16, width: int = 32, **options: Any) -> CompiledModel:
    """x -> x + c0 -> (that) * x -> ...: `depth` steps with constants and an arena; see `chain_reference`."""
    toy = Toy()
    x = toy.input("x", (rows, width))
    value = x
    for index in range(depth):
        if index % 2:
            value = toy.apply("mul", value, x)
        else:
            value = toy.apply("add", value, toy.constant(f"c{index}", chain_constant(index, rows, width)))
    return toy.model([value], **options)


def chain_constant(index: int, rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(index).standard_normal((rows, width), dtype=np.float32)


def chain_reference(x: np.ndarray, depth: int = 5) -> np.ndarray:
    value = x
    for index in range(depth):
        value = value * x if index % 2 else value + chain_constant(index, *x.shape)
    return value
