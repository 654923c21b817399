"""What the attention model costs a search, on one core and without PyTorch: for `cost_models.py --parts speed`.

    python benchmarks/cost_speed.py [--configs 1000] [--repeats 5]

Everything runs in a process of its own that is bound to one core, has one thread for linear algebra, and cannot import
PyTorch. Import time is that of another fresh process. Times are medians.

    lowering + features   the loop program of each config, and the tokens of its statements
    features              the tokens that need no program
    predictions           of configs whose tokens are known: the network and the correction
    a round               of fine-tuning: what so many trials teach, and predictions for all configs again
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_ONE = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_ROUNDS = (16, 64, 256)  # trials
_MODULE = "tilewright.cost.attention"


def speed(configs: int = 1000, repeats: int = 5) -> list[dict[str, object]]:
    """Rows of a table: what was timed, on which machine, of how many configs, in how many milliseconds."""
    imports = [_child("--import") for _ in range(repeats)]
    rows: list[dict[str, object]] = [
        {"what": name, "machine": "-", "count": 1, "ms": statistics.median(each[name] for each in imports)}
        for name in imports[0]
    ]
    return rows + _child("--inside", "--configs", str(configs), "--repeats", str(repeats))


def table(rows: Sequence[dict[str, object]]) -> str:
    lines = ["| what | candidates of | configs | ms | ms a config |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        ms, count = float(str(row["ms"])), int(str(row["count"]))
        lines.append(f"| {row['what']} | {row['machine']} | {count} | {ms:.1f} | {ms / count:.3f} |")
    return "\n".join(lines)


def _child(*arguments: str) -> list:
    environment = {**os.environ, **dict.fromkeys(_ONE, "1")}
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise RuntimeError(
            f"the process that measures speed ended with {done.returncode}: {done.stderr[-800:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


# -- in the other process ---------------------------------------------------------------------------------------------


def _alone() -> None:
    """On one core, and without PyTorch."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sys.modules["torch"] = None  # type: ignore[assignment]


def _imports() -> dict[str, float]:
    begin = time.perf_counter()
    __import__(_MODULE)
    imported = time.perf_counter()
    sys.modules[_MODULE].network()
    return {
        f"import {_MODULE}": 1e3 * (imported - begin),
        "read the weights": 1e3 * (time.perf_counter() - imported),
    }


def _inside(configs: int, repeats: int) -> list[dict[str, object]]:
    from tilewright.dataset.tasks import F16, F32, gemm
    from tilewright.hw import host
    from tilewright.hw.gpu import H200
    from tilewright.space.template import Work

    return [
        *_machine("this processor", Work(gemm(512, 768, 768, "relu", F32), host()), 1, configs, repeats),
        *_machine("an H200", Work(gemm(512, 768, 768, "relu", F16), H200), 0, configs, repeats),
    ]


def _machine(name: str, work: object, threads: int, wanted: int, repeats: int) -> list[dict[str, object]]:
    from random import Random

    import numpy as np

    from tilewright.cost.analytical import Analytical
    from tilewright.cost.attention import Attention
    from tilewright.cost.tokens import Tokeniser
    from tilewright.space.candidates import Candidates
    from tilewright.space.outcome import Outcome
    from tilewright.space.template import Work

    assert isinstance(work, Work)
    candidates = Candidates.of(work, sketches=False)
    analytical = Analytical(candidates, threads)
    drawn = candidates.sample(Random(0), wanted)
    some = [config for config in drawn if np.isfinite(analytical.seconds(config))]
    lowered = some[: max(1, len(some) // 20)]  # a program takes up to 0.1 s
    rows: list[dict[str, object]] = []

    def add(what: str, count: int, run: Callable[[], object]) -> None:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        rows.append({"what": what, "machine": name, "count": count, "ms": 1e3 * statistics.median(times)})

    def tokens(configs: Sequence[object], statements: bool) -> None:
        # Everything from the start: a model counts each config once.
        fresh = Candidates.of(work, sketches=False)
        Tokeniser(Analytical(fresh, threads), statements).tokens(configs)  # type: ignore[arg-type]

    add("lowering + features", len(lowered), lambda: tokens(lowered, True))
    add("features", len(some), lambda: tokens(some, False))
    model = Attention(candidates, threads)
    model.predict(some)

    def again() -> None:
        model._seen.clear()
        model.predict(some)

    def taught(told: Sequence[Outcome]) -> None:
        model._times.clear()
        model.update(told)
        model.predict(some)

    add("predictions", len(some), again)
    rng = np.random.default_rng(0)
    for trials in _ROUNDS:
        told = [
            Outcome(config, analytical.seconds(config) * float(rng.uniform(0.7, 1.5)))
            for config in some[:trials]
        ]
        if len(told) < trials:
            break

        add(f"a round with {trials} trials", len(some), partial(taught, told))
    assert not any(module.startswith("torch") for module, found in sys.modules.items() if found is not None)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--import", dest="imports", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.imports or given.inside:
        _alone()
        print(json.dumps(_imports() if given.imports else _inside(given.configs, given.repeats)))
    else:
        print(table(speed(given.configs, given.repeats)))


if __name__ == "__main__":
    main()
