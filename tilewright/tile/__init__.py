"""The tile language: kernels in Python on tiles of static shape. `import tilewright.tile as tl`.

Semantics
---------
- A launch `kernel[grid](...)` runs one **program instance** for each point of the grid, in any order and at the same
  time. `program_id(axis)` tells an instance which one it is. Instances communicate only through memory.
- A **tensor** parameter is a pointer to the element with index 0; sizes and strides are parameters of their own. A
  Python int is an i32, or an i64 where it does not fit; a float is an f32. A parameter annotated `tl.constexpr` is
  known when the kernel is compiled: the kernel is compiled for each combination of types and constexprs.
- A **tile** is a value with a static shape, each size a power of two; a scalar is a tile of shape (). Values are never
  changed: assignment rebinds a name. Where control flow meets, a name must have one type on all paths. `if`, `while`
  and `range` on values are control flow of the kernel; on constexprs, and with `static_range`, they are decided while
  compiling. `and`, `or` and `x if c else y` evaluate only what they need; `where` evaluates both. `break` and
  `continue` are Python's; a loop's index has no value after the loop.
- **Elementwise** operations broadcast as NumPy does. Of two types, the result is the narrowest that holds both (u64 and
  a signed integer have none), and of an integer and a float the float; a Python number takes the type of the tile that
  it is combined with. Integers wrap around. `//` and `%` round towards minus infinity. Integer `/` gives f32. Shifts by
  the width or more, division of integers by 0, and conversion of a float that the integer type does not hold are
  undefined.
- **Floats.** An operation on f16 or bf16 is computed in f32 and rounded once; an operation on f32 or f64 is rounded to
  its type, functions such as `exp` to a few units in the last place, and division by a number that is the same for
  several elements to two. On a GPU `exp(x)` may be off by 2 + 1.2 |x| units. `exp(x - m)` where `m` is a maximum over
  elements that include `x` may be off by `m - x` units, and is 0 below the normal numbers. `sum` and `cumsum` add f16
  and bf16 in f32 and round once at the end, and add bools and integers under 32 bits in i32, their result. `dot` adds
  products of f16, bf16 and f32 in f32, of f64 in f64, of i8 and u8 in i32, and returns that type; with
  input_precision="tf32" f32 operands lose 13 bits first. The order of additions within one `sum`, `cumsum` or `dot` is
  not specified, nor is the grouping in `reduce` and `associative_scan`, whose function is applied to whole tiles.
  A loop that rescales a sum by exp(old maximum - new maximum) may do so once for several iterations.
- **Memory.** `load`, `store` and atomics work on pointers, tiles of pointers and (not atomics) block pointers.
  Where a mask is false nothing is touched. A masked element of a load is `other`, or an undefined value. Access to an
  address outside a tensor argument is undefined, also if its value is not used. If two elements of one store have the
  same address, it is undefined which of them is kept.
- **Order.** Effects of one instance happen in the order of the program. The order between instances is
  unspecified. An atomic operation is indivisible for each element, also against instances, and orders nothing else.
- **Races.** If two instances access one element, one of them writes, and not both are atomic, the launch is undefined.

Debug mode reports accesses out of bounds, reads of unwritten elements and races, with the user's line and the instance.
In debug mode, masked elements without `other` are NaN.

Compilation: `frontend/` compiles a function's syntax tree to the IR of `ir.py`, whose operations are the table
in `ops.py`; `verify.py` checks it, `text.py` prints it, `interpret.py` runs it, `passes/` change and analyse it.
`executors.py` is the contract with code generators, which packages above register. No target is named here.
"""

from __future__ import annotations

from typing import Any

from tilewright.dtypes import DType
from tilewright.tile.frontend import language
from tilewright.tile.frontend.atomics import (
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xchg,
    atomic_xor,
)
from tilewright.tile.frontend.language import (
    advance,
    arange,
    argmax,
    argmin,
    atomic_add,
    broadcast,
    broadcast_to,
    cast,
    cat,
    cdiv,
    constexpr,
    cumsum,
    device_assert,
    device_print,
    dot,
    expand_dims,
    flip,
    full,
    join,
    load,
    make_block_ptr,
    maximum,
    minimum,
    next_power_of_2,
    num_programs,
    permute,
    program_id,
    ravel,
    reshape,
    sigmoid,
    sort,
    split,
    static_assert,
    static_print,
    static_range,
    store,
    trans,
    where,
    zeros,
    zeros_like,
)
from tilewright.tile.frontend.scans import associative_scan, reduce
from tilewright.tile.kernel import Kernel, kernel

sum = language.sum_
max = language.max_
min = language.min_

float64, float32, float16, bfloat16 = DType.F64, DType.F32, DType.F16, DType.BF16
int64, int32, int16, int8, int1 = DType.I64, DType.I32, DType.I16, DType.I8, DType.BOOL
uint64, uint32, uint16, uint8 = DType.U64, DType.U32, DType.U16, DType.U8

__all__ = [
    "Kernel",
    "advance",
    "arange",
    "argmax",
    "argmin",
    "associative_scan",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xchg",
    "atomic_xor",
    "bfloat16",
    "broadcast",
    "broadcast_to",
    "cast",
    "cat",
    "cdiv",
    "constexpr",
    "cumsum",
    "device_assert",
    "device_print",
    "dot",
    "expand_dims",
    "flip",
    "float16",
    "float32",
    "float64",
    "full",
    "int1",
    "int8",
    "int16",
    "int32",
    "int64",
    "join",
    "kernel",
    "load",
    "make_block_ptr",
    "max",
    "maximum",
    "min",
    "minimum",
    "next_power_of_2",
    "num_programs",
    "permute",
    "program_id",
    "ravel",
    "reduce",
    "reshape",
    "sigmoid",
    "sort",
    "split",
    "static_assert",
    "static_print",
    "static_range",
    "store",
    "sum",
    "trans",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "where",
    "zeros",
    "zeros_like",
]


def __getattr__(name: str) -> Any:
    """The scalar functions of `te`: exp, log, sqrt, erf, fma, ..."""
    if name in language.SCALAR_FUNCTIONS:
        return language.SCALAR_FUNCTIONS[name]
    raise AttributeError(f"module 'tilewright.tile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *language.SCALAR_FUNCTIONS])
