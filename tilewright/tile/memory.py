"""The memory that a launch may touch: the tensors that were passed, and in debug mode who touched what.

An address is an int64: the allocation in the upper bits, a byte offset below. Between two allocations there is more
room than any offset reaches, so an address outside of every tensor is always noticed. Tensors that share memory are
one allocation, so a race between two views of one tensor is found.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from tilewright.dtypes import DType
from tilewright.errors import (
    KernelArgumentError,
    KernelError,
    OutOfBoundsError,
    RaceError,
    UnwrittenReadError,
)
from tilewright.support.source import SourceLocation
from tilewright.tile.atomics import COMBINE

_ROOM = 44  # bits of an offset
_ORIGIN = 1 << (_ROOM - 1)  # offset 0 is in the middle: offsets may be negative


@dataclass(frozen=True)
class TensorArgument:
    """The memory of a tensor: sizes and strides in elements."""

    name: str
    dtype: DType
    address: int  # of the element with index 0
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    writable: bool

    @property
    def extent(self) -> tuple[int, int]:
        """The address of its first byte, and the one after its last; (address, address) if it has no elements."""
        if 0 in self.shape:
            return self.address, self.address
        low = sum(min(0, (n - 1) * s) for n, s in zip(self.shape, self.strides, strict=True))
        high = sum(max(0, (n - 1) * s) for n, s in zip(self.shape, self.strides, strict=True))
        return self.address + low * self.dtype.bytes, self.address + (high + 1) * self.dtype.bytes


@dataclass(eq=False)
class _Allocation:
    """A range of bytes, counted in granules of the size of the narrowest element among its tensors."""

    start: int
    granule: int
    tensors: tuple[TensorArgument, ...]
    data: np.ndarray  # bytes
    member: np.ndarray  # granules that belong to a tensor
    writable: bool
    shadow: _Shadow | None = None
    views: dict[DType, np.ndarray] = field(default_factory=dict)

    @property
    def names(self) -> str:
        return " and ".join(f"`{tensor.name}`" for tensor in self.tensors)

    def view(self, dtype: DType) -> np.ndarray:
        if dtype not in self.views:
            whole = self.data.size // dtype.bytes * dtype.bytes
            self.views[dtype] = self.data[:whole].view(dtype.numpy)
        return self.views[dtype]


class _Shadow:
    """For each granule, the program instance and the access that last wrote it, read it, and added to it; -1 is none.
    Of the reads, and of the atomics, the first one and the last one by another instance are kept: with both, no race
    with a later access is missed."""

    def __init__(self, granules: int) -> None:
        self.writer, self.reader, self.next_reader, self.adder, self.next_adder = (
            np.full((2, granules), -1, np.int32) for _ in range(5)
        )
        self.written = np.ones(granules, np.bool_)


class Memory:
    """The memory that one launch reads and writes. `current` is the program instance that runs, `site` its source
    line."""

    def __init__(self, tensors: Sequence[TensorArgument], debug: bool, unwritten: Sequence[str] = ()) -> None:
        self.debug = debug
        self.current = 0
        self.grid: tuple[int, int, int] = (1, 1, 1)
        self.site: SourceLocation | None = None
        self.sites: dict[SourceLocation | None, int] = {}
        self.site_list: list[SourceLocation | None] = []
        self.allocations: list[_Allocation] = []
        self.pointers: dict[str, np.ndarray] = {}
        for group in _sharing(tensors):
            self._allocate(group)
        for name in unwritten:
            self._forget(next(tensor for tensor in tensors if tensor.name == name))

    def _allocate(self, tensors: list[TensorArgument]) -> None:
        start = min(tensor.extent[0] for tensor in tensors)
        size = max(tensor.extent[1] for tensor in tensors) - start
        granule = min(tensor.dtype.bytes for tensor in tensors)
        raw: Any = (ctypes.c_ubyte * size).from_address(start) if size else b""
        data = np.frombuffer(raw, np.uint8)
        member = np.zeros(-(-size // granule), np.bool_)
        writable = all(tensor.writable for tensor in tensors)
        found = _Allocation(start, granule, tuple(tensors), data, member, writable)
        if self.debug:
            found.shadow = _Shadow(member.size)
        index = len(self.allocations)
        self.allocations.append(found)
        for tensor in tensors:
            if (tensor.address - start) % tensor.dtype.bytes:
                raise KernelArgumentError(
                    f"`{tensor.name}` does not begin at a multiple of its element's {tensor.dtype.bytes} bytes",
                    remedy="pass a copy of the tensor",
                )
            for part in _granules_of(tensor, found):
                part[...] = True
            address = (index << _ROOM) + _ORIGIN + tensor.address - start
            self.pointers[tensor.name] = np.asarray(address, np.int64)

    def _forget(self, tensor: TensorArgument) -> None:
        allocation = next(each for each in self.allocations if tensor in each.tensors)
        if allocation.shadow is not None:
            for part in _granules_of(tensor, allocation, allocation.shadow.written):
                part[...] = False

    # -- accesses ----------------------------------------------------------------------------------------------------

    def load(self, addresses: np.ndarray, dtype: DType, mask: np.ndarray | None) -> np.ndarray:
        """Load elements. Those with a false mask are not read: they are 0, and in debug mode NaN or a conspicuous
        number."""
        result = np.full(addresses.shape, _nothing(dtype) if self.debug else 0, dtype.numpy)
        active = np.ones(addresses.shape, np.bool_) if mask is None else mask
        for allocation, lanes, index in self._find(addresses, active, dtype, "load"):
            if allocation.shadow is not None:
                self._read(allocation, index, dtype)
            result[lanes] = allocation.view(dtype)[index]
        return result

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray | None) -> None:
        dtype = DType.of(values)
        active = np.ones(addresses.shape, np.bool_) if mask is None else mask
        for allocation, lanes, index in self._find(addresses, active, dtype, "store"):
            self._writable(allocation)
            if allocation.shadow is not None:
                self._write(allocation, index, dtype)
            allocation.view(dtype)[index] = values[lanes]

    def atomic(
        self,
        kind: str,
        addresses: np.ndarray,
        values: np.ndarray,
        mask: np.ndarray | None,
        expected: Any = None,
    ) -> np.ndarray:
        dtype = DType.of(values)
        result = np.full(addresses.shape, _nothing(dtype) if self.debug else 0, dtype.numpy)
        active = np.ones(addresses.shape, np.bool_) if mask is None else mask
        for allocation, lanes, index in self._find(addresses, active, dtype, f"atomic_{kind}"):
            self._writable(allocation)
            if allocation.shadow is not None:
                self._change(allocation, index, dtype, kind)
            wanted = None if expected is None else expected[lanes]
            result[lanes] = _each(kind, allocation.view(dtype), index, values[lanes], wanted)
        return result

    def _find(
        self, addresses: np.ndarray, active: np.ndarray, dtype: DType, what: str
    ) -> list[tuple[_Allocation, tuple[np.ndarray, ...], np.ndarray]]:
        """For each allocation: which lanes access it, and which of its elements."""
        lanes = np.nonzero(active) if addresses.shape else ((np.nonzero(np.atleast_1d(active)))[0],)
        if addresses.shape == ():
            if not lanes[0].size:
                return []
            lanes = ()
        taken = np.atleast_1d(addresses[lanes])
        if not taken.size:
            return []
        owners = taken >> _ROOM
        found: list[tuple[_Allocation, tuple[np.ndarray, ...], np.ndarray]] = []
        for owner in np.unique(owners):
            chosen = owners == owner
            offsets = (taken[chosen] & ((1 << _ROOM) - 1)) - _ORIGIN
            allocation = self.allocations[owner]
            index = self._inside(allocation, offsets, dtype, what, lanes, chosen)
            if lanes == ():
                found.append((allocation, (), index[0]))
            else:
                found.append((allocation, tuple(axis[chosen] for axis in lanes), index))
        return found

    def _inside(
        self,
        allocation: _Allocation,
        offsets: np.ndarray,
        dtype: DType,
        what: str,
        lanes: tuple[np.ndarray, ...],
        chosen: np.ndarray,
    ) -> np.ndarray:
        """The elements at these offsets. Raises OutOfBoundsError unless all of them are elements of a tensor."""
        granules = offsets // allocation.granule
        outside = (offsets < 0) | (offsets + dtype.bytes > allocation.data.size)
        outside |= ~allocation.member[np.where(outside, 0, granules)] if allocation.member.size else True
        if np.any(outside):
            lane = int(np.flatnonzero(outside)[0])
            tensor = allocation.tensors[0]
            element = (int(offsets[lane]) + allocation.start - tensor.address) // tensor.dtype.bytes
            position = "" if lanes == () else f" (tile index {_lane(lanes, chosen, lane)})"
            raise self.failure(
                OutOfBoundsError,
                f"{what} of {allocation.names} at element offset {element}{position}, outside of the tensor of shape"
                f" {tensor.shape} and strides {tensor.strides}; {int(np.count_nonzero(outside))} elements of the access"
                " are outside",
            )
        return offsets // dtype.bytes

    def failure(self, kind: type[KernelError], message: str) -> KernelError:
        return kind(f"program instance {self.instance(self.current)}: {message}", where=self.site)

    def instance(self, number: int) -> tuple[int, int, int]:
        x, y, _ = self.grid
        return number % x, number // x % y, number // (x * y)

    def _writable(self, allocation: _Allocation) -> None:
        if not allocation.writable:
            raise self.failure(KernelArgumentError, f"a store to {allocation.names}, which is read-only").at(
                self.site
            )

    # -- debug mode --------------------------------------------------------------------------------------------------

    def _site(self) -> int:
        if self.site not in self.sites:
            self.sites[self.site] = len(self.site_list)
            self.site_list.append(self.site)
        return self.sites[self.site]

    def _touched(self, allocation: _Allocation, index: np.ndarray, dtype: DType) -> np.ndarray:
        ratio = dtype.bytes // allocation.granule
        flat = np.atleast_1d(index).reshape(-1)
        return flat if ratio == 1 else (flat[:, None] * ratio + np.arange(ratio)).reshape(-1)

    def _conflict(self, allocation: _Allocation, at: np.ndarray, record: np.ndarray, what: str) -> None:
        who = record[0, at]
        others = (who >= 0) & (who != self.current)
        if not np.any(others):
            return
        first = int(np.flatnonzero(others)[0])
        granule, other = int(at[first]), int(who[first])
        tensor = allocation.tensors[0]
        element = (granule * allocation.granule + allocation.start - tensor.address) // tensor.dtype.bytes
        site = self.site_list[int(record[1, granule])]
        there = "" if site is None else f" at {site.short}"
        raise self.failure(
            RaceError,
            f"race on element offset {element} of {allocation.names}: this instance {what} it,"
            f" and instance {self.instance(other)} {_VERBS[_record_name(allocation, record)]} it{there}",
        )

    def _read(self, allocation: _Allocation, index: np.ndarray, dtype: DType) -> None:
        shadow = allocation.shadow
        assert shadow is not None
        at = self._touched(allocation, index, dtype)
        if not np.all(shadow.written[at]):
            granule = int(at[~shadow.written[at]][0])
            raise self.failure(
                UnwrittenReadError,
                f"load of {allocation.names} at element offset {granule * allocation.granule // dtype.bytes}, which"
                " nothing has written",
            )
        for record in (shadow.writer, shadow.adder, shadow.next_adder):
            self._conflict(allocation, at, record, "reads")
        self._note(at, shadow.reader, shadow.next_reader)

    def _write(self, allocation: _Allocation, index: np.ndarray, dtype: DType) -> None:
        shadow = allocation.shadow
        assert shadow is not None
        at = self._touched(allocation, index, dtype)
        readers = shadow.reader, shadow.next_reader
        for record in (shadow.writer, shadow.adder, shadow.next_adder, *readers):
            self._conflict(allocation, at, record, "writes")
        shadow.writer[0, at], shadow.writer[1, at] = self.current, self._site()
        shadow.written[at] = True

    def _change(self, allocation: _Allocation, index: np.ndarray, dtype: DType, kind: str) -> None:
        shadow = allocation.shadow
        assert shadow is not None
        at = self._touched(allocation, index, dtype)
        if not np.all(shadow.written[at]):
            raise self.failure(
                UnwrittenReadError, f"atomic_{kind} to {allocation.names}, where nothing has been written"
            )
        for record in (shadow.writer, shadow.reader, shadow.next_reader):
            self._conflict(allocation, at, record, "adds to")
        self._note(at, shadow.adder, shadow.next_adder)

    def _note(self, at: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
        """Keep this access as the first one, or as the last one by another instance."""
        fresh = at[first[0, at] < 0]
        first[0, fresh], first[1, fresh] = self.current, self._site()
        other = at[first[0, at] != self.current]
        last[0, other], last[1, other] = self.current, self._site()


_VERBS = {
    "writer": "writes",
    "adder": "adds to",
    "next_adder": "adds to",
    "reader": "reads",
    "next_reader": "reads",
}


def _record_name(allocation: _Allocation, record: np.ndarray) -> str:
    return next(name for name, each in vars(allocation.shadow).items() if each is record)


def _lane(lanes: tuple[np.ndarray, ...], chosen: np.ndarray, lane: int) -> str:
    return str(tuple(int(axis[chosen][lane]) for axis in lanes))


def _nothing(dtype: DType) -> float | int:
    """The value of unread elements in debug mode."""
    if dtype.is_float:
        return float("nan")
    return 1 if dtype is DType.BOOL else int(np.iinfo(dtype.numpy).max) - 41


def _each(kind: str, memory: np.ndarray, index: np.ndarray, values: np.ndarray, expected: Any) -> np.ndarray:
    """Combine, one lane after another, lanes that share an element; return the old value of each lane."""
    combine = COMBINE[kind]
    if np.ndim(index) and np.unique(index).size != np.size(index):
        before = np.empty_like(values)
        for lane, (at, value) in enumerate(zip(index, values, strict=True)):
            before[lane] = memory[at]
            memory[at] = combine(memory[at], value, None if expected is None else expected[lane])
        return before
    before = np.array(memory[index])
    memory[index] = combine(before, values, expected)
    return before


def _granules_of(
    tensor: TensorArgument, allocation: _Allocation, flags: np.ndarray | None = None
) -> list[np.ndarray]:
    """The flags of a tensor's granules, as one view in the tensor's shape for each granule of an element."""
    if 0 in tensor.shape:
        return []
    flags = allocation.member if flags is None else flags
    ratio = tensor.dtype.bytes // allocation.granule
    first = (tensor.address - allocation.start) // allocation.granule
    strides = tuple(stride * ratio * flags.itemsize for stride in tensor.strides)
    # as_strided counts from the first element, which need not be the one with the lowest address.
    return [as_strided(flags[first + part :], tensor.shape, strides) for part in range(ratio)]


def _sharing(tensors: Sequence[TensorArgument]) -> list[list[TensorArgument]]:
    """Group tensors whose bytes overlap."""
    groups: list[list[TensorArgument]] = []
    end = -1
    for tensor in sorted(tensors, key=lambda each: each.extent):
        low, high = tensor.extent
        if groups and low < end and low < high:
            groups[-1].append(tensor)
            end = max(end, high)
        else:
            groups.append([tensor])
            end = high
    return groups
