"""The boundary: what a model may be, what examples are for, and every refusal in its own words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import tilewright
from tests.frontend.onnx.checking import floats, model_of
from tilewright.errors import (
    ModelFileError,
    ModelSizeError,
    TilewrightError,
    UnknownShapeError,
    UnsupportedModelError,
    UnsupportedOpsError,
)
from tilewright.frontend import import_model
from tilewright.frontend.onnx import import_onnx

X = {"x": floats(2, 3)}


def small() -> onnx.ModelProto:
    return model_of("y = Relu (x)", X)


def opened() -> onnx.ModelProto:
    model = model_of("y = Add (x, x)", X)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


def test_compile_takes_a_model_and_a_path(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(small(), path)
    for source in (small(), path, str(path)):
        fast = tilewright.compile(source)
        np.testing.assert_array_equal(fast(X["x"]), np.maximum(X["x"], 0))
        np.testing.assert_array_equal(fast(x=X["x"]), np.maximum(X["x"], 0))


def test_several_outputs_are_a_tuple_in_order() -> None:
    model = model_of("a = Neg (x) b = Exp (x)", X, "b a x")
    b, a, x = tilewright.compile(model)(X["x"])
    np.testing.assert_array_equal(a, -X["x"])
    np.testing.assert_allclose(b, np.exp(X["x"]), rtol=1e-5)
    np.testing.assert_array_equal(x, X["x"])


def test_open_dimensions_are_named() -> None:
    with pytest.raises(UnknownShapeError, match=r"x: batch \(axis 0\)"):
        import_onnx(opened())


@pytest.mark.parametrize("examples", [X["x"], (X["x"],), {"x": X["x"]}])
def test_examples_fix_open_dimensions(examples: object) -> None:
    imported = import_onnx(opened(), examples)
    assert imported.graph.inputs[0].shape == (2, 3)
    assert import_model(imported) is imported


def test_examples_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TilewrightError, match="no inputs called 'z'"):
        import_onnx(opened(), {"z": X["x"]})
    with pytest.raises(TilewrightError, match="of f32, and its example of float64"):
        import_onnx(opened(), X["x"].astype(np.float64))
    with pytest.raises(TilewrightError, match=r"shape \['batch', 3\], and its example \[2, 4\]"):
        import_onnx(opened(), floats(2, 4))
    with pytest.raises(TilewrightError, match="2 example inputs for a model with 1"):
        import_onnx(opened(), (X["x"], X["x"]))


def test_every_unsupported_operator_is_named_at_once() -> None:
    model = model_of("a = NonZero (x) b = Unique (x) c = Cast <to: int = 12> (x) y = Relu (x)", X, "a b c y")
    with pytest.raises(UnsupportedOpsError) as caught:
        import_onnx(model)
    text = str(caught.value)
    assert text.startswith("3 unsupported operator(s)")
    for part in (
        "NonZero (the shape of its result depends on data): a",
        "Unique",
        "Cast (tensors of uint32): c",
    ):
        assert part in text


def test_what_nobody_reads_is_not_converted() -> None:
    assert len(import_onnx(model_of("a = NonZero (x) y = Relu (x)", X)).graph.nodes()) == 2


def test_what_follows_an_unsupported_operator_is_not_blamed() -> None:
    model = model_of("a = NonZero (x) b = Cast <to: int = 1> (a) y = Relu (b)", X)
    with pytest.raises(UnsupportedOpsError) as caught:
        import_onnx(model)
    assert len(caught.value.uses) == 1


def test_unknown_operators_and_attributes_are_unsupported() -> None:
    custom = small()
    custom.graph.node[0].domain = "com.example"
    custom.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    with pytest.raises(UnsupportedOpsError, match=r"com.example.Relu \(no converter\)"):
        import_onnx(custom)
    with pytest.raises(UnsupportedOpsError, match=r"Wrelu \(no converter\)"):
        broken = small()
        broken.graph.node[0].op_type = "Wrelu"
        import_onnx(broken)


def test_pinned_inputs_are_those_that_decide_shapes() -> None:
    inputs = {"x": floats(2, 6), "s": np.array([3, 4]), "z": floats(3, 4)}
    model = model_of("r = Reshape (x, s) y = Add (r, z)", inputs)
    with pytest.raises(UnsupportedOpsError, match="depends on the input 's'"):
        import_onnx(model)
    imported = import_onnx(model, inputs, pin=True)
    assert list(imported.pinned) == ["s"]


def test_no_model_is_compiled_for_one_image() -> None:
    """Data that decides a shape is refused by name, where a handful of numbers would be fixed."""
    inputs = {"x": floats(3, 5, 6)}
    model = model_of(
        "n = ReduceSum <keepdims: int = 0> (x) k = Cast <to: int = 7> (n) y = Range (k, k, k)", inputs
    )
    with pytest.raises(UnsupportedOpsError, match="depends on the input 'x'"):
        tilewright.compile(model, inputs, threads=1)


@pytest.mark.parametrize("dim", ["?", "N", None, -1])
def test_open_dimensions_take_the_size_of_the_example(dim: str | int | None) -> None:
    """However the file says so: a name, the name "?" for all of them, nothing, or -1."""
    model = model_of("y = Relu (x)", {"x": floats(2, 3)})
    for declared in model.graph.input[0].type.tensor_type.shape.dim:
        declared.Clear()
        if isinstance(dim, str):
            declared.dim_param = dim
        elif dim is not None:
            declared.dim_value = dim
    assert import_onnx(model, {"x": floats(4, 5)}).graph.inputs[0].shape == (4, 5)
    with pytest.raises(UnknownShapeError, match=r"x: .*axis 0.*axis 1"):
        import_onnx(model)


def test_ports_of_one_name() -> None:
    """An output may be an input, or be there twice; an input may have any name, that of Python's `self` too."""
    x = floats(2, 3)
    model = model_of("y = Relu (self)", {"self": x}, "y y self")
    compiled = tilewright.compile(model, {"self": x}, threads=1)
    expected = [np.maximum(x, 0), np.maximum(x, 0), x]
    for results in (compiled(x), compiled(**{"self": x})):
        for got, wanted in zip(results, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
    assert not np.shares_memory(compiled(x)[0], compiled(x)[1])


# -- models that are not sound ----------------------------------------------------------------------------------------


def test_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        import_onnx(42)  # type: ignore[arg-type]
    with pytest.raises(ModelFileError, match="cannot read"):
        import_onnx(tmp_path / "missing.onnx")
    with pytest.raises(ModelFileError, match="is not a file"):
        import_onnx(tmp_path)
    for content in (b"", b"\x00\x01garbage", small().SerializeToString()[:-7]):
        path = tmp_path / "bad.onnx"
        path.write_bytes(content)
        with pytest.raises(ModelFileError):
            import_onnx(path)


def test_rules_of_the_format() -> None:
    cyclic = model_of("a = Add (x, b) b = Neg (a) y = Relu (b)", X)
    with pytest.raises(ModelFileError, match="topologically sorted"):
        import_onnx(cyclic)
    with pytest.raises(ModelFileError, match=r"SSA|has been used"):
        import_onnx(model_of("a = Neg (x) a = Exp (x) y = Relu (a)", X))
    with pytest.raises(ModelFileError):
        import_onnx(model_of("y = Add (x, missing)", X))
    twice = small()
    twice.graph.initializer.extend([onnx.numpy_helper.from_array(np.ones(2, np.float32), "w")] * 2)
    with pytest.raises(ModelFileError, match="two initialisers are called 'w'"):
        import_onnx(twice)
    newer = small()
    newer.opset_import[0].version = 10_000
    with pytest.raises(ModelFileError):
        import_onnx(newer)
    none = small()
    del none.opset_import[:]
    with pytest.raises(ModelFileError, match="which opset"):
        import_onnx(none)


def initialised(tensor: onnx.TensorProto) -> onnx.ModelProto:
    model = model_of("y = Relu (w)", {})
    tensor.name = "w"
    model.graph.initializer.append(tensor)
    return model


def test_tensors_that_are_not_what_they_say() -> None:
    good = onnx.numpy_helper.from_array(np.ones((2, 3), np.float32))
    short = onnx.TensorProto()
    short.CopyFrom(good)
    short.raw_data = short.raw_data[:-4]
    with pytest.raises(ModelFileError, match="20 bytes of data"):
        import_onnx(initialised(short))
    fewer = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, (2,), [1.0, 2.0])
    fewer.dims[0] = 5
    with pytest.raises(ModelFileError, match="2 elements of data"):
        import_onnx(initialised(fewer))
    negative = onnx.TensorProto()
    negative.CopyFrom(good)
    negative.dims[0] = -2
    with pytest.raises(ModelFileError):
        import_onnx(initialised(negative))
    strings = onnx.helper.make_tensor("w", onnx.TensorProto.STRING, (1,), [b"a"])
    with pytest.raises(UnsupportedOpsError, match="tensors of string"):
        import_onnx(initialised(strings))


def test_absurd_sizes_cost_nothing() -> None:
    huge = onnx.TensorProto(dims=[1 << 40, 1 << 40], data_type=1, raw_data=b"1234")
    with pytest.raises(ModelSizeError, match="more than the limit"):
        import_onnx(initialised(huge))
    wide = small()
    wide.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1 << 50
    with pytest.raises(ModelSizeError, match="input 'x'"):
        import_onnx(wide)
    grown = "s = Constant <value_ints: ints = [1099511627776, 1024]> () y = ConstantOfShape (s)"
    with pytest.raises(ModelSizeError, match="more than the limit"):
        import_onnx(model_of(grown, X))
    with pytest.raises(ModelSizeError, match=r"limit of 8\b"):
        import_onnx(small(), max_bytes=8)


def test_wrong_types_are_refused() -> None:
    mixed = model_of("y = Add (x, i)", {**X, "i": np.array([[1, 2, 3]])})
    with pytest.raises(UnsupportedOpsError, match="one element type"):
        import_onnx(mixed)
    with pytest.raises(UnsupportedOpsError, match="do not broadcast"):
        import_onnx(model_of("y = Add (x, z)", {**X, "z": floats(5)}))
