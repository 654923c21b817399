"""Converters against onnx's reference implementation, family by family, by the oracle; a few of each compiled too."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.frontend.onnx.checking import check, check_model, floats, ints, model_of
from tilewright.errors import UnsupportedOpsError
from tilewright.frontend.onnx import import_onnx
from tilewright.frontend.onnx.op_elementwise import UNARY
from tilewright.frontend.onnx.registry import table
from tilewright.graph.oracle import evaluate

X = {"x": floats(2, 3, 4)}
UNIT = {"x": np.linspace(-0.95, 0.95, 13, dtype=np.float32)}
ABOVE = {"x": np.linspace(1.0, 9.0, 13, dtype=np.float32)}
PAIR = {"a": floats(2, 3, 4), "b": floats(3, 1, seed=1)}
WHOLE = {"a": ints(-9, 10, 4, 5), "b": np.where(ints(-4, 5, 4, 5, seed=1) == 0, 3, ints(-4, 5, 4, 5, seed=1))}
FLAT = {"x": floats(32), "w": floats(8)}
IMAGE = {"x": floats(1, 2, 7, 6)}


@pytest.mark.parametrize("name", sorted(UNARY))
def test_unary(name: str) -> None:
    if name == "Not":
        check("y = Not(x)", {"x": floats(7) > 0})
    elif name == "BitwiseNot":
        check("y = BitwiseNot(x)", {"x": ints(-50, 50, 9)})
    elif name in ("Log", "Sqrt"):
        check(f"y = {name}(x)", ABOVE)
    else:
        check(f"y = {name}(x)", X, opset=22 if name in ("HardSwish", "Mish") else 21)


FORMULAS = [
    ("Asin", UNIT),
    ("Acos", UNIT),
    ("Atan", X),
    ("Sinh", X),
    ("Cosh", X),
    ("Asinh", X),
    ("Acosh", ABOVE),
    ("Atanh", UNIT),
    ("Softplus", X),
    ("Softsign", X),
    ("Elu <alpha: float = 0.7>", X),
    ("Selu", X),
    ("Celu <alpha: float = 0.5>", X),
    ("LeakyRelu <alpha: float = 0.2>", X),
    ("ThresholdedRelu <alpha: float = 0.4>", X),
    ("HardSigmoid <alpha: float = 0.3>", X),
    ("Shrink <lambd: float = 0.4, bias: float = 0.1>", X),
    ("Gelu", X),
    ('Gelu <approximate: string = "tanh">', X),
    ("IsInf <detect_negative: int = 0>", {"x": np.array([1, -np.inf, np.inf, np.nan], np.float32)}),
]


@pytest.mark.parametrize(("op", "inputs"), FORMULAS, ids=[op for op, _ in FORMULAS])
def test_formulas(op: str, inputs: dict[str, np.ndarray]) -> None:
    name, _, attributes = op.partition(" ")
    check(f"y = {name} {attributes} (x)", inputs)


@pytest.mark.parametrize(
    "op", ["Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Less", "Equal", "GreaterOrEqual"]
)
def test_binary(op: str) -> None:
    inputs = {"a": np.abs(PAIR["a"]), "b": PAIR["b"]} if op == "Pow" else PAIR
    check(f"y = {op}(a, b)", inputs)


@pytest.mark.parametrize("op", ["Div", "Mod", "Mod <fmod: int = 1>", "BitwiseXor", "Max"])
def test_integers(op: str) -> None:
    """Towards zero, by the divisor's sign, by the dividend's."""
    name, _, attributes = op.partition(" ")
    check(f"y = {name} {attributes} (a, b)", WHOLE, compiled=name == "Div")


def test_integer_powers_are_exact() -> None:
    base, exponent = np.array([3, -2, 7, -1, 10, 1], np.int64), np.array([39, 61, 0, 63, 18, 5], np.int64)
    check("y = Pow(a, b)", {"a": base, "b": exponent})
    check("y = Pow(a, b)", {"a": np.array([1, 2, 3], np.int32), "b": np.array([4, 5, 6], np.float32)})
    check("y = Pow(a, b)", {"a": np.array([1, 2, 3], np.float32), "b": np.array([4, 5, 6], np.int32)})


@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
def test_shifts(direction: str) -> None:
    check(
        f'y = BitShift <direction: string = "{direction}"> (a, b)',
        {"a": np.array([16, 4, 1, 255], np.uint8), "b": np.array([1, 2, 3, 7], np.uint8)},
    )


REDUCTIONS = ["Sum", "Mean", "Prod", "Max", "Min", "L1", "L2", "LogSum", "LogSumExp", "SumSquare"]


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("keep", [0, 1])
def test_reductions(kind: str, keep: int) -> None:
    inputs = {"x": np.abs(floats(3, 4, 5)) + 0.1}
    body = (
        f"axes = Constant <value_ints: ints = [0, -1]> () y = Reduce{kind} <keepdims: int = {keep}> (x, axes)"
    )
    check(body, inputs)
    check(f"y = Reduce{kind} <keepdims: int = {keep}, axes: ints = [1]> (x)", inputs, opset=11)
    check(f"y = Reduce{kind} <noop_with_empty_axes: int = 1> (x)", inputs, opset=18)


def test_reductions_of_nothing() -> None:
    for kind, value in (("Sum", 0), ("Prod", 1), ("Max", -np.inf), ("Min", np.inf)):
        check(
            f"axes = Constant <value_ints: ints = [1]> () y = Reduce{kind} (x, axes)", {"x": floats(2, 0, 3)}
        )
        assert value is not None


SIMPLE = [
    (
        "y = ArgMax <axis: int = 1, select_last_index: int = 1> (x)",
        {"x": ints(0, 3, 3, 9).astype(np.float32)},
    ),
    ("y = ArgMin <axis: int = -1, keepdims: int = 0> (x)", X),
    ("a = Constant <value_int: int = 1> () y = CumSum <exclusive: int = 1, reverse: int = 1> (x, a)", X),
    ("y = Softmax <axis: int = 1> (x)", X),
    ("y = LogSoftmax (x)", X),
    ("y = Hardmax <axis: int = 0> (x)", X),
    ("y = LpNormalization <axis: int = 1, p: int = 2> (x)", X),
    ("s = Constant <value_ints: ints = [0, -1, 2]> () y = Reshape (x, s)", X),
    ("y = Transpose <perm: ints = [2, 0, 1]> (x)", X),
    ("y = Flatten <axis: int = 2> (x)", X),
    ("a = Constant <value_ints: ints = [0, -1]> () y = Unsqueeze (x, a)", X),
    ("y = Squeeze (x)", {"x": floats(1, 3, 1)}),
    ("s = Constant <value_ints: ints = [2, 1, 3, 1]> () y = Expand (x, s)", {"x": floats(3, 4)}),
    ("r = Constant <value_ints: ints = [2, 1, 3]> () y = Tile (x, r)", X),
    ("y = Concat <axis: int = -1> (x, x)", X),
    (
        "b = Constant <value_ints: ints = [3, 1]> () e = Constant <value_ints: ints = [-100, 100]> ()"
        " a = Constant <value_ints: ints = [2, 1]> () s = Constant <value_ints: ints = [-2, 2]> ()"
        " y = Slice (x, b, e, a, s)",
        X,
    ),
    ("i = Constant <value_ints: ints = [0, -1, 1]> () y = Gather <axis: int = 1> (x, i)", X),
    ("k = Constant <value: tensor = int64 {1}> () y = Trilu <upper: int = 0> (x, k)", X),
    ("y = DepthToSpace <blocksize: int = 2> (x)", {"x": floats(1, 8, 2, 3)}),
    ('y = DepthToSpace <blocksize: int = 2, mode: string = "CRD"> (x)', {"x": floats(1, 8, 2, 3)}),
    ("y = SpaceToDepth <blocksize: int = 2> (x)", {"x": floats(1, 2, 4, 6)}),
    ("y = EyeLike <k: int = 1> (x)", {"x": floats(3, 4)}),
    ("y = Shape <start: int = 1> (x)", X),
    ("y = Size (x)", X),
    ("y = Det (x)", {"x": floats(3, 5, 5)}),
    ("y = LRN <size: int = 3, alpha: float = 0.01> (x)", {"x": floats(5, 5, 3, 3)}),
    ("y = GlobalMaxPool (x)", IMAGE),
    ("y = GlobalAveragePool (x)", IMAGE),
    ("y = MeanVarianceNormalization (x)", IMAGE),
    (
        "y = Clip (x, l, h)",
        {"x": floats(9), "l": np.float32(-0.5).reshape(()), "h": np.float32(0.6).reshape(())},
    ),
    ("y = PRelu (x, s)", {"x": floats(2, 3, 4), "s": floats(3, 1, seed=2)}),
    ("y = Where (c, a, b)", {"c": floats(3, 4) > 0, "a": floats(3, 4), "b": floats(4, seed=1)}),
    ("y = Cast <to: int = 6> (x)", {"x": floats(9) * 10}),
    ("y = MatMul (a, b)", {"a": floats(2, 1, 3, 4), "b": floats(5, 4, 2, seed=1)}),
    ("y = MatMul (a, b)", {"a": floats(4), "b": floats(5, 4, 2, seed=1)}),
    (
        "y = Gemm <transA: int = 1, alpha: float = 0.5, beta: float = 2.0> (a, b, c)",
        {"a": floats(4, 3), "b": floats(4, 5, seed=1), "c": floats(5, seed=2)},
    ),
    (
        "y = Gemm <transB: int = 1> (a, b, c)",
        {"a": floats(3, 4), "b": floats(5, 4, seed=1), "c": floats(5, seed=2)},
    ),
    (
        'y = Einsum <equation: string = "bij,bjk->ik"> (a, b)',
        {"a": floats(2, 3, 4), "b": floats(2, 4, 5, seed=1)},
    ),
    ('y = Einsum <equation: string = "...ii->...i"> (a)', {"a": floats(2, 4, 4)}),
    (
        'y = Einsum <equation: string = "ij,jk,kl"> (a, b, c)',
        {"a": floats(2, 3), "b": floats(3, 4, seed=1), "c": floats(4, 2, seed=2)},
    ),
    ("y = GatherElements <axis: int = 1> (x, i)", {"x": floats(3, 4), "i": ints(-4, 4, 3, 5)}),
    ("y = GatherND <batch_dims: int = 1> (x, i)", {"x": floats(2, 3, 4, 5), "i": ints(0, 3, 2, 6, 2)}),
    (
        "y = ScatterElements <axis: int = 1> (x, i, u)",
        {"x": floats(3, 5), "i": np.array([[0, -1, 2], [4, 1, 0]]), "u": floats(2, 3, seed=1)},
    ),
    (
        'y = ScatterElements <axis: int = 0, reduction: string = "add"> (x, i, u)',
        {"x": floats(4, 3), "i": ints(0, 4, 6, 3), "u": floats(6, 3, seed=1)},
    ),
    (
        'y = ScatterND <reduction: string = "max"> (x, i, u)',
        {"x": floats(4, 3, 2), "i": ints(0, 3, 5, 2), "u": floats(5, 2, seed=1)},
    ),
    (
        "y = ScatterND (x, i, u)",
        {"x": floats(6, 3), "i": np.array([[0], [4], [2]]), "u": floats(3, 3, seed=1)},
    ),
    (
        "y = ReverseSequence <batch_axis: int = 0, time_axis: int = 1> (x, l)",
        {"x": floats(3, 4), "l": np.array([1, 3, 4])},
    ),
    (
        "y = InstanceNormalization (x, s, b)",
        {"x": floats(2, 3, 5, 4), "s": floats(3, seed=1), "b": floats(3, seed=2)},
    ),
    (
        "y = LayerNormalization <axis: int = 1> (x, s, b)",
        {"x": floats(2, 3, 4), "s": floats(3, 4, seed=1), "b": floats(3, 4, seed=2)},
    ),
    (
        "y = BatchNormalization (x, s, b, m, v)",
        {
            "x": floats(2, 3, 4),
            "s": floats(3),
            "b": floats(3, seed=1),
            "m": floats(3, seed=2),
            "v": np.abs(floats(3, seed=3)) + 0.1,
        },
    ),
]


@pytest.mark.parametrize("case", SIMPLE, ids=[body.split("y = ")[1][:60] for body, _ in SIMPLE])
def test_operators(case: tuple[str, dict[str, np.ndarray]]) -> None:
    check(case[0], case[1], rtol=1e-4, atol=1e-5)


CONVOLUTIONS = [
    "",
    "<pads: ints = [1, 0, 2, 1]>",
    "<strides: ints = [2, 3], dilations: ints = [2, 1]>",
    '<auto_pad: string = "SAME_UPPER", strides: ints = [2, 2]>',
    '<auto_pad: string = "SAME_LOWER">',
]


@pytest.mark.parametrize("attributes", CONVOLUTIONS)
def test_convolutions(attributes: str) -> None:
    inputs = {"x": floats(2, 4, 9, 8), "w": floats(6, 4, 3, 2, seed=1), "b": floats(6, seed=2)}
    check(
        f"y = Conv {attributes} (x, w, b)",
        inputs,
        rtol=1e-4,
        atol=1e-4,
        compiled=attributes == CONVOLUTIONS[1],
    )


TRANSPOSED = [
    "",
    "<strides: ints = [2, 3], pads: ints = [1, 0, 0, 1], output_padding: ints = [1, 1]>",
    "<dilations: ints = [2, 2]>",
]


@pytest.mark.parametrize("attributes", TRANSPOSED)
def test_transposed_convolutions(attributes: str) -> None:
    inputs = {"x": floats(1, 4, 5, 6), "w": floats(4, 3, 3, 3, seed=1)}
    check(f"y = ConvTranspose {attributes} (x, w)", inputs, rtol=1e-4, atol=1e-4)


POOLS = [
    "<kernel_shape: ints = [3, 2]>",
    "<kernel_shape: ints = [3, 3], strides: ints = [2, 2], ceil_mode: int = 1>",
    "<kernel_shape: ints = [3, 3], pads: ints = [1, 0, 2, 1], strides: ints = [1, 2]>",
    '<kernel_shape: ints = [2, 3], auto_pad: string = "SAME_UPPER", strides: ints = [2, 2]>',
]


@pytest.mark.parametrize("attributes", POOLS)
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_pooling(op: str, attributes: str) -> None:
    if op == "LpPool" and "ceil_mode" in attributes:
        pytest.skip(
            "the reference scales windows that hang over the end up to a whole one; the standard does not"
        )
    check(f"y = {op} {attributes} (x)", {"x": floats(2, 3, 8, 9)}, rtol=1e-4)


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
def test_padding(mode: str) -> None:
    check(
        f'p = Constant <value_ints: ints = [0, 2, 1, 3]> () y = Pad <mode: string = "{mode}"> (x, p)',
        {"x": floats(3, 5)},
    )


def test_padding_with_a_value_that_comes_with_the_call() -> None:
    body = "p = Constant <value_ints: ints = [1, 1, 0, 2]> () y = Pad (x, p, v)"
    check(body, {"x": floats(3, 5), "v": np.float32(7).reshape(())})


RESIZES = [
    'mode: string = "nearest"',
    'mode: string = "linear"',
    'mode: string = "cubic", cubic_coeff_a: float = -0.5',
    'mode: string = "linear", coordinate_transformation_mode: string = "align_corners"',
    'mode: string = "cubic", coordinate_transformation_mode: string = "asymmetric", exclude_outside: int = 1',
    'mode: string = "linear", antialias: int = 1',
    'mode: string = "nearest", nearest_mode: string = "ceil",'
    ' coordinate_transformation_mode: string = "half_pixel_symmetric"',
]


@pytest.mark.parametrize("attributes", RESIZES)
@pytest.mark.parametrize("sizes", [(1, 2, 11, 9), (1, 2, 4, 3)])
def test_resize(attributes: str, sizes: tuple[int, ...]) -> None:
    listed = ", ".join(map(str, sizes))
    body = f"s = Constant <value_ints: ints = [{listed}]> () y = Resize <{attributes}> (x, , , s)"
    check(body, IMAGE, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample(mode: str, padding: str) -> None:
    inputs = {"x": floats(2, 2, 4, 5), "g": floats(2, 3, 3, 2, seed=1)}
    body = f'y = GridSample <mode: string = "{mode}", padding_mode: string = "{padding}"> (x, g)'
    check(body, inputs, rtol=1e-3, atol=1e-5)


def test_a_scatter_by_known_indices_is_a_gather() -> None:
    """However many there are: a table of all comparisons would have 10^9 elements."""
    count, extent = 20_000, 50_000
    where = ints(-extent, extent, count)
    body = "y = ScatterElements <axis: int = 0> (x, i, u)"
    x, u = floats(extent), floats(count, seed=1)
    model = model_of(body, {"x": x, "u": u})
    model.graph.initializer.append(onnx.numpy_helper.from_array(where, "i"))
    expected = x.copy()
    for position, value in zip(where, u, strict=True):
        expected[position] = value
    (got,) = evaluate(import_onnx(model).graph, [x, u], precise=False)
    np.testing.assert_array_equal(got, expected)


def test_a_scatter_into_a_huge_tensor_is_refused_before_it_costs_anything() -> None:
    body = "s = Constant <value_ints: ints = [100000, 100000]> () x = ConstantOfShape (s) y = ScatterND (x, i, u)"
    model = model_of(body, {"u": floats(1)})
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([[3, 1]]), "i"))
    with pytest.raises(UnsupportedOpsError, match="a scatter of this size"):
        import_onnx(model, max_bytes=1 << 40)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_known_indices_may_be_shorter_than_the_data(axis: int) -> None:
    x, i, u = floats(4, 5, 6), ints(-2, 2, 3, 4, 5), floats(3, 4, 5, seed=1)
    body = f"y = ScatterElements <axis: int = {axis}> (x, i, u)"
    model = model_of(body, {"x": x, "u": u})
    model.graph.initializer.append(onnx.numpy_helper.from_array(i, "i"))
    check_model(model, {"x": x, "u": u}, rtol=0, atol=0, compiled=axis == 1)
    rows = model_of("y = ScatterND (x, i, u)", {"x": x, "u": floats(3, 6)})
    rows.graph.initializer.append(onnx.numpy_helper.from_array(np.array([[3, 1], [0, -1], [3, 1]]), "i"))
    check_model(rows, {"x": x, "u": floats(3, 6)}, rtol=0, atol=0)


@pytest.mark.parametrize("largest", [0, 1])
def test_top_k(largest: int) -> None:
    body = f"k = Constant <value_ints: ints = [3]> () y, i = TopK <axis: int = 0, largest: int = {largest}> (x, k)"
    check(body, {"x": ints(0, 5, 6, 4).astype(np.float32)}, "y i")


@pytest.mark.parametrize("layer", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_recurrent(layer: str, direction: str) -> None:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[layer]
    ways = 2 if direction == "bidirectional" else 1
    inputs = {
        "x": floats(4, 2, 3),
        "w": floats(ways, gates * 5, 3, seed=1),
        "r": floats(ways, gates * 5, 5, seed=2),
        "b": floats(ways, 2 * gates * 5, seed=3),
    }
    body = f'y, h = {layer} <hidden_size: int = 5, direction: string = "{direction}"> (x, w, r, b)'
    check(body, inputs, "y h", rtol=1e-4, atol=1e-5, compiled=layer == "LSTM" and ways == 2)


def test_fourier() -> None:
    a = {"x": floats(2, 10, 2)}
    check("n = Constant <value: tensor = int64 {1}> () y = DFT (x, , n)", a, rtol=1e-3, atol=1e-5)
    real = {"x": floats(1, 32, 1), "w": floats(8, seed=1)}
    check("s = Constant <value: tensor = int64 {4}> () y = STFT (x, s, w)", real, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_real_signal_may_come_without_its_last_axis(batch: int) -> None:
    """As PyTorch's exporter writes torch.stft."""
    sizes = "s = Constant <value: tensor = int64 {4}> () n = Constant <value: tensor = int64 {8}> ()"
    body = f"{sizes} y = STFT (x, s, w, n)"
    x, w = floats(batch, 32), floats(8, seed=1)
    model = model_of(body, {"x": x, "w": w})
    (got,) = evaluate(import_onnx(model).graph, [x, w])
    frames = np.stack([x[:, n : n + 8] for n in range(0, 25, 4)], 1).astype(np.float64) * w
    expected = np.fft.rfft(frames)
    np.testing.assert_allclose(got, np.stack([expected.real, expected.imag], -1), rtol=1e-4, atol=1e-5)


def test_a_signal_of_no_batch_is_refused() -> None:
    with pytest.raises(UnsupportedOpsError, match=r"a signal .*\[batch, time\]"):
        import_onnx(model_of("s = Constant <value: tensor = int64 {4}> () y = STFT (x, s, w)", FLAT))


def test_an_older_opset_means_what_it_meant() -> None:
    """Softmax over everything behind the axis; broadcasting by an attribute."""
    model_inputs = {"x": floats(2, 3, 4)}
    model = model_of(
        "y = Softmax <axis: int = 1> (x)", model_inputs, opset=11
    )  # the reference knows the new one only
    (result,) = evaluate(import_onnx(model).graph, [model_inputs["x"]])
    np.testing.assert_allclose(result.reshape(2, -1).sum(1), 1)
    check("y = Squeeze <axes: ints = [0]> (x)", {"x": floats(1, 3)}, opset=11)
    check("y = Clip <min: float = -0.5, max: float = 0.5> (x)", model_inputs, opset=6)
    check("y = Slice <starts: ints = [1], ends: ints = [3], axes: ints = [2]> (x)", model_inputs, opset=9)


def test_functions_of_the_standard_are_expanded() -> None:
    inputs = {"x": floats(3, 5), "t": ints(0, 5, 3)}
    check('y = SoftmaxCrossEntropyLoss <reduction: string = "mean"> (x, t)', inputs)
    check("y, s, z = DynamicQuantizeLinear (x)", {"x": floats(3, 5)}, "y s z", atol=1)


def test_every_converter_says_from_which_opset_it_holds() -> None:
    for (_, name), versions in table().items():
        sinces = [since for since, _ in versions]
        assert sinces == sorted(set(sinces)) and sinces[0] >= 1, name
