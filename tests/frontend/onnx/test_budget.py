"""Bounded import: what a model asks for is counted before it is spent, and models that are merely large are taken."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import tilewright
from tests.faults.hostile.building import function, graph_model, numbers, scalar
from tests.faults.hostile.structures import chain, chained, doubling, empty_loops, nested_ifs
from tests.frontend.onnx.checking import floats, model_of
from tilewright.errors import ModelFileError, ModelSizeError, UnsupportedOpsError
from tilewright.frontend.onnx import import_onnx
from tilewright.frontend.onnx.expansion import check_expansion
from tilewright.frontend.onnx.wire import check_wire
from tilewright.graph.ir import constant
from tilewright.graph.op import apply
from tilewright.rewrites.fold_constants import FoldConstants
from tilewright.support.budget import Budget, Limits

LIMITS = Limits(memory=1 << 30, nodes=1000, work=10**9, depth=20)


def weighted(
    body: str, shape: tuple[int, ...] = (1,), outputs: str = "y", **weights: np.ndarray
) -> onnx.ModelProto:
    model = model_of(body, {"x": floats(*shape)}, outputs)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


# -- what is refused, at once -----------------------------------------------------------------------------------------

TABLES = {
    "parts": (weighted("y, z = Split <num_outputs: int = 1000000000> (x)", (4,), "y z"), "NODES"),
    "places of maxima": (
        weighted(
            "y, p = MaxPool <kernel_shape: ints = [900, 900], pads: ints = [450, 450, 450, 450]> (x)",
            (1, 1, 4, 4),
            "p",
        ),
        "NODES",
    ),
    "counts": (
        weighted(
            "e = Expand (x, n) y = AveragePool <kernel_shape: ints = [300000], pads: ints = [9, 9]> (e)",
            (1, 1, 1),
            n=numbers(1, 1, 10_000_000),
        ),
        "MEMORY",
    ),
    "samples": (
        weighted(
            "y = RoiAlign <output_height: int = 99999, output_width: int = 1, sampling_ratio: int = 99999> (x, r, b)",
            (1, 1, 4, 4),
            r=np.array([[0, 0, 3, 3]], np.float32),
            b=numbers(0),
        ),
        "MEMORY",
    ),
    "range": (
        weighted("r = Range (a, b, c) y = ReduceSum (r)", a=scalar(0), b=scalar(1 << 40), c=scalar(1)),
        "MEMORY",
    ),
    "steps": (
        weighted(
            "e = Expand (x, n) y = LSTM <hidden_size: int = 2> (e, w, r)",
            (1, 1, 2),
            n=numbers(10**7, 1, 2),
            w=floats(1, 8, 2),
            r=floats(1, 8, 2),
        ),
        "NODES",
    ),
    "a shape's sum": (
        weighted(
            "o = ConstantOfShape (n) s = ReduceSum (o) c = Cast <to: int = 7> (s) r = Reshape (c, k) y = Expand (x, r)",
            n=numbers(10**8),
            k=numbers(1),
        ),
        "MEMORY|WORK",
    ),
    "empty loops": (empty_loops(3, 1000), "NODES"),
}


@pytest.mark.parametrize("name", list(TABLES))
def test_what_is_too_large_is_refused_before_it_is_made(name: str) -> None:
    model, option = TABLES[name]
    started = time.monotonic()
    with pytest.raises(ModelSizeError, match=rf"TILEWRIGHT_IMPORT_({option})"):
        import_onnx(model, max_bytes=1 << 30)
    assert time.monotonic() - started < 20


def test_axes_that_are_empty_hide_nothing() -> None:
    with pytest.raises(ModelSizeError, match="a result of type f32\\[0,"):
        import_onnx(weighted("y = Expand (x, n)", (0, 1), n=numbers(0, 1 << 60)))


@pytest.mark.parametrize("operator", ["Gather", "GatherElements"])
def test_indices_that_the_model_fixes_are_of_its_axis(operator: str) -> None:
    import_onnx(weighted(f"y = {operator} (x, i)", (3, 2), i=numbers(-3, 2).reshape(1, 2)))
    for index in (3, -4):
        with pytest.raises(UnsupportedOpsError, match="of an axis of 3"):
            import_onnx(weighted(f"y = {operator} (x, i)", (3, 2), i=numbers(index, 0).reshape(1, 2)))


@pytest.mark.parametrize("rank", [33, 60, 100])
def test_a_tensor_has_32_axes(rank: int) -> None:
    """A plan has no more: refused when it is imported, not when it is linked."""
    with pytest.raises(UnsupportedOpsError, match=f"{rank} axes"):
        import_onnx(weighted("r = Reshape (x, n) y = Neg (r)", (2, 3), n=numbers(6, *[1] * (rank - 1))))
    tilewright.compile(import_onnx(weighted("y = Reshape (x, n)", (2, 3), n=numbers(6, *[1] * 31))))


def test_names_have_a_length() -> None:
    model = model_of("y = Neg (x)", {"x": floats(2)})
    model.graph.node[0].name = "n" * (1 << 17)
    with pytest.raises(ModelSizeError, match="a name in the model has 131072 characters"):
        import_onnx(model)


# -- functions --------------------------------------------------------------------------------------------------------


def test_functions_that_double_are_counted_and_not_expanded() -> None:
    check_expansion(doubling(8), Budget(LIMITS))
    for levels in (12, 19):
        with pytest.raises(ModelSizeError, match="more than 1000 nodes"):
            check_expansion(doubling(levels), Budget(LIMITS))
    with pytest.raises(ModelSizeError, match=r"nested more than 20 deep"):
        check_expansion(chained(500), Budget(LIMITS))


def test_functions_that_call_themselves() -> None:
    def calls(*pairs: tuple[str, str]) -> onnx.ModelProto:
        functions = [
            function(name, [helper.make_node(other, ["a"], ["b"], domain="local")]) for name, other in pairs
        ]
        return graph_model([helper.make_node("f", ["x"], ["y"], domain="local")], functions=functions)

    for model in (calls(("f", "f")), calls(("f", "g"), ("g", "h"), ("h", "g"))):
        with pytest.raises(ModelFileError, match="calls itself"):
            import_onnx(model)
    with pytest.raises(ModelFileError, match="two functions are called 'f'"):
        import_onnx(calls(("f", "g"), ("f", "h")))


def test_bytes_of_functions_count_as_often_as_they_are_called() -> None:
    value = numpy_helper.from_array(np.zeros(1 << 20, np.float32))
    heavy = function(
        "f",
        [helper.make_node("Constant", [], ["c"], value=value), helper.make_node("Add", ["a", "c"], ["b"])],
    )
    names = ["x", *(f"v{n}" for n in range(99)), "y"]
    uses = [helper.make_node("f", [a], [b], domain="local") for a, b in itertools.pairwise(names)]
    with pytest.raises(ModelSizeError, match="its functions expanded needs"):
        check_expansion(graph_model(uses, functions=[heavy]), Budget(LIMITS))


def test_nesting_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    import_onnx(nested_ifs(10, True))
    monkeypatch.setenv("TILEWRIGHT_IMPORT_DEPTH", "5")
    with pytest.raises(ModelSizeError, match=r"more than 5 deep(.|\n)*TILEWRIGHT_IMPORT_DEPTH"):
        import_onnx(nested_ifs(10, True))


# -- the file's encoding ----------------------------------------------------------------------------------------------


def field(number: int, content: bytes) -> bytes:
    def varint(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)

    return varint(number << 3 | 2) + varint(len(content)) + content


def test_messages_are_counted_before_they_are_parsed() -> None:
    empty_nodes = field(7, field(1, b"") * 2_200_000)
    with pytest.raises(ModelSizeError, match=r"more than 32 messages(.|\n)*TILEWRIGHT_IMPORT_NODES"):
        check_wire(empty_nodes, Budget(LIMITS), "model.onnx")
    packed = field(7, field(1, field(5, field(8, b"\1" * (200 << 20)))))
    with pytest.raises(ModelSizeError, match="TILEWRIGHT_IMPORT_MEMORY"):
        check_wire(packed, Budget(LIMITS), "model.onnx")


def test_data_of_tensors_is_stepped_over() -> None:
    model = model_of("y = MatMul (x, w)", {"x": floats(2, 2000)})
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((2000, 1000), np.float32), "w"))
    check_wire(model.SerializeToString(), Budget(LIMITS), "model.onnx")


@pytest.mark.parametrize(
    "ending", [b"\x3a\xff\xff\xff\x7f", b"\x3b", b"\xff" * 20], ids=["long", "group", "endless"]
)
def test_broken_encodings_are_no_models(ending: bytes) -> None:
    with pytest.raises(ModelFileError, match="not an ONNX model"):
        check_wire(field(99, bytes(5 << 20)) + ending, Budget(LIMITS), "model.onnx")


def test_a_large_file_of_empty_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_IMPORT_NODES", "1000")
    path = tmp_path / "model.onnx"
    path.write_bytes(field(7, field(1, b"") * 5_000_000))
    with pytest.raises(ModelSizeError, match="messages"):
        import_onnx(path)


# -- what is large and sound ------------------------------------------------------------------------------------------


def test_large_models_are_taken() -> None:
    assert len(import_onnx(chain(3000)).graph.nodes()) == 3001
    steps = 1000
    scan = (
        "z, y = Scan <num_scan_inputs: int = 1, body = b (float[2] s, float[2] e) => (float[2] t, float[2] o)"
        " { t = Add (s, e) o = Identity (t) }> (w, x)"
    )
    assert import_onnx(weighted(scan, (steps, 2), "z y", w=floats(2))).graph.outputs[1].shape == (steps, 2)


def test_weights_inside_a_loop_are_read_once() -> None:
    """A thousand times their size would be far beyond the limit."""
    weight = floats(400_000)
    body = (
        "y = Loop (n, c, x) <body = b (int64 i, bool g, float[1] s) => (bool h, float[1] t)"
        " { h = Identity (g) k = Constant <value: tensor = float[1] {1}> () m = ReduceMax (w) t = Add (s, m) }>"
    )
    model = weighted(body, n=scalar(200), c=np.array(True))
    inner = model.graph.node[0].attribute[0].g
    inner.initializer.append(numpy_helper.from_array(weight, "w"))
    imported = import_onnx(model, max_bytes=20 << 20)
    constants = {
        node.data.ctypes.data
        for node in imported.graph.nodes()
        if node.data is not None and node.data.size > 9
    }
    assert len(constants) == 1


def test_tensors_that_share_bytes_of_a_file_share_an_array(tmp_path: Path) -> None:
    model = model_of("a = MatMul (x, w) y = MatMul (a, v)", {"x": floats(2, 3)})
    (tmp_path / "w.bin").write_bytes(floats(3, 3).tobytes())
    for name in ("w", "v"):
        tensor = onnx.TensorProto(
            name=name, data_type=1, dims=(3, 3), data_location=onnx.TensorProto.EXTERNAL
        )
        tensor.external_data.add(key="location", value="w.bin")
        model.graph.initializer.append(tensor)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    graph = import_onnx(path).graph
    first, second = (node.data for node in graph.nodes() if node.is_constant)
    assert first is not None and second is not None
    assert np.shares_memory(first, second)


# -- folding ----------------------------------------------------------------------------------------------------------


def test_what_the_budget_has_not_is_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.dtypes import DType
    from tilewright.graph.ir import Graph, TensorType, input_node

    x = input_node(0, TensorType((256, 256), DType.F32))
    weight = constant(floats(256, 256))
    product = apply("matmul", weight, weight)
    graph = Graph((x,), (apply("add", x, product),))
    assert all(node.op != "matmul" for node in FoldConstants().run(graph).nodes())
    monkeypatch.setenv("TILEWRIGHT_IMPORT_WORK", "1000")
    assert any(node.op == "matmul" for node in FoldConstants().run(graph).nodes())
    monkeypatch.delenv("TILEWRIGHT_IMPORT_WORK")
    monkeypatch.setenv("TILEWRIGHT_IMPORT_MEMORY", "100K")
    assert any(node.op == "matmul" for node in FoldConstants().run(graph).nodes())
