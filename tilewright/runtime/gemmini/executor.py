"""Runs a plan whose steps are partly the accelerator's: native code up to such a step, then the simulator."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.errors import VerificationError
from tilewright.runtime import host
from tilewright.runtime.contract import code_of
from tilewright.runtime.executor import Executor, Frame
from tilewright.runtime.gemmini.kernel import KIND, AcceleratorKernel, is_accelerated
from tilewright.runtime.loader import load_objects
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.plan import Step


def check_target(target: dict[str, Any]) -> None:
    """Raise ArtifactMachineError unless this machine can be the host."""
    host.check({**target, "triple": str(target["triple"]).removeprefix(f"{KIND}-")})


class GemminiExecutor(Executor):
    accelerated: dict[str, AcceleratorKernel]

    def _check_target(self) -> None:
        check_target(self.plan.target)

    def _loaded(self, objects: Mapping[str, bytes]) -> Any:
        kernels = self.plan.kernels
        codes = {symbol: code_of(objects[digest]) for symbol, digest in kernels.items()}
        self.accelerated = {
            symbol: AcceleratorKernel(code, symbol) for symbol, code in codes.items() if is_accelerated(code)
        }
        native = {symbol: digest for symbol, digest in kernels.items() if symbol not in self.accelerated}
        self._native = load_objects(objects, native)  # kept: its addresses are valid as long as it lives
        for step in self.plan.steps:
            self._check_step(step)
        # Native code never calls what the accelerator runs.
        return {symbol: 0 if symbol in self.accelerated else self._native[symbol] for symbol in kernels}

    def _check_step(self, step: Step) -> None:
        kernel = self.accelerated.get(step.kernel)
        info = self.plan.tasks[step.task]
        if kernel is not None and kernel.sizes() != [spec.bytes for spec in (*info.inputs, info.output)]:
            raise VerificationError(
                f"{step.name or step.kernel}: the sizes of its program differ from those of the plan"
            )

    def _run_range(self, frame: Frame, first: int, last: int) -> None:
        start = first
        for number in range(first, last):
            step = self.plan.steps[number]
            kernel = self.accelerated.get(step.kernel)
            if kernel is None:
                continue
            if start < number:
                super()._run_range(frame, start, number)
            began = time.perf_counter_ns()
            kernel.run([self._address(frame, index, number) for index in range(len(step.arguments))])
            if frame.call.times:
                taken = ctypes.c_int64.from_address(frame.call.times + 8 * number)
                taken.value = time.perf_counter_ns() - began
            start = number + 1
        if start < last:
            super()._run_range(frame, start, last)

    def _address(self, frame: Frame, index: int, number: int) -> int:
        place = self._places[number][index]
        return int(frame.bases[place.base] or 0) + int(place.offset)

    def summary(self) -> str:
        """The part of a model that the accelerator runs, for `explain`."""
        found = [
            self.accelerated[step.kernel].header
            for step in self.plan.steps
            if step.kernel in self.accelerated
        ]
        instructions, cycles = sum(each.instructions for each in found), sum(each.cycles for each in found)
        return (
            f"{len(found)} of {len(self.plan.steps)} kernels, {instructions:,} instructions, {cycles:,} cycles;"
            " times are those of the functional simulator"
        )


class GemminiModel(CompiledModel):
    """A compiled model whose integer layers run on the simulated accelerator."""

    def _made_executor(
        self, constants: Sequence[np.ndarray], objects: Mapping[str, bytes], threads: int | None
    ) -> Any:
        return GemminiExecutor(self.plan, constants, objects, threads)
