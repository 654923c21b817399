"""Find the target of a model: the one that was named, or the device of its tensors."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tilewright.errors import MixedDevicesError, OptionError, TargetError
from tilewright.hw import CpuMachine, host
from tilewright.hw.gemmini import GemminiMachine
from tilewright.hw.gemmini_system import GemminiSystem
from tilewright.hw.gpu import GpuMachine, of_capability
from tilewright.runtime.arguments import CallArguments
from tilewright.support.plugins import entry_points
from tilewright.support.suggest import did_you_mean
from tilewright.targets.cpu import CpuTarget
from tilewright.targets.cuda import CudaTarget
from tilewright.targets.gemmini import GemminiTarget
from tilewright.targets.target import Target

ENTRY_POINTS = "tilewright.targets"

_SYNONYMS = {"gpu": "cuda"}  # other names for a target


def canonical(target: str) -> str:
    """`"gpu:1"` -> `"cuda:1"`"""
    kind, colon, number = target.partition(":")
    return f"{_SYNONYMS.get(kind, kind)}{colon}{number}"


Factory = Callable[[int], Target]  # the argument is the device number: 1 in "cuda:1"

_NAMED: dict[str, Factory] = {
    "cpu": lambda ordinal: CpuTarget(host()),
    "cuda": CudaTarget.of_card,
}


def register(name: str, factory: Factory) -> None:
    """Register a target under a name for `compile(target=...)`. Packages can also use an entry point of the group
    `tilewright.targets`. Raises OptionError if the name is taken."""
    if name in _NAMED or not name.isidentifier():
        raise OptionError(
            f"a target cannot be called {name!r}", remedy="choose another name, of letters and digits"
        )
    _NAMED[name] = factory


def unregister(name: str) -> None:
    _NAMED.pop(name, None)


def _factory(kind: str) -> Factory | None:
    if kind not in _NAMED and kind in entry_points(ENTRY_POINTS):
        _NAMED[kind] = entry_points(ENTRY_POINTS)[kind].load()
    return _NAMED.get(kind)


def resolve_target(
    target: str | CpuMachine | GpuMachine | GemminiMachine | Target | None, *models: Any
) -> Target:
    """Return the target. `models` are models, example inputs, or containers of these; their tensors decide if
    `target` is None."""
    if isinstance(target, CpuMachine):
        return CpuTarget(target)
    if isinstance(target, GpuMachine):
        return CudaTarget.described(target)
    if isinstance(target, GemminiMachine):
        return GemminiTarget(GemminiSystem(host(), target))
    if target is not None and not isinstance(target, str):
        return target
    devices = set(_devices(models))
    if target is None:
        if len(devices) > 1:
            raise MixedDevicesError(
                f"the model and its example inputs are on different devices: {_listed(devices)}"
            )
        target = next(iter(devices), ("cpu", 0))[0]
    kind, _, number = canonical(target).partition(":")
    if kind == "gemmini":
        return GemminiTarget.named(number)
    if described := re.fullmatch(r"sm_(\d+)(\d)a?", target):
        major, minor = int(described[1]), int(described[2])
        return CudaTarget.described(of_capability(f"a GPU called {target}", major, minor))
    factory = _factory(kind)
    if factory is None or (number and not number.isdigit()):
        raise TargetError(
            f"target must be one of {', '.join(map(repr, _NAMED))}, 'gemmini' or a compute capability such as"
            f" 'sm_90', got {target!r}",
            remedy=did_you_mean(target, (*_NAMED, "gemmini", "sm_80", "sm_86", "sm_89", "sm_90")) or None,
        )
    numbers = {number for device, number in devices if device == kind}
    return factory(int(number) if number else min(numbers, default=0))


def _devices(values: Iterable[Any]) -> Iterator[tuple[str, int]]:
    """The (kind, number) of the device of each tensor in modules, exported programs and nested containers."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.device.type, value.device.index or 0
        elif isinstance(value, torch.nn.Module):
            yield from _devices([*value.parameters(), *value.buffers()])
        elif isinstance(value, torch.export.ExportedProgram):
            yield from _devices([*value.state_dict.values(), *value.constants.values()])
        elif isinstance(value, CallArguments):
            yield from _devices((value.args, value.kwargs))
        elif isinstance(value, dict):
            yield from _devices(value.values())
        elif isinstance(value, (tuple, list)):
            yield from _devices(value)


def _listed(devices: set[tuple[str, int]]) -> str:
    return " and ".join(kind if kind == "cpu" else f"{kind}:{number}" for kind, number in sorted(devices))
