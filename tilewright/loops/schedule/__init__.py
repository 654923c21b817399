"""Schedules: decide step by step how the stages of a task are computed.

    schedule = Schedule.of(output, inputs)          one plain nest per stage
    schedule = schedule.tile(["out.i0", "out.i1"], [6, 16], tail="shift").parallel("out.i0.o")
    program = schedule.program()

A schedule is an immutable value: each primitive returns a new one, or raises `ScheduleError` with the reason. Loops,
stages and tensors are addressed by name; `print(schedule)` shows the names. `schedule.trace` records the steps as
plain data, which `replay` applies again. The primitives are documented, with an example each, in `restructure.py`,
`kinds.py`, `stages.py`, `caches.py`, `reductions.py`, `layout.py`, `padding.py`, `tensorise.py`, `prefetch.py`,
`pipeline.py`, `stores.py`; `rules.py` has the invariants that hold after each of them. A schedule with loops that are
bound is for a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright import te
from tilewright.errors import PipelineError
from tilewright.hw import host
from tilewright.hw.cores import USUAL
from tilewright.hw.gpu import GpuMachine
from tilewright.hw.intrinsics import HasFeatures, Intrinsic, intrinsic_named
from tilewright.hw.memory import LOOP_SCOPES, Scope
from tilewright.hw.warpgroups import WARPGROUP, role_registers
from tilewright.loops.ir import Program, thread_count
from tilewright.loops.passes.cpu_pipeline import double_buffered
from tilewright.loops.passes.load_and_use import ProgramAccesses, pipelines
from tilewright.loops.passes.pipeline import pipeline as pipelined
from tilewright.loops.passes.virtual_threads import is_virtual, virtual_threads
from tilewright.loops.schedule.begin import begin
from tilewright.loops.schedule.bound import gpu_form, is_bound
from tilewright.loops.schedule.boxes import why_not_bulk
from tilewright.loops.schedule.lower import lower
from tilewright.loops.schedule.nest import Nest, find_leaf, leaves, loop_names
from tilewright.loops.schedule.rules import check_complete
from tilewright.loops.schedule.tensorise import IntrinsicOperand, outer_product
from tilewright.loops.schedule.text import print_nest
from tilewright.loops.schedule.trace import Trace, TraceStep, apply, from_json, step, summary, to_json
from tilewright.loops.verify import verify_program

__all__ = [
    "Intrinsic",
    "IntrinsicOperand",
    "Schedule",
    "Trace",
    "TraceStep",
    "from_json",
    "outer_product",
    "replay",
    "to_json",
]


@dataclass(frozen=True, repr=False)
class Schedule:
    nest: Nest
    trace: Trace = ()
    intrinsics: Mapping[str, Intrinsic] = field(default_factory=dict)

    @staticmethod
    def of(
        output: te.Tensor,
        inputs: Sequence[te.Tensor],
        name: str = "kernel",
        *,
        constants: Collection[int] = (),
    ) -> Schedule:
        """The stages of `output` as a function of `inputs`; `constants` are the indices of inputs that never
        change."""
        return Schedule(begin(output, inputs, name, constants))

    def __str__(self) -> str:
        return print_nest(self.nest)

    def __repr__(self) -> str:
        return f"<schedule of {self.nest.name}: {'; '.join(map(str, self.trace)) or 'nothing done'}>"

    @property
    def loops(self) -> list[str]:
        return loop_names(self.nest.body)

    @property
    def stages(self) -> list[str]:
        return [leaf.stage for _, leaf in leaves(self.nest.body)]

    def program(self, decisions: str | None = None, scopes: Collection[Scope] = LOOP_SCOPES) -> Program:
        """The loop program, verified for a target with these scopes. `decisions` describes the schedule's choices."""
        on_gpu = is_bound(self.nest)
        if self.nest.bulk and not on_gpu:
            raise PipelineError(
                f"pipeline: {self.nest.bulk[0]}: the tensor copy engine belongs to a GPU, and no loop is bound to one",
                remedy="bind the outer loops to block.x, and those of stages to threads or warpgroups",
            )
        nest = gpu_form(self.nest) if on_gpu else self.nest
        check_complete(nest)
        program = lower(nest, decisions or summary(self.trace), asynchronous=on_gpu)
        if nest.stages:
            known, stages = ProgramAccesses(program), dict(nest.stages)
            registers = _registers(program) if nest.specialised else None
            made = (
                pipelined(
                    known, stages, specialise=nest.specialised, registers=registers, cluster=nest.cluster
                )
                if on_gpu
                else double_buffered(known, stages)
            )
            # Without a pipeline, its tiles are stored, and nothing waits for copies. What the copy engine fills has no
            # such form: only a pipeline waits for it.
            compared = on_gpu and not nest.bulk
            plain = (
                lower(replace(nest, stages=()), program.decisions, asynchronous=True) if compared else None
            )
            words = f"{program.decisions}; {pipelines(known, stages)}" + _copies_of(self.nest)
            program = replace(made, decisions=words, unpipelined=plain)
        if is_virtual(program.body):
            program = virtual_threads(program)
        verify_program(program, scopes)
        return program

    def then(self, done: TraceStep) -> Schedule:
        """The schedule after one more step."""
        return Schedule(apply(self.nest, done, self.intrinsics), (*self.trace, done), self.intrinsics)

    def _do(self, primitive: str, **arguments: Any) -> Schedule:
        return self.then(step(primitive, arguments))

    # -- the primitives ------------------------------------------------------------------------------------------------

    def split(
        self, loop: str, factor: int, tail: str = "exact", into: Sequence[str] | None = None
    ) -> Schedule:
        return self._do("split", loop=loop, factor=factor, tail=tail, into=into)

    def fuse(self, outer: str, inner: str, into: str | None = None) -> Schedule:
        return self._do("fuse", outer=outer, inner=inner, into=into)

    def reorder(self, *loops: str) -> Schedule:
        return self._do("reorder", loops=loops)

    def tile(self, loops: Sequence[str], factors: Sequence[int], tail: str = "exact") -> Schedule:
        return self._do("tile", loops=loops, factors=factors, tail=tail)

    def vectorise(self, loop: str) -> Schedule:
        return self._do("vectorise", loop=loop)

    def unroll(self, loop: str) -> Schedule:
        return self._do("unroll", loop=loop)

    def parallel(self, loop: str) -> Schedule:
        return self._do("parallel", loop=loop)

    def bind(self, loop: str, axis: str) -> Schedule:
        return self._do("bind", loop=loop, axis=axis)

    def vthread(self, loop: str) -> Schedule:
        return self._do("vthread", loop=loop)

    def compute_at(self, stage: str, loop: str) -> Schedule:
        return self._do("compute_at", stage=stage, loop=loop)

    def store_at(self, stage: str, loop: str, compute: str) -> Schedule:
        return self._do("store_at", stage=stage, loop=loop, compute=compute)

    def inline(self, stage: str) -> Schedule:
        return self._do("inline", stage=stage)

    def cache_read(
        self, tensor: str, stage: str, scope: str = "scratch", order: Sequence[int] | None = None
    ) -> Schedule:
        return self._do("cache_read", tensor=tensor, stage=stage, scope=scope, order=order)

    def cache_write(self, stage: str, scope: str = "scratch") -> Schedule:
        return self._do("cache_write", stage=stage, scope=scope)

    def set_scope(self, stage: str, scope: str) -> Schedule:
        return self._do("set_scope", stage=stage, scope=scope)

    def rfactor(self, loop: str) -> Schedule:
        return self._do("rfactor", loop=loop)

    def pack(self, tensor: str, blocks: Sequence[int], order: Sequence[int] | None = None) -> Schedule:
        return self._do("pack", tensor=tensor, blocks=blocks, order=order)

    def pad(self, stage: str, factors: Sequence[int], reduced: Sequence[int]) -> Schedule:
        return self._do("pad", stage=stage, factors=factors, reduced=reduced)

    def widen(self, tensor: str, gap: int) -> Schedule:
        return self._do("widen", tensor=tensor, gap=gap)

    def tensorise(
        self, loop: str, intrinsic: Intrinsic | str, machine: HasFeatures | None = None
    ) -> Schedule:
        """`intrinsic` is the name of a registered intrinsic, for which `machine` (None: this one) must have the
        features."""
        if isinstance(intrinsic, str):
            intrinsic = intrinsic_named(intrinsic, machine or host())
        known = Schedule(self.nest, self.trace, {**self.intrinsics, intrinsic.name: intrinsic})
        return known._do("tensorise", loop=loop, intrinsic=intrinsic.name)

    def pipeline(
        self,
        tensor: str,
        stages: int,
        machine: GpuMachine | None = None,
        *,
        copy: str = "async",
        specialise: bool = False,
        cluster: int = 1,
    ) -> Schedule:
        """`machine`: one whose shared memory must hold all stages, and which must have a copy engine if it is to copy.
        `copy`: "async", "bulk", or "auto": in bulk if the machine and the tile allow it."""
        capacity = None if machine is None else machine.shared_block
        if copy == "auto":
            copy = "bulk" if why_not_bulk(self.nest, tensor, machine) is None else "async"
            specialise, cluster = (specialise, cluster) if copy == "bulk" else (False, 1)
        elif copy == "bulk" and machine is not None and not machine.bulk_copy:
            raise PipelineError(
                f"pipeline: {tensor}: {machine.describe()} has no tensor copy engine",
                remedy='copy="async", which threads do',
            )
        return self._do(
            "pipeline",
            tensor=tensor,
            stages=stages,
            capacity=capacity,
            copy=copy,
            specialise=specialise,
            cluster=cluster,
        )

    def swizzle(self, tensor: str) -> Schedule:
        return self._do("swizzle", tensor=tensor)

    def stream(self, stage: str) -> Schedule:
        return self._do("stream", stage=stage)

    def transpose(self, stage: str) -> Schedule:
        return self._do("transpose", stage=stage)

    def prefetch(
        self,
        loop: str,
        tensor: str,
        ahead: int = 1,
        level: int = 1,
        spread: str | None = None,
        line: int = USUAL.line_bytes,
    ) -> Schedule:
        return self._do(
            "prefetch", loop=loop, tensor=tensor, ahead=ahead, level=level, spread=spread, line=line
        )


def _copies_of(nest: Nest) -> str:
    """How pipelined tiles are copied, for `explain`: in bulk, or why not."""
    in_memory = [name for name, _ in nest.stages if find_leaf(nest, name)[1].target.scope is Scope.SCRATCH]
    words = [f"in bulk: {', '.join(nest.bulk)}"] if nest.bulk else []
    for name in in_memory:
        why = None if name in nest.bulk else why_not_bulk(nest, name)
        words += [] if why is None else [f"not in bulk: {name} ({why})"]
    roles = ["by a producer of its own"] if nest.specialised else []
    roles += [f"for {nest.cluster} blocks at once"] if nest.cluster > 1 else []
    return "".join(f"; {word}" for word in (*words, *roles))


def _registers(program: Program) -> tuple[int, int] | None:
    """Of the threads of each role, which can only be divided anew among whole warpgroups."""
    warpgroups, more = divmod(thread_count(program), WARPGROUP)
    return None if more else role_registers(warpgroups)


def replay(trace: Iterable[TraceStep], start: Schedule, intrinsics: Iterable[Intrinsic] = ()) -> Schedule:
    """Apply the steps of a trace to `start`, with the intrinsics that it names."""
    schedule = Schedule(
        start.nest, start.trace, {**start.intrinsics, **{each.name: each for each in intrinsics}}
    )
    for done in trace:
        schedule = schedule.then(done)
    return schedule
