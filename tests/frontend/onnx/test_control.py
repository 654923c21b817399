"""If, Loop and Scan, unrolled; sequences and optionals; values that must be known when the model is compiled."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

import tilewright
from tests.frontend.onnx.checking import check, check_model, floats, model_of
from tilewright.errors import InputError, ModelSizeError, UnsupportedOpsError, VerificationError
from tilewright.frontend.onnx import import_onnx
from tilewright.graph.oracle import evaluate
from tilewright.runtime.plan import Pinned

BRANCHES = (
    "y = If (c) <then_branch = then () => (float[N] a) { a = Neg (x) },"
    " else_branch = other () => (float[N] b) { b = Exp (x) }>"
)
BODY = (
    "<body = body (int64 i, bool going, float[3] s) => (bool on, float[3] t, float[3] scan)"
    " { on = Identity (going) t = Add (s, x) scan = Mul (t, t) }>"
)


@pytest.mark.parametrize("value", [False, True])
def test_if_with_a_known_condition_is_one_branch(value: bool) -> None:
    text = f"k = Constant <value: tensor = bool {{{int(value)}}}> () " + BRANCHES.replace("(c)", "(k)")
    inputs = {"x": floats(5)}
    model = model_of(text, inputs)
    check_model(model, inputs)
    ops = {node.op for node in import_onnx(model).graph.nodes()}
    assert ("neg" in ops) is value and ("exp" in ops) is not value


@pytest.mark.parametrize("value", [False, True])
def test_if_that_depends_on_the_call_selects(value: bool) -> None:
    check(BRANCHES, {"c": np.array(value), "x": floats(5)}, compiled=True)


RATES = (
    "c = Equal (r, k) y = If (c)"
    " <then_branch = wide () => (float[N] a) { s = Constant <value_ints: ints = [2, 4]> () a = Reshape (x, s) },"
    " else_branch = narrow () => (float[N] b) { t = Constant <value_ints: ints = [3, 5]> () b = Reshape (x, t) }>"
)


def test_a_branch_that_these_shapes_cannot_take_fixes_the_condition() -> None:
    """A model for two sampling rates, whose input has a length for each."""
    rate = {"x": floats(8), "r": np.array(16000), "k": np.array(16000)}
    model = model_of(RATES, rate)
    with pytest.raises(UnsupportedOpsError, match="Reshape"):
        import_onnx(model)
    compiled = tilewright.compile(model, rate, threads=1)
    np.testing.assert_array_equal(compiled(*rate.values()), rate["x"].reshape(2, 4))
    np.testing.assert_array_equal(compiled(**rate), rate["x"].reshape(2, 4))
    with pytest.raises(
        InputError, match=r"r: the model was compiled for the value 16000, .* got 8000"
    ) as caught:
        compiled(rate["x"], np.array(8000), rate["k"])
    assert "compile the model with an example of r" in str(caught.value)
    assert compiled.bench(repeats=1).repeats == 1  # random inputs, where the values are free
    with pytest.raises(UnsupportedOpsError, match="Reshape"):
        tilewright.compile(model, {**rate, "r": np.array(8000)}, threads=1)


def test_fixed_values_are_part_of_the_artifact(tmp_path: Path) -> None:
    inputs = {"x": floats(6), "s": np.array([3, 2])}
    compiled = tilewright.compile(model_of("y = Reshape (x, s)", inputs), inputs, threads=1)
    compiled.save(tmp_path / "m.tw")
    loaded = tilewright.load(tmp_path / "m.tw")
    np.testing.assert_array_equal(loaded(**inputs), inputs["x"].reshape(3, 2))
    with pytest.raises(InputError, match=r"compiled for the value \[3, 2\]"):
        loaded(inputs["x"], np.array([2, 3]))
    broken = msgspec.structs.replace(loaded.plan, pinned=(Pinned(1, b"short"),))
    with pytest.raises(VerificationError, match="5 bytes for input 1 of 2"):
        broken.validate()


def test_loop_with_a_known_count() -> None:
    known = "n = Constant <value: tensor = int64 {4}> () c = Constant <value: tensor = bool {1}> ()"
    body = f"{known} y, z = Loop (n, c, x) {BODY}"
    check(body, {"x": floats(3)}, "y z", compiled=True)


def test_loop_that_ends_when_the_data_says_so() -> None:
    body = (
        "n = Constant <value: tensor = int64 {9}> () t = Constant <value: tensor = bool {1}> () y = Loop (n, t, x)"
        " <body = body (int64 i, bool going, float[3] s) => (bool on, float[3] d)"
        " { d = Add (s, s) l = Constant <value: tensor = float {20.0}> ()"
        " k = ReduceMax <keepdims: int = 0> (d) on = Less (k, l) }>"
    )
    check(body, {"x": np.array([1, 2, 3], np.float32)}, compiled=True)


def test_a_loop_may_carry_a_growing_tensor() -> None:
    body = (
        "n = Constant <value: tensor = int64 {3}> () c = Constant <value: tensor = bool {1}> () y = Loop (n, c, x)"
        " <body = body (int64 i, bool going, float[N] s) => (bool on, float[M] t)"
        " { on = Identity (going) t = Concat <axis: int = 0> (s, s) }>"
    )
    check(body, {"x": floats(2)})


def counted(trips: int) -> onnx.ModelProto:
    body = f"n = Constant <value: tensor = int64 {{{trips}}}> () y, z = Loop (n, , x) {BODY}"
    return model_of(body, {"x": floats(3)}, "y z")


def test_loops_run_as_long_as_the_budget_of_nodes_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    import_onnx(counted(1000))
    monkeypatch.setenv("TILEWRIGHT_IMPORT_NODES", "1000")
    with pytest.raises(ModelSizeError, match=r"more than 1000 nodes(.|\n)*TILEWRIGHT_IMPORT_NODES"):
        import_onnx(counted(1000))


def test_a_loop_whose_count_is_an_input_says_so() -> None:
    inputs = {"n": np.array(3), "x": floats(3)}
    model = model_of(f"y, z = Loop (n, , x) {BODY}", inputs, "y z")
    with pytest.raises(UnsupportedOpsError, match="depends on the input 'n'"):
        import_onnx(model)
    assert set(import_onnx(model, inputs, pin=True).pinned) == {"n"}


def test_scan() -> None:
    body = (
        "y, z = Scan <num_scan_inputs: int = 1, body = body (float[4] s, float[4] e) => (float[4] t, float[4] o)"
        " { t = Add (s, e) o = Mul (t, t) }> (x, e)"
    )
    inputs = {"x": floats(4), "e": floats(6, 4, seed=1)}
    check(body, inputs, "y z", compiled=True)
    backwards = body.replace("num_scan_inputs", "scan_input_directions: ints = [1], num_scan_inputs")
    graph = import_onnx(model_of(backwards, inputs, "y z")).graph
    last, collected = evaluate(graph, list(inputs.values()))
    running = inputs["x"].astype(np.float64) + np.cumsum(inputs["e"][::-1].astype(np.float64), 0)
    np.testing.assert_allclose(last, running[-1])
    np.testing.assert_allclose(collected, running**2)


def test_sequences_leave_nothing_behind() -> None:
    body = (
        "s = SplitToSequence <axis: int = 0> (x) i = Constant <value: tensor = int64 {-1}> () a = SequenceAt (s, i)"
        " t = SequenceInsert (s, a) y = ConcatFromSequence <axis: int = 0> (t)"
    )
    inputs = {"x": floats(3, 2)}
    model = model_of(body, inputs)
    check_model(model, inputs)
    assert {node.op for node in import_onnx(model).graph.nodes()} <= {"input", "slice", "concat"}


def test_shapes_are_computed_when_the_model_is_imported() -> None:
    """The exporter's way to write x.view(x.shape[0], -1): five nodes, of which one reshape stays."""
    body = (
        "s = Shape (x) z = Constant <value: tensor = int64 {0}> () b = Gather (s, z)"
        " a = Constant <value_ints: ints = [0]> () u = Unsqueeze (b, a) m = Constant <value_ints: ints = [-1]> ()"
        " t = Concat <axis: int = 0> (u, m) y = Reshape (x, t)"
    )
    inputs = {"x": floats(2, 3, 4)}
    model = model_of(body, inputs)
    check_model(model, inputs)
    assert [node.op for node in import_onnx(model).graph.nodes()] == ["input", "reshape"]


def test_functions_of_the_model_are_inlined() -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        graph (float[4] x) => (float[4] y) { y = own.twice <k: float = 3.0> (x) }
        <domain: "own", opset_import: ["" : 21]>
        twice <k> (a) => (b) { f = Constant <value_float: float = @k> () c = Mul (a, f) b = Add (c, c) }
    """
    model = onnx.parser.parse_model(text)
    check_model(model, {"x": floats(4)})
