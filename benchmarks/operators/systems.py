"""Those who compute an operator, each imported only in its own process. `machine` computes nothing: in its turn it does
as much arithmetic or moves as many bytes as it can, and says how many."""

from __future__ import annotations

from typing import Any

import numpy as np

from baselines import onnx_runtime
from baselines.job import Arrays, NotAvailable, Run, onnx_model, untuned
from operators.cases import OperatorJob
from operators.prepare import integer_operands, torch_module, torch_operands


def load_numpy(job: OperatorJob) -> Run:
    formula = job.case.formula.numpy
    if formula is None:
        raise NotAvailable("NumPy has no such operator")
    return formula(*_numpy(job), job.case.sizes)


def load_torch(job: OperatorJob) -> Run:
    import torch

    torch.set_num_threads(job.threads)
    module, inputs = _torch(job)

    @torch.inference_mode()
    def run() -> Any:
        return module(*inputs)

    return run


def _numpy(job: OperatorJob) -> tuple[Arrays, Arrays]:
    if job.case.dtype == "bfloat16":
        raise NotAvailable("NumPy's arrays have no such type")
    inputs, weights = torch_operands(job.case)
    return [x.numpy() for x in inputs], [w.numpy() for w in weights]


def _torch(job: OperatorJob) -> tuple[Any, tuple[Any, ...]]:
    return torch_module(job.case), tuple(torch_operands(job.case)[0])


def load_onnx_runtime(job: OperatorJob) -> Run:
    inputs = (integer_operands(job.case) if job.case.int8 else _numpy(job))[0]
    return onnx_runtime.running(onnx_runtime.session_for(str(onnx_model(job)), job.threads), inputs)


def load_ours(job: OperatorJob) -> Run:
    if not job.case.int8:
        return load_ours_in_fp32(job)
    inputs, _ = integer_operands(job.case)
    return _compiled(job, str(onnx_model(job)), tuple(inputs))


def load_ours_in_fp32(job: OperatorJob) -> Run:
    return _compiled(job, *_torch(job))


def _compiled(job: OperatorJob, model: Any, inputs: tuple[Any, ...]) -> Run:
    import tilewright

    compiled: Any = tilewright.compile(
        model,
        inputs,
        target="cpu",
        effort=job.effort,
        budget=job.budget,
        threads=job.threads,
        db=untuned(job.folder, job.effort),
    )
    return lambda: compiled(*inputs)


def load_machine(job: OperatorJob) -> Run:
    """One call does as many operations, or moves as many bytes, as its only output says."""
    from tilewright.hw import host
    from tilewright.measure import calibrate

    if job.bound == "flops":
        kernel, inputs, count = calibrate.peak_kernel(host(), job.threads)
    else:
        reading = job.bound == "read"
        make = calibrate.read_kernel if reading else calibrate.copy_kernel
        kernel, array = make(host(), job.threads)
        inputs, count = [array], array.nbytes if reading else 2 * array.nbytes
    output, said = kernel(inputs), np.array([count], np.float64)

    def run() -> np.ndarray:
        kernel(inputs, output)
        return said

    return run
