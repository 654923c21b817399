"""PyTorch in eager mode, with images stored as NCHW (its default) and as NHWC (`channels_last`)."""

from __future__ import annotations

from typing import Any

from .job import Job, NotAvailable, Run, torch_model


def load_nchw(job: Job) -> Run:
    model, inputs = torch_model(job)
    return _inference(model, inputs)


def load_nhwc(job: Job) -> Run:
    import torch

    model, inputs = torch_model(job)
    if not any(tensor.ndim == 4 for tensor in inputs):
        raise NotAvailable("the model takes no images")
    channels_last = tuple(
        tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
        for tensor in inputs
    )
    return _inference(model.to(memory_format=torch.channels_last), channels_last)


def _inference(model: Any, inputs: tuple[Any, ...]) -> Run:
    import torch

    @torch.inference_mode()
    def run() -> Any:
        return model(*inputs)

    return run
