"""The build process: turns configs of tasks and of kernels into object code, and tasks into validation inputs.

If a template or LLVM crashes it, one candidate is lost: it may be killed at any time, and there are several.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import time
from collections import OrderedDict

import msgspec

from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.generator import generator
from tilewright.errors import KernelError, ScheduleError, SketchError, SpaceError, VerificationError
from tilewright.measure.failed import Failed
from tilewright.measure.kernel_build import (
    BuildKernel,
    Launch,
    MakeExpected,
    built_kernel,
    launch_of,
    make_expected,
)
from tilewright.measure.kernel_job import BuiltKernel, Expected, KernelSpec
from tilewright.measure.shared_checks import SharedValidation, share_validation
from tilewright.measure.single import Built
from tilewright.measure.trial import TaskJob
from tilewright.measure.validation import make_validation
from tilewright.runtime.plan import VendorCall
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.support.process import Channel

_KEPT_JOBS = 16
_COLLECTED = 8  # builds between garbage collections: collecting continuously would take a tenth of the time
# The config is at fault, not the generated code.
_ILLEGAL = (SpaceError, ScheduleError, SketchError, VerificationError, KernelError)


class Build(msgspec.Struct, frozen=True, tag=True):
    """Build the object code of a config. `modules`, which register templates or rules, are imported first."""

    job: TaskJob
    config: Config
    modules: tuple[str, ...] = ()


class MakeValidation(msgspec.Struct, frozen=True, tag=True):
    """Write a task's validation into the file whose descriptor comes with this message."""

    job: TaskJob
    seed: int


class Made(msgspec.Struct, frozen=True, tag=True):
    """Object code, and the seconds that the build took."""

    built: Built | BuiltKernel
    seconds: float


class ValidationMade(msgspec.Struct, frozen=True, tag=True):
    validation: SharedValidation | Expected


BuildRequest = Build | MakeValidation | BuildKernel | MakeExpected
BuildReply = Made | ValidationMade | Failed


def serve(channel: Channel) -> None:
    builder = BuildServer()
    decoder = msgspec.msgpack.Decoder(BuildRequest)
    gc.disable()
    gc.freeze()
    for number in itertools.count(1):
        message, descriptors = channel.receive()
        if number % _COLLECTED == 0:
            gc.collect()
        reply = builder.answer(decoder.decode(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(msgspec.msgpack.encode(reply))


class BuildServer:
    """Answers requests in sequence, and caches the candidates of its tasks."""

    def __init__(self) -> None:
        self._candidates: OrderedDict[TaskJob, Candidates] = OrderedDict()
        self._launch: tuple[KernelSpec, Launch] | None = None
        self._modules: dict[str, str] = {}  # imported modules, and why they could not be

    def answer(self, request: BuildRequest, descriptors: list[int]) -> BuildReply:
        try:
            if isinstance(request, MakeValidation):
                return _validation_made(request, descriptors[0])
            if isinstance(request, MakeExpected):
                launch = self._launch_of(request.spec)
                return ValidationMade(make_expected(request.spec, launch, descriptors[0]))
            return self._made(request) if isinstance(request, Build) else self._made_kernel(request)
        except MemoryError:
            return Failed("memory", "it ran out of memory")
        except OSError as error:
            return Failed("build" if isinstance(request, Build | BuildKernel) else "disk", str(error))
        except Exception as error:  # from a template or the code generator: the candidate's result
            kind = "illegal" if isinstance(error, _ILLEGAL) else "build"
            return Failed(kind, f"{type(error).__name__}: {error}")

    def _made(self, request: Build) -> Made:
        begin = time.perf_counter()
        missing = [why for module in request.modules if (why := self._not_imported(module))]
        candidates = self._of(request.job)
        if not candidates.is_legal(request.config):
            words = f"{request.config} is not a config of {candidates.work.task.label}"
            raise SpaceError("; ".join([words, *missing]))
        implementation = candidates.implementation(request.config)
        machine = request.job.machine
        cache = ObjectCache.default() if generator(machine.kind).KEEPS_TRIALS else None
        built = Built.of(implementation, machine, request.job.numerics, cache)
        for part in implementation.parts:
            if not isinstance(part.body, VendorCall):
                generator(machine.kind).check_trial(part.body, machine, request.job.numerics, cache)
        return Made(built, time.perf_counter() - begin)

    def _not_imported(self, module: str) -> str:
        """Why a module that registers extensions cannot be imported; "" if it can. Configs of others are built."""
        if module not in self._modules:
            self._modules[module] = ""
            try:
                importlib.import_module(module)
            except Exception as error:
                words = f"the module {module!r}, which registers extensions, cannot be imported here"
                self._modules[module] = f"{words}: {type(error).__name__}: {error}"
        return self._modules[module]

    def _made_kernel(self, request: BuildKernel) -> Made:
        begin = time.perf_counter()
        built = built_kernel(request, self._launch_of(request.spec))
        return Made(built, time.perf_counter() - begin)

    def _launch_of(self, spec: KernelSpec) -> Launch:
        if self._launch is None or self._launch[0] != spec:
            self._launch = spec, launch_of(spec)
        return self._launch[1]

    def _of(self, job: TaskJob) -> Candidates:
        if job not in self._candidates:
            self._candidates[job] = Candidates.of(job.work())
            while len(self._candidates) > _KEPT_JOBS:
                self._candidates.popitem(last=False)
        self._candidates.move_to_end(job)
        return self._candidates[job]


def _validation_made(request: MakeValidation, descriptor: int) -> ValidationMade:
    job = request.job
    validation = make_validation(job.work().task, job.numerics, request.seed)
    return ValidationMade(share_validation(validation, descriptor))
