"""`tilewright.op`: tile kernels as an operator of PyTorch, which every compiler there is can call and this one inlines.

eager                           allocate the result by the shape rule, run the user's function, which launches
torch.compile, torch.export     an operator of `torch.library`, with the shape rule as its fake implementation
tilewright.compile              a converter: the launch is recorded and becomes a `tile_kernel` of the graph, whose
                                meaning is the reference, imported as a graph of its own
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import (
    MissingDependencyError,
    OperatorError,
    ReferenceMismatchError,
    TilewrightError,
)
from tilewright.frontend import import_model
from tilewright.frontend.builder import Unsupported
from tilewright.frontend.torch.registry import register_converter
from tilewright.graph.ir import Node, TensorType
from tilewright.graph.text import INLINE_LIMIT, print_graph
from tilewright.graph.tile_operator import NAME as TILE_KERNEL
from tilewright.measure.kernel_job import difference
from tilewright.rewrites.decompose import Decompose
from tilewright.space.space import Value
from tilewright.space.tile_operator import (
    GPU_OPTIONS,
    TileArgument,
    TileOperator,
    TileVariant,
    gpu_options_of,
)
from tilewright.support.bundle import bundle_of, constant_reference
from tilewright.support.source import location_of
from tilewright.tile.frontend.builder import is_number, literal_type
from tilewright.tile.frontend.source import constexpr_key
from tilewright.tile.kernel import Kernel
from tilewright.tile.passes.written import written_params
from tilewright.tile.recording import Placeholder, RecordedLaunch, recorded
from tilewright.tune.autotune import Autotuned
from tilewright.tune.launches import CPU_OPTIONS, Shaped

_NUMBERS = {int: "int", float: "float", bool: "bool", str: "str"}
_MAX_VARIANTS = 512  # configs of a tuned kernel that a model's task can have
_RESULT = "out"


def op(
    name: str,
    *,
    shape: Callable[..., Any],
    reference: Callable[..., Any],
    tolerance: float | None = None,
) -> Callable[[Callable[..., None]], Operator]:
    """Register a function that launches tile kernels as an operator of PyTorch and of compiled models.

        @tilewright.op("mylib::axpy", shape=lambda x, y, alpha: x, reference=lambda x, y, alpha: alpha * x + y)
        def axpy(x, y, alpha: float, out):
            n = x.numel()
            axpy_kernel[(tl.cdiv(n, 1024),)](x, y, out, n, alpha, BLOCK=1024)

        axpy(x, y, 2.0)                          # eager, with tensors or NumPy arrays
        torch.compile(model)                     # any backend: it is an operator of torch.library
        tilewright.compile(model, (x,))          # one kernel of the plan; saved in the artifact, named in explain

    - `name`: "namespace::operator".
    - The function takes the operator's arguments, and the result as its last parameter, `out`. Tensors come without an
      annotation, numbers with one (`alpha: float`). All tensors are dense. It launches kernels and returns nothing.
    - `shape`: a function of the arguments that returns the result's shape; or (shape, dtype); or a tensor among the
      arguments, whose shape and type the result has.
    - `reference`: a function of the arguments in PyTorch that says what the operator computes. It is what compiled
      models are checked against, and what runs on targets that cannot run the kernel.
    - `tolerance`: relative, of the kernel against the reference; None: by the type of the elements.

    A compiled model takes operators that launch one kernel, which only stores to `out`. On a GPU the kernel has the
    options `warps` and `stages` of that launch; the number of threads is the model's. When a model is compiled, the
    kernel is compared with the reference once: ReferenceMismatchError where they differ. No gradients are defined.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*::[A-Za-z_]\w*", name):
        raise OperatorError(f"an operator's name must be namespace::operator, got {name!r}")

    def decorate(function: Callable[..., None]) -> Operator:
        return Operator(name, function, shape, reference, tolerance)

    return decorate


class Operator:
    """An operator that launches tile kernels: called like the function, without `out`."""

    def __init__(
        self,
        name: str,
        function: Callable[..., None],
        shape: Callable[..., Any],
        reference: Callable[..., Any],
        tolerance: float | None,
    ) -> None:
        self.name, self.function, self.shape, self.reference = name, function, shape, reference
        self.tolerance = tolerance
        self.__name__, self.__doc__ = name, function.__doc__
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or parameters[-1].name != _RESULT:
            raise OperatorError(
                f"the last parameter of {function.__name__} must be `{_RESULT}`, the result that it stores to"
            )
        self.parameters = parameters[:-1]
        for rule, what in ((shape, "shape rule"), (reference, "reference")):
            _check_takes(rule, [each.name for each in self.parameters], f"the {what} of {name}")
        self._checked: set[Any] = set()
        self._torch = self._registered()

    def __repr__(self) -> str:
        return f"<tilewright operator {self.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        arrays = [value for value in (*args, *kwargs.values()) if isinstance(value, np.ndarray)]
        if not arrays:
            return self._torch(*args, **kwargs)
        result = self._torch(
            *(_as_tensor(value) for value in args),
            **{name: _as_tensor(value) for name, value in kwargs.items()},
        )
        assert isinstance(result, torch.Tensor)
        return result.numpy()

    # -- PyTorch ------------------------------------------------------------------------------------------------------

    def _registered(self) -> Any:
        try:
            import torch
        except ImportError:
            raise MissingDependencyError(
                "PyTorch is not installed, and operators are registered there",
                remedy="pip install 'tilewright[torch]'",
            ) from None

        def implementation(*args: Any) -> torch.Tensor:
            every = self._every(args)
            dense = [value.contiguous() if isinstance(value, torch.Tensor) else value for value in every]
            out = self._empty(dense)
            self.function(*dense, out)
            return out

        def fake(*args: Any) -> torch.Tensor:
            return self._empty(self._every(args))

        found = torch.library.custom_op(self.name, implementation, mutates_args=(), schema=self._schema())
        found.register_fake(fake)
        register_converter(f"{self.name.replace('::', '.')}.default", self._convert)
        return found

    def _every(self, args: Sequence[Any]) -> list[Any]:
        """The arguments, with defaults for missing ones."""
        return [*args, *(each.default for each in self.parameters[len(args) :])]

    def _schema(self) -> str:
        shown = []
        for each in self.parameters:
            kind = each.annotation
            kind = (
                {known.__name__: known for known in _NUMBERS}.get(kind, kind)
                if isinstance(kind, str)
                else kind
            )
            if each.kind not in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD):
                raise OperatorError(f"parameter `{each.name}` of {self.name} must be positional")
            text = f"{_NUMBERS.get(kind, 'Tensor')} {each.name}"
            if each.default is not each.empty:
                text += f"={each.default!r}"
            shown.append(text)
        if not any(each.startswith("Tensor") for each in shown):
            raise OperatorError(f"{self.name} takes no tensor", remedy="leave tensors without an annotation")
        return f"({', '.join(shown)}) -> Tensor"

    def _empty(self, args: Sequence[Any]) -> Any:
        """The result without values, on the device of the arguments."""
        import torch

        first = next(value for value in args if isinstance(value, torch.Tensor))
        found = self.shape(*args)
        if isinstance(found, torch.Tensor):
            return torch.empty(found.shape, dtype=found.dtype, device=found.device)
        dtype = first.dtype
        if isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[1], torch.dtype):
            found, dtype = found
        try:
            return torch.empty(tuple(found), dtype=dtype, device=first.device)
        except TypeError:
            raise OperatorError(
                f"the shape rule of {self.name} must return a shape, (shape, dtype) or a tensor, got {found!r}"
            ) from None

    # -- checking -----------------------------------------------------------------------------------------------------

    def check(self, *args: Any) -> float:
        """Compare the kernel with the reference on these arguments: the largest error, in units of what is allowed.
        ReferenceMismatchError where it is more than that."""

        given = self._every([_as_tensor(value) for value in args])
        return self._compare(given, self._torch(*given))

    def _check_recorded(self, given: Sequence[Any]) -> None:
        """`check` of what a model takes, on a processor: the launch without its options."""
        got = self._empty(given)
        with recorded() as launches:
            self.function(*given, got)
        for launch in launches:
            launch.replay()
        self._compare(given, got)

    def _compare(self, given: Sequence[Any], got: Any) -> float:
        import torch

        want = self.reference(*given)
        if not isinstance(want, torch.Tensor):
            raise ReferenceMismatchError(
                f"the reference of {self.name} returns a {type(want).__name__}, not a tensor",
                where=location_of(self.reference),
            )
        if want.shape != got.shape or want.dtype != got.dtype:
            raise ReferenceMismatchError(
                f"the reference of {self.name} returns {want.dtype} {list(want.shape)}, and the shape rule says"
                f" {got.dtype} {list(got.shape)}",
                where=location_of(self.reference),
            )
        error, wrong = difference(_array(got), _array(want), None, self._allowed(got.dtype))
        if wrong:
            raise ReferenceMismatchError(
                f"{self.name}: the kernel and its reference disagree: {wrong}",
                where=location_of(self.reference),
            )
        return error

    def _allowed(self, dtype: Any) -> float | None:
        if self.tolerance is not None:
            return self.tolerance
        return {"torch.bfloat16": 5e-2, "torch.float16": 1e-2}.get(str(dtype))

    # -- compiled models ----------------------------------------------------------------------------------------------

    def _convert(self, ctx: Any, *args: Any, **kwargs: Any) -> Node:
        """The converter of the frontend: tensors come as nodes."""
        bound = inspect.signature(self._of_arguments).bind(*args, **kwargs)
        bound.apply_defaults()
        values = list(bound.args)
        nodes = [value for value in values if isinstance(value, Node)]
        types = tuple(node.type for node in nodes)
        numbers = tuple(None if isinstance(value, Node) else value for value in values)
        try:
            kernel, reference = self._described(types, numbers, ctx.type)
        except OperatorError as error:
            raise Unsupported(error.message) from None
        node: Node = ctx.emit(TILE_KERNEL, *nodes, operator=self.name, kernel=kernel, reference=reference)
        return node

    @property
    def _of_arguments(self) -> Callable[..., Any]:
        def arguments(*args: Any) -> None: ...

        arguments.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [each.replace(annotation=inspect.Parameter.empty) for each in self.parameters]
        )
        return arguments

    def _described(
        self, types: tuple[TensorType, ...], numbers: tuple[Any, ...], result: TensorType
    ) -> tuple[str, str]:
        """(the launch, the reference) as text. Raises OperatorError if this operator cannot be part of a model."""
        kernel = self._launch_text(types, numbers, result)
        reference = self._reference_text(types, numbers, result)
        key = types, constexpr_key(numbers)
        if key not in self._checked:
            self._check_recorded(_examples(types, numbers))
            self._checked.add(key)
        return kernel, reference

    def _launch_text(
        self, types: tuple[TensorType, ...], numbers: tuple[Any, ...], result: TensorType
    ) -> str:
        left = iter(enumerate(types))
        arguments: list[Any] = []
        for each, number in zip(self.parameters, numbers, strict=True):
            arguments.append(number if number is not None else _placeholder(each.name, *next(left)))
        with recorded() as launches:
            try:
                self.function(*arguments, _placeholder(_RESULT, len(types), result))
            except TilewrightError:
                raise
            except Exception as error:
                raise OperatorError(
                    f"{self.name} cannot be recorded: {type(error).__name__}: {error}",
                    remedy="use only shapes and numbers of its arguments outside of kernels",
                ) from error
        if len(launches) != 1:
            raise OperatorError(
                f"{self.name} launches {len(launches)} kernels, and a model's operator launches one"
            )
        return _launch_of(self.name, launches[0], len(types)).text()

    def _reference_text(
        self, types: tuple[TensorType, ...], numbers: tuple[Any, ...], result: TensorType
    ) -> str:
        found = _imported_reference(self.reference, types, numbers)
        (output,) = found.outputs
        if output.type != result:
            raise ReferenceMismatchError(
                f"the reference of {self.name} returns {output.type!r}, and the shape rule says {result!r}",
                where=location_of(self.reference),
            )
        graph = Decompose().run(found)
        for node in graph.nodes():
            if node.is_constant and node.type.size > INLINE_LIMIT:
                raise OperatorError(
                    f"the reference of {self.name} has a constant of {node.type.size} elements",
                    remedy="pass it as an argument of the operator",
                )
        return print_graph(graph, names=False)


def _imported_reference(
    reference: Callable[..., Any], types: tuple[TensorType, ...], numbers: tuple[Any, ...]
) -> Any:
    import torch

    class Reference(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            left = iter(tensors)
            return reference(*(next(left) if number is None else number for number in numbers))

    tensors = [each for each in _examples(types, numbers) if isinstance(each, torch.Tensor)]
    graph = import_model(Reference().eval(), tuple(tensors)).graph
    if len(graph.outputs) != 1:
        raise ReferenceMismatchError(
            f"a reference returns {len(graph.outputs)} tensors instead of one", where=location_of(reference)
        )
    return graph


def _launch_of(name: str, launch: RecordedLaunch, inputs: int) -> TileOperator:
    kernel: Kernel = launch.kernel.kernel if launch.is_tuned else launch.kernel
    arguments, constants = [], []
    types: dict[str, Any] = {}
    for parameter in kernel.source.parameters:
        if parameter.name not in launch.bound:
            continue  # a knob
        value = launch.bound[parameter.name]
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, Placeholder):
            arguments.append(TileArgument(parameter.name, value.element.short, operand=value.operand))
        elif not parameter.is_constexpr and is_number(value):
            arguments.append(TileArgument(parameter.name, literal_type(value).short, number=repr(value)))
        elif parameter.is_constexpr or value is None or isinstance(value, str | DType):
            constants.append((parameter.name, constant_reference(value, f"`{parameter.name}`")))
        else:
            raise OperatorError(
                f"{name} passes a {type(value).__name__} as `{parameter.name}` of {kernel.source.name}",
                remedy=f"a launch takes the operator's tensors, `{_RESULT}` and numbers",
            )
    variants = _variants(launch, kernel)
    if not variants or any(0 in each.grid for each in variants):
        raise OperatorError(f"{name} launches {kernel.source.name} on an empty grid")
    options = _options(name, launch.options)
    found = TileOperator(bundle_of(kernel.function), tuple(arguments), tuple(constants), variants, options)
    types = {each.name: each for each in arguments}
    stored = {
        types[each].operand
        for each in _written(kernel, found)
        if each in types and types[each].operand is not None
    }
    if stored - {inputs}:
        raise OperatorError(
            f"{name}: {kernel.source.name} stores to an argument of the operator, not only to `out`"
        )
    return found


def _written(kernel: Kernel, operator: TileOperator) -> set[str]:
    from tilewright.space.tile_operator import element_of
    from tilewright.support.bundle import value_of
    from tilewright.tile.ir import TileType

    constants = {name: value_of(reference) for name, reference in operator.constants}
    types = {each.name: TileType(element_of(each)) for each in operator.arguments}
    knobs = {name: value for name, value in operator.variants[0].values if name not in gpu_options_of(kernel)}
    return set(written_params(kernel.specialise(types, {**constants, **knobs})))


def _options(name: str, options: Mapping[str, Any]) -> tuple[tuple[str, Value], ...]:
    """The options that a launch of a model has on a GPU. Its threads and its target are the model's."""
    for option, value in options.items():
        if option not in (*GPU_OPTIONS, *CPU_OPTIONS, "target"):
            raise OperatorError(
                f"{name} launches a kernel with the option {option!r}, which no device has",
                remedy=f"use {', '.join(GPU_OPTIONS)}",
            )
        if option in GPU_OPTIONS and not isinstance(value, int | np.integer):
            raise OperatorError(f"{name} launches a kernel with {option}={value!r}, which must be a number")
    return tuple((option, int(options[option])) for option in GPU_OPTIONS if option in options)


def _variants(launch: RecordedLaunch, kernel: Kernel) -> tuple[TileVariant, ...]:
    bound = {
        name: Shaped(value.shape) if isinstance(value, Placeholder) else value
        for name, value in launch.bound.items()
    }
    if not launch.is_tuned:
        return (TileVariant((), kernel.grid_of(launch.grid, bound)),)
    tuned: Autotuned = launch.kernel
    parameters = {each.name for each in kernel.source.parameters}
    options = [name for name in gpu_options_of(kernel) if name not in launch.options]
    kept = [name for name in tuned.space.names if name in parameters or name in options]
    space = tuned.space.space(kernel.source.name, bound, kept)
    found = []
    for config in space.configs():
        values: tuple[tuple[str, Value], ...] = config.values
        found.append(TileVariant(values, kernel.grid_of(launch.grid, {**bound, **dict(values)})))
        if len(found) == _MAX_VARIANTS:
            break
    return tuple(found)


def _placeholder(name: str, operand: int, type: TensorType) -> Placeholder:
    import torch

    return Placeholder(name, type.dtype, type.shape, operand, getattr(torch, type.dtype.numpy.name))


def _examples(types: Sequence[TensorType], numbers: Sequence[Any]) -> list[Any]:
    """Random tensors of these types, the same each time, with the numbers between them."""
    import torch

    left, found = iter(types), []
    generator = torch.Generator().manual_seed(0)
    for number in numbers:
        if number is not None:
            found.append(number)
            continue
        type = next(left)
        dtype = getattr(torch, type.dtype.numpy.name)
        if type.dtype.is_float:
            found.append(torch.randn(type.shape, generator=generator).to(dtype))
        else:
            high = 2 if type.dtype is DType.BOOL else 4
            found.append(torch.randint(0, high, type.shape, generator=generator).to(dtype))
    return found


def _as_tensor(value: Any) -> Any:
    import torch

    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _array(tensor: Any) -> np.ndarray:
    plain = tensor.detach().cpu()
    return np.asarray((plain.float() if str(plain.dtype) == "torch.bfloat16" else plain).numpy())


def _check_takes(function: Callable[..., Any], names: Sequence[str], what: str) -> None:
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise OperatorError(
            f"{what} does not take the operator's arguments ({', '.join(names)}): {error}"
        ) from None
    except ValueError:  # a function without a signature
        return
