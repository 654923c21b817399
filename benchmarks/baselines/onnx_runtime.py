"""ONNX Runtime's CPU provider, all graph optimisations on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .job import Job, NotAvailable, Run, load_arrays, onnx_model


def load(job: Job) -> Run:
    return running(session_for(str(onnx_model(job)), job.threads), load_arrays(job.inputs_file))


def session_for(model: str, threads: int) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise NotAvailable(f"{error}; pip install onnxruntime") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def running(session: Any, inputs: Sequence[np.ndarray]) -> Run:
    feed = dict(zip((value.name for value in session.get_inputs()), inputs, strict=True))
    return lambda: session.run(None, feed)
