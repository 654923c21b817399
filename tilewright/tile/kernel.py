"""`@tilewright.kernel`: a Python function as a kernel, specialised and run at each launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import KernelArgumentError, KernelSyntaxError
from tilewright.tile.executors import ACCELERATORS, Facts, Launchable, are_disjoint, executor_for
from tilewright.tile.frontend.builder import held, is_number, literal_type
from tilewright.tile.frontend.compiler import Compiled, compile_kernel
from tilewright.tile.frontend.source import FunctionSource, constexpr_key, is_current, read
from tilewright.tile.interpret import interpret
from tilewright.tile.ir import MAX_GRID, Pointer, TileProgram, TileType, Type
from tilewright.tile.launch import WarmLaunches, remember
from tilewright.tile.memory import TensorArgument
from tilewright.tile.passes.written import written_params
from tilewright.tile.recording import RecordedLaunch
from tilewright.tile.recording import active as recorded_launches

_OPTIONS = ("debug", "unwritten", "options")
Grid = Sequence[int] | int | Callable[[dict[str, Any]], Sequence[int] | int]


def kernel(function: Callable[..., Any]) -> Kernel:
    """Makes a tile kernel of a plain Python function; the head of `tilewright.tile` has the language.

        import numpy as np
        import tilewright
        import tilewright.tile as tl

        @tilewright.kernel
        def scale(x, out, n, factor, BLOCK: tl.constexpr):
            offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < n
            tl.store(out + offsets, tl.load(x + offsets, mask=inside) * factor, mask=inside)

        x = np.arange(100, dtype=np.float32)
        out = np.empty_like(x)
        scale[lambda meta: (tl.cdiv(meta["n"], meta["BLOCK"]),)](x, out, 100, 2.0, BLOCK=32)

    A launch compiles the kernel for the device that its tensors are on, at the first call with these types and
    constexprs. `kernel.interpret[grid]` and `debug=True` run it in the NumPy interpreter instead, on the CPU, one
    program instance after the other; so does a launch where no code can be generated for the kernel.

    The grid is a tuple of one to three numbers, or a function that gets all arguments by name and returns one. A
    parameter is an array (NumPy, or a PyTorch tensor on the CPU; the kernel gets a pointer), a number, or a constexpr.
    `options={...}` goes to the code generator of the device: on a CPU it takes `threads`, on an
    NVIDIA GPU `warps` and `stages`. `options={"target": "gemmini"}` runs the kernel on the simulated accelerator.

    `debug=True` at the launch finds reads of unwritten elements (of the tensors named in `unwritten=`), races between
    program instances and failing assertions.
    """
    return Kernel(function)


@dataclass(frozen=True)
class Arguments:
    types: dict[str, Type]
    constants: dict[str, Any]
    tensors: list[TensorArgument]
    scalars: dict[str, Any]
    kinds: set[str]

    def values(self, program: TileProgram) -> list[Any]:
        """One value for each parameter: the address of a tensor, or the number itself."""
        found = {**self.scalars, **{tensor.name: tensor.address for tensor in self.tensors}}
        return [found[param.name] for param in program.params]


class Kernel:
    """A function of the tile language: `kernel[grid](...)` launches it, and other kernels may call it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.source: FunctionSource = read(function)
        for parameter in self.source.parameters:
            if parameter.name in _OPTIONS:
                raise KernelSyntaxError(
                    f"`{parameter.name}` is an option of every launch, and cannot be a parameter",
                    remedy="give the parameter another name",
                )
        self._compiled: dict[Any, Compiled] = {}
        self._launchables: dict[Any, tuple[TileProgram, Launchable | None]] = {}
        parameters = self.source.parameters
        self._warm = WarmLaunches([p.name for p in parameters], [p.is_constexpr for p in parameters])
        self.interpret = _Interpreted(self)

    def __repr__(self) -> str:
        return f"<tile kernel {self.source.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise KernelArgumentError(
            f"kernel {self.source.name} was called without a grid",
            remedy=f"launch it as {self.source.name}[grid](...)",
        )

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        """A function that launches the kernel on this grid."""

        def launch(
            *args: Any,
            debug: bool = False,
            unwritten: Sequence[str] = (),
            options: Mapping[str, Any] | None = None,
            **kwargs: Any,
        ) -> None:
            if (recording := recorded_launches()) is not None:
                bound = self._bind(args, kwargs)
                recording.append(RecordedLaunch(self, grid, bound, is_tuned=False, options=options or {}))
            elif debug or unwritten or not self._warm.launch(grid, args, kwargs, options):
                self._launch(grid, args, kwargs, debug, unwritten, options or {}, interpreted=debug)

        return launch

    def _launch(
        self,
        grid: Grid,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        debug: bool,
        unwritten: Sequence[str],
        options: Mapping[str, Any],
        *,
        interpreted: bool,
    ) -> None:
        bound = self._bind(args, kwargs)
        arguments = self._arguments(bound)
        names = [tensor.name for tensor in arguments.tensors]
        for name in unwritten:
            if name not in names:
                raise KernelArgumentError(
                    f"unwritten: {name!r} is not a tensor of {self.source.name}",
                    remedy=f"use some of {', '.join(names)}",
                )
        program = self._program(arguments)
        sizes = self._grid(grid, bound)
        kind = self._kind(arguments, {} if interpreted else options)
        self._check_writable(program, arguments)
        launchable = None if interpreted else self._launchable(program, kind, arguments, options)
        if launchable is not None:
            if 0 not in sizes:
                launchable(sizes, arguments.values(program))
            self._remember(args, kwargs, options, program, kind, launchable)
            return
        if kind != "cpu":
            raise KernelArgumentError(
                f"the tensors of {self.source.name} are on {kind}, where it cannot be"
                f" {'interpreted' if interpreted else 'compiled'}",
                remedy="pass tensors on the CPU",
            )
        interpret(program, sizes, arguments.tensors, arguments.scalars, debug=debug, unwritten=unwritten)

    def _remember(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
        program: TileProgram,
        kind: str,
        launchable: Launchable,
    ) -> None:
        executor = executor_for(kind)
        assert executor is not None
        for each in list(self._compiled.values()):
            if each.program is program:
                self._warm.remember(args, kwargs, options, launchable, each.captured, executor.wants_divisors)

    def _check_writable(self, program: TileProgram, arguments: Arguments) -> None:
        fixed = [tensor.name for tensor in arguments.tensors if not tensor.writable]
        if not fixed:
            return
        for name in sorted(written_params(program) & set(fixed)):
            raise KernelArgumentError(
                f"{self.source.name} stores to `{name}`, which is read-only",
                remedy="pass a copy of the array",
            )

    def _kind(self, arguments: Arguments, options: Mapping[str, Any] | None = None) -> str:
        """The kind of device of the tensors, or the accelerator that `options` names."""
        if len(arguments.kinds) > 1:
            found = " and ".join(sorted(arguments.kinds))
            raise KernelArgumentError(
                f"the tensors of {self.source.name} are on {found}", remedy="move all of them to one device"
            )
        kind = next(iter(arguments.kinds), "cpu")
        if not options or "target" not in options:
            return kind
        named = str(options["target"]).partition(":")[0]
        if kind != "cpu" or named not in ACCELERATORS:
            raise KernelArgumentError(
                f"target must be one of {', '.join(ACCELERATORS)} and the tensors on the CPU, got"
                f" {options['target']!r} and tensors on {kind}",
                remedy="leave the target out: a kernel runs where its tensors are",
            )
        return named

    def _launchable(
        self, program: TileProgram, kind: str, arguments: Arguments, options: Mapping[str, Any]
    ) -> Launchable | None:
        executor = executor_for(kind)
        if executor is None:
            return None
        facts = _facts(arguments, executor.wants_divisors)
        try:
            key = (id(program), kind, facts, tuple(sorted(options.items())))
            known = self._launchables.get(key)
        except TypeError:
            raise KernelArgumentError(
                f"an option of the launch of {self.source.name} is not hashable: {dict(options)}",
                remedy="pass numbers and strings",
            ) from None
        if known is None:
            known = program, executor.compile(program, facts, options)
            remember(self._launchables, key, known)  # with the program, whose identity is in the key
        return known[1]

    def prepare(
        self, grid: Grid, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Callable[[], None] | None:
        """A launch with these arguments, ready to be called: for timing. None if the kernel cannot be compiled for the
        device of its tensors. The caller keeps the tensors alive."""
        bound = self._bind(args, kwargs)
        arguments = self._arguments(bound)
        program, sizes = self._program(arguments), self._grid(grid, bound)
        launchable = self._launchable(program, self._kind(arguments, options), arguments, options or {})
        if launchable is None:
            return None
        values = arguments.values(program)
        return functools.partial(launchable, sizes, values) if 0 not in sizes else _nothing

    def compiled(self, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> str:
        """The code of the device that a launch with these arguments runs: assembly on a CPU."""
        arguments = self._arguments(self._bind(args, kwargs))
        kind = self._kind(arguments, options)
        executor = executor_for(kind)
        if executor is None:
            raise KernelArgumentError(f"kernels cannot be compiled for {kind}")
        facts = _facts(arguments, executor.wants_divisors)
        return executor.source(self._program(arguments), facts, options or {})

    def program(self, *args: Any, **kwargs: Any) -> TileProgram:
        """The tile program that a launch with these arguments runs; `print` shows it."""
        return self._program(self._arguments(self._bind(args, kwargs)))

    def specialise(self, types: Mapping[str, Type], constants: Mapping[str, Any]) -> TileProgram:
        """The tile program for parameters of these types and constexprs of these values, in any order."""
        names = [parameter.name for parameter in self.source.parameters]
        ordered = {name: types[name] for name in names if name in types}
        fixed = {name: constants[name] for name in names if name in constants}
        return self._program(Arguments(ordered, fixed, [], {}, set()))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a launch by name, defaults included. Raises KernelArgumentError if one is missing."""
        return self._bind(args, kwargs)

    def describe(self, bound: Mapping[str, Any]) -> tuple[Arguments, str]:
        """The types and constexprs that a launch with these arguments is compiled for, and the kind of its tensors'
        device."""
        arguments = self._arguments(bound)
        return arguments, self._kind(arguments)

    def grid_of(self, grid: Grid, bound: Mapping[str, Any]) -> tuple[int, int, int]:
        """The sizes of the grid of a launch with these arguments."""
        return self._grid(grid, dict(bound))

    def tensor_arguments(self, *args: Any, **kwargs: Any) -> list[TensorArgument]:
        """The memory of the tensors of a launch with these arguments."""
        return self._arguments(self._bind(args, kwargs)).tensors

    def _program(self, arguments: Arguments) -> TileProgram:
        constants = tuple((name, constexpr_key(value)) for name, value in arguments.constants.items())
        key = (tuple(arguments.types.items()), constants)
        try:
            known = self._compiled.get(key)
        except TypeError:
            raise KernelArgumentError(
                f"a constexpr of {self.source.name} is not hashable: {arguments.constants}",
                remedy="pass numbers, strings, types and tuples as constexprs",
            ) from None
        if known is None or not is_current(known.captured):
            known = compile_kernel(self.source, arguments.types, arguments.constants)
            remember(self._compiled, key, known)
        return known.program

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        name, parameters = self.source.name, self.source.parameters
        if len(args) > len(parameters):
            raise KernelArgumentError(f"{name} takes {len(parameters)} arguments, got {len(args)}")
        bound = {parameter.name: value for parameter, value in zip(parameters, args, strict=False)}
        for key, value in kwargs.items():
            if key in bound:
                raise KernelArgumentError(f"argument `{key}` of {name} is given twice")
            if key not in {parameter.name for parameter in parameters}:
                known = ", ".join([each.name for each in parameters] + list(_OPTIONS))
                raise KernelArgumentError(f"{name} has no parameter `{key}`", remedy=f"it takes {known}")
            bound[key] = value
        missing = [each.name for each in parameters if each.name not in bound and not each.has_default]
        if missing:
            raise KernelArgumentError(f"{name} needs {', '.join(f'`{each}`' for each in missing)}")
        return {each.name: bound.get(each.name, each.default) for each in parameters}

    def _arguments(self, bound: Mapping[str, Any]) -> Arguments:
        result = Arguments({}, {}, [], {}, set())
        for parameter in self.source.parameters:
            value = bound[parameter.name]
            if isinstance(value, np.generic):
                value = value.item()
            if parameter.is_constexpr or value is None or isinstance(value, (str, DType)):
                result.constants[parameter.name] = value
            elif is_number(value):
                result.types[parameter.name] = TileType(literal_type(value))
                result.scalars[parameter.name] = held(value, literal_type(value))
            else:
                tensor = tensor_argument(parameter.name, value)
                result.kinds.add(_kind(value))
                result.types[parameter.name] = TileType(Pointer(tensor.dtype))
                result.tensors.append(tensor)
        return result

    def _grid(self, grid: Grid, bound: dict[str, Any]) -> tuple[int, int, int]:
        given = grid(dict(bound)) if callable(grid) else grid
        sizes = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        legal = all(
            isinstance(n, (int, np.integer)) and not isinstance(n, bool) and 0 <= n <= MAX_GRID for n in sizes
        )
        if not legal or not 1 <= len(sizes) <= 3:
            raise KernelArgumentError(
                f"a grid must be one to three numbers from 0 to {MAX_GRID}, got {given!r}",
                remedy=f"launch as {self.source.name}[(blocks,)](...)",
            )
        x, y, z = (*(int(n) for n in sizes), 1, 1)[:3]
        return x, y, z


class _Interpreted:
    """`kernel.interpret[grid](...)`: a launch in the interpreter."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        def launch(*args: Any, debug: bool = False, unwritten: Sequence[str] = (), **kwargs: Any) -> None:
            kwargs.pop("options", None)
            self._kernel._launch(grid, args, kwargs, debug, unwritten, {}, interpreted=True)

        return launch


def _nothing() -> None:
    pass


def _kind(value: Any) -> str:
    return "cpu" if isinstance(value, np.ndarray) else str(value.device.type)


def _facts(arguments: Arguments, divisors: bool) -> Facts:
    disjoint = are_disjoint([tensor.extent for tensor in arguments.tensors])
    if not divisors:
        return Facts(disjoint)
    numbers = [(tensor.name, tensor.address) for tensor in arguments.tensors]
    numbers += [(name, value) for name, value in arguments.scalars.items() if type(value) is int]
    found = ((name, min(16, value & -value) if value else 16) for name, value in numbers)
    return Facts(disjoint, tuple((name, d) for name, d in found if d > 1))


def tensor_argument(name: str, value: Any) -> TensorArgument:
    """An array as its memory, without a copy."""
    if isinstance(value, np.ndarray):
        try:
            dtype = DType.of(value)
        except KeyError:
            raise _bad_type(name, value.dtype) from None
        if any(stride % dtype.bytes for stride in value.strides):
            raise KernelArgumentError(
                f"`{name}` has strides that are not multiples of its element size", remedy="copy it"
            )
        strides = tuple(stride // dtype.bytes for stride in value.strides)
        return TensorArgument(name, dtype, value.ctypes.data, value.shape, strides, value.flags.writeable)
    if hasattr(value, "data_ptr"):
        found = _TORCH.get(str(value.dtype).removeprefix("torch."))
        if found is None:
            raise _bad_type(name, value.dtype)
        return TensorArgument(name, found, value.data_ptr(), tuple(value.shape), tuple(value.stride()), True)
    raise KernelArgumentError(f"`{name}` is a {type(value).__name__}, which a kernel cannot take")


def _bad_type(name: str, dtype: object) -> KernelArgumentError:
    known = ", ".join(_TORCH)
    return KernelArgumentError(
        f"`{name}` has elements of type {dtype}", remedy=f"convert it to one of {known}"
    )


_TORCH = {dtype.numpy.name: dtype for dtype in DType}
