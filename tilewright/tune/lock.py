"""Lock files: the config of every task of a build as readable JSON, from which the same build can be repeated.

    {"format": 2, "numerics": "fast", "tasks": {
       "5f1c...": {"label": "conv+add+relu", "kernel": "9b0e...", "template": "contraction", "values": {"rows": 6}}}}

`kernel` is a fingerprint of everything that decides the machine code: the program, the machine, the numerics, the
code generator and the native compiler. A build with a lock has exactly these kernels, or fails and names those it
cannot build.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tilewright.codegen.generator import locked_code_of
from tilewright.errors import LockError, TilewrightError
from tilewright.runtime.plan import Origin
from tilewright.space.candidates import Candidates
from tilewright.space.former_names import current_config
from tilewright.space.space import Config, Value
from tilewright.space.template import Work
from tilewright.support.files import read_regular
from tilewright.tune.choose import Choice

FORMAT = 2  # 1: "fast" had no bound for each element
_MAX_BYTES = 256 << 20  # maximum file size; a task takes a few hundred bytes
_NAMED = 5  # mismatches listed in a message


class LockedTask(msgspec.Struct, frozen=True):
    label: str
    kernel: str
    template: str
    values: dict[str, Value] = {}

    @property
    def config(self) -> Config:
        return current_config(Config.of(self.template, self.values))


class Lock(msgspec.Struct, frozen=True):
    format: int
    numerics: str
    tasks: dict[str, LockedTask]  # by key of the task
    target: str = ""  # the kind of machine; "" in old files


def lock_of(choices: Mapping[str, Choice], works: Mapping[str, Work], numerics: str) -> Lock:
    tasks = {}
    for key, choice in choices.items():
        kernel = locked_code_of(choice.implementation, works[key].machine, numerics)
        config = choice.config
        tasks[key] = LockedTask(works[key].task.label, kernel, config.template, dict(config.values))
    kinds = {work.machine.kind for work in works.values()}
    return Lock(FORMAT, numerics, tasks, target=kinds.pop() if len(kinds) == 1 else "")


def locked_choices(lock: Lock, works: Mapping[str, Work], numerics: str, path: Path) -> dict[str, Choice]:
    """Return the lock's choice for each of `works`. The lock's other tasks belong to other models and are ignored."""
    if lock.numerics != numerics:
        raise LockError(f"{path} was built with numerics={lock.numerics!r}, and this one has {numerics!r}")
    kinds = {work.machine.kind for work in works.values()}
    if lock.target and kinds and kinds != {lock.target}:
        raise LockError(
            f"{path} was built for target={lock.target!r}, and this one is for {', '.join(map(repr, kinds))}",
            remedy="compile for the target of the lock file, or write another for this one",
        )
    choices: dict[str, Choice] = {}
    complaints: list[str] = []
    for key, work in works.items():
        locked = lock.tasks.get(key)
        try:
            if locked is None:
                raise LockMismatch("the lock has no such task")
            choices[key] = _locked_choice(locked, work, numerics)
        except LockMismatch as misfit:
            complaints.append(f"{work.task.label} ({key[:8]}): {misfit}")
    if complaints:
        named = [f"  {complaint}" for complaint in complaints[:_NAMED]]
        if len(complaints) > _NAMED:
            named.append(f"  and {len(complaints) - _NAMED} more")
        count = f"{len(complaints)} of {len(works)} tasks"
        raise LockError("\n".join((f"{path} does not fit this build, for {count}:", *named)))
    return choices


class LockMismatch(Exception):
    """A task cannot be built as its lock says."""


def _locked_choice(locked: LockedTask, work: Work, numerics: str) -> Choice:
    candidates = Candidates.of(work)
    if not candidates.is_legal(locked.config):
        raise LockMismatch(
            f"its config is unknown to this version, or needs a library that is not here: {locked.config}"
        )
    try:
        implementation = candidates.implementation(locked.config)
    except TilewrightError as error:
        raise LockMismatch(f"its config builds nothing any more: {error.message}") from None
    if locked_code_of(implementation, work.machine, numerics) != locked.kernel:
        raise LockMismatch(
            "its config gives another kernel here: the machine, the compiler behind it or this version differ"
        )
    return Choice(implementation, locked.config, None, Origin("lock"))


# -- the file ---------------------------------------------------------------------------------------------------------


def read_lock(path: Path) -> Lock | None:
    """Read a lock file; None if it does not exist."""
    try:
        data = read_regular(path, _MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LockError(f"cannot read the lock file {path}: {error.strerror or error}") from None
    try:
        version = msgspec.json.decode(data, type=_Head).format
        if version != FORMAT:
            raise LockError(
                f"{path} has format {version}, and this version of Tilewright writes {FORMAT}",
                remedy="build with the version that wrote it, or remove it and choose anew",
            )
        return msgspec.json.decode(data, type=Lock)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LockError(f"{path} is not a lock file: {error}") from None


class _Head(msgspec.Struct):
    format: int


def write_lock(path: Path, lock: Lock) -> None:
    """Write the file atomically, with its tasks sorted so that two files can be compared."""
    ordered = msgspec.structs.replace(lock, tasks=dict(sorted(lock.tasks.items())))
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=2) + b"\n")
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise LockError(f"cannot write the lock file {path}: {error.strerror or error}") from None


def check_lockable(path: Path) -> None:
    """Raise LockError if the lock file cannot be written, before measuring starts."""
    if not path.parent.is_dir():
        raise LockError(f"cannot write the lock file {path}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise LockError(f"cannot write the lock file {path}: the folder is read-only")
