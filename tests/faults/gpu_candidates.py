"""Kernels that hang, go astray, do not start or are wrong by a little, in a race on a GPU: each costs itself alone.

    python -m tests.faults.gpu_candidates --count 50 --json FILE

Every task of the campaign has one candidate whose machine code is not what its config says: the text of its kernel was
changed, compiled, and put into the cache where the tuner and its processes find it. Everything else is as always. Each
fault must come back as its kind, nothing but it may be lost, and where the process had to be replaced the next one must
go on within 5 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from tilewright.codegen.cuda.pieces import piece_source
from tilewright.space.vendor.pieces import ours
from tilewright.tune.gpu import GpuTuner

from tests.space.checked import Inputs
from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.cuda import toolchain
from tilewright.codegen.cuda.build import SYMBOL, GpuSource, identity
from tilewright.cost import gpu as cost
from tilewright.db.database import Database
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine, detect
from tilewright.space.space import Config
from tilewright.support.trace import Trace
from tilewright.tune.effort import Tuning

RECOVERY_SECONDS = 5.0
LIBRARIES = frozenset({"cublaslt"})
# A hang ends by itself after this: a card that nobody can reset must not be lost to a test.
_HANG_NANOSECONDS = 30_000_000_000
_LATE = 45  # runs of a kernel after which its results were checked, and it is being timed

Alteration = Callable[[str], str]


@dataclass(frozen=True)
class Fault:
    name: str
    kind: str  # of space.outcome.FAILURES
    alter: Alteration
    on_any_card: bool = True  # or from sm_90 on


def at_head(statement: str, before: str = "") -> Alteration:
    """A statement at the beginning of the kernel, `before` in front of it."""

    def alter(text: str) -> str:
        begin = text.rindex('extern "C"')
        head = text.index("{", text.index(SYMBOL, begin)) + 1
        return text[:begin] + before + "\n" + text[begin:head] + "\n  " + statement + text[head:]

    return alter


def replaced(pattern: str, by: str) -> Alteration:
    def alter(text: str) -> str:
        changed, count = re.subn(pattern, by, text)
        assert count, pattern
        return changed

    return alter


def result_times(factor: str) -> Alteration:
    """All results in half precision are off by a factor, an expression of `x`."""
    return replaced(
        r'"cvt\.rn\.f16\.f32 %0, %1;" : "=h"\(y\.bits\) : "f"\(x\)',
        f'"cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x * ({factor}))',
    )


_CLOCK = '__device__ u64 now() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }\n'
_SPIN = f"for (const u64 begin = now(); now() - begin < {_HANG_NANOSECONDS}ull;) ;"
# With what the kernel asks for besides, more than a block can have; older cards' compilers refuse it.
_ALL_SHARED = "__shared__ volatile char more[227 << 10]; more[threadIdx.x] = 1;"
_FIRST = "blockIdx.x == 0 && threadIdx.x == 0"

FAULTS = (
    Fault("hangs", "timeout", at_head(f"if (blockIdx.x == 0) {_SPIN}", _CLOCK)),
    Fault("wrong by 0.4%", "wrong", result_times("1.004f")),
    Fault(
        "writes far away",
        "illegal",
        at_head(f"if ({_FIRST}) *reinterpret_cast<volatile int*>(1ull << 44) = 1;"),
    ),
    Fault(
        "takes all shared memory for itself",
        "build",
        at_head(_ALL_SHARED),
        on_any_card=False,
    ),
    Fault(
        "writes between two words",
        "illegal",
        at_head(
            f"if ({_FIRST}) *reinterpret_cast<volatile int*>(reinterpret_cast<char*>(pair) + 1) = 1;",
            "__device__ int pair[2];",
        ),
    ),
    Fault(
        "starts with too many threads", "build", replaced(r"__launch_bounds__\(\d+", "__launch_bounds__(32")
    ),
    Fault(
        "hangs once it is timed",
        "timeout",
        at_head(
            f"if ({_FIRST} && atomicAdd(&runs, 1) >= {_LATE}) {_SPIN}",
            _CLOCK + "__device__ int runs;",
        ),
    ),
    Fault("wrong at its end", "wrong", result_times("blockIdx.x == gridDim.x - 1 ? 1.1f : 1.0f")),
    Fault(
        "reads far away",
        "illegal",
        at_head(f"if ({_FIRST}) (void)*reinterpret_cast<volatile int*>(1ull << 44);"),
    ),
    Fault("leaves results out", "wrong", at_head("if (blockIdx.x < 8) return;")),
    Fault("traps", "crash", at_head(f'if ({_FIRST}) asm volatile("trap;");')),
    Fault("is of another name", "build", replaced(SYMBOL, "somebody_else")),
)


# -- the campaign -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Injected:
    fault: Fault
    task: Task
    victim: Config
    source: GpuSource


@dataclass(frozen=True)
class Survived:
    fault: str
    kind: str
    expected: str
    others_lost: int
    message: str

    @property
    def is_right(self) -> bool:
        return self.kind == self.expected and not self.others_lost


def product(rows: int) -> Task:
    x = Inputs()
    node = apply("matmul", x(rows, 512, dtype=DType.F16), x(512, 512, constant=True, dtype=DType.F16))
    return x.task(apply("relu", apply("add", node, x(512, constant=True, dtype=DType.F16))))


def injected(fault: Fault, task: Task, machine: GpuMachine) -> Injected:
    """The fault in the config that the model ranks first: it is raced for sure."""
    (best,) = cost.rank(GpuWork(task, machine, "fast"), most=1)
    (piece,) = ours(task, best.config).pieces
    return Injected(fault, task, best.config, piece_source(piece, machine, "fast"))


def compiled(each: Injected, machine: GpuMachine) -> toolchain.Compiled:
    _, symbol = identity(each.source, machine, "fast")
    text = each.fault.alter(each.source.text).replace(SYMBOL, symbol)
    return toolchain.compile_source(text, machine.capability)


def inject(each: Injected, machine: GpuMachine) -> None:
    """The wrong machine code under the right key."""
    key, _ = identity(each.source, machine, "fast")
    ObjectCache.default().put(key, msgspec.msgpack.encode(compiled(each, machine)))


def campaign(machine: GpuMachine, count: int, db: Path, first: int = 0) -> tuple[list[Survived], GpuTuner]:
    """`count` faults, from number `first` on, all in one run of the tuner."""
    possible = [fault for fault in FAULTS if fault.on_any_card or machine.clusters]
    faults = [possible[number % len(possible)] for number in range(first, first + count)]
    tasks = [product(512 - number) for number in range(count)]
    all_of_them = [injected(fault, task, machine) for fault, task in zip(faults, tasks, strict=True)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda each: inject(each, machine), all_of_them))
    tuner = GpuTuner(machine, 0, "fast", LIBRARIES, Tuning(budget=3600.0, db=db), Trace.off())
    tuner.tune({each.task.key: (each.task, 1) for each in all_of_them})
    with Database.open(db) as database:
        records = database.records()
    outcomes = []
    for each in all_of_them:
        of_task = [record for record in records if record.text == each.task.text]
        (victim,) = (record for record in of_task if record.config == each.victim)
        lost = sum(record.failure != "" for record in of_task if record is not victim)
        outcomes.append(Survived(each.fault.name, victim.failure, each.fault.kind, lost, victim.message))
    return outcomes, tuner


def report(outcomes: Sequence[Survived], tuner: GpuTuner, seconds: float) -> str:
    kinds = Counter(outcome.kind or "none" for outcome in outcomes)
    right = sum(outcome.is_right for outcome in outcomes)
    lines = [
        f"{right} of {len(outcomes)} faults survived: "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())),
        f"{tuner.trials} candidates raced, {seconds:.0f} s; {len(tuner.replaced)} processes replaced, each in "
        f"{max(tuner.replaced, default=0.0):.1f} s at most",
    ]
    lines += [
        f"  {outcome.fault}: {outcome.kind or 'not noticed'} instead of {outcome.expected},"
        f" {outcome.others_lost} others lost ({outcome.message})"
        for outcome in outcomes
        if not outcome.is_right
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILEWRIGHT_CACHE_DIR"] = folder  # nothing of this may stay in the cache
        began = time.monotonic()
        outcomes, tuner = campaign(detect(), options.count, Path(folder) / "tuning.db")
        seconds = time.monotonic() - began
    print(report(outcomes, tuner, seconds))
    if options.json:
        found = {
            "outcomes": [asdict(outcome) for outcome in outcomes],
            "replaced": tuner.replaced,
            "trials": tuner.trials,
            "seconds": seconds,
        }
        options.json.write_text(json.dumps(found, indent=1))
    late = any(each > RECOVERY_SECONDS for each in tuner.replaced)
    sys.exit(0 if all(outcome.is_right for outcome in outcomes) and not late else 1)


if __name__ == "__main__":
    main()
