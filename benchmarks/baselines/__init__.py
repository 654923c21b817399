"""Who takes part in the benchmark: one file per system, and the machinery that lets them alternate.

A system is a function `load(job) -> run`, named in the table below and imported only in that system's own
process. `run()` computes the model once and returns its outputs. A new system is one file and one line of the table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class System:
    name: str
    title: str
    loader: str  # "module:function"
    needs_onnx: bool = False


SYSTEMS: dict[str, System] = {
    c.name: c
    for c in (
        System("torch-eager", "torch eager", "baselines.torch_eager:load_nchw"),
        System("torch-nhwc", "torch NHWC", "baselines.torch_eager:load_nhwc"),
        System("inductor", "Inductor", "baselines.inductor:load"),
        System("onnxruntime", "ONNX Runtime", "baselines.onnx_runtime:load", needs_onnx=True),
        System("openvino", "OpenVINO", "baselines.openvino_cpu:load", needs_onnx=True),
        System("ours", "Tilewright", "baselines.ours:load"),
        System("ours-relaxed", "Tilewright relaxed", "baselines.ours:load_relaxed"),
    )
}
OURS = "ours"
RELAXED = "ours-relaxed"
EAGER = "torch-eager"
