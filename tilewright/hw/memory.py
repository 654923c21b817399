"""The memories of a machine as data, and the scopes of buffers in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol


class Scope:
    """The memory of a loop program's buffer, by name. There is one object per name, so `is` compares them.

    CPUs and GPUs have the three constants; a target with other memories names its own: `Scope("scratchpad")`.
    """

    __slots__ = ("value",)

    GLOBAL: ClassVar[Scope]  # the parameters of a program
    REGISTER: ClassVar[Scope]  # only constant indices
    SCRATCH: ClassVar[Scope]  # per iteration of the parallel loop: a thread's stack, a block's shared memory

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
        """Every scope that was named."""
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

# Who sees writes.
Sharing = Literal["thread", "warp", "block", "core", "machine"]


@dataclass(frozen=True)
class Memory:
    """One level of a machine's memory.

    `scope` is that of the buffers that programs place there; None for a cache, which programs do not address. `bytes`
    and `bytes_per_cycle` are per core or multiprocessor; None: unknown.
    """

    name: str
    scope: Scope | None
    shared_by: Sharing
    bytes: int | None = None
    bytes_per_cycle: float | None = None
    latency: float | None = None  # cycles for a load
    line: int | None = None  # bytes of a transaction


class HasMemories(Protocol):
    @property
    def memories(self) -> tuple[Memory, ...]:
        """From the nearest to the farthest."""

    def describe(self) -> str: ...


def scopes_of(machine: HasMemories) -> tuple[Scope, ...]:
    """The scopes that programs for a machine may use."""
    return tuple(dict.fromkeys(memory.scope for memory in machine.memories if memory.scope is not None))
