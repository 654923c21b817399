"""Marks functions of the tile language: they are called inside a kernel while it is compiled, and nowhere else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tilewright.errors import KernelSyntaxError, KernelTypeError
from tilewright.tile.frontend.builder import Builder


class Builtin:
    """A function of the language. Its implementation takes the builder, and then the user's arguments."""

    def __init__(
        self,
        implementation: Callable[..., Any],
        name: str,
        outside: Callable[..., Any] | None = None,
        takes_functions: bool = False,
    ) -> None:
        self.implementation = implementation
        self.outside = outside  # what a call outside of kernels does, as in the function of a grid
        self.takes_functions = takes_functions  # of the user's, which a call in the implementation compiles
        self.__name__ = name
        self.__doc__ = implementation.__doc__
        parameters = list(inspect.signature(implementation).parameters.values())[1:]
        self.__signature__ = inspect.Signature(parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.outside is not None:
            return self.outside(*args, **kwargs)
        raise KernelSyntaxError(
            f"tl.{self.__name__} was called outside of a kernel",
            remedy="use it inside a function decorated with @tilewright.kernel, and launch that as kernel[grid](...)",
        )

    def apply(self, builder: Builder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise KernelTypeError(
                f"tl.{self.__name__}: {error}", remedy=f"call tl.{self.__name__}{self.__signature__}"
            ) from None
        return self.implementation(builder, *bound.args, **bound.kwargs)

    def __repr__(self) -> str:
        return f"<tl.{self.__name__}>"


def builtin(implementation: Callable[..., Any]) -> Builtin:
    return Builtin(implementation, implementation.__name__.rstrip("_"))
