"""Elementary functions of the llvm target against NumPy: accuracy, special cases, symbols, lanes."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import struct
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numpy as np
import pytest
from tilewright.codegen.llvm.math import FUNCTIONS, MathContext, emit

BINARY = frozenset({"pow", "atan2", "fmod"})
DTYPES = (np.float32, np.float64)
LANES = (1, 4, 8, 16)
HOST = ""
NO_FMA = "-fma,-avx2,-avx512f"
SSE2 = "baseline"  # x86-64 as in 2003: no SSE4.1, so no rounding instruction

Array = np.ndarray[Any, Any]


# --- compiling --------------------------------------------------------------------------------------------------------


def element(dtype: type) -> ir.Type:
    return ir.FloatType() if dtype == np.float32 else ir.DoubleType()


def add_kernel(module: ir.Module, name: str, dtype: type, lanes: int, context: MathContext) -> str:
    """void kernel(in, in, out, count): `name` over an array, `lanes` at a time."""
    i64, pointer = ir.IntType(64), element(dtype).as_pointer()
    kind = element(dtype) if lanes == 1 else ir.VectorType(element(dtype), lanes)
    symbol = f"{name}_{np.dtype(dtype).name}_{lanes}"
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer] * 3 + [i64]), symbol)
    entry, loop, end = (function.append_basic_block(label) for label in ("entry", "loop", "end"))
    ir.IRBuilder(entry).branch(loop)
    builder = ir.IRBuilder(loop)
    index = builder.phi(i64)
    index.add_incoming(ir.Constant(i64, 0), entry)

    def place(array: ir.Value) -> ir.Value:
        return builder.bitcast(builder.gep(array, [index], source_etype=element(dtype)), kind.as_pointer())

    size = np.dtype(dtype).itemsize
    args = [builder.load(place(a), typ=kind, align=size) for a in function.args[: 2 if name in BINARY else 1]]
    builder.store(emit(builder, name, *args, context=context), place(function.args[2]), align=size)
    following = builder.add(index, ir.Constant(i64, lanes))
    index.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, function.args[3]), loop, end)
    ir.IRBuilder(end).ret_void()
    return symbol


def target_machine(features: str, jit: bool) -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    if features == SSE2:
        return target.create_target_machine(cpu="x86-64", features="", opt=2, jit=jit)
    host = llvm.get_host_cpu_features().flatten()
    flat = f"{host},{features}" if features else host
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=flat, opt=2, jit=jit)


def optimised(module: ir.Module, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return parsed


class Compiled:
    """Kernels of some functions, run on NumPy arrays."""

    def __init__(self, names: frozenset[str], dtype: type, lanes: int, features: str) -> None:
        self.dtype, self.lanes = dtype, lanes
        module = ir.Module()
        context = MathContext(has_fma=features == HOST)
        self.symbols = {name: add_kernel(module, name, dtype, lanes, context) for name in names}
        machine = target_machine(features, jit=True)
        self.module = optimised(module, machine)
        self.assembly = machine.emit_assembly(self.module)
        self.engine = llvm.create_mcjit_compiler(self.module, machine)
        self.engine.finalize_object()

    def __call__(self, name: str, *args: Array) -> Array:
        count = len(args[0])
        padded = -(-count // self.lanes) * self.lanes
        arrays = [np.resize(np.asarray(a, self.dtype), padded) for a in args]
        out = np.empty(padded, self.dtype)
        address = self.engine.get_function_address(self.symbols[name])
        call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, ctypes.c_int64)(address)
        call(arrays[0].ctypes.data, arrays[-1].ctypes.data, out.ctypes.data, padded)
        return out[:count]


@functools.cache
def compiled(dtype: type, lanes: int, features: str = HOST) -> Compiled:
    return Compiled(FUNCTIONS, dtype, lanes, features)


# --- references and samples -------------------------------------------------------------------------------------------


def erf_reference(x: Array) -> Array:
    """2/sqrt(pi) e^(-x^2) (x + 2/3 x^3 + 4/15 x^5 + ...): all terms have one sign."""
    clipped = np.clip(x, -7, 7)
    term = total = clipped
    for k in range(1, 150):
        term = term * (2 * clipped * clipped / (2 * k + 1))
        total = total + term
    pi = np.longdouble("3.14159265358979323846264338327950288")
    value = 2 / np.sqrt(pi) * np.exp(-clipped * clipped) * total
    return np.where(np.abs(x) > 6.5, np.sign(x), value)


# in extended precision: 64 bits of mantissa on x86
REFERENCES: dict[str, Callable[..., Array]] = {
    "exp": np.exp,
    "expm1": np.expm1,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "erf": erf_reference,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "atan2": np.arctan2,
    "fmod": np.fmod,
}


def reference(name: str, *args: Array) -> Array:
    if name == "erf" and args[0].dtype == np.float32:  # double is enough, and far quicker
        return np.frompyfunc(math.erf, 1, 1)(args[0].astype(np.float64)).astype(np.longdouble)
    with np.errstate(all="ignore"):
        return REFERENCES[name](*(a.astype(np.longdouble) for a in args))


def ulps(got: Array, wanted: Array) -> Array:
    """|got - wanted| in units of the last place of the wanted number in got's type; infinity counts as 2^emax."""
    info = np.finfo(got.dtype)
    limit = np.longdouble(2) ** info.maxexp
    clipped, value = np.clip(wanted, -limit, limit), np.clip(got.astype(np.longdouble), -limit, limit)
    with np.errstate(all="ignore"):
        exponent = np.frexp(clipped)[1] - 1 - info.nmant
        unit = np.ldexp(np.longdouble(1), np.maximum(exponent, info.minexp - info.nmant))
        error = np.abs(value - clipped) / unit
    both_nan = np.isnan(got) & np.isnan(wanted)
    return np.where(both_nan, 0, np.where(np.isnan(error), np.inf, error)).astype(np.float64)


def random_bits(rng: np.random.Generator, dtype: type, count: int) -> Array:
    """Numbers of any exponent, subnormal ones, infinities and NaNs among them."""
    size = np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(size * count), dtype)


def log_uniform(rng: np.random.Generator, low: float, high: float, count: int) -> Array:
    return np.exp2(rng.uniform(low, high, count)) * rng.choice([-1.0, 1.0], count)


def critical(name: str, rng: np.random.Generator, dtype: type, count: int) -> Array:
    """Where the function is not yet constant, infinite or NaN; half of it spread over exponents."""
    wide = dtype == np.float64
    zones = {
        "exp": (-746.0, 710.0) if wide else (-104.5, 89.0),
        "expm1": (-38.0, 710.0) if wide else (-18.0, 89.0),
        "exp2": (-1076.0, 1025.0) if wide else (-151.0, 129.0),
        "log": (0.5, 2.0),
        "log2": (0.5, 2.0),
        "log1p": (-1.0, 2.0),
        "sin": (-300.0, 300.0),
        "cos": (-300.0, 300.0),
        "tanh": (-20.0, 20.0) if wide else (-9.5, 9.5),
        "erf": (-6.0, 6.0) if wide else (-4.0, 4.0),
        "rsqrt": (0.0, 10.0),
    }
    low, high = zones[name]
    third = count // 3
    parts = [
        rng.uniform(low, high, third),
        rng.uniform(-2.0, 2.0, third),
        log_uniform(rng, -60 if wide else -30, math.log2(max(-low, high)), count - 2 * third),
    ]
    return np.concatenate(parts).astype(dtype)


def multiples_of_half_pi(rng: np.random.Generator, dtype: type, count: int) -> Array:
    """The nearest numbers to n pi/2, and their neighbours: where a reduction cancels most."""
    n = np.floor(log_uniform(rng, 0, 40, count))
    return ((n * (np.longdouble("3.14159265358979323846264338327950288") / 2)).astype(dtype)).astype(dtype)


def samples(name: str, dtype: type, count: int, seed: int = 0) -> tuple[Array, ...]:
    rng = np.random.default_rng(seed)
    half = count // 2
    if name == "pow":
        base = np.concatenate([np.abs(random_bits(rng, dtype, half)), rng.uniform(0.5, 2, half).astype(dtype)])
        limit = 1100 if dtype == np.float64 else 160
        with np.errstate(all="ignore"):
            power = rng.uniform(-limit, limit, 2 * half) / np.log2(base.astype(np.float64))
            return base, power.astype(dtype)
    if name in BINARY:
        near = [log_uniform(rng, -6, 6, half).astype(dtype) for _ in range(2)]
        far = [random_bits(rng, dtype, half) for _ in range(2)]
        return tuple(np.concatenate([a, b]) for a, b in zip(near, far))
    parts = [random_bits(rng, dtype, half), critical(name, rng, dtype, count - half)]
    if name in ("sin", "cos"):
        parts.append(multiples_of_half_pi(rng, dtype, count // 4))
    return (np.concatenate(parts),)
