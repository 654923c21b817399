"""`check_onnx`: a compiled ONNX model against the graph's oracle and onnx's own reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import tilewright
from tests.frontend.onnx.checking import floats, ints, model_of
from tilewright.errors import InputError
from tilewright.frontend.onnx import registry
from tilewright.graph.ir import Graph, rebuild
from tilewright.graph.op import apply
from tilewright.integrations.onnx_check import check_onnx
from tilewright.space.template import Work
from tilewright.targets import stages

BODY = """
    half = Constant <value_float: float = 0.5> ()
    hidden = MatMul (x, w)
    bent = Tanh (hidden)
    scaled = Mul (bent, half)
    y = Softmax (scaled)
    best = ArgMax <axis: int = -1, keepdims: int = 0> (y)
"""


def network() -> onnx.ModelProto:
    inputs = {"x": floats(5, 8), "w": floats(8, 6, seed=1)}
    return model_of(BODY, inputs, "y best")


@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_a_right_model(numerics: str) -> None:
    model = network()
    report = check_onnx(tilewright.compile(model, numerics=numerics), model)
    assert report.ok and report.value is None and report.reference is not None
    assert [output.error < 1e-6 for output in report.reference.outputs] == [True, True]
    assert 0 < report.reference.outputs[0].framework_error < 1e-6  # the reference was run in both types
    assert str(report).count("OK: 2 outputs match") == 2


def test_inputs_in_each_form() -> None:
    model = network()
    compiled = tilewright.compile(model)
    x, w = floats(5, 8, seed=3), floats(8, 6, seed=4)
    assert check_onnx(compiled, model, {"w": w, "x": x}).ok
    assert check_onnx(compiled, model, (x, w)).ok
    with pytest.raises(InputError, match="the inputs w are missing"):
        check_onnx(compiled, model, {"x": x})
    with pytest.raises(InputError, match="takes 2 inputs"):
        check_onnx(compiled, model, x)


def test_16_bits() -> None:
    x = floats(4, 8, dtype=np.float16)
    model = model_of("s = Sigmoid (x) y = Cast <to: int = 1> (s)", {"x": x})
    report = check_onnx(tilewright.compile(model, numerics="strict"), model, x)
    assert report.reference is not None and report.reference.outputs[0].framework_error > 1e-5
    assert report.oracle.outputs[0].framework_error > 1e-5


def test_subgraphs_and_external_data(tmp_path: Path) -> None:
    body = """
        c = Constant <value: tensor = bool {1}> ()
        y = If (c) <
            then_branch = g1 () => (float a) { k = Constant <value_floats: floats = [2.0, 3.0]> () a = Mul (x, k) },
            else_branch = g2 () => (float b) { b = Neg (x) }
        >
    """
    model = model_of(body, {"x": floats(4, 2)})
    weight = onnx.numpy_helper.from_array(floats(2, 3), "w")
    model.graph.initializer.append(weight)
    model.graph.node.append(onnx.helper.make_node("MatMul", ["y", "w"], ["z"]))
    model.graph.output[0].name = "z"
    path = tmp_path / "m.onnx"
    onnx.save_model(model, path, save_as_external_data=True, size_threshold=0, location="data")
    report = check_onnx(tilewright.compile(path), path)
    assert report.ok and report.reference is not None and report.reference.outputs[0].error < 1e-6


def test_a_quantised_model_is_compared_in_its_own_types() -> None:
    body = """
        s = Constant <value_float: float = 0.05> ()
        z = Constant <value: tensor = uint8 {128}> ()
        q = QuantizeLinear (x, s, z)
        d = DequantizeLinear (q, s, z)
        y = MatMul (d, d)
    """
    model = model_of(body, {"x": floats(6, 6)})
    report = check_onnx(tilewright.compile(model, numerics="strict"), model)
    assert report.ok and report.reference is not None and report.reference.outputs[0].framework_error == 0


def test_a_wrong_task_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = stages.choose

    def wrong(work: Work) -> object:
        """tanh is compiled as sin."""
        graph: Graph = rebuild(
            work.task.graph, lambda node, inputs: apply("sin", *inputs) if node.op == "tanh" else None
        )
        choice = right(replace(work, task=replace(work.task, graph=graph)))
        (part,) = choice.implementation.parts
        made = replace(choice.implementation, parts=(replace(part, task=work.task),))
        return replace(choice, implementation=made)

    monkeypatch.setattr(stages, "choose", wrong)
    model = network()
    report = check_onnx(tilewright.compile(model), model)
    assert not report.ok and report.oracle.deviation is not None and report.value is None
    assert "tanh" in report.oracle.deviation.label
    assert "The first task that deviates is step" in str(report)


def test_a_wrong_import_is_told_apart_and_its_value_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = registry.find

    def wrong(domain: str, op: str, opset: int) -> object:
        return real(domain, "Sin" if op == "Tanh" else op, opset)

    monkeypatch.setattr("tilewright.frontend.onnx.program.find", wrong)
    model = network()
    report = check_onnx(tilewright.compile(model), model)
    assert report.oracle.ok and not report.ok and report.value is not None
    assert (report.value.name, report.value.operator) == ("bent", "Tanh")
    assert "leaves the reference at the value 'bent' of Tanh" in str(report)


def test_what_the_reference_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx.reference import ReferenceEvaluator

    def refuse(self: object, *_: object, **__: object) -> None:
        raise NotImplementedError("no such operator\nand more")

    monkeypatch.setattr(ReferenceEvaluator, "run", refuse)
    model = model_of("y = Gather (x, i)", {"x": floats(5, 2), "i": ints(0, 5, 3)})
    report = check_onnx(tilewright.compile(model), model)
    assert report.ok and report.reference is None
    assert str(report).endswith(
        "not compared, it cannot run the model: NotImplementedError: no such operator"
    )
