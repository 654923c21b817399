"""Single operators for `cpu_ops.py`: what they are (`table.py`), at which sizes (`cases.py`), who computes them
(`contenders.py`), and what is asked of ours (`criteria.py`). The turns are those of `peers`."""

from __future__ import annotations

from peers import Contender

NUMPY, TORCH, ONNX_RUNTIME = "numpy", "torch", "onnxruntime"
OURS, OURS_FP32, MACHINE = "ours", "ours-fp32", "machine"

CONTENDERS: dict[str, Contender] = {
    c.name: c
    for c in (
        Contender(NUMPY, "NumPy", "operators.contenders:load_numpy"),
        Contender(TORCH, "torch", "operators.contenders:load_torch"),
        Contender(ONNX_RUNTIME, "ONNX Runtime", "operators.contenders:load_onnx_runtime", needs_onnx=True),
        Contender(OURS, "Tilewright", "operators.contenders:load_ours"),
        Contender(OURS_FP32, "Tilewright fp32", "operators.contenders:load_ours_in_fp32"),
        Contender(MACHINE, "machine", "operators.contenders:load_machine"),
    )
}
PREPARER = Contender("prepare", "prepare", "operators.prepare:load")
