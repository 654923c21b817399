"""`tilewright.compile(..., dynamic=True)`: shapes that change, by the policy of `runtime.dispatch`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import tilewright
from tilewright import driver
from tilewright.errors import (
    ArtifactError,
    GradientError,
    InputError,
    ModelChangedError,
    TilewrightError,
    TilewrightWarning,
    TrainingModeError,
    UnsupportedModelError,
)
from tilewright.runtime.dispatch import Policy
from tilewright.runtime.dynamic import DynamicModel

POLICY = Policy()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.eval()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, 16)).unbind(-2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return {"y": x + self.out(y) * scale, "last": y[:, -1]}


def sequence(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(length))


def check(fast: DynamicModel, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        expected = model(*args, **kwargs)
    got = fast(*args, **kwargs)
    assert set(got) == set(expected)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each model that is compiled."""
    made: list[object] = []
    real = driver.run_pipeline

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(driver, "run_pipeline", counted)
    return made


def test_a_growing_sequence_compiles_as_often_as_the_policy_says(compilations: list[object]) -> None:
    model = Attention()
    fast = tilewright.compile(model, (sequence(1),), dynamic=True)
    for _ in range(2):
        for length in range(1, 41):
            check(fast, model, sequence(length))
        # The other lengths passed, in PyTorch, in far less time than a compilation takes.
        assert len(compilations) == POLICY.eager


def test_a_sequence_that_grows_again_and_again_compiles_up_to_the_limit(compilations: list[object]) -> None:
    model = Attention()
    fast = tilewright.compile(model, (sequence(1),), dynamic=Policy(worth=0))
    for _ in range(3):
        for length in range(1, 41):
            check(fast, model, sequence(length))
    assert len(compilations) == POLICY.limit == len(fast.variants)


def test_the_policy_can_be_given(compilations: list[object]) -> None:
    fast = tilewright.compile(Attention(), dynamic=Policy(limit=3, eager=1, patience=3, worth=0))
    for length in (1, 2, 2, 2, 3, 3, 4):
        fast(sequence(length))
    assert len(compilations) == 2


def test_a_kind_of_call_is_shapes_types_and_numbers_however_given(compilations: list[object]) -> None:
    model = Attention()
    fast = tilewright.compile(model, {"x": sequence(4)}, dynamic=True)
    check(fast, model, sequence(4))
    check(fast, model, x=sequence(4))
    assert isinstance(fast(sequence(4).numpy())["y"], np.ndarray)
    assert len(compilations) == 1
    check(fast, model, sequence(4), 2.0)
    check(fast, model, sequence(4), scale=2.0)
    assert len(compilations) == 2
    check(fast, model, sequence(4, batch=2))
    assert len(compilations) == 3
    assert "3 variants of at most 16" in repr(fast) and "f32[2,4,16]" in repr(fast)


def test_what_is_not_compiled_looks_the_same() -> None:
    """Results of other means are new tensors, of the kind of the inputs."""

    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x, x[0], x + 1

    fast = tilewright.compile(Views().eval(), dynamic=Policy(limit=1, eager=1))
    for size in (2, 3):  # the second is not compiled
        x = torch.ones(size, 2)
        results = fast(x)
        for result in results:
            result.zero_()
        assert len(fast.variants) == 1 and torch.equal(x, torch.ones(size, 2))
        arrays = fast(np.ones((size, 2), np.float32))
        assert [type(array) for array in arrays] == [np.ndarray] * 3
        assert [array.tolist() for array in arrays] == [[[1, 1]] * size, [1, 1], [[2, 2]] * size]
        with pytest.raises(GradientError):
            fast(torch.ones(size, 2, requires_grad=True))


def test_weights_are_those_of_the_time_of_compilation() -> None:
    model = Attention()
    fast = tilewright.compile(model, (sequence(4),), dynamic=True)
    before = fast(sequence(4))["y"]
    with torch.no_grad():
        model.out.weight.mul_(2)
    assert torch.equal(fast(sequence(4))["y"], before)
    with pytest.raises(ModelChangedError, match="Attention were written to"):
        fast(sequence(5))
    model.train()
    with pytest.raises(TrainingModeError):
        fast(sequence(6))


def test_weights_are_held_once(compilations: list[object]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    fast = tilewright.compile(model, dynamic=True)
    for batch in (16, 32):
        fast(torch.randn(batch, 64))
    first, second = ({c.ctypes.data for c in v.executor.constants} for v in fast.variants)
    assert first & second and len(first | second) < len(first) + len(second)


def test_save_has_all_variants(tmp_path: Path) -> None:
    model = Attention()
    fast = tilewright.compile(model, dynamic=True)
    with pytest.raises(ArtifactError, match="nothing of the model is compiled yet"):
        fast.save(tmp_path / "none.tw")
    fast(sequence(3))
    fast.save(tmp_path / "one.tw")
    one = (tmp_path / "one.tw").stat().st_size
    fast(sequence(5)), fast(sequence(7), scale=0.5)
    fast.save(tmp_path / "m.tw")
    again = tilewright.load(tmp_path / "m.tw", threads=1)
    assert isinstance(again, DynamicModel) and len(again.variants) == 3 and again.threads == 1
    check(again, model, sequence(3))
    check(again, model, x=sequence(5))
    check(again, model, sequence(7), 0.5)
    with pytest.raises(
        InputError, match=r"(?s)saved for 3 kinds.*got \(x: float32\[1, 4, 16\]\).*f32\[1,3,16\]"
    ):
        again(sequence(4))
    with pytest.raises(InputError, match="saved for 3 kinds"):
        again(sequence(7), 0.25)
    again.save(tmp_path / "again.tw")
    assert (tmp_path / "again.tw").read_bytes() == (tmp_path / "m.tw").read_bytes()
    assert isinstance(tilewright.load(tmp_path / "one.tw"), tilewright.CompiledModel)
    assert (tmp_path / "m.tw").stat().st_size < 3 * one


def test_explain_and_bench() -> None:
    fast = tilewright.compile(Attention(), dynamic=Policy(limit=1))
    with pytest.raises(InputError, match="nothing is compiled yet"):
        fast.explain()
    assert fast.explain((sequence(4),)).worst_error < 1e-5
    assert fast.bench(repeats=1).repeats == 1
    with pytest.raises(InputError, match="nothing is compiled for these inputs"):
        fast.bench((sequence(5),))


def test_threads_hold_for_later_variants_too() -> None:
    fast = tilewright.compile(Attention(), (sequence(2),), dynamic=True, threads=1)
    assert fast.threads == 1
    fast.threads = 2
    fast(sequence(3))
    assert [model.threads for model in fast.variants] == [2, 2]


def test_user_errors() -> None:
    model, x = Attention(), sequence(4)
    with pytest.raises(InputError, match="dynamic=True"):
        tilewright.compile(model, (x,))(sequence(5))
    with pytest.raises(UnsupportedModelError, match="exported program"):
        tilewright.compile(torch.export.export(model, (x,)), dynamic=True)
    with pytest.raises(UnsupportedModelError, match=r"cannot import a builtins\.int"):
        tilewright.compile(3, dynamic=True)
    with pytest.raises(TrainingModeError):
        tilewright.compile(Attention().train(), dynamic=True)
    fast = tilewright.compile(model, (x,), dynamic=True)
    with pytest.raises(InputError, match="x was given twice"):
        fast(x, x=x)
    with pytest.raises(InputError, match="expected a tensor"):
        fast(object())
    with pytest.raises(InputError, match=r"Attention does not run on these inputs .* cannot be multiplied"):
        fast(torch.ones(1, 4, 15))
    assert len(fast.variants) == 1


# -- ONNX -------------------------------------------------------------------------------------------------------------


def onnx_model() -> onnx.ModelProto:
    text = """<ir_version: 10, opset_import: ["" : 17]>
        agraph (float[batch, length, 4] x, float[4, 4] w) => (float[batch, length, 4] y) {
            h = MatMul (x, w) t = Tanh (h) s = Softmax (t) y = Add (s, x)
        }"""
    return onnx.parser.parse_model(text)


def onnx_inputs(length: int, batch: int = 1) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(length)
    x = generator.standard_normal((batch, length, 4)).astype(np.float32)
    return x, generator.standard_normal((4, 4)).astype(np.float32)


def onnx_expected(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    bent = np.exp(np.tanh(x.astype(np.float64) @ w))
    return bent / bent.sum(-1, keepdims=True) + x


@pytest.mark.parametrize("as_path", [True, False])
def test_an_onnx_model_with_open_dimensions(
    as_path: bool, tmp_path: Path, compilations: list[object]
) -> None:
    onnx.save(onnx_model(), tmp_path / "m.onnx")
    policy = Policy(worth=0)
    fast = tilewright.compile(tmp_path / "m.onnx" if as_path else onnx_model(), dynamic=policy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for length in range(1, 21):
                x, w = onnx_inputs(length)
                np.testing.assert_allclose(fast(x, w=w), onnx_expected(x, w), rtol=1e-5, atol=1e-6)
    assert len(compilations) == policy.limit
    assert [w.category for w in caught].count(TilewrightWarning) == 1  # that some run in NumPy
    result = fast(*(torch.from_numpy(a) for a in onnx_inputs(30)))
    assert isinstance(result, torch.Tensor) and result.shape == (1, 30, 4)


def test_onnx_mistakes() -> None:
    fast = tilewright.compile(onnx_model(), onnx_inputs(3), dynamic=True)
    assert len(fast.variants) == 1
    x, w = onnx_inputs(4)
    with pytest.raises(InputError, match="takes the inputs x, w: w missing"):
        fast(x)
    with pytest.raises(InputError, match="z not among them"):
        fast(x, w, z=w)
    with pytest.raises(TilewrightError, match="its example of float64"):
        fast(x.astype(np.float64), w)
    with pytest.raises(TilewrightError, match=r"has the shape \['batch', 'length', 4\]"):
        fast(x[..., :3], w)
