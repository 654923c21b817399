"""Who takes part in the benchmark: one file per contender, and the machinery that lets them take turns.

A contender is a function `load(job) -> run`, named in the table below and imported only in that contender's own
process. `run()` computes the model once and returns its outputs. A new contender is one file and one line of the table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contender:
    name: str
    title: str
    loader: str  # "module:function"
    needs_onnx: bool = False


CONTENDERS: dict[str, Contender] = {
    c.name: c
    for c in (
        Contender("torch-eager", "torch eager", "peers.torch_eager:load_nchw"),
        Contender("torch-nhwc", "torch NHWC", "peers.torch_eager:load_nhwc"),
        Contender("inductor", "Inductor", "peers.inductor:load"),
        Contender("onnxruntime", "ONNX Runtime", "peers.onnx_runtime:load", needs_onnx=True),
        Contender("openvino", "OpenVINO", "peers.openvino_cpu:load", needs_onnx=True),
        Contender("ours", "Tilewright", "peers.ours:load"),
        Contender("ours-relaxed", "Tilewright relaxed", "peers.ours:load_relaxed"),
    )
}
OURS = "ours"
RELAXED = "ours-relaxed"
EAGER = "torch-eager"
