"""Tilewright: a tensor compiler. A PyTorch or ONNX model goes in, a compiled model comes out.

    fast = tilewright.compile(model, (x,))
    fast(x)
    fast.save("model.tw")
    tilewright.load("model.tw")

`help(tilewright.compile)` has the options. Every error that a user can meet is a `tilewright.TilewrightError`.

Names are imported when they are first used: `import tilewright` is cheap, and `load` needs no compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilewright.support.version import VERSION

if TYPE_CHECKING:
    from tilewright.advice.advise import advise
    from tilewright.driver import compile, compile_all
    from tilewright.errors import (
        ArtifactError,
        ArtifactMachineError,
        ArtifactVersionError,
        AutotuneError,
        CacheError,
        CodegenError,
        CostModelWarning,
        DatabaseFileError,
        DatabaseVersionError,
        DatabaseWarning,
        DatasetError,
        DesignFileError,
        DeviceAssertionError,
        DeviceError,
        DynamicShapeError,
        ExportError,
        ExternalDataError,
        GradientError,
        HardwareRangeError,
        InputError,
        InstructionError,
        InternalError,
        IntrinsicError,
        KernelArgumentError,
        KernelError,
        KernelNameError,
        KernelShapeError,
        KernelSourceError,
        KernelSyntaxError,
        KernelTypeError,
        LayerFitError,
        LockError,
        MappingError,
        MeasuredDataError,
        MeasurementError,
        MissingDependencyError,
        MixedDevicesError,
        ModelChangedError,
        ModelFileError,
        ModelSizeError,
        MutationError,
        OperatorError,
        OptionError,
        OutOfBoundsError,
        PipelineError,
        PoolError,
        RaceError,
        ReferenceMismatchError,
        RtlError,
        ScheduleError,
        SharedMemoryError,
        SignatureError,
        SigningKeyError,
        SketchError,
        SpaceError,
        StaticAssertionError,
        TargetError,
        TextFormError,
        TilewrightError,
        TilewrightWarning,
        TrainingModeError,
        TypeRuleError,
        UnknownShapeError,
        UnsupportedModelError,
        UnsupportedOpsError,
        UnwrittenReadError,
        VerificationError,
        WeightsError,
    )
    from tilewright.integrations.many_devices import compile_for_devices
    from tilewright.integrations.operators import op
    from tilewright.measure.pool.connection import Pool
    from tilewright.runtime.artifact import load
    from tilewright.runtime.dispatch import Policy
    from tilewright.runtime.dynamic import DynamicModel
    from tilewright.runtime.model import CompiledModel
    from tilewright.tile.kernel import kernel
    from tilewright.tune.autotune import autotune
    from tilewright.tune.triton_kernels import tune_triton

__version__ = VERSION

__all__ = [
    "AcceleratorMatchError",
    "ArtifactError",
    "ArtifactMachineError",
    "ArtifactVersionError",
    "AutotuneError",
    "CacheError",
    "CodegenError",
    "CompiledModel",
    "CostModelWarning",
    "DatabaseFileError",
    "DatabaseVersionError",
    "DatabaseWarning",
    "DatasetError",
    "DesignFileError",
    "DeviceAssertionError",
    "DeviceError",
    "DynamicModel",
    "DynamicShapeError",
    "ExportError",
    "ExternalDataError",
    "GradientError",
    "HardwareRangeError",
    "InputError",
    "InstructionError",
    "InternalError",
    "IntrinsicError",
    "KernelArgumentError",
    "KernelError",
    "KernelNameError",
    "KernelShapeError",
    "KernelSourceError",
    "KernelSyntaxError",
    "KernelTypeError",
    "LayerFitError",
    "LockError",
    "MappingError",
    "MeasuredDataError",
    "MeasurementError",
    "MissingDependencyError",
    "MixedDevicesError",
    "ModelChangedError",
    "ModelFileError",
    "ModelSizeError",
    "MutationError",
    "OperatorError",
    "OptionError",
    "OutOfBoundsError",
    "PipelineError",
    "Policy",
    "Pool",
    "PoolError",
    "RaceError",
    "ReferenceMismatchError",
    "RtlError",
    "ScheduleError",
    "SharedMemoryError",
    "SignatureError",
    "SigningKeyError",
    "SketchError",
    "SpaceError",
    "StaticAssertionError",
    "TargetError",
    "TextFormError",
    "TilewrightError",
    "TilewrightWarning",
    "TrainingModeError",
    "TypeRuleError",
    "UnknownShapeError",
    "UnsupportedModelError",
    "UnsupportedOpsError",
    "UnwrittenReadError",
    "VerificationError",
    "WeightsError",
    "__version__",
    "advise",
    "autotune",
    "compile",
    "compile_all",
    "compile_for_devices",
    "kernel",
    "load",
    "op",
    "tune_triton",
]

# The module that defines each public name; names that are not listed are errors.
_HOMES = {
    "advise": "tilewright.advice.advise",
    "compile": "tilewright.driver",
    "compile_all": "tilewright.driver",
    "load": "tilewright.runtime.artifact",
    "CompiledModel": "tilewright.runtime.model",
    "DynamicModel": "tilewright.runtime.dynamic",
    "Policy": "tilewright.runtime.dispatch",
    "Pool": "tilewright.measure.pool.connection",
    "compile_for_devices": "tilewright.integrations.many_devices",
    "kernel": "tilewright.tile.kernel",
    "autotune": "tilewright.tune.autotune",
    "op": "tilewright.integrations.operators",
    "tune_triton": "tilewright.tune.triton_kernels",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "tilewright.errors")), name)


def __dir__() -> list[str]:
    return __all__
