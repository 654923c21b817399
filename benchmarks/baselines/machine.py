"""The machine and the versions that a table of results belongs to."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path

import psutil

PACKAGES = ("tilewright", "torch", "onnxruntime", "openvino", "onnx", "llvmlite", "numpy")
FEATURES = ("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile",
            "amx_bf16", "amx_int8", "asimd", "asimddp", "sve")  # fmt: skip


def describe() -> dict[str, object]:
    model, flags = _cpu()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": model,
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "logical_cores": os.cpu_count(),
        "features": [name for name in FEATURES if name in flags],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _cpu() -> tuple[str, set[str]]:
    fields: dict[str, str] = {}
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    model = fields.get("model name") or platform.processor() or platform.machine()
    return model, set((fields.get("flags") or fields.get("Features") or "").split())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
