"""A compiled model: called like the original one, with torch tensors or NumPy arrays."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from tilewright.errors import InputError
from tilewright.runtime import notebook, signing, tree
from tilewright.runtime.arguments import as_arguments, joined
from tilewright.runtime.executor import Executor
from tilewright.runtime.explain import BenchResult, Checker, Explanation, explain, random_inputs
from tilewright.runtime.plan import Plan, TensorSpec
from tilewright.runtime.ports import OutPort, Port

_BENCH_SECONDS = 0.5  # default duration of `bench`


class CompiledModel:
    """A pure function of its inputs, safe to call from several threads.

    It returns torch tensors if any input is one, and NumPy arrays otherwise.
    """

    def __init__(
        self,
        plan: Plan,
        constants: Sequence[np.ndarray],
        objects: Mapping[str, bytes],
        *,
        threads: int | None = None,
        checker: Checker | None = None,
    ) -> None:
        self.plan = plan
        self.executor = self._made_executor(constants, objects, threads)
        self.checker = checker  # fills the error column of `explain`; an artifact has none
        positional, keyword = plan.input_tree["items"]
        self._positional: list[tree.Spec] = positional["items"]
        self._keyword: dict[str, tree.Spec] = dict(zip(keyword["keys"], keyword["items"], strict=True))
        paths = self._input_paths()
        self._in_ports = [self._made_port(spec, paths[index]) for index, spec in enumerate(plan.inputs)]
        self._out_ports = [OutPort(spec) for spec in plan.outputs]
        # The usual case, with only positional tensors, needs no tree traversal.
        leaves = [item.get("index") for item in self._positional]
        self._plain_arity = len(leaves) if not self._keyword and leaves == list(range(len(leaves))) else -1
        self._pinned = {pinned.index: pinned.data for pinned in plan.pinned}
        self._one_output = plan.output_tree == {"kind": "leaf", "index": 0}

    def _made_executor(
        self, constants: Sequence[np.ndarray], objects: Mapping[str, bytes], threads: int | None
    ) -> Any:
        return Executor(self.plan, constants, objects, threads)

    def _made_port(self, spec: TensorSpec, path: str) -> Port:
        return Port(spec, path)

    @property
    def threads(self) -> int:
        """The number of threads of a call; None or 0 sets the default."""
        return int(self.executor.threads)

    @threads.setter
    def threads(self, count: int | None) -> None:
        self.executor.threads = count

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the model like the original: the same arguments, the same nesting of results.

        InputError says which input does not fit, what was expected and what was passed.
        """
        plain = len(args) == self._plain_arity and not kwargs
        results = self.flat(args if plain else self._bind(args, kwargs))
        return results[0] if self._one_output else tree.unflatten(self.plan.output_tree, results)

    def flat(self, leaves: Sequence[Any]) -> list[Any]:
        """Call with the model's inputs in order, and return its outputs in order, both without nesting."""
        keep: list[Any] = []
        addresses: list[int] = []
        any_torch = False
        # Each step here matters: a call costs a few microseconds, and a small model's kernels a hundred.
        for index, port in enumerate(self._in_ports):
            address, is_torch = port.address(leaves[index], keep)
            addresses.append(address)
            if is_torch:
                any_torch = True
        if self._pinned:
            self._check_pinned(leaves)
        results: list[Any] = []
        for out in self._out_ports:
            result, address = out.new_torch() if any_torch else out.new_numpy()
            results.append(result)
            addresses.append(address)
        self.executor.run_addresses(addresses)
        return results

    def at(self, addresses: list[int]) -> list[Any]:
        """Like `flat`, for torch tensors at these addresses. Nothing is checked: the caller must ensure types, sizes
        and strides, as Dynamo's guards do. The list is changed."""
        results: list[Any] = []
        for out in self._out_ports:
            result, address = out.new_torch()
            results.append(result)
            addresses.append(address)
        self.executor.run_addresses(addresses)
        return results

    def save(self, path: str | os.PathLike[str], *, sign: signing.Key | None = None) -> None:
        """Write the model to one file. `tilewright.load` needs neither torch nor a compiler. `sign`: the key to sign
        it with, so that `load(path, trusted=key)` accepts no other file."""
        from tilewright.runtime.artifact import save

        save(self, path, sign=sign)

    def saved(self) -> Sequence[CompiledModel]:
        """The variants for a file, one per machine; loading uses the first that can run."""
        return [self]

    def explain(
        self, inputs: Any = None, *, kwargs: Mapping[str, Any] | None = None, repeats: int = 10
    ) -> Explanation:
        """Run the model and return the time of each kernel, and its error if the compiler attached the oracle.

        `inputs`: a tuple of positional arguments, a dict of keyword arguments, or one tensor; `kwargs`: keyword
        arguments besides positional ones. Random inputs by default (normal floats, integers 0 or 1).
        """
        inputs = joined(inputs, kwargs)
        arrays = self._arrays(inputs)
        origin = "random (normal floats, integers 0 or 1)" if inputs is None else "given"
        return explain(self.executor, arrays, origin, self.checker, repeats)

    def bench(
        self,
        inputs: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        repeats: int | None = None,
        warmup: int = 3,
    ) -> BenchResult:
        """Time calls of the model, everything included. `inputs` and `kwargs` as in `explain`."""
        inputs = joined(inputs, kwargs)
        if inputs is None:
            flat = random_inputs(self.plan)
            args, kwargs = tree.unflatten(self.plan.input_tree, flat)
        else:
            args, kwargs = as_arguments(inputs)
        for _ in range(max(warmup, 1)):
            self(*args, **kwargs)
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < (repeats or 10) or (
            repeats is None and time.perf_counter() - began < _BENCH_SECONDS
        ):
            start = time.perf_counter()
            self(*args, **kwargs)
            times.append(time.perf_counter() - start)
        times.sort()
        return BenchResult(statistics.median(times), times[0], times[int(0.9 * (len(times) - 1))], len(times))

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """The tensors that a call takes, by the caller's names: `input_ids`, `batch['mask']`."""
        return {port.path: port.spec for port in self._in_ports}

    @property
    def signature(self) -> str:
        """The tensors in and out: "(x: f32[8,64]) -> (f32[8,10])"."""
        inputs = ", ".join(f"{port.path}: {port.spec}" for port in self._in_ports)
        outputs = ", ".join(str(spec) for spec in self.plan.outputs)
        return f"({inputs}) -> ({outputs})"

    def __repr__(self) -> str:
        kernels, threads = _counted(len(self.plan.steps), "kernel"), _counted(self.threads, "thread")
        return f"<CompiledModel {self.signature}, {kernels}, {threads}>"

    def _repr_html_(self) -> str:
        return notebook.model_html(self)

    # -- arguments -------------------------------------------------------------------------------------------------

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call, given by position or by keyword."""
        names = self.plan.input_names
        given = dict(kwargs)
        extra: dict[int, Any] = {}  # positions without a name: *args of the original, or no recorded names
        for index, value in enumerate(args):
            name = names[index] if index < len(names) else None
            if name is None:
                extra[index] = value
            elif name in given:
                raise InputError(f"{name} was given twice: at position {index} and by keyword")
            else:
                given[name] = value
        found: dict[int, Any] = {}
        for index, spec in enumerate(self._positional):
            name = names[index] if index < len(names) else None
            if name is not None and name in given:
                tree.collect(spec, given.pop(name), name, found)
            elif index in extra:
                tree.collect(spec, extra.pop(index), f"args[{index}]", found)
            else:
                self._missing(name or f"args[{index}]", args, kwargs)
        for name, spec in self._keyword.items():
            if name not in given:
                self._missing(name, args, kwargs)
            tree.collect(spec, given.pop(name), name, found)
        if given or extra:
            unknown = [*given, *(f"args[{index}]" for index in extra)]
            raise InputError(
                f"unexpected argument(s) {', '.join(unknown)}: the model was compiled with ({self._arguments()})",
                remedy="leave them out, or compile the model with examples for them",
            )
        return [found[index] for index in range(len(found))]

    def _missing(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        got = f"{len(args)} positional argument(s)" + (f" and the keywords {list(kwargs)}" if kwargs else "")
        raise InputError(f"the argument {name} is missing: the model takes ({self._arguments()}), got {got}")

    def _arguments(self) -> str:
        names = self.plan.input_names
        positional = [names[i] if i < len(names) else f"args[{i}]" for i in range(len(self._positional))]
        return ", ".join([*positional, *self._keyword])

    def _input_paths(self) -> dict[int, str]:
        """Leaf index -> the caller's name for it."""
        names = self.plan.input_names
        paths: dict[int, str] = {}
        for index, spec in enumerate(self._positional):
            _name_leaves(spec, names[index] if index < len(names) else f"args[{index}]", paths)
        for name, spec in self._keyword.items():
            _name_leaves(spec, name, paths)
        return paths

    def _arrays(self, inputs: Any) -> list[np.ndarray]:
        """The model's inputs as contiguous NumPy arrays, with the checks of a call."""
        if inputs is None:
            return random_inputs(self.plan)
        args, kwargs = as_arguments(inputs)
        arrays = []
        for port, leaf in zip(self._in_ports, self._bind(args, kwargs), strict=True):
            port.address(leaf, [])  # only for its checks
            arrays.append(port.as_numpy(leaf))
        self._check_pinned(arrays)
        return arrays

    def _check_pinned(self, leaves: Sequence[Any]) -> None:
        """Raise InputError unless inputs that decided shapes have the compiled values."""
        for index, data in self._pinned.items():
            port = self._in_ports[index]
            given = port.as_numpy(leaves[index])
            if given.tobytes() != data:
                fixed = np.frombuffer(data, port.numpy).reshape(port.shape)
                raise InputError(
                    f"{port.path}: the model was compiled for the value {_shown(fixed)}, which decides shapes, got"
                    f" {_shown(given)}",
                    remedy=f"compile the model with an example of {port.path} that has this value",
                )


def _counted(count: int, what: str) -> str:
    """Write a count with its noun: `1 kernel`, `2 kernels`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _shown(array: np.ndarray) -> str:
    return np.array2string(array, threshold=8, separator=", ").replace("\n", "")


def _name_leaves(spec: tree.Spec, path: str, into: dict[int, str]) -> None:
    kind = spec["kind"]
    if kind == "leaf":
        into[spec["index"]] = path
        return
    for position, item in enumerate(spec.get("items", ())):
        if kind in ("namedtuple", "record"):
            inner = f"{path}.{spec['fields'][position]}"
        else:
            inner = f"{path}[{spec['keys'][position]!r}]" if kind == "dict" else f"{path}[{position}]"
        _name_leaves(item, inner, into)
