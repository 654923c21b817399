"""The options of `torch.compile(model, backend="tilewright", options={...})`, checked before anything is compiled."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch._dynamo.exc import ShortenTraceback

from tilewright import driver
from tilewright.errors import LockError, OptionError, TilewrightError
from tilewright.frontend import ImportedModel
from tilewright.hw import CpuMachine
from tilewright.hw.gpu import GpuMachine
from tilewright.runtime.model import CompiledModel
from tilewright.targets.options import CompileOptions
from tilewright.tune.lock import Lock, check_lockable, read_lock, write_lock


class BackendOptionError(OptionError, ShortenTraceback):
    """An unknown option of the backend, or an invalid value. It derives from one of Dynamo's errors, so that it
    reaches the caller unchanged, without advice to report a PyTorch bug."""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        self.message = message
        self.remedy = type(self).remedy if remedy is None else remedy
        ShortenTraceback.__init__(self, f"{message}\n  try: {self.remedy}", first_useful_frame=None)


@dataclass(frozen=True)
class Options(CompileOptions):
    """The options of `tilewright.compile`, and some of the backend's own. `budget` is for each graph and size, and all
    graphs share `lock`."""

    freeze: bool = True  # whether parameters and buffers are constants
    variants: int = 16  # maximum compiled sizes per graph
    fallback: bool = True  # False: internal failures and unsupported operators are errors
    observe: Callable[[Any], None] | None = None  # receives the outcome of each graph

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> Options:
        """Parse the options; raises BackendOptionError for unknown ones."""
        known = [field.name for field in fields(Options)]
        unknown = sorted(set(given or {}) - set(known))
        if unknown:
            raise BackendOptionError(
                f"the torch.compile backend has no option {', '.join(map(repr, unknown))}",
                remedy=f"use one of {', '.join(known)}",
            )
        options = Options(**(given or {}))
        try:
            options.check()
        except TilewrightError as error:
            raise BackendOptionError(error.message, remedy=error.remedy) from None
        return options

    def check(self) -> None:
        super().check()
        if isinstance(self.variants, bool) or not isinstance(self.variants, int) or self.variants < 1:
            raise OptionError(f"variants={self.variants!r} must be a whole number, 1 at least")
        for name in ("freeze", "fallback"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}={getattr(self, name)!r} must be True or False")
        if isinstance(self.target, GpuMachine):
            raise OptionError(
                "a described GPU is not here, and torch.compile runs what it compiles",
                remedy='pass target="cuda", or compile for it with tilewright.compile and save that',
            )
        if self.lock is not None:
            _lock_files.begin(Path(self.lock))

    def target_for(self, device: str) -> str | CpuMachine:
        """The target for tensors of `device` ("cpu", "cuda:1")."""
        if self.target is None:
            return device
        described = self.target if isinstance(self.target, CpuMachine) else None
        if device != "cpu" if described else self.target not in (device, device.partition(":")[0]):
            raise BackendOptionError(
                f"target={self.target!r}, and the tensors of the graph are on {device}",
                remedy="move the model and its inputs there, or leave `target` out",
            )
        return described or device

    def compiled(self, model: ImportedModel, device: str) -> CompiledModel:
        def build(lock: Path | None) -> CompiledModel:
            options = replace(self, target=self.target_for(device), lock=lock)
            with options.resolved(model) as settings:
                return driver.run_pipeline(model, settings)

        return build(None) if self.lock is None else _lock_files.compiled(Path(self.lock), build)


class _LockFiles:
    """Lock files that several graphs share. A file that exists when this process first uses it is obeyed; otherwise
    it is written, graph by graph, and later processes obey it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._obeyed: dict[Path, bool] = {}

    def begin(self, path: Path) -> None:
        path = path.absolute()
        with self._guard:
            if path not in self._obeyed:
                self._obeyed[path] = path.exists()
        if not self._obeyed[path]:
            check_lockable(path)

    def compiled(self, path: Path, build: Callable[[Path], CompiledModel]) -> CompiledModel:
        path = path.absolute()
        if self._obeyed[path]:
            return build(path)
        with tempfile.TemporaryDirectory() as folder:
            own = Path(folder) / "own.lock"
            model = build(own)
            made = read_lock(own)
        if made is not None:
            with self._guard:
                _add(path, made)
        return model


def _add(path: Path, made: Lock) -> None:
    kept = read_lock(path)
    if kept is not None and kept.numerics != made.numerics:
        raise LockError(f"{path} is of numerics={kept.numerics!r}, and this graph has {made.numerics!r}")
    tasks = made.tasks if kept is None else {**made.tasks, **kept.tasks}
    write_lock(path, Lock(made.format, made.numerics, tasks))


_lock_files = _LockFiles()
