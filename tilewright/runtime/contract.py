"""Kernel contracts: what each kernel may be called with, bound to its machine code.

    object code | contract as JSON | length of the contract, SHA-256 of both, magic

The contract states the symbol, the number of iterations and the argument sizes that the code was generated for, and
the plan; it is appended to the code when a model is linked. A plan that was changed afterwards, even with its
checksums, no longer fits its kernels and is refused before anything is loaded. Only a signature (`signing.py`)
protects the code and its contract; if both were replaced, the plan must still fit the contract.
"""

from __future__ import annotations

import hashlib
import math
import struct
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec

from tilewright.dtypes import DType
from tilewright.errors import CodegenError, VerificationError
from tilewright.runtime.plan import PREDICTED, Launch, Place, Plan, Step, TensorSpec, aligned

_MAGIC = b"TWKERNEL"
_DOMAIN = b"tilewright kernel 1\0"
_TRAILER = struct.Struct("<Q32s8s")


class Argument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A buffer that a kernel reads or, if it is the last one, writes."""

    dtype: str
    elements: int

    @staticmethod
    def of(spec: TensorSpec) -> Argument:
        return Argument(spec.dtype, math.prod(spec.shape))

    @staticmethod
    def part(place: Place, spec: TensorSpec) -> Argument:
        """The value that a kernel reads a part of, at this place with this type."""
        return Argument(spec.dtype, place.whole // DType.parse(spec.dtype).bytes)


class Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    symbol: str
    extent: int
    arguments: tuple[Argument, ...]
    target: dict[str, Any]  # as in the plan: what the code needs of a machine
    plan: str  # digest of the plan without its kernels
    launch: Launch | None = None


def plan_digest(plan: Plan) -> str:
    """The digest of a plan, without the digests of its kernels, which contain this one, and without what is only for
    display: where choices came from (the same choice gives the same code), the names of layers, and what
    the partition was compared with."""
    tasks = {key: msgspec.structs.replace(info, origin=PREDICTED) for key, info in plan.tasks.items()}
    steps = tuple(msgspec.structs.replace(step, layers=msgspec.UNSET) for step in plan.steps)
    plain = msgspec.structs.replace(plan, kernels={}, tasks=tasks, steps=steps, fusion=msgspec.UNSET)
    text = msgspec.json.encode(plain, order="deterministic")
    return hashlib.sha256(text).hexdigest()


def sealed(code: bytes, contract: Contract) -> bytes:
    """Object code followed by its contract."""
    text = msgspec.json.encode(contract)
    return code + text + _TRAILER.pack(len(text), _digest(code, text), _MAGIC)


def code_of(data: bytes) -> bytes:
    """Object code without its contract, if it has one."""
    return unsealed(data)[0] if data.endswith(_MAGIC) else data


def unsealed(data: bytes) -> tuple[bytes, Contract]:
    """(code, contract). Raises CodegenError unless they are as they were sealed."""
    if len(data) < _TRAILER.size or not data.endswith(_MAGIC):
        raise CodegenError("object code without a contract")
    size, digest, _ = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)
    begin = len(data) - _TRAILER.size - size
    if begin < 0:
        raise CodegenError("object code with a contract that is longer than itself")
    code, text = data[:begin], data[begin : begin + size]
    if _digest(code, text) != digest:
        raise CodegenError("object code that is not what its contract was made for")
    try:
        return code, msgspec.json.decode(text, type=Contract)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodegenError(f"object code with a contract that cannot be read: {error}") from None


def _digest(code: bytes, text: bytes) -> bytes:
    digest = hashlib.sha256(_DOMAIN)
    for chunk in (len(code).to_bytes(8, "little"), code, text):
        digest.update(chunk)
    return digest.digest()


def check_contracts(
    plan: Plan, objects: Mapping[str, bytes], well_formed: Callable[[bytes, str], None]
) -> None:
    """Raise VerificationError or CodegenError unless every step calls its kernel within its contract, every value is
    written before it is read, and all object code is `well_formed`. `plan` is valid on its own."""
    contracts = {}
    target, digest_of_plan = _plain(plan.target), plan_digest(plan)
    for symbol, digest in plan.kernels.items():
        if digest not in objects:
            _fail(f"no object code {digest[:16]!r} for the kernel {symbol[:80]!r}")
        if hashlib.sha256(objects[digest]).hexdigest() != digest:
            _fail(f"the object code of the kernel {symbol[:80]!r} is not the one that the plan names")
        code, contract = unsealed(objects[digest])
        if contract.symbol != symbol:
            _fail(f"the kernel {symbol[:80]!r} has the object code of another")
        if _plain(contract.target) != target:
            _fail(f"the kernel {symbol[:80]!r} was made for another machine than the plan")
        if contract.plan != digest_of_plan:
            _fail(f"the kernel {symbol[:80]!r} was made for another plan")
        well_formed(code, symbol)
        contracts[symbol] = contract
    for number, step in enumerate(plan.steps):
        if step.vendor is not None:
            _fail(f"step {number} is computed by a library, which no saved model has")
        _check_step(plan, number, step, contracts[step.kernel])
    _check_values(plan)


def _plain(target: dict[str, Any]) -> bytes:
    return msgspec.json.encode(target, order="deterministic")


def _check_step(plan: Plan, number: int, step: Step, contract: Contract) -> None:
    where = f"step {number} ({step.name[:80] or step.kernel[:80]})"
    info = plan.tasks[step.task]
    given = tuple(map(Argument.of, (*info.inputs, info.output)))
    if given != contract.arguments:
        _fail(f"{where}: its kernel takes other arguments than the plan gives")
    if step.extent != contract.extent or step.launch != contract.launch:
        _fail(f"{where}: its kernel is made for another number of iterations or threads")


def _check_values(plan: Plan) -> None:
    """Every argument is an input, constant, output or intermediate value of its type; the last two only after a step
    wrote it and before anything overwrote it. A read may be of a part of such a value, except of a constant."""
    whole = {
        "input": tuple(map(Argument.of, plan.inputs)),
        "output": tuple(map(Argument.of, plan.outputs)),
        "constant": tuple(map(Argument.of, plan.constants)),
    }
    values: defaultdict[tuple[str, int], Written] = defaultdict(Written)  # for the arena, and for each output
    most = 0
    for number, step in enumerate(plan.steps):
        info = plan.tasks[step.task]
        specs = (*info.inputs, info.output)
        for position, (place, spec) in enumerate(zip(step.arguments, specs, strict=True)):
            argument, buffer = Argument.of(spec), values[place.space, place.index]
            end = place.offset + spec.bytes
            written = position == len(specs) - 1
            if place.space in whole:
                offset, taken = (0, Argument.part(place, spec)) if place.whole else (place.offset, argument)
                if offset or whole[place.space][place.index] != taken:
                    _fail(f"step {number}: {place.space} {place.index} is not what its kernel takes")
            if place.space == "arena":
                most = max(most, end)
            if written:
                buffer.write(place.offset, end, argument)
            elif place.space in ("arena", "output") and spec.bytes and not _is_written(buffer, place, spec):
                _fail(f"step {number} reads what no step before it has written")
    memory = plan.memory
    if memory.arena_bytes > aligned(most) or memory.constant_bytes != sum(
        spec.bytes for spec in plan.constants
    ):
        _fail("its memory is not what its steps use")
    if min(memory.lower_bound, memory.no_reuse) < 0:
        _fail("its memory has a negative size")


def _is_written(buffer: Written, place: Place, spec: TensorSpec) -> bool:
    """Whether this value, or one that contains it, is there."""
    found = buffer.at(place.offset)
    if found is None:
        return False
    begin, end, value = found
    if not place.whole:
        return begin == place.offset and value == Argument.of(spec)
    return place.offset + spec.bytes <= end and value == Argument.part(place, spec)


class Written:
    """The values that a buffer holds, which do not overlap, sorted by offset."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._values: list[tuple[int, Argument]] = []  # (end, value)

    def write(self, begin: int, end: int, value: Argument) -> None:
        """Write a value in place of all that it overlaps."""
        first, after = bisect_left(self._begins, begin), bisect_left(self._begins, max(end, begin + 1))
        if first and self._values[first - 1][0] > begin:
            first -= 1
        self._begins[first:after] = [begin]
        self._values[first:after] = [(end, value)]

    def at(self, place: int) -> tuple[int, int, Argument] | None:
        """(begin, end, value) of the last value that begins at or before `place`."""
        number = bisect_right(self._begins, place) - 1
        return (self._begins[number], *self._values[number]) if number >= 0 else None


def _fail(problem: str) -> NoReturn:
    raise VerificationError(f"a plan that does not fit its kernels: {problem}")
