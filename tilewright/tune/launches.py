"""A launch of a tile kernel, from the arguments of a call to a `TunableKernel`; and its tensors and reference as files
for the runner's processes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from tilewright.cost.tiles import TileCounts, count_tiles, tile_terms
from tilewright.dtypes import DType
from tilewright.errors import AutotuneError, ReferenceMismatchError, TilewrightError
from tilewright.hw import Machine, host
from tilewright.hw.gpu import detect
from tilewright.hw.machine import to_text
from tilewright.measure.kernel_job import (
    DataFile,
    Grid3,
    KernelJob,
    KernelSpec,
    KernelTensor,
    MemoryRegion,
    StoredArray,
    bytes_at,
)
from tilewright.runtime.plan import ALIGNMENT
from tilewright.runtime.threads import resolve as resolve_threads
from tilewright.space.space import Config
from tilewright.space.terms import Counted
from tilewright.space.tile_operator import GPU_OPTIONS
from tilewright.support.bundle import Bundle, bundle_of, constant_reference
from tilewright.support.source import location_of
from tilewright.tile.frontend.source import Parameter
from tilewright.tile.ir import Pointer, TileType
from tilewright.tile.kernel import Arguments, Grid, Kernel
from tilewright.tile.memory import TensorArgument
from tilewright.tile.passes.written import written_params
from tilewright.tune.kernel_space import KernelSpace
from tilewright.tune.kernel_tunable import Launched, LaunchFacts, TunableKernel, template_of

CPU_OPTIONS = ("threads",)


class LaunchedKernel(Launched, Protocol):
    """The interface that a tuned kernel needs of a tile kernel, or of one of Triton."""

    language: str

    @property
    def bundle(self) -> Bundle:
        """Its source, for other processes."""

    @property
    def parameters(self) -> Sequence[Parameter]: ...

    def options(self, kind: str) -> tuple[str, ...]:
        """Knobs that are options of a launch on this kind of device."""

    def bind(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name, defaults included."""

    def describe(self, bound: Mapping[str, Any]) -> tuple[Arguments, str]:
        """A description of the arguments, and the kind of the tensors' device."""

    def grid_of(self, grid: Any, bound: Mapping[str, Any]) -> Grid3: ...

    def launch(self, grid: Any, bound: Mapping[str, Any], options: Mapping[str, Any], **how: Any) -> None: ...

    def written(self, launch: LaunchFacts, config: Config) -> set[str]:
        """Names of parameters that it stores to; others may be among them."""


@dataclass(frozen=True, eq=False)
class LaunchedTile:
    """A tile kernel as something to launch."""

    kernel: Kernel
    language = "tile"

    @property
    def name(self) -> str:
        return self.kernel.source.name

    @property
    def parameters(self) -> Sequence[Parameter]:
        return self.kernel.source.parameters

    def options(self, kind: str) -> tuple[str, ...]:
        return CPU_OPTIONS if kind == "cpu" else GPU_OPTIONS

    def toolchain(self) -> str | None:
        return None

    def bind(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return self.kernel.bind((), given)

    def describe(self, bound: Mapping[str, Any]) -> tuple[Arguments, str]:
        return self.kernel.describe(bound)

    def grid_of(self, grid: Grid, bound: Mapping[str, Any]) -> Grid3:
        return self.kernel.grid_of(grid, bound)

    def launch(self, grid: Grid, bound: Mapping[str, Any], options: Mapping[str, Any], **how: Any) -> None:
        self.kernel[grid](options=options, **how, **bound)

    def written(self, launch: LaunchFacts, config: Config) -> set[str]:
        program = self.kernel.specialise(_types(launch), {**launch.constants, **_knobs(launch, config)})
        return set(written_params(program))

    @cached_property
    def bundle(self) -> Bundle:
        return bundle_of(self.kernel.function)

    @cached_property
    def source(self) -> str:
        return self.bundle.fingerprint

    def terms(
        self, launch: LaunchFacts, config: Config, machine: Machine
    ) -> tuple[Counted, dict[str, float]]:
        counts = counted_launch(self.kernel, launch, config)
        options = {name: value for name, value in config.values if name in launch.options}
        return tile_terms(counts, machine, options), counts.features()


def counted_launch(kernel: Kernel, launch: LaunchFacts, config: Config) -> TileCounts:
    """The counts of a launch with a config. Raises TilewrightError if the kernel cannot be compiled for it."""
    program = kernel.specialise(_types(launch), {**launch.constants, **_knobs(launch, config)})
    return count_tiles(program, launch.scalars, launch.grid(launch, config), launch.tensor_bytes)


def _types(launch: LaunchFacts) -> dict[str, Any]:
    from tilewright.tile.frontend.builder import literal_type

    tensors: dict[str, Any] = {
        name: TileType(Pointer(DType.parse(dtype))) for name, dtype in launch.dtypes.items()
    }
    return tensors | {name: TileType(literal_type(value)) for name, value in launch.scalars.items()}


def _knobs(launch: LaunchFacts, config: Config) -> dict[str, Any]:
    return {name: value for name, value in config.values if name not in launch.options}


@dataclass(frozen=True)
class Shaped:
    """Stands for a tensor in the function of a grid, where only the sizes of the tensor are known."""

    shape: tuple[int, ...]

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class LaunchCall:
    """One call of a tuned kernel: everything but its config. `elsewhere`: the machine that it is tuned for, where that
    is not the one that holds its tensors."""

    launched: LaunchedKernel
    knobs: KernelSpace
    grid: Grid
    bound: dict[str, Any]  # arguments by name, without the knobs
    key: tuple[str, ...]
    reference: Callable[..., Any] | None = None
    tolerance: float | None = None
    elsewhere: Machine | None = None
    files: list[DataFile] = field(default_factory=list)

    @cached_property
    def _described(self) -> tuple[Any, str]:
        return self.launched.describe({**self._placeholders, **self.bound})

    @property
    def _placeholders(self) -> dict[str, Any]:
        """Values of knobs, for what does not depend on them."""
        return {
            parameter.name: None for parameter in self.launched.parameters if parameter.name not in self.bound
        }

    @property
    def kind(self) -> str:
        """The kind of the machine that it runs on."""
        return self._described[1] if self.elsewhere is None else self.elsewhere.kind

    @cached_property
    def machine(self) -> Machine:
        if self.elsewhere is not None:
            return self.elsewhere
        return host() if self.kind == "cpu" else detect(0)

    @cached_property
    def options(self) -> tuple[str, ...]:
        known = self.launched.options(self.kind)
        return tuple(name for name in self.knobs.names if name in known)

    @cached_property
    def facts(self) -> LaunchFacts:
        arguments = self._described[0]
        constants = {name: value for name, value in arguments.constants.items() if name in self.bound}
        shapes = {tensor.name: tuple(tensor.shape) for tensor in arguments.tensors}
        dtypes = {tensor.name: tensor.dtype.short for tensor in arguments.tensors}
        key = {
            name: shapes[name] if name in shapes else arguments.scalars.get(name, constants.get(name))
            for name in self.key
        }
        return LaunchFacts(
            key, dict(arguments.scalars), shapes, dtypes, constants, self.options, self._grid_of_facts
        )

    def tunable(self) -> TunableKernel:
        parameters = {parameter.name for parameter in self.launched.parameters}
        kept = [name for name in self.knobs.names if name in parameters or name in self.options]
        plain = {**self.facts.scalars, **self.facts.constants, **self._shaped(self.facts)}
        space = self.knobs.space(template_of(self.launched), plain, kept)
        threads = resolve_threads(None) if self.kind == "cpu" else 0
        return TunableKernel(self.launched, self.facts, space, self.machine, threads, self._job)

    def _shaped(self, facts: LaunchFacts) -> dict[str, Any]:
        return {name: Shaped(shape) for name, shape in facts.shapes.items()}

    def _grid_of_facts(self, facts: LaunchFacts, config: Config) -> Grid3:
        bound = {**self._shaped(facts), **facts.scalars, **facts.constants, **_knobs(facts, config)}
        return self.grid_sizes(bound)

    def grid_sizes(self, bound: Mapping[str, Any]) -> Grid3:
        """Raise AutotuneError if the user's function of the grid fails."""
        try:
            return self.launched.grid_of(self.grid, bound)
        except TilewrightError:
            raise
        except Exception as error:
            raise AutotuneError(
                f"the grid of {self.launched.name} failed: {type(error).__name__}: {error}",
                remedy="the function of the grid gets all arguments by name; of tensors it may ask their shape",
            ) from error

    # -- for the processes that measure -------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove the files of jobs."""
        while self.files:
            self.files.pop().close()

    def _job(self, tunable: TunableKernel) -> KernelJob:
        file = DataFile()
        self.files.append(file)
        arguments = self._described[0]
        regions, tensors = _stored_tensors(file, arguments.tensors, self.bound, self._described[1])
        start = tunable.start.config
        expected = self._expected(file, start)
        spec = KernelSpec(
            self.launched.language,
            self.launched.bundle,
            self.kind,
            to_text(self.machine),
            tunable.threads,
            file.path,
            file.finish(),
            regions,
            tensors,
            tuple(self.facts.scalars.items()),
            tuple(
                (name, constant_reference(value, f"`{name}`")) for name, value in self.facts.constants.items()
            ),
            self.options,
            self._trusted(tunable),
            self._grid_of_facts(self.facts, self._trusted(tunable)),
            expected,
            self.tolerance,
        )
        return KernelJob(spec, lambda config: self.grid_sizes({**self.bound, **_knobs(self.facts, config)}))

    def _trusted(self, tunable: TunableKernel) -> Config:
        """Without a reference: the user's first choice of each knob says what the kernel computes."""
        return tunable.space.default()

    def _expected(self, file: DataFile, start: Config) -> tuple[StoredArray, ...]:
        if self.reference is None:
            return ()
        written = self.launched.written(self.facts, start)
        names = [name for name in self.facts.shapes if name in written]
        found = reference_results(self.reference, self.bound, names, self.launched.name)
        for name, values in found.items():
            if values.shape != self.facts.shapes[name]:
                raise ReferenceMismatchError(
                    f"the reference of {self.launched.name} returns shape {list(values.shape)} for `{name}`, whose"
                    f" shape is {list(self.facts.shapes[name])}",
                    where=location_of(self.reference),
                )
        return tuple(file.store(name, values) for name, values in found.items())


def reference_results(
    reference: Callable[..., Any], bound: Mapping[str, Any], names: list[str], kernel: str
) -> dict[str, np.ndarray]:
    """The contents of these tensors after the launch, computed by a user's function."""
    copies = {name: _copied(value) for name, value in bound.items()}
    parameters = inspect.signature(reference).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    wanted = list(copies) if takes_all else [each.name for each in parameters if each.name in copies]
    missing = [
        each.name
        for each in parameters
        if each.name not in copies and each.default is each.empty and each.kind is not each.VAR_KEYWORD
    ]
    if missing:
        raise AutotuneError(
            f"the reference of {kernel} takes `{missing[0]}`, which is a knob or not a parameter of the kernel",
            remedy=f"use some of {', '.join(copies)}",
        )
    where = location_of(reference)
    try:
        result = reference(**{name: copies[name] for name in wanted})
    except Exception as error:
        raise ReferenceMismatchError(
            f"the reference of {kernel} failed: {type(error).__name__}: {error}", where=where
        ) from error
    if result is None:  # it stores into its arguments, as the kernel does
        result = {name: copies[name] for name in names}
    elif not isinstance(result, Mapping):
        several = result if isinstance(result, tuple | list) else (result,)
        if len(several) != len(names):
            raise ReferenceMismatchError(
                f"the reference of {kernel} returns {len(several)} arrays, and the kernel stores to {', '.join(names)}",
                where=where,
                remedy="return one array for each, in the order of the kernel's parameters, or a dict by name",
            )
        result = dict(zip(names, several, strict=True))
    unknown = [name for name in result if name not in names]
    if unknown:
        raise ReferenceMismatchError(
            f"the reference of {kernel} returns `{unknown[0]}`, and the kernel stores to {', '.join(names)}",
            where=where,
        )
    return {name: _as_numpy(value) for name, value in result.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.clone() if hasattr(value, "clone") else value


def _as_numpy(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
        value = value.numpy()
    return np.asarray(value)


def _stored_tensors(
    file: DataFile, tensors: list[TensorArgument], bound: Mapping[str, Any], kind: str
) -> tuple[tuple[MemoryRegion, ...], tuple[KernelTensor, ...]]:
    """Those that share bytes lie in one region."""
    regions: list[MemoryRegion] = []
    stored: dict[str, KernelTensor] = {}
    group: list[TensorArgument] = []
    ordered = sorted(tensors, key=lambda each: each.extent)

    def finish() -> None:
        if not group:
            return
        low = group[0].extent[0]
        high = max(each.extent[1] for each in group)
        data = bytes_at(low, high - low) if kind == "cpu" else _from_device(group, bound, low, high)
        offset = file.add(data)
        for each in group:
            stored[each.name] = KernelTensor(
                each.name,
                each.dtype.short,
                tuple(each.shape),
                tuple(each.strides),
                len(regions),
                each.address - low,
            )
        regions.append(MemoryRegion(offset, high - low, low % ALIGNMENT))
        group.clear()

    end = -1
    for tensor in ordered:
        low, high = tensor.extent
        if low >= end:
            finish()
        group.append(tensor)
        end = max(end, high)
    finish()
    return tuple(regions), tuple(stored[tensor.name] for tensor in tensors)


def _from_device(group: list[TensorArgument], bound: Mapping[str, Any], low: int, high: int) -> np.ndarray:
    """Bytes of a region of a GPU's memory. Views of one tensor share its storage."""
    import torch

    value = bound[group[0].name]
    storage = value.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
    begin = low - storage.data_ptr()
    return np.asarray(flat[begin : begin + high - low].cpu().numpy())
