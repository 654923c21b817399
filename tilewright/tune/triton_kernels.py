"""`tilewright.tune_triton`: a kernel of Triton whose knobs this tuner sets, in place of `@triton.autotune`."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import math
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.cost.tiles import TileCounts, tile_terms
from tilewright.errors import AutotuneError, KernelArgumentError, MissingDependencyError, TilewrightError
from tilewright.hw import CpuMachine, Machine
from tilewright.hw.gpu import GpuMachine
from tilewright.measure.kernel_job import Grid3
from tilewright.space.space import Config
from tilewright.space.terms import Counted, Roofline, Terms
from tilewright.support.bundle import Bundle, bundle_of
from tilewright.tile.frontend.source import Parameter, lookup
from tilewright.tile.kernel import Arguments, Kernel, tensor_argument
from tilewright.tune.effort import resolve_tuning
from tilewright.tune.kernel_space import SpaceLike, Where
from tilewright.tune.kernel_tunable import LaunchFacts
from tilewright.tune.launches import counted_launch
from tilewright.tune.triton_source import read_as_tile_kernel
from tilewright.tune.tuned_kernel import TunedKernel

OPTIONS = ("num_warps", "num_stages", "num_ctas")


def tune_triton(
    kernel: Any,
    space: SpaceLike,
    key: Sequence[str] = (),
    reference: Callable[..., Any] | None = None,
    *,
    where: Where | Sequence[Where] = (),
    tolerance: float | None = None,
    effort: str = "none",
    budget: float | str | None = None,
    trials: int | None = None,
    seed: int = 0,
    search: str = "guided",
    cost_model: str = "boosted",
    lock: str | Path | None = None,
    db: str | Path | None = None,
) -> TunedKernel:
    """Tune an existing `@triton.jit` kernel with this tuner, in place of `@triton.autotune`.

        fast = tilewright.tune_triton(
            matmul_kernel,
            {"BLOCK_M": (32, 64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
            key=["M", "N", "K"],
            reference=lambda a, b: a @ b,
        )
        fast.tune(grid, a, b, c, M, N, K)      # measures in processes of its own, keeps every trial and the winner
        fast[grid](a, b, c, M, N, K)           # the winner; without measurements, the default

    Knobs are the kernel's constexpr parameters and `num_warps`, `num_stages` and `num_ctas`. A config that fails to
    compile, faults, hangs or is wrong costs one trial, whose kind is kept. Without a `reference`, configs must agree
    with the default one. The other options are those of `tilewright.autotune`.
    """
    function = getattr(kernel, "fn", None)
    if not inspect.isfunction(function):
        raise AutotuneError(
            f"tune_triton needs a kernel of @triton.jit, got {kernel!r}",
            remedy="pass the function under @triton.jit, without @triton.autotune",
        )
    options = resolve_tuning(effort, budget, seed, search, db, cost_model, trials=trials)
    return TritonTuned(kernel, space, key, where, reference, tolerance, options, lock)


class TritonTuned(TunedKernel):
    """A kernel of Triton whose knobs are set: launched as the kernel itself, without them."""

    def __init__(self, kernel: Any, *rest: Any) -> None:
        super().__init__(LaunchedTriton(kernel), *rest)
        functools.update_wrapper(self, kernel.fn)
        self.kernel = kernel


@dataclass(frozen=True, eq=False)
class LaunchedTriton:
    """A kernel of Triton as something to launch."""

    kernel: Any
    language = "triton"

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @cached_property
    def bundle(self) -> Bundle:
        return bundle_of(self.kernel.fn)

    @cached_property
    def source(self) -> str:
        return self.bundle.fingerprint

    @cached_property
    def parameters(self) -> Sequence[Parameter]:
        found = inspect.signature(self.kernel.fn).parameters.values()
        return [Parameter(each.name, "constexpr" in str(each.annotation), each.default) for each in found]

    def options(self, kind: str) -> tuple[str, ...]:
        return OPTIONS

    def toolchain(self) -> str:
        try:
            triton = importlib.import_module("triton")
        except ImportError:
            raise MissingDependencyError("Triton is not installed", remedy="pip install triton") from None
        return f"triton {triton.__version__}"

    def bind(self, given: Mapping[str, Any]) -> dict[str, Any]:
        bound = {}
        for parameter in self.parameters:
            if parameter.name in given:
                bound[parameter.name] = given[parameter.name]
            elif parameter.has_default:
                bound[parameter.name] = parameter.default
            else:
                raise KernelArgumentError(f"{self.name} needs `{parameter.name}`")
        for name in given:
            if name not in bound:
                raise KernelArgumentError(
                    f"{self.name} has no parameter `{name}`", remedy=f"it takes {', '.join(bound)}"
                )
        return bound

    def describe(self, bound: Mapping[str, Any]) -> tuple[Arguments, str]:
        result = Arguments({}, {}, [], {}, set())
        for parameter in self.parameters:
            value = bound[parameter.name]
            if hasattr(value, "data_ptr"):
                result.tensors.append(tensor_argument(parameter.name, value))
                result.kinds.add(str(value.device.type))
            elif not parameter.is_constexpr and isinstance(value, bool | int | float):
                result.scalars[parameter.name] = value
            else:
                result.constants[parameter.name] = value
        if len(result.kinds) > 1:
            raise KernelArgumentError(
                f"the tensors of {self.name} are on {' and '.join(sorted(result.kinds))}"
            )
        return result, next(iter(result.kinds), "cpu")

    def grid_of(self, grid: Any, bound: Mapping[str, Any]) -> Grid3:
        given = grid(dict(bound)) if callable(grid) else grid
        sizes = tuple(given) if isinstance(given, tuple | list) else (given,)
        if not 1 <= len(sizes) <= 3 or not all(isinstance(each, int | np.integer) for each in sizes):
            raise KernelArgumentError(f"a grid must be one to three numbers, got {given!r}")
        x, y, z = (*(int(each) for each in sizes), 1, 1)[:3]
        return x, y, z

    def launch(self, grid: Any, bound: Mapping[str, Any], options: Mapping[str, Any], **how: Any) -> None:
        self.kernel[grid](**bound, **options)

    def written(self, launch: LaunchFacts, config: Config) -> set[str]:
        return stored_parameters(self.kernel.fn)

    def terms(
        self, launch: LaunchFacts, config: Config, machine: Machine
    ) -> tuple[Counted, dict[str, float]]:
        return triton_terms(launch, config, machine, self.counts(launch, config))

    @cached_property
    def _read(self) -> Kernel | None:
        return read_as_tile_kernel(self.kernel.fn)

    def counts(self, launch: LaunchFacts, config: Config) -> TileCounts | None:
        """The counts of a config; None if the kernel cannot be analysed."""
        if self._read is None:
            return None
        try:
            return counted_launch(self._read, launch, config)
        except TilewrightError:
            return None


def triton_terms(
    launch: LaunchFacts, config: Config, machine: Machine, counts: TileCounts | None
) -> tuple[Counted, dict[str, float]]:
    """The cost terms of a config. If the kernel could not be analysed (no `counts`), only its grid and the bytes of its
    tensors are known."""
    moved = launch.tensor_bytes
    instances = max(1, math.prod(launch.grid(launch, config)))
    numbers = {name: value for name, value in config.values if isinstance(value, int)}
    tile = math.prod(value for name, value in numbers.items() if name not in launch.options and value > 0)
    warps = int(numbers.get("num_warps", 4))
    features = {
        "triton.instances": math.log2(instances),
        "triton.tile": math.log2(1 + tile),
        "triton.tile_per_thread": math.log2(1 + tile / (32 * warps)),
        "triton.moved_per_instance": math.log2(1 + moved / instances),
    }
    if isinstance(machine, CpuMachine):
        cycles = 1e4 * instances  # a program instance in the interpreter
        return Terms(moved / 32, from_memory=moved, iterations=1, scalar=cycles), features
    assert isinstance(machine, GpuMachine)
    if counts is not None:
        options = {name: value for name, value in config.values if name in launch.options}
        return tile_terms(counts, machine, options), features | counts.features()
    busy = min(1.0, instances / machine.sms)
    return Roofline(0.0, moved, busy=max(busy, 1e-3)), features


def stored_parameters(function: Callable[..., Any]) -> set[str]:
    """Parameters that the address of a store or of an atomic operation is made of, also in functions that are called.
    A store is `tl.store(pointer, ...)`, or a method of a descriptor."""
    return _stored(function, {})


def _stored(function: Callable[..., Any], known: dict[Any, set[str]]) -> set[str]:
    """`known`: the same of functions that have been looked at, or are being."""
    if function in known:
        return known[function]
    found = known[function] = set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    parameters = [arg.arg for arg in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
    made_of = {name: {name} for name in parameters}

    def sources(node: ast.AST) -> set[str]:
        """Names that a value is made of, but for what is read from memory."""
        if isinstance(node, ast.Call) and _called(node).startswith("load"):
            return set()
        if isinstance(node, ast.Name):
            return made_of.get(node.id, set())
        return set().union(*(sources(child) for child in ast.iter_child_nodes(node)))

    def addresses(node: ast.Call) -> Iterator[ast.AST]:
        """What a call stores to is made of these."""
        named = {each.arg: each.value for each in node.keywords}
        if _called(node).startswith(("store", "atomic")):
            yield from (node.func, *node.args[:1])
            if "pointer" in named:
                yield named["pointer"]
            return
        callee = _callee(function, node.func)
        if callee is None:
            return
        names = list(inspect.signature(callee).parameters)
        given: dict[str | None, ast.expr] = {**named, **dict(zip(names, node.args, strict=False))}
        yield from (given[name] for name in _stored(callee, known) if name in given)

    nodes = list(ast.walk(tree))
    before = -1
    # Until nothing changes: what a loop assigns may be used before, in its next iteration.
    while before != (before := sum(map(len, made_of.values())) + len(found)):
        for node in nodes:
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (each for target in targets for each in ast.walk(target)):
                    if isinstance(name, ast.Name):
                        made_of.setdefault(name.id, set()).update(sources(node.value))
            elif isinstance(node, ast.Call):
                found.update(*(sources(each) for each in addresses(node)))
    return found


def _callee(function: Callable[..., Any], node: ast.expr) -> Callable[..., Any] | None:
    """The user's function that a call names; None for those of Triton."""
    if isinstance(node, ast.Name):
        exists, value = lookup(function, node.id)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        exists, value = lookup(function, node.value.id)
        value = getattr(value, node.attr, None) if isinstance(value, types.ModuleType) else None
    else:
        return None
    inner = getattr(value, "fn", None)  # of @triton.jit
    own = isinstance(inner, types.FunctionType) and not inner.__module__.startswith("triton.")
    return inner if exists and own else None


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
