"""Models of Hugging Face's transformers as PyTorch exports them to ONNX, small and with random weights: PyTorch's
outputs within the stated error bounds. What PyTorch itself cannot export is not tested."""

from __future__ import annotations

import warnings

import pytest
import torch

import tilewright
from benchmarks.hf_models import MODELS, error, in_float64, tensors

BOUND = 1e-4
FAST = ("bert",)  # exporting takes seconds each; the rest: -m slow


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_exported_model(name: str) -> None:
    model, call = MODELS[name].build(True)
    with torch.no_grad():
        truth = in_float64(model, call)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exported = torch.onnx.export(model, kwargs=call, dynamo=True, verbose=False).model_proto
        except torch.onnx.errors.OnnxExporterError as problem:
            pytest.skip(f"PyTorch does not export it: {str(problem).splitlines()[0]}")
    fast = tilewright.compile(exported)
    results = tensors(
        fast(*tensors(call))
    )  # tensors in, tensors out: the leaves of the call are the model's inputs
    assert len(results) == len(truth)
    for ours, exact in zip(results, truth, strict=True):
        assert tuple(ours.shape) == tuple(exact.shape)
        assert error(ours, exact) <= BOUND
