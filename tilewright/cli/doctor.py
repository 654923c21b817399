"""`tilewright doctor`: check whether Tilewright works well on this machine, and show every option with its value.

OK it is as it should be note something optional is missing or was not measured: nothing is wrong PROBLEM it will
fail, be slow or be ignored, with what to try; the exit code is 1
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tilewright
from tilewright import knobs
from tilewright.cli.options import JSON
from tilewright.cli.output import console, print_json, print_table, working
from tilewright.errors import TilewrightError
from tilewright.support.suggest import did_you_mean

if TYPE_CHECKING:
    from tilewright.hw import CpuMachine
    from tilewright.hw.gpu import GpuMachine
    from tilewright.measure.calibration import Calibration, Speeds

OK, NOTE, PROBLEM = "OK", "note", "PROBLEM"

# package -> what it is for, and the extra that installs it; "" if it is always installed
_PACKAGES = {
    "numpy": ("", ""),
    "llvmlite": ("", ""),
    "ml_dtypes": ("", ""),
    "msgspec": ("", ""),
    "lightgbm": ("tuning learns from its trials", "tune"),
    "torch": ("compiling PyTorch models", "torch"),
    "onnx": ("compiling ONNX models", "onnx"),
    "cuda-bindings": ("NVIDIA GPUs", "cuda"),
    "jinja2": ("tilewright report", "cli"),
}


@dataclass(frozen=True)
class Diagnosis:
    """One line of the output."""

    verdict: str
    name: str
    text: str
    remedy: str = ""


def doctor(
    json: JSON = False,
    measure: Annotated[
        bool, typer.Option(help="measure peak FLOP/s, bandwidth and caches (about 15 seconds)")
    ] = True,
) -> None:
    """Check this machine, the thread runtime, the libraries, the cache, and every option, with a verdict for each."""
    facts: dict[str, Any] = {}
    findings = []
    if not json:
        console.print(f"[bold]Tilewright {tilewright.__version__}[/], Python {platform.python_version()}")
    for finding in examine(facts, measure=measure, quiet=json):
        findings.append(finding)
        if not json:
            _show(finding)
    problems = sum(finding.verdict == PROBLEM for finding in findings)
    if json:
        print_json({**facts, "findings": [asdict(each) for each in findings], "ok": problems == 0})
    else:
        _show_options(facts["options"])
        console.print()
        console.print(f"[bold red]{problems} problem(s)[/]" if problems else "[bold green]no problems[/]")
    if problems:
        raise typer.Exit(1)


def examine(facts: dict[str, Any], *, measure: bool, quiet: bool = True) -> Iterator[Diagnosis]:
    """Yield findings as they are made; the numbers behind them go into `facts`."""
    facts.update(
        tilewright=tilewright.__version__, python=platform.python_version(), platform=platform.platform()
    )
    yield _platform()
    yield from _environment(facts)
    yield from _libraries(facts)
    for part, name in (
        (_processor, "CPU"),
        (_threads, "threads"),
        (_cache, "cache"),
        (_database, "database"),
    ):
        yield from _guarded(part, name, facts)
    yield from _guarded(lambda facts: _calibration(facts, measure=measure, quiet=quiet), "speed", facts)
    with working("looking for a GPU", quiet or not measure):
        yield _gpu(facts, measure=measure)


def _guarded(
    part: Callable[[dict[str, Any]], Iterator[Diagnosis]], name: str, facts: dict[str, Any]
) -> Iterator[Diagnosis]:
    """Yield the findings of one part. An error in it becomes a problem, and the other parts still run."""
    try:
        yield from part(facts)
    except TilewrightError as error:
        yield Diagnosis(PROBLEM, name, error.message, error.remedy)


def _platform() -> Diagnosis:
    system, machine = platform.system(), platform.machine()
    if (system, machine) == ("Linux", "x86_64"):
        return Diagnosis(OK, "platform", platform.platform())
    return Diagnosis(NOTE, "platform", f"{platform.platform()}: tested only on Linux, x86-64")


def _environment(facts: dict[str, Any]) -> Iterator[Diagnosis]:
    """Report variables that set an option, those with an invalid value, and those that set nothing."""
    known = {option.variable for option in knobs.OPTIONS}
    unknown = sorted(name for name in os.environ if name.startswith("TILEWRIGHT_") and name not in known)
    for name in unknown:
        remedy = did_you_mean(name, known) or f"unset {name}"
        yield Diagnosis(
            PROBLEM, "environment", f"{name} is not an option of Tilewright and is ignored", remedy
        )
    states = []
    for option in knobs.OPTIONS:
        try:
            states.append(asdict(knobs.state(option)))
        except TilewrightError as error:
            yield Diagnosis(PROBLEM, "environment", error.message, f"unset {option.variable}, or correct it")
    facts["options"] = [{"from" if key == "source" else key: state[key] for key in state} for state in states]
    given = [state["variable"] for state in states if state["source"] == "environment"]
    if not unknown and len(states) == len(knobs.OPTIONS):
        yield Diagnosis(OK, "environment", f"sets {', '.join(given)}" if given else "sets no option")


def _libraries(facts: dict[str, Any]) -> Iterator[Diagnosis]:
    facts["libraries"] = found = {name: _version(name) for name in _PACKAGES}
    present = [f"{name} {installed}" for name, installed in found.items() if installed]
    missing = [name for name, (purpose, _) in _PACKAGES.items() if not purpose and found[name] is None]
    for name in missing:
        yield Diagnosis(PROBLEM, "libraries", f"{name} is not installed", f"pip install {name}")
    yield Diagnosis(OK, "libraries", ", ".join(present))
    for name, (purpose, extra) in _PACKAGES.items():
        if purpose and found[name] is None:
            yield Diagnosis(
                NOTE, "libraries", f"no {name}, for: {purpose}", f"pip install 'tilewright[{extra}]'"
            )


def _processor(facts: dict[str, Any]) -> Iterator[Diagnosis]:
    from tilewright.hw import host

    machine = host()
    facts["machine"] = {
        "cpu": machine.cpu,
        "triple": machine.triple,
        "vector_bits": machine.vector_bytes * 8,
        "vector_registers": machine.vector_registers,
        "fused_multiply_add": machine.has_fma,
        "cores": machine.cores,
        "caches": asdict(machine.caches),
        "features": list(machine.features),
    }
    text = f"{machine.cpu}: {machine.vector_bytes * 8}-bit vectors, {machine.cores} core(s)"
    if machine.has_fma:
        yield Diagnosis(OK, "CPU", f"{text}, FMA")
    else:
        yield Diagnosis(NOTE, "CPU", f"{text}, no FMA: matmuls and convolutions run at half speed or less")


def _threads(facts: dict[str, Any]) -> Iterator[Diagnosis]:
    from tilewright.runtime import threads

    facts["threads"] = found = threads.describe()
    runtime = "Tilewright's thread pool" if found["runtime"] == "pool" else f"OpenMP ({found['library']})"
    text = f"{found['threads']}, {runtime}: {found['why']}"
    if found["threads"] > found["usable_cores"]:
        remedy = f"set TILEWRIGHT_THREADS to at most {found['usable_cores']}"
        yield Diagnosis(
            PROBLEM, "threads", f"{text}; more than the {found['usable_cores']} usable core(s)", remedy
        )
    else:
        yield Diagnosis(OK, "threads", text)


def _cache(facts: dict[str, Any]) -> Iterator[Diagnosis]:
    from tilewright.codegen.cache import ObjectCache

    cache = ObjectCache.default()
    facts["cache"] = {"folder": str(cache.folder), "bytes": cache.size_bytes(), "limit": cache.limit_bytes}
    existing = next(each for each in (cache.folder, *cache.folder.parents) if each.exists())
    if not os.access(existing, os.W_OK):
        remedy = "set TILEWRIGHT_CACHE_DIR to a folder that you own and can write"
        yield Diagnosis(
            PROBLEM, "cache", f"{cache.folder} cannot be written: kernels are built every time", remedy
        )
        return
    yield Diagnosis(OK, "cache", f"{cache.folder}: {size(cache.size_bytes())} of {size(cache.limit_bytes)}")


def _database(facts: dict[str, Any]) -> Iterator[Diagnosis]:
    from tilewright.db.location import default_path

    path = default_path()
    facts["database"] = {"path": str(path), "bytes": path.stat().st_size if path.exists() else 0}
    if path.exists():
        yield Diagnosis(OK, "database", f"{path}: {size(path.stat().st_size)}")
    else:
        yield Diagnosis(NOTE, "database", "nothing was tuned here yet", "tilewright tune MODEL")


def _calibration(facts: dict[str, Any], *, measure: bool, quiet: bool) -> Iterator[Diagnosis]:
    import msgspec

    from tilewright.hw import host
    from tilewright.measure.calibration import calibration_for

    machine = host()
    if measure:
        from tilewright.measure.calibrate import calibrate

        with working("measuring peak FLOP/s, bandwidth and caches (about 15 seconds)", quiet):
            found = calibrate(machine)
    else:
        found = calibration_for(machine)
    facts["calibration"] = msgspec.to_builtins(found)
    yield from calibration_findings(machine, found)


def calibration_findings(machine: CpuMachine, found: Calibration) -> Iterator[Diagnosis]:
    """Report cache sizes, as the system and the measurement give them, then the speed of one thread and of all."""
    verdict = OK if found.measured else NOTE
    sizes = []
    for level in ("l1", "l2", "l3"):
        measured, said = getattr(found.capacities, level), getattr(machine.caches, level)
        remark = "" if measured == said else f" (the system says {size(said)})"
        sizes.append(f"{level.upper()} {size(measured)}{remark}" if measured else f"no {level.upper()}")
    yield Diagnosis(verdict, "caches", ", ".join(sizes))
    for speeds in (found.one, found.all) if found.all.threads > 1 else (found.one,):
        yield Diagnosis(verdict, "speed", _speeds(speeds))
    if not found.measured:
        yield Diagnosis(NOTE, "speed", "not calibrated; these rates are assumed", "tilewright doctor")
    elif found.share < _least_share():
        text = (
            f"other work was running ({found.share:.0%} of the CPU was left to this measurement): these results are"
            " not kept"
        )
        yield Diagnosis(NOTE, "speed", text, "tilewright doctor, when the machine is idle")


def _least_share() -> float:
    from tilewright.measure.calibrate import MIN_SHARE

    return MIN_SHARE


def _speeds(speeds: Speeds) -> str:
    return (
        f"{speeds.threads} thread(s): {speeds.flops / 1e9:.0f} GFLOP/s fp32, {speeds.memory / 1e9:.1f} GB/s read, "
        f"{speeds.copy / 1e9:.1f} GB/s copy; L1, L2, L3: {speeds.l1 / 1e9:.0f}, {speeds.l2 / 1e9:.0f}, "
        f"{speeds.l3 / 1e9:.0f} GB/s"
    )


def _gpu(facts: dict[str, Any], *, measure: bool) -> Diagnosis:
    """Report the first GPU and its speed, or why models cannot run on one."""
    from tilewright.hw.gpu import detect

    try:
        machine = detect()
    except TilewrightError as error:
        facts["gpu"] = f"none: {error.message}"
        return Diagnosis(NOTE, "GPU", f"none: {error.message}")
    text = f"{machine.describe()}; {gpu_speed(machine, measure=measure)}"
    facts["gpu"] = text
    return Diagnosis(PROBLEM if "measuring it failed" in text else OK, "GPU", text)


def gpu_speed(machine: GpuMachine, *, measure: bool) -> str:
    """Report a GPU's measured speed, or that it was not measured."""
    from tilewright.measure import gpu_calibration
    from tilewright.runtime.cuda.device import Device

    failure, found = "", gpu_calibration.stored(machine)
    if measure:
        try:
            found = gpu_calibration.calibrate(machine, Device())  # may not be able to store its result
        except TilewrightError as error:
            failure = f"measuring it failed: {error.message}; "
    if found is None:
        return f"{failure}not calibrated; using data-sheet values"
    rates = f"{found.copy / 1e9:.0f} GB/s copy, {found.products / 1e12:.0f} TFLOP/s fp16 by mma.sync"
    return f"{failure}{rates}{' (of an earlier run)' if failure else ''}"


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def size(count: int) -> str:
    """`2 GiB`, `512 KiB`"""
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= bytes_:
            return f"{count / bytes_:.3g} {unit}"
    return f"{count / 2**10:.3g} KiB"


def _show(finding: Diagnosis) -> None:
    from rich.markup import escape

    style = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}[finding.verdict]
    text = f"{finding.text}; try: {finding.remedy}" if finding.remedy else finding.text
    console.print(f"[{style}]{finding.verdict:<8}[/] {finding.name:<12} {escape(text)}", soft_wrap=True)


def _show_options(options: list[dict[str, Any]]) -> None:
    console.print()
    rows = [
        (
            each["variable"],
            size(each["value"]) if each["type"] == "bytes" else str(each["value"]),
            each["from"],
        )
        for each in options
    ]
    print_table("Options", ("variable", "value", "from"), rows, left=(0, 1, 2), clipped=(1,))
