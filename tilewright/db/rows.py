"""The storage format of records and decisions: JSON, identified by its digest.

Facts that many records share, the text of a task and the description of a machine, are stored once and referenced by
digest. A digest covers the exact bytes, which export, import and merge copy unchanged. So a record has the same
digest everywhere, whatever version of Tilewright wrote it: it is never stored twice, and damage is always detected.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from tilewright.db.record import Decision, Key, Record
from tilewright.db.versions import Versions
from tilewright.space.former_names import current_config
from tilewright.space.space import Config

T = TypeVar("T")
FACTS, TRIAL, DECISION = "facts", "trial", "decision"
KINDS = (FACTS, TRIAL, DECISION)


class Damaged(Exception):
    """The bytes do not match their digest, or this version cannot read them."""


class Row(msgspec.Struct, frozen=True):
    """One stored item. `body` is JSON."""

    kind: str
    digest: str
    body: msgspec.Raw

    def checked(self) -> bytes:
        body = bytes(self.body)
        if self.kind not in KINDS or digest_of(self.kind, body) != self.digest:
            raise Damaged(f"the {self.kind} {self.digest[:12]} does not have the digest that it should")
        return body


class TaskFacts(msgspec.Struct, frozen=True, tag="task"):
    label: str
    text: str
    constants: tuple[int, ...]


class MachineFacts(msgspec.Struct, frozen=True, tag="machine"):
    description: dict[str, Any]


class Trial(msgspec.Struct, frozen=True):
    """A Record, with digests in place of its shared facts."""

    key: Key
    task: str
    machine: str
    config: Config
    times: tuple[float, ...]
    error: float | None
    failure: str
    message: str
    build_seconds: float
    predicted: float | None
    versions: Versions
    when: float


Facts = TaskFacts | MachineFacts
Lookup = Callable[[str], Facts]  # raises Damaged

_encode = msgspec.json.Encoder(order="deterministic").encode
_trial = msgspec.json.Decoder(Trial).decode
_decision = msgspec.json.Decoder(Decision).decode
_facts: Callable[[bytes], Facts] = msgspec.json.Decoder(Facts).decode
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)


def digest_of(kind: str, body: bytes) -> str:
    return hashlib.sha256(kind.encode() + b" " + body).hexdigest()[:32]


def row_of(kind: str, value: msgspec.Struct) -> Row:
    body = _encode(value)
    return Row(kind, digest_of(kind, body), msgspec.Raw(body))


def rows_of_record(record: Record) -> tuple[Row, Row, Row]:
    """The facts that a record refers to, then the trial."""
    task = row_of(FACTS, TaskFacts(record.label, record.text, record.constants))
    machine = row_of(FACTS, MachineFacts(record.machine))
    return task, machine, row_of(TRIAL, Trial(**_own(record), task=task.digest, machine=machine.digest))


def row_of_decision(decision: Decision) -> Row:
    return row_of(DECISION, decision)


def trial_of(row: Row) -> Trial:
    trial = _read(row, _trial)
    if not all(map(_is_time, trial.times)):
        raise Damaged(f"the trial {row.digest[:12]} has times that are not positive numbers")
    return msgspec.structs.replace(trial, config=current_config(trial.config))


def decision_of(row: Row) -> Decision:
    decision = _read(row, _decision)
    if not _is_time(decision.seconds):
        raise Damaged(f"the decision {row.digest[:12]} has a time that is not a positive number")
    return msgspec.structs.replace(decision, config=current_config(decision.config))


def _is_time(seconds: float) -> bool:
    return 0 < seconds < math.inf


def facts_of(row: Row) -> Facts:
    return _read(row, _facts)


def key_of(row: Row) -> Key | None:
    """The key of a trial or a decision; Damaged if it is invalid."""
    if row.kind == FACTS:
        facts_of(row)
        return None
    return (trial_of(row) if row.kind == TRIAL else decision_of(row)).key


def record_of(trial: Trial, lookup: Lookup) -> Record:
    task, machine = lookup(trial.task), lookup(trial.machine)
    if not isinstance(task, TaskFacts) or not isinstance(machine, MachineFacts):
        raise Damaged("the trial refers to facts of another kind")
    return Record(
        label=task.label,
        text=task.text,
        constants=task.constants,
        machine=machine.description,
        **_own(trial),
    )


def _own(of: Record | Trial) -> dict[str, Any]:
    """The fields that a Record and a Trial have in common."""
    shared = ("task", "machine")
    return {name: getattr(of, name) for name in Trial.__struct_fields__ if name not in shared}


def _read(row: Row, decode: Callable[[bytes], T]) -> T:
    body = row.checked()
    try:
        return decode(body)
    except _UNREADABLE as error:
        raise Damaged(f"this version cannot read the {row.kind} {row.digest[:12]}: {error}") from None
