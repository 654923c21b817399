"""The memories of a machine as data, and the scopes of buffers that programs put into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol


class Scope:
    """Where a buffer of a loop program lives, by name. There is one object for each name, so `is` compares them.

    The three constants are what CPUs and GPUs have; a target with other memories names its own: `Scope("scratchpad")`.
    """

    __slots__ = ("value",)

    GLOBAL: ClassVar[Scope]  # the parameters of a program
    REGISTER: ClassVar[Scope]  # at constant indices alone
    SCRATCH: ClassVar[
        Scope
    ]  # of one iteration of the parallel loop: a thread's stack, a block's shared memory

    value: str
    _named: ClassVar[dict[str, Scope]] = {}

    def __new__(cls, name: str) -> Scope:
        known = cls._named.get(name)
        if known is None:
            known = super().__new__(cls)
            object.__setattr__(known, "value", name)
            known = cls._named.setdefault(name, known)
        return known

    @classmethod
    def declared(cls) -> tuple[Scope, ...]:
        """Every scope that anyone has named."""
        return tuple(cls._named.values())

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a scope is its name, and does not change")

    def __repr__(self) -> str:
        return f"Scope({self.value!r})"

    def __reduce__(self) -> tuple[type[Scope], tuple[str]]:
        return Scope, (self.value,)


Scope.GLOBAL, Scope.REGISTER, Scope.SCRATCH = (Scope(name) for name in ("global", "register", "scratch"))

LOOP_SCOPES = (Scope.GLOBAL, Scope.REGISTER, Scope.SCRATCH)  # of CPUs and GPUs

STACK_BYTES = 1 << 20  # scratch memory of a CPU's thread: threads have stacks of 2 MiB and more

# Who sees what is written there.
Sharing = Literal["thread", "warp", "block", "core", "machine"]


@dataclass(frozen=True)
class Memory:
    """One level of a machine's memory.

    `scope` is that of buffers which programs put there; None for a cache, which programs do not address. `bytes` and
    `bytes_per_cycle` are those of one core or multiprocessor's view of it; None: not known.
    """

    name: str
    scope: Scope | None
    shared_by: Sharing
    bytes: int | None = None
    bytes_per_cycle: float | None = None
    latency: float | None = None  # cycles from a load to its value
    line: int | None = None  # bytes that come together


class HasMemories(Protocol):
    @property
    def memories(self) -> tuple[Memory, ...]:
        """From the nearest to the farthest."""

    def describe(self) -> str: ...


def scopes_of(machine: HasMemories) -> tuple[Scope, ...]:
    """The scopes that programs for a machine may use."""
    return tuple(dict.fromkeys(memory.scope for memory in machine.memories if memory.scope is not None))
