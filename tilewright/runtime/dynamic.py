"""A model with dynamic shapes: a bounded table of compiled models, one per input signature.

Calls have the same signature if their arguments have the same nesting, their tensors the same shapes and element
types, and everything else (numbers, strings, None) is equal. The policy of `dispatch` decides which signatures are
compiled; other calls use `otherwise`, the model's own framework. A model loaded from a file cannot compile: it has
the saved variants, and refuses other calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import InputError
from tilewright.runtime import notebook, signing, tree
from tilewright.runtime.arguments import as_arguments, joined
from tilewright.runtime.dispatch import Policy, VariantTable
from tilewright.runtime.executor import aligned_copy, content_key
from tilewright.runtime.explain import BenchResult, Checker, Explanation
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.plan import ALIGNMENT, TensorSpec
from tilewright.runtime.ports import torch_module

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class DynamicModel:
    """A model that is called with any shapes that the original takes. It is thread-safe; one thread compiles at a
    time."""

    def __init__(
        self,
        names: Sequence[str],
        variants: Sequence[CompiledModel] = (),
        *,
        make: Callable[[Arguments], CompiledModel] | None = None,
        otherwise: Callable[[Arguments], Any] | None = None,
        policy: Policy | None = None,
    ) -> None:
        """`names`: the arguments that can be passed by name. `variants`: the initial ones."""
        self._names = tuple(names)
        self._make = make
        self._threads: int | None = None  # the user's setting, for later variants
        self._otherwise = otherwise
        self._table: VariantTable[CompiledModel] = VariantTable(policy)
        self._plain: dict[Hashable, CompiledModel] = {}  # the same, by a key that is cheap to compute
        for model in variants:
            self._table.add(_kind_of_plan(model, self._names), model)

    @property
    def variants(self) -> tuple[CompiledModel, ...]:
        """The compiled models so far."""
        return self._table.variants()

    @property
    def policy(self) -> Policy:
        return self._table.policy

    @property
    def threads(self) -> int:
        """The number of threads of a call; None or 0 sets the default. 0 if there is no variant yet."""
        return next((model.threads for model in self.variants), 0)

    @threads.setter
    def threads(self, count: int | None) -> None:
        self._threads = count or 0
        for model in self.variants:
            model.threads = count

    @property
    def checker(self) -> Checker | None:
        return next((model.checker for model in self.variants), None)

    @checker.setter
    def checker(self, checker: Checker | None) -> None:
        for model in self.variants:
            model.checker = checker

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the model; a new shape is compiled first or uses the fallback, as the policy says."""
        key = None if kwargs else _plain_key(args)
        model = self._plain.get(key) if key is not None else None
        if model is None:
            model = self.variant(args, kwargs)
            if model is None:
                return self._by_other_means(args, kwargs)
            if key is not None:
                self._plain[key] = model
        return model(*args, **kwargs)

    def _by_other_means(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._otherwise is not None
        began = time.perf_counter()
        result = self._otherwise((args, kwargs))
        if not self._table.is_full:
            self._table.waited(_kind(bind(self._names, args, kwargs)), time.perf_counter() - began)
        return result

    def variant(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CompiledModel | None:
        """The compiled model for such a call, compiled now if the policy allows it; otherwise None."""
        kind = _kind(bind(self._names, args, kwargs))
        if self._make is not None:
            return self._table.get(kind, lambda: self._made((args, dict(kwargs))))
        found = self._table.find(kind)
        if found is None:
            known = "".join(f"\n  {model.signature}" for model in self.variants)
            raise InputError(
                f"the model was saved for {len(self.variants)} kinds of calls, and this is not one of them: got"
                f" {_described(bind(self._names, args, kwargs))}; it has{known}",
                remedy="compile the model with dynamic=True, call it once with each shape, and save it again",
            )
        return found

    def _made(self, arguments: Arguments) -> CompiledModel:
        assert self._make is not None
        model = self._make(arguments)
        if self._threads is not None:
            model.threads = self._threads
        return model

    def save(self, path: str | os.PathLike[str], *, sign: signing.Key | None = None) -> None:
        """Write all variants compiled so far to one file; `tilewright.load` returns a model for their shapes. `sign`:
        as in `CompiledModel.save`."""
        from tilewright.runtime.artifact import save

        save(self, path, sign=sign)

    def explain(
        self, inputs: Any = None, *, kwargs: Mapping[str, Any] | None = None, repeats: int = 10
    ) -> Explanation:
        """Like `CompiledModel.explain`, for the variant of `inputs`, or the first one."""
        inputs = joined(inputs, kwargs)
        return self._for(inputs).explain(inputs, repeats=repeats)

    def bench(
        self,
        inputs: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        repeats: int | None = None,
        warmup: int = 3,
    ) -> BenchResult:
        """Like `CompiledModel.bench`, for the variant of `inputs`, or the first one."""
        inputs = joined(inputs, kwargs)
        return self._for(inputs).bench(inputs, repeats=repeats, warmup=warmup)

    def _for(self, inputs: Any) -> CompiledModel:
        if inputs is None:
            found = next(iter(self.variants), None)
        else:
            found = self.variant(*as_arguments(inputs))
        if found is None:
            raise InputError(
                "nothing is compiled for these inputs" if inputs is not None else "nothing is compiled yet",
                remedy="call the model with inputs of this shape first: a shape that recurs is compiled",
            )
        return found

    def __repr__(self) -> str:
        rows = "".join(f"\n  {model.signature}" for model in self.variants)
        return f"<DynamicModel, {len(self.variants)} variants of at most {self.policy.limit}{rows}>"

    def _repr_html_(self) -> str:
        return notebook.dynamic_html(self)


class ConstantPool:
    """Constants that the variants of one model share, found by content: most variants store their weights in the same
    order."""

    def __init__(self) -> None:
        self._known: dict[Hashable, np.ndarray] = {}

    def shared(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [self._known.setdefault(content_key(array), _aligned(array)) for array in arrays]


def _aligned(array: np.ndarray) -> np.ndarray:
    fits = array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0
    return array if fits else aligned_copy(array)


# -- input signatures
# -------------------------------------------------------------------------------------------------


def bind(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, or by number if they have none."""
    given: dict[str, Any] = {}
    for position, value in enumerate(args):
        name = names[position] if position < len(names) else f"args[{position}]"
        if name in kwargs:
            raise InputError(f"{name} was given twice: at position {position} and by keyword")
        given[name] = value
    return {**given, **kwargs}


def _kind(given: Mapping[str, Any]) -> Hashable:
    return tuple((name, _frozen(given[name])) for name in sorted(given))


def _kind_of_plan(model: CompiledModel, names: Sequence[str]) -> Hashable:
    args, kwargs = tree.unflatten(model.plan.input_tree, list(model.plan.inputs))
    return _kind(bind(names, args, kwargs))


def _frozen(value: Any) -> Hashable:
    leaves, spec = tree.flatten(value)
    return _frozen_spec(spec), tuple(_leaf(leaf) for leaf in leaves)


def _frozen_spec(spec: Any) -> Hashable:
    if isinstance(spec, dict):
        return tuple((key, _frozen_spec(item)) for key, item in spec.items())
    return tuple(map(_frozen_spec, spec)) if isinstance(spec, list) else spec


def _leaf(value: Any) -> tuple[tuple[int, ...], str]:
    if isinstance(value, TensorSpec):
        return tuple(value.shape), DType.parse(value.dtype).numpy.name
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        raise InputError(f"expected a tensor, got {tree.describe(value)}")
    return tuple(shape), str(dtype).removeprefix("torch.")


def _plain_key(args: tuple[Any, ...]) -> Hashable | None:
    """The key of a call with only tensors; None for others."""
    module = torch_module()
    tensor = np.ndarray if module is None else (np.ndarray, module.Tensor)
    if not all(isinstance(value, tensor) for value in args):
        return None
    return tuple((value.shape, value.dtype) for value in args)


def _described(given: Mapping[str, Any]) -> str:
    parts = []
    for name, value in given.items():
        leaves, _ = tree.flatten(value)
        tensors = [f"{dtype}{list(shape)}" for shape, dtype in map(_leaf, leaves)]
        parts.append(f"{name}: {', '.join(tensors) or repr(value)}")
    return f"({', '.join(parts)})"
