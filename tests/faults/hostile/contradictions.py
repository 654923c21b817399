"""Models whose sizes contradict their data: each must be refused, though a kernel could be made for it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.faults.hostile.building import Case, body, numbers, scalar
from tests.frontend.onnx.checking import floats


def contradictions() -> Iterator[tuple[str, Case]]:
    """(operator: what is wrong, file)"""
    yield from _grids()
    yield from _sizes()
    yield from _indices()
    yield from _windows()
    yield from _products()
    for gates, operator in ((1, "RNN"), (3, "GRU"), (4, "LSTM")):
        yield from _recurrences(operator, gates)


def _real(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def _grids() -> Iterator[tuple[str, Case]]:
    for theta, size in (
        ((2, 3, 4), (2, 1, 4, 5)),
        ((2, 2, 2), (2, 1, 4, 5)),
        ((2, 3, 3), (2, 1, 4, 5)),
        ((2, 2, 3), (3, 1, 4, 5)),
        ((2, 2, 3), (2, 1, 4, 5, 6)),
        ((2, 2, 3), (2, 4, 5)),
    ):
        yield (
            f"AffineGrid: theta {theta} for {size}",
            body("y = AffineGrid (x, n)", x=theta, n=numbers(*size)),
        )
    for grid in ((3, 5, 5, 2), (1, 5, 5, 2), (2, 5, 5, 3), (2, 5, 2), (2, 5, 5, 5, 2)):
        yield f"GridSample: a grid of {grid}", body("y = GridSample (x, g)", x=(2, 1, 4, 4), g=floats(*grid))
    samples = "<sampling_ratio: int = 2, output_height: int = 2, output_width: int = 2>"
    for what, regions, batch in (
        ("five corners", (3, 5), numbers(0, 0, 0)),
        ("too few images named", (3, 4), numbers(0)),
        ("an image beyond", (3, 4), numbers(0, 1, 0)),
        ("an image before", (3, 4), numbers(0, -1, 0)),
        ("images as a column", (3, 4), numbers(0, 0, 0).reshape(3, 1)),
    ):
        yield (
            f"RoiAlign: {what}",
            body(f"y = RoiAlign {samples} (x, r, b)", x=(1, 1, 8, 8), r=floats(*regions), b=batch),
        )


def _sizes() -> Iterator[tuple[str, Case]]:
    image = (1, 1, 4, 4)
    both = {"s": _real(1, 1, 2, 2), "n": numbers(1, 1, 3, 3)}
    yield "Resize: scales and sizes", body("y = Resize (x, , s, n)", x=image, **both)
    yield (
        "Resize: an axis twice",
        body("y = Resize <axes: ints = [3, -1]> (x, , , n)", x=image, n=numbers(8, 3)),
    )
    policy = 'y = Resize <keep_aspect_ratio_policy: string = "{}"> (x, , {})'
    yield "Resize: an unknown policy", body(policy.format("any", ", n"), x=image, n=numbers(1, 1, 3, 5))
    yield "Resize: a policy for scales", body(policy.format("not_larger", "s"), x=image, s=both["s"])
    cropped = 'y = Resize <coordinate_transformation_mode: string = "tf_crop_and_resize"> (x, r, , n)'
    yield "Resize: a region of ten numbers", body(cropped, x=image, r=np.ones(10, np.float32), n=both["n"])
    yield (
        "CenterCropPad: an axis twice",
        body("y = CenterCropPad <axes: ints = [1, -1]> (x, n)", x=(4, 5), n=numbers(3, 7)),
    )
    yield "CenterCropPad: a negative extent", body("y = CenterCropPad (x, n)", x=(4, 5), n=numbers(3, -1))
    yield "Pad: more cut off than there is", body("y = Pad (x, n)", n=numbers(-1, 0, -2, 0))
    yield "Pad: an axis twice", body("y = Pad (x, n, , a)", n=numbers(3, 0, 0, 0), a=numbers(1, 1))
    yield "Pad: two values", body("y = Pad (x, n, v)", n=numbers(1, 0, 0, 0), v=_real(1, 2))
    yield "Split: three parts for two outputs", body("y, z = Split (x, n)", "y z", x=(6,), n=numbers(2, 2, 2))
    yield (
        "Split: num_outputs of another number",
        body("y, z = Split <num_outputs: int = 3> (x)", "y z", x=(6,)),
    )
    yield "Split: a last part of nothing", body("a, b, c, y = Split <num_outputs: int = 4> (x)", x=(5,))
    yield "Transpose: a short perm", body("y = Transpose <perm: ints = [0]> (x)", x=(3, 3))
    yield (
        "DepthToSpace: an unknown mode",
        body('y = DepthToSpace <blocksize: int = 2, mode: string = "XYZ"> (x)', x=(1, 8, 2, 2)),
    )
    yield (
        "ConstantOfShape: two values",
        body("y = ConstantOfShape <value: tensor = float[2] {1, 2}> (n)", n=numbers(3, 2)),
    )
    yield "Range: of vectors", body("y = Range (a, b, c)", a=numbers(0, 1), b=numbers(5, 6), c=numbers(1, 2))
    yield "Range: of two types", body("y = Range (a, b, c)", a=scalar(0), b=np.array(5.5), c=scalar(1))
    yield "OneHot: three values", body("y = OneHot (i, d, v)", i=numbers(0, 1), d=scalar(3), v=_real(0, 1, 2))
    yield "OneHot: two depths", body("y = OneHot (i, d, v)", i=numbers(0, 1), d=numbers(3, 4), v=_real(0, 1))
    yield "EyeLike: of three axes", body("y = EyeLike (x)", x=(2, 3, 4))
    yield "Clip: five bounds", body("y = Clip (x, r)", x=(3, 5), r=_real(0, 1, 2, 3, 4))


def _indices() -> Iterator[tuple[str, Case]]:
    lengths = "y = ReverseSequence {} (x, n)"
    for what, attributes, given in (
        ("a length beyond", "", (1, 5, 2)),
        ("a negative length", "", (1, -1, 2)),
        ("one axis for both", "<batch_axis: int = 0, time_axis: int = 0>", (1, 1, 2, 2)),
    ):
        yield f"ReverseSequence: {what}", body(lengths.format(attributes), x=(4, 3), n=numbers(*given))
    yield "GatherND: beyond", body("y = GatherND (x, i)", x=(3, 3), i=numbers(5).reshape(1, 1))
    zeros = np.zeros((1, 3), np.int64)
    scatter = "y = ScatterElements (x, i, u)"
    yield "ScatterElements: fewer updates", body(scatter, x=(3, 3), i=zeros, u=floats(1, 2))
    yield "ScatterElements: beyond", body(scatter, x=(3, 3), i=zeros + 7, u=floats(1, 3))
    beyond = numbers(0, 5).reshape(2, 1)
    yield "ScatterND: beyond", body("y = ScatterND (x, i, u)", x=(3, 3), i=beyond, u=floats(2, 3))
    yield (
        "TensorScatter: beyond the cache",
        body("y = TensorScatter (x, u, n)", opset=24, x=(1, 4, 2), u=floats(1, 3, 2), n=numbers(3)),
    )
    unpool = "y = MaxUnpool <kernel_shape: ints = [2], strides: ints = [2]> (x, i{})"
    positions = numbers(0, 3).reshape(1, 1, 2)
    yield "MaxUnpool: too few indices", body(unpool.format(""), x=(1, 1, 2), i=positions[:, :, :1])
    yield "MaxUnpool: beyond", body(unpool.format(""), x=(1, 1, 2), i=positions * 3)
    yield (
        "MaxUnpool: other channels",
        body(unpool.format(", n"), x=(1, 1, 2), i=positions, n=numbers(1, 2, 6)),
    )
    for operator in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"):
        yield f"{operator}: fewer targets", body(f"y = {operator} (x, t)", x=(3, 5), t=numbers(0, 1))


def _windows() -> Iterator[tuple[str, Case]]:
    image = (1, 2, 5, 5)
    for operator in ("MaxPool", "AveragePool"):
        yield (
            f"{operator}: a window in the padding",
            body(f"y = {operator} <kernel_shape: ints = [2, 2], pads: ints = [3, 3, 3, 3]> (x)", x=image),
        )
    both = 'y = Conv <auto_pad: string = "SAME_UPPER", pads: ints = [1, 1, 1, 1]> (x, w)'
    yield "Conv: auto_pad and pads", body(both, x=image, w=floats(3, 2, 2, 2))
    for attribute in ("output_shape: ints = [20, 20]", "output_padding: ints = [5, 5]"):
        yield (
            f"ConvTranspose: {attribute}",
            body(f"y = ConvTranspose <{attribute}> (x, w)", x=image, w=floats(2, 2, 2, 2)),
        )
    yield (
        "ConvTranspose: a bias of one channel",
        body("y = ConvTranspose (x, w, b)", x=image, w=floats(2, 3, 2, 2), b=floats(1)),
    )
    weight = floats(1, 2, 2, 2)
    yield (
        "DeformConv: offsets of another size",
        body("y = DeformConv (x, w, o)", x=image, w=weight, o=floats(1, 8, 3, 3)),
    )
    yield (
        "DeformConv: offsets of one image for two",
        body("y = DeformConv (x, w, o)", x=(2, 2, 5, 5), w=weight, o=floats(1, 16, 4, 4)),
    )
    yield (
        "DeformConv: kernel_shape of another weight",
        body(
            "y = DeformConv <kernel_shape: ints = [3, 3]> (x, w, o)", x=image, w=weight, o=floats(1, 8, 4, 4)
        ),
    )


def _products() -> Iterator[tuple[str, Case]]:
    weight = floats(3, 4)
    yield "Gemm: C of more rows", body("y = Gemm (x, w, c)", x=(1, 3), w=weight, c=floats(5, 4))
    yield "Gemm: C of three axes", body("y = Gemm (x, w, c)", x=(2, 3), w=weight, c=floats(2, 2, 4))
    yield "Gemm: three axes", body("y = Gemm (x, w)", x=(2, 2, 3), w=weight)
    yield (
        "RMSNormalization: a wider scale",
        body("y = RMSNormalization (x, a)", opset=23, x=(2, 3), a=floats(5, 2, 3)),
    )
    quantised = "y = QuantizeLinear <axis: int = 1{}> (x, s, z)"
    for what, block, x, scale, zero in (
        ("one zero point for three scales", "", (2, 3), (3,), (1,)),
        ("scales of half the blocks", ", block_size: int = 2", (2, 4), (2, 1), (2, 1)),
        ("scales of twice the blocks", ", block_size: int = 4", (2, 4), (2, 2), (2, 2)),
    ):
        yield (
            f"QuantizeLinear: {what}",
            body(quantised.format(block), x=x, s=np.ones(scale, np.float32), z=np.zeros(zero, np.uint8)),
        )
    zeros = np.zeros(2, np.uint8)
    yield (
        "MatMulInteger: zero points of two rows for three",
        body(
            "q = Cast <to: int = 2> (x) y = MatMulInteger (q, w, z)",
            x=(3, 2),
            w=np.ones((2, 3), np.uint8),
            z=zeros,
        ),
    )
    yield (
        "ConvInteger: zero points of two channels for three",
        body(
            "q = Cast <to: int = 2> (x) y = ConvInteger (q, w, p, z)",
            x=(1, 2, 4, 4),
            w=np.ones((3, 2, 2, 2), np.uint8),
            p=np.zeros((), np.uint8),
            z=zeros,
        ),
    )


def _recurrences(operator: str, gates: int) -> Iterator[tuple[str, Case]]:
    """Two units and two inputs; an operand of another size each."""
    rows = 2 * gates
    sound = {"w": floats(1, rows, 2), "r": floats(1, rows, 2)}
    for what, text, operands in (
        ("W of one row", "", {"w": floats(1, 1, 2)}),
        ("W of more rows", "", {"w": floats(1, rows + 2, 2), "r": floats(1, rows + 2, 2)}),
        ("R of one row", "", {"r": floats(1, 1, 2)}),
        ("a short bias", ", b", {"b": floats(1, 2)}),
        ("a long bias", ", b", {"b": floats(1, 4 * rows)}),
        ("a length for one of two", ", , l", {"l": np.array([3], np.int32)}),
        ("a length beyond", ", , l", {"l": np.array([3, 9], np.int32)}),
        ("a negative length", ", , l", {"l": np.array([3, -9], np.int32)}),
        ("a state of one for two", ", , , h", {"h": floats(1, 1, 2)}),
        ("a state of two directions", ", , , h", {"h": floats(2, 2, 2)}),
    ):
        yield (
            f"{operator}: {what}",
            body(f"y = {operator} <hidden_size: int = 2> (x, w, r{text})", x=(3, 2, 2), **(sound | operands)),
        )
    if operator == "LSTM":
        yield (
            "LSTM: long peepholes",
            body(
                "y = LSTM <hidden_size: int = 2> (x, w, r, , , , , p)", x=(3, 2, 2), p=floats(1, 9), **sound
            ),
        )
