"""What a user of the library expects: examples in any usual form, names as in the model, errors that can be caught."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import tilewright
from tilewright import errors
from tilewright.hw.gpu import H200
from tilewright.targets.resolve import resolve_target


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, *, scale: torch.Tensor) -> torch.Tensor:
        return x * scale if y is None else x * scale + y


X, SCALE = torch.arange(6.0).reshape(2, 3), torch.tensor([1.0, 2.0, 3.0])


def test_help_has_an_example_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = inspect.getdoc(tilewright.compile) or ""
    block = text[text.index("import torch, tilewright") :].partition("\n\n    tilewright.compile(bert")[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(inspect.cleandoc(block), names)
    assert (tmp_path / "model.tw").exists() and isinstance(names["fast"], tilewright.CompiledModel)
    for option in inspect.signature(tilewright.compile).parameters:
        assert f"`{option}`" in text, f"{option} is not described"


def test_every_error_is_a_name_of_the_package() -> None:
    classes = {
        name
        for name, each in vars(errors).items()
        if isinstance(each, type) and each.__module__ == errors.__name__
    }
    assert classes <= set(tilewright.__all__) <= set(dir(tilewright))
    assert all(getattr(tilewright, name) is getattr(errors, name) for name in classes)
    from tilewright import InputError

    assert issubclass(InputError, tilewright.TilewrightError)


# -- examples ---------------------------------------------------------------------------------------------------------


def test_positional_and_keyword_examples_together() -> None:
    model = Scaled().eval()
    fast = tilewright.compile(model, (X,), example_kwargs={"scale": SCALE})
    assert torch.equal(fast(X, scale=SCALE), model(X, scale=SCALE))
    assert fast.explain((X,), kwargs={"scale": SCALE}).rows and fast.bench(
        X, kwargs={"scale": SCALE}, repeats=1
    )
    with pytest.raises(tilewright.InputError, match="scale is missing"):
        fast(X)
    (again,) = tilewright.compile_all([(model, (X,), {"scale": SCALE})], effort="none")
    assert torch.equal(again(X, scale=SCALE), model(X, scale=SCALE))


def test_both_kinds_of_examples_with_changing_shapes() -> None:
    model = Scaled().eval()
    fast = tilewright.compile(model, (X,), example_kwargs={"scale": SCALE}, dynamic=True)
    assert len(fast.variants) == 1
    other = torch.ones(4, 3)
    assert torch.equal(fast(other, scale=SCALE), model(other, scale=SCALE))


def test_both_kinds_of_examples_of_an_onnx_model() -> None:
    text = '<ir_version: 10, opset_import: ["" : 17]> g (float[n,3] x, float[m] b) => (float[n,3] y) {y = Mul(x, b)}'
    model = onnx.parser.parse_model(text)
    fast = tilewright.compile(model, (X.numpy(),), example_kwargs={"b": SCALE.numpy()})
    np.testing.assert_array_equal(fast(X.numpy(), SCALE.numpy()), (X * SCALE).numpy())
    with pytest.raises(tilewright.InputError, match="x was given twice"):
        tilewright.compile(model, (X.numpy(),), example_kwargs={"x": X.numpy()})


def test_numpy_examples() -> None:
    model = Scaled().eval()
    for examples, named in (
        ((X.numpy(),), {"scale": SCALE.numpy()}),
        ({"x": X.numpy(), "scale": SCALE.numpy()}, {}),
    ):
        fast = tilewright.compile(model, examples, example_kwargs=named)
        result = fast(X.numpy(), scale=SCALE.numpy())
        assert isinstance(result, np.ndarray)
        np.testing.assert_array_equal(result, (X * SCALE).numpy())
    single = tilewright.compile(nn.ReLU().eval(), X.numpy())
    assert torch.equal(single(X), X.relu())


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


class Swapped(nn.Module):
    def forward(self, pair: Pair) -> Pair:
        return Pair(pair.second + 1, pair.first * 2)


def test_numpy_in_a_plain_dataclass() -> None:
    fast = tilewright.compile(Swapped().eval(), (Pair(X.numpy(), SCALE.numpy()),))
    result = fast(Pair(X.numpy(), SCALE.numpy()))
    assert isinstance(result, Pair)
    np.testing.assert_array_equal(result.second, 2 * X.numpy())
    assert list(fast.inputs) == ["pair.first", "pair.second"]


# -- names ------------------------------------------------------------------------------------------------------------


def test_inputs_have_the_names_of_the_model() -> None:
    fast = tilewright.compile(Scaled().eval(), {"x": X, "scale": SCALE})
    assert fast.signature.startswith("(x: f32[2,3], scale: f32[3])") and "kwargs" not in repr(fast)
    assert ", 1 kernel, " in repr(fast)
    assert list(fast.inputs) == ["x", "scale"]
    with pytest.raises(tilewright.InputError, match=r"^scale: expected the shape \(3,\), got \(4,\)"):
        fast(X, scale=torch.ones(4))


def test_notebooks_show_tables() -> None:
    fast = tilewright.compile(Scaled().eval(), {"x": X, "scale": SCALE})
    shown = fast._repr_html_()
    assert "<table>" in shown and "scale" in shown and "f32[2,3]" in shown
    explained = fast.explain()._repr_html_()
    assert explained.count("<tr>") == 1 + len(fast.plan.steps) and "µs" in explained
    dynamic = tilewright.compile(nn.ReLU().eval(), (X,), dynamic=True)._repr_html_()
    assert "1 variants" in dynamic and "f32[2,3]" in dynamic


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_wrong_shape_is_an_input_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(tilewright.InputError, match=r"Linear does not run on these inputs .*float32\[2, 5\]"):
        tilewright.compile(nn.Linear(4, 3).eval(), (torch.ones(2, 5),))
    fast = tilewright.compile(nn.Linear(4, 3).eval(), (torch.ones(2, 4),), dynamic=True)
    with pytest.raises(tilewright.InputError, match=r"float32\[7, 5\]"):
        fast(torch.ones(7, 5))
    assert "fake_tensor" not in capfd.readouterr().err, "PyTorch's log of the failure"


def test_a_model_that_pytorch_cannot_export_is_still_an_export_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(tilewright.ExportError, match="could not trace Branching"):
        tilewright.compile(Branching().eval(), (X,))
    assert capfd.readouterr().err == "", "neither PyTorch's log nor its graph so far"


def test_gpu_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.targets import resolve

    asked: list[int] = []

    def card(ordinal: int) -> Any:
        asked.append(ordinal)
        return resolve_target(H200)

    monkeypatch.setitem(resolve._NAMED, "cuda", card)
    resolve_target("gpu")
    resolve_target("gpu:1")
    assert asked == [0, 1]
    with pytest.raises(tilewright.TargetError, match="did you mean 'cuda'"):
        resolve_target("cudda")
