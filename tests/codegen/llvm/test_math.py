"""Elementary functions of the llvm target against NumPy: accuracy, special cases, symbols, lanes."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import platform
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

PI = np.longdouble("3.14159265358979323846264338327950288")

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

    def position(array: ir.Value) -> ir.Value:
        return builder.bitcast(builder.gep(array, [index], source_etype=element(dtype)), kind.as_pointer())

    size = np.dtype(dtype).itemsize
    args = [
        builder.load(position(a), typ=kind, align=size) for a in function.args[: 2 if name in BINARY else 1]
    ]
    builder.store(emit(builder, name, *args, context=context), position(function.args[2]), align=size)
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
        arrays: list[Array] = [np.resize(np.asarray(a, self.dtype), padded) for a in args]
        out: Array = np.empty(padded, self.dtype)
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
    value = 2 / np.sqrt(PI) * np.exp(-clipped * clipped) * total
    return np.where(np.abs(x) > 6.5, np.sign(x), value)


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
    """For floats in double, for doubles in extended precision: 64 bits of mantissa on x86."""
    single = args[0].dtype == np.float32
    with np.errstate(all="ignore"):
        wide = [a.astype(np.float64 if single else np.longdouble) for a in args]
        if name == "erf" and single:
            return np.frompyfunc(math.erf, 1, 1)(wide[0]).astype(np.float64)
        return REFERENCES[name](*wide)


def ulps(got: Array, wanted: Array) -> Array:
    """|got - wanted| in units of the last place of the wanted number in got's type; infinity counts as 2^emax."""
    info = np.finfo(got.dtype)
    wide = wanted.dtype.type
    limit = wide(2) ** info.maxexp
    with np.errstate(all="ignore"):
        clipped, value = np.clip(wanted, -limit, limit), np.clip(got.astype(wide), -limit, limit)
        exponent = np.frexp(clipped)[1] - 1 - info.nmant
        error = np.ldexp(np.abs(value - clipped), -np.maximum(exponent, info.minexp - info.nmant))
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
    nearest: Array = (n * PI / 2).astype(dtype)
    return np.nextafter(nearest, rng.choice([-np.inf, 0, np.inf], count).astype(dtype)).astype(dtype)


def samples(name: str, dtype: type, count: int, seed: int = 0) -> tuple[Array, ...]:
    rng = np.random.default_rng(seed)
    half = count // 2
    if name == "pow":
        base = np.concatenate(
            [np.abs(random_bits(rng, dtype, half)), rng.uniform(0.5, 2, half).astype(dtype)]
        )
        limit = 1100 if dtype == np.float64 else 160
        with np.errstate(all="ignore"):
            power = rng.uniform(-limit, limit, 2 * half) / np.log2(base.astype(np.float64))
            return base, power.astype(dtype)
    if name in BINARY:
        near: list[Array] = [log_uniform(rng, -6, 6, half).astype(dtype) for _ in range(2)]
        far = [random_bits(rng, dtype, half) for _ in range(2)]
        return tuple(np.concatenate([a, b]) for a, b in zip(near, far, strict=True))
    parts = [random_bits(rng, dtype, half), critical(name, rng, dtype, count - half)]
    if name in ("sin", "cos"):
        parts.append(multiples_of_half_pi(rng, dtype, count // 4))
    return (np.concatenate(parts),)


# --- accuracy ---------------------------------------------------------------------------------------------------------

extended = pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="needs an 80-bit long double")
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
BOUNDED = frozenset({"sin", "cos", "tanh", "erf"})


def check_accuracy(name: str, dtype: type, count: int, features: str) -> None:
    args = samples(name, dtype, count)
    got = compiled(dtype, 8, features)(name, *args)
    error = ulps(got, reference(name, *args))
    worst = int(np.argmax(error))
    print(f"{name} {np.dtype(dtype).name}: at most {error[worst]:.3f} ulp, at {[a[worst] for a in args]}")
    assert error[worst] <= (0 if name == "fmod" else 2), (
        f"{name}{tuple(a[worst] for a in args)} = {got[worst]}"
    )
    if name in BOUNDED:
        assert not (np.abs(got) > 1).any()


@extended
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_float_is_within_2_ulp(name: str) -> None:
    check_accuracy(name, np.float32, 2_000_000, HOST)


@extended
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_double_is_within_2_ulp(name: str) -> None:
    check_accuracy(name, np.float64, 100_000 if name == "erf" else 400_000, HOST)


@x86
@extended
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_without_fma_it_is_within_2_ulp(name: str, dtype: type) -> None:
    check_accuracy(name, dtype, 50_000 if name == "erf" else 200_000, NO_FMA)


def test_the_double_nearest_to_a_multiple_of_half_pi() -> None:
    """6381956970095103 * 2^797 is 4.69e-19 away from one: no double is nearer."""
    x = np.array([math.ldexp(6381956970095103, 797)])
    assert compiled(np.float64, 1)("cos", x)[0] == pytest.approx(-4.687165924254628e-19, rel=4e-16, abs=0)
    assert abs(compiled(np.float64, 1)("sin", x)[0]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FUNCTIONS - BINARY))
def test_every_float_is_within_2_ulp(name: str) -> None:
    """All 2^32 of them: minutes for each function."""
    kernel, step = compiled(np.float32, 8), 1 << 22
    worst = 0.0
    for start in range(0, 1 << 32, step):
        x = np.arange(start, start + step, dtype=np.uint32).view(np.float32)
        worst = max(worst, float(ulps(kernel(name, x), reference(name, x)).max()))
    print(f"{name}: at most {worst:.3f} ulp")
    assert worst <= 2


# --- special cases ----------------------------------------------------------------------------------------------------

INF, NAN = math.inf, math.nan
NOTABLE = [0.0, 1e-40, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 1e10, 2.0**23 + 1, 2.0**30, 3e38, INF]
GRID = [sign * value for value in NOTABLE for sign in (1, -1)] + [NAN]

# argument -> result, exactly; a negative zero counts as different from zero
# fmt: off
SPECIAL: dict[str, list[tuple[float, float]]] = {
    "exp": [(0.0, 1), (-0.0, 1), (INF, INF), (-INF, 0.0), (1e4, INF), (-1e4, 0.0), (NAN, NAN)],
    "expm1": [(0.0, 0.0), (-0.0, -0.0), (1e-40, 1e-40), (INF, INF), (-INF, -1), (-1e4, -1), (1e4, INF), (NAN, NAN)],
    "exp2": [(0.0, 1), (-0.0, 1), (10, 1024), (-2, 0.25), (-140, 2.0**-140), (INF, INF), (-INF, 0.0), (NAN, NAN)],
    "log": [(1, 0.0), (0.0, -INF), (-0.0, -INF), (INF, INF), (-1, NAN), (-INF, NAN), (-1e-40, NAN), (NAN, NAN)],
    "log2": [(1, 0.0), (8, 3), (2.0**-140, -140), (0.0, -INF), (-0.0, -INF), (INF, INF), (-1, NAN), (NAN, NAN)],
    "log1p": [(0.0, 0.0), (-0.0, -0.0), (-1e-40, -1e-40), (-1, -INF), (-2, NAN), (INF, INF), (-INF, NAN), (NAN, NAN)],
    "sin": [(0.0, 0.0), (-0.0, -0.0), (1e-40, 1e-40), (INF, NAN), (-INF, NAN), (NAN, NAN)],
    "cos": [(0.0, 1), (-0.0, 1), (1e-40, 1), (INF, NAN), (-INF, NAN), (NAN, NAN)],
    "tanh": [(0.0, 0.0), (-0.0, -0.0), (1e-40, 1e-40), (30, 1), (-3e38, -1), (INF, 1), (-INF, -1), (NAN, NAN)],
    "erf": [(0.0, 0.0), (-0.0, -0.0), (7, 1), (-3e38, -1), (INF, 1), (-INF, -1), (NAN, NAN)],
    "rsqrt": [(0.0, INF), (-0.0, -INF), (4, 0.5), (INF, 0.0), (-1, NAN), (-INF, NAN), (NAN, NAN)],
}
# fmt: on


def identical(got: Array, wanted: Array) -> Array:
    return (np.isnan(got) & np.isnan(wanted)) | ((got == wanted) & (np.signbit(got) == np.signbit(wanted)))


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(SPECIAL))
def test_special_cases(name: str, dtype: type, lanes: int) -> None:
    x, wanted = np.array(SPECIAL[name], dtype).T.copy()
    got = compiled(dtype, lanes)(name, x)
    assert identical(got, wanted).all(), list(zip(x, got, wanted, strict=True))


@extended
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(BINARY))
def test_special_cases_of_two_arguments(name: str, dtype: type, lanes: int) -> None:
    """Every pair of notable numbers, against C's long double functions: kind and sign exactly, numbers to 1 ulp."""
    x, y = np.array(list(itertools.product(GRID, GRID)), dtype).T.copy()
    got, wanted = compiled(dtype, lanes)(name, x, y), reference(name, x, y)
    with np.errstate(all="ignore"):
        rounded: Array = wanted.astype(dtype)
    good = (ulps(got, wanted) <= 1) & (np.isnan(wanted) | (np.signbit(got) == np.signbit(wanted)))
    good &= (np.isinf(got) == np.isinf(rounded)) & ((got == 0) == (rounded == 0))
    assert good.all(), list(zip(x[~good], y[~good], got[~good], wanted[~good], strict=True))


# --- the code itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_scalar_and_vector_agree_bitwise(name: str, dtype: type) -> None:
    args = samples(name, dtype, 20_000, seed=1)
    wanted = compiled(dtype, 1)(name, *args)
    for lanes in (3, *LANES[1:]):
        assert identical(compiled(dtype, lanes)(name, *args), wanted).all(), f"{lanes} lanes"


def undefined_symbols(object_file: bytes) -> list[str]:
    """Of a 64-bit ELF file."""
    (section_table,) = struct.unpack_from("<Q", object_file, 0x28)
    size, count = struct.unpack_from("<HH", object_file, 0x3A)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", object_file, section_table + size * index) for index in range(count)
    ]
    symbols = next(section for section in sections if section[1] == 2)  # SHT_SYMTAB
    names = sections[symbols[6]][4]
    found = []
    for position in range(symbols[4] + 24, symbols[4] + symbols[5], 24):  # the first symbol is always empty
        name, _, _, section, _, _ = struct.unpack_from("<IBBHQQ", object_file, position)
        if section == 0:
            end = object_file.index(b"\0", names + name)
            found.append(object_file[names + name : end].decode())
    return found


@x86
@pytest.mark.parametrize("features", [HOST, NO_FMA, SSE2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_object_needs_no_symbol(dtype: type, features: str) -> None:
    module = ir.Module()
    for name, lanes in itertools.product(sorted(FUNCTIONS), (1, 4, 16)):
        add_kernel(module, name, dtype, lanes, MathContext(has_fma=features == HOST))
    machine = target_machine(features, jit=False)
    assert undefined_symbols(machine.emit_object(optimised(module, machine))) == []


@x86
def test_symbol_check_sees_a_library_call() -> None:
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.FloatType(), [ir.FloatType()]), "f")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(builder.call(module.declare_intrinsic("llvm.exp", [ir.FloatType()]), function.args))
    machine = target_machine(HOST, jit=False)
    assert undefined_symbols(machine.emit_object(optimised(module, machine))) == ["expf"]


def emitted(name: str, kind: ir.Type) -> ir.Module:
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(kind, [kind] * (2 if name in BINARY else 1)), "f")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(emit(builder, name, *function.args))
    return module


@pytest.mark.parametrize(("name", "limit"), [("exp", 21), ("tanh", 30), ("erf", 30)])
def test_hot_functions_are_short_and_straight(name: str, limit: int) -> None:
    """Instructions of LLVM IR; `abs` and `copysign` may each become two."""
    module = optimised(emitted(name, ir.VectorType(ir.FloatType(), 8)), target_machine(HOST, jit=False))
    blocks = list(module.get_function("f").blocks)
    assert len(blocks) == 1
    count = sum(i.opcode not in ("bitcast", "ret") for i in blocks[0].instructions)
    print(f"{name}: {count} instructions")
    assert count <= limit


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_no_fast_math_and_one_block(name: str) -> None:
    module = emitted(name, ir.VectorType(ir.DoubleType(), 2))
    assert len(module.globals["f"].blocks) == 1, "the caller's block stays one block"
    words = set(str(module).split())
    assert not words & {"fast", "nnan", "ninf", "nsz", "arcp", "contract", "afn", "reassoc"}


def test_helpers_are_shared() -> None:
    module = ir.Module()
    for index in range(2):
        function = ir.Function(module, ir.FunctionType(ir.FloatType(), [ir.FloatType()]), f"f{index}")
        builder = ir.IRBuilder(function.append_basic_block())
        builder.ret(emit(builder, "sin", emit(builder, "cos", function.args[0])))
    names = [name for name in module.globals if name.startswith("tw.math.")]
    assert len(names) == len(set(names))
    llvm.parse_assembly(str(module)).verify()


def test_unknown_name() -> None:
    with pytest.raises(KeyError, match="gamma"):
        emit(ir.IRBuilder(), "gamma", ir.Constant(ir.FloatType(), 1.0))


@pytest.mark.parametrize(
    "args",
    [
        [ir.Constant(ir.IntType(32), 1)] * 2,
        [ir.Constant(ir.FloatType(), 1.0), ir.Constant(ir.DoubleType(), 1.0)],
        [ir.Constant(ir.FloatType(), 1.0)],
    ],
    ids=["integers", "mixed", "too few"],
)
def test_wrong_arguments(args: list[ir.Value]) -> None:
    with pytest.raises(TypeError):
        emit(ir.IRBuilder(), "pow", *args)
