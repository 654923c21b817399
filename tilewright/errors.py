"""Every error a user can meet, one class per mistake, each with its remedy.

A `TilewrightError` is for the user to handle; an `InternalError` is a bug in Tilewright and asks for a report. A
message says what happened, where, and what to try.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.support.source import SourceLocation


class TilewrightError(Exception):
    """Base class of user errors: what went wrong, and what to try."""

    remedy: str = ""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        self.message = message
        self.remedy = type(self).remedy if remedy is None else remedy
        super().__init__(f"{message}\n  try: {self.remedy}" if self.remedy else message)


class TilewrightWarning(UserWarning):
    """A model, or a part of one, was not compiled and runs in PyTorch or NumPy instead."""


class DatabaseWarning(UserWarning):
    """The tuning database cannot be used normally; the message says what is done instead. No record is lost."""


class CostModelWarning(UserWarning):
    """A learned cost model cannot be used, and the analytical model goes on; or it predicts at assumed rates. The
    message says why."""


class InternalError(TilewrightError):
    """A broken invariant of the compiler: a bug in Tilewright, not a mistake of the user."""

    remedy = (
        "this is a bug in Tilewright; please report it with the model or the repro that the message names"
    )


# -- the model ----------------------------------------------------------------------------------------------------


class UnsupportedModelError(TilewrightError):
    """`compile` does not know this kind of model."""

    remedy = (
        "pass an nn.Module with example inputs, a torch.export.ExportedProgram, an onnx.ModelProto or the path of an"
        " .onnx file"
    )


class UnsupportedOpsError(TilewrightError):
    """The model uses operators that cannot be compiled. The message lists all of them, with the nodes that use them."""

    remedy = "replace these operators in the model, or compile the part of the model without them"

    def __init__(self, uses: Sequence[tuple[str, str]], *, remedy: str | None = None) -> None:
        """`uses`: (operator and reason, location in the model) for every unsupported node."""
        self.uses = tuple(uses)
        lines = "\n".join(f"  {op}: {location}" for op, location in self.uses)
        operators = len({op for op, _ in self.uses})
        message = f"{operators} unsupported operator(s), {len(self.uses)} use(s):\n{lines}"
        super().__init__(message, remedy=remedy)


class TrainingModeError(TilewrightError):
    """The module is in training mode, where dropout and batch norm compute something else than in inference."""

    remedy = "call model.eval() before compiling"


class MutationError(TilewrightError):
    """The model writes to its own buffers or its inputs; a compiled model is a pure function."""

    remedy = (
        "return the new value instead of writing it in place, or take the buffer as an input and an output"
    )


class ModelChangedError(TilewrightError):
    """The weights of a model with dynamic shapes changed, so its variants would have different weights."""

    remedy = "compile the model again, with its new weights"


class ExportError(TilewrightError):
    """torch.export could not trace the module."""

    remedy = "make torch.export.export(model, args) succeed; its message above names the line that it could not trace"


class ModelFileError(TilewrightError):
    """The model file is truncated or malformed, or its graph breaks the format's own rules."""

    remedy = "export the model again; onnx.checker.check_model(model, full_check=True) names what breaks the format"


class ModelSizeError(ModelFileError):
    """The model exceeds a limit: a tensor, a file or a number of nodes is too large."""

    remedy = "check the dimensions in the model, or raise the limit that the message names"


class ExternalDataError(ModelFileError):
    """External tensor data is refused: it is not a plain file in the model's own folder, or it is too short."""

    remedy = "keep the data files alongside the model, as onnx.save_model(..., save_as_external_data=True) writes them"


class UnknownShapeError(TilewrightError):
    """Input dimensions have only names; kernels need sizes."""

    remedy = "pass example inputs with these sizes: a tuple of arrays, or a dict by input name"


# -- the call -----------------------------------------------------------------------------------------------------


class InputError(TilewrightError):
    """The inputs of a call do not fit: which input, what was expected, what was passed."""

    remedy = "call the compiled model with inputs like the examples it was compiled with, or compile for these inputs"


class GradientError(TilewrightError):
    """An input requires gradients, which compiled models do not compute."""

    remedy = "call under torch.no_grad() or torch.inference_mode(), or detach the input"


# -- options and environment --------------------------------------------------------------------------------------


class OptionError(TilewrightError):
    """An option has an invalid value."""

    remedy = "see `tilewright doctor` for every option, its values and its default"


class TargetError(TilewrightError):
    """This machine or this build does not have the target."""

    remedy = 'use target="cpu", or leave it out'


class MixedDevicesError(TargetError):
    """The tensors of one model are on several devices."""

    remedy = 'move the model and its inputs to one device, as with model.to("cuda") and x.to("cuda")'


class DeviceError(TilewrightError):
    """The GPU driver refused a call, or there is no such GPU."""

    remedy = "see whether nvidia-smi shows the GPU, and whether another program has taken its memory"


class MissingDependencyError(TilewrightError):
    """An optional package is needed and not installed."""


class PoolError(TilewrightError):
    """A pool of machines cannot be used: it is not there, it refuses this process, or it lacks what is needed."""

    remedy = "look at `tilewright pool ls`, and start one: tilewright pool up"


class MeasurementError(TilewrightError):
    """Nothing can be measured here: no process could be started, or memory could not be shared with one."""

    remedy = (
        'free memory and disk space and check the limits on processes and files, or use effort="none", which measures'
        " nothing"
    )


class CodegenError(InternalError):
    """LLVM refused the generated code, or the object needs a symbol that is not allowed."""


# -- files --------------------------------------------------------------------------------------------------------


class ArtifactError(TilewrightError):
    """The file is not a valid artifact: truncated, corrupted, or something else altogether."""

    remedy = "save the model again with CompiledModel.save"


class ArtifactVersionError(ArtifactError):
    """The artifact has a format that this version cannot read."""

    remedy = "load it with the version of Tilewright that wrote it, or compile and save the model again"


class ArtifactMachineError(ArtifactError):
    """The artifact's object code needs processor features that this machine lacks."""

    remedy = "compile and save the model on a machine like this one"


class SignatureError(ArtifactError):
    """The artifact is not signed with a key that the caller trusts."""

    remedy = "get the file from whoever signs it, or pass the key that it was signed with; do not load it otherwise"


class SigningKeyError(TilewrightError):
    """The key can neither sign nor verify."""

    remedy = "pass 32 random bytes, a file that holds them, or an Ed25519 key as PEM text"


class CacheError(TilewrightError):
    """The cache folder cannot be used."""

    remedy = "set TILEWRIGHT_CACHE_DIR to a folder that you own and can write"


class LockError(TilewrightError):
    """A lock file cannot be read or written, or its choices do not give the kernels that it promises."""

    remedy = "remove the lock file, or name another: the choices of this build are then written there"


class DatabaseFileError(TilewrightError):
    """The file is not a tuning database or an export of one, or it cannot be read or written."""

    remedy = "name a tuning database, or a file that `tilewright db export` wrote"


class DatabaseVersionError(DatabaseFileError):
    """A newer version of Tilewright wrote the tuning database. It is left unchanged."""

    remedy = (
        "install that version, or set TILEWRIGHT_CACHE_DIR to another folder; `tilewright db export` of the newer"
        " version writes a file that `tilewright db import` of this one reads"
    )


class DatasetError(TilewrightError):
    """A data set of measured configs cannot be read, written or learned from."""

    remedy = "name files that `tilewright dataset collect` or `tilewright db export` wrote"


class WeightsError(TilewrightError):
    """The weights of a learned cost model are damaged, or of another version."""

    remedy = "install Tilewright again, or train weights of your own: tilewright dataset train"


class TextFormError(TilewrightError):
    """The text form of a graph cannot be parsed; the message names the line."""

    remedy = "text forms come from print_graph; see the grammar at the head of graph/text.py"


class VerificationError(InternalError):
    """A stage produced something illegal; the verifier says what and where."""


class ScheduleError(TilewrightError):
    """A schedule primitive is not legal here: which loop or stage, and why."""

    remedy = (
        "print the schedule to see its loops and stages; docs/05-schedules.md says what each primitive needs"
    )


class PipelineError(ScheduleError):
    """A buffer cannot be pipelined: which, and why."""

    remedy = "docs/pipelining.md says what a pipelined buffer needs"


class IntrinsicError(TilewrightError):
    """The declaration of an intrinsic is wrong, the machine lacks it, or LLVM cannot generate code for it."""

    remedy = (
        "correct the declaration that the message names, or take it out with"
        " tilewright.hw.intrinsics.unregister_intrinsic"
    )


class SketchError(TilewrightError):
    """A sketch rule is unusable, or it failed."""

    remedy = (
        "correct the rule that the message names, or take it out with tilewright.space.sketches.unregister"
    )


class SpaceError(TilewrightError):
    """A search space is empty: a knob has no values, or no combination of values is legal."""

    remedy = (
        "give each knob of the template or sketch rule a value that its constraints admit, or let the template decline"
        " the task"
    )


class TypeRuleError(TilewrightError):
    """An operator does not take these shapes, types or attributes."""

    remedy = "check the shapes and types at the node that the message names"


# -- co-design ----------------------------------------------------------------------------------------------------


class HardwareRangeError(TargetError):
    """The accelerator generator does not support a parameter's value: which parameter, and what it may be."""

    remedy = "choose a value in the range that the message gives"


class InstructionError(TilewrightError):
    """An accelerator's instruction does not exist, or the machine cannot execute it: which one, and why."""

    remedy = (
        "generate the program for the machine that runs it; the message names the instruction by its position"
    )


class LayerFitError(TilewrightError):
    """A layer, or a tile of one, does not fit into an accelerator's memories."""

    remedy = "make the tiles that the message names smaller, or give the accelerator a larger memory"


class DesignFileError(TilewrightError):
    """The file of an accelerator's design cannot be read, or holds no design."""

    remedy = "give the file that `tilewright codesign` writes with --parameters"


class RtlError(TilewrightError):
    """The RTL of an accelerator could not be built or run: what is missing, or what the tool says."""

    remedy = "install Verilator 5 or later and a C++ compiler; everything but the RTL works without them"


class MappingError(TilewrightError):
    """A mapping does not belong to its layer, or needs more than the hardware has."""

    remedy = "make the tiles that the message names smaller, or give the hardware a larger memory or PE array"


class MeasuredDataError(TilewrightError):
    """A file of measured mappings cannot be read: columns are missing, or a row makes no sense."""

    remedy = "the file must have the columns of DOSA's data sets; see the head of tilewright/codesign/data.py"


# -- tile kernels -------------------------------------------------------------------------------------------------


class KernelError(TilewrightError):
    """A mistake in a tile kernel or in its launch, shown at the user's own line."""

    def __init__(
        self, message: str, *, where: SourceLocation | None = None, remedy: str | None = None
    ) -> None:
        self.where = where
        self.problem = message
        super().__init__(message if where is None else f"{message}\n{where.excerpt()}", remedy=remedy)

    def at(self, where: SourceLocation | None) -> KernelError:
        """Return the same error at a source location; an error that has a location keeps it."""
        if self.where is not None or where is None:
            return self
        return type(self)(self.problem, where=where, remedy=self.remedy)


class KernelSyntaxError(KernelError):
    """The tile language does not have this Python construct."""

    remedy = "see the head of tilewright/tile/__init__.py for what a kernel may contain"


class KernelNameError(KernelError):
    """A name is not defined, or not on every path that leads to its use."""

    remedy = "define the name before it is used, or pass it as a parameter"


class KernelTypeError(KernelError):
    """An operation or function of the tile language does not take values of this type."""

    remedy = "convert the operand with .to(dtype), or pass the kind of value that the message names"


class KernelShapeError(KernelError):
    """The shapes of tiles are incompatible, or a tile cannot have this shape."""

    remedy = "add an axis with x[:, None] or x[None, :], or make the block sizes agree"


class DynamicShapeError(KernelError):
    """A tile shape is only known when the kernel runs."""

    remedy = "make the size a parameter annotated tl.constexpr, and mask what lies beyond the data"


class StaticAssertionError(KernelError):
    """A static assertion of the kernel is false for these parameters."""

    remedy = "pass parameters for which the assertion holds"


class KernelArgumentError(KernelError):
    """The grid or the arguments of a launch do not fit the kernel."""

    remedy = "give the grid in brackets, and a NumPy array, a CPU tensor or a number for each parameter"


class AcceleratorMatchError(KernelError):
    """A part of a tile kernel that no instruction of the accelerator computes, or that its memories cannot hold."""

    remedy = "run the kernel on the processor, without the option target"


class SharedMemoryError(KernelError):
    """The tiles of a kernel need more shared memory than a block of threads may have."""

    remedy = "use smaller blocks, fewer stages, or a narrower type for the operands of tl.dot"


class OutOfBoundsError(KernelError):
    """A load, store or atomic accessed an address outside every tensor that was passed."""

    remedy = "mask the access, as in tl.load(pointer, mask=offsets < n), or list the axis in boundary_check"


class UnwrittenReadError(KernelError):
    """In debug mode: the kernel read an element that the launch declares unwritten, before anything wrote it."""

    remedy = (
        "store the element first, or leave the tensor out of `unwritten` if it holds values at the launch"
    )


class RaceError(KernelError):
    """In debug mode: two program instances accessed one element, at least one wrote it, and not both with atomics."""

    remedy = "give each instance elements of its own, or combine with tl.atomic_add"


class DeviceAssertionError(KernelError):
    """In debug mode: an assertion on values of the kernel is false."""

    remedy = "the message names the program instance; tl.device_print shows its values"


class KernelSourceError(KernelError):
    """A kernel whose source cannot be sent to the process that measures it."""

    remedy = (
        "write the kernel in a file or a notebook cell, with numbers, strings, tuples and functions around it"
    )


class AutotuneError(TilewrightError):
    """A space, a key or a launch of a tuned kernel that does not fit it, or a space without a config that works."""

    remedy = "name constexpr parameters of the kernel as knobs and its other parameters as key"


class ReferenceMismatchError(KernelError):
    """A reference whose results differ from those of the kernel, whatever the config; shown where the reference is."""

    remedy = "check the reference and the kernel on small inputs: kernel.interpret runs it in NumPy"


class OperatorError(TilewrightError):
    """A `tilewright.op` cannot be registered, called or compiled as it is written."""

    remedy = "see help(tilewright.op) for what the function, the shape rule and the reference take"
