#!/usr/bin/env python3
"""Single operators on the CPU: Tilewright, NumPy (OpenBLAS), torch and ONNX Runtime on the same sizes, alternating.

    python benchmarks/cpu_ops.py                                       # everything: about an hour on two cores
    python benchmarks/cpu_ops.py --only gemm,attention --json ops.json --markdown ops.md
    python benchmarks/cpu_ops.py --quick                               # a few small sizes: does it work?

One process per system, through its Python interface; weights are constant, and whoever can rearrange them beforehand
may. The machine's own limit (a loop of FMAs, a sum over or a copy of a large array) takes turns like a
system, so an efficiency compares results of the same minutes. A result is the median over all turns. Each section
ends with the goals for Tilewright and what was reached. The exit status is 1 if a system failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from baselines import System
from baselines.interleaved import Seat, SystemError, fix_threads, run_interleaved
from baselines.job import load_arrays
from baselines.machine import describe
from cpu_models import BUSY_WHILE_IDLE, Absence, names_list, ratio, relative_error, say, summary
from operators import MACHINE, OURS, OURS_FP32, PREPARER, SYSTEMS
from operators.cases import SECTIONS, Case, OperatorJob, Options, Section
from operators.criteria import Criterion, criteria_of
from operators.results import OperatorResult

DOT_PRODUCTS = {
    "avx512_vnni": "AVX-512 VNNI: vpdpbusd, 64 products of bytes an instruction into exact 32-bit sums",
    "avx_vnni": "AVX-VNNI: vpdpbusd on 256 bits, 32 products of bytes an instruction into exact 32-bit sums",
    "amx_int8": "AMX: tiles of 16 x 64 bytes into exact 32-bit sums",
    "asimddp": "NEON sdot and udot: 16 products of bytes an instruction into exact 32-bit sums",
}
ABOVE_THE_LIMIT = 1.02  # a share that arithmetic alone cannot reach: it is explained or not believed
NO_DOT_PRODUCT = "no dot product of bytes that is exact: 16-bit FMAs are what remains"


# -- one case ---------------------------------------------------------------------------------------------------------


class Table:
    """The systems' processes: kept from case to case, started again after a death."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._seats: dict[str, Seat] = {}

    def load(self, system: System, job: OperatorJob) -> Seat:
        """Raises ContenderError."""
        seat = self._seats.get(system.name)
        if seat is None or not seat.alive:
            seat = self._seats[system.name] = Seat(system, None, self._timeout)
        seat.load(job)
        return seat

    def close(self) -> None:
        for seat in self._seats.values():
            if seat.alive:
                seat.close()


def measure(
    case: Case,
    section: Section,
    names: Sequence[str],
    table: Table,
    options: argparse.Namespace,
    folder: Path,
) -> OperatorResult:
    result = OperatorResult(case, section)
    folder.mkdir()
    job = OperatorJob(case, section.bound, options.threads, folder, options.effort, options.budget)
    seats: list[Seat] = []
    try:
        table.load(PREPARER, job)
        for name in names:
            try:
                seats.append(table.load(SYSTEMS[name], job))
            except SystemError as error:
                result.absences[name] = Absence(str(error), failed=error.available)
        failed = run_interleaved(seats, options.rounds, options.turn, options.gap) if seats else {}
    except SystemError as error:
        result.absences = {name: Absence(f"not prepared: {error}", failed=True) for name in names}
        return result
    for seat in seats:
        name = seat.system.name
        if name in failed:
            result.absences[name] = Absence(str(failed[name]), failed=True)
        elif name == MACHINE:
            result.timings[name] = summary(seat, 0.0)
            (count,) = load_arrays(job.outputs_file(name))[0]
            result.limit = float(count) / (result.timings[name].median_ms / 1000)
        else:
            other = name == OURS_FP32 and case.int8  # computes the same sizes on other numbers
            wrong = 0.0 if other else relative_error(job.outputs_file(name), job.reference_file)
            result.timings[name] = summary(seat, wrong)
    result.moved = int(load_arrays(job.moved_file)[0])
    shutil.rmtree(folder)  # hundreds of megabytes each
    return result


# -- tables -----------------------------------------------------------------------------------------------------------


def header(section: Section) -> list[str]:
    shown = [SYSTEMS[name].title for name in section.systems if name != MACHINE]
    limits = {"flops": "of the FMA peak", "read": "of read bandwidth", "copy": "of copy bandwidth"}
    limit = limits[section.bound] if MACHINE in section.systems else "of a limit"
    against = ["vs fp32"] if section.name == "int8" else []
    return [section.name, *shown, "GFLOP/s" if section.bound == "flops" else "GB/s", limit, "vs best baseline",
            *against, "error"]  # fmt: skip


def row(result: OperatorResult) -> list[str]:
    section = result.section
    cells = [result.case.name]
    for name in section.systems:
        if name == MACHINE:
            continue
        if name in result.timings:
            cells.append(f"{result.timings[name].median_ms:.3f}")
        else:
            absence = result.absences.get(name)
            cells.append("failed" if absence and absence.failed else "-")
    rate, efficiency = result.rate(OURS), result.efficiency
    cells.append("-" if rate is None else f"{rate / 1e9:.1f}")
    cells.append("-" if efficiency is None else f"{efficiency:.0%}")
    cells.append(ratio(result.speedup))
    if section.name == "int8":
        cells.append(ratio(result.over_fp32))
    cells.append(f"{result.timings[OURS].error:.1e}" if OURS in result.timings else "-")
    return cells


def remarks(result: OperatorResult) -> list[str]:
    position = f"{result.section.name} {result.case.name}"
    lines = [
        f"{position}, {SYSTEMS[name].title}: {'failed' if absence.failed else 'not available'}: {absence.reason}"
        for name, absence in result.absences.items()
    ]
    if (efficiency := result.efficiency) is not None and efficiency > ABOVE_THE_LIMIT:
        lines.append(
            f"{position}: {efficiency:.0%} of the limit: fewer operations than counted (Winograd, Strassen), data in a "
            "cache, or a limit that was disturbed"
        )
    return lines + [
        f"{position}, {SYSTEMS[name].title}: kept {timing.idle_share:.0%} of a core busy while the others ran"
        for name, timing in result.timings.items()
        if timing.idle_share > BUSY_WHILE_IDLE
    ]


def aligned(cells: Sequence[str]) -> str:
    return f"{cells[0]:<42}" + "".join(f"{cell:>19}" for cell in cells[1:])


def losses(results: Sequence[OperatorResult]) -> list[str]:
    """Where the best baseline is faster, the worst first."""
    lost = [(speedup, r) for r in results if (speedup := r.speedup) is not None and speedup < 1]
    return [
        f"{result.case.name}: {speedup:.2f}x of {SYSTEMS[result.best_baseline].title}"
        for speedup, result in sorted(lost, key=lambda pair: pair[0])
        if result.best_baseline
    ]


def conclusion(section: Section, results: Sequence[OperatorResult], about: dict[str, Any]) -> list[str]:
    lines = [str(criterion) for criterion in criteria_of(section.name, results)]
    if section.name == "int8":
        lines.append(f"this instruction set has {dot_products(about['features'])}")
    if lost := losses(results):
        lines.append(f"slower than the best baseline at {len(lost)} of {len(results)}: {'; '.join(lost)}")
    return lines


def dot_products(features: Sequence[str]) -> str:
    return "; ".join(text for name, text in DOT_PRODUCTS.items() if name in features) or NO_DOT_PRODUCT


def markdown(done: dict[str, list[OperatorResult]], about: dict[str, Any], method: str) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    lines = [
        f"{about['cpu']}, {about['cores']} cores ({', '.join(about['features'])}), {about['memory_gib']} GiB, "
        f"{about['system']}, load {about['load_average']} at the start, {about['date']}.",
        f"Python {about['python']}, {versions}.",
        method,
    ]
    for name, results in done.items():
        section = SECTIONS[name]
        cells = header(section)
        lines += ["", f"## {name}", "", "| " + " | ".join(cells) + " |", "|" + " --- |" * len(cells)]
        lines += ["| " + " | ".join(row(result)) + " |" for result in results]
        lines += ["", *(f"- {line}" for line in conclusion(section, results, about))]
        lines += [f"- {note}" for result in results for note in remarks(result)]
    return "\n".join(lines) + "\n"


def as_json(done: dict[str, list[OperatorResult]], about: dict[str, Any], method: str) -> str:
    def judged(criterion: Criterion) -> dict[str, Any]:
        return {**asdict(criterion), "met": criterion.met}

    data = {
        "machine": about,
        "method": method,
        "criteria": {name: [judged(c) for c in criteria_of(name, results)] for name, results in done.items()},
        "cases": [result.as_json() for results in done.values() for result in results],
    }
    return json.dumps(data, indent=2) + "\n"


# -- the command line -------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=names_list, default=list(SECTIONS), metavar="A,B",
                        help=f"sections among {','.join(SECTIONS)}")  # fmt: skip
    parser.add_argument("--systems", type=names_list, default=list(SYSTEMS), metavar="A,B",
                        help=f"among {','.join(SYSTEMS)}")  # fmt: skip
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--threads", type=int, default=2, help="the same for all (default: 2)")
    parser.add_argument("--rounds", type=int, help="turns for each system (default: 5; quick: 1)")
    parser.add_argument(
        "--turn", type=float, metavar="S", help="seconds of a turn (default: 0.3; quick: 0.02)"
    )
    parser.add_argument(
        "--gap", type=float, default=0.1, metavar="S", help="pause after a turn (default: 0.1)"
    )
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="for one answer of a system")
    parser.add_argument("--seed", type=int, default=2024, help="of the random sizes (default: 2024)")
    parser.add_argument(
        "--effort", default="none", help="effort of Tilewright: none, quick or full (default: none)"
    )
    parser.add_argument("--budget", type=float, metavar="S", help="seconds of tuning for each operator")
    parser.add_argument(
        "--quick", action="store_true", help="a few small sizes and short turns: a smoke test"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results here, after each section"
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the tables here, after each section"
    )
    options = parser.parse_args(argv)
    if unknown := [name for name in options.only if name not in SECTIONS]:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if unknown := [name for name in options.systems if name not in SYSTEMS]:
        parser.error(f"no system {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.turn = options.turn or (0.02 if options.quick else 0.3)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    fix_threads(options.threads)
    about = describe()
    method = (
        f"fp32, {options.threads} threads, effort {options.effort}, median milliseconds over {options.rounds} turns of "
        f"about {options.turn:g} s, one process per system; random sizes drawn with seed {options.seed}"
        f"{'; reduced sizes' if options.quick else ''}."
    )
    say(f"{about['cpu']}, {about['cores']} cores, load {about['load_average']}; {method}")
    done: dict[str, list[OperatorResult]] = {}
    table = Table(options.timeout)
    try:
        with tempfile.TemporaryDirectory(prefix="tilewright-ops-") as scratch:
            for name in options.only:
                done[name] = run_section(SECTIONS[name], table, options, about, Path(scratch))
                if options.json:
                    options.json.write_text(as_json(done, about, method))
                if options.markdown:
                    options.markdown.write_text(markdown(done, about, method))
    finally:
        table.close()
    return int(any(a.failed for results in done.values() for r in results for a in r.absences.values()))


def run_section(
    section: Section, table: Table, options: argparse.Namespace, about: dict[str, Any], scratch: Path
) -> list[OperatorResult]:
    names = [name for name in section.systems if name in options.systems]
    cases = [
        case for case in section.cases(Options(options.quick, options.seed)) if options.cases in case.name
    ]
    print(aligned(header(section)), flush=True)
    results: list[OperatorResult] = []
    for number, case in enumerate(cases):
        result = measure(case, section, names, table, options, scratch / f"{section.name}-{number}")
        results.append(result)
        print(aligned(row(result)), flush=True)
        for line in remarks(result):
            print(f"    {line}", flush=True)
    for line in conclusion(section, results, about):
        print(line, flush=True)
    print(flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
