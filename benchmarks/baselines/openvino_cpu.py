"""OpenVINO's CPU plugin in its latency mode, in fp32 (it would choose bf16 where the machine has it)."""

from __future__ import annotations

from typing import Any

from .job import Job, NotAvailable, Run, load_arrays, onnx_model


def load(job: Job) -> Run:
    try:
        import openvino
    except ImportError as error:
        raise NotAvailable(f"{error}; pip install openvino") from error
    core = openvino.Core()
    settings = {
        "INFERENCE_NUM_THREADS": job.threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    compiled = core.compile_model(core.read_model(str(onnx_model(job))), "CPU", settings)
    request = compiled.create_infer_request()
    inputs = dict(enumerate(load_arrays(job.inputs_file)))

    def run() -> Any:
        return request.infer(inputs, share_inputs=True, share_outputs=True)

    return run
