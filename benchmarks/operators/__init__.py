"""Single operators for `cpu_ops.py`: what they are (`table.py`), at which sizes (`cases.py`), who computes them
(`systems.py`), and the goals for Tilewright (`criteria.py`). The turns are those of `baselines`."""

from __future__ import annotations

from baselines import System

NUMPY, TORCH, ONNX_RUNTIME = "numpy", "torch", "onnxruntime"
OURS, OURS_FP32, MACHINE = "ours", "ours-fp32", "machine"

SYSTEMS: dict[str, System] = {
    c.name: c
    for c in (
        System(NUMPY, "NumPy", "operators.systems:load_numpy"),
        System(TORCH, "torch", "operators.systems:load_torch"),
        System(ONNX_RUNTIME, "ONNX Runtime", "operators.systems:load_onnx_runtime", needs_onnx=True),
        System(OURS, "Tilewright", "operators.systems:load_ours"),
        System(OURS_FP32, "Tilewright fp32", "operators.systems:load_ours_in_fp32"),
        System(MACHINE, "machine", "operators.systems:load_machine"),
    )
}
PREPARER = System("prepare", "prepare", "operators.prepare:load")
