"""The ONNX backend class, and a sample of the onnx wheel's suite (all of it: `python -m tests.outside.onnx_suite`)."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.backend.base
import pytest

from tests.frontend.onnx.checking import floats, model_of
from tests.outside.onnx_suite import BASELINE, load_cases, read_baseline, run_case
from tilewright.errors import InputError, ModelFileError, TargetError, UnsupportedOpsError
from tilewright.integrations import onnx_backend
from tilewright.integrations.onnx_backend import TilewrightBackend

SAMPLE = 60


def reshaping() -> onnx.ModelProto:
    return model_of("y = Reshape (x, s)", {"x": floats(2, 6), "s": np.array([3, 4])})


def test_is_a_backend() -> None:
    assert issubclass(TilewrightBackend, onnx.backend.base.Backend)
    assert TilewrightBackend.supports_device("CPU") and TilewrightBackend.supports_device("CPU:0")
    assert not TilewrightBackend.supports_device("CUDA")
    with pytest.raises(TargetError, match="no device is called 'CUDA'"):
        TilewrightBackend.prepare(reshaping(), "CUDA")


def test_run_model_names_its_outputs() -> None:
    x = floats(3)
    result = TilewrightBackend.run_model(model_of("a = Neg (x) b = Abs (x)", {"x": x}, "a b"), [x])
    np.testing.assert_array_equal(result.a, -x)
    np.testing.assert_array_equal(result[1], np.abs(x))


def test_run_node() -> None:
    node = onnx.helper.make_node("Add", ["a", "b"], ["c"])
    (result,) = TilewrightBackend.run_node(node, [floats(2, 3), floats(3)])
    np.testing.assert_array_equal(result, floats(2, 3) + floats(3))
    old = onnx.helper.make_node("Squeeze", ["a"], ["c"], axes=[0])
    (result,) = TilewrightBackend.run_node(old, {"a": floats(1, 3)}, opset_version=11)
    assert result.shape == (3,)


def test_inputs_by_name_and_their_mistakes() -> None:
    x = floats(3)
    rep = TilewrightBackend.prepare(model_of("y = Sub (a, b)", {"a": x, "b": x}))
    np.testing.assert_array_equal(rep.run({"b": x, "a": 2 * x})[0], x)
    with pytest.raises(InputError, match="b are missing"):
        rep.run({"a": x})
    with pytest.raises(InputError, match="takes 2 inputs, 1 were given"):
        rep.run([x])


def test_errors_come_early_where_they_can() -> None:
    broken = reshaping()
    broken.graph.node[0].input[1] = "missing"
    with pytest.raises(ModelFileError):
        TilewrightBackend.prepare(broken)
    with pytest.raises(UnsupportedOpsError, match="NonZero"):
        TilewrightBackend.run_model(model_of("y = NonZero (x)", {"x": floats(3)}), [floats(3)])


def test_values_that_decide_shapes_choose_a_variant() -> None:
    rep = TilewrightBackend.prepare(reshaping())
    x = floats(2, 6)
    for shape in ((3, 4), (12, 1), (3, 4), (2, 6)):
        (result,) = rep.run([x, np.array(shape)])
        np.testing.assert_array_equal(result, x.reshape(shape))
    assert sum(map(len, rep.variants.values())) == 3


def test_new_shapes_choose_a_variant() -> None:
    model = model_of("y = Neg (x)", {"x": floats(2, 3)})
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    rep = TilewrightBackend.prepare(model)
    for size in (1, 4, 1):
        np.testing.assert_array_equal(rep.run([floats(size, 3)])[0], -floats(size, 3))
    assert len(rep.variants) == 2


def test_the_table_of_variants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_backend, "MAX_VARIANTS", 2)
    rep = TilewrightBackend.prepare(reshaping())
    x = floats(2, 6)
    for shape in ((3, 4), (12, 1), (2, 6), (3, 4)):
        (result,) = rep.run([x, np.array(shape)])
        np.testing.assert_array_equal(result, x.reshape(shape))
        assert sum(map(len, rep.variants.values())) <= 2


# -- the suite --------------------------------------------------------------------------------------------------------


def test_a_sample_of_the_suite_still_passes() -> None:
    """Every so-many-th test of the baseline, without the light models. A crash here ends the test process; the command
    runs each test in a worker."""
    passes = sorted(key for key in read_baseline(BASELINE) if not key.startswith("real/"))
    assert len(passes) >= 1100
    step = len(passes) // SAMPLE
    cases = load_cases(["node", "simple", "pytorch-converted", "pytorch-operator"])
    lost = []
    for key in passes[::step]:
        kind, _, name = key.partition("/")
        if (kind, name) not in cases:
            continue  # of another version of onnx
        outcome = run_case(kind, cases[kind, name])
        if outcome.status != "pass":
            lost.append(f"{outcome.key}: {outcome.status} {outcome.detail}")
    assert lost == []
