"""`tile_kernel`: an operator of a user's own, computed by a tile kernel; `graph/tile_operator.py` has its meaning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewright import te
from tilewright.graph.ir import Attrs, TensorType
from tilewright.graph.op import Application, Fusion, Op, flops_of, register
from tilewright.graph.ops.common import expect


def infer_tile_kernel(inputs: Sequence[TensorType], attrs: Attrs) -> TensorType:
    from tilewright.graph.tile_operator import reference_graph

    reference = reference_graph(attrs["reference"])
    wanted = [node.type for node in reference.inputs]
    expect(list(inputs) == wanted, f"{attrs['operator']} takes {wanted}")
    return reference.outputs[0].type


def oracle_tile_kernel(attrs: Attrs, *arrays: np.ndarray) -> np.ndarray:
    from tilewright.graph.oracle import evaluate
    from tilewright.graph.tile_operator import reference_graph

    (result,) = evaluate(reference_graph(attrs["reference"]), arrays, precise=True)
    return result


def lower_tile_kernel(app: Application, tensors: Sequence[te.Tensor]) -> te.Tensor:
    from tilewright.graph.lower import lower_nodes
    from tilewright.graph.tile_operator import reference_graph

    reference = reference_graph(app.attrs["reference"])
    return lower_nodes(reference, dict(zip(reference.inputs, tensors, strict=True)))


def tile_kernel_flops(app: Application) -> int:
    from tilewright.graph.tile_operator import reference_graph

    return sum(map(flops_of, reference_graph(app.attrs["reference"]).nodes()))


register(
    Op(
        "tile_kernel",
        infer_tile_kernel,
        oracle_tile_kernel,
        Fusion.OPAQUE,
        lower_tile_kernel,
        flops=tile_kernel_flops,
        attrs=("operator", "kernel", "reference"),
    )
)
