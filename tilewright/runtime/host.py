"""The features of this machine's CPU, by LLVM's names, without those that TILEWRIGHT_CPU_FEATURES removes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tilewright import knobs
from tilewright.errors import ArtifactMachineError

# The features of each level of TILEWRIGHT_CPU_FEATURES: those of the x86-64 ABI levels (none, v3 and v4), so that an
# artifact made at a level loads on every processor of that level.
_BASELINE = frozenset({"64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2", "x87"})
_AVX2 = _BASELINE | {
    *("avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sahf"),
    *("sse3", "ssse3", "sse4.1", "sse4.2", "xsave"),
}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "evex512"}
LEVELS = {"avx512": _AVX512, "avx2": _AVX2, "baseline": _BASELINE}

# Intel's cores with AMX, by LLVM's names, the oldest first.
_WITH_AMX = ("sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d", "diamondrapids")


@lru_cache(maxsize=1)
def triple() -> str:
    import llvmlite.binding as llvm

    return str(llvm.get_process_triple())


@lru_cache(maxsize=1)
def cpu_name() -> str:
    import llvmlite.binding as llvm

    return corrected_name(str(llvm.get_host_cpu_name()), _detected())


def corrected_name(name: str, features: frozenset[str]) -> str:
    """LLVM's name of a core, corrected by its features: LLVM goes by the model number, which a hypervisor may change.
    A server core would then have the throughput of a client core, half its own."""
    return _WITH_AMX[0] if "amx-tile" in features and name not in _WITH_AMX else name


@lru_cache(maxsize=1)
def _detected() -> frozenset[str]:
    import llvmlite.binding as llvm

    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


def features() -> frozenset[str]:
    """The features that code generated or loaded here may use."""
    found = _detected()
    for item in knobs.get("cpu_features"):
        level = LEVELS.get(item)
        if level is not None:
            found &= level
        else:
            found -= {item[1:]}
    return found


def check(target: dict[str, Any]) -> None:
    """Raise ArtifactMachineError, naming what is missing, unless this machine can run object code for `target`."""
    wanted, here = _platform(target["triple"]), _platform(triple())
    if wanted != here:
        raise ArtifactMachineError(
            f"the object code is for {' '.join(wanted)}, this machine is {' '.join(here)}"
        )
    needed = {feature.lstrip("+") for feature in target["features"] if not feature.startswith("-")}
    missing = sorted(needed - features())
    if missing:
        by_knob = needed <= _detected()
        why = "taken away by TILEWRIGHT_CPU_FEATURES" if by_knob else f"this machine is {cpu_name()}"
        raise ArtifactMachineError(
            f"the object code needs processor features that are not here: {', '.join(missing)} ({why})"
        )


def _platform(text: str) -> tuple[str, str]:
    """(architecture, operating system) of a triple, which decide whether object code can be loaded at all."""
    parts = text.lower().split("-")
    architecture = {"amd64": "x86_64", "arm64": "aarch64"}.get(parts[0], parts[0])
    systems = ("linux", "darwin", "macos", "windows", "freebsd")
    system = next((name for name in systems if name in text.lower()), parts[-1])
    return architecture, "darwin" if system == "macos" else system
