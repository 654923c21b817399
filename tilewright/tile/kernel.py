"""`@tilewright.kernel`: a Python function as a kernel, specialised and run at each launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import KernelArgumentError, KernelSyntaxError
from tilewright.tile.frontend.builder import is_number, literal_type
from tilewright.tile.frontend.compiler import Compiled, compile_kernel
from tilewright.tile.frontend.source import FunctionSource, lookup, read
from tilewright.tile.interpret import interpret
from tilewright.tile.ir import MAX_GRID, Pointer, TileProgram, TileType, Type
from tilewright.tile.memory import TensorArgument

_OPTIONS = ("debug", "unwritten")
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

    For now a launch runs in the NumPy interpreter, on the CPU, one program instance after the other: it is for writing
    and debugging kernels, and slow. There is no code generation for tile kernels yet.

    The grid is a tuple of one to three numbers, or a function that gets all arguments by name and returns one. A
    parameter is an array (NumPy, or a PyTorch tensor on the CPU; the kernel gets a pointer), a number, or a constexpr.
    `debug=True` at the launch finds reads of unwritten elements (of the tensors named in `unwritten=`), races between
    program instances and failing assertions.
    """
    return Kernel(function)


@dataclass(frozen=True)
class _Arguments:
    types: dict[str, Type]
    constants: dict[str, Any]
    tensors: list[TensorArgument]
    scalars: dict[str, Any]


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

    def __repr__(self) -> str:
        return f"<tile kernel {self.source.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise KernelArgumentError(
            f"kernel {self.source.name} was called without a grid",
            remedy=f"launch it as {self.source.name}[grid](...)",
        )

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        """A function that launches the kernel on this grid."""

        def launch(*args: Any, debug: bool = False, unwritten: Sequence[str] = (), **kwargs: Any) -> None:
            bound = self._bind(args, kwargs)
            arguments = self._arguments(bound)
            program = self._program(arguments)
            names = [tensor.name for tensor in arguments.tensors]
            for name in unwritten:
                if name not in names:
                    raise KernelArgumentError(
                        f"unwritten: {name!r} is no tensor of {self.source.name}",
                        remedy=f"use some of {', '.join(names)}",
                    )
            sizes = self._grid(grid, bound)
            interpret(program, sizes, arguments.tensors, arguments.scalars, debug=debug, unwritten=unwritten)

        return launch

    def program(self, *args: Any, **kwargs: Any) -> TileProgram:
        """The tile program that a launch with these arguments runs; `print` shows it."""
        return self._program(self._arguments(self._bind(args, kwargs)))

    def _program(self, arguments: _Arguments) -> TileProgram:
        constants = tuple((name, type(value), value) for name, value in arguments.constants.items())
        key = (tuple(arguments.types.items()), constants)
        try:
            known = self._compiled.get(key)
        except TypeError:
            raise KernelArgumentError(
                f"a constexpr of {self.source.name} is not hashable: {arguments.constants}",
                remedy="pass numbers, strings, types and tuples as constexprs",
            ) from None
        if known is None or any(
            lookup(function, name) != (True, value) for function, name, value in known.captured
        ):
            known = compile_kernel(self.source, arguments.types, arguments.constants)
            self._compiled[key] = known
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

    def _arguments(self, bound: Mapping[str, Any]) -> _Arguments:
        result = _Arguments({}, {}, [], {})
        for parameter in self.source.parameters:
            value = bound[parameter.name]
            if isinstance(value, np.generic):
                value = value.item()
            if parameter.is_constexpr or value is None or isinstance(value, (str, DType)):
                result.constants[parameter.name] = value
            elif is_number(value):
                result.types[parameter.name] = TileType(literal_type(value))
                result.scalars[parameter.name] = value
            else:
                tensor = _tensor(parameter.name, value)
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


def _tensor(name: str, value: Any) -> TensorArgument:
    """An array as its memory, without a copy."""
    if isinstance(value, np.ndarray):
        try:
            dtype = DType.of(value)
        except KeyError:
            raise _bad_type(name, value.dtype) from None
        if any(stride % dtype.bytes for stride in value.strides):
            raise KernelArgumentError(
                f"`{name}` has strides that are no multiples of its element", remedy="copy it"
            )
        strides = tuple(stride // dtype.bytes for stride in value.strides)
        return TensorArgument(name, dtype, value.ctypes.data, value.shape, strides, value.flags.writeable)
    if hasattr(value, "data_ptr"):
        if value.device.type != "cpu":
            raise KernelArgumentError(
                f"`{name}` is on {value.device}; tile kernels run on the CPU for now",
                remedy=f"pass {name}.cpu()",
            )
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
