"""Several models for several kinds of device of a pool, in one run.

Models are imported once. For each device they are cut into tasks, tuned by a tuner of its own, and built; the tuners
run at the same time, so that every device has work, and share the pool's builders. A device that fails ends alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilewright import frontend
from tilewright.driver import build_together, choose_together, cut_into_tasks
from tilewright.errors import OptionError, TilewrightError
from tilewright.hw.gpu import GpuMachine
from tilewright.measure.pool.connection import Pool, PoolDevice, connected
from tilewright.measure.pool.driver import DeviceUse
from tilewright.runtime.arguments import joined
from tilewright.runtime.model import CompiledModel
from tilewright.support.trace import Trace
from tilewright.targets.options import CompileOptions, Settings, resolve_latency, resolve_objective
from tilewright.tune.allocate import Combine
from tilewright.tune.effort import parse_duration


@dataclass(frozen=True)
class DeviceResult:
    """The result of a run for one kind of device. `models`: compiled for it, in order; none if `error` is set. `use`:
    by device, how many trials it timed and how many seconds it was busy. `given_again`: work items that went to another
    node. `aside`: workers that were left out, with the reasons."""

    models: list[CompiledModel]
    error: TilewrightError | None = None
    use: Mapping[str, DeviceUse] = field(default_factory=dict)
    given_again: int = 0
    aside: Mapping[str, str] = field(default_factory=dict)


def compile_for_devices(
    models: Sequence[tuple[Any, Any] | tuple[Any, Any, Mapping[str, Any]]],
    *,
    pool: Pool | str,
    devices: Sequence[str] | Mapping[str, float | str | None],
    objective: str | Combine = "sum",
    latency: Sequence[float | str | None] | None = None,
    effort: str = "quick",
    budget: float | str | None = None,
    seed: int = 0,
    search: str = "guided",
    cost_model: str = "boosted",
    allocation: str = "gradient",
    partition: str = "dynamic",
    db: str | Path | None = None,
    numerics: str | None = None,
    threads: int | None = None,
    traces: Callable[[str], Trace] | None = None,
) -> dict[str, DeviceResult]:
    """Compile several models for several kinds of device of a pool, in one tuning run.

    - `models`: as for `compile_all`.
    - `pool`: its address, or a `Pool`. `devices`: labels of devices, as `tilewright pool ls` shows them; or a mapping
      from each to the time that devices of that label may work for this run, all together ("5m"; None: no limit).
    - `budget`: of the run, in time on the clock: all devices are tuned at once.
    - `threads`: of a call on the processors among them.
    - `traces`: gives the trace of a device's events, by its label.

    The other options are those of `compile_all`. The result has an entry for each label. Where one device fails, the
    others go on, and its entry has the error. After Ctrl-C every device takes the best candidates so far.
    """
    limits = dict(devices) if isinstance(devices, Mapping) else dict.fromkeys(devices)
    if not limits:
        raise OptionError("no device is named", remedy="name one or more labels: `tilewright pool ls`")
    if effort == "none":
        raise OptionError('effort="none" measures nothing and needs no pool; use effort="quick" or "full"')
    seconds = {
        label: None if limit is None else parse_duration(limit, f"the budget of {label}")
        for label, limit in limits.items()
    }
    options = CompileOptions.among(locals())
    latencies = resolve_latency(latency, len(models))
    combine = resolve_objective(objective)
    imported = [
        frontend.import_model(frontend.opened(model), joined(inputs, *kwargs or (None,)))
        for model, inputs, *kwargs in models
    ]
    with connected(pool) as session, ExitStack() as stack:
        runs: dict[str, tuple[PoolDevice, Settings]] = {}
        for label, limit in seconds.items():
            trace = Trace.off() if traces is None else traces(label)
            device = session.device(label, trace, limit)
            its = replace(options, threads=None) if isinstance(device.machine, GpuMachine) else options
            runs[label] = device, stack.enter_context(its.resolved(pool=device, trace=trace))
        cut = {
            label: [cut_into_tasks(one, settings) for one in imported]
            for label, (_, settings) in runs.items()
        }
        with ThreadPoolExecutor(len(runs)) as workers:
            chosen = {
                label: workers.submit(choose_together, settings, cut[label], combine, latencies)
                for label, (_, settings) in runs.items()
            }
            try:
                wait(chosen.values())
            except KeyboardInterrupt:
                session.end()
                wait(chosen.values())
        results: dict[str, DeviceResult] = {}
        for label, (device, settings) in runs.items():
            error, built = None, []
            try:
                built = build_together(imported, chosen[label].result(), settings)
            except TilewrightError as raised:
                error = raised
            results[label] = DeviceResult(built, error, device.use, device.given_again, device.aside)
        return results
