"""The whole zoo, small, for a GPU that is only described: every kernel compiles, none spills, every plan is sound.

python -m tests.targets.described [sm_90a] [MODEL ...]
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from tests.space.implementations import NAMES, kernels_of
from tilewright import frontend
from tilewright.hw.gpu import DESCRIBED
from tilewright.support.trace import Trace
from tilewright.targets.cuda import CudaTarget
from tilewright.targets.options import Settings
from tilewright.targets.stages import build_plan, choose_implementations
from tilewright.targets.target import boundary
from tilewright.zoo import registry


def compiled(name: str, target: CudaTarget) -> tuple[int, int]:
    """(steps, kernels that spill)."""
    model = registry.build(name, small=True).half()
    inputs = registry.example_inputs(name, small=True)
    imported = frontend.import_model(model, tuple(x.half() if x.is_floating_point() else x for x in inputs))
    partition = target.partition(imported, "fast", Trace.off())
    chosen = choose_implementations(Settings(target), [partition])
    (partition,) = chosen.partitions
    linked, _ = build_plan(Settings(target), partition, chosen.choices, boundary(imported))
    linked.plan.validate()
    made = [choice.implementation for choice in chosen.choices.values()]
    kernels = [kernel for each in made for kernel in kernels_of(each, target.machine)]
    return len(linked.plan.steps), sum(kernel.resources.spilled_bytes > 0 for kernel in kernels)


def main(arguments: list[str]) -> int:
    capability = next((a for a in arguments if a in DESCRIBED), "sm_90a")
    names = [a for a in arguments if a not in DESCRIBED] or registry.names()
    machine = DESCRIBED[capability]
    bad = 0
    for name in names:
        for libraries in ((), NAMES):
            began = time.perf_counter()
            steps, spilling = compiled(name, CudaTarget(replace(machine, libraries=libraries)))
            bad += spilling
            how = "with libraries" if libraries else "alone"
            seconds = time.perf_counter() - began
            print(f"{name} {how}: {steps} steps, {spilling} kernels spill, {seconds:.1f} s", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
