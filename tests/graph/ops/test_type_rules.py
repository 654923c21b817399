"""Every type error of the operators, raised; and none that is not raised here."""

from __future__ import annotations

import ast
import traceback
from pathlib import Path
from typing import Any

import pytest

import tilewright.graph.ops
from tests.graph.ops.checks import BF16, BOOL, F16, F32, F64, I8, I32, I64, U8
from tests.graph.ops.test_tile_kernels import ATTRS
from tilewright.dtypes import DType
from tilewright.errors import InternalError, TypeRuleError
from tilewright.graph.ir import TensorType, input_node
from tilewright.graph.op import apply, op_of


def t(*shape: int, dtype: DType = F32) -> TensorType:
    return TensorType(shape, dtype)


CONV = {
    "stride": (1, 1),
    "padding": ((0, 0), (0, 0)),
    "dilation": (1, 1),
    "groups": 1,
    "layout": "channels_first",
}
TRANSPOSE = {"stride": (2, 2), "padding": (0, 0), "output_padding": (0, 0), "dilation": (1, 1), "groups": 1}
POOL = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "ceil_mode": False, "layout": "channels_first"}
MAX = {**POOL, "dilation": (1, 1)}
AVG = {**POOL, "count_include_pad": True, "divisor": None}
PAD = {"low": (0,), "high": (0,), "interior": (0,), "value": 0.0}
RESIZE = {"sizes": (4, 4), "mode": "linear", "coordinates": "half_pixel"}
ATTENTION = {"causal": False, "scale": 1.0}
X = t(1, 2, 5, 5)

# operator, operand types, attributes, what the message says
WRONG: list[tuple[str, list[TensorType], dict[str, Any], str]] = [
    ("tile_kernel", [t(6, 4), t(6, 5)], ATTRS, r"test::axpy takes \[f32\[6,5\], f32\[6,5\]\]"),
    ("relu", [t(2), t(2)], {}, r"takes 1 operand\(s\), got 2"),
    ("add", [t(2)], {}, r"takes 2 operand\(s\), got 1"),
    ("add", [t(2), t(2, dtype=F16)], {}, r"one element type, got \[f32, f16\]; insert a cast"),
    ("add", [t(2, 3), t(2)], {}, r"shapes \[2, 3\], \[2\] do not broadcast"),
    ("add", [t(2, dtype=BOOL)] * 2, {}, "takes floats or integers, got bool"),
    ("maximum", [t(2, dtype=BOOL)] * 2, {}, "takes floats or integers, got bool"),
    ("div", [t(2, dtype=I32)] * 2, {}, "takes floats, got i32"),
    ("exp", [t(2, dtype=I64)], {}, "takes floats, got i64"),
    ("isnan", [t(2, dtype=I64)], {}, "takes floats, got i64"),
    ("logical_and", [t(2, dtype=U8)] * 2, {}, "takes bool, got u8"),
    ("bitwise_or", [t(2)] * 2, {}, "takes integers or bool, got f32"),
    ("shl", [t(2, dtype=BOOL)] * 2, {}, "takes integers, got bool"),
    ("gelu", [t(2)], {"approximate": "fast"}, "approximate must be one of none, tanh; got 'fast'"),
    ("softplus", [t(2)], {"beta": 0.0, "threshold": 20.0}, "beta must not be 0"),
    ("softplus", [t(2)], {"beta": "1", "threshold": 20.0}, "beta must be a value of f64, got '1'"),
    ("elu", [t(2)], {"alpha": None}, "alpha must be a value of f64"),
    ("leaky_relu", [t(2)], {"slope": True}, "slope must be a value of f64"),
    ("clamp", [t(2, dtype=I8)], {"min": 0.5, "max": None}, "min must be a value of i8, got 0.5"),
    ("clamp", [t(2, dtype=U8)], {"min": None, "max": 256}, "max must be a value of u8, got 256"),
    ("cast", [t(2)], {"dtype": "f32"}, "dtype must be an element type, got 'f32'"),
    ("select", [t(2), t(2), t(2)], {}, "the condition must be bool, got f32"),
    ("select", [t(2, dtype=BOOL), t(2), t(2, dtype=F64)], {}, "one element type"),
    ("full", [], {"value": 0.5, "shape": (2,), "dtype": I64}, "value must be a value of i64, got 0.5"),
    ("full", [], {"value": -129, "shape": (2,), "dtype": I8}, "value must be a value of i8, got -129"),
    ("full", [], {"value": 1, "shape": (2,), "dtype": BOOL}, "value must be a value of bool, got 1"),
    ("full", [], {"value": 1, "shape": (2,), "dtype": None}, "dtype must be an element type"),
    (
        "full",
        [],
        {"value": 1.0, "shape": (-2,), "dtype": F32},
        r"shape must be a tuple of extents, got \(-2,\)",
    ),
    ("full", [t(2)], {"value": 1.0, "shape": (2,), "dtype": F32}, "takes 0 operand"),
    ("iota", [], {"shape": (2,), "axis": 1, "dtype": I64}, r"axis must be in \[0, 1\), got 1"),
    ("iota", [], {"shape": (2,), "axis": 0, "dtype": BOOL}, "takes floats or integers, got bool"),
    ("reshape", [t(2, 3)], {"shape": (4,)}, r"\[4\] has 4 elements, the operand has 6"),
    ("reshape", [t(2, 3)], {"shape": [6]}, "shape must be a tuple"),
    ("permute", [t(2, 3)], {"axes": (0, 0)}, r"axes must be a permutation of the 2 axes, got \(0, 0\)"),
    ("broadcast_to", [t(2, 3)], {"shape": (3,)}, r"shape \[2, 3\] does not broadcast to \[3\]"),
    ("broadcast_to", [t(1, 3)], {"shape": (2, 1)}, r"shape \[1, 3\] does not broadcast to \[2, 1\]"),
    ("slice", [t(4)], {"starts": (0, 0), "stops": (4,), "steps": (1,)}, r"starts must be 1 integer\(s\)"),
    ("slice", [t(4)], {"starts": (0,), "stops": (4,), "steps": (0,)}, "steps must be .* at least 1"),
    ("slice", [t(4)], {"starts": (0,), "stops": (5,), "steps": (1,)}, "start <= stop <= extent"),
    ("slice", [t(4)], {"starts": (-1,), "stops": (4,), "steps": (1,)}, "starts must be .* at least 0"),
    ("flip", [t(4)], {"axes": (0, 0)}, "axes must be different axes"),
    ("pad", [t(4)], {**PAD, "low": (-1,)}, "low must be .* at least 0"),
    ("pad", [t(4, dtype=I64)], PAD, "value must be a value of i64, got 0.0"),
    ("concat", [], {"axis": 0}, "at least 1 operand"),
    ("concat", [t(2, 3), t(2, 4)], {"axis": 0}, "equal extents on every axis but 0"),
    ("concat", [t(2, 3), t(2)], {"axis": 0}, "equal extents on every axis but 0"),
    ("take", [t(3), t(2)], {"axis": 0}, "indices must be i64 or i32, got f32"),
    ("take", [t(0), t(2, dtype=I64)], {"axis": 0}, "from an axis that has none"),
    ("take_along", [t(3, 4), t(4, 4, dtype=I64)], {"axis": 1}, r"at most its extents .* but 1, got \[4, 4\]"),
    ("take_along", [t(3, 4), t(4, dtype=I64)], {"axis": 1}, "x's rank"),
    ("argsort", [t(3)], {"axis": 0, "descending": 1}, "descending must be True or False, got 1"),
    (
        "argsort",
        [t(3, dtype=BOOL)],
        {"axis": 0, "descending": True},
        "takes floats or integers, got bool",
    ),
    ("cumprod", [t(3)], {"axis": 1}, r"axis must be in \[0, 1\), got 1"),
    *(
        ("put", types, {"axis": 0, "combine": "add"}, message)
        for types, message in [
            ([t(3), t(2), t(2)], "indices must be i64 or i32, got f32"),
            ([t(3), t(2, dtype=I64), t(2, dtype=I64)], "updates must be of x's type f32, got i64"),
            ([t(3), t(1, 2, dtype=I64), t(2)], r"indices must have rank 1, got i64\[1,2\]"),
            ([t(3, 4), t(2, dtype=I64), t(2)], r"updates must be \[2, 4\], got \[2\]"),
            ([t(3, dtype=BOOL), t(2, dtype=I64), t(2, dtype=BOOL)], "takes floats or integers, got bool"),
        ]
    ),
    ("put", [t(3), t(2, dtype=I64), t(2)], {"axis": 0, "combine": "mean"}, "combine must be one of set, add"),
    *(
        ("put_along", types, {"axis": 1, "combine": "set"}, message)
        for types, message in [
            ([t(3, 4), t(4, 4, dtype=I64), t(4, 4)], r"at most its extents .* but 1, got \[4, 4\]"),
            ([t(3, 4), t(2, 4, dtype=I64), t(3, 4)], r"updates must be \[2, 4\], got \[3, 4\]"),
        ]
    ),
    ("resize", [X], {**RESIZE, "mode": "area"}, "mode must be one of nearest, linear, cubic; got 'area'"),
    ("resize", [X], {**RESIZE, "coordinates": "?"}, "coordinates must be one of half_pixel"),
    ("resize", [t(4)], RESIZE, "sizes must be a tuple of 1 to 1 extents"),
    ("resize", [X], {**RESIZE, "sizes": (0, 4)}, "sizes must be .* at least 1"),
    (
        "resize",
        [X],
        {**RESIZE, "mode": "nearest", "coordinates": "align_corners"},
        "nearest does not go with",
    ),
    ("resize", [t(1, 2, 5, 5, dtype=U8)], RESIZE, "takes floats, got u8"),
    ("resize", [t(1, 2, 0, 5)], RESIZE, "cannot resize an axis that has no elements"),
    ("sum", [t(2, 3)], {"axes": (1, 0), "keepdims": False}, r"axes must be a sorted tuple .* got \(1, 0\)"),
    ("sum", [t(2, 3)], {"axes": (0,), "keepdims": 1}, "keepdims must be True or False, got 1"),
    ("sum", [t(2, 3, dtype=BOOL)], {"axes": (0,), "keepdims": False}, "takes floats or integers, got bool"),
    ("mean", [t(2, 3, dtype=I64)], {"axes": (0,), "keepdims": False}, "takes floats, got i64"),
    ("any", [t(2, 3)], {"axes": (0,), "keepdims": False}, "takes bool, got f32"),
    ("amax", [t(2, 0)], {"axes": (1,), "keepdims": False}, r"not defined over no elements, got f32\[2,0\]"),
    ("argmax", [t(2, 0)], {"axis": 1, "keepdims": False}, "not defined over no elements"),
    ("argmax", [t(2, 3)], {"axis": -1, "keepdims": False}, r"axis must be in \[0, 2\), got -1"),
    ("var", [t(2, 3)], {"axes": (0,), "correction": None, "keepdims": False}, "correction must be a value"),
    ("cumsum", [t(2)], {"axis": 1}, r"axis must be in \[0, 1\)"),
    ("matmul", [t(3), t(3, 2)], {}, "must be matrices"),
    ("matmul", [t(2, 3), t(4, 2)], {}, "columns and b's rows differ: 3 and 4"),
    ("matmul", [t(2, 2, 3), t(3, 3, 2)], {}, r"shapes \[2\], \[3\] do not broadcast"),
    ("matmul", [t(2, 3, dtype=I8), t(3, 2, dtype=I32)], {}, "one element type"),
    ("matmul", [t(2, 3, dtype=BOOL), t(3, 2, dtype=BOOL)], {}, "takes floats or integers, got bool"),
    ("linear", [t(3), t(3)], {}, r"takes x \[..., K\] and w \[N, K\]"),
    ("linear", [t(2, 3), t(4, 2)], {}, "x's last extent is 3, w's is 2"),
    ("linear", [t(2, 3), t(4, 3), t(3)], {}, r"the bias must be f32\[4\], got f32\[3\]"),
    ("linear", [t(2, 3, dtype=I8), t(4, 3, dtype=I8), t(4, dtype=I8)], {}, r"the bias must be i32\[4\]"),
    ("conv", [t(2, 3), t(2, 3)], CONV, "1 to 3 spatial axes"),
    ("conv", [X, t(3, 2, 3)], CONV, "the weight must have x's rank 4"),
    ("conv", [X, t(3, 2, 3, 3)], {**CONV, "stride": (1,)}, r"stride must be 2 integer\(s\)"),
    ("conv", [X, t(3, 2, 3, 3)], {**CONV, "padding": (1, 1, 1)}, r"padding must be 2 pair\(s\)"),
    ("conv", [X, t(3, 2, 3, 3)], {**CONV, "padding": ((0, 0), (0, -1))}, "each pair of padding must be 2"),
    ("conv", [X, t(3, 2, 3, 3)], {**CONV, "layout": "NCHW"}, "layout must be one of"),
    ("conv", [X, t(3, 2, 3, 3)], {**CONV, "layout": "channels_by_0"}, "layout must be one of"),
    ("conv", [t(1, 2, 5), t(3, 3)], {**CONV, "layout": "channels_by_2"}, "and channels, in blocks, got"),
    (
        "conv",
        [t(1, 2, 5, 5, 2), t(3, 3, 4, 6)],
        {**CONV, "layout": "channels_by_4"},
        "6 output channels do not divide into blocks of 4",
    ),
    (
        "max_pool",
        [t(1, 2, 5, 5, 2)],
        {**MAX, "layout": "channels_by_4"},
        "x must have blocks of 4 channels",
    ),
    ("conv", [X, t(3, 2, 3, 3)], {**CONV, "groups": 0}, "groups must be a positive integer, got 0"),
    ("conv", [X, t(3, 2, 0, 3)], CONV, "kernel must not be empty"),
    ("conv", [X, t(3, 3, 3, 3)], CONV, r"x has 2 channels, the weight takes 1 group\(s\) of 3"),
    ("conv", [X, t(3, 1, 3, 3)], {**CONV, "groups": 2}, "3 output channels do not divide into 2 groups"),
    ("conv", [X, t(3, 2, 6, 3)], CONV, r"kernel \(6, 3\) is larger than the padded extents \(5, 5\)"),
    ("conv", [X, t(3, 2, 3, 3), t(2)], CONV, r"the bias must be f32\[3\]"),
    (
        "conv_transpose",
        [X, t(2, 3, 2, 2)],
        {**TRANSPOSE, "output_padding": (2, 0)},
        "output_padding must be smaller",
    ),
    ("conv_transpose", [X, t(2, 3, 2, 0)], TRANSPOSE, "kernel must not be empty"),
    ("conv_transpose", [X, t(3, 3, 2, 2)], TRANSPOSE, "x has 2 channels, the weight takes 3"),
    (
        "conv_transpose",
        [X, t(2, 3, 2, 2)],
        {**TRANSPOSE, "groups": 3},
        "2 input channels do not divide into 3",
    ),
    (
        "conv_transpose",
        [X, t(2, 3, 2, 2)],
        {**TRANSPOSE, "padding": (5, 0)},
        "result would have spatial extents",
    ),
    ("max_pool", [t(5, 5)], MAX, "kernel must have one entry per spatial axis"),
    ("max_pool", [t(1, 2, 0, 5)], MAX, "spatial extents must not be 0"),
    ("max_pool", [t(1, 2, 5, 5, dtype=BOOL)], MAX, "takes floats or integers, got bool"),
    (
        "max_pool",
        [X],
        {**MAX, "padding": (2, 0)},
        r"padding must be at most half of the window, got \(2, 0\)",
    ),
    ("max_pool", [X], {**MAX, "stride": (0, 1)}, "stride must be .* at least 1"),
    ("max_pool", [X], {**MAX, "dilation": (5, 1)}, "does not fit"),
    ("max_pool", [X], {**MAX, "ceil_mode": 0}, "ceil_mode must be True or False"),
    ("avg_pool", [X], {**AVG, "count_include_pad": None}, "count_include_pad must be True or False"),
    ("avg_pool", [X], {**AVG, "divisor": 0}, "divisor must be None or an integer that is not 0"),
    ("avg_pool", [t(1, 2, 5, 5, dtype=I64)], AVG, "takes floats, got i64"),
    ("adaptive_avg_pool", [X], {"sizes": (0, 1), "layout": "channels_first"}, "sizes must be .* at least 1"),
    ("softmax", [t(2, 3)], {"axis": 2}, r"axis must be in \[0, 2\), got 2"),
    ("softmax", [t()], {"axis": 0}, r"axis must be in \[0, 0\)"),
    ("layer_norm", [t(2, 3)], {"dims": 0, "eps": 1e-5}, "dims must be 1 to 2, the rank of x; got 0"),
    (
        "layer_norm",
        [t(2, 3), t(2)],
        {"dims": 1, "eps": 1e-5},
        r"parameters must have shape \[3\], got f32\[2\]",
    ),
    ("layer_norm", [t(2, 3), t(3, dtype=BF16)], {"dims": 1, "eps": 1e-5}, "one element type"),
    ("layer_norm", [t(2, 3)], {"dims": 1, "eps": None}, "eps must be a value of f64"),
    ("rms_norm", [t(2, 3), t(3), t(3)], {"dims": 1, "eps": 1e-5}, "takes 1 or 2 operand"),
    ("group_norm", [t(2)], {"groups": 1, "eps": 1e-5}, "x must be N C spatial"),
    ("group_norm", [X], {"groups": 3, "eps": 1e-5}, "groups must divide the 2 channels, got 3"),
    ("group_norm", [X, t(2)], {"groups": 1, "eps": 1e-5}, "takes 1 or 3 operand"),
    ("batch_norm", [t(2), *[t(2)] * 4], {"eps": 1e-5}, "x must be N C spatial"),
    ("batch_norm", [X, *[t(5)] * 4], {"eps": 1e-5}, r"parameters must have shape \[2\]"),
    ("attention", [t(3), t(4, 3), t(4, 2)], ATTENTION, r"must be \[..., length, width\]"),
    ("attention", [t(2, 3), t(4, 2), t(4, 2)], ATTENTION, "q and k differ in width: 3 and 2"),
    ("attention", [t(2, 3), t(4, 3), t(5, 2)], ATTENTION, "k and v differ in length: 4 and 5"),
    ("attention", [t(2, 3), t(4, 3), t(4, 2)], {**ATTENTION, "causal": 1}, "causal must be True or False"),
    ("attention", [t(2, 3), t(4, 3), t(4, 2)], {**ATTENTION, "scale": None}, "scale must be a value of f64"),
    ("attention", [t(2, 3), t(4, 3), t(4, 2), t(2, 4, dtype=I64)], ATTENTION, "the mask must be bool or f32"),
    ("attention", [t(1, 3), t(4, 3), t(4, 2), t(2, 4)], ATTENTION, r"the mask must broadcast to \[1, 4\]"),
]


@pytest.mark.parametrize(("op", "types", "attrs", "message"), WRONG)
def test_type_error(op: str, types: list[TensorType], attrs: dict[str, Any], message: str) -> None:
    inputs = [input_node(position, type) for position, type in enumerate(types)]
    with pytest.raises(TypeRuleError, match=message) as caught:
        apply(op, *inputs, name="here", **attrs)
    assert caught.value.message.startswith(f"{op} at here of ")


def test_every_type_error_is_tested() -> None:
    """Each `expect(...)` in the operator files is one that some case above fails."""
    folder = Path(tilewright.graph.ops.__file__).parent
    failed: set[tuple[str, int]] = set()
    for op, types, attrs, _ in WRONG:
        try:
            op_of(op).infer(types, attrs)
        except TypeRuleError as error:
            failed |= {
                (Path(frame.filename).name, frame.lineno or 0)
                for frame in traceback.extract_tb(error.__traceback__)
            }
    untested = []
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "expect":
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                if not any((path.name, line) in failed for line in lines):
                    untested.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not untested, "\n".join(untested)


def test_all_attributes_must_be_given() -> None:
    with pytest.raises(InternalError, match="softmax takes attributes"):
        apply("softmax", input_node(0, t(2, 3)))
    with pytest.raises(InternalError, match="no operator is called 'frobnicate'"):
        apply("frobnicate", input_node(0, t(2, 3)))
