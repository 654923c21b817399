"""Attributes and operands that ask for more memory or work than there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from tests.faults.hostile.building import (
    Case,
    body,
    numbers,
    scalar,
)
from tests.frontend.onnx.checking import floats

BILLION = 1_000_000_000
SIZES = (0, -1, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63))


def asked() -> Iterator[tuple[str, Case]]:
    outputs = " ".join(f"y{n}" for n in range(2))
    yield "split into 1e9 parts", body(f"y0, y1 = Split <num_outputs: int = {BILLION}> (x)", outputs)
    yield "split into -1 parts", body("y0, y1 = Split <num_outputs: int = -1> (x)", outputs)
    yield "split an axis of 0", body("y0, y1 = Split <num_outputs: int = 2> (x)", outputs, x=(0, 3))
    yield (
        "split to a sequence of 1e8",
        body(
            "s = SplitToSequence (e) y = ConcatFromSequence <axis: int = 0> (s)", e=np.zeros((0,), np.float32)
        ),
    )
    yield (
        "split 1e8 elements to a sequence",
        body(
            "e = Expand (x, n) s = SplitToSequence <axis: int = 1> (e) y = ConcatFromSequence <axis: int = 0> (s)",
            x=(1, 1),
            n=numbers(1, 100_000_000),
        ),
    )
    for kernel in (2000, 40_000, 1 << 20, 1 << 40):
        pads = f"pads: ints = [{kernel // 2}, {kernel // 2}, {kernel // 2}, {kernel // 2}]"
        window = f"kernel_shape: ints = [{kernel}, {kernel}], {pads}"
        yield f"MaxPool with places, {kernel}", body(f"y, p = MaxPool <{window}> (x)", "y p", x=(1, 1, 4, 4))
        yield f"AveragePool, {kernel}", body(f"y = AveragePool <{window}> (x)", x=(1, 1, 4, 4))
        yield f"LpPool, {kernel}", body(f"y = LpPool <{window}> (x)", x=(1, 1, 4, 4))
    yield (
        "AveragePool of a long axis",
        body(
            "e = Expand (x, n) y = AveragePool <kernel_shape: ints = [30000], pads: ints = [15000, 15000]> (e)",
            x=(1, 1, 1),
            n=numbers(1, 1, 5_000_000),
        ),
    )
    yield (
        "MaxPool with places of many images",
        body(
            "e = Expand (x, n) y, p = MaxPool <kernel_shape: ints = [1]> (e)",
            "p",
            x=(1, 1, 1),
            n=numbers(300_000_000, 1, 1),
        ),
    )
    for size in (20_000, 1 << 20, 1 << 31, 1 << 62):
        for samples in (1, 20_000, 1 << 40):
            yield (
                f"RoiAlign, {size} by {samples}",
                body(
                    f"y = RoiAlign <output_height: int = {size}, output_width: int = {size},"
                    f" sampling_ratio: int = {samples}> (x, r, b)",
                    x=(1, 1, 4, 4),
                    r=np.array([[0, 0, 3, 3]], np.float32),
                    b=numbers(0),
                ),
            )
    for length in (4096, 4097, BILLION, (1 << 63) - 1, 0, -5):
        yield (
            f"DFT of length {length}",
            body("y = DFT (x, n)", opset=20, x=(1, 8, 1), n=scalar(length)),
        )
        yield (
            f"STFT with frames of {length}",
            body("y = STFT (x, s, , n)", opset=17, x=(1, 5000, 1), s=scalar(1), n=scalar(length)),
        )
        yield (
            f"HannWindow of {length}",
            body("h = HannWindow (n) y = Add (h, z)", n=scalar(length), z=floats(1)),
        )
    yield (
        "STFT of a long signal",
        body(
            "e = Expand (x, t) y = STFT (e, s, , n)",
            opset=17,
            x=(1, 1, 1),
            t=numbers(1, 20_000_000, 1),
            s=scalar(1),
            n=scalar(512),
        ),
    )
    yield (
        "GatherND of 1e8 batches",
        body(
            "e = Expand (x, n) i = Expand (k, n) y = GatherND <batch_dims: int = 1> (e, i)",
            x=(1, 1),
            n=numbers(100_000_000, 1),
            k=numbers(0).reshape(1, 1),
        ),
    )
    for bins, length in ((1 << 20, 1 << 20), (1 << 40, 8), (8, 1 << 40), (-1, 8), (40, 512)):
        yield (
            f"MelWeightMatrix of {bins} by {length}",
            body(
                "m = MelWeightMatrix (b, l, r, f, g) y = Identity (m)",
                b=scalar(bins),
                l=scalar(length),
                r=scalar(16_000),
                f=np.array(20, np.float32),
                g=np.array(8000, np.float32),
            ),
        )
    for extent in (3000, 20_000, 1 << 26):
        yield (
            f"TopK of {extent}",
            body(
                "e = Expand (x, n) y, p = TopK (e, k)",
                "y p",
                x=(1, 1),
                n=numbers(1, extent),
                k=numbers(extent),
            ),
        )
        yield (
            f"CumProd of {extent}",
            body(
                "e = Expand (x, n) y = CumProd (e, a)", opset=26, x=(1, 1), n=numbers(1, extent), a=scalar(1)
            ),
        )
        yield (
            f"Einsum with a diagonal of {extent}",
            body(
                'e = Expand (x, n) y = Einsum <equation: string = "ii->i"> (e)',
                x=(1, 1),
                n=numbers(extent, extent),
            ),
        )
        yield (
            f"ScatterND of {extent}",
            body(
                "e = Expand (x, n) i = Expand (k, m) u = Expand (x, n) y = ScatterND (e, i, u)",
                x=(1,),
                n=numbers(extent),
                m=numbers(extent, 1),
                k=numbers(0).reshape(1, 1),
            ),
        )
    for mode, coordinates in itertools.product(
        ("nearest", "linear", "cubic"), ("half_pixel", "tf_crop_and_resize", "half_pixel_symmetric")
    ):
        for scale in (1e5, 1e9, 1e18, 1e-9):
            yield (
                f"Resize {mode} {coordinates} by {scale}",
                body(
                    f'y = Resize <mode: string = "{mode}", coordinate_transformation_mode: string = "{coordinates}",'
                    " antialias: int = 0> (x, r, s)",
                    x=(1, 1, 8, 8),
                    r=np.array([0, 0, 0, 0, 1, 1, 1, 1], np.float32),
                    s=np.array([1, 1, 1, scale], np.float32),
                ),
            )
    yield (
        "Resize with antialias by 1e-9",
        body(
            'e = Expand (x, n) y = Resize <mode: string = "linear", antialias: int = 1> (e, , , k)',
            x=(1, 1),
            n=numbers(1, 10_000_000),
            k=numbers(1, 1),
        ),
    )
    for count in (1 << 22, BILLION, 1 << 62):
        yield (
            f"Range of {count}",
            body("r = Range (a, b, c) y = ReduceSum (r)", a=scalar(0), b=scalar(count), c=scalar(1)),
        )
    for step in (0.0, np.nan, 1e-300, np.inf):
        values = (np.array(v, np.float64) for v in (0, 1e300, step))
        yield (
            f"Range by {step}",
            body("r = Range (a, b, c) y = ReduceSum (r)", **dict(zip("abc", values, strict=True))),
        )
    for size in SIZES:
        yield f"ConstantOfShape {size}", body("y = ConstantOfShape (n)", n=numbers(size, 2))
        yield f"Expand to {size}", body("y = Expand (x, n)", n=numbers(size, 2, 3))
        yield f"Tile by {size}", body("y = Tile (x, n)", n=numbers(size, 2))
        yield f"Pad by {size}", body("y = Pad (x, n)", n=numbers(size, 0, 0, 1))
        yield (
            f"reflect Pad by {size}",
            body('y = Pad <mode: string = "reflect"> (x, n)', n=numbers(size, 0, 0, 1)),
        )
        yield f"Reshape to {size}", body("y = Reshape (x, n)", n=numbers(size, 6))
        yield (
            f"OneHot of {size}",
            body("y = OneHot (i, d, v)", i=numbers(1, 2), d=scalar(size), v=np.array([0, 1], np.float32)),
        )
        yield f"a zero axis alongside {size}", body("y = Expand (x, n)", x=(0, 1), n=numbers(0, max(size, 1)))
    yield "Reshape to rank 100", body("y = Reshape (x, n)", n=numbers(6, *[1] * 99))
    yield "Reshape to rank 60", body("r = Reshape (x, n) y = Neg (r)", n=numbers(6, *[1] * 59))
    yield "Unsqueeze to rank 2000", body("y = Unsqueeze (x, n)", n=numbers(*range(2, 2000)))
    yield (
        "Tile of rank 40",
        body("r = Reshape (x, n) y = Tile (r, k)", n=numbers(6, *[1] * 39), k=numbers(*[1] * 40)),
    )
    yield (
        "Slice with steps of 2^62",
        body(
            "y = Slice (x, a, b, c, d)",
            a=numbers(0),
            b=numbers((1 << 63) - 1),
            c=numbers(0),
            d=numbers(1 << 62),
        ),
    )
    yield (
        "Slice backwards from 2^62",
        body(
            "y = Slice (x, a, b, c, d)",
            a=numbers(1 << 62),
            b=numbers(-(1 << 63)),
            c=numbers(0),
            d=numbers(-1),
        ),
    )
    yield (
        "a sum of 1e9 ones that a shape needs",
        body(
            "o = ConstantOfShape (n) s = ReduceSum (o) c = Cast <to: int = 7> (s) r = Reshape (c, k) y = Expand (x, r)",
            x=(1,),
            n=numbers(BILLION),
            k=numbers(1),
        ),
    )
    yield (
        "a product that a shape needs",
        body(
            "o = ConstantOfShape (n) p = MatMul (o, o) s = ReduceSum (p) c = Cast <to: int = 7> (s) r = Reshape (c, k)"
            " y = Expand (x, r)",
            x=(1,),
            n=numbers(8000, 8000),
            k=numbers(1),
        ),
    )
    yield (
        "a convolution that a shape needs",
        body(
            "o = ConstantOfShape (n) w = ConstantOfShape (m) p = Conv <pads: ints = [40, 40, 40, 40]> (o, w)"
            " s = ReduceSum (p) c = Cast <to: int = 7> (s) r = Reshape (c, k) y = Expand (x, r)",
            x=(1,),
            n=numbers(1, 8, 300, 300),
            m=numbers(8, 8, 60, 60),
            k=numbers(1),
        ),
    )
    yield (
        "constants that grow when folded",
        body(
            "a = Expand (w, n) b = Exp (a) c = Transpose (b) d = Mul (b, c) y = Add (x, d)",
            x=(1,),
            w=floats(20_000, 1),
            n=numbers(20_000, 20_000),
        ),
    )
    yield (
        "a chain of outer sums",
        body(
            "a = Add (w, v) b = Unsqueeze (a, k) c = Add (b, u) d = ReduceSum (c) y = Add (x, d)",
            w=floats(2000, 1),
            v=floats(1, 2000),
            u=floats(1, 2000),
            k=numbers(2),
        ),
    )
    yield (
        "a matmul of 1e15 operations",
        body(
            "a = Expand (w, n) b = Expand (w, m) y = MatMul (a, b)",
            w=floats(1, 1),
            n=numbers(1_000_000, 1_000_000),
            m=numbers(1_000_000, 1_000),
        ),
    )
    yield (
        "Conv with a stride of 2^62",
        body(
            "y = Conv <strides: ints = [4611686018427387904, 1]> (x, w)", x=(1, 1, 4, 4), w=floats(1, 1, 2, 2)
        ),
    )
    yield (
        "Conv with a dilation of 2^62",
        body(
            "y = Conv <dilations: ints = [4611686018427387904, 1]> (x, w)",
            x=(1, 1, 4, 4),
            w=floats(1, 1, 2, 2),
        ),
    )
    yield (
        "Conv padded by 2^40",
        body("y = Conv <pads: ints = [1099511627776, 0, 0, 0]> (x, w)", x=(1, 1, 4, 4), w=floats(1, 1, 2, 2)),
    )
    yield (
        "Conv padded widely with a wide stride",
        body(
            "y = Conv <pads: ints = [600000000, 0, 600000000, 0], strides: ints = [400000000, 1]> (x, w)",
            x=(1, 1, 4, 4),
            w=floats(1, 1, 2, 2),
        ),
    )
    yield (
        "ConvTranspose with a stride of 1e6",
        body(
            "y = ConvTranspose <strides: ints = [1000000, 1000000]> (x, w)",
            x=(1, 1, 4, 4),
            w=floats(1, 1, 2, 2),
        ),
    )
    yield (
        "Col2Im of a large block",
        body("y = Col2Im (x, i, b)", x=(1, 250_000, 1), i=numbers(500, 500), b=numbers(500, 500)),
    )
    yield (
        "DeformConv of a wide kernel",
        body(
            "y = DeformConv (x, w, o)",
            x=(1, 1, 400, 400),
            w=floats(1, 1, 400, 400),
            o=floats(1, 320_000, 1, 1),
        ),
    )
    yield (
        "MaxUnpool of 2^40",
        body(
            "y = MaxUnpool <kernel_shape: ints = [1099511627776]> (x, i)",
            x=(1, 1, 2),
            i=numbers(0, 1).reshape(1, 1, 2),
        ),
    )
    yield (
        "LSTM of 1e6 steps",
        body(
            "e = Expand (x, n) y = LSTM <hidden_size: int = 2> (e, w, r)",
            x=(1, 1, 2),
            n=numbers(1_000_000, 1, 2),
            w=floats(1, 8, 2),
            r=floats(1, 8, 2),
        ),
    )
    yield (
        "a bidirectional RNN of 5,000 steps",
        body(
            'y = RNN <hidden_size: int = 5, direction: string = "bidirectional"> (x, w, r)',
            x=(5000, 3, 3),
            w=floats(2, 5, 3),
            r=floats(2, 5, 5),
        ),
    )
    yield (
        "LSTM of 2^62 units",
        body(
            "y = LSTM <hidden_size: int = 4611686018427387904> (x, w, r)",
            x=(3, 1, 2),
            w=floats(1, 8, 2),
            r=floats(1, 8, 2),
        ),
    )
    yield (
        "EyeLike of 1e5 by 1e5",
        body("e = Expand (x, n) y = EyeLike (e)", x=(1, 1), n=numbers(100_000, 100_000)),
    )
    yield "Trilu beyond", body("y = Trilu (x, k)", k=scalar(1 << 62))
    yield (
        "blocks of depth 2^40",
        body("y = DepthToSpace <blocksize: int = 1099511627776> (x)", x=(1, 4, 2, 2)),
    )
    yield "blocks of depth 0", body("y = SpaceToDepth <blocksize: int = 0> (x)", x=(1, 4, 2, 2))
    yield "groups of 0", body("y = Conv <group: int = 0> (x, w)", x=(1, 1, 4, 4), w=floats(1, 1, 2, 2))
    yield (
        "BitShift by a lot",
        body('c = Cast <to: int = 2> (x) y = BitShift <direction: string = "LEFT"> (c, c)', x=(3,)),
    )
    yield (
        "an attention of 1e6 heads",
        body(
            "y = Attention <q_num_heads: int = 1000000, kv_num_heads: int = 1000000> (x, x, x)",
            opset=23,
            x=(1, 2, 4),
        ),
    )
    yield "a Mod by zero", body("c = Cast <to: int = 7> (x) y = Mod (c, z)", z=scalar(0))
    yield "a Div by zero", body("c = Cast <to: int = 7> (x) y = Div (c, z)", z=scalar(0))
