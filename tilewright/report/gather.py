"""Collect the data of a report from a compiled model and a tuning database."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from tilewright.db.database import Database
from tilewright.db.record import Decision, Key, Record
from tilewright.errors import TilewrightError
from tilewright.graph.task import Task
from tilewright.graph.text import parse_graph
from tilewright.hw import CpuMachine, host
from tilewright.hw.gpu import GpuMachine
from tilewright.measure.calibration import calibration_for, machine_key
from tilewright.measure.gpu_calibration import rated, stored
from tilewright.report.beliefs import beliefs_of, uses_attention
from tilewright.report.code import Code, code_of
from tilewright.report.data import (
    Baseline,
    MachineSummary,
    ModelReport,
    Report,
    StepReport,
    TaskReport,
    by_key,
    decided,
    gpu_machine_report,
    limit,
    machine_report,
    report,
    trial_of,
)
from tilewright.report.flow import flow_of
from tilewright.runtime.cuda.model import GpuModel
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.plan import Origin, Plan
from tilewright.space.template import Work
from tilewright.targets.cuda import CudaTarget
from tilewright.tune.choose import choose

_WITH_ASSEMBLY = 12  # slowest tasks with assembly, which takes LLVM a while each
_WITH_CODE = 60
_WITH_BELIEFS = 24


def report_on_model(
    model: CompiledModel,
    name: str,
    database: Database,
    *,
    inputs: Any = None,
    events: Sequence[dict[str, Any]] = (),
    baseline: Baseline | None = None,
) -> Report:
    """Run the model to get the current time of each task, and add what the database knows about it on this machine.
    `baseline`: another system's time."""
    plan = model.plan
    host_machine = host()
    device: CpuMachine | GpuMachine = host_machine
    if isinstance(model, GpuModel):
        machine, key_of, device = _on_gpu(model)
    else:
        machine = machine_report(host_machine, calibration_for(host_machine), model.threads)
        key_of = lambda task: Key.of_task(task, host_machine, plan.numerics, model.threads)  # noqa: E731
    flow = flow_of(plan)
    steps = []
    explanation = model.explain(inputs)
    seconds: dict[str, list[float]] = defaultdict(list)
    errors: dict[str, list[float]] = defaultdict(list)
    layers: dict[str, list[str]] = defaultdict(list)
    for number, (step, row) in enumerate(zip(plan.steps, explanation.rows, strict=True)):
        steps.append(StepReport(row.layer, step.task, row.seconds, flow.reads[number], flow.alive[number]))
        layers[step.task].append(row.layer)
        seconds[step.task].append(row.seconds)
        if row.error is not None:
            errors[step.task].append(row.error)
    tasks, believing = [], uses_attention(events)
    for rank, key in enumerate(sorted(seconds, key=lambda key: -sum(seconds[key]))):
        info = plan.tasks[key]
        full = key_of(key)
        records, decision = database.records(full), database.decision(full)
        work = None if isinstance(model, GpuModel) else _work_in(plan, key, host_machine)
        code = None if work is None else _code_in(plan, key, work, decision, rank)
        configs = _configs(work, records, decision)
        beliefs = None
        if believing and decision is not None and rank < _WITH_BELIEFS:
            there = _work_in(plan, key, device)
            if there is not None:
                beliefs = beliefs_of(there, full.threads, records, decision.config, configs["default"])
        tasks.append(
            TaskReport(
                key=key,
                label=info.label,
                text=info.text,
                output=str(info.output),
                calls=len(seconds[key]),
                flops=info.flops,
                bytes=info.bytes,
                schedule=info.program,
                seconds=sum(seconds[key]) / len(seconds[key]),
                error=max(errors[key], default=None),
                limit=limit(info.flops, info.bytes, machine),
                trials=tuple(map(trial_of, records)),
                code=code,
                origin=str(info.origin),
                layers=tuple(layers[key]),
                beliefs=beliefs,
                **configs,
                **decided(decision),
            )
        )
    about = ModelReport(
        name=name,
        signature=model.signature,
        seconds=model.bench(inputs).median,
        threads=f"{model.threads} ({explanation.threads['runtime']})",
        numerics=plan.numerics,
        target=f"{plan.target.get('cpu', '')} {plan.target['triple']}",
        arena_bytes=plan.memory.arena_bytes,
        constant_bytes=plan.memory.constant_bytes,
        baseline=baseline,
        steps=tuple(steps),
        fusion=explanation.fusion,
    )
    return report(name, machine, tasks, about, events)


def _configs(work: Work | None, records: Sequence[Record], decision: Decision | None) -> dict[str, Any]:
    """The unmeasured choice, and the winner. If the task cannot be parsed any more, or is a GPU's, the first measured
    config is the one to beat."""
    try:
        default = "" if work is None or not records else str(choose(work).config)
    except TilewrightError:
        default = ""
    default = default or (str(records[0].config) if records else "")
    return {"default": default, "winner": "" if decision is None else str(decision.config)}


def _on_gpu(model: GpuModel) -> tuple[MachineSummary, Callable[[str], Key], GpuMachine]:
    """The GPU's rates, the database keys of its tasks, and the GPU. A task computed by several kernels is stored as
    one, and has no trials here."""
    target = CudaTarget.of_card(model.ordinal)
    card, numerics = target.machine, model.plan.numerics

    def key_of(task: str) -> Key:
        return Key.of_task(task, card, numerics, target.threads(None))

    return gpu_machine_report(rated(card), stored(card) is not None), key_of, card


def report_on_database(
    database: Database, title: str = "Tuning database", events: Sequence[dict[str, Any]] = ()
) -> Report:
    """Everything that the database knows about this machine, or about all machines if it knows nothing about this
    one."""
    found = by_key(database.records())
    here = {key: records for key, records in found.items() if key.machine == machine_key(host())}
    found = here or found
    threads = max((key.threads for key in found), default=1)
    machine = machine_report(host(), calibration_for(host()), threads)
    last = {key: database.decision(key) for key in found}
    order = sorted(found, key=lambda key: -_fastest(found[key], last[key]))
    tasks = [_known(key, found[key], last[key], machine, rank) for rank, key in enumerate(order)]
    return report(title, machine, tasks, events=events)


def _known(
    key: Key, records: Sequence[Record], decision: Decision | None, machine: MachineSummary, rank: int
) -> TaskReport:
    last = records[-1]
    work = last.work()
    right = [record for record in records if record.seconds is not None]
    best = min(right, key=lambda record: record.seconds or 0.0, default=None)
    winner = decision.config if decision is not None else None if best is None else best.config
    code = None
    if work is not None and winner is not None and rank < _WITH_CODE and work.machine == host():
        code = code_of(work, [winner], assembly=rank < _WITH_ASSEMBLY)
    flops, size = (0, 0) if work is None else (work.task.flops, work.task.bytes)
    return TaskReport(
        key=key.task,
        label=last.label,
        text=last.text,
        output="" if work is None else str(work.task.output.type),
        calls=1,
        flops=flops,
        bytes=size,
        schedule="" if winner is None else str(winner),
        seconds=None,
        error=max((record.error for record in records if record.error is not None), default=None),
        limit=None if work is None else limit(flops, size, machine),
        trials=tuple(map(trial_of, records)),
        code=code,
        origin="" if decision is None else str(Origin("tuned", decision.when)),
        **_configs(work, records, decision),
        **decided(decision),
    )


def _fastest(records: Sequence[Record], decision: Decision | None) -> float:
    if decision is not None:
        return decision.seconds
    return min((record.seconds for record in records if record.seconds is not None), default=0.0)


def _work_in(plan: Plan, key: str, machine: CpuMachine | GpuMachine) -> Work | None:
    """A task of a plan again, if this version still supports it."""
    step = next(step for step in plan.steps if step.task == key)
    constants = [n for n, position in enumerate(step.arguments[:-1]) if position.space == "constant"]
    task = Task(parse_graph(plan.tasks[key].text, {}), frozenset(constants))
    return Work(task, machine, plan.numerics) if task.key == key else None


def _code_in(plan: Plan, key: str, work: Work, decision: Decision | None, rank: int) -> Code | None:
    """The code of the kernel that the plan calls for this task."""
    if rank >= _WITH_CODE:
        return None
    step = next(step for step in plan.steps if step.task == key)
    wanted = [] if decision is None else [decision.config]
    return code_of(work, wanted, step.kernel, assembly=rank < _WITH_ASSEMBLY)
