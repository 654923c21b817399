"""Jobs of the runner, a task or a launch of a kernel, and the requests to its processes for each."""

from __future__ import annotations

from tilewright.errors import MeasurementError, TilewrightError
from tilewright.measure.building import Build, BuildRequest, MakeValidation
from tilewright.measure.failed import Failed
from tilewright.measure.kernel_build import BuildKernel, MakeExpected
from tilewright.measure.kernel_job import Expected, KernelJob
from tilewright.measure.kernel_timer import LoadKernel
from tilewright.measure.shared_checks import SharedValidation
from tilewright.measure.timing import LoadTask
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config

Job = TaskJob | KernelJob

_TASK_SECONDS = 300.0  # the oracle is in no hurry
_KERNEL_SECONDS = 40.0  # the interpreter stops by itself; a kernel that hangs does not


def build_request(job: Job, config: Config, modules: tuple[str, ...]) -> BuildRequest | Failed:
    if isinstance(job, TaskJob):
        return Build(job, config, modules)
    try:
        return BuildKernel(job.spec, config, job.grid(config))
    except TilewrightError as error:  # the user's function of the grid
        return Failed("illegal", error.message)


def validation_request(job: Job, seed: int) -> tuple[BuildRequest, float]:
    """(what a builder is to make, seconds that it has)."""
    if isinstance(job, TaskJob):
        return MakeValidation(job, seed), _TASK_SECONDS
    return MakeExpected(job.spec), _KERNEL_SECONDS


def load_request(
    job: Job, expected: SharedValidation | Expected, cold: bool, device: int
) -> LoadTask | LoadKernel:
    if isinstance(job, TaskJob) and isinstance(expected, SharedValidation):
        return LoadTask(expected, job.described, job.numerics, job.threads, job.constants, cold, device)
    if isinstance(job, KernelJob) and isinstance(expected, Expected):
        return LoadKernel(job.spec, expected, device)
    raise MeasurementError("a job and what it must compute are of different kinds")


def described_failure(job: Job, failed: Failed, seed: int) -> str:
    """A message for people, with what is needed to reproduce the failure."""
    if failed.kind == "wrong" and isinstance(job, TaskJob):
        return f"{failed.message} (inputs of seed {seed})"
    return failed.message
