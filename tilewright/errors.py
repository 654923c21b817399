"""Every error a user can meet, one class per mistake, each with its remedy.

`TilewrightError` is the user's to handle; `InternalError` is our bug and asks for a report. A message says what
happened, where, and what to try.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.support.source import SourceLocation


class TilewrightError(Exception):
    """What went wrong, and what to try."""

    remedy: str = ""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        self.message = message
        self.remedy = type(self).remedy if remedy is None else remedy
        super().__init__(f"{message}\n  try: {self.remedy}" if self.remedy else message)


class TilewrightWarning(UserWarning):
    """A model, or a part of one, was not compiled and runs in PyTorch or NumPy instead."""


class DatabaseWarning(UserWarning):
    """The tuning database cannot be used normally; the message says what is done instead. No record is lost."""


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
    """The model uses operators that cannot be compiled: all of them, with the nodes that use them."""

    remedy = "replace these operators in the model, or compile the part of the model without them"

    def __init__(self, uses: Sequence[tuple[str, str]], *, remedy: str | None = None) -> None:
        """`uses`: (operator with the reason, place in the model) for every node that is not supported."""
        self.uses = tuple(uses)
        lines = "\n".join(f"  {op}: {location}" for op, location in self.uses)
        operators = len({op for op, _ in self.uses})
        message = f"{operators} unsupported operator(s), {len(self.uses)} use(s):\n{lines}"
        super().__init__(message, remedy=remedy)


class TrainingModeError(TilewrightError):
    """A module in training mode: dropout and batch norm would not be what the user means."""

    remedy = "call model.eval() before compiling"


class MutationError(TilewrightError):
    """The model changes its own buffers or its inputs; a compiled model is a pure function."""

    remedy = (
        "return the new value instead of writing it in place, or take the buffer as an input and an output"
    )


class ModelChangedError(TilewrightError):
    """A model for changing shapes whose weights were written to: its variants would not be of one model."""

    remedy = "compile the model again, with its new weights"


class ExportError(TilewrightError):
    """torch.export could not trace the module."""

    remedy = "make torch.export.export(model, args) succeed; its message above names the line that it could not trace"


class ModelFileError(TilewrightError):
    """A model that is not sound: a truncated or malformed file, a graph that breaks the format's own rules."""

    remedy = "export the model again; onnx.checker.check_model(model, full_check=True) names what breaks the format"


class ModelSizeError(ModelFileError):
    """A model that asks for more than a limit allows: a tensor, a file, a number of nodes."""

    remedy = "check the dimensions in the model, or raise the limit that the message names"


class ExternalDataError(ModelFileError):
    """Tensor data outside the model file that is refused: not a plain file inside the model's own folder, or not all
    of the bytes that the model wants."""

    remedy = "keep the data files alongside the model, as onnx.save_model(..., save_as_external_data=True) writes them"


class UnknownShapeError(TilewrightError):
    """Input dimensions that are only names; kernels are made for sizes."""

    remedy = "pass example inputs with these sizes: a tuple of arrays, or a dict by input name"


# -- the call -----------------------------------------------------------------------------------------------------


class InputError(TilewrightError):
    """A call with inputs that do not fit: which input, what was expected, what came."""

    remedy = "call the compiled model with inputs like the examples it was compiled with, or compile for these inputs"


class GradientError(TilewrightError):
    """An input asks for gradients; compiled models compute none."""

    remedy = "call under torch.no_grad() or torch.inference_mode(), or detach the input"


# -- options and environment --------------------------------------------------------------------------------------


class OptionError(TilewrightError):
    """An option with a value that it cannot have."""

    remedy = "see `tilewright doctor` for every option, its values and its default"


class TargetError(TilewrightError):
    """A target that this machine or this build does not have."""

    remedy = 'use target="cpu", or leave it out'


class MixedDevicesError(TargetError):
    """Tensors of one model on several devices."""

    remedy = 'move the model and its inputs to one device, as with model.to("cuda") and x.to("cuda")'


class DeviceError(TilewrightError):
    """The driver of a GPU refused something, or there is no such GPU."""

    remedy = "see whether nvidia-smi shows the GPU, and whether another program has taken its memory"


class MissingDependencyError(TilewrightError):
    """An optional package is needed and not installed."""


class MeasurementError(TilewrightError):
    """Nothing can be measured here: no process could be started, or no memory could be shared with one."""

    remedy = (
        'free memory and disk space and check the limits on processes and files, or use effort="none", which measures'
        " nothing"
    )


class CodegenError(InternalError):
    """LLVM refused the generated code, or the object needs a symbol that it may not have."""


# -- files --------------------------------------------------------------------------------------------------------


class ArtifactError(TilewrightError):
    """A file that is not a sound artifact: truncated, corrupted, or not one at all."""

    remedy = "save the model again with CompiledModel.save"


class ArtifactVersionError(ArtifactError):
    """An artifact of a format that this version cannot read."""

    remedy = "load it with the version of Tilewright that wrote it, or compile and save the model again"


class ArtifactMachineError(ArtifactError):
    """An artifact whose object code needs processor features that this machine lacks."""

    remedy = "compile and save the model on a machine like this one"


class SignatureError(ArtifactError):
    """An artifact that is not signed with a key that the caller trusts."""

    remedy = "get the file from whoever signs it, or pass the key that it was signed with; do not load it otherwise"


class SigningKeyError(TilewrightError):
    """A key that can neither sign nor verify."""

    remedy = "pass 32 random bytes, a file that holds them, or an Ed25519 key as PEM text"


class CacheError(TilewrightError):
    """The cache folder cannot be used."""

    remedy = "set TILEWRIGHT_CACHE_DIR to a folder that you own and can write"


class LockError(TilewrightError):
    """A lock file that cannot be read or written, or whose choices do not give the kernels that it promises."""

    remedy = "remove the lock file, or name another: the choices of this build are then written there"


class DatabaseFileError(TilewrightError):
    """A file that is no tuning database and no export of one, or cannot be read or written."""

    remedy = "name a tuning database, or a file that `tilewright db export` wrote"


class DatabaseVersionError(DatabaseFileError):
    """A tuning database that a newer version of Tilewright has written. It is left as it is."""

    remedy = (
        "install that version, or set TILEWRIGHT_CACHE_DIR to another folder; `tilewright db export` of the newer"
        " version writes a file that `tilewright db import` of this one reads"
    )


class TextFormError(TilewrightError):
    """A text form of a graph that cannot be parsed, with the line."""

    remedy = "text forms come from print_graph; see the grammar at the head of graph/text.py"


class VerificationError(InternalError):
    """A stage produced something illegal; the verifier says what and where."""


class ScheduleError(TilewrightError):
    """A schedule primitive applied where it may not be: which loop or stage, and why."""

    remedy = (
        "print the schedule to see its loops and stages; docs/05-schedules.md says what each primitive needs"
    )


class IntrinsicError(TilewrightError):
    """An intrinsic that is declared wrongly, that the machine does not have, or that LLVM cannot make code of."""

    remedy = (
        "correct the declaration that the message names, or take it out with"
        " tilewright.hw.intrinsics.unregister_intrinsic"
    )


class SketchError(TilewrightError):
    """A sketch rule that cannot be used, or that failed."""

    remedy = (
        "correct the rule that the message names, or take it out with tilewright.space.sketches.unregister"
    )


class SpaceError(TilewrightError):
    """A space of configs without any: a knob with nothing to choose from, or no values that are legal together."""

    remedy = (
        "give each knob of the template or sketch rule a value that its constraints admit, or let the template decline"
        " the task"
    )


class TypeRuleError(TilewrightError):
    """An operator applied to shapes, types or attributes that it does not take."""

    remedy = "check the shapes and types at the node that the message names"


# -- co-design ----------------------------------------------------------------------------------------------------


class HardwareRangeError(TargetError):
    """An accelerator that its generator cannot make: which parameter, and what it may be."""

    remedy = "choose a value in the range that the message gives"


class InstructionError(TilewrightError):
    """An accelerator's instruction that does not exist, or that the machine cannot execute: which one, and why."""

    remedy = (
        "generate the program for the machine that runs it; the message names the instruction by its position"
    )


class LayerFitError(TilewrightError):
    """A layer, or a tile of one, that an accelerator's memories cannot hold."""

    remedy = "make the tiles that the message names smaller, or give the accelerator a larger memory"


class RtlError(TilewrightError):
    """The RTL of an accelerator could not be built or run: what is missing, or what the tool says."""

    remedy = "install Verilator 5 or later and a C++ compiler; everything but the RTL works without them"


class MappingError(TilewrightError):
    """A mapping that is not one of its layer, or that needs more than the hardware has."""

    remedy = "make the tiles that the message names smaller, or give the hardware a larger memory or PE array"


class MeasuredDataError(TilewrightError):
    """A file of measured mappings that cannot be read: missing columns, or a row that makes no sense."""

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
        """The same mistake at a place in the source; as it is where it has one already."""
        if self.where is not None or where is None:
            return self
        return type(self)(self.problem, where=where, remedy=self.remedy)


class KernelSyntaxError(KernelError):
    """A Python construct that the tile language does not have."""

    remedy = "see the head of tilewright/tile/__init__.py for what a kernel may contain"


class KernelNameError(KernelError):
    """A name that is defined nowhere, or not on every way that leads to its use."""

    remedy = "define the name before it is used, or pass it as a parameter"


class KernelTypeError(KernelError):
    """An operation or a function of the tile language on values of a type that it does not take."""

    remedy = "convert the operand with .to(dtype), or pass the kind of value that the message names"


class KernelShapeError(KernelError):
    """Tiles whose shapes do not go together, or a shape that a tile cannot have."""

    remedy = "add an axis with x[:, None] or x[None, :], or make the block sizes agree"


class DynamicShapeError(KernelError):
    """A tile shape that is only known when the kernel runs."""

    remedy = "make the size a parameter annotated tl.constexpr, and mask what lies beyond the data"


class StaticAssertionError(KernelError):
    """A static assertion of the kernel that is false for these parameters."""

    remedy = "pass parameters for which the assertion holds"


class KernelArgumentError(KernelError):
    """A launch whose grid or arguments do not fit the kernel."""

    remedy = "give the grid in brackets, and a NumPy array, a CPU tensor or a number for each parameter"


class OutOfBoundsError(KernelError):
    """A load, store or atomic at an address outside of every tensor that was passed."""

    remedy = "mask the access, as in tl.load(pointer, mask=offsets < n), or list the axis in boundary_check"


class UnwrittenReadError(KernelError):
    """In debug mode: a read of an element that the launch declares unwritten, before anything wrote it."""

    remedy = (
        "store the element first, or leave the tensor out of `unwritten` if it holds values at the launch"
    )


class RaceError(KernelError):
    """In debug mode: two program instances access one element, at least one writes it, and not both by atomics."""

    remedy = "give each instance elements of its own, or combine with tl.atomic_add"


class DeviceAssertionError(KernelError):
    """In debug mode: an assertion on values of the kernel that is false."""

    remedy = "the message names the program instance; tl.device_print shows its values"
