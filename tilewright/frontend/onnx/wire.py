"""Check a model file before it is parsed: count the messages in its bytes.

An empty node is two bytes in a file and a hundred in memory, so a file that fits need not be a model that does. This
walks over the encoding (https://protobuf.dev/programming-guides/encoding) without building anything: the data of
tensors is stepped over, everything else is counted.
"""

from __future__ import annotations

from typing import Any

import onnx

from tilewright.errors import ModelFileError, ModelSizeError
from tilewright.support import budget as budgets
from tilewright.support.budget import Budget

_SMALL = 4 << 20  # bytes: a smaller file cannot become more than some hundred megabytes
_PER_MESSAGE = 256  # bytes of a message in memory: the largest, an attribute, and its Python handle
_PER_BYTE = 8  # for packed integers, of which the smallest take one byte in the file and eight in memory
_MESSAGES_PER_NODE = 32  # a node, its attributes, and the declared types of its results
_DEPTH = 100  # protobuf's own limit

_Fields = dict[int, Any]  # by number: the fields of a message, True for packed integers


def check_wire(content: bytes, budget: Budget, what: str) -> None:
    """Raise ModelSizeError if a file has more messages than a model within the limits; ModelFileError if its encoding
    is broken."""
    if len(content) <= _SMALL:
        return
    most = _MESSAGES_PER_NODE * budget.limits.nodes
    fields = _fields_of(onnx.ModelProto.DESCRIPTOR, {})
    messages = cost = 0
    stack: list[tuple[int, int, _Fields]] = [(0, len(content), fields)]
    while stack:
        offset, end, known = stack.pop()
        if offset >= end:
            continue
        tag, offset = _varint(content, offset, end)
        kind = tag & 7
        if kind == 0:
            _, offset = _varint(content, offset, end)
        elif kind == 1:
            offset += 8
        elif kind == 5:
            offset += 4
        elif kind == 2:
            length, offset = _varint(content, offset, end)
            inner = known.get(tag >> 3)
            messages += 1
            if messages > most:
                raise _too_many(what, budget)
            cost += _PER_MESSAGE + (_PER_BYTE * length if inner is True else 0)
            if offset + length > end:
                raise ModelFileError(f"{what} is not an ONNX model, or a truncated one")
            if isinstance(inner, dict) and length:
                if len(stack) >= _DEPTH:
                    raise ModelFileError(f"{what} has messages nested more than {_DEPTH} deep")
                stack.append((offset + length, end, known))
                stack.append((offset, offset + length, inner))
                continue
            offset += length
        else:
            raise ModelFileError(f"{what} is not an ONNX model, or a truncated one")
        stack.append((offset, end, known))
    budget.fits(cost, f"{what}, with {messages} messages and texts,")


def _too_many(what: str, budget: Budget) -> ModelSizeError:
    return budgets.over(
        f"{what} has more than {_MESSAGES_PER_NODE} messages and texts for each of {budget.limits.nodes} nodes",
        "import_nodes",
    )


def _varint(content: bytes, offset: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while offset < end and shift < 70:
        byte = content[offset]
        offset += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, offset
        shift += 7
    raise ModelFileError("the file is not an ONNX model, or a truncated one")


def _fields_of(descriptor: Any, made: dict[str, _Fields]) -> _Fields:
    """The fields of a message that hold messages, and those of packed integers."""
    if descriptor.full_name in made:
        return made[descriptor.full_name]
    fields = made[descriptor.full_name] = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            fields[field.number] = _fields_of(field.message_type, made)
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_INT32, field.CPPTYPE_UINT64):
            fields[field.number] = True
    return fields
