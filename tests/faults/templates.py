"""Templates whose programs do harm while they are made, or have a mistake in them. Builders import
`tests.faults.registered`, and ask these like any other.

with Runner(threads, modules=("tests.faults.registered",)) as runner: ...
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from tests.faults.mutants import Edit, edits
from tilewright import te
from tilewright.loops.default import default_program
from tilewright.loops.ir import Program, Store
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, Terms, Work

NAME = "faulty"

# What each does, and as what it must be known.
BUILD_FAULTS = {
    "none": "",
    "segmentation fault": "crash",
    "abort": "crash",
    "exit": "crash",
    "endless loop": "timeout",
    "eaten memory": "memory",
    "memory of a library": "memory",
    "exception": "build",
    "unknown function": "build",
    "out of bounds": "illegal",
}


def config(fault: str) -> Config:
    return Config(NAME, (("fault", fault),))


class Faulty:
    name = NAME

    def apply(self, work: Work) -> Applied | None:
        return AppliedFaulty(work)


@dataclass(frozen=True)
class AppliedFaulty:
    work: Work

    @property
    def space(self) -> Space:
        return Space(NAME, (Knob("fault", tuple(BUILD_FAULTS)),), lambda values: True)

    def terms(self, config: Config) -> Terms | None:
        return None

    def program(self, config: Config) -> Program:
        assert self.work.formula is not None
        good = default_program(self.work.formula, self.work.machine)
        output = good.params[-1]
        fault = config["fault"]
        if fault == "segmentation fault":
            ctypes.string_at(0)
        elif fault == "abort":
            os.abort()
        elif fault == "exit":
            os._exit(3)
        elif fault == "endless loop":
            while True:
                pass
        elif fault == "eaten memory":
            eaten = []
            while True:
                eaten.append(bytearray(64 << 20))
        elif fault == "memory of a library":
            allocate = ctypes.CDLL("libstdc++.so.6")["_Znwm"]  # operator new: no one catches what it throws
            allocate(ctypes.c_size_t(1 << 50))
        elif fault == "exception":
            raise KeyError("a template with a mistake in it")
        elif fault == "unknown function":
            value = te.Call("no_such_function", (te.const(1, output.dtype),), output.dtype)
            return Program("unknown", good.params, Store(output, te.as_index(0), value))
        elif fault == "out of bounds":
            zero = te.const(0, output.dtype)
            return Program("outside", good.params, Store(output, te.as_index(output.size), zero))
        return good


# -- mistakes ---------------------------------------------------------------------------------------------------------

MUTATED = "mutated"


def mutated(base: Config, edit: int) -> Config:
    """Another config's program, with one of its possible mistakes."""
    return Config(MUTATED, (("base", msgspec.json.encode(base).decode()), ("edit", edit)))


class Mutated:
    name = MUTATED

    def apply(self, work: Work) -> Applied | None:
        return AppliedMutated(work)


@dataclass(frozen=True)
class AnyConfig(Space):
    def __contains__(self, config: Config) -> bool:
        return config.template == self.template


@dataclass(frozen=True)
class AppliedMutated:
    work: Work

    @property
    def space(self) -> Space:
        return AnyConfig(MUTATED, (), lambda values: False)

    def terms(self, config: Config) -> Terms | None:
        return None

    def program(self, config: Config) -> Program:
        base = msgspec.json.decode(str(config["base"]), type=Config)
        return _edits_of(self.work, base)[config.int("edit")].made()


@lru_cache(maxsize=8)
def _edits_of(work: Work, base: Config) -> list[Edit]:
    return edits(Candidates.of(work).program(base))
