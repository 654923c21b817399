"""Compiled models as their users meet them: calls, errors, explanations."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.runtime import toys
from tilewright.dtypes import DType
from tilewright.errors import GradientError, InputError
from tilewright.runtime import tree
from tilewright.runtime.explain import Checked
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.ports import _TORCH_NAMES

Pair = namedtuple("Pair", ["sum", "product"])


def leaf(index: int) -> dict[str, Any]:
    return {"kind": "leaf", "index": index}


def two_inputs(input_tree: dict[str, Any] | None = None, **options: Any) -> CompiledModel:
    """(x, y) -> (x + y, x * y)"""
    toy = toys.Toy()
    x, y = toy.input("x", (4, 3)), toy.input("y", (4, 3))
    outputs = [toy.apply("add", x, y), toy.apply("mul", x, y)]
    return toy.model(outputs, input_tree=input_tree, **options)


def arguments(args: list[dict[str, Any]], kwargs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    positional = {"kind": "tuple", "items": args}
    keyword = {"kind": "dict", "keys": list(kwargs), "items": list(kwargs.values())}
    return {"kind": "tuple", "items": [positional, keyword]}


X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = X[::-1].copy() - 4


# -- calling ---------------------------------------------------------------------------------------------------------


def test_numpy_in_numpy_out() -> None:
    total, product = two_inputs()(X, Y)
    assert type(total) is np.ndarray
    np.testing.assert_array_equal(total, X + Y)
    np.testing.assert_array_equal(product, X * Y)


def test_torch_in_torch_out() -> None:
    torch = pytest.importorskip("torch")
    model = two_inputs()
    x, y = torch.from_numpy(X.copy()), torch.from_numpy(Y.copy())
    total, product = model(x, y)
    assert torch.equal(total, x + y)
    assert torch.equal(product, x * y)
    mixed = model(x, Y)
    assert torch.equal(mixed[0], x + y)
    assert isinstance(model(X, Y)[0], np.ndarray)


@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.short)
def test_every_type(dtype: DType) -> None:
    model = toys.identity((2, 3), dtype.short)
    x = np.random.default_rng(0).integers(0, 2, (2, 3)).astype(dtype.numpy)
    out = model(x)
    assert out.dtype == dtype.numpy
    np.testing.assert_array_equal(out, x)
    torch = pytest.importorskip("torch")
    given = torch.randint(0, 2, (2, 3)).to(getattr(torch, _TORCH_NAMES[dtype]))
    got = model(given)
    assert got.dtype == given.dtype
    assert torch.equal(got, given)
    (array,) = model._arrays(given)
    assert array.dtype == dtype.numpy
    np.testing.assert_array_equal(array.astype(np.float64), given.to(torch.float64).numpy())


def test_scalars_of_rank_zero() -> None:
    model = toys.identity((), extent=1)
    assert model(np.float32(3)) == 3
    assert model(np.array(2, np.float32)).shape == ()


def test_inputs_that_are_not_contiguous() -> None:
    model = two_inputs()
    wide = np.arange(48, dtype=np.float32).reshape(4, 12)
    for x in (np.asfortranarray(X), wide[:, ::4], wide[:, 1:4], X[::-1], np.broadcast_to(X[:1], (4, 3))):
        np.testing.assert_array_equal(model(x, Y)[0], x + Y)
    torch = pytest.importorskip("torch")
    for t in (
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0).reshape(4, 3).flip(0),
        torch.ones(3).expand(4, 3),
    ):
        assert torch.equal(model(t, Y)[0], t + torch.from_numpy(Y))


def test_inputs_that_are_not_aligned() -> None:
    raw = np.zeros(12 * 4 + 1, np.uint8)
    x = raw[1:].view(np.float32).reshape(4, 3)
    x[:] = X
    np.testing.assert_array_equal(two_inputs()(x, Y)[0], X + Y)


def test_lazily_negated_tensors() -> None:
    torch = pytest.importorskip("torch")
    z = torch.complex(torch.from_numpy(X.copy()), torch.from_numpy(Y.copy())).conj().imag
    assert z.is_neg()
    assert torch.equal(two_inputs()(z, Y)[0], z + torch.from_numpy(Y))


def test_subclasses() -> None:
    torch = pytest.importorskip("torch")

    class Mine(torch.Tensor):  # type: ignore[misc,name-defined]
        pass

    x = torch.from_numpy(X.copy()).as_subclass(Mine)
    assert torch.equal(two_inputs()(x, Y)[0], torch.from_numpy(X + Y))
    recarray = X.view(np.recarray)
    np.testing.assert_array_equal(two_inputs()(recarray, Y)[0], X + Y)


def test_a_default_device_does_not_matter() -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X.copy())
    with torch.device("meta"):
        assert two_inputs()(x, Y)[0].device.type == "cpu"


def test_results_are_fresh() -> None:
    model = two_inputs()
    first = model(X, Y)[0]
    second = model(Y, Y)[0]
    assert first is not second
    np.testing.assert_array_equal(first, X + Y)


# -- trees -----------------------------------------------------------------------------------------------------------


def test_output_trees() -> None:
    _, spec = tree.flatten(Pair(object(), {"p": [object(), 3, None]}))
    total, inner = two_inputs(output_tree=spec)(X, Y)
    np.testing.assert_array_equal(total, X + Y)
    np.testing.assert_array_equal(inner["p"][0], X * Y)
    assert inner["p"][1:] == [3, None]
    result = two_inputs(output_tree=spec)(X, Y)
    assert isinstance(result, Pair)
    both = two_inputs(output_tree={"kind": "tuple", "items": [leaf(0), leaf(0)]})(X, Y)
    assert both[0] is both[1]


def test_input_trees() -> None:
    spec = arguments([{"kind": "list", "items": [leaf(1), leaf(0)]}], {"scale": tree.flatten(2)[1]})
    model = two_inputs(spec)
    np.testing.assert_array_equal(model([X, Y], scale=2)[0], X + Y)
    with pytest.raises(InputError, match=r"^scale: the model was compiled for 2, got int 3"):
        model([X, Y], scale=3)
    with pytest.raises(InputError, match=r"args\[0\]: expected a list of 2, got a list of 1"):
        model([X], scale=2)
    with pytest.raises(InputError, match=r"args\[0\]\[1\]: expected the shape \(4, 3\), got \(2, 3\)"):
        model([X, Y[:2]], scale=2)


def test_positions_and_keywords_are_interchangeable() -> None:
    model = two_inputs(arguments([leaf(0)], {"mask": leaf(1)}), input_names=("x", "mask"))
    for args, kwargs in [((X,), {"mask": Y}), ((X, Y), {}), ((), {"x": X, "mask": Y})]:
        np.testing.assert_array_equal(model(*args, **kwargs)[0], X + Y)
    model = two_inputs(arguments([leaf(0), leaf(1)], {}), input_names=("x", "y"))
    for args, kwargs in [((X, Y), {}), ((X,), {"y": Y}), ((), {"y": Y, "x": X})]:
        np.testing.assert_array_equal(model(*args, **kwargs)[1], X * Y)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((X,), {}, "the argument y is missing: the model takes (x, y), got 1 positional"),
        ((X, Y, X), {}, "unexpected argument(s) z"),
        ((X, Y), {"other": 1}, "unexpected argument(s) other"),
        ((X, Y), {"x": X}, "x was given twice"),
        ((), {"x": X}, "the argument y is missing"),
        ((X, Y, X, X), {}, "unexpected argument(s) z, args[3]"),
    ],
)
def test_wrong_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], words: str) -> None:
    model = two_inputs(arguments([leaf(0), leaf(1)], {}), input_names=("x", "y", "z"))
    with pytest.raises(InputError) as caught:
        model(*args, **kwargs)
    assert words in caught.value.message


def test_arguments_without_names() -> None:
    with pytest.raises(InputError, match=r"the argument args\[1\] is missing"):
        two_inputs()(X)
    with pytest.raises(InputError, match=r"args\[2\]"):
        two_inputs()(X, Y, X)


# -- tensors that do not fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (X[:2], "y: expected the shape (4, 3), got (2, 3)"),
        (X.astype(np.float64), "y: expected f32[4,3], got elements of float64"),
        (X[:2].astype(np.int32), "got (2, 3) (and f32, got int32)"),
        (X.astype(">f4"), "byte order, got >f4"),
        (3, "y: expected a tensor f32[4,3], got the Python number 3"),
        (True, "got the Python number True"),
        (None, "got None"),
        ("text", "got str 'text'"),
        (SimpleNamespace(), "got a value of type SimpleNamespace"),
        ([[1.0]], "expected a tensor, got a list of 1"),
        (np.ma.masked_array(X), "mask would be lost"),
        (np.float64(3), "expected the shape (4, 3), got ()"),
    ],
)
def test_misfits(value: Any, words: str) -> None:
    model = two_inputs(arguments([leaf(0), leaf(1)], {}), input_names=("x", "y"))
    with pytest.raises(InputError) as caught:
        model(X, y=value)
    assert words in caught.value.message
    assert "try: " in str(caught.value)
    if not isinstance(value, list):
        with pytest.raises(InputError) as again:
            model(X, value)
        assert again.value.message == caught.value.message


def test_torch_misfits() -> None:
    torch = pytest.importorskip("torch")
    model = two_inputs(arguments([leaf(0), leaf(1)], {}), input_names=("x", "y"))
    x = torch.ones(4, 3)
    cases = [
        (torch.ones(3, 4), "y: expected the shape (4, 3), got (3, 4)"),
        (torch.ones(4, 3, dtype=torch.float64), "got elements of torch.float64"),
        (torch.ones(4, 3, device="meta"), "compiled for the CPU, got a tensor on meta"),
        (torch.ones(4, 3).to_sparse(), "layout torch.sparse_coo"),
        (4.5, "the Python number 4.5"),
    ]
    for value, words in cases:
        with pytest.raises(InputError) as caught:
            model(x, value)
        assert words in caught.value.message


def test_tensors_without_data() -> None:
    torch = pytest.importorskip("torch")

    class Null(torch.Tensor):  # type: ignore[misc,name-defined]  # as FakeTensor does
        def data_ptr(self) -> int:
            return 0

    class Raises(torch.Tensor):  # type: ignore[misc,name-defined]  # as functional tensors do
        def data_ptr(self) -> int:
            raise RuntimeError("no storage")

    for kind in (Null, Raises):
        with pytest.raises(InputError, match="without data"):
            two_inputs()(torch.ones(4, 3).as_subclass(kind), Y)


def test_gradients() -> None:
    torch = pytest.importorskip("torch")
    model = two_inputs()
    x = torch.ones(4, 3, requires_grad=True)
    with pytest.raises(GradientError, match="no_grad"):
        model(x, Y)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not model(x, Y)[0].requires_grad
    model(torch.nn.Parameter(x.detach(), requires_grad=False), Y)
    model.explain((x.detach(), Y))


# -- looking at it ---------------------------------------------------------------------------------------------------


def test_threads() -> None:
    model = toys.chain(3, threads=2)
    assert model.threads == 2
    model.threads = 1
    assert model.executor.threads == 1
    assert "3 kernels, 1 thread>" in repr(model)


def test_explain() -> None:
    model = toys.chain(4, threads=2)
    explanation = model.explain(repeats=2)
    assert [row.label for row in explanation.rows] == ["add", "mul", "add", "mul"]
    assert sum(row.share for row in explanation.rows) == pytest.approx(1)
    assert explanation.flops == 4 * 16 * 32
    assert explanation.worst_error is None
    text = str(explanation)
    assert "toy_add_f32_32" not in text and "toy_add_f32_32" in explanation.table(hashes=True)
    assert "random (normal floats, integers 0 or 1)" in text
    assert explanation.threads["threads"] == 2
    assert explanation.threads["runtime"] in text
    widths = {len(line) for line in text.splitlines()[:5]}
    assert len(widths) == 1, text
    data = explanation.to_dict()
    assert data["rows"][0]["kernel"] == "toy_add_f32_32_16"
    assert data["memory"]["arena_bytes"] > 0


def test_explain_with_a_checker() -> None:
    model = toys.chain(3)
    seen = []

    def checker(info: Any, inputs: Any, output: np.ndarray) -> Checked:
        seen.append((info.label, len(inputs), output.shape))
        return Checked(float("nan") if len(seen) == 2 else 0.5)

    model.checker = checker
    explanation = model.explain(X.repeat(4, 0)[:, :1].repeat(32, 1).copy(), repeats=1)
    assert seen == [("add", 2, (16, 32)), ("mul", 2, (16, 32)), ("add", 2, (16, 32))]
    assert explanation.rows[0].error == 0.5
    assert explanation.worst_error is not None
    assert np.isnan(explanation.worst_error)
    assert "error" in str(explanation)
    assert explanation.inputs == "given"


def test_random_inputs_of_integers_are_small() -> None:
    model = toys.identity((50,), "i64")
    (array,) = model._arrays(None)
    assert set(array.tolist()) == {0, 1}


def test_bench() -> None:
    model = two_inputs(arguments([leaf(0)], {"y": leaf(1)}))
    result = model.bench(repeats=5)
    assert result.repeats == 5
    assert 0 < result.minimum <= result.median <= result.p90
    assert "ms" in str(result)
    assert toys.identity().bench(np.zeros(4, np.float32), repeats=2).repeats == 2
    assert toys.identity(input_names=("x",)).bench({"x": np.zeros(4, np.float32)}, repeats=2).repeats == 2


def test_bfloat16_numpy_type_is_ours() -> None:
    assert toys.identity((2,), "bf16")(np.zeros(2, ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16
