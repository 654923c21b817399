"""A candidate as a sequence of tokens, for models that attend: three levels of features and the machine.

    task          the operator's category (10) and the task's size
    machine       rates, memories and units, from `hw/` and the calibration
    terms         what the analytical model counts, as times on this machine
    instruction   how the kernel is assigned to a tensor instruction (15 + 5)
    knobs         the template, and each knob with its value
    statements    the innermost statements of the loop program, in experiments (164 + 8 each)

Sequences are padded to the longest and masked. Features have no units that only one task or machine has: magnitudes
are logarithms, and counts are divided by the rates of the machine. So one model serves all tasks and machines, and a
space whose programs Tilewright does not make (another project's kernel) is described by its knobs alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from tilewright.cost import cpu, vocabulary
from tilewright.cost.analytical import Analytical
from tilewright.cost.features import FEATURES, GPU_FEATURES, statement_tokens
from tilewright.cost.instructions import ASSIGNMENT, of_knobs
from tilewright.dtypes import DType
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, Machine
from tilewright.hw.gpu import WARP, GpuMachine
from tilewright.measure.gpu_calibration import rated
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.terms import Counted, GpuTerms, Roofline, Terms

VERSION = 2  # of the features: weights of another version do not fit

MAX_STATEMENTS = 8
KNOB_FEATURES = 6

# -- the task ---------------------------------------------------------------------------------------------------------

CATEGORIES: tuple[tuple[str, frozenset[str]], ...] = (
    ("attention", frozenset({"attention"})),
    ("convolution", frozenset({"conv", "conv_transpose"})),
    ("depthwise", frozenset()),
    ("contraction", frozenset({"linear", "matmul", "einsum", "dot"})),
    ("window", frozenset({"max_pool", "avg_pool", "pool", "reduce_window"})),
    (
        "normalisation",
        frozenset({"softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm", "batch_norm"}),
    ),
    (
        "reduction",
        frozenset({"sum", "prod", "amax", "amin", "mean", "any", "all", "argmax", "argmin", "cumsum"}),
    ),
    (
        "movement",
        frozenset({"transpose", "concat", "slice", "take", "gather", "scatter", "pad", "permute", "reshape"}),
    ),
    ("kernel", frozenset({"tile_kernel"})),
    ("elementwise", frozenset()),
)
TASK: tuple[str, ...] = (
    *(name for name, _ in CATEGORIES),
    "flops",
    "bytes",
    "intensity",
    "output",
    "summed",
    "operand_bytes",
    "operators",
    "inputs",
)


def category(task: Task) -> str:
    """The operator that dominates a task's time."""
    nodes = [node for node in task.graph.nodes() if not node.is_input and not node.is_constant]
    for name, ops in CATEGORIES:
        for node in nodes:
            if node.op in ops:
                groups = node.attrs.get("groups", 1) if name == "convolution" else 1
                return "depthwise" if isinstance(groups, int) and groups > 1 else name
    return "elementwise"


def task_features(task: Task | None) -> np.ndarray:
    found = np.zeros(len(TASK))
    if task is None:
        found[TASK.index("kernel")] = 1.0
        return found
    found[TASK.index(category(task))] = 1.0
    flops, moved, output = float(task.flops), float(task.bytes), float(task.output.type.size)
    nodes = task.graph.nodes()
    found[len(CATEGORIES) :] = (
        _log(flops),
        _log(moved),
        math.log2((1 + flops) / (1 + moved)),
        _log(output),
        _log(flops / max(1.0, output)),
        task.graph.inputs[0].dtype.bytes if task.graph.inputs else 4,
        sum(not node.is_input for node in nodes),
        len(task.graph.inputs),
    )
    return found


# -- the machine ------------------------------------------------------------------------------------------------------

MACHINE: tuple[str, ...] = (
    "is_cpu",
    "is_gpu",
    "is_other",
    "units",  # cores or multiprocessors
    "hertz",
    "operations",  # FMAs per clock of a unit
    "matrix_operations",  # of its tensor cores
    "memory_bytes",  # per second
    "last_cache",
    "unit_memory",  # L2 of a core, shared memory of a multiprocessor
    "first_cache",
    "registers",
    "lanes",  # of a vector or a warp
    "threads",  # of a call, or resident in a multiprocessor
    "balance",  # operations per byte of memory
    "cache_bytes",  # per clock
    "asynchronous_copies",
    "bulk_copies",
    "warpgroups",
    "other_vendor",
)


@dataclass(frozen=True)
class MachineNumbers:
    """The numbers of a machine token, taken from a machine of `hw/` or written down for another."""

    kind: str
    units: float
    hertz: float
    operations: float
    matrix_operations: float
    memory_bytes: float
    last_cache: float
    unit_memory: float
    first_cache: float
    registers: float
    lanes: float
    threads: float
    cache_bytes: float = 0.0
    asynchronous_copies: bool = False
    bulk_copies: bool = False
    warpgroups: bool = False
    other_vendor: bool = False

    def features(self) -> np.ndarray:
        rate = self.units * self.hertz * max(self.operations, 1.0)
        return np.array(
            [
                self.kind == "cpu",
                self.kind == "cuda",
                self.kind not in ("cpu", "cuda"),
                _log(self.units),
                _log(self.hertz / 1e6),
                _log(self.operations),
                _log(self.matrix_operations),
                _log(self.memory_bytes / 1e6),
                _log(self.last_cache),
                _log(self.unit_memory),
                _log(self.first_cache),
                _log(self.registers),
                _log(self.lanes),
                _log(self.threads),
                _log(rate / max(1.0, self.memory_bytes)),
                _log(self.cache_bytes),
                self.asynchronous_copies,
                self.bulk_copies,
                self.warpgroups,
                self.other_vendor,
            ],
            float,
        )


def machine_numbers(machine: Machine, threads: int) -> MachineNumbers:
    if isinstance(machine, GpuMachine):
        known = rated(machine)
        return MachineNumbers(
            "cuda",
            known.sms,
            known.clock_mhz * 1e6,
            128.0,
            known.tensor_flops_clock / 2,
            known.memory_bytes_per_second,
            known.l2,
            known.shared_sm,
            known.shared_block,
            known.registers_sm,
            WARP,
            known.threads_sm,
            known.l2_bytes_clock,
            known.async_copy,
            known.bulk_copy,
            known.warpgroup_mma,
        )
    if not isinstance(machine, CpuMachine):
        return MachineNumbers(machine.kind, 1, 1e9, 1, 0, 1e9, 1, 1, 1, 1, 1, 1)
    rates, caches = cpu.rates_of(machine).all, machine.caches
    lanes = machine.lanes(DType.F32)
    return MachineNumbers(
        "cpu",
        machine.cores,
        rates.hertz,
        machine.throughput.fmas * lanes,
        0.0,
        rates.memory * rates.hertz,
        caches.last,
        caches.l2_per_core,
        caches.l1,
        machine.vector_registers,
        lanes,
        threads,
        rates.l2,
    )


# -- the terms --------------------------------------------------------------------------------------------------------

TERMS: tuple[str, ...] = (
    "predicted",
    "kernels",
    "is_call",
    # shares of the time on a processor, in logarithms of cycles per thread
    "arithmetic",
    "loads",
    "stores",
    "branches",
    "scalar",
    "from_l2",
    "from_l3",
    "from_memory",
    "prefetched",
    "iterations",
    "imbalance",
    "loads_per_arithmetic",
    "memory_per_arithmetic",
    # on a GPU: the tiling, and the clocks that a step takes on each unit
    "blocks",
    "threads",
    "registers",
    "shared",
    "steps",
    "stages",
    "cluster",
    "persistent",
    "resident",
    "warps_resident",
    "waves",
    "tail",
    "tensor_clocks",
    "shared_clocks",
    "scalar_clocks",
    "copy_clocks",
    "load_clocks",
    "memory_clocks",
    "written",
    "read_after",
    "flops_per_byte",
    # of a library call
    "busy",
    "intensity",
    "calls",
)
_AT = {name: number for number, name in enumerate(TERMS)}


def terms_features(terms: Counted, seconds: float, machine: Machine, threads: int) -> np.ndarray:
    found = np.zeros(len(TERMS))
    found[_AT["predicted"]] = math.log2(max(seconds, 1e-9) * 1e6)
    parts = terms if isinstance(terms, tuple) else (terms,)
    found[_AT["kernels"]] = len(parts)
    for part in parts:
        if isinstance(part, Terms) and isinstance(machine, CpuMachine):
            _cpu_terms(found, part, machine, threads)
        elif isinstance(part, GpuTerms) and isinstance(machine, GpuMachine):
            _gpu_terms(found, part, machine)
        elif isinstance(part, Roofline):
            found[_AT["busy"]] = part.busy
            found[_AT["intensity"]] = _log(part.flops / max(1.0, part.bytes))
            found[_AT["is_call"]] = float(part.is_call)
            found[_AT["calls"]] = part.launches
    return found


def _cpu_terms(found: np.ndarray, terms: Terms, machine: CpuMachine, threads: int) -> None:
    rates, core = cpu.rates_of(machine).all, machine.throughput
    rounds = -(-terms.iterations // threads)
    share = rounds / terms.iterations
    values = {
        "arithmetic": terms.arithmetic / core.fmas,
        "loads": terms.loads / core.loads,
        "stores": terms.stores / core.stores,
        "branches": terms.branches,
        "scalar": terms.scalar,
        "from_l2": terms.from_l2 / rates.l2,
        "from_l3": terms.from_l3 / rates.l3,
        "from_memory": terms.from_memory / rates.memory,
        "prefetched": terms.prefetched / rates.memory,
    }
    total = sum(values.values()) or 1.0
    for name, value in values.items():
        found[_AT[name]] = math.log2(1 + 1024 * value / total)
    found[_AT["iterations"]] = _log(terms.iterations)
    found[_AT["imbalance"]] = share * threads - 1
    found[_AT["loads_per_arithmetic"]] = math.log2((1 + terms.loads) / (1 + terms.arithmetic))
    moved = terms.from_l2 + terms.from_l3 + terms.from_memory
    found[_AT["memory_per_arithmetic"]] = math.log2((1 + moved) / (1 + terms.arithmetic))


def _gpu_terms(found: np.ndarray, terms: GpuTerms, machine: GpuMachine) -> None:
    resident = machine.resident_blocks(terms.threads, terms.registers, terms.shared_bytes)
    at_once = max(1, machine.sms * resident)
    waves = terms.blocks / at_once
    clock = machine.clock_mhz * 1e6
    values = {
        "blocks": _log(terms.blocks),
        "threads": _log(terms.threads),
        "registers": terms.registers / 64,
        "shared": _log(terms.shared_bytes),
        "steps": _log(terms.steps),
        "stages": terms.stages,
        "cluster": _log(terms.cluster),
        "persistent": float(terms.persistent),
        "resident": _log(resident),
        "warps_resident": _log(resident * terms.threads / WARP),
        "waves": math.log2(max(waves, 2.0**-8)),
        "tail": math.ceil(waves) / max(waves, 1e-3) if waves < 64 else 1.0,
        "tensor_clocks": _log(terms.flops / machine.tensor_flops_clock),
        "shared_clocks": _log(terms.shared_traffic / machine.rates.shared_bytes_clock),
        "scalar_clocks": _log(terms.scalar + terms.ordinary),
        "copy_clocks": _log(terms.copies),
        "load_clocks": _log(terms.loaded * min(terms.blocks, at_once) / machine.l2_bytes_clock),
        "memory_clocks": _log(terms.memory / machine.memory_bytes_per_second * clock),
        "written": _log(terms.written),
        "read_after": _log(terms.write_loaded),
        "flops_per_byte": math.log2((1 + terms.flops) / (1 + terms.loaded)),
    }
    for name, value in values.items():
        found[_AT[name]] = min(value, 40.0)


# -- knobs ------------------------------------------------------------------------------------------------------------


def knob_features(knob: Knob, value: Value) -> np.ndarray:
    """The value's position among the choices, its magnitude, whether it is set (flags and texts), and whether it is a
    multiple of a warp."""
    where = _position(knob, value) / max(1, len(knob.choices) - 1)
    numeric = isinstance(value, int) and not isinstance(value, bool)
    size = _log(abs(_magnitude(value))) / 8
    return np.array(
        [where, where**2, size, size**2, not numeric and bool(value), numeric and int(value) % WARP == 0],
        float,
    )


def _position(knob: Knob, value: Value) -> int:
    """With the order of flags that all spaces have, whatever this one tries first."""
    return int(value) if isinstance(value, bool) else knob.choices.index(value)


def _magnitude(value: Value) -> int:
    """The number; of a text such as "6x2", the product of its numbers."""
    if isinstance(value, str):
        return math.prod(int(each) for each in re.findall(r"\d+", value)) if value else 0
    return 0 if isinstance(value, bool) else value


# -- sequences --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """The tokens of several candidates; masks are true where there is a token."""

    task: np.ndarray  # (n, TASK)
    machine: np.ndarray  # (n, MACHINE)
    terms: np.ndarray  # (n, TERMS)
    instruction: np.ndarray  # (n, ASSIGNMENT)
    knobs: np.ndarray  # (n, k, KNOB_FEATURES)
    buckets: np.ndarray  # (n, k)
    knob_mask: np.ndarray  # (n, k)
    statements: np.ndarray  # (n, s, FEATURES + GPU_FEATURES)
    statement_mask: np.ndarray  # (n, s)

    def __len__(self) -> int:
        return len(self.task)

    def __getitem__(self, at: np.ndarray | slice) -> Tokens:
        return Tokens(*(getattr(self, each.name)[at] for each in fields(self)))


STATEMENT_WIDTH = len(FEATURES) + len(GPU_FEATURES)
WIDTHS: dict[str, int] = {
    "task": len(TASK),
    "machine": len(MACHINE),
    "terms": len(TERMS),
    "instruction": len(ASSIGNMENT),
    "knob": KNOB_FEATURES,
    "statement": STATEMENT_WIDTH,
}


@dataclass
class Tokeniser:
    """The tokens of configs of one `Configs`, cached. `statements`: build the program of every config for its
    statements' tokens; otherwise there are none."""

    model: Analytical
    statements: bool = False
    _rows: dict[Config, TokenRow] = field(default_factory=dict)

    def tokens(self, configs: Sequence[Config]) -> Tokens:
        """The tokens of configs that have a program, i.e. a finite predicted time."""
        return stacked([self.row(config) for config in configs], self.task, self.machine)

    @property
    def task(self) -> np.ndarray:
        candidates = self.model.candidates
        return task_features(candidates.work.task if isinstance(candidates, Candidates) else None)

    @property
    def machine(self) -> np.ndarray:
        return machine_numbers(self.model.candidates.machine, self.model.threads).features()

    def names(self, config: Config) -> list[str]:
        """The names of a config's tokens, in the order in which the network has them."""
        values = dict(config.values)
        space = self.model.candidates.of_config(config).space
        knobs = [f"{knob.name}={values[knob.name]}" for knob in space.knobs]
        statements = [f"statement {number + 1}" for number in range(len(self.row(config).statements))]
        return ["task", "machine", "terms", "instruction", config.template, *knobs, *statements]

    def row(self, config: Config) -> TokenRow:
        if config not in self._rows:
            self._rows[config] = self._row(config)
        return self._rows[config]

    def _row(self, config: Config) -> TokenRow:
        model, candidates = self.model, self.model.candidates
        terms = model.terms(config)
        assert terms is not None
        applied, values = candidates.of_config(config), dict(config.values)
        counted = terms_features(terms, model.seconds(config), candidates.machine, max(1, model.threads))
        assigned = of_knobs(config.template, values, self._dtype).features()
        rows = np.zeros((0, STATEMENT_WIDTH))
        if self.statements:
            rows = statements_of_config(candidates, config)
        return TokenRow(counted, assigned, *knobs_of(applied.space, config), rows)

    @property
    def _dtype(self) -> DType:
        candidates = self.model.candidates
        if isinstance(candidates, Candidates) and candidates.work.task.graph.inputs:
            return candidates.work.task.graph.inputs[0].dtype
        return DType.F32


def statements_of_config(candidates: object, config: Config) -> np.ndarray:
    """The tokens of the statements in all its loop programs; none if it consists of other kernels."""
    from tilewright.loops.ir import Program

    if not isinstance(candidates, Candidates):
        return np.zeros((0, STATEMENT_WIDTH))
    parts = candidates.implementation(config).parts
    found = [statement_tokens(part.body, MAX_STATEMENTS) for part in parts if isinstance(part.body, Program)]
    return np.concatenate(found)[:MAX_STATEMENTS] if found else np.zeros((0, STATEMENT_WIDTH))


def knobs_of(space: Space, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """(buckets, features): the template, then its knobs."""
    values = dict(config.values)
    numbers = [vocabulary.of_template(config.template), *vocabulary.of_knobs([k.name for k in space.knobs])]
    rows = [np.array(_TEMPLATE_FEATURES), *(knob_features(knob, values[knob.name]) for knob in space.knobs)]
    return np.array(numbers), np.array(rows)


_TEMPLATE_FEATURES = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


@dataclass(frozen=True)
class TokenRow:
    """One candidate, without the tokens that all candidates of a task share."""

    terms: np.ndarray
    instruction: np.ndarray
    buckets: np.ndarray
    knobs: np.ndarray
    statements: np.ndarray


def stacked(rows: Sequence[TokenRow], task: np.ndarray, machine: np.ndarray) -> Tokens:
    """The tokens of these candidates, padded to the longest."""
    count = len(rows)
    most = max((len(row.buckets) for row in rows), default=1)
    deepest = max((len(row.statements) for row in rows), default=0)
    knobs = np.zeros((count, most, KNOB_FEATURES), np.float32)
    buckets = np.zeros((count, most), np.int64)
    knob_mask = np.zeros((count, most), bool)
    statements = np.zeros((count, deepest, STATEMENT_WIDTH), np.float32)
    statement_mask = np.zeros((count, deepest), bool)
    for at, row in enumerate(rows):
        knobs[at, : len(row.buckets)] = row.knobs
        buckets[at, : len(row.buckets)] = row.buckets
        knob_mask[at, : len(row.buckets)] = True
        statements[at, : len(row.statements)] = row.statements
        statement_mask[at, : len(row.statements)] = True
    return Tokens(
        np.broadcast_to(task.astype(np.float32), (count, len(task))),
        np.broadcast_to(machine.astype(np.float32), (count, len(machine))),
        np.array([row.terms for row in rows], np.float32).reshape(count, len(TERMS)),
        np.array([row.instruction for row in rows], np.float32).reshape(count, len(ASSIGNMENT)),
        knobs,
        buckets,
        knob_mask,
        statements,
        statement_mask,
    )


def joined(parts: Sequence[Tokens]) -> Tokens:
    """The tokens of several tasks, padded to the longest."""
    most = max(part.knobs.shape[1] for part in parts)
    deepest = max(part.statements.shape[1] for part in parts)
    padded = [_padded(part, most, deepest) for part in parts]
    return Tokens(*(np.concatenate([getattr(part, each.name) for part in padded]) for each in fields(Tokens)))


def _padded(part: Tokens, most: int, deepest: int) -> Tokens:
    def longer(values: np.ndarray, length: int) -> np.ndarray:
        missing = length - values.shape[1]
        return np.pad(values, [(0, 0), (0, missing), *[(0, 0)] * (values.ndim - 2)])

    return replace(
        part,
        knobs=longer(part.knobs, most),
        buckets=longer(part.buckets, most),
        knob_mask=longer(part.knob_mask, most),
        statements=longer(part.statements, deepest),
        statement_mask=longer(part.statement_mask, deepest),
    )


def _log(value: float) -> float:
    return math.log2(1 + value)
