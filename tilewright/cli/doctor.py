"""`tilewright doctor`: what this machine is, what it can do, and every option with its value."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

import tilewright
from tilewright import knobs
from tilewright.cli.output import console, print_table
from tilewright.errors import TilewrightError
from tilewright.hw import host
from tilewright.hw.gpu import GpuMachine, detect
from tilewright.measure.calibrate import LEAST_SHARE, calibrate
from tilewright.measure.calibration import calibration_for
from tilewright.runtime import threads

_PACKAGES = (
    "numpy",
    "llvmlite",
    "msgspec",
    "safetensors",
    "ml_dtypes",
    "lightgbm",
    "torch",
    "onnx",
    "cuda-bindings",
)


def examine(*, measure: bool) -> dict[str, Any]:
    machine = host()
    calibration = calibrate(machine) if measure else calibration_for(machine)
    return {
        "tilewright": tilewright.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": {
            "cpu": machine.cpu,
            "triple": machine.triple,
            "vector_bits": machine.vector_bytes * 8,
            "vector_registers": machine.vector_registers,
            "fused_multiply_add": machine.has_fma,
            "cores": machine.cores,
            "caches": asdict(machine.caches),
            "features": list(machine.features),
        },
        "calibration": msgspec.to_builtins(calibration),
        "threads": threads.describe(),
        "gpu": _gpu(measure=measure),
        "libraries": {name: _version(name) for name in _PACKAGES},
        "cache": _cache(),
        "options": [
            {
                "name": state.name,
                "variable": state.variable,
                "value": state.value,
                "default": state.default,
                "from": state.source,
                "doc": state.doc,
            }
            for state in knobs.table()
        ],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu(*, measure: bool) -> str:
    """The first card and its speed; or why models cannot run on one."""
    try:
        machine = detect()
    except TilewrightError as error:
        return f"none: {error.message}"
    return f"{machine.describe()}; {_speed(machine, measure=measure)}"


def _speed(machine: GpuMachine, *, measure: bool) -> str:
    """What was measured of a card, now or before, or that nothing was."""
    from tilewright.measure import gpu_calibration
    from tilewright.runtime.cuda.device import Device

    failure, found = "", gpu_calibration.stored(machine)
    if measure:
        try:
            found = gpu_calibration.calibrate(machine, Device())  # which may find no place to be kept
        except TilewrightError as error:
            failure = f"measuring it failed: {error.message}; "
    if found is None:
        return f"{failure}as fast as it is described: nobody measured it"
    figures = f"{found.copy / 1e9:.0f} GB/s copy, {found.products / 1e12:.0f} TFLOP/s fp16 by mma.sync"
    return f"{failure}{figures}{' (of an earlier time)' if failure else ''}"


def _cache() -> dict[str, Any]:
    from tilewright.codegen.cache import ObjectCache

    cache = ObjectCache.default()
    return {"folder": str(cache.folder), "bytes": cache.size_bytes(), "limit": cache.limit_bytes}


def show_calibration(stated: dict[str, int], calibration: dict[str, Any]) -> None:
    """Cache sizes, where the system and the measurement differ both; then what all threads and one of them can do."""
    found = "measured" if calibration["measured"] else "assumed"
    sizes = []
    for level in ("l1", "l2", "l3"):
        size, said = calibration["capacities"][level], stated[level]
        remark = "" if size == said else f" (the system says {_size(said)})"
        sizes.append(f"{level.upper()} {_size(size)}{remark}" if size else f"no {level.upper()}")
    console.print("caches: " + ", ".join(sizes))
    one, every = calibration["one"], calibration["all"]
    for figures in (one, every) if every["threads"] > 1 else (one,):
        console.print(
            f"{found} on {figures['threads']} thread(s): {figures['flops'] / 1e9:.0f} GFLOP/s fp32, "
            f"{figures['memory'] / 1e9:.1f} GB/s read, {figures['copy'] / 1e9:.1f} GB/s copy; "
            f"from L1, L2, L3: {figures['l1'] / 1e9:.0f}, {figures['l2'] / 1e9:.0f}, {figures['l3'] / 1e9:.0f} GB/s"
        )
    if calibration["share"] < LEAST_SHARE:
        console.print(
            f"other work was running ({calibration['share']:.0%} of the processor came to this measurement): these"
            " figures are not kept; measure again when the machine is idle"
        )


def _size(count: int) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 1 << 20 else f"{count / 2**10:.3g} KiB"


def show(found: dict[str, Any]) -> None:
    machine = found["machine"]
    console.print(f"[bold]Tilewright {found['tilewright']}[/], Python {found['python']}, {found['platform']}")
    fma = "" if machine["fused_multiply_add"] else "no "
    console.print(
        f"{machine['cpu']}: {machine['vector_bits']}-bit vectors, {machine['vector_registers']} registers, "
        f"{fma}fused multiply-add, {machine['cores']} core(s)"
    )
    show_calibration(machine["caches"], found["calibration"])
    console.print("threads: " + ", ".join(f"{key} {value}" for key, value in found["threads"].items()))
    console.print(f"GPU: {found['gpu']}")
    cache = found["cache"]
    console.print(
        f"cache: {cache['folder']}, {cache['bytes'] / 2**20:.1f} of {cache['limit'] / 2**20:.0f} MiB\n"
    )
    print_table(
        "Libraries",
        ("package", "version"),
        [(k, v or "not installed") for k, v in found["libraries"].items()],
    )
    console.print()
    print_table(
        "Options",
        ("option", "variable", "value", "from"),
        [(o["name"], o["variable"], str(o["value"]), o["from"]) for o in found["options"]],
    )
