"""ONNX Runtime's CPU provider, all graph optimisations on."""

from __future__ import annotations

from typing import Any

from .job import Job, NotAvailable, Run, load_arrays, onnx_model


def load(job: Job) -> Run:
    try:
        import onnxruntime
    except ImportError as error:
        raise NotAvailable(f"{error}; pip install onnxruntime") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(onnx_model(job)), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    feed = dict(zip(names, load_arrays(job.inputs_file), strict=True))

    def run() -> Any:
        return session.run(None, feed)

    return run
