"""The whole zoo, small, for a GPU that is only described: every kernel compiles, none spills, every plan is sound.

python -m tests.targets.described [sm_90a] [MODEL ...]
"""

from __future__ import annotations

import sys
import time

from tilewright.codegen.cuda.pieces import build_piece
from tilewright.space.vendor.pieces import refined

from tilewright import frontend
from tilewright.hw.gpu import DESCRIBED
from tilewright.support.trace import Trace
from tilewright.targets.cuda import CudaTarget
from tilewright.zoo import registry


def compiled(name: str, target: CudaTarget) -> tuple[int, int]:
    """(steps, kernels that spill)."""
    model = registry.build(name, small=True).half()
    inputs = registry.example_inputs(name, small=True)
    imported = frontend.import_model(model, tuple(x.half() if x.is_floating_point() else x for x in inputs))
    partition = target.partitioned(imported, "fast", Trace.off())
    ways = target.chosen([partition], "fast", None, Trace.off())
    made = target.finished(imported, partition, "fast", None, Trace.off(), ways)
    made.plan.validate()
    _, pieces = refined(partition, ways)
    own = [piece for piece in pieces.values() if piece.call is None]
    kernels = [build_piece(piece, target.machine, "fast", None) for piece in own]
    return len(made.plan.steps), sum(kernel.resources.spilled_bytes > 0 for kernel in kernels)


def main(arguments: list[str]) -> int:
    capability = next((a for a in arguments if a in DESCRIBED), "sm_90a")
    names = [a for a in arguments if a not in DESCRIBED] or registry.names()
    machine = DESCRIBED[capability]
    bad = 0
    for name in names:
        for libraries in (frozenset[str](), frozenset({"cublaslt", "torch"})):
            began = time.perf_counter()
            steps, spilling = compiled(name, CudaTarget(machine, None, libraries))
            bad += spilling
            how = "with libraries" if libraries else "alone"
            seconds = time.perf_counter() - began
            print(f"{name} {how}: {steps} steps, {spilling} kernels spill, {seconds:.1f} s", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
